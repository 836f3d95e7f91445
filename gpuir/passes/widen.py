"""What a product's own kernel can do to its operands and its result on their way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuir.fusion.launch import fused, inner, is_unpacking, known, needed, weights
from gpuir.ir.build import begin, within
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.phases import phase_of
from gpuir.ir.strides import Strided
from gpuir.ops import tensor as t
from gpuir.ops.strides import packed, viewed
from gpuir.passes.fuse import kind_of
from gpuir.passes.manager import Pass

FREE = (t.Generating, t.Layout)  # what several launches may do


@dataclass(frozen=True)
class Widen(Pass):
    """Gives the launch of a product what its kernel can do besides: the dequantisation of a weight
    that it alone reads, and the pointwise ops with which all that read its result begin, as many as
    leave one tensor in memory, no larger if it is read again. What these read through reshapes and
    the like becomes views; a launch of which nothing is left is gone.

    `fuse` does so as it goes; this is for after a pass that fuses loops, as in a compiler that
    writes products itself: Inductor's templates (torch/_inductor/config.py, epilogue_fusion and
    prologue_fusion under max_autotune).
    """

    name = "widen"
    takes = gives = Level.fused

    def run(self, g: Graph) -> Graph:
        b = begin(g, Level.fused)
        g = unpacked_for_products(g)
        while (wider := after_products(g)).nodes != g.nodes:
            g = wider  # what is left of a reader may be another's to do
        for node in g.nodes:
            if node.op.control:
                node = replace(node, op=within(node.op, self.run, b.folded))
            b.put(node)
        return b.finish(g.outputs)


def is_product(node: Node) -> bool:
    """Whether a launch is a contraction, whose one result its kernel can go on with."""
    found = any(kind_of(n.op) == "contraction" for n in inner(node))
    return found and len(node.results) == 1


# ---- before


def unpacked_for_products(g: Graph) -> Graph:
    """Products, experts among them, that unpack the weights that they alone read."""
    uses, params, made = g.uses(), {*g.params}, known(g.nodes, g.params)
    makers = {
        v: n
        for n in g.nodes
        for v in n.results
        if is_simple(n) and len(uses.get(v, ())) == 1 and v not in g.outputs
    }
    gone: set[Node] = set()
    nodes: list[Node] = []
    for node in g.nodes:
        read = [w for n in inner(node) if n.op.contraction for w in weights(n.op)]
        for w in reversed(read):  # so that the first comes first
            before = leading_to(w, makers)
            ahead = tuple(n for maker in before for n in inner(maker))
            if before and is_unpacking(ahead, w, params, made):
                gone.update(before)
                node = fused((*ahead, *inner(node)), node.results)
        nodes.append(node)
    return replace(g, nodes=tuple(n for n in nodes if n not in gone))


def is_simple(node: Node) -> bool:
    """Whether a launch is pointwise ops and layout, with one result."""
    simple = all(isinstance(n.op, (t.Pointwise, *FREE)) for n in inner(node))
    return isinstance(node.op, t.Fused) and simple and len(node.results) == 1


def leading_to(v: Value, makers: Mapping[Value, Node]) -> list[Node]:
    """The launches among `makers` that a value comes from, in order."""
    if v not in makers:
        return []
    before = [n for w in makers[v].op.operands for n in leading_to(w, makers)]
    return [*dict.fromkeys(before), makers[v]]


# ---- after


def after_products(g: Graph) -> Graph:
    """Products that do what all their readers begin with, in the place of the first of these."""
    places = {v: i for i, n in enumerate(g.nodes) for v in n.results}
    launches = [[node] for node in g.nodes]
    views = {v for node in g.nodes if is_layout(node) for v in node.results}
    uses, outputs = g.uses(), {*g.outputs}
    for node in g.nodes:
        if not is_product(node) or outputs & {*node.results}:
            continue
        (v,) = node.results
        at = [places[r.results[0]] for r in uses.get(v, ())]
        if any(v in x.op.operands for i in at for x in launches[i][:-1]):
            continue  # another product reads it by now
        found = moved(node, [launches[i][-1] for i in at]) if all(launches[i] for i in at) else None
        if found is None:
            continue
        ahead, *rests = found
        ahead = [x for x in ahead if views.isdisjoint(x.results)]
        views.update(w for x in ahead if is_layout(x) for w in x.results)
        rests[0] = ahead + rests[0]
        launches[places[v]] = []
        for i, rest in zip(at, rests, strict=True):
            launches[i][-1:] = rest
    return replace(g, nodes=tuple(node for some in launches for node in some))


def is_layout(node: Node) -> bool:
    return all(isinstance(n.op, t.Layout) for n in inner(node))


def moved(product: Node, readers: Sequence[Node]) -> list[list[Node]] | None:
    """The product with all that may move to it from its readers, behind the views that it then
    reads; then what is left of each reader. None if nothing may."""
    if any(r.op.control or any(n.op.contraction for n in inner(r)) for r in readers):
        return None
    if not readers or any(phase_of(r) != phase_of(product) for r in readers):
        return None
    (v,) = product.results
    first, *others = (followers(v, inner(r)) for r in readers)
    for end in reversed(first):
        rests = [left(r, v, end) for r in readers]
        if any(rest is None for rest in rests) or not all(end in x for x in others):
            continue
        if end.type.nbytes > v.type.nbytes and any(rests):
            continue  # more would be read again than was
        after = needed(inner(readers[0]), [end], {v})
        own = [n for n in after if not isinstance(n.op, t.Layout)]
        read = {w for n in own for w in n.op.operands}
        looked_at = [n.results[0] for n in after if n not in own and n.results[0] in read]
        ahead = [fused(needed(after, [w], set()), [w]) for w in looked_at]
        both = fused((*inner(product), *own), [end])
        return [[*ahead, both], *(rest for rest in rests if rest is not None)]
    return None


def left(reader: Node, v: Value, end: Value) -> list[Node] | None:
    """The launch that is left of a reader of `v` when `end` is in memory, if any; None where it
    would read `v` too, or do again what leads to `end`."""
    nodes, kept = inner(reader), [w for w in reader.results if w != end]
    rest = needed(nodes, kept, {end})
    twice = {*rest} & {*needed(nodes, [end], {v})}
    if any(v in n.op.operands for n in rest) or not all(isinstance(n.op, FREE) for n in twice):
        return None
    return [fused(rest, kept)] if rest else []


def followers(v: Value, nodes: Sequence[Node]) -> list[Value]:
    """What pointwise ops make of `v`, cell by cell, and of what else there is for a product's
    kernel: tensors in memory, views of them that keep the order, and what pointwise ops make of
    those."""
    made = {w for n in nodes for w in n.results}
    read = {w for n in nodes for w in n.op.operands}
    lies: dict[Value, Strided] = {w: packed(w.type) for w in read - made - {v}}
    there, followed = {*lies}, {v}
    found: list[Value] = []
    for n in nodes:
        w = n.results[0]
        if not there | followed >= {*n.op.operands}:
            continue
        if isinstance(n.op, t.Layout):
            x = lies.get(n.op.operands[0])
            view = None if x is None else viewed(x, n.op)
            if view is not None and view.is_packed:
                lies[w] = view
                there.add(w)
        elif isinstance(n.op, t.Pointwise | t.Generating):
            if followed.isdisjoint(n.op.operands):
                there.add(w)
            elif w.type.shape == v.type.shape:
                followed.add(w)
                found.append(w)
    return found
