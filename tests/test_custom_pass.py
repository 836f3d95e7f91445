"""Passes of one's own, used as a user would: from another folder, by file and by entry point."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DOC = (ROOT / "docs/extend/custom-passes.md").read_text()
GRAPH = """graph @g {
  in %x: f32[2]
  %y: f32[2] = t.map("div", [%x], imm=[4.0]) at "m:Div"
  out %y
}
"""


def gpuir(*args: str, cwd: Path, path: str = "") -> str:
    env = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "gpuir", *args]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder outside the repository with the documented module and a graph."""
    (tmp_path / "mine.py").write_text(re.findall(r"```python\n(.*?)```", DOC, re.DOTALL)[0])
    (tmp_path / "g.gir").write_text(GRAPH)
    return tmp_path


def test_documented_pass_from_a_file(folder: Path):
    out = gpuir("opt", "g.gir", "--load", "mine.py", "--pipeline", "multiply_instead", cwd=folder)
    assert 't.map("mul", [%x], imm=[0.25]) at "m:Div"' in out


def test_documented_pass_by_entry_point(folder: Path):
    info = folder / "site" / "mine-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.move(folder / "mine.py", folder / "site" / "mine.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[gpuir.passes]\nmultiply_instead = mine:MultiplyInstead\n"
    )
    out = gpuir(
        *("opt", "g.gir", "--pipeline", "multiply_instead"), cwd=folder, path=str(folder / "site")
    )
    assert "imm=[0.25]" in out


@pytest.mark.slow
def test_merging_projections_saves_launches_and_time(tmp_path: Path):
    shutil.copy(ROOT / "examples/merge_projections.py", tmp_path)
    shutil.copy(ROOT / "examples/encoder.onnx", tmp_path)
    common = ("analyze", "encoder.onnx", "--target", "t4", "--dims", "batch=1,seq=128")

    def report(*options: str) -> dict[str, Any]:
        (found,) = json.loads(gpuir(*common, *options, "--format", "json", cwd=tmp_path))["reports"]
        return found

    passes = "recognize,fuse,legalize"
    plain = report("--pipeline", f"canonicalize,{passes}")
    mine = ("--load", "merge_projections.py")
    merged = report(*mine, "--pipeline", f"canonicalize,merge_projections,{passes}")
    assert plain["launches"] - merged["launches"] == 24  # two a layer
    assert merged["latency_s"] < plain["latency_s"]
    assert merged["flops"] == pytest.approx(plain["flops"], rel=1e-3)
