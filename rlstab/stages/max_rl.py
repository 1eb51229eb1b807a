"""The advantage of maximum likelihood reinforcement learning."""

import torch
from torch import Tensor

from rlstab import About, Settled, State
from rlstab.errors import OutOfRange
from rlstab.stages.response_batch import ResponseBatch
from rlstab.stages.stage import AdvantageEstimator

_NEGATIVE = "advantages are divided by the mean reward of a group, and a penalty makes rewards negative."


class MaxRL(AdvantageEstimator):
    """Subtract the group's mean reward, and divide by it: hard prompts get the largest advantages.

    Problem:
        Under the expected reward, a prompt counts by how fast its pass rate p rises, however small p is. If the aim is
        to answer correctly at all, the log-likelihood of a right answer, log p, is the better objective: its gradient
        is that of p divided by p. The paper shows that with n answers to a prompt, dividing by their mean reward
        corresponds to the first n terms of a series for log p, so that more samples come closer to the likelihood.

    Equation:
        Of a group of n rewards R_i = ``rewards``, with the mean m:

            A_i  = (R_i - m) / m
            A_i  = 0                            where all R_j are equal, so where m = 0

    Reads:
        - ``rewards`` (S,): as the reward shapers left them, at least 0.
        - ``group_ids`` (S,): which responses are compared.

    Returns:
        (S,) advantages, which every token of the response gets: at least -1 and at most n - 1.

    Parameters:
        none

    State:
        none

    Deviations:
        - From the paper: its rewards are 0 or 1. Here they are any numbers of at least 0, for which this is the
          gradient of the log of the mean reward.

    Interacts:
        - ``overlong``, ``laconic``: excluded, because a penalty makes rewards negative, and a small or negative mean
          makes the division meaningless.
        - Learning rates do not carry over from ``grpo``: one right answer of n has the advantage n - 1, where ``grpo``
          gives about the square root of n.

    Limits:
        - ``dr_grpo`` divided by the pass rate of the group.
        - A group of one response, of equal rewards, or without a success has the advantage 0.

    Example:
        One right answer of four: (1 - 1 / 4) / (1 / 4), and -1 for the others.

        >>> from rlstab.stages.response_batch import ResponseBatch
        >>> batch = ResponseBatch.of([1.0, 0.0, 0.0, 0.0])
        >>> MaxRL().advantages(batch, Settled(), {}).tolist()
        [3.0, -1.0, -1.0, -1.0]

    Source:
        F. Tajwar, G. Zeng, Y. Zhou et al., "Maximum Likelihood Reinforcement Learning", 2026, arXiv 2602.02710. Common
        code: NovaSky-AI/SkyRL ``skyrl-train/skyrl_train/utils/ppo_utils.py``, PrimeIntellect-ai/prime-rl.
    """

    name = "max_rl"
    compares = True
    about = About(addresses={"exploration"})
    excludes = {"overlong": _NEGATIVE, "laconic": _NEGATIVE}

    def advantages(self, responses: ResponseBatch, stat: Settled, state: State) -> Tensor:
        """Raises OutOfRange where a reward is negative."""
        if bool((responses.rewards < 0).any()):
            raise OutOfRange(
                f"'max_rl': a reward is {float(responses.rewards.min())!r}, expected at least 0: advantages are "
                f"divided by the mean reward of a group. Give rewards of at least 0, or take the estimator 'dr_grpo'."
            )
        mean = responses.group_mean(responses.rewards)
        return torch.where(responses.even, 0.0, (responses.rewards - mean) / mean)
