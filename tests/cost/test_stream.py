"""Streams and rows: arithmetic by hand on one kernel, and how times move with size and kind."""

from __future__ import annotations

import numpy as np
import pytest
from cost.kernels import running

from gpuir.cost import rows, stream
from gpuir.cost.families import family_of
from gpuir.cost.family import Family
from gpuir.cost.reading import work_of
from gpuir.cost.sheet import Sheet
from gpuir.cost.sized import gather, pointwise
from gpuir.cost.sized import rows as rows_of
from gpuir.cost.work import Work
from gpuir.ir.types import bf16, f8e4m3, f16, f32
from gpuir.targets.load import load_target

NAMES = ("v100-pcie-32gb", "p100-pcie-16gb", "t4", "mi210", "h100-sxm-80gb", "l4")


def values(family: Family) -> dict[str, float]:
    return {f.name: f.value for f in family.factors}


def seconds(family: Family, work: Work, name: str, **changed: float) -> tuple[np.ndarray, Sheet]:
    """The device time of works without the network, and the sheet behind it."""
    target, s = load_target(name), Sheet()
    p = values(family) | {k.replace("_", " "): v for k, v in changed.items()}
    assert set(p) == set(values(family))
    terms = family.seconds(s, work, family.choose(work, target, p), target, p)
    return np.maximum(terms.compute, terms.memory) + terms.latency, s


def test_a_large_add_takes_its_bytes_over_the_dram_rate():
    """12 bytes a cell at 0.9 of 900 GB/s, and 700 clocks of 1.38 GHz."""
    cells = 2.0**27
    time, _ = seconds(stream.FAMILY, pointwise(cells, (f32, f32), (f32,)), "v100-pcie-32gb")
    assert time == pytest.approx(12 * cells / (0.9 * 900e9) + 700 / 1.38e9, rel=2e-3)


def test_a_small_table_that_is_read_often_is_read_through_the_l2():
    """Bags of 100 rows of 256 bytes: 3.4 GB of a table of 2.6 MB, which DRAM gives once."""
    work = gather(2.0**17, 64.0, f32, 1e4, bag=100)
    time, _ = seconds(stream.FAMILY, work, "v100-pcie-32gb", cell_wait=0.0)
    l2 = load_target("v100-pcie-32gb").l2_bytes_per_s * values(stream.FAMILY)["l2 share"]
    read = 100 * 2.0**17 * 256
    assert time > read / l2
    assert time == pytest.approx((read + 2.0**17 * (256 + 800)) / l2, rel=0.05)


def test_running_sums_of_one_row_are_as_quick_as_its_bytes():
    """One pass on all SMs (cub's DeviceScan), where of several rows each is one block's: three of
    80 SMs, that draw no more than they can."""
    cells, v100 = 2**25, load_target("v100-pcie-32gb")
    (one, _), (three, _) = (
        seconds(rows.FAMILY, work_of(running(n, cells // n)), v100.name) for n in (1, 3)
    )
    assert 1 < one / (8 * cells / 900e9) < 1.4
    drawn = 3 * values(rows.FAMILY)["sm bytes"] * v100.clock_hz
    assert max(8 * cells / drawn, 8 * one) < three < 80 / 3 * one


def test_gp100_reaches_less_of_its_hbm():
    cells = 2.0**27
    work = pointwise(cells, (f32,), (f32,))
    time, _ = seconds(stream.FAMILY, work, "p100-pcie-16gb")
    assert time == pytest.approx(8 * cells / (0.8 * 0.9 * 732e9), rel=2e-3)


def test_small_operands_are_found_in_the_l2():
    cells = np.array([2.0**20, 2.0**28])
    _, s = seconds(stream.FAMILY, pointwise(cells, (bf16,), (f8e4m3,)), "h100-sxm-80gb")
    kept = s.values["found in the l2"]
    assert kept[0] > 0.99
    assert kept[1] < 0.01


def test_powers_on_amd_are_bound_by_instructions():
    """76 instructions a cell, 2.4 of AMD's for each, 64 lanes on 104 units at 1.7 GHz x 0.9."""
    cells = 2.0**26
    work = pointwise(cells, (f32,), (f32,), ops=72.0)
    time, s = seconds(stream.FAMILY, work, "mi210")
    assert s.values["instructions"] == pytest.approx(
        76 * 2.4 * cells / (64 * 104 * 1.7e9 * 0.9), rel=1e-9
    )
    assert time > s.values["dram time"] * 2


def test_a_gather_waits_for_each_cell():
    """8 blocks of 128 threads an SM, a cell a thread and wait: 2000 clocks of 1.41 GHz a wave."""
    work = gather(2048.0, 4096.0, f16, 32000.0)
    time, _ = seconds(stream.FAMILY, work, "a100-sxm-80gb")
    waves = 2048 * 4096 / (108 * 8 * 128)
    assert time == pytest.approx(waves * 2000 / 1.41e9, rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_more_takes_longer(name: str):
    cells = 2.0 ** np.arange(4, 30)
    for work in (
        pointwise(cells, (f32, f32), (f32,)),
        pointwise(cells, (f16,), (f16,), kind="scalar"),
    ):
        time, _ = seconds(stream.FAMILY, work, name)
        assert np.all(np.diff(time) >= 0)
    for kind in ("softmax", "norm", "rms", "sum"):
        work = rows_of(2.0 ** np.arange(0, 18), np.full(18, 1536.0), f32, kind)
        time, _ = seconds(rows.FAMILY, work, name)
        assert np.all(np.diff(time) >= 0)


def test_the_tiles_are_those_of_pytorch():
    """Of softmax, as the NeuSight launches say: four warps, a row or two each, to 1024 cells; then
    a block of 256 threads a row, and 512 beyond 2048 cells."""
    v100, mi100 = load_target("v100-pcie-32gb"), load_target("mi100")
    length = np.array([100.0, 500.0, 1024.0, 1026.0, 1100.0, 2051.0, 2052.0, 4096.0])
    work = rows_of(np.full(8, 1000.0), length, f32, "softmax")
    tiles = rows.choose(work, v100, {})
    assert tiles.dims["o"].tolist() == [8, 4, 4, 1, 1, 1, 1, 1]
    assert (tiles.warps * 32).tolist() == [128, 128, 128, 128, 256, 256, 512, 512]
    tiles = rows.choose(work, mi100, {})
    assert tiles.dims["o"].tolist() == [4, 2, 2, 1, 1, 1, 1, 1]
    assert (tiles.warps * 64).tolist() == [128, 128, 128, 1024, 1024, 1024, 1024, 1024]
    tiles = rows.choose(rows_of(9.0, 2048.0, f32, "norm"), v100, {})
    assert (tiles.dims["o"], tiles.dims["r"], tiles.warps) == (1, 512, 4)


def test_loads_of_a_softmax_row():
    """1100 cells by 256 threads: one chunk of vectors and 76 cells. A row that starts inside a
    vector: 256 cells, then 844 by four loads of single cells. Half of the rows of 1102 do."""
    length = np.array([1100.0, 1102.0])
    work = rows_of(np.ones(2), length, f32, "softmax")
    steps = rows.row_steps(Sheet(), work, np.full(2, 1024.0), np.full(2, 256.0))
    assert steps.tolist() == [2.0, 2 + 0.5 * (5 - 2)]


def test_rows_that_a_wave_cannot_keep_in_the_l2_come_again():
    """80 SMs of 12 blocks hold rows of 16 KiB: 15.7 MB against an L2 of 6 MB."""
    work = rows_of(np.full(2, 16384.0), np.array([512.0, 4096.0]), f32, "norm", parameters=2)
    _, s = seconds(rows.FAMILY, work, "v100-pcie-32gb")
    again = s.values["read again from dram"]
    assert again[0] < 0.05
    assert again[1] > 0.95
    assert s.values["dram bytes"][1] == pytest.approx(3 * 16384 * 4096 * 4, rel=0.02)


def test_a_sum_of_everything_is_split():
    """2**26 cells of f32 at 0.89 of 900 GB/s, by 8 blocks an SM, and some waiting."""
    work = rows_of(np.ones(1), np.full(1, 2.0**26), f32, "sum")
    assert rows.choose(work, load_target("v100-pcie-32gb"), {}).split == 640
    time, _ = seconds(rows.FAMILY, work, "v100-pcie-32gb")
    ideal = 4 * 2**26 / (0.89 * 900e9)
    assert ideal < time < 1.2 * ideal


def test_which_family():
    target = load_target("t4")
    assert family_of(pointwise(8.0, (f32,), (f32,)), target) is stream.FAMILY
    assert family_of(rows_of(8.0, 8.0, f32, "sum"), target) is rows.FAMILY
