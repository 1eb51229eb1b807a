"""verl's ``TrainingWorker`` with an objective in place of its loss.

Every decision of an optimizer step is made before its first backward pass, from the evidence of the whole mini-batch on
all data-parallel ranks. A step with NaN or Inf is refused, and one without any gradient is skipped: neither changes
weights or moments of the optimizer.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric import AggregationType, Metric
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from rlstab.adapters.evidence import ids_of_tokens
from rlstab.adapters.host_correction import HostCorrection
from rlstab.adapters.host_objective import settings_of_verl
from rlstab.adapters.metrics import from_ranks
from rlstab.adapters.objective_state import keep_state
from rlstab.adapters.releases import check_release
from rlstab.adapters.setting_conflicts import check_verl_settings, require_one_correction
from rlstab.adapters.training import HostTraining, open_objective, plan_step
from rlstab.adapters.verl.batch import ROW, WEIGHTS, MiniBatch
from rlstab.adapters.verl.loss_mode import objective_file
from rlstab.config import objective_hash
from rlstab.core.batch import BASICS, layout_of
from rlstab.core.compose import Composition, compose
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean
from rlstab.core.step import OptimizerStep
from rlstab.errors import ConfigError, HostError
from rlstab.hosts import adapted
from rlstab.record.effects import what_methods_did
from rlstab.record.writer import Recorder, settings_of
from rlstab.signals import SIGNAL_NAMES, token_signals_from_logits

logger = logging.getLogger(__name__)
#: The environment variable that names the folder for dumps of optimizer steps.
DUMP = "RLSTAB_DUMP"
#: Signals that verl's engine computes itself, even with its fused kernels, which form no logits.
BY_ENGINE = frozenset({"entropies"})
#: Signals that are computed from its logits.
FROM_LOGITS = SIGNAL_NAMES - {"logprobs", "log_support_mass"} - BY_ENGINE
#: The names of verl's outputs, by signal.
OUTPUTS: Mapping[str, str] = {"logprobs": "log_probs", "entropies": "entropy"}


class RLStabTrainingWorker(HostTraining, TrainingWorker):  # type: ignore[misc]  # mypy cannot resolve verl
    """The actor's ``TrainingWorker`` whose loss is an objective.

    Args:
        host: verl's ``ActorRolloutRefWorker``; its ``config`` is ``actor_rollout_ref``.
        config: verl's, of the actor.

    Raises:
        ConfigError: a setting that the objective replaces is set, ranks read different objectives, or the engine is not
            that for FSDP.
        MissingSignal: a method reads a signal that verl does not have with these settings.
        HostError: the installed verl is not what the adapter was written for.
    """

    _rlstab_batch: MiniBatch  # the rows of this rank in the optimizer step
    _rlstab_step: OptimizerStep | None = None  # None while its evidence is made
    _rlstab_from_logits: Set[str] = frozenset()  # signals to compute from the logits
    _rlstab_recorder: Recorder | None = None
    _rlstab_version: int | None = None

    def __init__(self, host: Any, config: Any) -> None:
        check_release("verl")
        path = objective_file(host.config)
        if not path:
            raise ConfigError("policy_loss.loss_mode = 'rlstab:' names no file. Write loss_mode=rlstab:FILE.")
        chosen = open_objective(path)
        check_verl_settings(settings_of_verl(host.config), chosen, distilled=host.distillation_enabled)
        require_from(host.config, chosen)
        super().__init__(config=config)  # the checks come before the model is loaded
        group = self.engine.get_data_parallel_group()
        hashes = set(from_ranks(objective_hash(chosen), group))
        if len(hashes) > 1:
            raise ConfigError(
                f"ranks read different objectives: {', '.join(sorted(hashes))}. Name one file for all nodes."
            )
        self._rlstab_open("verl", chosen)
        self._rlstab_share(torch.device(get_device_id()), group)
        ends = self.model_config.generation_config, self.model_config.hf_config, self.model_config.tokenizer
        self._rlstab_ends = ids_of_tokens(*(getattr(source, "eos_token_id", None) for source in ends))
        self._rlstab_sampler = _sampler(host.config.rollout)
        self._rlstab_hybrid = bool(host.config.get("hybrid_engine", False))
        if os.environ.get(DUMP):
            self._rlstab_recorder = Recorder(os.environ[DUMP])
            self._rlstab_recorder.write_tokenizer(self.model_config.tokenizer)

    def set_loss_fn(self, loss_fn: Any) -> None:
        """Set the loss of the objective in place of verl's ``ppo_loss``."""
        if getattr(loss_fn, "func", None) is not ppo_loss:
            raise HostError(
                f"verl set the loss {loss_fn!r} on the actor, and the adapter replaces only ppo_loss. Train "
                f"without it, or without the adapter."
            )
        super().set_loss_fn(self._rlstab_loss)

    # -- the optimizer step ----------------------------------------------------------------------------------------

    def train_mini_batch(self, data: Any) -> Any:
        """All optimizer steps of an update. If one engine trains and samples, its current weights sampled the rows."""
        synchronous = self._rlstab_hybrid and len(set(tu.get(data, key="min_global_steps", default=[0]))) == 1
        self._rlstab_version = self._rlstab_steps if synchronous else None
        return super().train_mini_batch(data)

    @property
    def _rlstab_steps(self) -> int:
        """Optimizer steps so far, by the optimizer's own counter, which a checkpoint has."""
        return max((int(state["step"]) for state in self.engine.optimizer.state.values() if "step" in state), default=0)

    def train_batch(self, data: Any) -> Any:
        """Plan one optimizer step from its mini-batch, then run verl's ``train_batch``."""
        # settings that verl's `train_batch` passes to the engine, so that evidence uses the same micro-batches
        names = ("use_dynamic_bsz", "max_token_len_per_gpu", "micro_batch_size_per_gpu", "use_fused_kernels")
        settings = {name: getattr(self.engine_config, name) for name in names}
        settings["use_remove_padding"] = self.model_config.get("use_remove_padding", False)
        missing = {name: value for name, value in settings.items() if name not in data.keys()}
        tu.assign_non_tensor(data, **missing)
        logged = bool(tu.get(data, key="calculate_entropy", default=False))
        step = self._rlstab_begin(data)
        data[ROW] = torch.arange(len(data))
        live = self.objective.live_needs | (BY_ENGINE if logged else frozenset())
        self._rlstab_ask(data, live, live=True)
        # the engine makes its optimizer step inside `train_batch`, where it is refused, skipped or scaled
        self.engine.optimizer_step = partial(self._rlstab_take, step, self.engine.optimizer_step)
        try:
            output = super().train_batch(data)
        finally:
            self._rlstab_step = None
            del self._rlstab_batch, self.engine.optimizer_step  # which uncovers the method of its class
        self._rlstab_settle(step)
        self._rlstab_metrics.add(step)
        means = self._rlstab_metrics.collect()
        if output is not None:
            # as MEAN, or verl would reduce some names over the optimizer steps of an update in other ways
            metrics = {name: Metric(AggregationType.MEAN, value) for name, value in means.items()}
            tu.assign_non_tensor(output, metrics={**tu.get(output, "metrics"), **metrics})
        return output

    def _rlstab_begin(self, data: Any) -> OptimizerStep:
        """Plan the optimizer step, with verl's correction weights for the sampler if it computed any.

        Raises:
            ConfigError: the objective corrects for the sampler as well.
        """
        objective = self.objective
        if WEIGHTS in data.keys():
            setting = "algorithm.rollout_correction.rollout_is"
            require_one_correction(objective, setting, f"{setting}=null")
            objective = compose(objective, HostCorrection())
        self._rlstab_batch = batch = MiniBatch.of(data, get_device_id(), self._rlstab_ends)
        if self._rlstab_recorder is not None:
            self._rlstab_recorder.begin()
        batch.evidence = self._rlstab_evidence(data)
        step = self._rlstab_new_step(objective)
        plan_step(step, [batch.batch(objective)])
        self._rlstab_step = step
        return step

    def _rlstab_evidence(self, data: Any) -> dict[str, Tensor]:
        """``(B, T)`` signals of the policy at the start of the optimizer step; no forward if no method reads any."""
        needs = self.objective.needs & SIGNAL_NAMES
        if not needs:
            return {}
        self._rlstab_ask(data, needs - BASICS, live=False)
        offload = tu.get(data, key="disable_auto_offload", default=False)
        with self.engine.eval_mode(disable_auto_offload=offload):
            outputs = self.engine.infer_batch(data, loss_function=self._rlstab_loss)["model_output"]
        signals = self._rlstab_signals(outputs, data, {"logprobs", *needs})
        return {name: values.float() for name, values in signals.items()}

    def _rlstab_take(self, step: OptimizerStep, move: Callable[[], float]) -> float:
        """Replaces the engine's ``optimizer_step``, which is ``move``; returns the gradient norm."""
        step.finish()
        if not step.moves_weights:
            self.engine.optimizer_zero_grad()
            return 0.0 if step.refusal is None else math.nan
        with step.scaled_learning_rate(self.engine.optimizer):
            if self._rlstab_recorder is not None:  # before the optimizer moves
                group = self.engine.get_data_parallel_group()
                self._rlstab_recorder.write(
                    "rlstab",
                    settings_of(self.objective, self.objective_state),
                    self._rlstab_version,
                    host=f"verl {version('verl')}",
                    step=self._rlstab_steps + 1,
                    rank=dist.get_rank(group),
                    ranks=dist.get_world_size(group),
                    learning_rate=float(self.engine.optimizer.param_groups[0]["lr"]),
                    **self._rlstab_sampler,
                )
            norm = move()
        if not math.isfinite(norm):
            step.refusal = f"the gradient norm is {norm}: verl skipped the optimizer step."
        return norm

    # -- what verl's engine calls ----------------------------------------------------------------------------------

    def _rlstab_ask(self, data: Any, needs: Set[str], *, live: bool) -> None:
        """Tell the engine which signals to compute for a batch.

        Args:
            data: verl's batch.
            needs: signals beyond the log-probs.
            live: live outputs with a gradient.
        """
        self._rlstab_from_logits = from_logits = FROM_LOGITS & needs
        # without entropies verl's cross-entropy may overwrite the logits, which the other signals still need
        entropies = "entropies" in needs or (live and bool(from_logits))
        tu.assign_non_tensor(data, calculate_entropy=entropies, distillation_use_topk=bool(from_logits))

    def _rlstab_signals(self, model_output: Any, data: Any, names: Set[str]) -> dict[str, Tensor]:
        """``(B, T)`` signals of the rows in ``data``, as wide as the mini-batch: verl pads to its longest response."""
        width = self._rlstab_batch.mask.shape[1]
        padded = {name: no_padding_2_padding(model_output[OUTPUTS.get(name, name)], data) for name in names}
        return {name: torch.nn.functional.pad(rows, (0, width - rows.shape[1])) for name, rows in padded.items()}

    def _rlstab_loss(
        self, model_output: Any = None, data: Any = None, dp_group: Any = None, student_logits: Tensor | None = None
    ) -> Any:
        """The loss of a micro-batch, or signals from its logits.

        Where a batch asks for ``distillation_use_topk``, verl gives the logits of all tokens divided by the
        temperature, ``student_logits``, and expects ``(1, N)`` values by name.
        """
        if student_logits is not None:
            rows, needs = student_logits.squeeze(0), self._rlstab_from_logits
            any_ids = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)  # verl computes log-probs
            min_p = self.objective.signal_options.get("min_p")
            signals = token_signals_from_logits(rows, any_ids, needs=needs, min_p=min_p)
            return {name: getattr(signals, name).unsqueeze(0) for name in needs}
        step = self._rlstab_step
        if step is None:  # the forward that computes the evidence has no loss
            return torch.zeros((), device=model_output["log_probs"].device), {}
        if step.plan is None:  # refused: every rank runs the same backward, whose gradients are discarded
            return step.loss(0, PolicyOutputs(model_output["log_probs"].values())).loss, {}
        batch = self._rlstab_batch
        piece = step.plan.piece(batch.batch(step.objective, data[ROW]))
        live = self._rlstab_signals(model_output, data, {"logprobs", *step.objective.live_needs})
        outputs = PolicyOutputs.from_padded(piece.batch, **live)
        out = step.loss(piece, outputs)
        drift = (piece.batch.old_logprobs - outputs.logprobs.detach()).clamp(-20.0, 20.0)
        logged = {"ratio/drift": Mean.of(drift)}  # verl logs it too, and the entropy if its engine computed it
        if "tokens/entropy" not in out.report and "entropy" in model_output:
            entropies = self._rlstab_signals(model_output, data, {"entropies"})["entropies"]
            logged["tokens/entropy"] = Mean.of(entropies.detach().reshape(-1)[layout_of(piece.batch).index])
        step.reports.append(logged)
        loss = out.loss * int(data["dp_size"])  # verl averages gradients over ranks, and denominators are global
        if self._rlstab_recorder is not None:
            tensors = batch.tensors(piece.batch, outputs, data[ROW]) | what_methods_did(step.plan, piece, outputs)
            self._rlstab_recorder.add(tensors, loss, outputs.logprobs)
        return loss, {}

    # -- the checkpoint --------------------------------------------------------------------------------------------

    def save_checkpoint(self, local_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Save verl's checkpoint, and the state of the objective in the same folder."""
        saved = super().save_checkpoint(local_path, *args, **kwargs)
        if local_path is not None and self.rank == 0:
            keep_state(local_path, self.objective, self.objective_state)
        dist.barrier()
        return saved

    def load_checkpoint(self, local_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load verl's checkpoint, and the state of the objective unless only weights are loaded.

        Raises:
            CheckpointError: the state of the objective is missing, damaged, or belongs to another objective.
        """
        if local_path is not None and "extra" in self.checkpoint_config.load_contents:
            self._rlstab_restore(local_path)
        return super().load_checkpoint(local_path, *args, **kwargs)


def _sampler(rollout: Any) -> dict[str, Any]:
    """What verl's configuration says of the sampler and its log-probs, by the fields of a dump's header."""
    mode = rollout.get("logprobs_mode") if rollout.calculate_log_probs else None
    return {
        "temperature": float(rollout.temperature),
        "top_p": float(rollout.top_p),
        "top_k": max(0, int(rollout.top_k)),
        "logprobs_mode": mode if mode in ("processed_logprobs", "raw_logprobs") else None,
    }


def require_from(config: Any, objective: Composition) -> None:
    """Refuse an objective that reads signals which verl does not have with these settings.

    Args:
        config: ``actor_rollout_ref``, as Hydra composed it.
        objective: the composition of methods.

    Raises:
        MissingSignal: names the method, the signal and what to change.
    """
    fused = bool(config.model.get("use_fused_kernels", False))
    signals = BY_ENGINE | {"truncated", "branch", "turn"} | (frozenset() if fused else FROM_LOGITS)
    signals |= {"ref_logprobs"} if config.actor.use_kl_loss else set()
    signals |= {"rollout_logprobs"} if config.rollout.get("calculate_log_probs", False) else set()
    turns = config.rollout.multi_turn
    # of several calls in one turn, nothing says which of the rewards belong to it
    signals |= {"turn_reward"} if turns.enable and turns.max_parallel_calls == 1 else set()
    host = adapted("verl")
    as_set = replace(host, name="verl with these settings", release="", gives=signals, live=host.live & signals)
    as_set.require(objective)
