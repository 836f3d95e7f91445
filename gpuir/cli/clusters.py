"""`gpuir clusters`: what joins GPUs, from inside out, and where the numbers come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from gpuir.cli import options

if TYPE_CHECKING:
    from gpuir.report.table import Part
    from gpuir.targets.cluster import Cluster


@click.command()
@click.argument("name", required=False)
@options.formats()
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
    from gpuir.cli.specs import show_specs
    from gpuir.targets.cluster import cluster_names, load_cluster

    clusters = [load_cluster(n) for n in ((name,) if name else cluster_names())]
    parts = parts_of(clusters[0]) if name else parts_of_all(clusters)
    show_specs("clusters", lambda: list(map(fields_of, clusters)), parts, (format, width, output))


def parts_of_all(clusters: Sequence[Cluster]) -> Iterator[Part]:
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
    yield Table(clusters, columns)
    text = "Rates of one GPU in one direction. 16xdgx-h100 are sixteen nodes of dgx-h100."
    yield Notes([("", text)], 0)


def parts_of(cluster: Cluster) -> Iterator[Part]:
    from gpuir.cli.specs import spec_parts
    from gpuir.report.table import Heading, Notes

    if cluster.kinds:
        count = f"{cluster.gpus} GPUs of {len(cluster.stretches)} kinds of nodes"
    else:
        count = f"{cluster.gpus} GPUs, {cluster.node_gpus} in a node"
    yield Notes([("", count)], 0)
    yield from spec_parts([row for row in cluster.rows() if row.field != "assumed"])
    if cluster.assumed:
        yield Notes([("assumed", text) for text in cluster.assumed], 9)
    for x in cluster.stretches if cluster.kinds else ():
        yield Heading(f"ranks {x.first} to {x.end - 1}: {x.cluster.name}")
        yield from parts_of(replace(x.cluster, assumed=()))


def fields_of(c: Cluster) -> dict[str, Any]:
    """A cluster; of several kinds, with the ranks and the cluster of each."""
    from gpuir.backends.structured import record
    from gpuir.cli.specs import spec_fields

    kinds = [
        {"first": x.first, "count": x.end - x.first, "cluster": fields_of(x.cluster)}
        for x in c.stretches
        if c.kinds
    ]
    names, own = "name gpu gpus node_gpus nodes assumed", {"fields": spec_fields(c.name, c.rows())}
    return record(c, names, **own, **({"kinds": kinds} if kinds else {}))
