"""What a compiler that writes loops has in memory, and the loops that put it there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Protocol

from gpuir.fusion.flow import Flow
from gpuir.fusion.launch import is_call, is_unpacking
from gpuir.ir.graph import Node, Value
from gpuir.ir.phases import phase_of
from gpuir.ir.strides import Strided
from gpuir.ops import tensor as t
from gpuir.ops.strides import packed, viewed
from gpuir.stacks.inductor.channels_last import has_channels_innermost
from gpuir.stacks.inductor.loops.calls import (
    bias_of,
    inside_bags,
    is_bag,
    is_factor,
    rescaling,
)
from gpuir.stacks.inductor.loops.indices import (
    Read,
    broadcast,
    index,
    is_straight,
    row,
    through,
    whole,
    wide_strides,
)
from gpuir.stacks.inductor.loops.joins import is_cellwise, is_index, is_read_cellwise, is_roll
from gpuir.stacks.inductor.loops.launches import LoopGroup
from gpuir.stacks.inductor.loops.nests import Nest, is_in_groups, nest_of, operations, readings

INLINED = t.Pointwise | t.Layout | t.Indexing | t.Joining | t.Window
MOVABLE = t.Pointwise | t.Indexing | t.Joining | t.Window | t.Reducing  # may be written anywhere


class Thresholds(Protocol):
    """From where on a value is stored: options of the pass."""

    @property
    def reads(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def ops(self) -> int: ...
    @property
    def unroll(self) -> int: ...
    @property
    def parts(self) -> int: ...


class Sight(NamedTuple):
    """What one cell of a value takes to compute."""

    reads: frozenset[Read] = frozenset()
    ops: int = 0


@dataclass
class StoredValues:
    """Decides node by node, in the graph's order, what is computed where it is read and what is
    stored. In the end `loops` has a loop, or a call, for all that is stored; `viewed` the layout
    results that are views of it; `joined` the parts that lie side by side and are a value so;
    `rows` what has a cell for each row, by what is made of rows."""

    flow: Flow
    limits: Thresholds
    loops: list[LoopGroup] = field(default_factory=list[LoopGroup], init=False)
    viewed: dict[Value, None] = field(default_factory=dict[Value, None], init=False)
    joined: dict[Value, tuple[Value, ...]] = field(
        default_factory=dict[Value, tuple[Value, ...]], init=False
    )
    rows: dict[Value, Value] = field(default_factory=dict[Value, Value], init=False)
    sights: dict[Value, Sight] = field(default_factory=dict[Value, Sight], init=False)
    channels_last: bool = field(init=False)  # in memory, of images
    placed: set[Value] = field(default_factory=set[Value], init=False)  # parts of joins
    stored: set[Value] = field(init=False)

    def __post_init__(self) -> None:
        self.stored = {*self.flow.graph.inputs, *self.flow.graph.params}
        self.channels_last = has_channels_innermost(self.flow.graph)

    def run(self) -> None:
        inside = inside_bags(self.flow)
        for i, node in enumerate(self.flow.graph.nodes):
            if i in inside or isinstance(node.op, t.Generating) or self.is_stored(node):
                continue
            self.place(node)
        for v in self.flow.graph.outputs:
            self.settle(v)

    def place(self, node: Node) -> None:
        if is_bag(self.flow, node):
            self.call(node, self.closure(node))
        elif isinstance(node.op, t.Concat) and node.op.in_place and self.is_given(node.op.args):
            self.joined[node.results[0]] = node.op.args
            self.stored.add(node.results[0])
        elif isinstance(node.op, t.Concat) and not self.is_read_in_parts(node, node.op):
            self.join(node, node.op)
        elif self.is_inlined(node):
            self.inline(node)
        elif isinstance(node.op, t.Reducing):
            self.store(node)
        elif isinstance(node.op, t.Scattering):
            self.settle(node.op.operands[0])
            self.store(node)
        else:
            self.call(node, self.attached(node))

    def is_given(self, values: Iterable[Value]) -> bool:
        """Whether values come in: as inputs, or as weights."""
        return not any(v in self.flow.makers for v in values)

    def is_stored(self, node: Node) -> bool:
        return any(v in self.stored for v in node.results)

    # -- computed where it is read

    def is_inlined(self, node: Node) -> bool:
        """Whether a node's result may be computed where it is read."""
        op = node.op
        if isinstance(op, t.Routine):
            return op.draws
        if isinstance(op, t.Reduce):
            terms = prod(op.x.type.shape[a] for a in op.axes)
            return terms == 1 or (terms < self.limits.unroll and node.results[0].type.size > 1)
        return isinstance(op, INLINED) and len(node.results) == 1

    def inline(self, node: Node) -> None:
        """Computed where it is read, unless that would repeat too much."""
        if isinstance(node.op, t.Window):
            for x in node.op.operands:
                self.settle(x)
        sight = self.sights[node.results[0]] = self.sight(node)
        if self.is_worth_storing(node, sight):
            # what views share is stored as it was made
            maker = self.flow.maker(self.base(node.results[0]))
            self.store(maker if maker and not self.is_stored(maker) else node)

    def is_worth_storing(self, node: Node, sight: Sight) -> bool:
        (v,), reads = node.results, len(sight.reads)
        users = [n.op for n in self.flow.read_by(v)]
        output = v in self.flow.outputs
        shared = sum(map(readings, users)) + output > 1
        heavy = sight.ops > self.limits.ops
        if heavy or reads > self.limits.most:
            return True
        called = any(op.contraction for op in users)
        return shared and (reads > self.limits.reads or output or (called and reads > 1))

    def sight(self, node: Node) -> Sight:
        """What a cell of this node's result reads and does."""
        op, made = node.op, node.results[0]
        seen = {x: self.seen(x) for x in op.operands}
        place = self.flow.makers[made]
        most = max(self.limits.most, self.limits.reads)
        reads = (through(s.reads, x, op, made, place=place, most=most) for x, s in seen.items())
        ops = operations(op) + sum(s.ops for s in seen.values())
        return Sight(frozenset[Read]().union(*reads), ops)

    def seen(self, v: Value) -> Sight:
        """What it takes to have a cell of `v`: a read, where it is stored."""
        if v not in self.stored:
            return self.sights.get(v, Sight())
        reads = {whole(v)}
        if v in self.rows:
            reads.add(row(self.rows[v]))
        return Sight(frozenset(reads), 1)

    def see_again(self, v: Value) -> None:
        """What was to compute a value where it is read loads it, now that it is in memory."""
        waiting = set(self.flow.readers.get(v, ()))
        while waiting:
            u = min(waiting)
            waiting.remove(u)
            w = self.flow.nodes[u].results[0]
            if w in self.sights and w not in self.stored:
                self.sights[w] = self.sight(self.flow.nodes[u])
                waiting.update(self.flow.readers.get(w, ()))

    def closure(self, node: Node) -> tuple[int, ...]:
        """The places of a node and of all that is computed on the way to it."""
        flow = self.flow
        found = {flow.makers[node.results[0]]}
        stack = [node]
        while stack:
            for v in stack.pop().op.operands:
                i = flow.makers.get(v)
                if i is None or i in found or v in self.stored or flow.is_generated(v):
                    continue
                found.add(i)
                stack.append(flow.nodes[i])
        return tuple(sorted(found))

    # -- stored

    def store(self, node: Node) -> None:
        """Makes the loop whose results are the node's."""
        if self.is_stored(node):
            return
        made = node.results[0]
        if self.is_inlined(node):
            nest, reads = Nest(made.type.shape, made.type.size), self.sights[made].reads
        else:
            nest = nest_of(node)
            reads = {
                broadcast(r, x.type.shape, nest.shape)
                for x in node.op.operands
                for r in self.seen(x).reads
            }
        places = {r: index(r, nest.shape) for r in reads}
        leaves = {r.leaf for r in reads} - set(self.rows.values())
        self.note_rows(node, nest)
        results = frozenset(node.results)
        self.put(
            LoopGroup(
                items=(len(self.loops),),
                members=self.closure(node),
                writes=results,
                reads=frozenset(leaves),
                cells=nest.cells,
                row=nest.row,
                indices=frozenset(at for at in places.values() if at is not None),
                irregular=frozenset(r for r, at in places.items() if at is None),
                straight=is_straight(reads, nest.shape) or is_factor(self.flow, made),
                scattered=results if isinstance(node.op, t.Scattering) else frozenset(),
                partial=self.is_partial(node),
                backward=phase_of(node) is not None,
            )
        )

    def note_rows(self, node: Node, nest: Nest) -> None:
        """Names what has a cell for each row of what a softmax or a norm makes: reading that is
        how a later loop reads the row's sums."""
        made = node.results[0]
        if nest.row == 1 or not isinstance(node.op, t.Softmax | t.Normalize):
            return
        axes = node.op.reduced_axes()
        kept = tuple(1 if a in axes else n for a, n in enumerate(nest.shape))
        if made.type.shape == nest.shape and prod(kept) == nest.cells:
            self.rows[made] = Value(f"{made.name}/row", made.type.with_shape(kept))

    def is_partial(self, node: Node) -> bool:
        """Whether a reduction's results are reduced further, by the same function, or are of groups
        of channels, which do not lie together."""
        if not isinstance(node.op, t.Reduce):
            return False
        readers = [n.op for n in self.flow.read_by(node.results[0])]
        again = any(isinstance(op, t.Reduce) and op.fn == node.op.fn for op in readers)
        return again or (self.channels_last and is_in_groups(self.flow, node.op.x))

    def put(self, launch: LoopGroup) -> None:
        self.loops.append(launch)
        self.stored |= launch.writes
        for v in launch.writes:
            self.see_again(v)

    def settle(self, v: Value, apart: bool = False) -> None:
        """Has `v` in memory: as a view of what is there, where strides can say it. What is `apart`
        is stored by itself rather than a view of what would be stored whole for it: queries, keys
        and values. (torch 2.13: torch/_inductor/lowering.py, sdpa_constraint.)"""
        node = self.flow.maker(v)
        if v in self.stored or node is None or isinstance(node.op, t.Generating):
            return
        base = self.base(v)
        whole = base == v or (apart and base not in self.stored)
        lies = None if whole or self.flow.is_generated(base) else self.lies(v, base)
        if lies is None or 0 in wide_strides(lies):
            self.store(node)
        else:
            self.settle(base)
            self.viewed[v] = None

    # -- joins

    def is_read_in_parts(self, node: Node, op: t.Concat) -> bool:
        """Whether each cell of a join is read from the part that has it. Else the parts are written
        side by side first. (torch 2.13: lowering.py, cat.)"""
        if is_index(self.flow, node) or is_roll(self.flow, node):
            return True
        if len(op.args) > self.limits.parts or any(self.is_read_elsewhere(x, op) for x in op.args):
            return False
        copied = [not self.is_loop(x) for x in op.args]
        if any(copied) and is_read_cellwise(self.flow, node.results[0]):
            return True
        return all(copied) and not any(map(self.is_of_rows, op.args))

    def is_read_elsewhere(self, x: Value, join: t.Concat) -> bool:
        """Whether others than a join read its part cell by cell, or compute it again."""
        others = [n for n in self.flow.read_by(x) if n.op != join]
        base = self.base(x)
        again = base not in self.stored and not self.flow.is_generated(base)
        return bool(others) and (again or any(is_cellwise(self.flow, n) for n in others))

    def is_loop(self, x: Value) -> bool:
        """Whether a loop has put `x` itself into memory, which could be told where to put it."""
        return x in self.stored and self.is_movable(x)

    def is_movable(self, x: Value) -> bool:
        """Whether a loop makes `x`, or would, wherever it is told to: where images have channels
        innermost, what is stored of them has its place."""
        node = self.flow.maker(x)
        if node is None or not isinstance(node.op, MOVABLE) or len(node.results) != 1:
            return False
        if x in self.joined or x in self.placed or x in self.flow.outputs:
            return False
        return not (self.channels_last and x.type.rank == 4 and x in self.stored)

    def is_of_rows(self, x: Value) -> bool:
        """Whether `x` is computed from what a reduction makes."""
        makers = (self.flow.maker(r.leaf) for r in self.sights.get(x, Sight()).reads)
        return any(n is not None and isinstance(n.op, t.Reducing) for n in makers)

    def join(self, node: Node, op: t.Concat) -> None:
        """Has the parts of a join side by side: written there by the loops that make them, copied
        where a call, another join or an input has them. (torch 2.13: ir.py, ConcatKernel.)"""
        parts = tuple(self.part(x, node) for x in op.args)
        (made,) = node.results
        self.joined[made] = parts
        self.stored.add(made)
        self.see_again(made)

    def part(self, x: Value, join: Node) -> Value:
        """The value that lies where a join has its part: the part, or a copy of it."""
        maker = self.flow.maker(x)
        if maker is None or not self.is_movable(x):
            maker = self.flow.add(t.Map("copy", (x,)), like=join)
            self.sights[maker.results[0]] = self.sight(maker)
        self.store(maker)
        self.placed.add(maker.results[0])
        return maker.results[0]

    # -- where things lie

    def bases(self, v: Value) -> list[Value]:
        """What has to be there for `v` to be there."""
        base = self.base(v)
        if base not in self.joined:
            return [base]
        return [b for part in self.joined[base] for b in self.bases(part)]

    def base(self, v: Value) -> Value:
        """What a layout result is made of: what is in memory, or else no layout result."""
        while v not in self.stored:
            node = self.flow.maker(v)
            if node is None or not isinstance(node.op, t.Layout):
                break
            v = node.op.operands[0]
        return v

    def lies(self, v: Value, base: Value) -> Strided | None:
        """How a layout result lies in what it is made of, if strides can say it."""
        if v == base:
            return packed(base.type)
        node = self.flow.maker(v)
        assert node is not None, "layout ops make all between a value and its base"
        x = self.lies(node.op.operands[0], base)
        return None if x is None else viewed(x, node.op)

    # -- library calls

    def attached(self, node: Node) -> tuple[int, ...]:
        """The places of a call's node and of what the call does before and after."""
        flow = self.flow
        found = {flow.makers[v] for v in node.results}
        if (bias := bias_of(flow, node, self.stored)) is not None:
            found.add(bias)
        found.update(rescaling(flow, node))
        if isinstance(node.op, t.Matmul) and node.op.b not in self.stored:
            found.update(self.unpacking(node, node.op.b))
        return tuple(sorted(found))

    def unpacking(self, product: Node, weight: Value) -> tuple[int, ...]:
        """The places of what the model node of a product does to a packed weight before it
        multiplies: then it is a call of a library that converts what it reads."""
        flow, maker = self.flow, self.flow.maker(weight)
        if maker is None or weight not in flow.known:
            return ()
        places = self.closure(maker)
        nodes = [flow.nodes[i] for i in places]
        own = all(n.locs == product.locs for n in nodes)
        may = own and is_unpacking(nodes, weight, {*flow.graph.params}, flow.known)
        return places if may else ()

    def reach(self, v: Value) -> None:
        """Places what a value is computed from that the graph has later: a cast of a bias comes
        after the product that adds it."""
        node = self.flow.maker(v)
        if node is None or v in self.stored or v in self.sights or self.flow.is_generated(v):
            return
        for x in node.op.operands:
            self.reach(x)
        self.place(node)

    def call(self, node: Node, members: tuple[int, ...]) -> None:
        """A library call with all that it computes: its operands are in memory."""
        nodes = [self.flow.nodes[i] for i in members]
        made = {v for n in nodes for v in n.results}
        read = dict.fromkeys(x for n in nodes for x in n.op.operands if x not in made)
        if not (is_call(node.op) or node.op.control):  # which repeats what is generated
            read = [x for x in read if not self.flow.is_generated(x)]
        for x in read:
            self.reach(x)
            self.settle(x, apart=isinstance(node.op, t.Attention))
        self.put(
            LoopGroup(
                items=(len(self.loops),),
                members=members,
                writes=frozenset(nodes[-1].results),
                reads=frozenset(read),
                library=True,
                backward=phase_of(nodes[-1]) is not None,
            )
        )
