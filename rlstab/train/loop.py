"""The loop: sample, score, learn, evaluate, save; and continue after a kill as if nothing had happened."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from rlstab.config.objectives import objective_hash
from rlstab.config.runs import RunConfig, run_hash
from rlstab.console import Terminal, command
from rlstab.core.comm import Comm, LocalComm, TorchComm
from rlstab.core.objective import require_signals
from rlstab.errors import FitWarning, NonFinite
from rlstab.signals import TRAINER_SIGNALS
from rlstab.stages.pipeline import unmet
from rlstab.tasks import Task
from rlstab.tasks.build import build_task, require_task
from rlstab.tasks.rewards import build_rewards
from rlstab.trace.writer import Tracer
from rlstab.train import checkpoint, durable, lora
from rlstab.train.about import about
from rlstab.train.asking import TRUE, reward_part
from rlstab.train.decoding import require_decoding
from rlstab.train.engines import build_engine, engine_name, loaded_on, require_launcher
from rlstab.train.estimating import Estimating
from rlstab.train.evaluate import Share, evaluate
from rlstab.train.journal import line, read
from rlstab.train.making import Maker
from rlstab.train.manifest import CHECKPOINTS
from rlstab.train.metrics import Metrics
from rlstab.train.policy import load_policy
from rlstab.train.processes import TIMEOUT, count, from_first, launched_alone, meet, saying_which
from rlstab.train.progress import Progress, summary_table
from rlstab.train.prompts import require_prompts
from rlstab.train.providers import AdvantageProvider, Providers, SignalProvider
from rlstab.train.reference import Reference
from rlstab.train.rollout import Rollout, Standing, of_rank
from rlstab.train.run_folder import RunFolder, hold
from rlstab.train.sampler_weights import Sampler
from rlstab.train.stage_evidence import require_evidence
from rlstab.train.step import Experience, Learner, Learnt
from rlstab.train.stopping import Dropped, Stop, Stopped
from rlstab.train.tracking import start_trackers

#: So many refused optimizer steps in a row end a run: the weights do not recover by themselves.
MAX_REFUSED = 20


@dataclass(frozen=True)
class RunResult:
    """What a run left.

    Attributes:
        out: its folder.
        records: lines of ``metrics.jsonl``.
    """

    out: Path
    records: list[dict[str, Any]]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The records that hold an evaluation, first to last."""
        return [one for one in self.records if "eval/mean" in one]


def train(
    run: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    signals: Mapping[str, SignalProvider] | None = None,
    advantages: AdvantageProvider | None = None,
    task: Task | None = None,
    timeout: timedelta = TIMEOUT,
) -> RunResult:
    """Train a policy as a configuration says.

    Every process of a launch calls it; the process group stays open for what the caller does next.

    Args:
        run: from :func:`rlstab.config.load_run`.
        resume: continue from the newest whole checkpoint in ``tracking.out``; start where there is no run.
        overwrite: replace a run that is already there, which waits in a folder beside until the first checkpoint.
        console: where to print; None prints on the terminal, and a progress bar only if it is one.
        signals: functions that make signals of your own, by the name that a method's ``needs`` has. Each takes the
            :class:`~rlstab.train.providers.Responses` of this rank and returns ``(R, T)`` floats. One that no method
            needs is not called, nor is any on a rank without responses: ranks must not wait for one another in it.
        advantages: the same for advantages, ``(R,)`` or ``(R, T)``, in place of the configured estimator.
        task: one of your own in place of the configured one, any object that fulfils :class:`rlstab.tasks.Task`.
        timeout: how long a process waits for another that is alive and silent, until it ends with an error.

    Raises:
        ConfigError: ``tracking.out`` holds another run or another process has it, or processes are missing; or a reward
            or a task of yours cannot be used.
        MissingSignal: the objective or a stage reads what this trainer does not provide.
        ModelError, DataError: the model or the data cannot be used.
        CheckpointError: no checkpoint is whole, one is of another run or cannot be written.
        NonFinite: 20 optimizer steps in a row were refused, or a function of yours returned NaN or Inf.
        ShapeError: a function of yours returned another shape.
        Stopped: SIGINT or SIGTERM asked to end; a checkpoint was written. It is a KeyboardInterrupt.
    """
    console = console or Terminal(stderr=True)
    providers = Providers(signals or {}, advantages)
    require_signals(
        run.composition,
        provides=TRAINER_SIGNALS | providers.signals.keys() | {"block_ids"},
        live=frozenset({"entropies", "log_kept_mass"}),
        host="the trainer",
        otherwise="pass rlstab.train.train a function that makes it, in signals",
    )
    require_evidence(run.pipeline)
    for text in unmet(run.pipeline, [one.name for one in run.composition.acting()]):
        warnings.warn(text, FitWarning, stacklevel=2)
    require_launcher(os.environ, run)
    out = Path(run.tracking.out)
    accelerator = meet(out, run.tracking.trackers, timeout)
    with saying_which(accelerator), Stop(drop=accelerator.num_processes == 1) as stop:
        try:
            processes = count(run_hash(run), run.engine.model_dump_json())
            alone = launched_alone(processes, os.environ)
            if alone is not None:
                console.print(f"[yellow]one process:[/] {escape(alone)}", highlight=False)
            names = providers.in_words() | ({} if task is None else {"task": type(task).__qualname__})
            with hold(run, accelerator, names, stop, resume=resume, overwrite=overwrite) as (folder, latest):
                loop = _Loop(run, accelerator, folder, latest, console, providers, task, stop)
                return loop.go(about(run, accelerator, processes, names, loop.rewards, loop.engine.in_words))
        except Dropped:  # before the first rollout
            kept = checkpoint.checkpoints(out / CHECKPOINTS)[-1:] if resume else []
            done = checkpoint.number(kept[0]) if kept else 0
            raise Stopped(stop.number, done, run.optimisation.rollouts, kept[0] if kept else None) from None


class _Loop:
    def __init__(
        self,
        run: RunConfig,
        accelerator: Accelerator,
        folder: RunFolder | None,
        latest: Path | None,
        console: Console,
        providers: Providers,
        task: Task | None,
        stop: Stop,
    ) -> None:
        self.run, self.accelerator, self.console = run, accelerator, console
        self.out, self.folder = Path(run.tracking.out), folder  # the first process has the folder
        self.providers, self.stop = providers, stop
        name = engine_name(run.engine, accelerator, os.environ)
        device, precision = loaded_on(name, accelerator), run.optimisation.precision
        several = accelerator.num_processes > 1
        comm: Comm = TorchComm(device=accelerator.device) if several else LocalComm()
        self.share = Share(accelerator.process_index, accelerator.num_processes)
        self.task: Task = build_task(run.task) if task is None else require_task(task)
        self.rewards = build_rewards(run.reward, self.task)
        torch.manual_seed(run.seed)
        policy = load_policy(
            run.model.name, device=device, precision=precision, adapter=run.model.adapter, saved=latest
        )
        lora.require_trainable(policy.model, run.model.name)
        self.engine = engine = build_engine(name, run, policy, accelerator, comm)
        with engine.whole() as policy:
            require_decoding(policy, run.model.name)
        require_prompts(policy, self.task, run.rollout)
        reference = None
        if "ref_logprobs" in run.composition.needs:
            whole = engine.whole  # with the adapter off
            if run.model.adapter is None or run.model.reference is not None:
                other = load_policy(run.model.reference or run.model.name, device=device, precision=precision)
                whole = engine.frozen(other)
            reference = Reference(whole, run.rollout.temperature, run.optimisation.micro_batch_size)
        self.policy, self.comm = policy, comm
        self.learner = Learner(
            engine,
            run.composition,
            run.optimisation,
            run.rollout.temperature,
            accelerator,
            comm,
            run.seed,
        )
        self.estimating = Estimating(
            run.pipeline.estimator, policy, comm, run.rollout.temperature, run.optimisation.micro_batch_size
        )
        self._leaving = threading.Event()
        sampler = Sampler(run.rollout.precision)
        self.maker = Maker(
            run,
            lambda: sampler.refreshed(policy),
            self.task,
            self.rewards,
            comm,
            self.share,
            providers,
            self._say,
            self._leaving,
            reference,
        )
        self.done, self.latest, self.standing = 0, latest, self.maker.begin()
        if latest is not None:
            self._restore(latest)
        self.refused = 0
        self.tracer = None
        if run.tracking.trace_every and folder is not None:
            append = partial(folder.append, "tokens.jsonl")
            self.tracer = Tracer(append, run.tracking, run.optimisation.rollouts, policy.decode)
        self.learner.tracer = self.tracer

    def _restore(self, latest: Path) -> None:
        """Go on from a checkpoint."""
        run, policy = self.run, self.policy
        found, moments = checkpoint.load(latest, self.engine.weights, objective=objective_hash(run.composition))
        self.engine.restore(self.learner.optimizer, moments)
        self.learner.state, self.learner.optimizer_steps = found.state, found.optimizer_steps
        self.done = found.rollout
        if found.standing is None:  # it was written before there were stages
            self.standing = replace(self.standing, made=self.done, drawn=self.done * run.rollout.prompts)
            return
        parts = {"slots": self.maker.slots, "group": run.rollout.group}
        queue = found.standing["queue"]
        waiting = (
            of_rank(queue[str(place)], self.share.rank, self.share.world, **parts) for place in range(len(queue))
        )
        limit, device = run.rollout.max_new_tokens, policy.device
        self.standing = Standing(
            found.standing["made"],
            found.standing["drawn"],
            found.standing["states"],
            tuple(Rollout.from_tensors(one, limit, device) for one in waiting),
        )

    def go(self, about: Mapping[str, Any]) -> RunResult:
        folder, write = self.folder, None
        with self.stop.held():
            from_first(self.accelerator, lambda: folder.begin(about) if folder is not None else None)
        if folder is not None:
            self._tell(folder)
            if self.engine.in_words != "one process":
                self.console.print(f"engine: {self.engine.in_words}", highlight=False)
            for name, checksum in about["code"].items():
                self._say("own code", f"{name} (sha256 {checksum}...)")
            write = partial(folder.append, "metrics.jsonl")
        start_trackers(self.accelerator, self.run, self.out, write, self.console)
        try:
            self._rollouts()
        except Dropped:
            self._end_early()
        finally:
            self._leaving.set()
            self.maker.asking.close()
            for tracker in self.accelerator.trackers:  # end_training() would end the process group as well
                tracker.finish()
        return self._finish()

    def _tell(self, folder: RunFolder) -> None:
        """What was found in the folder, once."""
        for text in folder.said:
            self._say("run folder", text)
        folder.said.clear()

    def _rollouts(self) -> None:
        run, main = self.run, self.accelerator.is_main_process
        every, saving = run.evaluation.every, run.tracking.checkpoint_every
        if self.done == 0 and every:
            values = self._evaluate()
            with self.stop.held():
                self.accelerator.log(values, step=0)
        with Progress(self.console, run.optimisation.rollouts, self.done, shown=main) as progress:
            for rollout in range(self.done + 1, run.optimisation.rollouts + 1):
                values = self._rollout(rollout - 1)
                last = rollout == run.optimisation.rollouts
                if every and (rollout % every == 0 or last):
                    values |= self._evaluate()
                self.accelerator.log(values, step=rollout)
                progress.show(rollout, values)
                self.done = rollout
                if last or (saving and rollout % saving == 0):
                    self._save(planned=True)
                self._perhaps_stop()
                self.stop.release()  # what _rollout held

    def _perhaps_stop(self) -> None:
        """Where there are several processes, all of them end when one was asked to."""
        if self.accelerator.num_processes == 1:
            return
        asked = max(gather_object([self.stop.number]))
        if asked:
            self.stop.number = asked
            raise Dropped

    def _end_early(self) -> None:
        """A signal asks to end: save what is completed, unless the run is."""
        if self.done == self.run.optimisation.rollouts:
            return
        self.stop.hold()
        if self.done and (self.latest is None or checkpoint.number(self.latest) != self.done):
            self._save(planned=False)
        raise Stopped(self.stop.number, self.done, self.run.optimisation.rollouts, self.latest)

    def _rollout(self, number: int) -> dict[str, float]:
        """Make a rollout and learn from one; ``number`` counts from 0 and fixes all randomness.

        Until something is learnt a signal to end drops it all; from then on the rollout is completed first.
        """
        run, metrics, start = self.run, Metrics(), time.perf_counter()
        torch.manual_seed(run.seed + 7919 * (number + 1) + self.share.rank)
        standing = self.standing
        while standing.made < min(number + run.rollout.staleness + 1, run.optimisation.rollouts):
            with self.engine.whole():
                made, standing = self.maker.make(standing, metrics)
            standing = replace(standing, queue=(*standing.queue, made))
        rollout, standing = standing.queue[0], replace(standing, queue=standing.queue[1:])
        self.maker.prepare(standing)
        self._perhaps_stop()
        self.stop.hold()
        self.standing = self._learn(number, rollout, standing, metrics)
        if self.folder is not None:
            self._write_samples(self.folder, number + 1, rollout)
        values = metrics.collect()
        values["seconds/rollout"] = time.perf_counter() - start
        return values

    def _learn(self, number: int, rollout: Rollout, standing: Standing, metrics: Metrics) -> Standing:
        """Learn from a rollout; the standing after it, which differs where the estimator has a state."""
        if rollout.refused:
            why = (
                f"{rollout.refused} rewards are NaN or Inf. The rollout was refused and nothing was changed. Make the "
                f"scorer of the task return a number."
            )
            self._count_refused(self.learner.refuse(why, metrics))
            return standing
        name, found = self.estimating.estimator.name, rollout.advantages
        states = dict(standing.states)
        if found is None:
            with metrics.phase("estimate"), self.engine.whole():
                found, states[name] = self.estimating.advantages(rollout, states[name], metrics)
        responses = rollout.responses
        if self.tracer is not None:
            one_each = _per_response(found, rollout.sequences.response_mask)
            ids = responses.sequence_ids, responses.group_ids
            rewards = responses.evidence("raw_rewards")
            self.tracer.begin(number + 1, lambda place: self._prompt(rollout, place), *ids, rewards, one_each)
        experience = Experience(rollout.sequences, rollout.signals, found, responses.sequence_ids, responses.group_ids)
        self._count_refused(self.learner.learn(experience, metrics))
        return replace(standing, states=states)

    def _prompt(self, rollout: Rollout, place: int) -> str:
        """What a response goes on from, as text."""
        prompt = self.task.example("train", int(rollout.responses.prompt_ids[place])).prompt
        given = int(rollout.responses.given[place])
        return prompt + (self.policy.decode(rollout.answers()[place][:given]) if given else "")

    def _count_refused(self, learnt: Learnt) -> None:
        steps = self.run.optimisation.optimizer_steps_per_rollout
        self.refused = self.refused + learnt.refused if learnt.refused == steps else 0
        if learnt.why is not None and self.accelerator.is_main_process:
            self._say("refused", learnt.why)
        if self.refused >= MAX_REFUSED:
            kept = checkpoint.checkpoints(self.out / CHECKPOINTS)
            raise NonFinite(
                f"{self.refused} optimizer steps in a row were refused, the last because: {learnt.why} Lower "
                f"optimisation.lr. {f'{kept[-1]} is the newest checkpoint.' if kept else 'There is no checkpoint yet.'}"
            )

    def _say(self, what: str, text: str) -> None:
        # completions and error texts are data: brackets in them are no markup
        self.console.print(f"[yellow]{what}:[/] {escape(text)}", highlight=False)

    def _evaluate(self) -> dict[str, float]:
        start = time.perf_counter()
        with self.engine.whole() as policy:
            values = evaluate(policy, self.task, self.run.rollout, self.run.evaluation, self.share, self.rewards)
        return {**values, "seconds/evaluate": time.perf_counter() - start}

    def _write_samples(self, folder: RunFolder, number: int, rollout: Rollout) -> None:
        most, lines, special = self.run.tracking.samples, "", not self.task.keeps_special_tokens
        late = rollout.timed_out.nonzero().squeeze(-1).tolist()
        places = sorted({*range(min(most, len(rollout.responses))), *(late if most else ())})
        answers = rollout.answers() if places else []
        for place in places:
            sample: dict[str, Any] = {
                "rollout": number,
                "prompt": self.task.example("train", int(rollout.responses.prompt_ids[place])).prompt,
                "text": self.policy.decode(answers[place], skip_special_tokens=special),
                "reward": float(rollout.responses.evidence("raw_rewards")[place]),
            }
            if TRUE in rollout.responses.extra:
                sample[TRUE] = float(rollout.responses.evidence(TRUE)[place])
            for name in self.rewards.names:
                sample[reward_part(name)] = float(rollout.responses.evidence(reward_part(name))[place])
            if place in late:
                sample["timed_out"] = True
            lines += line(sample)
        if lines:
            folder.append("samples.jsonl", lines)

    def _save(self, *, planned: bool) -> None:
        learner, engine, standing = self.learner, self.engine, self.standing.saved()
        moments = engine.moments(learner.optimizer)
        with engine.whole() as policy:
            if self.folder is not None:
                about = objective_hash(self.run.composition), standing, self.folder.identity()
                kept = checkpoint.Checkpoint(self.done, learner.optimizer_steps, learner.state, *about)
                self.latest = self.folder.save(kept, policy, moments, engine.gathered, planned=planned)
                self._tell(self.folder)
            else:  # the first process asks for them as it writes
                for values in moments.values():
                    for one in values.values():
                        engine.gathered(one)
        self.accelerator.wait_for_everyone()

    def _finish(self) -> RunResult:
        self.accelerator.wait_for_everyone()  # the first process may still be writing
        result = RunResult(self.out, read(self.out / "metrics.jsonl")[0])
        if self.folder is not None:
            with durable.saying(self.out):
                self.folder.forget_replaced()  # a kill may have come after the checkpoint
            self._tell(self.folder)
            self.console.print(summary_table(result.records))
            self.console.print(f"run: {escape(str(self.out))}", soft_wrap=True, highlight=False)
            if (self.out / "tokens.jsonl").is_file():
                look = escape(command("view", str(self.out)))
                self.console.print(f"tokens, and what each method did to them: {look}", soft_wrap=True, highlight=False)
        return result


def _per_response(found: Tensor, mask: Tensor) -> Tensor:
    """``(R,)``: an advantage of each response, the mean over its tokens where they differ."""
    if found.ndim == 1:
        return found
    return found.sum(-1) / mask.sum(-1).cpu().clamp(min=1)
