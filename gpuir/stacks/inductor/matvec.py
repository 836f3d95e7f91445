"""Products of one row, as sums of a loop that Inductor writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from gpuir.ir.build import Builder, rewrite
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.types import f32
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass

LEAST_BITS = 8  # of a weight: those of 4 bits are multiplied by a kernel of ATen (int4mm.cu)


@dataclass(frozen=True)
class Matvec(Pass):
    """Writes a product of one row by a weight as sums over the weight's rows, which read it at
    nearly the full bandwidth where Inductor tunes its loops by coordinate descent.

    (torch 2.13: torch/_inductor/decomposition.py, mm; config.coordinate_descent_tuning.)
    """

    name = "matvec"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        made = {v: n for n in g.nodes for v in n.results}

        def by_sums(n: Node, b: Builder) -> tuple[Value, ...] | None:
            match n.op:
                case t.Matmul(x, y) if prod(x.type.shape[:-1]) == 1 and y.type.rank == 2:
                    source = made.get(y)
                case _:
                    return None
            if source is None or not isinstance(source.op, t.Transpose) or is_narrow(y, made):
                return None
            (rows,) = source.op.operands
            row = b(t.Cast(b(t.Reshape(x, (1, x.type.shape[-1]))), f32))
            products = b(t.Map("mul", (b(t.Cast(rows, f32)), row)))
            sums = b(t.Reduce("sum", products, (1,)))
            result = n.results[0].type
            return (b(t.Cast(b(t.Reshape(sums, result.shape)), result.dtype)),)

        return rewrite(g, by_sums)


def is_narrow(weight: Value, made: Mapping[Value, Node]) -> bool:
    """Whether a weight is stored in fewer bits than a loop reads it in."""
    left = [weight]
    while left:
        v = left.pop()
        if (n := made.get(v)) is not None:
            left += n.op.operands
        elif v.type.dtype.bits < LEAST_BITS:
            return True
    return False
