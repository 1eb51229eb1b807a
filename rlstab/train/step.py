"""Learning from one rollout: optimizer steps whose statistics and denominators span all micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from accelerate import Accelerator
from torch import Tensor

from rlstab.config.settings import OptimisationSettings
from rlstab.core.batch import SIGNALS, TokenBatch
from rlstab.core.comm import Comm
from rlstab.core.objective import State, TokenObjective
from rlstab.core.plan import Plan, make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.random import uniform
from rlstab.core.stats import Mean
from rlstab.errors import NonFinite, ShapeError
from rlstab.signals import SIGNAL_NAMES
from rlstab.trace.writer import Tracer
from rlstab.train.engines import Engine
from rlstab.train.learning_rate import learning_rate
from rlstab.train.metrics import Metrics
from rlstab.train.padded_rows import Sequences
from rlstab.train.policy import Policy
from rlstab.train.row_order import in_parts
from rlstab.train.shared_prompts import SharedPrompts


@dataclass(frozen=True)
class Experience:
    """The responses of this rank in one rollout.

    Attributes:
        sequences: ids and masks of ``R`` responses.
        signals: evidence, ``(R, T)`` by name; names that rlstab does not know are signals of the user's own.
        advantages: ``(R,)`` or ``(R, T)``, on the CPU.
        sequence_ids, group_ids: ``(R,)`` int64, unique over the run and over all ranks, on the CPU.
    """

    sequences: Sequences
    signals: Mapping[str, Tensor]
    advantages: Tensor
    sequence_ids: Tensor
    group_ids: Tensor


@dataclass(frozen=True)
class Learnt:
    """What came of learning from a rollout.

    Attributes:
        refused: optimizer steps that were refused.
        why: the last of them was.
    """

    refused: int = 0
    why: str | None = None


class Learner:
    """Holds what an optimizer step needs and changes.

    Attributes:
        state: of the objective.
        optimizer_steps: attempted so far, skipped and refused ones included; the learning-rate schedule counts them.
        tracer: told of every micro-batch, None where no tokens are traced.
    """

    def __init__(
        self,
        engine: Engine,
        objective: TokenObjective,
        settings: OptimisationSettings,
        temperature: float,
        accelerator: Accelerator,
        comm: Comm,
        seed: int,
    ) -> None:
        self.engine, self.objective, self.settings = engine, objective, settings
        self.temperature, self.accelerator, self.comm, self.seed = temperature, accelerator, comm, seed
        self.optimizer = torch.optim.AdamW(
            engine.weights.values(),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self.state: State = objective.init_state()
        self.optimizer_steps = 0
        self.tracer: Tracer | None = None
        self._learning_rate = learning_rate(settings)

    def learn(self, experience: Experience, metrics: Metrics) -> Learnt:
        """All optimizer steps of one rollout. A step with NaN or Inf is refused and counted, and changes nothing."""
        refused, why = 0, None
        if self.settings.old_logprobs == "recompute":
            everything = torch.arange(len(experience.sequence_ids))
            with metrics.phase("recompute"):
                fresh = self._evidence(experience, everything)
            signals = {**experience.signals, **fresh, "old_logprobs": fresh["logprobs"]}
            _compare_sampler(experience, signals, everything, metrics)
        else:
            signals = {**experience.signals, "old_logprobs": experience.signals["rollout_logprobs"]}
            signals["logprobs"] = signals["old_logprobs"]
        experience = replace(experience, signals=signals)
        with metrics.phase("train"):
            for first, rows in self._mini_batches(experience.group_ids):
                self.optimizer_steps += 1
                try:
                    self._step(experience, rows, metrics, first=first)
                except NonFinite as error:
                    self.optimizer.zero_grad()
                    metrics.count("optimizer_steps/refused")
                    refused, why = refused + 1, str(error)
        return Learnt(refused, why)

    def refuse(self, why: str, metrics: Metrics) -> Learnt:
        """Count the optimizer steps of a rollout that cannot be learnt from."""
        steps = self.settings.optimizer_steps_per_rollout
        self.optimizer_steps += steps
        for _ in range(steps):
            metrics.count("optimizer_steps/refused")
        return Learnt(steps, why)

    def _mini_batches(self, group_ids: Tensor) -> Iterator[tuple[bool, Tensor]]:
        """For each optimizer step: whether it is the first of the rollout, and the rows of this rank in it.

        Whole groups are dealt out, by the number that each one's id draws, so the ranks agree.

        Raises:
            ShapeError: group ids that no float64 holds exactly, on any rank; the groups would be torn.
        """
        several = self.settings.mini_batches > 1
        groups = self._all_groups(group_ids) if several else group_ids.unique()
        for epoch in range(self.settings.epochs):
            order = groups
            if several:
                order = groups[uniform(self.seed + 1, groups, torch.tensor(epoch)).argsort()]
            for number, chosen in enumerate(order.tensor_split(self.settings.mini_batches)):
                yield epoch == number == 0, torch.isin(group_ids, chosen).nonzero().squeeze(-1)

    def _all_groups(self, group_ids: Tensor) -> Tensor:
        """The different group ids of all ranks, sorted. Ranks exchange float64, which must hold them exactly."""
        own = group_ids.unique()
        groups: Tensor = self.comm.gather(own.double()).unique()
        if groups.numel() and float(groups.abs().max()) >= 2**53:
            raise ShapeError(
                f"group_ids reach {int(groups.abs().max())}: ids of 2**53 and more are not exact in float64, and rows "
                f"would be lost between mini-batches. Number the groups of the run from 0."
            )
        return groups.long()

    def _step(self, experience: Experience, rows: Tensor, metrics: Metrics, *, first: bool) -> None:
        signals, old = experience.signals, self.settings.old_logprobs
        if self.settings.refresh == "step":
            fresh = self._evidence(experience, rows)
            signals = {name: values.clone() for name, values in signals.items()}
            for name, values in fresh.items():
                signals[name][rows] = values[rows]
            if first and old != "recompute":
                _compare_sampler(experience, signals, rows, metrics)
        # without a forward over all tokens by these very weights, only the live ones can be compared
        compare_live = first and self.settings.refresh == "rollout" and old != "recompute"
        rows = in_parts(
            experience.sequences, experience.advantages, experience.group_ids, rows, self.settings.micro_batch_size
        )
        parts = [self._part(experience, signals, one) for one in rows.split(self.settings.micro_batch_size) if len(one)]
        plan = make_plan(
            self.objective, [batch for _, batch in parts], self.state, self.comm, scope=self.settings.scope
        )
        if plan.silent:
            metrics.count("optimizer_steps/skipped")
            self.state = plan.state
            return

        device = self.engine.policy.device
        # what is logged stays on the device until the step is done: reading it earlier would wait for the kernels
        total, nonfinite = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
        with_gradient = torch.zeros((), dtype=torch.int64, device=device)
        reports: list[Mapping[str, Mean]] = []  # a step that is refused reports nothing: it may hold NaN
        gaps: list[Tensor] = []
        # all sizes are read before the first forward: later each read would wait for the kernels of a whole part
        ready = [(sequences, batch, _Needed.by(plan, batch, sequences, self.engine)) for sequences, batch in parts]
        for part in self.engine.rounds(ready):
            if part is None:
                self.engine.backward(None)
                continue
            sequences, batch, needed = part
            live = self._live(batch, needed)
            outputs = [one for one in live.present() if one.requires_grad]
            for one in outputs:
                one.retain_grad()
            out = plan.loss(batch, live)
            self.engine.backward(out.loss if outputs else None)
            if outputs:
                # a live output that every term holds constant has no gradient
                reached = [one.grad != 0 for one in outputs if one.grad is not None]
                with_gradient += torch.stack(reached).any(0).count_nonzero()
            total += out.loss.detach()
            nonfinite += out.nonfinite
            reports.append(out.report)
            if self.tracer is not None:
                self.tracer.part(plan, batch, live, needed.wanted, sequences.response_ids, self.optimizer_steps)
            if compare_live and batch.rollout_logprobs is not None and outputs:
                gaps.append((live.logprobs.detach() - batch.rollout_logprobs)[needed.place].abs())
        tally = torch.stack([total.double(), nonfinite.double(), with_gradient.double()]).cpu()
        loss, bad, live_rows = self.comm.sum(tally).tolist()
        norm = self.engine.clip(self.settings.max_grad_norm)
        if bad or not math.isfinite(norm):
            raise NonFinite(
                f"{int(bad)} live values of the policy, or of gates, are NaN or Inf and the gradient norm is {norm}. "
                f"The optimizer step was refused; weights and state are those before it."
            )
        lr = self._learning_rate(self.optimizer_steps) * plan.lr_scale
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            for weight in group["params"]:
                # an expert that no token reached; padding that reached it would make zeros, and AdamW move it
                if weight.requires_grad and weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = plan.state
        for report in reports:
            metrics.report(report)
        for gap in gaps:
            _report_gap(gap, "_live", metrics)
        if self.accelerator.is_main_process:
            metrics.mean("loss", loss, 1)
            metrics.mean("gradient/norm", norm, 1)
            metrics.mean("lr", lr, 1)
            metrics.mean("tokens/live", plan.live_tokens, plan.everything.tokens)
            metrics.mean("head/live_fraction", live_rows, plan.everything.tokens)
        metrics.highest("gradient/largest_norm", norm)

    def _live(self, batch: TokenBatch, needed: _Needed) -> PolicyOutputs:
        """The live outputs of a part, by one forward over the sequences that need it.

        Elsewhere the outputs hold the evidence, which is what they would be, or zeros.
        """
        where, place = needed.where, needed.place
        filler = {name: torch.zeros_like(batch.logprobs) for name in where} | {"logprobs": batch.logprobs}
        if needed.sequences is None:
            return PolicyOutputs(**filler)
        signals = self.engine.signals(
            needed.sequences,
            needed.index,
            temperature=self.temperature,
            needs=where.keys(),
            options=self.objective.signal_options,
            rows={name: one[place] for name, one in where.items() if name != "logprobs"},
            shared=needed.shared,
        )
        return PolicyOutputs(
            **{name: values.index_copy(0, place, getattr(signals, name)) for name, values in filler.items()}
        )

    def _part(
        self, experience: Experience, signals: Mapping[str, Tensor], rows: Tensor
    ) -> tuple[Sequences, TokenBatch]:
        # advantages and ids are on the CPU, the rest is where the model is
        device = experience.sequences.prompt_ids.device
        there = rows.to(device)
        sequences = experience.sequences.rows(there)
        length = sequences.response_ids.shape[1]
        cut = {name: values[there][:, :length] for name, values in signals.items()}
        own = {name: cut.pop(name) for name in cut.keys() - SIGNALS.keys() - {"old_logprobs", "logprobs"}}
        advantages = experience.advantages[rows]
        return sequences, TokenBatch.from_padded(
            response_mask=sequences.response_mask,
            advantages=(advantages if advantages.ndim == 1 else advantages[:, :length]).to(device),
            sequence_ids=experience.sequence_ids[rows],
            group_ids=experience.group_ids[rows],
            live_ratio=self.settings.old_logprobs == "live",
            extra=own,
            **cut,
        )

    @torch.no_grad()
    def _evidence(self, experience: Experience, rows: Tensor) -> dict[str, Tensor]:
        """``(R, T)`` signals by the trainer's own forward, on some rows."""
        needs = {"logprobs", "entropies"} | (set(self.objective.needs) & SIGNAL_NAMES)
        shape = experience.sequences.response_ids.shape
        found = {name: torch.zeros(shape, device=self.engine.policy.device) for name in needs}
        with self.engine.whole() as policy:
            for one in rows.split(self.settings.micro_batch_size):
                if len(one):
                    values = forward_signals(
                        policy, experience.sequences, one, self.temperature, needs, self.objective.signal_options
                    )
                    for name in needs:
                        found[name][one, : values[name].shape[1]] = values[name]
        return found


@dataclass(frozen=True)
class _Needed:
    """Which live outputs the loss of a part reads, and the forward that finds them.

    Attributes:
        where: ``(n,)`` bool by live output.
        wanted: ``(n,)`` bool, some output is read.
        place: ``(m,)`` int64, the tokens where that is so.
        sequences: those that have such a token, as far as the last of them; None where there is none.
        index: ``(m,)`` int64, the tokens in the flattened responses of these sequences.
        shared: prompts that these sequences share.
    """

    where: Mapping[str, Tensor]
    wanted: Tensor
    place: Tensor
    sequences: Sequences | None
    index: Tensor
    shared: SharedPrompts | None = None

    @classmethod
    def by(cls, plan: Plan, batch: TokenBatch, sequences: Sequences, engine: Engine) -> _Needed:
        """What a plan needs of one of its parts; it reads the device."""
        where = plan.live_rows(batch)
        wanted = torch.stack(list(where.values())).any(0)
        place = wanted.nonzero().squeeze(-1)
        if not place.numel():
            return cls(where, wanted, place, None, place)
        assert batch.index is not None
        chosen, row = batch.sequence[place].unique(return_inverse=True)
        column = batch.index[place] % sequences.response_ids.shape[1]
        some = sequences.rows(chosen).cut(int(column.max()) + 1)
        index = row * some.response_ids.shape[1] + column
        return cls(where, wanted, place, some, index, engine.shared_prompts(some))


def _compare_sampler(experience: Experience, signals: Mapping[str, Tensor], rows: Tensor, metrics: Metrics) -> None:
    """Report the gap between sampler and trainer on every token of some rows."""
    if "rollout_logprobs" in signals:
        mask = experience.sequences.response_mask[rows]
        _report_gap((signals["logprobs"] - signals["rollout_logprobs"])[rows][mask].abs(), "", metrics)


def _report_gap(gap: Tensor, suffix: str, metrics: Metrics) -> None:
    # evidence that is not finite gets its optimizer step refused, and must not make the metrics NaN
    if gap.numel() and bool(gap.isfinite().all()):
        metrics.report({f"sampler/gap{suffix}": Mean.of(gap)})
        metrics.highest(f"sampler/largest_gap{suffix}", gap.amax())


def forward_signals(
    policy: Policy,
    sequences: Sequences,
    rows: Tensor,
    temperature: float,
    needs: set[str],
    options: Mapping[str, float],
) -> dict[str, Tensor]:
    """``(len(rows), T)`` signals of some rows, 0 where there is no token, without gradient."""
    with torch.no_grad():
        part = sequences.rows(rows.to(sequences.prompt_ids.device))
        index = part.response_mask.reshape(-1).nonzero().squeeze(-1)
        shared = policy.shared_prompts(part)
        signals = policy.signals(part, index, temperature=temperature, needs=needs, options=options, shared=shared)
        padded = {}
        for name in needs:
            values = getattr(signals, name)
            flat = torch.zeros(part.response_mask.numel(), dtype=values.dtype, device=values.device)
            padded[name] = flat.index_copy(0, index, values).view(part.response_mask.shape)
        return padded
