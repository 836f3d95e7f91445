"""Products of one input as one: queries, keys and values; gates and what they gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple

from gpuir.ir.build import Builder, prune, rewrite
from gpuir.ir.graph import Graph, Level, Loc, Node, Op, Value
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass


class EpilogueStep(NamedTuple):
    """What is done to a product and nothing else: a cast, or a sum or product with `other`."""

    node: Node
    other: Value | None = None

    @property
    def kind(self) -> object:
        return self.node.op.fn if isinstance(self.node.op, t.Map) else self.result.type.dtype

    @property
    def result(self) -> Value:
        return self.node.results[0]


class WeightProduct(NamedTuple):
    """A product by a weight of the model, and the steps behind it that go with it."""

    node: Node
    weight: Value  # as it is stored
    columns: int  # the axis of its columns there: 0 where it is transposed
    steps: tuple[EpilogueStep, ...] = ()

    @property
    def last(self) -> Node:
        return self.steps[-1].node if self.steps else self.node


@dataclass(frozen=True)
class PackProducts(Pass):
    """Makes one product of those of one input by the weights of one module of the model, which then
    lie side by side: serving engines load them so, and TensorRT joins them when it builds. What is
    done to each of the products alike goes with them: biases, which others may read too, since
    exporters keep equal ones once; scales of codes, of which one number for a weight becomes that
    of the first, as engines that requantise to the largest; casts. Only weights that products alone
    read, as they are stored or transposed; those that are unpacked on the way are left as they are.

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
                shared = self.shared(group)
                group = [p._replace(steps=p.steps[:shared]) for p in group]
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
            return WeightProduct(node, b, 1, self.steps(node)) if b in self.params else None
        match maker.op:
            case t.Transpose(x, (1, 0)) if x in self.params and self.alone(x):
                return WeightProduct(node, x, 0, self.steps(node))
            case _:
                return None

    def steps(self, node: Node) -> tuple[EpilogueStep, ...]:
        """What is done to a product, one after another, as long as nothing else reads it."""
        found: list[EpilogueStep] = []
        y = node.results[0]
        while self.alone(y) and y not in self.outputs:
            (reader,) = self.uses[y]
            match reader.op:
                case t.Cast():
                    found.append(EpilogueStep(reader))
                case t.Map("add" | "mul", (x, z)) if reader.results[0].type.shape == y.type.shape:
                    found.append(EpilogueStep(reader, z if x == y else x))
                case _:
                    break
            y = reader.results[0]
        return tuple(found)

    def shared(self, group: Sequence[WeightProduct]) -> int:
        """How many steps can be done to all the products together."""
        codes = group[0].weight.type.dtype.bits <= 8
        chains = zip(*(p.steps for p in group), strict=False)
        alike = (len({s.kind for s in x}) == 1 and self.fits(x, codes) for x in chains)
        return len(list(takewhile(bool, alike)))

    def fits(self, steps: Sequence[EpilogueStep], codes: bool) -> bool:
        """Whether the second operands are one value with a number for each row, or what is stored
        for each column, or for a whole weight of `codes`."""
        others = {s.other for s in steps}
        if len(others) == 1:
            (other,) = others
            if other is None or other.type.size == 1 or other.type.shape[-1] == 1:
                return True
        own = [(s.other, s.result.type.shape[-1:]) for s in steps if s.other is not None]
        if len(own) < len(steps) or not all(self.stored(x) for x, _ in own):
            return False
        if all(x.type.shape == columns for x, columns in own):
            return True
        return codes and all(x.type.size == 1 for x, _ in own)

    def stored(self, v: Value) -> Value | None:
        """The param that a value is, or has the cells of."""
        maker = self.producers.get(v)
        if maker is not None and isinstance(maker.op, t.Reshape):
            v = maker.op.x
        return v if v in self.params else None

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
            self.made[first] = self.one(group, b)
            b.locs = own
        sizes = n.results[0].type.shape
        before = takewhile(lambda p: p.last is not n, group)
        start = sum(p.last.results[0].type.shape[-1] for p in before)
        starts = (*(0 for _ in sizes[:-1]), start)
        return (b(t.Slice(self.made[first], starts, sizes, (1,) * len(sizes))),)

    def one(self, group: list[WeightProduct], b: Builder) -> Value:
        """The product of all weights of a group, and what is done to it."""
        op, columns = group[0].node.op, group[0].columns
        assert isinstance(op, t.Matmul)
        weights = b(t.Concat(tuple(p.weight for p in group), columns, in_place=True))
        weights = b(t.Transpose(weights, (1, 0))) if columns == 0 else weights
        y = b(t.Matmul(op.a, weights, op.dtype))
        for steps in zip(*(p.steps for p in group), strict=True):
            y = b(self.step(steps, y, b))
        return y

    def step(self, steps: Sequence[EpilogueStep], y: Value, b: Builder) -> Op:
        first, op = steps[0], steps[0].node.op
        if isinstance(op, t.Cast) or first.other is None:
            return replace(op, x=y)
        assert isinstance(op, t.Map)
        others = [s.other for s in steps if s.other]
        if first.other.type.shape != first.result.type.shape[-1:]:
            return replace(op, args=(y, self.again(first.other, b)))
        joined = t.Concat(tuple(self.again(x, b) for x in others), 0, in_place=True)
        return replace(op, args=(y, b(joined)))

    def again(self, v: Value, b: Builder) -> Value:
        """A value that may be made further behind only."""
        if v in self.params or not self.stored(v):
            return v
        return b(self.producers[v].op)


def locs_of(group: list[WeightProduct]) -> tuple[Loc, ...]:
    nodes = [n for p in group for n in (p.node, *(s.node for s in p.steps))]
    return tuple(dict.fromkeys(loc for n in nodes for loc in n.locs))


def around(locs: tuple[Loc, ...]) -> str:
    """The module that a product's own one is in: `llama:model.layers.0.self_attn.q_proj/linear` and
    `llama.onnx:/model/layers.0/self_attn/q_proj/MatMul` → their `self_attn`."""
    own = locs[0].rpartition("/")[0] if locs else ""
    return own.replace("/", ".").rpartition(".")[0]
