"""The tiles of a graph by themselves: taken out, taken off, put on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gpuir.ir.door import CALLED, takes
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.graph import GRAPH, Graph, Level, Node, check_level
from gpuir.ir.notes import SCHEDULE, Schedule, Tile

Path = tuple[str, ...]
Choose = Callable[[Path, Node, "Tile | None"], "Tile | None"]


@takes(g=GRAPH)
def extract(g: Graph) -> Schedule:
    """The tiles of a tiled or costed graph, those inside loops and branches by their path."""
    tiles = tuple((path, node.tile) for path, node in addressed(g) if node.tile is not None)
    return Schedule(g.name, g.target or "", tiles)


def addressed(g: Graph, owner: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Every node with its path, those inside loops and branches behind their owner."""
    for node in g.nodes:
        path = _path(node, owner)
        yield path, node
        if node.op.control:
            for region in node.op.regions:
                yield from addressed(region, path)


def _path(node: Node, owner: Path) -> Path:
    return (*owner, node.results[0].name if node.results else "")


@takes(g=GRAPH)
def strip(g: Graph) -> Graph:
    """The graph without tiles and costs: of level kernel, for no target."""
    return _map_nodes(g, Level.kernel, None, lambda path, node: None)


@takes(g=GRAPH, schedule=SCHEDULE, choose=CALLED)
def apply(g: Graph, schedule: Schedule, choose: Choose | None = None) -> Graph:
    """The graph tiled for the schedule's target: `apply(strip(g), extract(g))` is g.

    `choose` decides on each kernel with a loop nest, given its path and the schedule's tile for it
    or None: the tile pass checks what is given and searches for the rest. Without it the
    schedule's tiles are taken as they are, and a kernel without one is a UsageError, as is a name
    in the schedule that no kernel has.
    """
    check_level("apply", g, Level.kernel, "gpuir.apply(gpuir.lower(graph), schedule)")
    tiles, chosen = dict(schedule.tiles), choose or _take(schedule)
    check_names(g, schedule)

    def tile(path: Path, node: Node) -> Tile | None:
        return chosen(path, node, tiles.get(path))

    return _map_nodes(g, Level.tiled, schedule.target, tile)


def check_names(g: Graph, schedule: Schedule) -> None:
    """UsageError when the schedule tiles something that is no kernel of `g` with a loop nest."""
    known = {path: "/".join(path) for path, node in addressed(g) if node.op.tiled}
    for path, _ in schedule.tiles:
        if path not in known:
            name = "/".join(path)
            near = nearest(name, known.values()) if known else "no kernel of this graph has a tile"
            raise UsageError(
                f"schedule @{schedule.name}: @{g.name} has no kernel %{name} with a tile",
                expected=near,
                fix="write the name of the first result of a kernel; inside a loop "
                "write %loop/%result",
            )


def _take(schedule: Schedule) -> Choose:
    def take(path: Path, node: Node, tile: Tile | None) -> Tile:
        if tile is None:
            raise UsageError(
                f"schedule @{schedule.name} has no tile for %{'/'.join(path)}",
                fix="add one, or run the pass tile, which fills it in: "
                "tile{target=...,schedule=...}",
            )
        return tile

    return take


def _map_nodes(
    g: Graph,
    level: Level,
    target: str | None,
    choose: Callable[[Path, Node], Tile | None],
    owner: Path = (),
) -> Graph:
    """The graph with every kernel's tile chosen anew and no costs, regions of control included."""
    nodes: list[Node] = []
    for node in g.nodes:
        op, path = node.op, _path(node, owner)
        if op.control:

            def inside(region: Graph, path: Path = path) -> Graph:
                return _map_nodes(region, level, target, choose, path)

            op = op.with_regions(inside)
        tile = choose(path, node) if op.tiled else None
        nodes.append(Node(op, node.results, node.locs, tile))
    return replace(g, level=level, target=target, nodes=tuple(nodes))
