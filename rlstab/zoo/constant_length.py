"""Constant length: sum over a response, divided by one fixed length (Dr. GRPO)."""

from typing import Annotated

import torch
from torch import Tensor

from rlstab import About, Range, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.core.terms import Totals


class ConstantLength(TokenObjective):
    """Sum over each response, divide by a constant length, average over responses: no bias towards short ones.

    Problem:
        Dividing by the length of a response favours short right answers and spares long wrong ones, so wrong answers
        grow longer. With a constant divisor, a token weighs the same in a short response as in a long one, and in every
        optimizer step.

    Equation:
        With S the number of responses that have a kept token, L_c the constant:

            policy term: c_t = 1 / (S L_c),    penalties: the same with all tokens counted

        L_c is ``length``.

    Reads:
        nothing itself. Its function gets the counts of the whole optimizer step.

    Writes:
        - ``aggregate``: Sum over the tokens of a response, divide by ``length``, and average over the responses of the
          optimizer step: a token weighs the same whatever the length of its response.

    Denominator:
        untouched: it says how counts become coefficients. A dropped token does not change the divisor, unless its
        whole response is dropped.

    Parameters:
        - ``length`` (L_c): int in [1, inf), required. Set it to the longest response you generate. The authors' code:
          ``generate_max_length`` 3000.

    State:
        none

    Deviations:
        - From the paper: Dr. GRPO also leaves the standard deviation out of the advantage; that is the advantage
          estimator's part (``dr_grpo``), not this method's. A response that lost all its tokens to masks does not count
          in S.
        - From its code, and TRL's ``dr_grpo``: a response without tokens counts in S there, and S is that of the
          micro-batch, which is the same where all micro-batches have as many responses.
        - From other code: verl divides by the padded width by default, so its scale changes with the
          padding. Forks of an older verl do not divide by S.

    Pitfalls:
        none

    Interacts:
        - ``constant_length`` with ``clip_higher`` at 0.2 on both sides, and advantages without deviation, is Dr. GRPO.
        - ``constant_length`` divides by a fixed length, so the tokens that a mask drops still count in it.
        - ``constant_length`` scales the penalty of ``kl`` like the policy term: where responses are shorter than
          ``length``, both are smaller than in a token mean.

    Limits:
        - Where responses keep ``length`` tokens on average: equal to ``token_mean``.

    Example:
        A correct response of three tokens and a wrong one of one token, length 4: (-3 / 4 + 1 / 4) / 2 = -0.25, and
        every token weighs 1 / 8.

        >>> import torch
        >>> from rlstab import ConstantLength, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((2, 3), 0.5).log()
        >>> mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
        >>> batch = TokenBatch.from_padded(response_mask=mask, advantages=torch.tensor([1.0, -1.0]), old_logprobs=old)
        >>> live = old.clone().requires_grad_()
        >>> out = compose(ConstantLength(length=4))(batch, PolicyOutputs.from_padded(batch, logprobs=live))
        >>> out.loss.backward()
        >>> round(out.loss.item(), 4), [round(g, 4) for g in live.grad[mask.bool()].tolist()]
        (-0.25, [-0.125, -0.125, -0.125, 0.125])

    Source:
        Z. Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", 2025, arXiv 2503.20783. Reference
        code: sail-sg/understand-r1-zero ``train_zero_math.py``; verl-project/verl ``verl/trainer/ppo/core_algos.py``
        (``agg_loss``, "seq-mean-token-sum-norm").
    """

    about = About(addresses={"length"})

    name = "constant_length"
    writes = {"aggregate"}

    length: Annotated[int, Range(ge=1)]

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def constant(sequence: Tensor, counted: Tensor, num_sequences: int, totals: Totals) -> Tensor:
            share = torch.full((), 1.0 / (totals.sequences * self.length), dtype=torch.float64, device=counted.device)
            return share.expand(counted.shape)

        return Terms(aggregate=constant)
