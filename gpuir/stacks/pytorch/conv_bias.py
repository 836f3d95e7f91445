"""The bias of a convolution, as PyTorch adds it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from gpuir.ir.build import begin
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.phases import beside
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass
from gpuir.stacks.pytorch.conv_kernels import is_own
from gpuir.targets.target import Target


@dataclass(frozen=True)
class ConvBias(Pass):
    """Puts the addition of a convolution's bias at a location of its own (`conv2d.bias`): where
    cuDNN convolves, PyTorch adds it in place afterwards, by a pointwise kernel. Its own kernels of
    depthwise convolutions add it themselves, as oneDNN does on a CPU (`cpu`); which run is taken as
    of row-major images. (aten/src/ATen/native/Convolution.cpp, _convolution: Cudnn,
    CudaDepthwise2d, Mkldnn.)"""

    cpu: bool = False

    name = "conv_bias"
    takes = gives = Level.graph

    def on(self, target: Target) -> Self:
        return replace(self, cpu=target.is_cpu)

    def run(self, g: Graph) -> Graph:
        if self.cpu:
            return g
        made: dict[Value, Node] = {}
        b = begin(g, g.level)
        b.reserve(v.name for n in g.nodes for v in n.results)
        for node in g.nodes:
            if is_bias(node, made):
                node = replace(node, locs=beside(node.locs, "bias"))
            made.update(dict.fromkeys(node.results, node))
            b.put(node)
        return b.finish(g.outputs, g.over)


def is_bias(node: Node, made: dict[Value, Node]) -> bool:
    """Whether a node adds the bias of a convolution of its own model node that cuDNN does."""
    match node.op:
        case t.Map("add", args):
            makers = (made[v] for v in args if v in made)
            return any(n.locs == node.locs and is_cudnn(n) for n in makers)
        case _:
            return False


def is_cudnn(node: Node) -> bool:
    match node.op:
        case t.Conv(x, w) as op:
            return not is_own(x.type, w.type, op.groups, op.strides, op.dilations)
        case _:
            return isinstance(node.op, t.ConvTranspose)
