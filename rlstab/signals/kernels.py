"""The kernels, in Triton's language. See :mod:`rlstab.signals.triton_head`, which launches them.

All take ``(N, d)`` hidden states, the ``(V, d)`` weight and ``(V,)`` bias of the head with their strides, ``(N,)``
float32 temperatures, and the factors before and after the soft cap. Sums are float32.
"""

import triton
import triton.language as tl


@triton.jit
def _logits(
    hidden, weight, bias, temperature, rows, columns, count, size, width,
    row_step, row_unit, column_step, column_unit, inner, outer,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """A tile of logits, -inf beyond the vocabulary; second, the bend of the soft cap."""
    x = tl.zeros((ROWS, COLUMNS), tl.float32)
    here, there = rows.to(tl.int64) * row_step, columns.to(tl.int64) * column_step
    for start in range(0, width, UNITS):
        unit = start + tl.arange(0, UNITS)
        h = tl.load(
            hidden + here[:, None] + unit[None, :] * row_unit,
            mask=(rows < count)[:, None] & (unit < width)[None, :],
            other=0.0,
        )
        w = tl.load(
            weight + there[None, :] + unit[:, None] * column_unit,
            mask=(columns < size)[None, :] & (unit < width)[:, None],
            other=0.0,
        )
        if WIDEN:  # the interpreter has no product of half precision; this one is exact in the same way
            h, w = h.to(tl.float32), w.to(tl.float32)
        x = tl.dot(h, w, x, input_precision="ieee")
    if BIASED:
        x += tl.load(bias + columns, mask=columns < size, other=0.0).to(tl.float32)[None, :]
    x *= inner
    bend = x
    if CAPPED:  # tanh, by an exponential that cannot overflow
        e = tl.exp(-2.0 * tl.abs(x))
        bend = 4.0 * e / ((1.0 + e) * (1.0 + e))
        t = (1.0 - e) / (1.0 + e)
        x = tl.where(x < 0, -t, t) * outer
    x = x / temperature[:, None]
    return tl.where((columns < size)[None, :], x, float("-inf")), bend


@triton.jit
def sums(
    hidden, weight, bias, temperatures, ids, tops, totals, moments, squares, owns,
    count, size, width, row_step, row_unit, column_step, column_unit, inner, outer, slice_size, lowest, floor,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, WIDEN: tl.constexpr,
    OWN: tl.constexpr, MOMENT: tl.constexpr, SQUARES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The running sums of a block of rows over a slice of the vocabulary, which is a multiple of COLUMNS wide."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    temperature = tl.load(temperatures + rows, mask=rows < count, other=1.0)
    token = tl.load(ids + rows, mask=rows < count, other=-1)
    top = tl.zeros((ROWS,), tl.float32) + lowest  # finite: a tile may hold forbidden tokens alone
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    own = tl.zeros((ROWS,), tl.float32)
    first = tl.program_id(1) * slice_size
    for start in range(first, min(first + slice_size, size), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        x, _ = _logits(
            hidden, weight, bias, temperature, rows, columns, count, size, width,
            row_step, row_unit, column_step, column_unit, inner, outer,
            BIASED, CAPPED, WIDEN, ROWS, COLUMNS, UNITS,
        )  # fmt: skip
        if OWN:
            own += tl.sum(tl.where(columns[None, :] == token[:, None], x, 0.0), 1)
        new = tl.maximum(top, tl.max(x, 1))
        grown = top - new
        carry = tl.exp(grown)
        y = x - new[:, None]
        e = tl.exp(y)
        if MOMENT:
            moment = carry * (moment + grown * total) + tl.sum(e * tl.maximum(y, floor), 1)
        total = carry * total + tl.sum(e, 1)
        if SQUARES:
            square = carry * carry * square + tl.sum(e * e, 1)
        top = new
    place = tl.program_id(1) * count + rows
    tl.store(tops + place, top, mask=rows < count)
    tl.store(totals + place, total, mask=rows < count)
    tl.store(moments + place, moment, mask=rows < count)
    tl.store(squares + place, square, mask=rows < count)
    tl.store(owns + place, own, mask=rows < count)


@triton.jit
def mass(
    hidden, weight, bias, temperatures, tops, bounds, masses,
    count, size, width, row_step, row_unit, column_step, column_unit, inner, outer, slice_size,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The sum of e over the kept columns of a slice."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    temperature = tl.load(temperatures + rows, mask=rows < count, other=1.0)
    top = tl.load(tops + rows, mask=rows < count, other=0.0)
    bound = tl.load(bounds + rows, mask=rows < count, other=0.0)
    mass = tl.zeros((ROWS,), tl.float32)
    first = tl.program_id(1) * slice_size
    for start in range(first, min(first + slice_size, size), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        x, _ = _logits(
            hidden, weight, bias, temperature, rows, columns, count, size, width,
            row_step, row_unit, column_step, column_unit, inner, outer,
            BIASED, CAPPED, WIDEN, ROWS, COLUMNS, UNITS,
        )  # fmt: skip
        y = x - top[:, None]
        mass += tl.sum(tl.where(y >= bound[:, None], tl.exp(y), 0.0), 1)
    tl.store(masses + tl.program_id(1) * count + rows, mass, mask=rows < count)


@triton.jit
def slopes(
    hidden, weight, bias, temperatures, ids, tops, consts, linears, squares, kepts, targets, bounds, out,
    count, size, first_column, end_column, width, row_step, row_unit, column_step, column_unit, inner, outer, floor,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, WIDEN: tl.constexpr,
    LINEAR: tl.constexpr, SQUARE: tl.constexpr, KEPT: tl.constexpr, TARGET: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of logits before the soft cap, less the factor that the coefficients carry."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = first_column + tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = rows < count
    temperature = tl.load(temperatures + rows, mask=there, other=1.0)
    x, bend = _logits(
        hidden, weight, bias, temperature, rows, columns, count, size, width,
        row_step, row_unit, column_step, column_unit, inner, outer,
        BIASED, CAPPED, WIDEN, ROWS, COLUMNS, UNITS,
    )  # fmt: skip
    y = x - tl.load(tops + rows, mask=there, other=0.0)[:, None]
    e = tl.exp(y)
    factor = tl.zeros((ROWS, COLUMNS), tl.float32) + tl.load(consts + rows, mask=there, other=0.0)[:, None]
    if LINEAR:
        factor += tl.load(linears + rows, mask=there, other=0.0)[:, None] * tl.maximum(y, floor)
    if SQUARE:
        factor += tl.load(squares + rows, mask=there, other=0.0)[:, None] * e
    if KEPT:
        near = y >= tl.load(bounds + rows, mask=there, other=0.0)[:, None]
        factor += tl.where(near, tl.load(kepts + rows, mask=there, other=0.0)[:, None], 0.0)
    g = e * factor
    if TARGET:
        token = tl.load(ids + rows, mask=there, other=-1)
        g += tl.where(columns[None, :] == token[:, None], tl.load(targets + rows, mask=there, other=0.0)[:, None], 0.0)
    if CAPPED:
        g *= bend
    row_length = end_column - first_column
    place = rows.to(tl.int64)[:, None] * row_length + (columns - first_column)[None, :]
    tl.store(out + place, g.to(out.dtype.element_ty), mask=there[:, None] & (columns < end_column)[None, :])
