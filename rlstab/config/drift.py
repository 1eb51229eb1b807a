"""With which settings the two policies that a method compares can differ in a run, and why not otherwise.

One table, read in two directions: to fill in what a run leaves open, and to find methods that cannot act.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rlstab.config.settings import OptimisationSettings


@dataclass(frozen=True)
class _Drift:
    """One pair of policies of :data:`rlstab.core.validate.DRIFT`.

    Attributes:
        differs: whether the two can differ, from ``old_logprobs``, whether ``refresh`` is ``step``, and whether a
            rollout makes several optimizer steps.
        why: why they are otherwise the same, with the cure.
        settings: with which they differ, if the run leaves these settings open.
    """

    differs: Callable[[str, bool, bool], bool]
    why: str
    settings: Mapping[str, str] = field(default_factory=dict)


#: By the names of :data:`rlstab.core.validate.DRIFT`.
_DRIFTS: Mapping[str, _Drift] = {
    "live": _Drift(
        lambda old, fresh, many_steps: many_steps or old == "rollout",
        "the ratio is 1 with one optimizer step per rollout. Set epochs, or old_logprobs: rollout.",
    ),
    "step": _Drift(
        lambda old, fresh, many_steps: fresh and (many_steps or old == "rollout"),
        "it compares old_logprobs with itself. Set refresh: step, and epochs above 1.",
        {"refresh": "step"},
    ),
    "sampler": _Drift(
        lambda old, fresh, many_steps: old == "recompute",
        "it compares the sampler with itself. Set old_logprobs: recompute.",
        {"old_logprobs": "recompute"},
    ),
    "start": _Drift(
        lambda old, fresh, many_steps: old == "recompute" or fresh,
        "it compares the sampler with itself. Set refresh: step.",
        {"old_logprobs": "recompute", "refresh": "step"},
    ),
}


def why_idle(drift: str, optimisation: OptimisationSettings) -> str | None:
    """Why the two policies that a method compares are the same in a run, with the cure; None if they can differ.

    Args:
        drift: one of :data:`rlstab.core.validate.DRIFT`.
        optimisation: resolved settings.
    """
    several_steps = optimisation.optimizer_steps_per_rollout > 1
    differs = _DRIFTS[drift].differs(str(optimisation.old_logprobs), optimisation.refresh == "step", several_steps)
    return None if differs else _DRIFTS[drift].why


def settings_for(drifts: Iterable[str], several_steps: bool) -> dict[str, str]:
    """The cheapest settings with which these policies can differ.

    Args:
        drifts: names in :data:`rlstab.core.validate.DRIFT`.
        several_steps: whether a rollout makes several optimizer steps; with one, a refresh at each step changes
            nothing.
    """
    settings: dict[str, str] = {}
    for drift in drifts:
        settings |= _DRIFTS[drift].settings
    return settings if several_steps else {name: value for name, value in settings.items() if name != "refresh"}
