"""The ways to run an op on ranks: what each takes of its operands and gives of its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from gpuir.ir.build import Builder
from gpuir.ir.graph import Op, Value
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t
from gpuir.ops.axes import Axes, Names
from gpuir.passes.optimizer import adds_squares
from gpuir.passes.shard import rows
from gpuir.passes.shard.axes import axes_of, is_packed
from gpuir.passes.shard.place import (
    FLOPS_A_BYTE,
    MEMORY_A_BYTE,
    SUM,
    WHOLE,
    Group,
    Kept,
    Placed,
    part,
)


@dataclass(frozen=True)
class ShardWay:
    """Where an op takes its operands and where it gives its results; `axis` is the name of the axis
    that it is cut along, if it is, or of what ranks exchange inside, of which each sends so much
    (`sends`, bytes)."""

    takes: tuple[Placed, ...]
    gives: tuple[Placed, ...]
    axis: str = ""
    sends: float = 0.0


@dataclass(frozen=True)
class Inside:
    """Ops in which ranks exchange what they have: none."""

    def ways(self, op: Op, ranks: int) -> Iterator[ShardWay]:
        """The ways to run an op so."""
        yield from ()

    def made(self, way: str, op: Op, b: Builder, group: Group, kept: Kept) -> list[Value]:
        """What a rank has of its results, by the way that is called so. `op` has a rank's
        operands."""
        raise AssertionError(op)


def ways(
    op: Op,
    ranks: int,
    is_zero: Callable[[Value], bool],
    have: Sequence[Sequence[Placed]] = (),
) -> Iterator[ShardWay]:
    """Every way; the first is to run it whole on each rank. `have` are the places of the operands
    now: of cuts into several parts, and of lists of tensors, they say which there may be."""
    yield ShardWay((WHOLE,) * len(op.operands), (WHOLE,) * len(op.result_types))
    if op.control:
        return
    if isinstance(op, t.Routine) and op.fn == "multi_tensor" and have:
        yield _tensor_by_tensor(op, have)
        return
    for taken in linear(op, is_zero):
        takes = tuple(SUM if i in taken else WHOLE for i in range(len(op.operands)))
        yield ShardWay(takes, (SUM,) * len(op.result_types))
    if isinstance(op, t.Concat):
        yield from _packed(op, ranks)
    if isinstance(op, t.Experts | t.ExpertsGradient):
        yield from _inside_experts(op, ranks)
    if isinstance(op, t.Reshape):
        yield from _reshaped(op, have, ranks)
    if isinstance(op, t.Collective | t.Shard):
        yield from _exchanged(op, have, ranks)
    for takes, gives in rows.places(op, is_zero):
        pairs = zip(takes, op.operands, strict=True)
        if all(p.fits(v.type, ranks) for p, v in pairs) and gives.fits(op.result_types[0], ranks):
            yield ShardWay(tuple(takes), (gives,), "rows")
    axes = axes_of(op, is_zero)
    if axes is None:
        return
    for name in axes.names:
        yield from _cut(op, axes, name, (), ranks)
    for names, places in zip(axes.operands, have, strict=False):
        for place in places:
            if place.parts and names[place.axis]:
                yield from _cut(op, axes, names[place.axis], place.parts, ranks)
            elif place.parts and isinstance(op, t.Slice):
                yield from _unpacked(op, place)


def _cut(op: Op, axes: Axes, name: str, parts: tuple[int, ...], ranks: int) -> Iterator[ShardWay]:
    def place(names: Names, type: TensorType, otherwise: Placed) -> Placed | None:
        if name not in names:
            return otherwise
        axis = names.index(name)
        found = part(axis, parts)
        alike = not parts or sum(parts) == type.shape[axis]
        return found if alike and found.fits(type, ranks) else None

    takes = [place(n, v.type, WHOLE) for n, v in zip(axes.operands, op.operands, strict=True)]
    other = SUM if name in axes.summed else None
    pairs = zip(axes.results, op.result_types, strict=True)
    gives = [other if name not in n else place(n, type, WHOLE) for n, type in pairs]
    if None in takes or None in gives or not any(p and p.is_part for p in takes):
        return
    if name == "g" and getattr(op, "groups", 0) % ranks:
        return
    yield ShardWay(tuple(p for p in takes if p), tuple(p for p in gives if p), name)


def _packed(op: t.Concat, ranks: int) -> Iterator[ShardWay]:
    """What lies side by side, each cut along that axis."""
    place = part(op.axis)
    if all(place.fits(v.type, ranks) for v in op.args):
        extents = tuple(v.type.shape[op.axis] for v in op.args)
        yield ShardWay((place,) * len(op.args), (part(op.axis, extents),), "packed")


def _inside_experts(op: t.Experts | t.ExpertsGradient, ranks: int) -> Iterator[ShardWay]:
    """Experts cut between their products, where the gate's rows lie packed before the others, or
    something is added behind the second product."""
    inter, packed = op.down.type.shape[-1], is_packed(op)
    if inter % ranks or not (packed or op.down_bias is not None):
        return
    rows, columns = part(1, (inter, inter) if packed else ()), part(2)
    inner = (op.up, op.gate, op.up_bias, op.gate_bias)

    def place(v: Value) -> Placed:
        return columns if v == op.down else rows if v in inner else WHOLE

    gives = (SUM,)
    if isinstance(op, t.ExpertsGradient):
        whole = {op.down_bias: WHOLE}  # of what no rank has a part of
        gives = tuple(place(v) if place(v).is_part else whole.get(v, SUM) for v in op.subjects)
    yield ShardWay(tuple(map(place, op.operands)), gives, "between")


def _reshaped(op: t.Reshape, have: Sequence[Sequence[Placed]], ranks: int) -> Iterator[ShardWay]:
    """Axes of which not the first is cut: with others before it in one, a rank has its part of
    each, and the other way round."""
    for place in (p for places in have for p in places if p.is_part):
        for end in _same_cells(op.x.type.shape, place, op.shape):
            if place.fits(op.x.type, ranks) and end.fits(op.result_types[0], ranks):
                yield ShardWay((place,), (end,), "packed")


def _same_cells(old: tuple[int, ...], place: Placed, new: tuple[int, ...]) -> Iterator[Placed]:
    """Where cells are in another shape, of which each rank has every so many in a row: as many of
    each of so many parts."""
    before, extent = prod(old[: place.axis]), old[place.axis]
    each = place.parts or (extent,)
    if len(set(each)) > 1 or 0 in old:
        return
    count, run = before * len(each), each[0] * prod(old[place.axis + 1 :])
    for axis, n in enumerate(new):
        first, behind = prod(new[:axis]), prod(new[axis + 1 :])
        if n > 1 and first <= count and count % first == 0 and behind <= run and run % behind == 0:
            parts = (run // behind,) * (count // first)
            if sum(parts) == n:
                yield part(axis, parts if len(parts) > 1 else ())


def _exchanged(
    op: t.Collective | t.Shard, have: Sequence[Sequence[Placed]], ranks: int
) -> Iterator[ShardWay]:
    """What other ranks exchange along an axis that is cut as well: of what they lay side by side
    each has its part of each, and of what they cut up too."""
    splits = isinstance(op, t.Shard) or op.fn in ("reduce_scatter", "all_to_all")
    joins = isinstance(op, t.Collective) and op.fn in ("all_gather", "all_to_all")
    joined = op.to if isinstance(op, t.Collective) and op.fn == "all_to_all" else op.axis
    n = prod(op.sizes)
    for place in (p for places in have for p in places if p.is_part):
        parts, count = place.parts, len(place.parts) // n
        ends: list[Placed] = []
        if splits and place.axis == op.axis and count and parts == parts[:count] * n:
            ends.append(part(op.axis, parts[:count] if count > 1 else ()))
        if joins and place.axis == joined:
            ends.append(part(joined, (parts or (op.x.type.shape[joined],)) * n))
        for end in ends:
            if place.fits(op.x.type, ranks) and end.fits(op.result_types[0], ranks):
                yield ShardWay((place,), (end,), "packed")


def _unpacked(op: t.Slice, place: Placed) -> Iterator[ShardWay]:
    """A slice that is one of what lies packed along the axis."""
    start, size = op.starts[place.axis], op.sizes[place.axis]
    ends = [sum(place.parts[:i]) for i in range(len(place.parts) + 1)]
    rest = (
        (a, n, s) == (0, whole, 1)
        for i, (a, n, s, whole) in enumerate(
            zip(op.starts, op.sizes, op.steps, op.x.type.shape, strict=True)
        )
        if i != place.axis
    )
    if op.steps[place.axis] == 1 and all(rest) and start in ends and start + size in ends:
        first, last = ends.index(start), ends.index(start + size)
        inner = place.parts[first:last]
        yield ShardWay((place,), (part(place.axis, inner if len(inner) > 1 else ()),), "packed")


def _tensor_by_tensor(op: t.Routine, have: Sequence[Sequence[Placed]]) -> ShardWay:
    """Each tensor of the lists as one of its row, a weight with its gradient and state, is cut;
    what all rows have one of is whole. Of sums of squares each rank has terms, of its parts."""
    lists = dict(op.attrs)["lists"]
    assert isinstance(lists, int)
    count = len(op.args) // lists
    rows = [[p for places in have[i::count] for p in places if p.is_part] for i in range(count)]
    row = [places[0] if places else WHOLE for places in rows]

    def like_first(types: Sequence[TensorType]) -> tuple[Placed, ...]:
        shapes = [v.type.shape for v in op.args[:count]]
        return tuple(
            row[i % count] if x.shape == shapes[i % count] else WHOLE for i, x in enumerate(types)
        )

    gives = like_first(op.result_types)
    if adds_squares(op):
        gives = (SUM if any(p.is_part for p in row) else WHOLE,) * count
    return ShardWay(like_first([v.type for v in op.args]), gives, "tensors")


def of_each(op: Op, way: ShardWay, ranks: int) -> Op:
    """A kernel on lists of tensors as a rank runs it. Of the squares of what all ranks have whole,
    each counts its share."""
    if not isinstance(op, t.Routine) or not adds_squares(op):
        return op
    attrs = dict(op.attrs)
    before = attrs["numbers"]
    assert isinstance(before, tuple)
    pairs = zip(before or (1.0,) * len(op.args), way.takes, strict=True)
    shares = tuple(float(n) if p.is_part else float(n) / ranks for n, p in pairs)
    return replace(op, attrs=tuple({**attrs, "numbers": shares}.items()))


def linear(op: Op, is_zero: Callable[[Value], bool]) -> list[set[int]]:
    """Which operands may be terms of sums, so that results are too; the others are whole."""
    match op:
        case t.Concat():
            return [set(range(len(op.args)))]
        case t.Pad(value=None, mode="constant"):
            return [{0}]
        case t.Layout() if not isinstance(op, t.Parts):
            return [{0}]
        case t.Collective(combine="add") if op.x.type.dtype.is_inexact:
            return [{0}]
        case t.Map("add" | "sub", (_, _)):
            return [{0, 1}]
        case t.Map("mul", (_, _)):
            return [{0}, {1}]
        case t.Map("mul" | "div" | "neg", (_, *_)):
            return [{0}]
        case t.Map("where", (_, _), (0,)):
            return [{1}]
        case t.ScatterND(x, _, _, "add") if is_zero(x):
            return [{2}]
        case t.Cast(x, dtype) if x.type.dtype.is_float and dtype.is_float:
            return [{0}]
        case t.Reduce("sum" | "mean"):
            return [{0}]
        case t.Matmul():
            return [{0}, {1}]
        case _:
            return []


def repeated_bytes(op: Op, way: ShardWay, ranks: int) -> float:
    """What it costs that each rank does the same, in bytes over a link that take as long."""
    if way.axis or isinstance(op, t.Layout | t.Generating):
        return 0.0
    moved = sum(v.type.nbytes for v in op.operands) + sum(x.nbytes for x in op.result_types)
    return (1 - 1 / ranks) * (op.flops() / FLOPS_A_BYTE + moved / MEMORY_A_BYTE)
