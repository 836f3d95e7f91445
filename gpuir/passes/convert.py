"""The same model in other types: in fewer bits, with a dimension padded, with weights kept in more
bits or packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from gpuir.ir.build import Builder, begin
from gpuir.ir.errors import ModelError, UsageError, nearest
from gpuir.ir.graph import Graph, Level, Node, Op, Value, field_names
from gpuir.ir.phases import beside, is_training
from gpuir.ir.types import DType, TensorType, bf16, f16, f32, i8
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass

KEPT = {"f32": f32, "f16": f16, "bf16": bf16}  # dtypes that weights are kept in
LEAST_WEIGHT = 1 << 16  # cells: what is smaller is not worth packing

TypeOf = Callable[[TensorType], TensorType]
AttributeOf = Callable[[Any], Any]


@dataclass(frozen=True)
class Convert(Pass):
    """Runs in `dtype`, f16 or bf16, all that is f32, or 16 bits of the other kind: weights, inputs
    and what comes of them, as `module.half()` does, or a converter of ONNX files. What accumulates,
    still does so in f32. With `edges` the inputs and outputs keep their types, and are cast inside:
    so are those of an engine that `trtexec --fp16` builds (NVIDIA TensorRT documentation, trtexec:
    inputs and outputs are fp32 unless --inputIOFormats says otherwise), and of an ONNX file that
    onnxruntime converts (onnxconverter_common.float16, keep_io_types)."""

    dtype: str = "f16"
    edges: bool = False

    name = "convert"
    takes = gives = Level.graph

    def __post_init__(self) -> None:
        if self.dtype not in ("f16", "bf16"):
            fix = nearest(self.dtype, ("f16", "bf16"))
            raise UsageError(f"pass 'convert': {self.dtype!r} is not supported", fix=fix)

    def run(self, g: Graph) -> Graph:
        check_inference(g, self.name, "autocast{dtype=" + self.dtype + "}")
        return converted(g, f16 if self.dtype == "f16" else bf16, self.edges)


def converted(g: Graph, dtype: DType, edges: bool = False) -> Graph:
    """The graph with `dtype` wherever it has f32 or 16 bits; with `edges`, between its inputs and
    outputs alone."""

    def attribute(value: Any) -> Any:
        return dtype if value in (f32, f16, bf16) else value

    made = _Retyped(lambda x: replace(x, dtype=attribute(x.dtype)), attribute).graph(g)
    return _with_edges(made, g) if edges else made


def _with_edges(g: Graph, was: Graph) -> Graph:
    """The graph with the inputs and outputs of `was`, which it casts. An output that takes over an
    input's memory and a cast that nothing needs stay as they are."""
    b = begin(replace(g, inputs=was.inputs), g.level)
    b.reserve(v.name for n in g.nodes for v in n.results)
    new: dict[Value, Value] = {}

    def cast(v: Value, dtype: DType, name: str, at: Node) -> Value:
        b.locs = beside(at.locs, "cast")
        return b(t.Cast(v, dtype), f"{name}.{dtype}")

    def inside(v: Value, at: Node) -> Value:
        if v not in new:
            old = given[v]
            new[v] = old if old.type == v.type else cast(old, v.type.dtype, v.name, at)
        return new[v]

    given = dict(zip(g.inputs, was.inputs, strict=True))
    made = {v: n for n in g.nodes for v in n.results}
    for node in g.nodes:
        read = {v: inside(v, node) for v in node.op.operands if v in given}
        b.put(replace(node, op=node.op.substitute(read)) if read else node)
    outputs: list[Value] = []
    for v, old in zip(g.outputs, was.outputs, strict=True):
        if v in given:
            outputs.append(given[v])
        elif v.type == old.type or v not in made:
            outputs.append(v)
        else:
            outputs.append(cast(v, old.type.dtype, v.name, made[v]))
    over = [None if v is None else given[v] for v in g.over]
    return b.finish(outputs, over)


@dataclass(frozen=True)
class Extend(Pass):
    """Makes dimensions of extent `old` longer, wherever that number stands for one: 50257 words
    become 50304, in weights, results and sizes alike. ModelError where the model does not fit
    together any more: the number stands for something else too."""

    old: int = 0
    new: int = 0

    name = "extend"
    takes = gives = Level.graph

    def __post_init__(self) -> None:
        if not 1 < self.old <= self.new:
            raise UsageError(
                "pass 'extend': the new size must be larger than the old one",
                expected="extend{old=50257,new=50304}",
                found=f"old={self.old}, new={self.new}",
            )

    def run(self, g: Graph) -> Graph:
        def attribute(value: Any) -> Any:
            return self.new if type(value) is int and value == self.old else value

        def longer(type: TensorType) -> TensorType:
            return replace(type, shape=tuple(map(attribute, type.shape)))

        return _Retyped(longer, attribute).graph(g)


@dataclass(frozen=True)
class Keep(Pass):
    """Keeps the weights in `dtype`, and casts each where it is read to the dtype that it had: so do
    FSDP's MixedPrecision(param_dtype), and frameworks with master weights."""

    dtype: str = "f32"

    name = "keep"
    takes = gives = Level.graph

    def __post_init__(self) -> None:
        if self.dtype not in KEPT:
            fix = nearest(self.dtype, KEPT)
            raise UsageError(f"pass 'keep': {self.dtype!r} is not supported", fix=fix)

    def run(self, g: Graph) -> Graph:
        check_inference(g, self.name, "put this pass before autodiff")
        kept = KEPT[self.dtype]
        weights = {
            v: Value(v.name, v.type.with_dtype(kept))
            for v in g.params
            if g.role_of(v) == "weight" and v.type.dtype in KEPT.values() and v.type.dtype != kept
        }
        b = begin(replace(g, params=tuple(weights.get(v, v) for v in g.params)), g.level)
        b.reserve(v.name for n in g.nodes for v in n.results)
        for node in g.nodes:
            read = [v for v in dict.fromkeys(node.op.operands) if v in weights]
            b.locs = beside(node.locs, "cast")  # a kernel of its own where operators are
            casts = {v: b(t.Cast(weights[v], v.type.dtype), f"{v.name}.cast") for v in read}
            b.put(replace(node, op=node.op.substitute(casts)) if casts else node)
        return b.finish(g.outputs, g.over)


@dataclass(frozen=True)
class Pack(Pass):
    """Stores the weights of products in 8 bits, with a scale for each column in the dtype they had:
    a product reads the bytes and converts them on their way. Weights that others read too stay.
    """

    name = "pack"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        check_inference(g, self.name, "remove this pass")
        packed = {v.name for v in read_by_products(g) if is_packable(v.type)}
        return _Retyped(lambda x: x, lambda value: value, packed).graph(g)


def check_inference(g: Graph, name: str, fix: str) -> None:
    if is_training(g):
        raise UsageError(f"{name}: @{g.name} already has a backward pass", fix=fix)


def is_packable(type: TensorType) -> bool:
    return type.rank == 2 and type.size >= LEAST_WEIGHT


def read_by_products(g: Graph, convolutions: bool = False) -> list[Value]:
    """Weights that products alone read, and convolutions if they are asked for, as right operands,
    transposed or not."""
    uses = g.uses()

    def is_right(v: Value, node: Node) -> bool:
        match node.op:
            case t.Matmul(a=a, b=b):
                return b == v and a != v
            case t.Conv(x=x, w=w) if convolutions:
                return w == v and x != v
            case t.Transpose():
                (result,) = node.results
                inner = uses.get(result, [])
                return bool(inner) and all(is_right(result, n) for n in inner)
            case _:
                return False

    outputs = set(g.outputs)
    return [
        v
        for v in g.params
        if v.type.dtype in KEPT.values()
        and v not in outputs
        and uses.get(v)
        and all(is_right(v, n) for n in uses[v])
    ]


class _Retyped:
    """A graph over again: its ends with other types, attributes changed, results as they follow.
    Weights called `packed` become bytes, which products convert."""

    def __init__(self, type_of: TypeOf, attribute_of: AttributeOf, packed: set[str] | None = None):
        self.type_of, self.attribute_of = type_of, attribute_of
        self.packed = packed or set[str]()

    def graph(self, g: Graph) -> Graph:
        b = Builder(g.level, g.name, g.target)
        b.inherit(g)
        b.reserve(v.name for n in g.nodes for v in n.results)
        new: dict[Value, Value] = {}
        for v in g.inputs:
            new[v] = b.input(v.name, self.type_of(v.type))
        for v in g.params:
            type = self.type_of(v.type)
            new[v] = b.param(v.name, type.with_dtype(i8) if v.name in self.packed else type)
        for node in g.nodes:
            b.locs = node.locs
            op = self.op(node.op, new)
            if isinstance(op, t.Matmul) and op.b.type.dtype == i8 and op.a.type.dtype.is_float:
                op = replace(op, b=_converted(b, op.b, op.a.type.dtype))
            try:
                types = op.result_types
            except ModelError as error:
                error.where = error.where or " + ".join(node.locs)
                raise
            pairs = zip(node.results, types, strict=True)
            results = tuple(Value(v.name, type) for v, type in pairs)
            new.update(zip(node.results, results, strict=True))
            b.put(replace(node, op=op, results=results))
        over = [None if v is None else new[v] for v in g.over]
        return b.finish((new[v] for v in g.outputs), over)

    def op(self, op: Op, new: dict[Value, Value]) -> Op:
        """The op with its operands, attributes and regions changed."""
        changes: dict[str, Any] = {}
        for name in field_names(type(op)):
            value = getattr(op, name)
            if name == "data" and isinstance(op, t.Constant):
                continue  # numbers, not sizes
            changes[name] = self.field(value, new)
        return replace(op, **changes)

    def field(self, value: Any, new: dict[Value, Value]) -> Any:
        match value:
            case Value():
                return new[value]
            case Graph():
                return self.graph(value)
            case TensorType():
                return self.type_of(value)
            case tuple():
                return tuple(self.field(x, new) for x in value)  # pyright: ignore
            case _:
                return self.attribute_of(value)


def _converted(b: Builder, w: Value, dtype: DType) -> Value:
    """Bytes [.., k, n] times the scale of each column."""
    scale = b.param(f"{w.name}.scale", TensorType(w.type.shape[-1:], dtype))
    wide = b(t.Cast(w, dtype), f"{w.name}.wide")
    return b(t.Map("mul", (wide, scale)), f"{w.name}.scaled")
