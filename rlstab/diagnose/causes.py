"""From the signs of a run to what came first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlstab.diagnose.signs import SIGNS, Sign

#: By sign, the cause that it stands for when it is the first. A reward that falls with nothing before it, a gradient
#: out of proportion, NaN: the updates themselves are too large.
CAUSES: Mapping[str, str] = {
    "sampler_mismatch": "mismatch",
    "sampler_drift": "staleness",
    "truncation": "truncation",
    "entropy_floor": "entropy_collapse",
    "refused_steps": "learning_rate",
    "gradient_spikes": "learning_rate",
    "reward_fall": "learning_rate",
    "clipped": "trust_region",
    "entropy_blow_up": "entropy_blow_up",
    "zero_std_groups": "dead_groups",
}

#: Signs that begin within so many steps of each other begin together: the bins and the noise allow no finer order. Then
#: the one that stands first in :data:`CAUSES` counts, what explains the others before what others explain.
TOGETHER = 5

#: Answers that are cut off explain a reward that falls as those that end become fewer, not one that keeps less than
#: this share of what they keep.
EXPLAINED = 0.5

#: What follows when it does not come first: a dead policy has equal rewards, and writes what never ends.
FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "zero_std_groups": ("reward_fall", "truncation", "entropy_floor", "sampler_drift", "refused_steps"),
    "entropy_blow_up": ("reward_fall",),
}


@dataclass(frozen=True)
class First:
    """What came first.

    Attributes:
        cause: a value of :data:`CAUSES`.
        sign: by which it shows.
        later: the other signs, by step.
    """

    cause: str
    sign: Sign
    later: tuple[Sign, ...]


def first_of(signs: Sequence[Sign], interval: int = 1) -> First | None:
    """The first cause; None where no sign is there.

    Args:
        signs: every sign of the run.
        interval: steps between two lines of the log.
    """
    there = {sign.name: sign for sign in signs if sign.fired}
    together = max(TOGETHER, interval)
    candidates = [one for one in there.values() if not _follows(one, there, together)]
    if not candidates:
        return None
    earliest = min(_step(one) for one in candidates)
    among = [one for one in candidates if _step(one) <= earliest + together]
    first = min(among, key=lambda one: list(CAUSES).index(one.name))
    later = sorted((one for one in there.values() if one is not first), key=_step)
    return First(CAUSES[first.name], first, tuple(later))


def _follows(sign: Sign, there: Mapping[str, Sign], together: int) -> bool:
    """Whether another sign that is there explains this one."""
    if sign.name == "truncation" and "reward_fall" in there and sign.share is not None:
        fall = there["reward_fall"]
        left = 1.0 if fall.share is None else fall.share
        # a first line after step 1 is a mean over updates that may have broken the policy: two lines are together then
        late = _step(sign) > (1 if sign.first_line else together)
        near = 2 * together if sign.first_line else together
        return late and _step(fall) <= _step(sign) + near and left < EXPLAINED * sign.share
    before = [there[name] for name in FOLLOWS.get(sign.name, ()) if name in there]
    return any(_step(one) <= _step(sign) + together for one in before)


def _step(sign: Sign) -> int:
    return sign.step or 0


assert CAUSES.keys() == SIGNS.keys()
