"""An operator of a domain that nobody knows reads all tensors that it is given, however."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import gpuir
from gpuir.cost.reading import work_of
from gpuir.ops import kernel as k

pytestmark = pytest.mark.filterwarnings("ignore:.*does not know the operator")


def info(name: str, shape: list[int]) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def read(model: Any) -> float:
    """Bytes that the model's one opaque kernel reads."""
    graph = gpuir.analyze(model, target="a100").graph
    (op,) = (n.op for n in graph.nodes if isinstance(n.op, k.Opaque))
    return math.fsum(float(o.nbytes) for o in work_of(op).operands if o.staging != "written")


def model(nodes: list[Any], inputs: dict[str, list[int]], weights: dict[str, Any]) -> Any:
    graph = helper.make_graph(
        nodes,
        "g",
        [info(name, shape) for name, shape in inputs.items()],
        [info("y", [5])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets)


WAYS = (
    "operand",
    "sequence",
    "optional",
    "weight",
    "attribute",
    "attributes",
    "captured",
    "inside",
)


@given(
    st.lists(
        st.tuples(st.sampled_from(WAYS), st.lists(st.integers(1, 30), min_size=1, max_size=3)),
        min_size=1,
        max_size=6,
    )
)
def test_it_reads_all_tensors_it_is_given(drawn: list[tuple[str, list[int]]]):
    """The law: at least their bytes, as operands, in a sequence, in optional values, between
    operands that are left out; as weights, as attributes, and in subgraphs."""
    nodes: list[Any] = []
    operands: list[str] = ["first"]
    inputs, weights, attributes = {"first": [3]}, dict[str, Any](), dict[str, Any]()
    for i, (way, shape) in enumerate(drawn):
        name, array = f"x{i}", np.zeros(shape, np.float32)
        match way:
            case "operand":
                inputs[name] = shape
                operands += ["", name]
            case "sequence":
                inputs[name] = shape
                nodes.append(helper.make_node("SequenceConstruct", [name], [f"s{i}"]))
                operands.append(f"s{i}")
            case "optional":
                inputs[name] = shape
                nodes.append(helper.make_node("Optional", [name], [f"o{i}"]))
                operands.append(f"o{i}")
            case "weight":
                weights[name] = array
                operands.append(name)
            case "attribute":
                attributes[name] = numpy_helper.from_array(array)
            case "attributes":
                attributes[name] = [numpy_helper.from_array(array)]
            case _:
                own = [numpy_helper.from_array(array, name)] if way == "inside" else []
                inputs |= {} if own else {name: shape}
                add = helper.make_node("Add", [name, name], ["t"])
                attributes[f"body{i}"] = helper.make_graph([add], "b", [], [info("t", shape)], own)
    nodes.append(helper.make_node("Unknown", operands, ["y"], domain="own", **attributes))
    want = 12 + sum(4 * math.prod(shape) for _, shape in drawn)
    assert read(model(nodes, inputs, weights)) >= want


def test_rows_of_one_tensor_are_read_as_the_tensor():
    split = helper.make_node("SplitToSequence", ["x"], ["s"], axis=0, keepdims=0)
    nodes = [split, helper.make_node("Unknown", ["s"], ["y"], domain="own")]
    assert read(model(nodes, {"x": [30, 40]}, {})) == 30 * 40 * 4


def test_a_known_operator_still_refuses_a_sequence():
    nodes = [
        helper.make_node("SequenceConstruct", ["x"], ["s"]),
        helper.make_node("Relu", ["s"], ["y"]),
    ]
    with pytest.raises(gpuir.GpuirError, match="Relu reads a sequence"):
        gpuir.load(model(nodes, {"x": [5]}, {}))
