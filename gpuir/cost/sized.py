"""What kernels do, by their extents: one kernel, or, with arrays for numbers, a table of them.
`cost.reading` finds the extents of an IR kernel. Arguments are called as in `gpuir.kernel`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

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
    Grouped,
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


def operand(
    dims: tuple[str, ...],
    extents: Mapping[str, Number],
    cell_bytes: Number,
    staging: Staging = "staged",
) -> Operand:
    """An operand of which each cell that the nest visits moves once."""
    return Operand(dims, cell_bytes, product(extents[d] for d in dims) * cell_bytes, staging)


def contracted(
    kernel: str,
    extents: Mapping[str, Number],
    operands: Sequence[Operand],
    dtype: DType,
    lane_ops: Number,
) -> Work:
    """A product of two operands over the nest b m n [k]: a `k.gemm`; or a `k.conv`, of which those
    with a few channels a group do not fill a matrix instruction: libraries run them on the lanes.
    """
    products = dtype.multiply_add * product(extents.values())
    narrow = kernel == "k.conv" and bool(np.all(np.minimum(extents["n"], extents["k"]) < 8))
    return Work(
        kernel=kernel,
        dims=tuple(extents.items()),
        reduced=("k",),
        operands=tuple(operands),
        flops=products,
        products=products,
        lane_ops=lane_ops,
        dtype=dtype,
        pipe="vector" if narrow else "tensor",
    )


def _finished(work: Work, epilogue: Sequence[str], columns: Number) -> Work:
    """A product with functions of its result; "bias" adds an operand of so many `columns`."""
    *reads, result = work.operands
    cells = result.nbytes / result.cell_bytes
    ops = cells * sum(lane_ops(fn, work.dtype) for fn in epilogue if fn != "bias")
    flops = ops
    if "bias" in epilogue:
        reads.append(Operand(("n",), result.cell_bytes, columns * result.cell_bytes, "streamed"))
        ops, flops = ops + cells, flops + flops_of("add", work.dtype) * cells
    return replace(
        work,
        operands=(*reads, result),
        lane_ops=work.lane_ops + ops,
        flops=work.flops + flops,
    )


SCALE_BYTES = 2.0  # of a scale that cells of a weight share: f16 (GPTQ, AWQ, ONNX MatMulNBits)


def gemm(
    m: Number,
    n: Number,
    k: Number,
    dtype: DType,
    *,
    b: Number = 1,
    layout: str = "nn",
    weight: DType | None = None,
    out: DType | None = None,
    epilogue: Sequence[str] = (),
    scales: str = "",
    group: Number = 0,
    math: DType | None = None,
) -> Work:
    """c[b, m, n] = a[b, m, k] · w[b, k, n], and functions of it: a `k.gemm` with these extents.

    `weight` is the dtype the right operand is stored in, where that is not what is multiplied: then
    the lanes convert it on its way into the tile; `group` cells of it along k share a scale. What
    `scales` are of, rows or blocks, its measurements are told apart by. An operand with a "t" in
    `layout` lies transposed.
    """
    out, extents = out or dtype, {"b": b, "m": m, "n": n, "k": k}
    sides = (("b", "m", "k"), dtype), (("b", "k", "n"), weight or dtype)
    operands = [
        operand(dims if order == "n" else (dims[0], *dims[:0:-1]), extents, of.bits / 8)
        for (dims, of), order in zip(sides, layout, strict=True)
    ]
    if np.any(np.greater(group, 0)):
        each = np.where(np.greater(group, 0), SCALE_BYTES / np.maximum(group, 1), 0.0) + 0.0
        scale = each if np.ndim(each) else float(each)
        operands.append(operand(("b", "k", "n"), extents, scale))
    operands.append(operand(("b", "m", "n"), extents, out.bits / 8, "written"))
    stored = b * m * n * (out != f32)
    if weight is not None and weight != dtype:
        stored = stored + b * k * n * DEQUANTISE_LANE_OPS
    kind = f"{scales} scales" if scales else ""
    found = replace(contracted("k.gemm", extents, operands, dtype, stored), kind=kind, math=math)
    return _finished(found, epilogue, n)


def grouped(
    rows: Number,
    n: Number,
    k: Number,
    groups: Number,
    dtype: DType,
    *,
    weight: DType | None = None,
    out: DType | None = None,
    scales: str = "",
    math: DType | None = None,
) -> Work:
    """One product for each of `groups` of weights [n, k], whose rows are handed out at random."""
    found = gemm(
        rows / groups, n, k, dtype, b=groups, weight=weight, out=out, scales=scales, math=math
    )
    active = 1 - np.exp(-rows / groups)
    left, right, *rest = found.operands
    lies = ("b", "n", "k")  # as vLLM's fused_moe.py has weights: "with shape (E, N, K)"
    right = replace(right, dims=lies, nbytes=right.nbytes * active)
    return replace(found, operands=(left, right, *rest), detail=Grouped(active))


def shape_of(
    size: Sequence[Number],
    window: Sequence[Number],
    stride: Number,
    dilation: Number,
    transposed: bool,
) -> ConvShape:
    """What the formulas of convolutions go by."""
    widest = window[0] if window else 1
    for extent in window[1:]:
        widest = np.maximum(widest, extent)
    cells, taps = product(size), product(window)
    return ConvShape(cells, taps, widest, stride, dilation, transposed=transposed)


def conv(
    batch: Number,
    channels: Number,
    size: Number | Sequence[Number],
    filters: Number,
    window: Number | Sequence[Number],
    dtype: DType,
    *,
    stride: Number = 1,
    dilation: Number = 1,
    padding: Number = 0,
    groups: Number = 1,
    transposed: bool = False,
    epilogue: Sequence[str] = (),
    library: str = "",
    math: DType | None = None,
) -> Work:
    """A convolution of [batch, channels, *size] by `filters` of `window`, in as many dimensions as
    these have, or two of equal extents, and functions of it: a `k.conv` with these extents."""
    size, window = axes_of(size, window)
    reach = [dilation * (r - 1) + 1 for r in window]
    result = [(n + 2 * padding - r) // stride + 1 for n, r in zip(size, reach, strict=True)]
    if transposed:
        result = [(n - 1) * stride - 2 * padding + r for n, r in zip(size, reach, strict=True)]
    cells, taps, cells_out = product(size), product(window), product(result)
    m, n, depth = batch * cells_out, filters // groups, channels // groups * taps
    if transposed:
        m, n, depth = batch * cells, filters // groups * taps, channels // groups
    cell = dtype.bits / 8
    extents = {"b": groups, "m": m, "n": n, "k": depth}
    operands = (
        Operand(("b", "m", "k"), cell, batch * channels * cells * cell, "staged"),
        operand(("b", "n", "k"), extents, cell),
        Operand(("b", "m", "n"), cell, batch * filters * cells_out * cell, "written"),
    )
    stored = batch * filters * cells_out * (dtype != f32)
    found = replace(
        contracted("k.conv", extents, operands, dtype, stored),
        detail=replace(shape_of(size, window, stride, dilation, transposed), library=library),
        form="transposed" if transposed else "",
        math=math,
    )
    return _finished(found, epilogue, filters)


def axes_of(size: Any, window: Any) -> tuple[tuple[Number, ...], tuple[Number, ...]]:
    """The extents of images and windows along each axis: those that one has, or two."""
    sizes, windows = _several(size), _several(window)
    axes = max(len(sizes), len(windows)) or 2
    return sizes or (size,) * axes, windows or (window,) * axes


def _several(value: Any) -> tuple[Number, ...]:
    several = isinstance(value, tuple | list)
    return tuple(cast("Sequence[Number]", value)) if several else ()


def attended(
    extents: Mapping[str, Number],
    operands: Sequence[Operand],
    dtype: DType,
    heads: Heads,
    density: Number,
    *,
    score_ops: float = SOFTMAX_LANE_OPS,
) -> Work:
    """softmax(q·kᵀ)·v over the nest b h s e [d]: a `k.attention`, of whose scores a mask leaves the
    share `density`, with so many instructions each."""
    scores = product(extents[d] for d in "bhsd")
    products = 2 * scores * (heads.head + extents["e"])
    lane_ops = score_ops * scores * density
    return Work(
        kernel="k.attention",
        dims=tuple(extents.items()),
        reduced=("d",),
        operands=tuple(operands),
        flops=products * density + lane_ops,
        products=products,
        lane_ops=lane_ops,
        dtype=dtype,
        pipe="tensor",
        density=density,
        detail=heads,
    )


FLASH_HEAD = 256  # cells: wider heads neither FlashAttention nor cuDNN takes (`Heads`)


def by_sdpa(work: Work, masked: bool) -> Work:
    """An attention as PyTorch calls it (see `Heads`), with a mask or without: where it is given a
    mask, it computes all scores."""
    heads, value = work.detail_as(Heads), work.extents["e"]
    apart = bool(np.any(np.not_equal(heads.head, value)))
    wide = np.max(np.maximum(heads.head, value)) > FLASH_HEAD
    call = "wide sdpa" if wide else "odd sdpa" if masked or apart else "sdpa"
    density = 1.0 if masked else work.density
    return replace(work, detail=replace(heads, call=call), density=density)


def by_library(work: Work, library: str, masked: bool) -> Work:
    """An attention by a kernel of that library (`ops.kernel.LIBRARIES`), with a mask or without."""
    match library:
        case "sdpa":
            return by_sdpa(work, masked)
        case "cudnn":
            return by_cudnn(work)
        case _:
            return replace(work, kind=library)


def by_cudnn(work: Work) -> Work:
    """An attention of cuDNN, whose kernels are not public: taken for FlashAttention's, and of one
    query for FlashInfer's, which its times on A100 are most like."""
    kind = "flashinfer" if np.max(work.extents["s"]) < 2 else ""
    return replace(work, kind=kind, detail=replace(work.detail_as(Heads), call="cudnn"))


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
    causal: bool = False,
    window: Number = 0,
    cache: DType | None = None,
    out: DType | None = None,
    shared: bool = False,
    append: Number = False,
    paged: bool = False,
    library: str = "",
    math: DType | None = None,
) -> Work:
    """softmax(q·kᵀ)·v of [batch, heads, queries, head] on [batch, kv_heads, keys, head]: a
    `k.attention` with these extents.

    Values have `value` cells a head, or as many as keys; keys and values are stored as `cache`. A
    causal mask lets the last query see the last key; `window` is how many keys a query sees at most
    (0: all). `shared`: the values are a part of the keys, as in latent attention. `append`: the
    call also writes its own keys and values to a cache; `paged`: it reads them in pages.
    """
    value = head if value is None else value
    kv_heads = heads if kv_heads is None else kv_heads
    kv_cell = (cache or dtype).bits / 8
    v_cell = 0.0 if shared else kv_cell
    is_windowed = np.greater(window, 0)
    width = _where(is_windowed, window, keys)
    seen: Number = np.minimum(keys, width + queries - 1)  # by some query
    extents = {"b": batch, "h": heads, "s": queries, "e": value, "d": keys}
    k_bytes = batch * kv_heads * seen * head * kv_cell
    v_bytes = batch * kv_heads * seen * value * v_cell
    operands = (
        operand(("b", "h", "s"), extents, dtype.bits / 8 * head, "held"),
        Operand(("b", "h", "d"), kv_cell * head, k_bytes, "staged"),
        Operand(("b", "h", "d", "e"), v_cell, v_bytes, "staged"),
        operand(("b", "h", "s", "e"), extents, (out or dtype).bits / 8, "written"),
    )
    detail = Heads(
        head=head,
        group=heads / kv_heads,
        kv_heads=kv_heads,
        reach=np.minimum(keys, width),
        append=batch * kv_heads * queries * (head + value) * kv_cell * append,
        windowed=_where(is_windowed, 1.0, 0.0) + 0.0 * keys,
        paged=paged,
    )
    density = density_of(queries, keys, causal, window)
    found = replace(attended(extents, operands, dtype, detail, density), math=math)
    past = causal and bool(np.any(np.not_equal(queries, keys) & np.greater(queries, 1)))
    return by_library(found, library, past or bool(np.any(is_windowed)))


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
    rows: Number,
    columns: Number,
    dtype: DType,
    of: str = "softmax",
    *,
    parameters: int = 0,
    ops: float | None = None,
) -> Work:
    """A reduction of `rows` of `columns`: a "softmax" or a "norm" that writes them (an "rms"
    norm by a kernel that takes a cell at a time), a "scan" (running sums), or a "sum" that writes a
    cell a row. `parameters` are operands of one row."""
    cell, cells = dtype.bits / 8, rows * columns
    written = rows if of == "sum" else cells
    each = ROW_LANE_OPS.get(of, 1.0) if ops is None else ops
    kept = ("o",) if of == "sum" else ("o", "r")
    return Work(
        kernel="k.reduce",
        dims=(("o", rows), ("r", columns)),
        reduced=("r",),
        operands=(
            Operand(("o", "r"), cell, cells * cell, "streamed"),
            *(Operand(("r",), cell, columns * cell, "streamed") for _ in range(parameters)),
            Operand(kept, cell, written * cell, "written"),
        ),
        flops=cells * each * flops_of("add", dtype),
        products=0,
        lane_ops=cells * each * flops_of("add", dtype) + OWN_LANE_OPS * written,
        dtype=dtype,
        pipe="vector",
        kind=of,
    )


def gather(rows: Number, width: Number, dtype: DType, table: Number, *, bag: Number = 1) -> Work:
    """`rows` of `width` cells, each the sum of `bag` rows that are read where 64-bit indices say in
    a table of so many."""
    cell = dtype.bits / 8
    cells = rows * width
    whole = table * width * cell
    fetched = bag * cells * cell * np.maximum(1.0, SECTOR_BYTES / (width * cell))
    return Work(
        kernel="k.gather",
        dims=(("i", cells),),
        reduced=(),
        operands=(
            Operand(("i",), cell, np.minimum(whole, fetched), "streamed"),
            Operand(("i",), 8.0, rows * bag * 8.0, "streamed"),
            Operand(("i",), cell, cells * cell, "written"),
        ),
        flops=(bag - 1) * cells,
        products=0,
        lane_ops=(OWN_LANE_OPS + bag - 1) * cells,
        dtype=dtype,
        pipe="vector",
        detail=Lookup(width * cell, whole, again=np.maximum(0.0, fetched - whole)),
    )


def top_k(rows: Number, columns: Number, k: Number, dtype: DType) -> Work:
    """The `k` largest cells of each of `rows`, in order, and where they were."""
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

    shapes = np.broadcast_arrays(rows, columns, k)
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
