"""What slime's ``--save-debug-train-data`` writes, and its fork miles: pickles of tensors, lists, texts and numbers.

Since 624b824 (``observability/train_data_utils.py``), one file has the samples of all ranks. Earlier releases, and
miles at 31f1ca9 (``utils/train_dump_utils.py``), write a file for each rank, with a list by field. Nothing in a pickle
is run.
"""

import zipfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlstab.errors import reason
from rlstab.record.columns import Response, columns_of, tensors_of_response, whole
from rlstab.record.step import Damaged
from rlstab.safe_read import as_float, open_file

#: Its field names, by those of a record.
NAMES = {
    "ids": "tokens",
    "mask": "loss_masks",
    "advantages": "advantages",
    "logprobs": "log_probs",
    "rollout_logprobs": "rollout_log_probs",
    "ref_logprobs": "ref_log_probs",
    "teacher_logprobs": "teacher_log_probs",
}


def responses_in(path: Path) -> Iterator[Response | Damaged]:
    """The responses in a file; for one that cannot be used, the reason.

    Raises:
        Damaged: it is not such a file.
        OSError: it cannot be read.
    """
    saved = _loaded(path)
    try:
        samples = _samples(saved)
        # by position of a response in the rollout, its optimizer step in the rollout and its micro-batch
        pairs = (pair for shard in saved.get("dp_shards") or [] for pair in _shard(shard))
        positions = dict(islice(pairs, len(saved.get("samples") or [])))
        if sum(len(sample["tokens"]) for sample in samples) > path.stat().st_size:
            raise Damaged("it has more tokens than bytes")
    except _OTHER_LAYOUT as error:
        raise Damaged(f"it is not laid out as by slime or miles ({type(error).__name__}: {reason(error)})") from error
    for sample in samples:
        try:
            yield _response(sample, saved, positions)
        except Damaged as error:
            yield error
        except _OTHER_LAYOUT as error:
            yield Damaged(f"{type(error).__name__}: {reason(error)}")


#: What reading data of another layout raises.
_OTHER_LAYOUT = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError, OverflowError)


def _loaded(path: Path) -> Any:
    try:
        with open_file(path) as file:
            with zipfile.ZipFile(file) as archive:  # torch compresses nothing; compressed data could fill the memory
                stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True) if stored else None
    except OSError:
        raise
    except Exception as error:  # whatever a pickle makes of it
        raise Damaged("not a file of torch.save with nothing but tensors, lists, texts and numbers") from error


def _samples(saved: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A mapping for each response, from either layout."""
    if "rollout_data" not in saved:
        return list(saved["samples"])
    data, count = saved["rollout_data"], len(saved["rollout_data"]["tokens"])
    if saved.get("cp_size", 1) != 1:
        raise Damaged("with context parallelism it has only a part of each response, and parts cannot be joined")
    by_response = {name: values for name, values in data.items() if isinstance(values, list) and len(values) == count}
    rewards = by_response.get("local_raw_reward", by_response.get("raw_reward", [None] * count))
    rank = {"data_parallel_rank": saved["rank"]}
    return [
        {**{name: values[index] for name, values in by_response.items()}, **rank, "local_raw_reward": rewards[index]}
        for index in range(count)
    ]


def _shard(shard: Mapping[str, Any]) -> Iterator[tuple[int, tuple[int, int]]]:
    ends, positions = list(accumulate(shard.get("num_microbatches") or [])), shard.get("partition")
    for part, members in enumerate(shard.get("micro_batch_indices") or []):
        for member in members:
            yield member if positions is None else positions[member], (bisect_right(ends, part), part)


def _response(
    sample: Mapping[str, Any], saved: Mapping[str, Any], positions: Mapping[Any, tuple[int, int]]
) -> Response:
    """A response with the token ids of prompt and response, and values for only the response."""
    length = min(whole(sample["response_lengths"]), len(sample["tokens"]) + 1)
    record = {"loss_masks": [1] * length, "log_probs": sample.get("rollout_log_probs"), **sample}
    values = columns_of(record, NAMES, length)
    truncated = sample.get("truncated")
    truncated = truncated.item() if isinstance(truncated, Tensor) and truncated.numel() == 1 else truncated
    cut = float(truncated) if isinstance(truncated, bool) else as_float(truncated)
    if cut is not None:
        values["truncated"] = torch.full((length,), cut, dtype=torch.float64)
    order, part = positions.get(sample.get("rollout_position"), (0, 0))
    rank, start = whole(sample["data_parallel_rank"]), values["ids"].numel() - length
    tensors = tensors_of_response(values, start, part, sample.get("local_raw_reward"))
    return Response("slime", whole(saved["rollout_id"]), order, rank, tensors)
