"""Engines: the policy that learns with its optimizer, in one process, or in several by DDP or in shards.

accelerate finds the device and the ranks, prepares module and optimizer, and runs backward, ``no_sync`` and clipping.
Shards are torch's ``fully_shard`` on every device, because accelerate's FSDP2 plugin does not shard CPU processes; and
it does not gather weights to sample, which is ours.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
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

Part = TypeVar("Part")


class PolicyModule(nn.Module):
    """Hidden states and the pass over the vocabulary in one forward, which is what torch's engines wrap.

    An engine makes weights whole on the way into the forward of the module that it wraps, and no longer. The head
    may be tied to the embeddings, so that it has to be read inside of the same forward.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.model
        self._policy = (policy,)  # in a tuple: it is not a module, and nothing must look for modules in it

    def forward(self, sequences: tuple[Tensor, ...], index: Tensor, asked: Mapping[str, Any]) -> dict[str, Tensor]:
        """Signals that were asked for, by name: engines look for tensors in tuples and dictionaries alone."""
        signals = self._policy[0].signals(Sequences(*sequences), index, **asked)
        return {
            signal.name: value for signal in fields(signals) if (value := getattr(signals, signal.name)) is not None
        }


class Engine:
    """All weights in each process. Gradients of several are reduced once in an optimizer step, by DDP.

    Args:
        policy: the same weights in every process.
        accelerator: of this process.
        settings: of the optimizer.

    Attributes:
        policy: its tokenizer and settings serve at any time; its model only inside :meth:`gathered_policy`.
        loss_scale: of the loss on its way to the backward pass, so that gradients are sums over processes.
        optimizer: AdamW, fused: torch's loop over weights takes several times as long.
    """

    _last = True  #: whether the micro-batch is the last of its optimizer step

    def __init__(self, policy: Policy, accelerator: Accelerator, settings: OptimisationSettings) -> None:
        self.policy, self.accelerator, self.processes = policy, accelerator, accelerator.num_processes
        self.loss_scale = self.processes  # DDP averages, and the loss has global denominators
        if settings.gradient_checkpointing:
            policy.checkpoint_gradients()
        module = PolicyModule(policy)
        if self.processes > 1:
            weights = [weight for weight in policy.model.parameters() if weight.requires_grad]
            # experts that no token chose: torch then has to look for them in every graph
            reached = torch.autograd.grad(self._zero_loss(module), weights, allow_unused=True)
            accelerator.ddp_handler = DistributedDataParallelKwargs(  # type: ignore[assignment]
                broadcast_buffers=False,  # constants; sending them needs equal numbers of forwards
                gradient_as_bucket_view=True,
                find_unused_parameters=any(gradient is None for gradient in reached),
            )
        # torchrun with one process would have it wrapped too, and DDP cannot share prompts
        self.module = accelerator.prepare(module) if self.processes > 1 else module
        self.optimizer = self._build_optimizer(settings)
        # torch orders its buckets by the first backward: now, so that a run that is continued adds in the same order
        for _ in range(2 if self.processes > 1 else 0):
            self.backward(None)
        self.zero_grad()

    def _build_optimizer(self, settings: OptimisationSettings) -> AcceleratedOptimizer:
        optimizer = torch.optim.AdamW(
            self.trained,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        prepared: AcceleratedOptimizer = self.accelerator.prepare(optimizer)
        return prepared

    @property
    def in_words(self) -> str:
        """What it is, for ``run.json`` and the terminal."""
        return "one process" if self.processes == 1 else f"ddp, {self.processes} processes"

    @property
    def weights(self) -> list[nn.Parameter]:
        """All weights: whole, or this process's shards."""
        return list(self.policy.model.parameters())

    @property
    def trained(self) -> list[nn.Parameter]:
        """Those of :attr:`weights` that learn, in the order of the optimizer's."""
        return [weight for weight in self.weights if weight.requires_grad]

    def gathered_policy(self) -> AbstractContextManager[Policy]:
        """The policy with all of its weights as they are now; every process enters. Inside, each forwards as it likes.

        They are only to be read: what samples, evaluates, compares, differentiates without a step, or is saved.
        """
        return nullcontext(self.policy)

    def frozen(self, policy: Policy) -> Callable[[], AbstractContextManager[Policy]]:
        """The :meth:`gathered_policy` of another policy, which is held as this one is and never learns."""
        policy.model.requires_grad_(False)
        return lambda: nullcontext(policy)

    def micro_batches(self, parts: Sequence[Part]) -> Iterator[Part | None]:
        """The parts of an optimizer step of this process, one for each forward and backward.

        None where this process has nothing left to do and others have. :meth:`backward` follows each.
        """
        for number, part in enumerate(parts or [None]):
            self._last = number >= len(parts) - 1
            with nullcontext() if self._last else self.accelerator.no_sync(self.module):
                yield part

    def shared_prompts(self, sequences: Sequences) -> SharedPrompts | None:
        """:meth:`Policy.shared_prompts` for :meth:`forward`, asked before any of :meth:`micro_batches`."""
        return self.policy.shared_prompts(sequences)

    def forward(self, sequences: Sequences, index: Tensor, **asked: Any) -> TokenSignals:
        """:meth:`Policy.signals` with a gradient, at most once in each of :meth:`micro_batches`."""
        if self.processes > 1 and self._last:
            asked["shared"] = None  # prompts have their own backward, and DDP sends a gradient after the first it sees
        return _forward(self.module, sequences, index, asked)

    def backward(self, loss: Tensor | None) -> None:
        """Add this process's gradient; None where it has none. After the last part they are sums over processes."""
        if loss is None and self.processes > 1 and self._last:
            loss = self._zero_loss(self.module)
        if loss is not None:
            self.accelerator.backward(loss * self.loss_scale)

    def _zero_loss(self, module: Callable[..., Any]) -> Tensor:
        """A loss of 0 that reaches every weight, by one token: what a process without work adds so that none waits."""
        token = torch.full((1, 1), self.policy.pad_id, device=self.policy.device)
        mask = torch.ones_like(token, dtype=torch.bool)
        index = torch.zeros(1, dtype=torch.int64, device=self.policy.device)
        asked = {"temperature": 1.0, "needs": {"logprobs"}}
        logprobs = _forward(module, Sequences(token, mask, token, mask), index, asked).logprobs
        assert logprobs is not None
        return 0.0 * logprobs.sum()

    def clip(self, largest: float) -> float:
        """Scale the gradient down to a norm of at most ``largest``; its norm before, the same in all processes."""
        return float(self.accelerator.clip_grad_norm_(self.weights, largest) or 0.0)

    def step(self, lr: float) -> None:
        """Move the weights, and forget the gradient."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            for weight in group["params"]:
                # an expert that no token reached; padding that reached it would make zeros, and AdamW move it
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradient. Of DDP it is a view of the buckets, which stay: beside them it would be there twice."""
        self.optimizer.zero_grad(set_to_none=self.processes == 1)


class ShardedEngine(Engine):
    """Weights, gradients and moments in shards over all processes. Gradients are reduced with each backward.

    Args:
        policy: with all weights, on the CPU or the device; its model is sharded in place.
        accelerator: of this process.
        run: settings of the optimizer and of the shards.
        comm: over all processes.
    """

    def __init__(self, policy: Policy, accelerator: Accelerator, run: RunConfig, comm: Comm) -> None:
        self.accelerator, self.processes, self.comm, self.loss_scale = accelerator, accelerator.num_processes, comm, 1
        device, settings = accelerator.device, run.engine
        if not dist.is_initialized():  # one process, and shards for the sake of offload
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
        self.optimizer = self._build_optimizer(run.optimisation)
        self.zero_grad()

    @property
    def in_words(self) -> str:
        return f"fsdp2, {self.processes} process{'es' * (self.processes > 1)}"

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self._shards.live.parameters())

    def gathered_policy(self) -> AbstractContextManager[Policy]:
        return self._shards.gathered()

    def frozen(self, policy: Policy) -> Callable[[], AbstractContextManager[Policy]]:
        policy.model.requires_grad_(False)
        return _Shards(policy, *self._settings).gathered

    def micro_batches(self, parts: Sequence[Part]) -> Iterator[Part | None]:
        # each forward gathers, so that all processes make the same number of them
        most = int(self.comm.gather(torch.tensor([float(len(parts))], dtype=torch.float64)).max())
        yield from parts
        yield from [None] * (most - len(parts))

    def shared_prompts(self, sequences: Sequences) -> SharedPrompts | None:
        """None: a second forward would gather the weights of every layer, and reduce its gradients, once more."""
        return None

    def backward(self, loss: Tensor | None) -> None:
        self.accelerator.backward(self._zero_loss(self.module) if loss is None else loss)

    @torch.no_grad()
    def clip(self, largest: float) -> float:
        # by hand: the norm of the shards is on their device, which with offload no process group may serve
        sharded = [weight.grad for weight in self.weights if weight.grad is not None]
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
    """A model in shards, and beside it an empty one of the same shape to gather the weights into.

    Whole weights are for what is not a step: sampling, evaluation, evidence, checkpoints. The gathered model is an
    ordinary one, so that each process may forward as often as it likes.

    Attributes:
        live: the model in shards.
        module: what runs its forwards.
        policy: has the empty model.
    """

    def __init__(self, policy: Policy, device: torch.device, gather: torch.dtype | None, offload: bool) -> None:
        self.live, self.device, self._depth = policy.model, device, 0
        empty = {id(w): nn.Parameter(w.new_empty(0), w.requires_grad) for w in self.live.parameters()}
        model = copy.deepcopy(policy.model, empty)  # everything but the weights; what is tied stays tied
        nn.Module.to(model, device)
        self.policy = replace(policy, model=model)
        _ = policy.head  # looked for while the weights are whole
        self.module = PolicyModule(policy)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        names = set(getattr(policy.model, "_no_split_modules", None) or ())
        layers = [layer for layer in policy.model.modules() if type(layer).__name__ in names]
        precision = MixedPrecisionPolicy(param_dtype=gather, reduce_dtype=torch.float32)  # gradients will be added
        kept = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy()
        for module in [*reversed(layers), self.module]:  # each shards what none of its parts has sharded
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=kept)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    @contextmanager
    def gathered(self) -> Iterator[Policy]:
        """Gather the weights, unless they are; let go of them at the outermost end."""
        if not self._depth:
            with torch.no_grad():
                for mine, shard in zip(self.policy.model.parameters(), self.live.parameters(), strict=True):
                    mine.data = gathered(shard, self.device)
        self._depth += 1
        try:
            yield self.policy
        finally:
            self._depth -= 1
            if not self._depth:
                for weight in self.policy.model.parameters():
                    weight.data = weight.data.new_empty(0)


def _forward(module: Callable[..., Any], sequences: Sequences, index: Tensor, asked: Mapping[str, Any]) -> TokenSignals:
    """What a :class:`PolicyModule` makes, inside of what an engine wrapped around it."""
    tensors = tuple(getattr(sequences, part.name) for part in fields(sequences))
    return TokenSignals(**module(tensors, index, dict(asked)))


def gathered(shard: Tensor, device: torch.device) -> Tensor:
    """All of a tensor of which this process has a shard; every process calls it. A plain tensor is all of itself."""
    if not isinstance(shard, DTensor):
        return shard.detach()
    there = shard.detach().to(device)
    assert isinstance(there, DTensor)
    return there.full_tensor()


@torch.no_grad()
def as_shard_of(weight: Tensor, value: Tensor) -> Tensor:
    """A copy of what belongs to a whole weight, as the shard that this process has of it."""
    if isinstance(weight, DTensor) and value.ndim:
        value = distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
    return value.to(weight.device, copy=True)


# -- which engine ----------------------------------------------------------------------------------------------------

_INSTEAD = "Launch with torchrun, or with accelerate launch --multi_gpu, and set `engine` in the run file"

#: What a launcher may ask for, by a variable of the environment: anything else the run would not do.
_LAUNCHER = {
    "ACCELERATE_USE_DEEPSPEED": ("false",),
    "ACCELERATE_USE_MEGATRON_LM": ("false",),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("false",),
    "ACCELERATE_DYNAMO_BACKEND": ("no",),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1",),
    "FSDP_VERSION": ("2",),
    "FSDP_RESHARD_AFTER_FORWARD": ("true", "full_shard"),
    "FSDP_AUTO_WRAP_POLICY": ("transformer_based_wrap",),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("false",),
}


def asks_for_shards(environment: Mapping[str, str]) -> bool:
    """Whether the launcher asks for FSDP."""
    return environment.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1")


def require_launcher(environment: Mapping[str, str], run: RunConfig) -> None:
    """Refuse what a launcher asks for and the run would do without.

    Raises:
        ConfigError: names the variable, and what to set.
    """
    fsdp, settings = asks_for_shards(environment), run.optimisation
    allowed = _LAUNCHER | {
        "ACCELERATE_MIXED_PRECISION": ("no", settings.precision),
        "ACCELERATE_USE_FSDP": ("true", "1", "false") if run.engine.name != "ddp" else ("false",),
        "FSDP_OFFLOAD_PARAMS": ("false", str(run.engine.offload).lower()),
        "FSDP_ACTIVATION_CHECKPOINTING": ("false", str(settings.gradient_checkpointing).lower()),
    }
    for variable, values in allowed.items():
        asked = environment.get(variable, "")
        if asked and asked.lower() not in values and (fsdp or not variable.startswith("FSDP_")):
            raise ConfigError(
                f"the launcher asks for {variable} = {asked}, which the run does not do. {_INSTEAD}; precision, "
                f"gradient_checkpointing and micro_batch_size are in `optimisation`, offload is in `engine`."
            )


def is_sharded(run: RunConfig, environment: Mapping[str, str]) -> bool:
    """Whether the run is in shards: ``auto`` takes what the launcher asks for."""
    return run.engine.name == "fsdp2" or (run.engine.name == "auto" and asks_for_shards(environment))


def build_engine(policy: Policy, accelerator: Accelerator, run: RunConfig, comm: Comm, *, sharded: bool) -> Engine:
    """The engine that holds a policy.

    Raises:
        ConfigError: the processes are of a kind that nobody has tried.
        ModelError: the model cannot checkpoint gradients and is to, or has weights that fsdp2 cannot reduce.
    """
    kind = accelerator.distributed_type
    if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise ConfigError(
            f"accelerate finds processes of the type {kind.value}; rlstab runs on CPUs and on CUDA devices. {_INSTEAD}."
        )
    if sharded:
        return ShardedEngine(policy, accelerator, run, comm)
    return Engine(policy, accelerator, run.optimisation)
