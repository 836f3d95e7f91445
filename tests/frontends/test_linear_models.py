"""Linear models and support vector machines of ai.onnx.ml, against onnxruntime."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from onnx_models import F32, I64, agrees, info, loaded, one_node, results

from gpuir.frontends.onnx.load import load
from gpuir.ir.errors import ModelError
from gpuir.ops import tensor as t

rng = np.random.default_rng(8)
FEATURES = 5
X = rng.normal(size=(7, FEATURES)).astype(np.float32)
TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT")
KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")
LABELS = info("l", None, I64), info("y", None, F32)


def numbers(count: int, least: float = -1.0) -> list[float]:
    return rng.uniform(least, 1, count).astype(np.float32).tolist()


def made(op: str, x: Any, attrs: dict[str, Any], *outputs: Any) -> Any:
    return one_node(op, [x], attrs, domain="ai.onnx.ml", outputs=outputs or (info("y", None, F32),))


def check(op: str, attrs: dict[str, Any], *outputs: Any, x: Any = X) -> Any:
    with np.errstate(all="ignore"):
        return agrees(*made(op, x, attrs, *outputs), rtol=2e-4, atol=2e-5)


# ---------------------------------------------------------------------------- linear


@pytest.mark.parametrize(("targets", "how"), list(product((1, 3), TRANSFORMS)))
def test_linear_regressor(targets: int, how: str):
    attrs = {"targets": targets, "coefficients": numbers(targets * FEATURES)}
    check("LinearRegressor", attrs | {"intercepts": numbers(targets), "post_transform": how})


@pytest.mark.parametrize(("classes", "how"), list(product((1, 2, 4), TRANSFORMS)))
def test_linear_classifier(classes: int, how: str):
    if classes == 1 and how == "PROBIT":
        return  # refused: see below
    attrs = {
        "coefficients": numbers(classes * FEATURES),
        "intercepts": numbers(classes),
        "classlabels_ints": [*range(3, 3 + max(classes, 2))],
        "post_transform": how,
    }
    check("LinearClassifier", attrs, *LABELS)
    check("LinearClassifier", attrs | {"multi_class": 1}, *LABELS)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.int64])
def test_numbers_of_other_types(dtype: Any):
    attrs = {
        "coefficients": numbers(3 * FEATURES),
        "intercepts": numbers(3),
        "classlabels_ints": [0, 1, 2],
    }
    check("LinearClassifier", attrs, *LABELS, x=(X * 4).astype(dtype))
    check("LinearClassifier", attrs, *LABELS, x=(X[0] * 4).astype(dtype))


# ---------------------------------------------------------------------------- support vectors


def machine(kernel: str, classes: int, **more: Any) -> dict[str, Any]:
    sizes = [2, 3, 1, 4][:classes]
    pairs = classes * (classes - 1) // 2
    return {
        "kernel_type": kernel,
        "kernel_params": [0.4, 0.3, 3.0],
        "support_vectors": numbers(sum(sizes) * FEATURES),
        "vectors_per_class": sizes,
        "coefficients": numbers((classes - 1) * sum(sizes)),
        "rho": numbers(pairs),
        "classlabels_ints": [*range(5, 5 + classes)],
        **more,
    }


def fitted(classes: int) -> dict[str, Any]:
    pairs = classes * (classes - 1) // 2
    return {"prob_a": numbers(pairs), "prob_b": numbers(pairs)}


@pytest.mark.parametrize(
    ("kernel", "classes", "fits"), list(product(KERNELS, (2, 3, 4), (False, True)))
)
def test_svm_classifier(kernel: str, classes: int, fits: bool):
    check("SVMClassifier", machine(kernel, classes, **(fitted(classes) if fits else {})), *LABELS)


@pytest.mark.parametrize(
    ("how", "classes", "fits"), list(product(TRANSFORMS[1:], (2, 4), (False, True)))
)
def test_transforms_of_what_an_svm_finds(how: str, classes: int, fits: bool):
    if how == "PROBIT" and classes == 2 and not fits:
        return  # refused: see below
    more = fitted(classes) if fits else {}
    check("SVMClassifier", machine("RBF", classes, post_transform=how, **more), *LABELS)


@pytest.mark.parametrize(("classes", "least"), list(product((2, 3), (-1.0, 0.0))))
def test_svm_classifier_without_support_vectors(classes: int, least: float):
    attrs = {
        "coefficients": numbers(classes * FEATURES, least),
        "kernel_params": [0.0, 0.0, 0.0],
        "rho": [0.2],
        "classlabels_ints": [*range(classes)],
    }
    check("SVMClassifier", attrs, *LABELS)
    check("SVMClassifier", attrs, *LABELS, x=np.abs(X))
    check("SVMClassifier", attrs, *LABELS, x=-np.abs(X))


@pytest.mark.parametrize(("kernel", "one"), list(product(KERNELS, (0, 1))))
def test_svm_regressor(kernel: str, one: int):
    attrs = {
        "kernel_type": kernel,
        "kernel_params": [0.4, 0.3, 2.0],
        "support_vectors": numbers(6 * FEATURES),
        "n_supports": 6,
        "coefficients": numbers(6),
        "rho": [0.1],
        "one_class": one,
    }
    check("SVMRegressor", attrs)
    check("SVMRegressor", attrs, x=X[0])


def test_svm_regressor_without_support_vectors():
    attrs = {"coefficients": numbers(FEATURES), "kernel_params": [0.0] * 3, "rho": [0.3]}
    check("SVMRegressor", attrs | {"n_supports": 0})


def test_what_it_costs_is_the_kernels():
    """A product of 7 x 5 by 5 x 10, one of 7 x 10 by 10 x 6, and votes of 7 x 6 by 6 x 4."""
    m = loaded(made("SVMClassifier", X, machine("POLY", 4), *LABELS)[0])
    products = [n.op for n in m.graph.nodes if isinstance(n.op, t.Matmul)]
    assert [op.flops() for op in products] == [2 * 7 * 5 * 10, 2 * 7 * 10 * 6, 2 * 7 * 6 * 4]


# ---------------------------------------------------------------------------- refused


def refused(op: str, attrs: dict[str, Any], *outputs: Any) -> str:
    with pytest.raises(ModelError) as error:
        load(made(op, X, attrs, *outputs)[0])
    return str(error.value)


def test_attributes_that_do_not_fit_are_named():
    good = machine("RBF", 3)
    assert "kernel_type" in refused("SVMClassifier", good | {"kernel_type": "COSINE"}, *LABELS)
    assert "kernel_params is too short" in refused(
        "SVMClassifier", good | {"kernel_params": [0.1]}, *LABELS
    )
    assert "coefficients" in refused("SVMClassifier", good | {"coefficients": [1.0]}, *LABELS)
    assert "support_vectors" in refused("SVMClassifier", good | {"support_vectors": [1.0]}, *LABELS)
    assert "rho is too short" in refused("SVMClassifier", good | {"rho": [1.0]}, *LABELS)
    assert "prob_b is too short" in refused("SVMClassifier", good | {"prob_a": [1.0] * 3}, *LABELS)
    assert "vectors_per_class" in refused(
        "SVMClassifier", good | {"vectors_per_class": [10]}, *LABELS
    )
    assert "post_transform" in refused("SVMClassifier", good | {"post_transform": "LOG"}, *LABELS)
    probit = machine("RBF", 2, post_transform="PROBIT")
    assert "PROBIT is not supported" in refused("SVMClassifier", probit, *LABELS)
    linear = {"coefficients": numbers(3 * FEATURES), "classlabels_ints": [0, 1]}
    assert "the number of labels" in refused("LinearClassifier", linear, *LABELS)


def test_labels_that_are_text_are_numbered():
    attrs = machine("RBF", 3)
    m = loaded(made("SVMClassifier", X, attrs, *LABELS)[0])
    plain = results(m, x0=X)["l"]
    attrs = {k: v for k, v in attrs.items() if k != "classlabels_ints"}
    named = made("SVMClassifier", X, attrs | {"classlabels_strings": ["a", "b", "c"]}, *LABELS)[0]
    m = loaded(named)
    np.testing.assert_array_equal(results(m, x0=X)["l"], plain - 5)
    assert any("the labels are text" in text for text in m.graph.assumed)
