"""What a method asks for: a record with a merge law for each field, so that the order cannot change a loss."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from rlstab.core.method_settings import Spelled
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean

TokenFunction: TypeAlias = Callable[[PolicyOutputs, PolicyOutputs], Tensor]


@dataclass(frozen=True, eq=False)
class Penalty(Spelled):
    """``coefficient * fn(policy, anchor)`` on some tokens, aggregated over all tokens.

    Attributes:
        coefficient: times the loss that is minimised; negative pays for what ``fn`` measures.
        fn: ``(policy, anchor) -> (n,)``; ``anchor`` holds the policy's values as constants.
        where: ``(n,)`` bool, None is every token. Value and gradient on other tokens do not count.
        reads: live outputs that ``fn`` reads beyond ``logprobs``.
        aggregate: how its values are summed, such as :func:`~rlstab.core.loss.token_mean`; None is as the loss.
    """

    coefficient: float
    fn: TokenFunction
    where: Tensor | None = None
    reads: frozenset[str] = frozenset()
    aggregate: Aggregate | None = None

    @classmethod
    def of_signal(cls, name: str, coefficient: float, aggregate: Aggregate | None = None) -> Penalty:
        """A penalty on the live value of a signal itself, on every token."""
        return cls(coefficient, lambda policy, anchor: policy.signal(name), None, frozenset({name}), aggregate)


@dataclass(frozen=True, eq=False)
class Bounds(Spelled):
    """The trust region of the ratio: inside ``[1 - low, 1 + high]`` a token pulls, beyond it cannot pull further.

    Attributes:
        low, high: numbers, or ``(n,)`` tensors for a range per token.
        dual: upper bound of the ratio where the advantage is negative (dual clip), or None.
    """

    low: float | Tensor
    high: float | Tensor
    dual: float | None = None

    def stops(self, ratio: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        """``(n,)`` bools: the tokens stopped at ``high``, at ``low`` and, with a dual clip, at ``dual``."""
        rewarded, punished = advantages > 0, advantages < 0
        stopped = {"high": rewarded & (ratio > 1 + self.high), "low": punished & (ratio < 1 - self.low)}
        return stopped if self.dual is None else {**stopped, "dual": punished & (ratio > self.dual)}


@dataclass(frozen=True, eq=False)
class Constants:
    """Constants in the loss of a part, which a ratio and a gate may read in addition to the evidence.

    Attributes:
        anchor: the live outputs as constants.
        advantages: ``(n,)``, bonuses included.
        keep: ``(n,)`` bool, the tokens that no method drops.
    """

    anchor: PolicyOutputs
    advantages: Tensor
    keep: Tensor

    def select(self, where: Tensor) -> Constants:
        """The tokens where the ``(n,)`` bool is True."""
        return Constants(self.anchor.select(where), self.advantages[where], self.keep[where])


#: ``(policy, constants) -> (n,)`` log-ratio; the loss clamps and exponentiates it.
Ratio: TypeAlias = Callable[[PolicyOutputs, Constants], Tensor]


@dataclass(frozen=True, eq=False)
class Gate(Spelled):
    """A factor on the gradient of a token: with gates ``g`` it is ``g * ratio * advantage`` times that of its log-prob.

    SAPO, MASPO, CPPO and DRPO each are such a factor, so they compose. Their gradients are those of the published
    surrogates. The value of the loss, ``-g * ratio * advantage``, differs for some of them.

    Attributes:
        fn: ``(ratio, constants) -> (n,)``, finite; ``ratio`` is the ``(n,)`` ratio as a constant. Called without
            gradient.
        whole_sequences: it reads the live outputs of other tokens of the sequence.
        acts: False measures and reports the gate and leaves the loss alone.
        where: ``(n,)`` bool, the tokens that its metrics count; None is every token.
    """

    fn: Callable[[Tensor, Constants], Tensor]
    whole_sequences: bool = False
    acts: bool = True
    where: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Surrogate(Spelled):
    """Replaces the ratio in the gradient: a token pulls with ``fn(ratio, constants) * advantage``.

    CISPO's capped ratio, VESPO's kernel of the whole sequence, and the surrogates of DPPO, CE-GPPO and ASPO each are
    one. Two of them would replace the ratio twice, and a trust region by ``bounds`` would be a second surrogate: a
    composition has at most one of these. An unclipped token pulls with its ratio. The value of the loss is
    ``-fn * advantage``.

    Attributes:
        fn: ``(ratio, constants) -> (n,)``, finite; ``ratio`` is the ``(n,)`` ratio as a constant. Called without
            gradient.
        whole_sequences: it reads the live outputs of other tokens of the sequence.
    """

    fn: Callable[[Tensor, Constants], Tensor]
    whole_sequences: bool = False


@dataclass(frozen=True)
class Totals:
    """Counts over the whole optimizer step, all parts and ranks."""

    tokens: float
    sequences: float


class Aggregate(Protocol):
    """``(n,)`` float64 coefficients by which token losses are summed.

    ``counted`` is the ``(n,)`` bool of tokens that count, ``sequence`` the ``(n,)`` index into the S rows of the
    batch, ``totals`` the counts of counted tokens and of sequences with at least one.
    """

    def __call__(self, sequence: Tensor, counted: Tensor, num_sequences: int, totals: Totals) -> Tensor: ...


#: Fields of Terms with at most one owner in a composition.
SLOTS = ("support", "ratio", "bounds", "surrogate", "aggregate")


@dataclass(frozen=True, eq=False)
class Terms(Spelled):
    """What one method asks for; None is the identity.

    Attributes:
        keep: ``(n,)`` bool, False removes the token from numerator and denominator [and].
        weight: ``(n,)`` >= 0, scales the policy term, denominator unchanged [product].
        bonus: ``(n,)``, added to the advantage [sum].
        unclipped: ``(n,)`` bool, True removes the trust region: bounds, surrogate and gates do not apply [or].
        gates: factors on the gradient by name, functions of the ratio as a constant [product].
        penalties: each penalty by its name [disjoint union].
        lr_scale: multiplies the scheduled learning rate of this optimizer step, the same in every part [product].
        support: True takes the live policy's log-probs over the tokens that the sampler kept, everywhere in the loss:
            less ``log_support_mass``.
        ratio, bounds, surrogate, aggregate: exclusive slots like `support`, at most one owner each.
        report: metrics by name, as summaries that merge over parts and ranks [disjoint union].
        invalid_count: number of values of ``weight``, ``bonus`` and ``bounds`` that no loss allows.
    """

    keep: Tensor | None = None
    weight: Tensor | None = None
    bonus: Tensor | None = None
    unclipped: Tensor | None = None
    gates: Mapping[str, Gate] = field(default_factory=dict)
    penalties: Mapping[str, Penalty] = field(default_factory=dict)
    lr_scale: float | None = None
    support: bool | None = None
    ratio: Ratio | None = None
    bounds: Bounds | None = None
    surrogate: Surrogate | None = None
    aggregate: Aggregate | None = None
    report: Mapping[str, Mean] = field(default_factory=dict)
    invalid_count: Tensor | None = None

    def filled(self) -> frozenset[str]:
        """Names of the fields, ``report`` and ``invalid_count`` aside, that are not the identity."""
        fields = ((name, getattr(self, name)) for name in WRITABLE)
        # `not in (None, {})` compares every tensor with a dict, which costs more than the rest of this call
        return frozenset(name for name, value in fields if (value if isinstance(value, Mapping) else value is not None))


#: Fields of Terms that a method may name in ``writes``.
WRITABLE = tuple(entry.name for entry in fields(Terms) if entry.name not in ("report", "invalid_count"))


#: The merge laws of the fields that every method may fill; other fields merge by name.
_LAWS: Mapping[str, Callable[[Any, Any], Any]] = {
    "keep": torch.logical_and,
    "weight": torch.mul,
    "bonus": torch.add,
    "unclipped": torch.logical_or,
    "lr_scale": operator.mul,
    "invalid_count": torch.add,
}


def merge_terms(named: Mapping[str, Terms]) -> Terms:
    """Merge the terms of the members of a composition; gates, penalties and reports get their member's key as prefix.

    A slot has one owner, because members that would fill the same slot do not compose.
    """
    merged: dict[str, Any] = {"gates": {}, "penalties": {}, "report": {}}
    for key, terms in named.items():
        for name, law in _LAWS.items():
            value, before = getattr(terms, name), merged.get(name)
            merged[name] = before if value is None else value if before is None else law(before, value)
        for collection in ("gates", "penalties", "report"):
            entries = getattr(terms, collection).items()
            merged[collection] |= {f"{key}/{name}" if name else key: value for name, value in entries}
        merged |= {slot: getattr(terms, slot) for slot in SLOTS if getattr(terms, slot) is not None}
    return Terms(**merged)
