"""Reports as Parquet, and the points of a design space: a row each, with all that its numbers rest
on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from gpuir.backends.structured import flat_rows
from gpuir.backends.terminal import Terminal
from gpuir.ir.errors import UsageError
from gpuir.report.table import Report

TEXT = (
    *("model", "model_sha256", "graph", "dtype", "profile", "target", "base", "cluster", "plan"),
    *("predictor", "gpuir", "bound", "why"),
)
WHOLE = ("point", "items", "peak_bytes", "reserved_bytes", "available_bytes")
FLAGS = ("host_bound",)
COUNTS = b"gpuir.space"  # the key of a part's own counts, in its footer


def parquet(module: str = "pyarrow.parquet") -> Any:
    """The library; UsageError where it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            "pyarrow, which writes Parquet, is not installed",
            fix="pip install 'gpuir[sweep]'",
        ) from error


def to_parquet(report: Report, _: Terminal) -> bytes:
    """The rows of a report's tables: whole numbers, numbers, words, yes or no; null is what a row
    does not have."""
    pa = parquet("pyarrow")
    rows = flat_rows(report)
    names = dict.fromkeys(name for row in rows for name in row)
    arrays = [pa.array(_alike([row.get(name) for row in rows])) for name in names]
    return _bytes(pa.Table.from_arrays(arrays, names=list(names)))


def _alike(column: list[Any]) -> list[Any]:
    """A column of one type: numbers where one is not whole or has over 63 bits, words where one is
    a word."""
    kinds: set[type[Any]] = {type(x) for x in column if x is not None}
    if str in kinds and len(kinds) > 1:
        return [None if x is None else str(x) for x in column]
    large = any(isinstance(x, int) and abs(x) >= 1 << 63 for x in column)
    if float in kinds or large:
        return [None if x is None else float(x) for x in column]
    return column


def _bytes(table: Any) -> bytes:
    sink = parquet("pyarrow").BufferOutputStream()
    parquet().write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def part_bytes(columns: Mapping[str, Sequence[Any]], sizes: Sequence[str]) -> bytes:
    """A file of some points. `sizes` are the names of columns of sizes; the rest is text, flags,
    whole numbers and numbers by its name. None is what a point does not have."""
    pa = parquet("pyarrow")
    types = {
        **dict.fromkeys(TEXT, pa.dictionary(pa.int32(), pa.string())),
        **dict.fromkeys((*WHOLE, *sizes), pa.int64()),
        **dict.fromkeys(FLAGS, pa.bool_()),
    }
    arrays = [pa.array(x, types.get(name, pa.float64())) for name, x in columns.items()]
    table = pa.Table.from_arrays(arrays, names=list(columns))
    times = columns["latency_s"]
    counts = {
        "points": len(times),
        "without": sum(x is None for x in times),
        "unfit": sum(x is not None and bool(w) for x, w in zip(times, columns["why"], strict=True)),
    }
    table = table.replace_schema_metadata({COUNTS: json.dumps(counts)})
    return _bytes(table)


def counts_of(path: Path) -> dict[str, int]:
    """How many points a part has: all of them, those without a latency, and those that do not fit.
    UsageError where the file is no part."""
    library = parquet()
    try:
        return json.loads(library.read_metadata(path).metadata[COUNTS])
    except (KeyError, TypeError, OSError, ValueError) as error:  # pyarrow's own is a ValueError
        raise UsageError(
            "the file is not a part of a design space",
            where=str(path),
            found=str(error)[:200],
            fix="delete the file and run the sweep again: gpuir computes it again",
        ) from error
