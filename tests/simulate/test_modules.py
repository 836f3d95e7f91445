"""The host's time of the modules that a forward pass enters."""

from __future__ import annotations

from dataclasses import replace

import pytest

import gpuir
from gpuir.run.loading import load_text
from gpuir.simulate.clock import entered
from gpuir.simulate.timeline import timeline

GRAPH = """graph @g of pytorch {
  in %x: f32[8]
  %a: f32[8] = t.map("relu", [%x]) at "m:encoder.layers.0.fc/relu"
  %b: f32[8] = t.map("exp", [%a]) at "m:encoder.layers.0.fc/exp"
  %c: f32[8] = t.map("neg", [%b]) at "m:encoder.layers.1.norm.inner/neg"
  %d: f32[8] = t.map("abs", [%c]) at "m:encoder/abs"
  out %d
}"""


@pytest.mark.parametrize(
    ("before", "after", "count"),
    [
        ("", "m:encoder.layers.0.fc/relu", 3),
        ("m:encoder.layers.0.fc/relu", "m:encoder.layers.0.fc/exp", 0),
        ("m:encoder.layers.0.fc/exp", "m:encoder.layers.1.norm.inner/neg", 3),
        ("m:encoder.layers.1.norm.inner/neg", "m:encoder/abs", 0),
        ("model.onnx:Relu_0", "model.onnx:Exp_1", 0),
        ("m:block.10.fc/relu", "m:block.1.fc/relu", 2),
    ],
)
def test_modules_entered_on_the_way(before: str, after: str, count: int):
    assert entered(before, after) == count


def test_each_but_the_ops_own_takes_its_time_on_the_host():
    graph = gpuir.analyze(load_text(GRAPH), "a100", profile="eager").graph
    profile = gpuir.load_profile("eager")

    def host_s(module_s: float) -> float:
        host = replace(profile.host, module_s=module_s)
        return timeline(graph, replace(profile, host=host)).host_s

    assert host_s(1e-3) - host_s(0.0) == pytest.approx(4e-3)
