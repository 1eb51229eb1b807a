"""Writes down the tokens of optimizer steps of TRL's trainer, for ``rlstab replay``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import trl
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from rlstab.adapters.trl.release import check_release
from rlstab.adapters.trl.responses import GROUP_IDS, SEQUENCE_IDS, Inputs, identities, response_mask, truncated
from rlstab.adapters.trl.settings import check_windows
from rlstab.errors import ConfigError
from rlstab.trace.dump import Header, HostLoss, write_dump

#: Settings of GRPOConfig that decide its loss, as far as ``rlstab replay`` knows the formula.
SETTINGS = (
    "epsilon",
    "epsilon_high",
    "delta",
    "beta",
    "use_bias_correction_kl",
    "importance_sampling_level",
    "max_completion_length",
)
#: TRL's names of the log-probs that a micro-batch may have.
LOGPROBS: Mapping[str, str] = {
    "old_logprobs": "old_per_token_logps",
    "rollout_logprobs": "sampling_per_token_logps",
    "ref_logprobs": "ref_per_token_logps",
}


class DumpCallback(TrainerCallback):
    """Dumps every N-th optimizer step, and changes nothing: ``trainer.add_callback(DumpCallback(trainer, "dump"))``.

    What TRL computes for its loss is kept as it passes: log-probs, entropies, the loss of each micro-batch, and the
    derivative of what it backpropagates by each log-prob. There is no further forward. Each rank writes its own files
    (:mod:`rlstab.trace.dump`), and the first one the tokenizer.

    Args:
        trainer: TRL's own.
        folder: of the dump.
        every: optimizer steps from one dump to the next; the first step is dumped too.

    Raises:
        ConfigError: ``every`` is below 1, an optimizer step spans generations, or the loss is Liger's, which keeps
            nothing of its tokens.
    """

    def __init__(self, trainer: GRPOTrainer, folder: str | Path, *, every: int = 1) -> None:
        check_release()
        check_windows(trainer.args)
        if every < 1:
            raise ConfigError(f"DumpCallback: every = {every}, expected 1 or more.")
        if trainer.args.use_liger_kernel:
            raise ConfigError("GRPOConfig.use_liger_kernel keeps nothing of the tokens. Write use_liger_kernel=False.")
        self.trainer, self.folder, self.every = trainer, Path(folder), every
        self.ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        self._parts: list[dict[str, Tensor]] = []
        self._values: list[float] = []
        self._forward, self._loss = trainer._get_per_token_logps_and_entropies, trainer._compute_loss
        self._seen: tuple[Tensor, Tensor | None] | None = None
        trainer._get_per_token_logps_and_entropies = self._keep_forward
        trainer._compute_loss = self._keep_loss

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget what an exception left of the last run, and write the tokenizer."""
        self._parts, self._values = [], []
        backend = getattr(self.trainer._tokenizer, "backend_tokenizer", None)
        if backend is not None and self.trainer.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            backend.save(str(self.folder / "tokenizer.json"))

    def _keep_forward(self, *args: Any, **kwargs: Any) -> Any:
        logprobs, entropies, aux = self._forward(*args, **kwargs)
        self._seen = (logprobs, entropies) if logprobs.requires_grad else self._seen
        return logprobs, entropies, aux

    def _keep_loss(self, model: Any, inputs: Inputs) -> Tensor:
        loss: Tensor = self._loss(model, inputs)
        step = self.trainer.state.global_step + 1
        if not self.trainer.model.training or (step != 1 and step % self.every) or self._seen is None:
            return loss
        (logprobs, entropies), self._seen = self._seen, None
        there = inputs["completion_mask"].bool()
        part = {
            "logprobs": logprobs.detach()[there],
            "ids": inputs["completion_ids"][there],
            "mask": response_mask(inputs)[there].to(torch.uint8),
            "advantages": _by_token(inputs["advantages"], there)[there],
            "truncated": _by_token(truncated(inputs, self.ends).float(), there)[there],
            "lengths": there.sum(1),
            "prompt_lengths": inputs["prompt_mask"].sum(1),
            "prompt_ids": inputs["prompt_ids"][inputs["prompt_mask"].bool()],
            "parts": torch.full((there.shape[0],), len(self._parts), device=there.device),
        }
        part |= {name: inputs[key][there] for name, key in LOGPROBS.items() if inputs.get(key) is not None}
        part |= {} if entropies is None else {"entropies": entropies.detach()[there]}
        named = inputs if SEQUENCE_IDS in inputs else identities(self.trainer, inputs, len(self._parts))
        part |= {"sequence_ids": named[SEQUENCE_IDS], "group_ids": named[GROUP_IDS]}
        self._parts.append({name: values.cpu() for name, values in part.items()})
        place = len(self._parts) - 1
        # what accelerate divides by on the way to the backward pass is part of what is backpropagated
        self._values.append(float(loss.detach()) / self.trainer.accelerator.gradient_accumulation_steps)
        self._tokens = inputs.get("num_items_in_batch")
        logprobs.register_hook(lambda slope: self._parts[place].update(coefficients=slope.detach()[there].cpu()))
        return loss

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All backward passes of the step are done."""
        parts, values = self._parts, self._values
        self._parts, self._values = [], []
        if not parts:
            return
        trainer, accelerator = self.trainer, self.trainer.accelerator
        names = set.intersection(*map(set, parts))
        count, slices = trainer.current_gradient_accumulation_steps, args.steps_per_generation
        settings = {name: getattr(args, name) for name in SETTINGS}
        if self._tokens is not None:  # of the generation: TRL takes the mean over its optimizer steps
            settings["tokens"] = float(self._tokens) * count / slices
        header = Header(
            host=f"trl {trl.__version__}",
            step=state.global_step + 1,
            rank=accelerator.process_index,
            ranks=accelerator.num_processes,
            parts=len(parts),
            first=(trainer._step - count) % (slices * args.num_iterations) == 0,
            learning_rate=float(trainer.optimizer.param_groups[0]["lr"]),
            temperature=float(args.temperature),
            loss=HostLoss(name=f"trl/{args.loss_type}", settings=settings, values=values),
        )
        write_dump(self.folder, header, {name: torch.cat([part[name] for part in parts]) for name in names})


def _by_token(values: Tensor, there: Tensor) -> Tensor:
    return values if values.shape == there.shape else values.unsqueeze(1).expand(there.shape)
