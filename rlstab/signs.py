"""Signs that something goes wrong in a run, each defined once: for the report, for `look`, and for a live run.

A sign is found in the curves of a run so far, in bins of ten steps, and has the step at which it begins. The thresholds
are choices; docs/how-to/diagnose.md says how often they are right. They rest on trials with the tiny countdown policy,
made before any benchmark used them. Plain GRPO loses two thirds of its entropy in 500 rollouts while it still improves.
A learning rate that is too high ends in a reward near 0, zero-variance groups and a gradient near 0, while entropy
stays or *rises*. Gradient norms spiked only without a trust region, at forty times their mean. So no single curve shows
a collapse, and each sign is judged by itself.
"""

from __future__ import annotations

import re
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlstab.bins import EMPTY, WIDTH, Curve, Run, bin_weights, in_bins, mean_at_end, noise, slope

#: Sampler and trainer differ at the first step, when both have the same weights: by metric, the threshold. Of
#: probabilities, verl's FAQ calls 0.005 normal and 0.01 a problem of precision; the two others are what int4 weights do
#: to the countdown policy, less a margin.
MISMATCH = {"sampler/gap": 0.02, "mismatch/k3": 0.002, "sampler/probability_gap": 0.01}
#: They drift apart later: above this multiple of that threshold ...
DRIFT = 3.0
#: ... and of the first value.
DRIFT_GROWTH = 3.0
#: This much more of the tokens beyond the trust region than in the first ten steps, which the objective makes normal: a
#: ratio of whole sequences clips half of them in a sound run ...
CLIPPED = 0.1
#: ... and this multiple of that share.
CLIPPED_GROWTH = 1.5
#: Above this share of the answers cut off in the first line of the log, the limit on tokens is too low.
CUT_OFF = 0.25
#: Where this share of the answers ceases to end from one line to the next, an update broke the policy: responses do not
#: grow this fast by learning.
BROKEN = 0.5
#: Responses are cut off if fewer than this share end by themselves ...
ENDED = 0.9
#: ... and it is at least this much less than at the start.
ENDED_DROP = 0.1
#: More zero-variance groups than this share leave next to no gradient; in ordinary runs it is about half.
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
#: The reward stalls after a step if it rises at less than this share of its rate before, beyond doubt ...
STALLED = 1 / 3
#: ... which is this many standard errors.
DOUBT = 2.0
#: It is at a plateau if it rises over the last half, beyond doubt, by less than this share of what it had gained.
PLATEAU = 0.1
#: Above this share of groups with equal rewards most of the batch trains nothing ...
EQUAL = 0.6
#: ... a fault if it grew by this much, and the reward stalled ...
EQUAL_GROWTH = 0.3
#: ... or if it was there from the start, at a reward below this share, or from :data:`SOLVED` on.
HARD = 0.1
#: Nats per token between policy and reference, beyond which a token is e times as likely as before, on average.
KL = 1.0
#: The held-out score falls if it loses this share of its best three evaluations, and three times their noise ...
HELD_OUT_LOST = 0.1
#: ... and is left behind if it gains less than this share of what the training reward gains, in both senses of gain ...
HELD_OUT_LAG = 0.25
#: ... which has gained at least this much ...
TRAINED = 0.1
#: ... from a level within this distance of the score's: the two then count the same.
LEVEL = 0.2
#: Responses grow if they are longer than this multiple of the first ten steps.
LONGER = 2.0
#: A mean weight of the correction below this makes every step smaller by as much.
SHRUNK = 0.8
#: Repetition is present if this much more of the responses repeats itself than in the first ten steps.
REPEATED = 0.2
#: A norm or a spread of advantages below this share of that of the first ten steps counts as no gradient.
NO_GRADIENT = 0.03
#: A part of the reward below this has taught nothing while a format is at its ceiling.
UNTAUGHT = 0.05
#: Names of rewards for the format, whatever the task; the other parts of a reward are about the task.
FORMS = re.compile(
    "format|length|overlong|penal|punish|short|brev|concis|xml|tag|style|repetition|language|think|steps", re.IGNORECASE
)
#: Metrics ``reward/...`` that are not one of several rewards.
TOTALS = {f"reward/{name}" for name in ("mean", "std", "min", "max", "true", "shaped_mean", "zero_std_groups")}
#: Any of several rewards, as a metric that a detector reads.
PARTS = "reward/NAME"
#: Bins below which a curve is too short to judge.
MIN_BINS = 3
#: Consecutive bins that make a state; a single one could be an outlier.
STATE = 3
#: Bins after a step that are needed to see a reward stall, and evaluations to see a score fall.
SETTLED = 5
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
    """One metric of a run, whose last step counts as the end of the run.

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
        curve = self.steps, self.values
        return curve if self.bin_width > 1 else in_bins(curve, self.rollouts)

    @property
    def ends(self) -> NDArray[np.int64]:
        """The last step of each bin."""
        return self.bins[0]

    @property
    def means(self) -> NDArray[np.float64]:
        """The mean of each bin."""
        return self.bins[1]

    @property
    def rollouts(self) -> int:
        """Its last step."""
        return int(self.steps[-1]) if len(self.steps) else 0

    @cached_property
    def end(self) -> float:
        """Its mean over the last tenth of the steps."""
        return mean_at_end(self.bins, self.rollouts, self.bin_width) or 0.0


def _metric(run: Run, name: str) -> Metric:
    known: dict[str, Metric] = vars(run).setdefault("_metrics", {})  # binned once for all detectors that read it
    if name not in known:
        known[name] = _read(run, name)
    return known[name]


def _read(run: Run, name: str) -> Metric:
    steps, values = run.metrics.get(name, EMPTY)
    if name.startswith("eval/") and not len(steps):
        told = [record for record in run.evaluations if record["rollout"] and name in record]
        steps = np.array([record["rollout"] for record in told], np.int64)
        values = np.array([record[name] for record in told], np.float64)
    finite = np.isfinite(values)
    return Metric(name, steps[finite], values[finite], run.bin_width)


@dataclass(frozen=True)
class Detector:
    """How a sign is found.

    Attributes:
        title: of the sign.
        definition: when it is present.
        unseen: what cannot be seen without its metrics, as the end of a sentence.
        reads: metrics, of which the first that a run has is judged.
        bins: number of bins that the metric needs.
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
        names = [name for read in self.reads for name in (_parts(run) if read == PARTS else [read])]
        metric = next((metric for name in names if len((metric := _metric(run, name)).steps)), None)
        if metric is None:
            return _missing(*self.reads)
        if len(metric.ends) < self.bins:
            return _short(metric, len(metric.ends), self.bins)
        return self.judge(run, metric)


#: The detectors by name, in the order in which a reader looks at them.
SIGNS: dict[str, Detector] = {}
#: The detectors of signs that a method may prevent, which the report counts.
COUNTED: dict[str, Detector] = {}


def _detector(
    title: str,
    definition: str,
    unseen: str,
    *reads: str,
    bins: int = MIN_BINS,
    by_itself: bool = True,
    counted: bool = False,
) -> Callable[[Callable[[Run, Metric], Sign]], Detector]:
    def register(judge: Callable[[Run, Metric], Sign]) -> Detector:
        detector = Detector(title, definition, unseen, reads, bins, judge)
        if counted:
            COUNTED[judge.__name__.removeprefix("growing_")] = detector
        if by_itself:
            SIGNS[judge.__name__] = detector
        return detector

    return register


def signs(run: Run) -> list[Sign]:
    """The judgement of every detector about a run so far, in the order of :data:`SIGNS`."""
    return [replace(detector.detect(run), name=name) for name, detector in SIGNS.items()]


def _missing(*names: str) -> Sign:
    return Sign("", None, None, f"no {' or '.join(names)}")


def _short(metric: Metric, bins: int, needed: int = MIN_BINS) -> Sign:
    text = f"{len(metric.steps)} values in {bins} x {WIDTH} steps; {needed} x {WIDTH} are needed"
    return Sign("", None, None, text)


def _told(step: int | None, text: str, share: float | None = None, *, sudden: bool = False) -> Sign:
    return Sign("", step is not None, step, text, share, sudden=sudden)


@_detector(
    "reward fall",
    f"training reward over the last tenth below {REWARD_KEPT} x its best ten rollouts, the drop above {REWARD_NOISE:g} "
    "x the noise of ten rollouts, or below a third of them",
    "whether the reward falls",
    "reward/mean",
    counted=True,
)
def reward_fall(run: Run, metric: Metric) -> Sign:
    """It begins where five steps are below the share of the peak that is kept, after the peak.

    A share needs a bottom. Rewards below 0 are counted from -1, the lowest that a scorer of right and wrong gives, and
    those below that from the lowest ten steps.
    """
    lowest = float(metric.means.min())
    bottom = min(lowest, -1.0) if lowest < 0 else 0.0
    means, end = metric.means - bottom, metric.end - bottom
    index, peak = int(means.argmax()), float(means.max())
    before = metric.ends[index - 1] if index else 0
    inside = (metric.steps > before) & (metric.steps <= metric.ends[index])
    top = int(metric.steps[inside][metric.values[inside].argmax()])
    share = end / peak if peak > 0 else 1.0
    low = metric.ends[(means < REWARD_KEPT * peak) & (np.arange(len(means)) > index)]
    fell = share < REWARD_LOST or (share < REWARD_KEPT and peak - end > REWARD_NOISE * noise(means))
    kept = REWARD_KEPT * peak + bottom
    step = _begins(metric, int(low[0]), lambda mean: mean < kept, after=top) if fell and len(low) else None
    text = f"ends at {end:.3g}, {share:.2f} x its peak of {peak:.3g} around step {top}"
    return _told(step, f"{text}, counted from {bottom:.3g}" if bottom else text, share)


@_detector(
    "entropy floor",
    f"token entropy of ten rollouts below {ENTROPY_FLOOR} x that of the first ten, or below {ENTROPY_LEAST} nats",
    "whether entropy collapses",
    "tokens/entropy",
    counted=True,
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
    counted=True,
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
    counted=True,
)
def gradient_spikes(run: Run, metric: Metric) -> Sign:
    """It begins at the first norm that is this multiple of the median of those before it."""
    single = _metric(run, "gradient/largest_norm")
    single = single if len(single.steps) else metric
    curve = in_bins((single.steps, single.values), single.rollouts, largest=True)
    ends, largest = run.largest.get("gradient/largest_norm", curve)
    width = max(WIDTH, run.bin_width)  # the last bin of one may end before that of the other
    _, means, highests = np.intersect1d((metric.ends - 1) // width, (ends - 1) // width, return_indices=True)
    if len(means) < MIN_BINS:
        return _short(metric, len(means))
    # so far: in a run that dies, later norms are near 0, and the ordinary ones before would look like spikes
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
    "zero-variance groups",
    f"more than {ZERO_STD} of the groups with equal rewards over the last tenth, at a reward below {SOLVED}",
    "whether groups have a gradient at all",
    "reward/zero_std_groups",
    counted=True,
)
def zero_std_groups(run: Run, metric: Metric) -> Sign:
    """It begins where the share stays above the threshold."""
    reward = _metric(run, "reward/mean")
    if not len(reward.steps):
        return _missing("reward/mean")
    solved = metric.end > ZERO_STD and reward.end >= SOLVED
    text = f"{metric.end:.2f} of the groups at the end, at reward {reward.end:.3g}{': solved' if solved else ''}"
    if metric.end <= ZERO_STD or solved:
        return _told(None, text)
    stays = int(np.flatnonzero(np.append(0.0, metric.means) <= ZERO_STD)[-1])
    bin_end = int(metric.ends[min(stays, len(metric.ends) - 1)])
    return _told(_begins(metric, bin_end, lambda mean: mean > ZERO_STD), text)


_GROWS = f"fewer than {ENDED} of the responses end by themselves over the last tenth, {ENDED_DROP} less than at first"


@_detector("truncation", _GROWS, "whether more answers are cut off", "response/ended", by_itself=False, counted=True)
def growing_truncation(run: Run, metric: Metric) -> Sign:
    """Fewer answers end by themselves than at first."""
    start, end = float(metric.means[0]), metric.end
    most = min(ENDED, start - ENDED_DROP)
    step = _first(metric, lambda mean: mean <= most) if end <= most else None
    sudden = bool((metric.values[:-1] - metric.values[1:] > BROKEN).any())
    text = f"{end:.2f} end by themselves at the end, {start:.2f} at first"
    return _told(step, text, end / start if start else None, sudden=sudden)


@_detector(
    "NaN or Inf",
    "an optimizer step refused for NaN or Inf, or a loss or gradient norm that is not finite",
    "whether gradients are finite",
    "optimizer_steps/refused",
    "gradient/norm",
    bins=0,
    counted=True,
)
def refused_steps(run: Run, metric: Metric) -> Sign:
    """The metric is written only where there was something to count."""
    if metric.name != "optimizer_steps/refused":
        return _told(None, "NaN or Inf in 0 optimizer steps")
    refused = metric.values > 0
    counts = metric.values * (bin_weights(run.bin_width, metric.steps) if run.bin_width > 1 else 1.0)
    text = f"NaN or Inf in {round(float(counts.sum()))} optimizer steps"
    return _told(int(metric.steps[refused.argmax()]) if refused.any() else None, text)


@_detector(
    "ends below start",
    "training reward over the last tenth below that of the policy at the start",
    "whether the run has improved",
    *("reward/true", "reward/mean"),  # an evaluation has no flaky grader, so what it is compared with has none either
    by_itself=False,
    counted=True,
)
def below_start(run: Run, metric: Metric) -> Sign:
    """The start is the evaluation at rollout 0, else the first ten rollouts."""
    first = run.evaluations[0] if run.evaluations else {}
    evaluated = first.get("rollout") == 0 and "eval/mean" in first
    start = first["eval/mean"] if evaluated else float(metric.means[0])
    step = _first(metric, lambda mean: mean < start) if metric.end < start else None
    where = "held out" if evaluated else "first ten rollouts"
    return _told(step, f"ends at {metric.end:.3g}, began at {start:.3g} ({where})")


@_detector(
    "truncation",
    f"{_GROWS}; or more than {CUT_OFF} of them cut off in the first line",
    "whether answers are cut off",
    "response/ended",
    bins=1,
)
def truncation(run: Run, metric: Metric) -> Sign:
    """Too many are cut off from the first step on, or ever more."""
    cut_off = 1 - float(metric.values[0])
    if cut_off <= CUT_OFF:
        return growing_truncation.detect(run)
    text = f"{cut_off:.2f} of the answers are cut off in the first line of the log"
    return replace(_told(int(metric.steps[0]), text, 1.0), first_line=True)


@_detector(
    "sampler and trainer differ from the start",
    "in the first line of the log, " + ", or ".join(f"`{name}` above {most:g}" for name, most in MISMATCH.items()),
    "whether the sampler is the policy",
    *MISMATCH,
    bins=1,
)
def sampler_mismatch(run: Run, metric: Metric) -> Sign:
    """Both have the same weights in the first line of the log."""
    step, first, most = int(metric.steps[0]), float(metric.values[0]), MISMATCH[metric.name]
    text = f"{metric.name} is {first:.3g} in the first line of the log, at most {most:g} is normal"
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
    "more tokens beyond the trust region",
    f"{CLIPPED} more of the tokens clipped than in the first ten steps, {CLIPPED_GROWTH:g} x as many, and then the "
    "reward stalls or falls, or entropy collapses",
    "how far the policy leaves the data",
    "ratio/clipped",
)
def clipped(run: Run, metric: Metric) -> Sign:
    """Clipped tokens have no gradient; a share that is clipped from the start is normal for the objective."""
    reward, normal = _metric(run, "reward/mean"), float(metric.means[0])
    if not len(reward.steps):
        return _missing("reward/mean")
    step = _first(metric, lambda mean: mean > max(normal + CLIPPED, CLIPPED_GROWTH * normal))
    text = f"up to {metric.means.max():.3g} of the tokens in ten steps, {normal:.3g} in the first ten"
    if step is None:
        return _told(None, text)
    harmed = [sign.step for sign in (reward_fall.detect(run), entropy_floor.detect(run)) if sign.step]
    if any(later >= step for later in harmed) or _stalls(reward, step):
        return _told(step, text)
    return _told(None, f"{text}; no harm to the reward since")


@_detector(
    "held-out score leaves the training reward",
    f"the held-out score falls by {HELD_OUT_LOST:.0%} of its best three evaluations and by three times their noise "
    "while the training reward holds, or does not rise while the training reward does",
    "whether what is learnt holds on other prompts",
    "eval/mean",
    bins=SETTLED,
)
def held_out(run: Run, metric: Metric) -> Sign:
    """The reward pays for something other than the task."""
    reward = _metric(run, "reward/mean")
    if len(reward.ends) < MIN_BINS:
        return _missing("reward/mean") if not len(reward.ends) else _short(reward, len(reward.ends))
    scores, rewards = _threes(metric.means), _rewards(metric, reward)
    index = int(scores.argmax())
    best, last = float(scores[index]), float(scores[-1])
    # the deviation of the difference of two means of three; not by the median, which few evaluations do not have
    deviation = float(np.sqrt(np.mean(np.diff(metric.means, n=2) ** 2) / 6 * 2 / STATE))
    lost = max(HELD_OUT_LOST * abs(best), REWARD_NOISE * deviation)
    if best - last > lost and rewards[-1] > rewards[index] - HELD_OUT_LOST * abs(rewards[index]):
        step = int(metric.ends[index + 1 + int((scores[index:] < best - lost).argmax())])
        return _told(step, f"{last:.3g} after {best:.3g}, training reward {rewards[-1]:.3g} after {rewards[index]:.3g}")
    text = f"{last:.3g} after {scores[0]:.3g}, training reward {rewards[-1]:.3g} after {rewards[0]:.3g}"
    rise, error = slope(metric.ends.astype(np.float64), metric.means, deviation * np.sqrt(STATE / 2))
    flat = rise < DOUBT * error and last - scores[0] < HELD_OUT_LAG * TRAINED
    trained = rewards - rewards[0] > TRAINED + REWARD_NOISE * noise(reward.means)
    if len(scores) < SETTLED or not trained[-STATE:].all() or not (flat or _lags(metric, reward)):
        return _told(None, text)
    return _told(int(metric.ends[1 + trained.argmax()]), text)


@_detector(
    "rewards that part",
    f"a reward for the task falls, or stalls, while another rises; or all of them are below {UNTAUGHT} while that "
    f"for the format is above {SOLVED}",
    "which of several rewards is earned",
    PARTS,
    bins=2 * SETTLED,
)
def components(run: Run, metric: Metric) -> Sign:
    """The policy earns the reward that is easier."""
    parts = [_metric(run, name) for name in _parts(run)]
    forms = [part for part in parts if FORMS.search(part.name)]
    tasks = [part for part in parts if not FORMS.search(part.name)]
    taught = any(task.means.min() < 0 or task.means.max() > UNTAUGHT for task in tasks)
    for task in tasks:
        for other in forms or tasks:
            if other is not task and (step := _part(task, other, other in forms, taught)):
                text = f"{task.name} ends at {task.end:.3g}, {other.name} at {other.end:.3g}"
                return _told(step, f"{text}, after {task.means[0]:.3g} and {other.means[0]:.3g}")
    if len(parts) < 2:
        return Sign("", None, None, "no second reward")
    return _told(None, f"{len(parts)} rewards, none at the cost of another")


def _part(task: Metric, other: Metric, form: bool, taught: bool) -> int | None:
    """The step at which a reward for the task is given up for another one; None if it is not."""
    if min(len(task.ends), len(other.ends)) < 2 * SETTLED:
        return None
    index, gap = int(task.means.argmax()), noise(task.means)
    peak = float(task.means[index])
    low = task.means < min(REWARD_KEPT * peak, peak - REWARD_NOISE * gap)
    if peak > 0 and low[-STATE:].all() and _rises(other, int(task.ends[index])):
        return int(task.ends[max(index, int(np.flatnonzero(~low)[-1]))])
    if not form or task.end >= SOLVED:
        return None
    if not taught and len(task.ends) >= 3 * SETTLED and other.means[-2 * SETTLED :].min() > SOLVED:
        return int(other.ends[(other.means > SOLVED).argmax()])
    # the knee of a curve is its point farthest above the line from its first to its last
    line = np.interp(task.ends, task.ends[[0, -1]], [task.means[:STATE].mean(), task.means[-STATE:].mean()])
    knee = int(task.ends[(task.means - line).argmax()])
    return knee if _stalls(task, knee) and not _stalls(other, knee) and _rises(other, knee) else None


@_detector(
    "drift from the reference",
    f"more than {KL:g} nat per token between policy and reference, over three consecutive windows of ten steps",
    "how far the policy is from its reference",
    "kl/value",
)
def kl_drift(run: Run, metric: Metric) -> Sign:
    """One token may make up all of the KL of a step, so no step counts as more than twice the threshold."""
    step = _state(metric, replace(metric, values=np.minimum(metric.values, 2 * KL)).means > KL)
    return _told(step, f"from {metric.means[0]:.3g} to {metric.means[-1]:.3g} nats per token")


@_detector(
    "prompts too easy or too hard",
    f"more than {EQUAL} of the groups with equal rewards over the last tenth, {EQUAL_GROWTH} more than in the first "
    f"ten steps, and the reward stalls; or from the start, at a reward below {HARD} that does not rise, or from "
    f"{SOLVED} on",
    "whether the prompts suit the policy",
    "reward/zero_std_groups",
    "reward/mean",
    bins=SETTLED,
)
def difficulty(run: Run, metric: Metric) -> Sign:
    """Without the share of such groups, only a reward near 0 or near its maximum shows it."""
    reward, shares = _tasks(run)[0], metric.means
    if len(reward.ends) < SETTLED:
        return _short(reward, len(reward.ends), SETTLED) if len(reward.ends) else _missing("reward/mean")
    estimated = metric.name == "reward/mean"
    if estimated:
        shares = ((np.abs(shares) < HARD / 5) | (np.abs(shares - 1) < HARD / 5)).astype(np.float64)
    level = "easy" if reward.end >= SOLVED else "hard" if reward.end < HARD else "easy or too hard"
    groups = "" if estimated else f"{metric.end:.2f} of the groups, {shares[0]:.2f} at first, at "
    text = f"{groups}reward {reward.end:.3g}: too {level}"
    middle = int(reward.ends[len(reward.ends) // 2])
    rises = _rises(reward, int(reward.ends[0])) and reward.end - reward.means[0] > HARD / 5
    rests = not rises if level in ("easy", "hard") else _stalls(reward, middle)
    # an estimated share is 0 or 1 in a bin, and a reward close to 0 wavers around the threshold
    always = (shares.mean() if estimated else shares.min()) > EQUAL
    if len(shares) >= 2 * SETTLED and always and rests:
        return _told(int(metric.steps[0]), text)
    begun = None if estimated else _first(metric, lambda share: share > shares[0] + EQUAL_GROWTH)
    if begun is None or metric.end <= EQUAL or not _stalls(reward, begun):
        return _told(None, text.partition(": too")[0])
    # a run that has solved its prompts is sound, and trains nothing if it goes on for as long
    solved = int(reward.ends[(reward.means >= SOLVED).argmax()]) if level == "easy" else begun
    lasts = level != "easy" or metric.rollouts - max(begun, solved) > max(2 * SETTLED * WIDTH, metric.rollouts // 2)
    return _told(begun if lasts else None, text)


@_detector(
    "plateau",
    f"the reward rose in the first half and, beyond doubt, by less than {PLATEAU:g} x that in the last, below "
    f"{SOLVED}; the held-out score does not rise either",
    "whether the reward still rises",
    "reward/mean",
    bins=4 * SETTLED,
)
def plateau(run: Run, metric: Metric) -> Sign:
    """The reward no longer rises."""
    middle = metric.ends[len(metric.ends) // 2]
    gained = float(metric.means[metric.ends > middle].mean() - metric.means[0])
    rise, error = _slope(metric, after=middle)
    span, deviation = float(metric.ends[-1] - middle), noise(metric.means)
    text = f"{rise * span:+.2g} in the last {span:.0f} steps, {gained:+.3g} before"
    rose = gained > REWARD_NOISE * deviation and _rises(metric, 0)
    flat = abs(rise * span) + DOUBT * error * span < PLATEAU * gained
    held = _metric(run, "eval/mean")
    if not (rose and flat) or metric.end >= SOLVED or _rises(held, int(middle)):
        return _told(None, text)
    level = float(metric.means[metric.ends > middle].mean()) - deviation
    return _told(_first(metric, lambda mean: mean >= level), text)


@_detector(
    "no gradient",
    f"the norm, or the spread of advantages, below {NO_GRADIENT} x that of the first ten steps, or a learning rate of "
    f"0, over three consecutive windows of ten steps, at a reward below {SOLVED}",
    "whether anything is trained",
    "gradient/norm",
    "advantage/std",
    "lr",
)
def no_gradient(run: Run, metric: Metric) -> Sign:
    """A log that rounds may have zeros all along: then the reward must not rise."""
    reward = _metric(run, "reward/mean")
    seen = [metric for name in ("gradient/norm", "advantage/std", "lr") if len((metric := _metric(run, name)).ends)]
    for metric in seen:
        least = 0.0 if metric.name == "lr" else NO_GRADIENT * float(metric.means[0])
        step = _state(metric, metric.means <= least)
        always = not metric.values.any()
        sound = len(reward.ends) and (
            reward.end >= SOLVED or (always and (len(reward.ends) < SETTLED or _rises(reward, 0)))
        )
        if step and not sound:
            return _told(step, f"{metric.name} is {metric.end:.3g} at the end, {metric.means[0]:.3g} at first")
    return _told(None, ", ".join(f"{metric.name} is {metric.end:.3g}" for metric in seen))


@_detector(
    "length without gain",
    f"responses {LONGER:g} x as long as in the first ten steps, and since they grow the held-out score stalls or gains "
    "little; without one, the reward for the task; without either, the whole reward",
    "whether longer responses are better",
    "response/length",
    bins=2 * SETTLED,
)
def length_without_gain(run: Run, metric: Metric) -> Sign:
    """Longer answers are sound if they are right more often."""
    reward = _metric(run, "reward/mean")
    gains = [gain for gain in (_metric(run, "eval/mean"), *_tasks(run)) if len(gain.ends) >= SETTLED] or [reward]
    grown = metric.end / metric.means[0] if metric.means[0] else 1.0
    text = f"{metric.end:.4g} tokens at the end, {grown:.2g} x as many as at first; {gains[0].name} {gains[0].end:.3g}"
    if not len(gains[0].ends):
        return _missing("reward/mean")
    begun = _first(metric, lambda mean: mean > (1 + LONGER) / 2 * metric.means[0])
    if grown < LONGER or begun is None:
        return _told(None, text)
    lags = gains[0].name == "eval/mean" and len(reward.ends) > STATE and _lags(gains[0], reward)
    # where both level off together, longer answers have been right more often
    before, after = (float(np.interp(begun, some.ends, some.means)) for some in (gains[0], metric))
    little = gains[0].end - before < HELD_OUT_LAG * (metric.end / after - 1) * abs(before)
    return _told(begun if lags or (little and _stalls(gains[0], begun)) else None, text)


@_detector(
    "correction that shrinks each step",
    f"a mean weight below {SHRUNK} over three consecutive windows of ten steps",
    "what the correction for the sampler leaves",
    "correction/weight",
)
def shrunk_steps(run: Run, metric: Metric) -> Sign:
    """A correction that leaves the gradient as large as it is has a mean weight of 1."""
    return _told(_state(metric, metric.means < SHRUNK), f"mean weight {metric.end:.3g}, {metric.means[0]:.3g} at first")


@_detector(
    "repetition",
    f"{REPEATED} more of the responses repeat themselves than in the first ten steps, over three consecutive windows "
    "of ten steps",
    "whether responses repeat themselves",
    "response/repetition",
)
def repetition(run: Run, metric: Metric) -> Sign:
    """Loops of a policy that has nothing else to say."""
    step = _state(metric, metric.means > metric.means[0] + REPEATED)
    return _told(step, f"{metric.end:.3g} at the end, {metric.means[0]:.3g} at first")


def _parts(run: Run) -> list[str]:
    """Several rewards of a run, by name."""
    return sorted(name for name in run.metrics if re.fullmatch("reward/[^/]+", name) and name not in TOTALS)


def _tasks(run: Run) -> list[Metric]:
    """The rewards for the task; the whole reward if none is separate."""
    return [_metric(run, name) for name in _parts(run) if not FORMS.search(name)] or [_metric(run, "reward/mean")]


def _slope(metric: Metric, after: float = 0, until: float = np.inf) -> tuple[float, float]:
    """The rise per step within some steps, and its standard error, which is infinite if there are too few."""
    inside = (metric.ends > after) & (metric.ends <= until)
    if inside.sum() < MIN_BINS:
        return 0.0, np.inf
    return slope(metric.ends[inside].astype(np.float64), metric.means[inside], noise(metric.means))


def _rises(metric: Metric, after: int) -> bool:
    """Whether it rises from a step to the end, beyond doubt and by a tenth of itself."""
    rise, error = _slope(metric, after)
    inside = metric.ends > after
    return rise > DOUBT * error and rise * (metric.ends[-1] - after) > 0.1 * float(np.abs(metric.means[inside]).mean())


def _stalls(metric: Metric, step: int) -> bool:
    """Whether it rises more slowly after a step than before, beyond doubt, or falls."""
    before, after = _slope(metric, until=step), _slope(metric, after=step)
    return (metric.ends > step).sum() >= SETTLED and after[0] + DOUBT * after[1] < STALLED * max(0.0, before[0])


def _threes(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means of three in a row."""
    return np.convolve(values, np.ones(STATE) / STATE, "valid")


def _rewards(score: Metric, reward: Metric) -> NDArray[np.float64]:
    """The training reward where a score was evaluated, as means of three."""
    return _threes(np.interp(score.ends, reward.ends, reward.means))


def _lags(score: Metric, reward: Metric) -> bool:
    """Whether a score, level with the reward at first, gains much less: in points, and as a share of where it began."""
    scores, rewards = _threes(score.means), _rewards(score, reward)
    gain, trained = float(scores[-1] - scores[0]), float(rewards[-1] - rewards[0])
    level = abs(scores[0] - rewards[0]) < LEVEL
    return bool(level and trained > TRAINED and gain < HELD_OUT_LAG * trained * min(1.0, abs(scores[0] / rewards[0])))


def _state(metric: Metric, there: NDArray[np.bool_]) -> int | None:
    """The first step of the first three consecutive bins that are so; None if there are none."""
    rows = np.flatnonzero(np.convolve(there, np.ones(STATE), "valid") >= STATE)
    if not len(rows):
        return None
    before = metric.ends[rows[0] - 1] if rows[0] else 0
    return int(metric.steps[metric.steps > before][0])


def _first(metric: Metric, beyond: Callable[[Any], Any]) -> int | None:
    """The step at which the first bin beyond a threshold begins to be so; None if no bin is."""
    there = metric.ends[beyond(metric.means)]
    return _begins(metric, int(there[0]), beyond) if len(there) else None


def _begins(metric: Metric, end: int, beyond: Callable[[Any], Any], after: int = 0) -> int:
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
