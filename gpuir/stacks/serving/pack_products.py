"""Products of one input as one: queries, keys and values; gates and what they gate."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from gpuir.ir.build import Builder, prune, rewrite
from gpuir.ir.graph import Graph, Level, Loc, Node, Value
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass


class WeightProduct(NamedTuple):
    """A product by a weight of the model."""

    node: Node
    weight: Value  # as it is stored
    columns: int  # the axis of its columns there: 0 where it is transposed
    biased: Node | None = None  # what adds a bias to it, if nothing else reads either
    bias: Value | None = None

    @property
    def last(self) -> Node:
        return self.biased or self.node


@dataclass(frozen=True)
class PackProducts(Pass):
    """Makes one product of those of one input by the weights of one module of the model, which then
    lie side by side: serving engines load them so, and TensorRT joins them when it builds. Biases
    too, where all the products have one, which others may read: exporters keep equal ones once.
    Only weights that products alone read, as they are stored or transposed; those that are unpacked
    on the way are left as they are.

    (vLLM: vllm/model_executor/layers/linear.py, QKVParallelLinear and MergedColumnParallelLinear;
    SGLang: sglang/srt/layers/linear.py, the same; TensorRT-LLM: tensorrt_llm/_torch/modules,
    attention.py and gated_mlp.py; TensorRT: NVIDIA developer forum, topic 238187, of horizontal
    fusion.)
    """

    name = "pack_products"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        packer = _Packer(g)
        return prune(rewrite(g, packer.rule)) if packer.groups else g


class _Packer:
    def __init__(self, g: Graph):
        self.params = frozenset(g.params)
        self.outputs = frozenset(g.outputs)
        self.producers = g.producers()
        self.uses = g.uses()
        alike: dict[object, list[WeightProduct]] = {}
        for node in g.nodes:
            match node.op, self.product(node):
                case t.Matmul(x, _, dtype), WeightProduct() as product:
                    kind = (product.columns, product.weight.type.dtype, dtype)
                    key = (x, node.results[0].type.dtype, kind, around(node.locs))
                    alike.setdefault(key, []).append(product)
                case _:
                    pass
        self.groups: dict[Value, list[WeightProduct]] = {}
        for group in alike.values():
            if len(group) > 1:
                if any(p.bias is None for p in group):
                    group = [p._replace(biased=None, bias=None) for p in group]
                self.groups |= {p.last.results[0]: group for p in group}
        self.made: dict[str, Value] = {}  # the first of a group → the product of all

    def product(self, node: Node) -> WeightProduct | None:
        """A product by a weight that nothing else reads."""
        if not isinstance(node.op, t.Matmul):
            return None
        b = node.op.b
        if b.type.rank != 2 or not self.alone(b):
            return None
        maker = self.producers.get(b)
        if maker is None:
            return WeightProduct(node, b, 1, *self.bias(node)) if b in self.params else None
        match maker.op:
            case t.Transpose(x, (1, 0)) if x in self.params and self.alone(x):
                return WeightProduct(node, x, 0, *self.bias(node))
            case _:
                return None

    def bias(self, node: Node) -> tuple[Node, Value] | tuple[None, None]:
        """What adds a bias to a product, and the bias."""
        y = node.results[0]
        if not self.alone(y) or y in self.outputs:
            return None, None
        (reader,) = self.uses[y]
        match reader.op:
            case t.Map("add", (x, b)):
                bias = b if x == y else x
                if bias in self.params and bias.type.shape == y.type.shape[-1:]:
                    return reader, bias
            case _:
                pass
        return None, None

    def alone(self, v: Value) -> bool:
        return len(self.uses.get(v, ())) == 1

    def rule(self, n: Node, b: Builder) -> tuple[Value, ...] | None:
        """x @ w + c, x @ v + d  →  slices of x @ concat(w, v) + concat(c, d)"""
        group = self.groups.get(n.results[0], []) if n.results else []
        # a region may have a value of the same name
        if not any(p.last is n for p in group):
            return None
        first = group[0].last.results[0].name
        if first not in self.made:
            own, b.locs = b.locs, locs_of(group)
            self.made[first] = one(group, b)
            b.locs = own
        sizes = n.results[0].type.shape
        before = takewhile(lambda p: p.last is not n, group)
        start = sum(p.last.results[0].type.shape[-1] for p in before)
        starts = (*(0 for _ in sizes[:-1]), start)
        return (b(t.Slice(self.made[first], starts, sizes, (1,) * len(sizes))),)


def one(group: list[WeightProduct], b: Builder) -> Value:
    """The product of all weights of a group, and with all biases."""
    op, columns = group[0].node.op, group[0].columns
    assert isinstance(op, t.Matmul)
    weights = b(t.Concat(tuple(p.weight for p in group), columns, in_place=True))
    weights = b(t.Transpose(weights, (1, 0))) if columns == 0 else weights
    y = b(t.Matmul(op.a, weights, op.dtype))
    biases = tuple(p.bias for p in group if p.bias is not None)
    return b(t.Map("add", (y, b(t.Concat(biases, 0, in_place=True))))) if biases else y


def locs_of(group: list[WeightProduct]) -> tuple[Loc, ...]:
    nodes = [n for p in group for n in (p.node, p.biased) if n is not None]
    return tuple(dict.fromkeys(loc for n in nodes for loc in n.locs))


def around(locs: tuple[Loc, ...]) -> str:
    """The module that a product's own one is in: `llama:model.layers.0.self_attn.q_proj/linear` and
    `llama.onnx:/model/layers.0/self_attn/q_proj/MatMul` → their `self_attn`."""
    own = locs[0].rpartition("/")[0] if locs else ""
    return own.replace("/", ".").rpartition(".")[0]
