"""Groups tensor ops into launches as a compiler that writes loops does: PyTorch's Inductor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from typing import NamedTuple

from gpuir.ir.build import Builder, begin, within
from gpuir.ir.graph import Graph, Level, Node, Op, Value
from gpuir.ir.phases import phase_of
from gpuir.ops import tensor as t
from gpuir.ops.scalar import SCALARS
from gpuir.ops.strides import Strided, packed, viewed
from gpuir.passes.indices import (
    Index,
    Read,
    broadcast,
    broadcast_strides,
    index,
    joined,
    laid_out,
    spread,
)
from gpuir.passes.manager import Pass

GENERATORS = (t.Constant, t.Iota)
JOINING = (t.Concat, t.Pad, t.Resize, t.Pool)  # loops whose reads no strides can say
# What Inductor takes apart into several ops that each read the operand (torch/_inductor/
# decomposition.py, torch/_decomp/decompositions.py).
TWICE = ("gelu", "gelu_tanh", "silu", "hard_swish", "mish", "softplus", "leaky_relu", "elu")
INLINED = (*t.POINTWISE, *t.LAYOUT, *t.INDEXING, *JOINING)


@dataclass(frozen=True)
class FuseLoops(Pass):
    """Groups ops into `t.fused` by the loops they run in, as torch.compile's Inductor does.

    First what each loop computes: pointwise ops, layout ops, indexing and joining are computed
    where they are read, in every loop that does (twice, when two do). Stored are results of
    reductions and of library calls (products, convolutions, attention, sorts), operands of library
    calls, outputs, and what has several readers and would read more than `reads` tensors or do more
    than `ops` operations again; or, with one reader, more than `most` reads. A sum of `unroll`
    terms at most is pointwise.

    Then which loops are one launch: those that pass a tensor on at the index it is written at, or
    read the same one at the same index, and run over as many cells (of a reduction: over all of
    them, or one a row), most shared bytes first, two reductions only over the same rows. `far`
    loops apart nothing is fused for a shared read alone; `max_loops` bound a launch. A bias joins
    its product unless pointwise loops alone read the result. Nothing joins a library call else.

    (torch 2.13: torch/_inductor/graph.py, run_node; ir.py, StorageBox; scheduler.py, can_fuse and
    score_fusion; codegen/simd.py, can_fuse; fx_passes/post_grad.py, should_prefer_unfused_addmm;
    the numbers are those of config.py.)
    """

    reads: int = 4
    most: int = 8
    ops: int = 30
    unroll: int = 8
    far: int = 64
    max_loops: int = 64

    name = "fuse_loops"
    takes = Level.graph
    gives = Level.fused

    def run(self, g: Graph) -> Graph:
        return _Fuser(g, self).run()


class Sight(NamedTuple):
    """What one cell of a value takes to compute."""

    reads: frozenset[Read] = frozenset()
    ops: int = 0


@dataclass(eq=False)
class Launch:
    """Loops that will be one launch, or a library call."""

    members: list[int]  # places in the graph, in order
    writes: set[Value]
    reads: set[Value]
    cells: int = 1  # of a reduction, its rows
    row: int = 1  # cells of a row that a reduction runs over
    indices: frozenset[Index] = frozenset()
    irregular: frozenset[Value] = frozenset()  # read in a way that no index says
    library: bool = False
    partial: bool = False  # a sum of which another is taken: its rows are not those of the tensor
    backward: bool = False
    loops: int = 1
    first: int = 0
    last: int = 0
    into: Launch | None = field(default=None, repr=False)

    @property
    def is_reduction(self) -> bool:
        return self.row > 1


class _Fuser:
    def __init__(self, g: Graph, options: FuseLoops):
        self.g, self.options = g, options
        self.producer = {v: i for i, n in enumerate(g.nodes) for v in n.results}
        self.users = g.readers()
        self.outputs = set(g.outputs)
        self.sights: dict[Value, Sight] = {}
        self.stored: set[Value] = {*g.inputs, *g.params}
        self.rows: dict[Value, Value] = {}  # what has a cell for each row, by what is made of rows
        self.viewed: dict[Value, None] = {}  # layout results that have to be there
        self.launches: list[Launch] = []
        self.longest = 0  # from the first to the last loop of one launch
        self.maker: dict[Value, Launch] = {}

    def run(self) -> Graph:
        taken: set[int] = set()
        for i, node in enumerate(self.g.nodes):
            if i in taken or isinstance(node.op, GENERATORS):
                continue
            if self.is_bag(node):
                self.call(i, (), self.closure(i))
            elif self.is_inlined(node):
                self.inline(i, node)
            elif isinstance(node.op, (*t.REDUCING, *t.SCATTERING)):
                if isinstance(node.op, t.SCATTERING):
                    self.settle(node.op.operands[0])
                self.store(i)
            else:
                bias = self.bias_of(i, node)
                taken |= set(bias)
                self.call(i, bias, self.packed_weight(node))
        for v in self.g.outputs:
            self.settle(v)
        self.fuse()
        return self.build()

    # -- what each loop computes

    def is_inlined(self, node: Node) -> bool:
        op = node.op
        if isinstance(op, t.Routine):
            return op.fn == "random" and not op.args
        if isinstance(op, t.Reduce):
            terms = prod(op.x.type.shape[a] for a in op.axes)
            return terms == 1 or (terms <= self.options.unroll and node.results[0].type.size > 1)
        return isinstance(op, INLINED) and len(node.results) == 1

    def inline(self, i: int, node: Node) -> None:
        """Computed where it is read, unless that would repeat too much."""
        v = node.results[0]
        for x in node.op.operands if isinstance(node.op, t.Pool | t.Resize) else ():
            self.settle(x)
        sight = self.sights[v] = self.sight(node)
        reads, ops = len(sight.reads), sight.ops
        users = self.users.get(v, [])
        readers = sum(map(self.readings, users)) + (v in self.outputs)
        heavy = ops > self.options.ops
        called = any(self.g.nodes[u].op.contraction for u in users)
        if isinstance(node.op, t.LAYOUT) and not heavy:
            return
        if (
            reads > self.options.most
            or (readers > 1 and (heavy or reads > self.options.reads))
            or (readers > 1 and ((called and reads > 1) or (v in self.outputs)))
            or heavy
        ):
            self.store(i)

    def readings(self, i: int) -> int:
        """How many of Inductor's ops read the operand of node i."""
        op = self.g.nodes[i].op
        twice = isinstance(op, t.Softmax | t.Normalize) or (
            isinstance(op, t.Map) and op.fn in TWICE
        )
        return 2 if twice else 1

    def sight(self, node: Node) -> Sight:
        """What a cell of this node's result reads and does."""
        shape = node.results[0].type.shape
        op, place = node.op, self.producer[node.results[0]]
        reads: set[Read] = set()
        for x in op.operands:
            seen = self.seen(x)
            match op:
                case t.Map() | t.Cast() | t.Bitcast():
                    reads |= {broadcast(r, x.type.shape, shape) for r in seen.reads}
                case t.Gather(table, indices, axis) if x == indices and x != table:
                    reads |= {spread(r, axis, len(shape), x.type.rank) for r in seen.reads}
                case t.Reshape() | t.Transpose() | t.Broadcast() | t.Slice() | t.Parts():
                    reads |= {laid_out(r, x.type.shape, op) for r in seen.reads}
                case t.Reduce():
                    terms = x.type.size // max(node.results[0].type.size, 1)
                    reads |= {Read(r.leaf, None, k) for r in seen.reads for k in range(terms)}
                case t.Pool():
                    terms = prod(op.window)
                    reads |= {Read(r.leaf, None, k) for r in seen.reads for k in range(terms)}
                case t.Resize() if op.mode != "nearest":
                    reads |= {Read(r.leaf, None, k) for r in seen.reads for k in range(4)}
                case t.Concat(axis=axis):
                    reads |= {joined(r, axis, place) for r in seen.reads}
                case _:
                    reads |= {Read(r.leaf, None, place) for r in seen.reads}
        before = sum(self.seen(x).ops for x in dict.fromkeys(op.operands))
        return Sight(frozenset(reads), operations(op) + before)

    def seen(self, v: Value) -> Sight:
        """What it takes to have a cell of `v`: a read, where it is stored."""
        if v in self.stored:
            reads = {Read(v, tuple(packed(v.type).strides))}
            if v in self.rows:
                row = self.rows[v]
                moving = tuple(packed(row.type).strides)
                own = zip(row.type.shape, moving, strict=True)
                reads.add(Read(row, tuple(0 if n == 1 else s for n, s in own)))
            return Sight(frozenset(reads), 1)
        return self.sights.get(v, Sight())

    def store(self, i: int, extra: Iterable[int] = ()) -> None:
        """Makes the loop whose results are node i's."""
        node = self.g.nodes[i]
        if any(v in self.stored for v in node.results):
            return
        op, type = node.op, node.results[0].type
        cells, row = type.size, 1
        shape = type.shape
        if isinstance(op, t.REDUCING) and not self.is_inlined(node):
            x = op.operands[0]
            shape = x.type.shape
            row = prod(shape[a] for a in t.reduced_axes(op))
            if isinstance(op, t.Normalize | t.NormalizeGradient):
                row //= op.groups or 1
            cells = x.type.size // max(row, 1)
        elif isinstance(op, t.SCATTERING):
            cells, shape = op.updates.type.size, op.updates.type.shape
        reads: set[Read] = set()
        for x in op.operands if not self.is_inlined(node) else ():
            reads |= {broadcast(r, x.type.shape, shape) for r in self.seen(x).reads}
        if self.is_inlined(node):
            reads = set(self.sights[node.results[0]].reads)
        places = {r: index(r, shape) for r in reads}
        indices = {at for at in places.values() if at is not None}
        leaves = {r.leaf for r in reads} - set(self.rows.values())
        irregular = {r.leaf for r, at in places.items() if at is None}
        if row > 1 and isinstance(op, t.Softmax | t.Normalize) and type.shape == shape:
            axes = t.reduced_axes(op)
            kept = tuple(1 if a in axes else n for a, n in enumerate(shape))
            if prod(kept) == cells:
                self.rows[node.results[0]] = Value(
                    f"{node.results[0].name}/row", type.with_shape(kept)
                )
        self.put(
            Launch(
                self.closure(i),
                set(node.results),
                leaves,
                cells,
                row,
                frozenset(indices),
                frozenset(irregular),
                partial=self.is_partial(node),
            )
        )

    def is_partial(self, node: Node) -> bool:
        """Whether a reduction's results are reduced further, by the same function."""
        users = [self.g.nodes[u].op for u in self.users.get(node.results[0], ())]
        match node.op, users:
            case t.Reduce(fn), [t.Reduce(again)]:
                return fn == again
            case _:
                return False

    def is_bag(self, node: Node) -> bool:
        """Whether a node sums the rows that a gather of its own model node picks: a bag of
        embeddings, which is a call."""
        match node.op:
            case t.Reduce(x=x) | t.ScatterND(updates=x):
                pass
            case _:
                return False
        while (j := self.producer.get(x)) is not None:
            made = self.g.nodes[j]
            if made.locs != node.locs or not isinstance(made.op, (*t.LAYOUT, t.Gather)):
                return False
            if isinstance(made.op, t.Gather):
                return True
            x = made.op.operands[0]
        return False

    def call(self, i: int, epilogue: tuple[int, ...], before: Iterable[int] = ()) -> None:
        """A library call, with what it computes before and after: its operands are in memory."""
        node, members = self.g.nodes[i], sorted({*before, i, *epilogue})
        made = {v for j in members for v in self.g.nodes[j].results}
        read = (x for j in members for x in self.g.nodes[j].op.operands)
        reads = dict.fromkeys(x for x in read if x not in made and not self.is_repeated(x, node))
        for x in reads:
            self.settle(x)
        results = self.g.nodes[members[-1]].results
        self.put(Launch(members, set(results), set(reads), library=True))

    def is_repeated(self, v: Value, reader: Node) -> bool:
        """Whether what makes v is repeated in the launch that reads it."""
        i = self.producer.get(v)
        generated = i is not None and isinstance(self.g.nodes[i].op, GENERATORS)
        return generated and not (reader.op.contraction or reader.op.control)

    def put(self, launch: Launch) -> None:
        launch.first = launch.last = len(self.launches)
        launch.backward = phase_of(self.g.nodes[launch.members[-1]]) is not None
        self.launches.append(launch)
        self.stored |= launch.writes
        self.maker.update(dict.fromkeys(launch.writes, launch))
        for v in launch.writes:
            self.see_again(v)

    def see_again(self, v: Value) -> None:
        """What was to compute a value where it is read loads it, now that it is in memory."""
        waiting = set(self.users.get(v, ()))
        while waiting:
            u = min(waiting)
            waiting.remove(u)
            w = self.g.nodes[u].results[0]
            if w in self.sights and w not in self.stored:
                self.sights[w] = self.sight(self.g.nodes[u])
                waiting.update(self.users.get(w, ()))

    def settle(self, v: Value) -> None:
        """Has `v` in memory: as a view of what is there, where strides can say it."""
        i = self.producer.get(v)
        if v in self.stored or i is None or isinstance(self.g.nodes[i].op, GENERATORS):
            return
        base, chain = v, list[Op]()
        while (j := self.producer.get(base)) is not None and base not in self.stored:
            op = self.g.nodes[j].op
            if not isinstance(op, t.LAYOUT):
                break
            chain.append(op)
            base = op.operands[0]
        x: Strided | None = packed(base.type)
        for op in reversed(chain):
            x = None if x is None else viewed(x, op)
        j = self.producer.get(base)
        generated = j is not None and isinstance(self.g.nodes[j].op, GENERATORS)
        if not chain or generated or x is None or 0 in broadcast_strides(x):
            self.store(i)
            return
        self.settle(base)
        self.viewed[v] = None

    def closure(self, i: int) -> list[int]:
        """Node i and all that is computed on the way to it."""
        found = {i}
        stack = [i]
        while stack:
            for v in self.g.nodes[stack.pop()].op.operands:
                j = self.producer.get(v)
                if j is None or j in found or v in self.stored:
                    continue
                if not isinstance(self.g.nodes[j].op, GENERATORS):
                    found.add(j)
                    stack.append(j)
        return sorted(found)

    def packed_weight(self, node: Node) -> list[int]:
        """What the model node of a product does to a weight in fewer bits, before it multiplies:
        then it is a call of a library that converts what it reads."""
        if not isinstance(node.op, t.Matmul) or (j := self.producer.get(node.op.b)) is None:
            return []
        found = [] if node.op.b in self.stored else self.closure(j)
        nodes = [self.g.nodes[i] for i in found]
        made = {v for n in nodes for v in n.results}
        ends = {v for n in nodes for v in n.op.operands} - made
        own = all(
            n.locs == node.locs and isinstance(n.op, (*t.POINTWISE, *t.LAYOUT)) for n in nodes
        )
        bits = node.op.b.type.dtype.bits
        fewer = ends <= set(self.g.params) and any(v.type.dtype.bits < bits for v in ends)
        return found if own and fewer else []

    def bias_of(self, i: int, node: Node) -> tuple[int, ...]:
        """The addition of a bias that the call of a product does itself."""
        users = self.users.get(node.results[0], []) if isinstance(node.op, t.Matmul) else []
        if len(users) != 1 or node.results[0] in self.outputs:
            return ()
        (j,) = users
        match self.g.nodes[j].op:
            case t.Map("add", (a, b)) if self.g.nodes[j].locs == node.locs:
                bias = b if a == node.results[0] else a
            case _:
                return ()
        if bias.type.rank != 1 or bias not in self.stored:
            return ()
        made = self.g.nodes[j].results[0]
        return () if self.is_read_pointwise(made, packed(made.type)) else (j,)

    def is_read_pointwise(self, v: Value, x: Strided) -> bool:
        """Whether pointwise ops alone read a value that lies like `x`, through views or not."""
        if v in self.outputs:
            return False
        for u in self.users.get(v, ()):
            node = self.g.nodes[u]
            if isinstance(node.op, t.LAYOUT):
                y = viewed(x, node.op)  # None is a copy
                if y is not None and not self.is_read_pointwise(node.results[0], y):
                    return False
            elif not isinstance(node.op, t.POINTWISE):
                return False
        return True

    # -- which loops are one launch

    def fuse(self) -> None:
        """Fuses pairs, those first that share most, until none is left that may."""
        for _ in range(10):  # scheduler.py, fuse_nodes
            pairs = sorted(self.pairs(), key=lambda p: p[0])
            fused = False
            for _, a, b in pairs:
                a, b = root(a), root(b)
                if a is b:
                    continue
                if b.first < a.first:
                    a, b = b, a
                if self.score(a, b) and not self.is_cyclic(a, b):
                    self.merge(a, b)
                    fused = True
            if not fused:
                return

    def pairs(self) -> Iterator[tuple[tuple[int, ...], Launch, Launch]]:
        """Launches that touch the same tensor and may be one, each with its place in the queue."""
        touching: dict[Value, dict[int, Launch]] = {}
        for launch in self.launches:
            if launch.into is None and not launch.library:
                for v in (*launch.writes, *launch.reads):
                    touching.setdefault(v, {})[launch.first] = launch
        done: set[tuple[int, int]] = set()
        for group in touching.values():
            for (i, a), (j, b) in combinations(sorted(group.items()), 2):
                # what every layer reads has too many readers to try each with each
                if (i, j) in done or j - i > 8 * self.options.far:
                    continue
                done.add((i, j))
                if score := self.score(a, b):
                    alike = a.is_reduction == b.is_reduction
                    apart = max(abs(a.first - b.first), abs(a.last - b.last))
                    yield (-alike, -score, apart, i, j), a, b

    def score(self, a: Launch, b: Launch) -> int:
        """The bytes that two launches need not move if they are one; 0 if they may not be. `a` is
        the earlier."""
        if a.library or b.library or a.backward != b.backward:
            return 0
        if a.loops + b.loops > self.options.max_loops or not fits(a, b):
            return 0
        passed = a.writes & b.reads
        if any(isinstance(self.g.nodes[self.producer[v]].op, t.SCATTERING) for v in passed):
            return 0
        if passed:
            read_as = {self.rows.get(v, v) for v in passed}  # a row may be read in any order
            if read_as & b.irregular:
                return 0
            if any(at.leaf in read_as and not is_own_index(at, a, b) for at in b.indices):
                return 0
            return sum(v.type.nbytes for v in passed)
        shared = {at.leaf for at in a.indices & b.indices}
        score = int(sum(v.type.nbytes for v in shared))
        apart = max(abs(a.first - b.first), abs(a.last - b.last))
        return score if score >= 10 and apart <= self.options.far else 0

    def is_cyclic(self, a: Launch, b: Launch) -> bool:
        """Whether something between the two waits for one and is waited for by the other. What ends
        before the one begins waits for it only where a launch of others reaches over it."""
        for source, sink in ((a, b), (b, a)):
            seen: set[Launch] = set()
            stack = [x for x in self.feeders(sink) if x is not source]
            while stack:
                launch = stack.pop()
                if launch in seen or launch.last < source.first - self.longest:
                    continue
                seen.add(launch)
                found = self.feeders(launch)
                if source in found:
                    return True
                stack += found
        return False

    def feeders(self, launch: Launch) -> list[Launch]:
        """The launches that make what this one reads, in order."""
        found = {root(self.maker[v]) for x in launch.reads if (v := self.base(x)) in self.maker}
        return sorted(found - {launch}, key=lambda x: x.last)

    def base(self, v: Value) -> Value:
        """What a layout result is a view of, in memory."""
        while v not in self.stored:
            i = self.producer.get(v)
            if i is None or not isinstance(self.g.nodes[i].op, t.LAYOUT):
                break
            v = self.g.nodes[i].op.operands[0]
        return v

    def merge(self, a: Launch, b: Launch) -> None:
        """Takes b into a."""
        b.into = a
        a.members = sorted({*a.members, *b.members})
        a.writes |= b.writes
        a.reads = (a.reads | b.reads) - a.writes
        if not a.is_reduction and b.is_reduction:
            a.cells, a.row = b.cells, b.row
        a.indices |= b.indices
        a.irregular |= b.irregular
        a.partial |= b.partial
        a.loops += b.loops
        a.first, a.last = min(a.first, b.first), max(a.last, b.last)
        self.longest = max(self.longest, a.last - a.first)

    # -- the result

    def build(self) -> Graph:
        g = self.g
        b = begin(g, Level.fused)
        launches = [launch for launch in self.launches if launch.into is None]
        wanted = {*g.outputs, *self.viewed, *map(self.base, self.viewed)}
        wanted.update(*(launch.reads for launch in launches))
        for i, node in enumerate(g.nodes):
            if not isinstance(node.op, GENERATORS):
                continue
            if any(v in wanted for v in node.results):
                b.put(self.fused([i], set(node.results)))
        made = {*g.inputs, *g.params}
        kept: set[int] = set()
        for launch in self.ordered(launches):
            self.put_views(b, launch.reads, made, kept)
            node = g.nodes[launch.members[0]]
            kept.update(launch.members)
            if node.op.control:
                op = within(node.op, lambda region: _Fuser(region, self.options).run(), b.folded)
                b.put(Node(op, node.results, node.locs))
            else:
                b.put(self.fused(launch.members, (launch.writes & wanted) or launch.writes))
            made |= launch.writes
        self.put_views(b, g.outputs, made, kept)
        lost = [i for i in range(len(g.nodes)) if i not in kept]
        there = {loc for n in b.nodes for loc in n.locs}
        b.folded += [loc for i in lost for loc in g.nodes[i].locs if loc not in there]
        return b.finish(g.outputs)

    def put_views(
        self, b: Builder, values: Iterable[Value], made: set[Value], kept: set[int]
    ) -> None:
        """Views that these values are of what is made."""
        for v in self.in_order(values):
            if v not in self.viewed or v in made:
                continue
            members, x = list[int](), v
            while x not in made:
                i = self.producer[x]
                members.append(i)
                x = self.g.nodes[i].op.operands[0]
            b.put(self.fused(sorted(members), {v}))
            kept.update(members)
            made.add(v)

    def in_order(self, values: Iterable[Value]) -> list[Value]:
        return sorted((v for v in values if v in self.producer), key=self.producer.__getitem__)

    def ordered(self, launches: list[Launch]) -> list[Launch]:
        """Launches so that each comes after those it reads, in the model's order of their last."""
        order: dict[Launch, None] = {}
        for start in sorted(launches, key=lambda x: x.last):
            stack = [(start, iter(self.feeders(start)))]
            while stack:
                launch, rest = stack[-1]
                ahead = next((x for x in rest if x not in order), None)
                if launch in order or ahead is None:
                    order[launch] = None
                    stack.pop()
                else:
                    stack.append((ahead, iter(self.feeders(ahead))))
        return list(order)

    def fused(self, members: list[int], outputs: set[Value]) -> Node:
        """Nodes as one: a body in the model's order, the generators it reads repeated."""
        nodes = [self.g.nodes[i] for i in members]
        inside = {v for n in nodes for v in n.results}
        stored = {v for n in nodes if n.op.contraction for v in n.op.operands}
        generators: dict[int, Node] = {}
        args: dict[Value, None] = {}
        for node in nodes:
            for v in node.op.operands:
                i = self.producer.get(v)
                if v in inside:
                    continue
                if i is not None and isinstance(self.g.nodes[i].op, GENERATORS) and v not in stored:
                    generators[i] = self.g.nodes[i]
                else:
                    args[v] = None
        everything = (*(generators[i] for i in sorted(generators)), *nodes)
        results = tuple(v for n in nodes for v in n.results if v in outputs)
        body = Graph(Level.graph, "", tuple(args), (), everything, results)
        locs = tuple(dict.fromkeys(loc for n in everything for loc in n.locs))
        return Node(t.Fused(tuple(args), body), results, locs)


def operations(op: Op) -> int:
    """What one cell of an op's result takes to compute."""
    match op:
        case t.Map(fn):
            return SCALARS[fn].flops
        case _:
            return 0 if isinstance(op, t.LAYOUT) else 1


def root(launch: Launch) -> Launch:
    """The launch that one has gone into."""
    while launch.into is not None:
        launch = launch.into
    return launch


def is_own_index(at: Index, a: Launch, b: Launch) -> bool:
    """Whether what `a` writes is read by `b` in the trip that wrote it: cell by cell, in whatever
    order its loops then run, or row by row."""
    moving = sorted((d for d in at.dims if d[1]), key=lambda d: -d[1])
    step = 1
    for n, s in reversed(moving):
        if s != step:
            return False
        step *= n
    still = prod(n for n, s in at.dims if not s)
    return step == at.leaf.type.size and (still == 1 or still == max(a.row, b.row))


def fits(a: Launch, b: Launch) -> bool:
    """Whether two launches run over the same cells: of a reduction, all of them or one a row."""
    if a.is_reduction and b.is_reduction:
        return (a.cells, a.row) == (b.cells, b.row)
    if a.is_reduction or b.is_reduction:
        whole, map_ = (a, b) if a.is_reduction else (b, a)
        return map_.cells == whole.cells or (
            map_.cells == whole.cells * whole.row and not whole.partial
        )
    return a.cells == b.cells
