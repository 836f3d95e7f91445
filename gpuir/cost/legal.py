"""What a tile asks of a target: one list for libraries' kernels and for generated ones.

What differs between them is what a block of theirs takes (`BlockShare`: libraries' do not spill
registers, a compiler does), and the rules of their family, which join the list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gpuir.cost.family import Flags
from gpuir.cost.nest import MOST_REGISTERS, BlockShare, TiledNest, copies_asynchronously
from gpuir.cost.sheet import Number
from gpuir.targets.target import Target

MOST_THREADS = 1024  # of one block: CUDA C++ Programming Guide, compute capability table
TENSOR_MEMORY_BYTES = 128 * 512 * 4  # lanes, columns, bytes: PTX ISA, tcgen05 tensor memory
MOST_STAGES, PLAIN_STAGES = 8.0, 2.0  # assumed: steps in shared memory, or on their way there


@dataclass(frozen=True)
class Need:
    """Something a tile asks of the target: legal while `wants` is at most `has`."""

    what: str
    wants: Number
    has: Number
    unit: str
    of_target: bool = True  # else of the kernel, or of tiles in general

    def broken(self, target: Target) -> str:
        """What a tile wants and may not have, or an empty text."""
        if self.wants <= self.has:
            return ""
        limit = f"{target.name} has" if self.of_target else "at most"
        return f"{self.what}: {float(self.wants):,.0f} {self.unit}, {limit} {float(self.has):,.0f}"


def rule(what: str, wants: Number, has: Number, unit: str) -> Need:
    """What is asked of tiles on any target."""
    return Need(what, wants, has, unit, of_target=False)


def copies_ahead(target: Target) -> bool:
    """Whether copies of several steps may be on their way at once: asynchronous ones, or AMD's
    through registers (`cost.generated.shared`)."""
    return copies_asynchronously(target) or target.vendor == "AMD"


def needs_of(
    nest: TiledNest, target: Target, block: BlockShare, rules: Iterable[Need] = ()
) -> tuple[Need, ...]:
    """What tiles ask of the target, and of the kernel; `rules` are those of its family besides."""
    tiles, work, sm = nest.tiles, nest.work, target.sm
    found = [rule(f"{d}: cells of a tile", 1.0, n, "at least") for d, n in nest.sizes.items()]
    found.extend(rules)

    def room(what: str, wants: Number, has: float, unit: str) -> None:
        found.append(Need(what, wants, float(has), unit))

    room("threads", block.threads, min(MOST_THREADS, sm.threads), "a block")
    room("shared memory", block.smem_bytes, sm.smem_bytes_per_block, "bytes a block")
    if block.tensor_bytes is not None:
        most = float(TENSOR_MEMORY_BYTES)
        found.append(rule("tensor memory", block.tensor_bytes, most, "bytes a block"))
    if block.registers is not None:
        found.append(rule("registers", block.registers, float(MOST_REGISTERS), "a thread"))
        room("register file", block.registers * block.threads, sm.registers, "a block")
    staged = work.is_contraction or any(o.staging == "staged" for o in work.operands)
    ahead = MOST_STAGES if copies_ahead(target) else PLAIN_STAGES
    what = "stages" if staged else "stages (this kernel has no operands to stage)"
    found.append(rule(what, tiles.stages, ahead if staged else 1.0, "deep"))
    found.extend(
        rule(f"split of the steps along {d}", tiles.split, nest.counts[d], "blocks")
        for d in work.reduced
    )
    if work.kind == "scan":
        most = np.where(np.asarray(work.extents["o"]) == 1, np.inf, 1.0)
        found.append(rule("split (running sums of several rows)", tiles.split, most, "blocks"))
    elif not work.is_sum:
        why = "each block needs the whole sum" if work.reduced else "this kernel computes no sum"
        found.append(rule(f"split ({why})", tiles.split, 1.0, "blocks"))
    return tuple(found)


def product_rules(
    nest: TiledNest, face: tuple[str, str, str], called: Mapping[str, str] | None = None
) -> Iterator[Need]:
    """Of matrix instructions: whole ones along rows, columns and the sum, in this order in `face`;
    `called` has the names of dimensions for people. Libraries' attention names no sum there: their
    instructions may be eight keys deep, and they pad heads by themselves."""
    (down, across, deep), sizes = face, nest.sizes
    called = called or {d: d for d in face}
    yield rule(f"{called[down]} in steps of 16", sizes[down] % 16, 0.0, "rows over")
    yield rule(f"{called[across]} in steps of 8", sizes[across] % 8, 0.0, "columns over")
    if nest.work.kernel != "k.attention":
        chunk = sizes[deep] * nest.work.dtype.bits / 8 % 32
        yield rule(f"{called[deep]} in steps of 32 bytes", chunk, 0.0, "bytes over")
    elif deep:
        yield rule(f"{called[deep]} in steps of 16", sizes[deep] % 16, 0.0, "columns over")


# ---------------------------------------------------------------------------- of many tiles


@dataclass(frozen=True)
class Legal:
    """Of each of many tiles whether the target can run it. `reasons` has a text for each; those of
    legal ones are empty."""

    ok: Flags
    broken: tuple[tuple[Flags, Need], ...]
    target: Target

    @property
    def reasons(self) -> list[str]:
        """Why each is not legal: the first thing that does not fit."""
        found = [""] * len(self.ok)
        for wrong, need in reversed(self.broken):
            wants = np.broadcast_to(need.wants, self.ok.shape)
            has = np.broadcast_to(need.has, self.ok.shape)
            for i in np.flatnonzero(wrong):
                one = Need(need.what, wants[i], has[i], need.unit, need.of_target)
                found[i] = one.broken(self.target)
        return found


def joined(parts: Sequence[Legal]) -> Legal:
    """The answers of parts of an array, one after another."""
    if len(parts) == 1:
        return parts[0]
    size = sum(len(p.ok) for p in parts)
    found: dict[str, tuple[Flags, Need]] = {}
    begin = 0
    for p in parts:
        here = slice(begin, begin + len(p.ok))
        begin = here.stop
        for wrong, need in p.broken:
            if need.what not in found:
                whole = Need(need.what, np.zeros(size), np.zeros(size), need.unit, need.of_target)
                found[need.what] = np.zeros(size, bool), whole
            flags, whole = found[need.what]
            flags[here], whole.wants[here], whole.has[here] = wrong, need.wants, need.has
    broken = found.values()
    return Legal(np.concatenate([p.ok for p in parts]), tuple(broken), parts[0].target)


def judged(found: Iterable[Need], target: Target, count: int) -> Legal:
    """Whether each of `count` tiles, or kernels, has what it needs."""
    ok, broken = np.ones(count, bool), list[tuple[Flags, Need]]()
    for need in found:
        wrong = np.broadcast_to(np.asarray(need.wants) > need.has, (count,))
        if wrong.any():
            ok &= ~wrong
            broken.append((wrong, need))
    return Legal(ok, tuple(broken), target)
