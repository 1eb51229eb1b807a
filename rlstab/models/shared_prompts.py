"""One forward over the tokens of a prompt for all of its responses, and one over the tokens of each response.

The keys and values of a prompt do not depend on the response. So a group of ``G`` responses needs one forward over the
prompt instead of ``G``, and one backward of the sum of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Share of the tokens that must be saved, since a second forward has a cost.
WORTH = 0.1


@dataclass(frozen=True)
class SharedPrompts:
    """Which rows have the same prompt.

    Attributes:
        rows: ``(U,)`` int64, the first row with each of the different prompts.
        of: ``(R,)`` int64, the prompt of each row among these.
    """

    rows: Tensor
    of: Tensor

    @classmethod
    def among(cls, prompt_ids: Tensor, prompt_mask: Tensor, length: int) -> SharedPrompts | None:
        """The shared ones of ``(R, P)`` prompts with responses of ``length`` tokens; None if too few would be saved."""
        ids = torch.where(prompt_mask, prompt_ids, -1)
        different, index = ids.unique(dim=0, return_inverse=True)
        if not worthwhile(len(ids), len(different), ids.shape[1], length):
            return None
        rows = torch.arange(len(ids), device=ids.device)
        return cls(index.new_full((len(different),), len(ids)).scatter_reduce(0, index, rows, "amin"), index)


def worthwhile(rows: int, prompts: int, width: int, length: int) -> bool:
    """Whether ``rows`` should share their different prompts, of ``width`` tokens, for responses of ``length``."""
    return (rows - prompts) * width > WORTH * rows * (width + length)


def can_share(config: PretrainedConfig) -> bool:
    """Whether a model of this configuration keeps only the keys and values of each token of a prompt.

    Sliding windows drop some, and recurrent states are written in place, which a backward cannot pass.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    layers = DynamicCache(config=config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def position_ids(mask: Tensor) -> Tensor:
    """``(R, L)`` positions, which count tokens but not padding."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def forward_shared(
    forward: Callable[..., Tensor],
    config: PretrainedConfig,
    ids: Tensor,
    mask: Tensor,
    width: int,
    shared: SharedPrompts,
) -> Tensor:
    """``(R, T, ...)`` outputs of a model at the position before each response token.

    Use ``backward`` for gradients: ``torch.autograd.grad`` would not see those through the prompts.

    Args:
        forward: the model, which takes its keyword arguments and gives an output for each token.
        config: the configuration of the model.
        ids: ``(R, P + T)`` int64, prompts that are padded on the left and responses that are padded on the right.
        mask: ``(R, P + T)`` bool.
        width: P.
        shared: which rows have the same prompt.
    """
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    of_cache = {"past_key_values": cache, "use_cache": True}
    prompt_mask = mask[shared.rows, :width]
    inputs = {"attention_mask": prompt_mask.long(), "position_ids": position_ids(prompt_mask)}
    prompts = forward(input_ids=ids[shared.rows, :width], **inputs, **of_cache)
    states: list[Any] = cache.layers  # all of one kind, see can_share
    layers = [layer for layer in states if layer.is_initialized]  # a layer that reads the keys of another stays empty
    outputs = [*(tensor for layer in layers for tensor in (layer.keys, layer.values)), prompts[:, -1:]]
    if any(tensor.requires_grad for tensor in outputs):
        start = torch.ones((), device=ids.device, requires_grad=True)  # one input must require a gradient
        outputs = list(_Apart.apply(start, outputs))  # type: ignore[no-untyped-call]  # torch's apply has no types
    *tensors, last = outputs
    for layer, keys, values in zip(layers, tensors[::2], tensors[1::2], strict=True):
        layer.keys, layer.values = keys, values
    cache.reorder_cache(shared.of)  # type: ignore[arg-type]  # it asks for the LongTensor of old
    inputs = {"attention_mask": mask.long(), "position_ids": position_ids(mask)[:, width:]}
    responses = forward(input_ids=ids[:, width:], **inputs, **of_cache)
    return torch.cat([last[shared.of], responses[:, :-1]], dim=1)


class _Apart(torch.autograd.Function):
    """The tensors of the prompts, with a separate backward that runs after that of the responses.

    In one graph, autograd would keep the gradient of the responses for each weight until that of the prompts arrives,
    which takes 4 more bytes for each trained parameter.
    """

    @staticmethod
    def forward(ctx: Any, start: Tensor, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.made = outputs
        return tuple(tensor.detach() for tensor in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        differentiable = [tensor.requires_grad for tensor in ctx.made]
        torch.autograd.backward(list(compress(ctx.made, differentiable)), list(compress(gradients, differentiable)))
        return None, None
