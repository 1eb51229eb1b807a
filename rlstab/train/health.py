"""Whether a run learns anything: why not, and what to look at.

An optimizer step without any gradient is skipped and one with NaN or Inf is refused, both without harm, so a run in
which nothing else happens goes on to its end. Somebody should hear of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: Rollouts after which something is said.
WINDOW = 10

#: Of the rollouts, what must be so.
SHARE = 0.9

#: What a rollout recorded: a line of ``metrics.jsonl``.
Values = Mapping[str, Any]


class Health:
    """Watches the rollouts of a run as they come; each cause is told once.

    Example:
        >>> health = Health()
        >>> nothing = {"reward/mean": 0.0, "reward/zero_std_groups": 1.0, "optimizer_steps/skipped": 1}
        >>> said = [line for _ in range(10) for line in health.see(nothing)]
        >>> print(said[0][:71])
        nothing learnt in 10 of 10 rollouts: every reward was 0, so every advan
    """

    def __init__(self) -> None:
        self._first: Values | None = None
        self._last: deque[Values] = deque(maxlen=WINDOW)
        self._told: set[str] = set()

    def see(self, values: Values) -> list[str]:
        """What to tell after one more rollout, a line each: nothing in most of them."""
        self._first = self._first or values
        self._last.append(values)
        if len(self._last) < WINDOW:
            return []
        found = {name: text for name, text in _causes(list(self._last), self._first) if name not in self._told}
        self._told |= found.keys()
        return [f"nothing learnt in {text}" for text in found.values()]


def summary(rollouts: Sequence[Values]) -> list[str]:
    """What to look at after a whole run, a line each; nothing where something was learnt."""
    return [f"this run learnt nothing in {text}" for _, text in _causes(rollouts, rollouts[0])] if rollouts else []


def _causes(rollouts: Sequence[Values], first: Values) -> list[tuple[str, str]]:
    """Name and text of each cause that most rollouts share; the first is the deepest."""

    def mostly(holds: Callable[[Values], bool]) -> int:
        count = sum(map(holds, rollouts))
        return count if count >= SHARE * len(rollouts) else 0

    def told(name: str, count: int, why: str, look: str) -> tuple[str, str]:
        return name, f"{count} of {len(rollouts)} rollouts: {why}. {look}"

    idle = mostly(lambda one: not _taught(one))
    if count := mostly(lambda one: _is(one, "lr", lambda lr: lr == 0)):
        return [told("lr", count, "the learning rate was 0", "Look at optimisation.lr and warmup_optimizer_steps.")]
    if count := mostly(lambda one: bool(one.get("optimizer_steps/refused")) and "gradient/norm" not in one):
        rates = [float(one["lr"]) for one in (first, *rollouts) if _is(one, "lr", math.isfinite)]
        rate = f" (it was {rates[0]:g})" if rates else ""
        look = f"Lower optimisation.lr{rate}, try optimisation.precision: fp32, and look at the rewards for NaN."
        return [told("refused", count, "their optimizer steps were refused over NaN or Inf", look)]
    if not idle:
        return []
    if count := mostly(lambda one: _is(one, "response/length", lambda length: length <= 1)):
        look = "Look at samples.jsonl, rollout.stop, and whether the model ends every answer at once."
        return [told("length", count, "every response had at most one token", look)]
    equal = mostly(lambda one: _is(one, "reward/zero_std_groups", lambda share: share == 1))
    if equal and mostly(lambda one: _is(one, "reward/mean", lambda reward: reward == 0)):
        why = "every reward was 0, so every advantage was"
        return [told("zero", equal, why, _why_zero(rollouts, first))]
    if equal:
        look = (
            "Look at the scores in samples.jsonl; take harder or easier prompts, a higher rollout.temperature, or a "
            "larger rollout.group."
        )
        return [told("equal", equal, "all rewards of each group were equal, so every advantage was 0", look)]
    dropped = mostly(lambda one: _is(one, "tokens/kept", lambda share: share == 0))
    why = "the methods dropped every token" if dropped else "no optimizer step had a gradient"
    look = "Look at what each method does with `rlstab check`, at the advantages, and at tokens/live in metrics.jsonl."
    return [told("silent", idle, why, look)]


def _why_zero(rollouts: Sequence[Values], first: Values) -> str:
    """What to look at, by what was seen besides."""
    found = []
    if _is(first, "reward/mean", lambda reward: reward > 0):
        rate = f" (it was {first['lr']:g})" if _is(first, "lr", math.isfinite) else ""
        found.append(f"The first rollout had rewards: the policy was lost since. Lower optimisation.lr{rate}.")
    if failed := sum(int(one.get(name) or 0) for one in rollouts for name in ("scorer/errors", "scorer/timeouts")):
        found.append(f"The scorer failed on {failed} samples: look at its errors and at task.time_limit.")
    if all(_is(one, "response/ended", lambda share: share < 0.1) for one in rollouts):
        found.append("Hardly a response ended by itself: raise rollout.max_new_tokens, or set rollout.stop.")
    found.append(
        "Look in samples.jsonl whether a right answer would be found: task.answer_pattern, task.prompt_template and "
        "rollout.chat; else start from easier prompts or a stronger model."
    )
    return " ".join(found)


def _taught(values: Values) -> bool:
    """Whether an optimizer step was made in which the advantage of some token counted: a penalty alone is no lesson."""
    live = "tokens/live" not in values or _is(values, "tokens/live", lambda share: share > 0)
    return live and _is(values, "gradient/norm", lambda norm: norm > 0)


def _is(values: Values, name: str, holds: Callable[[float], bool]) -> bool:
    """Whether a metric is there, is a number, and is so; NaN is null in records."""
    value = values.get(name)
    return isinstance(value, int | float) and not math.isnan(value) and holds(value)
