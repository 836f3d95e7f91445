"""Layout ops by the strides of what they read: whether one leaves every cell where it is."""

from __future__ import annotations

from collections.abc import Iterable

from gpuir.ir import strides
from gpuir.ir.graph import Op
from gpuir.ir.strides import Strided
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t


def packed(type: TensorType) -> Strided:
    """How a tensor of this type lies in memory."""
    return strides.packed(type.shape, type.order)


def viewed(x: Strided, op: Op) -> Strided | None:
    """What an op makes of a tensor as a view of it; None where cells have to move."""
    return op.view(x) if isinstance(op, t.Layout) else None


def apart(x: Strided, ops: Iterable[Op]) -> int:
    """How many cells lie, in memory, between neighbours in the result of layout ops on `x`: along
    its innermost axis, or along that of what a reshape has to move."""
    for op in ops:
        view = viewed(x, op)
        if view is None:
            break
        x = view
    steps = [abs(s) for n, s in zip(x.shape, x.strides, strict=True) if n != 1]
    return max(steps[-1], 1) if steps else 1
