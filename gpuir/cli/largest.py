"""`gpuir largest`: the largest batch, or any other dimension, that fits a GPU's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpuir.cli import options
from gpuir.cli.lowering import Kernels
from gpuir.cli.modules import Loaded, load_modules
from gpuir.cli.output import show, warn

if TYPE_CHECKING:
    from gpuir.plan.searches import LargestFit
    from gpuir.simulate.memory import Memory
    from gpuir.targets.target import Target

SIZE = click.IntRange(1, options.MOST_EXTENT)


@click.command()
@options.model
@options.targets
@click.option("--dim", required=True, help="The dimension to search, as --dims calls it: batch.")
@click.option("--min", "least", type=SIZE, default=1, show_default=True, help="Least to try.")
@click.option("--max", "most", type=SIZE, default=65536, show_default=True, help="Most to try.")
@options.loading
@options.profile
@options.pipeline
@options.settings
@options.formats()
@options.width
@options.output
@options.load_modules
def command(**given: Any) -> None:
    """Find the largest batch (or other size) that fits in memory.

    The exit status is 1 if not even the smallest size fits.

    \b
    gpuir largest model.onnx --target a100 --dim batch --dims seq=512
    gpuir largest model.onnx --target a100,h100-sxm,l4 --dim seq --dims batch=1
    """
    from gpuir.backends.largest import largest_report

    found = search(given, load_modules(given["modules"]))
    show(largest_report(found), given)
    if any(f.search.value is None for f in found):
        raise click.exceptions.Exit(1)


def search(given: dict[str, Any], loaded: Loaded) -> list[LargestFit]:
    """The search for each target; a value is loaded and lowered once for all of them."""
    from functools import cache, partial

    import gpuir
    from gpuir.ir.errors import ModelError, UsageError
    from gpuir.plan.searches import LargestFit
    from gpuir.report.answer import Device
    from gpuir.simulate.largest import largest

    targets = options.targets_of(given, loaded)
    dim, least, most = given["dim"], given["least"], given["most"]
    if least > most:
        raise UsageError("--min is more than --max", found=f"--min {least} --max {most}")
    how = options.load_options(given, loaded)
    if option := options.given_size(how, dim):
        raise UsageError(
            f"{option} sets {dim}, but --dim searches it", fix="remove one of the two options"
        )

    profile = loaded.profile(given["profile"]) if given["profile"] else None
    passes = options.pipeline_of(given, loaded)
    refused: dict[int, str] = {}

    @cache
    def kernels(value: int) -> Kernels | None:
        warnings: list[str] = []
        try:
            sized = options.with_size(how, **{dim: value})
            g = gpuir.load(given["model"], warn=warnings.append, profile=profile, **sized)
        except ModelError as error:
            if value == least:
                raise
            refused[value] = error.what
            return None
        for text in warnings if value == least else ():
            warn(text)
        return Kernels(lambda _: g, None, passes, loaded)

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
