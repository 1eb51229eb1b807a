"""How often the host waits for the device, counted on a simulated one: per token, micro-batch and optimizer step.

    python -m benchmarks waits
    python -m benchmarks waits --lines          # the lines of rlstab that wait, in one whole run

A wait is what a GPU makes the host do to read a number or a shape, or to copy between the two. Each figure is the
difference between two runs of the trainer that differ in that alone, so the figures hold on any machine.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.modules import stack
from rlstab.config.objectives import dump_objective
from rlstab.core.compose import compose
from tests.device import simulated
from tests.device.on_device_trainer import trainer_there
from tests.train.runs import go, small

METHODS = (1, 10, 29)
ONE = {"optimisation__rollouts": 1, "rollout__max_new_tokens": 8, "rollout__group": 8}
#: The run without and with more of something, and how much more there is.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "decoded token": ({}, {"rollout__max_new_tokens": 24}, 16),
    "micro-batch": ({"optimisation__micro_batch_size": 8}, {"optimisation__micro_batch_size": 2}, 6),
    "optimizer step": ({}, {"optimisation__epochs": 3}, 2),
    "dumped micro-batch": ({}, {"tracking__dump_every": 1}, 1),
}


def waits(folder: Path, methods: int, changes: dict[str, Any]) -> simulated.Tally:
    """What a run of one rollout waits for."""
    objective: Any = "clip_higher" if methods == 1 else dump_objective(compose(*stack()[:methods]))
    with tempfile.TemporaryDirectory(dir=folder) as out, trainer_there() as tally, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        go(small(Path(out) / "run", objective, **{**ONE, "optimisation__old_logprobs": "rollout", **changes}))
    return tally


def figures(folder: Path, methods: int, rows: Sequence[str] = tuple(PAIRS)) -> dict[str, float]:
    """Waits per unit of each row, for an objective of some methods."""
    found = {}
    for row in rows:
        without, more, units = PAIRS[row]
        before, after = (sum(waits(folder, methods, changes).waits.values()) for changes in (without, more))
        found[row] = (after - before) / units
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--lines", action="store_true")
    given, console = arguments.parse_args(), Console()
    simulated.register()
    with tempfile.TemporaryDirectory() as folder:
        if given.lines:
            for (operation, line), times in waits(Path(folder), 1, {}).waits.most_common():
                console.print(f"{times:5}  {operation:<20}  {line}", highlight=False)
            return
        table = Table("waits of the host per", *(f"{count} methods" for count in METHODS))
        columns = [figures(Path(folder), count) for count in METHODS]
        for row in PAIRS:
            table.add_row(row, *(f"{column[row]:g}" for column in columns))
        console.print(table)
