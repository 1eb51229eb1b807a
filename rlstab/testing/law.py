"""What a law is, and what laws share: the case they look at, partners to compose with, the insides of terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeAlias

from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.compose import walk
from rlstab.core.loss import loss_of_part
from rlstab.core.objective import State, TokenObjective
from rlstab.core.plan import Plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean, Settled
from rlstab.core.terms import Bounds, Penalty, Terms
from rlstab.testing.elsewhere import Sent
from rlstab.testing.rank_processes import Processes
from rlstab.testing.steps import Step

#: ``sharp`` steps have ties, ratios far from 1, and values on the thresholds of the method; ``smooth`` ones are without
#: the values on thresholds; ``extreme`` ones go as far as numbers can go.
Draws: TypeAlias = Literal["sharp", "smooth", "extreme"]


class NotHere(Exception):
    """A law has nothing to say about this method; the text says why."""


@dataclass(frozen=True)
class Case:
    """What a law is checked on: two optimizer steps in a row, a seed, and processes for ranks or threads.

    The second step is the first again where the law looks at one step only. ``sent`` is the method for another process.
    """

    first: Step
    second: Step
    seed: int
    processes: Processes | None = None
    sent: Sent | None = None


@dataclass(frozen=True)
class Law:
    """One law.

    Attributes:
        name: by which an exception is declared: ``exceptions = {"replication": "why"}`` on the class.
        says: one sentence.
        check: raises :class:`BrokenLaw`, or :class:`NotHere`.
        draws: the steps it is checked on.
        ranks: it runs a step over ranks, which can be real processes.
        second: it looks at two different steps; drawing the second takes time.
        all_edges: it sees every threshold of the method hit exactly, not only some.
    """

    name: str
    says: str
    check: Callable[[TokenObjective, Case], None]
    draws: Draws = "sharp"
    ranks: bool = False
    second: bool = False
    all_edges: bool = False


class Doubling(TokenObjective):
    """A partner that writes weights."""

    name = "law_partner_doubling"
    writes = {"weight"}

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(weight=1.0 + 0.1 * (batch.position % 3).to(batch.logprobs.dtype))


class Dropping(TokenObjective):
    """A partner that drops tokens."""

    name = "law_partner_dropping"
    writes = {"keep"}

    def chosen(self, batch: TokenBatch) -> Tensor:
        return batch.uniform(3) < 0.6

    def terms(self, batch: TokenBatch, stat: Settled, state: State) -> Terms:
        return Terms(keep=self.chosen(batch))


def methods_of(objective: TokenObjective) -> list[TokenObjective]:
    """The methods inside, those that are only observed too."""
    return [leaf.method for leaf in walk(objective, observed=True)]


def policy_part(plan: Plan, leaves: dict[str, Tensor]) -> None:
    """Backward through the policy term of the only part alone."""
    part = plan.part(0)
    bare = replace(part, terms=replace(part.terms, penalties={}))
    loss_of_part(bare, PolicyOutputs(**leaves), None, plan.kept, plan.everything).loss.backward()


def tensors_of(batch: TokenBatch) -> list[tuple[str, Tensor]]:
    """All tensors of a batch by name."""
    named = [(one.name, getattr(batch, one.name)) for one in fields(batch)]
    return [(name, one) for name, one in named if isinstance(one, Tensor)] + sorted(batch.extra.items())


def leaves_of(data: Any, place: str = "state") -> Iterator[tuple[str, Any]]:
    """What is at the ends of mappings and dataclasses, each with its place."""
    if isinstance(data, Mapping):
        for key, one in data.items():
            yield from leaves_of(one, f"{place}['{key}']")
    elif isinstance(data, Terms | Penalty | Bounds | Mean) or (is_dataclass(data) and not isinstance(data, type)):
        for one in fields(data):
            yield from leaves_of(getattr(data, one.name), f"{type(data).__name__}.{one.name}")
    else:
        yield place, data
