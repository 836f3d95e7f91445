"""Operators whose meaning changed between opsets, at the old ones, against onnxruntime.

The node tests of onnx (tests/test_conformance.py) are mostly at the newest opset of each operator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from onnx_models import Array, agrees, one_node

draw = np.random.default_rng(7)


def floats(*shape: int) -> Array:
    return draw.standard_normal(shape).astype(np.float32)


X = floats(2, 6, 4, 5)
POSITIVE = np.abs(floats(6)) + 0.5

# (opset, operator, operands: arrays are inputs, (array,) are initializers, attributes)
CASES: list[tuple[int, str, tuple[Any, ...], dict[str, Any]]] = [
    *((opset, "Clip", (X,), {"min": -0.5, "max": 0.5}) for opset in (7, 10)),
    (7, "Clip", (X,), {"max": 0.5}),
    (7, "Clip", (X,), {}),
    (11, "Clip", (X, (np.float32(-0.5),)), {}),
    (12, "Clip", (X, None, np.float32(0.5)), {}),
    (13, "Clip", (X, np.float32(-0.5), np.float32(0.5)), {}),
    *((11, op, (X,), {"axis": axis}) for op in ("Softmax", "LogSoftmax") for axis in (0, 1, -1)),
    *((opset, "Softmax", (X,), {}) for opset in (7, 11, 13)),
    *((opset, "Hardmax", (X,), {}) for opset in (7, 11, 13)),
    (11, "Hardmax", (floats(3, 4),), {"axis": 0}),
    *((7, "Flatten", (X,), {"axis": axis}) for axis in (0, 1, 3, 4)),
    (11, "Flatten", (X,), {"axis": -2}),
    (7, "Squeeze", (floats(1, 3, 1),), {"axes": [0]}),
    (11, "Squeeze", (floats(1, 3, 1),), {"axes": [-1]}),
    (7, "Squeeze", (floats(1, 3, 1),), {}),
    (13, "Squeeze", (floats(1, 3, 1), (np.int64([2]),)), {}),
    (7, "Unsqueeze", (floats(3, 2),), {"axes": [0, 3]}),
    (11, "Unsqueeze", (floats(3, 2),), {"axes": [-1, 0]}),
    (13, "Unsqueeze", (floats(3, 2), (np.int64([1]),)), {}),
    (7, "Slice", (X,), {"axes": [0, 2], "starts": [0, 1], "ends": [1, 2**31 - 1]}),
    (7, "Slice", (X,), {"starts": [0, -3], "ends": [2, -1]}),
    (10, "Slice", (X, (np.int64([5]),), (np.int64([-(2**63)]),), (np.int64([1]),),
                   (np.int64([-2]),)), {}),
    (13, "Slice", (X, (np.int32([-1]),), (np.int32([-100]),), (np.int32([-1]),),
                   (np.int32([-1]),)), {}),
    (7, "Pad", (X,), {"pads": [0, 0, 1, 2, 0, 0, 3, 0], "value": 1.5}),
    (7, "Pad", (X,), {"pads": [0, 0, 1, 2, 0, 0, 3, 0], "mode": "reflect"}),
    (7, "Pad", (X,), {"pads": [0, 0, -1, 2, 0, 0, 0, -1], "mode": "edge"}),
    (11, "Pad", (X, (np.int64([0, 0, 1, 0, 0, 0, 0, -1]),), np.float32(2)), {}),
    (18, "Pad", (X, (np.int64([1, 2]),), None, (np.int64([-1]),)), {"mode": "edge"}),
    (19, "Pad", (X, (np.int64([0, 0, 1, 2, 0, 0, 1, 1]),)), {"mode": "wrap"}),
    (7, "Split", (X,), {"axis": 1, "split": [1, 5]}),
    (7, "Split", (X,), {"axis": 1}),
    (13, "Split", (X, (np.int64([4, 2]),)), {"axis": 1}),
    (18, "Split", (floats(7, 2),), {"num_outputs": 2}),
    (7, "TopK", (X,), {"k": 3, "axis": 1}),
    (10, "TopK", (X, (np.int64([2]),)), {}),
    (11, "TopK", (X, (np.int64([2]),)), {"largest": 0, "axis": 2}),
    *((opset, "Dropout", (X,), {"ratio": 0.3}) for opset in (7, 10)),
    (12, "Dropout", (X, (np.float32(0.3),)), {}),
    (13, "Dropout", (X, (np.float32(0.3),), (np.bool_(False),)), {}),
    *(
        (opset, "BatchNormalization", (X, floats(6), floats(6), floats(6), POSITIVE), {})
        for opset in (7, 9, 14, 15)
    ),
    (9, "BatchNormalization", (X, *((v,) for v in (floats(6), floats(6), floats(6), POSITIVE))),
     {"epsilon": 1e-3}),
    *((opset, op, (X,), {"axes": [1, -1], "keepdims": 0}) for opset in (11, 12)
      for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2", "ReduceLogSumExp")),
    (13, "ReduceSum", (X, (np.int64([1]),)), {}),
    (13, "ReduceSum", (X, (np.int64([]),)), {"noop_with_empty_axes": 1}),
    (13, "ReduceMean", (X,), {"axes": [0]}),
    (18, "ReduceMean", (X, (np.int64([-1]),)), {"keepdims": 0}),
    (7, "ReduceProd", (X,), {}),
    (7, "ArgMax", (X,), {"axis": 1}),
    (12, "ArgMin", (np.float32([[1, 0, 0]]),), {"axis": 1, "select_last_index": 1}),
    (9, "Scatter", (floats(3, 3), (np.int64([[1, 0, 2]]),), floats(1, 3)), {"axis": 0}),
    (11, "ScatterElements", (floats(3, 3), np.int64([[1, -1, 2]]), floats(1, 3)), {"axis": 0}),
    (11, "ScatterND", (floats(3, 3), np.int64([[1], [0]]), floats(2, 3)), {}),
    (11, "GatherND", (floats(3, 3), np.int64([[1], [0]])), {}),
    (7, "Gather", (X, np.int64([[0, 2]])), {"axis": 2}),
    (7, "Upsample", (floats(1, 1, 2, 2),), {"scales": [1.0, 1.0, 2.0, 2.0]}),
    (9, "OneHot", (np.int64([[1, -1, 9]]), (np.int64([4]),), np.float32([2, 5])), {"axis": 1}),
    (9, "ConstantOfShape", ((np.int64([2, 3]),),), {}),
    (9, "EyeLike", (floats(3, 4),), {"k": 1, "dtype": TensorProto.INT32}),
    (9, "Shrink", (X,), {"lambd": 0.4, "bias": 0.2}),
    (10, "Mod", (np.int32([-7, 7, 5]), np.int32([3, -3, 5])), {}),
    (10, "Mod", (floats(5), floats(5)), {"fmod": 1}),
    (7, "Pow", (np.abs(X), (np.float32(2),)), {}),
    (12, "Pow", (np.int32([2, 3]), np.float32([0.5, 3])), {}),
    (12, "Pow", (np.float32([2, 3]), np.int64([2, 3])), {}),
    (7, "Div", (np.int32([-7, 7]), np.int32([2, -2])), {}),
    (8, "Max", (X, floats(5), floats(4, 1)), {}),
    (8, "Mean", (X, floats(5), floats(4, 1)), {}),
    (7, "Sum", (X, X, X), {}),
    (7, "PRelu", (X, floats(6, 1, 1)), {}),
    (12, "Celu", (X,), {"alpha": 0.7}),
    (7, "Selu", (X,), {}),
    (7, "HardSigmoid", (X,), {}),
    (14, "HardSwish", (X,), {}),
    (7, "Softsign", (X,), {}),
    (10, "ThresholdedRelu", (X,), {"alpha": 0.3}),
    (10, "IsInf", (np.float32([1, np.inf, -np.inf]),), {"detect_negative": 0}),
    (9, "Cast", (X,), {"to": TensorProto.INT32}),
    (11, "CumSum", (X, (np.int64(-1),)), {"exclusive": 1, "reverse": 1}),
    (7, "LRN", (X,), {"size": 3, "alpha": 0.1}),
    (7, "InstanceNormalization", (X, floats(6), floats(6)), {}),
    (9, "MeanVarianceNormalization", (X,), {}),
    (7, "LpNormalization", (X,), {"axis": 1, "p": 1}),
    (17, "LayerNormalization", (X, floats(4, 5), floats(4, 5)), {"axis": 2}),
    (8, "Expand", (floats(3, 1), (np.int64([2, 1, 4]),)), {}),
    (7, "Tile", (floats(3, 1), (np.int64([2, 4]),)), {}),
    (7, "DepthToSpace", (floats(1, 8, 2, 3),), {"blocksize": 2}),
    (11, "DepthToSpace", (floats(1, 8, 2, 3),), {"blocksize": 2, "mode": "CRD"}),
    (7, "SpaceToDepth", (floats(1, 2, 4, 6),), {"blocksize": 2}),
    (10, "ReverseSequence", (floats(4, 3), np.int64([4, 2, 1])), {"time_axis": 0}),
    (9, "NonZero", (np.float32([[1, 0], [2, 3]]),), {}),
    (9, "Compress", (X, np.bool_([0, 1, 1])), {"axis": 1}),
    (11, "Unique", (np.float32([2, 1, 2, 3]),), {"sorted": 0}),
    (11, "Range", tuple((np.float32(v),) for v in (1, 4, 0.7)), {}),
    (7, "Reshape", (X, (np.int64([0, -1, 5]),)), {}),
    (12, "NegativeLogLikelihoodLoss", (floats(3, 4), np.int64([0, 3, 1]), POSITIVE[:4]),
     {"ignore_index": 3}),
    (12, "SoftmaxCrossEntropyLoss", (floats(3, 4), np.int64([0, 3, 1])), {"reduction": "sum"}),
]  # fmt: skip

OUTPUTS = {"Split": 2, "TopK": 2, "Unique": 4}


ASKED = {"Compress": ("x1",)}  # inputs whose values the result's shape depends on


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[1]}-{c[0]}")
def test_as_onnxruntime(case: Any) -> None:
    opset, op, operands, attrs = case
    outputs = [f"y{i}" for i in range(OUTPUTS.get(op, 1))]
    proto, feeds = one_node(op, operands, attrs, opset=opset, outputs=outputs)
    agrees(proto, feeds, values={name: feeds[name] for name in ASKED.get(op, ())})
