"""Worker processes: start one for a run, see how it ended."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlstab.bench.file import Bench, BenchRun
from rlstab.bench.status import read_record, update_record, write_record
from rlstab.bench.worker import Order, last_lines
from rlstab.train.run_folder import clear

#: One thread per run: two such runs side by side do more than one run on two threads.
ONE_THREAD = {
    f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM", "RAYON")
} | {"TOKENIZERS_PARALLELISM": "false"}

#: What starts a worker.
COMMAND = [sys.executable, "-m", "rlstab.bench.worker"]

#: Seconds that a worker has to leave by itself before it is killed.
PATIENCE = 10.0

LOG = "worker.log"


class Worker:
    """A process that makes one run.

    Attributes:
        run: which.
        resumed: whether it goes on from a checkpoint.
        gpu: the one that it sees, of those of :func:`gpus`; None leaves all as they are.
    """

    def __init__(self, run: BenchRun, order: Order, gpu: str | None = None) -> None:
        self.run, self.resumed, self.gpu = run, order.resume, gpu
        with (run.folder / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **ONE_THREAD, **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})},
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(order.line())
            self._process.stdin.flush()
        except OSError:  # it died at once; how it ended says why
            pass

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ended(self) -> bool:
        """Whether the process is gone. A death without a word is recorded as a failure."""
        code = self._process.poll()
        if code is None:
            return False
        self.dismiss()
        record = read_record(self.run.folder)
        if record is None or record.get("status") not in ("finished", "failed"):
            log = (self.run.folder / LOG).read_text(encoding="utf-8", errors="replace")
            text = last_lines(f"{log.rstrip()}\nthe worker {_how(code)}")
            update_record(self.run.folder, status="failed", error=text, seconds=None, cpu_seconds=None)
        return True

    def stop(self) -> None:
        """Ask it to leave, and kill it if it does not."""
        self.dismiss()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def dismiss(self) -> None:
        """Ask it to leave."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:  # what was not yet written has no reader
            pass


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def gpus() -> list[str]:
    """The GPUs that this process sees, by the names that ``CUDA_VISIBLE_DEVICES`` takes."""
    count, given = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(count))) if given is None else [one.strip() for one in given.split(",")]
    return names[:count]


def least_used(names: Sequence[str], running: Sequence[Worker]) -> str | None:
    """The GPU of the fewest workers, the first of several; None where there is none."""
    used = [one.gpu for one in running]
    return min(names, key=used.count, default=None)


def start(bench: Bench, run: BenchRun, *, resume: bool, gpu: str | None = None) -> Worker:
    """Start a run, in place of the one that is there or from its checkpoint."""
    before = (read_record(run.folder) or {}) if resume else {"seconds": 0.0, "cpu_seconds": 0.0}
    if not resume and run.folder.exists():
        clear(run.folder)
        (run.folder / LOG).unlink(missing_ok=True)
    run.folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "bench": bench.name,
        "setting": run.setting,
        "method": run.method,
        "seed": run.seed,
        "status": "running",
        "error": None,
        "seconds": None,
        "cpu_seconds": None,
        "command": command(bench, run),
        "run_hash": run.hash,
    }
    write_record(run.folder, record)
    config = run.config.model_dump(mode="json")
    order = Order(config, resume, bench.keep_checkpoints, before.get("seconds"), before.get("cpu_seconds"))
    return Worker(run, order, gpu)


def command(bench: Bench, run: BenchRun | None = None) -> str:
    """What to type to make a bench, or one run of it in another folder, again."""
    parts = ["rlstab", "bench", bench.source or str(bench.out / "bench.yaml")]
    if run:
        parts += ["--only", run.name, "--out", f"runs/{bench.name}-again"]
    elif bench.moved:
        parts += ["--out", str(bench.out)]
    return shlex.join(parts)


def go(
    bench: Bench, queue: Sequence[tuple[BenchRun, bool]], workers: int, poll: float
) -> Iterator[tuple[list[Worker], list[Worker]]]:
    """Make the runs of a queue, so many at a time; after each look, those that run and those that have just ended.

    Each worker sees one GPU, where there are any, and workers share them evenly.

    Args:
        bench: to which they belong.
        queue: runs in order, each with whether it continues from a checkpoint.
        workers: at a time.
        poll: seconds between looks.
    """
    waiting, running, names = list(queue), list[Worker](), gpus()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                run, resume = waiting.pop(0)
                running.append(start(bench, run, resume=resume, gpu=least_used(names, running)))
            done = [one for one in running if one.ended()]
            running = [one for one in running if one not in done]
            yield running, done
            if running and not done:
                time.sleep(poll)
    finally:
        for one in running:
            one.dismiss()
        for one in running:
            one.stop()
