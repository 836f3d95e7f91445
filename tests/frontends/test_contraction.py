"""Einsum, convolutions and pools beyond onnx's node tests, against numpy and onnxruntime."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from onnx_models import I64, Array, expected, info, loaded, one_node, results

from gpuir.frontends.onnx.load import load
from gpuir.ir.errors import ModelError

draw = np.random.default_rng(11)


def floats(*shape: int) -> Array:
    return draw.standard_normal(shape).astype(np.float32)


def made(op: str, arrays: list[Array], outputs: int = 1, **attrs: Any) -> Any:
    ends = [info("y0"), info("y1", None, I64)][:outputs]
    return one_node(op, arrays, attrs, opset=19, outputs=ends)[0]


def evaluate(proto: Any, arrays: list[Array]) -> tuple[list[Array], list[str]]:
    """The results, and the names of the ops it took."""
    m = loaded(proto)
    found = results(m, **{f"x{i}": x for i, x in enumerate(arrays)})
    return list(found.values()), [n.op.name[2:] for n in m.graph.nodes]


EINSUMS: list[tuple[str, list[tuple[int, ...]], str]] = [  # equation, shapes, the ops it becomes
    ("ij,jk->ik", [(2, 3), (3, 4)], "matmul"),
    ("ij,jk", [(2, 3), (3, 4)], "matmul"),
    (" i j, j k -> i k", [(2, 3), (3, 4)], "matmul"),
    ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)], "matmul"),
    ("bhid,bhjd->bhij", [(2, 3, 4, 5), (2, 3, 6, 5)], "transpose matmul"),
    ("bqhd,bkhd->bhqk", [(2, 4, 3, 5), (2, 6, 3, 5)], "transpose transpose matmul"),
    ("abc,cd,de->abe", [(2, 3, 4), (4, 5), (5, 6)], "matmul matmul"),
    ("abcd,cdef->abef", [(2, 3, 4, 5), (4, 5, 2, 3)], "reshape reshape matmul reshape"),
    ("ij,ij->ij", [(2, 3), (2, 3)], "map"),
    ("i,j->ij", [(3,), (4,)], "reshape reshape map"),
    ("i,i->", [(3,), (3,)], "map reduce"),
    ("bi,bi->b", [(3, 4), (3, 4)], "map reduce"),
    ("ij->j", [(3, 4)], "reduce"),
    ("ij->ji", [(3, 4)], "transpose"),
    ("ji", [(3, 4)], "transpose"),
    ("ii->i", [(4, 4)], "reshape slice"),
    ("ii->", [(4, 4)], "reshape slice reduce"),
    ("iji->j", [(3, 4, 3)], "transpose reshape slice reduce"),
    ("...ii->...i", [(2, 3, 3)], "reshape slice"),
    ("i...->...", [(2, 3, 4)], "reduce"),
]
RARE: list[tuple[str, list[tuple[int, ...]]]] = [
    ("ij,jk->ki", [(2, 3), (3, 4)]),
    ("ij,kj->", [(2, 3), (4, 3)]),
    ("...ij,...jk->...ik", [(2, 1, 3, 4), (5, 4, 6)]),
    ("bhwc,hkc->bhwk", [(2, 3, 4, 5), (3, 6, 5)]),
    ("bijk,bl->bl", [(2, 3, 4, 5), (2, 6)]),
    ("nchw,nc->nhw", [(2, 3, 4, 5), (2, 3)]),
    ("abcd,cdef->efab", [(2, 3, 4, 5), (4, 5, 2, 3)]),
    ("iij,jj->ij", [(3, 3, 4), (4, 4)]),
    ("ij,jk->ik", [(2, 1), (3, 4)]),
    ("i,ij,j->", [(3,), (3, 4), (4,)]),
    ("b...,b->...", [(2, 3, 4), (2,)]),
    (",ij->ij", [(), (2, 3)]),
    ("ij,->", [(1, 1), ()]),
]


@pytest.mark.parametrize("equation, shapes, ops", [*EINSUMS, *((*r, "") for r in RARE)], ids=str)
def test_einsum(equation: str, shapes: list[tuple[int, ...]], ops: str):
    arrays = [floats(*s) for s in shapes]
    (y,), found = evaluate(made("Einsum", arrays, equation=equation), arrays)
    wanted = np.einsum(equation.replace(" ", ""), *arrays)
    assert y.shape == wanted.shape
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-5)
    assert not ops or " ".join(found) == ops


@pytest.mark.parametrize("equation", ["ij->ijk", "ij,jk->ii", "i", "i1->i", "ij,jk->ik"])
def test_einsum_refuses(equation: str):
    with pytest.raises(ModelError, match="Einsum"):
        load(made("Einsum", [floats(2, 3)], equation=equation))


def windows(seed: int, op: str) -> tuple[list[Array], int, dict[str, Any]]:
    """A random convolution or pool. SAME padding of a dilated or skipping window is left out:
    onnxruntime departs from the operator's text there."""
    pick = random.Random(seed)
    rank, groups = pick.choice((1, 2, 3)), pick.choice((1, 1, 2))
    window = [pick.randint(1, 3) for _ in range(rank)]
    strides = [pick.randint(1, max(window)) for _ in range(rank)]
    attrs: dict[str, Any] = {"strides": strides}
    auto = pick.choice(("NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"))
    if auto.startswith("SAME"):
        attrs["strides"] = [min(s, w) for s, w in zip(strides, window, strict=True)]
    elif pick.random() < 0.4:
        attrs["dilations"] = [pick.randint(1, 2) for _ in range(rank)]
    if auto != "NOTSET":
        attrs["auto_pad"] = auto
    elif pick.random() < 0.6:
        attrs["pads"] = [pick.randint(0, w - 1) for w in window * 2]
    arrays = [floats(2, 2 * groups, *(pick.randint(5, 8) for _ in range(rank)))]
    if "Conv" in op:
        arrays += [floats(2 * groups, 2, *window), floats(2 * groups)]
        attrs["group"] = groups
    else:
        attrs["kernel_shape"] = window
        if auto == "NOTSET" and pick.random() < 0.5:
            attrs["ceil_mode"] = 1
    outputs = 1
    if op == "ConvTranspose":
        limits = zip(attrs["strides"], attrs.get("dilations", [1] * rank), strict=True)
        attrs["output_padding"] = [pick.randint(0, max(s, d) - 1) for s, d in limits]
    if op == "AveragePool":
        attrs["count_include_pad"] = pick.randint(0, 1)
    if op == "LpPool":
        attrs["p"] = pick.randint(1, 3)
    if op == "MaxPool":
        attrs["storage_order"], outputs = pick.randint(0, 1), 2
    return arrays, outputs, attrs


@pytest.mark.slow
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize("seed", range(30))
def test_windows(op: str, seed: int):
    arrays, outputs, attrs = windows(seed, op)
    proto = made(op, arrays, outputs, **attrs)
    try:
        wanted = expected(proto, {f"x{i}": x for i, x in enumerate(arrays)})
    except Exception as error:  # a combination it has no kernel for
        pytest.skip(str(error).splitlines()[0][:100])
    found, _ = evaluate(proto, arrays)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_bias_is_added_right_after_the_convolution():
    arrays = [floats(1, 2, 5, 5), floats(3, 2, 3, 3), floats(3)]
    _, ops = evaluate(made("Conv", arrays), arrays)
    assert ops == ["conv", "reshape", "map"]


@pytest.mark.parametrize(
    "attrs, what",
    [
        ({"kernel_shape": [2]}, "kernel_shape has the wrong length"),
        ({"kernel_shape": [2, 2], "strides": [1]}, "strides has the wrong length"),
        ({"kernel_shape": [2, 2], "strides": [0, 1]}, "must be at least 1"),
        ({"kernel_shape": [2, 2], "auto_pad": "SAME"}, "auto_pad is unknown"),
        ({}, "kernel_shape is missing"),
    ],
)
def test_windows_that_make_no_sense(attrs: dict[str, Any], what: str):
    with pytest.raises(ModelError, match=what):
        load(made("MaxPool", [floats(1, 1, 4, 4)], **attrs))
