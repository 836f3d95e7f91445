"""docs/extend/custom-stacks.md's files, as a package that is installed."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from onnx import TensorProto, helper
from packages import install, run

PAGE = 2 << 20


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install("custom-stacks.md", "tinyrun", tmp_path / "site")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [256, 1024])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [256, 1024])
    nodes = [helper.make_node("Gelu", ["x"], ["g"], "act"), helper.make_node("Neg", ["g"], ["y"])]
    graph = helper.make_graph(nodes, "m", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    return tmp_path / "site"


def gpuir(site: Path | None, folder: Path, command: str) -> CompletedProcess[str]:
    return run(site, folder, "-m", "gpuir", *command.split())


def test_a_model_runs_under_it(site: Path):
    command = "analyze m.onnx --target a100 --profile tinyrun,ort --format json"
    done = gpuir(site, site.parent, command)
    assert done.returncode == 0, done.stderr
    ours, other = json.loads(done.stdout)["reports"]
    assert ours["profile"]["name"] == "tinyrun"
    assert len(ours["kernels"]) == 1 < len(other["kernels"])  # map>map joins the negation
    text = gpuir(site, site.parent, "analyze m.onnx --target a100 --profile tinyrun --format ir")
    assert "gelu_tanh" in text.stdout
    assert ours["memory"]["reserved_bytes"] % PAGE == 0
    assert ours["memory"]["reserved_bytes"] >= ours["memory"]["peak_bytes"] > 0


def test_its_numbers_have_sources(site: Path):
    done = gpuir(site, site.parent, "profiles tinyrun")
    assert done.returncode == 0, done.stderr
    assert "1,000 launches of an empty kernel" in done.stdout and "Tinyrun 1.0" in done.stdout


def test_without_the_package(site: Path):
    done = gpuir(None, site.parent, "analyze m.onnx --target a100 --profile tinyrun")
    assert done.returncode == 2 and "tinyrun" in done.stderr and "Traceback" not in done.stderr
