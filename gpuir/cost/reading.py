"""The work of an IR kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil, prod

from gpuir.cost import steps
from gpuir.cost.lanes import (
    LANE_OPS,
    OWN_LANE_OPS,
    PLACE_LANE_OPS,
    POWERS,
    SOFTMAX_LANE_OPS,
    VOLUME_LANE_OPS,
    WINDOW_LANE_OPS,
    lane_ops,
    simd_ops,
)
from gpuir.cost.lookup import rows_missed, rows_named
from gpuir.cost.pixels import threads_of
from gpuir.cost.routing import mixture
from gpuir.cost.sheet import Number
from gpuir.cost.sized import attended, by_library, contracted, pointwise, shape_of
from gpuir.cost.work import (
    BY_CELL,
    ODD_CHANNELS,
    SECTOR_BYTES,
    CellByCell,
    Channels,
    ConvShape,
    Detail,
    Heads,
    Lookup,
    Looped,
    Operand,
    Staging,
    WeightBytes,
    Windowed,
    Work,
)
from gpuir.ir.graph import Access, Node, Space, Value
from gpuir.ir.lazy import once
from gpuir.ir.sizes import real
from gpuir.ir.types import f32
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t

# The gradient of attention takes 2.5 times its operations, at 63 % of the A100's peak where the
# attention reaches 73 % (Dao: FlashAttention-2, 2023, sections 1 and 4.1).
BACKWARD_TIMES = 2.5 * 0.73 / 0.63


@once
def work_of(op: k.KernelOp) -> Work:
    """The work of a kernel."""
    return _something(_work(op))


def among(op: k.KernelOp, weights: k.HeldWeights) -> Work:
    """The work of a kernel on a CPU, in a model that has these weights."""
    own = sum(v.type.nbytes for v in {*op.operands} & weights.values)
    if not weights.nbytes or id(op) in weights.inside:
        return work_of(op)
    return replace(work_of(op), weights=WeightBytes(real(own), real(weights.nbytes - own)))


def _something(work: Work) -> Work:
    """A work of no points as one of a single point and a byte an operand, so that no formula
    divides by nothing; it still has no operations."""
    if work.points:
        return work
    detail = work.detail and work.detail.each(lambda n: max(n, 1.0))
    if isinstance(detail, Heads):
        detail = replace(detail, append=0.0)  # nothing is written to a cache
    return replace(
        work,
        detail=detail,
        dims=tuple((d, max(n, 1)) for d, n in work.dims),
        operands=tuple(replace(o, nbytes=max(o.nbytes, 1.0)) for o in work.operands),
    )


def _work(op: k.KernelOp) -> Work:
    space = op.nest
    match op:
        case k.Conv() if isinstance(op.product, t.ConvWeightGradient):
            return _weight_gradient(op, op.product, space)
        case k.Product():
            return _contraction(op, space)
        case k.AttentionGradient():
            return _attention_gradient(op)
        case k.ExpertsGradient():
            return _experts_gradient(op)
        case k.Experts():
            return _experts(op)
        case k.Gather() | k.Scatter():
            operands = _indexed(op, space)
        case k.Opaque() | k.Routine():
            operands = tuple(
                Operand(a.dims, a.type.dtype.bits / 8, a.type.nbytes, staging)
                for a, staging in _accesses(space)
            )
        case _:
            operands = tuple(_operand(a, space, staging) for a, staging in _accesses(space))
            operands = _sliced(op, operands)
    body = op.body.nodes if isinstance(op, k.BodyKernel) else ()
    written = min(max((_cells(a) for a in space.writes), default=0), space.points)
    return Work(
        kernel=op.name,
        dims=tuple(space.dims.items()),
        reduced=space.reduced,
        operands=operands,
        flops=op.flops(),
        products=op.flops() if op.pipe == "tensor" else 0,
        lane_ops=(
            OWN_LANE_OPS * written + (_lane_ops(body) + _pooling_ops(op)) * (op.pipe == "vector")
        ),
        dtype=op.compute_dtype,
        pipe=op.pipe,
        kind=_kind(op),
        detail=_detail(op),
        simd_ops=_simd(body),
        form=_form(op),
    )


def _detail(op: k.KernelOp) -> Detail | None:
    """What else the formulas of a gather, a copy or a routine go by."""
    match op:
        case k.Routine():
            return replace(steps.of(op.routine), threads=threads_of(op))
        case k.Opaque():
            return threads_of(op)
        case k.Gather(library=library) if library:
            return threads_of(op)
        case k.Gather():
            return next(
                (_lookup(n, n.op) for n in op.body.nodes if isinstance(n.op, t.Gather)), None
            )
        case k.Reduce():
            return _channels(op)
        case k.Pool(library=library) if library and (threads := threads_of(op)):
            return threads
        case k.Pool() if is_pooled_by_cells(op):
            return Windowed(real(prod(op.window.window[:-1])))
        case k.Copy(apart=step) | k.Map(apart=step) if step:
            type = op.result_types[0]
            cells = [type.shape[axis] for axis in type.order or range(type.rank)]
            row = next((n for n in reversed(cells) if n != 1), 1)
            return CellByCell(real(step), real(row))
        case _:
            return None


def _lookup(node: Node, op: t.Gather) -> Lookup:
    table, fetched = real(op.x.type.nbytes), _fetched(node)
    named, missed = _named(op, fetched)
    if not op.spread:
        return Lookup(_row(op), table, again=max(0.0, fetched - table))
    even = _named(replace(op, spread="uniform"), fetched)[0]
    again = max(0.0, fetched - named)
    fewer = max(0.0, even - named)
    return Lookup(_row(op), table, again, named=named, missed=missed, fewer=fewer)


def _named(op: t.Gather, fetched: float) -> tuple[float, tuple[float, ...]]:
    """Bytes of the rows that a gather's indices name, and those that a cache misses again. Where
    nobody says how indices spread, each names a row of its own while there are any."""
    lookups = op.indices.type.size
    if not op.spread or not lookups:
        return min(real(op.x.type.nbytes), fetched), ()
    drawn = op.spread, lookups, op.x.type.shape[op.axis]
    each = fetched / lookups
    named = min(real(op.x.type.nbytes), rows_named(*drawn) * each)
    return named, tuple(each * n for n in rows_missed(*drawn))


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
        case k.Reduce(library="aten"):
            return "group norm"
        case k.Reduce(reduction=t.Normalize() | t.NormalizeGradient()):
            return "norm"
        case k.Reduce(reduction=t.Cumulative()):
            return "scan"
        case k.Reduce():
            return "sum"
        case k.Pool() if is_pooled_by_cells(op):
            return "scalar"
        case k.Copy(body=body) if any(isinstance(n.op, t.Transpose) for n in body.nodes):
            return "transpose"
        case _:
            return ""


def _form(op: k.KernelOp) -> str:
    """What a body does that the formulas of its kernel do not go by, and who wrote it."""
    ops = [n.op for n in op.body.nodes] if isinstance(op, k.BodyKernel) else []
    gradient = "gradient" if any(isinstance(o, t.NormGradient) for o in ops) else ""
    library = op.library if isinstance(op, k.Reduce) and op.library != "aten" else ""
    if gradient or library:
        return " ".join(filter(None, (gradient, library)))
    routines = sorted({o.fn for o in ops if isinstance(o, t.Routine)})
    if routines and not isinstance(op, k.Routine):
        return " ".join(routines)
    if isinstance(op, k.Gather):
        fetching = {o.name for o in ops if isinstance(o, t.TensorOp) and o.kernel == op.name}
        if t.Gather.name not in fetching:
            return " ".join(sorted(name.removeprefix("t.") for name in fetching))
    return ""


def _accesses(space: Space) -> list[tuple[Access, Staging]]:
    reads: list[tuple[Access, Staging]] = [(a, "streamed") for a in space.reads]
    return [*reads, *((a, "written") for a in space.writes)]


def operand_names(op: k.KernelOp) -> tuple[str, ...]:
    """What to call each of a work's operands: the kernel's values, then its results."""
    if isinstance(op, k.AttentionGradient | k.ExpertsGradient):
        op = op.forward()
    reads = op.operands
    if isinstance(op, k.Product):
        reads = (*op.factors, *op.weights, *op.extra)
    elif isinstance(op, k.Experts):
        reads = (op.experts.x, op.experts.up)
    writes = len(op.nest.writes)
    results = ["result"] if writes == 1 else [f"result {i}" for i in range(writes)]
    return (*(f"%{v.name}" for v in reads), *results)


def _cells(a: Access) -> int:
    return a.type.size


def _operand(a: Access, space: Space, staging: Staging, inner: int = 1) -> Operand:
    """`inner` cells lie behind one index; a nest of fewer points than cells reads only those, one
    of none reads nothing."""
    cell_bytes = inner * a.type.dtype.bits / 8
    if not space.points and staging != "written":
        return Operand(a.dims, cell_bytes, 0.0, staging)
    visited = cell_bytes * prod(space.dims[d] for d in a.dims)
    return Operand(a.dims, cell_bytes, min(a.type.nbytes, visited), staging)


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
            case t.Gather(x=x) as gather:
                table[x.name] = _named(gather, _fetched(node))[0]
            case t.GatherElements(x=x) | t.GatherND(x=x):
                table[x.name] = min(x.type.nbytes, _fetched(node))
            case t.Resize(x=x) as resize:
                table[x.name] = min(x.type.nbytes, resize.taps * node.results[0].type.nbytes)
            case (t.ScatterElements(x=x, combine=c) | t.ScatterND(x=x, combine=c)) as scatter:
                given = _given(scatter)
                table[x.name] = 0.0 if c == "none" else given
                filled = 0.0 if x in op.body.inputs else real(x.type.nbytes)
                for i, v in enumerate(op.body.outputs):
                    if v == node.results[0]:
                        touched[i] = filled + given
            case _:
                pass
    inputs = [v.name for v in op.body.inputs]
    found: list[Operand] = []
    for i, (a, staging) in enumerate(_accesses(space)):
        operand = _operand(a, space, staging)
        nbytes = operand.nbytes
        if staging == "written":
            nbytes = touched.get(i - len(space.reads), nbytes)
        elif i < len(inputs):
            nbytes = table.get(inputs[i], nbytes)
        found.append(Operand(a.dims, operand.cell_bytes, nbytes, staging))
    return tuple(found)


def _given(op: t.ScatterElements | t.ScatterND) -> float:
    """Bytes of the cells that a scatter changes: as many as it is given, or, where it is stated
    how indices spread, the rows that they name."""
    updates = real(op.updates.type.nbytes)
    if not isinstance(op, t.ScatterND) or not op.spread or not updates:
        return updates
    depth = op.indices.type.shape[-1]
    lookups = op.indices.type.size // max(depth, 1)
    return updates * rows_named(op.spread, lookups, prod(op.x.type.shape[:depth])) / lookups


def _contraction(op: k.Product, space: Space) -> Work:
    operands: list[Operand] = []
    for i, (a, staging) in enumerate(_accesses(space)):
        inner = 1
        if isinstance(op, k.Attention) and i < 2:
            inner = a.type.shape[-1]  # the head's own extent is no dimension of q and k
            staging = "held" if i == 0 else staging
        if staging == "streamed" and set(a.dims) & set(space.reduced):
            staging = "staged"
        operand = _operand(a, space, staging, inner)
        if not isinstance(op, k.Attention) and 2 <= i < 2 + len(op.weights):
            operand = _of_blocks(operand, space)
        operands.append(operand)
    of = _attention if isinstance(op, k.Attention) else _product
    found = of(op, space, operands)  # pyright: ignore[reportArgumentType]
    own = found.lane_ops + _lane_ops(op.epilogue)
    return replace(found, flops=op.flops(), lane_ops=own, math=op.math, simd_ops=_simd(op.epilogue))


def _product(op: k.Product, space: Space, operands: list[Operand]) -> Work:
    kind = _scales(op)
    # whose measurements have them in the steps
    unpacking = 0.0 if kind == "block scales" else _lane_ops(op.prologue)
    found = contracted(op.name, space.dims, operands, op.compute_dtype, unpacking)
    found = replace(found, reduced=space.reduced, kind=kind)
    found = replace(found, accumulator_bits=op.anchor.results[0].type.dtype.bits)
    if isinstance(op, k.Conv):
        found = replace(found, form=_conv_form(op), beside=_conversions(op))
        return _by_cudnn(op, replace(found, detail=_window(op)))
    assert isinstance(op, k.Gemm)
    between = None if op.between is None else Looped(real(op.between))
    return replace(found, detail=between, form=BY_CELL if op.by_cell else "")


def _attention(op: k.Attention, space: Space, operands: list[Operand]) -> Work:
    one = op.product
    heads, groups = one.q.type.shape[-3], one.k.type.shape[-3]
    keys = one.k.type.shape[-2]
    reach = keys if one.window is None else min(keys, one.window + 1)
    if one.block:
        reach = min(keys, one.visited[1] * one.block[1])
        read = one.visited[2] * one.block[1] / max(groups * prod(one.k.type.shape[:-3]) * keys, 1)
        operands[1:3] = [replace(o, nbytes=o.nbytes * min(read, 1.0)) for o in operands[1:3]]
    detail = Heads(
        head=real(one.q.type.shape[-1]),
        group=heads / max(groups, 1),
        kv_heads=real(groups),
        reach=real(reach),
        windowed=float(one.window is not None and not one.block),
        blocked=float(bool(one.block)),
    )
    each = SOFTMAX_LANE_OPS + (LANE_OPS["tanh"] if one.softcap else 0.0)
    density = density_of(op)
    found = attended(space.dims, operands, op.compute_dtype, detail, density, score_ops=each)
    return by_library(found, op.library, is_masked(op))


def _conversions(op: k.Conv) -> tuple[Work, ...]:
    """What cuDNN launches before a kernel that reads channels-last alone: a transpose of each
    operand, weights too, in each call (NVIDIA, Convolutional Layers User's Guide, Tensor Layouts
    in Memory: NCHW vs NHWC; nchwToNhwcKernel in profiles). The result is written as it is to lie,
    by the kernels that have nhwc2nchw in their names: where cuDNN's heuristic, and not
    cudnn.benchmark, takes one that does not, a transpose of it comes behind (nhwcToNchwKernel).
    For groups it has kernels that take images as they lie (conv2d_grouped_direct_kernel)."""
    if op.library != "cudnn" or op.product.groups > 1:
        return ()
    return tuple(
        pointwise(x.size, (x.dtype,), (x.dtype,), ops=0.0, kind="transpose")
        for x in (v.type for v in op.factors)
        if not x.is_channels_last and x.shape[1] > 1 and prod(x.shape[2:]) > 1
    )


def _weight_gradient(op: k.Conv, grad: t.ConvWeightGradient, space: Space) -> Work:
    """The gradient of a convolution's weights as the product it is, whose sum may be split; with a
    few channels a group as the convolution itself, which takes as many operations."""
    if min(space.dims["n"], space.dims["m"]) >= 8:
        product = _contraction(op, space)
        form = "of a convolution's weights"
        return replace(product, kernel="k.gemm", detail=None, simd_ops=0.0, form=form)
    w = Value("w", grad.result_types[0].with_dtype(grad.x.type.dtype))
    conv = t.Conv(
        op.factors[0],
        w,
        strides=grad.strides,
        low=grad.low,
        high=grad.high,
        dilations=grad.dilations,
        groups=grad.groups,
        dtype=f32,
    )
    forward = k.Conv.of(conv, math=op.math, library=op.library)
    return replace(_contraction(forward, forward.nest), form="of weights")


def _attention_gradient(op: k.AttentionGradient) -> Work:
    """So many times the attention itself."""
    forward = op.forward()
    return _in_turns(_contraction(forward, forward.nest), op, BACKWARD_TIMES)


def _in_turns(work: Work, op: k.KernelOp, times: float) -> Work:
    """A gradient as so many times the kernel itself, but with its own flops and operands."""
    own = sum(real(a.type.nbytes) for a in (*op.nest.reads, *op.nest.writes))
    return replace(work, flops=op.flops(), times=times, own_bytes=own, form="gradient")


def _conv_form(op: k.Conv) -> str:
    """What no measured convolution was."""
    conv = op.product
    depthwise = conv.groups > 1 and conv.groups == conv.result_types[0].shape[1]
    transposed = isinstance(conv, t.ConvTranspose)
    odd = op.math is not None and op.library == "cudnn" and op.factors[0].type.shape[1] % 4
    rows = not op.factors[0].type.is_channels_last  # its kernels of channels innermost are TF32's
    few = odd and rows and not transposed and conv.groups == 1 and len(conv.strides) == 2
    words = (
        "depthwise" if depthwise else "",
        "transposed" if transposed else "",
        ODD_CHANNELS if few else "",
    )
    return " ".join(filter(None, words))


# How many times as long convolutions over three axes take in cuDNN as its kernels of two would, in
# f32 and TF32, one group and several: five of KernelBench's programs on seven GPUs, T4 to H100,
# medians of 2.7 to 3.8 by program, and one program of four groups.
VOLUME_TIMES, VOLUME_GROUPS_TIMES, NARROW_TIMES = 3.0, 6.5, 1.6
NARROW = 16  # filters
# And of the gradient form over two: 1.2 to 1.8 on seven GPUs in six versions of four programs.
# With zeros among what it multiplies 1.1 to 5.3, in two programs.
GRADIENT_TIMES, ZEROS_TIMES = 1.5, 2.3


def _by_cudnn(op: k.Conv, work: Work) -> Work:
    """What cuDNN makes of a convolution that its fast kernels do not take as it stands. Of the
    gradient form each cell of the result sums the cells that reach it, one in so many of its window
    as there are strides. With a stride and a dilation matrix units multiply the whole window, zeros
    too (those that skip them are of windows without gaps: cutlass, conv2d_dgrad,
    StrideSupport::kStrided)."""
    conv = op.product
    if op.library != "cudnn" or op.compute_dtype != f32:
        return work
    times = 1.0
    if isinstance(conv, t.ConvTranspose):
        work = _summed_by_result(conv, work)
        times = GRADIENT_TIMES if prod(conv.w.type.shape[2:]) > 1 else 1.0
        times = times if _skips_zeros(conv) else ZEROS_TIMES
    if len(conv.strides) > 2:
        times = VOLUME_GROUPS_TIMES if conv.groups > 1 else VOLUME_TIMES
        if conv.groups == 1 and dict(work.dims)["n"] <= NARROW:
            times = NARROW_TIMES
    return work if times == 1 else replace(work, times=times, own_bytes=work.nbytes)


def _skips_zeros(conv: t.ConvTranspose) -> bool:
    return prod(conv.strides) == 1 or max(conv.dilations) == 1 or len(conv.strides) > 2


def _summed_by_result(conv: t.ConvTranspose, work: Work) -> Work:
    (y,) = conv.result_types
    taps, strides = prod(conv.w.type.shape[2:]), prod(conv.strides)
    zeros = 1 if _skips_zeros(conv) else strides
    dims = {
        **dict(work.dims),
        "m": real(y.shape[0] * prod(y.shape[2:])),
        "n": real(y.shape[1] // conv.groups),
        "k": conv.x.type.shape[1] / conv.groups * taps * zeros / strides,
    }
    shape = replace(work.detail_as(ConvShape), zeros=float(zeros))
    return replace(work, dims=tuple(dims.items()), products=work.products * zeros, detail=shape)


def _window(op: k.Conv) -> ConvShape:
    conv = op.product
    size, window = (tuple(map(real, v.type.shape[2:])) for v in op.factors)
    stride, dilation = (real(max(n, default=1)) for n in (conv.strides, conv.dilations))
    found = shape_of(size, window, stride, dilation, isinstance(conv, t.ConvTranspose))
    return replace(found, library=op.library)


def _experts(op: k.Experts) -> Work:
    """Weights are read as they are stored, scales and biases with them. A rank that has more rows
    than others has those that as many more tokens would give it."""
    mix = op.experts
    (tokens, hidden), topk = mix.x.type.shape, mix.which.type.shape[1]
    tokens = ceil(tokens * mix.imbalance * mix.sent / max(mix.which.type.size, 1))
    stored = op.stored
    weight = max(stored, key=lambda v: v.type.size).type.dtype
    work = mixture(
        *(tokens, hidden, mix.inter, topk, mix.up.type.shape[0] * mix.ranks),
        dtype=op.compute_dtype,
        weight=weight,
        gated=mix.is_gated,
        ranks=mix.ranks,
        skew=mix.skew,
        library=op.library or "cutlass",
        scales="block" if op.compute_dtype.bits == 8 and any(map(is_of_blocks, stored)) else "",
        routed=mix.routed,
    )
    x, w, y = work.operands
    cells = sum(v.type.size for v in mix.weights)
    cell = sum(v.type.nbytes for v in stored) / max(cells, 1)
    read = w.nbytes / w.cell_bytes * cell
    operands = (x, replace(w, cell_bytes=cell, nbytes=read), y)
    return replace(work, operands=operands, flops=op.flops(), math=op.math)


def _experts_gradient(op: k.ExpertsGradient) -> Work:
    """Twice the experts. Of x, dy and dx that is there which was routed there."""
    work = _in_turns(_experts(op.forward()), op, 2.0)
    if work.own_bytes is None or not op.gradient.routed:
        return work
    away = op.gradient.x.type.nbytes - work.operands[0].nbytes
    return replace(work, own_bytes=work.own_bytes - 3 * away)


def is_of_blocks(v: Value) -> bool:
    """Whether what an expert's weights are made from is the scales [experts, rows, columns] of
    blocks along what is summed: a column each, where there are several."""
    return v.type.dtype.bits > 8 and v.type.rank == 3 and v.type.shape[-1] > 1


def _scales(op: k.Product) -> str:
    """What the scales of a product of 8-bit numbers are given for, as its factors are called:
    blocks of the weight, rows of the left operand, or nothing that a kernel is measured with."""
    if not isinstance(op, k.Gemm):
        return ""
    a, b = op.product.a.type, op.product.b.type
    if a.dtype.bits != 8 or b.dtype.bits != 8:
        return ""
    if any(isinstance(node.op, t.Pointwise) for node in op.prologue):
        return "block scales"
    return "row scales" if any(v.type.shape == (*a.shape[:-1], 1) for v in op.extra) else ""


def is_masked(op: k.Attention) -> bool:
    """Whether PyTorch's attention is given a mask: its own, or one that says what its flag for a
    square causal one cannot, a window or a past. A mask of one cell says whether it is called."""
    one = op.product
    past = one.causal and one.offset != 0 and one.q.type.shape[-2] > 1
    masked = one.mask is not None and one.mask.type.size > 1
    return masked or one.window is not None or past


def density_of(op: k.Attention) -> float:
    """The share of scores that a causal mask, a window or the blocks of a mask leave: above 1 where
    whole blocks go beyond the ends of the sequence."""
    one = op.product
    scores = prod(one.q.type.shape[:-1]) * one.k.type.shape[-2]
    return one.computed / scores if scores else 1.0


def _lane_ops(nodes: Iterable[Node]) -> float:
    """Instructions of a pointwise or reducing body, as the lanes run them."""
    total = 0.0
    for node in nodes:
        match node.op:
            case t.Map(fn=fn, imm=imm):
                each = POWERS.get(imm[0]) if fn == "pow" and len(imm) == 1 else None
                if each is None or node.op.args[0].type.dtype.is_complex:
                    each = lane_ops(fn, node.op.args[-1].type.dtype)
                total += each * node.results[0].type.size
            case t.Cast() | t.Bitcast():
                total += node.results[0].type.size
            case t.Softmax(x=x):
                total += SOFTMAX_LANE_OPS * x.type.size
            case op:
                total += op.flops()
    return total


def _channels(op: k.Reduce) -> Channels | None:
    """Of a norm whose statistics are those of channels, or of a compiler's reduction by them."""
    first = op.reduction
    if not isinstance(first, t.Normalize | t.NormGradient) and op.library != "triton":
        return None
    shape, axes = first.x.type.shape, first.reduced_axes()
    if 1 in axes or len(shape) < 2:
        return None
    last = any(v.type.is_channels_last and v.type.shape == shape for v in op.args)
    return Channels(0 in axes, last) if last or 0 in axes else None


def has_indices(op: k.KernelOp) -> bool:
    """Whether a kernel is a pool that gives indices: PyTorch's own."""
    ops = [n.op for n in op.body.nodes] if isinstance(op, k.Pool) else []
    return any(isinstance(o, t.Pool) and o.fn == "argmax" for o in ops)


def is_pooled_by_cells(op: k.KernelOp) -> bool:
    """Whether each cell of a pool has a thread of its own, which goes through its window cell by
    cell: a row's first is fetched when the last row is done (aten/src/ATen/native/cuda/
    DilatedMaxPool2d.cu, max_pool_forward_nchw)."""
    return has_indices(op) and not op.result_types[0].is_channels_last


def _pooling_ops(op: k.KernelOp) -> float:
    """Instructions of PyTorch's pool beside its comparisons."""
    if not isinstance(op, k.Pool):
        return 0.0
    if not has_indices(op):
        window = op.window.window if op.library and len(op.window.window) > 2 else ()
        return VOLUME_LANE_OPS * prod(window) * op.result_types[0].size if window else 0.0
    place = PLACE_LANE_OPS if is_pooled_by_cells(op) else 0.0
    return (WINDOW_LANE_OPS * prod(op.window.window) + place) * op.result_types[0].size


def _simd(nodes: Iterable[Node]) -> Number:
    return simd_ops((n.op.fn, n.results[0].type.size) for n in nodes if isinstance(n.op, t.Map))
