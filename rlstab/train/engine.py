"""Engines hold the policy and its optimizer: in one process, or in several, by DDP or in shards.

accelerate finds the device and the ranks, prepares module and optimizer, and runs backward, ``no_sync`` and clipping.
Shards are made by torch's ``fully_shard`` on every device, because accelerate's FSDP2 plugin does not shard CPU
processes. Gathering the weights to sample is done here, since accelerate does not offer it.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from rlstab.config.runs import RunConfig
from rlstab.config.settings import OptimisationSettings
from rlstab.core.comm import Comm
from rlstab.errors import ConfigError, ModelError
from rlstab.models.policy import Policy, Sequences
from rlstab.models.shared_prompts import SharedPrompts
from rlstab.signals import TokenSignals

Item = TypeVar("Item")

torch.export.register_dataclass(TokenSignals)  # so that engines find the tensors in what a module returns


class PolicyModule(nn.Module):
    """Hidden states and the pass over the vocabulary in one forward, which is what torch's engines wrap.

    An engine gathers the weights for the forward of the module that it wraps, and only for that. The head may be tied
    to the embeddings, so it has to be read inside the same forward.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.model
        self._policy = (policy,)  # in a tuple, so that torch does not search it for modules

    def forward(self, sequences: Sequences, index: Tensor, **options: Any) -> TokenSignals:
        """:meth:`Policy.signals`."""
        return self._policy[0].signals(sequences, index, **options)


class Engine:
    """All weights in each process. With several processes, DDP reduces the gradients once per optimizer step.

    Args:
        policy: the same weights in every process.
        accelerator: the accelerator of this process.
        settings: the settings of the optimizer.

    Attributes:
        policy: its tokenizer and settings can be used at any time, its model only inside :meth:`gathered_policy`.
        loss_scale: multiplies the loss before the backward pass, so that gradients are sums over processes.
        trained: the trainable weights, or the shards of this process, in the order of the optimizer.
        optimizer: fused AdamW; torch's loop over weights takes several times as long.
        in_words: the engine and the number of processes, for ``run.json`` and the terminal.
    """

    _last = True  #: whether the micro-batch is the last of its optimizer step

    def __init__(self, policy: Policy, accelerator: Accelerator, settings: OptimisationSettings) -> None:
        self.policy, self.accelerator, self.processes = policy, accelerator, accelerator.num_processes
        self.loss_scale = self.processes  # DDP averages, and the loss has global denominators
        self.in_words = "one process" if self.processes == 1 else f"ddp, {self.processes} processes"
        if settings.gradient_checkpointing:
            policy.checkpoint_gradients()
        module = PolicyModule(policy)
        if self.processes > 1:
            weights = [weight for weight in policy.model.parameters() if weight.requires_grad]
            # where no token chose an expert, torch has to look for unused weights in every graph
            reached = torch.autograd.grad(self._zero_loss(module), weights, allow_unused=True)
            accelerator.ddp_handler = DistributedDataParallelKwargs(  # type: ignore[assignment]  # accelerate declares None
                broadcast_buffers=False,  # they are constant; broadcasting needs equal numbers of forwards
                gradient_as_bucket_view=True,
                find_unused_parameters=any(gradient is None for gradient in reached),
            )
        # under torchrun accelerate would wrap a single process too, and DDP cannot share prompts
        self.module = accelerator.prepare(module) if self.processes > 1 else module
        self._build_optimizer(policy.model, settings)
        # torch orders its buckets at the first backward: run it now, so that a resumed run adds in the same order
        for _ in range(2 if self.processes > 1 else 0):
            self.backward(None)
        self.zero_grad()

    def _build_optimizer(self, model: nn.Module, settings: OptimisationSettings) -> None:
        self.trained = [weight for weight in model.parameters() if weight.requires_grad]
        options = settings.model_dump(include={"lr", "betas", "eps", "weight_decay"})
        optimizer = torch.optim.AdamW(self.trained, fused=True, **options)
        self.optimizer: AcceleratedOptimizer = self.accelerator.prepare(optimizer)

    def gathered_policy(self) -> AbstractContextManager[Policy]:
        """The policy with all of its current weights. Every process enters; inside, each may forward as it likes.

        The weights are read-only: for sampling, evaluation, evidence, gradients without a step, and checkpoints.
        """
        return nullcontext(self.policy)

    def frozen(self, policy: Policy) -> Callable[[], AbstractContextManager[Policy]]:
        """:meth:`gathered_policy` for another policy, which is held in the same way and never learns."""
        return lambda: nullcontext(policy)

    def micro_batches(self, micro_batches: Sequence[Item]) -> Iterator[Item | None]:
        """The micro-batches of this process in an optimizer step, one for each forward and backward.

        None where this process has no micro-batch left and others have. :meth:`backward` follows each.
        """
        for index, micro_batch in enumerate(micro_batches or [None]):
            self._last = index >= len(micro_batches) - 1
            with nullcontext() if self._last else self.accelerator.no_sync(self.module):
                yield micro_batch

    def shared_prompts(self, sequences: Sequences) -> SharedPrompts | None:
        """:meth:`Policy.shared_prompts` for :meth:`forward`; call it before the first of :meth:`micro_batches`."""
        return self.policy.shared_prompts(sequences)

    def forward(self, sequences: Sequences, index: Tensor, **options: Any) -> TokenSignals:
        """:meth:`Policy.signals` with a gradient, at most once in each of :meth:`micro_batches`."""
        if self.processes > 1 and self._last:
            options["shared"] = None  # shared prompts run a second backward, and DDP sends gradients after the first
        signals: TokenSignals = self.module(sequences, index, **options)
        return signals

    def backward(self, loss: Tensor | None) -> None:
        """Add the gradient of a loss, None for none. After the last micro-batch gradients are sums over processes."""
        if loss is None and self.processes > 1 and self._last:
            loss = self._zero_loss(self.module)
        if loss is not None:
            self.accelerator.backward(loss * self.loss_scale)

    def _zero_loss(self, module: Callable[..., Any]) -> Tensor:
        """A loss of 0 for one token that reaches every weight: a process without work adds it, and no other waits."""
        token = torch.full((1, 1), self.policy.pad_id, device=self.policy.device)
        mask = torch.ones_like(token, dtype=torch.bool)
        index = torch.zeros(1, dtype=torch.int64, device=self.policy.device)
        signals = module(Sequences(token, mask, token, mask), index, temperature=1.0, needs={"logprobs"})
        zero: Tensor = 0.0 * signals.logprobs.sum()
        return zero

    def clip(self, largest: float) -> float | Tensor:
        """Scale the gradient to a norm of at most ``largest``; returns the norm before, the same in all processes."""
        norm: Tensor | None = self.accelerator.clip_grad_norm_(self.trained, largest)
        return 0.0 if norm is None else norm

    def step(self, lr: float) -> None:
        """Update the weights at a learning rate, and clear the gradient."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            for weight in group["params"]:
                # an expert that no token reached: a token of padding would give it zeros, and AdamW would update it
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Clear the gradient. DDP's is a view of its buckets, which stay: a separate one would double the memory."""
        self.optimizer.zero_grad(set_to_none=self.processes == 1)


class ShardedEngine(Engine):
    """Weights, gradients and moments in shards over all processes. Every backward reduces gradients.

    Args:
        policy: the policy with all weights, on the CPU or the device. Its model is sharded in place.
        accelerator: the accelerator of this process.
        run: settings of the optimizer and of the shards.
        comm: over all processes.
    """

    def __init__(self, policy: Policy, accelerator: Accelerator, run: RunConfig, comm: Comm) -> None:
        self.accelerator, self.processes, self.comm, self.loss_scale = accelerator, accelerator.num_processes, comm, 1
        self.in_words = f"fsdp2, {self.processes} process{'es' * (self.processes > 1)}"
        device, settings = accelerator.device, run.engine
        if not dist.is_initialized():  # a single process that shards in order to offload
            backend = "nccl" if device.type == "cuda" else "gloo"
            store = dist.HashStore()  # type: ignore[attr-defined]  # not on Windows
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        self._settings = device, torch.bfloat16 if settings.gather == "bf16" else None, settings.offload
        self._shards = _Shards(policy, *self._settings)
        self.policy, self.module = self._shards.policy, self._shards.module
        if run.optimisation.gradient_checkpointing:
            policy.checkpoint_gradients()
        self.backward(None)
        for name, weight in policy.model.named_parameters():
            if weight.requires_grad and weight.grad is None:
                raise ModelError(
                    f"a token of '{policy.tokenizer.name_or_path}' gives no gradient to {name}, and fsdp2 reduces the "
                    f"same weights in every process. Set engine to ddp, or take a model without such weights."
                )
        self._build_optimizer(self._shards.live, run.optimisation)
        self.zero_grad()

    def gathered_policy(self) -> AbstractContextManager[Policy]:
        return self._shards.gathered()

    def frozen(self, policy: Policy) -> Callable[[], AbstractContextManager[Policy]]:
        return _Shards(policy, *self._settings).gathered

    def micro_batches(self, micro_batches: Sequence[Item]) -> Iterator[Item | None]:
        # each forward gathers weights, so all processes run the same number of forwards
        count = len(micro_batches)
        longest = int(self.comm.gather(torch.tensor([float(count)], dtype=torch.float64)).max())
        yield from micro_batches
        yield from [None] * (longest - count)

    def shared_prompts(self, sequences: Sequences) -> SharedPrompts | None:
        """None: a second forward would gather the weights of each layer, and reduce their gradients, once more."""
        return None

    def backward(self, loss: Tensor | None) -> None:
        self.accelerator.backward(self._zero_loss(self.module) if loss is None else loss)

    @torch.no_grad()
    def clip(self, largest: float) -> float:
        # computed here: the norm of offloaded shards is on the CPU, for which there may be no process group
        sharded = [weight.grad for weight in self.trained if weight.grad is not None]
        gradients = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in sharded]
        squares = torch.nn.utils.get_total_norm(gradients).double().square().reshape(1).cpu()
        norm = math.sqrt(float(self.comm.sum(squares)))
        factor = largest / (norm + 1e-6)  # as torch's clip_grad_norm_
        if factor < 1:
            for gradient in gradients:
                gradient.mul_(factor)
        return norm

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class _Shards:
    """A model in shards, and an empty model of the same shape into which the weights are gathered.

    Whole weights serve everything but the optimizer step: sampling, evaluation, evidence, checkpoints. The gathered
    model is an ordinary one, so each process may forward as often as it likes.

    Attributes:
        live: the model in shards.
        module: runs the forwards of the model in shards.
        policy: holds the empty model.
    """

    def __init__(self, policy: Policy, device: torch.device, gather: torch.dtype | None, offload: bool) -> None:
        self.live, self.device, self._depth = policy.model, device, 0
        empty = {id(w): nn.Parameter(w.new_empty(0), w.requires_grad) for w in self.live.parameters()}
        model = copy.deepcopy(policy.model, empty)  # without the weights; tied weights stay tied
        nn.Module.to(model, device)
        self.policy = replace(policy, model=model)
        _ = policy.head  # found while the weights are whole
        self.module = PolicyModule(policy)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        precision = MixedPrecisionPolicy(param_dtype=gather, reduce_dtype=torch.float32)  # gradients are sums
        offload_policy = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
        for module in [*reversed(policy.layers), self.module]:  # a module shards what its submodules have not
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload_policy)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction

    @contextmanager
    def gathered(self) -> Iterator[Policy]:
        """Gather the weights, unless they are gathered already; release them when the outermost block ends."""
        if not self._depth:
            with torch.no_grad():
                for gathered_weight, shard in zip(self.policy.model.parameters(), self.live.parameters(), strict=True):
                    gathered_weight.data = gathered(shard, self.device)
        self._depth += 1
        try:
            yield self.policy
        finally:
            self._depth -= 1
            if not self._depth:
                for weight in self.policy.model.parameters():
                    weight.data = weight.data.new_empty(0)


def gathered(shard: Tensor, device: torch.device) -> Tensor:
    """The whole tensor of which this process has a shard; every process calls it. A plain tensor is already whole."""
    if not isinstance(shard, DTensor):
        return shard.detach()
    on_device = shard.detach().to(device)
    assert isinstance(on_device, DTensor)
    return on_device.full_tensor()


@torch.no_grad()
def as_shard_of(weight: Tensor, value: Tensor) -> Tensor:
    """A copy of a whole tensor, cut to the shard that this process has of ``weight``."""
    if isinstance(weight, DTensor) and value.ndim:
        value = distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
    return value.to(weight.device, copy=True)


# -- which engine ----------------------------------------------------------------------------------------------------

_INSTEAD = "Launch with torchrun, or with accelerate launch --multi_gpu, and set `engine` in the run file"


def asks_for_shards(environment: Mapping[str, str]) -> bool:
    """Whether the launcher asks for FSDP."""
    return environment.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1")


def require_launcher(environment: Mapping[str, str], run: RunConfig) -> None:
    """Refuse an option of the launcher, an environment variable, that the run would ignore.

    Raises:
        ConfigError: names the variable and what to set instead.
    """
    fsdp, settings = asks_for_shards(environment), run.optimisation
    allowed = {
        "ACCELERATE_USE_DEEPSPEED": ("false",),
        "ACCELERATE_USE_MEGATRON_LM": ("false",),
        "ACCELERATE_USE_PARALLELISM_CONFIG": ("false",),
        "ACCELERATE_DYNAMO_BACKEND": ("no",),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1",),
        "FSDP_VERSION": ("2",),
        "FSDP_RESHARD_AFTER_FORWARD": ("true", "full_shard"),
        "FSDP_AUTO_WRAP_POLICY": ("transformer_based_wrap",),
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("false",),
        "ACCELERATE_MIXED_PRECISION": ("no", settings.precision),
        "ACCELERATE_USE_FSDP": ("true", "1", "false") if run.engine.name != "ddp" else ("false",),
        "FSDP_OFFLOAD_PARAMS": ("false", str(run.engine.offload).lower()),
        "FSDP_ACTIVATION_CHECKPOINTING": ("false", str(settings.gradient_checkpointing).lower()),
    }
    for variable, values in allowed.items():
        value = environment.get(variable, "")
        if value and value.lower() not in values and (fsdp or not variable.startswith("FSDP_")):
            raise ConfigError(
                f"the launcher asks for {variable} = {value}, which the run does not do. {_INSTEAD}; precision, "
                f"gradient_checkpointing and micro_batch_size are in `optimisation`, offload is in `engine`."
            )


def is_sharded(run: RunConfig, environment: Mapping[str, str]) -> bool:
    """Whether the run is in shards; ``auto`` follows the launcher."""
    return run.engine.name == "fsdp2" or (run.engine.name == "auto" and asks_for_shards(environment))


def build_engine(policy: Policy, accelerator: Accelerator, run: RunConfig, comm: Comm, *, sharded: bool) -> Engine:
    """The engine that holds a policy.

    Raises:
        ConfigError: processes of this type are not supported.
        ModelError: gradient checkpointing is asked of a model without it, or fsdp2 cannot reduce some weights.
    """
    kind = accelerator.distributed_type
    if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise ConfigError(
            f"accelerate finds processes of the type {kind.value}; rlstab runs on CPUs and on CUDA devices. {_INSTEAD}."
        )
    if sharded:
        return ShardedEngine(policy, accelerator, run, comm)
    return Engine(policy, accelerator, run.optimisation)
