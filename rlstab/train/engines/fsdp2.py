"""Weights, gradients and moments in shards over all processes, by torch's ``fully_shard``.

Beside the model in shards stands one of the same shape without any weights. They are gathered into it for what is no
step: sampling, evaluation, evidence, checkpoints. It is an ordinary model, so that each process may forward as often as
it likes, and what needs whole weights needs to know nothing of shards.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from rlstab.core.comm import Comm
from rlstab.errors import ModelError
from rlstab.signals import TokenSignals
from rlstab.train.engines.engine import Engine, Moments, Part
from rlstab.train.engines.module import PolicyModule, nothing, signals_by
from rlstab.train.padded_rows import Sequences
from rlstab.train.policy import Policy
from rlstab.train.shared_prompts import SharedPrompts


class Shards:
    """A policy in shards, with an empty one beside it to gather the weights into.

    Args:
        policy: with all weights, on the CPU or the device; its model is sharded in place.
        device: on which forwards run.
        gather: dtype in which weights are gathered for a step; None leaves float32.
        offload: keep shards in the host's memory between steps.

    Attributes:
        live: the policy in shards.
        module: what runs its forwards.
        policy: the empty one.
    """

    def __init__(self, policy: Policy, device: torch.device, gather: torch.dtype | None, offload: bool) -> None:
        self.live, self.device, self._depth = policy, device, 0
        empty = {id(one): _empty(one, device) for one in policy.model.parameters()}
        model = copy.deepcopy(policy.model, empty)  # everything but the weights; what is tied stays tied
        nn.Module.to(model, device)
        self.policy = replace(policy, model=model)
        _ = policy.head  # looked for while the weights are whole
        self.module = PolicyModule(policy)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        names = set(getattr(policy.model, "_no_split_modules", None) or ())
        layers = [one for one in policy.model.modules() if type(one).__name__ in names]
        for one in [*reversed(layers), self.module]:
            _shard(one, mesh, gather, offload)

    @contextmanager
    def whole(self) -> Iterator[Policy]:
        """Gather the weights, unless they are; let go of them at the outermost end."""
        if not self._depth:
            self._gather()
        self._depth += 1
        try:
            yield self.policy
        finally:
            self._depth -= 1
            if not self._depth:
                for one in self.policy.model.parameters():
                    one.data = one.data.new_empty(0)

    @torch.no_grad()
    def _gather(self) -> None:
        pairs = zip(self.policy.model.parameters(), self.live.model.parameters(), strict=True)
        for mine, shard in pairs:
            mine.data = full(shard, self.device)


@final
class Fsdp2(Engine):
    """Gradients are reduced to shards with each backward, which keeps no whole ones.

    Args:
        policy, device, gather, offload: see :class:`Shards`.
        checkpointing: make activations again in the backward.
        comm: over all processes.
        processes: how many there are.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        device: torch.device,
        gather: torch.dtype | None,
        offload: bool,
        checkpointing: bool,
        comm: Comm,
        processes: int,
    ) -> None:
        self.comm, self.processes = comm, processes
        self._settings = device, gather, offload
        self._shards = Shards(policy, *self._settings)
        self.policy = self._shards.policy
        if checkpointing:
            policy.checkpoint_gradients()
        self.backward(None)
        unused = [name for name, one in self.weights.items() if one.requires_grad and one.grad is None]
        self._shards.module.zero_grad()
        if unused:
            raise ModelError(
                f"a token of '{policy.tokenizer.name_or_path}' gives no gradient to {unused[0]}, and fsdp2 reduces "
                f"the same weights in every process. Set engine to ddp, or take a model without such weights."
            )

    @property
    def in_words(self) -> str:
        gather, offload = self._settings[1:]
        parts = [f"fsdp2, {self.processes} process{'es' * (self.processes > 1)}"]
        parts += ["weights gathered in bfloat16"] if gather is not None else []
        return ", ".join(parts + (["shards in host memory"] if offload else []))

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        return dict(self._shards.live.model.named_parameters())

    def whole(self) -> AbstractContextManager[Policy]:
        return self._shards.whole()

    def frozen(self, policy: Policy) -> Callable[[], AbstractContextManager[Policy]]:
        policy.model.requires_grad_(False)
        return Shards(policy, *self._settings).whole

    def rounds(self, parts: Sequence[Part]) -> Iterator[Part | None]:
        # each forward gathers, so that all processes make the same number of them
        most = int(self.comm.gather(torch.tensor([float(len(parts))], dtype=torch.float64)).max())
        yield from parts
        yield from [None] * (most - len(parts))

    def shared_prompts(self, sequences: Sequences) -> SharedPrompts | None:
        """None: a second forward would gather the weights of every layer, and reduce its gradients, once more."""
        return None

    def signals(
        self,
        sequences: Sequences,
        index: Tensor,
        *,
        temperature: float,
        needs: Set[str],
        options: Mapping[str, float],
        rows: Mapping[str, Tensor] | None = None,
        shared: SharedPrompts | None = None,
    ) -> TokenSignals:
        asked = {"temperature": temperature, "needs": needs, "options": options, "rows": rows, "shared": shared}
        return signals_by(self._shards.module, sequences, index, asked)

    def backward(self, loss: Tensor | None) -> None:
        (nothing(self.policy, self._shards.module) if loss is None else loss).backward()

    @torch.no_grad()
    def clip(self, largest: float) -> float:
        # by hand: the norm of the shards is on their device, which with offload no process group may serve
        gradients = [_local(one.grad) for one in self.weights.values() if one.grad is not None]
        own = torch.nn.utils.get_total_norm(gradients).double()
        norm = math.sqrt(float(self.comm.sum(own.square().reshape(1).cpu())))
        factor = largest / (norm + 1e-6)  # as torch's clip_grad_norm_
        if factor < 1:
            for one in gradients:
                one.mul_(factor)
        return norm

    @torch.no_grad()
    def gathered(self, one: Tensor) -> Tensor:
        return full(one, self.policy.device)

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer, moments: Moments) -> None:
        weights = self.weights
        for name, values in moments.items():
            weight = weights[name]
            optimizer.state[weight] = {
                key: value if key == "step" else _as_shard(value, weight, self.policy.device)
                for key, value in values.items()
            }


def _empty(weight: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(0, dtype=weight.dtype, device=device), weight.requires_grad)


def _shard(module: nn.Module, mesh: DeviceMesh, gather: torch.dtype | None, offload: bool) -> None:
    """Shard the weights of a module that none of its parts has sharded; gradients will be added, in float32."""
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=gather, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if offload else OffloadPolicy(),
    )
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def full(shard: Tensor, device: torch.device) -> Tensor:
    """All of a tensor of which this process has a shard; a plain tensor is all of itself."""
    if not isinstance(shard, DTensor):
        return shard.detach()
    there = shard.detach().to(device)
    assert isinstance(there, DTensor)
    return there.full_tensor()


def _local(one: Tensor) -> Tensor:
    return one.to_local() if isinstance(one, DTensor) else one


def _as_shard(value: Tensor, weight: Tensor, device: torch.device) -> Tensor:
    """A whole tensor as the shard that this process has of a weight, where that is."""
    shard = torch.zeros_like(weight, requires_grad=False)
    if not isinstance(shard, DTensor):
        return shard.copy_(value)
    # every process has all of it, so that none has to send
    own = distribute_tensor(value.to(device), shard.device_mesh, shard.placements, src_data_rank=None)
    shard.to_local().copy_(own.to_local())
    return shard
