"""Which ops a software stack runs as one: those of a model node, and chains of them that it has a
fused kernel for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpuir.fusion.flow import Flow
from gpuir.fusion.launch import unpacks_own
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.graph import Node, Op, Value
from gpuir.ops import tensor as t
from gpuir.ops.scalar import SCALARS

Others = tuple[Value, ...]  # the operands that are not the chain's own
_SILENT = (t.Constant, t.Reshape, t.Broadcast, t.Cast)  # no part of a unit's name


def units(flow: Flow, chains: Sequence[tuple[str, ...]]) -> list[int]:
    """A number for each node of a graph, the same for those that one kernel of the stack runs.

    The ops of one model node are a unit. A chain like `conv>add:same>relu` makes one of several,
    each of which reads the last one, and that one alone does. A unit of several ops is called by
    all, but for those on weights: `mul+add`; as the first of a chain `conv*` is any that begins
    with a conv. Behind a colon is what the op's other operands must be (`CONDITIONS`). Rules apply
    one after the other, and again to what they made.
    """
    return _Units(flow).joined([steps(chain) for chain in chains])


def word(op: Op) -> str:
    """What a chain calls an op: the function of a map, else the op's own name: `add`, `conv`."""
    match op:
        case t.Map(fn):
            return fn
        case t.Normalize(x, axes, groups=None, center=True) if axes == (x.type.rank - 1,):
            return "layer_norm"
        case _:
            return op.name.removeprefix("t.")


# What `word` may say: a map is called by its function.
WORDS = ({name.removeprefix("t.") for name in t.OPS} | {*SCALARS, "layer_norm"}) - {"map"}


# ---------------------------------------------------------------------------- conditions


def is_row(others: Others, result: Value) -> bool:
    if not others:  # a number in the op itself
        return result.type.shape[-1:] == (1,)
    return [v.type.shape for v in others] == [result.type.shape[-1:]]


def is_bias(others: Others, result: Value) -> bool:
    both = result.type.rank == 2 and all(v.type.rank == 2 for v in others)
    return is_row(others, result) or (both and len(others) == 1)


def is_by_channel(others: Others, result: Value) -> bool:
    if len(others) != 1 or result.type.rank < 2:
        return False
    shape = (1,) * (result.type.rank - others[0].type.rank) + others[0].type.shape
    return shape == (1, result.type.shape[1], *(1,) * (result.type.rank - 2))


def is_key_mask(others: Others, result: Value) -> bool:
    if len(others) != 1 or not result.type.rank or others[0].type.rank > result.type.rank:
        return False
    *outer, keys = others[0].type.shape or (0,)
    whole = 0
    if others[0].type.rank == result.type.rank:
        while whole < len(outer) and outer[whole] == result.type.shape[whole]:
            whole += 1
    return keys == result.type.shape[-1] and all(n == 1 for n in outer[whole:])


CONDITIONS: dict[str, tuple[str, Callable[[Others, Value], bool]]] = {
    "same": (
        "has the shape of the result",
        lambda o, y: [v.type.shape for v in o] == [y.type.shape],
    ),
    "row": ("is one row, along the last axis", is_row),
    "bias": ("is one row, or a matrix of the shape of the result", is_bias),
    "channels": ("has one number for each index of axis 1", is_by_channel),
    "keys": (
        "has size 1 on all axes before the last, except leading axes of the size of the result",
        is_key_mask,
    ),
    "matrix": ("has two axes", lambda o, _: [v.type.rank for v in o[-1:]] == [2]),
    "32bit": ("belongs to a result with at most 32 bits", lambda _, y: y.type.dtype.bits <= 32),
    "3d": ("belongs to a result with three axes", lambda _, y: y.type.rank == 3),
}
OF_NODE = {
    "weight": "is computed from weights alone",
    "number": "is a number that is known at load time",
    "second": "is the second one",
    "stored": "is in memory: the op's own model node does not unpack it",
}

Step = tuple[str, tuple[str, ...]]


def steps(chain: tuple[str, ...]) -> tuple[Step, ...]:
    """A chain's ops, each with its conditions. UsageError for an op or a condition that there is
    not."""
    known = (*CONDITIONS, *OF_NODE)
    found: list[Step] = []
    for i, text in enumerate(chain):
        name, *conditions = text.split(":")
        for op in (name if i else name.removesuffix("*")).split("+"):
            if op not in WORDS:
                raise UsageError(
                    f"pass 'fuse': {'>'.join(chain)}: no op has the name {op!r}",
                    expected="ops, for example conv*>mul+add:weight>relu",
                    fix=nearest(op, WORDS),
                )
        for c in conditions:
            if c not in known:
                raise UsageError(
                    f"pass 'fuse': {text}: no operand condition has the name {c}",
                    expected=", ".join(known),
                    fix=nearest(c, known),
                )
        found.append((name, tuple(conditions)))
    return tuple(found)


# ---------------------------------------------------------------------------- matching


class _Units:
    def __init__(self, flow: Flow):
        self.nodes, self.outputs, self.maker = flow.graph.nodes, flow.outputs, flow.maker
        self.readers, self.known = flow.readers, flow.known
        first: dict[tuple[str, ...], int] = {}
        self.unit = [first.setdefault(n.locs or (str(i),), i) for i, n in enumerate(self.nodes)]
        self.members: dict[int, list[int]] = {}
        for i, root in enumerate(self.unit):
            self.members.setdefault(root, []).append(i)

    def joined(self, chains: Sequence[tuple[Step, ...]]) -> list[int]:
        heads: dict[str, list[int]] = {}
        for root in self.members if chains else ():
            heads.setdefault(word(self.head(root).op), []).append(root)
        changed = bool(chains)
        while changed:
            changed = False
            for chain in chains:
                for root in heads.get(chain[0][0].split("+")[0].rstrip("*"), ()):
                    if self.unit[root] == root and (found := self.follow(root, chain)):
                        self.merge(found)
                        changed = True
        return self.unit

    def head(self, root: int) -> Node:
        """The first op of a unit that does something."""
        return next(iter(self.loud(root)), self.nodes[root])

    def loud(self, root: int) -> list[Node]:
        """The ops of a unit that do something with what is not known before."""
        nodes = (self.nodes[i] for i in self.members[root])
        return [
            n
            for n in nodes
            if not isinstance(n.op, _SILENT) and not self.known.issuperset(n.results)
        ]

    def name(self, root: int) -> str:
        nodes = self.loud(root) or [self.nodes[i] for i in self.members[root]]
        return "+".join(word(n.op) for n in nodes)

    def follow(self, root: int, chain: tuple[Step, ...]) -> list[int]:
        """The units of a chain that begins with the one at `root`; none if it is no such chain."""
        (first, conditions), *rest = chain
        if not self.fits(self.head(root), None, conditions):
            return []
        if not first.endswith("*") and self.name(root) != first:
            return []
        found = [root]
        for name, conditions in rest:
            made = [v for i in self.members[found[-1]] for v in self.nodes[i].results]
            after = {v: self.behind(v, found[-1]) for v in made}
            read = [v for v, units in after.items() if units]
            if len(read) != 1 or self.outputs.intersection(made) or len(after[read[0]]) != 1:
                return []
            (then,) = after[read[0]]
            reader = next(i for i in self.members[then] if read[0] in self.nodes[i].op.operands)
            if self.name(then) != name or not self.fits(self.nodes[reader], read[0], conditions):
                return []
            found.append(then)
        return found

    def behind(self, v: Value, unit: int) -> set[int]:
        """The other units that read v."""
        return {self.unit[i] for i in self.readers.get(v, ())} - {unit}

    def fits(self, node: Node, own: Value | None, conditions: tuple[str, ...]) -> bool:
        """Whether the operands of an op beside the chain's own are as the conditions have it; of a
        chain's first op, one of them."""
        result = node.results[0] if node.results else None
        if not conditions or result is None:
            return not conditions
        operands = node.op.operands
        whole = tuple(v for v in operands if v.type.shape == result.type.shape)
        owns = (whole or operands) if own is None else (own,)
        return any(
            all(self.holds(c, node, tuple(v for v in operands if v != one)) for c in conditions)
            for one in owns
        )

    def holds(self, condition: str, node: Node, others: Others) -> bool:
        match condition:
            case "stored":
                return not unpacks_own(node, self.maker)
            case "second":
                return others == node.op.operands[1:]
            case "number" if not all(v.type.size == 1 for v in others):
                return False
            case "number" | "weight":
                return self.known.issuperset(others)
            case _:
                return CONDITIONS[condition][1](others, node.results[0])

    def merge(self, found: list[int]) -> None:
        first, *rest = found
        for other in rest:
            for i in self.members[other]:
                self.unit[i] = first
            self.members[first] = sorted(self.members[first] + self.members.pop(other))
