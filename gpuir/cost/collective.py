"""What a collective takes: latency of its hops, ramp and transfer, by algorithm and protocol.

The form is that of NCCL's own tuning model (NVIDIA/nccl `src/graph/tuning.cc`): for each algorithm
and protocol a fixed time, hops times a latency, and bytes over a rate; the fastest runs. What is
added is the ramp of a pipeline cut into the best number of pieces, 2 · sqrt(tau · transfer)
(Hockney's a + b·n for each piece, the number of pieces chosen for the least sum). Factors are
without dimension, but for the fixed times; they and what measurements add are in
`weights/collective1.json`, written by `gpuir eval collectives --fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import exp, prod
from os import PathLike, fspath
from typing import Any, Literal, get_args

import numpy as np

from gpuir.cost.data import of_isa, table
from gpuir.cost.kriging import Curve, Field, read_weights
from gpuir.cost.sheet import Number, Sheet
from gpuir.ir.door import PATH, TEXT, one_of, real, takes, whole
from gpuir.ir.errors import TargetError, UsageError
from gpuir.ir.types import DTYPES, DType
from gpuir.targets.cluster import Cluster, LinkLevel, load_cluster

_where: Callable[..., Number] = np.where

BY = "collective@2"
Kind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "shift", "send", "recv"
]
KINDS: tuple[str, ...] = get_args(Kind)
SINGLE = ("shift", "send", "recv")  # each rank sends to one, and receives of one
CLOCK_HZ = 1.98e9  # of H100: latencies go with the clock from there
NVLS_RANKS = 5  # stas00/ml-engineering, network: all-reduces of 4 GPUs are rings, those of 5 NVLS
# GPUs that run each other's code of one family: PTX ISA, family-specific targets (sm_100f)
FAMILIES = {"sm_103": "sm_100", "sm_121": "sm_120"}
NOT_IN_SWITCH = 8  # bits: multimem instructions add up floats of 16 bits and more


@dataclass(frozen=True)
class Library:
    """Whose collectives: `nccl`, or the all-reduce of `vllm`, `sglang`, `trtllm`.

    `mode` is how they run and were timed: `eager_loop` one after another on a stream (nccl-tests),
    `kernel_trace` the kernel in a profile with waits for the peers, `cuda_graph`, `eager` with the
    host. `version` is the release, where it is known: its kernels are the same on all GPUs. `run`
    names one set of measurements, where a prediction is to follow it and no other.
    """

    name: str = "nccl"
    mode: str = "eager_loop"
    version: str = ""
    run: str = ""

    @property
    def is_custom(self) -> bool:
        return self.name != "nccl"


NCCL = Library()
MODES = {
    "nccl": ("eager_loop", "kernel_trace"),
    "vllm": ("cuda_graph", "eager"),
    "sglang": ("cuda_graph", "eager"),
    "trtllm": ("cuda_graph", "eager"),
}


@dataclass(frozen=True)
class RankGroup:
    """Ranks that communicate, as the formulas see them; numbers or arrays.

    `ranks` in all, `near` of them in each of `nodes` nodes. `rate` is what one GPU sends within a
    node, `rail` what it sends to others, bytes/s; `hop_s` and `far_s` are one hop of each. `slow`
    is how latencies on this GPU compare to those at 1.98 GHz. `steps` and `far_steps` are hops of a
    ring, `wire` and `far_wire` the bytes that cross a GPU's links and its rail for each byte, `own`
    those that it keeps. `dram` is the rate of its memory.
    Masks are 0 or 1: `ring` where data go round (else all pairs at once), `single` where each GPU
    has one peer, `peers` where GPUs reach each other without the host, `nvlink` where they do over
    NVLink or the like. `reduces` is what the switch has of a link's rate where it may add up, or 0.
    """

    ranks: Number
    near: Number
    nodes: Number
    rate: Number
    rail: Number
    hop_s: Number
    far_s: Number
    slow: Number
    steps: Number
    far_steps: Number
    wire: Number
    far_wire: Number
    own: Number
    dram: Number
    ring: Number
    single: Number
    all_reduce: Number
    reduces: Number
    peers: Number
    nvlink: Number


@dataclass(frozen=True)
class Time:
    """What a collective takes, in seconds, and why.

    `terms` add up to `time_s`: `start`, `hops`, `ramp`, `transfer`, and `measured`, what
    measurements of its kind add to the formulas (or take away). In 80 % of measurements the time
    lies in `interval`. `unseen` says what was not measured: "system", "ranks", "nodes" (the
    network). `facts` are what the formulas had: name, value and unit. `assumed` is for people.
    """

    kind: str
    bytes: float
    time_s: float
    algorithm: str
    protocol: str
    terms: tuple[tuple[str, float], ...]
    interval: tuple[float, float]
    unseen: tuple[str, ...]
    facts: tuple[tuple[str, float, str], ...] = field(default=(), repr=False)
    assumed: tuple[str, ...] = ()
    by: str = BY

    @property
    def bytes_per_s(self) -> float:
        """Bytes over time: nccl-tests' algorithm bandwidth."""
        return self.bytes / self.time_s if self.time_s else 0.0

    def term(self, name: str) -> float:
        return dict(self.terms).get(name, 0.0)


# ---- groups -----------------------------------------------------------------------------------


def group_of(kind: str, sizes: tuple[int, ...], strides: tuple[int, ...], c: Cluster) -> RankGroup:
    """The group of rank 0, whose ranks are sum(i_j * strides[j]), i_j < sizes[j].

    TargetError where the cluster has no such ranks.
    """
    offsets = _offsets(sizes, strides, c)
    _, counts = np.unique(offsets // c.node_gpus, return_counts=True)
    near, nodes = int(counts.max()), len(counts)
    inside = offsets[offsets // c.node_gpus == 0] if nodes == 1 else offsets[: max(near, 1)]
    return _group(kind, _joint(inside, c), c, n=len(offsets), near=near, nodes=nodes)


def _offsets(sizes: tuple[int, ...], strides: tuple[int, ...], c: Cluster) -> np.ndarray[Any, Any]:
    """The ranks in order, so that those of a node lie side by side."""
    offsets = np.zeros(1, np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        offsets = (offsets[:, None] + np.arange(size)[None, :] * stride).reshape(-1)
    if len(offsets) > 1 and offsets.max() >= c.gpus:
        raise TargetError(
            f"the collective needs a rank {offsets.max()}, which {c.name} does not have",
            expected=f"ranks 0 to {c.gpus - 1}",
            found=f"groups of sizes {sizes} at strides {strides}",
            fix="use more nodes, or a smaller group",
        )
    return np.sort(offsets)


@lru_cache(maxsize=1024)
def groups_of(
    kind: str, sizes: tuple[int, ...], strides: tuple[int, ...], c: Cluster
) -> tuple[tuple[RankGroup, Cluster], ...]:
    """The groups that may differ, and of one over several kinds of nodes what each kind makes of
    it: the slowest decides. Where all nodes are alike, that of rank 0."""
    if not c.kinds:
        return ((group_of(kind, sizes, strides, c), c),)
    offsets = _offsets(sizes, strides, c)
    starts: np.ndarray[Any, Any] = np.arange(c.gpus - int(offsets.max()))
    for size, stride in zip(sizes, strides, strict=True):
        starts = starts[starts // stride % size == 0]
    return tuple({x: None for start in starts for x in _by_kind(kind, start + offsets, c)})


def _by_kind(
    kind: str, ranks: np.ndarray[Any, Any], c: Cluster
) -> Iterator[tuple[RankGroup, Cluster]]:
    """A group with the GPUs, links and rails of each kind of nodes that it is on."""
    own = [(x.cluster, ranks[(x.first <= ranks) & (ranks < x.end)] + (x.skipped - x.first))
           for x in c.stretches]  # fmt: skip
    own = [(k, gpus) for k, gpus in own if len(gpus)]
    counts = [np.unique(gpus // k.node_gpus, return_counts=True) for k, gpus in own]
    near = max(int(n.max()) for _, n in counts)
    nodes = sum(len(n) for _, n in counts)
    for (k, gpus), (ids, n) in zip(own, counts, strict=True):
        inside = gpus[gpus // k.node_gpus == ids[n.argmax()]]
        joined = k if len(own) == 1 else replace(k, fabric=_slower(k.fabric, c.fabric))
        most = min(near, k.node_gpus)
        g = _group(kind, _joint(inside, k), joined, n=len(ranks), near=most, nodes=nodes)
        yield g, joined


def _slower(rail: LinkLevel | None, fabric: LinkLevel | None) -> LinkLevel | None:
    if rail is None or fabric is None:
        return rail or fabric
    return replace(
        rail,
        bytes_per_s=min(rail.bytes_per_s, fabric.bytes_per_s),
        latency_s=max(rail.latency_s, fabric.latency_s),
    )


def flat_group(kind: str, ranks: int, near: int, c: Cluster) -> RankGroup:
    """A group of as many ranks, `near` of them side by side in each node."""
    if near == c.node_gpus or ranks == near:
        return group_of(kind, (ranks,), (1,), c)
    return group_of(kind, (ranks // near, near), (c.node_gpus, 1), c)


def _joint(inside: np.ndarray[Any, Any], c: Cluster) -> LinkLevel:
    """The innermost level that joins these ranks of a node."""
    unit, level = 1, c.levels[0][1]
    for name, level in c.levels:
        unit *= level.joins
        if name == "fabric" or len(np.unique(inside // unit)) == 1:
            break
    return level


def _group(kind: str, level: LinkLevel, c: Cluster, *, n: int, near: int, nodes: int) -> RankGroup:
    if kind not in KINDS:
        raise ValueError(f"no collective is called {kind!r}")
    rate = level.bytes_per_s
    if level.topology == "mesh" and level.joins > 2:  # the links to those outside stay idle
        rate *= (max(near, 2) - 1) / (level.joins - 1)
    fabric = c.fabric
    rail, far_s = (fabric.bytes_per_s, fabric.latency_s) if fabric else (rate, level.latency_s)
    steps, far_steps = {
        "all_reduce": (2 * (n - 1), 2 * (nodes - 1)),
        "all_gather": (n - 1, nodes - 1),
        "reduce_scatter": (n - 1, nodes - 1),
        "all_to_all": (1, min(nodes - 1, 1)),
        "broadcast": (n - 1, nodes - 1),
    }.get(kind, (1, min(nodes - 1, 1)))
    share = (n - 1) / n if n > 1 else 0.0
    beyond = float(nodes > 1)  # what goes round leaves each node as often as each GPU
    own = 0.0 if kind == "broadcast" or kind in SINGLE else 1 / n
    wire, far_wire = {
        "all_reduce": (2 * share, 2 * share * beyond / near),
        "all_gather": (share, share * beyond / near),
        "reduce_scatter": (share, share * beyond / near),
        "all_to_all": (max(near - 1, 0) / n if nodes > 1 else share, (n - near) / n),
        "broadcast": (1.0, beyond / near),
    }.get(kind, (1.0, float(nodes > 1)))
    if near == 1 and nodes > 1:
        wire = 0.0
    return RankGroup(
        *map(float, (n, near, nodes, rate, rail, level.latency_s, far_s)),
        slow=CLOCK_HZ / c.target.clock_hz,
        steps=float(max(steps - far_steps, 0)),
        far_steps=float(far_steps),
        wire=wire,
        far_wire=far_wire,
        own=own,
        dram=c.target.dram.bytes_per_s,
        ring=float(kind not in ("all_to_all", *SINGLE)),
        single=float(kind in SINGLE),
        all_reduce=float(kind == "all_reduce"),
        reduces=_share(c) * (level.reduces and near >= NVLS_RANKS and kind == "all_reduce"),
        peers=float(level.topology != "host"),
        nvlink=float(level.topology not in ("host", "pcie")),
    )


def _share(c: Cluster) -> float:
    return of_isa("nvls_share", family(c.target.isa))


def family(isa: str) -> str:
    return FAMILIES.get(isa, isa)


FACTS = (("link rate", "bytes/s"), ("wire", "bytes"), ("network", "s"))

# ---- formulas ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class CollectiveWay:
    """Seconds of one algorithm and protocol, and whether a group has it: 1 or 0."""

    name: str
    start: Number
    hops: Number
    ramp: Number
    transfer: Number
    there: Number = 1.0

    @property
    def total(self) -> Number:
        """Infinite where a group does not have it."""
        time = self.start + self.hops + self.ramp + self.transfer
        return _where(np.asarray(self.there) > 0, time, np.inf)


@dataclass(frozen=True)
class CollectiveFactor:
    """A factor of the formulas: a row of data/collective_factors.csv."""

    name: str
    value: float
    fixed: int
    source: str


_STARTS = table("collective_factors", CollectiveFactor)
FACTORS = {f.name: f.value for f in _STARTS if not f.fixed}  # where fitting starts
FIXED = {f.name: f.value for f in _STARTS if f.fixed}  # what it may not move


@dataclass(frozen=True)
class RunMode:
    """How collectives run and were timed: the factor of their start, that of the seconds that none
    is less than, whether those are a wait for peers, and whether the operand is copied first."""

    start: str
    floor: str = ""
    waits: bool = False
    copies: bool = False


RUN_MODES = {
    "eager_loop": RunMode("loop start_s"),
    "kernel_trace": RunMode("trace start_s", "trace floor_s", waits=True),
    "cuda_graph": RunMode("graph start_s"),
    "eager": RunMode("graph start_s", "eager floor_s", copies=True),
}


@dataclass(frozen=True)
class GroupMessage:
    """What a group has to move, in the terms of its ways. Protocols have shares of `link`, which is
    what a GPU's links carry, bytes/s, where `near` bytes cross them. `far_s` is the time of the
    rails. `hop_s`, `far_hop_s` and `start_s` are one hop in the node, one beyond, and a start."""

    group: RankGroup
    p: Mapping[str, Number]
    nbytes: Number
    link: Number
    near: Number
    far_s: Number
    hop_s: Number
    far_hop_s: Number
    start_s: Number


def ways(
    s: Sheet, g: RankGroup, nbytes: Number, p: Mapping[str, Number], library: Library
) -> list[CollectiveWay]:
    """Every way that some group takes; `CollectiveWay.there` says of which ones."""
    how = RUN_MODES[library.mode]
    m = _message(s, g, nbytes, {**FIXED, **p}, how)
    found = _of_library(m) if library.is_custom else _of_nccl(m)
    if np.any(g.reduces):
        found.append(_in_switch(m))
    if how.copies:
        copy = p["eager copy"] * nbytes / g.dram
        found = [replace(w, transfer=w.transfer + copy) for w in found]
    return found


def _message(
    s: Sheet, g: RankGroup, nbytes: Number, p: Mapping[str, Number], how: RunMode
) -> GroupMessage:
    xp = s.xp
    peers, nvlink = g.peers > 0, g.nvlink > 0
    share = xp.where(nvlink, 1.0, xp.where(peers, p["PCIe rate"], p["host rate"]))
    crowd = xp.where(peers, 1.0, (2.0 / g.ranks) ** p["host crowd"])
    link = s.put("link rate", g.rate * share * crowd, "bytes/s")
    # protocols' shares are of NVLink: over PCIe and through the host, Simple has the rate above
    link = link / xp.where(nvlink, 1.0, p["Simple rate"])
    far_s = g.far_wire * nbytes / (g.rail * p["rail rate"])
    far_s = s.put("network", far_s, "s", "rails of one node")
    # a GPU's own part crosses no link, but the channels that serve the links copy it
    crossing = g.wire + g.own * xp.where(nvlink, p["own share"], 0.0)
    source = "nccl-tests PERFORMANCE.md: bus bandwidth"
    near = s.put("wire", crossing * nbytes, "bytes", source)
    hop_s, far_hop_s = g.hop_s * g.slow, g.far_s * p["far hop"]
    return GroupMessage(
        *(g, p, nbytes),
        link=link,
        near=near,
        far_s=far_s,
        hop_s=hop_s,
        far_hop_s=far_hop_s,
        start_s=p[how.start] * g.slow,
    )


def _of_nccl(m: GroupMessage) -> list[CollectiveWay]:
    """Data go round in rings, by one of three protocols (LL128 needs NVLink), or between all pairs
    at once. What goes to one peer has no pipeline to fill, and one start."""
    g, p = m.group, m.p
    low = _ring(m, "LL", 0.0)
    wide = _ring(m, "LL128", p["LL128 start_s"] * g.slow)
    wide = replace(wide, there=wide.there * g.nvlink)
    full = _ring(m, "Simple", p["Simple start_s"] * g.slow)
    first_s, pairs, many = m.start_s * p["pairs start"], 1 - g.ring, 1 - g.single
    direct_s = np.maximum(m.near / m.link, m.far_s) / p["LL rate"]
    beyond_s = g.far_steps * m.far_hop_s
    hops_s = m.hop_s * p["LL hop"] + beyond_s
    direct = CollectiveWay("pairs LL", first_s, hops_s, 0.0, direct_s, there=pairs)
    rate = m.link * _where(g.single > 0, p["send rate"], p["pairs rate"])
    paired_s = np.maximum(m.near / rate, m.far_s)
    start_s = first_s + many * p["pairs start_s"] * g.slow
    ramp_s = _ramp(m, many * paired_s)
    hops_s = m.hop_s + beyond_s
    paired = CollectiveWay("pairs Simple", start_s, hops_s, ramp_s, paired_s, there=pairs)
    return [low, wide, full, direct, paired]


def _of_library(m: GroupMessage) -> list[CollectiveWay]:
    """All-reduces of one node whose GPUs reach each other: each reads all others' data, or its part
    of them and then the parts. Else the library calls NCCL's."""
    g, p = m.group, m.p
    one_s = (g.ranks - 1) * m.nbytes / (m.link * p["one-shot rate"])
    two_s = m.near / (m.link * p["two-shot rate"])
    start_s = m.start_s + p["two-shot start_s"] * g.slow
    close = g.peers * _where(g.nodes < 2, 1.0, 0.0)
    return [
        CollectiveWay("one-shot", m.start_s, m.hop_s, 0.0, one_s, there=close),
        CollectiveWay("two-shot", start_s, 2 * m.hop_s, _ramp(m, two_s), two_s, there=close),
        _ring(m, "LL", 0.0),
        _ring(m, "Simple", p["fallback start_s"] * g.slow),
    ]


def _in_switch(m: GroupMessage) -> CollectiveWay:
    """The switch adds up: each GPU sends its part once and receives the sum once."""
    g, p = m.group, m.p
    rate = g.rate * _where(g.reduces > 0, g.reduces, 1.0) * p["NVLS rate"]
    transfer_s = np.maximum(m.nbytes / rate, m.far_s)
    start_s = m.start_s + p["NVLS start_s"] * g.slow
    hops_s = _far_steps(g) * m.far_hop_s
    ramp_s = _ramp(m, transfer_s)
    return CollectiveWay("NVLS Simple", start_s, hops_s, ramp_s, transfer_s, there=g.reduces)


def _ring(m: GroupMessage, protocol: str, start_s: Number) -> CollectiveWay:
    """Data go round, and start `start_s` later than LL's. LL fills no pipeline."""
    g, p = m.group, m.p
    share = p[f"{protocol} rate"]
    hops_s = (g.steps * m.hop_s + _far_steps(g) * m.far_hop_s) * p[f"{protocol} hop"]
    transfer_s = np.maximum(m.near / (m.link * share), m.far_s * p["Simple rate"] / share)
    ramp_s = 0.0 if protocol == "LL" else _ramp(m, transfer_s)
    first_s = m.start_s * _where(g.all_reduce > 0, p["all_reduce start"], 1.0) + start_s
    return CollectiveWay(f"ring {protocol}", first_s, hops_s, ramp_s, transfer_s, there=g.ring)


def _far_steps(g: RankGroup) -> Number:
    """Hops beyond the node: a tree over nodes takes log2 where a ring takes one a node."""
    tree = 2 * np.ceil(np.log2(np.maximum(g.nodes, 1.0)))
    return _where(g.all_reduce > 0, np.minimum(g.far_steps, tree), g.far_steps)


def _ramp(m: GroupMessage, transfer_s: Number) -> Number:
    """Seconds until a pipeline of the best number of pieces is full."""
    return 2 * np.sqrt(m.p["ramp"] * m.hop_s * transfer_s)


def floor(g: RankGroup, p: Mapping[str, Number], library: Library) -> Number:
    """Seconds that nothing is less than: the host's, or, in a profile, what the slowest peer's
    launch comes later. What goes to one peer waits for no other."""
    how = RUN_MODES[library.mode]
    least = {**FIXED, **p}[how.floor] if how.floor else 0.0
    return least * (1 - g.single) if how.waits else least


def chosen(found: list[CollectiveWay]) -> tuple[Any, Any]:
    """The least total of each row, and which way it is."""
    totals = np.stack(np.broadcast_arrays(*(w.total for w in found)))
    which = np.argmin(totals, axis=0)
    return np.take_along_axis(totals, which[None], axis=0)[0], which


# ---- what a collective takes --------------------------------------------------------------------


@takes(
    kind=one_of(*KINDS),
    nbytes=real(),
    cluster=PATH,
    ranks=whole(1),
    near=whole(1),
    dtype=one_of(*DTYPES),
    library=one_of(*MODES),
    mode=TEXT,
    version=TEXT,
    run=TEXT,
)
def collective(
    kind: str,
    nbytes: float,
    cluster: str | PathLike[str],
    ranks: int | None = None,
    *,
    near: int | None = None,
    dtype: str = "bf16",
    library: str = "nccl",
    mode: str = "",
    version: str = "",
    run: str = "",
) -> Time:
    """What a collective takes over the GPUs of a cluster, or `ranks` of them.

        gpuir.collective("all_reduce", 1 << 20, "dgx-h100").time_s

    `near` ranks are side by side in each node, by default as many as it has. `nbytes` is as
    nccl-tests counts: of an all_gather its output, of a reduce_scatter its input, of an all_to_all
    a rank's whole buffer, else the tensor. `library` is `nccl`, or the all-reduce of `vllm`,
    `sglang`, `trtllm`; `mode` how it runs and is timed (`eager_loop`, `kernel_trace`; `cuda_graph`,
    `eager`), by default the first that its library has. `version` is its release, and `run` a set
    of measurements that the prediction is to follow, where either is known. UsageError or
    TargetError where the cluster has no such ranks, or the library no such collective.
    """
    machine = load_cluster(fspath(cluster))
    ranks = ranks or machine.gpus
    near = min(near or machine.node_gpus, ranks)
    flat = near in (machine.node_gpus, ranks)
    sizes, strides = ((ranks,), (1,)) if flat else ((ranks // near, near), (machine.node_gpus, 1))
    if near > machine.node_gpus or ranks > machine.gpus or (not flat and ranks % near):
        raise UsageError(
            f"{machine.name} has no such ranks",
            expected=f"at most {machine.gpus}, {machine.node_gpus} of them in a node",
            found=f"ranks={ranks}, near={near}",
        )
    of = Library(library, mode or MODES[library][0], version, run)
    return collective_time(
        kind, nbytes, DTYPES[dtype], sizes=sizes, strides=strides, cluster=machine, library=of
    )


def collective_time(
    kind: str,
    nbytes: float,
    dtype: DType,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    cluster: Cluster,
    library: Library = NCCL,
) -> Time:
    """What a collective over the groups of `sizes` at `strides` takes on a cluster.

    `nbytes` is as nccl-tests counts: of an all_gather its output, of a reduce_scatter its input, of
    an all_to_all a rank's whole buffer (that of the rank with most, where they differ: it ends
    last), else the tensor. One rank alone communicates nothing, in no time. TargetError where the
    cluster has no such ranks or the library no such collective.
    """
    if library.mode not in MODES.get(library.name, ()) or (
        library.is_custom and kind != "all_reduce"
    ):
        raise TargetError(
            f"{library.name} has no {kind} that was measured in mode {library.mode!r}",
            expected=", ".join(f"{n} {m}" for n, ms in MODES.items() for m in ms),
            fix="use nccl in the mode eager_loop",
        )
    sizes, strides = tuple(sizes), tuple(strides)
    return _collective_time(
        kind, float(nbytes), dtype.bits, cluster, library, sizes=sizes, strides=strides
    )


@lru_cache(maxsize=65536)
def _collective_time(
    kind: str,
    nbytes: float,
    bits: int,
    cluster: Cluster,
    library: Library,
    *,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
) -> Time:
    if prod(sizes) <= 1 or nbytes <= 0:
        return Time(kind, nbytes, 0.0, "none", "", terms=(), interval=(0.0, 0.0), unseen=())
    found: list[Time] = []
    for g, own in groups_of(kind, sizes, strides, cluster):
        if bits <= NOT_IN_SWITCH:
            g = replace(g, reduces=0.0)
        found.append(timed(g, kind, bits, nbytes, c=own, library=library))
    return max(found, key=lambda x: x.time_s)


def timed(
    g: RankGroup, kind: str, bits: int, nbytes: float, *, c: Cluster, library: Library
) -> Time:
    """The time of one group, its terms and its interval."""
    sheet, field = Sheet(), weights()
    found = ways(sheet, g, nbytes, field.factors, library)
    total, which = chosen(found)
    way = found[int(which)]
    formula = float(total)
    waits = max(float(floor(g, field.factors, library)) - formula, 0.0)
    formula += waits
    curve = curve_of(g, kind, bits, c, library)
    change = field.at(curve, np.log2(nbytes))
    time_s = formula * exp(change)
    low, high = field.interval(curve, nbytes)
    algorithm, _, protocol = way.name.partition(" ")
    terms = {
        "start": float(way.start) + waits,
        "hops": float(way.hops),
        "ramp": float(way.ramp),
        "transfer": float(way.transfer),
        "measured": time_s - formula,
    }
    return Time(
        kind,
        nbytes,
        time_s,
        algorithm,
        protocol,
        terms=tuple(terms.items()),
        interval=(time_s * exp(low), time_s * exp(high)),
        unseen=field.unseen(curve),
        facts=tuple((name, float(sheet.values[name]), unit) for name, unit in FACTS),
        assumed=c.assumed,
    )


def curve_of(g: RankGroup, kind: str, bits: int, c: Cluster, library: Library) -> Curve:
    """Where among the measurements a group stands."""
    op = "send" if kind in SINGLE else kind
    level = next((x for n, x in c.levels if n != "fabric" and x.bytes_per_s >= float(g.rate)), None)
    way = level.topology if level and g.nvlink else ("pcie" if g.peers else "host")
    joined = "nvlink" if g.nvlink else way
    return Curve(
        gpu=f"{c.target.device}/{float(g.rate):.4g}/{way}",
        arch=f"{family(c.target.isa)}/{joined}",
        library=library.name,
        version=library.version,
        mode=library.mode,
        op=f"{op}.8" if bits <= NOT_IN_SWITCH and op == "all_reduce" else op,
        run=library.run,
        ranks=min(int(g.ranks), 2) if kind in SINGLE else int(g.ranks),
        nodes=min(int(g.nodes), 2) if kind in SINGLE else int(g.nodes),
    )


def weights() -> Field:
    """The factors that are shipped, and what measurements add."""
    return read_weights()
