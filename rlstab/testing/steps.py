"""Optimizer steps to test with: ragged rows, ties, extremes, empty pools; drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlstab.core.batch import MARKS, SIGNALS, TokenBatch
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.extras import require

require("testing", "rlstab.testing", "hypothesis")

from hypothesis import strategies as st  # noqa: E402

#: Shapes of an optimizer step that have broken methods before.
KINDS = (
    "mixed",
    "tied",
    "one token",
    "one row",
    "empty rows",
    "all rewarded",
    "all punished",
    "no advantage",
    "no rare token",
    "per token",
)


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step in float64: evidence by name and live outputs by name, all ``(n,)``.

    Attributes:
        evidence: ``old_logprobs``, ``logprobs``, ``advantages`` and every signal, custom ones included.
        live: ``logprobs``, ``entropies``, ``log_kept_mass``.
        sequence: ``(n,)`` index into the S rows.
        position: ``(n,)`` place in the response.
        sequence_ids, group_ids: ``(S,)``.
    """

    evidence: Mapping[str, Tensor]
    live: Mapping[str, Tensor]
    sequence: Tensor
    position: Tensor
    sequence_ids: Tensor
    group_ids: Tensor

    def __len__(self) -> int:
        return self.sequence.numel()

    def __repr__(self) -> str:
        lengths = torch.bincount(self.sequence, minlength=len(self.sequence_ids)).tolist()
        signs = self.evidence["advantages"].sign().int().tolist()
        return f"Step(row lengths {lengths}, signs of the advantages {signs})"

    def batch(self, *, without: Sequence[str] = ()) -> TokenBatch:
        """The evidence as a packed batch on fresh memory, less some signals."""
        given = {name: values.clone() for name, values in self.evidence.items() if name not in without}
        extra = {name: given.pop(name) for name in sorted(given) if name not in _BASICS and name not in SIGNALS}
        return TokenBatch(
            sequence=self.sequence.clone(),
            position=self.position.clone(),
            sequence_ids=self.sequence_ids.clone(),
            group_ids=self.group_ids.clone(),
            extra=extra,
            live_ratio=False,
            **given,  # type: ignore[arg-type]  # each is a field of this class
        )

    def leaves(self) -> dict[str, Tensor]:
        """Live outputs on fresh memory, requiring grad."""
        return {name: values.clone().requires_grad_() for name, values in self.live.items()}

    def rows(self, chosen: Sequence[int]) -> Step:
        """Some of the sequences, renumbered, with their ids."""
        number = torch.full((len(self.sequence_ids),), -1)
        number[list(chosen)] = torch.arange(len(chosen))
        sequence = number[self.sequence]
        return self._take(
            (sequence >= 0).nonzero().squeeze(-1), sequence, torch.tensor(list(chosen), dtype=torch.int64)
        )

    def shuffled(self, seed: int) -> tuple[Step, Tensor]:
        """Tokens and sequences in another order, and the ``(n,)`` order of the tokens."""
        draw = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(self.sequence_ids), generator=draw)
        tokens = torch.randperm(len(self), generator=draw)
        return self._take(tokens, rows.argsort()[self.sequence], rows), tokens

    def twice(self) -> Step:
        """The optimizer step with every sequence twice, the copies under new ids."""
        rows = len(self.sequence_ids)
        shift = int(self.sequence_ids.max()) + 1 if rows else 0
        return Step(
            {name: values.repeat(2) for name, values in self.evidence.items()},
            {name: values.repeat(2) for name, values in self.live.items()},
            torch.cat([self.sequence, self.sequence + rows]),
            self.position.repeat(2),
            torch.cat([self.sequence_ids, self.sequence_ids + shift]),
            torch.cat([self.group_ids, self.group_ids + shift]),
        )

    def without_advantage(self) -> Step:
        """The same tokens, all advantages 0."""
        return self.given(advantages=torch.zeros_like(self.evidence["advantages"]))

    def given(self, **evidence: Tensor) -> Step:
        """The same optimizer step with some of the evidence replaced."""
        return replace(self, evidence={**self.evidence, **evidence})

    def rolled(self) -> Step:
        """Each token with nine tenths of the evidence of the one before it: the same shapes, other numbers."""
        moved = {name: 0.9 * one.roll(1) for name, one in self.evidence.items() if name not in MARKS}
        return self.given(**moved)

    def cast(self, dtype: torch.dtype) -> Step:
        """All values rounded to ``dtype``, held in float64 (float32 for half precision and narrower)."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return replace(
            self,
            evidence={name: values.to(dtype).to(wide) for name, values in self.evidence.items()},
            live={name: values.to(dtype).to(wide) for name, values in self.live.items()},
        )

    def tokens(self) -> list[list[dict[str, float]]]:
        """For oracles: the tokens of each sequence as plain numbers, live outputs as ``live_<name>``."""
        columns = {**self.evidence, **{f"live_{name}": values for name, values in self.live.items()}}
        found: list[list[dict[str, float]]] = [[] for _ in self.sequence_ids]
        for place, row in enumerate(self.sequence.tolist()):
            found[row].append({name: float(values[place]) for name, values in columns.items()})
        return found

    def padded(self, fill: float, extra: int) -> tuple[TokenBatch, PolicyOutputs, dict[str, Tensor]]:
        """The optimizer step as ``(S, T)`` tensors, ``extra`` columns wider, ``fill`` where there is no token."""
        lengths = torch.bincount(self.sequence, minlength=len(self.sequence_ids))
        shape = (len(self.sequence_ids), int(lengths.max()) + extra if len(lengths) else extra)
        column = torch.zeros_like(self.sequence)
        for row in range(shape[0]):
            mine = self.sequence == row
            column[mine] = torch.arange(int(mine.sum()))
        place = self.sequence * shape[1] + column

        def lay(values: Tensor) -> Tensor:
            flat = torch.full((shape[0] * shape[1],), fill, dtype=values.dtype)
            return flat.index_copy(0, place, values).view(shape)

        mask = torch.zeros(shape[0] * shape[1], dtype=torch.bool).index_fill(0, place, True).view(shape)
        given = {name: lay(values) for name, values in self.evidence.items()}
        foreign = {name: given.pop(name) for name in sorted(given) if name not in _BASICS and name not in SIGNALS}
        batch = TokenBatch.from_padded(
            response_mask=mask,
            sequence_ids=self.sequence_ids,
            group_ids=self.group_ids,
            extra=foreign,
            live_ratio=False,
            **given,
        )
        leaves = {name: lay(values).requires_grad_() for name, values in self.live.items()}
        return batch, PolicyOutputs.from_padded(batch, **leaves), leaves

    def _take(self, tokens: Tensor, sequence: Tensor, rows: Tensor) -> Step:
        return Step(
            {name: values[tokens] for name, values in self.evidence.items()},
            {name: values[tokens] for name, values in self.live.items()},
            sequence[tokens],
            self.position[tokens],
            self.sequence_ids[rows],
            self.group_ids[rows],
        )


_BASICS = ("old_logprobs", "logprobs", "advantages")


@st.composite
def steps(draw: st.DrawFn, extra: Sequence[str] = (), *, extreme: bool = False) -> Step:
    """Optimizer steps of 0 to about 60 tokens.

    Args:
        draw: hypothesis gives it.
        extra: names of custom signals to fill with random numbers.
        extreme: log-probs down to -80 nats, ratios beyond e^20, entropies of 0 and of ln 2^18.
    """
    kind = draw(st.sampled_from(KINDS))
    rows = {"one token": 1, "one row": 1}.get(kind) or draw(st.integers(1, 8))
    lengths = [1] if kind == "one token" else draw(st.lists(st.integers(1, 8), min_size=rows, max_size=rows))
    if kind == "empty rows":
        lengths = [0 if place % 2 else length for place, length in enumerate(lengths)]
    group = draw(st.sampled_from([1, 2, 4]))
    seed = draw(st.integers(0, 2**32 - 1))
    return make_step(kind, lengths, group, seed, extra, extreme=extreme)


def make_step(
    kind: str, lengths: Sequence[int], group: int, seed: int, extra: Sequence[str], *, extreme: bool = False
) -> Step:
    """One optimizer step of a kind; a pure function of its arguments."""
    rng = torch.Generator().manual_seed(seed)
    count, rows = sum(lengths), len(lengths)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=rng, dtype=torch.float64)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(count, generator=rng, dtype=torch.float64)

    rare = torch.rand(count, generator=rng) < 0.4
    deepest = -80.0 if extreme else -8.0
    logprobs = torch.where(rare, uniform(deepest, -4.0), uniform(-2.0, -0.01))
    if kind == "no rare token":
        logprobs = uniform(-0.5, -0.01)
    entropies = torch.where(rare, uniform(0.0, 0.3), uniform(0.0, 2.5))
    if kind == "tied":
        logprobs, entropies = (logprobs * 2).round() / 2, (entropies * 4).round() / 4
    if extreme:
        entropies = torch.where(torch.rand(count, generator=rng) < 0.3, torch.zeros_like(entropies), entropies)
        entropies = torch.where(torch.rand(count, generator=rng) < 0.1, entropies + 12.4, entropies)
    drift, lag = normal(30.0 if extreme else 0.3), normal(0.1)
    sequence = torch.repeat_interleave(torch.arange(rows), torch.tensor(list(lengths), dtype=torch.int64))
    per_row = torch.randn(rows, generator=rng, dtype=torch.float64)
    per_row[torch.rand(rows, generator=rng) < 0.2] = 0.0
    advantages = normal(1.0) if kind == "per token" else per_row[sequence]
    advantages = {
        "all rewarded": advantages.abs() + 0.1,
        "all punished": -advantages.abs() - 0.1,
        "no advantage": torch.zeros_like(advantages),
    }.get(kind, advantages)
    largest = torch.maximum(logprobs, uniform(-2.0, -0.01))
    mass = uniform(-0.2, -0.001)
    evidence = {
        "old_logprobs": (logprobs + lag).clamp(max=0.0),
        "logprobs": logprobs,
        "advantages": advantages,
        "entropies": entropies,
        "ref_logprobs": (logprobs + normal(0.5)).clamp(max=0.0),
        "rollout_logprobs": (logprobs + normal(0.01)).clamp(max=0.0),
        "max_logprobs": largest,
        "log_kept_mass": mass,
        "sum_p_sq": uniform(0.001, 1.0),
        **{name: normal(1.0) for name in extra},
    }
    position = torch.cat([torch.arange(length) for length in lengths]) if count else torch.zeros(0, dtype=torch.int64)
    evidence["truncated"] = (torch.rand(rows, generator=rng) < 0.3)[sequence].double()
    evidence["branch"] = (torch.rand(rows, generator=rng) < 0.4)[sequence].double()
    evidence["block_ids"] = torch.where(position % 5 == 4, -1.0, (position // 3).double())
    live = {
        "logprobs": (logprobs + drift).clamp(max=0.0),
        "entropies": entropies + uniform(0.0, 0.1),
        "log_kept_mass": mass * 1.1,
    }
    return Step(evidence, live, sequence, position, 1000 + 7 * torch.arange(rows), torch.arange(rows) // group)
