"""`gpuir mig`: GPUs divided by MIG."""

from __future__ import annotations

from typing import ClassVar

import click

from gpuir.cli.lazy import LazyGroup


class MigCommands(LazyGroup):
    """What there is to ask of a GPU that divides."""

    modules: ClassVar = {name: f"gpuir.cli.mig_{name}" for name in ("layouts", "plan", "timetable")}


@click.group(cls=MigCommands)
def command() -> None:
    """Plan MIG slices: which models share a GPU, and how.

    \b
    gpuir mig layouts a100
    gpuir mig plan --gpu a30 --model model.onnx:batch=8:count=4
    """
