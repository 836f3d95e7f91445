"""Resampling, regions and suppression beyond onnx's node tests, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuir.interp import run
from gpuir.ir.errors import ModelError
from gpuir.ir.verify import verify

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from gpuir.frontends.onnx.load import Model, load  # noqa: E402

Array = np.ndarray[Any, Any]
draw = np.random.default_rng(5)


def floats(*shape: int) -> Array:
    return draw.standard_normal(shape).astype(np.float32)


def boxes(count: int, *lead: int) -> Array:
    low = draw.uniform(0, 8, (*lead, count, 2))
    return np.concatenate([low, low + draw.uniform(0, 8, low.shape)], -1).astype(np.float32)


def one_node(
    op: str, opset: int, operands: tuple[Any, ...], attrs: dict[str, Any], known: bool = False
) -> tuple[Any, dict[str, Array]]:
    """The model and its inputs; an operand in a tuple is an initializer, `known` makes all so."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(operands)]
    fixed = {k: x[0] for k, x in zip(names, operands, strict=True) if isinstance(x, tuple)}
    inputs = {k: x for k, x in zip(names, operands, strict=True) if k and k not in fixed}
    if known:
        fixed, inputs = fixed | inputs, {}
    dtype = TensorProto.INT64 if op == "NonMaxSuppression" else TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], name=op, **attrs)],
        "g",
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in inputs.items()
        ],
        [helper.make_tensor_value_info("y", dtype, None)],
        [numpy_helper.from_array(np.asarray(v), k) for k, v in fixed.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), inputs


def agrees(made: Any, inputs: dict[str, Array]) -> Model:
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, inputs)
    loaded = load(made)
    verify(loaded.graph)
    y = run(loaded.graph, {**inputs, **loaded.weights})["y"]
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)
    return loaded


X = floats(1, 2, 4, 6)
NONE = (np.zeros(0, np.float32),)
TWICE, HALF = (np.float32([1, 1, 2, 2]),), (np.float32([1, 1, 0.5, 0.5]),)
MODES = ("nearest", "linear", "cubic")
COORDS = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
RESIZES: list[tuple[str, int, tuple[Any, ...], dict[str, Any]]] = [
    *(("Upsample", 7, (X,), {"scales": [1.0, 1.0, 2.0, 1.5], "mode": m}) for m in MODES[:2]),
    *(("Upsample", 9, (X, (np.float32([1, 1, 3, 2]),)), {"mode": m}) for m in MODES[:2]),
    *(("Resize", 10, (X, s), {"mode": m}) for s in (TWICE, HALF) for m in MODES[:2]),
    ("Resize", 10, (X, (np.float32([1, 1, 0.6, 1.8]),)), {"mode": "nearest"}),
    *(
        ("Resize", opset, (X, NONE, TWICE), {"mode": m, "coordinate_transformation_mode": c})
        for opset in (11, 13)
        for m in MODES
        for c in COORDS
    ),
    *(
        ("Resize", 11, (X, NONE, TWICE), {"coordinate_transformation_mode": "tf_half_pixel_for_nn",
                                          "nearest_mode": m})
        for m in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
    ),
    ("Resize", 11, (X, NONE, NONE, (np.int64([1, 2, 7, 3]),)), {"mode": "linear"}),
    ("Resize", 13, (X, None, None, (np.int64([1, 2, 7, 3]),)), {"mode": "cubic"}),
    *(
        ("Resize", 18, (X, None, None, (np.int64([8, 8]),)),
         {"mode": "linear", "axes": [2, 3], "keep_aspect_ratio_policy": policy})
        for policy in ("stretch", "not_larger", "not_smaller")
    ),
    ("Resize", 18, (X, None, (np.float32([0.5]),)), {"mode": "cubic", "axes": [3], "antialias": 1}),
    ("Resize", 13, (X, (np.float32([0, 0, 0.2, 0.1, 1, 1, 0.9, 0.8]),), None,
                    (np.int64([1, 2, 3, 3]),)),
     {"mode": "linear", "coordinate_transformation_mode": "tf_crop_and_resize"}),
]  # fmt: skip


@pytest.mark.parametrize("op, opset, operands, attrs", RESIZES, ids=lambda x: str(x)[:60])
def test_resize(op: str, opset: int, operands: tuple[Any, ...], attrs: dict[str, Any]):
    agrees(*one_node(op, opset, operands, attrs))


def test_resize_to_the_same_size_is_nothing():
    made, _ = one_node("Resize", 13, (X, None, (np.ones(4, np.float32),)), {"mode": "linear"})
    assert [n.op.name for n in load(made).graph.nodes] == ["t.map"]  # the output's identity


def test_resize_names_what_it_needs():
    made, _ = one_node("Resize", 13, (X, None, np.ones(4, np.float32)), {})
    with pytest.raises(ModelError, match="depends on the scales"):
        load(made)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("align", [0, 1])
def test_grid_sample(mode: str, padding: str, align: int):
    grid = draw.uniform(-1.8, 1.8, (1, 5, 7, 2)).astype(np.float32)
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": align}
    agrees(*one_node("GridSample", 20, (X, grid), attrs))


@pytest.mark.parametrize("opset, mode, ratio", [(10, "avg", 2), (16, "max", 3), (16, "avg", 0)])
def test_roi_align(opset: int, mode: str, ratio: int):
    operands = (floats(2, 3, 7, 9), boxes(4), np.int64([0, 1, 1, 0]))
    attrs = {"mode": mode, "sampling_ratio": ratio, "output_height": 2, "output_width": 3}
    loaded = agrees(*one_node("RoiAlign", opset, operands, attrs))
    assert bool(loaded.graph.assumed) == (ratio == 0)


def test_max_roi_pool():
    rois = np.concatenate([[[0], [1], [1], [0]], boxes(4)], 1).astype(np.float32)
    attrs = {"pooled_shape": [2, 3], "spatial_scale": 0.5}
    agrees(*one_node("MaxRoiPool", 12, (floats(2, 3, 7, 9), rois), attrs))


@pytest.mark.parametrize("center", [0, 1])
@pytest.mark.parametrize("most", [0, 2, 9])
@pytest.mark.parametrize("least", [None, 0.4])
@pytest.mark.parametrize("known", [False, True])
def test_suppression(center: int, most: int, least: float | None, known: bool):
    """As long as its upper bound at load, unless everything is known."""
    scores = np.round(draw.uniform(0, 1, (2, 3, 12)), 1).astype(np.float32)
    operands = [boxes(12, 2), scores, (np.int64([most]),), np.float32([0.3])]
    operands += [] if least is None else [(np.float32([least]),)]
    attrs = {"center_point_box": center}
    loaded = agrees(*one_node("NonMaxSuppression", 11, tuple(operands), attrs, known))
    assert bool(loaded.graph.assumed) == (not known and most > 0)
    if not known:
        assert loaded.graph.outputs[0].type.shape == (2 * 3 * most, 3)


def test_a_compressed_image_is_refused():
    made, _ = one_node("ImageDecoder", 20, (np.zeros(9, np.uint8),), {})
    with pytest.raises(ModelError, match="compressed"):
        load(made)
