"""Resampling, regions and suppression beyond onnx's node tests, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx_models import F32, I64, Array, agrees, info, one_node

from gpuir.frontends.model import Model
from gpuir.frontends.onnx.load import load
from gpuir.ir.errors import ModelError

draw = np.random.default_rng(5)


def floats(*shape: int) -> Array:
    return draw.standard_normal(shape).astype(np.float32)


def boxes(count: int, *lead: int) -> Array:
    low = draw.uniform(0, 8, (*lead, count, 2))
    return np.concatenate([low, low + draw.uniform(0, 8, low.shape)], -1).astype(np.float32)


def check(op: str, opset: int, operands: tuple[Any, ...], attrs: dict[str, Any]) -> Model:
    dtype = I64 if op == "NonMaxSuppression" else F32
    made = one_node(op, operands, attrs, opset=opset, outputs=[info("y0", None, dtype)])
    return agrees(*made, rtol=1e-3, atol=1e-3)


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
    check(op, opset, operands, attrs)


def test_resize_to_the_same_size_is_nothing():
    made, _ = one_node("Resize", (X, None, (np.ones(4, np.float32),)), {"mode": "linear"})
    assert [n.op.name for n in load(made).graph.nodes] == ["t.map"]  # the output's identity


def test_resize_names_what_it_needs():
    made, _ = one_node("Resize", (X, None, np.ones(4, np.float32)), {})
    with pytest.raises(ModelError, match="depends on the scales"):
        load(made)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("align", [0, 1])
def test_grid_sample(mode: str, padding: str, align: int):
    grid = draw.uniform(-1.8, 1.8, (1, 5, 7, 2)).astype(np.float32)
    attrs = {"mode": mode, "padding_mode": padding, "align_corners": align}
    check("GridSample", 20, (X, grid), attrs)


@pytest.mark.parametrize("opset, mode, ratio", [(10, "avg", 2), (16, "max", 3), (16, "avg", 0)])
def test_roi_align(opset: int, mode: str, ratio: int):
    operands = (floats(2, 3, 7, 9), boxes(4), np.int64([0, 1, 1, 0]))
    attrs = {"mode": mode, "sampling_ratio": ratio, "output_height": 2, "output_width": 3}
    loaded = check("RoiAlign", opset, operands, attrs)
    assert bool(loaded.graph.assumed) == (ratio == 0)


def test_max_roi_pool():
    rois = np.concatenate([[[0], [1], [1], [0]], boxes(4)], 1).astype(np.float32)
    attrs = {"pooled_shape": [2, 3], "spatial_scale": 0.5}
    check("MaxRoiPool", 12, (floats(2, 3, 7, 9), rois), attrs)


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
    if known:
        operands = [x if isinstance(x, tuple) else (x,) for x in operands]
    loaded = check("NonMaxSuppression", 11, tuple(operands), attrs)
    told = [a for a in loaded.graph.assumed if not a.startswith("weights take")]
    assert bool(told) == (not known and most > 0)
    if not known:
        assert loaded.graph.outputs[0].type.shape == (2 * 3 * most, 3)


def test_a_compressed_image_is_refused():
    made, _ = one_node("ImageDecoder", (np.zeros(9, np.uint8),), {}, opset=20)
    with pytest.raises(ModelError, match="compressed"):
        load(made)
