"""Masks of attention, as PyTorch hands them to its kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from gpuir.ir.build import Builder, rewrite
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.types import TensorType, bool_
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass


@dataclass(frozen=True)
class Masks(Pass):
    """Makes numbers of masks of truth values, ahead of each attention that reads one: 0 where it is
    true, minus infinity elsewhere. One of a single cell says whether the attention is called, and
    no kernel is given it. (PyTorch, aten/src/ATen/native/transformers/attention.cpp,
    convert_boolean_attn_mask.)"""

    name = "masks"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        return rewrite(g, in_numbers)


def in_numbers(n: Node, b: Builder) -> tuple[Value, ...] | None:
    """attention(mask)  →  attention(where(mask, 0, -inf))"""
    match n.op:
        case t.Attention(q=q, mask=Value() as mask) as op if (
            mask.type.dtype == bool_ and mask.type.size > 1
        ):
            dtype = q.type.dtype
            seen = b(t.Constant(TensorType((), dtype), (0.0,)))
            return b.add(replace(op, mask=b(t.Map("where", (mask, seen), (-inf,)))))
        case _:
            return None
