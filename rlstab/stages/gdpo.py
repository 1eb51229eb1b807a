"""GDPO: each of several rewards normalised within the group by itself, then added."""

import math
from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from rlstab import Mean, Range, Settled, Stat, State
from rlstab.stages.group_relative import grpo, sample_variance
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator, RewardShaper

_SHAPED = "it reads the rewards of the scorer one by one, and what a shaper adds is not among them."


class GDPO(AdvantageEstimator):
    """Normalise each of several rewards within the group by itself, then add them by their weights (GDPO).

    Problem:
        A run may have several rewards: correct, of the right form, short. If they are added first, GRPO divides by the
        standard deviation of the sum. Answers that earned different rewards of one sum get one advantage, and the
        advantage of a reward depends on how the others happen to vary in the group.

    Equation:
        Of a group of n answers, with r_ik the reward k of answer i = ``reward_parts`` and v_k its weight =
        ``reward_weights``; N answers in the whole rollout:

            m_k, s_k  = mean of the group, and sqrt( sum_j (r_jk - m_k)^2 / (n - 1) )
            a_ik      = (r_ik - m_k) / (s_k + e)        0 where all r_jk of the group are equal
            a_i       = sum_k v_k a_ik
            A_i       = a_i / (s + e)                   s = sqrt( sum_i a_i^2 / (N - 1) ), over the rollout
                      = a_i                             whiten: false

        e is ``epsilon``. The mean of the a_i of a group is 0, and so is that of the rollout.

    Reads:
        - ``reward_parts`` (S, K): r, as the scorers gave them. Not ``rewards``.
        - ``reward_weights`` (S, K): v, those of the run's ``reward``, the same in every row.
        - ``group_ids`` (S,): which responses are compared.

    Returns:
        (S,) advantages, which every token of the response gets.

    Parameters:
        - ``whiten``: bool, default True. Whether to divide by the standard deviation of the rollout. The paper does, so
          that more rewards do not make larger steps.
        - ``epsilon`` (e): float in (0, inf), default 0.0001. That of ``grpo``; verl has 1e-6 in the group, and adds
          1e-8 to the variance of the batch.

    State:
        none

    Deviations:
        - From the paper: rewards that count only where another one is earned are not offered; a reward function that
          computes both can do this.
        - From verl: it whitens over tokens, with their mean and as many squares as a response has tokens. Here it is
          over responses, as in the paper; the two are the same where all responses are equally long.
        - From verl: it accepts a single reward. Here such a run is refused: it would be ``grpo``, up to one factor for
          the whole rollout.

    Interacts:
        - ``overlong``, ``laconic``: excluded, because what reward shapers add is not among the rewards. A penalty can
          be a separate reward. User-defined shapers do not affect these advantages.
        - ``dynamic_sampling``: compares the weighted sums, and drops groups in which only the parts differ.

    Limits:
        - ``grpo`` with one reward of weight 1 and ``whiten=False``.
        - A group of one response, or of answers that earned the same in every reward, has the advantage 0.

    Example:
        Three answers: correct, of the right form, neither. Both rewards have a deviation of sqrt(1/3). The first two
        earned the same sum in another way; the weight of the form is a half.

        >>> import torch
        >>> from rlstab.stages.response_batch import ResponseBatch
        >>> evidence = {
        ...     "reward_parts": torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64),
        ...     "reward_weights": torch.tensor([[1.0, 0.5]], dtype=torch.float64).expand(3, 2),
        ... }
        >>> batch = ResponseBatch.of([1.0, 0.5, 0.0], extra=evidence)
        >>> [round(value, 3) for value in GDPO(whiten=False).advantages(batch, Settled(), {}).tolist()]
        [0.866, 0.0, -0.866]

    Source:
        S.-Y. Liu et al., "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL
        Optimization", 2026, arXiv 2601.05242. Common code: verl-project/verl ``verl/trainer/ppo/core_algos.py``
        (``compute_gdpo_outcome_advantage``).
    """

    name = "gdpo"
    compares = True
    needs = {"reward_parts", "reward_weights"}
    excludes = {RewardShaper.kind: _SHAPED}

    whiten: bool = True
    epsilon: Annotated[float, Range(gt=0)] = 1e-4

    def measure(self, part: ResponseBatch) -> Stat:
        return {"square": Mean.of(self._summed(part).square())}

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        summed = self._summed(responses)
        return summed / (math.sqrt(sample_variance(stat.mean("square"))) + self.epsilon) if self.whiten else summed

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> Mapping[str, Mean]:
        """Standard deviation over the rollout of the sum; share of answers whose group differs in all rewards."""
        differing = torch.ones_like(responses.even)
        for rewards in responses.evidence("reward_parts").double().unbind(-1):
            differing &= ~responses.reshaped(rewards).even
        return {
            "deviation": Mean.scalar(math.sqrt(sample_variance(stat.mean("square")))),
            "all_differ": Mean.of(differing),
        }

    def _summed(self, responses: ResponseBatch) -> Tensor:
        parts, weights = (responses.evidence(f"reward_{name}").double() for name in ("parts", "weights"))
        summed = torch.zeros(len(responses), dtype=torch.float64)
        for rewards, weight in zip(parts.unbind(-1), weights.unbind(-1), strict=True):
            summed = summed + weight * grpo(rewards, responses.group_ids, epsilon=self.epsilon)
        return summed
