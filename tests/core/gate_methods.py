"""Published methods as gates and ratios. They exist for the tests; sources stand beside each."""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from rlstab import Gate, Terms, TokenObjective
from rlstab.core.loss import token_log_ratio


class _Gated(TokenObjective):
    name: ClassVar[str] = "gated"
    writes = frozenset({"gates"})

    def terms(self, batch, stat, state):
        return Terms(gates={"": Gate(self.gate_of(batch))})


def pick(positive, yes, no):
    """One of two numbers per token, in float64: ``torch.where`` of two Python numbers is float32."""
    return torch.where(positive, torch.tensor(yes, dtype=torch.float64), torch.tensor(no, dtype=torch.float64))


@final
@dataclass(frozen=True)
class CISPO(_Gated):
    """arXiv 2506.13585: the weight of a log-prob is the ratio, at most ``1 + high``."""

    name: ClassVar[str] = "cispo"
    high: float = 0.2

    def gate_of(self, batch):
        return lambda ratio, held: ratio.clamp(max=1 + self.high) / ratio


@final
@dataclass(frozen=True)
class SAPO(_Gated):
    """arXiv 2511.20347: the slope of a sigmoid of the ratio."""

    name: ClassVar[str] = "sapo"
    rewarded: float = 1.0
    punished: float = 1.05

    def gate_of(self, batch):
        def gate(ratio, held):
            z = torch.sigmoid(pick(held.advantages > 0, self.rewarded, self.punished) * (ratio - 1))
            return 4 * z * (1 - z)

        return gate


@final
@dataclass(frozen=True)
class MASPO(_Gated):
    """arXiv 2602.17550: a Gaussian of the ratio on tokens that move away, wider for rare tokens."""

    name: ClassVar[str] = "maspo"
    sigma: float = 1.0
    alpha: float = 0.3
    beta: float = 0.03

    def gate_of(self, batch):
        base = (self.sigma * (-self.alpha * batch.old_logprobs).exp()).clamp(self.sigma, 10.0)

        def gate(ratio, held):
            A = held.advantages
            trust = torch.where(A > 0, 1 + self.beta * A, 1 / (1 - self.beta * A.clamp(max=0))).clamp(0.1, 10.0)
            away = A * (ratio - 1) > 0
            return torch.where(away, torch.exp(-((ratio - 1) ** 2) / (2 * (base * trust) ** 2)), 1.0)

        return gate


@final
@dataclass(frozen=True)
class VESPO(TokenObjective):
    """arXiv 2602.10693: a kernel of the weight of the whole sequence, not normalised by its length."""

    name: ClassVar[str] = "vespo"
    writes = frozenset({"gates"})

    def terms(self, batch, stat, state):
        def gate(ratio, held):
            gap = token_log_ratio(held.anchor, held.anchor, batch).clamp(-20, 20)
            s = batch.spread(batch.sequence_total(gap).clamp(math.log(1e-8), 20.0))
            k, lam = pick(held.advantages >= 0, 2.0, 3.0), pick(held.advantages >= 0, 3.0, 2.0)
            return (lam + k * s - lam * s.exp()).exp() / ratio

        return Terms(gates={"": Gate(gate, whole_sequences=True)})


@final
@dataclass(frozen=True)
class GSPO(TokenObjective):
    """arXiv 2507.18071, its token form: the geometric mean of the ratios of the kept tokens of a response."""

    name: ClassVar[str] = "gspo"
    writes = frozenset({"ratio"})

    def terms(self, batch, stat, state):
        def ratio(policy, held):
            gap = token_log_ratio(held.anchor, held.anchor, batch)
            mean = batch.spread(batch.sequence_mean(gap, held.keep)).to(gap.dtype)
            return mean + policy.logprobs - held.anchor.logprobs

        return Terms(ratio=ratio)


@final
@dataclass(frozen=True)
class OneSided(TokenObjective):
    """Doubles the log-ratio of tokens that are punished once bonuses are counted."""

    name: ClassVar[str] = "one_sided"
    writes = frozenset({"ratio"})

    def terms(self, batch, stat, state):
        def ratio(policy, held):
            return torch.where(held.advantages < 0, 2.0, 1.0) * token_log_ratio(policy, held.anchor, batch)

        return Terms(ratio=ratio)
