"""One optimizer step in a host that runs the forwards, the backwards and the optimizer.

The step is planned before its first backward pass, and ends in one of three ways: it is taken; it is skipped, because
nothing in it has a gradient; or it is refused, because it contains NaN or Inf. Only a taken step changes weights and
moments of the optimizer, and a refused one leaves the state of the objective as it was.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlstab.core.batch import TokenBatch
from rlstab.core.comm import Comm, LocalComm
from rlstab.core.devices import on_cpu
from rlstab.core.loss import LossOutput, Part
from rlstab.core.objective import State, TokenObjective
from rlstab.core.plan import Plan, Scope, make_plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean
from rlstab.errors import NonFinite, OutOfRange


@dataclass(eq=False)
class OptimizerStep:
    """One optimizer step of this rank; every rank makes one and calls the same methods in the same order::

        step = OptimizerStep(objective, state)
        step.make_plan(micro_batches)
        for batch in micro_batches:
            step.loss(batch, PolicyOutputs.from_padded(batch, logprobs=...)).loss.backward()
        step.finish(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
        if step.moves_weights:
            with step.scaled_learning_rate(optimizer):
                optimizer.step()
        optimizer.zero_grad()
        state = step.state

    Args:
        objective: usually a composition.
        state_before: the state of the objective after the last optimizer step; None is the initial one.
        comm: the ranks that share the optimizer step; None is only this process.

    Attributes:
        batches: the evidence of the micro-batches, from which the plan was made.
        plan: None before :meth:`make_plan`, and if the evidence was refused.
        refusal: why the step was refused; None if it was not. A host may set it for other reasons.
        reports: metrics of the micro-batches so far, and metrics that the host adds.
        losses: the number of micro-batches whose loss was taken.
        total_loss: the loss of the whole optimizer step over all ranks, after :meth:`finish`.
        norm: the norm of the gradient, as :meth:`finish` was given it.
    """

    objective: TokenObjective
    state_before: State | None = None
    comm: Comm | None = None
    batches: Sequence[TokenBatch] = field(default=(), init=False)
    plan: Plan | None = field(default=None, init=False)
    refusal: str | None = field(default=None, init=False)
    reports: list[Mapping[str, Mean]] = field(default_factory=list, init=False)
    losses: int = field(default=0, init=False)
    total_loss: float = field(default=0.0, init=False)
    norm: float = field(default=0.0, init=False)
    #: Loss and nonfinite, on the device.
    _sums: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    def make_plan(self, batches: Sequence[TokenBatch], scope: Scope = "step") -> None:
        """Plan the step; NaN or Inf in the evidence of any rank refuses it on every rank.

        Args:
            batches: all micro-batches of this rank; empty on a rank without sequences.
            scope: see :func:`rlstab.make_plan`, which raises all other errors about the evidence.
        """
        self.batches = batches
        try:
            self.plan = make_plan(self.objective, batches, self.state_before, self.comm, scope)
        except NonFinite as error:
            self.refusal = str(error)

    def loss(self, which: int | TokenBatch | Part, policy: PolicyOutputs) -> LossOutput:
        """The loss of one micro-batch, as :meth:`Plan.loss`; its report is kept, without waiting for the device.

        If the evidence was refused, the loss is a zero with a graph, so that every rank runs the same backward pass.

        Args:
            which: index of the micro-batch, its batch, or a :meth:`Plan.piece`.
            policy: live outputs for its tokens.
        """
        self.losses += 1
        if self.plan is None and self.refusal is not None:
            return LossOutput(policy.logprobs.sum() * 0.0, {}, torch.zeros((), dtype=torch.int64))
        if self.plan is None:
            raise OutOfRange("the optimizer step has no plan yet. Call make_plan first, with all its micro-batches.")
        out = self.plan.loss(which, policy)
        loss, nonfinite = out.loss.detach(), out.nonfinite
        self._sums = (loss, nonfinite) if self._sums is None else (self._sums[0] + loss, self._sums[1] + nonfinite)
        self.reports.append(out.report)
        return out

    def finish(self, norm: float | Tensor = 0.0) -> None:
        """After the last backward pass, refuse the step if a live value on any rank, or the gradient, is NaN or Inf.

        Args:
            norm: the norm of the gradient over all ranks, the same on each; omit it if the host checks it.
        """
        comm = LocalComm() if self.comm is None else self.comm
        sums = (torch.zeros(()), torch.zeros(())) if self._sums is None else self._sums
        *read, size = on_cpu([*sums, torch.as_tensor(norm)])  # one wait for the device
        self.total_loss, count = comm.sum(torch.stack([value.double() for value in read])).tolist()
        self.norm = norm = norm if isinstance(norm, float) else float(size)
        wrong = [f"{int(count)} live values of the policy or of gates are NaN or Inf"] if count else []
        wrong += [] if math.isfinite(norm) else [f"the gradient norm is {norm}"]
        if wrong and self.refusal is None:
            self.refusal = f"{', and '.join(wrong)}. The weights and the state stay as they were."

    @property
    def moves_weights(self) -> bool:
        """Whether the step was not refused and has a gradient: without one, momentum alone would move the weights."""
        return self.refusal is None and self.plan is not None and not self.plan.has_no_gradient

    @contextmanager
    def scaled_learning_rate(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """A context in which the learning rate is that of the schedule times :attr:`Plan.lr_scale`."""
        scheduled = [(group, group["lr"]) for group in optimizer.param_groups]
        for group, rate in scheduled:
            group["lr"] = rate * (1.0 if self.plan is None else self.plan.lr_scale)
        try:
            yield
        finally:
            for group, rate in scheduled:
                group["lr"] = rate

    @property
    def state(self) -> State:
        """The state of the objective for the next optimizer step."""
        if self.plan is not None and self.refusal is None:
            return self.plan.state
        return self.objective.init_state() if self.state_before is None else self.state_before
