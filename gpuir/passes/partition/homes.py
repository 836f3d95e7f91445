"""Which part each node of a graph is in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from itertools import pairwise

from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Loc, Node, Value
from gpuir.ir.phases import PHASES, SUM, phase_of
from gpuir.ops import tensor as t
from gpuir.passes.partition.balance import Weigh, best_cuts, bytes_between, lengths


class Homes:
    """The part of each node of the forward and backward passes, and of each value that they make.

    Nodes whose results follow from constants, from weights alone or from whole-number inputs alone
    (masks, positions, a weight turned around or cast) are `free`: they run in each part that reads
    them. Every other node has one home. Forward nodes keep their order; a backward node goes where
    its location says, or what it reads, and never behind a gradient that it reads.
    """

    def __init__(self, g: Graph, weighs: Sequence[Weigh]):
        self.g, self.parts, self.weighs = g, len(weighs), weighs
        self.free = free_values(g)
        self.forward = [n for n in g.nodes if phase_of(n) is None and not self.is_free(n)]
        self.backward = [
            n for n in g.nodes if phase_of(n) in ("backward", "recomputed") and not self.is_free(n)
        ]
        self.place = {v: i for i, n in enumerate(self.forward) for v in n.results}
        self.part: dict[Value, int] = {}
        self.cuts = self.find_cuts()
        for part, (a, b) in enumerate(pairwise((0, *self.cuts, len(self.forward)))):
            self.part.update((v, part) for n in self.forward[a:b] for v in n.results)
        self.settle_backward()

    def is_free(self, node: Node) -> bool:
        return bool(node.results) and node.results[0] in self.free

    @cached_property
    def weights(self) -> list[list[float]]:
        """Of each forward node, with the backward nodes that belong to it, as each part has it."""
        belongs: list[tuple[Node, int]] = []
        for node in self.backward:
            places = [self.place[n.results[0]] for n in self.located(node)]
            places = places or [self.place[v] for v in node.op.operands if v in self.place]
            if places:
                belongs.append((node, max(places)))
        rows: dict[Weigh, list[float]] = {}
        for weigh in dict.fromkeys(self.weighs):
            rows[weigh] = [weigh(n) for n in self.forward]
            for node, place in belongs:
                rows[weigh][place] += weigh(node)
        return [rows[weigh] for weigh in self.weighs]

    @property
    def lengths(self) -> tuple[float, ...]:
        """The predicted time, or work, of each part."""
        return lengths(self.weights, self.cuts)

    def find_cuts(self) -> tuple[int, ...]:
        """The places between parts; UsageError where there are too few."""
        apart = [a.locs != b.locs for a, b in pairwise(self.forward)]
        inside = self.inside_segments()
        allowed = [i for i, different in enumerate(apart, 1) if different and i not in inside]
        if len(allowed) < self.parts - 1:
            what = "operators, or checkpointed segments," if inside else "operators"
            raise UsageError(
                f"@{self.g.name} cannot be split into {self.parts} parts",
                expected=f"at most {len(allowed) + 1} parts, because only so many {what} "
                "follow one another",
                fix=f"choose --pp and --chunks with a product of at most {len(allowed) + 1}",
            )
        alive = bytes_between(self.forward, self.place)
        return best_cuts(self.weights, allowed, alive)

    def inside_segments(self) -> set[int]:
        """The places within what is computed again together: from one recomputed node to another
        that reads it."""
        places: dict[Value, int] = {}
        for node in self.backward:
            if phase_of(node) == "recomputed" and (found := self.located(node)):
                places.update((v, self.place[found[-1].results[0]]) for v in node.results)
        return {
            place
            for node in self.backward
            if node.results and node.results[0] in places
            for v in node.op.operands
            for place in range(places.get(v, len(self.forward)) + 1, places[node.results[0]] + 1)
        }

    # -- backward

    def located(self, node: Node) -> list[Node]:
        """The forward nodes of a backward node's operator, or else of its module."""
        for index, names in ((self._by_loc, node.locs), (self._by_module, map(module, node.locs))):
            plain = [name_of_forward(name) for name in names]
            for some in (plain, [name.removesuffix(f".{SUM}") for name in plain]):
                if found := [n for name in some for n in index.get(name, ())]:
                    return found
        return []

    @cached_property
    def _by_loc(self) -> dict[Loc, list[Node]]:
        return indexed(self.forward, lambda loc: loc)

    @cached_property
    def _by_module(self) -> dict[str, list[Node]]:
        return indexed(self.forward, module)

    def settle_backward(self) -> None:
        waiting: list[Node] = []  # what reads no gradient goes with who reads it
        for node in self.backward:
            gradients = [self.part[v] for v in node.op.operands if v in self.part_of_gradients]
            high = min(gradients, default=self.parts - 1)
            parts = {self.part[n.results[0]] for n in self.located(node)}
            if len(parts) != 1:
                if not gradients:
                    waiting.append(node)
                    continue
                parts = {self.last_part[v] for v in self.sources(node) if v in self.last_part}
            part = min(parts, default=high)
            self.part.update((v, min(part, high)) for v in node.results)
            self.part_of_gradients.update(node.results)
        for node in reversed(waiting):
            parts = [p for v in node.results for p in self.readers(v)]
            self.part.update((v, max(parts, default=0)) for v in node.results)

    def readers(self, v: Value) -> list[int]:
        """The parts of the backward nodes that read a value."""
        nodes = [n for n in self.uses.get(v, ()) if n.results]
        return [self.part[n.results[0]] for n in nodes if n.results[0] in self.part]

    def sink_views(self, kept: Collection[Value]) -> None:
        """Moves backward views to the parts of who reads them, so that a gradient that is looked at
        in two ways is sent once; but for those that what makes `kept` reads."""
        outputs = set(self.g.outputs)
        for node in reversed(self.backward):
            (v, *_) = node.results
            if isinstance(node.op, t.Layout) and v not in outputs:
                parts = self.readers(v)
                if parts and not any(n.results[0] in kept for n in self.uses[v]):
                    self.part[v] = min(self.part[v], max(parts))

    @cached_property
    def part_of_gradients(self) -> set[Value]:
        return set()

    @cached_property
    def last_part(self) -> dict[Value, int]:
        """The last part whose forward pass has each value or weight."""
        found = {v: p for v, p in self.part.items() if v in self.place}
        for node in self.forward:
            part = self.part[node.results[0]]
            for v in self.sources(node):
                found[v] = max(found.get(v, 0), part)
        return found

    def sources(self, node: Node) -> set[Value]:
        """What a node reads, free values looked through."""
        found, left = set[Value](), list(node.op.operands)
        while left:
            v = left.pop()
            if v not in found:
                found.add(v)
                if v in self.free:
                    left += self.producers[v].op.operands
        return found

    @cached_property
    def uses(self) -> dict[Value, list[Node]]:
        return self.g.uses()

    @cached_property
    def producers(self) -> dict[Value, Node]:
        return self.g.producers()


def name_of_forward(loc: Loc) -> str:
    """`m.onnx:MatMul_3/backward` → `m.onnx:MatMul_3`."""
    head, _, last = loc.rpartition("/")
    return name_of_forward(head) if last in PHASES else loc


def module(loc: Loc) -> str:
    """`model:layers.3.mlp.up/linear_7/backward` → `model:layers.3.mlp.up/`, of what is in one."""
    return f"{name_of_forward(loc).rpartition('/')[0]}/"


def indexed(nodes: Iterable[Node], key: Callable[[Loc], str]) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for node in nodes:
        for name in dict.fromkeys(map(key, node.locs)):
            found.setdefault(name, []).append(node)
    return found


CONSTANT, KNOWN, PREPARED, FIXED = range(4)


def free_values(g: Graph) -> set[Value]:
    """What follows from constants, from whole-number inputs and buffers alone, or from weights
    alone, calls of libraries aside: two random numbers are not the same."""
    kinds: dict[Value, int] = {}
    for v in g.inputs:
        kinds[v] = FIXED if v.type.dtype.is_inexact or g.role_of(v) == "cache" else KNOWN
    for v in g.params:
        kinds[v] = {"weight": PREPARED, "buffer": CONSTANT}.get(g.role_of(v), FIXED)
    found: set[Value] = set()
    for node in g.nodes:
        fixed = isinstance(node.op, t.Call) and not isinstance(node.op, t.Collective)
        read = {kinds[v] for v in node.op.operands} - {CONSTANT}
        if fixed or phase_of(node) == "optimizer" or len(read) > 1:
            kind = FIXED
        elif read:
            (kind,) = read
        else:
            kind = CONSTANT if node.op.operands or isinstance(node.op, t.Generating) else FIXED
        kinds.update((v, kind) for v in node.results)
        if kind != FIXED:
            found.update(node.results)
    return found


def parts_in_order(nodes: Sequence[Node], part: dict[Value, int], count: int) -> list[list[Node]]:
    """The nodes of each part, in their order."""
    found: list[list[Node]] = [[] for _ in range(count)]
    for node in nodes:
        found[part[node.results[0]]].append(node)
    return found
