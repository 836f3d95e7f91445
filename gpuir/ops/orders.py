"""In which order the axes of a kernel's results lie in memory, by what it reads: as in PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuir.ir.graph import Graph, Value
from gpuir.ir.types import TensorType, channels_last
from gpuir.ops import tensor as t


def as_operands(y: TensorType, args: Sequence[Value]) -> TensorType:
    """A result that has no order of its own as the first operand of its shape
    (aten/src/ATen/TensorIterator.cpp, reorder_dimensions). Of a loop in which none has it: one that
    joins channels as a convolution's, one that pads or resamples on its way as images do."""
    if y.order is not None:
        return y
    like = next((v.type for v in args if v.type.shape == y.shape), None)
    if like is not None:
        return y.with_order(like.order)
    parts = [v for v in args if v.type.shape[:1] + v.type.shape[2:] == y.shape[:1] + y.shape[2:]]
    images = [v for v in args if v.type.rank == y.rank and v.type.shape[:2] == y.shape[:2]]
    return convolved(y, parts) if parts else as_images(y, images)


def as_images(y: TensorType, args: Iterable[Value]) -> TensorType:
    """Channels-last where the first operand of as many axes is: windows and resampling
    (aten/src/ATen/native/cuda/DilatedMaxPool2d.cu, AveragePool2d.cu, UpSampleNearest2d.cu:
    suggest_memory_format)."""
    like = next((v.type for v in args if v.type.rank == y.rank), None)
    return y.with_order(like.order) if like is not None and like.is_channels_last else y


def convolved(y: TensorType, args: Iterable[Value]) -> TensorType:
    """Channels-last where an operand is (aten/src/ATen/native/ConvUtils.h,
    cudnn_conv_suggest_memory_format); so are parts that a compiler has side by side (torch 2.13:
    torch/_inductor/ir.py, ConcatKernel.create)."""
    last = any(v.type.is_channels_last and v.type.rank == y.rank for v in args)
    return y.with_order(channels_last(y.rank)) if last else y


def copied(y: TensorType, args: Sequence[Value], body: Graph) -> TensorType:
    """Tensors joined lie as all of them do (aten/src/ATen/native/TensorShape.cpp,
    cat_compute_output_memory_format), what is padded as it did (PadNd.cpp); all else that moves is
    row-major."""
    match body.nodes[-1].op if body.nodes else None:
        case t.Concat() if all(v.type.is_channels_last for v in args):
            return as_images(y, args)
        case t.Pad():
            return as_images(y, args)
        case _:
            return y
