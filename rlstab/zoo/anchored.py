"""What the methods share that compare the live policy with one that is chosen: the sampler, or the old policy."""

from collections.abc import Callable, Set
from typing import Literal

from torch import Tensor

from rlstab import Constants, TokenBatch


class Anchored:
    """Base of a method with a setting ``anchor``."""

    anchor: Literal["rollout", "old"]

    @property
    def needs(self) -> Set[str]:
        """The log-probs of the sampler, with this anchor; those of the old policy are always there."""
        return frozenset({"rollout_logprobs"} if self.anchor == "rollout" else ())

    @property
    def anchored_at(self) -> str:
        """The policy that the live one is compared with."""
        return {"rollout": "the sampler", "old": "the old policy"}[self.anchor]

    def live_and_anchor(self, batch: TokenBatch) -> Callable[[Constants], tuple[Tensor, Tensor]]:
        """Gives ``(n,)`` nats each, without gradient: log-probs of the two policies.

        Where the live policy is its own denominator, it is its own anchor.
        """
        own = self.anchor == "old" and batch.live_ratio
        anchor = None if own else batch.signal(f"{self.anchor}_logprobs")
        return lambda constants: (constants.anchor.logprobs, constants.anchor.logprobs if anchor is None else anchor)
