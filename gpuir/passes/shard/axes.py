"""Along which axes an op can be cut over ranks: its axes by name, as in Einstein's notation.

An axis that has the same name in several tensors is cut in all of them or in none. A tensor without
the name is whole on each rank; a result without it, where the axis is summed over, is on each rank
a term of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuir.ir.graph import Op, Value
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t

Names = tuple[str, ...]  # one an axis; "" cannot be cut


@dataclass(frozen=True)
class Axes:
    """The names of the axes of an op's operands and results."""

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    summed: frozenset[str] = frozenset()  # a result without this name is a sum over it

    @property
    def names(self) -> tuple[str, ...]:
        every = (n for names in (*self.operands, *self.results) for n in names if n)
        return tuple(dict.fromkeys(every))


def axes_of(op: Op, is_zero: Callable[[Value], bool]) -> Axes | None:
    """The names of an op's axes; None where nothing is known of it. `is_zero` says whether all
    cells of an operand are zero."""
    if isinstance(op, t.ScatterND):
        return _scatter_nd(op, is_zero(op.x))
    if isinstance(op, t.ScatterElements):
        return _scatter_elements(op)
    names = AXES.get(type(op))
    return None if names is None else names(op)


def _numbered(rank: int, but: Sequence[int] = ()) -> Names:
    return tuple("" if i in but else f"{i}" for i in range(rank))


def _aligned(shape: tuple[int, ...], to: tuple[int, ...], names: Names) -> Names:
    """The names of what numpy broadcasts to a shape whose axes have names."""
    lead = len(to) - len(shape)
    return tuple(
        names[lead + i] if n == to[lead + i] and n != 1 else "" for i, n in enumerate(shape)
    )


def _pointwise(op: Op) -> Axes:
    (result,) = op.result_types
    names = _numbered(result.rank)
    operands = tuple(_aligned(v.type.shape, result.shape, names) for v in op.operands)
    return Axes(operands, (names,))


def _rows(op: Any) -> Axes:
    """All axes but those that the op runs along."""
    names = _numbered(op.x.type.rank, op.reduced_axes())
    return Axes((names,), tuple(_kept(names, type) for type in op.result_types))


def _kept(names: Names, type: TensorType) -> Names:
    """The names of what is left when the axes without a name are reduced, or kept as one cell."""
    return names if len(names) == type.rank else tuple(n for n in names if n)


def _reduce(op: t.Reduce) -> Axes:
    names = _numbered(op.x.type.rank)
    left = tuple("" if i in op.axes else n for i, n in enumerate(names))
    if not op.keepdims:
        left = tuple(n for i, n in enumerate(names) if i not in op.axes)
    if op.fn not in ("sum", "mean"):
        names = tuple("" if i in op.axes else n for i, n in enumerate(names))
        return Axes((names,), (left,))
    return Axes((names,), (left,), frozenset(names[i] for i in op.axes))


def _arg_reduce(op: t.ArgReduce) -> Axes:
    names = _numbered(op.x.type.rank, (op.axis,))
    left = names if op.keepdims else tuple(n for n in names if n)
    return Axes((names,), (left,))


def _topk(op: t.TopK) -> Axes:
    names = _numbered(op.x.type.rank, (op.axis,))
    return Axes((names,), (names, names))


def _reshape(op: t.Reshape) -> Axes:
    """Axes whose extents multiply to the same, from the left, go together: the first of them can be
    cut on both sides."""
    old, new = op.x.type.shape, op.shape
    here, there = [""] * len(old), [""] * len(new)
    if 0 in old:
        return Axes((tuple(here),), (tuple(there),))
    i = j = 0
    while i < len(old) and j < len(new):
        start = (i, j)
        a, b = old[i], new[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(old):
                a, i = a * old[i], i + 1
            elif j < len(new):
                b, j = b * new[j], j + 1
            else:
                break
        first = next((k for k in range(start[0], i) if old[k] != 1), None)
        second = next((k for k in range(start[1], j) if new[k] != 1), None)
        if first is not None and second is not None and a == b:
            here[first] = there[second] = f"{start[0]}"
    return Axes((tuple(here),), (tuple(there),))


def _transpose(op: t.Transpose) -> Axes:
    names = _numbered(op.x.type.rank)
    return Axes((names,), (tuple(names[i] for i in op.perm),))


def _broadcast(op: t.Broadcast) -> Axes:
    names = _numbered(len(op.shape))
    operand = _aligned(op.x.type.shape, op.shape, names)
    return Axes((operand,), (tuple(n if n in operand else "" for n in names),))


def _slice(op: t.Slice) -> Axes:
    rows = zip(op.x.type.shape, op.starts, op.sizes, op.steps, strict=True)
    cut = [i for i, (n, a, size, step) in enumerate(rows) if (a, size, step) != (0, n, 1)]
    names = _numbered(op.x.type.rank, cut)
    return Axes((names,), (names,))


def _concat(op: t.Concat) -> Axes:
    names = _numbered(op.result_types[0].rank, (op.axis,))
    return Axes((names,) * len(op.args), (names,))


def _pad(op: t.Pad) -> Axes:
    padded = [i for i, ends in enumerate(zip(op.low, op.high, strict=True)) if ends != (0, 0)]
    names = _numbered(op.x.type.rank, padded)
    value = () if op.value is None else (("",) * op.value.type.rank,)
    return Axes((names, *value), (names,))


def _gather(op: t.Gather) -> Axes:
    x = _numbered(op.x.type.rank, (op.axis,))
    index = tuple(f"i{i}" for i in range(op.indices.type.rank))
    return Axes((x, index), ((*x[: op.axis], *index, *x[op.axis + 1 :]),))


def _gather_elements(op: t.GatherElements) -> Axes:
    names = _numbered(op.x.type.rank, (op.axis,))
    names = _aligned(op.indices.type.shape, op.x.type.shape, names)
    return Axes((names, names), (names,))


def _gather_nd(op: t.GatherND) -> Axes:
    index = tuple(f"i{i}" for i in range(op.indices.type.rank - 1))
    depth = op.indices.type.shape[-1]
    rest = _numbered(op.x.type.rank)[op.batch + depth :]
    x = (*index[: op.batch], *("",) * depth, *rest)
    return Axes((x, (*index, "")), ((*index, *rest),))


def _scatter_elements(op: t.ScatterElements) -> Axes:
    names = _numbered(op.x.type.rank, (op.axis,))
    names = _aligned(op.updates.type.shape, op.x.type.shape, names)
    same = op.indices.type.shape == op.updates.type.shape
    names = names if same else ("",) * len(names)
    return Axes((names, names, names), (names,))


def _scatter_nd(op: t.ScatterND, on_zeros: bool) -> Axes:
    """Rows that are added to zeros are terms of a sum."""
    depth = op.indices.type.shape[-1]
    rest = _numbered(op.x.type.rank)[depth:]
    adds = on_zeros and op.combine == "add"
    index = tuple(f"i{i}" if adds else "" for i in range(op.indices.type.rank - 1))
    x = (*("",) * depth, *rest)
    return Axes((x, (*index, ""), (*index, *rest)), (x,), frozenset(index) - {""})


def _normalize(op: t.Normalize | t.NormalizeGradient) -> Axes:
    shape = op.x.type.shape
    names = _numbered(len(shape), (*op.axes, *((1,) if op.groups is not None else ())))
    operands = tuple(_aligned(v.type.shape, shape, names) for v in op.operands)
    return Axes(operands, (names,))


def _normalize_scale_gradient(op: t.NormalizeScaleGradient) -> Axes:
    shape = op.x.type.shape
    names = _numbered(len(shape), (*op.axes, *((1,) if op.groups is not None else ())))
    result = _aligned(op.shape, shape, names)
    summed = frozenset(names[i] for i in op.summed) - {""}
    return Axes((names, names), (result,) * (1 + op.bias), summed)


def _window(op: Op) -> Axes:
    """Images and channels."""

    def names(type: TensorType) -> Names:
        return ("n", "c", *("",) * (type.rank - 2))

    return Axes(tuple(names(v.type) for v in op.operands), tuple(map(names, op.result_types)))


def _resize(op: t.Resize | t.ResizeGradient) -> Axes:
    (result,) = op.result_types
    x = op.operands[0].type.shape
    alike = [n == m for n, m in zip(x, result.shape, strict=True)]
    names = tuple(f"{i}" if same and i < 2 else "" for i, same in enumerate(alike))
    return Axes((names,), (names,))


def _matmul(op: t.Matmul) -> Axes:
    (result,) = op.result_types
    lead = result.shape[:-2]
    names = _numbered(len(lead))
    a = _aligned(op.a.type.shape[:-2], lead, names)
    b = _aligned(op.b.type.shape[:-2], lead, names)
    return Axes(((*a, "m", "k"), (*b, "k", "n")), ((*names, "m", "n"),), frozenset("k"))


def _conv(op: t.Conv) -> Axes:
    spatial = ("",) * (op.x.type.rank - 2)
    if op.groups > 1:
        return Axes((("n", "g", *spatial), ("g", "", *spatial)), (("n", "g", *spatial),))
    ends = (("n", "c", *spatial), ("k", "c", *spatial))
    return Axes(ends, (("n", "k", *spatial),), frozenset("c"))


def _conv_transpose(op: t.ConvTranspose) -> Axes:
    spatial = ("",) * (op.x.type.rank - 2)
    if op.groups > 1:
        return Axes((("n", "g", *spatial), ("g", "", *spatial)), (("n", "g", *spatial),))
    ends = (("n", "c", *spatial), ("c", "k", *spatial))
    return Axes(ends, (("n", "k", *spatial),), frozenset("c"))


def _conv_weight_gradient(op: t.ConvWeightGradient) -> Axes:
    spatial = ("",) * (op.x.type.rank - 2)
    if op.groups > 1:
        ends = (("n", "g", *spatial), ("n", "g", *spatial))
        return Axes(ends, (("g", "", *spatial),), frozenset("n"))
    ends = (("n", "c", *spatial), ("n", "k", *spatial))
    return Axes(ends, (("k", "c", *spatial),), frozenset("n"))


def _attention(op: t.Attention | t.AttentionGradient) -> Axes:
    """Batch and heads; queries too, where each sees all keys."""
    lead = tuple(f"{i}" for i in range(op.q.type.rank - 3))
    s = "" if op.causal or op.window is not None or op.block else "s"
    q, k = (*lead, "h", s, ""), (*lead, "h", "", "")
    scores = (*op.q.type.shape[:-1], op.k.type.shape[-2])
    named = (*lead, "h", s, "")
    mask = () if op.mask is None else (_aligned(op.mask.type.shape, scores, named),)
    if isinstance(op, t.Attention):
        stats = ((*lead, "h", s),) if op.stats else ()
        return Axes((q, k, k, *mask), (q, *stats))
    of_mask = (named,) if op.of_mask else ()
    operands = (q, k, k, q, (*lead, "h", s), q, *mask)
    return Axes(operands, (q, k, k, *of_mask), frozenset({s} - {""}))


def _experts(op: t.Experts | t.ExpertsGradient) -> Axes:
    """Tokens; and what is between an expert's products, where it does not lie packed."""
    tokens, weights = ("t", ""), {id(v) for v in (op.up, op.down, op.gate) if v is not None}
    i = "" if op.down_bias is not None or is_packed(op) else "i"

    def names(v: Value) -> Names:
        if v is op.down:
            return ("", "", i)
        if id(v) in weights:
            return ("", i, "")
        if v in (op.up_bias, op.gate_bias):
            return ("", i)
        return tokens if v.type.rank == 2 and v is not op.down_bias else ("", "")

    operands = tuple(map(names, op.operands))
    summed = frozenset({i} - {""})
    if isinstance(op, t.Experts):
        return Axes(operands, (tokens,), summed)
    results = tuple(map(names, op.subjects))
    return Axes(operands, results, summed | {"t"})


def blocks_of(op: t.Attention | t.AttentionGradient, ranks: int) -> dict[str, tuple[int, ...]]:
    """The blocks of a mask that one of `ranks` ranks visits, which has a part of the heads: as many
    as any other, which is assumed."""
    if not op.block:
        return {}
    every, longest, columns = op.visited
    return {"visited": (-(-every // ranks), longest, -(-columns // ranks))}


def is_packed(op: t.Experts | t.ExpertsGradient) -> bool:
    """Whether the gate's rows are before the others in one matrix."""
    halves = op.up.type.shape[1] != op.down.type.shape[-1]
    return op.gate is None and halves and not op.interleaved


def _collective(op: t.Collective) -> Axes:
    moved: dict[str, tuple[int, ...]] = {
        "all_gather": (op.axis,),
        "reduce_scatter": (op.axis,),
        "all_to_all": (op.axis, op.to),
    }
    names = _numbered(op.x.type.rank, moved.get(op.fn, ()))
    return Axes((names,), (names,))


def _shard(op: t.Shard) -> Axes:
    names = _numbered(op.x.type.rank, (op.axis,))
    return Axes((names,), (names,))


AXES: dict[type[Op], Callable[[Any], Axes]] = {
    t.Map: _pointwise,
    t.Bitcast: _pointwise,
    t.Cast: _pointwise,
    t.Ordered: _pointwise,
    t.Reshape: _reshape,
    t.Transpose: _transpose,
    t.Broadcast: _broadcast,
    t.Slice: _slice,
    t.Concat: _concat,
    t.Pad: _pad,
    t.Gather: _gather,
    t.GatherElements: _gather_elements,
    t.GatherND: _gather_nd,
    t.Reduce: _reduce,
    t.ArgReduce: _arg_reduce,
    t.Cumulative: _rows,
    t.Softmax: _rows,
    t.TopK: _topk,
    t.Normalize: _normalize,
    t.NormalizeGradient: _normalize,
    t.NormalizeScaleGradient: _normalize_scale_gradient,
    t.Pool: _window,
    t.PoolGradient: _window,
    t.Resize: _resize,
    t.ResizeGradient: _resize,
    t.Matmul: _matmul,
    t.Conv: _conv,
    t.ConvTranspose: _conv_transpose,
    t.ConvWeightGradient: _conv_weight_gradient,
    t.Attention: _attention,
    t.AttentionGradient: _attention,
    t.Experts: _experts,
    t.ExpertsGradient: _experts,
    t.Collective: _collective,
    t.Shard: _shard,
}


# ---------------------------------------------------------------------------- what a rank runs


def local(op: Op, name: str, results: tuple[tuple[int, ...], ...], ranks: int) -> Op:
    """An op whose operands are a rank's, with the attributes that speak of shapes a rank's too: the
    axis `name` is cut, and `results` are the shapes of what a rank gets."""
    match op:
        case t.Reshape() | t.Broadcast() | t.Resize():
            return replace(op, shape=results[0])
        case t.Slice():
            rows = zip(op.starts, op.sizes, results[0], strict=True)
            starts = tuple(a if whole == own else a // ranks for a, whole, own in rows)
            return replace(op, starts=starts, sizes=results[0])
        case t.NormalizeScaleGradient() | t.PoolGradient() | t.ResizeGradient():
            return replace(op, shape=results[0])
        case t.Routine():
            pairs = zip(op.gives, results, strict=True)
            return replace(op, gives=tuple(type.with_shape(shape) for type, shape in pairs))
        case t.Conv() | t.ConvTranspose() | t.ConvWeightGradient() if name == "g":
            return replace(op, groups=op.groups // ranks)
        case t.Attention() | t.AttentionGradient() if name == "s":
            return replace(op, hidden=op.hidden // ranks)
        case t.Attention(block=(_, _)) | t.AttentionGradient(block=(_, _)):
            return replace(op, **blocks_of(op, ranks))
        case t.Collective(routed=int(routed)):
            return replace(op, routed=-(-routed // ranks))
        case _:
            return op
