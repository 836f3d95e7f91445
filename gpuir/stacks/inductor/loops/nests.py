"""The loop nest of an op, and what a cell of it takes."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from gpuir.fusion.flow import Flow
from gpuir.ir.graph import Node, Op, Value
from gpuir.ops import tensor as t
from gpuir.ops.scalar import SCALARS

# What Inductor takes apart into several ops that each read the operand (torch/_inductor/
# decomposition.py, torch/_decomp/decompositions.py).
TWICE = ("gelu", "gelu_tanh", "silu", "hard_swish", "mish", "softplus", "leaky_relu", "elu")


class Nest(NamedTuple):
    """The loops that make a node's results: the shape they run over, of which `row` cells make
    one result, `cells` times."""

    shape: tuple[int, ...]
    cells: int
    row: int = 1


def nest_of(node: Node) -> Nest:
    """The loops of an op that is no library call."""
    op, shape = node.op, node.results[0].type.shape
    if isinstance(op, t.Scattering):
        return Nest(op.updates.type.shape, op.updates.type.size)
    if not isinstance(op, t.Reducing):
        return Nest(shape, prod(shape))
    shape = op.operands[0].type.shape
    row = prod(shape[a] for a in op.reduced_axes())
    if isinstance(op, t.Normalize | t.NormalizeGradient):
        row //= op.groups or 1
    return Nest(shape, prod(shape) // max(row, 1), row)


def operations(op: Op) -> int:
    """What one cell of an op's result takes to compute."""
    match op:
        case t.Map(fn):
            return SCALARS[fn].flops
        case _:
            return 0 if isinstance(op, t.Layout) else 1


def readings(op: Op) -> int:
    """How many of Inductor's ops read the operand of an op."""
    twice = isinstance(op, t.Softmax | t.Normalize) or (isinstance(op, t.Map) and op.fn in TWICE)
    return 2 if twice else 1


def is_in_groups(flow: Flow, x: Value) -> bool:
    """Whether `x` is an image, computed cell by cell, whose channels are cut into groups."""
    match flow.maker(x):
        case Node(t.Reshape(image)):
            cut = x.type.shape[2:] != image.type.shape[2:] and x.type.rank == 5
            return cut and image.type.rank == 4
        case Node(op) if isinstance(op, t.Pointwise):
            return any(is_in_groups(flow, v) for v in op.operands if v.type.shape == x.type.shape)
        case _:
            return False
