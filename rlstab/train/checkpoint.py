"""Checkpoints: safetensors and JSON, written beside and renamed, so that a kill at any moment leaves a usable one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlstab.config.renamed import new_record
from rlstab.core.objective import State
from rlstab.errors import CheckpointError
from rlstab.train.policy import Policy

FORMAT = 2

#: Formats that are read; the first had ``step`` for ``rollout``.
READABLE = (1, FORMAT)


@dataclass(frozen=True)
class Checkpoint:
    """What is needed beside weights and optimizer to continue.

    Attributes:
        rollout: rollouts completed; it is also the position in the data, and every random number derives from it.
        optimizer_steps: attempted so far.
        state: of the objective.
        objective: hash of the objective that the state belongs to.
    """

    rollout: int
    optimizer_steps: int
    state: State
    objective: str


def save(folder: Path, checkpoint: Checkpoint, policy: Policy, optimizer: torch.optim.Optimizer, *, keep: int) -> Path:
    """Write ``folder/rollout-000050`` and remove all but the newest ``keep``.

    Everything is written to a hidden folder, flushed to disk, and renamed last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".writing-*"):
        shutil.rmtree(left_over)
    final = folder / f"rollout-{checkpoint.rollout:06d}"
    writing = folder / f".writing-{final.name}"
    policy.save(writing)
    tensors: dict[str, Tensor] = {}
    for name, parameter in policy.model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{name}/{key}"] = value.detach().contiguous()
    plain = _without_tensors(checkpoint.state, "state", tensors)
    save_file(tensors, writing / "trainer.safetensors")
    record = {
        "format": FORMAT,
        "rollout": checkpoint.rollout,
        "optimizer_steps": checkpoint.optimizer_steps,
        "objective": checkpoint.objective,
        "state": plain,
    }
    (writing / "trainer.json").write_text(json.dumps(record, indent=1))
    for path in [*writing.iterdir(), writing]:
        _flush(path)
    if final.exists():
        shutil.rmtree(final)
    writing.rename(final)
    _flush(folder)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints of a run, oldest first."""
    found = [*folder.glob("step-[0-9]*"), *folder.glob("rollout-[0-9]*")]  # the first is what it was called before
    return sorted(found, key=lambda one: int(one.name.rpartition("-")[2]))


def load(path: Path, policy: Policy, optimizer: torch.optim.Optimizer, *, objective: str) -> Checkpoint:
    """Restore the optimizer into ``optimizer`` and return the rest; the weights are loaded with the policy.

    Raises:
        CheckpointError: damaged, of another format, or of another objective.
    """
    try:
        record = json.loads((path / "trainer.json").read_text())
        tensors = load_file(path / "trainer.safetensors")
        version, owner = record["format"], record["objective"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}. Delete this folder, and --resume takes the checkpoint before it."
        ) from error
    if version not in READABLE:
        raise CheckpointError(
            f"{path} has format {version}, this version of rlstab reads {' and '.join(map(str, READABLE))}. Resume it "
            f"with the version that wrote it."
        )
    if owner != objective:
        raise CheckpointError(
            f"{path} belongs to the objective {owner}, the configuration describes {objective}. A checkpoint holds the "
            f"state of its own objective. Resume with the config.yaml of that run, or start over in another "
            f"tracking.out."
        )
    parameters = dict(policy.model.named_parameters())
    restored: dict[str, dict[str, Tensor]] = {}
    for label, value in tensors.items():
        kind, _, rest = label.partition("/")
        if kind == "optimizer":
            name, _, key = rest.rpartition("/")
            restored.setdefault(name, {})[key] = value
    for name, values in restored.items():
        if name not in parameters:
            raise CheckpointError(f"{path} has optimizer state of '{name}', which the model does not have. Delete it.")
        device = parameters[name].device
        optimizer.state[parameters[name]] = {
            key: value if key == "step" else value.to(device) for key, value in values.items()
        }
    state = _with_tensors(record["state"], tensors)
    record = new_record(record)
    return Checkpoint(int(record["rollout"]), int(record["optimizer_steps"]), state, owner)


def _without_tensors(state: Mapping[str, Any], place: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            plain[key] = _without_tensors(value, f"{place}/{key}", tensors)
        elif isinstance(value, Tensor):
            tensors[f"{place}/{key}"] = value.detach().contiguous()
            plain[key] = {"tensor": f"{place}/{key}"}
        else:
            plain[key] = value
    return plain


def _with_tensors(plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        key: (tensors[value["tensor"]] if value.keys() == {"tensor"} else _with_tensors(value, tensors))
        if isinstance(value, dict)
        else value
        for key, value in plain.items()
    }


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
