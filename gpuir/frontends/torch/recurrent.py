"""nn.LSTM, GRU and RNN: a loop over time steps for each layer and direction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import joined, pick, transposed
from gpuir.frontends.recurrence import (
    Activation,
    Cell,
    Direction,
    RecurrentWeights,
    gru_cell,
    lstm_cell,
    rnn_cell,
)
from gpuir.frontends.torch.node import Converter, Results, TorchNode
from gpuir.ir.graph import Value
from gpuir.ops import tensor as t


def mapped(fn: str) -> Activation:
    return lambda x, e: e.map(fn, x)


def weights(
    e: Emitter, x: Value, params: Sequence[Value], waits: bool, turned: bool
) -> RecurrentWeights:
    """Of one direction, from its matrices and biases: X W + b for all steps at once, steps first.
    `waits`: a part of the state's bias, for a GRU's reset gate; `turned`: x has the batch first."""
    w, r, *biases = params
    gates = e(t.Matmul(x, e(t.Transpose(w, (1, 0)))))
    late: Value | None = None
    if biases:
        ours, theirs = biases
        late = theirs if waits else None
        gates = e.map("add", gates, ours if waits else e.map("add", ours, theirs))
    if turned:
        gates = e(t.Transpose(gates, (1, 0, 2)))
    return RecurrentWeights(gates, (r,), late, ())


def recurrent(
    n: TorchNode, e: Emitter, cell: Cell, functions: Sequence[str], states: int
) -> Results:
    """input, hx (one state, or a list), params (a layer's matrices and biases, direction by
    direction): the last layer's hidden states, then the states after the last step."""
    x, hx, params = n["input"], n.args["hx"], list(n.args["params"])
    given: list[Value] = [hx] if isinstance(hx, Value) else list(hx)
    directions = 2 if n.args["bidirectional"] else 1
    runs = int(n.args["num_layers"]) * directions
    each = 4 if n.args["has_biases"] else 2
    if len(params) != runs * each:
        raise n.refused(
            "projections (proj_size) are not supported", f"{runs * each} weights", len(params)
        )
    if n.args["train"] and n.args["dropout"] and int(n.args["num_layers"]) > 1:
        e.assume(f"{n.name}: dropout between layers is counted as free")
    turned = bool(n.args["batch_first"])
    finals: list[tuple[Value, ...]] = []
    shown: list[Value] = []
    for i in range(runs):
        if i and i % directions == 0:
            x, turned, shown = joined(e, shown, 2), False, []
        own = params[i * each : (i + 1) * each]
        w = weights(e, x, own, len(functions) == 2 and states == 1, turned)
        init = tuple(pick(e, v, 0, i) for v in given)
        direction = Direction(
            cell=cell,
            functions=list(map(mapped, functions)),
            weights=w,
            init=init,
            lengths=None,
            reverse=i % 2 == 1 and directions == 2,
        )
        final, ys = direction.run(f"{n.name}.{i}", True, e)
        assert ys is not None
        finals.append(final)
        shown.append(ys)
    y = joined(e, shown, 2)
    y = transposed(e, y, (1, 0, 2)) if n.args["batch_first"] else y
    one = (1, *given[0].type.shape[1:])
    last = (joined(e, [e(t.Reshape(final[s], one)) for final in finals], 0) for s in range(states))
    return y, *last


CONVERTERS: dict[str, Converter] = {
    "lstm.input": partial(
        recurrent, cell=lstm_cell(order="ifgo"), functions=("sigmoid", "tanh", "tanh"), states=2
    ),
    "gru.input": partial(
        recurrent, cell=gru_cell(order="rz"), functions=("sigmoid", "tanh"), states=1
    ),
    "rnn_tanh.input": partial(recurrent, cell=rnn_cell, functions=("tanh",), states=1),
    "rnn_relu.input": partial(recurrent, cell=rnn_cell, functions=("relu",), states=1),
}
