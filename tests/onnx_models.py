"""Small ONNX models for tests, and what gpuir and onnxruntime make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from gpuir.frontends.model import Model
from gpuir.frontends.onnx.load import load
from gpuir.interp import run
from gpuir.ir.verify import verify

Array = np.ndarray[Any, Any]
F32, I64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
node = helper.make_node


def info(name: str, shape: Any = None, dtype: int = F32) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def info_of(name: str, array: Array) -> Any:
    """The input that takes this array."""
    return info(name, array.shape, helper.np_dtype_to_tensor_dtype(array.dtype))


def const(name: str, value: Any) -> TensorProto:
    return numpy_helper.from_array(np.asarray(value), name)


def graph(
    nodes: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], weights: Sequence[Any] = ()
) -> Any:
    """A graph; an output that is a name has no type."""
    results = [helper.make_empty_tensor_value_info(o) if isinstance(o, str) else o for o in outputs]
    return helper.make_graph(nodes, "g", inputs, results, weights)


def model_of(g: Any, opset: int = 17, domains: Sequence[str] = (), **more: Any) -> ModelProto:
    """A model of the graph, importing ai.onnx at `opset` and `domains` at their usual versions."""
    versions = {"": opset, **{d: {"ai.onnx.ml": 3}.get(d, 1) for d in domains}}
    opsets = [helper.make_opsetid(d, v) for d, v in versions.items()]
    return helper.make_model(g, **{"opset_imports": opsets, "ir_version": 8, **more})


def parsed(inputs: str, body: str) -> ModelProto:
    """A model in onnx's text format; inputs called w.. are weights, with random numbers."""
    results = [line.split("=")[0].strip() for line in body.strip().splitlines()]
    dtype = "double" if "double" in inputs else "float"
    text = f"g ({inputs}) => ({dtype}[?] {results[-1]}) {{ {body} }}"
    graph = parser.parse_graph(text)
    rng = np.random.default_rng(0)
    for i in [i for i in graph.input if i.name.startswith("w")]:
        shape = [d.dim_value for d in i.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type)
        array = (rng.random(shape) + 0.5).astype(dtype)
        graph.initializer.append(numpy_helper.from_array(array, i.name))
        graph.input.remove(i)
    graph.output[0].type.tensor_type.ClearField("shape")
    return model_of(graph)


def model(
    nodes: Sequence[Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    weights: Sequence[Any] = (),
    opset: int = 17,
    **more: Any,
) -> ModelProto:
    return model_of(graph(nodes, inputs, outputs, weights), opset, **more)


def one_node(
    op: str,
    operands: Sequence[Any],
    attrs: dict[str, Any],
    *,
    opset: int = 17,
    domain: str = "",
    outputs: Sequence[Any] = ("y0",),
) -> tuple[ModelProto, dict[str, Array]]:
    """A model of one node, and its inputs x0, x1 ... by name: an operand in a tuple is an
    initializer, None is absent."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(operands)]
    known = [const(k, x[0]) for k, x in zip(names, operands, strict=True) if isinstance(x, tuple)]
    feeds = {
        k: np.asarray(x)
        for k, x in zip(names, operands, strict=True)
        if x is not None and not isinstance(x, tuple)
    }
    results = [o if isinstance(o, str) else o.name for o in outputs]
    made = node(op, names, results, name=op, domain=domain, **attrs)
    g = graph([made], [info_of(k, v) for k, v in feeds.items()], outputs, known)
    return model_of(g, opset, [domain] if domain else []), feeds


def loaded(source: Any, **options: Any) -> Model:
    """The model as gpuir loads it, verified."""
    found = load(source, **options)
    verify(found.graph, "onnx")
    return found


def results(m: Model, **inputs: Any) -> dict[str, Array]:
    """What a loaded model computes, by name, in `interp`; inputs that it does not take are left."""
    taken = {v.name: np.asarray(inputs[v.name]) for v in m.graph.inputs}
    return run(m.graph, taken | {p.name: m.weights[p.name] for p in m.graph.params})


def expected(proto: ModelProto, feeds: dict[str, Array]) -> list[Array]:
    """What onnxruntime computes."""
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def agrees(
    proto: ModelProto,
    feeds: dict[str, Array],
    rtol: float = 1e-5,
    atol: float = 1e-6,
    **options: Any,
) -> Model:
    """The loaded model, having given what onnxruntime gives: dtypes, shapes and numbers."""
    m = loaded(proto, **options)
    found = results(m, **feeds)
    for value, theirs in zip(m.graph.outputs, expected(proto, feeds), strict=True):
        ours = found[value.name]
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)
    return m
