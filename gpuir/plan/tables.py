"""Tables of embeddings as a user states them: sizes, and which rows are looked up."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, cast

from gpuir.files import read_json, read_text, read_toml
from gpuir.ir.errors import GpuirError, UsageError, nearest
from gpuir.ir.types import DTYPES, DType
from gpuir.ops.spread import MOST_SHARES, UNIFORM, Spread, parse_spread, spread_of_shares

MOST_TABLES = 100_000
REUSE = "_share_reuse_le_"  # of a table of shares of rows and of lookups by reuse
REQUIRED = ("rows", "width")
KEYS = ("name", "rows", "width", "lookups", "features", "dtype", "indices", "count")
OTHERS = {"pooling": "lookups", "num_embeddings": "rows", "embedding_dim": "width"}


@dataclass(frozen=True)
class EmbeddingTable:
    """A table of `rows` of `width` cells. Each sample looks `lookups` of them up, on average, for
    each of its `features`, and gets their sum."""

    name: str
    rows: int
    width: int
    lookups: float = 1.0
    features: int = 1
    dtype: DType = DTYPES["f32"]
    spread: Spread = UNIFORM

    @property
    def row_bytes(self) -> float:
        return self.width * self.dtype.bits / 8

    @property
    def nbytes(self) -> float:
        return self.rows * self.row_bytes

    def __post_init__(self) -> None:
        assert self.rows > 0 and self.width > 0, self.name


def read_tables(path: str | Path) -> tuple[EmbeddingTable, ...]:
    """The tables of a JSON, TOML or CSV file: each of `count` lines is a table of its own.
    UsageError for a field that is not known, is missing or makes no sense."""
    where = str(path)
    suffix = Path(path).suffix.lower()
    if suffix == ".csv":
        entries = [{k: v for k, v in line.items() if v != ""} for line in _lines(where)]
    elif suffix in (".json", ".toml"):
        content: Any = (read_json if suffix == ".json" else read_toml)(where, "the tables")
        if isinstance(content, dict):
            content = cast("dict[str, Any]", content).get("tables")
        if not isinstance(content, list):
            raise UsageError(
                "the file has no list of tables",
                where=where,
                expected='{"tables": [{"rows": 1000, "width": 64}]}',
                fix="put the tables under the key tables",
            )
        entries = cast("list[Any]", content)
    else:
        raise UsageError(
            "the format of the file is not known",
            where=where,
            expected=".json, .toml or .csv",
            fix="give the file the extension of its format",
        )
    found = [t for i, entry in enumerate(entries) for t in _tables(entry, i, where)]
    if not found:
        one = "rows,width\n1000,64" if suffix == ".csv" else '{"rows": 1000, "width": 64}'
        raise UsageError("the file has no tables", where=where, fix=f"add one:\n{one}")
    if len(found) > MOST_TABLES:
        raise UsageError(
            "the file has too many tables",
            where=where,
            expected=f"at most {MOST_TABLES:,}",
            found=f"{len(found):,}",
            fix="write tables that are alike only once, with features instead of count",
        )
    (name, count), *_ = Counter(t.name for t in found).most_common(1)
    if count > 1:
        fix = "give each table its own name, or no name"
        raise UsageError(f"{count} tables have the name {name!r}", where=where, fix=fix)
    return tuple(found)


def _tables(entry: Any, i: int, where: str) -> Iterable[EmbeddingTable]:
    place = f"{where}, table {i + 1}"
    if not isinstance(entry, dict):
        example = '{"rows": 1000, "width": 64}'
        raise UsageError("no table", where=place, found=repr(entry)[:60], fix=f"write {example}")
    given: dict[str, Any] = {}
    said: dict[str, str] = {}
    for k, v in cast("dict[Any, Any]", entry).items():
        key = OTHERS.get(str(k), str(k))
        if key in given:
            raise UsageError(
                f"{key} is given twice",
                where=place,
                found=f"{said[key]} = {given[key]}, {k} = {v}",
                fix="remove one of them: they mean the same",
            )
        given[key], said[key] = v, str(k)
    if given and not any(k in given for k in REQUIRED):
        raise UsageError(
            f"a table must have the fields {' and '.join(REQUIRED)}",
            where=place,
            expected=", ".join(KEYS),
            found=", ".join(given)[:200],
            fix="give a file of embedding tables, or name their sizes so",
        )
    if unknown := [k for k in given if k not in KEYS]:
        raise UsageError(
            f"a table has no field {unknown[0]!r}",
            where=place,
            expected=", ".join(KEYS),
            fix=nearest(unknown[0], KEYS),
        )
    if missing := [k for k in REQUIRED if k not in given]:
        raise UsageError(
            f"a table must have the field {missing[0]}",
            where=place,
            found=", ".join(given) or "nothing",
            fix=f"add {missing[0]}",
        )
    for key in ("name", "dtype", "indices"):
        if not isinstance(given.get(key, ""), str):
            found = repr(given[key])[:60]
            raise UsageError(f"{key} is text", where=place, found=found, fix="quote it")
    numbers = {
        key: _number(given[key], key, place, whole=key != "lookups")
        for key in ("rows", "width", "lookups", "features", "count")
        if key in given
    }
    count = int(numbers.pop("count", 1))
    dtype = str(given.get("dtype", "f32"))
    dtype = {"fp32": "f32", "fp16": "f16", "float32": "f32", "float16": "f16"}.get(dtype, dtype)
    if dtype not in DTYPES:
        raise UsageError(f"no dtype {dtype!r}", where=place, fix=nearest(dtype, list(DTYPES)))
    name = str(given.get("name", f"table{i + 1}"))
    try:
        spread = read_spread(str(given.get("indices", "")), Path(where).parent)
    except GpuirError as error:
        error.where = error.where or f"{place}: indices"
        raise
    table = EmbeddingTable(
        name,
        int(numbers["rows"]),
        int(numbers["width"]),
        lookups=float(numbers.get("lookups", 1.0)),
        features=int(numbers.get("features", 1)),
        dtype=DTYPES[dtype],
        spread=spread,
    )
    if count > MOST_TABLES:
        raise UsageError(
            "the file has too many tables", where=place, expected=f"at most {MOST_TABLES:,}"
        )
    return [replace(table, name=f"{name}.{j}") for j in range(count)] if count > 1 else [table]


def _number(value: Any, key: str, where: str, whole: bool) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    good = isfinite(number) and 0 < number <= 2**50 and not isinstance(value, bool)
    if not good or (whole and number != int(number)):
        raise UsageError(
            f"{key} is not a valid size",
            where=where,
            expected="a whole number of at least 1" if whole else "a number above 0",
            found=repr(value)[:60],
            fix=f"correct {key}",
        )
    return number


# ---- which rows are looked up --------------------------------------------------------------------


def read_spread(text: str, folder: Path = Path()) -> Spread:
    """A distribution as `ops.spread` has it, or of a file: a .csv of how often each row is looked
    up (column `count`, rows of no lookups too), of `row_share` and `index_share`, or of shares by
    reuse (`row_share_reuse_le_8`, ..), where `#` and its name chooses a line. UsageError for
    another file."""
    path, _, key = text.partition("#")
    if not path.lower().endswith(".csv"):
        return parse_spread(text)
    where = str(folder / path)
    lines = _lines(where)
    names = [str(n) for n in lines[0]] if lines else []
    if "count" in names:
        return _of_counts([_share(line["count"], where, most=2.0**53) for line in lines], where)
    if {"row_share", "index_share"} <= set(names):
        pairs = [(_share(x["row_share"], where), _share(x["index_share"], where)) for x in lines]
        return spread_of_shares([(a, b) for a, b in pairs if a], where)
    if any(n.startswith(f"index{REUSE}") for n in names):
        chosen = [x for x in lines if not key or key in (x.get(names[0]) or "")]
        exact = [x for x in chosen if x.get(names[0]) == key]
        if len(exact or chosen) != 1:
            raise UsageError(
                "the file has several lines, and it is not clear which one to use",
                where=where,
                found=", ".join(str(x.get(names[0])) for x in (chosen or lines)[:4]),
                fix=f"{path}#{(chosen or lines)[0].get(names[0])}",
            )
        return _by_reuse((exact or chosen)[0], where)
    raise UsageError(
        "the file has no distribution of indices",
        where=where,
        expected="columns `count`, or `row_share` and `index_share`, or shares by reuse",
        found=", ".join(names)[:80] or "nothing",
        fix="give the columns these names, and add lines below them",
    )


def _lines(where: str) -> list[dict[str, str]]:
    """The lines of a CSV file by column; UsageError where a line has more cells than columns."""
    text = read_text(where, "the table", UsageError)
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    try:
        titles = list(reader.fieldnames or ())
        if twice := [t for t, n in Counter(titles).items() if n > 1]:
            raise UsageError(
                f"two columns have the name {twice[0]!r}", where=where, fix="remove one of them"
            )
        lines: list[dict[str, str]] = []
        for line in reader:
            more = cast("dict[str | None, Any]", line).pop(None, None)
            if more:
                raise UsageError(
                    "a line has more cells than the first line has columns",
                    where=f"{where}:{reader.line_num}",
                    expected=f"{len(titles)}: {', '.join(titles)}"[:80],
                    found=f"{len(titles) + len(more)}",
                    fix="remove the last cells, or name their columns in the first line",
                )
            lines.append({k: v for k, v in line.items() if v is not None})  # of a short line
    except csv.Error as error:
        raise UsageError(
            "not a CSV file", where=f"{where}:{reader.line_num}", found=str(error), fix="correct it"
        ) from error
    return lines


def _share(cell: str | None, where: str, most: float = 1.0) -> float:
    try:
        value = float(cell or 0)
    except ValueError:
        value = float("nan")
    if not 0 <= value <= most:
        raise UsageError(
            "the cell is not a valid share or count",
            where=where,
            expected=f"a number from 0 to {most:g}",
            found=repr(cell)[:60],
            fix="correct this cell",
        )
    return value


def _of_counts(counts: Sequence[float], where: str) -> Spread:
    """Rows that are looked up about as often are one class."""
    total, ordered = sum(counts), sorted(counts, reverse=True)
    if not total:
        raise UsageError(
            "the counts are all 0", where=where, fix="set some counts above 0, or remove the file"
        )
    pairs: list[tuple[float, float]] = []
    start = 0
    while start < len(ordered):
        left = MOST_SHARES - 1 - len(pairs)
        alike = 1 if len(ordered) - start <= left else max(1, (start + 1) // 8)
        stop = len(ordered) if left <= 0 else min(len(ordered), start + alike)
        pairs.append(((stop - start) / len(ordered), sum(ordered[start:stop]) / total))
        start = stop
    return spread_of_shares(pairs, where)


def _by_reuse(line: Mapping[str, str], where: str) -> Spread:
    """Shares of lookups by how often their rows were looked up, in a batch of which only the rows
    that were named count. A share of rows that is rounded to nothing follows from the reuse."""
    mean = _share(line.get("avg_reuse"), where, most=2.0**53) or 1.0
    pairs: list[tuple[float, float]] = []
    below = 0.0
    for column in (c for c in line if c.startswith(f"index{REUSE}")):
        most = column.removeprefix(f"index{REUSE}")
        end = 2 * below if most == "inf" else float(most)
        lookups = _share(line[column], where)
        rows = _share(line.get(column.replace("index", "row", 1)), where)
        low, high = lookups * mean / end, lookups * mean / (below + 1 if below else 1.0)
        below = end
        if lookups:
            pairs.append((min(max(rows, low), high), lookups))
    rows, lookups = (sum(part) for part in zip(*pairs, strict=True))
    return spread_of_shares([(a / rows, b / lookups) for a, b in pairs], where)
