"""Prompts one after another."""

import torch
from torch import Tensor

from rlstab import State
from rlstab.core.random import uniform
from rlstab.stages.stage import Offer, PromptSelector

#: Added to the seed, so that the order of prompts is a separate stream of random numbers.
STREAM = 1_000_000_007


class InOrder(PromptSelector):
    """Take prompts one after another; a finite task is repeated, in a new order each time.

    Problem:
        A run should show every prompt equally often, and a resumed run should show the prompts that the interrupted one
        would have shown. This is the default of a run that names no other selector.

    Equation:
        With d = ``offer.drawn``, prompts chosen since the run began, and M = ``offer.size``, the slot s = 0, 1, ... of
        an offer takes

            position = d + s
            prompt   = position                              M is None
                     = order_e[position mod M]               e = position div M, the epoch

        where order_e sorts the prompts by ``uniform(seed + STREAM, e, prompt)``, or leaves them as they are without
        ``shuffle``.

    Reads:
        nothing of the responses.

    Returns:
        The numbers of the prompts, each once per epoch. A refill continues the epoch, so a task with fewer prompts than
        a rollout asks for repeats some within it.

    Parameters:
        - ``shuffle``: bool, default True. Whether each epoch has a new order; chosen here, as data loaders of
          trainers do by default.

    State:
        none

    Deviations:
        none

    Interacts:
        - with ``dynamic_sampling``: the prompts of refills count as shown, and the epoch ends sooner.

    Limits:
        - A task with unlimited prompts has no order to shuffle: ``shuffle`` does nothing there.

    Example:
        A task of three prompts, and two chosen already. The third position of the first epoch is left; then the second
        epoch begins.

        >>> from rlstab.stages.in_order import InOrder
        >>> from rlstab.stages.stage import Offer, no_features
        >>> offer = Offer(rollout=1, first=0, count=4, drawn=2, size=3, seed=0, features=no_features)
        >>> InOrder(shuffle=False).select(offer, {}).tolist()
        [2, 0, 1, 2]
        >>> sorted(InOrder().select(offer, {}).tolist()[1:])
        [0, 1, 2]

    Source:
        No paper: sampling without replacement in epochs, as data loaders do.
    """

    name = "in_order"

    shuffle: bool = True

    def select(self, offer: Offer, state: State) -> Tensor:
        positions = offer.drawn + torch.arange(offer.count)
        if offer.size is None:
            return positions
        epoch, within = positions // offer.size, positions % offer.size
        if not self.shuffle:
            return within
        chosen = within.clone()
        for number in epoch.unique():
            order = uniform(offer.seed + STREAM, number, torch.arange(offer.size)).argsort(stable=True)
            chosen[epoch == number] = order[within[epoch == number]]
        return chosen
