"""What every walk over one ONNX model shares: what was given, what was met, what is to be said."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuir.frontends.onnx.proto import Dim, OpenedModel, evaluate_dim, subgraphs, text
from gpuir.frontends.onnx.steps import GraphSteps, domain_of, in_order, step_of
from gpuir.interp import to_numpy_dtype
from gpuir.ir.build import NameTable
from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Loc, Value
from gpuir.ir.types import TensorType

if TYPE_CHECKING:
    from onnx import FunctionProto, GraphProto, NodeProto

MOST_EXTRA = 100_000  # nodes beyond those of the graph: functions expanded, loops written out
DEEPEST_CALL = 64  # functions within functions
LONG_KNOWN = 22  # opset of onnx 1.17, the oldest package that we take: newer ones know it too

Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class OnnxLoad:
    """One model being loaded, and all that was found on the way."""

    source: OpenedModel
    dims: Mapping[str, int]
    shapes: Shapes
    values: Mapping[str, Any]
    trip_counts: Mapping[str, int]
    expert_skew: float
    strict: bool
    converters: Mapping[str, Callable[..., Any]]
    warnings: list[str] = field(default_factory=list[str])
    opaque: list[str] = field(default_factory=list[str])
    symbols: dict[str, int] = field(default_factory=dict[str, int])
    input_types: dict[str, TensorType] = field(default_factory=dict[str, TensorType])
    visited: dict[Loc, None] = field(default_factory=dict[Loc, None])
    origins: dict[Loc, str] = field(default_factory=dict[Loc, str])
    loops: set[str] = field(default_factory=set[str])
    given_results: set[str] = field(default_factory=set[str])  # of `values`, not met so far
    sized: set[Value] = field(default_factory=set[Value])  # whose size or numbers the user bound
    converted: int = 0  # nodes, each time anew
    calls: list[str] = field(default_factory=list[str])  # functions being expanded
    known_steps: dict[int, tuple[Any, GraphSteps]] = field(
        default_factory=dict[int, tuple[Any, GraphSteps]]
    )
    node_names: NameTable = field(default_factory=NameTable)
    functions: dict[tuple[str, str, str], FunctionProto] = field(
        default_factory=dict[tuple[str, str, str], Any]
    )
    sizes: dict[tuple[str, str, str], int] = field(default_factory=dict[tuple[str, str, str], int])

    def grown(self, nodes: Iterable[NodeProto], depth: int = 0) -> int:
        """How many nodes these come to, at least, with functions in place of their calls: counted
        once a function, as the walk would take each call anew. Of branches, the smaller counts."""
        total = 0
        for node in nodes:
            inside = [
                self.grown(g.node, depth) for g in subgraphs({a.name: a for a in node.attribute})
            ]
            total += 1 + (min(inside) if inside and node.op_type == "If" else sum(inside))
            key = domain_of(text(node.domain)), text(node.op_type), text(node.overload)
            if key in self.functions and key not in self.sizes and depth < DEEPEST_CALL:
                self.sizes[key] = 0  # as long as it is being counted: it may call itself
                self.sizes[key] = self.grown(self.functions[key].node, depth + 1)
            total += self.sizes.get(key, 0)
        return total

    def check_size(self, nodes: int, where: str) -> None:
        most = MOST_EXTRA + 2 * len(self.source.model.graph.node)
        if nodes > most:
            raise ModelError(
                f"the model expands to more than {most} nodes",
                where=where,
                found="nested functions, or loops that gpuir unrolls",
            )

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def loc(self, name: str) -> Loc:
        return f"{self.source.name}:{name}"

    # -- what the file says of itself

    def opsets(self, imports: Iterable[Any]) -> dict[str, int]:
        """Version by domain. `ModelError` for those older or newer than we know."""
        opsets: dict[str, int] = {}
        for entry in imports:
            domain = domain_of(text(entry.domain))
            opsets[domain] = max(entry.version, opsets.get(domain, 0))
        model = self.source.model
        if "" not in opsets:
            if imports is model.opset_import and any(
                not domain_of(n.domain) for n in model.graph.node
            ):
                raise self.source.refused(
                    "the model has no opset version",
                    "an opset_import for ai.onnx",
                    fix="the file may be incomplete: download or export it again",
                )
            opsets[""] = _newest_opset()
        newest = LONG_KNOWN if 1 <= opsets[""] <= LONG_KNOWN else _newest_opset()
        if not 1 <= opsets[""] <= newest:
            raise self.source.refused(
                f"opset {opsets['']} is not supported",
                f"1 to {newest}",
                opsets[""],
                "upgrade the onnx package, or convert the model with onnx.version_converter",
            )
        return opsets

    def names(self, graph: GraphProto) -> Iterator[str]:
        """Every name the graph gives to a value."""
        yield from (text(v.name) for v in (*graph.input, *graph.output, *graph.initializer))
        yield from (text(v.values.name) for v in graph.sparse_initializer)
        for node in graph.node:
            yield from map(text, node.output)

    def steps_of(self, graph: GraphProto) -> GraphSteps:
        """The graph's nodes in order, made once; their names are unique in the load."""
        known = self.known_steps.get(id(graph))
        if known is not None:
            return known[1]
        listed = [step_of(node, i) for i, node in enumerate(graph.node)]
        listed = [
            step if name == step.name else replace(step, name=name)
            for step in listed
            for name in (self.node_names.fresh(step.name),)
        ]
        given = {v.name for v in (*graph.input, *graph.initializer)}
        steps = GraphSteps(
            in_order(listed, given, self.source.name),
            tuple(text(v.name) for v in graph.input),
            tuple(text(v.name) for v in graph.output),
        )
        self.known_steps[id(graph)] = graph, steps
        return steps

    def steps_of_function(self, function: FunctionProto) -> GraphSteps:
        known = self.known_steps.get(id(function))
        if known is None:
            listed = [step_of(node, i) for i, node in enumerate(function.node)]
            ordered = in_order(listed, set(function.input), self.loc(function.name))
            inputs, outputs = map(text, function.input), map(text, function.output)
            known = function, GraphSteps(ordered, tuple(inputs), tuple(outputs))
            self.known_steps[id(function)] = known
        return known[1]

    def laid_out(self, array: np.ndarray, dims: tuple[Dim, ...] | None) -> np.ndarray:
        """A list of numbers in the shape declared. Where more than one extent is open, the last
        takes all."""
        if array.ndim != 1 or dims is None or len(dims) == 1:
            return array
        shape = [self.extent(d) for d in dims]
        open_axes = [i for i, n in enumerate(shape) if n is None]
        for i in open_axes:
            rest = prod(n for n in shape if n is not None)
            last = i == open_axes[-1] and rest and array.size % rest == 0
            shape[i] = array.size // rest if last else 1
        fits = prod(n for n in shape if n is not None) == array.size
        return array.reshape([n for n in shape if n is not None]) if fits else array

    def given(self, name: str, array: np.ndarray, type: TensorType) -> np.ndarray:
        if array.shape != type.shape:
            raise self.source.refused(
                f"--value {name}: the shape is wrong", type, list(array.shape)
            )
        try:
            return array.astype(to_numpy_dtype(type.dtype))
        except (TypeError, ValueError, OverflowError) as error:
            raise self.source.refused(
                f"--value {name}: the value does not match the type of the tensor", type, error
            ) from None

    def extent(self, dim: Dim) -> int | None:
        return evaluate_dim(dim, self.symbols) if isinstance(dim, str) else dim

    def at_one(self) -> str:
        """The sizes to try where shapes do not fit each other: a model exported for a batch of one
        may say that it takes any."""
        first = (v.type.tensor_type.shape.dim[:1] for v in self.source.model.graph.input)
        names = dict.fromkeys(d.dim_param for dims in first for d in dims)
        larger = [f"{name}=1" for name in names if self.symbols.get(name, 1) > 1]
        if not larger:
            return ""
        pairs = shlex.quote(",".join(larger))
        return f"--dims {pairs}, if the model was exported for that size only"


def _newest_opset() -> int:
    from onnx import defs

    return defs.onnx_opset_version()
