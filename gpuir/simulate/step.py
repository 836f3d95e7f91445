"""A step of a model over many ranks: what each takes, what they wait for, and what they hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from gpuir.ir.graph import Graph, Node, Value
from gpuir.ir.phases import phase_of
from gpuir.ops import kernel as k
from gpuir.simulate.causes import Again, Cause, Gain, gains
from gpuir.simulate.clock import Traffic
from gpuir.simulate.fitting import ToFit
from gpuir.simulate.microbatches import (
    LastPass,
    PartTimes,
    Pipelined,
    Sums,
    Task,
    orders_of,
    run_pipeline,
)
from gpuir.simulate.overlap import rate_beside
from gpuir.simulate.parallel import Parallel
from gpuir.simulate.timeline import Timeline, share_of, timeline
from gpuir.targets.profile import Habits, Profile

LITTLE = 0.75  # of products: about 2/3 are those between the layers of a block's MLP


@dataclass(frozen=True)
class GraphRun:
    """A graph that a rank runs so many `times` in a step: its costed kernels, and when they run.

    Where ranks that run it have several kinds of GPU this is the slowest, and `quicker` are the
    others, which wait for it.
    """

    name: str
    times: int
    graph: Graph = field(repr=False)
    timeline: Timeline = field(repr=False)
    quicker: tuple[GraphRun, ...] = field(default=(), repr=False)

    @property
    def gpu(self) -> str:
        """The target that its kernels are costed for."""
        return self.graph.target or ""

    @property
    def kernels_s(self) -> float:
        """What kernels take that are no collectives, of a whole step."""
        sent = sum(x.time_s for x in self.timeline.traffic)
        return self.times * (self.timeline.device_s - sent)


@dataclass(frozen=True)
class Where:
    """Ranks from `first` on that have a kind of GPU, named by its target."""

    gpu: str
    first: int
    count: int


@dataclass(frozen=True)
class RankPart:
    """What ranks that are alike do in a step: those that have the same layers of a pipeline, all of
    them where there is none. `holds` are the bytes of one of them at its peak, by kind;
    `held_bytes` is what its allocator takes for them, of the device's `available_bytes`: of several
    kinds of GPU, that with least to spare. `where` are the ranks, by kind.
    """

    runs: tuple[GraphRun, ...]
    holds: tuple[tuple[str, int], ...]
    held_bytes: int
    available_bytes: int
    params: int
    where: tuple[Where, ...] = ()

    @property
    def fits(self) -> bool:
        return self.held_bytes <= self.available_bytes

    @property
    def kernels_s(self) -> float:
        """What kernels take that are no collectives, of a whole step."""
        return sum(r.kernels_s for r in self.runs)

    @property
    def kernels_on(self) -> dict[str, float]:
        """The same on each kind of GPU that its ranks have: the quicker wait for the others."""
        return {
            gpu: sum(x.kernels_s for r in self.runs for x in (r, *r.quicker) if x.gpu == gpu)
            for gpu in dict.fromkeys(x.gpu for x in self.where)
        }

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """The collectives of a whole step, by group."""
        found: dict[str, Traffic] = {}
        for r in self.runs:
            for x in r.timeline.traffic:
                old = found.get(x.group, Traffic(x.group, 0, 0.0, 0.0))
                found[x.group] = Traffic(
                    x.group,
                    old.count + r.times * x.count,
                    old.time_s + r.times * x.time_s,
                    old.exposed_s + r.times * x.exposed_s,
                )
        return tuple(found.values())


@dataclass(frozen=True)
class Stage:
    """A part of a pipeline, to be run: its passes by name, and the seconds in which gradients of
    weights that several parts have are added up over these."""

    runs: Mapping[str, GraphRun]
    shared_s: float = 0.0


@dataclass(frozen=True)
class SharedByTp:
    """What ranks of tp share out: so much of the weights' bytes, and of the flops of the model's
    products. The rest each of them has, and does, whole."""

    weights: float
    flops: float

    @property
    def is_little(self) -> bool:
        """Whether ranks mostly do the same: heads or columns do not divide by them."""
        return self.flops < LITTLE

    def __str__(self) -> str:
        weights, flops = 100 * self.weights, 100 * self.flops
        return f"{weights:.0f} % of the weights and {flops:.0f} % of the products"


@dataclass(frozen=True)
class Step:
    """One step, of training or of inference, of a model over the ranks of a cluster.

    `time_s` is from the first kernel's launch to the last rank's end, and in 80 % of cases within
    `interval`, if all of it is off alike. `parts` are those of the pipeline, one without; of
    them `slowest` is the one that is busy longest. `pipelined` is when each runs which microbatch,
    and `stages` what was run for it.
    `felt_s` and `again_s` are the parts of it that the stack's habits add (`beside`).
    `flops` are those of the model's products for all ranks and microbatches together, recomputed
    ones left out; `peak_flops_per_s` is what all GPUs could do. `tp_shared` is what a cut by tp
    comes to, where there is one.
    """

    model: str
    cluster: str
    target: str
    parallel: Parallel
    profile: Profile
    time_s: float
    parts: tuple[RankPart, ...]
    flops: int
    peak_flops_per_s: float
    params: int
    interval: tuple[float, float] | None = None
    pipelined: Pipelined | None = field(default=None, repr=False)
    stages: tuple[Stage, ...] = field(default=(), repr=False)
    assumed: tuple[str, ...] = ()
    felt_s: float = 0.0
    again_s: float = 0.0
    tp_shared: SharedByTp | None = None
    to_fit: tuple[ToFit, ...] = ()

    def __repr__(self) -> str:
        spread = f"{self.model} on {self.cluster} ({self.parallel}) under {self.profile.name}"
        return f"<Step of {spread}: {self.time_s:.4g} s>"

    @cached_property
    def gains(self) -> tuple[Gain, ...]:
        """By how much the step would be shorter without each cause, the most first: the step, run
        again without it."""
        again = _Again()
        return gains(
            self.time_s - self.felt_s - self.again_s, lambda cause: again.step_s(self, cause)
        )

    @property
    def slowest(self) -> RankPart:
        return max(self.parts, key=lambda part: part.kernels_s)

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return all(part.fits for part in self.parts)

    @property
    def spare_bytes(self) -> int:
        """What the rank with least to spare has free, negative where it does not fit."""
        return min(part.available_bytes - part.held_bytes for part in self.parts)

    @property
    def fullest(self) -> RankPart:
        """The part whose ranks hold most memory."""
        return max(self.parts, key=lambda part: part.held_bytes)

    @property
    def exposed_s(self) -> float:
        """How long kernels of the slowest part wait for collectives."""
        return sum(x.exposed_s for x in self.slowest.traffic)

    @property
    def microbatch_s(self) -> float:
        """What the kernels of one microbatch take that are no collectives, in all parts together:
        forward and backward passes, without the update."""
        runs = (r for part in self.parts for r in _passes(part.runs))
        nodes = (n for r in runs for n in r.graph.nodes if phase_of(n) != "optimizer")
        return sum(n.cost.time_s for n in nodes if n.cost and not isinstance(n.op, k.Collective))

    @property
    def waits_s(self) -> float:
        """How long the kernels of one microbatch wait for collectives of ranks that share its
        sequences or layers (all but those of dp), in all parts together."""
        runs = (r for part in self.parts for r in _passes(part.runs))
        traffic = (x for r in runs for x in r.timeline.traffic)
        return sum(x.exposed_s for x in traffic if x.group != "dp")

    @property
    def is_mixed(self) -> bool:
        """Whether ranks have several kinds of GPU."""
        return len({x.gpu for part in self.parts for x in part.where}) > 1

    def run_of(self, rank: int, task: Task) -> GraphRun:
        """What runs on a rank of the pipeline as that task, or is waited for."""
        assert self.pipelined is not None
        chunks: list[dict[str, GraphRun]] = []
        for run in self.parts[rank].runs:
            if run.name == "forward":
                chunks.append({})
            chunks[-1][run.name] = run
        own = chunks[task.chunk]
        is_last = task.kind == "sums" or (task in self.pipelined.last[rank] and "last" in own)
        return own["last" if is_last else task.kind]

    @property
    def idle_s(self) -> float:
        """How long the slowest part waits for other parts."""
        if self.pipelined is None:
            return 0.0
        return self.pipelined.idle_s[self.parts.index(self.slowest)]

    @property
    def mfu(self) -> float:
        """The model's flop/s over what the GPUs could do: model flop utilisation (Chowdhery et al.,
        PaLM, 2022, appendix B)."""
        return self.flops / (self.time_s * self.peak_flops_per_s) if self.time_s else 0.0


def slowest_of(runs: Sequence[GraphRun]) -> GraphRun:
    """Of runs of one graph on several kinds of GPU the slowest, with the others."""
    slowest = max(runs, key=lambda run: run.timeline.time_s)
    return replace(slowest, quicker=tuple(run for run in runs if run is not slowest))


@dataclass
class _Again:
    """Runs without one cause or another: graphs that several run are run again once."""

    graphs: dict[int, Again] = field(default_factory=dict[int, Again])
    found: dict[tuple[int, Cause], Timeline] = field(
        default_factory=dict[tuple[int, Cause], Timeline]
    )

    def run(self, x: GraphRun, cause: Cause) -> GraphRun:
        """The run without a cause, on the GPU that is then the slowest."""
        return slowest_of([replace(y, timeline=self.line(y, cause)) for y in (x, *x.quicker)])

    def line(self, x: GraphRun, cause: Cause) -> Timeline:
        place = id(x.graph)
        if (place, cause) not in self.found:
            if place not in self.graphs:
                self.graphs[place] = Again(x.graph, x.timeline.profile)
            self.found[place, cause] = self.graphs[place].without(cause)
        return self.found[place, cause]

    def step_s(self, step: Step, cause: Cause) -> float:
        """Seconds of a step without a cause."""
        if step.pipelined is None:
            return total_s([self.run(x, cause) for x in step.parts[0].runs])
        pipe, sent = step.pipelined, float(cause != "communication")
        stages = [
            Stage({k: self.run(x, cause) for k, x in s.runs.items()}, sent * s.shared_s)
            for s in step.stages
        ]
        orders = orders_of(step.parallel, "backward" in step.stages[0].runs)
        sends, back = ([sent * s for s in some] for some in (pipe.sends, pipe.sends_back))
        return run_pipeline(orders, part_times(stages), sends, back, sent * pipe.norm_s).time_s


def part_times(stages: Iterable[Stage], end: int | None = None) -> list[PartTimes]:
    """Seconds of the passes of each part, at one end of their intervals."""

    def seconds(run: GraphRun | None) -> float:
        if run is None:
            return 0.0
        if end is None or run.timeline.interval is None:
            return run.timeline.time_s
        return run.timeline.interval[end]

    found: list[PartTimes] = []
    for stage in stages:
        some, more = stage.runs, stage.shared_s
        norm, update = seconds(some.get("norm")), seconds(some.get("update"))
        first = "norm" in some  # of both, what gradients that parts share are added up for
        found.append(
            PartTimes(
                forward=seconds(some["forward"]),
                backward=seconds(some.get("backward")),
                weights=seconds(some.get("weights")),
                update=update + (0.0 if first else more),
                norm=norm + (more if first else 0.0),
                last=_last_pass(some, end),
            )
        )
    return found


def _last_pass(runs: Mapping[str, GraphRun], end: int | None) -> LastPass | None:
    if "last" not in runs:
        return None
    return last_pass(runs["last"], runs.get("weights") or runs["backward"], end)


# ---- the pass of the last microbatch, with sums of gradients beside it ---------------------------


def last_pass(run: GraphRun, plain: GraphRun, end: int | None = None) -> LastPass:
    """Of a pass with sums of gradients, when its kernels are done, and the host as in the `plain`
    pass without sums, and when its sums are; at one `end` of the intervals, off alike."""
    line, names = run.timeline, {v.name for v in k.sums_of_gradients(run.graph)}
    times = list(zip(line.launches, line.starts, line.marks.ends, strict=True))
    sums = [x for x in times if x[0].path[0] in names]
    of_sums = [line.costs[x.kernel] for x, *_ in sums]
    kernels = [(x, line.costs[x.kernel].time_s) for x, *_ in times if not x.group]
    others = (until for x, _, until in times if x.path[0] not in names)
    done = max(plain.timeline.host_s, max(others, default=0.0))
    by = by_sums = 1.0
    if end is not None and plain.timeline.interval is not None:
        by = plain.timeline.interval[end] / plain.timeline.time_s
        ends = (x.interval[end] if x.interval else x.time_s for x in of_sums)
        by_sums = sum(ends) / sum(x.time_s for x in of_sums) if sums else 1.0
    found: dict[str, Sums] = {}
    for x, since, until in sums:
        before = found.get(x.group, Sums(x.group, 0.0, 0.0))
        end_s = by * min(until, done) + by_sums * max(until - done, 0.0)
        time_s = before.time_s + by_sums * (until - since)
        found[x.group] = Sums(x.group, time_s, max(before.end_s, end_s))
    taken = max((share_of(x, line.costs) for x, *_ in sums), default=0.0)
    alone = sum(time_s for _, time_s in kernels)
    beside = sum(time_s / rate_beside(taken, share_of(x, line.costs)) for x, time_s in kernels)
    return LastPass(by * done, tuple(found.values()), beside / alone if alone else 1.0)


def exposed(runs: Sequence[GraphRun], sums_s: float) -> tuple[GraphRun, ...]:
    """A rank's runs, with what it waits for sums behind all its passes, `sums_s`, in place of what
    each last pass would by itself: they run beside passes that follow."""
    found: list[GraphRun] = []
    for run in runs:
        own = last_pass(run, plain=found[-1]) if run.name == "last" else None
        if own and own.sums:
            final = max(own.sums, key=lambda x: x.end_s)
            more = sums_s - max(final.end_s - own.time_s, 0.0)
            traffic = tuple(
                replace(x, exposed_s=x.exposed_s + more * (x.group == final.group))
                for x in run.timeline.traffic
            )
            run = replace(run, timeline=replace(run.timeline, traffic=traffic))
            sums_s = 0.0
        found.append(run)
    return tuple(found)


def beside(parts: Sequence[RankPart], habits: Habits | None) -> tuple[float, float]:
    """What the habits of a stack add to the step of the part that is busy longest: seconds of
    hidden collectives that are felt all the same, and of what is run again for nobody."""
    if habits is None:
        return 0.0, 0.0
    own = max(parts, key=lambda part: part.kernels_s)
    felt_s = (habits.felt or 0.0) * sum(x.time_s - x.exposed_s for x in own.traffic)
    return felt_s, _again_s(parts, own) if habits.reentrant else 0.0


NUMBERED = re.compile(r"(?<=[./:])\d+(?=[./]|$)")  # the number of a layer, in the path of a module


def _again_s(parts: Sequence[RankPart], own: RankPart) -> float:
    """What the last products of blocks take in the forward pass, of blocks that are run again but
    for that product."""
    again: set[str] = set()
    once: dict[str, float] = {}
    for part in parts:
        for run in part.runs:
            for n in run.graph.nodes:
                if n.cost is None or not isinstance(n.op, k.Gemm):
                    continue
                where = n.locs[0].removesuffix("/recomputed").rpartition("/")[0]
                place = NUMBERED.sub("#", where)  # the module, of any layer
                if phase_of(n) == "recomputed":
                    again.add(place)
                elif not phase_of(n) and "#" in place:
                    more = run.times * n.cost.time_s if part is own else 0.0
                    once[place] = once.get(place, 0.0) + more
    left: dict[str, list[str]] = {}
    for place in once.keys() - again:
        left.setdefault(place[: place.index("#")], []).append(place)
    blocks = {place[: place.index("#")] for place in again if "#" in place}
    return sum(once[x[0]] for block, x in left.items() if len(x) == 1 and block in blocks)


def _passes(runs: Sequence[GraphRun]) -> Sequence[GraphRun]:
    """The runs that are of one microbatch."""
    apart = [r for r in runs if r.name in ("microbatch", "forward", "backward", "weights")]
    return apart or runs


def model_flops(graph: Graph) -> int:
    """Those of a graph's products, without what is computed once more."""
    return sum(
        n.op.flops()
        for n in graph.nodes
        if (n.op.contraction or n.op.control) and phase_of(n) != "recomputed"
    )


def shared_by_tp(graph: Graph, cut: Graph, ranks: int) -> SharedByTp:
    """What a cut over so many ranks of tp shares out of a graph."""
    parts = {name for name, cut in cut.cuts if cut.group == "tp"}
    quantised = (v for v in graph.params if graph.role_of(v) == "buffer" and v.type.dtype.bits <= 8)
    weights = [*(v for v in graph.params if graph.role_of(v) == "weight"), *quantised]
    total = sum(v.type.nbytes for v in weights)
    each, all = model_flops(cut), model_flops(graph)
    flops = (1 - each / all) / (1 - 1 / ranks) if all else 0.0
    return SharedByTp(
        weights=sum(v.type.nbytes for v in weights if v.name in parts) / total if total else 0.0,
        flops=min(max(flops, 0.0), 1.0),  # words that a vocabulary is padded with are flops too
    )


def whole_step(graph: Graph, profile: Profile, microbatches: int, zero: int) -> Iterator[GraphRun]:
    """What each rank runs where there is no pipeline: microbatches, whose gradients are added up,
    and the last of them with the sums over ranks and the update. With ZeRO from stage 2 on,
    gradients are summed of each."""
    last = timeline(graph, profile)
    if microbatches > 1:
        before = one_microbatch(graph, zero)
        run = timeline(before, replace(profile, copies=None))
        yield GraphRun("microbatch", microbatches - 1, before, run)
    yield GraphRun("last microbatch" if microbatches > 1 else "step", 1, graph, last)


def one_microbatch(graph: Graph, zero: int) -> Graph:
    """What of a step's kernels runs for each microbatch: without what is done once. A gradient that
    is not summed over ranks yet stands for its sum; what else is read of what is left out is an
    input."""
    stands: dict[Value, Value] = {}
    gone: set[Value] = set()
    nodes: list[Node] = []
    for n in graph.nodes:
        if not _once_a_step(n, zero):
            nodes.append(replace(n, op=n.op.substitute(stands)) if stands else n)
            continue
        gone.update(n.results)
        if isinstance(n.op, k.Collective):
            inside = dict(zip(n.op.body.inputs, n.op.args, strict=True))
            for result, x in zip(n.results, n.op.collectives, strict=False):
                term = inside.get(x.x)
                if term is not None and term.type == result.type:
                    stands[result] = stands.get(term, term)
    made = {v for n in nodes for v in n.results}
    read = dict.fromkeys(v for n in nodes for v in n.op.operands if v in gone)
    over = graph.over or (None,) * len(graph.outputs)
    ends = {
        found: None if v in gone else o
        for v, o in zip(graph.outputs, over, strict=True)
        if (found := stands.get(v, v)) in made
    }
    names = {v.name: stands.get(v, v).name for v in graph.outputs}
    known = {v.name for v in (*graph.inputs, *graph.params, *read, *made)}
    roles = {names.get(name, name): role for name, role in graph.roles}
    return replace(
        graph,
        inputs=(*graph.inputs, *read),
        nodes=tuple(nodes),
        outputs=tuple(ends),
        over=tuple(ends.values()) if any(ends.values()) else (),
        roles=tuple((name, role) for name, role in roles.items() if name in known),
        cuts=tuple((name, cut) for name, cut in graph.cuts if name in known),
    )


def _once_a_step(node: Node, zero: int) -> bool:
    """Whether a node runs behind the last microbatch alone: the update, and before ZeRO's stage 2
    the sums of gradients over ranks that have other tokens. Those of tp add up activations."""
    if phase_of(node) == "optimizer":
        return True
    if zero > 1 or not isinstance(node.op, k.Collective) or phase_of(node) != "backward":
        return False
    return node.op.collective.fn == "all_reduce" and node.op.collective.group != "tp"


def total_s(runs: Iterable[GraphRun]) -> float:
    """Runs one after another."""
    return sum(r.times * r.timeline.time_s for r in runs)


def interval_of(runs: Sequence[GraphRun]) -> tuple[float, float] | None:
    """Between what all together lie in 80 % of cases, off alike."""
    ends = [r.timeline.interval for r in runs]
    if not ends or any(end is None for end in ends):
        return None
    low, high = (
        sum(r.times * end[i] for r, end in zip(runs, ends, strict=True) if end is not None)
        for i in (0, 1)
    )
    return low, high
