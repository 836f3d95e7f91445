"""Mixed precision as torch.autocast does it: products in few bits, sums and norms in f32."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuir.ir.build import begin, within
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.graph import Graph, Level, Op, Value
from gpuir.ir.phases import is_training
from gpuir.ir.types import DType, bf16, f16, f32, f64
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass

# PyTorch documentation, torch.amp, "CUDA Ops that can autocast to float32": the functions whose
# sums or slopes do not fit into few bits. What another op runs in, its row says (ops/tensor.py).
WIDE_MAPS = (
    *("pow", "exp", "expm1", "log", "log1p", "reciprocal", "rsqrt", "softplus"),
    *("acos", "asin", "cosh", "sinh", "tan"),
)
WIDE_REDUCES = ("sum", "prod")


@dataclass(frozen=True)
class Autocast(Pass):
    """Runs products in `dtype`, bf16 or f16, and norms, softmax, sums and powers in f32, as
    torch.autocast on CUDA; other ops run in the widest dtype of their operands. Weights stay as
    they are and are cast once, whoever reads them; anything else is cast by each op that needs it,
    until canonicalize merges the casts. Outputs may become narrower; it goes before autodiff.
    """

    dtype: str = "bf16"

    name = "autocast"
    takes = gives = Level.graph

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "f16"):
            fix = nearest(self.dtype, ("bf16", "f16"))
            raise UsageError(f"pass 'autocast': cannot run in {self.dtype!r}", fix=fix)

    def run(self, g: Graph) -> Graph:
        if is_training(g):
            raise UsageError(f"autocast: @{g.name} has a backward pass", fix="put it before")
        return _Autocast(g, bf16 if self.dtype == "bf16" else f16).run()


class _Autocast:
    def __init__(self, g: Graph, dtype: DType):
        self.g, self.dtype = g, dtype
        self.b = begin(g, g.level)
        self.params = set(g.params)
        self.new: dict[Value, Value] = {}  # with the type they have now
        self.kept: dict[tuple[Value, DType], Value] = {}  # casts of weights, and views of those

    def run(self) -> Graph:
        g, b = self.g, self.b
        b.reserve(v.name for n in g.nodes for v in n.results)
        for node in g.nodes:
            b.locs = node.locs
            op = self.converted(node.op.substitute(self.new), node.op)
            results = tuple(
                Value(v.name, type) for v, type in zip(node.results, op.result_types, strict=True)
            )
            self.new.update((v, w) for v, w in zip(node.results, results, strict=True) if v != w)
            b.put(replace(node, op=op, results=results))
        over = g.over or (None,) * len(g.outputs)
        outputs = [self.new.get(v, v) for v in g.outputs]
        return b.finish(
            self.cast(v, o.type.dtype) if o is not None else v
            for v, o in zip(outputs, over, strict=True)
        )

    def converted(self, op: Op, was: Op) -> Op:
        """The op with its operands in the dtypes that autocast gives it."""
        if op.control:
            return within(self.cast_back(op, was), self.region, self.b.folded)
        match "narrow" if self.is_bias(op) else autocast_of(op):
            case "narrow":
                operands = (op.x, *op.weights) if isinstance(op, t.Experts) else op.operands
                return self.cast_all(op, operands, self.dtype)
            case "wide":
                return self.cast_all(op, op.operands, f32)
            case "widest":
                return self.cast_all(op, op.operands, widest(op.operands))
            case "kept":
                return self.cast_back(op, was)
            case "any":
                return op

    def cast_all(self, op: Op, operands: tuple[Value, ...], dtype: DType | None) -> Op:
        return op.substitute({v: self.cast(v, dtype) for v in operands if dtype and castable(v)})

    def cast_back(self, op: Op, was: Op) -> Op:
        """The op with its operands in the dtypes they had."""
        pairs = zip(op.operands, was.operands, strict=True)
        return op.substitute({v: self.cast(v, old.type.dtype) for v, old in pairs})

    def cast(self, v: Value, dtype: DType) -> Value:
        if v.type.dtype == dtype:
            return v
        if v in self.params:
            return self.keep(v, dtype, t.Cast(v, dtype))
        producer = self.b.producer(v)
        if isinstance(producer, t.Layout) and self.is_weight(x := producer.operands[0]):
            view = producer.substitute({x: self.cast(x, dtype)})
            return self.keep(v, dtype, view)
        return self.b(t.Cast(v, dtype), f"{v.name}.{dtype}")

    def is_bias(self, op: Op) -> bool:
        """Whether an op adds a weight to a product: it belongs to it, as in a linear layer."""
        match op:
            case t.Map("add", (a, b)):
                makers = self.b.producer(a), self.b.producer(b)
                product = [m is not None and autocast_of(m) == "narrow" for m in makers]
                return (product[0] and self.is_weight(b)) or (product[1] and self.is_weight(a))
            case _:
                return False

    def is_weight(self, v: Value) -> bool:
        """Whether v is a param, or a view of one."""
        producer = self.b.producer(v)
        if isinstance(producer, t.Layout):
            return self.is_weight(producer.operands[0])
        return v in self.params

    def keep(self, v: Value, dtype: DType, op: Op) -> Value:
        if (v, dtype) not in self.kept:
            self.kept[v, dtype] = self.b(op, f"{v.name}.{dtype}")
        return self.kept[v, dtype]

    def region(self, g: Graph) -> Graph:
        """A region, which gives what it gave."""
        inner = _Autocast(g, self.dtype)
        made = inner.run()
        inner.b.locs = made.nodes[-1].locs if made.nodes else self.b.locs
        outputs = zip(made.outputs, g.outputs, strict=True)
        return inner.b.finish(inner.cast(v, old.type.dtype) for v, old in outputs)


def castable(v: Value) -> bool:
    """A float of up to 32 bits; autocast leaves f64 alone."""
    return v.type.dtype.is_float and v.type.dtype != f64


def autocast_of(op: Op) -> t.Autocast:
    """What an op runs in. Of norms that of a batch takes statistics and weights in f32 beside cells
    of any width (the list has layer_norm and group_norm alone)."""
    match op:
        case t.Normalize(axes=axes) if 0 in axes:
            return "any"
        case t.Map(fn=fn) if fn in WIDE_MAPS:
            return "wide"
        case t.Reduce(fn=fn) if fn in WIDE_REDUCES:
            return "wide"
        case t.TensorOp():
            return op.autocast
        case _:
            return "kept"


def widest(operands: tuple[Value, ...]) -> DType | None:
    """The dtype that operands of an op come together in: single numbers follow the others, and
    f16 and bf16 meet in f32."""
    floats = [v.type for v in operands if v.type.dtype.is_float]
    dtypes = {type.dtype for type in floats if type.rank} or {type.dtype for type in floats}
    if dtypes == {f16, bf16}:
        return f32
    return max(dtypes, key=lambda d: d.bits, default=None)
