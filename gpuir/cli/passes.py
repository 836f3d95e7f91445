"""`gpuir passes`: what each pass does and the options it has, from its own class."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import click

from gpuir.cli import options
from gpuir.cli.modules import Loaded
from gpuir.cli.output import emit, warn

if TYPE_CHECKING:
    from gpuir.passes.manager import Pass


@click.command()
@click.argument("name", required=False)
@options.load_modules
def command(name: str | None, loaded: Loaded) -> None:
    """List passes, or show one with its options.

    \b
    gpuir passes
    gpuir passes fuse
    """
    from gpuir.ir.errors import PluginError
    from gpuir.plugins import installed
    from gpuir.stacks.table import PASSES, find_pass

    mine = loaded.passes
    if name is not None:
        emit(full(find_pass(name, mine)))
    else:
        known = {**PASSES, **mine}
        for plugin in installed("passes"):
            try:
                known.setdefault(plugin, find_pass(plugin))
            except PluginError as error:  # the others are no worse for it
                warn(str(error))
        emit("\n".join(short(p) for p in known.values()))


def short(kind: type[Pass]) -> str:
    """Its text with every option, its levels, and what it does in a sentence or two."""
    takes, gives = (
        level.name if level is not None else "any" for level in (kind.takes, kind.gives)
    )
    first = " ".join(_doc(kind).partition("\n\n")[0].split())
    fields = ",".join(f"{f.name}={_default(f)}" for f in dataclasses.fields(kind))
    head = f"{kind.name}{{{fields}}}" if fields else kind.name
    return f"{head}   {takes} -> {gives}\n{click.wrap_text(first, 100, '    ', '    ')}\n"


def full(kind: type[Pass]) -> str:
    takes, gives = (
        level.name if level is not None else "any" for level in (kind.takes, kind.gives)
    )
    lines = [f"{kind.name}: {takes} -> {gives}", "", _doc(kind), ""]
    fields = dataclasses.fields(kind)
    lines += ["options:" if fields else "no options"]
    lines += [f"    {f.name}: {_type(f)} = {_default(f)}" for f in fields]
    return "\n".join(lines) + "\n"


def _doc(kind: type[Pass]) -> str:
    return inspect.cleandoc(kind.__doc__ or "(no documentation)")


def _type(f: dataclasses.Field[Any]) -> str:
    return f.type if isinstance(f.type, str) else f.type.__name__


def _default(f: dataclasses.Field[Any]) -> str:
    if f.default is dataclasses.MISSING:
        return "..."
    if isinstance(f.default, bool):
        return str(f.default).lower()
    return '""' if f.default == "" else str(f.default)
