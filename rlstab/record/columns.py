"""Values that other trainers write about a response, as tensors by the names of a record."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlstab.files import checksum
from rlstab.record.step import MOST_IDS, REQUIRED, Damaged
from rlstab.safe_read import as_float


@dataclass(frozen=True, eq=False)
class Response:
    """One response in a file of another trainer.

    Attributes:
        host: the trainer.
        rollout: its number.
        order: number of the optimizer step in the rollout.
        rank: the number of its process.
        tensors: its values, by the names of a record.
    """

    host: str
    rollout: int
    order: int
    rank: int
    tensors: Mapping[str, Tensor]


def columns_of(record: Mapping[str, Any], names: Mapping[str, str], count: int | None = None) -> dict[str, Tensor]:
    """``(n,)`` float64 values by token, by the names of a record; absent ones are left out.

    Args:
        record: a response, by the names of its trainer.
        names: the names of the trainer, by those of a record.
        count: length that each must have; None is that of the ids.

    Raises:
        Damaged: a value is not a list of that many numbers, or one of :data:`REQUIRED` is missing.
    """
    values = {"ids": column(record, names["ids"])}
    for name, host_name in names.items():
        if name != "ids" and (name in REQUIRED or record.get(host_name) is not None):
            values[name] = column(record, host_name, count or values["ids"].numel())
    return values


def column(record: Mapping[str, Any], name: str, count: int | None = None) -> Tensor:
    """``(n,)`` float64 values of a list or a tensor, ``count`` of them if that is given; NaN where they are None.

    Raises:
        Damaged: it is not such a list.
    """
    values = record.get(name)
    try:
        if isinstance(values, list):
            values = torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
        if isinstance(values, Tensor) and values.ndim == 1 and values.numel() == (count or values.numel()):
            return torch.empty(values.shape, dtype=torch.float64).copy_(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise Damaged(f"'{name}' is not a list of {'' if count is None else f'{count} '}numbers")


def tensors_of_response(
    values: Mapping[str, Tensor], start: int, part: int, reward: object = None
) -> dict[str, Tensor]:
    """The tensors of a response: tokens before its start are the prompt, and the last values belong to the response.

    Raises:
        Damaged: there is no response, an id is not that of a token, or a value that every loss reads is unknown.
    """
    ids = values["ids"]
    if not 0 <= start < ids.numel() or bool(((ids.frac() != 0) | (ids < 0) | (ids >= MOST_IDS)).any()):
        raise Damaged("its tokens are not token ids of a prompt and a response")
    prompt, count = ids[:start].long(), ids.numel() - start
    trained = values["mask"][-count:] != 0
    tokens = {name: column[-count:].float() for name, column in values.items() if name != "ids"}
    for name in {*REQUIRED, "old_logprobs"} & tokens.keys():
        if not bool(tokens[name][trained].isfinite().all()):
            raise Damaged(f"'{name}' is not known where a token counts in the loss")
    number = as_float(reward)
    return {
        **tokens,
        "rewards": torch.tensor([math.nan if number is None else number]),
        "ids": ids[start:].long(),
        "mask": trained.to(torch.uint8),
        "lengths": torch.tensor([count]),
        "prompt_lengths": torch.tensor([start]),
        "prompt_ids": prompt,
        "group_ids": torch.tensor([int(checksum(prompt.numpy().tobytes()), 16)]),
        "parts": torch.tensor([part]),
    }


def first(mask: Tensor) -> int:
    """The index of the first token that is trained on; the length if there is none."""
    return int((mask != 0).int().argmax()) if bool(mask.any()) else mask.numel()


def whole(value: object) -> int:
    """A number of a step, a rank or a length.

    Raises:
        Damaged: it is not one.
    """
    if not isinstance(value, int) or not 0 <= value < 10**12:
        raise Damaged("a step, rank or length is not a whole number")
    return value
