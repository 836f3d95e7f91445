"""The ways to make a graph: in order with `Builder`; from another with `rewrite` or `prune`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from gpuir.ir.errors import ModelError, UsageError
from gpuir.ir.graph import Cut, Framework, Graph, Level, Loc, Node, Op, Role, Value
from gpuir.ir.types import TensorType


@dataclass
class NameTable:
    """Unique names: the wanted one, or it with `.1`, `.2` ... behind when it is taken."""

    taken: set[str] = field(default_factory=set[str])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    kept: set[str] = field(default_factory=set[str])  # taken, for whoever claims them

    def keep(self, names: Iterable[str]) -> None:
        """Sets names aside: `fresh` avoids them, and the first to `claim` one gets it."""
        new = set(names) - self.taken
        self.kept |= new
        self.taken |= new

    def claim(self, wanted: str) -> str:
        """The wanted name if it is free or was kept, else a fresh one."""
        if wanted in self.kept:
            self.kept.discard(wanted)
            return wanted
        return self.fresh(wanted)

    def fresh(self, wanted: str) -> str:
        name = wanted or "v"
        while name in self.taken:
            count = self.counts[wanted] = self.counts.get(wanted, 0) + 1
            name = f"{wanted or 'v'}.{count}"
        self.taken.add(name)
        return name


class Builder:
    """Makes a graph in order: inputs, params and nodes as they come, then `finish`.

    `locs` of the current model node apply to each node added without its own. `roles` says by name
    what values hold, where it is not what their place says. `names` is a table shared with another
    builder, for a region whose names must differ from the enclosing graph's.
    """

    def __init__(
        self,
        level: Level,
        name: str,
        target: str | None = None,
        names: NameTable | None = None,
    ):
        self.level, self.name, self.target = level, name, target
        self.locs: tuple[Loc, ...] = ()
        self.nodes: list[Node] = []
        self.folded: list[Loc] = []
        self.assumed: list[str] = []
        self.over: tuple[Value | None, ...] = ()
        self.roles: dict[str, Role] = {}
        self.framework: Framework | None = None
        self.profile: str | None = None
        self.cluster: str | None = None
        self.origins: tuple[tuple[Loc, str], ...] = ()
        self.mesh: tuple[tuple[str, int], ...] = ()
        self.cuts: tuple[tuple[str, Cut], ...] = ()
        self._inputs: list[Value] = []
        self._params: list[Value] = []
        self.names = names or NameTable()
        self._producers: dict[str, Node] = {}

    def inherit(self, graph: Graph) -> None:
        """Takes over what another graph says of itself: its roles, what its outputs take over, what
        is folded and assumed, its framework, profile, origins, cluster and
        mesh."""
        self.folded += graph.folded
        self.assumed += graph.assumed
        self.over = graph.over
        self.roles.update(graph.roles)
        self.framework, self.profile = graph.framework, graph.profile
        self.cluster = graph.cluster
        self.origins = graph.origins
        self.mesh, self.cuts = graph.mesh, graph.cuts

    def capture(self, value: Value) -> Value:
        """An input that keeps an outer value's name: for a region whose names come from one table
        with the graph around it."""
        self._inputs.append(value)
        return value

    def is_input(self, value: Value) -> bool:
        return value in self._inputs

    def input(self, name: str, type: TensorType) -> Value:
        value = Value(self.names.claim(name), type)
        self._inputs.append(value)
        return value

    def param(self, name: str, type: TensorType) -> Value:
        value = Value(self.names.claim(name), type)
        self._params.append(value)
        return value

    def reserve(self, names: Iterable[str]) -> None:
        """Keeps these names for values that come later: others get a suffix instead."""
        self.names.taken.update(names)

    def add(
        self,
        op: Op,
        names: Sequence[str] = (),
        locs: tuple[Loc, ...] | None = None,
    ) -> tuple[Value, ...]:
        """Appends a node and gives its results, typed by the op's own rule.

        `names` are taken as wished where they are free; a result without one is named after
        the op. A `ModelError` of the rule says which model node the op stands for.
        """
        locs = self.locs if locs is None else locs
        try:
            types = op.result_types
        except ModelError as error:
            error.where = error.where or " + ".join(locs)
            raise
        results = tuple(
            Value(self.names.fresh(names[i] if i < len(names) else op.name.split(".")[-1]), type)
            for i, type in enumerate(types)
        )
        self._append(Node(op, results, locs))
        return results

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        for value in node.results:
            self._producers[value.name] = node

    def producer(self, value: Value) -> Op | None:
        """The op that gives `value`; None for an input or param."""
        node = self._producers.get(value.name)
        return None if node is None else node.op

    def __call__(self, op: Op, name: str = "") -> Value:
        """`add` for an op with one result."""
        results = self.add(op, (name,) if name else ())
        if len(results) != 1:
            raise UsageError(
                f"b(op) is for ops with one result; {op.name} has {len(results)}",
                fix="b.add(op) gives all of them",
            )
        return results[0]

    def put(self, node: Node) -> None:
        """Appends a node as it is; its result names must be free."""
        self.names.taken.update(value.name for value in node.results)
        self._append(node)

    def rename(self, start: int, names: Mapping[Value, Value]) -> None:
        """Replaces values defined by the nodes from `start` on, and their uses there."""
        for i in range(start, len(self.nodes)):
            node = self.nodes[i]
            results = tuple(names.get(v, v) for v in node.results)
            self.nodes[i] = replace(node, op=node.op.substitute(names), results=results)
            self._producers.update((v.name, self.nodes[i]) for v in results)

    def finish(self, outputs: Iterable[Value], over: Iterable[Value | None] | None = None) -> Graph:
        """The graph. `over` is as in `Graph`, but may end early; when not given it is that of the
        graph this one began from."""
        outputs = tuple(outputs)
        over = self.over if over is None else tuple(over)
        over = (*over, *(None,) * (len(outputs) - len(over)))
        graph = Graph(
            level=self.level,
            name=self.name,
            inputs=tuple(self._inputs),
            params=tuple(self._params),
            nodes=tuple(self.nodes),
            outputs=outputs,
            folded=_gone(self.folded, self.nodes),
            assumed=tuple(dict.fromkeys(self.assumed)),
            framework=self.framework,
            target=self.target,
            cluster=self.cluster,
            profile=self.profile,
            over=over if any(over) else (),
            origins=self.origins,
            mesh=self.mesh,
            cuts=self.cuts,
        )
        return replace(graph, roles=_kept(self.roles, graph))


def begin(graph: Graph, level: Level) -> Builder:
    """The start of another graph with the ends of this one: its inputs and params, and all that it
    says of itself."""
    b = Builder(level, graph.name, graph.target)
    b.inherit(graph)
    for v in graph.inputs:
        b.input(v.name, v.type)
    for v in graph.params:
        b.param(v.name, v.type)
    return b


Rule = Callable[[Node, Builder], "tuple[Value, ...] | None"]


def rewrite(graph: Graph, rule: Rule, level: Level | None = None) -> Graph:
    """The graph with `rule` tried on each node in order, operands already rewritten.

    A rule gives the values that replace the node's results, or None to keep the node. A value the
    rule has just made takes over the name it replaces, and with it the role; one that was there
    takes over the role, and how an output is cut. Nodes it made inherit the node's locations; when
    it made none, they go to `folded`. Regions of control ops are rewritten by the same rule; the
    regions of kernels are not.
    """
    level = graph.level if level is None else level
    b = begin(graph, level)
    b.reserve(r.name for n in graph.nodes for r in n.results)
    new: dict[Value, Value] = {}

    for node in graph.nodes:
        op = node.op.substitute(new) if new else node.op
        if op.control:
            op = within(op, lambda region: rewrite(region, rule, level), b.folded)
        if op is not node.op:
            types = op.result_types
            results = tuple(Value(r.name, t) for r, t in zip(node.results, types, strict=True))
            new.update((o, r) for o, r in zip(node.results, results, strict=True) if o != r)
            node = replace(node, op=op, results=results)
        before, b.locs = len(b.nodes), node.locs
        values = rule(node, b)
        if values is None:
            b.put(node)
            continue
        if len(b.nodes) == before:
            b.folded += node.locs
        made = {v for n in b.nodes[before:] for v in n.results}
        renamed: dict[Value, Value] = {}
        for old, value in zip(node.results, values, strict=True):
            if value in made:
                value = renamed.setdefault(value, Value(old.name, value.type))
            elif old.name in b.roles and b.producer(value):
                b.roles.setdefault(value.name, b.roles[old.name])
            if value != old:
                new[old] = value
        if renamed:
            b.rename(before, renamed)
    outputs = tuple(new.get(v, v) for v in graph.outputs)
    if graph.cuts:
        names = {o.name: n.name for o, n in zip(graph.outputs, outputs, strict=True)}
        b.cuts = tuple(dict.fromkeys((names.get(name, name), cut) for name, cut in graph.cuts))
    return b.finish(outputs)


def prune(graph: Graph) -> Graph:
    """The graph without the nodes whose results nobody reads; their locations are folded."""
    live = set(graph.outputs)
    kept: list[Node] = []
    folded: list[Loc] = []
    for node in reversed(graph.nodes):
        if not any(v in live for v in node.results):
            folded += reversed(list(_locs(node)))
            continue
        op = within(node.op, prune, folded) if node.op.control else node.op
        kept.append(node if op is node.op else replace(node, op=op))
        live.update(op.operands)
    folded = [*graph.folded, *reversed(folded)]
    kept.reverse()
    pruned = replace(graph, nodes=tuple(kept), folded=_gone(folded, kept))
    return replace(pruned, roles=_kept(dict(graph.roles), pruned)) if graph.roles else pruned


def within(op: Op, change: Callable[[Graph], Graph], folded: list[Loc]) -> Op:
    """A control op with its regions changed; what they fold is folded in the graph around them,
    to whose list it goes."""

    def changed(region: Graph) -> Graph:
        region = change(region)
        folded.extend(region.folded)
        return replace(region, folded=()) if region.folded else region

    return op.with_regions(changed)


ROLES: tuple[Role, ...] = get_args(Role)


def _kept(roles: Mapping[str, Role], graph: Graph) -> tuple[tuple[str, Role], ...]:
    """The roles of values that the graph has, a role after the other."""
    made = (v.name for node in graph.nodes for v in node.results)
    names = {v.name for v in (*graph.inputs, *graph.params)}.union(made) if roles else ()
    kept = (name for name in roles if name in names)
    return tuple((n, roles[n]) for n in sorted(kept, key=lambda n: ROLES.index(roles[n])))


def _gone(locs: Iterable[Loc], nodes: Iterable[Node]) -> tuple[Loc, ...]:
    """Those locations that no node stands for, each once."""
    live = {loc for node in nodes for loc in _locs(node)}
    return tuple(loc for loc in dict.fromkeys(locs) if loc not in live)


def _locs(node: Node) -> Iterator[Loc]:
    """The model nodes that a node and those inside its control regions stand for."""
    yield from node.locs
    if node.op.control:
        for region in node.op.regions:
            for inner in region.walk():
                yield from inner.locs
