"""Specs as `gpuir targets`, `hosts`, `clusters` and `profiles` show them: all in a table, and one
with the source of each number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gpuir.cli.output import show
from gpuir.report.table import Column, Notes, Part, Report, Table, fields
from gpuir.report.units import quantity

if TYPE_CHECKING:
    from gpuir.report.answer import SpecRow

SHORT = 60  # a value of more letters is a sentence, not a cell


def show_specs(
    kind: str,
    records: Callable[[], list[dict[str, Any]]],
    parts: Iterable[Part],
    how: tuple[str, int | None, str | None],
) -> None:
    """Specs of a kind as `--format`, `--width` and `--output` say."""
    show(Report(f"gpuir.{kind}/1", lambda: parts, lambda: {kind: records()}), *how)


def spec_fields(name: str, rows: Sequence[SpecRow]) -> Table:
    """The fields of a spec, for programs."""
    return Table(rows, fields("field value unit source"), {"name": name})


def spec_parts(rows: Sequence[SpecRow]) -> Iterator[Part]:
    """Fields and their values, and behind a number the one of its source, listed below."""
    sources = {s: i for i, s in enumerate(dict.fromkeys(r.source for r in rows if r.source), 1)}
    short = [r for r in rows if r.source and len(_value(r)) <= SHORT]

    def mark(r: SpecRow) -> str:
        return f"[{sources[r.source]}]" if r.source else ""

    if words := [(r.field, f"{_value(r)}  {mark(r)}") for r in rows if r not in short]:
        yield Notes(words, max(len(field) for field, _ in words) + 2)
    yield Table(
        short,
        (
            Column("field", value="field"),
            Column("value", "number", text=_value),
            Column("source", text=mark),
        ),
    )
    if sources:
        yield Notes([(f"[{i}]", source) for source, i in sources.items()], 5)


def _value(r: SpecRow) -> str:
    value = r.value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return quantity(float(value), r.unit, 4)
    return ", ".join(value) if isinstance(value, tuple) else value
