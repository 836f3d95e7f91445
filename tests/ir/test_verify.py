"""Each promise of each level, broken once."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from gpuir.ir.errors import VerifyError
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.notes import Cost, Tile
from gpuir.ir.types import TensorType, f16, f32
from gpuir.ir.verify import verify
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t

TYPE = TensorType((2, 2), f32)
X, Y, Z = (Value(name, TYPE) for name in "xyz")
RELU = Node(t.Map("relu", (X,)), (Y,), ("m:Relu",))
BODY = Graph(Level.graph, "", (X,), (), (RELU,), (Y,))
KERNEL = Node(k.Map((X,), BODY), (Y,), ("m:Relu",), Tile((("i", 4),)))
COST = Cost(2.0, "memory", "test@1", (("compute", 1.0), ("memory", 2.0)))


def graph(*nodes: Node, level: Level = Level.graph, target: str | None = None) -> Graph:
    outputs = nodes[-1].results if nodes else ()
    return Graph(level, "g", (X,), (), nodes, outputs, target=target)


def tiled(node: Node, level: Level = Level.tiled) -> Graph:
    return graph(node, level=level, target="a100")


def test_sound_graphs_pass():
    verify(graph(RELU))
    verify(tiled(KERNEL))
    verify(tiled(replace(KERNEL, cost=COST), Level.costed))


def body_of(*nodes: Node) -> Graph:
    return Graph(Level.graph, "", (X,), (), nodes, nodes[-1].results)


TWICE = body_of(Node(t.Matmul(X, X), (Y,), ("m:a",)), Node(t.Matmul(Y, X), (Z,), ("m:b",)))
BROKEN = {
    "used before it is defined": graph(Node(t.Map("relu", (Z,)), (Y,), ("m:a",))),
    "%y is defined twice": graph(RELU, RELU),
    "%x is defined twice": replace(graph(RELU), params=(X,)),
    "is used with two types": graph(
        Node(t.Map("relu", (Value("x", TensorType((3,), f32)),)), (Y,), ("m:a",))
    ),
    "not the ones that the op computes": graph(
        replace(RELU, results=(Value("y", TensorType((3,), f32)),))
    ),
    "the data types of the arguments differ": graph(
        RELU,
        Node(t.Cast(X, f16), (Value("h", TensorType((2, 2), f16)),), ("m:b",)),
        Node(t.Map("add", (Y, Value("h", TensorType((2, 2), f16)))), (Z,), ("m:c",)),
    ),
    "no location": graph(replace(RELU, locs=())),
    "output %z is not defined": replace(graph(RELU), outputs=(Z,)),
    "is taken over, but it is not an input or a": replace(graph(RELU), over=(Y,)),
    "has another type than": replace(
        graph(RELU),
        params=(Value("w", TensorType((4,), f32)),),
        over=(Value("w", TensorType((4,), f32)),),
    ),
    "two outputs take over": replace(graph(RELU), outputs=(Y, Y), over=(X, X)),
    "must have one entry for each output": replace(graph(RELU), over=(X, None)),
    "%z has a role but is not defined": replace(graph(RELU), roles=(("z", "cache"),)),
    "has two roles": replace(graph(RELU), roles=(("y", "cache"), ("y", "input"))),
    "is not an op of level graph": graph(KERNEL),
    "stands alone": graph(RELU, level=Level.fused),
    "more than one contraction": graph(
        Node(t.Fused((X,), TWICE), (Z,), ("m:a",)), level=Level.fused
    ),
    "is not a kernel": graph(RELU, level=Level.kernel),
    "must name its target": graph(KERNEL, level=Level.tiled),
    "a kernel of level tiled must have a tile": tiled(replace(KERNEL, tile=None)),
    "the tile cuts m": tiled(replace(KERNEL, tile=Tile((("m", 2),)))),
    "a kernel of level costed must have a cost": tiled(KERNEL, Level.costed),
    "the interval is empty": tiled(
        replace(KERNEL, cost=replace(COST, interval=(3.0, 2.0))), Level.costed
    ),
    "low_s is negative": tiled(
        replace(KERNEL, cost=replace(COST, interval=(-1.0, 2.0))), Level.costed
    ),
    "time_s is nan": tiled(replace(KERNEL, cost=replace(COST, time_s=nan)), Level.costed),
    "waves is inf": tiled(
        replace(KERNEL, cost=replace(COST, facts=(("waves", inf),))), Level.costed
    ),
    "compute is negative": tiled(
        replace(KERNEL, cost=replace(COST, terms=(("compute", -1.0),))), Level.costed
    ),
    "dram_bytes is negative": tiled(
        replace(KERNEL, cost=replace(COST, facts=(("dram_bytes", -1.0),))), Level.costed
    ),
    "magic is not a term": tiled(
        replace(KERNEL, cost=replace(COST, terms=(("magic", 1.0), ("memory", 2.0)))),  # type: ignore
        Level.costed,
    ),
    "a cost has a name that cannot be written as": tiled(
        replace(KERNEL, cost=replace(COST, by="mine (2)@1")), Level.costed
    ),
    "the time is less than one of its terms": tiled(
        replace(KERNEL, cost=replace(COST, time_s=1.5)), Level.costed
    ),
    "bound is not the name of the largest term": tiled(
        replace(KERNEL, cost=replace(COST, bound="compute")), Level.costed
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_promise_is_named_with_the_pass(what: str):
    with pytest.raises(VerifyError) as error:
        verify(BROKEN[what], by="mine")
    assert what in str(error.value)
    assert "the pass 'mine'" in error.value.fix


def test_inside_a_region_too():
    body = Graph(Level.graph, "", (X,), (), (replace(RELU, locs=()),), (Y,))
    with pytest.raises(VerifyError, match="no location"):
        verify(graph(replace(KERNEL, op=k.Map((X,), body)), level=Level.kernel))
