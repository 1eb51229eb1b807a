"""Offers and responses to test selectors with, and how slots are filled, written again with plain loops."""

from __future__ import annotations

import torch

from rlstab.core.random import uniform
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.slots import DICE, ORDER, TIES
from rlstab.stages.stage import Offer, no_features


def offer(count, *, first=0, rollout=0, drawn=None, size=None, seed=0, features=no_features):
    """An offer; ``drawn`` is that of a run whose rollouts all had ``first + count`` prompts."""
    drawn = rollout * (first + count) + first if drawn is None else drawn
    return Offer(rollout, first, count, drawn, size, seed, features)


def responses(rows, limit=24):
    """A batch of ``(prompt, group, raw reward, given)`` rows; the shaped rewards are others."""
    prompts, groups, raw, given = ([row[column] for row in rows] for column in range(4))
    raw = torch.tensor(raw, dtype=torch.float64)
    ids = [torch.tensor(one, dtype=torch.int64) for one in (prompts, groups, range(len(rows)), given)]
    lengths = torch.full_like(raw, 5.0)
    ended = torch.ones_like(raw).bool()
    extra = {"raw_rewards": raw, "prompt_features": torch.zeros((len(rows), 0), dtype=torch.float64)}
    return ResponseBatch(raw - 0.375, lengths, ended, *ids, ids[3] / 10, limit, extra)


def number(seed, *identity):
    return float(uniform(seed, *map(torch.tensor, identity)))


def order_of(seed, rollout, turn, pool, stream=ORDER):
    return sorted(range(pool), key=lambda prompt: number(seed + stream, rollout, turn, prompt))


def fill(values, slots, random_share, *, seed=0, rollout=0):
    """What each of the slots takes, by the value of each prompt; slot by slot, looking at all prompts each time."""
    pool, chosen, taken = len(values), [], set()
    tie = order_of(seed, rollout, 0, pool, TIES)
    for slot in range(slots):
        turn = slot // pool
        if slot % pool == 0:
            taken = set()
        left = [prompt for prompt in order_of(seed, rollout, turn, pool) if prompt not in taken]
        if number(seed + DICE, rollout, slot) >= random_share:
            left.sort(key=lambda prompt: (-round(values[prompt], 9), tie.index(prompt)))
        chosen.append(left[0])
        taken.add(left[0])
    return chosen
