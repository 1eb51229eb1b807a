"""SkyRL's real worker and trainer on a CPU: SkyRL trains only on GPUs, and here takes a CPU for one."""

import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch

from tests.adapters import jobs
from tests.adapters.jobs import CHAIN, moments, response, scored, weights, whole

os.environ.update({**jobs.QUIET, "RAY_USAGE_STATS_ENABLED": "0"})
# a package that SkyRL imports lies in a folder of its wheel
sys.path.append(str(distribution("skyrl").locate_file("skyrl-gym")))
for _name in ("flash_attn", "flash_attn.bert_padding"):  # imported, and called only on a GPU
    _module: Any = types.ModuleType(_name)
    _module.__spec__ = importlib.machinery.ModuleSpec(_name, None)
    _module.pad_input = _module.unpad_input = None
    sys.modules[_name] = _module

_mesh = torch.distributed.device_mesh.init_device_mesh


def _cpu_mesh(kind: str, *args: Any, **kwargs: Any) -> Any:
    return _mesh("cpu", *args, **kwargs)


# of `torch` alone what SkyRL's worker calls
torch.distributed.device_mesh.init_device_mesh = _cpu_mesh
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *_: None
_empty = torch.empty


def _cpu_empty(*shape: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    return _empty(*shape, device="cpu" if device == "cuda" else device, **kwargs)


torch.empty = _cpu_empty
torch.Tensor.cuda = lambda values, *_, **__: values

from skyrl.backends.skyrl_train.distributed import fsdp_utils  # noqa: E402  # after the patches
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch  # noqa: E402  # after the patches
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry  # noqa: E402  # after the patches
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase  # noqa: E402  # after the patches
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402  # after the patches
from skyrl.train.config.config import MixedPrecisionConfig  # noqa: E402  # after the patches
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402  # after the patches

from rlstab.adapters.skyrl import NAME, register  # noqa: E402  # after the patches

fsdp_utils.init_device_mesh = _cpu_mesh
ROWS, GROUP = 16, 4


def config(**algorithm: Any) -> Any:
    """A run of the tiny chain with the policy loss ``rlstab``: one optimizer step of 16 responses, in parts of four."""
    made = SkyRLTrainConfig()
    trainer = made.trainer
    trainer.policy.model.path, trainer.flash_attn, trainer.strategy = str(CHAIN), False, "fsdp"
    trainer.remove_microbatch_padding = trainer.gradient_checkpointing = False
    trainer.policy_mini_batch_size, trainer.micro_train_batch_size_per_gpu = ROWS // GROUP, 4
    trainer.micro_forward_batch_size_per_gpu, trainer.train_batch_size = 4, ROWS // GROUP
    trainer.policy.optimizer_config.lr, trainer.policy.optimizer_config.max_grad_norm = 1e-3, 1e9
    trainer.policy.optimizer_config.num_warmup_steps = 0
    trainer.policy.fsdp_config.cpu_offload = False
    exact = MixedPrecisionConfig(param_dtype="fp32", reduce_dtype="fp32", buffer_dtype="fp32")
    trainer.policy.fsdp_config.mixed_precision = exact
    given = {"policy_loss_type": "rlstab", "use_kl_loss": False, "temperature": 1.0, **algorithm}
    for name, value in given.items():
        owner, _, last = name.rpartition(".")
        setattr(getattr(trainer.algorithm, owner) if owner else trainer.algorithm, last, value)
    return made


class Worker(FSDPPolicyWorkerBase):  # type: ignore[misc]  # to mypy, SkyRL is not there
    """SkyRL's actor without Ray: its constructor asks Ray for a GPU."""

    def __init__(self, made: Any) -> None:
        self.cfg, self._rank, self._local_rank = made.trainer, int(os.environ.get("RANK", 0)), 0
        self._world_size = int(os.environ.get("WORLD_SIZE", 1))
        self.sequence_parallel_size, self.record_memory, self.profiler = 1, False, None
        self.policy_loss_fn = PolicyLossRegistry.get(made.trainer.algorithm.policy_loss_type)
        if not torch.distributed.is_initialized():
            alone = {} if "RANK" in os.environ else {"store": torch.distributed.HashStore(), "rank": 0, "world_size": 1}
            torch.distributed.init_process_group("gloo", **alone)
        self.init_worker_process_group()
        variable = os.environ.pop("LOCAL_RANK", None)  # it names a GPU
        self.init_model(str(CHAIN), num_training_steps=10)
        if variable is not None:
            os.environ["LOCAL_RANK"] = variable


class Dispatch:
    """What the trainer calls instead of Ray's actors: the worker of this process, with its share of a mini-batch."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.gradients: list[dict[str, torch.Tensor]] = []

    def stage_data(self, model: str, data: Any, boundaries: list[tuple[int, int]]) -> list[Any]:
        rank, ranks = self.worker._rank, self.worker._world_size
        sizes = [(start, (end - start) // ranks) for start, end in boundaries]
        return [data[start + rank * size : start + (rank + 1) * size] for start, size in sizes]

    def forward_backward_from_staged(self, model: str, chunk: Any) -> Any:
        return self.worker.forward_backward(chunk)

    def optim_step(self, model: str) -> Any:
        parameters = self.worker.model.model.named_parameters()
        self.gradients.append({name: whole(one.grad) for name, one in parameters if one.grad is not None})
        return self.worker.optim_step()

    def empty_cache(self, *_: Any) -> None: ...


def run(
    folder: Path,
    objective: Any = None,
    *,
    updates: int = 2,
    broken: Sequence[int] = (),
    resume: str | None = None,
    save: int | None = None,
    rows_per_part: int = 4,
    tokens_per_part: int = -1,
    **algorithm: Any,
) -> dict[str, Any]:
    """Run the updates with SkyRL's own trainer and worker, and return what happened.

    Args:
        folder: for checkpoints.
        objective: None trains by SkyRL's own loss.
        updates: one optimizer step each.
        broken: updates in which an old log-prob is NaN.
        resume: a checkpoint of another run after ``save`` updates.
        save: after how many updates to write a checkpoint.
        rows_per_part: responses of a micro-batch.
        tokens_per_part: of a micro-batch, if above 0.
        algorithm: settings of ``trainer.algorithm``.
    """
    made = config(**algorithm)
    made.trainer.micro_train_batch_size_per_gpu = rows_per_part
    made.trainer.max_tokens_per_microbatch = tokens_per_part
    if objective is not None:
        if NAME in PolicyLossRegistry.list_available():
            PolicyLossRegistry.unregister(NAME)
        register(objective, made)
    trainer = object.__new__(RayPPOTrainer)
    trainer.cfg, trainer.dispatch = made, Dispatch(Worker(made))  # from scored responses on
    worker = trainer.dispatch.worker
    if resume is not None:
        worker.load_checkpoint(resume)
    metrics, states, rates = [], [], []
    for update in range(0 if resume is None else int(save or 0), updates):
        metrics.append(trainer._execute_training_step("policy", rollout(update, broken=update in broken)))
        states.append(getattr(worker.policy_loss_fn, "state", None))
        rates.append(worker.scheduler.get_last_lr()[0])
        if save == update + 1 and resume is None:
            worker.save_checkpoint(str(folder / "checkpoint"))
    ranks = jobs.counted_ranks()
    told = {"metrics": metrics, "states": states, "rates": rates, "gradients": trainer.dispatch.gradients}
    return {**told, "ranks": ranks, "weights": weights(worker.model.model), "moments": moments(worker.optimizer)}


def rollout(step: int, *, broken: bool = False) -> Any:
    """SkyRL's batch of 16 scored responses to four prompts, with a tool's token in each third; another step has others.

    Args:
        step: of the run.
        broken: whether an old log-prob is NaN.
    """
    draw = torch.Generator().manual_seed(step)
    responses = [response(step, index) for index in range(ROWS)]
    prompts = [[11, 12 + index // GROUP, 13][: 2 + index // GROUP % 2] for index in range(ROWS)]
    width, logprobs = max(map(len, responses)), scored(prompts, responses)

    def padded(rows: list[Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        out = torch.zeros(ROWS, width, dtype=dtype)
        for index, row in enumerate(rows):
            out[index, : len(row)] = torch.as_tensor(row, dtype=dtype)
        return out

    mask = padded([[1] * len(ids) for ids in responses], torch.int64)
    left = torch.tensor([[0] * (3 - len(prompt)) + prompt for prompt in prompts])
    counted = mask.clone()
    counted[::3, 1] = 0
    old = padded([(one + 0.2 * torch.randn(len(one), generator=draw)).clamp(max=0) for one in logprobs])
    sampled = padded([(one + 0.05 * torch.randn(len(one), generator=draw)).clamp(max=0) for one in logprobs])
    if broken:
        old[3, 0] = torch.nan
    advantages = torch.tensor([(index % 5 - 2) / 2 for index in range(ROWS)])
    data = TrainingInputBatch(
        {
            "sequences": torch.cat([left, padded(responses, torch.int64)], 1),
            "attention_mask": torch.cat([(left > 0).long(), mask], 1),
            "response_mask": mask,
            "loss_mask": counted,
            "action_log_probs": old,
            "base_action_log_probs": sampled,
            "rollout_logprobs": sampled,
            "advantages": advantages[:, None] * mask,
        }
    )
    data.metadata = {"response_length": width, "policy_mini_batch_boundaries": [(0, ROWS)]}
    return data


if __name__ == "__main__":
    jobs.of_rank(Path(sys.argv[1]), run)
