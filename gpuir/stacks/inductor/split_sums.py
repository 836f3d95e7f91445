"""Sums with too few results to fill a GPU, in two steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from gpuir.ir.build import Builder, rewrite
from gpuir.ir.graph import Graph, Level, Node, Value
from gpuir.ir.sizes import real
from gpuir.ir.types import f32
from gpuir.ops import tensor as t
from gpuir.passes.manager import Pass
from gpuir.stacks.inductor.channels_last import has_channels_innermost
from gpuir.targets.target import Target

A100_SMS = 108
MOST_SMS = 1024  # more than any GPU has
ASSUMED = "sums are split as for an A100, because no target was known when the kernels were made"
WARPS = 8  # of a block of an inner reduction
IN_REGISTERS = 4  # terms that a thread of an outer reduction takes at a time
RESULTS = 128  # of a block of an outer reduction
MOST = 512  # terms of a thread
WHOLE_BLACKWELL = 524288  # terms that are summed at once from compute capability 10.0 on
UNROLLED = 8  # terms from which on a sum is a reduction; fewer are added where they are read


@dataclass(frozen=True)
class Splits(Pass):
    """What a split depends on: the multiprocessors of a GPU (`sms`), the threads of each, those of
    a warp, and the most terms of one result that are never split (`whole`). It is an A100 where no
    target is known (`sms=0`), and the graph says so where another GPU could make a difference.
    Inductor splits nothing on a CPU: `cpu`.

    (torch 2.13: torch/_inductor/choices.py, reduction_split_factor; ir.py, num_splits.)
    """

    sms: int = 0
    threads: int = 2048
    warp: int = 32
    whole: int = 8192
    cpu: bool = False

    def on(self, target: Target) -> Self:
        if target.is_cpu:
            return replace(self, cpu=True)
        made = target.isa.rpartition("sm_")[2]
        whole = WHOLE_BLACKWELL if made.isdecimal() and int(made) >= 100 else self.whole
        sm = target.sm
        return replace(self, sms=target.sms, threads=sm.threads, warp=sm.warp, whole=whole)

    @property
    def count(self) -> int:
        return self.sms or A100_SMS

    def is_assumed(self, terms: int, results: int, outer: bool) -> bool:
        """Whether no GPU is known, and one could have another number of parts."""
        if self.sms or self.cpu:
            return False
        largest = replace(self, sms=MOST_SMS).parts(terms, results, outer)
        return self.parts(terms, results, outer) > 1 or largest > 1

    def parts(self, terms: int, results: int, outer: bool) -> int:
        """How many sums of terms come first; one is none."""
        if self.cpu:
            return 1
        if results > 1 and (terms <= self.warp or results >= 2 * 32 * self.count):
            return 1
        if not outer and (results >= 2 * self.count or terms <= self.whole):
            return 1
        together = IN_REGISTERS if outer else WARPS * self.warp
        return -(-terms // (together * self.each(terms, results, outer)))

    def each(self, terms: int, results: int, outer: bool) -> int:
        """How many terms a thread takes."""
        device = self.count * self.threads
        if terms * results < self.warp * device:
            return self.warp
        if terms * results >= MOST * device:
            return nearest_divisor(terms, MOST, 50)
        if outer:
            blocks = -(-(device // (WARPS * self.warp)) // -(-results // RESULTS))
            wanted = -(-terms // (IN_REGISTERS * blocks))
            return max(nearest_divisor(terms, wanted, 20), self.warp)
        blocks = -(-(device // (2 * WARPS * self.warp)) // results)
        wanted = -(-terms // (WARPS * self.warp * blocks))
        return max(nearest_divisor(terms, wanted, 30), self.warp)


@dataclass(frozen=True)
class SplitSums(Splits):
    """Has reductions with few results and many terms sum parts first, then the parts; and divides
    a mean where it is read. How many parts there are follows from the GPU.

    (torch 2.13: torch/_inductor/lowering.py, mean. Parts are equal here, the next more that divides
    the terms, where Inductor masks the end.)
    """

    name = "split_sums"
    takes = gives = Level.graph

    def run(self, g: Graph) -> Graph:
        images = has_channels_innermost(g)
        assumed: list[str] = []

        def split(n: Node, b: Builder) -> tuple[Value, ...] | None:
            """mean(x[r])  →  sum(sum(x[s, r/s])) / r"""
            match n.op:
                case t.Reduce(fn, x, axes) if axes and x.type.size:
                    pass
                case _:
                    return None
            result = n.results[0].type
            outer = result.size > 1 and is_outer(x.type.shape, axes, images)
            terms = x.type.size // result.size
            shape, first, last = cut(x.type.shape, axes, self.parts(terms, result.size, outer))
            if self.is_assumed(terms, result.size, outer):
                assumed.append(ASSUMED)
            if fn != "mean" and not last:
                return None
            if fn == "mean" and result.dtype.bits < 32:
                x = b(t.Cast(x, f32))
            y = x if shape == x.type.shape else b(t.Reshape(x, shape))
            whole = "sum" if fn == "mean" else fn
            y = b(t.Reduce(whole, y, first))
            y = b(t.Reduce(whole, y, last)) if last else y
            y = y if y.type.shape == result.shape else b(t.Reshape(y, result.shape))
            y = b(t.Map("div", (y,), (real(terms),))) if fn == "mean" else y
            return (y if y.type == result else b(t.Cast(y, result.dtype)),)

        return saying(rewrite(g, split), assumed)


def saying(g: Graph, assumed: Iterable[str]) -> Graph:
    """The graph with more that was taken for granted, each once."""
    return replace(g, assumed=tuple(dict.fromkeys((*g.assumed, *assumed))))


def nearest_divisor(n: int, wanted: int, within: int) -> int:
    """The divisor of n that is nearest to a number, if it is so near; else the number."""
    near = range(max(wanted - within + 1, 1), wanted + within)
    found = (d for d in near if n % d == 0)
    return min(found, key=lambda d: abs(d - wanted), default=wanted)


Shape = tuple[int, ...]
FAR = 1 << 16  # how far above what is wanted a divisor is looked for


def cut(shape: Shape, axes: tuple[int, ...], parts: int) -> tuple[Shape, Shape, Shape]:
    """A shape whose reduced axes are cut so that there are at least so many parts, the axes that
    are reduced first, and those of the parts: none where there is nothing to cut."""
    wanted = max(parts, UNROLLED) if parts > 1 else 1
    found: list[int] = []
    first: list[int] = []
    last: list[int] = []
    for a, n in enumerate(shape):
        if a not in axes:
            found.append(n)
            continue
        near = range(min(wanted, n), min(wanted + FAR, n))
        ahead = next((d for d in near if n % d == 0), n)
        wanted = -(-wanted // ahead)
        for size, where in ((ahead, last), (n // ahead, first)):
            if size > 1:
                where.append(len(found))
                found.append(size)
    if wanted > 1 or not first:  # too few terms, or each is a part
        return shape, axes, ()
    return tuple(found), tuple(first), tuple(last)


def is_outer(shape: tuple[int, ...], axes: tuple[int, ...], images: bool) -> bool:
    """Whether neighbours in memory are of different sums; images have channels innermost."""
    if images and len(shape) == 4:
        return 1 not in axes
    wide = [a for a, n in enumerate(shape) if n != 1]
    return bool(wide) and wide[-1] not in axes
