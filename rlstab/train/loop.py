"""The training loop: sample, score, learn, evaluate, save; after a kill it continues as if nothing had happened.

``Trainer.__init__`` builds the parts, and ``Trainer._rollouts`` is the loop: read it first. Functions for processes and
for signals of the operating system follow below it.
"""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    InitProcessGroupKwargs,
    broadcast_object_list,
    disable_fsdp_ram_efficient_loading,
    gather_object,
    patch_environment,
    set_seed,
)
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from torch.utils import deterministic

from rlstab.config.allowed_changes import digest
from rlstab.config.runs import RunConfig
from rlstab.config.user_classes import require_storable
from rlstab.config.user_code import checksums, portable
from rlstab.console import Terminal, command, say
from rlstab.core.comm import Comm, LocalComm, TorchComm
from rlstab.core.method_checks import LIVE
from rlstab.core.objective import active_methods, require_signals
from rlstab.errors import ConfigError, FitWarning, MissingSignal, ModelError, NonFinite, RlstabError
from rlstab.explain.stages import lacking
from rlstab.extras import require_trackers
from rlstab.logs.watch import Watch, told
from rlstab.models.decoding import require_decoding
from rlstab.models.policy import load_policy, require_prompts, require_saved
from rlstab.models.sampler_weights import Sampler
from rlstab.record.writer import Recorder
from rlstab.run_files import CHECKPOINTS, DUMP, METRICS, SAMPLES
from rlstab.signals import TRAINER_SIGNALS
from rlstab.stages.pipeline import unmet
from rlstab.summary import summary
from rlstab.tasks import Task
from rlstab.tasks.build import build_task, require_task
from rlstab.tasks.evidence import require_evidence
from rlstab.tasks.rewards import build_rewards
from rlstab.tasks.task import checksum_of_examples
from rlstab.train import checkpoint
from rlstab.train.engine import build_engine, is_sharded, require_launcher
from rlstab.train.evaluate import evaluate
from rlstab.train.generate import Generator, SignalProvider
from rlstab.train.learn import Learner
from rlstab.train.reference_and_teacher import Listed, load_other_models
from rlstab.train.rollout import Progress, Rollout
from rlstab.train.run_folder import RunFolder, describe, line, read_records
from rlstab.train.tracking import Metrics, ProgressBar, start_trackers

T = TypeVar("T")

#: A run ends after this many consecutive refused optimizer steps: the weights do not recover by themselves.
MAX_REFUSED = 20

#: How long a process waits for a silent peer before it fails. It must be longer than the slowest scorer takes.
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class RunResult:
    """The results of a run.

    Attributes:
        out: the folder of the run.
        records: the lines of ``metrics.jsonl``.
    """

    out: Path
    records: list[dict[str, Any]]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The records with an evaluation, in order."""
        return [record for record in self.records if "eval/mean" in record]


def train(
    run: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    signals: Mapping[str, SignalProvider] | None = None,
    task: Task | None = None,
    teacher: Listed | None = None,
    timeout: timedelta = TIMEOUT,
) -> RunResult:
    """Train a policy by a configuration.

    Every process of a launch calls it. The process group stays open for the caller.

    Args:
        run: the result of :func:`rlstab.config.load_run`.
        resume: continue from the newest whole checkpoint in ``tracking.out``; start if there is no run.
        overwrite: replace a run in ``tracking.out``; it is kept in a subfolder until the new one has a checkpoint.
        console: the one to print to; None prints to standard error, with a progress bar only on a terminal.
        signals: user-defined signals, by the name that a method's ``needs`` has. Each function takes the
            :class:`~rlstab.train.rollout.Rollout` of this rank and returns ``(R, T)`` floats. A signal that no method
            needs is not computed, nor is any on a rank without responses, so the functions must not communicate.
        task: used in place of the configured one; any object that fulfils :class:`rlstab.tasks.Task`.
        teacher: takes the place of ``model.teacher`` in ``distill``, where a server or a file has the teacher. From the
            :class:`~rlstab.models.policy.Sequences` of a micro-batch with ``R`` responses it returns the teacher's
            likeliest tokens, ``(R, T, k)`` int64, and their log-probs at the run's temperature; see
            :class:`rlstab.signals.TopK`.
        timeout: how long a process waits for a silent peer before it fails.

    Raises:
        ConfigError: ``tracking.out`` holds another run or is used by another process, processes are missing, or a
            user-defined reward or task cannot be used.
        MissingSignal: the objective or a stage reads a signal that this trainer does not provide.
        ModelError, DataError: the model or the data cannot be used.
        CheckpointError: no checkpoint is whole, or one cannot be written.
        NonFinite: 20 consecutive optimizer steps were refused, or a user-defined function returned NaN or Inf.
        ShapeError: a user-defined function returned a tensor of the wrong shape.
        Stopped: SIGINT or SIGTERM ended the run after a checkpoint. It is a KeyboardInterrupt.
    """
    console, signals = console or Terminal(stderr=True), dict(signals or {})
    for name in sorted(signals.keys() & (TRAINER_SIGNALS - {"teacher_logprobs"} | {"old_logprobs", "advantages"})):
        raise ConfigError(f"signals: '{name}' is a signal that the trainer makes. Call yours by another name.")
    require_signals(
        run.composition,
        provides=TRAINER_SIGNALS | signals.keys() | run.reward_evidence | {"block_ids"},
        live=frozenset(LIVE),
        host="the trainer",
        cure=lambda name, live: "pass rlstab.train.train a function that makes it, in signals",
    )
    for text in lacking(run):
        raise MissingSignal(text)
    for text in unmet(run.pipeline, [method.name for method in active_methods(run.composition)]):
        warnings.warn(text, FitWarning, stacklevel=2)
    require_launcher(os.environ, run)
    names: dict[str, Any] = {"signals": {name: _name(provider) for name, provider in sorted(signals.items())}}
    if task is not None:
        names["task"] = type(task).__qualname__
    if teacher is not None:
        names["teacher"] = _name(teacher)
    accelerator = start_processes(run, timeout)
    with tag_errors_with_rank(accelerator), fixed_order(run, accelerator.device), first_signal() as stop:
        require_processes(run, console)
        say = partial(tell, console, "run folder")
        folder = on_main_process(accelerator, lambda: RunFolder(run, names, say, resume=resume, overwrite=overwrite))
        try:
            trainer = Trainer(run, accelerator, folder, console, signals, task, teacher, stop)
            return trainer.go(describe(run, accelerator, trainer.rewards, trainer.engine.in_words))
        finally:
            if folder is not None:
                folder.close()


class Trainer:
    """The parts of a run in one process, and the loop over its rollouts.

    Args:
        run: the configuration.
        accelerator: the accelerator of this process.
        folder: the folder of the run; None in all processes but the first.
        console: the one to print to.
        signals, task, teacher: see :func:`train`.
        stop: returns the number of the signal that asks the run to end; 0 for none.
    """

    def __init__(
        self,
        run: RunConfig,
        accelerator: Accelerator,
        folder: RunFolder | None,
        console: Console,
        signals: Mapping[str, SignalProvider],
        task: Task | None,
        teacher: Listed | None,
        stop: Callable[[], int],
    ) -> None:
        plain_torch()
        self.run, self.accelerator, self.folder, self.console, self.stop = run, accelerator, folder, console, stop
        self.out, self.main = Path(run.tracking.out), accelerator.is_main_process
        rank, world = accelerator.process_index, accelerator.num_processes
        comm: Comm = TorchComm(device=accelerator.device) if world > 1 else LocalComm()
        self.task: Task = build_task(run.task) if task is None else require_task(task)
        checksum = checksum_of_examples(self.task)
        if folder is not None:
            folder.note_examples(checksum)
        self.rewards = build_rewards(run.reward, self.task, getattr(run.task, "environment", None) or ())
        # the first process holds the folder, which all processes have to see
        self.latest: Path | None = broadcast_object_list([folder.start if folder is not None else None])[0]

        torch.manual_seed(run.seed)
        sharded, precision = is_sharded(run, os.environ), run.optimisation.precision
        # a policy that is sharded may be too large for one device
        device = torch.device("cpu") if sharded else accelerator.device
        policy = load_policy(
            run.model.name, device=device, precision=precision, adapter=run.model.adapter, saved=self.latest
        )
        if not any(weight.requires_grad for weight in policy.model.parameters()):
            raise ModelError(
                f"no weight of '{run.model.name}' requires a gradient, so nothing can be trained. Give a model in a "
                f"floating-point format, or put an adapter on it with model.adapter."
            )
        self.engine = build_engine(policy, accelerator, run, comm, sharded=sharded)
        self.policy = self.engine.policy
        with self.engine.gathered_policy() as policy:
            watch = partial(track, console=console, transient=True, disable=not (self.main and console.is_terminal))
            notes, extremes = require_prompts(policy, self.task, run.rollout, watch)
            for text in notes if self.main else ():
                tell(console, "note", text)
            trial = require_decoding(policy, run.model.name, extremes, run.rollout)
            on_main_process(accelerator, partial(require_saved, policy, run.model.name, extremes, run.rollout))
        other_models, lessons, self.first_lines = load_other_models(run, self.engine, signals, device, trial, teacher)

        self.sampler = Sampler(run.rollout.precision, run.rollout.weight_noise, run.seed)
        policy_now = partial(self.sampler.refreshed, self.policy)
        self.generator = Generator(
            run, policy_now, self.task, self.rewards, comm, rank, world, signals, other_models, partial(tell, console)
        )
        require_evidence(run, self.task, signals)
        self.learner = Learner(self.engine, run, comm, main=self.main, lessons=lessons)
        if run.tracking.dump_every:
            last = run.optimisation.optimizer_steps
            self.learner.recorder = Recorder(self.out / DUMP, run.tracking.dump_every, last)
        self.progress = Progress(0, 0, 0, 0, run.composition.init_state(), run.pipeline.init_state())
        if self.latest is not None:
            restored = partial(self.generator.restored, self.policy)
            self.progress = Progress.restored(checkpoint.load(self.latest, self.engine), restored)
        self.refused = 0
        self.watch = Watch("rollout")

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _rollouts(self) -> None:
        run, total, first = self.run, self.run.optimisation.rollouts, self.progress.rollouts
        interval, saving = run.evaluation.every, run.tracking.checkpoint_every
        if self.progress.rollouts == 0 and interval and run.evaluation.start:
            self._log(self._evaluate(), 0)
        with ProgressBar(self.console, total, self.progress.rollouts, shown=self.main) as bar:
            while self.progress.rollouts < total:
                metrics, start = Metrics(), time.perf_counter()
                self._stop_if_asked()
                rollout, progress = self._next_rollout(metrics)  # choose prompts, sample, score, shape
                self._stop_if_asked()
                progress, reason = self.learner.learn(rollout, progress, metrics)  # advantages, optimizer steps
                number = progress.rollouts + 1
                if self.progress.rollouts == first:  # the first states that user-defined code made from real tokens
                    for name, state in (*progress.objective.items(), *progress.stages.items()):
                        require_storable(name, "advance", state)
                self.progress = replace(progress, rollouts=number)
                self._count_refused(metrics.counts.get("optimizer_steps/refused", 0), reason)
                self._write_samples(rollout, number)
                values = metrics.collect() | {"seconds/rollout": time.perf_counter() - start}
                if interval and (number % interval == 0 or number == total):
                    values |= self._evaluate()
                self._log(values, number)
                bar.show(number, values)
                if number == total or (saving and number % saving == 0):
                    self._save(planned=True)
                if self._watch(values, number):
                    if self.latest is None or checkpoint.number(self.latest) != number:
                        self._save(planned=False)
                    break

    def _next_rollout(self, metrics: Metrics) -> tuple[Rollout, Progress]:
        """The rollout to learn from; up to ``rollout.staleness`` later ones wait in the queue.

        ``self.progress`` stays as it is until the rollout is learnt, so that a checkpoint before then is whole.
        """
        run, progress = self.run, self.progress
        plain_torch()
        set_seed((run.seed + 7919 * (progress.rollouts + 1) + self.accelerator.process_index) % 2**32)
        while progress.made < min(progress.rollouts + run.rollout.staleness + 1, run.optimisation.rollouts):
            with self.engine.gathered_policy():
                rollout, progress = self.generator.make(progress, metrics)
            progress = replace(progress, queue=(*progress.queue, rollout))
        return progress.queue[0], replace(progress, queue=progress.queue[1:])

    # -- around it ---------------------------------------------------------------------------------------------------

    def go(self, about: Mapping[str, Any]) -> RunResult:
        """Begin the folder, run the loop, and print the result; ``about`` goes into ``run.json``."""
        folder = self.folder
        on_main_process(self.accelerator, lambda: folder.begin(about) if folder is not None else None)
        if self.learner.recorder is not None and self.main:
            self.learner.recorder.write_tokenizer(self.policy.tokenizer)
        if folder is not None:
            for text in (f"engine: {self.engine.in_words}", *self.first_lines):
                self.console.print(text, highlight=False, markup=False)
        start_trackers(self.accelerator, self.run, self.console, "" if folder is None else folder.run_id)
        try:
            self._rollouts()
        finally:
            self.generator.close()
            for tracker in self.accelerator.trackers:  # end_training() would end the process group too
                tracker.finish()
        return self._finish()

    def _stop_if_asked(self) -> None:
        """If a signal reached any process: save the rollouts that are learnt, and raise :class:`Stopped`."""
        number, rollouts = max(gather_object([self.stop()])), self.progress.rollouts
        if not number:
            return
        if rollouts and (self.latest is None or checkpoint.number(self.latest) != rollouts):
            self._save(planned=False)
        raise Stopped(number, rollouts, self.run.optimisation.rollouts, self.latest)

    def _count_refused(self, steps: int, reason: str) -> None:
        every_step = steps == self.run.optimisation.optimizer_steps_per_rollout
        self.refused = self.refused + steps if every_step else 0
        if reason and self.main:
            tell(self.console, "refused", reason)
        if self.refused >= MAX_REFUSED:
            saved = checkpoint.checkpoints(self.out / CHECKPOINTS)
            newest = f"{saved[-1]} is the newest checkpoint." if saved else "There is no checkpoint yet."
            raise NonFinite(
                f"{self.refused} optimizer steps in a row were refused, the last because: {reason} Lower "
                f"optimisation.lr. {newest}"
            )

    def _evaluate(self) -> dict[str, float]:
        start = time.perf_counter()
        with self.engine.gathered_policy() as policy:
            values = evaluate(policy, self.generator)
            if self.run.evaluation.sampler and (self.sampler.differs or self.run.rollout.cut):
                sampled = evaluate(self.sampler.refreshed(policy), self.generator, cut=True)
                values |= {f"eval/sampler/{name.removeprefix('eval/')}": value for name, value in sampled.items()}
        return {**values, "seconds/evaluate": time.perf_counter() - start}

    def _log(self, values: Mapping[str, Any], number: int) -> None:
        if self.folder is not None:
            self.folder.append(METRICS, line({"rollout": number, **values}))
        self.accelerator.log(dict(values), step=number)

    def _watch(self, values: Mapping[str, Any], number: int) -> bool:
        """Report the signs that appeared; return whether the run ends at one of them, as all processes agree."""
        settings, ends = self.run.tracking, False
        if self.folder is not None and (settings.watch or settings.stop_at):
            if not self.watch.rows:  # what a resumed run has logged before
                for row in read_records(self.out / METRICS):
                    if 0 < row["rollout"] < number:
                        self.watch.log(row["rollout"], row)
            for sign in self.watch.log(number, values):
                tell(self.console, f"sign {sign.name}", told(sign, self.watch.unit))
                self.accelerator.log({f"rlstab/sign/{sign.name}": sign.step}, step=number)
            ends = bool(self.watch.seen.keys() & set(settings.stop_at))
        return bool(settings.stop_at) and any(gather_object([ends]))

    def _write_samples(self, rollout: Rollout, number: int) -> None:
        count, lines = self.run.tracking.samples, ""
        if self.folder is None or not count:
            return
        late = rollout.responses.evidence("timed_out").nonzero().squeeze(-1).tolist()
        rewards = rollout.rewards_by_name("reward")
        for index in sorted({*range(min(count, len(rollout))), *late}):
            sample = {"rollout": number, "prompt": rollout.examples[index].prompt, "text": rollout.texts[index]}
            sample |= {key: float(rollout.responses.evidence(name)[index]) for key, name in rewards.items()}
            lines += line(sample | ({"timed_out": True} if index in late else {}))
        self.folder.append(SAMPLES, lines)

    def _save(self, *, planned: bool) -> None:
        about = self.folder.identity() if self.folder is not None else {}
        self.latest = checkpoint.save(self.out / CHECKPOINTS, self.progress, self.engine, about)
        if self.folder is not None:
            self.folder.keep_newest(self.latest)
            if planned:
                self.folder.forget_replaced()

    def _finish(self) -> RunResult:
        self.accelerator.wait_for_everyone()  # the first process may still be writing
        result = RunResult(self.out, read_records(self.out / METRICS))
        if self.folder is not None and self.latest is not None:  # the last rollout has a checkpoint
            self.folder.forget_replaced()  # a kill may have prevented it after the last save
            self.folder.keep_newest(self.latest)  # a kill may have prevented this, too
            for text in summary(result.records):
                say(self.console, text)
            out = str(self.out)
            for text in (f"folder: {out} (every metric: {command('report', out)})", f"next: {command('look', out)}"):
                say(self.console, text, copied=True)
        return result


def plain_torch() -> None:
    """Reset defaults of torch that user code may have changed: the trainer relies on float32, gradients and the CPU."""
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)


def tell(console: Console, topic: str, text: str) -> None:
    """Print a message; it may contain completions and error texts, whose brackets are not markup."""
    console.print(f"[yellow]{topic}:[/] {escape(text)}", highlight=False)


def _name(provider: Callable[..., Any]) -> str:
    named = provider if hasattr(provider, "__qualname__") else type(provider)
    return f"{named.__module__}.{named.__qualname__}"


# -- processes -------------------------------------------------------------------------------------------------------


def start_processes(run: RunConfig, timeout: timedelta) -> Accelerator:
    """Join the processes that were launched together, if there are several.

    Raises:
        ConfigError: a tracker is not installed.
    """
    trackers: list[Any] = list(run.tracking.trackers)
    require_trackers(trackers)
    with patch_environment(accelerate_use_fsdp="false"):  # engine.py shards, on CPU processes as well
        accelerator = Accelerator(
            # several processes exchange by gloo or nccl, which serve the CPU and CUDA
            cpu=not (torch.cuda if int(os.environ.get("WORLD_SIZE") or 1) > 1 else torch.accelerator).is_available(),
            mixed_precision="no",  # the policy casts: it also forwards without what accelerate wraps
            log_with=trackers or None,
            project_dir=run.tracking.out,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)],
        )
    # under --use_fsdp transformers may read the weights only in the first process, and fill the others with zeros
    disable_fsdp_ram_efficient_loading()
    return accelerator


@contextmanager
def fixed_order(run: RunConfig, device: torch.device) -> Iterator[None]:
    """A context in which an accelerator adds floats in a fixed order if the run asks for it; a CPU always does.

    This is torch's switch for the whole process. cuBLAS reads ``CUBLAS_WORKSPACE_CONFIG`` before its first
    product; a value that the user set stays.
    """
    with ExitStack() as after:
        if run.optimisation.deterministic and device.type != "cpu":
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            before, filling = torch.are_deterministic_algorithms_enabled(), "fill_uninitialized_memory"
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            after.callback(torch.use_deterministic_algorithms, before, warn_only=warns)
            after.callback(setattr, deterministic, filling, getattr(deterministic, filling))
            torch.use_deterministic_algorithms(True)
            setattr(deterministic, filling, False)  # every value is written before it is read
        yield


def require_processes(run: RunConfig, console: Console) -> None:
    """Check that all launched processes are present and have the same run.

    Raises:
        ConfigError: settings differ between processes, or more processes were launched than joined.
    """
    settings = run.model_dump(mode="json", exclude={"tracking"})
    answers = gather_object([digest([portable(settings), checksums(settings)])])
    for rank, answer in enumerate(answers):
        if answer != answers[0]:
            raise ConfigError(f"rank {rank} makes run {answer}, rank 0 {answers[0]}. Give all processes one file.")
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if launched > len(answers):
        raise ConfigError(
            f"{launched} processes were launched (WORLD_SIZE) and {len(answers)} answered. Launch with: torchrun "
            f"--standalone --nproc_per_node {launched} -m rlstab train FILE."
        )
    # accelerate sets these variables when it starts one process; a cluster may set MASTER_ADDR too, so only a note
    if len(answers) == 1 and {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= os.environ.keys():
        text = "accelerate launch was asked for several processes and started one. Use --multi_gpu instead of --cpu."
        tell(console, "one process", text)


def on_main_process(accelerator: Accelerator, work: Callable[[], T]) -> T | None:
    """Call a function in the first process, and raise an error of rlstab there in all processes."""
    result: T | None = None
    error: list[RlstabError | None] = [None]
    if accelerator.is_main_process:
        try:
            result = work()
        except RlstabError as raised:
            error = [raised]
    broadcast_object_list(error)
    if error[0] is not None:
        raise error[0]
    return result


@contextmanager
def tag_errors_with_rank(accelerator: Accelerator) -> Iterator[None]:
    """With several processes, add a note that names the process to an error inside."""
    try:
        yield
    except Exception as error:
        if accelerator.num_processes > 1:
            error.add_note(f"raised on rank {accelerator.process_index} of {accelerator.num_processes} processes")
            if isinstance(error, RuntimeError) and not isinstance(error, RlstabError):
                error.add_note("if it is about a connection or a timeout, another process ended first: see its error")
        raise


# -- SIGINT and SIGTERM: a run ends where a checkpoint can be written --------------------------------------------------

#: Seconds after which a second signal ends the run at once; an earlier one is the first, forwarded by a launcher.
AGAIN = 1.0


class Stopped(KeyboardInterrupt):
    """A signal ended the run in an orderly way.

    Attributes:
        number: the number of the signal.
        checkpoint: the one to continue from; None if no rollout was completed.
    """

    def __init__(self, number: int, rollout: int, rollouts: int, checkpoint: Path | None) -> None:
        self.number, self.checkpoint = number, checkpoint
        name = signal.Signals(number).name
        where = f"after rollout {rollout} of {rollouts}" if rollout else "before the first rollout was complete"
        state = f"the checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
        super().__init__(f"stopped by {name} {where}; {state}")


@contextmanager
def first_signal() -> Iterator[Callable[[], int]]:
    """A context in which the first SIGINT or SIGTERM is noted, and a later one ends the run at once.

    Handlers that the caller installed stay. Python allows handlers only in the main thread.

    Yields:
        a function that returns the number of the signal; 0 before any.
    """
    noted: list[tuple[int, float]] = []

    def handle(number: int, frame: FrameType | None) -> None:
        noted.append((number, time.monotonic()))
        if noted[-1][1] - noted[0][1] > AGAIN:
            raise KeyboardInterrupt

    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    in_main = threading.current_thread() is threading.main_thread()
    replaced = [number for number, handler in usual.items() if in_main and signal.getsignal(number) == handler]
    try:
        for number in replaced:
            signal.signal(number, handle)
        yield lambda: noted[0][0] if noted else 0
    finally:
        for number in replaced:
            signal.signal(number, usual[number])
