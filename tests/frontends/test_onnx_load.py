"""Loading an ONNX model: dims, names, locations, order, functions, weights that stay unread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import F32, I64, info, loaded, model, node, results

from gpuir.frontends.emit import NumbersMissing
from gpuir.frontends.onnx.load import load
from gpuir.frontends.onnx.proto import evaluate_dim
from gpuir.ir.errors import ModelError
from gpuir.ops import tensor as t
from gpuir.text import parse, show


def weight(name: str, *shape: int) -> Any:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 100
    return numpy_helper.from_array(array, name)


def mlp() -> Any:
    return model(
        [
            node("MatMul", ["x", "w"], ["h"], name="MatMul_3"),
            node("Add", ["h", "b"], ["a"]),
            node("Relu", ["a"], ["y"], name="Relu_5"),
        ],
        [info("x", ["batch", 64])],
        [info("y", ["batch", 32])],
        [weight("w", 64, 32), weight("b", 32)],
    )


def test_names_types_and_locations(tmp_path: Path):
    path = tmp_path / "mlp.onnx"
    onnx.save(mlp(), path)
    m = loaded(path, dims={"batch": 8})
    g = m.graph
    assert g.name == "mlp"
    assert [str(v) for n in g.nodes for v in (n.op.name, n.results[0].name)] == [
        *("t.matmul", "h", "t.map", "a", "t.map", "y")
    ]
    assert [n.locs for n in g.nodes] == [
        ("mlp.onnx:MatMul_3",),
        ("mlp.onnx:Add#1",),
        ("mlp.onnx:Relu_5",),
    ]
    assert str(g.outputs[0].type) == "f32[8, 32]"
    assert [p.name for p in g.params] == ["w", "b"]
    assert m.warnings == ()


def test_weights_are_read_when_asked_for():
    m = loaded(mlp(), dims={"batch": 2})
    x = np.ones((2, 64), np.float32)
    w, b = m.weights["w"], m.weights["b"]
    np.testing.assert_allclose(results(m, x=x)["y"], np.maximum(x @ w + b, 0), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int8", "uint8", "bool"])
@pytest.mark.parametrize("raw", [True, False])
def test_numbers_survive_the_skim(tmp_path: Path, dtype: str, raw: bool):
    array = (np.arange(6000) % 2 if dtype == "bool" else np.arange(6000) % 100).astype(dtype)
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    data = array.tobytes() if raw else array.tolist()
    big = helper.make_tensor("w", kind, [6000], data, raw=raw)
    path = tmp_path / "m.onnx"
    onnx.save(model([node("Identity", ["w"], ["y"])], [], [info("y", [6000], kind)], [big]), path)
    m = loaded(path)
    assert m.graph.outputs[0].type.shape == (6000,)
    np.testing.assert_array_equal(results(m)["y"], array)


@pytest.mark.parametrize("dtype", ["INT4", "UINT4", "FLOAT8E4M3FN", "BFLOAT16"])
def test_narrow_numbers(dtype: str):
    kind = getattr(TensorProto, dtype)
    given = helper.make_tensor("w", kind, [2, 9], [1, 2, 3, 0, 5, 6, 7, 4, 1] * 2)
    m = loaded(model([node("Identity", ["w"], ["y"])], [], [info("y", [2, 9], kind)], [given]))
    expected = numpy_helper.to_array(given).astype(np.float32)
    np.testing.assert_array_equal(results(m)["y"].astype(np.float32), expected)


def test_absent_external_data_only_matters_when_asked_for(tmp_path: Path):
    def outside(name: str, *shape: int) -> Any:
        tensor = TensorProto(name=name, data_type=F32, dims=shape, data_location=1)
        tensor.external_data.add(key="location", value="weights.bin")
        return tensor

    path = tmp_path / "m.onnx"
    nodes = [
        node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        node("MatMul", ["x", "wt"], ["h"]),
        node("Mul", ["h", "scale"], ["y"]),
    ]
    weights = [outside("w", 4096, 4096), outside("scale", 1)]
    proto = model(nodes, [info("x", [1, 4096])], [info("y", [1, 4096])], weights)
    path.write_bytes(proto.SerializeToString())
    m = loaded(path)
    assert [p.name for p in m.graph.params] == ["w", "scale"]
    assert m.graph.folded == ("m.onnx:Transpose#0",)
    with pytest.raises(NumbersMissing, match=r"weights\.bin"):
        m.weights["scale"]
    (tmp_path / "weights.bin").write_bytes(np.full(4096 * 4096, 2, np.float32).tobytes())
    assert m.weights["scale"][0] == 2
    assert m.weights["w"].shape == (4096, 4096)


def test_shape_subgraph_folds():
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Gather", ["s", "zero"], ["n"]),
        node("Unsqueeze", ["n", "axes"], ["n1"]),
        node("Concat", ["n1", "rest"], ["shape"], axis=0),
        node("Reshape", ["x", "shape"], ["y"]),
    ]
    weights = [
        numpy_helper.from_array(np.array(0), "zero"),
        numpy_helper.from_array(np.array([0]), "axes"),
        numpy_helper.from_array(np.array([-1, 2]), "rest"),
    ]
    m = loaded(
        model(nodes, [info("x", ["n", "c", "h"])], [info("y", None)], weights),
        dims={"n": 4, "c": 3, "h": 8},
    )
    assert [n.op.name for n in m.graph.nodes] == ["t.reshape"]
    assert m.graph.outputs[0].type.shape == (4, 12, 2)
    assert len(m.graph.folded) == 4
    assert m.graph.params == ()


@pytest.mark.slow
def test_ten_thousand_folded_nodes_in_a_row():
    count = 10_000
    nodes = [node("Shape", ["x"], ["s0"])]
    nodes += [node("Add", [f"s{i}", "one"], [f"s{i + 1}"]) for i in range(count)]
    nodes += [node("Expand", ["x", f"s{count}"], ["y"])]
    one = numpy_helper.from_array(np.array([1]), "one")
    m = loaded(model(nodes, [info("x", [1])], [info("y", None)], [one]))
    assert m.graph.outputs[0].type.shape == (count + 1,)


# ---------------------------------------------------------------------------- dims


def test_input_shape_binds_a_symbol_everywhere():
    inputs = [info("a", ["batch", 4]), info("b", ["batch", 4])]
    proto = model([node("Add", ["a", "b"], ["y"])], inputs, [info("y", None)])
    m = loaded(proto, inputs={"a": (3, 4)})
    assert m.graph.inputs[1].type.shape == (3, 4)
    with pytest.raises(ModelError, match="the size of axis 0 is wrong"):
        load(proto, inputs={"a": (3, 4)}, dims={"batch": 2})


def test_unbound_dims_offer_a_line_to_copy():
    inputs = [info("ids", ["batch", "seq len"], I64), info("image", [None, 3, None, None])]
    proto = model([node("Identity", ["ids"], ["y"])], inputs, [info("y", None, I64)])
    with pytest.raises(ModelError) as caught:
        load(proto)
    message = str(caught.value)
    assert "--dims 'batch=1,seq len=128' --input image=1x3x224x224" in message
    assert "ids: i64[batch, seq len]" in message


@pytest.mark.parametrize(
    ("text", "extent"),
    [
        ("seq", 5),
        ("seq + 1", 6),
        ("2*batch", 6),
        ("batch*seq", 15),
        ("seq//2", 2),
        ("Max(1, seq - 9)", 1),
        ("ceil(seq/2)", 3),
        ("other", None),
        ("seq +", None),
        ("__import__('os')", None),
        ("seq.real", None),
        ("9**9**9", None),
    ],
)
def test_dim_expressions(text: str, extent: int | None):
    assert evaluate_dim(text, {"seq": 5, "batch": 3}) == extent


def test_dim_expressions_of_inputs():
    inputs = [info("x", ["past", "seq"]), info("mask", ["past + seq"])]
    proto = model([node("Identity", ["mask"], ["y"])], inputs, [info("y", None)])
    assert loaded(proto, dims={"past": 3, "seq": 2}).graph.outputs[0].type.shape == (5,)


def test_zero_extent():
    m = loaded(mlp(), dims={"batch": 0})
    assert m.graph.outputs[0].type.shape == (0, 32)


def test_values_make_shapes():
    proto = model(
        [node("Reshape", ["x", "shape"], ["y"])],
        [info("x", [12]), info("shape", [2], I64)],
        [info("y", None)],
    )
    m = loaded(proto, values={"shape": [3, -1]})
    assert m.graph.outputs[0].type.shape == (3, 4)
    assert m.graph.assumed == ("input shape holds [ 3 -1]",)
    with pytest.raises(ModelError, match=r"--value shape=1,1"):
        load(proto)


# ---------------------------------------------------------------------------- order and names


def test_any_order():
    nodes = [node("Relu", ["h"], ["y"], name="b"), node("Neg", ["x"], ["h"], name="a")]
    m = loaded(model(nodes, [info("x", [2])], [info("y", [2])]))
    assert [n.locs[0] for n in m.graph.nodes] == ["model:a", "model:b"]


def test_outputs_that_nothing_computes():
    """An input, a weight, a small constant, one value twice: each is an output by its name."""
    nodes = [
        node("Identity", ["x"], ["same"]),
        node("Constant", [], ["number"], value_float=2.5),
        node("Relu", ["x"], ["r"]),
        node("Identity", ["r"], ["again"]),
    ]
    names = ["same", "w", "number", "again", "r", "x"]
    m = loaded(model(nodes, [info("x", [4])], [info(n, None) for n in names], [weight("w", 30)]))
    assert [v.name for v in m.graph.outputs][:5] == names[:5]
    x = np.array([-1, 0, 1, 2], np.float32)
    got = results(m, x=x)
    np.testing.assert_array_equal(got["same"], x)
    np.testing.assert_array_equal(got["again"], np.maximum(x, 0))
    np.testing.assert_array_equal(got["r"], np.maximum(x, 0))
    assert got["number"] == 2.5
    assert got["w"].shape == (30,)


def test_model_names_win():
    """A name that gpuir would make up for an intermediate value belongs to the model's tensor."""
    nodes = [
        node("Gemm", ["x", "w", "b"], ["Gemm#0/matmul"]),
        node("Relu", ["Gemm#0/matmul"], ["matmul"]),
    ]
    m = loaded(
        model(
            nodes, [info("x", [2, 3])], [info("matmul", None)], [weight("w", 3, 5), weight("b", 5)]
        )
    )
    assert m.graph.outputs[0].name == "matmul"
    assert m.graph.nodes[-1].op.operands[0].name == "Gemm#0/matmul"


def test_hostile_names():
    names = ['a"b\\', "%x = t.relu()\n}", "☃", " ", "\0", "a" * 5000]
    chain = [node("Neg", [a], [b], name=b) for a, b in zip(["x", *names], names, strict=False)]
    m = loaded(model(chain, [info("x", [2])], [info(names[-1], [2])]))
    assert [n.results[0].name for n in m.graph.nodes] == names


def test_initializer_that_is_also_an_input():
    proto = model(
        [node("Mul", ["x", "w"], ["y"])],
        [info("x", [4]), info("w", [4])],
        [info("y", [4])],
        [weight("w", 4)],
    )
    assert [v.name for v in loaded(proto).graph.inputs] == ["x"]
    assert [v.name for v in loaded(proto, inputs={"w": (4,)}).graph.inputs] == ["x", "w"]


# ---------------------------------------------------------------------------- functions


def scaled(nodes: list[Any], **more: Any) -> Any:
    return helper.make_function(
        "mine", "Scaled", ["a"], ["b"], nodes, [helper.make_opsetid("", 17)], **more
    )


def with_functions(calls: list[Any], functions: list[Any]) -> Any:
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    return model(
        calls, [info("x", [2])], [info("y", [2])], opset_imports=opsets, functions=functions
    )


def test_function_with_attributes_called_twice():
    constant = node("Constant", [], ["k"])
    constant.attribute.add(name="value_float", ref_attr_name="k", type=onnx.AttributeProto.FLOAT)
    function = scaled([constant, node("Mul", ["a", "k"], ["b"], name="times")], attributes=["k"])
    calls = [
        node("Scaled", ["x"], ["h"], domain="mine", k=2.0, name="first"),
        node("Scaled", ["h"], ["y"], domain="mine", k=3.0, name="second"),
    ]
    m = loaded(with_functions(calls, [function]))
    assert [n.locs for n in m.graph.nodes] == [("model:first/times",), ("model:second/times",)]
    assert [n.results[0].name for n in m.graph.nodes] == ["h", "y"]
    np.testing.assert_array_equal(results(m, x=np.ones(2, np.float32))["y"], [6, 6])


def test_function_that_calls_itself():
    function = scaled([node("Scaled", ["a"], ["b"], domain="mine")])
    function.opset_import.add(domain="mine", version=1)
    with pytest.raises(ModelError, match="a function calls itself"):
        load(with_functions([node("Scaled", ["x"], ["y"], domain="mine")], [function]))


# ---------------------------------------------------------------------------- sequences


def test_sequences_are_followed():
    nodes = [
        node("SplitToSequence", ["x", "two"], ["s"], axis=0),
        node("SequenceAt", ["s", "last"], ["z"]),
        node("SequenceErase", ["s", "last"], ["s2"]),
        node("SequenceInsert", ["s2", "x", "zero"], ["s3"]),
        node("Identity", ["s3"], ["s4"]),
        node("ConcatFromSequence", ["s4"], ["y"], axis=0),
        node("SequenceLength", ["s"], ["count"]),
    ]
    numbers = {"two": 2, "last": -1, "zero": 0}
    weights = [numpy_helper.from_array(np.array(v), k) for k, v in numbers.items()]
    outputs = [info(n, None) for n in ("y", "z", "count")]
    m = loaded(model(nodes, [info("x", [5])], outputs, weights))
    x = np.arange(5, dtype=np.float32)
    got = results(m, x=x)
    np.testing.assert_array_equal(got["y"], [0, 1, 2, 3, 4, 0, 1, 2, 3])
    np.testing.assert_array_equal(got["z"], [4])
    assert got["count"] == 3


# ---------------------------------------------------------------------------- unknown operators


def custom(**info_of_h: Any) -> Any:
    proto = model(
        [node("Mystery", ["x"], ["h"], domain="acme", name="m"), node("Relu", ["h"], ["y"])],
        [info("x", [2, 3])],
        [info("y", None)],
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("acme", 1)],
    )
    if info_of_h:
        proto.graph.value_info.append(info("h", **info_of_h))
    return proto


def test_unknown_operator_is_opaque():
    m = loaded(custom(shape=[2, 7]))
    assert m.graph.nodes[0].op.name == "t.opaque"
    assert m.graph.outputs[0].type.shape == (2, 7)
    assert "model:m: gpuir does not know the operator acme::Mystery" in m.warnings[0]


def test_unknown_operator_keeps_its_plain_attributes():
    """Numbers, texts and short lists of them; what is long, a tensor or nan is left out."""
    kept = {"block": 32, "scale": 0.5, "layout": "nt", "tile": [128, 64], "names": ["a", "b"]}
    dropped = {
        "wide": list(range(65)),
        "text": "x" * 257,
        "nan": float("nan"),
        "table": helper.make_tensor("t", TensorProto.FLOAT, [1], [1.0]),
    }
    proto = custom(shape=[2, 7])
    proto.graph.node[0].attribute.extend(
        helper.make_attribute(name, value) for name, value in (kept | dropped).items()
    )
    op = loaded(proto).graph.nodes[0].op
    assert isinstance(op, t.Opaque)
    wanted = kept | {"tile": (128, 64), "names": ("a", "b")}
    assert dict(op.attrs) == wanted
    g = loaded(proto).graph
    assert parse(show(g)) == g


def test_unknown_operator_under_strict():
    with pytest.raises(ModelError, match="acme::Mystery"):
        load(custom(shape=[2, 7]), strict=True)


def test_unknown_operator_of_unknown_type():
    with pytest.raises(ModelError, match="value_info"):
        load(custom())


def test_declared_output_that_does_not_fit():
    proto = model([node("Relu", ["x"], ["y"])], [info("x", [2])], [info("y", [3])])
    assert "declared as f32[3], but gpuir computes f32[2]" in loaded(proto).warnings[0]


# ---------------------------------------------------------------------------- opsets


def test_legacy_broadcast():
    proto = model(
        [node("Add", ["x", "b"], ["y"], axis=1, broadcast=1)],
        [info("x", [2, 3, 4])],
        [info("y", None)],
        [weight("b", 3)],
        opset=6,
    )
    y = results(loaded(proto), x=np.zeros((2, 3, 4), np.float32))["y"]
    np.testing.assert_allclose(y[1, :, 2], [0, 0.01, 0.02])


def test_operator_that_changed():
    proto = model(
        [node("Reshape", ["x"], ["y"], shape=[4])], [info("x", [2, 2])], [info("y", None)], opset=1
    )
    with pytest.raises(ModelError, match="is different in opset 1"):
        load(proto)


@pytest.mark.parametrize("op", ["MatMul", "Gemm", "Conv"])
def test_a_size_that_a_weight_fixes_is_suggested_as_it_is(op: str, tmp_path: Path):
    shapes = {"MatMul": (48, 5), "Gemm": (5, 48), "Conv": (6, 24, 3, 3)}
    inputs = {"MatMul": ["batch", 4, "width"], "Gemm": ["batch", "width"]}
    shape = inputs.get(op, ["batch", "width", 32, 32])
    how = {"Gemm": {"transB": 1}, "Conv": {"group": 2}}.get(op, {})
    weight = numpy_helper.from_array(np.zeros(shapes[op], np.float32), "w")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(op, ["x", "w"], ["y"], **how)],
        "g",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [weight],
    )
    path = tmp_path / "m.onnx"
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset), path)
    with pytest.raises(ModelError, match=r"--dims batch=1,width=48 "):
        load(path)
    assert load(path, dims={"batch": 1, "width": 48}).graph.nodes
