"""Ops that look for rows in a tensor cut along the axis they look in, or run along it: each rank
answers for the rows it has, and ranks exchange what is small.

Vocabularies are cut so: embeddings and the loss (Shoeybi et al.: Megatron-LM, 2019, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpuir.ir.build import Builder
from gpuir.ir.graph import Op, Value
from gpuir.ir.types import TensorType, bool_
from gpuir.ops import tensor as t
from gpuir.passes.shard.place import SUM, WHOLE, Group, Placed, part


def places(op: Op, is_zero: Callable[[Value], bool]) -> Iterator[tuple[list[Placed], Placed]]:
    """Where such an op takes its operands, and where it gives its result."""
    match op:
        case t.Gather(_, _, axis) | t.GatherElements(_, _, axis):
            yield [part(axis), WHOLE], SUM
        case t.Softmax(_, axis):
            yield [part(axis)], part(axis)
        case t.Reduce("max" | "min", _, (axis,)):
            yield [part(axis)], WHOLE
        case t.ScatterElements(_, indices, _, axis, "none") if indices.type.shape[axis] == 1:
            yield [part(axis), WHOLE, WHOLE], part(axis)
        case t.ScatterND(x, indices, _, "add") if indices.type.shape[-1] == 1 and is_zero(x):
            yield [part(0), WHOLE, WHOLE], part(0)
        case _:
            return


def made(op: Op, b: Builder, group: Group) -> Op:
    """The last of the ops that give what a rank has of the result; `op` has a rank's operands."""
    match op:
        case t.Gather(x, indices, axis):
            index, inside = _own_rows(b, indices, x.type.shape[axis], group)
            y = b(t.Gather(x, index, axis))
            behind = (1,) * (x.type.rank - axis - 1)
            inside = b(t.Reshape(inside, (*inside.type.shape, *behind)))
            return t.Map("where", (inside, y), (0,))
        case t.GatherElements(x, indices, axis):
            index, inside = _own_rows(b, indices, x.type.shape[axis], group)
            return t.Map("where", (inside, b(t.GatherElements(x, index, axis))), (0,))
        case t.ScatterElements(x, indices, updates, axis):
            start = first_of(b, indices, x.type.shape[axis], group)
            rows = b(t.Iota(TensorType(x.type.shape, indices.type.dtype), axis))
            hit = b(t.Map("eq", (rows, b(t.Map("sub", (indices, start))))))
            return t.Map("where", (hit, updates, x))
        case t.ScatterND(x, indices, updates):
            index, inside = _own_rows(b, indices, x.type.shape[0], group)
            behind = (1,) * (updates.type.rank - indices.type.rank + 1)
            shape = (*indices.type.shape[:-1], *behind)
            own = b(t.Map("where", (b(t.Reshape(inside, shape)), updates), (0,)))
            return t.ScatterND(x, index, own, "add")
        case t.Softmax(x, axis, log):
            top = b(t.Reduce("max", x, (axis,), keepdims=True))
            top = b(t.Collective("all_reduce", top, *group, combine="max"))
            shifted = b(t.Map("sub", (x, top)))
            powers = b(t.Map("exp", (shifted,)))
            total = b(t.Reduce("sum", powers, (axis,), keepdims=True))
            total = b(t.Collective("all_reduce", total, *group))
            if log:
                return t.Map("sub", (shifted, b(t.Map("log", (total,)))))
            return t.Map("div", (powers, total))
        case t.Reduce("max" | "min" as fn):
            return t.Collective("all_reduce", b(op), *group, combine=fn)
        case _:
            raise AssertionError(op)


def first_of(b: Builder, indices: Value, rows: int, group: Group) -> Value:
    """The number of the first row that a rank has: i * rows for rank i of the group."""
    ranks = b(t.Iota(TensorType((group[1][0],), indices.type.dtype)))
    own = b(t.Shard(ranks, 0, *group))
    return b(t.Map("mul", (b(t.Reshape(own, ())),), (rows,)))


def _own_rows(b: Builder, indices: Value, rows: int, group: Group) -> tuple[Value, Value]:
    """Indices among a rank's own rows, 0 for others, and which are among them. Those below 0 count
    from the end of all rows."""
    all_rows = b(t.Map("mod", (indices,), (rows * group[1][0],)))
    index = b(t.Map("sub", (all_rows, first_of(b, indices, rows, group))))
    inside = b(t.Map("and", (b(t.Map("ge", (index,), (0,))), b(t.Map("lt", (index,), (rows,))))))
    assert inside.type.dtype == bool_
    return b(t.Map("where", (inside, index), (0,))), inside


def opened(x: Value, axis: int, parts: int) -> t.Reshape:
    """What lies packed along an axis, so many parts of one extent, with an axis for the parts."""
    before, behind = x.type.shape[:axis], x.type.shape[axis + 1 :]
    return t.Reshape(x, (*before, parts, x.type.shape[axis] // parts, *behind))


def closed(x: Value, axis: int) -> t.Reshape:
    """What `opened` took apart, in one axis again."""
    parts, extent = x.type.shape[axis : axis + 2]
    return t.Reshape(x, (*x.type.shape[:axis], parts * extent, *x.type.shape[axis + 2 :]))
