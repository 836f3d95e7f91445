"""A pass of one's own: the products that read one activation become a single, wider product.

Query, key and value projections are three small GEMMs on the same rows; one GEMM with the weights
side by side fills the device better and reads the activation once. The weights are packed offline.
(The profiles of serving engines, `tensorrt` and `ideal` do so already: `gpuir passes`,
pack_products.)

    gpuir analyze examples/encoder.onnx --target t4 --dims batch=1,seq=128 \\
        --load examples/merge_projections.py \\
        --pipeline canonicalize,merge_projections,recognize,fuse,legalize
"""

from collections import defaultdict
from dataclasses import dataclass

from gpuir.ir.build import Builder, prune, rewrite
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.types import TensorType
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass


@dataclass(frozen=True)
class MergeProjections(Pass):
    """x @ w0 + b0, x @ w1 + b1, ...  →  slices of one x @ w + b, the weights packed offline."""

    least: int = 2  # products it takes

    name = "merge_projections"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        params = set(g.params)
        products = {
            n.results[0]: n.op.a for n in g.nodes if isinstance(n.op, t.Matmul) and n.op.b in params
        }
        families: dict[Value, list[Value]] = defaultdict(list)
        for node in g.nodes:
            match node.op:
                case t.Map("add", (a, b)) if {a, b} & params and (
                    x := products.get(a, products.get(b))
                ):
                    families[x].append(node.results[0])
                case _:
                    pass
        family_of = {y.name: x for x, ys in families.items() if len(ys) >= self.least for y in ys}
        wide: dict[Value, Value] = {}

        def rule(n: Node, b: Builder) -> tuple[Value, ...] | None:
            if (x := family_of.get(n.results[0].name)) is None:
                return None
            ys = families[x]
            widths = [y.type.shape[-1] for y in ys]
            if x not in wide:
                name = " | ".join(y.name for y in ys)
                w = b.param(
                    f"{name}.weight", TensorType((x.type.shape[-1], sum(widths)), x.type.dtype)
                )
                bias = b.param(f"{name}.bias", TensorType((sum(widths),), x.type.dtype))
                wide[x] = b(t.Map("add", (b(t.Matmul(x, w)), bias)), name)
            i = [y.name for y in ys].index(n.results[0].name)
            rows = x.type.shape[:-1]
            starts = (*(0 for _ in rows), sum(widths[:i]))
            return (b(t.Slice(wide[x], starts, (*rows, widths[i]), (1,) * x.type.rank)),)

        return prune(rewrite(g, rule))


PASSES = {MergeProjections.name: MergeProjections}
