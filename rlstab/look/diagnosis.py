"""The diagnosis of one run: what hurt it, what came first, and what else was seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlstab.bins import EMPTY, Run
from rlstab.logs.metric_aliases import ALIASES
from rlstab.look.remedies import CAUSES, Remedy, remedies
from rlstab.report.formatting import setting
from rlstab.report.runs import setting_of
from rlstab.signs import SIGNS, Curves, Sign, is_solved, reward_in_words, signs

#: Signs that begin within this many steps of each other count as simultaneous: noise allows no finer order. Then the
#: graver one counts, then the first in :data:`CAUSES`, in which signs that explain others precede them.
TOGETHER = 5

#: Simultaneous signs that leave nothing to explain: without finite numbers, or without a gradient, nothing is trained.
GRAVEST = ("refused_steps", "no_gradient", "zero_std_groups", "difficulty")

#: Truncated answers explain a reward that falls along with the share of answers that end, but not one that keeps less
#: than this multiple of that share.
EXPLAINED = 0.5

#: Signs that are consequences unless they come first: a dead policy has equal rewards and no gradient, and never ends.
_DEAD = ("reward_fall", "truncation", "entropy_floor", "sampler_drift", "refused_steps")
FOLLOWS: Mapping[str, tuple[str, ...]] = {
    "zero_std_groups": _DEAD,
    "difficulty": _DEAD,
    "no_gradient": (*_DEAD, "zero_std_groups", "difficulty"),
    "entropy_blow_up": ("reward_fall",),
}

#: Signs that say the same but less about the cause, whichever came first. A plateau is named last.
LESS: Mapping[str, tuple[str, ...]] = {
    "held_out": ("length_without_gain", "components"),
    "length_without_gain": ("truncation",),
    "difficulty": ("reward_fall",),
    "plateau": tuple(CAUSES.keys() - {"plateau"}),
}


@dataclass(frozen=True)
class First:
    """The first cause.

    Attributes:
        cause: a value of :data:`CAUSES`.
        sign: that indicates it.
        harm: the first sign that the run was hurt, which may be that sign.
    """

    cause: str
    sign: Sign
    harm: Sign


def first_of(signs: Sequence[Sign], interval: int = 1) -> First | None:
    """The first cause; None if the run was not hurt.

    Args:
        signs: every sign of the run.
        interval: steps between two lines of the log.
    """
    fired = [sign for sign in signs if sign.fired]
    harms = sorted((sign for sign in fired if sign.harm), key=_step)
    if not harms:
        return None
    simultaneous = max(TOGETHER, interval)
    # what comes after the harm did not do it, nor what was there all along
    latest = _step(harms[0]) + simultaneous
    before = [sign for sign in fired if sign.harm or (_step(sign) <= latest and not sign.from_start)]
    sign = leading(before, simultaneous) or harms[0]
    return First(CAUSES[sign.name], sign, harms[0])


def leading(signs: Sequence[Sign], together: int = TOGETHER) -> Sign | None:
    """The sign that came first; None without any.

    Args:
        signs: that are present.
        together: steps within which signs count as simultaneous.
    """
    by_name = {sign.name: sign for sign in signs}
    candidates = [sign for sign in signs if not _follows(sign, by_name, together)]
    if not candidates:
        return None
    earliest = min(map(_step, candidates))
    simultaneous = [sign for sign in candidates if _step(sign) <= earliest + together]
    return min(simultaneous, key=lambda sign: (_gravity(sign), list(CAUSES).index(sign.name)))


def _gravity(sign: Sign) -> int:
    return GRAVEST.index(sign.name) if sign.harm and sign.name in GRAVEST else len(GRAVEST)


def _follows(sign: Sign, signs: Mapping[str, Sign], together: int) -> bool:
    """Whether another sign of the run explains this one."""

    def is_earlier(name: str) -> bool:
        return name in signs and _step(signs[name]) <= _step(sign) + together

    if sign.name == "truncation" and sign.share is not None and is_earlier("reward_fall"):
        # a policy that an update broke loses both its ends and its reward
        reward_share = signs["reward_fall"].share
        return (1.0 if reward_share is None else reward_share) < EXPLAINED * sign.share
    explained = any(name in signs for name in LESS.get(sign.name, ()))
    return explained or any(map(is_earlier, FOLLOWS.get(sign.name, ())))


def _step(sign: Sign) -> int:
    return sign.step or 0


#: If more than this share of the lines of a log trained nothing, a remark says so.
IDLE = 0.25


@dataclass(frozen=True)
class Diagnosis:
    """One run.

    Attributes:
        log: the run as it was logged.
        first: what hurt it first; None if it was not hurt, and then no advice is given.
        observations: the other signs that are present, by step; without a cause, the one that says most comes first.
        solved: whether the reward is so high that most groups are solved.
        outcome: what the reward did, in words; empty without one.
        looked_at: signs that could be judged and are absent.
        unseen: signs that could not be judged, with the metrics that are missing, or because the log is too short.
    """

    log: Run
    first: First | None
    observations: tuple[Sign, ...]
    solved: bool
    outcome: str
    looked_at: tuple[Sign, ...]
    unseen: tuple[Sign, ...]

    @property
    def remarks(self) -> tuple[str, ...]:
        """What could not be read, a log without known metrics, and steps without training that no sign reports."""
        if not self.log.metrics.keys() - {"lr"}:
            return (*self.log.remarks, f"it has no known metric. {_wanted()}")
        idle, lines = _idle(self.log)
        if self.solved or idle <= IDLE * lines or any(sign.name in GRAVEST for sign in self.fired):
            return self.log.remarks
        remark = f"{idle} of {lines} lines of the log have no gradient: all groups are equal, or the norm is 0"
        return (*self.log.remarks, remark)

    @property
    def fired(self) -> tuple[Sign, ...]:
        """The signs that are present, that of the cause first."""
        return (self.first.sign, *self.observations) if self.first else self.observations

    @property
    def remedy(self) -> Remedy | None:
        """The text about the cause."""
        return remedies()[self.first.cause] if self.first else None

    @property
    def settings(self) -> Iterator[str]:
        """The settings to look at, with the values of the run: for the trainer that wrote the log, or for all."""
        by_host = self.remedy.settings if self.remedy else {}
        if names := by_host.get(self.log.writer):
            by_host = {"": names}
        for host, names in by_host.items():
            for name in names:
                value = setting_of(self.log.config, name)
                shown = setting(value) if isinstance(value, float) else value
                current = f" (here {shown})" if isinstance(shown, str | int) and not isinstance(shown, bool) else ""
                yield f"{f'{host}: ' * bool(host)}{name}{current}"

    def verdict(self) -> str:
        """One sentence: what hurt the run, and when; or that nothing did."""
        if self.first and self.remedy:
            return f"first, at {self.log.unit} {self.first.sign.step}: {self.remedy.title}"
        if self.solved:
            return "solved"
        if self.observations:
            return f"no harm; {', '.join(SIGNS[sign.name].title for sign in self.observations)}"
        return "nothing found" if self.looked_at else "nothing found, because nothing could be judged"

    def as_json(self) -> dict[str, Any]:
        """The diagnosis for machines; see docs/how-to/diagnose.md."""
        remedy = self.remedy
        return {
            "run": self.log.title,
            "writer": self.log.writer,
            "unit": self.log.unit,
            "steps": self.log.rollouts,
            "metrics": dict(self.log.names),
            "cause": self.first.cause if self.first else None,
            "title": remedy.title if remedy else None,
            "step": self.first.sign.step if self.first else None,
            "harm": {"sign": self.first.harm.name, "step": self.first.harm.step} if self.first else None,
            "solved": self.solved,
            "outcome": self.outcome,
            "observations": [
                {"sign": sign.name, "cause": CAUSES[sign.name], "step": sign.step} for sign in self.observations
            ],
            "signs": [{"sign": sign.name, "step": sign.step, "text": sign.text} for sign in self.fired],
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


def diagnose(log: Run) -> Diagnosis:
    """Diagnose a run."""
    curves, judgements = Curves(log), signs(log)
    outcome, solved, interval = reward_in_words(curves), is_solved(curves), _interval(log)
    first = first_of(judgements, interval)
    rest = [sign for sign in judgements if sign.fired and not (first and sign is first.sign)]
    lead = None if first else leading(rest, max(TOGETHER, interval))
    return Diagnosis(
        log=log,
        first=first,
        observations=tuple(sorted(rest, key=lambda sign: (sign is not lead, _step(sign)))),
        solved=first is None and solved,
        outcome=outcome,
        looked_at=tuple(sign for sign in judgements if sign.fired is False),
        unseen=tuple(sign for sign in judgements if sign.fired is None),
    )


def _idle(log: Run) -> tuple[int, int]:
    """The number of lines in which no group had a gradient or the gradient was 0, and of lines that record either."""
    idle: set[int] = set()
    lines: set[int] = set()
    for name, no_gradient in (("reward/zero_std_groups", 1.0), ("gradient/norm", 0.0)):
        steps, values = log.metrics.get(name, EMPTY)
        lines |= set(steps.tolist())
        idle |= set(steps[values == no_gradient].tolist())
    return len(idle), len(lines)


def _interval(log: Run) -> int:
    """Steps between two lines of the log."""
    gaps = [np.median(np.diff(steps)) for steps, _ in log.metrics.values() if len(steps) > 1]
    return int(min(gaps, default=1))


def _wanted() -> str:
    metrics = dict.fromkeys(metric for detector in SIGNS.values() for metric in detector.reads)
    aliases = [next(iter(ALIASES[name]), name) for name in metrics if name in ALIASES]
    return f"Log some of {', '.join(metrics)}, in TRL and verl {', '.join(aliases)} and the like."
