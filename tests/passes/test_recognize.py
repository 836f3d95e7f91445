"""What `recognize` finds means what it replaces; each spelling is a file in tests/golden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from calls import calls

from gpuir import interp
from gpuir.ir.build import Builder
from gpuir.ir.graph import Graph, Level, Value
from gpuir.ir.types import DType, TensorType, bool_, f16, f32
from gpuir.ir.verify import verify
from gpuir.ops import tensor as t
from gpuir.passes.recognize import Recognize
from gpuir.text import parse

GOLDEN = Path(__file__).parents[1] / "golden" / "recognize"
FILES = sorted(GOLDEN.glob("*.gir"))


def arrays(g: Graph) -> dict[str, np.ndarray]:
    """Random numbers for inputs and params. Masks show every row its first keys."""
    rng = np.random.default_rng(0)
    found = {}
    for v in (*g.inputs, *g.params):
        shape, dtype = v.type.shape, interp.to_numpy_dtype(v.type.dtype)
        if v.type.dtype.kind == "bool":
            seen = np.indices(shape)[-1] < 6 if shape else np.array(True)
            found[v.name] = ~seen if v.name == "hidden" else seen
        else:
            found[v.name] = rng.standard_normal(shape).astype(dtype)
    return found


def same(before: Graph, after: Graph, values: dict[str, np.ndarray], rtol: float) -> None:
    verify(after, by="recognize")
    assert [(v.name, v.type) for v in after.outputs] == [(v.name, v.type) for v in before.outputs]
    expected, found = interp.run(before, values), interp.run(after, values)
    for name, array in expected.items():
        a, b = array.astype(np.float64), found[name].astype(np.float64)
        np.testing.assert_allclose(b, a, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("file", FILES, ids=[f.stem for f in FILES])
def test_keeps_meaning(file: Path) -> None:
    g = parse(file.read_text().partition("# gives:")[0])
    narrow = any(v.type.dtype == f16 for v in g.inputs)
    same(g, Recognize().run(g), arrays(g), 2e-3 if narrow else 2e-5)


@pytest.mark.parametrize("file", FILES, ids=[f.stem for f in FILES])
def test_finds_nothing_more_the_second_time(file: Path) -> None:
    once = Recognize().run(parse(file.read_text().partition("# gives:")[0]))
    assert Recognize().run(once) == once


def test_a_row_that_hides_every_key_stays_uniform() -> None:
    g = parse((GOLDEN / "attention_scores_set_low.gir").read_text().partition("# gives:")[0])
    values = arrays(g) | {"seen": np.zeros((2, 1, 1, 10), bool)}
    same(g, Recognize().run(g), values, 1e-6)


def scored(dtype: DType, scale: str, mask: str, tf32: str) -> Graph:
    """Attention in primitives: its scores scaled by a `mul` or `div`, then masked."""
    b = Builder(Level.graph, "g")
    q, key, v = (b.input(name, TensorType((2, 4, 16, 64), dtype)) for name in "qkv")
    b.locs = ("m:a",)
    x = b(t.Matmul(q, b(t.Transpose(key, (0, 1, 3, 2)))))
    if scale in ("mul", "div"):
        x = b(t.Map(scale, (x,), (8.0,)))
    if mask == "add":
        x = b(t.Map("add", (x, b.input("mask", TensorType((2, 1, 1, 16), dtype)))))
    if mask == "where":
        seen = b.input("seen", TensorType((1, 1, 16, 16), bool_))
        x = b(t.Map("where", (seen, x), (-1e9 if dtype == f32 else -6e4,)))
    return replace(b.finish([b(t.Matmul(b(t.Softmax(x, 3)), v))]), profile=f"eager+tf32={tf32}")


@pytest.mark.parametrize(
    "dtype, tf32, scale, masks",
    [  # the masks with which torch 2.13 on CUDA finds attention
        (f16, "none", "mul", ["no"]),
        (f16, "none", "div", ["no", "add"]),
        (f16, "none", "none", []),
        (f32, "products", "mul", ["no"]),
        (f32, "products", "div", ["no", "add"]),
        (f32, "products", "none", ["no", "add"]),
        (f32, "conv", "mul", []),
        (f32, "none", "div", []),
    ],
)
def test_attention_as_inductor_finds_it(
    dtype: DType, tf32: str, scale: str, masks: list[str]
) -> None:
    found = Recognize("all -attention sdpa")
    for mask in ("no", "add", "where"):
        ops = {n.op.name for n in found.run(scored(dtype, scale, mask, tf32)).nodes}
        assert ("t.attention" in ops) == (mask in masks), mask


def layers(count: int) -> Graph:
    """Blocks of attention, norm and gelu in primitives: some 35 nodes each."""
    b = Builder(Level.graph, "blocks")
    x = b.input("x", TensorType((2, 4, 6, 8), f32))
    w = b.param("w", TensorType((8,), f32))

    def map_(fn: str, *args: Value, imm: Sequence[float] = ()) -> Value:
        return b(t.Map(fn, args, tuple(imm)))

    for i in range(count):
        b.locs = (f"m:{i}",)
        key = b(t.Transpose(map_("mul", x, imm=(0.5,)), (0, 1, 3, 2)))
        score = map_("exp", map_("mul", b(t.Matmul(x, key)), imm=(0.3,)))
        share = map_("div", score, b(t.Reduce("sum", score, (3,), True)))
        x = map_("add", x, b(t.Matmul(share, x)))
        c = map_("sub", x, b(t.Reduce("mean", x, (3,), True)))
        var = b(t.Reduce("mean", map_("mul", c, c), (3,), True))
        x = map_("mul", map_("mul", c, map_("rsqrt", map_("add", var, imm=(1e-5,)))), w)
        gate = map_("add", map_("erf", map_("div", x, imm=(2**0.5,))), imm=(1.0,))
        x = map_("mul", map_("mul", x, gate), imm=(0.5,))
    return b.finish([x])


def test_works_in_proportion() -> None:
    def work(count: int) -> int:
        g = layers(count)
        made = calls(lambda: Recognize().run(g))
        after = Recognize().run(g)
        found = [n.op.name for n in after.nodes]
        assert found.count("t.attention") == found.count("t.normalize") == count
        assert len(after.nodes) == 4 * count
        return made

    assert work(160) < 8.2 * work(20)
