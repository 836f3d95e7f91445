"""Tables of measured kernels: which kind a file is, and its rows as batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from gpuir.cost.work import Work
from gpuir.fit import collect, eager, experts, profiled, serving, traced
from gpuir.fit.batch import Batch, Flags, alike, number_rows
from gpuir.fit.clock import clocked
from gpuir.fit.columns import Columns, Floats, Ints, TableFile, Words
from gpuir.fit.readers import Kind, Shapes, Unmodelled
from gpuir.ir.errors import TargetError, UsageError
from gpuir.targets.load import load_target
from gpuir.targets.target import Target

KINDS: tuple[Kind, ...] = (
    collect.KIND,
    *serving.KINDS,
    *experts.KINDS,
    *profiled.KINDS,
    *eager.KINDS,
    *traced.KINDS,
)

# Tables that are no kernels': columns that tell them, and what they hold.
OTHERS: dict[tuple[str, ...], str] = {
    ("library", "world_size", "bytes", "latency_us"): "collectives, for `eval collectives` to come",
    ("library", "tokens_per_rank", "latency_us"): "all-to-all, for `eval collectives` to come",
    ("model", "ttft_ms", "tpot_ms"): "deployments of language models: `gpuir eval models`",
    ("model", "option", "e2e_ms"): "latencies of whole models, for `eval models` to come",
    ("gpu", "measured_iter_ms"): "iterations of whole models, for `eval dlrm` to come",
    ("kind", "mean_us", "machine"): "host overheads, for `eval dlrm` to come",
    ("dataset", "indices", "unique_rows"): "statistics of embedding indices, no measurement",
    ("table", "reference_version", "compared_version"): "notes on versions, no measurement",
    ("system", "sm_version"): "a list of systems, no measurement",
    ("device", "num_sm"): "a list of devices, no measurement",
    ("sku", "sm_count"): "a list of GPUs, no measurement",
    ("gpu", "profile", "value", "unit"): "shared GPUs, for `eval mig` to come",
    ("gpu", "profile_id"): "a list of MIG profiles, no measurement",
    ("gpu", "geometry"): "a list of MIG geometries, no measurement",
    ("technology", "busbw_gbs"): "a list of interconnects, no measurement",
    ("source", "url"): "a list of sources, no measurement",
    ("sku", "listed", "recomputed"): "a list of checks, no measurement",
}

# Beyond these a number is a slip, and percentages of it are no numbers any more.
LEAST_S, MOST_S, MOST_EXTENT = 1e-9, 1e6, 2.0**40


@dataclass(frozen=True)
class Table:
    """A file of measurements, read: its batches, and how many rows were left out and why."""

    file: str
    kind: str
    count: int
    batches: tuple[Batch, ...]
    skipped: Mapping[str, int]


def read_table(path: str | Path) -> Table:
    """The kernels of a measurement table, whatever its name: its columns tell what it is.

    A table that is known and holds no kernels has no batches, and all its rows are skipped.
    UsageError when the file is none we know.
    """
    opened = TableFile(Path(path))
    kind = recognise(opened)
    if isinstance(kind, str):
        count = opened.read(opened.names[:1]).count
        return Table(str(opened.path), "", count, (), {f"not kernels: {kind}": count})
    columns = opened.read(kind.reads)
    if kind.prepare is not None:
        with np.errstate(all="ignore"):  # of rows that are left out below
            columns = kind.prepare(columns)
    skipped: Counter[str] = Counter()
    batches = clocked(tuple(_batches(columns, kind, skipped)), kind.clock)
    return Table(columns.file, kind.name, columns.count, batches, dict(skipped))


def recognise(opened: TableFile) -> Kind | str:
    """The kind of table with the most columns that the file has; of one that holds no kernels, what
    it holds instead."""
    names = set(opened.names)
    fits = [k for k in KINDS if names.issuperset((*k.key, k.device, k.latency))]
    if fits:
        return max(fits, key=lambda k: len(k.key))
    for key, what in OTHERS.items():
        if names.issuperset(key):
            return what
    near = min(KINDS, key=lambda k: len({*k.key, k.device, k.latency} - names))
    raise UsageError(
        "no table of measurements that we know",
        where=str(opened.path),
        expected=f"the columns of {near.name}: {', '.join((near.device, *near.key, near.latency))}",
        found=", ".join(opened.names[:30]) or "no columns",
        fix="docs/eval.md lists the columns of each kind",
    )


# ---------------------------------------------------------------------------- rows to batches


def _batches(columns: Columns, kind: Kind, skipped: Counter[str]) -> Iterator[Batch]:
    latency_s = columns.numbers(kind.latency) * 1e-6
    devices = columns.words(kind.device)
    shape = {name: columns.numbers(name, 0.0) for name in kind.shape}
    words = {name: columns.words(name) for name in kind.words}
    beside = {name: columns.words(name) for name in kind.beside if name in columns.cells}
    kept = _kept(columns, latency_s, kind, skipped)
    rows_kept = np.flatnonzero(kept)
    codes = [devices.codes[rows_kept], *(w.codes[rows_kept] for w in words.values())]
    for group in alike(codes):
        rows = rows_kept[group]
        device = devices.names[devices.codes[rows[0]]]
        said = {n: w.names[w.codes[rows[0]]] for n, w in words.items()}
        target = target_of(kind.devices.get(device, device))
        if target is None:
            skipped[f"no target is called {device}"] += len(rows)
            continue
        which, first = _distinct([values[rows] for values in shape.values()], len(rows))
        extents = {n: values[rows][first] for n, values in shape.items()}
        try:
            with np.errstate(all="ignore"):  # of shapes that are left out below
                works = kind.works(Shapes(said, extents, target))
        except Unmodelled as why:
            skipped[str(why)] += len(rows)
            continue
        works = tuple(_filled(w, len(first)) for w in works)
        batch = Batch(
            file=columns.file,
            op=kind.op(said),
            device=device,
            dtype=kind.dtype(said),
            target=target,
            works=works,
            which=which,
            latency_s=latency_s[rows],
            suspect=said.get("suspect", ""),
            rough=kind.rough or said.get("rough", "no") == "yes",
            words={n: Words(w.codes[rows], w.names) for n, w in beside.items()},
            dims=extents,
        )
        whole = _whole(works, len(first))[which]
        if not whole.all():
            skipped["of its numbers no kernel can be made"] += int((~whole).sum())
            batch = batch.take(whole).alone()
        if len(batch):
            yield batch


def _kept(columns: Columns, latency_s: Floats, kind: Kind, skipped: Counter[str]) -> Flags:
    """The rows that hold a measurement; the others are counted."""
    flags = columns.words("flag")
    kept = flags.where("")
    for name in flags.names:
        if name:
            skipped[f"flag = {name}"] += int(flags.where(name).sum())
    good = (latency_s >= LEAST_S) & (latency_s <= MOST_S)
    for name in kind.shape:
        extents = columns.numbers(name, 0.0)
        good &= (extents >= 1) & (extents <= MOST_EXTENT) | (extents == 0) & (name in kind.or_zero)
    if (kept & ~good).any():
        skipped["a number is missing, too small or too large"] += int((kept & ~good).sum())
    return kept & good


def _distinct(columns: list[Floats], count: int) -> tuple[Ints, Ints]:
    """Equal rows of numbers: → (which distinct one each row is, a row that holds each)."""
    if not columns or not count:
        return np.zeros(count, np.int64), np.zeros(min(count, 1), np.int64)
    return number_rows([np.unique(c, return_inverse=True)[1].astype(np.int64) for c in columns])


def _whole(works: tuple[Work, ...], count: int) -> Flags:
    """Which shapes have kernels at all: windows no larger than images, heads for every rank."""
    whole = np.ones(count, bool)
    for work in works:
        for _, extent in work.dims:
            whole &= np.isfinite(extent) & np.greater(extent, 0)
    return whole


def _filled(work: Work, count: int) -> Work:
    """The work with an array for every number, so that rows can be drawn from it."""
    return work.each(lambda n: np.broadcast_to(np.asarray(n, np.float64), (count,)))


@cache
def target_of(name: str) -> Target | None:
    """The target that a table's name for a device means, if there is one."""
    try:
        return load_target(name)
    except TargetError:
        return None
