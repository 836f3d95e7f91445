"""Requests: options from the fields of records, and records from what is given."""

from __future__ import annotations

from dataclasses import dataclass

import click
from click.testing import CliRunner

from gpuir.cli.request import ask, held, option, request


@dataclass(frozen=True)
class Size:
    rows: int = option("How many.", type=int, default=8)
    names: tuple[str, ...] = option("What they are called.", multiple=True)
    is_wide: bool = option("Twice as many columns.", "--wide")


@dataclass(frozen=True)
class Asked:
    model: str = ask(click.argument("model"))
    size: Size = held(Size)
    last: str | None = option("The last of all.  [none]")


def given(kind: type, *args: str) -> object:
    found: list[object] = []
    request(kind)(found.append).main(list(args), standalone_mode=False)
    return found[0]


def test_a_request_is_what_was_given():
    assert given(Asked, "m") == Asked("m", Size(8, (), False), None)
    args = ("m", "--rows", "2", "--names", "a", "--names", "b", "--wide", "--last", "x")
    assert given(Asked, *args) == Asked("m", Size(2, ("a", "b"), True), "x")


def test_what_a_command_leaves_out_is_as_if_it_was_not_given():
    @dataclass(frozen=True)
    class Narrow:
        size: Size = held(Size, without="rows names")

    assert given(Narrow, "--wide") == Narrow(Size(8, (), True))
    refused = CliRunner().invoke(request(Narrow)(print), ["--rows", "2"])
    assert refused.exit_code == 2 and "No such option" in refused.output


def test_options_are_listed_in_the_order_of_fields():
    def command(asked: Asked) -> None:
        """What it does."""

    text = CliRunner().invoke(request(Asked)(command), ["--help"]).output
    options = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert options == ["--rows", "--names", "--wide", "--last", "--help"]
    assert "How many.  [default: 8]" in text and "The last of all.  [none]" in text
