"""KL to a reference policy, by four estimators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

from torch import Tensor

from rlstab.core.batch import PolicyOutputs, TokenBatch
from rlstab.core.objective import State, TokenObjective
from rlstab.core.settings import Range
from rlstab.core.stats import Settled
from rlstab.core.terms import Penalty, Terms
from rlstab.estimators import k1, k2, k3


@final
@dataclass(frozen=True)
class KLPenalty(TokenObjective):
    """Hold every token near a frozen reference policy."""

    name: ClassVar[str] = "kl"
    needs = frozenset({"ref_logprobs"})
    writes = frozenset({"penalties"})

    coefficient: Annotated[float, Range(ge=0)] = 0.001
    estimator: Literal["k1", "k2", "k3", "k3_straight_through"] = "k3"
    cap: Annotated[float | None, Range(gt=0)] = 10.0

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        reference = batch.signal("ref_logprobs")

        def divergence(policy: PolicyOutputs, anchor: PolicyOutputs) -> Tensor:
            d = reference - policy.logprobs
            if self.estimator == "k1":
                return k1(d)
            if self.estimator == "k2":
                return k2(d)
            if self.estimator == "k3":
                return k3(d, self.cap)
            # value of k3, gradient of k2: the two k2 cancel in value
            held = reference - anchor.logprobs
            return k3(held, self.cap) + (k2(d) - k2(held))

        return Terms(penalties={"": Penalty(self.coefficient, divergence)})
