"""A run of several models: how it is written, what its parts come to together, what is refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from decoders import LLAMA

import gpuir
from gpuir.ir.errors import GpuirError, ModelError, UsageError
from gpuir.report.answer import Answer, RunPart
from gpuir.report.parts import mean, together
from gpuir.run.terms import RunTerm, expanded, refuse, settings, sources, terms

ENCODER = str(Path(__file__).parents[1] / "small_encoder.onnx")
SIZES = {"batch": 2, "seq": 16}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.onnx", "b + c.onnx", "3*d.onnx", "e+f.onnx"):
        shutil.copy(ENCODER, name)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


# ---------------------------------------------------------------------------- as text

READ = {
    "a.onnx": (),
    "b + c.onnx": (),
    "3*d.onnx": (),
    "e+f.onnx": (),
    "my.module:build": (),
    "none.onnx": (),
    "2*a.onnx": (RunTerm("a.onnx", 2),),
    "a.onnx:batch=4": (RunTerm("a.onnx", sizes=(("batch", 4),)),),
    "50 * a.onnx:batch=2 + m.py:vae:batch=1": (
        RunTerm("a.onnx", 50, (("batch", 2),)),
        RunTerm("m.py:vae", 1, (("batch", 1),)),
    ),
    "2*3*d.onnx": (RunTerm("3*d.onnx", 2),),
    "2*b + c.onnx + e+f.onnx": (RunTerm("b + c.onnx", 2), RunTerm("e+f.onnx")),
    "a.onnx:profile=eager+host=dgx-1 + a.onnx": (
        RunTerm("a.onnx", profile="eager+host=dgx-1"),
        RunTerm("a.onnx"),
    ),
    "hf:.:dtype=bf16:phase=decode:past=9": (
        RunTerm("hf:.", 1, (("past", 9),), (("dtype", "bf16"), ("phase", "decode"))),
    ),
    "m.py:train": (),
    "m.py:step:train": (RunTerm("m.py:step", words=(("train", True),)),),
}


@pytest.mark.parametrize("text", READ)
def test_a_run_is_read(here: Path, text: str):
    assert terms(text) == READ[text]


WRONG = {
    "0*a.onnx": "how often a model runs has to be a whole number from 1",
    "-2*a.onnx": "how often a model runs",
    "1.5*a.onnx": "how often a model runs",
    "9999999999999*a.onnx": "how often a model runs",
    "a.onnx*3": "stands before it.*3\\*a.onnx",
    "a.onnx:count=3": "stands before it.*3\\*a.onnx",
    "a.onnx+a.onnx": "needs spaces around it.*'a.onnx \\+ a.onnx'",
    "a.onnx + ": "a term of the run is empty",
    "2*:batch=3": "names no model",
    "a.onnx:batch=x": "the size batch has to be a whole number of 0 or more",
    "a.onnx:train=3": "train takes no value",
    "a.onnx:generate=0": "how many tokens to generate",
    "a.onnx + none.onnx": "none.onnx: no such file",
    "a.onnx:seq=4:generate=4": "only the model of a Hugging Face config generates tokens",
    "hf:.:generate=4": "number of tokens of the prompt",
    "hf:.:seq=8:phase=decode:generate=4": "both phases",
    "hf:.:seq=8:train:generate=4": "training step",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_with_a_run(here: Path, text: str):
    with pytest.raises((UsageError, ModelError)) as e:
        gpuir.analyze(text, "a100", dims={"batch": 1})
    assert re.search(WRONG[text], str(e.value), re.DOTALL), str(e.value)


def test_a_run_is_no_model(here: Path):
    for text in ("2*a.onnx", "a.onnx + a.onnx"):
        with pytest.raises(UsageError, match="run of several models"):
            gpuir.load(text, dims=SIZES)
    for text in ("b + c.onnx", "3*d.onnx", "a.onnx"):
        refuse(text)
    with pytest.raises(GpuirError, match="no such file"):
        gpuir.load("none.onnx")


def test_the_models_that_a_run_names(here: Path):
    assert sources("2*a.onnx:batch=3 + m.py:f")[1:] == ["a.onnx", "m.py:f"]
    assert settings("b + c.onnx") == ("b + c.onnx", {})


def test_a_generation_is_a_prompt_and_steps():
    (one,) = terms("2*hf:x:generate=5:seq=8:past=3:dtype=bf16")
    (prompt, none), (steps, lengths) = expanded(one, {"dims": {"seq": 99, "batch": 4}})
    assert (prompt.times, steps.times, none, lengths) == (2, 8, None, range(11, 15))
    given = {"dims": {"seq": 99, "batch": 4}, "past": 7}
    assert prompt.options(given) == {
        "dims": {"seq": 8, "batch": 4}, "past": 3, "phase": "prefill", "dtype": "bf16"
    }  # fmt: skip
    assert steps.options(given) == {
        "dims": {"batch": 4}, "past": None, "phase": "decode", "dtype": "bf16"
    }  # fmt: skip
    assert prompt.weights == steps.weights != RunTerm("hf:x").weights
    assert len(expanded(replace(one, generate=1), {})) == 1


# ---------------------------------------------------------------------------- what it comes to


def test_a_run_is_the_sum_of_its_parts(here: Path):
    found = gpuir.analyze(
        f"3*a.onnx:batch=8 + {ENCODER}", "a100", profile="ort", dims={"seq": 16, "batch": 2}
    )
    one, other = (
        gpuir.analyze(ENCODER, "a100", profile="ort", dims={"seq": 16, "batch": n}) for n in (8, 2)
    )
    for name in ("latency_s", "device_s", "busy_s", "gaps_s"):
        assert getattr(found, name) == pytest.approx(
            3 * getattr(one, name) + getattr(other, name), rel=1e-12
        )
    ends = [3 * a + b for a, b in zip(one.interval or (), other.interval or (), strict=True)]
    assert found.interval == pytest.approx(ends, rel=1e-12)
    assert [x.times for x in found.parts] == [3, 1]
    assert found.parts[0].each == replace(one, model="a")
    kept = one.memory.kept_bytes
    assert kept >= sum(v.type.nbytes for v in one.graph.params) > 0
    assert found.reserved_bytes == max(one.reserved_bytes, other.reserved_bytes) + kept
    assert found.fits and found.batch is None and found.tokens is None
    same = gpuir.analyze("3*a.onnx:seq=32 + a.onnx", "a100", profile="ort", dims=SIZES)
    assert same.batch == same.parts[0].each.batch
    assert same.reserved_bytes == max(x.each.reserved_bytes for x in same.parts)  # one model


def test_a_run_has_no_graph_of_its_own(here: Path):
    found = gpuir.analyze("2*a.onnx", "a100", dims=SIZES)
    with pytest.raises(UsageError, match="several runs"):
        _ = found.graph
    assert found.parts[0].whole.graph.target == "a100"
    assert "\n" not in repr(found)
    assert "<table>" in found._repr_html_() and "2 x" in found._repr_html_()


def test_a_part_has_a_profile_of_its_own(here: Path):
    found = gpuir.analyze("a.onnx:profile=tensorrt + a.onnx", "a100", profile="ort", dims=SIZES)
    assert [x.each.profile for x in found.parts] == ["tensorrt", "ort"]
    assert found.profile == "tensorrt + ort"


def test_a_run_of_several_takes_no_schedule(here: Path):
    for given in ({"schedule": "x.sched"}, {"cluster": "dgx-a100"}):
        with pytest.raises(UsageError, match="a run of one model"):
            gpuir.analyze("2*a.onnx", "a100", dims=SIZES, **given)


def test_a_generation_is_every_step_of_it(here: Path):
    sizes = {"batch": 2, "seq": 30}
    found = gpuir.analyze("hf:config.json", "a100", dims=sizes, generate=5, profile="vllm")
    prompt = gpuir.analyze("hf:config.json", "a100", dims=sizes, phase="prefill", profile="vllm")
    steps = [
        gpuir.analyze(
            "hf:config.json", "a100", dims={"batch": 2}, phase="decode", past=past, profile="vllm"
        )
        for past in (30, 31, 32, 33)
    ]
    assert len({s.latency_s for s in steps}) > 1
    total = prompt.latency_s + sum(s.latency_s for s in steps)
    assert found.latency_s == pytest.approx(total, rel=1e-12)
    for i in (0, 1):
        end = sum((s.interval or ())[i] for s in (prompt, *steps))
        assert (found.interval or ())[i] == pytest.approx(end, rel=1e-12)
    assert found.device_s == pytest.approx(sum(s.device_s for s in (prompt, *steps)), rel=1e-12)
    assert (found.tokens, found.batch) == (10, 2)
    assert found.tokens_per_s == pytest.approx(10 / found.latency_s)
    last = found.parts[1].last
    assert last is not None and last == steps[-1]
    assert found.parts[1].text == "hf:config.json:phase=decode:past=30..33"
    assert found.reserved_bytes == max(s.reserved_bytes for s in (prompt, *steps))


def test_one_token_is_the_prompt_alone(here: Path):
    found = gpuir.analyze("hf:config.json", "a100", dims=SIZES, generate=1)
    assert [x.times for x in found.parts] == [1] and found.tokens == 2


def test_what_a_generation_refuses(here: Path):
    with pytest.raises(UsageError, match="which model generates"):
        gpuir.analyze("a.onnx + a.onnx", "a100", generate=4)
    with pytest.raises(UsageError, match="predictor tile"):
        gpuir.analyze("hf:config.json", "a100", dims=SIZES, generate=4, predictor="roofline")
    with pytest.raises(UsageError, match="path of its config"):
        gpuir.analyze(gpuir.load(ENCODER, dims=SIZES), "a100", generate=4)
    with pytest.raises(UsageError, match="no target"):
        gpuir.analyze("hf:config.json", dims=SIZES, generate=4)


# ---------------------------------------------------------------------------- numbers alone


def answer(latency_s: float, **more: object) -> Answer:
    given = {
        "interval": (latency_s / 2, latency_s * 2),
        "device_s": latency_s,
        "busy_s": latency_s,
        "gaps_s": 0.0,
        "reserved_bytes": 10,
        "peak_bytes": 5,
        "available_bytes": 100,
        "bound": "memory",
    }
    return replace(Answer("m", "a100", "ort", latency_s=latency_s), **{**given, **more})


def test_means_of_steps():
    found = mean([answer(1.0), answer(3.0, bound="compute", reserved_bytes=20, gaps_s=1.0)])
    assert (found.latency_s, found.interval) == (2.0, (1.0, 4.0))
    assert (found.bound, found.reserved_bytes, found.is_host_bound) == ("compute", 20, True)
    assert mean([answer(1.0, interval=None)]).interval is None


def test_a_part_without_an_interval_counts_as_it_is(here: Path):
    whole = gpuir.analyze("a.onnx", "a100", dims=SIZES)
    parts = [RunPart("x", 2, replace(whole, interval=None)), RunPart("y", 1, whole)]
    found = together(parts, ["x", "x"])
    low, high = whole.interval or (np.nan, np.nan)
    expected = (2 * whole.latency_s + low, 2 * whole.latency_s + high)
    assert found.interval == pytest.approx(expected)
    assert together(parts[:1], ["x"]).interval is None
    assert together(parts, ["x", "x"], batch=4).batch == 4


def test_a_run_that_does_not_fit_says_so(here: Path):
    whole = gpuir.analyze("a.onnx", "a100", dims=SIZES)
    room = replace(whole, available_bytes=whole.reserved_bytes)
    assert together([RunPart("x", 1, room)], ["x"]).fits
    both = together([RunPart("x", 1, room), RunPart("y", 1, room)], ["x", "y"])
    assert both.fits is False and "does not fit" in both.why
