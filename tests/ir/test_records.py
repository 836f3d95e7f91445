"""Records as text: what is read back is what was written, and nothing but records is made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from strategies import graphs

import gpuir
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.records import NotWritten, read, written
from gpuir.ir.sizes import Size, recorded
from gpuir.ir.types import TensorType, f32
from gpuir.ops import tensor as t
from gpuir.ops.spread import Spread

ENCODER = str(Path(__file__).parents[1] / "small_encoder.onnx")


@given(graphs())
def test_a_drawn_graph_is_the_same(g):
    made = read(written(g))
    assert made == g
    assert gpuir.show(made) == gpuir.show(g)


@given(graphs())
def test_the_kernels_of_a_drawn_graph_are_the_same(g):
    kernels = gpuir.lower(g, profile="eager")
    made = read(written(kernels))
    assert made == kernels
    assert gpuir.show(made) == gpuir.show(kernels)
    assert written(made) == written(kernels)


def test_a_variant_with_sizes_is_the_same():
    program = gpuir.program(ENCODER)
    points = {"batch": [2, 64], "seq": [16, 128]}
    program.times(points, "a100")
    (sampled,) = program.sampled.values()
    (variants,) = program.variants.values()
    for x in (*sampled.known, *variants):
        text = written(x)
        made = read(text)
        assert written(made) == text
        assert type(made) is type(x)
    inside = {"batch": np.array([5]), "seq": np.array([77])}
    (variant, *_) = variants
    made = read(written(variant))
    assert made.conditions.hold(inside) == variant.conditions.hold(inside)
    assert str(made.conditions) == str(variant.conditions)
    assert gpuir.show(read(written(sampled.known[0])).at({"batch": 5, "seq": 77})) == gpuir.show(
        program.load({"batch": 5, "seq": 77})
    )


@pytest.mark.parametrize(
    "x",
    [
        *(None, True, 1, 1.0, -0.0, 1e-320, float("inf"), 2**80, "", "\ud800\x00", ()),
        *((1, 1.0, True), ((1,), (1.0,)), {"a": 1, 2: (3,)}, frozenset({3, 1}), Level.kernel),
    ],
)
def test_plain_values_keep_their_kind(x):
    made = read(written(x))
    assert repr(made) == repr(x)
    assert type(made) is type(x)


def test_a_size_keeps_its_expression():
    size = Size.symbol("batch", 4) * 3 // 7
    made = read(written((size,)))[0]
    assert type(made) is Size
    assert (made.at, made.key) == (size.at, size.key)


def test_sizes_are_read_at_a_point():
    """As numbers, those in texts too."""
    batch = Size.symbol("batch", 4)
    with recorded():
        text = written((batch * 3 // 7, f"{batch}x8", Value("x", TensorType((batch, 8), f32)), 5))
    assert read(text, {"batch": 9}) == (3, "9x8", Value("x", TensorType((9, 8), f32)), 5)
    assert type(read(text, {"batch": 9})[0]) is int
    assert type(read(text)[0]) is Size


def test_what_is_one_stays_one_and_equal_nodes_stay_two():
    x, y = (Value(name, TensorType((2,), f32)) for name in "xy")
    nodes = tuple(Node(t.Map("relu", (x,)), (y,)) for _ in range(2))
    made = read(written(Graph(Level.graph, "g", (x,), nodes=nodes, outputs=(x,))))
    assert made.inputs[0] is made.outputs[0]
    assert made.nodes[0] == made.nodes[1]
    assert made.nodes[0] is not made.nodes[1]


class Own:
    pass


@pytest.mark.parametrize("x", [Own(), [1], {1}, b"x", len, Spread, np.zeros(2)])
def test_what_is_no_record_is_not_written(x):
    with pytest.raises(NotWritten):
        written((x,))


@pytest.mark.parametrize(
    "name",
    [
        *("os:system", "builtins:eval", "gpuir.ir.records:read", "gpuir.ir.records:import_module"),
        *("gpuir.cli.output:emit", "gpuir.ir.graph:Op.substitute", "gpuir.ir.graph:TensorType"),
        *("gpuir.ir.build:Builder", "gpuir.ir.graph:nothing", "gpuir.ops.nothing:Op", "tuple"),
    ],
)
def test_nothing_but_a_record_is_made(name):
    with pytest.raises((NotWritten, KeyError, ImportError)):
        read(json.dumps([[name], [], [[0]], 0]))
