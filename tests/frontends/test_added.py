"""Converters that users add for operators of their own, from a module or an entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed")

import gpuir  # noqa: E402
from gpuir import plugins  # noqa: E402
from gpuir.cli.modules import load_modules  # noqa: E402
from gpuir.interp import run  # noqa: E402
from gpuir.ir.errors import ModelError, PluginError  # noqa: E402

MODULE = """
from gpuir.ops import tensor as t


def twice(node, emit):
    return emit(t.Map("mul", (node[0],), (2.0,)))


def broken(node, emit):
    return node["no such thing"].numbers


CONVERTERS = {"mine::Twice": twice, "mine::Broken": broken}
"""


def model(folder: Path, op: str) -> Path:
    """relu(op(x)), the type in between nowhere said."""
    made = onnx.helper.make_model(
        onnx.helper.make_graph(
            [
                onnx.helper.make_node(op, ["x"], ["y"], name="own", domain="mine"),
                onnx.helper.make_node("Relu", ["y"], ["z"]),
            ],
            "g",
            [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3])],
            [onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, [2, 3])],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("mine", 1)],
    )
    path = folder / "model.onnx"
    onnx.save(made, path)
    return path


def module(folder: Path) -> Path:
    path = folder / "mine.py"
    path.write_text(MODULE)
    return path


def test_an_unknown_operator_says_how_to_add_it(tmp_path: Path):
    with pytest.raises(ModelError) as caught:
        gpuir.load(model(tmp_path, "Twice"))
    assert 'CONVERTERS = {"mine::Twice": convert}' in str(caught.value)


def test_a_module_adds_a_converter(tmp_path: Path):
    loaded = load_modules([str(module(tmp_path))])
    graph = gpuir.load(model(tmp_path, "Twice"), converters=loaded.converters, strict=True)
    x = np.arange(-3, 3, dtype=np.float32).reshape(2, 3)
    (found,) = run(graph, {graph.inputs[0].name: x}).values()
    np.testing.assert_array_equal(found, np.maximum(2 * x, 0))


def test_an_entry_point_adds_a_converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    loaded = load_modules([str(module(tmp_path))])  # which makes `mine` known
    assert loaded.converters
    points = {"mine::Twice": EntryPoint("mine::Twice", "mine:twice", "gpuir.converters")}
    groups = {"converters": points}
    monkeypatch.setattr(plugins, "installed", lambda group: groups.get(group, {}))
    graph = gpuir.load(model(tmp_path, "Twice"), strict=True)
    assert [n.op.name for n in graph.nodes] == ["t.map", "t.map"]


def test_what_fails_in_a_converter_is_its_own_fault(tmp_path: Path):
    loaded = load_modules([str(module(tmp_path))])
    with pytest.raises(PluginError, match="the converter of mine::Broken failed"):
        gpuir.load(model(tmp_path, "Broken"), converters=loaded.converters)


@pytest.mark.filterwarnings("ignore")
def test_a_custom_operator_of_torch_gets_a_converter(tmp_path: Path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    def own(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    own.__annotations__ = {"x": torch.Tensor, "return": torch.Tensor}
    operator = torch.library.custom_op("mine::Twice", mutates_args=())(own)
    operator.register_fake(torch.empty_like)

    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return operator(x).relu()

    source = MODULE.replace("node[0]", 'node["x"]')
    path = tmp_path / "mine.py"
    path.write_text(source)
    loaded = load_modules([str(path)])
    x = torch.randn(2, 3)
    with pytest.raises(ModelError, match="no converter"):
        gpuir.load(Model(), args=(x,), strict=True)
    graph = gpuir.load(Model(), args=(x,), converters=loaded.converters, strict=True)
    (found,) = run(graph, {graph.inputs[0].name: x.numpy()}).values()
    np.testing.assert_allclose(found, Model()(x))
