"""`gpuir profiles`: the software stacks there are, what they fuse, and where their numbers come
from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpuir.cli import options
from gpuir.cli.modules import load_modules
from gpuir.cli.output import emit

if TYPE_CHECKING:
    from gpuir.backends.terminal import Page
    from gpuir.targets.profile import Profile


@click.command()
@click.argument("name", required=False)
@click.option("--width", type=click.IntRange(40), help="Columns of the table.  [the terminal's]")
@options.output
@options.load_modules
def command(
    name: str | None, width: int | None, output: str | None, modules: tuple[str, ...]
) -> None:
    """The profiles there are, or all about one: its passes, its numbers, and who says so.

    \b
    gpuir profiles
    gpuir profiles eager
    """
    import gpuir
    from gpuir.backends.terminal import Page
    from gpuir.cli.analyze import layout

    loaded = load_modules(modules)
    shape = layout(width, output)
    page = Page(shape.width, shape.color)
    if name is not None:
        show_one(gpuir.load_profile(loaded.profile(name)), page)
    else:
        show_all([gpuir.load_profile(n) for n in (*gpuir.profile_names(), *loaded.profiles)], page)
    emit(page.text(), output)


def show_all(profiles: list[Profile], page: Page) -> None:
    columns = [("name", False), ("tf32", False), ("stack", False)]
    page.table(columns, [(p.name, p.tf32, p.title) for p in profiles])


def show_one(p: Profile, page: Page) -> None:
    from gpuir.cli.targets import show_rows

    show_rows(p.rows(), page)
