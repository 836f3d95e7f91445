"""What a kernel does, whatever its tile and target: its loop nest, its bytes, its operations.

`work_of` reads it off an IR kernel. The functions after it build the same thing from extents alone:
for one kernel, or, with arrays for numbers, for a table of them. Equal works cost the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

import numpy as np

from gpuir.cost import steps
from gpuir.cost.routing import shares, with_strays
from gpuir.cost.sheet import Number
from gpuir.ir.graph import Access, Graph, Node, Space, Value
from gpuir.ir.types import DType, f4e2m1, f32, i4, u4
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.ops.scalar import SCALARS
from gpuir.targets.target import Pipe

# How an operand reaches the arithmetic: `staged` through shared memory step by step, `held` there
# for the whole block, `streamed` straight to registers, or `written`.
Role = Literal["staged", "held", "streamed", "written"]

SECTOR_BYTES = 32  # the least a cache fetches: CUDA C++ Best Practices Guide, coalesced access

# Instructions a scalar function costs on the lanes, where that is not its count of flops. Assumed
# from the usual implementations: division and roots by a special-function unit at a quarter rate
# and a step or two of refinement, the rest as polynomials with range reduction.
LANE_OPS: dict[str, float] = {
    **dict.fromkeys(("div", "reciprocal", "sqrt", "rsqrt"), 8.0),
    **dict.fromkeys(("exp", "log", "sin", "cos"), 8.0),
    **dict.fromkeys(("expm1", "log1p", "erf", "sinh", "cosh", "tan"), 20.0),
    **dict.fromkeys(("asin", "acos", "atan", "asinh", "acosh", "atanh"), 24.0),
    **dict.fromkeys(("sigmoid", "silu", "softplus", "elu", "mish"), 18.0),
    **dict.fromkeys(("gelu", "gelu_tanh"), 20.0),
    "tanh": 16.0,
    **dict.fromkeys(("mod", "fmod"), 16.0),
    **dict.fromkeys(("atan2", "erfinv"), 24.0),
    **dict.fromkeys(("lgamma", "lgamma_gradient"), 40.0),
    "pow": 72.0,  # fitted: elementwise rows of P100, which it bounds there
}
# Of `pow` by a number, those that PyTorch has shorter code for: aten/src/ATen/native/cuda/
# PowKernel.cu. (No measured row has such an exponent.)
POWERS = {2.0: 1.0, 3.0: 2.0, -2.0: 9.0, -1.0: 8.0, 0.5: 8.0, -0.5: 8.0}
# The same in a CPU's SIMD loop, where not as many: measured, in what else an instruction takes, on
# an AMD EPYC (Zen 5) under PyTorch 2.13 (specs/measurements/cpu-epyc-zen5.csv). PyTorch has exp,
# log, sin, erf and tanh to the last bit (SLEEF, MKL), and a shorter exp in silu, sigmoid and gelu.
SIMD_OPS: dict[str, float] = {
    **dict.fromkeys(("silu", "sigmoid"), 5.8),
    **dict.fromkeys(("sin", "cos"), 33.0),
    "gelu": 5.5,
    "div": 1.25,
    "sqrt": 10.0,
    "exp": 19.0,
    "log": 22.0,
    "erf": 32.0,
    "tanh": 68.0,
}
# The gradient of attention takes 2.5 times its operations, at 63 % of the A100's peak where the
# attention reaches 73 % (Dao: FlashAttention-2, 2023, sections 1 and 4.1).
BACKWARD_TIMES = 2.5 * 0.73 / 0.63
SOFTMAX_LANE_OPS = 14.0  # a cell: maximum, subtraction, exponential, sum, division
NORM_LANE_OPS = 8.0  # a cell: mean and variance, subtraction, scale and shift
OWN_LANE_OPS = 4.0  # assumed: a result's addresses, bounds check and store
SCALE_BYTES = {"f4e2m1": 1 / 16, "i4": 2 / 128}  # a weight's share of its scale: nvfp4, int4 groups
CONVERTED = (i4, u4, f4e2m1)  # dtypes of experts' weights that were measured converted
DEQUANTISE_LANE_OPS = 2.0  # assumed: a stored weight unpacked and scaled, two to an instruction


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand in the nest: the dimensions that index it, and the bytes behind one index.

    It has no name, so that kernels that differ in names alone have equal works.
    """

    dims: tuple[str, ...]
    cell_bytes: Number
    nbytes: Number  # what has to move at least: each cell that the nest visits, once
    role: Role


@dataclass(frozen=True)
class Work:
    """What a kernel does, or many kernels of one kind: then numbers are arrays of one length.

    `kind` tells kernels apart that share a nest: of a reduction "softmax", "norm", "sum" or "scan"
    (running sums), of a map "copy", "transpose", "quantise" or "scalar" (a cell at a time, where
    others take vectors). `traits` are further numbers that a family of kernels goes by, and of one
    launched again and again, `times`: how often.
    """

    kernel: str
    dims: tuple[tuple[str, Number], ...]
    reduced: tuple[str, ...]
    operands: tuple[Operand, ...]
    flops: Number  # as the kernel counts them
    products: Number  # flops of the contraction, of the operands' dtype
    lane_ops: Number  # instructions on the vector lanes besides
    dtype: DType
    pipe: Pipe
    accumulator_bits: int = 32
    visible: Number = 1.0  # the share of the nest that runs: causal attention skips the rest
    math: DType | None = None  # what products run in, where that is not `dtype`: TF32
    kind: str = ""
    traits: tuple[tuple[str, Number], ...] = ()
    novel: bool = False  # weights in a dtype that the measurements of its kind have not
    # What it is besides, where a family's formulas take it for one of their kernels: the gradient
    # of one, a resampling for a gather. Measurements of those say nothing of it.
    form: str = ""

    @property
    def sort(self) -> str:
        """What measurements tell kernels apart by, whatever their dtype: `reduce softmax`."""
        name, kind = self.kernel.partition(".")[2], self.kind.replace(".", " ")
        return " ".join(filter(None, (name, "" if kind == name else kind, self.form)))

    @cached_property
    def extents(self) -> dict[str, Number]:
        return dict(self.dims)

    def trait(self, name: str, default: Number = 0.0) -> Number:
        return dict(self.traits).get(name, default)

    @property
    def rate_dtype(self) -> DType:
        """The dtype whose listed rate bounds the arithmetic."""
        return self.math or self.dtype

    @property
    def points(self) -> Number:
        return _product(n for _, n in self.dims)

    @property
    def grid(self) -> tuple[str, ...]:
        """The dimensions that blocks divide among them."""
        return tuple(d for d, _ in self.dims if d not in self.reduced)

    @property
    def nbytes(self) -> Number:
        """Each operand moved once."""
        return sum((o.nbytes for o in self.operands), 0.0)

    @property
    def output_points(self) -> Number:
        return _product(self.extents[d] for d in self.grid)

    @property
    def face(self) -> tuple[str, str]:
        """The two dimensions whose products meet: rows and columns of a contraction's tile."""
        return ("s", "d") if self.kernel == "k.attention" else ("m", "n")

    @property
    def is_contraction(self) -> bool:
        return self.kernel in ("k.gemm", "k.conv", "k.attention", "k.experts")

    def take(self, which: Number) -> Work:
        """The kernels at these places, of many."""
        return self.each(lambda n: np.asarray(n)[which] if np.ndim(n) else n)

    @property
    def likeness(self) -> tuple[Hashable, ...]:
        """All that is no number: works that agree in it go into one of many kernels."""
        return (
            *(self.kernel, self.reduced, self.dtype, self.pipe, self.accumulator_bits),
            *(self.math, self.kind, self.novel, self.form, tuple(d for d, _ in self.dims)),
            *((o.dims, o.role) for o in self.operands),
            *(name for name, _ in self.traits),
        )

    def each(self, change: Callable[[Number], Number]) -> Work:
        """The work with every number changed: to a column, a tensor, a selection of rows."""
        return replace(
            self,
            dims=tuple((d, change(n)) for d, n in self.dims),
            operands=tuple(
                Operand(o.dims, change(o.cell_bytes), change(o.nbytes), o.role)
                for o in self.operands
            ),
            flops=change(self.flops),
            products=change(self.products),
            lane_ops=change(self.lane_ops),
            visible=change(self.visible),
            traits=tuple((name, change(n)) for name, n in self.traits),
        )


def stacked(works: Sequence[Work]) -> Work:
    """One work of many kernels from works of one each, which agree in likeness."""
    rows: list[list[Number]] = []
    for work in works:
        row: list[Number] = []
        work.each(row.append)
        rows.append(row)
    columns = iter(np.array(rows, float).T)
    return works[0].each(lambda _: next(columns))


_where: Callable[..., Number] = np.where


def _product(numbers: Iterable[Number]) -> Number:
    result: Number = 1
    for n in numbers:
        result = result * n
    return result


# ---------------------------------------------------------------------------- from kernel to work


def work_of(op: k.KernelOp) -> Work:
    """The work of a kernel, computed once: an op never changes."""
    known: dict[str, Work] = op.__dict__
    if "_work" not in known:
        known["_work"] = _something(_work(op))
    return known["_work"]


def _something(work: Work) -> Work:
    """A work of no points as one of a single point and a byte an operand, so that no formula
    divides by nothing; it still has no operations."""
    if work.points:
        return work
    return replace(
        work,
        dims=tuple((d, max(n, 1)) for d, n in work.dims),
        operands=tuple(replace(o, nbytes=max(o.nbytes, 1.0)) for o in work.operands),
        traits=tuple((name, n if name in FLAGS else max(n, 1.0)) for name, n in work.traits),
    )


FLAGS = ("append", "transposed")  # traits that are 0 where something is not so


def _work(op: k.KernelOp) -> Work:
    space = op.nest
    match op:
        case k.Conv() if op.window:
            return _weight_gradient(op, space)
        case k.Gemm() | k.Conv() | k.Attention():
            return _contraction(op, space)
        case k.AttentionGradient():
            return _attention_gradient(op)
        case k.ExpertsGradient():
            work = _experts(op.forward())
            return _in_turns(work, op, 2.0)
        case k.Experts():
            return _experts(op)
        case k.Gather() | k.Scatter():
            operands = _indexed(op, space)
        case k.Opaque() | k.Routine():
            operands = tuple(
                Operand(a.dims, a.type.dtype.bits / 8, a.type.nbytes, role)
                for a, role in _accesses(space)
            )
        case _:
            operands = tuple(_operand(a, space, role) for a, role in _accesses(space))
            operands = _sliced(op, operands)
    body = op.body if isinstance(op, k.BodyKernel) else None
    written = min(max((_cells(a) for a in space.writes), default=0), space.points)
    return Work(
        kernel=op.name,
        dims=tuple(space.dims.items()),
        reduced=space.reduced,
        operands=operands,
        flops=op.flops(),
        products=0,
        lane_ops=_lane_ops(body) + OWN_LANE_OPS * written,
        dtype=op.compute_dtype,
        pipe="vector",
        kind=_kind(op),
        traits=(*_simd(body), *_own_traits(op)),
        form=_form(op),
    )


def _own_traits(op: k.KernelOp) -> tuple[tuple[str, Number], ...]:
    """What else a gather, a copy or a routine is told by."""
    match op:
        case k.Routine():
            return steps.traits_of(steps.of(op.routine))
        case k.Gather():
            return _table(op)
        case k.Copy(apart=step) if step > 1:
            cells = op.result_types[0].shape
            row = next((n for n in reversed(cells) if n != 1), 1)
            return (("apart", float(step)), ("row", float(row)))
        case _:
            return ()


def _table(op: k.Gather) -> tuple[tuple[str, Number], ...]:
    """Bytes of what one index names, of the whole table, and of what is read of it again."""
    for node in op.body.nodes:
        match node.op:
            case t.Gather(x=x):
                again = max(0.0, _fetched(node) - x.type.nbytes)
                return (("width", _row(node.op)), ("table", float(x.type.nbytes)), ("again", again))
            case _:
                pass
    return ()


def _row(gather: t.Gather) -> float:
    """Bytes of what one index names."""
    x = gather.x.type
    return prod(x.shape[gather.axis + 1 :]) * x.dtype.bits / 8


def _fetched(node: Node) -> float:
    """Bytes that a gather reads of its table, whole sectors, each index anew."""
    row = _row(node.op) if isinstance(node.op, t.Gather) else 0.0
    return node.results[0].type.nbytes * (max(1.0, SECTOR_BYTES / row) if row else 1.0)


def _kind(op: k.KernelOp) -> str:
    match op:
        case k.Routine():
            return steps.name_of(op.routine)
        case k.Reduce(reduction=t.Softmax()):
            return "softmax"
        case k.Reduce(reduction=t.Normalize() | t.NormalizeGradient()):
            return "norm"
        case k.Reduce(reduction=t.Cumulative()):
            return "scan"
        case k.Reduce():
            return "sum"
        case k.Copy(body=body) if any(isinstance(n.op, t.Transpose) for n in body.nodes):
            return "transpose"
        case _:
            return ""


def _form(op: k.KernelOp) -> str:
    """What a body does that the formulas of its kernel do not go by."""
    ops = [n.op for n in op.body.nodes] if isinstance(op, k.BodyKernel) else []
    if any(isinstance(o, t.NormGradient) for o in ops):
        return "gradient"
    routines = sorted({o.fn for o in ops if isinstance(o, t.Routine)})
    if routines and not isinstance(op, k.Routine):
        return " ".join(routines)
    if isinstance(op, k.Gather):
        fetching = {o.name for o in ops if isinstance(o, t.TensorOp) and o.kernel == op.name}
        if t.Gather.name not in fetching:
            return " ".join(sorted(name.removeprefix("t.") for name in fetching))
    return ""


def _accesses(space: Space) -> list[tuple[Access, Role]]:
    reads: list[tuple[Access, Role]] = [(a, "streamed") for a in space.reads]
    return [*reads, *((a, "written") for a in space.writes)]


def operand_names(op: k.KernelOp) -> tuple[str, ...]:
    """What to call each of a work's operands: the kernel's values, then its results."""
    if isinstance(op, k.AttentionGradient | k.ExpertsGradient):
        op = op.forward()
    reads = op.operands
    if isinstance(op, k.Gemm):
        reads = (op.a, op.b, *op.weights, *op.extra)
    elif isinstance(op, k.Conv):
        reads = (op.x, op.w, *op.weights, *op.extra)
    elif isinstance(op, k.Experts):
        reads = (op.experts.x, op.experts.up)
    writes = len(op.nest.writes)
    results = ["result"] if writes == 1 else [f"result {i}" for i in range(writes)]
    return (*(f"%{v.name}" for v in reads), *results)


def _cells(a: Access) -> int:
    return a.type.size


def _operand(a: Access, space: Space, role: Role, inner: int = 1) -> Operand:
    """`inner` cells lie behind one index; a nest of fewer points than cells reads only those, one
    of none reads nothing."""
    cell_bytes = inner * a.type.dtype.bits / 8
    if not space.points and role != "written":
        return Operand(a.dims, cell_bytes, 0.0, role)
    visited = cell_bytes * prod(space.dims[d] for d in a.dims)
    return Operand(a.dims, cell_bytes, min(a.type.nbytes, visited), role)


def _of_blocks(operand: Operand, space: Space) -> Operand:
    """What a prologue reads beside the weight: of a scale that serves a block, a tile holds one,
    not one for each cell."""
    cells = prod(space.dims[d] for d in operand.dims)
    return replace(operand, cell_bytes=min(operand.cell_bytes, operand.nbytes / max(cells, 1)))


def _sliced(op: k.KernelOp, operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
    """Operands that the body slices are read as far as its slices go: the gates of a cell."""
    read: dict[Value, float] = {}
    for node in op.body.nodes if isinstance(op, k.Map) else ():
        if isinstance(node.op, t.Slice):
            read[node.op.x] = read.get(node.op.x, 0.0) + node.results[0].type.nbytes
    if not read or not isinstance(op, k.Map):
        return operands
    found = list(operands)
    for i, v in enumerate(op.body.inputs):
        if v in read:
            found[i] = replace(found[i], nbytes=min(v.type.nbytes, read[v]))
    return tuple(found)


def _indexed(op: k.Gather | k.Scatter, space: Space) -> tuple[Operand, ...]:
    """A gather reads as many cells of its table as it gives, whole sectors; a scatter touches as
    many cells of its tensor as it is given, in place: reads them only to combine. One into zeros
    writes those too."""
    table: dict[str, float] = {}  # body input → bytes read
    touched: dict[int, float] = {}  # result → bytes written
    for node in op.body.nodes:
        match node.op:
            case t.Gather(x=x) | t.GatherElements(x=x) | t.GatherND(x=x):
                table[x.name] = min(x.type.nbytes, _fetched(node))
            case t.Resize(x=x) as resize:
                table[x.name] = min(x.type.nbytes, resize.taps * node.results[0].type.nbytes)
            case (
                t.ScatterElements(x=x, updates=u, combine=c)
                | t.ScatterND(x=x, updates=u, combine=c)
            ):
                table[x.name] = 0.0 if c == "none" else float(u.type.nbytes)
                filled = 0.0 if x in op.body.inputs else float(x.type.nbytes)
                for i, v in enumerate(op.body.outputs):
                    if v == node.results[0]:
                        touched[i] = filled + u.type.nbytes
            case _:
                pass
    inputs = [v.name for v in op.body.inputs]
    found: list[Operand] = []
    for i, (a, role) in enumerate(_accesses(space)):
        operand = _operand(a, space, role)
        nbytes = operand.nbytes
        if role == "written":
            nbytes = touched.get(i - len(space.reads), nbytes)
        elif i < len(inputs):
            nbytes = table.get(inputs[i], nbytes)
        found.append(Operand(a.dims, operand.cell_bytes, nbytes, role))
    return tuple(found)


def _contraction(op: k.Gemm | k.Conv | k.Attention, space: Space) -> Work:
    operands: list[Operand] = []
    for i, (a, role) in enumerate(_accesses(space)):
        inner = 1
        if isinstance(op, k.Attention) and i < 2:
            inner = a.type.shape[-1]  # the head's own extent is no dimension of q and k
            role = "held" if i == 0 else role
        if role == "streamed" and set(a.dims) & set(space.reduced):
            role = "staged"
        operand = _operand(a, space, role, inner)
        if not isinstance(op, k.Attention) and 2 <= i < 2 + len(op.weights):
            operand = _of_blocks(operand, space)
        operands.append(operand)
    extra = _lane_ops(op.epilogue)
    visible, narrow, accumulator_bits, kind = 1.0, False, 32, ""
    traits: tuple[tuple[str, Number], ...] = ()
    if isinstance(op, k.Attention):
        scores = prod(op.q.type.shape[:-1]) * op.k.type.shape[-2]
        visible = visible_share(op)
        products = 2 * scores * (op.q.type.shape[-1] + op.v.type.shape[-1])
        extra += SOFTMAX_LANE_OPS * scores * visible
        if op.softcap:
            extra += LANE_OPS["tanh"] * scores * visible
        heads, groups = op.q.type.shape[-3], op.k.type.shape[-3]
        keys = op.k.type.shape[-2]
        reach = keys if op.window is None else min(keys, op.window + 1)
        traits = (
            ("head", float(op.q.type.shape[-1])),
            ("group", heads / max(groups, 1)),
            ("kv_heads", float(groups)),
            ("reach", float(reach)),
            ("append", 0.0),
        )
        if op.sdpa:
            traits = (*traits, (call_of(op), 1.0))
            visible = 1.0 if is_masked(op) else visible
    else:
        products = 2 * space.points
        kind = _scales(op)
        if kind != "block scales":  # whose measurements have them in the steps
            extra += _lane_ops(op.prologue)
        accumulator_bits = op.acc.bits
        # A convolution with a few channels a group does not fill a matrix instruction: libraries
        # run it on the lanes.
        narrow = isinstance(op, k.Conv) and min(space.dims["n"], space.dims["k"]) < 8
        if isinstance(op, k.Conv):
            traits = _window(op)
        elif op.between is not None:
            traits = (("between", float(op.between)),)
    return Work(
        kernel=op.name,
        dims=tuple(space.dims.items()),
        reduced=space.reduced,
        operands=tuple(operands),
        flops=op.flops(),
        products=products,
        lane_ops=extra,
        dtype=op.compute_dtype,
        pipe="vector" if narrow else "tensor",
        accumulator_bits=accumulator_bits,
        visible=visible,
        math=op.math,
        kind=kind,
        traits=(*traits, *_simd(op.epilogue)),
        form="transposed" if isinstance(op, k.Conv) and op.transposed else "",
    )


def _weight_gradient(op: k.Conv, space: Space) -> Work:
    """The gradient of a convolution's weights as the product it is, whose sum may be split; with a
    few channels a group as the convolution itself, which takes as many operations."""
    if min(space.dims["n"], space.dims["m"]) >= 8:
        product = _contraction(op, space)
        return replace(product, kernel="k.gemm", traits=(), form="of a convolution's weights")
    w = Value("w", op.direct().result_types[0])
    parts = (op.strides, op.low, op.high, op.dilations, op.groups)
    forward = k.Conv(op.x, w, *parts, math=op.math)
    return replace(_contraction(forward, forward.nest), form="of weights")


def _attention_gradient(op: k.AttentionGradient) -> Work:
    """So many times the attention itself."""
    forward = op.forward()
    return _in_turns(_contraction(forward, forward.nest), op, BACKWARD_TIMES)


def _in_turns(work: Work, op: k.KernelOp, times: float) -> Work:
    """A gradient as so many times the kernel itself, but with its own flops and operands."""
    own = sum(float(a.type.nbytes) for a in (*op.nest.reads, *op.nest.writes))
    traits = (*work.traits, ("times", times), ("operand bytes", own))
    return replace(work, flops=op.flops(), traits=traits, form="gradient")


def _window(op: k.Conv) -> tuple[tuple[str, Number], ...]:
    """What an algorithm for convolutions goes by, besides the nest: extents of the input and of the
    window, and the largest stride and dilation."""
    _, _, *extents = op.x.type.shape
    w = op.w.type.shape
    return (
        ("cells", float(prod(extents))),
        ("window", float(prod(w[2:]))),
        ("widest", float(max(w[2:], default=1))),
        ("stride", float(max(op.strides, default=1))),
        ("dilation", float(max(op.dilations, default=1))),
        ("transposed", float(op.transposed)),
    )


def _experts(op: k.Experts) -> Work:
    """Weights are read as they are stored, scales and biases with them."""
    mix = op.experts
    (tokens, hidden), topk = mix.x.type.shape, mix.which.type.shape[1]
    stored = op.stored
    weight = max(stored, key=lambda v: v.type.size).type.dtype
    work = experts(
        *(tokens, hidden, mix.inter, topk, mix.up.type.shape[0], op.compute_dtype),
        weight=weight,
        gated=mix.is_gated,
        skew=mix.skew,
        block=op.compute_dtype.bits == 8 and any(map(_is_of_blocks, stored)),
    )
    x, w, y = work.operands
    cells = sum(v.type.size for v in mix.weights)
    cell = sum(v.type.nbytes for v in stored) / max(cells, 1)
    read = w.nbytes / w.cell_bytes * cell
    operands = (x, replace(w, cell_bytes=cell, nbytes=read), y)
    return replace(work, operands=operands, flops=op.flops(), math=op.math)


def _is_of_blocks(v: Value) -> bool:
    """Whether what an expert's weights are made from is the scales [experts, rows, columns] of
    blocks along what is summed: a column each, where there are several."""
    return v.type.dtype.bits > 8 and v.type.rank == 3 and v.type.shape[-1] > 1


def _scales(op: k.Gemm | k.Conv) -> str:
    """What the scales of a product of 8-bit numbers are given for, as its factors are called:
    blocks of the weight, rows of the left operand, or nothing that a kernel is measured with."""
    if not isinstance(op, k.Gemm) or op.a.type.dtype.bits != 8 or op.right.dtype.bits != 8:
        return ""
    if op.prologue and any(isinstance(node.op, t.Pointwise) for node in op.prologue.nodes):
        return "block scales"
    rows = (*op.a.type.shape[:-1], 1)
    return "row scales" if any(v.type.shape == rows for v in op.extra) else ""


# How PyTorch's attention is called: as FlashAttention takes it; as cuDNN alone does, with a mask or
# heads of keys and values that differ; with heads of more cells than either takes (sdp_utils.cpp).
CALLS = ("sdpa", "odd sdpa", "wide sdpa")
FLASH_HEAD = 256


def call_of(op: k.Attention) -> str:
    """Which of `CALLS` it is."""
    heads = {op.q.type.shape[-1], op.v.type.shape[-1]}
    if max(heads) > FLASH_HEAD:
        return "wide sdpa"
    return "odd sdpa" if is_masked(op) or len(heads) > 1 else "sdpa"


def is_masked(op: k.Attention) -> bool:
    """Whether PyTorch's attention is given a mask: its own, or one that says what its flag for a
    square causal one cannot, a window or a past."""
    past = op.causal and op.offset != 0 and op.q.type.shape[-2] > 1
    return op.mask is not None or op.window is not None or past


def visible_share(op: k.Attention) -> float:
    """The share of scores that a causal mask and a window leave."""
    scores = op.q.type.shape[-2] * op.k.type.shape[-2]
    return op.direct().seen / scores if scores else 1.0


def _lane_ops(body: Graph | None) -> float:
    """Instructions of a pointwise or reducing body, as the lanes run them."""
    total = 0.0
    for node in body.nodes if body else ():
        match node.op:
            case t.Map(fn=fn, imm=imm):
                each = POWERS.get(imm[0]) if fn == "pow" and len(imm) == 1 else None
                total += (lane_ops(fn) if each is None else each) * node.results[0].type.size
            case t.Cast() | t.Bitcast():
                total += node.results[0].type.size
            case t.Softmax(x=x):
                total += SOFTMAX_LANE_OPS * x.type.size
            case op:
                total += op.flops()
    return total


def _simd(body: Graph | None) -> tuple[tuple[str, Number], ...]:
    """As a trait, the instructions of a body that a CPU takes beyond those of GPUs' lanes."""
    nodes = body.nodes if body else ()
    maps = ((n.op.fn, n.results[0].type.size) for n in nodes if isinstance(n.op, t.Map))
    return beyond_lanes(maps)


def beyond_lanes(maps: Iterable[tuple[str, Number]]) -> tuple[tuple[str, Number], ...]:
    """The trait `simd ops` of functions of so many cells: empty where a CPU takes as many."""
    beyond = [(SIMD_OPS[fn] - lane_ops(fn)) * n for fn, n in maps if fn in SIMD_OPS]
    return (("simd ops", sum(beyond)),) if beyond else ()


def lane_ops(fn: str) -> float:
    """Instructions that a scalar function costs a cell on a GPU's lanes."""
    return LANE_OPS.get(fn, SCALARS[fn].flops)


# ---------------------------------------------------------------------------- from extents


def gemm(
    m: Number,
    n: Number,
    depth: Number,
    dtype: DType,
    *,
    b: Number = 1,
    out: DType | None = None,
    weight: DType | None = None,
    bias: bool = False,
    math: DType | None = None,
) -> Work:
    """c[b, m, n] = a[b, m, k] · w[b, k, n], with k = `depth`: a `k.gemm` with these extents.

    `weight` is the dtype the right operand is stored in, where that is not what is multiplied: then
    the lanes convert it on its way into the tile.
    """
    out = out or dtype
    stored = (weight or dtype).bits / 8
    operands = [
        Operand(("b", "m", "k"), dtype.bits / 8, b * m * depth * dtype.bits / 8, "staged"),
        Operand(("b", "k", "n"), stored, b * depth * n * stored, "staged"),
        Operand(("b", "m", "n"), out.bits / 8, b * m * n * out.bits / 8, "written"),
    ]
    if bias:
        operands.insert(2, Operand(("n",), out.bits / 8, n * out.bits / 8, "streamed"))
    lane_ops = b * m * n * (bias + (out != f32))
    if weight is not None and weight != dtype:
        lane_ops = lane_ops + b * depth * n * DEQUANTISE_LANE_OPS
    return Work(
        kernel="k.gemm",
        dims=(("b", b), ("m", m), ("n", n), ("k", depth)),
        reduced=("k",),
        operands=tuple(operands),
        flops=2 * b * m * n * depth + lane_ops,
        products=2 * b * m * n * depth,
        lane_ops=lane_ops,
        dtype=dtype,
        pipe="tensor",
        math=math,
    )


def conv(
    batch: Number,
    channels: Number,
    size: Sequence[Number],
    filters: Number,
    window: Sequence[Number],
    dtype: DType,
    *,
    stride: Number = 1,
    dilation: Number = 1,
    padding: Number = 0,
    groups: Number = 1,
    transposed: bool = False,
) -> Work:
    """A convolution of [batch, channels, *size] by `filters` of `window`, in as many dimensions as
    these have: a `k.conv` with these extents."""
    reach = [dilation * (r - 1) + 1 for r in window]
    result = [(n + 2 * padding - r) // stride + 1 for n, r in zip(size, reach, strict=True)]
    if transposed:
        result = [(n - 1) * stride - 2 * padding + r for n, r in zip(size, reach, strict=True)]
    cells, taps, cells_out = _product(size), _product(window), _product(result)
    m, n, depth = batch * cells_out, filters // groups, channels // groups * taps
    if transposed:
        m, n, depth = batch * cells, filters // groups * taps, channels // groups
    cell = dtype.bits / 8
    lane_ops = batch * filters * cells_out * (dtype != f32)
    narrow = bool(np.all(np.minimum(n, depth) < 8))
    widest = window[0]
    for extent in window[1:]:
        widest = np.maximum(widest, extent)
    return Work(
        kernel="k.conv",
        dims=(("b", groups), ("m", m), ("n", n), ("k", depth)),
        reduced=("k",),
        operands=(
            Operand(("b", "m", "k"), cell, batch * channels * cells * cell, "staged"),
            Operand(("b", "n", "k"), cell, groups * n * depth * cell, "staged"),
            Operand(("b", "m", "n"), cell, batch * filters * cells_out * cell, "written"),
        ),
        flops=2 * groups * m * n * depth + lane_ops,
        products=2 * groups * m * n * depth,
        lane_ops=lane_ops,
        dtype=dtype,
        pipe="vector" if narrow else "tensor",
        traits=(
            ("cells", cells),
            ("window", taps),
            ("widest", widest),
            ("stride", stride),
            ("dilation", dilation),
            ("transposed", float(transposed)),
        ),
        form="transposed" if transposed else "",
    )


def attention(
    batch: Number,
    heads: Number,
    queries: Number,
    keys: Number,
    head: Number,
    dtype: DType,
    *,
    value: Number | None = None,
    kv_heads: Number | None = None,
    kv_dtype: DType | None = None,
    causal: bool = False,
    window: Number = 0,
    out: DType | None = None,
    shared: bool = False,
    append: Number = False,
    stack: str = "",
) -> Work:
    """softmax(q·kᵀ)·v of [batch, heads, queries, head] on [batch, kv_heads, keys, head]: a
    `k.attention` with these extents.

    Values have `value` cells a head, or as many as keys. A causal mask lets the last query see the
    last key; `window` is how many keys a query sees at most (0: all). `shared`: the values are a
    part of the keys, as in latent attention. `append`: the call also writes its own keys and values
    to a cache. `stack` names the library, where it is known.
    """
    value = head if value is None else value
    kv_heads = heads if kv_heads is None else kv_heads
    q_cell, kv_cell = dtype.bits / 8, (kv_dtype or dtype).bits / 8
    out_cell = (out or dtype).bits / 8
    v_cell = 0.0 if shared else kv_cell
    scores = batch * heads * queries * keys
    visible = visible_of(queries, keys, causal, window)
    width = _where(np.greater(window, 0), window, keys)
    seen: Number = np.minimum(keys, width + queries - 1)  # by some query
    rows = batch * heads * queries
    lane_ops = SOFTMAX_LANE_OPS * scores * visible
    products = 2 * scores * (head + value)
    return Work(
        kernel="k.attention",
        dims=(("b", batch), ("h", heads), ("s", queries), ("e", value), ("d", keys)),
        reduced=("d",),
        operands=(
            Operand(("b", "h", "s"), q_cell * head, rows * head * q_cell, "held"),
            Operand(
                ("b", "h", "d"), kv_cell * head, batch * kv_heads * seen * head * kv_cell, "staged"
            ),
            Operand(
                ("b", "h", "d", "e"), v_cell, batch * kv_heads * seen * value * v_cell, "staged"
            ),
            Operand(("b", "h", "s", "e"), out_cell, rows * value * out_cell, "written"),
        ),
        flops=products * visible + lane_ops,
        products=products,
        lane_ops=lane_ops,
        dtype=dtype,
        pipe="tensor",
        visible=visible,
        kind=stack,
        traits=(
            ("head", head),
            ("group", heads / kv_heads),
            ("kv_heads", kv_heads),
            ("reach", np.minimum(keys, width)),
            ("append", batch * kv_heads * queries * (head + value) * kv_cell * append),
        ),
    )


def visible_of(queries: Number, keys: Number, causal: bool, window: Number = 0) -> Number:
    """The share of scores that a causal mask, aligned at the end, and a window leave."""
    if not causal:
        return 1.0 + 0.0 * queries
    before = keys - queries  # keys that even the first query sees
    seen = before * queries + queries * (queries + 1) / 2
    width = _where(np.greater(window, 0), window, keys)
    # Queries whose reach the window cuts: the last sees `over` keys too many, each one before it
    # one fewer.
    over: Number = np.maximum(keys - width, 0)
    cut: Number = np.minimum(over, queries)
    return (seen - cut * (2 * over - cut + 1) / 2) / (queries * keys)


def pointwise(
    cells: Number,
    reads: Sequence[DType],
    writes: Sequence[DType],
    *,
    ops: float = 1.0,
    kind: str = "",
) -> Work:
    """A map over `cells`: every operand has that many, and each cell takes `ops` instructions
    besides its own addresses and stores."""

    def operand(dtype: DType, role: Role) -> Operand:
        return Operand(("i",), dtype.bits / 8, cells * (dtype.bits / 8), role)

    return Work(
        kernel="k.copy" if kind in ("copy", "transpose") else "k.map",
        dims=(("i", cells),),
        reduced=(),
        operands=(
            *(operand(d, "streamed") for d in reads),
            *(operand(d, "written") for d in writes),
        ),
        flops=cells,
        products=0,
        lane_ops=cells * (ops + OWN_LANE_OPS),
        dtype=max((*reads, *writes), key=lambda d: d.bits),
        pipe="vector",
        kind=kind,
    )


def mapped(fn: str, cells: Number, reads: Sequence[DType], out: DType) -> Work:
    """A map of one scalar function."""
    found = pointwise(cells, reads, (out,), ops=lane_ops(fn))
    return replace(found, traits=beyond_lanes([(fn, cells)]))


def rows(
    count: Number,
    length: Number,
    dtype: DType,
    kind: str,
    *,
    parameters: int = 0,
    ops: float | None = None,
) -> Work:
    """A reduction of `count` rows of `length`: a "softmax" or a "norm" that writes them (an "rms"
    norm by a kernel that takes a cell at a time), or a "sum" that writes a cell a row. `parameters`
    are operands of one row."""
    cell, cells = dtype.bits / 8, count * length
    written = count if kind == "sum" else cells
    each = {"softmax": SOFTMAX_LANE_OPS, "norm": NORM_LANE_OPS, "rms": 4.0, "sum": 1.0}[kind]
    each = each if ops is None else ops
    kept = ("o",) if kind == "sum" else ("o", "r")
    return Work(
        kernel="k.reduce",
        dims=(("o", count), ("r", length)),
        reduced=("r",),
        operands=(
            Operand(("o", "r"), cell, cells * cell, "streamed"),
            *(Operand(("r",), cell, length * cell, "streamed") for _ in range(parameters)),
            Operand(kept, cell, written * cell, "written"),
        ),
        flops=cells * each,
        products=0,
        lane_ops=cells * each + OWN_LANE_OPS * written,
        dtype=dtype,
        pipe="vector",
        kind=kind,
    )


def gather(
    count: Number, width: Number, dtype: DType, table_rows: Number, *, bag: Number = 1
) -> Work:
    """`count` rows of `width` cells, each the sum of `bag` rows that are read where 64-bit indices
    say in a table of `table_rows`."""
    cell = dtype.bits / 8
    cells = count * width
    table = table_rows * width * cell
    fetched = bag * cells * cell * np.maximum(1.0, SECTOR_BYTES / (width * cell))
    return Work(
        kernel="k.gather",
        dims=(("i", cells),),
        reduced=(),
        operands=(
            Operand(("i",), cell, np.minimum(table, fetched), "streamed"),
            Operand(("i",), 8.0, count * bag * 8.0, "streamed"),
            Operand(("i",), cell, cells * cell, "written"),
        ),
        flops=(bag - 1) * cells,
        products=0,
        lane_ops=(OWN_LANE_OPS + bag - 1) * cells,
        dtype=dtype,
        pipe="vector",
        traits=(
            ("width", width * cell),
            ("table", table),
            ("again", np.maximum(0.0, fetched - table)),
        ),
    )


def top_k(rows: Number, length: Number, found: Number, dtype: DType) -> Work:
    """The `found` largest cells of each of `rows`, in order, and where they were."""
    cell = dtype.bits / 8

    def one(rows: float, length: float, found: float) -> Work:
        return Work(
            kernel="k.routine",
            dims=(("i", rows * length),),
            reduced=(),
            operands=(
                Operand(("i",), cell, rows * length * cell, "streamed"),
                Operand(("i",), cell, rows * found * cell, "written"),
                Operand(("i",), 8.0, rows * found * 8.0, "written"),
            ),
            flops=rows * length * int(max(found - 1, 1)).bit_length(),
            products=0,
            lane_ops=OWN_LANE_OPS * rows * found,
            dtype=dtype,
            pipe="vector",
            kind="topk",
            traits=steps.traits_of(steps.top_k(rows, length, found, cell)),
        )

    shapes = np.broadcast_arrays(rows, length, found)
    if not shapes[0].ndim:
        return one(*map(float, shapes))
    return stacked([one(*map(float, row)) for row in np.stack(shapes, axis=-1)])


def experts(
    tokens: Number,
    hidden: Number,
    inter: Number,
    topk: Number,
    experts: Number,
    dtype: DType,
    *,
    weight: DType | None = None,
    gated: bool = True,
    shards: Number = 1,
    ranks: Number = 1,
    skew: Number = 0.0,
    stack: str = "cutlass",
    block: bool = False,
    strays: bool = False,
) -> Work:
    """A mixture of experts on one rank, from the router's choice to its sum: `tokens` of `hidden`
    cells, each to `topk` of `experts`, which are `inter` wide and lie on `ranks` ranks; each expert
    is cut in `shards`, and `gated` by a second matrix.

    `weight` is the dtype the weights are stored in, where that is not what is multiplied; `block`
    says that scales belong to blocks along k. `skew`: see `routing.shares`. With `strays`, the rank
    is given the tokens it has an expert for alone, and computes their rows for other ranks' experts
    too, as one more expert's: so SGLang up to 0.5.10 was measured, on GPUs before Blackwell.
    Between kernels rows lie in 16 bits, or as wide as they are multiplied.
    """
    width, local = inter / shards, experts // ranks
    share: dict[str, Number] = {**shares(tokens, topk, experts, ranks, skew)}
    stored = weight or dtype
    cell = stored.bits / 8 + SCALE_BYTES.get(stored.name, 0.0)
    into = 2.0 if gated else 1.0
    sent: Number = tokens * topk * 1.0
    if strays:
        sent, share = with_strays(share, sent, topk, ranks)
    weights = share["active"] * (into + 1) * width * hidden * cell
    row_cell = max(dtype.bits, 16) / 8
    moved = tokens * hidden * row_cell
    products = 2 * share["rows"] * (into + 1) * width * hidden
    return Work(
        kernel="k.experts",
        dims=(("b", local), ("m", sent / experts), ("n", width), ("k", hidden)),
        reduced=("k",),
        operands=(
            Operand(("m", "k"), row_cell, moved, "staged"),
            Operand(("b", "n", "k"), cell, weights, "staged"),
            Operand(("m", "k"), row_cell, moved, "written"),
        ),
        flops=products,
        products=products,
        lane_ops=0.0 * products,
        dtype=dtype,
        pipe="tensor",
        kind=f"{stack} {scheme_of(dtype, weight, block)}",
        novel=stored not in (dtype, *CONVERTED),
        traits=(("tokens", tokens), ("sent", sent), ("into", into), *share.items()),
    )


def scheme_of(dtype: DType, weight: DType | None, block: bool) -> str:
    """What is multiplied: 16, 8 or 4 bits, with scales by blocks along k, or weights converted."""
    converted = weight is not None and weight != dtype
    return f"f{min(dtype.bits, 16)}" + " block" * block + " converted" * converted
