"""Laws of every family of formulas: however a work comes, and on whatever numbers they run."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from cost import kernels as op
from cost.test_predictors import TARGETS, raised
from cost.works import KINDS, flat, tables
from hypothesis import given
from hypothesis import strategies as st

from gpuir.cost import sized
from gpuir.cost.explain import Explained, traced
from gpuir.cost.families import FAMILIES, check_factors, family_of
from gpuir.cost.learned import Net, Trained, factors
from gpuir.cost.nest import Tiles
from gpuir.cost.reading import work_of
from gpuir.cost.tile import choose, estimate, predict
from gpuir.cost.work import Work
from gpuir.ir.errors import TargetError
from gpuir.ir.types import f16, f32
from gpuir.targets.load import load_target
from gpuir.targets.target import FrozenTable

A100 = load_target("a100")
DRAWN = st.sampled_from(TARGETS)


def numbers(w: Work) -> dict[str, float]:
    """What costs go by."""
    moved = {f"bytes {i}": o.nbytes for i, o in enumerate(w.operands)}
    cells = {f"cell {i}": o.cell_bytes for i, o in enumerate(w.operands)}
    found = {**w.extents, **moved, **cells, **flat(w.detail), "simd": w.simd_ops}
    found = {"b": 1, **found}
    return {**found, "products": w.products, "density": w.density, "lanes": w.lane_ops}


def indexed(w: Work) -> list[tuple[tuple[str, ...], str]]:
    """The dimensions of operands, but those of one index."""
    return [(tuple(d for d in o.dims if w.extents[d] != 1), o.staging) for o in w.operands]


@pytest.mark.parametrize(
    ("read", "built"),
    [
        (op.gemm(64, 96, 128, f32), sized.gemm(64, 96, 128, f32)),
        (op.gemm(64, 96, 128, f16), sized.gemm(64, 96, 128, f16)),
        (op.gemm(64, 96, 128, f16, 8), sized.gemm(64, 96, 128, f16, b=8)),
        (op.conv(2, 64, 56, 96, 3), sized.conv(2, 64, (56, 56), 96, (3, 3), f16, padding=1)),
        (
            op.conv(2, 64, 56, 96, 7, stride=2),
            sized.conv(2, 64, (56, 56), 96, (7, 7), f16, padding=3, stride=2),
        ),
        (
            op.conv(2, 64, 28, 64, 3, groups=64),
            sized.conv(2, 64, (28, 28), 64, (3, 3), f16, padding=1, groups=64),
        ),
        (op.attention(2, 8, 100, 100, 64), sized.attention(2, 8, 100, 100, 64, f16)),
        (
            op.attention(2, 8, 100, 100, 64, causal=True),
            sized.attention(2, 8, 100, 100, 64, f16, causal=True),
        ),
        (
            op.attention(2, 8, 100, 100, 64, causal=True, window=31),
            sized.attention(2, 8, 100, 100, 64, f16, causal=True, window=32),
        ),
        (
            op.attention(2, 8, 1, 4096, 128, groups=2),
            sized.attention(2, 8, 1, 4096, 128, f16, kv_heads=2),
        ),
        (op.mapped("add", f32, (64, 8), (64, 8)), sized.pointwise(512, (f32, f32), (f32,))),
        (op.softmax(64, 1000), sized.rows(64, 1000, f32, "softmax")),
        (op.gather(1000, 64, 10), sized.gather(10, 64, f32, 1000)),
    ],
)
def test_a_work_from_extents_is_that_of_the_kernel(read, built):
    found = work_of(read)
    assert numbers(found) == pytest.approx(numbers(built))
    assert indexed(found) == indexed(built)
    for field in ("kernel", "reduced", "dtype", "pipe", "accumulator_bits", "kind"):
        assert getattr(found, field) == getattr(built, field)


def test_every_family_has_a_work_here():
    drawn = [k.build(*(np.array([64.0]) for _ in k.numbers)) for k in KINDS.values()]
    found = {family_of(w, t).name for w in drawn for t in TARGETS}
    stacks = {name for name in FAMILIES if name.startswith("experts")}
    assert set(FAMILIES) - stacks <= found and found & stacks


@given(tables(), DRAWN)
def test_many_kernels_at_once_are_each_by_itself(drawn, target):
    many, *each = drawn
    at_once = predict(many, target)
    one = [predict(w, target) for w in each]
    assert at_once.time_s == pytest.approx([p.time_s[0] for p in one], rel=1e-9)
    assert at_once.low_s == pytest.approx([p.low_s[0] for p in one], rel=1e-9)
    for d, chosen in at_once.tiles.dims.items():
        assert list(chosen) == [p.tiles.dims[d][0] for p in one]


def single(tiles: Tiles) -> Tiles:
    return tiles.each(lambda n: float(np.ravel(n)[0]))


@given(tables(), DRAWN)
def test_formulas_give_the_same_on_arrays_and_traced_numbers(drawn, target):
    _, one, *_ = drawn
    tiles = single(choose(one.each(lambda n: np.array([float(n)])), target))
    one = one.each(float)
    arrays = estimate(one.each(np.atleast_1d), tiles.each(np.atleast_1d), target)
    lines = Explained()
    traces = traced(one, tiles, target, lines)
    assert float(traces.time_s) == pytest.approx(float(arrays.time_s[0]), rel=1e-9)
    assert lines.lines[-1].name == "time"


@given(tables(), DRAWN, st.lists(st.floats(1, 20), min_size=30, max_size=30))
def test_with_its_tiles_no_family_is_slower_where_every_rate_is_raised(drawn, target, raises):
    many, *_ = drawn
    tiles, fast = choose(many, target), raised(target, raises)
    before, after = (estimate(many, tiles, t).time_s for t in (target, fast))
    assert np.all(after <= before * (1 + 1e-9))


@given(tables(), DRAWN)
def test_no_correction_beats_the_peak_nor_dram(drawn, target):
    many, *_ = drawn
    family, one = family_of(many, target), np.ones(1)
    width = len(family.features)
    fastest = Net(np.zeros(width), np.ones(width), np.zeros((1, width)), 9 * one, -9 * one)
    model = {family.name: Trained({}, net=fastest)}
    time_s = estimate(many, choose(many, target, model=model), target, model=model).time_s
    moved = many.nbytes - target.l2.bytes - (target.l3.bytes if target.l3 else 0)
    if not target.is_cpu:
        least = np.maximum(moved, 0) / target.dram_bytes_per_s
        assert np.all(time_s - target.launch_s >= least * (1 - 1e-9))


@given(tables(), DRAWN)
def test_terms_are_no_less_than_nothing_and_no_more_than_the_time(drawn, target):
    e = estimate(drawn[0], choose(drawn[0], target), target)
    for term in (e.compute, e.memory, e.latency):
        assert np.all(np.isfinite(term)) and np.all(term >= 0) and np.all(term <= e.time_s)
    assert e.time_s == pytest.approx(np.maximum(e.compute, e.memory) + e.latency)


@pytest.mark.parametrize("name", FAMILIES)
def test_factors_lie_within_their_bounds_and_say_what_they_are(name):
    family = FAMILIES[name]
    assert len({f.name for f in family.factors}) == len(family.factors)
    for f in family.factors:
        assert f.low <= f.value <= f.high and f.spread >= 0 and f.what
        assert f.spread == 0 or f.value > 0  # a deviation is a ratio
    assert all(math.isfinite(v) for v in factors(family, A100, {}).values())


@pytest.mark.parametrize(
    ("path", "message"),
    [("stream.hbm shares", "did you mean hbm share"), ("streams.hbm share", "did you mean stream")],
)
def test_factors_that_no_family_has_are_refused(path: str, message: str):
    with pytest.raises(TargetError) as error:
        check_factors(replace(A100, factors=FrozenTable({path: 1.1})))
    assert message in error.value.fix
    check_factors(replace(A100, factors=FrozenTable({"stream.hbm share": 1.1})))


@pytest.mark.parametrize("name", ["a100", "t4", "h100-sxm", "mi300x", "cpu"])
@pytest.mark.parametrize(
    "kernel",
    [
        *(op.conv(0, 8, 16, 16, 3), op.conv(2, 0, 16, 16, 3), op.conv(0, 0, 0, 16, 3)),
        *(op.attention(0, 4, 16, 16, 64), op.attention(2, 4, 16, 0, 64)),
        *(op.attention(2, 4, 0, 16, 64), op.gemm(0, 8, 16), op.gemm(8, 8, 0)),
    ],
    ids=lambda kernel: str(kernel.nest.dims),
)
def test_a_kernel_of_no_cells_takes_a_launch(kernel, name):
    target = load_target(name)
    (time_s,) = np.ravel(predict(work_of(kernel), target).time_s)
    assert target.launch_s <= time_s < 100e-6
