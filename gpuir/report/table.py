"""What a command answers: tables, and the sentences around them, for whatever writes them.

A column says how a cell is read from a row, in which unit it is, and what programs call it.
`gpuir/backends` has one writer for each format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from typing import Any

from gpuir.report.units import in_unit


@dataclass(frozen=True)
class Column:
    """A column of a table.

    `title` stands above it for people; None: only programs have it. `unit` is what
    `gpuir.report.units.in_unit` takes; words have none, and are set to the left. `field` is its
    name in JSON, CSV and Parquet, where values are in SI units; empty: only people have it. `value`
    reads a row, or is an attribute's path, which without it is `field`. `text` is the cell for
    people where it is not the value in its unit.

    On a line too short for all columns, those with the lowest `drop` go first; 0 never goes. The
    last column keeps `least` characters as long as others may go. A cell that is too long loses its
    end, or where `elided` its middle. `blank` stands for None, and for NaN. In CSV the fields of a
    record are columns behind its name and a point, or where `inline` under their own names.
    """

    title: str | None = None
    unit: str = ""
    field: str = ""
    value: Callable[[Any], Any] | str = ""
    text: Callable[[Any], str] | None = None
    _: KW_ONLY
    digits: int = 3
    blank: str = "-"
    drop: int = 0
    least: int = 8
    elided: bool = False
    inline: bool = False

    def of(self, row: Any) -> Any:
        """The value for programs."""
        value = self.value or self.field
        return attrgetter(value)(row) if isinstance(value, str) else value(row)

    def cell(self, row: Any) -> str:
        """The text for people."""
        if self.text is not None:
            return self.text(row)
        value = self.of(row)
        if value is None or value != value:
            return self.blank
        return in_unit(value, self.unit, self.digits)


def fields(names: str, of: str = "") -> tuple[Column, ...]:
    """Columns that only programs have: attributes of the row, or of its part `of`."""
    return tuple(Column(field=name, value=f"{of}.{name}" if of else name) for name in names.split())


@dataclass(frozen=True)
class Table:
    """Rows under columns.

    `context` has the fields that all rows share: CSV and Parquet repeat them in each row, JSON has
    them once, in the record that holds the table. People see `top` rows, `caption` above them and
    the lines `more` below. `folded` says what the rows are, for a format that can hide them.
    `nested` is what JSON has in place of the rows, where that is no list of them.
    """

    rows: Sequence[Any]
    columns: tuple[Column, ...]
    context: Mapping[str, object] = field(default_factory=dict[str, object])
    _: KW_ONLY
    top: int | None = None
    caption: str = ""
    more: tuple[str, ...] = ()
    folded: str = ""
    nested: Callable[[], object] | None = None

    def records(self) -> list[dict[str, Any]]:
        """The rows for programs, without what they share."""
        named = [c for c in self.columns if c.field]
        return [{c.field: c.of(row) for c in named} for row in self.rows]

    def cells(self) -> tuple[list[Column], list[list[str]]]:
        """The columns that people see, and their rows; not a column without any text."""
        seen = [c for c in self.columns if c.title is not None]
        rows = [[c.cell(row) for c in seen] for row in self.rows[: self.top]]
        kept = [i for i in range(len(seen)) if any(row[i] for row in rows)]
        return [seen[i] for i in kept], [[row[i] for i in kept] for row in rows]


@dataclass(frozen=True)
class Heading:
    """What the parts behind it are about. `remark` is a line below it."""

    text: str
    remark: str = ""


@dataclass(frozen=True)
class Notes:
    """Sentences, each with its label, in a margin of so many characters; a sentence without a label
    goes on from the one before. `title` stands above."""

    lines: Iterable[tuple[str, str]]
    margin: int = 11
    title: str = ""


@dataclass(frozen=True)
class Drawing:
    """A picture in letters."""

    lines: Sequence[str]
    title: str = ""


Part = Heading | Notes | Drawing | Table


@dataclass(frozen=True)
class Report:
    """An answer. Each part is made when a format asks for it: `parts` for people, the fields of the
    JSON object of that `schema`. CSV and Parquet hold the tables among its fields, one below the
    other.
    """

    schema: str
    parts: Callable[[], Iterable[Part]]
    fields: Callable[[], Mapping[str, object]]
