"""The code as the tools of pyproject.toml want it: linted, formatted, typed."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "lint": ("ruff", "check", "--no-cache"),
    "format": ("ruff", "format", "--no-cache", "--diff"),
    "types": ("pyright", "--pythonpath", sys.executable),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "types" else n for n in COMMANDS]
)
def test_tool_has_no_complaint(name: str):
    tool, *args = COMMANDS[name]
    if find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed: pip install 'gpuir[test]'")
    quiet = {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}  # or it asks the network for its newest version
    command = [sys.executable, "-m", tool, *args]
    found = subprocess.run(
        command, cwd=ROOT, env=os.environ | quiet, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-5000:]
