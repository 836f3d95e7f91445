"""Mixtures of experts on one rank: rows sorted by expert, two grouped products with the activation
between them, and the rows of each token added up again.

How many rows each expert gets decides everything: an expert that gets any has its weights read, and
its rows are rounded up to whole tiles. The weights stream from DRAM while rows are few; products
take over where they are many. What runs is one of several implementations, which differ by more
than GPUs do; each is a family of its own, with the same formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gpuir.cost.data import table
from gpuir.cost.family import Family, FormulaInputs, Terms, fastest
from gpuir.cost.nest import (
    Tiles,
    instruction,
    is_partitioned,
    kept_bytes,
    l2_drawn,
    missed,
)
from gpuir.cost.power import fed
from gpuir.cost.routing import ROWS, Routed
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.work import Work
from gpuir.targets.target import Target


@dataclass(frozen=True)
class Implementation:
    """An implementation in a number format: a row of data/experts.csv."""

    library: str
    scheme: str
    launches: int
    described: int
    paired: int
    untuned: int

    @property
    def kind(self) -> str:
        return f"{self.library} {self.scheme}"


def measured() -> tuple[Implementation, ...]:
    """The implementations that were measured."""
    return table("experts", Implementation)


LAUNCH_S = 2.5e-6  # one of them: about what fits without B200 come to
# Whose products take their rows where they lie, and activate and quantise what they write; with
# scales by blocks along k the activation is a kernel of its own (trtllmGenKernels/blockScaleMoe).
FUSED = "trtllm"


def _is_fused(kind: str) -> bool:
    return kind.startswith(FUSED) and not kind.endswith("block")


def _is_paired(kind: str) -> bool:
    return any(e.paired for e in measured() if kind.startswith(e.library))


# ---------------------------------------------------------------------------- how long it takes


def _factors(experts: Implementation) -> tuple[Factor, ...]:
    """Those of an implementation, with the launches and the set-up of its own."""
    own = {"fixed": experts.launches * LAUNCH_S, "expert": 1e-7 if experts.described else 1e-8}
    known = table("factors/experts", Factor)
    return tuple(replace(f, value=own.get(f.name, f.value)) for f in known)


# The clock that factors `fixed`, `fill` and `depth` are of: H100's. Launches and waits take clocks:
# one token of SGLang's f16 takes 28.7 us at the least on A100, 22.1 on H100 and 18.4 on L40S, with
# 1.41, 1.98 and 2.52 GHz (kernel table moe).
WAITS_HZ = 1.98e9
# Layers are measured again and again (`Routed.again`): weights are met in the L2 where all of one
# call's fit, up to this share of what it keeps; see `tensor`, whose factors for that start there.
# In a model others come between.
L2_KEEPS, L2_EDGE = 0.95, 0.3
# Of the listed L2 rate, in one piece and in two partitions: as of streams.
L2_SHARES = 0.75, 0.42
# Weights that are converted feed tiles as fast as lanes convert them. A factor of 1 is H200's L2:
# bytes a clock of an SM.
CONVERTED_BYTES = 46.6
# What GDDR reaches of its listed bandwidth over what HBM does, with error codes in band: as of
# streams, 0.75 to 0.80 and 0.90.
GDDR_OVER_HBM = 0.86

KIB = 1024.0
STEP_BYTES = 64  # of k: assumed

# The share of the listed rate that mma.sync has, which Marlin's kernels keep to on every GPU: 0.629
# on H100 (Luo and others, arXiv:2402.13499). Assumed: an SM of sm_100 does as many a clock.
MMA_SYNC = {"mma": 1.0, "wgmma": 0.629, "tcgen05": 0.629 / 2}


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    """The terms of a mixture of experts under tiles of rows of one expert.

    Both products stream the weights of the active experts from DRAM beside their arithmetic; rows
    are moved between the kernels, by those implementations that run a token's row for each of its
    experts, elsewhere too, for all that the router sent.
    """
    x, xp = FormulaInputs(s, work, tiles, target, p), s.xp
    width, hidden = work.extents["n"], work.extents["k"]
    routed = work.detail_as(Routed)
    into, rows, active = routed.into, routed.shares.rows, routed.shares.active
    _features(s, work)
    clocks = target.sms * target.clock_hz
    dram = target.dram_bytes_per_s * (GDDR_OVER_HBM if target.dram.ecc else 1.0)
    dram = s.put("dram rate, as of HBM", dram, "bytes/s", "cost.grouped.GDDR_OVER_HBM")
    cold: Number = 1.0
    if routed.again:
        cold = missed(xp, work.nbytes, L2_KEEPS * kept_bytes(target), L2_EDGE)
    cold = s.put("share of the weights that misses the l2", cold)
    l2_rate = s.put("l2 rate", _l2_rate(target), "bytes/s", "cost.grouped.L2_SHARES")
    streaming = xp.maximum(cold / (dram * p["dram share"]), 1 / l2_rate)
    streaming = streaming + p["weight clocks"] / (KIB * clocks)
    streaming = s.put("time of a byte of weights", streaming, "s", "through DRAM and into SMs")
    s.put("dram bytes", work.nbytes * cold, "bytes", "of experts that get rows")
    s.put("dram time", work.nbytes * cold / (dram * p["dram share"]), "s")
    s.put("l2 time", s.put("l2 bytes", work.nbytes, "bytes") / l2_rate, "s")
    cell = work.operands[1].cell_bytes
    compute: Number = 0.0
    memory: Number = 0.0
    for name, n, k in (("in", width * into, hidden), ("out", hidden, width)):
        compute = compute + s.put(f"products {name}", _product(x, n, k, cold), "s")
        memory = memory + s.put(f"weights {name}", active * n * k * cell * streaming, "s")
    touched = routed.sent if work.kind.startswith(("sglang", "vllm")) else rows
    passed = 2 * hidden + 2 * (1 if _is_fused(work.kind) else into + 1) * width
    cells = touched * passed + routed.tokens * hidden
    row_bytes = work.operands[0].cell_bytes * cells
    cool = missed(xp, row_bytes, L2_KEEPS * kept_bytes(target), L2_EDGE)
    moving = xp.maximum(cool / (dram * p["row share"]), 1 / l2_rate)
    moving = moving + p["row clocks"] / (KIB * clocks)
    moved = s.put("rows moved", row_bytes * moving, "s", "between kernels")
    both = (compute ** p["overlap"] + memory ** p["overlap"]) ** (1 / p["overlap"])
    both = s.put("products and weights", both, "s")
    fixed = p["fixed"] * WAITS_HZ / target.clock_hz + p["expert"] * work.extents["b"]
    fixed = s.put("fixed", fixed, "s")
    latency = both - xp.maximum(compute, memory) + moved + fixed
    return Terms(compute, memory, latency, work.products / _peak(work, target))


def _l2_rate(target: Target) -> float:
    return target.l2_bytes_per_s * L2_SHARES[is_partitioned(target)]


def _peak(work: Work, target: Target) -> float:
    return target.peak(work.pipe, work.rate_dtype)


def _product(x: FormulaInputs, n: Number, k: Number, cold: Number) -> Number:
    """Seconds of a grouped product with matrices of k by n: the busiest SM's tiles, each as long as
    its arithmetic or its operands' way in; at least the time that one takes alone, a chain of waits
    for weights, of which the share `cold` comes from DRAM. The board's power and the L2 are for the
    SMs at work, however many others there are."""
    s, work, tiles, target, p = x
    xp, sms = s.xp, target.sms
    peak = s.put("peak", _peak(work, target), "flop/s")
    tm, tn = tiles.dims["m"], tiles.dims["n"]
    count = s.put("blocks", _blocks(s, work, tiles) * xp.ceil(n / tn))
    load = p["tail"] * xp.ceil(count / sms) + (1 - p["tail"]) * xp.maximum(count / sms, 1.0)
    load = s.put("rounds of the busiest SM", load, "", "the last one's idle share in part")
    at_work = s.put("SMs at work", count / load, "", "on average, of all rounds")
    rate = peak / sms
    power = xp.minimum(1.0, fed(target, True, work.dtype.bits) / (rate * at_work))
    power = s.put("share of the rate that power feeds", power, "", "cost.power")
    rate = rate * p["compute share"] * power ** p["joule share"]
    # However few SMs draw, one takes no more than where all do, on the GPUs that were measured.
    share = L2_SHARES[is_partitioned(target)] / L2_SHARES[True]
    drawn = l2_drawn(target)
    feeding = xp.minimum(target.l2_bytes_per_s / at_work, drawn) * share * p["feed share"]
    if work.kind.startswith("marlin"):
        rate = rate * MMA_SYNC[instruction(target)]
    elif instruction(target) != "wgmma":
        ratio = p[f"{instruction(target)} rate"]
        rate, feeding = rate * ratio, feeding * ratio
    elif any(e.untuned for e in measured() if e.kind == work.kind):
        rate, feeding = rate * p["untuned rate"], feeding * p["untuned rate"]
    if work.kind.endswith("converted"):
        feeding = target.clock_hz * CONVERTED_BYTES * p["feed share"]
    arithmetic = s.put("arithmetic of a tile", 2 * tm * tn * k / rate, "s")
    paired = instruction(target) == "tcgen05" and _is_paired(work.kind)
    weights = tn * work.operands[1].cell_bytes / (2 if paired else 1)
    loads = (tm * work.dtype.bits / 8 + weights) * k
    loads = s.put("loads of a tile", loads / feeding, "s")
    waits = s.put("waits", WAITS_HZ / target.clock_hz, "", "cost.grouped.WAITS_HZ")
    tile = xp.maximum(arithmetic, loads) + p["fill"] * waits
    chain = p["depth"] * waits * k * (cold + (1 - cold) * p["warm depth"])
    return xp.maximum(load * tile, chain)


def _features(s: Sheet, work: Work) -> None:
    """What the network sees."""
    log, least = s.xp.log, s.xp.maximum
    routed = work.detail_as(Routed)
    rows, active = least(routed.shares.rows, 1.0), least(routed.shares.active, 1.0)
    s.put("log rows an expert", log(rows / active))
    s.put("log experts active", log(active))
    s.put("log tokens", log(least(routed.tokens, 1.0)))
    s.put("log width", log(work.extents["n"]))
    s.put("log depth", log(work.extents["k"]))
    s.put("log filled up", log(least(routed.shares.tiles[ROWS.index(64)] * 64, 1.0) / rows))


def _blocks(s: Sheet, work: Work, tiles: Tiles) -> Number:
    """Tiles of rows, over the active experts."""
    found: Number = 0.0
    for t, count in zip(ROWS, work.detail_as(Routed).shares.tiles, strict=True):
        found = s.xp.where(tiles.dims["m"] == t, count, found)
    return found


def candidates(work: Work, target: Target) -> Tiles:
    """Tiles of rows of one expert by columns of its matrix; steps of k and warps as other products
    on the matrix units have them, which no formula here goes by."""
    table = np.array([(m, n) for m in ROWS[1:] for n in (64, 128, 256) if m * n <= 128 * 256])
    m, n = table[:, 0] * 1.0, table[:, 1] * 1.0
    one = np.ones(len(table))
    k = one * (STEP_BYTES * 8 // work.dtype.bits)
    return Tiles({"b": one, "m": m, "n": n, "k": k}, one, np.where(m * n > 128 * 128, 8.0, 4.0))


def choose(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    """The tile of least time: what implementations tune for, or have tables of."""
    return fastest(seconds, work, candidates(work, target), target, p)


FEATURES = (
    "log rows an expert",
    "log experts active",
    "log tokens",
    "log width",
    "log depth",
    "log filled up",
)
BOUND = 0.25
PLAIN = "experts cutlass f16"


def _family(experts: Implementation) -> Family:
    name, factors = f"experts {experts.kind}", _factors(experts)
    return Family(
        name, factors, candidates, seconds, choose, features=FEATURES, bound=BOUND, carries=True
    )


FAMILIES: dict[str, Family] = {family.name: family for family in map(_family, measured())}


def family_of(work: Work) -> Family:
    """The family of an implementation; of one never measured, that of CUTLASS."""
    name = f"experts {work.kind}"
    scheme = work.kind.partition(" ")[2]
    return FAMILIES.get(name) or FAMILIES.get(f"experts cutlass {scheme}") or FAMILIES[PLAIN]
