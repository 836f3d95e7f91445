"""`gpuir hosts`: the machines that launch kernels, and where their numbers come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from gpuir.cli import options

if TYPE_CHECKING:
    from gpuir.report.table import Part
    from gpuir.targets.host import HostMachine


@click.command()
@click.argument("name", required=False)
@options.formats()
@options.width
@options.output
def command(name: str | None, format: str, width: int | None, output: str | None) -> None:
    """List host machines, or show one with its sources.

    \b
    gpuir hosts
    gpuir hosts dgx-1
    gpuir hosts my-host.toml           your own, from gpuir calibrate --host
    """
    from gpuir.cli.specs import show_specs, spec_fields, spec_parts
    from gpuir.targets.host import host_names, load_host

    hosts = [load_host(x) for x in ((name,) if name else host_names())]
    show_specs(
        "hosts",
        lambda: [{"name": h.name, "fields": spec_fields(h.name, h.rows())} for h in hosts],
        spec_parts(hosts[0].rows()) if name else parts_of_all(hosts),
        (format, width, output),
    )


def parts_of_all(hosts: Sequence[HostMachine]) -> Iterator[Part]:
    from gpuir.report.table import Column, Notes, Table
    from gpuir.targets.load import load_target, target_names

    usual: dict[str, list[str]] = {}
    for target in target_names():
        usual.setdefault(load_target(target).host, []).append(target)
    columns = (
        Column("name", value="name"),
        Column("slower", "number", text=lambda h: f"{h.slowdown:.2f}"),
        Column("off by", "number", text=lambda h: f"{h.uncertainty:.2g}", drop=2),
        Column("processor", value="processor"),
        Column("of", value=lambda h: ", ".join(usual.get(h.name, ())), drop=1),
    )
    yield Table(hosts, columns)
    lines = (
        "slower: how many times as long as on the reference one thread's work takes",
        "off by: in 80 % of cases it is no more than so many times longer or shorter",
        "of: targets that are taken to be in it, unless --host says otherwise",
        "`gpuir hosts NAME` has every number, and where it comes from",
    )
    yield Notes([("", text) for text in lines], 0)
