"""The roofline: the bound that no kernel beats."""

from __future__ import annotations

from gpuir.cost.nest import peak_of
from gpuir.cost.reading import work_of
from gpuir.cost.sheet import Number
from gpuir.cost.work import Work
from gpuir.ir.notes import Bound, Cost, Tile
from gpuir.ops.kernel import KernelOp
from gpuir.targets.target import Target


def bounds(work: Work, target: Target) -> tuple[Number, Number]:
    """Seconds of arithmetic at the listed peak, and of moving each operand once; of one kernel or
    of many."""
    flops = work.products * work.density if work.is_contraction else work.flops
    return flops / peak_of(work, target), work.nbytes / target.dram_bytes_per_s


def roofline(op: KernelOp, tile: Tile | None, target: Target) -> Cost:
    """The slower of arithmetic and memory, plus one launch. Ignores tiles and caches.

    Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009.
    """
    work = work_of(op)
    compute, memory = (float(term) for term in bounds(work, target))
    terms: tuple[tuple[Bound, float], ...] = (
        ("compute", compute),
        ("memory", memory),
        ("latency", target.launch_s),
    )
    time_s = max(compute, memory) + target.launch_s
    facts = {
        "flops": work.flops,
        "operand_bytes": work.operand_bytes,
        "dram_bytes": work.nbytes,
        "peak": peak_of(work, target),
        "peak_share": compute / time_s,
        "dram_share": memory / time_s,
    }
    bound = max(terms, key=lambda term: term[1])[0]
    return Cost(time_s, bound, "roofline@1", terms, tuple(facts.items()))
