"""Signs in the distance between the sampler and the policy, and in what corrects for it."""

from rlstab.bins import Sign
from rlstab.signs.metric import Metric, absent, moved, present
from rlstab.signs.sign import Curves, detector

#: Sampler and trainer differ at the first step, when both have the same weights: by metric, the threshold. Of
#: probabilities, verl's FAQ calls 0.005 normal and 0.01 a problem of precision; the two others are what int4 weights do
#: to the countdown policy, less a margin.
MISMATCH = {"sampler/gap": 0.02, "mismatch/k3": 0.002, "sampler/probability_gap": 0.01}
#: They drift apart later above this multiple of that threshold and of the first value.
DRIFT = 3.0
#: A mean weight of the correction below this makes every step smaller by as much.
SHRUNK = 0.8


@detector(
    "sampler and trainer differ from the start",
    "in the first line of the log, " + ", or ".join(f"`{name}` above {limit:g}" for name, limit in MISMATCH.items()),
    *MISMATCH,
    lines=1,
)
def sampler_mismatch(curves: Curves, metric: Metric) -> Sign:
    """Both have the same weights in the first line of the log."""
    step, first, limit = int(metric.steps[0]), float(metric.values[0]), MISMATCH[metric.name]
    text = f"{metric.name} is {first:.3g} in the first line of the log, at limit {limit:g} is normal"
    if step > 1:
        text += f"; that is step {step}, where a sampler may also be behind"
    return present(step, text) if first > limit else absent(text)


@detector(
    "sampler and trainer drift apart",
    f"the same metric above {DRIFT:g} x that threshold and {DRIFT:g} x its first value, until the end",
    *MISMATCH,
)
def sampler_drift(curves: Curves, metric: Metric) -> Sign:
    """From a small difference at the start to a large one."""
    first = float(metric.values[0])
    level = DRIFT * max(MISMATCH[metric.name], first)
    return moved(metric, f"{metric.name} is {{end}} at the end, {first:.3g} at first", lambda before: level, rises=True)


@detector(
    "correction that shrinks each step",
    f"a mean weight below {SHRUNK} until the end",
    "correction/weight",
)
def shrunk_steps(curves: Curves, metric: Metric) -> Sign:
    """A correction that leaves the gradient as large as it is has a mean weight of 1."""
    return moved(metric, "mean weight {end} at the end, {before} before", lambda before: SHRUNK)
