"""One kernel by its extents, apart from any model; or many of one kind, with arrays for numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any, cast

import numpy as np

from gpuir.cost import routing, sized
from gpuir.cost.batch import best_tiles, costs_of
from gpuir.cost.generated import cost_of as generated_cost
from gpuir.cost.generated.legal import fastest
from gpuir.cost.grouped import measured
from gpuir.cost.lanes import lane_ops
from gpuir.cost.products import roles_of
from gpuir.cost.sheet import Number
from gpuir.cost.work import Operand, Staging, Work
from gpuir.ir.door import FLAG, TEXT, ArgumentKind, many, named, of_type, real, refuse, takes, whole
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.notes import TILE, Cost, Tile
from gpuir.ir.types import DTYPES, DType, f32, tf32
from gpuir.ops.kernel import CONV_LIBRARIES, LIBRARIES, ROUNDED
from gpuir.ops.scalar import SCALARS
from gpuir.targets.load import load_target
from gpuir.targets.target import Target
from gpuir.tune.legal import check


@dataclass(frozen=True)
class Kernel:
    """A kernel: what it does (`work`), and, where a target was named, what it costs there.

    `tile` is the one that `cost` is of: the one given, or the one that the library's own kernel
    takes. Without a target both are None.
    """

    name: str
    work: Work
    target: Target | None = None
    tile: Tile | None = None
    cost: Cost | None = None

    def __repr__(self) -> str:
        dims = ", ".join(f"{d}={n}" for d, n in self.work.dims if not np.ndim(n))
        on = f" on {self.target.name}" if self.target else ""
        costs = f": {self.time_s:.4g} s, {self.tile}" if self.cost else ""
        return f"<Kernel {self.name} ({dims}){on}{costs}>"

    @property
    def time_s(self) -> float:
        """Seconds on the device, one launch included."""
        return self._costed.time_s

    @property
    def interval_s(self) -> tuple[float, float] | None:
        """Seconds between which 80 % of measurements are expected; None where nobody knows."""
        return self._costed.interval

    @property
    def bound(self) -> str:
        """The largest term: compute, memory or latency."""
        return self._costed.bound

    @property
    def _costed(self) -> Cost:
        if self.cost is None:
            raise UsageError(
                f"the kernel {self.name!r} has no cost: no target was given, or "
                "it describes many kernels",
                fix=f"gpuir.kernel({self.name!r}, ..., target='h100-sxm'), or gpuir.predict",
            )
        return self.cost


KIND = of_type(str, "the name of a kind", "'gemm', 'conv', 'attention', ...")
KERNEL = of_type(Kernel, "a kernel", "gpuir.kernel('gemm', m=4096, n=4096, k=4096)")
TARGET = of_type((str, Target), "the name of a target, or a target", "target='h100-sxm'")


@takes(name=KIND, target=TARGET, tile=TILE)
def kernel(
    name: str,
    *,
    dtype: str | DType = "f16",
    target: str | Target | None = None,
    tile: Tile | None = None,
    **extents: Any,
) -> Kernel:
    """A kernel of a kind by its extents; with a `target`, what it takes there.

    Without a `tile` it is the library's own kernel (cuBLAS, FlashAttention, PyTorch's), with one a
    kernel generated with that tile, as Triton or CUTLASS would. Extents may be arrays of one
    shape: many kernels, for `gpuir.predict`. With an extent of 0 it is an empty launch.

    `dtype` is what is multiplied; "tf32" are f32 operands whose products run in TF32, which
    `math="tf32"` says too. Kinds, their extents and what may be said besides:

    - `gemm`: m n k; b=1, weight= out= (dtypes), math=, epilogue=("bias", "gelu"), scales="" ("row"
      or "block"), group=0 (cells of the weight along k that share a scale of 16 bits), layout="nn"
      ("t": that operand lies transposed, which kernels generated for the lanes feel)
    - `conv`: batch channels size filters window (one number, or one to three in a tuple); stride=1
      dilation=1 padding=0 groups=1, transposed=False, math=, epilogue=, library="" (or "cudnn",
      "aten")
    - `attention`: batch heads queries keys head; kv_heads= value=, causal=False window=0, cache=
      out= (dtypes), math=, shared=False (values are a part of the keys, as in latent attention),
      append=False (it also writes its keys and values to a cache), paged=False (which lies in
      pages), library="" ("sdpa", "fa3", "cudnn", "trtllm", "flashinfer", "triton",
      "unified")
    - `rows`: rows columns; of="softmax" (or "norm", "rms", "sum", "scan"), parameters=0 (operands
      of one row: the weights and biases of a norm)
    - `map`: cells; inputs=1, fn="add", out= (dtype), of="" ("copy", "transpose", "quantise")
    - `experts`: tokens hidden inter topk experts; gated=True weight= skew=0 ranks=1 shards=1,
      math=, scales="" ("block"), library="cutlass" (or "trtllm", "vllm", "sglang", ...)
    - `grouped`: rows n k groups; weight= out= (dtypes), math=, scales="": one product a group of
      weights [n, k], whose rows are handed out at random
    - `gather`: rows width table; bag=1: rows of a table, or the sum of so many for each result
    - `topk`: rows columns k: the k largest of each row

    UsageError for another kind or extent, and for a tile that is not legal on the target.
    """
    if name not in KINDS:
        raise UsageError(f"no kind of kernel has the name {name!r}", fix=nearest(name, KINDS))
    needed, options = parameters_of(KINDS[name])
    unknown = [e for e in extents if e not in needed + options]
    missing = [e for e in needed if e not in extents]
    if unknown or missing:
        raise UsageError(
            f"this argument does not describe a {name}",
            expected=" ".join(needed) + (f", and perhaps {' '.join(options)}" if options else ""),
            found=" ".join(extents),
            fix=nearest(unknown[0], needed + options) if unknown else f"give {missing[0]}=",
        )
    given = {e: _value(name, e, value, e in needed) for e, value in extents.items()}
    given = _spread(name, given, needed)
    plain, math = _math(name, dtype, given.pop("math", None), "math" in options)
    given |= {"math": math} if math is not None else {}
    what = name if name != "rows" else given.get("of", "softmax")
    if plain.is_complex and what in REAL:
        raise UsageError(
            f"kernel {name!r}: {what} is not defined for complex numbers, which have no order",
            found=f'dtype="{plain}"',
            fix='dtype="f32"',
        )
    found = Kernel(name, _full(name, plain, given, needed))
    return found if target is None else costed(found, target, tile)


@takes(k=KERNEL, target=TARGET, tile=TILE)
def costed(k: Kernel, target: str | Target, tile: Tile | None = None) -> Kernel:
    """The kernel with its cost on a target, under a tile or as the library would run it; a nest,
    which no library has, under the fastest of its candidates. Many kernels in one have no cost:
    `gpuir.predict` gives arrays."""
    device = load_target(target) if isinstance(target, str) else target
    if np.ndim(k.work.points):
        if tile is not None:
            raise UsageError(
                f"{k.name} describes many kernels, so it has no single tile",
                fix="use gpuir.predict(kernels, tiles, target)",
            )
        return replace(k, target=device)
    if tile is None and k.work.kernel == "nest":
        tile = own_tile(k, device)
    if tile is not None:
        check(k.work, tile, device, k.name)
        return replace(k, target=device, tile=tile, cost=generated_cost(k.work, tile, device))
    taken = best_tiles({k.work: k.name}, device)[k.work]
    (cost,) = costs_of([(k.work, taken)], device)
    return replace(k, target=device, tile=taken, cost=cost)


def own_tile(k: Kernel, target: Target) -> Tile:
    """The fastest tile of a nest on a target; UsageError where none is legal."""
    found = fastest(k.work, target)
    if found is None:
        raise UsageError(
            f"no candidate tile of the nest {k.name} is legal on {target.name}",
            fix="give a tile, or use a GPU as the target",
        )
    return found


@takes(name=of_type((str, DType), "a dtype", 'dtype="f16"'))
def dtype_of(name: str | DType) -> DType:
    """A dtype by its name; UsageError where there is none."""
    if isinstance(name, DType):
        return name
    if name not in DTYPES:
        raise UsageError(f"no dtype {name!r}", fix=nearest(name, DTYPES))
    return DTYPES[name]


# ---------------------------------------------------------------------------- what is given


MOST = 2**53  # of an extent: whole numbers up to it are exact in 64 bits
# Of what may be said besides: the least number, the texts, the dtypes and the flags.
LEAST = {
    **dict.fromkeys(("b", "group", "window", "padding", "parameters", "inputs"), 0),
    **dict.fromkeys(("stride", "dilation", "groups", "value", "kv_heads", "bag"), 1),
    **dict.fromkeys(("ranks", "shards"), 1),
}
REAL = ("attention", "experts", "topk", "softmax", "norm", "rms")  # kinds, and those of `rows`
ONE = ("inputs", "parameters")  # operands, which all kernels in one have in common
MOST_OPERANDS = 64  # assumed: more is a slip
TEXTS = ("layout", "scales", "of", "fn", "library")
NAMED = ("weight", "out", "math", "cache")
PARTED = ("kv_heads", "groups", "ranks", "shards", "dilation")  # which an extent has to fit
AXES = ("size", "window")  # of a convolution, where they are extents


def _value(kind: str, name: str, value: Any, needed: bool) -> Any:
    """An argument of a kind, checked: numbers as such or as arrays, dtypes by name. UsageError for
    what cannot be one."""
    where = f"gpuir.kernel({kind!r})"
    if needed and name in AXES and isinstance(value, tuple | list):
        if 1 <= len(_axes(value)) <= 3:
            return tuple(_numbers(where, name, n, 0) for n in _axes(value))
        raise refuse(where, name, ArgumentKind("one to three numbers", bool), value)
    if name == "skew":
        return _numbers(where, name, value, 0, whole=False)
    if needed or name in LEAST:
        found = _numbers(where, name, value, 0 if needed else LEAST[name])
        if name in ONE and (np.ndim(found) or found > MOST_OPERANDS):
            one = ArgumentKind(f"one number for all kernels, at most {MOST_OPERANDS}", bool)
            raise refuse(where, name, one, value)
        return found
    if name in NAMED:
        return value if name == "math" else dtype_of(value)
    if name == "epilogue":
        texts = (value,) if isinstance(value, str) else value
        if not many(TEXT).holds(texts):
            raise refuse(where, name, many(TEXT), value, 'epilogue=("bias", "gelu")')
        return tuple(texts)
    of = TEXT if name in TEXTS else FLAG
    if not of.holds(value):
        raise refuse(where, name, of, value)
    return value


def _axes(value: Any) -> tuple[Any, ...]:
    """The numbers of what has one an axis, or the one that it is."""
    is_several = isinstance(value, tuple | list)
    return tuple(cast("tuple[Any, ...]", value)) if is_several else (value,)


def _numbers(where: str, name: str, value: Any, least: float, whole: bool = True) -> Number:
    """A number, or an array of them, all finite and at least `least`."""
    what = f"{'a whole number' if whole else 'a number'} of {least} or more, or an array of them"
    kind = ArgumentKind(what, bool, f"give {name}=128, for example")
    if isinstance(value, str | bytes | bool) or value is None:
        raise refuse(where, name, kind, value)
    try:
        found = np.asarray(value)
    except (TypeError, ValueError) as error:  # lists of lists of several lengths
        raise refuse(where, name, kind, value) from error
    numbers = found.dtype.kind in "iuf" and found.size > 0
    if not numbers or not np.all(np.isfinite(found) & (found >= least) & (found <= MOST)):
        raise refuse(where, name, kind, value)
    if whole and not np.all(found == np.floor(found)):
        raise refuse(where, name, kind, value)
    if found.ndim:
        return found.astype(float)
    return int(found) if whole else float(found)


def _spread(kind: str, given: Mapping[str, Any], needed: Sequence[str]) -> dict[str, Any]:
    """The arguments, extents as arrays where any number is one: of many kernels each has its own.
    UsageError where arrays are not of one shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in given.items():
        for n in _axes(value):
            if np.ndim(n):
                shapes[name] = np.shape(n)
    if len(set(shapes.values())) > 1:
        raise UsageError(
            f"gpuir.kernel({kind!r}): arrays have different shapes",
            found=", ".join(f"{name}: {' x '.join(map(str, n))}" for name, n in shapes.items()),
            fix="give them the same length; a plain number is used for all",
        )
    if not shapes:
        return dict(given)
    shape = next(iter(shapes.values()))

    def each(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(each, _axes(value)))
        return np.broadcast_to(np.asarray(value, float), shape).copy()

    return {name: each(value) if name in needed else value for name, value in given.items()}


def _math(kind: str, dtype: str | DType, math: Any, products: bool) -> tuple[DType, DType | None]:
    """What operands are, and what their products run in where that is not the same."""
    for name, given in (("dtype", dtype), ("math", math)):
        if given is not None and not isinstance(given, str | DType):
            raise refuse(
                f"gpuir.kernel({kind!r})", name, ArgumentKind("a dtype", bool), given, 'dtype="f16"'
            )
    by_dtype = dtype in ("tf32", tf32)
    plain = f32 if by_dtype else dtype_of(dtype)
    if not (by_dtype or math is not None):
        return plain, None
    if not products:
        raise UsageError(
            f"gpuir.kernel({kind!r}): tf32 is how products of f32 run, and this has none",
            fix='dtype="f32"',
        )
    if (math is not None and math not in ("tf32", tf32)) or plain not in ROUNDED:
        raise UsageError(
            f"gpuir.kernel({kind!r}): products of {plain} cannot run in {math or 'tf32'}",
            expected='math="tf32" for f32 products, or no math',
            fix='dtype="f32", math="tf32"' if math in (None, "tf32") else "leave out math=",
        )
    return plain, tf32


def _full(kind: str, dtype: DType, given: Mapping[str, Any], needed: tuple[str, ...]) -> Work:
    """The work of a kernel; where an extent is 0, that of a launch that does nothing."""
    extents = {name: given[name] for name in given if name in (*needed, "b")}
    empty: Any = False
    for value in extents.values():
        for n in _axes(value):
            empty = empty | np.less(n, 1)
    if not np.any(empty):
        return _made(kind, dtype, given)

    def one(n: Any) -> Any:
        if isinstance(n, tuple):
            return tuple(map(one, _axes(n)))
        return np.where(empty, 1.0, n) if np.ndim(empty) else 1.0

    rest = {name: n for name, n in given.items() if np.ndim(empty) or name not in PARTED}
    work = _made(kind, dtype, rest | {name: one(n) for name, n in extents.items()})

    def none(n: Number) -> Number:
        return np.where(empty, 0.0, n) if np.ndim(empty) else 0.0

    return replace(
        work,
        dims=tuple((d, one(n)) for d, n in work.dims),
        operands=tuple(replace(o, nbytes=one(o.nbytes)) for o in work.operands),
        flops=none(work.flops),
        products=none(work.products),
        lane_ops=none(work.lane_ops),
        simd_ops=none(work.simd_ops),
    )


def _one_of(kind: str, name: str, value: str, known: Sequence[str]) -> str:
    if value not in known:
        raise UsageError(
            f"gpuir.kernel({kind!r}): no {name} {value!r}",
            expected=", ".join(x or '""' for x in known),
            fix=nearest(value, [x for x in known if x]),
        )
    return value


def _check_parts(
    kind: str, of: str, whole: Number, parts: str, by: Number, *, divides: bool = False
) -> None:
    """UsageError where there are fewer of one thing than of another, or not a multiple."""
    wrong = np.less(whole, by) | (np.not_equal(np.mod(whole, by), 0) if divides else False)
    if np.any(wrong):
        raise UsageError(
            f"gpuir.kernel({kind!r}): {of} and {parts} do not fit",
            expected=f"{of} is {f'a multiple of {parts}' if divides else f'at least {parts}'}",
            found=f"{of}={whole}, {parts}={by}",
            fix=f"change {parts}=",
        )


# ---------------------------------------------------------------------------- kinds


def _map(
    cells: Number,
    dtype: DType,
    *,
    inputs: int = 1,
    fn: str = "add",
    out: DType | None = None,
    of: str = "",
) -> Work:
    reads = [dtype] * inputs
    if not of:
        return sized.mapped(fn, cells, reads, out or dtype)
    return sized.pointwise(cells, reads, (out or dtype,), ops=lane_ops(fn, dtype), kind=of)


Made = Callable[..., Work]
KINDS: Mapping[str, Made] = {
    "gemm": sized.gemm,
    "conv": sized.conv,
    "attention": sized.attention,
    "rows": sized.rows,
    "map": _map,
    "experts": routing.mixture,
    "grouped": sized.grouped,
    "gather": sized.gather,
    "topk": sized.top_k,
}
# What is no question of a caller's: the dtype is one of every kind; how a kernel was measured.
OTHERS = ("dtype", "ops", "strays", "routed", "again")

CHOICES: Mapping[tuple[str, str], Sequence[str]] = {
    ("gemm", "layout"): ("nn", "nt", "tn", "tt"),
    ("gemm", "scales"): ("", "row", "block"),
    ("conv", "library"): CONV_LIBRARIES,
    ("attention", "library"): LIBRARIES,
    ("rows", "of"): ("softmax", "norm", "rms", "sum", "scan"),
    ("map", "of"): ("", "copy", "transpose", "quantise"),
    ("experts", "library"): tuple(dict.fromkeys(e.library for e in measured())),
    ("experts", "scales"): ("", "block"),
    ("grouped", "scales"): ("", "row", "block"),
}
# Of two arguments, the first is at least the second, or a multiple of it.
PARTS: Mapping[str, Sequence[tuple[str, str, bool]]] = {
    "conv": (("channels", "groups", True), ("filters", "groups", True)),
    "attention": (("heads", "kv_heads", True),),
    "experts": (
        *(("experts", "topk", False), ("experts", "ranks", True)),
        ("inter", "shards", True),
    ),
    "topk": (("columns", "k", False),),
}


def _made(kind: str, dtype: DType, given: Mapping[str, Any]) -> Work:
    """The work of a kernel, its arguments checked."""
    for name, value in given.items():
        if (kind, name) in CHOICES:
            _one_of(kind, name, value, CHOICES[kind, name])
    for fn in given.get("epilogue", ()):
        if fn not in SCALARS and fn != "bias":
            fix = nearest(fn, [*SCALARS, "bias"])
            raise UsageError(f"gpuir.kernel({kind!r}): no epilogue {fn!r}", fix=fix)
    if given.get("fn", "add") not in SCALARS:
        fix = nearest(given["fn"], SCALARS)
        raise UsageError(f"gpuir.kernel({kind!r}): no function {given['fn']!r}", fix=fix)
    for of, parts, divides in PARTS.get(kind, ()):
        if parts in given:
            _check_parts(kind, of, given[of], parts, given[parts], divides=divides)
    if kind == "conv":
        _check_windows(**given)
    return KINDS[kind](dtype=dtype, **given)


def _check_windows(
    *,
    size: Any,
    window: Any,
    dilation: Number = 1,
    padding: Number = 0,
    transposed: bool = False,
    **others: Any,
) -> None:
    """UsageError where images and windows have other numbers of axes, or a window is larger."""
    sizes, windows = sized.axes_of(size, window)
    if len(sizes) != len(windows):
        raise UsageError(
            "gpuir.kernel('conv'): size and window have different numbers of axes",
            found=f"size={size}, window={window}",
            fix="give both as many numbers, or one for all axes",
        )
    for n, taps in zip(sizes, windows, strict=True) if not transposed else ():
        padded, reach = n + 2 * padding, dilation * (taps - 1) + 1
        _check_parts("conv", "size with its padding", padded, "window", reach)


def parameters_of(made: Made) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The extents that a kind needs, and what may be said besides."""
    known = {n: p for n, p in signature(made).parameters.items() if n not in OTHERS}
    needed = tuple(n for n, p in known.items() if p.default is Parameter.empty)
    return needed, tuple(n for n in known if n not in needed)


# ---------------------------------------------------------------------------- of one's own


@takes(
    name=TEXT,
    dims=named(ArgumentKind("the extent of a loop", lambda n: True)),
    reads=many(many(TEXT)),
    writes=many(many(TEXT)),
    reduced=many(TEXT),
    ops=real(),
    products=FLAG,
    kept=many(whole()),
    dtypes=named(ArgumentKind("a dtype", lambda d: isinstance(d, str | DType)), whole()),
)
def nest(
    name: str,
    dims: Mapping[str, Number],
    *,
    reads: Sequence[tuple[str, ...]],
    writes: Sequence[tuple[str, ...]],
    reduced: Sequence[str] = (),
    dtype: str | DType = "f32",
    ops: float | None = None,
    products: bool = False,
    kept: Sequence[int] = (),
    dtypes: Mapping[int, str | DType] | None = None,
) -> Kernel:
    """A loop nest of one's own, for a generated kernel: a `Kernel` of no library.

    `dims` are its loops with their extents, outermost first. Each operand is a tuple of its axes,
    outermost in memory first; an axis is a loop, or a sum of loops with steps: a stencil reads
    `("y+i", "x+j")`, a dilated one `("y+2i", "x+2j")`. `reduced` loops are summed over. Each point
    of the nest takes `ops` instructions of the lanes; by default those of a multiply-add, which are
    one, or four of complex numbers. With `products` it takes a multiply-add of the matrix units,
    where the target has them for `dtype`, and `ops` besides (none by default): the nest is then a
    product of two reads, whose rows are loops of the first alone, columns loops of the second
    alone. `kept` are the reads that lie in constant memory; `dtypes` is by operand, reads first,
    where it is not `dtype`.
    """
    where = f"nest {name!r}"
    extents = {d: _numbers(where, d, n, 1) for d, n in dims.items()}
    plain, math = _math(name, dtype, None, products)
    for d in reduced:
        if d not in extents:
            raise UsageError(
                f"{where} has no loop {d!r} to sum over",
                expected=", ".join(extents),
                fix=nearest(d, extents) or f"give its extent: dims={{{d!r}: 128}}",
            )
    count = len(reads) + len(writes)
    for what, places, most in (("kept", kept, len(reads)), ("dtypes", dtypes or {}, count)):
        for i in places:
            if i >= most:
                raise UsageError(
                    f"{where}: {what} names the operand {i}",
                    expected=f"0 to {most - 1}" if most else "no operands",
                    fix="operands are counted from 0, reads first",
                )
    if not writes:
        raise UsageError(f"{where} writes nothing", fix='writes=[("y", "x")]: the axes of a result')
    operands: list[Operand] = []
    for i, (axes, staging) in enumerate(
        [*((a, "staged") for a in reads), *((a, "written") for a in writes)]
    ):
        cell = dtype_of((dtypes or {}).get(i, plain)).bits / 8
        cells: Number = 1.0
        for axis in axes:
            cells = cells * sized.reach(axis, extents, name)
        how: Staging = "kept" if i in kept else staging  # pyright: ignore[reportAssignmentType]
        operands.append(Operand(tuple(axes), cell, cells * cell, how))
    points: Number = 1.0
    for extent in extents.values():
        points = points * extent
    each = ops if ops is not None else 0.0 if products else plain.multiply_add / 2
    counted = plain.multiply_add if products or ops is None else 0
    work = Work(
        kernel="nest",
        dims=tuple(extents.items()),
        reduced=tuple(reduced),
        operands=tuple(operands),
        flops=(counted + (ops or 0.0)) * points,
        products=counted * points if products else 0.0,
        lane_ops=points * each,
        dtype=plain,
        pipe="tensor" if products else "vector",
        kind=name,
        math=math,
    )
    if products and roles_of(work) is None:
        raise UsageError(
            f"{where} is no product, which is all that matrix units compute",
            expected="two reads with a reduced loop, each with a loop that the other has not",
            found=f"reads={list(reads)}, reduced={list(reduced)}",
            fix="leave out products=True, or describe the two operands that are multiplied",
        )
    return Kernel(name, work)
