"""`gpuir profiles`: the software stacks there are, what they fuse, and where their numbers come
from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from gpuir.cli import options
from gpuir.cli.modules import Loaded
from gpuir.cli.output import emit, layout, warn

if TYPE_CHECKING:
    from gpuir.backends.terminal import Page
    from gpuir.targets.profile import Host, Profile


@click.command()
@click.argument("name", required=False)
@options.width
@options.output
@options.load_modules
def command(name: str | None, width: int | None, output: str | None, loaded: Loaded) -> None:
    """List software stacks, or show one: passes, numbers, sources.

    \b
    gpuir profiles
    gpuir profiles eager
    """
    import gpuir
    from gpuir.backends.terminal import Page

    shape = layout(width, output)
    page = Page(shape.width, shape.color)
    if name is not None:
        show_one(gpuir.load_profile(loaded.profile(name)), page)
    else:
        found = {p.name: p for p in installed()}
        found |= {p.name: p for p in map(gpuir.load_profile, map(loaded.profile, loaded.profiles))}
        show_all(list(found.values()), page)
    emit(page.text(), output)


def installed() -> Iterator[Profile]:
    """Every profile by name that can be loaded; of a plug-in's that cannot, a warning."""
    import gpuir
    from gpuir.ir.errors import PluginError, TargetError

    for name in gpuir.profile_names():
        try:
            yield gpuir.load_profile(name)
        except (PluginError, TargetError) as error:
            warn(str(error))


def show_all(profiles: list[Profile], page: Page) -> None:
    from gpuir.report.table import Column, Table

    columns = (
        Column("name", value="name"),
        Column("tf32", value="tf32", drop=1),
        Column("an op", "s", value=lambda p: each_s(p.host)[0] or None),
        Column("a call", "s", value=lambda p: each_s(p.host)[1] or None),
        Column("stack", value="title"),
    )
    page.part(Table(profiles, columns))
    page.line()
    page.line("an op: what the host takes for one pointwise kernel; a call: once, before the first")
    page.line("`gpuir profiles NAME` has the passes, every number, and where it comes from")


def each_s(host: Host) -> tuple[float, float]:
    """What an op of one pointwise kernel takes the host, T1 to T4, and a call besides; in a graph
    the call has the only launch."""
    if host.graph:
        return 0.0, host.call_s + host.launch_s
    op = host.between_s + host.before.get("map", host.before_s) + host.launch_s + host.after_s
    return op, host.call_s


def show_one(p: Profile, page: Page) -> None:
    from gpuir.cli.targets import show_rows

    show_rows(p.rows(), page)
