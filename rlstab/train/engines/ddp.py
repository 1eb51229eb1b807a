"""Several processes with all weights in each: gradients are summed by torch's ``DistributedDataParallel``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rlstab.signals import TokenSignals
from rlstab.train.engines.engine import Part
from rlstab.train.engines.module import PolicyModule, nothing, signals_by
from rlstab.train.engines.whole_weights import WholeWeights
from rlstab.train.padded_rows import Sequences
from rlstab.train.policy import Policy
from rlstab.train.shared_prompts import SharedPrompts

#: The argument that says whether rank 0 sends its buffers with each forward. Newer versions of torch call it otherwise.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_BUFFERS = next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in _NAMES)


@final
class Ddp(WholeWeights):
    """Gradients travel once in an optimizer step, with the last backward of it.

    Args:
        policy: the same weights in every process.
        processes: how many there are.
    """

    def __init__(self, policy: Policy, processes: int) -> None:
        super().__init__(policy)
        self.processes, self._last = processes, True
        module = PolicyModule(policy)
        weights = [one for one in policy.model.parameters() if one.requires_grad]
        # experts that no token chose: torch then has to look for them in every graph
        unused = any(one is None for one in torch.autograd.grad(nothing(policy, module), weights, allow_unused=True))
        self._module = DistributedDataParallel(
            module,
            gradient_as_bucket_view=True,
            find_unused_parameters=unused,
            **{_BUFFERS: False},  # type: ignore[arg-type]  # constants; sending them needs equal numbers of forwards
        )
        self._module.register_comm_hook(None, lambda state, bucket: _summed(bucket))
        # torch orders its buckets by the first backward: now, so that a run that is continued adds in the same order
        for _ in range(2):
            self.backward(None)
        # Gradients are views of torch's buckets, which stay. Without them, micro-batches before the last one would add
        # to gradients beside the buckets. Experts that were not chosen now have none yet.
        self._buckets = {one: one.grad for one in weights if one.grad is not None}
        self._module.zero_grad()

    @property
    def in_words(self) -> str:
        return f"ddp, {self.processes} processes"

    def rounds(self, parts: Sequence[Part]) -> Iterator[Part | None]:
        for weight, bucket in self._buckets.items():
            weight.grad = bucket.zero_()
        for number, one in enumerate(parts or [None]):
            self._last = number >= len(parts) - 1
            with nullcontext() if self._last else self._module.no_sync():
                yield one

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
        if self._last:  # prompts have a backward of their own, and torch sends a gradient after the first that it sees
            shared = None
        asked = {"temperature": temperature, "needs": needs, "options": options, "rows": rows, "shared": shared}
        return signals_by(self._module, sequences, index, asked)

    def backward(self, loss: Tensor | None) -> None:
        if loss is None and self._last:
            loss = nothing(self.policy, self._module)
        if loss is not None:
            loss.backward()


def _summed(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Denominators are global already, so that gradients are added and not averaged."""
    sent = dist.all_reduce(bucket.buffer(), async_op=True)
    assert sent is not None
    added: torch.futures.Future[Tensor] = sent.get_future().then(lambda done: done.value()[0])
    return added
