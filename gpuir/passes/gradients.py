"""The gradient of each tensor op, as rows: a rule is given the op, its results and the gradient dy
of its first result, and gives its operands theirs.

What a rule reads of the forward pass is what training has to keep. Where PyTorch's backward reads
the result (softmax, relu) so does the rule, where it reads the operand (norms, products) likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Op, Value
from gpuir.ir.types import TensorType, i64
from gpuir.ops import tensor as t
from gpuir.passes import derivatives
from gpuir.passes.reverse import Reverse

Extents = tuple[int, ...]
Rule = Callable[[Reverse, Any, Sequence[Value], Value], None]


# ---------------------------------------------------------------------------- pointwise, layout


def _map(r: Reverse, op: t.Map, results: Sequence[Value], dy: Value) -> None:
    found = derivatives.gradients(op.fn, r, dy, results[0], (*op.args, *op.imm))
    for x, dx in zip(op.args, found, strict=False):
        r.give(x, dx)


def _same(
    r: Reverse, op: t.Cast | t.Ordered | t.Broadcast, results: Sequence[Value], dy: Value
) -> None:
    r.give(op.x, dy)  # which casts back and adds up what was broadcast


def _reshape(r: Reverse, op: t.Reshape, results: Sequence[Value], dy: Value) -> None:
    r.give(op.x, r.reshape(dy, op.x.type.shape))


def _parts(r: Reverse, op: t.Parts, results: Sequence[Value], dy: Value) -> None:
    r.give(op.x, r.b(t.Parts(dy)))


def _transpose(r: Reverse, op: t.Transpose, results: Sequence[Value], dy: Value) -> None:
    r.give(op.x, r.transpose(dy, sorted(range(len(op.perm)), key=op.perm.__getitem__)))


def _slice(r: Reverse, op: t.Slice, results: Sequence[Value], dy: Value) -> None:
    r.give_part(op, dy)


def _concat(r: Reverse, op: t.Concat, results: Sequence[Value], dy: Value) -> None:
    start = 0
    for x in op.args:
        starts = tuple(start if a == op.axis else 0 for a in range(x.type.rank))
        start += x.type.shape[op.axis]
        r.give(x, r.b(t.Slice(dy, starts, x.type.shape, (1,) * x.type.rank)))


MOST_PADDED = 1 << 20  # cells of an axis that is padded by its own: its gradient lists them


def _pad(r: Reverse, op: t.Pad, results: Sequence[Value], dy: Value) -> None:
    """Constant: the padding comes off. Otherwise each axis is a gather of its cells."""
    if op.mode == "constant":
        dx = r.b(t.Pad(dy, tuple(-n for n in op.low), tuple(-n for n in op.high)))
        r.give(op.x, dx)
        if r.wants(op.value):
            sums = [r.reduce("sum", v, range(v.type.rank), keepdims=False) for v in (dy, dx)]
            r.give(op.value, r.map("sub", *sums))
        return
    for axis, (n, low, high) in enumerate(zip(op.x.type.shape, op.low, op.high, strict=True)):
        if low or high:
            if n + low + high > MOST_PADDED:
                what = (
                    f"gpuir has no gradient of a {op.mode} pad of an axis of "
                    f"{n + low + high} elements"
                )
                raise ModelError(what, expected=f"at most {MOST_PADDED}")
            cells = tuple(_padded_from(i - low, n, op.mode) for i in range(n + low + high))
            indices = r.b(t.Constant(TensorType((len(cells),), i64), cells))
            shape = tuple(n if a == axis else m for a, m in enumerate(dy.type.shape))
            dy = _scatter_along(r, dy, indices, shape, axis=axis)
    r.give(op.x, dy)


def _padded_from(i: int, n: int, mode: str) -> int:
    """The cell of an axis of n that a cell i outside of it repeats."""
    if mode == "edge":
        return min(max(i, 0), n - 1)
    if mode == "wrap" or n == 1:
        return i % n
    i %= 2 * n - 2
    return min(i, 2 * n - 2 - i)


# ---------------------------------------------------------------------------- indexing


def _gather(r: Reverse, op: t.Gather, results: Sequence[Value], dy: Value) -> None:
    shape = op.x.type.shape
    r.give(op.x, _scatter_along(r, dy, op.indices, shape, axis=op.axis, spread=op.spread))


def _scatter_along(
    r: Reverse, dy: Value, indices: Value, shape: tuple[int, ...], axis: int, spread: str = ""
) -> Value:
    """dx[a, indices[i], b] += dy[a, i, b], with `axis` moved to the front and back."""
    rank, count = len(shape), indices.type.rank
    dy = r.transpose(
        dy, (*range(axis, axis + count), *range(axis), *range(axis + count, dy.type.rank))
    )
    front = (axis, *(a for a in range(rank) if a != axis))
    dx = r.constant(TensorType(tuple(shape[a] for a in front), dy.type.dtype))
    column = r.reshape(indices, (*indices.type.shape, 1))
    dx = r.b(t.ScatterND(dx, column, dy, "add", spread))
    return r.transpose(dx, sorted(range(rank), key=front.__getitem__))


def _gather_elements(r: Reverse, op: t.GatherElements, results: Sequence[Value], dy: Value) -> None:
    zeros = r.constant(op.x.type)
    r.give(op.x, r.b(t.ScatterElements(zeros, op.indices, dy, op.axis, "add")))


def _gather_nd(r: Reverse, op: t.GatherND, results: Sequence[Value], dy: Value) -> None:
    """Batch axes become indices like the others."""
    indices, lead = op.indices, op.indices.type.shape[:-1]
    columns = [
        r.reshape(r.b(t.Iota(TensorType(lead, indices.type.dtype), axis)), (*lead, 1))
        for axis in range(op.batch)
    ]
    if columns:
        indices = r.b(t.Concat((*columns, indices), len(lead)))
    r.give(op.x, r.b(t.ScatterND(r.constant(op.x.type), indices, dy, "add")))


def _scatter_elements(
    r: Reverse, op: t.ScatterElements, results: Sequence[Value], dy: Value
) -> None:
    _only_set_or_add(op, op.combine)
    if op.combine == "none":
        zeros = r.constant(op.updates.type)
        r.give(op.x, r.b(t.ScatterElements(dy, op.indices, zeros, op.axis)))
    else:
        r.give(op.x, dy)
    r.give(op.updates, r.b(t.GatherElements(dy, op.indices, op.axis)))


def _scatter_nd(r: Reverse, op: t.ScatterND, results: Sequence[Value], dy: Value) -> None:
    _only_set_or_add(op, op.combine)
    zeros = r.constant(op.updates.type)
    r.give(op.x, dy if op.combine == "add" else r.b(t.ScatterND(dy, op.indices, zeros)))
    r.give(op.updates, r.b(t.GatherND(dy, op.indices)))


def _only_set_or_add(op: Op, combine: t.Combine) -> None:
    if combine not in ("none", "add"):
        raise ModelError(
            f"gpuir has no gradient of {op.name} with the reduction {combine}", expected="add"
        )


# ---------------------------------------------------------------------------- reductions


def _reduce(r: Reverse, op: t.Reduce, results: Sequence[Value], dy: Value) -> None:
    """Extremes share dy evenly among the cells that attain them, as torch.amax does."""
    x, shape = op.x, op.x.type.shape
    kept = tuple(1 if a in op.axes else n for a, n in enumerate(shape))
    dy = r.reshape(dy, kept)
    match op.fn:
        case "sum":
            r.give(x, r.broadcast(dy, shape))
        case "mean":
            count = prod(shape[a] for a in op.axes)
            r.give(x, r.broadcast(r.map("mul", dy, 1 / max(count, 1)), shape))
        case "max" | "min":
            hit = r.cast(r.map("eq", x, r.reshape(results[0], kept)), x.type.dtype)
            share = r.map("div", dy, r.reduce("sum", hit, op.axes))
            r.give(x, r.map("mul", hit, share))
        case "prod":
            r.give(x, r.map("mul", r.conj(_others(r, x, op.axes)), dy))


def _others(r: Reverse, x: Value, axes: tuple[int, ...]) -> Value:
    """For each cell the product of the others along `axes`, right also where some are zero: those
    before it times those after it."""
    shape, kept = x.type.shape, [a for a in range(x.type.rank) if a not in axes]
    perm = (*kept, *axes)
    flat = r.reshape(
        r.transpose(x, perm), (*(shape[a] for a in kept), prod(shape[a] for a in axes))
    )
    last = len(kept)
    before, after = (
        r.b(t.Cumulative("prod", flat, last, exclusive=True, reverse=back))
        for back in (False, True)
    )
    others = r.reshape(r.map("mul", before, after), tuple(shape[a] for a in perm))
    return r.transpose(others, sorted(range(len(perm)), key=perm.__getitem__))


def _cumulative(r: Reverse, op: t.Cumulative, results: Sequence[Value], dy: Value) -> None:
    """The sum backwards; of a product dy y, divided by x, so where x has no zero; of a logarithm
    dy exp(-y), times exp(x)."""

    def back(x: Value) -> Value:
        return r.b(t.Cumulative("sum", x, op.axis, op.exclusive, not op.reverse))

    match op.fn:
        case "sum":
            r.give(op.x, back(dy))
        case "prod":
            total = back(r.map("mul", dy, r.conj(results[0])))
            r.give(op.x, r.map("div", total, r.conj(op.x)))
        case "logaddexp":
            less = r.map("exp", r.map("neg", r.conj(results[0])))
            r.give(op.x, r.map("mul", back(r.map("mul", dy, less)), r.map("exp", r.conj(op.x))))
        case _:
            raise ModelError(f"gpuir has no gradient of t.cumulative {op.fn}")


def _topk(r: Reverse, op: t.TopK, results: Sequence[Value], dy: Value) -> None:
    zeros = r.constant(op.x.type)
    r.give(op.x, r.b(t.ScatterElements(zeros, results[1], dy, op.axis, "add")))


def _softmax(r: Reverse, op: t.Softmax, results: Sequence[Value], dy: Value) -> None:
    """y (dy - sum(dy y)); of its logarithm dy - exp(y) sum(dy)."""
    (y,) = results
    if op.log:
        total = r.reduce("sum", dy, (op.axis,))
        r.give(op.x, r.map("sub", dy, r.map("mul", r.map("exp", y), total)))
    else:
        total = r.reduce("sum", r.map("mul", dy, y), (op.axis,))
        r.give(op.x, r.map("mul", y, r.map("sub", dy, total)))


def _normalize(r: Reverse, op: t.Normalize, results: Sequence[Value], dy: Value) -> None:
    """Two launches, as PyTorch's layer_norm_backward: dx by rows, scale and bias by columns."""
    if r.wants(op.x):
        r.give(op.x, r.b(op.recast(t.NormalizeGradient, dy=dy)))
    if op.scale is None or not r.wants(op.scale):
        r.give(op.bias, dy)
        return
    shape = op.scale.type.shape
    both = op.bias is not None and op.bias.type.shape == shape and r.wants(op.bias)
    made = r.b.add(op.recast(t.NormalizeScaleGradient, dy=dy, shape=shape, bias=both))
    r.give(op.scale, made[0])
    r.give(op.bias, made[1] if both else dy)


# ---------------------------------------------------------------------------- contractions


def _matmul(r: Reverse, op: t.Matmul, results: Sequence[Value], dy: Value) -> None:
    """da = dy bᵀ, db = aᵀ dy, of complex matrices with the conjugates of a and b; a matrix that a
    whole batch shares gets one product over its rows. Of a matrix that is another one turned, as a
    linear layer's weight, it is (dyᵀ a)ᵀ: what PyTorch computes then (torch/csrc/autograd/
    FunctionsManual.cpp, mm_mat2_backward), and no copy."""
    a, b = op.a, op.b
    dy = r.cast(dy, a.type.dtype)
    if r.wants(a):
        r.give(a, r.b(t.Matmul(dy, r.turned(r.conj(b)))))
    if r.wants(b):
        a = r.conj(a)
        if b.type.rank == 2:
            a, dy = rows(r, a), rows(r, dy)
        turned = isinstance(r.b.producer(b), t.Transpose) and b.type.rank == 2
        if turned:
            r.give(b, r.turned(r.b(t.Matmul(r.turned(dy), a))))
        else:
            r.give(b, r.b(t.Matmul(r.turned(a), dy)))


def rows(r: Reverse, x: Value) -> Value:
    """A batch of matrices as one."""
    return r.reshape(x, (prod(x.type.shape[:-1]), x.type.shape[-1]))


def _conv(r: Reverse, op: t.Conv, results: Sequence[Value], dy: Value) -> None:
    """dx is a transposed convolution of dy by w, dw a product of x and dy."""
    dy = r.cast(dy, op.x.type.dtype)
    window = op.w.type.shape[2:]
    if r.wants(op.x):
        reach = [d * (n - 1) + 1 for d, n in zip(op.dilations, window, strict=True)]
        walk = [s * (n - 1) for s, n in zip(op.strides, dy.type.shape[2:], strict=True)]
        pads = [a + b for a, b in zip(op.low, op.high, strict=True)]
        rows = zip(op.x.type.shape[2:], walk, reach, pads, strict=True)
        extra = tuple(n - (s + d - p) for n, s, d, p in rows)
        r.give(op.x, r.b(op.recast(t.ConvTranspose, x=dy, w=r.conj(op.w), extra=extra, dtype=None)))
    if r.wants(op.w):
        x = r.conj(op.x)
        r.give(op.w, r.b(op.recast(t.ConvWeightGradient, x=x, dy=dy, window=window, dtype=None)))


def _conv_transpose(r: Reverse, op: t.ConvTranspose, results: Sequence[Value], dy: Value) -> None:
    """dx is a convolution of dy by w; for dw, x and dy change places."""
    extra = op.extra or (0,) * len(op.strides)
    high = tuple(b - e for b, e in zip(op.high, extra, strict=True))
    back = op.recast(t.Conv, x=dy, w=r.conj(op.w), high=high, dtype=None)
    if r.wants(op.x):
        r.give(op.x, r.b(back))
    if r.wants(op.w):
        window = op.w.type.shape[2:]
        r.give(op.w, r.b(back.recast(t.ConvWeightGradient, dy=r.conj(op.x), window=window)))


def _attention(r: Reverse, op: t.Attention, results: Sequence[Value], dy: Value) -> None:
    y, stats = results
    gradient = op.recast(t.AttentionGradient, y=y, stats=stats, dy=dy, of_mask=r.wants(op.mask))
    made = r.b.add(gradient)
    for x, dx in zip((op.q, op.k, op.v, op.mask), made, strict=False):
        r.give(x, dx)


def _experts(r: Reverse, op: t.Experts, results: Sequence[Value], dy: Value) -> None:
    gradient = op.recast(t.ExpertsGradient, dy=dy)
    for x, dx in zip(gradient.subjects, r.b.add(gradient), strict=True):
        r.give(x, dx)


# ---------------------------------------------------------------------------- windows, resampling


def _pool(r: Reverse, op: t.Pool, results: Sequence[Value], dy: Value) -> None:
    """A p-norm: the sum of powers, dy sign(x) |x| ** (p - 1) / y ** (p - 1)."""
    x = op.x
    whole = op.recast(t.PoolGradient, fn="sum", dy=dy, shape=x.type.shape, x=None)
    plain = replace(whole, include_pad=False, extra=())
    match op.fn:
        case "max":
            r.give(x, r.b(replace(plain, fn="max", x=x)))
        case "mean":
            r.give(x, r.b(replace(whole, fn="mean")))
        case "lp":
            share = r.map("div", dy, r.map("pow", results[0], op.p - 1.0))
            power = r.map("mul", r.map("pow", r.map("abs", x), op.p - 1.0), r.map("sign", x))
            r.give(x, r.map("mul", r.b(replace(plain, dy=share)), power))
        case "argmax":
            pass


def _resize(r: Reverse, op: t.Resize, results: Sequence[Value], dy: Value) -> None:
    r.give(op.x, r.b(op.recast(t.ResizeGradient, dy=dy, shape=op.x.type.shape)))


def _columns(r: Reverse, op: t.Routine, results: Sequence[Value], dy: Value) -> None:
    """Of columns added up where their windows were: the cells of each window."""
    (x,) = op.args
    r.give(x, r.b(t.Routine("im2col", (dy,), (x.type.with_dtype(dy.type.dtype),), op.attrs)))


def _adaptive_mean(r: Reverse, op: t.Routine, results: Sequence[Value], dy: Value) -> None:
    """Each mean's gradient spread over the cells of its window."""
    (x,), attrs = op.args, dict(op.attrs)
    if attrs["fn"] != "mean":
        raise ModelError("gpuir has no gradient of a max pool with windows of several widths")
    given = (("shape", x.type.shape), ("count", attrs["count"]))
    type = x.type.with_dtype(dy.type.dtype)
    r.give(x, r.b(t.Routine("adaptive_pool_gradient", (dy,), (type,), given, work=op.work)))


def _fourier(r: Reverse, op: t.Routine, results: Sequence[Value], dy: Value) -> None:
    """The conjugate transform, as PyTorch takes it (torch/csrc/autograd/FunctionsManual.cpp,
    fft_r2c_backward and fft_c2r_backward): what half a spectrum leaves out is zero on the way back
    to real cells, and cells that stand for two count twice."""
    (x,), attrs = op.args, dict(op.attrs)
    axes = attrs["axes"]
    assert isinstance(axes, tuple)
    axis = int(axes[-1])

    def transform(v: Value, kind: str, type: TensorType, forward: bool, work: int) -> Value:
        own = {"kind": kind, "forward": forward, "onesided": kind == "r2c", "length": 0}
        return r.b(t.Routine("fft", (v,), (type,), tuple((attrs | own).items()), work=work))

    match attrs["kind"]:
        case "c2c":
            r.give(x, transform(dy, "c2c", x.type, not attrs["forward"], op.work))
        case "r2c":
            most = [0] * x.type.rank
            most[axis] = x.type.shape[axis] - dy.type.shape[axis]
            whole = r.b(t.Pad(dy, (0,) * x.type.rank, tuple(most))) if most[axis] else dy
            r.give(x, transform(whole, "c2c", whole.type, False, 2 * op.work))
        case _:
            half = transform(dy, "r2c", x.type, True, op.work)
            twice = dy.type.shape[axis] - x.type.shape[axis]
            if twice > 0:
                ends = (0, 1, 1 + twice, x.type.shape[axis])
                first, middle, last = (_columns_of(r, half, axis, a, b) for a, b in pairwise(ends))
                half = r.b(t.Concat((first, r.map("mul", middle, 2.0), last), axis))
            r.give(x, half)


def _columns_of(r: Reverse, x: Value, axis: int, start: int, stop: int) -> Value:
    shape = x.type.shape
    starts = tuple(start if a == axis else 0 for a in range(len(shape)))
    sizes = tuple(stop - start if a == axis else n for a, n in enumerate(shape))
    return r.b(t.Slice(x, starts, sizes, (1,) * len(shape)))


def rule_of(op: Op) -> Rule | None:
    """The gradient of an op, or of a routine by its name; None where there is none."""
    return ROUTINES.get(op.fn) if isinstance(op, t.Routine) else GRADIENTS.get(type(op))


def no_gradient(r: Reverse, op: Op, results: Sequence[Value], dy: Value) -> None:
    """Of integers, of bits, or of nothing."""


ROUTINES: dict[str, Rule] = {
    "col2im": _columns,
    "adaptive_pool": _adaptive_mean,
    "fft": _fourier,
}
GRADIENTS: dict[type[Op], Rule] = {
    **dict.fromkeys((t.Bitcast, t.Constant, t.Iota, t.ArgReduce), no_gradient),
    **dict.fromkeys((t.Cast, t.Ordered, t.Broadcast), _same),
    t.Map: _map,
    t.Reshape: _reshape,
    t.Transpose: _transpose,
    t.Parts: _parts,
    t.Slice: _slice,
    t.Concat: _concat,
    t.Pad: _pad,
    t.Gather: _gather,
    t.GatherElements: _gather_elements,
    t.GatherND: _gather_nd,
    t.ScatterElements: _scatter_elements,
    t.ScatterND: _scatter_nd,
    t.Reduce: _reduce,
    t.Cumulative: _cumulative,
    t.TopK: _topk,
    t.Softmax: _softmax,
    t.Normalize: _normalize,
    t.Matmul: _matmul,
    t.Conv: _conv,
    t.ConvTranspose: _conv_transpose,
    t.Attention: _attention,
    t.Experts: _experts,
    t.Pool: _pool,
    t.Resize: _resize,
}
