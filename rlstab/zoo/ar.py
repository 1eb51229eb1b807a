"""AR: weigh a token by its probability, so that rare ones do not drown the rest."""

from typing import Annotated

from rlstab import About, Mean, NoOpAt, Range, Settled, State, Terms, TokenBatch, TokenObjective


class AR(TokenObjective):
    """Damp rare tokens: the weight of a token rises linearly with its probability.

    Problem:
        The gradient of a token of probability q has a norm of about 1 - q at the logits: rare tokens have large
        gradients, and common tokens have almost none. What a step does to common tokens is then mostly a side effect of
        the rare ones, often against their own advantage. Advantage reweighting damps the rare tokens.

    Equation:
        With q_t = exp(``old_logprobs``):

            w_t = alpha q_t + 1 - alpha
            L   = sum_t c_t w_t surrogate_t

        c_t are the coefficients of the aggregation: 1 / N for a token mean.

    Reads:
        - ``old_logprobs`` (n,), nats: the policy that the ratio divides by.

    Writes:
        - ``weight``: Multiply the policy term of a token by 1 - ``alpha`` (1 - q), where q is its probability under the
          policy that the ratio divides by. The divisor stays.

    Denominator:
        untouched: it counts tokens, not weights.

    Parameters:
        - ``alpha`` (alpha): float in [0, 1], default 0.3. The paper. The official script of the logic puzzles has 0.2
          for AR alone, and 0.3 together with Lopti.

    State:
        none

    Deviations:
        - From the paper: it multiplies the advantage by w_t, and here w_t multiplies the policy term. The two are one
          wherever a surrogate reads only the sign of the advantage, as clips do. A method that reads the size of the
          advantage (a covariance, an estimate of the change of entropy) sees it without w_t here.
        - From its code: it can also scale the negative advantages by another factor, and weigh by a sigmoid of the
          probability; neither is in the paper's AR. Lopti, the paper's second method, takes two optimizer steps per
          batch and is not offered.

    Pitfalls:
        It does not normalise: the policy gradient shrinks by the mean weight, which is reported. A penalty or a bonus
        becomes that much stronger in comparison.

    Interacts:
        - ``ar`` damps rare tokens, and with ``high`` above ``low`` ``clip_higher`` leaves them room to rise.
        - ``ar`` damps rare tokens, and ``stare`` boosts those that were rewarded.
        - ``ar`` damps rare tokens, and with ``alpha`` above 0 ``maspo`` gives them more room to move than others.
        - Both soften what happens to rare punished tokens: ``ar`` pushes them less, and ``lp_reg`` holds some.

    Example:
        A correct response with tokens of probability 0.9, 0.5 and 0.1. With alpha = 0.3 their weights are 0.97, 0.85
        and 0.73, and the gradient of each is -w / 3.

        >>> import torch
        >>> from rlstab import AR, PolicyOutputs, TokenBatch, compose
        >>> old = torch.tensor([[0.9, 0.5, 0.1]]).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 3), advantages=torch.ones(1), old_logprobs=old
        ... )
        >>> live = old.clone().requires_grad_()
        >>> out = compose(AR())(batch, PolicyOutputs.from_padded(batch, logprobs=live))
        >>> out.loss.backward()
        >>> [round(g, 4) for g in live.grad[0].tolist()]
        [-0.3233, -0.2833, -0.2433]
        >>> round(out.metrics()["ar/weight"], 4)
        0.85

    Source:
        Z. Yang et al., "Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs", 2025, arXiv 2505.12929.
        Reference code: zhyang2226/AR-Lopti ``verl/trainer/ppo/ray_trainer.py`` (``compute_reweight_advantage``,
        "both_linear_normal").
    """

    about = About(
        addresses={"token"},
        no_op_at=(NoOpAt({"alpha": 0.0}, "every weight is 1."),),
    )

    name = "ar"
    needs = {"old_logprobs"}
    writes = {"weight"}

    alpha: Annotated[float, Range(ge=0, le=1)] = 0.3

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        weight = self.alpha * batch.old_logprobs.exp() + (1 - self.alpha)
        return Terms(weight=weight, report={"weight": Mean.of(weight)})
