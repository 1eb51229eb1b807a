"""What an objective would do on a run of TRL's own trainer, which is not changed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.utils import logging
from trl import GRPOTrainer

from rlstab.adapters.trl.forward import forward_for, provided_by
from rlstab.adapters.trl.metrics import tallies
from rlstab.adapters.trl.release import check_release
from rlstab.adapters.trl.responses import GROUP_IDS, SEQUENCE_IDS, Inputs, Provider, batch_of
from rlstab.adapters.trl.settings import check_windows
from rlstab.adapters.window import Window
from rlstab.config import load_objective
from rlstab.core.comm import Comm, LocalComm, TorchComm
from rlstab.core.compose import compose, observe
from rlstab.core.objective import State, TokenObjective
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean
from rlstab.errors import ConfigError

logger = logging.get_logger(__name__)


class WatchCallback(TrainerCallback):
    """Reports what each method of an objective would do, and changes nothing: neither loss nor weights nor randomness.

    ``trainer.add_callback(WatchCallback(trainer, "objective.yaml"))``. Its metrics are those of
    :func:`rlstab.observe`, under ``rlstab/observe_NAME/``, over the whole optimizer step and all ranks. It costs one
    forward without gradient per micro-batch. A resumed run begins with the initial state.

    Args:
        trainer: TRL's own, or the adapter's.
        objective: path of a YAML file, what such a file holds, or a method or composition.
        head: see :class:`~rlstab.adapters.trl.RLStabGRPOTrainer`.
        signals: likewise.

    Attributes:
        left_out: methods of which there is nothing to count, since they define the ratio or the aggregation.

    Raises:
        MissingSignal: a method reads what TRL does not have with these settings.
        ConfigError: no method can be watched, or an optimizer step spans generations.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        objective: str | Path | Mapping[str, Any] | list[Any] | TokenObjective,
        *,
        head: str = "auto",
        signals: Mapping[str, Provider] | None = None,
    ) -> None:
        check_release()
        check_windows(trainer.args)
        members = compose(objective if isinstance(objective, TokenObjective) else load_objective(objective)).keyed
        self.left_out = [key for key, method in members.items() if method.writes & {"ratio", "aggregate"}]
        watched = compose(*(method for key, method in members.items() if key not in self.left_out))
        if not watched.members:
            raise ConfigError(f"{', '.join(self.left_out)}: of these there is nothing to count. Watch another method.")
        if self.left_out:
            logger.warning(f"not watched, for there is nothing to count: {', '.join(self.left_out)}")
        self.objective = compose(observe(watched))
        self.trainer, self.providers = trainer, dict(signals or {})
        self.forward = forward_for(trainer, self.objective, {*provided_by(trainer), *self.providers}, head)
        ranks = trainer.accelerator.num_processes
        self.comm: Comm = TorchComm(device=trainer.accelerator.device) if ranks > 1 else LocalComm()
        self.ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        self.state: State = self.objective.init_state()
        self.tallies = tallies()

    @torch.no_grad()
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All micro-batches of the step are there, and the weights are still those that it began with."""
        window = Window()
        modes = {module: module.training for module in self.trainer.model.modules()}
        self.trainer.model.eval()  # no dropout, so no random number is drawn
        try:
            for number, inputs in enumerate(self._micro_batches()):
                named = inputs if SEQUENCE_IDS in inputs else {**inputs, **self._identities(inputs, number)}
                needs = {"logprobs", *self.objective.needs}
                made, _ = self.forward.signals(self.trainer.model, named, needs & (self.forward.gives | {"logprobs"}))
                batch, _ = batch_of(named, made, self.objective, self.providers, self.ends)
                window.batches = [*window.batches, batch]
        finally:
            for module, training in modes.items():
                module.training = training
        window.make_plan(self.objective, self.state, self.comm)
        plan = window.plan
        if plan is None:
            logger.warning(f"optimizer step {state.global_step + 1} could not be watched: {window.refusal}")
            return
        for batch in window.batches:
            report = plan.loss(batch, PolicyOutputs(batch.logprobs)).report
            self.tallies.add({name: mean for name, mean in report.items() if name.startswith("observe_")})
        if plan.lr_scale != 1.0:
            self.tallies.add({"observed/lr_scale": Mean.scalar(plan.lr_scale)})
        self.state = plan.state

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Before TRL writes a line of its log; every rank comes here."""
        if control.should_log:
            for name, value in self.tallies.collect().items():
                self.trainer._metrics["train"][name].append(value)

    def _micro_batches(self) -> list[Inputs]:
        """Those of the optimizer step whose backward passes are done."""
        trainer = self.trainer
        count, slices = trainer.current_gradient_accumulation_steps, trainer.args.steps_per_generation
        return [trainer._buffered_inputs[(trainer._step - count + place) % slices] for place in range(count)]

    def _identities(self, inputs: Inputs, number: int) -> dict[str, Tensor]:
        """By the place in the optimizer step, and by the prompt: TRL has shuffled its own away."""
        trainer, (rows, _) = self.trainer, inputs["completion_ids"].shape
        place = trainer.accelerator.process_index * trainer.current_gradient_accumulation_steps + number
        ranks, step = trainer.accelerator.num_processes, trainer.state.global_step
        first = (step * ranks * trainer.current_gradient_accumulation_steps + place) * rows
        pairs = zip(inputs["prompt_ids"].tolist(), inputs["prompt_mask"].tolist(), strict=True)
        prompts = [repr([token for token, there in zip(*pair, strict=True) if there]).encode() for pair in pairs]
        groups = [zlib.crc32(prompt) << 20 | zlib.adler32(prompt) & 0xFFFFF for prompt in prompts]
        device = inputs["completion_ids"].device
        return {
            SEQUENCE_IDS: first + torch.arange(rows, device=device),
            GROUP_IDS: torch.tensor(groups, device=device),
        }
