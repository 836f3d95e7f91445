"""What reports say of the host: for runs that it bounds, and for runs that it does not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import gpuir
from gpuir.backends.analysis import answers, head
from gpuir.backends.table import BACKENDS
from gpuir.backends.terminal import Terminal
from gpuir.report.answer import Answer

GAIN = r"[\d.]+ % without (the host|launches|compute|memory|waits|copies) \([\d.]+ .?s\)"


@pytest.fixture(scope="module")
def encoder():
    """Its summary at a batch under a profile, lowered alike for all."""
    costed = {
        n: gpuir.analyze(
            gpuir.lower(
                gpuir.load("examples/encoder.onnx", dims={"batch": n, "seq": 64}), profile="ideal"
            ),
            "a100",
        ).graph
        for n in (1, 32, 512)
    }
    return lambda batch, profile: gpuir.analyze(replace(costed[batch], profile=profile))


def lines(s: Answer) -> dict[str, str]:
    return dict([*answers(s), *head(s)])


@pytest.mark.slow
def test_a_host_bound_run_says_so_and_how_to_ask(encoder):
    said = lines(encoder(1, "eager"))
    assert re.fullmatch(
        r"busy \d+ % of the time, waits for the host \d+ % \([\d.]+ .s\): host-bound",
        said["device"],
    )
    assert re.fullmatch(rf"{GAIN}(, {GAIN})*", said["gains"])
    assert re.match(r"\d+ % without the host", said["gains"])
    assert "--crossover batch" in said["try"] and "--profile cudagraph" in said["try"]


@pytest.mark.parametrize("profile", ["ort", "tensorrt", "cudagraph"])
def test_a_graph_is_advised_where_the_stack_has_one(encoder, profile):
    assert "--profile" not in lines(encoder(1, profile)).get("try", "")


def test_a_run_of_long_kernels_needs_no_advice(encoder):
    said = lines(encoder(32, "eager"))
    assert "host-bound" not in said["device"] and "advice" not in said
    assert re.match(r"\d+ % without compute", said["gains"])
    assert not re.search(r"\d\d % without the host", said["gains"])


def test_copies_are_told(encoder):
    said = lines(encoder(32, "ort"))
    assert re.search(r", copies [\d.]+ % \([\d.]+ us\)", said["device"])
    assert "without copies" in said["gains"]


def test_the_device_alone_has_no_host(encoder):
    said = lines(encoder(1, "ideal"))
    assert not {"device", "advice"} & {*said}
    assert "without the host" not in said["gains"] and "without waits" in said["gains"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_comparison_has_what_the_device_waits(encoder, width: int):
    names = ("eager", "cudagraph", "ideal")
    text = BACKENDS["text"]([encoder(1, name) for name in names], Terminal(width))
    first, *rows = [line for line in text.splitlines() if line.split()[:1] and "%" in line][:4]
    assert first.split()[0] == "profile" and "waits" in first
    assert [row.split()[0] for row in rows] == [*names]
    assert all(len(line) <= width for line in text.splitlines())
    busy = BACKENDS["text"](
        [encoder(512, name) for name in ("cudagraph", "ideal")], Terminal(width)
    )
    assert "waits" not in busy
