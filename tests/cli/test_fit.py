"""`gpuir fit` as a user meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from measured import TABLES

from gpuir.cli.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gemm.csv").write_text(TABLES["gemm"])
    (tmp_path / "none.csv").write_text(TABLES["gemm"].splitlines(keepends=True)[0])
    return tmp_path


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["fit", *args])


def test_weights_and_their_card(folder: Path):
    pytest.importorskip("torch")
    result = run("gemm.csv", "-o", "w.json", "--quick")
    assert result.exit_code == 0, result.stderr
    assert json.loads((folder / "w.json").read_text())
    assert "gemm.csv" in (folder / "w.md").read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("gone.csv", "-o", "w.json"), "cannot read the table"),
        (("gemm.csv", "-o", "gone/w.json"), "there is no such folder"),
        (("gemm.csv", "-o", "w.md"), "the file of the card would overwrite the"),
        (("gemm.csv", "-o", "w.json", "--without", "sparkle"), "no target is called"),
        (("gemm.csv", "-o", "w.json", "--seed", "-5"), "Invalid value for '--seed'"),
        (("gemm.csv", "-o", "w.json", "--seed", "9" * 30), "Invalid value for '--seed'"),
    ],
)
def test_wrong_input_is_said(folder: Path, args: tuple[str, ...], message: str):
    result = run(*args)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert not list(folder.glob("w.*"))


def test_that_torch_is_missing_is_said_before_tables_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("gone.csv", "-o", "w.json")
    assert (result.exit_code, "fitting needs torch" in result.stderr) == (2, True), result.stderr


def test_without_rows_there_are_no_weights(folder: Path):
    pytest.importorskip("torch")
    result = run("none.csv", "-o", "w.json", "--quick")
    assert (result.exit_code, "the tables have no rows to fit to" in result.stderr) == (2, True), (
        result.stderr
    )
    assert not list(folder.glob("w.*"))
