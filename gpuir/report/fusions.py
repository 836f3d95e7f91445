"""What fusing saves: each launch that stands for several, beside those it replaces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuir.ops import kernel as k
from gpuir.report.answer import Answer
from gpuir.report.kernels import KernelRow


@dataclass(frozen=True)
class FusedKernel:
    """One kernel of the fused graph, and the kernels that run its model nodes one by one."""

    fused: KernelRow
    parts: tuple[KernelRow, ...]

    @property
    def launches(self) -> int:
        return sum(x.launches for x in self.parts)

    @property
    def time_s(self) -> float:
        """Saved on the device; negative where fusing costs time."""
        return sum(x.time_s for x in self.parts) - self.fused.time_s

    @property
    def bytes(self) -> int:
        """That kernels do not read and write any more: what stays in registers."""
        return sum(x.runs * x.bytes for x in self.parts) - self.fused.runs * self.fused.bytes


def fusions(fused: Answer, unfused: Answer) -> tuple[FusedKernel, ...]:
    """The kernels that stand for several launches of `unfused`, the same model costed node by node;
    the most time saved first.

    A launch goes to a kernel that all its model nodes are in: of several (those of an LSTM) to one
    of the same loop, the same kind, that computes its result, as far as there is one. What a kernel
    computes again in place of reading it (a constant, an expansion) is no launch of its own.
    """
    homes: dict[str, list[KernelRow]] = {}
    running = [x for x in fused.kernels if x.launches]
    for x in running:
        for loc in x.locs:
            homes.setdefault(loc, []).append(x)
    computed = {x.path: computes(x) for x in running}

    def strangeness(home: KernelRow, x: KernelRow) -> tuple[bool, ...]:
        elsewhere = home.path[:-1] != x.path[:-1]
        return elsewhere, home.kind != x.kind, x.path[-1] not in computed[home.path]

    parts: dict[tuple[str, ...], list[KernelRow]] = {}
    for x in unfused.kernels:
        if not x.launches or isinstance(x.node.op, k.View):
            continue
        around = [h for h in homes.get(x.locs[0], ()) if set(x.locs) <= set(h.locs)]
        if around:
            home = min(around, key=lambda h, x=x: strangeness(h, x))
            parts.setdefault(home.path, []).append(x)
    found = (FusedKernel(x, tuple(parts.get(x.path, ()))) for x in running)
    several = [f for f in found if f.launches > f.fused.launches]
    return tuple(sorted(several, key=lambda f: -f.time_s))


def computes(x: KernelRow) -> frozenset[str]:
    """The names of what a kernel computes on the way to its results, and of these."""
    inside = [n for region in x.node.op.regions for n in region.nodes]
    return frozenset(v.name for n in (x.node, *inside) for v in n.results)


def alike_fusions(found: Iterable[FusedKernel]) -> list[list[FusedKernel]]:
    """Fusions of the same kernels at the same costs: layers repeat."""
    groups: dict[object, list[FusedKernel]] = {}
    for f in found:
        shapes = tuple(x.shape for x in f.parts)
        groups.setdefault((f.fused.kind, f.fused.shape, f.fused.cost, shapes), []).append(f)
    return sorted(groups.values(), key=lambda g: -sum(f.time_s for f in g))
