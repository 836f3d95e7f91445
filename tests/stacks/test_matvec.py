"""Products of one row under `cudagraph-tuned`: loops that read a weight once, as Inductor writes
them where it tunes by coordinate descent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpuir
from gpuir.interp import run
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.run.loading import load_text
from gpuir.stacks.inductor.matvec import Matvec

GRAPH = """graph @g of pytorch {{
  in %x: bf16[{rows}, 1, 512]
  param %w: {stored}[1024, 512]
  %wide: bf16[1024, 512] = t.cast(%w, bf16) at "m:fc"
  %wt: bf16[512, 1024] = t.transpose(%wide, [1, 0]) at "m:fc"
  %y: bf16[{rows}, 1, 1024] = t.matmul(%x, %wt) at "m:fc"
  out %y
}}"""


def graph(rows: int = 1, stored: str = "bf16") -> gpuir.Graph:
    return load_text(GRAPH.format(rows=rows, stored=stored))


def kernels(g: gpuir.Graph, profile: str) -> list[type[Any]]:
    found = gpuir.analyze(g, "a100", profile=profile).graph
    return [type(n.op) for n in found.nodes if not isinstance(n.op, k.View)]


def test_one_row_is_a_sum_and_more_are_a_product():
    assert kernels(graph(), "cudagraph-tuned") == [k.Reduce]
    assert kernels(graph(stored="i8"), "cudagraph-tuned") == [k.Reduce]
    assert kernels(graph(rows=2), "cudagraph-tuned") == [k.Gemm]
    assert kernels(graph(), "cudagraph") == [k.Gemm]


def test_weights_of_four_bits_are_multiplied_by_a_kernel_of_their_own():
    ops = [n.op for n in Matvec().run(graph(stored="i4")).nodes]
    assert any(isinstance(op, t.Matmul) for op in ops)


def test_it_means_the_same():
    g = load_text(GRAPH.format(rows=1, stored="bf16").replace("bf16", "f32"))
    x, w = (np.random.default_rng(0).random(s, np.float32) for s in ((1, 1, 512), (1024, 512)))
    given = {"x": x, "w": w}
    one, other = run(g, given), run(Matvec().run(g), given)
    np.testing.assert_allclose(one["y"], other["y"], rtol=1e-5)


@pytest.mark.parametrize("stored", ["bf16", "i8"])
def test_a_tuned_loop_reads_large_weights_at_nearly_the_full_bandwidth(stored: str):
    text = GRAPH.format(rows=1, stored=stored).replace("512", "8192").replace("1024", "16384")
    found = gpuir.analyze(load_text(text), "a100-sxm-80gb", profile="cudagraph-tuned")
    nbytes = 8192 * 16384 * (2 if stored == "bf16" else 1)
    assert 0.6 < nbytes / 2.039e12 / found.device_s < 0.95
