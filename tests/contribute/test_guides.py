"""The guides of docs/contribute work: their diffs apply to gpuir, and what they run then runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "contribute"
BLOCK = re.compile(r"```(diff|sh|python)\n(.*?)```", re.DOTALL)
PAGES = [p for p in sorted(GUIDES.glob("*.md")) if BLOCK.search(p.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_guide_works(page: Path, tmp_path: Path):
    for folder in ("gpuir", "specs", "examples"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    command = tmp_path / "bin" / "gpuir"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpuir "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": path}
    for language, text in BLOCK.findall(page.read_text()):
        match language:
            case "diff":
                words = ["patch", "-p1", "--fuzz=0", "-s"]
            case "sh":
                words, text = ["bash", "-euo", "pipefail", "-c", text], None
            case _:
                words = [sys.executable, "-"]
        done = subprocess.run(
            words, input=text, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words[0]}: {done.stdout}{done.stderr}"
