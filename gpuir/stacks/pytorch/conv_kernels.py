"""Whose kernels convolutions are under PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from gpuir.ir.build import begin, within
from gpuir.ir.graph import Graph, Level, Node, Op
from gpuir.ir.phases import phase_of
from gpuir.ir.types import TensorType, f16
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass
from gpuir.targets.target import Target


@dataclass(frozen=True)
class ConvKernels(Pass):
    """Says of each convolution whether it is cuDNN's or, depthwise, one of ATen's own, which take
    row-major images (cuda/DepthwiseConv2d.cu). The gradients of one are the same library's. On
    AMD's GPUs MIOpen has all (`own` false)."""

    own: bool = True

    name = "conv_kernels"
    takes = gives = Level.kernel

    def on(self, target: Target) -> Self:
        return replace(self, own=target.vendor == "NVIDIA")

    def run(self, g: Graph) -> Graph:
        b = begin(g, Level.kernel)
        for node in g.nodes:
            op: Op = node.op
            match op:
                case k.Conv():
                    own = self.own and is_atens(op, node)
                    op = replace(op, library="aten" if own else "cudnn")
                case _ if op.control:
                    op = within(op, self.run, b.folded)
                case _:
                    pass
            b.put(replace(node, op=op))
        return b.finish(g.outputs)


def is_atens(op: k.Conv, node: Node) -> bool:
    """Whether a convolution, or that of which it is the gradient, is one of ATen's."""
    conv = op.product
    images, weights = (v.type for v in op.factors)
    if images.is_channels_last or weights.is_channels_last:
        return False
    (result,) = conv.result_types
    match conv:
        case t.ConvWeightGradient():
            weights = result
        case t.ConvTranspose():
            if phase_of(node) != "backward":
                return False
            images = result.with_dtype(images.dtype)
        case _:
            pass
    return is_own(images, weights, conv.groups, conv.strides, conv.dilations)


def is_own(
    images: TensorType,
    weights: TensorType,
    groups: int,
    strides: Sequence[int],
    dilations: Sequence[int],
) -> bool:
    """Whether a convolution of row-major images is depthwise and not cuDNN's (aten/src/ATen/native/
    Convolution.cpp, use_cudnn_depthwise, for cuDNN from 8.2 on)."""
    batch, channels, *cells = images.shape
    if groups == 1 or groups != channels or len(cells) != 2:
        return False
    height, width = weights.shape[2:]
    plain = len({*strides}) == 1 and {*dilations} == {1} and height == width
    if images.dtype != f16 or not plain or channels < 32:
        return True
    return not is_cudnns(batch, channels, cells[1], width, strides[0])


def is_cudnns(batch: int, channels: int, cells: int, window: int, stride: int) -> bool:
    """The same file, check_cudnn_depthwise_workload_with_filter: `cells` and `window` across."""
    if window not in (1, 3, 5) or cells < 7 or stride > 2:
        return False
    if stride == 1:
        return True
    if batch == 1:
        return window > 1 or cells <= 28
    if window == 1:
        return batch <= 16 and channels >= 128 and cells <= 7
    return channels >= 512 or (channels >= 256 and cells >= 28)
