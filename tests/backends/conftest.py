"""Text compared with a file; `pytest --update-golden` writes the file anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden", default=False):
            path.write_text(text)
        assert text == path.read_text()

    return compare
