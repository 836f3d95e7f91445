"""Reports and records for programs: as JSON, whose names are those of their fields, and as CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from io import StringIO
from math import isnan
from typing import Any, cast

from gpuir.backends.terminal import Terminal, printable
from gpuir.report.table import Column, Report, Table

FORMULA = ("=", "+", "-", "@")  # and tabs and returns, which are no more here


def to_json(report: Report, _: Terminal) -> str:
    """The fields of a report, as an object that names its schema."""
    return json_text(report.schema, **report.fields())


def to_csv(report: Report, _: Terminal) -> str:
    """The rows of a report's tables; yes is 1, no is 0, and what is not known is empty."""
    rows = flat_rows(report)
    titles = list(dict.fromkeys(title for row in rows for title in row))
    return "".join(map(csv_line, (titles, *([row.get(t) for t in titles] for row in rows))))


def flat_rows(report: Report) -> list[dict[str, Any]]:
    """The rows of a report's tables, each with what all rows of its table share, as cells."""
    rows = [
        {**table.context, **dict(x for c in named for x in _cells(c, row))}
        for table in tables_in(report.fields())
        for named in [[c for c in table.columns if c.field]]
        for row in table.rows
    ]
    names = {name for row in rows for name in row}
    parts = {name.rpartition(".")[0] for name in names}
    for name in names & parts:  # a record that a row does not have
        for row in rows:
            row.pop(name, None)
    return rows


def tables_in(value: object) -> Iterator[Table]:
    """The tables among the fields of a record."""
    match value:
        case Table():
            yield value
        case Mapping():
            for x in cast(Mapping[str, object], value).values():
                yield from tables_in(x)
        case list() | tuple():
            for x in cast(Sequence[object], value):
                yield from tables_in(x)
        case _:
            return


def _cells(c: Column, row: object) -> Iterator[tuple[str, Any]]:
    value = plain(c.of(row))
    if c.inline:
        for name, x in cast(dict[str, Any], value or {}).items():
            yield from _flat(name, x)
    else:
        yield from _flat(c.field, value)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value as cells: of an interval the ends `low_s` and `high_s`, of a record its fields behind
    its name and a point, of a list its words. A list of records has no place in a row."""
    match value:
        case _ if name.endswith(("interval", "interval_s")):
            head = name.rpartition("interval")[0]
            yield from zip((f"{head}low_s", f"{head}high_s"), value or (None, None), strict=True)
        case dict():
            for inner, x in cast(dict[str, Any], value).items():
                yield from _flat(f"{name}.{inner}", x)
        case list():
            words = cast(list[object], value)
            if words and not any(isinstance(x, dict | list) for x in words):
                yield name, " ".join(map(str, words))
        case _:
            yield name, value


def json_text(schema: str, /, **parts: object) -> str:
    """A JSON object that names its schema. A table is its rows, or what it has in their place."""

    def rows(table: Table) -> Any:
        return plain((table.nested or table.records)())

    record = {"schema": schema, **plain(parts)}
    return json.dumps(record, indent=1, allow_nan=False, default=rows) + "\n"


def record(x: object, names: str = "", /, **more: object) -> dict[str, Any]:
    """A record as a JSON object: all its fields, or those of these names, properties too, then
    what is said in `more` of what it has under another name or not at all."""
    chosen = names.split() or ([f.name for f in fields(x)] if is_dataclass(x) else [])
    return plain({name: getattr(x, name) for name in chosen} | more)


def plain(value: object) -> Any:
    """A value of JSON: records and mappings as objects, tuples as lists, what is not known as
    null. A table stays one."""
    match value:
        case float():
            return None if isnan(value) else value
        case Table():
            return value
        case Mapping():
            return {k: plain(v) for k, v in cast(Mapping[str, object], value).items()}
        case list():
            return [plain(v) for v in cast(list[object], value)]
        case tuple():
            named = getattr(cast(object, value), "_asdict", None)
            return plain(named()) if named else [plain(v) for v in cast(tuple[object, ...], value)]
        case _ if is_dataclass(value):
            return record(value)
        case _:
            return value


def csv_line(cells: Sequence[object]) -> str:
    """One row. What cannot be seen becomes `?`, and a word that a spreadsheet would take for a
    formula gets an apostrophe before it, as OWASP's "CSV Injection" advises."""
    out = StringIO()
    csv.writer(out, lineterminator="\n").writerow(map(_cell, cells))
    return out.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(FORMULA) else text
