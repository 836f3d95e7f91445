"""Whose kernels convolutions are under PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuir.ir.build import begin, within
from gpuir.ir.graph import Graph, Level, Node, Op
from gpuir.ir.phases import phase_of
from gpuir.ir.types import f16
from gpuir.ops import kernel as k
from gpuir.passes.manager import Pass


@dataclass(frozen=True)
class ConvKernels(Pass):
    """Says of each convolution whether it is cuDNN's or one of ATen's own, of depthwise ones, that
    take images row-major (`use_cudnn_depthwise` in aten/src/ATen/native/Convolution.cpp, for
    cuDNN from 8.2 on; cuda/DepthwiseConv2d.cu). The gradients of one are the same library's."""

    name = "conv_kernels"
    takes = gives = Level.kernel

    def run(self, g: Graph) -> Graph:
        b = begin(g, Level.kernel)
        for node in g.nodes:
            op: Op = node.op
            match op:
                case k.Conv():
                    op = replace(op, library="aten" if is_own(op, node) else "cudnn")
                case _ if op.control:
                    op = within(op, self.run, b.folded)
                case _:
                    pass
            b.put(replace(node, op=op))
        return b.finish(g.outputs)


def is_own(op: k.Conv, node: Node) -> bool:
    """Whether a convolution, or that of which it is the gradient, is one of ATen's."""
    images, weights = op.x.type, op.w.type
    if op.window:
        weights = op.accumulator()
    elif op.transposed and phase_of(node) == "backward":
        images = op.accumulator()
    elif op.transposed:
        return False
    batch, channels, *cells = images.shape
    if op.groups == 1 or op.groups != channels or len(cells) != 2:
        return False
    if op.x.type.is_channels_last or op.w.type.is_channels_last:
        return False
    _, width = cells
    filter, stride = weights.shape[-1], op.strides[-1]
    if op.x.type.dtype != f16 or len({*op.strides}) > 1 or {*op.dilations} != {1} or channels < 32:
        return True
    if weights.shape[-2] != filter or filter not in (1, 3, 5) or width < 7:
        return True
    if stride == 1:
        return False
    if stride != 2 or batch == 1:
        return stride != 2 or (filter == 1 and width > 28)
    if filter == 1:
        return not (batch <= 16 and channels >= 128 and width <= 7)
    return not (channels >= 512 or (channels >= 256 and width >= 28))
