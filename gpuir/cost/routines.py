"""Library routines, as several kernels in one: sorting, selection, decompositions, transforms.

Of each way that a library may take (`cost.steps`): the bytes of its passes, through the L2 or DRAM;
instructions and products; launches, and steps that wait for each other. The quickest counts. No
factor is fitted: no table measures a routine, and `cost.uncertainty` says how far off that may be.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpuir.cost.data import table
from gpuir.cost.family import Family, FormulaInputs, Terms
from gpuir.cost.nest import Tiles, l2_drawn
from gpuir.cost.sheet import Factor, Number, Sheet
from gpuir.cost.steps import RoutineSteps, RoutineWay
from gpuir.cost.stream import dram_share, lanes_s, sustained_hz
from gpuir.cost.work import Work
from gpuir.targets.target import Target

FACTORS = table("factors/routines", Factor)


def seconds(s: Sheet, work: Work, tiles: Tiles, target: Target, p: Mapping[str, Number]) -> Terms:
    """The terms of the quickest way."""
    x = FormulaInputs(s, work, tiles, target, p)
    best: tuple[Number, ...] | None = None
    for name, way in zip("abc", work.detail_as(RoutineSteps).ways, strict=False):
        found = _way(x, name, way)
        if best is None:
            best = found
            continue
        quicker = s.xp.maximum(found[0], found[1]) + found[2]
        quicker = quicker < s.xp.maximum(best[0], best[1]) + best[2]
        new = zip(found, best, strict=True)
        best = tuple(s.xp.where(quicker, a, b) for a, b in new)
    assert best is not None, "a routine has a way"
    compute, memory, wait, dram_bytes, dram_s, l2_bytes, l2_s, issued = best
    s.put("dram bytes", dram_bytes, "bytes", "of the way taken")
    s.put("dram time", dram_s, "s", "of the way taken")
    s.put("l2 bytes", l2_bytes, "bytes", "of the way taken")
    s.put("l2 time", l2_s, "s", "of the way taken")
    s.put("lane instructions", issued, "", "of the way taken")
    return Terms(compute, memory, wait)


def _way(x: FormulaInputs, name: str, way: RoutineWay) -> tuple[Number, ...]:
    """Seconds of arithmetic, of memory and of waits; bytes of DRAM and of the L2, with the seconds
    of each; instructions of lanes."""
    s, work, target, p = x.s, x.work, x.target, x.p
    xp = s.xp
    whole = (way.blocks <= 0) | (way.blocks >= target.sms)  # every SM has a block
    share = xp.where(whole, 1.0, way.blocks / target.sms)
    sm_rate = l2_drawn(target)
    given = xp.minimum(target.l2_bytes_per_s, way.blocks * sm_rate)
    given = xp.where(way.blocks > 0, given, target.l2_bytes_per_s)
    room = target.l2_bytes * p["l2 keeps"]
    missed = s.put(f"{name}: not in the l2", work.nbytes**6 / (work.nbytes**6 + room**6))
    moved = s.put(f"{name}: bytes of all passes", way.moved, "bytes")
    dram_rate = target.dram_bytes_per_s * dram_share(target, p) * p["pass share"]
    l2_rate = s.put(f"{name}: l2 rate", given * p["l2 share"], "bytes/s")
    dram_s, l2_s = moved * missed / dram_rate, moved / l2_rate
    memory = s.put(f"{name}: passes", xp.maximum(dram_s, l2_s), "s")
    clock_hz = xp.where(whole, sustained_hz(s, target, p), target.clock_hz)
    ops = lanes_s(s, way.ops, clock_hz * share, target, p)
    peak = target.peak("vector", work.dtype) * p["product share"]
    compute = s.put(f"{name}: arithmetic", ops + way.products / peak, "s")
    wait = (way.launches - 1) * target.launch_s + way.clocks / target.clock_hz
    wait = s.put(f"{name}: launches and waits", wait, "s", "cost.steps")
    issued = s.values["lane instructions"]
    return compute, memory, wait, moved * missed, dram_s, moved, l2_s, issued


def choose(work: Work, target: Target, p: Mapping[str, Number]) -> Tiles:
    """Blocks of 128 threads: a routine has kernels of many shapes."""
    one = np.ones(np.shape(work.points))
    return Tiles({"i": 4.0 * target.sm.warp * one}, one, 4 * one, one)


def candidates(work: Work, target: Target) -> Tiles:
    one = np.ones(1)
    return Tiles({"i": 4.0 * target.sm.warp * one}, one, 4 * one, one)


FAMILY = Family("routines", FACTORS, candidates, seconds, choose)
