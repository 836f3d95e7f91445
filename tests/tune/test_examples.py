"""`examples/tune_a_template.py` and the guides' Python."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("tuner", ["optuna", "kernel-tuner"])
def test_the_example_comes_near_the_best(tuner: str):
    if find_spec(tuner.replace("-", "_")) is None:
        pytest.skip(f"{tuner} is not installed: gpuir[tune], gpuir[kernel-tuner]")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / "tune_a_template.py"), tuner],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (first,) = re.findall(r"within 5 % of the best at number (\d+)", done.stdout)
    assert int(first) <= 20 and "schedule @gemm for a100-sxm-40gb" in done.stdout


@pytest.mark.parametrize("guide", ["tuning-tvm.md", "tuning-kernel-tuner.md"])
def test_what_the_guides_import_is_there(guide: str):
    blocks = re.findall(
        r"```py\n(.*?)```", (ROOT / "docs" / "guide" / guide).read_text(), re.DOTALL
    )
    imports = [
        node
        for block in blocks
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpuir")
    ]
    assert imports
    for node in imports:
        module = __import__(node.module or "", fromlist=["*"])
        assert all(hasattr(module, alias.name) for alias in node.names)
