"""`gpuir tune` as a user meets it."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gpuir.cli.main import main
from gpuir.tune.results import Results

ROOT = Path(__file__).parents[2]
# Two products that the tile model and the generated one see alike, a softmax and a map.
MODEL = """graph @net {
  in %x: f16[512, 1024]
  param %w: f16[1024, 1024]
  param %v: f16[1024, 1024]
  param %u: f16[1024, 256]
  %a: f16[512, 1024] = t.matmul(%x, %w) at "net.onnx:/layer.0/MatMul"
  %b: f16[512, 1024] = t.matmul(%a, %v) at "net.onnx:/layer.1/MatMul"
  %p: f16[512, 1024] = t.softmax(%b, 1) at "net.onnx:/Softmax"
  %q: f16[512, 1024] = t.map("exp", [%p]) at "net.onnx:/Exp"
  %c: f16[512, 256] = t.matmul(%q, %u) at "net.onnx:/head/MatMul"
  out %c
}
"""
ARGS = ("net.gir", "--target", "h100-sxm", "--profile", "ideal")
# Says how long a kernel takes: by how much it is off hangs on the tile. Writes down what it did.
BENCH = """
import json, sys, time
asked = json.loads(sys.stdin.readline())
tile = asked["tile"]
with open("log", "a") as log:
    log.write(json.dumps([asked["kernel"]["name"], tile]) + "\\n")
time.sleep({nap})
size = 1
for n in tile["dims"].values():
    size *= n
print(5e-6 * (1 + size % 7) * (1 + tile["stages"] % 3) * (1 + tile["warps"] / 8))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.gir").write_text(MODEL)
    (tmp_path / "bench.py").write_text(BENCH.format(nap=0))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: str, status: int = 0) -> Result:
    done = CliRunner().invoke(main, args)
    assert done.exit_code == status, (done.output, done.exception)
    return done


def tune(*args: str, status: int = 0) -> Result:
    return run("tune", *ARGS, *args, status=status)


def found(*args: str) -> dict[str, Any]:
    return json.loads(tune(*args, "--json").stdout)


MEASURE = ("--measure", f"{sys.executable} bench.py")


# ---------------------------------------------------------------------------- the report


def test_the_main_job(folder: Path):
    text = tune("-o", "best.sched", "--width", "120").stdout
    assert text.startswith("net on NVIDIA H100 80GB HBM3 (h100-sxm-80gb) under ideal: generated")
    assert re.search(r"^kernels +\d distinct of \d launches; exhaustive: [\d,]+ tiles", text, re.M)
    assert "tile@2 for the library's kernels, generated@" in text
    assert "x2 " in text and "/layer.*/MatMul" in text  # equal kernels together
    whole = tune("--all", "-o", "all.sched").stdout
    assert "chosen all the same" in whole or "predicted to be as fast" not in whole
    for file in ("best.sched", "all.sched"):
        legal = run("schedule", "check", file, "net.gir", "--profile", "ideal").stdout
        count = (folder / file).read_text().count(": tile(")
        assert f"{count} of {count} tiles are legal" in legal
        run("analyze", *ARGS, "--schedule", file)


@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_a_terminal(folder: Path, width: int):
    lines = tune("--width", str(width), *MEASURE, "--best", "1").stdout.splitlines()
    assert max(map(len, lines)) <= width
    (titles,) = [line for line in lines if "library" in line and "takes" in line]
    for title in ("generated", "80 %", "measured", "tile", "layer"):
        assert title in titles


def test_json_says_what_the_table_says(folder: Path):
    report = found("-o", "best.sched")
    assert report["schema"] == "gpuir.tune/1" and report["fusion"] is None
    assert report["library_s"] >= report["chosen_s"] > 0
    text = (folder / "best.sched").read_text()
    for x in report["kernels"]:
        assert x["tried"] == x["legal"] <= x["candidates"]
        times = [r["time_s"] for r in x["ranking"]]
        assert times == sorted(times)
        others = [r["time_s"] for r in x["ranking"] if r["tile"] != x["library"]["tile"]]
        faster = bool(x["tile"]) and others[0] < 0.99 * x["library"]["time_s"]
        for name in x["names"]:
            assert (f"%{name}: tile({x['tile']})" in text) == (x["takes"] == "tile")
        assert x["takes"] == ("tile" if faster else "library")
        assert x["tile"] != x["library"]["tile"]  # which stands for the library's kernel


def test_only_the_schedule(folder: Path):
    tune("-o", "best.sched")
    assert tune("-o", "-").stdout == (folder / "best.sched").read_text()


@pytest.mark.parametrize("by", ["beam", "optuna"])
def test_other_searches(folder: Path, by: str):
    report = found("--search", by, "--tries", "30")
    assert all(x["by"] == by and x["tried"] == min(30, x["legal"]) for x in report["kernels"])


def test_fusion_is_searched_and_its_pipeline_applies(folder: Path):
    args = ("net.gir", "--target", "h100-sxm", "--profile", "eager")
    report = json.loads(run("tune", *args, "--fusion", "--json", "-o", "f.sched").stdout)
    fusion = report["fusion"]
    assert fusion["latency_s"] < fusion["start_s"]
    passes = ("--pipeline", fusion["pipeline"])
    again = json.loads(run("analyze", *args, *passes, "--format", "json").stdout)
    assert again["reports"][0]["latency_s"] == pytest.approx(fusion["latency_s"], rel=1e-12)
    run("analyze", *args, *passes, "--schedule", "f.sched")
    run("schedule", "check", "f.sched", "net.gir", "--profile", "eager", *passes)
    assert "--pipeline '" in (folder / "f.sched").read_text().splitlines()[0]


# ---------------------------------------------------------------------------- measuring, the store


def test_measurements_decide(folder: Path):
    report = found(*MEASURE, "--best", "3")
    for x in report["kernels"]:
        measured = {r["tile"]: r["measured_s"] for r in x["ranking"] if r["measured_s"]}
        assert x["tile"] == min(measured, key=measured.__getitem__) and len(measured) == 3
        assert (x["takes"] == "tile") == (measured[x["tile"]] < 0.99 * x["library"]["time_s"])


def test_what_fails_is_said_and_skipped(folder: Path):
    (folder / "bench.py").write_text("import sys; sys.exit('no GPU here')")
    done = tune(*MEASURE, "--best", "2")
    assert "failed     " in done.stdout and "measurements, left out" in done.stdout
    assert "the command ended with status 1: no GPU here; left out" in done.stderr
    assert {x["tile"] for x in found(*MEASURE)["kernels"]} == {
        x["tile"] for x in found()["kernels"]
    }


def test_a_store_is_gone_on_from(folder: Path):
    first = found(*MEASURE, "--best", "3", "--store", "s.db")
    count = len((folder / "log").read_text().splitlines())
    assert count == 3 * len(first["kernels"])
    again = found(*MEASURE, "--best", "3", "--store", "s.db")
    assert len((folder / "log").read_text().splitlines()) == count  # nothing is measured twice
    assert [x["tile"] for x in again["kernels"]] == [x["tile"] for x in first["kernels"]]
    without = found("--store", "s.db")  # measurements count without the command
    assert [x["tile"] for x in without["kernels"]] == [x["tile"] for x in first["kernels"]]
    found(*MEASURE, "--best", "4", "--store", "s.db")
    assert len((folder / "log").read_text().splitlines()) == 4 * len(first["kernels"])


def test_searches_are_kept(folder: Path):
    first = found("--search", "optuna", "--tries", "20", "--store", "s.db")
    again = found("--search", "optuna", "--tries", "20", "--store", "s.db")
    assert all(x["kept"] for x in again["kernels"]) and not any(x["kept"] for x in first["kernels"])
    assert [x["ranking"] for x in again["kernels"]] == [x["ranking"] for x in first["kernels"]]
    assert not any(x["kept"] for x in found("--search", "beam", "--store", "s.db")["kernels"])


def measured(path: Path) -> int:
    if not path.exists():
        return 0
    with closing(sqlite3.connect(path, timeout=30)) as db:
        tables = db.execute("select count(*) from sqlite_master where name = 'results'").fetchone()
        if not tables[0]:
            return 0
        query = "select count(*) from results where measured_s is not null"
        return db.execute(query).fetchone()[0]


def test_a_killed_run_goes_on(folder: Path):
    """Killed in the middle of measuring, twice: what was measured is not measured again, and the
    end is that of a run that nobody killed."""
    (folder / "bench.py").write_text(BENCH.format(nap=0.05))
    best = ("--best", "4")
    whole = found(*MEASURE, *best, "--store", "whole.db")
    (folder / "log").unlink()
    command = [sys.executable, "-m", "gpuir", "tune", *ARGS, *MEASURE, *best, "--store", "s.db"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for least in (2, 7):
        with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
            while measured(folder / "s.db") < least and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        assert least <= measured(folder / "s.db") < 4 * len(whole["kernels"])
    time.sleep(0.2)  # for the last command that was started
    report = found(*MEASURE, *best, "--store", "s.db")
    done = (folder / "log").read_text().splitlines()
    assert len(done) - len({*done}) <= 2  # what was in hand when it was killed
    assert measured(folder / "s.db") == 4 * len(whole["kernels"])
    keys = ("names", "tile", "takes")
    assert [[x[k] for k in keys] for x in report["kernels"]] == [
        [x[k] for k in keys] for x in whole["kernels"]
    ]


def test_a_tile_that_is_not_legal_any_more(folder: Path):
    """Measured before, and refused by this version: said, and not chosen."""
    found(*MEASURE, "--best", "1", "--kernels", "1", "--store", "s.db")
    with closing(sqlite3.connect("s.db")) as db:
        db.execute(
            "update results set tile = 'm=7, n=64, k=64; stages=3, warps=4'"
            " where measured_s is not null"
        )
        db.commit()
    done = tune("--store", "s.db", "--kernels", "1", "--json")
    assert "measured before, but is not legal by generated@" in done.stderr
    (kernel,) = json.loads(done.stdout)["kernels"]
    assert kernel["tile"] and "m=7" not in kernel["tile"]


def test_a_store_of_another_predictor(folder: Path):
    with Results("s.db", "generated@0"):
        pass
    with closing(sqlite3.connect("s.db")) as db:
        db.execute(
            "insert into results (kernel, target, predictor, tile, predicted_s)"
            " values ('k', 't', 'generated@0', 'm=16; stages=1, warps=4', 1e-5)"
        )
        db.commit()
    warned = tune("--store", "s.db").stderr
    assert "1 predictions are by generated@0" in warned and "`--forget`" in warned
    assert tune("--store", "s.db", "--forget").stderr == ""
    assert tune("--store", "s.db").stderr == ""


# ---------------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--search", "optna"), "did you mean optuna"),
        (("--measure", "no-such-bench"), "there is no program 'no-such-bench'"),
        (("--store", "notes.txt"), "gpuir cannot use the store"),
        (("--store", "net.gir"), "the output file is also an input"),
        (("--store", "none/s.db"), "there is no such folder to write to"),
        (("--store", "s.db", "-o", "s.db"), "two results would be written to one file"),
        (("-o", "net.gir"), "the output file is also an input"),
        (("--forget",), "--forget is of a store"),
        (("--best", "0"), "not in the range"),
        (("--pipeline", "legalize", "--fusion"), "the pipeline has no pass that fuses ops"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, args: tuple[str, ...], message: str):
    (folder / "s.db").write_text("")
    (folder / "notes.txt").write_text("no database: " * 100)
    error = tune(*args, status=2).stderr
    assert message in error and "Traceback" not in error


def test_a_target_that_cannot_be_tuned_for(folder: Path):
    assert "no target given" in run("tune", "net.gir", status=2).stderr
    assert "give one --target" in run("tune", "net.gir", "--target", "a100,l4", status=2).stderr
    assert "is a CPU" in run("tune", "net.gir", "--target", "x86-64-v4", status=2).stderr


def test_a_schedule_with_a_tile_of_nothing(folder: Path):
    (folder / "zero.sched").write_text(
        "schedule @net for h100-sxm { %a: tile(m=0, n=64, k=32; stages=1, warps=4) }\n"
    )
    args = ("--profile", "ideal")
    for command in (
        ("schedule", "check", "zero.sched", "net.gir", *args),
        ("analyze", *ARGS, "--schedule", "zero.sched"),
    ):
        assert "'m=0' has another form than m=64" in run(*command, status=2).stderr
