"""Kernels → tiled kernels: the tile of the library's kernel, or of a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gpuir.cost.batch import best_tiles
from gpuir.cost.generated.legal import why_illegal
from gpuir.cost.reading import work_of
from gpuir.cost.work import Work
from gpuir.files import read_text
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Level, Node
from gpuir.ir.notes import Schedule, Tile
from gpuir.ops.kernel import KernelOp
from gpuir.passes.manager import Pass
from gpuir.schedule import Path as KernelPath
from gpuir.schedule import addressed, apply
from gpuir.targets.load import load_target
from gpuir.targets.target import Target


@dataclass(frozen=True)
class TilePass(Pass):
    """Gives every kernel with a loop nest a tile for `target`: the one that the library's kernel
    has, or what the file `schedule` (or a `Schedule`) says. Where the library's does not fit, on a
    target with numbers changed, the cheapest of those that do is searched.

    A tile of the schedule that is not the library's stands for a generated kernel, and `annotate`
    costs it as one. `target` is a name, an alias, a path, or one with numbers changed:
    `a100+sms=120`.
    """

    name: ClassVar[str] = "tile"
    takes: ClassVar[Level | None] = Level.kernel
    gives: ClassVar[Level | None] = Level.tiled
    target: str
    schedule: str | Schedule = ""

    def run(self, g: Graph) -> Graph:
        target = load_target(self.target)
        schedule = self.schedule
        if isinstance(schedule, str):
            where, schedule = schedule, Schedule(g.name, self.target, ())
            schedule = schedule_in(where) if where else schedule
        else:
            where = "schedule"
        schedule = meant_for(schedule, where, self.target, target)
        return tile_graph(g, schedule, target)


def schedule_in(path: str) -> Schedule:
    """The schedule that a file states; UsageError or TextError when it states none."""
    from gpuir.text import parse_schedule

    return parse_schedule(read_text(path, "the schedule"), path)


def read_schedule(path: str, name: str, target: Target) -> Schedule:
    """The schedule in a file, for the target named `name`; UsageError when it is for another."""
    return meant_for(schedule_in(path), path, name, target)


def meant_for(schedule: Schedule, where: str, name: str, target: Target) -> Schedule:
    """A schedule for the target named `name`; UsageError when it is for another."""
    if schedule.target != name and load_target(schedule.target) != target:
        raise UsageError(
            f"schedule @{schedule.name} is for another target",
            where=where,
            expected=name,
            found=schedule.target,
            fix=f"tile for {schedule.target}, or write `for {name}` in the first "
            "line of the schedule: gpuir then checks its tiles for that "
            "target",
        )
    return Schedule(schedule.name, name, schedule.tiles)


def tile_graph(g: Graph, schedule: Schedule, target: Target) -> Graph:
    """The graph tiled by the schedule, checked, and as libraries do where that has no tile.

    UsageError names the kernel whose tile is illegal, and why.
    """
    works: dict[Work, str] = {}
    for path, node in addressed(g):
        if isinstance(node.op, KernelOp) and node.op.tiled:
            works.setdefault(work_of(node.op), "/".join(path))
    known = best_tiles(works, target)

    def choose(path: KernelPath, node: Node, wanted: Tile | None) -> Tile:
        op = node.op
        assert isinstance(op, KernelOp), "the verifier has seen to it"
        library = known[work_of(op)]
        if wanted is None or wanted == library:
            return library
        if why := why_illegal(work_of(op), wanted, target):
            raise UsageError(
                f"the tile of kernel %{'/'.join(path)} is not legal",
                where=f"schedule @{schedule.name}",
                found=f"{wanted}\n{why}",
                fix="change the tile, or remove the kernel from the schedule so that "
                "it has the library's",
            )
        return wanted

    return apply(g, schedule, choose)
