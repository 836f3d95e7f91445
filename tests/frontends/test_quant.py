"""Integer products are exact whatever the zero points are, known at load or not; blocks that do
not divide the axis; the forms that passes match."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import helper, numpy_helper  # noqa: E402

from gpuir.frontends.model import Model  # noqa: E402
from gpuir.frontends.onnx.load import load  # noqa: E402
from gpuir.interp import run  # noqa: E402
from gpuir.ir.verify import verify  # noqa: E402
from gpuir.ops import tensor as t  # noqa: E402

rng = np.random.default_rng(5)


def bytes_of(dtype: Any, *shape: int) -> np.ndarray:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


def loaded(
    op: str, operands: list[np.ndarray | None], known: tuple[int, ...], **attrs: Any
) -> tuple[Model, dict[str, np.ndarray]]:
    """One node of ai.onnx, and what its graph gives for the operands that are not known."""
    names = ["" if v is None else f"x{i}" for i, v in enumerate(operands)]
    node = helper.make_node(op, names, ["y"], **attrs)
    given = {name: v for name, v in zip(names, operands, strict=True) if v is not None}
    weights = [numpy_helper.from_array(given[names[i]], names[i]) for i in known]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for name, v in given.items()
        if int(name[1:]) not in known
    ]
    y = helper.make_empty_tensor_value_info("y")
    graph = helper.make_graph([node], "g", inputs, [y], weights)
    model = load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))
    verify(model.graph, "onnx")
    feeds = {v.name: given[v.name] for v in model.graph.inputs}
    return model, run(model.graph, {**model.weights, **feeds})


def shifted(x: np.ndarray, zero: np.ndarray | None) -> np.ndarray:
    return x.astype(np.int64) - (0 if zero is None else zero.astype(np.int64))


ZEROS = {
    "none": lambda dtype, n: None,
    "scalar": lambda dtype, n: bytes_of(dtype),
    "centre": lambda dtype, n: np.full((), 128 if dtype is np.uint8 else 0, dtype),
    "each": lambda dtype, n: bytes_of(dtype, n),
}


@pytest.mark.parametrize("known", [(), (1, 3), (1, 2, 3)], ids=["none", "weight", "zeros"])
@pytest.mark.parametrize(("a", "b"), list(product((np.uint8, np.int8), repeat=2)))
@pytest.mark.parametrize(("za", "zb"), list(product(("none", "scalar", "each"), ZEROS)))
def test_matmul_integer_is_exact(known: tuple[int, ...], a: Any, b: Any, za: str, zb: str) -> None:
    x, w = bytes_of(a, 3, 6), bytes_of(b, 6, 4)
    zx, zw = ZEROS[za](a, 3), ZEROS[zb](b, 4)
    operands = [x, w, zx, zw]
    present = tuple(i for i in known if operands[i] is not None)
    _, found = loaded("MatMulInteger", operands, present)
    rows = zx if zx is None or zx.ndim == 0 else zx[:, None]
    np.testing.assert_array_equal(found["y"], shifted(x, rows) @ shifted(w, zw))
    assert found["y"].dtype == np.int32


@pytest.mark.parametrize(
    ("a", "b"), [((6,), (6, 4)), ((3, 6), (6,)), ((6,), (6,)), ((2, 3, 6), (6, 4))]
)
def test_matmul_integer_takes_vectors(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, w = bytes_of(np.uint8, *a), bytes_of(np.uint8, *b)
    zx, zw = np.uint8(3), np.uint8(200)
    _, found = loaded("MatMulInteger", [x, w, np.asarray(zx), np.asarray(zw)], (1, 3))
    expected = np.matmul(shifted(x, zx), shifted(w, zw))
    np.testing.assert_array_equal(found["y"], expected)


def convolved(x: np.ndarray, w: np.ndarray, pad: int, groups: int) -> np.ndarray:
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    n, k, c = x.shape[0], w.shape[0], w.shape[1]
    rows, columns = x.shape[2] - w.shape[2] + 1, x.shape[3] - w.shape[3] + 1
    y = np.zeros((n, k, rows, columns), np.int64)
    for o in range(k):
        group = x[:, o // (k // groups) * c :][:, :c]
        for i, j in np.ndindex(rows, columns):
            patch = group[:, :, i : i + w.shape[2], j : j + w.shape[3]]
            y[:, o, i, j] = (patch * w[o]).sum((1, 2, 3))
    return y


@pytest.mark.slow
@pytest.mark.parametrize("known", [(), (1, 3), (1, 2, 3)], ids=["none", "weight", "zeros"])
@pytest.mark.parametrize(("pad", "groups"), [(0, 1), (1, 1), (1, 2), (1, 4)])
@pytest.mark.parametrize(("za", "zb"), list(product(("none", "scalar"), ZEROS)))
def test_conv_integer_is_exact(
    known: tuple[int, ...], pad: int, groups: int, za: str, zb: str
) -> None:
    x, w = bytes_of(np.uint8, 2, 4, 5, 5), bytes_of(np.uint8, 4, 4 // groups, 3, 3)
    zx, zw = ZEROS[za](np.uint8, 4), ZEROS[zb](np.uint8, 4)
    operands = [x, w, zx, zw]
    present = tuple(i for i in known if operands[i] is not None)
    _, found = loaded("ConvInteger", operands, present, pads=[pad] * 4, group=groups)
    each = zw if zw is None or zw.ndim == 0 else zw[:, None, None, None]
    expected = convolved(shifted(x, zx), shifted(w, each), pad, groups)
    np.testing.assert_array_equal(found["y"], expected)


def test_a_weight_around_128_is_a_signed_one() -> None:
    x, w = bytes_of(np.uint8, 3, 6), bytes_of(np.uint8, 6, 4)
    model, _ = loaded("MatMulInteger", [x, w, None, np.array(128, np.uint8)], (1, 3))
    assert [str(v.type) for v in model.graph.params] == ["i8[6, 4]"]
    assert [n.op.name for n in model.graph.nodes] == ["t.matmul"]


@pytest.mark.parametrize("known", [(), (1, 2)], ids=["none", "scales"])
@pytest.mark.parametrize(("extent", "block"), [(8, 4), (10, 4), (3, 4)])
@pytest.mark.parametrize("axis", [0, 1])
def test_blocks_need_not_divide(known: tuple[int, ...], extent: int, block: int, axis: int) -> None:
    shape = (extent, 3) if axis == 0 else (3, extent)
    count = -(-extent // block)
    blocks = (count, 3) if axis == 0 else (3, count)
    scale = np.abs(rng.standard_normal(blocks)).astype(np.float32) + 0.1
    zero = bytes_of(np.uint8, *blocks)
    wide_scale, wide_zero = (
        np.repeat(v, block, axis).take(range(extent), axis) for v in (scale, zero)
    )
    q = bytes_of(np.uint8, *shape)
    x = ((q.astype(np.float32) - wide_zero) * wide_scale).astype(np.float32)
    attrs = {"axis": axis, "block_size": block}
    _, found = loaded("DequantizeLinear", [q, scale, zero], known, **attrs)
    np.testing.assert_allclose(found["y"], x, rtol=1e-6)
    _, found = loaded("QuantizeLinear", [x, scale, zero], known, **attrs)
    np.testing.assert_array_equal(found["y"], q)


def test_the_forms_are_spelt_alike() -> None:
    """dequantise: cast, sub, mul; quantise: div, round, add, clip, cast; scalars as immediates."""
    q, scale, zero = bytes_of(np.uint8, 2, 3), np.float32(0.5), np.uint8(7)
    model, _ = loaded("DequantizeLinear", [q, np.asarray(scale), np.asarray(zero)], (1, 2))
    ops = [n.op for n in model.graph.nodes]
    assert isinstance(ops[0], t.Cast)
    assert [(op.fn, op.imm) for op in ops[1:] if isinstance(op, t.Map)] == [
        ("sub", (7.0,)),
        ("mul", (0.5,)),
    ]
    x = q.astype(np.float32)
    model, _ = loaded("QuantizeLinear", [x, np.asarray(scale), np.asarray(zero)], (1, 2))
    ops = [n.op for n in model.graph.nodes]
    assert [(op.fn, op.imm) for op in ops if isinstance(op, t.Map)] == [
        ("div", (0.5,)),
        ("round", ()),
        ("add", (7.0,)),
        ("clip", (0.0, 255.0)),
    ]
    assert isinstance(ops[-1], t.Cast) and len(ops) == 5
    plain, _ = loaded("DequantizeLinear", [q, np.asarray(scale), np.zeros((), np.uint8)], (1, 2))
    assert [n.op.name for n in plain.graph.nodes] == ["t.cast", "t.map"]
