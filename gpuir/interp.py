"""What every op means, in numpy: for folding constants and for tests. Slow and plain on purpose."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpuir.ir.graph import Graph, Op, Value
from gpuir.ir.types import DType, TensorType


def to_numpy_dtype(dtype: DType) -> np.dtype:
    """The numpy dtype that holds `dtype`; narrow floats and integers come from ml_dtypes."""
    raise NotImplementedError


def to_type(array: np.ndarray) -> TensorType:
    """The row-major type of an array."""
    raise NotImplementedError


def evaluate(op: Op, values: Mapping[Value, np.ndarray]) -> tuple[np.ndarray, ...]:
    """The results of one op, given the arrays of its operands."""
    raise NotImplementedError


def run(graph: Graph, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The graph's outputs by name, given its inputs and params by name."""
    raise NotImplementedError
