"""PyTorch's caching allocator: how much memory it reserves for what is allocated and freed.

Rules and sizes are those of `c10/core/AllocatorConfig.h` and `c10/cuda/CUDACachingAllocator.cpp`
of PyTorch 2.13 with its default settings, one stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

MIB = 1 << 20
BLOCK = 512  # every size is a multiple of this
SMALL = MIB  # blocks up to here share segments of their own
SMALL_SEGMENT = 2 * MIB
LARGE = 10 * MIB  # blocks from here on get a segment of their size
LARGE_SEGMENT = 20 * MIB  # the others' are split
ROUND_LARGE = 2 * MIB


def rounded(size: int, to: int = BLOCK) -> int:
    return -(-size // to) * to


def reserved(events: Iterable[tuple[int, int]], limit: int) -> int:
    """The most bytes that the allocator holds at once, segments that nobody uses included.

    `events` are (storage, bytes) in order, the bytes negative where the storage is freed. A new
    segment that would exceed `limit` first gives back those that are wholly free.
    """
    allocator = _Allocator(limit)
    live: dict[int, _Block] = {}
    for storage, size in events:
        if size > 0:
            live[storage] = allocator.allocate(rounded(size))
        elif size < 0:
            allocator.free(live.pop(storage))
    return allocator.peak


@dataclass(eq=False, slots=True)
class _Block:
    """A part of a segment; `before` and `after` are its neighbours there."""

    at: int
    size: int
    small: bool
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False


class _Allocator:
    def __init__(self, limit: int):
        self.limit = limit
        self.held = self.peak = self.end = 0
        self.free_blocks: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self.by_place: dict[int, _Block] = {}  # the free ones

    def allocate(self, size: int) -> _Block:
        """The smallest free block that holds `size`, or a new segment; what is left of it is
        free."""
        small = size <= SMALL
        blocks = self.free_blocks[small]
        i = bisect_left(blocks, (size, 0))
        found = self.by_place.pop(blocks.pop(i)[1]) if i < len(blocks) else None
        block = found or self.segment(size, small)
        block.free = False
        rest = block.size - size
        if rest >= BLOCK if small else rest > SMALL:
            self.put(_Block(block.at + size, rest, small, block, block.after))
            block.size = size
        return block

    def segment(self, size: int, small: bool) -> _Block:
        if small:
            size = SMALL_SEGMENT
        else:
            size = LARGE_SEGMENT if size < LARGE else rounded(size, ROUND_LARGE)
        if self.held + size > self.limit:
            self.give_back()
        self.held += size
        self.peak = max(self.peak, self.held)
        self.end += size
        return _Block(self.end - size, size, small)

    def put(self, block: _Block) -> None:
        """Makes a block free, and known to those beside it."""
        block.free = True
        if block.before:
            block.before.after = block
        if block.after:
            block.after.before = block
        self.by_place[block.at] = block
        insort(self.free_blocks[block.small], (block.size, block.at))

    def take(self, block: _Block) -> None:
        """Takes a block out of the free ones."""
        blocks = self.free_blocks[block.small]
        del blocks[bisect_left(blocks, (block.size, block.at))]
        del self.by_place[block.at]

    def free(self, block: _Block) -> None:
        """Joins a block with what is free around it."""
        if block.after and block.after.free:
            self.take(block.after)
            block.size += block.after.size
            block.after = block.after.after
        if block.before and block.before.free:
            self.take(block.before)
            block.at = block.before.at
            block.size += block.before.size
            block.before = block.before.before
        self.put(block)

    def give_back(self) -> None:
        """Gives the device back every segment that is wholly free."""
        for small in (True, False):
            for _, at in list(self.free_blocks[small]):
                block = self.by_place[at]
                if block.before is None and block.after is None:
                    self.take(block)
                    self.held -= block.size
