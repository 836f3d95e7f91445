"""`gpuir largest`: the largest batch, or any other dimension, that fits a GPU's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gpuir.cli import options
from gpuir.cli.lowering import LoweredModels
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
    """The search for each target; a value is loaded and lowered once for all of them."""
    from functools import cache, partial

    import gpuir
    from gpuir.ir.errors import ModelError, UsageError
    from gpuir.plan.searches import LargestFit
    from gpuir.report.answer import Device
    from gpuir.simulate.largest import largest

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
    passes = asked.costing.passes(asked.loaded)
    refused: dict[int, str] = {}

    @cache
    def kernels(value: int) -> LoweredModels | None:
        warnings: list[str] = []
        try:
            sized = options.with_size(how, **{dim: value})
            g = gpuir.load(asked.model, warn=warnings.append, profile=profile, **sized)
        except ModelError as error:
            if value == least:
                raise
            refused[value] = error.what
            return None
        for text in warnings if value == least else ():
            warn(text)
        return LoweredModels(lambda _: g, None, passes, asked.loaded)

    def memory(value: int, target: Target) -> Memory | None:
        made = kernels(value)
        return None if made is None else gpuir.memory(made.under(profile, target), target)

    first = kernels(least)
    name = first.under(profile, targets[0]).name if first else ""
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
