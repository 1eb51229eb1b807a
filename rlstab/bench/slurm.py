"""``rlstab bench --launcher slurm``: a job for each run, in an array, through submitit."""

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import submitit
from submitit.core.utils import DelayedSubmission

from rlstab.bench.file import Bench, BenchRun
from rlstab.bench.progress import Screen
from rlstab.bench.record import read_record, record_failure, update_record
from rlstab.bench.worker import GRACE
from rlstab.errors import ConfigError

#: Folder in a bench for the files of submitit, including the output of jobs.
FOLDER = "slurm"
#: Seconds between checks of the records of the runs.
POLL = 2.0
#: Recorded states of a run that has ended.
ENDED = ("finished", "failed")


@dataclass
class Job:
    """A job: makes the run in a folder, and continues it after it was stopped and queued again."""

    folder: str
    process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """The exit code of the run's process."""
        self.process = subprocess.Popen([sys.executable, "-m", "rlstab.bench.worker", self.folder])
        while self.process.poll() is None:  # a wait would hold a lock that `checkpoint` needs
            time.sleep(0.2)
        return self.process.wait()

    def checkpoint(self) -> DelayedSubmission:
        """Called before the job is stopped: the run writes a checkpoint, and the job is queued again."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(60 * GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return DelayedSubmission(Job(self.folder))


def executor_of(bench: Bench, at_once: int) -> submitit.Executor:
    """The executor that submits the jobs of a bench, by the settings under ``slurm`` in its file.

    Raises:
        ConfigError: a setting is not one of submitit's, or the time that a job may take is missing.
    """
    options, shared = dict(bench.file.slurm), submitit.AutoExecutor._typed_parameters()
    if not {"time", "timeout_min"} & options.keys():
        text = "slurm: say how many minutes a job may take, such as `time: 240`; after that it is queued again."
        raise ConfigError(f"{bench.source}: {text}")
    try:
        executor = submitit.AutoExecutor(bench.out / FOLDER, cluster=str(options.pop("cluster", "slurm")))
        settings = {name if name in shared else f"slurm_{name}": value for name, value in options.items()}
        executor.update_parameters(**{"name": bench.file.name, "slurm_array_parallelism": at_once, **settings})
    except (AssertionError, NameError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{bench.source}: slurm: {error}") from error
    return executor


def jobs_of(executor: submitit.Executor, runs: Sequence[BenchRun]) -> dict[BenchRun, submitit.Job[int]]:
    """The jobs of an earlier call that have not ended."""
    jobs: dict[BenchRun, submitit.Job[int]] = {}
    for run in runs:
        record = read_record(run.folder)
        if record.get("job") and record.get("status") not in ENDED:
            job = executor.job_class(executor.folder, str(record["job"]))
            if not job.done(force_check=True):
                jobs[run] = job
    return jobs


def submit(executor: submitit.Executor, runs: Sequence[BenchRun]) -> dict[BenchRun, submitit.Job[int]]:
    """Submit runs whose orders are in their folders, as one array, and record the number of each job.

    Raises:
        ConfigError: the scheduler does not take them.
    """
    if not runs:
        return {}
    try:
        jobs = executor.submit_array([Job(str(run.folder.absolute())) for run in runs])
    except (OSError, RuntimeError, subprocess.SubprocessError, submitit.core.utils.FailedJobError) as error:
        raise ConfigError(f"slurm: the jobs cannot be submitted: {error}") from error
    for run, job in zip(runs, jobs, strict=True):
        update_record(run.folder, job=job.job_id)
    return dict(zip(runs, jobs, strict=True))


def follow(jobs: Mapping[BenchRun, submitit.Job[int]], screen: Screen) -> None:
    """Show the progress of the runs until all have ended."""
    left, shown = dict(jobs), ""
    while left:
        for run, job in list(left.items()):
            ended = job.done()  # before the record is read, which may then be complete
            if read_record(run.folder).get("status") in ENDED or ended:
                if read_record(run.folder).get("status") not in ENDED:
                    record_failure(run.folder, Path(job.paths.stderr), f"the job {job.job_id} ended ({job.state})")
                screen.ended(run)
                del left[run]
        states = Counter(str(read_record(run.folder).get("status")) for run in left)
        if left and (summary := ", ".join(f"{count} {state}" for state, count in sorted(states.items()))) != shown:
            screen.say(f"jobs: {summary}")
            shown = summary
        screen.look(list(left))
        time.sleep(POLL if left else 0)
