"""Small models that once went wrong, each as some exporter writes it."""

from __future__ import annotations

from typing import Any

import pytest
from onnx import ModelProto, TensorProto, helper

from gpuir.frontends.onnx.load import load

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
