"""Clip-higher: a trust region that leaves more room upwards (DAPO)."""

from typing import Annotated

from rlstab import About, Bounds, NoOpAt, Range, Settled, State, Terms, TokenBatch, TokenObjective


class ClipHigher(TokenObjective):
    """Stop the gradient of a token once its ratio has left ``[1 - low, 1 + high]``.

    Problem:
        When one rollout feeds several optimizer steps, the policy moves away from the one that sampled the data, and a
        token whose ratio has already moved far is still pushed by outdated evidence. The clip stops it. A symmetric
        clip also starves rare tokens: at ``high`` 0.2 a token of probability 0.002 may rise to 0.0024, one of 0.5 to
        0.6. More room upwards keeps exploration going.

    Equation:
        With r the ratio of the token and A its advantage:

            l = max(-A r, -A clip(r, 1 - e_low, 1 + e_high))
            l = min(l, -A c)   where A < 0                               only with a dual clip

        e_low is ``low``, e_high ``high``, c ``dual_clip``. A gradient is left for A > 0 where r <= 1 + e_high, and for
        A < 0 where 1 - e_low <= r <= c.

    Reads:
        nothing itself. The loss applies the bounds to the ratio and reads the sign of the advantage.

    Writes:
        - ``bounds``: A token stops pulling once its ratio is above 1 + ``high`` where its advantage is positive, or
          below 1 - ``low`` where it is negative (dual clip: ``dual_clip``). It still counts.

    Denominator:
        untouched: a token that is stopped still counts.

    Parameters:
        - ``low`` (e_low): float in [0, 1], default 0.2. DAPO, and PPO's usual value.
        - ``high`` (e_high): float in [0, inf), default 0.28. DAPO; 0.2 makes the clip symmetric.
        - ``dual_clip`` (c): float in (1, inf) or None, default None. DAPO's objective has none. verl uses 3 by default,
          and the recipes of DAPO, JustRL and STARE use 10; we found no statement for STAPO.

    State:
        none

    Deviations:
        - From the paper: log-ratios are clamped to 20 nats before the exponential, with zero gradient beyond. verl does
          the same; TRL and the code of Lp-Reg and Dr. GRPO do not. Otherwise the value is the same: the loss writes max
          and min as one clamp for each sign of A. At r exactly on a bound the gradient is kept; in verl it is halved at
          c.
        - From other code: TRL's ``delta`` (a cap of r before the max, for both signs) is ``dual_clip`` if it is above
          1 + e_high. A delta between 1 and 1 + e_high is ``high`` = delta - 1 and ``dual_clip`` = 1 + e_high instead.

    Pitfalls:
        ``low`` is an entropy knob as well: a smaller one is reported to raise entropy (arXiv 2509.26114).

    Interacts:
        - ``clip_higher`` and ``token_mean`` are the loss of DAPO.
        - ``sapo`` and ``maspo`` were published in place of ``clip_higher``, whose usual bounds stop a token before
          either of them damps it noticeably.

    Limits:
        - Where every ratio is exactly 1, as with one optimizer step per rollout (``stare``'s script).

    Example:
        Ratios 1.5 and 0.5, first rewarded, then punished. The rewarded 1.5 is stopped at 1.28, the punished 0.5 at 0.8;
        the other two pull. The loss is (-1.28 - 0.5 + 1.5 + 0.8) / 4 = 0.13, the gradient -A r / 4 where a token pulls.

        >>> import torch
        >>> from rlstab import ClipHigher, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((2, 2), 0.4).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2), advantages=torch.tensor([1.0, -1.0]), old_logprobs=old
        ... )
        >>> live = torch.tensor([[0.6, 0.2], [0.6, 0.2]]).log().requires_grad_()
        >>> out = compose(ClipHigher())(batch, PolicyOutputs.from_padded(batch, logprobs=live))
        >>> out.loss.backward()
        >>> round(out.loss.item(), 4), [round(g, 4) + 0.0 for g in live.grad.flatten().tolist()]
        (0.13, [0.0, -0.125, 0.375, 0.0])

    Source:
        Q. Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, arXiv 2503.14476
        (clip-higher); J. Schulman et al., "Proximal Policy Optimization Algorithms", 2017, arXiv 1707.06347 (the clip);
        D. Ye et al., "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", 2019, arXiv 1912.09729
        (the dual clip). Common code: verl-project/verl ``verl/trainer/ppo/core_algos.py``.
    """

    about = About(
        addresses={"trust region", "exploration"},
        no_op_at=(
            NoOpAt({"low": 1.0, "high": 1e9, "dual_clip": None}, "no ratio, at most e^20, reaches a bound."),
            NoOpAt({"low": 1.0, "high": 1e9, "dual_clip": 1e9}, "no ratio reaches the dual clip either."),
        ),
    )

    name = "clip_higher"
    writes = {"bounds"}

    low: Annotated[float, Range(ge=0, le=1)] = 0.2
    high: Annotated[float, Range(ge=0)] = 0.28
    dual_clip: Annotated[float | None, Range(gt=1)] = None

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(bounds=Bounds(self.low, self.high, self.dual_clip))
