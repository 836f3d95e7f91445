"""Options of the test run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture.providers import (
    AVAILABLE_PROVIDERS,
    Constants,
    HypothesisProvider,
)

os.environ["COLUMNS"] = "80"  # what is printed must not depend on the terminal of the one who tests


class Reproducible(HypothesisProvider):
    """Draws without the constants in the modules that are imported at the time: a run of all tests
    and a run of one would draw different examples, and so would any change of the code."""

    _local_constants = Constants()


AVAILABLE_PROVIDERS["hypothesis"] = Reproducible

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
    parser.addoption("--all", action="store_true", help="run what is slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is slow is left out, unless it is asked for: by --all, by -m, or by its file's name."""
    named = any(Path(arg.partition("::")[0]).is_file() for arg in config.args)
    if named or config.getoption("--all") or config.getoption("markexpr"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
