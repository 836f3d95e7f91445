"""Which dtype the products of kernels run in: what a software stack allows, said on each kernel."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike

from gpuir.ir.graph import Graph, Level, Node, Op
from gpuir.ir.types import tf32
from gpuir.ops import kernel as k
from gpuir.targets.profile import tf32_rule, under


def run_under(
    g: Graph, profile: str | PathLike[str] | None = None, tf32: bool | None = None
) -> Graph:
    """The graph `under` a profile; where `tf32` is given, kernels that it has already follow."""
    g = under(g, profile, tf32)
    if tf32 is None or g.level not in (Level.kernel, Level.tiled):
        return g
    return with_math(g, tf32_rule(g))


def with_math(g: Graph, rule: str) -> Graph:
    """The graph of kernels with those f32 products in TF32 that a rule of a profile (`none`,
    `conv`, `products`, `all`) has so, whatever they had before."""

    def changed(node: Node) -> Node:
        op: Op = node.op
        if op.control:
            op = op.with_regions(lambda region: with_math(region, rule))
        elif isinstance(op, k.Contraction):
            math = tf32 if runs_in_tf32(op, rule) else None
            op = op if op.math == math else replace(op, math=math)
        return node if op is node.op else replace(node, op=op)

    nodes = tuple(map(changed, g.nodes))
    return (
        g if all(a is b for a, b in zip(nodes, g.nodes, strict=True)) else replace(g, nodes=nodes)
    )


def runs_in_tf32(op: k.KernelOp, rule: str) -> bool:
    """Whether a rule has a product like this run in TF32, on a device that has it.

    `products` are those that a library's setting reaches, so not those in fused attention.
    A matrix times a vector stays on the lanes, which wait for memory: cuBLAS sends a product of one
    row or column to its GEMV, which has no TF32 (ROCm/rocBLAS issue 1238).
    """
    if op.compute_dtype not in k.ROUNDED:
        return False
    if isinstance(op, k.Gemm) and 1 in (op.nest.dims["m"], op.nest.dims["n"]):
        return False
    if rule == "products":
        return not isinstance(op, k.Attention | k.AttentionGradient)
    return rule == "all" or (rule == "conv" and isinstance(op, k.Conv))
