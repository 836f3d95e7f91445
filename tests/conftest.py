"""Options of the test run."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture.providers import (
    AVAILABLE_PROVIDERS,
    Constants,
    HypothesisProvider,
)

os.environ["GPUIR_NO_CACHE"] = "1"  # a test loads its model itself
os.environ["COLUMNS"] = "80"  # what is printed must not depend on the terminal of the one who tests


class Reproducible(HypothesisProvider):
    """Draws without the constants in the modules that are imported at the time: a run of all tests
    and a run of one would draw different examples, and so would any change of the code."""

    _local_constants = Constants()


AVAILABLE_PROVIDERS["hypothesis"] = Reproducible


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the expected part of tests/golden/**/*.gir",
    )
    parser.addoption("--all", action="store_true", help="run slow tests, too, on more examples")


def pytest_configure(config: pytest.Config) -> None:
    """How many examples a property is tried on. Machines are shared: no test asserts a time. A run
    draws what the last one drew, so that a change is judged by itself, unless it is told to
    `--hypothesis-profile explore`."""
    examples = 50 if is_whole(config) else 30
    same = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    settings.register_profile("explore", same)
    settings.register_profile("gpuir", same, derandomize=True)
    settings.load_profile(config.getoption("--hypothesis-profile") or "gpuir")
    gc.set_threshold(200_000, 50, 100)  # as gpuir.__main__ has it: a tenth of a run's time


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests marked slow, unless the run is whole. They come first then: a long test
    that starts last keeps one worker busy while the others are done."""
    if is_whole(config) or config.getoption("markexpr"):
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


def is_whole(config: pytest.Config) -> bool:
    """Whether all tests run: with --all, and of a file that is named."""
    named = any(Path(arg.partition("::")[0]).is_file() for arg in config.args)
    return named or config.getoption("--all")
