"""A model over the ranks of a cluster, the whole way: cut, lowered, costed, run."""

from __future__ import annotations

import gc
from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike, fspath

from gpuir.cost.collective import collective_time
from gpuir.cost.habits import Release, release_of
from gpuir.cost.table import Predictor
from gpuir.ir.alike import shape_of
from gpuir.ir.door import CALLED, FLAG, PATH, TEXT, ArgumentKind, named, of_type, real, takes, whole
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import GRAPH, Graph, Level, Node, Value
from gpuir.ir.phases import is_training
from gpuir.ir.types import DType, f32, tf32
from gpuir.ir.verify import verify
from gpuir.ops.kernel import Collective
from gpuir.passes.accumulate import additions
from gpuir.passes.bucket import Bucket
from gpuir.passes.manager import Pass
from gpuir.passes.math import run_under
from gpuir.passes.partition.balance import Weigh, longest_of, paced, roofline_s
from gpuir.passes.partition.partition import PartGraphs, Partition, partition
from gpuir.passes.shard.shard import ShardPass, batch_of
from gpuir.report.answer import Answer, of_ranks
from gpuir.run.analysis import costed, lower
from gpuir.simulate.held import (
    PartBytes,
    beside_gradients,
    held_bytes,
    params_of,
    part_bytes,
)
from gpuir.simulate.layout import MemoryKind
from gpuir.simulate.memory import available_bytes, memory
from gpuir.simulate.microbatches import Order, Pipelined, orders_of, run_pipeline
from gpuir.simulate.parallel import Parallel
from gpuir.simulate.step import (
    GraphRun,
    RankPart,
    Stage,
    Step,
    Where,
    beside,
    exposed,
    interval_of,
    model_flops,
    part_times,
    shared_by_tp,
    slowest_of,
    total_s,
    whole_step,
)
from gpuir.simulate.timeline import timeline
from gpuir.targets.cluster import Cluster, load_cluster
from gpuir.targets.load import load_target
from gpuir.targets.profile import Profile, profile_of
from gpuir.targets.target import Target

SHARES = (
    "the ranks of dp, tp, cp and ep have equal shares of the work, so fast GPUs wait for slow ones"
)

SLOWEST = 1000.0  # times as long as another: beyond lies a slip of the pen
WORDS = 128  # a rank: Megatron-LM's default for what a padded vocabulary divides by


@takes(
    graph=GRAPH,
    cluster=PATH,
    parallel=of_type(Parallel, "degrees of parallelism", "gpuir.Parallel(dp=4, tp=2)"),
    profile=PATH,
    predictor=TEXT | CALLED,
    tf32=FLAG,
    slow=named(real(), whole()),
    common=ArgumentKind("what plans share", lambda x: isinstance(x, SharedByPlans), "common=None"),
)
def simulate_ranks(
    graph: Graph,
    cluster: str | PathLike[str],
    parallel: Parallel,
    *,
    profile: str | PathLike[str] | None = None,
    predictor: str | Predictor = "tile",
    tf32: bool | None = None,
    slow: Mapping[int, float] | None = None,
    common: SharedByPlans | None = None,
) -> Answer:
    """One step of a model over the ranks of a cluster: how long it takes, and as `step` what each
    rank does.

        g = gpuir.load("model.onnx", dims={"batch": 64}, train=True, optimizer="adamw")
        answer = gpuir.simulate_ranks(g, "dgx-h100", gpuir.Parallel(dp=4, tp=2))

    `graph` is of level graph: what all ranks run together of one microbatch, a training step or
    inference. Ranks that do the same are simulated once, and so are parts of a pipeline that are
    alike. On a cluster of several kinds of GPU each rank has its own: parts of a pipeline are cut
    for theirs, and ranks that share a part wait for the slowest. `slow` are ranks whose kernels
    take so many times as long: stragglers. `common` keeps what plans of a model share.
    UsageError where the cluster has too few GPUs, or the model cannot be cut so.
    """
    ranks = _Ranks(
        graph=graph,
        cluster=fspath(cluster),
        parallel=parallel,
        profile=profile,
        predictor=predictor,
        tf32=tf32,
        slow=slow or {},
        common=common or SharedByPlans(),
    )
    with _no_collection():
        return of_ranks(ranks.step())


KEPT = 6  # graphs that are cut


@dataclass
class SharedByPlans:
    """What plans of one model have in common, kept from one to the next: graphs cut over ranks, the
    last few, for those that begin with the same cuts; and of the last plan what parts of a pipeline
    take. All are of one predictor, profile and choice of TF32."""

    graphs: dict[tuple[int, tuple[Pass, ...]], tuple[Graph, Graph]] = field(
        default_factory=dict[tuple[int, tuple[Pass, ...]], tuple[Graph, Graph]]
    )
    runs: Mapping[Hashable, GraphRun] = field(default_factory=dict[Hashable, GraphRun])

    def cut(self, graph: Graph, passes: Sequence[Pass]) -> Iterator[Graph]:
        """The graph after each of the passes."""
        g = graph
        for i, made in enumerate(passes, 1):
            key = id(graph), tuple(passes[:i])
            _, found = self.graphs.pop(key, (graph, None))
            g = found or made.run(g)  # who lowers it verifies it
            self.graphs[key] = graph, g  # with the graph whose identity is the key
            yield g
        for key in list(self.graphs)[:-KEPT]:
            del self.graphs[key]


@contextmanager
def _no_collection() -> Generator[None]:
    """Without searches for cycles of objects: graphs have none, and millions of objects."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def check(graph: Graph, machine: Cluster, parallel: Parallel, slow: Mapping[int, float]) -> None:
    """UsageError where a model, a cluster and degrees do not go together."""
    if graph.level != Level.graph or graph.mesh:
        raise UsageError(
            f"@{graph.name} is already lowered or split",
            expected="a graph of level graph that is not split over ranks",
            found=f"level {graph.level.name}"
            + (f", mesh {', '.join(f'{a}={n}' for a, n in graph.mesh)}" if graph.mesh else ""),
        )
    parallel.check()
    if parallel.ranks > machine.gpus:
        nodes = -(-parallel.ranks // machine.node_gpus)
        raise UsageError(
            f"the cluster {machine.name} has too few GPUs",
            expected=f"{parallel.ranks} for {parallel}",
            found=str(machine.gpus),
            fix=f"a cluster of {nodes} nodes, or degrees with a product of at most {machine.gpus}",
        )
    for rank, factor in slow.items():
        if not 0 <= rank < parallel.ranks or not 1 <= factor <= SLOWEST:
            raise UsageError(
                "slow is out of range",
                expected=f"a rank from 0 to {parallel.ranks - 1} and a factor from 1 to "
                f"{SLOWEST:g}",
                found=f"{rank}={factor:g}",
                fix=f"{parallel.ranks - 1}=1.3, say",
            )
    check_batch(graph, parallel)
    if parallel.zero and not is_training(graph):
        raise UsageError(
            "zero needs a training step with an optimizer",
            fix="add --train --optimizer adamw, or remove zero",
        )


def check_batch(graph: Graph, parallel: Parallel) -> None:
    """UsageError where a microbatch, which is what the graph is of, has too few sequences for its
    ranks: with the nearest number of microbatches that would do."""
    ranks, count, batch = parallel.dp * parallel.ep, parallel.microbatches, batch_of(graph)
    if count == 1 or ranks == 1 or batch % ranks == 0:
        return
    whole = batch * count
    near = [n for n in range(1, whole + 1) if whole % (n * ranks) == 0]
    best = min(near, key=lambda n: abs(n - count), default=0)
    raise UsageError(
        f"a microbatch of {batch} sequences (of a batch of {whole}) "
        f"cannot be split evenly over {ranks} ranks",
        expected="the same number of sequences of a microbatch on each rank of dp and ep",
        found=f"batch {whole}, microbatches={count}, dp={parallel.dp}, ep={parallel.ep}",
        fix=f"microbatches={best}" if best else f"a batch that is a multiple of {ranks}",
    )


def cuts(parallel: Parallel) -> Iterator[Pass]:
    """The passes that cut a graph so: neighbours share the weights of a layer, as their links are
    the fastest."""
    if parallel.tp > 1:
        replicas = parallel.dp * parallel.cp * parallel.ep
        sequence = parallel.sequence
        yield ShardPass(parallel.tp, "tensor", sequence=sequence, pad=WORDS, replicas=replicas)
    if parallel.cp > 1:
        yield ShardPass(parallel.cp, "context", attention=parallel.exchange)
    if parallel.ep > 1:
        yield ShardPass(parallel.ep, "expert")
    if parallel.dp > 1:
        yield ShardPass(parallel.dp, "data", zero=parallel.zero, statistics="rank")


@dataclass(frozen=True)
class PartPlace:
    """Where the ranks are that run a part of a model: what joins them, and a name `load_cluster`
    knows it by; of each kind of GPU, by its name, how many times as long its kernels take."""

    name: str
    cluster: Cluster
    factors: tuple[tuple[str, float], ...]
    where: tuple[Where, ...]

    @property
    def key(self) -> Hashable:
        """Ranks of places that have this in common run a graph alike."""
        return self.cluster, self.factors

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(gpu for gpu, _ in self.factors)

    @property
    def smallest(self) -> Target:
        """The GPU with the least memory."""
        return min((load_target(gpu) for gpu in self.gpus), key=available_bytes)

    @property
    def weigh(self) -> Weigh:
        """Seconds of a node on the slowest GPU, roughly."""
        return longest_of([roofline_s(load_target(gpu)) for gpu in self.gpus])


# The parts of a pipeline, when each runs, the interval of that, and what was run.
Piped = tuple[tuple[RankPart, ...], Pipelined, "tuple[float, float] | None", tuple[Stage, ...]]


@dataclass
class _Ranks:
    """What is asked of a model over ranks, and kernels and times of what these run: each graph
    (`known`) and each part's memory (`sizes`) found once."""

    graph: Graph
    cluster: str
    parallel: Parallel
    profile: str | PathLike[str] | None
    predictor: str | Predictor
    tf32: bool | None
    slow: Mapping[int, float]
    common: SharedByPlans
    known: dict[Hashable, GraphRun] = field(default_factory=dict[Hashable, GraphRun])
    sizes: dict[Hashable, PartBytes] = field(default_factory=dict[Hashable, PartBytes])

    @cached_property
    def machine(self) -> Cluster:
        return load_cluster(self.cluster)

    @cached_property
    def stack(self) -> Profile:
        return profile_of(run_under(self.graph, self.profile, self.tf32))

    @cached_property
    def release(self) -> Release | None:
        """Of the whole model: none that is cut knows which of its products are narrow."""
        return release_of(self.stack, self.graph) if self.predictor == "tile" else None

    def step(self) -> Step:
        graph, machine, parallel = self.graph, self.machine, self.parallel
        check(graph, machine, parallel, self.slow)
        verify(graph)
        after = list(self.common.cut(graph, tuple(cuts(parallel))))
        cut = after[-1] if after else graph
        if parallel.pp > 1:
            parts, pipelined, interval, stages = self.pipeline(cut)
            time_s = pipelined.time_s
        else:
            part = self.whole(cut)
            parts, pipelined, stages = (part,), None, ()
            time_s, interval = total_s(part.runs), interval_of(part.runs)
        felt_s, again_s = beside(parts, self.stack.habits)
        if interval is not None:
            interval = interval[0] + felt_s + again_s, interval[1] + felt_s + again_s
        self.common.runs = self.known
        first = parts[0].runs[0].graph
        dtype = product_dtype(graph, is_rounded(first))
        used = [x for part in parts for x in part.where]
        gpus = {x.gpu: load_target(x.gpu) for x in used}
        assumed = [*first.assumed, *(text for x in gpus.values() for text in x.assumptions)]
        if len(gpus) > 1:
            runs = (run for part in parts for run in part.runs)
            assumed = [SHARES, *machine.assumed, *(x for run in runs for x in run.graph.assumed)]
            assumed += [f"{name}: {x}" for name in gpus for x in gpus[name].assumptions]
        return Step(
            model=graph.name,
            cluster=machine.name,
            target=", ".join(gpus),
            parallel=parallel,
            profile=profile_of(first),
            time_s=time_s + felt_s + again_s,
            parts=parts,
            flops=model_flops(graph) * parallel.microbatches,
            peak_flops_per_s=sum(x.count * gpus[x.gpu].peak("tensor", dtype) for x in used),
            params=sum(v.type.size for v in graph.params if graph.role_of(v) == "weight"),
            interval=interval,
            pipelined=pipelined,
            stages=stages,
            assumed=tuple(dict.fromkeys(assumed)),
            felt_s=felt_s,
            again_s=again_s,
            tp_shared=shared_by_tp(graph, after[0], parallel.tp) if parallel.tp > 1 else None,
        )

    def costed(
        self, g: Graph, place: PartPlace, gpu: str, factor: float, early: bool = True
    ) -> Graph:
        made = lower(g, profile=self.profile, tf32=self.tf32, target=gpu)
        if made.mesh:
            bucket = Bucket(blocks=self.parallel.zero > 2, early=early)
            made = bucket.run(made)
        found = costed(
            made, target=gpu, predictor=self.release or self.predictor, cluster=place.name
        )
        return slowed(found, factor, self.parallel.tp if self.parallel.overlap else 1)

    @cached_property
    def places(self) -> tuple[PartPlace, ...]:
        """Where the ranks of each part of a pipeline are."""
        return tuple(map(self.place, range(self.parallel.pp)))

    def place(self, rank: int) -> PartPlace:
        """Where the ranks are that have one rank's part of a pipeline."""
        first, count = rank * self.stride, self.stride
        machine = self.machine.part(first, count)
        name = self.cluster
        if machine is not self.machine:
            name = f"{name}[{first}:{first + count}]"
        slow: dict[str, float] = {}
        where: list[Where] = []
        for x in self.machine.stretches:
            a, b = max(x.first, first), min(x.end, first + count)
            if a < b:
                factors = (f for r, f in self.slow.items() if a <= r < b)
                gpu = x.cluster.gpu
                slow[gpu] = max(slow.get(gpu, 1.0), max(factors, default=1.0))
                where.append(Where(gpu, a, b - a))
        return PartPlace(name, machine, tuple(slow.items()), tuple(where))

    def whole(self, g: Graph) -> RankPart:
        """What ranks do that all have the whole model."""
        p, (place,) = self.parallel, self.places
        every: list[tuple[GraphRun, ...]] = []
        held: list[tuple[dict[MemoryKind, int], int, Target]] = []
        for gpu, factor in place.factors:
            costed = self.costed(g, place, gpu, factor)
            every.append(tuple(whole_step(costed, profile_of(costed), p.microbatches, p.zero)))
            target = load_target(gpu)
            found = memory(costed, target)
            holds, taken = found.parts, found.reserved_bytes
            if p.microbatches > 1:
                holds, taken = beside_gradients(found)
            held.append((holds, taken, target))
        runs = tuple(map(slowest_of, zip(*every, strict=True)))
        if p.microbatches > 1 and (sums := additions(g)).nodes:
            added = self.run("sums of gradients", p.microbatches - 1, sums, place)
            runs = (runs[0], added, *runs[1:])
        holds, taken, target = min(held, key=lambda x: available_bytes(x[2]) - x[1])
        return _part(runs, holds, taken, target, graphs=(g,), place=place)

    def run(
        self, name: str, times: int, g: Graph, place: PartPlace, early: bool = True
    ) -> GraphRun:
        """A graph that ranks run so many times; of those that are alike, one is looked at."""
        p = self.parallel
        shape = shape_of(g), place.key, p.zero > 2, p.overlap and p.tp, early
        known = self.known.get(shape) or self.common.runs.get(shape)
        if known is None:
            found: list[GraphRun] = []
            for gpu, factor in place.factors:
                costed = self.costed(g, place, gpu, factor, early)
                profile = replace(profile_of(costed), copies=None)
                found.append(GraphRun(name, times, costed, timeline(costed, profile)))
            known = slowest_of(found)
        self.known[shape] = known
        quicker = tuple(replace(x, name=name, times=times) for x in known.quicker)
        return replace(known, name=name, times=times, quicker=quicker)

    # ------------------------------------------------------------------------ pipelines

    def pipeline(self, g: Graph) -> Piped:
        """The parts of each rank of a pipeline, and when they run.

        On several kinds of GPU the model is cut as if they were alike, and then so that parts take
        as long by what kernels took on each; the quicker that fits is kept.
        """
        p = self.parallel
        apart = p.schedule == "zero-bubble"
        own = [self.places[i % p.pp] for i in range(p.pp * p.chunks)]
        alike = self.places[0].weigh
        made = partition(g, len(own), alike, apart)
        found = self.piped(made, own)
        if len({place.gpus for place in own}) == 1:
            return found
        weighs = {place.gpus: place.weigh for place in own}
        took, alone = dict.fromkeys(weighs, 0.0), dict.fromkeys(weighs, 0.0)
        for part, place, times in zip(made.parts, own, found[1].times, strict=True):
            slow = max(factor for _, factor in place.factors)  # no plan knows of stragglers
            took[place.gpus] += (times.forward + times.backward + times.weights) / slow
            passes = (part.forward, part.backward, part.weights)
            nodes = (n for g in passes if g for n in g.nodes)
            alone[place.gpus] += sum(map(weighs[place.gpus], nodes))
        weighs = {
            gpus: paced(weigh, took[gpus] / alone[gpus] if alone[gpus] else 1.0)
            for gpus, weigh in weighs.items()
        }
        made = partition(g, len(own), [weighs[place.gpus] for place in own], apart)
        return min(
            found, self.piped(made, own), key=lambda x: (not all(y.fits for y in x[0]), x[1].time_s)
        )

    def piped(self, made: Partition, own: Sequence[PartPlace]) -> Piped:
        """The parts of each rank of a pipeline, of a model that is cut, and when they run."""
        p = self.parallel
        orders = orders_of(p, made.parts[0].backward is not None)
        runs = list(map(self.part_runs, made.parts, own))
        sends = [self.send_s(part.sends, i) for i, part in enumerate(made.parts[:-1])]
        back = [self.send_s(part.sends_back, i) for i, part in enumerate(made.parts[1:])]
        stages = tuple(map(Stage, runs, self.shared_s(made)))
        found = [
            run_pipeline(orders, part_times(stages, end), sends, back, self.norm_s(made))
            for end in (None, 0, 1)
        ]
        parts = tuple(
            self.held(made.parts[r :: p.pp], runs[r :: p.pp], order, own[r], sums_s)
            for r, (order, sums_s) in enumerate(zip(found[0].orders, found[0].sums_s, strict=True))
        )
        ends = [run.timeline.interval for some in runs for run in some.values()]
        interval = None if any(e is None for e in ends) else (found[1].time_s, found[2].time_s)
        sent = tuple(_nbytes(part.sends) for part in made.parts[:-1])
        sent_back = tuple(_nbytes(part.sends_back) for part in made.parts[1:])
        return parts, replace(found[0], sent=sent, sent_back=sent_back), interval, stages

    def part_runs(self, part: PartGraphs, place: PartPlace) -> dict[str, GraphRun]:
        """What runs of a part. The last microbatch's pass sums gradients beside its kernels, which
        are slower then, where no other part waits for it; else behind them, beside what follows. So
        does Megatron-LM, whose ranks but the first sum in their bubble (`enable_grad_sync` in its
        schedules.py)."""
        m = self.parallel.microbatches
        times = {"forward": m, "backward": m, "weights": m}
        if part.last is not None:
            times["weights" if part.weights is not None else "backward"] -= 1
        beside = part.weights is not None or not part.sends_back
        return {
            name: self.run(name, times.get(name, 1), g, place, beside or name != "last")
            for name, g in part.passes.items()
        }

    @property
    def stride(self) -> int:
        """How far apart ranks are that have neighbouring parts."""
        return self.parallel.ranks // self.parallel.pp

    def send_s(self, values: Sequence[Value], part: int) -> float:
        """Seconds until values are on the rank of the next part, or back."""
        if not values:
            return 0.0
        dtype, pp = values[0].type.dtype, self.parallel.pp
        first, last = sorted((part % pp, (part + 1) % pp))
        machine = self.between(first, last)
        stride = (last - first if machine.kinds else 1) * self.stride
        return collective_time(
            "send", _nbytes(values), dtype, sizes=(2,), strides=(stride,), cluster=machine
        ).time_s

    def between(self, first: int, last: int) -> Cluster:
        """What joins the ranks of a pipeline from one to another."""
        return self.machine.part(first * self.stride, (last + 1 - first) * self.stride)

    def shared_s(self, made: Partition) -> list[float]:
        """Of each part, the seconds in which gradients of weights that several parts have are added
        up over these."""
        seconds = [0.0] * len(made.parts)
        pp = self.parallel.pp
        for x in made.shared:
            time_s = self.added_up_s(x.value, sorted({part % pp for part in x.parts}))
            for part in x.parts:
                seconds[part] += time_s
        return seconds

    def norm_s(self, made: Partition) -> float:
        """Seconds in which all ranks of a pipeline add up what they have of a norm."""
        every = range(self.parallel.pp)
        return sum(self.added_up_s(x.value, every) for x in made.norms)

    def added_up_s(self, value: Value, ranks: Sequence[int]) -> float:
        """Seconds in which ranks of a pipeline, evenly apart, add up what they have."""
        if len(ranks) < 2:
            return 0.0
        step = self.stride * ((ranks[-1] - ranks[0]) // (len(ranks) - 1))
        machine, dtype = self.between(ranks[0], ranks[-1]), value.type.dtype
        return collective_time(
            "all_reduce",
            value.type.nbytes,
            dtype,
            sizes=(len(ranks),),
            strides=(step,),
            cluster=machine,
        ).time_s

    def held(
        self,
        parts: Sequence[PartGraphs],
        runs: Sequence[dict[str, GraphRun]],
        order: Order,
        place: PartPlace,
        sums_s: float,
    ) -> RankPart:
        """What a rank of a pipeline runs, and holds when it is at its fullest."""
        own = place.smallest
        chunks = [self.part_bytes(part, some, own) for part, some in zip(parts, runs, strict=True)]
        holds = held_bytes(order, chunks)
        every = exposed([run for some in runs for run in some.values()], sums_s)
        total = sum(holds.values())
        graphs = [g for x in parts for g in x.graphs]
        return _part(every, holds, total, own, graphs=graphs, place=place)

    def part_bytes(self, part: PartGraphs, runs: dict[str, GraphRun], target: Target) -> PartBytes:
        """Of a part, whose graphs may have been looked at as those of another, under its names."""
        called: dict[str, dict[str, str]] = {}
        for g, (kind, run) in zip(part.graphs, runs.items(), strict=True):
            ends = (*run.graph.inputs, *run.graph.outputs), (*g.inputs, *g.outputs)
            called[kind] = {there.name: own.name for there, own in zip(*ends, strict=True)}
        saved, kept = ({v.name for v in some} for some in (part.saved, part.kept))
        seen = (
            (id(runs[kind].graph), *(i for i, own in enumerate(names.values()) if own in some))
            for some in (saved, kept)
            for kind, names in called.items()
        )
        key = tuple(seen)
        if key not in self.sizes:
            lowered = {kind: run.graph for kind, run in runs.items()}
            self.sizes[key] = part_bytes(lowered, saved, kept, target, called)
        return replace(self.sizes[key], params=params_of(part.graphs))


def _part(
    runs: tuple[GraphRun, ...],
    holds: dict[MemoryKind, int],
    held_bytes: int,
    target: Target,
    *,
    graphs: Sequence[Graph],
    place: PartPlace,
) -> RankPart:
    weights = {v for g in graphs for v in g.params if g.role_of(v) == "weight"}
    return RankPart(
        runs,
        tuple((kind, n) for kind, n in holds.items() if n),
        held_bytes,
        available_bytes(target),
        params=sum(v.type.size for v in weights),
        where=place.where,
    )


def _nbytes(values: Sequence[Value]) -> int:
    return sum(v.type.nbytes for v in values)


def slowed(costed: Graph, slow: float, pieces: int) -> Graph:
    """The graph with kernels that take `slow` times as long, and with gathers and sums of tp in so
    many pieces, each beside the product of another piece: one of them shows, the others are taken
    to be hidden (Transformer Engine's userbuffers; PyTorch's asynchronous tensor parallelism).
    Along sequences all of them lie next to a product, but those of the embedding."""
    if slow == pieces == 1:
        return costed

    def factor(n: Node) -> float:
        if not isinstance(n.op, Collective):
            return slow
        x = n.op.collective
        return 1 / pieces if x.group == "tp" and x.fn in ("all_gather", "reduce_scatter") else 1.0

    nodes = (replace(n, cost=n.cost.scaled(factor(n))) if n.cost else n for n in costed.nodes)
    return replace(costed, nodes=tuple(nodes))


def is_rounded(costed: Graph) -> bool:
    """Whether products of f32 run in TF32."""
    return any(getattr(n.op, "math", None) == tf32 for n in costed.walk())


def product_dtype(graph: Graph, rounded: bool) -> DType:
    """What the largest products are of; of f32 TF32, where they are `rounded`."""
    sums: dict[DType, int] = {}
    for n in graph.nodes:
        if n.op.contraction and n.op.operands:
            dtype = n.op.operands[0].type.dtype
            sums[dtype] = sums.get(dtype, 0) + n.op.flops()
    dtype = max(sums, key=sums.__getitem__, default=f32)
    return tf32 if rounded and dtype == f32 else dtype
