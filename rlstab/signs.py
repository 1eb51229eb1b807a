"""Signs that something goes wrong in a run, each defined once: for the report, for `diagnose`, and for a live run.

A sign is found in the curves of a run so far, in bins of ten steps, and has the step at which it begins. The thresholds
are choices; docs/how-to/diagnose.md says how often they are right. They rest on trials with the tiny countdown policy,
made before any benchmark used them. Plain GRPO loses two thirds of its entropy in 500 rollouts while it still improves.
A learning rate that is too high ends in a reward near 0, zero-variance groups and a gradient near 0, while entropy
stays or *rises*. Gradient norms spiked only without a trust region, at forty times their mean. So no single curve shows
a collapse, and each sign is judged by itself.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlstab.bins import EMPTY, WIDTH, Curve, Curves, bin_weights, binned, highest, last_tenth

#: Sampler and trainer differ at the first step, when both have the same weights: by metric, the threshold. Of
#: probabilities, verl's FAQ calls 0.005 normal and 0.01 a problem of precision; the two others are what int4 weights do
#: to the countdown policy, less a margin.
MISMATCH = {"sampler/gap": 0.02, "mismatch/k3": 0.002, "sampler/probability_gap": 0.01}
#: They drift apart later: above this multiple of that threshold ...
DRIFT = 3.0
#: ... and of the first value.
DRIFT_GROWTH = 3.0
#: Above this share of the tokens beyond the trust region, much of the gradient is cut off.
CLIPPED = 0.1
#: Above this share of the answers cut off in the first line of the log, the limit on tokens is too low.
CUT_OFF = 0.25
#: Where this share of the answers ceases to end from one line to the next, an update broke the policy: responses do not
#: grow this fast by learning.
BROKEN = 0.5
#: Responses are cut off if fewer than this share end by themselves ...
ENDED = 0.9
#: ... and it is at least this much less than at the start.
ENDED_DROP = 0.1
#: More zero-variance groups than this share leave next to no gradient; ordinary runs stay at half.
ZERO_STD = 0.9
#: ... unless the reward is so high that the groups are solved instead.
SOLVED = 0.9
#: Entropy has collapsed below this share of its first ten rollouts: well beyond the 0.3 that plain GRPO came to.
ENTROPY_FLOOR = 0.25
#: ... or below this many nats per token: nearly all tokens are then certain, whatever the start was.
ENTROPY_LEAST = 0.02
#: Entropy has blown up above this multiple of its first ten rollouts; where the learning rate was fatal it rose by 1.3.
ENTROPY_CEILING = 1.5
#: A norm above this multiple of the median so far is a spike; clipping at 1.0 hides it from the weights, not from here.
SPIKE = 10.0
#: The reward has fallen if it ends below this share of its peak, which a noisy peak and a plateau do not ...
REWARD_KEPT = 0.7
#: ... by at least this multiple of the noise of a bin ...
REWARD_NOISE = 3.0
#: ... or below this share of its peak, whatever the noise.
REWARD_LOST = 1 / 3
#: Bins below which a curve is too short to judge.
MIN_BINS = 3
#: Steps over which the beginning of a sign is averaged.
SPAN = 5


@dataclass(frozen=True)
class Sign:
    """The judgement of one detector about one run.

    Attributes:
        name: a key of :data:`SIGNS`.
        fired: whether the sign is present; None if the curves do not say.
        step: at which it begins; None if it is absent.
        text: the values in words, or why it could not be judged.
        share: the remaining share of something that falls: of the reward, of the answers that end.
        first_line: whether it is present in the first line of the log.
        sudden: whether it appears from one line of the log to the next.
    """

    name: str
    fired: bool | None
    step: int | None
    text: str
    share: float | None = None
    first_line: bool = False
    sudden: bool = False


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric of a run by itself: its last step counts as the end of the run.

    Attributes:
        name: its name.
        steps, values: as logged; finite.
        bin_width: steps behind one value.
    """

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    bin_width: int

    @cached_property
    def bins(self) -> Curve:
        """Its means over ten steps."""
        return binned(self, self.name)

    @property
    def ends(self) -> NDArray[np.int64]:
        """The last step of each bin."""
        return self.bins[0]

    @property
    def means(self) -> NDArray[np.float64]:
        """The mean of each bin."""
        return self.bins[1]

    @property
    def largest(self) -> dict[str, Curve]:
        """Empty, for :class:`rlstab.bins.Curves`."""
        return {}

    @property
    def metrics(self) -> dict[str, Curve]:
        """Itself, for :func:`rlstab.bins.binned`."""
        return {self.name: (self.steps, self.values)}

    @property
    def rollouts(self) -> int:
        """Its last step."""
        return int(self.steps[-1]) if len(self.steps) else 0

    @property
    def end(self) -> float:
        """Its mean over the last tenth of the steps."""
        return last_tenth(self, self.name) or 0.0


def _metric(run: Curves, name: str) -> Metric:
    steps, values = run.metrics.get(name, EMPTY)
    finite = np.isfinite(values)
    return Metric(name, steps[finite], values[finite], run.bin_width)


class Run(Curves, Protocol):
    """A run, finished or not; see :class:`rlstab.report.runs.RunRecord`."""

    @property
    def evaluations(self) -> Sequence[Mapping[str, float]]: ...


@dataclass(frozen=True)
class Detector:
    """How a sign is found.

    Attributes:
        title: of the sign.
        definition: when it is present.
        unseen: what cannot be seen without its metrics, as the end of a sentence.
        reads: metrics, of which the first that a run has is judged.
        bins: how many the metric needs.
        judge: the judgement from a run and that metric.
    """

    title: str
    definition: str
    unseen: str
    reads: tuple[str, ...]
    bins: int
    judge: Callable[[Run, Metric], Sign]

    def detect(self, run: Run) -> Sign:
        """The sign in a run."""
        metric = next((metric for read in self.reads if len((metric := _metric(run, read)).steps)), None)
        if metric is None:
            return Sign("", None, None, f"no {' or '.join(self.reads)}")
        if len(metric.ends) < self.bins:
            return _short(metric, len(metric.ends))
        return self.judge(run, metric)


#: The detectors by name, in the order in which a reader looks at them.
SIGNS: dict[str, Detector] = {}


def _detector(
    title: str, definition: str, unseen: str, *reads: str, bins: int = MIN_BINS, by_itself: bool = True
) -> Callable[[Callable[[Run, Metric], Sign]], Detector]:
    def register(judge: Callable[[Run, Metric], Sign]) -> Detector:
        detector = Detector(title, definition, unseen, reads, bins, judge)
        if by_itself:
            SIGNS[judge.__name__] = detector
        return detector

    return register


def signs(run: Run) -> list[Sign]:
    """The judgement of every detector about a run so far, in the order of :data:`SIGNS`."""
    return [replace(detector.detect(run), name=name) for name, detector in SIGNS.items()]


def _short(metric: Metric, bins: int) -> Sign:
    text = f"{len(metric.steps)} values in {bins} x {WIDTH} steps; {MIN_BINS} x {WIDTH} are needed"
    return Sign("", None, None, text)


def _told(step: int | None, text: str, share: float | None = None, *, sudden: bool = False) -> Sign:
    return Sign("", step is not None, step, text, share, sudden=sudden)


@_detector(
    "sampler and trainer differ from the start",
    "in the first line of the log, " + ", or ".join(f"`{name}` above {most:g}" for name, most in MISMATCH.items()),
    "whether the sampler is the policy",
    *MISMATCH,
    bins=1,
)
def sampler_mismatch(run: Run, metric: Metric) -> Sign:
    """Their weights are the same in the first line of the log."""
    step, first, most = int(metric.steps[0]), float(metric.values[0]), MISMATCH[metric.name]
    text = f"{metric.name} is {first:.3g} in the first line of the log, {most:g} would be much"
    if step > 1:
        text += f"; that is step {step}, where a sampler may also be behind"
    return _told(step if first > most else None, text)


@_detector(
    "sampler and trainer drift apart",
    f"the same metric, over ten steps, above {DRIFT:g} x that threshold and {DRIFT_GROWTH:g} x its first value",
    "whether the samples are older than the policy",
    *MISMATCH,
    bins=1,
)
def sampler_drift(run: Run, metric: Metric) -> Sign:
    """From a small difference at the start to a large one."""
    first, highest = float(metric.values[0]), float(metric.means.max())
    most = max(DRIFT * MISMATCH[metric.name], DRIFT_GROWTH * first)
    step = _first(metric, lambda mean: mean > most)
    rises = f"rises from {first:.3g} to {highest:.3g}"
    return _told(step, f"{metric.name} {rises if step else f'is at most {highest:.3g} in ten steps'}")


@_detector(
    "tokens beyond the trust region",
    f"more than {CLIPPED} of the tokens clipped, over ten steps",
    "how far the policy leaves the data",
    "ratio/clipped",
    bins=1,
)
def clipped(run: Run, metric: Metric) -> Sign:
    """Their gradient is cut off."""
    step = _first(metric, lambda mean: mean > CLIPPED)
    return _told(step, f"up to {metric.means.max():.3g} of the tokens in ten steps")


_GROWS = f"fewer than {ENDED} of the responses end by themselves over the last tenth, {ENDED_DROP} less than at first"


@_detector("truncation", _GROWS, "whether more answers are cut off", "response/ended", by_itself=False)
def growing_truncation(run: Run, metric: Metric) -> Sign:
    """Fewer answers end than at first."""
    start, end = float(metric.means[0]), metric.end
    most = min(ENDED, start - ENDED_DROP)
    step = _first(metric, lambda mean: mean <= most) if end <= most else None
    sudden = bool((metric.values[:-1] - metric.values[1:] > BROKEN).any())
    text = f"{end:.2f} end by themselves at the end, {start:.2f} at first"
    return _told(step, text, end / start if start else None, sudden=sudden)


@_detector(
    "truncation",
    f"{_GROWS}; or more than {CUT_OFF} of them cut off in the first line",
    "whether answers are cut off",
    "response/ended",
    bins=1,
)
def truncation(run: Run, metric: Metric) -> Sign:
    """Too many answers are cut off from the first step on, or more and more are."""
    cut_off = 1 - float(metric.values[0])
    if cut_off <= CUT_OFF:
        return growing_truncation.detect(run)
    text = f"{cut_off:.2f} of the answers are cut off in the first line of the log"
    return replace(_told(int(metric.steps[0]), text, 1.0), first_line=True)


@_detector(
    "zero-variance groups",
    f"more than {ZERO_STD} of the groups with equal rewards over the last tenth, at a reward below {SOLVED}",
    "whether groups have a gradient at all",
    "reward/zero_std_groups",
)
def zero_std_groups(run: Run, metric: Metric) -> Sign:
    """It begins where the share stays above the threshold."""
    reward = _metric(run, "reward/mean")
    if not len(reward.steps):
        return Sign("", None, None, "no reward/mean")
    solved = metric.end > ZERO_STD and reward.end >= SOLVED
    text = f"{metric.end:.2f} of the groups at the end, at reward {reward.end:.3g}{': solved' if solved else ''}"
    if metric.end <= ZERO_STD or solved:
        return _told(None, text)
    stays = int(np.flatnonzero(np.append(0.0, metric.means) <= ZERO_STD)[-1])
    bin_end = int(metric.ends[min(stays, len(metric.ends) - 1)])
    return _told(_begins(metric, bin_end, lambda mean: mean > ZERO_STD), text)


@_detector(
    "entropy floor",
    f"token entropy of ten rollouts below {ENTROPY_FLOOR} x that of the first ten, or below {ENTROPY_LEAST} nats",
    "whether entropy collapses",
    "tokens/entropy",
)
def entropy_floor(run: Run, metric: Metric) -> Sign:
    """Nearly all tokens are certain."""
    start, lowest = float(metric.means[0]), float(metric.means.min())
    least = max(ENTROPY_FLOOR * start, ENTROPY_LEAST)
    share = lowest / start if start > 0 else 0.0
    return _told(_first(metric, lambda mean: mean < least), f"lowest {lowest:.3g} nats, {share:.2f} x its start", share)


@_detector(
    "entropy blow-up",
    f"token entropy of ten rollouts above {ENTROPY_CEILING} x that of the first ten",
    "whether entropy blows up",
    "tokens/entropy",
)
def entropy_blow_up(run: Run, metric: Metric) -> Sign:
    """The policy becomes noise."""
    start, most = max(float(metric.means[0]), ENTROPY_LEAST), float(metric.means.max())
    step = _first(metric, lambda mean: mean > ENTROPY_CEILING * start)
    return _told(step, f"highest {most:.3g} nats, {most / start:.2f} x its start", most / start)


@_detector(
    "gradient spikes",
    f"a gradient norm above {SPIKE:g} x the median so far of the mean norm of ten rollouts",
    "whether single updates are out of proportion",
    "gradient/norm",
)
def gradient_spikes(run: Run, metric: Metric) -> Sign:
    """It begins at the first norm above this multiple of the median of those before it."""
    single = _metric(run, "gradient/largest_norm")
    single = single if len(single.steps) else metric
    ends, largest = run.largest.get("gradient/largest_norm", highest((single.steps, single.values), single.rollouts))
    width = max(WIDTH, run.bin_width)  # the last bin of one may end before that of the other
    _, means, highests = np.intersect1d((metric.ends - 1) // width, (ends - 1) // width, return_indices=True)
    if len(means) < MIN_BINS:
        return _short(metric, len(means))
    # of norms so far: in a run that dies, later norms are near 0, and ordinary ones before would look like spikes
    medians = _running_medians(metric.means[means].tolist())
    multiples = largest[highests] / np.maximum(medians, np.finfo(np.float64).tiny)
    spikes = metric.ends[means][multiples > SPIKE]
    text = f"{len(spikes)} of {len(means)} tens of rollouts; the largest norm is {multiples.max():.3g} x the median"
    if not len(spikes):
        return _told(None, text)
    for index in np.flatnonzero((single.steps > spikes[0] - WIDTH) & (single.steps <= spikes[0])):
        if single.values[index] > SPIKE * np.median(single.values[: index + 1]):
            return _told(int(single.steps[index]), text)
    return _told(int(spikes[0]), text)


@_detector(
    "NaN or Inf",
    "an optimizer step refused for NaN or Inf, or a gradient norm that is not finite",
    "whether gradients are finite",
    "optimizer_steps/refused",
    "gradient/norm",
    bins=0,
)
def refused_steps(run: Run, metric: Metric) -> Sign:
    """The metric is written only if there was something to count."""
    if metric.name != "optimizer_steps/refused":
        return _told(None, "NaN or Inf in 0 optimizer steps")
    refused = metric.values > 0
    counts = metric.values * (bin_weights(run, metric.steps) if run.bin_width > 1 else 1.0)
    text = f"NaN or Inf in {round(float(counts.sum()))} optimizer steps"
    return _told(int(metric.steps[refused.argmax()]) if refused.any() else None, text)


@_detector(
    "reward fall",
    f"training reward over the last tenth below {REWARD_KEPT} x its best ten rollouts, the drop above {REWARD_NOISE:g} "
    "x the noise of ten rollouts, or below a third of them",
    "whether the reward falls",
    "reward/mean",
)
def reward_fall(run: Run, metric: Metric) -> Sign:
    """It begins where five steps are below the share of the peak that is kept, after the peak.

    A share needs a lower end. Rewards below 0 are counted from -1, the lowest reward of a scorer of right and wrong,
    and those below -1 from the lowest ten steps.
    """
    lowest = float(metric.means.min())
    bottom = min(lowest, -1.0) if lowest < 0 else 0.0
    means, end = metric.means - bottom, metric.end - bottom
    index, peak = int(means.argmax()), float(means.max())
    # The noise of a bin as a deviation, without what a steady fall adds: second differences of independent values vary
    # by the square root of 1 + 4 + 1 more than each; 1.4826 makes a deviation of the median of normal ones.
    noise = 1.4826 * float(np.median(np.abs(np.diff(means, n=2)))) / np.sqrt(6)
    before = metric.ends[index - 1] if index else 0
    inside = (metric.steps > before) & (metric.steps <= metric.ends[index])
    top = int(metric.steps[inside][metric.values[inside].argmax()])
    share = end / peak if peak > 0 else 1.0
    low = metric.ends[(means < REWARD_KEPT * peak) & (np.arange(len(means)) > index)]
    fell = share < REWARD_LOST or (share < REWARD_KEPT and peak - end > REWARD_NOISE * noise)
    kept = REWARD_KEPT * peak + bottom
    step = _begins(metric, int(low[0]), lambda mean: mean < kept, after=top) if fell and len(low) else None
    text = f"ends at {end:.3g}, {share:.2f} x its peak of {peak:.3g} around step {top}"
    return _told(step, f"{text}, counted from {bottom:.3g}" if bottom else text, share)


@_detector(
    "ends below start",
    "training reward over the last tenth below that of the policy at the start",
    "whether the run has improved",
    *("reward/true", "reward/mean"),  # evaluations have no flaky grader, so the reward without it is compared
    by_itself=False,
)
def below_start(run: Run, metric: Metric) -> Sign:
    """The start is the evaluation at rollout 0, else the first ten rollouts."""
    first = run.evaluations[0] if run.evaluations else {}
    evaluated = first.get("rollout") == 0 and "eval/mean" in first
    start = first["eval/mean"] if evaluated else float(metric.means[0])
    step = _first(metric, lambda mean: mean < start) if metric.end < start else None
    where = "held out" if evaluated else "first ten rollouts"
    return _told(step, f"ends at {metric.end:.3g}, began at {start:.3g} ({where})")


def _first(metric: Metric, beyond: Callable[[float], bool]) -> int | None:
    """The step at which the first bin beyond a threshold begins to be so; None if no bin is."""
    there = [int(end) for end, mean in zip(metric.ends, metric.means, strict=True) if beyond(float(mean))]
    return _begins(metric, there[0], beyond) if there else None


def _begins(metric: Metric, end: int, beyond: Callable[[float], bool], after: int = 0) -> int:
    """The first step, in the bin that ends at ``end`` or the one before, that is beyond the threshold with the next
    four.
    """
    width = max(WIDTH, metric.bin_width)
    for step in metric.steps[(metric.steps > max(end - 2 * width, after)) & (metric.steps <= end)].tolist():
        ahead = metric.values[(metric.steps >= step) & (metric.steps < step + SPAN)]
        if beyond(float(ahead[0])) and beyond(float(ahead.mean())):
            return int(step)
    return int(metric.steps[metric.steps > max(end - width, after)][0])


def _running_medians(values: Sequence[float]) -> NDArray[np.float64]:
    """The median of each value and all before it."""
    ordered: list[float] = []
    medians = []
    for value in values:
        insort(ordered, value)
        medians.append((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2)
    return np.array(medians)
