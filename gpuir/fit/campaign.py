"""A plan of measurements: a TOML file of operators, dtypes and extents → the rows to measure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import exp, log
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np

from gpuir.files import read_toml
from gpuir.fit.benchmarks import BENCHMARKS
from gpuir.ir.errors import UsageError, nearest
from gpuir.targets.spec import spec_folder

TABLES = ("grid", "rows", "draw")
MOST_PROBLEMS = 1_000_000
MOST_EXTENT = 1 << 40


@dataclass(frozen=True)
class Problem:
    """One row to measure: an operator of `benchmarks`, a dtype, its extents in their order."""

    op: str
    dtype: str
    extents: tuple[tuple[str, int], ...]

    @property
    def shape(self) -> dict[str, int]:
        return dict(self.extents)

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {' '.join(f'{c}={n}' for c, n in self.extents)}"


def shipped_plan(name: str) -> Path:
    """A plan that comes with gpuir: `calibrate`, `calibrate-cpu`, `collect` or `collect-cpu`."""
    return spec_folder() / "plans" / f"{name}.toml"


def read_plan(path: Path) -> tuple[Problem, ...]:
    """The rows of a plan, each once, in its order; UsageError at the first thing wrong.

    `[[grid]]` gives lists of extents and means all combinations, `[[rows]]` lists `columns` and
    their rows, `[[draw]]` draws `count` shapes evenly on a logarithmic scale, each extent
    `{ from = 1, to = 8192, step = 8 }`, by the plan's `seed`. An extent that is one number is that
    number throughout.
    """
    raw = read_toml(path, "the plan", fix="check the path")
    seed = raw.pop("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        _refuse(path, "seed must be a whole number", found=repr(seed))
    for name in raw:
        if name not in TABLES:
            _refuse(path, f"no entry has the name {name}", fix=nearest(name, ("seed", *TABLES)))
    problems: dict[Problem, None] = {}
    draw = np.random.default_rng(seed)
    for table in TABLES:
        entries = raw.get(table, [])
        if not _is_list(entries, dict):
            _refuse(path, f"{table} must be a list of tables", fix=f"write [[{table}]]")
        for i, entry in enumerate(entries):
            where = f"{path}:{table}[{i}]"
            for problem in _problems(table, {**entry}, where, draw):
                problems[problem] = None
            if len(problems) > MOST_PROBLEMS:
                most = f"more than {MOST_PROBLEMS:,} rows"
                _refuse(where, most, fix="use fewer extents, or draw some")
    if not problems:
        _refuse(path, "the plan has no rows", fix="add a [[grid]], [[rows]] or [[draw]]")
    return tuple(problems)


def _problems(
    table: str, entry: dict[str, Any], where: str, draw: np.random.Generator
) -> Iterator[Problem]:
    op, dtypes = entry.pop("op", None), entry.pop("dtypes", None)
    ops = [op] if isinstance(op, str) else op
    if not _is_list(ops, str) or not ops:
        _refuse(where, "op is missing", fix='write op = "linear", or a list of operators')
    for op in ops:
        if op not in BENCHMARKS:
            _refuse(where, f"no such operator: {op}", fix=nearest(op, BENCHMARKS))
        if not _is_list(dtypes, str) or not dtypes:
            _refuse(where, "dtypes must be a list of names", fix='write dtypes = ["f32", "f16"]')
        for dtype in dtypes:
            if dtype not in BENCHMARKS[op].dtypes:
                known = BENCHMARKS[op].dtypes
                _refuse(where, f"{op} cannot be measured in {dtype}", fix=nearest(dtype, known))
        columns = BENCHMARKS[op].columns
        for dtype, shape in product(dtypes, _SHAPES[table](dict(entry), columns, where, draw)):
            yield Problem(op, dtype, tuple((c, shape[c]) for c in columns))


def _grid(
    entry: dict[str, Any], columns: tuple[str, ...], where: str, draw: np.random.Generator
) -> list[dict[str, int]]:
    _check_columns(entry, columns, where)
    lists = [_extents(entry[c], c, where) for c in columns]
    return [dict(zip(columns, row, strict=True)) for row in product(*lists)]


def _listed(
    entry: dict[str, Any], columns: tuple[str, ...], where: str, draw: np.random.Generator
) -> list[dict[str, int]]:
    named, rows = entry.pop("columns", None), entry.pop("rows", None)
    if not _is_list(named, str) or not _is_list(rows, list):
        fix = 'write columns = ["m", "n"] and rows = [[1, 2], [3, 4]]'
        _refuse(where, "columns or rows are missing", fix=fix)
    _check_columns({**entry, **dict.fromkeys(named)}, columns, where)
    constant = {c: _extents(v, c, where)[0] for c, v in entry.items()}
    shapes: list[dict[str, int]] = []
    for row in rows:
        if len(row) != len(named):
            _refuse(where, f"a row must have {len(named)} numbers", found=str(row))
        values = (_extents(v, c, where)[0] for v, c in zip(row, named))
        shapes.append(constant | dict(zip(named, values, strict=True)))
    return shapes


def _drawn(
    entry: dict[str, Any], columns: tuple[str, ...], where: str, draw: np.random.Generator
) -> list[dict[str, int]]:
    count = entry.pop("count", None)
    if type(count) is not int or not 0 < count <= MOST_PROBLEMS:
        _refuse(where, "count must be a number of rows", found=repr(count), fix="write count = 100")
    _check_columns(entry, columns, where)
    spans: dict[str, tuple[int, int, int]] = {c: _span(entry[c], c, where) for c in columns}
    shapes: list[dict[str, int]] = []
    for _ in range(count):
        shape: dict[str, int] = {}
        for c, (low, high, step) in spans.items():
            value = exp(draw.uniform(log(low), log(high)))
            shape[c] = min(max(round(value / step) * step, low), high)
        shapes.append(shape)
    return shapes


_SHAPES = {"grid": _grid, "rows": _listed, "draw": _drawn}


def _check_columns(entry: Mapping[str, Any], columns: tuple[str, ...], where: str) -> None:
    for name in entry:
        if name not in columns:
            _refuse(where, f"no extent has the name {name}", fix=nearest(name, columns))
    if missing := [c for c in columns if c not in entry]:
        _refuse(where, f"{', '.join(missing)} missing", fix=f"extents are {', '.join(columns)}")


def _extents(value: Any, name: str, where: str) -> list[int]:
    values: list[Any] = value if _is_list(value, int) else [value]
    if not values or not all(type(v) is int and 0 < v < MOST_EXTENT for v in values):
        _refuse(
            where, f"{name} must be a positive whole number, or a list of them", found=str(values)
        )
    return values


def _span(value: Any, name: str, where: str) -> tuple[int, int, int]:
    if type(value) is int:
        _extents(value, name, where)
        return value, value, 1
    ends = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    step = ends.get("step", 1)
    numbers = [ends.get("from"), ends.get("to"), step]
    if not all(type(n) is int and 0 < n < MOST_EXTENT for n in numbers) or set(ends) - {
        "from",
        "to",
        "step",
    }:
        fix = f"write {name} = {{ from = 1, to = 8192, step = 8 }}"
        _refuse(where, f"{name} is not a valid range", found=str(ends or ""), fix=fix)
    low, high, step = cast(list[int], numbers)
    if low > high:
        _refuse(where, f"{name} runs from {low} down to {high}", fix="swap them")
    return low, high, step


def _is_list(value: Any, of: type) -> bool:
    return isinstance(value, list) and all(isinstance(v, of) for v in cast(list[Any], value))


def _refuse(where: Any, what: str, *, found: str = "", fix: str = "") -> NoReturn:
    raise UsageError(what, where=str(where), found=found[:60], fix=fix)
