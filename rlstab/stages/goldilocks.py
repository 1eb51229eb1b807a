"""Prompts that are neither too easy nor too hard, by what is known of each (Goldilocks, without its teacher)."""

from torch import Tensor

from rlstab import State
from rlstab.stages.pass_rates import PassRateSelector, expected_spread
from rlstab.stages.stage import Offer


class Goldilocks(PassRateSelector):
    """Take the prompts of a pool whose rewards are expected to vary most between responses.

    Problem:
        A prompt that the policy always solves, or never solves, gives a group of equal rewards: no advantage and no
        gradient, at the full cost of sampling. The gradient of a prompt with pass rate p is proportional to sqrt(p (1 -
        p)), the standard deviation of its reward. Goldilocks selects prompts for which it is large. The paper predicts
        it with a second language model (see ``goldilocks_teacher``); this variant is for a pool small enough that
        prompts recur, and counts successes.

    Equation:
        For each prompt q of the pool, a_q = 1 + right_q and b_q = 1 + wrong_q are the parameters of a Beta posterior of
        its pass rate, from a uniform prior. After a rollout with n > 0 responses to q, of ``raw_rewards`` r in [0, 1]:

            right_q <- lambda right_q + sum r
            wrong_q <- lambda wrong_q + n - sum r
            value_q  = E[sqrt(p (1 - p))] = B(a_q + 1/2, b_q + 1/2) / B(a_q, b_q)

        lambda is ``discount``, B the beta function. A slot of the rollout takes the prompt of the largest value that is
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
          when it is asked again; 1 never forgets. The rule and the value are those of MoPPS's code on Countdown and
          Geometry3K; on MATH it forgets nothing.
        - ``random_share`` (epsilon): float in [0, 1], default 0.2. Chosen here: the paper's value was not found.

    State:
        - ``right``, ``wrong`` (pool,), float64: evidence of each prompt; that of prompts that were not asked stays. It
          is the same to the bit for every cut into parts or ranks: rewards are rounded to a multiple of 2^-20, so sums
          are exact.

    Deviations:
        - From the paper: no teacher. It predicts sqrt(p (1 - p)) from the text of a prompt, also of one that was never
          asked, and selects from a few candidates out of millions. Here every prompt has its own posterior, and the
          whole pool are candidates.
        - From the paper: no prompt comes twice in a rollout. What the paper does about it was not found.
        - From MoPPS: it draws a pass rate from the posterior and takes the prompts nearest to 1/2, of 8 to 16 times as
          many random candidates; here the expectation is used, and only ``random_share`` is random.
        - From its code: no official code was found.

    Interacts:
        - with ``dynamic_sampling``: both avoid groups of equal rewards, this one before they are sampled. Refills come
          from the best of the remaining prompts, and dropped groups count as evidence.
        - with ``overlong`` and other reward shapers: they have no effect here, because ``raw_rewards`` decide what was
          solved.
        - with metrics of the reward: ``reward/mean`` is that of the selected prompts, near 1/2 by design. Compare runs
          by an evaluation.
        - with ``deep_grpo``: branches change what is learnt, not what is counted.

    Limits:
        - ``random_share: 1.0`` is ``uniform`` with the same pool, bit for bit.
        - In the first rollout nothing is known, and all prompts are equally likely.
        - With a pool as small as a rollout there is nothing to choose.

    Example:
        A pool of three. Of prompt 0 four of four responses were right, of prompt 1 two of four, prompt 2 was not asked.
        The posteriors are Beta(5, 1), Beta(3, 3) and Beta(1, 1).

        >>> import torch
        >>> from rlstab.stages.goldilocks import Goldilocks
        >>> from rlstab.stages.pass_rates import expected_spread
        >>> from rlstab.stages.stage import Offer, no_features
        >>> state = {"right": torch.tensor([4.0, 2.0, 0.0]).double(), "wrong": torch.tensor([0.0, 2.0, 0.0]).double()}
        >>> [round(value, 4) for value in expected_spread(state).tolist()]
        [0.3221, 0.4602, 0.3927]
        >>> offer = Offer(rollout=1, first=0, count=2, drawn=2, size=None, seed=0, features=no_features)
        >>> Goldilocks(pool=3, random_share=0.0).select(offer, state).tolist()
        [1, 2]

    Source:
        I. Mahrooghi, A. Lotfi, E. Abbe, "Goldilocks RL: Tuning Task Difficulty to Escape Sparse Rewards for Reasoning",
        2026, arXiv 2602.14868, for what a prompt is worth. Reference code: none found. The posterior: Y. Qu et al.,
        "Can Prompt Difficulty be Online Predicted for Accelerating RL Finetuning of Reasoning Models?", 2025, arXiv
        2507.04632 (MoPPS), code thu-rllab/MoPPS recipe/ours/mopps.py @ a883f51.
    """

    name = "goldilocks"

    def select(self, offer: Offer, state: State) -> Tensor:
        return self._filled(offer, expected_spread(state))
