"""Methods that measure twice, or by group. They exist for the tests."""

import torch

from rlstab import Gate, Mean, Terms, TokenObjective
from rlstab.core.stats import Grouped


class PassRate(TokenObjective):
    """Weighs a response by how seldom its group succeeds: ``1 + strength * (1 - share of rewarded responses)``."""

    name = "pass_rate"
    writes = {"weight"}
    strength: float = 1.0

    def measure(self, batch):
        best = batch.sequence_mean(batch.rewarded)
        return {"passed": Grouped.of(batch.group_ids, (best > 0).double(), batch.lengths > 0)}

    def terms(self, batch, stat, state):
        rate = stat.grouped("passed").mean(batch.spread(batch.group_ids))
        return Terms(weight=(1 + self.strength * (1 - rate)).to(batch.logprobs.dtype), report={"rate": Mean.of(rate)})


class CentredGate(TokenObjective):
    """Stops tokens whose surprise is above the mean of their group by more than the spread in the step."""

    name = "centred_gate"
    needs = {"logprobs"}
    writes = {"gates"}

    def measure(self, batch):
        return {"logprob": Grouped.of(batch.spread(batch.group_ids), batch.logprobs)}

    def measure_again(self, batch, stat):
        return {"square": Mean.of(self.centred(batch, stat).square())}

    def advance(self, state, stat):
        assert set(stat) == {"logprob", "square"}  # both rounds
        return state

    def terms(self, batch, stat, state):
        far = self.centred(batch, stat).square() > stat.mean("square").value
        return Terms(gates={"": Gate(lambda ratio, constants: torch.where(far, 0.0, torch.ones_like(ratio)))})

    @staticmethod
    def centred(batch, stat):
        return batch.logprobs.double() - stat.grouped("logprob").mean(batch.spread(batch.group_ids))
