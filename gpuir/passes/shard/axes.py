"""Along which axes an op can be cut over ranks, and what one of them then runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpuir.ir.graph import Op, Value
from gpuir.ops import tensor as t
from gpuir.ops.axes import Axes, parted


def axes_of(op: Op, is_zero: Callable[[Value], bool]) -> Axes | None:
    """The names of the axes that an op can be cut along; None where nothing is known of it.
    `is_zero` says whether all cells of an operand are zero."""
    axes = op.axis_names() if isinstance(op, t.TensorOp) else None
    if axes is None:
        return None
    return parted(axes, adds=axes.onto is None or is_zero(axes.onto))


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
