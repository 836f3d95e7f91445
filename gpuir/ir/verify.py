"""The promises of each level, checked. A broken one is a bug in whoever made the graph."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import isfinite
from typing import NoReturn, get_args
from weakref import WeakValueDictionary

from gpuir.ir.build import ROLES
from gpuir.ir.errors import GpuirError, VerifyError
from gpuir.ir.graph import DEEPEST, Graph, Level, Node, Op, Value
from gpuir.ir.notes import Bound, Cost
from gpuir.ir.types import TensorType

WORD = re.compile(r"[\w.\-]+")
COUNTED = ("bytes", "flops", "blocks")  # facts that are counts

# Graphs that keep all promises, by identity, whether in a kernel, and depth. They never change, so
# none is looked at twice: most passes keep the regions of most nodes.
_sound: WeakValueDictionary[tuple[int, bool, int], Graph] = WeakValueDictionary()


def verify(graph: Graph, by: str = "") -> None:
    """Raises `VerifyError`, naming the pass or frontend `by`, at the first broken promise.

    Every level: values are defined once, before use, under unique names; result types are what the
    op's own rule computes; regions are graphs of their own, at most `DEEPEST` inside one another;
    an output takes over an input or param of its own type that no other output does; who has a role
    is there. From `graph` on every node has a location; `fused`: only `t.fused` and control flow,
    one contraction a body; `kernel`: only `k.` ops; `tiled`: a target, and a `Tile` on every kernel
    with a loop nest; `costed`: a `Cost` on every kernel, its time no less than any term, its bound
    the largest.
    """
    _Verifier(graph, by).run(graph, in_kernel=False)


class _Verifier:
    def __init__(self, graph: Graph, by: str):
        self.top, self.by = graph, by
        self.costs = set[int]()  # that are sound, by identity: kernels that are alike have one

    def fail(self, node: Node | None, what: str, expected: str = "", found: str = "") -> NoReturn:
        where = f"@{self.top.name}"
        if node is not None:
            where = f"{' + '.join(node.locs) or where}: {node}"
        fix = "change the text or the code that this graph comes from"
        if self.by:
            fix = f"this is a bug in the pass {self.by!r}"
        raise VerifyError(what, where=where, expected=expected, found=found, fix=fix)

    def run(self, graph: Graph, in_kernel: bool, depth: int = 0) -> None:
        key = id(graph), in_kernel, depth
        if _sound.get(key) is graph:
            return
        if depth > DEEPEST:
            self.fail(None, f"regions are nested more than {DEEPEST} deep")
        defined: dict[str, Value] = {}
        for value in (*graph.inputs, *graph.params):
            if value.name in defined:
                self.fail(None, f"%{value.name} is defined twice")
            defined[value.name] = value
        if not in_kernel and graph.level >= Level.tiled and graph.target is None:
            self.fail(None, f"a graph of level {graph.level.name} must name its target")
        for node in graph.nodes:
            self.node(node, defined, graph.level, in_kernel, depth)
        for value in graph.outputs:
            if defined.get(value.name) != value:
                self.fail(None, f"output %{value.name} is not defined", found=str(value.type))
        self.over(graph)
        for name, role in graph.roles:
            if name not in defined:
                self.fail(None, f"%{name} has a role but is not defined")
            if role not in ROLES:
                self.fail(None, f"%{name} cannot have this role", ", ".join(ROLES), role)
        if len(dict(graph.roles)) < len(graph.roles):
            self.fail(None, "a value has two roles")
        self.cuts(graph)
        _sound[key] = graph

    def cuts(self, graph: Graph) -> None:
        ends = {v.name: v for v in (*graph.inputs, *graph.params, *graph.outputs)}
        axes = [axis for axis, _ in graph.mesh]
        for name, cut in graph.cuts:
            if name not in ends:
                self.fail(None, f"%{name} is cut, but it is not an input, a parameter or an output")
            if cut.group not in axes:
                self.fail(
                    None,
                    f"%{name} is cut along an axis that the mesh does not have",
                    ", ".join(axes),
                )
            if not 0 <= cut.axis < ends[name].type.rank:
                self.fail(None, f"%{name} has no axis {cut.axis} to cut")

    def over(self, graph: Graph) -> None:
        if not graph.over:
            return
        if len(graph.over) != len(graph.outputs):
            self.fail(None, "`over` must have one entry for each output")
        pairs = [(v, o) for v, o in zip(graph.outputs, graph.over, strict=True) if o is not None]
        ends = {*graph.inputs, *graph.params}
        for value, taken in pairs:
            if taken not in ends:
                self.fail(
                    None, f"%{taken.name} is taken over, but it is not an input or a parameter"
                )
            if (value.type.shape, value.type.dtype) != (taken.type.shape, taken.type.dtype):
                what = (
                    f"output %{value.name} has another type than %{taken.name}, which it takes over"
                )
                self.fail(None, what, str(taken.type), str(value.type))
        if len({taken for _, taken in pairs}) < len(pairs):
            self.fail(None, "two outputs take over the same value")

    def node(
        self, node: Node, defined: dict[str, Value], level: Level, in_kernel: bool, depth: int
    ) -> None:
        op = node.op
        for value in op.operands:
            known = defined.get(value.name)
            if known is None:
                self.fail(node, f"%{value.name} is used before it is defined")
            elif known is not value and known != value:
                self.fail(
                    node,
                    f"%{value.name} is used with two types",
                    str(known.type),
                    found=str(value.type),
                )
        types, found = self.types(node, op), [v.type for v in node.results]
        if [*types] != found:
            self.fail(
                node,
                "the result types are not the ones that the op computes",
                expected=", ".join(map(str, types)),
                found=", ".join(map(str, found)),
            )
        for value in node.results:
            if value.name in defined:
                self.fail(node, f"%{value.name} is defined twice")
            defined[value.name] = value
        if not node.locs:
            self.fail(node, "no location", expected="the model nodes that this op comes from")
        for region in op.regions:
            self.run(region, in_kernel or not op.control, depth + 1)
        if not in_kernel:
            self.vocabulary(node, level)
            self.notes(node, level)

    def types(self, node: Node, op: Op) -> tuple[TensorType, ...]:
        """What the op's rule computes; operands it refuses are a bug of whoever put them there."""
        try:
            return op.result_types
        except GpuirError as error:
            self.fail(node, error.what, error.expected, error.found)

    def vocabulary(self, node: Node, level: Level) -> None:
        op = node.op
        if level == Level.graph and not op.name.startswith("t."):
            self.fail(node, f"{op.name} is not an op of level graph", expected="a t. op")
        if level == Level.fused:
            if op.name != "t.fused" and not op.control:
                self.fail(node, f"{op.name} stands alone", expected="t.fused or control flow")
            contractions = [n for r in op.regions for n in r.nodes if n.op.contraction]
            if not op.control and len(contractions) > 1:
                self.fail(node, "a fused body has more than one contraction")
        if level >= Level.kernel and not op.name.startswith("k."):
            self.fail(node, f"{op.name} is not a kernel", expected="a k. op")

    def notes(self, node: Node, level: Level) -> None:
        if level >= Level.tiled and node.op.tiled:
            if node.tile is None:
                self.fail(node, f"a kernel of level {level.name} must have a tile")
            else:
                dims = node.op.nest.dims
                for dim, _ in node.tile.dims:
                    if dim not in dims:
                        self.fail(node, f"the tile cuts {dim}", expected=", ".join(dims), found=dim)
        if level >= Level.costed:
            if node.cost is None:
                self.fail(node, "a kernel of level costed must have a cost")
            elif id(node.cost) not in self.costs:
                for fault in faults(node.cost):
                    self.fail(node, *fault)
                self.costs.add(id(node.cost))


def faults(cost: Cost) -> Iterator[tuple[str, str, str]]:
    """What a cost must not be: each as what, expected, found."""
    low, high = cost.interval or (0.0, 0.0)
    times = (("time_s", cost.time_s), ("low_s", low), ("high_s", high), *cost.terms)
    for name, value in (*times, *cost.facts):
        if not isfinite(value):
            yield f"{name} is {value}", "a number", f"{cost.by} says so"
    for name, value in times:
        if value < 0:
            yield f"{name} is negative", "0 or more seconds", f"{value} by {cost.by}"
    for name, value in cost.facts:
        if value < 0 and name.endswith(COUNTED):
            yield f"{name} is negative", "0 or more", f"{value:g} by {cost.by}"
    for name, _ in cost.terms:
        if name not in get_args(Bound):
            yield f"{name} is not a term of the cost", ", ".join(get_args(Bound)), f"by {cost.by}"
    if low > high:
        yield "the interval is empty", "low_s at most high_s", f"{low} to {high} by {cost.by}"
    names = (name for name, _ in cost.facts)
    for name in (cost.by.partition("@")[0], *names, *cost.unseen):
        if not WORD.fullmatch(name):
            yield "a cost has a name that cannot be written as text", "a word", name
    if not cost.terms:
        return
    worst, most = max(cost.terms, key=lambda t: t[1])
    if cost.time_s < most * (1 - 1e-9):
        yield "the time is less than one of its terms", f"at least {most}", str(cost.time_s)
    if cost.term(cost.bound) < most * (1 - 1e-9):
        yield "bound is not the name of the largest term", worst, cost.bound
