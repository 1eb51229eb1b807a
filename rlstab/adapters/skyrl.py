"""An objective as a policy loss of SkyRL, selected by name: ``trainer.algorithm.policy_loss_type=rlstab``.

SkyRL divides the advantages by the tokens of the mini-batch and calls the policy loss once for each micro-batch. The
adapter plans the optimizer step around ``PolicyWorkerBase.forward_backward``, which has the mini-batch of a rank, from
advantages without that divisor.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial, wraps
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlstab.adapters import releases
from rlstab.adapters.checkpoint import keep_state, restore_state
from rlstab.adapters.host_signals import held_signals, unscored
from rlstab.adapters.identity import distinct_hashes, hashes
from rlstab.adapters.metrics import HostMetrics, from_ranks
from rlstab.adapters.settings import misfits
from rlstab.config import load_objective
from rlstab.config.document import flow
from rlstab.core.batch import TokenBatch
from rlstab.core.comm import Comm, LocalComm, TorchComm
from rlstab.core.compose import Composition, compose
from rlstab.core.objective import TokenObjective, check_complete
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.step import OptimizerStep
from rlstab.errors import ConfigError, HostError
from rlstab.extras import require
from rlstab.hosts import adapted, facts, skyrl_settings

require("skyrl", "rlstab.adapters.skyrl")

from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry  # noqa: E402  # after the check
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase  # noqa: E402  # after the check
from skyrl.backends.skyrl_train.workers.worker_utils import get_microbatch_iterator  # noqa: E402  # after the check

logger = logging.getLogger(__name__)
#: The value of ``trainer.algorithm.policy_loss_type``.
NAME = "rlstab"
#: SkyRL's columns by signal, each with the setting that fills it.
COLUMNS: Mapping[str, tuple[str, str]] = {
    "ref_logprobs": ("base_action_log_probs", f"SkyRL has it if you {facts('skyrl')['how']['ref_logprobs']}."),
    "rollout_logprobs": ("rollout_logprobs", "Set generator.sampling_params.logprobs=1."),
}
_READ = ("sequences", "attention_mask", "loss_mask", "advantages", "action_log_probs")
_METHODS = ("forward_backward", "optim_step", "save_checkpoint", "load_checkpoint")


def register(objective: str | Path | Mapping[str, Any] | list[Any] | TokenObjective, config: Any) -> None:
    """Register an objective as SkyRL's policy loss ``rlstab``, in the launch script, before Ray is initialized.

    Args:
        objective: path of a YAML file, what such a file holds, or a method or composition.
        config: SkyRL's configuration of the run.

    Raises:
        ConfigError: a setting that the objective replaces is set, the policy loss has another name, or the strategy is
            not FSDP.
        MissingSignal: a method reads a signal that SkyRL does not have.
        HostError: the installed SkyRL is not what the adapter was written for.
    """
    check_host()
    chosen = compose(objective if isinstance(objective, TokenObjective) else load_objective(objective))
    check_complete(chosen)
    adapted("skyrl").require(chosen)
    get, wanted = attrgetter, {**skyrl_settings(chosen)}
    wrong, write = misfits(lambda name: get(name)(config.trainer.algorithm), facts("skyrl")["loss"], wanted)
    lines = [
        f"trainer.algorithm.{sentence}. Write trainer.algorithm.{name}={flow(value)}."
        for sentence, (name, value) in zip(wrong, write.items(), strict=True)
    ]
    if config.trainer.strategy != "fsdp":
        lines.append(f"trainer.strategy = {config.trainer.strategy!r}: the adapter supports only FSDP. Write fsdp.")
    if lines:
        raise ConfigError("\n  ".join(lines))
    PolicyLossRegistry.register(NAME, PolicyLoss(chosen))


class PolicyLoss:
    """The policy loss that SkyRL calls for each micro-batch, and hooks around its optimizer step.

    Ray sends it to each worker, where it begins with the initial state.

    Attributes:
        objective: with which the policy is trained.
        state: of the objective after the last optimizer step; part of each checkpoint.
        step: the optimizer step between ``forward_backward`` and ``optim_step``; None otherwise.
    """

    def __init__(self, objective: Composition) -> None:
        self.objective, self.state = objective, objective.init_state()
        self.step: OptimizerStep | None = None
        for name in _METHODS:
            _intercept(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return PolicyLoss, (self.objective,)

    def __call__(self, log_probs: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, float]]:
        """The loss of the next micro-batch; SkyRL's other arguments were read when the step was planned."""
        step = self.step
        if step is None:
            raise HostError(
                "SkyRL called the policy loss outside of a planned optimizer step, and the adapter has not seen its "
                "mini-batch. Train with trainer.strategy=fsdp and policy_loss_type=rlstab."
            )
        if step.plan is None:  # refused: every rank runs the same backward, whose gradients are discarded
            return log_probs.sum() * 0.0, {}
        index = step.losses
        return step.loss(index, PolicyOutputs.from_padded(step.batches[index], logprobs=log_probs.float())).loss, {}

    def forward_backward(self, theirs: Callable[..., Any], worker: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Plan the optimizer step from the mini-batch of every rank, then run SkyRL's ``forward_backward``."""
        if self.step is not None:
            raise HostError("SkyRL ran forward_backward twice before optim_step: the first was planned as all of it.")
        group, device = worker.device_mesh.get_group("dp"), next(worker.model.parameters()).device
        comm: Comm = TorchComm(group, device) if dist.get_world_size(group) > 1 else LocalComm()
        tokens = comm.sum(data["loss_mask"].sum().double()).clamp(min=1)
        seen: Counter[bytes] = Counter()
        cut = worker.cfg.micro_train_batch_size_per_gpu, worker.cfg.max_tokens_per_microbatch
        evidence = [self._batch(worker, part, float(tokens), seen) for part in get_microbatch_iterator(data, *cut)]
        self.step = step = OptimizerStep(self.objective, self.state, comm)
        try:
            step.make_plan([batch for batch, _ in evidence])
            step.reports.append(unscored(self.objective.needs, evidence))
            output = theirs(data, *args, **kwargs)
            step.finish()
        except BaseException:
            self.step = None
            raise
        metrics = HostMetrics("skyrl", partial(from_ranks, group))
        metrics.add(step)
        output.metrics.update(metrics.collect())
        return output

    def _batch(self, worker: Any, part: Any, tokens: float, seen: Counter[bytes]) -> tuple[TokenBatch, Tensor]:
        """The evidence about a micro-batch, and the number of its tokens without a log-prob of the sampler."""
        if part.get("pixel_values") is not None:
            raise HostError("the adapter for SkyRL does not pass on images. Train a text-only model.")
        needs, device = self.objective.needs, next(worker.model.parameters()).device
        names = (*_READ, *(column for column, _ in COLUMNS.values()))
        columns = {name: part.get(name).to(device) for name in names if part.get(name) is not None}
        old, mask, width = columns["action_log_probs"], columns["loss_mask"].bool(), part.metadata["response_length"]
        signals, lost = held_signals(needs, columns, COLUMNS, old, host="SkyRL")
        if needs & {"logprobs", "entropies"}:
            signals |= _evidence(worker, columns, width)
        known: dict[str, Any] = {**signals}
        there = columns["attention_mask"].bool()
        ids = [row[real].cpu().numpy() for row, real in zip(columns["sequences"], there, strict=True)]
        prompts = [row[:-width][real[:-width]] for row, real in zip(columns["sequences"], there, strict=True)]
        batch = TokenBatch.from_padded(
            response_mask=mask,
            advantages=columns["advantages"] * tokens,
            old_logprobs=old,
            sequence_ids=distinct_hashes([row.tobytes() for row in ids], seen, device),
            group_ids=hashes([prompt.cpu().numpy().tobytes() for prompt in prompts], device),
            **known,
        )
        return batch, (lost & mask).count_nonzero()

    def optim_step(self, theirs: Callable[..., Any], worker: Any) -> Any:
        """SkyRL's, at the scaled learning rate; a refused or skipped step only moves the schedule."""
        step, self.step = self.step, None
        if step is None:
            return theirs()
        if not step.moves_weights:
            worker.optimizer.zero_grad()
            worker.scheduler.step()
            norm = 0.0 if step.refusal is None else math.nan
        else:
            optimizer, scaled = worker.optimizer, ExitStack()
            hooks = [  # which must return None
                optimizer.register_step_pre_hook(lambda *_: scaled.enter_context(step.scaled_learning_rate(optimizer))),
                optimizer.register_step_post_hook(lambda *_: scaled.close()),
            ]
            try:
                norm = theirs()
            finally:  # an error leaves neither the scaled rate nor the hooks behind
                scaled.close()
                for hook in hooks:
                    hook.remove()
            if norm is not None and not math.isfinite(norm):
                step.refusal = f"the gradient norm is {norm}: SkyRL skipped the optimizer step."
        if step.refusal is not None and dist.get_rank() == 0:
            logger.warning(f"an optimizer step was refused: {step.refusal}")
        self.state = step.state
        return norm

    def save_checkpoint(self, theirs: Callable[..., Any], worker: Any, ckpt_dir: str, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's checkpoint, with the state of the objective in the same folder."""
        saved = theirs(ckpt_dir, *args, **kwargs)
        if dist.get_rank() == 0:
            keep_state(_local(ckpt_dir), self.objective, self.state)
        return saved

    def load_checkpoint(self, theirs: Callable[..., Any], worker: Any, ckpt_dir: str, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's checkpoint, and the state of the objective from the same folder."""
        self.state = restore_state(_local(ckpt_dir), self.objective)
        return theirs(ckpt_dir, *args, **kwargs)


def check_host() -> None:
    """Refuse a SkyRL that the adapter does not support.

    Raises:
        HostError: it has another release or changed methods.
    """
    releases.check_release("skyrl")


def _intercept(name: str) -> None:
    """Let a policy loss of this module act around a method of SkyRL's worker; other losses see no difference."""
    theirs = getattr(PolicyWorkerBase, name)
    if hasattr(theirs, "__wrapped__"):
        return

    @wraps(theirs)
    def ours(worker: Any, *args: Any, **kwargs: Any) -> Any:
        loss = worker.policy_loss_fn
        if not isinstance(loss, PolicyLoss):
            return theirs(worker, *args, **kwargs)
        return getattr(loss, name)(partial(theirs, worker), worker, *args, **kwargs)

    setattr(PolicyWorkerBase, name, ours)


@torch.no_grad()
def _evidence(worker: Any, columns: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """``(B, T)`` log-probs and entropies of the policy at the start of the optimizer step."""
    worker.model.eval()
    with torch.autocast(dtype=torch.bfloat16, device_type="cuda"):  # as SkyRL's own forward
        logprobs, output = worker.model(
            columns["sequences"],
            width,
            attention_mask=columns["attention_mask"],
            temperature=worker.cfg.algorithm.temperature,
            return_output=True,
            compute_entropy=True,
        )
    return {"logprobs": logprobs.float(), "entropies": output["entropy"][:, -width - 1 : -1].float()}


def _local(folder: str) -> str:
    """A folder of a checkpoint on this machine or a shared disk.

    Raises:
        HostError: it is in the cloud.
    """
    if "://" in folder:
        raise HostError(
            f"the state of the objective is kept on a disk, not at {folder}. Set a local trainer.ckpt_path."
        )
    return folder
