"""Which views PyTorch's kernels read in place: slices, transposes and expansions move nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from gpuir.ir.graph import Node, Op, Value
from gpuir.ir.phases import phase_of
from gpuir.ir.strides import Strided
from gpuir.ir.types import TensorType, channels_last
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.ops.strides import apart
from gpuir.passes.views import Views, Wanted, inside, is_layout, is_packed, is_parted, memory_order

FLAT = t.Pointwise | t.Layout | t.Generating | t.Indexing | t.Scattering | t.Joining
CONVOLUTIONS = (t.Conv, t.ConvTranspose, t.ConvWeightGradient)

# Operands of PyTorch's pointwise loops, at most: `addcmul`, `lerp`, `where`.
MOST_LOOPED = 3


@dataclass(frozen=True)
class AnyStrides(Views):
    """Pointwise, reducing, joining and scattering kernels take any strides (PyTorch documentation,
    Tensor Views; aten/src/ATen/TensorIterator.h), whatever reads an expansion sees the cells that
    there are, and what wants rows packed copies them first."""

    strided: ClassVar[bool] = True

    def takes(self, op: Op, value: Value, view: Strided) -> bool:
        if self.absorb and is_parted(op, value):
            return False
        steps = view.strides[-2:]
        batched = 0 not in view.strides or (1 in steps and 0 not in steps)
        return (batched and self.by_strides(op, value, view)) or self.iterates(op, value, view)

    def iterates(self, op: Op, value: Value, view: Strided) -> bool:
        """Whether a launch reads `value` by any strides, as PyTorch's TensorIterator does, and
        cuDNN where channels are innermost; another layout group always may. Of what is broadcast,
        in memory once, products read no rows or columns that lie no cells apart."""
        if is_layout(op):
            return True
        if not isinstance(op, t.Fused):
            return False
        spread = 0 in view.strides
        images = memory_order(view) == channels_last(value.type.rank) and not spread
        inner = inside(op, value)
        for node in op.body.nodes:
            if not inner & set(node.op.operands):
                continue
            match node.op:
                case t.Map() | t.Cast() | t.Slice() | t.Concat() | t.Pad() | t.Reduce():
                    pass
                case t.ArgReduce():
                    pass
                case t.Conv(x) | t.ConvTranspose(x) if x in inner and images:
                    pass
                case t.ConvWeightGradient() | t.Window() | t.ResizeGradient() if images:
                    pass
                case t.Normalize() | t.NormalizeGradient() | t.NormGradient() if images:
                    pass
                case t.Scattering(x=x) if x not in inner:
                    pass
                case _:
                    return super().takes(op, value, view)
        return True

    def takes_expanded(self, op: Op, value: Value) -> bool:
        """As one flat nest does: all but the tensor that is written to, and the indices of whole
        rows, which PyTorch lays flat."""
        if not isinstance(op, t.Fused) or not all(isinstance(n.op, FLAT) for n in op.body.nodes):
            return False
        inner = inside(op, value)
        for o in (n.op for n in op.body.nodes):
            match o:
                case t.Scattering(x=x) if x in inner:
                    return False
                case t.Gather(indices=i) if i in inner:
                    return False
                case _:
                    pass
        return True

    def wants(self, node: Node, is_last: Callable[[Value], bool]) -> Iterator[Wanted]:
        """A softmax, a layer or group norm row-major (aten/src/ATen/native/cuda/SoftMax.cu,
        layer_norm_kernel.cu, group_norm.cpp), a convolution both operands as either, without gaps
        (aten/src/ATen/native/Convolution.cpp)."""
        if not isinstance(node.op, t.Fused):
            return
        outer = dict(zip(node.op.body.inputs, node.op.args, strict=True))
        for op in (n.op for n in node.op.body.nodes):
            given = [outer[v] for v in op.operands if v in outer]
            if is_by_rows(op):
                yield from ((x, None) for x in given)
            elif isinstance(op, CONVOLUTIONS):
                last = any(is_last(outer[x]) for x in deciders(op, node) if x in outer)
                yield from ((x, channels_last(x.type.rank) if last else None) for x in given)

    def apart(self, kernel: k.Map, lies: Callable[[Value], Strided]) -> int:
        """0 where all lie as the result does, and in a kernel of more operands than PyTorch's loops
        have: a batch norm's has a loop of its own."""
        y = kernel.result_types[0]
        order = y.order or tuple(range(y.rank))
        differ = [v for v in kernel.args if not lies_as(v, lies(v), y)]
        if not differ or len(kernel.args) > MOST_LOOPED:
            return 0
        alike = (v for v in differ if v.type.shape == y.shape)
        return max((apart(lies(v).transpose(order), ()) for v in alike), default=1)


def lies_as(x: Value, lies: Strided, y: TensorType) -> bool:
    """Whether an operand lies in memory as a result does, or is as large."""
    if x.type.shape != y.shape:
        return x.type.size == y.size
    return is_packed(x.type.with_order(y.order), lies)


def is_by_rows(op: Op) -> bool:
    """Whether PyTorch's kernel of an op walks along packed rows."""
    match op:
        case t.Normalize(x, axes) | t.NormalizeGradient(x, _, axes):
            return op.groups is not None or axes == tuple(
                range(x.type.rank - len(axes), x.type.rank)
            )
        case _:
            return isinstance(op, t.Softmax)


def deciders(op: Op, node: Node) -> tuple[Value, ...]:
    """The operands by which a convolution's images lie. Those of a gradient lie as in the
    convolution itself, whatever comes back to it (aten/src/ATen/native/Convolution.cpp,
    convolution_backward)."""
    match op:
        case t.ConvWeightGradient(x):
            return (x,)
        case t.ConvTranspose(w=w) if phase_of(node) == "backward":
            return (w,)
        case _:
            return op.operands
