"""TRL's ``GRPOTrainer`` with an objective in place of its loss.

Every decision of an optimizer step is made before its first backward pass, from the evidence of all its micro-batches
on all ranks. A step with NaN or Inf is refused, so that weights and moments of the optimizer do not change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from rlstab.adapters.checkpoint import keep_state, restore_state
from rlstab.adapters.empty_responses import with_empty_responses
from rlstab.adapters.host_correction import CORRECTION, HostCorrection
from rlstab.adapters.host_objective import check_trl_values, deviations_of, objective_of
from rlstab.adapters.host_signals import unscored
from rlstab.adapters.metrics import HostMetrics
from rlstab.adapters.settings import check_trl_settings
from rlstab.adapters.trl.engine import check_engine
from rlstab.adapters.trl.forward import forward_for, provided_by
from rlstab.adapters.trl.release import check_attributes, check_release, check_unpatched, ends_of
from rlstab.adapters.trl.reports import entropy_price, in_trls_terms, trl_report
from rlstab.adapters.trl.responses import (
    Inputs,
    Provider,
    batch_of,
    distinct_ids,
    must_forward,
    read_masks,
    response_mask,
    stamp,
    stamp_missing,
)
from rlstab.config import load_objective
from rlstab.core.batch import TokenBatch
from rlstab.core.comm import Comm, LocalComm, TorchComm
from rlstab.core.compose import Composition, compose
from rlstab.core.method_settings import check_choices
from rlstab.core.objective import State, TokenObjective, check_complete
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean
from rlstab.core.step import OptimizerStep
from rlstab.errors import ConfigError, HostError
from rlstab.hosts import own_correction
from rlstab.signals import SIGNAL_NAMES

logger = logging.get_logger(__name__)
#: The methods by which a micro-batch reaches the loss.
_TO_THE_LOSS = frozenset({"training_step", "compute_loss", "_compute_loss"})
#: A function of TRL's inputs, the evidence, the live outputs and the loss of a micro-batch.
OnPart: TypeAlias = Callable[[Inputs, TokenBatch, PolicyOutputs, Tensor], None]


class RLStabGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # mypy cannot resolve trl
    """``GRPOTrainer`` whose loss is an objective; its other arguments are TRL's.

    Args:
        objective: path of a YAML file, what such a file holds, or a method or composition. None is
            :func:`~rlstab.adapters.trl.objective_of` the GRPOConfig: TRL's loss.
        base: ``config`` adds the methods of ``objective`` to those of TRL's loss.
        head: that computes the signals of the policy. ``trl`` is TRL's fused head: log-probs and entropies. ``rlstab``
            has every signal, and a backward through the vocabulary only for tokens with a gradient. ``auto`` is TRL's
            if the objective reads nothing else.
        signals: by the name of a user-defined signal, a function from TRL's batch to ``(B, T)`` values.

    Attributes:
        objective: that is trained, with TRL's correction for vLLM if that is on.
        objective_state: after the last optimizer step; part of each checkpoint.
        last_refusal: why the last refused optimizer step was refused.
        on_part: called for each micro-batch before its backward pass.

    Raises:
        ConfigError: a setting of GRPOConfig that the objective replaces is set, a step would span generations, or the
            launcher selected an engine that is not data-parallel.
        MissingSignal: a method reads a signal that TRL does not have with these settings.
        OutOfRange: there is no such ``base`` or ``head``.
        HostError: the installed TRL is not what the adapter was written for, or a class has a loss of its own, which
            would leave the objective without effect.
    """

    def __init__(
        self,
        *args: Any,
        objective: str | Path | Mapping[str, Any] | list[Any] | TokenObjective | None = None,
        base: Literal["config"] | None = None,
        head: Literal["auto", "trl", "rlstab"] = "auto",
        signals: Mapping[str, Provider] | None = None,
        **kwargs: Any,
    ) -> None:
        check_choices(RLStabGRPOTrainer.__init__, base=base, head=head)
        check_release()
        _check_loss(type(self), objective)
        given = inspect.signature(GRPOTrainer.__init__).bind_partial(self, *args, **kwargs).arguments

        def chosen_by(config: GRPOConfig) -> Composition:
            check_trl_values(config)
            parts = [] if objective is None else [objective]
            if derived:
                parts.insert(0, objective_of(config))
            loaded = [each if isinstance(each, TokenObjective) else load_objective(each) for each in parts]
            chosen = compose(*loaded)
            if not derived:  # what TRL trains is what the user asked for
                check_complete(chosen)
            check_trl_settings(config, chosen, derived=derived)
            if config.use_liger_kernel and hasattr(GRPOTrainer, "compute_liger_loss"):  # up to TRL 1.13
                raise ConfigError(
                    "GRPOConfig.use_liger_kernel = True trains by Liger's loss, not by the objective. "
                    "Write use_liger_kernel=False."
                )
            return chosen

        derived = objective is None or base == "config"
        chosen = None if given.get("args") is None else chosen_by(given["args"])  # before the model is loaded
        super().__init__(*args, **kwargs)
        check_attributes(self)
        chosen = chosen_by(self.args) if chosen is None else chosen
        check_engine(self.accelerator)
        for sentence in deviations_of(self.args) if derived else ():
            logger.warning(f"the objective of this GRPOConfig differs from TRL's loss in one respect. {sentence}")
        self._rlstab_chosen = chosen
        corrected = self.use_vllm and self.vllm_importance_sampling_correction and own_correction(chosen) is None
        self.objective: Composition = compose(chosen, HostCorrection()) if corrected else chosen
        self._rlstab_providers = dict(signals or {})
        provided = {*provided_by(self), *self._rlstab_providers, *({CORRECTION} if corrected else ())}
        self._rlstab_forward = forward_for(self, self.objective, provided, head)
        _warn_of_dropout(self.model, self.objective)
        _warn_of_filters(self.args)
        if self.accelerator.num_processes > 1 and self.is_distributed_loading_by_transformers:
            raise HostError("the model was sharded while it was loaded (tp_plan). Load it whole, for FSDP or DDP.")
        ranks = self.accelerator.num_processes
        self._rlstab_comm: Comm = TorchComm(device=self.accelerator.device) if ranks > 1 else LocalComm()
        self._rlstab_ends = ends_of(self)
        self._rlstab_tallies = {
            mode: HostMetrics("trl", lambda rank: gather_object([rank])) for mode in ("train", "eval")
        }
        self._rlstab_step: OptimizerStep | None = None
        self._rlstab_scaled = ExitStack()  # the learning rate, around the optimizer
        self.on_part: OnPart | None = None
        self.objective_state: State = self.objective.init_state()
        self.last_refusal: str | None = None
        self.add_callback(_AroundTheOptimizer(self))

    # -- the plan --------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """TRL's, plus identities that do not depend on how the responses are cut and shuffled."""
        train = self.model.training
        return stamp(
            super()._generate_and_score_completions(inputs),
            first=self.state.global_step if train else 0,
            rank=self.accelerator.process_index,
            ranks=self.accelerator.num_processes,
            group=self.num_generations if train else self.num_generations_eval,
        )

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's; the first micro-batch of an optimizer step plans the step."""
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training and self._rlstab_step is None:
            self._rlstab_step = self._begin_step(inputs)
        return inputs

    def _new_step(self) -> OptimizerStep:
        return OptimizerStep(self.objective, self.objective_state, self._rlstab_comm)

    def _begin_step(self, first: Inputs) -> OptimizerStep:
        """The step that begins with a micro-batch; a step of one micro-batch is planned from its live outputs."""
        count, slices = self.current_gradient_accumulation_steps, self.args.steps_per_generation
        position = self._step % (slices * self.num_iterations)
        inputs = [self._buffered_inputs[(self._step + ahead) % slices] for ahead in range(count)]
        if position + count > slices * self.num_iterations or inputs[0] is not first:
            raise HostError(
                f"an optimizer step of {count} micro-batches begins at {position} in a generation of {slices} x "
                f"{self.num_iterations}: not all of it is known. Let the data set give whole generations."
            )
        step = self._new_step()
        if count > 1:  # a step may take its generation several times, with one forward for each micro-batch of it
            read_masks(inputs[:slices])
            evidence = [self._evidence(part) for part in inputs[:slices]]
            self._plan(step, inputs, [evidence[index % slices] for index in range(count)])
        return step

    def _evidence(self, inputs: Inputs) -> dict[str, Tensor]:
        """``(B, T)`` signals of the policy at the start of the optimizer step; no forward if nothing reads them."""
        needs = must_forward(inputs, self.objective)
        if not needs:
            return {}
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            signals, _ = self._rlstab_forward.signals(self.model, inputs, needs)
        return {name: signals[name] for name in {"logprobs", "entropies", *needs}}

    def _plan(self, step: OptimizerStep, inputs: list[Any], evidence: list[dict[str, Tensor]]) -> None:
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        stamp_missing(inputs, step=self.state.global_step, rank=rank, ranks=ranks)
        batches = [
            batch_of(part, signals, self.objective.needs, self._rlstab_providers, self._rlstab_ends, ids)
            for part, signals, ids in zip(inputs, evidence, distinct_ids(inputs), strict=True)
        ]
        step.make_plan([batch for batch, _ in batches])
        if step.plan is not None:
            step.plan = with_empty_responses(step.plan, step.batches, self._rlstab_comm)
        step.reports.append(unscored(self.objective.needs, batches))

    # -- the loss --------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        """The loss of one micro-batch; over micro-batches and ranks they sum to the loss of the optimizer step.

        Outside of an optimizer step, in evaluation or called by hand, a micro-batch is a separate step.
        """
        train = self.model.training
        step = (self._rlstab_step if train else None) or self._new_step()
        index = step.losses
        live, signals, aux = self._live_outputs(model, inputs, step, index)
        if step.plan is None or live is None:  # refused: every rank runs the same backward, whose gradients are dropped
            loss = signals["logprobs"].sum() * (0.0 if train else torch.nan)
        else:
            out = step.loss(index, live)
            step.reports[-1] = in_trls_terms(out.report, self.args)
            step.reports += [self._entropy(inputs, out.report, signals), trl_report(step.plan, index, live, out)]
            loss = out.loss * self.accelerator.num_processes  # ranks average gradients, and denominators are global
            if self.on_part is not None:
                self.on_part(inputs, step.batches[index], live, loss)
        mode = "train" if train else "eval"
        if aux is not None:
            parts = self.current_gradient_accumulation_steps if train else 1
            loss = loss + self.router_aux_loss_coef * aux / parts
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux.detach()).mean().item())
        if not train:
            self._rlstab_tallies["eval"].add(step)
        return loss

    def _live_outputs(
        self, model: Any, inputs: Any, step: OptimizerStep, index: int
    ) -> tuple[PolicyOutputs | None, dict[str, Tensor], Tensor | None]:
        """Live outputs, None if the step is refused; ``(B, T)`` signals that came with them; the auxiliary loss."""
        forward = self._rlstab_forward
        if step.plan is not None:
            return forward.outputs(model, inputs, step.plan, step.batches[index])
        if step.refusal is not None:
            return None, *forward.signals(model, inputs, frozenset({"logprobs"}))
        # the step is this micro-batch: its live outputs are the evidence
        read_masks([inputs])
        evidence, live = must_forward(inputs, self.objective), {"logprobs", *self.objective.live_needs}
        signals, aux = forward.signals(model, inputs, evidence | live)
        values = {name: signals[name].detach() for name in ({"logprobs", "entropies", *evidence} if evidence else ())}
        self._plan(step, [inputs], [values])
        if step.plan is None:
            return None, signals, aux
        return PolicyOutputs.from_padded(step.batches[0], **{name: signals[name] for name in live}), signals, aux

    def _entropy(self, inputs: Inputs, report: Mapping[str, Mean], signals: Mapping[str, Tensor]) -> Mapping[str, Mean]:
        """The entropy that TRL logs, if its head computed it for every token and the loss does not report it."""
        if "tokens/entropy" in report or "entropies" not in signals:
            return {}
        return {"tokens/entropy": Mean.of(signals["entropies"], response_mask(inputs))}

    # -- the optimizer step ----------------------------------------------------------------------------------------

    def _before_optimizer_step(self) -> None:
        """Refuse or scale the step; with gradients of None, weights and moments do not change.

        TRL takes a step in which nothing has a gradient: its optimizer moves by momentum and weight decay.
        """
        step = self._rlstab_step
        assert step is not None
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        step.finish(_norm(parameters))
        if step.refusal is not None:
            for parameter in parameters:
                parameter.grad = None
        self._rlstab_scaled.enter_context(step.scaled_learning_rate(self.optimizer))

    def _after_optimizer_step(self) -> None:
        """Restore the learning rate of the schedule, and settle the step."""
        step, self._rlstab_step = self._rlstab_step, None
        assert step is not None
        self._rlstab_scaled.close()
        if self.accelerator.optimizer_step_was_skipped and step.refusal is None:
            step.refusal = "the gradient scaler found gradients that are Inf or NaN, and skipped the optimizer step."
        if step.refusal is not None:
            self.last_refusal = step.refusal
            logger.warning(f"optimizer step {self.state.global_step + 1}: {step.refusal}")
        self.objective_state = step.state
        self._rlstab_tallies["train"].add(step)
        price = entropy_price(self.objective, self.objective_state)
        if price is not None:
            self.entropy_coef = price
            self._metrics["train"]["entropy_coef"].append(price)

    # -- the log: TRL's `log` may be called on only one rank, so metrics are collected where all ranks are -----------

    def _collect(self, mode: str) -> None:
        """Give TRL the metrics since the last line."""
        for name, value in self._rlstab_tallies[mode].collect().items():
            self._metrics[mode][name].append(value)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """TRL's, after all callbacks have decided whether a line is due."""
        if self.control.should_log:
            self._collect("train")
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, plus the metrics since the last line."""
        self._collect("train")
        return super()._finalize_training(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, plus the metrics of the objective over the whole evaluation."""
        output = super().evaluation_loop(*args, **kwargs)
        self._collect("eval")
        return output

    # -- the checkpoint --------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """TRL's, plus the state of the objective in every checkpoint, with ``save_only_model`` too."""
        super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir is not None and self.args.should_save:
            keep_state(output_dir, self._rlstab_chosen, self.objective_state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.objective_state = {**self.objective.init_state(), **restore_state(checkpoint, self._rlstab_chosen)}
        super()._load_optimizer_and_scheduler(checkpoint)


class _AroundTheOptimizer(TrainerCallback):
    """The public hooks on both sides of ``optimizer.step()``."""

    def __init__(self, trainer: RLStabGRPOTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_unpatched()
        self.trainer._rlstab_step = None  # left by an exception in the last run
        self.trainer._rlstab_scaled.close()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._before_optimizer_step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._after_optimizer_step()


def _check_loss(cls: type, objective: Any) -> None:
    """Refuse a loss that a class overrides, where an objective was given or the class would not be called.

    A method that calls what it overrides is no other loss.

    Raises:
        HostError: names the class.
    """
    adapter, host = (cls.__mro__.index(each) for each in (RLStabGRPOTrainer, GRPOTrainer))
    for index, each in enumerate(cls.__mro__[:host]):
        for name in _TO_THE_LOSS & vars(each).keys() if index != adapter else ():
            code = getattr(inspect.unwrap(vars(each)[name]), "__code__", None)
            passed_on = _TO_THE_LOSS & set(getattr(code, "co_names", ()))
            if index > adapter and name == "_compute_loss":  # the adapter's is called instead
                lost, cure = objective is None, f"Name {each.__name__} before RLStabGRPOTrainer, or give an objective"
            else:
                lost, cure = objective is not None and not passed_on, "Remove the objective, or the override"
            if lost:
                what = "which" if objective is None else "so the objective"
                raise HostError(f"{each.__name__} overrides {name}, {what} would have no effect. {cure}.")


def _warn_of_dropout(model: torch.nn.Module, objective: TokenObjective) -> None:
    """Warn of dropout: each forward draws a new mask, so that of the evidence is not that of the loss."""
    dropped = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, torch.nn.Dropout) and module.p > 0) or getattr(module, "attention_dropout", 0.0) > 0
    ]
    if dropped and objective.needs & SIGNAL_NAMES:
        logger.warning(
            f"the policy has dropout ({dropped[0]} and {len(dropped) - 1} more modules), so methods decide by another "
            f"mask than the one that is trained. Write disable_dropout=True, lora_dropout=0.0, attention_dropout=0.0."
        )


def _warn_of_filters(config: GRPOConfig) -> None:
    """Warn of filters: a filtered sampler is renormalised, but log-probs and ratios are of the whole distribution."""
    off = {"top_p": (None, 1.0), "top_k": (None, 0, -1), "min_p": (None, 0.0)}
    filters = [
        f"{name}={getattr(config, name)!r}" for name, values in off.items() if getattr(config, name) not in values
    ]
    if filters:
        logger.warning(
            f"GRPOConfig.{', '.join(filters)} renormalises the sampler, but the loss takes log-probs of the whole "
            f"distribution: the policy that is trained is not the one that sampled. Write top_p=1.0, top_k=0."
        )


def _norm(parameters: list[Tensor]) -> Tensor:
    """The norm of all gradients together, over all ranks if they are sharded."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total: Any = torch.nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
    norm: Tensor = total.full_tensor() if hasattr(total, "full_tensor") else total
    return norm
