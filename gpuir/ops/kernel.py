"""The kernels a GPU would launch: what `legalize` makes, `tile` cuts and `annotate` costs.

Every kernel but `k.view` is one launch. Its `space` is the loop nest it runs; tiling, footprint,
traffic and occupancy are computed from that alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar, Literal, Self, TypeVar

from gpuir.ir.errors import ModelError, nearest
from gpuir.ir.graph import Access, Graph, Node, Op, Space, Value, aligned, region
from gpuir.ir.lazy import lazy
from gpuir.ir.types import DType, TensorType, c64, f32, tf32
from gpuir.ops import tensor as t
from gpuir.ops.orders import as_images, as_operands, convolved, copied

Kind = TypeVar("Kind", bound=Op)

# What kernels do on the way: compute cell by cell, make constants, read by other strides; and read
# where an index or a window says.
FLOWING = (t.Pointwise, t.Generating, t.Layout)
FETCHING = (t.Indexing, t.Joining, t.Window)

# Dtypes whose products may run in TF32 (cuBLAS, cublasComputeType_t: CUBLAS_COMPUTE_32F_FAST_TF32).
ROUNDED = (f32, c64)


@dataclass(frozen=True)
class KernelOp(Op):
    """A kernel: `pipe` is the unit that does its arithmetic."""

    pipe: ClassVar[Literal["tensor", "vector"]] = "vector"
    tiled: ClassVar[bool] = True

    @property
    def compute_dtype(self) -> DType:
        """The dtype whose arithmetic rate bounds the kernel: the widest one it computes on."""
        reads = [a.type.dtype for a in self.nest.reads]
        floats = [d for d in reads if d.is_inexact]
        return max(floats or reads or [f32], key=lambda d: (d.bits >> d.is_complex, d.bits))

    def workspace_bytes(self, split: int) -> int:
        """Partial sums in f32."""
        if split == 1 or not self.contraction:
            return 0
        nest = self.nest
        return 4 * split * prod(n for d, n in nest.dims.items() if d not in nest.reduced)


def body_flops(body: Graph | None) -> int:
    return sum(n.op.flops() for n in body.nodes) if body else 0


def _kind_name(kind: type[Op]) -> str:
    """`t.topk`, or for a kind of ops `reducing ops`."""
    return kind.name or f"{kind.__name__.lower()} ops"


def _only(kernel: str, region: Graph | None, kinds: tuple[type[Op], ...]) -> None:
    """Raises where a region of a kernel holds what such a kernel cannot do."""
    for node in region.nodes if region else ():
        if not isinstance(node.op, kinds):
            raise ModelError(
                f"{kernel}: the body holds {node.op.name}, which this kind of "
                "kernel cannot compute",
                expected=", ".join(map(_kind_name, kinds)),
                found=str(node),
            )


def _check_library(
    op: Conv | Attention | Reduce | Collective, of: str, known: tuple[str, ...]
) -> None:
    if op.library not in known:
        raise ModelError(
            f"{op.name}: no library for {of} has the name {op.library!r}",
            fix=nearest(op.library, [name for name in known if name]),
        )


def _ordered(types: tuple[TensorType, ...], order: tuple[int, ...]) -> tuple[TensorType, ...]:
    """Result types as written in memory `order` (empty: row-major)."""
    return tuple(TensorType(t.shape, t.dtype, order) for t in types) if order else types


def _each_ordered(
    types: tuple[TensorType, ...], orders: tuple[tuple[int, ...], ...]
) -> tuple[TensorType, ...]:
    """Result types, each as written in its own memory order; the last may have none."""
    orders = (*orders, *((),) * (len(types) - len(orders)))
    return tuple(_ordered((type,), order)[0] for type, order in zip(types, orders, strict=True))


# ---------------------------------------------------------------------------- kernels with a body


@dataclass(frozen=True)
class BodyKernel(KernelOp):
    """A kernel whose meaning is its body, applied to `args`, which are all it sees. The body holds
    one of `holds` at least, if any is given, and nothing but those and `beside`."""

    holds: ClassVar[tuple[type[Op], ...]] = ()
    beside: ClassVar[tuple[type[Op], ...]] = (Op,)
    args: tuple[Value, ...]
    body: Graph

    def held(self, *kinds: type[Kind]) -> Kind:
        """The first op of these kinds in the body."""
        for node in self.body.nodes:
            if isinstance(node.op, kinds):
                return node.op
        raise ModelError(
            f"{self.name}: the body does not contain the main op of this kernel",
            expected=" or ".join(_kind_name(kind) for kind in kinds),
            found=", ".join(node.op.name for node in self.body.nodes) or "nothing",
            fix="k.map maps",
        )

    @classmethod
    def may_hold(cls, op: Op) -> bool:
        """Whether an op may be in the body."""
        return isinstance(op, (*cls.holds, *cls.beside))

    def types(self) -> tuple[TensorType, ...]:
        given = [(v.type.shape, v.type.dtype) for v in self.args]
        takes = [(v.type.shape, v.type.dtype) for v in self.body.inputs]
        if given != takes:
            raise ModelError(
                f"{self.name}: the operands do not match the inputs of the body",
                expected=", ".join(str(v.type) for v in self.body.inputs),
                found=", ".join(str(v.type) for v in self.args),
            )
        if self.holds:
            self.held(*self.holds)
        _only(self.name, self.body, (*self.holds, *self.beside))
        types = tuple(v.type for v in self.body.outputs)
        if all(v.type.order is None for v in self.args):
            return types
        return tuple(map(self.laid_out, types))

    def laid_out(self, y: TensorType) -> TensorType:
        """A result as it lies in memory, where an operand is not row-major."""
        return y

    def flops(self) -> int:
        return body_flops(self.body)

    def space(self) -> Space:
        """One flat dimension: every cell of the largest result, each operand read once."""
        types = self.result_types
        return flat_space(self.args, types)

    def may_overwrite(self, value: Value) -> bool:
        return self.overwrites or all(
            isinstance(op, t.Scattering) and op.operands.count(v) == 1 and op.x == v
            for v, op in t.readers(self.body, self.args, value)
        )

    @classmethod
    def of(cls, op: Op, **settings: Any) -> Self:
        """The kernel that computes one op."""
        results = tuple(Value(f"y{i}", type) for i, type in enumerate(op.result_types))
        inputs = tuple(dict.fromkeys(op.operands))
        return cls(inputs, region(inputs, (Node(op, results),), results), **settings)


# ---------------------------------------------------------------------------- contractions


@dataclass(frozen=True)
class Contraction(BodyKernel):
    """A kernel that multiplies and sums. `math` is the dtype that the stack lets the products run
    in where that is not the operands': TF32 of f32, on devices that have it."""

    pipe: ClassVar[Literal["tensor", "vector"]] = "tensor"
    contraction: ClassVar[bool] = True
    math: DType | None = None

    @property
    def compute_dtype(self) -> DType:
        return self.held(*self.holds).operands[0].type.dtype

    def types(self) -> tuple[TensorType, ...]:
        if self.math is not None and (self.math != tf32 or self.compute_dtype not in ROUNDED):
            raise ModelError(
                f"{self.name}: products of {self.compute_dtype} cannot run in {self.math}",
                expected="math=tf32 for f32 products, or no math",
            )
        return super().types()


@dataclass(frozen=True)
class Product(Contraction):
    """One product, with what is done on the way. Its body has the prologue, which makes the right
    factor from a packed weight on its way into the tile; the product, whose result is the
    accumulator; the epilogue, on each tile of that. Arguments are the factors, the packed weight in
    place of what is made from it, then what the epilogue reads and what else the prologue does.
    """

    beside: ClassVar[tuple[type[Op], ...]] = FLOWING

    @lazy
    def anchor(self) -> Node:
        """The node of the contraction."""
        product = self.held(*self.holds)
        return next(n for n in self.body.nodes if n.op is product)

    @property
    def prologue(self) -> tuple[Node, ...]:
        return self.body.nodes[: self.body.nodes.index(self.anchor)]

    @property
    def epilogue(self) -> tuple[Node, ...]:
        return self.body.nodes[self.body.nodes.index(self.anchor) + 1 :]

    def _read_by(self, nodes: Iterable[Node]) -> tuple[Value, ...]:
        read = {v for n in nodes for v in n.op.operands}
        pairs = zip(self.body.inputs, self.args, strict=True)
        return tuple(outer for inner, outer in pairs if inner in read)

    @lazy
    def factors(self) -> tuple[Value, ...]:
        """The operands of the contraction as they lie in memory."""
        outer = dict(zip(self.body.inputs, self.args, strict=True))
        packed = max(self._read_by(self.prologue), key=lambda v: v.type.size, default=None)
        found = (outer.get(v, packed) for v in self.anchor.op.operands)
        return tuple(v for v in found if v is not None)

    @lazy
    def weights(self) -> tuple[Value, ...]:
        """What the prologue reads beside the packed weight."""
        return tuple(v for v in self._read_by(self.prologue) if v not in self.factors)

    @lazy
    def extra(self) -> tuple[Value, ...]:
        """What the epilogue reads beside the accumulator."""
        return self._read_by(self.epilogue)


@dataclass(frozen=True)
class Gemm(Product):
    """c[b, m, n] = sum over k of a[b, m, k] * b[b, k, n].

    A batch that shares its right operand is more rows: b is 1 and m counts them all. `order` is the
    memory order the result is written in. In a loop that keeps its right operand, `between` is how
    many bytes the rest of a trip moves until the next reads it. With `by_cell` the library's kernel
    loads one cell at a time, as rows of 16 bits with an odd number of cells need.
    """

    name: ClassVar[str] = "k.gemm"
    holds: ClassVar[tuple[type[Op], ...]] = (t.Matmul,)
    order: tuple[int, ...] = ()
    between: int | None = None
    by_cell: bool = False

    @property
    def product(self) -> t.Matmul:
        return self.held(t.Matmul)

    def may_overwrite(self, value: Value) -> bool:
        """Over an operand of the epilogue."""
        return value not in (*self.factors, *self.weights)

    def types(self) -> tuple[TensorType, ...]:
        return _ordered(super().types(), self.order)

    @property
    def has_odd_rows(self) -> bool:
        """Whether rows of an operand or of the result, as they lie, are an odd number of cells of
        16 bits: then most begin at no multiple of 4 bytes. A product of one row or column has no
        tile to load."""
        *_, m, n = self.product.result_types[0].shape
        if self.compute_dtype.bits != 16 or m == 1 or n == 1:
            return False
        rows = (*(v.type for v in self.factors), self.types()[0])
        return any(x.shape[x.order[-1] if x.order else -1] % 2 for x in rows)

    @property
    def is_flat(self) -> bool:
        """Whether the whole batch is rows of one product: it shares the right operand, and its
        rows lie one after another."""
        shared = prod(self.product.b.type.shape[:-2]) == 1
        return shared and self.factors[0].type.order is None and not self.order

    def _rows(self, type: TensorType, last: str) -> Access:
        """The left operand, an extra one or the result, by batch, row and `last`."""
        if not self.is_flat or type.rank < 2:
            return aligned(type, ("b", "m", last))
        flat = TensorType((prod(type.shape[:-1]), type.shape[-1]), type.dtype)
        return Access(type, aligned(flat, ("m", last)).dims)

    def _right(self, type: TensorType, dims: dict[str, int]) -> Access:
        """How the right operand, or what its prologue reads, is indexed. Where the prologue moves
        cells (a weight in blocks, n outermost), by all dimensions it may depend on."""
        if not any(isinstance(node.op, t.Layout) for node in self.prologue):
            return aligned(type, ("b", "k", "n")) if type.rank >= 2 else Access(type, ("n",))
        if type.size <= 1:
            return Access(type, ())
        if type.size == dims["n"]:
            return Access(type, ("n",))
        turned = any(isinstance(node.op, t.Transpose) for node in self.prologue)
        names = ("n", "k") if turned else ("k", "n")
        batch = ("b",) if self.product.b.type.rank > 2 else ()
        return Access(type, tuple(d for d in (*batch, *names) if dims[d] > 1))

    def space(self) -> Space:
        *batch, m, n = self.product.result_types[0].shape
        b = prod(batch)
        if self.is_flat:
            b, m = 1, b * m
        left, right = self.factors
        dims = {"b": b, "m": m, "n": n, "k": left.type.shape[-1]}
        return Space(
            dims=dims,
            reads=(
                self._rows(left.type, "k"),
                *(self._right(v.type, dims) for v in (right, *self.weights)),
                *(self._rows(v.type, "n") for v in self.extra),
            ),
            writes=tuple(self._rows(type, "n") for type in self.result_types),
            reduced=("k",),
        )


# Whose kernel a convolution is: one that takes images as they lie, where none is named; cuDNN's,
# which on matrix units takes channels-last alone, and converts what is not; ATen's own of depthwise
# ones.
CONV_LIBRARIES = ("", "cudnn", "aten")


@dataclass(frozen=True)
class Conv(Product):
    """Convolution as implicit GEMM: b groups of m = N·P·Q by n = K/g, over k = C/g·R·S.

    It reads the real input, no im2col tensor: what the nest visits beyond it is reuse. Of the
    gradient form (`t.conv_transpose`) m counts input cells and n = K/g·R·S; of the gradient of
    weights m = C/g·R·S and k = N·P·Q. `library` says whose kernel it is (`CONV_LIBRARIES`).
    """

    name: ClassVar[str] = "k.conv"
    holds: ClassVar[tuple[type[Op], ...]] = (t.Conv, t.ConvTranspose, t.ConvWeightGradient)
    library: str = ""

    @property
    def product(self) -> t.Conv | t.ConvTranspose | t.ConvWeightGradient:
        return self.held(t.Conv, t.ConvTranspose, t.ConvWeightGradient)

    def may_overwrite(self, value: Value) -> bool:
        """Over an operand of the epilogue."""
        return value not in (*self.factors, *self.weights)

    def types(self) -> tuple[TensorType, ...]:
        _check_library(self, "convolutions", CONV_LIBRARIES)
        return super().types()

    def laid_out(self, y: TensorType) -> TensorType:
        return convolved(y, self.factors)

    def space(self) -> Space:
        op = self.product
        g, y = op.groups, op.result_types[0].shape
        x, right = (v.type.shape for v in op.operands)
        match op:
            case t.ConvWeightGradient():
                cells = right[0] * prod(right[2:])
                dims = {"b": g, "m": prod(y[1:]), "n": y[0] // g, "k": cells}
            case t.ConvTranspose():
                dims = {"b": g, "m": x[0] * prod(x[2:]), "n": prod(right[1:]), "k": x[1] // g}
            case _:
                dims = {"b": g, "m": y[0] * prod(y[2:]), "n": y[1] // g, "k": prod(right[1:])}
        live = tuple(d for d, n in dims.items() if n != 1)

        def access(type: TensorType, *names: str) -> Access:
            return Access(type, tuple(d for d in names if d in live))

        def pointwise(v: Value) -> Access:
            """An epilogue operand, which broadcasts to the result: its axis 1 is groups and n."""
            if isinstance(op, t.ConvWeightGradient):
                return access(v.type, *"bmn" * (v.type.size > 1))
            first = len(y) - v.type.rank
            wide = {first + i for i, n in enumerate(v.type.shape) if n != 1}
            channels, cells = 1 in wide, bool(wide - {1})
            return access(v.type, *"b" * channels, *"m" * cells, *"n" * channels)

        image, weight = self.factors
        return Space(
            dims=dims,
            reads=(
                access(image.type, "b", "m", "k"),
                *(access(v.type, "b", "n", "k") for v in (weight, *self.weights)),
                *map(pointwise, self.extra),
            ),
            writes=tuple(access(type, "b", "m", "n") for type in self.result_types),
            reduced=("k",),
        )


# Whose kernel an attention is: FlashAttention's of the device's generation where none is named;
# PyTorch's function (`sdpa`), which chooses its kernel by what it is given; FlashAttention-3's;
# cuDNN's; TensorRT-LLM's; FlashInfer's; one written in Triton, SGLang's or vLLM's (`unified`).
LIBRARIES = ("", "sdpa", "fa3", "cudnn", "trtllm", "flashinfer", "triton", "unified")


@dataclass(frozen=True)
class Attention(Product):
    """Fused attention: scores never leave the chip.

    Its nest is b h s e over keys d, in two products: q·k over the head's e, p·v into the result's
    f = e. `order` is the memory order the result is written in. `library` says whose kernel it is
    (`LIBRARIES`).
    """

    name: ClassVar[str] = "k.attention"
    holds: ClassVar[tuple[type[Op], ...]] = (t.Attention,)
    order: tuple[int, ...] = ()
    library: str = ""

    @property
    def product(self) -> t.Attention:
        return self.held(t.Attention)

    def types(self) -> tuple[TensorType, ...]:
        _check_library(self, "attention", LIBRARIES)
        types = super().types()
        stats = len(types) - self.product.stats
        return (*_ordered(types[:stats], self.order), *types[stats:])

    def workspace_bytes(self, split: int) -> int:
        return self.product.workspace_bytes(1) if split == 1 else super().workspace_bytes(split)

    def space(self) -> Space:
        op = self.product
        *lead, h, s, _ = op.q.type.shape
        g, d, f = op.v.type.shape[-3:]
        dims = {"b": prod(lead), "h": h, "s": s, "e": f, "d": d}
        heads = ("b", "h") if g > 1 or h == 1 else ("b",)
        q, keys, values, *mask = (v.type for v in self.factors)
        whole = ("b", "h", "s", "e")
        return Space(
            dims=dims,
            reads=(
                Access(q, ("b", "h", "s")),
                Access(keys, (*heads, "d")),
                Access(values, (*heads, "d", "e")),
                *(aligned(type, ("b", "h", "s", "d")) for type in mask),
                *(aligned(v.type, whole) for v in self.extra),
            ),
            writes=tuple(
                Access(type, whole if type.rank == q.rank else whole[:3])
                for type in self.result_types
            ),
            reduced=("d",),
        )


# ---------------------------------------------------------------------------- others


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether numpy broadcasts the one shape to the other."""
    tail = to[len(to) - len(shape) :]
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape, tail, strict=True))


def flat_space(args: tuple[Value, ...], types: tuple[TensorType, ...]) -> Space:
    """i over the cells of the largest result; an operand of one cell is not indexed."""
    extent = max((type.size for type in types), default=1)

    def access(type: TensorType) -> Access:
        return Access(type, ("i",) if type.size > 1 else ())

    reads = tuple(access(v.type) for v in args)
    return Space({"i": extent}, reads, tuple(map(access, types)))


@dataclass(frozen=True)
class Map(BodyKernel):
    """Any pointwise region over one flat dimension i; operands broadcast. Where `apart` is not 0, a
    thread finds one cell after another by the operands' strides, and threads beside each other
    fetch cells of an operand so far apart in memory; else it takes several at once."""

    name: ClassVar[str] = "k.map"
    overwrites: ClassVar[bool] = True
    beside: ClassVar[tuple[type[Op], ...]] = (*FLOWING, t.Joining, t.Routine)
    apart: int = 0

    def laid_out(self, y: TensorType) -> TensorType:
        return as_operands(y, self.args)


# Who wrote a reduction's kernel: PyTorch, where nobody is named, and its kernels of a group norm;
# a compiler, in Triton.
REDUCE_LIBRARIES = ("", "aten", "triton")


@dataclass(frozen=True)
class Reduce(BodyKernel):
    """Reductions over r for each cell o, with the pointwise work around them, in one kernel.

    The body holds pointwise ops and reductions, all over the same axes of the same cells: a
    softmax, a norm, a sum. Results have the cells of o, or of o and r. `library` says whose kernel
    it is (`REDUCE_LIBRARIES`).
    """

    name: ClassVar[str] = "k.reduce"
    holds: ClassVar[tuple[type[Op], ...]] = (t.Reducing,)
    beside: ClassVar[tuple[type[Op], ...]] = (*FLOWING, *FETCHING, t.Scattering, t.Routine)
    library: str = ""

    def types(self) -> tuple[TensorType, ...]:
        _check_library(self, "reductions", REDUCE_LIBRARIES)
        return super().types()

    def laid_out(self, y: TensorType) -> TensorType:
        return as_operands(y, self.args)

    @property
    def reduction(self) -> t.Reducing:
        """The first reduction of the body: r are the axes it runs over, o the others."""
        return self.held(t.Reducing)

    def space(self) -> Space:
        """Operands broadcast to the reduction's. A group norm's channels are in both o and r."""
        op = self.reduction
        whole, reduced = op.x.type.shape, set(op.reduced_axes())
        kept = set(range(len(whole))) - reduced
        groups = op.groups or 1 if isinstance(op, t.Normalize | t.NormalizeGradient) else 1
        if groups > 1:
            kept.add(1)
        rows = prod(whole[a] for a in reduced) // groups

        def read(type: TensorType) -> Access:
            first = len(whole) - type.rank
            if not broadcasts(type.shape, whole):  # the body brings it to the nest's shape
                return Access(type, ("o", "r") if type.size * rows > prod(whole) else ("o",))
            wide = {first + i for i, n in enumerate(type.shape) if n != 1}
            return Access(type, ("o",) * bool(wide & kept) + ("r",) * bool(wide & reduced))

        def written(type: TensorType) -> Access:
            return Access(type, ("o", "r") if type.size == prod(whole) else ("o",))

        return Space(
            dims={"o": prod(whole) // rows if rows else 1, "r": rows},
            reads=tuple(read(v.type) for v in self.args),
            writes=tuple(map(written, self.result_types)),
            reduced=("r",),
        )


@dataclass(frozen=True)
class Pool(BodyKernel):
    """A reduction over windows, or its gradient: o cells of the result, each from the r cells of
    its window. `library` is the release of PyTorch whose kernel it is, where it is one."""

    name: ClassVar[str] = "k.pool"
    holds: ClassVar[tuple[type[Op], ...]] = (t.Pool, t.PoolGradient)
    beside: ClassVar[tuple[type[Op], ...]] = (*FLOWING, *FETCHING, t.Reducing)
    library: str = ""

    def laid_out(self, y: TensorType) -> TensorType:
        return as_images(y, self.args)

    @property
    def window(self) -> t.Pool | t.PoolGradient:
        return self.held(t.Pool, t.PoolGradient)

    def space(self) -> Space:
        types = self.result_types
        return Space(
            dims={"o": max(type.size for type in types), "r": prod(self.window.window)},
            reads=tuple(
                Access(v.type, ("o", "r") if i == 0 else ("o",)) for i, v in enumerate(self.args)
            ),
            writes=tuple(Access(type, ("o",)) for type in types),
            reduced=("r",),
        )


@dataclass(frozen=True)
class Experts(Contraction):
    """A mixture of experts: rows sorted by expert, the products in and out with the activation
    between, the weighted sum. A library launches it as several kernels; here it is one.

    The body holds the `t.experts` and what makes its weights from packed ones. Of b experts each
    gets m rows if all get as many; n is their width, k the hidden size. `library` names the
    implementation, where it is known: `cost/grouped.py` has those that were measured.
    """

    name: ClassVar[str] = "k.experts"
    holds: ClassVar[tuple[type[Op], ...]] = (t.Experts,)
    library: str = ""

    @property
    def experts(self) -> t.Experts:
        return self.held(t.Experts)

    @property
    def stored(self) -> tuple[Value, ...]:
        """The operands that weights and biases are, or are made from."""
        mix = self.experts
        rows = {mix.x, mix.which, mix.shares}
        return tuple(v for v in self.body.inputs if v not in rows)

    def space(self) -> Space:
        mix = self.experts
        count, hidden = mix.up.type.shape[0], mix.x.type.shape[1]
        rows = -(-mix.which.type.size // max(count * mix.ranks, 1))
        ways = {mix.x: ("m", "k"), mix.which: ("m",), mix.shares: ("m",)}
        return Space(
            dims={"b": count, "m": rows, "n": mix.inter, "k": hidden},
            reads=tuple(
                Access(outer.type, ways.get(inner, ("b", "n", "k")))
                for outer, inner in zip(self.args, self.body.inputs, strict=True)
            ),
            writes=tuple(Access(type, ("m", "k")) for type in self.result_types),
            reduced=("k",),
        )

    def workspace_bytes(self, split: int) -> int:
        return self.experts.workspace_bytes(split)


@dataclass(frozen=True)
class AttentionGradient(Contraction):
    """The gradients of q, k and v in one library call. The body is a `t.attention_gradient`. Its
    nest is that of the attention. `orders` are the memory orders that results are written in."""

    name: ClassVar[str] = "k.attention_gradient"
    holds: ClassVar[tuple[type[Op], ...]] = (t.AttentionGradient,)
    orders: tuple[tuple[int, ...], ...] = ()

    @property
    def gradient(self) -> t.AttentionGradient:
        return self.held(t.AttentionGradient)

    def forward(self) -> Attention:
        """The kernel whose gradient this is."""
        return Attention.of(replace(self.gradient.direct(), stats=False), math=self.math)

    def types(self) -> tuple[TensorType, ...]:
        return _each_ordered(super().types(), self.orders)

    def space(self) -> Space:
        op, nest = self.gradient, self.forward().space()
        queries, keys, *_ = (a.dims for a in nest.reads)
        ways = {op.k: keys, op.v: keys, op.stats: queries}
        mask = ("b", "h", "s", "d")
        return Space(
            dims=nest.dims,
            reads=tuple(
                aligned(outer.type, mask)
                if inner == op.mask
                else Access(outer.type, ways.get(inner, queries))
                for outer, inner in zip(self.args, self.body.inputs, strict=True)
            ),
            writes=tuple(
                Access(type, way)
                for type, way in zip(self.result_types, (queries, keys, keys, mask), strict=False)
            ),
            reduced=("d",),
        )

    def workspace_bytes(self, split: int) -> int:
        return self.gradient.workspace_bytes(split)


@dataclass(frozen=True)
class ExpertsGradient(Contraction):
    """The gradients of experts. The body is a `t.experts_gradient`. It stands for several launches,
    as `k.experts` does. Its nest is that of the experts; `orders` are as in
    `k.attention_gradient`."""

    name: ClassVar[str] = "k.experts_gradient"
    holds: ClassVar[tuple[type[Op], ...]] = (t.ExpertsGradient,)
    orders: tuple[tuple[int, ...], ...] = ()

    @property
    def gradient(self) -> t.ExpertsGradient:
        return self.held(t.ExpertsGradient)

    def forward(self) -> Experts:
        """The kernel whose gradient this is."""
        return Experts.of(self.gradient.direct(), math=self.math)

    @property
    def compute_dtype(self) -> DType:
        return self.gradient.x.type.dtype

    def types(self) -> tuple[TensorType, ...]:
        return _each_ordered(super().types(), self.orders)

    def space(self) -> Space:
        op, nest = self.gradient, self.forward().space()
        ways = {op.x: ("m", "k"), op.dy: ("m", "k"), op.which: ("m",), op.shares: ("m",)}
        weight = ("b", "n", "k")
        return Space(
            dims=nest.dims,
            reads=tuple(
                Access(outer.type, ways.get(inner, weight))
                for outer, inner in zip(self.args, self.body.inputs, strict=True)
            ),
            writes=tuple(
                Access(type, ways.get(v, weight))
                for type, v in zip(self.result_types, op.subjects, strict=False)
            ),
            reduced=("k",),
        )


@dataclass(frozen=True)
class Gather(BodyKernel):
    """Reads i cells (j numbers each) at the places that indices name: embedding, indexing,
    resampling.

    What it reads of the table is at most what it gives, whatever the table's size. `library` is the
    release of PyTorch whose kernel resamples images, where one does."""

    name: ClassVar[str] = "k.gather"
    beside: ClassVar[tuple[type[Op], ...]] = (
        *FLOWING,
        *FETCHING,
        t.Reducing,
        t.ResizeGradient,
        t.Routine,
    )
    library: str = ""

    def laid_out(self, y: TensorType) -> TensorType:
        resampled = any(isinstance(n.op, t.Resize | t.ResizeGradient) for n in self.body.nodes)
        return as_images(y, self.args) if resampled else y


@dataclass(frozen=True)
class Scatter(BodyKernel):
    """Writes updates at the places that indices name. The rest of the tensor stays, in place. A
    tensor made here, of constants, is written whole first."""

    name: ClassVar[str] = "k.scatter"
    overwrites: ClassVar[bool] = True
    beside: ClassVar[tuple[type[Op], ...]] = (
        *FLOWING,
        *FETCHING,
        t.Scattering,
        t.Reducing,
        t.Routine,
    )

    def space(self) -> Space:
        """i over the cells that are given, or of all that is written."""
        flat = super().space()
        scatters = [n.op for n in self.body.nodes if isinstance(n.op, t.Scattering)]
        there = set(self.body.inputs)
        sizes = (op.updates.type.size if op.x in there else op.x.type.size for op in scatters)
        given = max(sizes, default=flat.dims["i"])
        return Space({"i": given}, flat.reads, flat.writes)


@dataclass(frozen=True)
class Copy(BodyKernel):
    """Data movement that no kernel absorbs: a layout change, concat, pad, broadcast, constants.
    Where `apart` is not 0, a thread fetches one cell after another, as in `k.map`; a kernel that
    transposes by tiles does not."""

    name: ClassVar[str] = "k.copy"
    beside: ClassVar[tuple[type[Op], ...]] = (t.Layout, t.Generating, t.Joining, t.Ordered)
    apart: int = 0

    def laid_out(self, y: TensorType) -> TensorType:
        return copied(y, self.args, self.body)

    def space(self) -> Space:
        """One flat dimension: every cell of all results, each operand read once."""
        cells = sum(type.size for type in self.result_types)
        return replace(super().space(), dims={"i": cells})


@dataclass(frozen=True)
class Routine(BodyKernel):
    """A whole library routine: a sort, a selection, a decomposition. A library launches it as
    several kernels; here it is one."""

    name: ClassVar[str] = "k.routine"
    overwrites: ClassVar[bool] = True
    holds: ClassVar[tuple[type[Op], ...]] = (t.Routine, t.TopK)

    def space(self) -> Space:
        """Sums of squares of tensors write next to nothing: of them every cell that is read."""
        match self.routine:
            case t.Routine("multi_tensor", args) as op if dict(op.attrs).get("fn") == "squares":
                space = super().space()
                return replace(space, dims={"i": max(v.type.size for v in args)})
            case _:
                return super().space()

    @property
    def routine(self) -> t.Routine | t.TopK:
        return self.held(t.Routine, t.TopK)


# Whose kernel a collective is: NCCL's where none is named; the all-reduce of an engine that serves
# language models.
COLLECTIVE_LIBRARIES = ("", "vllm", "sglang", "trtllm")


@dataclass(frozen=True)
class Collective(BodyKernel):
    """What ranks do together over the links between their devices. The cluster decides its time.
    The body holds one collective, or several of one kind and group that are launched together.
    `library` says whose kernel it is (`COLLECTIVE_LIBRARIES`)."""

    name: ClassVar[str] = "k.collective"
    holds: ClassVar[tuple[type[Op], ...]] = (t.Collective,)
    beside: ClassVar[tuple[type[Op], ...]] = (t.Layout,)
    library: str = ""

    def types(self) -> tuple[TensorType, ...]:
        _check_library(self, "collectives", COLLECTIVE_LIBRARIES)
        return super().types()

    @property
    def collective(self) -> t.Collective:
        """The first; what it says of kind and group is so of all."""
        return self.held(t.Collective)

    @property
    def collectives(self) -> tuple[t.Collective, ...]:
        return tuple(n.op for n in self.body.nodes if isinstance(n.op, t.Collective))

    def may_overwrite(self, value: Value) -> bool:
        """NCCL sums in place where both buffers are one."""
        return self.collective.fn == "all_reduce"


@dataclass(frozen=True)
class Opaque(BodyKernel):
    """A model op that gpuir does not know: it reads its operands and writes its results once, and
    the report lists it. Never zero. How it shares out its work is not known either: its nest has as
    many points as the largest of all these has cells."""

    name: ClassVar[str] = "k.opaque"
    overwrites: ClassVar[bool] = True

    def space(self) -> Space:
        flat = super().space()
        extent = max(flat.dims["i"], *(v.type.size for v in self.args), 1)
        return Space({"i": extent}, flat.reads, flat.writes)


@dataclass(frozen=True)
class View(BodyKernel):
    """The same bytes under another type: no launch, no time. The body holds layout ops, or joins
    what was written side by side; `order` is the memory order of the result that leaves every byte
    where it is."""

    name: ClassVar[str] = "k.view"
    beside: ClassVar[tuple[type[Op], ...]] = (*FLOWING, t.Joining, t.Gather)
    tiled: ClassVar[bool] = False
    order: tuple[int, ...] = ()

    def types(self) -> tuple[TensorType, ...]:
        return _ordered(super().types(), self.order)


# ---------------------------------------------------------------------------- control


@dataclass(frozen=True)
class Loop(t.Loop):
    """`t.loop` with a body of kernels: each trip launches each of them once."""

    name: ClassVar[str] = "k.loop"


@dataclass(frozen=True)
class Cond(t.Cond):
    """`t.cond` with branches of kernels."""

    name: ClassVar[str] = "k.cond"

    @property
    def dearer(self) -> Graph:
        """The branch that counts, once kernels have costs."""
        return max((self.then, self.orelse), key=lambda g: g.time_s)


KERNELS: dict[str, type[Op]] = {
    op.name: op
    for op in (
        Gemm,
        Conv,
        Attention,
        Map,
        Reduce,
        Pool,
        Experts,
        AttentionGradient,
        ExpertsGradient,
        Gather,
        Scatter,
        Copy,
        Routine,
        Collective,
        Opaque,
        View,
        Loop,
        Cond,
    )
}


def sums_of_gradients(g: Graph) -> frozenset[Value]:
    """What collectives give that no kernel of a graph reads, nor leaves it but as a gradient: only
    an update that comes later waits for them."""
    needed = {v for v in g.outputs if g.role_of(v) != "gradient"}
    found: set[Value] = set()
    for n in reversed(g.nodes):
        if not isinstance(n.op, Collective | View) or not needed.isdisjoint(n.results):
            needed.update(n.op.operands)
        elif isinstance(n.op, Collective):
            found.update(n.results)
    return frozenset(found)


@dataclass(frozen=True)
class HeldWeights:
    """What comes from outside to a graph of kernels: params and inputs, with their views (of a
    transposed weight, as PyTorch has it), and how many bytes these are in all. `inside` are its
    kernels in loops and branches, by identity: a library's, which find again what they need."""

    values: frozenset[Value] = frozenset()
    nbytes: int = 0
    inside: frozenset[int] = frozenset()

    @staticmethod
    def of(graph: Graph) -> HeldWeights:
        given = (*graph.params, *graph.inputs)
        found = set(given)
        for node in graph.nodes:
            if isinstance(node.op, View) and found.issuperset(node.op.operands):
                found.update(node.results)
        inside = {id(n.op) for n in graph.walk()} - {id(n.op) for n in graph.nodes}
        nbytes = sum(v.type.nbytes for v in given)
        return HeldWeights(frozenset(found), nbytes, frozenset(inside))
