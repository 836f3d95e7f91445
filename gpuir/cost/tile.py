"""The tile predictor: waves of tiles over the SMs, each at the rate its shape can sustain.

In the manner of NeuSight (Lee, Phanishayee, Mahajan, ASPLOS 2025): a kernel is equal tiles that run
in waves, and the work of a tile over the device's roof gives its time. Here the utilisation is not
learned but written out: what on-chip bandwidth, instruction issue, latency and board power leave of
the peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpuir.cost.nest import (
    CLUSTER_READS,
    Nest,
    Number,
    Tiles,
    Work,
    cut,
    has_clusters,
    runs_on_tensor,
    work_of,
)
from gpuir.cost.power import Sustained, sustained
from gpuir.ir.notes import Bound, Cost, Tile
from gpuir.ir.types import f32
from gpuir.ops.kernel import KernelOp
from gpuir.targets.target import Target

BY = "tile@1"

# The constants of the model. "Fitted" ones: by hand and coordinate search on the train rows of the
# NeuSight kernel tables (A100-PCIe, V100, P100, T4, P4), products with the tile that cuBLAS took.
TENSOR_SHARE = 0.90  # of the matrix units' rate in the inner loop: A100 SXM, bf16, large products
LANE_SHARE = 0.97  # of the lanes' rate in the inner loop, where issue is no limit; fitted
ISSUE_OVERHEAD = 0.05  # assumed: instructions a multiply-add of a large tile, besides its loads
LOAD_SLOTS = 8.0  # issue slots to bring one operand cell into the tile; fitted
DRAM_SHARES = {"HBM": 0.86, "GDDR": 0.76}  # of the listed bandwidth; fitted on elementwise rows
ROW_SHARE = 0.72  # of that, in a reduction: two passes and a wait between; fitted on layernorm rows
L2_RATE_SHARE = 0.80  # assumed: of the L2's listed rate
SMEM_BYTES_PER_CLOCK = 128  # of one SM: CUDA C++ Programming Guide, shared memory (32 banks of 4)
LATENCY_CLOCKS = 700  # a load under load, until its data can be used; fitted
FILL_CLOCKS = 2000  # a block's start, first loads and last stores; fitted
SPLIT_S = 1.5e-6  # assumed: synchronising the blocks that share an output tile


@dataclass(frozen=True)
class Rates:
    """What a target gives one kind of work, before any tile."""

    peak: float  # listed flop/s of the products (of f32 lanes, where there are none)
    rule: str  # which listed rate that is
    on_tensor: bool
    power: Sustained
    powered: float  # flop/s of the products that the board's power feeds
    issued: float  # flop/s of the products in an inner loop that nothing holds up
    lanes: float  # lane instructions a second
    smem_bytes_per_s: float  # of all SMs
    dram_bytes_per_s: float
    l2_bytes_per_s: float
    latency_s: float
    fill_s: float
    launch_s: float


def rates(work: Work, target: Target, tf32: bool = False) -> Rates:
    """The rates of `target` for `work`."""
    dtype = work.dtype if work.is_contraction else f32
    peak = target.peak(work.pipe, dtype, tf32=tf32)
    rule = target.peak_rule(work.pipe, dtype, tf32=tf32)
    on_tensor = runs_on_tensor(work, target, tf32)
    bits = 16 * dtype.bits // 32 if rule == "tensor.tf32" else dtype.bits
    power = sustained(target, peak, on_tensor, bits)
    vector = target.peak("vector", f32)
    lane_power = sustained(target, vector, False, 32)
    return Rates(
        peak=peak,
        rule=rule,
        on_tensor=on_tensor,
        power=power,
        powered=peak * power.share,
        issued=peak * (TENSOR_SHARE if on_tensor else LANE_SHARE),
        lanes=vector / target.sm.flops_per_lane_clock * min(lane_power.share, LANE_SHARE),
        smem_bytes_per_s=target.sms * SMEM_BYTES_PER_CLOCK * target.clock_hz,
        dram_bytes_per_s=target.dram_bytes_per_s * dram_share(work, target),
        l2_bytes_per_s=target.l2_bytes_per_s * L2_RATE_SHARE,
        latency_s=LATENCY_CLOCKS / target.clock_hz,
        fill_s=FILL_CLOCKS / target.clock_hz,
        launch_s=target.launch_s,
    )


def dram_share(work: Work, target: Target) -> float:
    """The share of the listed DRAM bandwidth that a kernel's streams reach."""
    share = next(
        (s for kind, s in DRAM_SHARES.items() if target.dram.kind.startswith(kind)),
        min(DRAM_SHARES.values()),
    )
    return share * (ROW_SHARE if work.kernel == "k.reduce" else 1.0)


@dataclass(frozen=True)
class Estimate:
    """Every quantity between a nest and its time; a `Cost` and its explanation are views of it.

    Numbers are floats, or arrays over many tiles.
    """

    nest: Nest
    rates: Rates
    issue: Number  # issue slots a multiply-add on the lanes takes; 1 on the matrix units
    product_s: Number  # one step of one block, an SM to itself
    smem_bytes: Number  # in and out of shared memory in a step
    smem_s: Number
    lane_s: Number
    step_s: Number
    power_s: Number  # all products at the rate that the board's power feeds
    compute_s: Number
    wait_s: Number  # from a step of a block to its next, at the least
    busy_s: Number
    dram_s: Number
    l2_s: Number
    memory_s: Number
    exposed_s: Number
    split_s: Number
    latency_s: Number
    time_s: Number


def estimate(work: Work, tiles: Tiles, target: Target, given: Rates) -> Estimate:
    """The time of `work` under each of `tiles`.

    An SM runs `load` blocks, `resident` at a time. A step of a block costs the SM its products (or
    the shared-memory reads that feed them, whichever is longer) and its lane instructions; steps of
    resident blocks follow each other, but a block's own next step waits for its loads, of which
    `stages` are under way at once. Where the board's power does not feed the peak, what counts is
    the average over the kernel: SMs that idle in the last wave leave their power to the others. The
    first fill and the last drain are part of a launch, which is what an empty kernel takes.
    """
    nest, sms = cut(work, tiles, target), target.sms
    flops = work.products / max(work.points, 1) * nest.step_points * work.visible
    issue = _issue(nest, target, given.on_tensor)
    product_s = flops * issue / (given.issued / sms)
    smem_bytes = _smem_traffic(nest, target, given.on_tensor) * work.visible
    smem_s = smem_bytes / (given.smem_bytes_per_s / sms)
    lane_s = work.lane_ops / (nest.blocks * nest.steps) / (given.lanes / sms)
    step_s = np.maximum(product_s, smem_s) + lane_s
    power_s = flops * nest.steps * nest.blocks / given.powered
    compute_s = np.maximum(nest.steps * nest.load * step_s, power_s)

    rounds = np.floor(nest.load / nest.resident)
    rest = nest.load - rounds * nest.resident
    wait_s = (given.latency_s + step_s) / tiles.stages
    busy_s = nest.steps * (
        rounds * np.maximum(nest.resident * step_s, wait_s)
        + np.where(rest > 0, np.maximum(rest * step_s, wait_s), 0.0)
    )
    busy_s = busy_s + given.fill_s * (np.ceil(nest.load / nest.resident) - 1)  # see launch_s

    active = np.minimum(1.0, nest.blocks / sms)
    dram_s = nest.dram_bytes / given.dram_bytes_per_s
    l2_s = nest.l2_bytes / (given.l2_bytes_per_s * active)
    memory_s = np.maximum(dram_s, l2_s)
    split_s = np.where(tiles.split > 1, SPLIT_S, 0.0)
    exposed_s = np.maximum(busy_s - np.maximum(compute_s, memory_s), 0.0)
    latency_s = exposed_s + split_s + given.launch_s
    return Estimate(
        nest=nest,
        rates=given,
        issue=issue,
        product_s=product_s,
        smem_bytes=smem_bytes,
        smem_s=smem_s,
        lane_s=lane_s,
        step_s=step_s,
        power_s=power_s,
        compute_s=compute_s,
        wait_s=wait_s,
        busy_s=busy_s,
        dram_s=dram_s,
        l2_s=l2_s,
        memory_s=memory_s,
        exposed_s=exposed_s,
        split_s=split_s,
        latency_s=latency_s,
        time_s=np.maximum(compute_s, memory_s) + latency_s,
    )


def _issue(nest: Nest, target: Target, on_tensor: bool) -> Number:
    """Issue slots that one multiply-add on the lanes takes, at least 1.

    A thread that computes c cells loads 2 sqrt(c) operands for c multiply-adds, four to an
    instruction. SMs of 64 lanes take two clocks for a warp's multiply-add, so one more instruction
    fits beside each; SMs of 128 issue one a clock, and every other instruction displaces one.
    Bringing the operands into the tile costs `LOAD_SLOTS` a cell, for m n multiply-adds m + n.
    """
    if on_tensor or not nest.work.is_contraction:
        return 1.0
    m, n = (nest.tiles.dims[d] for d in nest.work.face)
    cells = np.maximum(m * n / nest.threads, 1.0)
    instructions = 1.0 + ISSUE_OVERHEAD + 0.5 / np.sqrt(cells)
    inner = np.maximum(1.0, instructions * target.sm.fp32_lanes / 128)
    return inner + LOAD_SLOTS * (1 / m + 1 / n)


def _smem_traffic(nest: Nest, target: Target, on_tensor: bool) -> Number:
    """Shared-memory bytes of one step: the tiles come in once and go out to the matrix units.

    A part of the output tile reads all it needs of both operands; the fewer the parts and the
    squarer, the less is read twice: at least 2 sqrt(parts m n) k cells. A warp computes a part,
    from sm_90 on four warps together, on sm_100 the block, where a pair of blocks also keeps only
    half of one operand each (PTX ISA: mma, wgmma, tcgen05 with cta_group::2).
    """
    if not on_tensor:
        return 0.0 * nest.threads
    whole = target.isa.startswith("sm_10")
    parts = 1.0 if whole else nest.tiles.warps / (4 if has_clusters(target) else 1)
    incoming = nest.stage_bytes + nest.held_bytes / np.maximum(nest.steps, 1.0)
    traffic = incoming + nest.stage_bytes * np.sqrt(np.maximum(parts, 1.0))
    return traffic * (CLUSTER_READS if whole else 1.0)


def tile_cost(op: KernelOp, tile: Tile | None, target: Target, *, tf32: bool = False) -> Cost:
    """The tile predictor's cost of one kernel under its tile."""
    work = work_of(op, tf32)
    return cost_of(work, tile or Tile(()), target, rates(work, target, tf32))


def cost_of(work: Work, tile: Tile, target: Target, given: Rates) -> Cost:
    """The cost of a work under a tile: the estimate, as a signed note."""
    return cost_from(estimate(work, Tiles.of(tile, work), target, given), target)


def cost_from(e: Estimate, target: Target) -> Cost:
    """The `Cost` that an estimate of one tile amounts to."""
    nest, work = e.nest, e.nest.work
    compute, memory = float(e.compute_s), float(e.memory_s)
    terms: tuple[tuple[Bound, float], ...] = (
        ("compute", compute),
        ("memory", memory),
        ("latency", float(e.latency_s)),
    )
    time_s = max(compute, memory) + float(e.latency_s)
    facts: dict[str, Any] = {
        "flops": work.flops,
        "dram_bytes": nest.dram_bytes,
        "l2_bytes": nest.l2_bytes,
        "blocks": nest.blocks,
        "waves": nest.waves,
        "blocks_per_sm": nest.resident,
        "occupancy": min(1.0, nest.resident * nest.threads / target.sm.threads),
        "tail": nest.tail,
        "padding": 1 - min(1.0, nest.padding),
        "peak": e.rates.peak,
        "peak_share": (work.products or work.flops) * work.visible / time_s / e.rates.peak,
        "dram_share": nest.dram_bytes / time_s / target.dram_bytes_per_s,
    }
    bound = max(terms, key=lambda term: term[1])[0]
    return Cost(time_s, bound, BY, terms, tuple((k, _plain(v)) for k, v in facts.items()))


def _plain(number: Any) -> float:
    """A Python number: whole where it is one, else to six significant digits."""
    value = float(number)
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")
