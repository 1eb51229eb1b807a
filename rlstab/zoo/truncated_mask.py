"""Truncated mask: responses that were cut off at the length limit teach nothing (DAPO's overlong filtering)."""

from typing import Literal

from rlstab import About, Mean, Settled, State, Terms, TokenBatch, TokenObjective
from rlstab.zoo.divided_mask import DividedMask


class TruncatedMask(DividedMask, TokenObjective):
    """Drop responses that were cut off at the length limit (overlong filtering).

    Problem:
        A response that reaches the length limit has no answer yet and is scored as wrong. The score says nothing about
        its reasoning: with a few hundred more tokens it might have been right. Punishing it teaches the policy that
        sound steps are wrong, and adds noise to the reward of its group. The paper reports steadier training and a
        higher score on AIME24 once the loss of such responses is masked.

    Equation:
        With cut_i = 1 where response i ended by the limit, else 0:

            keep_t = not cut_i   for the tokens of response i
            L      = sum_t keep_t surrogate_t / sum_t keep_t             denominator: kept
                   = sum_t keep_t surrogate_t / N                        denominator: all

    Reads:
        - ``truncated`` (n,), 0 or 1: 1 on every token of a response that was cut off.

    Writes:
        - ``keep``: Drop a token when its response was cut off at the length limit. It leaves the divisor too.
        - ``weight``: Give a token the weight 0 when its response was cut off at the length limit. It still counts in
          the divisor.

    Denominator:
        kept or all: the first as in the published code, the second with ``denominator="all"``.

    Parameters:
        - ``denominator``: 'kept' | 'all', default 'kept'. Whether dropped tokens leave the divisor. The paper masks
          their loss and does not say; TRL takes them out of the mask that it counts.

    State:
        none

    Deviations:
        - From the paper: its other remedy, a length penalty in the reward near the limit, is the stage ``overlong``.
        - From TRL: its ``mask_truncated_completions`` treats every response without EOS as truncated, including one
          that a stop text ended. Its means per sequence still count the response, with a loss of 0; here it leaves S.

    Pitfalls:
        The advantages of the others do not change: the reward of a truncated response still counts in the mean of its
        group. A response that ends exactly at the limit with EOS is not truncated. If most responses are truncated,
        hardly anything is left to learn from, and nothing teaches the policy to be brief: look at
        ``truncated_mask/dropped``, and raise the limit. Penalties ignore masks, so they still act on every token.

    Interacts:
        - ``truncated_mask`` was published on ``clip_higher`` and ``token_mean``, without ``kl``.

    Limits:
        - An optimizer step in which no response was cut off keeps everything.

    Example:
        Two responses, the second cut off. The mean runs over the three tokens of the first; with 'all' over all five.

        >>> import torch
        >>> from rlstab import PolicyOutputs, TokenBatch, TruncatedMask, compose
        >>> old = torch.full((2, 3), 0.5).log()
        >>> mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=mask,
        ...     advantages=torch.tensor([1.0, -1.0]),
        ...     old_logprobs=old,
        ...     truncated=torch.tensor([False, True]),
        ... )
        >>> for denominator in ("kept", "all"):
        ...     live = old.clone().requires_grad_()
        ...     objective = compose(TruncatedMask(denominator=denominator))
        ...     objective(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        ...     print(denominator, [round(g, 4) + 0.0 for g in live.grad[mask.bool()].tolist()])
        kept [-0.3333, -0.3333, -0.3333, 0.0, 0.0]
        all [-0.2, -0.2, -0.2, 0.0, 0.0]

    Source:
        Q. Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, arXiv 2503.14476
        (overlong filtering). Common code: huggingface/trl ``trl/trainer/grpo_trainer.py``
        (``mask_truncated_completions``).
    """

    about = About(addresses={"sample"})

    name = "truncated_mask"
    needs = {"truncated"}

    denominator: Literal["kept", "all"] = "kept"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        cut = batch.signal("truncated") > 0
        return self.keeping(batch, ~cut, {"dropped": Mean.of(cut)})
