"""Checkpoints, written to a temporary folder and renamed, so that a kill leaves only whole ones.

Weights are written as transformers writes them, so that a checkpoint is a model. Moments are gathered and written file
by file: accelerate's ``save_state`` gathers all of them in one process, which takes twice the memory of the weights.
Only safetensors and JSON are read, neither of which can run code.
"""

import fnmatch
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from rlstab.core.saved_state import dump_state, load_state
from rlstab.errors import CheckpointError
from rlstab.files import checksum_of_file, filesystem_errors
from rlstab.hub import first_line
from rlstab.safe_read import read_json
from rlstab.train.engine import Engine, as_shard_of, gathered
from rlstab.train.rollout import Progress

#: The file that is written last: progress, the run it belongs to, and checksums of all files, this one included.
INDEX = "trainer.json"

_TENSORS = "trainer.safetensors"
_MOMENTS = "optimizer{suffix}.safetensors"
_WRITING = ".writing"

#: The largest file of moments, which each process gathers.
SHARD = "200MB"

_NAME = re.compile("rollout-[0-9]{6,18}")


def save(folder: Path, progress: Progress, engine: Engine, about: Mapping[str, Any]) -> Path:
    """Write ``folder/rollout-000050``; every process calls it.

    Args:
        folder: holds the run's checkpoints.
        progress: everything that is neither weights nor moments.
        engine: holds the weights and moments.
        about: the run that the checkpoint belongs to: its id, hash and settings.

    Returns:
        the folder of the checkpoint.

    Raises:
        CheckpointError: the checkpoint cannot be written; earlier ones are untouched.
    """
    accelerator, saved = engine.accelerator, progress.saved(engine.policy.pad_id)
    main, final, writing = accelerator.is_main_process, folder / f"rollout-{progress.rollouts:06d}", folder / _WRITING
    with filesystem_errors(final, CheckpointError, (OSError, SafetensorError)):
        try:
            if main:
                shutil.rmtree(writing, ignore_errors=True)  # left by a kill
                writing.mkdir()
            with engine.gathered_policy() as policy:
                if main:
                    policy.save(writing)
            _save_moments(engine, writing)
            if main:
                plain, tensors = dump_state(saved)
                save_file(tensors, writing / _TENSORS)
                paths = sorted(writing.rglob("*"))  # a tokenizer may write folders
                sums = {
                    path.relative_to(writing).as_posix(): checksum_of_file(path) for path in paths if path.is_file()
                }
                record = {"rollout": progress.rollouts, "run": dict(about), "files": sums, **plain}
                text = json.dumps({**record, "sha256": _sum(record)}, indent=1)
                (writing / INDEX).write_text(text, encoding="utf-8")
                for path in (*paths, writing / INDEX, writing):
                    _flush(path)
                remove(final)
                writing.rename(final)
                _flush(folder)
        except BaseException:
            if main:
                shutil.rmtree(writing, ignore_errors=True)  # a full disk needs the space
            raise
    accelerator.wait_for_everyone()
    return final


def _save_moments(engine: Engine, folder: Path) -> None:
    """Write the optimizer's state of each weight, gathered for one file at a time."""
    moments = {
        f"{index}.{key}": value
        for index, weight in enumerate(engine.trained)
        for key, value in sorted(engine.optimizer.state[weight].items())
    }
    # only shapes, so that every process splits them in the same way
    shapes = {name: torch.empty(value.shape, device="meta") for name, value in moments.items()}
    split = split_torch_state_dict_into_shards(shapes, filename_pattern=_MOMENTS, max_shard_size=SHARD)
    for name, keys in split.filename_to_tensors.items():
        tensors = {key: gathered(moments[key], engine.accelerator.device).cpu() for key in keys}
        if engine.accelerator.is_main_process:
            save_file(tensors, folder / name)


def load(path: Path, engine: Engine) -> dict[str, Any]:
    """Restore the optimizer from a checkpoint, under any engine and in any number of processes.

    The weights are loaded with the policy.

    Returns:
        what :meth:`Progress.restored` takes.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    try:
        index = read_json(path / INDEX)
        for file in fnmatch.filter(index["files"], _MOMENTS.format(suffix="*")):  # not what else is in the folder
            with safe_open(path / file, "pt") as moments:
                for name in moments.keys():
                    number_of_weight, _, key = name.partition(".")
                    weight = engine.trained[int(number_of_weight)]
                    engine.optimizer.state[weight][key] = as_shard_of(weight, moments.get_tensor(name))
        return load_state(index, load_file(path / _TENSORS))
    except Exception as error:  # damaged files raise errors of many types
        raise CheckpointError(
            f"{path} is damaged: {first_line(error)}. Move this folder away: --resume takes the checkpoint before it."
        ) from error


def read(path: Path) -> dict[str, Any] | None:
    """The index of a checkpoint; None if one of its files is missing or differs from what was written."""
    record = _index(path)
    if not record or record["rollout"] != number(path):
        return None
    intact = all(
        (path / name).is_file() and checksum_of_file(path / name) == sha256 for name, sha256 in record["files"].items()
    )
    return record if intact else None


def checkpoints(folder: Path) -> list[Path]:
    """Folders named as checkpoints are, oldest first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=number)


def number(path: Path) -> int:
    """The rollout in a checkpoint's name."""
    return int(path.name.removeprefix("rollout-"))


def owner(path: Path) -> str | None:
    """The id of the run that wrote a checkpoint; None if the index is damaged or missing."""
    record = _index(path)
    return str(record["run"]["run_id"]) if record else None


def remove(path: Path) -> None:
    """Remove the files of a checkpoint, the index last; a folder that holds other files stays, with these files."""
    files = read_json(path / INDEX).get("files", {})
    names = [*files, INDEX] if isinstance(files, dict) else []
    listed = [name for name in names if (path / name).parent.resolve().is_relative_to(path.resolve())]
    for name in listed:
        (path / name).unlink(missing_ok=True)
    for folder in sorted({path, *(path / parent for name in listed for parent in Path(name).parents)}, reverse=True):
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()


def _index(path: Path) -> dict[str, Any]:
    """The index, if its checksum shows that it is as it was written; else empty."""
    record = read_json(path / INDEX)
    checksum = record.pop("sha256", None)
    return record if checksum == _sum(record) else {}


def _sum(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _flush(path: Path) -> None:
    """Force the content of a file, or the names in a folder, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
