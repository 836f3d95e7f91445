"""Finds the composite ops that exporters have written out in primitives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from gpuir.fusion.launch import unpacks_own
from gpuir.ir.build import Builder, prune, rewrite
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.graph import Graph, Level, Node, Op, Value
from gpuir.ir.types import f32
from gpuir.ops import tensor as t
from gpuir.passes.attention import AttentionMatcher, ScoreProduct
from gpuir.passes.manager import Pass
from gpuir.passes.matcher import Shape, Term, close
from gpuir.targets.profile import tf32_rule

NORMS = ("layer_norm", "rms_norm", "group_norm")
FORMS = (
    *("softmax", "log_softmax", "sigmoid", "softplus", "mish", "silu", "gelu", "gelu_tanh"),
    *(*NORMS, "attention"),
)
OTHER_FORMS = (
    *("ort_gelu", "ort_gelu_tanh", "matmul_scale"),
    *("plain_attention", "half_attention", "sdpa"),
)


@dataclass(frozen=True)
class Recognize(Pass):
    """Replaces softmax, GELU, SiLU, layer, RMS, instance and group norm, and attention, written in
    primitives, by the one op each is.

    What is replaced has no other readers, so that it goes away. Scores set to -1e4 or less count
    as hidden. A query that may see no key at all gives zeros where primitives give NaN.

    `forms` says which, as a software stack has it: `all`, names with spaces between (`layer_norm
    gelu`), or names to leave out (`-attention`). `layer_norm` and `rms_norm` are over the last
    axes; other norms are `group_norm`. Not among `all`: `ort_gelu` and `ort_gelu_tanh`, in
    the spellings that onnxruntime knows; `matmul_scale`, a product that takes the number that
    scales an operand to its own result; `plain_attention`, with scores that are scaled and no more;
    `half_attention`, of 16 bits a number or fewer, as TensorRT fuses it; and `sdpa`, attention that
    Inductor calls a kernel for (PyTorch 2.13, torch/_inductor/fx_passes/fuse_attention.py): in 16
    bits, or in f32 where products are in TF32; with a mask added only where a division scales the
    scores, or in f32 nothing does.
    """

    forms: str = "all"

    name = "recognize"
    takes = gives = Level.graph

    def __post_init__(self) -> None:
        for form in self.forms.split():
            if form.removeprefix("-") not in ("all", *FORMS, *OTHER_FORMS):
                known = ("all", *FORMS, *OTHER_FORMS)
                raise UsageError(
                    f"pass 'recognize': no form has the name {form}",
                    expected=", ".join(known),
                    fix=nearest(form, known),
                )

    @property
    def known(self) -> frozenset[str]:
        """The forms to look for."""
        words = self.forms.split()
        without = {form[1:] for form in words if form.startswith("-")}
        everything = "all" in words or len(without) == len(words)
        return frozenset({*words, *(FORMS if everything else ())} - without)

    def run(self, g: Graph) -> Graph:
        return prune(self.rewritten(g, tf32_rule(g) in ("products", "all")))

    def rewritten(self, g: Graph, rounded: bool) -> Graph:
        """`rounded`: products of f32 are in TF32."""

        def region(inner: Graph) -> Graph:
            return self.rewritten(inner, rounded)

        nodes = (replace(n, op=n.op.with_regions(region)) for n in g.nodes)
        g = replace(g, nodes=tuple(nodes)) if any(n.op.control for n in g.nodes) else g
        return rewrite(g, _Recognizer(g, self, rounded).rule)


class _Recognizer(AttentionMatcher):
    def __init__(self, g: Graph, options: Recognize, rounded: bool):
        super().__init__(g)
        self.forms = options.known
        self.rounded = rounded
        self.norms = not self.forms.isdisjoint(NORMS)
        self.gates: dict[Value, tuple[tuple[Value, int], ...]] = {}

    def is_wanted(self, product: t.Matmul) -> bool:
        """Whether the attention that a product may end is to be replaced."""
        half = "half_attention" in self.forms and product.a.type.dtype.bits <= 16
        if half or "attention" in self.forms:
            return True
        found = self.scores(product.a) if self.forms & {"plain_attention", "sdpa"} else None
        if found is None or found.softcap:
            return False
        plain = "plain_attention" in self.forms and found.scale != 1.0 and not found.masks
        return plain or ("sdpa" in self.forms and self.is_sdpa(found))

    def is_sdpa(self, found: ScoreProduct) -> bool:
        """Whether one of Inductor's patterns for CUDA has scores that are made so."""
        wide, effects = found.q.type.dtype == f32, [m.effect for m in found.masks]
        if wide and not self.rounded:
            return False
        if found.scale == 1.0:
            return wide and effects in ([], ["add"])
        return not effects or (found.divided and effects == ["add"])

    def rule(self, n: Node, b: Builder) -> tuple[Value, ...] | None:
        if not n.results or self.node.get(n.results[0]) is not n:
            return None  # of a region, which had its own turn
        match n.op:
            case t.Matmul():
                found = self.attention(n, b) if self.is_wanted(n.op) else None
                moved = "matmul_scale" in self.forms and not found
                return self.scaled_product(n, b) if moved else found
            case t.Map(fn):
                self.note_gates(n)
                op = self.pointwise(n, fn)
            case t.Normalize() if self.norms:
                op = self.without_neutral(n.op)
            case t.Cast() if self.norms:
                op = self.narrow_norm(n.op)
            case t.Reshape() if "group_norm" in self.forms:
                op = self.group_norm(n.op)
            case _:
                op = None
        if op is None or op.result_types != (n.results[0].type,):
            return None
        dead = self.matched(n, op.operands)
        if dead is None:
            return None
        values = self.put(b, op, n, dead)
        self.note_gates(self.node[n.results[0]])
        return values

    # -- pointwise

    def pointwise(self, n: Node, fn: str) -> Op | None:
        v = n.results[0]
        if not v.type.dtype.is_float:
            return None
        rules = {
            "div": (self.softmax, self.sigmoid, self.gated, self.norm),
            "mul": (self.softmax, self.mish, self.gated, self.norm, self.affine),
            "add": (self.scaled_norm, self.affine),
            "sub": (self.log_softmax, self.scaled_norm),
            "log": (self.log_softmax, self.softplus),
            "log1p": (self.softplus,),
            "reciprocal": (self.sigmoid,),
        }
        for rule in rules.get(fn, ()):
            if (op := rule(v)) is not None and self.is_known(op, v):
                return op
        return None

    def is_known(self, op: Op, v: Value) -> bool:
        """Whether the stack has the form that v was found to be."""
        form = form_of(op)
        return form in self.forms or (f"ort_{form}" in self.forms and self.is_of_ort(v))

    def is_of_ort(self, v: Value) -> bool:
        """Whether GeluFusion or FastGeluFusion of onnxruntime/core/optimizer match v. The half of
        x (1 + gate) / 2 is not of the gate alone. Erf's x is divided by a number. The half of
        tanh's is of x alone, and its cube is Pow(x, 3), or x a factor of the whole."""
        for gate, _ in self.gates.get(v, ()):
            match self.terms(gate):
                case ("erf", inner) if self.terms(inner)[:1] != ("div",):
                    return False
                case ("tanh", inner) if not (self.products(v) and self.has_cube(inner)):
                    return False
                case _:
                    pass
            for more in self.users.get(gate, ()):
                readers = self.users.get(more, set()) if self.terms(more)[:1] == ("add",) else ()
                if any(self.factor(y) and y != v for y in readers):
                    return False
        return True

    def has_cube(self, v: Term) -> bool:
        """Whether v is (x + c x ** 3) * d, or (c x) * (..)."""
        whole = self.factor(v)
        match self.terms(whole[0]) if whole else ():
            case ("add", a, b):
                parts = (self.factor(a), self.factor(b))
                return any(self.terms(p[0])[:1] == ("pow",) for p in parts if p)
            case _:
                return bool(self.products(v))

    # -- products

    def scaled_product(self, n: Node, b: Builder) -> tuple[Value, ...] | None:
        """(x * c) . (y * d)  →  (x . y) * (c * d)"""
        op = n.op
        assert isinstance(op, t.Matmul)
        if not n.results[0].type.dtype.is_float or unpacks_own(n, self.node.get):
            return None
        (x, c), (y, d) = (self.number_off(v) for v in (op.a, op.b))
        dead = self.matched(n, (x, y)) if (x, y) != (op.a, op.b) else None
        if dead is None:
            return None
        product = self.extra(b, replace(op, a=x, b=y), n, self.locs(dead))
        return self.put(b, t.Map("mul", (product,), (c * d,)), n, dead)

    def number_off(self, v: Value) -> tuple[Value, float]:
        """(x, c) where a model node of its own makes v as x * c, for one reader; else (v, 1)."""
        x, c = self.own_factor(v) or (v, 1.0)
        maker = self.node.get(x)
        whole = maker is not None and maker.locs == self.node[v].locs and x != v
        return (v, 1.0) if whole else (x, c)

    # -- softmax

    def softmax(self, v: Value) -> Op | None:
        """exp(x) / sum(exp(x)), with or without max(x) off x  →  t.softmax"""
        match self.terms(v):
            case ("div", e, total):
                ways = [(e, total)]
            case ("mul", a, b):
                ways = [(a, self.inverse(b)), (b, self.inverse(a))]
            case _:
                return None
        for e, total in ways:
            match self.reduced("sum", total), self.terms(e):
                case (summed, (axis,)), ("exp", Value() as x) if summed == e:
                    return t.Softmax(self.unshifted(x, axis), axis)
                case _:
                    pass
        return None

    def log_softmax(self, v: Value) -> Op | None:
        """log(softmax(x)), x - log(sum(exp(x))), x - (log(sum(exp(x - m))) + m)
        →  t.softmax(log=true)"""
        match self.terms(v):
            case ("log", y):
                op = self.op(y)
                return t.Softmax(op.x, op.axis, log=True) if isinstance(op, t.Softmax) else None
            case ("sub", Value() as x, y):
                pass
            case _:
                return None
        ways: list[tuple[Term, Term]] = [(y, 0.0)]
        match self.terms(y):
            case ("add", a, b):
                ways += [(a, b), (b, a)]
            case _:
                pass
        for log, most in ways:
            match self.terms(log):
                case ("log", total):
                    summed = self.reduced("sum", total)
                case _:
                    continue
            match summed, self.terms(summed[0] if summed else 0.0):
                case (_, (axis,)), ("exp", Value() as z):
                    pass
                case _:
                    continue
            inner = self.unshifted(z, axis)
            if most == 0.0 and z == x:
                return t.Softmax(inner, axis, log=True)
            if inner == x and self.terms(z) == ("sub", x, most):
                return t.Softmax(x, axis, log=True)
        return None

    def unshifted(self, v: Value, axis: int) -> Value:
        """x where v is x less its maximum, which softmax over `axis` does not see; else v."""
        match self.terms(v):
            case ("sub", Value() as x, most):
                found = self.reduced("max", most)
                if found and found[0] == x and axis in found[1]:
                    return x
            case _:
                pass
        return v

    def inverse(self, v: Term) -> Value | None:
        """y where v is 1 / y."""
        match self.terms(v):
            case ("reciprocal", Value() as y) | ("div", 1.0, Value() as y):
                return y
            case ("pow", Value() as y, -1.0):
                return y
            case _:
                return None

    # -- activations

    def sigmoid(self, v: Value) -> Op | None:
        """1 / (1 + exp(-x))  →  sigmoid;  x / (1 + exp(-x))  →  silu"""
        match self.terms(v):
            case ("div", top, below):
                pass
            case ("reciprocal", below):
                top = 1.0
            case _:
                return None
        match self.terms(below):
            case ("add", e, 1.0):
                match self.terms(e):
                    case ("exp", minus):
                        pass
                    case _:
                        return None
            case _:
                return None
        match self.terms(minus):
            case ("neg", Value() as x) | ("mul", Value() as x, -1.0):
                if top == 1.0:
                    return t.Map("sigmoid", (x,))
                return t.Map("silu", (x,)) if top == x else None
            case _:
                return None

    def softplus(self, v: Value) -> Op | None:
        """log(1 + exp(x))  →  softplus"""
        match self.terms(v):
            case ("log", y):
                match self.terms(y):
                    case ("add", e, 1.0):
                        pass
                    case _:
                        return None
            case ("log1p", e):
                pass
            case _:
                return None
        match self.terms(e):
            case ("exp", Value() as x):
                return t.Map("softplus", (x,))
            case _:
                return None

    def mish(self, v: Value) -> Op | None:
        """x * tanh(softplus(x))  →  mish"""
        for x, y in self.products(v):
            match self.terms(y):
                case ("tanh", inner) if self.terms(inner) == ("softplus", x):
                    return t.Map("mish", (x,))
                case _:
                    pass
        return None

    def note_gates(self, n: Node) -> None:
        """Keeps, for each value, the erf, tanh and sigmoid that it is at most three steps from."""
        v, fn = n.results[0], n.op.fn if isinstance(n.op, t.Map) else ""
        self.gates.pop(v, None)
        if fn in ("erf", "tanh", "sigmoid"):
            self.gates[v] = ((v, 0),)
        elif fn in ("add", "sub", "mul", "div"):
            found: dict[Value, int] = {}
            for x in n.op.operands:
                found.update({gate: far + 1 for gate, far in self.gates.get(x, ()) if far < 3})
            if found:
                self.gates[v] = tuple(found.items())

    def gated(self, v: Value) -> Op | None:
        """x * (a + b * gate(polynomial of x)) for the rows of GATED  →  the activation"""
        for gate, _ in self.gates.get(v, ()):
            match self.terms(gate):
                case (fn, Value() as inner):
                    pass
                case _:
                    continue
            rows = [row for row in GATED if row[0] == fn]
            for x in self.sources(inner):
                u = self.polynomial(inner, {x: (1, 0)})
                for _, needs_u, needs_y, activation in rows:
                    if not _same(u, needs_u, v):
                        continue
                    if _same(self.polynomial(v, {x: (1, 0), gate: (0, 1)}), needs_y, v):
                        return t.Map(activation, (x,))
        return None

    def sources(self, v: Value) -> list[Value]:
        """v and what it is computed from within five pointwise steps."""
        found = {v: None}
        layer = [v]
        for _ in range(5):
            terms = (y for x in layer for y in self.terms(x)[1:])
            new = {y: None for y in terms if isinstance(y, Value) and y not in found}
            found.update(new)
            layer = list(new)
        return list(found)

    def polynomial(self, v: Term, atoms: Mapping[Value, Powers], depth: int = 7) -> Polynomial:
        """v as a polynomial in the atoms: coefficients by powers; empty where it is none."""
        if not isinstance(v, Value):
            return {(0, 0): v}
        if v in atoms:
            return {atoms[v]: 1.0}
        if depth == 0:
            return {}

        def of(x: Term) -> Polynomial:
            return self.polynomial(x, atoms, depth - 1)

        match self.terms(v):
            case ("add", a, b):
                return _plus(of(a), of(b))
            case ("sub", a, b):
                return _plus(of(a), _times(of(b), {(0, 0): -1.0}))
            case ("neg", a):
                return _times(of(a), {(0, 0): -1.0})
            case ("mul", a, b):
                return _times(left, of(b)) if (left := of(a)) else {}
            case ("div", a, float(c)) if c:
                return _times(of(a), {(0, 0): 1 / c})
            case ("pow", a, 2.0):
                return _times(of(a), of(a))
            case ("pow", a, 3.0):
                return _times(of(a), _times(of(a), of(a)))
            case _:
                return {}

    # -- norms

    def norm(self, v: Value) -> Op | None:
        """c / sqrt(mean(c * c) + eps), and c * rsqrt(..), a scale among the factors or not
        →  t.normalize"""
        if not self.norms:
            return None
        for c, under, scale in self.over_root(v):
            found = self.moments(under)
            if found is None:
                continue
            x, axes, eps, center = found
            if c == x if not center else self.is_centred(c, x, axes):
                return self.fitting(t.Normalize(x, axes, scale, eps=eps, center=center))
        return None

    def scaled_norm(self, v: Value) -> Op | None:
        """x * r + (bias - mean * r), where r = scale * rsqrt(var + eps)  →  t.normalize"""
        if not self.norms:
            return None
        match self.terms(v):
            case ("add", Value() as a, Value() as b):
                ways = [(a, b, 1), (b, a, 1)]
            case ("sub", Value() as a, Value() as b):
                ways = [(a, b, -1)]
            case _:
                return None
        for product, rest, sign in ways:
            for x, r in self.products(product):
                for under, scale in self.root_factors(r):
                    found = self.moments(under)
                    if found is None or found[0] != x or not found[3]:
                        continue
                    shift = self.shift(rest, r, x, found[1], sign)
                    if shift is not None:
                        bias = shift if isinstance(shift, Value) else None
                        return self.fitting(t.Normalize(x, found[1], scale, bias, found[2]))
        return None

    def shift(self, v: Term, r: Value, x: Value, axes: Shape, sign: int) -> Term | None:
        """The bias where sign * v is bias - mean(x) * r; 0 where there is none."""

        def is_mean(m: Term) -> bool:
            return self.reduced("mean", m) == (x, axes)

        for a, b in self.products(v):
            match self.terms(a):
                case ("neg", m) if sign > 0 and b == r and is_mean(m):
                    return 0.0
                case _:
                    if sign < 0 and b == r and is_mean(a):
                        return 0.0
        match self.terms(v):
            case ("neg", y) if sign > 0:
                return self.shift(y, r, x, axes, -1)
            case ("sub", bias, y) if sign > 0 and self.shift(y, r, x, axes, -1) == 0.0:
                return bias
            case _:
                return None

    def fitting(self, op: t.Normalize) -> Op | None:
        """The norm where its scale and bias can be those of one."""
        fits = all(w is None or self.is_affine(w, op.x) for w in (op.scale, op.bias))
        return op if fits else None

    def is_affine(self, w: Value, x: Value) -> bool:
        """Whether w can scale or shift x: it broadcasts to x, and is no activation of its size."""
        ones = (1,) * (x.type.rank - w.type.rank) + w.type.shape
        fits = len(ones) == x.type.rank and all(
            a in (1, b) for a, b in zip(ones, x.type.shape, strict=True)
        )
        return fits and (w.type.size < x.type.size or self.is_weight(w))

    def over_root(self, v: Value) -> Iterator[tuple[Value, Value, Value | None]]:
        """(c, u, scale) for each way to read v as c / sqrt(u), times a scale perhaps."""
        match self.terms(v):
            case ("div", Value() as a, s) if (under := self.root(s)) is not None:
                yield a, under, None
                for scale, c in self.products(a):
                    yield c, under, scale
            case ("mul", _, _):
                for a, r in self.products(v):
                    for under, scale in self.root_factors(r):
                        yield a, under, scale
                        if scale is None:
                            for g, c in self.products(a):
                                yield c, under, g
            case _:
                pass

    def products(self, v: Term) -> list[tuple[Value, Value]]:
        """The two factors of a product, either way round."""
        match self.terms(v):
            case ("mul", Value() as a, Value() as b):
                return [(a, b), (b, a)]
            case _:
                return []

    def root_factors(self, r: Value) -> Iterator[tuple[Value, Value | None]]:
        """(u, scale) for each way to read r as 1 / sqrt(u), times a scale perhaps."""
        if (under := self.inverse_root(r)) is not None:
            yield under, None
        for scale, other in self.products(r):
            if (under := self.inverse_root(other)) is not None:
                yield under, scale
        match self.terms(r):
            case ("div", Value() as scale, s) if (under := self.root(s)) is not None:
                yield under, scale
            case _:
                pass

    def root(self, v: Term) -> Value | None:
        """u where v is sqrt(u)."""
        match self.terms(v):
            case ("sqrt", Value() as under) | ("pow", Value() as under, 0.5):
                return under
            case _:
                return None

    def inverse_root(self, v: Term) -> Value | None:
        """u where v is 1 / sqrt(u)."""
        match self.terms(v):
            case ("rsqrt", Value() as under) | ("pow", Value() as under, -0.5):
                return under
            case _:
                return self.root(below) if (below := self.inverse(v)) is not None else None

    def moments(self, v: Value) -> tuple[Value, Shape, float, bool] | None:
        """(x, axes, eps, center) where v is the variance (or mean square) of x, plus eps."""
        eps = 0.0
        match self.terms(v):
            case ("add", Value() as inner, float(eps)):
                v = inner
            case _:
                pass
        match self.terms(v):
            case ("max", Value() as inner, 0.0) | ("relu", Value() as inner):
                v = inner
            case _:
                pass
        if (found := self.reduced("mean", v)) is not None:
            square, axes = found
            c = self.squared(square)
            match self.terms(c) if c is not None else None:
                case ("sub", a, b):
                    for x, mean in ((a, b), (b, a)):
                        if isinstance(x, Value) and self.reduced("mean", mean) == (x, axes):
                            return x, axes, eps, True
                case _:
                    pass
            return None if c is None else (c, axes, eps, False)
        match self.terms(v):  # E[x * x] - E[x] * E[x]
            case ("sub", a, b):
                square, mean = self.reduced("mean", a), self.squared(b)
            case _:
                return None
        x = self.squared(square[0]) if square else None
        if square and x is not None and mean and self.reduced("mean", mean) == (x, square[1]):
            return x, square[1], eps, True
        return None

    def squared(self, v: Term) -> Value | None:
        """x where v is x * x."""
        match self.terms(v):
            case ("pow", Value() as x, 2.0):
                return x
            case ("mul", Value() as x, Value() as y) if x == y:
                return x
            case _:
                return None

    def is_centred(self, c: Value, x: Value, axes: Shape) -> bool:
        """Whether c is x - mean(x)."""
        match self.terms(c):
            case ("sub", a, m):
                return a == x and self.reduced("mean", m) == (x, axes)
            case _:
                return False

    def affine(self, v: Value) -> Op | None:
        """normalize(x) * w, normalize(x) + w  →  normalize(x, scale=w), normalize(x, bias=w)"""
        if not self.norms:
            return None
        match self.terms(v):
            case ("mul", Value() as a, Value() as b):
                name = "scale"
            case ("add", Value() as a, Value() as b):
                name = "bias"
            case _:
                return None
        for y, w in ((a, b), (b, a)):
            match self.op(y), name:
                case t.Normalize(x, _, None, None) as op, "scale" if self.is_affine(w, x):
                    return replace(op, scale=w)
                case t.Normalize(x, _, _, None, center=True) as op, "bias" if self.is_affine(w, x):
                    return replace(op, bias=w)
                case _:
                    pass
        return None

    def without_neutral(self, op: t.Normalize) -> Op | None:
        """A scale of ones, a bias of zeros  →  none"""
        scale = None if op.scale and self.number(op.scale) == 1 else op.scale
        bias = None if op.bias and self.number(op.bias) == 0 else op.bias
        return None if (scale, bias) == (op.scale, op.bias) else replace(op, scale=scale, bias=bias)

    def narrow_norm(self, op: t.Cast) -> Op | None:
        """cast(normalize(cast(x)))  →  normalize(x), whose statistics are f32 anyway"""
        wide = self.op(op.x)
        if not isinstance(wide, t.Normalize) or op.x.type.dtype.bits < op.dtype.bits:
            return None

        def bare(v: Value | None) -> Value | None:
            match self.op(v) if v is not None else None:
                case t.Cast(x) if x.type.dtype == op.dtype:
                    return x
                case _:
                    return v

        x = bare(wide.x)
        if x is wide.x or x is None or not op.dtype.is_float:
            return None
        return replace(wide, x=x, scale=bare(wide.scale), bias=bare(wide.bias))

    def group_norm(self, op: t.Reshape) -> Op | None:
        """reshape(normalize(reshape(x)))  →  normalize(x, groups=..) where the reshape cuts the
        channels of an image into groups"""
        match self.op(op.x):
            case t.Normalize(y, axes, None, None, groups=None) as inner:
                outer = self.op(y)
            case _:
                return None
        if not isinstance(outer, t.Reshape) or outer.x.type.shape != op.shape or len(op.shape) < 3:
            return None
        x, rank = outer.x, len(op.shape)
        first = min(axes, default=0)
        if sorted(axes) != list(range(first, y.type.rank)) or not y.type.size:
            return None
        n, channels = op.shape[:2]
        groups, rest = divmod(math.prod(y.type.shape[:first]), n)
        if rest or groups < 1 or channels % groups:
            return None
        if groups == channels:
            return replace(inner, x=x, axes=tuple(range(2, rank)))
        every = tuple(range(1, rank))
        return replace(inner, x=x, axes=every, groups=groups if groups > 1 else None)


def form_of(op: Op) -> str:
    """The form that an op is the whole of."""
    match op:
        case t.Map(fn):
            return fn
        case t.Softmax(log=log):
            return "log_softmax" if log else "softmax"
        case t.Normalize(x, axes, groups=None, center=center):
            last = sorted(axes) == list(range(x.type.rank - len(axes), x.type.rank))
            return "group_norm" if not last else "layer_norm" if center else "rms_norm"
        case _:
            return "group_norm"


Powers = tuple[int, int]
Polynomial = dict[Powers, float]

TANH_GELU = {(1, 0): math.sqrt(2 / math.pi), (3, 0): 0.044715 * math.sqrt(2 / math.pi)}
HALVES = {(1, 0): 0.5, (1, 1): 0.5}

# y is the last polynomial, in x and fn(u); u the first, in x. gelu, tanh: Hendrycks and Gimpel,
# Gaussian Error Linear Units, 2016; (1 + tanh(u)) / 2 = sigmoid(2 u).
GATED: tuple[tuple[str, Polynomial, Polynomial, str], ...] = (
    ("erf", {(1, 0): math.sqrt(0.5)}, HALVES, "gelu"),
    ("tanh", TANH_GELU, HALVES, "gelu_tanh"),
    ("sigmoid", {p: 2 * c for p, c in TANH_GELU.items()}, {(1, 1): 1.0}, "gelu_tanh"),
    ("sigmoid", {(1, 0): 1.0}, {(1, 1): 1.0}, "silu"),
    ("tanh", {(1, 0): 0.5}, HALVES, "silu"),
)


def _plus(a: Polynomial, b: Polynomial) -> Polynomial:
    if not a or not b:
        return {}
    return {p: a.get(p, 0.0) + b.get(p, 0.0) for p in (*a, *b)}


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    product: Polynomial = {}
    for (i, j), c in a.items():
        for (k, m), d in b.items():
            product[i + k, j + m] = product.get((i + k, j + m), 0.0) + c * d
    return product


def _same(a: Polynomial, b: Polynomial, v: Value) -> bool:
    """Equal to within what the constants of v's dtype can say."""
    return a.keys() == b.keys() and all(close(a[p], b[p], v) for p in a)
