"""The curves of a run, what looks for a sign in them, and the list of all that do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlstab.bins import EMPTY, Run
from rlstab.bins import Sign as Sign
from rlstab.signs.shift import shift

#: Names of rewards for the format, whatever the task; the other parts of a reward are about the task.
FORMS = re.compile(
    "format|length|overlong|penal|punish|short|brev|concis|xml|tag|style|repetition|language|think|steps", re.IGNORECASE
)
#: Metrics ``reward/...`` that are not one of several rewards.
TOTALS = {f"reward/{name}" for name in ("mean", "std", "min", "max", "true", "shaped_mean", "zero_std_groups")}
#: Any of several rewards, as a metric that a detector reads.
PARTS = "reward/NAME"
#: Lines over which an end is averaged, at least; one line is an outlier, two may be.
FEW = 3
#: Lines of a smooth value.
NEIGHBOURS = 5


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric of a run.

    Attributes:
        name: its name.
        steps, values: as logged; finite.
    """

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    @cached_property
    def start(self) -> float:
        """Its mean over the first tenth of the lines."""
        return float(self.values[: self._tenth].mean()) if len(self.values) else 0.0

    @cached_property
    def end(self) -> float:
        """Its mean over the last tenth of the lines."""
        return float(self.values[-self._tenth :].mean()) if len(self.values) else 0.0

    @property
    def _tenth(self) -> int:
        return max(FEW, len(self.values) // 10)

    @cached_property
    def smooth(self) -> NDArray[np.float64]:
        """Its means over a few neighbours."""
        sums = np.convolve(self.values, np.ones(NEIGHBOURS), "same")
        return np.asarray(sums / np.convolve(np.ones(len(self.values)), np.ones(NEIGHBOURS), "same"))

    @property
    def bottom(self) -> float:
        """The value from which a share of it is counted: 0; or of rewards below 0, -1, or their lowest level."""
        lowest = float(self.smooth.min())
        return min(lowest, -1.0) if lowest < 0 else 0.0

    def begins(self, level: float, rises: bool) -> int:
        """The step from which the values are beyond a level for good.

        It begins the tail of the curve whose excess over the level has the largest sum: a single value on the other
        side does not end a state, and a single one before does not begin it.
        """
        excess = self.values - level if rises else level - self.values
        return int(self.steps[len(excess) - 1 - int(np.cumsum(excess[::-1]).argmax())])

    def where(self, chosen: NDArray[np.bool_]) -> Metric:
        """Some of its lines."""
        return Metric(self.name, self.steps[chosen], self.values[chosen])

    def at(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Its smooth values at other steps, interpolated."""
        return np.asarray(np.interp(steps, self.steps, self.smooth))


class Curves:
    """The metrics of a run, each read once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._read: dict[str, Metric] = {}

    def __getitem__(self, name: str) -> Metric:
        if name not in self._read:
            steps, values = self.run.metrics.get(name, EMPTY)
            if name.startswith("eval/") and not len(steps):
                records = [record for record in self.run.evaluations if record["rollout"] and name in record]
                steps = np.array([record["rollout"] for record in records], np.int64)
                values = np.array([record[name] for record in records], np.float64)
            finite = np.isfinite(values)
            self._read[name] = Metric(name, steps[finite], values[finite])
        return self._read[name]

    def named(self, name: str) -> Iterator[Metric]:
        """The metric of a name; each of several rewards for :data:`PARTS`."""
        yield from self.parts if name == PARTS else [self[name]]

    @property
    def parts(self) -> list[Metric]:
        """Several rewards of a run, by name."""
        names = (name for name in self.run.metrics if re.fullmatch("reward/[^/]+", name) and name not in TOTALS)
        return [self[name] for name in sorted(names)]

    @property
    def tasks(self) -> list[Metric]:
        """The rewards for the task; the whole reward if none is separate."""
        return [part for part in self.parts if not FORMS.search(part.name)] or [self["reward/mean"]]


@dataclass(frozen=True)
class Detector:
    """How a sign is found.

    Attributes:
        name: the function that judges.
        title: what the sign is called.
        definition: when it is present.
        unseen: what cannot be seen without its metrics, as the end of a sentence.
        reads: metrics, of which the first that a run has is judged.
        lines: number of values that the metric needs.
        judge: the judgement from the curves of a run and that metric.
    """

    name: str
    title: str
    definition: str
    unseen: str
    reads: tuple[str, ...]
    lines: int
    judge: Callable[[Curves, Metric], Sign]

    def detect(self, run: Run | Curves) -> Sign:
        """The sign in a run."""
        curves = run if isinstance(run, Curves) else Curves(run)
        if self.name in curves.run.judged:  # on lines that a results file no longer has
            return curves.run.judged[self.name]
        metric = next((metric for name in self.reads for metric in curves.named(name) if len(metric.steps)), None)
        if metric is None:
            return missing(*self.reads)
        sign = unjudged(metric, self.lines) or self.judge(curves, metric)
        return replace(sign, from_start=sign.step == int(metric.steps[0]))


#: The detectors by name, in the order in which a reader looks at them.
SIGNS: dict[str, Detector] = {}
#: The detectors of signs that a method may prevent, which the report counts.
COUNTED: dict[str, Detector] = {}


def detector(
    title: str,
    definition: str,
    unseen: str,
    *reads: str,
    lines: int,
    by_itself: bool = True,
    counted: bool = False,
) -> Callable[[Callable[[Curves, Metric], Sign]], Detector]:
    """Register a judgement under the name of its function, with the fields of :class:`Detector`.

    A sign ``by_itself`` is looked for in each log; one that is ``counted``, in each run of a report.
    """

    def register(judge: Callable[[Curves, Metric], Sign]) -> Detector:
        registered = Detector(judge.__name__, title, definition, unseen, reads, lines, judge)
        if counted:
            COUNTED[judge.__name__.removeprefix("growing_")] = registered
        if by_itself:
            SIGNS[judge.__name__] = registered
        return registered

    return register


def signs(run: Run) -> list[Sign]:
    """The judgement of every detector about a run so far, in the order of :data:`SIGNS`."""
    curves = Curves(run)  # each curve is read once for all detectors
    return [replace(detector.detect(curves), name=name) for name, detector in SIGNS.items()]


def counted_signs(run: Run) -> dict[str, Sign]:
    """The judgement of every detector that the report counts, by its name, for a copy of a run with fewer values."""
    return {detector.name: detector.detect(run) for detector in COUNTED.values()}


def missing(*names: str) -> Sign:
    """The judgement without any of some metrics."""
    return Sign("", None, None, f"no {' or '.join(names)}")


def unjudged(metric: Metric, lines: int) -> Sign | None:
    """The judgement of a curve with fewer values than are needed; None if it has enough."""
    if len(metric.steps) >= lines:
        return None
    text = f"{metric.name} has {len(metric.steps)} values; {lines} are needed"
    return Sign("", None, None, text) if len(metric.steps) else missing(metric.name)


def moved(
    metric: Metric, text: str, level: Callable[[float], float], *, rises: bool = False, harm: bool = False
) -> Sign:
    """The judgement whether a curve ends beyond a level, and has got there by more than chance.

    Args:
        metric: the curve.
        text: with ``{end}`` and ``{before}``.
        level: from the level before the move.
        rises: whether to look for a rise.
        harm: whether it hurts the run.
    """
    change = shift(metric.values, rises=rises)
    limit = level(change.before)
    text = text.format(end=f"{metric.end:.3g}", before=f"{change.before:.3g}")
    if not (metric.end > limit if rises else metric.end < limit) or not change.is_real:
        return absent(text)
    share = metric.end / change.before if change.before else None
    return present(metric.begins(limit, rises), text, share, harm=harm)


def absent(text: str) -> Sign:
    """The judgement that a sign is absent."""
    return Sign("", False, None, text)


def present(step: int, text: str, share: float | None = None, *, harm: bool = False) -> Sign:
    """The judgement that a sign is present."""
    return Sign("", True, step, text, share, harm)
