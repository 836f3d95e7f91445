"""Mixtures of experts on one rank: rows sorted by expert, two grouped products with the activation
between them, and the rows of each token added up again.

How many rows each expert gets decides everything: an expert that gets any has its weights read, and
its rows are rounded up to whole tiles. The weights stream from DRAM while rows are few; products
take over where they are many. What runs is one of several implementations, which differ by more
than GPUs do; each is a family of its own, with the same formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from gpuir.cost.nest import Tiles, instruction
from gpuir.cost.power import sustained
from gpuir.cost.sheet import Factor, Family, Number, Sheet, Terms, fastest
from gpuir.cost.work import Operand, Work
from gpuir.ir.types import DType, bf16
from gpuir.targets.target import Target

Array = np.ndarray[Any, np.dtype[np.float64]]

ROWS = (8, 16, 32, 64, 128, 256)  # tiles of m: rows of one expert that a block takes
BLOCKS = {f"blocks of {t}": t for t in ROWS}  # the traits that count them
DRAWS = 5  # of expert popularity, as in the measurements (data README)
SCALE_BYTES = {"f4e2m1": 1 / 16, "i4": 2 / 128}  # a weight's share of its scale: nvfp4, int4 groups

# A part of a serving framework's name for its kernel → the implementation that it stands for.
STACKS: dict[str, str] = {
    "vllm_marlin_int4_moe": "vllm",  # scales and times are those of Triton's kernels
    "oaitriton": "oai",
    "vllm_mxfp4_moe": "oai",
    "marlin": "marlin",
    "deepgemm": "deepgemm",
    "cutedsl": "cutedsl",
    "flashinfer_trtllm": "trtllm",
    "min_latency": "trtllm",
    "flashinfer_cutlass": "flashinfer",
    "torch_flow": "cutlass",
    "sglang": "sglang",
    "vllm": "vllm",
}
# What has been measured of each: see `scheme_of`.
MEASURED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("cutlass", ("f16", "f8", "f8 block", "f4", "f16 converted", "f8 converted")),
    ("flashinfer", ("f16", "f8", "f8 block", "f4")),
    ("trtllm", ("f16", "f8", "f8 block", "f4", "f16 converted", "f8 converted")),
    ("sglang", ("f16", "f8 block", "f16 converted")),
    ("vllm", ("f16", "f8", "f8 block", "f16 converted")),
    ("oai", ("f16 converted",)),
    ("marlin", ("f16 converted",)),
    ("deepgemm", ("f8 block",)),
    ("cutedsl", ("f4",)),
)


def stack_of(kernel_source: str) -> str:
    """Which implementation a serving framework's name for its kernel stands for."""
    return next((stack for part, stack in STACKS.items() if part in kernel_source), "cutlass")


def scheme_of(dtype: DType, weight: DType | None, block: bool) -> str:
    """What is multiplied: 16, 8 or 4 bits, with scales by blocks along k, or weights converted."""
    converted = weight is not None and weight != dtype
    return f"f{min(dtype.bits, 16)}" + " block" * block + " converted" * converted


# ---------------------------------------------------------------------------- who gets which rows


def shares(
    tokens: Number, topk: Number, experts: Number, ranks: Number, skew: Number
) -> dict[str, Array]:
    """How the busiest rank's experts share the rows: `rows` in all, `active` experts that get any,
    the tokens `touched`, which have a row there, and `blocks` of each of `ROWS` rows.

    Without skew every expert gets as many, but for rest. With it, popularity is drawn from a power
    law of exponent `skew` between one row and four fifths of the tokens, as the measurements have
    it (ai-dynamo/aiconfigurator, collector/helper.py); an expert gets a token once at most.
    """
    columns = np.broadcast_arrays(*(np.asarray(n, float) for n in (tokens, topk, experts, ranks)))
    skews = np.broadcast_to(np.asarray(skew, float), columns[0].shape)
    found = _even(*columns)
    drawn = skews > 0
    if np.any(drawn):
        cases = np.stack([*(c[drawn] for c in columns), skews[drawn]], axis=-1)
        kinds, which = np.unique(cases, axis=0, return_inverse=True)
        values = np.array([_drawn(*(int(n) for n in case[:4]), float(case[4])) for case in kinds])
        found = np.where(drawn, 0.0, found)
        found[..., drawn] = values[which.reshape(-1)].T
    names = ("rows", "active", "touched", *BLOCKS)
    return dict(zip(names, found, strict=True))


def _even(tokens: Array, topk: Array, experts: Array, ranks: Array) -> Array:
    """Token i goes to the experts i + j stride, stride = experts / topk: whole rounds of them, and
    the rest to the first experts of each stride; fewer tokens than that spread out."""
    local, stride = experts // ranks, np.ceil(experts / topk)
    full, rest = np.divmod(tokens, stride)
    span, bands = np.minimum(local, stride), np.maximum(1.0, local / stride)
    few = np.ceil(rest * span / stride)
    more = np.where(full > 0, np.minimum(span, rest), few) * bands
    fewer = local - more
    blocks = [more * np.ceil((full + 1) / t) + fewer * np.ceil(full / t) for t in ROWS]
    rows = more * (full + 1) + fewer * full
    touched = np.minimum(rows, tokens)
    return np.stack([rows, np.where(full > 0, local, more), touched, *blocks])


@lru_cache(maxsize=65536)
def _drawn(tokens: int, topk: int, experts: int, ranks: int, skew: float) -> tuple[float, ...]:
    """Means over draws of popularity from a power law, by its inverse distribution."""
    total, local = tokens * topk, experts // ranks
    low, high = (1.0, max(0.8 * tokens, 1.0 + 1e-9)) if total > experts else (0.01, 2.0)
    power = (1 - skew) or 1e-6
    u: Array = np.random.default_rng(0).random((DRAWS, ranks, local))
    weight = ((high**power - low**power) * u + low**power) ** (1 / power)
    return _summary(_levelled(weight, total, tokens), tokens)


def _levelled(weight: Array, total: int, tokens: int) -> Array:
    """Whole rows of [draws, ranks, experts] by weight, none above `tokens`, `total` in all."""
    drawn = np.rint(weight / weight.sum(axis=(1, 2), keepdims=True) * total)
    rows: Array = np.clip(drawn, 0, tokens)
    for _ in range(8):
        rows = np.clip(rows + _rest(rows, total), 0, tokens)
    return rows


def _rest(rows: Array, total: int) -> Array:
    """What rounding left over: to the least loaded of each rank, or from the most."""
    ranks, local = int(rows.shape[1]), int(rows.shape[2])
    over: Array = total - np.sum(rows, axis=(1, 2))[:, None]
    whole, left = np.divmod(np.abs(over), float(ranks))
    each: Array = whole + np.heaviside(left - np.arange(ranks), 0.0)
    each = each.reshape(-1, ranks, 1)
    place = np.argsort(np.argsort(rows, axis=2, kind="stable"), axis=2, kind="stable")
    more: Array = np.where(place < each, 1.0, 0.0) + np.floor(each / local)
    less: Array = np.where(local - 1 - place < each, -1.0, 0.0)
    return np.where(np.expand_dims(over, -1) > 0, more, less)


def _summary(rows: Array, tokens: int) -> tuple[float, ...]:
    """What `shares` gives, of the busiest rank, as means over draws."""
    busiest: Array = rows[np.arange(len(rows)), np.argmax(np.sum(rows, axis=2), axis=1)]
    count = float(len(rows))
    missed: Array = np.prod(1 - busiest / tokens, axis=1)
    return (
        float(np.sum(busiest)) / count,
        float(np.sum(busiest > 0)) / count,
        tokens * (1 - float(np.mean(missed))),
        *(float(np.sum(np.ceil(busiest / t))) / count for t in ROWS),
    )


def _with_strays(
    share: Mapping[str, Number], sent: Number, topk: Number, ranks: Number
) -> tuple[Number, dict[str, Number]]:
    held: Array = sent + (ranks > 1) * (share["touched"] * topk - sent)
    more: Array = held - share["rows"]
    blocks = {name: share[name] + np.ceil(more / t) for name, t in BLOCKS.items()}
    active: Array = share["active"] + (more > 0)
    return held, {**share, "rows": held, "active": active, **blocks}


def experts(
    tokens: Number,
    hidden: Number,
    inter: Number,
    topk: Number,
    experts: Number,
    dtype: DType,
    *,
    weight: DType | None = None,
    gated: bool = True,
    shards: Number = 1,
    ranks: Number = 1,
    skew: Number = 0.0,
    stack: str = "cutlass",
    block: bool = False,
    strays: bool = False,
) -> Work:
    """A mixture of experts on one rank, from the router's choice to its sum: `tokens` of `hidden`
    cells, each to `topk` of `experts`, which are `inter` wide and lie on `ranks` ranks; each expert
    is cut in `shards`, and `gated` by a second matrix.

    `weight` is the dtype the weights are stored in, where that is not what is multiplied; `block`
    says that scales belong to blocks along k. `skew`: see `shares`. With `strays`, the rank is
    given the tokens it has an expert for alone, and computes their rows for other ranks' experts
    too, as one more expert's: so SGLang up to 0.5.10 was measured, on GPUs before Blackwell.
    """
    width, local = inter / shards, experts // ranks
    share: dict[str, Number] = {**shares(tokens, topk, experts, ranks, skew)}
    stored = weight or dtype
    cell = stored.bits / 8 + SCALE_BYTES.get(stored.name, 0.0)
    into = 2.0 if gated else 1.0
    sent: Number = tokens * topk * 1.0
    if strays:
        sent, share = _with_strays(share, sent, topk, ranks)
    weights = share["active"] * (into + 1) * width * hidden * cell
    moved = tokens * hidden * (bf16.bits / 8)
    products = 2 * share["rows"] * (into + 1) * width * hidden
    return Work(
        kernel="k.moe",
        dims=(("b", local), ("m", sent / experts), ("n", width), ("k", hidden)),
        reduced=("k",),
        operands=(
            Operand(("m", "k"), bf16.bits / 8, moved, "staged"),
            Operand(("b", "n", "k"), cell, weights, "staged"),
            Operand(("m", "k"), bf16.bits / 8, moved, "written"),
        ),
        flops=products,
        products=products,
        lane_ops=0.0 * products,
        dtype=dtype,
        pipe="tensor",
        kind=f"{stack} {scheme_of(dtype, weight, block)}",
        traits=(("tokens", tokens), ("sent", sent), ("into", into), *share.items()),
    )


# ---------------------------------------------------------------------------- how long it takes


def _factors() -> tuple[Factor, ...]:
    def f(name: str, value: float, low: float, high: float, spread: float, what: str) -> Factor:
        return Factor(name, value, low, high, spread, f"{what}; fitted on the kernel table moe")

    return (
        f("compute share", 0.85, 0.02, 1.2, 0.1, "of the listed rate that a full tile reaches"),
        f("mma rate", 0.85, 0.2, 5.0, 0.0, "of compute and feed on GPUs with mma, to wgmma's"),
        f("tcgen05 rate", 0.85, 0.2, 5.0, 0.0, "of compute and feed on sm_100, to wgmma's"),
        f("untuned rate", 0.25, 0.05, 1.0, 0.0, "the same, of kernels with a default tactic"),
        f("joule share", 0.5, 0.0, 1.0, 0.0, "exponent of the share of peak that the board feeds"),
        f("feed share", 0.7, 0.02, 3.0, 0.1, "of the L2 bandwidth, into the tiles"),
        f("dram share", 0.9, 0.05, 1.0, 0.05, "of the listed bandwidth, on weights"),
        f("weight clocks", 12.0, 0.0, 150.0, 0.1, "of an SM, to take in a KiB of weights"),
        f("row share", 0.8, 0.1, 2.0, 0.1, "of the listed bandwidth, where rows are moved"),
        f("row clocks", 60.0, 0.0, 300.0, 0.1, "of an SM, to move a KiB there"),
        f("tail", 0.7, 0.0, 1.0, 0.0, "of an unfilled wave that is lost"),
        f("overlap", 1.6, 1.0, 6.0, 0.0, "norm of compute and memory: 1 adds them"),
        f("fixed", 2e-5, 1e-6, 8e-5, 0.1, "seconds of launches, sorting and filling pipelines"),
        f("expert", 3e-8, 0.0, 4e-7, 0.0, "seconds for each expert of the rank"),
        f("fill", 1.5e-6, 0.0, 6e-6, 0.1, "seconds to start and finish one more tile"),
        f("depth", 2e-9, 0.0, 2e-8, 0.1, "seconds a block takes for each cell of k"),
    )


FACTORS = _factors()
KIB = 1024.0

# Measured with the tactic that FlashInfer takes where it has not been tuned, on Hopper alone.
UNTUNED = ("flashinfer f16", "flashinfer f8")


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    """The terms of a mixture of experts under tiles of rows of one expert.

    Both products stream the weights of the active experts from DRAM beside their arithmetic; rows
    are moved between the kernels, by those implementations that run a token's row for each of its
    experts, elsewhere too, for all that the router sent.
    """
    xp = s.xp
    width, hidden = work.extents["n"], work.extents["k"]
    into, rows, active = work.trait("into"), work.trait("rows"), work.trait("active")
    _features(s, work)
    clocks = target.sms * target.clock_hz
    streaming = 1 / (target.dram_bytes_per_s * p["dram share"])
    streaming = streaming + p["weight clocks"] / (KIB * clocks)
    streaming = s.put("time of a byte of weights", streaming, "s", "through DRAM and into SMs")
    cell = work.operands[1].cell_bytes
    compute: Number = 0.0
    memory: Number = 0.0
    for name, n, k in (("in", width * into, hidden), ("out", hidden, width)):
        product = _product(s, work, tiles, target, p, n, k)
        compute = compute + s.put(f"products {name}", product, "s")
        memory = memory + s.put(f"weights {name}", active * n * k * cell * streaming, "s")
    touched = work.trait("sent") if work.kind.startswith(("sglang", "vllm")) else rows
    cells = touched * (2 * hidden + 2 * (into + 1) * width) + work.trait("tokens") * hidden
    moving = 1 / (target.dram_bytes_per_s * p["row share"]) + p["row clocks"] / (KIB * clocks)
    moved = s.put("rows moved", bf16.bits / 8 * cells * moving, "s", "in 16 bits, between kernels")
    both = (compute ** p["overlap"] + memory ** p["overlap"]) ** (1 / p["overlap"])
    both = s.put("products and weights", both, "s")
    fixed = s.put("fixed", p["fixed"] + p["expert"] * work.extents["b"], "s")
    latency = both - xp.maximum(compute, memory) + moved + fixed
    return Terms(compute, memory, latency, work.products / target.peak("tensor", work.dtype))


def _product(
    s: Sheet,
    work: Work,
    tiles: Tiles,
    target: Target,
    p: Mapping[str, Number],
    n: Number,
    k: Number,
) -> Number:
    """Seconds of a grouped product with matrices of k by n: the busiest SM's tiles, each as long as
    its arithmetic or its operands' way in; at least the time that one takes alone."""
    xp, sms = s.xp, target.sms
    peak = s.put("peak", target.peak("tensor", work.dtype), "flop/s")
    rate = peak * p["compute share"]
    rate = rate * sustained(target, peak, True, work.dtype.bits) ** p["joule share"]
    feeding = target.l2_bytes_per_s * p["feed share"]
    if instruction(target) != "wgmma":
        ratio = p[f"{instruction(target)} rate"]
        rate, feeding = rate * ratio, feeding * ratio
    elif work.kind in UNTUNED:
        rate, feeding = rate * p["untuned rate"], feeding * p["untuned rate"]
    tm, tn = tiles.dims["m"], tiles.dims["n"]
    count = s.put("blocks", _blocks(s, work, tiles) * xp.ceil(n / tn))
    load = p["tail"] * xp.ceil(count / sms) + (1 - p["tail"]) * xp.maximum(count / sms, 1.0)
    arithmetic = s.put("arithmetic of a tile", 2 * tm * tn * k / (rate / sms), "s")
    loads = (tm * work.dtype.bits / 8 + tn * work.operands[1].cell_bytes) * k
    loads = s.put("loads of a tile", loads / (feeding / sms), "s")
    tile = xp.maximum(arithmetic, loads) + p["fill"]
    return xp.maximum(load * tile, p["depth"] * k)


def _features(s: Sheet, work: Work) -> None:
    """What the network sees."""
    log, least = s.xp.log, s.xp.maximum
    rows, active = least(work.trait("rows"), 1.0), least(work.trait("active"), 1.0)
    s.put("log rows an expert", log(rows / active))
    s.put("log experts active", log(active))
    s.put("log tokens", log(least(work.trait("tokens"), 1.0)))
    s.put("log width", log(work.extents["n"]))
    s.put("log depth", log(work.extents["k"]))
    s.put("log filled up", log(least(work.trait("blocks of 64") * 64, 1.0) / rows))


def _blocks(s: Sheet, work: Work, tiles: Tiles) -> Number:
    """Tiles of rows, over the active experts."""
    found: Number = 0.0
    for name, t in BLOCKS.items():
        found = s.xp.where(tiles.dims["m"] == t, work.trait(name), found)
    return found


def candidates(work: Work, target: Target) -> Tiles:
    """Tiles of rows of one expert by columns of its matrix."""
    table = np.array([(m, n) for m in ROWS[1:] for n in (64, 128, 256) if m * n <= 128 * 256])
    return Tiles({"m": table[:, 0] * 1.0, "n": table[:, 1] * 1.0})


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

FAMILIES: dict[str, Family] = {
    name: Family(name, FACTORS, candidates, seconds, choose, FEATURES, BOUND, carries=True)
    for name in (f"experts {stack} {scheme}" for stack, schemes in MEASURED for scheme in schemes)
}


def family_of(work: Work) -> Family:
    """The family of an implementation; of one never measured, that of CUTLASS."""
    name = f"experts {work.kind}"
    scheme = work.kind.partition(" ")[2]
    return FAMILIES.get(name) or FAMILIES.get(f"experts cutlass {scheme}") or FAMILIES[PLAIN]
