"""Signs in the responses: whether they end, how long they are, and whether they repeat themselves."""

from dataclasses import replace

from rlstab.bins import Sign
from rlstab.signs.metric import FEWEST, SHORTEST, Metric, Shift, absent, moved, present
from rlstab.signs.reward import HARD, SOLVED, reward_fall
from rlstab.signs.sign import Curves, detector

#: Above this share of the answers cut off in the first line of the log, the limit on tokens may be too low.
CUT_OFF = 0.25
#: Responses are cut off if fewer than this share end by themselves, and at least this much less than before.
ENDED, ENDED_DROP = 0.9, 0.1
#: Finished answers are lost below this share of what it was.
ENDED_KEPT = 0.5
#: Responses grow if they are longer than this multiple of what they were.
LONGER = 2.0
#: A score that gains less than this share of the growth in length does not follow it.
LAG = 0.25
#: Repetition is present if this much more of the responses repeats itself than before.
REPEATED = 0.2

_GROWS = f"fewer than {ENDED} of the responses end by themselves until the end, {ENDED_DROP} less than before"


@detector(
    "truncation",
    _GROWS,
    "response/ended",
    by_itself=False,
    counted=True,
)
def growing_truncation(curves: Curves, metric: Metric) -> Sign:
    """Fewer answers end by themselves than before.

    It hurts the run where most answers have ceased to end and a reward that rose before has stalled since. Where the
    reward is lost, that is the harm; where it goes on as before, nothing is.
    """
    text = "{end} of the answers end by themselves at the end, {before} before"
    sign = moved(metric, text, lambda before: min(ENDED, before - ENDED_DROP))
    reward = curves["reward/mean"]
    if sign.step is None or (sign.share or 0.0) >= ENDED_KEPT:
        return sign
    return replace(sign, harm=not len(reward.steps) or (reward.end < SOLVED and reward.stalls(sign.step)))


@detector(
    "truncation",
    f"{_GROWS}; or more than {CUT_OFF} of them cut off in the first line",
    "response/ended",
    lines=1,
)
def truncation(curves: Curves, metric: Metric) -> Sign:
    """Too many are cut off from the first step on, or ever more.

    It hurts the run where most are cut off all along and the reward is next to nothing all along: an answer that does
    not end cannot be right. Where the reward fell, whatever took it took the ends too.
    """
    grown = growing_truncation.detect(curves)
    cut_off = 1 - float(metric.values[0])
    if grown.fired or cut_off <= CUT_OFF:
        return grown
    text = f"{cut_off:.2f} of the answers are cut off in the first line of the log, {1 - metric.end:.2f} at the end"
    reward = curves["reward/mean"]
    unearned = len(reward.steps) >= SHORTEST and abs(reward.smooth).max() < HARD and not reward.rises()
    harm = bool(unearned and metric.smooth.max() < ENDED_KEPT and not reward_fall.detect(curves).fired)
    return present(int(metric.steps[0]), text, harm=harm)


@detector(
    "length without gain",
    f"responses more than {LONGER:g} x as long as before until the end, and since they grow the held-out score stalls "
    "or gains little; without one, the reward for the task",
    "response/length",
)
def length_without_gain(curves: Curves, metric: Metric) -> Sign:
    """Longer answers are sound if they are right more often."""
    growth = Shift(metric.values, rises=True)
    longer = metric.end / growth.before if growth.before > 0 else 1.0
    score = next((score for score in (curves["eval/mean"], *curves.tasks) if len(score.steps) >= FEWEST), None)
    if score is None:
        return Sign("", None, None, "no reward/mean")
    text = f"{metric.end:.4g} tokens at the end, {longer:.2g} x as many as before; {score.name} {score.end:.3g}"
    if longer < LONGER or not growth.is_real:
        return absent(text)
    step = metric.begins((1 + LONGER) / 2 * growth.before, rises=True)
    before = score.where(score.steps <= step).values
    start = float(before.mean()) if len(before) else score.start
    little = score.end - start < LAG * (longer - 1) * abs(start)
    return present(step, text) if little and (score.stalls(step) or not score.rises(after=step)) else absent(text)


@detector(
    "repetition",
    f"{REPEATED} more of the responses repeat themselves than before, until the end",
    "response/repetition",
)
def repetition(curves: Curves, metric: Metric) -> Sign:
    """Loops of a policy that has nothing else to say."""
    text = "{end} of the responses at the end, {before} before"
    return moved(metric, text, lambda before: before + REPEATED, rises=True)
