"""A target's numbers, its peaks and what they fall back to."""

import pickle
from dataclasses import replace

import pytest

from gpuir.ir.types import (
    DTYPES,
    bf16,
    bool_,
    c64,
    c128,
    f4e2m1,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    f64,
    i4,
    i8,
    i32,
    i64,
    tf32,
    u8,
)
from gpuir.targets.load import load_target, target_names
from gpuir.targets.target import FrozenTable


def test_a100_has_the_numbers_of_its_datasheet():
    t = load_target("a100")
    assert (t.name, t.sms, t.clock_hz, t.isa) == ("a100-sxm-40gb", 108, 1.41e9, "sm_80")
    assert t.dram_bytes_per_s == 1.555e12
    assert t.dram_bytes == 40 * 1024**3
    assert t.l2_bytes == 40 * 1024**2
    assert t.l2_bytes_per_s == pytest.approx(5120 * 1.41e9, rel=1e-3)
    assert (t.sm.smem_bytes, t.sm.smem_bytes_per_block) == (164 * 1024, 163 * 1024)
    assert t.link and t.link.bytes_per_s == 300e9


@pytest.mark.parametrize(
    ("name", "pipe", "dtype", "peak", "rule"),
    [
        ("a100", "tensor", f16, 312e12, "tensor.f16"),
        ("a100", "tensor", bf16, 312e12, "tensor.bf16"),
        ("a100", "tensor", f32, 19.5e12, "vector.f32"),
        ("a100", "tensor", tf32, 156e12, "tensor.tf32"),
        ("a100", "tensor", f64, 19.5e12, "tensor.f64"),
        ("a100", "tensor", f8e4m3, 312e12, "tensor.f16"),
        ("a100", "tensor", i4, 624e12, "tensor.i8"),
        ("a100", "vector", f16, 78e12, "vector.f16"),
        ("a100", "vector", bf16, 19.5e12, "vector.f32"),
        ("a100", "vector", i32, 9.75e12, "vector.f32 / 2"),
        ("a100", "vector", i64, 4.875e12, "vector.f32 / 4"),
        ("a100", "vector", bool_, 9.75e12, "vector.f32 / 2"),
        ("a100", "vector", c128, 9.7e12, "vector.f64"),
        ("h100", "tensor", f8e5m2, 1978.9e12, "tensor.f8e4m3"),
        ("h100", "tensor", f4e2m1, 1978.9e12, "tensor.f8e4m3"),
        ("b200", "tensor", f4e2m1, 9e15, "tensor.f4e2m1"),
        # no integer unit: the values fit into f16; no TF32; a bf16 does not fit into an f16
        ("v100", "tensor", i8, 125e12, "tensor.f16"),
        ("v100", "tensor", tf32, 15.7e12, "vector.f32"),
        ("v100", "tensor", bf16, 15.7e12, "vector.f32"),
        # no tensor cores; f16 at 1/64, so that converting to f32 is faster
        ("p4", "tensor", f16, 5.5e12, "vector.f32"),
        ("p4", "tensor", i8, 22e12, "vector.i8"),
        ("p4", "tensor", u8, 2.75e12, "vector.f32 / 2"),
        ("p100", "tensor", f16, 18.7e12, "vector.f16"),
        # matrix units for f32 and c64
        ("mi300x", "tensor", f32, 163.4e12, "tensor.f32"),
        ("mi300x", "tensor", c64, 163.4e12, "tensor.f32"),
        # no f64 rate published
        ("rtx-pro-6000-se", "vector", f64, 120e12 / 64, "vector.f32 / 64"),
    ],
)
def test_peak(name, pipe, dtype, peak, rule):
    target = load_target(name)
    assert target.peak(pipe, dtype) == pytest.approx(peak)
    assert target.peak_rule(pipe, dtype) == rule


@pytest.mark.parametrize("name", target_names())
def test_every_dtype_has_a_peak_on_every_target(name):
    target = load_target(name)
    for dtype in DTYPES.values():
        for pipe in ("tensor", "vector"):
            assert target.peak(pipe, dtype) > 0
    assert target.peak("tensor", tf32) >= target.peak("tensor", f32)


def test_source_is_of_the_longest_prefix():
    t = load_target("a100")
    assert t.source("l2.bytes_per_s").startswith("assumed: 80 slices x 64 bytes")
    assert t.source("dram.bus_bits") == t.source("dram")
    assert t.source("title") == ""


def test_assumptions_say_what_no_document_says():
    assumed = load_target("a100").assumptions
    assert [text.split(":")[0] for text in assumed] == ["launch_s", "l2.bytes_per_s"]


def test_rows_are_every_number_with_unit_and_source():
    rows = {row.field: row for row in load_target("a100").rows()}
    assert rows["sms"].value == 108
    assert rows["clock_hz"].unit == "Hz"
    assert rows["flops_per_s.tensor.f16"].value == 312e12
    assert rows["flops_per_s.tensor.f16"].unit == "flop/s"
    assert rows["aliases"].value[0] == "a100"
    assert "l3.bytes" not in rows
    assert all(r.source for r in rows.values() if isinstance(r.value, int | float))


def test_a_target_is_immutable_hashable_and_travels_between_processes():
    t = load_target("h100")
    assert pickle.loads(pickle.dumps(t)) == t
    assert {t: 1}[load_target("h100-sxm")] == 1
    assert replace(t, sms=66) != t
    with pytest.raises(AttributeError):
        t.sms = 1  # type: ignore[misc]


def test_a_table_is_a_mapping_that_hashes():
    table = FrozenTable({"f16": 1.0, "f32": 2.0})
    assert dict(table) == {"f16": 1.0, "f32": 2.0} == table
    assert len(table) == 2 and "f16" in table
    assert hash(table) == hash(FrozenTable({"f32": 2.0, "f16": 1.0}))
    assert repr(table) == "Table({'f16': 1.0, 'f32': 2.0})"
