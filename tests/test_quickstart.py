"""The quick start: a script, and a notebook with the same cells. Both run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPT, NOTEBOOK = EXAMPLES / "quickstart.py", EXAMPLES / "quickstart.ipynb"


def test_the_script_runs_from_anywhere(tmp_path: Path):
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("latency ")


def test_the_notebook_has_the_cells_of_the_script():
    jupytext = pytest.importorskip("jupytext", reason="pip install 'gpuir[test]'")
    script, notebook = (jupytext.read(path) for path in (SCRIPT, NOTEBOOK))
    cells = [[(c.cell_type, c.source) for c in book.cells] for book in (script, notebook)]
    assert cells[0] == cells[1], "jupytext --to ipynb --execute examples/quickstart.py"


@pytest.mark.slow
def test_the_notebook_runs():
    jupytext = pytest.importorskip("jupytext", reason="pip install 'gpuir[test]'")
    nbclient = pytest.importorskip("nbclient", reason="pip install 'gpuir[test]'")
    pytest.importorskip("ipykernel", reason="pip install 'gpuir[test]'")
    book = jupytext.read(NOTEBOOK)
    metadata = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(book, timeout=120, kernel_name="python3", resources=metadata).execute()
    shown = [o for c in book.cells for o in c.get("outputs", ()) if "data" in o]
    assert any("text/html" in o["data"] for o in shown)  # the summary
