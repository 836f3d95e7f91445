"""What each tensor op computes, but for those with regions.

Floats narrower than f32 are computed in f32 and rounded once at the end of each op; integers
narrower than 8 bits are computed in i32 and wrap. Everything else is computed in its own dtype.
"""

# numpy's stubs leave many types partly unknown
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gpuir.interp.arrays import (
    FROM_NUMPY,
    Array,
    NoMeaning,
    cast,
    limit,
    to_numpy_dtype,
    wide,
)
from gpuir.interp.routines import ROUTINES, keys_weight, linear_weight
from gpuir.interp.scalars import FUNCTIONS, divide
from gpuir.ir.errors import nearest
from gpuir.ir.graph import Op, Value
from gpuir.ir.types import DType
from gpuir.ops import tensor as t


class Operands:
    """The arrays of an op's operands. `loose` says that lengths may fall short of the types': the
    graph has data-dependent sizes, whose types are upper bounds."""

    def __init__(self, values: Mapping[Value, Array], loose: bool):
        self.values, self.loose = values, loose

    def __call__(self, value: Value) -> Array:
        return self.values[value]

    def get(self, value: Value | None) -> Array | None:
        return None if value is None else self.values[value]

    def all(self, values: Sequence[Value]) -> list[Array]:
        return [self.values[v] for v in values]


Meaning = Callable[[Any, Operands], "Array | tuple[Array, ...]"]


# ---------------------------------------------------------------------------- pointwise


def _map(op: t.Map, at: Operands) -> Array:
    args = at.all(op.args)
    dtype = op.types()[0].dtype
    if op.fn == "identity":
        return args[0]
    if op.fn == "where":
        return np.where(*args, *(np.asarray(x).astype(to_numpy_dtype(dtype)) for x in op.imm))
    row = to_numpy_dtype(op.args[0].type.dtype)
    args += [np.asarray(x).astype(row) for x in op.imm]
    return cast(np.asarray(FUNCTIONS[op.fn](*map(wide, args))), dtype, saturate=False)


def _bitcast(op: t.Bitcast, at: Operands) -> Array:
    return np.ascontiguousarray(at(op.x)).reshape(at(op.x).shape).view(to_numpy_dtype(op.dtype))


def _parts(op: t.Parts, at: Operands) -> Array:
    (type,) = op.types()
    return np.ascontiguousarray(at(op.x)).view(to_numpy_dtype(type.dtype)).reshape(type.shape)


# ---------------------------------------------------------------------------- data, layout


def _constant(op: t.Constant, at: Operands) -> Array:
    dtype = op.type.dtype
    through = (
        np.float64 if dtype.is_float else np.int64 if dtype.bits < 8 else to_numpy_dtype(dtype)
    )
    data = np.array(op.data, through).astype(to_numpy_dtype(dtype))
    if len(op.data) == op.type.size:
        return data.reshape(op.type.shape)
    return np.full(op.type.shape, data[0])


def _iota(op: t.Iota, at: Operands) -> Array:
    axis = [1] * op.type.rank
    axis[op.axis] = -1
    line = cast(np.arange(op.type.shape[op.axis]), op.type.dtype)
    return np.broadcast_to(line.reshape(axis), op.type.shape)


def _reshape(op: t.Reshape, at: Operands) -> Array:
    x, shape = at(op.x), op.shape
    if at.loose and x.size != math.prod(shape):
        shape = _shrunk(x, op)
    return x.reshape(shape)


def _shrunk(x: Array, op: t.Reshape) -> tuple[int, ...]:
    """The shape of the result when x is smaller than its type: one axis gives way, the one that
    has the extent of an axis of x that did, or the only one that can. Never a guess."""
    was = {n for n, m in zip(op.x.type.shape, x.shape, strict=True) if n != m}
    rest = [math.prod(op.shape) // n if n else 0 for n in op.shape]
    fits = [i for i, n in enumerate(rest) if n and x.size % n == 0]
    same = [i for i in fits if op.shape[i] in was]
    axes = same or fits
    if len(axes) != 1:
        return op.shape  # numpy says why it does not fit
    return tuple(-1 if i == axes[0] else n for i, n in enumerate(op.shape))


def _transpose(op: t.Transpose, at: Operands) -> Array:
    return at(op.x).transpose(op.perm)


def _broadcast(op: t.Broadcast, at: Operands) -> Array:
    x, shape = at(op.x), op.shape
    if at.loose:  # axes that x brings along may be shorter than their type
        kept = zip(op.x.type.shape, x.shape, shape[len(shape) - x.ndim :], strict=True)
        shape = (*shape[: len(shape) - x.ndim], *(m if n == to else to for n, m, to in kept))
    return np.broadcast_to(x, shape)


def _slice(op: t.Slice, at: Operands) -> Array:
    def along(start: int, size: int, step: int) -> slice:
        stop = start + size * step
        return slice(start, None if stop < 0 else stop, step) if size else slice(0, 0)

    rows = zip(op.starts, op.sizes, op.steps, strict=True)
    return at(op.x)[tuple(along(*row) for row in rows)]


def _concat(op: t.Concat, at: Operands) -> Array:
    return np.concatenate(at.all(op.args), op.axis)


def pad(
    x: Array, low: Sequence[int], high: Sequence[int], value: Any = 0, mode: Any = "constant"
) -> Array:
    """`t.pad`: counts below zero crop."""
    rows = list(zip(low, high, strict=True))
    if any(a < 0 or b < 0 for a, b in rows):
        x = x[
            tuple(slice(max(-a, 0), n + min(b, 0)) for n, (a, b) in zip(x.shape, rows, strict=True))
        ]
        rows = [(max(a, 0), max(b, 0)) for a, b in rows]
    if not any(a or b for a, b in rows):
        return x
    if mode != "constant":
        return np.pad(x, rows, mode)
    shape = [n + a + b for n, (a, b) in zip(x.shape, rows, strict=True)]
    result = np.full(shape, np.asarray(value).astype(x.dtype))
    result[tuple(slice(a, a + n) for n, (a, _) in zip(x.shape, rows, strict=True))] = x
    return result


def _pad(op: t.Pad, at: Operands) -> Array:
    value = at.get(op.value)
    return pad(at(op.x), op.low, op.high, 0 if value is None else value.reshape(()), op.mode)


# ---------------------------------------------------------------------------- indexing


def _gather(op: t.Gather, at: Operands) -> Array:
    return np.take(at(op.x), at(op.indices).astype(np.intp), op.axis)


def _gather_elements(op: t.GatherElements, at: Operands) -> Array:
    x, indices = at(op.x), at(op.indices)
    return x[_along(indices, op.axis)]


def _along(indices: Array, axis: int) -> tuple[Array, ...]:
    """The index of each cell of `indices`, with those on `axis` replaced by its values."""
    grid = list(np.indices(indices.shape, sparse=True))
    grid[axis] = indices.astype(np.intp)
    return tuple(grid)


def _nd(indices: Array, batch: int = 0) -> tuple[Array, ...]:
    """An index tuple from the last axis of `indices`, under `batch` leading axes in common."""
    columns = [indices[..., i].astype(np.intp) for i in range(indices.shape[-1])]
    grid = np.indices(indices.shape[:-1], sparse=True)[:batch]
    return (*grid, *columns)


def _gather_nd(op: t.GatherND, at: Operands) -> Array:
    index = _nd(at(op.indices), op.batch)
    x = at(op.x)
    return x[index] if index else np.broadcast_to(x, (*op.indices.type.shape[:-1], *x.shape))


COMBINE: dict[str, np.ufunc] = {
    "add": np.add,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def _combine(x: Array, index: tuple[Array, ...], updates: Array, how: t.Combine) -> Array:
    if how == "none":
        result = x.copy()
        result[index] = updates
        return result
    result = np.array(wide(x))
    COMBINE[how].at(result, index, wide(updates))
    return result.astype(x.dtype)


def _scatter_elements(op: t.ScatterElements, at: Operands) -> Array:
    index = _along(at(op.indices), op.axis)
    return _combine(at(op.x), index, at(op.updates), op.combine)


def _scatter_nd(op: t.ScatterND, at: Operands) -> Array:
    return _combine(at(op.x), _nd(at(op.indices)), at(op.updates), op.combine)


# ---------------------------------------------------------------------------- reductions


def _reduce(op: t.Reduce, at: Operands) -> Array:
    x = wide(at(op.x))
    how: dict[str, Any] = {"axis": op.axes, "keepdims": op.keepdims}
    dtype = op.x.type.dtype
    match op.fn:
        case "sum":
            result = np.sum(x, dtype=x.dtype, **how)
        case "prod":
            result = np.prod(x, dtype=x.dtype, **how)
        case "max":
            result = np.max(x, initial=limit(x.dtype, lowest=True), **how)
        case "min":
            result = np.min(x, initial=limit(x.dtype, lowest=False), **how)
        case "mean":
            count = math.prod(x.shape[a] for a in op.axes)
            total = np.sum(x, dtype=x.dtype, **how)
            result = divide(total, np.asarray(count, x.dtype)) if count else total * np.nan
    return cast(np.asarray(result), dtype, saturate=False)


def _arg_reduce(op: t.ArgReduce, at: Operands) -> Array:
    x = wide(at(op.x))
    find = np.argmax if op.fn == "max" else np.argmin
    if not op.last:
        return np.asarray(find(x, axis=op.axis, keepdims=op.keepdims), np.int64)
    found = find(np.flip(x, op.axis), axis=op.axis, keepdims=op.keepdims)
    return np.asarray(x.shape[op.axis] - 1 - found, np.int64)


def _cumulative(op: t.Cumulative, at: Operands) -> Array:
    x = wide(at(op.x))
    if op.reverse:
        x = np.flip(x, op.axis)
    if op.fn == "logaddexp" and x.dtype.kind == "c":
        y = _running_log(x, op.axis)
    else:
        y = RUNNING[op.fn].accumulate(x, axis=op.axis, dtype=x.dtype)
    if op.exclusive and x.shape[op.axis]:
        one = [0] * x.ndim
        one[op.axis] = 1
        y = pad(y, one, [-n for n in one], 0 if op.fn == "sum" else 1)
    return cast(np.flip(y, op.axis) if op.reverse else y, op.x.type.dtype, saturate=False)


RUNNING: dict[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "logaddexp": np.logaddexp,
}


def _running_log(x: Array, axis: int) -> Array:
    """log(exp a + exp b) from cell to cell, as torch takes it: b + log(1 + exp(a - b)) with the
    larger real part in b, whose angle the result is next to
    (aten/src/ATen/native/cpu/LogAddExp.h, _log_add_exp_helper)."""
    cells = np.moveaxis(np.array(x), axis, 0)
    for before, here in itertools.pairwise(cells):
        more = np.where(before.real > here.real, before, here)
        less = np.where(before.real > here.real, here, before)
        endless = ~np.isfinite(less.real) & (less.real == more.real)
        with np.errstate(all="ignore"):
            either = np.where(less.real < 0, less, np.log(np.exp(less) + np.exp(more)))
            here[...] = np.where(endless, either, more + np.log1p(np.exp(less - more)))
    return np.moveaxis(cells, 0, axis)


def _topk(op: t.TopK, at: Operands) -> tuple[Array, ...]:
    x, axis = at(op.x), op.axis
    keys = wide(x)
    if op.largest:  # sorted backwards, so that of equals the lower index still comes first
        order = np.flip(np.argsort(np.flip(keys, axis), axis=axis, kind="stable"), axis)
        order = x.shape[axis] - 1 - order
    else:
        order = np.argsort(keys, axis=axis, kind="stable")
    order = np.take(order, np.arange(op.k), axis)
    return np.take_along_axis(x, order, axis), order.astype(np.int64)


def _softmax(op: t.Softmax, at: Operands) -> Array:
    x = wide(at(op.x))
    if not x.size:
        return at(op.x)
    shifted = x - np.max(x, axis=op.axis, keepdims=True)
    total = np.sum(np.exp(shifted), axis=op.axis, keepdims=True)
    y = shifted - np.log(total) if op.log else np.exp(shifted) / total
    return cast(y, op.x.type.dtype, saturate=False)


def _normalize(op: t.Normalize, at: Operands) -> Array:
    x, axes = wide(at(op.x)), op.axes
    if op.groups is not None:
        cut = (x.shape[0], op.groups, x.shape[1] // op.groups, *x.shape[2:])
        x, axes = x.reshape(cut), tuple(a if a < 1 else a + 1 for a in axes)
    if op.center:
        x = x - np.mean(x, axis=axes, keepdims=True)
    y = x / np.sqrt(np.mean(x * x, axis=axes, keepdims=True) + x.dtype.type(op.eps))
    y = y.reshape(op.x.type.shape)
    scale, bias = at.get(op.scale), at.get(op.bias)
    if scale is not None:
        y = y * wide(scale)
    if bias is not None:
        y = y + wide(bias)
    return cast(y, op.x.type.dtype, saturate=False)


# ---------------------------------------------------------------------------- windows


def pad_image(x: Array, low: Sequence[int], high: Sequence[int], value: Any = 0) -> Array:
    return pad(x, (0, 0, *low), (0, 0, *high), value)


def _tap(axis: int, start: int, count: int, stride: int) -> tuple[slice, ...]:
    """The index of `count` cells of one axis, `stride` apart."""
    return (slice(None),) * axis + (slice(start, start + (count - 1) * stride + 1, stride),)


def _over_windows(fold: np.ufunc, x: Array, op: t.Pool, extents: Sequence[int]) -> Array:
    """`fold` over each window of a padded x: axis by axis, as it may be for max and sum."""
    parts = zip(extents, op.window, op.strides, op.dilations, strict=True)
    for axis, (n, window, stride, dilation) in enumerate(parts, start=x.ndim - len(extents)):
        if n == 0:
            return np.zeros((*x.shape[: x.ndim - len(extents)], *extents), x.dtype)
        taps = (x[_tap(axis, r * dilation, n, stride)] for r in range(window))
        y = next(taps).copy()
        for tap in taps:
            fold(y, tap, out=y)
        x = y
    return x


def _pool(op: t.Pool, at: Operands) -> Array:
    x = at(op.x)
    (type,) = op.types()
    extents = type.shape[2:]
    if op.fn == "argmax":
        return _pool_argmax(op, wide(x), extents)
    x = wide(x)
    if op.fn == "max":
        padded = pad_image(x, op.low, op.high, limit(x.dtype, lowest=True))
        return cast(_over_windows(np.maximum, padded, op, extents), type.dtype, saturate=False)
    if op.fn == "lp":
        powers = pad_image(np.abs(x) ** op.p, op.low, op.high)
        y = _over_windows(np.add, powers, op, extents) ** x.dtype.type(1 / op.p)
        return cast(y, type.dtype, saturate=False)
    total = _over_windows(np.add, pad_image(x, op.low, op.high), op, extents)
    count = np.ones(x.shape[2:], x.dtype)
    if op.include_pad:
        extra = op.extra or (0,) * len(extents)
        count = pad(count, op.low, [b - e for b, e in zip(op.high, extra, strict=True)], 1)
        count = pad(count, (0,) * len(extents), extra)
    else:
        count = pad(count, op.low, op.high)
    return cast(total / _over_windows(np.add, count, op, extents), type.dtype, saturate=False)


def _pool_argmax(op: t.Pool, x: Array, extents: tuple[int, ...]) -> Array:
    """The flat index, in the unpadded image, of each window's first greatest cell."""
    rank = len(extents)
    padded = pad_image(x, op.low, op.high, limit(x.dtype, lowest=True))
    windows = windows_of(padded, op.window, op.strides, op.dilations, extents)
    flat = windows.reshape(*windows.shape[: 2 + rank], math.prod(op.window))
    taps = np.unravel_index(np.argmax(flat, axis=-1), op.window)
    index = np.zeros(flat.shape[:-1], np.int64)
    axes = list(range(rank))
    unit = 1
    for a in axes if op.column_major else reversed(axes):
        line = np.arange(extents[a]).reshape([-1 if i == a else 1 for i in axes])
        at = line * op.strides[a] - op.low[a] + taps[a] * op.dilations[a]
        index += np.clip(at, 0, x.shape[2 + a] - 1) * unit
        unit *= x.shape[2 + a]
    return index


def windows_of(
    x: Array,
    window: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    extents: Sequence[int],
) -> Array:
    """A view [.., *extents, *window] of the windows on the last axes of a padded x."""
    rank = len(window)
    lead, steps = x.strides[: x.ndim - rank], x.strides[x.ndim - rank :]
    return np.lib.stride_tricks.as_strided(
        x,
        (*x.shape[: x.ndim - rank], *extents, *window),
        (
            *lead,
            *(a * s for a, s in zip(steps, strides, strict=True)),
            *(a * d for a, d in zip(steps, dilations, strict=True)),
        ),
        writeable=False,
    )


def factors(a: Array, b: Array, dtype: DType) -> tuple[Array, Array]:
    """The factors of a product whose sum has `dtype`, in the dtype to multiply and add them in.

    Integers of up to 16 bits go through f64, which is exact for sums of up to 2 ** 21 products and
    far faster than numpy's integer loops.
    """
    kinds = [FROM_NUMPY[x.dtype.name] for x in (a, b)]
    if all(d.kind in ("int", "uint", "bool") and d.bits <= 16 for d in kinds):
        return wide(a).astype(np.float64), wide(b).astype(np.float64)
    a, b = wide(a), wide(b)
    dtype_of = np.result_type(a.dtype, b.dtype, wide(np.empty(0, to_numpy_dtype(dtype))).dtype)
    return a.astype(dtype_of, copy=False), b.astype(dtype_of, copy=False)


def _matmul(op: t.Matmul, at: Operands) -> Array:
    (type,) = op.types()
    return cast(np.matmul(*factors(at(op.a), at(op.b), type.dtype)), type.dtype, saturate=False)


def conv(op: t.Conv, at: Operands) -> Array:
    """im2col and one product a group; a loop over taps where each group has a single channel."""
    (type,) = op.types()
    x, w = factors(at(op.x), at(op.w), type.dtype)
    n, outputs, *extents = type.shape
    g, window = op.groups, w.shape[2:]
    x = pad_image(x, op.low, op.high)
    y = np.zeros(type.shape, x.dtype)
    if not y.size:
        return cast(y, type.dtype)
    if w.shape[1] == 1 and outputs == g == x.shape[1]:
        for r in np.ndindex(*window):
            index = [slice(None), slice(None)]
            for e, i, s, d in zip(extents, r, op.strides, op.dilations, strict=True):
                index.append(slice(i * d, i * d + (e - 1) * s + 1, s))
            y += x[tuple(index)] * w[(slice(None), 0, *r)].reshape(-1, *([1] * len(extents)))
        return cast(y, type.dtype, saturate=False)
    rank = len(extents)
    rows = w.reshape(g, outputs // g, -1)
    windows = windows_of(x, window, op.strides, op.dilations, extents)
    order = (0, *range(1 + rank, 1 + 2 * rank), *range(1, 1 + rank))  # [C, *window, *extents]
    for i in range(n):
        columns = windows[i].transpose(order).reshape(g, rows.shape[2], -1)
        y[i] = np.matmul(rows, columns).reshape(type.shape[1:])
    return cast(y, type.dtype, saturate=False)


def conv_transpose(op: t.ConvTranspose, at: Operands) -> Array:
    """One product a group, then its columns added where they belong: col2im."""
    (type,) = op.types()
    x, w = factors(at(op.x), at(op.w), type.dtype)
    n, c, *spatial = x.shape
    g, window = op.groups, w.shape[2:]
    rows = w.reshape(g, c // g, -1).transpose(0, 2, 1)
    columns = np.matmul(rows, x.reshape(n, g, c // g, math.prod(spatial)))
    columns = columns.reshape(n, type.shape[1], *window, *spatial)
    parts = list(zip(spatial, window, op.strides, op.dilations, strict=True))
    full = [max((i - 1) * s + d * (r - 1) + 1, 0) for i, r, s, d in parts]
    y = np.zeros((n, type.shape[1], *full), x.dtype)
    if x.size:
        for r in np.ndindex(*window):
            index = [slice(None), slice(None)]
            for (i, _, s, d), tap in zip(parts, r, strict=True):
                index.append(slice(tap * d, tap * d + (i - 1) * s + 1, s))
            y[tuple(index)] += columns[(slice(None), slice(None), *r)]
    extra = op.extra or (0,) * len(spatial)
    grown = [e - b for e, b in zip(extra, op.high, strict=True)]
    return cast(pad_image(y, [-a for a in op.low], grown), type.dtype, saturate=False)


def attention(op: t.Attention, at: Operands) -> tuple[Array, ...]:
    """Scores are capped before they are masked. A query that sees no key gives zeros."""
    types = op.types()
    q, v = (factors(at(x), at(op.q), op.q.type.dtype)[0] for x in (op.q, op.v))
    scores, _ = attention_scores(op, at)
    most = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    most = np.where(np.isneginf(most), 0, most)
    weights = np.exp(scores - most).astype(q.dtype, copy=False)
    total = np.sum(weights, axis=-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    y = np.matmul(by_group(op, weights), v[..., None, :, :]).reshape(types[0].shape)
    y = cast(y, types[0].dtype, saturate=False)
    return (y, cast((np.log(total) + most)[..., 0], types[1].dtype)) if op.stats else (y,)


def attention_scores(op: t.Attention, at: Operands) -> tuple[Array, Array | float]:
    """What the softmax of an attention is given, minus infinity where a key is hidden, and the
    slope of the cap there."""
    q, k = factors(at(op.q), at(op.k), op.q.type.dtype)
    scores = np.matmul(by_group(op, q), np.swapaxes(k, -1, -2)[..., None, :, :])
    scores = scores.reshape(*q.shape[:-1], k.shape[-2]) * q.dtype.type(op.scale)
    slope: Array | float = 1.0
    if op.softcap > 0:
        bent = np.tanh(scores / op.softcap)
        scores, slope = op.softcap * bent, 1 - bent * bent
    mask, hidden = at.get(op.mask), unseen(op)
    if mask is not None and mask.dtype == bool:
        hidden = hidden | ~mask
    elif mask is not None:
        scores = scores + wide(mask).astype(scores.dtype, copy=False)
    return np.where(hidden, -np.inf, scores), slope


def unseen(op: t.Attention) -> Array:
    """[s, d]: which keys a query may not see for where they stand, whatever the mask."""
    s, d = op.q.type.shape[-2], op.k.type.shape[-2]
    behind = np.arange(s)[:, None] + op.offset - np.arange(d)  # how far key d is behind query s
    hidden = behind < 0 if op.causal else np.zeros((s, d), bool)
    return hidden if op.window is None else hidden | (behind > op.window)


def by_group(op: t.Attention, x: Array) -> Array:
    """[.., h, s, n] with the heads in groups that share keys: [.., g, h / g, s, n]."""
    *lead, h, s, n = x.shape
    groups = op.k.type.shape[-3]
    return x.reshape(*lead, groups, h // groups, s, n)


# ---------------------------------------------------------------------------- experts


def _experts(op: t.Experts, at: Operands) -> Array:
    """Expert by expert, on the rows of the tokens that chose it."""
    (type,) = op.types()
    x, which, shares = at(op.x), at(op.which), wide(at(op.shares))
    y = np.zeros((len(x), type.shape[1]), wide(np.empty(0, to_numpy_dtype(type.dtype))).dtype)
    for expert in range(op.up.type.shape[0]):
        tokens, slots = np.nonzero(which == expert)
        rows = _expert(op, at, expert, x[tokens])
        np.add.at(y, tokens, rows * shares[tokens, slots, None])
    return cast(y, type.dtype, saturate=False)


def _expert(op: t.Experts, at: Operands, expert: int, x: Array) -> Array:
    def product(x: Array, matrix: Value, bias: Value | None) -> Array:
        a, b = factors(x, at(matrix)[expert].T, op.result_types[0].dtype)
        return a @ b if bias is None else a @ b + wide(at(bias)[expert])

    u = product(x, op.up, op.up_bias)
    g = u
    if op.gate is not None:
        g = product(x, op.gate, op.gate_bias)
    elif op.is_gated:
        g, u = (u[:, ::2], u[:, 1::2]) if op.interleaved else np.split(u, 2, axis=1)
    if op.limit is not None:
        g, u = np.minimum(g, op.limit), np.clip(u, -op.limit, op.limit)
    y = g.dtype.type(1 / op.alpha) * FUNCTIONS[op.fn](g * g.dtype.type(op.alpha))
    if op.is_gated:
        y = y * (u + u.dtype.type(op.beta))
    return product(cast(y, op.x.type.dtype), op.down, op.down_bias)


# ---------------------------------------------------------------------------- resampling


def _sample_points(op: t.Resize, axis: int) -> tuple[Array, Array | None]:
    """Where on the input axis each output cell is sampled, and which of them lie outside of it.

    The coordinate transformations of ONNX Resize, opsets 11 to 19.
    """
    n, count, scale = op.x.type.shape[axis], op.shape[axis], op.scales[axis]
    length, i = scale * n, np.arange(count, dtype=np.float64)
    match op.coords:
        case "half_pixel":
            return (i + 0.5) / scale - 0.5, None
        case "pytorch_half_pixel":
            return ((i + 0.5) / scale - 0.5 if length != 1 else np.full(count, -0.5)), None
        case "half_pixel_symmetric":
            offset = n / 2 * (1 - count / length)
            return offset + (i + 0.5) / scale - 0.5, None
        case "tf_half_pixel_for_nn":
            return (i + 0.5) / scale, None
        case "asymmetric":
            return i / scale, None
        case "align_corners":
            return (i * (n - 1) / (length - 1) if length != 1 else np.zeros(count)), None
        case "tf_crop_and_resize":
            start, end = op.roi[axis], op.roi[axis + len(op.shape)]
            if length != 1:
                x = start * (n - 1) + i * (end - start) * (n - 1) / (length - 1)
            else:
                x = np.full(count, (start + end) * (n - 1) / 2)
            return x, (x < 0) | (x > n - 1)
        case _:
            raise NoMeaning(f"t.resize: the coordinate transformation {op.coords!r} is unknown")


NEAREST: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _kernel(op: t.Resize, distance: Array) -> Array:
    """The interpolation weight of a cell at this distance."""
    if op.mode == "linear":
        return linear_weight(distance)
    return keys_weight(distance, op.cubic_a)


def resize(op: t.Resize, at: Operands) -> Array:
    """Axis by axis. With antialias the kernel is stretched by the factor of reduction."""
    x = at(op.x)
    dtype = op.x.type.dtype
    y = x if op.mode == "nearest" else wide(x)
    if op.mode != "nearest" and y.dtype.kind != "f":
        y = y.astype(np.float64)
    for axis, (n, count) in enumerate(zip(x.shape, op.shape, strict=True)):
        roi = (op.roi[axis], op.roi[axis + len(op.shape)]) if op.roi else (0, 1)
        if n == count and math.isclose(op.scales[axis], 1) and roi == (0, 1):
            continue
        points, outside = _sample_points(op, axis)
        column = [-1 if i == axis else 1 for i in range(x.ndim)]
        if op.mode == "nearest":
            index = NEAREST[op.nearest](points).astype(np.intp)
            y = np.take(y, np.clip(index, 0, n - 1), axis)
        else:
            shrink = min(op.scales[axis], 1.0) if op.antialias else 1.0
            reach = math.ceil((1 if op.mode == "linear" else 2) / shrink)
            floor = np.floor(points)[:, None]
            cells = floor + np.arange(1 - reach, reach + 1)
            weights = _kernel(op, (cells - points[:, None]) * shrink)
            if op.exclude_outside:
                weights = np.where((cells >= 0) & (cells < n), weights, 0)
            if op.exclude_outside or op.antialias:
                total = weights.sum(axis=1, keepdims=True)
                weights = weights / np.where(total == 0, 1, total)
            index = np.clip(cells, 0, n - 1).astype(np.intp)
            weights = weights.astype(y.dtype)
            y = sum(
                (
                    np.take(y, index[:, tap], axis) * weights[:, tap].reshape(column)
                    for tap in range(1, index.shape[1])
                ),
                start=np.take(y, index[:, 0], axis) * weights[:, 0].reshape(column),
            )
        if outside is not None:
            y = np.where(outside.reshape(column), np.asarray(op.outside).astype(y.dtype), y)
    if dtype.is_integer and op.mode != "nearest":
        bound = np.iinfo(to_numpy_dtype(dtype))
        y = np.clip(np.rint(y), bound.min, bound.max)
    return cast(y, dtype)


# ---------------------------------------------------------------------------- routines


def _routine(op: t.Routine, at: Operands) -> tuple[Array, ...]:
    routine = ROUTINES.get(op.fn)
    if routine is None:
        raise NoMeaning(
            f"t.routine: the routine {op.fn!r} is unknown", fix=nearest(op.fn, ROUTINES)
        )
    return routine(dict(op.attrs), *at.all(op.args))


def _opaque(op: t.Opaque, at: Operands) -> Array:
    raise NoMeaning(
        f"gpuir does not know the model operator {op.kind}",
        fix="gpuir can estimate its time, but cannot compute its numbers",
    )


TENSOR: dict[type[Op], Meaning] = {
    t.Map: _map,
    t.Ordered: lambda op, at: at(op.x),
    t.Cast: lambda op, at: cast(at(op.x), op.dtype, op.saturate, op.rounding),
    t.Bitcast: _bitcast,
    t.Parts: _parts,
    t.Constant: _constant,
    t.Iota: _iota,
    t.Reshape: _reshape,
    t.Transpose: _transpose,
    t.Broadcast: _broadcast,
    t.Slice: _slice,
    t.Concat: _concat,
    t.Pad: _pad,
    t.Gather: _gather,
    t.GatherElements: _gather_elements,
    t.GatherND: _gather_nd,
    t.ScatterElements: _scatter_elements,
    t.ScatterND: _scatter_nd,
    t.Reduce: _reduce,
    t.ArgReduce: _arg_reduce,
    t.Cumulative: _cumulative,
    t.TopK: _topk,
    t.Softmax: _softmax,
    t.Normalize: _normalize,
    t.Pool: _pool,
    t.Matmul: _matmul,
    t.Conv: conv,
    t.ConvTranspose: conv_transpose,
    t.Attention: attention,
    t.Experts: _experts,
    t.Resize: resize,
    t.Routine: _routine,
    t.Opaque: _opaque,
}
