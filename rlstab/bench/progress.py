"""The display of a running bench."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from rlstab.bench.file import BenchRun
from rlstab.bench.record import read_record
from rlstab.run_files import METRICS
from rlstab.safe_read import read_object

#: Number of rollouts over which shown values are averaged; a single one says little.
WIDTH = 10
#: Bytes at the end of ``metrics.jsonl`` that are read during a run.
TAIL = 200_000
#: The shown values of a run: name, metric, and number of averaged records.
_SHOWN = (("reward", "reward/mean", WIDTH), ("entropy", "tokens/entropy", WIDTH), ("held out", "eval/mean", 1))


class Screen(Progress):
    """Follows the runs of a bench: a line for each that begins or ends, and a bar over all rollouts on a terminal.

    Args:
        console: shows them.
        runs: all that were requested.
        queue: the runs that are made now; the others are finished, or failed and are not run again.
    """

    def __init__(self, console: Console, runs: Sequence[BenchRun], queue: Sequence[BenchRun]) -> None:
        self._total, self._ended, self._made, self._start = len(runs), len(runs) - len(queue), 0, time.monotonic()
        # runs rarely end: the remaining time is estimated from rollouts, over some minutes
        columns, shown = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()), console.is_terminal
        super().__init__(*columns, console=console, disable=not shown, speed_estimate_period=600)
        self._to_make = sum(run.rollouts for run in queue)
        self._all = self.add_task("", total=self._to_make)

    def look(self, running: Iterable[BenchRun]) -> None:
        """Show the progress of the current runs."""
        if self.console.is_terminal:
            rollouts = (records[-1]["rollout"] for run in running if (records := last_records(run.folder)))
            self.update(self._all, completed=self._made + sum(rollouts))

    def say(self, text: str) -> None:
        """A line above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def ended(self, run: BenchRun) -> None:
        """Report a worker that ended, from its record."""
        self._ended, self._made = self._ended + 1, self._made + run.rollouts
        self.update(self._all, completed=self._made)
        record, count = read_record(run.folder), f"[{self._ended}/{self._total}]"
        if record.get("status") != "finished":
            reason = (str(record.get("error") or "").splitlines() or ["no reason given"])[-1]
            return self.say(f"{count} failed {run.name}: {reason}")
        spent = record.get("cpu_seconds")
        cost = "CPU-seconds unknown" if spent is None else f"{spent:.0f} CPU-seconds"
        left = timedelta(seconds=round((time.monotonic() - self._start) * (self._to_make / self._made - 1)))
        return self.say(f"{count} {run.name}  {_measured(last_records(run.folder))}  {cost}, {left} left")


def last_records(folder: Path) -> list[dict[str, Any]]:
    """Records at the end of a run's metrics, without lines that are cut off or still being written."""
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines()
    except OSError:  # the run has not begun to write
        return []
    return [record for record in map(read_object, lines) if isinstance(record.get("rollout"), int)]


def _measured(records: Sequence[dict[str, Any]]) -> str:
    """``reward 0.512  entropy 0.250  held out 0.500``, as far as measured."""
    shown = []
    for name, metric, count in _SHOWN:
        values = [record[metric] for record in records if isinstance(record.get(metric), int | float)][-count:]
        shown += [f"{name} {sum(values) / len(values):.3f}"] if values else []
    return "  ".join(shown)
