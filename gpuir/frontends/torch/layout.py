"""Shapes and places: views, slices, joins, padding, indexing, scattering, new tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import (
    backwards,
    cast,
    cut,
    part,
    pick,
    reshaped,
    sliced,
    transposed,
    widened,
)
from gpuir.frontends.node import each_named
from gpuir.frontends.torch.node import Converter, TorchNode
from gpuir.frontends.torch.pointwise import floored, mapped, of_dtype
from gpuir.ir.graph import Value
from gpuir.ir.types import DType, TensorType, bool_, i64
from gpuir.ops import tensor as t

Places = NDArray[np.int64]


def reshape(n: TorchNode, e: Emitter) -> Value:
    """Whatever the call says, the result's shape is known."""
    return reshaped(e, n["self"], n.type.shape)


def permute(n: TorchNode, e: Emitter) -> Value:
    x = n["self"]
    return transposed(e, x, tuple(d % x.type.rank for d in n.args["dims"]))


def swapped(n: TorchNode, e: Emitter) -> Value:
    """Two axes exchanged."""
    x = n["self"]
    rank = max(x.type.rank, 1)
    a, b = (int(n.one_of(f"dim{i}", f"axis{i}")) % rank for i in (0, 1))
    perm = list(range(rank))
    perm[a], perm[b] = perm[b], perm[a]
    return transposed(e, x, perm[: x.type.rank])


def turned(n: TorchNode, e: Emitter) -> Value:
    """All axes backwards: of a matrix its two, of a vector none."""
    return transposed(e, n["self"], tuple(reversed(range(n.type.rank))))


def moved(n: TorchNode, e: Emitter) -> Value:
    """Axes `source` put at `destination`, the others in order."""
    x = n["self"]
    rank = x.type.rank
    perm: list[int] = [-1] * rank
    given = (n.args["source"], n.args["destination"])
    sources, places = ((axis,) if isinstance(axis, int) else axis for axis in given)
    for source, place in zip(sources, places, strict=True):
        perm[place % rank] = source % rank
    rest = iter([axis for axis in range(rank) if axis not in perm])
    return transposed(e, x, [next(rest) if axis < 0 else axis for axis in perm])


def expand(n: TorchNode, e: Emitter) -> Value:
    x = n["self"]
    return widened(e, x, n.type.shape)


def first_cell(n: TorchNode, length: int) -> int:
    """`start` of a slice of so many cells, as Python reads it."""
    start = n.args["start"] or 0
    return min(max(start + length if start < 0 else start, 0), length)


def slice_(n: TorchNode, e: Emitter) -> Value:
    """self[.., start:end:step, ..] along `dim`, as Python cuts."""
    x = n["self"]
    axis = n.axis(x.type.rank)
    start = first_cell(n, x.type.shape[axis])
    return sliced(e, x, {axis: (start, n.type.shape[axis], n.args["step"])})


def select(n: TorchNode, e: Emitter) -> Value:
    x = n["self"]
    axis, index = n.axis(x.type.rank), n.args["index"]
    return pick(e, x, axis, index % x.type.shape[axis])


def narrow(n: TorchNode, e: Emitter) -> Value:
    x = n["self"]
    axis, start = n.axis(x.type.rank), n.args["start"]
    return part(e, x, axis, start % max(x.type.shape[axis], 1), n.args["length"])


def parts(n: TorchNode, e: Emitter) -> tuple[Value, ...]:
    """split, chunk: consecutive parts along `dim`, as long as the results are."""
    x = n["self"]
    axis = n.axis(x.type.rank)
    return tuple(cut(e, x, axis, (type.shape[axis] for type in n.types if type is not None)))


def unbind(n: TorchNode, e: Emitter) -> tuple[Value, ...]:
    x = n["self"]
    axis = n.axis(x.type.rank)
    return tuple(pick(e, x, axis, i) for i in range(x.type.shape[axis]))


def concat(n: TorchNode, e: Emitter) -> Value:
    """Tensors one after another; empty ones of rank 1 are left out, as torch does."""
    rank = n.type.rank
    kept = [v for v in n.args["tensors"] if v.type.rank == rank and v.type.size]
    if not kept:
        return e.fill(0, n.type)
    values = tuple(cast(e, v, n.type.dtype) for v in kept)
    return values[0] if len(values) == 1 else e(t.Concat(values, n.axis(rank)))


def stack(n: TorchNode, e: Emitter) -> Value:
    axis = n.axis(n.type.rank)
    shape = tuple(1 if i == axis else size for i, size in enumerate(n.type.shape))
    values = tuple(reshaped(e, cast(e, v, n.type.dtype), shape) for v in n.args["tensors"])
    return values[0] if len(values) == 1 else e(t.Concat(values, axis))


def flip(n: TorchNode, e: Emitter) -> Value:
    x = n["self"]
    axes = n.axes(x.type.rank, "dims") if n.args["dims"] else ()
    return backwards(e, x, *axes) if x.type.size else x


def roll(n: TorchNode, e: Emitter) -> Value:
    """Cells pushed out at one end come back at the other."""
    x = n["self"]
    shifts, axes = n.args["shifts"], n.args["dims"]
    if not axes:
        flat = rolled(e, reshaped(e, x, (x.type.size,)), 0, shifts[0])
        return reshaped(e, flat, x.type.shape)
    for shift, axis in zip(shifts, axes, strict=True):
        x = rolled(e, x, axis % x.type.rank, shift)
    return x


def rolled(e: Emitter, x: Value, axis: int, shift: int) -> Value:
    length = x.type.shape[axis]
    shift = shift % length if length else 0
    if not shift:
        return x
    tail, head = part(e, x, axis, length - shift, shift), part(e, x, axis, 0, length - shift)
    return e(t.Concat((tail, head), axis))


def repeat(n: TorchNode, e: Emitter) -> Value:
    """The tensor laid side by side `repeats` times along each axis."""
    x, repeats = n["self"], n.args["repeats"]
    shape = (1,) * (len(repeats) - x.type.rank) + x.type.shape
    if not n.type.size:
        return e.fill(0, n.type)
    apart = tuple(k for size in shape for k in (1, size))
    wide = tuple(k for r, size in zip(repeats, shape, strict=True) for k in (r, size))
    if all(r == 1 or size == 1 for r, size in zip(repeats, shape, strict=True)):
        return e(t.Broadcast(reshaped(e, x, shape), n.type.shape))
    return e(t.Reshape(e(t.Broadcast(e(t.Reshape(x, apart)), wide)), n.type.shape))


def pad_constant(n: TorchNode, e: Emitter) -> Value:
    """Pairs of counts from the last axis backwards."""
    x = n["self"]
    low, high = padding(n.args["pad"], x.type.rank)
    number = n.args.get("value") or 0
    value = e.constant(of_dtype(number, x.type.dtype), x.type.dtype) if number else None
    return e(t.Pad(x, low, high, value))


def padding(pairs: Sequence[int], rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    low, high = [0] * rank, [0] * rank
    for i in range(len(pairs) // 2):
        low[rank - 1 - i], high[rank - 1 - i] = pairs[2 * i], pairs[2 * i + 1]
    return tuple(low), tuple(high)


def padding_around(
    e: Emitter, x: Value, axis: int, *, start: int, step: int = 1, length: int
) -> Value:
    """Zeros of that length along `axis`, with x's cells from `start` on by `step`."""
    count = x.type.shape[axis]
    if step > 1 and count > 1:
        shape = (*x.type.shape[: axis + 1], 1, *x.type.shape[axis + 1 :])
        low, high = [0] * len(shape), [0] * len(shape)
        high[axis + 1] = step - 1
        apart = e(t.Pad(reshaped(e, x, shape), tuple(low), tuple(high)))
        wide = (*x.type.shape[:axis], count * step, *x.type.shape[axis + 1 :])
        x = part(e, reshaped(e, apart, wide), axis, 0, (count - 1) * step + 1)
    low, high = [0] * x.type.rank, [0] * x.type.rank
    low[axis], high[axis] = start, length - start - x.type.shape[axis]
    return x if not any((*low, *high)) else e(t.Pad(x, tuple(low), tuple(high)))


def pad_by(n: TorchNode, e: Emitter, mode: Any) -> Value:
    x = n["self"]
    low, high = padding(n.args["padding"], x.type.rank)
    if not any((*low, *high)) or not n.type.size:
        return reshaped(e, x, n.type.shape)
    return e(t.Pad(x, low, high, mode=mode))


def triangle(n: TorchNode, e: Emitter, keeps_upper: bool) -> Value:
    """triu, tril: cells on one side of a diagonal, zero elsewhere."""
    x = n["self"]
    rows, columns = x.type.shape[-2:]
    mask = triangle_mask(e, rows, columns, n.args["diagonal"], keeps_upper)
    return e.map("where", mask, x, e.constant(of_dtype(0, x.type.dtype), x.type.dtype))


def triangle_mask(e: Emitter, rows: int, columns: int, diagonal: int, upper: bool) -> Value:
    """[rows, columns]: column - row at least `diagonal` (upper), or at most."""
    row = e(t.Iota(TensorType((rows, 1), i64), 0), fold=False)
    column = e(t.Iota(TensorType((1, columns), i64), 1), fold=False)
    apart = e.map("sub", column, row)
    return e.map("ge" if upper else "le", apart, diagonal)


# ---------------------------------------------------------------------------- indexing


def embedding(n: TorchNode, e: Emitter) -> Value:
    return e(t.Gather(n["weight"], n["indices"], 0))


def index_select(n: TorchNode, e: Emitter) -> Value:
    x, index = n["self"], n["index"]
    if not x.type.rank:
        return x
    if not index.type.rank:
        index = e(t.Reshape(index, (1,)))
    return e(t.Gather(x, index, n.axis(x.type.rank)))


def gather(n: TorchNode, e: Emitter) -> Value:
    """self[i with i[dim] replaced by index[i]]; index may be shorter along other axes."""
    x, index = n["self"], n["index"]
    if not x.type.rank:
        return e(t.Broadcast(reshaped(e, x, ()), n.type.shape)) if n.type.rank else x
    axis = n.axis(x.type.rank)
    return e(t.GatherElements(fitted(e, x, index, axis), index, axis))


def fitted(e: Emitter, x: Value, index: Value, axis: int) -> Value:
    """x cut to the index's extents but along `axis`."""
    for i, size in enumerate(index.type.shape):
        if i != axis:
            x = part(e, x, i, 0, size)
    return x


def index(n: TorchNode, e: Emitter) -> Value:
    """self[indices]: integer tensors broadcast together, masks, None where an axis is whole."""
    x = n["self"]
    given = [i for i, v in enumerate(n.args["indices"]) if v is not None]
    first = first_of(given)
    places = index_places(n, e, n.type.shape[first] if first < n.type.rank else 1)
    axes = [axis for axis, _ in places]
    if len(axes) == 1:
        axis, only = places[0]
        return reshaped(e, e(t.Gather(x, only, axis)), n.type.shape)
    order = [*axes, *(i for i in range(x.type.rank) if i not in axes)]
    front = transposed(e, x, order)
    found = e(t.GatherND(front, stacked(e, [v for _, v in places])))
    rank, lead = found.type.rank, first_of(axes)
    spread = rank - (x.type.rank - len(axes))
    inner = range(spread, spread + lead)
    found = transposed(e, found, (*inner, *range(spread), *range(spread + lead, rank)))
    return reshaped(e, found, n.type.shape)


def first_of(axes: Sequence[int]) -> int:
    """Where the index's axes stand among the others: at the first indexed one, if the indexed ones
    are neighbours; in front otherwise."""
    return axes[0] if [*axes] == [*range(axes[0], axes[0] + len(axes))] else 0


def index_places(n: TorchNode, e: Emitter, picked: int) -> list[tuple[int, Value]]:
    """Each indexed axis with its integers: of a mask, those of the cells it picks, so many."""
    found: list[tuple[int, Value]] = []
    axis = 0
    for v in n.args["indices"]:
        if v is None:
            axis += 1
        elif v.type.dtype == bool_:
            columns = nonzero_places(n, e, v, picked)
            found += [(axis + i, pick(e, columns, 0, i)) for i in range(v.type.rank)]
            axis += v.type.rank
        else:
            found.append((axis, cast(e, v, i64)))
            axis += 1
    return found


def nonzero_places(n: TorchNode, e: Emitter, x: Value, count: int) -> Value:
    """The coordinates of the cells that are not zero, a row for each axis; how many there are is
    given."""
    e.assume(f"{n.name}: {count} of {x.type.size} elements are assumed to be nonzero")
    gives = TensorType((max(x.type.rank, 1), count), i64)
    return e(t.Routine("nonzero", (x,), (gives,), work=x.type.size))


def stacked(e: Emitter, indices: Sequence[Value]) -> Value:
    """Indices broadcast together, their numbers along a new last axis."""
    shape = t.broadcast(*(v.type.shape for v in indices))
    columns = tuple(e(t.Reshape(widened(e, v, shape), (*shape, 1))) for v in indices)
    return columns[0] if len(columns) == 1 else e(t.Concat(columns, len(shape)))


def index_put(n: TorchNode, e: Emitter) -> Value:
    """self with values written, or added, where the indices say."""
    x, values = n["self"], n["values"]
    if len(masks := [v for v in n.args["indices"] if v is not None]) == 1:
        (mask,) = masks
        inner = x.type.rank - mask.type.rank
        alike = values.type.rank <= inner or values.type.shape[: -inner or None] == (1,)
        if mask.type.dtype == bool_ and alike:  # the same for each cell that the mask picks
            wide = reshaped(e, mask, (*mask.type.shape, *(1,) * inner))
            values = reshaped(e, cast(e, values, x.type.dtype), values.type.shape[-inner or 9 :])
            if n.args["accumulate"]:
                values = e.map("add", x, values)
            return e.map("where", wide, values, x)
    given = [i for i, v in enumerate(n.args["indices"]) if v is not None]
    if len(masks) == 1 and masks[0].type.dtype == bool_ and given != [0]:
        raise n.refused("a mask over the last axes only is not supported")
    places = index_places(n, e, values.type.shape[0] if values.type.rank else 1)
    axes = [axis for axis, _ in places]
    order = [*axes, *(i for i in range(x.type.rank) if i not in axes)]
    front = transposed(e, x, order)
    at = stacked(e, [v for _, v in places])
    rest = front.type.shape[len(axes) :]
    spread = at.type.shape[:-1]
    lead = first_of(axes)
    middle = range(lead, lead + len(spread))
    updates = widened(e, values, (*rest[:lead], *spread, *rest[lead:]))
    behind = range(lead + len(spread), updates.type.rank)
    updates = transposed(e, updates, (*middle, *range(lead), *behind))
    combine = "add" if n.args["accumulate"] else "none"
    updates = cast(e, updates, x.type.dtype)
    found = e(t.ScatterND(front, at, updates, combine))
    return transposed(e, found, tuple(int(i) for i in np.argsort(order)))


def scatter(n: TorchNode, e: Emitter) -> Value:
    """self with src (or one value) at self[i with i[dim] replaced by index[i]]."""
    x, at = n["self"], n["index"]
    source = n.one_of("src", "value")
    if not isinstance(source, Value):
        number = of_dtype(source, x.type.dtype)
        source = e.fill(number, TensorType(at.type.shape, x.type.dtype))
    if not x.type.rank:
        x, at, source = (reshaped(e, v, (1,)) for v in (x, at, source))
    for i, size in enumerate(at.type.shape):
        source = part(e, source, i, 0, size)
    reduce = n.args.get("reduce")
    combines = {None: "none", "add": "add", "sum": "add", "multiply": "mul", "prod": "mul"}
    combines |= {"amax": "max", "amin": "min"}
    if n.op.startswith("scatter_add"):
        reduce = "add"
    axis, dtype = n.axis(x.type.rank), x.type.dtype
    source = cast(e, source, dtype)
    combine: Any = "add" if reduce == "mean" else combines[reduce]
    alone = n.args.get("include_self") is False  # what is written does not count
    if alone:
        neutral = e.fill(of_dtype(neutral_of(combine, dtype), dtype), source.type)
        x = e(t.ScatterElements(x, at, neutral, axis))
    found = e(t.ScatterElements(x, at, source, axis=axis, combine=combine))
    if reduce == "mean":
        ones = e.fill(1, source.type)
        count = e.fill(0 if alone else 1, x.type)
        count = e(t.ScatterElements(count, at, ones, axis=axis, combine="add"))
        found = divided(e, found, e.map("max", count, of_dtype(1, dtype)))
    return reshaped(e, found, n.type.shape)


def neutral_of(combine: str, dtype: DType) -> float:
    """What changes no number that it is combined with."""
    most = float("inf") if dtype.is_float else 2 ** (dtype.bits - (dtype.kind == "int")) - 1
    least = -most if dtype.is_float else -(2 ** (dtype.bits - 1)) * (dtype.kind == "int")
    return {"add": 0, "mul": 1, "max": least, "min": most}[combine]


def divided(e: Emitter, x: Value, y: Value) -> Value:
    """x / y, rounded down for integers."""
    if x.type.dtype.is_float:
        return e.map("div", x, y)
    return floored(e, x.type.dtype, x, y)


def diagonal(n: TorchNode, e: Emitter) -> Value:
    """Cells whose indices along two axes differ by `offset`: each row and one more of them laid
    flat."""
    x = n["self"]
    rank = x.type.rank
    a, b = n.axis(rank, "dim1"), n.axis(rank, "dim2")
    x = transposed(e, x, [i for i in range(rank) if i not in (a, b)] + [a, b])
    *lead, rows, columns = x.type.shape
    offset, count = int(n.args["offset"]), n.type.shape[-1]
    start = offset if offset >= 0 else -offset * columns
    if not count:
        return e.fill(0, n.type)
    flat = reshaped(e, x, (*lead, rows * columns))
    return sliced(e, flat, {len(lead): (start, count, columns + 1)})


def windows(n: TorchNode, e: Emitter) -> Value:
    """unfold: windows of `size` every `step` cells along an axis, each along a new last axis."""
    x = n["self"]
    if not x.type.rank:
        return reshaped(e, x, n.type.shape)
    axis = n.axis(x.type.rank, "dimension")
    size, step, count = int(n.args["size"]), int(n.args["step"]), n.type.shape[axis]
    if size == step:  # side by side, a view
        shape = list(x.type.shape)
        shape[axis : axis + 1] = count, size
        found = reshaped(e, part(e, x, axis, 0, count * size), shape)
    else:
        at = np.arange(count)[:, None] * step + np.arange(size)
        found = e(t.Gather(x, e.constant(at, i64, "windows"), axis))
    rank = found.type.rank
    return transposed(e, found, [*(i for i in range(rank) if i != axis + 1), axis + 1])


def strided(shape: Sequence[int], strides: Sequence[int], start: int) -> Places:
    """Where cells lie by strides in a tensor laid flat."""
    at = np.full(shape, start)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        at += (np.arange(size) * stride).reshape([-1 if i == axis else 1 for i in range(at.ndim)])
    return at


def as_strided(n: TorchNode, e: Emitter) -> Value:
    """Cells of the tensor laid flat, by strides: a slice of it, or picked one by one."""
    x, strides, start = n["self"], n.args["stride"], n.args["storage_offset"] or 0
    shape = n.type.shape
    packed = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    flat = reshaped(e, x, (x.type.size,))
    if all(a == b or size == 1 for a, b, size in zip(strides, packed, shape, strict=True)):
        return reshaped(e, part(e, flat, 0, start, n.type.size), shape)
    return e(t.Gather(flat, e.constant(strided(shape, strides, start), i64, "places")))


def masked_select(n: TorchNode, e: Emitter) -> Value:
    """The cells where the mask holds, which are so many as is given."""
    x, mask = n["self"], n["mask"]
    shape = t.broadcast(x.type.shape, mask.type.shape)
    count = n.type.shape[0]
    x, mask = widened(e, x, shape), widened(e, mask, shape)
    size = x.type.size
    at = nonzero_places(n, e, reshaped(e, mask, (size,)), count)
    return e(t.Gather(reshaped(e, x, (size,)), reshaped(e, at, (count,))))


def put_at(e: Emitter, x: Value, at: Places, source: Value) -> Value:
    """x with the source's cells at known places of it laid flat."""
    cells = reshaped(e, cast(e, source, x.type.dtype), (source.type.size,))
    flat = reshaped(e, x, (x.type.size,))
    where = e.constant(at.reshape(-1, 1), i64)
    return reshaped(e, e(t.ScatterND(flat, where, cells)), x.type.shape)


def as_strided_scatter(n: TorchNode, e: Emitter) -> Value:
    x, source = n["self"], n["src"]
    at = strided(n.args["size"], n.args["stride"], n.args["storage_offset"] or 0)
    return put_at(e, x, at, source)


def diagonal_scatter(n: TorchNode, e: Emitter) -> Value:
    """self with src written to its diagonal."""
    x, rank = n["self"], n["self"].type.rank
    cells = np.arange(x.type.size).reshape(x.type.shape)
    axes = (n.axis(rank, "dim1"), n.axis(rank, "dim2"))
    return put_at(e, x, np.diagonal(cells, int(n.args["offset"]), *axes), n["src"])


def take(n: TorchNode, e: Emitter) -> Value:
    """Cells of the tensor laid flat."""
    x = n["self"]
    return e(t.Gather(reshaped(e, x, (x.type.size,)), n["index"]))


def put(n: TorchNode, e: Emitter) -> Value:
    """self with cells of it laid flat written, or added to."""
    x, at, source = n["self"], n["index"], n["source"]
    where = reshaped(e, at, (at.type.size, 1))
    cells = reshaped(e, source, (source.type.size,))
    combine = "add" if n.args["accumulate"] else "none"
    found = e(t.ScatterND(reshaped(e, x, (x.type.size,)), where, cells, combine))
    return reshaped(e, found, x.type.shape)


def resized(n: TorchNode, e: Emitter) -> Value:
    """The first cells of the tensor laid flat; new memory behind them."""
    x, size = n["self"], n.type.size
    flat = reshaped(e, x, (x.type.size,))
    if size > x.type.size:
        flat = e(t.Pad(flat, (0,), (size - x.type.size,)))
    return reshaped(e, part(e, flat, 0, 0, size), n.type.shape)


def index_add(n: TorchNode, e: Emitter) -> Value:
    """self with alpha * source[i] added at, or copied to, self[index[i]] along `dim`."""
    x, at, source = n["self"], n["index"], n["source"]
    at = at if at.type.rank else reshaped(e, at, (1,))
    alpha = n.args.get("alpha", 1)
    if not x.type.rank:
        x, at, source = (reshaped(e, v, (1,)) for v in (x, at, source))
    axis = n.axis(x.type.rank)
    if source.type.rank == x.type.rank - 1 == 0:
        source = reshaped(e, source, (1,))
    if alpha != 1:
        source = mapped(e, "mul", source, alpha, dtype=source.type.dtype)
    shape = tuple(size if i == axis else 1 for i, size in enumerate(source.type.shape))
    wide = widened(e, reshaped(e, at, shape), source.type.shape)
    combine: Any = "add" if n.op.startswith("index_add") else "none"
    found = e(t.ScatterElements(x, wide, cast(e, source, x.type.dtype), axis=axis, combine=combine))
    return reshaped(e, found, n.type.shape)


def index_reduce(n: TorchNode, e: Emitter) -> Value:
    """As `scatter_reduce`, the same index for all cells of a part of `source`."""
    at, source = n["index"], n["source"]
    axis = n.axis(source.type.rank)
    shape = tuple(size if i == axis else 1 for i, size in enumerate(source.type.shape))
    wide = widened(e, reshaped(e, at, shape), source.type.shape)
    return scatter(replace(n, args={**n.args, "index": wide, "src": source}), e)


def slice_scatter(n: TorchNode, e: Emitter) -> Value:
    """self with src written to self[.., start:end:step, ..]."""
    x, source = n["self"], n["src"]
    axis = n.axis(x.type.rank)
    length, count = x.type.shape[axis], source.type.shape[axis]
    start = first_cell(n, length)
    step = n.args["step"]
    if count == length:
        return cast(e, source, x.type.dtype)
    if not count:
        return x
    source = cast(e, source, x.type.dtype)
    if step == 1:
        around = [part(e, x, axis, 0, start), source]
        around.append(part(e, x, axis, start + count, length - start - count))
        return e(t.Concat(tuple(v for v in around if v.type.shape[axis]), axis))
    line = np.arange(start, start + count * step, step)
    shape = tuple(count if i == axis else 1 for i in range(x.type.rank))
    at = widened(e, e.constant(line.reshape(shape), i64), source.type.shape)
    return e(t.ScatterElements(x, at, source, axis))


def select_scatter(n: TorchNode, e: Emitter) -> Value:
    """self with src written to self[.., index, ..]."""
    x, source = n["self"], n["src"]
    axis = n.axis(x.type.rank)
    length = x.type.shape[axis]
    index = n.args["index"] % length
    shape = tuple(1 if i == axis else size for i, size in enumerate(x.type.shape))
    source = reshaped(e, cast(e, source, x.type.dtype), shape)
    around = (part(e, x, axis, 0, index), source, part(e, x, axis, index + 1, length - index - 1))
    kept = tuple(v for v in around if v.type.shape[axis])
    return kept[0] if len(kept) == 1 else e(t.Concat(kept, axis))


# ---------------------------------------------------------------------------- new tensors


def filled(n: TorchNode, e: Emitter, argument: str) -> Value:
    """One number throughout: the argument of that name."""
    number = n.args[argument]
    if isinstance(number, Value):
        return widened(e, cast(e, reshaped(e, number, ()), n.type.dtype), n.type.shape)
    return e.fill(of_dtype(number, n.type.dtype), n.type)


def filled_with(n: TorchNode, e: Emitter, number: int) -> Value:
    """This number throughout."""
    return e.fill(of_dtype(number, n.type.dtype), n.type)


def arange(n: TorchNode, e: Emitter) -> Value:
    """start, start + step, ..: counted on the device."""
    dtype, (length,) = n.type.dtype, n.type.shape
    start, step = n.args.get("start") or 0, n.args.get("step")
    step = 1 if step is None else step
    line = e(t.Iota(TensorType((length,), dtype), 0), fold=False)
    if step != 1:
        line = mapped(e, "mul", line, step, dtype=dtype)
    return line if not start else mapped(e, "add", line, start, dtype=dtype)


CONVERTERS: dict[str, Converter] = each_named(
    {
        "view _unsafe_view reshape flatten unflatten squeeze unsqueeze view_as reshape_as": reshape,
        "_reshape_alias": reshape,
        "permute": permute,
        "transpose swapaxes swapdims": swapped,
        "t numpy_T": turned,
        "movedim moveaxis": moved,
        "expand expand_as broadcast_to": expand,
        "slice": slice_,
        "select": select,
        "narrow": narrow,
        "split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk": parts,
        "unbind": unbind,
        "cat concat": concat,
        "stack": stack,
        "flip": flip,
        "roll": roll,
        "repeat": repeat,
        "constant_pad_nd": pad_constant,
        "triu": partial(triangle, keeps_upper=True),
        "tril": partial(triangle, keeps_upper=False),
        "embedding": embedding,
        "index_select": index_select,
        "gather": gather,
        "index _unsafe_index": index,
        "index_put _unsafe_index_put": index_put,
        "scatter scatter_add scatter_reduce": scatter,
        "index_add index_copy": index_add,
        "slice_scatter": slice_scatter,
        "select_scatter": select_scatter,
        "full full_like new_full": partial(filled, argument="fill_value"),
        "fill": partial(filled, argument="value"),
        "scalar_tensor": partial(filled, argument="s"),
        "ones ones_like new_ones": partial(filled_with, number=1),
        "zeros zeros_like new_zeros empty empty_like new_empty": partial(filled_with, number=0),
        "empty_strided new_empty_strided empty_permuted": partial(filled_with, number=0),
        "arange": arange,
        "diagonal": diagonal,
        "unfold": windows,
        "as_strided": as_strided,
        "as_strided_scatter": as_strided_scatter,
        "diagonal_scatter": diagonal_scatter,
        "take": take,
        "masked_select": masked_select,
        "put": put,
        "resize": resized,
        "index_reduce": index_reduce,
        **{f"reflection_pad{d}d": partial(pad_by, mode="reflect") for d in (1, 2, 3)},
        **{f"replication_pad{d}d": partial(pad_by, mode="edge") for d in (1, 2, 3)},
    }
)
