"""`gpuir mig plan`: how to divide GPUs among models."""

from __future__ import annotations

from typing import Any

import click

from gpuir.cli import options
from gpuir.cli.mig_asked import Runner, asked, kinds_of, notes
from gpuir.cli.output import check_ahead, emit, layout, note, show, warn


@click.command()
@asked(requests=2000)
@click.option("--best", type=click.IntRange(1, 100), default=5, show_default=True, help="Listed.")
@options.formats(
    "mig-parted", "nvidia-smi", "svg", help="The last three are of the best plan, for other tools."
)
def command(**given: Any) -> None:
    """Which slices for which models, or all on the whole GPU: simulated for each.

    A run of each model is predicted on every slice. Plans are the best choice for each way to
    divide the GPU, and without MIG: one at a time, in time slices, under MPS. A request is one run
    of the model at its batch.

    \b
    gpuir mig plan --gpu a30 --model bert.onnx:batch=8:count=4
    gpuir mig plan --gpu a30 --model bert.onnx:batch=8:count=3 \\
        --model resnet50.onnx:batch=1:rate=200:deadline=50ms
    gpuir mig plan --gpu 2xa100-80gb --gpu a30 --model ... --objective cost
    gpuir mig plan ... --format mig-parted -o mig.yaml
    """
    from gpuir.backends.mig_plan import FILES, Planned, file_of, plans_report
    from gpuir.plan.mig.search import search
    from gpuir.plan.mig.workloads import Setting

    check_ahead(given["output"])
    kinds = kinds_of(given)
    found = Runner(given)
    setting = Setting(found.workloads, found.runs, given["host_threads"], given["seed"])
    made = search(
        kinds,
        setting,
        given["objective"],
        requests=given["requests"],
        ways=given["ways"],
        watch=note,
    )
    for text in found.warnings:
        warn(text)
    planned = Planned(made, setting, given["objective"], notes(given, found))
    if given["format"] in FILES:
        emit(file_of(planned, given["format"]), given["output"])
    else:
        width = layout(given["width"], given["output"]).width
        show(plans_report(planned, given["best"], width), given)
