"""A scheduled loop nest as a compiler has it: what its parts touch, and what a CPU takes for it.

Plain data, that an adapter reads off a compiler's own: statements under loops, the variables that
they go through, as sums and remainders of the loops, and the cells that they touch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np

from gpuir.targets.target import Target

# A number, a loop by its name, or ("+" "-" "*" "//" "%", left, right).
Expression = int | str | tuple[str, Any, Any]
Interval = tuple[int, int]

LINE_BYTES = 64  # a cache line of x86-64: Intel 64 and IA-32 Architectures Optimization Manual
ADD_CLOCKS = 4.0  # a multiply-add waits for the one before it, there, Skylake Server and later
LOADS_PER_CLOCK, OPS_PER_CLOCK = 2.0, 2.0  # of vectors, the same
L2_BYTES_PER_CLOCK = 32.0  # of one core, sustained: the same, cache hierarchy
HELD = 0.7  # of a cache's bytes, that a tile can count on; assumed
FORK_S = 5e-6  # threads begin and end a parallel loop; assumed
HALF_VECTOR = 0.5  # of the speed of vectors, where only LLVM makes them; assumed


@dataclass(frozen=True)
class NestLoop:
    """`kind` is serial, parallel, vector, unrolled, or the index that it is bound to: blockIdx.x,
    vthread.y, threadIdx.x."""

    name: str
    extent: int
    kind: str = "serial"


@dataclass(frozen=True)
class BufferAccess:
    """Cells of a buffer that each run of a statement touches: along each axis a sum of steps times
    variables, and from there on so many cells. `exact` says that it is that sum and no more."""

    buffer: str
    scope: str
    cell_bytes: float
    axes: tuple[tuple[tuple[int, str], ...], ...]
    cells: tuple[int, ...]
    writes: bool = False
    exact: bool = True


@dataclass(frozen=True)
class Statement:
    """A statement, its loops from the outermost in, and its variables as they follow from those.

    `unrolls` is up to how many runs in a row the compiler writes out; `ops` the instructions of the
    lanes that each run takes.
    """

    name: str
    loops: tuple[NestLoop, ...]
    variables: Mapping[str, Expression]
    reduced: frozenset[str]
    accesses: tuple[BufferAccess, ...]
    unrolls: int = 0
    ops: float = 1.0

    @property
    def runs(self) -> int:
        return prod(loop.extent for loop in self.loops)

    @cached_property
    def spans(self) -> Mapping[str, tuple[int, ...]]:
        """Of each variable, how far it goes while the loops from each depth on run: at depth 0 all
        of them, at the last none."""
        depths = range(len(self.loops) + 1)
        return {
            name: tuple(span(e, {x.name: x.extent for x in self.loops[d:]}) for d in depths)
            for name, e in self.variables.items()
        }

    def cells(self, access: BufferAccess, depth: int) -> tuple[int, ...]:
        """Cells along each axis that the loops from a depth on touch."""
        return tuple(
            n + sum(abs(step) * (self.spans[v][depth] - 1) for step, v in axis)
            for axis, n in zip(access.axes, access.cells, strict=True)
        )

    def footprint(self, access: BufferAccess, depth: int) -> float:
        """Bytes of whole cache lines that they touch."""
        *outer, inner = self.cells(access, depth) or (1,)
        lines = ceil(inner * access.cell_bytes / LINE_BYTES)
        return prod(outer) * max(lines, 1) * LINE_BYTES

    def moves(self, access: BufferAccess, loop: NestLoop) -> int:
        """By how many cells of the innermost axis a loop moves an access; more than a line where
        along another axis."""
        one = {loop.name: 2}
        steps = [
            sum(abs(step) * (span(self.variables[v], one) - 1) for step, v in axis)
            for axis in access.axes
        ]
        if not steps:
            return 0
        return LINE_BYTES if any(steps[:-1]) else steps[-1]


def span(e: Expression, free: Mapping[str, int]) -> int:
    """How many numbers from its least to its most an expression goes through, while the `free`
    loops run and others stand at 0."""
    low, high = interval(e, free)
    return high - low + 1


def interval(e: Expression, free: Mapping[str, int]) -> Interval:
    if isinstance(e, int):
        return e, e
    if isinstance(e, str):
        return 0, free.get(e, 1) - 1
    op, left, right = e
    (a, b), (c, d) = interval(left, free), interval(right, free)
    match op:
        case "+":
            return a + c, b + d
        case "-":
            return a - d, b - c
        case "*":
            corners = (a * c, a * d, b * c, b * d)
            return min(corners), max(corners)
        case "//":
            return a // max(c, 1), b // max(c, 1)
        case _:  # a remainder
            within = c > 0 and a // c == b // c
            return (a % c, b % c) if within else (0, max(c, 1) - 1)


def distinct(e: Expression, free: Sequence[NestLoop]) -> int:
    """How many different numbers an expression takes while these loops run and others stand."""
    return lying(e, free).places


class ThreadPlaces(NamedTuple):
    """How threads lie along a variable: how many places they have, which thread is the first that
    has another than thread 0 (of no use where there is one place), and how far apart that is."""

    places: int
    first: int
    step: int


def lying(e: Expression, free: Sequence[NestLoop]) -> ThreadPlaces:
    """How the threads of these loops lie along a variable; the last loop's are neighbours."""
    extents = [loop.extent for loop in free]
    at = np.indices(extents).reshape(len(extents), prod(extents))
    ids = {loop.name: at[i] for i, loop in enumerate(free)}
    found = np.broadcast_to(np.asarray(_at(e, ids)), prod(extents))
    others = np.flatnonzero(found != found[0])
    if not len(others):
        return ThreadPlaces(1, len(found), 0)
    first = int(others[0])
    return ThreadPlaces(len(np.unique(found)), first, abs(int(found[first] - found[0])))


def _at(e: Expression, values: Mapping[str, Any]) -> Any:
    if isinstance(e, int):
        return e
    if isinstance(e, str):
        return values.get(e, 0)
    op, left, right = e
    a, b = _at(left, values), _at(right, values)
    match op:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "//":
            return a // b
        case _:
            return a % b


# ---------------------------------------------------------------------------- a CPU

TERMS = ("arithmetic", "waits", "loads", "trips", "second cache", "shared cache", "memory")


def cpu_terms(s: Statement, target: Target, cores: int) -> dict[str, float]:
    """Seconds that a statement takes of one core's instructions, of waits for sums, of loads, of
    trips through loops, and of each cache that its tiles do not fit.

    Lines move once each time that the largest tile that fits a cache is gone through (Lam,
    Rothberg, Wolf: The cache performance and optimizations of blocked algorithms, ASPLOS 1991).
    """
    parallel = prod(x.extent for x in s.loops if x.kind == "parallel")
    used = min(max(parallel, 1), cores)
    rounds = ceil(max(parallel, 1) / used) / max(parallel, 1)  # of the runs, on the busiest core
    clock = rounds / target.clock_hz
    cell = max((a.cell_bytes for a in s.accesses), default=4.0)
    lanes, held = _lanes(target, cell)
    inner, words = _innermost(s, lanes, held)
    arithmetic = s.runs * s.ops * words / OPS_PER_CLOCK * clock
    loads = s.runs * _loads(s, inner, lanes) / LOADS_PER_CLOCK * clock
    waits = s.runs * words / _sums(s, lanes) * ADD_CLOCKS * clock if s.reduced else 0.0
    written_out = prod(x.extent for x in s.loops[inner:])
    trips = s.runs / max(written_out, 1) * clock
    shared, memory = target.l2_bytes_per_s / target.sms, target.dram.bytes_per_s / used
    second = float(target.sm.smem_bytes)
    caches = (
        (float(target.sm.l1_bytes or LINE_BYTES), target.clock_hz * L2_BYTES_PER_CLOCK),
        (second, shared),
        (max(target.l2_bytes / cores, second), memory),
    )
    moved = [_traffic(s, size) * rounds / rate for size, rate in caches]
    return dict(zip(TERMS, (arithmetic, waits, loads, trips, *moved), strict=True))


def cpu_seconds(statements: Iterable[Statement], target: Target, cores: int) -> float:
    """What it takes: of each statement the longer of instructions and bytes, and a start."""
    total = 0.0
    for s in statements:
        terms = cpu_terms(s, target, cores)
        work = max(terms["arithmetic"], terms["waits"], terms["loads"]) + terms["trips"]
        total += max(work, terms["second cache"] + terms["shared cache"], terms["memory"])
    return total + FORK_S


def _lanes(target: Target, cell_bytes: float) -> tuple[int, int]:
    """Cells in a vector register, and how many registers there are."""
    bits = 512 if target.isa.endswith("v4") else 256 if target.isa.endswith("v3") else 128
    return max(int(bits / 8 / cell_bytes), 1), 32 if bits == 512 else 16


def _words(s: Statement, lanes: int) -> float:
    """Instructions a run: one over the lanes that are used."""
    vector = prod(x.extent for x in s.loops if x.kind == "vector")
    if vector > 1:
        return ceil(vector / lanes) / vector
    last = s.loops[-1] if s.loops else None
    if last is None or any(s.moves(a, last) > 1 for a in s.accesses):
        return 1.0
    sums = any(v in s.reduced and span(e, {last.name: 2}) > 1 for v, e in s.variables.items())
    return 1.0 if sums else ceil(last.extent / lanes) / last.extent / HALF_VECTOR


def _innermost(s: Statement, lanes: int, registers: int) -> tuple[int, float]:
    """From which depth on the compiler writes out all runs and keeps cells in registers; and the
    instructions a run."""
    words, depth, runs = _words(s, lanes), len(s.loops), 1.0
    for d in range(len(s.loops) - 1, -1, -1):
        loop = s.loops[d]
        if loop.kind == "parallel":
            break
        runs *= loop.extent * (words if loop.kind == "vector" else 1.0)
        written = loop.kind in ("vector", "unrolled") or runs <= s.unrolls
        sums = sum(_vectors(s, a, d, lanes) for a in s.accesses if a.writes)
        if not written or sums > registers:
            break
        depth = d
    return depth, words


def _vectors(s: Statement, access: BufferAccess, depth: int, lanes: int) -> float:
    """Registers that an access fills while the loops from a depth on run."""
    cells = prod(s.cells(access, depth))
    vector = [x for x in s.loops if x.kind == "vector"]
    moved = max((s.moves(access, x) for x in vector), default=0)
    if not vector or moved == 0 or moved > 1:  # one cell in all lanes, or each by itself
        return float(cells)
    return max(cells / lanes, 1.0)


def _loads(s: Statement, inner: int, lanes: int) -> float:
    """Loads and stores a run, where what the innermost runs share is loaded once."""
    shared = prod(x.extent for x in s.loops[inner:])
    return sum(_vectors(s, a, inner, lanes) for a in s.accesses) / max(shared, 1)


def _sums(s: Statement, lanes: int) -> float:
    """Instructions that stand between two additions to one sum: those of loops within the innermost
    that is summed over, as far as a core looks ahead."""
    depth = max(
        (
            d
            for d, loop in enumerate(s.loops)
            if any(v in s.reduced and span(e, {loop.name: 2}) > 1 for v, e in s.variables.items())
        ),
        default=0,
    )
    words = _words(s, lanes)
    between = prod(x.extent for x in s.loops[depth + 1 :])
    return max(between * words, 1.0)


def _traffic(s: Statement, nbytes: float) -> float:
    """Bytes that come into a cache of that size from the next."""
    sizes = [sum(s.footprint(a, d) for a in s.accesses) for d in range(len(s.loops) + 1)]
    depth = next((d for d, size in enumerate(sizes) if size <= HELD * nbytes), len(s.loops))
    total = 0.0
    for a in s.accesses:
        first = depth
        # what a tile's loop does not move stays where it is
        while first > 0 and s.footprint(a, first - 1) == s.footprint(a, depth):
            first -= 1
        trips = prod(x.extent for x in s.loops[:first])
        total += s.footprint(a, depth) * trips * (2.0 if a.writes else 1.0)
    return total
