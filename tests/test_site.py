"""The documentation site is built without a warning: no broken link, no page left out."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpuir.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path):
    pytest.importorskip("sphinx", reason="pip install 'gpuir[docs]'")
    command = (sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "docs", str(tmp_path))
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-5000:]
    page = (tmp_path / "reference" / "commands.html").read_text()
    titles = re.findall(r"<h[234]>(.*?)<a", page)
    assert set(COMMANDS) <= set(titles) and "command" not in titles
    code = re.findall(r'<div class="highlight-text[^>]*>(.*?)</div>', page, re.DOTALL)
    examples = html.unescape(re.sub(r"<[^>]+>", "", "\n".join(code)))
    assert "gpuir analyze model.onnx --target a100\n" in examples
    assert "\N{EN DASH}" not in page, "an option that cannot be pasted"
    names = (tmp_path / "reference" / "api.html").read_text()
    assert "highlight-python" in names and "<blockquote>" not in names


def test_no_page_installs_gpuir_from_an_index():
    """It is on none yet. With extras the command adds to what is installed already."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        assert not re.search(r"pip install( -\S+)* gpuir\b(?!\[)", page.read_text()), page
