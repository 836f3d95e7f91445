"""The walk over an ONNX model: dims bound, each node converted under its name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuir.frontends.emit import Emitter, Scope, UnknownValue, nested_too_deep
from gpuir.frontends.model import Model, Weights
from gpuir.frontends.onnx import sequence
from gpuir.frontends.onnx.definition import check_stated, diagnosis, infer, type_proto
from gpuir.frontends.onnx.legacy import MODERN, modernise
from gpuir.frontends.onnx.messages import messages
from gpuir.frontends.onnx.node import OnnxNode
from gpuir.frontends.onnx.plan import Plan, Step, domain_of, free_names, in_order, key_of, step_of
from gpuir.frontends.onnx.proto import (
    Attributes,
    Dim,
    Source,
    declared_type,
    dim_names,
    evaluate_dim,
    open_model,
    sparse_array,
    sparse_type,
    subgraphs,
    tensor_array,
    tensor_type,
    text,
)
from gpuir.frontends.onnx.sequence import Items
from gpuir.frontends.onnx.table import CONVERTERS
from gpuir.interp import to_numpy_dtype
from gpuir.ir.build import NameTable
from gpuir.ir.errors import GpuirError, ModelError
from gpuir.ir.graph import Loc, Op, Value
from gpuir.ir.types import DType, TensorType, f32, i64
from gpuir.ops import tensor as t

if TYPE_CHECKING:
    from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto

NOT_TENSORS = re.compile("^Optional|^Sequence|Sequence$|^String|^Regex")  # operators
MOST_EXTRA = 100_000  # nodes beyond those of the graph: functions expanded, loops written out
DEEPEST_CALL = 64  # functions within functions
LONG_KNOWN = 22  # opset of onnx 1.17, the oldest package that we take: newer ones know it too

Shapes = Mapping[str, tuple[int, ...]]


def load(
    source: str | Path | bytes | ModelProto,
    *,
    dims: Mapping[str, int] = {},
    inputs: Mapping[str, tuple[int, ...]] = {},
    values: Mapping[str, Any] = {},
    trip_counts: Mapping[str, int] = {},
    expert_skew: float = 0.0,
    converters: Mapping[str, Callable[..., Any]] = {},
    strict: bool = False,
) -> Model:
    """An ONNX model as a graph of level `graph`. Weights are not read.

    `dims` binds symbolic dimensions by name and `inputs` gives an input its shape; every dimension
    must be known in the end. `values` gives an input its numbers, so that shapes may depend on
    them, or says what a node computes where a shape depends on the data. `trip_counts` says, by
    node, how often a loop runs where the model does not, `expert_skew` how unevenly routers choose
    experts (`t.Experts.skew`); `converters` are the user's own, by operator. An operator nobody
    knows becomes a `t.opaque` and a warning; `strict` refuses it. Raises `ModelError`.
    """
    opened = open_model(source)
    try:
        how = (dims, inputs, values, trip_counts, expert_skew, strict, converters)
        return _Load(opened, *how).run()
    except RecursionError:
        raise nested_too_deep(opened.name) from None
    except MemoryError:
        raise ModelError(
            "there is not enough memory to load the model", where=opened.name
        ) from None
    except GpuirError as error:
        error.where = error.where or opened.name
        raise
    except Exception as error:
        raise ModelError(
            "the model is not well-formed, or gpuir misreads it",
            where=opened.name,
            found=f"{type(error).__name__}: {error}"[:400],
            fix="check the model with onnx.checker; if that finds nothing, report this",
        ) from error


# ---------------------------------------------------------------------------- the load


@dataclass
class _Load:
    """What the whole load shares."""

    source: Source
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
    plans: dict[int, tuple[Any, Plan]] = field(default_factory=dict[int, tuple[Any, Plan]])
    node_names: NameTable = field(default_factory=NameTable)
    functions: dict[tuple[str, str, str], FunctionProto] = field(
        default_factory=dict[tuple[str, str, str], Any]
    )
    sizes: dict[tuple[str, str, str], int] = field(default_factory=dict[tuple[str, str, str], int])

    def run(self) -> Model:
        model = self.source.model
        graph = model.graph
        opsets = self.opsets(model.opset_import)
        for f in model.functions:
            key = domain_of(text(f.domain)), text(f.name), text(f.overload)
            if self.functions.setdefault(key, f) != f:
                raise ModelError(f"the function {key[1]!r} is defined twice, in different ways")
        self.check_size(self.grown(graph.node), self.source.name)
        plan = self.plan(graph)
        title = Path(self.source.name).stem if self.source.folder else text(graph.name)
        emit = Emitter(
            title or "model", Scope(expert_skew=self.expert_skew, converters=self.converters)
        )
        emit.builder.framework = "onnx"
        emit.keep(self.names(graph))
        walk = Walk(self, emit, opsets)
        walk.types = {v.name: v.type for v in (*graph.value_info, *graph.output)}
        walk.initializers(graph)
        self.inputs(graph, walk)
        walk.run(plan)
        self.check_trip_counts()
        self.check_given(self.given_results)
        if self.strict and self.opaque:
            raise ModelError(
                "operators that gpuir does not know",
                where=self.source.name,
                found="\n".join(dict.fromkeys(self.opaque)),
                fix="leave out --strict to count their memory traffic alone",
            )
        outputs = self.outputs(graph, walk)
        read = {v for node in emit.builder.nodes for v in node.op.operands} | set(outputs)
        made = emit.finish(outputs)
        present = {loc for node in made.walk() for loc in node.locs}
        params = tuple(p for p in made.params if p in read)
        folded = tuple(loc for loc in self.visited if loc not in present)
        weights = Weights({p.name: emit.scope.weights[p.name] for p in params})
        by_origin = sorted(
            (pair for pair in self.origins.items() if pair[0] in present), key=lambda x: x[1]
        )
        made = replace(made, params=params, folded=folded, origins=tuple(by_origin))
        return Model(made, weights, tuple(dict.fromkeys(self.warnings)))

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
                f"the model grows to more than {most} nodes",
                where=where,
                found="functions within functions, or loops that are written out",
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
                raise ModelError(
                    "the model does not name its opset",
                    where=self.source.name,
                    expected="an opset_import for ai.onnx",
                    fix="the file may be cut short: fetch or export it again",
                )
            opsets[""] = _newest_opset()
        newest = LONG_KNOWN if 1 <= opsets[""] <= LONG_KNOWN else _newest_opset()
        if not 1 <= opsets[""] <= newest:
            raise ModelError(
                f"opset {opsets['']} is not supported",
                where=self.source.name,
                expected=f"1 to {newest}",
                found=str(opsets[""]),
                fix="upgrade the onnx package, or convert the model with onnx.version_converter",
            )
        return opsets

    def names(self, graph: GraphProto) -> Iterator[str]:
        """Every name the graph gives to a value."""
        yield from (text(v.name) for v in (*graph.input, *graph.output, *graph.initializer))
        yield from (text(v.values.name) for v in graph.sparse_initializer)
        for node in graph.node:
            yield from map(text, node.output)

    def plan(self, graph: GraphProto) -> Plan:
        """The graph's nodes in order, made once; their names are unique in the load."""
        known = self.plans.get(id(graph))
        if known is not None:
            return known[1]
        steps = [step_of(node, i) for i, node in enumerate(graph.node)]
        steps = [
            step if name == step.name else replace(step, name=name)
            for step in steps
            for name in (self.node_names.fresh(step.name),)
        ]
        given = {v.name for v in (*graph.input, *graph.initializer)}
        plan = Plan(
            in_order(steps, given, self.source.name),
            tuple(text(v.name) for v in graph.input),
            tuple(text(v.name) for v in graph.output),
        )
        self.plans[id(graph)] = graph, plan
        return plan

    def function_plan(self, function: FunctionProto) -> Plan:
        known = self.plans.get(id(function))
        if known is None:
            steps = [step_of(node, i) for i, node in enumerate(function.node)]
            ordered = in_order(steps, set(function.input), self.loc(function.name))
            inputs, outputs = map(text, function.input), map(text, function.output)
            known = function, Plan(ordered, tuple(inputs), tuple(outputs))
            self.plans[id(function)] = known
        return known[1]

    # -- inputs

    def inputs(self, graph: GraphProto, walk: Walk) -> None:
        """Defines the graph's inputs, each of known shape."""
        declared: dict[str, tuple[DType, tuple[Dim, ...] | None]] = {}
        for v in graph.input:
            is_weight = v.name in walk.env and v.name not in self.shapes
            if is_weight and v.name not in self.values:
                continue
            if v.name in declared:
                raise ModelError(f"two inputs are called {v.name!r}", where=self.source.name)
            try:
                declared[v.name] = declared_type(v.type, v.name)
            except ModelError as error:
                error.where = error.where or f"{self.source.name}: input"
                raise
        for name in self.shapes:
            if name not in declared:
                raise ModelError(
                    f"--input {name}: the model has no such input",
                    where=self.source.name,
                    fix=_nearest(name, declared),
                )
        self.given_results = self.values.keys() - declared.keys()
        if not self.functions:
            self.check_given(self.given_results - _computed(graph))
        shapes = {name: tuple(shape) for name, shape in self.shapes.items()}
        self.bind(graph, declared, shapes)
        given: dict[str, np.ndarray] = {}
        for name, (_, dims) in declared.items():
            if name in self.values:
                given[name] = self.laid_out(np.asarray(self.values[name]), dims)
                shapes.setdefault(name, given[name].shape)
        self.bind(graph, declared, {name: a.shape for name, a in given.items()})
        unbound: list[str] = []
        types: dict[str, TensorType] = {}
        for name, (dtype, dims) in declared.items():
            shape = shapes.get(name) or dims
            extents = [self.extent(d) for d in shape] if shape is not None else [None]
            if None in extents:
                unbound.append(name)
                continue
            try:
                types[name] = TensorType(tuple(n for n in extents if n is not None), dtype)
            except ModelError as error:
                error.where = self.loc(name)
                raise
        if unbound:
            raise self.unbound(declared, unbound)
        for name, type in types.items():
            if name in given:
                walk.env[name] = walk.emit.constant(self.given(name, given[name], type), name=name)
                shown = " ".join(str(given[name]).split())
                walk.emit.assume(f"input {name} holds {shown[:80]}")
            else:
                walk.env[name] = value = walk.emit.input(name, type)
                self.input_types[name] = type
                if not all(isinstance(d, int) for d in declared[name][1] or (None,)):
                    self.sized.add(value)

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
            raise ModelError(
                f"--value {name}: the wrong shape",
                where=self.source.name,
                expected=str(type),
                found=str(list(array.shape)),
            )
        try:
            return array.astype(to_numpy_dtype(type.dtype))
        except (TypeError, ValueError, OverflowError) as error:
            raise ModelError(
                f"--value {name}: not of the input's type",
                where=self.source.name,
                expected=str(type),
                found=str(error),
            ) from None

    def extent(self, dim: Dim) -> int | None:
        return evaluate_dim(dim, self.symbols) if isinstance(dim, str) else dim

    def bind(
        self,
        graph: GraphProto,
        declared: Mapping[str, tuple[DType, tuple[Dim, ...] | None]],
        shapes: Shapes,
    ) -> None:
        """Fills `symbols` from the dims given and from the shapes given."""
        named = {d for _, dims in declared.values() for d in dims or () if isinstance(d, str)}
        parts = {part for d in named for part in dim_names(d)}
        for name, n in self.dims.items():
            if name not in named | parts and name not in _dims_inside(graph):
                known = sorted(named)
                raise ModelError(
                    f"--dims {name}={n}: the model has no such dimension",
                    where=self.source.name,
                    fix=_nearest(name, known)
                    if known
                    else "the inputs' dimensions have no names: give --input NAME=1x3x224x224",
                )
            if n < 0:
                raise ModelError(f"--dims {name}={n}", expected="an extent of 0 or more")
            self.symbols[name] = n
        for name, shape in shapes.items():
            dims = declared[name][1]
            shown = _show(declared[name])
            option = "--input" if name in self.shapes else "--value"
            if min(shape, default=0) < 0:
                raise ModelError(f"--input {name}", expected="no negative extent", found=str(shape))
            if dims is not None and len(dims) != len(shape):
                raise ModelError(
                    f"{option} {name}: the wrong number of dimensions",
                    where=self.source.name,
                    expected=f"{len(dims)}: {shown}",
                    found=f"{len(shape)}: {list(shape)}",
                )
            for axis, (dim, n) in enumerate(zip(dims or (), shape, strict=False)):
                known = self.extent(dim)
                if known is None and isinstance(dim, str):
                    self.symbols[dim] = n
                elif known is not None and known != n:
                    fixed = isinstance(dim, int)
                    raise ModelError(
                        f"{option} {name}: axis {axis} does not fit",
                        where=self.source.name,
                        expected=f"{known}" + ("" if fixed else f", as {dim} is given elsewhere"),
                        found=f"{n}",
                        fix="the model fixes this extent: export it with a symbolic one"
                        if fixed
                        else "",
                    )

    def unbound(
        self, declared: Mapping[str, tuple[DType, tuple[Dim, ...] | None]], unbound: Sequence[str]
    ) -> ModelError:
        """The error for inputs whose shapes are not known, with a line to copy."""
        names: dict[str, int] = {}
        lines: list[str] = []
        fixes = fixed_by_weights(self.source.model.graph)
        fixed_names: set[str] = set()
        for name in unbound:
            dtype, dims = declared[name]
            fixed = fixes.get(name, {})
            missing = [d for d in dims or () if self.extent(d) is None]
            if dims is None or any(d is None for d in missing):
                guess = dims if dims is not None else (None,) * 2
                extents = [
                    known
                    if (known := self.extent(d)) is not None
                    else fixed.get(i, fixed.get(i - len(guess))) or _guess(d, i, guess, dtype)
                    for i, d in enumerate(guess)
                ]
                shape = "x".join(map(str, extents))
                lines.append(f"--input {shlex.quote(f'{name}={shape}')}")
                continue
            for i, d in enumerate(dims):
                if isinstance(d, str) and self.extent(d) is None and d not in fixed_names:
                    size = fixed.get(i, fixed.get(i - len(dims)))
                    names[d] = size or names.get(d) or _guess(d, i, dims, dtype)
                    fixed_names |= {d} if size else set()
        if names:
            pairs = ",".join(f"{name}={n}" for name, n in names.items())
            lines.insert(0, f"--dims {shlex.quote(pairs)}")
        shown = [f"{name}: {_show(declared[name])}" for name in unbound]
        return ModelError(
            "dimensions of the inputs are not known",
            where=self.source.name,
            expected="an extent for each"
            + (f": {', '.join(names)}" if names else " ?")
            + (", and for each ?" if names and len(lines) > 1 else ""),
            found="\n".join(shown[:20]),
            fix=" ".join(lines[:20]) + "   (for example)",
        )

    def at_one(self) -> str:
        """The sizes to try where shapes do not fit each other: a model exported for a batch of one
        may say that it takes any."""
        first = (v.type.tensor_type.shape.dim[:1] for v in self.source.model.graph.input)
        names = dict.fromkeys(d.dim_param for dims in first for d in dims)
        larger = [f"{name}=1" for name in names if self.symbols.get(name, 1) > 1]
        if not larger:
            return ""
        pairs = shlex.quote(",".join(larger))
        return f"--dims {pairs}, if the model was exported for that size alone"

    def check_trip_counts(self) -> None:
        for name in self.trip_counts:
            if name not in self.loops:
                raise ModelError(
                    f"--trip-count {name}: the model has no such loop",
                    where=self.source.name,
                    fix=_nearest(name, self.loops) if self.loops else "the model has no loops",
                )

    def check_given(self, unknown: Iterable[str]) -> None:
        """Refuses `values` for what the model neither takes nor computes."""
        for name in sorted(unknown):
            graph = self.source.model.graph
            raise ModelError(
                f"--value {name}: the model has no such input, nor computes it",
                where=self.source.name,
                fix=_nearest(name, [*(v.name for v in graph.input), *sorted(_computed(graph))]),
            )

    # -- outputs

    def outputs(self, graph: GraphProto, walk: Walk) -> tuple[Value, ...]:
        """The graph's outputs under the model's names, each a value of its own."""
        emit, builder = walk.emit, walk.emit.builder
        names = [v.name for v in graph.output]
        wanted = dict.fromkeys(names)
        if len(wanted) != len(names):
            raise ModelError("two outputs have one name", where=self.source.name)
        renamed: dict[Value, Value] = {}
        outputs: dict[str, Value] = {}
        taken: set[Value] = set()
        for v in graph.output:
            name = v.name
            value = walk.value(name, f"{self.source.name}: output")
            if isinstance(value, Items):
                raise ModelError(
                    f"the output {name!r} is a sequence",
                    where=self.source.name,
                    expected="tensors of numbers",
                    fix="make its items outputs of their own",
                )
            builder.locs = (walk.places.get(name, self.loc(name)),)
            value = emit.place(value)
            if value.name != name or value in taken:
                free = builder.producer(value) is not None and value not in taken
                if free and value.name not in wanted:
                    taken.add(value)
                    renamed[value] = emit.rename(value, name)
                    value = renamed[value]
                else:
                    value = emit.put(t.Map("identity", (value,)), name)
            taken.add(value)
            outputs[name] = value
            self.check_declared(v, value.type)
        if renamed:
            builder.rename(0, renamed)
        return tuple(renamed.get(v, v) for v in outputs.values())

    def check_declared(self, output: Any, type: TensorType) -> None:
        """Warns where an output's declared shape is not what the model computes."""
        if output.type.WhichOneof("value") != "tensor_type":
            return
        dtype, dims = declared_type(output.type, output.name)
        fits = dims is None or (
            len(dims) == type.rank
            and all(
                n is None or n == m for n, m in zip(map(self.extent, dims), type.shape, strict=True)
            )
        )
        if dtype != type.dtype or not fits:
            self.warn(
                f"{self.source.name}: output {output.name} is declared {_show((dtype, dims))} "
                f"but computed as {type}"
            )


def _dims_inside(graph: GraphProto) -> set[str]:
    """Names of symbolic dims anywhere in the graph."""
    found: set[str] = set()
    for v in (*graph.value_info, *graph.output):
        found.update(d.dim_param for d in v.type.tensor_type.shape.dim if d.dim_param)
    return found


def _computed(graph: GraphProto) -> set[str]:
    """Names of the nodes' results, here and in subgraphs."""
    found: set[str] = set()
    for node in graph.node:
        found.update(map(text, node.output))
        for inner in subgraphs({a.name: a for a in node.attribute}):
            found |= _computed(inner)
    return found


def _show(declared: tuple[DType, tuple[Dim, ...] | None]) -> str:
    dtype, dims = declared
    if dims is None:
        return f"{dtype} of unknown rank"
    return f"{dtype}[{', '.join('?' if d is None else str(d) for d in dims)}]"


def fixed_by_weights(graph: GraphProto) -> dict[str, dict[int, int]]:
    """What the weights that they are multiplied with say of inputs: extents by axis, which is
    counted from the end where it is negative."""
    weights = {text(w.name): tuple(w.dims) for w in graph.initializer}
    found: dict[str, dict[int, int]] = {}
    for node in graph.node:
        x, w, *_ = (*map(text, node.input), "", "")
        shape = weights.get(w, ())
        given = {text(a.name): a.i for a in node.attribute}
        match text(node.op_type):
            case "MatMul" if len(shape) > 1:
                found.setdefault(x, {})[-1] = shape[-2]
            case "Gemm" if len(shape) == 2 and not given.get("transA"):
                found.setdefault(x, {})[-1] = shape[1 if given.get("transB") else 0]
            case "Conv" if len(shape) > 2:
                found.setdefault(x, {})[1] = shape[1] * (given.get("group") or 1)
            case _:
                pass
    return found


def _guess(dim: Dim, axis: int, dims: Sequence[Dim], dtype: DType) -> int:
    """A plausible extent, for the line an error offers to copy."""
    name = str(dim or "").lower()
    if "batch" in name or name in ("n", "b", "bs") or (axis == 0 and "seq" not in name):
        return 1
    if "seq" in name or "len" in name or "token" in name or dtype.is_integer:
        return 128
    if len(dims) == 4:
        channels_last = dims[3] in (1, 3, 4)
        return 3 if axis == (3 if channels_last else 1) else 224
    if len(dims) == 3 and axis == 1 and isinstance(dims[0], int) and isinstance(dims[2], int):
        return 1  # the state of a recurrent network: [layers, batch, hidden]
    return 128


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    close = get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {', '.join(close)}?"
    return f"one of {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}" if known else ""


# ---------------------------------------------------------------------------- the walk


class Walk:
    """One graph, branch or function body: names to values, and where the nodes go."""

    def __init__(
        self,
        load: _Load,
        emit: Emitter,
        opsets: Mapping[str, int],
        outer: Walk | None = None,
        attributes: Mapping[str, Any] | None = None,
    ):
        self.load, self.emit, self.opsets, self.outer = load, emit, opsets, outer
        self.attributes = attributes  # of the call, inside a function
        self.env: dict[str, Value | ModelError | None] = {}
        self.types: dict[str, Any] = {}  # declared types, used for operators nobody knows
        self.places: dict[str, Loc] = {}
        self.path = outer.path if outer else ""
        self.loc: Loc | None = outer.loc if outer else None  # of all nodes, in a schema's function
        self.title = outer.title if outer else ""  # of values' names, inside a function

    # -- names

    def value(self, name: str, where: str = "") -> Value:
        found = self.find(name, where)
        if found is None:
            raise ModelError(f"{name!r} is an absent optional value", where=where)
        return found

    def find(self, name: str, where: str = "") -> Value | None:
        """The value called `name` here or outside; None for an absent optional argument."""
        walk: Walk | None = self
        while walk is not None:
            if name in walk.env:
                found = walk.env[name]
                if isinstance(found, ModelError):
                    found.where = where
                    raise found
                return found
            walk = walk.outer
        known: list[str] = []
        walk = self
        while walk is not None:
            known += walk.env
            walk = walk.outer
        close = get_close_matches(name, known, n=3, cutoff=0.5)
        raise ModelError(
            f"{name!r} is not defined",
            where=where,
            expected="an input, an initializer or the result of a node",
            fix=f"did you mean {', '.join(close)}?"
            if close
            else "the model is incomplete: export it again",
        )

    def initializers(self, graph: GraphProto) -> None:
        """Defines the graph's weights, whose numbers stay where they are."""
        source = self.load.source
        for tensor in graph.initializer:
            self.weight(
                tensor.name,
                lambda x=tensor: tensor_type(x),
                lambda x=tensor: tensor_array(x, source),
            )
        for sparse in graph.sparse_initializer:
            name = sparse.values.name
            self.weight(
                name, lambda x=sparse: sparse_type(x), lambda x=sparse: sparse_array(x, source)
            )

    def weight(
        self, name: str, type: Callable[[], TensorType], array: Callable[[], np.ndarray]
    ) -> None:
        if name in self.env:
            raise ModelError(f"two initializers are called {name!r}", where=self.load.source.name)
        try:
            value = self.emit.weight(type(), array, name)
        except ModelError as error:  # strings: an error only when somebody reads them
            self.env[name] = error
            return
        const = self.emit.known[value]
        const.name, const.named, const.sized = name, True, False
        self.env[name] = value

    # -- graphs within

    def inside(self, emit: Emitter | None = None) -> Walk:
        """A walk of a subgraph, which sees the names here; into the same graph or a region."""
        return Walk(self.load, emit or self.emit, self.opsets, self, self.attributes)

    def enter(self, graph: GraphProto, arguments: Sequence[Value | None]) -> tuple[Value, ...]:
        """Walks a subgraph on these arguments and gives its outputs."""
        plan = self.load.plan(graph)
        self.emit.keep(self.load.names(graph))
        self.types = {v.name: v.type for v in (*graph.value_info, *graph.output)}
        self.initializers(graph)
        if len(arguments) != len(plan.inputs):
            raise ModelError(
                "the subgraph takes another number of inputs",
                expected=str(len(arguments)),
                found=f"{len(plan.inputs)}: {', '.join(plan.inputs)}",
            )
        self.env.update(zip(plan.inputs, arguments, strict=True))
        state = self.emit.builder.locs, self.emit.prefix
        self.run(plan)
        self.emit.builder.locs, self.emit.prefix = state
        return tuple(self.value(name) for name in plan.outputs)

    def skip(self, graph: GraphProto) -> None:
        """Checks a subgraph that does not run, as far as that goes without shapes: its nodes count
        as folded."""
        plan = self.load.plan(graph)
        for name in self.free(graph):
            self.find(name, self.emit.builder.locs[0])
        for step in plan.steps:
            self.load.visited.setdefault(self.loc or self.load.loc(self.path + step.name))
            for inner in subgraphs(step.attributes):
                self.load.plan(inner)

    def free(self, graph: GraphProto) -> tuple[str, ...]:
        """The names that a subgraph reads from here."""
        return tuple(dict.fromkeys(free_names(graph)))

    def notes(self) -> tuple[int, int, int]:
        """A mark to `forget` back to: what a subgraph that is dropped again had to report."""
        return len(self.load.warnings), len(self.load.opaque), len(self.emit.scope.assumed)

    def forget(self, notes: tuple[int, int, int]) -> None:
        lists = self.load.warnings, self.load.opaque, self.emit.scope.assumed
        for some, length in zip(lists, notes, strict=True):
            del some[length:]

    def run(self, plan: Plan) -> None:
        for step in plan.steps:
            self.node(step)

    # -- nodes

    def node(self, step: Step) -> None:
        name = self.path + step.name
        loc = self.loc or self.load.loc(name)
        self.load.converted += 1
        self.load.check_size(self.load.converted, loc)
        try:
            self.convert(step, name, loc)
        except UnknownValue as error:
            if not error.where:
                error.where = loc
                error.fix = error.fix or self.how_to_know(error.value)
            raise
        except GpuirError as error:
            error.where = error.where or loc
            if error.what.startswith("t."):  # shapes that do not fit
                error.fix = error.fix or self.load.at_one()
            raise
        except (RecursionError, MemoryError):
            raise
        except Exception as error:
            found = [self.find(v, loc) if v else None for v in step.inputs]
            inputs = [v if isinstance(v, Value) else None for v in found]
            raise diagnosis(step, inputs, self.opsets, loc, error) from error

    def convert(self, step: Step, name: str, loc: Loc) -> None:
        emit = self.emit
        inputs = tuple(self.find(v, loc) if v else None for v in step.inputs)
        emit.builder.locs, emit.prefix = (loc,), name
        read = (v.type.dtype.name if isinstance(v, Value) else "-" for v in inputs)
        origin = f"{key_of(step.op, step.domain)}@{self.opsets.get(step.domain, 1)}"
        self.load.origins.setdefault(loc, " ".join((origin, *read)))
        start = len(emit.builder.nodes)
        scope, before = emit.scope, (emit.scope.sized, emit.scope.shaped)
        behind = [v for v in inputs if isinstance(v, Value) and v in self.load.sized]
        scope.sized, scope.shaped = any(map(emit.const_of, behind)), bool(behind)
        is_call, results = self.results(step, name, inputs)
        scope.sized, scope.shaped = before
        if not is_call:
            self.load.visited[loc] = None
        wishes = [self.title + v if v else "" for v in step.outputs]
        results = emit.name_results(start, results, wishes)
        for i, wish in enumerate(step.outputs):
            if not wish:
                continue
            value = results[i] if i < len(results) else None
            if value is None:
                raise ModelError(f"{step.op}: output {i} ({wish!r}) is not supported")
            if behind and not isinstance(value, Items):
                self.load.sized.add(value)
            if wish in self.env:
                raise ModelError(f"{wish!r} is defined twice", where=loc)
            if wish in self.load.values and not isinstance(value, Items):
                value = self.said(wish, value)
            self.env[wish] = value
            self.places[wish] = loc

    def said(self, name: str, value: Value) -> Value:
        """The numbers the user says a node computes, in place of the result."""
        load, type = self.load, value.type
        load.given_results.discard(name)
        array = load.laid_out(np.asarray(load.values[name]), type.shape)
        array = load.given(name, array, type)
        shown = " ".join(str(array).split())
        self.emit.assume(f"{name} is taken to hold {shown[:80]}")
        return self.emit.constant(array, name=name)

    def results(
        self, step: Step, name: str, inputs: tuple[Value | None, ...]
    ) -> tuple[bool, tuple[Value | None, ...]]:
        """Whether the node is a call of one of the model's own functions, and its results."""
        load, key = self.load, key_of(step.op, step.domain)
        attributes = Attributes(step.attributes, load.source, self.attributes)
        function = load.functions.get((step.domain, step.op, step.overload))
        if function is not None:
            return True, self.call(function, name, inputs, attributes, self.loc, len(step.outputs))
        if key == "Constant":
            return False, (self.constant(attributes, name),)
        n = OnnxNode(
            op=step.op,
            domain=step.domain,
            version=self.opsets.get(step.domain, 1),
            name=name,
            inputs=inputs,
            outputs=step.outputs,
            attrs=attributes,
            emit=self.emit,
            walk=self,
        )
        if n.version < MODERN and not step.domain:
            n = modernise(n)
        if any(isinstance(v, Items) for v in inputs) and key not in sequence.CONVERTERS:
            if key == "Identity":
                return False, inputs
            raise ModelError(
                f"{step.op} reads a sequence",
                expected="a tensor; sequences are followed where they are made, indexed and joined",
                fix="export the model without sequences",
            )
        converter = CONVERTERS.get(key) or self.emit.scope.converter(key)
        if converter is None:
            return False, self.unconverted(step, n, attributes)
        check_stated(key, n.op, n.inputs, n.attrs)
        results = converter(n, self.emit)
        if results is None:
            return False, ()
        return False, results if isinstance(results, tuple) else (results,)

    def constant(self, attributes: Attributes, name: str) -> Value:
        source = self.load.source
        if (a := attributes.proto("value")) is not None:
            return self.emit.weight(tensor_type(a.t), lambda: tensor_array(a.t, source), name)
        if (a := attributes.proto("sparse_value")) is not None:
            sparse = a.sparse_tensor
            return self.emit.weight(sparse_type(sparse), lambda: sparse_array(sparse, source), name)
        for key, dtype in (("value_float", f32), ("value_int", i64)):
            for attribute in (key, key + "s"):
                if attribute in attributes:
                    return self.emit.constant(attributes[attribute], dtype, name)
        found = ", ".join(attributes) or "no attribute"
        raise ModelError(
            "Constant: no numbers", expected="value, value_int(s) or value_float(s)", found=found
        )

    # -- functions

    def call(
        self,
        function: FunctionProto,
        name: str,
        inputs: Sequence[Value | None],
        attributes: Attributes,
        loc: Loc | None,
        outputs: int,
    ) -> tuple[Value | None, ...]:
        """The function's body in place of the call."""
        load = self.load
        key = key_of(function.name, domain_of(function.domain))
        if key in load.calls:
            raise ModelError("a function calls itself", found=" calls ".join([*load.calls, key]))
        if len(load.calls) >= DEEPEST_CALL:
            raise ModelError(f"functions nested more than {DEEPEST_CALL} deep", found=key)
        opsets = load.opsets(function.opset_import)
        defaults = {a.name: a for a in function.attribute_proto if a.name not in attributes}
        given = _Merged(attributes, Attributes(defaults, load.source))
        body = Walk(load, self.emit, opsets, attributes=given)
        body.path = body.title = f"{name}/"
        body.loc = loc
        plan = load.function_plan(function)
        if len(inputs) > len(plan.inputs):
            found = f"{len(inputs)} of {len(plan.inputs)}"
            raise ModelError(f"{key}: more inputs than the function takes", found=found)
        body.env.update(dict.fromkeys(plan.inputs))
        body.env.update(zip(plan.inputs, inputs, strict=False))
        load.calls.append(key)
        try:
            body.run(plan)
        finally:
            load.calls.pop()
        wanted = plan.outputs[:outputs]
        return tuple(body.find(v, self.load.loc(name)) for v in wanted)

    def unconverted(
        self, step: Step, n: OnnxNode, attributes: Attributes
    ) -> tuple[Value | None, ...]:
        """An operator without a converter: its function's body if ONNX defines it by one, else an
        opaque op. In ONNX's own domain, one that does not exist is an error."""
        from onnx import defs

        try:
            schema = defs.get_schema(step.op, n.version, step.domain)
        except defs.SchemaError:
            schema = None
        if schema is None and not step.domain:
            known = {s.name: s for s in defs.get_all_schemas()}
            other = known.get(step.op)
            if other is None:
                fix = _nearest(step.op, known)
            elif other.domain:
                fix = f"it belongs to the domain {other.domain}"
            else:
                fix = f"it is there since opset {other.since_version}"
            raise ModelError(
                f"{step.op}: ai.onnx has no such operator in opset {n.version}", fix=fix
            )
        if not step.domain and NOT_TENSORS.search(step.op):
            raise ModelError(
                f"{step.op} works on strings, sequences or optional values",
                expected="operators on tensors of numbers, which is what gpuir analyses",
                fix="cut this part off the model, or export it without such values",
            )
        if schema is not None:
            function = self.schema_function(schema, step, n, attributes)
            if function is not None:
                function.name, function.domain = step.op, step.domain
                loc = self.emit.builder.locs[0]
                return self.call(function, n.name, n.inputs, attributes, loc, len(step.outputs))
        return self.opaque(n, self.opaque_types(schema, step, n))

    def opaque(self, n: OnnxNode, types: Sequence[TensorType]) -> tuple[Value, ...]:
        """An operator whose results' types are all that is known of it, as a `t.opaque`."""
        key = key_of(n.op, n.domain)
        operands = tuple(v for v in n.inputs if v is not None)
        self.load.opaque.append(f"{self.load.loc(n.name)}: {key}")
        self.load.warn(
            f"{self.load.loc(n.name)}: {key} is not known: its operands count as read once and its "
            "results as written once, its arithmetic not at all"
        )
        return self.emit.add(t.Opaque(key, operands, tuple(types)), fold=False)

    def schema_function(
        self, schema: Any, step: Step, n: OnnxNode, attributes: Attributes
    ) -> FunctionProto | None:
        """The body that ONNX itself gives the operator, for these operands."""
        read = messages().FunctionProto.FromString

        def newest(versions: Sequence[int]) -> int | None:
            return max((v for v in versions if v <= n.version), default=None)

        if schema.has_function:
            version = newest(schema.function_opset_versions)
            if version is not None:
                function = read(schema.get_function_with_opset_version(version))
                return self.with_defaults(function, schema)
        if schema.has_context_dependent_function:
            version = newest(schema.context_dependent_function_opset_versions)
            if version is not None:
                node = self.resolved(step, attributes)
                types = [type_proto(v.type).SerializeToString() if v else b"" for v in n.inputs]
                body = schema.get_context_dependent_function_with_opset_version(
                    version, node.SerializeToString(), types
                )
                if body:
                    return self.with_defaults(read(body), schema)
        return None

    def with_defaults(self, function: FunctionProto, schema: Any) -> FunctionProto:
        for name, attribute in schema.attributes.items():
            if attribute.default_value.name:
                function.attribute_proto.add().CopyFrom(attribute.default_value)
                function.attribute_proto[-1].name = name
        if not function.opset_import:
            function.opset_import.add(domain="", version=self.opsets.get("", 1))
        return function

    def resolved(self, step: Step, attributes: Attributes) -> NodeProto:
        """The node with references to the enclosing call's attributes replaced by their values."""
        node: NodeProto = messages().NodeProto()
        node.CopyFrom(step.proto)
        del node.attribute[:]
        for name in attributes:
            proto = attributes.proto(name)
            if proto is not None:
                node.attribute.add().CopyFrom(proto)
                node.attribute[-1].name = name
        return node

    # -- opaque operators

    def opaque_types(self, schema: Any, step: Step, n: OnnxNode) -> tuple[TensorType, ...]:
        """The result types of an operator we cannot convert: inferred by its schema, or as the
        model declares them."""
        inferred = infer(schema, step, n.inputs, self.opsets) if schema is not None else {}
        types: list[TensorType] = []
        for name in step.outputs:
            type = inferred.get(name) or self.declared(name, n)
            if name and type is None:
                raise ModelError(
                    f"{n.op}: the operator is not known, nor the type of its result {name!r}",
                    expected="a converter for it, or the result's type in the model's value_info",
                    fix="add it there: onnx.helper.make_tensor_value_info makes one; or load a "
                    f'module with CONVERTERS = {{"{key_of(step.op, step.domain)}": convert}}: '
                    "--load mine.py",
                )
            types.append(type or TensorType((0,), f32))
        return tuple(types)

    def declared(self, name: str, n: OnnxNode) -> TensorType | None:
        """The type the model declares. A leading extent it leaves open is the first operand's."""
        proto = self.types.get(name)
        if proto is None or proto.WhichOneof("value") is None:
            return None
        dtype, dims = declared_type(proto, name)
        extents = [self.load.extent(d) for d in dims or ()]
        first = next((v.type.shape for v in n.inputs if v is not None), ())
        if extents and extents[0] is None and first:
            extents[0] = first[0]
            self.emit.assume(f"{n.name}: {name} is taken to be as long as the first operand")
        if dims is None or None in extents:
            return None
        return TensorType(tuple(n for n in extents if n is not None), dtype)

    # -- errors

    def how_to_know(self, value: Value) -> str:
        """What to do about a shape that depends on `value`: give the inputs it comes from."""
        types = self.load.input_types
        behind = list(self.behind(value))
        names = [v.name for v, op in behind if op is None and v.name in types]
        drawn = any(isinstance(op, t.Routine) and op.fn == "random" for _, op in behind)
        if names and not drawn and sum(types[name].size for name in names) <= 32:
            known = self.compared(value)
            lines = [
                f"--value {shlex.quote(name)}=" + ",".join([known] * max(types[name].size, 1))
                for name in names
            ]
            return "give the numbers it comes from: " + " ".join(lines)
        source = f" ({', '.join(names[:4])})" if names else ""
        if (name := self.computed_as(value)) and value.type.size <= 16:
            guess = "128" if value.type.size == 1 and value.type.dtype.is_integer else "1"
            numbers = ",".join([guess] * value.type.size)
            return (
                f"the shape depends on the data{source}; say what %{name} holds:\n"
                f"--value {shlex.quote(name)}={numbers}   (for example)"
            )
        return f"the shape depends on the data{source}; export the model with fixed shapes"

    def computed_as(self, value: Value) -> str:
        """The model's own name for a computed value, if it has one."""
        walk: Walk | None = self
        while walk is not None:
            for name, v in walk.env.items():
                if v is value and name not in self.load.input_types:
                    return name
            walk = walk.outer
        return ""

    def compared(self, value: Value) -> str:
        """A number to offer for an input: the one it is compared with, or 1."""
        op: Any = next((op for e in self.emitters() if (op := e.builder.producer(value))), None)
        if isinstance(op, t.Map) and op.imm and op.fn in ("eq", "le", "ge"):
            return str(op.imm[0])
        return "1"

    def emitters(self) -> Iterator[Emitter]:
        emit: Emitter | None = self.emit
        while emit is not None:
            yield emit
            emit = emit.outer

    def behind(self, value: Value) -> Iterator[tuple[Value, Op | None]]:
        """What a value is computed from, itself first, each with the op that makes it."""
        emitters = list(self.emitters())
        seen, stack = {value}, [value]
        while stack:
            v = stack.pop()
            op = next((op for e in emitters if (op := e.builder.producer(v)) is not None), None)
            yield v, op
            new = [x for x in op.operands if x not in seen] if op else []
            seen.update(new)
            stack += new


class _Merged(Attributes):
    """A call's attributes, with the function's defaults behind them."""

    def __init__(self, given: Attributes, defaults: Attributes):
        self._both = given, defaults

    def __getitem__(self, name: str) -> Any:
        given, defaults = self._both
        return given[name] if name in given else defaults[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._both[0], *self._both[1])))

    def __len__(self) -> int:
        return len(set(self._both[0]) | set(self._both[1]))

    def proto(self, name: str) -> AttributeProto | None:
        given, defaults = self._both
        return given.proto(name) if name in given else defaults.proto(name)


def _newest_opset() -> int:
    from onnx import defs

    return defs.onnx_opset_version()
