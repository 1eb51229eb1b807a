"""Has a run collapsed? Detectors on bins of ten rollouts.

The thresholds are choices, made before any benchmark was run with them. They rest on trials of the tiny countdown
policy. Plain GRPO loses two thirds of its entropy in 500 rollouts while it still improves. A learning rate that is too
high ends in a reward near 0, zero-variance groups and a gradient near 0, while entropy stays or *rises*. Only without
a trust region did gradient norms spike, at forty times their mean. So no single curve shows a collapse, and each
detector stands for itself. ``collapsed`` in tables and sweeps is the fall of the reward, or a run that ended because
the trainer refused its optimizer steps for NaN or Inf; one that failed for another reason says nothing of its method.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlstab.report.runs import EMPTY, RunRecord, bin_weights, binned

#: Entropy has collapsed below this share of its first ten rollouts: well beyond the 0.3 that plain GRPO came to.
ENTROPY_FLOOR = 0.25
#: ... or below so many nats per token: nearly all tokens are then certain, whatever the start was.
ENTROPY_LEAST = 0.02
#: Entropy has blown up above this multiple of its first ten rollouts; where the learning rate was fatal it rose by 1.3.
ENTROPY_CEILING = 1.5
#: The reward has fallen if it ends below this share of its peak: noise of a peak and habit of a plateau lie above it.
REWARD_KEPT = 0.7
#: ... by at least so many times the noise of a bin.
REWARD_NOISE = 3.0
#: A norm above so many times the median so far is a spike; clipping at 1.0 hides it from the weights, not from here.
SPIKE = 10.0
#: More zero-variance groups than this share leave next to no gradient; ordinary runs stay at half.
ZERO_STD = 0.9
#: ... unless the reward is so high that the groups are solved instead.
SOLVED = 0.9
#: Responses are cut off if fewer than this share end by themselves ...
ENDED = 0.9
#: ... and it is at least so much less than at the start.
ENDED_DROP = 0.1
#: Bins below which a curve is too short to judge.
MIN_BINS = 3


@dataclass(frozen=True)
class Detection:
    """What one detector says of one run.

    Attributes:
        detector: its name, a key of :data:`DETECTORS`.
        fired: whether its definition holds; None if the run lacks the metric or is too short.
        rollout: last of the first bin where it does; None if it did not fire.
        value: what is compared with the threshold, at its worst or at the end as the definition says.
        text: the value in words, or why nothing can be said.
    """

    detector: str
    fired: bool | None
    rollout: int | None
    value: float | None
    text: str


def last_tenth(run: RunRecord, name: str) -> float | None:
    """Mean of a metric over the last tenth of the rollouts, rounded up to whole bins of ten."""
    ends, values = binned(run, name)
    inside = ends > run.rollouts - max(1, run.rollouts // 10)
    if not inside.any():
        return None
    return float(np.average(values[inside], weights=bin_weights(run, ends)[inside]))


#: The detectors by name, their titles, and what each means.
DETECTORS: dict[str, Callable[[RunRecord], Detection]] = {}
TITLES: dict[str, str] = {}
DEFINITIONS: dict[str, str] = {}

#: Whether a definition holds, the bins in which it does, the value and the text; None if nothing can be said.
_Judgement: TypeAlias = tuple[bool, NDArray[np.int64], float, str] | None


_Judge: TypeAlias = Callable[[RunRecord, NDArray[np.int64], NDArray[np.float64]], _Judgement]


def _detector(
    metric: str, title: str, definition: str, least: int = MIN_BINS
) -> Callable[[_Judge], Callable[[RunRecord], Detection]]:
    """Make a detector of what judges the bins of a metric (ends and values), of which it takes at least so many."""

    def register(judge: _Judge) -> Callable[[RunRecord], Detection]:
        name = judge.__name__

        def detector(run: RunRecord) -> Detection:
            ends, values = binned(run, metric)
            judgement = judge(run, ends, values) if len(values) >= least else None
            if judgement is None:
                short = f"too short: {len(values)} tens of rollouts, and it takes {MIN_BINS}"
                return Detection(name, None, None, None, short if len(values) else f"{metric} is missing")
            fired, when, value, text = judgement
            return Detection(name, fired, int(when[0]) if fired and len(when) else None, value, text)

        DETECTORS[name], TITLES[name], DEFINITIONS[name] = detector, title, definition
        return detector

    return register


def detect(run: RunRecord) -> list[Detection]:
    """What every detector says of a run, finished or not."""
    return [detector(run) for detector in DETECTORS.values()]


def collapsed(run: RunRecord) -> bool:
    """Whether its reward fell, or it failed over NaN or Inf."""
    diverged = run.status == "failed" and "NonFinite" in (run.error or "")
    return diverged or reward_fall(run).fired is True


@_detector(
    "reward/mean",
    "reward fall",
    f"training reward over the last tenth below {REWARD_KEPT} x its best ten rollouts, the drop above {REWARD_NOISE:g} "
    "x the noise of ten rollouts",
)
def reward_fall(run: RunRecord, ends: NDArray[np.int64], values: NDArray[np.float64]) -> _Judgement:
    """See :data:`DEFINITIONS`."""
    end = last_tenth(run, "reward/mean")
    if end is None:
        return None
    place, peak = int(values.argmax()), float(values.max())
    # Noise is the median absolute difference of neighbouring bins as a deviation: differences of two independent values
    # vary by the square root of two more than each; 1.4826 for normal noise.
    noise = 1.4826 * float(np.median(np.abs(np.diff(values)))) / np.sqrt(2)
    when = ends[(values < REWARD_KEPT * peak) & (np.arange(len(values)) > place)]
    fired = peak > 0 and end < REWARD_KEPT * peak and peak - end > REWARD_NOISE * noise and len(when) > 0
    share = end / peak if peak > 0 else 1.0
    return bool(fired), when, share, f"ends at {end:.3g}, {share:.2f} x its peak of {peak:.3g} at rollout {ends[place]}"


@_detector(
    "tokens/entropy",
    "entropy floor",
    f"token entropy of ten rollouts below {ENTROPY_FLOOR} x that of the first ten, or below {ENTROPY_LEAST} nats",
)
def entropy_floor(run: RunRecord, ends: NDArray[np.int64], values: NDArray[np.float64]) -> _Judgement:
    """See :data:`DEFINITIONS`."""
    when = ends[values < max(ENTROPY_FLOOR * values[0], ENTROPY_LEAST)]
    share = float(values.min() / values[0]) if values[0] > 0 else 0.0
    return len(when) > 0, when, share, f"lowest {values.min():.3g} nats, {share:.2f} x its start"


@_detector(
    "tokens/entropy",
    "entropy blow-up",
    f"token entropy of ten rollouts above {ENTROPY_CEILING} x that of the first ten",
)
def entropy_blow_up(run: RunRecord, ends: NDArray[np.int64], values: NDArray[np.float64]) -> _Judgement:
    """See :data:`DEFINITIONS`."""
    start = max(float(values[0]), ENTROPY_LEAST)
    when, share = ends[values > ENTROPY_CEILING * start], float(values.max() / start)
    return len(when) > 0, when, share, f"highest {values.max():.3g} nats, {share:.2f} x its start"


@_detector(
    "gradient/norm",
    "gradient spikes",
    f"a gradient norm above {SPIKE:g} x the median so far of the mean norm of ten rollouts",
)
def gradient_spikes(run: RunRecord, ends: NDArray[np.int64], values: NDArray[np.float64]) -> _Judgement:
    """The value is the largest multiple; the text counts bins with one."""
    own_ends, largest = run.largest.get("gradient/largest_norm", EMPTY)
    both, means, highest = np.intersect1d(ends, own_ends, return_indices=True)
    if len(both) < MIN_BINS:
        return None
    # so far: in a run that dies, later norms are near 0, and the ordinary ones before would look like spikes
    medians = _running_medians(values[means].tolist())
    multiples = largest[highest] / np.maximum(medians, np.finfo(np.float64).tiny)
    when, most = both[multiples > SPIKE], float(multiples.max())
    text = f"{len(when)} of {len(both)} tens of rollouts; the largest norm is {most:.3g} x the median"
    return len(when) > 0, when, most, text


@_detector(
    "reward/zero_std_groups",
    "zero-variance groups",
    f"more than {ZERO_STD} of the groups with equal rewards over the last tenth, at a reward below {SOLVED}",
)
def zero_std_groups(run: RunRecord, ends: NDArray[np.int64], values: NDArray[np.float64]) -> _Judgement:
    """The rollout is the first from which the share stays above."""
    end, reward = last_tenth(run, "reward/zero_std_groups"), last_tenth(run, "reward/mean")
    if end is None or reward is None:
        return None
    below = np.flatnonzero(values <= ZERO_STD)
    when = ends[min(int(below[-1]) + 1, len(ends) - 1) :] if len(below) else ends
    text = f"{end:.2f} of the groups at the end, at reward {reward:.3g}"
    solved = end > ZERO_STD and reward >= SOLVED
    return end > ZERO_STD and not solved, when, end, text + (": solved" if solved else "")


@_detector(
    "response/ended",
    "truncation",
    f"fewer than {ENDED} of the responses end by themselves over the last tenth, {ENDED_DROP} less than at first",
)
def truncation(run: RunRecord, ends: NDArray[np.int64], values: NDArray[np.float64]) -> _Judgement:
    """See :data:`DEFINITIONS`."""
    end, start = last_tenth(run, "response/ended"), float(values[0])
    if end is None:
        return None
    when = ends[(values < ENDED) & (values <= start - ENDED_DROP)]
    fired = end < ENDED and end <= start - ENDED_DROP and len(when) > 0
    return fired, when, end, f"{end:.2f} end by themselves at the end, {start:.2f} at first"


# the metric is written only where there was something to count
@_detector("optimizer_steps/refused", "refused optimizer steps", "an optimizer step refused for NaN or Inf", least=0)
def refused_steps(run: RunRecord, ends: NDArray[np.int64], values: NDArray[np.float64]) -> _Judgement:
    """See :data:`DEFINITIONS`."""
    count = round(float((values * bin_weights(run, ends)).sum()))
    return bool((values > 0).any()), ends[values > 0], count, f"{count} optimizer steps"


@_detector(
    "reward/mean", "ends below start", "training reward over the last tenth below that of the policy at the start"
)
def below_start(run: RunRecord, ends: NDArray[np.int64], values: NDArray[np.float64]) -> _Judgement:
    """The start is the evaluation at rollout 0, else the first ten rollouts."""
    # an evaluation has no flaky grader, so what it is compared with has none either
    name = "reward/true" if "reward/true" in run.metrics else "reward/mean"
    ends, values = binned(run, name)
    end = last_tenth(run, name)
    if len(values) < MIN_BINS or end is None:
        return None
    first = run.evaluations[0] if run.evaluations else {}
    evaluated = first.get("rollout") == 0 and "eval/mean" in first
    start = first["eval/mean"] if evaluated else float(values[0])
    text = f"ends at {end:.3g}, began at {start:.3g} ({'held out' if evaluated else 'first ten rollouts'})"
    return end < start, ends[values < start], end - start, text


def _running_medians(values: Sequence[float]) -> NDArray[np.float64]:
    """The median of each value and all before it."""
    ordered: list[float] = []
    medians = []
    for value in values:
        insort(ordered, value)
        medians.append((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2)
    return np.array(medians)
