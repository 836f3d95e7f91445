"""Linear models and support vector machines of the domain ai.onnx.ml, as onnxruntime reads them
(core/providers/cpu/ml: linearclassifier.cc, svmclassifier.cc, svmregressor.cc, ml_common.h)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import cast
from gpuir.frontends.onnx.classic import labels, second_class, transformed
from gpuir.frontends.onnx.node import Converter, OnnxNode
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, f32, i64
from gpuir.ops import tensor as t

KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")
LEAST = 1e-7  # of a probability, and as far from one is the largest


def rows_of(n: OnnxNode, e: Emitter) -> Value:
    """The operand in f32; a vector counts as one row."""
    x = cast(e, n[0], f32)
    return e(t.Reshape(x, (1, x.type.size))) if x.type.rank == 1 else x


def matrix(n: OnnxNode, attr: str, rows: int, columns: int, of: str) -> np.ndarray:
    """The attribute as a matrix; `of` says what its rows and columns are."""
    numbers = np.asarray(n.attr(attr, ()), np.float32)
    if not rows or numbers.size != rows * columns:
        raise n.refused(
            f"the length of {attr} does not match {of}", f"{rows} x {columns}", numbers.size
        )
    return numbers.reshape(rows, columns)


def numbers(n: OnnxNode, attr: str, count: int) -> Sequence[float]:
    """The first `count` numbers of an attribute, which must be there."""
    found = n.attr(attr, ())
    if len(found) < count:
        expected, got = f"{count} or more numbers", str(len(found))
        raise n.refused(f"{attr} is too short", expected, got)
    return found[:count]


def dot(e: Emitter, x: Value, rows: np.ndarray) -> Value:
    """x times each row of a known matrix."""
    return e(t.Matmul(x, e.constant(np.ascontiguousarray(rows.T), f32, "coefficients")))


def plus(e: Emitter, x: Value, more: Sequence[float], name: str) -> Value:
    return e.map("add", x, e.constant(more, f32, name)) if len(more) else x


def chosen(e: Emitter, above: Value, names: Value) -> Value:
    """The second label where `above` [N, 1] holds, else the first."""
    places = e(t.Cast(above, i64))
    return e(t.Gather(names, e(t.Reshape(places, (places.type.size,)))))


# ---------------------------------------------------------------------------- linear models


def linear_regressor(n: OnnxNode, e: Emitter) -> Value:
    """x w + b, a column a target."""
    x, targets = rows_of(n, e), n.attr("targets", 1)
    if targets < 1 or not x.type.shape[-1]:
        raise n.refused(
            "there are no targets or no input columns",
            "at least one target and one input column",
            f"{targets} of {x.type}",
        )
    w = matrix(n, "coefficients", targets, x.type.shape[-1], "targets and columns of the input")
    y = plus(e, dot(e, x, w), n.attr("intercepts", ()), "intercepts")
    return transformed(n, e, y, n.attr("post_transform", "NONE"))


def linear_classifier(n: OnnxNode, e: Emitter) -> tuple[Value, Value]:
    """The label of the class of highest score x w + b, and the scores. Where there is one score s
    for two labels, it is the second's if above zero, and the scores are 1 - s and s."""
    x, features = rows_of(n, e), n[0].type.shape[-1]
    classes = len(n.attr("coefficients", ())) // max(features, 1)
    w = matrix(n, "coefficients", classes, features, "classes and columns of the input")
    s = plus(e, dot(e, x, w), n.attr("intercepts", ()), "intercepts")
    names, count = labels(n, e, "classlabels_ints")
    how = n.attr("post_transform", "NONE")
    if count != max(classes, 2):
        expected, found = f"{max(classes, 2)}, for {classes} rows of coefficients", str(count)
        raise n.refused("the number of labels", expected, found)
    if classes > 1:
        return e(t.Gather(names, e(t.ArgReduce("max", s, 1)))), transformed(n, e, s, how)
    return chosen(e, e.map("gt", s, 0.0), names), second_class(n, e, s, how)


# ---------------------------------------------------------------------------- support vectors


def kernel(n: OnnxNode, e: Emitter, x: Value, vectors: np.ndarray) -> Value:
    """How alike each row of x and each vector are: x.v; (gamma x.v + c) ** degree;
    exp(-gamma |x - v|^2); tanh(gamma x.v + c)."""
    kind = n.choice("kernel_type", "LINEAR", KERNELS)
    if kind == "LINEAR":
        return dot(e, x, vectors)
    gamma, c, degree = numbers(n, "kernel_params", 3)
    if kind == "RBF":
        rows, columns = x.type.shape
        apart = (
            e(t.Reshape(x, (rows, 1, columns))),
            e.constant(vectors[None], f32, "support_vectors"),
        )
        d = e.map("sub", *apart)
        squared = e(t.Reduce("sum", e.map("mul", d, d), (2,)))
        return e.map("exp", e.map("mul", squared, -gamma))
    y = e.map("add", e.map("mul", dot(e, x, vectors), gamma), c)
    return e(t.Map("tanh", (y,)) if kind == "SIGMOID" else t.Map("pow", (y,), (degree,)))


def svm_regressor(n: OnnxNode, e: Emitter) -> Value:
    """The kernels of x and the support vectors, weighed and summed, plus rho; the sign of it for
    `one_class`. Without support vectors the coefficients are those of x itself."""
    x, count = rows_of(n, e), n.attr("n_supports", 0)
    features = x.type.shape[-1]
    if count > 0:
        vectors = matrix(n, "support_vectors", count, features, "support vectors and columns")
        x, features = kernel(n, e, x, vectors), count
    y = dot(e, x, matrix(n, "coefficients", 1, features, "what they weigh"))
    y = plus(e, y, numbers(n, "rho", 1), "rho")
    if (how := n.attr("post_transform", "NONE")) != "NONE":
        e.assume(f"{n.name}: post_transform={how} is left out, as onnxruntime does")
    if not n.attr("one_class", 0):
        return y
    above, one = e.map("gt", y, 0.0), e.constant(1, f32)
    return e.map("where", above, one, e.constant(-1, f32))


def svm_classifier(n: OnnxNode, e: Emitter) -> tuple[Value, Value]:
    """The label and the scores: of each pair of classes, a sum of kernels decides for one. The
    class of most votes is the label. Scores are those sums (of two classes -s and s), or, with
    prob_a and prob_b, a probability for each class. Without support vectors the scores are
    x w + rho, one for each class."""
    x, how = rows_of(n, e), n.attr("post_transform", "NONE")
    names, classes = labels(n, e, "classlabels_ints")
    of_class = n.attr("vectors_per_class", ())
    a, b = n.attr("prob_a", ()), n.attr("prob_b", ())
    if not sum(of_class):
        w = matrix(n, "coefficients", classes, x.type.shape[-1], "classes and columns of the input")
        s = plus(e, dot(e, x, w), numbers(n, "rho", 1), "rho")
        best = e(t.ArgReduce("max", s, 1))
        if classes == 2 and not len(a):  # above the threshold it is the second, even if it is less
            top = e(t.Reduce("max", s, (1,)))
            above = t.Map("ge", (top,), (0.5,)) if (w >= 0).all() else t.Map("gt", (top,), (0.0,))
            best = e.map("where", e(above), e.constant(1, i64), best)
        return e(t.Gather(names, best)), transformed(n, e, s, how)
    if len(of_class) != classes or classes < 2:
        expected, found = f"{classes}: one for each of two or more labels", str(len(of_class))
        raise n.refused("the length of vectors_per_class", expected, found)
    count = sum(of_class)
    vectors = matrix(n, "support_vectors", count, x.type.shape[-1], "support vectors and columns")
    given = matrix(n, "coefficients", classes - 1, count, "classes - 1 and support vectors")
    pairs, weights = duels(given, of_class)
    s = dot(e, kernel(n, e, x, vectors), weights)
    s = plus(e, s, numbers(n, "rho", len(pairs)), "rho")
    won = e(t.Cast(e.map("gt", s, 0.0), f32))
    lost = np.array([[c == j for _, j in pairs] for c in range(classes)], np.float32)
    gains = np.array([[c == i for i, _ in pairs] for c in range(classes)], np.float32) - lost
    votes = plus(e, dot(e, won, gains), tuple(lost.sum(1)), "votes")
    label = e(t.Gather(names, e(t.ArgReduce("max", votes, 1))))
    if len(a) or len(b):
        return label, transformed(n, e, probabilities(n, e, s, classes), how)
    if classes > 2:
        return label, transformed(n, e, s, how)
    return label, second_class(n, e, s, how, negative=how == "NONE")


def duels(given: np.ndarray, of_class: Sequence[int]) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The pairs of classes, and how much each support vector weighs in each pair. Row j - 1 of what
    is given holds class i's against j, and row i holds class j's against i, for i < j."""
    starts = np.cumsum((0, *of_class))
    pairs = list(combinations(range(len(of_class)), 2))
    weights = np.zeros((len(pairs), given.shape[1]), np.float32)
    for row, (i, j) in zip(weights, pairs, strict=True):
        for own, other in ((i, j - 1), (j, i)):
            part = slice(starts[own], starts[own + 1])
            row[part] = given[other, part]
    return pairs, weights


def probabilities(n: OnnxNode, e: Emitter, s: Value, classes: int) -> Value:
    """A probability for each class, from one for each pair: 1 / (1 + exp(a s + b)), coupled."""
    a, b = (
        e.constant(numbers(n, name, s.type.shape[1]), f32, name) for name in ("prob_a", "prob_b")
    )
    fitted = e.map("add", e.map("mul", s, a), b)
    p = e.map("sigmoid", e.map("neg", fitted))
    p = e.map("clip", p, LEAST, 1 - LEAST)
    rows = p.type.shape[0]
    gives = (TensorType((rows, classes), f32),)
    attrs, rounds = (("classes", classes),), 10  # assumed: most rows need few, none more than 100
    return e(t.Routine("coupled", (p,), gives, attrs, work=rows * rounds * classes**2))


CONVERTERS: dict[str, Converter] = {
    "ai.onnx.ml::LinearClassifier": linear_classifier,
    "ai.onnx.ml::LinearRegressor": linear_regressor,
    "ai.onnx.ml::SVMClassifier": svm_classifier,
    "ai.onnx.ml::SVMRegressor": svm_regressor,
}
