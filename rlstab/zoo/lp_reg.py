"""Lp-Reg: hold plausible rare tokens when they are about to be punished."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

import torch
from torch import Tensor

from rlstab.core.batch import PolicyOutputs, TokenBatch
from rlstab.core.objective import State, TokenObjective
from rlstab.core.settings import Range
from rlstab.core.stats import Mean, Pool, Settled, Stat, Threshold
from rlstab.core.terms import Bounds, Penalty, Terms
from rlstab.estimators import k3


@final
@dataclass(frozen=True)
class LpReg(TokenObjective):
    """Pull plausible low-probability tokens of punished responses towards a min-p filtered copy of the policy."""

    name: ClassVar[str] = "lp_reg"

    share: Annotated[float, Range(gt=0, le=1)] = 0.01
    min_p: Annotated[float, Range(gt=0, le=1)] = 0.02
    coefficient: Annotated[float, Range(ge=0)] = 1.0
    form: Literal["paper", "code"] = "paper"
    ratio_cap: Annotated[float | None, Range(gt=1)] = None

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"max_logprobs"} if self.form == "paper" else {"max_logprobs", "log_kept_mass"})

    @property
    def live_needs(self) -> frozenset[str]:
        return frozenset({"log_kept_mass"} if self.form == "paper" else ())

    @property
    def writes(self) -> frozenset[str]:
        own = {"penalties"} if self.form == "paper" else {"penalties", "exempt"}
        return frozenset(own | ({"bounds"} if self.ratio_cap is not None else set()))

    @property
    def signal_options(self) -> dict[str, float]:
        return {"min_p": self.min_p}

    def measure(self, batch: TokenBatch) -> Stat:
        surprisal = -batch.logprobs
        if self.form == "paper":
            return {"surprisal": Pool.top(surprisal, self.share)}
        return {"surprisal": Pool.top(surprisal[batch.advantages < 0], self.share, rounding="floor")}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        threshold = stat["surprisal"]
        assert isinstance(threshold, Threshold)
        plausible = batch.logprobs >= batch.signal("max_logprobs") + math.log(self.min_p)
        selected = threshold.reached(-batch.logprobs) & plausible & (batch.advantages < 0)
        if self.form == "code" and threshold.nominal <= 1:
            selected = torch.zeros_like(selected)
        report = {"threshold": threshold.report(), "selected": Mean.of(selected)}
        bounds = None
        if self.ratio_cap is not None:
            bounds = Bounds(1.0, self.ratio_cap - 1, self.ratio_cap if self.form == "paper" else None)
        if self.form == "paper":
            penalty = Penalty(self.coefficient, _forward_kl, selected, reads=frozenset({"log_kept_mass"}))
            return Terms(penalties={"": penalty}, bounds=bounds, report=report)

        proxy = batch.logprobs - batch.signal("log_kept_mass")

        def pull(policy: PolicyOutputs, anchor: PolicyOutputs) -> Tensor:
            value = k3(proxy - policy.logprobs, cap=10.0)
            return torch.where(anchor.logprobs < proxy, value, torch.zeros_like(value))

        penalty = Penalty(self.coefficient, pull, selected)
        return Terms(penalties={"": penalty}, exempt=selected, bounds=bounds, report=report)


def _forward_kl(policy: PolicyOutputs, anchor: PolicyOutputs) -> Tensor:
    # KL(proxy || policy) = -ln Z when the proxy is the policy filtered, and so is its gradient, policy - proxy
    return -policy.signal("log_kept_mass")
