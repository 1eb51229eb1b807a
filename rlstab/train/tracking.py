"""Metrics over all ranks, trackers, and a progress bar.

The trackers are those of accelerate: wandb and TensorBoard.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich import progress as bars
from rich.console import Console
from rich.table import Column
from torch import Tensor

from rlstab.config.document import flat
from rlstab.config.runs import RunConfig
from rlstab.core.metrics import RunningMeans, means_over_ranks
from rlstab.core.stats import Mean
from rlstab.errors import ConfigError
from rlstab.hub import first_line

#: A scalar. A tensor stays on its device until the metrics are collected, so that nothing waits for kernels.
Number: TypeAlias = float | Tensor


@dataclass
class Metrics:
    """Metrics of one rollout by name, merged over micro-batches, optimizer steps and ranks.

    Attributes:
        means: over all that has a count, such as the reports of losses and stages.
        sums: over parts and ranks.
        largest: the largest values, by :meth:`highest`.
        counts: how often something happened on every rank at once.
        seconds: wall time of this rank by phase.
    """

    means: RunningMeans = field(default_factory=RunningMeans)
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    largest: dict[str, Number] = field(default_factory=dict)
    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def mean(self, name: str, total: Number, count: Number) -> None:
        """Add a total and a count to a mean."""
        self.means.add({name: Mean(*(torch.as_tensor(number, dtype=torch.float64) for number in (total, count)))})

    def highest(self, name: str, value: Number) -> None:
        """Keep the largest value."""
        before = torch.as_tensor(self.largest.get(name, value), dtype=torch.float64)
        self.largest[name] = torch.maximum(before, torch.as_tensor(value, dtype=torch.float64))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall time inside to a phase, in seconds."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def collect(self) -> dict[str, float]:
        """The metrics over all ranks, without means whose count is 0. Every rank calls it."""
        largest_here = {name: float(value) for name, value in self.largest.items()}
        ranks, merged = gather_object([(self.means.take(), dict(self.sums), largest_here)]), Metrics()
        for _, sums, largest in ranks:
            for name, value in sums.items():
                merged.sums[name] += value
            for name, value in largest.items():
                merged.highest(name, value)
        return {
            **means_over_ranks(means for means, _, _ in ranks),
            **merged.sums,
            **{name: float(value) for name, value in merged.largest.items()},
            **self.counts,
            **{f"seconds/{name}": value for name, value in self.seconds.items()},
        }


# -- trackers --------------------------------------------------------------------------------------------------------


def start_trackers(accelerator: Accelerator, run: RunConfig, console: Console, run_id: str) -> None:
    """Open the trackers of a run. wandb follows its own settings, and is offline without a login.

    A resumed run continues its wandb run, unless the environment names another one.

    Raises:
        ConfigError: a tracker does not start.
    """
    out, names = Path(run.tracking.out), run.tracking.trackers
    options: dict[str, Any] = {"dir": str(out), "name": out.name}
    if not os.environ.keys() & {"WANDB_RUN_ID", "WANDB_RESUME"}:
        options |= {"id": run_id, "resume": "allow"}
    try:
        if "wandb" in names:
            import wandb  # slow to import

            if not (wandb.api.api_key or os.environ.keys() & {"WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"}):
                options["mode"] = "offline"
                console.print("wandb: offline, since no login was found. Run `wandb login`, or later `wandb sync`.")
        settings = flat(run.model_dump(mode="json"))
        accelerator.init_trackers(run.tracking.project, settings, init_kwargs={"wandb": options})
    except Exception as error:  # code of other packages, which reads files and calls servers
        raise ConfigError(
            f"tracking.trackers: one of {', '.join(names)} does not start: {first_line(error)}. Fix or remove it."
        ) from error


# -- progress on the console -----------------------------------------------------------------------------------------

#: Seconds between lines where the console is not a terminal.
INTERVAL = 30.0

#: Characters of the bar.
BAR = 16

#: The metrics next to the bar by their labels; where they do not fit, the last ones are left out.
_SHOWN = {"reward": "reward/mean", "held-out": "eval/mean", "entropy": "tokens/entropy", "grad": "gradient/norm"}


class ProgressBar(bars.Progress):
    """A progress bar with the most important metrics; if the console is not a terminal, a line at intervals.

    Args:
        console: the one that it is printed to.
        total: rollouts of the run.
        done: rollouts that were learnt before this process started.
        shown: False on all ranks but one.
    """

    def __init__(self, console: Console, total: int, learnt: int, *, shown: bool) -> None:
        self._shown, self._total, self._last, self._evaluated = shown, total, -INTERVAL, dict[str, Any]()
        count = bars.MofNCompleteColumn(table_column=Column(no_wrap=True))  # on a narrow terminal the bar gives way
        left = bars.TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True))
        columns = count, bars.BarColumn(bar_width=BAR), bars.TextColumn("{task.description}"), left
        hidden = not (shown and console.is_terminal)
        super().__init__(
            *columns, console=console, disable=hidden, speed_estimate_period=3600
        )  # a step may take minutes
        self._task = self.add_task("", total=total, completed=learnt)

    def show(self, rollout: int, values: Mapping[str, Any]) -> None:
        """Move to ``rollout`` and show its metrics, a line of ``metrics.jsonl``, and the latest evaluation."""
        self._evaluated |= {name: values[name] for name in ("eval/mean",) if name in values}
        values = {**values, **self._evaluated}
        parts = [f"{label} {values[name]:.3f}" for label, name in _SHOWN.items() if name in values]
        rest = len(f"{self._total}/{self._total} ") + BAR + len("  00:00:00")
        while self.console.is_terminal and len(parts) > 1 and len(" ".join(parts)) > self.console.width - rest:
            del parts[-1]
        text = " ".join(parts)
        self.update(self._task, completed=rollout, description=text)
        due = rollout == self._total or time.monotonic() - self._last >= INTERVAL
        if self._shown and due and not self.console.is_terminal:
            self.console.print(f"rollout {rollout}/{self._total} {text}", highlight=False, markup=False, soft_wrap=True)
            self._last = time.monotonic()
