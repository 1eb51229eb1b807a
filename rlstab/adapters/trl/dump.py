"""Records the tokens of optimizer steps of TRL's trainer, for ``rlstab look``."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from rlstab.adapters.host_objective import defaults_of
from rlstab.adapters.setting_conflicts import check_windows
from rlstab.adapters.trl.hooks import ObjectiveTrainer
from rlstab.adapters.trl.release import check_release, ends_of, tokenizer_of
from rlstab.adapters.trl.responses import (
    COLUMNS,
    REWARDS,
    SAMPLED,
    SEQUENCE_IDS,
    Inputs,
    batch_of,
    response_mask,
    stamp,
    truncated,
)
from rlstab.core.batch import TokenBatch
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.turns import turns_of
from rlstab.errors import ConfigError
from rlstab.record.effects import what_methods_did
from rlstab.record.writer import Recorder, settings_of, tensors_of


class DumpCallback(TrainerCallback):
    """Dumps every N-th optimizer step, and changes nothing: ``trainer.add_callback(DumpCallback(trainer, "dump"))``.

    It keeps what the trainer computes for its loss: log-probs, entropies, the loss of each micro-batch, and the
    derivative of the backpropagated loss by each log-prob. There is no additional forward. Each rank writes its files
    (:mod:`rlstab.record.writer`), and the first rank the tokenizer.

    Args:
        trainer: TRL's ``GRPOTrainer``, or one of the adapter's.
        folder: the folder of the dump; every rank writes into it.
        every: optimizer steps from one dump to the next; the first step is dumped too.

    Raises:
        ConfigError: ``every`` is below 1, an optimizer step spans generations, or the loss is Liger's or that of
            ``AsyncGRPOTrainer``, which do not keep their tokens.
    """

    def __init__(self, trainer: GRPOTrainer | ObjectiveTrainer, folder: str | Path, *, every: int = 1) -> None:
        check_release()
        if not isinstance(trainer, (GRPOTrainer, ObjectiveTrainer)):
            raise ConfigError(f"DumpCallback: {type(trainer).__name__} keeps no tokens. Use RLStabAsyncGRPOTrainer.")
        if every < 1:
            raise ConfigError(f"DumpCallback: every = {every}, expected 1 or more.")
        if trainer.args.use_liger_kernel:
            raise ConfigError("GRPOConfig.use_liger_kernel does not keep the tokens. Write use_liger_kernel=False.")
        self.trainer, self.recorder = trainer, Recorder(folder, every)
        self.ends = ends_of(trainer)
        self._seen: tuple[Tensor, Tensor | None] | None = None
        if isinstance(trainer, GRPOTrainer):
            check_windows(trainer.args)
            _also(trainer, "_generate_and_score_completions", self._stamp)
        if isinstance(trainer, ObjectiveTrainer):
            trainer.on_part = self._keep_part
        else:
            _also(trainer, "_get_per_token_logps_and_entropies", self._keep_forward)
            _also(trainer, "_compute_loss", self._keep_loss)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clear what an exception left of the last run, and write the tokenizer."""
        self.recorder.begin()
        if self.trainer.accelerator.is_main_process:
            self.recorder.write_tokenizer(tokenizer_of(self.trainer))

    # -- micro-batches ---------------------------------------------------------------------------------------------

    def _stamp(self, generated: dict[str, Any], *args: Any) -> None:
        """Add identities, rewards and the age of the weights, which TRL shuffles along."""
        trainer, accelerator = self.trainer, self.trainer.accelerator
        if not trainer.model.training:
            return
        rank, ranks, rows = accelerator.process_index, accelerator.num_processes, len(generated["completion_ids"])
        if SEQUENCE_IDS not in generated:
            first, group = trainer.state.global_step, trainer.num_generations
            stamp(generated, first=first, rank=rank, ranks=ranks, group=group)
        scored = [list(trainer._logs["rewards"][name])[-rows * ranks :] for name in trainer.reward_func_names]
        weights = trainer.reward_weights.to(generated["completion_ids"].device)
        rewards = (torch.tensor(scored, device=weights.device) * weights[:, None]).nansum(0)
        generated[REWARDS] = rewards[rank * rows :][:rows]
        # TRL gives its sampler the weights of this step before it samples
        generated[SAMPLED] = torch.full((rows,), trainer.state.global_step, device=weights.device)

    def _keep_forward(self, outputs: tuple[Tensor, Tensor | None, Any], *args: Any) -> None:
        if outputs[0].requires_grad:
            self._seen = outputs[:2]

    @property
    def _wanted(self) -> bool:
        step = self.trainer.state.global_step + 1
        return bool(self.trainer.model.training) and self.recorder.wants(step)

    def _keep_loss(self, loss: Tensor, model: Any, inputs: Inputs) -> None:
        """Keep a micro-batch of TRL's trainer."""
        if not self._wanted or self._seen is None:
            return
        (logprobs, entropies), self._seen = self._seen, None
        needs = {"truncated"} | {name for name, column in COLUMNS.items() if inputs.get(column) is not None}
        evidence = {"logprobs": logprobs} | ({} if entropies is None else {"entropies": entropies})
        # including the answers of tools, which TRL leaves out of the loss
        batch = batch_of({**inputs, "tool_mask": None}, evidence, needs, {}, self.ends)
        is_token = inputs["completion_mask"].bool()
        tensors = tensors_of(batch, PolicyOutputs(batch.logprobs), inputs["completion_ids"])
        tensors["mask"] = response_mask(inputs)[is_token]
        corrected = self.trainer.use_vllm and self.trainer.vllm_importance_sampling_correction
        if corrected and self.trainer.args.loss_type != "vespo":  # whose kernel has them
            tensors["weights"] = inputs["importance_sampling_ratio"].expand(is_token.shape)[is_token]
        self._tokens = inputs.get("num_items_in_batch")
        self._add(tensors, inputs, loss, logprobs, is_token)

    def _keep_part(self, inputs: Inputs, batch: TokenBatch, live: PolicyOutputs, loss: Tensor) -> None:
        """Keep a micro-batch of the adapter's trainer."""
        step = self.trainer._rlstab_step
        if self._wanted and step is not None and step.plan is not None:
            columns = {name: inputs[column] for name, column in COLUMNS.items() if inputs.get(column) is not None}
            columns["truncated"] = truncated(inputs, self.ends)[:, None].expand_as(inputs["completion_ids"])
            if inputs.get("tool_mask") is not None:
                columns["turn"] = turns_of(response_mask(inputs))
            tensors = tensors_of(batch, live, inputs["completion_ids"], columns)
            self._add(tensors | what_methods_did(step.plan, batch, live), inputs, loss, live.logprobs)

    def _add(
        self, tensors: dict[str, Tensor], inputs: Inputs, loss: Tensor, logprobs: Tensor, where: Any = ...
    ) -> None:
        mask = inputs["prompt_mask"].bool()
        tensors |= {"prompt_ids": inputs["prompt_ids"][mask], "prompt_lengths": mask.sum(1), "rewards": inputs[REWARDS]}
        tensors["versions"] = inputs[SAMPLED].int().repeat_interleave(tensors["lengths"].to(inputs[SAMPLED].device))
        # the backpropagated loss includes the division by accelerate
        loss = loss.detach() / self.trainer.accelerator.gradient_accumulation_steps
        self.recorder.add(tensors, loss, logprobs, where=where)

    # -- the step --------------------------------------------------------------------------------------------------

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the step, after all of its backward passes."""
        if not self.recorder.parts:
            return
        trainer, accelerator = self.trainer, self.trainer.accelerator
        if isinstance(trainer, ObjectiveTrainer):
            name, settings = "rlstab", settings_of(trainer._rlstab_chosen, trainer.objective_state)
        else:  # what decides the loss and the advantages, by the names of GRPOConfig, and TRL's count of tokens
            settings = {key: getattr(args, key, value) for key, value in defaults_of("trl").items() if key != "optim"}
            settings["num_items_in_batch"] = None if self._tokens is None else float(self._tokens)
            name, settings["scale_rewards"] = f"trl/{args.loss_type}", trainer.scale_rewards
        is_colocated = getattr(args, "use_vllm", False) and args.vllm_mode == "colocate"
        self.recorder.write(
            name,
            settings,
            host=f"trl {trl.__version__}",
            step=state.global_step + 1,
            rank=accelerator.process_index,
            ranks=accelerator.num_processes,
            # in AsyncGRPOTrainer the ratio is that to the sampler, which is not 1
            first=isinstance(trainer, GRPOTrainer)
            and all(bool((part["versions"] == state.global_step).all()) for part in self.recorder.parts),
            learning_rate=float(trainer.optimizer.param_groups[0]["lr"]),
            temperature=float(args.temperature),
            top_p=float(args.top_p),
            top_k=int(args.top_k or 0),
            # TRL sets it in its own process; a server may have another
            logprobs_mode="processed_logprobs" if is_colocated else None,
        )


def _also(trainer: GRPOTrainer, name: str, callback: Callable[..., None]) -> None:
    """Call back with the result and the arguments of a method of a trainer, after each call of it."""
    inner = getattr(trainer, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        returned = inner(*args, **kwargs)
        callback(returned, *args)
        return returned

    setattr(trainer, name, outer)
