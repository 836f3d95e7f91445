"""A kernel by its name: its result, or the model nodes it stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.graph import Graph, Loc, Node
from gpuir.ops import kernel as k
from gpuir.report.names import node_name


@dataclass(frozen=True)
class Located:
    """A kernel, and the path that names it: the loops and branches around it first."""

    path: tuple[str, ...]
    node: Node


def find_kernel(graph: Graph, name: str) -> Located:
    """The one kernel that `find_kernels` finds; UsageError when there are several."""
    found = find_kernels(graph, name)
    return found[0] if len(found) == 1 else _refuse_several(found, name)


def find_kernels(graph: Graph, name: str) -> list[Located]:
    """The kernel whose first result is `name` (or ends its path), or all those that stand for the
    model node `name`: as a whole, without its file, or its end. Of a loop and what is in it the
    loop alone; views, which cost nothing, only where there is nothing else, or after a `%`.
    UsageError when `name` fits nothing, or several."""
    everything = list(walk(graph))
    bare = name.removeprefix("%")
    by_result: tuple[Callable[[Located], bool], ...] = (
        lambda x: "/".join(x.path) == bare or x.path[-1] == bare,
        lambda x: any(v.name == bare for v in x.node.results),
    )
    by_node: tuple[Callable[[Loc], bool], ...] = (
        lambda loc: loc == name,
        lambda loc: node_name(loc) == name,
        lambda loc: loc.endswith(name),
        lambda loc: name in loc,
    )
    views: list[Located] = []
    for test in by_result:
        found = _launched(x for x in everything if test(x))
        if len(found) == 1 and isinstance(found[0].node.op, k.View) and bare == name:
            views = views or found  # that a model node of this name ends in, perhaps
        elif found:
            return found if len(found) == 1 else _refuse_several(found, name)
    for test in by_node:
        nodes = {loc for x in everything for loc in x.node.locs if test(loc)}
        found = _launched(x for x in everything if nodes & {*x.node.locs})
        if found and not (views and len(nodes) > 1):
            return found if len(found) == 1 or len(nodes) == 1 else _refuse_several(found, name)
    if views:
        return views
    if name in graph.folded or any(node_name(loc) == name for loc in graph.folded):
        raise UsageError(
            f"no kernel computes the model node {name!r}",
            found="the node was removed: its value is known at load time, or it moves no data",
        )
    known = [x.path[-1] for x in everything]
    known += [node_name(loc) for x in everything for loc in x.node.locs]
    raise UsageError(f"no kernel has the name {name!r}", fix=_suggest(name, known))


def _launched(found: Iterable[Located]) -> list[Located]:
    """Without views, where there is more, and without what is inside of one of them."""
    some = list(found)
    some = [x for x in some if not isinstance(x.node.op, k.View)] or some
    paths = {x.path for x in some}
    return [x for x in some if not any(x.path[:i] in paths for i in range(1, len(x.path)))]


def _refuse_several(found: Sequence[Located], name: str) -> NoReturn:
    listed = "\n".join(f"%{'/'.join(x.path)}  {x.node.op.name}" for x in found[:10])
    more = f"\nand {len(found) - 10} more" if len(found) > 10 else ""
    raise UsageError(
        f"{len(found)} kernels match {name!r}",
        found=listed + more,
        fix="give the result of one of them, with or without the %",
    )


def _suggest(name: str, known: list[str]) -> str:
    text = nearest(name, dict.fromkeys(known))
    return text if text.startswith("did you") else "`gpuir analyze` lists the kernels"


def walk(graph: Graph, path: tuple[str, ...] = ()) -> Iterator[Located]:
    """Every kernel, those inside loops and branches included, in order."""
    for node in graph.nodes:
        here = (*path, node.results[0].name)
        yield Located(here, node)
        if node.op.control:
            for region in node.op.regions:
                yield from walk(region, here)
