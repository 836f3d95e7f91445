"""Shared memory of a block that walks along k, as Triton 3.9 allocates it.

`validation/agreement/triton_resources.py` compares this with what its compiler says; compilers that
we have not seen (CUTLASS's, TVM's) are taken to do the same.

A step's operands are staged so many times over:

- by instructions of four warps, which read shared memory, once for each stage, and before those
  once less: the last copy is in registers (Triton, lib/Dialect/TritonGPU/Transforms/Pipeliner);
- on AMD once less; on gfx950, whose copies do not pass registers, once for each stage, in rows with
  gaps (third_party/amd/lib/TritonAMDGPUTransforms: LowerLoops.cpp; Utility.cpp,
  composePaddedLayoutForAsyncCopyCDNA4);
- in one stage nothing is staged: on AMD operands pass through one after the other.

What is stored narrower than it is multiplied is widened in registers. Where the matrix instruction
wants it in shared memory, it has a place there besides, as wide as it is multiplied. So has what is
packed below a byte, whose cells change places between threads, one operand after the other; but not
on NVIDIA's where a byte's cells lie along k, as the instruction takes them. (Bytes hold cells that
are neighbours in memory.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpuir.cost.generated.parts import is_amd, log2, where
from gpuir.cost.sheet import Number
from gpuir.ir.types import DType
from gpuir.targets.target import Target

VECTOR_BYTES = 16.0  # of a lane's widest copy into the memory of a gfx950 (global_load_lds_dwordx4)
# What `Work.form` says of kernels of AMD's Composable Kernel, whose copies pass registers on every
# GPU (include/ck/tensor_operation/gpu/block: blockwise_gemm_pipeline_xdlops).
COMPOSABLE = "composable kernel"
ALIGNED_BYTES = 16.0  # where an allocation begins: Triton, lib/Analysis/Allocation.cpp


@dataclass(frozen=True)
class Staged:
    """One operand of a step: its rows or columns, bytes of a cell in memory, and whether cells side
    by side there lie along k."""

    rows: Number
    cell_bytes: float
    along_k: bool


def smem_bytes(
    target: Target,
    dtype: DType,
    operands: tuple[Staged, Staged],
    k: Number,
    stages: Number,
    four: Number,
    form: str = "",
) -> Number:
    """Bytes of a block that multiplies in `dtype`; `four` is 1 where its instructions are of four
    warps, `form` is `Work.form`."""
    if form == COMPOSABLE:
        once = np.maximum(stages - 1, 1.0)
        return once * k * sum(o.rows * o.cell_bytes for o in operands)
    wide = max(dtype.bits / 8, 1.0)
    copied: Number = 0.0  # in stages
    beside: Number = 0.0  # widened, of all operands at once
    in_turn: Number = 0.0  # widened, of one after the other
    largest: Number = 0.0
    once = np.maximum(stages - 1, 0.0)
    for o in operands:
        size, widened = o.rows * k * o.cell_bytes, o.rows * k * wide
        largest = np.maximum(largest, np.maximum(size, widened))
        if is_amd(target):
            if o.cell_bytes >= 1:
                copied = copied + _copies(target, dtype, operands, o, size, k, stages)
            else:
                in_turn = np.maximum(in_turn, widened)
        elif o.cell_bytes >= wide:
            copied = copied + size * np.maximum(once + four, 1.0)
        elif o.cell_bytes >= 1:
            copied = copied + size * np.maximum(once, 1 - four)
            beside = beside + widened * four
        else:
            stays = float(o.along_k) * (once > 0)
            copied = copied + size * once
            beside = beside + widened * four
            in_turn = np.maximum(in_turn, widened * (1 - four) * (1 - stays))
    total = copied + beside + in_turn
    return where(np.asarray(stages) > 1, total, largest) if is_amd(target) else total


def _copies(
    target: Target,
    dtype: DType,
    operands: tuple[Staged, Staged],
    o: Staged,
    size: Number,
    k: Number,
    stages: Number,
) -> Number:
    """Bytes of an operand's copies on AMD."""
    if target.isa != "gfx950":
        return size * (stages - 1)
    nbytes = size * stages
    square = where(np.minimum(operands[0].rows, operands[1].rows) >= 32, 32.0, 16.0)
    lot = target.sm.warp * VECTOR_BYTES  # that a warp copies at once, side by side
    gaps = np.ceil(nbytes / lot) - 1
    padded = nbytes + gaps * _gap_bytes(dtype, o, k, square, target.sm.warp)
    return np.ceil(padded / ALIGNED_BYTES) * ALIGNED_BYTES


def _gap_bytes(dtype: DType, o: Staged, k: Number, square: Number, warp: int) -> Number:
    """Bytes between what warps copy on a gfx950, so that rows begin in other banks; `square` are
    the rows and columns of a matrix instruction. None where rows are too few, or cells of 4 bytes.
    """
    cell = o.cell_bytes
    if cell > 2:
        return 0.0 * square
    taken = cell * _cells(dtype, k, square)  # bytes along k that an instruction takes of a lane
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
    wanted = warp / lanes * apart
    conflicts = 1 + np.maximum(np.ceil(log2(np.maximum(wanted, 1.0) / rows)), 0.0)
    most = where(strict, 1.0, 2.0)
    fits = (apart >= conflicts) & (conflicts <= most) & (row >= VECTOR_BYTES)
    return where(fits, gap, 0.0)


def _cells(dtype: DType, k: Number, square: Number) -> Number:
    """Cells along k that a matrix instruction of a gfx950 takes of each lane: of the longest that
    the step holds (MfmaGroup.cpp; fp8 and i8 have one of twice the length)."""
    if dtype.bits > 8:
        return where((square == 32) | (np.asarray(k) >= 32), 8.0, 4.0)
    long = where(square == 32, 64.0, 128.0) / (1.0 if dtype.is_float else 2.0)
    return where(np.asarray(k) >= long, 16.0, 8.0)
