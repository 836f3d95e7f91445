"""`explain --fusions` beside `analyze`: launches of recurrent models, whose loops have several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from onnx_models import const, info, model, node

from gpuir.cli.main import main

CELLS = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU, "RNN": torch.nn.RNN}
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, INPUTS, HIDDEN = 6, 2, 16, 32


def of_torch(cell: str, path: Path) -> Path:
    net = CELLS[cell](INPUTS, HIDDEN, num_layers=2, bidirectional=True).eval()
    program = torch.export.export(net, (torch.zeros(STEPS, BATCH, INPUTS),))
    torch.export.save(program, path / "cell.pt2")
    return path / "cell.pt2"


def of_onnx(cell: str, path: Path) -> Path:
    rows = GATES[cell] * HIDDEN
    weights = {"W": (1, rows, INPUTS), "R": (1, rows, HIDDEN), "B": (1, 2 * rows)}
    made = model(
        [node(cell, ["X", *weights], ["Y"], name=cell, hidden_size=HIDDEN)],
        [info("X", [STEPS, BATCH, INPUTS])],
        [info("Y")],
        [const(name, np.zeros(shape, np.float32)) for name, shape in weights.items()],
    )
    (path / "cell.onnx").write_bytes(made.SerializeToString())
    return path / "cell.onnx"


def said(*args: object) -> Any:
    done = CliRunner().invoke(main, [*map(str, args), "--target", "a100", "--format", "json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("profile", ["eager", "compiled", "ort"])
@pytest.mark.parametrize("make", [of_torch, of_onnx])
@pytest.mark.parametrize("cell", CELLS)
def test_launches_are_those_of_the_report(cell: str, make: Any, profile: str, tmp_path: Path):
    path = make(cell, tmp_path)
    told = said("explain", path, "--fusions", "--profile", profile)
    (report,) = said("analyze", path, "--profile", profile)["reports"]
    assert told["fused"]["launches"] == report["launches"] > STEPS
    if profile == "eager":  # which runs each node by itself
        assert told["unfused"]["launches"] == report["launches"]
        assert told["fusions"] == []


def test_a_weight_that_onnxruntime_unpacks_in_the_product_is_a_fusion(tmp_path: Path):
    weights = [
        const("w", np.zeros((64, 32), np.int8)),
        const("s", np.ones((4, 32), np.float32)),
    ]
    unpack = node("DequantizeLinear", ["w", "s"], ["d"], name="unpack", axis=0, block_size=16)
    product = node("MatMul", ["x", "d"], ["y"], name="product")
    made = model([unpack, product], [info("x", [1, 64])], [info("y")], weights, 21, ir_version=10)
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString())
    told = said("explain", path, "--fusions", "--profile", "ort")
    assert (told["unfused"]["launches"], told["fused"]["launches"]) == (2, 1)
    (fusion,) = told["fusions"]
    assert fusion["launches"] == 2
