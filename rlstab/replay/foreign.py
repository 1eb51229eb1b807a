"""Reads what other trainers write of their tokens.

Fields are those of the projects' own writers: prime-rl 559b447 (``trainer/rl/token_export.py``), NeMo-RL 7ea279a
(``algorithms/grpo.py``, ``log_batched_dict_as_jsonl``), slime 624b824 (``observability/train_data_utils.py``, and the
mapping that it saved before format_version 2), verl 0.9 (``_dump_generations``). None says what its loss was.
"""

from __future__ import annotations

import json
import pickle
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from rlstab.errors import ReportError
from rlstab.files import is_file
from rlstab.replay.rank import Damaged, Rank, checked
from rlstab.report.formatting import counted
from rlstab.trace.dump import Header

_Ids = list[Annotated[int, Field(ge=0, lt=2**32)]]
_Floats = list[float | None]
#: Files of each trainer in a folder.
_FILES = ("token_exports/step_*/rank_*.jsonl", "step_*/rank_*.jsonl", "rank_*.jsonl", "train_data_step*.jsonl", "*.pt")


#: Responses of a rank in a step, at most: their numbers are made from those of the ranks before.
MOST_RESPONSES = 1_000_000


@dataclass(frozen=True)
class Row:
    """One response, as every trainer has it.

    Attributes:
        prompt: token ids.
        ids: of the response.
        tokens: values by token of the response, by the names of :data:`rlstab.trace.dump.BY_TOKEN`; all that a step has
            is what every row has. A value that is not known is NaN.
        part: number of the micro-batch.
        reward: or None.
    """

    prompt: list[int]
    ids: list[int]
    tokens: Mapping[str, list[float]]
    part: int = 0
    reward: float | None = None


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class _Prime(_Record):
    """A line of prime-rl's token export; the ratio divides by the sampler's log-probs."""

    step: Annotated[int, Field(ge=0)]
    rank: Annotated[int, Field(ge=0)] = 0
    micro_step: Annotated[int, Field(ge=0, lt=10**6)] = 0
    token_ids: _Ids
    loss_mask: list[bool]
    advantages: _Floats
    trainer_logprobs: _Floats
    inference_logprobs: _Floats
    entropy: _Floats = []

    @model_validator(mode="after")
    def _fit(self) -> _Prime:
        columns = (self.loss_mask, self.advantages, self.trainer_logprobs, self.inference_logprobs)
        _same(len(self.token_ids), *columns, *([self.entropy] if self.entropy else []))
        if True not in self.loss_mask:
            raise ValueError("no token is in the loss")
        return self

    def row(self) -> Row:
        start = self.loss_mask.index(True)
        columns: Mapping[str, list[Any]] = {
            "mask": self.loss_mask,
            "advantages": self.advantages,
            "logprobs": self.trainer_logprobs,
            "old_logprobs": self.inference_logprobs,
            "rollout_logprobs": self.inference_logprobs,
            **({"entropies": self.entropy} if self.entropy else {}),
        }
        prompt = self.token_ids[:start]
        tokens = {name: _numbers(values[start:]) for name, values in columns.items()}
        return Row(prompt, self.token_ids[start:], tokens, self.micro_step)


class _Nemo(_Record):
    """A line of NeMo-RL's ``train_data_stepN.jsonl``: prompt and responses padded to the longest of the step."""

    token_ids: _Ids
    token_loss_mask: list[float]
    sample_loss_mask: float = 1.0
    input_lengths: Annotated[int, Field(ge=0)]
    advantages: _Floats
    generation_logprobs: _Floats
    prev_logprobs: _Floats
    rewards: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _single(cls, data: Any) -> Any:
        """Its writer cuts batches of one, so every value is a list of one."""
        if not isinstance(data, dict):
            return data
        lists = {name: value[0] for name, value in data.items() if isinstance(value, list) and len(value) == 1}
        return {**data, **lists}

    @model_validator(mode="after")
    def _fit(self) -> _Nemo:
        columns = (self.token_loss_mask, self.advantages, self.generation_logprobs, self.prev_logprobs)
        _same(len(self.token_ids), *columns)
        if not any(self.token_loss_mask[: self.input_lengths]):
            raise ValueError("no token is in the loss")
        return self

    def row(self) -> Row:
        start, end = [bool(value) for value in self.token_loss_mask].index(True), self.input_lengths
        columns: Mapping[str, list[Any]] = {
            "mask": [value * self.sample_loss_mask for value in self.token_loss_mask],
            "advantages": self.advantages,
            "logprobs": self.prev_logprobs,
            "old_logprobs": self.prev_logprobs,
            "rollout_logprobs": self.generation_logprobs,
        }
        prompt = self.token_ids[:start]
        tokens = {name: _numbers(values[start:end]) for name, values in columns.items()}
        return Row(prompt, self.token_ids[start:end], tokens, reward=self.rewards)


#: slime's names of what it knows by token of a response.
_SLIME = {"log_probs": "old_logprobs", "rollout_log_probs": "rollout_logprobs", "ref_log_probs": "ref_logprobs"}


def _slime(sample: Mapping[str, Any]) -> Row:
    """A sample of slime's debug dump: tokens of prompt and response, and values by token of the response."""
    ids = [int(token) for token in sample["tokens"]]
    length = int(sample["response_lengths"])
    if not 0 < length <= len(ids):
        raise ValueError(f"a response of {length} of {len(ids)} tokens")
    advantages = sample["advantages"]
    advantages = advantages.tolist() if isinstance(advantages, Tensor) else advantages
    tokens = {
        "mask": _numbers(sample.get("loss_masks", [1] * length)),
        "advantages": _numbers(advantages if isinstance(advantages, list) else [advantages] * length),
        **{name: _numbers(sample[key]) for key, name in _SLIME.items() if sample.get(key) is not None},
    }
    tokens["logprobs"] = tokens.get("old_logprobs", tokens.get("rollout_logprobs", [float("nan")] * length))
    for name, values in tokens.items():
        if len(values) != length:
            raise ValueError(f"{name}: {len(values)} values for {length} tokens")
    prompt = ids[:-length]
    reward = sample.get("rewards")
    return Row(prompt, ids[-length:], tokens, reward=None if reward is None else float(reward))


def read_foreign(path: Path) -> tuple[list[Rank], list[str]]:
    """The ranks of every step that another trainer wrote, and what was left out.

    Args:
        path: a file, or a folder of files: ``token_exports`` of prime-rl, ``train_data_stepN.jsonl`` of NeMo-RL, what
            slime's ``--save-debug-train-data`` writes (``.pt``, read without running anything in it).

    Raises:
        ReportError: it is none of these, or a file of verl's rollouts, which have no tokens.
    """
    files = [path] if is_file(path) else next((some for kind in _FILES if (some := sorted(path.glob(kind)))), [])
    ranks: list[Rank] = []
    notes: list[str] = []
    for number, file in enumerate(files):
        try:
            ranks += _slime_ranks(file, number) if file.suffix == ".pt" else _line_ranks(file, notes)
        except (
            Damaged,
            OSError,
            KeyError,
            TypeError,
            ValueError,
            RuntimeError,
            EOFError,
            pickle.UnpicklingError,
        ) as error:
            if isinstance(error, ReportError):
                raise
            text = str(error).strip().splitlines()
            notes.append(f"{file.name} is left out: {text[0][:200] if text else type(error).__name__}.")
    return _numbered(ranks), notes


def _numbered(ranks: list[Rank]) -> list[Rank]:
    """The ranks of a step, numbered from 0: no trainer says how many wrote."""
    of_step: dict[int, int] = Counter(rank.header.step for rank in ranks)
    seen: dict[int, int] = Counter()
    numbered = []
    for rank in sorted(ranks, key=lambda rank: (rank.header.step, rank.header.rank)):
        step = rank.header.step
        changes = {"rank": seen[step], "ranks": of_step[step]}
        ids = rank.tensors["sequence_ids"] + seen[step] * MOST_RESPONSES
        seen[step] += 1
        numbered.append(Rank(rank.header.model_copy(update=changes), {**rank.tensors, "sequence_ids": ids}))
    return numbered


def _line_ranks(file: Path, notes: list[str]) -> list[Rank]:
    rows: dict[tuple[int, int], list[Row]] = {}
    bad, host = 0, ""
    step = int("".join(re.findall(r"step(\d+)", file.name)) or 0)
    with file.open("rb") as lines:
        for line in filter(bytes.strip, lines):
            try:
                if b'"trainer_logprobs"' in line:
                    host, record = "prime-rl", _Prime.model_validate_json(line)
                    rows.setdefault((record.step, record.rank), []).append(record.row())
                else:
                    host = "NeMo-RL"
                    rows.setdefault((step, 0), []).append(_Nemo.model_validate_json(line).row())
            except ValidationError:
                if _is_verl(line):
                    raise ReportError(
                        f"{file}: a rollout dump of verl has texts and scores, and neither tokens nor log-probs: there "
                        f"is nothing to replay. Take rlstab's adapter for verl, which writes dumps."
                    ) from None
                bad += 1
    if bad:
        notes.append(f"{file.name}: left out {counted(bad, 'line')} that cannot be read.")
    return [rank_of(some, host, *key) for key, some in rows.items()]


def _is_verl(line: bytes) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and {"input", "output", "score"} <= record.keys()


def _slime_ranks(file: Path, number: int) -> list[Rank]:
    saved = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(saved, dict):
        raise Damaged("not a mapping")
    step = int(saved.get("rollout_id", number))
    if "samples" in saved:  # format_version 2, all ranks in one file
        return [rank_of(map(_slime, saved["samples"]), "slime", step, 0)]
    data, rank = saved["rollout_data"], int(saved.get("rank", 0))
    count = len(data["response_lengths"])
    columns = {name: values for name, values in data.items() if isinstance(values, list) and len(values) == count}
    samples = ({name: values[place] for name, values in columns.items()} for place in range(count))
    return [rank_of(map(_slime, samples), "slime", step, rank)]


def rank_of(rows: Iterable[Row], host: str, step: int, rank: int) -> Rank:
    """The tensors of some responses, as a dump has them."""
    rows = list(rows)
    if not rows:
        raise Damaged("no response in it")
    names = set.intersection(*(set(row.tokens) for row in rows))
    parts = {part: place for place, part in enumerate(sorted({row.part for row in rows}))}
    tensors = {name: torch.tensor([value for row in rows for value in row.tokens[name]]) for name in names}
    tensors |= {
        "mask": (tensors["mask"] != 0).to(torch.uint8),
        "ids": torch.tensor([token for row in rows for token in row.ids]),
        "lengths": torch.tensor([len(row.ids) for row in rows]),
        "prompt_lengths": torch.tensor([len(row.prompt) for row in rows]),
        "prompt_ids": torch.tensor([token for row in rows for token in row.prompt], dtype=torch.int64),
        "sequence_ids": torch.arange(len(rows)),
        "group_ids": torch.tensor([zlib.crc32(repr(row.prompt).encode()) for row in rows]),
        "parts": torch.tensor([parts[row.part] for row in rows]),
    }
    if all(row.reward is not None for row in rows):
        tensors["rewards"] = torch.tensor([float(row.reward or 0) for row in rows])
    return checked(Rank(Header(host=host, step=step, rank=rank, parts=len(parts)), tensors))


def _numbers(values: Any) -> list[float]:
    listed = values.tolist() if isinstance(values, Tensor) else values
    return [float("nan") if value is None else float(value) for value in listed]


def _same(length: int, *columns: list[Any]) -> None:
    for column in columns:
        if len(column) != length:
            raise ValueError(f"{len(column)} values for {length} tokens")
