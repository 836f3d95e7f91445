"""How much device memory a graph takes from moment to moment, and who holds it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuir.ir.door import TEXT, many, of_type, takes, whole
from gpuir.ir.graph import GRAPH, Graph, Node
from gpuir.simulate.layout import FIXED, MEMORY_KINDS, MemoryKind, MemoryLayout, Moment, layout_of
from gpuir.stacks.allocators import BLOCK, UNLIMITED, find_allocator, reserved_beside
from gpuir.targets.profile import Profile, profile_of
from gpuir.targets.target import Target

MIB = 1 << 20
CONTEXT_BYTES = 512 * MIB  # assumed: the CUDA context and the libraries' code, once loaded
DRIVER_SHARE = 0.015  # assumed: what the driver keeps of a GPU's memory for itself


def by_kind(bytes_: NDArray[np.int64]) -> dict[MemoryKind, int]:
    """Bytes of each kind, of an array in the order of `MEMORY_KINDS`."""
    return {kind: int(n) for kind, n in zip(MEMORY_KINDS, bytes_, strict=True)}


class Holder(NamedTuple):
    """One allocation: the value it was made for (empty for workspace), its kind and its bytes."""

    name: str
    kind: MemoryKind
    bytes: int


@dataclass(frozen=True, eq=False)
class Memory:
    """What a graph holds while it runs, node after node: its storages take so many bytes each
    (`sizes`). `allocator` is that of the stack, and `available_bytes` what the device has for it,
    if there is a device."""

    layout: MemoryLayout
    sizes: tuple[int, ...]
    available_bytes: int | None = None
    allocator: str = "caching"

    def __repr__(self) -> str:
        has = self.available_bytes
        of = "" if has is None else f" of {has:,} available"
        return f"<Memory: {self.peak_bytes:,} bytes at the peak{of}>"

    @property
    def moments(self) -> tuple[Moment, ...]:
        return self.layout.moments

    @cached_property
    def events(self) -> tuple[tuple[int, int], ...]:
        """The storages allocated and freed in order, with their bytes, negative when freed; without
        what is left open and comes to nothing."""
        return tuple(self._events())

    def _events(self) -> Iterator[tuple[int, int]]:
        for i in self.layout.events:
            place = i if i >= 0 else ~i
            if (size := self.sizes[place]) or self.layout.storages[place].kernel == FIXED:
                yield place, size if i >= 0 else -size

    @cached_property
    def live(self) -> NDArray[np.int64]:
        """Bytes by kind (a row each, as in `MEMORY_KINDS`) and moment."""
        storages, events = self.layout.storages, np.array(self.layout.events, np.int64)
        places = np.where(events < 0, ~events, events)
        kinds = np.array([MEMORY_KINDS.index(x.kind) for x in storages], np.int64)
        sizes = np.array(self.sizes, np.int64)
        live = np.zeros((len(MEMORY_KINDS), len(events) + 1), np.int64)
        signs = np.where(events < 0, -1, 1)
        live[kinds[places], np.arange(1, len(events) + 1)] = signs * sizes[places]
        return live.cumsum(axis=1)[:, self.layout.tops]

    @cached_property
    def total(self) -> NDArray[np.int64]:
        """Bytes at each moment."""
        return self.live.sum(axis=0)

    @cached_property
    def at(self) -> int:
        """The moment of the peak, the first one if there are several."""
        return int(self.total.argmax())

    @property
    def peak_bytes(self) -> int:
        return int(self.total[self.at])

    @property
    def peak(self) -> Moment:
        return self.moments[self.at]

    @property
    def parts(self) -> dict[MemoryKind, int]:
        """The bytes of each kind at the peak."""
        return by_kind(self.live[:, self.at])

    @property
    def kept_bytes(self) -> int:
        """What stays there between runs: weights, and the state of an optimizer."""
        first = by_kind(self.live[:, 0])
        return first["weights"] + first["optimizer"]

    @cached_property
    def largest(self) -> tuple[Holder, ...]:
        """Who holds memory at the peak, the most first."""
        held: dict[int, Holder] = {}
        for i in self.layout.events[: self.layout.tops[self.at]]:
            if i >= 0:
                name, kind, *_ = self.layout.storages[i]
                held[i] = Holder(name, kind, self.sizes[i])
            else:
                del held[~i]
        return tuple(sorted((x for x in held.values() if x.bytes), key=lambda x: -x.bytes))

    @cached_property
    def reserved_bytes(self) -> int:
        """What the stack's allocator takes from the device: more than the peak, because free memory
        is in pieces."""
        limit = UNLIMITED if self.available_bytes is None else self.available_bytes
        weights = {i for i, x in enumerate(self.layout.storages) if x.kind == "weights"}
        return find_allocator(self.allocator)(self.events, weights, limit)

    @property
    def spare_bytes(self) -> int | None:
        """What stays free of the device's memory, negative when it does not fit; None without a
        device."""
        if self.available_bytes is None:
            return None
        return self.available_bytes - self.reserved_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the device has enough; None without a device."""
        return None if self.spare_bytes is None else self.spare_bytes >= 0


def available_bytes(target: Target) -> int:
    """The memory that a process may allocate: all, but for the driver's share and the context. Of
    a MIG slice the driver states what it leaves. Of a CPU's memory, all."""
    if target.is_cpu:
        return target.dram.bytes
    if target.slice is not None:
        return target.dram.bytes - CONTEXT_BYTES
    return round(target.dram.bytes * (1 - DRIVER_SHARE)) - CONTEXT_BYTES


@takes(
    graph=GRAPH,
    target=of_type(Target, "a target", "gpuir.load_target('a100')"),
    block=whole(1),
    spent=many(TEXT),
)
def memory(
    graph: Graph, target: Target | None = None, block: int = BLOCK, spent: Collection[str] = ()
) -> Memory:
    """What a graph holds from moment to moment: params and inputs all the time, a result until its
    last reader is done, outputs to the end. Inputs that nobody needs again, the names in `spent`,
    are there as long as results are.

    At level `graph` every model node allocates its results, as eager execution does, but for what
    PyTorch makes a view; from `fused` on every launch does, but for `k.view`. An output over an
    input takes no memory where it can be written in place. Of a loop one trip counts, of a branch
    the larger. Sizes are multiples of `block`; 1 gives the bytes of the tensors. What the stack's
    libraries reserve beside on `target` counts where it is known.
    """
    splits: list[int] = []

    def place(node: Node) -> int:
        splits.append(node.tile.split if node.tile else 1)
        return len(splits) - 1

    layout = layout_of(graph, place, block, spent)
    profile = profile_of(graph)
    return sized(layout, dict(enumerate(splits)), profile, room(profile, target))


def room(profile: Profile, target: Target | None) -> tuple[int, int | None]:
    """Bytes that a stack's libraries keep on a device, and what is available there."""
    available = None if target is None else available_bytes(target)
    return reserved_beside(profile.workspace, target), available


def sized(
    layout: MemoryLayout, splits: Mapping[int, int], profile: Profile, room: tuple[int, int | None]
) -> Memory:
    """An allocation's memory on a device that has such `room`, under the tiles that it gives: of
    each kernel, how many blocks share a sum."""
    kept, available = room
    return Memory(layout, layout.sizes(splits, kept), available, profile.allocator)
