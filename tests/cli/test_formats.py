"""Every command that answers with a table has every format."""

from __future__ import annotations

import csv
import json
from io import BytesIO, StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpuir.backends.structured import to_csv
from gpuir.backends.table import FORMATS
from gpuir.backends.terminal import Terminal
from gpuir.cli.main import main
from gpuir.report.table import Report

pytestmark = pytest.mark.slow

ENCODER = str(Path(__file__).parents[1] / "encoder.onnx")
SHORT = ("--dims", "batch=2,seq=32", "--target", "a100")
TABLES = "name,rows,width,dtype,lookups\na,1000,64,f32,10\nb,5000000,32,f32,1\n"
SAMPLE = str(Path(__file__).parents[2] / "validation/sample/neusight_elementwise.parquet")
MIXED = "2xl40s+2xa40"
DAY = "time,live\n0:00,50\n8:00,3000\n20:00,200\n"
LAYOUTS = ("mig", "layouts", "a30", "--place", "2g.12gb+2x1g.6gb")
SHARD = ("shard", "tables.csv", "--cluster", "2xl40s", "--seconds", "0")
SWEEP = ("sweep", ENCODER, *SHORT[2:], "--batch", "1,2", "--dims", "seq=32")
ADVISE = ("advise", ENCODER, *SHORT, "--only", "stack,batch")
MIG = ("--gpu", "a30", "--model", f"{ENCODER}:name=live:batch=1:seq=32:deadline=20ms")
MIG += ("--model", f"{ENCODER}:name=idle:batch=8:seq=32", "--requests", "50")
DIFF = ("diff", ENCODER, ENCODER, *SHORT, "--budget", "latency=+1%")
ANALYZE = ("analyze", ENCODER, *SHORT[:2], "--target", "a100,l4")
COMMANDS = {  # and a field that tells its rows apart
    ANALYZE: "kernel",
    ("analyze", ENCODER, "--dims", "seq=32", "--target", "a100", "--crossover", "batch"): "value",
    (
        "largest",
        ENCODER,
        "--target",
        "t4",
        "--dim",
        "batch",
        "--max",
        "4",
        "--dims",
        "seq=32",
    ): "value",
    SWEEP: "batch",
    ADVISE: "change",
    DIFF: "layer",
    ("simulate", ENCODER, *SHORT[:2], "--cluster", MIXED, "--dp", "2", "--tp", "2"): "gpu",
    ("plan", ENCODER, *SHORT[:2], "--cluster", "2xl40s", "--tp", "1,2"): "tp",
    SHARD: "name",
    ("explain", ENCODER, *SHORT, "--profile", "ort", "--fusions"): "path",
    ("eval", "kernels", SAMPLE): "op",
    ("mig", "layouts", "a30"): "name",
    LAYOUTS: "start",
    ("mig", "plan", *MIG, "--ways", "mig,serial"): "plan",
    ("mig", "timetable", *MIG, "--ways", "mig", "--day", "day.csv"): "start_s",
}
QUICK = (LAYOUTS, SHARD)


def written(command: tuple[str, ...], form: str, folder: Path) -> bytes:
    path = folder / f"answer.{form}"
    done = CliRunner().invoke(main, [*command, "--format", form, "-o", str(path)])
    assert done.exit_code == 0, (done.output, done.exception)
    return path.read_bytes()


def in_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tables.csv").write_text(TABLES)
    Path("day.csv").write_text(DAY)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "-".join(command[:2])[:16])
def test_every_format_has_the_answer(
    command: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """The command runs once; its report is then written in each format."""
    asked: list[tuple[Report, Terminal]] = []

    def kept(report: Report, layout: Terminal) -> str:
        asked.append((report, layout))
        return to_csv(report, layout)

    monkeypatch.setattr("gpuir.backends.structured.to_csv", kept)
    found = written(command, "csv", folder)
    monkeypatch.undo()
    made = {form: in_bytes(write(*asked[0])) for form, write in FORMATS.items()}
    assert made["csv"] == found
    field = COMMANDS[command]
    rows = list(csv.DictReader(StringIO(found.decode())))
    assert rows and len({row[field] for row in rows}) > 1
    assert json.loads(made["json"])["schema"].startswith("gpuir.")
    assert made["markdown"].decode().count("| ---") + made["markdown"].decode().count("| --:")
    assert b"<!doctype html>" in made["html"] and b'<table class="plain">' in made["html"]
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'gpuir[sweep]'")
    table = parquet.read_table(BytesIO(made["parquet"]))
    assert table.num_rows == len(rows) and table.column_names == list(rows[0])


@pytest.mark.parametrize("command", QUICK, ids=lambda command: command[0])
def test_every_format_can_be_asked_for(command: tuple[str, ...], folder: Path):
    made = {form: written(command, form, folder) for form in FORMATS}
    assert len(set(made.values())) == len(made)
    assert made["json"].startswith(b"{") and made["parquet"].startswith(b"PAR1")
    assert written(command, "table", folder) == made["text"]  # its older name


def test_what_a_search_found_is_printed_beside_its_schedule(tmp_path: Path):
    out = str(tmp_path / "a.sched")
    args = ("tune", ENCODER, *SHORT, "--kernels", "1", "--tries", "20", "--search", "beam")
    for flags in (("--json",), ("--format", "json")):
        done = CliRunner().invoke(main, [*args, *flags, "-o", out])
        assert json.loads(done.stdout)["schema"] == "gpuir.tune/1"
    (row,) = csv.DictReader(StringIO(CliRunner().invoke(main, [*args, "--format", "csv"]).stdout))
    assert row["kernel"].startswith("k.") and float(row["library.time_s"]) > 0
