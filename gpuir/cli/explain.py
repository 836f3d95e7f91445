"""`gpuir explain`: every quantity that leads to one kernel's time."""

from __future__ import annotations

from typing import Any

import click

from gpuir.cli import options
from gpuir.cli.analyze import analyze, layout
from gpuir.cli.modules import load_modules
from gpuir.cli.output import emit, warn


@click.command()
@options.model
@click.argument("node")
@click.option("--target", help="A GPU, like a100. `gpuir targets` lists them.")
@options.loading
@options.costing
@click.option("--width", type=click.IntRange(40), help="Columns of the text.  [the terminal's]")
@options.output
@options.load_modules
@options.verbose
def command(node: str, **given: Any) -> None:
    """Why NODE takes the time it does: each quantity, its formula with numbers, its source.

    NODE is a kernel's result, as `analyze --format ir` names it, or a node of the model: its name,
    or the end of it.

    \b
    gpuir explain model.onnx MatMul_3 --target a100
    """
    import gpuir
    from gpuir.backends.explanation import explanation
    from gpuir.backends.report import find_kernel
    from gpuir.ir.errors import UsageError

    warnings: list[str] = []
    graphs = analyze(given, load_modules(given["modules"]), warnings)
    if len(graphs) > 1:
        raise UsageError("explain takes one target", found=given["target"])
    for text in warnings:
        warn(text)
    g = graphs[0]
    lines = gpuir.explain(g, node)
    shape = layout(given["width"], given["output"])
    emit(explanation(gpuir.summary(g), find_kernel(g, node), lines, shape), given["output"])
