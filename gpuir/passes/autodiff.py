"""Reverse-mode differentiation: the backward pass of any graph, as a graph."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf

from gpuir.ir.build import begin
from gpuir.ir.errors import ModelError, UsageError, nearest
from gpuir.ir.graph import Graph, Level, Loc, Value
from gpuir.ir.phases import in_phase, is_training
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t
from gpuir.passes.backward import dependent, live, prepare, sweep
from gpuir.passes.manager import Pass
from gpuir.passes.reverse import Reverse


@dataclass(frozen=True)
class Autodiff(Pass):
    """Appends the backward pass: of an output, `loss` or the first float one, the gradient with
    respect to params, or what the globs `wrt` name. That of `w` becomes the output `w.grad`, of
    role gradient. `loss_scale` multiplies every gradient, so that f16 can hold the small ones.
    `checkpoint` and `every` name modules to run again in backward.

    A loss of several cells stands for their sum. Backward reads what the forward pass computed,
    which therefore stays in memory; `checkpoint` is a glob of modules by their path in the
    locations (`encoder.layer.*`), each of which is run again instead, from its inputs. `every`
    makes one segment of so many of them; by itself it means modules with a number for a name
    (`layers.0`).

    Griewank, Walther: Evaluating Derivatives, 2nd edition, 2008, chapters 3 and 12; Chen, Xu,
    Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost, 2016.
    """

    loss: str = ""
    wrt: str = ""
    checkpoint: str = ""
    every: int = 0
    loss_scale: float = 1.0

    name = "autodiff"
    takes = gives = Level.graph

    def __post_init__(self) -> None:
        if self.every < 0:
            found = f"every={self.every}"
            raise UsageError(
                "autodiff: `every` is out of range", expected="every=1 or more", found=found
            )
        if not 0 < self.loss_scale < inf:
            raise UsageError(
                "autodiff: loss_scale is out of range", found=f"loss_scale={self.loss_scale}"
            )

    def run(self, g: Graph) -> Graph:
        loss, wrt = self.output(g), self.variables(g)
        b = begin(g, Level.graph)
        b.reserve(v.name for n in g.nodes for v in n.results)
        needs = dependent(g.nodes, wrt)
        nodes = prepare(g.nodes, needs, b.names)
        for node in nodes:
            b.put(node)
        forward = len(b.nodes)
        if loss.type.dtype.is_complex:
            b.assumed.append(f"the gradient is that of the sum of both parts of %{loss.name}")
        elif loss.type.size != 1:
            b.assumed.append(f"the gradient is that of the sum of %{loss.name}")
        elif not self.loss and (others := [v for v in g.outputs if is_number(v) and v != loss]):
            names = ", ".join(f"%{v.name}" for v in others)
            b.assumed.append(
                f"the loss is %{loss.name}, the first output, not {names} (--loss selects another)"
            )
        r = Reverse(b, needs)
        b.locs = in_phase(place(g, loss), "backward")
        r.give(loss, self.seed(r, loss.type))
        sweep(r, nodes, self.segments(g))
        gradients = {v: dv for v in wrt if (dv := r.take(v)) is not None}
        if missing := [f"%{v.name}" for v in wrt if v not in gradients]:
            b.assumed.append(f"%{loss.name} does not depend on {', '.join(missing)}")
        outputs = self.outputs(r, gradients, forward)
        b.nodes[forward:] = live(b.nodes[forward:], outputs)
        b.roles.update((v.name, "gradient") for v in outputs)
        b.folded = list(g.folded)
        return b.finish((*g.outputs, *outputs), g.over)

    def seed(self, r: Reverse, type: TensorType) -> Value:
        """The gradient of the loss: one, and of complex numbers one for each part."""
        if not type.dtype.is_complex:
            return r.constant(type, self.loss_scale)
        parts = t.Parts(Value("loss", type)).result_types[0]
        return r.b(t.Parts(r.constant(parts, self.loss_scale)))

    def output(self, g: Graph) -> Value:
        """The output to differentiate, a real one before a complex one: none that takes over an
        input, as a norm's new mean does."""
        over = g.over or (None,) * len(g.outputs)
        own = (v for v, taken in zip(g.outputs, over, strict=True) if taken is None)
        inexact = sorted((v for v in own if v.type.dtype.is_inexact), key=is_complex)
        floats = {v.name: v for v in inexact}
        if not floats:
            found = ", ".join(f"%{v.name}: {v.type}" for v in g.outputs)
            raise ModelError(
                "the model has no output to differentiate", expected="a float output", found=found
            )
        if self.loss and self.loss not in floats:
            fix = nearest(self.loss, floats)
            raise UsageError(
                f"autodiff: no floating-point output has the name {self.loss!r}", fix=fix
            )
        return floats[self.loss] if self.loss else next(iter(floats.values()))

    def variables(self, g: Graph) -> list[Value]:
        """The params and inputs to differentiate by."""
        if is_training(g):
            raise UsageError(f"autodiff: @{g.name} already has a backward pass")
        floats = [v for v in (*g.params, *g.inputs) if v.type.dtype.is_inexact]
        if not self.wrt:
            found = [v for v in floats if g.role_of(v) == "weight"]
            if not found:
                raise UsageError(
                    "autodiff: the model has no floating-point parameters",
                    fix='give names of inputs: wrt="x y"',
                )
            return found
        names = [v.name for v in floats]
        found: list[Value] = []
        for glob in self.wrt.split():
            hits = [v for v in floats if v.name == glob or fnmatchcase(v.name, glob)]
            if not hits:
                what = f"autodiff: no floating-point parameter or input matches {glob!r}"
                raise UsageError(what, fix=nearest(glob, names))
            found += hits
        return list(dict.fromkeys(found))

    def segments(self, g: Graph) -> list[int | None]:
        """The checkpointed segment that each node belongs to, if any."""
        if not self.checkpoint and not self.every:
            return [None] * len(g.nodes)
        pattern = re.compile(module_pattern(self.checkpoint), re.DOTALL)
        found = [pattern.match(node.locs[0].partition(":")[2]) for node in g.nodes]
        modules = list(dict.fromkeys(m[1] for m in found if m))
        if not modules:
            raise UsageError(
                "autodiff: there are no modules to checkpoint",
                expected=f"source locations that match {self.checkpoint!r}"
                if self.checkpoint
                else "modules with a number as their name, like layers.0",
                found=", ".join(node.locs[0] for node in g.nodes[:3]) + ", ...",
            )
        place = {module: i // max(self.every, 1) for i, module in enumerate(modules)}
        return [place[m[1]] if m else None for m in found]

    def outputs(self, r: Reverse, gradients: Mapping[Value, Value], start: int) -> list[Value]:
        """The gradients under their names."""
        b = r.b
        made = {v for node in b.nodes[start:] for v in node.results}
        names: dict[Value, Value] = {}
        for v, dv in gradients.items():
            if dv in names or dv not in made:  # somebody else's too
                b.locs = next(n.locs for n in reversed(b.nodes) if dv in n.results)
                dv = r.map("identity", dv)
            names[dv] = Value(b.names.fresh(f"{v.name}.grad"), dv.type)
        b.rename(start, names)
        return list(names.values())


def place(g: Graph, value: Value) -> tuple[Loc, ...]:
    """Where a value is made."""
    node = g.producers().get(value)
    return node.locs if node else (f"{g.name}:{value.name}",)


def module_pattern(glob: str) -> str:
    """A regular expression for the path of a module, its first group, at the start of a location.
    `*` is any part of one name in the path, `**` any part of the path."""
    if not glob:
        return r"(.*?[./]\d+)(?=[./])"
    parts = re.split(r"(\*\*|\*|\?)", glob)
    wild = {"**": ".*?", "*": "[^./]*", "?": "[^./]"}
    return rf"((?:.*?[./])??{''.join(wild.get(p) or re.escape(p) for p in parts)})(?=[./]|$)"


def is_complex(v: Value) -> bool:
    return v.type.dtype.is_complex


def is_number(v: Value) -> bool:
    """Whether a value may be a loss."""
    return v.type.dtype.is_float and v.type.size == 1
