"""What a user types to have a number that `gpuir eval` scores: command lines and calls."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import click

option = click.option(
    "--commands", is_flag=True, help="Print what gives each number: a command line, or a call."
)


class Row(NamedTuple):
    """A number that is scored, in its unit, and what gives it: a command line whose JSON has it at
    `field`, or a call of Python."""

    number: float
    unit: str
    text: str
    field: str = ""


def line(command: str, model: str, options: Mapping[str, Any]) -> str:
    """`gpuir COMMAND MODEL --option value ...`. What is None, False, empty or 1 of a degree is left
    out; True is a flag, and a mapping `NAME=VALUE,...`."""
    return shlex.join(("gpuir", command, *([model] if model else ()), *_words(options)))


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is None or value is False or value in ("", {}, ()):
            continue
        if isinstance(value, Mapping):
            pairs = cast("Mapping[str, Any]", value)
            yield from (option, ",".join(f"{k}={v}" for k, v in pairs.items()))
        elif value is True:
            yield option
        else:
            yield from (option, str(value))


def report(rows: Iterable[Row]) -> str:
    """A line each: the number as it is scored, and what gives it."""
    return "".join(f"{r.number!r} {r.unit}  {r.text}\n" for r in rows)
