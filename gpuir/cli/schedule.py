"""`gpuir schedule`: whether the tiles of a file fit a model and a target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gpuir.cli import options
from gpuir.cli.modules import Loaded
from gpuir.cli.output import emit, warn
from gpuir.cli.request import ask, held, request

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


@dataclass(frozen=True)
class CheckOptions:
    file: str = ask(click.argument("file", type=click.Path()))
    model: str = ask(options.model)
    target: str | None = ask(options.target("The GPU it is for.  [as the file says]"))
    costing: options.Costing = held(options.Costing, without="settings predictor schedule cluster")
    loading: options.LoadingOptions = held(options.LoadingOptions)
    loaded: Loaded = ask(options.load_modules)


@request(CheckOptions)
def check(asked: CheckOptions) -> None:
    """Say of each tile in FILE that is not legal for MODEL why it is not.

    Also how many are the library's own: any other is costed as a generated kernel, by other
    formulas. Exit status 1 if a tile is not legal.
    """
    import gpuir
    from gpuir.passes.math import run_under
    from gpuir.passes.tile import schedule_in

    found = schedule_in(asked.file)
    name = asked.target or found.target
    device = gpuir.load_target(asked.loaded.target(name))
    stack = asked.costing.stack(asked.loaded)
    g = asked.loading.load(asked.model, asked.loaded, warn, **stack)
    if passes := asked.costing.passes(asked.loaded):
        g = passes.run(run_under(g, **stack))
    g = gpuir.strip(gpuir.lower(g, target=asked.loaded.target(name), **stack))
    told = list(reasons(g, found, device))
    illegal = [f"%{'/'.join(path)}: {why}\n" for path, why in told if why]
    fine = len(found.tiles) - len(illegal)
    total = f"{fine} of {len(found.tiles)} tiles are legal on {device.name}\n"
    own = len(found.tiles) - len(told)
    other = f"{own} are the library's, {fine - own} are costed as generated kernels\n"
    emit("".join((*illegal, total, other)))
    if illegal:
        raise click.exceptions.Exit(1)


def reasons(g: Graph, schedule: Schedule, target: Target) -> Iterator[tuple[tuple[str, ...], str]]:
    """The paths whose tile is not the library's, each with why it is not legal, if it is not."""
    from gpuir.cost.batch import best_tiles
    from gpuir.cost.generated.legal import why_illegal
    from gpuir.cost.reading import work_of
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
        else:
            why = why_illegal(work_of(op), tile, target)
            text = f"{tile}\n{why}".replace("\n", "\n" + " " * 12)
            yield path, f"not legal\n  found:    {text}" if why else ""


command.add_command(check)
