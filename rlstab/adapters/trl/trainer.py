"""TRL's ``GRPOTrainer`` with an objective in place of its loss.

Every decision of an optimizer step is made before its first backward pass, from the evidence of all its micro-batches
on all ranks. A step with NaN or Inf is refused, so that weights and moments of the optimizer do not change.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from rlstab.adapters.host_correction import CORRECTION
from rlstab.adapters.host_objective import deviations_of
from rlstab.adapters.training import Given
from rlstab.adapters.trl.heads import OwnForward, forward_for
from rlstab.adapters.trl.hooks import ObjectiveTrainer, check_loss, objective_by
from rlstab.adapters.trl.release import check_attributes, check_release
from rlstab.adapters.trl.reports import entropy_price, in_trls_terms, trl_report
from rlstab.adapters.trl.responses import (
    COLUMNS,
    SUPPORT,
    Inputs,
    Provider,
    must_forward,
    padded_support,
    read_masks,
    response_mask,
    stamp,
)
from rlstab.core.method_settings import check_choices
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.stats import Mean
from rlstab.core.step import OptimizerStep
from rlstab.core.turns import turn_rewards_of
from rlstab.errors import ConfigError, HostError
from rlstab.hosts import own_correction


class RLStabGRPOTrainer(ObjectiveTrainer, GRPOTrainer):  # type: ignore[misc]  # mypy cannot resolve trl
    """``GRPOTrainer`` whose loss is an objective; its other arguments are TRL's.

    Args:
        objective: path of a YAML file, what such a file holds, or a method or composition. None is
            :func:`~rlstab.adapters.trl.objective_of` the GRPOConfig: TRL's loss.
        base: ``config`` adds the methods of ``objective`` to those of TRL's loss.
        head: the one that computes the signals of the policy. ``trl`` is TRL's fused head: log-probs and entropies.
            ``rlstab`` has every signal, and a backward through the vocabulary only for tokens with a gradient.
            ``auto`` is TRL's if the objective reads nothing else.
        signals: a function from TRL's batch to ``(B, T)`` values for each user-defined signal, by name.

    Attributes:
        objective: the one that is trained, with TRL's correction for vLLM if that is on.
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
        objective: Given | None = None,
        base: Literal["config"] | None = None,
        head: Literal["auto", "trl", "rlstab"] = "auto",
        signals: Mapping[str, Provider] | None = None,
        **kwargs: Any,
    ) -> None:
        check_choices(RLStabGRPOTrainer.__init__, base=base, head=head)
        check_release()
        check_loss(type(self), RLStabGRPOTrainer, "_compute_loss", objective)
        arguments = inspect.signature(GRPOTrainer.__init__).bind_partial(self, *args, **kwargs).arguments
        derived = objective is None or base == "config"
        config = arguments.get("args") or GRPOConfig()
        chosen = objective_by(config, objective, derived=derived)  # before the model is loaded
        if config.use_liger_kernel and hasattr(GRPOTrainer, "compute_liger_loss"):  # up to TRL 1.13
            raise ConfigError(
                "GRPOConfig.use_liger_kernel = True trains by Liger's loss, not by the objective. "
                "Write use_liger_kernel=False."
            )
        super().__init__(*args, **kwargs)
        check_attributes(self)
        corrected = self.use_vllm and self.vllm_importance_sampling_correction and own_correction(chosen) is None
        self._rlstab_train_by(chosen, deviations_of(self.args) if derived else (), signals or {}, corrected=corrected)
        provided = {"truncated", "branch", "turn", *self._rlstab_providers, *({CORRECTION} if corrected else ())}
        provided |= {"ref_logprobs"} if self.beta != 0.0 else set()
        provided |= {"rollout_logprobs"} if self.use_vllm or self.rollout_func is not None else set()
        # whether they hold rewards of turns is known when they return
        makes_turns = self.rollout_func is not None or getattr(self, "environment_factories", None)
        provided |= {"turn_reward"} if makes_turns else set()
        self._rlstab_forward = forward_for(self, self.objective, provided, head)
        if self.accelerator.num_processes > 1 and self.is_distributed_loading_by_transformers:
            raise HostError("the model was sharded while it was loaded (tp_plan). Load it whole, for FSDP or DDP.")

    # -- the plan --------------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """TRL's, plus columns, and identities that do not depend on how the responses are cut and shuffled."""
        train = self.model.training
        generated = super()._generate_and_score_completions(inputs)
        if "turn_reward" in self.objective.needs - self._rlstab_providers.keys():
            environments = getattr(self, "environments", None) or ()
            rewards = [getattr(environment, "turn_rewards", None) for environment in environments]
            rewards = rewards or [example.get("turn_rewards") for example in inputs]  # the columns of a rollout_func
            if any(earned is not None for earned in rewards):
                generated[COLUMNS["turn_reward"]] = turn_rewards_of(rewards, response_mask(generated))
        if "log_support_mass" in self.objective.live_needs:  # TRL adds the columns of a rollout_func to its inputs
            generated[SUPPORT] = padded_support(inputs, generated["completion_ids"])
        return stamp(
            generated,
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
        step = self._rlstab_new_step()
        if count > 1:  # a step may take its generation several times, with one forward for each micro-batch of it
            read_masks(inputs[:slices])
            evidence = [self._evidence(part) for part in inputs[:slices]]
            self._rlstab_plan(step, inputs, [evidence[index % slices] for index in range(count)])
        return step

    def _evidence(self, inputs: Inputs) -> dict[str, Tensor]:
        """``(B, T)`` signals of the policy at the start of the optimizer step; no forward if nothing reads them."""
        needs = must_forward(inputs, self.objective)
        if not needs:
            return {}
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            signals, _ = self._rlstab_forward.signals(self.model, inputs, needs)
        return {name: signals[name] for name in {"logprobs", "entropies", *needs}}

    # -- the loss --------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        """The loss of one micro-batch; over micro-batches and ranks they sum to the loss of the optimizer step.

        Outside of an optimizer step, in evaluation or called by hand, a micro-batch is a separate step.
        """
        train = self.model.training
        step = (self._rlstab_step if train else None) or self._rlstab_new_step()
        index = step.losses
        live, signals, aux = self._live_outputs(model, inputs, step, index)
        loss = self._rlstab_loss(step, inputs, live)
        if step.plan is not None:
            report = step.reports[-1] = in_trls_terms(step.reports[-1], self.args)
            step.reports.append(trl_report(step.plan, index, live))
            if "tokens/entropy" not in report and "entropies" in signals:  # TRL's head has it of every token
                step.reports.append({"tokens/entropy": Mean.of(signals["entropies"], response_mask(inputs))})
        elif not train:
            loss = loss * torch.nan
        mode = "train" if train else "eval"
        if aux is not None:
            parts = self.current_gradient_accumulation_steps if train else 1
            loss = loss + self.router_aux_loss_coef * aux / parts
            self._metrics[mode]["aux_loss"].append(self.accelerator.gather_for_metrics(aux.detach()).mean().item())
        if not train:
            self._rlstab_eval_metrics.add(step)
        return loss

    def _live_outputs(
        self, model: Any, inputs: Any, step: OptimizerStep, index: int
    ) -> tuple[PolicyOutputs, dict[str, Tensor], Tensor | None]:
        """Live outputs; ``(B, T)`` signals that came with them; the auxiliary loss."""
        forward, is_planned_here = self._rlstab_forward, step.plan is None and step.refusal is None
        if step.plan is not None and isinstance(forward, OwnForward):
            return forward.outputs(model, inputs, step.plan, step.batches[index]), {}, None
        live, evidence = {"logprobs", *self.objective.live_needs}, frozenset[str]()
        if is_planned_here:  # the step is this micro-batch: its live outputs are the evidence
            read_masks([inputs])
            evidence = must_forward(inputs, self.objective)
        signals, aux = forward.signals(model, inputs, evidence | live)
        if is_planned_here:
            names = ("logprobs", "entropies", *evidence) if evidence else ()
            self._rlstab_plan(step, [inputs], [{name: signals[name].detach() for name in names}])
        if step.plan is None:  # refused: every rank runs the same backward, whose gradients are dropped
            return PolicyOutputs(signals["logprobs"].reshape(-1)), signals, aux
        return PolicyOutputs.from_padded(step.batches[index], **{name: signals[name] for name in live}), signals, aux

    def _rlstab_after_step(self) -> None:
        """Settle the step, and give TRL the coefficient of entropy in the next one."""
        super()._rlstab_after_step()
        price = entropy_price(self.objective, self.objective_state)
        if price is not None:
            self.entropy_coef = price
            self._metrics["train"]["entropy_coef"].append(price)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, plus the metrics of the objective over the whole evaluation."""
        output = super().evaluation_loop(*args, **kwargs)
        self._rlstab_log("eval", self._rlstab_eval_metrics)
        return output
