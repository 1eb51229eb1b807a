"""Reads the files of trackers without a network and without running their code: one row for each record."""

import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

from rlstab.extras import how_to_install
from rlstab.safe_read import parse_json, read_bytes

#: The first bytes of a file of wandb, and the sizes of a block and of the head of a record in it.
_WANDB, _BLOCK, _HEAD = b":W&B", 32768, 7
#: The steps of a run: number and values.
Steps = list[tuple[int, dict[str, Any]]]


def wandb_rows(path: Path, remarks: list[str]) -> Iterator[dict[str, Any]]:
    """The history of ``wandb/offline-run-*/run-*.wandb``, which an online run keeps too.

    Args:
        path: the path of the file; its end may be cut off, or still be written.
        remarks: receives a note on what could not be read.

    Raises:
        OSError: it cannot be read.
    """
    if find_spec("wandb") is None:
        remarks.append(f"{path}: wandb is not installed. {how_to_install('train')}")
        return
    record = import_module("wandb.proto.wandb_internal_pb2").Record()
    for frame in _frames(read_bytes(path)):
        try:
            record.ParseFromString(frame)
            items = record.history.item if record.WhichOneof("record_type") == "history" else ()
            row = {"/".join(item.nested_key) or item.key: parse_json(item.value_json) for item in items}
        except Exception:  # of protobuf, or damaged JSON
            remarks.append(f"{path}: a damaged record is left out")
            continue
        if row:
            yield {"_step": record.history.step.num, **row}


def _frames(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format: blocks of 32 KiB, in them heads of checksum, length and kind."""
    position, record = _HEAD, b""
    while data.startswith(_WANDB) and position + _HEAD <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEAD:  # the rest of a block is padding
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + _HEAD])
        position += _HEAD + length
        if kind == 0 or position > len(data):
            return
        record += data[position - length : position]
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


def tensorboard_rows(path: Path, remarks: list[str]) -> Iterator[dict[str, Any]]:
    """The scalars of an ``events.out.tfevents.*`` file; see :func:`wandb_rows`."""
    if find_spec("tensorboard") is None:
        remarks.append(f"{path}: tensorboard is not installed. {how_to_install('tensorboard')}")
        return
    processing = import_module("tensorboard.backend.event_processing.event_accumulator")
    make_ndarray = import_module("tensorboard.util.tensor_util").make_ndarray
    events = processing.EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    values = [(event.step, name, event.value) for name in tags["scalars"] for event in events.Scalars(name)]
    for name in tags["tensors"]:  # scalars of TensorFlow 2
        arrays = ((event.step, make_ndarray(event.tensor_proto)) for event in events.Tensors(name))
        values += [
            (step, name, array.item()) for step, array in arrays if array.dtype.kind in "fiu" and array.size == 1
        ]
    for step, name, value in sorted(values, key=lambda each: each[0]):
        yield {"_step": step, name: value}


def database_runs(path: Path) -> tuple[str, list[tuple[str, Steps]]]:
    """The runs in a database of Trackio (one for each project) or MLflow (``mlflow.db``), which is not changed.

    Returns:
        the writer; for each run its name, which several runs may share, and its steps with their values, in order.

    Raises:
        ValueError: it is not a database of theirs, or damaged.
        OSError: it cannot be read.
    """
    try:
        return _runs_of(path)
    except sqlite3.Error:  # a killed writer left a journal, which only a process with write access can roll back
        with TemporaryDirectory() as folder:
            for file in (path, *(path.with_name(f"{path.name}-{kind}") for kind in ("journal", "wal"))):
                if file.is_file():
                    copyfile(file, Path(folder, file.name))
            try:
                return _runs_of(Path(folder, path.name), mode="rw")
            except (sqlite3.Error, TypeError, ValueError) as error:
                raise ValueError(str(error)) from error


def _runs_of(path: Path, mode: str = "ro") -> tuple[str, list[tuple[str, Steps]]]:
    runs: dict[str, tuple[str, Steps]] = {}
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True, timeout=1)) as database:
        columns = {row[1] for row in database.execute("pragma table_info(metrics)")}
        if {"run_name", "step", "metrics"} <= columns:
            run_id = "run_id" if "run_id" in columns else "run_name"  # since 0.20
            query = f"select {run_id}, run_name, step, metrics from metrics order by step, rowid"
            for run, name, step, text in database.execute(query):
                values = parse_json(text)
                if isinstance(values, dict):
                    runs.setdefault(str(run), (str(name), []))[1].append((int(step), values))
            return "Trackio", list(runs.values())
        if {"run_uuid", "step", "key", "value", "is_nan"} <= columns:
            names = dict(database.execute("select run_uuid, name from runs").fetchall())
            query = "select run_uuid, step, key, value, is_nan from metrics order by step, timestamp"
            for run, step, key, value, missing in database.execute(query):
                steps = runs.setdefault(str(run), (str(names.get(run) or run), []))[1]
                steps.append((int(step), {str(key): None if missing else value}))
            return "MLflow", list(runs.values())
    raise ValueError("it has no table of metrics that Trackio or MLflow writes")
