"""A batch in microbatches: what is run of one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from gpuir.ir.build import Builder, begin, rewrite
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass
from gpuir.passes.shard.shard import ShardPass, batch_of


@dataclass(frozen=True)
class Microbatch(Pass):
    """The graph of one of `count` microbatches: inputs are cut along their first axis, as for data
    parallelism, and what that would add up over ranks, gradients and sums of losses, is of the
    microbatch alone. A step adds it up in time. Batch norm takes the statistics of the microbatch.
    """

    count: int

    name: ClassVar[str] = "microbatch"
    takes: ClassVar[Level | None] = Level.graph
    gives: ClassVar[Level | None] = Level.graph

    def run(self, g: Graph) -> Graph:
        if self.count == 1:
            return g
        if g.mesh:
            raise UsageError(
                "microbatch: the graph is already split over ranks",
                found=", ".join(f"{axis}={n}" for axis, n in g.mesh),
                fix="put the pass microbatch before the pass shard",
            )
        batch = batch_of(g)
        if batch == 0 or batch % self.count:
            near = [n for n in range(1, batch + 1) if batch % n == 0]
            raise UsageError(
                f"microbatch: a batch of {batch} cannot be split into "
                f"{self.count} equal microbatches",
                expected=f"a number that divides it: {', '.join(map(str, near))}",
                fix=f"for example a batch of {self.count * -(-batch // self.count)}"
                if batch
                else "inputs with a batch",
            )
        cut = ShardPass(self.count, "data", statistics="rank").run(g)
        return replace(renamed(rewrite(cut, self._alone), cut), mesh=(), cuts=())

    def _alone(self, n: Node, b: Builder) -> tuple[Value, ...] | None:
        match n.op:
            case t.Collective("all_reduce", x):
                return (x,)
            case t.Collective(fn):
                raise UsageError(
                    f"microbatch: this op needs the whole batch ({fn})",
                    where=" + ".join(n.locs),
                    fix="remove microbatches, or load the model with a smaller batch",
                )
            case t.Shard(x, axis, sizes=(count,)):
                extent = x.type.shape[axis] // count
                sizes = (*x.type.shape[:axis], extent, *x.type.shape[axis + 1 :])
                return (b(t.Slice(x, (0,) * len(sizes), sizes, (1,) * len(sizes))),)
            case _:
                return None


def renamed(g: Graph, of: Graph) -> Graph:
    """The graph with its outputs under the names that they had in another."""
    ends = {*g.inputs, *g.params}
    names = {
        v: Value(old.name, v.type)
        for v, old in zip(g.outputs, of.outputs, strict=True)
        if v != old and v not in ends
    }
    b = begin(replace(g, roles=()), g.level)
    for n in g.nodes:
        op, results = n.op.substitute(names), tuple(names.get(v, v) for v in n.results)
        same = op is n.op and results == n.results
        b.put(n if same else replace(n, op=op, results=results))
    made = b.finish(names.get(v, v) for v in g.outputs)
    return replace(made, roles=of.roles)
