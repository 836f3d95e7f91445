"""The same model with operands of 8 bits, as quantisers of ONNX files write it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuir.ir.build import begin
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.graph import Graph, Level, Value
from gpuir.ir.phases import beside
from gpuir.ir.types import f8e4m3, i8
from gpuir.ops import tensor as t
from gpuir.passes.convert import check_inference, read_by_products
from gpuir.passes.manager import Pass

CODES = {"i8": (i8, 127.0), "f8e4m3": (f8e4m3, 448.0)}  # and the largest number of each
SCALE = 0.05  # of every tensor: no time depends on it


@dataclass(frozen=True)
class Quantise(Pass):
    """Quantises what convolutions and products with stored weights read, and dequantises it ahead
    of them: i8 or f8e4m3 around zero, one scale for a tensor. All readers of such a tensor take it
    from the codes, so that between two of these layers only codes are in memory. A stack then runs
    the graph as it does a file with QuantizeLinear and DequantizeLinear: TensorRT on the codes.

    (NVIDIA ModelOpt, onnx.quantization.quantize: Conv, Gemm and MatMul by default; TensorRT
    documentation, Working with Quantized Types.) Convolution transposes, attention and products of
    two activations stay, as does a weight that something else reads too.
    """

    dtype: str = "i8"

    name = "quantise"
    takes = gives = Level.graph

    def __post_init__(self) -> None:
        if self.dtype not in CODES:
            fix = nearest(self.dtype, CODES)
            raise UsageError(f"pass 'quantise': {self.dtype!r} is not supported", fix=fix)

    def run(self, g: Graph) -> Graph:
        check_inference(g, self.name, "remove this pass")
        code, most = CODES[self.dtype]
        stored = read_by_products(g, convolutions=True)
        weights = {v: Value(v.name, v.type.with_dtype(code)) for v in stored}
        b = begin(replace(g, params=tuple(weights.get(v, v) for v in g.params)), g.level)
        b.reserve(v.name for n in g.nodes for v in n.results)
        data = _data(g, set(weights))
        new: dict[Value, Value] = {}

        def dequantised(codes: Value, like: Value) -> Value:
            wide = b(t.Cast(codes, like.type.dtype), f"{like.name}.wide")
            return b(t.Map("mul", (wide,), (SCALE,)), f"{like.name}.dequantised")

        def quantised(x: Value) -> Value:
            y = b(t.Map("mul", (x,), (1 / SCALE,)), f"{x.name}.divided")
            if code.is_integer:
                y = b(t.Map("round", (y,)), f"{x.name}.rounded")
            y = b(t.Map("clip", (y,), (-most, most)), f"{x.name}.clipped")
            return b(t.Cast(y, code), f"{x.name}.codes")

        for node in g.nodes:
            b.locs = node.locs
            for v in dict.fromkeys(node.op.operands):
                if v in weights and v not in new:
                    new[v] = dequantised(weights[v], v)
                elif v in data and v not in new:
                    b.locs = beside(node.locs, "quantise")
                    new[v] = dequantised(quantised(v), v)
                    b.locs = node.locs
            read = {v: new[v] for v in node.op.operands if v in new}
            b.put(replace(node, op=node.op.substitute(read)) if read else node)
            new.update((v, dequantised(quantised(v), v)) for v in node.results if v in data)
        return b.finish(g.outputs, g.over)


def _data(g: Graph, weights: set[Value]) -> set[Value]:
    """What the products of those weights multiply with them."""
    stored = set(weights)
    found: set[Value] = set()
    for node in g.nodes:
        match node.op:
            case t.Transpose(x=x) if x in stored:
                stored.update(node.results)
            case t.Conv(x=x, w=w) if w in stored:
                found.add(x)
            case t.Matmul(a=a, b=b) if b in stored:
                found.add(a)
            case _:
                pass
    return found
