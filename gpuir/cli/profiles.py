"""`gpuir profiles`: the software stacks there are, what they fuse, and where their numbers come
from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from gpuir.cli import options
from gpuir.cli.modules import Loaded
from gpuir.cli.output import warn

if TYPE_CHECKING:
    from gpuir.report.table import Part
    from gpuir.targets.profile import Host, Profile


@click.command()
@click.argument("name", required=False)
@options.formats()
@options.width
@options.output
@options.load_modules
def command(
    name: str | None, format: str, width: int | None, output: str | None, loaded: Loaded
) -> None:
    """List software stacks, or show one: passes, numbers, sources.

    \b
    gpuir profiles
    gpuir profiles eager
    """
    import gpuir
    from gpuir.cli.specs import show_specs, spec_fields, spec_parts

    asked = (name,) if name else loaded.profiles
    found = {} if name else {p.name: p for p in installed()}
    found |= {p.name: p for p in map(gpuir.load_profile, map(loaded.profile, asked))}
    profiles = list(found.values())
    show_specs(
        "profiles",
        lambda: [{"name": p.name, "fields": spec_fields(p.name, p.rows())} for p in profiles],
        spec_parts(profiles[0].rows()) if name else parts_of_all(profiles),
        (format, width, output),
    )


def installed() -> Iterator[Profile]:
    """Every profile by name that can be loaded; of a plug-in's that cannot, a warning."""
    import gpuir
    from gpuir.ir.errors import PluginError, TargetError

    for name in gpuir.profile_names():
        try:
            yield gpuir.load_profile(name)
        except (PluginError, TargetError) as error:
            warn(str(error))


def parts_of_all(profiles: Sequence[Profile]) -> Iterator[Part]:
    from gpuir.report.table import Column, Notes, Table

    columns = (
        Column("name", value="name"),
        Column("tf32", value="tf32", drop=1),
        Column("an op", "s", value=lambda p: each_s(p.host)[0] or None),
        Column("a call", "s", value=lambda p: each_s(p.host)[1] or None),
        Column("stack", value="title"),
    )
    yield Table(profiles, columns)
    lines = (
        "an op: what the host takes for one pointwise kernel; a call: once, before the first",
        "`gpuir profiles NAME` has the passes, every number, and where it comes from",
    )
    yield Notes([("", text) for text in lines], 0)


def each_s(host: Host) -> tuple[float, float]:
    """What an op of one pointwise kernel takes the host, T1 to T4, and a call besides; in a graph
    the call has the only launch."""
    if host.graph:
        return 0.0, host.call_s + host.launch_s
    op = host.between_s + host.before.get("map", host.before_s) + host.launch_s + host.after_s
    return op, host.call_s
