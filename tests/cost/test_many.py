"""Many kernels at once: to the last digit what each costs alone."""

from __future__ import annotations

import numpy as np
import pytest
from cost.works import tables
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuir.cost import sized
from gpuir.cost.many import BOUNDS, XP, Batch, Exact
from gpuir.cost.tile import best_tiles, cost_of
from gpuir.ir.types import f16, f32
from gpuir.targets.load import load_target

TARGETS = (
    *("a100", "a100+sms=77+dram.bytes_per_s=2e12", "t4+clock_hz=1.2e9", "h100-sxm", "l4", "mi300x"),
    *("b200-sxm-180gb", "p4", "a30:1g.6gb"),
)


def assert_costed_as_alone(works, target):
    costs = Batch(works).on(target)
    tiles = best_tiles(dict.fromkeys(works, "here"), target)
    for i, work in enumerate(works):
        alone = cost_of(work, tiles[work], target)
        assert alone.time_s == costs.time_s[i], (work, target.name)
        assert (alone.interval is not None) == costs.knows[i]
        between = alone.interval or (alone.time_s, alone.time_s)
        assert between == (costs.low_s[i], costs.high_s[i])
        assert alone.bound == BOUNDS[costs.bound[i]]
        assert tiles[work].split == costs.split[i]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(drawn=st.lists(tables(), min_size=1, max_size=4), target=st.sampled_from(TARGETS))
def test_a_kernel_among_many_costs_what_it_does_alone(drawn, target):
    works = list(dict.fromkeys(work for _, *single in drawn for work in single))
    assert_costed_as_alone(works, load_target(target))


def test_kernels_of_several_families_on_targets_one_after_another():
    works = [sized.gemm(m, 768.0, 3072.0, f32) for m in (1.0, 77.0, 4096.0)]
    works += [sized.rows(m, 1000.0, f32, "softmax") for m in (1.0, 512.0)]
    batch = Batch(works)
    for target in map(load_target, TARGETS):
        assert np.array_equal(batch.on(target).time_s, Batch(works).on(target).time_s)
        assert_costed_as_alone(works, target)


def test_counts_that_an_array_would_round_are_costed_alone():
    work = sized.gemm(2.0**22 + 1, 2.0**17 + 1, 2.0**17 + 1, f32)
    assert Batch([work]).alone == [0]
    assert_costed_as_alone([work], load_target("a100"))


def test_powers_and_logarithms_are_those_of_pythons_floats():
    numbers = np.random.default_rng(0).uniform(1e-9, 1e9, 2000)
    exact = numbers.view(Exact)
    assert (exact**2.96).tolist() == [x**2.96 for x in numbers.tolist()]
    assert (2.96 ** (exact / 1e9)).tolist() == [2.96 ** (x / 1e9) for x in numbers.tolist()]
    import math

    assert XP.log(exact).tolist() == list(map(math.log, numbers.tolist()))
    assert XP.tanh(exact / 1e9).tolist() == [math.tanh(x / 1e9) for x in numbers.tolist()]


def test_tiles_that_do_not_fit_are_searched_together():
    """A library's tiles ask for more shared memory than an SM of these has."""
    works = [sized.gemm(m, 768.0, n, f16) for m in (1.0, 77.0, 4096.0) for n in (64.0, 3072.0)]
    works += [sized.attention(2.0, 8.0, n, n, 64.0, f16) for n in (1.0, 32.0, 500.0)]
    target = load_target("a100+sm.smem_bytes_per_block=16e3+sm.smem_bytes=20e3")
    assert_costed_as_alone(works, target)
    batch = Batch(works)
    batch.on(target)
    assert any(group.tables for group in batch.groups)
