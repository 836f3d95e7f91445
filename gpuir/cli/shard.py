"""`gpuir shard`: tables of embeddings over the GPUs of a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpuir.cli import options
from gpuir.cli.output import check_ahead, show

if TYPE_CHECKING:
    from gpuir.plan.sharding import Found, Way

OPTIMIZERS = ("sgd", "rowwise-adagrad", "adagrad", "adam")


@click.command()
@click.argument("tables", type=click.Path())
@click.option("--cluster", required=True, help="A cluster: dgx-a100, 8xh100-sxm, my.toml.")
@click.option(
    "--batch", type=click.IntRange(1, 1 << 40), default=65536, show_default=True,
    help="Samples of a step, all GPUs together.",
)  # fmt: skip
@click.option(
    "--optimizer", type=click.Choice(OPTIMIZERS), default="rowwise-adagrad", show_default=True,
    help="Of the tables: its state takes memory.",
)  # fmt: skip
@click.option("--inference", is_flag=True, help="Lookups alone: no gradients, no state.")
@click.option("--cut", help="Ways to place a table, of table,column,row,data.  [all]")
@click.option(
    "--memory", type=options.Finite(0.01, 1),
    default=0.8, show_default=True, help="The share of a GPU's memory that tables may take.",
)  # fmt: skip
@click.option(
    "--seconds", type=options.Finite(0, 3600), default=20.0, show_default=True,
    help="For the exact solver; 0 leaves it out.",
)  # fmt: skip
@options.formats()
@options.width
@options.output
def command(tables: str, cluster: str, **given: Any) -> None:
    """Place embedding TABLES on the GPUs of a cluster.

    TABLES is a .json, .toml or .csv file. A table may stay whole, be split by columns or rows, or
    be copied to every GPU. gpuir looks for the fastest step in which everything fits in memory.

    \b
    gpuir shard tables.json --cluster dgx-a100
    gpuir shard tables.csv --cluster 16xh100-sxm --cut table,row --format json -o plan.json
    """
    from gpuir.backends.sharding import sharding_report
    from gpuir.plan.exchange import collective_of
    from gpuir.plan.sharding import Setting
    from gpuir.plan.tables import read_tables
    from gpuir.targets.cluster import load_cluster

    check_ahead(given["output"])
    found_tables = read_tables(tables)
    machine = load_cluster(cluster)
    setting = Setting(
        machine.target,
        machine.gpus,
        machine.target.dram.bytes * given["memory"],
        given["batch"],
        collective_of(machine),
        given["optimizer"],
        _ways(given["cut"]),
        not given["inference"],
    )
    found = _found(found_tables, setting, given["seconds"])
    head = {
        "cluster": machine.name,
        "batch": given["batch"],
        "optimizer": None if given["inference"] else given["optimizer"],
        "memory_bytes_a_gpu": setting.memory_bytes,
    }
    title = f"{tables}: {len(found_tables):,} tables on {machine.name}, batch {given['batch']:,}"
    notes = [
        f"tables may take {given['memory']:.0%} of a GPU's memory (--memory)",
        *machine.assumed,
        *_assumed(found),
    ]
    show(sharding_report(found, head, title, notes), given)


def _ways(text: str | None) -> tuple[Way, ...]:
    from gpuir.ir.errors import UsageError, nearest
    from gpuir.plan.sharding import WAYS as ALL

    names = [name.strip() for name in text.split(",")] if text else list(ALL)
    for name in names:
        if name not in ALL:
            raise UsageError(
                f"--cut: {name!r} is not a way to place a table",
                expected=", ".join(ALL),
                fix=nearest(name, ALL),
            )
    return tuple(way for way in ALL if way in names)


def _found(tables: Any, setting: Any, seconds: float) -> Found:
    from gpuir.plan.milp import solver
    from gpuir.plan.sharding import shard

    return shard(tables, setting, solver(seconds) if seconds and setting.gpus > 1 else None)


def _assumed(found: Found) -> list[str]:
    notes = [
        "a GPU looks all its tables up in one launch, and updates them in one; sums travel in f32",
    ]
    if all(p.table.spread.is_uniform for p in found.plan.placements):
        notes.append("every row of a table is looked up equally often (field `indices`)")
    if any(p.option.way == "row" for p in found.plan.placements):
        notes.append("rows are distributed one by one, the most frequent rows first")
    return notes
