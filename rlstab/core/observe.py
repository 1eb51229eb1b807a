"""A method that is only watched: it measures and reports what it would do, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.comm import Comm
from rlstab.core.compose import Composition, compose
from rlstab.core.fit import check_methods
from rlstab.core.objective import State, TokenObjective, ask
from rlstab.core.stats import Mean, Settled
from rlstab.core.terms import Bounds, Gate, Held, Pull, Terms
from rlstab.errors import Conflict


@final
@dataclass(frozen=True)
class Observe(TokenObjective, combinator=True):
    """``method`` without effect. Make it with :func:`observe`.

    Its metrics are under ``observe_NAME/``: those of the method, and the shares ``would_drop``, ``would_boost``,
    ``would_damp``, ``would_exempt`` and ``would_penalise`` of all tokens, the mean ``would_add`` to the advantage,
    ``would_scale_lr``, and for a trust region the mean of its gate and the share that it would stop, of the tokens that
    pull. Statistics and state are those that it would have.
    """

    method: TokenObjective
    name: ClassVar[str] = "observe"

    def __post_init__(self) -> None:
        check_methods("observe", (self.method,))
        slots = sorted(self.method.writes & {"ratio", "aggregate"})
        if slots:
            raise Conflict(
                f"observe('{self.method.name}'): it defines the {slots[0]} of every token, so there is nothing to "
                f"count.\n  Compare two runs instead, one with it and one without."
            )

    @property
    def label(self) -> str:
        return f"observe_{self.method.label}"

    @property
    def needs(self) -> frozenset[str]:
        return self.method.needs

    @property
    def writes(self) -> frozenset[str]:
        return frozenset({"gates"} if self.method.writes & {"gates", "bounds", "pull"} else ())

    @property
    def signal_options(self) -> Mapping[str, float]:
        return self.method.signal_options

    @property
    def reads_policies(self) -> frozenset[str]:
        return self.method.reads_policies

    @property
    def reads_drift(self) -> frozenset[str]:
        return self.method.reads_drift

    def acting(self) -> Iterator[TokenObjective]:
        yield from ()

    def in_words(self) -> Mapping[str, str]:
        return {"report": f"Measure and report what `{self.method.name}` would do, and change nothing."}

    def init_state(self) -> State:
        return self.method.init_state()

    def settle(self, parts: Sequence[TokenBatch], state: State, comm: Comm) -> tuple[Settled, State]:
        return self.method.settle(parts, state, comm)

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        would = ask(self.method, batch, stat, state)
        gates = {name: replace(gate, acts=False) for name, gate in would.gates.items()}
        if would.bounds is not None:
            gates["clip"] = Gate(_clip(would.bounds), acts=False)
        if would.pull is not None:
            gates["pull"] = Gate(_relative(would.pull), would.pull.whole_sequences, acts=False)
        return Terms(gates=gates, report={**would.report, **_effects(would, batch)})

    def __repr__(self) -> str:
        return f"observe({self.method!r})"


def observe(method: TokenObjective) -> Observe | Composition:
    """Measure and report what ``method`` would do, and change nothing: neither loss nor gradient nor learning rate.

    ``compose(ClipHigher(), observe(STARE()))`` trains by clip-higher alone and logs how many tokens STARE would boost.
    Of a composition every member is observed by itself.

    Raises:
        MethodError: it is no method.
        Conflict: it defines the ratio or the aggregation, of which there is nothing to count.
    """
    if isinstance(method, Composition):
        return compose(*(one if isinstance(one, Observe) else Observe(one) for one in method.members))
    return method if isinstance(method, Observe) else Observe(method)


def _clip(bounds: Bounds) -> Callable[[Tensor, Held], Tensor]:
    def fn(ratio: Tensor, held: Held) -> Tensor:
        return (~torch.stack(list(bounds.stops(ratio, held.advantages).values())).any(0)).to(ratio.dtype)

    return fn


def _relative(pull: Pull) -> Callable[[Tensor, Held], Tensor]:
    def fn(ratio: Tensor, held: Held) -> Tensor:
        return pull.fn(ratio, held) / ratio

    return fn


def _effects(would: Terms, batch: TokenBatch) -> dict[str, Mean]:
    found: dict[str, Mean] = {}
    if would.keep is not None:
        found["would_drop"] = Mean.of(~would.keep)
    if would.weight is not None:
        found |= {"would_boost": Mean.of(would.weight > 1), "would_damp": Mean.of(would.weight < 1)}
    if would.bonus is not None:
        found["would_add"] = Mean.of(would.bonus)
    if would.exempt is not None:
        found["would_exempt"] = Mean.of(would.exempt)
    everywhere = torch.ones_like(batch.sequence, dtype=torch.bool)
    for name, penalty in would.penalties.items():
        if penalty.coefficient != 0:
            where = everywhere if penalty.where is None else penalty.where
            found[f"{name}/would_penalise" if name else "would_penalise"] = Mean.of(where)
    if would.lr_scale is not None:
        found["would_scale_lr"] = Mean.scalar(would.lr_scale)
    return found
