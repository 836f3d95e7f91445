"""`gpuir shard`: tables of embeddings over the GPUs of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from gpuir.cli import options
from gpuir.cli.output import show
from gpuir.cli.request import ask, option, request

if TYPE_CHECKING:
    from gpuir.plan.sharding import FoundPlacement, Way

OPTIMIZERS = ("sgd", "rowwise-adagrad", "adagrad", "adam")


@dataclass(frozen=True)
class ShardOptions:
    tables: str = ask(click.argument("tables", type=click.Path()))
    cluster: str = option("A cluster: dgx-a100, 8xh100-sxm, my.toml.", required=True)
    batch: int = option(
        "Samples of a step, all GPUs together.", type=click.IntRange(1, 1 << 40), default=65536
    )
    optimizer: str = option(
        "Of the tables: its state takes memory.",
        type=click.Choice(OPTIMIZERS),
        default="rowwise-adagrad",
    )
    inference: bool = option("Lookups alone: no gradients, no state.")
    cut: str | None = option("Ways to place a table, of table,column,row,data.  [all]")
    memory: float = option(
        "The share of a GPU's memory that tables may take.",
        type=options.Finite(0.01, 1),
        default=0.8,
    )
    seconds: float = option(
        "For the exact solver; 0 leaves it out.", type=options.Finite(0, 3600), default=20.0
    )
    format: str = ask(options.formats())
    width: int | None = ask(options.width)
    output: str | None = ask(options.output)


@request(ShardOptions)
def command(asked: ShardOptions) -> None:
    """Place embedding TABLES on the GPUs of a cluster.

    TABLES is a .json, .toml or .csv file. A table may stay whole, be split by columns or rows, or
    be copied to every GPU. gpuir looks for the fastest step in which everything fits in memory.

    \b
    gpuir shard tables.json --cluster dgx-a100
    gpuir shard tables.csv --cluster 16xh100-sxm --cut table,row --format json -o plan.json
    """
    from gpuir.backends.sharding import sharding_report
    from gpuir.plan.exchange import collective_of
    from gpuir.plan.sharding import PlacementSetting
    from gpuir.plan.tables import read_tables
    from gpuir.targets.cluster import load_cluster

    found_tables = read_tables(asked.tables)
    machine = load_cluster(asked.cluster)
    setting = PlacementSetting(
        machine.target,
        machine.gpus,
        memory_bytes=machine.target.dram.bytes * asked.memory,
        batch=asked.batch,
        collective=collective_of(machine),
        optimizer=asked.optimizer,
        ways=_ways(asked.cut),
        train=not asked.inference,
    )
    found = _found(found_tables, setting, asked.seconds)
    head = {
        "cluster": machine.name,
        "batch": asked.batch,
        "optimizer": None if asked.inference else asked.optimizer,
        "memory_bytes_a_gpu": setting.memory_bytes,
    }
    title = f"{asked.tables}: {len(found_tables):,} tables on {machine.name}, batch {asked.batch:,}"
    notes = [
        f"tables may take {asked.memory:.0%} of a GPU's memory (--memory)",
        *machine.assumed,
        *_assumed(found),
    ]
    show(sharding_report(found, head, title, notes), asked.format, asked.width, asked.output)


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


def _found(tables: Any, setting: Any, seconds: float) -> FoundPlacement:
    from gpuir.plan.milp import solver
    from gpuir.plan.sharding import shard

    return shard(tables, setting, solver(seconds) if seconds and setting.gpus > 1 else None)


def _assumed(found: FoundPlacement) -> list[str]:
    notes = [
        "a GPU looks all its tables up in one launch, and updates them in one; sums travel in f32",
    ]
    if all(p.table.spread.is_uniform for p in found.plan.placements):
        notes.append("every row of a table is looked up equally often (field `indices`)")
    if any(p.option.way == "row" for p in found.plan.placements):
        notes.append("rows are distributed one by one, the most frequent rows first")
    return notes
