"""Signs in the entropy of the policy, and in its distance from the reference policy."""

import numpy as np

from rlstab.bins import Sign
from rlstab.signs.metric import SHORTEST, Metric, moved, present
from rlstab.signs.sign import Curves, detector

#: Entropy has collapsed below this share of its level before: plain GRPO on countdown came to 0.3, and still improved.
FLOOR = 0.25
#: Below this many nats per token nearly all tokens are certain, whatever the start was.
LEAST = 0.02
#: A reward below this that does not rise has most of the task before it.
UNLEARNT = 0.5
#: Entropy has blown up above this multiple; where the learning rate was fatal it rose by 1.3.
CEILING = 1.5
#: Nats per token between policy and reference, beyond which a token is e times as likely as before, on average.
KL = 1.0


@detector(
    "entropy floor",
    f"token entropy below {FLOOR} x its level before, or below {LEAST} nats, until the end",
    "tokens/entropy",
    counted=True,
)
def entropy_floor(curves: Curves, metric: Metric) -> Sign:
    """Nearly all tokens are certain. It hurts a run that has not learnt: nothing is tried any more."""
    text = "{end} nats at the end, {before} before"
    reward = curves["reward/mean"]
    stuck = len(reward.steps) >= SHORTEST and reward.end < UNLEARNT and not reward.rises()
    if metric.smooth.max() < LEAST:
        return present(int(metric.steps[0]), text.format(end=f"{metric.end:.3g}", before=f"{metric.start:.3g}"))
    return moved(metric, text, lambda before: max(FLOOR * before, LEAST), harm=stuck)


@detector(
    "entropy blow-up",
    f"token entropy above {CEILING} x its level before, until the end",
    "tokens/entropy",
    counted=True,
)
def entropy_blow_up(curves: Curves, metric: Metric) -> Sign:
    """The policy becomes noise."""
    text = "{end} nats at the end, {before} before"
    return moved(metric, text, lambda before: CEILING * max(before, LEAST), rises=True)


@detector(
    "drift from the reference",
    f"more than {KL:g} nat per token between policy and reference, until the end",
    "kl/value",
)
def kl_drift(curves: Curves, metric: Metric) -> Sign:
    """One token may make up all of the KL of a step, so no step counts as more than twice the threshold."""
    capped = Metric(metric.name, metric.steps, np.minimum(metric.values, 2 * KL))
    return moved(
        capped, f"{metric.end:.3g} nats per token at the end, {{before}} before", lambda before: KL, rises=True
    )
