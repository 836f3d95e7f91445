"""The documentation site is built without a warning: no broken link, no page left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path):
    pytest.importorskip("sphinx", reason="pip install 'gpuir[docs]'")
    command = (sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(tmp_path))
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-5000:]
    assert "gpuir analyze" in (tmp_path / "reference" / "commands.html").read_text()
