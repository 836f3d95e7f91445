"""`gpuir mig plan`: how to divide GPUs among models."""

from __future__ import annotations

from dataclasses import dataclass

import click

from gpuir.cli import options
from gpuir.cli.mig_asked import Runner, Sharing, kinds_of, notes
from gpuir.cli.output import emit, layout, note, show, warn
from gpuir.cli.request import ask, option, request


@dataclass(frozen=True)
class MigPlan(Sharing):
    best: int = option("Listed.", type=click.IntRange(1, 100), default=5)
    format: str = ask(
        options.formats(
            ("mig-parted", "nvidia-smi", "svg"),
            help="The last three are of the best plan, for other tools.",
        )
    )


@request(MigPlan)
def command(asked: MigPlan) -> None:
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
    from gpuir.plan.mig.workloads import ServingSetting

    kinds = kinds_of(asked)
    found = Runner(asked)
    setting = ServingSetting(found.workloads, found.runs, asked.host_threads, asked.seed)
    made = search(
        kinds,
        setting,
        asked.objective,
        requests=asked.requests,
        ways=asked.ways,
        watch=note,
    )
    for text in found.warnings:
        warn(text)
    planned = Planned(made, setting, asked.objective, notes(asked.host_threads, found))
    if asked.format in FILES:
        emit(file_of(planned, asked.format), asked.output)
    else:
        width = layout(asked.width, asked.output).width
        show(plans_report(planned, asked.best, width), asked.format, asked.width, asked.output)
