"""The roofline: the bound that no kernel beats."""

from __future__ import annotations

from gpuir.cost.nest import work_of
from gpuir.ir.notes import Bound, Cost, Tile
from gpuir.ops.kernel import KernelOp
from gpuir.targets.target import Target


def roofline(op: KernelOp, tile: Tile | None, target: Target, *, tf32: bool = False) -> Cost:
    """The slower of arithmetic and memory, plus one launch. Ignores tiles and caches.

    Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009.
    """
    work = work_of(op, tf32)
    flops = (work.products or work.flops) * work.visible
    peak = target.peak(work.pipe, work.dtype, tf32=tf32)
    compute = flops / peak
    memory = work.nbytes / target.dram_bytes_per_s
    terms: tuple[tuple[Bound, float], ...] = (
        ("compute", compute),
        ("memory", memory),
        ("latency", target.launch_s),
    )
    time_s = max(compute, memory) + target.launch_s
    facts = {
        "flops": work.flops,
        "dram_bytes": work.nbytes,
        "peak": peak,
        "peak_share": compute / time_s,
        "dram_share": memory / time_s,
    }
    bound = max(terms, key=lambda term: term[1])[0]
    return Cost(time_s, bound, "roofline@1", terms, tuple(facts.items()))
