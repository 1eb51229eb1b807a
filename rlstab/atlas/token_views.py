"""Panels of the tokens of the cloud, by what is done to them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlstab.atlas.axes import TIMES, Axis
from rlstab.atlas.cloud import LIMIT, live
from rlstab.atlas.effect import Decided, cloud_of, factors
from rlstab.atlas.panel import (
    ALONE,
    BLUE,
    GONE,
    GREEN,
    ORANGE,
    PALE_BLUE,
    PALE_ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Marks,
    Panel,
)
from rlstab.core.batch import TokenBatch
from rlstab.core.loss import Part

#: Factors that are this near to 1 leave a token alone.
ALIKE = 1e-3
#: Between the shades; never a number that somebody publishes, for there rounding would decide.
_DAMPED, _BOOSTED = (0.49, 0.91), (1.04, 1.51)
_POWERS = {1e-4: "10⁻⁴", 1e-3: "0.001", 1e-2: "0.01", 1e-1: "0.1", 1.0: "1"}
_PROBABILITY = Axis("probability of the token", 7e-6, 1.6, {1e-5: "10⁻⁵", **_POWERS}, log=True)
_ENTROPY = Axis("entropy, nats", 7e-5, 5.0, _POWERS, log=True)


def plane(decided: Decided) -> list[Panel]:
    """Probability against entropy, rewarded tokens and punished ones."""
    batch = cloud_of(decided.method)
    part = decided.part(batch)
    entropies = batch.signal("entropies")
    points = list(zip(batch.logprobs.exp().tolist(), entropies.tolist(), strict=True))
    found = []
    for title, side in (("Rewarded tokens", batch.rewarded), ("Punished tokens", batch.punished)):
        found.append(Panel(title, _PROBABILITY, _ENTROPY, marks=tuple(_marks(part, points, side))))
    return found


def rows(decided: Decided) -> list[Panel]:
    """A row for each response, a mark for each token."""
    batch = cloud_of(decided.method)
    part = decided.part(batch)
    order = sorted(range(batch.num_sequences), key=lambda row: float(batch.lengths[row]))
    found = []
    for title, side in (("Rewarded responses", batch.rewarded), ("Punished responses", batch.punished)):
        here = [row for row in order if bool(side[batch.sequence == row].any())]
        place = {row: float(number) for number, row in enumerate(here, 1)}
        points = [
            (float(at), place.get(row, 0.0))
            for at, row in zip((batch.position + 1).tolist(), batch.sequence.tolist(), strict=True)
        ]
        x = Axis(
            "place of the token in its response",
            0,
            LIMIT + 1,
            {1.0: "1", 16.0: "16", 32.0: "32", 48.0: "48", 64.0: "64"},
        )
        y = Axis("responses, the longest above", 0, len(here) + 1.0)
        found.append(Panel(title, x, y, marks=tuple(_marks(part, points, side))))
    return found


def acts(decided: Decided, batch: TokenBatch) -> bool:
    """It does something to some token of the cloud."""
    return any(kind not in ("left alone",) for kind, _ in _kinds(decided.part(batch)))


def varies_within_responses(decided: Decided, batch: TokenBatch) -> bool:
    """Tokens of one response are treated differently."""
    part = decided.part(batch)
    kinds = torch.zeros(len(batch))
    for number, (_, where) in enumerate(_kinds(part), 1):
        kinds[where] = number
    return bool((kinds != batch.spread(kinds[_first(batch)])).any())


def _first(batch: TokenBatch) -> Tensor:
    return torch.tensor([int((batch.sequence == row).nonzero()[0]) for row in range(batch.num_sequences)])


_LOOKS = {
    "left alone": (ALONE, 3.0),
    "held": (GREEN, 3.4),
    "damped a little": (PALE_ORANGE, 4.0),
    "damped": (ORANGE, 4.0),
    "damped a lot": (VERMILION, 4.0),
    "boosted a little": (PALE_BLUE, 4.0),
    "boosted": (SKY, 4.0),
    "boosted a lot": (BLUE, 4.0),
    "turned around": (PURPLE, 4.0),
    "weight 0": (GONE, 4.0),
    "stopped": (GONE, 4.0),
    "dropped": (GONE, 4.0),
    "unclipped": (PURPLE, 3.4),
}


def _marks(part: Part, points: list[tuple[float, float]], side: Tensor) -> Iterator[Marks]:
    found = dict(_kinds(part))
    factor = factors(part, live(part.batch))
    for kind, (colour, size) in _LOOKS.items():
        if kind in found and bool((where := found[kind] & side).any()):
            values = factor[where]
            some = [point for point, here in zip(points, where.tolist(), strict=True) if here]
            yield Marks(some, colour, size, f"{_told(kind, values)}: {len(some)}")


def _told(kind: str, values: Tensor) -> str:
    if kind in ("left alone", "dropped", "stopped", "unclipped"):
        return kind
    if kind == "weight 0":
        return "weight 0, still counted"
    if kind == "held":
        return "under a penalty"
    low, high = float(values.min()), float(values.max())
    alike = high - low < 5e-3
    what = kind.removesuffix(" a little").removesuffix(" a lot")
    return f"{what}, {TIMES} {low:.3g}" + ("" if alike else f" to {high:.3g}")


def _kinds(part: Part) -> Iterator[tuple[str, Tensor]]:
    """Each kind of thing that is done to some tokens with an advantage, and to which; every token is in one of them."""
    terms, batch = part.terms, part.batch
    left = batch.advantages != 0
    factor = factors(part, live(batch))
    gone = factor.abs() < 1e-9
    held = torch.zeros_like(left)
    for penalty in terms.penalties.values():
        held |= torch.ones_like(left) if penalty.where is None else penalty.where
    tests = {
        "dropped": torch.zeros_like(left) if terms.keep is None else ~terms.keep,
        "weight 0": gone & (torch.zeros_like(left) if terms.weight is None else terms.weight == 0),
        "stopped": gone,
        "turned around": factor < 0,
        "damped a lot": factor < _DAMPED[0],
        "damped": factor < _DAMPED[1],
        "damped a little": factor < 1 - ALIKE,
        "boosted a lot": factor > _BOOSTED[1],
        "boosted": factor > _BOOSTED[0],
        "boosted a little": factor > 1 + ALIKE,
        "held": held,
        "unclipped": torch.zeros_like(left) if terms.unclipped is None else terms.unclipped,
        "left alone": torch.ones_like(left),
    }
    for kind, test in tests.items():
        where = left & test
        left = left & ~test
        if bool(where.any()):
            yield kind, where
