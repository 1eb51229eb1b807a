"""FIPO: a token counts for more where the policy has moved towards what followed it."""

from typing import Annotated

import torch
from torch import Tensor

from rlstab import About, Constants, Gate, NoOpAt, Range, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.core.surrogate import MAX_LOG_RATIO, token_log_ratio


class FIPO(TokenObjective):
    """Weigh a token by how far the policy has moved on the tokens after it, nearer ones counting more.

    Problem:
        One advantage for a whole response gives its turning points no more credit than its filler. Over several
        optimizer steps on one rollout, the policy shows which is which: where it moves towards what followed a token,
        that token led somewhere. FIPO gives it more weight.

    Equation:
        With d_t = ln r_t, the live log-ratio of the token, 0 where r_t > r_max; over the tokens k of its response:

            F_t = sum_{k >= t} gamma^(k - t) d_k,   gamma = 2^(-1 / tau)
            f_t = clip(exp(F_t), f_low, f_high)
            f_t = min(f_t, 1)                                            where A_t < 0 and r_t > r_safe
            L   = sum_t c_t f_t surrogate_t

        tau is ``half_life``, f_low ``low``, f_high ``high``, r_max ``max_ratio``, r_safe ``safe_ratio``. f_t is a
        constant: its factor on the gradient of a log-prob is f r A where the trust region lets the token pull.

    Reads:
        nothing itself. The loss gives the factor the live log-probs of the whole response and the advantages, bonuses
        included, and the order of the tokens is that of their positions.

    Writes:
        - ``gates``: Multiply the pull of a token by the exponential of the log-ratios of the live policy, summed from
          this token to the end of its response (one ``half_life`` positions later counts half), at least ``low`` and at
          most ``high``. The largest ratio that is summed is ``max_ratio``; a punished token beyond a ratio of
          ``safe_ratio`` has a factor of at most 1. None is no limit.

    Denominator:
        untouched: it counts tokens, not factors.

    Parameters:
        - ``half_life`` (tau): float in (0, inf), default 32.0. The paper: a token this many positions later counts
          half.
        - ``low`` (f_low): float in [0, 1], default 1.0. The paper; 0.8 is its other setting.
        - ``high`` (f_high): float in [1, inf), default 1.2. The paper.
        - ``max_ratio`` (r_max): float in (1, inf) or None, default 10.0. Its code takes the bound of its dual clip,
          which is 10 in the script of its 32B run. None lets every token into the sum.
        - ``safe_ratio`` (r_safe): float in (1, inf) or None, default 4.0. Its code's default, and ms-swift's; the
          script of its 32B run has 10. None holds no token back.

    State:
        none

    Deviations:
        - From the paper and its code: none in the sum, which runs over the live policy: that is why it is a gate and
          not a weight made at the start of the optimizer step.
        - From its code: it drops a response with more than one token beyond the dual clip, which it says is rare; that
          is not offered. Beyond r_safe it clips f to [0.8, 1], as ms-swift does, which is the same unless ``low`` is
          below 0.8. Positions are counted over the tokens that count; there also over tool output between them.
        - From the paper: log-ratios are clamped to 20 nats in the sum.

    Pitfalls:
        With one optimizer step per rollout it does nothing. It assumes that all tokens of a response have one
        advantage: where they do not, F mixes what was rewarded with what was punished. It needs the live log-probs of
        whole responses, including dropped tokens. F grows with the half-life: with a drift of 0.01 nats on every token
        it is 0.467, and all weights are at their bound. At the default ``low`` it only ever boosts, so the gradient
        grows with the drift.

    Interacts:
        - ``fipo`` was published on ``clip_higher`` and ``token_mean``, the base of DAPO (0.2, 0.28), with a dual clip
          of 10.

    Limits:
        - Where every ratio is exactly 1, as with one optimizer step per rollout.

    Example:
        A correct response with log-ratios 0.1, -0.2, 0.3 and 0: F is 0.1916, 0.0936, 0.3 and 0, and f is 1.2, 1.0981,
        1.2 and 1. The gradient of each token is -f r / 4.

        >>> import torch
        >>> from rlstab import FIPO, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((1, 4), 0.4).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 4), advantages=torch.ones(1), old_logprobs=old
        ... )
        >>> live = (old + torch.tensor([[0.1, -0.2, 0.3, 0.0]])).requires_grad_()
        >>> out = compose(FIPO())(batch, PolicyOutputs.from_padded(batch, logprobs=live))
        >>> out.loss.backward()
        >>> [round(g, 4) for g in (4 * live.grad[0]).tolist()]
        [-1.3262, -0.899, -1.6198, -1.0]
        >>> round(out.metrics()["fipo/gate"], 4)
        1.1245

    Source:
        C. Ma et al., "FIPO: Eliciting Deep Reasoning with Future-KL Influenced Policy Optimization", 2026,
        arXiv 2603.19835. Reference code: Henrymachiyu/FIPO ``verl/trainer/ppo/core_algos.py``
        (``compute_policy_loss_future_kl``). Code of others: modelscope/ms-swift ``swift/rlhf_trainers/grpo_trainer.py``
        (``_compute_fipo_influence``).
    """

    about = About(
        addresses={"token"},
        no_op_at=(NoOpAt({"low": 1.0, "high": 1.0}, "every factor is 1."),),
    )

    name = "fipo"
    writes = {"gates"}

    half_life: Annotated[float, Range(gt=0)] = 32.0
    low: Annotated[float, Range(ge=0, le=1)] = 1.0
    high: Annotated[float, Range(ge=1)] = 1.2
    max_ratio: Annotated[float | None, Range(gt=1)] = 10.0
    safe_ratio: Annotated[float | None, Range(gt=1)] = 4.0

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def influence(ratio: Tensor, constants: Constants) -> Tensor:
            gaps = token_log_ratio(constants.anchor, constants.anchor, batch)
            drift = gaps.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            if self.max_ratio is not None:
                drift = torch.where(ratio > self.max_ratio, 0.0, drift)
            future = batch.running_total(drift, reverse=True, decay=0.5 ** (1 / self.half_life))
            factor = future.exp().clamp(self.low, self.high)
            if self.safe_ratio is not None:
                unsafe = (constants.advantages < 0) & (ratio > self.safe_ratio)
                factor = torch.where(unsafe, factor.clamp(max=1.0), factor)
            return factor

        return Terms(gates={"": Gate(influence, whole_sequences=True)})
