"""Layout ops as numpy sees them: whether one leaves every byte where it is."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuir.ir.graph import Graph, Op
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t

Strided = NDArray[Any]  # of one byte each: its strides count elements


def has_views(g: Graph) -> bool:
    """Whether a graph's slices, transposes and reshapes move nothing where strides can say them, as
    in PyTorch (its documentation, Tensor Views), whose elementwise, reducing, joining and
    scattering kernels take any strides (aten/src/ATen/TensorIterator.h)."""
    return g.framework == "pytorch"


@lru_cache(4096)
def packed(type: TensorType) -> Strided:
    """A tensor of this type, for its shape and strides alone: it must not be read."""
    order = type.order or range(type.rank)
    strides, step = [0] * type.rank, 1
    for axis in reversed(order):
        strides[axis] = step
        step *= type.shape[axis]
    return np.lib.stride_tricks.as_strided(np.empty(1, np.int8), type.shape, strides)


def viewed(x: Strided, op: Op) -> Strided | None:
    """What a layout op makes of a tensor as a view of it; None where cells have to move."""
    match op:
        case t.Reshape():
            try:
                return np.reshape(x, op.shape, copy=False)
            except ValueError:
                return None
        case t.Transpose():
            return x.transpose(op.perm)
        case t.Broadcast():
            return np.broadcast_to(x, op.shape)
        case t.Slice() if all(s > 0 for s in op.steps):
            rows = zip(op.starts, op.sizes, op.steps, strict=True)
            return x[tuple(slice(a, a + n * s, s) for a, n, s in rows)]
        case t.Parts() if op.x.type.dtype.kind == "complex":
            strides = (*(2 * s for s in x.strides), 1)
            return np.lib.stride_tricks.as_strided(x, (*x.shape, 2), strides)
        case t.Parts() if x.strides[-1] == 1 and not any(s % 2 for s in x.strides[:-1]):
            strides = tuple(s // 2 for s in x.strides[:-1])
            return np.lib.stride_tricks.as_strided(x, x.shape[:-1], strides)
        case _:
            return None


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
