"""Options of the test run."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

os.environ["COLUMNS"] = "80"  # what is printed must not depend on the terminal of the one who tests

# Machines are shared: no test asserts a time. A run draws what the last one drew, so that a change
# is judged by itself; `--hypothesis-profile explore` draws anew.
settings.register_profile("gpuir", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("gpuir")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the expected part of tests/golden/**/*.gir",
    )
