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
from math import prod
from typing import Any

import numpy as np

from gpuir.cost.nest import Tiles, has_clusters
from gpuir.cost.power import sustained
from gpuir.cost.sheet import Factor, Family, Number, Sheet, Terms
from gpuir.cost.work import Operand, Work
from gpuir.ir.types import DType, bf16
from gpuir.targets.target import Target

Array = np.ndarray[Any, np.dtype[np.float64]]

ROWS = (8, 16, 32, 64, 128, 256)  # tiles of m: rows of one expert that a block takes
DRAWS = 5  # of expert popularity, as in the measurements (data README)
SCALE_BYTES = {"f4e2m1": 1 / 16, "i4": 2 / 128}  # a weight's share of its scale: nvfp4, int4 groups
STACKS = ("cutlass", "triton", "trtllm", "deepgemm", "marlin")


def stack_of(kernel_source: str) -> str:
    """Which implementation a serving framework's name for its kernel stands for."""
    for stack, parts in NAMES.items():
        if any(part in kernel_source for part in parts):
            return stack
    return "triton"


NAMES: dict[str, tuple[str, ...]] = {
    "marlin": ("marlin",),
    "deepgemm": ("deepgemm", "cutedsl"),
    "trtllm": ("flashinfer_trtllm", "min_latency"),
    "cutlass": ("torch_flow", "flashinfer_cutlass"),
}


# ---------------------------------------------------------------------------- who gets which rows


def shares(
    tokens: Number, topk: Number, experts: Number, ranks: Number, skew: Number
) -> dict[str, Array]:
    """How the busiest rank's experts share the rows: `rows` in all, `active` experts that get any,
    the `hottest` expert's, and `blocks` of each of `ROWS` rows.

    Without skew every expert gets as many, but for rest. With it, popularity is drawn from a power
    law of exponent `skew` between one row and four fifths of the tokens, as the measurements have it
    (ai-dynamo/aiconfigurator, collector/helper.py); an expert gets a token once at most.
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
    names = ("rows", "active", "hottest", *(f"blocks of {t}" for t in ROWS))
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
    return np.stack(
        [rows, np.where(full > 0, local, more), np.where(more > 0, full + 1, full), *blocks]
    )


@lru_cache(maxsize=65536)
def _drawn(tokens: int, topk: int, experts: int, ranks: int, skew: float) -> tuple[float, ...]:
    """Means over draws of popularity from a power law, by its inverse distribution."""
    total, local = tokens * topk, experts // ranks
    low, high = (1.0, max(0.8 * tokens, 1.0 + 1e-9)) if total > experts else (0.01, 2.0)
    power = 1 - skew
    u = np.random.default_rng(0).random((DRAWS, experts))
    weight = ((high**power - low**power) * u + low**power) ** (1 / power)
    rows = np.rint(weight / weight.sum(axis=1, keepdims=True) * total)
    rows = np.minimum(rows, tokens).reshape(DRAWS, ranks, local)
    for _ in range(8):  # what rounding left over: to the least loaded, or from the most
        over = total - rows.sum(axis=(1, 2))
        if not over.any():
            break
        each = np.floor(np.abs(over)[:, None] / ranks)
        each = each + (np.arange(ranks) < np.abs(over)[:, None] - each * ranks)
        place = rows.argsort(axis=2, kind="stable").argsort(axis=2, kind="stable")
        more = (place < each[..., None]) + np.floor(each / local)[..., None]
        less = local - 1 - place < each[..., None]
        changed = np.where((over > 0)[:, None, None], rows + more, rows - less)
        rows = np.clip(changed, 0, tokens)
    busiest = rows[np.arange(DRAWS), rows.sum(axis=2).argmax(axis=1)]
    blocks = (np.ceil(busiest / t).sum(axis=1).mean() for t in ROWS)
    active = (busiest > 0).sum(axis=1).mean()
    return (busiest.sum(axis=1).mean(), active, busiest.max(axis=1).mean(), *blocks)


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
) -> Work:
    """A mixture of experts on one rank, from the router's choice to its sum: `tokens` of `hidden`
    cells, each to `topk` of `experts`, which are `inter` wide and lie on `ranks` ranks; each expert
    is cut in `shards`, and `gated` by a second matrix.

    `weight` is the dtype the weights are stored in, where that is not what is multiplied; `block`
    says that scales belong to blocks along k. `skew`: see `shares`.
    """
    width, local = inter / shards, experts // ranks
    share = shares(tokens, topk, experts, ranks, skew)
    stored = weight or dtype
    cell = stored.bits / 8 + SCALE_BYTES.get(stored.name, 0.0)
    into = 2.0 if gated else 1.0
    sent = tokens * topk * 1.0
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
        kind=" ".join([stack, *["block"] * block, *["converted"] * (weight is not None)]),
        traits=(("tokens", tokens), ("sent", sent), ("into", into), *share.items()),
    )


# ---------------------------------------------------------------------------- how long it takes

FACTORS = (
    Factor("compute share", 0.85, 0.02, 1.2, 0.1, "of the listed rate that a full tile reaches"),
    Factor("block compute", 0.8, 0.1, 1.0, 0.0, "of that, with scales by blocks along k"),
    Factor("converted compute", 0.8, 0.05, 1.0, 0.0, "of that, with weights converted on the way"),
    Factor("joule share", 0.5, 0.0, 1.5, 0.0, "exponent of the share of peak that the board feeds"),
    Factor("feed share", 0.7, 0.02, 3.0, 0.1, "of the L2 bandwidth, into the tiles"),
    Factor("dram share", 0.9, 0.05, 1.0, 0.05, "of the listed bandwidth, on weights"),
    Factor("row share", 0.7, 0.05, 3.0, 0.1, "of the listed bandwidth, where rows are moved"),
    Factor("tail", 0.7, 0.0, 1.0, 0.0, "of an unfilled wave that is lost"),
    Factor("overlap", 2.0, 1.0, 8.0, 0.0, "norm of compute and memory: 1 adds them, many hide one"),
    Factor("fixed", 15e-6, 1e-6, 200e-6, 0.1, "seconds of launches, sorting and filling pipelines"),
    Factor("expert", 20e-9, 1e-10, 1e-6, 0.0, "seconds for each expert of the rank"),
    Factor("fill", 1e-6, 1e-8, 1e-5, 0.1, "seconds to start and finish one more tile"),
    Factor("depth", 2e-9, 1e-11, 1e-7, 0.1, "seconds a block takes for each cell of k"),
)


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    xp = s.xp
    width, hidden = work.extents["n"], work.extents["k"]
    into, rows, active = work.trait("into"), work.trait("rows"), work.trait("active")
    act, cell = work.dtype.bits / 8, work.operands[1].cell_bytes
    peak = s.put("peak", target.peak("tensor", work.dtype), "flop/s")
    rate = peak * p["compute share"]
    rate = rate * sustained(target, peak, True, work.dtype.bits).share ** p["joule share"]
    if "block" in work.kind:
        rate = rate * p["block compute"]
    if "converted" in work.kind:
        rate = rate * p["converted compute"]
    blocks = s.put("row blocks", _blocks(s, work, tiles), "", "tiles of rows, over the experts")
    compute: Number = 0.0
    memory: Number = 0.0
    for n, k in ((width * into, hidden), (hidden, width)):
        count = blocks * xp.ceil(n / tiles.dims["n"])
        load = p["tail"] * xp.ceil(count / target.sms) + (1 - p["tail"]) * xp.maximum(
            count / target.sms, 1.0
        )
        product = 2 * tiles.dims["m"] * tiles.dims["n"] * k / (rate / target.sms)
        feed = (tiles.dims["m"] * act + tiles.dims["n"] * cell) * k
        feed = feed / (target.l2_bytes_per_s * p["feed share"] / target.sms)
        compute = compute + xp.maximum(load * (xp.maximum(product, feed) + p["fill"]), p["depth"] * k)
        memory = memory + active * n * k * cell / (target.dram_bytes_per_s * p["dram share"])
    touched = work.trait("sent") if work.kind.startswith("triton") else rows
    cells = touched * (2 * hidden + (into + 1) * width) + work.trait("tokens") * hidden
    moved = 2 * cells / (target.dram_bytes_per_s * p["row share"])
    both = (compute ** p["overlap"] + memory ** p["overlap"]) ** (1 / p["overlap"])
    fixed = p["fixed"] + p["expert"] * work.extents["b"]
    latency = both - xp.maximum(compute, memory) + moved + fixed
    return Terms(compute, memory, latency, work.products / peak)


def _blocks(s: Sheet, work: Work, tiles: Tiles) -> Number:
    found = work.trait(f"blocks of {ROWS[-1]}")
    for t in ROWS[:-1]:
        found = s.xp.where(tiles.dims["m"] == t, work.trait(f"blocks of {t}"), found)
    return found


def candidates(work: Work, target: Target) -> Tiles:
    """Tiles of rows of one expert by columns of its matrix."""
    table = np.array([(m, n) for m in ROWS[1:] for n in (64, 128, 256) if m * n <= 128 * 256])
    return Tiles({"m": table[:, 0] * 1.0, "n": table[:, 1] * 1.0})
