"""Which ops share a launch: a search among pipelines, by predicted latency.

A grouping is the text of a pipeline. Tried are, in place of the pass that groups in a given one:
all that may join, nothing that need not, smaller groups, each chain of ops left out; then, of the
best of these that `fuse` makes, edges cut one after another (`fuse{cut=...}`), by a beam.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from gpuir.ir.errors import GpuirError, UsageError, VerifyError
from gpuir.ir.graph import Graph
from gpuir.passes.fuse import Fuse
from gpuir.passes.manager import Pass, Pipeline

WIDTH = 3  # of the beam
LEAST_GAIN = 1e-3  # of the latency: less is no gain to speak of
MOST_OPS = (4, 8, 16)
LAYER = re.compile(r"(?<![^./])\d+(?![^./])")  # the number of a layer in a name


@dataclass(frozen=True)
class Grouping:
    """A pipeline, and what a run is predicted to take under it."""

    pipeline: Pipeline
    latency_s: float


@dataclass(frozen=True)
class Groupings:
    """Pipelines that were tried, the fastest first; `start` is the one given, and `refused` how
    many others the model cannot be lowered by."""

    start: Grouping
    tried: tuple[Grouping, ...]
    refused: int = 0

    @property
    def best(self) -> Grouping:
        """The fastest; the one given, where others gain nothing to speak of."""
        first = self.tried[0]
        return first if first.latency_s < self.start.latency_s * (1 - LEAST_GAIN) else self.start


Latency = Callable[[Graph], float]  # seconds of a run, of the kernels that a pipeline makes


def groupings(graph: Graph, start: Pipeline, latency: Latency, tries: int = 64) -> Groupings:
    """The pipelines near `start`, at most `tries` of them, by what a run of `graph` takes."""
    place = grouping_pass(start)
    tried: dict[str, Grouping] = {}
    refused = 0

    def tell(p: Pipeline) -> Grouping | None:
        nonlocal refused
        if str(p) in tried or len(tried) + refused >= tries:
            return None
        try:
            tried[str(p)] = found = Grouping(p, latency(p.run(graph)))
        except VerifyError:
            raise
        except GpuirError:
            if p == start:
                raise
            refused += 1
            return None
        return found

    first = tell(start)
    assert first is not None, "tries are 1 or more"
    front = [first, *filter(None, (tell(p) for p in variants(start, place)))]
    front = _best(g for g in front if isinstance(g.pipeline.passes[place], Fuse))
    while front:
        found = [tell(p) for g in front for p in cut_further(graph, g.pipeline, place)]
        least = min(g.latency_s for g in front)
        front = _best(g for g in found if g is not None and g.latency_s < least)
    return Groupings(first, tuple(sorted(tried.values(), key=lambda g: g.latency_s)), refused)


def _best(found: Iterator[Grouping]) -> list[Grouping]:
    """The fastest; of those that take as long, which mostly make the same launches, the first."""
    once = {g.latency_s: g for g in reversed(list(found))}
    return sorted(once.values(), key=lambda g: g.latency_s)[:WIDTH]


def grouping_pass(p: Pipeline) -> int:
    """The place of the pass that groups ops into launches; UsageError where there is none."""
    for i, one in enumerate(p.passes):
        if one.name in ("fuse", "fuse_loops"):
            return i
    raise UsageError(
        "the pipeline has no pass that fuses ops",
        expected="a pipeline with fuse or fuse_loops",
        found=str(p),
        fix="remove --fusion, or use a profile or a pipeline with such a pass",
    )


def variants(p: Pipeline, place: int) -> Iterator[Pipeline]:
    """The pipeline with its groups made by others."""
    own = p.passes[place]
    others: list[Pass] = [Fuse(rules="none"), Fuse(), *(Fuse(max_ops=n) for n in MOST_OPS)]
    if isinstance(own, Fuse):
        rules = own.rules.split() if own.rules not in ("all", "none") else []
        kept = ([r for r in rules if r != rule] for rule in rules)
        others += [replace(own, rules=" ".join(rest) or "none") for rest in kept]
    else:
        options = {f.name for f in fields(own)}
        changes = [{"aggressive": True}, {"aggressive": False}, {"max_loops": 1}, {"max_loops": 4}]
        others += [replace(own, **c) for c in changes if c.keys() <= options]
    for other in others:
        yield _with(p, place, other)


def cut_further(graph: Graph, p: Pipeline, place: int) -> Iterator[Pipeline]:
    """The pipeline with one more edge cut: a value that some launch makes and reads for another
    model node, in all layers that have it, the largest first."""
    own = p.passes[place]
    assert isinstance(own, Fuse)
    fused = Pipeline(p.passes[: place + 1]).run(graph)
    sizes: dict[str, int] = {}
    for node in fused.nodes:
        for body in node.op.regions if not node.op.control else ():
            made = {v: n for n in body.nodes if n.op.operands for v in n.results}
            for reader in body.nodes:
                for v in reader.op.operands:
                    if v in made and made[v].locs != reader.locs:
                        name = pattern_of(v.name)
                        sizes[name] = sizes.get(name, 0) + v.type.nbytes
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        yield _with(p, place, replace(own, cut=f"{own.cut} {name}".strip()))


def pattern_of(name: str) -> str:
    """`/layer.3/Add_output_0` → `/layer.*/Add_output_0`: a value by its name in every layer. What
    would divide or widen the pattern is any one character."""
    text = re.sub(r"[\s\[\]*]", "?", name)
    return LAYER.sub("*", text)


def _with(p: Pipeline, place: int, other: Pass) -> Pipeline:
    return Pipeline((*p.passes[:place], other, *p.passes[place + 1 :]))
