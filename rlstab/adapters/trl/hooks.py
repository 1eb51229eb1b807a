"""The hooks of TRL's trainers that an objective needs: around the optimizer, and into the log and the checkpoint."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from typing import Any, TypeAlias

import torch
from accelerate import DistributedType
from torch import Tensor
from transformers import TrainerCallback
from transformers.utils import logging
from trl.trainer.base_trainer import _BaseTrainer

from rlstab.adapters.host_objective import check_trl_values, objective_of
from rlstab.adapters.metrics import HostMetrics
from rlstab.adapters.objective_state import keep_state
from rlstab.adapters.setting_conflicts import check_trl_settings
from rlstab.adapters.training import Given, HostTraining, open_objective, plan_step, with_empty_responses
from rlstab.adapters.trl.release import check_unpatched, ends_of
from rlstab.adapters.trl.responses import Inputs, Provider, batch_of, distinct_ids, stamp_missing
from rlstab.core.batch import TokenBatch
from rlstab.core.compose import Composition
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.step import OptimizerStep
from rlstab.errors import ConfigError, HostError
from rlstab.hosts import HOSTS, Host
from rlstab.signals import SIGNAL_NAMES

logger = logging.get_logger(__name__)
#: The methods by which a micro-batch reaches the loss.
_TO_THE_LOSS = frozenset({"training_step", "compute_loss", "_compute_loss"})
#: A function of TRL's inputs, the evidence, the live outputs and the loss of a micro-batch.
OnPart: TypeAlias = Callable[[Inputs, TokenBatch, PolicyOutputs, Tensor], None]


class ObjectiveTrainer(HostTraining, _BaseTrainer):  # type: ignore[misc]  # mypy cannot resolve trl
    """A trainer of TRL that trains by an objective, without its loss.

    Attributes:
        on_part: called for each micro-batch before its backward pass.
    """

    on_part: OnPart | None = None

    def _rlstab_train_by(
        self,
        chosen: Composition,
        deviations: Iterable[str],
        providers: Mapping[str, Provider],
        *,
        corrected: bool = False,
    ) -> None:
        """Begin with the initial state, once TRL's ``__init__`` is done.

        Args:
            chosen: the objective.
            deviations: a sentence for each way in which it differs from TRL's loss, if it is derived from that.
            providers: functions for signals that TRL's batch has no column of.
            corrected: whether TRL's weights multiply the policy term.
        """
        check_engine(self.accelerator)
        for sentence in deviations:
            title = f"the objective of this {type(self.args).__name__} differs from TRL's loss in one respect"
            logger.warning(f"{title}. {sentence}")
        self._rlstab_open("trl", chosen, corrected=corrected)
        self._rlstab_share(self.accelerator.device)
        self._rlstab_eval_metrics = HostMetrics("trl")
        self._rlstab_step: OptimizerStep | None = None
        self._rlstab_scaled = ExitStack()  # the learning rate, around the optimizer
        self._rlstab_providers, self._rlstab_ends = dict(providers), ends_of(self)
        _warn_of_dropout(self.model, self.objective.needs)
        if "log_support_mass" not in self.objective.live_needs:
            _warn_of_filters(self.args)
        self.add_callback(_AroundTheOptimizer(self))

    # -- the optimizer step ----------------------------------------------------------------------------------------

    def _rlstab_plan(
        self, step: OptimizerStep, inputs: Sequence[Inputs], evidence: Sequence[Mapping[str, Tensor]]
    ) -> None:
        """Plan a step from each of its micro-batches and the ``(B, T)`` signals of a forward of the policy."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        stamp_missing(inputs, step=self.state.global_step, rank=rank, ranks=ranks)
        batches = [
            batch_of(part, signals, self.objective.needs, self._rlstab_providers, self._rlstab_ends, ids)
            for part, signals, ids in zip(inputs, evidence, distinct_ids(inputs), strict=True)
        ]
        plan_step(step, batches)
        if step.plan is not None:
            step.plan = with_empty_responses(step.plan, step.batches, self._rlstab_comm)

    def _rlstab_loss(self, step: OptimizerStep, inputs: Inputs, live: PolicyOutputs) -> Tensor:
        """What to backpropagate of the next micro-batch: its loss times the ranks, which average gradients."""
        index = step.losses
        loss: Tensor = step.loss(index, live).loss * self.accelerator.num_processes
        if step.plan is not None and self.on_part is not None:
            self.on_part(inputs, step.batches[index], live, loss)
        return loss

    def _rlstab_before_step(self) -> None:
        """Refuse or scale the step; with gradients of None, weights and moments do not change.

        TRL takes a step in which nothing has a gradient: its optimizer moves by momentum and weight decay.
        """
        step = self._rlstab_step
        assert step is not None
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        step.finish(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)  # over all ranks that share it
        if step.refusal is not None:
            for parameter in parameters:
                parameter.grad = None
        self._rlstab_scaled.enter_context(step.scaled_learning_rate(self.optimizer))

    def _rlstab_after_step(self) -> None:
        """Restore the learning rate of the schedule, and settle the step."""
        step, self._rlstab_step = self._rlstab_step, None
        assert step is not None
        self._rlstab_scaled.close()
        if self.accelerator.optimizer_step_was_skipped and step.refusal is None:
            step.refusal = "the gradient scaler found gradients that are Inf or NaN, and skipped the optimizer step."
        self._rlstab_settle(step, f"optimizer step {self.state.global_step + 1}")
        self._rlstab_metrics.add(step)

    # -- the log: TRL's `log` may be called on only one rank, so metrics are collected where all ranks are -----------

    def _rlstab_log(self, mode: str, metrics: HostMetrics) -> None:
        """Give TRL the metrics since the last line, in place of its own of the same names."""
        self._metrics[mode].update({name: [value] for name, value in metrics.collect().items()})

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """TRL's, after all callbacks have decided whether a line is due."""
        if self.control.should_log:
            self._rlstab_log("train", self._rlstab_metrics)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, plus the metrics since the last line."""
        self._rlstab_log("train", self._rlstab_metrics)
        return super()._finalize_training(*args, **kwargs)

    # -- the checkpoint --------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """TRL's, plus the state of the objective in every checkpoint, with ``save_only_model`` too."""
        super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir is not None and self.args.should_save:
            keep_state(output_dir, self._rlstab_chosen, self.objective_state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._rlstab_restore(checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)


class _AroundTheOptimizer(TrainerCallback):
    """The public hooks on both sides of ``optimizer.step()``."""

    def __init__(self, trainer: ObjectiveTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_unpatched()
        self.trainer._rlstab_step = None  # left by an exception in the last run
        self.trainer._rlstab_scaled.close()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._rlstab_before_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._rlstab_after_step()


def objective_by(config: Any, objective: Given | None, *, derived: bool, host: Host = HOSTS["trl"]) -> Composition:
    """The objective of a trainer.

    Args:
        config: a ``GRPOConfig``, or an object with its attributes.
        objective: the objective as the user gave it.
        derived: whether the methods of TRL's loss with these settings come first.
        host: the host whose settings the objective needs.

    Raises:
        ConfigError: see :func:`objective_of` and :func:`check_trl_settings`.
    """
    check_trl_values(config)
    parts = [*([objective_of(config)] if derived else []), *([] if objective is None else [objective])]
    chosen = open_objective(*parts, complete=not derived)  # what TRL trains is what the user asked for
    check_trl_settings(config, chosen, derived=derived, host=host)
    return chosen


def check_engine(accelerator: Any) -> None:
    """Refuse engines that are not data-parallel, whether selected by the launcher, the environment or GRPOConfig.

    Raises:
        ConfigError: names it.
    """
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        kind = accelerator.distributed_type.value
        raise ConfigError(f"accelerate was launched with {kind}, which steps in the backward pass. Use FSDP or DDP.")
    for kind in ("tp", "cp", "sp"):
        if getattr(accelerator.parallelism_config, f"{kind}_enabled", False):
            raise ConfigError(
                f"parallelism_config has {kind}_size above 1: tensor, context and sequence parallelism share sequences "
                f"between ranks, and the adapter counts every rank as data-parallel. Leave it at 1; FSDP and DDP work."
            )


def check_loss(cls: type, adapter: type, loss: str, objective: Any) -> None:
    """Refuse a loss that a class overrides, where an objective was given or the class would not be called.

    A method that calls what it overrides is no other loss.

    Args:
        cls: the class of the trainer.
        adapter: the class of this package among its bases.
        loss: the method by which the adapter replaces TRL's loss.
        objective: the objective as the user gave it.

    Raises:
        HostError: names the class.
    """
    position, host = (cls.__mro__.index(member) for member in (adapter, adapter.__bases__[-1]))
    for index, base in enumerate(cls.__mro__[:host]):
        for name in _TO_THE_LOSS & vars(base).keys() if index != position else ():
            code = getattr(inspect.unwrap(vars(base)[name]), "__code__", None)
            passed_on = _TO_THE_LOSS & set(getattr(code, "co_names", ()))
            if index > position and name == loss:  # the adapter's is called instead
                is_lost = objective is None
                cure = f"Name {base.__name__} before {adapter.__name__}, or give an objective"
            else:
                is_lost, cure = objective is not None and not passed_on, "Remove the objective, or the override"
            if is_lost:
                effect = "which" if objective is None else "so the objective"
                raise HostError(f"{base.__name__} overrides {name}, {effect} would have no effect. {cure}.")


def _warn_of_dropout(model: torch.nn.Module, needs: Set[str]) -> None:
    """Warn of dropout: each forward draws a new mask, so that of the evidence is not that of the loss."""
    dropped = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, torch.nn.Dropout) and module.p > 0) or getattr(module, "attention_dropout", 0.0) > 0
    ]
    if dropped and needs & SIGNAL_NAMES:
        logger.warning(
            f"the policy has dropout ({dropped[0]} and {len(dropped) - 1} more modules), so methods decide by another "
            f"mask than the one that is trained. Write disable_dropout=True, lora_dropout=0.0, attention_dropout=0.0."
        )


def _warn_of_filters(config: Any) -> None:
    """Warn of filters: a filtered sampler is renormalised, but log-probs and ratios are of the whole distribution."""
    defaults = {"top_p": (None, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0.0)}
    filters = [
        f"{name}={getattr(config, name)!r}" for name, values in defaults.items() if getattr(config, name) not in values
    ]
    if filters:
        logger.warning(
            f"{type(config).__name__}.{', '.join(filters)} renormalises the sampler, but the loss takes log-probs of "
            f"the whole distribution: the policy that is trained is not the one that sampled. Write top_p=1.0, top_k=0 "
            f"or add 'support_replay' and let a rollout_func return the tokens kept."
        )
