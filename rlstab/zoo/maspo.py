"""MASPO: a soft bound that is wider for rare tokens and for advantages that can be trusted."""

from typing import Annotated

import torch
from torch import Tensor

from rlstab import About, Constants, Gate, NoOpAt, Range, Settled, State, Terms, TokenBatch, TokenObjective


class MASPO(TokenObjective):
    """Damp tokens that move away from the old policy, by a Gaussian that is wider for rare tokens.

    Problem:
        A clip at a fixed ratio gives a token of probability 0.5 a hundred times the room, in probability, of one of
        0.005; it cuts off the gradient at a hard edge; and it trusts a lucky guess as much as a clear success. MASPO
        uses a soft bound that acts only on tokens moving away, and gives rare tokens and large positive advantages more
        room, negative ones less.

    Equation:
        With r the ratio of the token, q = exp(``old_logprobs``), A its advantage:

            base  = min(sigma q^-alpha, sigma_max)
            width = base clip(1 + beta_pos A, a_min, a_max)           where A > 0
                  = base clip(1 / (1 - beta_neg A), a_min, a_max)     where A < 0
            g     = exp(-(r - 1)^2 / (2 width^2))                     where A > 0 and r > 1, or A < 0 and r < 1
                  = min(1, c / r)                                     where A < 0 and r >= 1, only with a cap
                  = 1                                                 elsewhere
            loss  = -g r A with g as a constant

    Reads:
        - ``old_logprobs`` (n,), nats: how rare a token was.

    Writes:
        - ``gates``: A token that moves away from the old policy (ratio above 1 where its advantage A is positive, below
          1 where it is negative) pulls exp(-(ratio - 1)^2 / (2 width^2)) times as hard. The width is ``sigma`` /
          p^``alpha``, p being its old probability, at most ``max_sigma``; times 1 + ``positive`` A, or divided by 1 +
          ``negative`` |A|, a factor within [``min_scale``, ``max_scale``]. The ratio with which a punished token pulls
          is at most ``cap``; none is no limit. It still counts in full.

    Denominator:
        untouched: a token that pulls less still counts.

    Parameters:
        - ``sigma``: float in (0, inf), default 1.0. The width for a certain token. README and code, which suggest
          trying 2 and 3 as well.
        - ``alpha``: float in [0, inf), default 0.3. README and code; 0.5 for 1.5B.
        - ``positive`` (beta_pos): float in [0, inf), default 0.03. README and code.
        - ``negative`` (beta_neg): float in [0, inf), default 0.03. README and code.
        - ``max_sigma`` (sigma_max): float in (0, inf), default 10.0. README and code; not below ``sigma``.
        - ``min_scale`` (a_min): float in (0, inf), default 0.1. The code; the README has no bound here.
        - ``max_scale`` (a_max): float in (0, inf), default 10.0. The code; not below ``min_scale``.
        - ``cap`` (c): float in [1, inf) or None, default None. A ratio: a punished token that has become likelier pulls
          with at most this. Added here; the code bounds nothing on this side, where PPO has a dual clip.

    State:
        none

    Deviations:
        - From the paper: the three clips of base and scale are those of the code; the formula in the README has none.
        - From its code: it has no ``cap``.

    Pitfalls:
        At the defaults it hardly bounds anything: a token that rose from probability one half to certainty keeps 73 %
        of its pull, one that rose from 0.01 to 0.02 keeps 97 %. A punished token whose ratio grows has no bound at all
        without ``cap``. It reads the size of the advantage, not only its sign, so a bonus or another estimator of
        advantages moves the width.

    Interacts:
        - ``maspo`` was published on ``token_mean``.

    Limits:
        - Where every ratio is exactly 1, as with one optimizer step per rollout.

    Example:
        Two tokens of old probability 0.4, now 0.8 and 0.2, so ratios 2 and 0.5; base = 0.4^-0.3 = 1.3163. Rewarded, the
        first moves away: width = 1.3163 * 1.03, g = exp(-1 / (2 * 1.3558^2)) = 0.7619. Punished, the second does: width
        = 1.3163 / 1.03, g = exp(-0.25 / (2 * 1.278^2)) = 0.9263. The gradient is -g r A / 4.

        >>> import torch
        >>> from rlstab import MASPO, PolicyOutputs, TokenBatch, compose
        >>> old = torch.full((2, 2), 0.4).log()
        >>> batch = TokenBatch.from_padded(
        ...     response_mask=torch.ones(2, 2), advantages=torch.tensor([1.0, -1.0]), old_logprobs=old
        ... )
        >>> live = torch.tensor([[0.8, 0.2], [0.8, 0.2]]).log().requires_grad_()
        >>> compose(MASPO())(batch, PolicyOutputs.from_padded(batch, logprobs=live)).loss.backward()
        >>> [round(g, 4) for g in live.grad.flatten().tolist()]
        [-0.3809, -0.125, 0.5, 0.1158]

    Source:
        X. Fu, J. Lin, Y. Fang et al., "MASPO: Unifying Gradient Utilization, Probability Mass, and Signal Reliability
        for Robust and Sample-Efficient LLM Reasoning", 2026, arXiv 2602.17550. Reference code: FlyTune/MASPO-RL
        ``verl/trainer/ppo/core_algos.py``, ``README.md`` (commit 22b4681).
    """

    about = About(
        addresses={"trust region", "exploration"},
        no_op_at=(
            NoOpAt(
                {"sigma": 1e19, "max_sigma": 1e19, "min_scale": 0.1, "max_scale": 10.0, "cap": None},
                "against such a width no ratio is far from 1.",
            ),
        ),
    )

    name = "maspo"
    needs = {"old_logprobs"}
    writes = {"gates"}
    ascending = (("sigma", "max_sigma"), ("min_scale", "max_scale"))

    sigma: Annotated[float, Range(gt=0)] = 1.0
    alpha: Annotated[float, Range(ge=0)] = 0.3
    positive: Annotated[float, Range(ge=0)] = 0.03
    negative: Annotated[float, Range(ge=0)] = 0.03
    max_sigma: Annotated[float, Range(gt=0)] = 10.0
    min_scale: Annotated[float, Range(gt=0)] = 0.1
    max_scale: Annotated[float, Range(gt=0)] = 10.0
    cap: Annotated[float | None, Range(ge=1)] = None

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        base = (self.sigma * (-self.alpha * batch.old_logprobs).exp()).clamp(self.sigma, self.max_sigma)

        def gate(ratio: Tensor, constants: Constants) -> Tensor:
            size = constants.advantages.abs()
            trust = torch.where(constants.advantages > 0, 1 + self.positive * size, 1 / (1 + self.negative * size))
            far = (ratio - 1) / (base * trust.clamp(self.min_scale, self.max_scale))
            returning = torch.ones_like(ratio)
            if self.cap is not None:
                returning = torch.where(constants.advantages < 0, (self.cap / ratio).clamp(max=1), returning)
            away = constants.advantages.sign() * (ratio - 1) > 0
            return torch.where(away, (far.square() / -2).exp(), returning)

        return Terms(gates={"": Gate(gate)})
