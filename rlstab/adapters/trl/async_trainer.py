"""TRL's experimental ``AsyncGRPOTrainer`` with an objective in place of its loss.

A rollout worker samples while the trainer trains, and the ratio is that to the policy that sampled. The loop of
transformers fetches all micro-batches of an optimizer step before its first backward pass: each step is planned then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import trl
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from rlstab.adapters.evidence import ids_of_tokens
from rlstab.adapters.host_objective import defaults_of, settings_of_trl
from rlstab.adapters.releases import check_methods, how_to_install
from rlstab.adapters.training import Given, plan_step
from rlstab.adapters.trl.hooks import ObjectiveTrainer, check_loss, objective_by
from rlstab.core.batch import TokenBatch
from rlstab.core.method_settings import check_choices
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.step import OptimizerStep
from rlstab.errors import HostError
from rlstab.hosts import adapted

#: What is overridden or relied on line by line, in the one release that has it, as in ``hosts.yaml``.
METHODS = {
    "compute_loss": ("self model inputs return_outputs num_items_in_batch", "185c840bd73c"),
    "get_train_dataloader": ("self", "1ed017ea000c"),
    "get_batch_samples": ("self epoch_iterator num_batches device",),
    "_sync_weight": ("self", "da081b570683"),
}
_REFERENCE = "train with RLStabGRPOTrainer: AsyncGRPOTrainer has no reference model"
HOST = replace(
    adapted("trl"),
    name="TRL's AsyncGRPOTrainer",
    release="",
    gives=frozenset({"entropies", "rollout_logprobs", "truncated", "branch", "lag"}),
    live=frozenset({"entropies"}),
    how={"ref_logprobs": _REFERENCE},
    otherwise="train with RLStabGRPOTrainer, which can provide it",
)
_TREE = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")


class RLStabAsyncGRPOTrainer(ObjectiveTrainer, AsyncGRPOTrainer):  # type: ignore[misc]  # mypy cannot resolve trl
    """``AsyncGRPOTrainer`` whose loss is an objective; its other arguments are TRL's.

    Args:
        objective: path of a YAML file, what such a file holds, or a method or composition. None is TRL's loss with the
            ``epsilon`` and ``epsilon_high`` of AsyncGRPOConfig.
        base: ``config`` adds the methods of ``objective`` to those of TRL's loss.

    Raises:
        ConfigError: a setting of AsyncGRPOConfig that the objective replaces is set, or the engine is not
            data-parallel.
        MissingSignal: a method reads a signal that this trainer does not have, such as a reference model's.
        OutOfRange: there is no such ``base``.
        HostError: the installed TRL is not what the adapter was written for, or a class has a loss of its own.
    """

    def __init__(
        self, *args: Any, objective: Given | None = None, base: Literal["config"] | None = None, **kwargs: Any
    ) -> None:
        check_choices(RLStabAsyncGRPOTrainer.__init__, base=base)
        check_host()
        check_loss(type(self), RLStabAsyncGRPOTrainer, "compute_loss", objective)
        config = inspect.signature(AsyncGRPOTrainer.__init__).bind_partial(self, *args, **kwargs).arguments.get("args")
        names = [name for name in defaults_of("trl") if hasattr(config, name)]
        settings = settings_of_trl({name: getattr(config, name) for name in names})
        derived = objective is None or base == "config"
        chosen = objective_by(settings, objective, derived=derived, title="AsyncGRPOConfig", host=HOST)
        super().__init__(*args, **kwargs)
        cut = derived and self.args.gradient_accumulation_steps > 1
        deviations = ["tokens: TRL divides by those of each micro-batch, the objective by the step's."] if cut else []
        self._rlstab_train_by(chosen, deviations)
        self._rlstab_ends = torch.tensor(sorted(ids_of_tokens(self.eos_token_ids)))
        self._rlstab_synced: dict[int, int] = {}  # by version of the weights, the optimizer steps before it

    # -- rollouts --------------------------------------------------------------------------------------------------

    def _sync_weight(self) -> None:
        super()._sync_weight()
        self._rlstab_synced[self.model_version] = self.state.global_step

    def get_train_dataloader(self) -> Any:
        """TRL's, whose micro-batches have in addition what a :class:`_Rollouts` knows of each response."""
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
        if len(batches) > 1:
            self._rlstab_plan(step, batches, [self._rlstab_evidence(inputs) for inputs in batches])
        return batches, items

    # -- the plan --------------------------------------------------------------------------------------------------

    def _rlstab_evidence(self, inputs: Any) -> PolicyOutputs | None:
        """The policy at the start of the optimizer step; no forward if no method reads it."""
        if not self.objective.needs & {"logprobs", "entropies"}:
            return None
        self.model.train()
        checkpointing = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), self.compute_loss_context_manager(), checkpointing:
            mask = inputs["attention_mask"].bool()
            packed = {name: inputs[name][mask].unsqueeze(0) for name in ("input_ids", "position_ids", "shift_labels")}
            tree = {name: inputs[name][inputs[name] >= 0] for name in _TREE}
            tree |= zip(("tree_max_seqlen_q", "tree_max_seqlen_k"), inputs["tree_max_seqlens"][0].tolist(), strict=True)
            return _of_tokens(self.model(**packed, **tree, fused_lm_head=True), inputs)

    def _rlstab_plan(
        self, step: OptimizerStep, batches: Sequence[Any], evidence: Sequence[PolicyOutputs | None]
    ) -> None:
        parts = [self._rlstab_batch(*part) for part in zip(batches, evidence, strict=True)]
        plan_step(step, [(batch, torch.zeros(())) for batch in parts])

    def _rlstab_batch(self, inputs: Any, evidence: PolicyOutputs | None) -> TokenBatch:
        """The evidence about a micro-batch, whose tokens lie one response after the other."""
        chosen = inputs["token_index"] >= 0
        sampled, sequence = inputs["old_log_probs"][chosen], inputs["segment_id"][chosen]
        numbers, groups, synced = inputs[_COLUMN][0][inputs[_COLUMN][0, :, 0] >= 0].unbind(1)
        ends = sequence.bincount(minlength=len(numbers)).cumsum(0)
        starts = torch.nn.functional.pad(ends, (1, -1))
        tokens = inputs["shift_labels"][inputs["attention_mask"].bool()][inputs["token_index"][chosen]]
        finished = torch.isin(tokens, self._rlstab_ends.to(tokens.device))
        signals = {
            "rollout_logprobs": sampled,
            "truncated": (~finished[(ends - 1)[sequence]]).float(),
            "branch": torch.zeros_like(sampled),
            "lag": (self.state.global_step - synced)[sequence].float(),
        }
        if evidence is not None:
            signals["entropies"] = evidence.signal("entropies")
        return TokenBatch(
            old_logprobs=sampled,
            logprobs=sampled if evidence is None else evidence.logprobs,
            advantages=inputs["advantages"][chosen],
            sequence=sequence,
            position=torch.arange(len(sequence), device=sequence.device) - starts[sequence],
            sequence_ids=numbers,
            group_ids=groups,
            **{name: values for name, values in signals.items() if name in self.objective.needs},
        )

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
        live, step = _of_tokens(outputs[0], inputs), self._rlstab_step or self._rlstab_new_step()
        if step.plan is None and step.refusal is None:  # the step is this micro-batch: its live outputs are evidence
            self._rlstab_plan(step, [inputs], [live.constant()])
        loss: Tensor = step.loss(step.losses, live).loss * self.accelerator.num_processes  # ranks average gradients
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs[0].aux_loss / self.current_gradient_accumulation_steps
        return loss


def check_host() -> None:
    """Refuse a TRL whose asynchronous trainer is not the tested one: it is experimental and changes with each release.

    Raises:
        HostError: names the method.
    """
    release = f"TRL {trl.__version__}"
    checked = {"release": release, "homes": ("trl.", "transformers."), "cure": how_to_install("trl")}
    changed = check_methods(AsyncGRPOTrainer, METHODS, **checked)
    if changed:
        raise HostError(f"AsyncGRPOTrainer.{changed[0]} of {release} is not the tested one. {checked['cure']}")


#: The column that :class:`_Rollouts` adds.
_COLUMN = "rlstab_rollouts"


class _Rollouts(IterableDataset):  # type: ignore[type-arg]  # of dicts
    """TRL's rollouts, each with its number, its group, and the optimizer steps before the weights that sampled it.

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
            synced = self.synced.get(self.sample.model_version, 0)
            yield {**rollout, _COLUMN: (number, rollout["group_id"], synced)}


def _collate(collate: Callable[[Any], dict[str, Tensor]], examples: Any) -> dict[str, Tensor]:
    """TRL's micro-batch, with the column of each rank's responses, padded by -1."""
    columns = [torch.tensor([sample[_COLUMN] for sample in row.samples]) for row in examples[0]]
    return {**collate(examples), _COLUMN: pad_sequence(columns, batch_first=True, padding_value=-1)}


def _of_tokens(outputs: Any, inputs: Any) -> PolicyOutputs:
    """The outputs of TRL's head for each trained token."""
    index = inputs["token_index"][inputs["token_index"] >= 0]
    return PolicyOutputs(*(values.flatten()[index].float() for values in (outputs.log_probs, outputs.entropy)))
