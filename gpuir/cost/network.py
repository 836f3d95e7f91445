"""Collectives as kernels of a graph: the cost of one on a cluster, and the lines behind it."""

from __future__ import annotations

from collections.abc import Iterator
from math import log

from gpuir.cost.collective import BY, NCCL, Library, Time, collective_time
from gpuir.ir.notes import Bound, Cost
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.targets.cluster import Cluster

# Blocks of a collective's kernel, each on an SM. Assumed: NCCL's logs show 24 channels on DGX A100
# and H100 (NCCL_DEBUG=INFO, "24 coll channels"), and 8 where there is no NVLink.
BLOCKS = {True: 24, False: 8}
# The words of `Cost.unseen` for what of a collective was not measured.
UNSEEN = {"system": "links", "ranks": "ranks", "nodes": "network"}


def counted_bytes(op: t.Collective) -> int:
    """The bytes of a collective as nccl-tests counts them: of an all_gather its output, else its
    input; of one that routes rows, those that it says."""
    if op.routed is not None:
        return op.routed
    type = op.result_types[0] if op.fn == "all_gather" else op.x.type
    return type.nbytes


def time_of(kernel: k.Collective, cluster: Cluster) -> Time:
    """What a launch of collectives takes for the slowest rank, their bytes as one buffer.
    TargetError where the cluster has too few GPUs."""
    op = kernel.collective
    nbytes = sum(map(counted_bytes, kernel.collectives))
    kind, dtype = op.carried_by, op.x.type.dtype
    # Engines decode in CUDA graphs, and no host's time is in a kernel's.
    library = Library(kernel.library, "cuda_graph") if kernel.library else NCCL
    return collective_time(
        kind, nbytes, dtype, sizes=op.sizes, strides=op.strides, cluster=cluster, library=library
    )


def collective_cost(kernel: k.Collective, cluster: Cluster) -> Cost:
    """A collective's time as a cost: `network` is what grows with its bytes, ramp and transfer,
    and `latency` its start and its hops, each scaled by what measurements add."""
    time = time_of(kernel, cluster)
    formula = time.time_s - time.term("measured")
    scale = time.time_s / formula if formula else 0.0
    terms: dict[Bound, float] = {
        "network": scale * (time.term("ramp") + time.term("transfer")),
        "latency": scale * (time.term("start") + time.term("hops")),
    }
    moved = float(sum(x.nbytes for x in (*(v.type for v in kernel.args), *kernel.result_types)))
    facts = {
        "bytes": time.bytes,
        "ranks": float(kernel.collective.ranks),
        "operand_bytes": moved,
        "device_share": device_share(time, moved, cluster),
    }
    return Cost(
        time.time_s,
        max(terms, key=terms.__getitem__),
        BY,
        tuple(terms.items()),
        tuple(facts.items()),
        interval=time.interval,
        unseen=tuple(UNSEEN[what] for what in time.unseen),
    )


def device_share(time: Time, moved: float, cluster: Cluster) -> float:
    """What a collective takes from kernels beside it: the SMs its blocks are on, or its part of the
    memory's bandwidth, where that is more; of several kinds of GPU, on that with least to spare."""
    found = 0.0
    for own in (x.cluster for x in cluster.stretches):
        level = own.levels[0][1]
        blocks = BLOCKS[level.topology in ("switch", "mesh", "ring", "bridge")]
        memory = moved / (time.time_s * own.target.dram.bytes_per_s) if time.time_s else 0.0
        found = max(found, blocks / own.target.sms, memory)
    return min(found, 1.0)


def quantities(
    kernel: k.Collective, cluster: Cluster
) -> Iterator[tuple[str, float, str, str, str]]:
    """Name, value, unit, formula and source of each quantity behind a collective's cost."""
    op = kernel.collective
    time = time_of(kernel, cluster)
    way = f"{time.algorithm} {time.protocol}".strip()
    groups = f"groups of {list(op.sizes)} at strides {list(op.strides)}"
    yield "bytes", time.bytes, "bytes", "", f"{op.carried_by}, counted as nccl-tests does"
    yield "ranks", float(op.ranks), "", "", f"{groups} on {cluster.name}"
    for name, value, unit in time.facts:
        source = {
            "link rate": f"{cluster.name}, levels within a node",
            "wire": "bytes over a GPU's links: nccl-tests, doc/PERFORMANCE.md",
            "network": "rails of one node" if cluster.fabric else "one node",
        }.get(name, "")
        yield name, value, unit, "", source
    formula = time.time_s - time.term("measured")
    for name in ("start", "hops", "ramp", "transfer"):
        source = f"{way}, the quickest here; cost.collective.ways" if name == "start" else ""
        yield name, time.term(name), "s", "", source
    if time.time_s:
        change = log(time.time_s / formula)
        yield "measured", change, "", "", "what measurements add, a logarithm; cost.kriging"
        sums = " + ".join(f"{time.term(n):.7g}" for n in ("start", "hops", "ramp", "transfer"))
        yield "time", time.time_s, "s", f"({sums}) * exp({change:.7g})", ""
    else:
        yield "time", 0.0, "s", "", "one rank, or no bytes"
