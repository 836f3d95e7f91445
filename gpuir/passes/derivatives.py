"""The derivatives of the scalar functions, as rows: how the gradient of y = fn(*args) becomes that
of each argument. Ties and edges are settled as PyTorch's derivatives.yaml settles them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import pi, sqrt

from gpuir.ir.errors import ModelError
from gpuir.ir.graph import Value
from gpuir.passes.reverse import Reverse

Arg = Value | float
Unary = Callable[[Reverse, Value, Value, Value], Value | None]  # (reverse, dy, y, x), dx
Several = Callable[..., Sequence[Value | None]]  # (reverse, dy, y, *args), one for each argument

FLAT = (  # constant wherever they have a derivative, or of bits and truth
    *("sign", "ceil", "floor", "round", "trunc", "isnan", "isinf"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not"),
    *("bit_not", "bit_and", "bit_or", "bit_xor", "shift_left", "shift_right"),
    *("gcd", "nextafter"),
)
# Functions of complex numbers whose rules here hold for them as they are.
LINEAR = ("identity", "copy", "neg", "conj", "add", "sub", "mul", "where")
# Those that have a complex derivative, by which the rules multiply.
HOLOMORPHIC = (
    *("div", "reciprocal", "pow", "sqrt", "rsqrt", "exp", "expm1", "log", "log1p"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("asinh", "acosh", "atanh", "sigmoid", "silu"),
)


def gradients(
    fn: str, r: Reverse, dy: Value, y: Value, args: Sequence[Arg]
) -> Sequence[Value | None]:
    """The gradient of each argument, trailing ones left out that have none. That of a complex
    number is the gradients of its parts, as PyTorch has it: dy times the conjugate of the
    derivative (PyTorch documentation, Autograd for Complex Numbers)."""
    if fn in FLAT:
        return ()
    if y.type.dtype.is_complex and fn in HOLOMORPHIC:
        found = _gradients(fn, r, r.map("conj", dy), y, args)
        return [dx if dx is None else r.map("conj", dx) for dx in found]
    if y.type.dtype.is_complex and fn not in LINEAR:
        raise ModelError(
            f"gpuir has no gradient of {fn} of complex numbers",
            expected=", ".join((*LINEAR, *HOLOMORPHIC)),
        )
    return _gradients(fn, r, dy, y, args)


def _gradients(
    fn: str, r: Reverse, dy: Value, y: Value, args: Sequence[Arg]
) -> Sequence[Value | None]:
    if fn in UNARY:
        (x,) = args
        assert isinstance(x, Value)
        return (UNARY[fn](r, dy, y, x),)
    if fn not in SEVERAL:
        raise ModelError(
            f"gpuir has no gradient of {fn}",
            fix="train a graph of the forward pass only: this function belongs to a backward pass",
        )
    return SEVERAL[fn](r, dy, y, *args)


# ---------------------------------------------------------------------------- of one argument


def _by_result(fn: str) -> Unary:
    """fn has a scalar function for its gradient, which reads y."""
    return lambda r, dy, y, x: r.map(f"{fn}_gradient", dy, y)


def _by_operand(fn: str) -> Unary:
    """fn has a scalar function for its gradient, which reads x."""
    return lambda r, dy, y, x: r.map(f"{fn}_gradient", dy, x)


def _times(fn: str) -> Unary:
    """dy fn(x)"""
    return lambda r, dy, y, x: r.map("mul", dy, r.map(fn, x))


def _square(r: Reverse, x: Value, scale: float, shift: float) -> Value:
    """scale x² + shift"""
    square = r.map("mul", x, x)
    return r.map("add", square if scale == 1 else r.map("neg", square), shift)


def _over_root(scale: float, shift: float) -> Unary:
    """dy / sqrt(scale x² + shift)"""
    return lambda r, dy, y, x: r.map("mul", dy, r.map("rsqrt", _square(r, x, scale, shift)))


def _over_square(scale: float) -> Unary:
    """dy / (1 + scale x²)"""
    return lambda r, dy, y, x: r.map("div", dy, _square(r, x, scale, 1.0))


def _minus(rule: Unary) -> Unary:
    def negated(r: Reverse, dy: Value, y: Value, x: Value) -> Value | None:
        return rule(r, r.map("neg", dy), y, x)

    return negated


def _erf(r: Reverse, dy: Value, y: Value, x: Value) -> Value:
    """2 / sqrt(pi) exp(-x²) dy"""
    bell = r.map("exp", r.map("neg", r.map("mul", x, x)))
    return r.map("mul", r.map("mul", dy, 2 / sqrt(pi)), bell)


def _erfinv(r: Reverse, dy: Value, y: Value, x: Value) -> Value:
    """sqrt(pi) / 2 exp(y²) dy"""
    return r.map("mul", r.map("mul", dy, sqrt(pi) / 2), r.map("exp", r.map("mul", y, y)))


UNARY: dict[str, Unary] = {
    **{fn: _by_result(fn) for fn in ("relu", "sigmoid", "tanh")},
    **{fn: _by_operand(fn) for fn in ("gelu", "gelu_tanh", "silu", "mish")},
    **{fn: _by_operand(fn) for fn in ("softplus", "hard_swish")},
    "identity": lambda r, dy, y, x: dy,
    "copy": lambda r, dy, y, x: dy,
    "neg": lambda r, dy, y, x: r.map("neg", dy),
    "abs": _times("sign"),
    "sqrt": lambda r, dy, y, x: r.map("div", r.map("mul", dy, 0.5), y),
    "rsqrt": lambda r, dy, y, x: r.map("mul", r.map("mul", dy, -0.5), r.map("pow", y, 3.0)),
    "reciprocal": lambda r, dy, y, x: r.map("neg", r.map("mul", r.map("mul", dy, y), y)),
    "exp": lambda r, dy, y, x: r.map("mul", dy, y),
    "expm1": lambda r, dy, y, x: r.map("mul", dy, r.map("add", y, 1.0)),
    "log": lambda r, dy, y, x: r.map("div", dy, x),
    "log1p": lambda r, dy, y, x: r.map("div", dy, r.map("add", x, 1.0)),
    "erf": _erf,
    "erfinv": _erfinv,
    "lgamma": _by_operand("lgamma"),
    "conj": lambda r, dy, y, x: r.map("conj", dy),
    "sin": _times("cos"),
    "cos": _minus(_times("sin")),
    "tan": lambda r, dy, y, x: r.map("mul", dy, _square(r, y, 1, 1.0)),
    "asin": _over_root(-1, 1.0),
    "acos": _minus(_over_root(-1, 1.0)),
    "atan": _over_square(1),
    "sinh": _times("cosh"),
    "cosh": _times("sinh"),
    "asinh": _over_root(1, 1.0),
    "acosh": _over_root(1, -1.0),
    "atanh": _over_square(-1),
}


# ---------------------------------------------------------------------------- of several


def _add(r: Reverse, dy: Value, y: Value, a: Value, b: Arg) -> Sequence[Value | None]:
    return dy, dy


def _sub(r: Reverse, dy: Value, y: Value, a: Value, b: Arg) -> Sequence[Value | None]:
    return dy, r.map("neg", dy)


def _mul(r: Reverse, dy: Value, y: Value, a: Value, b: Arg) -> Sequence[Value | None]:
    b = r.conj(b) if isinstance(b, Value) else b
    return r.map("mul", dy, b), r.map("mul", dy, r.conj(a))


def _div(r: Reverse, dy: Value, y: Value, a: Value, b: Arg) -> Sequence[Value | None]:
    """dy / b, and -y dy / b"""
    da = r.map("div", dy, b)
    return da, r.map("neg", r.map("mul", da, y))


def _pow(r: Reverse, dy: Value, y: Value, a: Value, b: Arg) -> Sequence[Value | None]:
    """dy b a ** (b - 1), zero where b is; dy y log a, zero where a is"""
    if not isinstance(b, Value):
        return (r.map("mul", r.map("mul", dy, b), r.map("pow", a, b - 1)),) if b else ()
    da = r.map("mul", r.map("mul", dy, b), r.map("pow", a, r.map("sub", b, 1.0)))
    db = r.map("mul", r.map("mul", dy, y), r.map("log", a))
    zero = r.zero(dy)
    return (
        r.map("where", r.map("eq", b, 0.0), zero, da),
        r.map("where", r.map("eq", a, 0.0), zero, db),
    )


def _atan2(r: Reverse, dy: Value, y: Value, a: Value, b: Value) -> Sequence[Value | None]:
    """b dy / (a² + b²), and -a dy / (a² + b²)"""
    share = r.map("div", dy, r.map("add", r.map("mul", a, a), r.map("mul", b, b)))
    return r.map("mul", share, b), r.map("neg", r.map("mul", share, a))


def _hypot(r: Reverse, dy: Value, y: Value, a: Value, b: Value) -> Sequence[Value | None]:
    """a dy / y and b dy / y; nothing where both are zero, as torch has it of a complex number's
    size."""
    share = r.map("where", r.map("eq", y, 0.0), r.zero(dy), r.map("div", dy, y))
    return r.map("mul", share, a), r.map("mul", share, b)


def _copysign(r: Reverse, dy: Value, y: Value, a: Value, b: Arg) -> Sequence[Value | None]:
    """dy turned where a was; zero at zero"""
    return (r.map("mul", dy, r.map("mul", r.map("sign", a), r.map("sign", y))),)


def _extreme(keeps: str, drops: str) -> Several:
    """min, max: all of dy to the argument that is kept, half to each where they are equal."""

    def rule(r: Reverse, dy: Value, y: Value, a: Value, b: Arg) -> Sequence[Value | None]:
        share = r.map("where", r.map("eq", a, b), r.map("mul", dy, 0.5), dy)
        zero = r.zero(dy)
        da = r.map("where", r.map(drops, a, b), zero, share)
        return da, r.map("where", r.map(keeps, a, b), zero, share)

    return rule


def _modulo(rounds: str) -> Several:
    """a - b round(a / b) with the rounding held: dy, and -dy round(a / b)"""

    def rule(r: Reverse, dy: Value, y: Value, a: Value, b: Arg) -> Sequence[Value | None]:
        times = r.map(rounds, r.map("div", a, b))
        return dy, r.map("neg", r.map("mul", dy, times))

    return rule


def _where(r: Reverse, dy: Value, y: Value, holds: Value, *_: Arg) -> Sequence[Value | None]:
    zero = r.zero(dy)
    return None, r.map("where", holds, dy, zero), r.map("where", holds, zero, dy)


def _leaky_relu(r: Reverse, dy: Value, y: Value, x: Value, alpha: Arg) -> Sequence[Value | None]:
    """The slope may be learned: PReLU."""
    dx = r.map("leaky_relu_gradient", dy, x, alpha)
    return dx, r.map("where", r.map("lt", x, 0.0), r.map("mul", dy, x), r.zero(dy))


def _elu(r: Reverse, dy: Value, y: Value, x: Value, alpha: Arg) -> Sequence[Value | None]:
    dx = r.map("elu_gradient", dy, y, alpha)
    below = r.map("mul", dy, r.map("expm1", x))
    return dx, r.map("where", r.map("lt", x, 0.0), below, r.zero(dy))


def _clip(r: Reverse, dy: Value, y: Value, x: Value, low: Arg, high: Arg) -> Sequence[Value | None]:
    zero = r.zero(dy)
    ends = (r.map("where", r.map(*cut), dy, zero) for cut in (("lt", x, low), ("gt", x, high)))
    return r.map("clip_gradient", dy, x, low, high), *ends


def _hard_sigmoid(
    r: Reverse, dy: Value, y: Value, x: Value, alpha: Arg, beta: Arg
) -> Sequence[Value | None]:
    slope = r.map("hard_sigmoid_gradient", dy, y, alpha, beta)
    inside = r.map("hard_sigmoid_gradient", dy, y, 1.0, 0.0)
    return slope, r.map("mul", inside, x), inside


SEVERAL: dict[str, Several] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "pow": _pow,
    "atan2": _atan2,
    "hypot": _hypot,
    "copysign": _copysign,
    "min": _extreme("lt", "gt"),
    "max": _extreme("gt", "lt"),
    "mod": _modulo("floor"),
    "fmod": _modulo("trunc"),
    "where": _where,
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "clip": _clip,
    "hard_sigmoid": _hard_sigmoid,
}
