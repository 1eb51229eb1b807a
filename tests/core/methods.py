"""Small methods that exist for the tests."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, final

import torch

from rlstab import Gate, Mean, Pool, Range, Terms, TokenObjective


@final
@dataclass(frozen=True)
class DropPunished(TokenObjective):
    """Keep tokens whose advantage is not negative."""

    name: ClassVar[str] = "drop_punished"
    writes = frozenset({"keep"})

    def terms(self, batch, stat, state):
        return Terms(keep=batch.advantages >= 0)


@final
@dataclass(frozen=True)
class Unweighted(TokenObjective):
    """A gate that takes the ratio out of the gradient: the plain policy gradient, whatever the policy did since."""

    name: ClassVar[str] = "unweighted"
    writes = frozenset({"gates"})

    def terms(self, batch, stat, state):
        return Terms(gates={"": Gate(lambda ratio, held: 1 / ratio)})


@final
@dataclass(frozen=True)
class Exempt(TokenObjective):
    """Exempt every token from the trust region."""

    name: ClassVar[str] = "exempt"
    writes = frozenset({"exempt"})

    def terms(self, batch, stat, state):
        return Terms(exempt=torch.ones_like(batch.sequence, dtype=torch.bool))


@final
@dataclass(frozen=True)
class Scale(TokenObjective):
    """Weight, bonus and learning rate, each by a number; reads a signal of its own where it has a name."""

    name: ClassVar[str] = "scale"

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


@final
@dataclass(frozen=True)
class Noise(TokenObjective):
    """Keep a random half, by identity; count its steps and pool its numbers."""

    name: ClassVar[str] = "noise"
    writes = frozenset({"keep"})

    seed: int = 0

    def init_state(self):
        return {"steps": 0}

    def measure(self, batch):
        return {"mean": Mean.of(batch.uniform(self.seed)), "median": Pool.quantile(batch.uniform(self.seed), 0.5)}

    def advance(self, state, stat):
        return {"steps": state["steps"] + 1}

    def terms(self, batch, stat, state):
        return Terms(keep=stat["median"].reached(batch.uniform(self.seed)))


@final
@dataclass(frozen=True)
class Chooser(TokenObjective):
    """One setting of each kind."""

    name: ClassVar[str] = "chooser"

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
