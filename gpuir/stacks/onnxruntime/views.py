"""Which views onnxruntime's kernels read in place: its operators give each other packed tensors."""

from __future__ import annotations

from dataclasses import dataclass

from gpuir.fusion.launch import unpacks_own
from gpuir.ir.graph import Graph, Op, Value
from gpuir.ir.strides import Strided
from gpuir.ops import tensor as t
from gpuir.passes.views import Views, is_reshape


@dataclass(frozen=True)
class OnnxRuntimeViews(Views):
    """Reshapes alone are views, and transposes of the last two axes that products read."""

    def makes(self, body: Graph) -> bool:
        return is_plain(body)

    def renames(self, body: Graph) -> bool:
        return is_reshape(body)

    def takes(self, op: Op, value: Value, view: Strided) -> bool:
        return super().takes(op, value, view) and not reads_rows(op)


def is_plain(body: Graph) -> bool:
    """Whether a layout is reshapes, or swaps the last two axes, with another axis ahead perhaps."""
    for op in (n.op for n in body.nodes):
        match op:
            case t.Reshape(x, shape) if (1, *x.type.shape) == shape:
                pass
            case t.Transpose(perm=perm) if perm[:-2] == tuple(range(len(perm) - 2)):
                pass
            case _:
                return is_reshape(body)
    return True


def reads_rows(op: Op) -> bool:
    """Whether a launch is an operator that reads its rows as they lie in memory: a product of more
    than two axes with its bias, which is a Gemm behind a reshape (onnxruntime/core/optimizer/
    matmul_add_fusion.cc), or one that unpacks its weight."""
    if not isinstance(op, t.Fused):
        return False
    makers = op.body.producers()
    products = [n for n in op.body.nodes if isinstance(n.op, t.Matmul)]
    if any(unpacks_own(n, makers.get) for n in products):
        return True
    rows = any(n.op.operands[0].type.rank > 2 for n in products)
    return rows and any(isinstance(n.op, t.Map) and n.op.fn == "add" for n in op.body.nodes)
