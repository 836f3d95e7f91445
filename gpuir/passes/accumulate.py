"""Gradients added up from step to step, in a graph that has them already."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuir.ir.build import Builder, begin
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Level, Value
from gpuir.ir.phases import in_phase
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass


@dataclass(frozen=True)
class Accumulate(Pass):
    """Adds each gradient `w.grad` that a graph gives to a buffer of that name, kept from step to
    step; the output `w.grad.new` takes it over. PyTorch adds each by a kernel of its own."""

    name = "accumulate"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        found = dict.fromkeys(v for v in g.outputs if g.role_of(v) == "gradient")
        if not found:
            raise UsageError(
                f"accumulate: the graph @{g.name} computes no gradients",
                expected="outputs with the role gradient",
                fix="add the pass autodiff before this pass",
            )
        b = begin(g, Level.graph)
        b.reserve(v.name for n in g.nodes for v in n.results if v not in found)
        buffers = {v: b.param(v.name, v.type) for v in found}
        own = {v: Value(b.names.fresh(f"{v.name}.step"), v.type) for v in found}
        sums: dict[Value, Value] = {}
        for node in g.nodes:
            results = tuple(own.get(v, v) for v in node.results)
            b.put(replace(node, op=node.op.substitute(own), results=results))
            for v in node.results:
                if v in own:
                    b.locs = in_phase((f"{g.name}:{v.name}/accumulate",), "backward")
                    sums[v] = b(t.Map("add", (buffers[v], own[v])), f"{v.name}.new")
                    b.roles[sums[v].name] = "gradient"
        over = [*g.over, *(None,) * (len(g.outputs) - len(g.over))]
        left = dict(buffers)  # an output that is given twice takes a buffer over once
        over = [left.pop(v, o) for v, o in zip(g.outputs, over, strict=True)]
        return b.finish((sums.get(v, v) for v in g.outputs), over)


def additions(g: Graph) -> Graph:
    """A graph of nothing but the kernels that add each gradient of another to its buffer: what a
    microbatch takes besides its own passes, where earlier ones have left gradients."""
    b = Builder(Level.graph, g.name)
    b.framework, b.profile = g.framework, g.profile
    sums: list[Value] = []
    buffers: list[Value] = []
    for v in dict.fromkeys(v for v in g.outputs if g.role_of(v) == "gradient"):
        b.locs = in_phase((f"{g.name}:{v.name}/accumulate",), "backward")
        buffer, step = b.param(v.name, v.type), b.input(f"{v.name}.step", v.type)
        total = b(t.Map("add", (buffer, step)), f"{v.name}.new")
        buffers.append(buffer)
        sums.append(total)
        b.roles |= dict.fromkeys((buffer.name, step.name, total.name), "gradient")
    return b.finish(sums, buffers)
