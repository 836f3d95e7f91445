"""Elementwise operators, casts, activations, comparisons, logic and random numbers."""

from __future__ import annotations

from functools import partial, reduce
from math import isfinite

from gpuir.frontends.emit import Emitter, UnknownValue
from gpuir.frontends.idioms import drawn, dropped
from gpuir.frontends.onnx.node import Converter, OnnxNode, Results
from gpuir.ir.graph import Value
from gpuir.ir.types import DType, TensorType, bool_, f32, i32
from gpuir.ops import tensor as t


def elementwise(n: OnnxNode, e: Emitter, fn: str) -> Value:
    """An operator that is the scalar function `fn` of all its operands."""
    return e.map(fn, *(n[i] for i in range(len(n.inputs))))


def with_settings(n: OnnxNode, e: Emitter, fn: str, **defaults: float) -> Value:
    """A scalar function of one operand whose further arguments are attributes."""
    return e.map(fn, n[0], *(float(n.attr(name, default)) for name, default in defaults.items()))


def variadic(n: OnnxNode, e: Emitter, fn: str) -> Value:
    """`fn` folded over any number of operands."""
    operands = [n[0], *(n[i] for i in range(1, len(n.inputs)))]
    return reduce(lambda a, b: e.map(fn, a, b), operands)


def mean(n: OnnxNode, e: Emitter) -> Value:
    total = variadic(n, e, fn="add")
    assert isinstance(total, Value)
    return e.map("div", total, len(n.inputs))


def identity(n: OnnxNode, e: Emitter) -> Value:
    return n[0]


# ---------------------------------------------------------------------------- arithmetic


def mod(n: OnnxNode, e: Emitter) -> Value:
    return e.map("fmod" if n.attr("fmod", 0) else "mod", n[0], n[1])


def power(n: OnnxNode, e: Emitter) -> Value:
    """The result has the base's dtype; an exponent of another is brought to it, or for an integer
    base and a fractional exponent the base to the exponent's."""
    base, exponent = n[0], n[1]
    dtype, other = base.type.dtype, exponent.type.dtype
    if other == dtype:
        return e.map("pow", base, exponent)
    if dtype.is_float or other.is_integer:
        return e.map("pow", base, e(t.Cast(exponent, dtype)))
    known = n.known(1) if exponent.type.size == 1 else None
    if known is not None and float(known.item()).is_integer() and known.item() >= 0:
        return e.map("pow", base, e(t.Cast(exponent, dtype)))
    return e(t.Cast(e.map("pow", e(t.Cast(base, other)), exponent), dtype))


def bit_shift(n: OnnxNode, e: Emitter) -> Value:
    direction = n.choice("direction", "", ("LEFT", "RIGHT"))
    return e.map(f"shift_{direction.lower()}", n[0], n[1])


def clip(n: OnnxNode, e: Emitter) -> Value:
    """Bounds are attributes before opset 11, optional operands since."""
    x = n[0]
    if n.version < 11:
        bounds = (n.attrs.get("min"), n.attrs.get("max"))
        low, high = (None if b is None else e.constant(b, x.type.dtype) for b in bounds)
    else:
        low, high = n.get(1), n.get(2)
    if low is not None and high is not None:
        return e.map("clip", x, low, high)
    if low is not None:
        return e.map("max", x, low)
    return x if high is None else e.map("min", x, high)


# ---------------------------------------------------------------------------- activations


def prelu(n: OnnxNode, e: Emitter) -> Value:
    """The slope broadcasts to x, never x to the slope."""
    x, slope = n[0], n[1]
    if t.broadcast(x.type.shape, slope.type.shape) != x.type.shape:
        raise n.refused("the shape of the slope does not broadcast to x", x.type, slope.type)
    return e.map("leaky_relu", x, slope)


def selu(n: OnnxNode, e: Emitter) -> Value:
    """gamma * elu(x, alpha); the constants of Klambauer et al., Self-normalizing neural networks,
    NeurIPS 2017."""
    alpha = n.attr("alpha", 1.67326319217681884765625)
    gamma = n.attr("gamma", 1.05070102214813232421875)
    return e.map("mul", e.map("elu", n[0], alpha), gamma)


def celu(n: OnnxNode, e: Emitter) -> Value:
    """alpha * elu(x / alpha, 1)."""
    alpha = n.attr("alpha", 1.0)
    if alpha == 1:
        return e.map("elu", n[0], 1.0)
    inner = e.map("elu", e.map("div", n[0], alpha), 1.0)
    return e.map("mul", inner, alpha)


def softsign(n: OnnxNode, e: Emitter) -> Value:
    """x / (1 + |x|)."""
    below = e.map("add", e.map("abs", n[0]), 1)
    return e.map("div", n[0], below)


def thresholded_relu(n: OnnxNode, e: Emitter) -> Value:
    """x where it exceeds alpha, else 0."""
    x = n[0]
    above = e.map("gt", x, n.attr("alpha", 1.0))
    return e.map("where", above, x, e.constant(0, x.type.dtype))


def shrink(n: OnnxNode, e: Emitter) -> Value:
    """x - sign(x) * bias where |x| > lambd, else 0."""
    x, bias = n[0], n.attr("bias", 0.0)
    outside = e.map("gt", e.map("abs", x), n.attr("lambd", 0.5))
    shrunk = x
    if bias:
        toward = e.map("mul", e.map("sign", x), bias)
        shrunk = e.map("sub", x, toward)
    return e.map("where", outside, shrunk, e.constant(0, x.type.dtype))


def gelu(n: OnnxNode, e: Emitter) -> Value:
    fns = {"none": "gelu", "tanh": "gelu_tanh"}
    return e.map(fns[n.choice("approximate", "none", fns)], n[0])


def swish(n: OnnxNode, e: Emitter, alpha: float = 1.0) -> Value:
    """x * sigmoid(alpha * x)."""
    x, alpha = n[0], float(n.attr("alpha", alpha))
    if alpha == 1:
        return e.map("silu", x)
    return e.map("mul", x, e.map("sigmoid", e.map("mul", x, alpha)))


def swiglu(n: OnnxNode, e: Emitter) -> Value:
    """swish(a) * b."""
    return e.map("mul", swish(n, e), n[1])


# ---------------------------------------------------------------------------- tests


def is_inf(n: OnnxNode, e: Emitter) -> Value:
    """Either sign, or the one asked for."""
    positive, negative = bool(n.attr("detect_positive", 1)), bool(n.attr("detect_negative", 1))
    if positive and negative:
        return e.map("isinf", n[0])
    if not positive and not negative:
        return e.fill(False, TensorType(n[0].type.shape, bool_))
    return e.map("eq", n[0], float("inf") if positive else float("-inf"))


# ---------------------------------------------------------------------------- casts


def cast_to(n: OnnxNode, e: Emitter, dtype: DType) -> Value:
    if n[0].type.dtype == dtype:
        return n[0]
    saturate = bool(n.attr("saturate", 1))
    return e(t.Cast(n[0], dtype, saturate, n.attr("round_mode", "up")))


def cast(n: OnnxNode, e: Emitter) -> Value:
    return cast_to(n, e, n.dtype("to"))


def cast_like(n: OnnxNode, e: Emitter) -> Value:
    """Only the dtype of the second operand matters."""
    return cast_to(n, e, n[1].type.dtype)


def bit_cast(n: OnnxNode, e: Emitter) -> Value:
    dtype = n.dtype("to")
    return n[0] if n[0].type.dtype == dtype else e(t.Bitcast(n[0], dtype))


# ---------------------------------------------------------------------------- random


def random(
    n: OnnxNode, e: Emitter, kind: str, type: TensorType, *args: Value, **how: float
) -> Value:
    """Drawn with the model's own seed, else 0."""
    seed = n.attr("seed", 0.0)
    if not isfinite(seed):
        raise n.refused("the seed must be a finite number", found=seed)
    return drawn(e, kind, type, *args, seed=int(seed), **how)


def _setting(n: OnnxNode, i: int, what: str, default: float) -> float:
    """A scalar operand that the work depends on; `default` where it is absent."""
    if n.get(i) is None:
        return default
    known = n.known(i)
    if known is None:
        raise UnknownValue(n[i], f"{n.op}: gpuir must know the value of {what}")
    return known.item()


def dropout(n: OnnxNode, e: Emitter) -> Results:
    """The operand itself in inference, with a mask of ones; in training (opset 12 on) cells are
    dropped at random and the rest scaled by 1 / (1 - ratio)."""
    x, ratio, training = n[0], n.attr("ratio", 0.5), False
    if n.version >= 12:
        training = _setting(n, 2, "training_mode", False)
        ratio = _setting(n, 1, "its ratio", 0.5) if training else 0.0
    mask_type = TensorType(x.type.shape, bool_ if n.version >= 10 else x.type.dtype)
    if not training or ratio == 0:
        return x, e.fill(1, mask_type, "mask") if n.has_output(1) else None
    mask = random(n, e, "keep", mask_type, ratio=ratio)
    return dropped(e, x, mask, ratio), mask


def drawn_type(n: OnnxNode, like: Value | None) -> TensorType:
    """The result's type: shape and dtype attributes, or those of `like` where they are absent."""
    shape = tuple(n.attr("shape", ())) if like is None else like.type.shape
    return TensorType(shape, n.dtype("dtype", f32 if like is None else like.type.dtype))


def random_normal(n: OnnxNode, e: Emitter) -> Value:
    settings = {"mean": n.attr("mean", 0.0), "scale": n.attr("scale", 1.0)}
    return random(n, e, "normal", drawn_type(n, n.get(0)), **settings)


def random_uniform(n: OnnxNode, e: Emitter) -> Value:
    settings = {"low": n.attr("low", 0.0), "high": n.attr("high", 1.0)}
    return random(n, e, "uniform", drawn_type(n, n.get(0)), **settings)


def bernoulli(n: OnnxNode, e: Emitter) -> Value:
    return random(n, e, "bernoulli", drawn_type(n, n[0]), n[0])


def multinomial(n: OnnxNode, e: Emitter) -> Value:
    """Class numbers drawn from the unnormalised log-probabilities of each row."""
    shape = (n[0].type.shape[0], n.attr("sample_size", 1))
    return random(n, e, "multinomial", TensorType(shape, n.dtype("dtype", i32)), n[0])


# ---------------------------------------------------------------------------- optimizers
# ai.onnx.preview.training: rate, step, then the X of all tensors, then their gradients, then each
# kind of state; results are the new X of all, then each kind of new state.


def _times(e: Emitter, x: Value, factor: float | Value) -> Value:
    if isinstance(factor, Value):
        return e.map("mul", x, factor)
    return e.map("mul", x, factor)


def _groups(n: OnnxNode, kinds: int) -> list[tuple[Value, ...]]:
    """The operands after rate and step, one tuple a tensor: itself, its gradient, its states."""
    count, rest = divmod(len(n.inputs) - 2, kinds)
    if rest:
        raise n.refused(f"the number of inputs is not a multiple of {kinds}")
    return [tuple(n[2 + kind * count + i] for kind in range(kinds)) for i in range(count)]


def _regularized(n: OnnxNode, e: Emitter, x: Value, gradient: Value) -> Value:
    """gradient + norm_coefficient * x."""
    norm = n.attr("norm_coefficient", 0.0)
    return e.map("add", gradient, _times(e, x, norm)) if norm else gradient


def _by_kind(rows: list[tuple[Value, ...]]) -> Results:
    return tuple(value for kind in zip(*rows, strict=True) for value in kind)


def momentum(n: OnnxNode, e: Emitter) -> Results:
    alpha, dtype = n.attr("alpha", 0.0), n[0].type.dtype
    later, one = e.constant(n.attr("beta", 0.0), dtype), e.constant(1, dtype)
    beta = e.map("where", e.map("gt", n[1], 0), later, one)
    rows: list[tuple[Value, ...]] = []
    for x, gradient, v in _groups(n, 3):
        g = _regularized(n, e, x, gradient)
        new_v = e.map("add", _times(e, v, alpha), _times(e, g, beta))
        if n.attr("mode", "standard") == "nesterov":
            g = e.map("add", g, _times(e, new_v, alpha))
        else:
            g = new_v
        rows.append((e.map("sub", x, _times(e, g, n[0])), new_v))
    return _by_kind(rows)


def adagrad(n: OnnxNode, e: Emitter) -> Results:
    decay = e.map("mul", e(t.Cast(n[1], f32)), n.attr("decay_factor", 0.0))
    rate = e.map("div", n[0], e.map("add", e(t.Cast(decay, n[0].type.dtype)), 1))
    rows: list[tuple[Value, ...]] = []
    for x, gradient, h in _groups(n, 3):
        g = _regularized(n, e, x, gradient)
        new_h = e.map("add", h, e.map("mul", g, g))
        below = e.map("add", e.map("sqrt", new_h), n.attr("epsilon", 1e-6))
        change = e.map("div", _times(e, g, rate), below)
        rows.append((e.map("sub", x, change), new_h))
    return _by_kind(rows)


def adam(n: OnnxNode, e: Emitter) -> Results:
    """Kingma, Ba: Adam, ICLR 2015. The correction of bias applies from the second step on."""
    alpha, beta = n.attr("alpha", 0.9), n.attr("beta", 0.999)
    dtype = n[0].type.dtype
    step = e(t.Cast(n[1], dtype))

    def remaining(decay: float) -> Value:
        """1 - decay ** step."""
        left = e.map("pow", e.constant(decay, dtype), step)
        return e.map("sub", e.constant(1, dtype), left)

    root = e.map("sqrt", remaining(beta))
    corrected = e.map("div", e.map("mul", n[0], root), remaining(alpha))
    is_later = e.map("gt", n[1], 0)
    rate = e.map("where", is_later, corrected, n[0])
    post = n.attr("norm_coefficient_post", 0.0)
    rows: list[tuple[Value, ...]] = []
    for x, gradient, v, h in _groups(n, 4):
        g = _regularized(n, e, x, gradient)
        squared = _times(e, e.map("mul", g, g), 1 - beta)
        new_v = e.map("add", _times(e, v, alpha), _times(e, g, 1 - alpha))
        new_h = e.map("add", _times(e, h, beta), squared)
        below = e.map("add", e.map("sqrt", new_h), n.attr("epsilon", 1e-6))
        change = e.map("div", _times(e, new_v, rate), below)
        new_x = e.map("sub", x, change)
        rows.append((_times(e, new_x, 1 - post) if post else new_x, new_v, new_h))
    return _by_kind(rows)


# ---------------------------------------------------------------------------- the table

SCALAR_OPERATORS = {
    **{name: name.lower() for name in ("Neg", "Abs", "Sign", "Ceil", "Floor", "Round", "Sqrt")},
    **{name: name.lower() for name in ("Reciprocal", "Exp", "Log", "Erf", "Sin", "Cos", "Tan")},
    **{name: name.lower() for name in ("Asin", "Acos", "Atan", "Sinh", "Cosh", "Tanh")},
    **{name: name.lower() for name in ("Asinh", "Acosh", "Atanh", "Relu", "Sigmoid", "Softplus")},
    **{name: name.lower() for name in ("Mish", "Add", "Sub", "Mul", "Div", "Where", "IsNaN")},
    **{name: name.lower() for name in ("And", "Or", "Xor", "Not")},
    **{f"Bitwise{name}": f"bit_{name.lower()}" for name in ("And", "Or", "Xor", "Not")},
    "Equal": "eq",
    "Less": "lt",
    "LessOrEqual": "le",
    "Greater": "gt",
    "GreaterOrEqual": "ge",
    "HardSwish": "hard_swish",
}

CONVERTERS: dict[str, Converter] = {
    **{name: partial(elementwise, fn=fn) for name, fn in SCALAR_OPERATORS.items()},
    "Sum": partial(variadic, fn="add"),
    "Max": partial(variadic, fn="max"),
    "Min": partial(variadic, fn="min"),
    "Mean": mean,
    "Identity": identity,
    "Mod": mod,
    "Pow": power,
    "BitShift": bit_shift,
    "Clip": clip,
    "LeakyRelu": partial(with_settings, fn="leaky_relu", alpha=0.01),
    "Elu": partial(with_settings, fn="elu", alpha=1.0),
    "HardSigmoid": partial(with_settings, fn="hard_sigmoid", alpha=0.2, beta=0.5),
    "PRelu": prelu,
    "Selu": selu,
    "Celu": celu,
    "Softsign": softsign,
    "ThresholdedRelu": thresholded_relu,
    "Shrink": shrink,
    "Gelu": gelu,
    "Swish": swish,
    "SwiGLU": swiglu,
    "IsInf": is_inf,
    "Cast": cast,
    "CastLike": cast_like,
    "BitCast": bit_cast,
    "Dropout": dropout,
    "RandomNormal": random_normal,
    "RandomNormalLike": random_normal,
    "RandomUniform": random_uniform,
    "RandomUniformLike": random_uniform,
    "Bernoulli": bernoulli,
    "Multinomial": multinomial,
    "ai.onnx.preview.training::Momentum": momentum,
    "ai.onnx.preview.training::Adagrad": adagrad,
    "ai.onnx.preview.training::Adam": adam,
}
