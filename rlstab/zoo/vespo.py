"""VESPO: every response pulls by a smooth function of its whole importance weight."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from rlstab import About, Constants, Range, Settled, State, Surrogate, Terms, TokenBatch, TokenObjective
from rlstab.core.surrogate import MAX_LOG_RATIO
from rlstab.zoo.anchored import Anchored


class VESPO(Anchored, TokenObjective):
    """Replace the token ratio by a bounded, smooth function of the importance weight of the whole response.

    Problem:
        The exact correction for stale data is the importance weight of the whole response, the product of its token
        ratios, but its variance is far too large. Token-level clips and means over the length replace it by something
        else. VESPO asks which weight is best for a given variance. The answer is the importance weight times a kernel
        that fades out for responses that the policy no longer writes, and for those that it now writes far more often.

    Equation:
        With d_t = ln of the live probability of token t over that of the anchor, A its advantage, l its live log-prob:

            W    = exp(sum of d_t over the response)
            phi  = W^k exp(lam (1 - W))                  1 at W = 1, largest at W = k / lam
            loss = -phi A l with phi as a constant,      so the gradient on l is -phi A

        (k, lam) is (``positive_power``, ``positive_decay``) where A >= 0, else (``negative_power``,
        ``negative_decay``).

    Reads:
        - ``rollout_logprobs`` (n,), nats: the anchor, with ``anchor="rollout"``.
        - ``old_logprobs`` (n,), nats: the anchor, with ``anchor="old"``.

    Writes:
        - ``surrogate``: The tokens of a response pull with W^k exp(lam (1 - W)) instead of their ratios, W being the
          probability of the response under the live policy over that under the ``anchor`` policy; k =
          ``positive_power`` and lam = ``positive_decay`` where the advantage is positive, ``negative_power`` and
          ``negative_decay`` where it is negative.

    Denominator:
        untouched: a response that pulls little still counts.

    Parameters:
        - ``positive_power`` (k): float in [0, 10], default 2.0. The authors' code and scripts.
        - ``positive_decay`` (lam): float in [0.1, 10], default 3.0. The authors' code and scripts; a docstring in the
          code says 1.5.
        - ``negative_power`` (k): float in [0, 10], default 3.0. The authors' code and scripts; the docstring says 4.
        - ``negative_decay`` (lam): float in [0.1, 10], default 2.0. The authors' code and scripts; the docstring says
          2.5.
        - ``anchor``: 'old' | 'rollout', default 'old'. What the live policy is compared with. 'old' is the code without
          rollout weights, as in its synchronous scripts; 'rollout' takes the sampler's mismatch into W.

    State:
        none

    Deviations:
        - From the paper: the value of the loss is -phi A. The gradients are equal.
        - From the paper: the advantage is that of a token here, and only its sign decides between the two kernels. In
          the paper all tokens of a response have one advantage.
        - From its code: d_t, and then their sum, are clamped to 20 nats, as there; the code bounds W below by 1e-8, and
          here it is e^-20, where phi is below 1e-14 at the defaults. A token whose own log-ratio is beyond 20 nats does
          not pull. The ranges of power and decay are rlstab's choice: within them phi stays below e^37.
        - From its code: with 'rollout' W is the live policy over the sampler. The code multiplies old over sampler by
          weights that it may have truncated before.
        - From other code: TRL adds the rollout weights over padding too, which is harmless where they are 1.

    Pitfalls:
        W is a product: in a response of a thousand tokens, a mean drift of 0.01 nats makes it e^10 or e^-10, and the
        response contributes nothing. Look at ``ratio/surrogate``. phi is not bounded by 1: it reaches 1.21 and 1.24.
        Responses that the policy has abandoned fade out for either sign, punished ones sooner.

    Interacts:
        - ``vespo`` was published on ``token_mean``.
        - ``vespo`` fades out responses that the policy has left, by the weight of the whole response;
          ``off_policy_mask`` and ``m2po`` remove the gradient of some of their tokens as well.
        - The weight of ``vespo`` is that of the whole response, including the tokens that a mask drops.

    Limits:
        - With anchor 'old', where every ratio is exactly 1, as with one optimizer step per rollout.

    Example:
        Ratios 1.5 and 0.75 in a rewarded and in a punished response: W = 1.125. Rewarded, phi = 1.125^2 exp(3 (1 -
        1.125)) = 0.8698; punished, phi = 1.125^3 exp(2 (1 - 1.125)) = 1.1089. The gradient is -phi A / 4.

        >>> import torch
        >>> from rlstab import VESPO, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((2, 2), 0.4).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2), advantages=torch.tensor([1.0, -1.0]), old_logprobs=old
        ... )
        >>> live = torch.tensor([[0.6, 0.3], [0.6, 0.3]]).log().requires_grad_()
        >>> compose(VESPO())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) for g in live.grad.flatten().tolist()]
        [-0.2175, -0.2175, 0.2772, 0.2772]

    Source:
        G. Shen, C. Zhao, X. Cheng, L. Huang, X. Yu, "VESPO: Variational Sequence-Level Soft Policy Optimization for
        Stable Off-Policy LLM Training", 2026, arXiv 2602.10693. Reference code: FloyedShen/VESPO
        ``recipe/vespo/code/core_algos.py``, ``recipe/vespo/run`` (commit aa1f304). Code of others: huggingface/trl
        ``trl/trainer/grpo_trainer.py`` (``get_gamma_weights``).
    """

    about = About(addresses={"trust region", "off-policy"})
    excludes = {
        "ratio": "the kernel takes the place of the ratio, and its weight is not normalised by the length.",
        "importance_correction": "the mismatch of the sampler belongs inside the kernel, which bounds it and counts it "
        "once. Anchor 'rollout' puts it there.",
    }

    name = "vespo"
    writes = {"surrogate"}

    positive_power: Annotated[float, Range(ge=0, le=10)] = 2.0
    positive_decay: Annotated[float, Range(ge=0.1, le=10)] = 3.0
    negative_power: Annotated[float, Range(ge=0, le=10)] = 3.0
    negative_decay: Annotated[float, Range(ge=0.1, le=10)] = 2.0
    anchor: Literal["old", "rollout"] = "old"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        compared = self.live_and_anchor(batch)

        def kernel(ratio: Tensor, constants: Constants) -> Tensor:
            live, other = compared(constants)
            gaps = live - other
            total = batch.sequence_total(gaps.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
            log_weight = batch.spread(total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
            positive = constants.advantages >= 0
            power = torch.where(positive, self.positive_power, torch.full_like(log_weight, self.negative_power))
            decay = torch.where(positive, self.positive_decay, torch.full_like(log_weight, self.negative_decay))
            return (power * log_weight - decay * log_weight.expm1()).exp()

        return Terms(surrogate=Surrogate(kernel, whole_sequences=True))
