"""Quantised networks, as TensorRT's builder reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from gpuir.ir.build import Builder, prune, rewrite
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.types import f8e4m3, f32, i8, i32
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass

CODES = (i8, f8e4m3)
QUANTISING = ("div", "mul", "round", "clip")  # the pointwise ops of a QuantizeLinear


@dataclass(frozen=True)
class Qdq(Pass):
    """Runs convolutions and matrix products whose operands are both dequantised (i8 or f8e4m3,
    around zero) on the codes themselves, and multiplies what they sum to by the scales. What
    quantises the result of a max pool goes ahead of the pool, which then reads and writes codes.

    (NVIDIA TensorRT documentation, Working with Quantized Types, TensorRT Processing of Q/DQ
    Networks: DQ is delayed and Q advanced, since a layer in INT8 moves fewer bytes, past ops that
    commute with them, max pooling by name; a layer between DQ and Q becomes a quantised one.
    Explicit quantisation is symmetric: zero points are 0.)
    """

    name = "qdq"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        if not any(v.type.dtype in CODES for n in g.walk() for v in n.op.operands):
            return g
        return prune(rewrite(g, _Quantised(g).rule))


class Dequantised(NamedTuple):
    """`codes` times `number`, and times `scale`, if there is one, whose axes are those of codes
    from the last on."""

    codes: Value
    number: float = 1.0
    scale: Value | None = None

    def along(self, axis: int) -> bool:
        """Whether the scale differs along one axis alone."""
        return self.scale is None or all(n == 1 or i == axis for i, n in enumerate(self.extents))

    @property
    def extents(self) -> tuple[int, ...]:
        """Those of the scale, with an axis for each of the codes'."""
        shape = () if self.scale is None else self.scale.type.shape
        return (*(1,) * (self.codes.type.rank - len(shape)), *shape)


class _Quantised:
    def __init__(self, g: Graph):
        self.readers = g.uses()
        self.outputs = set(g.outputs)
        self.pooled: dict[Value, Value] = {}  # codes, by the name that they had behind a pool

    def rule(self, node: Node, b: Builder) -> tuple[Value, ...] | None:
        (result, *_) = node.results or (None,)
        if result is None:
            return None
        match node.op:
            case t.Conv(x=x, w=w) as op if pair := both(x, w, 0, b):
                left, right = pair
                op = replace(op, x=left.codes, w=right.codes)
                ones = (1,) * (x.type.rank - 2)
                return scaled(op, pair, right.extents[:1] + ones, result, b)
            case t.Matmul(a=x, b=w) as op if pair := both(x, w, w.type.rank - 1, b):
                left, right = pair
                op = replace(op, a=left.codes, b=right.codes)
                return scaled(op, pair, right.extents[-1:], result, b)
            case t.Pool(fn="max") as op:
                self.pool(node, op, b)
                return None
            case t.Cast() if result in self.pooled:
                return (self.pooled[result],)
            case _:
                return None

    def pool(self, node: Node, op: t.Pool, b: Builder) -> None:
        """Quantises what a max pool reads, if all that is done to its result is to quantise it."""
        (was,) = node.results
        chain: list[Node] = []
        v = was
        while v not in self.outputs and len(readers := self.readers.get(v, [])) == 1:
            (reader,) = readers
            chain.append(reader)
            (v,) = reader.results if len(reader.results) == 1 else (was,)
            match reader.op:
                case t.Map(fn, (_,)) if fn in QUANTISING:
                    continue
                case t.Cast() if v.type.dtype in CODES:
                    break
                case _:
                    return
        if not chain or not isinstance(chain[-1].op, t.Cast):
            return
        x, before, locs = op.x, was, b.locs
        for n in chain:
            b.locs = n.locs
            x = b(n.op.substitute({before: x}), n.results[0].name)
            (before,) = n.results
        b.locs = locs
        self.pooled[before] = b(replace(op, x=x), f"{was.name}.codes")


def both(x: Value, w: Value, channels: int, b: Builder) -> tuple[Dequantised, Dequantised] | None:
    """The operands of a product, if both are dequantised, from codes of one type, by scales that
    can be taken out of its sums: one for all of the first, those of the second along its axis
    `channels`."""
    left, right = dequantised(x, b), dequantised(w, b)
    if left is None or right is None or left.codes.type.dtype != right.codes.type.dtype:
        return None
    return (left, right) if left.along(-1) and right.along(channels) else None


def dequantised(v: Value, b: Builder) -> Dequantised | None:
    """What v is made of, if it is dequantised, perhaps transposed, or of another shape where there
    is one scale in all."""
    match b.producer(v):
        case t.Map("mul", (x,), (float(number),)) if codes := codes_of(x, b):
            return Dequantised(codes, number)
        case t.Map("mul", (x, scale), ()) if (codes := codes_of(x, b)) and x.type == v.type:
            return Dequantised(codes, scale=scale)
        case t.Transpose(x, perm) as op:
            found = dequantised(x, b)
            if found is None:
                return None
            codes = b(replace(op, x=found.codes), f"{v.name}.codes")
            if found.scale is None:
                return found._replace(codes=codes)
            scale = b(t.Reshape(found.scale, found.extents), f"{v.name}.scale")
            return found._replace(codes=codes, scale=b(t.Transpose(scale, perm), f"{v.name}.scale"))
        case t.Reshape(x) as op:
            found = dequantised(x, b)
            if found is None or found.scale is not None:
                return None
            return found._replace(codes=b(replace(op, x=found.codes), f"{v.name}.codes"))
        case _:
            return None


def codes_of(v: Value, b: Builder) -> Value | None:
    match b.producer(v):
        case t.Cast(x) if x.type.dtype in CODES and v.type.dtype.is_float:
            return x
        case _:
            return None


def scaled(
    op: t.Conv | t.Matmul,
    operands: tuple[Dequantised, Dequantised],
    channels: tuple[int, ...],
    result: Value,
    b: Builder,
) -> tuple[Value, ...]:
    """A product of codes, in the type that it had, times the scales of its operands; those of the
    second are given a shape that fits the result."""
    left, right = operands
    summed = i32 if left.codes.type.dtype.is_integer else f32
    y = b(replace(op, dtype=summed), f"{result.name}.codes")
    if summed != result.type.dtype:
        y = b(t.Cast(y, result.type.dtype), f"{result.name}.sum")
    if left.number * right.number != 1.0:
        y = b(t.Map("mul", (y,), (left.number * right.number,)), f"{result.name}.scaled")
    for scale, shape in ((left.scale, ()), (right.scale, channels)):
        if scale is not None:
            scale = b(t.Reshape(scale, shape), f"{result.name}.scale")
            y = b(t.Map("mul", (y, scale)), f"{result.name}.scaled")
    return (y,)
