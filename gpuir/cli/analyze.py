"""`gpuir analyze`: the cost report of a model on one GPU, or several compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from gpuir.backends.table import listed
from gpuir.cli import crossover, options
from gpuir.cli.lowering import analyze
from gpuir.cli.modules import load_modules
from gpuir.cli.output import emit, layout, warn


@click.command()
@options.model
@options.targets
@options.loading
@options.costing
@click.option(
    "--format",
    default="text",
    callback=options.renamed,
    show_default=True,
    help=f"{listed()}.",
)
@click.option(
    "--top", type=click.IntRange(0), default=15, show_default=True, help="Kernels listed."
)
@options.width
@click.option(
    "--group-by",
    type=click.Choice(["kernel", "module", "phase"]),
    default="kernel",
    show_default=True,
    help="What the table of totals adds up: kinds of kernels, modules, phases of training.",
)
@click.option("--memory", is_flag=True, help="List who holds memory at the peak.")
@click.option(
    "--crossover",
    metavar="DIM",
    help="In place of the report: from which size of this dimension on the host does not hold the "
    "device up.",
)
@options.output
@options.load_modules
@options.verbose
def command(**given: Any) -> None:
    """Predict how long MODEL takes on a GPU, and show why.

    MODEL is an ONNX file, a PyTorch program (model.pt2, or my.module:build), a Hugging Face config
    (hf:config.json), or gpuir's IR as text (.gir). gpuir does not read weights.

    The exit status is 1 if the model fits none of the targets.

    \b
    gpuir analyze model.onnx --target a100 --dims batch=8
    gpuir analyze model.onnx --target a100,h100-sxm,l4
    gpuir analyze model.pt2 --target a100 --profile eager,compiled,cudagraph
    gpuir analyze hf:config.json --target a100 --dims batch=8,seq=512 --train --optimizer adamw
    gpuir analyze model.onnx --target a100 --dims seq=128 --crossover batch
    gpuir analyze model.onnx --target a100 --format schedule -o model.sched
    gpuir analyze model.onnx --target a100 --schedule model.sched
    """
    from gpuir.backends.table import find_backend
    from gpuir.cli.fitting import with_fixes
    from gpuir.files import Folder
    from gpuir.ir.errors import PluginError
    from gpuir.plugins import blamed

    loaded = load_modules(given["modules"])
    if given["crossover"]:
        crossover.show_crossover(given, loaded)
        return
    backend = find_backend(given["format"], loaded.backends)
    warnings: list[str] = []
    answers = analyze(given, loaded, warnings)
    shape = replace(
        layout(given["width"], given["output"]),
        top=given["top"],
        memory=given["memory"],
        group=given["group_by"],
        file=given["output"] or "",
    )
    answers = with_fixes(given, loaded, answers)
    with blamed(backend, f"the format {given['format']!r}"):
        text = backend(answers, shape)
    if not isinstance(text, str | bytes | Folder):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PluginError(f"the format {given['format']!r} returns no text", found=repr(text))
    if given["format"] != "text" or given["output"]:
        for warning in warnings:
            warn(warning)
    emit(text, given["output"])
    if all(s.fits is False for s in answers):
        raise click.exceptions.Exit(1)
