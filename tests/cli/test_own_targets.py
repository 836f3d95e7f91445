"""Targets from files of one's own beside shipped ones: each has a name, in every table."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from gpuir.cli.main import main

ENCODER = str(Path(__file__).parents[1] / "encoder.onnx")


def run(*args: str, status: int = 0) -> str:
    done = CliRunner().invoke(main, args)
    assert done.exit_code == status, (done.output, done.exception)
    return done.stdout or done.output


def variant(folder: Path, name: str = "l4-next.toml") -> str:
    file = folder / name
    file.write_text('base = "l4"\nsms = 64\n[sources]\n"sms" = "a test"\n')
    return str(file)


def test_a_comparison_tells_them_apart(tmp_path: Path):
    text = run(
        "analyze", ENCODER, "--target", f"l4,{variant(tmp_path)}", "--dims", "batch=8,seq=64"
    )
    rows = [line.split()[0] for line in text.splitlines() if line.startswith("l4")]
    assert rows == ["l4", "l4-next"]


def test_even_a_file_of_the_same_name(tmp_path: Path):
    file = variant(tmp_path, "l4.toml")
    args = ("--target", f"l4,{file}", "--dims", "batch=8,seq=64")
    assert file[-12:] in run("analyze", ENCODER, *args, "--width", "300")
    said = run(
        "sweep", ENCODER, "--target", f"l4,{file}", "--batch", "8", "--dims", "seq=64", status=2
    )
    assert "two targets have the name 'l4'" in said


def test_a_sweep_runs_both(tmp_path: Path):
    args = ("--target", f"l4,{variant(tmp_path)}", "--batch", "8", "--dims", "seq=64")
    found = json.loads(run("sweep", ENCODER, *args, "--format", "json"))
    times = {p["target"]: p["latency_s"] for p in found["points"]}
    assert [*times] == ["l4", "l4-next"] and times["l4"] != times["l4-next"]
    fits = json.loads(
        run("largest", ENCODER, *args[:2], "--dim", "batch", *args[4:], "--format", "json")
    )
    assert [x["target"] for x in fits["fits"]] == ["l4", "l4-next"]
