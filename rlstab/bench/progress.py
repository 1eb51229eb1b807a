"""The display of a running bench."""

import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from rlstab.bench.file import BenchRun
from rlstab.bench.record import read_record, tail
from rlstab.console import say
from rlstab.run_files import METRICS
from rlstab.safe_read import read_object

#: Number of rollouts over which shown values are averaged; a single one says little.
WIDTH = 10
#: The shown values of a run: name, metric, and number of averaged records.
_SHOWN = (("reward", "reward/mean", WIDTH), ("held out", "eval/mean", 1))


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
        columns, shown = (BarColumn(), MofNCompleteColumn(), "rollouts", TimeRemainingColumn()), console.is_terminal
        super().__init__(*columns, console=console, disable=not shown, speed_estimate_period=3600)
        self._to_make, self._running = sum(run.rollouts for run in queue), list[BenchRun]()
        self._all = self.add_task("", total=self._to_make)

    def look(self, running: Iterable[BenchRun]) -> None:
        """Show the progress of the current runs."""
        self._running = list(running)
        if self.console.is_terminal:
            self.update(self._all, completed=self._finished_rollouts())

    def _finished_rollouts(self) -> float:
        """Rollouts of the runs that have ended and of those that are running."""
        rollouts = (records[-1]["rollout"] for run in self._running if (records := last_records(run.folder)))
        return float(self._made + sum(rollouts))

    def say(self, text: str) -> None:
        """A line above the bar."""
        say(self.console, text)

    def ended(self, run: BenchRun) -> None:
        """Report a worker that ended, from its record."""
        self._ended, self._made = self._ended + 1, self._made + run.rollouts
        self._running = [other for other in self._running if other != run]
        self.update(self._all, completed=self._finished_rollouts())
        record, count = read_record(run.folder), f"[{self._ended}/{self._total}]"
        if record.get("status") != "finished":
            reason = (str(record.get("error") or "").splitlines() or ["no reason given"])[-1]
            return self.say(f"{count} failed {run.name}: {reason}")
        spent = record.get("cpu_seconds")
        cost = "CPU-seconds unknown" if spent is None else f"{spent:.0f} CPU-seconds"
        elapsed = time.monotonic() - self._start
        left = timedelta(seconds=round(elapsed * (self._to_make / self._finished_rollouts() - 1)))
        records, values = last_records(run.folder), list[str]()
        for name, metric, number in _SHOWN:
            measured = [record[metric] for record in records if isinstance(record.get(metric), int | float)][-number:]
            values += [f"{name} {sum(measured) / len(measured):.3f}"] if measured else []
        return self.say(
            f"{count} {run.name}  {', '.join([*values, cost])}{f', about {left} left' * (self._ended < self._total)}"
        )


def last_records(folder: Path) -> list[dict[str, Any]]:
    """Records in the last bytes of a run's metrics, without lines that are cut off or still being written."""
    records = map(read_object, tail(folder / METRICS).splitlines())
    return [record for record in records if isinstance(record.get("rollout"), int)]
