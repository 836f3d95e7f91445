"""docs/extend/custom-ops.md's predictor, which reads the attributes of a custom kernel."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper
from packages import run

import gpuir
from gpuir.ir.notes import Tile

DOCUMENT = Path(__file__).parent.parent / "docs" / "extend" / "custom-ops.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The documented module, and a model that calls the kernel twice, tiled for each."""
    (module,) = re.findall(r"```py\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "packed.py").write_text(module)
    write(tmp_path / "m.onnx", [128, 64, 32, 3, 4], [16, 16, 32, 1, 1])
    return tmp_path


def write(path: Path, *tiles: list[int]) -> None:
    x = helper.make_tensor_value_info("x0", TensorProto.FLOAT16, [2048, 1024])
    names = [f"x{i}" for i in range(len(tiles) + 1)]
    values = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT16, [2048, 1024]) for n in names[1:]
    ]
    w = helper.make_tensor("w", TensorProto.FLOAT16, [1024, 1024], bytes(2 << 20), raw=True)
    nodes = [
        helper.make_node(
            "PackedLinear", [names[i], "w"], [names[i + 1]], f"n{i}", domain="acme", tile=tile
        )
        for i, tile in enumerate(tiles)
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("acme", 1)]
    graph = helper.make_graph(nodes, "m", [x], values[-1:], [w], value_info=values[:-1])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    path.write_bytes(model.SerializeToString())


def kernels(folder: Path, *more: str) -> list[dict[str, Any]]:
    command = ("analyze", "m.onnx", "--target", "a100", "--profile", "ort", "--format", "json")
    done = run(None, folder, "-m", "gpuir", *command, *more)
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)["reports"]
    return sorted(report["kernels"], key=lambda row: row["path"])


def test_a_rule_of_one_s_own_reads_the_attributes(folder: Path):
    found = kernels(folder, "--load", "packed.py", "--predictor", "packed")
    times = [row["cost"]["time_s"] for row in found]
    wanted = [
        gpuir.kernel(
            *("gemm",), m=2048, n=1024, k=1024, target="a100",
            tile=Tile((("m", m), ("n", n), ("k", 32)), stages, warps),
        ).time_s
        for m, n, stages, warps in ((128, 64, 3, 4), (16, 16, 1, 1))
    ]  # fmt: skip
    assert times == pytest.approx(wanted) and times[1] > 2 * times[0]
    assert {row["cost"]["by"] for row in found} == {"packed@1"}
    plain = kernels(folder)
    assert plain[0]["cost"]["time_s"] == plain[1]["cost"]["time_s"]  # bytes alone


def test_a_tile_that_does_not_fit_is_said(folder: Path):
    write(folder / "m.onnx", [512, 512, 64, 8, 1])
    command = ("analyze", "m.onnx", "--target", "a100", "--load", "packed.py")
    done = run(None, folder, "-m", "gpuir", *command, "--predictor", "packed")
    assert done.returncode == 2 and "is not legal on a100" in done.stderr
    assert "Traceback" not in done.stderr
