"""Kernels in batches: each costs what it does in a batch of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cost.works import tables
from hypothesis import given
from hypothesis import strategies as st

from gpuir.cost import sized
from gpuir.cost.batch import BOUNDS, Batch, alike, best_tiles, costs_of
from gpuir.cost.nest import Tiles
from gpuir.cost.work import stacked
from gpuir.ir.errors import ModelError
from gpuir.ir.notes import Tile
from gpuir.ir.types import f16, f32
from gpuir.targets.load import load_target
from gpuir.targets.target import FrozenTable

TARGETS = (
    *("a100", "a100+sms=77+dram.bytes_per_s=2e12", "t4+clock_hz=1.2e9", "h100-sxm", "l4", "mi300x"),
    *("b200-sxm-180gb", "p4", "a30:1g.6gb"),
)
LAW = {"rel": 1e-12, "abs": 0.0}


def assert_costed_as_alone(works, target):
    costs = Batch.of(works).on(target)
    tiles = best_tiles(dict.fromkeys(works, "here"), target)
    together = costs_of([(work, tiles[work]) for work in works], target)
    for i, work in enumerate(works):
        (alone,) = costs_of([(work, tiles[work])], target)
        assert costs.time_s[i] == pytest.approx(alone.time_s, **LAW), (work, target.name)
        assert (costs.low_s[i], costs.high_s[i]) == pytest.approx(alone.interval, **LAW)
        assert alone.bound == together[i].bound == BOUNDS[costs.bound[i]]
        assert tiles[work].split == costs.split[i]
        assert alone.unseen == together[i].unseen
        for part in ("terms", "facts"):
            found, expected = dict(getattr(together[i], part)), dict(getattr(alone, part))
            assert found == pytest.approx(expected, **LAW)


@pytest.mark.slow
@given(drawn=st.lists(tables(), min_size=1, max_size=4), target=st.sampled_from(TARGETS))
def test_a_kernel_among_many_costs_what_it_does_alone(drawn, target):
    works = list(dict.fromkeys(work for _, *single in drawn for work in single))
    assert_costed_as_alone(works, load_target(target))


def test_kernels_of_several_families_on_targets_one_after_another():
    works = [sized.gemm(m, 768.0, 3072.0, f32) for m in (1.0, 77.0, 4096.0)]
    works += [sized.rows(m, 1000.0, f32, "softmax") for m in (1.0, 512.0)]
    batch = Batch.of(works)
    for target in map(load_target, TARGETS):
        assert np.array_equal(batch.on(target).time_s, Batch.of(works).on(target).time_s)
        assert_costed_as_alone(works, target)


def test_what_a_calibration_measured_nearby_holds_in_a_batch():
    works = [sized.gemm(m, 768.0, 3072.0, f32) for m in (1.0, 77.0, 4096.0)]
    point = "b=1 m=77 n=768 k=3072 bytes=9909948 flops=363331584 ops=0"
    local = replace(load_target("a100"), local=FrozenTable({f"gemm f32.{point}": 1.2}))
    assert_costed_as_alone(works, local)
    plain, moved = (Batch.of(works).on(x).time_s for x in (load_target("a100"), local))
    assert moved[1] > 1.05 * plain[1]


def test_counts_that_an_array_rounds():
    work = sized.gemm(2**22 + 1, 2**17 + 1, 2**17 + 1, f32)
    assert_costed_as_alone([work, sized.gemm(8, 8, 8, f32)], load_target("a100"))


def test_alike_are_kernels_that_differ_in_numbers_alone():
    works = [sized.gemm(m, 64.0, 64.0, dtype) for m in (1.0, 2.0) for dtype in (f16, f32)]
    assert [group.places.tolist() for group in alike(works)] == [[0, 2], [1, 3]]
    tiles = [Tiles.of(x, works[0]) for x in (Tile((("m", 8),)), Tile((("m", 16), ("n", 32))))]
    assert [t.tolist() for t in stacked(tiles).dims.values()] == [
        [1, 1],
        [8, 16],
        [64, 32],
        [64, 64],
    ]


def test_tiles_that_do_not_fit_are_searched():
    """A library's tiles ask for more shared memory than an SM of these has."""
    works = [sized.gemm(m, 768.0, n, f16) for m in (1.0, 77.0, 4096.0) for n in (64.0, 3072.0)]
    works += [sized.attention(2.0, 8.0, n, n, 64.0, f16) for n in (1.0, 32.0, 500.0)]
    target = load_target("a100+sm.smem_bytes_per_block=16e3+sm.smem_bytes=20e3")
    assert_costed_as_alone(works, target)
    usual = best_tiles(dict.fromkeys(works, ""), load_target("a100"))
    small = best_tiles(dict.fromkeys(works, ""), target)
    assert any(usual[w] != small[w] for w in works if w.kernel == "k.attention")


def test_kernels_that_no_tile_fits_are_said_beside_the_others():
    works = [sized.attention(2.0, 8.0, n, n, 64.0, f16) for n in (32.0, 500.0)]
    works += [sized.pointwise(512.0, (f32,), (f32,))]
    target = load_target("a100+sm.smem_bytes_per_block=1024+sm.smem_bytes=1024")
    found = Batch.of(works).on(target)
    assert found.failed.keys() == {0, 1} and "no tile of k.attention fits" in found.failed[0]
    assert found.time_s[2] > 0
    with pytest.raises(ModelError, match=r"^here: no tile of k\.attention fits"):
        best_tiles(dict.fromkeys(works, "here"), target)
