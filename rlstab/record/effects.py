"""What an optimizer step did to each token, and which method did it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from rlstab.config import load_objective
from rlstab.config.user_code import code_in, portable, relocated
from rlstab.core.batch import TokenBatch
from rlstab.core.compose import Composition, compose, walk
from rlstab.core.loss import Part, held_ratio
from rlstab.core.objective import State, TokenObjective, no_fit_warnings
from rlstab.core.plan import Plan, member_terms
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Settled
from rlstab.core.surrogate import bounded_exp, token_log_ratio
from rlstab.core.terms import Constants, Gate, Terms, merge_terms
from rlstab.record.step import DID, Step

#: The actions that a method can take on a token.
ACTIONS = ("dropped", "boosted", "damped", "clipped", "regularised", "unclipped")
#: A gate or pull that changes a token by no more than this leaves it alone: a soft gate is seldom exactly 1.
ALIKE = 1e-3


@dataclass(frozen=True, eq=False)
class MethodTrace:
    """What one method did to the ``n`` tokens of a part.

    Attributes:
        name: what the method is called.
        actions: ``(n,)`` bool by action, those that its terms can take; see :func:`trace`.
        weight: ``(n,)`` its weight, or None.
        bonus: ``(n,)`` what it adds to the advantage, or None.
        gate: ``(n,)`` product of its gates, and of its surrogate divided by the ratio; 1 where they do not act, None if
            it has neither.
    """

    name: str
    actions: Mapping[str, Tensor]
    weight: Tensor | None
    bonus: Tensor | None
    gate: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """What a step did to the ``n`` tokens of a part.

    Attributes:
        ratio: ``(n,)`` the ratio of the loss; NaN where the trainer did not compute the live log-prob, see
            :func:`trace`.
        methods: what each method did, by the prefix of its metrics.
    """

    ratio: Tensor
    methods: Mapping[str, MethodTrace]

    @property
    def weight(self) -> Tensor:
        """``(n,)`` product of the methods' weights."""
        weights = [method.weight for method in self.methods.values() if method.weight is not None]
        return reduce(torch.mul, weights, torch.ones_like(self.ratio))

    @property
    def gate(self) -> Tensor | None:
        """``(n,)`` product over the methods' gates and surrogates, None if no method has any."""
        gates = [method.gate for method in self.methods.values() if method.gate is not None]
        return reduce(torch.mul, gates) if gates else None

    @property
    def kept(self) -> Tensor:
        """``(n,)`` bool, the tokens that no method drops."""
        return ~self.any_did("dropped")

    @property
    def clipped(self) -> Tensor:
        """``(n,)`` bool, the tokens that are stopped: by a gate or surrogate of 0, or beyond a bound in the direction
        in which they pull, as the metrics ``ratio/clipped_high``, ``ratio/clipped_low`` and ``ratio/clipped_dual``
        count.
        """
        return self.any_did("clipped")

    def any_did(self, action: str) -> Tensor:
        """``(n,)`` bool, the tokens on which some method took this action."""
        taken = [method.actions[action] for method in self.methods.values() if action in method.actions]
        return reduce(torch.logical_or, taken, torch.zeros_like(self.ratio, dtype=torch.bool))


@torch.no_grad()
def trace(plan: Plan, which: int | TokenBatch | Part, policy: PolicyOutputs) -> Trace:
    """Trace one of the parts of a plan.

    A method has *dropped* a token that it does not keep; *boosted* it by a weight above 1, by a bonus that makes it
    pull harder in the direction of its advantage, or by a gate or surrogate above its ratio; *damped* it by a weight
    below 1, by a bonus against that direction, or by a gate or surrogate below its ratio; *clipped* it if the bounds,
    gate or surrogate that stopped it belong to the method; *regularised* it if a penalty of the method is on it;
    *unclipped* it if the method removed its trust region. Gates and surrogates count where a token pulls, is not
    unclipped, and is changed by more than :data:`ALIKE`.

    Args:
        plan: the decisions of the step.
        which: number of the part, its batch, or a piece.
        policy: live outputs for its tokens, read without gradient. A trainer may skip the forward of tokens that the
            loss does not read and give the evidence instead: their ratio is NaN. Nothing else depends on it.
    """
    part, live = plan.part(which), policy.constant()
    batch, ratio = part.batch, held_ratio(part, live)
    constants, bound = Constants(live, part.advantages, part.kept), part.bound
    stops = [] if part.terms.bounds is None else part.terms.bounds.stops(ratio, part.advantages).values()
    beyond_bounds = reduce(torch.logical_or, stops, torch.zeros_like(bound)) & bound
    methods = {}
    for key, member in member_terms(plan, part).items():
        factor = _gate(member.terms, ratio, constants, bound)
        actions = _actions(member.terms, batch.advantages, beyond_bounds, factor)
        methods[key] = MethodTrace(member.name, actions, member.terms.weight, member.terms.bonus, factor)
    read = torch.stack(list(plan.live_rows(part).values())).any(0)
    return Trace(torch.where(_computed(live, batch) | read, ratio, torch.nan), methods)


def _computed(live: PolicyOutputs, batch: TokenBatch) -> Tensor:
    """``(n,)`` bool: the live log-prob was computed and is not the evidence, in a step in which any differ."""
    moved = live.logprobs != batch.logprobs
    return moved if bool(moved.any()) else ~moved


def _gate(terms: Terms, ratio: Tensor, constants: Constants, bound: Tensor) -> Tensor | None:
    factors = [gate.fn(ratio, constants) for gate in terms.gates.values() if gate.acts]
    if terms.surrogate is not None:
        factors.append(terms.surrogate.fn(ratio, constants) / ratio)
    if not factors:
        return None
    return torch.where(bound, torch.stack([factor.to(ratio.dtype) for factor in factors]).prod(0), 1.0)


def _actions(terms: Terms, advantages: Tensor, beyond: Tensor, gate: Tensor | None) -> dict[str, Tensor]:
    actions: dict[str, Tensor] = {}

    def add(action: str, mask: Tensor) -> None:
        actions[action] = actions[action] | mask if action in actions else mask

    if terms.keep is not None:
        add("dropped", ~terms.keep)
    if terms.weight is not None:
        add("boosted", terms.weight > 1)
        add("damped", terms.weight < 1)
    if terms.bonus is not None:
        along = torch.where(advantages == 0, terms.bonus.abs(), terms.bonus * advantages.sign())
        add("boosted", along > 0)
        add("damped", along < 0)
    if terms.bounds is not None:
        add("clipped", beyond)
    if gate is not None:
        add("boosted", gate > 1 + ALIKE)
        add("damped", (gate < 1 - ALIKE) & (gate != 0))
        add("clipped", gate == 0)
    for penalty in terms.penalties.values():
        if penalty.coefficient != 0:
            add("regularised", torch.ones_like(beyond) if penalty.where is None else penalty.where)
    if terms.unclipped is not None:
        add("unclipped", terms.unclipped)
    return actions


# -- from a record -----------------------------------------------------------------------------------------------------


def what_methods_did(plan: Plan, which: int | TokenBatch | Part, policy: PolicyOutputs) -> dict[str, Tensor]:
    """What a record must hold of a part for :func:`traces_of` to say what each method did; see :data:`DID`.

    Empty if all methods ship with rlstab, since these are planned again. A record never names code that is run, so it
    holds what user-defined methods did.
    """
    if all(type(leaf.method).__module__.startswith("rlstab.") for leaf in walk(plan.objective, observed=True)):
        return {}
    traced = trace(plan, which, policy)
    tensors = {f"{DID}ratio": traced.ratio}
    for key, method in traced.methods.items():
        columns = {**method.actions, "weight": method.weight, "bonus": method.bonus, "gate": method.gate}
        named = key if key == method.name else f"{key}:{method.name}"
        tensors |= {f"{DID}{named}/{name}": column.float() for name, column in columns.items() if column is not None}
    return tensors


def objective_of(step: Step) -> tuple[Composition, list[str]]:
    """The objective in the settings of a recorded loss, and the names of its methods whose code is not loaded.

    What these did stands in for them. Code is loaded only from files in :attr:`Step.code`.

    Raises:
        RlstabError: it is not an objective.
    """
    data = [] if step.header.loss is None else relocated(step.header.loss.settings.get("objective", []), step.code)
    ready, unloaded = list[Any](), list[Any]()
    for item in data if isinstance(data, list) else [data]:
        if all(text.rpartition(":")[0] in step.code for text in code_in(item)):
            ready.append(item)
        elif not (isinstance(item, Mapping) and item.get("name") == "observe"):
            unloaded.append(item)
    with no_fit_warnings():
        objective = load_objective(ready) if ready or not unloaded else compose()
        keys = {*objective.keyed, ""}
        columns = [name for name in step.tensors if _member_in(name) not in keys]
        return compose(objective, *([_stand_in(columns)] if unloaded else [])), code_in(portable(unloaded))


def _member_in(name: str) -> str:
    """The key of the member of a composition that a tensor is about; empty if it is about none."""
    return re.split("[/:]", name.removeprefix(DID))[0] if name.startswith(DID) and name.count("/") > 1 else ""


def _constant(values: Tensor) -> dict[str, Gate]:
    return {"": Gate(lambda ratio, constants: values)}


#: The name of the method that stands in for those whose code is not loaded.
RECORDED = "recorded"
#: By the end of the name of a tensor: the field of Terms by which a stand-in has the same gradient, and what is in it.
_FIELDS: Mapping[str, tuple[str, Callable[[Tensor], Any]]] = {
    "dropped": ("keep", lambda marks: marks == 0),
    "weight": ("weight", lambda values: values),
    "bonus": ("bonus", lambda values: values),
    "gate": ("gates", _constant),
    "clipped": ("gates", lambda marks: _constant(1 - marks)),
    "unclipped": ("unclipped", lambda marks: marks > 0),
}


def _stand_in(columns: Sequence[str]) -> TokenObjective:
    fields = {column: _FIELDS[end] for column in columns if (end := column.rpartition("/")[2]) in _FIELDS}

    class Recorded(TokenObjective):
        """What methods did whose code is not loaded; their penalties are missing."""

        name = RECORDED
        needs = frozenset(columns)
        writes = frozenset(field for field, _ in fields.values())

        def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
            parts = {column: Terms(**{field: read(batch.signal(column))}) for column, (field, read) in fields.items()}
            return merge_terms({re.sub(r"\W", "_", column): part for column, part in parts.items()})

    return Recorded()


def recorded(step: Step) -> Trace:
    """The trace in the tensors of a step; without methods if none was recorded."""
    columns: dict[str, dict[str, Tensor]] = {}
    for name, values in sorted(step.tensors.items()):
        if name.startswith(DID):
            method, _, column = name.removeprefix(DID).rpartition("/")
            columns.setdefault(method, {})[column] = values[step.mask]
    ratio = columns.pop("", {}).get("ratio")
    methods = {}
    for name, recorded_of in columns.items():
        key, _, method = name.partition(":")
        actions = {action: recorded_of[action] > 0 for action in ACTIONS if action in recorded_of}
        methods[key] = MethodTrace(method or key, actions, *map(recorded_of.get, ("weight", "bonus", "gate")))
    if ratio is None:  # that of each single token, where the trainer computed the live log-prob
        live = step.live.constant()
        live = live if live.log_support_mass is None else live.over_support()
        ratio = bounded_exp(token_log_ratio(live, live, step.batch))
        ratio = torch.where(_computed(live, step.batch), ratio, torch.nan)
    return Trace(ratio, methods)
