"""Products with weights of few bits: the `ort` profile has one launch where onnxruntime's optimised
model has a MatMulNBits, and two where it leaves DequantizeLinear."""

from __future__ import annotations

import importlib
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from gpuir.frontends.onnx.load import load
from gpuir.interp import run
from gpuir.ops import kernel as k
from gpuir.run.analysis import lower
from gpuir.run.runs import analyze

pytest.importorskip("onnxruntime")

F32, F16 = TensorProto.FLOAT, TensorProto.FLOAT16
K, N, BLOCK = 64, 32, 16
DTYPES = {
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in ("uint4", "int4", "uint2", "int2")},
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
}
rng = np.random.default_rng(3)


def weight(
    name: str,
    dtype: str = "uint4",
    shape: tuple[int, ...] = (K, N),
    scales: str = "block",
    axis: int = 0,
    block: int = BLOCK,
    zero: bool = True,
    of: Any = np.float32,
) -> tuple[list[Any], list[Any]]:
    """A DequantizeLinear that gives `name`, and its weights."""
    each = {
        "block": tuple(-(-n // block) if i == axis else n for i, n in enumerate(shape)),
        "each": (shape[axis],),
        "all": (),
    }[scales]
    arrays = {
        "w": rng.integers(0, 2, shape).astype(DTYPES[dtype]),
        "s": np.asarray(rng.random(each) + 0.5).astype(of),
        "z": np.asarray(rng.integers(0, 2, each)).astype(DTYPES[dtype]),
    }
    names = [f"{name}.{part}" for part in arrays if zero or part != "z"]
    attrs: dict[str, Any] = {
        "block": {"axis": axis, "block_size": block},
        "each": {"axis": axis},
        "all": {},
    }
    node = helper.make_node("DequantizeLinear", names, [name], **attrs[scales])
    tensors = [numpy_helper.from_array(v, f"{name}.{part}") for part, v in arrays.items()]
    return [node], tensors[: len(names)]


def model(
    nodes: list[Any],
    weights: list[Any],
    shape: tuple[int, ...] = (3, K),
    output: str = "y",
    dtype: int = F32,
    opset: int = 21,
    **more: tuple[int, ...],
) -> ModelProto:
    inputs = {"x": shape, **more}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, dtype, s) for name, s in inputs.items()],
        [helper.make_tensor_value_info(v, dtype, None) for v in output.split()],
        weights,
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=opsets)
    made.ir_version = 10
    return made


def product(
    after: list[Any] | None = None,
    op: str = "MatMul",
    bias: tuple[int, ...] | None = None,
    attrs: dict[str, Any] | None = None,
    shape: tuple[int, ...] = (3, K),
    more: dict[str, Any] | None = None,
    output: str = "y",
    opset: int = 21,
    **weights: Any,
) -> ModelProto:
    """x times a weight, called m, then the nodes `after`; y where there are none."""
    nodes, tensors = weight("w", **weights)
    of = weights.get("of", np.float32)
    if bias is not None:
        tensors.append(numpy_helper.from_array(rng.random(bias).astype(of), "b"))
    for name, value in (more or {}).items():
        tensors.append(numpy_helper.from_array(np.asarray(value, of), name))
    operands = ["x", "w", *(["b"] if bias is not None and op == "Gemm" else [])]
    nodes += [helper.make_node(op, operands, ["m" if after else "y"], **(attrs or {}))]
    nodes += after or []
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(of))
    return model(nodes, tensors, shape, output, dtype, opset)


def then(*steps: str) -> list[Any]:
    """`Add m b > y` → the node."""
    found: list[Any] = []
    for step in steps:
        (op, *operands), result = step.split(">")[0].split(), step.split("> ")[1]
        found.append(helper.make_node(op, operands, [result]))
    return found


ONE, TWO = ["DequantizeLinear MatMul"], ["DequantizeLinear", "MatMul"]
GEMM, TWO_GEMM = ["DequantizeLinear Gemm"], ["DequantizeLinear", "Gemm"]
PAIR = ["QuantizeLinear", "DequantizeLinear"]
SUM = ["DequantizeLinear MatMul Add"]
RANDOM = rng.random((N, 8))

CASES: dict[str, tuple[Any, list[str]]] = {
    **{
        f"{dtype}, {'with' if zero else 'without'} zero points": (
            lambda dtype=dtype, zero=zero: product(
                dtype=dtype, zero=zero, opset=25 if "2" in dtype else 21
            ),
            ONE,
        )
        for dtype in DTYPES
        for zero in (True, False)
    },
    "blocks of 32": (lambda: product(block=32), ONE),
    "blocks of 8": (lambda: product(block=8), TWO),
    "blocks of 24": (lambda: product(block=24), TWO),
    "a block that is longer than the rows": (lambda: product(block=128), ONE),
    "blocks along the columns": (lambda: product(axis=1), TWO),
    "one scale in all": (lambda: product(scales="all"), ONE),
    "one scale for each column": (lambda: product(scales="each", axis=1, dtype="int8"), ONE),
    "one scale for each row": (lambda: product(scales="each", axis=0, dtype="int8"), TWO),
    "a batch": (lambda: product(shape=(2, 3, K)), ONE),
    "a vector": (lambda: product(shape=(K,)), ONE),
    "a Gemm": (lambda: product(op="Gemm"), GEMM),
    "a Gemm with a bias": (lambda: product(op="Gemm", bias=(N,)), GEMM),
    "a Gemm with a bias of two axes": (lambda: product(op="Gemm", bias=(1, N)), TWO_GEMM),
    "a Gemm with a matrix": (lambda: product(op="Gemm", bias=(3, N)), TWO_GEMM),
    "a Gemm with a number": (lambda: product(op="Gemm", bias=(1,)), TWO_GEMM),
    "a Gemm with alpha": (lambda: product(op="Gemm", attrs={"alpha": 2.0}), TWO_GEMM),
    "a Gemm with beta": (lambda: product(op="Gemm", bias=(N,), attrs={"beta": 2.0}), TWO_GEMM),
    "a Gemm with beta of nothing": (lambda: product(op="Gemm", attrs={"beta": 2.0}), GEMM),
    "a Gemm with transA": (
        lambda: product(op="Gemm", attrs={"transA": 1}, shape=(K, 3)),
        TWO_GEMM,
    ),
    "a Gemm of one scale a column": (
        lambda: product(op="Gemm", bias=(N,), scales="each", axis=1, dtype="int8", zero=False),
        GEMM,
    ),
    "a bias": (lambda: product(then("Add m b > y"), bias=(N,)), SUM),
    "a bias first": (lambda: product(then("Add b m > y"), bias=(N,)), SUM),
    "a bias after a batch": (lambda: product(then("Add m b > y"), bias=(N,), shape=(2, 3, K)), SUM),
    "a bias of two axes": (
        lambda: product(then("Add m b > y"), bias=(1, N)),
        ["DequantizeLinear", "MatMul Add"],
    ),
    "a sum of matrices": (
        lambda: product(then("Add m b > y"), bias=(3, N)),
        ["DequantizeLinear", "MatMul Add"],
    ),
    "a sum after a batch": (
        lambda: product(then("Add m b > y"), bias=(2, 3, N), shape=(2, 3, K)),
        [*ONE, "Add"],
    ),
    "a sum that is read twice": (
        lambda: product(then("Add m b > t", "Add m t > y"), bias=(N,)),
        [*ONE, "Add", "Add"],
    ),
    "a factor": (lambda: product(then("Mul m c > y"), more={"c": 0.5}), [*ONE, "Mul"]),
    "a Relu": (lambda: product(then("Relu m > y")), [*ONE, "Relu"]),
    "a Relu that is read on": (
        lambda: product(then("Relu m > t", "MatMul t c > y"), more={"c": RANDOM}),
        [*TWO, "Relu", "MatMul"],
    ),
    "a bias and a Relu that is read on": (
        lambda: product(
            then("Add m b > s", "Relu s > t", "MatMul t c > y"), bias=(N,), more={"c": RANDOM}
        ),
        ["DequantizeLinear", "MatMul Add", "Relu", "MatMul"],
    ),
    "a Relu that is read on, and the product is an output": (
        lambda: product(then("Relu m > t", "MatMul t c > y"), more={"c": RANDOM}, output="y m"),
        [*TWO, "Relu", "MatMul"],
    ),
    "a bias, and the product is an output": (
        lambda: product(then("Add m b > y"), bias=(N,), output="y m"),
        [*ONE, "Add"],
    ),
    "a Relu that is read twice": (
        lambda: product(
            then("Relu m > t", "MatMul t c > y", "Exp t > z"), more={"c": RANDOM}, output="y z"
        ),
        [*ONE, "Relu", "MatMul", "Exp"],
    ),
    "another activation": (
        lambda: product(then("Sigmoid m > t", "MatMul t c > y"), more={"c": RANDOM}),
        [*ONE, "Sigmoid", "MatMul"],
    ),
}


def agreement(made: ModelProto) -> Any:
    return importlib.import_module("validation.agreement.ort").compare_model(made, {}, "case")


def groups(found: Any, side: dict[str, int]) -> list[str]:
    order = list(found.kinds)
    launches = dict.fromkeys(found.groups(side)[n] for n in order)
    return [" ".join(found.kinds[n] for n in order if n in group) for group in launches]


@pytest.mark.parametrize("name", CASES)
def test_launches_are_the_nodes_of_the_optimised_model(name: str):
    make, expected = CASES[name]
    found = agreement(make())
    assert not found.problem
    assert groups(found, found.ort) == expected, "onnxruntime's"
    assert groups(found, found.ours) == expected, "gpuir's"


def transposed(left: bool) -> ModelProto:
    """A product with a transpose on one side, which its kernel would read by strides if its weight
    lay in memory."""
    nodes, tensors = weight("w", shape=(K, N) if left else (N, K), axis=0 if left else 1)
    perm = [0, 2, 1] if left else [1, 0]
    nodes.append(helper.make_node("Transpose", ["x" if left else "w"], ["t"], perm=perm))
    operands = ["t", "w"] if left else ["x", "t"]
    nodes.append(helper.make_node("MatMul", operands, ["y"]))
    return model(nodes, tensors, (2, K, 3) if left else (3, K))


def pair(x: str, y: str, of: Any) -> tuple[list[Any], list[Any]]:
    """QuantizeLinear and DequantizeLinear, from x to y, and their weights."""
    names = [f"{y}.s", f"{y}.z"]
    arrays = np.array(0.5, np.float32), np.array(0, of)
    tensors = [numpy_helper.from_array(v, name) for name, v in zip(names, arrays, strict=True)]
    nodes = [
        helper.make_node("QuantizeLinear", [x, *names], [f"{y}.q"]),
        helper.make_node("DequantizeLinear", [f"{y}.q", *names], [y]),
    ]
    return nodes, tensors


def quantised(
    x: Any = None, y: Any = None, op: str = "MatMul", bias: Any = None, *after: str
) -> ModelProto:
    """A product of x with a weight and with a bias that is dequantised. What is multiplied, and
    what comes of it after the nodes `after`, may be quantised, and dequantised."""
    nodes, tensors = weight("w")
    operands = ["x", "w"]
    if x:
        more, own = pair("x", "d", x)
        nodes, tensors, operands = nodes + more, tensors + own, ["d", "w"]
    if bias:
        tensors.append(numpy_helper.from_array(np.ones(N, bias), "b.q"))
        tensors.append(numpy_helper.from_array(np.array(0.01, np.float32), "b.s"))
        nodes.append(helper.make_node("DequantizeLinear", ["b.q", "b.s"], ["b"]))
    adds_after = bias and op == "MatMul"
    result = "r" if after else "s"
    operands += ["b"] if bias and op == "Gemm" else []
    nodes.append(helper.make_node(op, operands, ["m" if adds_after else result]))
    nodes += then(f"Add m b > {result}") if adds_after else []
    nodes += then(*after)
    more, own = pair("s", "y", y) if y else (then("Identity s > y"), [])
    return model(nodes + more, tensors + own)


def two(shared: str) -> ModelProto:
    """Two products; the second DequantizeLinear reads the weight or the scales of the first."""
    (nodes, tensors), (second, own) = weight("w"), weight("v")
    second[0].input[:] = [shared if v[1:] == shared[1:] else v for v in second[0].input]
    tensors += [v for v in own if v.name[1:] != shared[1:]]
    nodes += [*second, helper.make_node("MatMul", ["x", "w"], ["y"])]
    nodes.append(helper.make_node("MatMul", ["u", "v"], ["z"]))
    return model(nodes, tensors, output="y z", u=(3, K))


def read_twice() -> ModelProto:
    nodes, tensors = weight("w")
    nodes.append(helper.make_node("MatMul", ["x", "w"], ["y"]))
    nodes.append(helper.make_node("MatMul", ["u", "w"], ["z"]))
    return model(nodes, tensors, output="y z", u=(3, K))


def packed(*after: str) -> ModelProto:
    """A MatMulNBits of the model's own."""
    attrs: dict[str, Any] = {"K": K, "N": N, "bits": 4, "block_size": BLOCK}
    node = helper.make_node("MatMulNBits", ["x", "w", "s"], ["m"], domain="com.microsoft", **attrs)
    tensors = {
        "w": np.zeros((N, K // BLOCK, BLOCK // 2), np.uint8),
        "s": np.ones(N * K // BLOCK, np.float32),
        "b": np.ones(N, np.float32),
        "c": np.float32(0.5),
    }
    weights = [numpy_helper.from_array(np.asarray(v), name) for name, v in tensors.items()]
    return model([node, *then(*after)], weights)


OTHERS: dict[str, tuple[Any, list[str]]] = {
    "x is transposed": (lambda: transposed(left=True), [*ONE, "Transpose"]),
    "the weight is transposed": (lambda: transposed(left=False), TWO),
    "x is quantised too": (lambda: quantised(np.uint8), [*TWO, *PAIR]),
    "x is quantised too, in 16 bits": (lambda: quantised(np.int16), [*ONE, *PAIR]),
    "the result is quantised": (lambda: quantised(y=np.uint8), [*TWO, *PAIR]),
    "the result is quantised in 16 bits": (lambda: quantised(y=np.uint16), [*ONE, *PAIR]),
    "both are quantised in 16 bits": (
        lambda: quantised(np.int16, np.int16, "Gemm"),
        [*GEMM, *PAIR, *PAIR],
    ),
    "one of both is quantised in 16 bits": (
        lambda: quantised(np.int16, np.uint8),
        [*TWO, *PAIR, *PAIR],
    ),
    "a Relu before 16 bits": (
        lambda: quantised(None, np.int16, "MatMul", None, "Relu r > s"),
        [*TWO, "Relu", *PAIR],
    ),
    "a Sigmoid before 16 bits": (
        lambda: quantised(None, np.int16, "MatMul", None, "Sigmoid r > s"),
        [*ONE, "Sigmoid", *PAIR],
    ),
    "a bias of 8 bits": (
        lambda: quantised(op="Gemm", bias=np.int8),
        [*GEMM, "DequantizeLinear"],
    ),
    "a sum with what is dequantised": (
        lambda: quantised(bias=np.int8),
        [*SUM, "DequantizeLinear"],
    ),
    "a bias of 8 bits, and all else in 16": (
        lambda: quantised(np.uint16, np.int16, "Gemm", np.int8),
        [*GEMM, "DequantizeLinear", *PAIR, *PAIR],
    ),
    "the weight is shared": (lambda: two("w.w"), [TWO[0], TWO[0], TWO[1], TWO[1]]),
    "the scales are shared": (lambda: two("w.s"), [TWO[0], TWO[0], TWO[1], TWO[1]]),
    "nothing is shared": (lambda: two("w.none"), [*ONE, *ONE]),
    "MatMulNBits takes no bias": (lambda: packed("Add m b > y"), ["MatMulNBits", "Add"]),
    "MatMulNBits takes no factor": (lambda: packed("Mul m c > y"), ["MatMulNBits", "Mul"]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_around_a_product(name: str):
    make, expected = OTHERS[name]
    found = agreement(make())
    assert not found.problem
    assert sorted(groups(found, found.ort)) == sorted(expected), "onnxruntime's"
    assert sorted(groups(found, found.ours)) == sorted(expected), "gpuir's"


def test_of_a_weight_that_two_products_read_the_dequantised_one_is_in_memory():
    g = lower(load(read_twice()).graph, profile="ort")
    assert [n.op.name for n in g.nodes if not isinstance(n.op, k.View)] == [
        *("k.map", "k.gemm", "k.gemm")
    ]


def gemms(made: ModelProto) -> list[k.Gemm]:
    return [n.op for n in lower(load(made).graph, profile="ort").nodes if isinstance(n.op, k.Gemm)]


def test_in_half_precision_too_but_not_with_scales_in_bf16():
    (half,) = gemms(product(of=np.float16, op="Gemm", bias=(N,)))
    (brain,) = gemms(product(of=ml_dtypes.bfloat16))
    assert half.prologue
    assert not brain.prologue


@pytest.mark.parametrize("op", ["MatMul", "Gemm"])
def test_it_costs_what_the_same_product_as_a_matmul_nbits_does(op: str):
    """One row by 4096 x 11008 on an A100, with zero points of 4 bits."""
    rows, columns, block = 4096, 11008, 128
    made = product(op=op, shape=(1, rows), of=np.float16, block=block, dtype="uint4")
    del made.graph.initializer[:]
    tensors = {
        "w.w": np.zeros((rows, columns), ml_dtypes.uint4),
        "w.s": np.ones((rows // block, columns), np.float16),
        "w.z": np.zeros((rows // block, columns), ml_dtypes.uint4),
    }
    made.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in tensors.items())
    attrs: dict[str, Any] = {"K": rows, "N": columns, "bits": 4, "block_size": block}
    node = helper.make_node(
        "MatMulNBits", ["x", "w", "s", "z"], ["y"], domain="com.microsoft", **attrs
    )
    arrays = {
        "w": np.zeros((columns, rows // block, block // 2), np.uint8),
        "s": np.ones((columns, rows // block), np.float16),
        "z": np.zeros((columns, rows // block // 2), np.uint8),
    }
    weights = [numpy_helper.from_array(v, n) for n, v in arrays.items()]
    other = model([node], weights, (1, rows), dtype=F16)
    ours, theirs = (
        analyze(load(m).graph, target="a100", profile="ort").graph for m in (made, other)
    )
    assert [g.time_s for g in (ours, theirs)] == [pytest.approx(theirs.time_s, rel=0.01)] * 2


def test_the_launch_computes_what_the_model_does():
    made = product(block=16, dtype="int4", shape=(2, 3, K), after=then("Add m b > y"), bias=(N,))
    loaded = load(made)
    x = rng.random((2, 3, K)).astype(np.float32)
    arrays = {**loaded.weights, "x": x}
    plain = run(loaded.graph, arrays)["y"]
    fused = run(lower(loaded.graph, profile="ort"), arrays)["y"]
    np.testing.assert_allclose(fused, plain, rtol=1e-5)


def drawn(seed: int) -> ModelProto:
    """One to three products with weights of few bits, and what may come after each."""
    draw = random.Random(seed)
    shape = draw.choice([(3, K), (2, 3, K)])
    nodes: list[Any] = []
    tensors: list[Any] = []
    outputs: list[str] = []
    at = "x"

    def put(op: str, operands: list[str], **attrs: Any) -> str:
        nodes.append(helper.make_node(op, operands, [f"v{len(nodes)}"], **attrs))
        return nodes[-1].output[0]

    def known(*extents: int) -> str:
        name = f"c{len(tensors)}"
        tensors.append(numpy_helper.from_array(np.asarray(rng.random(extents), np.float32), name))
        return name

    for i in range(draw.randint(1, 3)):
        made, weights = weight(
            f"w{i}",
            draw.choice([*DTYPES]),
            (K, K),
            draw.choice(["block", "block", "each", "all"]),
            draw.choice([0, 0, 1]),
            draw.choice([8, 16, 32]),
            draw.random() < 0.5,
        )
        nodes += made
        tensors += weights
        if len(shape) == 3 or draw.random() < 0.5:
            at = put("MatMul", [at, f"w{i}"])
        else:
            bias = draw.choice([[], [known(K)], [known(1, K)], [known(3, K)]])
            odd = draw.choice([{}, {}, {"alpha": 0.5}, {"transB": 1}, {"beta": 0.5}])
            at = put("Gemm", [at, f"w{i}", *bias], **odd)
        for step in draw.choices(["Relu", "Add", "Sum", "Mul", "Sigmoid", "Clip", "output"], k=2):
            match step:
                case "Add":
                    at = put("Add", [at, known(K)])
                case "Sum":
                    at = put("Add", [at, known(*shape)])
                case "Mul":
                    at = put("Mul", [at, known()])
                case "Clip":
                    at = put("Clip", [at, known(), known()])
                case "output":
                    outputs.append(at)
                case _:
                    at = put(step, [at])
    outputs = [*dict.fromkeys([*outputs, at])]
    return model(nodes, tensors, shape, " ".join(outputs), opset=25)


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 200), marks=pytest.mark.slow)])
def test_drawn_models_join_the_nodes_that_onnxruntime_joins(seeds: range):
    for seed in seeds:
        found = agreement(drawn(seed))
        assert not found.problem, seed
        sides = (groups(found, side) for side in (found.ort, found.ours))
        theirs, ours = ([g for g in side if "Dequantize" in g] for side in sides)
        assert ours == theirs, seed
