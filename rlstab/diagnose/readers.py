"""From a path to the runs that were logged there, whoever wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlstab.diagnose.json_rows import read_rows
from rlstab.diagnose.own_runs import read_own
from rlstab.diagnose.run_log import RunLog
from rlstab.diagnose.token_export import EXPORTS, read_token_export
from rlstab.diagnose.trainer_state import STATE, newest_state, read_trainer_state
from rlstab.diagnose.wandb_table import read_table
from rlstab.errors import ReportError
from rlstab.files import exists, is_dir

#: What can be read, for errors.
READABLE = (
    f"a run folder or results file of rlstab, {STATE} or an output folder of TRL, a file of verl's file logger "
    f"(.jsonl), a CSV exported from wandb, or token exports of prime-rl"
)

#: Lines in which one that tells the writer is looked for: the first may be damaged.
SNIFFED = 20


def read_logs(path: str | Path) -> list[RunLog]:
    """Every run that was logged under a path.

    Raises:
        ReportError: no such path, or nothing there that is a log with a metric to look at.
    """
    path = Path(path)
    if is_dir(path):
        return _folder(path)
    if not exists(path):
        raise ReportError(f"{path}: no such file or folder. Give {READABLE}.")
    if not path.is_file():
        raise ReportError(f"{path}: is not an ordinary file. Give {READABLE}.")
    if path.suffix.lower() in (".csv", ".tsv"):
        return read_table(path)
    if path.suffix.lower() == ".json":
        return [read_trainer_state(path)]
    kind = _kind(path)
    if kind == "results":
        return read_own(path)
    return [read_token_export(path) if kind == "tokens" else read_rows(path)]


def _folder(path: Path) -> list[RunLog]:
    state = newest_state(path)
    if state is not None:
        return [read_trainer_state(state)]
    if any(True for pattern in EXPORTS for _ in path.glob(pattern)):
        return [read_token_export(path)]
    try:
        return read_own(path)
    except ReportError as error:
        raise ReportError(f"{path}: no log in it. Give {READABLE}.") from error


def _kind(path: Path) -> str:
    """What a file of JSON lines is: ``results`` of benches, ``tokens``, or ``rows`` of metrics."""
    for data in _first_objects(path):
        if "curves" in data and "format" in data:
            return "results"
        if "token_ids" in data or ("tokens" in data and "sequence_id" in data):
            return "tokens"
        return "rows"
    return "rows"


def _first_objects(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as opened:
            for _, line in zip(range(SNIFFED), opened, strict=False):
                try:
                    data = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(data, dict):
                    yield data
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror}. Give a file that you may read.") from error
