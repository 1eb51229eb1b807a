"""The optimizer steps of a dump, each as evidence about its tokens on all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlstab.core.batch import SIGNALS, TokenBatch
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.errors import ReportError, RlstabError
from rlstab.files import exists, is_file
from rlstab.replay.foreign import read_foreign
from rlstab.replay.rank import Damaged, Rank, read_rank
from rlstab.trace.dump import BY_TOKEN, LIVE, Header

#: What one rank wrote; where the writer was stopped, tensors are there without their description.
_NAME = re.compile(r"step-\d+\.rank-\d+\.(json|safetensors)")


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step, all ranks together: ``S`` responses of ``N`` tokens, of which ``n`` count in the loss.

    Attributes:
        header: what the ranks say; ``loss.values`` and ``parts`` are those of all ranks, one after another.
        tensors: by name, see :data:`rlstab.trace.dump.BY_TOKEN`; micro-batches are numbered over all ranks.
        ranks: by micro-batch, the rank that it was on.
    """

    header: Header
    tensors: Mapping[str, Tensor]
    ranks: Sequence[int]

    @property
    def number(self) -> int:
        """Of the optimizer step."""
        return self.header.step

    @property
    def mask(self) -> Tensor:
        """``(N,)`` bool, the tokens that count in the loss."""
        return self.tensors["mask"].bool()

    @cached_property
    def row(self) -> Tensor:
        """``(N,)`` int64, the response of each token."""
        return torch.arange(len(self.tensors["lengths"])).repeat_interleave(self.tensors["lengths"])

    @property
    def accumulation(self) -> int:
        """Micro-batches of the step on one rank."""
        return max(map(self.ranks.count, self.ranks), default=1)

    @cached_property
    def batch(self) -> TokenBatch:
        """The evidence about the ``n`` tokens."""
        return self.part_of(torch.ones_like(self.tensors["lengths"], dtype=torch.bool))

    def part_of(self, chosen: Tensor) -> TokenBatch:
        """The evidence about the tokens of some responses, ``(S,)`` bool."""
        mask = self.mask & chosen[self.row]
        sequence = (chosen.cumsum(0) - 1)[self.row[mask]]
        token = {name: self.tensors[name][mask] for name in BY_TOKEN if name in self.tensors}
        count, place = int(chosen.sum()), torch.arange(sequence.numel())
        starts = torch.bincount(sequence, minlength=count).cumsum(0).roll(1)
        starts[:1] = 0
        numbers, ids, groups = torch.arange(len(chosen)), *map(self.tensors.get, ("sequence_ids", "group_ids"))
        signals: dict[str, Any] = {name: token[name] for name in SIGNALS if name in token}
        return TokenBatch(
            old_logprobs=token.get("old_logprobs", token["logprobs"]),
            logprobs=token["logprobs"],
            advantages=token["advantages"],
            sequence=sequence,
            position=place - starts[sequence],
            sequence_ids=(numbers if ids is None else ids)[chosen],
            group_ids=(numbers if groups is None else groups)[chosen],
            live_ratio="old_logprobs" not in token,
            _grouped=groups is not None,
            **signals,
        )

    def live(self, chosen: Tensor | None = None) -> PolicyOutputs:
        """What the loss was made of, of the ``n`` tokens or those of them that are ``chosen``: leaves with gradient."""
        where = self.mask if chosen is None else self.mask & chosen[self.row]
        known = {name: self.tensors.get(f"live_{name}", self.tensors.get(name)) for name in LIVE}
        return PolicyOutputs(
            **{name: values[where].requires_grad_() for name, values in known.items() if values is not None}
        )

    @cached_property
    def prompts(self) -> Sequence[Tensor]:
        """The token ids of the prompt of each response, none where they are not known."""
        count, lengths, ids = self.tensors["lengths"], *map(self.tensors.get, ("prompt_lengths", "prompt_ids"))
        return ids.split(lengths.tolist()) if ids is not None and lengths is not None else [count[:0]] * len(count)


@dataclass(frozen=True)
class Dump:
    """What was read.

    Attributes:
        steps: in their order.
        notes: what is left out and why.
    """

    steps: list[Step]
    notes: list[str] = field(default_factory=list)


def load(path: str | Path) -> list[TokenBatch]:
    """The optimizer steps of a dump, or of the export of another trainer, as one batch each.

    ``load("dump")[0]`` is what :func:`rlstab.make_plan` takes as its one part, on all ranks together.

    Raises:
        ReportError: nothing there that can be read.
    """
    return [step.batch for step in read_dump(path).steps]


def read_dump(path: str | Path) -> Dump:
    """Read a dump, or the export of another trainer.

    Args:
        path: a folder with the files of :mod:`rlstab.trace.dump`, or what :mod:`rlstab.replay.foreign` reads.

    Raises:
        ReportError: no such path, or nothing in it that can be read.
    """
    path = Path(path)
    if not exists(path):
        raise ReportError(f"{path}: no such file or folder. Give the folder of a dump.")
    notes: list[str] = []
    ranks: list[Rank] = []
    files = [path] if is_file(path) else path.glob("step-*")
    if own := sorted({file.with_suffix(".json") for file in files if _NAME.fullmatch(file.name)}):
        for file in own:
            try:
                ranks.append(read_rank(file))
            except Damaged as error:
                notes.append(f"{file.name} is left out: {error}.")
    else:
        ranks, notes = read_foreign(path)
    steps = list(_joined(ranks, notes))
    if not steps:
        why = f" {' '.join(notes[:3])}" if notes else ""
        raise ReportError(f"{path}: no optimizer step in it that can be read.{why} Give the folder of a dump.")
    return Dump(steps, notes)


def _joined(ranks: Iterable[Rank], notes: list[str]) -> Iterable[Step]:
    """The ranks of each step together; a step of which a rank is missing is left out."""
    by_step: dict[int, list[Rank]] = {}
    for rank in ranks:
        by_step.setdefault(rank.header.step, []).append(rank)
    for number, of_step in sorted(by_step.items()):
        of_step.sort(key=lambda rank: rank.header.rank)
        expected = of_step[0].header.ranks
        if [rank.header.rank for rank in of_step] != list(range(len(of_step))) or len(of_step) != expected:
            notes.append(f"step {number} is left out: {len(of_step)} of its {expected} ranks can be read.")
            continue
        try:
            step = step_of(of_step)
            assert step.batch is not None  # made here, so that what does not fit is told
            yield step
        except RlstabError as error:
            notes.append(f"step {number} is left out: {error}")


def step_of(ranks: Sequence[Rank]) -> Step:
    """The step that all its ranks, in their order, wrote down."""
    header = ranks[0].header
    full = [rank for rank in ranks if rank.tensors["ids"].numel()] or ranks
    names = set.intersection(*(set(rank.tensors) for rank in full))
    starts = [sum(rank.header.parts for rank in ranks[:place]) for place in range(len(ranks))]
    tensors = {name: torch.cat([rank.tensors[name] for rank in full]) for name in names}
    parts = zip(ranks, starts, strict=True)
    tensors["parts"] = torch.cat([rank.tensors["parts"] + start for rank, start in parts if rank in full])
    losses = [rank.header.loss for rank in ranks if rank.header.loss is not None]
    loss = None
    if len(losses) == len(ranks):
        loss = losses[0].model_copy(update={"values": [value for own in losses for value in own.values]})
    changes = {
        "loss": loss,
        "first": all(rank.header.first for rank in ranks),
        "parts": sum(rank.header.parts for rank in ranks),
    }
    return Step(
        header.model_copy(update=changes),
        tensors,
        [rank.header.rank for rank in ranks for _ in range(rank.header.parts)],
    )
