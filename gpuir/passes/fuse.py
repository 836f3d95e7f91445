"""Groups tensor ops into launches: what one kernel can do without going through memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import get_args

from gpuir.fusion.flow import Flow
from gpuir.fusion.groups import Groups
from gpuir.fusion.launch import is_call, is_unpacking, weights
from gpuir.ir.build import begin, within
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Level, Node, Op, Value
from gpuir.ir.phases import Phase, phase_of
from gpuir.ir.types import f8e4m3, f8e5m2, i8, u8
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
    axes of the same cells. The dequantisation of a weight joins the contraction that reads it,
    and that of what a contraction quantised is done where it is read.
    Arithmetic on one index joins the gather that reads it, and so does the sum that a model node
    makes of the rows it gathers. A slice that pointwise ops of its own model node alone read (a
    gate of a recurrent cell) is a pointwise op: their kernel reads it in place. Chains of other
    layout ops make one group. The backward pass joins no launch of the forward pass.

    `rules` says who may join whom, as a software stack allows it: `all`, or pairs of kinds like
    `map>map map>reduce contraction>map`, what is made before what reads it, and chains of ops like
    `conv>add:same>relu` that the stack has one kernel for (passes/chains.py). Without any (`none`)
    only the ops of one model node share a launch. `max_ops` bounds the ops of a group. `cut` names
    values that are read from memory alone, with patterns (`/layer.*/Add_output_0`) and spaces
    between: no launch makes one and reads it.
    """

    max_ops: int = 64
    rules: str = "all"
    cut: str = ""

    name = "fuse"
    takes = Level.graph
    gives = Level.fused

    def __post_init__(self) -> None:
        if self.max_ops < 1:
            raise UsageError(
                "pass 'fuse': max_ops is out of range",
                expected="max_ops=1 or more",
                found=f"max_ops={self.max_ops}",
            )
        for rule in () if self.rules in ("all", "none") else self.rules.split():
            words = rule.split(">")
            if len(words) < 2 or (len(words) > 2 and set(words) <= set(KINDS)):
                raise UsageError(
                    "pass 'fuse': a rule is not valid",
                    expected="all, none, or rules with spaces between them: map>map "
                    "conv>add:same>relu",
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
class NodeGroup:
    """Nodes that will share a launch, by their places in the graph."""

    kind: t.Fusing
    items: list[int]
    shape: tuple[int, ...]  # what each cell of its nest stands for: a pointwise op must fit it
    axes: tuple[int, ...] = ()  # of a reduce group
    phase: Phase | None = None
    waits: set[int] = field(default_factory=set[int], init=False)

    @property
    def outer(self) -> tuple[int, ...]:
        """The shape of a reduce group's per-row results, reduced axes kept as 1."""
        return tuple(1 if i in self.axes else n for i, n in enumerate(self.shape))


def kind_of(op: Op) -> t.Fusing:
    return op.fuses if isinstance(op, t.TensorOp) else "alone"


def widens(op: Op) -> bool:
    """Whether an op turns codes of 8 bits into numbers to compute with: what reads them does that,
    and they lie in memory as they are."""
    match op:
        case t.Cast(x, dtype):
            narrow = x.type.dtype
            return narrow in (i8, u8, f8e4m3, f8e5m2) and dtype.is_float
        case _:
            return False


class _Fuser:
    def __init__(self, g: Graph, options: Fuse):
        self.g, self.options = g, options
        self.flow = Flow(g)
        self.users = self.flow.readers
        self.groups = Groups[NodeGroup](self.flow.reading)
        self.params = set(g.params)
        self.pairs = options.pairs
        self.unit = units(self.flow, options.chains)
        made = (v for node in g.nodes for v in node.results) if options.cut else ()
        patterns = options.cut.split()
        self.cut = {v for v in made if any(fnmatchcase(v.name, p) for p in patterns)}

    # -- the walk

    def run(self) -> Graph:
        for i, node in enumerate(self.g.nodes):
            if isinstance(node.op, t.Generating):
                continue  # repeated in each group that reads it
            group = self.join(i, node.op) or self.start(i, node.op)
            if node.op.contraction and group.items == [i]:
                for weight in weights(node.op):
                    self.take_weight(group, weight)
        return self.build()

    def put(self, group: NodeGroup, items: Iterable[int]) -> None:
        """Puts nodes into a group, from wherever they were."""
        items = sorted(items)
        group.items = sorted({*group.items, *items})
        group.waits.update(*map(self.flow.before, items))
        self.groups.put(group, items)

    def start(self, i: int, op: Op) -> NodeGroup:
        kind = kind_of(op)
        shape = self.shape(i)
        phase = phase_of(self.g.nodes[i])
        if not isinstance(op, t.Reducing) or kind != "reduce":
            kind = "map" if self.is_read_in_place(i) else kind
            group = NodeGroup(kind, [i], shape, phase=phase)
            self.put(group, [i])
            if isinstance(op, t.Gather):
                self.take_index(group, op)
            return group
        x = op.operands[0]
        group = NodeGroup(kind, [i], x.type.shape, op.reduced_axes(), phase)
        self.put(group, [i])
        for v in op.operands:
            feeder = self.group_of(v)
            if feeder and feeder.kind == "map" and feeder.shape == group.shape:
                self.merge(feeder, group)
        return group

    def is_read_in_place(self, i: int) -> bool:
        """Whether node i slices what the pointwise ops of its own model node read, and no others
        do: what a model node does with its parts is no launch of its own."""
        node = self.g.nodes[i]
        if not isinstance(node.op, t.Slice) or node.results[0] in self.flow.outputs:
            return False
        readers = [self.g.nodes[u] for u in self.users.get(node.results[0], ())]
        same = all(r.locs == node.locs and isinstance(r.op, t.Pointwise) for r in readers)
        return bool(readers) and same and all(step == 1 for step in node.op.steps)

    def take_index(self, group: NodeGroup, op: t.Gather) -> None:
        """The pointwise ops on one number that make a gather's index, for it alone, join it."""
        feeder = self.group_of(op.indices)
        if feeder is None or feeder.kind != "map" or op.indices.type.size != 1:
            return
        if not self.may_share(feeder.items, group.items):
            return
        if feeder.phase == group.phase and self.is_private(feeder, group.items[0]):
            self.put(group, feeder.items)

    def group_of(self, v: Value) -> NodeGroup | None:
        """The group that makes `v`; None for inputs, params and generators."""
        return self.groups.of.get(self.flow.makers.get(v, -1))

    def shape(self, i: int) -> tuple[int, ...]:
        """The shape of node i's first result."""
        results = self.g.nodes[i].results
        return results[0].type.shape if results else ()

    def members(self, group: NodeGroup) -> Iterator[Node]:
        return (self.g.nodes[i] for i in group.items)

    # -- joining

    def may_share(self, makers: list[int], readers: list[int]) -> bool:
        """Whether the rules let what these nodes make be read in their own launch."""
        if self.pairs is None and not self.cut:
            return True
        nodes = self.g.nodes
        inside = set(readers)
        for v in (v for i in makers for v in nodes[i].results if v in self.cut):
            if not inside.isdisjoint(self.users.get(v, ())):
                return False
        if self.pairs is None:
            return True
        for i in makers:
            for j in {u for v in nodes[i].results for u in self.users.get(v, ())} & inside:
                pair = kind_of(nodes[i].op), kind_of(nodes[j].op)
                if self.unit[i] != self.unit[j] and pair not in self.pairs:
                    return False
        return True

    def join(self, i: int, op: Op) -> NodeGroup | None:
        """Puts node i into the group of one of its operands, if any may have it."""
        if self.is_read_in_place(i):
            return None
        kind = kind_of(op)
        feeders = list(dict.fromkeys(f for v in op.operands if (f := self.group_of(v))))
        rank = {"contraction": 0, "reduce": 1, "map": 2, "layout": 3}
        # of equals, first one that others read too: it cannot be merged into another
        if len(feeders) > 1:
            feeders.sort(key=lambda f: (rank.get(f.kind, 4), self.is_private(f, i)))
        for group in feeders:
            if self.accepts(group, i, op, kind) and not self.groups.leads(
                group, self.flow.before(i)
            ):
                self.put(group, [i])
                if kind == "map" and group.kind in ("map", "reduce", "contraction"):
                    for other in feeders:
                        if other is not group and other.kind == "map":
                            self.merge(other, group)
                if kind == "reduce":
                    for other in feeders:
                        if other is not group and other.shape == group.shape:
                            self.merge(other, group)
                return group
        return None

    def accepts(self, group: NodeGroup, i: int, op: Op, kind: t.Fusing) -> bool:
        if len(group.items) >= self.options.max_ops:
            return False
        if group.phase != phase_of(self.g.nodes[i]) or not self.may_share(group.items, [i]):
            return False
        shape = self.shape(i)
        made = (self.flow.makers.get(v) for v in op.operands)
        in_place = any(j is not None and self.is_read_in_place(j) for j in made)
        match group.kind, kind:
            case "map", "map":
                return shape == group.shape
            case _, "map" if in_place:
                return False
            case "contraction", "map":
                single = all(len(n.results) == 1 for n in self.members(group))
                fits = shape == group.shape and single and not widens(op)
                return fits and self.is_closed(group, i)
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

    def is_bag(self, group: NodeGroup, i: int) -> bool:
        """Whether node i combines the rows that a gather of its own model node picks: a bag of
        embeddings, which one kernel sums as it reads."""
        node, gather = self.g.nodes[i], self.g.nodes[group.items[-1]]
        if not (isinstance(node.op, t.Reduce) and isinstance(gather.op, t.Gather)):
            return False
        rows = tuple(range(gather.op.indices.type.rank))[-1:]
        same = node.op.x == gather.results[0] and node.locs == gather.locs
        return same and gather.op.axis == 0 and node.op.axes == rows and self.is_closed(group, i)

    def is_private(self, group: NodeGroup, i: int) -> bool:
        """Whether only the group itself and node i read what it makes."""
        return not any(self.flow.leaving(group.items, {i, *group.items}))

    def is_closed(self, group: NodeGroup, i: int) -> bool:
        """Whether what the group makes is read only inside it and by node i: nothing to store. The
        rest of a diamond that node i begins counts as inside a contraction's group."""
        made = [v for node in self.members(group) for v in node.results]
        readers = {user for v in made for user in self.users.get(v, ())} - {i, *group.items}
        if any(v in self.flow.outputs for v in made):
            return False
        return not readers or (group.kind == "contraction" and self.will_join(group, readers, i))

    def will_join(self, group: NodeGroup, readers: set[int], i: int) -> bool:
        """Whether later readers of the group are pointwise ops on the way to a diamond's end: their
        shapes fit, and all they read is in the group, known before it, or made on such a way."""
        known = {i, *group.items}
        first = group.items[0]
        ways = list(readers)
        while ways:
            at = ways.pop()
            node = self.g.nodes[at]
            if at < i or kind_of(node.op) != "map" or self.shape(at) != group.shape:
                return False
            if not self.cut.isdisjoint(node.op.operands):
                return False
            known.add(at)
            for v in node.op.operands:
                made = self.flow.makers.get(v)
                if made is None or made < first or made in known:
                    continue
                if isinstance(self.g.nodes[made].op, t.Generating):
                    continue
                if at - made > self.options.max_ops:
                    return False
                ways.append(made)
        return True

    def merge(self, feeder: NodeGroup, group: NodeGroup) -> None:
        """Takes a pointwise group into another that is its only reader. A contraction takes it into
        its epilogue alone: what the product itself reads has to be there before."""
        if feeder is group or len(feeder.items) + len(group.items) > self.options.max_ops:
            return
        if feeder.kind != "map" or not self.fits(feeder.shape, group):
            return
        if feeder.phase != group.phase or not self.may_share(feeder.items, group.items):
            return
        if group.kind != "map" and any(isinstance(n.op, t.Slice) for n in self.members(feeder)):
            return
        product = {v for n in self.members(group) if n.op.contraction for v in n.op.operands}
        if not product.isdisjoint(v for n in self.members(feeder) for v in n.results):
            return
        if any(self.flow.leaving(feeder.items, {*group.items, *feeder.items})):
            return
        if not self.groups.leads(group, feeder.waits.difference(feeder.items)):
            self.put(group, feeder.items)

    def fits(self, shape: tuple[int, ...], group: NodeGroup) -> bool:
        """Whether a kernel may compute cells of this shape where it needs them: one for each of
        its own, or fewer that are broadcast (a scaled bias), which costs it next to nothing."""
        if shape in (group.shape, group.outer):
            return True
        if group.kind not in ("contraction", "map") or len(shape) > len(group.shape):
            return False
        tail = group.shape[len(group.shape) - len(shape) :]
        return all(n in (1, m) for n, m in zip(shape, tail, strict=True))

    def take_weight(self, group: NodeGroup, weight: Value) -> None:
        """The ops that unpack a contraction's weight, for it alone, join the contraction. What the
        rules leave to another launch (scales that are quantised themselves) is read from memory."""
        if weight not in self.flow.known:
            return
        taken: set[int] = set()
        stack = [(weight, group.items[0])]
        while stack:
            v, reader = stack.pop()
            i = self.flow.makers.get(v)
            if i is None or self.flow.is_generated(v) or not self.may_share([i], [reader]):
                continue
            if i not in taken:
                taken.add(i)
                stack += [(w, i) for w in self.g.nodes[i].op.operands]
        nodes = [self.g.nodes[i] for i in sorted(taken)]
        if not is_unpacking(nodes, weight, self.params, self.flow.known):
            return
        inside = {*taken, *group.items}
        if any(self.flow.leaving(taken, inside)):
            return
        feeders = {self.groups.of[i] for i in taken}
        if all(f.phase == group.phase and inside.issuperset(f.items) for f in feeders):
            self.put(group, taken)

    # -- the result

    def build(self) -> Graph:
        g = self.g
        b = begin(g, Level.fused)
        for i, node in enumerate(g.nodes):
            if isinstance(node.op, t.Generating):
                if self.is_stored(node):
                    b.put(self.flow.fused([i], node.results))
                elif not any(v in self.users for v in node.results):
                    b.folded += node.locs
        for group in self.groups.ordered():
            node = g.nodes[group.items[0]]
            if node.op.control:
                op = within(node.op, lambda region: _Fuser(region, self.options).run(), b.folded)
                b.put(Node(op, node.results, node.locs))
                continue
            results = [*self.flow.leaving(group.items, set(group.items))]
            # nobody reads it: all its results, as the model has them
            b.put(self.flow.fused(group.items, results or g.nodes[group.items[-1]].results))
        return b.finish(g.outputs)

    def is_stored(self, generator: Node) -> bool:
        """Whether a constant needs memory: as an output, or where control flow or a library's call
        reads it as an operand proper."""
        readers = (u for v in generator.results for u in self.users.get(v, ()))
        ops = [self.g.nodes[u].op for u in readers]
        return not self.flow.outputs.isdisjoint(generator.results) or any(
            op.control or is_call(op) for op in ops
        )
