"""The curves of a run, what looks for a sign in them, and the list of all that do."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rlstab.bins import EMPTY, Run, evaluated
from rlstab.bins import Sign as Sign
from rlstab.signs.metric import SHORTEST
from rlstab.signs.metric import Metric as Metric

#: Names of rewards for the format, whatever the task; the other parts of a reward are about the task.
FORMS = re.compile(
    "format|length|overlong|penal|punish|short|brev|concis|xml|tag|style|repetition|language|think|steps", re.IGNORECASE
)
#: Metrics ``reward/...`` that are not one of several rewards.
TOTALS = {f"reward/{name}" for name in ("mean", "std", "min", "max", "true", "shaped_mean", "zero_std_groups")}
#: Any of several rewards, as a metric that a detector reads.
PARTS = "reward/NAME"


class Curves:
    """The metrics of a run, each read once.

    Attributes:
        run: the run that the metrics are of.
        parts: several rewards, by name.
        tasks: the rewards for the task; the whole reward if none is separate.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._read: dict[str, Metric] = {}
        names = (name for name in run.metrics if re.fullmatch("reward/[^/]+", name) and name not in TOTALS)
        self.parts = [self[name] for name in sorted(names)]
        self.tasks = [part for part in self.parts if not FORMS.search(part.name)] or [self["reward/mean"]]

    def __getitem__(self, name: str) -> Metric:
        if name not in self._read:
            steps, values = self.run.metrics.get(name, EMPTY)
            if self.run.evaluations and not len(steps):
                steps, values = evaluated(self.run, name)
            used = np.isfinite(values) & (steps > 0)
            self._read[name] = Metric(name, steps[used], values[used])
        return self._read[name]


def unjudged(metric: Metric, lines: int) -> Sign | None:
    """The judgement of a curve with fewer values than are needed; None if it has enough."""
    if len(metric.steps) >= lines:
        return None
    text = f"{metric.name} has {len(metric.steps)} values; {lines} are needed"
    return Sign("", None, None, text if len(metric.steps) else f"no {metric.name}")


@dataclass(frozen=True)
class Detector:
    """How a sign is found.

    Attributes:
        name: the function that judges.
        title: what the sign is called.
        definition: says when it is present.
        reads: metrics, of which the first that a run has is judged.
        lines: number of values that the metric needs.
        judge: the judgement from the curves of a run and that metric.
    """

    name: str
    title: str
    definition: str
    reads: tuple[str, ...]
    lines: int
    judge: Callable[[Curves, Metric], Sign]

    def detect(self, run: Run | Curves) -> Sign:
        """The sign in a run."""
        curves = run if isinstance(run, Curves) else Curves(run)
        if self.name in curves.run.judged:  # on lines that a results file no longer has
            return curves.run.judged[self.name]
        metrics = (metric for name in self.reads for metric in (curves.parts if name == PARTS else [curves[name]]))
        metric = next((metric for metric in metrics if len(metric.steps)), None)
        if metric is None:
            return Sign("", None, None, f"no {' or '.join(self.reads)}")
        sign = unjudged(metric, self.lines) or self.judge(curves, metric)
        return replace(sign, from_start=sign.step == int(metric.steps[0]))


#: The detectors by name, in the order in which a reader looks at them.
SIGNS: dict[str, Detector] = {}
#: The detectors of signs that a method may prevent, which the report counts.
COUNTED: dict[str, Detector] = {}


def detector(
    title: str,
    definition: str,
    *reads: str,
    lines: int = SHORTEST,
    by_itself: bool = True,
    counted: bool = False,
) -> Callable[[Callable[[Curves, Metric], Sign]], Detector]:
    """Register a judgement under the name of its function, with the fields of :class:`Detector`.

    A sign ``by_itself`` is looked for in each log; one that is ``counted``, in each run of a report.
    """

    def register(judge: Callable[[Curves, Metric], Sign]) -> Detector:
        registered = Detector(judge.__name__, title, definition, reads, lines, judge)
        if counted:
            COUNTED[judge.__name__.removeprefix("growing_")] = registered
        if by_itself:
            SIGNS[judge.__name__] = registered
        return registered

    return register


def signs(run: Run | Curves) -> list[Sign]:
    """The judgement of every detector about a run so far, in the order of :data:`SIGNS`."""
    curves = run if isinstance(run, Curves) else Curves(run)  # each curve is read once for all detectors
    return [replace(detector.detect(curves), name=name) for name, detector in SIGNS.items()]


def counted_signs(run: Run) -> dict[str, Sign]:
    """The judgement of every detector that the report counts, by its name, for a copy of a run with fewer values."""
    curves = Curves(run)
    return {detector.name: detector.detect(curves) for detector in COUNTED.values()}
