"""Sums with too few results to fill a GPU, in two steps."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from gpuir.ir.build import Builder, rewrite
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass


@dataclass(frozen=True)
class SplitSums(Pass):
    """Splits reductions that are not over the innermost axis, as the gradient of a bias or an
    average over an image with channels innermost: `terms` by `terms`, and the rest of them after
    that, where there are more and fewer than `results` results.

    The defaults are Inductor's for an A100: 32 terms in each of 4 registers of a thread, and 64
    results for each of 108 multiprocessors. (torch 2.13: torch/_inductor/ir.py, num_splits;
    choices.py, reduction_split_factor.)
    """

    terms: int = 128
    results: int = 6912

    name = "split_sums"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        images = any(isinstance(n.op, t.Conv) and n.op.w.type.rank == 4 for n in g.nodes)

        def split(n: Node, b: Builder) -> tuple[Value, ...] | None:
            """sum(x[r, c], 0)  →  sum(sum(x[s, r/s, c], 1), 0)"""
            match n.op:
                case t.Reduce(fn, x, axes) if axes and is_outer(x.type.shape, axes, images):
                    shape = x.type.shape
                case _:
                    return None
            terms = prod(shape[a] for a in axes)
            parts = self.parts(terms)
            if axes != tuple(range(axes[0], axes[-1] + 1)) or x.type.size >= self.results * terms:
                return None
            if not parts:
                return None
            first, last = axes[0], axes[-1]
            folded = (*shape[:first], parts, terms // parts, *shape[last + 1 :])
            partial = b(t.Reduce(fn, b(t.Reshape(x, folded)), (first + 1,)))
            whole = b(t.Reduce(fn, partial, (first,)))
            return (b(t.Reshape(whole, n.results[0].type.shape)),)

        return rewrite(g, split)

    def parts(self, terms: int) -> int | None:
        """How many sums come first: what divides the terms and leaves so many to each at most."""
        least = -(-terms // self.terms)
        if least < 2:
            return None
        found = (n for n in range(max(least, 9), terms // 2 + 1) if terms % n == 0)
        return next(found, None)


def is_outer(shape: tuple[int, ...], axes: tuple[int, ...], images: bool) -> bool:
    """Whether neighbours in memory are of different sums; images have channels innermost."""
    if images and len(shape) == 4:
        return 1 not in axes
    wide = [a for a, n in enumerate(shape) if n != 1]
    return bool(wide) and wide[-1] not in axes
