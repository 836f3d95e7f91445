"""`gpuir schedule`: whether the tiles of a file fit a model and a target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from gpuir.cli import options
from gpuir.cli.modules import load_modules
from gpuir.cli.output import emit, warn

if TYPE_CHECKING:
    from gpuir.ir.graph import Graph
    from gpuir.ir.notes import Schedule
    from gpuir.targets.target import Target


@click.group("schedule")
def command() -> None:
    """Check the tiles of a schedule file.

    A schedule holds the tiles of a model's kernels, to edit and apply.

    `gpuir analyze ... --format schedule` writes one, `--schedule FILE` applies it.
    """


@command.command()
@click.argument("file", type=click.Path())
@options.model
@options.target("The GPU it is for.  [as the file says]")
@options.profile
@options.tf32
@options.pipeline
@options.loading
@options.load_modules
def check(file: str, target: str | None, **given: Any) -> None:
    """Say of each tile in FILE that is not legal for MODEL why it is not.

    Exit status 1 if there is one.
    """
    import gpuir
    from gpuir.passes.math import run_under
    from gpuir.passes.tile import schedule_in

    found = schedule_in(file)
    name = target or found.target
    loaded = load_modules(given["modules"])
    device = gpuir.load_target(loaded.target(name))
    stack: Any = {"profile": given["profile"], "tf32": given["tf32"]}
    g = gpuir.load(given["model"], warn=warn, **stack, **options.load_options(given, loaded))
    if passes := options.pipeline_of(given, loaded):
        g = passes.run(run_under(g, **stack))
    g = gpuir.strip(gpuir.lower(g, target=loaded.target(name), **stack))
    illegal = [f"%{'/'.join(path)}: {why}\n" for path, why in reasons(g, found, device)]
    fine = len(found.tiles) - len(illegal)
    total = f"{fine} of {len(found.tiles)} tiles are legal on {device.name}\n"
    emit("".join((*illegal, total)))
    if illegal:
        raise click.exceptions.Exit(1)


def reasons(g: Graph, schedule: Schedule, target: Target) -> Iterator[tuple[tuple[str, ...], str]]:
    """The paths whose tile is not legal, each with why."""
    from gpuir.cost.generated.legal import why_illegal
    from gpuir.cost.reading import work_of
    from gpuir.cost.tile import best_tiles
    from gpuir.ir.errors import nearest
    from gpuir.ops.kernel import KernelOp
    from gpuir.report.find import walk

    known = {x.path: x.node.op for x in walk(g)}
    for path, tile in schedule:
        op = known.get(path)
        if not isinstance(op, KernelOp) or not op.tiled:
            names = ["/".join(p) for p, op in known.items() if op.tiled]
            yield path, f"no kernel with a tile\n  fix:      {nearest('/'.join(path), names)}"
        elif best_tiles({work_of(op): "/".join(path)}, target)[work_of(op)] == tile:
            continue
        elif why := why_illegal(work_of(op), tile, target):
            yield path, "not legal\n  found:    " + f"{tile}\n{why}".replace("\n", "\n" + " " * 12)
