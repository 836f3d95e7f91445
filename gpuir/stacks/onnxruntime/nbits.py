"""Products with weights of few bits, which onnxruntime unpacks in the kernel of the product."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from gpuir.fusion.flow import Flow
from gpuir.ir.graph import Graph, Level, Loc, Node, Value
from gpuir.ir.types import f16, f32
from gpuir.ops import tensor as t
from gpuir.passes.chains import is_bias, is_row
from gpuir.passes.manager import Pass

Locs = tuple[Loc, ...]

BITS = (2, 4, 8)  # of a weight
SMALLEST_BLOCK = 16
SIXTEEN = re.compile(r" [iu]16\b")  # of an origin: a dtype
AROUND = (t.Generating, t.Reshape)  # what a converter adds that is no part of the operator


@dataclass(frozen=True)
class Nbits(Pass):
    """Makes one model node of a DequantizeLinear and of the MatMul or Gemm whose weight it unpacks,
    together with the bias that is added: onnxruntime replaces them by a MatMulNBits when it loads
    a model (core/optimizer/qdq_transformer/selectors_actions/qdq_selectors.cc,
    DQMatMulNodeGroupSelector; version 1.32, whose optimised files agree).

    The weight is a matrix of integers of 2, 4 or 8 bits with a scale in f32 or f16: one for each
    block of rows (a power of two, 16 or more), for each column, or in all. Weight, scale and zero
    point are constants, and no other node reads the first two; the product alone reads the result.
    What is multiplied, or becomes of the result, is not quantised to less than 16 bits. A Gemm is a
    product and a row that is added: no factors, nothing transposed. A Relu or Clip that alone reads
    the result, and is read once itself, keeps the nodes apart.
    """

    name = "nbits"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        return joined(g, dict(g.origins))


def joined(g: Graph, origins: dict[Loc, str]) -> Graph:
    """The graph with such nodes as one; `origins` then says what they are."""

    def region(inner: Graph) -> Graph:
        return joined(inner, origins)

    nodes = (replace(n, op=n.op.with_regions(region)) if n.op.control else n for n in g.nodes)
    g = replace(g, nodes=tuple(nodes))
    one: dict[Locs, Locs] = {}
    for product, parts in _Finder(g, origins).found():
        dtypes = f"{product.op.operands[0].type.dtype} u8 {product.results[0].type.dtype}"
        whole = tuple(loc for part in parts for loc in part)
        one.update(dict.fromkeys(parts, whole))
        origins.update(dict.fromkeys(whole, f"{OPERATOR}@1 {dtypes}"))
    nodes = (replace(n, locs=one[n.locs]) if n.locs in one else n for n in g.nodes)
    named = tuple((loc, origins[loc]) for loc, _ in g.origins)
    return replace(g, nodes=tuple(nodes), origins=named) if one or named != g.origins else g


OPERATOR = "com.microsoft::MatMulNBits"


@dataclass
class _Finder:
    g: Graph
    origins: dict[Loc, str]
    flow: Flow = field(init=False)
    nodes: dict[Locs, list[Node]] = field(default_factory=dict[Locs, list[Node]], init=False)

    def __post_init__(self) -> None:
        self.flow = Flow(self.g)
        for n in self.g.nodes:
            self.nodes.setdefault(n.locs, []).append(n)

    def found(self) -> Iterator[tuple[Node, tuple[Locs, ...]]]:
        """The products that unpack their weight, each with the model nodes that it becomes one of,
        its own first."""
        for n in self.g.nodes:
            if isinstance(n.op, t.Matmul) and (parts := self.parts(n, n.op)):
                yield n, parts

    def parts(self, product: Node, op: t.Matmul) -> tuple[Locs, ...]:
        maker = self.flow.maker(op.b)
        if self.operator(product) not in ("MatMul", "Gemm") or maker is None:
            return ()
        if self.operator(maker) != "DequantizeLinear" or not self.is_of_blocks(maker, op):
            return ()
        left = self.flow.maker(op.a)
        if left is not None and self.keeps_apart(left, "DequantizeLinear"):
            return ()
        is_gemm = self.operator(product) == "Gemm"
        (y,) = product.results
        others = [n for n in self.nodes[product.locs] if not isinstance(n.op, AROUND)]
        others.remove(product)
        if is_gemm and len(others) == 1 and adds(others[0], y, is_row):
            (y,) = others.pop().results
        if others:
            return ()
        parts = (product.locs, maker.locs)
        y = self.leaving(y, product.locs)
        added = None if is_gemm or y in self.flow.outputs else self.lone_reader(y)
        if added is not None and adds(added, y, is_bias):
            if not adds(added, y, is_row):
                return ()  # by then MatMulAddFusion has made a Gemm of both, with another bias
            parts = (*parts, added.locs)
            (y,) = added.results
            if y.type.rank > 2:
                return parts  # of rows, and what reads the result reads it through a reshape
        return () if self.is_kept_apart(y) else parts

    # -- the weight

    def is_of_blocks(self, last: Node, product: t.Matmul) -> bool:
        """Whether the DequantizeLinear that ends in this node unpacks the weight of the product,
        for it alone, from what MatMulNBits takes."""
        w, nodes = product.b, self.nodes[last.locs]
        inside = {id(n) for n in nodes}
        made = {v for n in nodes for v in n.results}
        for v in made:
            outside = [n for n in self.flow.read_by(v) if id(n) not in inside]
            if v in self.flow.outputs or len(outside) != (v == w):
                return False
        if w.type.rank != 2 or w.type.dtype not in (f32, f16):
            return False
        read = {v for n in nodes for v in n.op.operands} - made
        params = set(self.g.params)
        stored = [n.op.x for n in nodes if isinstance(n.op, t.Cast) and n.op.x in params]
        packed = max(stored, key=lambda v: v.type.size, default=None)
        if packed is None or not read <= self.flow.known or self.is_shared(packed):
            return False
        if not packed.type.dtype.is_integer or packed.type.dtype.bits not in BITS:
            return False
        scale = next((n.op for n in nodes if isinstance(n.op, t.Map) and n.op.fn == "mul"), None)
        return scale is not None and self.takes_scale(scale, packed, nodes)

    def is_shared(self, v: Value) -> bool:
        return len(self.flow.read_by(v)) > 1

    def takes_scale(self, op: t.Map, packed: Value, nodes: Sequence[Node]) -> bool:
        """Whether there is one scale in all, one for each column, or one for each block of rows."""
        if op.imm:
            return True
        scale, block = op.args[-1], packed.type.shape[1:2]
        for n in nodes:  # blocks that do not divide the rows: scales are spread, and cut to them
            if isinstance(n.op, t.Broadcast) and scale in self.made_of(n, nodes):
                scale, block = n.op.x, n.op.shape[1:2]
        columns = nodes[-1].results[0].type.shape[1]
        if self.is_shared(scale):
            return False
        if scale.type.shape == (columns,):
            return True
        if scale.type.rank != 3 or scale.type.shape[1:] != (1, columns):
            return False
        (size,) = block
        return size >= SMALLEST_BLOCK and size & (size - 1) == 0

    def made_of(self, first: Node, nodes: Sequence[Node]) -> set[Value]:
        """What layout ops among these nodes make of a node's result."""
        made = set(first.results)
        for n in nodes:
            if isinstance(n.op, t.Layout) and not made.isdisjoint(n.op.operands):
                made.update(n.results)
        return made

    # -- around the product

    def keeps_apart(self, node: Node, operator: str) -> bool:
        """Whether a node quantises, or dequantises, what is multiplied or comes of it. In 16 bits
        that does not count, as the optimised files of version 1.32 show."""
        return self.operator(node) == operator and not SIXTEEN.search(self.origins[node.locs[0]])

    def operator(self, node: Node) -> str:
        """The model's operator that a node is of, without domain and version."""
        origin = self.origins.get(node.locs[0], "") if len(node.locs) == 1 else ""
        return origin.partition("@")[0].rpartition(":")[2]

    def leaving(self, y: Value, locs: Locs) -> Value:
        """A result as it leaves its model node: a vector's product is reshaped."""
        readers = self.flow.read_by(y)
        while len(readers) == 1 and readers[0].locs == locs and y not in self.flow.outputs:
            (y,) = readers[0].results
            readers = self.flow.read_by(y)
        return y

    def lone_reader(self, y: Value) -> Node | None:
        """The one node of another model node that reads a value, if it is all of that node."""
        readers = self.flow.read_by(y)
        if len(readers) != 1:
            return None
        own = [n for n in self.nodes[readers[0].locs] if not isinstance(n.op, AROUND)]
        return readers[0] if own == readers else None

    def is_kept_apart(self, y: Value) -> bool:
        """Whether what reads the product's result keeps onnxruntime from replacing it."""
        if any(self.keeps_apart(n, "QuantizeLinear") for n in self.flow.read_by(y)):
            return True
        clip = self.lone_reader(y)
        if clip is None or self.operator(clip) not in ("Relu", "Clip"):
            return False
        (z,) = clip.results
        after = None if z in self.flow.outputs else self.lone_reader(z)
        if after is not None and (self.operator(clip), self.operator(after)) == ("Relu", "Clip"):
            (z,) = after.results  # FuseReluClip has made one node of both by then
        return z not in self.flow.outputs and len({n.locs for n in self.flow.read_by(z)}) == 1


def adds(node: Node, y: Value, fits: Callable[[tuple[Value, ...], Value], bool]) -> bool:
    """Whether a node adds to y what `fits`."""
    match node.op:
        case t.Map("add", args):
            return y in args and fits(tuple(v for v in args if v != y), node.results[0])
        case _:
            return False
