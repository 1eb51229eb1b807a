"""Signs that something is wrong in a run, each with the step at which it begins.

Most are the detectors of the report (:mod:`rlstab.report.collapse`), on the same bins of ten steps. Those here beside
them read what a report does not judge: the sampler, the trust region, answers that are cut off from the beginning. The
thresholds are choices, made on runs of development seeds; docs/how-to/diagnose.md says how often they are right on
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlstab.diagnose.run_log import RunLog
from rlstab.report import collapse
from rlstab.report.runs import EMPTY, WIDTH, binned

#: Sampler and trainer differ at the first step, when both have the same weights: by metric, the threshold. Of
#: probabilities, verl's FAQ calls 0.005 normal and 0.01 a problem of precision; the two others are what int4 weights do
#: to the countdown policy, less a margin.
MISMATCH = {"sampler/gap": 0.02, "mismatch/k3": 0.002, "sampler/probability_gap": 0.01}
#: They drift apart later: above so many times that threshold ...
DRIFT = 3.0
#: ... and so many times the first value.
DRIFT_GROWTH = 3.0
#: More of the tokens than this share beyond the trust region, and so without a gradient.
CLIPPED = 0.1
#: More of the answers than this share cut off in the first line of the log.
CUT_OFF = 0.25
#: So many more of them in a line than in the one before: no length grows like that, an update broke the policy.
BROKEN = 0.5
#: Steps over which the beginning of a sign is averaged.
SPAN = 5


@dataclass(frozen=True)
class Sign:
    """What one detector says of one run.

    Attributes:
        name: a key of :data:`SIGNS`.
        fired: whether it is there; None where the log does not say.
        step: at which it begins; None if it is not there.
        text: the values in words, or why nothing can be said.
        share: what is left, where something falls: of the reward, of the answers that end.
        first_line: it is there in the first line of the log.
        sudden: from one line of the log to the next.
    """

    name: str
    fired: bool | None
    step: int | None
    text: str
    share: float | None = None
    first_line: bool = False
    sudden: bool = False


_Detect: TypeAlias = Callable[[RunLog], Sign]


@dataclass(frozen=True)
class Detector:
    """How a sign is found.

    Attributes:
        title: what it is called.
        reads: metrics of ours of which it needs one.
        unseen: what cannot be seen without them, in words that end a sentence.
        detect: looks at a run.
    """

    title: str
    reads: tuple[str, ...]
    unseen: str
    detect: _Detect


#: By name, in the order in which a reader looks at them.
SIGNS: dict[str, Detector] = {}


def _sign(title: str, reads: Iterable[str], unseen: str) -> Callable[[_Detect], _Detect]:
    """Enter what looks at a run into :data:`SIGNS`, under its own name."""

    def register(detect: _Detect) -> _Detect:
        SIGNS[detect.__name__] = Detector(title, tuple(reads), unseen, detect)
        return detect

    return register


def signs(log: RunLog) -> list[Sign]:
    """What every detector says of a run, in the order of :data:`SIGNS`."""
    # the report speaks of rollouts
    return [
        replace(sign, text=sign.text.replace("rollout", log.unit))
        for sign in (detector.detect(log) for detector in SIGNS.values())
    ]


@_sign("sampler and trainer differ from the start", MISMATCH, "whether the sampler is the policy")
def sampler_mismatch(log: RunLog) -> Sign:
    """Sampler and trainer differ in the first line of the log, when their weights are the same."""
    metric = _gap(log)
    if metric is None:
        return Sign("sampler_mismatch", None, None, f"{', '.join(MISMATCH)} are missing")
    steps, values = log.metrics[metric]
    first, most = float(values[0]), MISMATCH[metric]
    text = f"{metric} is {first:.3g} in the first line of the log, {most:g} would be much"
    if steps[0] > 1:
        text += f"; that is step {steps[0]}, where a sampler may also be behind"
    return Sign("sampler_mismatch", first > most, int(steps[0]) if first > most else None, text)


@_sign("sampler and trainer drift apart", MISMATCH, "whether the samples are older than the policy")
def sampler_drift(log: RunLog) -> Sign:
    """Sampler and trainer drift apart: from a small difference at the start to a large one."""
    metric = _gap(log)
    if metric is None:
        return Sign("sampler_drift", None, None, f"{', '.join(MISMATCH)} are missing")
    first = float(log.metrics[metric][1][0])
    most = max(DRIFT * MISMATCH[metric], DRIFT_GROWTH * first)
    step, highest = _above(log, metric, most)
    if step is None:
        return Sign("sampler_drift", False, None, f"{metric} is at most {highest:.3g} in ten steps")
    return Sign("sampler_drift", True, step, f"{metric} rises from {first:.3g} to {highest:.3g}")


@_sign("tokens beyond the trust region", ("ratio/clipped",), "how far the policy leaves the data")
def clipped(log: RunLog) -> Sign:
    """Many tokens beyond the trust region: their gradient is cut off."""
    if "ratio/clipped" not in log.metrics:
        return Sign("clipped", None, None, "ratio/clipped is missing")
    step, highest = _above(log, "ratio/clipped", CLIPPED)
    return Sign("clipped", step is not None, step, f"at most {highest:.3g} of the tokens in ten steps")


@_sign(collapse.TITLES["truncation"], ("response/ended",), "whether answers are cut off")
def truncation(log: RunLog) -> Sign:
    """Fewer answers end than at first, as the report says, or too many are cut off from the first step on."""
    steps, values = log.metrics.get("response/ended", EMPTY)
    if len(values) and 1 - values[0] > CUT_OFF:
        text = f"{1 - values[0]:.2f} of the answers are cut off in the first line of the log"
        return Sign("truncation", True, int(steps[0]), text, 1.0, first_line=True)
    start = _first_bin(log, "response/ended")
    end = min(collapse.ENDED, start - collapse.ENDED_DROP)
    sign = _of_report(log, "truncation", "response/ended", lambda mean: mean <= end)
    sudden = bool((values[:-1] - values[1:] > BROKEN).any())
    return sign if sign.share is None or not start else replace(sign, share=sign.share / start, sudden=sudden)


@_sign(collapse.TITLES["zero_std_groups"], ("reward/zero_std_groups",), "whether groups have a gradient at all")
def zero_std_groups(log: RunLog) -> Sign:
    """The report's detector."""
    return _of_report(log, "zero_std_groups", "reward/zero_std_groups", lambda mean: mean > collapse.ZERO_STD)


@_sign(collapse.TITLES["entropy_floor"], ("tokens/entropy",), "whether entropy collapses")
def entropy_floor(log: RunLog) -> Sign:
    """The report's detector."""
    least = max(collapse.ENTROPY_FLOOR * _first_bin(log, "tokens/entropy"), collapse.ENTROPY_LEAST)
    return _of_report(log, "entropy_floor", "tokens/entropy", lambda mean: mean < least)


@_sign(collapse.TITLES["entropy_blow_up"], ("tokens/entropy",), "whether entropy blows up")
def entropy_blow_up(log: RunLog) -> Sign:
    """The report's detector."""
    most = collapse.ENTROPY_CEILING * max(_first_bin(log, "tokens/entropy"), collapse.ENTROPY_LEAST)
    return _of_report(log, "entropy_blow_up", "tokens/entropy", lambda mean: mean > most)


@_sign(collapse.TITLES["gradient_spikes"], ("gradient/norm",), "whether single updates are out of proportion")
def gradient_spikes(log: RunLog) -> Sign:
    """The report's detector; it begins at the first norm that is so many times the median of those before it."""
    detection = collapse.gradient_spikes(log)
    if not detection.fired or detection.rollout is None:
        return Sign("gradient_spikes", detection.fired, None, detection.text)
    steps, norms = log.metrics.get("gradient/largest_norm", log.metrics.get("gradient/norm", EMPTY))
    for place in np.flatnonzero((steps > detection.rollout - WIDTH) & (steps <= detection.rollout)):
        if norms[place] > collapse.SPIKE * np.median(norms[: place + 1]):
            return Sign("gradient_spikes", True, int(steps[place]), detection.text)
    return Sign("gradient_spikes", True, detection.rollout, detection.text)


@_sign("NaN or Inf", ("gradient/norm",), "whether gradients are finite")
def refused_steps(log: RunLog) -> Sign:
    """The report's detector: of other trainers, a gradient norm that is NaN or infinite."""
    if "optimizer_steps/refused" not in log.metrics and "gradient/norm" not in log.metrics:
        return Sign("refused_steps", None, None, "gradient/norm is missing")
    detection = collapse.refused_steps(log)
    steps, counts = log.metrics.get("optimizer_steps/refused", EMPTY)
    first = int(steps[(counts > 0).argmax()]) if detection.fired else None
    return Sign("refused_steps", detection.fired, first, f"NaN or Inf in {detection.text}")


@_sign(collapse.TITLES["reward_fall"], ("reward/mean",), "whether the reward falls")
def reward_fall(log: RunLog) -> Sign:
    """The report's detector; it begins where five steps are below the share of the peak that is kept.

    A share needs a bottom. Rewards below 0 are counted from -1, the lowest that a scorer of right and wrong gives, and
    those below that from the lowest ten steps.
    """
    _, values = binned(log, "reward/mean")
    lowest = float(values.min()) if len(values) else 0.0
    if lowest < 0:
        steps, rewards = log.metrics["reward/mean"]
        bottom = min(lowest, -1.0)
        raised = replace(log, metrics={**log.metrics, "reward/mean": (steps, (rewards - bottom).clip(0))})
        sign = reward_fall(raised)
        return replace(sign, text=f"{sign.text}, counted from {bottom:.3g}")
    peak = float(values.max()) if len(values) else 0.0
    return _of_report(log, "reward_fall", "reward/mean", lambda mean: mean < collapse.REWARD_KEPT * peak)


def _gap(log: RunLog) -> str | None:
    return next((name for name in MISMATCH if name in log.metrics), None)


def _above(log: RunLog, metric: str, most: float) -> tuple[int | None, float]:
    """The step from which the mean of ten steps is above a threshold, None where none is, and the highest mean."""
    ends, means = binned(log, metric)
    high = means > most
    step = _begins(log, metric, int(ends[high.argmax()]), lambda mean: mean > most) if high.any() else None
    return step, float(means.max())


def _first_bin(log: RunLog, metric: str) -> float:
    _, values = binned(log, metric)
    return float(values[0]) if len(values) else 0.0


def _of_report(log: RunLog, name: str, metric: str, beyond: Callable[[float], bool]) -> Sign:
    """A detector of the report, with the step at which ``beyond`` begins to hold."""
    # a sampler that is ahead logs its rewards early: the end of a metric is not that of the run
    read = {key: log.metrics[key] for key in (metric, "reward/mean") if key in log.metrics}
    detection = collapse.DETECTORS[name](replace(log, metrics=read))
    step = None if detection.rollout is None else _begins(log, metric, detection.rollout, beyond)
    return Sign(name, detection.fired, step if detection.fired else None, detection.text, detection.value)


def _begins(log: RunLog, metric: str, end: int, beyond: Callable[[float], bool]) -> int:
    """The first step, in the bin that ends at ``end`` or the one before, that is beyond and five of which are."""
    steps, values = log.metrics[metric]
    width = max(WIDTH, log.bin_width)
    for step in steps[(steps > end - 2 * width) & (steps <= end)].tolist():
        ahead = values[(steps >= step) & (steps < step + SPAN)]
        if beyond(float(ahead[0])) and beyond(float(ahead.mean())):
            return int(step)
    inside: NDArray[np.int64] = steps[steps > end - width]
    return int(inside[0])
