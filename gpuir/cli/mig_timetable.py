"""`gpuir mig timetable`: when to divide GPUs anew over a day."""

from __future__ import annotations

from dataclasses import dataclass

import click

from gpuir.cli import options
from gpuir.cli.mig_asked import Runner, Sharing, kinds_of, notes, simulated
from gpuir.cli.output import note, show, warn
from gpuir.cli.request import ask, option, request


@dataclass(frozen=True)
class TimetableOptions(Sharing):
    requests: int = simulated(1000)
    day: str = option(
        "CSV of a day: time, and for each model requests a second.",
        type=click.Path(),
        required=True,
    )
    change: float | None = option(
        "Seconds that a model which moves is away.  [30]", type=click.FloatRange(0, 86_400)
    )
    format: str = ask(options.formats())


@request(TimetableOptions)
def command(asked: TimetableOptions) -> None:
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
    from gpuir.plan.mig.workloads import ServingSetting

    kinds = kinds_of(asked)
    found = Runner(asked)
    day = read_day(asked.day, [w.name for w in found.workloads])
    setting = ServingSetting(found.workloads, found.runs, asked.host_threads, asked.seed)
    change = CHANGE_S if asked.change is None else asked.change
    made = timetable(
        day,
        kinds,
        setting,
        asked.objective,
        requests=asked.requests,
        change_s=change,
        ways=asked.ways,
        watch=note,
    )
    for text in found.warnings:
        warn(text)
    assumed = "" if asked.change is not None else " (assumed), and 30 s more where MIG is "
    assumed += "" if asked.change is not None else "switched on or off on Ampere"
    said = (
        *notes(asked.host_threads, found),
        f"a model that moves is away for {change:g} s{assumed}",
    )
    show(timetable_report(made, setting, said), asked.format, asked.width, asked.output)
