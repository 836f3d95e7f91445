"""Tiled kernels → costed kernels: each kernel's time, what bounds it, and who says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import ClassVar

from gpuir.cost import generated
from gpuir.cost.batch import best_tiles, costs_of, tile_cost
from gpuir.cost.families import check_factors
from gpuir.cost.habits import Kernel, Release
from gpuir.cost.host import host_cost, hosted
from gpuir.cost.network import collective_cost
from gpuir.cost.reading import among
from gpuir.cost.table import PREDICTORS, Predictor, find_predictor
from gpuir.cost.work import Work
from gpuir.ir.errors import PluginError, UsageError
from gpuir.ir.graph import Graph, Level, Node
from gpuir.ir.notes import Bound, Cost, Tile
from gpuir.ir.verify import faults
from gpuir.ops import kernel as k
from gpuir.passes.manager import Pass
from gpuir.plugins import blamed
from gpuir.targets.cluster import Cluster, load_cluster
from gpuir.targets.load import load_target
from gpuir.targets.profile import profile_of
from gpuir.targets.support import described, load_operators, without_kernel
from gpuir.targets.target import Target

NO_WEIGHTS = k.HeldWeights()
FREE = Cost(0.0, "latency", "view", ())  # no launch, no bytes

# Gives the costs of kernels under their tiles.
Costing = Callable[[Sequence[tuple[k.KernelOp, Tile | None]]], list[Cost]]


@dataclass(frozen=True)
class Annotate(Pass):
    """Costs every kernel for the graph's target with `predictor`: `tile`, `roofline`, one that a
    plug-in adds, or, from Python, any function that is a `Predictor`, or a `Release`, whose own
    kernels are then costed by `tile`.

    With a `cluster`, a name or a file, collectives cost what they take there; without one nobody
    knows the links, and they count as not modelled.

    A view is free. A loop costs its trips times the kernels of its body, a branch the dearer side;
    kernels inside carry the cost of running once.
    """

    name: ClassVar[str] = "annotate"
    takes: ClassVar[Level | None] = Level.tiled
    gives: ClassVar[Level | None] = Level.costed
    predictor: str | Predictor | Release = "tile"
    cluster: str = ""

    def run(self, g: Graph) -> Graph:
        assert g.target is not None, "the verifier has seen to it"
        target = load_target(g.target)
        weights = k.HeldWeights.of(g) if target.is_cpu else NO_WEIGHTS
        cluster = self._cluster(g, target)
        costed = cost_graph(g, costing(self.predictor, target, weights, cluster))
        _check_version(self.predictor, costed)
        told = (*costed.assumed, *_generated(costed), *(cluster.assumed if cluster else ()))
        return replace(
            costed,
            cluster=self.cluster if cluster else costed.cluster,
            assumed=tuple(dict.fromkeys(told)),
        )

    def _cluster(self, g: Graph, target: Target) -> Cluster | None:
        """What joins the ranks; UsageError where its GPUs, or their number, are not the graph's."""
        if not self.cluster:
            return None
        cluster = load_cluster(self.cluster).part_with(target.device, g.ranks)
        if target.device not in {known.device for known in cluster.targets}:
            raise UsageError(
                f"the target of the graph is not a GPU of the cluster {cluster.name}",
                expected=", ".join(known.name for known in cluster.targets),
                found=target.name,
                fix="use one of these targets, or another cluster"
                if cluster.kinds
                else "remove the target, or use another cluster",
            )
        if g.ranks > cluster.gpus:
            raise UsageError(
                f"@{g.name} has more ranks than {cluster.name} has GPUs",
                expected=f"at most {cluster.gpus}",
                found=f"{g.ranks} ({', '.join(f'{a}={n}' for a, n in g.mesh)})",
                fix=f"{ceil(g.ranks / cluster.node_gpus)}x{cluster.name}"
                if cluster.nodes == 1
                else "a larger cluster",
            )
        return cluster


def _generated(costed: Graph) -> Iterator[str]:
    """What a report has to say of kernels whose tile is not the library's."""
    signed = [n.cost.by for n in costed.walk() if n.cost]
    if count := signed.count(generated.BY):
        yield (
            f"{count:,} kernel{'s have tiles' if count > 1 else ' has a tile'} of the schedule "
            "that no library takes: costed as what Triton or CUTLASS generate, by other formulas "
            f"({generated.BY}) than a library's kernel"
        )


def _check_version(predictor: str | Predictor | Release, costed: Graph) -> None:
    """UsageError when a version was asked for that the predictor does not sign with."""
    if not isinstance(predictor, str) or "@" not in predictor:
        return
    signed = {n.cost.by for n in costed.walk() if n.cost and n.cost.terms}
    if signed - {predictor}:
        raise UsageError(
            f"no predictor {predictor!r}",
            found=", ".join(sorted(signed)),
            fix="remove the version from the name, or install that version of "
            "gpuir or of the plug-in",
        )


def costing(
    predictor: str | Predictor | Release,
    target: Target,
    weights: k.HeldWeights = NO_WEIGHTS,
    cluster: Cluster | None = None,
) -> Costing:
    """The predictor as a function of many kernels. Our own depend on a kernel's work alone, so
    equal works are costed once, and those that are alike together. Collectives cost what they take
    on the `cluster`, if there is one.

    Of `weights`, given for a CPU, each run finds in the caches what the others left there: rates of
    GPUs were measured so.
    """
    release = predictor if isinstance(predictor, Release) else Release()
    plain = "tile" if isinstance(predictor, Release) else predictor
    predict = find_predictor(plain) if isinstance(plain, str) else plain
    is_ours = predict in PREDICTORS.values()
    if is_ours:
        check_factors(target)
    known: dict[tuple[Kernel, Tile | None], Cost] = {}

    def key(op: k.KernelOp, tile: Tile | None) -> tuple[Kernel, Tile | None]:
        return release.kernel(op, among(op, weights)), tile

    def costs(kernels: Sequence[tuple[k.KernelOp, Tile | None]]) -> list[Cost]:
        keys = [key(op, tile) for op, tile in kernels] if is_ours else []
        new = {key: op for key, (op, _) in zip(keys, kernels, strict=False) if key not in known}
        if predict is tile_cost:
            known.update(_by_tiles(list(new), target))
        else:
            known.update((key, predict(op, key[1], target)) for key, op in new.items())
        return [
            collective_cost(op, cluster)
            if cluster is not None and isinstance(op, k.Collective)
            else known[keys[i]]
            if is_ours
            else _asked(predict, op, tile, target)
            for i, (op, tile) in enumerate(kernels)
        ]

    return costs


def _by_tiles(
    kernels: Sequence[tuple[Kernel, Tile | None]], target: Target
) -> dict[tuple[Kernel, Tile | None], Cost]:
    """What kernels cost by the tile predictor. One whose tile is not the one that the library takes
    is a generated kernel."""
    plain = [(x, tile) for x, tile in kernels if isinstance(x, Work) and tile is not None]
    library = best_tiles({} if target.is_cpu else {work: "" for work, _ in plain}, target)
    found: dict[tuple[Kernel, Tile | None], Cost] = {
        (work, tile): generated.cost_of(work, tile, target)
        for work, tile in plain
        if library.get(work, tile) != tile
    }
    rest = [key for key in kernels if key not in found]
    costs = costs_of([(x, tile or Tile(())) for x, tile in rest], target)
    return found | dict(zip(rest, costs, strict=True))


def _asked(predict: Predictor, op: k.KernelOp, tile: Tile | None, target: Target) -> Cost:
    """What a predictor of somebody else's says, if it is a cost."""
    name = f"the predictor {getattr(predict, '__name__', predict)!r}"
    with blamed(predict, name):
        cost = predict(op, tile, target)
    if not isinstance(cost, Cost):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PluginError(
            f"the predictor {name} returns no cost",
            expected='Cost(time_s, bound, "mine@1", terms, facts)',
            found=repr(cost),
        )
    for what, expected, found in faults(cost):
        raise PluginError(f"{name}: {what}", where=op.name, expected=expected, found=found)
    return cost


def cost_graph(g: Graph, costs: Costing) -> Graph:
    """The graph with a cost on every kernel. What its stack has no kernel for costs what the host's
    CPU takes, which is then assumed."""
    nodes = [n for n in g.walk() if not (n.op.control or isinstance(n.op, k.View))]
    kernels = [(n.op, n.tile) for n in nodes if isinstance(n.op, k.KernelOp)]
    if len(kernels) < len(nodes):
        names = ", ".join({n.op.name for n in nodes if not isinstance(n.op, k.KernelOp)})
        raise TypeError(f"{names} is not a kernel")
    costed = _costed(g, dict(zip(map(id, nodes), costs(kernels), strict=True)))
    target = load_target(g.target) if g.target else None
    return costed if target is None or target.is_cpu else _fallen_back(costed, target)


def _fallen_back(g: Graph, target: Target) -> Graph:
    """The kernels of nodes that a stack runs on the CPU, with what they take there."""
    profile = profile_of(g)
    missing = without_kernel(g, profile) if profile.fallback else {}
    if profile.fallback is None or not missing:
        return g
    own = hosted(g, missing.keys())
    nodes = tuple(
        replace(n, cost=host_cost(own[n.results[0]], target, profile))
        if n.results and n.results[0] in own
        else n
        for n in g.nodes
    )
    counts = Counter(map(described, missing.values()))
    kinds = ", ".join(f"{what} ({count} nodes)" for what, count in counts.items())
    operators = load_operators(profile.operators)
    text = (
        f"{operators.title} has no kernel for {kinds}. These operators "
        "run on the CPU, and their data is copied there"
    )
    factor = profile.fallback.uncertainty
    text += f" and back; the rates are assumed (within a factor of {factor:g})"
    return replace(g, nodes=nodes, assumed=(*g.assumed, text))


def _costed(g: Graph, costs: Mapping[int, Cost]) -> Graph:
    """The graph with these costs, by the identity of nodes; of a loop or a branch what its kernels
    take."""
    nodes: list[Node] = []
    for n in g.nodes:
        op = n.op.with_regions(lambda region: _costed(region, costs)) if n.op.control else n.op
        match op:
            case k.View():
                cost = FREE
            case k.Loop():
                cost = _repeated(op.body, op.trips)
            case k.Cond():
                cost = _repeated(op.dearer, 1)
            case _:
                cost = costs[id(n)]
        nodes.append(replace(n, op=op, cost=cost))
    return replace(g, level=Level.costed, nodes=tuple(nodes))


def _repeated(body: Graph, trips: int) -> Cost:
    """The cost of `trips` runs of a costed body, one kernel after another."""
    costs = [n.cost for n in body.nodes if n.cost is not None]
    by = next((c.by for c in costs if c.by != FREE.by), FREE.by)
    terms: dict[Bound, float] = {}
    for cost in costs:
        for name, seconds in cost.terms:
            terms[name] = terms.get(name, 0.0) + seconds * trips
    facts: dict[str, float] = {"trips": trips}
    for fact in ("flops", "operand_bytes", "dram_bytes", "l2_bytes"):
        facts[fact] = trips * sum(c.fact(fact) or 0 for c in costs)
    bound: Bound = max(terms, key=terms.__getitem__) if terms else "latency"
    time_s = trips * sum(c.time_s for c in costs)
    unseen = tuple(dict.fromkeys(what for c in costs for what in c.unseen))
    return Cost(
        time_s,
        bound,
        by,
        terms=tuple(terms.items()),
        facts=tuple(facts.items()),
        interval=_added(costs, trips),
        unseen=unseen,
    )


def _added(costs: Sequence[Cost], trips: int) -> tuple[float, float] | None:
    """Between what `trips` runs of all of them lie, as far off as each in the same direction: the
    errors of one predictor on one device go together. None where one that takes time cannot say."""
    intervals = [c.interval for c in costs if c.time_s]
    if not intervals or None in intervals:
        return None
    lows, highs = zip(*(i for i in intervals if i is not None), strict=True)
    return trips * sum(lows), trips * sum(highs)
