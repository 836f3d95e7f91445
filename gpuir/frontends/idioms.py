"""What several converters write: short runs of ops, or none where there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import Any

from gpuir.frontends.emit import Emitter
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import DType, TensorType, bool_, f32, i64
from gpuir.ops import tensor as t


def cast(e: Emitter, x: Value, dtype: DType) -> Value:
    """x itself where it is of this dtype already."""
    return x if x.type.dtype == dtype else e(t.Cast(x, dtype))


def product(e: Emitter, *scales: Value) -> Value:
    """The product of scales; folds where they are known."""
    result, *rest = scales
    for s in rest:
        result = e(t.Map("mul", (result, s)), "scale")
    return result


def line(
    e: Emitter, length: int, dtype: DType = i64, *, axis: int = 0, rank: int = 1, fold: bool = False
) -> Value:
    """0, 1, ... along `axis`, of extent 1 along the others: computed on the device, unless `fold`
    asks for known numbers."""
    shape = tuple(length if i == axis else 1 for i in range(rank))
    return e(t.Iota(TensorType(shape, dtype), axis), fold=fold)


def reshaped(e: Emitter, x: Value, shape: Sequence[int]) -> Value:
    """x itself where the shape is already right."""
    shape = tuple(shape)
    return x if x.type.shape == shape else e(t.Reshape(x, shape))


def transposed(e: Emitter, x: Value, perm: Sequence[int]) -> Value:
    """x itself where the order is already right."""
    perm = tuple(perm)
    return x if perm == tuple(range(len(perm))) else e(t.Transpose(x, perm))


def widened(e: Emitter, x: Value, shape: Sequence[int]) -> Value:
    """x broadcast; x itself where the shape is already right."""
    shape = tuple(shape)
    return x if x.type.shape == shape else e(t.Broadcast(x, shape))


def matrices_turned(e: Emitter, x: Value) -> Value:
    """The last two axes exchanged."""
    rank = x.type.rank
    return e(t.Transpose(x, (*range(rank - 2), rank - 1, rank - 2)))


def along_channels(e: Emitter, v: Value, rank: int) -> Value:
    """[C]  →  [C, 1, ..]: along axis 1 of a tensor of that rank."""
    return reshaped(e, v, (v.type.size, *(1,) * (rank - 2))) if rank > 1 else v


def channels_first(e: Emitter, x: Value) -> Value:
    """[N, .., C]  →  [N, C, ..]"""
    last = x.type.rank - 1
    return e(t.Transpose(x, (0, last, *range(1, last))))


def channels_last(e: Emitter, x: Value) -> Value:
    """[N, C, ..]  →  [N, .., C]"""
    return e(t.Transpose(x, (0, *range(2, x.type.rank), 1)))


def split_heads(e: Emitter, x: Value, heads: int) -> Value:
    """[b, s, heads * d]  →  [b, heads, s, d]"""
    if x.type.rank != 3 or heads <= 0 or x.type.shape[2] % heads:
        raise ModelError(
            "the number of heads does not divide the hidden size",
            expected=f"a shape [batch, tokens, hidden] whose hidden size is a multiple of {heads}",
            found=str(x.type),
        )
    b, s, hidden = x.type.shape
    return e(t.Transpose(e(t.Reshape(x, (b, s, heads, hidden // heads))), (0, 2, 1, 3)))


def join_heads(e: Emitter, x: Value) -> Value:
    """[b, heads, s, d]  →  [b, s, heads * d]"""
    b, heads, s, d = x.type.shape
    return e(t.Reshape(e(t.Transpose(x, (0, 2, 1, 3))), (b, s, heads * d)))


def scale_of_heads(width: int) -> float:
    """What attention's scores are multiplied by where nothing is given: 1 / sqrt(width)."""
    if width < 1:
        raise ModelError("attention: the head size is 0", expected="1 or more", found="0")
    return 1 / sqrt(width)


def part(e: Emitter, x: Value, axis: int, start: int, size: int) -> Value:
    """x[.., start : start + size, ..] along `axis`."""
    whole = (start, size) == (0, x.type.shape[axis])
    return x if whole else sliced(e, x, {axis: (start, size, 1)})


def cut(e: Emitter, x: Value, axis: int, sizes: Iterable[int]) -> Iterator[Value]:
    """Parts of these sizes along `axis`, one after another."""
    start = 0
    for size in sizes:
        yield part(e, x, axis, start, size)
        start += size


def sliced(e: Emitter, x: Value, cuts: Mapping[int, tuple[int, int, int]]) -> Value:
    """x cut to (start, size, step) along some axes; x itself where that is all of it."""
    rows = [cuts.get(i, (0, extent, 1)) for i, extent in enumerate(x.type.shape)]
    if all(row == (0, extent, 1) for row, extent in zip(rows, x.type.shape, strict=True)):
        return x
    starts, sizes, steps = (tuple(column) for column in zip(*rows, strict=True))
    return e(t.Slice(x, starts, sizes, steps))


def first_cells(e: Emitter, x: Value, shape: Sequence[int]) -> Value:
    """The first so many cells along each axis."""
    return sliced(e, x, {i: (0, size, 1) for i, size in enumerate(shape)})


def backwards(e: Emitter, x: Value, *axes: int) -> Value:
    """x with the cells along some axes in the other order."""
    shape = x.type.shape
    return sliced(e, x, {i: (shape[i] - 1, shape[i], -1) for i in axes})


def pick(e: Emitter, x: Value, axis: int, index: int) -> Value:
    """x[.., index, ..], the axis gone."""
    shape = x.type.shape
    one = part(e, x, axis, index, 1)
    return e(t.Reshape(one, shape[:axis] + shape[axis + 1 :]))


def joined(e: Emitter, parts: Sequence[Value | None], axis: int) -> Value:
    """The parts that are there and not empty, one after another."""
    kept = tuple(v for v in parts if v is not None and v.type.shape[axis])
    if not kept:
        return next(v for v in parts if v is not None)
    return kept[0] if len(kept) == 1 else e(t.Concat(kept, axis))


def over(e: Emitter, fn: Any, x: Value, axes: tuple[int, ...], keepdims: bool = True) -> Value:
    """A reduction; x itself where there are no axes."""
    return e(t.Reduce(fn, x, axes, keepdims)) if axes else x


def moments(e: Emitter, x: Value, axes: tuple[int, ...]) -> tuple[Value, Value, Value]:
    """The mean over axes, x without it, and the variance."""
    mean = over(e, "mean", x, axes)
    apart = e.map("sub", x, mean)
    return mean, apart, over(e, "mean", e.map("mul", apart, apart), axes)


def inverse_root(e: Emitter, variance: Value, eps: float) -> Value:
    """1 / sqrt(variance + eps)."""
    return e.map("rsqrt", e.map("add", variance, eps))


def as_in_numpy(e: Emitter, a: Value, b: Value, multiply: Callable[[Value, Value], Value]) -> Value:
    """A product of matrices as numpy's matmul has it: a vector is a row on the left, a column on
    the right, and its axis goes."""
    left, right = a.type.rank == 1, b.type.rank == 1
    a = reshaped(e, a, (1, *a.type.shape)) if left else a
    b = reshaped(e, b, (*b.type.shape, 1)) if right else b
    y = multiply(a, b)
    *batch, rows, columns = y.type.shape
    return reshaped(e, y, (*batch, *(rows,) * (not left), *(columns,) * (not right)))


def matrix_product(e: Emitter, a: Value, b: Value) -> Value:
    return as_in_numpy(e, a, b, lambda a, b: e(t.Matmul(a, b)))


def softmax_from(e: Emitter, x: Value, axis: int) -> Value:
    """Over all axes from `axis` on, as one."""
    shape = x.type.shape
    if axis == x.type.rank - 1:
        return e(t.Softmax(x, axis))
    flat = e(t.Reshape(x, (prod(shape[:axis]), prod(shape[axis:]))))
    return e(t.Reshape(e(t.Softmax(flat, 1)), shape))


# ---------------------------------------------------------------------------- random numbers


def drawn(
    e: Emitter, kind: str, type: TensorType, *args: Value, seed: int = 0, **settings: float
) -> Value:
    """The routine `random`, in the dtype asked for: never folded, as each run draws anew."""
    attrs = (("kind", kind), ("seed", seed), ("shape", type.shape), *settings.items())
    own = {"keep": bool_, "bernoulli": bool_, "multinomial": i64}.get(kind, f32)
    op = t.Routine("random", args, (TensorType(type.shape, own),), attrs, work=type.size)
    return cast(e, e(op, fold=False), type.dtype)


def dropped(e: Emitter, x: Value, kept: Value, ratio: float) -> Value:
    """x where it is kept, scaled by 1 / (1 - ratio), else zero."""
    scaled = e.map("mul", x, 1 / (1 - ratio) if ratio < 1 else 0.0)
    return e.map("where", kept, scaled, e.constant(0, x.type.dtype))


# ---------------------------------------------------------------------------- images


def column_image(
    e: Emitter,
    x: Value,
    image: tuple[int, ...],
    window: t.SlidingWindow,
    *,
    gives: TensorType,
    work: int,
) -> Value:
    """Each column's cells added where its window was in the image."""
    attrs = (
        *(("image", image), ("block", window.sizes), ("counts", window.counts(image))),
        *(("strides", window.strides), ("low", window.low), ("dilations", window.dilations)),
    )
    return e(t.Routine("col2im", (x,), (gives,), attrs, work=work))


def sampled(e: Emitter, x: Value, grid: Value, *, mode: str, padding: str, align: bool) -> Value:
    """x [n, c, ..] at the points of a grid [n, .., axes]. Work: a multiply-add for each of 1, 2^d
    or 4^d taps of a result cell (none for nearest), and for each point three operations an axis to
    place it and one for each tap's weight."""
    spatial = x.type.rank - 2
    result = x.type.with_shape((*x.type.shape[:2], *grid.type.shape[1:-1]))
    taps = {"nearest": 0, "linear": 2, "cubic": 4}[mode] ** spatial
    attrs = (("mode", mode), ("padding", padding), ("align_corners", align))
    work = 2 * taps * result.size + grid.type.size // max(spatial, 1) * (3 * spatial + taps)
    return e(t.Routine("grid_sample", (x, grid), (result,), attrs, work=work))


# ---------------------------------------------------------------------------- experts


def experts(e: Emitter, mix: t.Experts) -> Value:
    """The experts, their rows shared out as the load was told, or evenly; the graph says so."""
    skew = e.scope.expert_skew
    how = f"by a power law of exponent {skew:g}" if skew else "evenly"
    e.assume(f"rows spread over {mix.up.type.shape[0]} experts {how} (--expert-skew)")
    return e(replace(mix, skew=skew))
