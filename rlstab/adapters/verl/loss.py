"""The functions that verl's engine calls: with logits, for signals that it lacks; with outputs, for the loss."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from rlstab.adapters.verl.batch import ROW, MiniBatch, wide_as
from rlstab.core.batch import layout_of
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean
from rlstab.core.step import OptimizerStep
from rlstab.record.effects import what_methods_did
from rlstab.record.writer import Recorder
from rlstab.signals import SIGNAL_NAMES, token_signals_from_logits

#: Signals that verl's engine computes itself, even with its fused kernels, which form no logits.
BY_ENGINE = frozenset({"entropies"})
#: Signals that are computed from its logits.
FROM_LOGITS = SIGNAL_NAMES - {"logprobs", "log_support_mass"} - BY_ENGINE
#: The names of verl's outputs, by signal.
OUTPUTS: Mapping[str, str] = {"logprobs": "log_probs", "entropies": "entropy"}


class PlannedLoss:
    """The loss function of a ``TrainingWorker``, and the processor of its logits.

    Where a batch asks for ``distillation_use_topk``, verl calls the loss function with ``student_logits``, the logits
    of all tokens divided by the temperature, and expects ``(1, N)`` values by name.

    Attributes:
        batch: the mini-batch of this rank.
        step: the optimizer step; None while its evidence is made.
        needs: signals to compute from the logits.
        recorder: keeps the micro-batches of an optimizer step for a dump; None without dumps.
    """

    def __init__(self, min_p: float | None) -> None:
        self.min_p = min_p
        self.batch: MiniBatch | None = None
        self.step: OptimizerStep | None = None
        self.needs: frozenset[str] = frozenset()
        self.recorder: Recorder | None = None

    def __call__(
        self, model_output: Any = None, data: Any = None, dp_group: Any = None, student_logits: Tensor | None = None
    ) -> Any:
        if student_logits is not None:
            rows = student_logits.squeeze(0)
            any_ids = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)  # verl computes log-probs
            signals = token_signals_from_logits(rows, any_ids, needs=self.needs, min_p=self.min_p)
            return {name: getattr(signals, name).unsqueeze(0) for name in self.needs}
        if self.step is None:  # the forward that computes the evidence has no loss
            return torch.zeros((), device=model_output["log_probs"].device), {}
        return self._loss(model_output, data), {}

    def ask(self, data: Any, needs: Set[str], *, live: bool) -> None:
        """Tell the engine which signals to compute for a batch.

        Args:
            data: verl's batch.
            needs: signals beyond the log-probs.
            live: with a gradient.
        """
        self.needs = FROM_LOGITS & needs
        # without entropies verl's cross-entropy may overwrite the logits, which the other signals still need
        entropies = "entropies" in needs or (live and bool(self.needs))
        tu.assign_non_tensor(data, calculate_entropy=entropies, distillation_use_topk=bool(self.needs))

    def signals(self, model_output: Any, data: Any, names: frozenset[str]) -> dict[str, Tensor]:
        """``(B, T)`` signals of the rows in ``data``, as wide as the mini-batch."""
        assert self.batch is not None
        width = self.batch.mask.shape[1]
        return {
            name: wide_as(no_padding_2_padding(model_output[OUTPUTS.get(name, name)], data), width) for name in names
        }

    def _loss(self, model_output: Any, data: Any) -> Tensor:
        step, batch = self.step, self.batch
        assert step is not None
        assert batch is not None
        if step.plan is None:  # refused: every rank runs the same backward, whose gradients are discarded
            return step.loss(0, PolicyOutputs(model_output["log_probs"].values())).loss
        objective = step.objective
        piece = step.plan.piece(batch.batch(objective, data[ROW]))
        live = self.signals(model_output, data, frozenset({"logprobs", *objective.live_needs}))
        outputs, ranks = PolicyOutputs.from_padded(piece.batch, **live), int(data["dp_size"])
        out = step.loss(piece, outputs)
        drift = (piece.batch.old_logprobs - outputs.logprobs.detach()).clamp(-20.0, 20.0)
        logged = {"ratio/drift": Mean.of(drift)}  # verl logs it too, and the entropy if its engine computed it
        if "tokens/entropy" not in out.report and "entropy" in model_output:
            entropies = self.signals(model_output, data, frozenset({"entropies"}))["entropies"]
            logged["tokens/entropy"] = Mean.of(entropies.detach().reshape(-1)[layout_of(piece.batch).index])
        step.reports.append(logged)
        loss = out.loss * ranks  # verl averages gradients over ranks, and denominators are global
        if self.recorder is not None:
            tensors = batch.tensors(piece.batch, outputs, data[ROW]) | what_methods_did(step.plan, piece, outputs)
            self.recorder.add(tensors, loss, outputs.logprobs)
        return loss
