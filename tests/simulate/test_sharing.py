"""Models that share a GPU: speeds, queues, and what is lost to what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuir.simulate.sharing import POWER, Load, SharedResources, Tenant, simulate, speeds

NONE = SharedResources({}, 0.0)


def tenant(name: str = "a", time_s: float = 0.01, load: Load | None = None, **more) -> Tenant:
    return Tenant(name, load or Load(), time_s, more.pop("needs", {}), **more)


# ---- speeds -------------------------------------------------------------------------------------


def test_what_fits_runs_at_full_speed():
    found = speeds([tenant(needs={"dram": 0.4}), tenant(needs={"dram": 0.6})], NONE)
    assert [x.of for x in found] == [1.0, 1.0] and all(not x.lost for x in found)


def test_equal_users_share_equally():
    found = speeds([tenant(needs={"sm": 1.0})] * 4, NONE)
    assert [x.of for x in found] == pytest.approx([0.25] * 4)
    assert found[0].lost == pytest.approx({"sm": 3.0})


def test_who_uses_little_of_it_loses_little():
    much, little = speeds([tenant(needs={"dram": 0.9}), tenant(needs={"dram": 0.3})], NONE)
    assert 0.9 * much.of + 0.3 * little.of == pytest.approx(1.0)
    assert little.of > 0.9 > much.of > 0.75


def test_time_slices_lose_what_switching_takes():
    common = SharedResources({}, 0.1)
    two = [tenant(needs={"time": 1.0}, sliced="time")] * 2
    assert [x.of for x in speeds(two, common)] == pytest.approx([0.45, 0.45])
    assert speeds(two[:1], common)[0].of == 1.0


def test_limits_of_the_host():
    four = [tenant(needs={"host": 0.5})] * 4
    assert speeds(four, SharedResources({"host": 2.0}, 0.0))[0].of == pytest.approx(1.0)
    assert speeds(four, SharedResources({"host": 1.0}, 0.0))[0].of == pytest.approx(0.5)


def test_power_slows_the_clock_of_all():
    two = [tenant(watts=100.0), tenant(watts=100.0)]
    found = speeds(two, SharedResources({}, 0.0, watts={"": 128.0}, bend=0.5))
    assert [x.of for x in found] == pytest.approx([0.8, 0.8])
    assert found[0].lost == pytest.approx({POWER: 0.25})
    assert speeds(two[:1], SharedResources({}, 0.0, watts={"": 128.0}))[0].of == 1.0


def test_each_board_has_its_own_power():
    some = [tenant(watts=100.0, board="a"), tenant(watts=100.0, board="a"), tenant(board="b")]
    found = speeds(some, SharedResources({}, 0.0, watts={"a": 100.0, "b": 10.0}))
    assert [x.of for x in found] == pytest.approx([0.5, 0.5, 1.0])


needs = st.dictionaries(st.sampled_from(["sm", "dram", "host"]), st.floats(0.01, 1.0))


@given(st.lists(needs, min_size=1, max_size=6))
def test_speeds_use_no_more_than_there_is(some):
    found = speeds([tenant(needs=x) for x in some], NONE)
    for resource in ("sm", "dram", "host"):
        used = sum(v.of * x.get(resource, 0.0) for v, x in zip(found, some, strict=True))
        assert used <= 1.0 + 1e-3
    for speed in found:
        assert 0 < speed.of <= 1.0
        assert 1 / speed.of == pytest.approx(1 + sum(speed.lost.values()))


@given(st.lists(needs, min_size=1, max_size=4), needs)
def test_one_more_makes_nobody_faster_in_all(some, one):
    alone = speeds([tenant(needs=x) for x in some], NONE)
    beside = speeds([tenant(needs=x) for x in (*some, one)], NONE)
    slower = sum(1 / x.of for x in beside[:-1])
    assert slower >= sum(1 / x.of for x in alone) * (1 - 1e-3)


# ---- queues -------------------------------------------------------------------------------------


def test_queue_of_fixed_service_waits_as_the_formula_says():
    """M/D/1: the mean wait is rho / (2 (1 - rho)) services (Pollaczek and Khinchine)."""
    (one,) = simulate([tenant(load=Load(70.0))], NONE, requests=40_000, seed=3)
    assert one.rate == pytest.approx(70, rel=0.03)
    assert one.mean_s == pytest.approx(0.01 * (1 + 0.7 / (2 * 0.3)), rel=0.06)
    assert one.keeps_up and one.in_time


def test_queue_equals_that_of_the_same_arrivals_by_lindley():
    """Waits by Lindley's recursion (1952): w' = max(0, w + service - gap)."""
    (one,) = simulate([tenant(load=Load(80.0))], NONE, requests=2000, seed=5)
    seeds = np.random.default_rng(5)
    gaps = np.random.default_rng(seeds.integers(1 << 32))
    drawn = np.concatenate([gaps.exponential(1 / 80.0, 256) for _ in range(10)])
    waits = [0.0]
    for gap in drawn[1:2000]:
        waits.append(max(0.0, waits[-1] + 0.01 - gap))
    assert one.latencies_s == pytest.approx(np.array(waits[200:2000]) + 0.01)


def test_overload_is_not_in_time():
    (one,) = simulate([tenant(load=Load(120.0, 1.0))], NONE, requests=1000)
    assert not one.keeps_up and not one.in_time
    assert one.rate == pytest.approx(100, rel=0.01)


def test_hopeless_overload_ends():
    (one,) = simulate([tenant(load=Load(1e6))], NONE, requests=500)
    assert not one.keeps_up and one.rate == pytest.approx(100, rel=0.01)


def test_deadline_is_of_99_percent():
    load = Load(50.0, 0.03)
    (one,) = simulate([tenant(load=load)], NONE, requests=5000)
    assert one.in_time == (one.percentile_s(99) <= 0.03)
    (late,) = simulate([tenant(load=Load(50.0, 0.011))], NONE, requests=5000)
    assert late.keeps_up and not late.in_time


def test_turns_are_one_at_a_time():
    some = [tenant(str(i), turn="gpu") for i in range(4)]
    found = simulate(some, NONE, requests=400)
    assert [x.rate for x in found] == pytest.approx([25.0] * 4)
    assert [x.waiting_s for x in found] == pytest.approx([0.03] * 4, rel=0.05)


def test_loops_beside_each_other_share_the_device():
    some = [tenant(str(i), needs={"time": 0.8}, sliced="time") for i in range(4)]
    found = simulate(some, SharedResources({}, 0.1), requests=400)
    assert sum(x.rate * 0.008 for x in found) == pytest.approx(0.9)
    assert found[0].lost["time"] == pytest.approx(1 / (found[0].rate * 0.01) - 1, rel=0.01)


def test_model_that_nobody_asks_takes_nothing():
    idle, busy = simulate(
        [tenant("idle", load=Load(0.0), needs={"sm": 1.0}), tenant("busy", needs={"sm": 1.0})],
        NONE,
    )
    assert idle.rate == 0 and idle.in_time
    assert busy.rate == pytest.approx(100)


def test_same_seed_same_numbers():
    some = [tenant(load=Load(60.0)), tenant("b", needs={"x": 0.5}, load=Load(20.0))]
    one, again = (simulate(some, NONE, requests=500, seed=7) for _ in range(2))
    assert [x.mean_s for x in one] == [x.mean_s for x in again]
    other = simulate(some, NONE, requests=500, seed=8)
    assert one[0].mean_s != other[0].mean_s
