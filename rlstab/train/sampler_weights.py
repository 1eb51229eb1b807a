"""A sampler with weights of fewer bits than the trainer's: what an engine samples from that quantises its weights.

Weights are rounded to the numbers that the narrow format holds, and products are taken as before. So the gap between
sampler and trainer is that of the weights alone; engines that also round activations, or keys and values, have a larger
one. Linear layers and experts are rounded to ``fp8``, ``int8`` or ``int4``. The vocabulary head, embeddings, norms,
biases and LoRA adapters are bfloat16, as engines keep them (vLLM's online quantisation takes all linear layers but the
head, and its adapters have the dtype of the model).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlstab.train.lora import is_of_adapter
from rlstab.train.policy import Policy

Precision: TypeAlias = Literal["bf16", "fp8", "int8", "int4"]

#: The largest number of each narrow format: that of a row is mapped to it. Integers are symmetric around 0.
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}


@torch.no_grad()
def rounded(weight: Tensor, precision: Precision) -> Tensor:
    """The nearest weights that a format holds, in the dtype of ``weight``.

    Args:
        weight: ``(..., in)``, one row for each output.
        precision: ``bf16`` has 8 significant bits. ``fp8`` is e4m3, 4 significant bits; ``int8`` and ``int4`` are
            steps of one size. The three have one float32 scale for each row, which maps its largest magnitude to
            the largest number of the format.
    """
    weight = weight.detach()
    if precision == "bf16":
        return weight.to(torch.bfloat16).to(weight.dtype)
    largest, wide = LARGEST[precision], weight.float()
    scale = wide.abs().amax(-1, keepdim=True) / largest
    scale = torch.where(scale > 0, scale, 1.0)
    steps = wide / scale
    if precision == "fp8":
        steps = steps.clamp(-largest, largest).to(torch.float8_e4m3fn).float()
    else:
        steps = steps.round().clamp(-largest, largest)
    return (steps * scale).to(weight.dtype)


class Sampler:
    """The policy that samples: the trainer's own, or a copy of it with rounded weights.

    Args:
        precision: see :func:`rounded`; None samples from the trainer's own policy, without a copy.
    """

    def __init__(self, precision: Precision | None) -> None:
        self.precision = precision
        self._own: Policy | None = None

    @torch.no_grad()
    def refreshed(self, policy: Policy) -> Policy:
        """The policy to sample from, by the weights that the trainer's has now. Its own weights are only read."""
        if self.precision is None:
            return policy
        if self._own is None:
            model = copy.deepcopy(policy.model)
            model.requires_grad_(False)
            model.zero_grad(set_to_none=True)  # gradients would be copied too
            self._own = replace(policy, model=model)
        narrow = _narrow(policy.model)
        theirs = dict(policy.model.named_parameters())
        for name, own in self._own.model.named_parameters():
            own.copy_(rounded(theirs[name], self.precision if name in narrow else "bf16"))
        for mine, buffer in zip(self._own.model.buffers(), policy.model.buffers(), strict=True):
            mine.copy_(buffer)
        return self._own


def _narrow(model: PreTrainedModel) -> set[str]:
    """Names of the matrices that engines quantise: those of layers. A head that is tied is an embedding."""
    kept = [one for one in model.modules() if isinstance(one, nn.Embedding | nn.Conv1d)]
    head = model.get_output_embeddings()
    wide = {id(one) for part in [*kept, *([] if head is None else [head])] for one in part.parameters()}
    narrow = {name for name, one in model.named_parameters() if one.ndim >= 2 and id(one) not in wide}
    return {name for name in narrow if not is_of_adapter(name)}
