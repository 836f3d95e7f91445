"""Experts one after another, as eager PyTorch runs those of Switch Transformer."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import gpuir
from gpuir import interp
from gpuir.ir.build import Builder
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Graph, Level
from gpuir.ir.types import TensorType, f32, i64
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.simulate.timeline import timeline
from gpuir.targets.profile import load_profile

TOKENS, HIDDEN, INTER = 6, 4, 8


def mixture(each: tuple[int, ...], fn: str = "relu", gradient: bool = False, k: int = 1) -> Graph:
    b = Builder(Level.graph, "m")
    x = b.input("x", TensorType((TOKENS, HIDDEN), f32))
    which = b.input("which", TensorType((TOKENS, k), i64))
    shares = b.input("shares", TensorType((TOKENS, k), f32))
    up = b.param("up", TensorType((3, INTER, HIDDEN), f32))
    down = b.param("down", TensorType((3, HIDDEN, INTER), f32))
    b.locs = ("m:mix",)
    y = b(t.Experts(x, which, shares, up, down, fn=fn, each=each))
    if not gradient:
        return b.finish((y,))
    dy = b.input("dy", y.type)
    b.locs = ("m:mix/backward",)
    made = b.add(t.ExpertsGradient(dy, x, which, shares, up, down, fn=fn, each=each))
    return b.finish((y, *made))


def arrays(g: Graph, which: list[int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {
        v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in (*g.inputs, *g.params)
    }
    return found | {"which": np.array(which)[:, None]}


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    ("each", "which"),
    [
        ((2, 2, 2), [2, 0, 1, 1, 0, 2]),
        ((0, 3, 0), [1, 7, 1, 7, 7, 1]),
        ((2, 0, 2), [0, 2, 9, 9, 2, 0]),
    ],
)
def test_it_means_the_same_where_as_many_rows_come(each, which, gradient: bool):
    g = mixture(each, gradient=gradient)
    apart = gpuir.pipeline("experts_apart").run(g)
    assert not any(isinstance(n.op, t.Experts | t.ExpertsGradient) for n in apart.nodes)
    assert [v.type for v in apart.outputs] == [v.type for v in g.outputs]
    values = arrays(g, which)
    for a, b in zip(
        interp.run(apart, values).values(), interp.run(g, values).values(), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_each_expert_with_rows_is_launches_of_its_own():
    for each, experts in (((2, 2, 2), 3), ((0, 6, 0), 1)):
        kernels = gpuir.lower(mixture(each), profile="eager").nodes
        count = Counter(n.op.name for n in kernels)
        assert count["k.gemm"] == 2 * experts and count["k.routine"] == experts
        assert count["k.gather"] == 2 * experts and count["k.scatter"] == experts
        assert "k.experts" not in count
        rows = {n.op.nest.dims["m"] for n in kernels if isinstance(n.op, k.Gemm)}
        assert rows == {max(each)}


def test_the_host_waits_for_how_many_rows_each_gets():
    costed = gpuir.analyze(mixture((2, 2, 2)), "a100", profile="eager").graph
    launches = timeline(costed, load_profile("eager")).launches
    assert sum(x.waits for x in launches) == 3


@pytest.mark.parametrize(
    "other",
    [
        lambda: mixture(()),
        lambda: mixture((1, 2, 3)),
        lambda: mixture((2, 2, 2), k=2),
    ],
)
def test_others_stay_whole(other):
    assert gpuir.pipeline("experts_apart").run(other()) == other()


def test_rows_of_each_are_counted():
    (half,), (all_,) = mixture((1, 1, 1)).nodes, mixture(()).nodes
    assert 2 * half.op.flops() == all_.op.flops()
    with pytest.raises(ModelError, match="the rows of each expert are not valid"):
        mixture((4, 4, 4))
    with pytest.raises(ModelError, match="the rows of each expert are not valid"):
        mixture((1, 1))
    g = mixture((0, 3, 0))
    assert gpuir.show(gpuir.parse(gpuir.show(g))) == gpuir.show(g)
    assert "each=[0, 3, 0]" in gpuir.show(g)
