"""The leave-one-out advantage."""

from torch import Tensor

from rlstab import Settled, State
from rlstab.stages.group_relative import rloo
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator


class RLOO(AdvantageEstimator):
    """Subtract the mean reward of the other responses to the same prompt, leaving the response itself out.

    Problem:
        The mean of the whole group includes the response that is compared with it, so part of the reward cancels: the
        gradient is that of REINFORCE times (n - 1) / n, and the smaller the group, the more is lost. A baseline from
        only the other responses does not depend on the response itself, so the gradient is unbiased.

    Equation:
        Of a group of n rewards R_i = ``rewards``:

            A_i  = R_i - sum_{j != i} R_j / (n - 1)  =  n / (n - 1) (R_i - sum_j R_j / n)
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
        - From the paper: it trains with plain REINFORCE, without a ratio and a clip. The loss here is that of the
          objective.
        - From verl: the advantage of a lone answer is its reward; here it is 0.

    Interacts:
        - Groups of different sizes, which result from branches and dropped responses: the factor n / (n - 1) makes
          their gradients comparable, which ``dr_grpo`` does not do.

    Limits:
        - ``dr_grpo`` times n / (n - 1): 2 for a pair, 1.14 for a group of 8.
        - A group of one response, or of equal rewards, has the advantage 0.

    Example:
        One right answer of four: 1 - 0, and 0 - 1 / 3.

        >>> from rlstab.stages.response_batch import ResponseBatch
        >>> batch = ResponseBatch.of([1.0, 0.0, 0.0, 0.0])
        >>> [round(value, 4) for value in RLOO().advantages(batch, Settled(), {}).tolist()]
        [1.0, -0.3333, -0.3333, -0.3333]

    Source:
        A. Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
        LLMs", 2024, arXiv 2402.14740 (eq. 8). Common code: verl-project/verl ``verl/trainer/ppo/core_algos.py``
        (``compute_rloo_outcome_advantage``).
    """

    name = "rloo"
    compares = True

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        return rloo(responses.rewards, responses.group_ids)
