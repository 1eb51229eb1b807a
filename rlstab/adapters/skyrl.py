"""An objective as a policy loss of SkyRL, selected by name: ``trainer.algorithm.policy_loss_type=rlstab``.

SkyRL divides the advantages by the tokens of the mini-batch and calls the policy loss once for each micro-batch. The
adapter plans the optimizer step around ``PolicyWorkerBase.forward_backward``, which has the mini-batch of a rank, from
advantages without that divisor.
"""

import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlstab.adapters.evidence import distinct_hashes, hashes, signals_of
from rlstab.adapters.objective_state import keep_state
from rlstab.adapters.releases import check_release
from rlstab.adapters.setting_conflicts import misfits
from rlstab.adapters.training import Given, HostTraining, open_objective, plan_step
from rlstab.config.document import flow
from rlstab.core.batch import TokenBatch
from rlstab.core.compose import Composition
from rlstab.core.policy_outputs import PolicyOutputs
from rlstab.core.step import OptimizerStep
from rlstab.core.turns import turns_of
from rlstab.errors import ConfigError, HostError
from rlstab.extras import require
from rlstab.hosts import adapted, facts, skyrl_settings

require("skyrl", "rlstab.adapters.skyrl")

from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry  # noqa: E402  # after the check
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase  # noqa: E402  # after the check
from skyrl.backends.skyrl_train.workers.worker_utils import get_microbatch_iterator  # noqa: E402  # after the check

#: The value of ``trainer.algorithm.policy_loss_type``.
NAME = "rlstab"
_READ = ("sequences", "attention_mask", "loss_mask", "advantages", "action_log_probs")
_METHODS = ("forward_backward", "optim_step", "save_checkpoint", "load_checkpoint")


def register(objective: Given, config: Any) -> None:
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
    check_release("skyrl")
    chosen = open_objective(objective)
    adapted("skyrl").require(chosen)
    algorithm = config.trainer.algorithm
    wrong = misfits(lambda name: attrgetter(name)(algorithm), facts("skyrl")["loss"], skyrl_settings(chosen))
    lines = [
        f"trainer.algorithm.{sentence}. Write trainer.algorithm.{name}={flow(value)}."
        for name, (sentence, value) in wrong.items()
    ]
    if config.trainer.strategy != "fsdp":
        lines.append(f"trainer.strategy = {config.trainer.strategy!r}: the adapter supports only FSDP. Write fsdp.")
    if lines:
        raise ConfigError("\n  ".join(lines))
    PolicyLossRegistry.register(NAME, PolicyLoss(chosen))


class PolicyLoss(HostTraining):
    """The policy loss that SkyRL calls for each micro-batch, and hooks around its optimizer step.

    Ray sends it to each worker, where it begins with the initial state.

    Attributes:
        step: the optimizer step between ``forward_backward`` and ``optim_step``; None otherwise.
    """

    def __init__(self, objective: Composition) -> None:
        self._rlstab_open("skyrl", objective)
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
        index = step.losses
        return step.loss(index, PolicyOutputs.from_padded(step.batches[index], logprobs=log_probs.float())).loss, {}

    def forward_backward(self, theirs: Callable[..., Any], worker: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Plan the optimizer step from the mini-batch of every rank, then run SkyRL's ``forward_backward``."""
        if self.step is not None:
            raise HostError("SkyRL ran forward_backward twice before optim_step: the first was planned as all of it.")
        group, device = worker.device_mesh.get_group("dp"), next(worker.model.parameters()).device
        self._rlstab_share(device, group)
        tokens = self._rlstab_comm.sum(data["loss_mask"].sum().double()).clamp(min=1)
        repetitions: Counter[bytes] = Counter()
        cut = worker.cfg.micro_train_batch_size_per_gpu, worker.cfg.max_tokens_per_microbatch
        evidence = [
            self._batch(worker, part, float(tokens), repetitions) for part in get_microbatch_iterator(data, *cut)
        ]
        self.step = step = self._rlstab_new_step()
        try:
            plan_step(step, evidence)
            output = theirs(data, *args, **kwargs)
            step.finish()
        except BaseException:
            self.step = None
            raise
        self._rlstab_metrics.add(step)
        output.metrics.update(self._rlstab_metrics.collect())
        return output

    def _batch(self, worker: Any, part: Any, tokens: float, seen: Counter[bytes]) -> TokenBatch:
        """The evidence about a micro-batch."""
        if part.get("pixel_values") is not None:
            raise HostError("the adapter for SkyRL does not pass on images. Train a text-only model.")
        needs, device = self.objective.needs, next(worker.model.parameters()).device
        names = facts("skyrl")["columns"]
        read = [name for name in (*_READ, *names.values()) if part.get(name) is not None]
        columns = {name: part.get(name).to(device) for name in read}
        mask, width = columns["loss_mask"].bool(), part.metadata["response_length"]
        computed = {"turn": turns_of(mask)}
        if needs & {"logprobs", "entropies"}:
            worker.model.eval()
            with torch.no_grad(), torch.autocast(dtype=torch.bfloat16, device_type="cuda"):  # as SkyRL's own forward
                logprobs, output = worker.model(
                    columns["sequences"],
                    width,
                    attention_mask=columns["attention_mask"],
                    temperature=worker.cfg.algorithm.temperature,
                    return_output=True,
                    compute_entropy=True,
                )
            entropies = output["entropy"][:, -width - 1 : -1]
            computed |= {"logprobs": logprobs.float(), "entropies": entropies.float()}
        rows = list(zip(columns["sequences"].cpu(), columns["attention_mask"].bool().cpu(), strict=True))
        prompts = [row[:-width][real[:-width]].numpy().tobytes() for row, real in rows]
        return TokenBatch.from_padded(
            response_mask=mask,
            advantages=columns["advantages"] * tokens,
            sequence_ids=distinct_hashes([row[real].numpy().tobytes() for row, real in rows], seen, device),
            group_ids=hashes(prompts, device),
            **signals_of(needs, columns, names, columns["action_log_probs"], computed, host="skyrl"),
        )

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
        self._rlstab_settle(step)
        return norm

    def save_checkpoint(self, theirs: Callable[..., Any], worker: Any, ckpt_dir: str, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's checkpoint, with the state of the objective in the same folder."""
        saved = theirs(ckpt_dir, *args, **kwargs)
        if dist.get_rank() == 0:
            keep_state(_local(ckpt_dir), self.objective, self.objective_state)
        return saved

    def load_checkpoint(self, theirs: Callable[..., Any], worker: Any, ckpt_dir: str, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's checkpoint, and the state of the objective from the same folder."""
        self._rlstab_restore(_local(ckpt_dir))
        return theirs(ckpt_dir, *args, **kwargs)


def _intercept(name: str) -> None:
    """Let a policy loss of this module act around a method of SkyRL's worker; other losses see no difference."""
    method = getattr(PolicyWorkerBase, name)
    if hasattr(method, "__wrapped__"):
        return

    @wraps(method)
    def ours(worker: Any, *args: Any, **kwargs: Any) -> Any:
        loss = worker.policy_loss_fn
        if not isinstance(loss, PolicyLoss):
            return method(worker, *args, **kwargs)
        return getattr(loss, name)(partial(method, worker), worker, *args, **kwargs)

    setattr(PolicyWorkerBase, name, ours)


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
