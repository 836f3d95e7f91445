"""RNN, GRU and LSTM: one product over all time steps, then a loop over them in each direction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import reshaped, transposed
from gpuir.frontends.onnx.node import Converter, OnnxNode
from gpuir.ir.errors import ModelError, nearest
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, i64
from gpuir.ops import tensor as t

Activation = Callable[[Value, Emitter], Value]

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
        x = e(t.Map("mul", (x,), (factor,))) if factor != 1 else x
        return e(t.Map("add", (x,), (plus,))) if plus != 0 else x

    def apply(x: Value, e: Emitter) -> Value:
        if clip is not None:
            x = e(t.Map("clip", (x,), (-clip, clip)))
        match name:
            case "relu" | "tanh" | "sigmoid" | "softplus":
                return e(t.Map(name, (x,)))
            case "softsign":
                below = e(t.Map("add", (e(t.Map("abs", (x,))),), (1.0,)))
                return e(t.Map("div", (x, below)))
            case "affine":
                return affine(x, given[0], given[1], e)
            case "scaledtanh":
                inner = e(t.Map("tanh", (affine(x, given[1], 0, e),)))
                return affine(inner, given[0], 0, e)
            case "leakyrelu":
                return e(t.Map("leaky_relu", (x,), given))
            case "elu":
                return e(t.Map("elu", (x,), given))
            case "hardsigmoid":
                return e(t.Map("hard_sigmoid", (x,), given))
            case _:  # thresholdedrelu
                zero = e.constant(0, x.type.dtype)
                return e(t.Map("where", (e(t.Map("ge", (x,), given)), x, zero)))

    return apply


def activations(n: OnnxNode, default: tuple[str, ...], directions: int) -> list[list[Activation]]:
    """The functions of each direction. alphas and betas are given out in order, each to the next
    activation that has one. What LSTM's h reads is not clipped: onnxruntime's reading of `clip`."""
    named = [str(name).lower() for name in n.attr("activations") or default * directions]
    if len(named) != len(default) * directions:
        raise ModelError(
            f"{n.op}: wrong number of activations",
            expected=str(len(default) * directions),
            found=", ".join(named),
        )
    alphas: Iterator[float] = iter(n.attr("activation_alpha") or ())
    betas: Iterator[float] = iter(n.attr("activation_beta") or ())
    functions: list[Activation] = []
    for name in named:
        if name not in DEFAULTS:
            raise ModelError(f"{n.op}: no activation {name!r}", fix=nearest(name, DEFAULTS))
        given = tuple(
            float(next(source, default))
            for source, default in zip((alphas, betas), DEFAULTS[name], strict=False)
        )
        clip = None if len(functions) % len(default) == 2 else n.attr("clip")
        functions.append(activation(name, given, clip))
    width = len(default)
    return [functions[i : i + width] for i in range(0, len(functions), width)]


@dataclass(frozen=True)
class Weights:
    """One direction's tensors as values of the graph around the loop. `gates` is what the inputs
    contribute to every gate at every time step, biases included."""

    gates: Value  # [T, B, G H], or [B, T, G H] in batch-first layout
    recurrent: tuple[Value, ...]  # [H, G H], cut where a product waits for a gate
    recurrent_bias: Value | None  # [H], only where it must wait for the reset gate
    peepholes: tuple[Value, ...]  # [H] for i, o, f; or none


# a cell maps the gates' input [B, G H] and the state to the new state, the hidden one first
Cell = Callable[[Weights, list[Activation], Value, tuple[Value, ...], Emitter], tuple[Value, ...]]


def part(x: Value, index: int, width: int, e: Emitter, count: int = 1) -> Value:
    """Columns index * width .. (index + count) * width of x."""
    lead = x.type.shape[:-1]
    zeros, ones = (0,) * len(lead), (1,) * len(lead)
    if index == 0 and x.type.shape[-1] == count * width:
        return x
    return e(t.Slice(x, (*zeros, index * width), (*lead, count * width), (*ones, 1)))


def rnn_cell(
    w: Weights, f: list[Activation], x: Value, state: tuple[Value, ...], e: Emitter
) -> tuple[Value, ...]:
    """H = f(x + H R)."""
    product = e(t.Matmul(state[0], w.recurrent[0]))
    return (f[0](e(t.Map("add", (x, product))), e),)


def lstm_cell(coupled: bool) -> Cell:
    def cell(
        w: Weights, f: list[Activation], x: Value, state: tuple[Value, ...], e: Emitter
    ) -> tuple[Value, ...]:
        """i, o, f, g from x + H R; C = f C + i g; H = o h(C). Peepholes add P C to i and f, and
        the new C to o; `input_forget` makes f = 1 - i.

        Hochreiter and Schmidhuber, Long Short-Term Memory, 1997; Gers and Schmidhuber, 2000.
        """
        hidden, memory = state
        width = hidden.type.shape[-1]
        gates = e(t.Map("add", (x, e(t.Matmul(hidden, w.recurrent[0])))))

        def gate(index: int, peephole: int | None, c: Value) -> Value:
            g = part(gates, index, width, e)
            if not w.peepholes or peephole is None:
                return g
            look = e(t.Map("mul", (c, w.peepholes[peephole])))
            return e(t.Map("add", (g, look)))

        enter = f[0](gate(0, 0, memory), e)
        if coupled:
            forget = e(t.Map("sub", (e.constant(1, enter.type.dtype), enter)))
        else:
            forget = f[0](gate(2, 2, memory), e)
        new = f[1](gate(3, None, memory), e)
        kept, added = e(t.Map("mul", (forget, memory))), e(t.Map("mul", (enter, new)))
        memory = e(t.Map("add", (kept, added)))
        leave = f[0](gate(1, 1, memory), e)
        return e(t.Map("mul", (leave, f[2](memory, e)))), memory

    return cell


def gru_cell(reset_last: bool) -> Cell:
    def cell(
        w: Weights, f: list[Activation], x: Value, state: tuple[Value, ...], e: Emitter
    ) -> tuple[Value, ...]:
        """z, r = f(x + H R); g = g(x + (r H) R), or with `linear_before_reset` g(x + r (H R + b));
        H = g + z (H - g).

        Cho et al., Learning Phrase Representations, 2014.
        """
        (hidden,) = state
        width = hidden.type.shape[-1]
        product = e(t.Matmul(hidden, w.recurrent[0]))

        def gate(index: int) -> Value:
            pre = e(t.Map("add", (part(x, index, width, e), part(product, index, width, e))))
            return f[0](pre, e)

        update, reset = gate(0), gate(1)
        if reset_last:
            late = part(product, 2, width, e)
            if w.recurrent_bias is not None:
                late = e(t.Map("add", (late, w.recurrent_bias)))
            late = e(t.Map("mul", (reset, late)))
        else:
            late = e(t.Matmul(e(t.Map("mul", (reset, hidden))), w.recurrent[1]))
        new = f[1](e(t.Map("add", (part(x, 2, width, e), late))), e)
        change = e(t.Map("mul", (update, e(t.Map("sub", (hidden, new))))))
        return (e(t.Map("add", (new, change))),)

    return cell


@dataclass(frozen=True)
class Direction:
    """One way through time. `lengths` [B, 1] are where the sequences end, if before the last step:
    cells past it are zero and leave the state alone."""

    cell: Cell
    functions: list[Activation]
    weights: Weights
    init: tuple[Value, ...]
    lengths: Value | None
    reverse: bool
    time: int  # the axis of `weights.gates`

    @property
    def steps(self) -> int:
        return self.weights.gates.type.shape[self.time]

    def step(
        self, x: Value, trip: Value, state: tuple[Value, ...], e: Emitter
    ) -> tuple[tuple[Value, ...], Value]:
        """The new state, and the hidden state to show for this step."""
        new = self.cell(self.weights, self.functions, x, state, e)
        if self.lengths is None:
            return new, new[0]
        last = e.constant(self.steps - 1, i64)
        now = e(t.Map("sub", (last, trip))) if self.reverse else trip
        valid = e(t.Map("gt", (self.lengths, now)))
        shown = e(t.Map("where", (valid, new[0], e.constant(0, x.type.dtype))))
        return tuple(e(t.Map("where", (valid, a, b))) for a, b in zip(new, state)), shown

    def unrolled(self, e: Emitter) -> tuple[tuple[Value, ...], Value]:
        """A single step needs no loop: streaming models run so."""
        gates = self.weights.gates
        shape = [extent for axis, extent in enumerate(gates.type.shape) if axis != self.time]
        state, shown = self.step(reshaped(e, gates, shape), e.constant(0, i64), self.init, e)
        return state, reshaped(e, shown, (1, *shown.type.shape))

    def run(self, name: str, collect: bool, e: Emitter) -> tuple[tuple[Value, ...], Value | None]:
        """The state after the last step and, to `collect`, the hidden states [T, B, H] in the order
        of time."""
        if self.steps == 1:
            return self.unrolled(e)
        body = Emitter(name, inside=e)
        body.builder.locs = e.builder.locs
        trip = body.input("trip", TensorType((), i64))
        carried = tuple(body.input(wish, v.type) for wish, v in zip("hc", self.init))
        now = body(t.Map("bit_not", (trip,))) if self.reverse else trip  # -1 - trip: from the end
        x = body(t.Gather(self.weights.gates, now, self.time))
        state, shown = self.step(x, trip, carried, body)
        outputs = [body.place(v) for v in (*state, *((shown,) if collect else ()))]
        graph = body.builder.finish(outputs)
        results = e.add(t.Loop(graph, self.steps, self.init, tuple(body.captures)))
        state, rest = results[: len(carried)], results[len(carried) :]
        if not rest:
            return state, None
        backwards = t.Slice(rest[0], (self.steps - 1, 0, 0), rest[0].type.shape, (-1, 1, 1))
        return state, e(backwards) if self.reverse else rest[0]


def pick(x: Value, index: int, axis: int, e: Emitter) -> Value:
    """x[.., index, ..], the axis gone."""
    shape = x.type.shape
    if shape[axis] > 1:
        starts = tuple(index if i == axis else 0 for i in range(len(shape)))
        sizes = tuple(1 if i == axis else n for i, n in enumerate(shape))
        x = e(t.Slice(x, starts, sizes, (1,) * len(shape)))
    return e(t.Reshape(x, shape[:axis] + shape[axis + 1 :]))


def weights(n: OnnxNode, direction: int, e: Emitter, reset_last: bool) -> Weights:
    """Everything but the recurrence is done for all time steps at once: X W + b."""
    w, r = (transposed(e, pick(n[i], direction, 0, e), (1, 0)) for i in (1, 2))
    gates = e(t.Matmul(n[0], w))
    hidden, width = r.type.shape
    waits: Value | None = None
    bias = n.get(3)
    if bias is not None:
        both = pick(bias, direction, 0, e)
        ours, theirs = part(both, 0, width, e), part(both, 1, width, e)
        if reset_last:
            waits = part(theirs, 2, hidden, e)
            theirs = e(t.Pad(part(theirs, 0, hidden, e, 2), (0,), (hidden,)))
        gates = e(t.Map("add", (gates, e(t.Map("add", (ours, theirs))))))
    cut = (r,)
    if n.op == "GRU" and not reset_last:
        cut = (part(r, 0, hidden, e, 2), part(r, 2, hidden, e))
    peepholes: tuple[Value, ...] = ()
    if n.op == "LSTM" and (given := n.get(7)) is not None:
        row = pick(given, direction, 0, e)
        peepholes = tuple(part(row, i, hidden, e) for i in range(3))
    return Weights(gates, cut, waits, peepholes)


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
        raise ModelError(
            f"{n.op}: the weights do not fit",
            expected=f"X with three axes, W [{directions}, {gates} * hidden, inputs] and "
            f"R [{directions}, {gates} * hidden, hidden]",
            found=f"X: {x}, W: {w}, R: {r}",
        )


def convert(
    n: OnnxNode, e: Emitter, cell: Cell, gates: int, default: tuple[str, ...], states: int
) -> tuple[Value | None, ...]:
    way = str(n.attr("direction", "forward")).lower()
    if way not in ("forward", "reverse", "bidirectional"):
        expected = "forward, reverse or bidirectional"
        raise ModelError(f"{n.op}: unknown direction", expected=expected, found=way)
    directions = 2 if way == "bidirectional" else 1
    check(n, gates, directions)
    batch_first = bool(n.attr("layout", 0))
    time, across = (1, 1) if batch_first else (0, 0)  # axes of X's steps, of the states' directions
    batch, hidden = n[0].type.shape[1 - time], n[2].type.shape[-1]
    zero = e.fill(0, TensorType((batch, hidden), n[0].type.dtype))
    lengths = n.get(4)
    known = n.known(4)
    if known is not None and np.all(known >= n[0].type.shape[time]):
        lengths = None
    if lengths is not None:
        lengths = e(t.Reshape(e(t.Cast(lengths, i64)), (batch, 1)))

    functions = activations(n, default, directions)
    reset_last = bool(n.attr("linear_before_reset", 0))
    finals: list[tuple[Value, ...]] = []
    shown: list[Value] = []
    for d in range(directions):
        given = (n.get(5 + i) for i in range(states))
        init = tuple(zero if v is None else pick(v, d, across, e) for v in given)
        reverse = way == "reverse" or d == 1
        w = weights(n, d, e, reset_last)
        direction = Direction(cell, functions[d], w, init, lengths, reverse, time)
        final, ys = direction.run(
            f"{n.name}.{'reverse' if reverse else 'forward'}", n.has_output(0), e
        )
        finals.append(final)
        shown += [] if ys is None else [e(t.Reshape(ys, (ys.type.shape[0], 1, batch, hidden)))]

    y: Value | None = None
    if n.has_output(0):
        y = shown[0] if directions == 1 else e(t.Concat(tuple(shown), 1))
        y = transposed(e, y, (2, 0, 1, 3)) if batch_first else y
    results = [y]
    for i in range(states):
        if not n.has_output(1 + i):
            results.append(None)
            continue
        shape = (batch, 1, hidden) if batch_first else (1, batch, hidden)
        each = tuple(e(t.Reshape(final[i], shape)) for final in finals)
        results.append(each[0] if directions == 1 else e(t.Concat(each, across)))
    return tuple(results)


def rnn(n: OnnxNode, e: Emitter) -> tuple[Value | None, ...]:
    return convert(n, e, rnn_cell, gates=1, default=("tanh",), states=1)


def gru(n: OnnxNode, e: Emitter) -> tuple[Value | None, ...]:
    cell = gru_cell(bool(n.attr("linear_before_reset", 0)))
    return convert(n, e, cell, gates=3, default=("sigmoid", "tanh"), states=1)


def lstm(n: OnnxNode, e: Emitter) -> tuple[Value | None, ...]:
    cell = lstm_cell(bool(n.attr("input_forget", 0)))
    return convert(n, e, cell, gates=4, default=("sigmoid", "tanh", "tanh"), states=2)


CONVERTERS: dict[str, Converter] = {"RNN": rnn, "GRU": gru, "LSTM": lstm}
