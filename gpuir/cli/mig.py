"""`gpuir mig`: GPUs divided by MIG. Each subcommand is imported when it is called."""

from __future__ import annotations

from importlib import import_module

import click

# Of each subcommand, the module whose function `command` it is.
COMMANDS = {
    "layouts": "gpuir.cli.mig_layouts",
    "plan": "gpuir.cli.mig_plan",
    "timetable": "gpuir.cli.mig_timetable",
}


class Commands(click.Group):
    """The modules of subcommands that are not asked for stay unread."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return import_module(COMMANDS[cmd_name]).command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            from gpuir.ir.errors import nearest

            ctx.fail(f"no command {args[0]!r}: {nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.group(cls=Commands)
def command() -> None:
    """GPUs divided by MIG (Multi-Instance GPU): what goes together on one."""
