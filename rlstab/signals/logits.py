"""The pass from logits that already exist: a few rows at a time, and a backward over the live rows."""

from typing import Any

import torch
from torch import Tensor

from rlstab.signals.tile import Ask, Buffers, Rows, Slope, incoming, live_rows, once, spans, whole_rows, wide


class LogitsSignals(torch.autograd.Function):
    """``(N, V)`` logits to the signals, in the order of the record; what is not needed is None."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, temperature: float | Tensor, ask: Ask
    ) -> tuple[Tensor | None, ...]:
        """All the signals of a few rows, then the next."""
        ctx.set_materialize_grads(False)

        def logits_of(span: slice) -> Tensor:
            return _divided(logits[span].to(wide(logits.dtype)), temperature, span)

        rows = whole_rows(logits_of, logits, logits.shape[1], ids, ask)
        ctx.ask, ctx.temperature, ctx.names = ask, temperature, list(rows.values)
        ctx.save_for_backward(logits, ids, rows.top, rows.log_sum, *rows.values.values())
        return rows.outputs(ctx)

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor | None) -> Any:
        """Rows without a gradient stay at the zeros they were made with."""
        with torch.no_grad():
            gradient = _gradient(ctx, incoming(arrived))
        return (*once([gradient], [ctx.saved_tensors[0], *arrived]), None, None, None)


def _gradient(ctx: Any, grads: dict[str, Tensor]) -> Tensor:
    logits, ids, *saved = ctx.saved_tensors
    ask, temperature, rows = ctx.ask, ctx.temperature, Rows.saved(ctx.names, saved, ctx.ask.support)
    gradient = torch.zeros_like(logits)
    height = ask.height(logits.shape[1])
    live = live_rows(grads, logits.shape[0], logits.device)
    size = min(height, live.numel()) * logits.shape[1]
    buffers, teacher_buffers = Buffers(logits, size), Buffers(logits, size)
    for index in (live[span] for span in spans(live.numel(), height)):
        part = rows.pick(index)
        by_row = temperature[index] if isinstance(temperature, Tensor) else temperature
        arrived = {name: grad[index].to(part.top.dtype) for name, grad in grads.items()}
        slope = Slope.of(arrived, part, 1 / by_row, ask.min_p or 1.0)
        # indexing copies, so the caller's logits are safe from what is done in place
        divided = _divided(logits[index].to(wide(logits.dtype)), by_row, slice(None), inplace=True)
        pull: float | Tensor = 0.0
        if ask.target is not None and "teacher_divergence" in arrived:
            whole_span, steep = slice(None), arrived["teacher_divergence"] / by_row
            pull = part.pull(
                ask.target.pick(index), steep, whole_span, slice(0, logits.shape[1]), divided, teacher_buffers
            )
        out = slope.of_tile(divided, ids[index], 0, buffers.take("gradient", *divided.shape))
        gradient.index_copy_(0, index, out.add_(pull).to(gradient.dtype))
    return gradient


def _divided(logits: Tensor, temperature: float | Tensor, span: slice, inplace: bool = False) -> Tensor:
    divisor = temperature[span].unsqueeze(1) if isinstance(temperature, Tensor) else temperature
    if not isinstance(divisor, Tensor) and divisor == 1.0:
        return logits
    return logits.div_(divisor) if inplace else logits / divisor
