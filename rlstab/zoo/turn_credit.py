"""Turn credit: what a turn earned beyond the same turn of the other answers, on the tokens of that turn."""

from typing import Annotated

import torch
from torch import Tensor

from rlstab import About, Grouped, Mean, NoOpAt, Range, Settled, Stat, State, Terms, TokenBatch, TokenObjective
from rlstab.core.random import GOLDEN

#: Turn numbers are below it: a float32 holds whole numbers up to 2^24.
SPAN = 1 << 32


class TurnCredit(TokenObjective):
    """Add to each token's advantage what its turn earned, compared with that turn of the other answers to the prompt.

    Problem:
        A response of several turns gets one advantage. A good first turn is blamed for a bad last one, and where the
        last turn is mostly luck, the first learns next to nothing. Where turns have rewards of their own, each can be
        compared with the same turn of the other answers.

    Equation:
        With k(t) the turn of token t = ``turn``, r_ik the reward of turn k of response i = ``turn_reward``, and
        m_k, s_k mean and standard deviation (n - 1) of r_jk over the n_k answers j of the group that have a turn k:

            A_t <- A_t + c (r_ik - m_k) / (s_k + e)     k = k(t), normalise: true
            A_t <- A_t + c (r_ik - m_k)                 normalise: false

        c is ``coefficient``, e is ``epsilon``. Each turn counts once, however many tokens it has.

    Reads:
        - ``turn`` (n,), whole numbers from 0: the turn of each token.
        - ``turn_reward`` (n,), unitless: the reward of its turn, the same on all of its tokens.
        - ``group_ids`` (S,), integers: which responses are compared.
        - ``sequence`` (n,), integers: the response of each token.

    Writes:
        - ``bonus``: Add to the advantage of a token ``coefficient`` times what its turn earned beyond the mean of that
          turn in the group; divided by the standard deviation plus ``epsilon``: ``normalise``.

    Denominator:
        untouched: no token leaves the loss.

    Parameters:
        - ``coefficient`` (c): float in [0, inf), default 1.0. The code of the paper.
        - ``normalise``: bool, default True. Whether to divide by the standard deviation, as the paper does.
        - ``epsilon`` (e): float in (0, inf), default 0.0001. The code of the paper.

    State:
        none

    Deviations:
        - From the paper: it credits the first of two turns, and the last one has the advantage of the outcome alone.
          Here every turn is credited; a last turn of reward 0 is as there.
        - From its code: a response without a result of a tool has the advantage of the sum of both rewards. Here its
          only turn is compared with the first turns of the others.

    Pitfalls:
        The rewards of turns are not taken out of the reward that the advantage is made of: a turn's share of it counts
        twice. A turn that only one answer of the group reached gets no credit.

    Interacts:
        - ``gigpo`` compares what follows from the same state, ``turn_credit`` what the same turn earned itself.
        - ``gspo``, ``gmpo`` and ``holder_mean`` have one ratio for the whole response, so that a turn is also clipped
          by what happened in the others.

    Limits:
        - An optimizer step in which every turn earned the same as that turn of the other answers.

    Example:
        Two answers of two turns, one token each. The first turn is right in one of them; the second earns nothing. The
        advantages 1 and -1 of the outcomes become 0.5 and 1 in one answer, -0.5 and -1 in the other.

        >>> import torch
        >>> from rlstab import PolicyOutputs, TokenBatch, TurnCredit, compose
        >>> old = torch.full((2, 2), 0.5).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2),
        ...     advantages=torch.tensor([1.0, -1.0]),
        ...     old_logprobs=old,
        ...     group_ids=torch.tensor([0, 0]),
        ...     turn=torch.tensor([[0, 1], [0, 1]]),
        ...     turn_reward=torch.tensor([[0.0, 0.0], [1.0, 0.0]]),
        ... )
        >>> live = old.clone().requires_grad_()
        >>> objective = compose(TurnCredit(normalise=False))
        >>> objective(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) for g in live.grad.flatten().tolist()]
        [-0.125, -0.25, 0.125, 0.25]

    Source:
        S. Zeng et al., "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Credit Assignment", 2025, arXiv
        2505.11821. Reference code: SiliangZeng/Multi-Turn-RL-Agent ``verifiers/trainers/mt_grpo_env_trainer.py``
        (``_assign_advantages``).
    """

    about = About(
        no_op_at=(NoOpAt({"coefficient": 0.0}, "every bonus is 0"),),
        exceptions={"zero advantage": "a turn earns something whatever its response earned."},
    )

    name = "turn_credit"
    needs = {"turn", "turn_reward"}
    writes = {"bonus"}

    coefficient: Annotated[float, Range(ge=0)] = 1.0
    normalise: bool = True
    epsilon: Annotated[float, Range(gt=0)] = 1e-4

    def measure(self, batch: TokenBatch) -> Stat:
        return {"reward": Grouped.of(*_earned(batch))}

    def measure_again(self, batch: TokenBatch, stat: Settled) -> Stat:
        if not self.normalise:
            return {}
        keys, earned = _earned(batch)
        return {"square": Grouped.of(keys, (earned - stat.grouped("reward").mean(keys)).square())}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        keys, reward = _keys(batch.spread(batch.group_ids), _turns(batch) % SPAN), stat.grouped("reward")
        mean, count = reward.mean(keys), reward.count(keys)
        bonus = self.coefficient * (batch.signal("turn_reward").double() - mean)
        if self.normalise:
            variance = stat.grouped("square").total(keys) / (count - 1).clamp(min=1)
            bonus = bonus / (variance.sqrt() + self.epsilon)
        bonus = bonus.to(batch.advantages.dtype)
        return Terms(bonus=bonus, report={"credit": Mean.of(bonus.abs())})


def _earned(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """``(m,)`` keys and ``(m,)`` float64 rewards of the turns of all responses, each once."""
    turn, index, size = torch.unique(_turns(batch), return_inverse=True, return_counts=True)
    zeros = torch.zeros(size.shape, dtype=torch.float64, device=size.device)
    earned = zeros.index_add(0, index, batch.signal("turn_reward").double()) / size
    return _keys(batch.group_ids[turn // SPAN], turn % SPAN), earned


def _turns(batch: TokenBatch) -> Tensor:
    """``(n,)`` int64, one number for each turn of each response."""
    return batch.sequence * SPAN + batch.signal("turn").floor().clamp(min=0).long()


def _keys(group_ids: Tensor, turn: Tensor) -> Tensor:
    """int64, one number for each turn of each group; ids may use all 64 bits."""
    return group_ids * GOLDEN + turn
