"""Ops that users add, and graphs that they write: what is missing is said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

import gpuir
from gpuir.ir.build import Builder
from gpuir.ir.errors import PluginError, UsageError
from gpuir.ir.graph import Level, Value
from gpuir.ir.types import TensorType, f32
from gpuir.ops import tensor as t


def test_a_reducing_op_says_its_axes():
    x = Value("x", TensorType((4, 8, 16), f32))

    @dataclass(frozen=True)
    class Last(t.Reducing):
        name: ClassVar[str] = "t.last"
        x: Value

    @dataclass(frozen=True)
    class Along(t.Reducing):
        name: ClassVar[str] = "t.along"
        x: Value
        axes: tuple[int, ...] = (-1,)

    assert Along(x).reduced_axes() == (2,) and Along(x, (2, -3)).reduced_axes() == (0, 2)
    with pytest.raises(PluginError, match="does not say along which axes") as error:
        Last(x).reduced_axes()
    assert "reduced_axes" in error.value.fix


def test_one_result_of_several_is_asked_for():
    b = Builder(Level.graph, "g")
    x = b.input("x", TensorType((4, 8), f32))
    with pytest.raises(UsageError, match=r"t.topk has 2(.|\n)*b.add\(op\)"):
        b(t.TopK(x, 2, 1))


def test_ir_by_hand_is_not_blamed_on_code():
    text = 'graph @g {\n  in %x: f32[4]\n  %y: f32[4] = t.map("relu", [%x])\n  out %y\n}\n'
    for read in (gpuir.load_text, lambda text: gpuir.analyze(gpuir.parse(text), "a100").graph):
        with pytest.raises(gpuir.GpuirError) as error:
            read(text)
        assert "bug" not in str(error.value) and "change the text" in error.value.fix


def test_a_converter_states_the_ranks_of_its_operands():
    from onnx import TensorProto, helper

    from gpuir.frontends.onnx.definition import ranked

    @ranked("2 1|2")
    def mine(n, e):
        return e(t.Map("add", (n[0], n[1])))

    def load(*shape: int) -> gpuir.Graph:
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, list(shape))
        z = helper.make_tensor_value_info("z", TensorProto.FLOAT, [4, 8])
        nodes = [helper.make_node("Mine", ["x", "y"], ["z"], domain="mine")]
        graph = helper.make_graph(nodes, "m", [x, y], [z])
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
        made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return gpuir.load(made.SerializeToString(), converters={"mine::Mine": mine})

    assert load(8).nodes and load(4, 8).nodes
    with pytest.raises(gpuir.GpuirError, match="input 1 has the wrong number of axes") as error:
        load(1, 4, 8)
    assert error.value.expected == "1 or 2"


def test_the_help_lists_every_format():
    from gpuir.backends.table import BACKENDS
    from gpuir.cli.analyze import command

    (text,) = (p.help for p in command.params if p.name == "format")
    assert all(name in text for name in BACKENDS) and "chakra (a folder)" in text
