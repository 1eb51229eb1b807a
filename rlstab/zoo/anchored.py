"""Shared by methods that compare the live policy with a chosen one: the sampler, the old policy, the reference."""

from collections.abc import Callable, Set
from typing import Literal

from torch import Tensor

from rlstab import Constants, PolicyOutputs, TokenBatch

#: The signal of each anchor.
_ANCHORS = {"rollout": "rollout_logprobs", "old": "old_logprobs", "reference": "ref_logprobs"}


class Anchored:
    """Base of a method with a setting ``anchor``."""

    anchor: Literal["reference", "rollout", "old"]

    @property
    def needs(self) -> Set[str]:
        """The signal of the anchor, unless it is the old policy, whose log-probs every batch has."""
        return frozenset({_ANCHORS[self.anchor]} - {"old_logprobs"})

    def anchor_of(self, batch: TokenBatch) -> Callable[[PolicyOutputs], Tensor]:
        """Gives the ``(n,)`` log-probs of the anchor, nats, without gradient, from the live outputs held constant.

        If the live policy is its own denominator, it is its own anchor.
        """
        if self.anchor == "old" and batch.live_ratio:
            return lambda constant: constant.logprobs
        anchor = batch.signal(_ANCHORS[self.anchor])
        return lambda constant: anchor

    def live_and_anchor(self, batch: TokenBatch) -> Callable[[Constants], tuple[Tensor, Tensor]]:
        """Gives ``(n,)`` nats each, without gradient: log-probs of the two policies."""
        anchor = self.anchor_of(batch)
        return lambda constants: (constants.anchor.logprobs, anchor(constants.anchor))
