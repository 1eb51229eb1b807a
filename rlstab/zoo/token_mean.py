"""Token mean: every token of the optimizer step weighs the same."""

from rlstab import About, NoOpAt, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.core.loss import token_mean


class TokenMean(TokenObjective):
    """Average over all tokens of the optimizer step: the default, made explicit.

    Problem:
        Averaging within each response first gives a token of a long response less weight than one of a short response,
        so the policy learns less from long chains of thought, and bad long ones are punished less. Here every token
        weighs the same.

    Equation:
        With N the number of kept tokens of the optimizer step and N_0 that of all its tokens:

            policy term: c_t = 1 / N,          penalties: c0_t = 1 / N_0

    Reads:
        nothing itself. Its function gets the counts of the whole optimizer step.

    Writes:
        - ``aggregate``: Average over all tokens of the optimizer step: every token weighs the same.

    Denominator:
        untouched: it says how counts become coefficients; the masks decide which tokens are counted.

    Parameters:
        none

    State:
        none

    Deviations:
        - From the paper: DAPO writes the mean over one group; here it is over the optimizer step.
        - From other code: N is exact over micro-batches and ranks, as in TRL's ``dapo`` loss and verl's newer engine.
          Older verl (and the official code of STARE, Lp-Reg and JustRL) averages inside each micro-batch, which gives
          tokens of small micro-batches more weight and, at one response per micro-batch, is ``sequence_mean``. TRL's
          ``bnpo`` likewise. The code of Lp-Reg adds 1e-8 to N.

    Pitfalls:
        A mask that shrinks the divisor, such as ``top_entropy``, raises the weight of the remaining tokens. Long
        responses count for more, also in a penalty such as that of ``kl``.

    Example:
        A correct response of three tokens and a wrong one of one token: (-1 - 1 - 1 + 1) / 4 = -0.5, every token at 1 /
        4.

        >>> import torch
        >>> from rlstab import PolicyOutputs, TokenBatch, TokenMean, compose
        >>> old = torch.full((2, 3), 0.5).log()
        >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
        >>> batch = TokenBatch.from_padded(response_mask=mask, advantages=torch.tensor([1.0, -1.0]), old_logprobs=old)
        >>> live = old.clone().requires_grad_()
        >>> out = compose(TokenMean())(batch, PolicyOutputs.from_padded(batch, logprobs=live))
        >>> out.loss.backward()
        >>> round(out.loss.item(), 4), [round(g, 4) for g in live.grad[mask.bool()].tolist()]
        (-0.5, [-0.25, -0.25, -0.25, 0.25])

    Source:
        Q. Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, arXiv 2503.14476. Common
        code: verl-project/verl ``verl/trainer/ppo/core_algos.py`` (``agg_loss``, "token-mean").
    """

    about = About(
        addresses={"length"},
        no_op_at=(NoOpAt({}, "Always: a composition without an owner of the aggregation is a token mean."),),
    )

    name = "token_mean"
    writes = {"aggregate"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(aggregate=token_mean)
