"""Prompts whose pass rate is nearest to a half (only the scheduler of PACED-RL)."""

from typing import Annotated

from torch import Tensor

from rlstab import Range, State
from rlstab.stages.pass_rates import PassRateSelector, expected_rate
from rlstab.stages.stage import Offer


class Paced(PassRateSelector):
    """Take the prompts of a pool whose expected pass rate is closest to a target.

    Problem:
        Prompts that are always solved, or never solved, teach nothing, yet cost as much to sample as any other.
        PACED-RL selects those closest to a pass rate of one half. It trains by trajectory balance, where the log
        partition function, learnt along with the policy, estimates the pass rate for free; the losses of this library
        have no such function, so the pass rate is counted.

    Equation:
        For each prompt q of the pool, a_q = 1 + right_q and b_q = 1 + wrong_q are the parameters of a Beta posterior of
        its pass rate, from a uniform prior. After a rollout with n > 0 responses to q, of ``raw_rewards`` r in [0, 1]:

            right_q <- lambda right_q + sum r
            wrong_q <- lambda wrong_q + n - sum r
            value_q  = -| a_q / (a_q + b_q) - tau |

        lambda is ``discount``, tau ``target``. A slot of the rollout takes the prompt of the largest value that is
        left, or, with probability epsilon = ``random_share``, any that is left. Equal values are ordered at random.

    Reads:
        - ``raw_rewards`` (S,), of the scorer: outside of [0, 1] they count as 0 or 1.
        - ``prompt_ids`` (S,): several groups of one prompt are added up.
        - ``given`` (S,): branches are not counted, because they begin with part of a chosen answer.

    Returns:
        The numbers of the prompts, different ones within a rollout, refills included, until it has taken all.

    Parameters:
        - ``pool``: int in [1, inf), required. Prompts 0 to pool - 1 of the task are used. The state has a row for each.
        - ``discount`` (lambda): float in [0, 1], default 0.5. The share of the evidence about a prompt that is kept
          when it is asked again; 1 never forgets. As in ``goldilocks``; the paper's estimate follows the policy by
          itself.
        - ``random_share`` (epsilon): float in [0, 1], default 0.2. Chosen here. The paper takes none at random: its
          estimate reads the prompt, whereas counts say nothing about prompts that were not asked.
        - ``target`` (tau): float in (0, 1), default 0.5. The paper's target pass rate.

    State:
        - ``right``, ``wrong`` (pool,), float64: evidence of each prompt; that of prompts that were not asked stays. It
          is the same to the bit for every cut into parts or ranks: rewards are rounded to a multiple of 2^-20, so sums
          are exact.

    Deviations:
        - From the paper: the head for log Z is not built, and p is the mean of a posterior instead of beta log Z. It
          needs the trajectory-balance loss, which no method here has.
        - From the paper: without its second half, the replay of correct responses by the error of the estimate.
        - From its code: none was found.

    Interacts:
        - with ``dynamic_sampling``: both avoid groups of equal rewards, this one before they are sampled. Refills come
          from the best of the remaining prompts, and dropped groups count as evidence.
        - with ``overlong`` and other reward shapers: they have no effect here, because ``raw_rewards`` decide what was
          solved.
        - with metrics of the reward: ``reward/mean`` is that of the selected prompts, near the target by design.
          Compare runs by an evaluation.

    Limits:
        - ``random_share: 1.0`` is ``uniform`` with the same pool, bit for bit.
        - In the first rollout nothing is known, and all prompts are equally likely.
        - At the default target no prompt recurs, except at random, before the whole pool has been shown: a prompt that
          was never shown has an expected pass rate of exactly 1/2. ``goldilocks`` prefers one that is known to be near
          it.
        - With a pool as small as a rollout there is nothing to choose.

    Example:
        A pool of three. Of prompt 0 four of four responses were right, of prompt 1 three of four, of prompt 2 none.
        The expected pass rates are 5/6, 4/6 and 1/6; a third, a sixth and a third away from one half.

        >>> import torch
        >>> from rlstab.stages.paced import Paced
        >>> from rlstab.stages.stage import Offer, no_features
        >>> state = {"right": torch.tensor([4.0, 3.0, 0.0]).double(), "wrong": torch.tensor([0.0, 1.0, 4.0]).double()}
        >>> offer = Offer(rollout=1, first=0, count=1, drawn=3, size=None, seed=0, features=no_features)
        >>> Paced(pool=3, random_share=0.0).select(offer, state).tolist()
        [1]

    Source:
        D. Kim, M. Kim, J. Kim et al., "Beyond Normalization: Rethinking the Partition Function as a Difficulty
        Scheduler for RLVR", 2026, arXiv 2602.12642. Reference code: none found.
    """

    name = "paced"

    target: Annotated[float, Range(gt=0, lt=1)] = 0.5

    def select(self, offer: Offer, state: State) -> Tensor:
        return self._filled(offer, -(expected_rate(state) - self.target).abs())
