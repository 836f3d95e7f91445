"""Groups tensor ops into launches: what one kernel can do without going through memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

from gpuir.ir.build import begin, within
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Level, Node, Op, Value
from gpuir.ir.phases import Phase, phase_of
from gpuir.ops import tensor as t
from gpuir.passes.chains import steps, units
from gpuir.passes.manager import Pass

KINDS = get_args(t.Fusing)


@dataclass(frozen=True)
class Fuse(Pass):
    """Groups ops into `t.fused`, one launch's worth of work each, with what each sees as arguments.

    Pointwise ops join the contraction, reduction or pointwise group that feeds them, where the
    result has the group's own shape; groups that meet in a pointwise op merge (diamonds). A
    reduction takes in the pointwise group that feeds it alone, and further reductions over the same
    axes of the same cells. The dequantisation of a weight joins the contraction that reads it.
    Arithmetic on one index joins the gather that reads it, and so does the sum that a model node
    makes of the rows it gathers. A slice that pointwise ops of its own model node alone read (a
    gate of a recurrent cell) is a pointwise op: their kernel reads it in place. Chains of other
    layout ops make one group. The backward pass joins no launch of the forward pass.

    `rules` says who may join whom, as a software stack allows it: `all`, or pairs of kinds like
    `map>map map>reduce contraction>map`, what is made before what reads it, and chains of ops like
    `conv>add:same>relu` that the stack has one kernel for (passes/chains.py). Without any (`none`)
    only the ops of one model node share a launch. `max_ops` bounds the ops of a group.
    """

    max_ops: int = 64
    rules: str = "all"

    name = "fuse"
    takes = Level.graph
    gives = Level.fused

    def __post_init__(self) -> None:
        if self.max_ops < 1:
            raise UsageError(
                "pass 'fuse': a group has no ops",
                expected="max_ops=1 or more",
                found=f"max_ops={self.max_ops}",
            )
        for rule in () if self.rules in ("all", "none") else self.rules.split():
            words = rule.split(">")
            if len(words) < 2 or (len(words) > 2 and set(words) <= set(KINDS)):
                raise UsageError(
                    "pass 'fuse': this is no rule",
                    expected="all, none, or rules with spaces between: map>map conv>add:same>relu",
                    found=rule,
                    fix=f"kinds are {', '.join(KINDS)}",
                )
        for chain in self.chains:
            steps(chain)

    @property
    def pairs(self) -> frozenset[tuple[str, ...]] | None:
        """The pairs of kinds that may share a launch across model nodes; None is all."""
        if self.rules == "all":
            return None
        return frozenset(rule for rule in self._split() if set(rule) <= set(KINDS))

    @property
    def chains(self) -> tuple[tuple[str, ...], ...]:
        """The chains of ops that share a launch."""
        return tuple(rule for rule in self._split() if not set(rule) <= set(KINDS))

    def _split(self) -> list[tuple[str, ...]]:
        return [tuple(rule.split(">")) for rule in self.rules.split() if ">" in rule]

    def run(self, g: Graph) -> Graph:
        return _Fuser(g, self).run()


@dataclass(eq=False)
class Group:
    """Nodes that will share a launch, by their places in the graph."""

    kind: t.Fusing
    members: list[int]
    shape: tuple[int, ...]  # what each cell of its nest stands for: a pointwise op must fit it
    axes: tuple[int, ...] = ()  # of a reduce group
    phase: Phase | None = None
    into: Group | None = field(default=None, repr=False)  # merged away

    @property
    def outer(self) -> tuple[int, ...]:
        """The shape of a reduce group's per-row results, reduced axes kept as 1."""
        return tuple(1 if i in self.axes else n for i, n in enumerate(self.shape))


def kind_of(op: Op) -> t.Fusing:
    return op.fuses if isinstance(op, t.TensorOp) else "alone"


def weights(op: Op) -> tuple[Value, ...]:
    """The operands of a contraction that may be dequantised on their way into the tile."""
    if not isinstance(op, t.TensorOp) or not op.weight:
        return ()
    found = getattr(op, op.weight)
    return (found,) if isinstance(found, Value) else found


class _Fuser:
    def __init__(self, g: Graph, options: Fuse):
        self.g, self.options = g, options
        self.producer = {v: i for i, n in enumerate(g.nodes) for v in n.results}
        self.users = g.readers()
        self.outputs = set(g.outputs)
        self.groups: list[Group | None] = [None] * len(g.nodes)
        self.params = set(g.params)
        self.pairs = options.pairs
        self.unit = units(g, options.chains)

    # -- the walk

    def run(self) -> Graph:
        for i, node in enumerate(self.g.nodes):
            if isinstance(node.op, t.Generating):
                continue  # repeated in each group that reads it
            group = self.join(i, node.op) or self.start(i, node.op)
            self.groups[i] = group
            if node.op.contraction and group.members == [i]:
                for weight in weights(node.op):
                    self.take_dequantised(group, weight)
        return self.build()

    def start(self, i: int, op: Op) -> Group:
        kind = kind_of(op)
        shape = self.shape(i)
        phase = phase_of(self.g.nodes[i])
        if not isinstance(op, t.Reducing) or kind != "reduce":
            kind = "map" if self.is_read_in_place(i) else kind
            group = Group(kind, [i], shape, phase=phase)
            if isinstance(op, t.Gather):
                self.take_index(group, op)
            return group
        x = op.operands[0]
        group = Group(kind, [i], x.type.shape, op.reduced_axes(), phase)
        self.groups[i] = group
        for v in op.operands:
            feeder = self.group_of(v)
            if feeder and feeder.kind == "map" and feeder.shape == group.shape:
                self.merge(feeder, group)
        return group

    def is_read_in_place(self, i: int) -> bool:
        """Whether node i slices what the pointwise ops of its own model node read, and no others
        do: what a model node does with its parts is no launch of its own."""
        node = self.g.nodes[i]
        if not isinstance(node.op, t.Slice) or node.results[0] in self.outputs:
            return False
        readers = [self.g.nodes[u] for u in self.users.get(node.results[0], ())]
        same = all(r.locs == node.locs and isinstance(r.op, t.Pointwise) for r in readers)
        return bool(readers) and same and all(step == 1 for step in node.op.steps)

    def take_index(self, group: Group, op: t.Gather) -> None:
        """The pointwise ops on one number that make a gather's index, for it alone, join it."""
        feeder = self.group_of(op.indices)
        if feeder is None or feeder.kind != "map" or op.indices.type.size != 1:
            return
        if not self.may_share(feeder.members, group.members):
            return
        if feeder.phase == group.phase and self.is_private(feeder, group.members[0]):
            feeder.into = group
            group.members = [*feeder.members, *group.members]

    def group_of(self, v: Value) -> Group | None:
        """The group that makes `v`; None for inputs, params and generators."""
        i = self.producer.get(v)
        group = None if i is None else self.groups[i]
        while group is not None and group.into is not None:
            group = group.into
        return group

    def shape(self, i: int) -> tuple[int, ...]:
        """The shape of node i's first result."""
        results = self.g.nodes[i].results
        return results[0].type.shape if results else ()

    def members(self, group: Group) -> Iterator[Node]:
        return (self.g.nodes[i] for i in group.members)

    # -- joining

    def may_share(self, makers: list[int], readers: list[int]) -> bool:
        """Whether the rules let what these nodes make be read in their own launch."""
        if self.pairs is None:
            return True
        nodes = self.g.nodes
        inside = set(readers)
        for i in makers:
            for j in {u for v in nodes[i].results for u in self.users.get(v, ())} & inside:
                pair = kind_of(nodes[i].op), kind_of(nodes[j].op)
                if self.unit[i] != self.unit[j] and pair not in self.pairs:
                    return False
        return True

    def join(self, i: int, op: Op) -> Group | None:
        """Puts node i into the group of one of its operands, if any may have it."""
        if self.is_read_in_place(i):
            return None
        kind = kind_of(op)
        feeders = list(dict.fromkeys(f for v in op.operands if (f := self.group_of(v))))
        rank = {"contraction": 0, "reduce": 1, "map": 2, "layout": 3}
        # of equals, first one that others read too: it cannot be merged into another
        feeders.sort(key=lambda f: (rank.get(f.kind, 4), self.is_private(f, i)))
        for group in feeders:
            if self.accepts(group, i, op, kind) and not self.is_cyclic(group, op.operands):
                group.members.append(i)
                self.groups[i] = group
                if kind == "map" and group.kind in ("map", "reduce", "contraction"):
                    for other in feeders:
                        if other is not group and other.kind == "map" and other.into is None:
                            self.merge(other, group)
                if kind == "reduce":
                    for other in feeders:
                        if other is not group and other.shape == group.shape:
                            self.merge(other, group)
                return group
        return None

    def accepts(self, group: Group, i: int, op: Op, kind: t.Fusing) -> bool:
        if len(group.members) >= self.options.max_ops:
            return False
        if group.phase != phase_of(self.g.nodes[i]) or not self.may_share(group.members, [i]):
            return False
        shape = self.shape(i)
        made = (self.producer.get(v) for v in op.operands)
        in_place = any(j is not None and self.is_read_in_place(j) for j in made)
        match group.kind, kind:
            case "map", "map":
                return shape == group.shape
            case _, "map" if in_place:
                return False
            case "contraction", "map":
                single = all(len(n.results) == 1 for n in self.members(group))
                return shape == group.shape and single and self.is_closed(group, i)
            case "reduce", "map":
                return shape == group.shape or shape == group.outer
            case "reduce", "reduce":
                x = op.operands[0]
                same = isinstance(op, t.Reducing) and op.reduced_axes() == group.axes
                return same and x.type.shape == group.shape
            case "reduce", "layout":
                # only adds or drops the reduced axes of a per-row value
                return (
                    isinstance(op, t.Reshape) and shape == group.outer and self.is_closed(group, i)
                )
            case "layout", "layout":
                return self.is_closed(group, i)
            case "alone", "reduce":
                return self.is_bag(group, i)
            case _:
                return False

    def is_bag(self, group: Group, i: int) -> bool:
        """Whether node i combines the rows that a gather of its own model node picks: a bag of
        embeddings, which one kernel sums as it reads."""
        node, gather = self.g.nodes[i], self.g.nodes[group.members[-1]]
        if not (isinstance(node.op, t.Reduce) and isinstance(gather.op, t.Gather)):
            return False
        rows = tuple(range(gather.op.indices.type.rank))[-1:]
        same = node.op.x == gather.results[0] and node.locs == gather.locs
        return same and gather.op.axis == 0 and node.op.axes == rows and self.is_closed(group, i)

    def is_private(self, group: Group, i: int) -> bool:
        """Whether only the group itself and node i read what it makes."""
        made = [v for node in self.members(group) for v in node.results]
        inside = {i, *group.members}
        return not any(
            v in self.outputs or any(u not in inside for u in self.users.get(v, ())) for v in made
        )

    def is_closed(self, group: Group, i: int) -> bool:
        """Whether what the group makes is read only inside it and by node i: nothing to store. The
        rest of a diamond that node i begins counts as inside a contraction's group."""
        made = [v for node in self.members(group) for v in node.results]
        readers = {user for v in made for user in self.users.get(v, ())} - {i, *group.members}
        if any(v in self.outputs for v in made):
            return False
        return not readers or (group.kind == "contraction" and self.will_join(group, readers, i))

    def will_join(self, group: Group, readers: set[int], i: int) -> bool:
        """Whether later readers of the group are pointwise ops on the way to a diamond's end: their
        shapes fit, and all they read is in the group, known before it, or made on such a way."""
        known = {i, *group.members}
        first = group.members[0]
        ways = list(readers)
        while ways:
            at = ways.pop()
            node = self.g.nodes[at]
            if at < i or kind_of(node.op) != "map" or self.shape(at) != group.shape:
                return False
            known.add(at)
            for v in node.op.operands:
                made = self.producer.get(v)
                if made is None or made < first or made in known:
                    continue
                if isinstance(self.g.nodes[made].op, t.Generating):
                    continue
                if at - made > self.options.max_ops:
                    return False
                ways.append(made)
        return True

    def merge(self, feeder: Group, group: Group) -> None:
        """Takes a pointwise group into another that is its only reader. A contraction takes it into
        its epilogue alone: what the product itself reads has to be there before."""
        if feeder is group or len(feeder.members) + len(group.members) > self.options.max_ops:
            return
        if feeder.kind != "map" or not self.fits(feeder.shape, group):
            return
        if feeder.phase != group.phase or not self.may_share(feeder.members, group.members):
            return
        if group.kind != "map" and any(isinstance(n.op, t.Slice) for n in self.members(feeder)):
            return
        product = {v for n in self.members(group) if n.op.contraction for v in n.op.operands}
        inside = set(group.members) | set(feeder.members)
        for node in self.members(feeder):
            for v in node.results:
                if (
                    v in product
                    or v in self.outputs
                    or any(u not in inside for u in self.users.get(v, ()))
                ):
                    return
        operands = [v for n in self.members(feeder) for v in n.op.operands]
        if self.is_cyclic(group, operands):
            return
        feeder.into = group
        group.members = sorted(inside)

    def fits(self, shape: tuple[int, ...], group: Group) -> bool:
        """Whether a kernel may compute cells of this shape where it needs them: one for each of
        its own, or fewer that are broadcast (a scaled bias), which costs it next to nothing."""
        if shape in (group.shape, group.outer):
            return True
        if group.kind not in ("contraction", "map") or len(shape) > len(group.shape):
            return False
        tail = group.shape[len(group.shape) - len(shape) :]
        return all(n in (1, m) for n, m in zip(shape, tail, strict=True))

    def take_dequantised(self, group: Group, weight: Value) -> None:
        """The pointwise and layout ops that make a contraction's weight from params, for it alone,
        join the contraction: a weight is dequantised, and unpacked from its blocks, on its way into
        the tile. What the rules leave to another launch (scales that are quantised themselves) is
        read from memory."""
        taken: set[int] = set()
        params: set[Value] = set()
        read: set[Value] = set()
        stack = [(weight, group.members[0])]
        while stack:
            v, reader = stack.pop()
            i = self.producer.get(v)
            if i is None:
                if v not in self.params:
                    return
                params.add(v)
            elif not self.may_share([i], [reader]):
                read.add(v)
            elif not isinstance(self.g.nodes[i].op, t.Generating) and i not in taken:
                if not isinstance(self.g.nodes[i].op, t.Pointwise | t.Layout):
                    return
                taken.add(i)
                stack += [(w, i) for w in self.g.nodes[i].op.operands]
        if not params or not any(isinstance(self.g.nodes[i].op, t.Pointwise) for i in taken):
            return  # no weight, or one that is read by its strides
        stored = max(params | read, key=lambda v: v.type.size)
        if stored in read or stored.type.dtype.bits > weight.type.dtype.bits:
            return  # rounded for this product: libraries multiply what lies in memory
        inside = {*taken, *group.members}
        for i in taken:
            for v in self.g.nodes[i].results:
                if v in self.outputs or any(u not in inside for u in self.users.get(v, ())):
                    return
        feeders = {f for i in taken for v in self.g.nodes[i].results if (f := self.group_of(v))}
        if any(f.phase != group.phase or any(i not in inside for i in f.members) for f in feeders):
            return
        for feeder in feeders:
            feeder.into = group
        group.members = sorted(inside)

    def is_cyclic(self, group: Group, operands: tuple[Value, ...] | list[Value]) -> bool:
        """Whether an operand made outside the group depends on the group: joining would make the
        launch wait for itself."""
        first = min(group.members)
        seen: set[int] = set()
        stack = [f for v in operands if (f := self.group_of(v)) and f is not group]
        while stack:
            other = stack.pop()
            if id(other) in seen or max(other.members) < first:
                continue
            seen.add(id(other))
            for node in self.members(other):
                for v in node.op.operands:
                    feeder = self.group_of(v)
                    if feeder is group:
                        return True
                    if feeder is not None and feeder is not other:
                        stack.append(feeder)
        return False

    # -- the result

    def build(self) -> Graph:
        g = self.g
        b = begin(g, Level.fused)
        for i, node in enumerate(g.nodes):
            if isinstance(node.op, t.Generating):
                if self.is_stored(node):
                    b.put(self.fused(Group("alone", [i], ())))
                elif not any(v in self.users for v in node.results):
                    b.folded += node.locs
        for group in self.ordered():
            node = g.nodes[group.members[0]]
            if node.op.control:
                op = within(node.op, lambda region: _Fuser(region, self.options).run(), b.folded)
                b.put(Node(op, node.results, node.locs))
            else:
                b.put(self.fused(group))
        return b.finish(g.outputs)

    def is_stored(self, generator: Node) -> bool:
        """Whether a constant needs memory: as an output, or where control flow or a contraction
        reads it as an operand proper."""
        readers = (u for v in generator.results for u in self.users.get(v, ()))
        ops = [self.g.nodes[u].op for u in readers]
        return any(v in self.outputs for v in generator.results) or any(
            op.control or op.contraction for op in ops
        )

    def ordered(self) -> list[Group]:
        """Groups so that each comes after those it reads, in the model's order of their last
        members: one that waits for many (a gradient summed over layers) does not pull all that it
        waits for ahead of what else they feed, which would hold their results."""
        groups = {id(f): f for v in self.producer if (f := self.group_of(v))}
        order: list[Group] = []
        done: set[int] = set()
        for root in sorted(groups.values(), key=lambda f: f.members[-1]):
            stack = [(root, iter(self.feeders(root)))]
            while stack:
                group, rest = stack[-1]
                if id(group) in done:
                    stack.pop()
                    continue
                ahead = next((f for f in rest if id(f) not in done), None)
                if ahead is None:
                    done.add(id(group))
                    order.append(group)
                    stack.pop()
                else:
                    stack.append((ahead, iter(self.feeders(ahead))))
        return order

    def feeders(self, group: Group) -> list[Group]:
        found = (self.group_of(v) for n in self.members(group) for v in n.op.operands)
        return [f for f in dict.fromkeys(found) if f is not None and f is not group]

    def fused(self, group: Group) -> Node:
        """The group as one node: its body in the model's order, generators it reads repeated."""
        nodes = [self.g.nodes[i] for i in group.members]
        made = {v for n in nodes for v in n.results}
        stored = {v for n in nodes if n.op.contraction for v in n.op.operands}
        generators: dict[int, Node] = {}
        args: dict[Value, None] = {}
        for node in nodes:
            for v in node.op.operands:
                i = self.producer.get(v)
                if v in made:
                    continue
                generator = i is not None and isinstance(self.g.nodes[i].op, t.Generating)
                if i is not None and generator and v not in stored:
                    generators[i] = self.g.nodes[i]
                else:
                    args[v] = None
        inside = set(group.members)
        outputs = [
            v
            for n in nodes
            for v in n.results
            if v in self.outputs or any(u not in inside for u in self.users.get(v, ()))
        ]
        if not outputs:  # nobody reads it: all its results, as the model has them
            outputs = list(nodes[-1].results)
        everything = (*(generators[i] for i in sorted(generators)), *nodes)
        body = Graph(Level.graph, "", tuple(args), (), everything, tuple(outputs))
        named = (*nodes, *(generators[i] for i in sorted(generators)))  # what it is for, first
        locs = tuple(dict.fromkeys(loc for n in named for loc in n.locs))
        return Node(t.Fused(tuple(args), body), tuple(outputs), locs)
