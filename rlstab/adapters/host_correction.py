"""A host's correction for the mismatch between sampler and trainer, as a method next to those of the user."""

from rlstab.core.batch import TokenBatch
from rlstab.core.objective import State, TokenObjective
from rlstab.core.stats import Mean, Settled
from rlstab.core.terms import Terms
from rlstab.record.step import CORRECTION

__all__ = ["CORRECTION", "HostCorrection"]


class HostCorrection(TokenObjective):
    """Multiply the policy term of a token by the host's weight; the divisor stays the same, as in the host's loss."""

    name = "host_correction"
    needs = {CORRECTION}
    writes = {"weight"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        weight = batch.signal(CORRECTION)
        return Terms(weight=weight, report={"weight": Mean.of(weight)})
