"""`gpuir clusters`: what joins GPUs, from inside out, and where the numbers come from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from gpuir.cli import options
from gpuir.cli.output import emit, layout

if TYPE_CHECKING:
    from gpuir.backends.terminal import Page
    from gpuir.targets.cluster import Cluster


@click.command()
@click.argument("name", required=False)
@click.option("--format", type=click.Choice(["table", "json"]), default="table")
@options.width
@options.output
def command(name: str | None, format: str, width: int | None, output: str | None) -> None:
    """List clusters, or show the numbers of one and their sources.

    \b
    gpuir clusters                     what there is
    gpuir clusters dgx-h100            its numbers, and who says so
    gpuir clusters 16xdgx-h100         sixteen such nodes
    gpuir clusters 8xl40s              one node of a GPU with its usual links
    gpuir clusters 2xdgx-h100+2xdgx-a100   nodes of several kinds on one fabric
    gpuir clusters my.toml             your own
    """
    from gpuir.backends.terminal import Page
    from gpuir.targets.cluster import cluster_names, load_cluster

    clusters = [load_cluster(n) for n in ((name,) if name else cluster_names())]
    if format == "json":
        emit(json_text(clusters), output)
        return
    shape = layout(width, output)
    page = Page(shape.width, shape.color)
    if name:
        show_one(clusters[0], page)
    else:
        show_all(clusters, page)
    emit(page.text(), output)


def show_all(clusters: list[Cluster], page: Page) -> None:
    from gpuir.report.table import Column, Notes, Table
    from gpuir.targets.cluster import describe

    def fastest(c: Cluster) -> float:
        return max(x.bytes_per_s for name, x in c.levels if name != "fabric")

    def inside(c: Cluster) -> str:
        return describe([x for x in c.levels if x[0] != "fabric"])

    columns = (
        Column("name", value="name"),
        Column("GPUs", "number", text=lambda c: str(c.gpus)),
        Column("inside a node", value=inside),
        Column("of one GPU", "bytes/s", value=fastest),
        Column("between nodes", value=lambda c: c.fabric and c.fabric.technology),
        Column("of one GPU", "bytes/s", value=lambda c: c.fabric and c.fabric.bytes_per_s),
    )
    page.part(Table(clusters, columns))
    page.line()
    text = "Rates of one GPU in one direction. 16xdgx-h100 are sixteen nodes of dgx-h100."
    page.part(Notes([("", text)], 0))


def show_one(cluster: Cluster, page: Page) -> None:
    from gpuir.cli.targets import show_rows

    if cluster.kinds:
        page.line(f"{cluster.gpus} GPUs of {len(cluster.stretches)} kinds of nodes")
    else:
        page.line(f"{cluster.gpus} GPUs, {cluster.node_gpus} in a node")
    show_rows([row for row in cluster.rows() if row.field != "assumed"], page)
    for text in cluster.assumed:
        page.wrapped("assumed", text, 9)
    for x in cluster.stretches if cluster.kinds else ():
        page.line()
        page.heading(f"ranks {x.first} to {x.end - 1}: {x.cluster.name}")
        show_one(replace(x.cluster, assumed=()), page)


def json_text(clusters: list[Cluster]) -> str:
    """A list of clusters, each a list of its fields with value, unit and source."""
    from gpuir.backends import structured

    names = "name gpu gpus node_gpus nodes assumed"

    def listed(c: Cluster) -> dict[str, object]:
        """A cluster; of several kinds, with the ranks and the cluster of each."""
        kinds = [
            {"first": x.first, "count": x.end - x.first, "cluster": listed(x.cluster)}
            for x in c.stretches
            if c.kinds
        ]
        return structured.record(c, names, fields=c.rows(), **({"kinds": kinds} if kinds else {}))

    return structured.json_text("gpuir.clusters/1", clusters=list(map(listed, clusters)))
