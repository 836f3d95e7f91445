"""ai.onnx.ml on numbers, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import calls
from onnx import helper
from onnx_models import F32, I64, agrees, expected, info, loaded, one_node, results

from gpuir.frontends.onnx.load import load
from gpuir.ir.errors import ModelError

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
    *(
        ("TreeEnsembleRegressor", FULL, REGRESSOR | {"post_transform": how})
        for how in ("LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")
    ),
]


def made(op: str, x: np.ndarray[Any, Any], attrs: dict[str, Any], *outputs: Any) -> Any:
    return one_node(op, [x], attrs, domain="ai.onnx.ml", outputs=outputs)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0])
def test_as_onnxruntime(case: Any) -> None:
    op, x, attrs = case
    agrees(*made(op, x, attrs, info("y", None, I64 if "values_int64s" in attrs else F32)))


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
        *(
            classifier([0, 0, 0, 0], weights, 2) | {"post_transform": how}
            for weights in ([0.9, 0.1, 0.3, 0.05], [0.9, -0.1, -0.3, 0.05])
            for how in ("LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")
        ),
        classifier([1, 1, 1, 1], [0.9, 0.1, 0.3, 0.05], 2),
        classifier([1, 1, 1, 1], [0.9, -0.1, -0.3, 0.05], 2),
        classifier([1, 1, 1, 1], [0.9, -0.1, -0.3, 0.05], 2) | {"post_transform": "LOGISTIC"},
    ],
)
def test_classifier_as_onnxruntime(attrs: dict[str, Any]) -> None:
    outputs = info("l", None, I64), info("y", None, F32)
    agrees(*made("TreeEnsembleClassifier", FULL, attrs, *outputs))


def test_dictionaries_of_scores_are_the_scores() -> None:
    """As scikit-learn's converters write classifiers; and what onnxruntime gives is the same."""
    attrs = classifier([0, 1, 2, 1], [1.0, 2.0, 3.0, 0.5], 3)
    outputs = info("l", None, I64), info("y", None, F32)
    proto, feeds = made("TreeEnsembleClassifier", FULL, attrs, *outputs)
    plain = results(loaded(proto), **feeds)["y"]
    labels = attrs["classlabels_int64s"]
    node = helper.make_node(
        "ZipMap", ["y"], ["z"], "zip", "", "ai.onnx.ml", classlabels_int64s=labels
    )
    proto.graph.node.append(node)
    kind = helper.make_map_type_proto(I64, helper.make_tensor_type_proto(F32, ()))
    proto.graph.output[1].CopyFrom(
        helper.make_value_info("z", helper.make_sequence_type_proto(kind))
    )
    m = loaded(proto)
    np.testing.assert_array_equal(results(m, **feeds)["z"], plain)
    assert any("dictionaries" in text for text in m.graph.assumed)
    rows = expected(proto, feeds)[1]
    np.testing.assert_allclose([[row[k] for k in labels] for row in rows], plain, rtol=1e-6)


def test_a_forest_is_read_by_the_table_not_by_the_node() -> None:
    """Of each node, one text is read: two calls."""

    def forest(trees: int) -> bytes:
        sizes = {k: len(v) for k, v in REGRESSOR.items() if isinstance(v, list)}
        many = {k: v * trees if k in sizes else v for k, v in REGRESSOR.items()}
        for key in ("nodes_treeids", "target_treeids"):
            each = REGRESSOR[key]
            many[key] = [2 * i + tree for i in range(trees) for tree in each]
        proto, _ = made("TreeEnsembleRegressor", FULL, many, info("y", None, F32))
        return proto.SerializeToString()

    few, many = forest(50), forest(500)
    load(few)
    nodes = 450 * len(REGRESSOR["nodes_treeids"])
    assert calls(lambda: load(many)) - calls(lambda: load(few)) < 3 * nodes


def test_text_is_refused() -> None:
    attrs = {"keys_int64s": [1], "values_strings": ["one"]}
    proto, _ = made("LabelEncoder", np.int64([1]), attrs, info("y", None, I64))
    with pytest.raises(ModelError, match="the values are not numbers"):
        load(proto)
