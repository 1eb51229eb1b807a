"""DRPO: a token is held back, and then pulled back, by as much probability as it moved."""

from typing import Annotated, Literal

from torch import Tensor

from rlstab import About, Constants, Gate, NoOpAt, Range, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.kl_estimators import probability
from rlstab.zoo.anchored import Anchored


class DRPO(Anchored, TokenObjective):
    """Weaken a token's gradient by the probability it has moved in its own direction, and reverse it beyond ``delta``.

    Problem:
        DPPO stops a token whose probability has moved too far, and a stopped token stays where it is: nothing brings it
        back, and the gradient jumps at the edge of the region. DRPO replaces the mask by a quadratic penalty on the
        move. The pull fades with the distance, is zero at the edge, and points back beyond it.

    Equation:
        With p = exp(live ``logprobs``), q the probability of the token under the anchor, r the ratio, A the advantage:

            l    = -A r + |A| q (r - 1)^2 / (2 delta)                         the surrogate, for r = p / q
            gate = 1 - sign(A) (p - q) / delta

        The gradient of a token is gate r A times that of its log-prob. The gate is between 1 - 1 / delta and
        1 + 1 / delta: below 1 where the token moved in the direction of its advantage, above 1 where it moved against
        it.

    Reads:
        - ``rollout_logprobs`` (n,), nats: the anchor, with ``anchor="rollout"``.
        - ``old_logprobs`` (n,), nats: the anchor, with ``anchor="old"``.

    Writes:
        - ``gates``: Multiply the pull of a token by 1 - m / ``delta``, m being the probability that it has moved from
          the ``anchor`` policy in the direction of its advantage, negative where it moved the other way. Beyond m =
          ``delta`` it pulls back; no probability moves by 1.

    Denominator:
        untouched

    Parameters:
        - ``delta``: float in (0, inf), default 12.5. The paper, section 4, and the official code. See Pitfalls: at 0.15
          its zero is where ``dppo`` stops.
        - ``anchor``: 'rollout' | 'old', default 'rollout'. The policy that p is compared with. The paper: the one that
          sampled. 'old' is ``replay`` in the official code.

    State:
        none

    Deviations:
        - From the paper: its ratio is to the policy that sampled, and here it is the one of the loss. They are the same
          with ``old_logprobs: rollout``; with other old log-probs the mismatch between sampler and trainer is in the
          gate alone.
        - From its code: a log-prob above 0 counts as 0. The value of the loss is -gate r A, not the surrogate's.
        - From SPO: the surrogate without the factor q, which its code has as an option, is not offered.

    Pitfalls:
        The default has hardly any effect. No probability moves by more than 1, so at ``delta`` 12.5 the gate is between
        0.92 and 1.08 for any token, and nothing is ever stopped. Below 1 it can stop a token; near 0.15 it is a soft
        ``dppo``, and then the way back is steep: a token that went from 0.05 to 0.5 has gate -2 and coefficient -20.
        The gate is bounded and the ratio is not: a rare token may pull with a ratio of thousands.

    Interacts:
        - ``drpo`` pulls a token back that has moved beyond its ``delta``; ``cppo`` and ``dppo`` stop it.
        - Both restrain a token by the probability that it has moved: ``drpo`` damps what ``cppo`` and ``dppo`` leave.
        - ``drpo`` pulls a token back that has moved beyond its ``delta``, but ``clip_higher`` leaves no gradient beyond
          its bounds: a token on which both act stays where it is.
        - ``drpo`` pulls a token back that has moved beyond its ``delta``, and under ``sapo`` and ``maspo`` this pull is
          damped as well, the more the larger the ratio.
        - ``drpo`` was published on ``constant_length``, with advantages that have no std.

    Limits:
        - With anchor 'old', where every ratio is exactly 1, as with one optimizer step per rollout.

    Example:
        At delta 0.2, tokens sampled with probability 0.5. Rewarded ones now have 0.6, 0.7 and 0.8: gates 0.5, 0 and
        -0.5, times ratios 1.2, 1.4 and 1.6. A punished one that rose to 0.6 has gate 1.5.

        >>> import torch
        >>> from rlstab import DRPO, PolicyOutputs, TokenBatch, compose
        >>> rollout = torch.full((1, 4), 0.5).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 4),
        ...     advantages=torch.tensor([[1.0, 1.0, 1.0, -1.0]]),
        ...     old_logprobs=rollout,
        ...     rollout_logprobs=rollout,
        ... )
        >>> live = torch.tensor([[0.6, 0.7, 0.8, 0.6]]).log().requires_grad_()
        >>> compose(DRPO(delta=0.2))(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(4 * g, 4) + 0.0 for g in live.grad[0].tolist()]
        [-0.6, 0.0, 0.8, 1.8]

    Source:
        J. Yao, X. Zhou, P. Qi et al., "Rethinking the Divergence Regularization in LLM RL", 2026, arXiv 2606.09821
        (eq. 8, table 1). Reference code: Tencent-Hunyuan/UniRL ``unirl/algorithms/drpo.py`` (commit 1a7b501).
    """

    about = About(
        addresses={"trust region", "off-policy"},
        no_op_at=(NoOpAt({"delta": 1e18}, "no probability moves by more than 1, and 1 minus 1e-18 is 1."),),
    )

    name = "drpo"
    writes = {"gates"}

    delta: Annotated[float, Range(gt=0)] = 12.5
    anchor: Literal["rollout", "old"] = "rollout"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        compared = self.live_and_anchor(batch)

        def gate(ratio: Tensor, constants: Constants) -> Tensor:
            live, other = compared(constants)
            moved = probability(live) - probability(other)
            return 1 - constants.advantages.sign() * moved / self.delta

        return Terms(gates={"": Gate(gate)})
