"""The vocabulary head of a transformers model, as the numbers that the signal pass takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlstab.signals import Teacher, TokenSignals, token_signals

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Logits of the probe agree to this share of the largest: float32 products, summed in another order.
AGREEMENT = 1e-4


@dataclass(frozen=True)
class VocabularyHead:
    """``softcap * tanh(scale * (h W' + b) / softcap)``; the weight may be tied to the embeddings.

    Attributes:
        linear: the module that holds weight and bias, so that what an optimizer changes is what is read.
        scale: multiplies its output.
        softcap: None if logits are not capped.
    """

    linear: nn.Linear
    scale: float
    softcap: float | None

    def signals(self, hidden: Tensor, ids: Tensor, dtype: torch.dtype | None, **options: Any) -> TokenSignals:
        """Signals of the ``(N, d)`` hidden states; ``dtype`` is that of the products, None leaves it."""
        head = self.teacher(hidden, dtype)
        numbers: dict[str, Any] = {"bias": head.bias, "logit_scale": head.logit_scale, "softcap": head.softcap}
        return token_signals(head.hidden, head.weight, ids, **numbers, **options)

    def teacher(self, hidden: Tensor, dtype: torch.dtype | None) -> Teacher:
        """The distributions of the ``(N, d)`` hidden states; ``dtype`` as in :meth:`signals`."""
        weight: Tensor = self.linear.weight
        bias: Tensor | None = self.linear.bias
        if dtype is not None:
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return Teacher(hidden, weight, bias, self.scale, self.softcap)


def embeds_the_vocabulary(model: PreTrainedModel) -> bool:
    """Whether the embeddings have exactly one row for each logit, so that they refuse any other token id."""
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return rows is not None and rows == getattr(model.get_output_embeddings(), "out_features", None)


@torch.no_grad()
def find_head(model: PreTrainedModel) -> VocabularyHead | None:
    """The head by the conventions of transformers' configurations, if the logits of the model confirm it.

    They are compared in the precision of the weights: autocast rounds the scale and cap of the model.
    """
    linear, config = model.get_output_embeddings(), model.config
    # a subclass, a wrapper or a hook (quantised, adapters) may compute something other than a product
    if type(linear) is not nn.Linear or linear._forward_hooks or linear._forward_pre_hooks:
        return None
    if model.base_model is model:
        return None
    scale = _number(config, "logit_scale", 1.0) / _number(config, "logits_scaling", 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    head = VocabularyHead(linear, scale, None if softcap is None else float(softcap))
    ids = (torch.arange(8, device=linear.weight.device) % linear.weight.shape[0]).unsqueeze(0)
    with torch.autocast(model.device.type, enabled=False):
        hidden = getattr(model.base_model(input_ids=ids, use_cache=False), "last_hidden_state", None)
        if hidden is None or hidden.shape[-1] != linear.in_features:
            return None
        # not linear(hidden): what replaced its forward would stand on both sides
        logits = scale * nn.functional.linear(hidden, linear.weight, linear.bias).float()
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        expected = model(input_ids=ids, use_cache=False).logits.float()
    agrees = (logits - expected).abs().max() <= AGREEMENT * expected.abs().max()
    return head if bool(agrees) else None


def _number(config: Any, name: str, default: float) -> float:
    value = getattr(config, name, None)
    return default if value is None else float(value)
