"""`gpuir hosts`: the machines that launch kernels, and where their numbers come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gpuir.cli import options
from gpuir.cli.output import emit, layout

if TYPE_CHECKING:
    from gpuir.backends.terminal import Page
    from gpuir.targets.host import HostMachine


@click.command()
@click.argument("name", required=False)
@options.width
@options.output
def command(name: str | None, width: int | None, output: str | None) -> None:
    """List host machines, or show one with its sources.

    \b
    gpuir hosts
    gpuir hosts dgx-1
    gpuir hosts my-host.toml           your own, from gpuir calibrate --host
    """
    from gpuir.backends.terminal import Page
    from gpuir.cli.targets import show_rows
    from gpuir.targets.host import host_names, load_host

    shape = layout(width, output)
    page = Page(shape.width, shape.color)
    if name is not None:
        show_rows(load_host(name).rows(), page)
    else:
        show_all([load_host(x) for x in host_names()], page)
    emit(page.text(), output)


def show_all(hosts: list[HostMachine], page: Page) -> None:
    from gpuir.report.table import Column, Table
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
    page.part(Table(hosts, columns))
    page.line()
    page.line("slower: how many times as long as on the reference one thread's work takes")
    page.line("off by: in 80 % of cases it is no more than so many times longer or shorter")
    page.line("of: targets that are taken to be in it, unless --host says otherwise")
    page.line("`gpuir hosts NAME` has every number, and where it comes from")
