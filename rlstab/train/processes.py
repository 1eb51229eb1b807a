"""Several processes: they meet, are counted by what answers, and an error says which of them raised it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.utils import (
    InitProcessGroupKwargs,
    broadcast_object_list,
    disable_fsdp_ram_efficient_loading,
    gather_object,
)

from rlstab.errors import ConfigError, RlstabError
from rlstab.train.tracking import require_installed

T = TypeVar("T")

#: A process that hears nothing from another for so long ends with an error. One that died is noticed at once, because
#: its connections close; this is for one that hangs, and it must be longer than the slowest scorer.
TIMEOUT = timedelta(minutes=30)


def meet(out: Path, trackers: Sequence[str], timeout: timedelta = TIMEOUT) -> Accelerator:
    """Join the processes that were launched together; one that was launched alone is alone.

    Raises:
        ConfigError: a tracker is not installed.
    """
    require_installed(trackers)
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        log_with=list(trackers) or None,
        project_dir=out,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
    )
    # with --use_fsdp transformers may read weights in the first process alone, and leave the others with zeros
    disable_fsdp_ram_efficient_loading()
    return accelerator


def count(run: str, engine: str = "") -> int:
    """The number of processes that answer.

    Args:
        run: hash of the run that this process makes.
        engine: its settings, which are not in the hash.

    Raises:
        ConfigError: they make different runs or have different engines, or more were launched.
    """
    answers: list[tuple[str, str]] = gather_object([(run, engine)])
    for rank, answer in enumerate(answers):
        for what, own, first in zip(("makes run", "has engine"), answer, answers[0], strict=True):
            if own != first:
                raise ConfigError(f"rank {rank} {what} {own}, rank 0 {what} {first}. Give all processes one file.")
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if launched > len(answers):
        raise ConfigError(
            f"{launched} processes were launched (WORLD_SIZE) and {len(answers)} answered. Launch with: torchrun "
            f"--standalone --nproc_per_node {launched} -m rlstab.cli train FILE."
        )
    return len(answers)


def from_first(accelerator: Accelerator, make: Callable[[], T]) -> T:
    """What a function returns, or the error of rlstab that it raises, in the first process: for all of them."""
    found: list[tuple[T | None, RlstabError | None]] = [(None, None)]
    if accelerator.is_main_process:
        try:
            found = [(make(), None)]
        except RlstabError as raised:
            found = [(None, raised)]
    if accelerator.num_processes > 1:
        broadcast_object_list(found)
    value, error = found[0]
    if error is not None:
        raise error
    return cast(T, value)


def require_seen(path: Path) -> None:
    """All processes see a folder that the first one found.

    Raises:
        ConfigError: one of them does not.
    """
    for rank, seen in enumerate(gather_object([path.is_dir()])):
        if not seen:
            raise ConfigError(f"rank {rank} does not see {path}. Set a tracking.out that all processes see.")


def launched_alone(processes: int, environment: Mapping[str, str]) -> str | None:
    """What to tell a user whose ``accelerate launch --num_processes N`` started one process.

    The launcher that starts a single process says so in ``ACCELERATE_USE_CPU``. It sets ``MASTER_ADDR`` where it was
    asked for several, but a cluster may set that as well: so this is a warning and no error.
    """
    if processes > 1 or "ACCELERATE_USE_CPU" not in environment or "MASTER_ADDR" not in environment:
        return None
    return (
        "accelerate launch was asked for several processes (MASTER_ADDR is set) and started one, which makes the whole "
        "run. Use --multi_gpu instead of --cpu, on a CPU too, or torchrun."
    )


@contextmanager
def saying_which(accelerator: Accelerator) -> Iterator[None]:
    """An error inside carries a note on which process it was raised in, where there are several."""
    try:
        yield
    except Exception as error:
        if accelerator.num_processes > 1:
            error.add_note(f"raised on rank {accelerator.process_index} of {accelerator.num_processes} processes")
            if isinstance(error, RuntimeError) and not isinstance(error, RlstabError):
                error.add_note("if it is about a connection or a timeout, another process ended first: see its error")
        raise


def leave() -> None:
    """End the connections to the other processes; all call it after their last collective."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
