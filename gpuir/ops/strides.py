"""Layout ops as numpy sees them: whether one leaves every byte where it is."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuir.ir.graph import Op
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t

Strided = NDArray[Any]  # of one byte each: its strides count elements


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
