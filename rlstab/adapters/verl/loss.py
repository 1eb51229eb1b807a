"""What verl's engine calls: with its logits, for signals that it does not make; with its outputs, for the loss.

And metrics under the names that verl has for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from rlstab.adapters.verl.batch import ROW, MiniBatch, wide_as
from rlstab.adapters.window import Sums, Tallies, Window
from rlstab.core.batch import layout_of
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean
from rlstab.record.effects import what_methods_did
from rlstab.record.writer import Recorder
from rlstab.signals import SIGNAL_NAMES, token_signals_from_logits

#: Signals that verl's engine makes itself, also by its fused kernels, which form no logits.
ENGINES_OWN = frozenset({"entropies"})
#: Those that are made from its logits.
FROM_LOGITS = SIGNAL_NAMES - {"logprobs"} - ENGINES_OWN
#: verl's names.
OUTPUTS: Mapping[str, str] = {"logprobs": "log_probs", "entropies": "entropy"}


class PlannedLoss:
    """The loss function of a ``TrainingWorker``, and the processor of its logits.

    verl calls a loss function with ``student_logits`` where a batch asks for ``distillation_use_topk``: its way to hand
    the logits of all tokens, divided by the temperature, to somebody who makes ``(1, N)`` values of them.

    Attributes:
        batch: the mini-batch of this rank.
        window: the optimizer step.
        needs: signals to make of the logits.
        recorder: keeps the micro-batches of an optimizer step that is dumped.
    """

    def __init__(self, min_p: float | None) -> None:
        self.min_p = min_p
        self.batch: MiniBatch | None = None
        self.window: Window | None = None
        self.needs: frozenset[str] = frozenset()
        self.recorder: Recorder | None = None

    def __call__(
        self, model_output: Any = None, data: Any = None, dp_group: Any = None, student_logits: Tensor | None = None
    ) -> Any:
        if student_logits is not None:
            rows = student_logits.squeeze(0)
            nobody = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
            made = token_signals_from_logits(rows, nobody, needs=self.needs, min_p=self.min_p)
            return {name: getattr(made, name).unsqueeze(0) for name in self.needs}
        if self.window is None:  # the evidence is made; nobody wants a loss
            return torch.zeros((), device=model_output["log_probs"].device), {}
        return self._loss(model_output, data), {}

    def ask(self, data: Any, needs: Set[str], *, live: bool) -> None:
        """Tell the engine what to make of a batch.

        Args:
            data: verl's batch.
            needs: signals beyond the log-probs.
            live: with a gradient.
        """
        self.needs = FROM_LOGITS & needs
        # without entropies verl's cross-entropy may write its gradient into the logits, from which ours is made later
        entropies = "entropies" in needs or (live and bool(self.needs))
        tu.assign_non_tensor(data, calculate_entropy=entropies, distillation_use_topk=bool(self.needs))

    def signals(self, model_output: Any, data: Any, names: frozenset[str]) -> dict[str, Tensor]:
        """``(B, T)`` signals of the mini-batch, of the rows that ``data`` holds."""
        assert self.batch is not None
        width = self.batch.mask.shape[1]
        return {
            name: wide_as(no_padding_2_padding(model_output[OUTPUTS.get(name, name)], data), width) for name in names
        }

    def _loss(self, model_output: Any, data: Any) -> Tensor:
        window, batch = self.window, self.batch
        assert window is not None
        assert batch is not None
        if window.plan is None:
            # the same backward on every rank; its gradients are thrown away
            nothing: Tensor = model_output["log_probs"].values().sum() * 0.0
            return nothing
        objective = window.plan.objective
        piece = window.plan.piece(batch.batch(objective, data[ROW])[0])
        live = self.signals(model_output, data, frozenset({"logprobs", *objective.live_needs}))
        outputs, ranks = PolicyOutputs.from_padded(piece.batch, **live), int(data["dp_size"])
        out = window.plan.loss(piece, outputs)
        loss = out.loss * ranks  # ranks average gradients, and denominators are global
        if self.recorder is not None:
            tensors = batch.tensors(piece.batch, outputs, data[ROW]) | what_methods_did(window.plan, piece, outputs)
            self.recorder.add(tensors, loss, outputs.logprobs)
        window.add(out.nonfinite, {**out.report, **self._told(model_output, data, piece.batch, live, out.report)})
        return loss

    def _told(
        self, model_output: Any, data: Any, batch: Any, live: Mapping[str, Tensor], report: Mapping[str, Mean]
    ) -> dict[str, Mean]:
        """What verl logs beside: how far the policy is from the old one, and its entropy where that was made."""
        now = live["logprobs"].detach().reshape(-1)[layout_of(batch).index]
        told = {"ratio/drift": Mean.of((batch.old_logprobs - now).clamp(-20.0, 20.0))}
        if "tokens/entropy" not in report and "entropy" in model_output:
            entropies = self.signals(model_output, data, frozenset({"entropies"}))["entropies"]
            told["tokens/entropy"] = Mean.of(entropies.detach().reshape(-1)[layout_of(batch).index])
        return told


#: verl's names; every other metric is under ``rlstab/``. verl puts ``actor/`` before those that have none.
NAMES: Mapping[str, str] = {
    "tokens/entropy": "actor/entropy_loss",
    "ratio/clipped_dual": "actor/pg_clipfrac_lower",
    "ratio/drift": "actor/ppo_kl",
    "kl/value": "actor/kl_loss",
}


def tallies(group: Any) -> Tallies:
    """Over the ranks of a process group."""

    def over_ranks(own: Sums) -> list[Sums]:
        ranks: list[Sums] = [own] * dist.get_world_size(group)
        dist.all_gather_object(ranks, own, group=group)
        return ranks

    return Tallies(over_ranks, NAMES, "actor/rlstab/", "actor/pg_clipfrac")
