"""The `tensorrt` profile against the fusions that NVIDIA documents: TensorRT documentation, Layer
Fusion Catalog, docs.nvidia.com/deeplearning/tensorrt/latest/performance/fusion-catalog.html."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from onnx import ModelProto
from onnx_models import parsed

import gpuir
from gpuir import Kernel
from gpuir.ops.kernel import Gemm

IMAGE = "float[2,8,6,6] x, float[2,8,6,6] s, float[8,8,1,1] w, float[8,1,1] w1, float[8,1,1] w2"
ROWS = "float[2,6,8] x, float[2,6,8] s, float[8,8] w, float[8] w1, float[8] w2"
NUMBERS = """two = Constant <value = float {2.0}> ()
    half = Constant <value = float {0.5}> ()
    one = Constant <value = float {1.0}> ()
    six = Constant <value = float {6.0}> ()
    eps = Constant <value = float {0.00001}> ()
    root = Constant <value = float {1.4142135}> ()
"""
ATTENTION = "float[2,4,6,8] q, float[2,4,8,6] k, float[2,4,6,8] v, float[2,1,1,6] m"
SCORES = """a = MatMul (q, k)
    b = Mul (a, half)
    e0 = Add (b, m)
    f = Softmax <axis = -1> (e0)
    y = MatMul (f, v)"""

# The heading of the catalogue, the operands, the nodes, and the launches as groups of operators.
CASES = {
    "ReLU Activation": (IMAGE, "a = Relu (x)\ny = Relu (a)", ["Relu Relu"]),
    "Convolution and ReLU Activation": (IMAGE, "a = Conv (x, w)\ny = Relu (a)", ["Conv Relu"]),
    "Convolution and GELU Activation": (
        IMAGE,
        NUMBERS + "k = Conv (x, w)\na = Div (k, root)\nb = Erf (a)\ne0 = Add (b, one)\n"
        "f = Mul (k, e0)\ny = Mul (f, half)",
        ["Conv Div Erf Add Mul Mul"],
    ),
    "Convolution and Clip Activation": (
        IMAGE,
        NUMBERS + "a = Conv (x, w)\ny = Clip (a, one, six)",
        ["Conv Clip"],
    ),
    "Scale and Activation": (
        IMAGE,
        "a = Mul (x, w1)\nb = Add (a, w2)\ny = Sigmoid (b)",
        ["Mul Add Sigmoid"],
    ),
    "Convolution and Scale": (
        IMAGE,
        "a = Conv (x, w)\nb = Mul (a, w1)\ny = Add (b, w2)",
        ["Conv Mul Add"],
    ),
    "Convolution and ElementWise Operation": (
        IMAGE,
        "a = Conv (x, w)\nb = Add (a, s)\ny = Relu (b)",
        ["Conv Add Relu"],
    ),
    "Convolution and ElementWise Operation, of two convolutions": (
        IMAGE,
        "a = Conv (x, w)\nb = Conv (s, w)\ny = Add (a, b)",
        ["Conv", "Conv Add"],
    ),
    "Shuffle and Shuffle": (
        IMAGE,
        "a = Transpose <perm = [0, 2, 3, 1]> (x)\nb = Transpose <perm = [3, 0, 1, 2]> (a)\n"
        "y = Relu (b)",
        ["Transpose", "Relu"],
    ),
    "Shuffle and Reduce": (
        IMAGE,
        "i = Constant <value = int64[1] {3}> ()\na = Transpose <perm = [0, 2, 3, 1]> (x)\n"
        "y = ReduceSum <keepdims = 0> (a, i)",
        ["ReduceSum"],
    ),
    "SoftMax and Log": (ROWS, "a = Softmax <axis = -1> (x)\ny = Log (a)", ["Softmax Log"]),
    "Reduction Operation Fusions: GELU": (
        ROWS,
        NUMBERS + "a = Div (x, root)\nb = Erf (a)\ne0 = Add (b, one)\nf = Mul (half, e0)\n"
        "y = Mul (x, f)",
        ["Div Erf Add Mul Mul"],
    ),
    "Reduction Operation Fusions: L1Norm": (
        ROWS,
        "i = Constant <value = int64[1] {2}> ()\na = Abs (x)\ny = ReduceSum (a, i)",
        ["Abs ReduceSum"],
    ),
    "Reduction Operation Fusions: Sum of Squares": (
        ROWS,
        "i = Constant <value = int64[1] {2}> ()\na = Mul (x, x)\ny = ReduceSum (a, i)",
        ["Mul ReduceSum"],
    ),
    "Reduction Operation Fusions: L2Norm": (
        ROWS,
        "i = Constant <value = int64[1] {2}> ()\na = Mul (x, x)\nb = ReduceSum (a, i)\n"
        "y = Sqrt (b)",
        ["Mul ReduceSum Sqrt"],
    ),
    "Reduction Operation Fusions: LogSum": (
        ROWS,
        "i = Constant <value = int64[1] {2}> ()\na = ReduceSum (x, i)\ny = Log (a)",
        ["ReduceSum Log"],
    ),
    "Reduction Operation Fusions: LogSumExp": (
        ROWS,
        "i = Constant <value = int64[1] {2}> ()\na = Exp (x)\nb = ReduceSum (a, i)\ny = Log (b)",
        ["Exp ReduceSum Log"],
    ),
    "PointWise Fusion": (
        ROWS,
        NUMBERS + "a = Add (x, s)\nb = Mul (a, half)\ne0 = Tanh (b)\nf = Sub (e0, x)\n"
        "y = Sigmoid (f)",
        ["Add Mul Tanh Sub Sigmoid"],
    ),
    "PointWise Fusion, into a product": (
        ROWS,
        "a = MatMul (x, w)\nb = Add (a, w1)\ny = Relu (b)",
        ["MatMul Add Relu"],
    ),
    "PointWise Fusion, into a normalization": (
        ROWS,
        NUMBERS + "k = Add (x, s)\nm = ReduceMean <axes = [-1]> (k)\na = Sub (k, m)\n"
        "b = Pow (a, two)\nv = ReduceMean <axes = [-1]> (b)\ne0 = Add (v, eps)\nr = Sqrt (e0)\n"
        "n = Div (a, r)\no = Mul (n, w1)\ny = Add (o, w2)",
        ["Add ReduceMean Sub Pow ReduceMean Add Sqrt Div Mul Add"],
    ),
    "Multi-Head Attention Fusion": (
        ATTENTION.replace("float", "float16"),
        NUMBERS + "short = Cast <to = 10> (half)\n" + SCORES.replace("half", "short"),
        ["MatMul Mul Add Softmax MatMul"],
    ),
    "Multi-Head Attention Fusion, not in f32": (
        ATTENTION,
        NUMBERS + SCORES,
        ["MatMul Mul Add", "Softmax", "MatMul"],
    ),
    "two products are two kernels": (
        ROWS,
        "a = MatMul (x, w)\nb = Relu (a)\ny = MatMul (b, w)",
        ["MatMul Relu", "MatMul"],
    ),
}


def agreement() -> ModuleType:
    return importlib.import_module("validation.agreement.ort")


@pytest.mark.parametrize("name", CASES)
def test_documented_fusions(name: str):
    inputs, body, expected = CASES[name]
    model = parsed(inputs, body)
    kinds = {f"n{i}": n.op_type for i, n in enumerate(model.graph.node)}
    for node, called in zip(model.graph.node, kinds, strict=True):
        node.name = called
    launches: dict[int, list[str]] = {}
    for called, launch in agreement().of_launches(model, "tensorrt")[0].items():
        launches.setdefault(launch, []).append(called)
    order = list(kinds)
    groups = sorted((sorted(g, key=order.index) for g in launches.values()), key=lambda g: g[0])
    assert sorted(" ".join(kinds[n] for n in g) for g in groups) == sorted(expected)


def test_the_bias_of_a_quantised_convolution_is_computed_when_the_engine_is_built():
    """As quantisers write it, in i32: it once made the activation after it a launch of its own."""
    inputs = "int8[2,8,6,6] x, int8[8,8,1,1] w, int32[8] w1, float[8] w2, float ws"
    text = """a = DequantizeLinear (x, ws)
        k = DequantizeLinear (w, ws)
        {bias}
        c = Conv (a, k, b)
        y = Relu (c)"""
    counts = {
        bias: sum(1 for n in analyzed(parsed(inputs, text.format(bias=bias))) if n.launches)
        for bias in ("b = DequantizeLinear (w1, ws)", "b = Identity (w2)")
    }
    assert len(set(counts.values())) == 1, counts


def analyzed(model: ModelProto) -> Sequence[Kernel]:
    return gpuir.analyze(model, target="a100", profile="tensorrt").kernels


def test_products_of_one_input_are_one():
    """Queries, keys and values of the encoder's two layers, of 768 columns each."""
    path = str(Path(__file__).parents[1] / "encoder.onnx")
    graph = gpuir.load(path, dims={"batch": 2, "seq": 16})

    def columns(profile: str) -> list[int]:
        found = gpuir.analyze(graph, "a100", profile=profile).graph
        made = (n.results[0].type for n in found.walk() if isinstance(n.op, Gemm))
        return [type.shape[-1] for type in made if type.rank == 3]  # those of attention have 4

    assert columns("ort") == 2 * [768, 768, 768, 768, 3072, 768]
    assert columns("tensorrt") == 2 * [2304, 768, 3072, 768]
