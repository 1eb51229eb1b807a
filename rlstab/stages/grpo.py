"""The group-relative advantage of GRPO."""

from typing import Annotated, Literal

from torch import Tensor

from rlstab import Range, Settled, State
from rlstab.stages.group_relative import grpo
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator


class GRPO(AdvantageEstimator):
    """Subtract the group's mean reward, and divide by the standard deviation of its rewards.

    Problem:
        A reward alone says little: on an easy prompt every answer gets it. PPO compares it with a value predicted by a
        second network, which has to be trained and kept in memory. GRPO samples several answers to each prompt and uses
        their mean reward as that value, and their standard deviation as the unit.

    Equation:
        Of a group of n rewards R_i = ``rewards`` with mean m:

            s    = sqrt( sum_j (R_j - m)^2 / (n - ddof) )
            A_i  = (R_i - m) / (s + e)          std: true
                 = R_i - m                      std: false
            A_i  = 0                            where all R_j are equal

        e is ``epsilon``.

    Reads:
        - ``rewards`` (S,): as the reward shapers left them.
        - ``group_ids`` (S,): which responses are compared.

    Returns:
        (S,) advantages, which every token of the response gets.

    Parameters:
        - ``std``: bool, default True. Whether to divide. The paper does, section 4.1.2; ``dr_grpo`` does not.
        - ``epsilon`` (e): float in (0, inf), default 0.0001. TRL; verl has 1e-6, and the paper has none.
        - ``ddof``: 0 | 1, default 1. What is subtracted from n in the variance. verl and TRL; the paper does not say.

    State:
        none

    Deviations:
        - From the paper: it adds nothing to the standard deviation.
        - From verl: its epsilon of 1e-6 makes the advantages of one right answer in eight larger by a factor of 1 +
          3e-4; presets that cite its scripts have TRL's value all the same.
        - From verl: the advantage of a lone answer is its reward, and it divides the rounding of a mean of equal
          rewards by epsilon. Here both are exactly 0.

    Interacts:
        - Reward shapers, such as ``overlong`` and ``laconic``: where all answers to a prompt are right, or all wrong, a
          small penalty is the only difference between them, and the division makes it as large as any other.
        - ``dynamic_sampling``: drops the groups that have the advantage 0.

    Limits:
        - ``std=False`` is ``dr_grpo``.
        - A group of one response, or of equal rewards, has the advantage 0.

    Example:
        One right answer of four: m = 1 / 4, s = sqrt((9 + 1 + 1 + 1) / 16 / 3) = 1 / 2.

        >>> from rlstab.stages.response_batch import ResponseBatch
        >>> batch = ResponseBatch.of([1.0, 0.0, 0.0, 0.0])
        >>> stage = GRPO()
        >>> [round(value, 3) for value in stage.advantages(batch, Settled(), {}).tolist()]
        [1.5, -0.5, -0.5, -0.5]

    Source:
        Z. Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", 2024,
        arXiv 2402.03300 (section 4.1.2). Common code: verl-project/verl ``verl/trainer/ppo/core_algos.py``
        (``compute_grpo_outcome_advantage``).
    """

    name = "grpo"
    compares = True

    std: bool = True
    epsilon: Annotated[float, Range(gt=0)] = 1e-4
    ddof: Literal[0, 1] = 1

    def unread_settings(self) -> dict[str, str]:
        reason = "nothing is divided by a standard deviation, so it is not read."
        return {} if self.std else dict.fromkeys(("epsilon", "ddof"), reason)

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        return grpo(responses.rewards, responses.group_ids, std=self.std, epsilon=self.epsilon, ddof=self.ddof)
