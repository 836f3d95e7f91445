"""The memory of a graph whatever its tiles: what is allocated and freed in order, with the sizes
left open that depend on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gpuir.ir.graph import Graph, Node, Value
from gpuir.ir.notes import Tile
from gpuir.simulate.memory import Storage, Walk, workspace_bytes
from gpuir.stacks.allocators import BLOCK, find_allocator, reserved_beside, rounded
from gpuir.targets.profile import profile_of
from gpuir.targets.target import Target

FIXED, POOL = (
    -1,
    -2,
)  # of an event's `part`: as many bytes as it says; what a stack's libraries keep


class Event(NamedTuple):
    """A storage that is allocated, or freed where `bytes` are negative. Of a `part`, a place in
    `Layout.parts`, `bytes` is the sign."""

    storage: int
    bytes: int
    part: int = FIXED


class Part(NamedTuple):
    """Bytes of a kernel's workspace: `once`, or `each` for every block that shares a sum where
    several do. `kernel` is its place among those whose tiles are given."""

    kernel: int
    once: int
    each: int

    def bytes(self, split: int) -> int:
        return self.each * split if split > 1 and self.each else self.once


@dataclass(frozen=True)
class Layout:
    """Allocations of a graph. `tops` are how many events have been by each moment; `allocator` and
    `workspace` are the stack's, as `Profile` has them."""

    events: tuple[Event, ...]
    parts: tuple[Part, ...]
    weights: tuple[int, ...]
    tops: tuple[int, ...]
    allocator: str
    workspace: str

    def pool_bytes(self, target: Target) -> int:
        """What the stack's libraries keep on a device."""
        return reserved_beside(self.workspace, target)

    def sized(self, splits: Mapping[int, int], pool_bytes: int) -> Sized:
        """With the tiles of a device, the split of each kernel, and what its libraries keep."""
        sizes = [
            rounded(x.bytes(splits[x.kernel]) if x.kernel >= 0 else x.once) for x in self.parts
        ]
        pool = rounded(pool_bytes)
        held = [0]
        events: list[tuple[int, int]] = []
        for storage, size, part in self.events:
            if part != FIXED:
                size *= pool if part == POOL else sizes[part]
            held.append(held[-1] + size)
            if size or part == FIXED:
                events.append((storage, size))
        return Sized(
            tuple(events), frozenset(self.weights), max(held[i] for i in self.tops), self.allocator
        )


class Sized(NamedTuple):
    """The same on a device."""

    events: tuple[tuple[int, int], ...]
    weights: frozenset[int]
    peak_bytes: int
    allocator: str

    def reserved_bytes(self, available: int) -> int:
        """What the stack's allocator takes of so many bytes."""
        return find_allocator(self.allocator)(self.events, self.weights, available)


def layout_of(graph: Graph, kernels: Mapping[Value, int]) -> Layout:
    """The layout of a graph of kernels without loops and branches, as `memory` would find it with
    tiles. `kernels` are places of kernels by their first results; of others no tile counts.
    """
    walk = _Open(kernels)
    walk.run(graph)
    walk.result()  # which says where sizes are beyond counting
    weights = (s.id for s in walk.storages if s.kind == "weights")
    events = (
        Event(storage, (1 if n else -1), part) if part != FIXED else Event(storage, size)
        for (storage, size), (n, part) in zip(walk.events, walk.marks(), strict=True)
    )
    profile = profile_of(graph)
    return Layout(
        events=tuple(events),
        parts=tuple(walk.parts),
        weights=tuple(weights),
        tops=tuple(walk.tops),
        allocator=profile.allocator,
        workspace=profile.workspace,
    )


class _Open(Walk):
    """Notes the storages whose sizes tiles decide."""

    def __init__(self, kernels: Mapping[Value, int]):
        super().__init__(BLOCK, 0, {})
        self.kernels = kernels
        self.parts: list[Part] = []
        self.open: dict[int, int] = {}  # the part of a storage
        self.has_pool = False

    def workspace(self, nodes: list[Node]) -> list[Storage]:
        (node,) = nodes
        if node.op.contraction and not self.has_pool:
            self.has_pool = True
            self._made(POOL, resident=True)
        once, twice = (workspace_bytes(node.op, Tile((), split=split)) for split in (1, 2))
        if not once and not twice:
            return []
        kernel = self.kernels.get(node.results[0], -1)
        self.parts.append(Part(kernel, once, twice // 2 if twice != once else 0))
        return [self._made(len(self.parts) - 1)]

    def _made(self, part: int, resident: bool = False) -> Storage:
        storage = self.allocate(self.make(0, "workspace", resident=resident))
        self.open[storage.id] = part
        return storage

    def marks(self) -> list[tuple[bool, int]]:
        """Of each event whether it is the storage's first, and the part that decides its size."""
        seen: set[int] = set()
        found: list[tuple[bool, int]] = []
        for storage, _ in self.events:
            found.append((storage not in seen, self.open.get(storage, FIXED)))
            seen.add(storage)
        return found
