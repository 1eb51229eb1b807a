"""Checkpoints: safetensors and JSON with checksums, written beside and renamed: a kill leaves whole ones only."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from rlstab.config.renamed import new_record
from rlstab.core.objective import State
from rlstab.core.saved_state import dump_state, load_state
from rlstab.errors import CheckpointError, kind_of
from rlstab.paths import is_dir
from rlstab.train import durable
from rlstab.train.engines import Moments
from rlstab.train.policy import Policy
from rlstab.train.tensor_file import write_tensors

#: Later formats keep the name of the index and its own checksum, so that a flipped bit in this number can be told.
FORMAT = 4

#: Formats that are read. The first had ``step`` for ``rollout``, the second no checksums and nothing of its run, the
#: third nothing of the stages.
READABLE = (1, 2, 3, FORMAT)

#: The last file to be written: position and state, the run it belongs to, a checksum of each other file and its own.
INDEX = "trainer.json"

#: What says that a name does not lead to a file.
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, None}

_TENSORS = "trainer.safetensors"

#: What AdamW keeps of a parameter.
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")

_NAME = re.compile(r"(?:rollout|step)-([0-9]{1,18})")  # the second is what it was called before

#: What an index must hold.
_KINDS = {"rollout": int, "optimizer_steps": int, "objective": str, "state": dict}
_KINDS_SINCE_3 = {"run": dict, "tensors": list, "files": dict}
_KINDS_SINCE_4 = {"standing": dict}
_KINDS_OF_RUN = {"id": str, "hash": str, "settings": dict, "providers": dict}


class Damaged(Exception):
    """Why a checkpoint cannot be used, in a few words."""


@dataclass(frozen=True)
class Identity:
    """Which run a checkpoint belongs to.

    Attributes:
        id: drawn when the run was first started.
        hash: of the run's settings.
        settings: of the run, with every default.
        providers: names of the user's own functions.
    """

    id: str
    hash: str
    settings: Mapping[str, Any]
    providers: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """What is needed beside weights and optimizer to continue.

    Attributes:
        rollout: rollouts completed; it is also the position in the data, and every random number derives from it.
        optimizer_steps: attempted so far.
        state: of the objective.
        objective: hash of the objective that the state belongs to.
        standing: where the making of rollouts stands: numbers, states of the stages, rollouts that wait; None in
            formats before 4.
        run: that it belongs to; None in formats before 3.
    """

    rollout: int
    optimizer_steps: int
    state: State
    objective: str
    standing: Mapping[str, Any] | None = field(repr=False)
    run: Identity | None = field(default=None, repr=False)


def save(
    folder: Path, checkpoint: Checkpoint, policy: Policy, moments: Moments, gathered: Callable[[Tensor], Tensor]
) -> Path:
    """Write ``folder/rollout-000050``: to a hidden folder, flushed to the disk, and renamed last.

    Args:
        folder: of the run's checkpoints.
        checkpoint: what is neither weights nor moments.
        policy: with all of its weights.
        moments: of all weights that the optimizer has moved.
        gathered: makes one of them whole; asked for one after the other, in their order.

    Raises:
        CheckpointError: it cannot be written; those before it are untouched.
    """
    assert checkpoint.run is not None
    final = folder / f"rollout-{checkpoint.rollout:06d}"
    writing = folder / f".writing-{final.name}"
    tidy(folder)
    with durable.saying(final, CheckpointError):
        try:
            writing.mkdir()
            policy.save(writing)
            tensors = {
                f"optimizer/{name}/{key}": value for name, values in moments.items() for key, value in values.items()
            }
            kept, own = dump_state({"state": checkpoint.state, "standing": checkpoint.standing})
            tensors |= own
            write_tensors(writing / _TENSORS, tensors, gathered)
            files = sorted(path for path in writing.rglob("*") if path.is_file())
            record = {
                "format": FORMAT,
                "rollout": checkpoint.rollout,
                "optimizer_steps": checkpoint.optimizer_steps,
                "objective": checkpoint.objective,
                **kept["state"],
                "tensors": kept["tensors"],
                "optimizer": sorted(moments),
                "run": {name: getattr(checkpoint.run, name) for name in _KINDS_OF_RUN},
                "files": {path.relative_to(writing).as_posix(): _sum_of(path) for path in files},
            }
            for path in writing.rglob("*"):
                durable.flush(path)
            durable.write(writing / INDEX, json.dumps({**record, "sha256": _sum(record)}, indent=1))
            discard(final)
            durable.move(writing, final)
        except (OSError, SafetensorError):
            durable.remove(writing)  # a full disk needs the room
            raise
    return final


def tidy(folder: Path) -> None:
    """Remove what a kill left of a checkpoint that was being written or removed."""
    with durable.saying(folder):
        for left_over in (*folder.glob(".writing-*"), *folder.glob(".removing-*")):
            durable.remove(left_over)


def discard(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that a kill leaves no part of one under its name."""
    if path.exists() or path.is_symlink():
        removing = path.with_name(f".removing-{path.name}")
        durable.remove(removing)
        durable.move(path, removing)
        durable.remove(removing)


def discard_own(path: Path) -> None:
    """Remove the files that were written with a checkpoint; others stay. Formats before 3 do not name theirs."""
    try:
        named = {*_index(path)["files"], INDEX}
        others = [one for one in path.rglob("*") if one.is_file() and one.relative_to(path).as_posix() not in named]
    except (Damaged, CheckpointError, LookupError):
        others = []
    if not others:
        discard(path)
    for name in sorted(named) if others else ():
        durable.remove(path / name)


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints of a run, oldest first."""
    found = folder.iterdir() if is_dir(folder) else ()
    return sorted((one for one in found if _NAME.fullmatch(one.name)), key=number)


def number(path: Path) -> int:
    """The rollout in a checkpoint's name."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else -1


def owner(path: Path) -> str | None:
    """The id of the run that a checkpoint says it belongs to; None where it does not say, or is damaged."""
    try:
        record = json.loads(_read(path / INDEX))
        name = str(record["run"]["id"])
        return name if _intact(record) else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def verify(path: Path) -> Checkpoint:
    """What a checkpoint holds, with None for each tensor, after each of its files was found as it was written.

    Formats before 3 have no checksums: their files are only looked at for whether they can be read.

    Raises:
        Damaged: it cannot be used.
        CheckpointError: it was written by another version of rlstab.
    """
    record = _index(path)
    try:
        for name, wanted in record.get("files", {}).items():
            if _sum_of(path / name) != wanted:
                raise Damaged(f"{name} is not what was written: its checksum differs")
        if "files" not in record:
            json.loads(_read(path / "config.json"))
            if not any(path.glob("model*.safetensors")):
                _require_file(path / "model.safetensors")
            for file in (*path.glob("model*.safetensors"), path / _TENSORS):
                with safe_open(file, "pt"):
                    pass
        shapes = _shapes(path / _TENSORS)
        found = _checkpoint(record, dict.fromkeys(shapes))
        weights = [_shapes(file) for file in path.glob("model*.safetensors")]
        _require_whole(shapes, record.get("optimizer"), {name: one[name] for one in weights for name in one})
        return found
    except OSError as error:
        raise _damaged(path, error) from error
    except (ValueError, RecursionError, SafetensorError) as error:
        raise Damaged(durable.reason(error)) from error


def load(path: Path, weights: Mapping[str, Tensor], *, objective: str) -> tuple[Checkpoint, Moments]:
    """What a checkpoint holds beside the weights, which are loaded with the policy.

    Args:
        path: of the checkpoint.
        weights: those of the run, by name; only their whole shapes are looked at.
        objective: hash of the run's objective.

    Raises:
        CheckpointError: damaged, of another version, or of another objective.
    """
    try:
        tensors = load_file(path / _TENSORS)
        found = _checkpoint(_index(path), tensors)
        if found.objective != objective:
            raise CheckpointError(
                f"{path} belongs to the objective {found.objective}, the configuration describes {objective}. A "
                f"checkpoint holds the state of its own objective. Resume with the config.yaml of that run, or start "
                f"over in another tracking.out."
            )
        moments = _moments(tensors, weights)
    except (Damaged, OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is damaged: {durable.reason(error)}. Move this folder away, and --resume takes the checkpoint "
            f"before it."
        ) from error
    return found, moments


def _index(path: Path) -> dict[str, Any]:
    """The index of a checkpoint, complete and of the right types."""
    try:
        record = json.loads(_read(path / INDEX))
    except OSError as error:
        raise _damaged(path, error) from error
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{INDEX} is no JSON: {durable.reason(error)}") from error
    if not isinstance(record, dict):
        raise Damaged(f"{INDEX} holds {kind_of(record)} where a mapping is expected")
    version = record.get("format")
    if type(version) is not int:
        raise Damaged(f"{INDEX} says no format")
    if (version >= 3 or "sha256" in record) and not _intact(record):
        raise Damaged(f"{INDEX} is not what was written: its checksum differs")
    if version > FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, this version of rlstab reads {', '.join(map(str, READABLE))}. Resume it "
            f"with the version that wrote it."
        )
    if version >= 3:
        _check(record, {**_KINDS, **_KINDS_SINCE_3, **(_KINDS_SINCE_4 if version > 3 else {})})
        _check(record["run"], _KINDS_OF_RUN)
        _check(record, {"optimizer": list} if "optimizer" in record else {})  # the first of this format have none
        return record
    record = new_record(record)
    _check(record, _KINDS)
    return {name: record[name] for name in _KINDS}


def _damaged(path: Path, error: OSError) -> Damaged | CheckpointError:
    """A file that is not there is damage; one that cannot be read now may be whole, and nothing must replace it."""
    if error.errno not in _NOT_THERE:
        return CheckpointError(
            f"{error.filename or path} cannot be read: {durable.reason(error)}. Mend that, or move {path} away."
        )
    return Damaged(f"{Path(error.filename).name if error.filename else INDEX}: {durable.reason(error)}")


def _check(record: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    for key, kind in kinds.items():
        if type(record.get(key)) is not kind:
            raise Damaged(f"'{key}' in {INDEX} is {kind_of(record.get(key))}, not {kind_of(kind())}")


def _checkpoint(record: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> Checkpoint:
    state: State
    standing = None
    try:
        if "tensors" in record:
            if record["format"] > 3:
                both = {name: record.get(name) for name in ("state", "standing")}
                own = load_state({"state": both, "tensors": record["tensors"]}, tensors)
                state, standing = own["state"], own["standing"]
            else:
                state = load_state(record, tensors)
        else:
            state = _with_tensors(record["state"], tensors)
    except (LookupError, TypeError) as error:
        raise Damaged(f"the state names a tensor that {_TENSORS} does not have: {error}") from error
    run = Identity(*(record["run"][name] for name in _KINDS_OF_RUN)) if "run" in record else None
    return Checkpoint(record["rollout"], record["optimizer_steps"], state, record["objective"], standing, run)


def _require_whole(shapes: Mapping[str, list[int]], listed: list[str] | None, weights: Mapping[str, list[int]]) -> None:
    """Each parameter has all that AdamW keeps of it or nothing, in its shape; ``listed`` have it, if that is known."""
    found: dict[str, dict[str, list[int]]] = {}
    for label, shape in shapes.items():
        kind, _, rest = label.partition("/")
        if kind == "optimizer":
            name, _, key = rest.rpartition("/")
            found.setdefault(name, {})[key] = shape
    for name in sorted(found.keys() ^ set(found if listed is None else listed)):
        raise Damaged(f"the optimizer state of '{name}' is {'not known' if name in found else 'missing'}")
    for name, values in found.items():
        own = weights.get(name, values.get("exp_avg"))
        if values != dict(zip(_MOMENTS, ([], own, own), strict=True)):
            raise Damaged(f"the optimizer state of '{name}' is incomplete or of another shape")


def _shapes(path: Path) -> dict[str, list[int]]:
    """Of each tensor of a safetensors file."""
    with safe_open(path, "pt") as opened:
        return {name: list(opened.get_slice(name).get_shape()) for name in opened.keys()}


def _moments(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Moments:
    restored: dict[str, dict[str, Tensor]] = {}
    for label, value in tensors.items():
        kind, _, rest = label.partition("/")
        if kind == "optimizer":
            name, _, key = rest.rpartition("/")
            restored.setdefault(name, {})[key] = value
    for name, values in restored.items():
        if name not in weights:
            raise Damaged(f"it has optimizer state of '{name}', which the model does not have")
        wanted = dict(zip(_MOMENTS, (torch.Size(), weights[name].shape, weights[name].shape), strict=True))
        if {key: value.shape for key, value in values.items()} != wanted:
            raise Damaged(f"the optimizer state of '{name}' is incomplete or of another shape")
    return restored


def _with_tensors(plain: Mapping[str, Any], tensors: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """The state as formats before 3 have it: ``{"tensor": name}`` stands for a tensor."""
    return {
        key: (tensors[value["tensor"]] if value.keys() == {"tensor"} else _with_tensors(value, tensors))
        if isinstance(value, dict)
        else value
        for key, value in plain.items()
    }


def _read(path: Path) -> bytes:
    _require_file(path)
    return path.read_bytes()


def _require_file(path: Path) -> None:
    if not path.is_file():  # reading a pipe would block
        raise FileNotFoundError(errno.ENOENT, "no such file", path)


def _intact(record: Mapping[str, Any]) -> bool:
    """Whether an index is as it was written, by the checksum in it."""
    return _sum({key: value for key, value in record.items() if key != "sha256"}) == record.get("sha256")


def _sum(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _sum_of(path: Path) -> str:
    _require_file(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
