"""Recurrent layers: one product over all time steps, then a loop over them in each direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import backwards, part, reshaped
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, i64
from gpuir.ops import tensor as t

Activation = Callable[[Value, Emitter], Value]


@dataclass(frozen=True)
class RecurrentWeights:
    """One direction's tensors as values of the graph around the loop. `gates` is what the inputs
    contribute to every gate at every time step, biases included."""

    gates: Value  # [T, B, G H]
    recurrent: tuple[Value, ...]  # [G H, H], cut where a product waits for a gate
    recurrent_bias: Value | None  # [G H], only where a part of it must wait for the reset gate
    peepholes: tuple[Value, ...]  # [H] for i, o, f; or none


# a cell maps the gates' input [B, G H] and the state to the new state, the hidden one first
Cell = Callable[
    [RecurrentWeights, list[Activation], Value, tuple[Value, ...], Emitter], tuple[Value, ...]
]


def columns(e: Emitter, x: Value, index: int, width: int) -> Value:
    """Columns index * width .. (index + 1) * width of x."""
    return part(e, x, x.type.rank - 1, index * width, width)


def times(e: Emitter, state: Value, weight: Value) -> Value:
    """What the state contributes to the gates."""
    return e(t.Matmul(state, e(t.Transpose(weight, (1, 0)))))


def rnn_cell(
    w: RecurrentWeights, f: list[Activation], x: Value, state: tuple[Value, ...], e: Emitter
) -> tuple[Value, ...]:
    """H = f(x + H R)."""
    product = times(e, state[0], w.recurrent[0])
    return (f[0](e.map("add", x, product), e),)


def lstm_cell(coupled: bool = False, order: str = "iofg") -> Cell:
    """Gates lie in this order; `coupled` makes f = 1 - i."""

    def cell(
        w: RecurrentWeights, f: list[Activation], x: Value, state: tuple[Value, ...], e: Emitter
    ) -> tuple[Value, ...]:
        """i, o, f, g from x + H R; C = f C + i g; H = o h(C). Peepholes add P C to i and f, and
        the new C to o.

        Hochreiter and Schmidhuber, Long Short-Term Memory, 1997; Gers and Schmidhuber, 2000.
        """
        hidden, memory = state
        width = hidden.type.shape[-1]
        gates = e.map("add", x, times(e, hidden, w.recurrent[0]))

        def gate(name: str, peephole: int | None, c: Value) -> Value:
            g = columns(e, gates, order.index(name), width)
            if not w.peepholes or peephole is None:
                return g
            look = e.map("mul", c, w.peepholes[peephole])
            return e.map("add", g, look)

        enter = f[0](gate("i", 0, memory), e)
        if coupled:
            forget = e.map("sub", e.constant(1, enter.type.dtype), enter)
        else:
            forget = f[0](gate("f", 2, memory), e)
        new = f[1](gate("g", None, memory), e)
        kept, added = e.map("mul", forget, memory), e.map("mul", enter, new)
        memory = e.map("add", kept, added)
        leave = f[0](gate("o", 1, memory), e)
        return e.map("mul", leave, f[2](memory, e)), memory

    return cell


def gru_cell(reset_last: bool = True, order: str = "zr") -> Cell:
    """The update gate z and the reset gate r lie in this order, before g; `reset_last` resets what
    the state contributes, else the state itself."""

    def cell(
        w: RecurrentWeights, f: list[Activation], x: Value, state: tuple[Value, ...], e: Emitter
    ) -> tuple[Value, ...]:
        """z, r = f(x + H R + b); g = g(x + (r H) R), or with `reset_last` g(x + r (H R + b));
        H = g + z (H - g).

        Cho et al., Learning Phrase Representations, 2014.
        """
        (hidden,) = state
        width = hidden.type.shape[-1]
        product = times(e, hidden, w.recurrent[0])
        if w.recurrent_bias is not None:
            product = e.map("add", product, w.recurrent_bias)

        def gate(name: str) -> Value:
            index = order.index(name)
            pre = e.map("add", columns(e, x, index, width), columns(e, product, index, width))
            return f[0](pre, e)

        update, reset = gate("z"), gate("r")
        if reset_last:
            late = e.map("mul", reset, columns(e, product, 2, width))
        else:
            late = times(e, e.map("mul", reset, hidden), w.recurrent[1])
        new = f[1](e.map("add", columns(e, x, 2, width), late), e)
        change = e.map("mul", update, e.map("sub", hidden, new))
        return (e.map("add", new, change),)

    return cell


@dataclass(frozen=True)
class Direction:
    """One way through time. `lengths` [B, 1] are where the sequences end, if before the last step:
    cells past it are zero and leave the state alone."""

    cell: Cell
    functions: list[Activation]
    weights: RecurrentWeights
    init: tuple[Value, ...]
    lengths: Value | None
    reverse: bool

    @property
    def steps(self) -> int:
        return self.weights.gates.type.shape[0]

    def step(
        self, x: Value, trip: Value, state: tuple[Value, ...], e: Emitter
    ) -> tuple[tuple[Value, ...], Value]:
        """The new state, and the hidden state to show for this step."""
        new = self.cell(self.weights, self.functions, x, state, e)
        if self.lengths is None:
            return new, new[0]
        last = e.constant(self.steps - 1, i64)
        now = e.map("sub", last, trip) if self.reverse else trip
        valid = e.map("gt", self.lengths, now)
        shown = e.map("where", valid, new[0], e.constant(0, x.type.dtype))
        return tuple(e.map("where", valid, a, b) for a, b in zip(new, state)), shown

    def unrolled(self, e: Emitter) -> tuple[tuple[Value, ...], Value]:
        """A single step needs no loop: streaming models run so."""
        gates = self.weights.gates
        x = reshaped(e, gates, gates.type.shape[1:])
        state, shown = self.step(x, e.constant(0, i64), self.init, e)
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
        now = body.map("bit_not", trip) if self.reverse else trip  # -1 - trip: from the end
        x = body(t.Gather(self.weights.gates, now, 0))
        state, shown = self.step(x, trip, carried, body)
        outputs = [body.place(v) for v in (*state, *((shown,) if collect else ()))]
        graph = body.builder.finish(outputs)
        results = e.add(t.Loop(graph, self.steps, self.init, tuple(body.captures)))
        state, rest = results[: len(carried)], results[len(carried) :]
        if not rest:
            return state, None
        return state, backwards(e, rest[0], 0) if self.reverse else rest[0]
