"""Shared memory of a block that walks along k, as Triton 3.9 allocates it.

`validation/agreement/triton_resources.py` compares this with what its compiler says; compilers that
we have not seen (CUTLASS's, TVM's) are taken to do the same.

A step's operands are staged so many times over:

- by instructions of four warps, which read shared memory, once for each stage, and before those
  once less: the last copy is in registers (Triton, lib/Dialect/TritonGPU/Transforms/Pipeliner);
- on AMD once less; on gfx950, whose copies do not pass registers, once for each stage, in rows with
  gaps (third_party/amd/lib/TritonAMDGPUTransforms: LowerLoops.cpp; Utility.cpp,
  composePaddedLayoutForAsyncCopyCDNA4);
- not at all in one stage, or where a thread would copy less than 4 bytes at once (`_is_staged`).
  Then they pass through shared memory on their way to the instruction: on AMD one operand after the
  other.

What is stored narrower than it is multiplied is widened in registers. Where the matrix instruction
wants it in shared memory, it has a place there besides, as wide as it is multiplied.

What is packed below a byte changes places between threads after it is unpacked. (Bytes hold cells
that are neighbours in memory.) How much that takes depends on where a byte's cells lie:

- across k: all of the widened operand, staged or not;
- along k, on NVIDIA: nothing where it is staged, and else the packed bytes, since Triton moves the
  exchange before the unpacking (OptimizeDotOperands.cpp; RemoveLayoutConversions.cpp);
- along k, on AMD: the packed bytes in one stage; in more, all of the widened operand, or nothing
  where the exchange stays within warps (`_stays_in_warps`).

Not counted: what the results pass through as they are stored, when the operands are gone. It is
more than the operands take in small steps, but less than any GPU has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpuir.cost.generated.parts import is_amd, log2, where
from gpuir.cost.sheet import Number
from gpuir.ir.types import DType
from gpuir.targets.target import Target

VECTOR_BYTES = 16.0  # of a lane's widest copy into the memory of a gfx950 (global_load_lds_dwordx4)
# What `Work.form` says of kernels of AMD's Composable Kernel, whose copies pass registers on every
# GPU (include/ck/tensor_operation/gpu/block: blockwise_gemm_pipeline_xdlops).
COMPOSABLE = "composable kernel"
LEAST_BYTES = 4.0  # of a thread's asynchronous copy: PTX ISA, cp.async
ALIGNED_BYTES = 16.0  # where an allocation begins: Triton, lib/Analysis/Allocation.cpp


@dataclass(frozen=True)
class Staged:
    """One operand of a step: its rows or columns, bytes of a cell in memory, and whether cells side
    by side there lie along k."""

    rows: Number
    cell_bytes: float
    along_k: bool

    def nbytes(self, k: Number) -> Number:
        return self.rows * k * self.cell_bytes


class ProductStep(NamedTuple):
    """A step of a block that multiplies in `dtype`: `k` cells of the rows and columns of its
    operands. `four` is 1 where its instructions are of four warps, `form` is `Work.form`."""

    target: Target
    dtype: DType
    left: Staged
    right: Staged
    k: Number
    stages: Number
    warps: Number
    four: Number
    form: str

    @property
    def square(self) -> Number:
        """Rows and columns of a matrix instruction on AMD."""
        return where(np.minimum(self.left.rows, self.right.rows) >= 32, 32.0, 16.0)


def smem_bytes(x: ProductStep) -> Number:
    """Bytes that a block takes for its steps."""
    k, operands = x.k, (x.left, x.right)
    if x.form == COMPOSABLE:
        once = np.maximum(x.stages - 1, 1.0)
        return once * k * sum(o.rows * o.cell_bytes for o in operands)
    wide = max(x.dtype.bits / 8, 1.0)
    copied: Number = 0.0  # in stages
    beside: Number = 0.0  # of all operands at once
    in_turn: Number = 0.0  # of one after the other
    once = np.maximum(x.stages - 1, 0.0)
    for o in operands:
        size, widened = o.nbytes(k), o.rows * k * wide
        staged = (once > 0) * _is_staged(x, o)
        if is_amd(x.target):
            if o.cell_bytes >= 1:
                copied = copied + staged * _copies(x, o)
                turned = (1 - staged) * where(once > 0, widened, size)
            elif o.along_k:
                turned = where(once > 0, widened, size) * (1 - _stays_in_warps(x, o))
            else:
                turned = widened
            in_turn = np.maximum(in_turn, turned)
        else:
            narrow = float(o.cell_bytes < wide)
            copied = copied + size * staged * (once + x.four * (1 - narrow))
            if o.cell_bytes >= 1:
                rest = (1 - staged) * size
            elif o.along_k:
                rest = (1 - staged) * size / _parts(x, o)
            else:
                rest = widened
            beside = beside + where(x.four * narrow > 0, widened, rest)
    return copied + beside + in_turn


def _is_staged(x: ProductStep, o: Staged) -> Number:
    """1 where the copies of an operand run ahead: a thread copies 4 bytes or more that lie side by
    side (lib/Dialect/TritonGPU/Transforms/Pipeliner/AssignLatencies.cpp), in the order that its
    products want. That is not the order of bytes that threads hold a whole line of each, and no
    other (lib/Dialect/TritonGPU/IR/Dialect.cpp, getOrderForMemory), nor on sm_90 of bytes across k
    before an instruction of four warps."""
    target, k = x.target, x.k
    threads = x.warps * target.sm.warp
    if target.isa == "gfx950":
        return np.ones_like(threads)
    line = (k if o.along_k else o.rows) * o.cell_bytes
    own = o.nbytes(k) / threads
    vector = np.minimum(np.minimum(line, own), VECTOR_BYTES)
    is_turned = np.zeros(np.shape(vector), bool)
    if o.cell_bytes == 1 and x.dtype.bits == 8 and not o.along_k:
        is_turned = (vector == line) & (own == line)
        is_turned = is_turned | ((np.asarray(x.four) > 0) & (target.isa == "sm_90"))
    return 1.0 * ((vector >= LEAST_BYTES) & ~is_turned)


def _stays_in_warps(x: ProductStep, o: Staged) -> Number:
    """1 where the cells of a packed operand reach the threads that multiply them by shuffles alone:
    within their warp, and by fewer than two exchanges of lanes for registers (Triton,
    lib/Analysis/Utility.cpp, cvtNeedsWarpShuffle). Counted in bits of an index."""
    square, lane = x.square, log2(x.target.sm.warp)
    first, last, columns = _loaded(x, o, lane)
    taken = log2(_cells(x, square))
    side = log2(square)
    kept = np.minimum(last, taken + lane - side) - np.maximum(first, taken)
    moved = (last - first) - np.maximum(kept, 0) + np.maximum(columns - side, 0)
    side_by_side = _warps_across(x.left.rows / square, x.right.rows / square, x.warps, 0.5)
    same = (columns == side) & (side_by_side == x.warps) | (np.asarray(x.warps) == 1)
    return 1.0 * (same & (moved < 2))


def _loaded(x: ProductStep, o: Staged, lane: float) -> tuple[Number, Number, Number]:
    """How a packed operand lies in threads as it is loaded along k, in bits of an index: those of k
    below the first number are of a thread, those up to the second of lanes; the third are bits of
    columns that lanes have too. Warps have the next of columns, and threads the rest."""
    own = np.maximum(o.nbytes(x.k) / (x.warps * 2**lane), 1)
    first = log2(np.minimum(np.minimum(x.k * o.cell_bytes, own), VECTOR_BYTES))
    first = first - log2(o.cell_bytes)
    last = np.minimum(log2(x.k), first + lane)
    return first, last, lane - (last - first)


def _parts(x: ProductStep, o: Staged) -> Number:
    """In how many parts a packed operand passes through shared memory on NVIDIA's: parts that
    threads have both before and after, besides words of 4 bytes (Triton, lib/Tools/
    GenericSwizzling.cpp). An instruction takes of a thread 4 cells that lie side by side along k,
    of 16, and of 8 columns (PTX ISA, mma.m16n8)."""
    first, _, columns = _loaded(x, o, 5.0)
    side_by_side = _warps_across(x.left.rows / 16, x.right.rows / 8, x.warps, 2.0)
    low = -log2(o.cell_bytes)
    along = np.maximum(np.minimum(first, 2) - low, 0) + np.maximum(first - 4, 0)
    before, after = columns + log2(x.warps), 3 + log2(side_by_side)
    whole = np.maximum(log2(o.rows) - np.maximum(before, after), 0)
    return 2.0 ** np.maximum(along + whole - 2, 0)


def _copies(x: ProductStep, o: Staged) -> Number:
    """Bytes of an operand's copies on AMD."""
    size = o.nbytes(x.k)
    if x.target.isa != "gfx950":
        return size * (x.stages - 1)
    nbytes = size * x.stages
    lot = x.target.sm.warp * VECTOR_BYTES  # that a warp copies at once, side by side
    gaps = np.ceil(nbytes / lot) - 1
    padded = nbytes + gaps * _gap_bytes(x, o)
    return np.ceil(padded / ALIGNED_BYTES) * ALIGNED_BYTES


def _gap_bytes(x: ProductStep, o: Staged) -> Number:
    """Bytes between what warps copy on a gfx950, so that rows begin in other banks. None where rows
    are too few, or cells of 4 bytes."""
    cell, k, square = o.cell_bytes, x.k, x.square
    if cell > 2:
        return 0.0 * square
    taken = cell * _cells(x, square)  # bytes along k that a lane gives at once
    if o.along_k:
        gap = where(taken == 16, where(square == 16, 2.0, 1.0) * taken, 8.0)
        strict, banks = taken == 16, where(taken == 16, 256.0, 128.0)
        row, rows = k * cell, o.rows
    else:  # by instructions that turn what they read
        gap = where(taken >= 8, square * cell, 8.0)
        strict, banks = np.zeros(np.shape(taken), bool), where(taken >= 8, 256.0, 128.0)
        row, rows = o.rows * cell, k
    lanes = np.maximum(row / VECTOR_BYTES, 1.0)
    apart = np.floor(np.minimum(row, banks) / gap)  # rows that begin in different banks
    wanted = x.target.sm.warp / lanes * apart
    conflicts = 1 + np.maximum(np.ceil(log2(np.maximum(wanted, 1.0) / rows)), 0.0)
    most = where(strict, 1.0, 2.0)
    fits = (apart >= conflicts) & (conflicts <= most) & (row >= VECTOR_BYTES)
    return where(fits, gap, 0.0)


def _warps_across(rows: Number, columns: Number, warps: Number, shape: float) -> Number:
    """Warps side by side along the columns of a block of so many instructions. Each doubling goes
    where a warp has more left, `shape` of an instruction considered (AccelerateMatmul.cpp,
    warpsPerTileV2; AccelerateAMDMatmul.cpp, warpsPerTile)."""
    down = across = np.ones(np.broadcast_shapes(*map(np.shape, (rows, columns, warps))))
    for _ in range(5):  # 32 warps at most
        more = down * across < warps
        is_down = (shape * rows / down >= columns / across) & (down < rows)
        down = where(more & is_down, 2 * down, down)
        across = where(more & ~is_down, 2 * across, across)
    return where(across > columns, down, across)


def _cells(x: ProductStep, square: Number) -> Number:
    """Cells along k that a matrix instruction takes of each lane; on gfx950 of the longest that the
    step holds (MfmaGroup.cpp; fp8 and i8 have one of twice the length)."""
    dtype, k = x.dtype, x.k
    if x.target.isa != "gfx950":
        return (4.0 if dtype.bits > 8 else 8.0) + 0 * square
    if dtype.bits > 8:
        return where((square == 32) | (np.asarray(k) >= 32), 8.0, 4.0)
    long = where(square == 32, 64.0, 128.0) / (1.0 if dtype.is_float else 2.0)
    return where(np.asarray(k) >= long, 16.0, 8.0)
