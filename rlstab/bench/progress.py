"""What a person sees of a bench: bars on a terminal, a line per run elsewhere."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from rlstab.bench.file import BenchRun
from rlstab.bench.record import read_record
from rlstab.config.run_files import METRICS

#: Rollouts over which what is shown is averaged; one alone says little.
WIDTH = 10
#: Bytes at the end of ``metrics.jsonl`` that are read while a run goes on.
TAIL = 200_000
#: What is shown of a run: its name, the metric, and over how many records.
_SHOWN = (("reward", "reward/mean", WIDTH), ("entropy", "tokens/entropy", WIDTH), ("held out", "eval/mean", 1))


class Screen:
    """Follows the runs of a bench.

    Args:
        console: where to show them.
        runs: those that are asked for.
        queue: of them, those that are made now; the others are finished, or failed and are not run again.
    """

    def __init__(self, console: Console, runs: Sequence[BenchRun], queue: Sequence[BenchRun]) -> None:
        self._console, self._total, self._ended, self._failed = console, len(runs), len(runs) - len(queue), 0
        name = TextColumn("{task.description}", table_column=Column(overflow="fold"))  # names that are cut look alike
        columns = (name, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[now]}"))
        # runs end seldom: the time that is left is told by rollouts, over some minutes
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=600)
        self._all = self._progress.add_task("all", total=sum(run.rollouts for run in queue), now=self._counts())
        self._made, self._start = 0, time.monotonic()
        self._tasks: dict[str, TaskID] = {}

    def _counts(self) -> str:
        failed = f", [red]{self._failed} failed[/]" if self._failed else ""
        return f"{self._ended} of {self._total} runs{failed}"

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        for task in self._tasks.values():  # what stays on the screen says nothing of workers that are gone
            self._progress.remove_task(task)
        self._progress.stop()

    def look(self, running: Iterable[BenchRun]) -> None:
        """Show how far the running runs are."""
        if not self._console.is_terminal:
            return
        made = self._made
        for run in running:
            if run.name not in self._tasks:
                self._tasks[run.name] = self._progress.add_task(escape(run.name), total=run.rollouts, now="")
            records = last_records(run.folder)
            rollout = records[-1]["rollout"] if records else 0
            made += rollout
            self._progress.update(self._tasks[run.name], completed=rollout, now=_measured(records))
        self._progress.update(self._all, completed=made)

    def say(self, text: str) -> None:
        """A line above the bars."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def started(self, run: BenchRun, resumed: bool) -> None:
        """A worker has begun."""
        if not self._console.is_terminal:
            word = "resume" if resumed else "start "
            self.say(f"{word} {run.name}")

    def ended(self, run: BenchRun) -> None:
        """A worker is gone, and its record says how."""
        self._ended, self._made = self._ended + 1, self._made + run.rollouts
        record = read_record(run.folder)
        finished = record.get("status") == "finished"
        self._failed += not finished
        if run.name in self._tasks:
            self._progress.remove_task(self._tasks.pop(run.name))
        self._progress.update(self._all, completed=self._made, now=self._counts())
        if self._console.is_terminal:  # the reasons stand below at the end
            return
        spent = record.get("cpu_seconds")
        cost = "CPU-seconds unknown" if spent is None else f"{spent:.0f} CPU-seconds"
        reason = (str(record.get("error") or "").splitlines() or ["no reason given"])[-1]
        to_make = self._progress.tasks[0].total or 0
        left = timedelta(seconds=round((time.monotonic() - self._start) * (to_make / self._made - 1)))
        count = escape(f"[{self._ended}/{self._total}]")
        text = f"{count} {escape(run.name)}  {_measured(last_records(run.folder))}  {cost}, {left} left"
        text = text if finished else f"{count} [red]failed[/] {escape(run.name)}: {escape(reason)}"
        self._console.print(text, highlight=False, soft_wrap=True)


def last_records(folder: Path) -> list[dict[str, Any]]:
    """Records at the end of a run's metrics; what a kill cut off, or what is being written, is left out."""
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines()
    except OSError:  # the run has not begun to write
        return []
    records = []
    for line in lines:
        with suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and isinstance(record.get("rollout"), int)]


def _measured(records: Sequence[dict[str, Any]]) -> str:
    """``reward 0.512  entropy 0.250  held out 0.500``, as far as it was measured."""
    shown = []
    for name, metric, count in _SHOWN:
        values = [record[metric] for record in records if isinstance(record.get(metric), int | float)][-count:]
        shown += [f"{name} {sum(values) / len(values):.3f}"] if values else []
    return "  ".join(shown)
