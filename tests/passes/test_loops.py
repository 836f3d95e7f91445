"""Fusing by loops: what holds of every graph."""

from __future__ import annotations

import warnings

import numpy as np
from hypothesis import HealthCheck, given, settings
from strategies import arrays, graphs

import gpuir
from gpuir import interp
from gpuir.ir.graph import Graph
from gpuir.ir.verify import verify
from gpuir.passes.flow import Flow
from gpuir.passes.loops import FuseLoops
from gpuir.passes.storage import Storage
from gpuir.passes.table import pipeline

settings.register_profile(
    "loops", max_examples=200, deadline=None, suppress_health_check=list(HealthCheck)
)
LOOPS = "bmm,canonicalize,channels_last,split_sums,fuse_loops,legalize"


def results(g: Graph, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        found = interp.run(g, values)
    return [found[v.name] for v in g.outputs]


@settings(settings.get_profile("loops"))
@given(graphs())
def test_loops_keep_meaning(g):
    values = arrays(g)
    expected = results(g, values)
    lowered = pipeline(LOOPS).run(g, watch=lambda name, after: verify(after, name))
    for a, b in zip(results(lowered, values), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_a_bias_that_is_a_number_is_no_operand():
    """A product of one column, as ONNX's Gemm writes a head of one class."""
    g = gpuir.parse("""
    graph @head {
      in %x: f32[4, 8]
      param %w: f32[8, 1]
      %m: f32[4, 1] = t.matmul(%x, %w) at "head:Gemm"
      %y: f32[4, 1] = t.map("add", [%m], imm=[0.5]) at "head:Gemm"
      out %y
    }
    """)
    lowered = pipeline(LOOPS).run(g)
    assert [n.op.name for n in lowered.nodes] == ["k.gemm", "k.map"]


def test_what_a_product_has_put_into_memory_is_read_from_there():
    """A sum over a view that was made before a product asked for what it is a view of."""
    g = gpuir.parse("""
    graph @backward {
      in %x: f32[4, 16, 8]
      in %y: f32[8]
      param %w: f32[8, 6]
      %m: f32[4, 16, 8] = t.map("mul", [%x, %y]) at "backward:mul"
      %v: f32[64, 8] = t.reshape(%m, [64, 8]) at "backward:view"
      %z: f32[64, 6] = t.matmul(%v, %w) at "backward:mm"
      %s: f32[8] = t.reduce("sum", %v, [0]) at "backward:sum"
      out %z, %s
    }
    """)
    storage = Storage(Flow(g), FuseLoops())
    storage.run()
    (total,) = (x for x in storage.loops if {v.name for v in x.writes} == {"s"})
    assert {v.name for v in total.reads} == {"m"}
