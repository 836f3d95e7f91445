"""Tables of measured kernels: which kind a file is, and its rows as batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from gpuir.cost.work import Work
from gpuir.fit import checks, collect
from gpuir.fit.batch import Clock, Flags, MeasuredBatch, alike, number_rows
from gpuir.fit.clock import clocked
from gpuir.fit.columns import Columns, Floats, Ints, TableFile, WordColumn
from gpuir.fit.readers import Other, Reader, Shapes, Unmodelled
from gpuir.ir.errors import TargetError, UsageError
from gpuir.targets.load import load_target
from gpuir.targets.target import Target

Readers = Sequence[Reader | Other]
READERS: Readers = (collect.READER, collect.PLAIN, checks.READER)

# Beyond these a number is a slip, and percentages of it are no numbers any more.
LEAST_S, MOST_S, MOST_EXTENT = 1e-9, 1e6, 2.0**40


@dataclass(frozen=True)
class MeasuredTable:
    """A file of measurements, read: its batches, and how many rows were left out and why."""

    file: str
    kind: str
    count: int
    batches: tuple[MeasuredBatch, ...]
    skipped: Mapping[str, int]


def read_table(path: str | Path, readers: Readers = READERS) -> MeasuredTable:
    """The kernels of a measurement table, whatever its name: its columns tell which reader's it is.

    A table that is known and holds no kernels has no batches, and all its rows are skipped.
    UsageError when the file is none we know.
    """
    opened = TableFile(Path(path))
    reader = recognise(opened, readers)
    if isinstance(reader, Other):
        count = opened.read(opened.names[:1]).count
        return MeasuredTable(
            str(opened.path), "", count, (), {f"not kernels: {reader.holds}": count}
        )
    columns = opened.read(reader.reads)
    if reader.prepare is not None:
        with np.errstate(all="ignore"):  # of rows that are left out below
            columns = reader.prepare(columns)
    skipped: Counter[str] = Counter()
    batches = clocked(tuple(_batches(columns, reader, skipped)), reader.clock)
    return MeasuredTable(columns.file, reader.name, columns.count, batches, dict(skipped))


def recognise(opened: TableFile, readers: Readers = READERS) -> Reader | Other:
    """The reader with the most columns, all of which the file has; one of kernels before others."""
    names = set(opened.names)
    if fits := [r for r in readers if names.issuperset(r.known_by)]:
        return max(fits, key=lambda r: (isinstance(r, Reader), len(r.known_by)))
    of_kernels = [r for r in readers if isinstance(r, Reader)]
    near = min(of_kernels, key=lambda r: len({*r.known_by} - names))
    fix = "docs/guide/eval.md lists the columns"
    if readers is READERS:
        fix += "; a checkout of the repository reads more tables"
    raise UsageError(
        "the columns are not those of a table that gpuir can read",
        where=str(opened.path),
        expected=f"the columns of {near.name}: {', '.join(near.known_by)}",
        found=", ".join(opened.names[:30]) or "no columns",
        fix=fix,
    )


# ---------------------------------------------------------------------------- rows to batches


def _batches(columns: Columns, reader: Reader, skipped: Counter[str]) -> Iterator[MeasuredBatch]:
    latency_s = columns.numbers(reader.latency) * reader.unit_s
    devices = columns.words(reader.device)
    shape = {name: columns.numbers(name, 0.0) for name in reader.shape}
    words = {name: columns.words(name) for name in reader.words}
    beside = {name: columns.words(name) for name in reader.beside if name in columns.cells}
    kept = _kept(columns, latency_s, reader, skipped)
    rows_kept = np.flatnonzero(kept)
    codes = [devices.codes[rows_kept], *(w.codes[rows_kept] for w in words.values())]
    for group in alike(codes):
        rows = rows_kept[group]
        device = devices.names[devices.codes[rows[0]]]
        common = {n: w.names[w.codes[rows[0]]] for n, w in words.items()}
        target = target_of(reader.devices.get(device, device))
        if target is None:
            skipped[f"no target is called {device}"] += len(rows)
            continue
        which, first = _distinct([values[rows] for values in shape.values()], len(rows))
        extents = {n: values[rows][first] for n, values in shape.items()}
        try:
            with np.errstate(all="ignore"):  # of shapes that are left out below
                works = reader.works(Shapes(common, extents, target))
        except Unmodelled as why:
            skipped[str(why)] += len(rows)
            continue
        works = tuple(_filled(w, len(first)) for w in works)
        batch = MeasuredBatch(
            file=columns.file,
            op=reader.op(common),
            device=device,
            dtype=reader.dtype(common),
            target=target,
            works=works,
            which=which,
            latency_s=latency_s[rows],
            clock=Clock(launches=common.get("profiled") != "yes"),
            suspect=common.get("suspect", ""),
            rough=reader.rough or common.get("rough", "no") == "yes",
            words={n: WordColumn(w.codes[rows], w.names) for n, w in beside.items()},
            dims=extents,
        )
        whole = _whole(works, len(first))[which]
        if not whole.all():
            skipped["gpuir cannot make a kernel of its numbers"] += int((~whole).sum())
            batch = batch.take(whole).alone()
        if len(batch):
            yield batch


def _kept(columns: Columns, latency_s: Floats, reader: Reader, skipped: Counter[str]) -> Flags:
    """The rows that hold a measurement; the others are counted."""
    flags = columns.words("flag")
    kept = flags.where("")
    for name in flags.names:
        if name and (count := int(flags.where(name).sum())):
            skipped[f"flag = {name}"] += count
    good = (latency_s >= LEAST_S) & (latency_s <= MOST_S)
    for name in reader.shape:
        extents = columns.numbers(name, 0.0)
        good &= (extents >= 1) & (extents <= MOST_EXTENT) | (extents == 0) & (
            name in reader.or_zero
        )
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
