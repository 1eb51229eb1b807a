"""The two forwards that give signals of the policy: by TRL's fused head, or by rlstab's head."""

import functools
import inspect
import types
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging
from trl import GRPOTrainer

from rlstab.adapters.trl.responses import SUPPORT, Inputs, mask_on_cpu
from rlstab.core.batch import BASICS, TokenBatch, layout_of
from rlstab.core.compose import Composition
from rlstab.core.devices import sent
from rlstab.core.plan import Plan
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.errors import ConfigError
from rlstab.hosts import adapted
from rlstab.models.vocabulary_head import embeds_the_vocabulary, find_head
from rlstab.signals import SIGNAL_NAMES, TokenSignals

logger = logging.get_logger(__name__)
#: TRL's method for log-probs and entropies, which a subclass may override; and what TRL 1.14 calls there by **kwargs.
_FORWARD, _PASSED_ON = "_get_per_token_logps_and_entropies", "_full_logits_logps"
#: Inputs of a text model other than its tokens.
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


class TRLForward:
    """TRL's forward: log-probs and entropies of every token by its fused head, with all other inputs of the model.

    Attributes:
        gives: signals of the evidence that it can compute.
        live: outputs that it can differentiate in addition to the log-probs.
    """

    gives = frozenset({"entropies"})
    live = frozenset({"entropies"})

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        #: inputs that TRL passes from a micro-batch to the model, such as images; an override may take **kwargs
        self.passed = {
            name
            for base in type(trainer).__mro__
            for method in (_FORWARD, _PASSED_ON)
            if method in vars(base)
            for name in inspect.signature(inspect.unwrap(vars(base)[method])).parameters
            if name not in ("self", "model", "input_ids", "attention_mask")
        }

    def signals(self, model: Any, inputs: Inputs, needs: Set[str]) -> tuple[dict[str, Tensor], Tensor | None]:
        """``(B, T)`` signals by name, and the load-balancing loss of a mixture of experts."""
        trainer = self.trainer
        logprobs, entropies, aux = trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=trainer.aux_loss_enabled and torch.is_grad_enabled(),
            **{name: inputs[name] for name in self.passed if name in inputs},
        )
        return {"logprobs": logprobs, "entropies": entropies}, aux


class OwnForward:
    """rlstab's head after the model's forward, so that wrappers keep their hooks: it has every signal, and a backward
    through the vocabulary only for tokens with a gradient.
    """

    gives = SIGNAL_NAMES - {"logprobs", "log_support_mass"}
    live = frozenset({"entropies", "log_kept_mass", "log_support_mass"})

    def __init__(self, trainer: GRPOTrainer, model: PreTrainedModel, options: Mapping[str, float]) -> None:
        if trainer._is_vlm or trainer.aux_loss_enabled:
            feature = "images" if trainer._is_vlm else "a load-balancing loss"
            raise ConfigError(f"rlstab's head does not pass on {feature}. Write head='trl', or take another model.")
        if not add_signals(model, trainer.temperature, wide=trainer.args.cast_lm_head_to_fp32):
            head = type(model.get_output_embeddings())
            by_peft = head.__module__.startswith("peft.")
            owner = f"{head.__name__} of PEFT" if by_peft else type(model).__name__
            fix = "leave the head out of modules_to_save" if by_peft else "take another model"
            raise ConfigError(
                f"the logits of {owner} are more than a product of hidden states and a weight. Write head='trl', which "
                f"has log-probs and entropies, and remove methods that read other signals; or {fix}."
            )
        if getattr(type(trainer), _FORWARD) is not getattr(GRPOTrainer, _FORWARD):
            logger.warning(f"{type(trainer).__name__} overrides {_FORWARD}, which only head='trl' calls.")
        self.trainer, self.options = trainer, dict(options)

    def signals(self, model: Any, inputs: Inputs, needs: Set[str]) -> tuple[dict[str, Tensor], Tensor | None]:
        return self._padded(model, inputs, mask_on_cpu(inputs), {"logprobs", "entropies", *needs}), None

    def outputs(self, model: Any, inputs: Inputs, plan: Plan, which: TokenBatch) -> PolicyOutputs:
        """The live outputs for the tokens of a planned part: computed where they have a gradient."""
        rows, mask = plan.part(which).live_here or plan.live_rows(which), mask_on_cpu(inputs)
        is_live = torch.stack(list(rows.values())).any(0)
        where = torch.zeros_like(mask).masked_scatter(mask, is_live)
        where[0, 0] |= ~is_live.any()  # every rank runs a forward and a backward, even without tokens
        live_rows = (
            {name: live[is_live] for name, live in rows.items() if name != "logprobs"} if is_live.any() else None
        )
        signals = self._padded(model, inputs, where, rows.keys(), live_rows)
        constants = {name: torch.zeros_like(which.logprobs) for name in rows} | {"logprobs": which.logprobs}
        packed = {name: values.reshape(-1)[layout_of(which).index] for name, values in signals.items()}
        zero, is_live = sum(values.sum() * 0.0 for values in signals.values()), sent(is_live, which.logprobs.device)
        outputs = {name: torch.where(is_live, packed[name], constants[name]) + zero for name in rows}
        return PolicyOutputs(**outputs)

    def _padded(
        self, model: Any, inputs: Inputs, where: Tensor, needs: Set[str], rows: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """``(B, T)`` signals where the ``(B, T)`` bool on the CPU is True, 0 elsewhere."""
        index = sent(where.reshape(-1).nonzero().squeeze(-1), inputs["completion_ids"].device)
        with self.trainer.accelerator.autocast():
            signals = model(
                input_ids=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                **{name: inputs[name] for name in _TOKEN_TYPES if inputs.get(name) is not None},
                rlstab={
                    "length": where.shape[1],
                    "index": index,
                    "ids": inputs["completion_ids"].reshape(-1)[index],
                    "needs": frozenset(needs),
                    "min_p": self.options.get("min_p"),
                    "rows": rows,
                    "support": inputs[SUPPORT].flatten(0, 1)[index] if SUPPORT in inputs else None,
                },
            )
        return {
            name: values.new_zeros(where.numel()).index_copy(0, index, values).view(where.shape)
            for name, values in signals.items()
        }


Forward: TypeAlias = TRLForward | OwnForward


def forward_for(trainer: GRPOTrainer, objective: Composition, provided: Set[str], head: str = "auto") -> Forward:
    """The forward that computes the signals which an objective reads and nothing else provides.

    Raises:
        MissingSignal: names the method, the signal, and what to change.
        ConfigError: the logits of the model do not allow the head that this takes.
    """
    needs, live = objective.needs - BASICS - provided, objective.live_needs
    if head == "auto":
        enough = needs <= TRLForward.gives and live <= TRLForward.live
        head = "rlstab" if not enough and needs <= OwnForward.gives else "trl"
    chosen: type[Forward] = TRLForward if head == "trl" else OwnForward
    named = f"TRL with this GRPOConfig and head='{head}'"
    gives, outputs = frozenset(provided) | chosen.gives, chosen.live
    if trainer.rollout_func is None:
        outputs -= {"log_support_mass"}  # TRL's own generation keeps no support
    replace(adapted("trl"), name=named, release="", gives=gives, live=outputs).require(objective)
    if "log_support_mass" in live and "ref_logprobs" in objective.needs:
        raise ConfigError(
            "TRL's reference log-probs are of the whole vocabulary, and 'support_replay' compares log-probs over the "
            "tokens that the sampler kept. Remove what reads the reference, or use rlstab's trainer."
        )
    if chosen is TRLForward:
        if "entropies" in live:
            trainer._entropy_bonus_enabled = True  # before TRL 1.16, entropies have a gradient only with TRL's bonus
        return TRLForward(trainer)
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return OwnForward(trainer, base, objective.signal_options)


def add_signals(model: PreTrainedModel, temperature: float, *, wide: bool = False) -> bool:
    """Let ``model(..., rlstab={...})`` return signals of some tokens instead of logits; other calls do not change.

    Args:
        model: a causal language model, before anything wraps it.
        temperature: divides the logits.
        wide: whether the products of the head are float32, even in autocast.

    Returns:
        False if the logits are more than a product of hidden states and a weight; then the model is not changed.
    """
    head = find_head(model)
    if head is None:
        return False
    before, embedded = model.forward, embeds_the_vocabulary(model)

    @functools.wraps(type(model).forward)  # `generate` inspects its parameters
    def forward(self: Any, *args: Any, rlstab: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
        if rlstab is None:
            return before(*args, **kwargs)
        hidden = self.base_model(*args, use_cache=False, **kwargs).last_hidden_state
        hidden = hidden[:, -rlstab["length"] - 1 : -1]
        hidden = hidden.reshape(-1, hidden.shape[-1])[rlstab["index"]]
        options = {name: rlstab[name] for name in ("needs", "min_p", "rows", "support")}
        with torch.autocast(hidden.device.type, enabled=torch.is_autocast_enabled(hidden.device.type) and not wide):
            kind = torch.float32 if wide else None
            checked = {"temperature": temperature, "check_ids": not embedded or rlstab["support"] is not None}
            signals: TokenSignals = head.signals(hidden, rlstab["ids"], kind, **checked, **options)
        return {name: values for name, values in vars(signals).items() if values is not None}

    model.forward = types.MethodType(forward, model)
    return True
