"""The pass from hidden states in Triton: what :mod:`rlstab.signals.head` does in torch, with the tiles fused.

Forward: a program has a block of rows and a slice of the vocabulary, makes its logits a tile at a time and keeps
running sums; no logit is written. Slices merge by the law of the running sums. Backward: a product with the row
polynomial behind it writes the gradient of a tile of logits, for the live rows; the two products with it that follow
are those of the torch backend, summed in float32.

Held to float64 under Triton's interpreter; not tuned, and not measured on a GPU. Import it where Triton is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from rlstab.errors import ShapeError
from rlstab.signals import kernels
from rlstab.signals.fields import Ask
from rlstab.signals.projection import Head
from rlstab.signals.tile import FLOOR, Buffers, Rows, Slope, lowest_kept, settle, spans

#: Rows, columns of the vocabulary and hidden units of the tile that one program multiplies; powers of 2, at least 16.
BLOCK = (64, 128, 32)
#: Rows of one launch of the forward, which bounds what the slices of the vocabulary leave to be merged.
LAUNCH = 8192
LOWEST = torch.finfo(torch.float32).min

#: Whether the kernels run in Python, on tensors of any device: decided by TRITON_INTERPRET when Triton is imported.
INTERPRETED = not isinstance(kernels.sums, triton.JITFunction)


def check(hidden: Tensor) -> None:
    """Refuse what the kernels cannot do.

    Raises:
        ShapeError: a dtype or device for which there is no kernel.
    """
    if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ShapeError(
            f"token_signals: backend 'triton' sums in float32, and hidden is {hidden.dtype}. Take backend='torch'."
        )
    if not (hidden.is_cuda or INTERPRETED):
        raise ShapeError(
            f"token_signals: backend 'triton' needs a GPU, and hidden is on '{hidden.device}'. Take backend='torch', "
            f"or set TRITON_INTERPRET=1 before Triton is imported, which is for tests."
        )


@dataclass(frozen=True, eq=False)
class Launcher:
    """What every kernel is told about a head and some rows."""

    head: Head
    hidden: Tensor
    temperature: Tensor

    @classmethod
    def of(cls, head: Head, hidden: Tensor) -> Launcher:
        if isinstance(head.temperature, Tensor):
            return cls(head, hidden, head.temperature.contiguous())
        return cls(head, hidden, torch.full((len(hidden),), head.temperature, device=hidden.device))

    def at(self, span: slice) -> Launcher:
        """For some of the rows."""
        return Launcher(self.head, self.hidden[span], self.temperature[span])

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        weight = self.head.weight
        return self.hidden, weight, weight if self.head.bias is None else self.head.bias.contiguous(), self.temperature

    @property
    def strides(self) -> tuple[int, ...]:
        return self.hidden.shape[1], *self.hidden.stride(), *self.head.weight.stride()

    @property
    def factors(self) -> tuple[float, float]:
        """Before the soft cap and after it."""
        cap = self.head.softcap
        return (self.head.scale, 1.0) if cap is None else (self.head.scale / cap, cap)

    @property
    def flags(self) -> dict[str, Any]:
        rows, columns, units = BLOCK
        return {
            "BIASED": self.head.bias is not None,
            "CAPPED": self.head.softcap is not None,
            "WIDEN": INTERPRETED,
            "ROWS": rows,
            "COLUMNS": columns,
            "UNITS": units,
        }

    def slices(self, columns: int) -> tuple[tuple[int, int], int]:
        """Programs by blocks of rows and slices of the vocabulary; the columns of a slice, about ``columns``."""
        width = triton.cdiv(columns, BLOCK[1]) * BLOCK[1]
        return (triton.cdiv(self.hidden.shape[0], BLOCK[0]), triton.cdiv(self.head.weight.shape[0], width)), width


def running_pass(head: Head, hidden: Tensor, ids: Tensor, ask: Ask) -> Rows:
    """The forward: everything that :mod:`rlstab.signals.head` finds, by kernels."""
    found = Rows.empty(hidden.shape[0], ask.needs, hidden)
    with torch.cuda.device_of(hidden):
        every = Launcher.of(head, hidden)
        for span in spans(hidden.shape[0], LAUNCH):
            _launch_sums(found, span, every.at(span), ids[span].contiguous(), ask)
        if "log_kept_mass" in ask.needs:
            _launch_mass(found, head, hidden, ask)
    return found


def _launch_sums(found: Rows, span: slice, some: Launcher, ids: Tensor, ask: Ask) -> None:
    grid, width = some.slices(ask.columns)
    count, size = some.hidden.shape[0], some.head.weight.shape[0]
    tops, totals, moments, squares, owns = found.top.new_empty(5, grid[1], count)
    kernels.sums[grid](
        *some.inputs, ids, tops, totals, moments, squares, owns, count, size, *some.strides, *some.factors, width,
        LOWEST, FLOOR,
        OWN="logprobs" in ask.needs, MOMENT="entropies" in ask.needs, SQUARES="sum_p_sq" in ask.needs, **some.flags,
    )  # fmt: skip
    top = tops.amax(0)
    grown = tops - top
    carry = grown.exp()
    settle(
        found,
        span,
        top=top,
        total=(carry * totals).sum(0),
        moment=(carry * (moments + grown * totals)).sum(0),
        squares=(carry.square() * squares).sum(0),
        own=owns.sum(0),  # one slice has the token, the others 0
    )


def _launch_mass(found: Rows, head: Head, hidden: Tensor, ask: Ask) -> None:
    everywhere = torch.ones_like(found.top, dtype=torch.bool)
    index = (everywhere if ask.kept_rows is None else ask.kept_rows).nonzero().squeeze(1)
    for part in (index[span] for span in spans(index.numel(), LAUNCH)):
        some = Launcher.of(head.pick(part), hidden[part])
        top = found.top[part]
        grid, width = some.slices(ask.columns)
        masses = top.new_empty(grid[1], part.numel())
        kernels.mass[grid](
            *some.inputs, top, lowest_kept(top, ask.min_p or 1.0), masses,
            part.numel(), head.weight.shape[0], *some.strides, *some.factors, width, **some.flags,
        )  # fmt: skip
        # the likeliest token is kept by definition, and its own share of the sum is 1
        found.values["log_kept_mass"][part] = masses.sum(0).clamp_(min=1.0).log() - found.log_sum[part]


@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradient of tiles of logits, in the dtype of the products that follow (wide if something sums it up)."""

    every: Launcher
    ids: Tensor
    slope: Slope
    buffers: Buffers
    dtype: torch.dtype

    def of_tile(self, span: slice, columns: slice) -> Tensor:
        """``(rows, columns)``, in a buffer."""
        slope, some = self.slope[span], self.every.at(span)
        count, width = some.hidden.shape[0], columns.stop - columns.start
        out = self.buffers.take("gradient", count, width, self.dtype)
        terms = (slope.linear, slope.square, slope.kept, slope.target)
        linear, square, kept, target = (slope.top if one is None else one for one in terms)
        bounds = slope.top if slope.kept is None else lowest_kept(slope.top, slope.min_p)
        with torch.cuda.device_of(out):
            kernels.slopes[triton.cdiv(count, BLOCK[0]), triton.cdiv(width, BLOCK[1])](
                *some.inputs, self.ids[span], slope.top, slope.const, linear, square, kept, target, bounds, out,
                count, some.head.weight.shape[0], columns.start, columns.stop, *some.strides, *some.factors, FLOOR,
                LINEAR=slope.linear is not None, SQUARE=slope.square is not None, KEPT=slope.kept is not None,
                TARGET=slope.target is not None, **some.flags,
            )  # fmt: skip
        return out
