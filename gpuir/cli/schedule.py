"""`gpuir schedule`: whether the tiles of a file fit a model and a target."""

from __future__ import annotations

from typing import Any

import click

from gpuir.cli import options
from gpuir.cli.modules import load_modules
from gpuir.cli.output import emit, warn


@click.group("schedule")
def command() -> None:
    """Schedules: the tiles of a model's kernels, to edit, search and apply.

    `gpuir analyze ... --format schedule` writes one, `--schedule FILE` applies it.
    """


@command.command()
@click.argument("file", type=click.Path())
@options.model
@click.option("--target", help="The GPU it is for.  [as the file says]")
@options.loading
@options.costing
@options.load_modules
def check(file: str, target: str | None, **given: Any) -> None:
    """Say of each tile in FILE whether it is legal for MODEL, and if not why.

    Exit status 1 when one is not.
    """
    raise NotImplementedError


__all__ = ["check", "command", "emit", "load_modules", "warn"]
