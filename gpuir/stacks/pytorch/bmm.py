"""Batched products as PyTorch runs them: over one leading axis."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from gpuir.ir.build import Builder, rewrite
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass


@dataclass(frozen=True)
class Bmm(Pass):
    """Folds the leading axes of both operands of a product into one, as `torch.matmul` does before
    it calls `bmm`: operands whose axes do not fold where they lie, as heads split off a projection
    of several sequences, are copied first. (PyTorch, aten/src/ATen/native/LinearAlgebra.cpp,
    _matmul_impl.)"""

    name = "bmm"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        return rewrite(g, fold_leading)


def fold_leading(n: Node, b: Builder) -> tuple[Value, ...] | None:
    """matmul(a[i, j, m, k], b[i, j, k, n])  →  reshape(matmul(a[ij, m, k], b[ij, k, n]))"""
    match n.op:
        case t.Matmul(x, y, dtype) if min(x.type.rank, y.type.rank) > 2:
            pass
        case _:
            return None
    shape = n.results[0].type.shape
    if len(shape) == 3:
        return None
    product = t.Matmul(_folded(x, shape[:-2], b), _folded(y, shape[:-2], b), dtype)
    return (b(t.Reshape(b(product), shape)),)


def _folded(x: Value, leading: tuple[int, ...], b: Builder) -> Value:
    matrix = x.type.shape[-2:]
    if prod(x.type.shape[:-2]) == 1:  # one matrix for all: batches lie no cells apart
        return b(t.Reshape(x, (1, *matrix)))
    if x.type.shape[:-2] != leading:
        x = b(t.Broadcast(x, (*leading, *matrix)))
    return b(t.Reshape(x, (prod(leading), *matrix)))
