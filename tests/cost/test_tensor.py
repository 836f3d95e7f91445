"""Products on matrix units: what bounds them, the tiles they take, and measured times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpuir.cost import tensor
from gpuir.cost.families import family_of
from gpuir.cost.sheet import Sheet
from gpuir.cost.sized import gemm
from gpuir.cost.tile import needs, predict
from gpuir.cost.work import BY_CELL, Looped, Timed, Work
from gpuir.ir.errors import TargetError
from gpuir.ir.types import bf16, f8e4m3, f16, i8
from gpuir.targets.load import load_target, target_names

A100 = load_target("a100-sxm-80gb")
H100 = load_target("h100-sxm-80gb")
B200 = load_target("b200-sxm-180gb")
L40S = load_target("l40s")
FACTORS = {f.name: f.value for f in tensor.FACTORS}


def chosen(work: Work, target=H100):
    return tensor.choose(work, target, FACTORS)


def terms(work: Work, target=H100):
    s = Sheet()
    return tensor.seconds(s, work, chosen(work, target), target, FACTORS), s.values


def test_a_thin_product_streams_its_weights():
    found, _ = terms(gemm(1, 16384, 16384, bf16))
    weights_s = 16384 * 16384 * 2 / (H100.dram_bytes_per_s * FACTORS["dram share HBM3"])
    assert found.memory == pytest.approx(weights_s, rel=1e-2)
    assert found.memory > 3 * found.compute


def test_a_large_product_runs_at_the_power_of_the_board():
    """H100's peak is listed for 1.83 GHz, the joules for 1.41: at the higher voltage they are the
    ratio of the clocks to the power of 1 / bend - 1."""
    found, values = terms(gemm(8192, 8192, 8192, bf16))
    bend = FACTORS["power bend"]
    joules = FACTORS["joules wgmma"] * 1e-12 * (H100.tensor_clock_hz / 1.41e9) ** (1 / bend - 1)
    busy, slower = values["busiest SM"], values["slower for lack of power"]
    watts = joules * 2 * 8192**3 / busy
    assert slower == pytest.approx((watts / (0.75 * 700)) ** bend, rel=0.01) and slower > 1
    assert found.compute == pytest.approx(busy * slower) and found.compute > found.memory


@pytest.mark.parametrize("n", [1024, 8192])
@pytest.mark.parametrize("name", ["h100-sxm-80gb", "l4", "rtx-pro-6000-max-q"])
def test_power_lowers_the_clock_until_it_feeds_it(name: str, n: int):
    """The seconds are those of a board of that clock, whose power the joules at its voltage take
    (L4 lists more of its L2 a clock than L40S). They are the same however high a board may clock.
    """
    target = load_target(name)
    work = gemm(n, n, n, f16)
    tiles = chosen(work, target)

    def compute(of, what="at the power of the board"):
        s = Sheet()
        tensor.seconds(s, work, tiles, of, FACTORS)
        return float(s.values[what])

    taken = compute(target)
    assert compute(target, "slower for lack of power") > 1.03
    bend = FACTORS["power bend"]
    left = 0.75 * target.tdp_w * taken
    joules = tensor.flop_joules(target, FACTORS, 16) * work.products
    share = (left / joules) ** (bend / (1 - bend))
    assert share < 1
    slow = load_target(name, {"clock_hz": share * target.clock_hz, "tdp_w": 9e4})
    assert compute(slow, "busiest SM") == pytest.approx(taken, rel=0.04)
    for by in (1.1, 3.0):
        fast = load_target(name, {"clock_hz": by * target.clock_hz})
        assert compute(fast) == pytest.approx(taken, rel=1e-9)


@pytest.mark.parametrize("name", ["t4", "v100-sxm-16gb"])
def test_a_flop_of_12_nm_takes_more_energy(name: str):
    """2.2 pJ on T4 and 1.9 on V100, 0.8 on A100, by what whole runs and large products reach."""
    old = load_target(name, {"clock_hz": A100.clock_hz, "tensor_clock_hz": A100.clock_hz})
    new = replace(A100, tensor_clock_hz=A100.clock_hz)
    ratio = tensor.flop_joules(old, FACTORS, 16) / tensor.flop_joules(new, FACTORS, 16)
    assert ratio == pytest.approx((2.2 if name == "t4" else 1.9) / 0.8)


def test_below_a_clock_the_voltage_falls_no_more():
    """Of T4 below 0.65 of its highest clock: there the clock falls as the power does, so that half
    of it feeds half of the flops."""
    work = gemm(8192, 8192, 8192, f16)

    def watt_seconds(watts: float) -> float:
        target = load_target("t4", {"tdp_w": watts})
        found, _ = terms(work, target)
        return watts * found.compute

    low, lower = watt_seconds(60.0), watt_seconds(30.0)
    assert low == pytest.approx(lower, rel=1e-6)
    target = load_target("t4")
    joules = tensor.flop_joules(target, FACTORS, 16) * 0.65 ** (1 / 0.444 - 1)
    assert 0.75 * low == pytest.approx(joules * work.products, rel=1e-6)
    assert watt_seconds(150.0) > 1.02 * low, "where the voltage rises again"


def test_products_timed_for_a_short_while_are_not_slowed_and_blank_ones_less():
    work = gemm(8192, 8192, 8192, bf16)

    def slower(runs: float, blank: bool = False) -> float:
        _, values = terms(replace(work, detail=Timed(0.0, runs, blank)))
        return float(values["slower for lack of power"])

    _, settled = terms(work)
    assert slower(0.0) == 1
    assert 1 < slower(10) < slower(100) < slower(1e6) < settled["slower for lack of power"]
    assert slower(1e6, blank=True) < slower(1e6)


def test_a_board_without_a_power_limit_is_fed():
    found, values = terms(gemm(8192, 8192, 8192, bf16), replace(H100, tdp_w=None))
    assert found.compute == values["busiest SM"]


def test_small_weights_stay_in_the_l2():
    _, small = terms(gemm(64, 64, 64, bf16))
    _, large = terms(gemm(64, 8192, 8192, bf16))
    assert small["dram bytes"] == 0
    assert large["dram bytes"] > 0.95 * 8192 * 8192 * 2


def test_a_loop_finds_its_weights_in_the_l2_if_little_passes_between():
    """16 rows by weights of 8 MiB, f16: of its 50 MiB H100 keeps 0.7, 35 MiB, of what comes round
    again, and of 30 % more nothing. Rows and results are 32 + 128 KiB."""
    work, mib = gemm(16, 4096, 1024, f16), 2.0**20

    def missed(between: float | None) -> float:
        detail = None if between is None else Looped(between)
        _, values = terms(replace(work, detail=detail))
        return float(values["share of the right operand that misses"])

    assert H100.l2_bytes == 50 * mib
    assert missed(None) == pytest.approx((40.15625 / 35 - 1) / 0.3)
    assert missed(1 * mib) == missed(26.8 * mib) == 0
    assert missed(32.09375 * mib) == pytest.approx(0.5)
    assert missed(37.4 * mib) == 1


def test_rows_that_start_anywhere_load_longer():
    _, even = terms(gemm(1024, 1024, 1024, bf16))
    _, odd = terms(gemm(1024, 1024, 1023, bf16))
    assert odd["loads of a step"] == pytest.approx(tensor.UNALIGNED * even["loads of a step"])


def test_odd_rows_are_loaded_cell_by_cell_but_on_hopper():
    def longer(name: str) -> float:
        target, work = load_target(name), gemm(8192, 50304, 768, f16)
        even, odd = (terms(replace(work, form=form), target)[0] for form in ("", BY_CELL))
        return float(odd.compute / even.compute)

    assert longer("a100-sxm-80gb") == longer("t4") == pytest.approx(2)
    assert longer("rtx3090") == pytest.approx(1.5)
    assert longer("h100-sxm-80gb") == 1


def test_few_blocks_share_out_k():
    assert chosen(gemm(16, 512, 16384, bf16)).split > 4
    assert chosen(gemm(4096, 4096, 4096, bf16)).split == 1
    assert chosen(replace(gemm(16, 512, 16384, f8e4m3), kind="row scales")).split == 1


def test_tiles_follow_the_extents():
    assert chosen(gemm(8, 4096, 4096, bf16)).dims["m"] == 16
    wide = chosen(gemm(8192, 8192, 8192, bf16)).dims
    assert wide["m"] * wide["n"] == 256 * 128


@pytest.mark.parametrize("name", target_names())
@pytest.mark.parametrize("dtype", [f16, f8e4m3, i8])
def test_candidates_fit_the_target(name, dtype):
    target, work = load_target(name), gemm(300, 1000, 4000, dtype)
    if family_of(work, target) is not tensor.FAMILY:
        pytest.skip("no matrix units for it")
    tiles = tensor.candidates(work, target)
    for need in needs(work, tiles, target):
        assert np.all(np.asarray(need.wants) <= need.has), need.what


def test_a_table_is_its_kernels():
    m = np.array([1.0, 100.0, 5000.0])
    n, k = np.array([4096.0, 512.0, 1024.0]), np.array([4096.0, 8192.0, 64.0])
    together = chosen(gemm(m, n, k, bf16))
    for i in range(3):
        alone = chosen(gemm(m[i], n[i], k[i], bf16))
        assert (alone.dims["m"], alone.dims["n"], alone.split) == (
            together.dims["m"][i],
            together.dims["n"][i],
            together.split[i],
        )


# Medians over frameworks, kernels/gemm.parquet (aiconfigurator), bf16, microseconds.
MEASURED = [
    (A100, (1, 4096, 4096), 26.2),
    (A100, (4096, 4096, 4096), 539.5),
    (A100, (16384, 16384, 16384), 34501.0),
    (H100, (1, 16384, 16384), 186.1),
    (H100, (64, 4096, 4096), 15.7),
    (H100, (4096, 4096, 4096), 174.3),
    (H100, (8192, 8192, 1024), 198.3),
    (H100, (4096, 512, 512), 6.4),
    (B200, (16, 16384, 16384), 90.3),
    (B200, (4096, 4096, 4096), 91.9),
    (B200, (64, 512, 512), 2.6),
]


@pytest.mark.parametrize(("target", "extents", "measured_us"), MEASURED)
def test_measured(target, extents, measured_us):
    work = gemm(*extents, bf16)
    timed = Timed(5 * float(work.operands[1].nbytes), 72.0)  # six copies, twelve times
    predicted = predict(replace(work, detail=timed), target).time_s[0] * 1e6
    assert predicted == pytest.approx(measured_us, rel=0.2)


def test_an_unseen_board_is_held_by_its_power_and_memory():
    _, values = terms(gemm(8192, 8192, 8192, f16), L40S)
    _, lower = terms(gemm(8192, 8192, 8192, f16), load_target("l4"))
    slower, slowest = (v["slower for lack of power"] for v in (values, lower))
    assert 1.3 < slower < slowest


def test_gddr_with_error_codes_streams_slower():
    work = gemm(1, 16384, 16384, bf16)
    with_codes, _ = terms(work, L40S)
    without, _ = terms(work, replace(L40S, dram=replace(L40S.dram, ecc=False)))
    shares = FACTORS["dram share plain GDDR"] / FACTORS["dram share GDDR"]
    assert with_codes.memory / without.memory == pytest.approx(shares)


def test_halved_matrix_units_are_busier():
    """GeForce sums in f32 at half the rate of its units, which then wait for little else."""
    geforce, work = load_target("rtx4090"), gemm(8192, 8192, 8192, f16)
    _, values = terms(work, geforce)
    tile = tensor.choose(work, geforce, FACTORS).dims
    step = 2.0 * tile["m"] * tile["n"] * tile["k"] * geforce.sms / geforce.peak("tensor", f16)
    assert values["products of a step"] == pytest.approx(step / FACTORS["halved share"])


def test_scaled_products_on_mma_units_have_the_tiles_of_their_libraries():
    rows, block = (
        replace(gemm(1, 1, 1, f8e4m3), kind=f"{kind} scales") for kind in ("row", "block")
    )

    def tile(work: Work, m: float) -> tuple[float, float]:
        some = replace(work, dims=(("b", 1.0), ("m", m), ("n", 4096.0), ("k", 4096.0)))
        found = tensor.choose(some, L40S, FACTORS).dims
        return float(found["m"]), float(found["n"])

    assert tile(block, 5) == tile(block, 5000) == (32, 128)
    assert [tile(rows, m) for m in (1, 17, 65, 200, 300)] == [
        *((16, 64), (32, 64), (64, 64), (128, 64), (128, 128))
    ]
    both = tensor.candidates(rows, L40S)
    assert both.dims["m"].shape == (1,)


def test_a_target_without_room_for_a_tile_is_refused_in_words():
    small = replace(L40S, sm=replace(L40S.sm, smem_bytes_per_block=11_263))
    with pytest.raises(TargetError, match="no product on matrix units fits") as caught:
        tensor.choose(gemm(64, 64, 64, f16), small, FACTORS)
    assert caught.value.where == "l40s:sm.smem_bytes_per_block"
    assert caught.value.expected.startswith("11,264 bytes")  # (16 + 64) * 128, and 1024
    assert caught.value.found == "11,263"
    enough = replace(L40S, sm=replace(L40S.sm, smem_bytes_per_block=11_264))
    assert tensor.choose(gemm(64, 64, 64, f16), enough, FACTORS).stages == 1


@pytest.mark.parametrize(("name", "lost"), [("rtx5090", 1.0), ("rtx-pro-6000-ws", None)])
def test_the_last_wave_of_halved_units_takes_as_long_as_any_other(name, lost):
    lost = lost or FACTORS["tail mma"]
    target, work = load_target(name), gemm(2048, 2048, 2048, bf16)
    tiles = replace(chosen(work, target), dims={"b": 1.0, "m": 128.0, "n": 128.0, "k": 64.0})
    s = Sheet()
    tensor.seconds(s, work, replace(tiles, split=1.0), target, FACTORS)
    waves = 256 / target.sms
    assert s.values["rounds of the busiest SM"] == pytest.approx(waves + lost * (2 - waves))


def test_memory_is_read_as_fast_as_its_kind_allows():
    """LPDDR gives less than GDDR; GDDR7 with error codes as much as without."""
    work = gemm(1, 16384, 16384, bf16)
    gb10, pro = load_target("gb10"), load_target("rtx-pro-6000-se")
    share = 16384**2 * 2 / terms(work, gb10)[0].memory / gb10.dram_bytes_per_s
    assert share == pytest.approx(0.94 * FACTORS["dram share plain GDDR"], rel=1e-2)
    share = 16384**2 * 2 / terms(work, pro)[0].memory / pro.dram_bytes_per_s
    assert share == pytest.approx(FACTORS["dram share plain GDDR"], rel=1e-2)
