"""ai.onnx.ml on numbers, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuir.interp import run
from gpuir.ir.errors import ModelError
from gpuir.ir.verify import verify

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402

from gpuir.frontends.onnx.load import load  # noqa: E402

X = np.float32([[1, -2, 3], [0, 0, 0], [np.nan, 5, -6]])
FULL = np.nan_to_num(X)

REGRESSOR = {  # x0 <= 0.5 ? leaf 1 : (x1 < 1 ? leaf 3 : leaf 4); and a second tree of one leaf
    "n_targets": 2,
    "nodes_treeids": [0, 0, 0, 0, 0, 1],
    "nodes_nodeids": [0, 1, 2, 3, 4, 0],
    "nodes_featureids": [0, 0, 1, 0, 0, 0],
    "nodes_modes": ["BRANCH_LEQ", "LEAF", "BRANCH_LT", "LEAF", "LEAF", "LEAF"],
    "nodes_values": [0.5, 0.0, 1.0, 0.0, 0.0, 0.0],
    "nodes_truenodeids": [1, 0, 3, 0, 0, 0],
    "nodes_falsenodeids": [2, 0, 4, 0, 0, 0],
    "target_treeids": [0, 0, 0, 0, 1, 1],
    "target_nodeids": [1, 1, 3, 4, 0, 0],
    "target_ids": [0, 1, 0, 1, 0, 1],
    "target_weights": [1.0, 2.0, 3.0, 4.0, 10.0, 20.0],
}

CASES: list[tuple[str, np.ndarray[Any, Any], dict[str, Any]]] = [
    ("Binarizer", FULL, {"threshold": 0.5}),
    ("FeatureVectorizer", FULL, {"inputdimensions": [3]}),
    ("Imputer", X, {"imputed_value_floats": [1.0, 2.0, 3.0]}),
    (
        "Imputer",
        X,
        {"imputed_value_floats": [1.0, 2.0, 3.0], "replaced_value_float": float("nan")},
    ),
    ("Imputer", FULL, {"imputed_value_floats": [7.0], "replaced_value_float": 0.0}),
    (
        "LabelEncoder",
        np.int64([1, 2, 3]),
        {"keys_int64s": [1, 3], "values_floats": [0.5, 0.25], "default_float": 9.0},
    ),
    (
        "LabelEncoder",
        np.float32([1, 2, 0.5]),
        {"keys_floats": [1.0, 0.5], "values_int64s": [4, 5]},
    ),
    (
        "LinearRegressor",
        FULL,
        {"targets": 2, "coefficients": [1.0, 2, 3, 4, 5, 6], "intercepts": [1.0, -1]},
    ),
    (
        "LinearRegressor",
        FULL,
        {"targets": 2, "coefficients": [0.1] * 6, "post_transform": "SOFTMAX"},
    ),
    *(("Normalizer", FULL, {"norm": norm}) for norm in ("MAX", "L1", "L2")),
    ("OneHotEncoder", np.int64([[3, 1], [2, 7]]), {"cats_int64s": [1, 2, 3]}),
    ("Scaler", FULL, {"offset": [1.0, 0, 2], "scale": [2.0, 1, 0.5]}),
    *(
        ("TreeEnsembleRegressor", FULL, REGRESSOR | {"aggregate_function": how})
        for how in ("SUM", "AVERAGE", "MIN", "MAX")
    ),
    ("TreeEnsembleRegressor", FULL, REGRESSOR | {"base_values": [100.0, 200.0]}),
]


def model(op: str, x: np.ndarray[Any, Any], attrs: dict[str, Any], output: int) -> Any:
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], ["y"], domain="ai.onnx.ml", **attrs)],
        "one",
        [helper.make_tensor_value_info("x", kind, x.shape)],
        [helper.make_tensor_value_info("y", output, None)],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
def test_as_onnxruntime(case: Any) -> None:
    op, x, attrs = case
    integers = "values_int64s" in attrs
    proto = model(op, x, attrs, TensorProto.INT64 if integers else TensorProto.FLOAT)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    loaded = load(proto)
    verify(loaded.graph)
    weights = {v.name: loaded.weights[v.name] for v in loaded.graph.params}
    (found,) = run(loaded.graph, {"x": x} | weights).values()
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def classifier(ids: list[int], weights: list[float], labels: int) -> dict[str, Any]:
    nodes = {k: v for k, v in REGRESSOR.items() if k.startswith("nodes_")}
    where = {"class_treeids": [0, 0, 0, 1], "class_nodeids": [1, 3, 4, 0]}
    named = {
        "class_ids": ids,
        "class_weights": weights,
        "classlabels_int64s": [*range(7, 7 + labels)],
    }
    return nodes | where | named


@pytest.mark.parametrize(
    "attrs",
    [
        classifier([0, 1, 2, 1], [1.0, 2.0, 3.0, 0.5], 3),
        classifier([0, 1, 2, 1], [1.0, 2.0, 3.0, 0.5], 3) | {"post_transform": "SOFTMAX"},
        classifier([0, 0, 0, 0], [0.9, 0.1, 0.3, 0.05], 2),
        classifier([0, 0, 0, 0], [0.9, -0.1, -0.3, 0.05], 2),
        classifier([0, 0, 0, 0], [0.9, -0.1, -0.3, 0.05], 2) | {"post_transform": "LOGISTIC"},
        classifier([1, 1, 1, 1], [0.9, 0.1, 0.3, 0.05], 2),
        classifier([1, 1, 1, 1], [0.9, -0.1, -0.3, 0.05], 2),
        classifier([1, 1, 1, 1], [0.9, -0.1, -0.3, 0.05], 2) | {"post_transform": "LOGISTIC"},
    ],
)
def test_classifier_as_onnxruntime(attrs: dict[str, Any]) -> None:
    graph = helper.make_graph(
        [
            helper.make_node(
                "TreeEnsembleClassifier", ["x"], ["l", "y"], domain="ai.onnx.ml", **attrs
            )
        ],
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, FULL.shape)],
        [
            helper.make_tensor_value_info("l", TensorProto.INT64, None),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
        ],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=8)
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    labels, scores = session.run(None, {"x": FULL})
    loaded = load(proto)
    weights = {v.name: loaded.weights[v.name] for v in loaded.graph.params}
    found = run(loaded.graph, {"x": FULL} | weights)
    np.testing.assert_array_equal(found["l"], labels)
    np.testing.assert_allclose(found["y"], scores, rtol=1e-5)


def test_text_is_refused() -> None:
    attrs = {"keys_int64s": [1], "values_strings": ["one"]}
    proto = model("LabelEncoder", np.int64([1]), attrs, TensorProto.INT64)
    with pytest.raises(ModelError, match="the values are not numbers"):
        load(proto)
