"""`gpuir check` as a user meets it, on this CPU."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gpuir.cli.main import main
from gpuir.targets.load import dump_difference

torch = pytest.importorskip("torch")

MODEL = """\
import torch
from torch import nn

def net(batch=2):
    layers = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)
    return nn.Sequential(*layers).eval(), (torch.randn(batch, 16),)

def cast():
    class Cast(nn.Module):
        def forward(self, x):
            return (x + 1).to(torch.float64)
    return Cast(), (torch.ones(2),)

def empty():
    with torch.device("meta"):
        module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
        return module, (torch.empty(1, 3, 8, 8),)

def wrong():
    class Wrong(nn.Module):
        def forward(self, x):
            if x.device.type == "cpu" and not torch.compiler.is_compiling():
                raise ValueError("not on a CPU")
            return x + 1
    return Wrong(), (torch.ones(2),)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with models, and this CPU as a target whose rates nobody measured."""
    from gpuir.fit.machine import cpu_level, cpu_name

    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    head = {"base": cpu_level(), "name": "mine", "title": f"{cpu_name()}, 1 core"}
    text = dump_difference(head, {"sms": 1}, {"sms": "assumed: for a test"})
    (tmp_path / "mine.toml").write_text(text)
    return tmp_path


def run(*args: str, status: int = 0, target: str = "mine.toml") -> Result:
    given = ("check", *args, "--target", target, "--budget-s", "0.1", "--no-cache")
    done = CliRunner().invoke(main, given)
    assert done.exit_code == status, (done.output, done.exception)
    return done


def table(*args: str) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(run(*args, "--format", "csv").stdout)))


def test_measured_stands_beside_predicted():
    text = run("net.py:net").stdout
    assert "net.net on" in text and "under eager" in text
    assert "measured" in text and "predicted" in text and "lower quartile of" in text
    assert "gemm f32" in text and "map f32" in text and "linear_1" in text


def test_every_format_has_a_row_for_each_kernel():
    rows = table("net.py:net", "--dims", "batch=3")
    assert [row["steps"] for row in rows] == ["linear", "relu", "linear_1"]
    assert [row["kind"] for row in rows] == ["gemm", "map", "gemm"]
    assert all(float(row["measured_s"]) > 0 < float(row["predicted_s"]) for row in rows)
    told = json.loads(run("net.py:cast", "--format", "json").stdout)
    assert told["kernels"][0]["name"].endswith("add")  # and no check that torch.export has added
    told = json.loads(run("net.py:net", "--format", "json").stdout)
    assert told["schema"] == "gpuir.check/1" and len(told["kernels"]) == 3
    assert told["runs"] > 0 and told["measured_s"] > 0 < told["latency_s"]


def test_a_program_is_run_without_its_weights(folder: Path):
    assert "conv" in {x["kind"] for x in table("net.py:empty")}
    net = torch.nn.Sequential(torch.nn.Linear(16, 4)).eval()
    torch.export.save(torch.export.export(net, (torch.ones(2, 16),)), folder / "saved.pt2")
    done = run("saved.pt2")
    assert "warning: the weights are random numbers" in done.stderr
    assert "gemm f32" in done.stdout


@pytest.mark.skipif(not find_spec("onnxruntime"), reason="needs onnxruntime")
def test_an_onnx_file_runs_under_onnxruntime(folder: Path):
    onnx = pytest.importorskip("onnx")
    text = """<ir_version: 8, opset_import: ["" : 17]>
    net (int64[b, 3] ids, float[6, 4] w) => (float[b, 3, 4] y)
    <float[9, 6] t> { x = Gather (t, ids)  y = MatMul (x, w) }"""
    model = onnx.parser.parse_model(text)
    model.graph.node[1].name = "/out/MatMul"
    held = model.graph.initializer[0] if model.graph.initializer else model.graph.initializer.add()
    held.CopyFrom(onnx.TensorProto(name="t", dims=(9, 6), data_type=1, data_location=1))
    held.external_data.add(key="location", value="not_there.bin")
    onnx.save(model, folder / "net.onnx")
    done = run("net.onnx", "--dims", "b=2", "--format", "json")
    assert "not there" in done.stderr  # its weights
    told = json.loads(done.stdout)
    assert [x["steps"] for x in told["kernels"] if x["kind"] == "gemm"] == ["/out/MatMul"]


def test_its_table_feeds_a_calibration(folder: Path):
    (folder / "t.csv").write_text(run("net.py:net", "--format", "csv").stdout)
    scored = CliRunner().invoke(main, ["eval", "kernels", "t.csv"])
    assert "checked kernels, 3 rows" in scored.stdout
    given = ["calibrate", "--target", "mine.toml", "--table", "t.csv", "-o", "new.toml"]
    done = CliRunner().invoke(main, given)
    assert done.exit_code == 0 or "not written" in done.stderr, done.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("net.py:net", "--profile", "ort"), "cannot be run here under the profile ort"),
        (("net.py:net", "--profile", "eager,compiled"), "one profile is checked at a time"),
        (("net.py:none",), "the file has no function 'none'"),
        (("net.py:wrong",), "PyTorch cannot run the model"),
        (("absent.onnx",), "absent.onnx"),
    ],
)
def test_mistakes_are_said(args: tuple[str, ...], message: str):
    done = run(*args, status=2)
    assert message in done.stderr and "Traceback" not in done.output


def test_a_target_of_another_machine_is_refused():
    for name in ("a100", "x86-64-v3", "epyc-zen5-core"):
        stderr = run("net.py:net", status=2, target=name).stderr
        assert "does not describe a device of this machine" in stderr or "finds no GPU" in stderr


def test_a_compiler_is_needed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    stderr = run("net.py:net", "--profile", "compiled", status=2).stderr
    assert "torch.compile needs a C++ compiler" in stderr


def test_what_runs_a_model_may_not_be_installed(monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("gpuir.fit.machine.import_module", absent)
    assert "torch, which runs" in run("net.py:net", status=2).stderr
