"""What a person sees of a bench: a live table on a terminal, a line per run elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rlstab.bench.file import Bench, BenchRun
from rlstab.bench.follow import Follower
from rlstab.bench.pool import Worker
from rlstab.bench.status import read_record


class Screen:
    """Follows the runs of a bench.

    Args:
        runs: those that are asked for.
        done: of them, those that were finished before.
        failed: of them, those that failed before and are not run again.
        workers: runs at a time.
    """

    def __init__(
        self,
        console: Console,
        bench: Bench,
        runs: Sequence[BenchRun],
        done: Sequence[BenchRun],
        failed: Sequence[BenchRun],
        workers: int,
    ) -> None:
        self._console, self._bench, self._workers = console, bench, workers
        self._total = Counter((one.setting, one.method) for one in runs)
        self._done = Counter((one.setting, one.method) for one in done)
        self._failed = Counter((one.setting, one.method) for one in failed)
        known = {one.name for one in [*done, *failed]}
        self._left = {one.name: one.config.optimisation.rollouts for one in runs if one.name not in known}
        self._kind = {one.name: (one.setting, one.method) for one in runs}
        self._followers: dict[str, Follower] = {}
        self._running: list[Worker] = []
        self._pace: dict[tuple[str, str], float] = {}
        self._start = time.monotonic()
        self._live = Live(console=console, get_renderable=self._show, refresh_per_second=2, transient=False)

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running = []  # what stays on the screen says nothing of workers that are gone
        if self._console.is_terminal:
            self._live.stop()

    def see(self, running: Sequence[Worker], ended: Sequence[Worker]) -> None:
        """Take in one look at the workers."""
        for worker in [*running, *ended]:
            name = worker.run.name
            if name not in self._followers:
                self._followers[name] = Follower(worker.run.folder)
                if not self._console.is_terminal:
                    word = "resume" if worker.resumed else "start "
                    self._console.print(f"{word} {name}", highlight=False, markup=False, soft_wrap=True)
            follower = self._followers[name]
            follower.look()
            if follower.pace is not None:
                self._pace[self._kind[name]] = follower.pace
            self._left[name] = worker.run.config.optimisation.rollouts - follower.rollout
        for worker in ended:
            self._end(worker.run)
        self._running = list(running)

    def _end(self, run: BenchRun) -> None:
        kind, follower = self._kind[run.name], self._followers[run.name]
        del self._left[run.name]
        record = read_record(run.folder) or {}
        count = f"[{self._ended() + 1}/{sum(self._total.values())}]"
        if record.get("status") == "finished":
            self._done[kind] += 1
            used = record.get("cpu_seconds")
            parts = [
                f"reward {_number(follower.mean('reward/mean'))}",
                f"entropy {_number(follower.mean('tokens/entropy'))}",
                f"held out {_number(follower.evaluation)}",
                "CPU-seconds unknown" if used is None else f"{used:.0f} CPU-seconds",
            ]
            if not self._console.is_terminal:
                self._console.print(
                    f"{count} {run.name}  {'  '.join(parts)}", highlight=False, markup=False, soft_wrap=True
                )
        else:
            self._failed[kind] += 1
            why = str(record.get("error") or "").splitlines()
            if not self._console.is_terminal:  # there the table counts it, and the reasons stand below at the end
                text = f"{escape(count)} [red]failed[/] {run.name}: {escape(why[-1] if why else 'no reason given')}"
                self._console.print(text, highlight=False, soft_wrap=True)

    def _ended(self) -> int:
        return sum(self._done.values()) + sum(self._failed.values())

    def _show(self) -> RenderableType:
        total, done, failed = (sum(one.values()) for one in (self._total, self._done, self._failed))
        parts = [f"[bold]{escape(self._bench.name)}[/]", f"{done}/{total} finished"]
        if failed:
            parts.append(f"[red]{failed} failed[/]")
        parts.append(f"{clock(time.monotonic() - self._start)} gone")
        left = self._seconds_left()
        if left is not None:
            parts.append(f"about {clock(left)} left")
        now: list[RenderableType] = [self._now(), ""] if self._running else []
        # the longest part last: a low terminal shows the top
        return Group(Text.from_markup("  ".join(parts)), "", *now, self._counts())

    def _counts(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("finished / all", no_wrap=True, overflow="fold")  # names that are cut look the same
        for setting in self._bench.settings:
            table.add_column(Text(setting), justify="right", overflow="fold")
        now = {self._kind[one.run.name] for one in self._running}
        for method in self._bench.methods:
            cells = [self._cell((setting, method), now) for setting in self._bench.settings]
            table.add_row(Text(method), *cells)
        return table

    def _cell(self, kind: tuple[str, str], now: set[tuple[str, str]]) -> Text:
        total, done, failed = self._total[kind], self._done[kind], self._failed[kind]
        if not total:
            return Text("-", style="dim")
        style = "green" if done == total else "bold" if kind in now else ""
        text = Text(f"{done}/{total}", style=style)
        return Text.assemble((f"{failed} failed ", "red"), text) if failed else text

    def _now(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("running", "rollout", "reward", "entropy", "held out", "left"):
            name = column == "running"
            table.add_column(column, justify="left" if name else "right", overflow="fold" if name else "ellipsis")
        for worker in self._running:
            run, follower = worker.run, self._followers[worker.run.name]
            left = None if follower.pace is None else follower.pace * self._left[run.name]
            table.add_row(
                Text(run.name),
                f"{follower.rollout}/{run.config.optimisation.rollouts}",
                _number(follower.mean("reward/mean")),
                _number(follower.mean("tokens/entropy")),
                _number(follower.evaluation),
                "" if left is None else clock(left),
            )
        return table

    def _seconds_left(self) -> float | None:
        """By the pace of each method and setting so far; one that has not run goes at the mean pace of the others."""
        if not self._pace or not self._left:
            return None
        mean = sum(self._pace.values()) / len(self._pace)
        work = [rollouts * self._pace.get(self._kind[name], mean) for name, rollouts in self._left.items()]
        return max([sum(work) / self._workers, *work], default=0.0)


def clock(seconds: float) -> str:
    """``42 s``, ``3 min 05 s``, ``1 h 20 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
