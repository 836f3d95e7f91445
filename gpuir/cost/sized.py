"""Works of kernels that are known by their extents alone: of one kernel, or, with arrays for
numbers, of a table of them. Each equals what `cost.reading` reads off such a kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from gpuir.cost import steps
from gpuir.cost.lanes import (
    DEQUANTISE_LANE_OPS,
    NORM_LANE_OPS,
    OWN_LANE_OPS,
    SOFTMAX_LANE_OPS,
    lane_ops,
    simd_ops,
)
from gpuir.cost.sheet import Number
from gpuir.cost.work import (
    SECTOR_BYTES,
    ConvShape,
    Heads,
    Lookup,
    Operand,
    Staging,
    Work,
    product,
    stacked,
)
from gpuir.ir.errors import UsageError
from gpuir.ir.types import DType, f32
from gpuir.ops.scalar import flops_of

_where: Callable[..., Number] = np.where


def gemm(
    m: Number,
    n: Number,
    depth: Number,
    dtype: DType,
    *,
    b: Number = 1,
    out: DType | None = None,
    weight: DType | None = None,
    bias: bool = False,
    math: DType | None = None,
) -> Work:
    """c[b, m, n] = a[b, m, k] · w[b, k, n], with k = `depth`: a `k.gemm` with these extents.

    `weight` is the dtype the right operand is stored in, where that is not what is multiplied: then
    the lanes convert it on its way into the tile.
    """
    out = out or dtype
    stored = (weight or dtype).bits / 8
    operands = [
        Operand(("b", "m", "k"), dtype.bits / 8, b * m * depth * dtype.bits / 8, "staged"),
        Operand(("b", "k", "n"), stored, b * depth * n * stored, "staged"),
        Operand(("b", "m", "n"), out.bits / 8, b * m * n * out.bits / 8, "written"),
    ]
    if bias:
        operands.insert(2, Operand(("n",), out.bits / 8, n * out.bits / 8, "streamed"))
    lane_ops = b * m * n * (bias + (out != f32))
    if weight is not None and weight != dtype:
        lane_ops = lane_ops + b * depth * n * DEQUANTISE_LANE_OPS
    return Work(
        kernel="k.gemm",
        dims=(("b", b), ("m", m), ("n", n), ("k", depth)),
        reduced=("k",),
        operands=tuple(operands),
        flops=dtype.multiply_add * b * m * n * depth + bias * flops_of("add", dtype) * b * m * n,
        products=dtype.multiply_add * b * m * n * depth,
        lane_ops=lane_ops,
        dtype=dtype,
        pipe="tensor",
        math=math,
    )


def conv(
    batch: Number,
    channels: Number,
    size: Sequence[Number],
    filters: Number,
    window: Sequence[Number],
    dtype: DType,
    *,
    stride: Number = 1,
    dilation: Number = 1,
    padding: Number = 0,
    groups: Number = 1,
    transposed: bool = False,
) -> Work:
    """A convolution of [batch, channels, *size] by `filters` of `window`, in as many dimensions as
    these have: a `k.conv` with these extents."""
    reach = [dilation * (r - 1) + 1 for r in window]
    result = [(n + 2 * padding - r) // stride + 1 for n, r in zip(size, reach, strict=True)]
    if transposed:
        result = [(n - 1) * stride - 2 * padding + r for n, r in zip(size, reach, strict=True)]
    cells, taps, cells_out = product(size), product(window), product(result)
    m, n, depth = batch * cells_out, filters // groups, channels // groups * taps
    if transposed:
        m, n, depth = batch * cells, filters // groups * taps, channels // groups
    cell = dtype.bits / 8
    lane_ops = batch * filters * cells_out * (dtype != f32)
    narrow = bool(np.all(np.minimum(n, depth) < 8))
    widest = window[0]
    for extent in window[1:]:
        widest = np.maximum(widest, extent)
    return Work(
        kernel="k.conv",
        dims=(("b", groups), ("m", m), ("n", n), ("k", depth)),
        reduced=("k",),
        operands=(
            Operand(("b", "m", "k"), cell, batch * channels * cells * cell, "staged"),
            Operand(("b", "n", "k"), cell, groups * n * depth * cell, "staged"),
            Operand(("b", "m", "n"), cell, batch * filters * cells_out * cell, "written"),
        ),
        flops=dtype.multiply_add * groups * m * n * depth,
        products=dtype.multiply_add * groups * m * n * depth,
        lane_ops=lane_ops,
        dtype=dtype,
        pipe="vector" if narrow else "tensor",
        detail=ConvShape(cells, taps, widest, stride, dilation, transposed),
        form="transposed" if transposed else "",
    )


def attention(
    batch: Number,
    heads: Number,
    queries: Number,
    keys: Number,
    head: Number,
    dtype: DType,
    *,
    value: Number | None = None,
    kv_heads: Number | None = None,
    kv_dtype: DType | None = None,
    causal: bool = False,
    window: Number = 0,
    out: DType | None = None,
    shared: bool = False,
    append: Number = False,
    paged: bool = False,
    stack: str = "",
) -> Work:
    """softmax(q·kᵀ)·v of [batch, heads, queries, head] on [batch, kv_heads, keys, head]: a
    `k.attention` with these extents.

    Values have `value` cells a head, or as many as keys. A causal mask lets the last query see the
    last key; `window` is how many keys a query sees at most (0: all). `shared`: the values are a
    part of the keys, as in latent attention. `append`: the call also writes its own keys and values
    to a cache; `paged`: it reads them in pages. `stack` names the library, where it is known.
    """
    value = head if value is None else value
    kv_heads = heads if kv_heads is None else kv_heads
    q_cell, kv_cell = dtype.bits / 8, (kv_dtype or dtype).bits / 8
    out_cell = (out or dtype).bits / 8
    v_cell = 0.0 if shared else kv_cell
    scores = batch * heads * queries * keys
    density = density_of(queries, keys, causal, window)
    width = _where(np.greater(window, 0), window, keys)
    seen: Number = np.minimum(keys, width + queries - 1)  # by some query
    rows = batch * heads * queries
    lane_ops = SOFTMAX_LANE_OPS * scores * density
    products = 2 * scores * (head + value)
    return Work(
        kernel="k.attention",
        dims=(("b", batch), ("h", heads), ("s", queries), ("e", value), ("d", keys)),
        reduced=("d",),
        operands=(
            Operand(("b", "h", "s"), q_cell * head, rows * head * q_cell, "held"),
            Operand(
                ("b", "h", "d"), kv_cell * head, batch * kv_heads * seen * head * kv_cell, "staged"
            ),
            Operand(
                ("b", "h", "d", "e"), v_cell, batch * kv_heads * seen * value * v_cell, "staged"
            ),
            Operand(("b", "h", "s", "e"), out_cell, rows * value * out_cell, "written"),
        ),
        flops=products * density + lane_ops,
        products=products,
        lane_ops=lane_ops,
        dtype=dtype,
        pipe="tensor",
        density=density,
        kind=stack,
        detail=Heads(
            head=head,
            group=heads / kv_heads,
            kv_heads=kv_heads,
            reach=np.minimum(keys, width),
            append=batch * kv_heads * queries * (head + value) * kv_cell * append,
            windowed=_where(np.greater(window, 0), 1.0, 0.0) + 0.0 * keys,
            paged=paged,
        ),
    )


def density_of(queries: Number, keys: Number, causal: bool, window: Number = 0) -> Number:
    """The share of scores that a causal mask, aligned at the end, and a window leave."""
    if not causal:
        return 1.0 + 0.0 * queries
    scores = queries * keys
    queries = np.minimum(queries, keys)  # of more, the first see nothing
    before = keys - queries  # keys that even the first query sees
    seen = before * queries + queries * (queries + 1) / 2
    width = _where(np.greater(window, 0), window, keys)
    # Queries whose reach the window cuts: the last sees `over` keys too many, each one before it
    # one fewer.
    over: Number = np.maximum(keys - width, 0)
    cut: Number = np.minimum(over, queries)
    return (seen - cut * (2 * over - cut + 1) / 2) / scores


def pointwise(
    cells: Number,
    reads: Sequence[DType],
    writes: Sequence[DType],
    *,
    ops: float = 1.0,
    kind: str = "",
) -> Work:
    """A map over `cells`: every operand has that many, and each cell takes `ops` instructions
    besides its own addresses and stores."""

    def operand(dtype: DType, staging: Staging) -> Operand:
        return Operand(("i",), dtype.bits / 8, cells * (dtype.bits / 8), staging)

    return Work(
        kernel="k.copy" if kind in ("copy", "transpose") else "k.map",
        dims=(("i", cells),),
        reduced=(),
        operands=(
            *(operand(d, "streamed") for d in reads),
            *(operand(d, "written") for d in writes),
        ),
        flops=cells,
        products=0,
        lane_ops=cells * (ops + OWN_LANE_OPS),
        dtype=max((*reads, *writes), key=lambda d: d.bits),
        pipe="vector",
        kind=kind,
    )


def mapped(fn: str, cells: Number, reads: Sequence[DType], out: DType) -> Work:
    """A map of one scalar function."""
    dtype = reads[-1] if reads else out
    found = pointwise(cells, reads, (out,), ops=lane_ops(fn, dtype))
    flops = flops_of(fn, dtype) * cells
    return replace(found, flops=flops, simd_ops=simd_ops([(fn, cells)]))


# Instructions a cell; of sums and running sums one.
ROW_LANE_OPS = {"softmax": SOFTMAX_LANE_OPS, "norm": NORM_LANE_OPS, "rms": 4.0}


def rows(
    count: Number,
    length: Number,
    dtype: DType,
    kind: str,
    *,
    parameters: int = 0,
    ops: float | None = None,
) -> Work:
    """A reduction of `count` rows of `length`: a "softmax" or a "norm" that writes them (an "rms"
    norm by a kernel that takes a cell at a time), a "scan" (running sums), or a "sum" that writes a
    cell a row. `parameters` are operands of one row."""
    cell, cells = dtype.bits / 8, count * length
    written = count if kind == "sum" else cells
    each = ROW_LANE_OPS.get(kind, 1.0) if ops is None else ops
    kept = ("o",) if kind == "sum" else ("o", "r")
    return Work(
        kernel="k.reduce",
        dims=(("o", count), ("r", length)),
        reduced=("r",),
        operands=(
            Operand(("o", "r"), cell, cells * cell, "streamed"),
            *(Operand(("r",), cell, length * cell, "streamed") for _ in range(parameters)),
            Operand(kept, cell, written * cell, "written"),
        ),
        flops=cells * each * flops_of("add", dtype),
        products=0,
        lane_ops=cells * each * flops_of("add", dtype) + OWN_LANE_OPS * written,
        dtype=dtype,
        pipe="vector",
        kind=kind,
    )


def gather(
    count: Number, width: Number, dtype: DType, table_rows: Number, *, bag: Number = 1
) -> Work:
    """`count` rows of `width` cells, each the sum of `bag` rows that are read where 64-bit indices
    say in a table of `table_rows`."""
    cell = dtype.bits / 8
    cells = count * width
    table = table_rows * width * cell
    fetched = bag * cells * cell * np.maximum(1.0, SECTOR_BYTES / (width * cell))
    return Work(
        kernel="k.gather",
        dims=(("i", cells),),
        reduced=(),
        operands=(
            Operand(("i",), cell, np.minimum(table, fetched), "streamed"),
            Operand(("i",), 8.0, count * bag * 8.0, "streamed"),
            Operand(("i",), cell, cells * cell, "written"),
        ),
        flops=(bag - 1) * cells,
        products=0,
        lane_ops=(OWN_LANE_OPS + bag - 1) * cells,
        dtype=dtype,
        pipe="vector",
        detail=Lookup(width * cell, table, again=np.maximum(0.0, fetched - table)),
    )


def top_k(rows: Number, length: Number, found: Number, dtype: DType) -> Work:
    """The `found` largest cells of each of `rows`, in order, and where they were."""
    cell = dtype.bits / 8

    def one(rows: float, length: float, found: float) -> Work:
        return Work(
            kernel="k.routine",
            dims=(("i", rows * length),),
            reduced=(),
            operands=(
                Operand(("i",), cell, rows * length * cell, "streamed"),
                Operand(("i",), cell, rows * found * cell, "written"),
                Operand(("i",), 8.0, rows * found * 8.0, "written"),
            ),
            flops=rows * length * int(max(found - 1, 1)).bit_length(),
            products=0,
            lane_ops=OWN_LANE_OPS * rows * found,
            dtype=dtype,
            pipe="vector",
            kind="topk",
            detail=steps.top_k(rows, length, found, cell),
        )

    shapes = np.broadcast_arrays(rows, length, found)
    if not shapes[0].ndim:
        return one(*map(float, shapes))
    each = np.stack(shapes, axis=-1).reshape(-1, 3)
    flat = stacked([one(*map(float, row)) for row in each])
    return flat.each(lambda column: np.reshape(column, shapes[0].shape))


# ---------------------------------------------------------------------------- axes

_TERM = re.compile(r"\s*([0-9]*\.?[0-9]*)\s*([a-z_]\w*)\s*")


@lru_cache(maxsize=4096)
def terms(axis: str) -> tuple[tuple[float, str], ...]:
    """The loops that an axis is a sum of, each with its step: `y+2i` is y and 2 times i. A step
    with a fraction is a mean: the kernel reads it when it runs."""
    found: list[tuple[float, str]] = []
    for part in axis.split("+"):
        match = _TERM.fullmatch(part)
        if match is None:
            raise UsageError(
                f"an axis is not valid: {axis!r}", expected="a loop, or a sum of loops: y+2i"
            )
        found.append((float(match[1] or 1.0), match[2]))
    return tuple(found)


def reach(axis: str, extents: Mapping[str, Number], where: str = "") -> Number:
    """Cells along an axis that loops of these extents touch."""
    cells: Number = 1.0
    for step, d in terms(axis):
        if d not in extents:
            raise UsageError(
                f"the axis {axis!r} has a loop that the loop nest does not have",
                where=where,
                expected=", ".join(extents),
                found=d,
            )
        cells = cells + step * (np.maximum(extents[d], 1.0) - 1)
    return cells
