"""Scalar functions: the rows that `t.map` applies elementwise. Their numpy meaning is in interp."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from gpuir.ir.types import DType


@dataclass(frozen=True)
class Scalar:
    """`arity` counts operands and immediates together; `flops` is per element.

    `gives` is the result's dtype: that of the operands (all alike), bool, or that of the second
    operand (`where`). A transcendental counts as one operation: what a special function costs on a
    device is the cost model's business.
    """

    arity: int
    flops: int = 1
    gives: Literal["same", "bool", "second"] = "same"
    takes: Literal["any", "bool"] = "any"  # of the first operand


SCALARS: dict[str, Scalar] = {
    "identity": Scalar(1, flops=0),
    "copy": Scalar(1, flops=0),  # to other memory
    "conj": Scalar(1, flops=0),  # a sign, which a product that reads it takes at no cost
    **{
        name: Scalar(1)
        for name in (
            *("neg", "abs", "sign", "ceil", "floor", "round", "trunc"),
            *("sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "erf"),
            *("sin", "cos", "tan", "asin", "acos", "atan"),
            *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
            *("lgamma", "erfinv"),
            "bit_not",
        )
    },
    "relu": Scalar(1),
    "sigmoid": Scalar(1, flops=3),
    "softplus": Scalar(1, flops=3),
    "gelu": Scalar(1, flops=5),  # x/2 (1 + erf(x/sqrt 2))
    "gelu_tanh": Scalar(1, flops=8),
    "silu": Scalar(1, flops=4),
    "mish": Scalar(1, flops=5),  # x tanh(softplus(x))
    "hard_swish": Scalar(1, flops=4),  # x clip(x / 6 + 1/2, 0, 1)
    "hard_sigmoid": Scalar(3, flops=4),  # x, alpha, beta: clip(alpha x + beta, 0, 1)
    "leaky_relu": Scalar(2, flops=2),  # x, alpha
    "elu": Scalar(2, flops=4),  # x, alpha
    "clip": Scalar(3, flops=2),  # x, low, high
    **{name: Scalar(2) for name in ("add", "sub", "mul", "div", "pow", "min", "max")},
    **{name: Scalar(2) for name in ("atan2", "copysign", "nextafter", "gcd")},
    "hypot": Scalar(2, flops=4),  # sqrt(x² + y²)
    **{name: Scalar(2, flops=2) for name in ("mod", "fmod")},  # sign of divisor, of dividend
    **{
        name: Scalar(2)
        for name in (
            "bit_and",
            "bit_or",
            "bit_xor",
            "shift_left",
            "shift_right",
        )
    },
    **{name: Scalar(2, takes="bool") for name in ("and", "or", "xor")},
    "not": Scalar(1, takes="bool"),
    **{name: Scalar(2, gives="bool") for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "isnan": Scalar(1, gives="bool"),
    "isinf": Scalar(1, gives="bool"),
    "where": Scalar(3, gives="second", takes="bool"),
    # the gradients of the functions above that are a kernel of their own: dy, then y ...
    "relu_gradient": Scalar(2),
    "sigmoid_gradient": Scalar(2, flops=3),
    "tanh_gradient": Scalar(2, flops=3),
    "elu_gradient": Scalar(3, flops=3),  # dy, y, alpha
    "hard_sigmoid_gradient": Scalar(4, flops=2),  # dy, y, alpha, beta
    # ... or x
    "softplus_gradient": Scalar(2, flops=4),
    "gelu_gradient": Scalar(2, flops=9),
    "gelu_tanh_gradient": Scalar(2, flops=16),
    "silu_gradient": Scalar(2, flops=7),
    "mish_gradient": Scalar(2, flops=12),
    "hard_swish_gradient": Scalar(2, flops=4),
    "lgamma_gradient": Scalar(2, flops=20),
    "leaky_relu_gradient": Scalar(3, flops=2),  # dy, x, alpha
    "clip_gradient": Scalar(4, flops=2),  # dy, x, low, high
}


# ---------------------------------------------------------------------------- complex numbers


def _made(*of: Mapping[str, int], **functions: int) -> Counter[str]:
    """Functions of real numbers, so many of each, and what others are made of."""
    return sum(map(Counter[str], of), Counter(functions))


_MUL = _made(mul=4, add=2)
_DIV = _made(mul=6, add=3, div=2)  # x conj(y) / |y|²
_RECIPROCAL = _made(mul=2, add=1, div=2, neg=1)  # conj(x) / |x|²
_EXP = _made(exp=1, sin=1, cos=1, mul=2)  # exp(a) (cos b + i sin b)
_LOG = _made(hypot=1, log=1, atan2=1)  # log |x| + i angle(x)
_SQRT = _made(hypot=1, add=1, mul=2, sqrt=1, div=1)  # s = sqrt((|x| + a) / 2), s + i b / 2s
_WAVE = _made(sin=1, cos=1, sinh=1, cosh=1, mul=2)  # sin x = sin a cosh b + i cos a sinh b
_SLOPE = _made(_WAVE, add=1, div=2)  # tan x = (sin 2a + i sinh 2b) / (cos 2a + cosh 2b)
_ARC = _made(_MUL, _SQRT, _LOG, neg=1, add=3)  # asin x = -i log(i x + sqrt(1 - x²))
_ARC_SLOPE = _made(_LOG, _LOG, add=4, mul=2)  # atan x = i/2 (log(1 - i x) - log(1 + i x))
_SIGMOID = _made(_EXP, _RECIPROCAL, neg=2, add=1)  # 1 / (1 + exp(-x))

# What functions of complex numbers are made of, by the usual formulas for x = a + i b.
COMPLEX: dict[str, Mapping[str, int]] = {
    "identity": _made(),
    "copy": _made(),
    "add": _made(add=2),
    "sub": _made(add=2),
    "mul": _MUL,
    "div": _DIV,
    "reciprocal": _RECIPROCAL,
    "neg": _made(neg=2),
    "conj": _made(),
    "eq": _made({"eq": 2, "and": 1}),
    "ne": _made({"ne": 2, "or": 1}),
    "isnan": _made({"isnan": 2, "or": 1}),
    "isinf": _made({"isinf": 2, "or": 1}),
    "exp": _EXP,
    "expm1": _made(_EXP, add=1),
    "log": _LOG,
    "log1p": _made(_LOG, add=1),
    "sqrt": _SQRT,
    "rsqrt": _made(_SQRT, _RECIPROCAL),
    "pow": _made(_LOG, _MUL, _EXP),
    **dict.fromkeys(("sin", "cos", "sinh", "cosh"), _WAVE),
    **dict.fromkeys(("tan", "tanh"), _SLOPE),
    **dict.fromkeys(("asin", "acos", "asinh", "acosh"), _ARC),
    **dict.fromkeys(("atan", "atanh"), _ARC_SLOPE),
    "sigmoid": _SIGMOID,
    "silu": _made(_SIGMOID, _MUL),
}


@cache
def made_of(fn: str, dtype: DType) -> Mapping[str, int]:
    """Which functions of real numbers, and how often, a function takes for each element: itself,
    or of complex numbers what it is made of. One without a formula here goes part by part."""
    if not dtype.is_complex:
        return {fn: 1}
    return COMPLEX.get(fn, {fn: 2})


# What folds two elements of a reduction, a running sum or a scatter into one.
FOLDS = {
    "sum": ("add",),
    "mean": ("add",),
    "prod": ("mul",),
    "logaddexp": ("max", "sub", "exp", "log1p", "add"),
}


@cache
def flops_of(fn: str, dtype: DType) -> int:
    """Operations of a function, or of a fold by its name, for each element of that dtype."""
    parts = [part for name in FOLDS.get(fn, (fn,)) for part in made_of(name, dtype).items()]
    return sum(n * SCALARS[name].flops for name, n in parts)
