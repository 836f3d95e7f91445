"""Functions whose package is imported when they are called."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpuir.frontends.torch.later import later

PACKAGE = "colorsys"
LISTED = {PACKAGE: ["rgb_to_hsv"]}


@pytest.fixture(autouse=True)
def absent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)


def test_a_function_imports_its_package_when_it_is_called():
    with later(LISTED):
        from colorsys import rgb_to_hsv
    assert PACKAGE not in sys.modules
    assert rgb_to_hsv(0, 0, 1) == (2 / 3, 1, 1)
    assert PACKAGE in sys.modules


def test_what_is_not_listed_is_the_packages_own():
    with later(LISTED):
        from colorsys import hsv_to_rgb, rgb_to_hsv

        assert sys.modules[PACKAGE].hsv_to_rgb is hsv_to_rgb
    assert rgb_to_hsv(0, 0, 1) == (2 / 3, 1, 1)
    with later(LISTED), pytest.raises(ImportError):
        from colorsys import nothing  # noqa: F401 # pyright: ignore


def test_a_package_that_is_loaded_stays():
    import colorsys

    with later(LISTED):
        assert sys.modules[PACKAGE] is colorsys


def test_a_package_that_is_not_there_is_missed_when_it_is_called():
    with later({"gpuir.nowhere": ["run"]}):
        from gpuir.nowhere import run  # pyright: ignore
    with pytest.raises(ImportError, match="nowhere"):
        run()


@pytest.mark.slow
def test_a_config_loads_without_what_losses_and_checkpoints_need():
    pytest.importorskip("transformers")
    code = """
import sys
from gpuir.frontends.torch import hf
with hf.quiet():
    pass
assert not {"scipy", "torchao"} & {*sys.modules}, "loaded"
from transformers.loss import loss_for_object_detection as loss
import numpy as np
if hasattr(loss, "linear_sum_assignment"):
    rows, columns = loss.linear_sum_assignment(np.array([[2.0, 1.0], [1.0, 5.0]]))
    assert columns.tolist() == [1, 0]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
