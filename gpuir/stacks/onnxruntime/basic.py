"""What onnxruntime's optimisers of the level `basic` rewrite that no other pass does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuir.fusion.flow import Flow
from gpuir.ir.build import Builder, prune, rewrite
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.types import TensorType, i64
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass


@dataclass(frozen=True)
class Basic(Pass):
    """Lets a convolution pad its image itself where a node before it adds zeros (PadFusion), drops
    a Relu before a QuantizeLinear that cuts off at zero anyhow (ReluQuantFusion), and makes one
    transpose of four slices that are put side by side, each every other cell of an image, with a
    gather where they come in another order (SliceConcatToSpaceToDepthFusion). What is dropped has
    no other readers. (onnxruntime 1.32, core/optimizer/pad_fusion.cc,
    qdq_transformer/relu_quantizelinear.cc, slice_concat_to_space_to_depth_fusion.cc.)"""

    name = "basic"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        return prune(self.rewritten(g))

    def rewritten(self, g: Graph) -> Graph:
        nodes = (
            replace(n, op=n.op.with_regions(self.rewritten)) if n.op.control else n for n in g.nodes
        )
        g = replace(g, nodes=tuple(nodes))
        flow = Flow(g)

        def rule(n: Node, b: Builder) -> tuple[Value, ...] | None:
            match n.op:
                case t.Conv():
                    return padded(n.op, n, flow, b)
                case t.Concat(parts, 1):
                    return space_to_depth(parts, n, flow, b)
                case t.Map("div", (x, *_)) if (y := before_relu(x, n, flow)) is not None:
                    return b.add(replace(n.op, args=(y, *n.op.args[1:])))
                case _:
                    return None

        return rewrite(g, rule)


def lone(v: Value, flow: Flow) -> Node | None:
    """The node that makes a value for one reader; None where others read it or nothing makes it."""
    shared = len(flow.readers.get(v, ())) > 1 or v in flow.outputs
    return None if shared else flow.maker(v)


def padded(op: t.Conv, n: Node, flow: Flow, b: Builder) -> tuple[Value, ...] | None:
    """conv(pad(x))  →  conv(x), with those pads added to its own"""
    pad = lone(op.x, flow)
    if pad is None or not isinstance(pad.op, t.Pad) or pad.op.mode != "constant":
        return None
    low, high = pad.op.low, pad.op.high
    if pad.op.value is not None or any((*low[:2], *high[:2])) or min(*low, *high) < 0:
        return None
    own = ((low[2:], op.low), (high[2:], op.high))
    low, high = (tuple(p + q for p, q in zip(*side, strict=True)) for side in own)
    b.locs = (*pad.locs, *n.locs)
    return b.add(replace(op, x=pad.op.x, low=low, high=high))


def before_relu(x: Value, div: Node, flow: Flow) -> Value | None:
    """What a Relu is of, if a QuantizeLinear that begins with `div` gives its least number for all
    that the Relu makes zero: that number is its zero point."""
    relu = lone(x, flow)
    if relu is None or not isinstance(relu.op, t.Map) or relu.op.fn != "relu":
        return None
    zero: float = 0
    node: Node | None = div
    while node is not None and node.locs == div.locs:
        match node.op:
            case t.Map("add", (_,), (number,)):
                zero = number
            case t.Map("clip", _, (least, _)):
                return relu.op.args[0] if least == zero else None
            case t.Map("div" | "round") | t.Cast():
                pass
            case _:
                return None
        readers = flow.read_by(node.results[0])
        node = readers[0] if len(readers) == 1 else None
    return None


CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))  # as SpaceToDepth has them


def space_to_depth(
    parts: tuple[Value, ...], n: Node, flow: Flow, b: Builder
) -> tuple[Value, ...] | None:
    """concat(x[.., i::2, j::2] for each corner i, j)  →  x as blocks of two by two, transposed"""
    slices = [s for v in parts if (s := lone(v, flow)) and isinstance(s.op, t.Slice)]
    corners = [s.op.starts[2:] for s in slices if isinstance(s.op, t.Slice)]
    x = slices[0].op.operands[0] if slices else None
    if x is None or x.type.rank != 4 or len(parts) != 4 or sorted(corners) != list(CORNERS):
        return None
    images, channels, height, width = x.type.shape
    half = (images, channels, height // 2, width // 2)
    if half != slices[0].results[0].type.shape or (height % 2, width % 2) != (0, 0):
        return None
    for s in slices:
        assert isinstance(s.op, t.Slice)
        if s.op.x != x or s.op.steps != (1, 1, 2, 2) or s.op.sizes != half:
            return None
    b.locs = (*(loc for s in slices for loc in s.locs), *n.locs)
    y = b(t.Reshape(x, (images, channels, height // 2, 2, width // 2, 2)))
    y = b(t.Reshape(b(t.Transpose(y, (0, 3, 5, 1, 2, 4))), n.results[0].type.shape))
    if tuple(corners) == CORNERS:
        return (y,)
    order = [CORNERS.index(corner) * channels + c for corner in corners for c in range(channels)]
    indices = b(t.Constant(TensorType((len(order),), i64), tuple(order)))
    return (b(t.Gather(y, indices, 1)),)
