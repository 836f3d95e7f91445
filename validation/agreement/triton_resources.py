"""Shared memory, registers and spills that Triton's compiler gives a matmul, and gpuir's numbers.

    python -m validation.agreement.triton_resources [--write] [--jobs 2]

Prints the table beside gpuir's numbers; with `--write` it first compiles every configuration again
and writes the table, in a minute. Needs `triton==3.9.*` to compile, not to compare. No GPU is
needed: Triton compiles for one that is not there, and its ptxas says what a kernel takes. The
table, triton_resources.csv beside this file, is measured by this program with Triton 3.9.0 (ptxas
of its wheel):

    isa               sm_80, sm_90 (for which Triton takes wgmma where it can: 4 warps, 64 rows)
    dtype             of both operands: f16, f32 (which runs in TF32), i8
    block_m .. warps  the configuration; group is 8 in all
    smem_bytes        shared memory of a block: `metadata.shared`
    registers         of a thread
    spill_bytes       of a thread, stored and later loaded again: ptxas -v, "spill stores"
    stack_bytes       of a thread
    compiles          0 where ptxas refuses: wgmma keeps its sums in registers, and these are not
                      enough; `registers` is then what ptxas asks for

The kernel is the one of Triton's tutorial on matrix products: rows and columns wrap around, k is
masked, blocks in groups. Extents and the strides of rows are multiples of 16, cells of a row lie
side by side, as Triton sees a launch on plain tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gpuir.cost.generated import cost_of, needs
from gpuir.cost.legal import Need
from gpuir.cost.nest import Tiles
from gpuir.ir.notes import Tile
from gpuir.ir.types import tf32
from gpuir.targets.load import load_target
from gpuir.tune.kernels import kernel

TABLE = Path(__file__).with_suffix(".csv")
NO_SPILL_BYTES = 16  # a thread; that few are moved once, outside of the loop
TARGETS = {"sm_80": "a100-sxm-80gb", "sm_90": "h100-sxm-80gb"}


@dataclass(frozen=True)
class Config:
    """A matmul as it is compiled."""

    isa: str
    dtype: str
    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int


@dataclass(frozen=True)
class Resources:
    """What the compiler gave it."""

    smem_bytes: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    compiles: int = 1


# block_m, block_n, block_k, stages, warps. Those of the tutorial, and what lies around them: from
# a few rows to more accumulators than registers, from one stage to more than shared memory holds.
HALF = (
    *((128, 256, 64, 3, 8), (64, 256, 32, 4, 4), (128, 128, 32, 4, 4), (128, 64, 32, 4, 4)),
    *((64, 128, 32, 4, 4), (128, 32, 32, 4, 4), (64, 32, 32, 5, 2), (32, 64, 32, 5, 2)),
    *((128, 256, 128, 3, 8), (256, 128, 128, 3, 8), (256, 64, 128, 4, 4), (64, 256, 128, 4, 4)),
    *((128, 128, 128, 4, 4), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (128, 32, 64, 4, 4)),
    *((128, 128, 64, 1, 4), (128, 128, 64, 2, 4), (128, 128, 64, 3, 4), (128, 128, 64, 5, 4)),
    *((128, 128, 64, 3, 8), (128, 128, 16, 4, 4), (128, 128, 32, 3, 2), (64, 256, 64, 3, 8)),
    *((256, 128, 64, 3, 8), (256, 128, 64, 3, 4), (128, 256, 32, 3, 4), (256, 256, 64, 2, 8)),
    *((256, 256, 32, 3, 16), (256, 64, 32, 3, 8), (64, 64, 64, 3, 4), (64, 64, 64, 3, 2)),
    *((64, 64, 32, 3, 1), (64, 64, 128, 3, 8), (32, 32, 64, 4, 2), (32, 128, 64, 4, 4)),
    *((16, 64, 64, 5, 4), (16, 128, 128, 4, 4), (16, 16, 64, 3, 1), (16, 256, 64, 3, 8)),
)
WHOLE = ((128, 128, 32, 3, 8), (64, 64, 32, 4, 4), (128, 64, 16, 4, 4), (32, 32, 32, 3, 2))
BYTE = ((128, 128, 64, 4, 8), (128, 256, 128, 3, 8), (64, 64, 64, 3, 4), (64, 128, 128, 4, 4))
CONFIGS = [
    Config(isa, dtype, *numbers)
    for isa in TARGETS
    for dtype, table in (("f16", HALF), ("f32", WHOLE), ("i8", BYTE))
    for numbers in table
]


# ---------------------------------------------------------------------------- Triton


def matmul() -> Any:
    """The kernel. Triton reads the text of a function, whose names must be of a module."""
    import triton
    import triton.language as tl

    globals().update(triton=triton, tl=tl)

    @triton.jit
    def product(
        a_ptr,
        b_ptr,
        c_ptr,
        M,
        N,
        K,
        a_row,
        b_row,
        c_row,
        BLOCK_SIZE_M: tl.constexpr,
        BLOCK_SIZE_N: tl.constexpr,
        BLOCK_SIZE_K: tl.constexpr,
        GROUP_SIZE_M: tl.constexpr,
        SUM: tl.constexpr,
    ):
        pid = tl.program_id(0)
        tall, wide = tl.cdiv(M, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N)
        i, j = tl.swizzle2d(pid // wide, pid % wide, tall, wide, GROUP_SIZE_M)
        rows = (i * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)) % M
        columns = (j * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
        along = tl.arange(0, BLOCK_SIZE_K)
        a_cells = a_ptr + rows[:, None] * a_row + along[None, :]
        b_cells = b_ptr + along[:, None] * b_row + columns[None, :]
        total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=SUM)
        for step in range(tl.cdiv(K, BLOCK_SIZE_K)):
            left = K - step * BLOCK_SIZE_K
            a = tl.load(a_cells, mask=along[None, :] < left, other=0)
            b = tl.load(b_cells, mask=along[:, None] < left, other=0)
            total = tl.dot(a, b, total)
            a_cells += BLOCK_SIZE_K
            b_cells += BLOCK_SIZE_K * b_row
        c = total.to(c_ptr.dtype.element_ty)
        rows = i * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
        columns = j * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
        c_cells = c_ptr + rows[:, None] * c_row + columns[None, :]
        tl.store(c_cells, c, mask=(rows[:, None] < M) & (columns[None, :] < N))

    return product


def compiled(config: Config) -> Resources:
    """What Triton's compiler gives a configuration."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kind = {"f16": "fp16", "f32": "fp32", "i8": "i8"}[config.dtype]
    out = "i32" if kind == "i8" else kind
    constants = {
        "BLOCK_SIZE_M": config.block_m,
        "BLOCK_SIZE_N": config.block_n,
        "BLOCK_SIZE_K": config.block_k,
        "GROUP_SIZE_M": 8,
        "SUM": tl.int32 if kind == "i8" else tl.float32,
    }
    numbers = ("M", "N", "K", "a_row", "b_row", "c_row")
    signature = {"a_ptr": f"*{kind}", "b_ptr": f"*{kind}", "c_ptr": f"*{out}"}
    signature |= dict.fromkeys(numbers, "i32") | dict.fromkeys(constants, "constexpr")
    attrs = {(place,): [["tt.divisibility", 16]] for place in range(9)}
    source = ASTSource(fn=matmul(), signature=signature, constexprs=constants, attrs=attrs)
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    target = GPUTarget("cuda", int(config.isa.removeprefix("sm_")), 32)
    options = {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}
    with contextlib.redirect_stdout(io.StringIO()) as log:
        try:
            made = triton.compile(source, target=target, options=options)
        except triton.runtime.errors.PTXASError as refused:
            wants = re.search(r"register target of (\d+) or higher", str(refused))
            if wants is None:
                raise
            return Resources(0, int(wants[1]), 0, 0, compiles=0)
    said = log.getvalue()

    def number(text: str) -> int:
        found = re.search(rf"(\d+) {text}|{text} (\d+)", said)
        if found is None:
            raise ValueError(f"ptxas does not say {text!r}: {said}")
        return int(found[1] or found[2])

    return Resources(
        made.metadata.shared,
        number("registers"),
        number("bytes spill stores"),
        number("bytes stack frame"),
    )


def write(jobs: int) -> None:
    names = [f.name for kind in (Config, Resources) for f in fields(kind)]
    with ProcessPoolExecutor(jobs) as pool, TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, names, lineterminator="\n")
        table.writeheader()
        for config, found in zip(CONFIGS, pool.map(compiled, CONFIGS), strict=True):
            table.writerow(asdict(config) | asdict(found))
            file.flush()


# ---------------------------------------------------------------------------- gpuir


def rows() -> list[tuple[Config, Resources]]:
    """The table."""
    with TABLE.open(newline="") as file:
        return [(_of(Config, row), _of(Resources, row)) for row in csv.DictReader(file)]


def _of(kind: Any, row: dict[str, str]) -> Any:
    return kind(
        **{f.name: row[f.name] if f.type == "str" else int(row[f.name]) for f in fields(kind)}
    )


@dataclass(frozen=True)
class Predicted:
    """What gpuir says of it, of a product with large extents."""

    smem: Need
    registers: float  # a thread wants
    spilled: float  # registers of a thread that do not fit


def predicted(config: Config) -> Predicted:
    # which Triton's dot takes by itself
    math: dict[str, Any] = {"math": tf32} if config.dtype == "f32" else {}
    work = kernel("gemm", m=4096, n=4096, k=4096, dtype=config.dtype, **math).work
    sizes = (("m", config.block_m), ("n", config.block_n), ("k", config.block_k))
    tile = Tile(sizes, config.stages, config.warps, group=8)
    target = load_target(TARGETS[config.isa])
    found = {n.what: n for n in needs(work, Tiles.of(tile, work), target)}
    cost = cost_of(work, tile, target)
    registers, spilled = cost.fact("registers"), cost.fact("spilled")
    assert registers is not None and spilled is not None
    return Predicted(found["shared memory"], registers, spilled)


def compare() -> None:
    """A line a configuration, then how far gpuir is off, and how often it is wrong on legality."""
    numbers = ("m", "n", "k", "stages", "warps")
    line = "{:6}{:5}" + "{:>7}" * len(numbers) + "{:>9}{:>8}{:>7}{:>7}{:>7}{:>7}"
    print(line.format("isa", "dtype", *numbers, "smem", "gpuir", "regs", "gpuir", "spill", "gpuir"))
    errors: dict[str, list[float]] = {"shared memory": [], "registers, where none spill": []}
    wrong = {"too much shared memory": 0, "whether registers spill (or are too few)": 0}
    for c, r in rows():
        ours = predicted(c)
        smem_bytes = float(ours.smem.wants)
        spilled = r.spill_bytes if r.compiles else "never"
        sizes = (c.block_m, c.block_n, c.block_k, c.stages, c.warps)
        wants = (r.smem_bytes, f"{smem_bytes:.0f}", r.registers, f"{ours.registers:.0f}")
        print(line.format(c.isa, c.dtype, *sizes, *wants, spilled, f"{4 * ours.spilled:.0f}"))
        spills = r.spill_bytes > NO_SPILL_BYTES or not r.compiles
        wrong["whether registers spill (or are too few)"] += spills != (ours.spilled > 0)
        if r.compiles:
            has = float(ours.smem.has)
            wrong["too much shared memory"] += (r.smem_bytes > has) != (smem_bytes > has)
            errors["shared memory"].append(smem_bytes / r.smem_bytes - 1)
            if not r.spill_bytes:
                errors["registers, where none spill"].append(ours.registers / r.registers - 1)
    for name, found in errors.items():
        size = sorted(map(abs, found))
        near = sum(e <= 0.05 for e in size)
        print(
            f"{name}: median error {size[len(size) // 2]:.1%}, {min(found):+.0%} to "
            f"{max(found):+.0%}, within 5 % in {near} of {len(size)}"
        )
    for name, count in wrong.items():
        print(f"wrong on {name}: {count} of {len(rows())}")


def main() -> int:
    assert __doc__
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--write", action="store_true", help="compile, and write the table")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    if given.write:
        write(given.jobs)
    compare()
    return 0


if __name__ == "__main__":
    sys.exit(main())
