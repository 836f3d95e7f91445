"""What a compiler copies so that convolutions find channels innermost."""

from __future__ import annotations

from dataclasses import dataclass

from gpuir.ir.build import Builder, begin, rewrite
from gpuir.ir.graph import Graph, Level, Node, Op, Value
from gpuir.ir.types import channels_last
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass

STEPS: dict[type[Op], int] = {t.Normalize: 9, t.Softmax: 5, t.Matmul: 3}  # aten's nodes for one
# How much longer convolutions take with channels innermost, by kind: torch 2.13,
# torch/_inductor/graph.py, decide_layout_opt, from measurements of its authors.
SLOWER = {"grouped": 1.358, "small": 0.783, "widening": 0.725, "other": 0.823}


@dataclass(frozen=True)
class ChannelsLast(Pass):
    """Copies the weights of two-dimensional convolutions, and the inputs of the graph that they
    read, so that channels are innermost, where they do not lie so already, as Inductor does in each
    call: weights may change between two, unless they are frozen. What autocast makes of one is
    written so at once. Images that the graph gives are copied back, to lie as in eager mode.
    Nothing, where it holds that to be slower in sum.

    (torch 2.13: torch/_inductor/graph.py, decide_layout_opt; kernel/conv.py, convolution;
    config.py, keep_output_stride.)
    """

    name = "channels_last"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        if not has_channels_innermost(g):
            return g
        given = {*g.inputs, *g.params}
        given |= {
            v for n in g.nodes if isinstance(n.op, t.Cast) and n.op.x in given for v in n.results
        }
        copies: dict[Value, Value] = {}

        def copied(v: Value, b: Builder) -> Value:
            order = channels_last(v.type.rank)
            lies = v.type.is_channels_last or v.type.shape[1] == 1
            if v not in given or lies or order is None:
                return v
            if v not in copies:
                copies[v] = b(t.Ordered(v, order))
            return copies[v]

        def convolve(n: Node, b: Builder) -> tuple[Value, ...] | None:
            """conv(x, w)  →  conv(ordered(x), ordered(w))"""
            match n.op:
                case t.Conv(x, w) if w.type.rank == 4:
                    return b.add(n.op.substitute({x: copied(x, b), w: copied(w, b)}))
                case _:
                    return None

        made = rewrite(g, convolve)
        if any(v.type.is_channels_last for v in (*g.inputs, *g.params)):
            return made  # so do eager mode's results
        return with_rows_back(made)


def with_rows_back(g: Graph) -> Graph:
    """The graph with those of its outputs copied to rows that convolutions write with channels
    innermost, and elementwise ops and norms after them."""
    inner: set[Value] = set()
    for n in g.nodes:
        after = isinstance(n.op, t.Map | t.Normalize) and not inner.isdisjoint(n.op.operands)
        if isinstance(n.op, t.Conv) or after:
            inner.update(v for v in n.results if v.type.rank == 4 and not v.type.order)
    if inner.isdisjoint(g.outputs):
        return g
    b = begin(g, g.level)
    for n in g.nodes:
        b.put(n)
    locs = {v: n.locs for n in g.nodes for v in n.results}
    copies: dict[Value, Value] = {}
    for v in dict.fromkeys(v for v in g.outputs if v in inner):
        b.locs = locs[v]
        copies[v] = b(t.Ordered(v, (0, 1, 2, 3)))
    return b.finish(copies.get(v, v) for v in g.outputs)


def has_channels_innermost(g: Graph) -> bool:
    """Whether Inductor lays the images of a graph out with channels innermost."""
    convolutions = [n.op for n in g.nodes if isinstance(n.op, t.Conv) and n.op.w.type.rank == 4]
    flops = sum(op.flops() for op in convolutions)
    if sum(SLOWER[kind_of(op)] * op.flops() for op in convolutions) > flops:
        return False
    return bool(convolutions) and aten_nodes(g) < 300 * len(convolutions)


def aten_nodes(g: Graph) -> int:
    """About how many nodes PyTorch's graph has once it is decomposed: arguments are nodes there,
    and what is one op here are some. (torch/_decomp/decompositions.py; torch/_refs.)"""
    return len(g.inputs) + len(g.params) + sum(STEPS.get(type(n.op), 1) for n in g.nodes)


def kind_of(op: t.Conv) -> str:
    made, read, *window = op.w.type.shape
    if op.groups > 1 and read > 1:
        return "grouped"
    if made <= 64 and read <= 64:
        return "small"
    return "widening" if made * 2 <= read and window[0] > 1 else "other"
