"""What is to be said of one run: what came first, what followed, what was looked at, what cannot be seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlstab.bins import EMPTY
from rlstab.diagnose.metric_aliases import ALIASES
from rlstab.diagnose.readers import read_logs
from rlstab.diagnose.remedies import Remedy, remedies
from rlstab.diagnose.run_log import RunLog
from rlstab.errors import ReportError
from rlstab.signs import SIGNS, Sign, signs

#: By sign, the cause that it stands for when it is the first. A reward that falls with nothing before it, a gradient
#: out of proportion, NaN: the updates themselves are too large.
CAUSES: Mapping[str, str] = {
    "sampler_mismatch": "mismatch",
    "sampler_drift": "staleness",
    "shrunk_steps": "shrunk_steps",
    "truncation": "truncation",
    "length_without_gain": "length",
    "held_out": "reward_hacking",
    "components": "reward_parts",
    "repetition": "repetition",
    "kl_drift": "kl_drift",
    "entropy_floor": "entropy_collapse",
    "refused_steps": "learning_rate",
    "gradient_spikes": "learning_rate",
    "reward_fall": "learning_rate",
    "clipped": "trust_region",
    "entropy_blow_up": "entropy_blow_up",
    "zero_std_groups": "dead_groups",
    "difficulty": "difficulty",
    "no_gradient": "no_gradient",
    "plateau": "plateau",
}

#: Signs that begin within this many steps of each other begin together: the bins and the noise allow no finer order.
#: Then the one that stands first in :data:`CAUSES` counts, what explains the others before what others explain.
TOGETHER = 5

#: Answers that are cut off explain a reward that falls as those that end become fewer, not one that keeps less than
#: this share of what they keep.
EXPLAINED = 0.5

#: What follows when it does not come first: a dead policy has equal rewards and no gradient, and never ends.
_DEAD = ("reward_fall", "truncation", "entropy_floor", "sampler_drift", "refused_steps")
FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "zero_std_groups": _DEAD,
    "difficulty": _DEAD,
    "no_gradient": (*_DEAD, "zero_std_groups", "difficulty"),
    "entropy_blow_up": ("reward_fall",),
}

#: What says the same with less of the cause, whichever came first. A plateau is what is left to say.
LESS: Mapping[str, tuple[str, ...]] = {
    "held_out": ("length_without_gain", "components"),
    "difficulty": ("reward_fall",),
    "plateau": tuple(CAUSES.keys() - {"plateau"}),
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
    candidates = [sign for sign in there.values() if not _follows(sign, there, together)]
    if not candidates:
        return None
    earliest = min(map(_step, candidates))
    among = [sign for sign in candidates if _step(sign) <= earliest + together]
    first = min(among, key=lambda sign: list(CAUSES).index(sign.name))
    later = sorted((sign for sign in there.values() if sign is not first), key=_step)
    return First(CAUSES[first.name], first, tuple(later))


def _follows(sign: Sign, there: Mapping[str, Sign], together: int) -> bool:
    """Whether another sign that is there explains this one."""
    if sign.name == "truncation" and "reward_fall" in there and sign.share is not None:
        fall = there["reward_fall"]
        left = 1.0 if fall.share is None else fall.share
        # a first line after step 1 is a mean over updates that may have broken the policy: two lines are together then
        late = _step(sign) > (1 if sign.first_line else together)
        near = 2 * together if sign.first_line else together
        # nothing is left of a policy that an update broke: neither end nor reward
        explains = sign.sudden or (late and left < EXPLAINED * sign.share)
        return explains and _step(fall) <= _step(sign) + near
    if there.keys() & set(LESS.get(sign.name, ())):
        return True
    before = [there[name] for name in FOLLOWS.get(sign.name, ()) if name in there]
    return any(_step(other) <= _step(sign) + together for other in before)


def _step(sign: Sign) -> int:
    return sign.step or 0


#: Where more lines of the log than this share trained nothing, a remark says so.
IDLE = 0.25


@dataclass(frozen=True)
class Diagnosis:
    """One run.

    Attributes:
        log: what was read.
        first: what came first; None where no sign is there.
        looked_at: signs that could be judged and are not there.
        unseen: those that could not be judged, with the metrics that would tell, or that the log is too short.
    """

    log: RunLog
    first: First | None
    looked_at: tuple[Sign, ...]
    unseen: tuple[Sign, ...]

    @property
    def remarks(self) -> tuple[str, ...]:
        """What could not be read, and steps in which nothing was trained where no sign says so."""
        idle, lines = _idle(self.log)
        fired = {sign.name for sign in (self.first.sign, *self.first.later)} if self.first else set()
        if idle <= IDLE * lines or "zero_std_groups" in fired:
            return self.log.remarks
        told = f"nothing was trained in {idle} of {lines} lines of the log: no group had a gradient, or its norm was 0"
        return (*self.log.remarks, told)

    @property
    def remedy(self) -> Remedy | None:
        """What is said of the cause."""
        return remedies()[self.first.cause] if self.first else None

    def told(self) -> str:
        """One sentence: what came first, and when."""
        if self.first and self.remedy:
            return f"first, at {self.log.unit} {self.first.sign.step}: {self.remedy.title}"
        return "nothing found" if self.looked_at else "nothing found, because nothing could be looked at"

    def as_json(self) -> dict[str, Any]:
        """For machines: see docs/how-to/diagnose.md."""
        remedy = self.remedy
        fired = (self.first.sign, *self.first.later) if self.first else ()
        return {
            "run": self.log.title,
            "writer": self.log.writer,
            "unit": self.log.unit,
            "steps": self.log.rollouts,
            "metrics": dict(self.log.names),
            "cause": self.first.cause if self.first else None,
            "title": remedy.title if remedy else None,
            "step": self.first.sign.step if self.first else None,
            "signs": [{"sign": sign.name, "step": sign.step, "text": sign.text} for sign in fired],
            "looked_at": [{"sign": sign.name, "text": sign.text} for sign in self.looked_at],
            "unseen": [{"sign": sign.name, "why": sign.text} for sign in self.unseen],
            "methods": list(remedy.methods) if remedy else [],
            "stages": list(remedy.stages) if remedy else [],
            "settings": {host: list(names) for host, names in remedy.settings.items()} if remedy else {},
            "evidence": [
                {"method": method, "figures": [*map(dataclasses.asdict, figures)]}
                for method, figures in (remedy.evidence if remedy else ())
            ],
            "remarks": list(self.remarks),
        }


def diagnose(log: RunLog) -> Diagnosis:
    """What came first in a run."""
    every = signs(log)
    return Diagnosis(
        log=log,
        first=first_of(every, _interval(log)),
        looked_at=tuple(sign for sign in every if sign.fired is False),
        unseen=tuple(sign for sign in every if sign.fired is None),
    )


def diagnose_paths(paths: Sequence[str | Path]) -> list[Diagnosis]:
    """Every run that was logged under some paths.

    Raises:
        ReportError: a path holds no log that can be read, or a log has no metric to look at.
    """
    logs = [log for path in paths for log in read_logs(path)]
    for log in logs:
        if not log.metrics.keys() - {"lr"}:
            raise ReportError(f"{log.title}: no metric that is known here. {_wanted()}")
    return [diagnose(log) for log in logs]


def _idle(log: RunLog) -> tuple[int, int]:
    """Lines of the log in which no group had a gradient or the gradient was 0, and all that tell."""
    idle: set[int] = set()
    lines: set[int] = set()
    for name, nothing in (("reward/zero_std_groups", 1.0), ("gradient/norm", 0.0)):
        steps, values = log.metrics.get(name, EMPTY)
        lines |= set(steps.tolist())
        idle |= set(steps[values == nothing].tolist())
    return len(idle), len(lines)


def _interval(log: RunLog) -> int:
    """Steps between two lines of the log."""
    gaps = [np.median(np.diff(steps)) for steps, _ in log.metrics.values() if len(steps) > 1]
    return int(min(gaps, default=1))


def _wanted() -> str:
    wanted = dict.fromkeys(metric for detector in SIGNS.values() for metric in detector.reads)
    others = [next(iter(ALIASES[name]), name) for name in wanted if name in ALIASES]
    return f"Log some of {', '.join(wanted)}, in TRL and verl {', '.join(others)} and the like."
