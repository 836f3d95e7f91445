"""Every command and every line of Python in the tutorials runs, as a reader would run it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import tutorials

EXTRAS = {"hf": "transformers", "torch": "torch", "plot": "matplotlib", "mig": "simpy"}
NEEDS = re.compile(r"gpuir\[([\w,-]+)\]")


def missing(page: Path) -> list[str]:
    """The extras that the page names and that are not installed."""
    named = {e for found in NEEDS.findall(page.read_text()) for e in found.split(",")}
    return [e for e in named if find_spec(EXTRAS.get(e, "gpuir")) is None]


def shortened(code: str) -> str:
    """Plans are simulated with few requests: nobody reads their numbers here."""
    for kind in ("plan", "timetable"):
        code = code.replace(f"gpuir mig {kind} ", f"gpuir mig {kind} --requests 50 ")
    return code


@pytest.mark.slow
@pytest.mark.parametrize("page", tutorials.PAGES, ids=lambda page: page.stem)
def test_the_tutorial_runs(page: Path, tmp_path: Path):
    if lacking := missing(page):
        pytest.skip(f"pip install 'gpuir[{','.join(lacking)}]'")
    ran = list(tutorials.run(page, tmp_path, shortened))
    assert ran
    for picture in tutorials.PICTURE.findall(page.read_text()):
        assert (page.parent / picture).exists()
