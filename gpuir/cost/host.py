"""What the host's CPU runs in place of the device: copies there and back, and the work itself.

No measurements of any of it are at hand: rates are those that the profile assumes for a server's
processor, and the interval is as wide as it says.
"""

from __future__ import annotations

from gpuir.ir.graph import Graph, Value
from gpuir.ir.notes import ON_HOST, Bound, Cost
from gpuir.ops import kernel as k
from gpuir.targets.profile import Copies, Fallback
from gpuir.targets.target import Target

PINNED = Copies(10e-6, 0.8)  # assumed of a profile that has no copies of its own


def host_cost(
    op: k.KernelOp,
    moved: int,
    copies: int,
    is_first: bool,
    target: Target,
    fallback: Fallback,
    own: Copies | None,
) -> Cost:
    """The device is waited for, `moved` bytes come and go in so many `copies` over the PCIe link,
    and the CPU takes the slower of its arithmetic and its memory. `is_first` of the kernels that
    stand for its model node, it also takes the node's call."""
    how = own or PINNED
    rate = how.share * target.pcie.bytes_per_s if target.pcie else fallback.bytes_per_s
    size = sum(a.type.nbytes for a in (*op.nest.reads, *op.nest.writes))
    terms: dict[Bound, float] = {
        "compute": op.flops() / fallback.flops_per_s,
        "memory": size / fallback.bytes_per_s + moved / rate,
        "latency": is_first * fallback.call_s + copies * how.call_s,
    }
    time_s = max(terms["compute"], terms["memory"]) + terms["latency"]
    bound = max(terms, key=terms.__getitem__)
    facts = (("copied_bytes", float(moved)), ("copies", float(copies)))
    by = fallback.uncertainty
    return Cost(time_s, bound, ON_HOST, tuple(terms.items()), facts, (time_s / by, time_s * by))


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
