"""``rlstab runs``: each run, its progress, and its best result."""

import os
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from rlstab.console import counted
from rlstab.report.formatting import setting
from rlstab.report.load import find_runs
from rlstab.report.runs import RunRecord, best_bin
from rlstab.run_files import LOCK
from rlstab.safe_read import read_text
from rlstab.visible import visible


def listing(paths: Sequence[str | Path]) -> RenderableType:
    """Two lines for each run below some paths, in the order of their folders, and one for each path that is not a run.

    Raises:
        ReportError: a path does not exist, or there is no run.
    """
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column(overflow="fold")
    runs, left_out = find_runs(*paths)
    for run in runs:
        # characters without a width are made visible, so that rich counts them
        texts = (run.path, _what(run), _state(run), _best(run))
        path, description, state, best = (escape(visible(text, spaces=False)) for text in texts)
        table.add_row(f"{path}\n[dim]{description}[/]", f"{state}\n[dim]{best}[/]")
    left = []
    for item in left_out:
        at_work = f" (process {process} is at work there)" if (process := running(Path(item.path))) else ""
        left.append(f"[yellow]left out:[/] {escape(item.path)}: {escape(item.why + at_work)}")
    return Group(table, *left, counted(len(runs), "run"))


def _what(run: RunRecord) -> str:
    """Bench, setting, method, task, model, learning rate and seed."""
    names = [run.bench, run.setting if run.bench and run.setting != "default" else None, run.method]
    for word, path in (("on", "task.name"), ("with", "model.name")):
        names += [word, str(value)] if (value := run.setting_at(path)) else []
    rate = run.setting_at("optimisation.lr")
    rates = [f"lr {setting(rate)}"] if isinstance(rate, int | float) else []
    return ", ".join([" ".join(filter(None, names)), *rates, f"seed {run.seed}"])


def _state(run: RunRecord) -> str:
    progress = f"{run.rollouts} of {'?' if run.planned is None else run.planned}"
    if run.status == "finished":
        return f"finished, {counted(run.rollouts, 'rollout')}"
    if run.status == "failed":
        last = (run.error or "").strip().rpartition("\n")[2]
        return f"failed after {progress}" + (f": {last}" if last else "")
    process = running(Path(run.path))
    return f"running, {progress} (process {process})" if process else f"stopped after {progress}"


def _best(run: RunRecord) -> str:
    """The best evaluation, or without one the best mean reward of ten rollouts."""
    held_out = [(record["eval/mean"], int(record["rollout"])) for record in run.evaluations if "eval/mean" in record]
    if held_out:
        value, rollout = max(held_out, key=lambda pair: (pair[0], -pair[1]))
        return f"held out {value:.3f} after {rollout}"
    best = best_bin(run)
    if best is None:
        return ""
    value, end, count = best
    return f"reward {value:.3f}, mean of {counted(count, 'rollout')} until {end}"


def running(folder: Path) -> int | None:
    """The process on this machine that holds a run folder; None if none does, or it cannot be known."""
    try:
        lock = re.fullmatch(r"process ([1-9][0-9]{0,9}) on (\S{1,255})", read_text(folder / LOCK))
        if lock is None or lock[2] != socket.gethostname():
            return None
        with suppress(PermissionError):  # it is another user's
            os.kill(int(lock[1]), 0)
    except (OSError, ValueError, OverflowError):
        return None
    return int(lock[1])
