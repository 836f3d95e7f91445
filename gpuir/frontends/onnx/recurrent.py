"""RNN, GRU and LSTM of ai.onnx."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import joined, part, pick, transposed
from gpuir.frontends.onnx.node import Converter, OnnxNode, Results
from gpuir.frontends.recurrence import (
    Activation,
    Cell,
    Direction,
    RecurrentWeights,
    columns,
    gru_cell,
    lstm_cell,
    rnn_cell,
)
from gpuir.ir.errors import nearest
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, i64
from gpuir.ops import tensor as t

# alpha and beta where the model gives none; an activation takes only those it has
DEFAULTS: dict[str, tuple[float, ...]] = {
    "relu": (),
    "tanh": (),
    "sigmoid": (),
    "softsign": (),
    "softplus": (),
    "affine": (1.0, 0.0),
    "leakyrelu": (0.01,),
    "thresholdedrelu": (1.0,),
    "scaledtanh": (1.0, 1.0),
    "hardsigmoid": (0.2, 0.5),
    "elu": (1.0,),
}


def activation(name: str, given: tuple[float, ...], clip: float | None) -> Activation:
    """What `name` does to a value, clipped first where the model says so."""

    def affine(x: Value, factor: float, plus: float, e: Emitter) -> Value:
        x = e.map("mul", x, factor) if factor != 1 else x
        return e.map("add", x, plus) if plus != 0 else x

    def apply(x: Value, e: Emitter) -> Value:
        if clip is not None:
            x = e.map("clip", x, -clip, clip)
        match name:
            case "relu" | "tanh" | "sigmoid" | "softplus":
                return e.map(name, x)
            case "softsign":
                below = e.map("add", e.map("abs", x), 1.0)
                return e.map("div", x, below)
            case "affine":
                return affine(x, given[0], given[1], e)
            case "scaledtanh":
                inner = e.map("tanh", affine(x, given[1], 0, e))
                return affine(inner, given[0], 0, e)
            case "leakyrelu":
                return e.map("leaky_relu", x, *given)
            case "elu":
                return e.map("elu", x, *given)
            case "hardsigmoid":
                return e.map("hard_sigmoid", x, *given)
            case _:  # thresholdedrelu
                zero = e.constant(0, x.type.dtype)
                return e.map("where", e.map("ge", x, *given), x, zero)

    return apply


def activations(n: OnnxNode, default: tuple[str, ...], directions: int) -> list[list[Activation]]:
    """The functions of each direction. alphas and betas are given out in order, each to the next
    activation that has one. What LSTM's h reads is not clipped: onnxruntime's reading of `clip`."""
    named = [str(name).lower() for name in n.attr("activations") or default * directions]
    if len(named) != len(default) * directions:
        raise n.refused(
            "the number of activations is wrong", len(default) * directions, ", ".join(named)
        )
    alphas: Iterator[float] = iter(n.attr("activation_alpha") or ())
    betas: Iterator[float] = iter(n.attr("activation_beta") or ())
    functions: list[Activation] = []
    for name in named:
        if name not in DEFAULTS:
            raise n.refused(f"the activation {name!r} is unknown", fix=nearest(name, DEFAULTS))
        given = tuple(
            float(next(source, default))
            for source, default in zip((alphas, betas), DEFAULTS[name], strict=False)
        )
        clip = None if len(functions) % len(default) == 2 else n.attr("clip")
        functions.append(activation(name, given, clip))
    width = len(default)
    return [functions[i : i + width] for i in range(0, len(functions), width)]


def weights(n: OnnxNode, direction: int, e: Emitter, reset_last: bool) -> RecurrentWeights:
    """Everything but the recurrence is done for all time steps at once: X W + b, steps first."""
    w, r = (pick(e, n[i], 0, direction) for i in (1, 2))
    gates = e(t.Matmul(n[0], transposed(e, w, (1, 0))))
    width, hidden = r.type.shape
    waits: Value | None = None
    bias = n.get(3)
    if bias is not None:
        both = pick(e, bias, 0, direction)
        ours, theirs = (columns(e, both, i, width) for i in (0, 1))
        waits = theirs if reset_last else None
        bias = ours if reset_last else e.map("add", ours, theirs)
        gates = e.map("add", gates, bias)
    if n.attr("layout", 0):
        gates = e(t.Transpose(gates, (1, 0, 2)))
    cut = (r,)
    if n.op == "GRU" and not reset_last:
        cut = tuple(part(e, r, 0, i * hidden, m * hidden) for i, m in CUTS)
    peepholes: tuple[Value, ...] = ()
    if n.op == "LSTM" and (given := n.get(7)) is not None:
        row = pick(e, given, 0, direction)
        peepholes = tuple(columns(e, row, i, hidden) for i in range(3))
    return RecurrentWeights(gates, cut, waits, peepholes)


CUTS = ((0, 2), (2, 1))  # gates that a GRU's products make, from which on and how many


def check(n: OnnxNode, gates: int, directions: int) -> None:
    """Shapes a later error would not explain."""
    x, w, r = n[0].type, n[1].type, n[2].type
    hidden = r.shape[-1] if r.rank else 0
    expected = (directions, gates * hidden)
    fits = (
        x.rank == w.rank == r.rank == 3
        and w.shape == (*expected, x.shape[-1])
        and r.shape == (*expected, hidden)
    )
    if not fits:
        raise n.refused(
            "the shapes of X, W and R do not match",
            f"X with three axes, W [{directions}, {gates} * hidden, inputs] and R "
            f"[{directions}, {gates} * hidden, hidden]",
            f"X: {x}, W: {w}, R: {r}",
        )
    if (given := n.attr("hidden_size", hidden)) != hidden:
        raise n.refused("hidden_size is not that of R", hidden, given)


def convert(
    n: OnnxNode, e: Emitter, cell: Cell, gates: int, default: tuple[str, ...], states: int
) -> Results:
    way = str(n.attr("direction", "forward")).lower()
    if way not in ("forward", "reverse", "bidirectional"):
        raise n.refused("direction is unknown", "forward, reverse or bidirectional", way)
    directions = 2 if way == "bidirectional" else 1
    check(n, gates, directions)
    time = 1 if n.attr("layout", 0) else 0  # the axis of X's steps, and of the states' directions
    batch, hidden = n[0].type.shape[1 - time], n[2].type.shape[-1]
    zero = e.fill(0, TensorType((batch, hidden), n[0].type.dtype))
    known = n.known(4)
    whole = known is not None and np.all(known >= n[0].type.shape[time])
    lengths = None if whole else column_of(e, n.get(4), batch)
    functions = activations(n, default, directions)
    reset_last = bool(n.attr("linear_before_reset", 0))

    def of(d: int) -> Way:
        given = (n.get(5 + i) for i in range(states))
        init = tuple(zero if v is None else pick(e, v, time, d) for v in given)
        return cell, weights(n, d, e, reset_last), init

    return in_directions(n, e, of, functions, lengths)


def column_of(e: Emitter, lengths: Value | None, batch: int) -> Value | None:
    """Where sequences end, as loops read it: [B, 1]."""
    if lengths is None:
        return None
    return e(t.Reshape(e(t.Cast(lengths, i64)), (batch, 1)))


Way = tuple[
    Cell, RecurrentWeights, tuple[Value, ...]
]  # through time: with the states that it starts from


def in_directions(
    n: OnnxNode,
    e: Emitter,
    of: Callable[[int], Way],
    functions: Sequence[list[Activation]],
    lengths: Value | None,
) -> Results:
    """The results of an operator that goes through time one way or both, the i-th as `of` says."""
    ends: list[tuple[Value, ...]] = []
    shown: list[Value] = []
    for d, own in enumerate(functions):
        cell, w, init = of(d)
        reverse = d == 1 or str(n.attr("direction", "forward")).lower() == "reverse"
        direction = Direction(cell, own, w, init, lengths=lengths, reverse=reverse)
        name = f"{n.name}.{'reverse' if reverse else 'forward'}"
        end, ys = direction.run(name, n.has_output(0), e)
        ends.append(end)
        if ys is not None:
            steps, *rest = ys.type.shape
            shown.append(e(t.Reshape(ys, (steps, 1, *rest))))
    batch_first = bool(n.attr("layout", 0))
    y = joined(e, shown, 1) if n.has_output(0) else None
    results = [transposed(e, y, (2, 0, 1, 3)) if y is not None and batch_first else y]
    for i, state in enumerate(ends[0]):
        batch, hidden = state.type.shape
        shape = (batch, 1, hidden) if batch_first else (1, batch, hidden)
        each = [e(t.Reshape(end[i], shape)) for end in ends] if n.has_output(1 + i) else []
        results.append(joined(e, each, int(batch_first)) if each else None)
    return tuple(results)


def rnn(n: OnnxNode, e: Emitter) -> Results:
    return convert(n, e, rnn_cell, gates=1, default=("tanh",), states=1)


def gru(n: OnnxNode, e: Emitter) -> Results:
    cell = gru_cell(bool(n.attr("linear_before_reset", 0)))
    return convert(n, e, cell, gates=3, default=("sigmoid", "tanh"), states=1)


def lstm(n: OnnxNode, e: Emitter) -> Results:
    cell = lstm_cell(bool(n.attr("input_forget", 0)))
    return convert(n, e, cell, gates=4, default=("sigmoid", "tanh", "tanh"), states=2)


CONVERTERS: dict[str, Converter] = {"RNN": rnn, "GRU": gru, "LSTM": lstm}
