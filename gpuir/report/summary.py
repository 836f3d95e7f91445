"""A costed graph as records: what every backend shows is computed here, once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Level, Loc, Node, Op
from gpuir.ir.notes import Bound, Cost, Tile
from gpuir.ir.phases import phase_of
from gpuir.ir.types import f32
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.report.find import walk
from gpuir.report.names import Path, module_of, node_name
from gpuir.targets.profile import has_views, profile_of
from gpuir.targets.support import title_on

if TYPE_CHECKING:
    from gpuir.simulate.causes import Gain
    from gpuir.simulate.fitting import ToFit
    from gpuir.simulate.memory import Memory
    from gpuir.simulate.timeline import Timeline
    from gpuir.targets.profile import Profile, Tf32

Status = Literal["modelled", "approximated", "opaque"]
SCHEMA = "gpuir.report/2"  # of a summary as JSON
UNMODELLED = ("k.opaque", "k.routine")
STATUSES: tuple[Status, ...] = ("modelled", "approximated", "opaque")
BOUNDS: tuple[Bound, ...] = ("compute", "memory", "latency", "network")
# What views, and the rule of TF32, mean for the kernels of a graph.
VIEWS = "slices and transposes are views if the next kernel accepts strides"
TF32: Mapping[Tf32, str] = {
    "all": "f32 products in TF32, also in fused attention",
    "products": "f32 products in TF32",
    "conv": "f32 convolutions in TF32, other f32 products without tensor cores",
    "none": "f32 products without tensor cores (TF32 off)",
}


class SpecRow(Protocol):
    """A number of the device's specification: `Target.rows()` gives them."""

    @property
    def field(self) -> str: ...
    @property
    def value(self) -> str | float | bool | tuple[str, ...]: ...
    @property
    def unit(self) -> str: ...
    @property
    def source(self) -> str: ...


class Line(Protocol):
    """One quantity behind a cost: `formula` has its numbers filled in, `source` says where one
    comes from."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> float: ...
    @property
    def unit(self) -> str: ...
    @property
    def formula(self) -> str: ...
    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class Device:
    """The target as a reader knows it, and what its specification takes for granted."""

    name: str
    title: str
    assumed: tuple[str, ...] = ()
    numbers: tuple[SpecRow, ...] = ()
    vendor: str = ""


@dataclass(frozen=True)
class Kernel:
    """One kernel of the graph, its cost, and how often it runs.

    `path` names it as a schedule does. `runs` multiplies the trips of the loops around it; it is 0
    in a branch that is not taken. `rest` marks what a loop or branch costs beyond its kernels.
    """

    path: tuple[str, ...]
    node: Node
    runs: int
    cost: Cost
    flops: int  # of one run
    rest: bool = False

    def __repr__(self) -> str:
        runs = f"{self.runs:,} runs, " if self.runs != 1 else ""
        return f"<Kernel {self.name}: {self.kind}, {runs}{self.time_s:.4g} s>"

    @property
    def time_s(self) -> float:
        """All runs together."""
        return self.runs * self.cost.time_s

    @property
    def kind(self) -> str:
        return self.node.op.name.removeprefix("k.")

    @property
    def phase(self) -> str:
        """Of a training step: forward, backward, recomputed, optimizer."""
        return phase_of(self.node) or "forward"

    @property
    def name(self) -> str:
        return "/".join(self.path)

    @property
    def locs(self) -> tuple[Loc, ...]:
        return self.node.locs

    @property
    def anchor(self) -> Loc:
        """The model node to name it after: that of its product, else the last of all."""
        op = self.node.op
        if not isinstance(op, k.Gemm | k.Conv):
            return self.locs[-1]
        around = {loc for n in _inside(self.node) for loc in n.locs}
        own = [loc for loc in self.locs if loc not in around]
        if not own and op.epilogue is not None:  # a bias of the same model node
            accumulator = op.epilogue.inputs[0]
            own = [n.locs[0] for n in op.epilogue.nodes if accumulator in n.op.operands]
        return own[0] if own else self.locs[0]

    @property
    def module(self) -> Path:
        """The module of the model that its anchor is in."""
        return module_of(self.anchor) if self.locs else ()

    @property
    def label(self) -> str:
        """What a reader knows it by: the model node it is named after, else its own name."""
        return node_name(self.anchor) if self.locs else self.name

    @property
    def tile(self) -> Tile | None:
        return self.node.tile

    @property
    def peak_share(self) -> float | None:
        """The part achieved of the rate that bounds it: of flop/s or of the instructions of lanes,
        of DRAM or the L2; where waits do, the largest of these. None where the predictor does not
        say."""
        if (stated := self.cost.fact("bound_share")) is not None:
            return stated
        flops, moved = self.cost.fact("peak_share"), self.cost.fact("dram_share")
        shares = {"compute": (flops,), "memory": (moved,), "latency": (flops, moved), "network": ()}
        known = [share for share in shares[self.cost.bound] if share is not None]
        return max(known, default=None)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Between what 80 % of measurements lie, all runs together."""
        if self.cost.interval is None:
            return None
        low, high = self.cost.interval
        return self.runs * low, self.runs * high

    @cached_property
    def bytes(self) -> int:
        """Bytes that one run reads and writes, each operand and result once, whatever memory it
        is in: of what it touches, as the predictor says, else of them whole."""
        op = self.node.op
        if self.rest or not isinstance(op, k.KernelOp) or isinstance(op, k.View):
            return 0
        stated = self.cost.fact("operand_bytes")
        if stated is not None:
            return round(stated)
        return sum(a.type.nbytes for a in (*op.nest.reads, *op.nest.writes))

    @cached_property
    def dram_bytes(self) -> int:
        """Bytes that one run moves from and to device memory: less than `bytes` where caches hold
        some, more where some come again. As many where the predictor does not say."""
        stated = self.cost.fact("dram_bytes")
        return self.bytes if stated is None or not self.bytes else round(stated)

    @property
    def launches(self) -> int:
        return 0 if self.rest or isinstance(self.node.op, k.View) else self.runs

    @cached_property
    def status(self) -> Status:
        """Opaque if it holds an op we do not know; approximated if a library routine, whose passes
        and steps are counted and nothing else, or if the CPU runs it."""
        kernels = {self.node.op.name, *(_kernel(n.op) for n in _inside(self.node))}
        if "k.opaque" in kernels or self.is_unlinked:
            return "opaque"
        return "approximated" if "k.routine" in kernels or self.cost.on_host else "modelled"

    @property
    def is_unlinked(self) -> bool:
        """Whether it is a collective over links that nobody has named."""
        return isinstance(self.node.op, k.Collective) and "network" not in dict(self.cost.terms)

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """What is not modelled in it, by name."""
        if self.cost.on_host:
            return ("on the CPU",)
        inside = [n.op for n in _inside(self.node)]
        if self.is_unlinked:
            return tuple(op.fn for op in inside if isinstance(op, t.Collective))
        return tuple(_called(op) for op in inside if _kernel(op) in UNMODELLED)

    @cached_property
    def shape(self) -> str:
        """Dtype and extents of its loop nest: `f16 b=1 m=8 n=4096 k=1024`."""
        op = self.node.op
        if not isinstance(op, k.KernelOp) or isinstance(op, k.View):
            return ""
        dims = (f"{d}={n}" for d, n in op.nest.dims.items())
        return " ".join((op.compute_dtype.name, *dims))


@dataclass(frozen=True)
class Total:
    """Kernels of one kind together; times, flops and bytes of all their runs."""

    kind: str
    kernels: int
    launches: int
    time_s: float
    flops: int
    bytes: int
    dram_bytes: int
    bounds: tuple[tuple[Bound, float], ...]  # seconds by what bounds the kernel


@dataclass(frozen=True)
class Share:
    """What part of the model has this status: model nodes, flops, bytes read and written, and the
    kernels' time."""

    status: Status
    nodes: int
    flops: int
    bytes: int
    time_s: float
    what: tuple[tuple[str, int], ...] = ()  # names of what is not modelled, and how often


@dataclass(frozen=True)
class Unseen:
    """Kernels of which something, "kind", "gpu", "dtype" or "size", is not in what the predictor
    was fitted on: their kinds, the most time first, and their time."""

    what: str
    kinds: tuple[str, ...]
    time_s: float


@dataclass(frozen=True, repr=False)
class Summary:
    """One model on one target under one profile. `latency_s` is from the host's start to the last
    kernel's end, as `timeline` has it; `device_s` is what the kernels take. `kernels` are in graph
    order, views and idle branches included.

    `interval` is where 80 % of measurements are expected: kernels of one kind, and the host, are
    off alike, those of different kinds independently. Kernels that cannot say, of `certain_s`,
    count as they are; it is None where none can. `explain` gives the lines that lead to a kernel's
    cost, `fixes` the changes with which a model fits that does not.
    """

    model: str
    device: Device
    by: tuple[str, ...]
    timeline: Timeline
    latency_s: float
    device_s: float
    interval: tuple[float, float] | None
    certain_s: float
    unseen: tuple[Unseen, ...]
    launches: int
    views: int
    idle: int  # kernels in branches not taken
    flops: int
    bytes: int
    dram_bytes: int
    bounds: tuple[tuple[Bound, float], ...]
    totals: tuple[Total, ...]  # slowest first
    coverage: tuple[Share, ...]
    nodes: int  # of the model, those folded included
    folded: int
    assumed: tuple[str, ...]
    warnings: tuple[str, ...]
    batch: int | None
    memory: Memory
    kernels: tuple[Kernel, ...] = field(repr=False)
    graph: Graph = field(repr=False)
    explain: Callable[[Kernel], Sequence[Line]] = field(repr=False, compare=False)
    html: Callable[[Summary], str] = field(repr=False, compare=False)
    fixes: Callable[[Summary], tuple[ToFit, ...]] = field(
        default=lambda _: (), repr=False, compare=False
    )

    @cached_property
    def to_fit(self) -> tuple[ToFit, ...]:
        """Changes with which the model fits, where it does not, the smallest first: each tried."""
        return self.fixes(self) if self.memory.fits is False else ()

    @property
    def profile(self) -> Profile:
        return self.timeline.profile

    @property
    def stack(self) -> str:
        """What the profile is on this device: its title, or what of the stack would run here."""
        return title_on(self.profile, self.device.vendor)

    @property
    def running(self) -> list[Kernel]:
        """The kernels that run, views included."""
        return [x for x in self.kernels if x.runs]

    @property
    def phases(self) -> tuple[Total, ...]:
        """The kernels of each phase of a training step together."""
        return totals(self.running, lambda x: x.phase)

    @property
    def tf32(self) -> Tf32 | None:
        """Which of the products in f32 may run in TF32: none, those of convolutions, all but those
        in fused attention (`products`), or all. None where there is no product in f32."""
        return tf32_of(self.graph)

    @property
    def unfitted_s(self) -> float:
        """The time of kernels of a kind that no measurement is of: unknown operators, routines of
        which steps are counted, and those whose family measured others."""
        return sum(u.time_s for u in self.unseen if u.what == "kind")

    @cached_property
    def gains(self) -> tuple[Gain, ...]:
        """By how much the run would be shorter without each cause, the most first: the timeline,
        run again without it."""
        from gpuir.simulate.causes import gains_of

        return gains_of(self.graph, self.profile, self.latency_s)

    def slowest(self) -> list[Kernel]:
        """The kernels that take time, the slowest first."""
        return sorted((x for x in self.kernels if x.time_s > 0), key=lambda x: -x.time_s)

    def __repr__(self) -> str:
        return f"<Summary of {self.model} on {self.device.name}: {self.latency_s:.4g} s>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.html(self)


def fixed_batch(graph: Graph) -> int | None:
    """How many images or sequences of tokens a graph without symbolic sizes reads at once: the
    leading extent of its inputs, where one of them is images ([n, c, h, w], or more axes) or tokens
    (integers [n, s]) and the first output, a loss apart, has it too. None for one alone, or where
    that cannot be told."""
    given = [v for v in graph.inputs if graph.role_of(v) == "input" and v.type.rank]
    extents = {v.type.shape[0] for v in given}
    made = graph.outputs[0].type.shape[:1] if graph.outputs else ()
    if not any(v.type.rank >= 4 or (v.type.rank == 2 and v.type.dtype.is_integer) for v in given):
        return None
    (extent, *others) = extents
    return extent if not others and extent > 1 and made in ((), (extent,)) else None


def summarize(
    graph: Graph,
    device: Device,
    warnings: tuple[str, ...] = (),
    batch: int | None = None,
    held: Memory | None = None,
    explain: Callable[[Kernel], Sequence[Line]] = lambda _: (),
    html: Callable[[Summary], str] = lambda _: "",
    fixes: Callable[[Summary], tuple[ToFit, ...]] = lambda _: (),
) -> Summary:
    """The records of a costed graph; UsageError when it is not costed. One without a profile runs
    as under `ideal`. Without a `batch` it is the one that the graph was built for. `held` is its
    memory on the device; without it, that of no device in particular."""
    if graph.level != Level.costed:
        raise UsageError(
            "a report needs a graph with costs",
            expected="a graph of level costed",
            found=f"@{graph.name}, of level {graph.level.name}",
            fix="run the graph through `gpuir.analyze`, or through the passes tile and annotate",
        )
    from gpuir.simulate.timeline import timeline

    run = timeline(graph, profile_of(graph))
    kernels = kernels_of(graph)
    running = [x for x in kernels if x.runs]
    coverage = tuple(_coverage(graph, kernels))
    folded = set(graph.folded) - {loc for x in walk(graph) for loc in x.node.locs}
    return Summary(
        model=graph.name,
        device=device,
        by=tuple(sorted({x.cost.by for x in kernels if x.cost.terms})),
        timeline=run,
        latency_s=run.time_s,
        device_s=sum(x.time_s for x in running),
        interval=run.interval,
        certain_s=sum(x.time_s for x in running if x.interval is None),
        unseen=tuple(_unseen(running)),
        launches=sum(x.launches for x in running),
        views=sum(isinstance(x.node.op, k.View) for x in kernels),
        idle=sum(not x.runs for x in kernels),
        flops=sum(x.runs * x.flops for x in running),
        bytes=sum(x.runs * x.bytes for x in running),
        dram_bytes=sum(x.runs * x.dram_bytes for x in running),
        bounds=_bounds(running),
        totals=totals(running),
        coverage=coverage,
        nodes=sum(s.nodes for s in coverage) + len(folded),
        folded=len(folded),
        assumed=(*_assumed(graph, device), *run.profile.assumptions),
        warnings=warnings,
        batch=fixed_batch(graph) if batch is None else batch,
        memory=held or _memory(graph),
        kernels=kernels,
        graph=graph,
        explain=explain,
        html=html,
        fixes=fixes,
    )


def _assumed(graph: Graph, device: Device) -> Iterator[str]:
    """What was taken for granted, in words."""
    if has_views(graph):
        yield VIEWS
    yield from graph.assumed
    has_tf32 = any(n.field == "flops_per_s.tensor.tf32" for n in device.numbers)
    if has_tf32 and (rule := tf32_of(graph)) is not None:
        yield TF32[rule]
    yield from device.assumed


def tf32_of(graph: Graph) -> Tf32 | None:
    """Which products in f32 the kernels of a graph let run in TF32."""
    wide = [
        n.op for n in graph.walk() if isinstance(n.op, k.PRODUCTS) and n.op.compute_dtype == f32
    ]
    if not wide:
        return None
    rounded = [op for op in wide if op.math is not None]
    if any(isinstance(op, k.Attention | k.AttentionGradient) for op in rounded):
        return "all"
    if any(not isinstance(op, k.Conv) for op in rounded):
        return "products"
    return "conv" if rounded else "none"


def _memory(graph: Graph) -> Memory:
    from gpuir.simulate.memory import memory  # and with it numpy

    return memory(graph)


def kernels_of(graph: Graph) -> tuple[Kernel, ...]:
    """The kernels of a costed graph in order, views and idle branches included."""
    return tuple(_kernels(graph, (), 1))


def _kernels(graph: Graph, path: tuple[str, ...], runs: int) -> Iterator[Kernel]:
    for node in graph.nodes:
        here = (*path, node.results[0].name)
        cost = node.cost
        if cost is None:
            continue
        op = node.op
        if not op.control:
            yield Kernel(path=here, node=node, runs=runs, cost=cost, flops=op.flops())
            continue
        inner = [x for r, n in _regions(node, runs) for x in _kernels(r, here, n)]
        yield from inner
        rest = cost.time_s - sum(x.time_s for x in inner) / max(runs, 1)
        if runs and rest > 1e-9 * cost.time_s:
            own = Cost(rest, "latency", cost.by, (("latency", rest),))
            yield Kernel(path=here, node=node, runs=runs, cost=own, flops=0, rest=True)


def _regions(node: Node, runs: int) -> list[tuple[Graph, int]]:
    """The regions of a control op, and how often each runs: of two branches, the dearer."""
    op = node.op
    if isinstance(op, k.Loop):
        return [(op.body, runs * op.trips)]
    if isinstance(op, k.Cond):
        return [(g, runs if g is op.dearer else 0) for g in (op.then, op.orelse)]
    return [(g, runs) for g in op.regions]


def _unseen(kernels: Iterable[Kernel]) -> Iterator[Unseen]:
    times: dict[str, dict[str, float]] = {}
    for x in kernels:
        for what in x.cost.unseen:
            of = times.setdefault(what, {})
            of[x.kind] = of.get(x.kind, 0.0) + x.time_s
    for what, of in times.items():
        kinds = tuple(sorted(of, key=lambda kind: -of[kind]))
        yield Unseen(what, kinds, sum(of.values()))


def _kernel(op: Op) -> str:
    """What an op becomes; what does not say so is opaque."""
    return op.kernel if isinstance(op, t.TensorOp) else t.TensorOp.kernel


def _called(op: Op) -> str:
    """What a model calls an op that is not modelled, or only roughly."""
    match op:
        case t.Opaque(kind=name) | t.Routine(fn=name):
            return name
        case _:
            return op.name.removeprefix("t.")


def _inside(node: Node) -> list[Node]:
    return [n for region in node.op.regions for n in region.nodes] if not node.op.control else []


def _bounds(kernels: Iterable[Kernel]) -> tuple[tuple[Bound, float], ...]:
    times = dict.fromkeys(BOUNDS, 0.0)
    for x in kernels:
        times[x.cost.bound] += x.time_s
    return tuple(times.items())


def totals(
    kernels: Iterable[Kernel], key: Callable[[Kernel], str] = lambda x: x.kind
) -> tuple[Total, ...]:
    """Kernels of one kind together, or of one `key`; the most time first."""
    kinds: dict[str, list[Kernel]] = {}
    for x in kernels:
        if not isinstance(x.node.op, k.View):
            kinds.setdefault(key(x), []).append(x)
    found = (total_of(kind, group) for kind, group in kinds.items())
    return tuple(sorted(found, key=lambda total: (-total.time_s, total.kind)))


def total_of(kind: str, kernels: Sequence[Kernel]) -> Total:
    """These kernels together."""
    return Total(
        kind=kind,
        kernels=len(kernels),
        launches=sum(x.launches for x in kernels),
        time_s=sum(x.time_s for x in kernels),
        flops=sum(x.runs * x.flops for x in kernels),
        bytes=sum(x.runs * x.bytes for x in kernels),
        dram_bytes=sum(x.runs * x.dram_bytes for x in kernels),
        bounds=_bounds(kernels),
    )


def _coverage(graph: Graph, kernels: Sequence[Kernel]) -> Iterator[Share]:
    """A model node that several kernels stand for has the worst status among them."""
    locs = [loc for x in walk(graph) for loc in x.node.locs]
    status: dict[Loc, Status] = dict.fromkeys(locs, STATUSES[0])
    for x in kernels:
        for loc in x.locs:
            if STATUSES.index(x.status) > STATUSES.index(status[loc]):
                status[loc] = x.status
    nodes = Counter(status.values())
    for name in STATUSES:
        group = [x for x in kernels if x.status == name]
        what = Counter(text for x in group for text in x.unmodelled)
        yield Share(
            status=name,
            nodes=nodes[name],
            flops=sum(x.runs * x.flops for x in group),
            bytes=sum(x.runs * x.bytes for x in group),
            time_s=sum(x.time_s for x in group),
            what=tuple(sorted(what.items())),
        )
