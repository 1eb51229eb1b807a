"""The advantage of REINFORCE++: whitened over every token of the rollout."""

import math
from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from rlstab import About, Mean, Range, Settled, Stat, State
from rlstab.stages.group_relative import all_alike, extremes, sample_variance
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator


class ReinforcePP(AdvantageEstimator):
    """Whiten rewards over all trained tokens of the rollout instead of within groups (REINFORCE++).

    Problem:
        The standard deviation of a small group is itself a rough estimate, and it depends on the very reward that it
        divides: the quotient is biased, and large where nearly all answers agree. REINFORCE++ uses the mean and the
        standard deviation of the whole rollout, which a single response hardly affects. Its variant for groups first
        subtracts the mean of the group.

    Equation:
        With x_i = ``rewards``, or with ``baseline`` the reward less the mean of its group, L_i = ``lengths`` and
        N = sum_i L_i, all sums over the whole rollout:

            m    = sum_i L_i x_i / N
            v    = sum_i L_i (x_i - m)^2 / (N - 1)
            A_i  = (x_i - m) / sqrt(v + e)
            A_i  = 0                            where all x_i of the rollout are equal

        e is ``epsilon``.

    Reads:
        - ``rewards`` (S,): as the reward shapers left them.
        - ``lengths`` (S,), tokens: what was sampled, the end included.
        - ``group_ids`` (S,): which responses are compared; with ``baseline``.

    Returns:
        (S,) advantages, which every token of the response gets.

    Parameters:
        - ``baseline``: bool, default False. Subtract the mean of the group first. The paper has both, and takes the
          variant with it for reasoning with several answers to a prompt.
        - ``epsilon`` (e): float in (0, inf), default 1e-08. verl's; the paper has none.

    State:
        none

    Deviations:
        - From the paper: it subtracts a KL penalty from the reward of each token, or in the variant adds it to the
          loss. Here a KL term is the method ``kl`` of the loss. So the reward comes only at the end, and without a
          discount every token of a response has the same return.
        - From the paper: a discount below 1 is not offered; its scripts have 1.
        - From verl: its statistics are over what one driver holds; here over what all ranks learn from.

    Interacts:
        - ``dynamic_sampling``: without ``baseline`` a group of equal rewards is compared with the rest of the rollout
          and teaches something. Dropping it removes the easiest and the hardest prompts from the mean.
        - ``sequence_mean``: the whitening counts tokens, so advantages average to 0 over tokens and not over responses.

    Limits:
        - A rollout in which all x_i are equal has the advantage 0. A group of equal rewards in any other rollout does
          not, in either variant: the mean of the rollout is subtracted there too.
        - Where all responses are equally long, ``baseline`` makes it ``dr_grpo`` divided by one number.

    Example:
        A wrong response of one token and a right one of three: m = 3 / 4, v = (9 + 3) / 16 / 3 = 1 / 4. The short one
        is farther from the mean.

        >>> from rlstab.core.comm import LocalComm
        >>> from rlstab.core.method import measure_all
        >>> from rlstab.stages.response_batch import ResponseBatch
        >>> batch = ResponseBatch.of([0.0, 1.0], [0, 1], lengths=[1.0, 3.0])
        >>> stage = ReinforcePP()
        >>> stat, state = measure_all(stage, [batch], stage.init_state(), LocalComm())
        >>> [round(value, 4) for value in stage.advantages(batch, stat, state).tolist()]
        [-1.5, 0.5]

    Source:
        J. Hu, J. K. Liu, H. Xu, W. Shen, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global
        Advantage Normalization", 2025, arXiv 2501.03262. Common code: verl-project/verl
        ``verl/trainer/ppo/core_algos.py`` (``compute_reinforce_plus_plus_outcome_advantage``,
        ``compute_reinforce_plus_plus_baseline_outcome_advantage``), OpenRLHF/OpenRLHF.
    """

    name = "reinforce_pp"
    about = About(
        exceptions={
            "even group": "it compares with the whole rollout, so equal answers to a prompt have "
            "something to compare with."
        }
    )

    baseline: bool = False
    epsilon: Annotated[float, Range(gt=0)] = 1e-8

    @property
    def compares(self) -> bool:
        return self.baseline

    def measure(self, part: ResponseBatch) -> Stat:
        values = self._values(part)
        return {"value": Mean((values * part.lengths).sum(), part.lengths.sum()), **extremes(values)}

    def measure_again(self, part: ResponseBatch, stat: Settled) -> Stat:
        squares = (self._values(part) - stat.mean("value").value).square()
        return {"square": Mean((squares * part.lengths).sum(), part.lengths.sum())}

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        if all_alike(stat):
            return torch.zeros_like(responses.rewards)
        scale = math.sqrt(sample_variance(stat.mean("square")) + self.epsilon)
        return (self._values(responses) - stat.mean("value").value) / scale

    def report(self, responses: ResponseBatch, stat: Settled, state: State) -> Mapping[str, Mean]:
        """Mean over tokens, and standard deviation, of what is whitened."""
        if not float(stat.mean("value").count):
            return {}
        return {
            "mean": Mean.scalar(stat.mean("value").value),
            "deviation": Mean.scalar(math.sqrt(sample_variance(stat.mean("square")))),
        }

    def _values(self, responses: ResponseBatch) -> Tensor:
        if not self.baseline:
            return responses.rewards
        return torch.where(responses.even, 0.0, responses.rewards - responses.group_mean(responses.rewards))
