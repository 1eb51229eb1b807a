"""What a person sees while a run goes on, and when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich import progress as bars
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rlstab.train.health import Health, summary

#: Seconds from one line to the next where there is no terminal.
INTERVAL = 30.0


class Progress:
    """A progress bar with the numbers one looks at; where the console is not a terminal, a line now and then.

    It also says when a run learns nothing, and why.

    Args:
        console: where it is printed.
        total: rollouts of the run.
        done: of them, before this process.
        shown: False on all ranks but one.
        clock: seconds.
    """

    def __init__(
        self, console: Console, total: int, done: int, *, shown: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._shown, self._clock = console, shown, clock
        self._total, self._done, self._start, self._last = total, done, clock(), -INTERVAL
        self._health = Health()
        self._bar = bars.Progress(
            bars.TextColumn("rollout"),
            bars.MofNCompleteColumn(),
            bars.BarColumn(bar_width=20),
            bars.TextColumn("{task.description}"),
            bars.TimeRemainingColumn(compact=True),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task("", total=total, completed=done)
        self._held = ""

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, rollout: int, values: dict[str, float]) -> None:
        """Move to ``rollout`` and show its metrics; the last evaluation stays."""
        if "eval/mean" in values:
            self._held = f" held-out {values['eval/mean']:.3f}"
        shown = {"reward": "reward/mean", "entropy": "tokens/entropy", "grad": "gradient/norm", "kept": "tokens/kept"}
        parts = [f"{label} {values[name]:.3f}" for label, name in shown.items() if name in values]
        parts += [
            f"[yellow]{kind} {int(values[f'optimizer_steps/{kind}'])}[/]"
            for kind in ("refused",)
            if f"optimizer_steps/{kind}" in values
        ]
        description = " ".join(parts) + self._held
        self._bar.update(self._task, completed=rollout, description=description)
        if not self._shown:
            return
        if not self._console.is_terminal:
            self._line(rollout, Text.from_markup(description).plain)
        for text in self._health.see(values):
            self._console.print(f"[yellow]health:[/] {escape(text)}", highlight=False, soft_wrap=True)

    def _line(self, rollout: int, text: str) -> None:
        now = self._clock()
        first = rollout == self._done + 1
        if first or rollout == self._total or now - self._last >= INTERVAL:
            left = (now - self._start) / (rollout - self._done) * (self._total - rollout)
            every = f"; one line every {INTERVAL:g} s" if first and rollout < self._total else ""
            line = f"rollout {rollout}/{self._total} {text}, {_duration(left)} left{every}"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
            self._last = now


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def summary_table(records: Sequence[dict[str, Any]]) -> RenderableType:
    """First against last: evaluations, and the first and the last tenth of the training metrics.

    Below it stands what to look at, where nothing was learnt.

    Args:
        records: lines of ``metrics.jsonl``.
    """
    rollouts = [one for one in records if "reward/mean" in one]
    tenth = max(1, len(rollouts) // 10)
    table = Table()
    for column in ("", "start", "end"):
        table.add_column(column, justify="left" if not column else "right")
    evaluations = [one for one in records if "eval/mean" in one]
    if evaluations:
        for name in sorted(key for key in evaluations[-1] if key.startswith("eval/") and "errors" not in key):
            table.add_row(f"held out: {name[5:]}", _number(evaluations[0].get(name)), _number(evaluations[-1][name]))
    names = sorted({name for one in rollouts for name in one} - {"rollout"})
    shown = [name for name in names if not name.startswith(("eval/", "seconds/", "optimizer_steps/", "scorer/", "lr"))]
    for name in shown:
        table.add_row(name, _number(_mean(rollouts[:tenth], name)), _number(_mean(rollouts[-tenth:], name)))
    seconds = sum(one.get("seconds/rollout", 0.0) for one in rollouts)
    table.add_section()
    table.add_row("rollouts", "", str(len(rollouts)))
    for name in ("optimizer_steps/skipped", "optimizer_steps/refused", "scorer/errors"):
        total = sum(one.get(name, 0) for one in rollouts)
        if total:
            table.add_row(name, "", str(int(total)))
    table.add_row("seconds per rollout", "", f"{seconds / max(1, len(rollouts)):.2f}")
    return Group(table, *(f"[yellow]health:[/] {escape(text)}" for text in summary(rollouts)))


def _mean(records: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [one[name] for one in records if name in one]
    return sum(values) / len(values) if values else None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
