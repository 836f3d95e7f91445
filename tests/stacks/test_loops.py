"""Fusing by loops: what holds of every graph."""

from __future__ import annotations

import warnings

import numpy as np
from hypothesis import given
from strategies import arrays, graphs

import gpuir
from gpuir import interp
from gpuir.fusion.flow import Flow
from gpuir.ir.graph import Graph
from gpuir.ir.verify import verify
from gpuir.stacks.inductor.innermost import innermost
from gpuir.stacks.inductor.loops.fuse import FuseLoops
from gpuir.stacks.inductor.loops.storage import StoredValues
from gpuir.stacks.table import pipeline

LOOPS = "masks,bmm,canonicalize,channels_last,split_norms,split_sums,fuse_loops,legalize"


def results(g: Graph, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        found = interp.run(g, values)
    return [found[v.name] for v in g.outputs]


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
    storage = StoredValues(Flow(g), FuseLoops())
    storage.run()
    (total,) = (x for x in storage.loops if {v.name for v in x.writes} == {"s"})
    assert {v.name for v in total.reads} == {"m"}


def test_parts_of_a_join_that_is_read_as_a_whole_are_written_side_by_side():
    """A part made by a loop is written in place once; by a call, by another join, it is copied."""
    g = gpuir.parse("""
    graph @joins {
      in %x: f32[64, 32]
      param %w: f32[32, 32]
      param %u: f32[96, 16]
      %r: f32[64, 32] = t.map("relu", [%x]) at "joins:relu"
      %m: f32[64, 32] = t.matmul(%r, %w) at "joins:mm"
      %c: f32[64, 96] = t.concat([%r, %m, %r], 1) at "joins:cat"
      %y: f32[64, 16] = t.matmul(%c, %u) at "joins:mm_1"
      out %y
    }
    """)
    values = arrays(g)
    lowered = pipeline(LOOPS).run(g)
    (join,) = (n.op for n in lowered.nodes if n.op.name == "k.view")
    assert [v.name for v in join.operands] == ["r", "c.1", "c.2"]
    (expected,), (found,) = results(g, values), results(lowered, values)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_pointwise_result_lies_as_most_of_what_it_reads():
    g = gpuir.parse("""
    graph @lying {
      in %x: f32[2, 512, 49]
      in %z: f32[2, 49, 512]
      %t: f32[2, 49, 512] = t.transpose(%x, [0, 2, 1]) at "lying:transpose"
      %e: f32[2, 49, 512] = t.map("exp", [%t]) at "lying:exp"
      %s: f32[2, 49, 512] = t.map("add", [%e, %z]) at "lying:add"
      %u: f32[2, 49, 512] = t.map("add", [%s, %t]) at "lying:add_1"
      out %u
    }
    """)
    found = {v.name: axis for v, axis in innermost(g, images=False).items()}
    assert found == {"x": 2, "z": 2, "t": 1, "e": 1, "s": 2, "u": 1}  # most reads decide


def test_what_random_numbers_are_drawn_beside_names_the_kernel():
    """Dropout of rows that are looked up is a lookup: it reads these rows, not the whole table."""
    g = gpuir.parse("""
    graph @dropped of pytorch {
      in %words: i64[16]
      param %table: f16[100000, 512]
      %x: f16[16, 512] = t.gather(%table, %words) at "dropped:embedding"
      %keep: bool[16, 512] = t.routine("random", [], [bool[16, 512]], attrs=[["kind", "keep"], ["seed", 0], ["shape", [16, 512]], ["ratio", 0.1]], work=8192) at "dropped:dropout"
      %zero: f16[] = t.constant(f16[], [0.0]) at "dropped:dropout"
      %y: f16[16, 512] = t.map("where", [%keep, %x, %zero]) at "dropped:dropout"
      out %y
    }
    """)  # noqa: E501
    (kernel,) = gpuir.analyze(g, "l4", profile="compiled").graph.nodes
    assert kernel.op.name == "k.gather" and kernel.cost
    assert dict(kernel.cost.facts)["operand_bytes"] < 1e6
    (drawn,) = gpuir.analyze(
        gpuir.parse("""graph @drawn of pytorch {
          %r: f32[4096] = t.routine("random", [], [f32[4096]], attrs=[["kind", "uniform"], ["seed", 0], ["shape", [4096]]], work=4096) at "drawn:rand"
          out %r
        }"""),  # noqa: E501
        "l4",
        profile="compiled",
    ).graph.nodes
    assert drawn.op.name == "k.routine"
