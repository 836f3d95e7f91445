"""What passes write on a node: the tile it runs with and the time it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from gpuir.ir.door import TEXT, WHOLE, ArgumentKind, holds, of_type, pairs_of

ON_HOST = "host@1"  # signs what the host's CPU runs, in place of the device

# Options of a tile that a dimension, or an operand, has for itself: `threads.m=16`, `direct.0=1`.
BY_DIMENSION = ("threads", "vector", "strided")
BY_OPERAND = ("direct", "fetch", "pad")

Bound = Literal["compute", "memory", "latency", "network"]


def _pairs(by: ArgumentKind) -> ArgumentKind:
    """Numbers by dimension or operand, in tuples."""

    def holds(x: Any) -> bool:
        pairs = pairs_of(x)
        return pairs is not None and all(by.holds(a) and WHOLE.holds(n) for a, n in pairs)

    example = '(("m", 128), ("k", 64))' if by is TEXT else "((0, 1),)"
    return ArgumentKind(f"pairs of {by.what} and a whole number", holds, f"write {example}")


@holds(
    dims=_pairs(TEXT),
    **dict.fromkeys(("stages", "warps", "split", "group", "unroll"), WHOLE),
    **dict.fromkeys(BY_DIMENSION, _pairs(TEXT)),
    **dict.fromkeys(BY_OPERAND, _pairs(WHOLE)),
)
@dataclass(frozen=True)
class Tile:
    """How one kernel is cut for the device: `tile(m=128, n=64, k=32; stages=3, warps=8)`.

    `dims` gives the extent of one thread block's tile along each named dimension of the kernel's
    `Space`; a dimension not named is not cut. `stages` is the depth of software pipelining over
    the reduced dimensions, `warps` the number of warps in a block, and `split` the number of
    blocks that share one output tile by dividing its reduced dimension (split-k). `group` is how
    many tiles along the first dimension of the grid blocks visit before they go on along the next
    (1: in plain order), `unroll` how many steps of the loop stand in one trip.

    What a generator leaves to its compiler stays empty. By dimension: `threads`, how many threads
    of a block lie along it, that of neighbours in a warp first; `vector`, how many cells along it a
    load takes; `strided`, 1 where a thread's cells are its block's threads apart, not neighbours.
    By operand, in their order: `direct`, 1 where it is read where it lies and not staged in shared
    memory, 2 where that is by read-only loads; `fetch`, how many threads stage neighbouring cells;
    `pad`, 1 where its rows in shared memory are padded against bank conflicts.
    """

    dims: tuple[tuple[str, int], ...]
    stages: int = 1
    warps: int = 4
    split: int = 1
    group: int = 1
    unroll: int = 1
    threads: tuple[tuple[str, int], ...] = ()
    vector: tuple[tuple[str, int], ...] = ()
    strided: tuple[tuple[str, int], ...] = ()
    direct: tuple[tuple[int, int], ...] = ()
    fetch: tuple[tuple[int, int], ...] = ()
    pad: tuple[tuple[int, int], ...] = ()

    def __getitem__(self, dim: str) -> int:
        return dict(self.dims)[dim]

    def get(self, dim: str, default: int) -> int:
        """The tile's extent along `dim`, or `default` where the tile does not cut it."""
        return dict(self.dims).get(dim, default)

    def __str__(self) -> str:
        return f"tile({self.settings})"

    __repr__ = __str__

    @property
    def settings(self) -> str:
        """`m=16, n=128, k=32; stages=3, warps=4`."""
        dims = ", ".join(f"{d}={n}" for d, n in self.dims)
        options = [f"stages={self.stages}", f"warps={self.warps}"]
        rare = {"split": self.split, "group": self.group, "unroll": self.unroll}
        options += [f"{name}={n}" for name, n in rare.items() if n != 1]
        for name in (*BY_DIMENSION, *BY_OPERAND):
            options += [f"{name}.{of}={n}" for of, n in getattr(self, name)]
        return f"{dims}; {', '.join(options)}"


@dataclass(frozen=True)
class Cost:
    """The predicted time of one kernel, signed by its predictor.

    `terms` are seconds, by cause; `time_s` is no less than any of them and `bound` names the
    largest. `facts` are the dimensionless and other figures behind them (waves, occupancy,
    blocks, share of peak), for people to read: nothing later is computed from a fact.

    Between the two of `interval`, in seconds, 80 % of measurements are expected to lie; it is None
    where the predictor cannot say. `unseen` names what of this kernel lies outside of what the
    predictor was fitted on: "gpu", "dtype", "size".
    """

    time_s: float
    bound: Bound
    by: str
    terms: tuple[tuple[Bound, float], ...]
    facts: tuple[tuple[str, float], ...] = ()
    interval: tuple[float, float] | None = None
    unseen: tuple[str, ...] = ()

    @property
    def on_host(self) -> bool:
        """Whether the host's CPU runs it."""
        return self.by == ON_HOST

    def term(self, name: Bound) -> float:
        return dict(self.terms).get(name, 0.0)

    def fact(self, name: str) -> float | None:
        return dict(self.facts).get(name)

    def scaled(self, factor: float) -> Cost:
        """That of so many times as long."""
        ends = self.interval and (factor * self.interval[0], factor * self.interval[1])
        terms = tuple((name, factor * s) for name, s in self.terms)
        return replace(self, time_s=factor * self.time_s, terms=terms, interval=ends)

    def __repr__(self) -> str:
        return f"<Cost by {self.by}: {self.time_s:.4g} s, bound by {self.bound}>"

    def __str__(self) -> str:
        head = [f"time_s={self.time_s!r}", f"bound={self.bound}", f'by="{self.by}"']
        if self.interval is not None:
            low, high = self.interval
            head += [f"low_s={low!r}", f"high_s={high!r}"]
        if self.unseen:
            head.append(f'unseen="{" ".join(self.unseen)}"')
        head += [f"{k}={v!r}" for k, v in self.terms]
        facts = f"; {', '.join(f'{k}={v!r}' for k, v in self.facts)}" if self.facts else ""
        return f"cost({', '.join(head)}{facts})"


TILE = of_type(Tile, "a tile", "gpuir.Tile((('m', 128), ('n', 128), ('k', 64)), stages=3)")


def _is_tiles(x: Any) -> bool:
    pairs = pairs_of(x)
    return pairs is not None and all(_is_path(path) and TILE.holds(tile) for path, tile in pairs)


def _is_path(x: Any) -> bool:
    return isinstance(x, tuple) and all(map(TEXT.holds, cast("tuple[Any, ...]", x)))


@holds(
    name=TEXT,
    target=TEXT,
    tiles=ArgumentKind(
        "pairs of a path and a tile", _is_tiles, 'write ((("y",), gpuir.Tile(...)),)'
    ),
)
@dataclass(frozen=True)
class Schedule:
    """The tiles of a graph alone, each kernel named by its first result.

    A kernel inside a region is named by its path: the owner's first result, then its own, joined
    by `/` inside `path` tuples, outermost first.
    """

    name: str
    target: str
    tiles: tuple[tuple[tuple[str, ...], Tile], ...]

    def __repr__(self) -> str:
        return f"<Schedule of @{self.name} for {self.target}: {len(self.tiles):,} tiles>"

    def __iter__(self) -> Iterator[tuple[tuple[str, ...], Tile]]:
        return iter(self.tiles)


SCHEDULE = of_type(Schedule, "a schedule", "gpuir.extract(graph) or gpuir.parse_schedule(text)")
