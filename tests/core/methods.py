"""Small methods that exist for the tests."""

from typing import Annotated, Literal

import torch

from rlstab import Gate, Mean, Pool, Range, Terms, TokenObjective


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
