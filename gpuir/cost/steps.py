"""What library routines do, step by step: passes over memory, launches, steps that wait for each
other. Nothing of it was fitted; each count says where it comes from.

A row of `ROUTINES` is a function from a routine to its ways: what a library may do of which the
quickest counts. A routine without a row reads and writes each operand once. Counts never fall as an
extent grows, so that neither does the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil, log2, prod
from typing import Any

from gpuir.cost.data import table
from gpuir.cost.work import Detail, Threads
from gpuir.ops import tensor as t

# Routines that are one launch in which threads have nothing to say to each other: a map's formulas
# hold for them, and its errors where such kernels are no further off than a kind not measured.
STREAMS = frozenset(
    ("multi_tensor", "adaptive_pool", "adaptive_pool_gradient", "grid_sample", "roi_align")
    + (
        "col2im",
        "im2col",
        "digit_sort",
        "edge_padding_gradient",
        "lu_unpack",
        "part_starts",
        "part_sums",
        "reverse_sequence",
    )
    + ("run_parts", "run_starts", "sums_before")
)
INDEX_BYTES = 8  # PyTorch's indices are i64
# Digits of a radix sort: cub's DeviceRadixSort takes 8 bits a pass and reads and writes keys and
# values once in each, after one pass that counts (Adinets, Merrill: Onesweep, arXiv:2206.01784).
DIGIT_BITS = 8
# Rows of so many cells and fewer are sorted by a block each, in shared memory, 4 bits at a time
# (PyTorch, aten/src/ATen/native/cuda/Sort.cu and SortUtils.cuh: radixSortKVInPlace).
BLOCK_SORTS = 4096
BLOCK_DIGIT_OPS = 30.0  # instructions of a key in such a pass: assumed
# Several long rows are sorted by segment, or twice over (Sort.cu: segmented_sort_pairs,
# segmented_sort_pairs_by_full_sort): between one sort and two. Assumed.
SEGMENTED = 1.5
# PyTorch's top-k finds the k-th largest digit by digit: 2 bits a pass where a block has a row, 8
# where many share it, and gathers in two passes more (TensorTopK.cu, SortingRadixSelect.cuh).
SELECT_BITS, SHARED_SELECT_BITS = 2, 8
SELECT_CLOCKS = 600.0  # a block agrees on a digit: that of a sum in `cost.rows`
WARP_CLOCKS = 20.0  # a thread's cell in such a pass, and its vote: assumed
# A cell of a Philox random number, ten rounds a four of them (Salmon and others, SC 2011).
RANDOM_OPS = 25.0
# A transform of so many points stays on chip; a longer one takes a pass for each factor of that
# size (cuFFT documentation: "fits in shared memory"; 2^12 complex f32 are 32 KiB).
FFT_POINTS = 4096
SEARCH_OPS = 12.0  # a step of a bisection: assumed
NMS_WORD = 64  # boxes that a step of the greedy choice goes through (torchvision, nms_kernel.cu)

PANEL = 32  # columns of a panel, between the launches of two: assumed
OUTER = 128  # after so many what is left of the matrix, a third, is read and written: assumed

# A CPU's, in clocks of one core: a key and halving of a sort (16 in torch.sort, 5 to 11 in
# numpy.argsort), a cell that a selection goes by, a number drawn, a step of a bisection, a cell
# whose being there is asked (a mispredicted branch), any other cell. Measured on an Intel Xeon
# (Cascade Lake, 2.5 GHz) under PyTorch 2.13 by tools/routines.py, but for the last: assumed.
SORT_CLOCKS, SELECT_CELL_CLOCKS, RANDOM_CLOCKS, SEARCH_CLOCKS = 12.0, 16.0, 20.0, 20.0
ASKED_CLOCKS, COUNT_CLOCKS = 30.0, 3.0
FFT_SHARE = 0.1  # of a CPU's f32 peak, that transforms reach: the same


@dataclass(frozen=True)
class OfMatrix:
    """A routine on matrices: a row of data/matrices.csv."""

    routine: str
    column_clocks: float
    lapack_share: float
    source: str
    batched: int = 1 << 62
    lapack_clocks: float = 1000.0  # assumed


@cache
def of_matrices() -> dict[str, OfMatrix]:
    """The routines on matrices, by name."""
    return {x.routine: x for x in table("matrices", OfMatrix)}


@dataclass(frozen=True)
class RoutineWay(Detail):
    """What one way of doing a routine takes: bytes through memory in all its passes, kernels in a
    row, blocks that can work beside each other (0: as many as there are SMs), clocks that nothing
    hides, instructions of the lanes, and flops of matrix products."""

    moved: float
    launches: float = 1.0
    blocks: float = 0.0
    clocks: float = 0.0
    ops: float = 0.0
    products: float = 0.0


@dataclass(frozen=True)
class RoutineSteps(Detail):
    """A routine's ways on a GPU, and on a CPU clocks of one core beside flops at a share of its
    peak, so many pieces of which are beside each other; how a GPU's threads share it out, where
    that is known."""

    ways: tuple[RoutineWay, ...]
    cpu_clocks: float = 0.0
    cpu_flops: float = 0.0
    pieces: float = 1.0
    threads: Threads | None = None


def name_of(op: t.Routine | t.TopK) -> str:
    """What its kernels are called: of a top-k of the whole row, a sort."""
    if isinstance(op, t.Routine):
        return op.fn
    return "sort" if op.k == op.x.type.shape[op.axis] else "topk"


def of(op: t.Routine | t.TopK) -> RoutineSteps:
    """What a routine does."""
    if isinstance(op, t.TopK):
        return _top_k(op)
    if op.fn in of_matrices():
        return _decomposition(op)
    return ROUTINES.get(op.fn, _once)(op)


def _bytes(op: t.Routine) -> float:
    return float(sum(v.type.nbytes for v in op.args) + sum(x.nbytes for x in op.gives))


def _cells(op: t.Routine) -> float:
    return float(max((x.size for x in (*(v.type for v in op.args), *op.gives)), default=1))


def _once(op: t.Routine) -> RoutineSteps:
    """Each operand read, and each result written, once."""
    ops = op.flops() + 4.0 * _cells(op)
    return RoutineSteps(
        (RoutineWay(_bytes(op), ops=ops),), cpu_clocks=COUNT_CLOCKS * _cells(op) + op.flops()
    )


# ---------------------------------------------------------------------------- sorting


def _sorted(rows: float, length: float, cell: float, value: float = INDEX_BYTES) -> RoutineWay:
    """Rows sorted, each key with a value. Indices are made, keys copied, then a pass a digit. One
    in a block's shared memory takes two passes of memory in all."""
    keys, bits = rows * length, 8 * cell
    made = keys * (2 * cell + value)
    digits = ceil(bits / DIGIT_BITS)
    moved = keys * (cell + digits * 2 * (cell + value))
    if length <= BLOCK_SORTS:
        halvings = ceil(log2(max(length, 2)))
        counted = min(ceil(bits / 4) * BLOCK_DIGIT_OPS, 3.0 * halvings * (halvings + 1))
        waits = SELECT_CLOCKS * min(ceil(bits / 4), halvings)
        moved = keys * 2 * (cell + value)
        return RoutineWay(made + moved, 3.0, clocks=waits, ops=keys * (counted + 8))
    again = 1.0 if rows == 1 else SEGMENTED
    return RoutineWay(
        made + again * moved, 3.0 + again * (digits + 1), ops=again * digits * keys * 20
    )


def _selected(rows: float, length: float, k: float, cell: float) -> tuple[RoutineWay, ...]:
    """The k largest of rows, not yet in order: a block a row, or many."""
    keys, bits = rows * length, 8 * cell
    found = rows * k * (cell + INDEX_BYTES)
    alone = ceil(bits / SELECT_BITS) + 2
    steps = ceil(length / 1024) * WARP_CLOCKS + SELECT_CLOCKS
    waves = ceil(rows / 128)  # blocks of 1024 threads, one or two an SM: assumed
    clocks = alone * steps * waves
    one = RoutineWay(keys * cell * alone + found, 1.0, rows, clocks, ops=keys * alone * 6)
    shared = ceil(bits / SHARED_SELECT_BITS)
    launches = 2.0 * shared + 4
    many = RoutineWay(keys * cell * (shared + 2) + found, launches, ops=keys * (shared + 2) * 8)
    return one, many


def _after(first: RoutineWay, then: RoutineWay) -> RoutineWay:
    """One after the other."""
    return RoutineWay(
        moved=first.moved + then.moved,
        launches=first.launches + then.launches,
        blocks=first.blocks,
        clocks=first.clocks + then.clocks,
        ops=first.ops + then.ops,
        products=first.products + then.products,
    )


def _top_k(op: t.TopK) -> RoutineSteps:
    x = op.x.type
    length = float(x.shape[op.axis])
    return top_k(x.size / max(length, 1.0), length, float(op.k), x.dtype.bits / 8)


def top_k(rows: float, length: float, k: float, cell: float) -> RoutineSteps:
    """The k largest of rows selected, then put in order; or all put in order, which a whole row is.
    (PyTorch takes the latter where rows are few and long, TensorTopK.cpp.)"""
    whole, ordered = _sorted(rows, length, cell), _sorted(rows, k, cell)
    ways = tuple(_after(way, ordered) for way in _selected(rows, length, k, cell))
    sorting = SORT_CLOCKS * rows * length * log2(max(length, 2.0))
    choosing = SELECT_CELL_CLOCKS * rows * length + SORT_CLOCKS * rows * k * log2(max(k, 2.0))
    return RoutineSteps((*ways, whole), cpu_clocks=min(choosing, sorting), pieces=max(rows, 1.0))


def _unique(op: t.Routine) -> RoutineSteps:
    """A sort, neighbours compared, places counted, those that differ kept (PyTorch, UniqueCub.cu);
    the host waits for how many there are."""
    x = op.args[0].type
    n, cell = float(x.size), x.dtype.bits / 8
    whole = _sorted(1.0, n, cell)
    more = RoutineWay(n * (2 * cell + 4 * INDEX_BYTES), 5.0, ops=12 * n)
    clocks = SORT_CLOCKS * n * log2(max(n, 2.0))
    return RoutineSteps((_after(whole, more),), cpu_clocks=clocks)


def _mode(op: t.Routine) -> RoutineSteps:
    x = op.args[0].type
    axis = int(str(dict(op.attrs).get("axis", -1)))
    length = float(x.shape[axis])
    whole = _sorted(x.size / max(length, 1.0), length, x.dtype.bits / 8)
    runs = RoutineWay(3.0 * x.nbytes, 3.0, ops=12.0 * x.size)
    return RoutineSteps(
        (_after(whole, runs),), cpu_clocks=SORT_CLOCKS * x.size * log2(max(length, 2.0)),
        pieces=max(x.size / max(length, 1.0), 1.0),
    )  # fmt: skip


def _search(op: t.Routine) -> RoutineSteps:
    """A bisection a number: steps go through the cache."""
    line, x = op.args[0].type, op.args[1].type
    halvings = log2(max(line.shape[-1] if line.shape else 1, 2))
    way = RoutineWay(_bytes(op), ops=SEARCH_OPS * x.size * halvings, clocks=300 * halvings)
    return RoutineSteps((way,), cpu_clocks=SEARCH_CLOCKS * x.size * halvings)


def _picked(op: t.Routine) -> RoutineSteps:
    """Counted, then gathered: two reads (PyTorch, Nonzero.cu: cub's DeviceReduce, DeviceSelect)."""
    x = op.args[0].type
    way = RoutineWay(x.nbytes + _bytes(op), 4.0, ops=12.0 * x.size)
    return RoutineSteps((way,), cpu_clocks=ASKED_CLOCKS * x.size)


def _kept(op: t.Routine) -> RoutineSteps:
    """Non-maximum suppression: scores in order, every pair of boxes, then the greedy choice, box
    by box (torchvision, nms_kernel.cu; onnxruntime, non_max_suppression_impl.cu), each image and
    class after the other."""
    boxes, scores = op.args[0].type, op.args[1].type
    n = float(boxes.shape[-2])
    each = float(prod(scores.shape[:-1]))
    order = _sorted(1.0, n, 4.0)
    pairs = n * ceil(n / NMS_WORD) * INDEX_BYTES
    one = _after(order, RoutineWay(boxes.nbytes + 2 * pairs, 3.0, clocks=20 * n, ops=8 * n * n))
    way = RoutineWay(
        each * one.moved, each * one.launches, clocks=each * one.clocks, ops=each * one.ops
    )
    return RoutineSteps((way,), cpu_clocks=each * (10.0 * n * log2(max(n, 2.0))) + op.flops())


def _random(op: t.Routine) -> RoutineSteps:
    cells = _cells(op)
    return RoutineSteps(
        (RoutineWay(_bytes(op), ops=RANDOM_OPS * cells),), cpu_clocks=RANDOM_CLOCKS * cells
    )


def _transformed(op: t.Routine) -> RoutineSteps:
    """A Fourier transform: a pass over all cells for each axis, and for each factor of a long one;
    a half that is not stored is filled in by one more."""
    x, y = op.args[0].type, op.gives[0]
    attrs: Mapping[str, Any] = dict(op.attrs)
    axes: tuple[int, ...] | None = attrs.get("axes")
    wide = x.shape if x.size >= y.size else y.shape
    named = (attrs.get("axis", -1),) if axes is None else axes
    if op.fn == "stft":
        points: list[int] = [wide[-1] if len(wide) else 1]
    else:
        points = [wide[a] for a in named if isinstance(a, int)] or [max(wide, default=1)]
    passes = sum(max(1, ceil(log2(max(n, 2)) / log2(FFT_POINTS))) for n in points)
    once = float(x.nbytes + y.nbytes)
    way = RoutineWay(passes * once, float(passes), ops=0.5 * op.flops() + 4 * max(x.size, y.size))
    return RoutineSteps((way,), cpu_clocks=2.0 * _cells(op), cpu_flops=op.flops() / FFT_SHARE)


def _recurrent(op: t.Routine) -> RoutineSteps:
    """A step of the sequence after the other."""
    length = float(op.args[0].type.shape[-2]) if op.args[0].type.rank > 1 else 1.0
    way = RoutineWay(_bytes(op), ops=0.5 * op.flops() + 4 * _cells(op), clocks=200.0 * length)
    return RoutineSteps((way,), cpu_clocks=COUNT_CLOCKS * _cells(op) + op.flops())


# ---------------------------------------------------------------------------- matrices


def _decomposition(op: t.Routine) -> RoutineSteps:
    """Columns one after another, panels that read and write what is left of the matrix, and the
    products of it all; of a batch beside each other where there is a kernel for that."""
    own = of_matrices()[op.fn]
    *lead, m, n = op.args[0].type.shape
    count, columns = float(prod(lead)), float(min(m, n))
    turns = 1.0 if max(m, n) <= own.batched else max(count, 1.0)
    factor = 2.0 if op.fn == "qr" and dict(op.attrs).get("mode") != "r" else 1.0
    panels = ceil(columns / PANEL)
    way = RoutineWay(
        moved=_bytes(op) * (1 + ceil(columns / OUTER) / 3),
        launches=1 + 2.0 * panels,
        clocks=own.column_clocks * factor * columns * turns,
        ops=4.0 * _cells(op),
        products=float(op.flops()),
    )
    clocks = own.lapack_clocks * columns * count
    return RoutineSteps((way,), clocks, op.flops() / own.lapack_share, max(count, 1.0))


ROUTINES: dict[str, Callable[[t.Routine], RoutineSteps]] = {
    "unique": _unique,
    "mode": _mode,
    "search": _search,
    "nonzero": _picked,
    "compress": _picked,
    "nms": _kept,
    "random": _random,
    "fft": _transformed,
    "dft": _transformed,
    "stft": _transformed,
    "linear_attention": _recurrent,
}
