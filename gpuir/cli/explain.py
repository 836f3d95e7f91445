"""`gpuir explain`: every quantity that leads to one kernel's time."""

from __future__ import annotations

from typing import Any

import click

from gpuir.cli import options
from gpuir.cli.analyze import analyze, layout
from gpuir.cli.modules import load_modules
from gpuir.cli.output import emit


@click.command()
@options.model
@click.argument("node")
@click.option("--target", help="A GPU: a100. `gpuir targets` lists them.")
@options.loading
@options.costing
@click.option("--width", type=click.IntRange(40), help="Columns of the text.  [the terminal's]")
@options.output
@options.load_modules
@options.verbose
def command(node: str, **given: Any) -> None:
    """Why NODE takes the time it does: each term, its formula with the numbers in it, its source.

    NODE is a kernel's result, as `analyze --format ir` names it, or a node of the model, whole or
    the end of its name.

    \b
    gpuir explain model.onnx MatMul_3 --target a100
    """
    raise NotImplementedError


__all__ = ["analyze", "emit", "layout", "load_modules"]
