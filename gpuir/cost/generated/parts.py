"""What formulas of generated kernels share: how blocks fill a device, and shared memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from gpuir.cost.nest import BlockShare, allocated, held, most_registers
from gpuir.cost.sheet import Number, Sheet
from gpuir.cost.sized import reach
from gpuir.cost.work import product
from gpuir.targets.target import Target

LINE_BYTES = 128  # of a cache, and of all banks of shared memory: CUDA C++ Programming Guide
BANKS = 32
where: Callable[..., Number] = np.where
log2: Callable[..., Number] = np.log2
rounded: Callable[..., Number] = np.round


@dataclass(frozen=True)
class BlockCounts:
    """What a block does, or the blocks of many kernels and tiles: numbers that no factor changes,
    so that a fit counts once."""

    def each(self, change: Callable[[Number], Number]) -> Self:
        """The counts with every number changed."""
        return type(self)(
            **{
                name: n if isinstance(n, bool | str) else change(n)
                for name, n in vars(self).items()
            }
        )

    def on(self, s: Sheet) -> Self:
        """The counts, each written down on a sheet."""
        names = iter(f.name for f in fields(self))

        def put(n: Number, name: str) -> Number:
            return s.put(f"counted: {name.replace('_', ' ')}", n)

        kept = {
            name: v
            if isinstance(v := getattr(self, name), bool | str)
            else v.on(s)
            if isinstance(v, BlockCounts)
            else put(v, name)
            for name in names
        }
        return type(self)(**kept)


def power_of_two(n: Number) -> Number:
    """The nearest power of two, at least 1."""
    return 2.0 ** rounded(log2(np.maximum(n, 1.0)))


def is_amd(target: Target) -> bool:
    """Whether AMD's compiler makes the code, which shares out registers in another way."""
    return target.vendor == "AMD"


def schedulers(target: Target) -> float:
    """Warps that an SM can issue from in a clock: one for 32 lanes, of Volta to Hopper one for 16
    (NVIDIA architecture whitepapers); AMD's units of 64 lanes have two of 32, or four of 16."""
    return max(target.sm.fp32_lanes / 32, 2.0 if is_amd(target) else 4.0)


def load_lanes(target: Target) -> float:
    """Threads of an SM whose addresses its load and store units take in a clock: 16 on sm_75,
    sm_86, sm_89 and sm_12x, else 32 (NVIDIA Turing, GA102 and A100 whitepapers; assumed later)."""
    return 16.0 if target.isa.startswith(("sm_75", "sm_86", "sm_87", "sm_89", "sm_12")) else 32.0


def footprint(axes: tuple[str, ...], sizes: Mapping[str, Number]) -> Number:
    """Cells of an operand that loops of these extents touch."""
    return product(reach(axis, sizes) for axis in axes)


def hold(xp: Any, target: Target, block: BlockShare, blocks: Number) -> tuple[Number, Number]:
    """Of the registers that a thread of a block wants those that it does not get; and the blocks
    that an SM holds at once, no more than its share of them all."""
    assert block.registers is not None
    most = most_registers(xp, target, block.threads)
    registers = allocated(xp, xp.minimum(block.registers, most))
    resident = held(xp, target, block.threads, registers, block.smem_bytes)
    share = share_of(xp, blocks, target)
    return xp.maximum(block.registers - most, 0.0), xp.minimum(resident, share)


def share_of(xp: Any, blocks: Number, target: Target) -> Number:
    """Of so many blocks those that the busiest SM gets."""
    return xp.maximum(xp.ceil(blocks / target.sms), 1.0)


def clocks(
    s: Sheet,
    blocks: Number,
    resident: Number,
    sms: int,
    *,
    busy: Number,
    alone: Number,
    tail: Number,
    leak: Number,
) -> Number:
    """Clocks of the busiest SM, which holds `resident` of its blocks at once.

    A block keeps the SM `busy`, and takes `alone` from its first load to its last store. What it
    waits for is hidden by the work of the others beside it, but for a `leak` of the shorter of
    both. The busiest SM runs its blocks in even rounds, as few as it can; of what it has more than
    the others `tail` is felt, the rest is filled by blocks that finish early.

    Neither more SMs nor more residents make this longer: a round of more blocks takes longer, but
    less for each of them.
    """
    xp = s.xp

    def each(n: Number) -> Number:
        """Of a round of `n` blocks."""
        others = (n - 1) * busy
        waits = alone - busy
        return (busy + xp.maximum(others, waits) + leak * xp.minimum(others, waits)) / n

    mean = xp.maximum(blocks / sms, 1.0)
    most = xp.ceil(mean)
    rounds = xp.ceil(most / resident)
    felt = most * each(most / rounds)
    filled = mean * each(xp.minimum(resident, mean))
    return (1 - tail) * filled + tail * felt


def joined(s: Sheet, q: Number, *parts: Number) -> Number:
    """Times that overlap but for what they wait for each other: their norm of exponent `q`."""
    xp = s.xp
    most = parts[0]
    for part in parts[1:]:
        most = xp.maximum(most, part)
    return most * sum((part / most) ** q for part in parts) ** (1 / q)


def joined_least(xp: Any, q: float, one: Number, other: Number) -> Number:
    """What two times joined are not below, for an exponent of 1 or more: the longer, and what both
    are where they are equal (the mean of powers is no less than the power of the mean)."""
    return xp.maximum(xp.maximum(one, other), 2 ** (1 / q - 1) * (one + other))


# ---------------------------------------------------------------------------- shared memory


def waves_of(lanes: Any, stride: Any, vector: Any) -> Any:
    """Passes over shared memory that a warp's load of `vector` words a lane takes, when `lanes` of
    them ask for different words, `stride` words apart."""
    apart = np.gcd(np.maximum(stride, 1).astype(int), BANKS)
    banks = np.minimum(BANKS, vector * (BANKS // apart))
    words = lanes * vector
    return np.maximum(1.0, words / np.minimum(banks, np.maximum(words, 1)))


def conflicts(lanes: Any, rows: Any, pitch: Any) -> Any:
    """The same, of lanes that read neighbouring words in several `rows`, `pitch` words apart."""
    lanes, rows, pitch = np.broadcast_arrays(lanes, rows, pitch)
    shape, most = rows.shape, int(np.max(rows, initial=1))
    lanes, rows = (np.ceil(n).astype(int) for n in (np.minimum(lanes, BANKS), rows))
    # of many tiles there are few cases
    cases = (rows * (BANKS + 1) + lanes) * BANKS + pitch.astype(int) % BANKS
    cases, which = np.unique(cases, return_inverse=True)
    rest, pitch = np.divmod(cases, BANKS)
    rows, lanes = np.divmod(rest, BANKS + 1)
    hits = np.zeros((BANKS, len(cases)))
    bank = np.arange(BANKS)[:, None]
    for row in range(most):
        hits += (row < rows) & ((bank - row * pitch) % BANKS < lanes)
    return np.maximum(hits.max(axis=0), 1.0)[which].reshape(shape)
