"""Options of the test run."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("gpuir", deadline=None)  # machines are shared: no test asserts a time
settings.load_profile("gpuir")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the expected part of tests/golden/**/*.gir",
    )
