"""docs/extend/custom-ops.md's module, as a package that is installed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from packages import install, run


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed packages, with the documented one."""
    install("custom-ops.md", "hadamard", tmp_path / "site")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [512, 1024])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [512, 8])
    w = helper.make_tensor("w", TensorProto.FLOAT, [1024, 8], np.eye(1024, 8, dtype=np.float32))
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], "relu"),
        helper.make_node("Hadamard", ["r"], ["h"], "rotate", domain="mine"),
        helper.make_node("MatMul", ["h", "w"], ["y"], "head"),
    ]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    model = helper.make_model(
        helper.make_graph(nodes, "m", [x], [y], [w]), opset_imports=opsets, ir_version=10
    )
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    return tmp_path / "site"


def gpuir(site: Path, command: str) -> str:
    done = run(site, site.parent, "-m", "gpuir", *command.split())
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("profile", ["ort", "ideal", "compiled"])
def test_a_model_with_it_is_costed(site: Path, profile: str):
    given = f"analyze m.onnx --target a100 --profile {profile} --format json"
    (report,) = json.loads(gpuir(site, given))["reports"]
    (row,) = (x for x in report["kernels"] if x["op"] == "k.hadamard")
    assert row["flops"] == 512 * 1024 * 10
    assert row["bytes"] == 2 * 512 * 1024 * 4
    assert row["status"] == "modelled" and "kind" in row["cost"]["unseen"]


def test_its_text_parses_and_means_the_same(site: Path):
    (site.parent / "g.gir").write_text(gpuir(site, "opt m.onnx"))
    (site.parent / "k.gir").write_text(
        gpuir(site, "opt g.gir --pipeline canonicalize,fuse,legalize")
    )
    assert "k.hadamard(" in (site.parent / "k.gir").read_text()
    script = """
import gpuir, numpy as np
from gpuir.interp.meanings import run
x, w = np.eye(512, 1024, dtype=np.float32), np.eye(1024, 8, dtype=np.float32)
for name in ("g.gir", "k.gir"):
    (y,) = run(gpuir.load(name), {"x": x, "w": w}).values()
    print(*y[3])
"""
    done = run(site, site.parent, "-c", script)
    assert done.returncode == 0, done.stderr
    first, second = ([float(y) for y in line.split()] for line in done.stdout.splitlines())
    signs = (1, -1, -1, 1, 1, -1, -1, 1)  # of the matrix's fourth row
    assert first == second == pytest.approx([sign / 32 for sign in signs])


def test_it_has_a_gradient(site: Path):
    text = gpuir(site, 'opt m.onnx --pipeline autodiff{wrt="x"}')
    assert len(re.findall(r"= t\.hadamard\(", text)) == 2


def test_without_the_package_the_text_is_refused(site: Path):
    (site.parent / "g.gir").write_text(gpuir(site, "opt m.onnx"))
    done = run(None, site.parent, "-m", "gpuir", "opt", "g.gir")
    assert done.returncode == 2 and "no op t.hadamard" in done.stderr
