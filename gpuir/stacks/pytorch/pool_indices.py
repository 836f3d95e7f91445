"""Max pools with the indices that PyTorch's kernels write beside their results."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuir.fusion.launch import fused, inner
from gpuir.ir.build import Builder, begin, within
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass


@dataclass(frozen=True)
class PoolIndices(Pass):
    """Lets each launch of a max pool also give where in its image each largest cell lies, in 64
    bits, whoever reads that: max_pool2d calls max_pool2d_with_indices on a GPU
    (aten/src/ATen/native/Pooling.cpp; cuda/DilatedMaxPool2d.cu, DilatedMaxPool3d.cu). Indices that
    the model computes apart come from that launch."""

    name = "pool_indices"
    takes = gives = Level.fused

    def run(self, g: Graph) -> Graph:
        b = begin(g, Level.fused)
        b.reserve(v.name for n in g.nodes for v in n.results)
        places = {op: n for n in g.nodes if (op := pool_of(n)) is not None and op.fn == "argmax"}
        joined: set[Value] = set()
        for node in g.nodes:
            if node.op.control:
                node = replace(node, op=within(node.op, self.run, b.folded))
            op = pool_of(node)
            if op is not None and op.fn == "max":
                where = replace(op, fn="argmax")
                node = with_indices(node, where, places.get(where), b)
                joined.update(node.results)
            if joined.isdisjoint(node.results) or len(node.results) > 1:
                b.put(node)
        return b.finish(g.outputs)


def pool_of(node: Node) -> t.Pool | None:
    """The pool that a launch is, if it is one alone."""
    match inner(node):
        case [Node(op=t.Pool() as op)]:
            return op
        case _:
            return None


def with_indices(node: Node, where: t.Pool, known: Node | None, b: Builder) -> Node:
    (y,) = node.results
    if known is not None:
        return fused((*inner(node), *inner(known)), (y, *known.results))
    at = Value(b.names.fresh(f"{y.name}.indices"), where.result_types[0])
    return fused((*inner(node), Node(where, (at,), node.locs)), (y, at))
