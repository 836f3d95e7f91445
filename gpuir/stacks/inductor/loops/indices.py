"""The tensors that a loop reads, and at which of their cells it stands in each trip."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from gpuir.ir.graph import Op, Value
from gpuir.ir.strides import Strided
from gpuir.ops import tensor as t
from gpuir.ops.strides import packed, viewed


class Read(NamedTuple):
    """A tensor in memory as a loop reads it, cell by cell of a value: by strides, or (None) in a
    way that no strides say: `way` then names the op that reads so, and which of its reads it is."""

    leaf: Value
    strides: tuple[int, ...] | None = None
    offset: int = 0
    way: tuple[int, ...] = ()


class Index(NamedTuple):
    """A tensor, and at which of its cells a loop stands in each trip: (extent, stride) from the
    outermost dimension, merged where they can be."""

    leaf: Value
    dims: tuple[tuple[int, int], ...]
    offset: int


def wide_strides(x: Strided) -> tuple[int, ...]:
    """Strides of the dimensions that have more than one cell."""
    return tuple(s for n, s in zip(x.shape, x.strides, strict=True) if n > 1)


def broadcast(r: Read, shape: tuple[int, ...], to: tuple[int, ...]) -> Read:
    """The read in each cell of a larger shape that `shape` broadcasts to."""
    if r.strides is None or shape == to:
        return r
    if len(shape) > len(to):
        return astray(r)
    lead = (0,) * (len(to) - len(shape))
    own = zip(shape, r.strides, to[len(lead) :], strict=True)
    return Read(r.leaf, (*lead, *(0 if n == 1 and m != 1 else s for n, s, m in own)), r.offset)


def spread(r: Read, axis: int, rank: int, own: int) -> Read:
    """The read of an index in each cell of what is gathered along `axis`."""
    if r.strides is None:
        return r
    return Read(r.leaf, (*(0,) * axis, *r.strides, *(0,) * (rank - axis - own)), r.offset)


def joined(r: Read, axis: int, shape: tuple[int, ...]) -> Read:
    """The read in each cell of what is joined along `axis`, which it must not depend on; else it is
    the same in all joins to that shape."""
    return r if r.strides and r.strides[axis] == 0 else astray(r, -1, axis, *shape)


def astray(r: Read, *way: int) -> Read:
    """The read as no strides say it; what was no strided read stays the read that it was, too."""
    return Read(r.leaf, None, 0, (*way, r.offset, *r.way))


def laid_out(r: Read, shape: tuple[int, ...], op: Op) -> Read:
    """The read in each cell of what a layout op makes."""
    if r.strides is None:
        return r
    x = Strided(shape, r.strides)
    y = viewed(x, op)
    if y is None:
        return astray(r)
    offset = r.offset
    if isinstance(op, t.Slice):
        offset += sum(a * s for a, s in zip(op.starts, x.strides, strict=True))
    return Read(r.leaf, y.strides, offset)


def whole(v: Value) -> Read:
    """A tensor read cell by cell, as it lies."""
    return Read(v, packed(v.type).strides)


def row(v: Value) -> Read:
    """What has one cell for each row of a tensor, read in each cell of that tensor."""
    own = zip(v.type.shape, packed(v.type).strides, strict=True)
    return Read(v, tuple(0 if n == 1 else s for n, s in own))


def through(
    reads: frozenset[Read], x: Value, op: Op, to: Value, *, place: int, most: int
) -> set[Read]:
    """The reads in each cell of `to`, which the op at this place makes of `x`, of what is read in
    each cell of `x`. What no strides say is told apart by the place, or by the term of a sum: the
    terms beyond `most` reads are left out, since so many are too many however many they are."""
    shape = to.type.shape
    match op:
        case t.Map() | t.Cast() | t.Bitcast() | t.Ordered():
            return {broadcast(r, x.type.shape, shape) for r in reads}
        case t.Gather(table, indices, axis) if x == indices and x != table:
            return {spread(r, axis, len(shape), x.type.rank) for r in reads}
        case t.Reshape() | t.Transpose() | t.Broadcast() | t.Slice() | t.Parts():
            return {laid_out(r, x.type.shape, op) for r in reads}
        case t.Concat(axis=axis):
            return {joined(r, axis, shape) for r in reads}
        case t.Reduce():
            terms = x.type.size // max(to.type.size, 1)
        case t.Pool():
            terms = prod(op.window)
        case t.Resize() if op.mode != "nearest":
            terms = 4
        case _:
            return {astray(r, place) for r in reads}
    return {astray(r, place, k) for r in reads for k in range(min(terms, most + 1))}


def is_straight(reads: Iterable[Read], shape: tuple[int, ...]) -> bool:
    """Whether a loop over `shape` that reads so runs in the order of its cells: it follows the
    tensors that it reads; one that has a stride for each dimension has to lie as the cells do."""
    wide = [a for a, n in enumerate(shape) if n > 1]
    known = (r.strides for r in reads if r.strides and len(r.strides) == len(shape))
    lying = [[strides[a] for a in wide] for strides in known]
    full = [strides for strides in lying if all(strides)]
    return any(strides == sorted(strides, reverse=True) for strides in full)


def index(r: Read, shape: tuple[int, ...]) -> Index | None:
    """A read as a loop over `shape` does it; None where no strides say it."""
    if r.strides is None or len(r.strides) != len(shape):
        return None
    dims: list[tuple[int, int]] = []
    for n, s in zip(shape, r.strides, strict=True):
        if n == 1:
            continue
        if dims and dims[-1][1] == n * s:
            dims[-1] = (dims[-1][0] * n, s)
        else:
            dims.append((n, s))
    return Index(r.leaf, tuple(dims), r.offset)
