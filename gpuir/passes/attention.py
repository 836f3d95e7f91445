"""Attention in primitives, as exporters write it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from gpuir.ir.build import Builder
from gpuir.ir.graph import Loc, Node, Op, Value
from gpuir.ir.types import DType, TensorType, f16, f32, f64
from gpuir.ops import tensor as t
from gpuir.passes.matcher import Matcher, Shape, close

HIDES = -1e4  # a score this low, or lower, is a key that a mask hides
LOWEST = {f16: -65504.0, f32: -3.4028234663852886e38, f64: -sys.float_info.max}

Effect = Literal["add", "sub", "show", "hide"]  # what a mask does to the scores


@dataclass(frozen=True)
class Mask:
    """A mask on scores with `lead` axes ahead of their last two, applied by the nodes at `locs`."""

    value: Value
    effect: Effect
    hard: bool  # what it hides is minus infinity
    lead: Shape
    dtype: DType
    locs: tuple[Loc, ...]


@dataclass
class ScoreProduct:
    """q · k, and what is done to it before the softmax: scaled, capped, then masked. `divided` if
    it is a division that scales. `leads` are the axes ahead of the last two, at each reshape."""

    q: Value
    k: Value
    leads: list[Shape]
    scale: float = 1.0
    divided: bool = False
    softcap: float = 0.0
    masks: list[Mask] = field(default_factory=list[Mask])


@dataclass(frozen=True)
class AttentionOperand:
    """q, k or v as found: axis `dropped` of x taken out, then transposed by `perm`, it has `cells`
    as its last two axes, and the leading axes in another shape perhaps."""

    x: Value
    cells: Shape
    perm: Shape | None = None
    scale: float = 1.0
    dropped: int | None = None

    @property
    def count(self) -> int:
        """Matrices in it."""
        return self.x.type.size // max(math.prod(self.cells), 1)


Plan = tuple[Shape, AttentionOperand, AttentionOperand, AttentionOperand, list[Shape], int]


class AttentionMatcher(Matcher):
    """Finds the attention that a matrix product ends."""

    def attention(self, n: Node, b: Builder) -> tuple[Value, ...] | None:
        """softmax(q . kᵀ) . v, scaled and masked  →  t.attention. Also vᵀ . softmax(..)ᵀ."""
        op, result = n.op, n.results[0]
        assert isinstance(op, t.Matmul)
        if result.type.rank < 3 or op.dtype is not None or not _is_wide(result):
            return None
        turned, v, found = False, op.b, self.scores(op.a)
        if not found and isinstance(flip := self.op(op.b), t.Transpose):
            if flip.perm != _swapped(result):
                return None
            turned, v, found = True, op.a, self.scores(flip.x)
        plan = self.plan(found, v, turned, result) if found else None
        if found is None or plan is None:
            return None
        lead, q, key, value, masks, groups = plan
        dead = self.matched(n, (q.x, key.x, value.x, *(m.value for m in found.masks)))
        if dead is None:
            return None
        (s, e), (d, f) = q.cells, value.cells
        whole = t.Attention(
            self.laid_out(b, n, q, (*lead, s, e)),
            self.laid_out(b, n, key, (*lead[:-1], groups, d, e)),
            self.laid_out(b, n, value, (*lead[:-1], groups, d, f)),
            self.mask(b, n, found.masks, masks),
            scale=found.scale * q.scale * key.scale,
            softcap=found.softcap,
        )
        swap = _swapped(result)
        straight = tuple(result.type.shape[p] for p in swap) if turned else result.type.shape
        steps: list[Callable[[Value], Op]] = []
        if (*lead, s, f) != straight:
            steps.append(lambda y: t.Reshape(y, straight))
        if turned:
            steps.append(lambda y: t.Transpose(y, swap))
        if q.x.type.dtype != result.type.dtype:
            steps.append(lambda y: t.Cast(y, result.type.dtype))
        if not steps:
            return self.put(b, whole, n, dead)
        y = self.extra(b, whole, n, self.locs(dead))
        for step in steps[:-1]:
            y = self.extra(b, step(y), n, n.locs)
        return self.put(b, steps[-1](y), n, dead, n.locs)

    def scores(self, v: Value) -> ScoreProduct | None:
        """What is under the softmax that v is, cast, reshaped or guarded against NaN."""
        match self.op(v):
            case t.Softmax(x, axis, False) if axis == v.type.rank - 1:
                found = self.raw_scores(x)
            case t.Cast(x) if _is_wide(x) and _is_wide(v):
                found = self.scores(x)
            case t.Reshape(x) if _same_matrix(x, v):
                found = self.scores(x)
            case t.Map():
                match self.terms(v):
                    case ("where", Value() as guard, 0.0, Value() as x) if self.op(guard) == t.Map(
                        "isnan", (x,)
                    ):
                        found = self.scores(x)
                    case ("identity", Value() as x):
                        found = self.scores(x)
                    case _:
                        return None
            case _:
                return None
        if found:
            found.leads.append(v.type.shape[:-2])
        return found

    def raw_scores(self, v: Value) -> ScoreProduct | None:
        """v as q . kᵀ scaled, capped and masked; None where it is something else."""
        shape = v.type.shape
        match self.op(v):
            case t.Matmul(q, k, None):
                return ScoreProduct(q, k, [shape[:-2]])
            case t.Cast(x) if _is_wide(x) and _is_wide(v):
                return self.raw_scores(x)
            case t.Reshape(x) if _same_matrix(x, v):
                if found := self.raw_scores(x):
                    found.leads.append(shape[:-2])
                return found
            case t.Map():
                pass
            case _:
                return None
        effect: Effect
        match self.terms(v):
            case ("identity", Value() as x):
                return self.raw_scores(x)
            case ("max", Value() as x, float(low)) if low <= HIDES:
                return self.raw_scores(x)
            case ("mul" | "div" as fn, Value(), float()) if part := self.factor(v):
                return self.capped(*part) or self.scaled(*part, divided=fn == "div")
            case ("where", Value() as seen, Value() as x, float(low)) if low <= HIDES:
                effect, ways = "show", [(x, seen)]
            case ("where", Value() as hidden, float(low), Value() as x) if low <= HIDES:
                effect, ways = "hide", [(x, hidden)]
            case ("add", Value() as x, Value() as y):
                low, effect, ways = 0.0, "add", [(x, y), (y, x)]
            case ("sub", Value() as x, Value() as y):
                low, effect, ways = 0.0, "sub", [(x, y)]
            case _:
                return None
        for x, mask in ways:
            if x.type.shape == shape and (found := self.raw_scores(x)):
                hides, locs = low == -math.inf, self.node[v].locs
                made = Mask(mask, effect, hides, lead=shape[:-2], dtype=v.type.dtype, locs=locs)
                found.masks.append(made)
                return found
        return None

    def scaled(self, x: Value, c: float, divided: bool) -> ScoreProduct | None:
        found = self.raw_scores(x)
        if found is None or found.softcap or any(m.effect in ("add", "sub") for m in found.masks):
            return None
        found.scale *= c
        found.divided = divided
        return found if c > 0 or not found.masks else None

    def capped(self, x: Value, c: float) -> ScoreProduct | None:
        """c * tanh(scores / c)"""
        match self.terms(x):
            case ("tanh", y):
                pass
            case _:
                return None
        part = self.factor(y)
        found = self.raw_scores(part[0]) if part and close(part[1] * c, 1.0, x) else None
        if found is None or found.masks or found.softcap or c <= 0:
            return None
        found.softcap = c
        return found

    def plan(self, found: ScoreProduct, v: Value, turned: bool, result: Value) -> Plan | None:
        """The leading axes of the attention, its operands, the shapes of its masks, and how many
        groups of heads k and v have; None where they do not fit. Where the first product is of
        narrower numbers than the second, the whole is of the narrower."""
        lead = max(found.leads, key=len)
        if not lead or any(_regroup(x, x, lead) != lead for x in found.leads):
            return None
        if _regroup(result.type.shape[:-2], result.type.shape[:-2], lead) != lead:
            return None
        dtype = min(result.type.dtype, found.q.type.dtype, key=lambda d: d.bits)
        q = self.operand(found.q, dtype)
        keys = self.ways(self.turned_operand(found.k, dtype), found.k.type.shape[:-2], lead)
        read = self.turned_operand if turned else self.operand
        values = self.ways(read(v, dtype, scaled=False), v.type.shape[:-2], lead)
        pair = next(((k, w, g) for k, g in keys for w, h in values if g == h), None)
        if pair is None or q.count != math.prod(lead):
            return None
        key, value, groups = pair
        if key.cells != (value.cells[0], q.cells[1]):
            return None
        if not q.x.type.dtype == key.x.type.dtype == value.x.type.dtype == dtype:
            return None
        masks: list[Shape] = []
        for m in found.masks:
            shape = m.value.type.shape
            shape = (1,) * (len(m.lead) + 2 - len(shape)) + shape
            outer = _regroup(shape[:-2], m.lead, lead)
            if outer is None:
                return None
            masks.append((*outer, *shape[-2:]) if m.lead != lead else m.value.type.shape)
        added = {m.dtype for m in found.masks if not m.hard}
        return (lead, q, key, value, masks, groups) if len(added) <= 1 else None

    def operand(self, v: Value, dtype: object, scaled: bool = True) -> AttentionOperand:
        """v without what the attention does itself: a widening cast, a scale, and reshapes of the
        leading axes that stand before those."""
        match self.op(v):
            case t.Cast(x) if x.type.dtype == dtype:
                return self.operand(x, dtype, scaled)
            case t.Reshape(x) if _same_matrix(x, v):
                inner = self.operand(x, dtype, scaled)
                return inner if inner.x != x else AttentionOperand(v, v.type.shape[-2:])
            case t.Map() if scaled and (part := self.own_factor(v)):
                inner = self.operand(part[0], dtype, scaled)
                return replace(inner, scale=inner.scale * part[1])
            case _:
                return AttentionOperand(v, v.type.shape[-2:])

    def own_factor(self, v: Value) -> tuple[Value, float] | None:
        """`factor` of a value that has one reader."""
        alone = len(self.users.get(v, ())) == 1 and v not in self.outputs
        return self.factor(v) if alone else None

    def turned_operand(self, v: Value, dtype: object, scaled: bool = True) -> AttentionOperand:
        """`operand` of v with its last two axes swapped: without the transpose that made it so, or
        with the rest of what that one does."""
        match self.op(v):
            case t.Transpose(x, perm):
                perm = (*perm[:-2], perm[-1], perm[-2])
                inner = self.operand(x, dtype, scaled)
                if perm == tuple(range(len(perm))):
                    return inner
                if inner.x.type.shape == x.type.shape:
                    cells = (x.type.shape[perm[-2]], x.type.shape[perm[-1]])
                    return replace(inner, cells=cells, perm=perm)
                return AttentionOperand(x, (x.type.shape[perm[-2]], x.type.shape[perm[-1]]), perm)
            case t.Cast(x) if x.type.dtype == dtype:
                return self.turned_operand(x, dtype, scaled)
            case t.Reshape(x) if _same_matrix(x, v):
                inner = self.turned_operand(x, dtype, scaled)
                if not isinstance(self.op(x), t.Transpose | t.Map | t.Cast):
                    inner = AttentionOperand(v, v.type.shape[:-3:-1], _swapped(v))
                return inner
            case t.Map() if scaled and (part := self.own_factor(v)):
                inner = self.turned_operand(part[0], dtype, scaled)
                return replace(inner, scale=inner.scale * part[1])
            case _:
                return AttentionOperand(v, v.type.shape[:-3:-1], _swapped(v))

    def ways(
        self, side: AttentionOperand, shape: Shape, lead: Shape
    ) -> list[tuple[AttentionOperand, int]]:
        """The forms of k or v that fit, with their groups of heads: each head's copy of its group
        left out, and as it is, `shape` being its leading axes."""
        heads, full = lead[-1], math.prod(lead)
        found: list[tuple[AttentionOperand, int]] = []
        if (less := self.unrepeated(side)) is not None and less.count:
            copies, rest = divmod(full, less.count)
            if copies and not rest and heads % copies == 0:
                found.append((less, heads // copies))
        if side.count == full:
            found.append((side, heads))
        elif (1,) * (len(lead) - len(shape)) + shape == (*lead[:-1], 1):
            found.append((side, 1))  # the product repeats one group for all heads
        return found

    def unrepeated(self, side: AttentionOperand) -> AttentionOperand | None:
        """k or v before each group of heads was copied for its queries (repeat_kv)."""
        x = side.x
        outer = self.op(x)
        if side.perm is None and isinstance(outer, t.Transpose):
            return self.unrepeated(replace(side, x=outer.x, perm=outer.perm))
        copies = outer.x if isinstance(outer, t.Reshape) else x
        match self.op(copies):
            case t.Broadcast(y) if y.type.rank == copies.type.rank:
                pass
            case t.Concat((y, *rest)) if all(other == y for other in rest):
                pass
            case _:
                return None
        wide = [i for i, (a, c) in enumerate(zip(y.type.shape, copies.type.shape)) if a != c]
        if len(wide) != 1 or y.type.shape[wide[0]] != 1:
            return None
        axis, shape = wide[0], copies.type.shape
        if side.perm is None:  # the copies are the innermost of the leading axes
            fits = axis == len(shape) - 3 and _same_matrix(copies, x)
            return replace(side, x=y) if fits else None
        if copies == x:
            return replace(side, x=y) if side.perm[-3] == axis else None
        merged = (*shape[: axis - 1], shape[axis - 1] * shape[axis], *shape[axis + 1 :])
        if axis == 0 or merged != x.type.shape or side.perm[-3] != axis - 1:
            return None
        return replace(side, x=y, dropped=axis)

    def laid_out(self, b: Builder, n: Node, side: AttentionOperand, shape: Shape) -> Value:
        """The operand as the attention takes it."""
        x, locs = side.x, n.locs
        if side.dropped is not None:
            a = side.dropped
            x = self.viewed(b, n, x, (*x.type.shape[:a], *x.type.shape[a + 1 :]), locs)
        if side.perm is not None:
            x = self.extra(b, t.Transpose(x, side.perm), n, locs)
        return self.viewed(b, n, x, shape, locs)

    def viewed(self, b: Builder, n: Node, x: Value, shape: Shape, locs: tuple[Loc, ...]) -> Value:
        """x reshaped, through reshapes before it."""
        while x.type.shape != shape and isinstance(inner := self.op(x), t.Reshape):
            x = inner.x
        return x if x.type.shape == shape else self.extra(b, t.Reshape(x, shape), n, locs)

    def mask(self, b: Builder, n: Node, masks: list[Mask], shapes: list[Shape]) -> Value | None:
        """All masks as one: boolean, or added where one of them is added. Scores that are set to a
        finite number get the dtype's lowest added: where a row hides every key, both are uniform.
        """
        seen: Value | None = None
        added: Value | None = None
        alone = not any(m.effect in ("add", "sub") for m in masks)
        for m, shape in zip(masks, shapes, strict=True):

            def make(op: Op, locs: tuple[Loc, ...] = m.locs) -> Value:
                return self.extra(b, op, n, locs)

            v = self.viewed(b, n, m.value, shape, m.locs)
            if m.hard:
                if m.effect == "hide":
                    v = make(t.Map("not", (v,)))
                seen = v if seen is None else make(t.Map("and", (seen, v)))
                continue
            if m.effect == "sub":
                v = make(t.Map("neg", (v,)))
            elif m.effect != "add":
                dtype = f32 if alone and m.dtype.bits < 32 else m.dtype
                low = make(t.Constant(TensorType((), dtype), (LOWEST.get(dtype, LOWEST[f32]),)))
                zero = make(t.Constant(TensorType((), dtype), (0.0,)))
                v = make(t.Map("where", (v, zero, low) if m.effect == "show" else (v, low, zero)))
            added = v if added is None else make(t.Map("add", (added, v)))
        if seen is None or added is None:
            return added if seen is None else seen
        locs = masks[-1].locs
        low = self.extra(b, t.Constant(added.type.with_shape(()), (-math.inf,)), n, locs)
        return self.extra(b, t.Map("where", (seen, added, low)), n, locs)


def _swapped(v: Value) -> Shape:
    """The permutation that swaps the last two axes."""
    rank = v.type.rank
    return (*range(rank - 2), rank - 1, rank - 2)


def _is_wide(v: Value) -> bool:
    """Whether a cast to v's dtype rounds and does not quantise."""
    return v.type.dtype.is_float and v.type.dtype.bits >= 16


def _same_matrix(x: Value, v: Value) -> bool:
    """Whether a reshape of x to v's shape leaves the last two axes as they are."""
    return min(x.type.rank, v.type.rank) >= 2 and x.type.shape[-2:] == v.type.shape[-2:]


def _regroup(extents: Shape, lead: Shape, target: Shape) -> Shape | None:
    """Extents on axes `lead`, each full or 1, on the finer axes `target` of the same cells."""
    found: list[int] = []
    rest = list(target)
    for extent, n in zip(extents, lead, strict=True):
        part: list[int] = []
        while math.prod(part) < n and rest:
            part.append(rest.pop(0))
        if math.prod(part) != n:
            return None
        found += part if extent == n else [1] * len(part)
    return (*found, *rest) if all(n == 1 for n in rest) else None
