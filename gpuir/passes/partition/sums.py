"""Gradients of weights over the microbatches of a step: what each part adds up, and what is done
once with the sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from gpuir.ir.build import Builder
from gpuir.ir.graph import Graph, Level, Node, Op, Value
from gpuir.ir.phases import phase_of
from gpuir.ops import tensor as t
from gpuir.passes.partition.homes import Homes


@dataclass(frozen=True)
class Term:
    """What one part owns of a gradient: made by its backward pass, where it may have been `called`
    otherwise, with these nodes behind it."""

    part: int
    called: Value | None = None
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Sum:
    """The gradient of a weight: what each part in `terms` makes of a microbatch, called `own` in
    all of them. What follows is done once a step: the collectives `sent`, of ranks that have the
    same weight, with the last microbatch, and behind it the nodes `once`. The last of all gives the
    gradient itself. `parts` have the weight: where there are several they add up what they have
    `sent`, as Megatron-LM does for the embedding and the head that share a table."""

    weight: Value
    own: Value
    terms: tuple[Term, ...]
    sent: tuple[Node, ...]
    once: tuple[Node, ...]
    parts: tuple[int, ...]

    @property
    def passed(self) -> Value:
        """What backward passes leave of it, the last one included."""
        return self.sent[-1].results[0] if self.sent else self.own

    @property
    def gradient(self) -> Value:
        """The gradient of a whole step."""
        return self.once[-1].results[0] if self.once else self.passed


def sums_of(homes: Homes, readers: dict[Value, set[int]]) -> tuple[list[Sum], set[Value]]:
    """The gradients of a graph's weights, and the results of backward nodes that they replace.
    `readers` are the parts that read each weight."""
    outputs = {v.name: v for v in homes.g.outputs if homes.g.role_of(v) == "gradient"}
    found: list[Sum] = []
    replaced: set[Value] = set()
    for w in homes.g.params:
        root = outputs.get(f"{w.name}.grad")
        if root is not None:
            made, gone = _sum(homes, w, root, readers[w])
            found.append(made)
            replaced |= gone
    return found, replaced


def _sum(homes: Homes, w: Value, root: Value, readers: set[int]) -> tuple[Sum, set[Value]]:
    uses, producers = homes.uses, homes.producers
    default = min(readers, default=0)
    chain: list[Node] = []  # from the gradient down
    value = root
    while (node := producers.get(value)) is not None and is_linear(node.op):
        fixed = value in homes.part or phase_of(node) == "optimizer"
        if not fixed or (value != root and len(uses[value]) > 1):
            break
        chain.append(node)
        (value,) = node.op.operands
    last = max((i for i, n in enumerate(chain) if is_once(n)), default=-1)
    once, each = chain[: last + 1], chain[last + 1 :]
    own = once[-1].op.operands[0] if once else root
    sent = tuple(takewhile(lambda n: isinstance(n.op, t.Collective), reversed(once)))
    last = tuple(reversed(once))[len(sent) :]
    adds: list[Node] = []
    by_part: dict[int, list[Value]] = {}
    for term in _terms(homes, value, adds):
        by_part.setdefault(homes.part.get(term, default), []).append(term)
    if len(by_part) == 1:
        part = homes.part.get(own, default)
        gone = {v for n in once for v in n.results}
        parts = tuple(sorted({*readers, part}))
        return Sum(w, own, (Term(part),), sent=sent, once=last, parts=parts), gone
    terms = (
        _term(homes.g, p, some, adds=adds, each=each, own=own)
        for p, some in sorted(by_part.items())
    )
    gone = {v for n in (*chain, *adds) for v in n.results}
    parts = tuple(sorted(readers | set(by_part)))
    return Sum(w, own, tuple(terms), sent=sent, once=last, parts=parts), gone


def is_once(node: Node) -> bool:
    """Whether a node on a gradient's way to the optimiser may wait for the last microbatch."""
    return isinstance(node.op, t.Collective) or phase_of(node) == "optimizer"


def is_linear(op: Op) -> bool:
    """Whether an op of one operand gives of a sum the sum of what it gives of the terms."""
    match op:
        case t.Collective():
            return op.fn in ("all_reduce", "reduce_scatter", "all_gather") and op.combine == "add"
        case t.Map("identity", (_,)) | t.Map("mul", (_,), (_,)):
            return True
        case t.Cast(x):
            return x.type.dtype.is_float and op.dtype.is_float
        case _:
            return isinstance(op, t.Reshape | t.Transpose | t.Shard)


def _terms(homes: Homes, value: Value, adds: list[Node]) -> Iterator[Value]:
    """What a gradient is the sum of, as far as the terms are of several parts; the nodes that add
    them go to `adds`."""
    node = homes.producers.get(value)
    match node and node.op:
        case t.Map("add", (a, b), ()) if (
            node is not None
            and value in homes.part
            and phase_of(node) is not None
            and a.type == b.type == value.type
            and len(_homes_below(homes, value)) > 1
        ):
            adds.append(node)
            yield from _terms(homes, a, adds)
            yield from _terms(homes, b, adds)
        case _:
            yield value


def _homes_below(homes: Homes, value: Value) -> set[int]:
    """The parts of the terms of a sum, each of which nobody else reads."""
    node = homes.producers.get(value)
    match node and node.op:
        case t.Map("add", (a, b), ()) if a != b and a.type == b.type == value.type:
            if all(len(homes.uses[v]) == 1 for v in (a, b) if v in homes.part):
                return _homes_below(homes, a) | _homes_below(homes, b)
            return {homes.part.get(value, 0)}
        case _:
            return {homes.part.get(value, 0)}


def _term(
    g: Graph,
    part: int,
    some: Sequence[Value],
    *,
    adds: Sequence[Node],
    each: Sequence[Node],
    own: Value,
) -> Term:
    """What a part owns: its terms added up, and of the sum what `each`, from the last to the first,
    makes of it."""
    b = Builder(Level.graph, g.name)
    b.reserve(v.name for n in g.nodes for v in n.results)
    b.locs = adds[-1].locs
    total = some[0]
    for term in some[1:]:
        total = b(t.Map("add", (total, term)), total.name)
    for node in reversed(each):
        b.locs = node.locs
        (before,) = node.op.operands
        total = b(node.op.substitute({before: total}), node.results[0].name)
    if not b.nodes:
        return Term(part, called=total)
    b.rename(0, {total: own})
    return Term(part, nodes=tuple(b.nodes))
