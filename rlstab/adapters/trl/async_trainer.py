"""TRL's experimental ``AsyncGRPOTrainer`` with an objective in place of its loss.

A rollout worker samples while the trainer trains, and the ratio is that to the policy that sampled. The loop of
transformers fetches all micro-batches of an optimizer step before its first backward pass: each step is planned then.
"""

import inspect
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import trl
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.utils.data import IterableDataset
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl.experimental.async_grpo.packing import TREE_ATTENTION
from trl.models.utils import disable_gradient_checkpointing, prepare_fsdp
from trl.trainer.utils import add_fused_lm_head, create_model_from_path, get_config_model_id, pad

from rlstab.adapters.host_objective import defaults_of, settings_of_trl
from rlstab.adapters.releases import check_methods, how_to_install
from rlstab.adapters.training import Given
from rlstab.adapters.trl.hooks import ObjectiveTrainer, check_loss, objective_by
from rlstab.adapters.trl.responses import (
    COLUMNS,
    GROUP_IDS,
    REWARDS,
    SAMPLED,
    SEQUENCE_IDS,
    Inputs,
    Provider,
    response_mask,
)
from rlstab.core.method_settings import check_choices
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.errors import HostError
from rlstab.hosts import adapted, facts
from rlstab.signals import SIGNAL_NAMES

HOST = replace(
    adapted("trl"),
    name="TRL's AsyncGRPOTrainer",
    gives=frozenset({"entropies", "ref_logprobs", "rollout_logprobs", "truncated", "branch", "turn"}),
    live=frozenset({"entropies"}),
    how={},
    otherwise=f"{adapted('trl').otherwise}, or train with RLStabGRPOTrainer",
    section="AsyncGRPOConfig",
    settings=lambda objective: {},
)
_TREE = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")


class RLStabAsyncGRPOTrainer(ObjectiveTrainer, AsyncGRPOTrainer):  # type: ignore[misc]  # mypy cannot resolve trl
    """``AsyncGRPOTrainer`` whose loss is an objective; its other arguments are TRL's.

    Args:
        objective: path of a YAML file, what such a file holds, or a method or composition. None is TRL's loss with the
            ``epsilon`` and ``epsilon_high`` of AsyncGRPOConfig.
        base: ``config`` adds the methods of ``objective`` to those of TRL's loss.
        signals: a function for each user-defined signal by name, from the responses, by the names of the columns of
            ``GRPOTrainer``, to ``(B, T)`` values.

    Attributes:
        ref_model: the model that training began with, if a method reads its log-probs and PEFT has not kept it.

    Raises:
        ConfigError: a setting of AsyncGRPOConfig that the objective replaces is set, or the engine is not
            data-parallel.
        MissingSignal: a method reads a signal that this trainer does not have.
        OutOfRange: there is no such ``base``.
        HostError: the installed TRL is not what the adapter was written for, or a class has a loss of its own.
    """

    def __init__(
        self,
        *args: Any,
        objective: Given | None = None,
        base: Literal["config"] | None = None,
        signals: Mapping[str, Provider] | None = None,
        **kwargs: Any,
    ) -> None:
        check_choices(RLStabAsyncGRPOTrainer.__init__, base=base)
        check_host()
        check_loss(type(self), RLStabAsyncGRPOTrainer, "compute_loss", objective)
        config = inspect.signature(AsyncGRPOTrainer.__init__).bind_partial(self, *args, **kwargs).arguments.get("args")
        names = [name for name in defaults_of("trl") if hasattr(config, name)]
        settings = settings_of_trl({name: getattr(config, name) for name in names})
        derived = objective is None or base == "config"
        chosen = objective_by(settings, objective, derived=derived, host=HOST)
        providers = {"lag": self._rlstab_lag, **(signals or {})}
        replace(HOST, gives=HOST.gives | providers.keys()).require(chosen)
        super().__init__(*args, **kwargs)
        cut = derived and self.args.gradient_accumulation_steps > 1
        deviations = ["tokens: TRL divides by those of each micro-batch, the objective by the step's."] if cut else []
        self._rlstab_train_by(chosen, deviations, providers)
        self._rlstab_synced: dict[int, int] = {}  # by version of the weights, the optimizer steps before it
        self.ref_model = None
        if "ref_logprobs" in chosen.needs and not is_peft_model(self.model):
            self.ref_model = self._rlstab_reference()

    # -- rollouts --------------------------------------------------------------------------------------------------

    def _sync_weight(self) -> None:
        super()._sync_weight()
        self._rlstab_synced[self.model_version] = self.state.global_step

    def get_train_dataloader(self) -> Any:
        """TRL's, whose micro-batches have in addition the responses as ``GRPOTrainer`` has them."""
        loader = super().get_train_dataloader()
        base = loader.base_dataloader
        if self.accelerator.is_main_process:  # the others are sent their rows
            base.dataset.dataset = _Rollouts(base.dataset.dataset, self._rlstab_synced)
        base.collate_fn = partial(_collate, base.collate_fn)
        return loader

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The micro-batches of an optimizer step, which is planned here if it has several."""
        batches, items = super().get_batch_samples(*args, **kwargs)
        self._rlstab_step = step = self._rlstab_new_step()
        for inputs in batches:
            count = int((inputs[_RESPONSES][SEQUENCE_IDS] >= 0).sum())  # the rest pads to the rank with the most
            inputs[_RESPONSES] = {name: values[0, :count] for name, values in inputs[_RESPONSES].items()}
            if "ref_logprobs" in self.objective.needs:
                inputs[_RESPONSES][COLUMNS["ref_logprobs"]] = self._rlstab_signals(inputs, reference=True)["logprobs"]
        if len(batches) > 1:
            needs = self.objective.needs & SIGNAL_NAMES
            evidence = [self._rlstab_signals(inputs) if needs else {} for inputs in batches]
            self._rlstab_plan(step, [inputs[_RESPONSES] for inputs in batches], evidence)
        return batches, items

    def _rlstab_lag(self, responses: Inputs) -> Tensor:
        lag: Tensor = self.state.global_step - responses[SAMPLED]
        return lag[:, None].expand(responses["completion_ids"].shape).float()

    # -- forwards without gradient ---------------------------------------------------------------------------------

    def _rlstab_reference(self) -> Any:
        """The model that training begins with, loaded and prepared as ``GRPOTrainer`` does."""
        options = {"dtype": self.args.dtype, "trust_remote_code": self.args.trust_remote_code}
        options |= self.args.model_init_kwargs or {}
        path = get_config_model_id(self.model.config)
        model = create_model_from_path(path, device_map=None, attn_implementation=TREE_ATTENTION, **options)
        add_fused_lm_head(model, temperature=self.temperature, outputs=("log_probs", "entropy"))
        if self.is_fsdp_enabled:
            return prepare_fsdp(model, self.accelerator)
        return self.accelerator.prepare_model(model, evaluation_mode=True)

    @torch.no_grad()
    def _rlstab_signals(self, inputs: Any, *, reference: bool = False) -> dict[str, Tensor]:
        """``(B, T)`` log-probs and entropies of the policy at the start of the optimizer step, or of the reference."""
        self.model.train()
        model = self.ref_model if reference and self.ref_model is not None else self.model
        by_peft = reference and model is self.model
        adapter = self.accelerator.unwrap_model(model).disable_adapter() if by_peft else nullcontext()
        checkpointing = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with self.compute_loss_context_manager(), checkpointing, adapter:
            mask = inputs["attention_mask"].bool()
            packed = {name: inputs[name][mask].unsqueeze(0) for name in ("input_ids", "position_ids", "shift_labels")}
            tree = {name: inputs[name][inputs[name] >= 0] for name in _TREE}
            tree |= zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), inputs["tree_max_seqlens"][0].tolist(), strict=True)
            return _padded(_of_tokens(model(**packed, **tree, fused_lm_head=True), inputs), inputs)

    # -- the loss --------------------------------------------------------------------------------------------------

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The loss of one micro-batch; over micro-batches and ranks they sum to the loss of the optimizer step.

        TRL's runs the forward and logs; its loss is dropped.
        """
        outputs: list[Any] = []

        def forward(**arguments: Any) -> Any:
            outputs.append(model(**arguments))
            return outputs[0]

        super().compute_loss(forward, inputs)
        live, step = _of_tokens(outputs[0], inputs), self._rlstab_step
        assert step is not None
        if step.plan is None and step.refusal is None:  # the step is this micro-batch: its live outputs are evidence
            self._rlstab_plan(step, [inputs[_RESPONSES]], [_padded(live.constant(), inputs)])
        loss = self._rlstab_loss(step, inputs[_RESPONSES], live)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs[0].aux_loss / self.current_gradient_accumulation_steps
        return loss


def check_host() -> None:
    """Refuse a TRL whose asynchronous trainer is not the tested one: it is experimental and changes with each release.

    Raises:
        HostError: names the method.
    """
    release, cure = f"TRL {trl.__version__}", how_to_install("trl")
    for owner, methods in facts("trl")["of_async_trainer"].items():
        trainer = pkgutil.resolve_name(owner)
        for name in check_methods(trainer, methods, release=release, homes=("trl.", "transformers."), cure=cure):
            raise HostError(f"{trainer.__name__}.{name} of {release} is not the tested one. {cure}")


#: The key of the responses in a micro-batch of TRL, by the names of those of ``GRPOTrainer``.
_RESPONSES = "rlstab_responses"
#: Of TRL's samples by token, and what :class:`_Rollouts` adds to them.
_TOKENS = ("input_ids", "completion_mask", "old_log_probs")
_OF_A_RESPONSE = (SEQUENCE_IDS, GROUP_IDS, "advantages", REWARDS, SAMPLED)


class _Rollouts(IterableDataset):  # type: ignore[type-arg]  # of dicts
    """TRL's rollouts, each with its number, its reward, and the optimizer steps before the weights that sampled it.

    The number is its place in the queue, so that random masks do not depend on how responses are packed into rows.
    """

    def __init__(self, rollouts: Any, synced: dict[int, int]) -> None:
        self.rollouts, self.queue, self.synced = rollouts, rollouts.queue, synced
        rollouts.queue = self  # what it yields next is the sample that it took last

    def get(self, *args: Any, **kwargs: Any) -> Any:
        self.sample = self.queue.get(*args, **kwargs)
        return self.sample

    def qsize(self) -> int:
        return int(self.queue.qsize())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, rollout in enumerate(self.rollouts):
            named = {SEQUENCE_IDS: number, GROUP_IDS: rollout["group_id"], "advantages": rollout["advantage"]}
            named |= {REWARDS: rollout["metrics"].get("reward", math.nan)}
            yield {**rollout, **named, SAMPLED: self.synced.get(self.sample.model_version, 0)}


def _collate(collate: Callable[[Any], dict[str, Any]], examples: Any) -> dict[str, Any]:
    """TRL's micro-batch, with the responses of each rank; ids are -1 where another rank has more responses."""
    ranks = [_responses(row.samples) for row in examples[0]]
    columns = {name: [columns[name] for columns in ranks] for name in ranks[0]}
    padded = {name: pad(values, padding_value=-(name == SEQUENCE_IDS)) for name, values in columns.items()}
    return {**collate(examples), _RESPONSES: padded}


def _responses(samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """The responses of a rank, by the names of ``GRPOTrainer``'s columns; each goes on from its first trained token.

    The worker masks what a tool or an environment answered in between.
    """
    rows = []
    for sample in samples:
        ids, mask, logprobs = map(torch.as_tensor, (sample[name] for name in _TOKENS))
        start = max(1, int(mask.argmax()))  # nothing predicts the first token
        parts = {"prompt": ids[:start], "completion": ids[start:]}
        row = {f"{name}_ids": part for name, part in parts.items()}
        row |= {f"{name}_mask": torch.ones_like(part) for name, part in parts.items()}
        row |= dict.fromkeys(("old_per_token_logps", COLUMNS["rollout_logprobs"]), logprobs[start:].float())
        rows.append({**row, "tool_mask": mask[start:]})
    columns = {name: pad([row[name] for row in rows]) for name in rows[0]}
    return columns | {name: torch.tensor([sample[name] for sample in samples]) for name in _OF_A_RESPONSE}


def _of_tokens(outputs: Any, inputs: Any) -> PolicyOutputs:
    """The outputs of TRL's head for each trained token."""
    index = inputs["token_index"][inputs["token_index"] >= 0]
    return PolicyOutputs(*(values.flatten()[index].float() for values in (outputs.log_probs, outputs.entropy)))


def _padded(outputs: PolicyOutputs, inputs: Any) -> dict[str, Tensor]:
    """``(B, T)`` log-probs and entropies, of outputs for each trained token."""
    mask, values = response_mask(inputs[_RESPONSES]), vars(outputs).items()
    return {
        name: value.new_zeros(mask.shape).masked_scatter(mask, value) for name, value in values if value is not None
    }
