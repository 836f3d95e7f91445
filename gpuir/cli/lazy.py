"""Groups of commands whose modules stay unread until one is called."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import ClassVar

import click


def _hush(ctx: click.Context, _: click.Parameter, quiet: bool) -> None:
    from gpuir.cli.output import listen

    if quiet:
        listen(logging.WARNING)


QUIET = click.Option(
    ["-q", "--quiet"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_hush,
    help="No notes on stderr: warnings and errors alone.",
)


def quietable(command: click.Command) -> click.Command:
    """The command with `--quiet`, and so its subcommands."""
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            quietable(subcommand)
    elif QUIET not in command.params:
        command.params.append(QUIET)
    return command


class LazyGroup(click.Group):
    """A subcommand is the function `command` of the module that `modules` has under its name."""

    modules: ClassVar[Mapping[str, str]]

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        command = quietable(import_module(self.modules[cmd_name]).command)
        command.name = cmd_name  # not that of the function, for what lists commands
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.modules and not name.startswith("-"):
            from gpuir.ir.errors import nearest

            ctx.fail(f"no command {name!r}: {nearest(name, self.modules)}")
        return super().resolve_command(ctx, args)
