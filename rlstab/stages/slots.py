"""Fills the slots of a rollout from a pool of prompts: none twice before all were taken, some slots at random.

All of it is a function of the offer, so a refill finds what its rollout took before by filling those slots again. Once
a rollout has taken the whole pool, which only refills can make it do, the pool begins again: its next turn.
"""

import torch
from torch import Tensor

from rlstab.core.random import uniform
from rlstab.errors import OutOfRange
from rlstab.stages.stage import Offer

#: Added to the seed: for the order of the pool, of prompts of equal value, and of slots that are filled at random. The
#: first two must differ: a random slot must not depend on which of several equal prompts were taken before.
ORDER, TIES, DICE = 1_000_000_021, 1_000_000_033, 1_000_000_087
#: Values that agree to this many decimals are equal: a rounding of the last bit decides nothing.
DECIMALS = 9


def pool_of(name: str, pool: int | None, offer: Offer) -> int:
    """The number of prompts, from 0 on, that a selector draws from: ``pool``, or as many as the task has.

    Args:
        name: the name of the selector.
        pool: the setting `pool` of the selector.
        offer: the slots from which it chooses.

    Raises:
        OutOfRange: neither is known, the task has fewer, or a rollout needs more different prompts.
    """
    if pool is None and offer.size is None:
        raise OutOfRange(
            f"'{name}' draws from a finite pool, but prompts are unlimited. Set its `pool`, such as {16 * offer.count}."
        )
    if pool is not None and offer.size is not None and pool > offer.size:
        raise OutOfRange(
            f"'{name}': pool = {pool}, and the task has {offer.size} training prompts. Set `pool` to at most that."
        )
    size = offer.size if pool is None else pool
    assert size is not None
    if offer.first == 0 and offer.count > size:
        subject, cure = ("the task has", "") if pool is None else ("its pool has", "Raise `pool`, or lower")
        raise OutOfRange(
            f"'{name}' was asked for {offer.count} different prompts, and {subject} {size}. {cure or 'Lower'} "
            f"rollout.prompts to at most {size}."
        )
    return size


def shuffled(offer: Offer, pool: int, turn: int = 0, stream: int = ORDER) -> Tensor:
    """``(pool,)`` int64, all prompts in a separate order for each rollout and turn."""
    positions = torch.arange(pool)
    return uniform(offer.seed + stream, torch.tensor(offer.rollout), torch.tensor(turn), positions).argsort(stable=True)


def at_random(offer: Offer, share: float) -> list[bool]:
    """Bools: the slots of the rollout, up to the last one offered, that are filled at random, on average ``share``."""
    slots = torch.arange(offer.first + offer.count)
    return (uniform(offer.seed + DICE, torch.tensor(offer.rollout), slots) < share).tolist()


def best_first(offer: Offer, values: Tensor) -> Tensor:
    """``(pool,)`` int64, prompts by ``(pool,)`` values, largest first; equal ones are shuffled."""
    order = shuffled(offer, len(values), stream=TIES)
    return order[values.round(decimals=DECIMALS)[order].argsort(descending=True, stable=True)]


def filled(offer: Offer, ranked: Tensor, random_share: float) -> Tensor:
    """``(count,)`` int64: each slot takes the first remaining prompt of ``(pool,)`` ranked ones, or any of them."""
    pool, dice = len(ranked), at_random(offer, random_share)
    chosen: list[int] = []
    for turn, start in enumerate(range(0, len(dice), pool)):
        slots = dice[start : start + pool]
        # a slot finds one that is left among the first as many as there are slots
        sources = [iter(order[: len(slots)].tolist()) for order in (ranked, shuffled(offer, pool, turn))]
        taken: set[int] = set()
        for random in slots:
            chosen.append(next(prompt for prompt in sources[random] if prompt not in taken))
            taken.add(chosen[-1])
    return torch.tensor(chosen[offer.first :], dtype=torch.int64)
