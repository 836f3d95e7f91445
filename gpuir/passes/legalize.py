"""From groups of tensor ops to the kernels a GPU would launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from gpuir.fusion.launch import accumulated, fused, inlined, product
from gpuir.ir.build import Builder, begin
from gpuir.ir.graph import Graph, Level, Loc, Node, Op, Value
from gpuir.ir.strides import Strided
from gpuir.ir.types import DType, f32, f64, i32
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.ops.orders import convolved
from gpuir.ops.strides import apart, packed
from gpuir.ops.vocabulary import find_op
from gpuir.passes.manager import Pass
from gpuir.passes.math import with_math
from gpuir.passes.views import (
    Views,
    Wanted,
    has_few_rows,
    is_layout,
    is_packed,
    memory_order,
    view_of,
)
from gpuir.targets.profile import tf32_rule

MOST_POOLED = 25  # cells of a window
POOLED = "2.11"  # PyTorch's pools, of all releases alike


@dataclass(frozen=True)
class Legalize(Pass):
    """Turns each group into one kernel, chosen by what its body holds; layout groups into views
    where every byte can stay in its place, else into copies.

    A view is free when the strides allow it and all its readers take strides: only the operands of
    matrix products and attention do. Under a profile with `views` those of pointwise, reducing and
    joining kernels do too, and of convolutions where channels are innermost; there results lie in
    memory as operands do, and what wants rows packed copies them first. A transpose that alone
    reads a product's result is written by that kernel in its own order, unless `absorb` is false:
    then it is a copy, as where each operator of a program is run by itself, and no product is
    padded, as compilers do. Neither is done where a product by one matrix, of all rows of a batch,
    would come apart into small ones. With `strides` false operators give each other packed tensors,
    as in onnxruntime: reshapes alone are views, and transposes of the last two axes that products
    read.
    A copy that transposes goes by tiles, unless `tiled` is false: then it and maps of operands that
    lie differently, or broadcast, find one cell after another by strides, as PyTorch's elementwise
    kernels do (aten/src/ATen/native/cuda/CUDALoops.cuh, launch_legacy_kernel).
    With `sdpa` attention is a call of PyTorch's scaled_dot_product_attention, by the kernel of the
    library that `attention` names (`cudnn`) or by what PyTorch chooses, and group norms are its
    kernels; with `triton` reductions are kernels that a compiler wrote for their rows. `images` is
    the release of PyTorch whose kernels resample and pool images, where such do.
    """

    absorb: bool = True
    strides: bool = True
    tiled: bool = True
    sdpa: bool = False
    attention: str = ""
    triton: bool = False
    images: str = ""

    name = "legalize"
    takes = Level.fused
    gives = Level.kernel

    def views(self, g: Graph) -> Views:
        """What is read in place: of a graph that no stack is known for, what libraries read."""
        return Views(self.absorb)

    def run(self, g: Graph) -> Graph:
        kernels = _Legalizer(g, self.views(g), self).run()
        return with_math(kernels, tf32_rule(g))


def is_of_groups(op: t.Reducing) -> bool:
    """Whether it is a norm of groups of channels."""
    return isinstance(op, t.Normalize) and (op.groups or 1) > 1


class _Legalizer:
    def __init__(
        self, g: Graph, views: Views, options: Legalize, inside: bool = False, trip: bool = False
    ):
        self.g, self.views, self.options, self.inside = g, views, options, inside
        self.trip = g.inputs[0] if trip else None
        self.uses = g.uses()
        self.outputs = set(g.outputs)
        self.producers = g.producers()
        self.new: dict[Value, Value] = {}
        self.strided: dict[str, Strided] = {}  # views: they may have gaps
        self.made: dict[tuple[Value, object, tuple[Loc, ...]], Value] = {}  # copies, by order
        self.expanded: dict[Value, Op] = {}  # expansions that are parts of their readers

    def run(self) -> Graph:
        g = self.g
        b = begin(g, Level.kernel)
        b.reserve(v.name for n in g.nodes for v in n.results)
        for node in g.nodes:
            node = self.with_expansions(node)
            if self.is_read_unexpanded(node):
                self.expanded[node.results[0]] = node.op
                b.folded += node.locs
                continue
            node = self.with_packed(node, b)
            op = self.kernel(node)
            results = tuple(
                Value(v.name, type) for v, type in zip(node.results, op.result_types, strict=True)
            )
            self.new.update((o, n) for o, n in zip(node.results, results, strict=True) if o != n)
            b.put(Node(op, results, node.locs))
        outputs = self.returned(b) if self.inside else (self.new.get(v, v) for v in g.outputs)
        return b.finish(outputs)

    def returned(self, b: Builder) -> Iterator[Value]:
        """What a region gives, in the order that whoever reads it was told."""
        for v in self.g.outputs:
            if self.new.get(v, v).type == v.type:
                yield v
                continue
            made = Value(b.names.fresh(f"{v.name}.packed"), v.type)
            node = Node(self.producers[v].op, (made,), self.producers[v].locs)
            b.put(replace(node, op=self.ordered(node, self.new[v], v.type.order)))
            yield made

    def lies(self, x: Value) -> Strided:
        """How a value lies in memory."""
        x = self.new.get(x, x)
        return self.strided[x.name] if x.name in self.strided else packed(x.type)

    def kernel(self, node: Node) -> k.KernelOp | k.Loop | k.Cond:
        op = node.op.substitute(self.new)
        match op:
            case t.Loop():
                body = _Legalizer(op.body, self.views, self.options, inside=True, trip=True).run()
                body = repeated(body, 1 + len(op.init))
                return k.Loop(body, op.trips, op.init, op.captures, op.has_condition)
            case t.Cond():
                regions = (op.then, op.orelse)
                then, orelse = (
                    _Legalizer(r, self.views, self.options, inside=True).run() for r in regions
                )
                return k.Cond(op.pred, then, orelse, op.captures)
            case t.Fused():
                return self.fused(node, op)
            case _:
                raise AssertionError(f"{op.name} at level fused")

    def fused(self, node: Node, op: t.Fused) -> k.KernelOp:
        body = op.body
        ops = [n.op for n in body.nodes]
        if any(o.contraction for o in ops):
            kernel = contraction(op)
            # libraries' attention puts tokens before heads by itself
            if not self.options.absorb and not isinstance(
                kernel, k.Attention | k.AttentionGradient
            ):
                odd = isinstance(kernel, k.Gemm) and kernel.has_odd_rows
                return replace(kernel, by_cell=True) if odd else kernel
            orders = tuple(map(self.written_order, node.results))
            if isinstance(kernel, k.Attention) and self.options.sdpa and not kernel.product.block:
                kernel = replace(kernel, library=self.options.attention or "sdpa")
            match kernel:
                case k.Gemm() if kernel.is_flat and has_few_rows(kernel.product):
                    return kernel
                case k.Gemm() | k.Attention() if len(orders) == 1 and orders[0]:
                    return replace(kernel, order=orders[0])
                case k.Attention() if kernel.product.stats and orders[0]:
                    return replace(kernel, order=orders[0])
                case k.AttentionGradient() | k.ExpertsGradient() if any(orders):
                    return replace(kernel, orders=orders)
                case _:
                    return kernel
        if all(isinstance(o, t.Layout) for o in ops):
            return self.layout(node, op)
        match ops:
            case [t.Ordered(order=order)] if self.views.strided:
                return self.ordered(node, op.args[0], order)
            case [t.Map("identity")] if self.views.strided:
                return self.ordered(node, op.args[0], None)
            case _:
                pass
        if (view := self.of_this_trip(op)) is not None:
            return view
        if is_joined(op):
            return k.View(op.args, body, convolved(body.outputs[0].type, op.args).order or ())
        kernel = kernel_of(ops)(op.args, body)
        if isinstance(kernel, k.Reduce) and self.options.triton:
            return replace(kernel, library="triton")
        if isinstance(kernel, k.Reduce) and self.options.sdpa and is_of_groups(kernel.reduction):
            return replace(kernel, library="aten")
        if isinstance(kernel, k.Map) and not self.options.tiled:
            return replace(kernel, apart=self.views.apart(kernel, self.lies))
        compiled = self.options.sdpa and self.options.triton  # PyTorch's compiler, and no other
        if isinstance(kernel, k.Pool) and compiled and is_wide(kernel):
            return replace(kernel, library=POOLED)
        if isinstance(kernel, k.Pool) or (isinstance(kernel, k.Gather) and is_resampled(ops)):
            return replace(kernel, library=self.options.images)
        return kernel

    # -- layout

    def with_expansions(self, node: Node) -> Node:
        """The node with the expansions that it reads within it: they take no memory."""
        op = node.op
        if not isinstance(op, t.Fused) or self.expanded.keys().isdisjoint(op.args):
            return node
        for value in op.args:
            if value in self.expanded:
                op = inlined(op, value, self.expanded[value])
        return replace(node, op=op)

    def is_read_unexpanded(self, node: Node) -> bool:
        """Whether a group gives cells many times over, and its readers take any strides: none of
        them reads more than there is. (What a softmax or a norm reads is packed first.)"""
        op = node.op
        if (
            not self.views.strided
            or not is_layout(op)
            or len(op.args) != 1
            or len(node.results) != 1
        ):
            return False
        (x,), (result,) = op.args, node.results
        view = view_of(op.body, self.lies(x))
        readers = self.uses.get(result, [])
        if view is None or result.type.size <= x.type.size or result in self.outputs:
            return False
        alone = len(readers) == 1
        return bool(readers) and all(
            alone or view_of(r.op.body, view) is not None
            if is_layout(r.op)
            else self.views.takes_expanded(r.op, result)
            for r in readers
        )

    def with_packed(self, node: Node, b: Builder) -> Node:
        """The node on copies of what its kernels take in one order alone; and a loop or a branch of
        what it was written for."""
        copies: dict[Value, Value] = {}
        for x, order in self.wanted(node):
            if is_packed(x.type.with_order(order), self.lies(x)):
                continue
            key = (x, order, node.locs)  # a model node copies it once, for all its kernels
            if key in self.made:
                copies[x] = self.made[key]
                continue
            made = Value(b.names.fresh(f"{x.name}.packed"), x.type.with_order(order))
            copies[x] = self.made[key] = made
            op = self.ordered(replace(node, results=(made,)), self.new.get(x, x), order)
            b.put(replace(node, results=(made,), op=op))
        return replace(node, op=node.op.substitute(copies)) if copies else node

    def wanted(self, node: Node) -> Iterator[Wanted]:
        if self.views.strided and node.op.control:
            return ((x, x.type.order) for x in node.op.operands)
        return self.views.wants(node, self.lies_last)

    def lies_last(self, x: Value) -> bool:
        return self.new.get(x, x).type.is_channels_last

    def ordered(self, node: Node, x: Value, order: tuple[int, ...] | None) -> k.View | k.Copy:
        """PyTorch's contiguous(), of a memory format: nothing where x lies so."""
        lies = self.lies(x)
        stays = is_packed(x.type.with_order(order), lies)
        op = t.Reshape(x, x.type.shape) if stays or order is None else t.Ordered(x, order)
        result = Value(node.results[0].name, op.result_types[0])
        launch = fused([Node(op, (result,), node.locs)], (result,)).op
        assert isinstance(launch, t.Fused)
        if stays:
            return k.View(launch.args, launch.body, order or ())
        lies = lies if order is None else lies.transpose(order)
        step = 0 if self.options.tiled else apart(lies, ())
        return k.Copy(launch.args, launch.body, step)

    def layout(self, node: Node, op: t.Fused) -> k.View | k.Copy:
        if len(op.body.outputs) != 1:
            return k.Copy(op.args, op.body)
        (x,) = op.args
        source = self.lies(x)
        view = view_of(op.body, source)
        type = op.body.outputs[0].type
        vectors = self.options.tiled or (view is not None and is_packed(type, view))
        step = 0 if vectors else apart(source, (n.op for n in op.body.nodes))
        if view is None or not self.views.makes(op.body):
            return k.Copy(op.args, op.body, step)
        if is_packed(type, view) and self.views.renames(op.body):
            return k.View(op.args, op.body)
        result = node.results[0]
        readers = self.uses.get(result, [])
        strided = all(self.views.takes(r.op, result, view) for r in readers)
        if result in self.outputs or not readers or not strided:
            return k.Copy(op.args, op.body, step)
        moved = [r.results[0].type.size for r in readers if moves(r.op, view)]
        if len(moved) > 1 and sum(moved) >= type.size:
            # once for all, as whoever made it contiguous meant
            return k.Copy(op.args, op.body, step)
        if self.views.strided:
            self.strided[result.name] = view
        return k.View(op.args, op.body, memory_order(view))

    def of_this_trip(self, op: t.Fused) -> k.View | None:
        """What a trip of the loop takes of a tensor, its outermost axis indexed by the trip's
        number: who launches the trips knows where it lies, and moves nothing."""
        gather = op.body.nodes[-1].op
        if self.trip is None or not isinstance(gather, t.Gather):
            return None
        outermost = prod(gather.x.type.shape[: gather.axis]) == 1
        plain = all(isinstance(n.op, t.Pointwise | t.Constant) for n in op.body.nodes[:-1])
        outer = dict(zip(op.body.inputs, op.args, strict=True))
        rest = [v for v in op.body.inputs if v != gather.x]
        if not (outermost and plain and gather.indices.type.size == 1):
            return None
        if [outer[v] for v in rest] != [self.trip]:
            return None
        return k.View((outer[gather.x], self.trip), replace(op.body, inputs=(gather.x, *rest)))

    def written_order(self, result: Value) -> tuple[int, ...]:
        """The memory order a contraction writes this result in, so that the transpose that alone
        reads it moves nothing; empty when there is none."""
        if result in self.outputs:
            return ()
        readers = [n for n in self.uses.get(result, []) if not is_gradient(n.op)]
        if len(readers) != 1 or not isinstance(readers[0].op, t.Fused):
            return ()
        body = readers[0].op.body.nodes
        if len(readers[0].op.args) != 1 or not all(isinstance(n.op, t.Layout) for n in body):
            return ()
        if not isinstance(first := body[0].op, t.Transpose):
            return ()
        if not all(isinstance(n.op, t.Reshape) for n in body[1:]):
            return ()
        innermost = first.perm[-1]
        return first.perm if innermost >= len(first.perm) - 2 else ()


# The kernels of launches without a contraction: one is the first of these that an op of it becomes.
BODIES = tuple(
    kernel.name
    for kernel in (
        k.Opaque,
        k.Collective,
        k.Routine,
        k.Scatter,
        k.Gather,
        k.Pool,
        k.Reduce,
        k.Copy,
        k.Map,
    )
)


def kernel_of(ops: Sequence[Op]) -> type[k.BodyKernel]:
    """What a launch without a contraction becomes: a reduction if it runs over whole rows, a
    pointwise kernel if all in it can be part of one, else what its ops say. What none of them says
    anything of is opaque: nothing is guessed."""
    rows = [op for op in ops if isinstance(op, t.TensorOp)]
    if len(rows) < len(ops):
        return k.Opaque
    if any(op.by_rows for op in rows) or sums_most(rows):
        return k.Reduce
    if any(isinstance(op, t.Pointwise) for op in rows) and all(map(k.Map.may_hold, rows)):
        return k.Map
    says = [op for op in rows if not isinstance(op, t.Layout | t.Generating)]
    others = [op for op in says if not (isinstance(op, t.Routine) and op.draws)]
    if others and all(map(_named(others).may_hold, rows)):
        return _named(others)
    return _named(says)


def is_wide(pool: k.Pool) -> bool:
    """Whether a pool's window is one that Inductor writes no loop for, and calls PyTorch's kernel:
    of more than 25 cells (torch 2.13: torch/_inductor/lowering.py, _avg_poolnd)."""
    return prod(pool.window.window) > MOST_POOLED


def sums_most(ops: Sequence[t.TensorOp]) -> bool:
    """Whether a launch that scatters sums up more than it scatters into."""
    summed = [op.x.type.size for op in ops if isinstance(op, t.Reduce)]
    into = [op.result_types[0].size for op in ops if isinstance(op, t.Scattering)]
    return bool(summed and into) and max(summed) > max(into)


def _named(ops: Sequence[t.TensorOp]) -> type[k.BodyKernel]:
    named = {op.kernel for op in ops} or {"k.map"}
    added = sorted(named - {*BODIES})
    return body_kernel(next(iter((*added, *(name for name in BODIES if name in named))), ""))


def body_kernel(name: str) -> type[k.BodyKernel]:
    """The kernel of that name, ours or a package's, if its meaning is its body; else the opaque
    one."""
    kernel = find_op(name) if name else k.Opaque
    if issubclass(kernel, k.BodyKernel) and not issubclass(kernel, k.Product):
        return kernel
    return k.Opaque


# ---------------------------------------------------------------------------- contractions


def accumulator(dtype: DType) -> DType:
    """What products of `dtype` are summed in: f32 for floats up to 32 bits, i32 for integers,
    complex numbers for complex ones."""
    if dtype.is_integer:
        return dtype if dtype.bits >= 32 else i32
    return dtype if dtype == f64 or dtype.is_complex else f32


def contraction(op: t.Fused) -> k.KernelOp:
    """A body around one contraction  →  its kernel. Experts, gradients of whole libraries' calls
    and what packages add keep their body as it is."""
    call = product(op.body).op
    assert isinstance(call, t.TensorOp)
    kernel = find_op(call.kernel)
    if not issubclass(kernel, k.Product) or not isinstance(call, kernel.holds):
        return body_kernel(call.kernel)(op.args, op.body)
    dtype = call.result_types[0].dtype
    sums = dtype if isinstance(call, t.Attention) else accumulator(dtype)
    return kernel(*accumulated(op, sums))


# ---------------------------------------------------------------------------- loops


def repeated(body: Graph, carried: int) -> Graph:
    """The body of a loop, its products with how many bytes pass between two readings of a weight
    that each trip finds as the last one left it. The first `carried` inputs change."""
    kept = set(body.inputs[carried:])
    for node in body.nodes:
        if is_view(node) and kept.issuperset(node.op.operands):
            kept.update(node.results)
    moved = {v for n in body.nodes if not is_view(n) for v in (*n.op.operands, *n.results)}
    traffic = sum(v.type.nbytes for v in moved)

    def with_traffic(node: Node) -> Node:
        op = node.op
        if not isinstance(op, k.Gemm) or not kept.issuperset((op.factors[1], *op.weights)):
            return node
        own = {*op.operands, *node.results}
        return replace(node, op=replace(op, between=traffic - sum(v.type.nbytes for v in own)))

    return replace(body, nodes=tuple(map(with_traffic, body.nodes)))


def is_joined(op: t.Fused) -> bool:
    """Whether a group is tensors that lie side by side."""
    return all(isinstance(n.op, t.Concat) and n.op.in_place for n in op.body.nodes)


def is_view(node: Node) -> bool:
    return isinstance(node.op, k.View)


def is_gradient(op: Op) -> bool:
    """Whether a group is the gradient of an attention, which takes any strides."""
    return isinstance(op, t.Fused) and isinstance(op.body.nodes[-1].op, t.AttentionGradient)


def is_resampled(ops: Sequence[Op]) -> bool:
    """Whether a launch resamples images, or is the gradient of one that does."""
    match ops:
        case [t.Resize(x=x) | t.ResizeGradient(dy=x)]:
            return 3 <= x.type.rank <= 5
        case _:
            return False


def moves(op: Op, x: Strided) -> bool:
    """Whether a group is a layout that no strides of x can say."""
    return is_layout(op) and view_of(op.body, x) is None
