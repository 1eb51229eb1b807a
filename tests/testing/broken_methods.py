"""Deliberately broken methods, each with the laws that must see it; a law that none of them breaks proves nothing.

Each does one thing that published or careful-looking code does, and is sensible otherwise.
"""

from __future__ import annotations

import datetime
import gc
import math
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.loss import token_log_ratio
from rlstab.core.metadata import About, NoOpAt
from rlstab.core.objective import TokenObjective
from rlstab.core.stats import Grouped, Mean, Pool
from rlstab.core.terms import Bounds, Gate, Penalty, Surrogate, Terms

#: Each broken method with the laws that it breaks, and the oracles of those that an oracle alone can see.
BROKEN: dict[TokenObjective, frozenset[str]] = {}
ORACLES: dict[str, Callable[[Any], float]] = {}


def H(batch: TokenBatch) -> Tensor:
    return batch.signal("entropies")


def entropies_of(batch: TokenBatch) -> dict[str, Mean]:
    return {"entropy": Mean.of(H(batch))}


def top(share: float) -> Any:
    return lambda batch: {"entropy": Pool.top(H(batch), share)}


def moments_of(batch: TokenBatch) -> dict[str, Mean]:
    entropies = H(batch).double()
    return {"mean": Mean.of(entropies), "square": Mean.of(entropies.square())}


def mean_of(stat: Any, name: str = "entropy", empty: float = 0.0) -> float:
    return stat.mean(name).value if float(stat.mean(name).count) else empty


def constant(batch: TokenBatch, value: float) -> Tensor:
    return torch.full_like(batch.logprobs, value)


def broken(
    *laws: str,
    slot: str = "weight",
    needs: Any = ("entropies",),
    measure: Any = None,
    init: Any = None,
    advance: Any = None,
    **more: Any,
) -> Callable[[Any], type[TokenObjective]]:
    """Make a method of a function that gives its terms, or what goes into its only slot."""

    def make(act: Any) -> type[TokenObjective]:
        def terms(self: Any, batch: TokenBatch, stat: Any, state: Any) -> Terms:
            given = act(batch, stat, state)
            if isinstance(given, Tensor):
                given = given.to(batch.logprobs.dtype)
            return given if isinstance(given, Terms) else Terms(**({} if given is None else {slot: given}))

        body = {"__doc__": act.__doc__, "__module__": __name__, "__qualname__": act.__name__, "name": act.__name__}
        body |= {
            "needs": frozenset(needs),
            "writes": frozenset({slot} - {""}),
            "terms": terms,
            "act": staticmethod(act),
        }
        if measure:
            body["measure"] = lambda self, batch: measure(batch)
        if init is not None:
            body["init_state"] = lambda self: init()
        if advance:
            body["advance"] = lambda self, state, stat: advance(state, stat)
        cls = dataclass(frozen=True)(type(act.__name__, (TokenObjective,), body | more))
        BROKEN[cls()] = frozenset(laws)
        return cls

    return make


def row(name: str, laws: str | tuple[str, ...], act: Any, **more: Any) -> None:
    """The same for what is one expression of a batch, its statistics and a state; None gives no terms."""
    act.__name__ = name
    globals()[name] = broken(*([laws] if isinstance(laws, str) else laws), **more)(act)


def void(_: object) -> None:
    """For what is done for its effect."""


def written(*laws: str, **settings: Any) -> Callable[[Any], Any]:
    """The same for what is written as a class."""

    def make(cls: Any) -> Any:
        BROKEN[cls(**settings)] = frozenset(laws)
        return cls

    return make


# -- the outcome depends on the cut, the order or the padding ----------------------------------------------------------


@broken("split")
def local_quantile(batch, stat, state):
    """Its threshold is that of the batch at hand: a micro-batch gives another one."""
    return H(batch) >= H(batch).median() if len(batch) else None


@broken("split")
def local_mean(batch, stat, state):
    """It divides by the mean of the batch at hand."""
    return (H(batch) + 0.1) / (H(batch) + 0.1).mean() if len(batch) else None


@broken("split")
def local_largest(batch, stat, state):
    return (H(batch) + 0.1) / (H(batch) + 0.1).max() if len(batch) else None


def mean_of_part(batch):
    entropies = H(batch)
    return {"entropy": Mean.of(entropies.mean().reshape(1) if len(batch) else entropies)}


# It measures the mean of each part and averages those: a controller that depends on the cut.
row(
    "mean_of_means",
    "split",
    lambda b, s, t: None,
    measure=mean_of_part,
    init=lambda: {"entropy": 0.0},
    advance=lambda state, stat: {"entropy": mean_of(stat, empty=state["entropy"])},
)
# A part without tokens counts as one: a rank that has nothing would move the mean.
row(
    "counts_empty_parts",
    "monoid",
    lambda b, s, t: None,
    measure=lambda batch: {"entropy": Mean.of(H(batch) if len(batch) else torch.zeros(1))},
)
# Its metric is the mean of the part, reported as if every part weighed the same.
row(
    "unmerged_metric",
    "split",
    lambda b, s, t: Terms(report={"entropy": Mean.scalar(float(H(b).mean()))} if len(b) else {}),
)
# Its metric is how many tokens it saw, counted once for each part: a mean over parts.
row(
    "dropped_per_part",
    ("split", "replication"),
    lambda b, s, t: Terms(report={"forks": Mean.scalar(float((H(b) > 1).sum()))}),
)


@broken("split", slot="bonus", needs=())
def whitens_the_batch(batch, stat, state):
    """It whitens advantages with mean and deviation of the batch at hand, as a trainer with one batch may."""
    advantages = batch.advantages
    if not bool(advantages.any()):
        return None
    centred = advantages - advantages.mean()
    return (centred / (advantages.std(correction=0) + 1e-4) - advantages) * (advantages != 0)


@broken("split")
def kept_of_the_part(batch, stat, state):
    """It renormalises what it keeps by the share that is kept in the batch at hand."""
    kept = H(batch) > 0.5
    return kept * len(batch) / kept.sum().clamp(min=1)


@broken("split", slot="aggregate", needs=())
def aggregate_of_the_part(batch, stat, state):
    """It averages over the tokens of each micro-batch, not over those of the optimizer step."""

    def mean(sequence, counted, num_sequences, totals):
        return torch.full(counted.shape, 1.0 / max(1, int(counted.sum())), dtype=torch.float64)

    return mean


# It averages over all rows, those without a token among them: how many there are depends on the host.
row(
    "empty_rows_count",
    "split",
    lambda b, s, t: constant(b, 1 / (1 + len(b) / max(1, b.num_sequences))),
    measure=lambda batch: {"length": Mean.of(batch.lengths.double())},
)


@broken("split")
def baseline_of_the_part(batch, stat, state):
    """It compares with the mean of the group in the batch at hand, and groups are torn apart."""
    groups = batch.spread(batch.group_ids)
    return 1 / (1 + Grouped.of(groups, H(batch)).mean(groups))


LAST = {"mean": 0.0, "fresh": False}


def remembers(batch):
    if len(batch):
        LAST["mean"] = float(H(batch).mean())
    LAST["fresh"] = True
    return entropies_of(batch)


# It remembers what it measured last: that of the last part, not of the step.
row("last_part_measured", "split", lambda b, s, t: constant(b, 1 / (1 + LAST["mean"])), measure=remembers)


@broken("split", measure=remembers)
def first_part_only(batch, stat, state):
    """It acts on the part whose terms are asked for first after measuring."""
    acts, LAST["fresh"] = LAST["fresh"], False
    return constant(batch, 0.5 if acts else 1.0)


@broken("split", measure=entropies_of)
def largest_of_nothing(batch, stat, state):
    """It takes the least value of each part, and a part may have no token."""
    least = H(batch).min()
    return constant(batch, float(torch.where(least < 0, 0.0, 1.0)))


# Its learning rate is that of the tokens at hand, and every rank has others.
row("learning_rate_of_the_part", "runs", lambda b, s, t: 1 / (1 + float(H(b).sum())), slot="lr_scale")
# It asks for as many tokens as are a fifth of the part, so that no two parts ask for the same statistic.
row(
    "share_of_the_part",
    "runs",
    lambda b, s, t: s.threshold("entropy").reached(H(b)),
    measure=lambda batch: {"entropy": Pool.largest(H(batch), max(1, len(batch) // 5))},
)


@broken("runs")
def groups_in_a_row(batch, stat, state):
    """It takes group numbers for places in a list."""
    totals = torch.zeros(batch.num_sequences, dtype=torch.float64)
    totals.index_add_(0, batch.group_ids, torch.ones(batch.num_sequences, dtype=torch.float64))
    return batch.spread(totals[batch.group_ids])


@broken("split", "permutation", measure=top(0.4))
def ties_by_order(batch, stat, state):
    """It takes exactly k tokens, and of those that are equal at the threshold the first in memory."""
    entropies, threshold = H(batch), stat.threshold("entropy")
    chosen = torch.zeros_like(entropies)
    chosen[entropies.sort(descending=True, stable=True).indices[: threshold.nominal]] = 1.0
    return chosen * threshold.reached(entropies)


@broken("permutation")
def first_of_the_largest(batch, stat, state):
    """It spares the token of each response with the largest entropy, by argmax: of equal ones the first in memory."""
    entropies = H(batch)
    weight = torch.ones_like(entropies)
    for row in range(batch.num_sequences):
        mine = (batch.sequence == row).nonzero().squeeze(-1)
        if len(mine):
            weight[mine[entropies[mine].argmax()]] = 0.0
    return weight


@broken("permutation")
def place_by_order(batch, stat, state):
    """It takes the order in which tokens stand in memory for their place in the response."""
    place = torch.zeros_like(batch.logprobs)
    for row in range(batch.num_sequences):
        mine = batch.sequence == row
        place[mine] = torch.arange(int(mine.sum()), dtype=place.dtype)
    return 1 / (1 + place)


# Its random numbers go to tokens in order.
row(
    "random_by_order",
    ("split", "permutation", "replication"),
    lambda b, s, t: torch.rand(len(b), generator=torch.Generator().manual_seed(0)),
)


@broken("split", "permutation", "replication")
def random_by_row(batch, stat, state):
    """Its random numbers belong to the place of a response in the batch, not to the response."""
    rng = torch.Generator().manual_seed(7)
    return batch.spread(torch.rand(batch.num_sequences, generator=rng, dtype=torch.float64))


@broken("split", "permutation")
def neighbour_in_memory(batch, stat, state):
    """It compares each token with the one before it in memory, that of another response at each border."""
    entropies = H(batch)
    return 1 / (1 + (entropies - entropies.roll(1)).abs())


# Its running sum goes on over the borders of responses.
row("sum_so_far", ("split", "permutation", "replication"), lambda b, s, t: 1 / (1 + H(b).cumsum(0)))


def corrected_variance(stat):
    count = float(stat.mean("mean").count)
    variance = max(0.0, stat.mean("square").value - stat.mean("mean").value ** 2) if count else 0.0
    return variance * count / max(1.0, count - 1)


# Its variance divides by n - 1, so two copies of a step are not the step.
row("bessel", "replication", lambda b, s, t: constant(b, 1 / (1 + corrected_variance(s))), measure=moments_of)
# The same, beside an order statistic that is others where every value is there twice.
row(
    "bessel_beside_a_pool",
    "replication",
    lambda b, s, t: constant(b, 1 / (1 + corrected_variance(s))),
    measure=lambda batch: {**moments_of(batch), "unused": Pool.quantile(H(batch), 0.37)},
)
# It makes up for a long optimizer step by its number of tokens, which the denominator has done already.
row(
    "by_the_number_of_tokens",
    "replication",
    lambda b, s, t: constant(b, 10.0 / (1.0 + float(s.mean("entropy").count))),
    measure=entropies_of,
)
# Its gate reads the whole sequence and does not say so, so that some of it was never computed.
row(
    "gate_of_other_tokens",
    "live rows",
    lambda b, s, t: {"": Gate(lambda ratio, constants: b.spread(b.sequence_mean(constants.anchor.logprobs)).exp())},
    slot="gates",
    needs=(),
)


# -- it reads the layout of the padded tensors, which a method cannot see ----------------------------------------------

# It divides by the size of the padded tensor.
row("counts_padding", "runs", lambda b, s, t: constant(b, 1 / (1 + math.prod(b.padded_shape))))
# It weighs a token by its place in the padded row.
row("relative_to_the_width", "runs", lambda b, s, t: 1 + b.position / b.padded_shape[1])
# It favours the first row of the padded tensors.
row("first_row", "runs", lambda b, s, t: torch.where(b.index // b.padded_shape[1] == 0, 1.5, 1.0))
# It divides by the largest value of the padded tensor.
row("padded_spread", "runs", lambda b, s, t: (H(b) + 0.1) / b.to_padded(H(b) + 0.1).max())
# It takes tokens after a hole in the mask for another turn.
row("holes", "runs", lambda b, s, t: 1 + b.index % b.padded_shape[1] - b.position)
# It weighs by the number of rows beside a token.
row("rows_of_the_micro_batch", "split", lambda b, s, t: constant(b, 1 / (1 + b.num_sequences)))


@broken("runs")
def unmasked_mean(batch, stat, state):
    """It lays tokens out in rows again and divides by the width of the row, padding included."""
    rows = torch.zeros(batch.padded_shape, dtype=torch.float64).view(-1)
    rows[batch.index] = H(batch).double()
    return 1 + batch.spread(rows.view(batch.padded_shape).mean(-1))


# -- it breaks where small steps do not reach --------------------------------------------------------------------------


@broken("split")
def local_from_position_64(batch, stat, state):
    late = batch.position >= 64
    return torch.where(late, 1 / (1 + late.sum()), 1.0)


@broken("split")
def local_top_beyond_256(batch, stat, state):
    entropies = H(batch)
    return None if len(batch) <= 256 else (entropies >= entropies.topk(64).values[-1]).to(entropies.dtype)


@broken("live rows", slot="gates", needs=())
def gate_of_others_beyond_200(batch, stat, state):
    def gate(ratio, constants):
        mean = batch.spread(batch.sequence_mean(constants.anchor.logprobs)).exp()
        return torch.where(batch.spread(batch.lengths) > 200, mean, torch.ones_like(mean))

    return {"": Gate(gate)}


@broken("masked", slot="ratio", needs=())
def ratio_of_dropped_beyond_40(batch, stat, state):
    def ratio(policy, constants):
        gap = token_log_ratio(policy, constants.anchor, batch)
        return torch.where(batch.spread(batch.lengths) > 40, batch.spread(batch.sequence_mean(gap)), gap)

    return ratio


@broken("pure")
def clamps_ids_beyond_40_rows(batch, stat, state):
    if batch.num_sequences > 40:
        batch.group_ids.clamp_(max=10**9)


def counting(state, stat):
    return {"n": state["n"] + 1}


@broken("later steps", init=lambda: {"n": 0}, advance=counting)
def local_after_four_steps(batch, stat, state):
    entropies = H(batch) + 0.1
    return entropies / entropies.mean() if state["n"] >= 4 and len(batch) else None


def counts_in_place_later(state, stat):
    if state["n"] >= 4:
        state["n"] += 1
    return {"n": state["n"] + 1}


row(
    "in_place_from_step_four",
    "later steps",
    lambda b, s, t: constant(b, 1 / (1 + t["n"])),
    init=lambda: {"n": 0},
    advance=counts_in_place_later,
)
# Its state holds what no checkpoint can hold, once it has seen some steps.
row(
    "tuple_from_step_three",
    "later steps",
    lambda b, s, t: None,
    init=lambda: {"n": 0, "window": 0.0},
    advance=lambda state, stat: {"n": state["n"] + 1, "window": (0.0, 1.0) if state["n"] >= 2 else 0.0},
)
# Its state is infinite after three hundred steps.
row(
    "tenfold_each_step",
    "later steps",
    lambda b, s, t: None,
    init=lambda: {"scale": 1.0},
    advance=lambda state, stat: {"scale": 10 * state["scale"]},
)


# -- it writes to what is not its own ----------------------------------------------------------------------------------


row("edits_its_input", "pure", lambda b, s, t: void(b.signal("sum_p_sq").zero_()), needs=("sum_p_sq",))
# It limits advantages in place, far beyond what they are.
row("clamps_its_input", "pure", lambda b, s, t: 1 / (1 + b.advantages.clamp_(-1000000.0, 1000000.0).abs()), needs=())
# The same around torch's count of writes.
row("clamps_by_data", "pure", lambda b, s, t: void(b.logprobs.data.clamp_(min=-1000.0)), needs=())


@broken("pure")
def clips_by_numpy(batch, stat, state):
    """It limits a signal by numpy, which writes to the memory of the tensor."""
    entropies = H(batch).numpy()
    np.clip(entropies, 0.0, 1e6, out=entropies)
    return 1 / (1 + H(batch))


@broken("pure")
def doubles_and_halves(batch, stat, state):
    entropies = H(batch).numpy()
    entropies *= 2
    entropies /= 2


@broken("pure")
def caches_on_the_batch(batch, stat, state):
    batch.extra["cached"] = H(batch)


row("hides_on_the_batch", "pure", lambda b, s, t: void(object.__setattr__(b, "cached", H(b))))
# Its gate limits the advantages of the loss in place.
row(
    "scales_what_is_held",
    "pure",
    lambda b, s, t: {
        "": Gate(lambda ratio, constants: constants.advantages.clamp_(-1000000000.0, 1000000000.0).abs().clamp(max=1.0))
    },
    slot="gates",
    needs=(),
)
# Its gate limits the constants that it is given, which are the memory of the live log-probs.
row(
    "limits_the_live_policy",
    "pure",
    lambda b, s, t: {"": Gate(lambda ratio, constants: constants.anchor.logprobs.clamp_(min=-500.0).exp())},
    slot="gates",
    needs=(),
)


def counts_here(state, stat):
    state["steps"] += 1
    return {"steps": state["steps"]}


# It counts optimizer steps in the state that it is given.
row(
    "counts_in_place",
    ("pure", "split"),
    lambda b, s, t: constant(b, 1 / (1 + t["steps"])),
    init=lambda: {"steps": 0},
    advance=counts_here,
)
# It moves the running mean of its state by `mul_`: what was handed out before moves with it.
row(
    "averages_in_place",
    ("pure", "split"),
    lambda b, s, t: constant(b, 1 / (1 + float(t["entropy"]))),
    measure=entropies_of,
    init=lambda: {"entropy": torch.zeros((), dtype=torch.float64)},
    advance=lambda state, stat: {"entropy": state["entropy"].mul_(0.9).add_(0.1 * mean_of(stat))},
)


@broken("split", init=lambda: {"n": 0}, advance=counting)
def advances_in_terms(batch, stat, state):
    """It advances its state once more each time that terms are asked for."""
    state["n"] += 1


# -- it uses what a whole process shares -------------------------------------------------------------------------------


row("global_randomness", ("pure", "process"), lambda b, s, t: torch.rand(len(b)) >= 0)


@broken("pure", "process")
def seeds_the_process(batch, stat, state):
    """It seeds the global generator so that its own draw can be repeated; everybody else's is repeated too."""
    torch.manual_seed(0)
    return torch.rand(len(batch)) >= 0


row("numpy_randomness", ("pure", "process"), lambda b, s, t: constant(b, float(np.random.rand() >= 0)))  # noqa: NPY002
row("python_randomness", ("pure", "process"), lambda b, s, t: constant(b, float(random.random() >= 0)))
# Its generator is its own, and its seed is that of the moment.
row(
    "fresh_generator",
    ("pure", "process", "split", "permutation", "packed", "order-free", "declared", "serialises", "precision"),
    lambda b, s, t: constant(b, float(np.random.default_rng().random())),
)


SWITCHES: dict[str, Callable[[], object]] = {
    "warns_by_numpy": lambda: np.seterr(under="warn"),
    "faster_matrix_products": lambda: torch.set_float32_matmul_precision("high"),
    "flushes_denormals": lambda: torch.set_flush_denormal(True),
    "detects_anomalies": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "silences_warnings": lambda: warnings.simplefilter("ignore", ResourceWarning),
    "stops_the_collector": gc.disable,
    "writes_a_file": lambda: Path(tempfile.gettempdir(), "rlstab_cache").write_text("1"),
    "sets_the_environment": lambda: os.environ.update(RLSTAB_SEEN="1"),
}
for _name, _switch in SWITCHES.items():
    row(_name, "process", lambda b, s, t, switch=_switch: void(switch()))


@written("pure")
@dataclass(frozen=True)
class SeedsWhenMade(TokenObjective):
    name: ClassVar[str] = "seeds_when_made"

    def __post_init__(self):
        torch.manual_seed(3)

    def terms(self, batch, stat, state):
        return Terms()


# Its seed is the hash of its name, which Python salts anew in each process.
row("hash_of_its_name", "process", lambda b, s, t: constant(b, hash("hash_of_its_name") % 1000 / 1000))


@broken("process")
def order_of_a_set(batch, stat, state):
    """It gives factors to bands of entropy in the order of a set of names."""
    bands = ("lowest", "low", "rising", "middle", "high", "highest")
    factors = {band: 1.0 + place for place, band in enumerate(set(bands))}
    band = torch.bucketize(H(batch), torch.tensor([0.1, 0.3, 0.6, 1.0, 2.0], dtype=torch.float64))
    return torch.tensor([factors[one] for one in bands])[band]


def rank_here():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


NUMBERS: dict[str, Callable[[], float]] = {
    "process_id": lambda: os.getpid() % 10007 / 10007,
    "rank_zero_acts": lambda: 0.5 if os.environ.get("RANK", "0") == "0" else 1.0,
    "slurm_rank": lambda: 1 / (1 + int(os.environ.get("SLURM_PROCID", "0"))),
    "rank_of_torch": lambda: 1 / (1 + rank_here()),
    "seed_of_the_day": lambda: time.time() // 86400 % 1009 / 1009,
    "seed_of_the_utc_day": lambda: datetime.datetime.now(datetime.UTC).toordinal() % 1009 / 1009,
    "number_of_cores": lambda: 1 / (os.cpu_count() or 1),
}
for _name, _number in NUMBERS.items():
    row(_name, "process", lambda b, s, t, number=_number: constant(b, number()))


# -- it remembers outside of its state ---------------------------------------------------------------------------------

MEMORY: dict[Any, float] = {}


# It scales by the mean entropy of the first optimizer step that it sees, kept in a variable of its module.
row(
    "calibrates_once",
    "process",
    lambda b, s, t: constant(b, 1 / MEMORY.setdefault("entropy", 1 + s.mean("entropy").value)),
    measure=entropies_of,
)


@broken("pure", "process", "split", "permutation", "replication", "packed", "order-free", "declared", "serialises")
def running_in_the_module(batch, stat, state):
    """Its running mean is a variable of its module, moved each time that terms are asked for."""
    if len(batch):
        MEMORY["running"] = 0.9 * MEMORY.get("running", 0.0) + 0.1 * float(H(batch).mean())
    return constant(batch, 1 / (1 + MEMORY.get("running", 0.0)))


def counts_calls(batch):
    MEMORY["calls"] = MEMORY.get("calls", 0) + 1
    return entropies_of(batch)


row(
    "warms_up_by_calls",
    "process",
    lambda b, s, t: constant(b, 0.5 if MEMORY["calls"] > 12 else 1.0),
    measure=counts_calls,
)


@written("process")
@dataclass(frozen=True)
class KeepsOnItself(TokenObjective):
    """It keeps the first mean that it sees on itself, around the dataclass that is frozen."""

    name: ClassVar[str] = "keeps_on_itself"

    needs = frozenset({"entropies"})
    writes = frozenset({"weight"})

    def measure(self, batch):
        return entropies_of(batch)

    def terms(self, batch, stat, state):
        if "first" not in vars(self):
            object.__setattr__(self, "first", stat.mean("entropy").value)
        return Terms(weight=constant(batch, 1 / (1 + vars(self)["first"])))


@broken("process", measure=entropies_of)
def cached_by_shape(batch, stat, state):
    """It computes a statistic once for each number of tokens."""
    mean = stat.mean("entropy")
    return constant(batch, 1 / (1 + MEMORY.setdefault(int(mean.count), mean.value)))


# -- it reads what it does not declare, or cannot be saved -------------------------------------------------------------


# It uses a signal that it does not name, where it happens to be there.
row("undeclared_signal", "declared", lambda b, s, t: None if b.ref_logprobs is None else b.ref_logprobs.exp())
# It weighs by the log-prob at the start of the step, and says that it reads none.
row("undeclared_policy", "declared", lambda b, s, t: b.logprobs.exp())
row(
    "undeclared_metric",
    "declared",
    lambda b, s, t: Terms(report={} if b.ref_logprobs is None else {"reference": Mean.of(b.ref_logprobs)}),
    slot="",
)


def lag_of(batch):
    sampled = batch.logprobs if batch.rollout_logprobs is None else batch.rollout_logprobs
    return {"lag": Mean.of(batch.logprobs - sampled)}


# Its state follows a signal that it does not name.
row(
    "undeclared_state",
    "declared",
    lambda b, s, t: None,
    measure=lag_of,
    init=lambda: {"lag": 0.0},
    advance=lambda state, stat: {"lag": mean_of(stat, "lag", state["lag"])},
)
# Its penalty reads live entropies and does not say so, and they may not be there.
row(
    "undeclared_live_read",
    ("declared", "live rows"),
    lambda b, s, t: {"": Penalty(0.1, lambda policy, anchor: -policy.signal("entropies"))},
    slot="penalties",
    needs=(),
)
# Its state holds an object that no checkpoint can hold.
row("foreign_state", "serialises", lambda b, s, t: None, init=lambda: {"seen": (1, 2)})
# The keys of its state are numbers, and come back from JSON as texts.
row("state_by_number", "serialises", lambda b, s, t: None, init=lambda: {0: 0.0, 1: 0.0})


@written("serialises", factor=0.5)
@dataclass(frozen=True)
class HiddenSetting(TokenObjective):
    """Its repr leaves out a setting."""

    name: ClassVar[str] = "hidden_setting"

    writes = frozenset({"weight"})
    factor: float = field(default=1.0, repr=False)

    def terms(self, batch, stat, state):
        return Terms(weight=constant(batch, self.factor))


# -- its numbers are no numbers, or too coarse -------------------------------------------------------------------------


row("inverse_probability", "finite", lambda b, s, t: 1e-35 / (b.logprobs * 10).exp())
# It takes the exponential of a log-ratio as it is, and float32 ends at e^88.
row(
    "unclamped_exp",
    "finite",
    lambda b, s, t: {
        "": Gate(lambda ratio, constants: 1 + 1e-09 * (b.logprobs - constants.anchor.logprobs).square().exp())
    },
    slot="gates",
    needs=(),
)
# Its log of a sum of exponentials does not take the largest out first.
row(
    "sum_of_exponentials",
    "finite",
    lambda b, s, t: Terms(report={"softest": Mean.scalar(math.log(mean_of(s, empty=1.0)) / 8)}),
    measure=lambda batch: {"entropy": Mean.of((8 * H(batch)).exp())},
)


@broken("finite", "replication", slot="", measure=moments_of)
def deviation_of_one(batch, stat, state):
    """It reports a deviation that divides by n - 1 also where there is one token."""
    mean, square = stat.mean("mean"), stat.mean("square")
    variance = (square.total - mean.total**2 / mean.count) / (mean.count - 1)
    return Terms(report={"variance": Mean(variance, torch.ones((), dtype=torch.float64))})


# It divides by the mean over rewarded tokens, and there may be none.
row(
    "mean_of_nothing",
    "runs",
    lambda b, s, t: constant(b, 1.0 + s.mean("entropy").value),
    measure=lambda batch: {"entropy": Mean.of(H(batch), batch.advantages > 0)},
)
# It divides by what a token leaves to others, which is nothing where the policy is certain.
row("rest_of_the_mass", "runs", lambda b, s, t: 0.001 / (1 - b.logprobs.exp()), needs=())
# It gives a weight for each response, not for each token.
row("wrong_shape", "runs", lambda b, s, t: torch.ones(b.num_sequences + 1))
# It subtracts two large numbers that differ by little: nothing of it is left in float32.
row("cancellation", "precision", lambda b, s, t: (1 + H(b) * 1e-08 - 1) * 100000000.0)


@broken("precision", measure=top(0.3))
def half_threshold(batch, stat, state):
    """It compares in half precision, where entropies that differ by a thousandth are one."""
    value = stat.threshold("entropy").value
    chosen = H(batch).half() >= torch.tensor(math.inf if value is None else value).half()
    return chosen


row("brain_float", "precision", lambda b, s, t: (1 + H(b)).bfloat16())


@broken(
    "precision",
    measure=lambda batch: {"response": Grouped.of(batch.spread(batch.sequence_ids), H(batch))},
)
def torch_quantile(batch, stat, state):
    """It takes a quantile over responses by torch, which refuses more than 2^24 of them."""
    means = stat.grouped("response")
    if not means.keys.numel():
        return None
    middle = torch.quantile(means.totals / means.counts, 0.5, interpolation="lower")
    return means.mean(batch.spread(batch.sequence_ids)) >= middle


# -- its gradient is not that of its loss, or is where none may be -----------------------------------------------------


# Its state is a parameter, and every loss made with it keeps its graph.
row("graph_in_a_state", "detached", lambda b, s, t: None, init=lambda: {"scale": torch.ones((), requires_grad=True)})
# Half of its ratio is a constant made from the policy itself, which finite differences cannot hold.
row(
    "inner_detach",
    ("gradcheck", "live ratio"),
    lambda b, s, t: lambda policy, constants: 0.5 * policy.logprobs + 0.5 * policy.logprobs.detach() - b.old_logprobs,
    slot="ratio",
    needs=(),
)


@broken("gradcheck", slot="ratio", needs=())
def wrong_above_three(batch, stat, state):
    """Its own ratio has half of its gradient where it is above 3."""

    def ratio(policy, constants):
        gap = token_log_ratio(policy, constants.anchor, batch)
        return torch.where(gap > math.log(3.0), 0.5 * gap + 0.5 * gap.detach(), gap)

    return ratio


@broken("gradcheck", slot="penalties", needs=())
def wrong_far_below(batch, stat, state):
    """Its penalty has no gradient on tokens that became a hundred times rarer."""

    def squared(policy, anchor):
        gap = policy.logprobs - batch.logprobs
        return 0.5 * torch.where(gap < -4.6, gap.detach(), gap).square()

    return {"": Penalty(0.1, squared)}


@broken("gradcheck", slot="ratio", needs=())
def still_at_one(batch, stat, state):
    """Its ratio has no gradient where it is exactly 1: in the first optimizer step after a rollout, on every token."""

    def ratio(policy, constants):
        gap = token_log_ratio(policy, constants.anchor, batch)
        return gap.sign().detach() * gap.abs()

    return ratio


@broken("gradcheck", slot="penalties", needs=("ref_logprobs",))
def half_detached_kl(batch, stat, state):
    """Its k3 holds the ratio constant, so that the penalty pulls and never lets go."""

    def k3(policy, anchor):
        gap = batch.signal("ref_logprobs") - policy.logprobs
        return gap.detach().clamp(max=8.0).exp() - gap - 1

    return {"": Penalty(0.1, k3)}


@broken("gradcheck", slot="penalties", needs=())
def decides_on_the_live_policy(batch, stat, state):
    """It penalises tokens that became rarer than they were, as the live policy has it at that moment."""

    def rarer(policy, anchor):
        return torch.where(policy.logprobs < batch.logprobs, -policy.logprobs, 0.0 * policy.logprobs)

    return {"": Penalty(0.1, rarer)}


# Its ratio divides by the old policy also where the batch says that the live one is its own denominator.
row(
    "old_in_its_ratio",
    "live ratio",
    lambda b, s, t: lambda policy, constants: policy.logprobs - b.old_logprobs,
    slot="ratio",
    needs=(),
)
# Its ratio is the mean over the sequence, tokens that somebody dropped included.
row(
    "ratio_of_dropped_tokens",
    ("masked", "live ratio"),
    lambda b, s, t: lambda policy, constants: b.spread(b.sequence_mean(policy.logprobs - b.old_logprobs)),
    slot="ratio",
    needs=(),
)
# It imitates every token a little, whatever it earned.
row(
    "ignores_the_advantage",
    "zero advantage",
    lambda b, s, t: torch.full_like(b.advantages, 0.07),
    slot="bonus",
    needs=(),
)
row("constant_push", "zero advantage", lambda b, s, t: 0.01 * H(b), slot="bonus")


# -- it is not what it means to be -------------------------------------------------------------------------------------


@written("limits")
@dataclass(frozen=True)
class FalseLimit(TokenObjective):
    """It says that a factor of 0 changes nothing, and a factor of 0 takes the gradient of every token."""

    name: ClassVar[str] = "false_limit"

    writes = frozenset({"weight"})
    about = About(no_op_at=(NoOpAt({"factor": 0.0}, "it has no effect."),))
    factor: float = 1.0

    def terms(self, batch, stat, state):
        return Terms(weight=constant(batch, self.factor))


@written("limits")
@dataclass(frozen=True)
class StrictTopShare(TokenObjective):
    """It says that a share of 1 keeps everything, and drops the last token, which is on the threshold."""

    name: ClassVar[str] = "strict_top_share"

    needs = frozenset({"entropies"})
    writes = frozenset({"keep"})
    about = About(no_op_at=(NoOpAt({"share": 1.0}, "all tokens reach the smallest entropy."),))
    share: float = 0.5

    def measure(self, batch):
        return {"entropy": Pool.top(H(batch), self.share)}

    def terms(self, batch, stat, state):
        value = stat.threshold("entropy").value
        return Terms(keep=H(batch) > (-math.inf if value is None else value))


def means(oracle):
    """What a method means to be: the loss of a token, given its ratio, as an independent scalar loop."""

    def loss(rows):
        tokens = [token for row in rows for token in row]
        ratios = [math.exp(max(-20.0, min(20.0, one["live_logprobs"] - one["old_logprobs"]))) for one in tokens]
        return sum(oracle(*pair, tokens) for pair in zip(tokens, ratios, strict=True)) / max(1, len(tokens))

    def name(cls):
        ORACLES[cls.name] = loss
        return cls

    return name


def pull(one, ratio):
    return -one["advantages"] * ratio


@means(lambda one, ratio, all_: max(pull(one, ratio), pull(one, max(1 - 0.05, min(1 + 0.6, ratio)))))
@broken("oracle", slot="bounds", needs=())
def reversed_clip(batch, stat, state):
    """Its lower and upper bound are exchanged."""
    return Bounds(0.6, 0.05)


def top_three_tenths(one, ratio, tokens):
    ranked = sorted((token["entropies"] for token in tokens), reverse=True)
    return pull(one, ratio) * (one["entropies"] >= ranked[math.ceil(0.3 * len(ranked) - 1e-9) - 1])


@means(top_three_tenths)
@broken("oracle", measure=top(0.3))
def strict_share(batch, stat, state):
    """It means the top share with the threshold, and takes what is above it."""
    value = stat.threshold("entropy").value
    return H(batch) > (math.inf if value is None else value)


@means(lambda one, ratio, all_: pull(one, ratio) * (one["entropies"] >= 0.7))
@written("oracle")
@dataclass(frozen=True)
class StrictSetting(TokenObjective):
    """It means entropies of at least ``level``, and takes those above it."""

    name: ClassVar[str] = "strict_setting"

    needs = frozenset({"entropies"})
    writes = frozenset({"weight"})
    level: float = 0.7

    def terms(self, batch, stat, state):
        return Terms(weight=(H(batch) > self.level).to(batch.logprobs.dtype))


@means(lambda one, ratio, all_: pull(one, ratio) * (math.exp(one["logprobs"]) >= 0.2))
@broken("oracle", needs=())
def strict_literal(batch, stat, state):
    """It means probabilities of at least a fifth, and takes those above."""
    return batch.logprobs.exp() > 0.2


@means(lambda one, ratio, all_: pull(one, ratio) * (ratio <= 1.3))
@broken("oracle", slot="gates", needs=())
def open_trust_region(batch, stat, state):
    """It means ratios up to 1.3 inside, and stops those of exactly 1.3."""
    return {"": Gate(lambda ratio, constants: (ratio < 1.3).to(ratio.dtype))}


@means(lambda one, ratio, all_: pull(one, ratio) - 0.5 * (one["advantages"] > 0) * one["live_logprobs"])
@broken("oracle", slot="penalties", needs=("ref_logprobs",))
def zero_is_rewarded(batch, stat, state):
    """It means tokens that were rewarded, and takes those without an advantage too."""
    return {"": Penalty(0.5, lambda policy, anchor: -policy.logprobs, where=batch.advantages >= 0)}


@means(lambda one, ratio, all_: pull(one, ratio) - 0.1 * abs(one["advantages"]) * ratio)
@broken("oracle", slot="bonus", needs=())
def sign_of_the_punished(batch, stat, state):
    """Its bonus is meant to raise what surprised, for either sign, and follows the advantage."""
    return 0.1 * batch.advantages


@means(lambda one, ratio, all_: pull(one, min(ratio, 1.2) if one["advantages"] > 0 else max(ratio, 0.8)))
@broken("oracle", slot="surrogate", needs=())
def forgets_the_minimum(batch, stat, state):
    """It clips the ratio whatever the sign: a punished token above the clip stops pulling."""
    return Surrogate(lambda ratio, constants: ratio.clamp(0.8, 1.2))


# -- sound, and once taken for broken ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class AfterAnEntropy(TokenObjective):
    """It divides by 1 and the entropy of the token before, which is not negative."""

    name: ClassVar[str] = "after_an_entropy"
    needs = frozenset({"entropies"})
    writes = frozenset({"weight"})

    def terms(self, batch, stat, state):
        key = batch.sequence * 10**6 + batch.position
        order = key.argsort()
        before = torch.zeros_like(H(batch))
        follows = key[order][1:] == key[order][:-1] + 1
        before[order[1:][follows]] = H(batch)[order[:-1][follows]]
        return Terms(weight=1 / (1 + before))
