"""Modules out of locations, and what each takes."""

from __future__ import annotations

import pytest

import gpuir
from gpuir.report.kernels import totals
from gpuir.report.modules import modules
from gpuir.report.names import module_of


@pytest.mark.parametrize(
    ("loc", "path"),
    [
        ("bert.pt2:encoder.layer.0.dense/linear_3", ("encoder", "layer", "0", "dense")),
        ("bert.pt2:encoder.layer.0/mm_1/backward", ("encoder", "layer", "0")),
        ("bert.onnx:/encoder/layer.0/dense/MatMul", ("encoder", "layer", "0", "dense")),
        ("bert.onnx:MatMul_3", ()),
        ("add", ()),
    ],
)
def test_module_of(loc: str, path: tuple[str, ...]):
    assert module_of(loc) == path


TEXT = """graph @g {
  in %x: f32[8, 64]
  param %w: f32[64, 64]
  %a: f32[8, 64] = t.matmul(%x, %w) at "g:net.layer.0/mm"
  %b: f32[8, 64] = t.matmul(%a, %w) at "g:net.layer.1/mm"
  %c: f32[8, 64] = t.matmul(%b, %w) at "g:net.head/mm/backward"
  %d: f32[8, 64] = t.softmax(%c, 1) at "g:net/softmax"
  out %d
}
"""


def summary() -> gpuir.Answer:
    return gpuir.analyze(gpuir.load_text(TEXT), "a100", profile="ideal")


def test_layers_are_one_and_a_module_has_what_is_inside():
    s = summary()
    found = {m.total.kind: m for m in modules(s.kernels)}
    assert found["net"].total.time_s == pytest.approx(s.latency_s)
    assert found["net.layer.*"].total.launches == 2
    assert found["net.layer.*"].path == ("layer", "*")
    assert found["net.head"].depth == found["net.layer.*"].depth == found["net"].depth + 1
    tops = [m for m in modules(s.kernels) if m.depth == 0]
    assert sum(m.total.time_s for m in tops) == pytest.approx(s.latency_s)


def test_phases_add_up():
    s = summary()
    found = {total.kind: total for total in totals(s.kernels, lambda x: x.phase)}
    assert set(found) == {"forward", "backward"}
    assert found["backward"].flops == 2 * 8 * 64 * 64
