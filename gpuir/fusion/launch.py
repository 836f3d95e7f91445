"""What a launch is: a body put together from nodes, and taken apart into what comes before and
after its contraction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from gpuir.ir.build import NameTable
from gpuir.ir.graph import Graph, Node, Op, Value, region
from gpuir.ir.types import DType
from gpuir.ops import tensor as t


def fused(nodes: Iterable[Node], results: Iterable[Value]) -> Node:
    """Nodes as one launch, what comes twice among them (a constant) once, in the model's order but
    for what is generated, which comes first. What a library's call reads lies in memory: a constant
    too is an argument then. A library's routine, and an operator of which nothing else is known,
    write all their results, read or not, but for random numbers, which each launch that reads them
    may draw. The launch is named after what it is for before what is generated."""
    nodes = tuple(dict.fromkeys(nodes))
    calls = (n for n in nodes if isinstance(n.op, t.Call | t.Opaque) and n.op.operands)
    written = (v for n in calls for v in n.results)
    results = tuple(dict.fromkeys((*results, *written)))
    read = {v for n in nodes if is_call(n.op) for v in n.op.operands}
    computed = [n for n in nodes if not isinstance(n.op, t.Generating)]
    generated = [n for n in nodes if isinstance(n.op, t.Generating) and read.isdisjoint(n.results)]
    nodes = (*generated, *computed)
    args = tuple(reads(nodes))
    locs = tuple(dict.fromkeys(loc for n in (*computed, *generated) for loc in n.locs))
    return Node(t.Fused(args, region(args, nodes, results)), results, locs)


def is_call(op: Op) -> bool:
    """Whether an op reads its operands from memory, whatever makes them: a product, or an operator
    of which nothing else is known."""
    return op.contraction or isinstance(op, t.Opaque)


def inner(node: Node) -> tuple[Node, ...]:
    """What a launch computes, of its own arguments."""
    if not isinstance(node.op, t.Fused):
        return ()
    body = node.op.body
    if node.op.args == body.inputs:
        return body.nodes
    args = dict(zip(body.inputs, node.op.args, strict=True))
    return tuple(replace(n, op=n.op.substitute(args)) for n in body.nodes)


def together(launches: Iterable[Node], results: Iterable[Value]) -> Node:
    """Launches as one."""
    return fused((n for launch in launches for n in inner(launch)), results)


def needed(
    nodes: Sequence[Node], wanted: Iterable[Value], given: AbstractSet[Value] = frozenset()
) -> tuple[Node, ...]:
    """The nodes that `wanted` is computed by from what is `given`, in order."""
    live = {*wanted} - given
    found: list[Node] = []
    for node in reversed(nodes):
        if not live.isdisjoint(node.results):
            found.append(node)
            live |= {*node.op.operands} - given
    return tuple(reversed(found))


def reads(nodes: Sequence[Node]) -> list[Value]:
    """What nodes read and do not make themselves, in order."""
    made = {v for n in nodes for v in n.results}
    return list(dict.fromkeys(v for n in nodes for v in n.op.operands if v not in made))


def inlined(op: t.Fused, value: Value, layout: Op) -> t.Fused:
    """A launch that has the layout ops by which one of its arguments is made as its first nodes."""
    assert isinstance(layout, t.Fused)
    (x,), made = layout.args, layout.body
    at = op.args.index(value)
    here = dict(zip(op.args, op.body.inputs, strict=True))
    source = here.get(x) or Value(_unused(x.name, op.body), x.type)
    new = {made.inputs[0]: source, made.outputs[0]: op.body.inputs[at]}
    taken = NameTable({*names_of(op.body), source.name})
    nodes: list[Node] = []
    for node in made.nodes:
        for v in node.results:
            new.setdefault(v, Value(taken.fresh(v.name), v.type))
        results = tuple(new[v] for v in node.results)
        nodes.append(replace(node, op=node.op.substitute(new), results=results))
    args = dict((x, source) if v == value else (v, i) for v, i in here.items())
    body = replace(op.body, inputs=tuple(args.values()), nodes=(*nodes, *op.body.nodes))
    return t.Fused(tuple(args), body)


def names_of(body: Graph) -> set[str]:
    return {v.name for v in body.inputs} | {v.name for n in body.nodes for v in n.results}


def _unused(name: str, body: Graph) -> str:
    taken = names_of(body)
    while name in taken:
        name += "."
    return name


# ---------------------------------------------------------------------------- around a product


def product(body: Graph) -> Node:
    """The contraction that a launch is built around."""
    return next(n for n in body.nodes if n.op.contraction)


def accumulated(op: t.Fused, acc: DType) -> tuple[tuple[Value, ...], Graph]:
    """A launch as its product's kernel has it: the arguments, factors first and a packed weight in
    place of the one it becomes, then what the epilogue reads; and the body, summed in `acc`."""
    body, anchor = op.body, product(op.body)
    before = needed(body.nodes, anchor.op.operands)
    others = [n for n in body.nodes if n is not anchor and n not in before]
    rest = needed(others, body.outputs, {*anchor.results, *(v for n in before for v in n.results)})
    result = anchor.results[0]
    if isinstance(anchor.op, t.Attention) and {*anchor.results[1:]}.isdisjoint(body.outputs):
        anchor = replace(anchor, op=replace(anchor.op, stats=False), results=(result,))
    if result.type.dtype != acc:
        total = Value(_unused(f"{result.name}.acc", body), result.type.with_dtype(acc))
        rest = (Node(t.Cast(total, result.type.dtype), (result,), anchor.locs), *rest)
        assert isinstance(anchor.op, t.Matmul | t.Conv | t.ConvTranspose | t.ConvWeightGradient)
        anchor = replace(anchor, op=replace(anchor.op, dtype=acc), results=(total,))
    outer = dict(zip(body.inputs, op.args, strict=True))
    factors = (
        v if v in outer else largest_first(needed(before, (v,)))[0] for v in anchor.op.operands
    )
    read = dict.fromkeys((*factors, *reads(rest), *largest_first(before)))
    inputs = tuple(v for v in read if v in outer)
    nodes = (*before, anchor, *rest)
    args = tuple(outer[v] for v in inputs)
    return args, region(inputs, nodes, body.outputs)


# ---------------------------------------------------------------------------- weights


def weights(op: Op) -> tuple[Value, ...]:
    """The operands of a contraction that may be unpacked on their way into the tile."""
    if not isinstance(op, t.TensorOp) or not op.weight:
        return ()
    found = getattr(op, op.weight)
    return (found,) if isinstance(found, Value) else found


def unpacks_own(product: Node, maker: Callable[[Value], Node | None]) -> bool:
    """Whether the model node of a product makes its weight, from numbers stored otherwise: the
    product is an operator whose kernel unpacks them. `maker` finds the node that makes a value."""
    ahead = [maker(w) for w in weights(product.op)]
    while ahead:
        node = ahead.pop()
        if node is None or node.locs != product.locs:
            continue
        if isinstance(node.op, t.Pointwise):
            return True
        ahead += map(maker, node.op.operands)
    return False


def known(nodes: Iterable[Node], params: Iterable[Value]) -> set[Value]:
    """Weights, and what is computed from them alone."""
    found = {*params}
    for node in nodes:
        if not node.op.control and found.issuperset(node.op.operands):
            found.update(node.results)
    return found


def largest_first(nodes: Sequence[Node]) -> list[Value]:
    """What a prologue reads, the packed weight first: the largest."""
    return sorted(reads(nodes), key=lambda v: -v.type.size)


def is_unpacking(
    nodes: Sequence[Node], weight: Value, params: AbstractSet[Value], known: AbstractSet[Value]
) -> bool:
    """Whether nodes do to a weight what the kernel of a product does on its way into the tile: they
    compute it cell by cell, from what weights alone decide, and what they start from is stored in
    no more bits a number. What was rounded for the product, or comes from another launch, lies in
    memory instead."""
    if not all(isinstance(n.op, t.Pointwise | t.Layout | t.Generating) for n in nodes):
        return False
    if not any(isinstance(n.op, t.Pointwise) for n in nodes):
        return False  # read by its strides
    read = largest_first(nodes)
    if not read or read[0] not in params or not known >= {*read}:
        return False
    return read[0].type.dtype.bits <= weight.type.dtype.bits
