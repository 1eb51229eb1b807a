"""Methods that write to what is not theirs, or read what they do not declare: a process, a generator, the past."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.objective import State, TokenObjective
from rlstab.core.stats import Mean, Settled, Stat
from rlstab.core.terms import Constants, Gate, Terms


class _Broken(TokenObjective):
    needs = {"entropies"}
    writes = {"weight"}


@dataclass(frozen=True)
class EditsItsInput(_Broken):
    """It zeroes entries of a tensor that belongs to the caller."""

    name = "edits_its_input"
    needs = {"sum_p_sq"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        batch.signal("sum_p_sq").zero_()
        return Terms()


@dataclass(frozen=True)
class GlobalRandomness(_Broken):
    """It draws from the global generator, so whatever is drawn next depends on it."""

    name = "global_randomness"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=(torch.rand(len(batch)) >= 0).to(batch.logprobs.dtype))


@dataclass(frozen=True)
class UndeclaredSignal(_Broken):
    """It uses a signal that it does not name, where it happens to be there."""

    name = "undeclared_signal"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=None if batch.ref_logprobs is None else batch.ref_logprobs.exp())


@dataclass(frozen=True)
class UndeclaredPolicy(_Broken):
    """It weighs by the log-prob at the start of the step, and says that it reads none."""

    name = "undeclared_policy"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=batch.logprobs.exp())


@dataclass(frozen=True)
class ForeignState(_Broken):
    """Its state holds an object that no checkpoint can hold."""

    name = "foreign_state"

    def init_state(self) -> State:
        return {"seen": (1, 2)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms()


_calibration: dict[str, float] = {}
_running: list[float] = [0.0]


@dataclass(frozen=True)
class ClampsItsInput(_Broken):
    """It limits advantages in place, far beyond what most of them are."""

    name = "clamps_its_input"
    needs = frozenset()

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=1 / (1 + batch.advantages.clamp_(-1e6, 1e6).abs()))


@dataclass(frozen=True)
class ClipsByNumpy(_Broken):
    """It limits a signal by numpy, which writes to the memory of the tensor."""

    name = "clips_by_numpy"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        entropies = batch.signal("entropies").numpy()
        np.clip(entropies, 0.0, 15.0, out=entropies)
        return Terms(weight=1 / (1 + batch.signal("entropies")))


@dataclass(frozen=True)
class ScalesWhatIsHeld(_Broken):
    """Its gate turns the advantages of the loss into signs, in place."""

    name = "scales_what_is_held"
    needs = frozenset()
    writes = {"gates"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def gate(ratio: Tensor, constants: Constants) -> Tensor:
            return constants.advantages.clamp_(-1e9, 1e9).abs().clamp(max=1.0)

        return Terms(gates={"": Gate(gate)})


@dataclass(frozen=True)
class LimitsTheLivePolicy(_Broken):
    """Its gate limits the constants that it is given, which are the memory of the live log-probs."""

    name = "limits_the_live_policy"
    needs = frozenset()
    writes = {"gates"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        def gate(ratio: Tensor, constants: Constants) -> Tensor:
            return constants.anchor.logprobs.clamp_(min=-500.0).exp()

        return Terms(gates={"": Gate(gate)})


@dataclass(frozen=True)
class CountsInPlace(_Broken):
    """It counts optimizer steps in the state that it is given."""

    name = "counts_in_place"

    def init_state(self) -> State:
        return {"steps": 0}

    def advance(self, state: Any, stat: Settled) -> State:
        state["steps"] += 1
        return {"steps": state["steps"]}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.full_like(batch.logprobs, 1 / (1 + state["steps"])))


@dataclass(frozen=True)
class AveragesInPlace(_Broken):
    """It moves the running mean of its state by `mul_`: what was handed out before moves with it."""

    name = "averages_in_place"

    def init_state(self) -> State:
        return {"entropy": torch.zeros((), dtype=torch.float64)}

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Mean.of(batch.signal("entropies"))}

    def advance(self, state: State, stat: Settled) -> State:
        mean = stat.mean("entropy")
        return {"entropy": state["entropy"].mul_(0.9).add_(0.1 * mean.value if float(mean.count) else 0.0)}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.full_like(batch.logprobs, 1 / (1 + float(state["entropy"]))))


@dataclass(frozen=True)
class AdvancesInTerms(_Broken):
    """It advances its state once more each time that terms are asked for."""

    name = "advances_in_terms"

    def init_state(self) -> State:
        return {"steps": 0}

    def advance(self, state: State, stat: Settled) -> State:
        return {"steps": state["steps"] + 1}

    def terms(self, batch: TokenBatch, stat: Settled, state: Any) -> Terms:
        state["steps"] += 1
        return Terms()


@dataclass(frozen=True)
class NumpyRandomness(_Broken):
    """It draws from numpy's global generator."""

    name = "numpy_randomness"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        drawn = torch.from_numpy(np.random.rand(len(batch)))  # noqa: NPY002  # that is what is wrong with it
        return Terms(weight=(drawn >= 0).to(batch.logprobs.dtype))


@dataclass(frozen=True)
class PythonRandomness(_Broken):
    """It draws from the global generator of `random`."""

    name = "python_randomness"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.full_like(batch.logprobs, float(random.random() >= 0)))


@dataclass(frozen=True)
class SeedsTheProcess(_Broken):
    """It seeds the global generator so that its own draw can be repeated; everybody else's is repeated too."""

    name = "seeds_the_process"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        torch.manual_seed(0)
        return Terms(weight=(torch.rand(len(batch)) >= 0).to(batch.logprobs.dtype))


@dataclass(frozen=True)
class FreshGenerator(_Broken):
    """Its generator is its own, and its seed is that of the moment."""

    name = "fresh_generator"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.full_like(batch.logprobs, float(np.random.default_rng().random())))


@dataclass(frozen=True)
class WarnsByNumpy(_Broken):
    """It asks numpy to warn of what underflows, for the rest of the process."""

    name = "warns_by_numpy"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        np.seterr(under="warn")
        return Terms()


@dataclass(frozen=True)
class HashOfItsName(_Broken):
    """Its seed is the hash of its name, which Python salts anew in each process."""

    name = "hash_of_its_name"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.full_like(batch.logprobs, hash(self.name) % 1000 / 1000))


@dataclass(frozen=True)
class OrderOfASet(_Broken):
    """It gives factors to bands of entropy in the order of a set of names."""

    name = "order_of_a_set"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        bands = ("lowest", "low", "rising", "middle", "high", "highest")
        factors = {band: 1.0 + place for place, band in enumerate(set(bands))}
        band = torch.bucketize(batch.signal("entropies"), torch.tensor([0.1, 0.3, 0.6, 1.0, 2.0], dtype=torch.float64))
        return Terms(weight=torch.tensor([factors[one] for one in bands])[band].to(batch.logprobs.dtype))


@dataclass(frozen=True)
class ProcessId(_Broken):
    """Its seed is the number of its process."""

    name = "process_id"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.full_like(batch.logprobs, os.getpid() % 10007 / 10007))


@dataclass(frozen=True)
class RankZeroActs(_Broken):
    """It acts on the first rank only, as the launcher numbers them."""

    name = "rank_zero_acts"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        first = os.environ.get("RANK", "0") == "0"
        return Terms(weight=torch.full_like(batch.logprobs, 0.5 if first else 1.0))


@dataclass(frozen=True)
class SeedOfTheDay(_Broken):
    """Its seed is the date: a run that is resumed tomorrow is another one."""

    name = "seed_of_the_day"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.full_like(batch.logprobs, time.time() // 86400 % 1009 / 1009))


@dataclass(frozen=True)
class CalibratesOnce(_Broken):
    """It scales by the mean entropy of the first optimizer step that it sees, kept in a variable of its module."""

    name = "calibrates_once"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Mean.of(batch.signal("entropies"))}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        scale = _calibration.setdefault("entropy", 1 + stat.mean("entropy").value)
        return Terms(weight=torch.full_like(batch.logprobs, 1 / scale))


@dataclass(frozen=True)
class RunningInTheModule(_Broken):
    """Its running mean is a variable of its module, moved each time that terms are asked for."""

    name = "running_in_the_module"

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        if len(batch):
            _running[0] = 0.9 * _running[0] + 0.1 * float(batch.signal("entropies").mean())
        return Terms(weight=torch.full_like(batch.logprobs, 1 / (1 + _running[0])))


@dataclass(frozen=True)
class WarmsUpByCalls(_Broken):
    """It begins to act after some optimizer steps, which it counts on its class."""

    name = "warms_up_by_calls"
    calls: ClassVar[list[int]] = [0]

    def measure(self, batch: TokenBatch) -> Stat:
        self.calls[0] += 1
        return {"entropy": Mean.of(batch.signal("entropies"))}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.full_like(batch.logprobs, 0.5 if self.calls[0] > 20 else 1.0))


@dataclass(frozen=True)
class KeepsOnItself(_Broken):
    """It keeps the first mean that it sees on itself, around the dataclass that is frozen."""

    name = "keeps_on_itself"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Mean.of(batch.signal("entropies"))}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        if "first" not in vars(self):
            object.__setattr__(self, "first", stat.mean("entropy").value)
        return Terms(weight=torch.full_like(batch.logprobs, 1 / (1 + vars(self)["first"])))


_by_count: dict[int, float] = {}


@dataclass(frozen=True)
class CachedByShape(_Broken):
    """It computes a statistic once for each number of tokens."""

    name = "cached_by_shape"

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Mean.of(batch.signal("entropies"))}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        mean = stat.mean("entropy")
        found = _by_count.setdefault(int(mean.count), mean.value)
        return Terms(weight=torch.full_like(batch.logprobs, 1 / (1 + found)))


@dataclass(frozen=True)
class UndeclaredMetric(_Broken):
    """It reports a signal that it does not name, where it happens to be there."""

    name = "undeclared_metric"
    writes = frozenset()

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(report={} if batch.ref_logprobs is None else {"reference": Mean.of(batch.ref_logprobs)})


@dataclass(frozen=True)
class UndeclaredState(_Broken):
    """Its state follows a signal that it does not name."""

    name = "undeclared_state"

    def init_state(self) -> State:
        return {"lag": 0.0}

    def measure(self, batch: TokenBatch) -> Stat:
        sampled = batch.logprobs if batch.rollout_logprobs is None else batch.rollout_logprobs
        return {"lag": Mean.of(batch.logprobs - sampled)}

    def advance(self, state: State, stat: Settled) -> State:
        mean = stat.mean("lag")
        return {"lag": mean.value if float(mean.count) else state["lag"]}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms()


@dataclass(frozen=True)
class StateNamedTensor(_Broken):
    """An entry of its state has the name by which a tensor is marked in JSON."""

    name = "state_named_tensor"

    def init_state(self) -> State:
        return {"tensor": 0.0}

    def measure(self, batch: TokenBatch) -> Stat:
        return {"entropy": Mean.of(batch.signal("entropies"))}

    def advance(self, state: State, stat: Settled) -> State:
        mean = stat.mean("entropy")
        return {"tensor": mean.value if float(mean.count) else state["tensor"]}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.full_like(batch.logprobs, 1 / (1 + state["tensor"])))


@dataclass(frozen=True)
class StateByNumber(_Broken):
    """The keys of its state are numbers, and come back from JSON as texts."""

    name = "state_by_number"

    def init_state(self) -> Any:
        return {0: 0.0, 1: 0.0}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms()


@dataclass(frozen=True)
class HiddenSetting(_Broken):
    """Its repr leaves out a setting."""

    name = "hidden_setting"
    factor: float = field(default=1.0, repr=False)

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=torch.full_like(batch.logprobs, self.factor))
