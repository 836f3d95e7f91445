"""A batch in microbatches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from strategies import arrays

import gpuir
from gpuir.interp import run
from gpuir.ir.errors import UsageError
from gpuir.ir.verify import verify

ENCODER = Path(__file__).parents[1] / "small_encoder.onnx"


def test_gradients_of_microbatches_add_up_to_those_of_the_batch():
    g = gpuir.load(ENCODER, dims={"batch": 4, "seq": 8}, train=True)
    part = gpuir.pipeline("microbatch{count=2}").run(g)
    verify(part)
    assert part.mesh == () and part.cuts == ()
    assert sum(n.op.flops() for n in part.nodes) == pytest.approx(
        sum(n.op.flops() for n in g.nodes) / 2, rel=0.01
    )
    values = arrays(g)
    wanted = run(g, values)
    sums: dict[str, np.ndarray] = {}
    inputs = {v.name for v in g.inputs}
    for i in range(2):
        own = {n: x[2 * i : 2 * i + 2] if n in inputs else x for n, x in values.items()}
        for name, x in run(part, own).items():
            if name.endswith(".grad"):
                sums[name] = sums.get(name, 0) + np.asarray(x, np.float64)
    assert len(sums) > 10
    for name, x in sums.items():
        scale = 1e-3 + np.abs(wanted[name]).max()
        np.testing.assert_allclose(x / scale, np.asarray(wanted[name]) / scale, atol=2e-3)


def test_batch_norm_takes_statistics_of_a_microbatch():
    text = """graph @g {
      in %x: f32[4, 3]
      %n: f32[4, 3] = t.normalize(%x, [0]) at "m:norm"
      out %n
    }"""
    part = gpuir.pipeline("microbatch{count=2}").run(gpuir.parse(text))
    verify(part)
    x = np.random.default_rng(0).standard_normal((2, 3), np.float32)
    wanted = run(gpuir.parse(text.replace("4,", "2,")), {"x": x})
    np.testing.assert_allclose(run(part, {"x": x})["n"], wanted["n"], rtol=1e-6)


def test_what_cannot_be_is_refused():
    g = gpuir.load(ENCODER, dims={"batch": 4, "seq": 8})
    assert gpuir.pipeline("microbatch{count=1}").run(g) == g
    with pytest.raises(UsageError, match="a batch of 4"):
        gpuir.pipeline("microbatch{count=3}").run(g)
    with pytest.raises(UsageError, match="the graph is already split over ranks"):
        gpuir.pipeline("shard{ranks=2},microbatch{count=2}").run(g)
