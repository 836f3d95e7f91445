"""Scalar functions: the rows that `t.map` applies elementwise. Their numpy meaning is in interp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
    **{
        name: Scalar(1)
        for name in (
            *("neg", "abs", "sign", "ceil", "floor", "round", "trunc"),
            *("sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "erf"),
            *("sin", "cos", "tan", "asin", "acos", "atan"),
            *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
            *("lgamma", "erfinv"),
            *("bit_not", "conj"),
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
