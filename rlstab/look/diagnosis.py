"""The diagnosis of one run: what hurt it, what came first, and what else was seen."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlstab.bins import EMPTY, Run
from rlstab.logs.log import ALIASES
from rlstab.look.remedies import CAUSES, Remedy, remedies
from rlstab.report.formatting import setting
from rlstab.signs import SIGNS, Curves, Sign, signs
from rlstab.signs.metric import FEWEST, SHORTEST, Shift, lost_at_once
from rlstab.signs.reward import EQUAL, HARD, KEPT, SOLVED, died

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
        sign: the sign that indicates the cause.
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
        signs: those that are present.
        together: steps within which signs count as simultaneous.
    """
    candidates = [sign for sign in signs if not _is_explained(sign, signs, together)]
    if not candidates:
        return None
    earliest = min(map(_step, candidates))
    simultaneous = [sign for sign in candidates if _step(sign) <= earliest + together]
    gravest = [name for name in GRAVEST if any(sign.harm and sign.name == name for sign in simultaneous)]
    order = [*gravest, *CAUSES]
    return min(simultaneous, key=lambda sign: order.index(sign.name))


def _is_explained(sign: Sign, signs: Sequence[Sign], together: int) -> bool:
    """Whether a sign is what another one of the run leads to, or says less than another one."""
    shares = {other.name: other.share for other in signs if _step(other) <= _step(sign) + together}
    if sign.name == "truncation" and sign.share is not None and "reward_fall" in shares:
        # a policy that an update broke loses both its ends and its reward
        reward_share = shares["reward_fall"]
        return (1.0 if reward_share is None else reward_share) < EXPLAINED * sign.share
    leads_to_it, says_more = FOLLOWS.get(sign.name, ()), LESS.get(sign.name, ())
    return any(name in shares for name in leads_to_it) or any(other.name in says_more for other in signs)


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
        remedy: the text about the cause; None without one.
        settings: those to look at, with the values of the run: for the trainer that wrote the log, or for all.
        fired: the signs that are present, that of the cause first.
        observations: the other signs that are present, by step; without a cause, the one that says most comes first.
        solved: whether the reward is so high that most groups are solved.
        outcome: what the reward did, in words; empty without one.
        looked_at: signs that could be judged and are absent.
        unseen: signs that could not be judged, with the metrics that are missing, or because the log is too short.
        remarks: what could not be read, a log without known metrics, and steps without training that no sign reports.
    """

    log: Run
    first: First | None
    remedy: Remedy | None
    settings: tuple[str, ...]
    fired: tuple[Sign, ...]
    observations: tuple[Sign, ...]
    solved: bool
    outcome: str
    looked_at: tuple[Sign, ...]
    unseen: tuple[Sign, ...]
    remarks: tuple[str, ...]

    def verdict(self) -> str:
        """One sentence: what hurt the run, and when; or that nothing did."""
        if self.first and self.remedy:
            return f"first, at {self.log.unit} {self.first.sign.step}: {self.remedy.title}"
        if self.solved:
            return "solved"
        if self.observations:
            return f"no harm; {', '.join(SIGNS[sign.name].title for sign in self.observations)}"
        return "nothing found" if self.looked_at else "nothing found, because nothing could be judged"


def diagnose(log: Run) -> Diagnosis:
    """Diagnose a run."""
    curves = Curves(log)
    judgements = signs(curves)
    interval = int(min((np.median(np.diff(steps)) for steps, _ in log.metrics.values() if len(steps) > 1), default=1))
    first = first_of(judgements, interval)
    rest = [sign for sign in judgements if sign.fired and not (first and sign is first.sign)]
    lead = None if first else leading(rest, max(TOGETHER, interval))
    observations = tuple(sorted(rest, key=lambda sign: (sign is not lead, _step(sign))))
    fired = (first.sign, *observations) if first else observations
    remedy, solved = remedies()[first.cause] if first else None, first is None and is_solved(curves)
    return Diagnosis(
        log=log,
        first=first,
        remedy=remedy,
        fired=fired,
        observations=observations,
        solved=solved,
        outcome=reward_in_words(curves),
        looked_at=tuple(sign for sign in judgements if sign.fired is False),
        unseen=tuple(sign for sign in judgements if sign.fired is None),
        remarks=(*log.remarks, *_remarks(log, solved or any(sign.name in GRAVEST for sign in fired))),
        settings=tuple(_settings(remedy, log)) if remedy else (),
    )


def _settings(remedy: Remedy, log: Run) -> Iterator[str]:
    by_host = {"": names} if (names := remedy.settings.get(log.writer)) else remedy.settings
    for host, names in by_host.items():
        for name in names:
            value = log.setting_at(name)
            shown = setting(value) if isinstance(value, float) else value
            current = f" (here {shown})" if isinstance(shown, str | int) and not isinstance(shown, bool) else ""
            yield f"{f'{host}: ' * bool(host)}{name}{current}"


def is_solved(curves: Curves) -> bool:
    """Whether a reward of at most 1 is so high that most of its groups are solved."""
    reward = curves["reward/mean"]
    bounded = len(reward.steps) >= FEWEST and reward.values.max() <= 1
    return bool(bounded and reward.end >= SOLVED and curves["reward/zero_std_groups"].end > EQUAL)


def reward_in_words(curves: Curves) -> str:
    """What the reward did, as the end of a sentence; empty without enough of it."""
    reward = curves["reward/mean"]
    if len(reward.steps) < SHORTEST:
        return ""
    if is_solved(curves):
        return f"the reward is {reward.end:.3g} at the end"
    if step := died(curves, reward):
        return f"the reward fell from {reward.where(reward.steps < step).values.mean():.3g} to 0"
    if collapse := lost_at_once(reward, KEPT, HARD):
        return f"the reward fell from {collapse[1]:.3g} to {reward.end:.3g}"
    for direction, verb in ((True, "rose"), (False, "fell")):
        move = Shift(reward.values, rises=direction)
        if move.is_real and (reward.end > move.before) is direction:
            return f"the reward {verb} from {move.before:.3g} to {reward.end:.3g}"
    return f"the reward held at {float(reward.values.mean()):.3g}"


def _remarks(log: Run, accounted: bool) -> Iterator[str]:
    """A log without known metrics, and lines in which no group had a gradient, or it was 0.

    Args:
        log: the log of the run.
        accounted: whether a sign says why there is no gradient.
    """
    if not log.metrics.keys() - {"lr"}:
        metrics = dict.fromkeys(metric for detector in SIGNS.values() for metric in detector.reads)
        aliases = [next(iter(ALIASES[name]), name) for name in metrics if name in ALIASES]
        names = f"{', '.join(metrics)}, in TRL and verl {', '.join(aliases)}"
        yield f"it has no known metric. Log some of {names} and the like."
        return
    idle: set[int] = set()
    lines: set[int] = set()
    for name, no_gradient in (("reward/zero_std_groups", 1.0), ("gradient/norm", 0.0)):
        steps, values = log.metrics.get(name, EMPTY)
        lines |= set(steps.tolist())
        idle |= set(steps[values == no_gradient].tolist())
    if not accounted and len(idle) > IDLE * len(lines):
        yield (f"{len(idle)} of {len(lines)} lines of the log have no gradient: all groups are equal, or the norm is 0")
