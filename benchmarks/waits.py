"""How often the host waits for the device, counted on a simulated one: per token, micro-batch and optimizer step.

    python -m benchmarks waits
    python -m benchmarks waits --lines          # the lines that wait, in one whole run
    python -m benchmarks waits --trl            # TRL's trainer with the adapter, by each of its two heads

A program queues work on a GPU and runs ahead of it, until it has to know a value. Three things are counted apart:

- reads: a value, or a shape that values decide, comes to the host, which waits until the queue is empty;
- blocking copies of rlstab to the device: torch waits until they and the queue are done (pageable memory, and not
  non_blocking);
- queued copies to the device: `non_blocking`, for which nothing waits. From pageable memory the host still copies the
  bytes itself, which takes time and waits for no kernel.

The first two are what `torch.cuda.set_sync_debug_mode("warn")` names on CUDA. Reads inside transformers and TRL are
counted apart: attention masks check whether all of a mask is True, once in each forward.

Each figure is the difference between two runs of the trainer that differ only in that, so it holds on any machine.
"""

import argparse
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.modules import stack
from rlstab.config.objectives import dump_objective
from rlstab.core.batch import BASICS, SIGNALS
from rlstab.core.compose import Composition, compose
from rlstab.hosts import trl_settings
from rlstab.signals import SIGNAL_NAMES
from tests.device import simulated
from tests.train.runs import go, small

METHODS = (1, 10, 29)
ONE = {
    "model__name": "countdown-tiny",
    "optimisation__rollouts": 1,
    "optimisation__old_logprobs": "rollout",
    "optimisation__refresh": "rollout",
    "rollout__max_new_tokens": 4,
    "rollout__group": 8,
}
#: The run without and with more of something, and how much more there is.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "decoded token": ({}, {"rollout__max_new_tokens": 20}, 16),
    "micro-batch": ({}, {"optimisation__micro_batch_size": 4}, 3),
    "optimizer step of one micro-batch": ({}, {"optimisation__epochs": 3}, 2),
    "the same with fresh evidence": (
        {"optimisation__refresh": "step"},
        {"optimisation__epochs": 3, "optimisation__refresh": "step"},
        2,
    ),
    "dumped micro-batch": ({}, {"tracking__dump_every": 1}, 1),
}
#: The same of TRL's trainer, which has sampled and scored its responses before.
TRL_PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "micro-batch": ({}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, 3),
    "optimizer step of one micro-batch": ({}, {"num_iterations": 3, "max_steps": 3}, 2),
}
#: What comes with an objective under each head: its signals of the policy, and all others, which need no forward.
GIVEN: dict[str, Set[str]] = {"rlstab": SIGNALS.keys() | BASICS}
GIVEN["trl"] = GIVEN["rlstab"] - SIGNAL_NAMES | BASICS | {"entropies"}
#: Signals that TRL's batch does not have, and a user-defined function gives.
PROVIDED = ("teacher_logprobs", "lag", "block_ids")
COLUMNS = ("reads", "the host's reads", "blocking copies", "queued copies")


def counted(tally: simulated.Tally) -> tuple[int, ...]:
    """How often what happened that :data:`COLUMNS` name."""
    theirs = sum(times for (_, line), times in tally.waits.items() if line.startswith(simulated.OTHERS))
    blocking = sum(times for (_, line), times in tally.sends.items() if not line.startswith(simulated.OTHERS))
    return tally.waits.total() - theirs, theirs, blocking, tally.queued.total()


def objective_of(methods: int, head: str = "rlstab") -> Composition:
    """An objective of a number of methods, at most those that a head serves."""
    served = [method for method in stack() if method.needs <= GIVEN[head] and method.live_needs <= GIVEN[head]]
    return compose(*served[:methods])


def run(folder: Path, methods: int, changes: dict[str, Any]) -> simulated.Tally:
    """What happened in a run of one rollout."""
    objective = dump_objective(objective_of(methods))
    with (
        tempfile.TemporaryDirectory(dir=folder) as out,
        simulated.accelerate_there() as tally,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        with patch("tests.train.runs._require_decoding"):  # the same in every run, and much of a short one
            go(small(Path(out) / "run", objective, **{**ONE, **changes}))
    return tally


def trl_run(folder: Path, methods: int, changes: dict[str, Any], head: str = "trl") -> simulated.Tally:
    """What happened in TRL's trainer with a head, in the optimizer steps of one generation."""
    from tests.adapters import trl_jobs

    objective = objective_of(methods, head)
    wanted = {name: setting.value for name, setting in trl_settings(objective).items()}
    provided = dict.fromkeys(PROVIDED, lambda inputs: torch.zeros_like(inputs["completion_ids"], dtype=torch.float32))
    more = {"sampling": trl_jobs.sampler(scored=True), "extra": {"head": head, "signals": provided}}
    given = {"num_iterations": 1, "max_steps": 1, "use_cpu": False, **wanted, **changes}
    with (
        tempfile.TemporaryDirectory(dir=folder) as out,
        simulated.accelerate_there() as tally,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        trl_jobs.trainer_of(Path(out), dump_objective(objective), **more, **given).train()
    return tally


def figures(
    folder: Path, methods: int, rows: Sequence[str] | None = None, *, trl: str | None = None
) -> dict[str, tuple[float, ...]]:
    """The counts of :data:`COLUMNS` per unit of each row, for an objective of some methods.

    Args:
        folder: where runs are written.
        methods: their number.
        rows: names of rows, None for all.
        trl: a head in TRL's trainer; None is rlstab's trainer.
    """
    runs: dict[str, tuple[int, ...]] = {}

    def of(changes: dict[str, Any]) -> tuple[int, ...]:
        key = str(changes)
        if key not in runs:
            runs[key] = counted(
                run(folder, methods, changes) if trl is None else trl_run(folder, methods, changes, trl)
            )
        return runs[key]

    found, pairs = {}, PAIRS if trl is None else TRL_PAIRS
    for row in rows or pairs:
        without, more, units = pairs[row]
        found[row] = tuple((after - before) / units for before, after in zip(of(without), of(more), strict=True))
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--lines", action="store_true")
    arguments.add_argument("--trl", action="store_true")
    given, console = arguments.parse_args(), Console()
    simulated.register()
    with tempfile.TemporaryDirectory() as folder:
        if given.lines:
            tally = (trl_run if given.trl else run)(Path(folder), 1, {})
            for what in ("waits", "sends", "queued"):
                counts: Counter[tuple[str, str]] = getattr(tally, what)
                for (operation, line), times in counts.most_common():
                    console.print(f"{what:<7}{times:5}  {operation:<20}  {line}", highlight=False)
            return
        table = Table("head", "methods", "per", *COLUMNS)
        for head in ("trl", "rlstab") if given.trl else ("rlstab",):
            for methods in METHODS:
                composed = len(objective_of(methods, head).members)
                for row, values in figures(Path(folder), methods, trl=head if given.trl else None).items():
                    table.add_row(head, str(composed), row, *(f"{value:g}" for value in values))
        console.print(table)
