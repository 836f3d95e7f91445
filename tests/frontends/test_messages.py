"""ONNX's messages without the package `onnx`: the very classes that it has."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

START = (
    "import sys; from gpuir.frontends.onnx import messages as m\n"
    "from gpuir.frontends.onnx.load import load\n"
)
USE = (
    "import onnx; from onnx import checker, helper, TensorProto; import onnx.onnx_ml_pb2\n"
    "for name in ('ModelProto', 'GraphProto', 'NodeProto', 'TensorProto', 'TypeProto'):\n"
    "    ours, theirs = getattr(m.messages(), name), getattr(onnx, name)\n"
    "    assert ours is theirs is getattr(onnx.onnx_ml_pb2, name), name\n"
    "ends = [helper.make_tensor_value_info(v, TensorProto.FLOAT, [2, 3]) for v in 'xy']\n"
    "node = helper.make_node('Relu', ['x'], ['y'])\n"
    "model = helper.make_model(helper.make_graph([node], 'g', ends[:1], ends[1:]))\n"
    "checker.check_model(model)\n"
    "assert load(model).graph == load(model.SerializeToString()).graph\n"
)


@pytest.mark.parametrize(
    "before",
    [
        "assert 'onnx' not in sys.modules; m.messages(); assert 'onnx' not in sys.modules\n",
        "import onnx\n",
        "m.find_spec = lambda name: None; m.messages(); assert 'onnx' in sys.modules\n",
    ],
    ids=["ours first", "theirs first", "file not there"],
)
@pytest.mark.parametrize("protobuf", ["upb", "python"])
def test_messages_are_those_of_onnx(before, protobuf, monkeypatch):
    monkeypatch.setenv("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", protobuf)
    code = START + before + USE
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not done.returncode, done.stderr
