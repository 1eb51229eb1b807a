"""GiGPO: the advantage of a whole episode, and that of each turn among turns that began in the same state."""

from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from rlstab import About, Mean, Range, Settled, State
from rlstab.core.random import GOLDEN
from rlstab.stages.group_relative import grpo
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator


class GiGPO(AdvantageEstimator):
    """Add to the advantage of a response that of each turn, compared with turns that began in the same state (GiGPO).

    Problem:
        In a conversation of many turns one advantage for all of them does not say which turn was good. Answers to one
        prompt often come through the same state, such as the same page of a shop. What followed from it tells the
        turns apart that began there, without any more samples.

    Equation:
        Of response i with K_i turns, r_ik = ``turn_rewards`` and R_i = ``rewards``; g discounts from turn to turn:

            G_ik   = sum_{l >= k} g^(l - k) r_il
            A_i    = norm(R_i)     over the responses of the group
            B_ik   = norm(G_ik)    over all turns of the group that began in the same state
            A_it   = A_i + w B_i,k(t)

        norm(x) is x less the mean, divided by (s + e) if ``std``, with s the standard deviation (n - 1); it is 0 where
        all values are equal. Two states are the same if the environment replied the same; the prompt is the state of
        every first turn. w is ``weight``, g is ``gamma``, e is ``epsilon``.

    Reads:
        - ``rewards`` (S,): R.
        - ``turn_rewards`` (S, K): r, 0 where there is no turn; all of the score in the last turn if the task rewards no
          turns.
        - ``turn_states`` (S, K), integers from 1: which states are the same; 0 where there is no turn.
        - ``turn`` (S, T), whole numbers: the turn of each token, from 0.
        - ``group_ids`` (S,): which responses are compared.

    Returns:
        (S, T) advantages.

    Parameters:
        - ``weight`` (w): float in [0, inf), default 1.0. The paper.
        - ``gamma`` (g): float in (0, 1], default 0.95. The paper.
        - ``std``: bool, default True. Whether to divide by the standard deviation; the paper has both.
        - ``epsilon`` (e): float in (0, inf), default 1e-06. The code of the paper.

    State:
        none

    Deviations:
        - From its code: it takes mean and standard deviation of the episodes over their turns, so that a long episode
          counts more often, unless ``compute_mean_std_cross_steps`` is off. Here each counts once, as in the paper.
        - From its code: a lone episode keeps its reward; here it has the advantage 0.
        - From its code: states may be compared by similarity. Here they are the same or not.
        - From its code: each turn is a row with a prompt of its own, which may leave out what was said before. Here a
          response holds all turns.

    Interacts:
        - Reward shapers change R and not the rewards of turns.
        - ``turn_credit`` compares the same turn, whatever came before it, by its own reward alone.
        - ``gspo`` and other ratios of whole responses assume one advantage per response.

    Limits:
        - ``grpo`` with ``weight=0``, or where no two turns began in the same state.

    Example:
        Four answers of two turns, one token each; only the second turn earns. Every first turn began in the same state,
        and the reply sends two answers to each of two others.

        >>> import torch
        >>> from rlstab.stages.response_batch import ResponseBatch
        >>> evidence = {
        ...     "turn_rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 1.0], [0.0, 1.0]]),
        ...     "turn_states": torch.tensor([[1, 2], [1, 2], [1, 3], [1, 3]]),
        ...     "turn": torch.tensor([[0.0, 1.0]]).expand(4, 2),
        ... }
        >>> batch = ResponseBatch.of([1.0, 0.0, 1.0, 1.0], lengths=2.0, extra=evidence)
        >>> for row in GiGPO(std=False, gamma=1.0).advantages(batch, Settled(), {}).tolist():
        ...     print(row)
        [0.5, 0.75]
        [-1.5, -1.25]
        [0.5, 0.25]
        [0.5, 0.25]

    Source:
        L. Feng, Z. Xue, T. Liu, B. An, "Group-in-Group Policy Optimization for LLM Agent Training", 2025, arXiv
        2505.10978 (equations 3, 6, 7, 8). Reference code: langfengQ/verl-agent ``gigpo/core_gigpo.py``.
    """

    name = "gigpo"
    compares = True
    per = "turn"
    needs = {"turn", "turn_rewards", "turn_states"}
    about = About(
        exceptions={"even group": "equal rewards may be earned at different turns, and a state may come twice."}
    )

    weight: Annotated[float, Range(ge=0)] = 1.0
    gamma: Annotated[float, Range(gt=0, le=1)] = 0.95
    std: bool = True
    epsilon: Annotated[float, Range(gt=0)] = 1e-6

    def unread_settings(self) -> dict[str, str]:
        unread = {} if self.std else {"epsilon": "nothing is divided by a standard deviation, so it is not read."}
        return unread | ({} if self.weight else {"gamma": "`weight` is 0, so no return is read."})

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        returns = responses.evidence("turn_rewards").double().clone()
        for index in reversed(range(returns.shape[1] - 1)):
            returns[:, index] += self.gamma * returns[:, index + 1]
        # all returns where there is no turn are 0, and so are advantages among equal returns
        of_turns = grpo(returns.flatten(), _anchors(responses).flatten(), std=self.std, epsilon=self.epsilon)
        of_episodes = grpo(responses.rewards, responses.group_ids, std=self.std, epsilon=self.epsilon)
        turn = responses.evidence("turn").long().clamp(0, max(returns.shape[1] - 1, 0))
        return of_episodes.unsqueeze(-1) + self.weight * of_turns.view_as(returns).gather(1, turn)

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> Mapping[str, Mean]:
        """The share of turns that began in a state of no other turn."""
        anchors = _anchors(responses)[responses.evidence("turn_states") > 0]
        counts = torch.unique(anchors, return_inverse=True, return_counts=True)
        return {"alone": Mean.of(counts[2][counts[1]] == 1)}


def _anchors(responses: ResponseBatch) -> Tensor:
    """``(S, K)`` int64, one number for each state of each group."""
    return responses.group.unsqueeze(-1) * GOLDEN + responses.evidence("turn_states").long()
