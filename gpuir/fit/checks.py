"""Tables that `gpuir check` writes: kernels of a model as its framework ran them, as text of the
IR."""

from __future__ import annotations

import numpy as np

from gpuir.cost.reading import among
from gpuir.cost.work import Work
from gpuir.fit.batch import MeasuredBatch
from gpuir.fit.readers import Reader, Shapes, Unmodelled
from gpuir.ir.errors import GpuirError
from gpuir.ir.graph import Graph
from gpuir.ops import kernel as k
from gpuir.targets.target import Target
from gpuir.text import parse


def works_of(graph: Graph, weights: k.HeldWeights) -> tuple[Work, ...]:
    """The kernels of a graph of a few, as they run among all weights of a model."""
    return tuple(among(n.op, weights) for n in graph.nodes if isinstance(n.op, k.KernelOp))


def batch_of(graph: Graph, weights: k.HeldWeights, seconds: float, target: Target) -> MeasuredBatch:
    """Kernels that were measured together, once."""
    works = tuple(w.each(lambda n: np.array([float(n)])) for w in works_of(graph, weights))
    kind, dtype = works[-1].sort, works[-1].dtype.name
    how = ("", kind, target.name, dtype, target)
    return MeasuredBatch(*how, works=works, which=np.arange(1), latency_s=np.array([seconds]))


def _works(s: Shapes) -> tuple[Work, ...]:
    text = s.words["kernels"]
    if not text:
        raise Unmodelled("no kernel of ours, or one that is launched in a loop")
    try:
        graph = parse(text, "kernels")
    except GpuirError as error:
        raise Unmodelled(f"kernels that cannot be read: {error.what}") from error
    return works_of(graph, k.HeldWeights(frozenset(graph.params), int(s["weight_bytes"].max())))


READER = Reader(
    name="checked kernels",
    key=("kind", "shape", "kernels", "weight_bytes", "predicted_s"),
    words=("kind", "shape", "kernels"),
    shape=("weight_bytes",),
    or_zero=("weight_bytes",),
    works=_works,
    op=lambda words: words["kind"],
    dtype=lambda words: words["shape"].partition(" ")[0],
    beside=("model", "profile"),
    latency="measured_s",
    unit_s=1.0,
)
