"""Kernels on matrix units that no library has: nests of one's own, kernels of plug-ins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuir
from gpuir.cost.batch import best_tiles, costs_of
from gpuir.cost.explain import explained
from gpuir.cost.products import as_product, roles_of
from gpuir.cost.reading import work_of
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Access, Space, Value
from gpuir.ir.notes import Tile
from gpuir.ir.types import TensorType, f16
from gpuir.ops import kernel as k
from gpuir.targets.load import load_target
from gpuir.tune.kernels import costed, nest

GPUS = ("h100-sxm", "a100", "mi300x", "t4", "b200")


def product(m: int, n: int, depth: int, **more):
    dims = {"m": m, "n": n, "k": depth}
    reads, writes = [("m", "k"), ("k", "n")], [("m", "n")]
    return nest("mine", dims, reads=reads, writes=writes, reduced=["k"], dtype="f16", **more)


@pytest.mark.parametrize("target", GPUS)
def test_a_nest_of_products_runs_on_the_matrix_units(target: str):
    tile = Tile((("m", 128), ("n", 128), ("k", 32)), 2, 4)
    gemm = gpuir.kernel("gemm", m=4096, n=4096, k=4096, target=target, tile=tile)
    on_matrix = costed(product(4096, 4096, 4096, products=True), target, tile)
    assert on_matrix.time_s == pytest.approx(gemm.time_s, rel=0.01)
    assert on_matrix.interval_s == pytest.approx(gemm.interval_s, rel=0.01)
    on_lanes = costed(product(4096, 4096, 4096), target)
    assert on_lanes.time_s > 3 * on_matrix.time_s
    best = costed(product(4096, 4096, 4096, products=True), target)
    assert best.time_s <= on_matrix.time_s
    assert best.time_s == pytest.approx(gpuir.heuristics(gemm, count=1)[0].time_s, rel=0.01)


def test_where_there_are_none_the_lanes_multiply():
    p100 = costed(product(2048, 2048, 2048, products=True), "p100")
    assert p100.time_s == pytest.approx(costed(product(2048, 2048, 2048), "p100").time_s)


def test_what_is_besides_the_products_counts():
    tile = Tile((("m", 128), ("n", 128), ("k", 64)), 3, 4)
    plain = costed(product(4096, 4096, 512, products=True), "h100-sxm", tile)
    more = costed(product(4096, 4096, 512, products=True, ops=0.5), "h100-sxm", tile)
    assert more.time_s > 1.01 * plain.time_s
    assert more.work.flops == plain.work.flops + 0.5 * 4096 * 4096 * 512


@given(
    st.lists(st.sampled_from([2, 3, 8, 16, 50]), min_size=2, max_size=2),
    st.sampled_from([64, 256, 1000]),
    st.sampled_from([64, 512]),
)
def test_loops_that_are_rows_together_cost_as_one(yx: list[int], n: int, depth: int):
    y, x = yx
    many = nest(
        "pixels", {"y": y, "x": x, "n": n, "c": depth},
        reads=[("y", "x", "c"), ("c", "n")], writes=[("y", "x", "n")], reduced=["c"],
        dtype="f16", products=True,
    )  # fmt: skip
    flat = product(y * x, n, depth, products=True)
    tile = gpuir.Tiles({"y": 1.0 * y, "x": 1.0 * x, "n": 64.0, "c": 64.0})
    one = gpuir.Tiles({"m": 1.0 * y * x, "n": 64.0, "k": 64.0})
    made, tiles = as_product(many.work, tile)
    assert made.extents["m"] == y * x == tiles.dims["m"] and made.nbytes == flat.work.nbytes
    times = gpuir.predict(many, tile, "a100"), gpuir.predict(flat, one, "a100")
    np.testing.assert_allclose(times[0].time_s, times[1].time_s)


def test_a_convolution_of_one_s_own():
    """As an implicit GEMM: rows are pixels, the sum goes over channels and the window."""
    conv = nest(
        "conv", {"y": 56, "x": 56, "o": 64, "i": 3, "j": 3, "c": 64},
        reads=[("y+i", "x+j", "c"), ("i", "j", "c", "o")], writes=[("y", "x", "o")],
        reduced=["i", "j", "c"], dtype="f16", products=True,
    )  # fmt: skip
    roles = roles_of(conv.work)
    assert roles is not None
    assert (roles.rows, roles.columns, roles.summed) == (("y", "x"), ("o",), ("i", "j", "c"))
    found = gpuir.search(conv, "a100")
    assert (
        found.best[0].time_s
        < 3
        * gpuir.kernel(
            "conv", batch=1, channels=64, size=56, filters=64, window=3, padding=1, target="a100"
        ).time_s
    )


@pytest.mark.parametrize(
    "reads",
    [
        [("y+i", "x+j"), ("i", "j")],  # a stencil: the window has no loop of its own in the result
        [("y", "i"), ("i", "x"), ("i", "j")],
        [("y", "x")],
    ],
)
def test_what_is_no_product_says_so(reads: list[tuple[str, ...]]):
    with pytest.raises(UsageError, match="is no product") as error:
        nest(
            "f", {"y": 64, "x": 64, "i": 3, "j": 3}, reads=reads, writes=[("y", "x")],
            reduced=["i", "j"], products=True,
        )  # fmt: skip
    assert "two reads with a reduced loop" in error.value.expected and error.value.fix


def test_nests_have_candidates_of_their_own():
    stencil = nest(
        "stencil", {"y": 4096, "x": 4096, "i": 5, "j": 5},
        reads=[("y+i", "x+j"), ("i", "j")], writes=[("y", "x")], reduced=["i", "j"], kept=[1],
    )  # fmt: skip
    best = gpuir.heuristics(stencil, "a100", count=3)
    assert len(best) == 3 and best[0].time_s <= best[1].time_s
    assert costed(stencil, "a100").time_s == pytest.approx(best[0].time_s)
    assert gpuir.predict(stencil, None, "a100").time_s == pytest.approx(best[0].time_s)
    assert gpuir.search(stencil, "a100").best[0].time_s <= best[0].time_s * (1 + 1e-9)


@dataclass(frozen=True)
class Mine(k.KernelOp):
    """y[y, x, n] = sum over c of a[y, x, c] b[c, n], on the matrix units."""

    name: ClassVar[str] = "k.mine"
    pipe: ClassVar[Literal["tensor", "vector"]] = "tensor"
    a: Value
    b: Value

    def types(self) -> tuple[TensorType, ...]:
        return (TensorType((*self.a.type.shape[:2], self.b.type.shape[1]), f16),)

    def flops(self) -> int:
        return 2 * self.a.type.size * self.b.type.shape[1]

    def space(self) -> Space:
        (y, x, c), n = self.a.type.shape, self.b.type.shape[1]
        reads = (Access(self.a.type, ("y", "x", "c")), Access(self.b.type, ("c", "n")))
        writes = (Access(self.result_types[0], ("y", "x", "n")),)
        return Space({"y": y, "x": x, "n": n, "c": c}, reads, writes, ("c",))


@pytest.mark.parametrize("name", GPUS)
def test_a_kernel_of_a_plug_in_runs_on_its_pipe(name: str):
    op = Mine(
        Value("a", TensorType((64, 64, 4096), f16)), Value("b", TensorType((4096, 4096), f16))
    )
    target, work = load_target(name), work_of(op)
    tile = best_tiles({work: "x"}, target)[work]
    (cost,) = costs_of([(work, tile)], target)
    gemm = gpuir.kernel("gemm", m=4096, n=4096, k=4096, target=name)
    assert cost.time_s == pytest.approx(gemm.time_s, rel=0.15)
    assert cost.interval is not None and cost.interval[1] > 1.3 * cost.time_s
    assert "kind" in cost.unseen
    lines = {x.name: x.value for x in explained(op, tile, target, cost, None)}
    assert lines["time"] == pytest.approx(cost.time_s)
