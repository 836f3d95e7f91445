"""Groups tensor ops into launches as a compiler that writes loops does: PyTorch's Inductor."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace

from gpuir.fusion.flow import Flow
from gpuir.fusion.groups import Groups
from gpuir.fusion.launch import fused
from gpuir.ir.build import Builder, begin, within
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass
from gpuir.stacks.inductor.loops.launches import LoopFusion, LoopGroup
from gpuir.stacks.inductor.loops.storage import StoredValues
from gpuir.stacks.inductor.loops.trips import taken_apart


@dataclass(frozen=True)
class FuseLoops(Pass):
    """Groups ops into `t.fused` by the loops they run in, as torch.compile's Inductor does.

    First what each loop computes: pointwise ops, layout ops, indexing and joining are computed
    where they are read, in every loop that does (twice, when two do). Stored are results of
    reductions and of library calls (products, convolutions, attention, sorts), operands of library
    calls, outputs, and what has several readers and would read more than `reads` tensors or do more
    than `ops` operations again; or, with one reader, more than `most` reads. A sum of fewer than
    `unroll` terms is pointwise. A join of more than `parts`, or one that not only pointwise ops
    read, has its parts written side by side instead, or copied there.

    Then which loops are one launch: those that pass a tensor on at the index it is written at, or
    read the same one at the same index, and run over as many cells (of a reduction: over all of
    them, or one a row), most shared bytes first, two reductions only over the same rows. `far`
    loops apart nothing is fused for a shared read alone; `max_loops` bound a launch. `aggressive`
    fuses pointwise loops that read other parts of one tensor too, as Inductor does if told to. A
    bias joins its product unless pointwise loops alone read the result, and the scales of a product
    of 8-bit numbers join it, with what rounds it to 16 bits. Nothing joins a library call else.

    (torch 2.13: torch/_inductor/graph.py, run_node; ir.py, StorageBox; scheduler.py, can_fuse and
    score_fusion; codegen/simd.py, can_fuse; fx_passes/post_grad.py, should_prefer_unfused_addmm;
    the numbers and aggressive_fusion are those of config.py.)
    """

    reads: int = 4
    most: int = 8
    ops: int = 30
    unroll: int = 8
    parts: int = 8
    far: int = 64
    max_loops: int = 64
    aggressive: bool = False

    name = "fuse_loops"
    takes = Level.graph
    gives = Level.fused

    def run(self, g: Graph) -> Graph:
        flow = Flow(g)
        storage = StoredValues(flow, self)
        storage.run()
        launches = LoopFusion(grouped(storage), storage.rows, self).run()
        return Writer(flow, self, storage, launches).run()


def grouped(storage: StoredValues) -> Groups[LoopGroup]:
    """The loops, each by itself, with those that it waits for."""
    makers = {v: i for i, loop in enumerate(storage.loops) for v in loop.writes}
    readers: dict[int, list[int]] = {}
    groups = Groups[LoopGroup](readers)
    for i, loop in enumerate(storage.loops):
        read = (base for v in loop.reads for base in storage.bases(v))
        waits = frozenset(makers[v] for v in read if v in makers) - {i}
        for maker in waits:
            readers.setdefault(maker, []).append(i)
        groups.put(replace(loop, waits=waits), loop.items)
    return groups


@dataclass
class Writer:
    """Writes launches down as a graph, each with the views that it reads ahead of it."""

    flow: Flow
    options: FuseLoops
    storage: StoredValues
    launches: list[LoopGroup]
    made: set[Value] = field(default_factory=set[Value], init=False)
    kept: set[int] = field(default_factory=set[int], init=False)

    def run(self) -> Graph:
        g, viewed = self.flow.graph, self.storage.viewed
        b = begin(g, Level.fused)
        wanted = {*g.outputs, *viewed, *map(self.storage.base, viewed)}
        wanted.update(*self.storage.joined.values())
        wanted.update(*(launch.reads for launch in self.launches))
        for i, node in enumerate(g.nodes):
            if isinstance(node.op, t.Generating) and not wanted.isdisjoint(node.results):
                b.put(self.fused((i,), set(node.results)))
        self.made = {*g.inputs, *g.params}
        for launch in self.launches:
            self.put_views(b, launch.reads)
            self.put(b, launch, wanted)
        self.put_views(b, g.outputs)
        there = {loc for n in b.nodes for loc in n.locs}
        lost = (n for i, n in enumerate(self.flow.nodes) if i not in self.kept)
        b.folded += [loc for n in lost for loc in n.locs if loc not in there]
        return b.finish(g.outputs)

    def put(self, b: Builder, launch: LoopGroup, wanted: set[Value]) -> None:
        node = self.flow.nodes[launch.members[0]]
        if node.op.control:
            op = within(node.op, self.options.run, b.folded)
            if isinstance(op, t.Loop):
                op = replace(op, body=taken_apart(op.body))
            b.put(Node(op, node.results, node.locs))
        else:
            b.put(self.fused(launch.members, (launch.writes & wanted) or launch.writes))
        self.kept.update(launch.members)
        self.made |= launch.writes

    def put_views(self, b: Builder, values: Iterable[Value]) -> None:
        """Views that these values are of what is made."""
        for v in self.flow.in_order(values):
            if v in self.made:
                continue
            if v in self.storage.joined:
                self.put_join(b, v)
            elif v in self.storage.viewed:
                self.put_views(b, [self.storage.base(v)])
                self.put_view(b, v)

    def put_join(self, b: Builder, v: Value) -> None:
        """What parts that lie side by side are together."""
        i = self.flow.makers[v]
        node, parts = self.flow.nodes[i], self.storage.joined[v]
        assert isinstance(node.op, t.Concat), "the storage joins nothing else"
        op = replace(node.op, args=parts, in_place=True)
        b.put(fused([replace(node, op=op)], [v]))
        self.kept.add(i)
        self.made.add(v)

    def put_view(self, b: Builder, v: Value) -> None:
        members, x = list[int](), v
        while x not in self.made:
            i = self.flow.makers[x]
            members.append(i)
            x = self.flow.nodes[i].op.operands[0]
        b.put(self.fused(sorted(members), {v}))
        self.kept.update(members)
        self.made.add(v)

    def fused(self, members: Iterable[int], outputs: Container[Value]) -> Node:
        made = (v for i in members for v in self.flow.nodes[i].results)
        return self.flow.fused(members, [v for v in made if v in outputs])
