"""Panels of what belongs to a response or to a whole optimizer step: divisors, learning rates, reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from rlstab.atlas.axes import PLAIN, Axis, round_axis
from rlstab.atlas.cloud import LIMIT
from rlstab.atlas.effect import Decided, cloud_of, divisors
from rlstab.atlas.panel import BLUE, DASHES, PUNISHED, REWARDED, SKY, VERMILION, Line, Marks, Panel
from rlstab.core.batch import TokenBatch
from rlstab.core.objective import TokenObjective

#: How many times the mismatch of the cloud.
_TIMES = [0.1 * one for one in range(31)]
#: Optimizer steps of a controller, and the one from which entropy is high.
_STEPS, _TURN = 100, 60
_COLOURS = (BLUE, VERMILION, "#009e73", SKY, "#a0447f", "#e69f00")


def lengths(decided: Decided) -> Panel:
    """The weight of a token over the length of its response, relative to the mean over all tokens.

    Over the place in its response where tokens of one response differ.
    """
    batch = decided.batch
    weights = divisors(decided.part(batch))
    y = round_axis("weight of a token, 1 = in a token mean", [*weights.tolist(), 2.5], zero=True)
    ticks = {float(one): str(one) for one in range(0, LIMIT + 1, 16)}
    one = Line([(0.0, 1.0), (LIMIT + 4.0, 1.0)], PLAIN, width=1.0, label="token mean")
    if bool(((weights - batch.spread(batch.sequence_mean(weights))).abs() > 1e-9).any()):
        x = Axis("place of the token in its response", 0, LIMIT + 4, ticks)
        return Panel("By the place in the response", x, y, (one, *_within(batch, weights)))
    x = Axis("length of the response, tokens", 0, LIMIT + 4, ticks)
    size = batch.spread(batch.lengths)
    sides = {"rewarded": batch.rewarded, "punished": batch.punished}
    known = {name: dict(zip(size[side].tolist(), weights[side].tolist(), strict=True)) for name, side in sides.items()}
    alike = all(abs(up - known["rewarded"].get(at, up)) < 1e-9 for at, up in known["punished"].items())
    drawn = {"any token": known["rewarded"] | known["punished"]} if alike else known
    colours = (BLUE,) if alike else (REWARDED, PUNISHED)
    lines = [
        Line(sorted(some.items()), colour, label=name)
        for (name, some), colour in zip(drawn.items(), colours, strict=True)
    ]
    marks = tuple(Marks(line.points, line.colour, 4.0) for line in lines)
    return Panel("By the length of the response", x, y, (one, *lines), marks)


def _within(batch: TokenBatch, weights: Tensor) -> list[Line]:
    """A short, a middling and a long response, token by token."""
    order = sorted(range(batch.num_sequences), key=lambda row: float(batch.lengths[row]))
    lines = []
    for row, colour in zip((order[0], order[len(order) // 2], order[-1]), _COLOURS, strict=False):
        mine = batch.sequence == row
        points = list(zip((batch.position[mine] + 1.0).tolist(), weights[mine].tolist(), strict=True))
        lines.append(Line(points, colour, label=f"response of {len(points)} tokens"))
    return lines


def mismatches(method: TokenObjective, value: Callable[[Decided], dict[str, float]], label: str) -> list[Panel]:
    """Numbers of the step over the distance of two policies on the cloud; a panel for each distance that matters."""
    for title, moved in (("Between trainer and sampler", _sampled), ("Since the rollout", _drifted)):
        steps = [moved(cloud_of(method), times) for times in _TIMES]
        across = [float((one.logprobs - one.signal("rollout_logprobs")).square().mean().sqrt()) for one in steps]
        rows = [value(Decided.on(method, one)) for one in steps]
        lines = {key: [(at, row[key]) for at, row in zip(across, rows, strict=True)] for key in rows[0]}
        moving = {key: points for key, points in lines.items() if _height(points) > 1e-9}
        if moving:
            x = replace(round_axis("root mean square log-ratio, nats", across, zero=True), high=max(across))
            return [_curves(title, x, label, some) for some in _by_size(moving)]
    return []


_Points = list[tuple[float, float]]


def _height(points: _Points) -> float:
    return max(y for _, y in points) - min(y for _, y in points)


def _by_size(lines: dict[str, _Points]) -> list[dict[str, _Points]]:
    """Large, middling and small numbers apart: on one axis the small ones would lie on zero."""
    sizes: dict[int, dict[str, _Points]] = {}
    for key, points in lines.items():
        largest = max(abs(y) for _, y in points)
        sizes.setdefault(0 if largest > 1.2 else 1 if largest > 0.12 else 2, {})[key] = points
    return [sizes[one] for one in sorted(sizes)]


def _curves(title: str, x: Axis, label: str, lines: dict[str, _Points]) -> Panel:
    y = round_axis(label, [up for points in lines.values() for _, up in points], zero=True)
    x = replace(x, ticks={at: text for at, text in x.ticks.items() if at <= x.high})
    several = len(lines) > 1 or label == "metric"
    drawn = (
        Line(points, _COLOURS[place % 6], DASHES[place // 6 % 3], label=key if several else "")
        for place, (key, points) in enumerate(lines.items())
    )
    return Panel(title, x, y, tuple(drawn))


def _sampled(batch: TokenBatch, times: float) -> TokenBatch:
    """The sampler reports other log-probs; the policy has not moved since."""
    gap = batch.old_logprobs - batch.signal("rollout_logprobs")
    return replace(batch, old_logprobs=batch.logprobs, rollout_logprobs=(batch.logprobs - times * gap).clamp(max=0.0))


def _drifted(batch: TokenBatch, times: float) -> TokenBatch:
    """Sampler and trainer agree; the policy has moved since."""
    old = (batch.logprobs - times * (batch.logprobs - batch.old_logprobs)).clamp(max=0.0)
    return replace(batch, old_logprobs=old, rollout_logprobs=old)


def controller(method: TokenObjective) -> list[Panel]:
    """The prices that a controller asks for while the entropy is low and then high."""
    batch = cloud_of(method)
    low, high = (replace(batch, entropies=scale * batch.signal("entropies")) for scale in (0.3, 3.0))
    state = method.init_state()
    steps = []
    for number in range(1, _STEPS + 1):
        here = low if number < _TURN else high
        decided = Decided.on(method, here, state=state)
        state = decided.state
        terms = decided.part(here).terms
        steps.append((float(number), {name: one.coefficient for name, one in terms.penalties.items()}))
    names = sorted({name for _, some in steps for name in some})
    points = {name: [(at, -some.get(name, 0.0)) for at, some in steps] for name in names}
    if all(len({y for _, y in some}) == 1 for some in points.values()):
        return []
    x = Axis("optimizer step", 1, _STEPS, {float(one): str(one) for one in (1, 20, 40, _TURN, 80, 100)})
    y = round_axis("price of a nat of entropy", [up for some in points.values() for _, up in some], zero=True)
    nats = [float(one.signal("entropies").mean()) for one in (low, high)]
    turn = Line([(float(_TURN), y.low), (float(_TURN), y.high)], PLAIN, "3 3", 1.0,
                f"mean entropy {nats[0]:.2f} nats before, {nats[1]:.2f} from here on")  # fmt: skip
    named = zip(_COLOURS, points.items(), strict=False)
    lines = tuple(Line(some, colour, label=name or "price") for colour, (name, some) in named)
    return [Panel("Over optimizer steps", x, y, (turn, *lines))]


def lr_scale(decided: Decided) -> dict[str, float]:
    """What multiplies the learning rate."""
    terms = decided.part(TokenBatch.empty(decided.method.needs)).terms
    return {"learning rate": 1.0 if terms.lr_scale is None else terms.lr_scale}


def reports(decided: Decided) -> dict[str, float]:
    """The metrics."""
    batch = decided.batch
    report = decided.part(batch).terms.report
    return {name: one.value for name, one in report.items() if float(one.count)}
