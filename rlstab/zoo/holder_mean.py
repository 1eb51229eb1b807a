"""HölderPO: one ratio for a response, a power mean of those of its tokens, whose power falls over training."""

from typing import Annotated

import torch
from torch import Tensor

from rlstab import About, Constants, Mean, PolicyOutputs, Range, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.core.surrogate import token_log_ratio
from rlstab.zoo.response_ratio import EXPECTS, gradient_of


class HolderMean(TokenObjective):
    """Replace the token ratios of a response by their power mean; the power decides which tokens count most.

    Problem:
        The reward is for a whole response, so its token ratios have to be averaged, and each kind of mean has a
        drawback. A high power favours the tokens that moved most, which learns fast from sparse signals but may
        collapse. A low power spreads the gradient and bounds its variance, but learns slowly. No single power is right
        throughout, so it starts high and falls.

    Equation:
        With r_t the ratio of token t, A its advantage, n the kept tokens of its response, k the optimizer step from 0:

            p    = p_0 + (p_1 - p_0) min(k / K, 1)
            rho  = ((1 / n) sum_t r_t^p)^(1 / p),      at p = 0 the geometric mean
            loss = max(-rho A, -clip(rho, 1 - e, 1 + e) A),   averaged over responses

        p_0 is ``power``, p_1 ``final_power``, K ``steps``. The clip belongs to `clip_higher`, e = 0.2, the mean to
        `sequence_mean`. The gradient on the log-prob of a token is -A rho r_t^p / sum r^p where rho is not clipped.

    Reads:
        nothing itself. The loss gives it the live log-probs, and says which tokens are kept.

    Writes:
        - ``ratio``: All tokens of a response have one ratio, the power mean of the ratios of those that are kept; a
          token pulls by its part in it. The power is ``power`` in the first optimizer step and moves to ``final_power``
          over ``steps`` of them.

    Denominator:
        untouched: a response that is clipped still counts.

    Parameters:
        - ``power`` (p_0): float in [-100, 100], default 2.0. Paper and official script. 1 is the plain mean of ratios.
        - ``final_power`` (p_1): float in [-100, 100], default -2.0. Paper and official script.
        - ``steps`` (K): int in [1, inf), default 500. Optimizer steps. Paper and official script, which count rollouts:
          multiply by the optimizer steps of each.

    State:
        - ``step``: number of this optimizer step, from 1; 0 before the first.

    Deviations:
        - From the paper: this is its token form: each token has the value rho and the part of the gradient that belongs
          to its own log-prob, for its own advantage. Where a response has one advantage nothing differs.
        - From the paper: n and the sum are over the tokens that no mask drops; the paper has no masks. ln rho is
          clamped to 20 nats, with zero gradient beyond.
        - From its code: the power moves with each optimizer step; there once per rollout. Other shapes of the schedule
          are not offered.
        - From its code: the mean is taken of logarithms, so nothing overflows, and it is exact and continuous at p = 0.
          The code exponentiates ratios, takes the geometric mean where |p| < 1e-6, and adds 1e-8 to n.
        - From its code: a form that clips each ratio before it is averaged is not offered; at power 0 that is `gmpo`,
          except for its range.

    Pitfalls:
        At positive powers, a single outlier dominates the mean and takes most of the gradient; at negative ones, the
        token that fell furthest does. At power 0 it is `gspo`, for which a clip at 0.2 is idle: look at
        ``ratio/clipped_high`` as the power passes 0. A run that is shorter than ``steps`` never sees the end of the
        schedule.

    Interacts:
        - ``holder_mean`` was published on ``clip_higher`` and ``sequence_mean``, the clip at 0.2.
        - The mean of ``holder_mean`` is over the kept tokens, so dropping some tokens changes the ratio of the
          others.

    Limits:
        - Where every response keeps one token, or all its ratios are equal.
        - Where every ratio is exactly 1, as with one optimizer step per rollout.

    Example:
        Ratios 1.5 and 0.5 in the first step, so p = 2: rho = sqrt((2.25 + 0.25) / 2) = 1.118. The larger ratio has nine
        tenths of the gradient: 1.118 * 2.25 / 2.5 = 1.0062, over two responses 0.5031.

        >>> import torch
        >>> from rlstab import HolderMean, PolicyOutputs, SequenceMean, TokenBatch, compose
        >>> old = torch.full((2, 2), 0.4).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2), advantages=torch.tensor([1.0, -1.0]), old_logprobs=old
        ... )
        >>> live = torch.tensor([[0.6, 0.2], [0.6, 0.2]]).log().requires_grad_()
        >>> objective = compose(HolderMean(), SequenceMean())
        >>> out = objective(batch, PolicyOutputs.from_padded(batch, logprobs=live), state=objective.init_state())
        >>> out.loss.backward()
        >>> [round(g, 4) for g in live.grad.flatten().tolist()]
        [-0.5031, -0.0559, 0.5031, 0.0559]

    Source:
        Y. Chen, D. Liang, Y. Chen et al., "Hölder Policy Optimisation", 2026, arXiv 2605.12058. Reference code:
        YihangChen9/HolderPO ``train_zero_math_holder.py``, ``scripts/qwen2.5-math-7b-holder.sh`` (commit 1d27a37;
        conformance ran 73bcbc5).
    """

    about = About(
        addresses={"trust region", "token"},
        expects=EXPECTS,
    )

    name = "holder_mean"
    writes = {"ratio"}

    power: Annotated[float, Range(ge=-100, le=100)] = 2.0
    final_power: Annotated[float, Range(ge=-100, le=100)] = -2.0
    steps: Annotated[int, Range(ge=1)] = 500

    def init_state(self) -> State:
        return {"step": 0}

    def advance(self, state: State, stat: Settled) -> State:
        return {"step": state["step"] + 1}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        progress = min((state["step"] - 1) / self.steps, 1.0)
        power = (1 - progress) * self.power + progress * self.final_power

        def ratio(policy: PolicyOutputs, constants: Constants) -> Tensor:
            gaps = token_log_ratio(constants.anchor, constants.anchor, batch)
            mean, share = _power_mean(batch, gaps.double(), constants.keep, power)
            return mean.to(gaps.dtype) + share.to(gaps.dtype) * gradient_of(policy, constants)

        return Terms(ratio=ratio, report={"power": Mean.scalar(power)})


def _power_mean(batch: TokenBatch, gaps: Tensor, keep: Tensor, power: float) -> tuple[Tensor, Tensor]:
    """``(n,)`` log of the power mean of ``exp(gaps)`` over the kept tokens of the response, and its slopes times n."""
    if power == 0:
        return batch.spread(batch.sequence_mean(gaps, keep)), torch.ones_like(gaps)
    scaled = torch.where(keep, power * gaps, -torch.inf)
    top = torch.full((batch.num_sequences,), -torch.inf, dtype=gaps.dtype, device=gaps.device)
    top = batch.spread(top.scatter_reduce(0, batch.sequence, scaled, "amax").nan_to_num(neginf=0.0))
    below = torch.where(keep, scaled - top, 0.0)
    rest = batch.spread(batch.sequence_mean(below.expm1(), keep))  # of powers over the largest, less 1: exact near 0
    return (top + rest.log1p()) / power, below.exp() / (1 + rest)
