"""The loop: sample, score, learn, evaluate, save; and continue after a kill as if nothing had happened."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import yaml
from accelerate import Accelerator
from rich.console import Console
from rich.markup import escape
from torch import Tensor

import rlstab
from rlstab.config.objectives import objective_hash
from rlstab.config.renamed import old_settings
from rlstab.config.runs import AdvantageSettings, RunConfig, dump_run, run_hash
from rlstab.console import Terminal
from rlstab.core.comm import Comm, LocalComm, TorchComm
from rlstab.core.objective import require_signals
from rlstab.errors import CheckpointError, ConfigError, NonFinite
from rlstab.signals import SIGNAL_NAMES, TRAINER_SIGNALS
from rlstab.stages import advantages
from rlstab.tasks import Example, Task
from rlstab.tasks.from_settings import build_task
from rlstab.trace.writer import Tracer
from rlstab.train import checkpoint
from rlstab.train.decoding import require_decoding
from rlstab.train.evaluate import Share, evaluate
from rlstab.train.metrics import Metrics
from rlstab.train.picture import draw
from rlstab.train.policy import Sequences, load_policy
from rlstab.train.processes import TIMEOUT, count, launched_alone, meet, saying_which
from rlstab.train.progress import Progress, summary_table
from rlstab.train.providers import AdvantageProvider, Providers, Responses, SignalProvider
from rlstab.train.reward import Scores, score
from rlstab.train.rollout import grouped, sample
from rlstab.train.step import Experience, Learner, forward_signals
from rlstab.train.tracking import forget_after, read_metrics, start_trackers

#: So many refused optimizer steps in a row end a run: the weights do not recover by themselves.
MAX_REFUSED = 20

#: What a continued run may change.
MAY_CHANGE = {
    "tracking",
    "evaluation",
    "task.time_limit",
    "task.workers",
    "optimisation.rollouts",
    "optimisation.micro_batch_size",
    "rollout.batch_size",
}


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
        resume: continue from the newest checkpoint in ``tracking.out``; start where there is none.
        overwrite: remove a run that is already there.
        console: where to print; None prints on the terminal, and a progress bar only if it is one.
        signals: functions that make signals of your own, by the name that a method's ``needs`` has. Each takes the
            :class:`~rlstab.train.providers.Responses` of this rank and returns ``(R, T)`` floats. One that no method
            needs is not called, nor is any on a rank without responses: ranks must not wait for one another in it.
        advantages: the same for advantages, ``(R,)`` or ``(R, T)``, in place of the configured estimator.
        timeout: how long a process waits for another that is alive and silent, until it ends with an error.

    Raises:
        ConfigError: ``tracking.out`` holds another run, or processes are missing.
        MissingSignal: the objective reads a signal that this trainer does not provide.
        ModelError, DataError: the model or the data cannot be used.
        CheckpointError: the checkpoint is damaged or of another run.
        NonFinite: 20 optimizer steps in a row were refused, or a function of yours returned NaN or Inf.
        ShapeError: a function of yours returned another shape.
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
    with saying_which(accelerator):
        latest = _prepare_folder(run, out, accelerator, providers, resume=resume, overwrite=overwrite)
        processes = count(run_hash(run), latest.name if latest else "the start")
        alone = launched_alone(processes, os.environ)
        if alone is not None:
            console.print(f"[yellow]one process:[/] {escape(alone)}", highlight=False)
        about = _about(run, accelerator, processes, providers)
        return _Loop(run, accelerator, out, latest, console, providers).go(about)


class _Loop:
    def __init__(
        self,
        run: RunConfig,
        accelerator: Accelerator,
        out: Path,
        latest: Path | None,
        console: Console,
        providers: Providers,
    ) -> None:
        self.run, self.accelerator, self.out, self.console = run, accelerator, out, console
        self.providers = providers
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
        self.done = 0
        self.recorded = -1  # the last rollout whose records stay; without a checkpoint not even those of rollout 0
        if latest is not None:
            restored = checkpoint.load(
                latest, policy, self.learner.optimizer, objective=objective_hash(run.composition)
            )
            self.learner.state = restored.state
            self.learner.optimizer_steps = restored.optimizer_steps
            self.done = self.recorded = restored.rollout
        self.refused = 0
        # one worker: a task's generator and scorer are foreign code and need not be safe for several threads
        self.beside, self._leaving = ThreadPoolExecutor(1), threading.Event()
        self._next: tuple[int, Future[tuple[list[int], list[Example]]]] | None = None
        self.tracer = None
        if run.tracking.trace_every and accelerator.is_main_process:
            self.tracer = Tracer(out / "tokens.jsonl", run.tracking, run.optimisation.rollouts, policy.decode)
        self.learner.tracer = self.tracer

    def go(self, about: Mapping[str, Any]) -> RunResult:
        run, main = self.run, self.accelerator.is_main_process
        if main:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / "config.yaml").write_text(dump_run(run))
            (self.out / "run.json").write_text(json.dumps(about, indent=1))
            forget_after(self.out / "samples.jsonl", self.recorded)
            forget_after(self.out / "tokens.jsonl", self.recorded)
        start_trackers(self.accelerator, run, self.out, self.recorded)
        try:
            self._rollouts()
        finally:
            self._leaving.set()
            self.beside.shutdown(cancel_futures=True)
            for tracker in self.accelerator.trackers:  # end_training() would end the process group as well
                tracker.finish()
        return self._finish()

    def _rollouts(self) -> None:
        run, main = self.run, self.accelerator.is_main_process
        every = run.evaluation.every
        if self.done == 0 and every:
            self.accelerator.log(self._evaluate(), step=0)
        with Progress(self.console, run.optimisation.rollouts, self.done, shown=main) as progress:
            for rollout in range(self.done + 1, run.optimisation.rollouts + 1):
                values = self._rollout(rollout - 1)
                last = rollout == run.optimisation.rollouts
                if every and (rollout % every == 0 or last):
                    values |= self._evaluate()
                self.accelerator.log(values, step=rollout)
                progress.show(rollout, values)
                saving = run.tracking.checkpoint_every
                if last or (saving and rollout % saving == 0):
                    self._save(rollout)

    def _rollout(self, number: int) -> dict[str, float]:
        """Sample, score and learn once; ``number`` counts from 0 and fixes all randomness."""
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
        if self.accelerator.is_main_process:
            self._write_samples(number + 1, examples, sampled.texts, scores)
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
            kept = checkpoint.checkpoints(self.out / "checkpoints")
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

    def _write_samples(self, rollout: int, examples: list[Example], texts: list[str], scores: Scores) -> None:
        group, most = self.run.rollout.group, self.run.tracking.samples
        written = sorted({*range(min(most, len(texts))), *(scores.timed_out if most else ())})
        with (self.out / "samples.jsonl").open("a", encoding="utf-8") as file:
            for place in written:
                line = {
                    "rollout": rollout,
                    "prompt": examples[place // group].prompt,
                    "text": texts[place],
                    "reward": float(scores.rewards[place]),
                }
                if place in scores.timed_out:
                    line["timed_out"] = True
                file.write(json.dumps(line) + "\n")

    def _save(self, rollout: int) -> None:
        if self.accelerator.is_main_process:
            kept = checkpoint.Checkpoint(
                rollout, self.learner.optimizer_steps, self.learner.state, objective_hash(self.run.composition)
            )
            checkpoint.save(
                self.out / "checkpoints",
                kept,
                self.policy,
                self.learner.optimizer,
                keep=self.run.tracking.keep_checkpoints,
            )
        self.accelerator.wait_for_everyone()

    def _finish(self) -> RunResult:
        self.accelerator.wait_for_everyone()  # the first process may still be writing
        result = RunResult(self.out, read_metrics(self.out / "metrics.jsonl"))
        if self.accelerator.is_main_process:
            draw(result.records, self.out / "curves.png", f"{self.out.name}: {', '.join(self.run.composition.keyed)}")
            self.console.print(summary_table(result.records))
            for what, path in (("run", self.out), ("picture", self.out / "curves.png")):
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


def _prepare_folder(
    run: RunConfig, out: Path, accelerator: Accelerator, providers: Providers, *, resume: bool, overwrite: bool
) -> Path | None:
    """The checkpoint to continue from; the folder is free for this run once all processes were here."""
    before = out / "config.yaml"
    if not before.exists():
        return None
    if resume:
        started = yaml.safe_load(before.read_text())
        _same_names(started, before)
        _same_run(started, run.model_dump(mode="json"), out)
        found = checkpoint.checkpoints(out / "checkpoints")
        if found:
            _same_providers(out, providers)
        return found[-1] if found else None
    if not overwrite:
        raise ConfigError(
            f"{out} already holds a run. Continue it with --resume, replace it with --overwrite, or set another "
            f"tracking.out."
        )
    if accelerator.is_main_process:
        shutil.rmtree(out)
    return None


def _same_names(started: Any, path: Path) -> None:
    found = dict(old_settings(started))
    if found:
        names = ", ".join(f"{old} is called '{now}' now" for old, now in found.items())
        cure = "Use the new names there to continue the run."
        if any(old.startswith("objective.") for old in found):  # its checkpoints bear the hash of the old names
            cure = "Continue the run with the version of rlstab that wrote it, or start over in another tracking.out."
        raise CheckpointError(f"{path} was written under older names: {names}. {cure}")


def _same_run(before: Any, now: Any, out: Path, place: str = "") -> None:
    if place in MAY_CHANGE:
        return
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted(before.keys() | now.keys()):
            _same_run(before.get(key), now.get(key), out, f"{place}.{key}" if place else key)
    elif before != now:
        raise CheckpointError(
            f"{out} was started with {place} = {before!r}, the configuration says {now!r}. A run continues as it "
            f"began. Resume with {out / 'config.yaml'}, or start over in another tracking.out."
        )


def _same_providers(out: Path, providers: Providers) -> None:
    """A run that began with functions of the user's own continues with functions of the same names."""
    path = out / "run.json"
    before = json.loads(path.read_text()).get("providers") if path.exists() else None
    if before is not None and before != providers.in_words():
        raise CheckpointError(
            f"{out} was started with the providers {before}, this call has {providers.in_words()}. A run continues as "
            f"it began. Pass the same signals and advantages to train, or start over in another tracking.out."
        )


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
