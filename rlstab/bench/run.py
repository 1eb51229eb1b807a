"""``rlstab bench``: what is finished is skipped, what was cut off goes on, what fails is recorded, the rest is made."""

from __future__ import annotations

import json
import os
import platform
import re
import select
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any

import filelock
import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlstab.bench.file import Bench, BenchRun, few
from rlstab.bench.progress import Screen
from rlstab.bench.record import FILE, read_record, update_record, write_record
from rlstab.bench.worker import LOG, last_lines
from rlstab.config.document import dump
from rlstab.console import Terminal
from rlstab.errors import ConfigError

#: Seconds between looks at the workers.
POLL = 0.5

#: Seconds that a worker has to leave by itself before it is killed.
PATIENCE = 10.0

#: Exit code after Ctrl-C.
STOPPED = 130

#: What starts a worker.
COMMAND = [sys.executable, "-m", "rlstab.bench.worker"]

#: One thread per run: two such runs side by side do more than one run on two threads.
ONE_THREAD = {
    f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM", "RAYON")
} | {"TOKENIZERS_PARALLELISM": "false"}


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
    try:
        bench.out.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(bench.out / ".lock", timeout=0):
            return _run(bench, runs, workers or bench.workers, overwrite, retry, console)
    except filelock.Timeout:
        text = f"{bench.out} is being run by another process. Wait for it, or give another folder with --out."
        raise ConfigError(text) from None
    except OSError as error:
        text = f"{bench.out} cannot be written: {error}. Mend that, or give another folder with --out."
        raise ConfigError(text) from error


def _run(bench: Bench, runs: Sequence[BenchRun], workers: int, overwrite: bool, retry: bool, console: Console) -> int:
    owner = read_record(bench.out).get("name", bench.file.name)
    if owner != bench.file.name:
        raise ConfigError(
            f"{bench.out} holds the bench '{owner}', and {bench.source or 'this'} is '{bench.file.name}': their runs "
            f"would be mixed. Give another folder with --out, or call this one '{owner}' too."
        )
    plan = plan_of(runs, overwrite=overwrite, retry=retry)
    if changed := [run.name for run in plan["changed"]]:
        raise ConfigError(
            f"{bench.out} holds {len(changed)} finished runs with other settings than {bench.source or 'this'} has "
            f"now: {few(changed)}. Make them again with --overwrite, or keep them and give another folder with --out."
        )
    _describe(bench)
    _say_unequal(bench, console)
    queue = [run for run in runs if run in plan["anew"] or run in plan["resumed"]]
    try:
        with Screen(console, runs, queue) as screen:
            _make(bench, queue, plan["resumed"], workers, screen)
    except KeyboardInterrupt:
        _say(console, f"stopped; {_summary(runs)}. Continue with: {command(bench)}")
        return STOPPED
    failed = [run for run in runs if read_record(run.folder).get("status") == "failed"]
    for run in failed:
        why = str(read_record(run.folder).get("error") or "no reason given").splitlines()[-1]
        console.print(f"[red]failed[/] {escape(run.name)}: {escape(why)}", highlight=False, soft_wrap=True)
    if failed:
        reasons = f"The reasons in full are in {bench.out}/runs/.../{FILE}."
        _say(console, f"{reasons} Run them again with: {command(bench)} --retry")
    _say_unnamed(bench, console)
    _say(console, f"{bench.out}: {_summary(runs)}")
    return 1 if failed else 0


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _say_unequal(bench: Bench, console: Console) -> None:
    for text in bench.unequal:
        console.print(f"[yellow]note:[/] {escape(text)}", highlight=False, soft_wrap=True)


def _say_unnamed(bench: Bench, console: Console) -> None:
    """Runs of a method, setting or seed that the file once had; where there is no file, none are missed."""
    if bench.again:
        return
    known, folder = {run.name for run in bench.runs}, bench.out / "runs"
    names = (path.parent.relative_to(folder).as_posix() for path in sorted(folder.glob(f"*/*/seed-*/{FILE}")))
    if unnamed := [name for name in names if name not in known]:
        _say(
            console,
            f"{bench.out} also holds runs that {bench.source or 'this bench'} does not name: {few(unnamed)}. A "
            f"report of the folder shows them too; remove them if that is not wanted.",
        )


def _summary(runs: Sequence[BenchRun]) -> str:
    states = [read_record(run.folder).get("status") for run in runs]
    finished, failed = states.count("finished"), states.count("failed")
    return f"{finished} of {len(runs)} runs finished" + (f", {failed} failed" if failed else "")


# -- what to do --------------------------------------------------------------------------------------------------------


def chosen(bench: Bench, only: Sequence[str]) -> tuple[BenchRun, ...]:
    """The runs that match a pattern of ``--only``, in their order.

    Raises:
        ConfigError: a pattern matches none.
    """

    def matches(run: BenchRun, pattern: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in (run.name, f"{run.setting}/{run.method}"))

    for pattern in only:
        if not any(matches(run, pattern) for run in bench.runs):
            raise ConfigError(
                f"--only {pattern}: no run matches. Give setting/method or setting/method/seed-0, with * for any. "
                f"Settings: {', '.join(bench.file.settings)}. Methods: {', '.join(bench.file.methods)}."
            )
    return tuple(run for run in bench.runs if not only or any(matches(run, pattern) for pattern in only))


def plan_of(runs: Sequence[BenchRun], *, overwrite: bool, retry: bool) -> dict[str, list[BenchRun]]:
    """What is to be done with each run, by what its folder holds.

    ``finished`` and ``failed`` stay, ``anew`` and ``resumed`` (from a checkpoint) are made, and ``changed`` finished
    with other settings than the file has now.
    """
    plan: dict[str, list[BenchRun]] = {kind: [] for kind in ("finished", "failed", "anew", "resumed", "changed")}
    for run in runs:
        record = read_record(run.folder)
        status, same = record.get("status"), record.get("run_hash") == run.hash
        kind = "anew"
        if status == "finished" and (same or not overwrite):
            kind = "finished" if same else "changed"
        elif status == "failed" and same and not retry:
            kind = "failed"
        elif status == "running" and same and any((run.folder / "checkpoints").glob("rollout-[0-9]*")):
            kind = "resumed"
        plan[kind].append(run)
    return plan


def dry_run(bench: Bench, *, only: Sequence[str] = (), console: Console | None = None) -> None:
    """Print what a bench would do: runs, rollouts and optimizer steps, and how much of it is finished.

    Raises:
        ConfigError: no run matches.
    """
    console = console or Terminal()
    runs = chosen(bench, only)
    plan = plan_of(runs, overwrite=False, retry=False)
    table = Table("setting", "method", box=box.SIMPLE, pad_edge=False, show_edge=False)
    for column in table.columns:
        column.overflow = "fold"  # names that are cut look the same
    for name in ("runs", "finished", "rollouts", "optimizer steps", "responses"):
        table.add_column(name, justify="right", min_width=max(map(len, name.split())))  # numbers stay whole
    totals = [0] * 5
    for setting, method in product(bench.file.settings, bench.file.methods):
        some = [run for run in runs if (run.setting, run.method) == (setting, method)]
        if not some:
            continue
        optimisation, rollout = some[0].config.optimisation, some[0].config.rollout
        rollouts = len(some) * optimisation.rollouts
        work = [rollouts * optimisation.optimizer_steps_per_rollout, rollouts * rollout.prompts * rollout.group]
        numbers = [len(some), sum(run in plan["finished"] for run in some), rollouts, *work]
        totals = list(map(sum, zip(totals, numbers, strict=True)))
        table.add_row(escape(setting), escape(method), *map(str, numbers))
    table.add_section()
    table.add_row("all", "", *map(str, totals))
    console.print(table)
    _say(console, f"folder: {bench.out}; baseline: {bench.file.baseline}; workers: {bench.workers}")
    for kind, what in (
        ("failed", "failed before, run again with --retry"),
        ("resumed", "cut off, would go on from a checkpoint"),
        ("changed", "finished with other settings, need --overwrite"),
    ):
        if plan[kind]:
            _say(console, f"{what}: {', '.join(run.name for run in plan[kind])}")
    _say_unequal(bench, console)
    _say_unnamed(bench, console)


def command(bench: Bench, run: BenchRun | None = None) -> str:
    """What to type to make a bench, or one run of it in another folder, again."""
    if bench.again:
        return bench.again
    parts = ["rlstab", "bench", bench.source or str(bench.out / "bench.yaml")]
    if run:
        parts += ["--only", run.name, "--out", f"runs/{bench.file.name}-again"]
    elif bench.moved:
        parts += ["--out", str(bench.out)]
    return shlex.join(parts)


def _describe(bench: Bench) -> None:
    """Write ``bench.yaml`` and ``bench.json``."""
    if not bench.again:
        (bench.out / "bench.yaml").write_text(dump(bench.resolved), encoding="utf-8")
    about = {name: getattr(bench.file, name) for name in ("name", "about", "baseline")}
    write_record(bench.out, about | {"command": command(bench), "cpu": _processor()})


def _processor() -> str:
    """The processor's name and how many there are."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():  # Linux
        models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        name = models[0] if models else name
    return f"{name} x {os.cpu_count()}"


# -- workers -----------------------------------------------------------------------------------------------------------


class _Worker:
    """A process that makes one run after another, and is started again where it died.

    Args:
        gpu: that it sees; None where there are none.
    """

    def __init__(self, gpu: str | None) -> None:
        self._seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        self.process: subprocess.Popen[bytes] | None = None
        self.run: BenchRun | None = None

    def start(self, run: BenchRun, order: Mapping[str, Any]) -> None:
        """Order a run; what the process itself says goes to the log of its first one."""
        self.run = run
        if self.process is not None and self.process.poll() is not None:  # it died after its last run
            self.leave()
        if self.process is None:
            env = {**os.environ, **ONE_THREAD, **self._seen}
            with (run.folder / LOG).open("ab") as log:  # a session of its own: Ctrl-C is for the parent to decide
                self.process = subprocess.Popen(
                    COMMAND, bufsize=0, stdin=PIPE, stdout=PIPE, stderr=log, env=env, start_new_session=True
                )
        assert self.process.stdin is not None
        with suppress(OSError):  # it died at once; how it ended says why
            self.process.stdin.write(json.dumps(order).encode() + b"\n")

    @property
    def answers(self) -> IO[bytes]:
        """Where it says how a run ended, or where its own end shows."""
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout

    def end(self) -> tuple[BenchRun, int]:
        """The run that has ended, and the exit code of its process."""
        assert self.process is not None
        assert self.run is not None
        run, self.run = self.run, None
        line = self.answers.readline()
        return run, int(line) if line else self.leave()

    def dismiss(self) -> None:
        """Ask it to leave: a worker goes when its standard input ends, and so does its run."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def leave(self) -> int:
        """Dismiss it, kill it if it stays, and return the exit code of its process."""
        self.dismiss()
        assert self.process is not None
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            code = self.process.wait()
        self.answers.close()
        self.process = None
        return code


def _make(bench: Bench, queue: Sequence[BenchRun], resumed: Sequence[BenchRun], count: int, screen: Screen) -> None:
    """Make runs in their order, so many at a time; however this ends, no worker is left."""
    names: list[str | None] = [*gpus()] or [None]
    workers = [_Worker(names[place % len(names)]) for place in range(count)]  # they share the GPUs evenly
    waiting = deque(queue)
    try:
        while True:
            for worker in workers:
                if waiting and worker.run is None:
                    _start(bench, waiting.popleft(), resumed, worker, screen)
            busy = {worker.answers: worker for worker in workers if worker.run}
            if not busy:
                return
            ended, _, _ = select.select(busy, [], [], POLL)
            screen.look([worker.run for worker in busy.values() if worker.run])
            for worker in (busy[answer] for answer in ended):
                run, code = worker.end()
                if read_record(run.folder).get("status") not in ("finished", "failed"):
                    log = (run.folder / LOG).read_text(encoding="utf-8", errors="replace")
                    text = last_lines(f"{log.rstrip()}\nthe worker {_how(code)}")
                    update_record(run.folder, status="failed", error=text, seconds=None, cpu_seconds=None)
                screen.ended(run)
    finally:
        started = [worker for worker in workers if worker.process]
        for act in (_Worker.dismiss, _Worker.leave):  # all of them are asked before the first one is waited for
            for worker in started:
                act(worker)


def _start(bench: Bench, run: BenchRun, resumed: Sequence[BenchRun], worker: _Worker, screen: Screen) -> None:
    """Start a run, in place of the one that is there or from its checkpoint."""
    resume = run in resumed
    spent: dict[str, float | None] = {"seconds": 0.0, "cpu_seconds": 0.0}
    if resume:
        spent = {name: read_record(run.folder).get(name) for name in spent}
    run.folder.mkdir(parents=True, exist_ok=True)
    record = {"bench": bench.file.name, "setting": run.setting, "method": run.method, "seed": run.seed}
    record |= {"status": "running", "error": None, "seconds": None, "cpu_seconds": None}
    write_record(run.folder, record | {"command": command(bench, run), "run_hash": run.hash})
    if not resume:
        (run.folder / LOG).write_bytes(b"")
    order = {"run": run.config.model_dump(mode="json"), "resume": resume, "spent": spent}
    worker.start(run, order | {"keep_checkpoints": bench.file.keep_checkpoints})
    screen.started(run, resume)


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by {names.get(-code, f'signal {-code}')}"


def gpus() -> list[str]:
    """The GPUs that this process sees, by the names that ``CUDA_VISIBLE_DEVICES`` takes."""
    count, given = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(count))) if given is None else [name.strip() for name in given.split(",")]
    return names[:count]
