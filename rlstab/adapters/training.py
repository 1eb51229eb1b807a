"""How a host trains by an objective: opening it, its optimizer steps, and what remains of each of them.

An adapter is the hook into its host alone: when a step begins, where its live values come from, and what a refused step
leaves out.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from rlstab.adapters.evidence import UNSCORED
from rlstab.adapters.host_correction import HostCorrection
from rlstab.adapters.metrics import HostMetrics, from_ranks
from rlstab.config import load_objective
from rlstab.core.batch import TokenBatch
from rlstab.core.comm import Comm, LocalComm, TorchComm
from rlstab.core.compose import Composition, compose
from rlstab.core.objective import State, TokenObjective, check_complete
from rlstab.core.plan import Plan
from rlstab.core.stats import Mean
from rlstab.core.step import OptimizerStep
from rlstab.errors import RlstabError

logger = logging.getLogger(__name__)
#: The forms in which an objective is given: a YAML file's path or what it holds, or a method or composition.
Given: TypeAlias = str | Path | Mapping[str, Any] | list[Any] | TokenObjective


def open_objective(*given: Given, complete: bool = True) -> Composition:
    """The composition of all that is given.

    Args:
        given: each in any form.
        complete: whether to warn of methods that lack what they were published with.
    """
    chosen = compose(
        *(objective if isinstance(objective, TokenObjective) else load_objective(objective) for objective in given)
    )
    if complete:
        check_complete(chosen)
    return chosen


class HostTraining:
    """The objective of a trainer, a worker or a loss of a host, between optimizer steps.

    Attributes:
        objective: the one that is trained, with the host's correction for the sampler if that is always on.
        objective_state: after the last optimizer step; part of each checkpoint.
        last_refusal: why the last refused optimizer step was refused.
    """

    objective: Composition
    objective_state: State
    last_refusal: str | None = None

    def _rlstab_open(
        self, host: str, chosen: Composition, *, state: State | None = None, corrected: bool = False
    ) -> None:
        """Begin; steps are of this process alone until :meth:`_rlstab_share`.

        Args:
            host: key of :data:`rlstab.hosts.HOSTS`.
            chosen: what the user chose; checkpoints name it.
            state: the state of the objective; None is the initial one.
            corrected: whether the host's weights multiply the policy term of every step.
        """
        self._rlstab_chosen = chosen
        self.objective = compose(chosen, HostCorrection()) if corrected else chosen
        self.objective_state = self.objective.init_state() if state is None else state
        self._rlstab_comm: Comm = LocalComm()
        self._rlstab_metrics = HostMetrics(host)

    def _rlstab_share(self, device: torch.device, group: Any = None) -> None:
        """Share optimizer steps with the ranks of a process group, whose backend takes tensors of ``device``."""
        if dist.is_initialized() and dist.get_world_size(group) > 1:
            self._rlstab_comm = TorchComm(group, device)
        self._rlstab_metrics.group = group

    def _rlstab_new_step(self, objective: Composition | None = None) -> OptimizerStep:
        """An optimizer step that goes on from the state; ``objective`` if it is another in this step."""
        objective = self.objective if objective is None else objective
        return OptimizerStep(objective, {**objective.init_state(), **self.objective_state}, self._rlstab_comm)

    def _rlstab_settle(self, step: OptimizerStep, title: str = "an optimizer step was refused") -> None:
        """Take over the state of a step that has ended; the first rank warns of a refusal."""
        if step.refusal is not None:
            self.last_refusal = step.refusal
            if not dist.is_initialized() or dist.get_rank() == 0:
                logger.warning(f"{title}: {step.refusal}")
        self.objective_state = step.state

    def _rlstab_restore(self, folder: str | Path) -> None:
        """Go on from the state in a checkpoint, which the first rank reads: the others may not see its disk.

        Raises:
            CheckpointError: see :func:`~rlstab.adapters.objective_state.restore_state`; on every rank.
        """
        from rlstab.adapters.objective_state import restore_state  # needs safetensors, which not every host brings

        state: Any = None
        if not dist.is_initialized() or dist.get_rank() == 0:
            try:
                state = restore_state(folder, self._rlstab_chosen)
            except RlstabError as error:
                state = error
        state = from_ranks(state)[0]
        if isinstance(state, RlstabError):
            raise state
        self.objective_state = {**self.objective.init_state(), **state}


def plan_step(step: OptimizerStep, batches: Sequence[TokenBatch]) -> None:
    """Plan a step from its micro-batches, and report the share of tokens without a log-prob of the sampler."""
    step.make_plan(batches)
    unscored = [batch.extra[UNSCORED] for batch in batches if UNSCORED in batch.extra]
    if unscored:
        step.reports.append({"sampler/unscored": Mean.of(torch.cat(unscored))})


def with_empty_responses(plan: Plan, batches: Sequence[TokenBatch], comm: Comm) -> Plan:
    """A plan whose means over responses count those without tokens, as TRL does; every rank calls it.

    ``mask_truncated_completions`` makes such responses: the mean over tokens leaves them out, that over responses does
    not.
    """
    count = torch.tensor(float(sum(batch.num_sequences for batch in batches)), dtype=torch.float64)
    empty = float(comm.sum(count)) - plan.everything.sequences
    kept_totals = replace(plan.kept, sequences=plan.kept.sequences + empty)
    totals_of_all = replace(plan.everything, sequences=plan.everything.sequences + empty)
    return replace(plan, kept=kept_totals, everything=totals_of_all)
