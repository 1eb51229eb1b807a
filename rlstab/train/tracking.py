"""What a run tells of itself: metrics over all ranks, trackers, a progress bar, and whether it learns anything.

Trackers are accelerate's: JSON lines always, wandb and TensorBoard on request.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from accelerate.utils import gather_object, is_tensorboard_available, is_wandb_available
from rich import progress as bars
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rlstab.config.runs import RunConfig
from rlstab.core.stats import Mean
from rlstab.errors import ConfigError
from rlstab.hub import first_line
from rlstab.train.run_folder import line

#: A scalar; a tensor stays on its device until the metrics are collected, so that nothing waits for it.
Number: TypeAlias = float | Tensor

#: What a rollout recorded: a line of ``metrics.jsonl``.
Values: TypeAlias = Mapping[str, Any]


@dataclass
class Metrics:
    """Metrics of one rollout by name, which merge over micro-batches, optimizer steps and ranks; seconds by phase."""

    means: dict[str, tuple[Number, Number]] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    largest: dict[str, Number] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def mean(self, name: str, total: Number, count: Number) -> None:
        """Add to a mean."""
        before = self.means.get(name, (0.0, 0.0))
        self.means[name] = before[0] + total, before[1] + count

    def report(self, report: Mapping[str, Mean]) -> None:
        """Add the report of a loss."""
        for name, mean in report.items():
            self.mean(name, mean.total, mean.count)

    def add(self, name: str, value: float) -> None:
        """Add to a sum over parts and ranks."""
        self.sums[name] = self.sums.get(name, 0.0) + value

    def count(self, name: str, times: int = 1) -> None:
        """Count an event that every rank sees."""
        self.counts[name] = self.counts.get(name, 0) + times

    def highest(self, name: str, value: Number) -> None:
        """Keep the largest value."""
        before = torch.as_tensor(self.largest.get(name, value), dtype=torch.float64)
        self.largest[name] = torch.maximum(before, torch.as_tensor(value, dtype=torch.float64))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase, in seconds of wall time."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def collect(self) -> dict[str, float]:
        """The metrics over all ranks; means nothing was counted for are left out. Every rank calls it."""
        own_means = {name: (float(total), float(count)) for name, (total, count) in self.means.items()}
        own_largest = {name: float(value) for name, value in self.largest.items()}
        whole = Metrics()
        for means, sums, largest in gather_object([(own_means, self.sums, own_largest)]):
            for name, (total, count) in means.items():
                whole.mean(name, total, count)
            for name, value in sums.items():
                whole.add(name, value)
            for name, value in largest.items():
                whole.highest(name, value)
        values = {name: float(total) / float(count) for name, (total, count) in sorted(whole.means.items()) if count}
        return {
            **values,
            **whole.sums,
            **{name: float(value) for name, value in whole.largest.items()},
            **self.counts,
            **{f"seconds/{name}": value for name, value in self.seconds.items()},
        }


# -- trackers --------------------------------------------------------------------------------------------------------


class JsonLinesTracker(GeneralTracker):
    """One JSON object per rollout in ``metrics.jsonl``, written at once. For the main process alone.

    Args:
        append: takes whole lines.
    """

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, append: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # accelerate gives it no types
        self._append = append

    @property
    def tracker(self) -> Any:
        """What lines are given to."""
        return self._append

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The configuration is in ``config.yaml``."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._append(line({"rollout": step, **values}))


def require_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not there, which accelerate leaves out without a word.

    Raises:
        ConfigError: a package is missing.
    """
    known = {"wandb": (is_wandb_available, "wandb"), "tensorboard": (is_tensorboard_available, "-e '.[tensorboard]'")}
    for name in names:
        available, package = known[name]
        if not available():  # type: ignore[no-untyped-call]  # accelerate gives it no types
            raise ConfigError(
                f"tracking.trackers: {name} is not installed. Run `pip install {package}`, or remove it; metrics.jsonl "
                f"is always written."
            )


def start_trackers(
    accelerator: Accelerator, run: RunConfig, append: Callable[[str], None] | None, console: Console
) -> None:
    """Open the trackers of a run. wandb follows its own settings; without a login it is offline.

    Args:
        accelerator: that logs to them.
        run: whose they are.
        append: writes lines of ``metrics.jsonl``; None in all processes but the first.
        console: where to say how wandb is used.

    Raises:
        ConfigError: a tracker does not start.
    """
    out, names = Path(run.tracking.out), run.tracking.trackers
    options: dict[str, Any] = {"dir": str(out), "name": out.name}
    if append is not None:
        accelerator.log_with.append(JsonLinesTracker(append))
        if "wandb" in names:
            options["mode"], why = wandb_mode()
            console.print(f"wandb: {escape(why)}", highlight=False, soft_wrap=True)
    try:
        settings = _flat(run.model_dump(mode="json"))
        accelerator.init_trackers(run.tracking.project, settings, init_kwargs={"wandb": options})
    except Exception as error:  # foreign code that reads files and calls servers
        if not names:
            raise
        raise ConfigError(
            f"tracking.trackers: one of {', '.join(names)} does not start: {first_line(error)}. Mend that, or remove "
            f"it; for wandb, WANDB_MODE=offline needs no server."
        ) from error


def wandb_mode() -> tuple[str, str]:
    """The mode in which wandb logs, and why: as its environment and settings say, offline without a login."""
    import wandb  # slow, and only for those who ask for it

    mode = str(wandb.setup().settings.mode or "online")
    if mode != "online" or os.environ.get("WANDB_MODE") == mode:
        return mode, f"{mode}, as it is configured"
    if os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or wandb.api.api_key:
        return mode, "online, by the login that was found"
    return "offline", "offline, for no login was found. Log in with `wandb login`, or upload later with `wandb sync`"


def _flat(data: Any, place: str = "") -> dict[str, Any]:
    if isinstance(data, dict):
        return {path: value for key, part in data.items() for path, value in _flat(part, f"{place}{key}.").items()}
    if isinstance(data, list):
        return _flat({str(index): part for index, part in enumerate(data)}, place)
    return {place.rstrip("."): "null" if data is None else data}


# -- what a person sees ----------------------------------------------------------------------------------------------

#: Seconds from one line to the next where there is no terminal.
INTERVAL = 30.0


class ProgressBar:
    """A progress bar with the most telling numbers; where the console is not a terminal, a line now and then.

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
        self._evaluated = ""

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, rollout: int, values: Values) -> None:
        """Move to ``rollout`` and show its metrics; the last evaluation stays."""
        if "eval/mean" in values:
            self._evaluated = f" held-out {values['eval/mean']:.3f}"
        shown = {"reward": "reward/mean", "entropy": "tokens/entropy", "grad": "gradient/norm", "kept": "tokens/kept"}
        parts = [f"{label} {values[name]:.3f}" for label, name in shown.items() if name in values]
        if "optimizer_steps/refused" in values:
            parts.append(f"[yellow]refused {int(values['optimizer_steps/refused'])}[/]")
        description = " ".join(parts) + self._evaluated
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
            self._console.print(
                f"rollout {rollout}/{self._total} {text}, {_duration(left)} left{every}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
            self._last = now


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def summary_table(records: Sequence[Values]) -> RenderableType:
    """First against last: evaluations, and the first and the last tenth of the training metrics.

    Below it stands what to look at, where nothing was learnt.

    Args:
        records: lines of ``metrics.jsonl``.
    """
    rollouts = [record for record in records if "reward/mean" in record]
    tenth = max(1, len(rollouts) // 10)
    table = Table()
    for column in ("", "start", "end"):
        table.add_column(column, justify="left" if not column else "right")
    evaluations = [record for record in records if "eval/mean" in record]
    if evaluations:
        for name in sorted(key for key in evaluations[-1] if key.startswith("eval/") and "errors" not in key):
            table.add_row(f"held out: {name[5:]}", _number(evaluations[0].get(name)), _number(evaluations[-1][name]))
    names = sorted({name for record in rollouts for name in record} - {"rollout"})
    for name in names:
        if not name.startswith(("eval/", "seconds/", "optimizer_steps/", "scorer/", "lr")):
            table.add_row(name, _number(_mean(rollouts[:tenth], name)), _number(_mean(rollouts[-tenth:], name)))
    seconds = sum(record.get("seconds/rollout", 0.0) for record in rollouts)
    table.add_section()
    table.add_row("rollouts", "", str(len(rollouts)))
    for name in ("optimizer_steps/skipped", "optimizer_steps/refused", "scorer/errors"):
        total = sum(record.get(name, 0) for record in rollouts)
        if total:
            table.add_row(name, "", str(int(total)))
    table.add_row("seconds per rollout", "", f"{seconds / max(1, len(rollouts)):.2f}")
    return Group(table, *(f"[yellow]health:[/] {escape(text)}" for text in health_of(rollouts)))


def _mean(records: Sequence[Values], name: str) -> float | None:
    values = [record[name] for record in records if name in record]
    return sum(values) / len(values) if values else None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


# -- health: a run in which every optimizer step is skipped or refused goes on to its end -----------------------------

#: Rollouts after which something is said.
WINDOW = 10

#: Of the rollouts, what must be so.
SHARE = 0.9


class Health:
    """Watches the rollouts of a run as they come; each cause is told once.

    Example:
        >>> health = Health()
        >>> nothing = {"reward/mean": 0.0, "reward/zero_std_groups": 1.0, "optimizer_steps/skipped": 1}
        >>> said = [line for _ in range(10) for line in health.see(nothing)]
        >>> print(said[0][:71])
        nothing learnt in 10 of 10 rollouts: every reward was 0, so every advan
    """

    def __init__(self) -> None:
        self._first: Values | None = None
        self._last: deque[Values] = deque(maxlen=WINDOW)
        self._told: set[str] = set()

    def see(self, values: Values) -> list[str]:
        """What to tell after one more rollout, a line each: nothing in most of them."""
        self._first = self._first or values
        self._last.append(values)
        if len(self._last) < WINDOW:
            return []
        causes = {name: text for name, text in _causes(list(self._last), self._first) if name not in self._told}
        self._told |= causes.keys()
        return [f"nothing learnt in {text}" for text in causes.values()]


def health_of(rollouts: Sequence[Values]) -> list[str]:
    """What to look at after a whole run, a line each; nothing where something was learnt."""
    return [f"this run learnt nothing in {text}" for _, text in _causes(rollouts, rollouts[0])] if rollouts else []


def _causes(rollouts: Sequence[Values], first: Values) -> list[tuple[str, str]]:
    """Name and text of the deepest cause that most rollouts share; nothing where there is none."""

    def mostly(holds: Callable[[Values], bool]) -> int:
        count = sum(map(holds, rollouts))
        return count if count >= SHARE * len(rollouts) else 0

    idle = mostly(lambda values: not _taught(values))
    refused = mostly(lambda values: bool(values.get("optimizer_steps/refused")) and "gradient/norm" not in values)
    equal = mostly(lambda values: _is(values, "reward/zero_std_groups", lambda share: share == 1))
    if count := mostly(lambda values: _is(values, "lr", lambda lr: lr == 0)):
        name, text = "lr", "the learning rate was 0. Look at optimisation.lr and warmup_optimizer_steps."
    elif count := refused:
        name, text = (
            "refused",
            (
                "their optimizer steps were refused over NaN or Inf. Lower optimisation.lr, try precision: fp32, and "
                "look at the rewards for NaN."
            ),
        )
    elif count := equal if idle else 0:
        zero = mostly(lambda values: _is(values, "reward/mean", lambda reward: reward == 0))
        name, text = ("zero", "every reward was 0") if zero else ("equal", "all rewards of each group were equal")
        text += ", so every advantage was 0. " + _why_equal(rollouts, first, zero=bool(zero))
    elif count := idle:
        dropped = mostly(lambda values: _is(values, "tokens/kept", lambda share: share == 0))
        name, text = "silent", "the methods dropped every token" if dropped else "no optimizer step had a gradient"
        text += ". Look at what each method does with `rlstab check`, and at tokens/live in metrics.jsonl."
    return [(name, f"{count} of {len(rollouts)} rollouts: {text}")] if count else []


def _why_equal(rollouts: Sequence[Values], first: Values, *, zero: bool) -> str:
    """What to look at, by what was seen besides."""
    failures = ("scorer/errors", "scorer/timeouts")
    hints = {
        "The first rollout had rewards: the policy was lost since. Lower optimisation.lr.": zero
        and _is(first, "reward/mean", lambda reward: reward > 0),
        "The scorer failed: look at its errors and at task.time_limit.": any(
            values.get(name) for values in rollouts for name in failures
        ),
        "Hardly a response ended by itself: raise rollout.max_new_tokens, or set rollout.stop.": all(
            _is(values, "response/ended", lambda share: share < 0.1) for values in rollouts
        ),
        "Look in samples.jsonl whether a right answer is found; take harder or easier prompts, or a larger "
        "rollout.group.": True,
    }
    return " ".join(hint for hint, seen in hints.items() if seen)


def _taught(values: Values) -> bool:
    """Whether an optimizer step was made in which the advantage of some token counted: a penalty alone is no lesson."""
    live = "tokens/live" not in values or _is(values, "tokens/live", lambda share: share > 0)
    return live and _is(values, "gradient/norm", lambda norm: norm > 0)


def _is(values: Values, name: str, holds: Callable[[float], bool]) -> bool:
    """Whether a metric is there, is a number, and is so; NaN is null in records."""
    value = values.get(name)
    return isinstance(value, int | float) and not math.isnan(value) and holds(value)
