"""Listed numbers beside their recomputation."""

import csv
from pathlib import Path

import pytest

from gpuir.targets.check import check_target
from gpuir.targets.load import load_target, target_names

HARDWARE = Path(__file__).parents[3] / "shared" / "data" / "hardware"
needs_tables = pytest.mark.skipif(
    not HARDWARE.is_dir(), reason="the tables that the specs were made from are not here"
)


def test_a100_by_hand():
    """108 SMs x 64 lanes x 2 x 1.41 GHz; x 2048 on tensor cores; 5120 bits x 2.43 Gbit/s."""
    rows = check_target(load_target("a100"))
    assert [(r.field, r.listed, r.status) for r in rows] == [
        ("flops_per_s.vector.f32", 19.5e12, "ok"),
        ("flops_per_s.tensor.f16", 312e12, "ok"),
        ("flops_per_s.tensor.tf32", 156e12, "ok"),
        ("flops_per_s.tensor.i8", 624e12, "ok"),
        ("dram.bytes_per_s", 1.555e12, "ok"),
        ("dram.bytes_per_s", 1.555e12, "ok"),
    ]
    assert [r.recomputed for r in rows] == pytest.approx(
        [19.49184e12, 311.86944e12, 156e12, 624e12, 1.5552e12, 1.5552e12]
    )
    assert rows[0].diff == pytest.approx(-0.000418, abs=1e-6)


@pytest.mark.parametrize("name", target_names())
def test_every_shipped_number_agrees_or_is_explained(name):
    target = load_target(name)
    rows = check_target(target)
    assert [r for r in rows if r.status == "doubtful"] == []
    assert set(target.discrepancies) == {r.field for r in rows if r.status == "explained"}


def test_545_agree_and_26_are_explained():
    rows = [row for name in target_names() for row in check_target(load_target(name))]
    assert len([r for r in rows if r.status == "ok"]) == 545
    assert len([r for r in rows if r.status == "explained"]) == 26


def test_h100_tensor_peak_is_explained():
    (row,) = [r for r in check_target(load_target("h100")) if r.status == "explained"]
    assert row.field == "flops_per_s.tensor.f16"
    assert row.formula == "sms x sm.tensor_flops_per_clock x clock_hz"
    assert row.recomputed == pytest.approx(132 * 4096 * 1.98e9)
    assert "lower clock" in row.explanation


def test_geforce_integers_follow_the_rate_that_sums_in_f16():
    rows = {r.field: r for r in check_target(load_target("rtx4090"))}
    assert rows["flops_per_s.tensor.i8"].formula == "2 x flops_per_s.tensor_f16_acc.f16"
    assert rows["flops_per_s.tensor.i8"].status == "ok"


def test_a_slip_is_doubtful():
    """312 Tflop/s with the sparsity of the brochure is 624."""
    rows = check_target(load_target("a100", {"flops_per_s.tensor.f16": "624e12"}))
    doubtful = {r.field for r in rows if r.status == "doubtful"}
    assert doubtful == {f"flops_per_s.tensor.{d}" for d in ("f16", "tf32", "i8")}


def test_rates_of_a_cpu_do_not_follow_from_one_another():
    """They are measured: oneDNN's products of i8 need not be twice those of f16."""
    rates = {"flops_per_s.tensor.f16": "2e12", "flops_per_s.tensor.i8": "3e12"}
    rows = check_target(load_target("cpu", rates))
    assert [(r.field, r.status) for r in rows] == [("flops_per_s.vector.f32", "ok")]


def test_no_explanation_excuses_what_the_user_set():
    rows = check_target(load_target("h100", {"flops_per_s.tensor.f16": "1200e12"}))
    assert next(r for r in rows if r.field == "flops_per_s.tensor.f16").status == "doubtful"


def test_what_follows_from_sms_and_clock_stays_consistent():
    changed = load_target("a100", {"sms": 60, "clock_hz": 1.2e9})
    assert {r.status for r in check_target(changed)} == {"ok"}


FIELDS = {
    "fp32_tflops": ("flops_per_s.vector.f32", ""),
    "fp16_tc_fp32acc_tflops": ("flops_per_s.tensor.f16", ""),
    "tf32 vs fp16/2": ("flops_per_s.tensor.tf32", ""),
    "fp8 vs 2*fp16": ("flops_per_s.tensor.f8e4m3", ""),
    "int8 vs 2*fp16": ("flops_per_s.tensor.i8", ""),
    "mem_bw_gbs (bus*pin)": ("dram.bytes_per_s", "pin_bits"),
    "mem_bw_gbs (bus*clock)": ("dram.bytes_per_s", "dram.clock"),
}
LEFT_OUT = {"GB300-288GB", "Arc-Pro-B60"}


def table(name):
    with open(HARDWARE / name, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@needs_tables
def test_agrees_with_an_independent_recomputation():
    """Every row of validation.csv about a GPU we ship: same difference, same verdict."""
    names = {row["sku"]: load_target(row["name"]) for row in table("gpus.csv")
             if row["sku"] not in LEFT_OUT}  # fmt: skip
    compared = 0
    for row in table("validation.csv"):
        if row["sku"] in LEFT_OUT:
            continue
        field, formula = FIELDS[row["field"]]
        (ours,) = [
            r for r in check_target(names[row["sku"]]) if r.field == field and formula in r.formula
        ]
        assert ours.diff * 100 == pytest.approx(float(row["diff_pct"]), rel=1e-3, abs=0.02), row
        assert (ours.status == "ok") == (row["flag"] == "ok"), row
        compared += 1
    assert compared == 226


@needs_tables
@pytest.mark.parametrize(
    ("column", "scale", "get"),
    [
        ("sm_count", 1, lambda t: t.sms),
        ("boost_clock_mhz", 1e6, lambda t: t.clock_hz),
        ("base_clock_mhz", 1e6, lambda t: t.base_clock_hz),
        ("fp32_tflops", 1e12, lambda t: t.flops_per_s.vector["f32"]),
        ("fp16_tc_fp32acc_tflops", 1e12, lambda t: t.flops_per_s.tensor["f16"]),
        ("fp64_tc_tflops", 1e12, lambda t: t.flops_per_s.tensor["f64"]),
        ("fp32_matrix_tflops", 1e12, lambda t: t.flops_per_s.tensor["f32"]),
        ("mem_bw_gbs", 1e9, lambda t: t.dram_bytes_per_s),
        ("l2_mb", 1 << 20, lambda t: t.l2_bytes),
        ("l3_mb", 1 << 20, lambda t: t.l3.bytes),
        ("smem_kb_per_sm", 1 << 10, lambda t: t.sm.smem_bytes),
        ("max_smem_kb_per_block", 1 << 10, lambda t: t.sm.smem_bytes_per_block),
        ("regs_per_sm", 1, lambda t: t.sm.registers),
        ("max_threads_per_sm", 1, lambda t: t.sm.threads),
        ("max_blocks_per_sm", 1, lambda t: t.sm.blocks),
        ("warp_size", 1, lambda t: t.sm.warp),
        ("tdp_w", 1, lambda t: t.tdp_w),
        ("link_gbs_bidir", 0.5e9, lambda t: t.link.bytes_per_s),
        ("pcie_lanes", 1, lambda t: t.pcie.lanes),
    ],
)
def test_the_specs_hold_the_numbers_of_the_table(column, scale, get):
    for row in table("gpus.csv"):
        if row[column] and row["sku"] not in LEFT_OUT:
            assert get(load_target(row["name"])) == pytest.approx(float(row[column]) * scale), row
