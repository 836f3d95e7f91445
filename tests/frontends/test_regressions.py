"""Small models that once went wrong, each as some exporter writes it."""

from __future__ import annotations

from typing import Any

import pytest
from onnx import ModelProto, TensorProto, helper

from gpuir.frontends.onnx.load import load
from gpuir.ir.errors import ModelError

F = TensorProto.FLOAT


def model(nodes: Any, inputs: Any, outputs: Any, opset: int = 17, weights: Any = ()) -> ModelProto:
    """A model of these nodes; inputs and outputs are (name, type, dims)."""
    values = [[helper.make_tensor_value_info(*v) for v in vs] for vs in (inputs, outputs)]
    graph = helper.make_graph(nodes, "g", *values, initializer=list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("name", ["?", "-1", "None"])
def test_a_mark_is_no_name_of_a_dimension(name: str) -> None:
    """paddle2onnx names every open dimension "?": they need not be equal."""
    proto = model(
        [helper.make_node("Relu", ["x"], ["y"])],
        [("x", F, [name, 3, name, name])],
        [("y", F, [name, 3, name, name])],
    )
    graph = load(proto, inputs={"x": (1, 3, 48, 192)}).graph
    assert graph.outputs[0].type.shape == (1, 3, 48, 192)


def test_a_scalar_input_is_given_as_the_command_line_gives_it() -> None:
    """`--value sr=16000` is a list of one number; the input has rank 0."""
    nodes = [
        helper.make_node("Reshape", ["n", "one"], ["shape"]),
        helper.make_node("Expand", ["x", "shape"], ["y"]),
    ]
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    proto = model(
        nodes,
        [("x", F, [1]), ("n", TensorProto.INT64, [])],
        [("y", F, None)],
        weights=[one],
    )
    assert load(proto, values={"n": (5,)}).graph.outputs[0].type.shape == (5,)


def durations() -> ModelProto:
    """As VITS does it: a network says how long the output is."""
    nodes = [
        helper.make_node("Ceil", ["x"], ["w"]),
        helper.make_node("ReduceSum", ["w"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["frames"], to=TensorProto.INT64),
        helper.make_node("Range", ["zero", "frames", "step"], ["y"]),
    ]
    weights = [helper.make_tensor(n, TensorProto.INT64, [], [i]) for i, n in enumerate(
        ("zero", "step"))]  # fmt: skip
    return model(nodes, [("x", F, [1, 99])], [("y", TensorProto.INT64, None)], weights=weights)


def test_a_length_that_is_computed_may_be_said() -> None:
    with pytest.raises(ModelError, match="--value frames=128"):
        load(durations())
    graph = load(durations(), values={"frames": (40,)}).graph
    assert graph.outputs[0].type.shape == (40,)
    assert "frames is assumed to hold 40" in graph.assumed
    with pytest.raises(ModelError, match=r"did you mean frames\?"):
        load(durations(), values={"frame": (40,)})
    with pytest.raises(ModelError, match="--value frames: the shape is wrong"):
        load(durations(), values={"frames": (40, 41)})


def test_the_batch_of_a_state_is_guessed() -> None:
    nodes = [helper.make_node("Relu", ["h"], ["y"])]
    proto = model(nodes, [("h", F, [2, None, 64])], [("y", F, None)])
    with pytest.raises(ModelError, match="--input h=2x1x64"):
        load(proto)


def test_a_small_weight_is_no_launch() -> None:
    """The product of YOLO's box decoder has 16 weights: they lie in memory, nothing fills them."""
    weights = [helper.make_tensor("w", F, [1, 4, 1, 1], [0, 1, 2, 3])]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"]),
        helper.make_node("Add", ["c", "w"], ["y"]),
    ]
    graph = load(model(nodes, [("x", F, [1, 4, 8, 8])], [("y", F, None)], weights=weights)).graph
    assert [p.name for p in graph.params] == ["w"]
    assert [n.op.name for n in graph.nodes] == ["t.conv", "t.map"]


def test_a_zero_state_is_no_launch() -> None:
    zeros = [
        helper.make_tensor(name, F, shape, [0.1] * (shape[0] * shape[1] * shape[2]))
        for name, shape in (("w", [1, 32, 8]), ("r", [1, 32, 8]))
    ]
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=8)
    graph = load(model([node], [("x", F, [5, 2, 8])], [("y", F, None)], weights=zeros)).graph
    outer = {v.name for v in graph.params}
    loops = [n.op for n in graph.nodes if n.op.control]
    made = {v for n in graph.nodes for v in n.results if n.op.name == "t.constant"}
    assert loops and outer and not made & {v for op in loops for v in op.operands}
