"""Mixed precision as torch.autocast does it: products in few bits, sums and norms in f32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuir.ir.build import begin, within
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.graph import Graph, Level, Loc, Node, Op, Value
from gpuir.ir.phases import beside, is_training, operator_of
from gpuir.ir.types import DType, bf16, f16, f32, f64
from gpuir.ops import tensor as t
from gpuir.passes.convert import converted
from gpuir.passes.manager import Pass

# PyTorch documentation, torch.amp, "CUDA Ops that can autocast to float32", and beyond it
# aten/src/ATen/autocast_mode.h, AT_FORALL_FP32: the functions whose sums or slopes do not fit into
# few bits. What another op runs in, its row says (ops/tensor.py).
WIDE_MAPS = (
    *("pow", "exp", "expm1", "log", "log1p", "reciprocal", "rsqrt", "softplus"),
    *("acos", "asin", "cosh", "sinh", "tan", "erfinv"),
)
WIDE_REDUCES = ("sum", "prod")
ANY_ROUTINES = ("col2im",)  # one result, in whatever its operand comes in
CAST = "cast"  # the part `beside` an op that casts an operand ahead of it


@dataclass(frozen=True)
class Autocast(Pass):
    """Runs products in `dtype`, bf16 or f16, and norms, softmax, sums and powers in f32, as
    torch.autocast on CUDA; other ops run in the widest dtype of their operands. Weights stay as
    they are and are cast once, whoever reads them; anything else is cast by each op that needs it,
    until canonicalize merges the casts. With `fast_norms` layer and group norms are in `dtype` too,
    weights and all, as timm's are (timm.layers.set_fast_norm). Outputs may become narrower; it goes
    before autodiff.

    A cast that autocast makes ahead of an op is at a location of its own (`linear.cast`), since a
    stack that runs op by op launches it by itself; one that the op's own kernel makes as it reads
    is at the op's. (aten/src/ATen/autocast_mode.cpp, cached_cast: that of a weight is kept until
    the region ends.)
    """

    dtype: str = "bf16"
    fast_norms: bool = False

    name = "autocast"
    takes = gives = Level.graph

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "f16"):
            fix = nearest(self.dtype, ("bf16", "f16"))
            raise UsageError(f"pass 'autocast': {self.dtype!r} is not supported", fix=fix)

    def run(self, g: Graph) -> Graph:
        if is_training(g):
            raise UsageError(
                f"autocast: @{g.name} already has a backward pass",
                fix="put this pass before autodiff",
            )
        return _Autocast(g, bf16 if self.dtype == "bf16" else f16, self.fast_norms).run()


class _Autocast:
    def __init__(self, g: Graph, dtype: DType, fast_norms: bool):
        self.g, self.dtype, self.fast_norms = g, dtype, fast_norms
        self.b = begin(g, g.level)
        self.params = set(g.params)
        self.norms = norms_by_running(g)
        self.new: dict[Value, Value] = {}  # with the type they have now
        self.kept: dict[tuple[Value, DType], Value] = {}  # casts of weights, and views of those
        self.products = {n.locs for n in g.nodes if autocast_of(n.op) == "narrow"}

    def run(self) -> Graph:
        g, b = self.g, self.b
        b.reserve(v.name for n in g.nodes for v in n.results)
        for node in g.nodes:
            b.locs = node.locs
            op = self.converted(node.op.substitute(self.new), node.op)
            self.put(replace(node, op=op))
        over = g.over or (None,) * len(g.outputs)
        outputs = [self.new.get(v, v) for v in g.outputs]
        return b.finish(
            self.cast(v, o.type.dtype) if o is not None else v
            for v, o in zip(outputs, over, strict=True)
        )

    def put(self, node: Node) -> None:
        """The node with its results of the types they have now; that of a norm by running
        statistics is in the dtype of its operand, whatever the statistics are in."""
        pairs = zip(node.results, node.op.result_types, strict=True)
        results = tuple(Value(v.name, type) for v, type in pairs)
        for v, x in ((v, self.norms[v]) for v in node.results if v in self.norms):
            dtype = self.new.get(x, x).type.dtype
            if dtype != node.op.result_types[0].dtype:
                wide = self.b(node.op, f"{v.name}.wide")
                node = replace(node, op=t.Cast(wide, dtype))
                results = (Value(v.name, wide.type.with_dtype(dtype)),)
        self.new.update((v, w) for v, w in zip(node.results, results, strict=True) if v != w)
        self.b.put(replace(node, results=results))

    def converted(self, op: Op, was: Op) -> Op:
        """The op with its operands in the dtypes that autocast gives it."""
        if op.control and self.is_of_product(self.b.locs):
            op = self.cast_all(op, op.operands, self.dtype, ahead=True)
            return op.with_regions(lambda region: converted(region, self.dtype))
        if op.control:
            return within(self.cast_back(op, was), self.region, self.b.folded)
        match self.policy(op):
            case "narrow":
                operands = (op.x, *op.weights) if isinstance(op, t.Experts) else op.operands
                return self.cast_all(op, operands, self.dtype, ahead=True)
            case "wide":
                ahead = not takes_narrow(op, self.dtype)
                return self.cast_all(op, op.operands, f32, ahead)
            case "widest":
                ahead = not isinstance(op, t.Pointwise)
                return self.cast_all(op, op.operands, widest(op.operands), ahead)
            case "kept" if isinstance(op, t.Routine) and op.fn in ANY_ROUTINES:
                dtype = op.args[0].type.dtype
                return replace(op, gives=tuple(type.with_dtype(dtype) for type in op.gives))
            case "kept":
                return self.cast_back(op, was)
            case "any":
                return op

    def policy(self, op: Op) -> t.Autocast:
        is_fast = self.fast_norms and isinstance(op, t.Normalize) and not is_batch_norm(op)
        is_part = isinstance(op, t.Map) and (self.is_bias(op) or self.is_of_product(self.b.locs))
        if is_fast or is_part:
            return "narrow"
        return "wide" if is_power(op, self.b.locs) else autocast_of(op)

    def cast_all(self, op: Op, operands: tuple[Value, ...], dtype: DType | None, ahead: bool) -> Op:
        given = {v: self.cast(v, dtype, ahead) for v in operands if dtype and castable(v)}
        return op.substitute(given)

    def cast_back(self, op: Op, was: Op) -> Op:
        """The op with its operands in the dtypes they had."""
        pairs = zip(op.operands, was.operands, strict=True)
        return op.substitute({v: self.cast(v, old.type.dtype) for v, old in pairs})

    def cast(self, v: Value, dtype: DType, ahead: bool = False) -> Value:
        """v in that dtype. `ahead`: not by the op's own kernel."""
        if v.type.dtype == dtype:
            return v
        if v in self.params:
            return self.keep(v, dtype, t.Cast(v, dtype), ahead)
        producer = self.b.producer(v)
        if isinstance(producer, t.Layout) and self.is_weight(x := producer.operands[0]):
            view = producer.substitute({x: self.cast(x, dtype, ahead)})
            return self.keep(v, dtype, view)
        return self.made(v, dtype, t.Cast(v, dtype), ahead)

    def is_of_product(self, locs: tuple[Loc, ...]) -> bool:
        """Whether PyTorch computes a product at this location, and so all that it does there in
        16 bits: an addmm, a convolution, an LSTM."""
        return self.g.framework == "pytorch" and locs in self.products

    def is_bias(self, op: Op) -> bool:
        """Whether an op adds a weight to a product: it belongs to it, as in a linear layer."""
        match op:
            case t.Map("add", (a, b)):
                pairs = (self.b.producer(a), b), (self.b.producer(b), a)
                return self.g.framework != "pytorch" and any(
                    maker is not None and autocast_of(maker) == "narrow" and self.is_weight(v)
                    for maker, v in pairs
                )
            case _:
                return False

    def is_weight(self, v: Value) -> bool:
        """Whether v is a param, or a view of one."""
        producer = self.b.producer(v)
        if isinstance(producer, t.Layout):
            return self.is_weight(producer.operands[0])
        return v in self.params

    def keep(self, v: Value, dtype: DType, op: Op, ahead: bool = False) -> Value:
        if (v, dtype) not in self.kept:
            self.kept[v, dtype] = self.made(v, dtype, op, ahead)
        return self.kept[v, dtype]

    def made(self, v: Value, dtype: DType, op: Op, ahead: bool) -> Value:
        locs = beside(self.b.locs, CAST) if ahead else self.b.locs
        (value,) = self.b.add(op, (f"{v.name}.{dtype}",), locs)
        return value

    def region(self, g: Graph) -> Graph:
        """A region, which gives what it gave."""
        inner = _Autocast(g, self.dtype, self.fast_norms)
        made = inner.run()
        inner.b.locs = made.nodes[-1].locs if made.nodes else self.b.locs
        outputs = zip(made.outputs, g.outputs, strict=True)
        return inner.b.finish(inner.cast(v, old.type.dtype) for v, old in outputs)


def castable(v: Value) -> bool:
    """A float of up to 32 bits; autocast leaves f64 alone."""
    return v.type.dtype.is_float and v.type.dtype != f64


def autocast_of(op: Op) -> t.Autocast:
    """What an op runs in. Of norms that of a batch takes statistics and weights in f32 beside cells
    of any width (the list has layer_norm and group_norm alone); a leaky ReLU whose slope is a
    tensor is a PReLU."""
    match op:
        case t.Normalize() if is_batch_norm(op):
            return "any"
        case t.Map(fn=fn) if fn in WIDE_MAPS:
            return "wide"
        case t.Map("leaky_relu", (_, _)):
            return "narrow"
        case t.Reduce(fn=fn) if fn in WIDE_REDUCES:
            return "wide"
        case t.TensorOp():
            return op.autocast
        case _:
            return "kept"


def is_power(op: Op, locs: Sequence[Loc]) -> bool:
    """Whether a product by itself is what a frontend made of a model's power of 2, which PyTorch
    runs in f32, and not a square within a variance."""
    match op:
        case t.Map("mul", (x, y)) if x == y:
            return any(operator_of(loc).startswith(("pow", "square")) for loc in locs)
        case _:
            return False


def is_batch_norm(op: t.Normalize) -> bool:
    return 0 in op.axes


def takes_narrow(op: Op, dtype: DType) -> bool:
    """Whether the kernel of an op that computes in f32 reads operands of 16 bits: that of a sum
    (aten/src/ATen/native/cuda/ReduceSumProdKernel.cu), and of a softmax f16 alone (SoftMax.cpp,
    half_to_float). Pointwise ones take any dtypes that meet in them (TensorIterator.h,
    promote_inputs_to_common_dtype)."""
    return isinstance(op, t.Reduce) or (isinstance(op, t.Softmax) and dtype == f16)


def norms_by_running(g: Graph) -> Mapping[Value, Value]:
    """What batch norms by running statistics give, and each's operand. One is a run of pointwise
    ops at one location: (x - mean) * rsqrt(var + eps), and scale and bias."""
    made = {v: n for n in g.nodes for v in n.results}
    uses, params = g.uses(), set(g.params)
    found: dict[Value, Value] = {}

    def maker(v: Value, locs: tuple[Loc, ...]) -> Op | None:
        return made[v].op if v in made and made[v].locs == locs else None

    def is_running(v: Value, locs: tuple[Loc, ...]) -> bool:
        op = maker(v, locs)
        return v in params or (op is not None and all(is_running(w, locs) for w in op.operands))

    for node in g.nodes:
        match node.op:
            case t.Map("mul", (apart, inverse)):
                centred, root = maker(apart, node.locs), maker(inverse, node.locs)
            case _:
                continue
        match centred, root:
            case t.Map("sub", (x, mean)), t.Map("rsqrt", (spread,)) if is_running(
                mean, node.locs
            ) and is_running(spread, node.locs):
                (v,) = node.results
                while isinstance(after := next(iter(uses.get(v, ())), None), Node) and (
                    after.locs == node.locs
                    and isinstance(after.op, t.Map)
                    and after.op.fn in ("mul", "add")
                ):
                    (v,) = after.results
                found[v] = x
            case _:
                continue
    return found


def widest(operands: tuple[Value, ...]) -> DType | None:
    """The dtype that operands of an op come together in: single numbers follow the others, and
    f16 and bf16 meet in f32."""
    floats = [v.type for v in operands if v.type.dtype.is_float]
    dtypes = {type.dtype for type in floats if type.rank} or {type.dtype for type in floats}
    if dtypes == {f16, bf16}:
        return f32
    return max(dtypes, key=lambda d: d.bits, default=None)
