"""What one rank wrote of an optimizer step: read, and checked before anything is done with it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from rlstab.report.safe_read import first_line, read_bytes
from rlstab.trace.dump import BY_RESPONSE, BY_TOKEN, REQUIRED, Header

#: Tensors that are whole numbers; all others are floats.
_WHOLE = frozenset({"lengths", "prompt_lengths", "sequence_ids", "group_ids", "parts", "ids", "prompt_ids", "mask"})


@dataclass(frozen=True, eq=False)
class Rank:
    """What one rank wrote of one optimizer step.

    Attributes:
        header: what it says of itself.
        tensors: by name; see :data:`rlstab.trace.dump.BY_TOKEN`.
    """

    header: Header
    tensors: Mapping[str, Tensor]


class Damaged(Exception):
    """A file does not hold what it should."""


def read_rank(path: Path) -> Rank:
    """The tensors that belong to a description.

    Raises:
        Damaged: one of the two files is not what it should be.
    """
    try:
        header = Header.model_validate_json(read_bytes(path))
        data = read_bytes(path.with_suffix(".safetensors"))
        if hashlib.sha256(data).hexdigest() != header.sha256:
            raise Damaged("the tensors are not those that it was written with (checksum)")
        return checked(Rank(header, load_tensors(data)))
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise Damaged(f"{where or 'the file'}: {error.errors()[0]['msg'].lower()}") from error
    except OSError as error:
        raise Damaged(f"{error.strerror or first_line(error)}".lower()) from error
    except SafetensorError as error:
        raise Damaged(first_line(error)) from error


def checked(rank: Rank) -> Rank:
    """The same, if its tensors fit together; in int64 and float32.

    Raises:
        Damaged: they do not.
    """
    tensors = dict(rank.tensors)
    for name in REQUIRED:
        if name not in tensors:
            raise Damaged(f"it has no tensor '{name}'")
    count, total = tensors["lengths"].numel(), tensors["ids"].numel()
    for name, values in tensors.items():
        size = count if name in BY_RESPONSE else total if name in BY_TOKEN else values.numel()
        if values.shape != (size,):
            raise Damaged(f"'{name}' has shape {tuple(values.shape)}, expected ({size},)")
        if (name in _WHOLE) == values.is_floating_point():
            raise Damaged(f"'{name}' is {values.dtype}")
        tensors[name] = values.long() if name in _WHOLE else values.float()
    if bool((tensors["lengths"] < 0).any()) or int(tensors["lengths"].sum()) != total:
        raise Damaged(f"the lengths of its responses do not add up to its {total} tokens")
    asked, prompt_ids = tensors.get("prompt_lengths"), tensors.get("prompt_ids")
    if asked is not None and prompt_ids is not None and int(asked.clamp(min=0).sum()) != prompt_ids.numel():
        raise Damaged("the lengths of its prompts do not add up to its prompt tokens")
    part = tensors.setdefault("parts", torch.zeros(count, dtype=torch.int64))
    if count and not 0 <= int(part.min()) <= int(part.max()) < rank.header.parts:
        raise Damaged(f"a response is in a micro-batch beyond its {rank.header.parts}")
    return Rank(rank.header, tensors)
