"""The clip of DCPO: a trust region that is wider for rare tokens."""

from typing import Annotated

from rlstab import About, Bounds, Range, Settled, State, Terms, TokenBatch, TokenObjective

#: 1 / q is at most e to the power of this, so that it and its products with settings are finite.
MAX_SURPRISAL = 700.0


class DCPOClip(TokenObjective):
    """Stop a token's gradient once its ratio has left a range that is wide for rare tokens, narrow for likely ones.

    Problem:
        A clip with the same bounds for every token leaves a rare token almost no room: at ``high`` 0.28 one of
        probability 0.01 may rise to 0.0128, and one of 0.9 to more than 1. Rare tokens are where the policy can still
        learn something new. DCPO bounds |r - 1| times the new probability, the term by which importance sampling
        changes the variance. That gives rare tokens more room, and likely ones less.

    Equation:
        With q = exp(``old_logprobs``) and r the ratio, |(r - 1) r q| <= e solved for r:

            low_t  = 1/2 + 1/2 sqrt(max(1 - 4 e_low / q, 0))
            high_t = min(1/2 + 1/2 sqrt(1 + 4 e_high / q), r_max)
            l      = max(-A r, -A clip(r, low_t, high_t))
            l      = min(l, -A c)   where A < 0                              only with a dual clip

        e_low is ``low``, e_high ``high``, r_max ``cap``, c ``dual_clip``. At ``low`` 0.16 and ``high`` 0.2 the range is
        [0.769, 1.187] for q = 0.9, [0.5, 1.618] for q = 0.2, [0.5, 5] for q = 0.01.

    Reads:
        - ``old_logprobs`` (n,), nats: how rare the token was.

    Writes:
        - ``bounds``: A token of old probability q stops pulling once its ratio has left [1/2 + sqrt(1 - 4 x ``low`` /
          q) / 2, 1/2 + sqrt(1 + 4 x ``high`` / q) / 2]: wider for rare tokens, never below 1/2 or above ``cap``. A
          punished token also stops at the dual clip (``dual_clip``). It still counts.

    Denominator:
        untouched: a token that is stopped still counts.

    Parameters:
        - ``low`` (e_low): float in [0, inf), default 0.16. The paper's comparison with other clips; the official
          scripts have 0.2.
        - ``high`` (e_high): float in [0, inf), default 0.2. As ``low``; the official scripts have 0.28.
        - ``cap`` (r_max): float in [1, inf), default 10.0. The paper: the largest ratio however rare the token is.
        - ``dual_clip`` (c): float in (1, inf) or None, default 10.0. The official scripts. None leaves punished tokens
          without an upper bound.

    State:
        none

    Deviations:
        - From the paper: only its clip. Its smoothed advantages need statistics of each prompt over the run, and its
          mean is over the tokens of each response: see ``sequence_mean``.
        - From its code: its cap is the larger of 10 and the dual clip, one number for both; here they are two.
        - From its code: log-ratios are clamped to 20 nats before the exponential; there they are not. A probability
          that underflows to 0 gives no lower bound 1 there, and 1/2 here, as every rare token has.

    Pitfalls:
        The lower bound is never below 1/2: below ``low`` times 4, here q = 0.64, every token has it, so a punished rare
        token has less room than a rewarded one. The defaults look narrower than those of ``clip_higher`` and are not:
        below q = 0.56 there is more room upwards than 1.28.

    Interacts:
        - ``dcpo_clip`` was published on ``sequence_mean``, up to a factor, and its own advantages.

    Limits:
        - Where every ratio is exactly 1, as with one optimizer step per rollout.

    Example:
        Tokens of probability 0.9, 0.2 and 0.01 that were rewarded, with ratios 1.1, 1.7 and 4: the upper bounds are
        1.187, 1.618 and 5, so the second is stopped. Punished, at ratios 0.75, 0.6 and 0.4, the first and the last are
        below their bounds of 0.769 and 0.5.

        >>> import torch
        >>> from rlstab import DCPOClip, PolicyOutputs, TokenBatch, compose
        >>> old = torch.tensor([[0.9, 0.2, 0.01], [0.9, 0.2, 0.01]]).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 3), advantages=torch.tensor([1.0, -1.0]), old_logprobs=old
        ... )
        >>> live = (old + torch.tensor([[1.1, 1.7, 4.0], [0.75, 0.6, 0.4]]).log()).requires_grad_()
        >>> compose(DCPOClip())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(6 * g, 4) + 0.0 for g in live.grad.flatten().tolist()]
        [-1.1, 0.0, -4.0, 0.0, 0.6, 0.0]

    Source:
        S. Yang, C. Dou, P. Guo et al., "DCPO: Dynamic Clipping Policy Optimization", 2025, arXiv 2509.02333. Reference
        code: lime-RL/DCPO ``verl/trainer/ppo/core_algos.py`` (``get_clip_low_high``, commit 01787b0), ``recipe/dcpo``.
    """

    about = About(addresses={"trust region", "exploration"})

    name = "dcpo_clip"
    needs = {"old_logprobs"}
    writes = {"bounds"}

    low: Annotated[float, Range(ge=0)] = 0.16
    high: Annotated[float, Range(ge=0)] = 0.2
    cap: Annotated[float, Range(ge=1)] = 10.0
    dual_clip: Annotated[float | None, Range(gt=1)] = 10.0

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        rarity = (-batch.old_logprobs.double()).clamp(0.0, MAX_SURPRISAL).exp()  # 1 / q
        low = 0.5 - 0.5 * (1 - 4 * self.low * rarity).clamp(min=0.0).sqrt()
        high = (0.5 + 0.5 * (1 + 4 * self.high * rarity).sqrt()).clamp(max=self.cap) - 1
        dtype = batch.old_logprobs.dtype
        return Terms(bounds=Bounds(low.to(dtype), high.to(dtype), self.dual_clip))
