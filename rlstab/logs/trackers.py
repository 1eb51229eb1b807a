"""What trackers leave on a disk, read without a network and without what they would run: one row for each record."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlstab.extras import how_to_install
from rlstab.safe_read import parse_json, read_bytes

#: How a file of wandb begins, and the bytes of a block and of the head of a record in it.
_WANDB, _BLOCK, _HEAD = b":W&B", 32768, 7


def wandb_rows(path: Path, remarks: list[str]) -> Iterator[dict[str, Any]]:
    """The history of ``wandb/offline-run-*/run-*.wandb``, which an online run keeps too.

    Args:
        path: of the file; its end may be cut off, or still be written.
        remarks: what could not be read is added to them.

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
    position, whole = _HEAD, b""
    while data.startswith(_WANDB) and position + _HEAD <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEAD:  # the rest of a block is padding
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + _HEAD])
        position += _HEAD + length
        if kind == 0 or position > len(data):
            return
        whole += data[position - length : position]
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


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
