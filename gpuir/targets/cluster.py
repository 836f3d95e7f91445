"""GPUs joined by links, from inside out, as sourced numbers; and clusters that a name describes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, NamedTuple, cast

from gpuir.ir.door import PATH, WHOLE, takes
from gpuir.ir.errors import TargetError, nearest
from gpuir.targets.load import load_target, target_names
from gpuir.targets.spec import (
    Raw,
    SpecKind,
    check_name,
    check_notes,
    is_path,
    on_base,
    paths_to_text,
    read_spec,
    record,
    refuse,
    slug,
    unknown,
)
from gpuir.targets.target import FrozenTable, Quantity, Sourced, Target

TOPOLOGIES = ("switch", "mesh", "ring", "bridge", "pcie", "host", "fabric")
# What a technology begins with; its generation, lanes or rate follow: "NVLink 4", "RoCE 400GbE".
TECHNOLOGIES = (
    *("NVLink", "Infinity Fabric", "Xe Link", "PCIe", "CXL"),
    *("InfiniBand", "RoCE", "Ethernet", "Omni-Path", "Slingshot", "EFA"),
)
_NONE: FrozenTable[str] = FrozenTable()
_RULE = re.compile(r"(?:([1-9][0-9]{0,5})x)?(.*)")
_JOINED = re.compile(r"\+(?![\w.]+=)")  # but for the numbers behind a target: a100+sms=120
_PART = re.compile(r"(.+)\[([0-9]{1,9}):([0-9]{1,9})\]")  # ranks of a cluster of several kinds


@dataclass(frozen=True)
class LinkLevel:
    """What joins `joins` units of the level below (GPUs at the lowest).

    `bytes_per_s` is the share of one GPU in one direction, `latency_s` one hop of a message that
    needs no hand-shake. In a `mesh` each pair has links of its own, which share a GPU's rate;
    behind `pcie` GPUs reach each other over it, with `host` through the memory of the host, for
    want of peer access; a `fabric` joins nodes, each GPU by an adapter (a rail) of its own. With
    `reduces` the switch adds up and copies.
    """

    joins: Annotated[int, Quantity("", 1, 1 << 20)]
    technology: str
    topology: str
    bytes_per_s: Annotated[float, Quantity("bytes/s", 1e8, 1e15, "of one GPU, one direction")]
    latency_s: Annotated[float, Quantity("s", 1e-8, 1e-2)]
    reduces: bool = False


@dataclass(frozen=True, repr=False)
class Cluster(Sourced):
    """GPUs and what joins them, from inside out: `pair` (a bridge), `domain` (NVLink or the like),
    `node` (PCIe), `fabric` (between nodes; it joins 1 where there is one node).

    `gpu` names a target. Where nodes are of several kinds, `kinds` names a cluster of one kind for
    each, in the order of the ranks: GPUs, links and rails are theirs, and `fabric` joins the nodes
    of all. `ranks`, from:to, is a part of such a cluster. `assumed` says what a name left open.
    """

    name: str
    gpu: str
    title: str = ""
    base: str = ""
    notes: str = ""
    pair: LinkLevel | None = None
    domain: LinkLevel | None = None
    node: LinkLevel | None = None
    fabric: LinkLevel | None = None
    kinds: tuple[str, ...] = ()
    ranks: str = ""
    assumed: tuple[str, ...] = ()
    sources: FrozenTable[str] = _NONE

    def __hash__(self) -> int:
        return hash((self.name, self.gpus))

    @property
    def levels(self) -> tuple[tuple[str, LinkLevel], ...]:
        """The levels that there are, from inside out, with their names."""
        known = (("pair", self.pair), ("domain", self.domain), ("node", self.node))
        return tuple((n, x) for n, x in (*known, ("fabric", self.fabric)) if x is not None)

    @property
    def node_gpus(self) -> int:
        """GPUs that reach each other without the fabric; of several kinds of nodes, the fewest."""
        if self.kinds:
            return min(x.cluster.node_gpus for x in self.stretches)
        n = 1
        for name, level in self.levels:
            n *= 1 if name == "fabric" else level.joins
        return n

    @property
    def nodes(self) -> int:
        return self.fabric.joins if self.fabric else 1

    @property
    def gpus(self) -> int:
        return self.stretches[-1].end if self.kinds else self.node_gpus * self.nodes

    @property
    def target(self) -> Target:
        """Its GPU; TargetError where there are several kinds."""
        return _target(self.only_gpu)

    @property
    def only_gpu(self) -> str:
        """The name of its GPU; TargetError where there are several kinds."""
        if len(self.targets) > 1:
            raise TargetError(
                f"{self.name} has several kinds of GPU, and this command takes only one",
                expected="a cluster with one kind of GPU, or one of its GPUs (--target)",
                found=", ".join(target.name for target in self.targets),
                fix="use `gpuir simulate` or `gpuir plan`, which take all kinds; or "
                f"use {self.stretches[0].cluster.name} only",
            )
        return self.stretches[0].cluster.gpu

    @cached_property
    def targets(self) -> tuple[Target, ...]:
        """Its GPUs, one of each kind, in the order of the ranks."""
        return tuple(dict.fromkeys(_target(x.cluster.gpu) for x in self.stretches))

    @cached_property
    def stretches(self) -> tuple[RankStretch, ...]:
        """Its ranks, kind by kind."""
        if not self.kinds:
            return (RankStretch(self, 0, self.gpus, 0),)
        found: list[RankStretch] = []
        start = 0
        for cluster in map(load_cluster, self.kinds):
            found.append(RankStretch(cluster, start, start + cluster.gpus, 0))
            start += cluster.gpus
        if not self.ranks:
            return tuple(found)
        first, end = map(int, self.ranks.split(":"))
        return tuple(x for x in _within(found, first, end) if x.end > x.first)

    @takes(first=WHOLE, count=WHOLE)
    def part(self, first: int, count: int) -> Cluster:
        """What joins as many of its ranks, from `first` on: one of its kinds, where that has them
        all. A cluster of one kind is the same for all its ranks."""
        if not self.kinds or (first, count) == (0, self.gpus):
            return self
        for x in self.stretches:
            if x.first <= first and first + count <= x.end:
                return x.cluster
        if self.ranks:
            first += int(self.ranks.partition(":")[0])
        name = self.name.partition("[")[0]
        ranks = f"{first}:{first + count}"
        return replace(self, name=f"{name}[{ranks}]", ranks=ranks)

    @takes(nodes=WHOLE)
    def with_nodes(self, nodes: int) -> Cluster:
        """As many of these nodes. TargetError where nothing says how nodes are joined."""
        if nodes == self.nodes:
            return self
        if self.kinds:
            refuse(
                f"{self.name} has several kinds of nodes",
                self.name,
                "kinds",
                fix="give the number of each, for example 2xdgx-h100+4xdgx-a100",
            )
        if self.fabric is None:
            refuse(
                f"{self.name} does not describe the network between its nodes",
                self.name,
                "fabric",
                fix="add a table [fabric] with its sources",
            )
        sources = dict(self.sources) | {"fabric.joins": "set by the user"}
        old = f"{self.nodes}x" if self.name.startswith(f"{self.nodes}x") else ""
        return replace(
            self,
            name=f"{nodes}x{self.name.removeprefix(old)}",
            fabric=replace(self.fabric, joins=nodes),
            sources=FrozenTable(sources),
        )

    def part_with(self, device: str, count: int) -> Cluster:
        """The first of as many ranks, counted off from rank 0, of which one has that GPU (its
        `Target.device`); the first of all where none has."""
        if not self.kinds or count >= self.gpus:
            return self
        parts = (self.part(i, count) for i in range(0, self.gpus - count + 1, count))
        has = (x for x in parts if device in {target.device for target in x.targets})
        return next(has, self.part(0, count))


class RankStretch(NamedTuple):
    """Ranks from `first` to before `end`, which are the GPUs of a cluster of one kind, from its
    GPU `skipped` on."""

    cluster: Cluster
    first: int
    end: int
    skipped: int


def _within(all: Iterable[RankStretch], first: int, end: int) -> Iterator[RankStretch]:
    """What of them lies from one rank to before another, which is then rank 0."""
    for x in all:
        a, b = max(x.first, first), min(x.end, end)
        yield RankStretch(x.cluster, a - first, b - first, a - x.first)


@cache
def _target(name: str) -> Target:
    return load_target(name)


# ---- names ------------------------------------------------------------------------------------


@takes(name=PATH)
def load_cluster(name: str | Path) -> Cluster:
    """The cluster of a shipped name, of a `.toml` path, or of a rule.

    `16xdgx-h100` are as many nodes of a shipped cluster, `8xh100-sxm` is one node of as many GPUs
    with their usual links, `32xh100-sxm` are nodes of eight: what is taken for granted there is in
    `Cluster.assumed`. `2xdgx-h100+4xdgx-a100` are nodes of several kinds, on one fabric, and
    `[8:24]` behind that some of their ranks. TargetError for an unknown name, with the nearest
    ones, or an impossible number.
    """
    text = str(name)
    if part := _PART.fullmatch(text):
        return _part(load_cluster(part[1]), int(part[2]), int(part[3]))
    if is_path(text) and ("+" not in text or Path(text).is_file()):
        return _read(Path(text))
    if len(names := _JOINED.split(text)) > 1:
        return _of_kinds(names, text)
    if ":" in text:
        refuse(
            "MIG slices cannot reach the memory of other slices, so they form no cluster",
            text,
            fix=f"use {text.partition(':')[0]} with whole GPUs; use `gpuir mig plan` for slices",
        )
    files = _KIND.shipped
    wanted = slug(text)
    if wanted in files:
        return _shipped(files[wanted])
    found = _RULE.fullmatch(wanted)  # whatever is left is a name
    assert found
    count, rest = found.groups()
    if count and rest in files:
        return _shipped(files[rest]).with_nodes(int(count))
    try:
        target = load_target(rest)
    except TargetError:
        named = (*files, *(f"8x{n}" for n in target_names()))
        if count:  # the nearest name keeps its number
            named = (*(f"{count}x{n}" for n in files), *(f"{count}x{n}" for n in target_names()))
        error = unknown("cluster", text, named)
        close = nearest(wanted, named)
        error.fix = (
            f"{close if close.startswith('did') else '`gpuir clusters` lists the names'}\n"
            "or give a number of GPUs, for example 8xh100-sxm, or the path "
            "of your own .toml file"
        )
        raise error from None
    return usual(target, int(count or 1))


def cluster_names() -> tuple[str, ...]:
    """Names of the shipped clusters, sorted."""
    return tuple(_KIND.shipped)


@cache
def _shipped(path: Path) -> Cluster:
    return _read(path)


def _find(name: str) -> Path:
    if is_path(name):
        return Path(name)
    if slug(name) not in _KIND.shipped:
        raise unknown("cluster", name, _KIND.shipped)
    return _KIND.shipped[slug(name)]


def _read(path: Path) -> Cluster:
    raw = on_base(read_spec(path), path, _KIND)
    return cluster_of(raw, str(path))


def _part(whole: Cluster, first: int, end: int) -> Cluster:
    if not whole.kinds:
        refuse(
            f"{whole.name} has only one kind of GPU, so all its ranks are alike",
            f"{whole.name}[{first}:{end}]",
            fix=f"leave [{first}:{end}] out",
        )
    if not first < end <= whole.gpus:
        refuse(
            f"{whole.name} does not have these ranks",
            f"{whole.name}[{first}:{end}]",
            expected=f"from 0 to {whole.gpus}",
            found=f"{first}:{end}",
            fix=f"write {whole.name}[0:{whole.gpus}], say",
        )
    return whole.part(first, end - first)


# ---- several kinds ------------------------------------------------------------------------------


def _of_kinds(names: Sequence[str], text: str) -> Cluster:
    """Nodes of several kinds that a name lists, joined by the slowest of their rails."""
    kinds = [_kind(name, text) for name in names]
    fabric, source = _slowest_rail(kinds, text)
    return Cluster(
        name="+".join(x.name for x in kinds),
        gpu="",
        title=" and ".join(x.title or x.name for x in kinds),
        fabric=fabric,
        kinds=tuple(names),
        assumed=_assumed(kinds, f"one network joins all nodes, as fast as {fabric.technology}"),
        sources=FrozenTable({"fabric": source, "fabric.joins": "the nodes of all kinds"}),
    )


def _kind(name: str, where: str) -> Cluster:
    """A cluster of one kind, of those that a larger one joins."""
    nested = is_path(name) and "kinds" in read_spec(Path(name))
    if nested or _JOINED.search(name) or _PART.fullmatch(name):
        refuse(
            f"{name} itself has several kinds",
            where,
            fix="give each of its kinds here instead",
        )
    return load_cluster(name)


def _slowest_rail(kinds: Sequence[Cluster], where: str) -> tuple[LinkLevel, str]:
    """A fabric for the nodes of all, and where its numbers come from."""
    for x in kinds:
        if x.fabric is None:
            refuse(
                f"{x.name} does not describe the network between its nodes",
                where,
                "fabric",
                fix=f"add a table [fabric] with its sources, to {x.name} or to a file with "
                f"kinds = {[x.name for x in kinds]}".replace("'", '"'),
            )
    slowest = min(kinds, key=lambda x: x.fabric.bytes_per_s if x.fabric else 0.0)
    rails = [x.fabric for x in kinds if x.fabric]
    assert slowest.fabric
    fabric = replace(
        slowest.fabric,
        joins=sum(x.nodes for x in kinds),
        latency_s=max(rail.latency_s for rail in rails),
    )
    return fabric, f"the slowest rail, of {slowest.name}: {slowest.source('fabric.bytes_per_s')}"


def _assumed(kinds: Sequence[Cluster], *more: str) -> tuple[str, ...]:
    vendors = list(dict.fromkeys(load_target(x.gpu).vendor for x in kinds))
    if len(vendors) > 1:  # NCCL and RCCL each join GPUs of their own vendor alone
        names = " and ".join(vendors)
        more = (
            *more,
            f"one library joins GPUs of {names}, as fast as NCCL: no measurements are known",
        )
    return tuple(dict.fromkeys((*(text for x in kinds for text in x.assumed), *more)))


def cluster_of(raw: Raw, where: str) -> Cluster:
    """The cluster that a spec file's tables describe; TargetError at the first thing wrong."""
    sources = paths_to_text(raw, "sources", where)
    raw = {k: v for k, v in raw.items() if k != "discrepancies"} | {"sources": FrozenTable(sources)}
    if "kinds" in raw:
        return _file_of_kinds(raw, sources, where)
    cluster = cast(Cluster, record(Cluster, raw, "", where))
    check_name(cluster.name, "cluster", where)
    try:
        load_target(cluster.gpu)
    except TargetError as error:
        error.where = error.where or f"{where}:gpu"
        raise
    if cluster.ranks:
        refuse(
            "only a cluster with several kinds has parts", where, "remove it", fix="leave it out"
        )
    _check_levels(cluster, where)
    if not cluster.levels:
        refuse(
            "the cluster has no link between GPUs",
            where,
            expected="a table [domain] or [node]",
            fix="add a level",
        )
    check_notes(cluster, {"sources": sources}, where)
    return cluster


def _file_of_kinds(raw: Raw, sources: dict[str, str], where: str) -> Cluster:
    """The cluster of several kinds that a spec file's tables describe."""
    for name in ("gpu", "pair", "domain", "node", "ranks"):
        if name in raw:
            refuse(
                f"{name} is given beside kinds, but each kind has its own {name}",
                where,
                name,
                fix=f"remove {name}, or write it into the file of a kind",
            )
    cluster = cast(Cluster, record(Cluster, {"gpu": ""} | raw, "", where))
    check_name(cluster.name, "cluster", where)
    if not cluster.kinds:
        refuse(
            "kinds must be a list of cluster names", where, "kinds",
            fix='write kinds = ["2xdgx-h100", "2xdgx-a100"]',
        )  # fmt: skip
    folder = Path(where).parent
    names = tuple(str(folder / x) if is_path(x) else x for x in cluster.kinds)
    try:
        kinds = [_kind(x, where) for x in names]
    except TargetError as error:
        error.where = error.where or f"{where}:kinds"
        raise
    nodes = sum(x.nodes for x in kinds)
    assumed = _assumed(kinds)
    fabric = cluster.fabric
    if fabric is None:
        fabric, source = _slowest_rail(kinds, where)
        sources |= {"fabric": source, "fabric.joins": "the nodes of all kinds"}
        assumed = _assumed(kinds, f"one network joins all nodes, as fast as {fabric.technology}")
    elif fabric.joins != nodes:
        refuse(
            "the fabric must join all nodes, each node once",
            where,
            "fabric.joins",
            expected=" + ".join(f"{x.nodes} of {x.name}" for x in kinds),
            found=str(fabric.joins),
            fix=f"write joins = {nodes}",
        )
    cluster = replace(
        cluster, kinds=names, fabric=fabric, assumed=assumed, sources=FrozenTable(sources)
    )
    _check_levels(cluster, where)
    check_notes(cluster, {"sources": sources}, where)
    return cluster


def _check_levels(cluster: Cluster, where: str) -> None:
    for name, level in cluster.levels:
        if level.topology not in TOPOLOGIES:
            refuse(
                f"no topology is called {level.topology!r}",
                where,
                f"{name}.topology",
                expected=", ".join(TOPOLOGIES),
                fix=nearest(level.topology, TOPOLOGIES),
            )
        if not level.technology.lower().startswith(tuple(x.lower() for x in TECHNOLOGIES)):
            refuse(
                f"no technology is called {level.technology[:60]!r}",
                where,
                f"{name}.technology",
                expected=f"{', '.join(TECHNOLOGIES)}, followed by a generation or a rate",
                fix=nearest(level.technology, TECHNOLOGIES),
            )
        if (level.topology == "fabric") != (name == "fabric"):
            refuse(
                f"{name} has the topology {level.topology}",
                where,
                f"{name}.topology",
                expected='"fabric" in the table [fabric], and in no other table',
                fix="correct the table or the topology",
            )


def _base_of(raw: Raw, where: str) -> Cluster:
    if "kinds" in raw:
        refuse(
            "a cluster with several kinds cannot be a base",
            where,
            "give its kinds instead",
            fix="name its kinds",
        )
    return cluster_of(raw, where)


_KIND = SpecKind("cluster", "dgx-h100", ("clusters",), _base_of, _find)


# ---- nodes that a number and a GPU describe -----------------------------------------------------

NODE = 8  # GPUs in a node, at most, where a name does not say
NVLINK_S = 0.47e-6  # as PCIE_S and NETWORK_S: one hop of a short message
PCIE_S = 1.0e-6
NETWORK_S = 2.7e-6
HOP = "NVIDIA/nccl src/graph/tuning.cc, commit 01afd20: latency of one hop, ring, protocol LL"
# InfiniBand of one GPU by compute capability: HDR beside A100, NDR beside H100, XDR beside B200
# (the defaults of ai-dynamo/aiconfigurator's system files).
RAILS = {"sm_80": ("InfiniBand HDR", 25e9), "sm_90": ("InfiniBand NDR", 50e9)}
LATER = ("InfiniBand XDR", 100e9)
EARLIER = ("InfiniBand EDR", 12.5e9)
NO_PEERS = ("sm_89",)  # as measured on nodes of L40S and of RTX 6000 Ada
NO_PEER_TITLES = ("GeForce",)  # NVIDIA's driver gives these cards no peer access over PCIe
REDUCES = ("sm_90", "sm_100", "sm_103")  # NVSwitch from its third generation on


def usual(target: Target, count: int) -> Cluster:
    """Nodes of one GPU with the links it usually has: NVLink of a module behind a switch (two or
    four GPUs of Ampere and before: a mesh), bridges between pairs of cards, else PCIe."""
    if count > NODE and count % NODE:
        below, above = count - count % NODE, count + NODE - count % NODE
        raise TargetError(
            f"{count} GPUs are not a whole number of nodes with {NODE} GPUs",
            where=f"{count}x{target.name}",
            expected=f"at most {NODE}, or a multiple of {NODE}",
            fix=f"write {below}x{target.name} or {above}x{target.name}, or describe it in a file",
        )
    size, nodes = min(count, NODE), max(1, count // NODE)
    sources = {"fabric.joins": "the number of GPUs that was asked for"}
    assumed: list[str] = []
    link = target.link
    pair = domain = node = None
    if link is not None and "bridge" not in link.kind:
        mesh = link.kind != "NVLink" or (size <= 4 and target.isa in ("sm_60", "sm_70", "sm_80"))
        topology = "mesh" if mesh else "switch"
        reduces = not mesh and target.isa in REDUCES
        speed = {"bytes_per_s": link.bytes_per_s, "latency_s": NVLINK_S}
        domain = LinkLevel(size, link.kind, topology, **speed, reduces=reduces)
        sources |= {
            "domain": f"target {target.name}: {target.source('link')}",
            "domain.joins": "the number of GPUs asked for",
            "domain.latency_s": HOP,
        }
        assumed.append(f"{size} GPUs of a node are joined by {link.kind} in a {topology}")
    else:
        bytes_per_s, what = 31.508e9, "assumed: generation 4 with 16 lanes"
        if target.pcie is not None:
            bytes_per_s = target.pcie.bytes_per_s
            what = f"target {target.name}: {target.source('pcie')}"
        bridged = link is not None and size % 2 == 0
        if link is not None and bridged:
            pair = LinkLevel(2, link.kind, "bridge", link.bytes_per_s, NVLINK_S)
            sources |= {
                "pair": f"target {target.name}: {target.source('link')}",
                "pair.joins": "assumed: cards are bridged in pairs",
                "pair.latency_s": HOP,
            }
            assumed.append("cards are bridged in pairs")
        alone = target.isa in NO_PEERS or target.title.startswith(NO_PEER_TITLES)
        topology = "host" if alone and not bridged else "pcie"
        node = LinkLevel(size // 2 if bridged else size, "PCIe", topology, bytes_per_s, PCIE_S)
        sources |= {
            "node": what,
            "node.joins": "the number of GPUs asked for",
            "node.latency_s": HOP,
        }
        way = "through the host's memory" if topology == "host" else "over PCIe"
        assumed.append(f"the GPUs of a node reach each other {way}")
    technology, rate = RAILS.get(target.isa, _other_rail(target))
    fabric = LinkLevel(nodes, technology, "fabric", rate, NETWORK_S)
    sources |= {
        "fabric": "assumed: one adapter of a GPU's generation; ai-dynamo/aiconfigurator's default",
        "fabric.latency_s": HOP,
    }
    if nodes > 1:
        assumed.append(f"nodes are joined by {technology}, one adapter a GPU")
    return Cluster(
        name=f"{count}x{target.name}",
        gpu=target.name,
        title=f"{count} x {target.title or target.name}",
        pair=pair,
        domain=domain,
        node=node,
        fabric=fabric,
        assumed=tuple(assumed),
        sources=FrozenTable(sources),
    )


def _other_rail(target: Target) -> tuple[str, float]:
    number = re.fullmatch(r"sm_(\d+)a?", target.isa)
    if number is None:  # not NVIDIA: as its contemporaries
        return RAILS["sm_90"]
    major = int(number[1])
    return LATER if major >= 100 else RAILS["sm_80"] if major > 80 else EARLIER


def describe(levels: Iterable[tuple[str, LinkLevel]]) -> str:
    """`8 NVLink (switch), 4 InfiniBand NDR (fabric)`."""
    return ", ".join(f"{x.joins} {x.technology} ({x.topology})" for _, x in levels)
