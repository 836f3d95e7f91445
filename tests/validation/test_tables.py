"""Tables are told by their columns, and a row's kernels are what ran."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from measured import OTHERS, TABLES

from gpuir.cost.work import Timed
from gpuir.fit.batch import MeasuredBatch
from gpuir.fit.columns import TableFile, WordColumn
from gpuir.fit.readers import Reader
from gpuir.fit.score import forecast
from gpuir.fit.tables import READERS as OURS
from gpuir.fit.tables import MeasuredTable, recognise
from gpuir.ir.errors import UsageError
from validation.readers import READERS, read_table


def read(folder: Path, name: str, text: str = "") -> MeasuredTable:
    path = folder / "measured.csv"
    path.write_text(text or TABLES[name])
    return read_table(path)


def batch(table: MeasuredTable, op: str, device: str = "", dtype: str = "") -> MeasuredBatch:
    return next(
        b
        for b in table.batches
        if b.op == op and device in ("", b.device) and dtype in ("", b.dtype)
    )


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_scored_or_skipped_with_a_reason(tmp_path: Path, name: str):
    table = read(tmp_path, name)
    assert table.kind
    assert table.count == TABLES[name].replace("\\\n", "").count("\n") - 1
    assert sum(map(len, table.batches)) + sum(table.skipped.values()) == table.count
    for b in table.batches:
        assert np.all(b.latency_s > 0)
        for work in b.works:
            shapes = len(next(iter(b.dims.values())))
            assert np.shape(work.nbytes) == (shapes,)
            assert np.all(np.asarray(work.nbytes) > 0)


@pytest.mark.parametrize("name", OTHERS)
def test_other_tables_are_named_and_skipped(tmp_path: Path, name: str):
    table = read(tmp_path, name, OTHERS[name])
    assert not table.batches
    ((reason, count),) = table.skipped.items()
    assert reason.startswith("not kernels: ")
    assert count == table.count == 1


def test_columns_of_parquet_read_as_those_of_csv(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    for name, text in TABLES.items():
        plain, packed = tmp_path / "a.csv", tmp_path / "b.bin"
        plain.write_text(text)
        table = csv.read_csv(plain)
        for i, field in enumerate(table.schema):
            if pyarrow.types.is_string(field.type):
                table = table.set_column(i, field.name, table.column(i).dictionary_encode())
        parquet.write_table(table, packed)
        one, other = read_table(plain), read_table(packed)
        assert one.skipped == other.skipped, name
        for a, b in zip(one.batches, other.batches, strict=True):
            assert (a.op, a.device, a.dtype) == (b.op, b.device, b.dtype)
            assert np.allclose(a.latency_s, b.latency_s)
            for w, v in zip(a.works, b.works, strict=True):
                assert np.allclose(w.nbytes, v.nbytes)


def test_the_contraction_of_an_eager_product_is_n(tmp_path: Path):
    table = read(tmp_path, "eager_gemm")
    (work,) = batch(table, "bmm").works
    assert {d: float(n[0]) for d, n in work.dims} == {"b": 4, "m": 512, "n": 256, "k": 64}
    assert float(work.products[0]) == 2 * 4 * 512 * 64 * 256


def test_rows_of_a_shape_share_its_work(tmp_path: Path):
    text = TABLES["gemm"].replace(",vllm,", ",sglang,")
    b = batch(read(tmp_path, "gemm", text), "gemm", dtype="bf16")
    assert len(b) == 2
    assert np.array_equal(b.which, [0, 0])


def test_products_are_as_their_stack_timed_them(tmp_path: Path):
    """Six copies of a layer. To vLLM's weights nothing was written."""
    details = [
        b.works[-1].detail_as(Timed) for b in read(tmp_path, "gemm").batches if b.dtype == "bf16"
    ]
    assert {d.blank for d in details} == {True, False}
    for d in details:
        assert float(d.runs[0]) == 12 * 6 and float(d.between[0]) == 5 * 2 * 4096**2


def test_kernels_of_a_profiler_are_without_their_launches(tmp_path: Path):
    rows = TABLES["gemm"].splitlines()
    cells = dict(zip(rows[0].split(","), rows[1].split(","), strict=True))
    cells |= {"system": "pipeweave_h20", "framework": "unlabelled", "dtype": "fp8", "m": "4"}
    text = "\n".join((rows[0], ",".join(cells.values()), ""))
    (b,) = read(tmp_path, "gemm", text).batches
    assert b.target.name == "h20-sxm-96gb" and not b.clock.launches and b.rough
    (work,) = b.works
    assert work.extents["m"][0] == 128


def test_a_quantised_product_quantises_first(tmp_path: Path):
    table = read(tmp_path, "gemm")
    found = [[w.kernel for w in b.works] for b in table.batches if b.dtype == "fp8"]
    assert sorted(map(len, found)) == [2, 6]
    assert all(kernels[-1] == "k.gemm" for kernels in found)


def test_boards_with_80_gb_are_meant(tmp_path: Path):
    text = TABLES["gemm"].replace("h100_sxm", "a100_sxm")
    b = batch(read(tmp_path, "gemm", text), "gemm", "a100_sxm", "bf16")
    assert b.target.name == "a100-sxm-80gb"
    assert batch(read(tmp_path, "llmcompass"), "softmax").target.name == "a100-sxm-80gb"


def test_reasons_of_rows_left_out(tmp_path: Path):
    assert read(tmp_path, "gemm").skipped == {
        "flag = spike": 1,
        "dtype sparkle is none we know of products": 1,
    }
    assert read(tmp_path, "eager_gemm").skipped == {"no target is called Sparkle_9000": 1}
    broken = TABLES["gemm"].replace("4096,4096,220", "4096,4096,nan")
    assert (
        read(tmp_path, "gemm", broken).skipped["a number is missing, too small or too large"] == 1
    )


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("conv", ",3,28,1,1,400", ",99,28,1,1,400"),  # a window larger than its image
        ("gemm", "4096,4096,4096,220", "1e300,4096,4096,220"),
        ("gemm", "4096,4096,4096,220", "4096,4096,4096,1e-300"),
        ("moe", "power_law_1.2", "power_law_steep"),
        ("moe", "14336,2,8,1,1", "14336,2,1e9,1,1"),
        ("moe", "14336,2,8,1,1", "14336,16,8,1,1"),
        ("mhc", "pre,mhc,4096,4096,4,1,", "pre,mhc,4096,4096,4,many,"),
        ("mhc", "4096,4096,4,1,20,", "4096,4096,1e9,1,20,"),
        ("model_ops", '"[[8,512,1024],[1]]",11', "a tuple,11"),
        ("model_ops", '"[[8,16,512,64],[8,16,64,512]]"', '"[[512]]"'),
        ("model_ops", '"[[8,512,1024]]",1,x,,"', '"[8,512]",1,x,,"'),
    ],
)
def test_rows_that_cannot_be_are_left_out(tmp_path: Path, name: str, right: str, wrong: str):
    assert right in TABLES[name]
    table = read(tmp_path, name, TABLES[name].replace(right, wrong))
    left = sum(map(len, table.batches))
    assert left + sum(table.skipped.values()) == table.count
    assert left <= sum(map(len, read(tmp_path, name).batches)) - (wrong != "a tuple,11")
    assert all(np.isfinite(forecast(b).time_s).all() for b in table.batches)


def test_the_dispatch_is_part_of_eager_times_alone(tmp_path: Path):
    eager = batch(read(tmp_path, "eager_gemm"), "linear", "Tesla_T4")
    assert 0 < eager.clock.lead_s < eager.clock.floor_s <= 55e-6
    assert list(eager.on_floor) == [False, True]
    graph = batch(read(tmp_path, "gemm"), "gemm", dtype="bf16")
    assert (graph.clock.floor_s, graph.clock.launches) == (0, True)
    assert not batch(read(tmp_path, "mlp_ops"), "add").clock.launches


def test_a_stack_timed_eagerly_has_a_floor(tmp_path: Path):
    head = "system,framework,version,dtype,kernel_source,m,n,k,latency_us\n"
    quick = [f"h100_sxm,vllm,2,bf16,x,{8 * i},256,256,2.{i}\n" for i in range(1, 9)]
    slow = [f"h100_sxm,vllm,1,bf16,x,{8 * i},256,256,30.{i}\n" for i in range(1, 9)]
    large = ["h100_sxm,vllm,1,bf16,x,8192,8192,8192,1700\n"]
    table = read(tmp_path, "", head + "".join(quick + slow + large))
    bound, free = sorted(table.batches, key=lambda b: -b.clock.floor_s)
    assert bound.clock.floor_s == pytest.approx(30.3e-6, rel=0.01)
    assert bound.rough
    assert list(bound.on_floor) == [True] * 8 + [False]
    assert (free.clock.floor_s, len(free)) == (0, 8)


def test_a_trace_keeps_suspect_rows_apart(tmp_path: Path):
    table = read(tmp_path, "model_ops")
    suspect = {b.device: b.suspect for b in table.batches if b.op == "linear"}
    assert suspect["NVIDIA_A100-PCIE-40GB"]
    assert not suspect["Tesla_T4"]
    (work,) = batch(table, "matmul").works
    assert {d: float(n[0]) for d, n in work.dims} == {"b": 128, "m": 512, "n": 512, "k": 64}
    # a row of the mask is read again and again: the sum reads one large tensor
    assert len(batch(table, "addu").works[0].operands) == 2
    assert table.skipped == {"view launches nothing": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("system,m,n\n1,2,3\n", "the columns are not those of a table that"),
        ("", "the columns are not those of a table that"),
        (None, "cannot read the table"),
    ],
)
def test_what_is_no_table_is_said(tmp_path: Path, text: str | None, message: str):
    path = tmp_path / "x.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_table(path)


def test_a_table_that_a_spreadsheet_wrote(tmp_path: Path):
    path = tmp_path / "x.csv"
    path.write_text(TABLES["gemm"], encoding="utf-8-sig")
    assert read_table(path).count == read(tmp_path, "gemm").count


def test_a_column_that_is_there_twice_is_said(tmp_path: Path):
    path = tmp_path / "x.csv"
    path.write_text("device,b,b,h,op,latency_us\nt4,1,2,1024,add,500\n")
    with pytest.raises(UsageError, match="a column name occurs twice"):
        read_table(path)


def test_broken_parquet_is_said(tmp_path: Path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(UsageError, match="cannot read the table"):
        read_table(path)


def test_columns_read_as_words_or_numbers(tmp_path: Path):
    path = tmp_path / "x.csv"
    path.write_text("a,b,gated,none\n1,x,True,\n2.5,,False,\n\n,y,True,\n")
    columns = TableFile(path).read(("a", "b", "gated", "none"))
    assert columns.count == 3
    assert np.array_equal(columns.numbers("a"), [1, 2.5, np.nan], equal_nan=True)
    assert columns.words("a").names[:2] == ("1", "2.5")
    assert list(columns.words("b").where("")) == [False, True, False]
    assert list(columns.numbers("gated")) == [1, 0, 1]
    assert list(columns.numbers("absent", 7.0)) == [7, 7, 7]
    assert list(columns.words("absent").names) == [""]


def test_a_pipe_is_no_table(tmp_path: Path):
    """It would be opened twice, and what was read first is gone."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a table"):
        _ = TableFile(tmp_path / "pipe").names


def test_a_csv_file_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gpuir.fit.columns.LARGEST_TEXT", 7)
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="too large"):
        TableFile(tmp_path / "x.csv").read(("a",))


@pytest.mark.parametrize("bound", ["MOST_ROWS", "LARGEST_UNPACKED"])
def test_a_parquet_file_has_a_bound(bound: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows that say the same take next to nothing in the file."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    words = arrow.array(["x" * 1000] * 5000)
    path = tmp_path / "x.parquet"
    parquet.write_table(arrow.table({"op": words, "b": [1.0] * 5000}), path)
    columns = TableFile(path).read(("op", "b"))
    assert columns.words("op").names[0] == "x" * 1000 and columns.count == 5000
    monkeypatch.setattr(f"gpuir.fit.columns.{bound}", 100)
    with pytest.raises(UsageError, match="too large"):
        TableFile(path).read(("op", "b"))


def test_words_that_become_equal_are_one():
    words = WordColumn.of(["a1", "b1", "a2"]).mapped(lambda w: w[0])
    assert words.names == ("a", "b")
    assert list(words.codes) == [0, 1, 0]


PUBLIC = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.skipif(not PUBLIC.exists(), reason="the public data is not beside this checkout")
def test_every_public_table_is_known():
    """Of kernels; those of whole models, training, serving and tuning are read elsewhere, or not
    yet."""
    pytest.importorskip("pyarrow")
    paths = [
        p for folder in ("hardware", "kernels", "neusight") for p in PUBLIC.glob(f"{folder}/*")
    ]
    tables = {p for p in paths if p.suffix in (".parquet", ".csv")}
    for path in sorted(tables - {PUBLIC / "kernels" / "systems_pipeweave.csv"}):
        assert recognise(TableFile(path), READERS), path


def test_every_reader_is_in_the_documentation():
    root = Path(__file__).parents[2]
    for reader in READERS:
        if isinstance(reader, Reader):
            ours = reader in OURS
            text = (
                root / ("docs/guide/eval.md" if ours else "docs/validation/data.md")
            ).read_text()
            assert f"| {reader.name}{' (rough)' if reader.rough else ''} |" in text
