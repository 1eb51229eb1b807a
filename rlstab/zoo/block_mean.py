"""Block mean: every block of a response weighs the same, however long it is (blockwise advantage estimation)."""

import torch
from torch import Tensor

from rlstab import About, Mean, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.core.terms import Totals

#: Block numbers are below it: a float32 holds whole numbers up to 2^24.
SPAN = 1 << 32


class BlockMean(TokenObjective):
    """Average over the tokens of each block, sum over the blocks of a response, then average over responses.

    Problem:
        A response may consist of blocks with separate rewards: an answer and the confidence in it, a first attempt and
        a second. Each block has its own advantage, and in a token mean, or a mean over the response, the long block
        drowns the short one: a confidence of three tokens after a proof of two thousand is hardly trained. Here every
        block has one vote.

    Equation:
        With S the number of responses that have a kept token, and n_ik the kept tokens of block k of response i:

            policy term: c_t = 1 / (S n_ik) for the tokens of block k,  0 for tokens without a block
            penalties:   the same with all tokens counted;
                         the tokens without a block, in each response, are one more block

        The block of a token is ``block_ids``, any whole number of at least 0; below 0 it has none.

    Reads:
        - ``block_ids`` (n,), whole numbers: the block of each token, below 0 for none.
        - ``sequence`` (n,), integers: the response of each token.

    Writes:
        - ``aggregate``: Average over the tokens of a block, add up the blocks of a response, then average over the
          responses of the optimizer step: every block weighs the same.
        - ``weight``: Give a token the weight 0 when it belongs to no block.

    Denominator:
        untouched: it says how counts become coefficients; the masks decide which tokens are counted.

    Parameters:
        none

    State:
        none

    Deviations:
        - From the paper: only its aggregation is here. Its advantages, the reward of a block less a baseline over the
          responses whose blocks before it had the same outcome, and not divided by a standard deviation, are the stage
          ``blockwise``.
        - From the paper: it averages over the responses of a group and then over groups, which is the same where all
          groups have one size. A response that lost all its tokens to masks does not count in S; one that has no block
          does, as there. It has no penalty on tokens, so how penalties treat tokens without a block is rlstab's choice.
        - From its code: no official code was found.

    Pitfalls:
        In rlstab's trainer, the blocks come from the task, as in ``chain``, or from your own function, passed to
        ``train`` as the signal ``block_ids``. A response with more blocks weighs more, because its blocks are summed. A
        token of a short block has a large coefficient, so learning rates do not carry over from ``token_mean``, nor do
        coefficients of penalties. Under a mask, the tokens left in a block share its whole weight.

    Interacts:
        - ``block_mean`` was published with ``clip_higher`` and ``adaptive_entropy``, without ``kl``.
        - ``block_mean`` gives each block its own vote, and ``gspo``, ``gmpo`` and ``holder_mean`` one ratio to the
          whole response: how hard a block pulls also depends on how far the policy has moved in the others.

    Limits:
        - Where all responses are one block and keep as many tokens: equal to ``token_mean``.

    Example:
        A response of an answer of three tokens, one token of markup and a confidence of one token: the tokens of the
        answer weigh 1 / 3, that of the confidence 1, the markup nothing.

        >>> import torch
        >>> from rlstab import BlockMean, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((1, 5), 0.5).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 5),
        ...     advantages=torch.tensor([[1.0, 1.0, 1.0, 0.5, -0.5]]),
        ...     old_logprobs=old,
        ...     block_ids=torch.tensor([[0, 0, 0, -1, 1]]),
        ... )
        >>> live = old.clone().requires_grad_()
        >>> compose(BlockMean())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) + 0.0 for g in live.grad[0].tolist()]
        [-0.3333, -0.3333, -0.3333, 0.0, 0.5]

    Source:
        K. Pavlenko, A. Golubev, S. Karasik, B. Yangel, "Blockwise Advantage Estimation for Multi-Objective RL with
        Verifiable Rewards", 2026, arXiv 2602.10231. Reference code: none found.
    """

    about = About(addresses={"length"})

    name = "block_mean"
    needs = {"block_ids"}
    writes = {"aggregate", "weight"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        block = batch.signal("block_ids").floor().clamp(min=-1)
        _, index = torch.unique(batch.sequence * SPAN + block.long() + 1, return_inverse=True)

        def block_mean(sequence: Tensor, counted: Tensor, num_sequences: int, totals: Totals) -> Tensor:
            sizes = torch.zeros_like(counted, dtype=torch.float64).index_add(0, index, counted.double())
            return 1.0 / (totals.sequences * sizes[index].clamp(min=1.0))

        within = block >= 0
        return Terms(weight=within.to(block.dtype), aggregate=block_mean, report={"without": Mean.of(~within)})
