"""The pass: from a graph to what each of several ranks runs of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Any, Literal, get_args

from gpuir.ir.build import Builder, prune
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.graph import Cut, Graph, Level, Node, Op, Value, field_names
from gpuir.ir.phases import phase_of
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass
from gpuir.passes.shard import experts, rows, sequences, statistics, words
from gpuir.passes.shard.axes import local
from gpuir.passes.shard.experts import Dispatch
from gpuir.passes.shard.place import SUM, WHOLE, Kept, Placed, moved_bytes, part
from gpuir.passes.shard.plan import Planner
from gpuir.passes.shard.rows import closed, opened
from gpuir.passes.shard.sequences import Exchange
from gpuir.passes.shard.statistics import Statistics
from gpuir.passes.shard.ways import Inside, ShardWay, of_each

By = Literal["data", "tensor", "context", "expert"]
MOST_TRIED = 32  # ranks, for which it is worth looking for a number that fits
AXIS_OF: dict[By, str] = {"data": "dp", "tensor": "tp", "context": "cp", "expert": "ep"}


@dataclass(frozen=True)
class ShardPass(Pass):
    """Cuts a graph over the ranks of one axis of a mesh: the result is what each rank runs, with
    collectives where ranks need each other's cells. Several in a row make a mesh of several axes,
    that of neighbours first.

    `by` says what is cut to begin with. data: the inputs, along their first axis, so that each rank
    has its part of the batch, and gradients of weights are summed over ranks. tensor: weights, by
    columns and then by rows, wherever a product's result reaches another product cut (Shoeybi et
    al.: Megatron-LM, 2019, section 3). From there each op is run the way that sends the fewest
    bytes: cut as its operands are, on terms of sums where it is linear, else whole on each rank.

    `sequence`, of tensor, lets sums of products be added up in parts of their rows, so that norms
    and residuals between products are in parts, too (Korthikanti et al.: Reducing Activation
    Recomputation, 2022, section 4.2.2).

    `statistics`, of data, are what batch norm in training takes: of the `batch`, for which ranks
    exchange it (SyncBatchNorm), or of each `rank`'s own part of it, as DistributedDataParallel
    leaves it.

    `zero`, of data, is what else is in parts, each along its first axis that can be cut
    (Rajbhandari et al.: ZeRO, 2020, section 5): 1 the optimiser's states, 2 the gradients that the
    optimiser reads, 3 the weights, which are gathered for the forward pass and for the backward
    pass.

    context: the inputs, along their second axis, that of a sequence's tokens. In attention ranks
    exchange `heads` (all_to_all: Jacobs et al.: DeepSpeed-Ulysses, 2023) or gather `keys` and
    values (Llama team, 2024, section 3.3.2), as `attention` says; else what sends fewer bytes. Or
    keys and values go round a `ring`, and attention to those of one rank runs while those of the
    next are on their way (Liu et al.: Ring Attention, 2023).

    `pad`, of tensor, pads a vocabulary that does not divide by the ranks to a multiple of `pad`
    words a rank, where its table is cut then (Megatron-LM's make-vocab-size-divisible-by, which is
    128). `replicas`, of tensor, are how many such groups of ranks will share the batch, by passes
    that come later: each holds the weights, and sends what is of its own part of the batch alone.

    expert: experts, whole ones, and the inputs as for data. Tokens travel to their experts and back
    as `dispatch` says: a row each by `all_to_all` (Lepikhin et al.: GShard, 2020), or all of them
    by `all_gather`; else what sends fewer bytes. The busiest rank gets `imbalance` times the mean
    of rows, or what the router's skew gives.
    """

    ranks: int
    by: By = "tensor"
    zero: int = 0
    sequence: bool = False
    attention: Exchange = ""
    dispatch: Dispatch = ""
    imbalance: float = 1.0
    pad: int = 0
    replicas: int = 1
    statistics: Statistics = "batch"

    name = "shard"
    takes = gives = Level.graph

    def __post_init__(self) -> None:
        if self.by not in AXIS_OF:
            fix = nearest(self.by, AXIS_OF)
            raise UsageError(f"pass 'shard': by={self.by!r} is unknown", fix=fix)
        if self.ranks < 1:
            raise UsageError("pass 'shard': ranks must be at least 1", found=f"ranks={self.ranks}")
        if self.sequence and self.by != "tensor":
            raise UsageError("pass 'shard': sequence=true needs by=tensor", expected="by=tensor")
        if self.zero not in range(4) or (self.zero and self.by != "data"):
            raise UsageError(
                "pass 'shard': zero is out of range or does not go with this `by`",
                expected="0 to 3, by=data",
                found=f"zero={self.zero}, by={self.by}",
            )
        if self.statistics not in get_args(Statistics) or (
            self.statistics == "rank" and self.by != "data"
        ):
            raise UsageError(
                "pass 'shard': statistics is unknown or does not go with this `by`",
                expected=f"{' or '.join(get_args(Statistics))}, by=data",
                found=f"statistics={self.statistics}, by={self.by}",
            )
        if self.pad < 0 or (self.pad and self.by != "tensor"):
            raise UsageError(
                "pass 'shard': pad (words that pad the vocabulary) does not go with these options",
                expected="0 or more words, by=tensor",
                found=f"pad={self.pad}, by={self.by}",
            )
        if self.replicas < 1 or (self.replicas > 1 and self.by != "tensor"):
            raise UsageError(
                "pass 'shard': replicas (groups of ranks that will split the batch) is not valid",
                expected="1 or more, by=tensor",
                found=f"replicas={self.replicas}, by={self.by}",
            )
        for name, by, kinds in (
            ("attention", "context", get_args(Exchange)),
            ("dispatch", "expert", get_args(Dispatch)),
        ):
            if (given := getattr(self, name)) not in kinds or (given and self.by != by):
                raise UsageError(
                    f"pass 'shard': {name} is unknown or does not go with this `by`",
                    expected=f"{' or '.join(k for k in kinds if k)}, by={by}",
                    found=f"{name}={given}, by={self.by}",
                )
        if self.imbalance < 1 or (self.imbalance > 1 and self.by != "expert"):
            raise UsageError(
                "pass 'shard': imbalance (rows of the busiest rank over the mean) is not valid",
                expected="1 or more, by=expert",
                found=f"imbalance={self.imbalance:g}, by={self.by}",
            )

    def run(self, g: Graph) -> Graph:
        if self.ranks == 1:
            return g
        return Maker(self.plan(g), AXIS_OF[self.by], self.inside(g)).run()

    def plan(self, g: Graph) -> Planner:
        """Which way each op is run. UsageError where nothing can be cut so."""
        axis = AXIS_OF[self.by]
        if axis in dict(g.mesh):
            mesh = ", ".join(f"{a}={n}" for a, n in g.mesh)
            raise UsageError(f"shard: the graph is already split over an axis {axis}", found=mesh)
        if self.attention == "heads":
            sequences.check_heads(g, self.ranks)
        if self.attention == "ring":
            sequences.check_blocks(g)
        return self.with_words(g) or self.planned(g)

    def with_words(self, g: Graph) -> Planner | None:
        """With a vocabulary that is padded so that it is cut; None where there is none, or none
        that pays."""
        count, each = words.vocabulary(g) if self.pad else 0, self.pad * self.ranks
        if count % self.ranks == 0:
            return None
        total = -(-count // each) * each
        larger = words.padded(g, count, total)
        if larger is None:
            return None
        plan = self.planned(larger)
        if not any(plan.places[v][0].is_part for v in {*larger.params} - {*g.params}):
            return None
        note = (
            f"a vocabulary of {count:,} words is padded to {total:,}, so that "
            "it can be split over tp"
        )
        plan.g = replace(larger, assumed=(*g.assumed, note))
        return plan

    def planned(self, g: Graph) -> Planner:
        homes, stay = self.seeds(g)
        hints: dict[Value, Placed] = {}
        for v in (*g.inputs, *g.params):
            place = first_part(v, self.ranks)
            role = g.role_of(v)
            if place and (
                (role == "optimizer" and self.zero > 0) or (role == "weight" and self.zero > 2)
            ):
                homes[v] = place
            elif place and role == "weight" and self.zero > 0:
                hints[v] = place
        own = frozenset(statistics.of_ranks(g) if self.statistics == "rank" else ())
        plan = Planner(
            g,
            self.ranks,
            homes,
            data=self.by != "tensor",
            hints=hints,
            sums_whole=self.zero == 1,
            sequence=self.sequence,
            replicas=self.replicas,
            inside=self.inside(g).ways,
            stay=stay,
            own=own,
        )
        plan.run()
        if not any(p.is_part for p in plan.homes.values()):
            raise no_weight(g, self.ranks)
        return plan

    def seeds(self, g: Graph) -> tuple[dict[Value, Placed], frozenset[Value]]:
        """What is cut to begin with, and which of it are weights that stay so."""
        match self.by:
            case "tensor":
                return {}, frozenset()
            case "data":
                return by_inputs(g, self.ranks), frozenset()
            case "context":
                return by_sequences(g, self.ranks, self.packed(g)), frozenset()
            case "expert":
                weights = experts.homes(g, self.ranks)
                return by_inputs(g, self.ranks) | weights, frozenset(weights)

    def packed(self, g: Graph) -> int:
        """In how many parts sequences lie that other ranks cut up and gather: where they do, each
        rank has its part of each of theirs."""
        if self.by != "context":
            return 1
        long = {v.type.shape[1] for v in sequences.inputs(g)}
        cut = {
            n.op.ranks
            for n in g.nodes
            if isinstance(n.op, t.Collective)
            and n.op.fn == "reduce_scatter"
            and (rank := n.op.x.type.rank) > 2
            and n.op.axis == rank - 2
            and n.op.x.type.shape[rank - 2] in long
        }
        return cut.pop() if len(cut) == 1 else 1

    def inside(self, g: Graph) -> Inside:
        """Ops in which ranks exchange what they have."""
        match self.by:
            case "context":
                return sequences.Meeting(self.attention, self.packed(g))
            case "expert":
                return experts.Travel(self.dispatch, self.imbalance)
            case _:
                return Inside()


def no_weight(g: Graph, ranks: int) -> UsageError:
    """That tensor parallelism cuts nothing: no weight divides, or those that do do not pay."""
    weights = [v for v in g.params if g.role_of(v) == "weight" and v.type.rank > 1]
    fit = [v for v in weights if first_part(v, ranks) is not None]
    largest = max(fit, key=lambda v: v.type.nbytes, default=None)
    return UsageError(
        f"shard: no weight can be split over {ranks} ranks",
        expected="products with a weight whose columns (or heads) the number of "
        "ranks divides, which all that read the weight can use, and whose split "
        "saves more time or memory than the communication costs",
        found=f"{largest.name}: {largest.type}, the largest of {len(fit)} with a size "
        f"that {ranks} divides"
        if largest
        else f"{len(weights)} weights; the number of ranks divides none of them",
        fix=nearest_degrees(g, ranks) or "use --dp instead of --tp; in the pass, by=data",
    )


def nearest_degrees(g: Graph, ranks: int) -> str:
    """The numbers of ranks, up to twice as many, that weights can be cut over."""

    def cuts(n: int) -> bool:
        plan = Planner(g, n, {}, data=False)
        plan.run()
        return any(p.is_part for p in plan.homes.values())

    found = [n for n in range(2, 2 * ranks + 1) if cuts(n)][:8] if ranks <= MOST_TRIED else []
    return f"take {', '.join(map(str, found))} ranks" if found else ""


def by_inputs(g: Graph, ranks: int) -> dict[Value, Placed]:
    """Inputs by their first axis, those that have the batch's extent there."""
    inputs = batched(g)
    batch = batch_of(g)
    if batch == 0 or batch % ranks:
        near = [n for n in range(1, batch + 1) if batch % n == 0]
        raise UsageError(
            f"shard: a batch of {batch} cannot be split evenly over {ranks} ranks",
            expected=f"a number of ranks that divides the batch: {', '.join(map(str, near))}",
            fix=f"for example a batch of {ranks * -(-batch // ranks)}"
            if batch
            else "inputs with a batch",
        )
    return {v: part(0) for v in inputs if v.type.shape[0] == batch}


def batched(g: Graph) -> list[Value]:
    """The inputs that may have a batch."""
    return [v for v in g.inputs if g.role_of(v) in ("input", "cache") and v.type.rank]


def batch_of(g: Graph) -> int:
    """The batch: the first extent that most inputs have. 0 without inputs."""
    extents = [v.type.shape[0] for v in batched(g)]
    return max(extents, key=lambda n: (extents.count(n), n), default=0)


def first_part(v: Value, ranks: int) -> Placed | None:
    """The parts of a tensor along the first axis that can be cut."""
    fits = (part(i) for i in range(v.type.rank) if part(i).fits(v.type, ranks))
    return next(fits, None)


def by_sequences(g: Graph, ranks: int, parts: int) -> dict[Value, Placed]:
    """Inputs of sequences by their tokens: a rank has its part of each of so many parts."""
    long = sequences.inputs(g)
    if not long:
        raise UsageError(
            "shard: no input has a sequence axis",
            expected="inputs [batch, tokens, ..] with several tokens",
            found=", ".join(f"{v.name}: {v.type}" for v in g.inputs),
            fix="remove --cp; in the pass, use by=tensor or by=data",
        )
    odd = next((v for v in long if v.type.shape[1] % (ranks * parts)), None)
    if odd is not None:
        lengths = {v.type.shape[1] for v in long}
        most = min(lengths) // parts
        near = [n for n in range(1, most + 1) if all(s % (n * parts) == 0 for s in lengths)]
        raise UsageError(
            f"shard: a sequence of {odd.type.shape[1]} tokens cannot be split "
            f"evenly over {ranks} ranks",
            expected=f"a number of ranks that divides the sequence: {', '.join(map(str, near))}",
            fix="for example sequences of "
            f"{ranks * parts * -(-min(lengths) // (ranks * parts))} tokens",
        )
    each = {v: (v.type.shape[1] // parts,) * parts if parts > 1 else () for v in long}
    return {v: part(1, extents) for v, extents in each.items()}


class Maker:
    """Makes the graph of a rank as a plan says."""

    def __init__(self, plan: Planner, axis: str, inside: Inside):
        self.inside = inside
        self.kept: Kept = {}  # what came from other ranks inside of an op
        self.plan, self.g, self.axis, self.ranks = plan, plan.g, axis, plan.ranks
        self.group = (axis, (plan.ranks,), (prod(n for _, n in plan.g.mesh),))
        self.b = Builder(self.g.level, self.g.name, self.g.target)
        self.producers = plan.g.producers()
        self.here: dict[Value, dict[Placed, Value]] = {}  # what a rank has of each value
        self.gathered: list[Value] = []  # weights, in the forward pass
        self.forward = True
        self.draws = False  # random numbers for parts alone
        self.merged = False  # sums over ranks of two axes

    def run(self) -> Graph:
        g, b = self.g, self.b
        b.inherit(g)
        homes: dict[Value, Value] = {}
        for v in (*g.inputs, *g.params):
            (place, *_) = self.plan.places[v]
            make = b.input if v in self.plan.inputs else b.param
            homes[v] = make(v.name, place.type(v.type, self.ranks))
            self.here[v] = {place: homes[v]}
        b.reserve(r.name for n in g.nodes for r in n.results)
        for node in g.nodes:
            b.locs = node.locs
            if self.forward and phase_of(node) is not None:
                self.forward = False
                self.forget()
            self.node(node)
        outputs = [self.output(v) for v in g.outputs]
        over = [o and homes[o] for o in g.over]
        if self.draws:
            b.assumed.append(f"each rank of {self.axis} draws random numbers only for its own part")
        if any(sequences.is_balanced(n.op) for n in b.nodes):
            b.assumed.append(
                f"the queries of each rank of {self.axis} attend to the same "
                "number of keys on average"
            )
        if any(way.axis == "own" for way in self.plan.chosen.values()):
            b.assumed.append(
                "batch norm computes its statistics for each part of the batch separately"
            )
        made = b.finish(outputs, over)
        made = prune(made) if self.draws or self.merged else made
        mesh = (*g.mesh, (self.axis, self.ranks))
        cuts = dict.fromkeys((*g.cuts, *self.cuts(homes, outputs)))
        return replace(made, mesh=mesh, cuts=tuple(cuts))

    def cuts(self, homes: dict[Value, Value], outputs: list[Value]) -> Iterator[tuple[str, Cut]]:
        ends = [*homes.items(), *zip(self.g.outputs, outputs, strict=True)]
        for v, value in ends:
            place = next(p for p, x in self.here[v].items() if x == value)
            if place.is_part:
                yield value.name, Cut(self.axis, place.axis, place.parts)

    def output(self, v: Value) -> Value:
        """As the plan has it: the last of a value's places is where it is left. What brings it
        there has the location of the value's own node."""
        node = self.producers.get(v)
        self.b.locs = node.locs if node else self.b.locs
        return self.at(v, self.plan.ends[v])

    # ------------------------------------------------------------------------ one op

    def node(self, node: Node) -> None:
        way = self.plan.chosen[node.results[0]] if node.results else None
        if way is None:
            self.b.put(node)
            return
        taken = [self.at(v, p) for v, p in zip(node.op.operands, way.takes, strict=True)]
        op = with_operands(node.op, taken)
        if way.sends:
            results = self.exchanged(op, node, way)
        elif op is node.op and self.is_whole(node, way):
            self.b.put(node)
            results = node.results
        else:
            pairs = zip(node.results, way.gives, strict=True)
            types = [p.type(v.type, self.ranks) for v, p in pairs]
            if way.axis == "rows":
                op = rows.made(op, self.b, self.group)
            elif way.axis == "between":
                op = experts.between_products(op, self.b, self.group)
            elif way.axis:
                op = of_each(op, way, self.ranks) if way.axis == "tensors" else op
                op = local(op, way.axis, tuple(x.shape for x in types), self.ranks)
            results = self.add(op, node, way)
        for v, p, made in zip(node.results, way.gives, results, strict=True):
            self.here[v] = {p: made}
            self.settle(v, p)

    def is_whole(self, node: Node, way: ShardWay) -> bool:
        """Whether all ranks have the results, under their own names."""
        own = all(self.home(v) == WHOLE for v in node.results)
        return own and not way.axis and all(p == WHOLE for p in way.gives)

    def add(self, op: Op, node: Node, way: ShardWay) -> tuple[Value, ...]:
        """Appends an op; a mean over the part that a rank has counts for that part."""
        if isinstance(op, t.Reduce) and op.fn == "mean" and way.axis and SUM in way.gives:
            op = t.Map("mul", (self.b(op),), (1 / self.ranks,))
        names = [self.name(v, p) for v, p in zip(node.results, way.gives, strict=True)]
        return self.put(op, names)

    def exchanged(self, op: Op, node: Node, way: ShardWay) -> list[Value]:
        """Appends the ops that give what a rank has of a node's results, under their names."""
        start = len(self.b.nodes)
        made = self.inside.made(way.axis, op, self.b, self.group, self.kept)
        pairs = zip(made, node.results, way.gives, strict=True)
        named = {x: Value(self.name(v, p), x.type) for x, v, p in pairs}
        self.b.rename(start, named)
        self.kept |= {(named[v], how): x for (v, how), x in self.kept.items() if v in named}
        return [named[x] for x in made]

    def put(self, op: Op, names: list[str]) -> tuple[Value, ...]:
        results = tuple(Value(n, x) for n, x in zip(names, op.result_types, strict=True))
        self.b.put(Node(op, results, self.b.locs))
        return results

    def home(self, v: Value) -> Placed:
        """Where a value has its own name: an output where it is left, another where it is made."""
        return self.plan.ends.get(v) or self.plan.places[v][0]

    def name(self, v: Value, place: Placed) -> str:
        own = place == self.home(v)
        return v.name if own else self.b.names.fresh(f"{v.name}.{place.kind}")

    def settle(self, v: Value, place: Placed) -> None:
        """Adds terms up where the plan says that a value is not left as a sum."""
        if place == SUM and len(self.plan.places[v]) > 1:
            self.at(v, self.plan.places[v][1])

    # ------------------------------------------------------------------------ moving

    def at(self, v: Value, want: Placed) -> Value:
        """What a rank has of a value where it is wanted, brought there if need be."""
        have = self.here[v]
        if want not in have:
            costs = {p: moved_bytes(v.type, p, want, self.ranks) for p in have}
            nearest = min((p for p in have if costs[p] is not None), key=lambda p: costs[p] or 0.0)
            have[want] = self.moved(v, nearest, want)
            if self.forward and nearest.is_part and self.plan.data and self.plan.param_of(v):
                self.gathered.append(v)
        return have[want]

    def forget(self) -> None:
        """Weights that were gathered for the forward pass are not kept for the backward pass."""
        for v in self.gathered:
            self.here[v].pop(WHOLE, None)
        self.kept = {(v, how): x for (v, how), x in self.kept.items() if how != "keys"}

    def moved(self, v: Value, have: Placed, want: Placed) -> Value:
        adds = have == SUM and len(set(want.parts)) == 1
        if (have.parts or want.parts) and (have, want).count(WHOLE) == 0 and not adds:
            return self.moved_whole(v, want)
        (value,) = self.put(self.mover(v, have, want), [self.name(v, want)])
        return value

    def moved_whole(self, v: Value, want: Placed) -> Value:
        self.at(v, WHOLE)
        (value,) = self.put(self.mover(v, WHOLE, want), [self.name(v, want)])
        return value

    def mover(self, v: Value, have: Placed, want: Placed) -> Op:
        """The op that brings a value from one place to another."""
        x = self.here[v][have]
        match have.kind, want.kind:
            case "whole", "part":
                return self.own(v, x, want)
            case _ if have.parts or want.parts:
                return self.packed(x, have, want)
            case "part", "whole":
                return t.Collective("all_gather", x, *self.group, axis=have.axis)
            case "whole", "sum":
                return t.Map("mul", (x,), (1 / self.ranks,))
            case "sum", "whole":
                return self.added_up(x)
            case "sum", "part":
                return t.Collective("reduce_scatter", x, *self.group, axis=want.axis)
            case _:
                return t.Collective("all_to_all", x, *self.group, axis=want.axis, to=have.axis)

    def added_up(self, x: Value) -> t.Collective:
        """The sum over ranks, with one over other ranks that it follows: that of a gradient over
        contexts and then over parts of the batch is one."""
        match self.b.producer(x):
            case t.Collective("all_reduce", terms, combine="add") as over:
                self.merged = True
                name, sizes, strides = self.group
                group = (f"{over.group}+{name}", over.sizes + sizes, over.strides + strides)
                return t.Collective("all_reduce", terms, *group)
            case _:
                return t.Collective("all_reduce", x, *self.group)

    def own(self, v: Value, x: Value, want: Placed) -> Op:
        """A rank's own part; of what is the same everywhere, as much of it."""
        type = want.type(v.type, self.ranks)
        match self.b.producer(x):
            case t.Constant() as made if len(made.data) == 1:
                return t.Constant(type, made.data)
            case t.Broadcast(y) if is_spread(y.type, v.type, want.axis):
                return t.Broadcast(y, type.shape)
            case t.Routine("random", gives=(_,)) as drawn:
                self.draws = True
                attrs = tuple((k, type.shape if k == "shape" else a) for k, a in drawn.attrs)
                return replace(drawn, gives=(type,), attrs=attrs, work=type.size)
            case _ if want.parts:
                return self.packed(x, WHOLE, want)
            case _:
                return t.Shard(x, want.axis, *self.group)

    def packed(self, x: Value, have: Placed, want: Placed) -> Op:
        """What lies packed along an axis: where all is as long, an axis of its own at once."""
        place = have if have.is_part else want
        if len(set(place.parts)) > 1:
            return self.each_part(x, have, want)
        apart, axis = self.b(opened(x, place.axis, len(place.parts))), place.axis + 1
        match have.kind, want.kind:
            case "part", _:
                moved = t.Collective("all_gather", apart, *self.group, axis=axis)
            case "sum", _:
                moved = t.Collective("reduce_scatter", apart, *self.group, axis=axis)
            case _:
                moved = t.Shard(apart, axis, *self.group)
        return closed(self.b(moved), place.axis)

    def each_part(self, x: Value, have: Placed, want: Placed) -> Op:
        """Each of what lies packed along an axis by itself."""
        axis, pieces, start = (have if have.is_part else want).axis, list[Value](), 0
        for whole in have.parts or want.parts:
            extent = whole // self.ranks if have.is_part else whole
            shape = x.type.shape
            starts = tuple(start if i == axis else 0 for i in range(len(shape)))
            sizes = tuple(extent if i == axis else n for i, n in enumerate(shape))
            piece = self.b(t.Slice(x, starts, sizes, (1,) * len(shape)))
            start += extent
            if have.is_part:
                pieces.append(self.b(t.Collective("all_gather", piece, *self.group, axis=axis)))
            else:
                pieces.append(self.b(t.Shard(piece, axis, *self.group)))
        return t.Concat(tuple(pieces), axis)


def is_spread(x: TensorType, to: TensorType, axis: int) -> bool:
    """Whether a broadcast makes the cells along an axis from one."""
    behind = to.rank - axis
    return behind > x.rank or x.shape[-behind] == 1


def with_operands(op: Op, operands: list[Value]) -> Op:
    """An op with other operands, one by one: the same value may be replaced by several."""
    if [*op.operands] == operands:
        return op
    left = iter(operands)
    changes: dict[str, Any] = {}
    for name in field_names(type(op)):
        match getattr(op, name):
            case Value():
                changes[name] = next(left)
            case (Value(), *rest):
                changes[name] = (next(left), *islice(left, len(rest)))
            case _:
                pass
    return replace(op, **changes)
