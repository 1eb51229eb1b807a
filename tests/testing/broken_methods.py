"""Deliberately broken methods, each with the laws that must see it; a law that none of them breaks proves nothing.

Each does one thing that published or careful-looking code does, and is sensible otherwise.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstab import Gate, Mean, Penalty, Pool, Terms, TokenBatch, TokenObjective
from rlstab.core.metadata import About, NoOpAt
from rlstab.core.stats import Grouped
from rlstab.core.surrogate import token_log_ratio

#: Each broken method with the laws that it breaks, and the oracles of those that an oracle alone can see.
BROKEN: dict[TokenObjective, frozenset[str]] = {}
ORACLES: dict[str, Callable[[Any], float]] = {}


def H(batch: TokenBatch) -> Tensor:
    return batch.signal("entropies")


def entropies_of(self: Any, batch: TokenBatch) -> dict[str, Mean]:
    return {"entropy": Mean.of(H(batch))}


def top(share: float) -> Any:
    return lambda self, batch: {"entropy": Pool.top(H(batch), share)}


def moments_of(self: Any, batch: TokenBatch) -> dict[str, Mean]:
    entropies = H(batch).double()
    return {"mean": Mean.of(entropies), "square": Mean.of(entropies.square())}


def mean_of(stat: Any, name: str = "entropy", empty: float = 0.0) -> float:
    return stat.mean(name).value if float(stat.mean(name).count) else empty


def value_of(stat: Any, empty: float) -> float:
    value = stat.threshold("entropy").value
    return empty if value is None else value


def constant(batch: TokenBatch, value: float) -> Tensor:
    return torch.full_like(batch.logprobs, value)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def nothing(batch: TokenBatch, stat: Any, state: Any) -> None:
    """For what only measures, or only has a state."""


def void(_: object) -> None:
    """For what is done for its effect."""


def rows(
    *laws: str,
    slot: str = "weight",
    needs: Any = ("entropies",),
    oracle: Any = None,
    settings: Mapping[str, float] | None = None,
    **members: Any,
) -> Callable[..., None]:
    """Make methods of functions that give terms, or what goes into their only slot, by name; None gives no terms.

    A number is the weight of every token; ``members`` are those of the class in addition to ``terms``, or in its place.
    """

    def terms_by(act: Any) -> Any:
        def terms(self: Any, batch: TokenBatch, stat: Any, state: Any) -> Terms:
            given = act(batch, stat, state)
            if slot == "weight" and type(given) in (int, float):
                given = constant(batch, given)
            if isinstance(given, Tensor) and slot != "keep":
                given = given.to(batch.logprobs.dtype)
            return given if isinstance(given, Terms) else Terms(**({} if given is None else {slot: given}))

        return terms

    def add(**acts: Any) -> None:
        for name, act in acts.items():
            body: dict[str, Any] = {"__module__": __name__, "__qualname__": name, "name": name, "terms": terms_by(act)}
            body |= {"needs": frozenset(needs), "writes": frozenset({slot} - {""}), "act": staticmethod(act)}
            body |= {"__annotations__": dict.fromkeys(settings or (), float), **(settings or {}), **members}
            globals()[name] = cls = type(name, (TokenObjective,), body)
            BROKEN[cls()] = frozenset(laws)
            if oracle:
                ORACLES[name] = loss_of(oracle)

    return add


def broken(*laws: str, **options: Any) -> Callable[[Any], Any]:
    """The same for a function of several lines, which is a class from then on."""

    def make(act: Any) -> Any:
        rows(*laws, **options)(**{act.__name__: act})
        return globals()[act.__name__]

    return make


# -- the outcome depends on the cut, the order or the padding ----------------------------------------------------------


def corrected_variance(stat):
    count = float(stat.mean("mean").count)
    variance = max(0.0, stat.mean("square").value - stat.mean("mean").value ** 2) if count else 0.0
    return variance * count / max(1.0, count - 1)


rows("split")(
    # its mean is that of the batch at hand: a micro-batch gives another one
    local_mean=lambda b, s, t: (H(b) + 0.1) / (H(b) + 0.1).mean() if len(b) else None,
    # its metric is the mean of the part, reported as if every part weighed the same
    unmerged_metric=lambda b, s, t: Terms(report={"entropy": Mean.scalar(float(H(b).mean()))} if len(b) else {}),
    # it compares with the mean of the group in the batch at hand, and groups are torn apart
    baseline_of_the_part=lambda b, s, t: 1 / (1 + Grouped.of(g := b.spread(b.group_ids), H(b)).mean(g)),
)
# A part without tokens counts as one: a rank that has nothing would move the mean.
rows("split", measure=lambda self, b: {"entropy": Mean.of(H(b) if len(b) else torch.zeros(1))})(
    counts_empty_parts=lambda b, s, t: 1 / (1 + mean_of(s))
)


def over_the_part(sequence, counted, num_sequences, totals):
    """It averages over the tokens of each micro-batch, not over those of the optimizer step."""
    return torch.full(counted.shape, 1.0 / max(1, int(counted.sum())), dtype=torch.float64)


rows("split", slot="aggregate", needs=())(aggregate_of_the_part=lambda b, s, t: over_the_part)
# Its learning rate is that of the tokens at hand, and every rank has others.
rows("runs", slot="lr_scale")(learning_rate_of_the_part=lambda b, s, t: 1 / (1 + float(H(b).sum())))


@broken("split", "permutation", measure=top(0.4))
def ties_by_order(batch, stat, state):
    """It takes exactly k tokens, and of those that are equal at the threshold the first in memory."""
    entropies, threshold = H(batch), stat.threshold("entropy")
    chosen = torch.zeros_like(entropies)
    chosen[entropies.sort(descending=True, stable=True).indices[: threshold.nominal]] = 1.0
    return chosen * threshold.reached(entropies)


# It takes the order in which tokens stand in memory for their position in the response.
rows("permutation")(place_by_order=lambda b, s, t: 1 / (b.sequence[:, None] == b.sequence).tril().sum(-1))
# Its variance divides by n - 1, next to an order statistic that differs where every value occurs twice.
rows("replication", measure=lambda self, b: {**moments_of(self, b), "unused": Pool.quantile(H(b), 0.37)})(
    bessel_beside_a_pool=lambda b, s, t: 1 / (1 + corrected_variance(s)),
)


def mean_constant(batch, constants):
    return batch.spread(batch.sequence_mean(constants.anchor.logprobs)).exp()


# Its gate reads the whole sequence and does not say so, so that some of it was never computed.
rows("live rows", slot="gates", needs=())(
    gate_of_other_tokens=lambda b, s, t: {"": Gate(lambda ratio, constants: mean_constant(b, constants))},
    gate_of_others_beyond_200=lambda b, s, t: {
        "": Gate(lambda _, constants: torch.where(b.spread(b.lengths) > 200, mean_constant(b, constants), 1.0))
    },
)
# It reads the layout of the padded tensors, which a method cannot see.
rows("runs")(
    counts_padding=lambda b, s, t: 1 / (1 + math.prod(b.padded_shape)),
)


# -- later steps -------------------------------------------------------------------------------------------------------


def counting(self, state, stat):
    return {"n": state["n"] + 1}


def counts_in_place_later(self, state, stat):
    if state["n"] >= 4:
        state["n"] += 1
    return {"n": state["n"] + 1}


rows("later steps", init_state=lambda self: {"n": 0}, advance=counting)(
    local_after_four_steps=lambda b, s, t: (H(b) + 0.1) / (H(b) + 0.1).mean() if t["n"] >= 4 and len(b) else None
)
rows("later steps", init_state=lambda self: {"n": 0}, advance=counts_in_place_later)(
    in_place_from_step_four=lambda b, s, t: 1 / (1 + t["n"])
)
# Right for one sequence and for three, and so under any one cut of three into single sequences.
rows("later steps", needs=(), init_state=lambda self: {"n": 0}, advance=counting)(
    pairs_after_four_steps=lambda b, s, t: 0.5 if t["n"] >= 4 and b.num_sequences == 2 else 1.0
)
# Each step is right to the last bit of the state before it, which it multiplies.
rows(
    "later steps",
    measure=entropies_of,
    init_state=lambda self: {"seen": 0.3},
    advance=lambda self, state, stat: {"seen": 16 * (state["seen"] + mean_of(stat)) % 1.0},
)(multiplies_the_last_bit=nothing)
# Its state holds what no checkpoint can hold, once it has seen some steps.
rows(
    "later steps",
    init_state=lambda self: {"n": 0, "window": 0.0},
    advance=lambda self, state, stat: {"n": state["n"] + 1, "window": (0.0, 1.0) if state["n"] >= 2 else 0.0},
)(tuple_from_step_three=nothing)

# -- it writes to what is not its own ----------------------------------------------------------------------------------

rows("pure", needs=("entropies", "sum_p_sq"))(
    clamps_its_input=lambda b, s, t: 1 / (1 + b.advantages.clamp_(-1e6, 1e6).abs()),
    caches_on_the_batch=lambda b, s, t: void(b.extra.__setitem__("cached", H(b))),
    hides_on_the_batch=lambda b, s, t: void(object.__setattr__(b, "cached", H(b))),
)
rows("pure", slot="gates", needs=())(
    # its gate limits the advantages of the loss in place
    scales_what_is_held=lambda b, s, t: {"": Gate(lambda ratio, constants: constants.advantages.clamp_(-1e9, 1e9) * 0)},
)


# -- it uses what a whole process shares, or what belongs to one -------------------------------------------------------

rows("pure")(
    global_randomness=lambda b, s, t: torch.rand(len(b)) >= 0,
)


rows("process")(
    sets_the_environment=lambda b, s, t: os.environ.update(RLSTAB_SEEN="1"),
    # its seed is the hash of its name, which Python salts anew in each process
    hash_of_its_name=lambda b, s, t: hash("hash_of_its_name") % 1000 / 1000,
    rank_zero_acts=lambda b, s, t: 0.5 if os.environ.get("RANK", "0") == "0" else 1.0,
    rank_of_torch=lambda b, s, t: 1 / (1 + (torch.distributed.is_initialized() and torch.distributed.get_rank())),
)


@broken("process")
def order_of_a_set(batch, stat, state):
    """It gives factors to bands of entropy in the order of a set of names."""
    bands = ("lowest", "low", "rising", "middle", "high", "highest")
    factors = {band: 1.0 + place for place, band in enumerate(set(bands))}
    band = torch.bucketize(H(batch), torch.tensor([0.1, 0.3, 0.6, 1.0, 2.0], dtype=torch.float64))
    return torch.tensor([factors[name] for name in bands])[band]


# -- it remembers outside of its state ---------------------------------------------------------------------------------

MEMORY: dict[Any, float] = {}


rows("process", measure=entropies_of)(
    # a variable of its module: the mean entropy of the first optimizer step, or of the first with so many tokens
    calibrates_once=lambda b, s, t: 1 / MEMORY.setdefault("entropy", 1 + s.mean("entropy").value),
    cached_by_shape=lambda b, s, t: 1 / (1 + MEMORY.setdefault(int(s.mean("entropy").count), s.mean("entropy").value)),
)


# -- it reads what it does not declare, or cannot be saved -------------------------------------------------------------

rows("declared")(
    # it weighs by the log-prob at the start of the step, and says that it reads none
    undeclared_policy=lambda b, s, t: b.logprobs.exp(),
)
# Its penalty reads live entropies and does not say so, and they may not be there.
rows("declared", "live rows", slot="penalties", needs=())(
    undeclared_live_read=lambda b, s, t: {"": Penalty(0.1, lambda policy, anchor: -policy.signal("entropies"))}
)


class HiddenSetting(TokenObjective):
    """Its repr leaves out a setting."""

    name = "hidden_setting"
    writes = {"weight"}
    factor: float = field(default=1.0, repr=False)

    def terms(self, batch, stat, state):
        return Terms(weight=constant(batch, self.factor))


BROKEN[HiddenSetting(factor=0.5)] = frozenset({"serialises"})

# -- its numbers are no numbers, or too coarse -------------------------------------------------------------------------

rows("finite")(inverse_probability=lambda b, s, t: 1e-35 / (b.logprobs * 10).exp())
# It takes the exponential of a log-ratio as it is, and float32 ends at e^88.
rows("finite", slot="gates", needs=())(
    unclamped_exp=lambda b, s, t: {
        "": Gate(lambda ratio, constants: 1 + 1e-9 * (b.logprobs - constants.anchor.logprobs).square().exp())
    }
)


# It divides by the mean over rewarded tokens, and there may be none.
rows("runs", measure=lambda self, b: {"entropy": Mean.of(H(b), b.advantages > 0)})(
    mean_of_nothing=lambda b, s, t: 1.0 + s.mean("entropy").value
)
rows("runs", needs=())(
    # it gives a weight for each response, not for each token
    wrong_shape=lambda b, s, t: torch.ones(b.num_sequences + 1),
)
rows("precision")(
    brain_float=lambda b, s, t: (1 + H(b)).bfloat16(),
)


# -- its gradient is not that of its loss, or is where none may be -----------------------------------------------------


def ratio_by(change):
    """The log-ratio of each token, changed."""
    return lambda b, s, t: lambda policy, constants: change(token_log_ratio(policy, constants.anchor, b))


rows("masked", slot="ratio", needs=())(
    # of long responses it is the mean over the sequence, dropped tokens included
    ratio_of_dropped_beyond_40=lambda b, s, t: ratio_by(
        lambda gap: torch.where(b.spread(b.lengths) > 40, b.spread(b.sequence_mean(gap)), gap)
    )(b, s, t)
)
rows("gradcheck", slot="ratio", needs=())(
    # half of its gradient where the ratio is above 3
    wrong_above_three=ratio_by(lambda gap: torch.where(gap > math.log(3.0), 0.5 * gap + 0.5 * gap.detach(), gap)),
    # none where it is exactly 1: in the first optimizer step after a rollout, on every token
    still_at_one=ratio_by(lambda gap: gap.sign().detach() * gap.abs()),
)


def penalty_by(value):
    """A penalty on a function of the live log-probs and the batch."""
    return lambda b, s, t: {"": Penalty(0.1, lambda policy, anchor: value(policy.logprobs, b))}


rows("gradcheck", slot="penalties", needs=("ref_logprobs",))(
    # it penalises tokens that became rarer than they were, as the live policy has it at that moment
    decides_on_the_live_policy=penalty_by(lambda live, b: torch.where(live < b.logprobs, -live, 0.0 * live)),
)
rows("zero advantage", slot="bonus")(
    # it imitates every token a little, whatever it earned
    ignores_the_advantage=lambda b, s, t: torch.full_like(b.advantages, 0.07),
)

# -- it is not what it means to be -------------------------------------------------------------------------------------


# It says that a factor of 0 changes nothing, and a factor of 0 takes the gradient of every token.
rows(
    "limits",
    settings={"factor": 1.0},
    about=About(no_op_at=(NoOpAt({"factor": 0.0}, "it has no effect."),)),
    terms=lambda self, b, s, t: Terms(weight=constant(b, self.factor)),
)(false_limit=nothing)
# It says that a share of 1 keeps everything, and drops the last token, which is on the threshold.
rows(
    "limits",
    slot="keep",
    settings={"share": 0.5},
    about=About(no_op_at=(NoOpAt({"share": 1.0}, "all tokens reach the smallest entropy."),)),
    measure=lambda self, b: {"entropy": Pool.top(H(b), self.share)},
)(strict_top_share=lambda b, s, t: H(b) > value_of(s, -math.inf))


def loss_of(oracle):
    """The loss of what a method means to be, given that of a token and its ratio, as an independent scalar loop."""

    def loss(rows):
        tokens = [token for row in rows for token in row]
        ratios = [math.exp(max(-20.0, min(20.0, token["live_logprobs"] - token["old_logprobs"]))) for token in tokens]
        return sum(oracle(*pair, tokens) for pair in zip(tokens, ratios, strict=True)) / max(1, len(tokens))

    return loss


def pull(token, ratio):
    return -token["advantages"] * ratio


def top_three_tenths(token, ratio, tokens):
    ranked = sorted((other["entropies"] for other in tokens), reverse=True)
    return pull(token, ratio) * (token["entropies"] >= ranked[math.ceil(0.3 * len(ranked) - 1e-9) - 1])


# It means the top share with the threshold, and ratios up to 1.3; and stops before.
rows("oracle", measure=top(0.3), oracle=top_three_tenths)(strict_share=lambda b, s, t: H(b) > value_of(s, math.inf))
rows("oracle", slot="gates", oracle=lambda token, ratio, all_: pull(token, ratio) * (ratio <= 1.3))(
    open_trust_region=lambda b, s, t: {"": Gate(lambda ratio, constants: (ratio < 1.3).to(ratio.dtype))}
)
# It means tokens that were rewarded, and takes those without an advantage too.
rows(
    "oracle",
    slot="penalties",
    oracle=lambda token, ratio, all_: pull(token, ratio) - 0.5 * (token["advantages"] > 0) * token["live_logprobs"],
)(zero_is_rewarded=lambda b, s, t: {"": Penalty(0.5, lambda policy, anchor: -policy.logprobs, where=b.advantages >= 0)})


# -- it acts by the process or thread that it is in, or keeps its memory -----------------------------------------------

BUFFERS: dict[int, Tensor] = {}


def in_a_buffer(batch, stat, state):
    """It writes its weights into memory that it used before; a plan holds those of several parts."""
    return BUFFERS.setdefault(len(batch), torch.empty(len(batch), dtype=torch.float64)).copy_(1 / (1 + H(batch)))


rows("split")(
    reuses_its_memory=in_a_buffer,
)
# It takes what is near to 0 for 0, and how near depends on the dtype.
rows("precision")(below_rounding=lambda b, s, t: H(b) > torch.finfo(H(b).dtype).eps * 3000)


# -- ids are more than names -------------------------------------------------------------------------------------------


rows("ids", needs=())(
    # every second response is spared: by what its id is, not by what it says
    even_ids=lambda b, s, t: b.spread(1 + 0.5 * (b.sequence_ids % 2)),
    # ids that meet: as float32 above 2^24, as int32 above 2^31
    groups_as_float32=lambda b, s, t: size_by(b.group_ids.float(), b),
    ids_as_int32=lambda b, s, t: size_by(b.sequence_ids.to(torch.int32), b),
)


def size_by(keys, batch):
    """How many responses share the key, those at hand."""
    index = keys.unique(return_inverse=True)[1]
    return batch.spread(torch.bincount(index, minlength=1)[index].double())


# -- a state that a checkpoint does not give back, or that grows -------------------------------------------------------


def grown(of: Callable[[Any, Any], Any]) -> Any:
    return lambda self, state, stat: {"seen": of(state["seen"], stat)}


def with_attribute(value: Tensor) -> Tensor:
    value.steps = 1
    return value


for name, first, after in (
    ("numpy_scalar", 0.0, lambda seen, stat: np.float64(mean_of(stat))),
    ("number_as_key", {}, lambda seen, stat: {**seen, 1: mean_of(stat)}),
    ("attribute_of_a_tensor", torch.zeros(2), lambda seen, stat: with_attribute(seen + mean_of(stat))),
):
    rows(
        "serialises", measure=entropies_of, init_state=lambda self, first=first: {"seen": first}, advance=grown(after)
    )(**{name: lambda b, s, t: None})
for name, first, after in (
    ("history_in_a_tensor", torch.zeros(0), lambda seen, stat: torch.cat([seen, seen.new_full((1,), mean_of(stat))])),
    ("journal", "", lambda seen, stat: seen + f"{mean_of(stat):.2f} "),
):
    rows(
        "later steps", measure=entropies_of, init_state=lambda self, first=first: {"seen": first}, advance=grown(after)
    )(**{name: lambda b, s, t: None})

# -- declared and never used, or used and not declared -----------------------------------------------------------------

rows("used", needs=("entropies", "ref_logprobs"))(reference_for_nothing=lambda b, s, t: 1 / (1 + H(b)))
rows("used", needs=("my_signal", "entropies"))(own_signal_for_nothing=lambda b, s, t: 1 / (1 + H(b)))
rows("used", needs=(), live_needs=frozenset({"entropies"}))(live_entropy_for_nothing=lambda b, s, t: 0.5)
rows("used", writes=frozenset({"weight", "bounds"}))(slot_for_nothing=lambda b, s, t: 1 / (1 + H(b)))
rows("declared", needs=())(
    attribute_not_declared=lambda b, s, t: 1 / (1 + b.entropies),
)

# -- what only a large optimizer step shows ----------------------------------------------------------------------------

rows("split", needs=())(
    local_beyond_9000_tokens=lambda b, s, t: 1 / len(b) if len(b) > 9000 else 1.0,
)
