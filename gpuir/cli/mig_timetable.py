"""`gpuir mig timetable`: when to divide GPUs anew over a day."""

from __future__ import annotations

from typing import Any

import click

from gpuir.cli import options
from gpuir.cli.mig_asked import Runner, asked, kinds_of, notes
from gpuir.cli.output import check_ahead, note, show, warn


@click.command()
@asked(requests=1000)
@click.option(
    "--day",
    type=click.Path(),
    required=True,
    help="CSV of a day: time, and for each model requests a second.",
)
@click.option(
    "--change",
    type=click.FloatRange(0, 86_400),
    help="Seconds that a model which moves is away.  [30]",
)
@options.formats()
def command(**given: Any) -> None:
    """When to divide GPUs anew, as the load of models changes over a day.

    \b
    gpuir mig timetable --gpu a30 --model resnet50.onnx:deadline=20ms --model bert.onnx:batch=8 \\
        --day rates.csv
    with rates.csv:
        time,resnet50
        0:00,50
        8:00,800
        20:00,200
    """
    from gpuir.backends.mig_timetable import timetable_report
    from gpuir.plan.mig.timetable import CHANGE_S, read_day, timetable
    from gpuir.plan.mig.workloads import Setting

    check_ahead(given["output"])
    kinds = kinds_of(given)
    found = Runner(given)
    day = read_day(given["day"], [w.name for w in found.workloads])
    setting = Setting(found.workloads, found.runs, given["host_threads"], given["seed"])
    change = CHANGE_S if given["change"] is None else given["change"]
    made = timetable(
        day,
        kinds,
        setting,
        given["objective"],
        requests=given["requests"],
        change_s=change,
        ways=given["ways"],
        watch=note,
    )
    for text in found.warnings:
        warn(text)
    assumed = "" if given["change"] is not None else " (assumed), and 30 s more where MIG is "
    assumed += "" if given["change"] is not None else "switched on or off on Ampere"
    said = (*notes(given, found), f"a model that moves is away for {change:g} s{assumed}")
    show(timetable_report(made, setting, said), given)
