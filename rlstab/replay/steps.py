"""The optimizer steps of a dump, each as evidence about its tokens on all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlstab.core.batch import SIGNALS, TokenBatch
from rlstab.errors import ReportError, RlstabError
from rlstab.files import exists, is_file
from rlstab.replay.foreign import read_foreign
from rlstab.replay.rank import Damaged, Rank, read_rank
from rlstab.report.formatting import counted
from rlstab.trace.dump import BY_TOKEN, HostLoss

#: The description of what one rank wrote.
_NAME = re.compile(r"step-(\d{1,12})\.rank-(\d{1,9})\.json")


@dataclass(frozen=True, eq=False)
class Step:
    """One optimizer step, all ranks together.

    ``n`` tokens count in the loss, of ``S`` responses with ``N`` tokens in all.

    Attributes:
        number: of the optimizer step.
        host: the trainer that wrote it.
        batch: the evidence about the ``n`` tokens, in float32 as it was written.
        tokens: ``(N,)`` tensors of all tokens of the responses; see :data:`rlstab.trace.dump.BY_TOKEN`.
        lengths: ``(S,)`` int64, tokens of each response.
        part: ``(S,)`` int64, number of the micro-batch of each response, over all ranks.
        ranks: by micro-batch, the rank that it was on.
        prompts: ``(S,)`` lists of token ids, empty where they are unknown.
        rewards: ``(S,)``, or None.
        loss: what the trainer says of its loss, with the values of all micro-batches, or None.
        first: no weight has changed since the responses were sampled.
        learning_rate: of the step, or None.
        temperature: that of the log-probs, or None.
    """

    number: int
    host: str
    batch: TokenBatch
    tokens: Mapping[str, Tensor]
    lengths: Tensor
    part: Tensor
    ranks: Sequence[int]
    prompts: Sequence[Sequence[int]]
    rewards: Tensor | None = None
    loss: HostLoss | None = None
    first: bool = False
    learning_rate: float | None = None
    temperature: float | None = None

    @property
    def mask(self) -> Tensor:
        """``(N,)`` bool, the tokens that count in the loss."""
        return self.tokens["mask"].bool()

    @property
    def row(self) -> Tensor:
        """``(N,)`` int64, the response of each token."""
        return torch.arange(self.lengths.numel()).repeat_interleave(self.lengths)

    @property
    def processes(self) -> int:
        """Ranks that took part."""
        return len(set(self.ranks))

    @property
    def accumulation(self) -> int:
        """Micro-batches of the step on one rank."""
        return max(map(self.ranks.count, set(self.ranks)))


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
    headers = [path] if is_file(path) else sorted(path.glob("step-*.rank-*.json"))
    own = [file for file in headers if _NAME.fullmatch(file.name)]
    if own:
        for file in own:
            try:
                ranks.append(read_rank(file))
            except Damaged as error:
                notes.append(f"{file.name} is left out: {error}.")
        complete = {file.with_suffix(".safetensors") for file in own}
        torn = [] if is_file(path) else [file for file in path.glob("step-*.safetensors") if file not in complete]
        if torn:
            notes.append(f"{counted(len(torn), 'file')} of tensors without a description: the writer was stopped.")
    else:
        ranks, notes = read_foreign(path)
    steps = _joined(ranks, notes)
    if not steps:
        why = f" {' '.join(notes[:3])}" if notes else ""
        raise ReportError(f"{path}: no optimizer step in it that can be read.{why} Give the folder of a dump.")
    return Dump(steps, notes)


def _joined(ranks: Iterable[Rank], notes: list[str]) -> list[Step]:
    """The ranks of each step together; a step of which a rank is missing is left out."""
    by_step: dict[int, list[Rank]] = {}
    for rank in ranks:
        by_step.setdefault(rank.header.step, []).append(rank)
    steps = []
    for number, of_step in sorted(by_step.items()):
        expected = of_step[0].header.ranks
        if len(of_step) != expected or {rank.header.rank for rank in of_step} != set(range(len(of_step))):
            notes.append(f"step {number} is left out: {len(of_step)} of its {expected} ranks can be read.")
            continue
        try:
            steps.append(step_of(number, sorted(of_step, key=lambda rank: rank.header.rank)))
        except RlstabError as error:
            notes.append(f"step {number} is left out: {error}")
    return steps


def step_of(number: int, ranks: Sequence[Rank]) -> Step:
    """The step that all its ranks, in their order, wrote down."""
    first = ranks[0].header
    names = set.intersection(*(set(rank.tensors) for rank in ranks))
    together = {name: torch.cat([rank.tensors[name] for rank in ranks]) for name in names}
    lengths, mask = together["lengths"], together["mask"].bool()
    rows = torch.arange(lengths.numel()).repeat_interleave(lengths)[mask]
    starts = [sum(rank.header.parts for rank in ranks[:place]) for place in range(len(ranks))]
    part = torch.cat([rank.tensors["parts"] + start for rank, start in zip(ranks, starts, strict=True)])
    counted_before = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    counted_before[1:] = torch.bincount(rows, minlength=lengths.numel()).cumsum(0)
    numbers = torch.arange(lengths.numel())
    groups = together.get("group_ids", numbers)
    tokens = {name: together[name] for name in BY_TOKEN if name in together}
    token = {name: values[mask] for name, values in tokens.items()}
    signals: dict[str, Any] = {name: token[name] for name in SIGNALS if name in token}
    batch = TokenBatch(
        old_logprobs=token.get("old_logprobs", token["logprobs"]),
        logprobs=token["logprobs"],
        advantages=token["advantages"],
        sequence=rows,
        position=torch.arange(rows.numel()) - counted_before[rows],
        sequence_ids=together.get("sequence_ids", numbers),
        group_ids=groups,
        live_ratio="old_logprobs" not in token,
        **signals,
    )
    known = [rank.header.loss for rank in ranks]
    loss = None
    if all(one is not None for one in known) and first.loss is not None:
        loss = first.loss.model_copy(update={"values": [value for one in known if one for value in one.values]})
    return Step(
        number=number,
        host=first.host,
        batch=batch,
        tokens=tokens,
        lengths=lengths,
        part=part,
        ranks=[rank.header.rank for rank in ranks for _ in range(rank.header.parts)],
        prompts=_prompts(ranks),
        rewards=together.get("rewards"),
        loss=loss,
        first=all(rank.header.first for rank in ranks),
        learning_rate=first.learning_rate,
        temperature=first.temperature,
    )


def _prompts(ranks: Sequence[Rank]) -> list[list[int]]:
    prompts: list[list[int]] = []
    for rank in ranks:
        asked, ids = rank.tensors.get("prompt_lengths"), rank.tensors.get("prompt_ids")
        if asked is None or ids is None:
            prompts += [[] for _ in range(rank.tensors["lengths"].numel())]
        else:
            prompts += [part.tolist() for part in ids.split(asked.tolist())]
    return prompts
