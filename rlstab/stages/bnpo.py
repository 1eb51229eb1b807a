"""The advantage of Beta normalization policy optimization."""

import math
from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from rlstab import Mean, Range, Settled, Stat, State
from rlstab.errors import OutOfRange
from rlstab.stages.group_relative import all_alike, extremes, sample_variance
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator

#: The largest weight, as in the authors' code.
MAX_WEIGHT = 1e6


class BNPO(AdvantageEstimator):
    """Subtract the group's mean reward, and divide by a Beta density fitted to all pass rates (BNPO).

    Problem:
        How much a prompt should weigh depends on its pass rate p. Without a division all prompts weigh the same, and
        ``grpo`` divides by sqrt(p (1 - p)); neither takes into account how the pass rates of the rollout are
        distributed, which changes as the policy learns. BNPO divides by the density of a Beta distribution fitted to
        them, and chooses its two parameters to minimise the variance of the gradient.

    Equation:
        With R_i = (``rewards`` - l) / (h - l) in [0, 1], l ``low`` and h ``high``; p_g the mean of R over group g; and
        mu and var (over n - 1) the mean and variance of p_g over the n groups of the rollout:

            k      = mu (1 - mu) / var - 1,    a = k mu,    b = k (1 - mu)
            alpha  = max(1 + a / 3, 1),        beta = max(1 + b / 3, 1)
            A_i    = (R_i - p_g) min(1 / f(p_g; alpha, beta), 10^6)
            A_i    = 0                         where all R of the group are equal

        f is the density of the Beta distribution. Where all p_g are equal, no distribution is fitted, and f = 1.

    Reads:
        - ``rewards`` (S,): as the reward shapers left them, in [``low``, ``high``].
        - ``group_ids`` (S,): which responses are compared.

    Returns:
        (S,) advantages, which every token of the response gets.

    Parameters:
        - ``low`` (l): float in (-inf, inf), default 0.0. The smallest possible reward. The authors' code,
          ``min_value``.
        - ``high`` (h): float in (-inf, inf), default 1.0. The largest possible reward. The authors' code,
          ``max_value``.

    State:
        none

    Deviations:
        - From the paper: its rewards are 0 or 1; others are mapped to [0, 1], as in its code. Its decomposition of
          several rewards into several advantages is not offered.
        - From its code: where all pass rates are equal it divides by 0. Here they weigh the same, as in ``dr_grpo``.
        - From its code: a lone answer keeps its reward as its advantage; here its advantage is 0, and its pass rate
          counts as any other.

    Interacts:
        - ``overlong``, ``laconic``: a penalty makes rewards below 0. Set ``low`` to the smallest sum of reward and
          penalty; a reward outside of the range is an error.
        - ``dynamic_sampling``: takes the pass rates 0 and 1 out of the fit.
        - TRL calls a divisor of the loss ``bnpo``, which is not this.

    Limits:
        - ``dr_grpo`` of the mapped rewards where all pass rates are equal, or vary as much as pass rates can:
          var >= mu (1 - mu).
        - A group of one response, or of equal rewards, has the advantage 0.

    Example:
        Pass rates 1 / 4 and 3 / 4: mu = 1 / 2, var = 1 / 8, k = 1, a = b = 1 / 2, alpha = beta = 7 / 6.
        The density is 1.047 at both, so the right answer to the first prompt gets 0.75 / 1.047.

        >>> from rlstab.core.comm import LocalComm
        >>> from rlstab.core.method import measure_all
        >>> from rlstab.stages.response_batch import ResponseBatch
        >>> batch = ResponseBatch.of([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0], [0, 0, 0, 0, 1, 1, 1, 1])
        >>> stage = BNPO()
        >>> stat, state = measure_all(stage, [batch], stage.init_state(), LocalComm())
        >>> advantages = stage.advantages(batch, stat, state)
        >>> [round(value, 4) for value in advantages[:2].tolist()], round(0.75 / float(advantages[0]), 3)
        ([0.7166, -0.2389], 1.047)

    Source:
        C. Xiao, M. Zhang, Y. Cao, "BNPO: Beta Normalization Policy Optimization", 2025, arXiv 2506.02864. Reference
        code: changyi7231/BNPO ``recipe/bnpo/src/bnpo_ray_trainer.py`` (``compute_bnpo_outcome_advantage``).
    """

    name = "bnpo"
    compares = True

    low: Annotated[float, Range()] = 0.0
    high: Annotated[float, Range()] = 1.0

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise OutOfRange(
                f"'bnpo': low = {self.low!r} and high = {self.high!r}. Set them to the least and the largest reward."
            )

    def measure(self, part: ResponseBatch) -> Stat:
        rates = self._rates(part)[part.first]
        return {"rate": Mean.of(rates), **extremes(rates)}

    def measure_again(self, part: ResponseBatch, stat: Settled) -> Stat:
        rates = self._rates(part)[part.first]
        return {"square": Mean.of((rates - stat.mean("rate").value).square())}

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        rates = self._rates(responses)
        alpha, beta = self._fitted(stat)
        norm = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
        density = torch.special.xlogy(alpha - 1, rates) + torch.special.xlogy(beta - 1, 1 - rates) - norm
        weight = (-density).clamp(max=math.log(MAX_WEIGHT)).exp()
        return torch.where(responses.even, 0.0, (self._mapped(responses) - rates) * weight)

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> Mapping[str, Mean]:
        """The parameters of the Beta distribution in the divisor; with 1 and 1 nothing is divided."""
        alpha, beta = self._fitted(stat)
        return {"alpha": Mean.scalar(alpha), "beta": Mean.scalar(beta)}

    def _fitted(self, stat: Settled) -> tuple[float, float]:
        if all_alike(stat):  # pass rates that differ only by a rounding would make a very narrow density
            return 1.0, 1.0
        mean, variance = stat.mean("rate").value, sample_variance(stat.mean("square"))
        excess = mean * (1 - mean) / variance - 1
        return max(1 + excess * mean / 3, 1.0), max(1 + excess * (1 - mean) / 3, 1.0)

    def _rates(self, responses: ResponseBatch) -> Tensor:
        """``(S,)`` pass rate of the group of each response, in [0, 1] in spite of rounding."""
        return responses.group_mean(self._mapped(responses)).clamp(0, 1)

    def _mapped(self, responses: ResponseBatch) -> Tensor:
        outside = (responses.rewards < self.low) | (responses.rewards > self.high)
        if bool(outside.any()):
            raise OutOfRange(
                f"'bnpo': a reward is {float(responses.rewards[outside][0])!r}, expected [{self.low}, {self.high}]. "
                f"Set low and high to the smallest and the largest possible reward, penalties included."
            )
        return (responses.rewards - self.low) / (self.high - self.low)
