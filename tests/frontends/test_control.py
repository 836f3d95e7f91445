"""If, Loop and Scan: the known is taken, the rest stays a region, what is assumed is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx_models import BOOL, I64, const, graph, info, loaded, model_of, node, results

from gpuir.frontends.onnx.load import load
from gpuir.ir.errors import ModelError
from gpuir.ops import tensor as t

X = np.arange(6, dtype=np.float32)

# ---------------------------------------------------------------------------- If


def choice(then: list[Any], orelse: list[Any], condition: list[Any], inputs: list[Any]) -> Any:
    branches = {"then_branch": graph(then, [], ["a"]), "else_branch": graph(orelse, [], ["b"])}
    nodes = [*condition, node("If", ["c"], ["y"], name="choice", **branches)]
    return model_of(
        graph(nodes, [info("x", [6]), *inputs], ["y"], [const("two", 2), const("n", 16000)])
    )


RELU, NEG = [node("Relu", ["x"], ["a"], name="r")], [node("Neg", ["x"], ["b"], name="n")]
COMPARE = [node("Equal", ["sr", "n"], ["c"])]


def test_known_condition_takes_the_branch():
    size = [node("Size", ["x"], ["s"]), node("Greater", ["s", "two"], ["c"])]
    m = loaded(choice(RELU, NEG, size, []))
    assert [(n.op.name, n.locs) for n in m.graph.nodes] == [("t.map", ("model:r",))]
    assert m.graph.outputs[0].name == "y"
    assert "model:n" in m.graph.folded


def test_unknown_condition_keeps_both():
    m = loaded(choice(RELU, NEG, COMPARE, [info("sr", [], I64)]))
    op = m.graph.nodes[-1].op
    assert isinstance(op, t.Cond)
    assert [v.name for v in op.captures] == ["x"]
    for sr, expected in ((16000, np.maximum(X, 0)), (8000, -X)):
        np.testing.assert_array_equal(results(m, x=X, sr=np.array(sr))["y"], expected)


def test_given_value_decides():
    m = loaded(choice(RELU, NEG, COMPARE, [info("sr", [], I64)]), values={"sr": 8000})
    assert [n.locs for n in m.graph.nodes] == [("model:n",)]


def test_branches_of_different_shapes():
    """The dearer branch, and a line that says how to choose."""
    short = [node("ReduceSum", ["x"], ["a"])]
    m = loaded(choice(short, [node("Sin", ["x"], ["h"]), node("Cos", ["h"], ["b"])], COMPARE,
                      [info("sr", [], I64)]))  # fmt: skip
    assert m.graph.outputs[0].type.shape == (6,)
    assert m.graph.assumed == (
        "choice: the branches return different shapes (then f32[1], else f32[6]); the slower "
        "branch, else, is assumed; give the numbers from which it is computed: --value sr=16000",
    )


def test_branch_that_does_not_fit():
    wrong = [node("Transpose", ["x"], ["b"], perm=[1, 0])]
    m = loaded(choice(RELU, wrong, COMPARE, [info("sr", [], I64)]))
    assert [n.locs for n in m.graph.nodes][-1] == ("model:r",)
    assert "choice: the then branch is assumed, because the other branch" in m.graph.assumed[0]
    with pytest.raises(ModelError, match="permutation"):
        load(choice([node("Transpose", ["x"], ["a"], perm=[1, 0])], wrong, COMPARE,
                    [info("sr", [], I64)]))  # fmt: skip


def test_branches_of_different_dtypes():
    other = [node("Cast", ["x"], ["b"], to=I64)]
    with pytest.raises(ModelError, match="branches return different types"):
        load(choice(RELU, other, COMPARE, [info("sr", [], I64)]))


def test_nested():
    inner = node("If", ["c2"], ["a"], then_branch=graph(RELU, [], ["a"]),
                 else_branch=graph(NEG, [], ["b"]))  # fmt: skip
    inner.attribute[0].g.node[0].output[0] = inner.attribute[0].g.output[0].name = "deep"
    m = loaded(
        choice(
            [inner],
            [node("Abs", ["x"], ["b"])],
            COMPARE,
            [info("sr", [], I64), info("c2", [], BOOL)],
        )
    )
    x = X - 3
    for sr, c2, expected in (
        (16000, True, np.maximum(x, 0)),
        (16000, False, -x),
        (0, True, abs(x)),
    ):
        got = results(m, x=x, sr=np.array(sr), c2=np.array(c2))["y"]
        np.testing.assert_array_equal(got, expected)


# ---------------------------------------------------------------------------- Loop


def loop(
    body: list[Any],
    outputs: list[str],
    trips: Any = None,
    inputs: list[Any] = [],  # noqa: B006
    shape: Any = (6,),
) -> Any:
    takes = [info("i", [], I64), info("going", [], BOOL), info("s", None)]
    weights = [const("one", 1), const("three", 3), const("keep", True), const("axes", [0])]
    if isinstance(trips, int):
        weights.append(const("trips", trips))
    inner = graph(body, takes, outputs)
    results = ["y", *(f"z{k}" for k in range(len(outputs) - 2))]
    first = "trips" if trips is not None else ""
    at = node("Loop", [first, "keep", "x"], results, body=inner, name="again")
    return model_of(graph([at], [info("x", list(shape)), *inputs], results, weights))


GO = node("Identity", ["going"], ["go"])
STEP = [GO, node("Add", ["s", "s"], ["s2"], name="double")]


def test_known_trips():
    m = loaded(loop(STEP, ["go", "s2", "s2"], 3))
    (op,) = (n.op for n in m.graph.nodes)
    assert isinstance(op, t.Loop)
    assert op.trips == 3
    assert not op.has_condition
    assert m.graph.assumed == ("again: 3 trips, from the model",)
    got = results(m, x=X)
    np.testing.assert_array_equal(got["y"], 8 * X)
    np.testing.assert_array_equal(got["z0"], np.stack([2 * X, 4 * X, 8 * X]))


def test_unknown_trips_are_asked_for():
    proto = loop(STEP, ["go", "s2"], "input", [info("trips", [], I64)])
    with pytest.raises(ModelError) as caught:
        load(proto)
    assert "--trip-count again=10" in str(caught.value)
    assert "--value trips=1" in str(caught.value)
    m = loaded(proto, trip_counts={"again": 5})
    assert m.graph.nodes[-1].op.trips == 5  # type: ignore[attr-defined]
    assert m.graph.assumed == ("again: 5 trips, by --trip-count",)
    assert loaded(proto, values={"trips": 4}).graph.nodes[-1].op.trips == 4  # type: ignore[attr-defined]


def test_trip_count_of_no_loop():
    with pytest.raises(ModelError, match="did you mean again"):
        load(loop(STEP, ["go", "s2"], 3), trip_counts={"agian": 2})


def test_trip_count_beyond_the_model():
    with pytest.raises(ModelError, match="at most 3"):
        load(loop(STEP, ["go", "s2"], 3), trip_counts={"again": 4})


def test_computed_condition_bounds():
    body = [
        node("Add", ["s", "s"], ["s2"]),
        node("ReduceSum", ["s2"], ["total"], keepdims=0),
        node("Less", ["total", "most"], ["go"]),
        node("Constant", [], ["most"], value_float=100.0),
    ]
    m = loaded(loop(body, ["go", "s2"], 10))
    assert m.graph.nodes[-1].op.has_condition  # type: ignore[attr-defined]
    assert m.graph.assumed == (
        "again: 10 trips are assumed, the most that are possible: the condition is computed "
        "at run time",
    )
    np.testing.assert_array_equal(results(m, x=X)["y"], 8 * X)


def test_condition_that_counts():
    """while i < 3: the trips are counted, with a trip count of the largest integer."""
    body = [
        node("Add", ["s", "s"], ["s2"]),
        node("Add", ["i", "one"], ["next"]),
        node("Less", ["next", "three"], ["go"]),
    ]
    m = loaded(loop(body, ["go", "s2"], 2**63 - 1))
    np.testing.assert_array_equal(results(m, x=X)["y"], 8 * X)
    assert m.graph.assumed == ("again: 3 trips, from its condition",)


def test_shapes_that_grow_are_written_out():
    body = [GO, node("Concat", ["s", "s"], ["s2"], axis=0, name="cat")]
    m = loaded(loop(body, ["go", "s2"], 3))
    assert m.graph.outputs[0].type.shape == (48,)
    assert [n.locs for n in m.graph.nodes] == [("model:cat",)] * 3
    with pytest.raises(ModelError, match="changes its type, in a loop of 100 trips"):
        load(loop(body, ["go", "s2"], 100))


def test_slices_by_the_trip_are_written_out():
    body = [
        GO,
        node("Unsqueeze", ["i", "axes"], ["low"]),
        node("Add", ["low", "one"], ["high"]),
        node("Slice", ["x", "low", "high"], ["piece"]),
        node("Add", ["s", "piece"], ["s2"]),
    ]
    m = loaded(loop(body, ["go", "s2"], 2))
    np.testing.assert_array_equal(results(m, x=X)["y"], X + X[0] + X[1])


def test_loop_of_known_values_folds():
    takes = [info("i", [], I64), info("going", [], BOOL), info("s", [], I64)]
    body = graph([GO, node("Add", ["s", "three"], ["s2"])], takes, ["go", "s2", "s"])
    nodes = [
        node("Loop", ["trips", "keep", "one"], ["last", "all"], body=body),
        node("Reshape", ["x", "all"], ["y"]),
    ]
    weights = [const("one", 1), const("three", 3), const("keep", True), const("trips", 2)]
    m = loaded(model_of(graph(nodes, [info("x", [4])], ["y", "last"], weights)))
    assert m.graph.outputs[0].type.shape == (1, 4)
    assert results(m, x=X[:4])["last"] == 7


def test_no_trips():
    m = loaded(loop(STEP, ["go", "s2", "s2"], 0))
    got = results(m, x=X)
    np.testing.assert_array_equal(got["y"], X)
    assert got["z0"].shape == (0, 6)


def test_weights_inside_are_params_outside():
    body = [GO, node("MatMul", ["s", "w"], ["s2"])]
    proto = loop(body, ["go", "s2"], 2, shape=(1, 6))
    proto.graph.initializer.append(const("w", np.eye(6, dtype=np.float32) * 2))
    m = loaded(proto)
    assert [p.name for p in m.graph.params] == ["w"]
    np.testing.assert_array_equal(results(m, x=X[None])["y"], 4 * X[None])


# ---------------------------------------------------------------------------- Scan


@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_scan(axis: int, reverse: int):
    takes = [info("s", None), info("v", None)]
    body = graph([node("Add", ["s", "v"], ["t"]), node("Neg", ["t"], ["o"])], takes, ["t", "o"])
    at = node("Scan", ["s0", "x"], ["y", "z"], body=body, num_scan_inputs=1, name="scan",
              scan_input_axes=[axis], scan_input_directions=[reverse],
              scan_output_axes=[axis - 2], scan_output_directions=[reverse])  # fmt: skip
    shape = (4, 3) if axis == 0 else (3, 4)
    m = loaded(model_of(graph([at], [info("s0", [3]), info("x", list(shape))], ["y", "z"])))
    x = np.arange(12, dtype=np.float32).reshape(shape)
    got = results(m, s0=np.ones(3, np.float32), x=x)
    rows = np.moveaxis(x, axis, 0)[:: -1 if reverse else 1]
    sums = 1 + np.cumsum(rows, axis=0)
    np.testing.assert_array_equal(got["y"], sums[-1])
    collected = -sums[:: -1 if reverse else 1]
    np.testing.assert_array_equal(got["z"], np.moveaxis(collected, 0, axis))
    assert m.graph.assumed == ("scan: 4 trips, the length of the scanned inputs",)


def test_scan_of_unlike_lengths():
    body = graph([node("Add", ["a", "b"], ["c"])], [info("a", None), info("b", None)], ["c"])
    at = node("Scan", ["x", "y"], ["z"], body=body, num_scan_inputs=2)
    with pytest.raises(ModelError, match="have different lengths"):
        load(model_of(graph([at], [info("x", [3, 2]), info("y", [4, 2])], ["z"])))
