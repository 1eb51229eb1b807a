"""Reads what other trainers write of their tokens.

Fields are those of the projects' own writers: prime-rl 559b447 (``trainer/rl/token_export.py``), NeMo-RL 7ea279a
(``algorithms/grpo.py``, ``utils/logger.py``), slime 624b824 (``observability/train_data_utils.py``), verl 0.9
(``trainer/ppo/ray_trainer.py``).
"""

from __future__ import annotations

import math
import re
import zipfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlstab.errors import ReportError, reason
from rlstab.files import checksum, is_file
from rlstab.replay.steps import Damaged, Step, joined, rank_of
from rlstab.report.formatting import counted
from rlstab.safe_read import read_object
from rlstab.trace.dump import REQUIRED, Header, HostLoss

#: Files of each trainer in a folder: the first pattern that matches counts.
_FILES = ("token_exports/step_*/rank_*.jsonl", "step_*/rank_*.jsonl", "train_data_step*.jsonl", "*.jsonl", "*.pt")
#: By trainer, its own names of the ids of prompt and response, and of what a response may have by token.
_FIELDS = ("ids", "mask", "advantages", "logprobs", "rollout_logprobs", "ref_logprobs", "entropies")
_NAMES = {
    "prime-rl": "token_ids loss_mask advantages trainer_logprobs inference_logprobs - entropy",
    "NeMo-RL": "token_ids token_loss_mask advantages prev_logprobs generation_logprobs",
    "slime": "tokens loss_masks advantages log_probs rollout_log_probs ref_log_probs",
}
#: The one loss that can be told from a file: it alone fills `is_masked`. Its settings are taken to be the defaults.
_LOSSES = {"prime-rl, default loss": HostLoss(name="prime-rl/default")}

#: The trainer, the number of the rollout, that of the optimizer step in it, the rank.
_Place = tuple[str, int, int, int]
#: A response, by the names of a dump.
_Response = tuple[_Place, dict[str, Tensor]]


def read_foreign(path: Path, notes: list[str]) -> list[Step]:
    """The steps that another trainer wrote.

    Args:
        path: a file, or a folder of files: ``token_exports`` of prime-rl, ``train_data_stepN.jsonl`` of NeMo-RL, what
            slime's ``--save-debug-train-data`` writes (``.pt``, read without running anything in it).
        notes: takes what was left out.

    Raises:
        ReportError: it has the rollouts of verl, which have no tokens.
    """
    files = [path] if is_file(path) else next(filter(None, (sorted(path.glob(kind)) for kind in _FILES)), [])
    responses: dict[_Place, list[dict[str, Tensor]]] = {}
    for file in files:
        try:
            if not is_file(file):
                raise Damaged("it is not an ordinary file")
            for place, response in _slime(file) if file.suffix == ".pt" else _lines(file, notes):
                responses.setdefault(place, []).append(response)
        except (Damaged, OSError) as error:
            notes.append(f"{file.name} is left out: {reason(error)[:200]}.")
    for folder in sorted({file.parent for file in files}):
        if folder.name.startswith("step_") and not is_file(folder / "STABLE"):
            notes.append(f"{folder.name} was not finished: it has no file STABLE.")
    orders = 1 + max((order for _, _, order, _ in responses), default=0)
    if orders > 1:
        notes.append("Log-probs are those at the start of a rollout: ratios in its later optimizer steps are unknown.")
    by_step: dict[int, list[Step]] = {}
    for (host, rollout, order, _), group in sorted(responses.items(), key=lambda item: item[0]):
        number = rollout * orders + order
        ranks = by_step.setdefault(number, [])
        tensors = {name: torch.cat([own[name] for own in group]) for name in set.intersection(*map(set, group))}
        parts, tensors["parts"] = tensors["parts"].unique(return_inverse=True)
        header = Header(host=host, step=number, rank=len(ranks), parts=len(parts), loss=_LOSSES.get(host))
        ranks.append(rank_of(header, tensors))
    return [joined(ranks) for _, ranks in sorted(by_step.items())]


def _lines(file: Path, notes: list[str]) -> Iterator[_Response]:
    """The responses in a file of JSON lines."""
    damaged = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            record = read_object(line)
            if {"input", "output", "score"} <= record.keys():
                raise ReportError(
                    f"{file}: a rollout dump of verl has texts and scores, and neither tokens nor log-probs: there is "
                    f"nothing to replay. Let the adapter for verl write dumps."
                )
            try:
                yield _prime(record) if "trainer_logprobs" in record else _nemo(record, file.stem)
            except Damaged as error:
                damaged.append(f"line {number}: {error}")
    if damaged:
        notes.append(f"{file.name}: {counted(len(damaged), 'line')} left out that cannot be read ({damaged[0]}).")


def _prime(record: Mapping[str, Any]) -> _Response:
    """A line of prime-rl's token export. Its ratio divides by the log-probs of the sampler."""
    values = _columns("prime-rl", record)
    start, count = _first(values["mask"]), values["ids"].numel()
    weights = _column(record, "rl_weights", count).nan_to_num(1.0)  # None is a weight of 1
    values |= {name: values[name] * weights for name in ("mask", "advantages")}
    values["old_logprobs"] = _column(record, "inference_logprobs", count)
    step, rank, part = (_whole(record.get(name)) for name in ("step", "rank", "micro_step"))
    host = next(iter(_LOSSES)) if _column(record, "is_masked", count).isfinite().all() else "prime-rl"
    return (host, step, 0, rank), _response(values, start, part)


def _nemo(record: Mapping[str, Any], stem: str) -> _Response:
    """A line of NeMo-RL's ``train_data_stepN.jsonl``: a batch of one, padded to the longest of the step."""
    single = {name: value[0] for name, value in record.items() if isinstance(value, list) and len(value) == 1}
    record = {**record, **single}
    length = _whole(record.get("input_lengths"))
    values = {name: column[:length] for name, column in _columns("NeMo-RL", record).items()}
    start = _first(values["mask"])
    if not values["logprobs"][values["mask"] != 0].any():  # `force_on_policy_ratio` writes zeros
        values["logprobs"] = _column(values, "rollout_logprobs")
    values["mask"] = values["mask"] * (record.get("sample_loss_mask") != 0)
    step = int((re.findall(r"step(\d{1,12})$", stem) or [0])[0])
    reward = record.get("filtered_rewards", record.get("rewards"))  # dynamic sampling: those of all samples
    return ("NeMo-RL", step, 0, 0), _response(values, start, 0, reward)


def _slime(file: Path) -> list[_Response]:
    """What slime's ``--save-debug-train-data`` wrote, of all ranks. Nothing in the pickle is run."""
    try:
        with zipfile.ZipFile(file) as archive:  # torch compresses nothing: an entry that unfolds could fill the memory
            stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
        saved: Any = torch.load(file, map_location="cpu", weights_only=True) if stored else None
    except Exception as error:  # whatever a pickle makes of it
        raise Damaged("not a file of torch.save with nothing but tensors, lists, texts and numbers") from error
    try:
        samples = saved["samples"]
        places = dict(islice((place for shard in saved["dp_shards"] for place in _places(shard)), len(samples)))
        if sum(len(sample["tokens"]) for sample in samples) > file.stat().st_size:
            raise Damaged("it has more tokens than bytes")
        return [_sample(sample, saved, places) for sample in samples]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise Damaged(f"it is not laid out as slime does ({type(error).__name__}: {reason(error)})") from error


def _places(shard: Mapping[str, Any]) -> Iterator[tuple[int, tuple[int, int]]]:
    """By position of a response in the rollout, the optimizer step of the rollout and the micro-batch it is in."""
    ends, positions = list(accumulate(shard.get("num_microbatches") or [])), shard.get("partition")
    for part, members in enumerate(shard.get("micro_batch_indices") or []):
        for member in members:
            yield member if positions is None else positions[member], (bisect_right(ends, part), part)


def _sample(sample: Mapping[str, Any], saved: Mapping[str, Any], places: Mapping[Any, tuple[int, int]]) -> _Response:
    """A response of slime: token ids of prompt and response, and values of the response alone."""
    length = min(_whole(sample["response_lengths"]), len(sample["tokens"]) + 1)
    known = {"loss_masks": [1] * length, "log_probs": sample.get("rollout_log_probs"), **sample}
    values = _columns("slime", known, length)
    if "truncated" in sample:
        values["truncated"] = torch.full((length,), float(sample["truncated"]))
    order, part = places.get(sample.get("rollout_position"), (0, 0))
    place = ("slime", _whole(saved["rollout_id"]), order, _whole(sample["data_parallel_rank"]))
    return place, _response(values, values["ids"].numel() - length, part, sample.get("local_raw_reward"))


def _response(values: Mapping[str, Tensor], start: int, part: int, reward: object = None) -> dict[str, Tensor]:
    """A response by the names of a dump: what is before its start is its prompt, and the last values are its own."""
    ids = values["ids"]
    if not 0 <= start < ids.numel() or bool(((ids.frac() != 0) | (ids < 0) | (ids >= 2**32)).any()):
        raise Damaged("its tokens are not token ids of a prompt and a response")
    prompt, count = ids[:start].long(), ids.numel() - start
    trained = values["mask"][-count:] != 0
    tokens = {name: column[-count:].float() for name, column in values.items() if name != "ids"}
    for name, column in tokens.items():
        if not bool(column[trained].isfinite().all()):
            raise Damaged(f"'{name}' is not known where a token counts in the loss")
    return {
        **tokens,
        **({"rewards": torch.tensor([float(reward)])} if isinstance(reward, int | float) else {}),
        "ids": ids[start:].long(),
        "mask": trained.to(torch.uint8),
        "lengths": torch.tensor([count]),
        "prompt_lengths": torch.tensor([start]),
        "prompt_ids": prompt,
        "group_ids": torch.tensor([int(checksum(prompt.numpy().tobytes()), 16)]),
        "parts": torch.tensor([part]),
    }


def _first(mask: Tensor) -> int:
    """The first token that is trained on; beyond the end where there is none."""
    return int((mask != 0).int().argmax()) if bool(mask.any()) else mask.numel()


def _columns(host: str, record: Mapping[str, Any], count: int | None = None) -> dict[str, Tensor]:
    """The values by token that are there, by the names of a dump: `count` of them, or as many as ids."""
    values = {"ids": _column(record, _NAMES[host].split()[0])}
    for field, name in list(zip(_FIELDS, _NAMES[host].split(), strict=False))[1:]:
        if field in REQUIRED or record.get(name) is not None:
            values[field] = _column(record, name, count or values["ids"].numel())
    return values


def _column(record: Mapping[str, Any], name: str, count: int | None = None) -> Tensor:
    """``(n,)`` float64 values of a list or a tensor, `count` of them where that is given; NaN where they are None."""
    values = record.get(name)
    try:
        if isinstance(values, list):
            values = torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
        if isinstance(values, Tensor) and values.ndim == 1 and values.numel() == (count or values.numel()):
            return torch.empty(values.shape, dtype=torch.float64).copy_(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise Damaged(f"'{name}' is not a list of {'numbers' if count is None else counted(count, 'number')}")


def _whole(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 10**12:
        raise Damaged("a step, rank or length is not a whole number")
    return value
