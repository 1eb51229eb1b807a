"""The dump of an optimizer step: what the loss of a trainer saw of its tokens, in two files per rank.

``step-000012.rank-0.safetensors`` has the tensors, ``step-000012.rank-0.json`` says what they are. The second is
written last, and each appears only when it is whole: a rank that was killed between them has no dump of the step.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save
from torch import Tensor

from rlstab.core.batch import TokenBatch

#: Tensors by response: ``(S,)``, those of `REQUIRED` in every dump.
BY_RESPONSE: Mapping[str, str] = {
    "lengths": "tokens of the response, int64",
    "prompt_lengths": "tokens of its prompt, int64",
    "sequence_ids": "stable identity, int64",
    "group_ids": "identity of its prompt, int64",
    "parts": "number of its micro-batch on this rank, int64",
    "rewards": "reward of the response",
}
#: Tensors by token: ``(n,)``, the tokens of the responses one after another. Log-probs and entropies are in nats.
BY_TOKEN: Mapping[str, str] = {
    "ids": "the token, int64",
    "mask": "1 where the token counts in the loss, else 0 (what a tool answered), uint8",
    "advantages": "advantage",
    "logprobs": "log-prob under the policy at the start of the optimizer step",
    "old_logprobs": "log-prob under the policy that the ratio divides by; missing where that is the live one",
    "rollout_logprobs": "log-prob that the sampler reported",
    "ref_logprobs": "log-prob under the reference policy",
    "entropies": "entropy of the next-token distribution",
    "max_logprobs": "log-prob of the likeliest token",
    "log_kept_mass": "log of the mass that a min-p filter keeps",
    "sum_p_sq": "sum of the squared probabilities of the vocabulary",
    "truncated": "1 on the tokens of a response that was cut off",
    "branch": "1 on the tokens of a branch",
    "block_ids": "number of the block of its response, below 0 for none",
    "coefficients": "derivative of what the trainer backpropagated by the log-prob of the token",
}
#: Without these there is nothing to look at. ``prompt_ids``, ``(m,)`` int64, has the tokens of all prompts.
REQUIRED = ("lengths", "ids", "mask", "advantages", "logprobs")

_Name = Annotated[str, Field(max_length=200)]


class HostLoss(BaseModel):
    """The loss that a trainer says it has.

    Attributes:
        name: of the formula, such as ``trl/dapo``; see :mod:`rlstab.replay.host_loss`.
        settings: of the formula, by its own names.
        values: by micro-batch of this rank, what was backpropagated.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    name: _Name
    settings: dict[str, bool | int | float | str | None] = {}
    values: list[float | None] = []


class Header(BaseModel):
    """What ``step-N.rank-R.json`` says.

    Attributes:
        host: the trainer and its version.
        step: number of the optimizer step, from 1.
        rank: of the process that wrote this.
        ranks: how many wrote.
        parts: micro-batches of this rank in this optimizer step.
        first: no weight has changed since the responses were sampled, so every ratio is 1.
        learning_rate: of this optimizer step.
        temperature: that of the log-probs.
        loss: what the trainer says it minimises, None where it does not.
        sha256: of the tensors' file, hexadecimal.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    format: Literal[1] = 1
    host: _Name
    step: Annotated[int, Field(ge=0)]
    rank: Annotated[int, Field(ge=0)] = 0
    ranks: Annotated[int, Field(ge=1)] = 1
    parts: Annotated[int, Field(ge=1)] = 1
    first: bool = False
    learning_rate: Annotated[float, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(gt=0)] | None = None
    loss: HostLoss | None = None
    sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""


def file_name(header: Header, ending: str) -> str:
    """The name of one of the two files."""
    return f"step-{header.step:06d}.rank-{header.rank}.{ending}"


def write_dump(folder: Path, header: Header, tensors: Mapping[str, Tensor]) -> Path:
    """Write what one rank knows of an optimizer step, in place of an earlier dump of the same.

    Args:
        folder: of the dump; made where it is missing.
        header: without the checksum.
        tensors: by the names of :data:`BY_RESPONSE` and :data:`BY_TOKEN`, and ``prompt_ids``.

    Returns:
        the path of the JSON file.
    """
    data = save({name: values.detach().cpu().contiguous() for name, values in tensors.items()})
    folder.mkdir(parents=True, exist_ok=True)
    whole = header.model_copy(update={"sha256": hashlib.sha256(data).hexdigest()})
    path = folder / file_name(header, "json")
    path.unlink(missing_ok=True)  # it would describe other tensors
    _replace(folder / file_name(header, "safetensors"), data)
    _replace(path, whole.model_dump_json(indent=1).encode())
    return path


def _replace(path: Path, data: bytes) -> None:
    """A file that is there only when it is whole."""
    beside = path.with_name(f"{path.name}.part")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def tensors_of(parts: Sequence[TokenBatch], ids: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors of a dump from the parts of a plan, for a trainer whose loss is an objective.

    Args:
        parts: all micro-batches of this rank, of tokens that count in the loss.
        ids: by part, ``(n,)`` int64, its tokens.
    """
    names = set.intersection(*({name for name, _ in part.per_token()} for part in parts))
    kept = {name for name in names & BY_TOKEN.keys() if name != "old_logprobs" or not parts[0].live_ratio}
    orders = [torch.argsort(part.sequence, stable=True) for part in parts]  # a response's tokens in a row
    pairs = list(zip(parts, orders, strict=True))
    values = {name: torch.cat([getattr(part, name)[order] for part, order in pairs]) for name in kept}
    count = sum(map(len, parts))
    return values | {
        "ids": torch.cat([own[order] for own, order in zip(ids, orders, strict=True)]),
        "mask": torch.ones(count, dtype=torch.uint8),
        "lengths": torch.cat([part.lengths.long() for part in parts]),
        "parts": torch.cat([torch.full_like(part.sequence_ids, place) for place, part in enumerate(parts)]),
        "sequence_ids": torch.cat([part.sequence_ids for part in parts]),
        "group_ids": torch.cat([part.group_ids for part in parts]),
    }
