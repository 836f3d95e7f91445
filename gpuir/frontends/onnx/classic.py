"""Classical machine learning on numbers: the domain ai.onnx.ml."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import cast
from gpuir.frontends.onnx.node import Converter, OnnxNode
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, f32, i64
from gpuir.ops import tensor as t

TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


def array_feature_extractor(n: OnnxNode, e: Emitter) -> Value:
    """Columns of the last axis; a vector counts as one row."""
    x, columns = n[0], n[1]
    if x.type.rank == 1:
        x = e(t.Reshape(x, (1, x.type.size)))
    if columns.type.rank != 1:
        columns = e(t.Reshape(columns, (columns.type.size,)))
    return e(t.Gather(x, columns, x.type.rank - 1))


def binarizer(n: OnnxNode, e: Emitter) -> Value:
    above = e.map("gt", n[0], n.attr("threshold", 0.0))
    return e(t.Cast(above, n[0].type.dtype))


def feature_vectorizer(n: OnnxNode, e: Emitter) -> Value:
    """The operands' columns side by side, in f32; a vector counts as one row."""
    parts: list[Value] = []
    for i in range(len(n.inputs)):
        x = cast(e, n[i], f32)
        parts.append(x if x.type.rank == 2 else e(t.Reshape(x, (1, x.type.size))))
    return parts[0] if len(parts) == 1 else e(t.Concat(tuple(parts), 1))


def imputer(n: OnnxNode, e: Emitter) -> Value:
    """Cells that equal the replaced value take the imputed one of their column."""
    x = n[0]
    kind = "float" if x.type.dtype.is_float else "int64"
    imputed = n.attr(f"imputed_value_{kind}s", ())
    if not imputed:
        raise n.refused(
            "the attribute with the values to insert is missing", f"imputed_value_{kind}s"
        )
    replaced = n.attr(f"replaced_value_{kind}", 0.0 if kind == "float" else 0)
    is_nan = replaced != replaced
    missing = e(t.Map("isnan", (x,)) if is_nan else t.Map("eq", (x,), (replaced,)))
    return e.map("where", missing, e.constant(imputed, x.type.dtype, "imputed"), x)


def label_encoder(n: OnnxNode, e: Emitter) -> Value:
    """Each cell looked up among the keys: the value at the same place, else the default."""

    def table(what: str) -> tuple[Value, str]:
        for suffix, dtype in (("int64s", i64), ("floats", f32), ("tensor", None)):
            name = f"{what}_{suffix}"
            if name in n.attrs:
                return e.constant(np.asarray(n.attr(name)).reshape(-1), dtype, what), suffix
        raise n.refused(
            f"the {what} are not numbers",
            "integers or floats",
            ", ".join(n.attrs),
            "gpuir analyses tensors of numbers only",
        )

    (keys, _), (values, kind) = table("keys"), table("values")
    default = {"int64s": n.attr("default_int64", -1), "floats": n.attr("default_float", -0.0)}
    if kind in default:
        other = e.constant([default[kind]], values.type.dtype, "default")
    else:
        is_integer = values.type.dtype.is_integer
        given = n.attrs.get("default_tensor", -1 if is_integer else -0.0)
        other = e.constant(np.asarray(given).reshape(-1)[:1], values.type.dtype, "default")
    gives = TensorType(n[0].type.shape, values.type.dtype)
    work = n[0].type.size * max(keys.type.size, 1).bit_length()  # a binary search each
    return e(t.Routine("lookup", (n[0], keys, values, other), (gives,), work=work))


def transformed(n: OnnxNode, e: Emitter, y: Value, how: str) -> Value:
    """`post_transform` of the scores of several classes or targets, along the last axis; of one it
    is left as it is, but for PROBIT. (onnxruntime, core/providers/cpu/ml/ml_common.h.)"""
    if how not in TRANSFORMS:
        raise n.refused("post_transform is unknown", ", ".join(TRANSFORMS), how)
    axis = y.type.rank - 1
    if how == "PROBIT":
        return probit(e, y)
    if how == "NONE" or y.type.shape[-1] == 1:
        return y
    if how == "LOGISTIC":
        return e.map("sigmoid", y)
    if how == "SOFTMAX":
        return e(t.Softmax(y, axis))
    # SOFTMAX_ZERO: scores of zero have no part in the sum
    top = e(t.Reduce("max", y, (axis,), keepdims=True))
    near_zero = e.map("le", e.map("abs", y), 1e-7)
    powers = e.map("exp", e.map("sub", y, top))
    scaled = e.map("mul", y, e.map("exp", e.map("neg", top)))
    zero = e.constant(0, y.type.dtype)
    total = e.map("where", near_zero, zero, powers)
    total = e(t.Reduce("sum", total, (axis,), keepdims=True))
    return e.map("div", e.map("where", near_zero, scaled, powers), total)


def probit(e: Emitter, y: Value) -> Value:
    """sqrt(2) erfinv(2 y - 1), by Winitzki's approximation (A handy approximation for the error
    function and its inverse, 2008) with the constants that onnxruntime has."""
    x = e.map("sub", e.map("mul", y, 2.0), 1.0)
    one = e.constant(1, y.type.dtype)
    inside = e.map("mul", e.map("sub", one, x), e.map("add", x, 1.0))
    log = e.map("log", inside)
    v = e.map("add", e.map("mul", log, 0.5), 2 / (3.14159 * 0.147))
    under = e.map("sub", e.map("mul", v, v), e.map("mul", log, 1 / 0.147))
    size = e.map("sqrt", e.map("sub", e.map("sqrt", under), v))
    below = e.map("lt", x, 0.0)
    signed = e.map("where", below, e.map("neg", size), size)
    return e.map("mul", signed, 2**0.5)


def second_class(n: OnnxNode, e: Emitter, s: Value, how: str, negative: bool = False) -> Value:
    """Both scores where one is computed: 1 - s and s, or -s and s. Of the transforms, LOGISTIC
    alone changes them, to 1 - sigmoid(s) and sigmoid(s)."""
    if how == "PROBIT":
        raise n.refused(
            "post_transform=PROBIT is not supported of one score for two classes",
            "NONE, LOGISTIC, SOFTMAX or SOFTMAX_ZERO",
        )
    if how == "LOGISTIC":
        s, negative = e.map("sigmoid", s), False
    other = t.Map("neg", (s,)) if negative else t.Map("sub", (e.constant(1, f32), s))
    return e(t.Concat((e(other), s), 1))


def labels(n: OnnxNode, e: Emitter, attr: str) -> tuple[Value, int]:
    """The class labels, and how many there are; of labels that are text, their places."""
    if texts := n.attr("classlabels_strings"):
        e.assume(f"{n.name}: the labels are text; their positions are output instead")
        return e.constant(range(len(texts)), i64, "labels"), len(texts)
    names = integers(n, attr, "class labels")
    return e.constant(names, i64, "labels"), len(names)


def normalizer(n: OnnxNode, e: Emitter) -> Value:
    """Each row divided by its largest cell, its sum of magnitudes, or its length; in f32. A row
    whose divisor is zero stays as it is."""
    x, norm = cast(e, n[0], f32), n.choice("norm", "MAX", ("MAX", "L1", "L2"))
    last = (x.type.rank - 1,)
    if norm == "MAX":
        divisor = e(t.Reduce("max", x, last, True))
    elif norm == "L1":
        divisor = e(t.Reduce("sum", e.map("abs", x), last, True))
    else:
        divisor = e.map("sqrt", e(t.Reduce("sum", e.map("mul", x, x), last, True)))
    is_zero = e.map("eq", divisor, 0.0)
    return e.map("div", x, e.map("where", is_zero, e.constant(1, f32), divisor))


def integers(n: OnnxNode, attr: str, what: str) -> Sequence[int]:
    """The attribute, which a node that works on strings leaves out; `what` says what it holds."""
    found = n.attr(attr)
    if not found:
        raise n.refused(
            f"the {what} are not numbers", attr, fix="gpuir analyses tensors of numbers only"
        )
    return found


def one_hot_encoder(n: OnnxNode, e: Emitter) -> Value:
    """1 where the cell equals the category counted by a new last axis, else 0."""
    categories = integers(n, "cats_int64s", "categories")
    x = cast(e, n[0], i64)
    x = e(t.Reshape(x, (*x.type.shape, 1)))
    return e(t.Cast(e.map("eq", x, e.constant(categories, i64, "categories")), f32))


def scaler(n: OnnxNode, e: Emitter) -> Value:
    """(x - offset) * scale, in f32."""
    x = cast(e, n[0], f32)
    for fn, attr in (("sub", "offset"), ("mul", "scale")):
        if numbers := n.attr(attr):
            x = e.map(fn, x, e.constant(numbers, f32, attr))
    return x


# ---------------------------------------------------------------------------- trees

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")


TABLES = ("nodes", "splits", "roots", "leaves", "targets", "weights", "members")


def trees(n: OnnxNode, e: Emitter, *, count: int, how: str, **tables: Any) -> Value:
    """The routine `trees`: every row of x walks every tree. See its numpy meaning for the `TABLES`,
    which are operands: a device reads them too."""
    x = n[0]
    if not x.type.dtype.is_float:
        x = cast(e, x, f32)
    dtype = x.type.dtype
    floats = {"splits": dtype, "weights": dtype, "members": dtype}
    operands = [e.constant(tables[name], floats.get(name, i64), name) for name in TABLES]
    nodes, roots = tables["nodes"], tables["roots"]
    rows = x.type.shape[0]
    depth = max(len(nodes) // max(len(roots), 1), 1).bit_length()
    gives = (TensorType((rows, count), dtype),)
    attrs = (("aggregate", how), ("targets", count))
    op = t.Routine("trees", (x, *operands), gives, attrs, work=rows * len(roots) * depth)
    return e(op)


def columns(n: OnnxNode, names: str, zeros: str = "") -> tuple[np.ndarray, ...]:
    """These attributes, which are columns of one table: `nodes_values` or, as a tensor,
    `nodes_values_as_tensor`. The one called `zeros` is zeros where it is absent."""
    found: list[np.ndarray] = []
    for name in names.split():
        value = n.attr(name)
        value = n.attr(f"{name}_as_tensor") if value is None else value
        if value is None and name == zeros:
            value = np.zeros(len(found[0]), np.int64)
        found.append(np.asarray(() if value is None else value).reshape(-1))
    if len({len(column) for column in found}) > 1:
        raise n.refused(
            "attributes of one table have different lengths",
            f"the same length for each of: {', '.join(names.split())}",
            ", ".join(str(len(column)) for column in found),
        )
    return tuple(found)


def among(n: OnnxNode, attr: str, default: int, names: Sequence[str]) -> str:
    """What a number stands for."""
    number = int(n.attr(attr, default))
    if not 0 <= number < len(names):
        raise n.refused(
            f"no such {attr}", ", ".join(f"{i} {name}" for i, name in enumerate(names)), number
        )
    return names[number]


TRACKS = "nodes_missing_value_tracks_true"


def tree_ensemble(n: OnnxNode, e: Emitter) -> Value:
    table = columns(
        n,
        "nodes_featureids nodes_modes nodes_truenodeids nodes_trueleafs nodes_falsenodeids "
        f"nodes_falseleafs {TRACKS} nodes_splits",
        zeros=TRACKS,
    )
    targets, leaf_weights = columns(n, "leaf_targetids leaf_weights")
    y = trees(
        n,
        e,
        nodes=np.stack(table[:-1], 1),
        splits=table[-1],
        roots=n.attr("tree_roots"),
        leaves=np.stack((np.arange(len(targets)), np.ones(len(targets))), 1),
        targets=targets,
        weights=leaf_weights,
        members=n.attrs.get("membership_values", ()),
        count=n.attr("n_targets", 1),
        how=among(n, "aggregate_function", 1, AGGREGATES),
    )
    return transformed(n, e, y, among(n, "post_transform", 0, TRANSFORMS))


def numbers(n: OnnxNode, attr: str) -> Sequence[float]:
    """The attribute, or its form as a tensor of doubles."""
    tensor = n.attr(f"{attr}_as_tensor")
    return n.attr(attr, ()) if tensor is None else np.asarray(tensor).tolist()


def named_trees(
    n: OnnxNode, e: Emitter, of: str, ids: Sequence[int], count: int, *, how: str = "SUM"
) -> Value:
    """The older form: nodes are named by tree and number, leaves are nodes of mode LEAF, and each
    leaf may weigh on several of the `count` targets or classes (`of` which they speak)."""
    tree, node, modes, feature, split, track, yes, no = columns(
        n,
        "nodes_treeids nodes_nodeids nodes_modes nodes_featureids nodes_values "
        f"{TRACKS} nodes_truenodeids nodes_falsenodeids",
        zeros=TRACKS,
    )
    modes = modes.astype(str)
    kind = np.full(len(modes), len(MODES))
    for i, mode in enumerate(MODES):
        kind[modes == mode] = i
    is_leaf = modes == "LEAF"
    if strange := modes[~is_leaf & (kind == len(MODES))].tolist():
        expected, found = ", ".join(MODES), str(strange[0])
        raise n.refused("the mode is unknown", expected, found)
    row_of = named_rows(n.op, tree, node)
    place = np.where(is_leaf, np.cumsum(is_leaf), np.cumsum(~is_leaf)) - 1  # among its own kind

    owners = columns(n, f"{of}_treeids {of}_nodeids {of}_weights")
    owner = row_of(*owners[:2])
    if len(owner) < len(ids) or not is_leaf[owner].all():
        raise n.refused(
            "some weights do not belong to a leaf",
            f"for each of the {len(ids)} entries of {of}_ids, a leaf named by "
            f"{of}_treeids and {of}_nodeids",
            len(owner),
        )
    leaf, target = place[owner[: len(ids)]], np.asarray(ids, np.int64)
    weight = owners[2][: len(ids)]
    order = np.lexsort((weight, target, leaf))
    counts = np.bincount(leaf, minlength=int(is_leaf.sum()))
    spans = np.stack((np.cumsum(counts) - counts, counts), 1)

    inner = ~is_leaf
    ends = [row_of(tree[inner], child[inner]) for child in (yes, no)]
    pointers = [column for end in ends for column in (place[end], is_leaf[end])]
    rows = np.stack((feature[inner], kind[inner], *pointers, track[inner]), 1)
    firsts = np.unique(tree, return_index=True)[1]
    lone = firsts[is_leaf[firsts]]  # a tree of one leaf becomes a node with that leaf twice
    zero, one = np.zeros_like(lone), np.ones_like(lone)
    single = np.stack((zero, zero, place[lone], one, place[lone], one, zero), 1)
    roots = place[firsts]
    roots[is_leaf[firsts]] = len(rows) + np.arange(len(lone))
    return trees(
        n,
        e,
        nodes=np.concatenate((rows, single)),
        splits=np.concatenate((split[inner], zero)),
        roots=roots,
        leaves=spans,
        targets=target[order],
        weights=weight[order],
        members=(),
        count=count,
        how=how,
    )


def named_rows(op: str, tree: np.ndarray, node: np.ndarray) -> Callable[..., np.ndarray]:
    """A function from trees and numbers of nodes to where the table has those nodes; ModelError for
    one that is not there. Of two with one name, the last counts."""
    (trees, at), (nodes, where) = (np.unique(x, return_inverse=True) for x in (tree, node))
    key = at * len(nodes) + where
    order = np.argsort(key, kind="stable")
    ordered = key[order]

    def rows(tree: np.ndarray, node: np.ndarray) -> np.ndarray:
        at, where = np.searchsorted(trees, tree), np.searchsorted(nodes, node)
        key = at * len(nodes) + where
        i = np.maximum(np.searchsorted(ordered, key, side="right") - 1, 0)
        there = (at < len(trees)) & (where < len(nodes)) & (len(ordered) > 0)
        there[there] = (trees[at[there]] == tree[there]) & (nodes[where[there]] == node[there])
        there[there] = ordered[i[there]] == key[there]
        if not there.all():
            missing = int(np.argmin(there))
            found = f"node {node[missing]:.0f} of tree {tree[missing]:.0f}"
            raise ModelError(
                f"{op}: a branch points to a node that does not exist",
                expected="a node id that is listed in nodes_nodeids",
                found=found,
            )
        return order[i] if len(order) else np.zeros(0, np.int64)

    return rows


def with_base(n: OnnxNode, e: Emitter, y: Value) -> Value:
    """The sums in f32, `base_values` added."""
    if len(base := numbers(n, "base_values")):
        y = e.map("add", y, e.constant(base, y.type.dtype, "base"))
    return cast(e, y, f32)


def tree_ensemble_regressor(n: OnnxNode, e: Emitter) -> Value:
    count, how = n.attr("n_targets", 1), n.attr("aggregate_function", "SUM")
    y = with_base(n, e, named_trees(n, e, "target", n.attr("target_ids", ()), count, how=how))
    return transformed(n, e, y, n.attr("post_transform", "NONE"))


def tree_ensemble_classifier(n: OnnxNode, e: Emitter) -> tuple[Value, Value]:
    """The label of the class of highest score, and the scores. Of two classes the weights may speak
    of one alone; then, as onnxruntime reads it, the sum s is a probability if no weight is negative
    (scores 1 - s and s), else a margin (-s and s); of the second class, scores are 0 and s."""
    names, count = labels(n, e, "classlabels_int64s")
    ids, how = n.attr("class_ids", ()), n.attr("post_transform", "NONE")
    if count != 2 or len(set(ids)) != 1:
        y = with_base(n, e, named_trees(n, e, "class", ids, count))
        best = e(t.ArgReduce("max", y, 1))
        return e(t.Gather(names, best)), transformed(n, e, y, how)
    if len(numbers(n, "base_values")) > 1:
        raise n.refused("there are two base values, but weights of one class only")
    s = with_base(n, e, named_trees(n, e, "class", (0,) * len(ids), 1))
    is_probability = min(numbers(n, "class_weights"), default=0) >= 0
    above = e.map("gt", s, 0.5 if is_probability else 0.0)
    chosen = e(t.Reshape(e(t.Cast(above, i64)), (s.type.shape[0],)))
    if set(ids) == {1}:
        y = e(t.Concat((e.fill(0, s.type), s), 1))
        return e(t.Gather(names, chosen)), transformed(n, e, y, how)
    return e(t.Gather(names, chosen)), second_class(n, e, s, how, not is_probability)


def zip_map(n: OnnxNode, e: Emitter) -> Value:
    """A dictionary for each row, made by the host: the scores themselves go on."""
    e.assume(
        f"{n.name}: the scores are output as a tensor; the dictionaries that "
        "ZipMap makes are not modelled"
    )
    return n[0]


CONVERTERS: dict[str, Converter] = {
    "ai.onnx.ml::ArrayFeatureExtractor": array_feature_extractor,
    "ai.onnx.ml::Binarizer": binarizer,
    "ai.onnx.ml::FeatureVectorizer": feature_vectorizer,
    "ai.onnx.ml::Imputer": imputer,
    "ai.onnx.ml::LabelEncoder": label_encoder,
    "ai.onnx.ml::Normalizer": normalizer,
    "ai.onnx.ml::OneHotEncoder": one_hot_encoder,
    "ai.onnx.ml::Scaler": scaler,
    "ai.onnx.ml::TreeEnsemble": tree_ensemble,
    "ai.onnx.ml::TreeEnsembleClassifier": tree_ensemble_classifier,
    "ai.onnx.ml::TreeEnsembleRegressor": tree_ensemble_regressor,
    "ai.onnx.ml::ZipMap": zip_map,
}
