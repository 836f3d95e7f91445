"""Products in a loop nest that is no GEMM: which loops are its rows, columns, batch and sum.

Matrix units multiply rows of one operand by columns of another, whatever loops the two are indexed
by. A kernel of one's own (a nest, a kernel of a plug-in) is costed by the formulas of products, as
the product that it is under its tile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpuir.cost.nest import Tiles, cut
from gpuir.cost.sheet import Number, Sheet
from gpuir.cost.sized import terms
from gpuir.cost.work import Operand, Work, product
from gpuir.targets.target import Target


@dataclass(frozen=True)
class Roles:
    """The loops of a product: of both operands and the result, of the left one (rows), of the right
    one (columns), and of the sum; and which operands are multiplied."""

    batch: tuple[str, ...]
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    summed: tuple[str, ...]
    left: int
    right: int


def roles_of(work: Work) -> Roles | None:
    """What the loops of a kernel on the matrix units are to its product; None where it has none:
    where not just two operands are summed over, or one of them has no loop of its own."""
    loops = [{d for axis in o.dims for _, d in terms(axis)} for o in work.operands]
    summed = [
        i
        for i, o in enumerate(work.operands)
        if o.staging != "written" and loops[i] & set(work.reduced)
    ]
    if work.pipe != "tensor" or len(summed) != 2:
        return None
    left, right = summed
    rows = tuple(d for d in work.grid if d in loops[left] - loops[right])
    columns = tuple(d for d in work.grid if d in loops[right] - loops[left])
    batch = tuple(d for d in work.grid if d not in rows + columns)
    if not (rows and columns):
        return None
    return Roles(batch, rows, columns, work.reduced, left=left, right=right)


def is_product(work: Work, target: Target) -> bool:
    """Whether a kernel that is no contraction of gpuir's own runs as a product on the matrix units
    of a target."""
    if work.is_contraction or work.pipe != "tensor" or target.is_cpu:
        return False
    on_tensor = target.peak_rule("tensor", work.rate_dtype).startswith("tensor")
    return on_tensor and roles_of(work) is not None


def costed_as(work: Work, tiles: Tiles, target: Target, xp: Any = np) -> tuple[Work, Tiles]:
    """A kernel and its tiles as formulas have them: a product for what runs as one."""
    return as_product(work, tiles, xp) if is_product(work, target) else (work, tiles)


def as_product(work: Work, tiles: Tiles, xp: Any = np) -> tuple[Work, Tiles]:
    """A kernel that has `roles_of`, as the GEMM with as many blocks and steps. `xp` has functions
    for the numbers, as in `Sheet.xp`.

    Where several loops are rows, columns or the sum, tiles that do not divide them pad each. Of a
    batch that one block goes through itself, the steps are more.
    """
    roles = roles_of(work)
    assert roles is not None, work.kernel
    nest = cut(work, tiles, Sheet(xp))
    sizes, count = nest.sizes, nest.counts

    def tile(loops: Iterable[str]) -> Number:
        return product(sizes[d] for d in loops)

    def extent(loops: tuple[str, ...]) -> Number:
        if len(loops) == 1:
            return xp.maximum(work.extents[loops[0]], 1.0)
        return product(count[d] * sizes[d] for d in loops)

    batch = product(count[d] for d in roles.batch)
    names = {"m": roles.rows, "n": roles.columns, "k": roles.summed}
    extents = {d: extent(loops) for d, loops in names.items()}
    extents["k"] = extents["k"] * tile(roles.batch)
    sides = {roles.left: ("b", "m", "k"), roles.right: ("b", "k", "n")}
    operands = [
        replace(
            o, dims=sides.get(i, ("b", "m", "n")), staging="staged" if i in sides else o.staging
        )
        for i, o in enumerate(work.operands)
    ]
    made = replace(
        work,
        kernel="k.gemm",
        dims=(("b", batch), *extents.items()),
        reduced=("k",),
        operands=tuple(sorted(operands, key=_place)),
    )
    dims = {"b": 1.0, **{d: tile(loops) for d, loops in names.items()}}
    return made, replace(tiles, dims=dims)


def _place(o: Operand) -> int:
    """Left operands first, then right ones, then what is added to the result, then the result."""
    if o.staging == "written":
        return 3
    places: dict[tuple[str, ...], int] = {("b", "m", "k"): 0, ("b", "k", "n"): 1}
    return places.get(o.dims, 2)


def names_in(work: Work, made: Work) -> dict[str, str]:
    """What the dimensions of a product are called in the kernel that it was made of."""
    if work is made:
        return {d: d for d in work.extents}
    roles = roles_of(work)
    assert roles is not None
    parts = {"b": roles.batch, "m": roles.rows, "n": roles.columns, "k": roles.summed}
    return {d: " times ".join(loops) for d, loops in parts.items()}


def spread(cells: Number, loops: tuple[str, ...], extents: dict[str, int]) -> dict[str, Number]:
    """A tile's cells along several loops: as far along the inner ones as they go."""
    found: dict[str, Number] = {}
    left = np.asarray(cells, float)
    for d in reversed(loops):
        whole = float(1 << (extents[d] - 1).bit_length())
        found[d] = np.minimum(left, whole) if d != loops[0] else left
        left = np.maximum(left / found[d], 1.0)
    return found
