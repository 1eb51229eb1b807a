"""The state of an objective as plain JSON and tensors beside it, as a checkpoint holds it, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rlstab.core.objective import State


def dump_state(state: State) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What JSON holds, and what safetensors holds.

    Returns:
        ``{"state": ..., "tensors": ...}``, the state with null for each tensor and the place of each; and the tensors
        by name, ``state/0`` and so on, contiguous and without gradient.
    """
    places: list[list[str]] = []
    tensors: dict[str, Tensor] = {}
    plain = _without_tensors(state, (), places, tensors)
    return {"state": plain, "tensors": places}, tensors


def load_state(record: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """The state that :func:`dump_state` was given; ``record`` may have further keys and is left alone.

    Raises:
        LookupError, TypeError: a tensor is missing, or the record is none of :func:`dump_state`.
    """
    state: dict[str, Any] = json.loads(json.dumps(record["state"]))  # of its own: tensors are put into it
    for index, place in enumerate(record["tensors"]):
        inside: Any = state
        for key in place[:-1]:
            inside = inside[key]
        inside[place[-1]] = tensors[f"state/{index}"]
    return state


def _without_tensors(
    state: Mapping[str, Any], place: tuple[str, ...], places: list[list[str]], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            plain[key] = _without_tensors(value, (*place, key), places, tensors)
        elif isinstance(value, Tensor):
            tensors[f"state/{len(places)}"] = value.detach().contiguous()
            places.append([*place, key])
            plain[key] = None
        else:
            plain[key] = value
    return plain
