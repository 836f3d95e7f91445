"""What each scalar function of `ops.scalar` computes."""

# numpy's stubs leave many types partly unknown
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from gpuir.interp.arrays import Array


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


# W. J. Cody, Rational Chebyshev approximations for the error function, Math. Comp. 23 (1969):
# erf up to 0.46875, erfc up to 4 and beyond; coefficients (highest power first, numerator and
# denominator) as published in SPECFUN's CALERF.
ERF_SMALL = (
    _numbers(
        "1.85777706184603153e-1 3.16112374387056560e0 1.13864154151050156e2 "
        "3.77485237685302021e2 3.20937758913846947e3"
    ),
    _numbers(
        "1 2.36012909523441209e1 2.44024637934444173e2 1.28261652607737228e3 2.84423683343917062e3"
    ),
)
ERFC_MIDDLE = (
    _numbers(
        "2.15311535474403846e-8 5.64188496988670089e-1 8.88314979438837594e0 "
        "6.61191906371416295e1 2.98635138197400131e2 8.81952221241769090e2 "
        "1.71204761263407058e3 2.05107837782607147e3 1.23033935479799725e3"
    ),
    _numbers(
        "1 1.57449261107098347e1 1.17693950891312499e2 5.37181101862009858e2 "
        "1.62138957456669019e3 3.29079923573345963e3 4.36261909014324716e3 "
        "3.43936767414372164e3 1.23033935480374942e3"
    ),
)
ERFC_LARGE = (
    _numbers(
        "1.63153871373020978e-2 3.05326634961232344e-1 3.60344899949804439e-1 "
        "1.25781726111229246e-1 1.60837851487422766e-2 6.58749161529837803e-4"
    ),
    _numbers(
        "1 2.56852019228982242e0 1.87295284992346725e0 5.27905102951428412e-1 "
        "6.05183413124413191e-2 2.33520497626869185e-3"
    ),
)


def erf(x: Array) -> Array:
    """The error function to double precision, in x's own dtype."""

    def ratio(x: Array, table: tuple[tuple[float, ...], tuple[float, ...]]) -> Array:
        return np.polyval(table[0], x) / np.polyval(table[1], x)

    y = np.abs(np.asarray(x, np.float64))
    result = np.ones_like(y)  # beyond 6 it is 1 to double precision
    result[np.isnan(y)] = np.nan
    small, large = y <= 0.46875, (y > 4) & (y < 6)
    middle = (y > 0.46875) & (y <= 4)
    s, m, g = y[small], y[middle], y[large]
    result[small] = s * ratio(s * s, ERF_SMALL)
    result[middle] = 1 - np.exp(-m * m) * ratio(m, ERFC_MIDDLE)
    q = 1 / (g * g)
    tail = (1 / math.sqrt(math.pi) - q * ratio(q, ERFC_LARGE)) / g
    result[large] = 1 - np.exp(-g * g) * tail
    return np.copysign(result, x).astype(x.dtype)


def lgamma(x: Array) -> Array:
    """The logarithm of the gamma function's size, number by number as Python's math has it."""

    def one(v: float) -> float:
        if math.isinf(v) or (v <= 0 and v == math.floor(v)):
            return math.inf
        return math.lgamma(v)

    return np.vectorize(one, otypes=[np.float64])(np.asarray(x, np.float64)).astype(x.dtype)


def digamma(x: Array) -> Array:
    """The derivative of lgamma. Abramowitz and Stegun, Handbook of Mathematical Functions (1964),
    6.3.5 (recurrence), 6.3.7 (reflection) and 6.3.18 (asymptotic series)."""
    y = np.asarray(x, np.float64)
    turned = y < 0.5
    rest = np.where(turned, 1 - y, y)
    result = np.where(turned, -math.pi / np.tan(math.pi * np.where(turned, y, 0.25)), 0.0)
    result = np.where(turned & (y == np.floor(y)), np.nan, result)
    result = np.where(y == 0, -np.copysign(np.inf, y), result)
    while np.any(small := rest < 8):
        result = np.where(small, result - 1 / np.where(small, rest, 1), result)
        rest = np.where(small, rest + 1, rest)
    q = 1 / (rest * rest)
    series = q * (1 / 12 - q * (1 / 120 - q * (1 / 252 - q * (1 / 240 - q / 132))))
    return (result + np.log(rest) - 0.5 / rest - series).astype(x.dtype)


def erfinv(x: Array) -> Array:
    """Winitzki's approximation (A handy approximation for the error function and its inverse,
    2008), then Newton's steps on `erf`."""
    y = np.asarray(x, np.float64)
    inside = np.abs(y) < 1
    safe = np.where(inside, y, 0.0)
    log, a = np.log1p(-safe * safe), 0.147
    half = 2 / (math.pi * a) + log / 2
    z = np.copysign(np.sqrt(np.sqrt(half * half - log / a) - half), safe)
    for _ in range(4):
        z = z - (erf(z) - safe) * (math.sqrt(math.pi) / 2) * np.exp(z * z)
    ends = np.where(np.abs(y) == 1, np.copysign(np.inf, y), np.nan)
    return np.where(inside, z, ends).astype(x.dtype)


def divide(x: Array, y: Array) -> Array:
    """Towards zero on integers."""
    if x.dtype.kind not in "iu":
        return np.true_divide(x, y)
    quotient, rest = np.floor_divide(x, y), np.remainder(x, y)
    return quotient + ((rest != 0) & ((x < 0) != (y < 0))).astype(x.dtype)


def _power(x: Array, y: Array) -> Array:
    if x.dtype.kind in "iu" and np.any(y < 0):
        return np.trunc(np.power(x.astype(np.float64), y))
    return np.power(x, y)


def _sigmoid(x: Array) -> Array:
    if x.dtype.kind == "c":
        return 1 / (1 + np.exp(-x))
    small = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1, small).astype(x.dtype) / (1 + small)


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _gelu_gradient(dy: Array, x: Array) -> Array:
    """The normal distribution's sum up to x, and x times its density."""
    density = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return dy * (0.5 * (1 + erf(x * math.sqrt(0.5))) + x * density)


def _gelu_tanh_gradient(dy: Array, x: Array) -> Array:
    root = math.sqrt(2 / math.pi)
    bend = np.tanh(root * (x + 0.044715 * x * x * x))
    slope = root * (1 + 3 * 0.044715 * x * x)
    return dy * 0.5 * (1 + bend + x * (1 - bend * bend) * slope)


def _silu_gradient(dy: Array, x: Array) -> Array:
    share = _sigmoid(x)
    return dy * share * (1 + x * (1 - share))


def _mish_gradient(dy: Array, x: Array) -> Array:
    bend = np.tanh(np.logaddexp(x, np.zeros_like(x)))
    return dy * (bend + x * (1 - bend * bend) * _sigmoid(x))


def _hard_swish_gradient(dy: Array, x: Array) -> Array:
    """As torch: halfway at neither end."""
    return dy * np.where(x <= -3, 0, np.where(x >= 3, 1, x / 3 + 0.5)).astype(x.dtype)


def _integral(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A rounding: integers are rounded already."""
    return lambda x: fn(x) if x.dtype.kind == "f" else x


FUNCTIONS: dict[str, Callable[..., Array]] = {
    "identity": lambda x: x,
    "copy": lambda x: x,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "ceil": _integral(np.ceil),
    "floor": _integral(np.floor),
    "round": _integral(np.rint),  # half to even
    "trunc": _integral(np.trunc),
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: divide(np.ones_like(x), x),
    **{name: getattr(np, name) for name in ("exp", "expm1", "log", "log1p", "sin", "cos", "tan")},
    **{name: getattr(np, name) for name in ("sinh", "cosh", "tanh")},
    **{f"a{name}": getattr(np, f"arc{name}") for name in ("sin", "cos", "tan")},
    **{f"a{name}": getattr(np, f"arc{name}") for name in ("sinh", "cosh", "tanh")},
    "erf": erf,
    "lgamma": lgamma,
    "erfinv": erfinv,
    "conj": np.conjugate,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": _sigmoid,
    "softplus": lambda x: np.logaddexp(x, np.zeros_like(x)),
    "gelu": lambda x: 0.5 * x * (1 + erf(x * math.sqrt(0.5))),
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: x * _sigmoid(x),
    "mish": lambda x: x * np.tanh(np.logaddexp(x, np.zeros_like(x))),
    "hard_swish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "hard_sigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "leaky_relu": lambda x, a: np.where(x < 0, a * x, x),
    "elu": lambda x, a: np.where(x < 0, a * np.expm1(np.minimum(x, 0)), x),
    "clip": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": divide,
    "pow": _power,
    "min": np.minimum,
    "max": np.maximum,
    "atan2": np.arctan2,
    "hypot": np.hypot,
    "copysign": np.copysign,
    "nextafter": np.nextafter,
    "gcd": np.gcd,
    "mod": np.mod,
    "fmod": np.fmod,
    "bit_not": np.invert,
    "bit_and": np.bitwise_and,
    "bit_or": np.bitwise_or,
    "bit_xor": np.bitwise_xor,
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "where": np.where,
    "relu_gradient": lambda dy, y: np.where(y > 0, dy, 0),
    "sigmoid_gradient": lambda dy, y: dy * y * (1 - y),
    "tanh_gradient": lambda dy, y: dy * (1 - y * y),
    "elu_gradient": lambda dy, y, a: np.where(y < 0, dy * (y + a), dy),
    "hard_sigmoid_gradient": lambda dy, y, a, b: np.where((y > 0) & (y < 1), a * dy, 0),
    "softplus_gradient": lambda dy, x: dy * _sigmoid(x),
    "gelu_gradient": _gelu_gradient,
    "gelu_tanh_gradient": _gelu_tanh_gradient,
    "silu_gradient": _silu_gradient,
    "mish_gradient": _mish_gradient,
    "hard_swish_gradient": _hard_swish_gradient,
    "lgamma_gradient": lambda dy, x: dy * digamma(x),
    "leaky_relu_gradient": lambda dy, x, a: np.where(x > 0, dy, a * dy),
    "clip_gradient": lambda dy, x, low, high: np.where((x >= low) & (x <= high), dy, 0),
}
