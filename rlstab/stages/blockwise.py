"""Blockwise advantages: a reward and a baseline for each block of a response."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from rlstab import About, Mean, Range, Settled, State
from rlstab.stages.group_relative import equal_within
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator


class Blockwise(AdvantageEstimator):
    """Give each block of a response its own reward, compared with siblings whose earlier blocks ended the same way.

    Problem:
        A response may consist of blocks with separate rewards: an answer and the confidence in it, or the successive
        steps of a calculation. One advantage for the whole response blames a good step for the mistake of another. But
        a later block cannot be compared with that of any other response: how well it can do depends on what came
        before it, and sampling a group for every prefix is too costly. It is compared with the same block of those
        responses to the prompt whose earlier blocks had the same outcome.

    Equation:
        With r_ik the reward of block k of response i, o_ik the outcome of its blocks up to k, and k(t) the block of
        token t:

            D_ik  = { j in the group of i : j has a block k, and o_j,k-1 = o_i,k-1 }     of the first block: all of them
            b_ik  = (sum_{j in D_ik} r_jk + c g_k) / (|D_ik| + c)
            A_it  = r_i,k(t) - b_i,k(t),    0 on tokens of no block

        c is ``shrink``, g_k the mean of r_jk over all of the group that has a block k.

    Reads:
        - ``block_rewards`` (S, K): r. Not ``rewards``.
        - ``block_outcomes`` (S, K), integers from 1: o, equal where blocks may be compared; 0 where there is no block.
        - ``block_ids`` (S, T), integers: the block of each token, from 0, and -1 for none.
        - ``group_ids`` (S,): which responses are compared.

    Returns:
        (S, T) advantages.

    Parameters:
        - ``shrink`` (c): float in [0, inf), default 0.0. How many responses at the mean of the whole group each
          baseline gets. Added here, for groups in which outcomes are rare.

    State:
        none

    Deviations:
        - From the paper: ``shrink`` is added here. Its mean over the tokens of a block is the method ``block_mean``.
        - From its code: no official code was found.

    Interacts:
        - Reward shapers do nothing to these advantages: the rewards of blocks come from the task.
        - ``dynamic_sampling``: compares rewards of whole responses, and drops groups whose blocks differ.
        - ``gspo`` and other ratios of whole responses assume one advantage per response.

    Limits:
        - ``dr_grpo`` where every response is one block whose reward is that of the response.
        - A block without a sibling at the same outcome has the advantage 0 without ``shrink``; so have equal rewards.
        - The baseline adds no bias only where the outcome says everything about the prefix that the mean of the block's
          reward depends on.

    Example:
        Four answers of two steps. The first step is right in three: mean 3 / 4. The second step of these three is right
        once, mean 1 / 3; that of the last one has no sibling.

        >>> import torch
        >>> from rlstab.stages.response_batch import ResponseBatch
        >>> evidence = {
        ...     "block_rewards": torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]),
        ...     "block_outcomes": torch.tensor([[2, 2], [2, 1], [2, 1], [1, 1]]),
        ...     "block_ids": torch.tensor([[0, 1, -1]]).expand(4, 3),
        ... }
        >>> batch = ResponseBatch.of([1.0, 0.0, 0.0, 0.0], lengths=3.0, extra=evidence)
        >>> for row in Blockwise().advantages(batch, Settled(), {}).tolist():
        ...     print([round(value, 4) for value in row])
        [0.25, 0.6667, 0.0]
        [0.25, -0.3333, 0.0]
        [0.25, -0.3333, 0.0]
        [-0.75, 0.0, 0.0]

    Source:
        K. Pavlenko, A. Golubev, S. Karasik, B. Yangel, "Blockwise Advantage Estimation for Multi-Objective RL with
        Verifiable Rewards", 2026, arXiv 2602.10231. Reference code: none found.
    """

    name = "blockwise"
    compares = True
    per = "block"
    needs = {"block_rewards", "block_outcomes", "block_ids"}
    about = About(
        expects={
            "block_mean": "it averages over the tokens of a block, so that a long block does not drown a short one."
        }
    )

    shrink: Annotated[float, Range(ge=0)] = 0.0

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        rewards, outcomes = responses.evidence("block_rewards").double(), responses.evidence("block_outcomes").long()
        blocks = [torch.zeros_like(responses.rewards)]  # of tokens in no block
        for number in range(rewards.shape[1]):
            reward, mask = rewards[:, number], outcomes[:, number] > 0
            siblings = _siblings(responses, outcomes, number)
            baseline, compared = siblings.group_mean(reward, mask), siblings
            if self.shrink:
                size, wide, compared = siblings.group_sum(mask), responses.group_mean(reward, mask), responses
                baseline = (baseline * size + self.shrink * wide) / (size + self.shrink)
            even = equal_within(reward, compared.group, mask)
            blocks.append(torch.where(mask & ~even, reward - baseline, 0.0))
        ids = responses.evidence("block_ids").long()
        return torch.stack(blocks, 1).gather(1, ids.clamp(min=-1) + 1)

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> Mapping[str, Mean]:
        """The share of blocks without a comparable sibling, and the number of blocks of a response."""
        outcomes = responses.evidence("block_outcomes").long()
        lone = Mean.of(torch.zeros(0))
        for number in range(outcomes.shape[1]):
            mask = outcomes[:, number] > 0
            lone = lone.merge(Mean.of(_siblings(responses, outcomes, number).group_sum(mask) == 1, mask))
        return {"alone": lone, "blocks": Mean.of((outcomes > 0).sum(-1).double())}


def _siblings(responses: ResponseBatch, outcomes: Tensor, number: int) -> ResponseBatch:
    """The responses in groups that a block is compared in: those of one prompt and one outcome of the block before."""
    if number == 0:
        return responses
    pairs = torch.stack([responses.group, outcomes[:, number - 1]], 1)
    return replace(responses, group_ids=torch.unique(pairs, dim=0, return_inverse=True)[1])
