"""Measuring for real, on this CPU: what runs, what a table keeps, what a killed run loses."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from calls import calls

from gpuir.cost.families import family_of
from gpuir.cost.tile import predict
from gpuir.fit.benchmarks import BENCHMARKS, works_of
from gpuir.fit.campaign import Problem, read_plan
from gpuir.fit.collect import (
    HEADER,
    MeasuredRow,
    as_parquet,
    batches_of,
    collect,
    expected_s,
    measure,
    remaining,
)
from gpuir.fit.kit import Kit
from gpuir.ir.errors import UsageError
from gpuir.targets.load import load_target

torch = pytest.importorskip("torch")

from gpuir.fit.machine import Machine, cpu_level, cpu_numbers  # noqa: E402
from gpuir.fit.tables import read_table  # noqa: E402

CPU = load_target("cpu")
SMALL = {
    **dict.fromkeys(("batch", "b", "stride", "groups"), 1),
    **dict.fromkeys(("heads", "kv_heads", "window", "topk", "bag"), 3),
}


@pytest.fixture(scope="module")
def machine():
    return Machine.of(CPU)


def problem(op: str, dtype: str = "f32", **extents: int) -> Problem:
    shape = {c: SMALL.get(c, 16) for c in BENCHMARKS[op].columns} | extents
    return Problem(op, dtype, tuple(shape.items()))


PROBLEMS = (problem("add"), problem("softmax"), problem("linear"))


@pytest.mark.parametrize(
    ("op", "dtype"), [(op, d) for op, b in BENCHMARKS.items() for d in b.dtypes]
)
def test_every_operator_runs(machine, op, dtype):
    row = measure(machine, problem(op, dtype), 1e-3)
    assert row.is_measured, row.note
    assert row.latency_s > 1e-8
    assert row.repeats >= 5


@pytest.mark.parametrize("op", BENCHMARKS)
def test_every_operator_is_read_back_as_what_it_is(machine, tmp_path, op):
    """Of a table, the kernels that the operator is said to run, on a CPU and on a GPU."""
    made = problem(op, BENCHMARKS[op].dtypes[0])
    for device in ("cpu", "a100"):
        path = tmp_path / f"{device}.csv"
        collect(machine, [made], path, device=device, budget_s=1e-3)
        table = read_table(path)
        assert not table.skipped
        (batch,) = table.batches
        alone = works_of(op, made.dtype, {c: float(n) for c, n in made.extents})
        assert [w.likeness for w in batch.works] == [w.likeness for w in alone]
        for read, work in zip(batch.works, alone, strict=True):
            assert family_of(read, batch.target) == family_of(work, batch.target)
            assert float(predict(read, batch.target).time_s[0]) == pytest.approx(
                float(predict(work, batch.target).time_s[0])
            )


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
        ("conv1d", "", (2, 6, 8)),
        ("conv3d", "", (2, 6, 8, 8, 8)),
        ("conv_transposed", "", (2, 6, 31, 31)),
        ("embedding_bag", "", (8, 16)),
        ("gather", "", (8, 5)),
        ("concat", "", (8, 32)),
        ("cumsum", "", (8, 16)),
        ("experts", "", (9, 12)),
        ("lstm", "", (7, 2, 12)),
        ("gru", "", (7, 2, 12)),
        ("rnn", "", (7, 2, 12)),
    ],
)
def test_an_operator_gives_what_its_extents_say(machine, op, args, result):
    extents = {"m": 8, "n": 16, "k": 32, "b": 2, "rows": 8, "cols": 16, "table": 50}
    extents |= {"batch": 2, "heads": 4, "kv_heads": 2, "queries": 8, "keys": 24, "head": 16}
    extents |= {"channels": 4, "size": 16, "filters": 6, "window": 3, "stride": 2, "groups": 2}
    extents |= {"bag": 3, "picks": 5, "tokens": 9, "hidden": 12, "inter": 20, "topk": 2}
    extents |= {"experts": 4, "steps": 7, "features": 10}
    run = BENCHMARKS[op].make(machine.kit("f32"), {c: extents[c] for c in BENCHMARKS[op].columns})
    assert tuple(run().shape) == result


def test_experts_give_each_token_the_mean_of_its_own(machine):
    """Against the same in plain words, with kernels of one product and of many."""
    extents = {"tokens": 5, "hidden": 8, "inter": 12, "topk": 2, "experts": 4}
    for grouped in (True, False):
        torch.manual_seed(0)
        odd = SimpleNamespace(**vars(torch))
        if not grouped:
            odd._grouped_mm = None
        got = BENCHMARKS["experts"].make(Kit(odd, "f32", "cpu"), extents)()
        torch.manual_seed(0)
        x, into, back = torch.randn(5, 8), torch.randn(4, 8, 24), torch.randn(4, 12, 8)
        for i in range(5):
            rows = []
            for expert in (i % 4, (i + 2) % 4):
                gate, up = (x[i] @ into[expert]).chunk(2)
                rows.append((torch.nn.functional.silu(gate) * up) @ back[expert])
            assert torch.allclose(got[i], sum(rows) / 2, atol=1e-4)


def test_a_recurrence_is_as_long_as_its_steps(machine):
    """The product of all inputs once, the step's kernels as often as there are steps."""
    short, long = (
        works_of("lstm", "f32", {"batch": 2.0, "steps": n, "features": 8.0, "hidden": 64.0})
        for n in (10.0, 30.0)
    )
    times = [[float(predict(w, CPU).time_s[0]) for w in works] for works in (short, long)]
    assert times[1][1:] == pytest.approx([3 * t for t in times[0][1:]])
    assert short[0].extents["m"] == 20


def test_whatever_a_benchmark_raises_is_its_note(machine, monkeypatch):
    def spoilt(kit, extents):
        raise KeyError("unheard of")

    monkeypatch.setitem(BENCHMARKS, "add", replace(BENCHMARKS["add"], make=spoilt))
    assert measure(machine, problem("add"), 1e-3).note == "'unheard of'"


def test_what_cannot_run_is_a_note(machine):
    huge = measure(machine, problem("add", cells=1 << 39))
    assert not huge.is_measured and huge.note.startswith("needs 6.6e+03 GB")
    odd = measure(machine, problem("attention", heads=4, kv_heads=3))
    assert not odd.is_measured and odd.note


def test_a_table_reads_back(machine, tmp_path):
    path = tmp_path / "mine.csv"
    assert collect(machine, PROBLEMS, path, device="cpu", budget_s=1e-3) == 3
    table = read_table(path)
    assert (table.kind, table.count, table.skipped) == ("collected measurements", 3, {})
    assert [(b.op, b.dtype, b.target.name) for b in table.batches] == [
        (c.op, "f32", CPU.name) for c in PROBLEMS
    ]
    assert table.batches[1].works[0].extents == {"o": 16, "r": 16}
    rows = list(csv.DictReader(path.read_text().splitlines()))
    for b, row in zip(table.batches, rows, strict=True):
        assert b.latency_s[0] == pytest.approx(float(row["latency_us"]) * 1e-6)


def test_a_kernel_is_the_same_alone_and_among_others(machine, tmp_path):
    """Depthwise convolutions beside others: other kernels, so other batches."""
    problems = [problem("conv", channels=16, filters=16, groups=g) for g in (1, 16)]
    collect(machine, problems, tmp_path / "mine.csv", device="cpu", budget_s=1e-3)
    batches = read_table(tmp_path / "mine.csv").batches
    works = [b.works[0] for b in batches]
    alone = [works_of("conv", "f32", c.shape)[0] for c in problems]
    assert [w.pipe for w in works] == [w.pipe for w in alone] == ["tensor", "vector"]
    rows = [MeasuredRow(c, 1e-3, 0.0, 5) for c in problems]
    assert [b.works[0].pipe for b in batches_of(rows, CPU)] == ["tensor", "vector"]


def test_a_run_goes_on_where_the_last_one_ended(machine, tmp_path):
    path, lines = tmp_path / "mine.csv", []
    collect(machine, PROBLEMS[:2], path, device="cpu", budget_s=1e-3)
    before = path.read_text()
    path.write_text(before + "cpu,linear,f32,16,1")  # killed as it wrote
    assert remaining(PROBLEMS, path, "cpu") == [PROBLEMS[2]]
    assert collect(machine, PROBLEMS, path, device="cpu", budget_s=1e-3, watch=lines.append) == 1
    assert path.read_text().startswith(before)
    assert [row.problem for row in lines] == [PROBLEMS[2]]
    assert collect(machine, PROBLEMS, path, device="cpu", budget_s=1e-3) == 0
    assert remaining(PROBLEMS, path, "my-cpu.toml") == list(PROBLEMS)  # another device's rows


def test_rows_are_on_disk_as_they_are_measured(machine, tmp_path):
    path = tmp_path / "mine.csv"

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(machine, PROBLEMS, path, device="cpu", budget_s=1e-3, watch=stop)
    assert len(path.read_text().splitlines()) == 2


def test_a_run_that_is_killed_loses_no_row(machine, tmp_path):
    """By SIGKILL, while it measures: the next run goes on behind the rows that are there."""
    path, plan = tmp_path / "mine.csv", tmp_path / "plan.toml"
    cells = [1024 * n for n in range(1, 41)]
    plan.write_text(f'[[grid]]\nop = "add"\ndtypes = ["f32"]\ncells = {cells}\n')
    command = (sys.executable, "-m", "gpuir", "collect", "--plan", str(plan), "--target", "cpu")
    with subprocess.Popen([*command, "-o", str(path)], stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        while "2/40" not in run.stderr.readline():
            assert run.poll() is None
        run.kill()
    before = path.read_text()
    there = before[: before.rfind("\n") + 1].count("\n") - 1
    assert 2 <= there < 40
    problems = read_plan(plan)
    assert len(remaining(problems, path, "cpu")) == 40 - there
    collect(machine, problems[: there + 1], path, device="cpu", budget_s=1e-3)
    assert path.read_text().startswith(before[: before.rfind("\n") + 1])
    assert len(remaining(problems, path, "cpu")) == 39 - there


def test_two_runs_on_one_table_do_not_write_rows_twice(machine, tmp_path):
    """The second is told who is at it; one that began before the first had ended measures what is
    still missing then."""
    pytest.importorskip("fcntl")
    path, said = tmp_path / "mine.csv", []

    def second(_: MeasuredRow) -> None:
        with pytest.raises(UsageError, match="another process writes measurements into") as error:
            collect(machine, PROBLEMS, path, device="cpu", budget_s=1e-3)
        said.append(error.value.found)

    collect(machine, PROBLEMS, path, device="cpu", budget_s=1e-3, watch=second)
    assert len(said) == 3 and set(said) <= {f"process {os.getpid()}", ""}
    rows = path.read_text().splitlines()
    assert collect(machine, PROBLEMS, path, device="cpu", budget_s=1e-3) == 0
    assert path.read_text().splitlines() == rows and len(rows) == 4


def test_a_table_begun_earlier_goes_on_with_the_columns_it_has(machine, tmp_path):
    path = tmp_path / "mine.csv"
    old = [c for c in HEADER if c not in ("bag", "picks", "steps")]
    path.write_text(",".join(old) + "\n")
    assert collect(machine, PROBLEMS, path, device="cpu", budget_s=1e-3) == 3
    assert [b.op for b in read_table(path).batches] == ["add", "softmax", "linear"]
    with pytest.raises(UsageError, match="the table has no column for steps") as error:
        collect(machine, [problem("lstm")], path, device="cpu")
    assert error.value.expected == "lstm f32 batch=1 steps=16 features=16 hidden=16"


def test_a_failed_row_is_kept_and_not_predicted(machine, tmp_path):
    path = tmp_path / "mine.csv"
    collect(
        machine, [problem("add", cells=1 << 39), PROBLEMS[0]], path, device="cpu", budget_s=1e-3
    )
    table = read_table(path)
    assert list(table.skipped.values()) == [1]
    assert [len(b) for b in table.batches] == [1]
    assert remaining([problem("add", cells=1 << 39)], path, "cpu") == []


def test_another_file_is_not_overwritten(machine, tmp_path):
    path = tmp_path / "notes.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="the file is not a table of collected") as error:
        collect(machine, PROBLEMS, path, device="cpu")
    assert error.value.expected == ",".join(HEADER)
    assert path.read_text() == "a,b\n1,2\n"
    with pytest.raises(UsageError, match="cannot write the table"):
        collect(machine, PROBLEMS, tmp_path / "no" / "folder.csv", device="cpu")


def test_a_parquet_file_is_the_same_table(machine, tmp_path):
    pytest.importorskip("pyarrow")
    collect(machine, PROBLEMS, tmp_path / "mine.csv", device="cpu", budget_s=1e-3)
    as_parquet(tmp_path / "mine.csv", tmp_path / "mine.parquet")
    a, b = (read_table(tmp_path / f"mine.{kind}") for kind in ("csv", "parquet"))
    assert a.kind == b.kind and [x.op for x in a.batches] == [x.op for x in b.batches]
    assert not list(tmp_path.glob(".*"))


def test_tf32_is_allowed_only_where_asked_for(machine):
    before = torch.backends.cuda.matmul.allow_tf32
    measure(machine, problem("linear", "tf32"), 1e-3)
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_how_long_a_row_takes_is_said_before():
    large = problem("linear", m=8192, n=8192, k=8192)
    assert 0.01 < expected_s(CPU, PROBLEMS[:1], 0.01) < 1
    assert expected_s(CPU, [large], 0.01) > 1
    apart = sum(expected_s(CPU, [x], 0.01) for x in (*PROBLEMS, large))
    assert expected_s(CPU, [*PROBLEMS, large], 0.01) == pytest.approx(apart)


def test_how_long_a_campaign_takes_is_found_for_many_rows_at_once():
    some = [problem("linear", m=64 * i, n=64, k=64) for i in range(1, 301)]
    few, many = (calls(lambda n=n: expected_s(CPU, some[:n])) for n in (3, 300))
    assert many < 20 * few


def test_this_cpu_has_plausible_numbers(machine):
    numbers = cpu_numbers(machine, cpu_level(), 0.01)
    assert numbers["sms"] == torch.get_num_threads()
    assert 1e9 < numbers["flops_per_s.vector.f32"] < 1e14
    assert 1e9 < numbers["dram.bytes_per_s"] < 2e12
    assert numbers["launch_s"] > 1e-8


def test_a_table_of_ones_own_needs_no_more_than_what_tells_a_kernel(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(
        "device,op,dtype,m,n,k,rows,latency_us\n"
        "a100,linear,bf16,4096,4096,4096,,610\n"
        "a100,linear,bf16,4096,4096,,,610\n"
        "a100,softmax,f16,,,,8192,24\n"
        "a100,sparkle,f16,,,,8192,24\n"
    )
    table = read_table(path)
    (batch,) = table.batches
    assert (batch.op, len(batch)) == ("linear", 1)
    assert {d: float(n[0]) for d, n in batch.works[0].dims} == {
        "b": 1,
        "m": 4096,
        "n": 4096,
        "k": 4096,
    }
    assert table.skipped == {
        "a number is missing, too small or too large": 2,
        "the operator sparkle in f16 is unknown": 1,
    }
