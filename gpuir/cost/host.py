"""What the host's CPU runs in place of the device: copies there and back, and the work itself.

No measurements of any of it are at hand: rates are those that the profile assumes for a server's
processor, and the interval is as wide as it says.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gpuir.ir.graph import Graph, Loc, Value
from gpuir.ir.notes import ON_HOST, Bound, Cost
from gpuir.ir.sizes import real
from gpuir.ops import kernel as k
from gpuir.targets.profile import Copies, Profile
from gpuir.targets.target import Target

PINNED = Copies(10e-6, 0.8)  # assumed of a profile that has no copies of its own


@dataclass(frozen=True)
class Hosted:
    """A kernel that the CPU runs: its arithmetic, the bytes that it reads and writes, and those of
    them that are `moved`, in so many `copies`. `is_first` of the kernels that stand for its model
    node, it also takes the node's call."""

    flops: int
    bytes: int
    moved: int
    copies: int
    is_first: bool


def host_cost(x: Hosted, target: Target, profile: Profile) -> Cost:
    """The device is waited for, bytes come and go over the PCIe link, and the CPU takes the slower
    of its arithmetic and its memory: of a profile that has a fallback."""
    how, fallback = profile.copies or PINNED, profile.fallback
    assert fallback is not None
    rate = how.share * target.pcie.bytes_per_s if target.pcie else fallback.bytes_per_s
    terms: dict[Bound, float] = {
        "compute": x.flops / fallback.flops_per_s,
        "memory": x.bytes / fallback.bytes_per_s + x.moved / rate,
        "latency": x.is_first * fallback.call_s + x.copies * how.call_s,
    }
    time_s = max(terms["compute"], terms["memory"]) + terms["latency"]
    bound = max(terms, key=terms.__getitem__)
    facts = (("copied_bytes", real(x.moved)), ("copies", real(x.copies)))
    between = time_s / fallback.uncertainty, time_s * fallback.uncertainty
    return Cost(time_s, bound, ON_HOST, tuple(terms.items()), facts, interval=between)


def hosted(g: Graph, missing: Collection[Loc]) -> dict[Value, Hosted]:
    """By the first result of each, the kernels of these model nodes. A loop counts as a whole; what
    is inside of it is not told apart."""
    own = frozenset(
        v
        for n in g.nodes
        for v in n.results
        if not n.op.control and not isinstance(n.op, k.View) and not set(missing).isdisjoint(n.locs)
    )
    moved = crossings(g, own)
    found: dict[Value, Hosted] = {}
    called: set[Loc] = set()
    for n in g.nodes:
        if n.results and n.results[0] in moved:
            size = sum(a.type.nbytes for a in (*n.op.nest.reads, *n.op.nest.writes))
            first = called.isdisjoint(n.locs)
            called.update(n.locs)
            nbytes, copies = moved[n.results[0]]
            found[n.results[0]] = Hosted(n.op.flops(), size, nbytes, copies, first)
    return found


def crossings(g: Graph, hosted: frozenset[Value]) -> dict[Value, tuple[int, int]]:
    """Of the first result of each kernel whose results are `hosted`, the bytes and the number of
    its copies: what it reads from the device, and what of its results the device reads. Weights
    lie where they are read."""
    uses = g.uses()
    device = {v for n in g.nodes for v in n.results if v not in hosted}
    found: dict[Value, tuple[int, int]] = {}
    for node in g.nodes:
        if not node.results or node.results[0] not in hosted:
            continue
        read = [v for v in dict.fromkeys(node.op.operands) if v in device]
        back = [
            v
            for v in node.results
            if any(not set(reader.results) & hosted for reader in uses.get(v, ()))
        ]
        both = (*read, *back)
        found[node.results[0]] = sum(v.type.nbytes for v in both), len(both)
    return found
