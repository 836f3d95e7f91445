"""Sinking transposes keeps what a graph computes. What moves where: tests/golden/sink."""

from __future__ import annotations

from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpuir import interp
from gpuir.ir.build import Builder
from gpuir.ir.graph import Graph, Level, Value
from gpuir.ir.types import TensorType, f32
from gpuir.ops import tensor as t
from gpuir.stacks.table import pipeline


@st.composite
def transposed(draw: st.DrawFn) -> Graph:
    """A graph of what transposes may pass, and of some that they may not, full of transposes."""
    b = Builder(Level.graph, "g")
    shape = tuple(draw(st.lists(st.sampled_from((1, 2, 3)), min_size=2, max_size=4)))
    values = [b.input("x", TensorType(shape, f32)), b.input("z", TensorType(shape, f32))]
    weights = [b.param(f"w{n}", TensorType((n,), f32)) for n in (1, 2, 3)]
    for i in range(draw(st.integers(2, 10))):
        b.locs = (f"m:{i}",)
        x = draw(st.sampled_from(values[-3:]))
        values.append(draw(st.sampled_from(STEPS))(draw, b, x, [*values, *weights]))
    return b.finish(values[-2:])


def transpose(draw: st.DrawFn, b: Builder, x: Value, _: list[Value]) -> Value:
    return b(t.Transpose(x, draw(st.sampled_from(list(permutations(range(x.type.rank)))))))


def pointwise(draw: st.DrawFn, b: Builder, x: Value, values: list[Value]) -> Value:
    fits = [v for v in values if fit(v, x)]
    return b(t.Map("add", (x, draw(st.sampled_from(fits)))))


def fit(v: Value, x: Value) -> bool:
    """Whether v broadcasts to x."""
    ones = (1,) * (x.type.rank - v.type.rank) + v.type.shape
    return len(ones) == x.type.rank and all(
        n in (1, m) for n, m in zip(ones, x.type.shape, strict=True)
    )


def relu(draw: st.DrawFn, b: Builder, x: Value, _: list[Value]) -> Value:
    return b(t.Map("relu", (x,)))


def reduce(draw: st.DrawFn, b: Builder, x: Value, _: list[Value]) -> Value:
    axes = (draw(st.integers(0, x.type.rank - 1)),) if x.type.rank else ()
    return b(t.Reduce("sum", x, axes, draw(st.booleans()) or x.type.rank < 3))


def slice_(draw: st.DrawFn, b: Builder, x: Value, _: list[Value]) -> Value:
    starts = tuple(draw(st.integers(0, n - 1)) for n in x.type.shape)
    sizes = tuple(n - s for n, s in zip(x.type.shape, starts, strict=True))
    return b(t.Slice(x, starts, sizes, (1,) * x.type.rank))


def pad(draw: st.DrawFn, b: Builder, x: Value, _: list[Value]) -> Value:
    low = tuple(draw(st.integers(0, 1)) for _ in x.type.shape)
    return b(t.Pad(x, low, low[::-1]))


def concat(draw: st.DrawFn, b: Builder, x: Value, values: list[Value]) -> Value:
    alike = [v for v in values if v.type.shape == x.type.shape]
    axis = draw(st.integers(0, x.type.rank - 1))
    return b(t.Concat((x, draw(st.sampled_from(alike))), axis))


def softmax(draw: st.DrawFn, b: Builder, x: Value, _: list[Value]) -> Value:
    return b(t.Softmax(x, draw(st.integers(0, x.type.rank - 1))))


def ones(draw: st.DrawFn, b: Builder, x: Value, _: list[Value]) -> Value:
    """A one more or, where there are some, all of them less."""
    at = draw(st.integers(0, x.type.rank))
    more = (*x.type.shape[:at], 1, *x.type.shape[at:])
    less = tuple(n for n in x.type.shape if n != 1)
    return b(t.Reshape(x, draw(st.sampled_from((more, less or more)))))


STEPS = (
    *(transpose, transpose, transpose, pointwise, relu, reduce),
    *(slice_, pad, concat, softmax, ones, ones),
)


@given(transposed(), st.integers(0, 9))
def test_results_stay(g: Graph, seed: int):
    rng = np.random.default_rng(seed)
    values = {
        v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in (*g.inputs, *g.params)
    }
    sunk = pipeline("sink").run(g)
    before, after = interp.run(g, values), interp.run(sunk, values)
    for old, new in zip(g.outputs, sunk.outputs, strict=True):
        assert old.type == new.type
        np.testing.assert_allclose(after[new.name], before[old.name], rtol=1e-5, atol=1e-5)
