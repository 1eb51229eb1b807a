"""Optimizer steps for tests: ragged rows, ties, extremes, empty pools, packed or in padded rows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlstab import TokenBatch, TokenObjective
from rlstab.core.batch import BASICS, LOGPROBS, MARKS, SIGNALS

#: The advantages of some kinds.
_ADVANTAGES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "all punished": lambda advantages: -advantages.abs() - 0.1,
    "all rewarded": lambda advantages: advantages.abs() + 0.1,
    "no advantage": torch.zeros_like,
}
#: How far other log-probs are from those of the policy, nats, standard deviation.
_DISTANCES = {"old_logprobs": 0.1, "ref_logprobs": 0.5, "rollout_logprobs": 0.01, "teacher_logprobs": 0.7}
#: Kinds of optimizer steps that have broken methods before.
KINDS = (*_ADVANTAGES, "mixed", "tied", "no rare token", "per token")
#: The least and the largest value of a signal: log-probs are at most 0.
DOMAIN: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys((*LOGPROBS, "log_kept_mass", "log_support_mass"), (-math.inf, 0.0)),
    **dict.fromkeys(("entropies", "teacher_divergence"), (0.0, math.inf)),
    "sum_p_sq": (0.0, 1.0),
}


def domain_of(name: str) -> tuple[float, float]:
    """The least and the largest value of a signal, or of a live output under ``live_<name>``."""
    return DOMAIN.get(name.removeprefix("live_"), (-math.inf, math.inf))


def other_values(name: str, values: Tensor) -> Tensor:
    """Other possible values of a signal: permuted over tokens or responses, and scaled."""
    turned = values.flip(0)
    if not values.is_floating_point() or name in MARKS:
        return turned
    return (0.7 * turned + (0.1 if name == "entropies" else 0.0)).clamp(*domain_of(name))


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step in float64: evidence by name and live outputs by name, all ``(n,)``.

    Attributes:
        evidence: ``old_logprobs``, ``logprobs``, ``advantages`` and every signal, including custom ones.
        live: the log-probs, and each of :data:`rlstab.core.method_checks.LIVE`.
        sequence: ``(n,)`` index into the S rows.
        position: ``(n,)`` index of the token in its response.
        sequence_ids, group_ids: ``(S,)``.
        layout: seed of a padded layout with which batches are built, see :meth:`laid_out`; None packs the tokens.
        live_ratio: whether the ratio of its batches divides by the live policy itself.
    """

    evidence: Mapping[str, Tensor]
    live: Mapping[str, Tensor]
    sequence: Tensor
    position: Tensor
    sequence_ids: Tensor
    group_ids: Tensor
    layout: int | None = None
    live_ratio: bool = False

    @property
    def units(self) -> range:
        """Numbers of what is never cut: its sequences."""
        return range(len(self.sequence_ids))

    @property
    def ids(self) -> tuple[Tensor, Tensor]:
        """``(S,)`` those of sequences, and those of groups."""
        return self.sequence_ids, self.group_ids

    def relabelled(self, sequence_ids: Tensor, group_ids: Tensor) -> Step:
        """The optimizer step under other ids."""
        return replace(self, sequence_ids=sequence_ids, group_ids=group_ids)

    def __len__(self) -> int:
        return self.sequence.numel()

    def __repr__(self) -> str:
        lengths = torch.bincount(self.sequence, minlength=len(self.sequence_ids)).tolist()
        if len(self) > 200:
            return f"Step({len(lengths)} rows, {len(self)} tokens)"
        signs = self.evidence["advantages"].sign().int().tolist()
        padded = "" if self.layout is None else ", padded"
        return f"Step(row lengths {lengths}, signs of the advantages {signs}{padded})"

    def batch(self) -> TokenBatch:
        """The evidence as a batch in fresh memory."""
        if self.layout is not None:
            return self.padded(self.layout)[0]
        return TokenBatch(sequence=self.sequence.clone(), position=self.position.clone(), **self._fields(Tensor.clone))

    def padded(self, seed: int, fill: float = 1e9) -> tuple[TokenBatch, Tensor]:
        """The optimizer step as ``(S, T)`` tensors, built by ``TokenBatch.from_padded``.

        Args:
            seed: the seed of the amount of padding before, between and after the tokens of a row.
            fill: the value of padding.

        Returns:
            The batch, and the ``(S, T)`` mask.
        """
        draw = torch.Generator().manual_seed(seed)
        lengths = torch.bincount(self.sequence, minlength=len(self.units))
        width = int(lengths.max()) if len(lengths) else 0
        width += max(1, int(torch.randint(1, 4, (), generator=draw)), width // 8)
        # choose as many columns of each row as it has tokens, with gaps before, between and after them
        mask = torch.rand((len(lengths), width), generator=draw).argsort(-1).argsort(-1) < lengths.unsqueeze(-1)
        fields = self._fields(
            lambda values: torch.full(mask.shape, fill, dtype=values.dtype).masked_scatter(mask, values)
        )
        return TokenBatch.from_padded(response_mask=mask, **fields), mask

    def _fields(self, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Evidence, changed, and ids in fresh memory, as the fields of a batch."""
        columns: dict[str, Any] = {name: change(values) for name, values in self.evidence.items()}
        extra = {name: columns.pop(name) for name in sorted(columns) if name not in {*BASICS, "advantages", *SIGNALS}}
        columns |= {"sequence_ids": self.sequence_ids.clone(), "group_ids": self.group_ids.clone(), "extra": extra}
        return {**columns, "live_ratio": self.live_ratio}

    def leaves(self) -> dict[str, Tensor]:
        """Live outputs in fresh memory that require grad."""
        return {name: values.clone().requires_grad_() for name, values in self.live.items()}

    def indices(self, chosen: Sequence[int]) -> Tensor:
        """Indices of the tokens of some of the sequences, in the order of :meth:`rows`."""
        number = self._numbers(chosen)[self.sequence]
        indices = (number >= 0).nonzero().squeeze(-1)
        # a padded batch has its tokens row by row
        return indices if self.layout is None else indices[number[indices].argsort(stable=True)]

    def rows(self, chosen: Sequence[int]) -> Step:
        """Some of the sequences, renumbered, with their ids."""
        if self.layout is None and list(chosen) == list(self.units):
            return self
        return self._take(self.indices(chosen), chosen)

    def shuffled(self, seed: int) -> tuple[Step, Tensor]:
        """Tokens and sequences in another order, and the ``(n,)`` order of the tokens."""
        draw = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(self.sequence_ids), generator=draw).tolist()
        tokens = torch.randperm(len(self), generator=draw) if self.layout is None else self.indices(rows)
        return self._take(tokens, rows), tokens

    def laid_out(self, seed: int) -> Step:
        """With an odd seed built by ``from_padded``: rows that begin and end in padding, with holes for tool output."""
        return replace(self, layout=seed) if seed % 2 else self

    def twice(self) -> Step:
        """The optimizer step with every sequence twice, the copies under new ids."""
        rows = len(self.sequence_ids)
        shift = int(self.sequence_ids.max()) + 1 if rows else 0
        return replace(
            self._each(lambda values: values.repeat(2)),
            sequence=torch.cat([self.sequence, self.sequence + rows]),
            position=self.position.repeat(2),
            sequence_ids=torch.cat([self.sequence_ids, self.sequence_ids + shift]),
            group_ids=torch.cat([self.group_ids, self.group_ids + shift]),
            layout=None,
        )

    def given(self, **evidence: Tensor) -> Step:
        """The same optimizer step with some of the evidence replaced."""
        return replace(self, evidence={**self.evidence, **evidence})

    def only(self, method: TokenObjective) -> Step:
        """The same optimizer step with only the evidence and live outputs that a method declares."""
        basics, live = {*BASICS, "advantages", *method.needs}, {"logprobs", *method.live_needs}
        evidence = {name: values for name, values in self.evidence.items() if name in basics}
        return replace(
            self, evidence=evidence, live={name: values for name, values in self.live.items() if name in live}
        )

    def without(self, name: str) -> Step:
        """The same optimizer step without one kind of evidence."""
        return replace(self, evidence={other: values for other, values in self.evidence.items() if other != name})

    def varied(self, name: str) -> tuple[Step, Step]:
        """The step, and with other values of a signal; where the ratio would read it, the live policy is its own."""
        unchanged = replace(self, live_ratio=name in BASICS)
        return unchanged, unchanged.given(**{name: other_values(name, self.evidence[name])})

    def rolled(self) -> Step:
        """Each token with nine tenths of the evidence of the previous one: the same shapes, other numbers."""
        moved = {name: 0.9 * values.roll(1) for name, values in self.evidence.items() if name not in MARKS}
        return self.given(**moved)

    def cast(self, dtype: torch.dtype, held_in: torch.dtype) -> Step:
        """All values rounded to ``dtype``, held in another."""
        return self._each(lambda values: values.to(dtype).to(held_in))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Step:
        evidence, live = (
            {name: change(values) for name, values in side.items()} for side in (self.evidence, self.live)
        )
        return replace(self, evidence=evidence, live=live)

    @property
    def columns(self) -> dict[str, Tensor]:
        """Evidence by name, and live outputs as ``live_<name>``."""
        return {**self.evidence, **{f"live_{name}": values for name, values in self.live.items()}}

    def tokens(self) -> list[list[dict[str, float]]]:
        """For oracles: the tokens of each sequence as plain numbers, by the names of :attr:`columns`."""
        columns, rows = self.columns, [list[dict[str, float]]() for _ in self.units]
        for token, row in enumerate(self.sequence.tolist()):
            rows[row].append({name: float(values[token]) for name, values in columns.items()})
        return rows

    def _numbers(self, chosen: Sequence[int]) -> Tensor:
        number = torch.full((len(self.sequence_ids),), -1)
        number[list(chosen)] = torch.arange(len(chosen))
        return number

    def _take(self, tokens: Tensor, rows: Sequence[int]) -> Step:
        return replace(
            self._each(lambda values: values[tokens]),
            sequence=self._numbers(rows)[self.sequence[tokens]],
            position=self.position[tokens],
            sequence_ids=self.sequence_ids[list(rows)],
            group_ids=self.group_ids[list(rows)],
        )


def draw_step(number: int, size: int, extra: Sequence[str] = (), *, extreme: bool = False) -> Step:
    """One of the small optimizer steps, the same for the same number.

    Args:
        number: the number of the step.
        size: up to one more than this many rows, of up to one more than this many tokens; at most 8 each.
        extra: names of user-defined signals to draw, see :func:`make_step`.
        extreme: whether values go as far as numbers can, see :func:`make_step`.
    """
    draw, longest = random.Random(number), min(8, 1 + size)
    lengths = [draw.randint(0, longest) for _ in range(draw.randint(1, longest))]
    lengths[0] += sum(lengths) == 2  # two tokens have one covariance, of which rounding would choose
    return make_step(KINDS[number % len(KINDS)], lengths, draw.choice([1, 2, 4]), number, extra, extreme=extreme)


def large_step(extra: Sequence[str] = ()) -> Step:
    """A step of 10,000 tokens in 64 responses, the longest of 1,000: for faults that small steps cannot show."""
    draw = random.Random(5)
    lengths = [1000, 980, *(draw.randint(40, 200) for _ in range(61))]
    return make_step("mixed", [*lengths, 10_000 - sum(lengths)], 4, 5, extra)


def make_step(
    kind: str, lengths: Sequence[int], group: int, seed: int, extra: Sequence[str] = (), *, extreme: bool = False
) -> Step:
    """One optimizer step of a kind; a pure function of its arguments.

    Args:
        kind: one of :data:`KINDS`.
        lengths: tokens of each response.
        group: responses of a prompt.
        seed: the seed of all numbers.
        extra: names of custom signals to fill with random numbers.
        extreme: log-probs down to -80 nats, ratios beyond e^20, entropies of 0 and of ln 2^18.
    """
    rng = torch.Generator().manual_seed(seed)
    count, rows = sum(lengths), len(lengths)
    sequence = torch.repeat_interleave(torch.arange(rows), torch.tensor(list(lengths), dtype=torch.int64))
    position = torch.arange(count) - torch.searchsorted(sequence, sequence)

    def uniform(low: float, high: float, *size: int) -> Tensor:
        return low + (high - low) * torch.rand(size or (count,), generator=rng, dtype=torch.float64)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(count, generator=rng, dtype=torch.float64)

    rare = uniform(0, 1) < 0.4
    logprobs = torch.where(rare, uniform(-80.0 if extreme else -8.0, -4.0), uniform(-2.0, -0.01))
    if kind == "no rare token":
        logprobs = uniform(-0.5, -0.01)
    entropies = torch.where(rare, uniform(0.0, 0.3), uniform(0.0, 2.5))
    if kind == "tied":
        logprobs, entropies = (logprobs * 2).round() / 2, (entropies * 4).round() / 4
    if extreme:
        entropies = torch.where(uniform(0, 1) < 0.3, 0.0, torch.where(uniform(0, 1) < 0.1, 12.4, entropies))
    advantages = normal(1.0)
    if kind != "per token":
        earned = torch.randn(rows, generator=rng, dtype=torch.float64)
        advantages = torch.where(uniform(0, 1, rows) < 0.2, 0.0, earned)[sequence]
    evidence = {
        "logprobs": logprobs,
        "advantages": _ADVANTAGES.get(kind, torch.clone)(advantages),
        "entropies": entropies,
        **{name: (logprobs + normal(scale)).clamp(max=0.0) for name, scale in _DISTANCES.items()},
        "max_logprobs": torch.maximum(logprobs, uniform(-2.0, -0.01)),
        "log_kept_mass": uniform(-0.2, -0.001),
        "log_support_mass": uniform(-0.3, 0.0),
        "sum_p_sq": uniform(0.001, 1.0),
        "truncated": (uniform(0, 1, rows) < 0.3)[sequence].double(),
        "branch": (uniform(0, 1, rows) < 0.4)[sequence].double(),
        "lag": uniform(0, 4, rows)[sequence].floor(),
        "block_ids": torch.where(position % 5 == 4, -1.0, (position // 3).double()),
        "turn": (position // 3).double(),
        "turn_reward": uniform(0, 4, rows, 1 + max(lengths, default=0) // 3).floor()[sequence, position // 3],
        **{name: normal(1.0) for name in extra},
    }
    live_logprobs = (logprobs + normal(30.0 if extreme else 0.3)).clamp(max=0.0)
    live = {
        "logprobs": live_logprobs,
        "entropies": entropies + uniform(0.0, 0.1),
        "log_kept_mass": 1.1 * evidence["log_kept_mass"],
        # at least the probability of the token itself, which the sampler kept
        "log_support_mass": torch.maximum(live_logprobs, 1.1 * evidence["log_support_mass"]),
        "teacher_divergence": uniform(0.0, 2.0),
    }
    return Step(evidence, live, sequence, position, 1000 + 7 * torch.arange(rows), torch.arange(rows) // group)
