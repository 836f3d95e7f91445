"""Removes what computes nothing and merges what computes the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from gpuir.ir.build import Builder, prune, rewrite
from gpuir.ir.graph import Graph, Level, Loc, Node, Op, Value
from gpuir.ir.phases import phase_of
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass
from gpuir.targets.profile import has_views

Rule = Callable[[Op, Builder], Op | Value | None]


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Removes ops that compute nothing, equal ops, and ops nobody reads; joins chains of reshapes,
    of transposes and of slices. Under a profile with views a pointwise op reads what is broadcast
    for it where it lies. Later passes see better after it; none relies on it. Without `layouts`
    each layout op stays the model's own, as a stack runs it that does not join them; without
    `neutral` so do x * 1, copies and pads by nothing, and equal ops of two model nodes, which a
    program run op by op computes all the same."""

    layouts: bool = True
    neutral: bool = True

    name = "canonicalize"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        left_out = (
            *(() if self.layouts else LAYOUT_RULES),
            *(() if self.neutral else NEUTRAL_RULES),
        )
        rules = [r for r in RULES if r not in left_out]
        simpler = rewrite(g, lambda n, b: simplify(n, b, rules))
        if has_views(g):
            simpler = rewrite(simpler, read_unexpanded)
        return prune(merge_equal(simpler, across=self.neutral))


def read_unexpanded(n: Node, b: Builder) -> tuple[Value, ...] | None:
    """t.map(fn, [broadcast(x), y])  →  t.map(fn, [x, y])  where y has the result's shape;
    likewise a product whose one operand is the same matrix for a whole batch"""
    bare = {v: _unexpanded(v, b) for v in n.op.operands}
    match n.op:
        case t.Map(args=args):
            shape = t.broadcast(*(bare[v].type.shape for v in args))
        case t.Matmul(x, y):
            bare = {v: u for v, u in bare.items() if _is_one_matrix(u) and v.type.rank > 2}
            leads = (bare.get(v, v).type.shape[:-2] for v in (x, y))
            shape = (*t.broadcast(*leads), *n.results[0].type.shape[-2:])
        case _:
            return None
    op = n.op.substitute(bare)
    if op == n.op or shape != n.results[0].type.shape:
        return None
    return b.add(op)


def _is_one_matrix(v: Value) -> bool:
    return prod(v.type.shape[:-2]) == 1 and v.type.rank >= 2


def _unexpanded(v: Value, b: Builder) -> Value:
    inner = b.producer(v)
    return inner.x if isinstance(inner, t.Broadcast) else v


def simplify(n: Node, b: Builder, rules: Sequence[Rule]) -> tuple[Value, ...] | None:
    """op  →  a simpler one, or the value it equals, until no rule applies."""
    op: Op | Value = n.op
    while isinstance(op, Op):
        new = next((new for rule in rules if (new := rule(op, b)) is not None), None)
        if new is None:
            return None if op is n.op else b.add(op)
        op = new
    return (op,)


def drop_identity(op: Op, b: Builder) -> Op | Value | None:
    """A cast, reshape, transpose, broadcast, slice or concat that changes nothing  →  x"""
    match op:
        case t.Reshape(x) | t.Broadcast(x) if op.shape == x.type.shape:
            return x
        case t.Transpose(x, perm) if perm == tuple(range(len(perm))):
            return x
        case t.Cast(x, dtype) | t.Bitcast(x, dtype) if dtype == x.type.dtype:
            return x
        case t.Slice(x, _, sizes, steps) if sizes == x.type.shape and all(s > 0 for s in steps):
            return x
        case t.Concat((x,)):
            return x
        case _:
            return None


def join_layouts(op: Op, b: Builder) -> Op | None:
    """reshape(reshape(x))  →  reshape(x); likewise transposes, and slices by positive steps"""
    match op:
        case t.Reshape(y, shape):
            if isinstance(inner := b.producer(y), t.Reshape):
                return t.Reshape(inner.x, shape)
        case t.Transpose(y, perm):
            if isinstance(inner := b.producer(y), t.Transpose):
                return t.Transpose(inner.x, tuple(inner.perm[p] for p in perm))
        case t.Slice(y, starts, sizes, steps):
            if isinstance(inner := b.producer(y), t.Slice):
                rows = list(zip(inner.starts, inner.steps, starts, steps, strict=True))
                return t.Slice(
                    inner.x,
                    tuple(a + s * i for a, s, i, _ in rows),
                    sizes,
                    tuple(s * k for _, s, _, k in rows),
                )
        case _:
            pass
    return None


def transpose_of_units(op: Op, b: Builder) -> Op | None:
    """A transpose that moves only axes of extent 1  →  a reshape"""
    match op:
        case t.Transpose(x, perm):
            moved = [p for p in perm if x.type.shape[p] != 1]
            if moved == sorted(moved):
                return t.Reshape(x, tuple(x.type.shape[p] for p in perm))
        case _:
            pass
    return None


def immediate(op: Op, b: Builder) -> Op | None:
    """t.map(fn, [x, c])  →  t.map(fn, [x], [c])  where c is a constant of one cell that does not
    widen the result"""
    match op:
        case t.Map(fn, (*rest, last), imm) if rest and fn != "where" and last.type.size == 1:
            constant = b.producer(last)
            if not isinstance(constant, t.Constant):
                return None
            shape = t.broadcast(*(v.type.shape for v in rest))
            if t.broadcast(shape, last.type.shape) != shape:
                return None
            if all(isinstance(b.producer(v), t.Constant) for v in rest):
                return None
            return t.Map(fn, tuple(rest), (constant.data[0], *imm))
        case _:
            return None


def drop_neutral(op: Op, b: Builder) -> Value | None:
    """x + 0, x - 0, x * 1, x / 1, x ** 1, a copy of x, x padded by nothing  →  x"""
    match op:
        case t.Map("identity" | "copy", (x,)):
            return x
        case t.Pad(x, low, high) if not any(low) and not any(high):
            return x
        case t.Map("add" | "sub", (x,), (0,)) | t.Map("mul" | "div" | "pow", (x,), (1,)):
            return x
        case _:
            return None


LAYOUT_RULES = (join_layouts, transpose_of_units)
NEUTRAL_RULES = (drop_neutral,)
RULES = (drop_identity, join_layouts, transpose_of_units, immediate, *NEUTRAL_RULES)


def merge_equal(g: Graph, across: bool = True) -> Graph:
    """%a = op(x), %b = op(x)  →  %a = op(x), with %a for %b, within one graph or region. Control
    flow stays as it is, and routines too: some draw random numbers. So does what is recomputed to
    save memory, though equal, and arithmetic on one index, which each reader does by itself; but
    for what is known or moves nothing, what two nodes of the forward pass compute, where `across`
    is not set. Of collectives only those of one phase are merged: weights that a rank gathers again
    for the backward pass are not kept for it."""
    seen: dict[tuple[Builder, Op, tuple[Loc, ...]], tuple[Value, ...]] = {}

    def rule(n: Node, b: Builder) -> tuple[Value, ...] | None:
        if n.op.control or isinstance(n.op, t.Routine | t.Opaque) or phase_of(n) == "recomputed":
            return None
        if isinstance(n.op, t.Map) and is_index(n.results[0].type):
            return None
        if isinstance(n.op, t.Collective):
            phase = (phase_of(n) or "",)
            first = seen.setdefault((b, n.op, phase), n.results)
            return None if first is n.results else first
        anywhere = seen.setdefault((b, n.op, ()), n.results)
        if across or phase_of(n) or isinstance(n.op, t.Generating | t.Layout):
            first = anywhere
        else:
            first = seen.setdefault((b, n.op, n.locs), n.results)
        return None if first is n.results else first

    return rewrite(g, rule)


def is_index(type: TensorType) -> bool:
    return type.dtype.is_integer and type.size == 1
