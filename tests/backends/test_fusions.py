"""What fusing saves: by hand on a small graph, and in sum on a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_models
import pytest
import torch
from click.testing import CliRunner

import gpuir
from gpuir.backends.fusions import fusions_report
from gpuir.backends.table import FORMATS
from gpuir.backends.terminal import Terminal
from gpuir.cli.main import main
from gpuir.report.fusions import fusions
from gpuir.report.units import percent

ENCODER = Path(__file__).parents[2] / "tests" / "encoder.onnx"
TEXT = """graph @g {
  in %x: f16[4096, 4096]
  param %w: f16[4096, 4096]
  param %b: f16[4096]
  %p: f16[4096, 4096] = t.matmul(%x, %w) at "g:mm"
  %a: f16[4096, 4096] = t.map("add", [%p, %b]) at "g:add"
  %r: f16[4096, 4096] = t.map("relu", [%a]) at "g:relu"
  out %r
}
"""
APART = "canonicalize,fuse{rules=none},legalize"


def both(g: gpuir.Graph, profile: str) -> tuple[gpuir.Answer, gpuir.Answer]:
    fused = gpuir.analyze(g, "a100", profile=profile).graph
    apart = gpuir.analyze(gpuir.pipeline(APART).run(g), "a100", profile=profile).graph
    return gpuir.analyze(fused), gpuir.analyze(apart)


def test_an_epilogue_saves_what_is_not_stored_between():
    (f,) = fusions(*both(gpuir.load_text(TEXT), "ideal"))
    assert f.launches == 3 and f.fused.launches == 1
    assert f.bytes == 4 * 4096 * 4096 * 2  # two results written and read again
    assert (
        f.time_s == pytest.approx(sum(x.time_s for x in f.parts) - f.fused.time_s) and f.time_s > 0
    )


def test_a_stack_that_fuses_nothing_saves_nothing():
    pair = both(gpuir.load_text(TEXT), "eager")
    assert fusions(*pair) == ()
    assert "Every launch runs one model node, so fusing" in FORMATS["text"](
        fusions_report(*pair), Terminal(80)
    )


def test_of_a_model_savings_add_up():
    g = gpuir.load(ENCODER, dims={"batch": 2, "seq": 32})
    fused, apart = both(g, "ideal")
    record = json.loads(FORMATS["json"](fusions_report(fused, apart), Terminal()))
    saved = sum(f["saved_s"] for f in record["fusions"])
    assert saved == pytest.approx(apart.device_s - fused.device_s, rel=0.1)
    text = str(FORMATS["text"](fusions_report(fused, apart), Terminal(80)))
    assert max(map(len, text.splitlines())) <= 80
    assert f"launches   {apart.launches:,} op by op, {fused.launches:,} fused" in text


@pytest.mark.slow
def test_of_an_lstm_each_launch_is_its_own():
    """Its kernels all stand for one model node: none replaces those of the loop."""
    lstm = torch.nn.LSTM(16, 32).eval()
    g = gpuir.load(lstm, args=(torch.zeros(5, 2, 16),))
    for profile in ("ideal", "compiled"):
        assert fusions(*both(g, profile)) == ()


def test_what_a_fusion_costs_is_a_share_too():
    found = [percent(x) for x in (-0.0163, -0.5, -1e-5, 0.0, 0.0163)]
    assert found == ["-1.6 %", "-50 %", "<0.1 %", "0 %", "1.6 %"]


@pytest.mark.parametrize("op", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("profile", ["ort", "ideal"])
def test_of_a_recurrent_onnx_model_fusing_adds_no_launch(op: str, profile: str, tmp_path: Path):
    """Op by op is as onnxruntime lays operators out: its copies are not what fusing adds."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    shapes = {"w": (2, gates * 16, 8), "r": (2, gates * 16, 16)}
    made = onnx_models.model(
        [
            onnx_models.node("Transpose", ["x"], ["steps"], perm=[1, 0, 2]),
            onnx_models.node(
                op, ["steps", *shapes], ["y"], hidden_size=16, direction="bidirectional"
            ),
            onnx_models.node("Transpose", ["y"], ["batches"], perm=[2, 0, 1, 3]),
            onnx_models.node("Relu", ["batches"], ["z"]),
        ],
        [onnx_models.info("x", [2, 5, 8])],
        ["z"],
        [onnx_models.const(name, np.ones(shape, np.float32)) for name, shape in shapes.items()],
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString())
    given = (str(path), "--target", "a100", "--profile", profile, "--format", "json")
    fused = json.loads(CliRunner().invoke(main, ("explain", *given, "--fusions")).stdout)
    (report,) = json.loads(CliRunner().invoke(main, ("analyze", *given)).stdout)["reports"]
    assert fused["fused"]["launches"] == report["launches"]
    assert fused["unfused"]["launches"] >= report["launches"]
