"""Shared by methods that choose tokens by the covariance of log-prob and advantage."""

from torch import Tensor

from rlstab import Mean, Settled, Stat, TokenBatch


class Covariant:
    """Base of methods that compare covariances over the optimizer step."""

    needs: frozenset[str] = frozenset({"logprobs"})

    def measure(self, batch: TokenBatch) -> Stat:
        return {"advantage": Mean.of(batch.advantages), "logprob": Mean.of(batch.logprobs)}

    def covariances(self, batch: TokenBatch, stat: Settled) -> Tensor:
        """``(n,)`` float64, nats: the part of each token in the covariance of log-prob and advantage."""
        rewarded = batch.advantages.double() - stat.mean("advantage").value
        return rewarded * (batch.logprobs.double() - stat.mean("logprob").value)
