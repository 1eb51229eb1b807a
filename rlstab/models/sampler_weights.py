"""The policy that samples, if it is not the trainer's: a copy with rounded weights, or with noise on them."""

import copy
from dataclasses import replace
from zlib import crc32

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlstab.config.settings import Precision
from rlstab.core.method_settings import check_choices
from rlstab.models.loading import is_of_adapter
from rlstab.models.policy import Policy

#: The largest number of each narrow format, to which the largest of a row is mapped. Integers are symmetric around 0.
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0, "int3": 3.0, "int2": 1.0}


@torch.no_grad()
def rounded(weight: Tensor, precision: Precision) -> Tensor:
    """The nearest weights that a format holds, in the dtype of ``weight``.

    Args:
        weight: ``(..., in)``, one row for each output.
        precision: ``bf16`` has 8 significant bits. ``fp8`` is e4m3, 4 significant bits; ``int8`` to ``int2`` are
            steps of one size. All but ``bf16`` have one float32 scale for each row, which maps its largest magnitude
            to the largest number of the format.
    """
    check_choices(rounded, precision=precision)
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
    """The policy that samples: the trainer's, or a copy with weights of fewer bits, as in sampling engines.

    Weights may have noise instead or in addition, which makes a gap of any size.

    Weights are rounded to numbers of the narrow format and products are computed as before, so the gap between sampler
    and trainer is only that of the weights. Linear layers and experts are rounded to ``fp8`` or integers; the
    vocabulary head, embeddings, norms, biases and LoRA adapters are bfloat16, as in engines (vLLM's online quantisation
    applies to all linear layers but the head, and its adapters have the dtype of the model).

    Args:
        precision: see :func:`rounded`; None keeps the trainer's weights.
        weight_noise: standard deviation of the noise on each matrix, head and embeddings included and adapters
            excluded, as a share of that of its weights. The noise is the same whenever the weights are refreshed.
        seed: the seed of the noise.
    """

    def __init__(self, precision: Precision | None, weight_noise: float = 0.0, seed: int = 0) -> None:
        check_choices(Sampler.__init__, precision=precision)
        self.precision, self.weight_noise, self.seed = precision, weight_noise, seed
        self._copy: Policy | None = None

    @property
    def differs(self) -> bool:
        """Whether it is a copy; else the trainer's policy samples."""
        return self.precision is not None or self.weight_noise > 0

    @torch.no_grad()
    def refreshed(self, policy: Policy) -> Policy:
        """The policy to sample from, with the current weights of the trainer's policy, which are only read."""
        if not self.differs:
            return policy
        if self._copy is None:
            model = copy.deepcopy(policy.model)
            model.requires_grad_(False)
            model.zero_grad(set_to_none=True)  # gradients would be copied too
            self._copy = replace(policy, model=model)
        narrow, weights = _narrow(policy.model), dict(policy.model.named_parameters())
        for name, weight in self._copy.model.named_parameters():
            if self.precision is None:
                weight.copy_(weights[name])
            else:
                weight.copy_(rounded(weights[name], self.precision if name in narrow else "bf16"))
            if self.weight_noise and weight.ndim >= 2 and not is_of_adapter(name):
                # standard normal numbers that depend only on the seed, of 32 bits, and the name of the weight
                generator = torch.Generator().manual_seed(crc32(f"{self.seed} {name}".encode()))
                noise = torch.randn(weight.shape, generator=generator).to(weight.device, weight.dtype)
                weight.add_(self.weight_noise * weights[name].std() * noise)
        for copied, buffer in zip(self._copy.model.buffers(), policy.model.buffers(), strict=True):
            copied.copy_(buffer)
        return self._copy


def _narrow(model: PreTrainedModel) -> set[str]:
    """Names of the matrices that engines quantise: those of layers. A tied head counts as an embedding."""
    unrounded: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.Conv1d)]
    head = model.get_output_embeddings()
    wide = {id(weight) for module in [*unrounded, *([] if head is None else [head])] for weight in module.parameters()}
    matrices = {name for name, weight in model.named_parameters() if weight.ndim >= 2 and id(weight) not in wide}
    return {name for name in matrices if not is_of_adapter(name)}
