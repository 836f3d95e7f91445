"""Which modules of a PyTorch model a cut graph has by parts, and how."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, get_args

from gpuir.ir.graph import Graph
from gpuir.ir.phases import phase_of
from gpuir.report.names import node_name

# A linear layer by its results (column) or by what it sums over (row), as in Megatron-LM; an
# embedding by its words, or by what it has of each.
CutKind = Literal["column", "row", "words", "features"]
CUT_KINDS: tuple[CutKind, ...] = get_args(CutKind)
KINDS: Mapping[tuple[str, int], CutKind] = {  # by operator of PyTorch, and axis of its weight
    ("linear", 0): "column",
    ("linear", 1): "row",
    ("t", 0): "column",  # what torch's autograd makes of linear: the weight turned, and a product
    ("t", 1): "row",
    ("embedding", 0): "words",
    ("embedding", 1): "features",
}
Cuts = tuple[tuple[str, CutKind], ...]
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)|(?<=\.)\d+$")


def module_cuts(graph: Graph, axis: str = "tp") -> tuple[Cuts, tuple[str, ...]]:
    """The modules that ranks along an axis of the mesh share, by name, equal ones of all layers as
    one: `model.layers.*.mlp.up_proj`; and the weights cut in a way that is none of those. Of a
    graph that PyTorch did not make, nothing: its names are others."""
    if graph.framework != "pytorch":
        return (), ()
    params = {v.name for v in graph.params if graph.role_of(v) == "weight"}
    operators = _operators(graph, params)
    found: dict[str, CutKind] = {}
    others: list[str] = []
    for name, cut in graph.cuts:
        module, _, last = name.rpartition(".")
        if cut.group != axis or name not in params or last == "bias":
            continue
        kind = KINDS.get((operators.get(name, ""), cut.axis))
        if kind is None or cut.parts or last != "weight":
            others.append(name)
        else:
            found[module] = kind
    return tuple(_together(found)), tuple(dict.fromkeys(NUMBER.sub("*", x) for x in others))


def _operators(graph: Graph, params: Iterable[str]) -> dict[str, str]:
    """The operator of PyTorch that reads each param first: `linear` of `fc/linear_3`."""
    left, found = set(params), dict[str, str]()
    for node in graph.nodes:
        if phase_of(node) is not None or not node.locs:
            continue
        for v in node.op.operands:
            if v.name in left:
                left.discard(v.name)
                found[v.name] = re.sub(r"_\d+$", "", node_name(node.locs[0]).rpartition("/")[2])
    return found


def _together(found: Mapping[str, CutKind]) -> Iterator[tuple[str, CutKind]]:
    """Those that differ in numbers alone and are cut alike, as one with `*` for a number."""
    kinds: dict[str, set[CutKind]] = {}
    for module, kind in found.items():
        kinds.setdefault(NUMBER.sub("*", module), set()).add(kind)
    named: dict[str, CutKind] = {}
    for module, kind in found.items():
        star = NUMBER.sub("*", module)
        named[star if len(kinds[star]) == 1 else module] = kind
    yield from named.items()
