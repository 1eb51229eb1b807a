"""Sequence mean: every response of the optimizer step weighs the same."""

import torch
from torch import Tensor

from rlstab import About, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.core.terms import Totals


class SequenceMean(TokenObjective):
    """Average over the tokens of each response, then over responses: every response has the same weight.

    Problem:
        In a token mean, a few very long responses outvote the others. Here every response has one vote, whatever its
        length. The cost is a bias: each token of a long response counts for less, so long wrong answers are punished
        less per token.

    Equation:
        With S the number of responses that have a kept token, n_i the kept tokens of response i:

            policy term: c_t = 1 / (S n_i),    penalties: the same with all tokens counted

    Reads:
        nothing itself. Its function gets the index of each token's response and the counts of the whole optimizer step.

    Writes:
        - ``aggregate``: Average over the tokens of a response, then over responses: every response weighs the same.

    Denominator:
        untouched: it says how counts become coefficients; the masks decide which tokens are counted.

    Parameters:
        none

    State:
        none

    Deviations:
        - From the paper: GRPO averages over the responses of a group and then over groups, which is the same where all
          groups have one size. A response that lost all its tokens to masks does not count in S.
        - From other code: S is exact over micro-batches and ranks. verl adds 1e-8 to n_i; nothing is added here. A
          response without tokens counts in S in TRL's ``grpo`` loss, and in verl where the size of the whole batch is
          given. TRL takes the mean of each micro-batch and then of these, which is the same where all micro-batches
          have as many responses.

    Pitfalls:
        Compared with ``token_mean``, the weight of a token depends on the length of its response, so learning rates do
        not carry over.

    Interacts:
        - ``sequence_mean`` was first published with ``clip_higher`` and ``kl``, in GRPO.
        - Under ``sequence_mean`` the kept tokens of a response share its whole weight.
        - ``sequence_mean`` averages the penalty of ``kl``, ``entropy_bonus`` and ``lp_reg`` per response, like the
          policy term, so a coefficient found under a token mean does not carry over.

    Limits:
        - Where every response keeps the same number of tokens: equal to ``token_mean``.

    Example:
        A correct response of three tokens and a wrong one of one token: (-1 + 1) / 2 = 0; the tokens weigh 1 / 6 and 1
        / 2.

        >>> import torch
        >>> from rlstab import PolicyOutputs, SequenceMean, TokenBatch, compose
        >>> old = torch.full((2, 3), 0.5).log()
        >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
        >>> batch = TokenBatch.from_padded(response_mask=mask, advantages=torch.tensor([1.0, -1.0]), old_logprobs=old)
        >>> live = old.clone().requires_grad_()
        >>> out = compose(SequenceMean())(batch, PolicyOutputs.from_padded(batch, logprobs=live))
        >>> out.loss.backward()
        >>> abs(round(out.loss.item(), 4)), [round(g, 4) for g in live.grad[mask.bool()].tolist()]
        (0.0, [-0.1667, -0.1667, -0.1667, 0.5])

    Source:
        Z. Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", 2024,
        arXiv 2402.03300 (eq. 3). Common code: verl-project/verl ``verl/trainer/ppo/core_algos.py`` (``agg_loss``,
        "seq-mean-token-mean").
    """

    about = About(addresses={"length"})

    name = "sequence_mean"
    writes = {"aggregate"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(aggregate=_sequence_mean)


def _sequence_mean(sequence: Tensor, counted: Tensor, num_sequences: int, totals: Totals) -> Tensor:
    lengths = torch.zeros(num_sequences, dtype=torch.float64, device=sequence.device)
    lengths = lengths.index_add(0, sequence, counted.double())
    return 1.0 / (totals.sequences * lengths[sequence].clamp(min=1.0))
