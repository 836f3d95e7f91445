"""Measured collectives: their tables, and the fit of the formulas and of what is added to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gpuir.cost.collective import (
    FACTORS,
    NOT_IN_SWITCH,
    Library,
    RankGroup,
    chosen,
    curve_of,
    flat_group,
    floor,
    ways,
)
from gpuir.cost.gaussian import Process
from gpuir.cost.kriging import BANDS, NOISE, WAITS, Curve, Ends, Field, Knots, covariance
from gpuir.cost.sheet import Sheet
from gpuir.fit.columns import MOST_COUNT, Floats, Ints, TableFile
from gpuir.ir.errors import TargetError, UsageError
from gpuir.targets.cluster import Cluster, load_cluster
from gpuir.targets.load import load_target

COLUMNS = ("system", "library", "mode", "op", "dtype", "world_size", "bytes", "latency_us")
BESIDE = ("library_version", "source", "gpus_per_node", "rep_spread")
OPS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "send_recv": "send",
    "sendrecv": "send",
}
BITS = {
    **dict.fromkeys(("int8", "uint8", "fp8"), 8),
    **dict.fromkeys(("fp16", "float16", "f16", "half", "bf16", "bfloat16"), 16),
    **dict.fromkeys(("fp32", "float32", "f32", "float"), 32),
    **dict.fromkeys(("fp64", "float64", "f64", "double"), 64),
}
MOST_RANKS = 1 << 20
LIBRARIES = ("nccl", "vllm", "sglang", "trtllm")
# What tables call a node, where it is not a GPU's name: a shipped cluster, or a rule.
SYSTEMS = {
    "a100_sxm": "dgx-a100",
    "h100_sxm": "dgx-h100",
    "h200_sxm": "dgx-h200",
    "b200_sxm": "dgx-b200",
    "b300_sxm": "8xb300-sxm-288gb",
    "gb200": "gb200-nvl72",
    "gb300": "gb200-nvl72",
    "a100_pcie": "8xa100-pcie-80gb",
    "h100_pcie": "8xh100-pcie-80gb",
    "a30": "8xa30",
    "l4": "l4-pcie",
    "l40s": "l40s-pcie",
    "rtx_pro_6000_server": "rtx-pro-6000-pcie",
    "pipeweave_a100": "dgx-a100",
    "pipeweave_h20": "h20-node",
    "pipeweave_rtx6000ada": "rtx6000-ada-pcie",
    "pipeweave_h800": "8xh100-sxm",
    "vidur_a100_dgx": "dgx-a100",
    "vidur_h100_dgx": "dgx-h100",
    "vidur_a100_pcie_pair_nvlink": "a100-pcie-pairs",
    "vidur_a100_pair_nvlink": "a100-pcie-pairs",
    "vidur_h100_pair_nvlink": "h100-nvl-pairs",
    "vidur_h100_nvl_pair": "h100-nvl-pairs",
    "vidur_a40_pair_nvlink": "a40-pairs",
}

# What tables call a node of these is a tray of four GPUs; NVLink joins all trays of a rack.
RACKS = ("gb200", "gb300")


@dataclass(frozen=True)
class CollectiveSeries:
    """The rows of a table that differ in size alone. `nbytes`, `time_s` and `spread` (max / min - 1
    of repeats) are columns; `order` counts the rows of the file."""

    file: str
    system: str
    version: str
    op: str
    dtype: str
    near: int
    group: RankGroup
    curve: Curve
    target: str
    nbytes: Floats
    time_s: Floats
    spread: Floats

    def at(self, rows: Any) -> CollectiveSeries:
        return replace(
            self, nbytes=self.nbytes[rows], time_s=self.time_s[rows], spread=self.spread[rows]
        )


@dataclass(frozen=True)
class CollectiveTable:
    file: str
    count: int
    series: tuple[CollectiveSeries, ...]
    skipped: Mapping[str, int]


def cluster_of(system: str, ranks: int, near: int) -> Cluster:
    """The cluster that a table's name for a system means, of as many nodes. TargetError if none."""
    name = SYSTEMS.get(system)
    if name is None:
        plain = system.removeprefix("pipeweave_").removeprefix("vidur_")
        for ending in ("_dgx", "_pair_nvlink", "_server", "_hgx"):
            plain = plain.removesuffix(ending)
        name = f"8x{load_target(plain.replace('_', '-')).name}"
    cluster = load_cluster(name)
    nodes = -(-ranks // near)
    return cluster.with_nodes(nodes) if nodes > 1 else cluster


def read(path: str | Path) -> CollectiveTable:
    """The rows of a table of collectives, and why some are left out. UsageError where columns are
    missing."""
    file = TableFile(Path(path))
    missing = [name for name in COLUMNS if name not in file.names]
    if missing:
        raise UsageError(
            "the file is not a table of collectives",
            where=str(path),
            expected=f"the columns {', '.join(COLUMNS)}",
            found=f"no {', '.join(missing)}",
        )
    c = file.read((*COLUMNS, *BESIDE))
    words = [c.words(n) for n in ("system", "library", "mode", "op", "dtype")]
    version, source = c.words("library_version"), c.words("source")
    numbers = {n: c.numbers(n) for n in ("world_size", "bytes", "latency_us")}
    near = c.numbers("gpus_per_node")
    near = np.where(np.isnan(near), numbers["world_size"], near)
    spread = np.nan_to_num(c.numbers("rep_spread"))
    good = (numbers["latency_us"] > 0) & (numbers["bytes"] >= 1)
    good &= np.isfinite(numbers["latency_us"]) & (numbers["bytes"] <= MOST_COUNT)
    for ranks, least in ((numbers["world_size"], 2), (near, 1)):
        good &= (ranks >= least) & (ranks <= MOST_RANKS) & (ranks == np.floor(ranks))
    skipped: dict[str, int] = {}
    if not good.all():
        skipped["no time, no size, or no number of ranks"] = int((~good).sum())
    world, near = (np.where(good, ranks, 0) for ranks in (numbers["world_size"], near))
    codes = np.stack([*(w.codes for w in words), version.codes, source.codes, world, near], axis=1)
    kinds, which = np.unique(codes.astype(np.int64), axis=0, return_inverse=True)
    series: list[CollectiveSeries] = []
    for i, key in enumerate(kinds.tolist()):
        rows = np.flatnonzero((which.reshape(-1) == i) & good)
        if not len(rows):
            continue
        named: list[str] = [w.names[k] for w, k in zip((*words, version), key[:6], strict=True)]
        said = dict(zip(NAMED, named, strict=True))
        rows = rows[np.argsort(numbers["bytes"][rows], kind="stable")]
        measured = {
            "file": c.file,
            "nbytes": numbers["bytes"][rows],
            "time_s": numbers["latency_us"][rows] * 1e-6,
            "spread": spread[rows],
        }
        try:
            series.append(_series(said, int(key[7]), int(key[8]), measured))
        except (TargetError, UsageError) as error:
            skipped[error.what] = skipped.get(error.what, 0) + len(rows)
    return CollectiveTable(c.file, c.count, tuple(series), skipped)


NAMED = ("system", "library", "mode", "op", "dtype", "version")  # what the words of a row say


def _series(
    said: Mapping[Any, str], ranks: int, near: int, measured: Mapping[str, Any]
) -> CollectiveSeries:
    system, library, op, dtype = (said[name] for name in ("system", "library", "op", "dtype"))
    if library not in LIBRARIES:
        raise UsageError(f"the library {library} is not modelled")
    if op not in OPS:
        raise UsageError(f"the collective {op} is not modelled")
    if dtype not in BITS:
        raise UsageError(f"a collective of {dtype or 'a dtype that is not stated'} is not modelled")
    near = ranks if system in RACKS else min(near, ranks)
    cluster = cluster_of(system, ranks, near)
    kind, bits = OPS[op], BITS[dtype]
    if near > cluster.node_gpus:
        raise UsageError(f"{system}: {near} GPUs in a node that has {cluster.node_gpus}")
    group = flat_group(kind, ranks, near, cluster)
    if bits <= NOT_IN_SWITCH:
        group = replace(group, reduces=0.0)
    version = said["version"]
    known = "" if version == "unknown" else version
    run = f"{system} {version}".strip()
    curve = curve_of(group, kind, bits, cluster, Library(library, said["mode"], known, run))
    return CollectiveSeries(
        system=system,
        version=version,
        op=op,
        dtype=dtype,
        near=near,
        group=group,
        curve=curve,
        target=cluster.name,
        **measured,
    )


# ---- predicting many --------------------------------------------------------------------------


@dataclass(frozen=True)
class SeriesBatch:
    """Rows, by number, that one set of formulas holds for, as columns."""

    rows: Any
    group: RankGroup
    nbytes: Floats
    library: Library


def batches(series: Sequence[CollectiveSeries]) -> list[SeriesBatch]:
    """The rows of series, one after another, by library and mode."""
    first = np.cumsum([0, *(len(s.nbytes) for s in series)])
    order: dict[Library, list[int]] = {}
    for i, s in enumerate(series):
        order.setdefault(Library(s.curve.library, s.curve.mode), []).append(i)
    found: list[SeriesBatch] = []
    for library, these in order.items():
        some = [series[i] for i in these]
        lengths = [len(s.nbytes) for s in some]
        columns = {
            name: np.repeat([getattr(s.group, name) for s in some], lengths)
            for name in RankGroup.__dataclass_fields__
        }
        parts: list[Ints] = [np.arange(first[i], first[i + 1]) for i in these]
        nbytes = np.concatenate([s.nbytes for s in some])
        found.append(SeriesBatch(np.concatenate(parts), RankGroup(**columns), nbytes, library))
    return found


def seconds(some: Sequence[SeriesBatch], factors: Mapping[str, Any]) -> Floats:
    """Seconds of each row by the formulas alone; [k, rows] where factors are columns of k."""
    k = np.shape(next(iter(factors.values())))[:1]
    found = np.zeros((*k, sum(len(b.rows) for b in some)))
    for b in some:
        total, _ = chosen(ways(Sheet(), b.group, b.nbytes, factors, b.library))
        found[..., b.rows] = np.maximum(total, floor(b.group, factors, b.library))
    return found


def formula(series: Sequence[CollectiveSeries], factors: Mapping[str, float]) -> list[Floats]:
    """Seconds by the formulas alone, for each series."""
    return _apart(seconds(batches(series), factors), series)


def _joined(parts: Iterable[Floats]) -> Floats:
    """Columns one after another, be there none."""
    return np.concatenate([np.zeros(0), *parts])


def _lengths(series: Sequence[CollectiveSeries]) -> Ints:
    return np.array([len(s.nbytes) for s in series], np.int64)


def _apart(column: Floats, series: Sequence[CollectiveSeries]) -> list[Floats]:
    """The part of a column that is each series'."""
    return np.split(column, np.cumsum(_lengths(series)))[: len(series)]


def predicted(series: Sequence[CollectiveSeries], field: Field) -> list[Floats]:
    """Seconds, for each series."""
    plain = formula(series, field.factors)
    which = np.repeat(np.arange(len(series)), _lengths(series))
    x = np.log2(_joined(s.nbytes for s in series))
    parts = _apart(np.exp(field.many([s.curve for s in series], which, x)), series)
    return [p * c for p, c in zip(plain, parts, strict=True)]


# ---- fitting ----------------------------------------------------------------------------------

STEP = 0.5  # doublings: of many sizes close together the median is taken
LOOSE = 4.5  # a logarithm that strays so far from its start costs what a curve off by 1 does
MOST_STEPS = 20  # of the fit of factors
FAR = 0.3  # beyond this difference of logarithms a point pulls less, and ever less


def thinned(series: Sequence[CollectiveSeries]) -> list[CollectiveSeries]:
    """At most a point a bin: the size in the middle, its time moved by the median of time over
    bytes there, its spread the larger of repeats' and of the bin's."""
    return _merged([_thin(s) for s in series if len(s.nbytes) and not is_mislabelled(s)])


def is_mislabelled(s: CollectiveSeries) -> bool:
    """Whether rows are of other links than their system's, as the tables' README says: 343 GB/s
    between two A100, whose bridge has 300. They are scored, and nothing is fitted to them."""
    return (s.system, s.curve.op, s.curve.nodes) == ("vidur_a100_pcie_pair_nvlink", "send", 1)


def _merged(points: Sequence[CollectiveSeries]) -> list[CollectiveSeries]:
    """Of equal curves (of several dtypes) one, the median of each size."""
    groups: dict[Curve, list[CollectiveSeries]] = {}
    for s in points:
        groups.setdefault(s.curve, []).append(s)
    found: list[CollectiveSeries] = []
    for some in groups.values():
        if len(some) > 1:
            nbytes = np.concatenate([s.nbytes for s in some])
            log_s = np.log(np.concatenate([s.time_s for s in some]))
            spread = np.concatenate([s.spread for s in some])
            sizes = np.unique(nbytes)
            middle = [float(np.median(log_s[nbytes == b])) for b in sizes]
            wide = [float(np.median(spread[nbytes == b])) for b in sizes]
            one = replace(some[0], nbytes=sizes, time_s=np.exp(middle), spread=np.array(wide))
            found.append(one)
        else:
            found += some
    return found


def _thin(s: CollectiveSeries) -> CollectiveSeries:
    bins = np.round(np.log2(s.nbytes) / STEP)
    if len(np.unique(bins)) == len(bins):
        return s
    points: list[tuple[float, float, float]] = []
    plain = formula([s], FACTORS)[0]
    for b in np.unique(bins):
        rows = np.flatnonzero(bins == b)
        off = np.log(s.time_s[rows] / plain[rows])
        middle = rows[len(rows) // 2]
        wide = float(np.median(np.abs(off - np.median(off)))) * 1.5
        time = float(plain[middle] * np.exp(np.median(off)))
        points.append((float(s.nbytes[middle]), time, wide))
    nbytes, time, spread = map(np.array, zip(*points, strict=True))
    return replace(s, nbytes=nbytes, time_s=time, spread=spread)


def fit(series: Sequence[CollectiveSeries]) -> Field:
    """The factors, then what is added to them; without intervals."""
    points = thinned(series)
    return added(points, fit_factors(points), process_of(points))


def fit_factors(points: Sequence[CollectiveSeries]) -> Mapping[str, float]:
    """Least squares of logarithms with Cauchy's weights, by Levenberg and Marquardt's method; each
    system, library and collective weighs the same. Groups of several nodes do not take part."""
    near = [s for s in points if s.curve.nodes == 1]
    y = _joined(np.log(s.time_s) for s in near)
    kinds = [(s.curve.gpu, s.curve.library, s.curve.mode, s.curve.op) for s in near]
    count: dict[Any, int] = {}
    for s, k in zip(near, kinds, strict=True):
        count[k] = count.get(k, 0) + len(s.nbytes)
    w = _joined(np.full(len(s.nbytes), count[k] ** -0.5) for s, k in zip(near, kinds))
    noise = _joined(1 + 5 * s.spread for s in near)
    w = w / noise
    start: Floats = np.log(np.array(list(FACTORS.values())))
    names = list(FACTORS)

    rows = batches(near)

    def off(x: Floats) -> Floats:
        """Of one set of factors, or of each of [k, factors]."""
        columns = np.exp(x) if x.ndim == 1 else np.exp(x.T)[..., None]
        return np.log(seconds(rows, dict(zip(names, columns, strict=True)))) - y

    x: Floats = start.copy()
    r = off(x)

    def loss(r: Floats, x: Floats) -> float:
        cauchy = FAR**2 * np.log1p((r / FAR) ** 2)
        return float((w * w * cauchy).sum() + (((x - start) / LOOSE) ** 2).sum())

    best, damp = loss(r, x), 1e-2
    for _ in range(MOST_STEPS):
        jac = ((off(x + 1e-4 * np.eye(len(x))) - r) / 1e-4).T
        ww = w * w / (1 + (r / FAR) ** 2)
        a = jac.T @ (ww[:, None] * jac) + np.eye(len(x)) / LOOSE**2
        b = jac.T @ (ww * r) + (x - start) / LOOSE**2
        for _ in range(6):
            step = np.linalg.solve(a + damp * np.diag(np.diag(a)), -b)
            trial: Floats = np.asarray(x + np.clip(step, -0.5, 0.5), np.float64)
            value = loss(off(trial), trial)
            if value < best:
                break
            damp *= 4
        else:
            break
        gain, best, x = best - value, value, trial
        r, damp = off(x), damp / 3
        if gain < 1e-5 * best:
            break
    return dict(zip(names, np.exp(x).tolist(), strict=True))


def knots_of(points: Sequence[CollectiveSeries]) -> Knots:
    which = np.repeat(np.arange(len(points)), _lengths(points))
    x = np.log2(_joined(s.nbytes for s in points))
    return Knots(tuple(s.curve for s in points), which, x)


def process_of(points: Sequence[CollectiveSeries]) -> Process:
    """Of the differences that are measured."""
    knots = knots_of(points)
    k = covariance(knots, knots)
    spread = _joined(s.spread for s in points)
    waits = [np.where(s.nbytes <= BANDS[1], float(is_trace(s)), 0.0) for s in points]
    k[np.diag_indices(len(k))] += NOISE**2 + (0.5 * spread) ** 2
    k[np.diag_indices(len(k))] += (WAITS * _joined(waits)) ** 2
    return Process(k)


def is_trace(s: CollectiveSeries) -> bool:
    """Whether times are those of kernels in a profile."""
    return s.curve.mode == "kernel_trace"


def differences(points: Sequence[CollectiveSeries], factors: Mapping[str, float]) -> Floats:
    """Logarithms of measured over the formulas with these factors."""
    times = _joined(s.time_s for s in points)
    return np.log(times / _joined(formula(points, factors)))


def added(
    points: Sequence[CollectiveSeries], factors: Mapping[str, float], process: Process
) -> Field:
    """What measurements add to the formulas with these factors."""
    weight = process.weights(differences(points, factors))
    return Field(factors, knots_of(points), weight)


# ---- protocols --------------------------------------------------------------------------------

Picked = tuple[CollectiveSeries, Floats]  # rows, and what is predicted of them


def shipped(series: Sequence[CollectiveSeries], field: Field) -> list[Picked]:
    return list(zip(series, predicted(series, field), strict=True))


def unseen_sizes(
    series: Sequence[CollectiveSeries], seed: int = 0, folds: int = 10
) -> list[Picked]:
    """Every row, predicted by a fit without the tenth of its system's sizes that it is in: sizes
    are drawn, and what is left out of one series is left out of all its system's."""
    rng = np.random.default_rng(seed)
    fold: dict[tuple[str, float], int] = {}
    for system in dict.fromkeys(s.system for s in series):
        sizes = np.unique(np.concatenate([s.nbytes for s in series if s.system == system]))
        numbers = rng.permutation(np.arange(len(sizes)) % folds)
        fold |= {(system, b): int(i) for b, i in zip(sizes.tolist(), numbers, strict=True)}
    mine = [np.array([fold[s.system, b] for b in s.nbytes.tolist()]) for s in series]
    found: list[Picked] = []
    for i in range(folds):
        kept = [s.at(m != i) for s, m in zip(series, mine, strict=True) if (m != i).any()]
        out = [s.at(m == i) for s, m in zip(series, mine, strict=True) if (m == i).any()]
        if kept and out:
            found += shipped(out, fit(kept))
    return found


def unseen(
    series: Sequence[CollectiveSeries], of: Callable[[CollectiveSeries], Any]
) -> list[Picked]:
    """Each group of series, as `of` names them (None: never left out), predicted by a fit without
    it."""
    found: list[Picked] = []
    points = thinned(series)  # a curve's rows are all left out, or none
    process = process_of(points)
    keys = [of(s) for s in points]
    lengths = _lengths(points)
    for key in dict.fromkeys(of(s) for s in series):
        rest = [s for s, k in zip(points, keys, strict=True) if k != key]
        if key is None or not rest:
            continue
        factors = fit_factors(rest)
        out = np.repeat(np.array([k == key for k in keys], bool), lengths)
        weight = process.weights_without(out, differences(rest, factors))
        field = Field(factors, knots_of(rest), weight)
        found += shipped([s for s in series if of(s) == key], field)
    return found


def by_ranks(series: Sequence[CollectiveSeries]) -> Callable[[CollectiveSeries], Any]:
    """A number of ranks of a system, where it has others."""
    known: dict[str, set[int]] = {}
    for s in series:
        known.setdefault(s.system, set()).add(s.curve.ranks)
    return lambda s: (s.system, s.curve.ranks) if len(known[s.system]) > 1 else None


def by_system(s: CollectiveSeries) -> str:
    """The GPU and its links: tables of one kind of node are left out together."""
    return s.curve.gpu


def ends(picked: Sequence[Picked]) -> Ends:
    """Between which logarithms of measured over predicted 80 % lie, by size band."""
    off = _joined(np.log(s.time_s / t) for s, t in picked)
    size = np.searchsorted(BANDS, _joined(s.nbytes for s, _ in picked))
    weigh = _joined(np.full(len(t), len(t) ** -0.5) for _, t in picked)
    found: list[tuple[float, float]] = []
    for b in range(len(BANDS) + 1):
        mine = size == b
        if not mine.any():
            found.append((-0.5, 0.5))
            continue
        order = np.argsort(off[mine])
        share = np.cumsum(weigh[mine][order]) / weigh[mine].sum()
        low, high = (float(np.interp(q, share, off[mine][order])) for q in (0.1, 0.9))
        found.append((min(low, -0.01), max(high, 0.01)))
    return tuple(found)
