"""What a sign is, and the list of the detectors that look for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rlstab.bins import Run
from rlstab.signs.curves import Curves, Metric


@dataclass(frozen=True)
class Sign:
    """The judgement of one detector about one run.

    Attributes:
        name: a key of :data:`SIGNS`.
        fired: whether the sign is present; None if the curves do not say.
        step: at which it begins; None if it is absent.
        text: the values in words, or why it could not be judged.
        share: the remaining share of something that falls: of the reward, of the answers that end.
        harm: whether the run itself was hurt: reward, held-out score or finished answers were lost, values are NaN, or
            nothing can be learnt. Any other sign is an observation.
        from_start: whether it is present in the first line of the log.
    """

    name: str
    fired: bool | None
    step: int | None
    text: str
    share: float | None = None
    harm: bool = False
    from_start: bool = False


@dataclass(frozen=True)
class Detector:
    """How a sign is found.

    Attributes:
        title: of the sign.
        definition: when it is present.
        unseen: what cannot be seen without its metrics, as the end of a sentence.
        reads: metrics, of which the first that a run has is judged.
        lines: number of values that the metric needs.
        judge: the judgement from the curves of a run and that metric.
    """

    title: str
    definition: str
    unseen: str
    reads: tuple[str, ...]
    lines: int
    judge: Callable[[Curves, Metric], Sign]

    def detect(self, run: Run | Curves) -> Sign:
        """The sign in a run."""
        curves = run if isinstance(run, Curves) else Curves(run)
        metric = next((metric for name in self.reads for metric in curves.named(name) if len(metric.steps)), None)
        if metric is None:
            return missing(*self.reads)
        if len(metric.steps) < self.lines:
            return short(metric, self.lines)
        return self.judge(curves, metric)


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
    """Register a judgement under the name of its function.

    Args:
        title, definition, unseen, reads, lines: see :class:`Detector`.
        by_itself: whether `look` judges it.
        counted: whether the report counts it.
    """

    def register(judge: Callable[[Curves, Metric], Sign]) -> Detector:
        found = Detector(title, definition, unseen, reads, lines, judge)
        if counted:
            COUNTED[judge.__name__.removeprefix("growing_")] = found
        if by_itself:
            SIGNS[judge.__name__] = found
        return found

    return register


def signs(run: Run) -> list[Sign]:
    """The judgement of every detector about a run so far, in the order of :data:`SIGNS`."""
    curves = Curves(run)  # each curve is read once for all detectors
    return [replace(detector.detect(curves), name=name) for name, detector in SIGNS.items()]


def missing(*names: str) -> Sign:
    """The judgement without any of some metrics."""
    return Sign("", None, None, f"no {' or '.join(names)}")


def short(metric: Metric, needed: int) -> Sign:
    """The judgement of a curve with too few values."""
    return Sign("", None, None, f"{metric.name} has {len(metric.steps)} values; {needed} are needed")


def absent(text: str) -> Sign:
    """The judgement that a sign is absent."""
    return Sign("", False, None, text)


def present(step: int, text: str, share: float | None = None, *, harm: bool = False) -> Sign:
    """The judgement that a sign is present."""
    return Sign("", True, step, text, share, harm)
