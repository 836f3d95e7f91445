"""What a model's kernels come to whatever the device: all that latency and memory need of a graph,
small enough to keep for thousands of graphs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, cast

from gpuir.cost.habits import predictor_of
from gpuir.cost.reading import work_of
from gpuir.cost.routing import Routed, Shares
from gpuir.cost.steps import Steps, Way
from gpuir.cost.work import Detail, Operand, Work
from gpuir.ir.graph import Graph, Node
from gpuir.ir.notes import Cost
from gpuir.ir.types import DTYPES, DType, tf32
from gpuir.ops import kernel as k
from gpuir.passes.annotate import FREE
from gpuir.simulate.layout import Event, Layout, Part, layout_of
from gpuir.simulate.many import Call, Sizes, is_straight
from gpuir.simulate.timeline import Launch, copied, is_decoding, steps
from gpuir.store import digest
from gpuir.targets.profile import profile_of
from gpuir.targets.support import dtypes_of, nodes_refused, reason, without_kernel


@dataclass(frozen=True)
class Straight:
    """Launches one after another: `works` are the kernels that differ, which calls name by their
    place."""

    works: tuple[Work, ...]
    calls: tuple[Call, ...]
    sizes: Sizes
    params: int
    is_decoding: bool
    layout: Layout


@dataclass(frozen=True)
class Program:
    """A model's kernels under a profile. `refused` is why nothing of it can be said: the stack does
    not take the model, or the model those sizes. `dtypes` are those of its values. Where launches
    are not `straight` (loops, several streams, nodes on the CPU, a stack with kernels of its own)
    the graph has to be run whole. `keys` tell its kernels from all others, in any program."""

    model: str
    profile: str
    dtypes: tuple[str, ...]
    refused: str = ""
    straight: Straight | None = None
    keys: tuple[str, ...] = ()


def program_of(graph: Graph) -> Program:
    """The program of a graph of level kernel."""
    profile = profile_of(graph)
    name = graph.profile or "ideal"
    made = Program(graph.name, name, tuple(sorted(dtypes_of(graph))))
    if (error := nodes_refused(graph, profile)) is not None:
        return replace(made, refused=reason(error))
    alone = any(n.op.control for n in graph.nodes) or predictor_of(profile, graph) is not None
    hosted = profile.fallback is not None and without_kernel(graph, profile)
    if not alone and not hosted:
        works, places = _works(graph)
        found = tuple(steps(_numbered(graph, places)))
        if is_straight(profile, found):
            straight = Straight(
                works=works,
                calls=_calls(found),
                sizes=Sizes(*(tuple(v.type.nbytes for v in some) for some in copied(graph))),
                params=sum(graph.role_of(v) in ("weight", "buffer") for v in graph.params),
                is_decoding=is_decoding(graph),
                layout=layout_of(graph, places),
            )
            return replace(made, straight=straight, keys=tuple(digest(_json(w)) for w in works))
    return made


def _works(graph: Graph) -> tuple[tuple[Work, ...], dict[Any, int]]:
    """The kernels that differ, and the place of each node's among them, by its first result."""
    known: dict[Work, int] = {}
    places = {
        n.results[0]: known.setdefault(work_of(n.op), len(known))
        for n in graph.nodes
        if isinstance(n.op, k.KernelOp) and not isinstance(n.op, k.View)
    }
    return tuple(known), places


def _numbered(graph: Graph, places: Mapping[Any, int]) -> Graph:
    """The graph, each kernel's time being its place."""
    costs = [Cost(float(i), "latency", "place", ()) for i in range(len(places))]

    def cost_of(node: Node) -> Cost:
        return FREE if isinstance(node.op, k.View) else costs[places[node.results[0]]]

    return replace(graph, nodes=tuple(replace(n, cost=cost_of(n)) for n in graph.nodes))


def _calls(found: tuple[Any, ...]) -> tuple[Call, ...]:
    ops: dict[str, int] = {}
    return tuple(
        Call(
            ops.setdefault(x.op, len(ops)),
            x.kind,
            x.lane,
            -1 if x.empty else int(x.time_s),
            x.empty,
            x.waits,
        )
        for x in cast("tuple[Launch, ...]", found)
    )


# ---- as text -----------------------------------------------------------------------------------

KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(Work, Operand, *Detail.__subclasses__()),
        *(Routed, Shares, Way, Steps, Layout, Sizes, Straight, Program),
    )
}
TUPLES: dict[str, type[Any]] = {kind.__name__: kind for kind in (Call, Event, Part)}


def written(program: Program) -> str:
    """A program as text, from which `read` makes the same again. Its first line has the keys of its
    kernels: who only looks costs up reads no more."""
    return f"{' '.join(program.keys)}\n{_json(replace(program, keys=()))}"


def read(text: str) -> Program:
    """What `written` wrote."""
    program: Program = _made(json.loads(text.partition("\n")[2]))
    return replace(program, keys=tuple(keys_of(text)))


def keys_of(text: str) -> list[str]:
    """The keys of the kernels of a program that `written` wrote."""
    return text.partition("\n")[0].split()


def _json(made: Program | Work) -> str:
    return json.dumps(_plain(made), separators=(",", ":"))


def _made(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_made, cast("list[Any]", value)))
    if not isinstance(value, dict):
        return value
    named = cast("dict[str, Any]", value)
    kind = named.pop("")
    if kind == "DType":
        return {**DTYPES, "tf32": tf32}[named["name"]]
    if kind in TUPLES:
        return TUPLES[kind](*named["_"])
    return KINDS[kind](**{name: _made(x) for name, x in named.items()})


def _plain(value: Any) -> Any:
    match value:
        case DType():
            return {"": "DType", "name": value.name}
        case Call() | Event() | Part():
            return {"": type(value).__name__, "_": list(value)}
        case tuple():
            return [_plain(x) for x in cast("tuple[Any, ...]", value)]
        case None | str() | bool() | int() | float():
            return value
        case _ if is_dataclass(value):
            named = {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
            return {"": type(value).__name__, **named}
        case _:
            return value.item()  # a number of numpy's
