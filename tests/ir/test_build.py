"""Builder, rewrite and prune: names, locations, regions."""

from __future__ import annotations

from gpuir.ir.build import Builder, prune, rewrite
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.types import TensorType, f32, i64
from gpuir.ir.verify import verify
from gpuir.ops import tensor as t

TYPE = TensorType((2,), f32)


def chain(*fns: str) -> Graph:
    """x through each scalar function; node i is at "m:i" and its result is called after it."""
    b = Builder(Level.graph, "g")
    x = b.input("x", TYPE)
    for i, fn in enumerate(fns):
        b.locs = (f"m:{i}",)
        x = b(t.Map(fn, (x,)), fn)
    return b.finish([x])


def test_taken_names_get_a_suffix():
    g = chain("relu", "relu", "relu")
    assert [n.results[0].name for n in g.nodes] == ["relu", "relu.1", "relu.2"]


def test_rewrite_gives_the_old_name_and_place_to_what_replaces_it():
    def two_for_exp(n: Node, b: Builder) -> tuple[Value, ...] | None:
        match n.op:
            case t.Map("exp", (x,)):
                return (b(t.Map("neg", (b(t.Map("relu", (x,))),))),)
            case _:
                return None

    g = rewrite(chain("exp", "tanh"), two_for_exp)
    verify(g)
    assert [n.results[0].name for n in g.nodes] == ["map", "exp", "tanh"]
    assert [n.locs for n in g.nodes] == [("m:0",), ("m:0",), ("m:1",)]
    assert g.folded == ()


def test_what_nothing_keeps_is_folded():
    def drop_exp(n: Node, b: Builder) -> tuple[Value, ...] | None:
        match n.op:
            case t.Map("exp", (x,)):
                return (x,)
            case _:
                return None

    g = rewrite(chain("exp", "tanh"), drop_exp)
    assert g.folded == ("m:0",)
    assert rewrite(chain("exp"), drop_exp).outputs[0].name == "x"


def test_rewrite_visits_loops_but_not_kernels():
    body = Builder(Level.graph, "")
    body.locs = ("m:body",)
    body.input("i", TensorType((), i64))
    x = body.input("x", TYPE)
    region = body.finish([body(t.Map("exp", (x,)))])
    b = Builder(Level.graph, "g")
    b.locs = ("m:loop",)
    y = b(t.Loop(region, 3, (b.input("x", TYPE),)))

    def tanh(n: Node, b: Builder) -> tuple[Value, ...] | None:
        match n.op:
            case t.Map("exp", args):
                return (b(t.Map("tanh", args)),)
            case _:
                return None

    g = rewrite(b.finish([y]), tanh)
    verify(g)
    assert [n.op.fn for n in g.walk() if isinstance(n.op, t.Map)] == ["tanh"]


def test_prune_drops_what_nobody_reads():
    g = chain("exp", "tanh")
    first = g.nodes[0].results
    pruned = prune(Graph(g.level, g.name, g.inputs, (), g.nodes, first))
    assert [n.results for n in pruned.nodes] == [first]
    assert pruned.folded == ("m:1",)
