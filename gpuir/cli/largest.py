"""`gpuir largest`: the largest batch, or any other dimension, that fits a GPU's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gpuir.cli import options
from gpuir.cli.lowering import once
from gpuir.cli.modules import Loaded
from gpuir.cli.output import show, warn
from gpuir.cli.request import ask, held, option, request

if TYPE_CHECKING:
    from gpuir.plan.searches import LargestFit
    from gpuir.simulate.memory import Memory
    from gpuir.targets.target import Target

SIZE = click.IntRange(1, options.MOST_EXTENT)


@dataclass(frozen=True)
class LargestOptions(options.Runs):
    model: str = ask(options.model)
    target: str | None = ask(options.targets)
    dim: str = option("The dimension to search, as --dims calls it: batch.", required=True)
    least: int = option("Least to try.", "--min", type=SIZE, default=1)
    most: int = option("Most to try.", "--max", type=SIZE, default=65536)
    loading: options.LoadingOptions = held(options.LoadingOptions)
    costing: options.Costing = held(options.Costing, without="predictor schedule tf32 cluster")
    format: str = ask(options.formats())
    width: int | None = ask(options.width)
    output: str | None = ask(options.output)
    loaded: Loaded = ask(options.load_modules)


@request(LargestOptions)
def command(asked: LargestOptions) -> None:
    """Find the largest batch (or other size) that fits in memory.

    The exit status is 1 if not even the smallest size fits.

    \b
    gpuir largest model.onnx --target a100 --dim batch --dims seq=512
    gpuir largest model.onnx --target a100,h100-sxm,l4 --dim seq --dims batch=1
    """
    from gpuir.backends.largest import largest_report

    found = search(asked)
    show(largest_report(found), asked.format, asked.width, asked.output)
    if any(f.search.value is None for f in found):
        raise click.exceptions.Exit(1)


def search(asked: LargestOptions) -> list[LargestFit]:
    """The search for each target; the model is loaded at a few values for all of them."""
    from functools import partial

    import gpuir
    from gpuir.cli.sizes import SizedModel
    from gpuir.ir.errors import ModelError, UsageError
    from gpuir.plan.searches import LargestFit
    from gpuir.plan.space.points import at
    from gpuir.report.answer import Device
    from gpuir.simulate.largest import largest
    from gpuir.simulate.memory import room, sized
    from gpuir.targets.profile import profile_of

    targets = options.targets_of(asked.run)
    dim, least, most = asked.dim, asked.least, asked.most
    if least > most:
        raise UsageError("--min is more than --max", found=f"--min {least} --max {most}")
    how = asked.loading.options(asked.loaded)
    if option := options.given_size(how, dim):
        raise UsageError(
            f"{option} sets {dim}, but --dim searches it", fix="remove one of the two options"
        )

    profile = asked.costing.stack(asked.loaded)["profile"]
    refused: dict[int, str] = {}
    warnings: list[str] = []
    say = once(warnings)
    model = SizedModel(
        *(asked.model, asked.loading, asked.costing, asked.loaded),
        warn=lambda point, text: say(text) if point[dim] == least else None,
    )

    def memory(value: int, target: Target) -> Memory | None:
        try:
            kernels, x = model.one(dim, value, most, profile, target)
        except ModelError as error:
            if value == least:
                raise
            refused[value] = error.what
            return None
        if x.program.refused:  # a stack that does not run it
            return gpuir.memory(at(kernels, x.points, 0), target)
        layout, stack = at(x.program.layout, x.points, 0), profile_of(kernels)
        return sized(layout, dict.fromkeys(layout.kernels, 1), stack, room(stack, target))

    name = model.one(dim, least, most, profile, targets[0])[0].name
    for text in warnings:
        warn(text)
    each = [(target, largest(partial(memory, target=target), least, most)) for target in targets]
    return [
        LargestFit(
            model=name,
            device=Device(target.name, target.title),
            dim=dim,
            least=least,
            most=most,
            search=found,
            refusal=refused.get(found.impossible or 0, ""),
        )
        for target, found in each
    ]
