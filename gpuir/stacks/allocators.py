"""How software stacks hold device memory: what each takes from the device for what is allocated and
freed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from gpuir.plugins import LazyTable, find_named
from gpuir.targets.target import Target

Events = Iterable[tuple[int, int]]
Reserved = Callable[[Events, Collection[int], int], int]

MIB, GIB = 1 << 20, 1 << 30
UNLIMITED = 1 << 62  # bytes of a device that is not known: sums of them stay in 64 bits
BLOCK = 512  # every size is a multiple of this


def find_allocator(name: str) -> Reserved:
    """The allocator of that name: ours, or an entry point's of `gpuir.allocators`.

    It is a function of the events, (storage, bytes) in order, the bytes negative where the storage
    is freed; of the storages that are weights; and of the bytes that the device has. It gives the
    most bytes that it holds at once, what nobody uses included.
    """
    return find_named(name, ALLOCATORS, None, kind="allocator", group="allocators")


def caching(events: Events, weights: Collection[int], limit: int) -> int:
    """PyTorch's caching allocator. A segment that would exceed `limit` first gives back those that
    are wholly free."""
    return _run(Caching(limit), events)


def arena(events: Events, weights: Collection[int], limit: int) -> int:
    """onnxruntime's arena. Weights lie outside it, in one piece of their size."""
    events = tuple(events)
    kept = sum(size for storage, size in events if storage in weights and size > 0)
    return kept + _run(Arena(limit - kept), (x for x in events if x[0] not in weights))


def planned(events: Events, weights: Collection[int], limit: int) -> int:
    """One piece for all, whose places are planned ahead: the peak."""
    held = peak = 0
    for _, size in events:
        held += size
        peak = max(peak, held)
    return peak


ALLOCATORS: Mapping[str, Reserved] = LazyTable(
    {
        "caching": "gpuir.stacks.allocators:caching",
        "arena": "gpuir.stacks.allocators:arena",
        "planned": "gpuir.stacks.allocators:planned",
        "vllm": "gpuir.stacks.serving.pools:vllm",
        "sglang": "gpuir.stacks.serving.pools:sglang",
        "trtllm": "gpuir.stacks.serving.pools:trtllm",
    }
)


def reserved_beside(workspace: str, target: Target | None) -> int:
    """What a stack's libraries take with the first product and keep.

    `pytorch`: the workspace of cuBLAS, aten/src/ATen/cuda/CublasHandlePool.cpp: 4096 KiB twice and
    16 KiB eight times, which is what discuss.pytorch.org/t/178671 observes (8,519,680 bytes); from
    sm_90 on 32 MiB, as the cuBLAS documentation of `cublasSetWorkspace` recommends. None is known
    for other vendors. `none` is nothing, and so is what is not known.
    """
    if workspace != "pytorch" or target is None or not target.isa.startswith("sm_"):
        return 0
    return 32 * MIB if int("".join(filter(str.isdigit, target.isa))) >= 90 else 8_519_680


def rounded(size: int, to: int = BLOCK) -> int:
    return -(-size // to) * to


def _run(allocator: BestFit, events: Events) -> int:
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


class BestFit:
    """Segments of the device's memory, cut into blocks: the smallest free block that is large
    enough is taken, and joined with what is free around it when it is freed. Blocks of one pool
    share segments."""

    def __init__(self, limit: int):
        self.limit = limit
        self.held: int = 0
        self.peak: int = 0
        self.end: int = 0
        self.free_blocks: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self.by_place: dict[int, _Block] = {}  # the free ones

    def is_small(self, size: int) -> bool:
        """Whether a block is of the pool of small ones."""
        return False

    def extent(self, size: int) -> int:
        """How large the segment is that is made for a block."""
        raise NotImplementedError

    def is_cut(self, block: int, size: int) -> bool:
        """Whether what is left of a block is a block."""
        raise NotImplementedError

    def allocate(self, size: int) -> _Block:
        """The smallest free block that holds `size`, or a new segment; what is left of it is
        free."""
        small = self.is_small(size)
        blocks = self.free_blocks[small]
        i = bisect_left(blocks, (size, 0))
        found = self.by_place.pop(blocks.pop(i)[1]) if i < len(blocks) else None
        block = found or self.segment(size, small)
        block.free = False
        if self.is_cut(block.size, size):
            rest = block.size - size
            self.put(_Block(block.at + size, rest, small, block, block.after))
            block.size = size
        return block

    def segment(self, size: int, small: bool) -> _Block:
        size = self.extent(size)
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


class Caching(BestFit):
    """PyTorch's: rules and sizes of `c10/core/AllocatorConfig.h` and
    `c10/cuda/CUDACachingAllocator.cpp` of PyTorch 2.13 with its default settings, one stream."""

    SMALL = MIB  # blocks up to here share segments of their own
    SMALL_SEGMENT = 2 * MIB
    LARGE = 10 * MIB  # blocks from here on get a segment of their size
    LARGE_SEGMENT = 20 * MIB  # the others' are cut
    ROUND_LARGE = 2 * MIB

    def is_small(self, size: int) -> bool:
        return size <= self.SMALL

    def is_cut(self, block: int, size: int) -> bool:
        rest = block - size
        return rest >= BLOCK if self.is_small(size) else rest > self.SMALL

    def extent(self, size: int) -> int:
        if self.is_small(size):
            extent = self.SMALL_SEGMENT
        elif size < self.LARGE:
            extent = self.LARGE_SEGMENT
        else:
            extent = rounded(size, self.ROUND_LARGE)
        if self.held + extent > self.limit:
            self.give_back()
        return extent

    def give_back(self) -> None:
        """Gives the device back every segment that is wholly free."""
        for small in (True, False):
            for _, at in list(self.free_blocks[small]):
                block = self.by_place[at]
                if block.before is None and block.after is None:
                    self.take(block)
                    self.held -= block.size


class Arena(BestFit):
    """onnxruntime's: rules and sizes of `onnxruntime/core/framework/bfc_arena.{h,cc}` with its
    default settings. It grows by twice as much each time, up to 1 GiB, or until the block fits;
    near the limit by what is left. What it has it keeps."""

    FIRST = MIB  # the size of the first segment
    MOST = GIB  # up to which segments double
    DEAD = 128 * MIB  # the most that a block is larger than what it is for

    def __init__(self, limit: int):
        super().__init__(limit)
        self.next = self.FIRST

    def is_cut(self, block: int, size: int) -> bool:
        return block >= 2 * size or block - size >= self.DEAD

    def extent(self, size: int) -> int:
        if size > self.next:
            while size > self.next:
                self.next *= 2
            extent = self.next
        else:
            extent = self.next
            self.next = min(2 * self.next, self.MOST)
        return max(size, min(extent, self.limit - self.held))
