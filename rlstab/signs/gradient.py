"""Signs in the gradient and in the steps that it makes."""

from bisect import insort

import numpy as np
from numpy.typing import NDArray

from rlstab.bins import Sign, bin_weights
from rlstab.signs.metric import SHORTEST, Metric, Shift, absent, moved, present
from rlstab.signs.reward import SOLVED
from rlstab.signs.sign import Curves, detector

#: A norm above this multiple of the median so far may be a spike; clipping hides it from the weights, not from here.
SPIKE = 10.0
#: A spike is also this many deviations above the median by its logarithm: where few groups differ, norms have a heavy
#: tail, and in sound runs with two groups a step single norms are five deviations above the others.
DEVIATIONS = 7.0
#: A single spike that does no harm is not a pattern: sound runs have one of 1,500 x the median.
SPIKES = 3
#: A norm or a spread of advantages below this share of its level before counts as no gradient.
NO_GRADIENT = 0.03
#: Growth of the share of clipped tokens, as a difference and as a multiple. What was clipped before is normal for the
#: objective: a ratio of whole sequences clips half of the tokens in a sound run.
CLIPPED, CLIPPED_GROWTH = 0.1, 1.5


@detector(
    "NaN or Inf",
    "an optimizer step refused for NaN or Inf, or a loss, a reward or a gradient norm that is not finite",
    "optimizer_steps/refused",
    "gradient/norm",
    lines=0,
    counted=True,
)
def refused_steps(curves: Curves, metric: Metric) -> Sign:
    """The metric is written only where there was something to count."""
    if metric.name != "optimizer_steps/refused" or not metric.values.any():
        return absent("NaN or Inf in 0 optimizer steps")
    width = curves.run.bin_width
    counts = metric.values * (bin_weights(width, metric.steps) if width > 1 else 1.0)
    text = f"NaN or Inf in {round(float(counts.sum()))} optimizer steps"
    return present(int(metric.steps[(metric.values > 0).argmax()]), text, harm=True)


@detector(
    "gradient spikes",
    f"{SPIKES} gradient norms above {SPIKE:g} x the median so far, and {DEVIATIONS:g} deviations above it by their "
    "logarithm",
    "gradient/norm",
    counted=True,
)
def gradient_spikes(curves: Curves, metric: Metric) -> Sign:
    """Steps whose groups are all equal have no gradient, and do not count."""
    largest = curves["gradient/largest_norm"]
    metric = largest if len(largest.steps) else metric
    if curves.run.bin_width > 1:  # a results file has means over ten rollouts, and the largest norms beside them
        steps, values = curves.run.largest.get("gradient/largest_norm", (metric.steps, metric.values))
        metric = Metric(metric.name, steps, values)
    norms = metric.where(metric.values > 0)
    if len(norms.steps) < SHORTEST:
        return absent("fewer than six steps have a gradient")
    medians = running_medians(norms.values)
    # so far: in a run that dies, later norms are near 0, and the ordinary ones before would look like spikes
    deviations = 1.4826 * running_medians(np.abs(np.log(norms.values / medians)))
    spikes = np.log(norms.values / medians) > np.maximum(np.log(SPIKE), DEVIATIONS * deviations)
    spikes[: SHORTEST - 1] = False
    largest_multiple = (norms.values / medians).max()
    text = f"the largest norm is {largest_multiple:.3g} x the median of the earlier steps with a gradient"
    return present(int(norms.steps[spikes.argmax()]), text) if spikes.sum() >= SPIKES else absent(text)


@detector(
    "no gradient",
    f"the norm, or the spread of advantages, below {NO_GRADIENT} x its level before until the end, or a learning rate "
    f"of 0; or no gradient from the start, at a reward below {SOLVED} that does not rise",
    "gradient/norm",
    "advantage/std",
    "lr",
)
def no_gradient(curves: Curves, metric: Metric) -> Sign:
    """A log that rounds may have zeros all along: then the reward must not rise."""
    reward = curves["reward/mean"]
    names = ("gradient/norm", "advantage/std", "lr")
    logged = [metric for name in names if len((metric := curves[name]).steps) >= SHORTEST]
    for metric in logged:
        if not metric.values.any():
            if metric.name == "lr" and len(logged) > 1 and logged[0].values.any():
                continue  # rounded: a console prints 1e-6 as 0.000
            if len(reward.steps) >= SHORTEST and reward.end < SOLVED and not reward.rises():
                return present(int(metric.steps[0]), f"{metric.name} is 0 throughout", harm=True)
            continue
        positive = metric.where(metric.values > 0)
        ends = metric.where(metric.steps > positive.steps[-1])
        vanished = Shift((metric.values > 0).astype(np.float64), rises=False)
        if len(ends.steps) >= SHORTEST and vanished.after == 0 and vanished.is_real:
            return present(int(ends.steps[0]), f"{metric.name} is 0 from there on")
        if metric.name == "lr" or len(positive.steps) < SHORTEST:
            continue
        fall = Shift(np.log(positive.values), rises=False)
        level = NO_GRADIENT * np.exp(fall.before)
        if positive.end < level and fall.is_real and not (len(reward.steps) and reward.end >= SOLVED):
            text = (
                f"{metric.name} is {positive.end:.3g} at the end, {np.exp(fall.before):.3g} before, where there is any"
            )
            return present(positive.begins(level, rises=False), text)
    return absent(", ".join(f"{metric.name} is {metric.end:.3g}" for metric in logged))


@detector(
    "more tokens beyond the trust region",
    f"{CLIPPED} more of the tokens clipped than before, {CLIPPED_GROWTH:g} x as many, until the end",
    "ratio/clipped",
)
def clipped(curves: Curves, metric: Metric) -> Sign:
    """Clipped tokens have no gradient; a share that is clipped from the start is normal for the objective."""
    text = "{end} of the tokens at the end, {before} before"
    return moved(metric, text, lambda before: max(before + CLIPPED, CLIPPED_GROWTH * before), rises=True)


def running_medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of each value and all before it."""
    ordered: list[float] = []
    medians = []
    for value in values.tolist():
        insort(ordered, value)
        medians.append((ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2)
    return np.array(medians)
