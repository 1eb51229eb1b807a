"""Small methods that exist for the tests: what each kind of term does alone, measured twice or by group."""

from typing import Annotated, Literal

import torch

from rlstab import Gate, Mean, Pool, Range, Surrogate, Terms, TokenObjective
from rlstab.core.stats import Grouped


class DropPunished(TokenObjective):
    """Keep tokens whose advantage is not negative."""

    name = "drop_punished"
    writes = {"keep"}

    def terms(self, batch, stat, state):
        return Terms(keep=batch.advantages >= 0)


class Unweighted(TokenObjective):
    """A gate that takes the ratio out of the gradient: the plain policy gradient, whatever the policy did since."""

    name = "unweighted"
    writes = {"gates"}

    def terms(self, batch, stat, state):
        return Terms(gates={"": Gate(lambda ratio, constants: 1 / ratio)})


class CappedGate(TokenObjective):
    """CISPO (arXiv 2506.13585) as a gate, which composes with a trust region: a log-prob weighs at most ``cap``."""

    name = "capped_gate"
    writes = {"gates"}
    cap: float = 1.2

    def terms(self, batch, stat, state):
        return Terms(gates={"": Gate(lambda ratio, constants: ratio.clamp(max=self.cap) / ratio)})


class Capped(TokenObjective):
    """In place of the ratio, the ratio of at most ``cap``; 0 below ``floor``."""

    name = "capped"
    writes = {"surrogate"}
    cap: float = 1.1
    floor: float = 0.0

    def terms(self, batch, stat, state):
        def pull(ratio, constants):
            return torch.where(ratio < self.floor, 0.0, ratio.clamp(max=self.cap))

        return Terms(surrogate=Surrogate(pull))


class Exempt(TokenObjective):
    """Exempt every token from the trust region."""

    name = "exempt"
    writes = {"unclipped"}

    def terms(self, batch, stat, state):
        return Terms(unclipped=torch.ones_like(batch.sequence, dtype=torch.bool))


class Scale(TokenObjective):
    """Weight, bonus and learning rate, each by a number; reads a signal of its own where it has a name."""

    name = "scale"

    weight: float = 1.0
    bonus: float = 0.0
    lr: float | None = None
    reads: str = ""

    @property
    def needs(self):
        return frozenset({self.reads} if self.reads else ())

    @property
    def writes(self):
        return frozenset({"weight", "bonus"} | (set() if self.lr is None else {"lr_scale"}))

    def terms(self, batch, stat, state):
        if self.reads:
            batch.signal(self.reads)
        ones = torch.ones_like(batch.advantages)
        return Terms(weight=self.weight * ones, bonus=self.bonus * ones, lr_scale=self.lr)


class Noise(TokenObjective):
    """Keep a random half, by identity; count its steps and pool its numbers."""

    name = "noise"
    writes = {"keep"}

    seed: int = 0

    def init_state(self):
        return {"steps": 0}

    def measure(self, batch):
        return {"mean": Mean.of(batch.uniform(self.seed)), "median": Pool.quantile(batch.uniform(self.seed), 0.5)}

    def advance(self, state, stat):
        return {"steps": state["steps"] + 1}

    def terms(self, batch, stat, state):
        return Terms(keep=stat["median"].reached(batch.uniform(self.seed)))


class Chooser(TokenObjective):
    """One setting of each kind."""

    name = "chooser"

    must: Annotated[int, Range(ge=1)]
    share: Annotated[float, Range(gt=0, le=1)] = 0.5
    cap: Annotated[float | None, Range(gt=1)] = None
    mode: Literal["kept", "all"] = "kept"
    maybe: Literal["a", "b"] | None = None
    flag: bool = False
    free: float = 0.0
    label: str = "x"

    def terms(self, batch, stat, state):
        return Terms()


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
