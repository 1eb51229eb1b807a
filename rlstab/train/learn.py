"""Learning from a rollout: advantages, then optimizer steps whose statistics and denominators span all micro-batches
and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager
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
from rlstab.core.objective import State
from rlstab.core.plan import Plan, make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.random import uniform
from rlstab.core.stats import Mean
from rlstab.errors import ConfigError, MethodError, NonFinite
from rlstab.models.policy import Policy, Sequences
from rlstab.models.shared_prompts import SharedPrompts, worthwhile
from rlstab.record.effects import what_methods_did
from rlstab.record.writer import Recorder, settings_of, tensors_of
from rlstab.signals import SIGNAL_NAMES
from rlstab.train.engine import Engine
from rlstab.train.generate import AdvantageProvider, advance, checked_output, provided
from rlstab.train.rollout import Progress, Rollout
from rlstab.train.tracking import Metrics

#: Signals that an estimator means of the policy that learns, and not of the sampler, which may be older.
FRESH = frozenset({"logprobs", "sum_p_sq"})


@dataclass(frozen=True)
class Refusals:
    """Optimizer steps of a rollout that were refused over NaN or Inf, and why the last of them was."""

    steps: int = 0
    why: str = ""


class Learner:
    """Estimates advantages and makes optimizer steps.

    Args:
        engine: holds the policy and its optimizer.
        run: the configuration.
        comm: over all ranks.
        main: whether this process logs what is the same on all.
        provider: makes advantages in place of the configured estimator; None for that.

    Attributes:
        recorder: records optimizer steps for ``rlstab view`` and ``rlstab replay``, None where none are recorded.
    """

    def __init__(
        self, engine: Engine, run: RunConfig, comm: Comm, *, main: bool, provider: AdvantageProvider | None = None
    ) -> None:
        self.engine, self.run, self.comm, self.main, self.provider = engine, run, comm, main, provider
        self.objective, self.settings, self.temperature = run.composition, run.optimisation, run.rollout.temperature
        self.recorder: Recorder | None = None
        self._learning_rate = learning_rate(self.settings)

    # -- advantages --------------------------------------------------------------------------------------------------

    def estimate(self, rollout: Rollout, progress: Progress, metrics: Metrics) -> tuple[Rollout, Progress]:
        """The rollout with its advantages, and the progress with the next state of the estimator.

        Raises:
            MethodError, ShapeError, NonFinite: the estimator or the provider returned something else.
        """
        if self.provider is not None:
            values = provided(self.provider, "advantages", rollout, per_token=False)
            return replace(rollout, advantages=values.float().cpu()), progress
        stage, state = self.run.pipeline.estimator, progress.stages[self.run.pipeline.estimator.name]
        with metrics.phase("estimate"), self.engine.gathered_policy() as policy:
            responses = rollout.responses.knowing(self._evidence_for(stage.needs, rollout, policy))
            stat, after = advance(stage, responses, state, self.comm, metrics)
            raw = stage.advantages(responses, stat, state)
        shapes = [(len(rollout),), tuple(rollout.response_mask.shape)]
        advantages = checked_output(raw, f"'{stage.name}': advantages", shapes, MethodError).double().float()
        return replace(rollout, advantages=advantages), replace(progress, stages={**progress.stages, stage.name: after})

    def _evidence_for(self, needs: Set[str], rollout: Rollout, policy: Policy) -> dict[str, Tensor]:
        """What the estimator reads and the rollout has not, or has of an older policy."""
        fresh, evidence, size = needs & FRESH, {}, self.settings.micro_batch_size
        if fresh:
            evidence = policy.evidence(rollout.sequences, fresh, size, temperature=self.temperature)
        for name in needs - fresh - rollout.responses.extra.keys():
            if name == "squared_gradient":
                unequal = ~rollout.responses.even
                evidence[name] = squared_gradients(policy, rollout.sequences, self.temperature, unequal)
            else:
                evidence[name] = rollout.signals[name]
        return {name: values.cpu() for name, values in evidence.items()}

    # -- optimizer steps ---------------------------------------------------------------------------------------------

    def learn(self, rollout: Rollout, progress: Progress, metrics: Metrics) -> tuple[Progress, Refusals]:
        """All optimizer steps of one rollout. A step with NaN or Inf is refused and counted, and changes nothing."""
        refused = Refusals()
        if rollout.refused:
            steps = self.settings.optimizer_steps_per_rollout
            metrics.count("optimizer_steps/refused", steps)
            why = f"{rollout.refused} rewards are NaN or Inf. The rollout was refused. Let the scorer return a number."
            return replace(progress, optimizer_steps=progress.optimizer_steps + steps), Refusals(steps, why)
        rollout = self._with_old_logprobs(rollout, metrics)
        with metrics.phase("train"):
            for first, rows in self._mini_batches(rollout.group_ids):
                progress = replace(progress, optimizer_steps=progress.optimizer_steps + 1)
                try:
                    state = self._optimizer_step(rollout, rows, progress, metrics, first=first)
                    progress = replace(progress, objective=state)
                except NonFinite as error:
                    self.engine.zero_grad()
                    metrics.count("optimizer_steps/refused")
                    refused = Refusals(refused.steps + 1, str(error))
        return progress, refused

    def _with_old_logprobs(self, rollout: Rollout, metrics: Metrics) -> Rollout:
        """With the denominator of the ratio: by one more forward, or as the sampler gave it."""
        signals = dict(rollout.signals)
        if self.settings.old_logprobs == "recompute":
            everything = torch.arange(len(rollout))
            with metrics.phase("recompute"):
                fresh = self._evidence(rollout, everything)
            signals |= {**fresh, "old_logprobs": fresh["logprobs"]}
            _compare_sampler(rollout, signals, everything, metrics)
        else:
            signals |= {"old_logprobs": signals["rollout_logprobs"], "logprobs": signals["rollout_logprobs"]}
        return replace(rollout, signals=signals)

    def _mini_batches(self, group_ids: Tensor) -> Iterator[tuple[bool, Tensor]]:
        """For each optimizer step: whether it is the first of the rollout, and the rows of this rank in it.

        Whole groups are dealt out, by the number that each group's id draws, so the ranks agree.
        """
        several, groups = self.settings.mini_batches > 1, group_ids.unique()
        if several:  # those of all ranks, which exchange float64: it holds ids below 2**53 exactly
            groups = self.comm.gather(groups.double()).unique().long()
        for epoch in range(self.settings.epochs):
            drawn = uniform(self.run.seed + 1, groups, torch.tensor(epoch))
            order = groups[drawn.argsort()] if several else groups
            for number, chosen in enumerate(order.tensor_split(self.settings.mini_batches)):
                yield epoch == number == 0, torch.isin(group_ids, chosen).nonzero().squeeze(-1)

    def _optimizer_step(
        self, rollout: Rollout, rows: Tensor, progress: Progress, metrics: Metrics, *, first: bool
    ) -> State:
        """Plan over all micro-batches, one forward and backward for each, clip, step: the objective's next state."""
        settings, comparing = self.settings, first and self.settings.old_logprobs != "recompute"
        if settings.refresh == "step":
            fresh = self._evidence(rollout, rows)
            signals = {name: values.clone() for name, values in rollout.signals.items()}
            for name, values in fresh.items():
                signals[name][rows] = values[rows]
            rollout = replace(rollout, signals=signals)
            if comparing:
                _compare_sampler(rollout, signals, rows, metrics)
                comparing = False  # of all tokens, not only of the live ones below

        rows = forward_order(rollout, rows, settings.micro_batch_size)
        cuts = [cut for cut in rows.split(settings.micro_batch_size) if len(cut)]
        micro_batches = [rollout.token_batch(cut, live_ratio=settings.old_logprobs == "live") for cut in cuts]
        batches = [batch for _, batch in micro_batches]
        plan = make_plan(self.objective, batches, progress.objective, self.comm, scope=settings.scope)
        if plan.has_no_gradient:
            metrics.count("optimizer_steps/skipped")
            return plan.state

        # all sizes are read before the first forward: later each read would wait for the kernels of a whole part
        parts = [_Part.of(plan, batch, sequences, self.engine) for sequences, batch in micro_batches]
        tally, step = _Tally(self.engine.policy.device), progress.optimizer_steps
        recorder = self.recorder if self.recorder is not None and self.recorder.wants(step) else None
        if recorder is not None:
            recorder.begin()
        for part in self.engine.micro_batches(parts):
            if part is None:
                self.engine.backward(None)
                continue
            live = self._live(part)
            outputs = [output for output in live.present() if output.requires_grad]
            for output in outputs:
                output.retain_grad()
            out = plan.loss(part.batch, live)
            if recorder is not None:
                self._record(recorder, rollout, plan, part, live, out.loss)
            self.engine.backward(out.loss if outputs else None)
            tally.add(out.loss.detach(), out.nonfinite, out.report, outputs)
            if comparing and settings.refresh == "rollout" and part.batch.rollout_logprobs is not None and outputs:
                tally.gaps.append((live.logprobs.detach() - part.batch.rollout_logprobs)[part.place].abs())

        loss, bad, live_rows = self.comm.sum(tally.sums().cpu()).tolist()
        norm = self.engine.clip(settings.max_grad_norm)
        if bad or not math.isfinite(norm):
            raise NonFinite(
                f"{int(bad)} live values of the policy, or of gates, are NaN or Inf, the gradient norm is {norm}."
            )
        lr = self._learning_rate(step) * plan.lr_scale
        if recorder is not None:
            recorder.write(
                "rlstab",
                settings_of(self.objective, progress.objective, settings.scope),
                host=f"rlstab {rlstab.__version__}",
                step=step,
                rank=self.engine.accelerator.process_index,
                ranks=self.engine.processes,
                first=first and settings.old_logprobs == "recompute",
                learning_rate=lr,
                temperature=self.temperature,
            )
        self.engine.step(lr)
        for report in tally.reports:
            metrics.report(report)
        for gap in tally.gaps:
            _report_gap(gap, "_live", metrics)
        if self.main:
            metrics.mean("loss", loss, 1)
            metrics.mean("gradient/norm", norm, 1)
            metrics.mean("lr", lr, 1)
            metrics.mean("tokens/live", plan.live_tokens, plan.everything.tokens)
            metrics.mean("head/live_fraction", live_rows, plan.everything.tokens)
        metrics.highest("gradient/largest_norm", norm)
        return plan.state

    def _record(
        self, recorder: Recorder, rollout: Rollout, plan: Plan, part: _Part, live: PolicyOutputs, loss: Tensor
    ) -> None:
        sequences, ids, scale = part.sequences, part.batch.sequence_ids.cpu(), self.engine.loss_scale
        tensors = tensors_of(part.batch, live, sequences.response_ids) | what_methods_did(plan, part.batch, live)
        tensors["prompt_ids"] = sequences.prompt_ids[sequences.prompt_mask]
        tensors["prompt_lengths"] = sequences.prompt_mask.sum(1)
        tensors["rewards"] = rollout.rewards[(ids[:, None] == rollout.sequence_ids).nonzero()[:, 1]].float()
        recorder.add(tensors, loss * scale, live.logprobs, self.engine.processes / scale)

    def _live(self, part: _Part) -> PolicyOutputs:
        """The live outputs of a micro-batch, by one forward over the sequences that need it.

        Elsewhere the outputs hold the evidence, which is what they would be, or zeros.
        """
        where, place, evidence = part.where, part.place, part.batch.logprobs
        filler = {name: torch.zeros_like(evidence) for name in where} | {"logprobs": evidence}
        if part.needed is None:
            return PolicyOutputs(**filler)
        signals = self.engine.forward(
            part.needed,
            part.index,
            temperature=self.temperature,
            needs=where.keys(),
            options=self.objective.signal_options,
            rows={name: tokens[place] for name, tokens in where.items() if name != "logprobs"},
            shared=part.shared,
        )
        return PolicyOutputs(
            **{name: values.index_copy(0, place, getattr(signals, name)) for name, values in filler.items()}
        )

    def _evidence(self, rollout: Rollout, rows: Tensor) -> dict[str, Tensor]:
        """``(R, T)`` signals by the trainer's own forward, on some rows."""
        needs = {"logprobs", "entropies"} | (set(self.objective.needs) & SIGNAL_NAMES)
        options, size = self.objective.signal_options, self.settings.micro_batch_size
        with self.engine.gathered_policy() as policy:
            return policy.evidence(
                rollout.sequences, needs, size, rows=rows, temperature=self.temperature, options=options
            )


@dataclass(frozen=True)
class _Part:
    """A micro-batch, which of its live outputs the loss reads, and the forward that makes them.

    Attributes:
        batch, sequences: all of it.
        where: ``(n,)`` bool by live output.
        wanted: ``(n,)`` bool, some output is read.
        place: ``(m,)`` int64, the tokens where that is so.
        needed: the sequences that have such a token, as far as the last of them; None where there is none.
        index: ``(m,)`` int64, the tokens in the flattened responses of these sequences.
        shared: prompts that these sequences share.
    """

    batch: TokenBatch
    sequences: Sequences
    where: Mapping[str, Tensor]
    wanted: Tensor
    place: Tensor
    needed: Sequences | None
    index: Tensor
    shared: SharedPrompts | None = None

    @classmethod
    def of(cls, plan: Plan, batch: TokenBatch, sequences: Sequences, engine: Engine) -> _Part:
        """What a plan needs of one of its parts; it synchronises with the device."""
        where = plan.live_rows(batch)
        wanted = torch.stack(list(where.values())).any(0)
        place = wanted.nonzero().squeeze(-1)
        if not place.numel():
            return cls(batch, sequences, where, wanted, place, None, place)
        chosen, row = batch.sequence[place].unique(return_inverse=True)
        column = layout_of(batch).index[place] % sequences.response_ids.shape[1]
        needed = sequences.rows(chosen).cut(int(column.max()) + 1)
        index = row * needed.response_ids.shape[1] + column
        return cls(batch, sequences, where, wanted, place, needed, index, engine.shared_prompts(needed))


class _Tally:
    """What is logged of an optimizer step; it stays on the device until that is done, for reading waits for kernels."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device)
        self.nonfinite, self.live = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.reports: list[Mapping[str, Mean]] = []  # a step that is refused reports nothing: it may hold NaN
        self.gaps: list[Tensor] = []

    def add(self, loss: Tensor, nonfinite: Tensor, report: Mapping[str, Mean], outputs: list[Tensor]) -> None:
        self.loss += loss
        self.nonfinite += nonfinite
        self.reports.append(report)
        # a live output that every term holds constant has no gradient
        reached = [output.grad != 0 for output in outputs if output.grad is not None]
        if reached:
            self.live += torch.stack(reached).any(0).count_nonzero()

    def sums(self) -> Tensor:
        """``(3,)`` float64: loss, values that are not finite, tokens that a gradient reached."""
        return torch.stack([self.loss.double(), self.nonfinite.double(), self.live.double()])


def _compare_sampler(rollout: Rollout, signals: Mapping[str, Tensor], rows: Tensor, metrics: Metrics) -> None:
    """Report the gap between sampler and trainer on every token of some rows."""
    gap = (signals["logprobs"] - signals["rollout_logprobs"])[rows]
    _report_gap(gap[rollout.response_mask[rows]].abs(), "", metrics)


def _report_gap(gap: Tensor, suffix: str, metrics: Metrics) -> None:
    # evidence that is not finite gets its optimizer step refused, and must not make the metrics NaN
    if gap.numel() and bool(gap.isfinite().all()):
        metrics.report({f"sampler/gap{suffix}": Mean.of(gap)})
        metrics.highest(f"sampler/largest_gap{suffix}", gap.amax())


# -- the order of micro-batches --------------------------------------------------------------------------------------


def forward_order(rollout: Rollout, rows: Tensor, size: int) -> Tensor:
    """``rows`` in the order that forwards the fewest tokens, if micro-batches of ``size`` are cut off it.

    Rows without an advantage come last, as they often need no forward. Within each kind, long rows stand with long
    rows, which saves padding, or groups stand together, which share a prompt. Which is better depends on the lengths.

    Args:
        rollout: with its advantages.
        rows: ``(n,)`` int64, those of this optimizer step.
        size: rows in a micro-batch.
    """
    assert rollout.advantages is not None
    masks = rollout.sequences.prompt_mask, rollout.sequences.response_mask
    prompt, response = torch.stack([mask.sum(-1) for mask in masks]).cpu()[:, rows]
    idle = rollout.advantages[rows] == 0
    if idle.ndim == 2:
        idle = (idle | ~rollout.response_mask.cpu()[rows]).all(-1)
    group = rollout.group_ids[rows].unique(return_inverse=True)[1]
    length = prompt + response
    longest = length.new_zeros(len(rows)).scatter_reduce(0, group, length, "amax")[group]
    by_length = torch.from_numpy(np.lexsort([-length, idle]))
    if len(rows) <= size:  # one micro-batch, whatever the order
        return rows[by_length]
    by_group = torch.from_numpy(np.lexsort([-length, group, -longest, idle]))  # by the last key first
    orders = sorted(
        (by_length, by_group), key=lambda order: _tokens(prompt[order], response[order], group[order], size)
    )
    return rows[orders[0]]


def _tokens(prompt: Tensor, response: Tensor, group: Tensor, size: int) -> int:
    """Tokens of all micro-batches with their padding, if groups share their prompts where it is worthwhile."""
    total = 0
    for p, r, g in zip(prompt.split(size), response.split(size), group.split(size), strict=True):
        width, length, prompts = int(p.max()), int(r.max()), len(g.unique())
        shared = prompts if worthwhile(len(p), prompts, width, length) else len(p)
        total += shared * width + len(p) * length
    return total


# -- evidence and rates ----------------------------------------------------------------------------------------------


def reference_logprobs(
    gathered: Callable[[], AbstractContextManager[Policy]], temperature: float, micro_batch_size: int, rollout: Rollout
) -> Tensor:
    """The log-probs of the reference policy, ``(R, T)`` float32; every process asks.

    Args:
        gathered: enters the policy with all of its weights; an adapter on it is off for as long as it is asked.
        temperature: of the log-probs.
        micro_batch_size: responses in one forward.
        rollout: whose tokens are meant.
    """
    with gathered() as policy, policy.without_adapter():
        evidence = policy.evidence(rollout.sequences, {"logprobs"}, micro_batch_size, temperature=temperature)
    return evidence["logprobs"]


def squared_gradients(policy: Policy, sequences: Sequences, temperature: float, where: Tensor | None = None) -> Tensor:
    """Squared norm of the gradient of each response's log-prob, summed over its tokens, by all trainable weights.

    One forward and backward for each response, for the sum of gradients that one over several gives has lost the norms
    of its terms. Forwards over several rows would not help: each backward still runs through all of them. ``.grad`` is
    left as it is. Weights have to be whole on this device, not sharded.

    Args:
        policy: whose weights are meant; those that do not require a gradient do not count.
        sequences: ``S`` prompts and responses.
        temperature: of the log-probs.
        where: ``(S,)`` bool, the responses to measure; None for all. Those of groups with equal rewards have the
            advantage 0 under any baseline, so that there is no need to.

    Returns:
        ``(S,)`` float64, on the CPU; 0 for a response without tokens, and for one that is not measured.
    """
    weights = [weight for weight in policy.model.parameters() if weight.requires_grad]
    squares = torch.zeros(len(sequences.response_ids), dtype=torch.float64)
    for row in range(len(squares)) if where is None else where.nonzero().squeeze(-1).tolist():
        response = sequences.rows(torch.tensor([row], device=sequences.response_ids.device))
        index = response.response_mask.reshape(-1).nonzero().squeeze(-1)
        if not weights or not len(index):
            continue
        with torch.enable_grad():
            signals = policy.signals(response, index, temperature=temperature, needs={"logprobs"})
            assert signals.logprobs is not None
            gradients = torch.autograd.grad(signals.logprobs.sum(), weights, allow_unused=True)
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients if each is not None]
        squares[row] = torch.stack(norms).square().sum().cpu()
    return squares


def learning_rate(settings: OptimisationSettings) -> Callable[[int], float]:
    """The learning rate by the number of an optimizer step, from 1: a function of that alone, which a checkpoint has.

    Without a schedule it is constant, after a linear warm-up whose first step has ``lr / warmup_optimizer_steps``. A
    schedule gives the first step what transformers' trainer gives it: 0 where there is a warm-up.

    Raises:
        ConfigError: transformers refuses the settings.
    """
    lr, ramp = settings.lr, settings.warmup_optimizer_steps
    if settings.schedule is None:
        return lambda step: lr * (min(1.0, step / ramp) if ramp else 1.0)
    options = settings.schedule.model_dump(exclude_none=True)
    name = options.pop("name")
    nothing, steps = torch.optim.SGD([torch.zeros(1)], lr=lr), settings.optimizer_steps
    try:
        scheduler = get_scheduler(name, nothing, ramp, steps, scheduler_specific_kwargs=options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"optimisation.schedule: {error}. Change it, or optimisation.lr.") from error
    assert isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR)
    (factor,) = scheduler.lr_lambdas
    return cache(lambda step: lr * float(factor(step - 1)))
