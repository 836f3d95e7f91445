"""Products on matrix units: GEMM and batched GEMM in the dtypes that a target multiplies there.

A block computes one tile of the result, in steps along k. A step takes as long as its products, its
operands' way in, or its own latency. Blocks run in waves; where they are few, they share out k and
join their sums. Against that stand the bytes from DRAM, and the power of the board.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gpuir.cost.data import of_isa, table, tiles_of
from gpuir.cost.family import Family, FormulaInputs, Terms
from gpuir.cost.nest import (
    READ_SHARE,
    Tiles,
    board_watts,
    copies_asynchronously,
    instruction,
    is_halved,
    is_partitioned,
    kept_bytes,
    l2_drawn,
    memory_share,
    missed,
)
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.work import BY_CELL, Looped, Timed, Work
from gpuir.ir.errors import TargetError
from gpuir.ir.types import f32
from gpuir.targets.target import Target

STEP_BYTES = 128  # of k in a step: the widest swizzled row of shared memory (PTX ISA, wgmma)
MOST_STAGES = 4  # assumed: deeper pipelines gain little
# Of CUTLASS's small tiles for rows with scales on mma units (see `_dispatched`), in the middle: a
# wait is shared by the loads of all stages but one.
SCALED_STAGES = 5
MOST_SPLIT = 32  # assumed: blocks that share one tile's k
LEAST_STEPS = 4  # assumed: of each of those blocks
NEWTON = 5  # steps to the clock that power feeds, which is then right to the last digits
LEAST_S = 1e-12  # of it, and of what it needs: of kernels without products
JOULES_HZ = 1.41e9  # the clock that factors `joules` are of: A100's (NVIDIA A100 whitepaper)
# Architectures with mma, or what is most like it, that take other joules for a flop than A100 and
# L40S at the same clock: `matrix_j` of data/architectures.csv has what, over sm_80's.
OF_OTHER_JOULES = ("sm_70", "sm_75", "sm_12", "gfx94", "gfx950")
CLUSTER_READS = 0.75  # assumed: blocks in pairs, one operand of two read once for both

# Copies of a layer, each with its own weights, that take turns in the measurements (README of the
# kernel tables: 5 or 6): weights are met in the L2 only if all of them fit.
COPIES = 5.0

# What of a tile's stores shows where its sums lie in tensor memory, whose other half takes the next
# tile's meanwhile (PTX ISA, tcgen05). Assumed, and so better on B200 when left out of a fit.
BESIDE = 0.5

# How much longer a step takes when rows do not start at multiples of 16 bytes, which asynchronous
# copies need (CUDA C++ Programming Guide). Assumed: no such rows are in the tables.
UNALIGNED = 2.0
ALIGNED_BYTES = 16

# How many times as long products take whose rows of 16 bits have an odd number of cells: cuBLAS has
# kernels of Turing's kind for them, which load a cell at a time and copy nothing asynchronously
# (`cutlass_75_tensorop_f16_s1688gemm_f16_128x256_tn_align1`). GPT-2's logits on a T4 take 2.38 and
# 2.35 times as long for 50,257 words as for a multiple of 64 (cuBLAS 12.8, 13,700 and 14,976 rows;
# winterstar67's notes on kernel selection, 2026); 248,077 words for 16 tokens on an A100 take 1.67
# ms (pegainfer pull request 1046, 2026), 1.5 times what the formulas have for aligned ones; padding
# the words of a GPT-2 in f16 makes it 30 % faster there (intel/torch-xpu-ops issue 1129). Hopper is
# as fast on odd rows (float8_experimental pull request 145: 8193 x 5008 x 2501, 509 Tflop/s). Loads
# take as long as products do at the full rate; where the units have half of it, half as long.
BY_CELL_TIMES = 2.0


# Matrix units at half their rate wait for nothing else: Nsight Compute shows them 95.7 % busy in a
# product on an RTX 4060, 89.9 % with sums in f16 (triton-lang/triton, issue 10851). No rows are of
# such boards: `halved share` stays there. Of what loads hold up products half is left, which have
# twice the clocks to hide them: specs/measurements/torch-mm.csv, GeForce boards and L20.
HALVED_LEAK = 0.5


FACTORS = table("factors/tensor", Factor)

# Kinds of product whose kernels do not share out k, by what `Work.kind` says: operands with scales
# a row (CUTLASS) or a block (DeepGEMM), and TensorRT-LLM's plug-ins for narrow weights.
SCALED = ("row scales", "block scales")
UNSPLIT = (*SCALED, "plugin")


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    """The terms of products under tiles.

    The busiest SM runs `rounds` blocks, each `steps` steps long. Boards slow their clock down where
    their power does not feed the matrix units; SMs that idle leave their power to the others.
    """
    x, xp = FormulaInputs(s, work, tiles, target, p), s.xp
    unit, age, way = _ways(work, target)
    b, m, n, k = (work.extents[d] for d in ("b", "m", "n", "k"))
    tm, tn, tk = (tiles.along(d, work, s) for d in ("m", "n", "k"))
    down, across = s.put("tiles down", xp.ceil(m / tm)), s.put("tiles across", xp.ceil(n / tn))
    area = s.put("tiles of the result", b * down * across)
    blocks = s.put("blocks", area * tiles.split, "", "tiles of the result, times split")
    s.put("waves", blocks / target.sms)
    s.put("steps a block", xp.ceil(k / (tk * tiles.split)))
    peak = target.peak(work.pipe, work.rate_dtype)
    peak = s.put("peak", peak, "flop/s", _peak_source(work, target))
    compute = _compute(x, peak)

    dram_bytes = s.put("dram bytes", _dram_bytes(x, area, down, across), "bytes")
    read = memory_share(target, READ_SHARE) * p[f"dram share {_memory(target)}"]
    memory = dram_bytes / (target.dram_bytes_per_s * read)
    memory = s.put("from and to dram", memory, "s")
    flow = s.put("every operand once from dram", work.nbytes / target.dram_bytes_per_s, "s")
    ramp = p[f"ramp clocks {way}"] / target.clock_hz * flow / (flow + 1e-6)
    ramp = s.put("until operands stream", ramp, "s")
    partial = 8.0 * tiles.split * b * m * n / (p["split rate"] * target.l2_bytes_per_s)
    join = xp.where(tiles.split > 1, p[f"split {age}"] * 1e-6 + partial, 0.0)
    join = s.put("joining partial sums", join, "s")
    _features(s, work, tiles, target)
    q = p["overlap"]
    longer = s.put("the longer of arithmetic and memory", xp.maximum(compute, memory), "s")
    shorter = s.put("the shorter", xp.minimum(compute, memory), "s")
    shared = longer * ((1 + (shorter / longer) ** q) ** (1 / q) - 1)
    shared = s.put("not hidden", shared, "s")
    kind = "plugin" if work.kind == "plugin" else "scaled" if way == "scaled" else unit
    begin = p[f"start clocks {kind}"] / target.clock_hz - target.launch_s
    begin = s.put("until the first block works", xp.maximum(begin, 0.0), "s", "less the launch")
    return Terms(compute, memory, begin + ramp + join + shared, work.products / peak)


def _ways(work: Work, target: Target) -> tuple[str, str, str]:
    """What factors go by: the instruction; whether hardware copies tiles, "async", or "mma"; and
    the same, where it does, with scales."""
    unit = instruction(target)
    age = "mma" if unit == "mma" else "async"
    return unit, age, "scaled" if age == "async" and work.kind in SCALED else age


def _compute(x: FormulaInputs, peak: Number) -> Number:
    """Seconds of the busiest SM, or of all products at the power of the board."""
    s, work, tiles, target, p = x
    xp, waves, steps = s.xp, s.values["waves"], s.values["steps a block"]
    unit, age, way = _ways(work, target)
    tm, tn = tiles.along("m", work, s), tiles.along("n", work, s)
    idle = xp.ceil(waves) - waves
    lost = 1.0 if _is_bound(work, target) else p[f"tail {way}"]
    rounds = xp.maximum(1.0, waves + lost * idle)
    rounds = s.put("rounds of the busiest SM", rounds, "", "waves, with the last one's idle share")
    at_work = s.put("SMs at work", s.values["blocks"] / rounds, "", "on average, of all rounds")
    share = p[f"l2 share {age}"] / at_work
    l2_rate = share * target.l2_bytes_per_s
    l2_rate = s.put("l2 rate of a block", l2_rate, "bytes/s", "what the SMs at work share")
    follows = share * l2_drawn(target) * target.sms
    step = _step(x, peak, l2_rate, follows)
    out = sum((o.cell_bytes for o in work.operands if o.staging == "written"), 0.0)
    out = tm * tn * out * (BESIDE if unit == "tcgen05" else 1.0)
    taken = p["store bytes"] * target.clock_hz
    stores = s.put("stores of a tile", out / xp.minimum(taken, l2_rate), "s")
    stored = out / xp.minimum(taken, follows)
    begun, start = 0.0, p[f"tile ns {way}"] * 1e-9
    if work.kind == "plugin":
        begun = start = p["tile clocks plugin"] / target.clock_hz
    start = s.put("start and finish of a tile", start, "s")
    block = s.put("block", steps * step.full + start + stores, "s")
    lanes = target.peak("vector", f32) / target.sm.flops_per_lane_clock
    lane_s = s.put("lanes", p["lane share"] * work.lane_ops / lanes, "s", "what is not hidden")
    busy = s.put("busiest SM", rounds * block + lane_s, "s")
    clocked = rounds * (steps * step.beside + stored + begun) + lane_s
    still = rounds * (start - begun)
    sums = (
        (clocked + rounds * steps * step.clocked, still),
        (clocked, still + rounds * steps * step.still),
    )
    slower = _slower(x, busy, sums)
    at_power = s.put("at the power of the board", busy * slower, "s")
    if work.form != BY_CELL or unit != "mma":
        return at_power
    loads = (BY_CELL_TIMES - 1) * (0.5 if is_halved(target, work.rate_dtype) else 1.0)
    return s.put("with loads of one cell each", at_power * (1 + loads), "s")


def _is_bound(work: Work, target: Target) -> bool:
    """Whether the matrix units are all that an SM's blocks wait for: mma at half its rate. Then a
    block has nothing to gain from an SM of its own, and a last wave takes as long as any other:
    torch.mm on GeForce boards (specs/measurements/torch-mm.csv)."""
    return instruction(target) == "mma" and is_halved(target, work.rate_dtype)


@dataclass(frozen=True)
class BlockStep:
    """Seconds of one step of one block: `full` at the full clock, of which the longer of `clocked`,
    that goes by the clock, and `still`, that does not. `beside` goes by the clock too."""

    full: Number
    clocked: Number
    still: Number
    beside: Number


def _step(x: FormulaInputs, peak: Number, l2_rate: Number, follows: Number) -> BlockStep:
    """One step of one block, an SM to itself; operands come from the L2 at `l2_rate`, at which it
    `follows` the clock."""
    s, work, tiles, target, p = x
    xp = s.xp
    unit, _, way = _ways(work, target)
    tm, tn, tk = (tiles.along(d, work, s) for d in ("m", "n", "k"))
    inner = p["halved share" if is_halved(target, work.rate_dtype) else "compute share"]
    if work.kind == "plugin" and unit != "mma" and not work.dtype.is_float:
        inner = inner * p["plugin share"]
    products = float(work.multiply_add) * tm * tn * tk * target.sms / (peak * inner)
    products = s.put("products of a step", products, "s", "at the rate of the inner loop")
    sm_rate = p["sm bytes"] * target.clock_hz
    nbytes = _stage_bytes(work, tm, tn, tk) * _misaligned(s, work)
    if unit == "tcgen05":
        nbytes = nbytes * CLUSTER_READS
    loads = s.put("loads of a step", nbytes / xp.minimum(sm_rate, l2_rate), "s")
    taken = nbytes / xp.minimum(sm_rate, follows)
    own = way == "scaled" or work.kind == "plugin"
    chain = p[f"step ns {work.kind if own else way}"] * 1e-9
    if work.kind == "row scales" and not own:
        chain = chain * (MOST_STAGES - 1) / (SCALED_STAGES - 1)
    chain = s.put("least of a step", chain, "s", "one matrix instruction waits for the last")
    leak = p[f"leak {'scaled' if work.kind in SCALED else way}"]
    if is_halved(target, work.rate_dtype):
        leak = HALVED_LEAK * leak
    full = xp.maximum(xp.maximum(products, loads), chain) + leak * xp.minimum(products, loads)
    return BlockStep(
        full=s.put("step", full, "s"),
        clocked=xp.maximum(products, taken),
        still=xp.maximum(nbytes / l2_rate, chain),
        beside=leak * xp.minimum(products, taken),
    )


def _memory(target: Target) -> str:
    """The kind of memory, as far as its share of the listed bandwidth goes by it."""
    kind = target.dram.kind[:4]
    return kind if kind in ("HBM2", "HBM3") else "GDDR" if target.dram.ecc else "plain GDDR"


def _peak_source(work: Work, target: Target) -> str:
    rule = target.peak_rule(work.pipe, work.rate_dtype)
    listed = rule.partition(" ")[0]
    return f"{target.name} {rule}: {target.source(f'flops_per_s.{listed}')}"


# What the network sees: counts and shapes.
FEATURES = (
    *("log waves", "log steps", "idle share of the last wave", "log tile", "log split"),
    *("log rows", "log columns", "log footprint over l2", "log intensity"),
    *("log bits", "has scales", "is a plug-in"),
)
BOUND = 0.3  # assumed: kernels of one shape differ by as much between frameworks


def _features(s: Sheet, work: Work, tiles: Tiles, target: Target) -> None:
    log, v = s.xp.log, s.values
    nbytes = s.xp.maximum(work.nbytes, 1.0)
    s.put("log waves", log(v["waves"]))
    s.put("log steps", log(v["steps a block"]))
    s.put("idle share of the last wave", 1 - v["waves"] / s.xp.ceil(v["waves"]))
    s.put("log tile", log(tiles.along("m", work, s) * tiles.along("n", work, s)))
    s.put("log split", log(tiles.split))
    s.put("log rows", log(work.extents["m"]))
    s.put("log columns", log(work.extents["n"]))
    s.put("log footprint over l2", log(nbytes / target.l2_bytes))
    s.put("log bits", float(np.log(work.dtype.bits)))
    s.put("has scales", float(work.kind in SCALED))
    s.put("is a plug-in", float(work.kind == "plugin"))
    s.put("log intensity", log(s.xp.maximum(work.products, 1.0) / nbytes))


def _stage_bytes(work: Work, tm: Number, tn: Number, tk: Number) -> Number:
    """Bytes of the operands that one step of a block takes in."""
    sizes = {"b": 1.0, "m": tm, "n": tn, "k": tk}
    total: Number = 0.0
    for o in work.operands:
        if o.staging == "staged":
            cells: Number = o.cell_bytes
            for d in o.dims:
                cells = cells * sizes[d]
            total = total + cells
    return total


def _misaligned(s: Sheet, work: Work) -> Number:
    """How much longer loads take for rows, along k or along n, that start anywhere."""
    if work.form == BY_CELL:
        return 1.0
    cell = work.dtype.bits / 8
    ragged: Number = 0.0
    for d in ("k", "n"):
        lines = work.extents[d] * cell / ALIGNED_BYTES
        ragged = s.xp.maximum(ragged, s.xp.ceil(lines) - lines)
    return s.xp.where(ragged > 0, UNALIGNED, 1.0)


def flop_joules(target: Target, p: Mapping[str, Number], bits: int) -> Number:
    """Of a flop on operands of so many bits at the clock that the target's peak is listed for.

    Voltage rises with the clock: where power goes as the clock to the power of 1 / bend, joules go
    as the clock to one less (Dennard and others, IEEE JSSC 9(5), 1974: energy as the voltage
    squared). By the instruction: A100 (7 nm) and L40S (4 nm), both with mma, differ by 8 % at one
    clock. The 12 nm of before sm_80 takes more, sm_12x and AMD's since MI300X less
    (`OF_OTHER_JOULES`).
    """
    clock_hz = target.tensor_clock_hz or target.clock_hz
    swing = (clock_hz / JOULES_HZ) ** (1 / power_bend(target, p) - 1)
    if target.isa.startswith(OF_OTHER_JOULES):
        swing *= of_isa("matrix_j", target.isa) / of_isa("matrix_j", "sm_80")
    return p[f"joules {instruction(target)}"] * 1e-12 * (bits / 16) ** p["joules narrow"] * swing


def power_bend(target: Target, p: Mapping[str, Number]) -> Number:
    """The power of the watts with which the clock goes."""
    return of_isa("power_bend", target.isa) or p["power bend"]


def _slower(
    x: FormulaInputs, busy: Number, sums: tuple[tuple[Number, Number], tuple[Number, Number]]
) -> Number:
    """How much longer than `busy` seconds at the full clock products take at the clock that the
    board's power allows: the longer of two `sums`, each of what goes by the clock and what does
    not. Measured for a short while they run at the full one: nothing has slowed it yet."""
    s, work, target, p = x.s, x.work, x.target, x.p
    if target.tdp_w is None:
        return 1.0
    timed = work.detail if isinstance(work.detail, Timed) else None
    joules = flop_joules(target, p, work.dtype.bits)
    if timed and timed.blank:
        joules = joules * p["joules blank"]
    watts = s.put("power wanted", joules * work.products / busy, "W", "at the full clock")
    left = board_watts(target)
    fed = _fed_s(x, joules * work.products / left, sums)
    slower = s.xp.maximum(1.0, fed / busy)
    if timed is not None:
        beyond = timed.runs * busy * s.xp.maximum(watts - left, 0.0)
        slower = 1 + (slower - 1) * beyond / (beyond + p["slack"])
    return s.put("slower for lack of power", slower)


def _fed_s(
    x: FormulaInputs, needed: Number, sums: tuple[tuple[Number, Number], tuple[Number, Number]]
) -> Number:
    """Seconds of the longer of two sums at the clock that the power feeds: at the full one, its
    joules take `needed` seconds of that power.

    At a share r of the clock a flop takes r ^ (1 / bend - 1) of the joules (`flop_joules`), which
    the power feeds in t seconds if r = (t / needed) ^ bent; and t = still + clocked / r. What t is
    longer than that rises with t and bends down, so that Newton's steps come from below, and stay
    there. The full clock cancels: a board that may clock higher takes as long. Below the share at
    which the voltage falls no more a flop takes the joules that it takes there.
    """
    s, xp, bend = x.s, x.s.xp, power_bend(x.target, x.p)
    (one, first), (other, second) = sums
    floor = of_isa("voltage_floor", x.target.isa)
    least = needed * floor ** (1 / bend - 1)
    bent = bend / (1 - bend)
    needed = xp.maximum(needed, LEAST_S) ** bent
    one, other = one * needed, other * needed
    t = xp.maximum(xp.maximum(one, other) ** (1 / (1 + bent)), LEAST_S)
    for _ in range(NEWTON):
        power = t**-bent
        long, short = first + one * power, second + other * power
        slope = bent * xp.where(long > short, one, other) * power / t
        t = t + (xp.maximum(long, short) - t) / (1 + slope)
    t = xp.maximum(t, least)
    return s.put("at the clock that power feeds", t, "s", "cost.tensor._fed_s", terse=True)


def _dram_bytes(x: FormulaInputs, area: Number, down: Number, across: Number) -> Number:
    """Bytes from and to DRAM.

    Blocks of a wave cover a patch of the result, as square as it can be, and share what they read.
    For the next patch an operand is read again, but for what the L2 keeps. A weight comes back
    after its copies, as measurements have them, or, in a loop, after what else a trip moves.
    """
    s, work, target, p = x.s, x.work, x.target, x.p
    xp = s.xp
    left, right, rest = _moved(work)
    patch = s.put("tiles side by side", xp.minimum(area, float(target.sms)))
    wide = xp.minimum(across, xp.maximum(xp.sqrt(patch), patch / down))
    wide = s.put("of them across", wide)
    tall = s.put("of them down", xp.minimum(down, patch / wide))

    twice = s.xp.maximum(left + right, 1.0) * (2 if is_partitioned(target) else 1)
    lost = xp.maximum(0.0, 1.0 - p["l2 kept"] * target.l2_bytes / twice)
    lost = s.put("share read again that misses the l2", lost)
    left_again = 1.0 + lost * (xp.maximum(1.0, across / wide) - 1.0)
    left_again = s.put("reads of the left operand", left_again)
    right_again = 1.0 + lost * (xp.maximum(1.0, down / tall) - 1.0)
    right_again = s.put("reads of the right operand", right_again)

    held = kept_bytes(target)
    others = (COPIES - 1) * right
    if isinstance(work.detail, Looped | Timed):
        others = work.detail.between
    cold = missed(xp, right + others + left + rest, p["l2 weights"] * held, p["l2 edge"])
    cold = s.put("share of the right operand that misses", cold)
    cool = missed(xp, right + left + rest, p["l2 results"] * held, p["l2 edge"])
    cool = s.put("share of all else that misses", cool)
    return right * right_again * cold + (left * left_again + rest) * cool


def _moved(work: Work) -> tuple[Number, Number, Number]:
    """Bytes of the operands that share rows of the result, of those that share columns, and of all
    that the tiles do not share."""
    left: Number = 0.0
    right: Number = 0.0
    rest: Number = 0.0
    for o in work.operands:
        if o.staging != "staged":
            rest = rest + o.nbytes
        elif "m" in o.dims:
            left = left + o.nbytes
        else:
            right = right + o.nbytes
    return left, right, rest


# ---------------------------------------------------------------------------- which tile


@lru_cache(maxsize=256)
def _table(target: Target, bits: int) -> tuple[Any, ...]:
    """Tiles that fit the target: m, n, k, stages and warps of each."""
    tk = STEP_BYTES * 8 // bits
    most = MOST_STAGES if copies_asynchronously(target) else 2
    rows: list[tuple[float, ...]] = []
    has = target.sm.smem_bytes_per_block
    stage = {(tm, tn): (tm + tn) * STEP_BYTES + 1024 for _, tm, tn in tiles_of("tensor")}
    for (tm, tn), nbytes in stage.items():
        warps = 8 if tm * tn > 128 * 128 else 4
        if has >= nbytes:
            rows.append((tm, tn, tk, min(has // nbytes, most), warps))
    if not rows:
        raise TargetError(
            "no product on matrix units fits the shared memory of a block",
            where=f"{target.name}:sm.smem_bytes_per_block",
            expected=f"{min(stage.values()):,} bytes at least: one step of the smallest tile",
            found=f"{has:,}",
            fix="correct it, or leave flops_per_s.tensor out of a target without matrix units",
        )
    return tuple(np.array(rows, float).T)


def _dispatched(work: Work, target: Target) -> Tiles | None:
    """The tile of 8-bit products with scales on mma units, which their libraries take by the rows
    alone: SGLang's with scales a row (CUTLASS; sgl-kernel, fp8_gemm_kernel.cu, for up to 8192
    columns; vLLM's scaled_mm_c2x_sm89_fp8_dispatch.cuh differs by a factor of 2 here and there) and
    TensorRT-LLM's with scales a block (gemm_dispatch_sm89 of fp8_blockscale_gemm_kernel.cuh)."""
    if work.kind not in SCALED or work.dtype.bits != 8 or instruction(target) != "mma":
        return None
    m = np.asarray(work.extents["m"], float)
    tm, tn = np.full(m.shape, 32.0), np.full(m.shape, 128.0)
    if work.kind == "row scales":
        tm = np.select([m <= 16, m <= 64, m <= 128], [16.0, 32.0, 64.0], 128.0)
        tn = np.where(m <= 256, 64.0, 128.0)
    room = np.floor(target.sm.smem_bytes_per_block / ((tm + tn) * STEP_BYTES + 1024))
    one = np.ones(tm.shape)
    dims = {"b": one, "m": tm, "n": tn, "k": STEP_BYTES * one}
    return Tiles(dims, np.clip(room, 1.0, MOST_STAGES), 4 * one, one)


def candidates(work: Work, target: Target) -> Tiles:
    """Each shape whole, and with k shared out as widely as blocks and SMs allow."""
    if dispatched := _dispatched(work, target):
        return dispatched.each(lambda x: np.asarray(x)[..., None])
    tm, tn, tk, stages, warps = (np.repeat(c, 2) for c in _table(target, work.dtype.bits))
    column = work.each(lambda n: np.asarray(n, float)[..., None])
    split = _widest_split(column, target, tm, tn, tk)
    split[..., ::2] = 1.0
    return Tiles({"b": 1.0, "m": tm, "n": tn, "k": tk}, stages, warps, split)


def _widest_split(work: Work, target: Target, tm: Number, tn: Number, tk: Number) -> Number:
    """Blocks that can share a tile: that the SMs have room for, with a few steps left to each."""
    b, m, n, k = (work.extents[d] for d in "bmnk")
    room = target.sms / (b * np.ceil(m / tm) * np.ceil(n / tn))
    steps = np.ceil(k / tk) / LEAST_STEPS
    most = 1.0 if work.kind in UNSPLIT else MOST_SPLIT
    return np.maximum(np.floor(np.minimum(np.minimum(room, steps), most)), 1.0)


def choose(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    """The tile that a library takes: the one of least time.

    Kernels lie along the last axis and candidates along the first, in single precision, so that
    numpy runs over long rows. Each shape is tried whole, and with k shared out as widely as it can.
    """
    if dispatched := _dispatched(work, target):
        return dispatched
    tm, tn, tk, stages, warps = (
        np.tile(c, 2).astype(np.float32)[:, None] for c in _table(target, work.dtype.bits)
    )
    rows = work.each(lambda x: np.atleast_1d(np.asarray(x, np.float32)))
    split = _widest_split(rows, target, tm, tn, tk)
    split[: len(split) // 2] = 1.0
    tiles = Tiles({"b": 1.0, "m": tm, "n": tn, "k": tk}, stages, warps, split)
    terms = seconds(Sheet(), rows, tiles, target, p)
    best = np.argmin(np.maximum(terms.compute, terms.memory) + terms.latency, axis=0)

    def taken(x: Number) -> Number:
        return np.asarray(x[:, 0][best], float).reshape(np.shape(work.points))

    chosen = np.take_along_axis(split, best[None], axis=0)[0]
    dims = {"b": 1.0, "m": taken(tm), "n": taken(tn), "k": taken(tk)}
    size = np.shape(work.points)
    return Tiles(dims, taken(stages), taken(warps), np.asarray(chosen, float).reshape(size))


FAMILY = Family("tensor", FACTORS, candidates, seconds, choose, features=FEATURES, bound=BOUND)
