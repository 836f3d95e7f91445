"""Quantised networks under TensorRT: products run on the codes, and mean what they meant."""

from __future__ import annotations

import numpy as np
import pytest

import gpuir
from gpuir import interp
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph
from gpuir.ir.types import f8e4m3, f32, i8, i32
from gpuir.ir.verify import verify
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.stacks.tensorrt.qdq import Qdq
from gpuir.text import parse

Q = """  %{to}.d: f32[{shape}] = t.map("div", [%{x}], imm=[{scale}]) at "m:q"
  %{to}.r: f32[{shape}] = t.map("round", [%{to}.d]) at "m:q"
  %{to}.c: f32[{shape}] = t.map("clip", [%{to}.r], imm=[-128.0, 127.0]) at "m:q"
  %{to}: i8[{shape}] = t.cast(%{to}.c, i8) at "m:q"
"""
DQ = """  %{to}.w: f32[{shape}] = t.cast(%{x}, f32) at "m:dq"
  %{to}: f32[{shape}] = t.map("mul", [%{to}.w], imm=[{scale}]) at "m:dq"
"""


def quantise(x: str, to: str, shape: str, scale: float = 0.0625) -> str:
    return Q.format(x=x, to=to, shape=shape, scale=scale)


def dequantise(x: str, to: str, shape: str, scale: float = 0.0625) -> str:
    return DQ.format(x=x, to=to, shape=shape, scale=scale)


BLOCK = (  # conv, relu, pool, conv, and what the pool gave added to it
    "graph @g {\n  in %x: f32[1, 4, 8, 8]\n"
    "  param %v: i8[8, 4, 3, 3]\n  param %vs: f32[8, 1, 1, 1]\n"
    "  param %w: i8[8, 8, 1, 1]\n  param %ws: f32[8, 1, 1, 1]\n"
    + quantise("x", "xq", "1, 4, 8, 8")
    + dequantise("xq", "xd", "1, 4, 8, 8")
    + '  %vw: f32[8, 4, 3, 3] = t.cast(%v, f32) at "m:dv"\n'
    '  %vd: f32[8, 4, 3, 3] = t.map("mul", [%vw, %vs]) at "m:dv"\n'
    "  %a: f32[1, 8, 8, 8] = t.conv(%xd, %vd, [1, 1], [1, 1], [1, 1], [1, 1])"
    ' at "m:a"\n'
    '  %b: f32[1, 8, 8, 8] = t.map("relu", [%a]) at "m:b"\n'
    '  %p: f32[1, 8, 4, 4] = t.pool("max", %b, [3, 3], [2, 2], [1, 1], [1, 1], [1, 1]) at "m:p"\n'
    + quantise("p", "pq", "1, 8, 4, 4", 0.25)
    + dequantise("pq", "pd", "1, 8, 4, 4", 0.25)
    + '  %ww: f32[8, 8, 1, 1] = t.cast(%w, f32) at "m:dw"\n'
    '  %wd: f32[8, 8, 1, 1] = t.map("mul", [%ww, %ws]) at "m:dw"\n'
    "  %c: f32[1, 8, 4, 4] = t.conv(%pd, %wd, [1, 1], [0, 0], [0, 0], [1, 1])"
    ' at "m:c"\n'
    '  %s: f32[1, 8, 4, 4] = t.map("add", [%c, %pd]) at "m:s"\n'
    + quantise("s", "sq", "1, 8, 4, 4", 0.5)
    + dequantise("sq", "y", "1, 8, 4, 4", 0.5)
    + "  out %y\n}\n"
)
ROWS = (
    "graph @g {\n  in %x: f32[4, 16]\n  param %w: i8[8, 16]\n  param %ws: f32[8, 1]\n"
    + quantise("x", "xq", "4, 16")
    + dequantise("xq", "xd", "4, 16")
    + '  %ww: f32[8, 16] = t.cast(%w, f32) at "m:dw"\n'
    '  %wd: f32[8, 16] = t.map("mul", [%ww, %ws]) at "m:dw"\n'
    '  %wt: f32[16, 8] = t.transpose(%wd, [1, 0]) at "m:y"\n'
    '  %y: f32[4, 8] = t.matmul(%xd, %wt) at "m:y"\n  out %y\n}\n'
)


def made(g: Graph) -> Graph:
    found = Qdq().run(g)
    verify(found)
    return found


def products(g: Graph) -> list[tuple[object, ...]]:
    return [
        (*(v.type.dtype for v in n.op.operands), n.results[0].type.dtype)
        for n in g.nodes
        if n.op.contraction
    ]


def some(g: Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    values: dict[str, np.ndarray] = {}
    for v in (*g.inputs, *g.params):
        if v.type.dtype == i8:
            values[v.name] = rng.integers(-100, 100, v.type.shape, np.int8)
        else:
            values[v.name] = rng.uniform(0.001, 0.01, v.type.shape).astype(np.float32)
    values["x"] = rng.standard_normal(g.inputs[0].type.shape).astype(np.float32)
    return values


@pytest.mark.parametrize("text", (BLOCK, ROWS))
def test_products_run_on_codes_and_mean_what_they_meant(text: str):
    g = parse(text)
    found = made(g)
    assert products(found) and set(products(found)) == {(i8, i8, i32)}
    (was,), (now,) = (interp.run(h, some(g)).values() for h in (g, found))
    assert np.abs(was).max() > 0.1
    assert np.allclose(was, now, rtol=1e-5, atol=1e-5)


def test_what_lies_between_convolutions_are_codes():
    """A residual is read as codes by the convolution that adds it, and the pool is of codes."""
    nodes = gpuir.lower(parse(BLOCK), profile="tensorrt").nodes
    (pool,) = (n for n in nodes if isinstance(n.op, k.Pool))
    first, second = (n for n in nodes if isinstance(n.op, k.Conv))
    assert pool.results[0].type.dtype == i8
    assert first.results[0].type.dtype == i8
    big = [v.type.dtype for v in second.op.operands if v.type.size == 128]
    assert big and set(big) == {i8}


@pytest.mark.parametrize(
    ("old", "new"),
    (
        ("param %ws: f32[8, 1]", "param %ws: f32[16]"),  # a scale for each number that is summed
        ("param %ws: f32[8, 1]", "param %ws: f32[8, 16]"),
        ("%w: i8[8, 16]", "%w: u8[8, 16]"),  # not what TensorRT has
    ),
)
def test_other_scales_and_codes_stay_as_they_are(old: str, new: str):
    assert old in ROWS
    g = parse(ROWS.replace(old, new))
    assert set(products(made(g))) == {(f32, f32, f32)}


def test_floats_of_8_bits_are_summed_in_f32():
    text = ROWS.replace("i8", "f8e4m3").replace("-128.0, 127.0", "-448.0, 448.0")
    assert products(made(parse(text))) == [(f8e4m3, f8e4m3, f32)]


def test_a_pool_that_others_read_is_not_of_codes():
    g = parse(BLOCK.replace("  out %y\n", "  out %y, %p\n"))
    pools = [n for n in made(g).nodes if isinstance(n.op, t.Pool)]
    assert [n.results[0].type.dtype for n in pools] == [f32]


def test_floats_of_8_bits_need_a_gpu_that_has_them():
    g = parse(ROWS.replace("i8", "f8e4m3").replace("-128.0, 127.0", "-448.0, 448.0"))
    assert gpuir.analyze(g, "l4", profile="tensorrt").latency_s > 0
    with pytest.raises(UsageError, match="does not run f8e4m3"):
        gpuir.analyze(g, "a30", profile="tensorrt")
