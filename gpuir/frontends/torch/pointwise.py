"""Elementwise operators: arithmetic, comparisons, activations, casts."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import cast, pick, widened
from gpuir.frontends.node import each_named
from gpuir.frontends.torch.node import Converter, TorchNode, dtype_of
from gpuir.ir.graph import Value
from gpuir.ir.types import DType, TensorType, bool_, channels_last
from gpuir.ops import tensor as t


def of_dtype(number: Any, dtype: DType) -> Any:
    """A Python number as an element of this dtype; a complex one that is real as its real part."""
    if is_imaginary(number):
        return number
    number = number.real if isinstance(number, complex) else number
    if dtype == bool_:
        return bool(number)
    if dtype.is_integer:
        return int(number)
    return float(number)


def is_imaginary(number: Any) -> bool:
    """Whether it has an imaginary part, which no immediate has."""
    return isinstance(number, complex) and number.imag != 0


def mapped(e: Emitter, fn: str, *args: Any, dtype: DType) -> Value:
    """`fn` of tensors and numbers, all brought to `dtype`; numbers behind the last tensor become
    immediates."""
    values = list(args)
    imm: list[Any] = []
    while len(values) > 1 and not (isinstance(values[-1], Value) or is_imaginary(values[-1])):
        imm.insert(0, of_dtype(values.pop(), dtype))
    operands = tuple(
        cast(e, v, dtype) if isinstance(v, Value) else constant(e, v, dtype) for v in values
    )
    return e.map(fn, *operands, *imm)


def constant(e: Emitter, number: Any, dtype: DType) -> Value:
    """A Python number as a value."""
    number = of_dtype(number, dtype)
    if is_imaginary(number):  # which no immediate holds
        return e.fill(number, TensorType((), dtype), "number")
    return e.constant(number, dtype)


def unary(n: TorchNode, e: Emitter, fn: str) -> Value:
    """`fn` in the result's dtype: integers become floats where torch makes them so."""
    return mapped(e, fn, n["self"], dtype=n.type.dtype)


def sign_bit(n: TorchNode, e: Emitter) -> Value:
    """Whether it is below zero, -0.0 too."""
    x, dtype = n["self"], n["self"].type.dtype
    if dtype == bool_:
        return e.fill(False, x.type)
    if dtype.is_float:
        x = e.map("copysign", constant(e, 1, dtype), x)
    return mapped(e, "lt", x, 0, dtype=dtype)


def digamma(n: TorchNode, e: Emitter) -> Value:
    """The derivative of lgamma."""
    return mapped(e, "lgamma_gradient", 1, n["self"], dtype=n.type.dtype)


def binary(n: TorchNode, e: Emitter, fn: str) -> Value:
    """`fn` of `self` and `other` in the result's dtype."""
    return mapped(e, fn, n.args["self"], n.args["other"], dtype=n.type.dtype)


def with_alpha(n: TorchNode, e: Emitter, fn: str) -> Value:
    """fn(self, alpha * other)."""
    dtype = n.type.dtype
    return mapped(e, fn, n.args["self"], scaled(n, e, n.args["other"], "alpha"), dtype=dtype)


def scaled(n: TorchNode, e: Emitter, x: Any, arg: str) -> Any:
    """x times a number of the call's arguments: x itself where that is 1."""
    factor = n.args.get(arg, 1)
    if factor == 1:
        return x
    return mapped(e, "mul", x, factor, dtype=n.type.dtype) if isinstance(x, Value) else x * factor


def reverse_subtract(n: TorchNode, e: Emitter) -> Value:
    """other - alpha * self."""
    x = scaled(n, e, n["self"], "alpha")
    return mapped(e, "sub", n.args["other"], x, dtype=n.type.dtype)


def comparison(n: TorchNode, e: Emitter, fn: str) -> Value:
    """`fn` of both operands in the dtype that torch promotes them to."""
    dtype = n.promoted("self", "other")
    return mapped(e, fn, n.args["self"], n.args["other"], dtype=dtype)


def logical(n: TorchNode, e: Emitter, fn: str) -> Value:
    """`fn` of operands as truth values."""
    operands = tuple(truth(e, n[name]) for name in ("self", "other") if name in n.args)
    return e.map(fn, *operands)


def truth(e: Emitter, x: Value) -> Value:
    """x != 0."""
    return x if x.type.dtype == bool_ else e.map("ne", x, of_dtype(0, x.type.dtype))


def bitwise(n: TorchNode, e: Emitter, fn: str, of_bools: str) -> Value:
    """Bit by bit on integers; the logical operator on bools."""
    dtype = n.type.dtype
    operands = [n.args[name] for name in ("self", "other") if name in n.args]
    return mapped(e, of_bools if dtype == bool_ else fn, *operands, dtype=dtype)


def divide(n: TorchNode, e: Emitter) -> Value:
    """True division, or rounded down or towards zero as `rounding_mode` says."""
    mode, dtype = n.args.get("rounding_mode"), n.type.dtype
    x, y = n.args["self"], n.args["other"]
    if mode is None or dtype.is_float:
        quotient = mapped(e, "div", x, y, dtype=dtype)
        rounding = {None: "", "floor": "floor", "trunc": "trunc"}[mode]
        return e.map(rounding, quotient) if rounding else quotient
    if mode == "trunc":
        return mapped(e, "div", x, y, dtype=dtype)
    return floored(e, dtype, x, y)


def floored(e: Emitter, dtype: DType, x: Any, y: Any) -> Value:
    """x / y of integers, rounded down: what is left of x without its remainder divides exactly."""
    rest = mapped(e, "mod", x, y, dtype=dtype)
    return mapped(e, "div", mapped(e, "sub", x, rest, dtype=dtype), y, dtype=dtype)


def floor_divide(n: TorchNode, e: Emitter) -> Value:
    dtype, x, y = n.type.dtype, n.args["self"], n.args["other"]
    if dtype.is_float:
        return e.map("floor", mapped(e, "div", x, y, dtype=dtype))
    return floored(e, dtype, x, y)


def power(n: TorchNode, e: Emitter) -> Value:
    """self ** exponent; a square and a root are what torch calls then."""
    x, y, dtype = n.args["self"], n.args["exponent"], n.type.dtype
    if isinstance(x, Value) and dtype.is_float:
        if y == 2:
            x = cast(e, x, dtype)
            return e.map("mul", x, x)
        if y == 0.5:
            return mapped(e, "sqrt", x, dtype=dtype)
        if y == -0.5:
            return mapped(e, "rsqrt", x, dtype=dtype)
    return mapped(e, "pow", x, y, dtype=dtype)


def clamp(n: TorchNode, e: Emitter) -> Value:
    x, dtype = n["self"], n.type.dtype
    low, high = n.args.get("min"), n.args.get("max")
    if low is not None and high is not None and isinstance(low, Value) == isinstance(high, Value):
        return mapped(e, "clip", x, low, high, dtype=dtype)
    y = cast(e, x, dtype)
    if low is not None:
        y = mapped(e, "max", y, low, dtype=dtype)
    return y if high is None else mapped(e, "min", y, high, dtype=dtype)


def where(n: TorchNode, e: Emitter) -> Value:
    """self where the condition holds, else other."""
    dtype = n.type.dtype
    branches = [n.args[name] for name in ("self", "other")]
    operands = (
        cast(e, v, dtype) if isinstance(v, Value) else constant(e, v, dtype) for v in branches
    )
    return e.map("where", truth(e, n["condition"]), *operands)


def masked_fill(n: TorchNode, e: Emitter) -> Value:
    """value where the mask holds, else self."""
    x, value = n["self"], n.args["value"]
    dtype = x.type.dtype
    number = cast(e, value, dtype) if isinstance(value, Value) else None
    if number is None:
        number = constant(e, value, dtype)
    return e.map("where", n["mask"], number, x)


def gelu(n: TorchNode, e: Emitter) -> Value:
    fns = {"none": "gelu", "tanh": "gelu_tanh"}
    return e.map(fns[n.args["approximate"]], n["self"])


def hardtanh(n: TorchNode, e: Emitter) -> Value:
    return mapped(e, "clip", n["self"], n.args["min_val"], n.args["max_val"], dtype=n.type.dtype)


def relu6(n: TorchNode, e: Emitter) -> Value:
    return mapped(e, "clip", n["self"], 0, 6, dtype=n.type.dtype)


def leaky_relu(n: TorchNode, e: Emitter) -> Value:
    return mapped(e, "leaky_relu", n["self"], n.args["negative_slope"], dtype=n.type.dtype)


def prelu(n: TorchNode, e: Emitter) -> Value:
    """One slope, or one a channel: axis 1."""
    x, slope = n["self"], n["weight"]
    if x.type.rank > 1:
        slope = e(t.Reshape(slope, (slope.type.size, *(1,) * (x.type.rank - 2))))
    elif slope.type.rank > x.type.rank:
        slope = e(t.Reshape(slope, ()))
    return e.map("leaky_relu", x, slope)


def elu(n: TorchNode, e: Emitter) -> Value:
    """scale * (x, or alpha * (exp(input_scale * x) - 1) below zero)."""
    alpha, scale, inner = (float(n.args[a]) for a in ("alpha", "scale", "input_scale"))
    x, dtype = n["self"], n.type.dtype
    if inner == 1:
        y = mapped(e, "elu", x, alpha, dtype=dtype)
    else:
        below = mapped(e, "expm1", mapped(e, "mul", x, inner, dtype=dtype), dtype=dtype)
        below = mapped(e, "mul", below, alpha, dtype=dtype)
        y = e.map("where", mapped(e, "gt", x, 0, dtype=dtype), x, below)
    return y if scale == 1 else mapped(e, "mul", y, scale, dtype=dtype)


def hardsigmoid(n: TorchNode, e: Emitter) -> Value:
    """clip(x / 6 + 1/2, 0, 1)."""
    return mapped(e, "hard_sigmoid", n["self"], 1 / 6, 0.5, dtype=n.type.dtype)


def softplus(n: TorchNode, e: Emitter) -> Value:
    """log(1 + exp(beta x)) / beta; x itself where beta x exceeds the threshold."""
    beta, x, dtype = float(n.args["beta"]), n["self"], n.type.dtype
    inner = x if beta == 1 else mapped(e, "mul", x, beta, dtype=dtype)
    y = e.map("softplus", inner)
    y = y if beta == 1 else mapped(e, "div", y, beta, dtype=dtype)
    large = mapped(e, "gt", inner, n.args["threshold"], dtype=dtype)
    return e.map("where", large, x, y)


def nan_less(n: TorchNode, e: Emitter, fn: str) -> Value:
    """fmax, fmin: the other number where one is NaN."""
    dtype = n.type.dtype
    a, b = (cast(e, n[name], dtype) for name in ("self", "other"))
    found = e.map(fn, a, b)
    if not dtype.is_float:
        return found
    found = e.map("where", e.map("isnan", b), a, found)
    return e.map("where", e.map("isnan", a), b, found)


def less_from_one(n: TorchNode, e: Emitter, fn: str) -> Value:
    """1 - fn(self): erfc."""
    return mapped(e, "sub", 1, mapped(e, fn, n["self"], dtype=n.type.dtype), dtype=n.type.dtype)


def power_of_two(n: TorchNode, e: Emitter) -> Value:
    dtype = n.type.dtype
    return mapped(e, "exp", mapped(e, "mul", n["self"], math.log(2), dtype=dtype), dtype=dtype)


def log_to(n: TorchNode, e: Emitter, base: float) -> Value:
    """The logarithm to another base."""
    y = mapped(e, "log", n["self"], dtype=n.type.dtype)
    return mapped(e, "mul", y, 1 / math.log(base), dtype=n.type.dtype)


def round_(n: TorchNode, e: Emitter) -> Value:
    """To the nearest even; to so many decimals."""
    x, decimals, dtype = n["self"], n.args.get("decimals", 0), n.type.dtype
    if not dtype.is_float:
        return x
    if not decimals:
        return e.map("round", x)
    power = 10.0**decimals
    y = e.map("round", mapped(e, "mul", x, power, dtype=dtype))
    return mapped(e, "div", y, power, dtype=dtype)


def whole(n: TorchNode, e: Emitter, fn: str) -> Value:
    """Rounding, which leaves integers as they are."""
    return e.map(fn, n["self"]) if n.type.dtype.is_float else n["self"]


def number_test(n: TorchNode, e: Emitter, fn: str) -> Value:
    """A test of floats, which no integer passes."""
    x = n["self"]
    if x.type.dtype.is_float:
        return e.map(fn, x)
    return e.fill(False, TensorType(x.type.shape, bool_))


def addcmul(n: TorchNode, e: Emitter) -> Value:
    return added(n, e, "mul")


def addcdiv(n: TorchNode, e: Emitter) -> Value:
    return added(n, e, "div")


def added(n: TorchNode, e: Emitter, fn: str) -> Value:
    """self + value * fn(tensor1, tensor2)."""
    dtype = n.type.dtype
    y = scaled(n, e, mapped(e, fn, n["tensor1"], n["tensor2"], dtype=dtype), "value")
    return mapped(e, "add", n["self"], y, dtype=dtype)


def lerp(n: TorchNode, e: Emitter) -> Value:
    """self + weight * (end - self)."""
    dtype = n.type.dtype
    apart = mapped(e, "sub", n["end"], n["self"], dtype=dtype)
    apart = mapped(e, "mul", apart, n.args["weight"], dtype=dtype)
    return mapped(e, "add", n["self"], apart, dtype=dtype)


# ---------------------------------------------------------------------------- casts, copies


def to_type(n: TorchNode, e: Emitter) -> Value:
    """The result's dtype is all that tells."""
    x = n["self"]
    if x.type.dtype.kind == "complex" and n.type.dtype.kind != "complex":
        x = pick(e, e(t.Parts(x)), x.type.rank, 0)  # the real part alone
    return in_format(n, e, cast(e, x, n.type.dtype))


def copied(n: TorchNode, e: Emitter) -> Value:
    """The same numbers in memory of their own; lying as they did where the call asks for nothing
    else. What has no gaps is then taken for itself: traces have such copies that no run makes, of
    dropout by nothing. What the backward pass alone reads is copied: autograd keeps so what an
    operator in place writes over (SiLU's operand; torch/csrc/autograd, VariableType)."""
    if n.saved:
        return e.map("copy", n["self"])
    if n.args["memory_format"] not in (None, torch.preserve_format):
        return in_format(n, e, n["self"])
    x = n.fakes.get("self")
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    whole = isinstance(x, torch.Tensor) and (
        x.is_contiguous()
        or (x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()]))
    )
    return n["self"] if whole else e.map("identity", n["self"])


def contiguous(n: TorchNode, e: Emitter) -> Value:
    """Copied where they do not lie so."""
    return in_format(n, e, n["self"])


def in_format(n: TorchNode, e: Emitter, x: Value) -> Value:
    """x in the memory format that the call asks for, if any; a schema's default is a number."""
    match n.args.get("memory_format"):
        case torch.channels_last | torch.channels_last_3d:
            order = channels_last(x.type.rank)
            return x if order is None else e(t.Ordered(x, order))
        case torch.contiguous_format | 0:
            return e.map("identity", x)
        case _:
            return x


def unchanged(n: TorchNode, e: Emitter) -> Value:
    return n["self"]


def copy(n: TorchNode, e: Emitter) -> Value:
    """src in the shape and dtype of self."""
    y = cast(e, n["src"], n.type.dtype)
    return widened(e, y, n.type.shape)


def viewed_as(n: TorchNode, e: Emitter) -> Value:
    """The same bits under another dtype of equal width."""
    return e(t.Bitcast(n["self"], dtype_of(n.args["dtype"])))


SAME = (
    *("neg", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "erf"),
    *("lgamma", "erfinv", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("asinh", "acosh", "atanh", "sigmoid", "relu", "silu", "mish", "sign"),
)

CONVERTERS: dict[str, Converter] = each_named(
    {
        "fix": partial(whole, fn="trunc"),
        "round": round_,
        "hardswish": partial(unary, fn="hard_swish"),
        "log2": partial(log_to, base=2),
        "exp2": power_of_two,
        "erfc special_erfc": partial(less_from_one, fn="erf"),
        "signbit": sign_bit,
        "digamma": digamma,
        "fmax": partial(nan_less, fn="max"),
        "fmin": partial(nan_less, fn="min"),
        "log10": partial(log_to, base=10),
        "add": partial(with_alpha, fn="add"),
        "sub": partial(with_alpha, fn="sub"),
        "rsub": reverse_subtract,
        "mul": partial(binary, fn="mul"),
        "div true_divide": divide,
        "floor_divide": floor_divide,
        "remainder": partial(binary, fn="mod"),
        "fmod": partial(binary, fn="fmod"),
        "maximum": partial(binary, fn="max"),
        "minimum": partial(binary, fn="min"),
        "pow": power,
        "logical_and": partial(logical, fn="and"),
        "logical_or": partial(logical, fn="or"),
        "logical_xor": partial(logical, fn="xor"),
        "logical_not": partial(logical, fn="not"),
        "bitwise_and": partial(bitwise, fn="bit_and", of_bools="and"),
        "bitwise_or": partial(bitwise, fn="bit_or", of_bools="or"),
        "bitwise_xor": partial(bitwise, fn="bit_xor", of_bools="xor"),
        "bitwise_not": partial(bitwise, fn="bit_not", of_bools="not"),
        "bitwise_left_shift __lshift__": partial(binary, fn="shift_left"),
        "bitwise_right_shift __rshift__": partial(binary, fn="shift_right"),
        "isnan": partial(number_test, fn="isnan"),
        "isinf": partial(number_test, fn="isinf"),
        "clamp clamp_min clamp_max": clamp,
        "masked_fill": masked_fill,
        "gelu": gelu,
        "hardtanh": hardtanh,
        "relu6": relu6,
        "leaky_relu": leaky_relu,
        "prelu _prelu_kernel": prelu,
        "elu": elu,
        "hardsigmoid": hardsigmoid,
        "softplus": softplus,
        "addcmul": addcmul,
        "addcdiv": addcdiv,
        "lerp": lerp,
        "_to_copy to type_as": to_type,
        "clone": copied,
        "contiguous": contiguous,
        "copy copy_.default": copy,
        "view.dtype": viewed_as,
        "alias detach detach_ lift_fresh_copy lift_fresh lift positive resolve_conj": unchanged,
        "resolve_neg": unchanged,
        **{name: partial(unary, fn=name) for name in SAME},
        **{name: partial(whole, fn=name) for name in ("ceil", "floor", "trunc")},
        **{
            name: partial(binary, fn=name)
            for name in ("hypot", "atan2", "copysign", "nextafter", "gcd")
        },
        **{name: partial(comparison, fn=name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
        **{f"where.{o}": where for o in ("self", "Scalar", "ScalarSelf", "ScalarOther")},
    }
)
