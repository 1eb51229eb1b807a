"""Prompts at random from a finite pool."""

from typing import Annotated

import torch
from torch import Tensor

from rlstab import Range, State
from rlstab.stages.slots import filled, pool_of
from rlstab.stages.stage import Offer, PromptSelector


class Uniform(PromptSelector):
    """Take each prompt of a pool with the same probability, none twice in a rollout.

    Problem:
        This is the baseline for a selector that prefers some prompts: the same pool, without a preference. A comparison
        of runs that draw from different prompts cannot tell better selection from more data.

    Equation:
        With M = ``pool``, the rollout takes the first prompts of the pool in the order of

            uniform(seed + ORDER, rollout, turn, prompt),    prompt = 0 .. M - 1

        and refills go on in this order. Only refills can reach its end; then the pool begins again with the next turn,
        in another order.

    Reads:
        nothing of the responses.

    Returns:
        The numbers of the prompts, different ones within a rollout; over rollouts a prompt comes back at random.

    Parameters:
        - ``pool`` (M): int in [1, inf) or None, default None. Prompts are drawn from 0 to M - 1 of the task; None takes
          all prompts of the task.

    State:
        none

    Deviations:
        none

    Interacts:
        - with ``goldilocks``, ``goldilocks_teacher`` and ``paced``: their baseline, at the same pool and seed. A run
          has one selector.

    Limits:
        - A rollout that takes the whole pool shows what ``in_order`` shows in an epoch, in another order.

    Example:
        A pool of four prompts, of which a rollout takes two, and then two more: none comes twice.

        >>> from rlstab.stages.stage import Offer, no_features
        >>> from rlstab.stages.uniform import Uniform
        >>> offer = Offer(rollout=0, first=0, count=2, drawn=0, size=None, seed=0, features=no_features)
        >>> refill = Offer(rollout=0, first=2, count=2, drawn=2, size=None, seed=0, features=no_features)
        >>> selector = Uniform(pool=4)
        >>> sorted(selector.select(offer, {}).tolist() + selector.select(refill, {}).tolist())
        [0, 1, 2, 3]

    Source:
        No paper: simple random sampling.
    """

    name = "uniform"

    pool: Annotated[int | None, Range(ge=1)] = None

    def select(self, offer: Offer, state: State) -> Tensor:
        return filled(offer, torch.arange(pool_of(self.name, self.pool, offer)), random_share=1.0)
