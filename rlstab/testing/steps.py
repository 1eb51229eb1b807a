"""Optimizer steps for tests: ragged rows, ties, extremes, empty pools, packed or in padded rows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlstab import TokenBatch
from rlstab.core.batch import BASICS, LOGPROBS, MARKS, SIGNALS
from rlstab.core.method_checks import LIVE

#: Kinds of optimizer steps that have broken methods before, each with its least and its largest advantage.
KINDS: Mapping[str, tuple[float, float]] = {
    "all punished": (-math.inf, -0.5),
    "all rewarded": (0.5, math.inf),
    "no advantage": (0.0, 0.0),
    "mixed": (-math.inf, math.inf),
}
#: How far other log-probs are from those of the policy, nats, standard deviation.
_DISTANCES = {"old_logprobs": 0.1, "ref_logprobs": 0.5, "rollout_logprobs": 0.01, "teacher_logprobs": 0.7}
#: The least and the largest value of a signal: log-probs are at most 0.
DOMAIN: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys((*LOGPROBS, "log_kept_mass", "log_support_mass"), (-math.inf, 0.0)),
    **dict.fromkeys(("entropies", "teacher_divergence"), (0.0, math.inf)),
    "sum_p_sq": (0.0, 1.0),
}
#: Live outputs by the names of their columns.
_LIVE = {f"live_{name}": name for name in ("logprobs", *LIVE)}


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
    """One optimizer step in float64, row by row.

    Attributes:
        columns: ``(n,)`` each: ``old_logprobs``, ``logprobs``, ``advantages`` and every signal, including custom ones;
            the live log-probs and each of :data:`rlstab.core.method_checks.LIVE` under ``live_<name>``.
        lengths: ``(S,)`` int64, tokens of each row.
        sequence_ids, group_ids: ``(S,)``.
        layout: seed of how its batches hold the tokens. An odd one lays them out in padded rows, which begin and end
            in padding and have holes as for tool output; an even one packs them in any order; None packs row by row.
        live_ratio: whether the ratio of its batches divides by the live policy itself.
    """

    columns: Mapping[str, Tensor]
    lengths: Tensor
    sequence_ids: Tensor
    group_ids: Tensor
    layout: int | None = None
    live_ratio: bool = False

    @property
    def units(self) -> range:
        """Numbers of what is never cut: its sequences."""
        return range(len(self.lengths))

    @property
    def ids(self) -> tuple[Tensor, Tensor]:
        """``(S,)`` those of sequences, and those of groups."""
        return self.sequence_ids, self.group_ids

    @property
    def sequence(self) -> Tensor:
        """``(n,)`` the row of each token."""
        return torch.repeat_interleave(self.lengths)

    @property
    def position(self) -> Tensor:
        """``(n,)`` index of each token in its response."""
        return torch.arange(len(self)) - (self.lengths.cumsum(0) - self.lengths)[self.sequence]

    @property
    def evidence(self) -> dict[str, Tensor]:
        """The columns that are known before the backward pass."""
        return {name: values for name, values in self.columns.items() if name not in _LIVE}

    @property
    def live(self) -> dict[str, Tensor]:
        """Live outputs by name."""
        return {name: self.columns[column] for column, name in _LIVE.items() if column in self.columns}

    def __len__(self) -> int:
        return int(self.lengths.sum())

    def __repr__(self) -> str:
        if len(self) > 200:
            return f"Step({len(self.lengths)} rows, {len(self)} tokens)"
        signs = self.columns["advantages"].sign().int().tolist()
        return f"Step(row lengths {self.lengths.tolist()}, signs of the advantages {signs})"

    # -- as a method sees it -----------------------------------------------------------------------------------------

    @property
    def order(self) -> Tensor:
        """``(n,)`` indices of its tokens in the order in which its batches and leaves hold them."""
        if self.layout is None or self.layout % 2:
            return torch.arange(len(self))
        return torch.randperm(len(self), generator=torch.Generator().manual_seed(self.layout))

    def batch(self) -> TokenBatch:
        """The evidence as a batch in fresh memory."""
        if self.layout is not None and self.layout % 2:
            return self.padded(self.layout)[0]
        order = self.order
        fields = self._fields(lambda values: values[order])
        return TokenBatch(sequence=self.sequence[order], position=self.position[order], **fields)

    def padded(self, seed: int, fill: float = 1e9) -> tuple[TokenBatch, Tensor]:
        """The optimizer step as ``(S, T)`` tensors, built by ``TokenBatch.from_padded``.

        Args:
            seed: the seed of the amount of padding before, between and after the tokens of a row.
            fill: the value of padding.

        Returns:
            The batch, and the ``(S, T)`` mask.
        """
        draw = torch.Generator().manual_seed(seed)
        longest = max(self.lengths.tolist(), default=0)
        width = longest + max(int(torch.randint(1, 4, (), generator=draw)), longest // 8)
        # choose as many columns of each row as it has tokens, with gaps before, between and after them
        columns = torch.rand((len(self.lengths), width), generator=draw).argsort(-1).argsort(-1)
        mask = columns < self.lengths.unsqueeze(-1)
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
        order = self.order
        return {name: values[order].requires_grad_() for name, values in self.live.items()}

    def tokens(self) -> list[list[dict[str, float]]]:
        """For oracles: the tokens of each sequence as plain numbers, by the names of :attr:`columns`."""
        rows = (torch.stack(list(self.rows([row]).columns.values()), -1).tolist() for row in self.units)
        return [[dict(zip(self.columns, token, strict=True)) for token in row] for row in rows]

    # -- the same with other rows, ids or values -----------------------------------------------------------------------

    def indices(self, chosen: Sequence[int]) -> Tensor:
        """Indices of the tokens of some of the sequences, row by row."""
        tokens = torch.arange(len(self)).split(self.lengths.tolist())
        return torch.cat([torch.zeros(0, dtype=torch.int64), *(tokens[row] for row in chosen)])

    def rows(self, chosen: Sequence[int]) -> Step:
        """Some of the sequences in this order, renumbered, with their ids."""
        tokens, rows = self.indices(chosen), list(chosen)
        taken = replace(self.each(lambda values: values[tokens]), lengths=self.lengths[rows])
        return taken.relabelled(*(ids[rows] for ids in self.ids))

    def shuffled(self, seed: int) -> tuple[Step, Tensor]:
        """The sequences in another order, and the ``(n,)`` order of their tokens."""
        rows = torch.randperm(len(self.lengths), generator=torch.Generator().manual_seed(seed)).tolist()
        return self.rows(rows), self.indices(rows)

    def laid_out(self, seed: int) -> Step:
        """The same optimizer step, whose batches hold the tokens in another :attr:`layout`."""
        return replace(self, layout=seed)

    def twice(self) -> Step:
        """The optimizer step with every sequence twice, the copies under new ids."""
        copies = torch.arange(2 * len(self.lengths)) // max(1, len(self.lengths))
        double = self.rows([*self.units, *self.units])
        return double.relabelled(*(ids + copies * (1 + ids.max()) for ids in double.ids))

    def relabelled(self, sequence_ids: Tensor, group_ids: Tensor) -> Step:
        """The optimizer step under other ids."""
        return replace(self, sequence_ids=sequence_ids, group_ids=group_ids)

    def given(self, **columns: Tensor) -> Step:
        """The same optimizer step with some of the columns replaced."""
        return replace(self, columns={**self.columns, **columns})

    def only(self, names: Collection[str]) -> Step:
        """The same optimizer step with only the columns of these names."""
        return replace(self, columns={name: values for name, values in self.columns.items() if name in names})

    def varied(self, name: str) -> tuple[Step, Step]:
        """The step, and with other values of a signal; where the ratio would read it, the live policy is its own."""
        unchanged = replace(self, live_ratio=name in BASICS)
        return unchanged, unchanged.given(**{name: other_values(name, self.columns[name])})

    def rolled(self) -> Step:
        """Each token with nine tenths of the evidence of the previous one: the same shapes, other numbers."""
        moved = {name: 0.9 * values.roll(1) for name, values in self.evidence.items() if name not in MARKS}
        return self.given(**moved)

    def each(self, change: Callable[[Tensor], Tensor]) -> Step:
        """The same optimizer step with changed columns."""
        return self.given(**{name: change(values) for name, values in self.columns.items()})


def large_step(extra: Sequence[str] = ()) -> Step:
    """A step of 10,000 tokens in 64 responses, the longest of 1,000: for faults that small steps cannot show."""
    draw = random.Random(5)
    lengths = [1000, 980, *(draw.randint(40, 200) for _ in range(61))]
    return make_step("mixed", [*lengths, 10_000 - sum(lengths)], 4, 5, extra)


def make_step(
    kind: str, lengths: Sequence[int], group: int, seed: int, extra: Sequence[str] = (), *, extreme: bool = False
) -> Step:
    """One optimizer step of a kind; a pure function of its arguments.

    Seven tenths of the tokens have values of a coarse grid, so that values, differences and ratios are tied, and ratios
    are exactly 1. Some of them are next to the grid, and some next to 0.

    Args:
        kind: one of :data:`KINDS`.
        lengths: tokens of each response.
        group: responses of a prompt.
        seed: the seed of all numbers.
        extra: names of custom signals to fill with random numbers.
        extreme: log-probs down to -80 nats, ratios beyond e^20, entropies up to ln 2^18.
    """
    rng = torch.Generator().manual_seed(seed)
    count, rows = sum(lengths), len(lengths)
    shape = Step({}, torch.tensor(list(lengths), dtype=torch.int64), torch.zeros(0), torch.zeros(0))
    sequence, position = shape.sequence, shape.position

    def uniform(low: float, high: float, *size: int) -> Tensor:
        return low + (high - low) * torch.rand(size or (count,), generator=rng, dtype=torch.float64)

    def normal(size: int = count) -> Tensor:
        return torch.randn(size, generator=rng, dtype=torch.float64)

    rare, distance = uniform(0, 1) < 0.4, torch.where(uniform(0, 1) < 0.1, 5.0, 1.0) * (100.0 if extreme else 1.0)
    logprobs = torch.where(rare, uniform(-80.0 if extreme else -8.0, -4.0), uniform(-2.0, -0.01))
    entropies = torch.where(rare, uniform(0.0, 0.3), uniform(0.0, 12.4 if extreme else 2.5))
    support_mass = uniform(-0.3, 0.0)
    values = {
        "logprobs": logprobs,
        "entropies": entropies,
        **{name: logprobs + scale * distance * normal() for name, scale in _DISTANCES.items()},
        "live_logprobs": logprobs + 0.3 * distance * normal(),
        "max_logprobs": torch.maximum(logprobs, uniform(-2.0, -0.01)),
        "log_kept_mass": uniform(-0.2, -0.001),
        "log_support_mass": support_mass,
        "sum_p_sq": uniform(0.001, 1.0),
        "live_entropies": entropies + uniform(0.0, 0.1),
        "live_log_kept_mass": uniform(-0.2, -0.001),
        "live_log_support_mass": 1.1 * support_mass,
        "live_teacher_divergence": uniform(0.0, 2.0),
        **{name: normal() for name in extra},
    }
    on_grid = uniform(0, 1, 2, count) < 0.7
    factors = torch.tensor([*[1.0] * 6, 1 - 1e-4, 1 + 1e-4, 2.0**-20, 2.0**-20], dtype=torch.float64)
    # off the grid a difference next to 0 would vanish beside an advantage in float32
    factor = torch.where(on_grid[0], factors[torch.randint(10, (count,), generator=rng)], 1.0)
    for name, exact in values.items():
        snapped = torch.where(on_grid.all(0) if name in _LIVE else on_grid[0], (2 * exact).round() / 2, exact)
        values[name] = (factor * snapped).clamp(*domain_of(name))
    # at least the probability of the token itself, which the sampler kept
    values["live_log_support_mass"] = torch.maximum(values["live_logprobs"], values["live_log_support_mass"])
    earned = torch.where(uniform(0, 1, rows) < 0.2, math.nan, normal(rows))[sequence]  # or each token by itself
    columns = {
        **values,
        "advantages": (2 * torch.where(earned.isnan(), normal(), earned)).round().div(2).clamp(*KINDS[kind]),
        "truncated": (uniform(0, 1, rows) < 0.3)[sequence].double(),
        "branch": (uniform(0, 1, rows) < 0.4)[sequence].double(),
        "lag": uniform(0, 4, rows)[sequence].floor(),
        "block_ids": torch.where(position % 5 == 4, -1.0, (position // 3).double()),
        "turn": (position // 3).double(),
        "turn_reward": uniform(0, 4, rows, 1 + max(lengths, default=0) // 3).floor()[sequence, position // 3],
    }
    group_ids = 5 + torch.randperm(500, generator=rng)[torch.arange(rows) // group]  # no index into a list
    return replace(shape, columns=columns, sequence_ids=1000 + 7 * torch.arange(rows), group_ids=group_ids)
