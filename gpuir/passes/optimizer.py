"""The optimiser's step: what becomes of each param whose gradient a graph gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite

from gpuir.ir.build import Builder, begin
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.graph import Graph, Level, Op, Value
from gpuir.ir.phases import in_phase, phase_of
from gpuir.ir.types import TensorType, f32, f64
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass

# How many tensors and blocks one launch takes, by the number of lists, and cells a block: PyTorch,
# aten/src/ATen/native/cuda/MultiTensorApply.cuh, depth_to_max_tensors, depth_to_max_blocks and
# kChunkSize.
MOST_TENSORS = (110, 64, 48, 36, 30)
MOST_BLOCKS = 320
CHUNK = 65_536

# Operations a cell: counted in the formulas of interp.multi_tensor.
FLOPS = {"sgd": 6, "adam": 15, "add": 2, "lerp": 3, "addcmul": 3, "addcdiv": 3, "squares": 2}
NORM = "grad_norm"
CLIP_EPS = 1e-6  # torch/nn/utils/clip_grad.py: what is added to the norm before it divides
STATES = {"sgd": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq")}


@dataclass(frozen=True)
class Optimizer(Pass):
    """Appends the optimiser's step, after autodiff: each param `w` with a gradient gets an output
    `w.new` over it, and its states become params of role optimizer with outputs over them.

    Formulas and defaults are those of torch.optim.SGD, Adam and AdamW; `weight_decay` None is 0.01
    for adamw and 0 for the others. `fused` is one multi-tensor kernel that does it all
    (`fused=True` in PyTorch), else one for each operation, as its `foreach` implementation, the
    default on GPUs; a launch takes as many tensors as PyTorch's, or one without `foreach`
    (`foreach=False` there, and the default before PyTorch 2.0). `step` is the number of this
    update: what corrects the bias is computed on the host, and costs nothing. Gradients are
    divided by `loss_scale`, which fused kernels do on the way.

    `clip`, where it is not 0, is the most that the norm of all gradients together may be: they are
    scaled down to it before the step, as torch.nn.utils.clip_grad_norm_ does.
    """

    kind: str = "adamw"
    fused: bool = False
    foreach: bool = True
    lr: float = 1e-3
    momentum: float = 0.0
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float | None = None
    step: int = 1
    loss_scale: float = 1.0
    clip: float = 0.0

    name = "optimizer"
    takes = gives = Level.graph

    def __post_init__(self) -> None:
        if self.fused and not self.foreach:
            raise UsageError(
                "pass 'optimizer': a fused step updates all tensors together, so "
                "fused=true needs foreach=true",
                found="fused=true,foreach=false",
                fix="remove one of the two options",
            )
        if self.kind not in ("sgd", "adam", "adamw"):
            fix = nearest(self.kind, ("sgd", "adam", "adamw"))
            raise UsageError(f"pass 'optimizer': no optimizer has the name {self.kind!r}", fix=fix)
        if self.step < 1:
            raise UsageError("pass 'optimizer': step must be at least 1", found=f"step={self.step}")
        if not (isfinite(self.clip) and self.clip >= 0):
            raise UsageError(
                "pass 'optimizer': clip is out of range",
                expected="a number above 0, or 0 for no clipping",
                found=f"clip={self.clip:g}",
            )

    @property
    def decay(self) -> float:
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.01 if self.kind == "adamw" else 0.0

    @property
    def states(self) -> tuple[str, ...]:
        """The names of what is kept of each param."""
        if self.kind == "sgd":
            return STATES["sgd"] if self.momentum else ()
        return STATES["adam"]

    def run(self, g: Graph) -> Graph:
        pairs = with_gradients(g)
        b = begin(g, Level.graph)
        for node in g.nodes:
            b.put(node)
        b.locs = in_phase((f"{g.name}:{self.kind}",), "optimizer")
        made: list[tuple[Value, Value]] = []
        scale = self.loss_scale
        if self.clip:
            pairs, scale = self.clipped(b, pairs), 1.0
        for alike in by_dtype(pairs):
            made += replace(self, loss_scale=scale).update(b, alike)
        olds = dict(made)
        outputs = [*g.outputs, *olds]
        over = (*g.over, *(None,) * (len(g.outputs) - len(g.over)), *olds.values())
        b.folded = list(g.folded)
        return b.finish(outputs, over)

    def clipped(
        self, b: Builder, pairs: Sequence[tuple[Value, Value]]
    ) -> list[tuple[Value, Value]]:
        """Appends the scaling of all gradients to a norm of `clip` at most; gives the params with
        the gradients that are left.

        As PyTorch does, and unlike it with one square root for all: what each gradient adds to the
        square of the norm is a sum, so that ranks may each have a part of it.
        """
        kinds = by_dtype(pairs)
        grads = [in_parts(b, [g for _, g in alike]) for alike in kinds]
        if self.loss_scale != 1.0:
            by = (self.loss_scale,)
            grads = [launch(b, "div", [some], by, one=not self.foreach)[0] for some in grads]
        squares: list[Value] = []
        for some in grads:
            gives = TensorType((1,), f64 if some[0].type.dtype == f64 else f32)
            squares += launch(b, "squares", [some], (), one=not self.foreach, gives=gives)[0]
        if len({v.type.dtype for v in squares}) > 1:
            squares = [b(t.Cast(v, f64)) for v in squares]
        norm = b(t.Map("sqrt", (b(t.Reduce("sum", b(t.Concat(tuple(squares), 0)), (0,))),)), NORM)
        below = b(t.Map("reciprocal", (b(t.Map("add", (norm,), (CLIP_EPS,))),)))
        factor = b(t.Map("min", (b(t.Map("mul", (below,), (self.clip,))),), (1.0,)))
        found: list[tuple[Value, Value]] = []
        for alike, some in zip(kinds, grads, strict=True):
            lists = (some, [factor] * len(some))
            (less,) = launch(b, "times", lists, (), one=not self.foreach)
            if alike[0][1].type.dtype.is_complex:
                less = [b(t.Parts(g)) for g in less]
            found += [(w, g) for (w, _), g in zip(alike, less, strict=True)]
        return found

    def update(
        self, b: Builder, pairs: Sequence[tuple[Value, Value]]
    ) -> Iterator[tuple[Value, Value]]:
        """Appends the update of params with their gradients; gives what is new, with the old."""
        params, grads = [w for w, _ in pairs], [g for _, g in pairs]
        kept = [[b.param(f"{w.name}.{s}", g.type) for w, g in pairs] for s in self.states]
        lists = [in_parts(b, some) for some in (params, grads, *kept)]
        changed = (self.fused_step if self.fused else self.foreach_step)(b, lists)
        renamed: dict[Value, Value] = {}
        weights = frozenset(params)
        for old, parts in zip((params, *kept), changed, strict=True):
            new = [b(t.Parts(v)) for v in parts] if old[0].type.dtype.is_complex else parts
            for before, after in zip(old, new, strict=True):
                value = Value(b.names.fresh(f"{before.name}.new"), after.type)
                renamed[after] = value
                b.roles[value.name] = "weight" if before in weights else "optimizer"
                if before not in weights:
                    b.roles[before.name] = "optimizer"
                yield value, before
        b.rename(0, renamed)

    # -- the two ways

    def fused_step(self, b: Builder, lists: Sequence[list[Value]]) -> list[list[Value]]:
        """One kernel: of all lists it changes the params and the states."""
        if self.kind == "sgd":
            numbers = (self.lr, self.momentum, self.decay, float(self.nesterov), self.loss_scale)
        else:
            numbers = (self.lr, self.beta1, self.beta2, self.eps, self.decay)
            numbers = (*numbers, float(self.kind == "adamw"), float(self.step), self.loss_scale)
        fn = "sgd" if self.kind == "sgd" else "adam"
        return launch(b, fn, lists, numbers, results=(0, *range(2, len(lists))))

    def foreach_step(self, b: Builder, lists: Sequence[list[Value]]) -> list[list[Value]]:
        """A kernel an operation, in the order of torch.optim's _multi_tensor_sgd and
        _multi_tensor_adam."""
        params, grads, *kept = lists

        def each(fn: str, *lists: list[Value], by: float = 0.0) -> list[Value]:
            return launch(b, fn, lists, (by,), one=not self.foreach)[0]

        if self.loss_scale != 1.0:
            grads = each("div", grads, by=self.loss_scale)
        if self.decay and self.kind == "adamw":
            params = each("mul", params, by=1 - self.lr * self.decay)
        elif self.decay:
            grads = each("add", grads, params, by=self.decay)
        if self.kind == "sgd":
            if not kept:
                return [each("add", params, grads, by=-self.lr)]
            buffers = each("add", each("mul", kept[0], by=self.momentum), grads, by=1.0)
            along = each("add", grads, buffers, by=self.momentum) if self.nesterov else buffers
            return [each("add", params, along, by=-self.lr), buffers]
        m = each("lerp", kept[0], grads, by=1 - self.beta1)
        v = each("addcmul", each("mul", kept[1], by=self.beta2), grads, grads, by=1 - self.beta2)
        root = each("div", each("sqrt", v), by=(1 - self.beta2**self.step) ** 0.5)
        root = each("add_number", root, by=self.eps)
        return [each("addcdiv", params, m, root, by=-self.lr / (1 - self.beta1**self.step)), m, v]


def adds_squares(op: Op) -> bool:
    """Whether an op gives of each tensor of a list the sum of its squares."""
    return isinstance(op, t.Routine) and dict(op.attrs).get("fn") == "squares"


def with_gradients(g: Graph) -> list[tuple[Value, Value]]:
    """Each param with its gradient: of those that a buffer adds up, the sum. UsageError where there
    are none, or the step has been made."""
    if any(phase_of(node) == "optimizer" for node in g.nodes):
        raise UsageError(
            f"optimizer: @{g.name} already has the step of an optimizer",
            fix="remove one of the two optimizer passes",
        )
    outputs = {v.name: v for v in g.outputs if g.role_of(v) == "gradient"}
    pairs = [
        (w, found)
        for w in g.params
        if (found := outputs.get(f"{w.name}.grad.new", outputs.get(f"{w.name}.grad"))) is not None
    ]
    if not pairs:
        raise UsageError(
            f"optimizer: @{g.name} has no gradients of its parameters",
            expected="outputs with the names of the parameters and .grad at the end",
            fix="add the pass autodiff before this pass",
        )
    return pairs


def by_dtype(pairs: Sequence[tuple[Value, Value]]) -> list[list[tuple[Value, Value]]]:
    """Params with their gradients, those of one dtype together."""
    groups: dict[str, list[tuple[Value, Value]]] = {}
    for w, g in pairs:
        groups.setdefault(w.type.dtype.name, []).append((w, g))
    return list(groups.values())


def in_parts(b: Builder, tensors: list[Value]) -> list[Value]:
    """Complex tensors as pairs of real numbers, which are updated each by itself (torch/optim/
    optimizer.py, _view_as_real)."""
    return [b(t.Parts(v)) if v.type.dtype.is_complex else v for v in tensors]


def launch(
    b: Builder,
    fn: str,
    lists: Sequence[list[Value]],
    numbers: tuple[float, ...],
    results: Sequence[int] = (0,),
    one: bool = False,
    gives: TensorType | None = None,
) -> list[list[Value]]:
    """fn on lists of tensors, in as many launches as PyTorch takes, or `one` for each tensor: the
    lists that it changes, in their places `results`, or what it `gives` of each tensor."""
    changed: list[list[Value]] = [[] for _ in results]
    each = (slice(i, i + 1) for i in range(len(lists[0])))
    for part in each if one else launches(lists[0], len(lists)):
        some = [values[part] for values in lists]
        size = sum(v.type.size for v in some[0])
        attrs: tuple[tuple[str, t.Scalar | str | tuple[t.Scalar, ...]], ...] = (
            ("fn", fn),
            ("lists", len(lists)),
            ("numbers", numbers),
        )
        args = tuple(v for values in some for v in values)
        types = tuple(gives or v.type.with_shape(v.type.shape) for i in results for v in some[i])
        made = b.add(t.Routine("multi_tensor", args, types, attrs, FLOPS.get(fn, 1) * size))
        for i, values in enumerate(changed):
            values += made[i * len(some[0]) : (i + 1) * len(some[0])]
    return changed


def launches(tensors: Sequence[Value], lists: int) -> Iterator[slice]:
    """How tensors are cut into launches. One that alone has more cells than a launch takes is
    counted as one."""
    start, blocks = 0, 0
    most = MOST_TENSORS[min(lists, len(MOST_TENSORS)) - 1]
    for i, v in enumerate(tensors):
        own = ceil(v.type.size / CHUNK)
        if i > start and (i - start == most or blocks + own > MOST_BLOCKS):
            yield slice(start, i)
            start, blocks = i, 0
        blocks += own
    yield slice(start, len(tensors))
