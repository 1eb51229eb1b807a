"""``rlstab bench``: what is finished is skipped, what was cut off goes on, what fails is recorded, the rest is made."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import filelock
import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import rlstab
from rlstab.bench.file import Bench, BenchRun
from rlstab.bench.pool import command, go
from rlstab.bench.screen import Screen
from rlstab.bench.status import FILE, read_record, write_record
from rlstab.config.document import dump
from rlstab.console import Terminal
from rlstab.errors import ConfigError

#: Seconds between looks at the workers.
POLL = 0.25

#: Exit code after Ctrl-C.
STOPPED = 130

#: What an error lists of the runs of another file.
SHOWN = 6


@dataclass
class Schedule:
    """What is to be done with each run.

    Attributes:
        finished: nothing.
        failed: nothing either; ``--retry`` runs them again.
        anew: from the start.
        resumed: from a checkpoint.
        changed: finished with other settings than the file has now.
    """

    finished: list[BenchRun] = field(default_factory=list)
    failed: list[BenchRun] = field(default_factory=list)
    anew: list[BenchRun] = field(default_factory=list)
    resumed: list[BenchRun] = field(default_factory=list)
    changed: list[BenchRun] = field(default_factory=list)


def run_bench(
    bench: Bench,
    *,
    workers: int | None = None,
    only: Sequence[str] = (),
    overwrite: bool = False,
    retry: bool = False,
    console: Console | None = None,
) -> int:
    """Make the runs of a bench that are not finished.

    Args:
        bench: from :func:`rlstab.bench.file.load_bench`.
        workers: runs at a time; None takes the bench's.
        only: patterns of ``setting/method`` or ``setting/method/seed-0``; empty takes all.
        overwrite: make finished runs whose settings have changed again.
        retry: make failed runs again.
        console: where to show the progress; None is the terminal.

    Returns:
        0, 1 if a run failed, 130 after Ctrl-C.

    Raises:
        ConfigError: finished runs have other settings than the file now, no run matches, another process runs it, its
            folder cannot be written or holds another bench.
    """
    console = console or Terminal(stderr=True)
    runs = chosen(bench, only)
    workers = workers or bench.workers
    try:
        bench.out.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(bench.out / ".lock", timeout=0):
            return _run(bench, runs, workers, overwrite, retry, console)
    except filelock.Timeout:
        text = f"{bench.out} is being run by another process. Wait for it, or give another folder with --out."
        raise ConfigError(text) from None
    except OSError as error:
        text = f"{bench.out} cannot be written: {error}. Mend that, or give another folder with --out."
        raise ConfigError(text) from error


def _run(bench: Bench, runs: Sequence[BenchRun], workers: int, overwrite: bool, retry: bool, console: Console) -> int:
    owner = (read_record(bench.out) or {}).get("name", bench.name)
    if owner != bench.name:
        raise ConfigError(
            f"{bench.out} holds the bench '{owner}', and {bench.source or 'this'} is '{bench.name}': their runs would "
            f"be mixed. Give another folder with --out, or call this one '{owner}' too."
        )
    plan = plan_of(runs, overwrite=overwrite, retry=retry)
    if plan.changed:
        names = _some([one.name for one in plan.changed])
        raise ConfigError(
            f"{bench.out} holds {len(plan.changed)} finished runs with other settings than {bench.source or 'this'} "
            f"has now: {names}. Make them again with --overwrite, or keep them and give "
            f"another folder with --out."
        )
    _describe(bench, workers)
    queue = [(one, one in plan.resumed) for one in runs if one in plan.anew or one in plan.resumed]
    try:
        with Screen(console, bench, runs, plan.finished, plan.failed, workers) as screen:
            for running, ended in go(bench, queue, min(workers, max(1, len(queue))), POLL):
                screen.see(running, ended)
    except KeyboardInterrupt:
        console.print(
            escape(f"stopped; {_summary(runs)}. Continue with: {command(bench)}"), highlight=False, soft_wrap=True
        )
        return STOPPED
    failed = [(one, record) for one in runs if (record := read_record(one.folder) or {}).get("status") == "failed"]
    for one, record in failed:
        why = str(record.get("error") or "no reason given").splitlines()[-1]
        console.print(f"[red]failed[/] {one.name}: {escape(why)}", highlight=False, soft_wrap=True)
    if failed:
        again = f"{command(bench)} --retry"
        text = f"The reasons in full are in {bench.out}/runs/.../{FILE}. Run them again with: {again}"
        console.print(escape(text), highlight=False, soft_wrap=True)
    _say_unnamed(bench, console)
    console.print(escape(f"{bench.out}: {_summary(runs)}"), highlight=False, soft_wrap=True)
    return 1 if failed else 0


def _say_unnamed(bench: Bench, console: Console) -> None:
    """Runs of a method, setting or seed that the file once had."""
    known, runs = {one.name for one in bench.runs}, bench.out / "runs"
    found = (path.parent.relative_to(runs).as_posix() for path in sorted(runs.glob(f"*/*/seed-*/{FILE}")))
    unnamed = [name for name in found if name not in known]
    if unnamed:
        text = (
            f"{bench.out} also holds runs that {bench.source or 'this bench'} does not name: {_some(unnamed)}. A "
            f"report of the folder shows them too; remove them if that is not wanted."
        )
        console.print(escape(text), highlight=False, soft_wrap=True)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def chosen(bench: Bench, only: Sequence[str]) -> tuple[BenchRun, ...]:
    """The runs that match a pattern of ``--only``, in their order.

    Raises:
        ConfigError: a pattern matches none.
    """
    for pattern in only:
        if not any(_matches(one, pattern) for one in bench.runs):
            raise ConfigError(
                f"--only {pattern}: no run matches. Give setting/method or setting/method/seed-0, with * for any. "
                f"Settings: {', '.join(bench.settings)}. Methods: {', '.join(bench.methods)}."
            )
    return tuple(one for one in bench.runs if not only or any(_matches(one, pattern) for pattern in only))


def _matches(run: BenchRun, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in (run.name, f"{run.setting}/{run.method}"))


def plan_of(runs: Sequence[BenchRun], *, overwrite: bool, retry: bool) -> Schedule:
    """What is to be done, by what each folder holds."""
    plan = Schedule()
    for one in runs:
        record = read_record(one.folder) or {}
        status, same = record.get("status"), record.get("run_hash") == one.hash
        if status == "finished" and same:
            plan.finished.append(one)
        elif status == "finished" and not overwrite:
            plan.changed.append(one)
        elif status == "failed" and same and not retry:
            plan.failed.append(one)
        elif status == "running" and same and any((one.folder / "checkpoints").glob("rollout-[0-9]*")):
            plan.resumed.append(one)
        else:
            plan.anew.append(one)
    return plan


def dry_run(bench: Bench, *, only: Sequence[str] = (), console: Console | None = None) -> None:
    """Print what a bench would do: runs, rollouts and optimizer steps, and how much of it is finished.

    Raises:
        ConfigError: no run matches.
    """
    console = console or Terminal()
    runs = chosen(bench, only)
    plan = plan_of(runs, overwrite=False, retry=False)
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    for column in ("setting", "method"):
        table.add_column(column, overflow="fold")  # names that are cut look the same
    for column in ("runs", "finished", "rollouts", "optimizer steps", "responses"):
        width = max(map(len, column.split()))  # words, and the numbers below them, stay whole
        table.add_column(column, justify="right", min_width=width)
    totals = [0] * 5
    for setting in bench.settings:
        for method in bench.methods:
            these = [one for one in runs if (one.setting, one.method) == (setting, method)]
            if these:
                rollouts = sum(one.config.optimisation.rollouts for one in these)
                config = these[0].config
                sampled = rollouts * config.rollout.prompts * config.rollout.group
                done = sum(one in plan.finished for one in these)
                optimizer_steps = rollouts * config.optimisation.optimizer_steps_per_rollout
                numbers = [len(these), done, rollouts, optimizer_steps, sampled]
                totals = [total + number for total, number in zip(totals, numbers, strict=True)]
                table.add_row(escape(setting), escape(method), *map(str, numbers))
    table.add_section()
    table.add_row("all", "", *map(str, totals))
    console.print(table)
    console.print(escape(f"folder: {bench.out}; baseline: {bench.baseline}; workers: {bench.workers}"), highlight=False)
    for what, these in (
        ("failed before, run again with --retry", plan.failed),
        ("cut off, would go on from a checkpoint", plan.resumed),
        ("finished with other settings, need --overwrite", plan.changed),
    ):
        if these:
            text = f"{what}: {', '.join(one.name for one in these)}"
            console.print(escape(text), highlight=False, soft_wrap=True)
    _say_unnamed(bench, console)


def _summary(runs: Sequence[BenchRun]) -> str:
    states = [(read_record(one.folder) or {}).get("status") for one in runs]
    finished, failed = states.count("finished"), states.count("failed")
    return f"{finished} of {len(runs)} runs finished" + (f", {failed} failed" if failed else "")


def _describe(bench: Bench, workers: int) -> None:
    """Write ``bench.yaml`` and ``bench.json``; a bench that goes on keeps the time at which it was started."""
    (bench.out / "bench.yaml").write_text(dump(dict(bench.resolved)), encoding="utf-8")
    before = read_record(bench.out) or {}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    about: dict[str, Any] = {
        "name": bench.name,
        "about": bench.about,
        "hash": bench.hash,
        "baseline": bench.baseline,
        "command": command(bench),
        "started": before.get("started", now) if before.get("hash") == bench.hash else now,
        "rlstab": rlstab.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cpu": _processor(),
        "workers": workers,
        "threads": 1,
    }
    write_record(bench.out, about)


def _processor() -> str:
    """The processor's name and how many there are."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{found[0] if found else name} x {os.cpu_count()}"
