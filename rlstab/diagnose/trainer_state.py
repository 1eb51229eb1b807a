"""``trainer_state.json`` of transformers, in which TRL's trainers log."""

from __future__ import annotations

import json
from pathlib import Path

from rlstab.diagnose.numbers_read import number
from rlstab.diagnose.run_log import RunLog, log_of
from rlstab.errors import ReportError
from rlstab.report.formatting import counted
from rlstab.report.safe_read import read_bytes

#: Its name in every checkpoint, and in the output folder where the trainer was asked to save it.
STATE = "trainer_state.json"


def newest_state(folder: Path) -> Path | None:
    """The state in an output folder, else that of the last checkpoint: each holds the whole history until then."""
    if (folder / STATE).is_file():
        return folder / STATE
    found = list(folder.glob(f"checkpoint-*/{STATE}"))
    return max(found, key=lambda one: _number(one.parent.name), default=None)


def _number(name: str) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def read_trainer_state(path: Path) -> RunLog:
    """The run whose state it is.

    Raises:
        ReportError: it cannot be read, or holds no history.
    """
    try:
        state = json.loads(read_bytes(path).decode("utf-8", errors="replace"))
    except OSError as error:
        reason = error.strerror or error
        raise ReportError(f"{path}: cannot be read: {reason}. Give a file that you may read.") from error
    except (ValueError, RecursionError) as error:
        raise ReportError(
            f"{path}: is not JSON: {_first(error)}. Give the trainer_state.json of a whole checkpoint."
        ) from error
    history = state.get("log_history") if isinstance(state, dict) else state
    if not isinstance(history, list):
        raise ReportError(f"{path}: has no log_history. Give a trainer_state.json that TRL's trainer has written.")
    rows: dict[int, dict[str, float]] = {}
    damaged = 0
    for entry in history:
        step = entry.get("step") if isinstance(entry, dict) else None
        if not isinstance(step, int) or isinstance(step, bool):
            damaged += 1
            continue
        # those of an evaluation begin with eval_, and the last entry sums up: neither has our names
        row = {str(name): value for name, raw in entry.items() if (value := number(raw)) is not None and name != "step"}
        rows.setdefault(step, {}).update(row)
    remarks = (f"log_history: left out {counted(damaged, 'record')} without a step",) if damaged else ()
    return log_of(rows, title=str(path), writer="TRL", remarks=remarks)


def _first(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
