"""DynamicQuantizeLSTM of com.microsoft: an LSTM whose products are of 8-bit operands."""

from __future__ import annotations

from gpuir.frontends import recurrence
from gpuir.frontends.emit import Emitter
from gpuir.frontends.idioms import pick
from gpuir.frontends.onnx import recurrent
from gpuir.frontends.onnx.node import Converter, OnnxNode, Results
from gpuir.frontends.onnx.quant import Codes, dynamic_quantize, matmul_to_float
from gpuir.ir.graph import Value
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t


def dynamic_quantize_lstm(n: OnnxNode, e: Emitter) -> Results:
    """x, w [d, in, 4h], r [d, h, 4h], bias, lengths, h0, c0, peepholes, then scale and zero point
    of w and of r. x is quantised once over all its steps, h at each; products are of 8-bit
    operands. An LSTM otherwise."""
    if n.get(7) is not None or n.attr("input_forget", 0):
        raise n.refused(
            "peepholes and input_forget are not supported", fix="do not quantise this node"
        )
    x, w, r = n[0], n[1], n[2]
    directions = 2 if str(n.attr("direction", "forward")).lower() == "bidirectional" else 1
    batch, hidden = x.type.shape[1], r.type.shape[1]
    functions = recurrent.activations(n, ("sigmoid", "tanh", "tanh"), directions)
    zero = e.fill(0, TensorType((batch, hidden), x.type.dtype))
    quantized, x_scale = dynamic_quantize(e, x)

    def of(d: int) -> recurrent.Way:
        own, own_r, w_scale, zw, r_scale, zr = (
            pick(e, v, 0, d) for v in (w, r, n[8], n[9], n[10], n[11])
        )
        scale = e(t.Map("mul", (w_scale, x_scale)), "scale")
        gates = matmul_to_float(e, quantized, Codes(own, zw), scale)
        if (bias := n.get(3)) is not None:
            both = pick(e, bias, 0, d)
            halves = (recurrence.columns(e, both, i, 4 * hidden) for i in (0, 1))
            gates = e.map("add", gates, e.map("add", *halves))

        def cell(
            parts: recurrence.RecurrentWeights,
            f: list[recurrence.Activation],
            now: Value,
            state: tuple[Value, ...],
            inside: Emitter,
        ) -> tuple[Value, ...]:
            h, scale = dynamic_quantize(inside, state[0])
            scale = inside.map("mul", r_scale, scale)
            product = matmul_to_float(inside, h, Codes(own_r, zr), scale)
            added = inside.map("add", now, product)
            i, o, forget, c = (recurrence.columns(inside, added, k, hidden) for k in range(4))
            kept = inside.map("mul", f[0](forget, inside), state[1])
            new = inside.map("mul", f[0](i, inside), f[1](c, inside))
            memory = inside.map("add", kept, new)
            shown = f[2](memory, inside)
            return inside.map("mul", f[0](o, inside), shown), memory

        init = tuple(zero if v is None else pick(e, v, 0, d) for v in (n.get(5), n.get(6)))
        return cell, recurrence.RecurrentWeights(gates, (), None, ()), init

    lengths = recurrent.column_of(e, n.get(4), batch)
    return recurrent.in_directions(n, e, of, functions, lengths)


CONVERTERS: dict[str, Converter] = {"com.microsoft::DynamicQuantizeLSTM": dynamic_quantize_lstm}
