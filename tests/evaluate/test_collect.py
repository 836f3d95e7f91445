"""Measuring for real, on this CPU: what runs, what a table keeps, what a killed run loses."""

from __future__ import annotations

import csv

import pytest

from gpuir.evaluate.benchmarks import BENCHMARKS, works_of
from gpuir.evaluate.collect import (
    HEADER,
    Row,
    as_parquet,
    batches_of,
    collect,
    expected_s,
    measure,
    remaining,
)
from gpuir.evaluate.plan import Case
from gpuir.ir.errors import UsageError
from gpuir.targets.load import load_target

torch = pytest.importorskip("torch")

from gpuir.evaluate.machine import Machine, cpu_level, cpu_numbers  # noqa: E402
from gpuir.evaluate.tables import read_table  # noqa: E402

CPU = load_target("cpu")
SMALL = {
    **dict.fromkeys(("batch", "b", "stride", "groups"), 1),
    **dict.fromkeys(("heads", "kv_heads", "window"), 3),
}


@pytest.fixture(scope="module")
def machine():
    return Machine.of(CPU)


def case(op: str, dtype: str = "f32", **extents: int) -> Case:
    shape = {c: SMALL.get(c, 16) for c in BENCHMARKS[op].columns} | extents
    return Case(op, dtype, tuple(shape.items()))


CASES = (case("add"), case("softmax"), case("linear"))


@pytest.mark.parametrize("op", BENCHMARKS)
def test_every_operator_runs(machine, op):
    row = measure(machine, case(op, BENCHMARKS[op].dtypes[0]), 1e-3)
    assert row.is_measured, row.note
    assert 1e-8 < row.latency_s < 0.1
    assert row.repeats >= 5


@pytest.mark.parametrize(
    ("op", "args", "result"),
    [
        ("linear", "x[8, 32], w[16, 32]", (8, 16)),
        ("matmul", "", (2, 8, 16)),
        ("sum", "", (8,)),
        ("transpose", "", (16, 8)),
        ("embedding", "", (8, 16)),
        ("attention", "", (2, 4, 8, 16)),
        ("attention_causal", "", (2, 4, 8, 16)),
        ("conv", "", (2, 6, 8, 8)),
    ],
)
def test_an_operator_gives_what_its_extents_say(machine, op, args, result):
    extents = {"m": 8, "n": 16, "k": 32, "b": 2, "rows": 8, "cols": 16, "table": 50}
    extents |= {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 8, "keys": 24, "head": 16}
    extents |= {"channels": 4, "size": 16, "filters": 6, "window": 3, "stride": 2, "groups": 2}
    run = BENCHMARKS[op].make(machine.kit("f32"), {c: extents[c] for c in BENCHMARKS[op].columns})
    assert tuple(run().shape) == result


def test_what_cannot_run_is_a_note(machine):
    huge = measure(machine, case("add", cells=1 << 39))
    assert not huge.is_measured and huge.note.startswith("needs 6.6e+03 GB")
    odd = measure(machine, case("attention", heads=4, kv_heads=3))
    assert not odd.is_measured and odd.note


def test_a_table_reads_back(machine, tmp_path):
    path = tmp_path / "mine.csv"
    assert collect(machine, CASES, path, device="cpu", budget_s=1e-3) == 3
    table = read_table(path)
    assert (table.kind, table.count, table.skipped) == ("collected measurements", 3, {})
    assert [(b.op, b.dtype, b.target.name) for b in table.batches] == [
        (c.op, "f32", CPU.name) for c in CASES
    ]
    assert table.batches[1].works[0].extents == {"o": 16, "r": 16}
    rows = list(csv.DictReader(path.read_text().splitlines()))
    for b, row in zip(table.batches, rows, strict=True):
        assert b.latency_s[0] == pytest.approx(float(row["latency_us"]) * 1e-6)


def test_a_kernel_is_the_same_alone_and_among_others(machine, tmp_path):
    """Depthwise convolutions beside others: other kernels, so other batches."""
    cases = [case("conv", channels=16, filters=16, groups=g) for g in (1, 16)]
    collect(machine, cases, tmp_path / "mine.csv", device="cpu", budget_s=1e-3)
    batches = read_table(tmp_path / "mine.csv").batches
    works = [b.works[0] for b in batches]
    alone = [works_of("conv", "f32", c.shape)[0] for c in cases]
    assert [w.pipe for w in works] == [w.pipe for w in alone] == ["tensor", "vector"]
    rows = [Row(c, 1e-3, 0.0, 5) for c in cases]
    assert [b.works[0].pipe for b in batches_of(rows, CPU)] == ["tensor", "vector"]


def test_a_run_goes_on_where_the_last_one_ended(machine, tmp_path):
    path, lines = tmp_path / "mine.csv", []
    collect(machine, CASES[:2], path, device="cpu", budget_s=1e-3)
    before = path.read_text()
    path.write_text(before + "cpu,linear,f32,16,1")  # killed as it wrote
    assert remaining(CASES, path, "cpu") == [CASES[2]]
    assert collect(machine, CASES, path, device="cpu", budget_s=1e-3, watch=lines.append) == 1
    assert path.read_text().startswith(before)
    assert [row.case for row in lines] == [CASES[2]]
    assert collect(machine, CASES, path, device="cpu", budget_s=1e-3) == 0
    assert remaining(CASES, path, "my-cpu.toml") == list(CASES)  # another device's rows


def test_rows_are_on_disk_as_they_are_measured(machine, tmp_path):
    path = tmp_path / "mine.csv"

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(machine, CASES, path, device="cpu", budget_s=1e-3, watch=stop)
    assert len(path.read_text().splitlines()) == 2


def test_a_failed_row_is_kept_and_not_predicted(machine, tmp_path):
    path = tmp_path / "mine.csv"
    collect(machine, [case("add", cells=1 << 39), CASES[0]], path, device="cpu", budget_s=1e-3)
    table = read_table(path)
    assert list(table.skipped.values()) == [1]
    assert [len(b) for b in table.batches] == [1]
    assert remaining([case("add", cells=1 << 39)], path, "cpu") == []


def test_another_file_is_not_overwritten(machine, tmp_path):
    path = tmp_path / "notes.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="no table of collected measurements") as error:
        collect(machine, CASES, path, device="cpu")
    assert error.value.expected == ",".join(HEADER)
    assert path.read_text() == "a,b\n1,2\n"
    with pytest.raises(UsageError, match="cannot write the table"):
        collect(machine, CASES, tmp_path / "no" / "folder.csv", device="cpu")


def test_a_parquet_file_is_the_same_table(machine, tmp_path):
    pytest.importorskip("pyarrow")
    collect(machine, CASES, tmp_path / "mine.csv", device="cpu", budget_s=1e-3)
    as_parquet(tmp_path / "mine.csv", tmp_path / "mine.parquet")
    a, b = (read_table(tmp_path / f"mine.{kind}") for kind in ("csv", "parquet"))
    assert a.kind == b.kind and [x.op for x in a.batches] == [x.op for x in b.batches]
    assert not list(tmp_path.glob(".*"))


def test_tf32_is_allowed_only_where_asked_for(machine):
    before = torch.backends.cuda.matmul.allow_tf32
    measure(machine, case("linear", "tf32"), 1e-3)
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_how_long_a_row_takes_is_said_before():
    assert 0.01 < expected_s(CPU, CASES[0], 0.01) < 1
    assert expected_s(CPU, case("linear", m=8192, n=8192, k=8192), 0.01) > 1


def test_this_cpu_has_plausible_numbers(machine):
    numbers = cpu_numbers(machine, cpu_level(), 0.01)
    assert numbers["sms"] == torch.get_num_threads()
    assert 1e9 < numbers["flops_per_s.vector.f32"] < 1e14
    assert 1e9 < numbers["dram.bytes_per_s"] < 2e12
    assert 1e-8 < numbers["launch_s"] < 1e-4
