"""Builder, rewrite and prune: names, locations, regions."""

from __future__ import annotations

from dataclasses import replace

from gpuir.ir.build import Builder, prune, rewrite
from gpuir.ir.graph import Cut, Graph, Level, Node, Value
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


def test_roles_live_as_long_as_names_and_go_to_what_replaces_them():
    g = chain("exp", "tanh", "neg")
    roles = (("exp", "cache"), ("tanh", "gradient"))

    def drop_tanh(n: Node, b: Builder) -> tuple[Value, ...] | None:
        match n.op:
            case t.Map("tanh", (x,)):
                return (x,)
            case _:
                return None

    assert rewrite(replace(g, roles=roles), drop_tanh).roles == (("exp", "cache"),)
    assert rewrite(replace(g, roles=roles[1:]), drop_tanh).roles == (("exp", "gradient"),)
    first = replace(g, roles=roles, outputs=g.nodes[0].results)
    assert prune(first).roles == (("exp", "cache"),)


def test_how_an_output_is_cut_goes_to_what_replaces_it():
    g = replace(chain("exp", "neg"), mesh=(("tp", 2),), cuts=(("neg", Cut("tp", 0)),))

    def drop_neg(n: Node, b: Builder) -> tuple[Value, ...] | None:
        return n.op.operands if isinstance(n.op, t.Map) and n.op.fn == "neg" else None

    made = rewrite(g, drop_neg)
    verify(made)
    assert made.cuts == (("exp", Cut("tp", 0)),)
    assert rewrite(g, lambda n, b: None).cuts == g.cuts


def test_what_an_output_takes_over_is_kept_by_whoever_begins_from_the_graph():
    b = Builder(Level.graph, "g")
    x = b.input("x", TYPE)
    b.locs = ("m:a",)
    y, z = b(t.Map("exp", (x,))), b(t.Map("neg", (x,)))
    g = b.finish([y, z], [x])
    assert g.over == (x, None)
    assert rewrite(g, lambda n, b: None).over == (x, None)
    assert b.finish([y]).over == ()
