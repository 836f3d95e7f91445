"""Shared memory that Triton's compiler gives a matmul on many GPUs, and gpuir's count of it.

    python -m validation.agreement.triton_shared [--write]

Prints how far gpuir is off; with `--write` it first compiles every row of the table again, in some
minutes. Needs `triton==3.9.*` to compile, not to compare, and no GPU. The table, triton_shared.csv
beside this file, was drawn at random and measured by this program with Triton 3.9.0:

    isa              as targets have it: sm_80, gfx950
    dtype, weight    of the left operand and the products; of the right one where that is narrower:
                     i8, or i4 and i2, packed into bytes of cells that are neighbours in memory
    layout           "n" or "t" for each operand: whether it lies transposed
    m n k            the block; stages and warps
    smem_bytes       of a block: `metadata.shared`
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from gpuir.cost.generated import needs
from gpuir.cost.nest import Tiles
from gpuir.ir.types import tf32
from gpuir.targets.load import load_target
from gpuir.tune.kernels import kernel

TABLE = Path(__file__).with_suffix(".csv")
TARGETS = {
    "sm_80": "a100-sxm-80gb",
    "sm_90": "h100-sxm-80gb",
    "sm_100": "b200-sxm-180gb",
    "sm_120": "rtx5090",
    "gfx942": "mi300x",
    "gfx950": "mi355x",
}


@dataclass(frozen=True)
class Row:
    """A matmul as it is compiled, and what it takes."""

    isa: str
    dtype: str
    weight: str
    layout: str
    m: int
    n: int
    k: int
    stages: int
    warps: int
    smem_bytes: int


def rows() -> list[Row]:
    """The table."""
    kinds: dict[str, Any] = {f.name: int if f.type == "int" else str for f in fields(Row)}
    with TABLE.open(newline="") as file:
        return [Row(**{k: kinds[k](v) for k, v in r.items()}) for r in csv.DictReader(file)]


# ---------------------------------------------------------------------------- Triton


def product() -> Any:
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
        BM: tl.constexpr,
        BN: tl.constexpr,
        BK: tl.constexpr,
        SUM: tl.constexpr,
        LEFT: tl.constexpr,
        RIGHT: tl.constexpr,
        CELLS: tl.constexpr,  # in a byte
    ):
        BITS: tl.constexpr = 8 // CELLS
        MASK: tl.constexpr = (1 << BITS) - 1
        i, j = tl.program_id(0), tl.program_id(1)
        down = (i * BM + tl.arange(0, BM)) % M
        across = (j * BN + tl.arange(0, BN)) % N
        along = tl.arange(0, BK)
        if LEFT:
            a_cells = a_ptr + down[:, None] + along[None, :] * a_row
        else:
            a_cells = a_ptr + down[:, None] * a_row + along[None, :]
        if RIGHT:
            b_cells = b_ptr + tl.arange(0, BK // CELLS)[:, None] + across[None, :] * b_row
        elif CELLS == 1:
            b_cells = b_ptr + along[:, None] * b_row + across[None, :]
        else:
            words = j * (BN // CELLS) + tl.arange(0, BN // CELLS)
            b_cells = b_ptr + along[:, None] * b_row + words[None, :]
        total = tl.zeros((BM, BN), dtype=SUM)
        for step in range(tl.cdiv(K, BK)):
            left = K - step * BK
            a = tl.load(a_cells, mask=along[None, :] < left, other=0)
            if CELLS == 1:
                b = tl.load(b_cells, mask=along[:, None] < left, other=0)
            else:
                w = tl.load(b_cells)
                if CELLS == 2:
                    x = tl.join(w & MASK, w >> BITS)
                else:
                    low = tl.join(w & MASK, (w >> 2 * BITS) & MASK)
                    high = tl.join((w >> BITS) & MASK, w >> 3 * BITS)
                    x = tl.join(low, high)
                    x = tl.reshape(x, (x.shape[0], x.shape[1], 4))
                if RIGHT:
                    x = tl.permute(x, (0, 2, 1))
                b = tl.reshape(x, (BK, BN))
            total = tl.dot(a, b.to(a.dtype), total)
            a_cells += BK * (a_row if LEFT else 1)
            b_cells += BK // CELLS if RIGHT else BK * b_row
        c = total.to(c_ptr.dtype.element_ty)
        down = i * BM + tl.arange(0, BM)
        across = j * BN + tl.arange(0, BN)
        c_cells = c_ptr + down[:, None] * c_row + across[None, :]
        tl.store(c_cells, c, mask=(down[:, None] < M) & (across[None, :] < N))

    return product


def compiled(row: Row) -> int:
    """The shared memory that Triton's compiler gives a row. It is known before code is made."""
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    named = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "i8": "i8", "f8e4m3": "fp8e4nv"}
    left = named[row.dtype]
    right = "u8" if row.weight in ("i4", "i2") else named[row.weight or row.dtype]
    out = {"i8": "i32", "fp8e4nv": "fp16"}.get(left, left)
    constants: dict[str, Any] = {"BM": row.m, "BN": row.n, "BK": row.k}
    constants |= {"SUM": tl.int32 if left == "i8" else tl.float32}
    constants |= {side: c == "t" for side, c in zip(("LEFT", "RIGHT"), row.layout, strict=True)}
    constants["CELLS"] = {"i4": 2, "i2": 4}.get(row.weight, 1)
    numbers = ("M", "N", "K", "a_row", "b_row", "c_row")
    signature = {"a_ptr": f"*{left}", "b_ptr": f"*{right}", "c_ptr": f"*{out}"}
    signature |= dict.fromkeys(numbers, "i32") | dict.fromkeys(constants, "constexpr")
    attrs = {(place,): [["tt.divisibility", 16]] for place in range(9)}
    amd = row.isa.startswith("gfx")
    if amd:  # as a launch on tensors of less than 2 GB has it
        attrs |= {(p,): [["tt.divisibility", 16], ["tt.pointer_range", 32]] for p in range(3)}
    source = ASTSource(fn=product(), signature=signature, constexprs=constants, attrs=attrs)
    target = GPUTarget("hip", row.isa, 64) if amd else GPUTarget("cuda", int(row.isa[3:]), 32)
    backend = make_backend(target)
    asked = {**source.parse_options(), "num_warps": row.warps, "num_stages": row.stages}
    options = backend.parse_options(asked)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, codegen, modules, context)
    metadata: dict[str, Any] = {"target": target, **vars(options)}
    for name in ("ttir", "ttgir", "llir"):
        module = stages[name](module, metadata)
    return int(metadata["shared"])


def write() -> None:
    again = [asdict(row) | {"smem_bytes": compiled(row)} for row in rows()]
    with TABLE.open("w", newline="") as file:
        table = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        table.writeheader()
        table.writerows(again)


# ---------------------------------------------------------------------------- gpuir


def counted(row: Row) -> tuple[float, float]:
    """Bytes that gpuir says a block takes, and the most there is."""
    more: dict[str, Any] = {"math": tf32} if row.dtype == "f32" else {}
    if row.weight:
        more["weight"] = row.weight
    size = dict.fromkeys("mnk", 4096)
    work = kernel("gemm", **size, dtype=row.dtype, layout=row.layout, **more).work
    sizes = {"b": 1.0, "m": 1.0 * row.m, "n": 1.0 * row.n, "k": 1.0 * row.k}
    tiles = Tiles(sizes, 1.0 * row.stages, 1.0 * row.warps)
    found = {n.what: n for n in needs(work, tiles, load_target(TARGETS[row.isa]))}
    need = found["shared memory"]
    return float(np.ravel(need.wants)[0]), float(np.ravel(need.has)[0])


def compare() -> None:
    """A line for each isa and width of the weight."""
    line = "{:8}{:8}{:>6}{:>14}{:>14}{:>16}{:>16}{:>14}"
    head = (
        "isa",
        "weight",
        "rows",
        "least ratio",
        "most ratio",
        "within 1 %",
        "impossible",
        "refused",
    )
    print(line.format(*head))
    groups: dict[tuple[str, str], list[tuple[Row, float, float]]] = defaultdict(list)
    for row in rows():
        groups[row.isa, row.weight].append((row, *counted(row)))
    for (isa, weight), found in sorted(groups.items()):
        ratios = [ours / row.smem_bytes for row, ours, _ in found]
        near = sum(abs(x - 1) <= 0.01 for x in ratios)
        let = sum(ours <= has < row.smem_bytes for row, ours, has in found)
        refused = sum(row.smem_bytes <= has < ours for row, ours, has in found)
        ends = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
        print(line.format(isa, weight or "-", len(found), *ends, near, let, refused))


def main() -> int:
    assert __doc__
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--write", action="store_true", help="compile, and write the table")
    if parser.parse_args().write:
        write()
    compare()
    return 0


if __name__ == "__main__":
    sys.exit(main())
