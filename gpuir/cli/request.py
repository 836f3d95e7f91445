"""Requests: what a command is asked, as a record. A field is an option or an argument of click's,
or a record of options that several commands take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, field, fields
from functools import wraps
from typing import Any, TypeVar

import click

R = TypeVar("R")
Option = Callable[[Any], Any]  # what click.option and click.argument give


def option(help: str, *flags: str, **how: Any) -> Any:
    """A field that an option fills: of its name unless there are `flags`, a flag if it is a bool.
    `how` is as of `click.option`. A default is shown that the help does not say in brackets."""
    shown = how.get("default") not in (None, "") and "[" not in help
    return field(metadata={"flags": flags, "how": {"help": help, "show_default": shown, **how}})


def ask(option: Option) -> Any:
    """A field that an argument, or an option of several commands, fills, whose name it has."""
    return field(metadata={"option": option})


def held(kind: type, without: str = "") -> Any:
    """A field that a record of options fills, but for some: those are as if they were not given."""
    return field(metadata={"kind": kind, "without": without.split()})


def request(kind: type[R]) -> Callable[[Callable[[R], Any]], click.Command]:
    """A command whose options are the fields of a request, in their order."""

    def decorate(command: Callable[[R], Any]) -> click.Command:
        @wraps(command)
        def asked(**values: Any) -> Any:
            return command(_made(kind, values))

        found: Callable[..., Any] = asked
        for option in reversed([*_options(kind, ())]):
            found = option(found)
        return click.command()(found)

    return decorate


def _options(kind: Any, without: Sequence[str]) -> Iterator[Option]:
    for f in (f for f in fields(kind) if f.name not in without):
        if "kind" in f.metadata:
            yield from _options(f.metadata["kind"], f.metadata["without"])
        elif "option" in f.metadata:
            yield f.metadata["option"]
        else:
            flags = f.metadata["flags"] or (f"--{f.name.replace('_', '-')}",)
            flag = f.type == "bool" or None
            yield click.option(*flags, f.name, is_flag=flag, **f.metadata["how"])


def _made(kind: Any, values: Mapping[str, Any], without: Sequence[str] = ()) -> Any:
    return kind(**{f.name: _value(f, values, f.name in without) for f in fields(kind)})


def _value(f: Field[Any], values: Mapping[str, Any], missing: bool) -> Any:
    how = f.metadata.get("how", {})
    if missing:
        return how.get("default", () if how.get("multiple") else None)
    if "kind" in f.metadata:
        return _made(f.metadata["kind"], values, f.metadata["without"])
    return values[f.name]
