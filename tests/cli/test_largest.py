"""`gpuir largest` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpuir.cli.main import main

pytestmark = pytest.mark.slow

ENCODER = str(Path(__file__).parents[1] / "encoder.onnx")  # two layers of examples/encoder.onnx


def fit(*args: str, status: int = 0) -> Result:
    done = CliRunner().invoke(main, ("largest", ENCODER, *args))
    assert done.exit_code == status, (done.output, done.exception)
    return done


def test_the_largest_batch_is_one_that_fits_and_the_next_does_not():
    args = ("--target", "a100,t4", "--dim", "batch", "--dims", "seq=128")
    found = json.loads(fit(*args, "--format", "json").stdout)
    assert found["schema"] == "gpuir.largest/1"
    a100, t4 = found["fits"]
    assert t4["largest"] < a100["largest"] and t4["target"] == "t4"
    for each in (a100, t4):
        fits = {x["value"]: x["memory"]["fits"] for x in each["tried"]}
        assert fits[each["largest"]] and not fits[each["largest"] + 1]
    text = fit(*args).stdout
    assert re.search(rf"^batch +{a100['largest']:,}$", text, re.MULTILINE)
    assert re.search(r"^fits +\S+ .B to spare: ", text, re.MULTILINE)


def test_fused_kernels_fit_more_than_ops_one_by_one():
    args = ("--target", "t4", "--dim", "batch", "--dims", "seq=512", "--format", "json")
    (fused,) = json.loads(fit(*args, "--profile", "ideal").stdout)["fits"]
    (eager,) = json.loads(fit(*args, "--profile", "eager").stdout)["fits"]
    assert eager["largest"] < fused["largest"]


def test_a_length_that_the_model_does_not_take():
    text = fit("--target", "t4,a100", "--dim", "seq", "--dims", "batch=1").stdout
    assert text.count("512; the model takes no 513: the shapes do not broadcast") == 2


def test_nothing_fits():
    tiny = ("--target", "t4", "--set", "dram.bytes=6e8", "--dim", "batch", "--dims", "seq=8")
    assert "none: not even 1 fits" in fit(*tiny, status=1).stdout
    up_to = ("--target", "t4", "--dim", "batch", "--dims", "seq=8", "--max", "3")
    assert "3; no more were tried" in fit(*up_to).stdout


def test_what_is_wrong_is_said():
    assert "no target given" in fit("--dim", "batch", status=2).stderr
    both = ("--target", "t4", "--dim", "seq", "--dims", "seq=8,batch=1")
    assert "--dim searches it" in fit(*both, status=2).stderr
    ends = ("--target", "t4", "--dim", "seq", "--min", "9", "--max", "8")
    assert "--min is more than --max" in fit(*ends, status=2).stderr
    misspelt = ("--target", "t4", "--dim", "bach", "--dims", "seq=8")
    assert "did you mean batch?" in fit(*misspelt, status=2).stderr
