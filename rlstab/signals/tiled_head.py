"""The pass from hidden states and the weight of the vocabulary head, which never holds ``(N, V)`` of anything.

Forward: tiles of the vocabulary outside, rows inside, with a running maximum and sums relative to it. Backward: the
logits of the live rows are made again a tile at a time, so it costs their share of a dense one. As the vocabulary is
outside, each tile of the weight's gradient is written once.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from rlstab.core.devices import sent
from rlstab.signals.support import log_mass, log_total, members
from rlstab.signals.tile import (
    FLOOR,
    Ask,
    Buffers,
    Rows,
    Slope,
    incoming,
    kept,
    live_rows,
    once,
    spans,
    whole_rows,
    wide,
)


@cache
def slow_bf16() -> bool:
    """Whether bfloat16 products are slower than float32 ones on this CPU: x86 with neither AVX512_BF16 nor AMX."""
    fast = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    return platform.machine() in ("x86_64", "AMD64") and all(check is not None and not check() for check in fast)


def multiplied(hidden: Tensor) -> Tensor:
    """Hidden states in the dtype of the products with a tile of the weight."""
    return hidden.float() if hidden.dtype == torch.bfloat16 and not hidden.is_cuda and slow_bf16() else hidden


@dataclass(frozen=True, eq=False)
class Head:
    """From hidden states to logits: ``softcap * tanh(scale * (h W' + b) / softcap) / temperature``."""

    weight: Tensor
    bias: Tensor | None
    temperature: float | Tensor
    scale: float
    softcap: float | None

    def pick(self, index: Tensor) -> Head:
        """The same head for some of the rows."""
        by_row = self.temperature[index] if isinstance(self.temperature, Tensor) else self.temperature
        return Head(self.weight, self.bias, by_row, self.scale, self.softcap)

    @property
    def vocab(self) -> int:
        """The number of logits."""
        return self.weight.shape[0]

    @property
    def factor(self) -> float | Tensor:
        """The derivative of a logit with respect to ``h W' + b``, less the bend of the soft cap."""
        return self.scale / self.temperature

    def logits(self, hidden: Tensor, rows: slice, columns: slice, buffers: Buffers) -> Tensor:
        """One wide tile, in a buffer; the bend of the soft cap, d capped / d not capped, is left in another."""
        inner = self.scale if self.softcap is None else self.scale / self.softcap
        outer = 1.0 if self.softcap is None else self.softcap
        if isinstance(self.temperature, float):
            outer /= self.temperature
        if self.softcap is None:  # nothing lies between: one factor, in the product's own epilogue
            inner, outer = inner * outer, 1.0
        weight = self.weight[columns].to(hidden.dtype)
        bias = None if self.bias is None else self.bias[columns].to(hidden.dtype)
        x = buffers.take("logits", hidden[rows].shape[0], weight.shape[0])
        if hidden.dtype == x.dtype:
            torch.addmm(
                x if bias is None else bias,
                hidden[rows],
                weight.t(),
                beta=0.0 if bias is None else inner,
                alpha=inner,
                out=x,
            )
        else:
            x.copy_(self._narrow(hidden[rows], weight, bias, buffers))
            if inner != 1.0:
                x.mul_(inner)
        if self.softcap is not None:
            x.tanh_()
            torch.square(x, out=buffers.take("bend", *x.shape)).neg_().add_(1.0)
            x.mul_(outer)
        if isinstance(self.temperature, Tensor):
            x.div_(self.temperature[rows].unsqueeze(1))
        return x

    def whole(self, hidden: Tensor, rows: slice, columns: int, buffers: Buffers) -> Tensor:
        """Whole rows of logits in a buffer, made by tiles of so many columns."""
        if self.vocab <= columns:
            return self.logits(hidden, rows, slice(None), buffers)
        x = buffers.take("whole", hidden[rows].shape[0], self.vocab)
        for tile in spans(self.vocab, columns):
            x[:, tile] = self.logits(hidden, rows, tile, buffers)
        return x

    @staticmethod
    def _narrow(hidden: Tensor, weight: Tensor, bias: Tensor | None, buffers: Buffers) -> Tensor:
        if hidden.is_cuda:  # the product is summed in float32 anyway; there it need not be rounded
            product = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
            return product if bias is None else product.add_(bias)
        x = buffers.take("narrow", hidden.shape[0], weight.shape[0], hidden.dtype)
        if bias is None:
            return torch.mm(hidden, weight.t(), out=x)
        return torch.addmm(bias, hidden, weight.t(), out=x)


class HeadSignals(torch.autograd.Function):
    """``(N, d)`` hidden states and ``(V, d)`` weight to the signals, in the order of the record."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        temperature: float | Tensor,
        scale: float,
        softcap: float | None,
        ask: Ask,
    ) -> tuple[Tensor | None, ...]:
        """One pass, and a second one over the rows that need ``log_kept_mass``."""
        ctx.set_materialize_grads(False)
        head = Head(weight, bias, temperature, scale, softcap)
        with torch.autocast(hidden.device.type, enabled=False):
            states = multiplied(hidden)
            if ask.target is not None or head.vocab <= ask.columns:  # a teacher is compared over whole rows
                buffers = Buffers(hidden, min(ask.height(head.vocab), hidden.shape[0]) * head.vocab)
                logits_of = partial(head.whole, states, columns=ask.columns, buffers=buffers)
                rows = whole_rows(logits_of, hidden, head.vocab, ids, ask)
            else:
                rows = _running_pass(head, states, ids, ask)
        ctx.ask, ctx.names, ctx.rest = ask, list(rows.values), (temperature, scale, softcap)
        ctx.save_for_backward(hidden, weight, bias, ids, rows.top, rows.log_sum, *rows.values.values())
        return rows.outputs(ctx)

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor | None) -> Any:
        """Over the live rows; nothing is computed for an input that needs no gradient."""
        hidden, weight, bias, *_ = ctx.saved_tensors
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            gradients = _backward(ctx, incoming(arrived))
        return (*once(gradients, [hidden, weight, bias, *arrived]), None, None, None, None, None)


def _running_pass(head: Head, hidden: Tensor, ids: Tensor, ask: Ask) -> Rows:
    """A running maximum ``top``, and sums over ``y = x - top`` that are carried along when it grows."""
    rows = Rows.empty(hidden.shape[0], ask.needs, hidden)
    buffers = Buffers(hidden, min(ask.rows, hidden.shape[0]) * ask.columns)
    top = rows.top.fill_(torch.finfo(rows.top.dtype).min)  # finite: a tile may hold only forbidden tokens
    total, moment, squares, logit = (torch.zeros_like(top) for _ in range(4))
    of_support = torch.full_like(top, -torch.inf)
    for columns in spans(head.vocab, ask.columns):
        for span in spans(hidden.shape[0], ask.rows):
            x = head.logits(hidden, span, columns, buffers)
            if "logprobs" in ask.needs:
                column, in_tile = members(ids[span, None], columns.start, x.shape[1])
                logit[span] = torch.where(in_tile, x.gather(1, column), logit[span, None]).squeeze(1)
            new = torch.maximum(top[span], x.amax(1))
            grown = top[span] - new
            carry = grown.exp()
            shifted = x.sub_(new.unsqueeze(1))
            if "log_support_mass" in ask.needs and ask.support is not None:
                of_tile = log_total(shifted, ask.support[span], columns.start)
                of_support[span] = (of_support[span] + grown).logaddexp(of_tile)
            e = torch.exp(shifted, out=buffers.take("e", *x.shape))
            if "entropies" in ask.needs:  # relative to the maximum: a plain sum of p * x cancels
                fresh = shifted.clamp_(min=FLOOR).mul_(e).sum(1)
                moment[span] = carry * (moment[span] + grown * total[span]) + fresh
            total[span] = carry * total[span] + e.sum(1)
            if "sum_p_sq" in ask.needs:
                squares[span] = carry.square() * squares[span] + e.square_().sum(1)
            top[span] = new
    rows.log_sum[:] = total.log()
    signals = {
        "logprobs": (logit - top) - rows.log_sum,
        "entropies": rows.log_sum - moment / total,
        "max_logprobs": -rows.log_sum,
        "sum_p_sq": squares / total.square(),
    }
    rows.values.update({name: values for name, values in signals.items() if name in ask.needs})
    if "log_support_mass" in ask.needs and ask.support is not None:
        rows.values["log_support_mass"] = log_mass(of_support, rows.log_sum, ask.support)
    if "log_kept_mass" in ask.needs:
        _kept_pass(head, hidden, rows, ask, buffers)
    return rows


def _kept_pass(head: Head, hidden: Tensor, rows: Rows, ask: Ask, buffers: Buffers) -> None:
    """The kept set is relative to the final maximum, so it takes a second look: at the rows that need it."""
    all_rows = torch.ones(rows.top.shape, dtype=torch.bool)
    index = sent((all_rows if ask.kept_rows is None else ask.kept_rows).nonzero().squeeze(1), hidden.device)
    picked_head, picked_hidden, top = head.pick(index), hidden[index], rows.top[index]
    mass = torch.zeros_like(top)
    for columns in spans(head.vocab, ask.columns):
        for span in spans(index.numel(), ask.rows):
            shifted = picked_head.logits(picked_hidden, span, columns, buffers).sub_(top[span].unsqueeze(1))
            likely = kept(shifted, top[span], ask.min_p or 1.0)
            mass[span] += shifted.exp_().mul_(likely).sum(1)
    # the likeliest token is kept by definition, and its own share of the sum is 1
    rows.values["log_kept_mass"][index] = mass.clamp_(min=1.0).log() - rows.log_sum[index]


def _backward(ctx: Any, grads: dict[str, Tensor]) -> list[Tensor | None]:
    hidden, weight, bias, ids, *saved = ctx.saved_tensors
    ask, head, rows = ctx.ask, Head(weight, bias, *ctx.rest), Rows.saved(ctx.names, saved, ctx.ask.support)
    live, live_hidden = live_rows(grads, hidden.shape[0], hidden.device), hidden
    dense = live.numel() == hidden.shape[0]
    if not dense:  # rows without gradient leave here, and with them their share of every product below
        head, live_hidden, ids, rows = head.pick(live), hidden[live], ids[live], rows.pick(live)
        grads = {name: grad[live] for name, grad in grads.items()}
    live_hidden = multiplied(live_hidden)
    grads = {name: grad.to(rows.top.dtype) for name, grad in grads.items()}
    slope = Slope.of(grads, rows, head.factor, ask.min_p or 1.0)
    size = min(ask.rows, live_hidden.shape[0]) * min(ask.columns, head.vocab)
    buffers, teacher_buffers = Buffers(hidden, size), Buffers(hidden, size)
    target = ask.target if dense or ask.target is None else ask.target.pick(live)
    steep = grads["teacher_divergence"] * head.factor if "teacher_divergence" in grads else None
    # zeros, not None, where no row is live: each rank of a data-parallel group must have something to reduce
    by_hidden = torch.zeros_like(live_hidden, dtype=rows.top.dtype) if ctx.needs_input_grad[0] else None
    by_weight = torch.zeros_like(head.weight) if ctx.needs_input_grad[1] else None
    by_bias = (
        torch.zeros_like(head.bias, dtype=rows.top.dtype) if ctx.needs_input_grad[2] and head.bias is not None else None
    )
    for columns in spans(head.vocab, ask.columns) if live_hidden.shape[0] else ():
        by_tile, total = None if by_weight is None else by_weight[columns], None
        for span in spans(live_hidden.shape[0], ask.rows):
            x = head.logits(live_hidden, span, columns, buffers)
            pull = None
            if target is not None and steep is not None:
                pull = rows.pull(target, steep, span, columns, x, teacher_buffers)
            g = slope[span].of_tile(x, ids[span], columns.start, buffers.take("e", *x.shape))
            if pull is not None:
                g.add_(pull)
            if head.softcap is not None:
                g.mul_(buffers.take("bend", *x.shape))
            if by_bias is not None:
                by_bias[columns] += g.sum(0)
            if by_hidden is not None:  # no product of a tile is rounded: those of an entropy nearly cancel
                tile, dtype = head.weight[columns], by_hidden.dtype
                if tile.is_cuda and tile.dtype != dtype:
                    by_hidden[span] += torch.mm(g.to(tile.dtype), tile, out_dtype=dtype)
                else:
                    by_hidden[span].addmm_(g.to(dtype), tile.to(dtype))
            if by_tile is not None:
                total = _added(total, g.to(live_hidden.dtype).t(), live_hidden[span], by_tile)
        if by_tile is not None and total is not None and total is not by_tile:
            by_tile.copy_(total)
    if by_hidden is not None:
        narrow = by_hidden.to(hidden.dtype)
        by_hidden = narrow if dense else torch.zeros_like(hidden).index_copy_(0, live, narrow)
    if by_bias is not None and head.bias is not None:
        by_bias = by_bias.to(head.bias.dtype)
    return [by_hidden, by_weight, by_bias]


def _added(total: Tensor | None, left: Tensor, right: Tensor, into: Tensor) -> Tensor:
    """The product added to the others of its tile, in float32 if there are several; a single one is put ``into``."""
    if total is None:
        return torch.mm(left, right, out=into) if left.dtype == into.dtype else left @ right
    if total.dtype == left.dtype == wide(left.dtype):
        return total.addmm_(left, right)
    return total.float().add_(left @ right)
