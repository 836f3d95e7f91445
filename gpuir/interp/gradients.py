"""What the ops that are gradients of another compute."""

# numpy's stubs leave many types partly unknown
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gpuir.interp.arrays import Array, NoMeaning, cast, limit, to_numpy_dtype, wide
from gpuir.interp.scalars import FUNCTIONS
from gpuir.interp.tensor import (
    Meaning,
    Operands,
    attention_scores,
    by_group,
    factors,
    pad,
    pad_image,
    resize,
    windows_of,
)
from gpuir.ir.graph import Op, Value
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t


def _attention(op: t.AttentionGradient, at: Operands) -> tuple[Array, ...]:
    """p = exp(scores - stats), dv = pᵀ dy, ds = p (dy vᵀ - sum(dy y)), dq = ds k, dk = dsᵀ q."""
    direct = op.direct()
    q, k, v, y, dy = (
        factors(at(x), at(op.q), op.q.type.dtype)[0] for x in (op.q, op.k, op.v, op.y, op.dy)
    )
    scores, slope = attention_scores(direct, at)
    stats = wide(at(op.stats)).astype(q.dtype)[..., None]
    p = np.exp(scores - np.where(np.isneginf(stats), 0, stats)).astype(q.dtype)
    dp = np.matmul(by_group(direct, dy), np.swapaxes(v, -1, -2)[..., None, :, :])
    ds = p * (dp.reshape(p.shape) - np.sum(dy * y, axis=-1, keepdims=True))
    inner = by_group(direct, ds * slope * q.dtype.type(op.scale))
    dq = np.matmul(inner, k[..., None, :, :])
    dk = np.matmul(np.swapaxes(inner, -1, -2), by_group(direct, q)).sum(axis=-3)
    dv = np.matmul(np.swapaxes(by_group(direct, p), -1, -2), by_group(direct, dy)).sum(axis=-3)
    results = (dq, dk, dv, ds) if op.of_mask else (dq, dk, dv)
    types = op.types()
    return tuple(
        cast(x.reshape(type.shape), type.dtype, saturate=False)
        for x, type in zip(results, types, strict=True)
    )


def _experts(op: t.ExpertsGradient, at: Operands) -> tuple[Array, ...]:
    """Expert by expert, on the rows of the tokens that chose it."""
    x, which, shares, dy = at(op.x), at(op.which), wide(at(op.shares)), wide(at(op.dy))
    made = {v: np.zeros(v.type.shape, wide(at(v)).dtype) for v in op.subjects}
    for expert in range(op.up.type.shape[0]):
        tokens, slots = np.nonzero(which == expert)
        dout = dy[tokens] * shares[tokens, slots, None]
        out, dx, parts = _expert(op, at, expert, wide(x[tokens]), dout)
        np.add.at(made[op.x], tokens, dx)
        made[op.shares][tokens, slots] += np.sum(dy[tokens] * out, axis=-1)
        for v, part in parts.items():
            made[v][expert] = part
    return tuple(cast(a, v.type.dtype, saturate=False) for v, a in made.items())


def _expert(
    op: t.ExpertsGradient, at: Operands, expert: int, x: Array, dout: Array
) -> tuple[Array, Array, dict[Value, Array]]:
    """What one expert gives for rows x, their gradient, and those of its weights, from that of what
    it gives."""

    def weight(v: Value | None) -> Array:
        return np.zeros(()) if v is None else wide(at(v))[expert]

    mix = op.direct()
    raw = x @ weight(op.up).T + weight(op.up_bias)
    packed = op.gate is None and mix.is_gated
    halves = (np.s_[:, ::2], np.s_[:, 1::2]) if op.interleaved else _halves(mix.inter)
    if op.gate is not None:
        g, u = x @ weight(op.gate).T + weight(op.gate_bias), raw
    else:
        g, u = (raw[halves[0]], raw[halves[1]]) if packed else (raw, raw)
    bound = np.inf if op.limit is None else op.limit
    cut, clipped = np.minimum(g, bound), np.clip(u, -bound, bound)
    acted = FUNCTIONS[op.fn](cut * op.alpha) / op.alpha
    inner = acted * (clipped + op.beta) if mix.is_gated else acted
    out = inner @ weight(op.down).T + weight(op.down_bias)

    dinner = dout @ weight(op.down)
    dact = dinner * (clipped + op.beta) if mix.is_gated else dinner
    dg = _slope(op.fn, dact, cut * op.alpha) * (g <= bound)
    du = dinner * acted * (np.abs(u) <= bound)
    parts: dict[Value, Array] = {op.down: dout.T @ inner}
    of_bias = {op.down_bias: dout}
    if op.gate is not None:
        parts |= {op.up: du.T @ x, op.gate: dg.T @ x}
        of_bias |= {op.up_bias: du, op.gate_bias: dg}
        dx = du @ weight(op.up) + dg @ weight(op.gate)
    else:
        draw = dg
        if packed:
            draw = np.zeros_like(raw)
            draw[halves[0]], draw[halves[1]] = dg, du
        parts[op.up] = draw.T @ x
        of_bias |= {op.up_bias: draw}
        dx = draw @ weight(op.up)
    parts |= {v: rows.sum(axis=0) for v, rows in of_bias.items() if v is not None}
    return out, dx, parts


def _halves(inter: int) -> tuple[Any, Any]:
    return np.s_[:, :inter], np.s_[:, inter:]


def _slope(fn: str, dy: Array, x: Array) -> Array:
    """dy times the slope of an activation at x."""
    if fn == "identity":
        return dy
    by_result = fn in ("relu", "sigmoid", "tanh")
    gradient = FUNCTIONS.get(f"{fn}_gradient")
    if gradient is None:
        raise NoMeaning(f"t.experts_gradient: gpuir has no derivative of {fn!r}")
    return gradient(dy, FUNCTIONS[fn](x) if by_result else x)


def _normalized(
    op: t.NormalizeGradient | t.NormalizeScaleGradient, at: Operands
) -> tuple[Array, Array, Callable[[Array], Array]]:
    """n, one over the deviation, and the mean over what statistics run over; all cut in groups."""
    x, axes = wide(at(op.x)), op.axes
    if op.groups is not None:
        x = x.reshape(x.shape[0], op.groups, -1, *x.shape[2:])
        axes = tuple(a if a < 1 else a + 1 for a in axes)

    def mean(v: Array) -> Array:
        return np.mean(v, axis=axes, keepdims=True)

    if op.center:
        x = x - mean(x)
    inverse = 1 / np.sqrt(mean(x * x) + x.dtype.type(op.eps))
    return x * inverse, inverse, mean


def _normalize(op: t.NormalizeGradient, at: Operands) -> Array:
    n, inverse, mean = _normalized(op, at)
    scale = at.get(op.scale)
    g = wide(at(op.dy))
    g = (g if scale is None else g * wide(scale)).reshape(n.shape)
    dx = g - n * mean(g * n)
    dx = (dx - mean(g) if op.center else dx) * inverse
    return cast(dx.reshape(op.x.type.shape), op.x.type.dtype, saturate=False)


def _normalize_scale(op: t.NormalizeScaleGradient, at: Operands) -> tuple[Array, ...]:
    n, _, _ = _normalized(op, at)
    dy = wide(at(op.dy))
    parts = (dy * n.reshape(dy.shape), dy)[: 1 + op.bias]
    sums = (np.sum(v, axis=op.summed).reshape(op.shape) for v in parts)
    return tuple(cast(v, op.x.type.dtype, saturate=False) for v in sums)


def conv_weight_gradient(op: t.ConvWeightGradient, at: Operands) -> Array:
    """One product a group: of the result's gradient and the windows it was made of."""
    (type,) = op.types()
    x, dy = factors(at(op.x), at(op.dy), type.dtype)
    g, rank = op.groups, len(op.window)
    k, *extents = dy.shape[1:]
    rows = np.moveaxis(dy, 1, 0).reshape(g, k // g, -1)
    windows = windows_of(
        pad_image(x, op.low, op.high), op.window, op.strides, op.dilations, extents
    )  # [N, C, *p, *window]
    order = (1, *range(2 + rank, 2 + 2 * rank), 0, *range(2, 2 + rank))
    columns = windows.transpose(order).reshape(g, -1, rows.shape[-1])
    dw = np.matmul(rows, np.swapaxes(columns, -1, -2))
    return cast(dw.reshape(type.shape), type.dtype, saturate=False)


def _taps(
    op: t.PoolGradient, extents: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Each cell of the window, and the cells of a padded image that it is in turn."""
    for tap in np.ndindex(*op.window):
        rows = zip(tap, op.dilations, extents, op.strides, strict=True)
        cells = (slice(r * d, r * d + (n - 1) * s + 1, s) for r, d, n, s in rows)
        yield tap, (slice(None), slice(None), *cells)


def _pool(op: t.PoolGradient, at: Operands) -> Array:
    (type,) = op.types()
    dy = wide(at(op.dy))
    extents = dy.shape[2:]
    padded = pad_image(np.zeros(type.shape, dy.dtype), op.low, op.high)
    best: Array | None = None
    if op.x is not None:
        x = wide(at(op.x))
        x = pad_image(x, op.low, op.high, limit(x.dtype, lowest=True))
        windows = windows_of(x, op.window, op.strides, op.dilations, extents)
        best = np.argmax(windows.reshape(*dy.shape, -1), axis=-1)
    elif op.fn == "mean":
        dy = dy / _divisor(op, extents).astype(dy.dtype)
    if dy.size:
        for i, (_, cells) in enumerate(_taps(op, extents)):
            padded[cells] += dy if best is None else np.where(best == i, dy, 0)
    dx = pad_image(padded, [-n for n in op.low], [-n for n in op.high])
    return cast(dx, type.dtype, saturate=False)


def _divisor(op: t.PoolGradient, extents: Sequence[int]) -> Array:
    """The cells that count in each window's mean."""
    ones = np.ones((1, 1, *op.shape[2:]))
    if op.include_pad:
        extra = op.extra or (0,) * len(extents)
        rest = [b - e for b, e in zip(op.high, extra, strict=True)]
        ones = pad_image(pad_image(ones, op.low, rest, 1), (0,) * len(extents), extra)
    else:
        ones = pad(ones, (0, 0, *op.low), (0, 0, *op.high))
    return sum((ones[cells] for _, cells in _taps(op, extents)), start=np.zeros(()))


def _resize(op: t.ResizeGradient, at: Operands) -> Array:
    """A resize is a matrix an axis: what it makes of the unit vectors. Here they are transposed."""
    (type,) = op.types()
    dy = wide(at(op.dy))
    for axis, (n, count) in enumerate(zip(op.shape, op.dy.type.shape, strict=True)):
        roi = (0.0, op.roi[axis], 1.0, op.roi[axis + len(op.shape)]) if op.roi else ()
        unit = np.eye(n, dtype=dy.dtype)
        rows = Value("rows", TensorType((n, n), type.dtype))
        scales = (1.0, op.scales[axis])
        one = op.recast(t.Resize, x=rows, shape=(n, count), scales=scales, roi=roi)
        matrix = resize(one, Operands({rows: unit.astype(to_numpy_dtype(type.dtype))}, False))
        dy = np.moveaxis(np.tensordot(dy, wide(matrix), (axis, 1)), -1, axis)
    return cast(dy, type.dtype, saturate=False)


GRADIENTS: dict[type[Op], Meaning] = {
    t.AttentionGradient: _attention,
    t.ExpertsGradient: _experts,
    t.NormalizeGradient: _normalize,
    t.NormalizeScaleGradient: _normalize_scale,
    t.ConvWeightGradient: conv_weight_gradient,
    t.PoolGradient: _pool,
    t.ResizeGradient: _resize,
}
