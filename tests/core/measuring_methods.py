"""Methods that measure twice, or by group. They exist for the tests."""

from typing import Annotated

import torch

from rlstab import Gate, Mean, Penalty, Pool, Terms, TokenObjective
from rlstab.core.loss import token_log_ratio
from rlstab.core.settings import Range
from rlstab.core.stats import Grouped


class CovarianceThreshold(TokenObjective):
    """As KL-Cov (arXiv 2505.22617): a penalty on tokens whose log-prob and advantage vary together the most.

    The covariance of a token needs the means, and the threshold needs the covariances: two rounds.
    """

    name = "covariance_threshold"
    needs = {"logprobs"}
    writes = {"penalties"}

    share: Annotated[float, Range(gt=0, le=1)] = 0.2
    coefficient: float = 0.7

    def measure(self, batch):
        return {"advantage": Mean.of(batch.advantages), "logprob": Mean.of(batch.logprobs)}

    def measure_again(self, batch, stat):
        return {"covariance": Pool.top(self.covariances(batch, stat), self.share, rounding="floor")}

    def terms(self, batch, stat, state):
        chosen = stat.threshold("covariance").reached(self.covariances(batch, stat))

        def gap(policy, anchor):
            return token_log_ratio(policy, anchor, batch).square()

        report = {"threshold": stat.threshold("covariance").report(), "share": Mean.of(chosen)}
        return Terms(penalties={"": Penalty(self.coefficient, gap, chosen)}, report=report)

    @staticmethod
    def covariances(batch, stat):
        centred = batch.advantages.double() - stat.mean("advantage").value
        return centred * (batch.logprobs.double() - stat.mean("logprob").value)


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
