"""``rlstab bench``: skips finished runs, continues interrupted ones, records failed ones, and makes the rest."""

import json
import os
import platform
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any, Literal, TypeAlias, cast

import torch
from rich.console import Console

from rlstab.bench.file import Bench, BenchRun
from rlstab.bench.launch import Launch, placeholders
from rlstab.bench.plan import changed_beside, chosen, notes_of, plan_of, unnamed, with_other_settings
from rlstab.bench.progress import Screen
from rlstab.bench.record import FILE, read_record, record_failure, write_record
from rlstab.bench.worker import LOG, ORDER, QUEUED
from rlstab.config.document import dump
from rlstab.config.runs import RunConfig
from rlstab.console import Terminal, say
from rlstab.console import command as shell_command
from rlstab.core.method_settings import check_choices
from rlstab.errors import ConfigError, how_ended
from rlstab.extras import require
from rlstab.files import filesystem_errors, locked, replace_file
from rlstab.tasks.rewards import require_functions

#: The launchers.
Launcher: TypeAlias = Literal["local", "slurm", "print"]

#: Seconds between checks of the workers.
POLL = 0.5

#: Seconds that a worker has to end by itself before it is killed.
PATIENCE = 10.0

#: Exit code after Ctrl-C.
STOPPED = 130

#: The command that starts a worker.
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
    launcher: Launcher = "local",
    console: Console | None = None,
) -> int:
    """Make the runs of a bench that are not finished.

    Args:
        bench: the result of :func:`rlstab.bench.file.load_bench`.
        workers: runs at a time; None takes the bench's.
        only: patterns of ``setting/method`` or ``setting/method/seed-0``; empty takes all.
        overwrite: repeat runs whose settings have changed.
        retry: repeat failed runs, from the newest whole checkpoint if they have one.
        launcher: ``local``; ``slurm``, a job for each run; or ``print``, which starts nothing and prints for each run
            the command with which any scheduler may start it.
        console: shows the progress; None is the terminal.

    Returns:
        0, 1 if a run failed, 130 after Ctrl-C.

    Raises:
        ConfigError: runs have other settings than the file now, no run matches, another process runs it, its folder
            cannot be written or holds another bench, or jobs cannot be submitted.
        ScorerError: a reward cannot be loaded, or takes the wrong arguments.
    """
    check_choices(run_bench, launcher=launcher)
    console = console or Terminal(stderr=True)
    runs, count = chosen(bench, only), workers or bench.workers
    with filesystem_errors(bench.out), locked(bench.out, "Wait for it, or give another folder with --out."):
        owner = read_record(bench.out).get("name", bench.file.name)
        if owner != bench.file.name:
            raise ConfigError(
                f"{bench.out} holds the bench '{owner}', and {bench.source or 'this'} is '{bench.file.name}': their "
                f"runs would be mixed. Give another folder with --out, or call this one '{owner}' too."
            )
        plan, unchosen = plan_of(runs, overwrite=overwrite, retry=retry), changed_beside(bench, runs)
        if changed := [*plan["changed"], *([] if overwrite else unchosen)]:
            raise ConfigError(
                f"{bench.out} holds {with_other_settings(bench, changed)}. Make them again with --overwrite, or keep "
                f"them and give another folder with --out."
            )
        startable = {*plan["anew"], *plan["resumed"]}
        queue = [run for run in runs if run in startable]
        _require_startable(bench, queue)
        submit: Callable[[Screen], None] | None = None
        if launcher == "slurm" or any("job" in read_record(run.folder) for run in queue):
            submit = _jobs(bench, queue, plan["resumed"], count, launcher)
        if not bench.again:
            (bench.out / "bench.yaml").write_text(dump(bench.resolved), encoding="utf-8")
        about = {name: getattr(bench.file, name) for name in ("name", "about", "baseline")}
        about |= {"collapse": bench.file.collapse.model_dump()} if bench.file.collapse else {}
        write_record(bench.out, about | {"command": command(bench), "cpu": _processor()})
        for note in notes_of(bench, plan, unchosen):
            say(console, f"note: {note}", "yellow")
        for run in plan["finished"]:
            if "status" not in read_record(run.folder):  # its record was lost
                write_record(run.folder, _record(bench, run, "finished"))
        if launcher == "print":
            for run in queue:
                prepare(bench, run, run in plan["resumed"], QUEUED)
                print(shlex.join([*COMMAND, str(run.folder.absolute())]))
            return 0
        try:
            with Screen(console, runs, queue) as screen:
                if submit is not None:
                    submit(screen)
                else:
                    _make(bench, queue, plan["resumed"], count, screen)
        except KeyboardInterrupt:
            advice = "its jobs continue, and scancel ends them. Follow them again" if submit else "Continue"
            command_line = command(bench) + " --launcher slurm" * bool(submit)
            say(console, f"stopped; {_summary(runs)}. {advice} with: {command_line}", copied=True)
            return STOPPED
        return _conclude(bench, runs, console)


def _require_startable(bench: Bench, queue: Sequence[BenchRun]) -> None:
    """Load the rewards of the runs that are made, and look for the programs of their commands."""
    for reward in {run.config.reward: None for run in queue if isinstance(run.config, RunConfig)}:
        require_functions(reward, load=True)
    for program in {run.config.arguments[0]: None for run in queue if isinstance(run.config, Launch)}:
        if not placeholders(program) and shutil.which(program) is None:
            raise ConfigError(
                f"{bench.source}: command: no program is called '{program}' here. Correct its name or path."
            )


def _conclude(bench: Bench, runs: Sequence[BenchRun], console: Console) -> int:
    """Say how the runs ended; return the exit code."""
    failed = {run.name: record for run in runs if (record := read_record(run.folder)).get("status") == "failed"}
    for name, record in failed.items():
        reason = str(record.get("error") or "no reason given").splitlines()[-1]
        say(console, f"failed {name}: {reason}", "red")
    if failed:
        say(console, f"The reasons in full are in {bench.out}/runs/.../{FILE}.")
        say(console, f"Run them again with: {command(bench)} --retry", copied=True)
    if text := unnamed(bench):
        say(console, text)
    if bench.again:  # the caller says what they came to
        say(console, f"{bench.out}: {_summary(runs)}")
        return 1 if failed else 0
    say(console, f"folder: {bench.out} ({_summary(runs)})", copied=True)
    if len(failed) < len(runs):
        say(console, f"next: {shell_command('report', str(bench.out))}", copied=True)
    return 1 if failed else 0


def _jobs(
    bench: Bench, queue: Sequence[BenchRun], resumed: Sequence[BenchRun], at_once: int, launcher: Launcher
) -> Callable[[Screen], None] | None:
    """A function that submits the runs without a job of an earlier call, and follows all; None for another launcher.

    Raises:
        ConfigError: a job makes one of the runs, and another launcher was asked for.
    """
    require("slurm", "--launcher slurm")
    from rlstab.bench import slurm

    executor = slurm.executor_of(bench, at_once)
    jobs = slurm.jobs_of(executor, queue)
    if launcher != "slurm":
        for run, job in jobs.items():
            text = f"{run.name} is in job {job.job_id}. Continue with --launcher slurm, or end the jobs with scancel."
            raise ConfigError(text)
        return None

    def submit(screen: Screen) -> None:
        new = [run for run in queue if run not in jobs]
        for run in new:
            prepare(bench, run, run in resumed, QUEUED)
        slurm.follow({**jobs, **slurm.submit(executor, new)}, screen)

    return submit


def _summary(runs: Sequence[BenchRun]) -> str:
    states = [read_record(run.folder).get("status") for run in runs]
    finished, failed = states.count("finished"), states.count("failed")
    return f"{finished} of {len(runs)} runs finished" + (f", {failed} failed" if failed else "")


def command(bench: Bench, run: BenchRun | None = None) -> str:
    """The command that makes a bench again, or one of its runs in another folder."""
    if bench.again:
        return bench.again
    parts = ["rlstab", "bench", bench.source or str(bench.out / "bench.yaml")]
    if run:
        parts += ["--only", run.name, "--out", f"runs/{bench.file.name}-again"]
    elif bench.moved:
        parts += ["--out", str(bench.out)]
    return shlex.join(parts)


def _processor() -> str:
    """The name of the processor and the number of processors."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():  # Linux
        models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        name = models[0] if models else name
    return f"{name} x {os.cpu_count()}"


# -- workers -----------------------------------------------------------------------------------------------------------


class _Worker:
    """A process that makes one run after another.

    Args:
        log: takes the output of the process itself.
        env: variables of the process and its runs.
    """

    def __init__(self, log: Path, env: Mapping[str, str]) -> None:
        with log.open("ab") as file:  # its own session: Ctrl-C is for the parent to decide
            self.process = subprocess.Popen(
                COMMAND, bufsize=0, stdin=PIPE, stdout=PIPE, stderr=file, env=env, start_new_session=True
            )
        self.orders, self.answers = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout)
        self.run: BenchRun | None = None

    def start(self, run: BenchRun) -> None:
        """Start a run that was prepared."""
        self.run = run
        with suppress(OSError):  # it died at once; how it ended says why
            self.orders.write(json.dumps(str(run.folder.absolute())).encode() + b"\n")

    def leave(self) -> int:
        """Ask it to end, kill it if it stays, and return the exit code: it and its run end with its standard input."""
        self.orders.close()
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            code = self.process.wait()
        self.answers.close()
        return code


def _make(bench: Bench, queue: Sequence[BenchRun], resumed: Sequence[BenchRun], count: int, screen: Screen) -> None:
    """Make runs in their order, ``count`` at a time; however this ends, no worker is left."""
    workers, waiting = dict[int, _Worker](), deque(queue)
    names = [] if bench.file.command and count == 1 else gpus()
    try:
        while True:
            for slot in range(count):
                worker = workers.get(slot)
                if not waiting or (worker is not None and worker.run is not None):
                    continue
                run = waiting.popleft()
                prepare(bench, run, run in resumed)
                if worker is None or worker.process.poll() is not None:  # it died after its last run
                    env = {**os.environ, **environment(bench)}
                    if names:  # a GPU for a run of one process; a command gets its even share
                        share = ",".join(names[slot::count] if bench.file.command else [])
                        env["CUDA_VISIBLE_DEVICES"] = share or names[slot % len(names)]
                    worker = workers[slot] = _Worker(run.folder / LOG, env)
                worker.start(run)
                screen.say(f"{'resume' if run in resumed else 'start '} {run.name}")
            busy = {worker.answers: (worker, worker.run) for worker in workers.values() if worker.run is not None}
            if not busy:
                return
            ended, _, _ = select.select(busy, [], [], POLL)
            screen.look([run for _, run in busy.values()])
            for worker, run in (busy[answers] for answers in ended):
                line, worker.run = worker.answers.readline(), None
                code = int(line) if line else worker.leave()
                if read_record(run.folder).get("status") not in ("finished", "failed"):
                    record_failure(run.folder, run.folder / LOG, f"the worker {how_ended(code)}")
                screen.ended(run)
    finally:
        for worker in workers.values():  # ask all of them before waiting for the first
            worker.orders.close()
        for worker in workers.values():
            worker.leave()


def prepare(bench: Bench, run: BenchRun, resume: bool, status: str = "running") -> None:
    """Prepare the folder of a run, and write its order there; see :mod:`rlstab.bench.worker`."""
    spent: dict[str, float | None] = {"seconds": 0.0, "cpu_seconds": 0.0}
    if resume:
        spent = {name: read_record(run.folder).get(name) for name in spent}
    run.folder.mkdir(parents=True, exist_ok=True)
    write_record(run.folder, _record(bench, run, status))
    if not resume:
        (run.folder / LOG).write_bytes(b"")
    if isinstance(run.config, Launch):
        arguments = run.config.prepare(run.folder, resume=resume, method=run.method, setting=run.setting)
        order: dict[str, Any] = {"command": arguments}
    else:
        order = {"run": run.config.model_dump(mode="json")}
    keep = bench.file.keep_checkpoints
    order |= {"resume": resume, "spent": spent, "keep_checkpoints": keep}
    replace_file(run.folder / ORDER, json.dumps({**order, "cwd": str(Path.cwd()), "env": environment(bench)}))


def environment(bench: Bench) -> dict[str, str]:
    """The environment of a run; a command has that of the shell."""
    return {} if bench.file.command else ONE_THREAD


def _record(bench: Bench, run: BenchRun, status: str) -> dict[str, Any]:
    """The record of a run in ``bench.json``, without its duration, which is not known yet."""
    names = {"bench": bench.file.name, "setting": run.setting, "method": run.method, "seed": run.seed}
    ended = {"status": status, "error": None, "seconds": None, "cpu_seconds": None}
    return {**names, **ended, "command": command(bench, run), "run_hash": run.hash}


def gpus() -> list[str]:
    """The GPUs that this process sees, by the names that ``CUDA_VISIBLE_DEVICES`` takes."""
    count, visible = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(count))) if visible is None else [name.strip() for name in visible.split(",")]
    return names[:count]
