"""Kernels generated with a given tile: what this configuration takes, not the library's best.

A library's kernel for a shape is one question (`cost.tile`), a configuration of a generated one
another: a tuner ranks thousands, most of them bad, and each option of a tile has to move the time
as it does on a device. Formulas come by kind of kernel:

| module | kernels |
|---|---|
| `matrix` | products, convolutions, attention on matrix units: Triton's, CUTLASS's |
| `lanes` | nests whose threads have cells of their own: f32 products, stencils, templates |
| `rows` | maps, and reductions of rows |

Each counts what a block does, which no factor changes, and turns that into seconds with few fitted
factors. `weights/generated1.json` has their values (`python -m validation.tuned_fit`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np

from gpuir.cost import tile as library
from gpuir.cost.data import known_gpus
from gpuir.cost.family import Terms
from gpuir.cost.generated import lanes, matrix, rows
from gpuir.cost.generated.parts import BlockCounts, power_of_two
from gpuir.cost.learned import Net
from gpuir.cost.legal import Need, needs_of, product_rules, rule
from gpuir.cost.nest import BlockShare, Tiles, cut, peak_of, runs_on_tensor
from gpuir.cost.products import costed_as, is_product, names_in
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.work import Work
from gpuir.ir.notes import Bound, Cost, Tile
from gpuir.targets.load import load_target, target_names
from gpuir.targets.target import Target

BY = "generated@1"
VECTOR = 4.0  # cells of f32 in a thread's widest load (PTX ISA, ld.v4)
Kind = Literal["matrix", "lanes", "rows", "other"]
FACTORS: Mapping[Kind, tuple[Factor, ...]] = {
    "matrix": matrix.FACTORS,
    "lanes": lanes.FACTORS,
    "rows": rows.FACTORS,
}

KINDS: Mapping[type[BlockCounts], Kind] = {
    matrix.ProductBlocks: "matrix",
    lanes.Nested: "lanes",
    rows.Streams: "rows",
}

# Between what factors 80 % of measurements lie. Lanes: of configurations within twice the best of a
# public sweep 83 to 100 % do, and 79 to 100 % where the GPU was left out of the fit. Products:
# assumed, since winners come without times. Maps and rows: assumed.
SPREAD: Mapping[Kind, float] = {"lanes": 1.6, "matrix": 1.6, "rows": 2.0, "other": 2.0}


def kind_of(work: Work, tiles: Tiles, target: Target) -> Kind:
    """Which formulas describe a kernel under a tile; "other" has the library's alone."""
    if target.is_cpu:
        return "other"
    if not tiles.threads and is_product(work, target):
        return "matrix"
    if tiles.threads or work.kernel == "nest":
        return "lanes"
    if work.kernel in ("k.gemm", "k.conv", "k.attention", "k.experts"):
        return "matrix" if runs_on_tensor(work, target) or work.kernel != "k.gemm" else "lanes"
    return "rows" if work.kernel in ("k.map", "k.reduce", "k.copy") else "other"


@dataclass(frozen=True)
class Fitted:
    """What was fitted: the factors by kind of kernel and name, and a network that corrects products
    on matrix units by at most exp(±`matrix.BOUND`), or none."""

    factors: Mapping[str, Mapping[str, float]]
    net: Net | None = None


@lru_cache(maxsize=1)
def shipped() -> Fitted:
    """What was fitted to all public tables, and ships."""
    place = files("gpuir.cost").joinpath("weights", "generated1.json")
    return read(place.read_text() if place.is_file() else "{}")


def read(text: str) -> Fitted:
    """The content of a weights file; factors that it leaves out are where fits start."""
    found = json.loads(text)
    factors = {
        kind: {f.name: float(found.get(kind, {}).get(f.name, f.value)) for f in known}
        for kind, known in FACTORS.items()
    }
    net = found.get("net")
    arrays: dict[str, Any] = {k: np.array(v) for k, v in dict(net or {}).items()}
    return Fitted(factors, Net(**arrays) if arrays else None)


@lru_cache(maxsize=256)
def _of_isa(isa: str) -> Target | None:
    known = known_gpus("generated").get(isa)
    names = [known.gpu] if known else target_names()
    return next((t for t in map(load_target, names) if t.isa == isa), None)


def stands_for(target: Target) -> Target:
    """The GPU as which the network sees tiles on a target: one of its architecture that was
    measured, or the first that ships; itself where none does."""
    return _of_isa(target.isa) or target


def written(work: Work, tiles: Tiles, target: Target) -> tuple[Work, Tiles]:
    """A kernel and its tiles as the formulas have them: a nest on the matrix units is a product."""
    return (work, tiles) if tiles.threads else costed_as(work, tiles, target)


def counts(work: Work, tiles: Tiles, target: Target) -> BlockCounts | None:
    """What blocks do under tiles; None where the library's formulas are all there is."""
    work, tiles = written(work, tiles, target)
    match kind_of(work, tiles, target):
        case "matrix":
            return matrix.count(work, tiles, target)
        case "lanes":
            return lanes.count(work, laid(work, tiles, target), target)
        case "rows":
            return rows.count(work, tiles, target)
        case _:
            return None


def seconds(
    s: Sheet,
    work: Work,
    counted: BlockCounts,
    target: Target,
    given: Fitted | None = None,
    *,
    listed: Target | None = None,
) -> Terms:
    """The terms of counted blocks, without a launch, by what was fitted.

    `listed` is the target again, with numbers that say where they come from, for a sheet that
    explains.
    """
    given = given or shipped()
    rates = listed or target
    kind = KINDS[type(counted)]
    p = s.factors(f"generated {kind}", FACTORS[kind], rates, given.factors[kind])
    shown = counted if listed is None else counted.on(s)
    match shown:
        case lanes.Nested():
            return lanes.seconds(s, shown, rates, p)
        case rows.Streams():
            return rows.seconds(s, shown, rates, p)
        case matrix.ProductBlocks():
            terms = matrix.seconds(s, shown, work, rates, p)
        case _:
            raise TypeError(f"no formulas for {type(counted).__name__}")
    if given.net is None or work.kernel == "k.attention":
        return terms
    assert isinstance(counted, matrix.ProductBlocks)
    seen = matrix.features(counted, work, stands_for(target), given.factors[kind])
    return corrected(s, terms, seen, given.net)


def corrected(s: Sheet, terms: Terms, seen: Mapping[str, Number], net: Net) -> Terms:
    """The terms of a product as a network corrects them that sees these features."""
    by = np.exp(matrix.BOUND * net(list(seen.values()), ""))
    source = f"a network sees counts of a block: exp(±{matrix.BOUND})"
    by = s.put("learned correction", by, "", source, terse=True)
    return Terms(terms.compute * by, terms.memory * by, terms.latency * by, terms.roof)


def laid(work: Work, tiles: Tiles, target: Target) -> Tiles:
    """Tiles that say how threads lie: where nobody does, as compilers lay them, along the last
    dimension of the result, at least four cells each, and along the ones before."""
    if tiles.threads:
        return tiles
    sizes = {d: np.asarray(n, float) for d, n in cut(work, tiles).sizes.items()}
    all_threads = np.asarray(tiles.warps, float) * target.sm.warp
    grid = [d for d in work.grid if np.any(np.greater(work.extents[d], 1))] or work.grid[-1:]
    near = grid[-1]
    threads: dict[str, Number] = {}
    before = sizes[grid[-2]] if len(grid) > 1 else np.asarray(1.0)
    square = power_of_two(np.sqrt(all_threads * sizes[near] / before))
    most = np.maximum(sizes[near] / VECTOR, 1.0)
    along = np.where(before > 1, np.minimum(square, most), most)  # alone, as many as it takes
    threads[near] = np.minimum(along, all_threads)
    left: Number = all_threads / threads[near]
    for d in reversed(grid[:-1]):
        threads[d] = np.maximum(np.minimum(sizes[d], left), 1.0)
        left = np.maximum(left / threads[d], 1.0)
    vector = dict.fromkeys((near, *work.reduced[-1:]), VECTOR)
    return replace(tiles, threads=threads, vector=vector)


def estimate(
    work: Work,
    tiles: Tiles,
    target: Target,
    *,
    s: Sheet | None = None,
    listed: Target | None = None,
    counted: BlockCounts | None = None,
    given: Fitted | None = None,
) -> library.Estimate:
    """Seconds of `work` generated with `tiles`: the larger of compute and memory, plus latency, and
    never below the arithmetic at the listed peak. `counted` is what `counts` gave for them, where
    that is known."""
    work, tiles = written(work, tiles, target)
    counted = counted or counts(work, tiles, target)
    if counted is None:
        return library.estimate(work, tiles, listed or target, s=s)
    s = s or Sheet()
    return in_all(
        s, seconds(s, work, counted, target, given, listed=listed), work, listed or target
    )


def in_all(s: Sheet, terms: Terms, work: Work, target: Target) -> library.Estimate:
    """What terms come to, with a launch, and not below the arithmetic at the listed peak."""
    compute = s.put("compute", terms.compute, "s")
    memory = s.put("memory", terms.memory, "s")
    busy = s.xp.maximum(compute, memory)
    launch = s.put("launch", target.launch_s, "s", target.source("launch_s"))
    roof = s.xp.maximum(terms.roof, work.flops / peak_of(work, target))
    latency = s.xp.maximum(terms.latency, roof - busy) + launch
    latency = s.put("latency", latency, "s")
    return library.Estimate(compute, memory, latency, s.put("time", busy + latency, "s"))


def interval(work: Work, target: Target, time_s: Number) -> tuple[Number, Number]:
    """Seconds between which 80 % of measurements are expected."""
    spread = SPREAD[kind_of(work, Tiles({}), target)]
    return time_s / spread, time_s * spread


def needs(
    work: Work, tiles: Tiles, target: Target, counted: BlockCounts | None = None
) -> tuple[Need, ...]:
    """What tiles ask of the target, and of the kernel: registers are not among it, since a compiler
    spills what does not fit. `counted` is what `counts` gave, where that is known."""
    given = work
    work, tiles = written(work, tiles, target)
    kind = kind_of(work, tiles, target)
    if kind == "other":
        return ()
    if kind == "lanes":
        tiles = laid(work, tiles, target)
    nest = cut(work, tiles)
    rules: Iterable[Need] = ()
    if kind == "lanes":
        nested = counted or lanes.count(work, tiles, target)
        assert isinstance(nested, lanes.Nested)
        block = BlockShare(nested.threads, nested.reads.smem_bytes)
        rules = (
            rule(f"{d}: cells for threads", nest.sizes[d] % n, 0.0, "over")
            for d, n in tiles.threads.items()
        )
    else:
        threads = np.asarray(tiles.warps, float) * target.sm.warp
        if kind == "matrix":
            blocks = counted or matrix.count(work, tiles, target)
            assert isinstance(blocks, matrix.ProductBlocks)
            block = BlockShare(threads, blocks.smem_bytes)
            rules = product_rules(nest, matrix.names(work), names_in(given, work))
        else:
            block = BlockShare(threads, 4.0 * np.asarray(tiles.warps, float))
    return needs_of(nest, target, block, rules)


FACT_NAMES = {
    "dram_bytes": "dram bytes",
    "l2_bytes": "l2 bytes",
    "blocks_per_sm": "blocks an SM holds",
    "spilled": "values spilled",
    "registers": "registers wanted",
}


def cost_of(work: Work, tile: Tile, target: Target) -> Cost:
    """The cost of one generated kernel, as a signed note."""
    s = Sheet()
    e = estimate(work, Tiles.of(tile, work), target, s=s)

    def plain(n: Number) -> float:
        return float(np.ravel(n)[0])

    terms: tuple[tuple[Bound, float], ...] = (
        ("compute", plain(e.compute)),
        ("memory", plain(e.memory)),
        ("latency", plain(e.latency)),
    )
    time_s = max(terms[0][1], terms[1][1]) + terms[2][1]
    facts = (("flops", plain(work.flops)), ("operand_bytes", plain(work.operand_bytes)))
    facts += tuple(
        (fact, plain(s.values[name])) for fact, name in FACT_NAMES.items() if name in s.values
    )
    bound = max(terms, key=lambda t: t[1])[0]
    return Cost(time_s, bound, BY, terms, facts, interval=interval(work, target, time_s))
