"""Random mask: the control for a method that drops tokens; it drops as many at random."""

from typing import Annotated, Literal

from rlstab import About, Mean, NoOpAt, Range, Settled, State, Terms, TokenBatch, TokenObjective

#: Added to the seed. A sampler may draw tokens by (seed, sequence, position) too, with the seed of a run, which is
#: below 2^32: with equal numbers, the tokens dropped would be those at one end of the distribution function.
STREAM = 1 << 40


class RandomMask(TokenObjective):
    """Drop rewarded tokens at random: the control for a mask that selects them.

    Problem:
        A mask does two things: it removes some tokens, and it selects which. If a run with it does better, the
        selection need not be the reason: with fewer rewarded tokens, the policy is pushed less. This mask removes as
        many tokens at random. What another mask gains over it is due to the selection.

    Equation:
        With A_t = ``advantages`` and u_t uniform in [0, 1) by (``seed``, sequence id, position):

            P      = { t : A_t > 0 }                                     sign: positive
                   = all tokens                                          sign: all
            keep_t = not (t in P and u_t < rho)

        rho is ``share``. Each token of P is dropped independently with this probability; the share dropped in an
        optimizer step varies around it.

    Reads:
        - ``advantages`` (n,), unitless: only the sign; not with ``sign="all"``.
        - ``sequence_ids`` (S,), integers: which response it is, for the numbers drawn.
        - ``sequence`` (n,), integers: the response of each token.
        - ``position`` (n,), integers: its position there.

    Writes:
        - ``keep``: Drop a token with chance ``share``, drawn by seed ``seed`` (signs of the advantage that may be
          drawn: ``sign``). It leaves the divisor.

    Denominator:
        kept: dropped tokens leave numerator and denominator, as with ``s2t``.

    Parameters:
        - ``share`` (rho): float in [0, 1], default 0.01. Chosen here; set it to the share that the mask under test
          drops of the same tokens: ``s2t/dropped`` divided by the share of tokens with A > 0.
        - ``sign``: 'positive' | 'all', default 'positive'. Whose tokens are dropped. 'positive' is the control of
          ``s2t``, which drops only rewarded tokens; 'all', added here, is for masks that look at both signs.
        - ``seed``: int in [0, 4294967296), default 0. Chosen here. Another seed drops other tokens.

    State:
        none

    Deviations:
        - From the paper: its ablation names a random mask as large as that of S2T; how its tokens are drawn, and of
          which ones, was not found. Here each is drawn independently, so the size agrees on average and not in each
          optimizer step. The same token is drawn alike whenever it is seen, in each epoch and however the step is cut.
        - From its code: no official code was found.

    Pitfalls:
        none

    Interacts:
        - A token that ``s2t`` or ``top_entropy`` drops is dropped whatever ``random_mask`` draws, so ``random_mask`` is
          a control only in their place.

    Limits:
        - With sign 'positive', an optimizer step without rewarded tokens keeps everything.

    Example:
        A rewarded response of four tokens and share one half. With seed 2 the second and the last are dropped, and the
        mean runs over the two that are left; seed 3 drops others.

        >>> import torch
        >>> from rlstab import PolicyOutputs, RandomMask, TokenBatch, compose
        >>> old = torch.full((1, 4), 0.5).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(1, 4), advantages=torch.ones(1), old_logprobs=old
        ... )
        >>> for seed in (2, 3):
        ...     live = old.clone().requires_grad_()
        ...     objective = compose(RandomMask(share=0.5, seed=seed))
        ...     objective(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        ...     print([round(g, 4) + 0.0 for g in live.grad[0].tolist()])
        [-0.5, 0.0, -0.5, 0.0]
        [-0.5, -0.5, 0.0, 0.0]

    Source:
        The control is that of an ablation in S. Liu, Z. He, G. Zhan et al., "STAPO: Stabilizing Reinforcement Learning
        for LLMs by Silencing Rare Spurious Tokens", 2026, arXiv 2602.15620 (v4-v5). Reference code: none found.
    """

    about = About(
        addresses={"token"},
        no_op_at=(NoOpAt({"share": 0.0}, "no number is below it."),),
        exceptions={"replication": "a copy of a sequence is another sequence, and its tokens are drawn again"},
    )

    name = "random_mask"
    writes = {"keep"}

    share: Annotated[float, Range(ge=0, le=1)] = 0.01
    sign: Literal["positive", "all"] = "positive"
    seed: Annotated[int, Range(ge=0, lt=2**32)] = 0

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        dropped = batch.uniform(STREAM + self.seed) < self.share
        if self.sign == "positive":
            dropped = dropped & batch.rewarded
        return Terms(keep=~dropped, report={"dropped": Mean.of(dropped)})
