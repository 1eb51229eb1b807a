"""The state of an objective as plain JSON and separate tensors, as a checkpoint holds it, and back."""

import functools
import json
import operator
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlstab.core.objective import State


def dump_state(state: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What JSON holds, and what safetensors holds.

    Returns:
        ``{"state": ..., "tensors": ...}``, the state with null for each tensor and the path of each; and the tensors
        by name, ``state/0`` and so on, contiguous and without gradient.
    """
    paths: list[list[str]] = []
    tensors: dict[str, Tensor] = {}

    def plain(value: Any, path: list[str]) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(entry, [*path, key]) for key, entry in value.items()}
        if not isinstance(value, Tensor):
            return value
        tensors[f"state/{len(paths)}"] = value.detach().contiguous()
        paths.append(path)
        return None

    return {"state": plain(state, []), "tensors": paths}, tensors


def load_state(record: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """The state that :func:`dump_state` was given; ``record`` may have further keys and is left alone.

    Raises:
        LookupError, TypeError: a tensor is missing, or the record is not one of :func:`dump_state`.
    """
    state: dict[str, Any] = json.loads(json.dumps(record["state"]))  # a copy, into which tensors are put
    for index, (*around, key) in enumerate(record["tensors"]):
        entries: Any = functools.reduce(operator.getitem, around, state)
        entries[key] = tensors[f"state/{index}"]
    return state
