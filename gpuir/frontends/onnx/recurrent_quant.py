"""DynamicQuantizeLSTM of com.microsoft: an LSTM whose products are of 8-bit operands."""

from __future__ import annotations

from gpuir.frontends import recurrence
from gpuir.frontends.emit import Emitter
from gpuir.frontends.onnx import recurrent
from gpuir.frontends.onnx.node import Converter, OnnxNode
from gpuir.frontends.onnx.quant import (
    dynamic_quantize,
    matmul_to_float,
)
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType, i64
from gpuir.ops import tensor as t

Results = tuple[Value | None, ...]


def dynamic_quantize_lstm(n: OnnxNode, e: Emitter) -> Results:
    """x, w [d, in, 4h], r [d, h, 4h], bias, lengths, h0, c0, peepholes, then scale and zero point
    of w and of r. x is quantised once over all its steps, h at each; products are of 8-bit
    operands. An LSTM otherwise."""
    if n.get(7) is not None or n.attr("input_forget", 0):
        raise n.refused(
            "peepholes and input_forget are not supported", fix="do not quantise this node"
        )
    x, w, r = n[0], n[1], n[2]
    way = str(n.attr("direction", "forward")).lower()
    directions = 2 if way == "bidirectional" else 1
    batch, hidden = x.type.shape[1], r.type.shape[1]
    functions = recurrent.activations(n, ("sigmoid", "tanh", "tanh"), directions)
    zero = e.fill(0, TensorType((batch, hidden), x.type.dtype))
    quantized, x_scale, zx = dynamic_quantize(e, x)
    lengths = n.get(4)
    if lengths is not None:
        lengths = e(t.Reshape(e(t.Cast(lengths, i64)), (batch, 1)))
    finals: list[tuple[Value, ...]] = []
    shown: list[Value] = []
    for d in range(directions):
        own, own_r, w_scale, zw, r_scale, zr = (
            recurrent.pick(v, d, 0, e) for v in (w, r, n[8], n[9], n[10], n[11])
        )
        scale = e(t.Map("mul", (w_scale, x_scale)), "scale")
        gates = matmul_to_float(e, quantized, own, scale, zx, zw, None)
        if (bias := n.get(3)) is not None:
            both = recurrent.pick(bias, d, 0, e)
            halves = (recurrence.part(both, i, 4 * hidden, e) for i in (0, 1))
            gates = e.map("add", gates, e.map("add", *halves))

        def cell(
            parts: recurrence.Weights,
            f: list[recurrence.Activation],
            now: Value,
            state: tuple[Value, ...],
            inside: Emitter,
            weights: tuple[Value, Value, Value] = (own_r, r_scale, zr),
        ) -> tuple[Value, ...]:
            own_r, r_scale, zr = weights
            h, scale, zh = dynamic_quantize(inside, state[0])
            scale = inside(t.Map("mul", (r_scale, scale)))
            product = matmul_to_float(inside, h, own_r, scale, zh, zr, None)
            added = inside(t.Map("add", (now, product)))
            i, o, forget, c = (recurrence.part(added, k, hidden, inside) for k in range(4))
            kept = inside(t.Map("mul", (f[0](forget, inside), state[1])))
            new = inside(t.Map("mul", (f[0](i, inside), f[1](c, inside))))
            memory = inside(t.Map("add", (kept, new)))
            shown = f[2](memory, inside)
            return inside(t.Map("mul", (f[0](o, inside), shown))), memory

        init = tuple(
            zero if v is None else recurrent.pick(v, d, 0, e) for v in (n.get(5), n.get(6))
        )
        reverse = way == "reverse" or d == 1
        direction = recurrence.Direction(
            *(cell, functions[d], recurrence.Weights(gates, (), None, ()), init, lengths, reverse)
        )
        name = f"{n.name}.{'reverse' if reverse else 'forward'}"
        final, ys = direction.run(name, n.has_output(0), e)
        finals.append(final)
        shown += [] if ys is None else [e(t.Reshape(ys, (ys.type.shape[0], 1, batch, hidden)))]

    y = None
    if n.has_output(0):
        y = shown[0] if directions == 1 else e(t.Concat(tuple(shown), 1))
    states = [tuple(e(t.Reshape(final[i], (1, batch, hidden))) for final in finals) for i in (0, 1)]
    return y, *(s[0] if directions == 1 else e(t.Concat(s, 0)) for s in states)


CONVERTERS: dict[str, Converter] = {"com.microsoft::DynamicQuantizeLSTM": dynamic_quantize_lstm}
