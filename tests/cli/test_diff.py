"""`gpuir diff` as CI meets it: reports and models on either side, exit status, messages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from cli.test_cli import MLP
from click.testing import CliRunner, Result

from gpuir.backends.table import FORMATS
from gpuir.cli.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two versions of a model, the second four times as wide, and reports of both."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.gir").write_text(MLP)
    (tmp_path / "new.gir").write_text(MLP.replace("4096", "16384"))
    for name in ("old", "new"):
        run("analyze", f"{name}.gir", "--target", "a100", "--format", "json", "-o", f"{name}.json")
    return tmp_path


def run(*args: str, status: int = 0) -> Result:
    done = CliRunner().invoke(main, args)
    assert done.exit_code == status, (done.output, done.exception)
    return done


def test_reports(folder: Path):
    text = run("diff", "old.json", "new.json").stdout
    assert text.startswith("mlp on a100-sxm-40gb ")
    assert "shape" in text and "MatMul_3" in text


def test_a_model_beside_a_report_is_analyzed_for_what_the_report_is_of(folder: Path):
    run("analyze", "old.gir", "--target", "a100,l4", "--format", "json", "-o", "both.json")
    text = run("diff", "both.json", "old.gir").stdout
    assert "mlp: 2 runs compared" in text and text.count("nothing differs") == 2
    text = run("diff", "new.gir", "old.gir", "--target", "l4").stdout
    assert text.startswith("mlp on l4")


def test_target_and_profile_choose_runs_of_a_report(folder: Path):
    args = ("--target", "a100,l4", "--profile", "eager,compiled", "--format", "json")
    run("analyze", "old.gir", *args, "-o", "four.json")
    text = run("diff", "four.json", "four.json", "--target", "l4", "--profile", "eager").stdout
    assert text.startswith("mlp on l4 eager\nnothing differs")
    error = run("diff", "old.json", "old.json", "--target", "t4", status=2).stderr
    assert "old.json: the report has no target t4" in error and "a100-sxm-40gb" in error


def test_a_budget_decides_the_exit_status(folder: Path):
    run("diff", "old.json", "new.json", "--budget", "launches=+0")
    done = run(
        *("diff", "old.json", "new.json", "--budget", "latency=+3%", "--budget", "launches=+0"),
        status=1,
    )
    assert "over budget: latency=+3% on a100-sxm-40gb" in done.stderr
    assert "launches" not in done.stderr
    run("diff", "new.json", "old.json", "--budget", "latency=-3%")


def test_what_ci_reads_is_written_though_the_budget_is_exceeded(folder: Path):
    over = ("diff", "old.json", "new.json", "--budget", "memory=+1MB")
    run(*over, "--format", "junit", "-o", "out.xml", status=1)
    suites = ElementTree.parse(folder / "out.xml").getroot()
    assert (suites.get("tests"), suites.get("failures")) == ("1", "1")
    run(*over, "--format", "json", "-o", "out.json", status=1)
    assert json.loads((folder / "out.json").read_text())["kept"] is False
    assert "## 1 of 1 budgets exceeded" in run(*over, "--format", "markdown", status=1).stdout


def test_the_same_twice(folder: Path):
    for format in (*FORMATS, "junit"):
        args = ("diff", "old.json", "new.json", "--format", format, "--budget", "bytes=+1%")
        assert run(*args, status=1).stdout == run(*args, status=1).stdout


@pytest.mark.parametrize("field", ["latency_s", "launches", "batch"])
@pytest.mark.parametrize("number", ["9" * 400, "1" + "0" * 5000, "1e999"])
def test_a_number_beyond_all_is_not_what_a_report_has(folder: Path, field: str, number: str):
    run("analyze", "old.gir", "--target", "t4", "--format", "json", "-o", "good.json")
    text = Path("good.json").read_text()
    Path("bad.json").write_text(re.sub(f'"{field}": [^,]*', f'"{field}": {number}', text))
    done = run("diff", "good.json", "bad.json", status=2)
    assert "bad.json" in done.stderr and len(done.stderr) < 400


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("old.json", "gone.json"), "gone.json: cannot read the report"),
        (("old.json", "old.gir.json"), "old.gir.json: not JSON"),
        (("old.gir", "new.gir"), "no target given"),
        (("old.json", "new.json", "--dims", "batch=8"), "--dims is for models"),
        (("old.json", "new.json", "--predictor", "roofline"), "--predictor is for models"),
        (("old.json", "new.json", "--budget", "speed=+3%"), "no budget can be set for 'speed'"),
        (("old.json", "new.json", "-o", "gone/out.txt"), "no such folder"),
        (("old.json", "gone.gir"), "gone.gir"),
    ],
)
def test_what_is_wrong_is_said(folder: Path, args: tuple[str, ...], message: str):
    (folder / "old.gir.json").write_text(MLP)
    done = run("diff", *args, status=2)
    assert message in done.stderr and not done.stdout
