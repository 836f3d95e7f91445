"""What each `t.routine` computes, in numpy: whole library routines, by name.

A row of `ROUTINES` is a function from the routine's settings and operands to its results:

    def nms(attrs: Mapping[str, Any], boxes: Array, scores: Array) -> tuple[Array, ...]

`attrs` are `op.attrs` as a dictionary. Operands come in the order of `op.args`, as numpy arrays of
exactly the operands' dtypes (narrow floats from ml_dtypes), and must not be changed. Results are a
tuple, one for each of `op.gives` and of exactly its dtype; interp checks dtypes and shapes. Where
`gives` holds an upper bound of a length that depends on the data, a result may be shorter, and the
graph says so in `assumed`. An absent optional operand is left out of `args`, so `attrs` says which
are there when it matters. Numpy only: no onnx, no scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Routine = Callable[..., tuple[Array, ...]]  # (attrs, *operands) -> results


ROUTINES: dict[str, Routine] = {}


