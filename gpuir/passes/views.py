"""Which views the kernels of a stack read in place. The answers here are those of libraries alone;
a stack with other kernels gives its own (`stacks`), and `legalize` asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import ClassVar, TypeGuard

from gpuir.ir.graph import Graph, Node, Op, Value
from gpuir.ir.strides import Strided
from gpuir.ir.types import TensorType
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.ops.strides import viewed

Wanted = tuple[Value, tuple[int, ...] | None]  # an operand, and the order that a kernel takes it in

# Rows of a batch's product from which it fills tiles by itself, and need not be one with the rest's
# so that what transposes it is worth a copy: four tiles of 128. Assumed.
ROWS = 512


@dataclass(frozen=True)
class Views:
    """What is a view where nothing but the libraries of products and attention takes strides.

    With `absorb`, kernels write transposes of their results by themselves, and a product by one
    matrix, of all rows of a batch, does not come apart into small ones for a view's sake.
    """

    absorb: bool = True
    strided: ClassVar[bool] = False  # results keep strides, which all kernels but some take

    def makes(self, body: Graph) -> bool:
        """Whether layout ops that strides can express may be a view at all."""
        return True

    def renames(self, body: Graph) -> bool:
        """Whether layout ops that leave the cells in order are a view for any reader."""
        return True

    def takes(self, op: Op, value: Value, view: Strided) -> bool:
        """Whether a launch reads `value` as that view of another tensor."""
        spread = 0 in view.strides
        return not spread and self.by_strides(op, value, view)

    def by_strides(self, op: Op, value: Value, view: Strided) -> bool:
        """Whether libraries' products and attention are all that reads a value in a launch."""
        order = memory_order(view)
        return takes_strides(op, value, order) and not (self.absorb and is_parted(op, value))

    def takes_expanded(self, op: Op, value: Value) -> bool:
        """Whether a launch reads a value where it lies once that it sees many times over."""
        return False

    def wants(self, node: Node, is_last: Callable[[Value], bool]) -> Iterator[Wanted]:
        """The operands that a launch takes in one order alone; `is_last` says whether the channels
        of one are innermost."""
        yield from ()

    def apart(self, kernel: k.Map, lies: Callable[[Value], Strided]) -> int:
        """How far apart threads beside each other fetch cells of an operand, at most, in a kernel
        that finds one cell after another; `lies` says how a value lies in memory."""
        return 0


# ---------------------------------------------------------------------------- layouts


def is_layout(op: Op) -> TypeGuard[t.Fused]:
    return isinstance(op, t.Fused) and all(isinstance(n.op, t.Layout) for n in op.body.nodes)


def is_reshape(body: Graph) -> bool:
    return all(isinstance(n.op, t.Reshape) for n in body.nodes)


def view_of(body: Graph, x: Strided) -> Strided | None:
    """The body's result as a view of its one operand, or None where cells would have to move."""
    if 0 in x.shape:
        return None
    for node in body.nodes:
        view = viewed(x, node.op)
        if view is None:
            return None
        x = view
    return x


def memory_order(view: Strided) -> tuple[int, ...]:
    """Axes from outermost to innermost by stride; empty for row-major, and where cells are seen
    many times over. Axes of extent 1 have no place of their own and stay next to their
    neighbours."""
    shape, strides = view.shape, view.strides
    if 0 in strides:
        return ()
    wide = [i for i, n in enumerate(shape) if n != 1]
    by_stride = sorted(wide, key=lambda i: -strides[i])
    if by_stride == wide:
        return ()
    ones = [i for i, n in enumerate(shape) if n == 1]
    return (*ones, *by_stride)


def is_packed(type: TensorType, view: Strided) -> bool:
    """Whether a view lies as a tensor of that type, without gaps."""
    step = 1
    for axis in reversed(type.order or range(type.rank)):
        n = type.shape[axis]
        if n != 1 and view.strides[axis] != step:
            return False
        step *= n
    return True


# ---------------------------------------------------------------------------- products, attention


def inside(op: t.Fused, value: Value) -> set[Value]:
    """What an argument of a launch is called in its body."""
    return {b for b, a in zip(op.body.inputs, op.args, strict=True) if a == value}


def takes_strides(op: Op, value: Value, order: tuple[int, ...]) -> bool:
    """Whether a group reads `value` by strides: as an operand of its product, or the weights of
    experts, with one of the two matrix axes innermost."""
    if not isinstance(op, t.Fused):
        return False
    rank = value.type.rank
    if order and order[-1] < rank - 2:
        return False
    inner = inside(op, value)
    for node in op.body.nodes:
        if not inner & set(node.op.operands):
            continue
        match node.op:
            case t.Matmul():
                pass
            case t.Attention(mask=mask) | t.AttentionGradient(mask=mask) if mask not in inner:
                pass
            case t.Experts() | t.ExpertsGradient() as mix:
                if not inner & set(node.op.operands) <= set(mix.weights):
                    return False
            case _:
                return False
    return True


def is_parted(op: Op, value: Value) -> bool:
    """Whether a group's product by one matrix would come apart where `value`, its left operand, is
    read by strides. (PyTorch op by op does that: `should_fold` of aten/src/ATen/native/
    LinearAlgebra.cpp.)"""
    if not isinstance(op, t.Fused):
        return False
    inner = inside(op, value)
    products = (n.op for n in op.body.nodes if isinstance(n.op, t.Matmul))
    return any(x.a in inner and has_few_rows(x) for x in products)


def has_few_rows(op: t.Matmul) -> bool:
    """Whether a product of all rows of a batch by one matrix, taken apart, would be of few each."""
    *batch, rows, _ = op.a.type.shape
    return prod(op.b.type.shape[:-2]) == 1 < prod(batch) and rows < ROWS
