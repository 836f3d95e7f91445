"""Which way each op of a graph is run on ranks, and where each value is then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import Any

from gpuir.ir.graph import Graph, Node, Op, Value, field_names
from gpuir.ir.phases import is_training, phase_of
from gpuir.ops import tensor as t
from gpuir.passes.optimizer import adds_squares
from gpuir.passes.shard import statistics
from gpuir.passes.shard.axes import axes_of
from gpuir.passes.shard.place import (
    FLOPS_A_BYTE,
    MEMORY_A_BYTE,
    SUM,
    WHOLE,
    WIDE,
    Placed,
    moved_bytes,
    part,
)
from gpuir.passes.shard.sources import Homes, Sources
from gpuir.passes.shard.ways import ShardWay, repeated_bytes, ways

KEPT = 1e9  # as many times dearer than sending is to gather what is to stay in parts
EACH = 1e6  # bytes that could be sent while a collective begins: 3 us at 300 GB/s. Assumed
LATER = 0.999
FARTHEST = 200  # nodes that are looked at for what a cut leads to


@dataclass
class Planner:
    """Walks a graph from its inputs on. `homes` are where inputs and params are, and `hints` where
    weights are updated that are whole else. `data` says that it is the batch that is cut: it stays
    so, and so do results, and weights are gathered where they are needed, but for those that
    `stay`; otherwise weights are cut where that pays and stay so, and results are gathered.
    `replicas` share the batch later on: weights are held and read by each of them, and what is sent
    is of all. `inside` gives the ways to run an op in which ranks exchange what they have. `own`
    are the first results of nodes that take statistics of a rank's own part of the batch."""

    g: Graph
    ranks: int
    homes: dict[Value, Placed]
    data: bool
    hints: Mapping[Value, Placed] = field(default_factory=dict[Value, Placed])
    sums_whole: bool = False  # gradients are added up whole, even where they are read in parts
    sequence: bool = False  # sums of activations may be added up in parts of their rows
    replicas: int = 1
    inside: Callable[[Op, int], Iterable[ShardWay]] = lambda op, ranks: ()
    stay: Collection[Value] = ()
    own: Collection[Value] = ()
    places: dict[Value, list[Placed]] = field(default_factory=dict[Value, list[Placed]])
    chosen: dict[Value, ShardWay] = field(
        default_factory=dict[Value, ShardWay]
    )  # by a node's first result

    def __post_init__(self) -> None:
        g = self.g
        self.uses, self.producers = g.uses(), g.producers()
        over = g.over or (None,) * len(g.outputs)
        self.over = {v: o for v, o in zip(g.outputs, over, strict=True) if o is not None}
        self.outputs = set(g.outputs)
        self.weight_of = updated(g)
        self.zeros: dict[Value, bool] = {}
        self.alone = {id(n.op) for n in g.nodes if n.results and n.results[0] in self.own}
        self.signatures: dict[int, int] = {}  # by the identity of ops, which the graph keeps
        self.numbered: dict[Hashable, int] = {}
        self.known_ways: dict[Hashable, tuple[ShardWay, ...]] = {}
        self.known_best: dict[Hashable, tuple[float, ShardWay]] = {}
        self.weights: dict[Value, Value | None] = {}
        self.params, self.inputs = frozenset(g.params), frozenset(g.inputs)
        self.numbers = {n.results[0]: i for i, n in enumerate(g.nodes) if n.results}
        self.sources = Sources(g, self.ranks, self.is_zero)
        self.ahead = self.sources.ahead
        self.again = False  # something is cut that an op before has had whole
        self.trains = is_training(g)

    def run(self) -> None:
        """Fills `places`, the first of which is where a value is made, and `chosen`."""
        while True:
            self.again = False
            self.places = {v: [self.homes.get(v, WHOLE)] for v in (*self.g.inputs, *self.g.params)}
            for node in self.g.nodes:
                self.node(node)
            if not self.promote() and not self.again:
                self.ends = {v: self.end(v) for v in self.g.outputs}
                return

    def node(self, node: Node) -> None:
        if not self.data and phase_of(node) is None:
            self.cut_weights(node)
        way = self.way(node)
        if node.results:
            self.chosen[node.results[0]] = way
        for v, p in zip(node.op.operands, way.takes, strict=True):
            self.fetched(v, p)
        for v, p in zip(node.results, way.gives, strict=True):
            self.places[v] = [p]
            self.fetched(v, self.settled(v, p))

    def way(self, node: Node) -> ShardWay:
        """The way of a node. Nothing pays of what is whole everywhere: what no operand is cut for
        is not cut, and a sum of shares is added up again."""
        op, wanted = node.op, self.wanted(node)
        if wanted or self.hints or any(self.places[v] != ALONE for v in op.operands):
            return self.choose(op, wanted=wanted)[1]
        return whole_way(len(op.operands), len(node.results))

    def repeated(self) -> list[Node]:
        """The nodes whose work each rank does whole; of others all ranks together do it once."""
        return [n for n in self.g.nodes if not (n.results and self.chosen[n.results[0]].axis)]

    def end(self, v: Value) -> Placed:
        """Where an output is left."""
        place = self.places[v][0]
        return self.settled(v, place) if v in self.producers else place

    def fetched(self, v: Value, place: Placed) -> None:
        if place not in self.places[v]:
            self.places[v].append(place)

    def promote(self) -> bool:
        """Moves params that every reader takes in the same parts to be kept so, and states that
        are left in parts; says whether there were any."""
        found: dict[Value, Placed] = {}
        anew = {old: self.places[new][0] for new, old in self.over.items()}
        for v in (*self.g.inputs, *self.g.params):
            role = self.g.role_of(v)
            if self.places[v][0] != WHOLE or role == "input" or v in self.outputs:
                continue
            wanted = {p for r in self.uses.get(v, ()) for p in self.taken(r, v)}
            if v in self.weight_of and not self.data:
                wanted = {self.homes.get(self.weight_of[v], WHOLE)}
            elif role in ("optimizer", "cache") and v in anew:
                wanted = {anew[v]}
            if len(wanted) == 1 and (p := wanted.pop()).is_part:
                found[v] = p
        self.homes.update(found)
        return bool(found)

    def taken(self, node: Node, v: Value) -> list[Placed]:
        """How a node takes an operand."""
        way = self.chosen[node.results[0]] if node.results else None
        pairs = zip(node.op.operands, way.takes, strict=True) if way else ()
        return [p for x, p in pairs if x == v]

    # ------------------------------------------------------------------------ one op

    def is_zero(self, v: Value) -> bool:
        """Whether all cells are zero, as far as constants say so."""
        if v not in self.zeros:
            node = self.producers.get(v)
            match node.op if node else None:
                case t.Constant(_, data):
                    self.zeros[v] = not any(data)
                case t.Broadcast(x, _) | t.Reshape(x, _):
                    self.zeros[v] = self.is_zero(x)
                case _:
                    self.zeros[v] = False
        return self.zeros[v]

    def cost(self, v: Value, have: Sequence[Placed], want: Placed) -> float:
        """What a rank sends to have a value where it is wanted; nothing of one that comes later.
        What is to stay in parts is gathered for a price. Of equals, what is added up already is
        taken so: its terms would be held beside it."""
        if not have or want in have:
            is_added = want == SUM and any(p != SUM for p in have)
            return 2 * (1 - LATER) * v.type.nbytes if is_added else 0.0
        param = self.param_of(v)
        dear = KEPT if (param is not None) != self.data or param in self.stay else 1.0
        costs = (
            (moved_bytes(v.type, place, want, self.ranks), dear if place.is_part else 1.0)
            for place in have
        )
        return min((cost * times for cost, times in costs if cost is not None), default=inf)

    def param_of(self, v: Value) -> Value | None:
        """The param that a value is, or is in another layout or dtype."""
        if v not in self.weights:
            node = self.producers.get(v)
            self.weights[v] = v if v in self.params else None
            if node is not None and isinstance(node.op, t.Layout | t.Cast):
                self.weights[v] = self.param_of(node.op.operands[0])
        return self.weights[v]

    def ways(self, op: Op, have: Sequence[Sequence[Placed]] = ()) -> tuple[ShardWay, ...]:
        """As `ways.ways`, which is asked once of ops that differ in the names of values alone."""
        if is_update(op):
            return tuple(ways(op, self.ranks, self.is_zero, have))
        which = isinstance(op, t.Reshape | t.Collective | t.Shard)
        shown = tuple(tuple(p for p in places if p.parts or which) for places in have)
        key = self.signature(op), shown
        if key not in self.known_ways:
            found = ways(op, self.ranks, self.is_zero, have)
            own = statistics.ways(op, self.ranks) if id(op) in self.alone else ()
            self.known_ways[key] = (*found, *self.inside(op, self.ranks), *own)
        return self.known_ways[key]

    def signature(self, op: Op) -> int:
        """A number that an op has in common with those that differ in the names of values alone."""
        found = self.signatures.get(id(op))
        if found is None:
            fields = (getattr(op, name) for name in field_names(type(op)))
            zeros = isinstance(op, t.ScatterND) and self.is_zero(op.x)
            alike = (type(op), *map(_but_names, fields), zeros, id(op) in self.alone)
            found = self.numbered.setdefault(alike, len(self.numbered))
            self.signatures[id(op)] = found
        return found

    def wanted(self, node: Node) -> Collection[Placed]:
        """The parts that the weights are in whose gradients a node gives, or a term of them."""
        if self.data:
            return ()
        return {p for v in node.results if (p := self.aim(v)).is_part}

    def aim(self, v: Value) -> Placed:
        """Where the gradient of a weight is to be, or what becomes one behind views, casts and sums
        with other terms: of a weight with several readers each has its own."""
        if v in self.weight_of:
            return self.homes.get(self.weight_of[v], WHOLE)
        readers = self.uses.get(v, ())
        if len(readers) != 1 or not phase_of(readers[0]):
            return WHOLE
        op = readers[0].op
        if not isinstance(op, t.Pointwise | t.Layout):
            return WHOLE
        then = self.aim(readers[0].results[0])
        axes = axes_of(op, self.is_zero) if then.is_part else None
        name = axes.results[0][then.axis] if axes else ""
        names = axes.operands[op.operands.index(v)] if axes else ()
        if not name or name not in names:
            return WHOLE
        found = part(names.index(name), then.parts)
        return found if found.fits(v.type, self.ranks) else WHOLE

    def choose(
        self,
        op: Op,
        known: Mapping[Value, Placed] | None = None,
        wanted: Collection[Placed] = (),
    ) -> tuple[float, ShardWay]:
        """The way that costs least, and what it costs, in bytes over a link. Nothing is cut that no
        operand is cut for, and that is not `wanted` so."""
        if op.control:  # whole on each rank; what is inside is not looked at
            return 0.0, next(ways(op, self.ranks, self.is_zero))
        places = self.places
        if known:
            have = [(known[v],) if v in known else tuple(places.get(v, ())) for v in op.operands]
        else:
            have = [tuple(places.get(v, ())) for v in op.operands]
        if self.hints and is_update(op):
            hints = ((self.hints[v],) if v in self.hints else () for v in op.operands)
            have = [x + y for x, y in zip(have, hints, strict=True)]
        whose: Hashable = ()
        if self.stay or is_update(op):
            whose = tuple((p := self.param_of(v)) and p in self.stay for v in op.operands)
        key = (self.signature(op), *have, whose, *wanted)
        if key not in self.known_best:
            self.known_best[key] = self.best(op, have, wanted)
        return self.known_best[key]

    def best(
        self, op: Op, have: Sequence[Sequence[Placed]], wanted: Collection[Placed]
    ) -> tuple[float, ShardWay]:
        best: tuple[float, ShardWay] | None = None
        for way in self.ways(op, have):
            pairs = list(zip(op.operands, have, way.takes, strict=True))
            follows = any(p.is_part and p in places for _, places, p in pairs)
            if way.axis and not follows and way.gives[0] not in wanted:
                continue
            cost = way.sends + sum(self.cost(v, places, p) for v, places, p in pairs)
            if cost < inf:
                types = op.result_types
                if self.data and isinstance(op, t.Cast):  # gradients are summed as they are kept
                    types = (op.x.type,)
                given = zip(types, way.gives, strict=True)
                ends = (moved_bytes(x, SUM, WHOLE, self.ranks) for x, p in given if p == SUM)
                # of equals, the sum: it may meet another on its way
                cost += LATER * sum(x or 0.0 for x in ends) + repeated_bytes(op, way, self.ranks)
            if best is None or cost < best[0]:
                best = cost, way
        assert best is not None
        return best

    def settled(self, v: Value, place: Placed) -> Placed:
        """Where a value is wanted that is a sum of terms: it stays so for a single reader that
        takes it so, else it is added up at once, whole or in the parts that readers have others in.
        """
        if v in self.over:
            return self.homes.get(self.over[v], WHOLE)
        if place != SUM and v not in self.outputs:
            return place
        readers = self.uses.get(v, [])
        is_gradient = bool(readers) and self.g.role_of(v) == "gradient"
        if v in self.outputs and not (place == SUM and is_gradient):
            return WHOLE if place == SUM or self.leaves(v) else place
        made = self.producers.get(v)
        if place != SUM or not readers or (made is not None and adds_squares(made.op)):
            return place
        if self.sums_whole and any(is_update(r.op) for r in readers):
            return WHOLE
        if len(readers) == 1 and v not in self.outputs:
            _, way = self.choose(readers[0].op, {v: SUM})
            if SUM in (p for x, p in zip(readers[0].op.operands, way.takes, strict=True) if x == v):
                return SUM
        others = (x for r in readers for x in r.op.operands if x != v)
        alike = (x for x in others if x.type.shape == v.type.shape)
        parts = [p for x in alike for p in self.places.get(x, ()) if p.is_part]
        if (w := self.weight_of.get(v)) is not None:  # the lists of an update have other weights
            parts = [self.hints.get(w, self.homes.get(w, WHOLE))]
        rows = part(v.type.rank - 2)
        # of two axes the rows are those of all sequences, which data parallelism cuts
        if self.sequence and v.type.rank > 2 and rows.fits(v.type, self.ranks):
            parts.append(rows)
        best, least = WHOLE, inf
        for p in dict.fromkeys((WHOLE, *parts)):
            cost = moved_bytes(v.type, SUM, p, self.ranks)
            cost = (cost or 0.0) + sum(self.choose(r.op, {v: p})[0] for r in readers)
            if cost < least:
                best, least = p, cost
        return best

    def leaves(self, v: Value) -> bool:
        """Whether an output is wanted whole: a result. Of a training step nothing leaves but the
        loss, a sum: scores stay in parts (`parallel_output` of Megatron-LM's GPTModel)."""
        return not self.data and not self.trains and self.g.role_of(v) == "activation"

    # ------------------------------------------------------------------------ weights

    def cut_weights(self, node: Node) -> None:
        """Cuts the weights of a product: by rows where its other operand is cut along what is
        summed, by columns where that leads to such a product, or saves more work, or spares more
        memory, than it sends."""
        if isinstance(node.op, t.Gather):
            self.cut_table(node, node.op)
            return
        weights = [v for v in weights_of(node.op) if self.is_whole(v)]
        axes = axes_of(node.op, self.is_zero) if weights else None
        if axes is None:
            return
        named = dict(zip(node.op.operands, axes.operands, strict=True))
        inside = {n for v in weights for n in named[v] if n} | {"packed", "between"}
        gains: dict[ShardWay, float] = {}
        for way in self.ways(node.op, self.packed(node, weights)):
            taken = dict(zip(node.op.operands, way.takes, strict=True))
            if way.axis not in inside:
                continue
            others = sum(self.elsewhere(node, v, taken[v], self.each) for v in weights)
            if others > -inf:
                own = (
                    inf if self.by_rows(node.op, way, weights) else self.gain(node, way, self.each)
                )
                gains[way] = self.spared(v for v in weights if taken[v].is_part) + others + own
        best = max(gains, key=gains.__getitem__, default=None)
        if best is not None and gains[best] > 0:
            for v, place in zip(node.op.operands, best.takes, strict=True):
                if v in weights:
                    self.cut_source(v, place)

    def cut_table(self, node: Node, op: t.Gather) -> None:
        """Cuts a table of embeddings by its rows, where that spares more memory than is sent of
        what is looked up, and of what other ops make of it. Their work counts too."""
        place, sent = part(op.axis), op.result_types[0].nbytes
        if (
            self.is_whole(op.x)
            and self.spared([op.x]) + self.elsewhere(node, op.x, place, 0.0) > sent
        ):
            self.cut_source(op.x, place)

    def spared(self, weights: Iterable[Value]) -> float:
        """The bytes of params, of all replicas, that weights are made of."""
        params = {p for v in weights for p in self.sources.of(v) or ()}
        return self.replicas * sum(p.type.nbytes for p in params)

    def by_rows(self, op: Op, way: ShardWay, weights: list[Value]) -> bool:
        """Whether the other operands are cut as a way takes them."""
        others = [(v, p) for v, p in zip(op.operands, way.takes, strict=True) if v not in weights]
        return SUM in way.gives and any(p.is_part and p in self.places[v] for v, p in others)

    def gain(self, node: Node, way: ShardWay, each: float) -> float:
        """What ranks need not do of a product whose weights are cut, less what is sent to gather
        what becomes of its result, where that is no operand of a product that can be cut by rows;
        in bytes over a link, with `each` for the begin of a collective."""
        if any(
            p.is_part and v not in weights_of(node.op)
            for v, p in zip(node.op.operands, way.takes, strict=True)
        ):
            return -inf
        saved, sent = self.saved(node.op), 0.0
        known = dict(zip(node.results, way.gives, strict=True))
        open_: list[int] = []
        seen: set[int] = set()

        def follow(v: Value) -> None:
            for reader in self.ahead.get(v, ()):
                i = self.numbers[reader.results[0]] if reader.results else -1
                if i >= 0 and i not in seen:
                    seen.add(i)
                    heappush(open_, i)

        for v, p in known.items():
            if p.is_part:
                follow(v)
        while open_ and len(seen) < FARTHEST:
            reader = self.g.nodes[heappop(open_)]
            if self.ends_in(reader.op, known):
                saved += self.saved(reader.op)
                continue
            cost, then = self.choose(reader.op, known)
            pairs = zip(reader.op.operands, then.takes, strict=True)
            if not any(known.get(v) == p for v, p in pairs if p.is_part):
                given = (v for v in dict.fromkeys(reader.op.operands) if v in known)
                sent += sum(self.gathered(v, known[v], each) for v in given)
                continue
            saved += repeated_bytes(reader.op, WHOLE_WAY, self.ranks)
            sent += cost + (each if cost or then.axis == "rows" else 0.0)
            for v, p in zip(reader.results, then.gives, strict=True):
                known[v] = p
                if p.is_part:
                    follow(v)
        results = (v for v in known if v in self.outputs and v not in self.over)
        ends = (v for v in results if self.leaves(v) or known[v] == SUM)
        return saved - sent - sum(self.gathered(v, known[v], each) for v in ends)

    def gathered(self, v: Value, place: Placed, each: float) -> float:
        """What it takes to have all of a value everywhere."""
        cost = moved_bytes(v.type, place, WHOLE, self.ranks)
        return cost + each if cost else 0.0

    @property
    def each(self) -> float:
        """What the begin of a collective costs, of all replicas together."""
        return EACH * self.replicas

    def ends_in(self, op: Op, known: Mapping[Value, Placed]) -> bool:
        """Whether an op is a product that can be cut by rows, as an operand of it is."""
        weights = [v for v in weights_of(op) if self.is_whole(v)]
        if not weights:
            return False
        for way in self.ways(op):
            if SUM not in way.gives or not way.axis:
                continue
            pairs = list(zip(op.operands, way.takes, strict=True))
            if any(known.get(v) == p and p.is_part for v, p in pairs if v not in weights):
                taken = dict(pairs)
                return all(self.may_cut(v, taken[v]) for v in weights)
        return False

    def saved(self, op: Op) -> float:
        """What a rank need not do of a product when it is cut, in bytes over a link."""
        read = self.replicas * sum(v.type.nbytes for v in weights_of(op))
        wide = WIDE if op.operands and op.operands[0].type.dtype.bits >= 32 else 1.0
        done = wide * op.flops() / FLOPS_A_BYTE
        return (1 - 1 / self.ranks) * (done + read / MEMORY_A_BYTE)

    def is_whole(self, v: Value) -> bool:
        """Whether a value is made of params alone, and these are whole until now."""
        params = self.sources.of(v)
        return bool(params) and all(self.homes.get(p, WHOLE) == WHOLE for p in params or ())

    def readers(self, v: Value, place: Placed) -> list[tuple[Node, Homes]] | None:
        """The nodes that read what a weight is made of, with what they get in parts if the weight
        is to come in parts; None where one of them needs it whole."""
        homes = self.sources.homes(v, place) if self.is_whole(v) else None
        found = self.sources.readers(homes) if homes else None
        alike = found is not None and all(any(self.ways_with(n, given)) for n, given in found)
        return found if alike else None

    def ways_with(self, node: Node, given: Mapping[Value, Placed]) -> Iterator[ShardWay]:
        """The ways to run a node with these operands in parts."""
        have = [[given[v]] if v in given else [] for v in node.op.operands]
        for way in self.ways(node.op, have):
            pairs = zip(node.op.operands, way.takes, strict=True)
            if way.axis and all(given.get(v, p) == p for v, p in pairs):
                yield way

    def may_cut(self, v: Value, place: Placed) -> bool:
        """Whether the params of a weight can be kept so that it is where it is wanted."""
        return not place.is_part or self.readers(v, place) is not None

    def elsewhere(self, node: Node, v: Value, place: Placed, each: float) -> float:
        """What it gains, in bytes over a link, that other nodes have the params of a weight in
        parts too; -inf where one cannot."""
        readers = self.readers(v, place) if place.is_part else []
        if readers is None:
            return -inf
        return sum(self.in_parts(n, given, each) for n, given in readers if n is not node)

    def in_parts(self, node: Node, given: Mapping[Value, Placed], each: float) -> float:
        """What it gains that a node has operands in parts."""
        found = -inf
        for way in self.ways_with(node, given):
            ends = zip(node.results, way.gives, strict=True)
            sent = sum(self.gathered(v, p, each) for v, p in ends)
            found = max(found, self.gain(node, way, each), self.saved(node.op) - sent)
        return found

    def cut_source(self, v: Value, place: Placed) -> None:
        """Keeps the params that a weight is made of in parts."""
        homes = self.sources.homes(v, place) if place.is_part and self.is_whole(v) else None
        if not homes:
            return
        self.homes.update(homes)
        self.places.update((p, [home]) for p, home in homes.items())
        made = self.sources.between(v)
        for node in made:
            self.node(node)
        self.again |= any(
            len(self.ahead.get(x, ())) > 1 for x in (*homes, *(n.results[0] for n in made))
        )

    def packed(self, node: Node, weights: list[Value]) -> list[list[Placed]]:
        """Places in several parts that the operands of a product might have, where slices cut its
        result up along an axis."""
        have: list[list[Placed]] = [[] for _ in node.op.operands]
        axes = axes_of(node.op, self.is_zero)
        if axes is None or len(node.results) != 1:
            return have
        for axis, name in enumerate(axes.results[0]):
            parts = self.slices(node.results[0], axis)
            if len(parts) > 1 and name:
                for i, (v, names) in enumerate(zip(node.op.operands, axes.operands, strict=True)):
                    if v in weights and name in names:
                        have[i].append(part(names.index(name), parts))
        return have

    def slices(self, v: Value, axis: int) -> tuple[int, ...]:
        """The extents of the slices that a value is cut up into along an axis, with ops between
        that keep it; empty where something else reads it."""
        readers = self.ahead.get(v, ())
        ends: set[int] = {0, v.type.shape[axis]}
        for reader in readers:
            match reader.op:
                case t.Slice(_, starts, sizes, steps) if steps[axis] == 1:
                    ends |= {starts[axis], starts[axis] + sizes[axis]}
                case t.Pointwise() | t.Layout() if len(readers) == 1:
                    then = self.axis_in_result(reader.op, v, axis)
                    return () if then is None else self.slices(reader.results[0], then)
                case _:
                    return ()
        return tuple(b - a for a, b in pairwise(sorted(ends)))

    def axis_in_result(self, op: Op, v: Value, axis: int) -> int | None:
        """Where an operand's axis is in the result, if it is there whole."""
        axes = axes_of(op, self.is_zero)
        name = axes.operands[op.operands.index(v)][axis] if axes else ""
        if not axes or not name or name not in axes.results[0]:
            return None
        found = axes.results[0].index(name)
        return found if op.result_types[0].shape[found] == v.type.shape[axis] else None


def _but_names(field: Any) -> Any:
    """A field of an op, of values their types alone."""
    match field:
        case Value():
            return field.type
        case (Value(), *_):
            return tuple(v.type for v in field)
        case _:
            return field


def is_update(op: Op) -> bool:
    """Whether an op is part of an optimiser's step, on lists of tensors."""
    return isinstance(op, t.Routine) and op.fn == "multi_tensor"


def updated(g: Graph) -> dict[Value, Value]:
    """The weight that each gradient and each state of an optimiser is of: those that its steps have
    at one place of their lists."""
    rows: dict[Value, set[Value]] = {}
    for node in g.nodes:
        if isinstance(node.op, t.Routine) and is_update(node.op):
            lists = dict(node.op.attrs)["lists"]
            count = len(node.op.args) // lists if isinstance(lists, int) else 1
            for i in range(count):
                some = (*node.op.args[i::count], *node.results[i::count])
                row = {v for v in some if v.type.shape == some[0].type.shape}
                row -= set(node.results) if adds_squares(node.op) else set()
                row = row.union(*(rows[v] for v in row if v in rows))
                rows |= dict.fromkeys(row, row)
    weights = (v for v in (*g.inputs, *g.params) if g.role_of(v) == "weight" and v in rows)
    return {v: w for w in weights for v in rows[w] if v != w and v.type.shape == w.type.shape}


WHOLE_WAY = ShardWay((), ())
ALONE = [WHOLE]


@cache
def whole_way(operands: int, results: int) -> ShardWay:
    """To run an op whole on each rank."""
    return ShardWay((WHOLE,) * operands, (WHOLE,) * results)


def weights_of(op: Op) -> tuple[Value, ...]:
    """What a product multiplies by that may be a model's weight; of experts their biases too."""
    if isinstance(op, t.Experts):
        biases = (op.up_bias, op.down_bias, op.gate_bias)
        return (*op.weights, *(v for v in biases if v is not None))
    found: Value | tuple[Value, ...] | str = getattr(op, getattr(op, "weight", "") or "name")
    return (found,) if isinstance(found, Value) else () if isinstance(found, str) else found
