"""Reads the optimizer steps of a dump, or of the files of another trainer."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError

from rlstab.core.batch import TokenBatch
from rlstab.core.batch_checks import MOST
from rlstab.dump_files import dumped, folder_of
from rlstab.errors import ReportError, RlstabError, reason
from rlstab.extras import require
from rlstab.files import exists, is_file
from rlstab.record.foreign import read_foreign
from rlstab.record.step import Damaged, Header, Step, joined, rank_of
from rlstab.safe_read import read_bytes

#: What to give in place of a path in which nothing can be read.
ADVICE = "Give the folder of a dump, or of a run with tracking.dump_every."


@dataclass(frozen=True)
class Dump:
    """The optimizer steps that were read.

    Attributes:
        steps: the optimizer steps in their order.
        notes: what was left out and why.
    """

    steps: list[Step]
    notes: list[str] = field(default_factory=list)


def load(path: str | Path) -> list[TokenBatch]:
    """The optimizer steps of a dump, or of the export of another trainer, as one batch each.

    ``load("dump")[0]`` is what :func:`rlstab.make_plan` takes as its one part, on all ranks together.

    Raises:
        ReportError: nothing can be read there.
    """
    return [step.batch for step in read_dump(path).steps]


def read_dump(path: str | Path) -> Dump:
    """Read a dump, or the export of another trainer.

    Args:
        path: a folder with the files of :mod:`rlstab.record.writer`, one of these files, the folder of a run, which has
            them in ``dump``, or what :func:`rlstab.record.foreign.read_foreign` reads.

    Raises:
        ReportError: there is no such path, or nothing in it can be read.
    """
    path = Path(path)
    if not exists(path):
        raise ReportError(f"{path}: no such file or folder. Give the folder of a dump.")
    notes: list[str] = []
    files = dumped(path if is_file(path) else folder_of(path))
    steps = []
    for step in _whole(files, notes) if files else read_foreign(path, notes):
        try:
            assert step.batch is not None  # made here, so that errors become notes
            steps.append(_with_sampler(step, notes))
        except RlstabError as error:
            notes.append(f"step {step.number} is left out: {error}")
    if not steps:
        raise ReportError(" ".join([f"{path}: no optimizer step in it can be read.", *notes[:3], ADVICE]))
    return Dump(steps, notes)


def _with_sampler(step: Step, notes: list[str]) -> Step:
    """The step with the old log-prob wherever the sampler gave none, one above 0, or -inf, which adapters refuse."""
    sampled = step.tensors.get("rollout_logprobs")
    if sampled is None:
        return step
    unscored = ~(sampled.isfinite() & (sampled <= MOST["rollout_logprobs"]))
    if count := int((unscored & step.mask).sum()):
        notes.append(
            f"step {step.number}: the sampler has no log-prob for {count} tokens; the old one stands in for it."
        )
    old = step.tensors.get("old_logprobs", step.tensors["logprobs"])
    return step.having({"rollout_logprobs": torch.where(unscored, old, sampled)})


def _whole(files: Iterable[Path], notes: list[str]) -> Iterator[Step]:
    """The steps of which every rank can be read."""
    by_step: dict[int, list[Step]] = {}
    for file in files:
        try:
            rank = _rank(file)
            by_step.setdefault(rank.number, []).append(rank)
        except Damaged as error:
            notes.append(f"{file.name} is left out: {error}.")
    for number, ranks in sorted(by_step.items()):
        ranks.sort(key=lambda rank: rank.header.rank)
        expected = ranks[0].header.ranks
        if [rank.header.rank for rank in ranks] == list(range(len(ranks))) and len(ranks) == expected:
            yield joined(ranks)
        else:
            notes.append(f"step {number} is left out: {len(ranks)} of its {expected} ranks can be read.")


def _rank(path: Path) -> Step:
    """What one rank wrote: a description and its tensors."""
    require("report", "a dump", "safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import load as load_tensors

    try:
        header = Header.model_validate_json(read_bytes(path))
        data = read_bytes(path.with_suffix(".safetensors"))
        if hashlib.sha256(data).hexdigest() != header.sha256:
            raise Damaged("the tensors do not match its checksum")
        return rank_of(header, load_tensors(data))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise Damaged(f"{where or 'the file'}: {error.errors()[0]['msg'].lower()}") from error
    except (OSError, SafetensorError) as error:
        raise Damaged(reason(error)) from error
