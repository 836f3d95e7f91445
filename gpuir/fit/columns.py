"""A file of measurements as columns: numbers in arrays, words as codes into a list of names."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuir.files import LARGEST_TEXT, note_input
from gpuir.ir.errors import UsageError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CHUNK = 100_000  # rows of a csv file that are text at one time
MOST_ROWS = 5_000_000  # of a parquet file, which says the same a million times in a few bytes
LARGEST_UNPACKED = 1 << 30  # bytes of its columns without their compression
MOST_COUNT = 2.0**40
TRUTHS = {"True": 1.0, "true": 1.0, "False": 0.0, "false": 0.0}


@dataclass(frozen=True)
class WordColumn:
    """A column of text: the name of row i is `names[codes[i]]`; what is missing is empty."""

    codes: Ints
    names: tuple[str, ...]

    @staticmethod
    def of(text: Iterable[str]) -> WordColumn:
        known: dict[str, int] = {}
        codes = [known.setdefault(t, len(known)) for t in text]
        return WordColumn(np.array(codes, np.int64), tuple(known))

    @staticmethod
    def same(word: str, count: int) -> WordColumn:
        return WordColumn(np.zeros(count, np.int64), (word,))

    @staticmethod
    def yes_or_no(flags: NDArray[np.bool_]) -> WordColumn:
        return WordColumn(flags.astype(np.int64), ("no", "yes"))

    def where(self, *names: str) -> NDArray[np.bool_]:
        """Which rows hold one of the names."""
        return np.array([n in names for n in self.names], bool)[self.codes]

    def mapped(self, change: Callable[[str], str]) -> WordColumn:
        """Each name changed; names that become equal are one."""
        names = [change(n) for n in self.names]
        known = {n: i for i, n in enumerate(dict.fromkeys(names))}
        return WordColumn(np.array([known[n] for n in names], np.int64)[self.codes], tuple(known))

    def numbers(self) -> Floats:
        """The words as numbers, those that are none as NaN."""
        return np.array([_number(n) for n in self.names], np.float64)[self.codes]


@dataclass(frozen=True)
class Columns:
    """The columns of a table. A column reads as words or as numbers, whatever the file held."""

    file: str
    count: int
    cells: Mapping[str, WordColumn | Floats]

    def words(self, name: str) -> WordColumn:
        cells = self.cells.get(name)
        if cells is None:
            return WordColumn.same("", self.count)
        if isinstance(cells, WordColumn):
            return cells
        values, codes = np.unique(cells, return_inverse=True)
        names = tuple("" if np.isnan(v) else f"{v:g}" for v in values.tolist())
        return WordColumn(codes.astype(np.int64), names)

    def numbers(self, name: str, missing: float = np.nan) -> Floats:
        cells = self.cells.get(name)
        if cells is None:
            return np.full(self.count, missing)
        return cells.numbers() if isinstance(cells, WordColumn) else cells

    def lines(self, words: Iterable[str], numbers: Iterable[str]) -> Iterator[dict[str, Any]]:
        """The rows one by one: words as text, empty where there are none; numbers as floats, NaN
        where they are none."""
        texts = {n: self.words(n) for n in words}
        floats = {n: self.numbers(n) for n in numbers}
        for i in range(self.count):
            cells: dict[str, Any] = {n: w.names[w.codes[i]] for n, w in texts.items()}
            yield cells | {n: float(values[i]) for n, values in floats.items()}

    def with_cells(self, cells: Mapping[str, WordColumn | Floats]) -> Columns:
        return Columns(self.file, self.count, {**self.cells, **cells})


def count_of(number: float) -> int:
    """A number that counts something, 0 where it is none."""
    return int(number) if 1 <= number <= MOST_COUNT and number.is_integer() else 0


def _number(text: str) -> float:
    if text in TRUTHS:
        return TRUTHS[text]
    try:
        return float(text)
    except ValueError:
        return np.nan


@dataclass(frozen=True)
class TableFile:
    """A parquet or csv file, opened: its columns' names are known, its rows not read yet."""

    path: Path

    @cached_property
    def names(self) -> tuple[str, ...]:
        """UsageError when it is no such file, or when parquet cannot be read here."""
        note_input(self.path)
        with self._guarded():
            if self.path.exists() and not self.path.is_file():
                raise UsageError("not a table", where=str(self.path), expected="parquet or csv",
                                 found="a folder, a device or a pipe")  # fmt: skip
            if self._is_parquet:
                return tuple(_parquet().read_schema(self.path).names)
            if self.path.stat().st_size > LARGEST_TEXT:
                raise UsageError(
                    "the table is too large",
                    where=str(self.path),
                    expected=f"csv of at most {LARGEST_TEXT >> 20} MiB",
                    found=f"{self.path.stat().st_size >> 20} MiB",
                    fix="save it as parquet, or save a part of it",
                )
            with self.path.open(encoding="utf-8-sig", newline="") as stream:
                header = next(csv.reader(stream), None) or []
                return tuple(header)

    def read(self, wanted: Iterable[str]) -> Columns:
        """The columns of those names that the file has."""
        chosen = [n for n in dict.fromkeys(wanted) if n in self.names]
        with self._guarded():
            if twice := [n for n in chosen if self.names.count(n) > 1]:
                raise UsageError(
                    "a column name occurs twice", where=str(self.path), found=", ".join(twice)
                )
            if self._is_parquet:
                return _from_parquet(self.path, chosen)
            return _from_csv(self.path, set(chosen))

    @cached_property
    def _is_parquet(self) -> bool:
        with self.path.open("rb") as stream:
            return stream.read(4) == b"PAR1"  # Apache Parquet format, File format

    def _guarded(self) -> _Guard:
        return _Guard(self.path)


@dataclass(frozen=True)
class _Guard:
    """Says of a file that cannot be read which one it is, and why."""

    path: Path

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if error is None or isinstance(error, UsageError) or not isinstance(error, Exception):
            return
        reason = error.strerror if isinstance(error, OSError) else None
        raise UsageError(
            "cannot read the table",
            where=str(self.path),
            expected="a parquet or csv file of measurements",
            found=reason or f"{type(error).__name__}: {str(error).splitlines()[0]}",
        ) from error


def _parquet() -> Any:
    try:
        return import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError(
            "pyarrow, which reads parquet files, is not installed",
            fix="pip install 'gpuir[eval]'\nor save the table as csv",
        ) from error


def _from_parquet(path: Path, names: list[str]) -> Columns:
    with _parquet().ParquetFile(path) as file:
        about = file.metadata
        groups = map(about.row_group, range(about.num_row_groups))
        unpacked = sum(
            group.column(i).total_uncompressed_size
            for group in groups
            for i in range(group.num_columns)
        )
        if about.num_rows > MOST_ROWS or unpacked > LARGEST_UNPACKED:
            raise UsageError(
                "the table is too large",
                where=str(path),
                expected=f"at most {MOST_ROWS:,} rows and {LARGEST_UNPACKED >> 20} MiB unpacked",
                found=f"{about.num_rows:,} rows, {unpacked >> 20} MiB",
                fix="save a part of it",
            )
        texts = [f.name for f in file.schema_arrow if "string" in str(f.type)]
    table = _parquet().read_table(path, columns=names, read_dictionary=texts).unify_dictionaries()
    cells = {name: _cells(table.column(name).combine_chunks()) for name in names}
    return Columns(str(path), table.num_rows, cells)


def _cells(column: Any) -> WordColumn | Floats:
    kind = str(column.type)
    if kind.startswith("dictionary") or "string" in kind:
        if not kind.startswith("dictionary"):
            column = column.dictionary_encode()
        names = tuple("" if n is None else str(n) for n in column.dictionary.to_pylist())
        codes = column.indices.fill_null(len(names)) if column.null_count else column.indices
        return WordColumn(codes.to_numpy(zero_copy_only=False).astype(np.int64), (*names, ""))
    if kind == "bool":
        column = column.cast("int8")
    return np.asarray(column.to_numpy(zero_copy_only=False), np.float64)


def _from_csv(path: Path, wanted: set[str]) -> Columns:
    with path.open(encoding="utf-8-sig", newline="") as stream:  # spreadsheets write a mark
        lines = csv.reader(stream)
        header = next(lines, None) or []
        columns = {n: i for i, n in enumerate(header) if n in wanted}
        known: dict[str, dict[str, int]] = {n: {} for n in columns}
        codes: dict[str, list[Ints]] = {n: [] for n in columns}
        count = 0
        for rows in _chunks(lines, len(header)):
            count += len(rows)
            for name, i in columns.items():
                names = known[name]
                chunk = [names.setdefault(row[i], len(names)) for row in rows]
                codes[name].append(np.array(chunk, np.int64))
    cells = {n: _compact(_joined(codes[n]), tuple(known[n])) for n in columns}
    return Columns(str(path), count, cells)


def _chunks(lines: Iterator[list[str]], width: int) -> Iterator[list[list[str]]]:
    """Rows some at a time; blank lines left out, short rows filled up."""
    while rows := list(islice(lines, CHUNK)):
        yield [r if len(r) == width else (r + [""] * width)[:width] for r in rows if r]


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _compact(codes: Ints, names: tuple[str, ...]) -> WordColumn | Floats:
    """Numbers where every word that is there is one."""
    words = WordColumn(codes, names)
    values = [_number(n) for n in names if n]
    return words.numbers() if values and not np.isnan(values).any() else words
