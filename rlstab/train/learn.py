"""Learning from a rollout: advantages, then optimizer steps that are planned over all micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor
from transformers import get_scheduler

import rlstab
from rlstab.config.runs import RunConfig
from rlstab.config.settings import OptimisationSettings
from rlstab.core.batch import TokenBatch, layout_of
from rlstab.core.comm import Comm
from rlstab.core.devices import counting_device, on_cpu, sent
from rlstab.core.plan import Plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.random import uniform
from rlstab.core.stats import Mean
from rlstab.core.step import OptimizerStep
from rlstab.errors import ConfigError, MethodError
from rlstab.models.policy import Policy, Sequences
from rlstab.models.shared_prompts import SharedPrompts, worthwhile
from rlstab.record.effects import what_methods_did
from rlstab.record.writer import Recorder, settings_of, tensors_of, with_replies
from rlstab.signals import SIGNAL_NAMES
from rlstab.signals.divergence import Source
from rlstab.train.engine import Engine
from rlstab.train.generate import advance, checked_output, count_nonfinite
from rlstab.train.reference_and_teacher import Lessons
from rlstab.train.rollout import Progress, Rollout
from rlstab.train.tracking import Metrics

#: Signals that an estimator reads from the learner, not from the sampler, which may be older.
FRESH = frozenset({"logprobs", "sum_p_sq"})


class Learner:
    """Estimates advantages and makes optimizer steps.

    Args:
        engine: holds the policy and its optimizer.
        run: the configuration.
        comm: over all ranks.
        main: whether this process logs the metrics that are equal on all ranks.
        lessons: see :data:`rlstab.train.reference_and_teacher.Lessons`.

    Attributes:
        recorder: records optimizer steps for ``rlstab look``; None if none are recorded.
    """

    def __init__(
        self, engine: Engine, run: RunConfig, comm: Comm, *, main: bool, lessons: Lessons = nullcontext
    ) -> None:
        self.engine, self.run, self.comm, self.main, self.lessons = engine, run, comm, main, lessons
        self.objective, self.settings, self.temperature = run.composition, run.optimisation, run.rollout.temperature
        self.recorder: Recorder | None = None
        self._learning_rate = learning_rate(self.settings)

    # -- advantages --------------------------------------------------------------------------------------------------

    def _estimated(self, rollout: Rollout, progress: Progress, metrics: Metrics) -> tuple[Rollout, Progress]:
        """The rollout with its advantages, and the progress with the next state of the estimator.

        Raises:
            MethodError: the estimator returned something other than advantages.
        """
        stage, state = self.run.pipeline.estimator, progress.stages[self.run.pipeline.estimator.name]
        with metrics.phase("estimate"), self.engine.gathered_policy() as policy:
            # what the rollout lacks, or has only from an older policy
            fresh, evidence, size = stage.needs & FRESH, dict[str, Tensor](), self.settings.micro_batch_size
            if fresh:
                values_of = policy.evidence(rollout.sequences, fresh, size, temperature=self.temperature)
                evidence |= {name: rollout.packed(values) for name, values in values_of.items()}
            for name in stage.needs - fresh - rollout.responses.extra.keys():
                if name == "squared_gradient":
                    where = ~rollout.responses.even
                    evidence[name] = squared_gradients(policy, rollout.sequences, self.temperature, where)
                else:
                    evidence[name] = rollout.packed(rollout.signals[name])
            responses = rollout.responses.knowing(evidence)
            stat, after = advance(stage, responses, state, self.comm, metrics)
            raw = stage.advantages(responses, stat, state)
            raw = rollout.unpacked(raw) if isinstance(raw, Tensor) and raw.shape == rollout.response_mask.shape else raw
        shapes = [(len(rollout),), tuple(rollout.response_mask.shape)]
        advantages = checked_output(raw, f"'{stage.name}': advantages", shapes, MethodError).double().float()
        return replace(rollout, advantages=advantages), replace(progress, stages={**progress.stages, stage.name: after})

    # -- optimizer steps ---------------------------------------------------------------------------------------------

    def learn(self, rollout: Rollout, progress: Progress, metrics: Metrics) -> tuple[Progress, str]:
        """Make all optimizer steps of one rollout. A step with NaN or Inf is refused, counted, and changes nothing.

        Returns:
            the progress, and why the last of the refused steps was; empty if none was refused.
        """
        reason, nonfinite = "", count_nonfinite(rollout.rewards, self.comm)
        if nonfinite:
            steps = self.settings.optimizer_steps_per_rollout
            metrics.counts["optimizer_steps/refused"] += steps
            reason = f"{nonfinite} rewards are NaN or Inf. The rollout was refused. Let the scorer return a number."
            return replace(progress, optimizer_steps=progress.optimizer_steps + steps), reason
        rollout, progress = self._estimated(rollout, progress, metrics)
        # the denominator of the ratio: from one more forward, or from the sampler
        rollout = replace(rollout, signals={**rollout.signals, "logprobs": rollout.signals["rollout_logprobs"]})
        if self.settings.old_logprobs == "recompute":
            all_rows = torch.arange(len(rollout))
            with metrics.phase("recompute"):
                rollout = self._refreshed(rollout, all_rows)
            _compare_sampler(rollout, all_rows, metrics)
        rollout = replace(rollout, signals={**rollout.signals, "old_logprobs": rollout.signals["logprobs"]})
        with metrics.phase("train"):
            for first, rows in self._mini_batches(rollout.group_ids):
                progress = replace(progress, optimizer_steps=progress.optimizer_steps + 1)
                step = self._optimizer_step(rollout, rows, progress, metrics, first=first)
                progress = replace(progress, objective=step.state)
                if step.refusal is not None:
                    self.engine.zero_grad()
                    metrics.counts["optimizer_steps/refused"] += 1
                    reason = step.refusal
                elif not step.moves_weights:
                    metrics.counts["optimizer_steps/skipped"] += 1
        return progress, reason

    def _mini_batches(self, group_ids: Tensor) -> Iterator[tuple[bool, Tensor]]:
        """For each optimizer step, whether it is the first of the rollout, and the rows of this rank in it.

        Groups stay whole and are ordered by random numbers of their ids, so that the ranks agree.
        """
        shuffles, groups = self.settings.mini_batches > 1, group_ids.unique()
        if shuffles:  # ranks exchange float64, which holds ids below 2**53 exactly
            groups = self.comm.gather(groups.double()).unique().long()
        for epoch in range(self.settings.epochs):
            drawn = uniform(self.run.seed + 1, groups, torch.tensor(epoch))
            order = groups[drawn.argsort()] if shuffles else groups
            for number, chosen in enumerate(order.tensor_split(self.settings.mini_batches)):
                yield epoch == number == 0, torch.isin(group_ids, chosen).nonzero().squeeze(-1)

    def _optimizer_step(
        self, rollout: Rollout, rows: Tensor, progress: Progress, metrics: Metrics, *, first: bool
    ) -> OptimizerStep:
        """Plan over all micro-batches, run a forward and a backward for each, clip, and update the weights."""
        settings, number = self.settings, progress.optimizer_steps
        # with the sampler's log-probs, once per rollout; live ones exist only for tokens that the loss reads
        compared = first and settings.old_logprobs != "recompute"
        if settings.refresh == "step":
            rollout = self._refreshed(rollout, rows)
            if compared:
                _compare_sampler(rollout, rows, metrics)
            compared = False
        rows = forward_order(rollout, rows, settings.micro_batch_size)
        cuts = [cut for cut in rows.split(settings.micro_batch_size) if len(cut)]
        home, live_ratio = counting_device(self.engine.policy.device), settings.old_logprobs == "live"
        pairs = [rollout.token_batch(cut, live_ratio=live_ratio) for cut in cuts]
        evidence = [(sequences, batch.to(home)) for sequences, batch in pairs]
        step = OptimizerStep(self.objective, progress.objective, self.comm)
        step.make_plan([batch for _, batch in evidence], settings.scope)
        if step.plan is None or not step.moves_weights:
            return step

        # read before the first forward: a later read would wait for the kernels of a whole micro-batch
        micro_batches = [_MicroBatch.of(step.plan, batch, sequences, self.engine) for sequences, batch in evidence]
        recorder = self.recorder if self.recorder is not None and self.recorder.wants(number) else None
        with self.lessons() as teacher:
            reached, gaps = self._backward(step, micro_batches, rollout, recorder, teacher, compared=compared)
        step.finish(self.engine.clip(settings.max_grad_norm))
        if step.refusal is not None:
            return step
        learning_rate = self._learning_rate(number) * step.plan.lr_scale
        if recorder is not None:
            recorder.write(
                "rlstab",
                settings_of(self.objective, progress.objective, settings.scope),
                # a rollout waits in the queue while earlier ones are learnt
                version=max(0, progress.rollouts - self.run.rollout.staleness) * settings.optimizer_steps_per_rollout,
                host=f"rlstab {rlstab.__version__}",
                step=number,
                rank=self.engine.accelerator.process_index,
                ranks=self.engine.processes,
                first=first and settings.old_logprobs == "recompute",
                learning_rate=learning_rate,
                temperature=self.temperature,
                top_p=self.run.rollout.top_p,
                top_k=self.run.rollout.top_k,
                logprobs_mode="processed_logprobs",
            )
        self.engine.step(learning_rate)
        for report in step.reports:
            metrics.means.add(report)
        _report_gaps(gaps, "_live", metrics)
        metrics.mean("head/live_fraction", reached, step.plan.everything.tokens if self.main else 0)
        if self.main:
            metrics.mean("loss", step.total_loss, 1)
            metrics.mean("gradient/norm", step.norm, 1)
            metrics.mean("lr", learning_rate, 1)
            metrics.mean("tokens/live", step.plan.live_tokens, step.plan.everything.tokens)
        metrics.highest("gradient/largest_norm", step.norm)
        return step

    def _refreshed(self, rollout: Rollout, rows: Tensor) -> Rollout:
        """The rollout, with evidence from the current policy on some rows."""
        needs = {"logprobs", "entropies"} | (self.objective.needs & SIGNAL_NAMES)
        options, size, sequences = self.objective.signal_options, self.settings.micro_batch_size, rollout.sequences
        with self.engine.gathered_policy() as policy:
            fresh = policy.evidence(sequences, needs, size, rows=rows, temperature=self.temperature, options=options)
        signals = {name: rollout.signals[name].index_copy(0, rows, values[rows]) for name, values in fresh.items()}
        return replace(rollout, signals={**rollout.signals, **signals})

    def _backward(
        self,
        step: OptimizerStep,
        micro_batches: Sequence[_MicroBatch],
        rollout: Rollout,
        recorder: Recorder | None,
        teacher: Callable[[Sequences, Tensor], Source] | None,
        *,
        compared: bool,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run a forward and a backward for each micro-batch.

        Returns:
            how many tokens of this process a gradient reached, and, if they are ``compared``, the gaps between the
            sampler's and the live log-probs. Both stay on the device until the step is done, since a read would wait.
        """
        home = counting_device(self.engine.policy.device)
        reached, gaps = torch.zeros((), dtype=torch.int64, device=home), list[Tensor]()
        if recorder is not None:
            recorder.begin()
        for micro_batch in self.engine.micro_batches(micro_batches):
            if micro_batch is None:
                self.engine.backward(None)
                continue
            batch, live = micro_batch.batch, self._live(micro_batch, teacher)
            outputs = [output for output in live.present() if output.requires_grad]
            for output in outputs:
                output.retain_grad()
            loss = step.loss(batch, live).loss
            if recorder is not None and step.plan is not None:
                sequences, scale = micro_batch.sequences, self.engine.loss_scale
                tensors = tensors_of(batch, live, sequences.response_ids, support=sequences.support)
                tensors |= what_methods_did(step.plan, batch, live)
                tensors, index = with_replies(tensors, sequences.response_ids, sequences.response_mask)
                tensors["prompt_ids"] = sequences.prompt_ids[sequences.prompt_mask]
                tensors["prompt_lengths"] = sequences.prompt_mask.sum(1)
                row = (batch.here.sequence_ids[:, None] == rollout.sequence_ids).nonzero()[:, 1]
                tensors["rewards"] = rollout.rewards[row].float()
                recorder.add(tensors, loss * scale, live.logprobs, self.engine.processes / scale, index)
            self.engine.backward(loss if outputs else None)
            # an output that no term differentiates has no gradient
            gradients = [output.grad != 0 for output in outputs if output.grad is not None]
            if gradients:
                reached += torch.stack(gradients).any(0).count_nonzero()
            if compared and batch.rollout_logprobs is not None and outputs:
                comparable = live if live.log_support_mass is None else live.over_support()
                gap = comparable.logprobs.detach() - batch.rollout_logprobs
                gaps.append(gap.index_select(0, sent(micro_batch.index, home)).abs())
        return reached, gaps

    def _live(self, micro_batch: _MicroBatch, teacher: Callable[[Sequences, Tensor], Source] | None) -> PolicyOutputs:
        """The live outputs of a micro-batch, from one forward over the sequences that need one.

        On tokens that the loss does not read, log-probs are those of the evidence, and other outputs are zeros.
        """
        where, evidence = micro_batch.where, micro_batch.batch.logprobs
        filler = {name: torch.zeros_like(evidence) for name in where} | {"logprobs": evidence}
        if micro_batch.needed is None:
            return PolicyOutputs(**filler)
        needed, index_in_needed = micro_batch.needed, micro_batch.index_in_needed
        signals = self.engine.forward(
            needed,
            index_in_needed,
            temperature=self.temperature,
            needs=where.keys(),
            options=self.objective.signal_options,
            rows={name: tokens[micro_batch.index] for name, tokens in where.items() if name != "logprobs"},
            shared=micro_batch.shared,
            teacher=None if teacher is None else teacher(needed, index_in_needed),
        )
        index = sent(micro_batch.index, evidence.device)
        live = {name: getattr(signals, name).to(index.device) for name in filler}
        return PolicyOutputs(**{name: values.index_copy(0, index, live[name]) for name, values in filler.items()})


@dataclass(frozen=True)
class _MicroBatch:
    """A micro-batch, the live outputs that the loss reads, and what a forward has to cover to make them.

    Attributes:
        batch, sequences: the whole micro-batch; everything else is on the CPU.
        where: ``(n,)`` bool by live output, True on the tokens on which the loss reads it.
        index: ``(m,)`` int64, the tokens on which the loss reads any live output.
        needed: the sequences with such a token, cut after the last of these tokens; None if there is none.
        index_in_needed: ``(m,)`` int64, the same tokens in the flattened responses of ``needed``.
        shared: the prompts that the sequences of ``needed`` share.
    """

    batch: TokenBatch
    sequences: Sequences
    where: Mapping[str, Tensor]
    index: Tensor
    needed: Sequences | None
    index_in_needed: Tensor
    shared: SharedPrompts | None = None

    @classmethod
    def of(cls, plan: Plan, batch: TokenBatch, sequences: Sequences, engine: Engine) -> _MicroBatch:
        """Find out what the plan reads of a micro-batch."""
        where = plan.part(batch).live_here or plan.live_rows(batch)
        needed_rows = torch.stack(list(where.values())).any(0)
        index = needed_rows.nonzero().squeeze(-1)
        if not index.numel():
            return cls(batch, sequences, where, index, None, index)
        chosen, row = batch.here.sequence[index].unique(return_inverse=True)
        column = layout_of(batch.here).index[index] % sequences.response_ids.shape[1]
        needed = sequences.rows(chosen).cut(int(column.max()) + 1)
        index_in_needed = row * needed.response_ids.shape[1] + column
        return cls(batch, sequences, where, index, needed, index_in_needed, engine.shared_prompts(needed))


def _compare_sampler(rollout: Rollout, rows: Tensor, metrics: Metrics) -> None:
    """Report the gap between the log-probs of sampler and trainer on all tokens of some rows."""
    gap = (rollout.signals["logprobs"] - rollout.signals["rollout_logprobs"])[rows]
    _report_gaps([gap[rollout.response_mask[rows]].abs()], "", metrics)


def _report_gaps(gaps: Sequence[Tensor], suffix: str, metrics: Metrics) -> None:
    # where evidence is not finite, its optimizer step is refused; the metrics must not become NaN
    finite = on_cpu([gap.isfinite().all() for gap in gaps])
    for gap in (gap for gap, good in zip(gaps, finite, strict=True) if gap.numel() and good):
        metrics.means.add({f"sampler/gap{suffix}": Mean.of(gap)})
        metrics.highest(f"sampler/largest_gap{suffix}", gap.amax())


# -- the order of micro-batches --------------------------------------------------------------------------------------


def forward_order(rollout: Rollout, rows: Tensor, size: int) -> Tensor:
    """``rows`` in the order that forwards the fewest tokens when it is cut into micro-batches.

    Rows whose advantages are 0 come last, as they often need no forward. The others, and these, are ordered by length,
    which saves padding, or by group, which shares prompts: whichever takes fewer tokens.

    Args:
        rollout: the rollout with its advantages.
        rows: ``(n,)`` int64, the rows of this optimizer step.
        size: rows in a micro-batch.
    """
    assert rollout.advantages is not None
    masks = rollout.sequences.prompt_mask, rollout.sequences.context
    prompt, response = torch.stack([mask.sum(-1) for mask in masks])[:, rows]
    idle = rollout.advantages[rows] == 0
    if idle.ndim == 2:
        idle = (idle | ~rollout.response_mask[rows]).all(-1)
    group = rollout.group_ids[rows].unique(return_inverse=True)[1]
    length = prompt + response
    longest = length.new_zeros(len(rows)).scatter_reduce(0, group, length, "amax")[group]
    by_length = torch.from_numpy(np.lexsort([-length, idle]))
    if len(rows) <= size:  # one micro-batch, whatever the order
        return rows[by_length]
    by_group = torch.from_numpy(np.lexsort([-length, group, -longest, idle]))  # by the last key first
    return rows[
        min((by_length, by_group), key=lambda order: _tokens(prompt[order], response[order], group[order], size))
    ]


def _tokens(prompt: Tensor, response: Tensor, group: Tensor, size: int) -> int:
    """Tokens of all micro-batches, padding included, if groups share their prompts where that saves time."""
    total = 0
    for p, r, g in zip(prompt.split(size), response.split(size), group.split(size), strict=True):
        width, length, prompts = int(p.max()), int(r.max()), len(g.unique())
        shared = prompts if worthwhile(len(p), prompts, width, length) else len(p)
        total += shared * width + len(p) * length
    return total


# -- evidence and rates ----------------------------------------------------------------------------------------------


def squared_gradients(policy: Policy, sequences: Sequences, temperature: float, where: Tensor) -> Tensor:
    """Squared norm, over all trainable weights, of the gradient of each response's log-prob, the sum over its tokens.

    Each response takes its own forward and backward: a backward over several gives the sum of their gradients,
    from which their norms cannot be recovered. ``.grad`` stays as it is. Weights must be whole, not sharded.

    Args:
        policy: holds the weights; those that do not require a gradient do not count.
        sequences: ``S`` prompts and responses.
        temperature: the temperature of the log-probs.
        where: ``(S,)`` bool, the responses to measure. In groups with equal rewards the advantage is 0
            under any baseline, so the norm is not needed.

    Returns:
        ``(S,)`` float64 on the CPU; 0 for a response without tokens, and for one that is not measured.
    """
    weights = [weight for weight in policy.model.parameters() if weight.requires_grad]
    squares = torch.zeros(len(sequences.response_ids), dtype=torch.float64)
    for row in where.nonzero().squeeze(-1).tolist():
        response = sequences.rows(torch.tensor([row]))
        index = response.response_mask.reshape(-1).nonzero().squeeze(-1)
        if not weights or not len(index):
            continue
        with torch.enable_grad():
            signals = policy.signals(response, index, temperature=temperature, needs={"logprobs"})
            assert signals.logprobs is not None
            gradients = torch.autograd.grad(signals.logprobs.sum(), weights, allow_unused=True)
        norms = [
            torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients if gradient is not None
        ]
        squares[row] = torch.stack(norms).square().sum().cpu()
    return squares


def learning_rate(settings: OptimisationSettings) -> Callable[[int], float]:
    """The learning rate as a function of only the number of the optimizer step, from 1; a checkpoint has that number.

    Without a schedule it is constant, after a linear warm-up whose first step has ``lr / warmup_optimizer_steps``. A
    schedule gives the first step the rate that transformers' trainer gives it, which is 0 if there is a warm-up.

    Raises:
        ConfigError: transformers refuses the settings.
    """
    lr, ramp = settings.lr, settings.warmup_optimizer_steps
    if settings.schedule is None:
        return lambda step: lr * (min(1.0, step / ramp) if ramp else 1.0)
    options = settings.schedule.model_dump(exclude_none=True)
    name = options.pop("name")
    dummy, steps = torch.optim.SGD([torch.zeros(1)], lr=lr), settings.optimizer_steps
    try:
        scheduler = get_scheduler(name, dummy, ramp, steps, scheduler_specific_kwargs=options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"optimisation.schedule: {error}. Change it, or optimisation.lr.") from error
    assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
    (factor,) = scheduler.lr_lambdas
    return cache(lambda step: lr * float(factor(step - 1)))
