"""One call for one kernel, arrays for many: the public way to ask."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tuned_kernels import EXTENTS

import gpuir
from gpuir.cost.generated import matrix
from gpuir.cost.nest import Tiles, peak_of
from gpuir.cost.sized import gemm
from gpuir.ir.errors import UsageError
from gpuir.ir.types import bf16
from gpuir.targets.load import load_target
from gpuir.tune.kernels import KINDS, costed, kernel, nest


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_has_a_time_candidates_and_heuristics(name):
    k = gpuir.kernel(name, target="a100", **EXTENTS[name])
    assert k.time_s > 0 and k.bound in ("compute", "memory", "latency")
    low, high = k.interval_s or (0.0, np.inf)
    assert low <= k.time_s <= high
    best = gpuir.heuristics(k, count=4)
    assert 1 <= len(best) <= 4
    assert [r.time_s for r in best] == sorted(r.time_s for r in best)
    again = gpuir.kernel(name, target="a100", tile=best[0].tile, **EXTENTS[name])
    assert again.time_s == pytest.approx(best[0].time_s, rel=1e-9)
    assert again.cost is not None and again.cost.by in ("generated@1", "tile@2")


def test_many_at_once_are_as_each_alone():
    m = np.array([64.0, 512.0, 4096.0])
    many = gpuir.kernel("gemm", m=m, n=1024, k=1024, dtype="bf16", target="h100-sxm")
    tiles = gpuir.Tiles({"m": 64.0, "n": 128.0, "k": 64.0, "b": 1.0}, 3.0, 4.0)
    found = gpuir.predict(many, tiles)
    tile = gpuir.Tile((("m", 64), ("n", 128), ("k", 64), ("b", 1)), 3, 4)
    for i, rows in enumerate(m):
        one = gpuir.kernel(
            "gemm", m=int(rows), n=1024, k=1024, dtype="bf16", target="h100-sxm", tile=tile
        )
        assert found.time_s[i] == pytest.approx(one.time_s, rel=1e-12)
    assert (found.low_s < found.time_s).all() and (found.time_s < found.high_s).all()
    library = gpuir.predict(many)
    assert library.time_s.shape == (3,) and not any(library.reasons)


def test_parts_side_by_side_are_as_one():
    k = gpuir.kernel("gemm", m=4096, n=4096, k=4096, dtype="bf16", target="a100")
    tiles = gpuir.candidates(k)
    count = len(np.ravel(tiles.stages))
    large = tiles.each(lambda n: np.tile(np.broadcast_to(n, (count,)), 8))
    found, once = gpuir.predict(k, large), gpuir.predict(k, tiles)
    assert (found.time_s.reshape(8, -1) == once.time_s).all()
    with ThreadPoolExecutor(4) as pool:
        for other in pool.map(lambda _: gpuir.predict(k, tiles).time_s, range(8)):
            assert (other == once.time_s).all()


def test_what_is_not_legal_is_infinite_and_says_why():
    k = gpuir.kernel("gemm", m=4096, n=4096, k=4096, target="t4")
    m, stages = np.array([128.0, 128.0, 100.0, 4096.0]), np.array([2.0, 5.0, 2.0, 2.0])
    found = gpuir.predict(k, gpuir.Tiles({"m": m, "n": 128.0, "k": 32.0, "b": 1.0}, stages, 4.0))
    assert found.legal.ok.tolist() == [True, False, False, False]
    assert np.isinf(found.time_s[1:]).all() and np.isfinite(found.time_s[0])
    assert found.reasons[0] == "" and found.reasons[1] == "stages: 5 deep, at most 2"
    assert "m in steps of 16" in found.reasons[2] and "shared memory" in found.reasons[3]


def test_layouts_epilogues_and_scales():
    def made(**more):
        return gpuir.kernel("gemm", m=64, n=64, k=64, dtype="bf16", **more).work

    assert made() == gemm(64, 64, 64, bf16)
    assert made(layout="nt").operands[1].dims == ("b", "n", "k")
    assert made(epilogue=("bias", "gelu")).lane_ops > made(epilogue=("bias",)).lane_ops
    assert made(scales="block").kind == "block scales"


def all_costed(k, target, count):
    """The fastest candidates of a kernel, every one of them costed."""
    tiles = gpuir.candidates(k, target)
    found = gpuir.predict(k, tiles, target)
    places = found.order[:count].tolist()
    return [tiles.note(i) for i in places], found.time_s[places]


@pytest.mark.parametrize("target", ["h100-sxm", "a100", "t4", "mi300x"])
def test_heuristics_of_many_are_those_of_each_and_the_fastest_of_all(target):
    rng = np.random.default_rng(0)
    kernels = [gpuir.kernel(name, **extents) for name, extents in EXTENTS.items()]
    for name, extents in (
        ("attention", {"queries": 1}),
        ("attention", {"queries": 700}),
        ("rows", {"columns": 5000}),
        ("rows", {"rows": 1}),
        ("map", {"cells": 999}),
        ("gather", {"rows": 100}),
    ):
        kernels.append(gpuir.kernel(name, **EXTENTS[name] | extents))
    for y, x in ((2000, 512), (1, 4096), (33, 700)):
        axes = {"reads": [("y+i", "x"), ("i",)], "writes": [("y", "x")], "reduced": ["i"]}
        kernels.append(nest("stencil", {"y": y, "x": x, "i": 5}, **axes))
    for dtype in ("f16", "f8e4m3", "f32"):
        for _ in range(4):
            sizes = dict(zip("mnk", (2 ** rng.uniform(0, 13, 3)).astype(int).tolist()))
            kernels.append(gpuir.kernel("gemm", dtype=dtype, **sizes))
        kernels += [
            gpuir.kernel("gemm", m=sizes["m"], n=512, k=4096, b=3, dtype=dtype, layout="nt"),
            gpuir.kernel("gemm", m=0, n=512, k=4096, dtype=dtype),
            gpuir.kernel("conv", dtype=dtype, **EXTENTS["conv"]),
        ]
    many = gpuir.heuristics(kernels, target, count=20)
    for k, found in zip(kernels, many, strict=True):
        alone = gpuir.heuristics(k, target, count=20)
        assert [r.tile for r in found] == [r.tile for r in alone]
        tiles, time_s = all_costed(k, target, 20)
        assert [r.tile for r in found] == tiles
        for rows in (found, alone):
            assert [r.time_s for r in rows] == pytest.approx(time_s, rel=1e-12)
        assert [r.interval_s for r in found] == [
            pytest.approx(r.interval_s, rel=1e-12) for r in alone
        ]


def test_heuristics_of_many_may_be_of_many_targets_or_none():
    assert gpuir.heuristics([]) == []
    one, other = (gpuir.kernel("gemm", m=512, n=512, k=512, target=t) for t in ("a100", "h100-sxm"))
    assert gpuir.heuristics([one, other, one], count=2) == [
        gpuir.heuristics(k, count=2) for k in (one, other, one)
    ]


def test_all_candidates_may_be_asked_for():
    k = gpuir.kernel("gemm", m=100, n=200, k=300, target="a100")
    count = len(gpuir.candidates(k).stages)
    assert len(gpuir.heuristics(k, count=10**6)) == count


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: gpuir.heuristics([gpuir.kernel("gemm", m=1, n=1, k=1)]),
            "kernel 0 of 1: no target was given for the kernel 'gemm'",
        ),
        (
            lambda: gpuir.heuristics([gpuir.kernel("gemm", m=1, n=1, k=1), 3], "a100"),
            "kernel 1 of 2: heuristics: kernel is not a kernel",
        ),
        (
            lambda: gpuir.heuristics(gpuir.kernel("gemm", m=np.ones(3), n=1, k=1), "a100"),
            "gemm describes many kernels, by arrays",
        ),
        (lambda: gpuir.kernel("gem", m=1, n=1, k=1), "no kind of kernel has the name 'gem'"),
        (lambda: gpuir.kernel("gemm", m=1, n=1), "give k="),
        (
            lambda: gpuir.kernel("gemm", m=1, n=1, k=1, q=1),
            "this argument does not describe a gemm",
        ),
        (lambda: gpuir.kernel("gemm", m=1, n=1, k=1, dtype="f17"), "no dtype 'f17'"),
        (lambda: gpuir.kernel("gemm", m=1, n=1, k=1, layout="xy"), "no layout 'xy'"),
        (lambda: gpuir.kernel("gemm", m=1, n=1, k=1).time_s, "no target was given"),
        (lambda: gpuir.heuristics(gpuir.kernel("gemm", m=1, n=1, k=1)), "no target was given"),
        (
            lambda: gpuir.kernel(
                "gemm", m=64, n=64, k=64, target="a100", tile=gpuir.Tile((("m", 0), ("n", 64)))
            ),
            "m=0: a tile needs at least one element",
        ),
        (
            lambda: gpuir.predict(
                gpuir.kernel("gemm", m=np.ones(3), n=64, k=64, target="a100"),
                gpuir.Tiles({"m": np.ones(2)}),
            ),
            "kernels and tiles are arrays with different",
        ),
    ],
)
def test_what_is_wrong_is_said(ask, message):
    with pytest.raises(gpuir.GpuirError) as error:
        ask()
    assert message in str(error.value)


PRODUCT = {
    "dims": {"y": 1024, "x": 768, "k": 512},
    "reads": [("y", "k"), ("k", "x")],
    "writes": [("y", "x")],
    "reduced": ["k"],
}


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("dtype, part", [("c64", "f32"), ("c128", "f64")])
def test_a_nest_of_complex_numbers_is_four_real_ones(dtype: str, part: str, products: bool):
    whole = nest("mine", **PRODUCT, dtype=dtype, products=products)
    real = nest("mine", **PRODUCT, dtype=part, products=products)
    assert real.work.flops == 2 * 1024 * 768 * 512 and whole.work.flops == 4 * real.work.flops
    for target in ("h100-sxm", "a100", "l4", "v100-sxm2-16gb", "mi300x"):
        least = 4 * real.work.flops / load_target(target).peak(real.work.pipe, real.work.dtype)
        assert costed(whole, target).time_s >= least


def test_of_complex_numbers_there_is_no_softmax_and_no_order():
    for name in ("attention", "experts", "topk", "rows"):
        with pytest.raises(UsageError, match="not defined for complex numbers"):
            gpuir.kernel(name, dtype="c64", **EXTENTS[name])
    real, whole = (
        gpuir.kernel("rows", rows=8, columns=9, of="sum", dtype=d) for d in ("f32", "c64")
    )
    assert whole.work.flops == 2 * real.work.flops


@pytest.mark.parametrize(
    "target", ["h100-sxm", "a100", "l4", "rtx4090", "v100-sxm2-16gb", "mi355x"]
)
def test_no_generated_kernel_is_faster_than_its_flops_at_the_peak(target: str):
    """Under no tile, in the dtypes that lanes are slower in too."""
    device = load_target(target)
    for dtype in ("f64", "f32", "f16", "i8", "c64", "c128"):
        kernels = [
            gpuir.kernel("gemm", m=1000, n=3000, k=200, dtype=dtype),
            gpuir.kernel("conv", dtype=dtype, **EXTENTS["conv"]),
            nest("mine", **PRODUCT, dtype=dtype),
            nest(
                "stencil",
                {"y": 2000, "x": 512, "i": 5, "j": 5},
                reads=[("y+i", "x+j"), ("i", "j")],
                writes=[("y", "x")],
                reduced=["i", "j"],
                dtype=dtype,
            ),
        ]
        for k in kernels:
            tiles = gpuir.candidates(k, device)
            time_s = gpuir.predict(k, tiles, device).time_s
            assert np.nanmin(time_s) >= k.work.flops / peak_of(k.work, device)


def test_weights_of_groups_lie_along_k():
    """As vLLM's fused_moe reads them. On Hopper, 8 bits that lie across k would have no copies
    ahead (`test_bytes_that_must_be_turned_are_not_copied_ahead`)."""
    sizes = {"rows": 4096, "n": 4096, "k": 4096, "groups": 8}
    work = kernel("grouped", **sizes, dtype="i8").work
    assert work.operands[1].dims == ("b", "n", "k")
    tiles = Tiles({"b": 1.0, "m": 128.0, "n": 128.0, "k": 128.0}, 2.0, 4.0)
    found = matrix.count(work, tiles, load_target("h100-sxm")).smem_bytes
    assert found == 4 * 128 * 128
