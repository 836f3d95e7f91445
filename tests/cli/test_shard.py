"""`gpuir shard` as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import gpuir
from gpuir.cli.main import main
from gpuir.plan.highs import is_there

TABLES = """[
  {"name": "items", "rows": 2000000, "width": 128, "lookups": 20, "indices": "zipf:1.2"},
  {"name": "small", "rows": 1000, "width": 16, "count": 3}
]"""


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["shard", *args])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").write_text(TABLES)
    return tmp_path


def test_a_report_has_placements_reasons_and_gpus():
    result = run("t.json", "--cluster", "4xa100-sxm-80gb", "--seconds", "0", "--width", "160")
    assert result.exit_code == 0, result.stderr
    text = result.stdout
    assert text.startswith("t.json: 4 tables on ")
    for word in ("items", "small.0", "mean load", "lookups", "all-to-all", "assumed"):
        assert word in text
    assert "not proven to be the fastest" in " ".join(text.split())


@pytest.mark.skipif(not is_there(), reason="highspy is not installed")
def test_json_has_every_table_and_gpu():
    result = run("t.json", "--cluster", "dgx-a100", "--format", "json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["schema"] == "gpuir.shard/1" and found["cluster"] == "dgx-a100"
    assert [t["name"] for t in found["tables"]] == ["items", "small.0", "small.1", "small.2"]
    assert len(found["gpus"]) == 8
    assert found["time_s"] == pytest.approx(sum(found["parts"].values()))
    assert found["least_s"] > 0 and found["time_s"] <= found["greedy_s"] * (1 + 1e-9)


@pytest.mark.skipif(not is_there(), reason="highspy is not installed")
def test_the_solver_writes_nothing_to_stdout():
    """In a process of its own, as HiGHS prints past Python's `sys.stdout`."""
    command = [sys.executable, "-m", "gpuir", "shard", "t.json", "--cluster", "dgx-a100"]
    env = os.environ | {"PYTHONPATH": str(Path(gpuir.__file__).parents[1])}
    done = subprocess.run(
        [*command, "--format", "json"], capture_output=True, text=True, env=env, timeout=120
    )
    assert json.loads(done.stdout)["schema"] == "gpuir.shard/1"


def test_one_gpu_and_inference():
    result = run("t.json", "--cluster", "1xa100-sxm-80gb", "--inference")
    assert result.exit_code == 0, result.stderr
    assert "updates" not in result.stdout.partition("limit")[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("gone.json", "--cluster", "dgx-a100"), "cannot read the tables"),
        (("t.json", "--cluster", "dgx-a101"), "dgx-a100"),
        (("t.json", "--cluster", "dgx-a100", "--cut", "colunm"), "did you mean column"),
        (("t.json", "--cluster", "dgx-a100", "--batch", "0"), "--batch"),
        (("t.json", "--cluster", "dgx-a100", "--memory", "nan"), "--memory"),
        (("wide.json", "--cluster", "dgx-a100"), "table table1, of 65,536 samples: a shape is"),
        (("large.json", "--cluster", "dgx-a100", "--cut", "table"), "--cut table,row: 19.35 GB on"),
        (("huge.json", "--cluster", "dgx-a100"), "fix:      at least 76 GPUs, or a narrower"),
        (
            ("huge.json", "--cluster", "dgx-a100", "--cut", "table"),
            "--cut table,row on at least 76",
        ),
        (("one.csv", "--cluster", "dgx-a100", "--cut", "column"), "cannot be split by column"),
        (("more.json", "--cluster", "dgx-a100"), "the tables do not fit into all GPUs together"),
        (("t.json", "--cluster", "dgx-a100", "-o", "gone/x"), "no such folder"),
        (("t.txt", "--cluster", "dgx-a100"), "the format of the file is not known"),
    ],
)
def test_wrong_input_is_said(folder: Path, args: tuple[str, ...], message: str):
    (folder / "t.txt").write_text(TABLES)
    (folder / "large.json").write_text('[{"rows": 300000000, "width": 128}]')
    (folder / "huge.json").write_text('[{"rows": 10000000000, "width": 128}]')
    (folder / "wide.json").write_text('[{"rows": 1000, "width": 1099511627776}]')
    (folder / "one.csv").write_text("rows,width\n100,1\n")
    (folder / "more.json").write_text('[{"rows": 100000000, "width": 128, "count": 40}]')
    result = run(*args)
    assert result.exit_code == 2, result.stdout
    assert message in result.stderr
