"""One metric of a run, and whether it has moved for good: the one test behind the signs.

A curve is cut in three: anything, a level before, and a level from there to its end. Of all cuts, the one with the
largest move between the last two counts, weighed by their lengths. Noise has such a cut too, and a heavy tail a large
one, so the move is compared with those of the same values in random order. Where neighbours are correlated, longer
blocks are reordered, which makes a wave as likely as a move.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlstab.bins import Sign

#: Lines over which an end is averaged, at least; one line is an outlier, two may be.
FEW = 3
#: Lines of a smooth value.
NEIGHBOURS = 5
#: A move that is at most so probable in another order of the same values is not chance. Some fifteen signs are looked
#: for in a log, so all together are found by chance in about 3 % of logs.
CHANCE = 0.002
#: Random orders. One of them may reach the move.
ORDERS = 1999
#: Orders of which the moves are in memory at once. The first few are enough for most noise.
CHUNK, FIRST = 200, 20
#: A curve is reordered in at most this many blocks, for speed.
MOST_BLOCKS = 60
#: Fewer blocks have too few orders: a curve that is shorter than this is judged by a formula instead.
LEAST_BLOCKS = 24
#: A level has at least this many lines, and this share of the curve.
LINES, SHARE = 3, 0.05
#: A curve with fewer lines is not judged.
SHORTEST = 6
#: Lines below which a slope is in doubt, and standard errors beyond which it is not.
FEWEST, DOUBT = 5, 2.0
#: A curve that rises by less than this share of its rate before, beyond doubt, stalls.
STALLED = 1 / 3


@dataclass(eq=False)
class Metric:
    """One metric of a run.

    Attributes:
        name: its name.
        steps, values: the logged ones, all finite.
    """

    name: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    @cached_property
    def start(self) -> float:
        """Its mean over the first tenth of the lines; 0 without any."""
        return float(self.values[: self._tenth].mean()) if len(self.values) else 0.0

    @cached_property
    def end(self) -> float:
        """Its mean over the last tenth of the lines; 0 without any."""
        return float(self.values[-self._tenth :].mean()) if len(self.values) else 0.0

    @property
    def _tenth(self) -> int:
        return max(FEW, len(self.values) // 10)

    @cached_property
    def smooth(self) -> NDArray[np.float64]:
        """Its means over a few neighbours."""
        return running_means(self.values, NEIGHBOURS)

    @cached_property
    def bottom(self) -> float:
        """The value from which a share of it is counted: 0; or of rewards below 0, -1, or their lowest level."""
        lowest = float(self.smooth.min(initial=0.0))
        return min(lowest, -1.0) if lowest < 0 else 0.0

    def begins(self, level: float, rises: bool) -> int:
        """The step from which the values are beyond a level for good.

        It begins the tail of the curve whose excess over the level has the largest sum: a single value on the other
        side does not end a state, and a single one before does not begin it.
        """
        excess = self.values - level if rises else level - self.values
        return int(self.steps[len(excess) - 1 - int(np.cumsum(excess[::-1]).argmax())])

    def where(self, chosen: NDArray[np.bool_]) -> Metric:
        """Some of its lines."""
        return Metric(self.name, self.steps[chosen], self.values[chosen])

    def slope(self, after: float = 0, until: float = np.inf) -> tuple[float, float]:
        """The rise per step within some steps, and its standard error, which is infinite if there are too few."""
        part = self.where((self.steps > after) & (self.steps <= until))
        if len(part.steps) < FEWEST:
            return 0.0, np.inf
        centred = part.steps - part.steps.mean()
        spread = float(centred @ centred)
        return float(centred @ part.values) / spread, noise(self.values) / math.sqrt(spread)

    def rises(self, after: int = 0) -> bool:
        """Whether it rises from a step to the end, beyond doubt and by a tenth of itself."""
        rise, error = self.slope(after)
        later = self.values[self.steps > after]
        return rise > DOUBT * error and rise * (self.steps[-1] - after) > 0.1 * float(np.abs(later).mean())

    def stalls(self, step: int) -> bool:
        """Whether it rises more slowly after a step than before, beyond doubt, or falls."""
        before, after = self.slope(until=step), self.slope(after=step)
        return after[0] + DOUBT * after[1] < STALLED * max(0.0, before[0])


def running_means(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """``(n,)`` means of ``width`` values around each, fewer at both ends."""
    if not len(values):
        return values
    sums, counts = (np.convolve(line, np.ones(width), "same") for line in (values, np.ones(len(values))))
    return np.asarray(sums / counts)


def noise(values: NDArray[np.float64]) -> float:
    """Standard deviation of one value, without what a steady rise or fall adds; 0 for fewer than three.

    Second differences of independent values vary by the square root of 1 + 4 + 1 more than each; 1.4826 makes a
    deviation of the median of normal ones.
    """
    return 1.4826 * float(np.median(np.abs(np.diff(values, n=2)))) / math.sqrt(6) if len(values) > 2 else 0.0


@dataclass(eq=False)
class Shift:
    """The largest move of a curve in one direction, to a level that lasts until the end.

    Attributes:
        values: ``(n,)`` finite, at least :data:`SHORTEST` of them.
        rises: whether a rise is looked for, or a fall.
        before, after: the levels before it, a mean, and from there to the end.
    """

    values: NDArray[np.float64]
    rises: bool

    def __post_init__(self) -> None:
        self.signed = self.values if self.rises else -self.values
        count = len(self.values)
        blocks = _means(self.signed, min(count, MOST_BLOCKS))
        self.moves = _moves(blocks, count)
        best = int(self.moves.argmax())
        start, middle = (int(edge[best]) for edge in _cuts(len(blocks), count)[:2])
        self.parts = blocks[:start], blocks[start:middle], blocks[middle:]
        self.before, self.after = ((1 if self.rises else -1) * float(part.mean()) for part in self.parts[1:])

    @cached_property
    def is_real(self) -> bool:
        """Whether a move so large is improbable in another order of the same values."""
        count, blocks, largest = len(self.values), sum(map(len, self.parts)), float(self.moves.max())
        if largest <= 0:
            return False
        deviation, correlation = _noise(np.concatenate([part - part.mean() for part in self.parts if len(part)]))
        sound = deviation > 1e-9 * largest and correlation > 2 / math.sqrt(blocks)  # not rounding, nor chance
        longer = (1 + correlation) / (1 - correlation) if sound else 1.0  # blocks that count as one
        if count < LEAST_BLOCKS:
            # a bound on the probability at any of the cuts, for normal noise around three fitted levels
            error = max(deviation * math.sqrt(longer * count / (count - 3)), 1e-12 * largest)
            return len(self.moves) * math.erfc(largest / error / math.sqrt(2)) / 2 <= CHANCE
        return _by_order(self.signed, max(LEAST_BLOCKS, int(blocks / longer))) <= CHANCE


def _means(values: NDArray[np.float64], blocks: int) -> NDArray[np.float64]:
    """The means of equally long parts of a curve."""
    edges = np.linspace(0, len(values), blocks + 1).astype(np.int64)
    return np.asarray(np.add.reduceat(values, edges[:-1]) / np.diff(edges))


@lru_cache
def _cuts(blocks: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """All cuts of a curve: the first block of the level before, of the level after, and the weight of the move."""
    least = max(math.ceil(LINES * blocks / count), math.ceil(SHARE * blocks))
    first, second = np.triu_indices(blocks + 1, least)
    long = blocks - second >= least
    first, second = first[long], second[long]
    return first, second, 1 / np.sqrt(1 / (second - first) + 1 / (blocks - second))


def _moves(blocks: NDArray[np.float64], count: int, chosen: Any = slice(None)) -> NDArray[Any]:
    """The weighed rise at each of the chosen cuts; (..., blocks) to (..., cuts)."""
    first, second, weights = (column[chosen] for column in _cuts(blocks.shape[-1], count))
    sums = np.concatenate([np.zeros((*blocks.shape[:-1], 1)), np.cumsum(blocks, axis=-1)], axis=-1)
    before = (sums[..., second] - sums[..., first]) / (second - first)
    after = (sums[..., -1:] - sums[..., second]) / (blocks.shape[-1] - second)
    return np.asarray((after - before) * weights)


@lru_cache
def _orders(blocks: int) -> NDArray[np.int64]:
    """Random orders of some blocks, the same for each curve."""
    generator = np.random.default_rng(0)
    return generator.permuted(np.tile(np.arange(blocks), (ORDERS, 1)), axis=1)


def _by_order(values: NDArray[np.float64], blocks: int) -> float:
    """The probability of a move as large, from random orders and that of the run; above :data:`CHANCE`, a lower bound.

    A level that lasts from the beginning is compared with such levels alone, of which there are fewer, and line by
    line: a run that dies in its first lines has no longer blocks. Two comparisons double the probability.
    """
    count = len(values)
    compared = []
    for size, from_start in ((blocks, False), (min(count, MOST_BLOCKS), True)):
        chosen = (_cuts(size, count)[0] == 0) == from_start
        means = _means(values, size)
        compared.append((means, chosen, _moves(means, count, chosen).max() * (1 - 1e-9)))
    reached = np.zeros(2, np.int64)
    for start, stop in itertools.pairwise((0, FIRST, *range(CHUNK, ORDERS, CHUNK), ORDERS)):
        for index, (means, chosen, move) in enumerate(compared):
            if 2 * (1 + reached[index]) / (1 + ORDERS) <= CHANCE:  # else it is chance, however many the others add
                orders = _orders(len(means))[start:stop]
                reached[index] += (_moves(means[orders], count, chosen).max(axis=1) >= move).sum()
    return min(1.0, 2 * float(1 + reached.min()) / (1 + ORDERS))


def _noise(residuals: NDArray[np.float64]) -> tuple[float, float]:
    """The standard deviation of residuals, and the correlation of neighbours.

    Both are taken from differences, neighbours against those three lines apart, so that a trend does not count.
    """
    neighbours = float(np.mean(np.diff(residuals) ** 2)) / 2
    variance = max(neighbours, float(np.mean((residuals[3:] - residuals[:-3]) ** 2)) / 2)
    return math.sqrt(variance), min(1 - neighbours / variance, 0.9) if variance else 0.0


# -- judgements --------------------------------------------------------------------------------------------------------


def moved(
    metric: Metric,
    text: str,
    level: Callable[[float], float],
    *,
    rises: bool = False,
    bottom: float = 0.0,
    harm: bool = False,
) -> Sign:
    """The judgement whether a curve ends beyond a level, and has got there by more than chance.

    Args:
        metric: the curve.
        text: what is said of it, with ``{end}`` and ``{before}``.
        level: the level to be passed, from that before the move, both counted from the bottom.
        rises: whether to look for a rise.
        bottom: the value from which the share that remains is counted.
        harm: whether it hurts the run.
    """
    change = Shift(metric.values, rises)
    before = change.before - bottom
    limit = bottom + level(before)
    text = text.format(end=f"{metric.end:.3g}", before=f"{change.before:.3g}")
    if not (metric.end > limit if rises else metric.end < limit) or not change.is_real:
        return absent(text)
    return present(metric.begins(limit, rises), text, (metric.end - bottom) / before if before > 0 else None, harm=harm)


def lost_at_once(metric: Metric, share: float, least: float) -> tuple[int, float] | None:
    """The step from which a curve has lost what it had in its first line or two, and its value before.

    No order of so few values is improbable, but their distance from all later ones is: it is larger than the range of
    those.

    Args:
        metric: the curve.
        share: the share of the first values, below which all later ones are.
        least: the first values are higher above the bottom: less may be one lucky answer.
    """
    for count in range(1, min(FEW, len(metric.values) - SHORTEST + 2)):
        first, later = metric.values[:count], metric.values[count:]
        lowest, highest = float(first.min()), float(later.max())
        height = lowest - metric.bottom
        below = height > least and highest - metric.bottom < share * height
        if below and lowest - highest > highest - float(later.min()):
            return int(metric.steps[count]), float(first.mean())
    return None


def absent(text: str) -> Sign:
    """The judgement that a sign is absent."""
    return Sign("", False, None, text)


def present(step: int, text: str, share: float | None = None, *, harm: bool = False) -> Sign:
    """The judgement that a sign is present."""
    return Sign("", True, step, text, share, harm)
