"""CE-GPPO: beyond the clip a token keeps a bounded pull instead of none."""

from typing import Annotated

import torch
from torch import Tensor

from rlstab import About, Bounds, Constants, NoOpAt, Range, Settled, State, Surrogate, Terms, TokenBatch, TokenObjective


class CEGPPO(TokenObjective):
    """Give tokens whose ratio has left ``[1 - low, 1 + high]`` a bounded gradient instead of none.

    Problem:
        The tokens that a clip stops are mostly unlikely ones, and they steer entropy. Rewarded ones above the upper
        bound would raise it: without them it collapses. Punished ones below the lower bound would lower it: without
        them it may explode. CE-GPPO gives both a gradient again, with a coefficient for each; it is bounded, because it
        no longer grows with the ratio.

    Equation:
        With r the ratio of the token and A its advantage:

            pull = b1 (1 - e_low)      where A < 0 and r < 1 - e_low
                 = b2 (1 + e_high)     where A > 0 and r > 1 + e_high
                 = 0                   where A < 0 and r > c                   only with a dual clip
                 = r                   elsewhere

        e_low is ``low``, e_high ``high``, b1 ``pull_low``, b2 ``pull_high``, c ``dual_clip``. The gradient of a token
        is pull A times that of its log-prob. With b1 = b2 = 0 it is that of ``clip_higher``.

    Reads:
        nothing itself. It is given the ratio and the advantage.

    Writes:
        - ``surrogate``: A token pulls with its ratio. Where its advantage is positive, it pulls above 1 + ``high`` with
          ``pull_high`` times that bound; where it is negative, below 1 - ``low`` with ``pull_low`` times that one, and
          above the dual clip (``dual_clip``) not at all.

    Denominator:
        untouched

    Parameters:
        - ``low`` (e_low): float in [0, 1], default 0.2. The official scripts.
        - ``high`` (e_high): float in [0, inf), default 0.2. The official scripts for 1.5B and 7B, where 0.28 is
          commented out; a third script without a model size has 0.28.
        - ``pull_low`` (b1): float in [0, inf), default 0.75. The official script for 7B; 0.5 for 1.5B, 0.25 in the
          configuration file. Larger lowers the entropy.
        - ``pull_high`` (b2): float in [0, inf), default 1.0. The official scripts. Larger raises the entropy.
        - ``dual_clip`` (c): float in (1, inf) or None, default None. The paper has none; the official scripts have 10.

    State:
        none

    Deviations:
        - From its code: with a dual clip, beyond it the value of the loss there is -A c, and here 0. The gradient is 0
          in both.
        - From its code: log-ratios are clamped to 20 nats before the exponential; there they are not.
        - From GPPO, its predecessor: that is ``pull_low=1`` and ``pull_high=1``.

    Pitfalls:
        At ``pull_high`` 1 nothing stops a rewarded token: its pull is constant beyond the bound, so only the optimizer
        limits its rise. The remaining pull also acts on tokens whose probability has long saturated.

    Interacts:
        - ``ce_gppo`` was published on ``token_mean``, in the recipe of DAPO.

    Limits:
        - Where every ratio is exactly 1, as with one optimizer step per rollout.

    Example:
        Ratios 1.5 and 0.5, first rewarded, then punished. The rewarded 1.5 pulls with 1.0 * 1.2, the punished 0.5 with
        0.75 * 0.8 = 0.6; the other two with their ratio.

        >>> import torch
        >>> from rlstab import CEGPPO, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((2, 2), 0.4).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2), advantages=torch.tensor([1.0, -1.0]), old_logprobs=old
        ... )
        >>> live = torch.tensor([[0.6, 0.2], [0.6, 0.2]]).log().requires_grad_()
        >>> compose(CEGPPO())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) + 0.0 for g in live.grad.flatten().tolist()]
        [-0.3, -0.125, 0.375, 0.15]

    Source:
        Z. Su, L. Pan, M. Lv et al., "CE-GPPO: Coordinating Entropy via Gradient-Preserving Clipping Policy Optimization
        in Reinforcement Learning", 2025, arXiv 2509.20712. Reference code: Kwai-Klear/CE-GPPO
        ``verl/trainer/ppo/core_algos.py`` (``compute_gppo_loss_general_beta``, commit 10558fe), ``recipe/dapo``.
    """

    about = About(
        addresses={"trust region", "exploration"},
        no_op_at=(NoOpAt({"low": 1.0, "high": 1e9, "dual_clip": None}, "no ratio, at most e^20, reaches a bound."),),
    )

    name = "ce_gppo"
    writes = {"surrogate"}

    low: Annotated[float, Range(ge=0, le=1)] = 0.2
    high: Annotated[float, Range(ge=0)] = 0.2
    pull_low: Annotated[float, Range(ge=0)] = 0.75
    pull_high: Annotated[float, Range(ge=0)] = 1.0
    dual_clip: Annotated[float | None, Range(gt=1)] = None

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        region = Bounds(self.low, self.high, self.dual_clip)
        pulls = {"high": self.pull_high * (1 + self.high), "low": self.pull_low * (1 - self.low), "dual": 0.0}

        def pull(ratio: Tensor, constants: Constants) -> Tensor:
            value = ratio
            for side, stopped in region.stops(ratio, constants.advantages).items():
                value = torch.where(stopped, pulls[side], value)
            return value

        return Terms(surrogate=Surrogate(pull))
