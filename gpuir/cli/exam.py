"""What all exams of `gpuir eval` are asked, and what a user types for a number that they score."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import click

from gpuir.cli import options
from gpuir.cli.output import check_ahead, show
from gpuir.cli.request import ask, option
from gpuir.report.table import Column, Drawing, Report, Table, fields

FILES = click.argument("files", nargs=-1, required=True, type=click.Path())


@dataclass(frozen=True)
class ExamOutput:
    """Where the scores go, or what gives each number."""

    json_path: str | None = option("Write the scores here as JSON.", "--json", type=click.Path())
    commands: bool = option("Print what gives each number: a command line, or a call.")
    format: str = ask(options.formats())
    width: int | None = ask(options.width)
    output: str | None = ask(options.output)

    def check(self) -> None:
        """UsageError where the scores cannot be written, before minutes of work."""
        check_ahead(self.json_path)

    def show(self, report: Report) -> None:
        """As `--format` says, and as JSON in the file of `--json`."""
        if self.json_path:
            show(report, "json", self.width, self.json_path)
        if self.json_path != "-":
            show(report, self.format, self.width, self.output)


class ScoredRow(NamedTuple):
    """A number that is scored, in its unit, and what gives it: a command line whose JSON has it at
    `field`, or a call of Python. Without either `field` says why."""

    number: float
    unit: str
    text: str
    field: str = ""


def commands_report(kind: str, rows: Iterable[ScoredRow]) -> Report:
    """A line each: the number as it is scored, and what gives it."""
    table = Table(
        list(rows),
        (
            *fields("number unit"),
            Column(field="command", value=lambda r: r.text or None),
            Column(field="field", value=lambda r: r.field if r.text else None),
            Column(field="why", value=lambda r: None if r.text else r.field),
        ),
        {"kind": kind},
    )
    lines = (f"{r.number!r} {r.unit}  {r.text or f'no command: {r.field}'}" for r in table.rows)
    return Report(
        "gpuir.eval.commands/1",
        lambda: [Drawing(list(lines))],
        lambda: {"kind": kind, "numbers": table},
    )
