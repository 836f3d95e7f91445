"""What a framework ran, paired with our kernels."""

from __future__ import annotations

import pytest

import gpuir
from gpuir.fit.checks import batch_of
from gpuir.fit.tables import target_of
from gpuir.report.answer import Answer
from gpuir.report.check import Check, DeviceRun, RanStep, checked, kind_of, params_of

NET = """
graph @net of pytorch {
  in %x: f32[4, 64]
  param %a: f32[64, 32]
  param %b: f32[32, 8]
  %h: f32[4, 32] = t.matmul(%x, %a) at "net:one/linear"
  %r: f32[4, 32] = t.map("relu", [%h]) at "net:two/relu"
  %y: f32[4, 8] = t.matmul(%r, %b) at "net:three/linear_1"
  out %y
}
"""


@pytest.fixture(scope="module")
def answer() -> Answer:
    return gpuir.analyze(gpuir.load_text(NET), "cpu", profile="eager")


def ran(answer: Answer, *steps: tuple[str, str, float]) -> Check:
    made = tuple(RanStep(*x) for x in steps)
    return checked(answer, DeviceRun(sum(x.seconds for x in made), 0.1, 9, steps=made, by="torch"))


def pairs(c: Check) -> list[tuple[list[str], list[str]]]:
    return [([k.label for k in x.kernels], [s.name for s in x.steps]) for x in c.rows]


def test_steps_find_their_kernels_by_name(answer: Answer):
    steps = (("linear_1", "linear", 3e-6), ("relu", "relu", 2e-6), ("linear", "linear", 5e-6))
    found = ran(answer, *steps, ("view", "view", 1e-6))
    assert pairs(found) == [
        (["one/linear"], ["linear"]),
        (["two/relu"], ["relu"]),
        (["three/linear_1"], ["linear_1"]),
        ([], ["view"]),
    ]
    first = found.rows[0]
    assert first.measured_s == 5e-6 and first.predicted_s == first.kernels[0].time_s
    assert first.ratio == pytest.approx(5e-6 / first.kernels[0].time_s)
    assert found.rows[-1].predicted_s is None and found.rows[-1].ratio is None


def test_steps_without_names_are_paired_in_order(answer: Answer):
    """A compiler has joined the relu with what stands behind it."""
    found = ran(answer, ("aten::mm", "mm", 5e-6), ("cpp_fused_relu_0", "cpp_fused_relu_0", 1e-6))
    assert pairs(found) == [
        (["one/linear"], ["aten::mm"]),
        (["two/relu"], ["cpp_fused_relu_0"]),
        (["three/linear_1"], []),
    ]
    found = ran(
        answer, ("a", "mm", 5e-6), ("b", "sum", 1e-6), ("c", "mul", 1e-6), ("d", "mm", 1e-6)
    )
    assert pairs(found)[1] == (["two/relu"], ["b"]) and pairs(found)[-1][1] == ["d"]
    assert sum(len(x.steps) for x in found.rows) == 4


def test_what_multiplies_is_told_by_its_name():
    names = ("scaled_dot_product_attention", "aten::mkldnn_convolution", "addmm", "FusedMatMul")
    assert [kind_of(x) for x in names] == ["attention", "conv", "gemm", "other"]
    assert kind_of("graph_0_cpp_fused_addmm_relu_0") == "other"  # what is fused around a product


def test_what_explains_the_difference_comes_first(answer: Answer):
    found = ran(
        answer, ("linear", "linear", 9e-4), ("linear_1", "linear", 1e-6), ("relu", "r", 1e-5)
    )
    assert [cause[0] for cause in found.causes()] == ["gemm", "map"]
    kind, count, measured_s, _ = found.causes()[0]
    assert (kind, count) == ("gemm", 2) and measured_s == pytest.approx(9.01e-4)


def test_a_calibration_reads_what_ran_once_and_is_about_as_long(answer: Answer):
    """A row as a batch of one costs what the model's kernel does, weights and all."""
    first = next(x for x in answer.kernels if x.kind == "gemm")
    found = ran(answer, ("linear", "linear", 2 * first.time_s), ("relu", "relu", 1.0))
    graphs = [row.graph for row in found.rows]
    assert graphs[0] is not None and graphs[1:] == [None, None]  # far off, and not measured
    alone = params_of(graphs[0], found.weights)
    target = target_of("cpu")
    assert target is not None
    (work,) = batch_of(alone, found.weights, 1e-6, target).works
    assert work.weights is not None and float(work.weights.own[0]) == 4 * (64 * 32 + 4 * 64)
