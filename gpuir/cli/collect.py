"""`gpuir collect`: a campaign of measurements on the device at hand."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import click

from gpuir.cli.options import MOST_S, Finite
from gpuir.cli.output import check_ahead, emit, note, warn

if TYPE_CHECKING:
    from gpuir.fit.collect import MeasuredRow


@click.command()
@click.option("--plan", type=click.Path(), help="What to measure.  [all families, as shipped]")
@click.option("--target", help="What the device is called: cpu, a100.  [as its driver calls it]")
@click.option(
    "-o",
    "--out",
    type=click.Path(),
    default="measurements.csv",
    show_default=True,
    help="The table, csv or parquet, to write or go on with.",
)
@click.option(
    "--budget-s",
    type=Finite(0.001, MOST_S),
    default=1.0,
    show_default=True,
    help="Measure a row for about so many seconds.",
)
@click.option("--dry-run", is_flag=True, help="Say how many rows there are and how long they take.")
def command(plan: str | None, target: str | None, out: str, budget_s: float, dry_run: bool) -> None:
    """Measure the kernels of a plan on this device, into a table.

    `gpuir eval kernels` reads the table. Each row is on disk as soon as it is measured. Run the
    same command again after a crash, or with a longer plan: it measures what is missing.

    \b
    gpuir collect --target cpu -o cpu.csv
    gpuir collect --plan mine.toml --target h100 -o h100.parquet --dry-run
    """
    import gpuir
    from gpuir.fit import collect
    from gpuir.fit.campaign import read_plan, shipped_plan
    from gpuir.fit.machine import Machine, gpu_name
    from gpuir.fit.steady import doubts, waited_s
    from gpuir.ir.errors import UsageError

    check_ahead(out)
    name = target or gpu_name()
    device = gpuir.load_target(name)
    shipped = shipped_plan("collect-cpu" if device.is_cpu else "collect")
    problems = read_plan(Path(plan) if plan else shipped)
    table, journal = Path(out), Path(out)
    if table.suffix == ".parquet":
        journal = table.with_name(f"{table.name}.csv")
        if os.path.exists(table) and not os.path.exists(journal):
            raise UsageError(
                "the table does not belong to a campaign that can continue",
                where=out,
                expected=f"the file {journal} with its rows",
                fix="use another file for the output",
            )
    left = collect.remaining(problems, journal, name)
    expected_s = collect.expected_s(device, left, budget_s)
    summary = f"{len(left):,} of {len(problems):,} rows to measure, about {_duration(expected_s)}"
    if dry_run:
        emit(f"{summary}\n")
        return
    machine = Machine.of(device)
    note(f"{summary}, on {machine.provenance}")
    began, waited, done, failed = monotonic(), waited_s(), 0, 0
    rows: list[MeasuredRow] = []

    def watch(row: MeasuredRow) -> None:
        nonlocal done, failed
        rows.append(row)
        done, failed = done + 1, failed + (not row.is_measured)
        text = f"{row.latency_s * 1e6:.1f} us" if row.is_measured else f"left out: {row.note}"
        ahead_s = (monotonic() - began) / done * (len(left) - done)
        note(f"{done:,}/{len(left):,}  {row.problem}: {text}  ({_duration(ahead_s)} to go)")

    collect.collect(machine, left, journal, device=name, budget_s=budget_s, watch=watch)
    if failed:
        warn(f"{failed:,} rows could not be measured; the column `note` says why")
    share = (waited_s() - waited) / max(monotonic() - began, 1e-9) if device.is_cpu else 0.0
    if doubt := doubts(rows, share):
        warn(doubt)
    if journal != table:
        collect.as_parquet(journal, table)
    emit(f"{out}: {done:,} rows added, {len(problems) - len(left):,} were there\n")


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    if minutes < 2:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
