"""Experts that a model's own code runs one after another, as PyTorch then runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from gpuir.ir.build import Builder, prune, rewrite
from gpuir.ir.graph import Graph, Level, Loc, Node, Op, Value
from gpuir.ir.phases import beside
from gpuir.ir.types import TensorType, i64
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass


@dataclass(frozen=True)
class ExpertsApart(Pass):
    """Writes out mixtures whose experts run one after another (`t.Experts.each`): for each that
    gets rows, which tokens chose it (for whose number the host waits), their rows, two products of
    those with its matrices and the activation between, and its share added to the result; backward
    the same the other way round. (transformers 5, modeling_switch_transformers.py,
    SwitchTransformersExperts; autograd of indexing: a gradient as large as what was indexed, of
    zeros, with the rows added, torch/csrc/autograd/FunctionsManual.cpp.) As many rows are taken as
    are expected; it keeps meaning where as many come.

    Weights' gradients of all experts are one product here, of rows put side by side, which PyTorch
    has none of: matrices of their own get them there. Dropout within experts is left out. Gated
    experts, those with biases, and gradients through other functions than relu stay whole."""

    name = "experts_apart"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        if not any(isinstance(n.op, t.Experts) and is_apart(n.op) for n in g.walk()):
            return g
        return prune(rewrite(g, _ExpertsWriter().rule))


def is_apart(op: t.Experts) -> bool:
    """Whether a mixture is one that the pass writes out: two plain products, one expert a token,
    and as many rows for each expert that gets any."""
    plain = not op.is_gated and op.up_bias is None and op.down_bias is None
    single = op.which.type.shape[1] == 1 and op.ranks == 1
    same = (op.alpha, op.limit, op.dtype or op.x.type.dtype) == (1.0, None, op.x.type.dtype)
    return plain and single and same and len({*op.each} - {0}) == 1


@dataclass(frozen=True)
class Expert:
    """What one expert's turn leaves: its tokens, their rows, what the activation gives, what the
    expert does, and the shares it is added in."""

    token: Value
    x: Value
    inner: Value
    y: Value
    share: Value


@dataclass
class _ExpertsWriter:
    made: dict[tuple[str, ...], list[Expert]] = field(
        default_factory=dict[tuple[str, ...], list[Expert]]
    )  # by the names of a mixture's operands

    def rule(self, n: Node, b: Builder) -> tuple[Value, ...] | None:
        match n.op:
            case t.Experts() as op if is_apart(op):
                step = _Mixture(op, b, n.locs)
                turns = self.made[_names(op)] = [step.turn(i) for i in step.active]
                return (step.result(turns),)
            case t.ExpertsGradient() as op if op.fn == "relu" and is_apart(op.direct()):
                direct = op.direct()
                turns = self.made.get(_names(direct), [])
                return _Mixture(direct, b, n.locs).gradients(op.dy, turns) if turns else None
            case _:
                return None


def _names(op: t.Experts) -> tuple[str, ...]:
    return tuple(v.name for v in (op.x, op.which, op.shares, op.up, op.down))


@dataclass(frozen=True)
class _Mixture:
    """One mixture. What PyTorch launches by itself has a location of its own."""

    op: t.Experts
    b: Builder
    locs: tuple[Loc, ...]

    def __call__(self, part: str, op: Op) -> Value:
        self.b.locs = beside(self.locs, part)
        return self.b(op)

    @property
    def active(self) -> list[int]:
        return [i for i, rows in enumerate(self.op.each) if rows]

    def matrix(self, of: Value, i: int, turned: bool) -> Value:
        """Expert i's, which is a tensor of its own in the model."""
        _, rows, columns = of.type.shape
        sizes = (1, rows, columns)
        x = self(f"{i}.weight", t.Slice(of, (i, 0, 0), sizes, (1, 1, 1)))
        x = self(f"{i}.weight", t.Reshape(x, (rows, columns)))
        return self(f"{i}.weight", t.Transpose(x, (1, 0))) if turned else x

    def zeros(self, part: str, type: TensorType) -> Value:
        zero = self(part, t.Constant(TensorType((), type.dtype), (0.0,)))
        return self(part, t.Broadcast(zero, type.shape))

    def turn(self, i: int) -> Expert:
        op, rows = self.op, self.op.each[i]
        chosen = self(f"{i}.chosen", t.Map("eq", (op.which,), (i,)))
        gives = TensorType((2, rows), i64)
        size = op.which.type.size
        places = self(f"{i}.where", t.Routine("nonzero", (chosen,), (gives,), work=size))
        token = self(f"{i}.where", t.Slice(places, (0, 0), (1, rows), (1, 1)))
        token = self(f"{i}.where", t.Reshape(token, (rows,)))
        x = self(f"{i}.rows", t.Gather(op.x, token))
        inner = self(f"{i}.in", t.Matmul(x, self.matrix(op.up, i, True)))
        inner = self(f"{i}.{op.fn}", t.Map(op.fn, (inner,)))
        y = self(f"{i}.out", t.Matmul(inner, self.matrix(op.down, i, True)))
        share = self(f"{i}.share", t.Gather(op.shares, token))
        return Expert(token, x, inner, y, share)

    def result(self, turns: Sequence[Expert]) -> Value:
        (type,) = self.op.result_types
        y = self.zeros("zeros", type)
        for i, e in zip(self.active, turns, strict=True):
            shared = self(f"{i}.shared", t.Map("mul", (e.y, e.share)))
            y = self.added(f"{i}.added", y, e.token, shared)
        return y

    def added(self, part: str, to: Value, token: Value, rows: Value) -> Value:
        """`to` with rows added where their tokens are."""
        at = self(part, t.Reshape(token, (*token.type.shape, 1)))
        return self(part, t.ScatterND(to, at, rows, "add"))

    def gradients(self, dy: Value, turns: Sequence[Expert]) -> tuple[Value, ...]:
        """Of x, the shares and both matrices."""
        op = self.op
        dx = dshares = None
        inners: list[Value] = []
        outs: list[Value] = []
        for i, e in zip(self.active, turns, strict=True):
            shared = self(f"{i}.added", t.Gather(dy, e.token))
            product = self(f"{i}.shared", t.Map("mul", (shared, e.y)))
            dshare = self(f"{i}.shared", t.Reduce("sum", product, (1,), True))
            out = self(f"{i}.share", t.Map("mul", (shared, e.share)))
            inner = self(f"{i}.out", t.Matmul(out, self.matrix(op.down, i, False)))
            inner = self(f"{i}.{op.fn}", t.Map("relu_gradient", (inner, e.inner)))
            row = self(f"{i}.in", t.Matmul(inner, self.matrix(op.up, i, False)))
            dx = self.indexed(f"{i}.rows", dx, op.x, e.token, row)
            dshares = self.indexed(f"{i}.share", dshares, op.shares, e.token, dshare)
            inners.append(inner)
            outs.append(out)
        up = self.of_matrices("in", inners, [e.x for e in turns])
        down = self.of_matrices("out", outs, [e.inner for e in turns])
        assert dx is not None and dshares is not None  # of one expert at least
        return dx, dshares, up, down

    def indexed(
        self, part: str, before: Value | None, of: Value, token: Value, rows: Value
    ) -> Value:
        """The gradient of what was indexed, added to that of the experts before."""
        found = self.added(part, self.zeros(f"{part}.zeros", of.type), token, rows)
        return found if before is None else self(f"{part}.sum", t.Map("add", (before, found)))

    def of_matrices(self, part: str, dy: Sequence[Value], x: Sequence[Value]) -> Value:
        """dyᵀ · x of each expert, and zeros for those without rows."""
        a, b = self.beside(part, dy), self.beside(part, x)
        turned = self(part, t.Transpose(a, (0, 2, 1)))
        found = self(f"{part}.gradient", t.Matmul(turned, b))
        if len(self.active) == len(self.op.each):
            return found
        all_of_them = (len(self.op.each), *found.type.shape[1:])
        zeros = self.zeros(f"{part}.zeros", TensorType(all_of_them, found.type.dtype))
        places = TensorType((len(self.active), 1), i64)
        at = self(f"{part}.zeros", t.Constant(places, tuple(self.active)))
        return self(f"{part}.zeros", t.ScatterND(zeros, at, found))

    def beside(self, part: str, rows: Sequence[Value]) -> Value:
        """[experts, rows, cells]"""
        apart = [self(f"{part}.rows", t.Reshape(v, (1, *v.type.shape))) for v in rows]
        return apart[0] if len(apart) == 1 else self(f"{part}.rows", t.Concat(tuple(apart), 0))
