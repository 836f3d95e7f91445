"""Graphs that are the same but for the names of their values and the places of their nodes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from gpuir.ir.graph import Graph, Value, field_names
from gpuir.ir.phases import phase_of


def shape_of(g: Graph) -> Hashable:
    """What a graph has in common with those that differ in names alone: equal where each node does
    the same with the same, in one order, and where nodes of one place in the model are of one place
    there too. Two such graphs take the same time."""
    return _Shape().graph(g)


class _Shape:
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.places: dict[str, int] = {}

    def graph(self, g: Graph) -> Hashable:
        ends = tuple((self.value(v), g.role_of(v)) for v in (*g.inputs, *g.params))
        nodes = tuple(
            (
                type(n.op),
                *(self.field(getattr(n.op, name)) for name in field_names(type(n.op))),
                tuple(map(self.value, n.results)),
                tuple(self.places.setdefault(loc, len(self.places)) for loc in n.locs),
                phase_of(n),
                n.tile,
            )
            for n in g.nodes
        )
        outputs = tuple(map(self.field, (*g.outputs, *g.over)))
        return g.level, g.mesh, g.profile, g.target, ends, nodes, outputs

    def value(self, v: Value) -> Hashable:
        return self.numbers.setdefault(v.name, len(self.numbers)), v.type

    def field(self, x: Any) -> Hashable:
        match x:
            case Value():
                return self.value(x)
            case tuple():
                return tuple(map(self.field, x))  # pyright: ignore[reportUnknownArgumentType]
            case Graph():
                return _Shape().graph(x)
            case _:
                return x
