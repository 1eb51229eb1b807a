"""The loop: sample, score, learn, evaluate, save; and continue after a kill as if nothing had happened."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console
from rich.markup import escape
from torch import Tensor

import rlstab
from rlstab.config.objectives import objective_hash
from rlstab.config.runs import AdvantageSettings, RunConfig, run_hash
from rlstab.console import Terminal
from rlstab.core.comm import Comm, LocalComm, TorchComm
from rlstab.core.objective import require_signals
from rlstab.errors import NonFinite
from rlstab.signals import SIGNAL_NAMES, TRAINER_SIGNALS
from rlstab.stages import advantages
from rlstab.tasks import Example, Task
from rlstab.tasks.from_settings import build_task
from rlstab.trace.writer import Tracer
from rlstab.train import checkpoint, durable
from rlstab.train.decoding import require_decoding
from rlstab.train.evaluate import Share, evaluate
from rlstab.train.journal import line, read
from rlstab.train.manifest import CHECKPOINTS
from rlstab.train.metrics import Metrics
from rlstab.train.picture import draw
from rlstab.train.policy import Sequences, load_policy
from rlstab.train.processes import TIMEOUT, count, from_first, launched_alone, meet, saying_which
from rlstab.train.progress import Progress, summary_table
from rlstab.train.providers import AdvantageProvider, Providers, Responses, SignalProvider
from rlstab.train.reward import Scores, score
from rlstab.train.rollout import grouped, sample
from rlstab.train.run_folder import RunFolder, hold
from rlstab.train.step import Experience, Learner, forward_signals
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
        timeout: how long a process waits for another that is alive and silent, until it ends with an error.

    Raises:
        ConfigError: ``tracking.out`` holds another run or another process has it, or processes are missing.
        MissingSignal: the objective reads a signal that this trainer does not provide.
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
        provides=TRAINER_SIGNALS | providers.signals.keys(),
        live=frozenset({"entropies", "log_kept_mass"}),
        host="the trainer",
        otherwise="pass rlstab.train.train a function that makes it, in signals",
    )
    out = Path(run.tracking.out)
    accelerator = meet(out, run.tracking.trackers, timeout)
    with saying_which(accelerator), Stop(drop=accelerator.num_processes == 1) as stop:
        try:
            processes = count(run_hash(run))
            alone = launched_alone(processes, os.environ)
            if alone is not None:
                console.print(f"[yellow]one process:[/] {escape(alone)}", highlight=False)
            names = providers.in_words()
            with hold(run, accelerator, names, stop, resume=resume, overwrite=overwrite) as (folder, latest):
                loop = _Loop(run, accelerator, folder, latest, console, providers, stop)
                return loop.go(_about(run, accelerator, processes, providers))
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
        stop: Stop,
    ) -> None:
        self.run, self.accelerator, self.console = run, accelerator, console
        self.out, self.folder = Path(run.tracking.out), folder  # the first process has the folder
        self.providers, self.stop = providers, stop
        device, precision = accelerator.device, run.optimisation.precision
        several = accelerator.num_processes > 1
        comm: Comm = TorchComm(device=device) if several else LocalComm()
        self.share = Share(accelerator.process_index, accelerator.num_processes)
        self.task: Task = build_task(run.task)
        torch.manual_seed(run.seed)
        policy = load_policy(str(latest or run.model.name), device=device, precision=precision)
        require_decoding(policy, run.model.name)
        reference = None
        if "ref_logprobs" in run.composition.needs:
            reference = load_policy(run.model.reference or run.model.name, device=device, precision=precision)
            reference.model.requires_grad_(False)
        if run.optimisation.gradient_checkpointing:
            policy.checkpoint_gradients()
        self.policy, self.reference, self.comm = policy, reference, comm
        self.learner = Learner(
            policy,
            run.composition,
            run.optimisation,
            run.rollout.temperature,
            accelerator,
            comm,
            run.seed,
        )
        self.done, self.latest = 0, latest
        if latest is not None:
            restored = checkpoint.load(
                latest, policy, self.learner.optimizer, objective=objective_hash(run.composition)
            )
            self.learner.state = restored.state
            self.learner.optimizer_steps = restored.optimizer_steps
            self.done = restored.rollout
        self.refused = 0
        # one worker: a task's generator and scorer are foreign code and need not be safe for several threads
        self.beside, self._leaving = ThreadPoolExecutor(1), threading.Event()
        self._next: tuple[int, Future[tuple[list[int], list[Example]]]] | None = None
        self.tracer = None
        if run.tracking.trace_every and folder is not None:
            append = partial(folder.append, "tokens.jsonl")
            self.tracer = Tracer(append, run.tracking, run.optimisation.rollouts, policy.decode)
        self.learner.tracer = self.tracer

    def go(self, about: Mapping[str, Any]) -> RunResult:
        folder, write = self.folder, None
        with self.stop.held():
            from_first(self.accelerator, lambda: folder.begin(about) if folder is not None else None)
        if folder is not None:
            self._tell(folder)
            write = partial(folder.append, "metrics.jsonl")
        start_trackers(self.accelerator, self.run, self.out, write)
        try:
            self._rollouts()
        except Dropped:
            self._end_early()
        finally:
            self._leaving.set()
            self.beside.shutdown(cancel_futures=True)
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
        """Sample, score and learn once; ``number`` counts from 0 and fixes all randomness.

        Until something is learnt a signal to end drops it all; from then on the rollout is completed first.
        """
        run, metrics, start = self.run, Metrics(), time.perf_counter()
        rollout = run.rollout
        torch.manual_seed(run.seed + 7919 * (number + 1) + self.share.rank)
        mine, examples = self._examples(number)
        repeated = [one for one in examples for _ in range(rollout.group)]
        ids = [index * rollout.group + one for index in mine for one in range(rollout.group)]
        sequence_ids = torch.tensor(ids, dtype=torch.int64)
        scoring: list[Future[Scores]] = []
        with metrics.phase("sample"):
            sampled = sample(
                self.policy,
                grouped([one.prompt for one in examples], rollout.group),
                sequence_ids,
                rollout,
                seed=run.seed,
                needs={"entropies"} | (run.composition.needs & SIGNAL_NAMES),
                options=run.composition.signal_options,
                skip_special_tokens=not self.task.keeps_special_tokens,
                on_texts=lambda start, texts: scoring.append(
                    self.beside.submit(
                        score, self.task, repeated[start : start + len(texts)], texts, stop=self._leaving
                    )
                ),
            )
        if number + 1 < run.optimisation.rollouts:
            self._next = number + 1, self.beside.submit(self._draw_examples, number + 1)
        with metrics.phase("score"):
            scores = Scores.joined([one.result() for one in scoring])
        group_ids = sequence_ids // rollout.group
        signals = dict(sampled.signals)
        signals["rollout_logprobs"] = signals.pop("logprobs")
        if "truncated" in run.composition.needs:
            cut = ~sampled.ended.to(self.policy.device).unsqueeze(-1)
            signals["truncated"] = (sampled.sequences.response_mask & cut).float()
        if self.reference is not None:
            with metrics.phase("reference"):
                signals["ref_logprobs"] = self._reference(sampled.sequences)
        self._observe(metrics, scores.rewards, group_ids, sampled.sequences.response_mask, sampled.ended)
        metrics.add("scorer/errors", len(scores.errors))
        metrics.add("scorer/timeouts", len(scores.timed_out))
        where = f" on rank {self.share.rank}" if self.share.world > 1 else ""
        if scores.timed_out:
            first = sampled.texts[scores.timed_out[0]]
            self._say(f"scorer timed out{where}, reward 0", f"{len(scores.timed_out)} times, first on {first[:80]!r}")
        if scores.errors:
            self._say(f"scorer raised{where}, reward 0", scores.errors[0])
        self._perhaps_stop()
        self.stop.hold()
        if not self._refused_rewards(scores.rewards, metrics):
            own, found = self._provided(
                metrics,
                Responses(
                    tuple(repeated),
                    tuple(sampled.texts),
                    sampled.sequences.response_ids,
                    sampled.sequences.response_mask,
                    signals,
                    scores.rewards,
                    sequence_ids,
                    group_ids,
                ),
            )
            if self.tracer is not None:
                one_each = _per_response(found, sampled.sequences.response_mask)
                prompts = [one.prompt for one in examples]
                self.tracer.begin(number + 1, prompts, sequence_ids, scores.rewards, one_each, rollout.group)
            experience = Experience(sampled.sequences, {**signals, **own}, found, sequence_ids, group_ids)
            self.learner.last_refusal = None
            self.learner.learn(experience, metrics)
            self._count_refused(self.learner.last_refusal, metrics)
        if self.folder is not None:
            self._write_samples(self.folder, number + 1, examples, sampled.texts, scores)
        values = metrics.collect()
        values["seconds/rollout"] = time.perf_counter() - start
        return values

    def _examples(self, number: int) -> tuple[list[int], list[Example]]:
        """Indices and problems of this rank in one rollout; those of the next are drawn while this one is learnt."""
        ahead, self._next = self._next, None
        return ahead[1].result() if ahead is not None and ahead[0] == number else self._draw_examples(number)

    def _draw_examples(self, number: int) -> tuple[list[int], list[Example]]:
        prompts = self.run.rollout.prompts
        mine = [number * prompts + place for place in self.share.of(prompts)]
        return mine, [self.task.example("train", index) for index in mine]

    def _provided(self, metrics: Metrics, responses: Responses) -> tuple[dict[str, Tensor], Tensor]:
        """Signals of the user's own, and the advantages: the user's, or those of the configured estimator."""
        signals: dict[str, Tensor] = {}
        found = None
        if self.providers:
            with metrics.phase("provide"):
                signals = self.providers.signals_of(responses, self.run.composition.needs)
                found = self.providers.advantages_of(responses)
        if found is None:
            found = group_advantages(responses.rewards, responses.group_ids, self.run.advantage)
        return signals, found

    def _refused_rewards(self, rewards: Tensor, metrics: Metrics) -> bool:
        """Whether rewards of any rank are no numbers; then the rollout teaches nothing and its steps are refused."""
        bad = float(self.comm.sum((~torch.isfinite(rewards)).sum().double().reshape(1)))
        if not bad:
            return False
        steps = self.run.optimisation.optimizer_steps_per_rollout
        self.learner.optimizer_steps += steps
        for _ in range(steps):
            metrics.count("optimizer_steps/refused")
        self._count_refused(
            f"{int(bad)} rewards are NaN or Inf. The rollout was refused and nothing was changed. Make the scorer "
            f"of the task return a number.",
            metrics,
        )
        return True

    def _count_refused(self, refusal: str | None, metrics: Metrics) -> None:
        steps = self.run.optimisation.optimizer_steps_per_rollout
        count = metrics.counts.get("optimizer_steps/refused", 0)
        self.refused = self.refused + count if count == steps else 0
        if refusal is not None and self.accelerator.is_main_process:
            self._say("refused", refusal)
        if self.refused >= MAX_REFUSED:
            kept = checkpoint.checkpoints(self.out / CHECKPOINTS)
            raise NonFinite(
                f"{self.refused} optimizer steps in a row were refused, the last because: {refusal} Lower "
                f"optimisation.lr. {f'{kept[-1]} is the newest checkpoint.' if kept else 'There is no checkpoint yet.'}"
            )

    def _say(self, what: str, text: str) -> None:
        # completions and error texts are data: brackets in them are no markup
        self.console.print(f"[yellow]{what}:[/] {escape(text)}", highlight=False)

    def _reference(self, sequences: Sequences) -> Tensor:
        assert self.reference is not None
        found = torch.zeros(sequences.response_ids.shape, device=self.policy.device)
        rows = torch.arange(len(found))
        for one in rows.split(self.run.optimisation.micro_batch_size):
            if len(one):
                values = forward_signals(
                    self.reference, sequences, one, self.run.rollout.temperature, {"logprobs"}, {}
                )["logprobs"]
                found[one, : values.shape[1]] = values
        return found

    def _observe(
        self, metrics: Metrics, rewards: Tensor, group_ids: Tensor, response_mask: Tensor, ended: Tensor
    ) -> None:
        lengths = response_mask.sum(-1)
        metrics.mean("reward/mean", float(rewards.sum()), len(rewards))
        metrics.mean("response/length", float(lengths.sum()), len(rewards))
        metrics.mean("response/ended", float(ended.sum()), len(rewards))
        equal = sum(
            int((rewards[group_ids == group] == rewards[group_ids == group][0]).all()) for group in group_ids.unique()
        )
        metrics.mean("reward/zero_std_groups", equal, len(group_ids.unique()))

    def _evaluate(self) -> dict[str, float]:
        start = time.perf_counter()
        values = evaluate(self.policy, self.task, self.run.rollout, self.run.evaluation, self.share)
        return {**values, "seconds/evaluate": time.perf_counter() - start}

    def _write_samples(
        self, folder: RunFolder, rollout: int, examples: list[Example], texts: list[str], scores: Scores
    ) -> None:
        group, most, lines = self.run.rollout.group, self.run.tracking.samples, ""
        for place in sorted({*range(min(most, len(texts))), *(scores.timed_out if most else ())}):
            sample: dict[str, Any] = {
                "rollout": rollout,
                "prompt": examples[place // group].prompt,
                "text": texts[place],
                "reward": float(scores.rewards[place]),
            }
            if place in scores.timed_out:
                sample["timed_out"] = True
            lines += line(sample)
        if lines:
            folder.append("samples.jsonl", lines)

    def _save(self, *, planned: bool) -> None:
        learner = self.learner
        if self.folder is not None:
            kept = checkpoint.Checkpoint(
                self.done,
                learner.optimizer_steps,
                learner.state,
                objective_hash(self.run.composition),
                self.folder.identity(),
            )
            self.latest = self.folder.save(kept, self.policy, learner.optimizer, planned=planned)
            self._tell(self.folder)
        self.accelerator.wait_for_everyone()

    def _finish(self) -> RunResult:
        self.accelerator.wait_for_everyone()  # the first process may still be writing
        result = RunResult(self.out, read(self.out / "metrics.jsonl")[0])
        if self.folder is not None:
            picture = self.out / "curves.png"
            with durable.saying(self.out):
                self.folder.forget_replaced()  # a kill may have come after the checkpoint
                draw(result.records, picture, f"{self.out.name}: {', '.join(self.run.composition.keyed)}")
            self._tell(self.folder)
            self.console.print(summary_table(result.records))
            for what, path in (("run", self.out), ("picture", picture)):
                self.console.print(f"{what}: {escape(str(path))}", soft_wrap=True, highlight=False)
        return result


def _per_response(found: Tensor, mask: Tensor) -> Tensor:
    """``(R,)``: an advantage of each response, the mean over its tokens where they differ."""
    if found.ndim == 1:
        return found
    return found.sum(-1) / mask.sum(-1).cpu().clamp(min=1)


def group_advantages(rewards: Tensor, group_ids: Tensor, settings: AdvantageSettings) -> Tensor:
    """``(R,)`` float32 advantages by the configured estimator."""
    if settings.estimator == "rloo":
        values = advantages.rloo(rewards, group_ids)
    elif settings.estimator == "dr_grpo":
        values = advantages.dr_grpo(rewards, group_ids)
    else:
        values = advantages.grpo(rewards, group_ids, std=settings.std, epsilon=settings.epsilon, ddof=settings.ddof)
    return values.float()


def _about(run: RunConfig, accelerator: Accelerator, processes: int, providers: Providers) -> dict[str, Any]:
    return {
        "run_hash": run_hash(run),
        "objective_hash": objective_hash(run.composition),
        "command": " ".join(sys.argv),
        "rlstab": rlstab.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
        "device": str(accelerator.device),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "providers": providers.in_words(),
    }
