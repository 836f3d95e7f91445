"""Which loops are one launch, and in which order launches run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Protocol

from gpuir.fusion.groups import Groups
from gpuir.ir.graph import Value
from gpuir.stacks.inductor.loops.indices import Index, Read


class Limits(Protocol):
    """How far fusing goes: options of the pass."""

    @property
    def max_loops(self) -> int: ...
    @property
    def far(self) -> int: ...
    @property
    def aggressive(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class LoopGroup:
    """Loops that are one launch, or a library call."""

    items: tuple[int, ...]  # its loops, in the order in which they were made
    members: tuple[int, ...]  # places of its nodes in the graph, in order
    writes: frozenset[Value]
    reads: frozenset[Value]
    cells: int = 1  # of a reduction, its rows
    row: int = 1  # cells of a row that a reduction runs over
    indices: frozenset[Index] = frozenset()
    irregular: frozenset[Read] = frozenset()  # that no index says
    straight: bool = True  # runs over its cells in their order
    scattered: frozenset[Value] = frozenset()  # written in another order than cell by cell
    library: bool = False
    partial: bool = False  # a sum of which another is taken: its rows are not those of the tensor
    backward: bool = False
    waits: frozenset[int] = frozenset()  # the loops that make what it reads

    @property
    def is_reduction(self) -> bool:
        return self.row > 1

    @property
    def first(self) -> int:
        return self.items[0]

    @property
    def last(self) -> int:
        return self.items[-1]


def joined(a: LoopGroup, b: LoopGroup) -> LoopGroup:
    """Two launches as one, `a` being the earlier."""
    items = tuple(sorted((*a.items, *b.items)))
    writes = a.writes | b.writes
    whole = b if b.is_reduction and not a.is_reduction else a
    return LoopGroup(
        items=items,
        members=tuple(sorted({*a.members, *b.members})),
        writes=writes,
        reads=(a.reads | b.reads) - writes,
        cells=whole.cells,
        row=whole.row,
        indices=a.indices | b.indices,
        irregular=a.irregular | b.irregular,
        straight=a.straight and b.straight,
        scattered=a.scattered | b.scattered,
        partial=a.partial or b.partial,
        backward=a.backward,
        waits=(a.waits | b.waits).difference(items),
    )


def fits(a: LoopGroup, b: LoopGroup) -> bool:
    """Whether two launches run over the same cells: of a reduction, all of them or one a row."""
    if a.is_reduction and b.is_reduction:
        return (a.cells, a.row) == (b.cells, b.row)
    if a.is_reduction or b.is_reduction:
        whole, map_ = (a, b) if a.is_reduction else (b, a)
        return map_.cells == whole.cells or (
            map_.cells == whole.cells * whole.row and not whole.partial
        )
    return a.cells == b.cells


def is_own_index(at: Index, a: LoopGroup, b: LoopGroup) -> bool:
    """Whether what `a` writes is read by `b` in the trip that wrote it: cell by cell, in whatever
    order its loops then run, or row by row. A pointwise loop over a row's cells between those of
    other rows is none: Inductor leaves a reduction over a middle axis by itself (torch 2.13:
    torch/_inductor/scheduler.py, fusable_read_and_write)."""
    moving = sorted((d for d in at.dims if d[1]), key=lambda d: -d[1])
    if not b.is_reduction and len(moving) < len(at.dims) > 2:
        return False
    step = 1
    for n, s in reversed(moving):
        if s != step:
            return False
        step *= n
    still = prod(n for n, s in at.dims if not s)
    return step == at.leaf.type.size and (still == 1 or still == max(a.row, b.row))


def apart(a: LoopGroup, b: LoopGroup) -> int:
    """How many loops lie between two launches at most."""
    return max(abs(a.first - b.first), abs(a.last - b.last))


@dataclass
class LoopFusion:
    """Loops on their way to be launches. `rows` names what has a cell for each row of a value that
    is made row by row."""

    groups: Groups[LoopGroup]
    rows: Mapping[Value, Value]
    limits: Limits

    def run(self) -> list[LoopGroup]:
        """Fuses pairs, those first that share most, until none is left that may; the launches in
        the order in which they run. (scheduler.py, fuse_nodes: ten times at most.)"""
        of = self.groups.of
        for _ in range(10):
            fused = False
            for _, i, j in sorted(self.pairs()):
                a, b = sorted((of[i], of[j]), key=lambda x: x.first)
                if a is not b and self.score(a, b) and not self.is_cyclic(a, b):
                    launch = joined(a, b)
                    self.groups.put(launch, launch.items)
                    fused = True
            if not fused:
                break
        return self.groups.ordered()

    def is_cyclic(self, a: LoopGroup, b: LoopGroup) -> bool:
        """Whether something between the two waits for one and is waited for by the other."""
        return self.groups.leads(a, b.waits) or self.groups.leads(b, a.waits)

    def pairs(self) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Launches, by their first loops, that touch the same tensor and may be one, each with its
        place in the queue."""
        touching: dict[Value, list[LoopGroup]] = {}
        for launch in dict.fromkeys(self.groups.of.values()):
            for v in () if launch.library else launch.writes | launch.reads:
                touching.setdefault(v, []).append(launch)
        done: set[tuple[int, int]] = set()
        for group in touching.values():
            for a, b in combinations(group, 2):
                i, j = a.first, b.first
                # what every layer reads has too many readers to try each with each
                if (i, j) in done or j - i > 8 * self.limits.far:
                    continue
                done.add((i, j))
                if score := self.score(a, b):
                    alike = a.is_reduction == b.is_reduction
                    yield (-alike, -score, apart(a, b), i, j), i, j

    def score(self, a: LoopGroup, b: LoopGroup) -> int:
        """The bytes that two launches need not move if they are one; 0 if they may not be. `a` is
        the earlier."""
        if a.library or b.library or a.backward != b.backward:
            return 0
        if len(a.items) + len(b.items) > self.limits.max_loops or not fits(a, b):
            return 0
        if passed := a.writes & b.reads:
            may = not passed & a.scattered and self.is_in_step(a, b, passed)
            return size(passed) if may else 0
        alike: set[Index | Read] = {*(a.indices & b.indices)}
        if a.straight and b.straight:
            alike |= a.irregular & b.irregular
        shared = size({at.leaf for at in alike})
        if self.limits.aggressive and not (a.is_reduction or b.is_reduction):
            shared = shared or size(a.reads & b.reads)
        return shared if shared >= 10 and apart(a, b) <= self.limits.far else 0

    def is_in_step(self, a: LoopGroup, b: LoopGroup, passed: Iterable[Value]) -> bool:
        """Whether `b` reads what `a` passes on in the trip that wrote it."""
        read_as = {self.rows.get(v, v) for v in passed}  # a row may be read in any order
        return read_as.isdisjoint(r.leaf for r in b.irregular) and all(
            is_own_index(at, a, b) for at in b.indices if at.leaf in read_as
        )


def size(values: Iterable[Value]) -> int:
    return sum(v.type.nbytes for v in values)
