"""What looks for a sign, and the list of all that do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rlstab.bins import Run
from rlstab.bins import Sign as Sign
from rlstab.signs.curves import Curves, Metric
from rlstab.signs.shift import shift


@dataclass(frozen=True)
class Detector:
    """How a sign is found.

    Attributes:
        name: of the function that judges.
        title: of the sign.
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
        if len(metric.steps) < self.lines:
            return short(metric, self.lines)
        sign = self.judge(curves, metric)
        return replace(sign, from_start=sign.step == int(metric.steps[0])) if len(metric.steps) else sign


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


def short(metric: Metric, needed: int) -> Sign:
    """The judgement of a curve with too few values."""
    return Sign("", None, None, f"{metric.name} has {len(metric.steps)} values; {needed} are needed")


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
