"""The pass from logits that already exist: a few rows at a time, and a backward over the live rows."""

from __future__ import annotations

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
        rows = Rows.empty(logits.shape[0], ask.needs, logits)
        for span in spans(logits.shape[0], _height(logits, ask)):
            whole_rows(rows, span, _divided(logits[span].to(wide(logits.dtype)), temperature, span), ids[span], ask)
        ctx.ask, ctx.temperature, ctx.names = ask, temperature, list(rows.values)
        ctx.save_for_backward(logits, ids, rows.top, rows.log_sum, *rows.values.values())
        return rows.outputs(ctx)

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor | None) -> Any:
        """Rows without a gradient stay at the zeros they were made with."""
        logits, ids, top, log_sum, *values = ctx.saved_tensors
        with torch.no_grad():
            gradient = _gradient(
                ctx.ask,
                logits,
                ids,
                ctx.temperature,
                incoming(arrived),
                Rows(dict(zip(ctx.names, values, strict=True)), top, log_sum),
            )
        return (*once([gradient], [logits, *arrived]), None, None, None)


def _gradient(
    ask: Ask, logits: Tensor, ids: Tensor, temperature: float | Tensor, grads: dict[str, Tensor], rows: Rows
) -> Tensor:
    gradient = torch.zeros_like(logits)
    height = _height(logits, ask)
    live = live_rows(grads, logits.shape[0], logits.device)
    buffers = Buffers(logits, min(height, live.numel()) * logits.shape[1])
    for index in (live[span] for span in spans(live.numel(), height)):
        support = None if ask.support is None else ask.support[index]
        part = Rows({}, rows.top[index], rows.log_sum[index], support)
        by_row = temperature[index] if isinstance(temperature, Tensor) else temperature
        slope = Slope.of(
            {name: grad[index].to(part.top.dtype) for name, grad in grads.items()},
            {name: values[index] for name, values in rows.values.items()},
            part,
            1 / by_row,
            ask.min_p or 1.0,
        )
        # indexing copies, so the caller's logits are safe from what is done in place
        divided = _divided(logits[index].to(wide(logits.dtype)), by_row, slice(None), inplace=True)
        out = buffers.take("gradient", *divided.shape)
        gradient.index_copy_(0, index, slope.of_tile(divided, ids[index], 0, out).to(gradient.dtype))
    return gradient


def _height(logits: Tensor, ask: Ask) -> int:
    """Rows that fit: a large vocabulary allows fewer."""
    return max(1, min(ask.rows, ask.rows * ask.columns // max(logits.shape[1], 1)))


def _divided(logits: Tensor, temperature: float | Tensor, span: slice, inplace: bool = False) -> Tensor:
    divisor = temperature[span].unsqueeze(1) if isinstance(temperature, Tensor) else temperature
    if not isinstance(divisor, Tensor) and divisor == 1.0:
        return logits
    return logits.div_(divisor) if inplace else logits / divisor
