"""Which rows lookups name, as somebody states it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from gpuir.ir.build import begin
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.graph import Graph, Level, Value
from gpuir.ops import tensor as t
from gpuir.ops.spread import parse_spread
from gpuir.passes.manager import Pass

MOST = 0.5  # of the bytes of all params: tables with more make a model a recommender


@dataclass(frozen=True)
class Indices(Pass):
    """States how the indices of lookups `spread` over the rows of the tables that the glob `tables`
    matches (`uniform`, `zipf:1.05`, `shares:..`; ops/spread.py): forward, and where a gradient is
    scattered into one. Tables are params that inputs' indices look up.

    Without a spread they are taken to be uniform, and only in a graph whose tables hold most of the
    bytes of its params; of others nothing is said."""

    spread: str = ""
    tables: str = "*"

    name = "indices"
    takes = gives = Level.graph

    def __post_init__(self) -> None:
        parse_spread(self.spread)

    def run(self, g: Graph) -> Graph:
        found = dict(lookups(g))
        chosen = {w for w in found.values() if fnmatchcase(w.name, self.tables)}
        if self.spread and not chosen:
            names = sorted({w.name for w in found.values()})
            raise UsageError(
                f"@{g.name} has no lookup in a table with the name {self.tables!r}",
                expected="one of its tables" if names else "a model with embeddings",
                found=", ".join(names[:8]) or "none at all",
                fix=nearest(self.tables, names) if names else "remove --indices",
            )
        held = sum(w.type.nbytes for w in chosen)
        if not self.spread and held <= MOST * sum(w.type.nbytes for w in g.params):
            return g
        silent = False
        spread, names = self.spread or "uniform", {w.name for w in chosen}
        b = begin(g, Level.graph)
        for node in g.nodes:
            match node.op:
                case t.Gather() as op if found.get(node.results[0]) in chosen:
                    silent = silent or not op.spread
                    if self.spread or not op.spread:
                        node = replace(node, op=replace(op, spread=spread))
                case t.ScatterND() as op if node.results[0].name.partition(".grad")[0] in names:
                    if self.spread or not op.spread:
                        node = replace(node, op=replace(op, spread=spread))
                case _:
                    pass
            b.put(node)
        if not self.spread and silent:
            b.assumed.append("every row of a table is looked up equally often (--indices)")
        return b.finish(g.outputs, g.over)


def lookups(g: Graph) -> Iterator[tuple[Value, Value]]:
    """What is looked up by indices of the inputs, with the param that is the table."""
    makers = {v: n for n in g.nodes for v in n.results}
    inputs, params = {*g.inputs}, {*g.params}

    def table(v: Value) -> Value | None:
        while v not in params:
            made = makers.get(v)
            if made is None or not isinstance(made.op, t.Layout | t.Cast):
                return None
            v = made.op.operands[0]
        return v

    given: dict[Value, bool] = dict.fromkeys(inputs, True)
    for node in g.nodes:
        known = any(given.get(v, False) for v in node.op.operands)
        given.update(dict.fromkeys(node.results, known))
        if isinstance(node.op, t.Gather) and node.op.axis == 0 and node.op.x.type.rank == 2:
            w = table(node.op.x)
            if w is not None and given.get(node.op.indices, False):
                yield node.results[0], w
