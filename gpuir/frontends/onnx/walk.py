"""The walk over a graph, branch or function of an ONNX model, node by node."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gpuir.frontends.emit import Emitter, UnknownValue, settings
from gpuir.frontends.onnx import sequence
from gpuir.frontends.onnx.attributes import check_read
from gpuir.frontends.onnx.definition import check_stated, diagnosis, infer, type_proto
from gpuir.frontends.onnx.legacy import MODERN, modernise
from gpuir.frontends.onnx.messages import messages
from gpuir.frontends.onnx.node import OnnxNode
from gpuir.frontends.onnx.proto import (
    Attributes,
    declared_type,
    sparse_array,
    sparse_type,
    subgraphs,
    tensor_array,
    tensor_type,
)
from gpuir.frontends.onnx.sequence import Items
from gpuir.frontends.onnx.state import DEEPEST_CALL, OnnxLoad
from gpuir.frontends.onnx.steps import GraphSteps, NodeStep, domain_of, free_names, key_of
from gpuir.frontends.onnx.table import CONVERTERS
from gpuir.ir.errors import GpuirError, ModelError, nearest
from gpuir.ir.graph import Loc, Op, Value
from gpuir.ir.types import TensorType, f32
from gpuir.ops import tensor as t

if TYPE_CHECKING:
    from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto
NOT_TENSORS = re.compile("^Optional|^Sequence|Sequence$|^String|^Regex")  # operators


class OnnxWalk:
    """One graph, branch or function body: names to values, and where the nodes go."""

    def __init__(
        self,
        load: OnnxLoad,
        emit: Emitter,
        opsets: Mapping[str, int],
        outer: OnnxWalk | None = None,
        attributes: Mapping[str, Any] | None = None,
    ):
        self.load, self.emit, self.opsets, self.outer = load, emit, opsets, outer
        self.attributes = attributes  # of the call, inside a function
        self.env: dict[str, Any] = {}  # a Value, Items, None, or what to raise
        self.types: dict[str, Any] = {}  # declared types, used for operators nobody knows
        self.places: dict[str, Loc] = {}
        self.path = outer.path if outer else ""
        self.loc: Loc | None = outer.loc if outer else None  # of all nodes, in a schema's function
        self.title = outer.title if outer else ""  # of values' names, inside a function

    # -- names

    def value(self, name: str, where: str = "") -> Value:
        found = self.find(name, where)
        if found is None:
            raise ModelError(
                f"{name!r} is an optional value that is absent, but a node reads it", where=where
            )
        return found

    def find(self, name: str, where: str = "") -> Value | None:
        """The value called `name` here or outside; None for an absent optional argument."""
        walk: OnnxWalk | None = self
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
            raise self.load.source.refused(f"two initializers have the name {name!r}")
        try:
            value = self.emit.weight(type(), array, name)
        except ModelError as error:  # strings: an error only when somebody reads them
            self.env[name] = error
            return
        const = self.emit.known[value]
        const.name, const.named, const.sized = name, True, False
        self.env[name] = value

    # -- graphs within

    def inside(self, emit: Emitter | None = None) -> OnnxWalk:
        """A walk of a subgraph, which sees the names here; into the same graph or a region."""
        return OnnxWalk(
            load=self.load,
            emit=emit or self.emit,
            opsets=self.opsets,
            outer=self,
            attributes=self.attributes,
        )

    def enter(self, graph: GraphProto, arguments: Sequence[Value | None]) -> tuple[Value, ...]:
        """Walks a subgraph on these arguments and gives its outputs."""
        steps = self.load.steps_of(graph)
        self.emit.keep(self.load.names(graph))
        self.types = {v.name: v.type for v in (*graph.value_info, *graph.output)}
        self.initializers(graph)
        if len(arguments) != len(steps.inputs):
            raise ModelError(
                "the number of inputs of the subgraph is wrong",
                expected=str(len(arguments)),
                found=f"{len(steps.inputs)}: {', '.join(steps.inputs)}",
            )
        self.env.update(zip(steps.inputs, arguments, strict=True))
        state = self.emit.builder.locs, self.emit.prefix
        self.run(steps)
        self.emit.builder.locs, self.emit.prefix = state
        return tuple(self.value(name) for name in steps.outputs)

    def skip(self, graph: GraphProto) -> None:
        """Checks a subgraph that does not run, as far as that goes without shapes: its nodes count
        as folded."""
        steps = self.load.steps_of(graph)
        for name in self.free(graph):
            self.find(name, self.emit.builder.locs[0])
        for step in steps.each:
            self.load.visited.setdefault(self.loc or self.load.loc(self.path + step.name))
            for inner in subgraphs(step.attributes):
                self.load.steps_of(inner)

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

    def run(self, steps: GraphSteps) -> None:
        for step in steps.each:
            self.node(step)

    # -- nodes

    def node(self, step: NodeStep) -> None:
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

    def convert(self, step: NodeStep, name: str, loc: Loc) -> None:
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
            value: Any = results[i] if i < len(results) else None
            if value is None:
                raise ModelError(f"{step.op}: output {i} ({wish!r}) is not supported")
            if behind and not isinstance(value, Items):
                self.load.sized.add(value)
            if wish in self.env:
                raise ModelError(f"{wish!r} is defined twice", where=loc)
            if wish in self.load.values and not isinstance(value, Items):
                value = self.given_numbers(wish, value)
            self.env[wish] = value
            self.places[wish] = loc

    def given_numbers(self, name: str, value: Value) -> Value:
        """The numbers the user says a node computes, in place of the result."""
        load, type = self.load, value.type
        load.given_results.discard(name)
        array = load.laid_out(np.asarray(load.values[name]), type.shape)
        array = load.given(name, array, type)
        shown = " ".join(str(array).split())
        self.emit.assume(f"{name} is assumed to hold {shown[:80]}")
        return self.emit.constant(array, name=name)

    def results(
        self, step: NodeStep, name: str, inputs: tuple[Value | None, ...]
    ) -> tuple[bool, tuple[Value | None, ...]]:
        """Whether the node is a call of one of the model's own functions, and its results."""
        load, key = self.load, key_of(step.op, step.domain)
        attributes = Attributes(step.attributes, load.source, self.attributes)
        function = load.functions.get((step.domain, step.op, step.overload))
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
        if function is not None:
            return True, self.call(function, n, attributes, self.loc)
        if n.version < MODERN and not step.domain:
            n = modernise(n)
        converter = CONVERTERS.get(key) or self.emit.scope.converter(key)
        reads = any(isinstance(v, Items) for v in inputs) and key not in sequence.READERS
        if reads and key == "Identity":
            return False, inputs
        if reads and (converter is not None or not step.domain):
            raise ModelError(
                f"{step.op} reads a sequence",
                expected="a tensor; gpuir supports sequences only in nodes that build, index or "
                "concatenate them, and in loops and branches",
                fix="export the model without sequences",
            )
        if converter is None:
            return False, self.unconverted(step, n, attributes)
        check_stated(key, n.op, n.inputs, n.attrs, getattr(converter, "ranks", ""))
        results = converter(n, self.emit)
        given = results if isinstance(results, tuple) else (results,)
        is_nothing = all(v is None or v in n.inputs for v in given)  # to do, whatever they say
        if key in CONVERTERS and not is_nothing:
            version = self.opsets.get(step.domain, 1)
            for attribute in check_read(key, step, version, attributes):
                load.warn(
                    f"{load.source.name}: {key} has no attribute {attribute!r} in opset {version}: "
                    "it is ignored"
                )
        return False, () if results is None else given

    # -- functions

    def call(
        self, function: FunctionProto, n: OnnxNode, attributes: Attributes, loc: Loc | None
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
        body = OnnxWalk(load, self.emit, opsets, attributes=given)
        body.path = body.title = f"{n.name}/"
        body.loc = loc
        steps = load.steps_of_function(function)
        if len(n.inputs) > len(steps.inputs):
            found = f"{len(n.inputs)} of {len(steps.inputs)}"
            raise ModelError(f"{key}: the call has more inputs than the function", found=found)
        body.env.update(dict.fromkeys(steps.inputs))
        body.env.update(zip(steps.inputs, n.inputs, strict=False))
        load.calls.append(key)
        try:
            body.run(steps)
        finally:
            load.calls.pop()
        wanted = steps.outputs[: len(n.outputs)]
        return tuple(body.find(v, self.load.loc(n.name)) for v in wanted)

    def unconverted(
        self, step: NodeStep, n: OnnxNode, attributes: Attributes
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
                fix = nearest(step.op, known)
            elif other.domain:
                fix = f"the domain {other.domain} has it"
            else:
                fix = f"opset {other.since_version} and later have it"
            raise ModelError(
                f"{step.op}: opset {n.version} of ai.onnx has no such operator", fix=fix
            )
        if not step.domain and NOT_TENSORS.search(step.op):
            raise ModelError(
                f"{step.op} works on strings, sequences or optional values",
                expected="operators on tensors of numbers, which is what gpuir analyses",
                fix="remove this part of the model, or export it without such values",
            )
        if schema is not None:
            function = self.schema_function(schema, step, n, attributes)
            if function is not None:
                function.name, function.domain = step.op, step.domain
                loc = self.emit.builder.locs[0]
                return self.call(function, n, attributes, loc)
        outside = tuple(self.find(name, self.load.loc(n.name)) for name in step.free)
        n = replace(n, inputs=(*n.inputs, *outside))
        return self.opaque(n, self.opaque_types(schema, step, n))

    def opaque(self, n: OnnxNode, types: Sequence[TensorType]) -> tuple[Value, ...]:
        """An operator whose results' types are all that is known of it, as a `t.opaque`. It reads
        all tensors that it is given, those of sequences too, and those that its attributes hold."""
        key = key_of(n.op, n.domain)
        given = sequence.tensors_in(n, self.emit)
        held = self.held(n.attrs) if isinstance(n.attrs, Attributes) else ()
        operands = (*given, *held)
        self.load.opaque.append(f"{self.load.loc(n.name)}: {key}")
        self.load.warn(
            f"{self.load.loc(n.name)}: gpuir does not know the operator {key}. It "
            "counts the memory traffic (each input read once, each result written "
            "once), but no arithmetic"
        )
        attrs = settings(n.attrs.plain() if isinstance(n.attrs, Attributes) else n.attrs.items())
        read = tuple(self.emit.place(v, stored=True) for v in operands)
        return self.emit.add(t.Opaque(key, read, tuple(types), attrs), fold=False)

    def held(self, attributes: Attributes) -> Iterator[Value]:
        """The tensors that a node's attributes hold, alone, in lists, or as a subgraph's own."""
        source = self.load.source
        for name in attributes:
            a = attributes.proto(name)
            if a is None:
                continue
            graphs = (*subgraphs({name: a}),)
            inside = (x for graph in graphs for x in graph.initializer)
            for x in (*((a.t,) if a.HasField("t") else ()), *a.tensors, *inside):
                yield self.emit.weight(tensor_type(x), partial(tensor_array, x, source), name)

    def schema_function(
        self, schema: Any, step: NodeStep, n: OnnxNode, attributes: Attributes
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

    def resolved(self, step: NodeStep, attributes: Attributes) -> NodeProto:
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

    def opaque_types(self, schema: Any, step: NodeStep, n: OnnxNode) -> tuple[TensorType, ...]:
        """The result types of an operator we cannot convert: inferred by its schema, or as the
        model declares them."""
        inferred = infer(schema, step, n.inputs, self.opsets) if schema is not None else {}
        types: list[TensorType] = []
        for name in step.outputs:
            type = inferred.get(name) or self.declared(name, n)
            if name and type is None:
                raise n.refused(
                    "gpuir does not know the operator and cannot tell the type of "
                    f"its result {name!r}",
                    "the type of the result in the value_info of the model, or a "
                    "converter for the operator",
                    fix="add the type with onnx.helper.make_tensor_value_info, or write a module "
                    f'with CONVERTERS = {{"{key_of(step.op, step.domain)}": convert}} and load '
                    "it: --load mine.py",
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
        given = (v for v in n.inputs if v is not None and not isinstance(v, Items))
        first = next((v.type.shape for v in given), ())
        if extents and extents[0] is None and first:
            extents[0] = first[0]
            self.emit.assume(f"{n.name}: {name} is assumed to be as long as the first input")
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
            return "give the numbers from which it is computed: " + " ".join(lines)
        source = f" ({', '.join(names[:4])})" if names else ""
        if (name := self.computed_as(value)) and value.type.size <= 16:
            guess = "128" if value.type.size == 1 and value.type.dtype.is_integer else "1"
            numbers = ",".join([guess] * value.type.size)
            return (
                f"the shape depends on the data{source}; give the content of %{name}:\n"
                f"--value {shlex.quote(name)}={numbers}   (for example)"
            )
        return f"the shape depends on the data{source}; export the model with fixed shapes"

    def computed_as(self, value: Value) -> str:
        """The model's own name for a computed value, if it has one."""
        walk: OnnxWalk | None = self
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
