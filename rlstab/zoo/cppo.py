"""CPPO: a trust region that is stricter for early tokens, and tighter once the prefix has moved."""

from typing import Annotated, Literal

from torch import Tensor

from rlstab import About, Constants, Gate, NoOpAt, Range, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.kl_estimators import probability
from rlstab.zoo.anchored import Anchored


class CPPO(Anchored, TokenObjective):
    """Stop a token that moved too much probability for its position and for how much its prefix has moved.

    Problem:
        A trust region with one bound for all tokens treats them as independent. They are not: a change early in a
        response changes the context of everything after it, and many small changes add up to a prefix that the sampler
        would hardly have written. CPPO weighs the move of a token by its position, early ones most, and gives each
        response a budget for the moves of its prefix. A token whose prefix has overspent has less room, or none.

    Equation:
        With p_t = exp(live ``logprobs``), q_t the probability under the anchor, A the advantage, t = 1..T the position
        of a token in its response:

            D_t  = |p_t - q_t|,   w_t = 1 - (1 - w_min) (t - 1) / max(T - 1, 1),   Z_t = w_t D_t
            db   = min(max(quantile of D_1..D_T, db_min), 2 db_min)
            c_t  = min(delta, delta + db sum_{j<t} w_j - sum_{j<t} Z_j)
            gate = 1 if A (p_t - q_t) <= 0 or Z_t <= c_t, else 0

        w_min is ``min_weight``, db_min ``min_budget``, the level of the quantile ``quantile``. A token that moves
        against its advantage is never stopped. The gradient of a token is gate r A times that of its log-prob.

    Reads:
        - ``rollout_logprobs`` (n,), nats: the anchor, with ``anchor="rollout"``.
        - ``old_logprobs`` (n,), nats: the anchor, with ``anchor="old"``.
        - ``sequence`` (n,), integers: the response of each token.
        - ``position`` (n,), integers: its position there.
        - ``sequence_ids`` (S,), integers: how many responses there are.

    Writes:
        - ``gates``: Stop a token whose probability has moved from the ``anchor`` policy, in the direction of its
          advantage, by more than ``delta``, or by more than is left of that once the tokens before it have overspent
          their budget: the ``quantile``-quantile of the moves in the response for each, from ``min_budget`` to twice
          that. It still counts. Moves weigh 1 at the first token, ``min_weight`` at the last.

    Denominator:
        untouched: a token that is stopped still counts.

    Parameters:
        - ``delta``: float in [0, inf), default 0.15. The paper, for dense models; 0.2 for its mixture of experts of
          30B. The official code has 0.2.
        - ``min_weight`` (w_min): float in [0, 1], default 0.8. The weight of the last token; with 1 all positions weigh
          the same. Paper and official code.
        - ``min_budget`` (db_min): float in [0, inf), default 0.02. What a token of the prefix may move on average, at
          least; at most twice that. Paper and official code.
        - ``quantile``: float in [0, 1], default 0.9. Of the moves in a response, for its budget. Paper and official
          code.
        - ``anchor``: 'rollout' | 'old', default 'rollout'. The policy that p is compared with. The paper: the one that
          sampled. 'old' is ``replay`` in the official code.

    State:
        none

    Deviations:
        - From the paper: its ratio is to the policy that sampled, and here it is the one of the loss. They are the same
          with ``old_logprobs: rollout``; with other old log-probs the mismatch between sampler and trainer is in the
          gate alone.
        - From its code: log-prob and position are those of the tokens that count, so tool output is not part of the
          prefix. A log-prob above 0 counts as 0.
        - From its README: there the allowance is said to shrink along the response. In its equation, its code and here
          the weight multiplies the move, so early tokens have less room, and the last one may move ``delta`` / w_min.

    Pitfalls:
        Every move uses up the budget of the prefix, even one against the advantage, and one of a token that another
        method drops. A burst of mismatch between sampler and trainer early in a response can stop all the rest of it.
        In a short response, the quantile rests on few tokens. The live log-probs of whole responses are read, so a mask
        saves no forward pass in a response that still pulls.

    Interacts:
        - ``cppo`` and ``dppo`` stop a token by the probability that it moved: at a ``min_weight`` of 1 and equal bounds
          ``cppo`` stops all that ``dppo`` stops.
        - ``cppo`` bounds the probability that moved, ``sapo`` and ``maspo`` the ratio: ``sapo`` and ``maspo`` alone
          hold rare tokens back, and ``cppo`` stops likely tokens before they damp them.
        - A token that a mask drops still spends the budget of ``cppo``, and may stop a later one that is left.
        - ``cppo`` was published on ``constant_length``, with advantages that have no std.

    Limits:
        - With anchor 'old', where every ratio is exactly 1, as with one optimizer step per rollout.

    Example:
        One rewarded response. Its tokens, sampled with probability 0.5, have 0.62, 0.6 and 0.6 now: Z is 0.12, 0.09 and
        0.08, and db 0.04. The bounds are 0.15, 0.15 + 0.04 - 0.12 = 0.07 and 0.15 + 0.076 - 0.21 = 0.016: only the
        first pulls. ``dppo`` would stop none.

        >>> import torch
        >>> from rlstab import CPPO, PolicyOutputs, TokenBatch, compose
        >>> rollout = torch.full((1, 3), 0.5).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 3),
        ...     advantages=torch.ones(1),
        ...     old_logprobs=rollout,
        ...     rollout_logprobs=rollout,
        ... )
        >>> live = torch.tensor([[0.62, 0.6, 0.6]]).log().requires_grad_()
        >>> compose(CPPO())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(3 * g, 4) + 0.0 for g in live.grad[0].tolist()]
        [-1.24, 0.0, 0.0]

    Source:
        R. Mao, X. Zhou, L. Tao et al., "Beyond Uniform Token-Level Trust Region in LLM Reinforcement Learning", 2026,
        arXiv 2606.10968 (eq. 8-11, 22, algorithm 1). Reference code: Tencent-Hunyuan/UniRL
        ``unirl/algorithms/cppo.py`` (commit e1211ee).
    """

    about = About(
        addresses={"trust region", "off-policy"},
        no_op_at=(NoOpAt({"delta": 1e9}, "no response moves that many probabilities."),),
    )

    name = "cppo"
    writes = {"gates"}

    delta: Annotated[float, Range(ge=0)] = 0.15
    min_weight: Annotated[float, Range(ge=0, le=1)] = 0.8
    min_budget: Annotated[float, Range(ge=0)] = 0.02
    quantile: Annotated[float, Range(ge=0, le=1)] = 0.9
    anchor: Literal["rollout", "old"] = "rollout"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        compared = self.live_and_anchor(batch)
        weight = 1 - (1 - self.min_weight) * batch.index_in_sequence.double() / (batch.spread(batch.lengths) - 1).clamp(
            min=1
        )
        earlier = batch.running_total(weight) - weight

        def gate(ratio: Tensor, constants: Constants) -> Tensor:
            live, other = compared(constants)
            moved = (probability(live) - probability(other)).abs()
            budget = batch.sequence_quantile(moved, self.quantile).clamp(self.min_budget, 2 * self.min_budget)
            spent = weight * moved
            room = self.delta + batch.spread(budget) * earlier - (batch.running_total(spent) - spent)
            inward = constants.advantages.sign() * (live - other) <= 0
            return (inward | (spent <= room.clamp(max=self.delta))).to(ratio.dtype)

        return Terms(gates={"": Gate(gate, whole_sequences=True)})
