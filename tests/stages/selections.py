"""Offers to selectors and answers to their prompts; how slots are filled and what is known, again with plain loops."""

import functools
import math
import random

import torch

from rlstab.core.random import uniform
from rlstab.stages.slots import DICE, ORDER, TIES
from rlstab.stages.stage import Offer, no_features
from tests.stages.responses import batch, settled


def offer(count, *, first=0, rollout=0, drawn=None, size=None, seed=0, features=no_features):
    """An offer; ``drawn`` is that of a run whose rollouts all had ``first + count`` prompts."""
    drawn = rollout * (first + count) + first if drawn is None else drawn
    return Offer(rollout, first, count, drawn, size, seed, features)


def responses(rows):
    """A batch of ``(prompt, group, raw reward, given)`` rows; the shaped rewards are others."""
    prompts, groups, raw, given = map(list, zip(*rows, strict=True))
    extra = {"raw_rewards": raw, "prompt_features": torch.zeros((len(rows), 0), dtype=torch.float64)}
    return batch([reward - 0.375 for reward in raw], groups, 5.0, extra, prompts=prompts, given=given)


def rollouts_of(pool, number, seed):
    """Random rows of several rollouts."""
    dice = random.Random(seed)
    rewards, given = [0.0, 1.0, 0.25, 2.0, -1.0], [0, 0, 3]
    groups = [group for group in range(5) for _ in range(4)]
    return [
        [(dice.randrange(pool), group, dice.choice(rewards), dice.choice(given)) for group in groups]
        for _ in range(number)
    ]


def state_after(stage, rollouts):
    state = stage.init_state()
    for rows in rollouts:
        state = settled(stage, responses(rows), state=state)[1]
    return state


@functools.cache  # the loops below ask for each again and again
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


def evidence(rollouts, pool, discount):
    """What is known of each prompt after rollouts of rows: ``[right, wrong]``."""
    known = [[0.0, 0.0] for _ in range(pool)]
    for rows in rollouts:
        for prompt in {row[0] for row in rows if row[3] == 0}:
            known[prompt] = [share * discount for share in known[prompt]]
        for prompt, _, reward, given in rows:
            if given == 0:
                solved = min(max(reward, 0.0), 1.0)
                known[prompt][0] += solved
                known[prompt][1] += 1 - solved
    return known


def expected_spread(right, wrong, cells=20_000):
    """E[sqrt(p (1 - p))] under Beta(1 + right, 1 + wrong), by the midpoint rule in x with p = sin(x)^2.

    The substitution makes the integrand smooth at both ends.
    """
    above = below = 0.0
    for cell in range(cells):
        x = (cell + 0.5) * math.pi / 2 / cells
        p = math.sin(x) ** 2
        density = p**right * (1 - p) ** wrong * math.sin(x) * math.cos(x)
        above += density * math.sqrt(p * (1 - p))
        below += density
    return above / below
