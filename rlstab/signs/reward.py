"""Signs in what a run earns: the reward, its parts, the held-out score, and groups with equal rewards."""

import numpy as np

from rlstab.bins import Sign
from rlstab.signs.metric import DOUBT, FEW, FEWEST, SHORTEST, Metric, Shift, absent, lost_at_once, moved, noise, present
from rlstab.signs.sign import FORMS, PARTS, Curves, detector, unjudged

#: The reward is lost below this share of its level before: twice the scatter between the quarters of sound runs.
KEPT = 0.7
#: A policy of whose answers fewer than this share end, and none has a reward, is broken.
BROKEN = 0.5
#: A task's reward that loses half of its level has been given up, not traded.
PART_KEPT = 0.5
#: Above this share of its level before, another reward has not fallen with it.
HELD = 0.9
#: From this reward on, at most 1, equal groups are solved groups.
SOLVED = 0.9
#: Above this share of groups with equal rewards, hardly any gradient is left; in ordinary runs it is about half.
ZERO_STD = 0.9
#: Above this share, most of the batch trains nothing; below this reward, because the prompts are too hard.
EQUAL, HARD = 0.6, 0.1
#: Growth of the share of equal groups that explains a reward which stalls.
EQUAL_GROWTH = 0.3
#: At a plateau the reward rises over the last half, beyond doubt, by less than this share of what it had gained.
PLATEAU = 0.1
#: The held-out score is lost below this share of its best three evaluations, which counts the same prompts each time,
#: and by this multiple of the noise of three.
HELD_OUT_KEPT, NOISE = 0.9, 4.0
#: It is left behind if it gains less than this share of what the training reward gains.
HELD_OUT_LAG = 0.25
#: The training reward has gained by this much; it counts the same as a score that is this near at the start.
TRAINED, LEVEL = 0.1, 0.2
#: A part of the reward below this has taught nothing while a format is at its ceiling.
UNTAUGHT = 0.05
#: Lines below which the shape of a curve is not judged.
SHAPE = 20


@detector(
    "reward fall",
    f"training reward below {KEPT} x its level before until the end, and by more than the same values in random order; "
    "or, after one or two lines, by more than the range of all later values",
    "reward/mean",
    lines=FEW,
    counted=True,
)
def reward_fall(curves: Curves, metric: Metric) -> Sign:
    """The run loses what it had earned.

    A share needs a bottom. Rewards below 0 are counted from -1, the lowest that a scorer of right and wrong gives, and
    those below that from the lowest level.
    """
    if step := died(curves, metric):
        return present(step, "0 from there on, and the answers no longer end", 0.0, harm=True)
    if refusal := unjudged(metric, SHORTEST):
        return refusal
    bottom = metric.bottom
    if collapse := lost_at_once(metric, KEPT, HARD):
        step, first = collapse
        share = (metric.end - bottom) / (first - bottom)
        return present(step, f"{metric.end:.3g} at the end, {first:.3g} in the first lines", share, harm=True)
    text = "{end} at the end, {before} before" + (f", counted from {bottom:.3g}" if bottom else "")
    return moved(metric, text, lambda before: KEPT * before, bottom=bottom, harm=True)


def died(curves: Curves, metric: Metric) -> int | None:
    """The step from which a run has no reward and no answer that ends, after it had some reward in its first lines.

    No order of so few values is improbable, but two metrics say the same: an update broke the policy.
    """
    earned = int(np.flatnonzero(metric.values)[-1]) + 1 if metric.values.any() else 0
    ended = curves["response/ended"]
    later = ended.values[ended.steps > metric.steps[earned - 1]]
    early = 0 < earned <= max(1, len(metric.values) // 10) and metric.values[:earned].mean() > 0
    if not early or len(later) < FEW or later.max() > BROKEN:
        return None
    return int(metric.steps[min(earned, len(metric.steps) - 1)])


@detector(
    "ends below start",
    "training reward over the last tenth below that of the policy at the start",
    *("reward/true", "reward/mean"),  # an evaluation has no flaky grader, so what it is compared with has none either
    by_itself=False,
    counted=True,
)
def below_start(curves: Curves, metric: Metric) -> Sign:
    """The start is the evaluation at rollout 0, else the first tenth of the run."""
    first = curves.run.evaluations[0] if curves.run.evaluations else {}
    evaluated = first.get("rollout") == 0 and "eval/mean" in first
    start = first["eval/mean"] if evaluated else metric.start
    text = f"ends at {metric.end:.3g}, began at {start:.3g} ({'held out' if evaluated else 'first rollouts'})"
    return present(metric.begins(start, rises=False), text) if metric.end < start else absent(text)


@detector(
    "held-out score leaves the training reward",
    f"the held-out score falls below {HELD_OUT_KEPT} x its level before while the training reward holds, or does not "
    "rise while the training reward does",
    "eval/mean",
    lines=FEWEST,
)
def held_out(curves: Curves, metric: Metric) -> Sign:
    """The reward pays for something other than the task."""
    reward = curves["reward/mean"]
    if refusal := unjudged(reward, SHORTEST):
        return refusal
    text = f"{metric.end:.3g} after {metric.start:.3g}, training reward {reward.end:.3g} after {reward.start:.3g}"
    # of few evaluations no order is improbable: the best three and the last three, by the noise of neighbours
    means = np.convolve(metric.values, np.ones(FEW) / FEW, "valid")
    best = int(means.argmax())
    deviation = np.sqrt(np.mean(np.diff(metric.values, n=2) ** 2) / 6 * 2 / FEW)
    limit = max((1 - HELD_OUT_KEPT) * abs(means[best]), NOISE * deviation)
    earned = float(np.interp(metric.steps[best : best + FEW], reward.steps, reward.smooth).mean())
    if means[best] - means[-1] > limit and reward.end >= earned - (1 - HELD_OUT_KEPT) * abs(earned):
        step = int(metric.steps[best + FEW - 1 + int((means[best:] < means[best] - limit).argmax())])
        return present(step, f"{means[-1]:.3g} after {means[best]:.3g}, training reward {reward.end:.3g}", harm=True)
    gain, gained = metric.end - metric.start, reward.end - reward.start
    if gained < TRAINED or not reward.rises() or abs(metric.start - reward.start) > LEVEL:
        return absent(text)
    # in points, and as a share of where it began
    if gain < HELD_OUT_LAG * gained * min(1.0, abs(metric.start / reward.start) if reward.start else 1.0):
        return present(reward.begins(reward.start + TRAINED, rises=True), text)
    return absent(text)


@detector(
    "rewards that part",
    f"a reward for the task falls below {PART_KEPT} x its level before while that for the format holds; or it falls or "
    f"stalls while another rises; or all of them are below {UNTAUGHT} while that for the format is above {SOLVED}",
    PARTS,
    lines=SHAPE,
)
def components(curves: Curves, metric: Metric) -> Sign:
    """The policy earns the reward that is easier."""
    parts = [part for part in curves.parts if len(part.steps) >= SHAPE]
    if len(parts) < 2:
        return Sign("", None, None, "no second reward")
    forms = [part for part in parts if FORMS.search(part.name)]
    tasks = [part for part in parts if not FORMS.search(part.name)]
    for task in tasks:
        for other in forms or tasks:
            if other is not task and (parting := _part(task, other, other in forms)):
                text = f"{task.name} is {task.end:.3g} at the end, {other.name} {other.end:.3g}"
                return present(parting[0], text, harm=parting[1])
    taught = any(task.smooth.min() < -UNTAUGHT or task.end > UNTAUGHT for task in tasks)
    for form in () if taught or not tasks else forms:
        if form.where(form.steps > form.steps[-1] // 2).values.mean() > SOLVED:
            text = f"no reward for the task is above {UNTAUGHT}, {form.name} is {form.end:.3g}"
            return present(form.begins(SOLVED, rises=True), text)
    return absent(f"{len(parts)} rewards, none at the cost of another")


def _part(task: Metric, other: Metric, form: bool) -> tuple[int, bool] | None:
    """The step at which a task's reward is given up for another one, and whether it is lost; None if it is not."""
    fall = Shift(task.values, rises=False)
    level = KEPT * fall.before
    if fall.before > 0 and task.end < level and fall.is_real:
        step = task.begins(level, rises=False)
        earned = other.where(other.steps < step).values
        holds = form and len(earned) and other.end >= HELD * earned.mean()
        if holds and task.end < PART_KEPT * fall.before:
            return step, True
        if holds or other.rises(after=step):
            return step, False
    if not form or task.end >= SOLVED:
        return None
    # the knee of a curve is its point farthest above the line from its first to its last
    line = np.interp(task.steps, task.steps[[0, -1]], [task.start, task.end])
    knee = int(task.steps[(task.smooth - line).argmax()])
    return (knee, False) if task.stalls(knee) and not other.stalls(knee) and other.rises(after=knee) else None


@detector(
    "zero-variance groups",
    f"more than {ZERO_STD} of the groups with equal rewards over the last tenth, more than half of them not solved",
    "reward/zero_std_groups",
    lines=FEWEST,
    counted=True,
)
def zero_std_groups(curves: Curves, metric: Metric) -> Sign:
    """Where the rewards are 0 and 1 the mean reward is at least the share of solved groups."""
    reward = curves["reward/mean"]
    if refusal := unjudged(reward, lines=1):
        return refusal
    solved = reward.end >= metric.end / 2
    text = f"{metric.end:.2f} of the groups at the end, at reward {reward.end:.3g}"
    if metric.end <= ZERO_STD or solved:
        return absent(f"{text}: mostly solved" if metric.end > ZERO_STD else text)
    return present(metric.begins(ZERO_STD, rises=True), text, harm=not reward.rises())


@detector(
    "prompts too easy or too hard",
    f"more than {EQUAL} of the groups have equal rewards throughout, at a reward below {HARD} that does not rise; or "
    f"at the end, {EQUAL_GROWTH} more of them than before, and the reward does not rise",
    "reward/zero_std_groups",
    "reward/std",
    "reward/mean",
    lines=SHAPE,
)
def difficulty(curves: Curves, metric: Metric) -> Sign:
    """Without the share of such groups, a step without any spread shows it, or a reward next to nothing."""
    reward = curves.tasks[0]
    if refusal := unjudged(reward, SHAPE):
        return refusal
    counted = metric.name == "reward/zero_std_groups"
    if not counted:
        least = 0.0 if metric.name == "reward/std" else HARD / 5
        metric = Metric(metric.name, metric.steps, (np.abs(metric.values) <= least).astype(np.float64))
    share = float(metric.values.mean())
    text = f"{share:.2f} of the {'groups' if counted else 'steps'} have equal rewards, at reward {reward.end:.3g}"
    low = np.abs(reward.smooth).max() < HARD
    if share > EQUAL and low and not (reward.rises() and reward.end > HARD / 5):
        return present(int(metric.steps[0]), f"{text}: too hard", harm=True)
    growth = Shift(metric.values, rises=True)
    grown = counted and metric.end > EQUAL and metric.end > growth.before + EQUAL_GROWTH
    if grown and growth.is_real:
        step = metric.begins(growth.before + EQUAL_GROWTH, rises=True)
        if not reward.rises(after=step):
            text = f"{metric.end:.2f} of the groups have equal rewards, {growth.before:.2f} before; the reward is level"
            return present(step, text)
    return absent(text)


@detector(
    "plateau",
    f"the reward rose and, beyond doubt, rises by less than {PLATEAU:g} x that in the last half, below {SOLVED}; the "
    "held-out score does not rise either",
    "reward/mean",
    lines=2 * SHAPE,
)
def plateau(curves: Curves, metric: Metric) -> Sign:
    """The reward no longer rises."""
    middle = int(metric.steps[len(metric.steps) // 2])
    later = metric.where(metric.steps > middle)
    gained = float(later.values.mean()) - metric.start
    rise, error = metric.slope(after=middle)
    span = float(metric.steps[-1] - middle)
    text = f"{rise * span:+.2g} in the last {span:.0f} steps, {gained:+.3g} before"
    flat = abs(rise * span) + DOUBT * error * span < PLATEAU * gained
    if gained <= 0 or not flat or metric.end >= SOLVED or not metric.rises() or curves["eval/mean"].rises(after=middle):
        return absent(text)
    return present(metric.begins(float(later.values.mean()) - noise(metric.smooth), rises=True), text)
