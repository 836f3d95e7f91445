"""What the routine `multi_tensor` computes: one function on lists of tensors, in one launch."""

# numpy's stubs leave many types partly unknown
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gpuir.interp.arrays import Array, wide


def multi_tensor(attrs: Mapping[str, Any], *tensors: Array) -> tuple[Array, ...]:
    """fn(numbers, a[i], b[i], ...) for each i, where the operands are all of a, then all of b ...
    Results are all of the first result, then all of the second ..., in the dtypes of a, b ..."""
    if attrs["fn"] == "squares":
        return _squares(attrs["numbers"], tensors)
    fn, count = FUNCTIONS[attrs["fn"]], len(tensors) // attrs["lists"]
    rows = [tensors[i::count] for i in range(count)]
    found = [fn(attrs["numbers"], *map(wide, row)) for row in rows]
    return tuple(
        np.asarray(made).astype(given.dtype)
        for j in range(len(found[0]))
        for made, given in zip((f[j] for f in found), tensors[j * count :], strict=False)
    )


def _squares(shares: tuple[float, ...], tensors: Sequence[Array]) -> tuple[Array, ...]:
    """The sum of the squares of each tensor's cells, in 32 bits or more: of each its share, where
    several ranks have the same and add up what they have."""
    dtype = np.result_type(np.float32, *{wide(x).dtype for x in tensors})
    sums = (np.square(x.astype(dtype)).sum().reshape(1) for x in tensors)
    return tuple(
        x * dtype.type(n) for x, n in zip(sums, shares or (1,) * len(tensors), strict=True)
    )


def _sgd(n: tuple[float, ...], w: Array, g: Array, *m: Array) -> tuple[Array, ...]:
    """torch.optim.SGD: w, and the momentum's buffer where there is one."""
    lr, momentum, weight_decay, nesterov, scale = n
    g = g / w.dtype.type(scale) + weight_decay * w
    if not m:
        return (w - lr * g,)
    buffer = momentum * m[0] + g
    return w - lr * (g + momentum * buffer if nesterov else buffer), buffer


def _adam(
    n: tuple[float, ...], w: Array, g: Array, m: Array, v: Array
) -> tuple[Array, Array, Array]:
    """torch.optim.Adam, and AdamW where weight decay is decoupled."""
    lr, beta1, beta2, eps, weight_decay, decoupled, step, scale = n
    g = g / w.dtype.type(scale)
    if decoupled:
        w = w * (1 - lr * weight_decay)
    else:
        g = g + weight_decay * w
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    deviation = np.sqrt(v) / (1 - beta2**step) ** 0.5 + eps
    return w - lr / (1 - beta1**step) * m / deviation, m, v


# The first list is what is changed; names are those of torch._foreach_*.
FUNCTIONS: dict[str, Callable[..., tuple[Array, ...]]] = {
    "sgd": _sgd,
    "adam": _adam,
    "add": lambda n, a, b: (a + n[0] * b,),
    "add_number": lambda n, a: (a + n[0],),
    "mul": lambda n, a: (a * n[0],),
    "div": lambda n, a: (a / n[0],),
    "times": lambda n, a, b: (a * b.astype(a.dtype),),
    "sqrt": lambda n, a: (np.sqrt(a),),
    "lerp": lambda n, a, b: (a + n[0] * (b - a),),
    "addcmul": lambda n, a, b, c: (a + n[0] * b * c,),
    "addcdiv": lambda n, a, b, c: (a + n[0] * b / c,),
}
