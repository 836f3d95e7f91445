"""What tests of spec files share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def spec(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Writes the test's own `MINE` as `mine.toml`, with one edit, in a folder of its own, made the
    current one."""
    mine: str = request.module.MINE
    monkeypatch.chdir(tmp_path)

    def write(old: str = "", new: str = "", name: str = "mine.toml") -> str:
        assert old in mine
        Path(name).write_text(mine.replace(old, new, 1), encoding="utf-8")
        return name

    return write
