"""What a user types to have a number that `gpuir eval` scores: `--commands`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import click

HELP = "Print what gives each number: a command line, or a call."
option = click.option("--commands", is_flag=True, help=HELP)


class ScoredRow(NamedTuple):
    """A number that is scored, in its unit, and what gives it: a command line whose JSON has it at
    `field`, or a call of Python. Without either `field` says why."""

    number: float
    unit: str
    text: str
    field: str = ""


def report(rows: Iterable[ScoredRow]) -> str:
    """A line each: the number as it is scored, and what gives it."""
    return "".join(f"{r.number!r} {r.unit}  {r.text or f'no command: {r.field}'}\n" for r in rows)
