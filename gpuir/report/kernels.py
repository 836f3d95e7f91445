"""The kernels of a costed graph as records, and their sums by kind, bound and status."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from gpuir.ir.graph import Graph, Loc, Node, Op
from gpuir.ir.notes import Bound, Cost, Tile
from gpuir.ir.phases import phase_of
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.report.find import walk
from gpuir.report.names import Path, module_of, node_name

Status = Literal["modelled", "approximated", "opaque"]
UNMODELLED = ("k.opaque", "k.routine")
STATUSES: tuple[Status, ...] = ("modelled", "approximated", "opaque")
BOUNDS: tuple[Bound, ...] = ("compute", "memory", "latency", "network")


@dataclass(frozen=True)
class KernelRow:
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
        around = {loc for n in (*op.prologue, *op.epilogue) for loc in n.locs}
        own = [loc for loc in self.locs if loc not in around]
        return (*own, *op.anchor.locs)[0]

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


def kernels_of(graph: Graph) -> tuple[KernelRow, ...]:
    """The kernels of a costed graph in order, views and idle branches included."""
    return tuple(_kernels(graph, (), 1))


def _kernels(graph: Graph, path: tuple[str, ...], runs: int) -> Iterator[KernelRow]:
    for node in graph.nodes:
        here = (*path, node.results[0].name)
        cost = node.cost
        if cost is None:
            continue
        op = node.op
        if not op.control:
            yield KernelRow(path=here, node=node, runs=runs, cost=cost, flops=op.flops())
            continue
        inner = [x for r, n in _regions(node, runs) for x in _kernels(r, here, n)]
        yield from inner
        rest = cost.time_s - sum(x.time_s for x in inner) / max(runs, 1)
        if runs and rest > 1e-9 * cost.time_s:
            own = Cost(rest, "latency", cost.by, (("latency", rest),))
            yield KernelRow(path=here, node=node, runs=runs, cost=own, flops=0, rest=True)


def _regions(node: Node, runs: int) -> list[tuple[Graph, int]]:
    """The regions of a control op, and how often each runs: of two branches, the dearer."""
    op = node.op
    if isinstance(op, k.Loop):
        return [(op.body, runs * op.trips)]
    if isinstance(op, k.Cond):
        return [(g, runs if g is op.dearer else 0) for g in (op.then, op.orelse)]
    return [(g, runs) for g in op.regions]


def unseen_of(kernels: Iterable[KernelRow]) -> Iterator[Unseen]:
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


def bounds_of(kernels: Iterable[KernelRow]) -> tuple[tuple[Bound, float], ...]:
    times = dict.fromkeys(BOUNDS, 0.0)
    for x in kernels:
        times[x.cost.bound] += x.time_s
    return tuple(times.items())


def totals(
    kernels: Iterable[KernelRow], key: Callable[[KernelRow], str] = lambda x: x.kind
) -> tuple[Total, ...]:
    """Kernels of one kind together, or of one `key`; the most time first."""
    kinds: dict[str, list[KernelRow]] = {}
    for x in kernels:
        if not isinstance(x.node.op, k.View):
            kinds.setdefault(key(x), []).append(x)
    found = (total_of(kind, group) for kind, group in kinds.items())
    return tuple(sorted(found, key=lambda total: (-total.time_s, total.kind)))


def total_of(kind: str, kernels: Sequence[KernelRow]) -> Total:
    """These kernels together."""
    return Total(
        kind=kind,
        kernels=len(kernels),
        launches=sum(x.launches for x in kernels),
        time_s=sum(x.time_s for x in kernels),
        flops=sum(x.runs * x.flops for x in kernels),
        bytes=sum(x.runs * x.bytes for x in kernels),
        dram_bytes=sum(x.runs * x.dram_bytes for x in kernels),
        bounds=bounds_of(kernels),
    )


def coverage_of(graph: Graph, kernels: Sequence[KernelRow]) -> Iterator[Share]:
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
