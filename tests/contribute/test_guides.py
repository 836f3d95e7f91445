"""The guides of docs/contribute work: their diffs apply to gpuir and are as ruff wants them, and
what they run then runs. `tools/guides.py` runs the tests of the folders that they touch, too."""

from __future__ import annotations

from pathlib import Path

import guides
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [p for p in sorted((ROOT / "docs/contribute").glob("*.md")) if guides.blocks(p)]


@pytest.mark.parametrize("page", guides.guides(), ids=lambda page: page.stem)
def test_the_diffs_fit(page: Path, tmp_path: Path):
    guides.clone(tmp_path, ["gpuir", *guides.touched(page), "pyproject.toml"])
    guides.apply(page, tmp_path)
    guides.lint(guides.touched(page), tmp_path)


@pytest.mark.parametrize("page", guides.guides(), ids=lambda page: page.stem)
def test_what_a_guide_touches_has_tests(page: Path):
    assert len(list(guides.tests_of(guides.touched(page)))) > len(guides.ALWAYS)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_guide_works(page: Path, tmp_path: Path):
    guides.clone(tmp_path, ["gpuir", "specs", "examples", *guides.touched(page)])
    guides.follow(page, tmp_path)
