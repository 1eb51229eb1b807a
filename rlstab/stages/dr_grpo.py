"""The group-relative advantage of Dr. GRPO."""

from torch import Tensor

from rlstab import Settled, State
from rlstab.stages.group_relative import dr_grpo
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator


class DrGRPO(AdvantageEstimator):
    """Subtract the group's mean reward without dividing by its spread: rare successes are not amplified.

    Problem:
        GRPO divides by the standard deviation of the group, which is small where nearly all answers are right or nearly
        all wrong. So prompts that are too easy or too hard weigh more than those in between, and the objective is no
        longer the expected reward. Dr. GRPO omits the division.

    Equation:
        Of a group of n rewards R_i = ``rewards``:

            A_i  = R_i - sum_j R_j / n
            A_i  = 0                            where all R_j are equal

    Reads:
        - ``rewards`` (S,): as the reward shapers left them.
        - ``group_ids`` (S,): which responses are compared.

    Returns:
        (S,) advantages, which every token of the response gets.

    Parameters:
        none

    State:
        none

    Deviations:
        - From the paper: its other half, a constant divisor in place of the length of a response, is the method
          ``constant_length`` of the loss.

    Interacts:
        - ``constant_length``: together they are Dr. GRPO; with another aggregate this is half of it.
        - Learning rates do not carry over from ``grpo``: with rewards 0 and 1 these advantages are at most half as
          large.

    Limits:
        - Equal to ``grpo`` with ``std=False``, and to ``rloo`` but for the factor n / (n - 1).
        - A group of one response, or of equal rewards, has the advantage 0.

    Example:
        One right answer of four.

        >>> from rlstab.stages.response_batch import ResponseBatch
        >>> batch = ResponseBatch.of([1.0, 0.0, 0.0, 0.0])
        >>> DrGRPO().advantages(batch, Settled(), {}).tolist()
        [0.75, -0.25, -0.25, -0.25]

    Source:
        Z. Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", 2025, arXiv 2503.20783 (section
        3.2). Reference code: sail-sg/understand-r1-zero ``train_zero_math.py``.
    """

    name = "dr_grpo"
    compares = True

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        return dr_grpo(responses.rewards, responses.group_ids)
