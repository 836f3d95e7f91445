"""The same model in fewer bits, with a longer dimension, with packed weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from strategies import graphs

import gpuir
from gpuir import interp
from gpuir.ir.errors import ModelError, UsageError
from gpuir.ir.graph import Graph
from gpuir.ir.types import bf16, f16, f32, i8
from gpuir.ir.verify import verify
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.passes.convert import Convert, Extend, Pack
from gpuir.stacks.table import pipeline
from gpuir.text import parse, show

ENCODER = str(Path(__file__).parent.parent.parent / "examples/encoder.onnx")

TIED = """graph @tied {
  in %ids: i64[2, 8]
  param %words: f32[1001, 128]
  param %up: f32[128, 512]
  param %small: f32[512, 4]
  param %down: f32[256, 512]
  %x: f32[2, 8, 128] = t.gather(%words, %ids) at "m:embed"
  %h: f32[2, 8, 512] = t.matmul(%x, %up) at "m:up"
  %y: f32[2, 8, 4] = t.matmul(%h, %small) at "m:small"
  %down.T: f32[512, 256] = t.transpose(%down, [1, 0]) at "m:down"
  %z: f32[2, 8, 256] = t.matmul(%h, %down.T) at "m:down"
  %back: f32[128, 1001] = t.transpose(%words, [1, 0]) at "m:head"
  %scores: f32[2, 8, 1001] = t.matmul(%x, %back) at "m:head"
  %all: f32[16, 1001] = t.reshape(%scores, [16, 1001]) at "m:view"
  %first: f32[16, 1001] = t.slice(%all, [0, 0], [16, 1001], [1, 1]) at "m:slice"
  out %y, %z, %first
}
"""


@given(graphs())
def test_converted_graphs_are_graphs_and_close_to_what_they_were(g: Graph):
    made = Convert("f16").run(g)
    verify(made)
    assert parse(show(made)) == made
    values = [v for n in made.walk() for v in (*n.results, *n.op.operands)]
    assert not any(v.type.dtype == f32 for v in values)
    assert len(made.nodes) == len(g.nodes) and made.folded == g.folded


def test_what_is_computed_is_what_f16_computes():
    g = parse(TIED)
    rng = np.random.default_rng(0)
    values = {v.name: rng.standard_normal(v.type.shape) / 8 for v in g.params}
    values["ids"] = rng.integers(0, 1001, (2, 8))

    def run(g: Graph, width: str) -> list[np.ndarray]:
        return list(
            interp.run(
                g, {n: v.astype("i8" if n == "ids" else width) for n, v in values.items()}
            ).values()
        )

    before, after = run(g, "f4"), run(Convert("f16").run(g), "f2")
    for a, b in zip(before, after, strict=True):
        assert b.dtype == np.float16
        np.testing.assert_allclose(b.astype("f4"), a, rtol=0.02, atol=0.5)


def test_a_longer_dimension_goes_everywhere():
    g = Extend(1001, 1024).run(parse(TIED))
    verify(g)
    assert "1001" not in show(g)
    assert [str(v.type) for v in g.outputs] == ["f32[2, 8, 4]", "f32[2, 8, 256]", "f32[16, 1024]"]
    encoder = gpuir.load(ENCODER, dims={"batch": 1, "seq": 16})
    assert Extend(1_000_003, 1_000_004).run(encoder) == encoder


def test_a_number_that_stands_for_two_things_is_refused():
    g = parse(
        """graph @g {
  in %x: f32[2, 100]
  %y: f32[2, 50] = t.slice(%x, [0, 50], [2, 50], [1, 1]) at "m:half"
  out %y
}
"""
    )
    with pytest.raises(ModelError) as error:
        Extend(50, 64).run(g)
    assert "m:half" in str(error.value)
    with pytest.raises(UsageError, match="the new size must be larger than the old one"):
        Extend(64, 50)


def test_packed_weights_are_read_as_bytes_in_the_products_own_launch():
    g = Pack().run(Convert("bf16").run(parse(TIED)))
    verify(g)
    params = {v.name: v.type for v in g.params}
    assert params["up"].dtype == i8 and params["up.scale"].shape == (512,)
    assert params["words"].dtype == bf16, "an embedding reads it too"
    assert params["small"].dtype == bf16, "too small to matter"
    for profile in ("eager", "ort", "compiled", "ideal"):
        lowered = gpuir.lower(g, profile=profile)
        for name in ("up", "down"):
            (product,) = [
                n for n in lowered.nodes if f"m:{name}" in n.locs and not isinstance(n.op, k.View)
            ]
            assert isinstance(product.op, k.Gemm) and product.op.prologue, profile
            assert name in {v.name for v in product.op.operands}


def test_packing_makes_products_of_one_row_quicker_and_memory_less():
    g = Convert("f16").run(gpuir.load(ENCODER, dims={"batch": 1, "seq": 1}))
    before, after = (gpuir.analyze(x, "t4") for x in (g, Pack().run(g)))
    products = [sum(x.time_s for x in s.kernels if x.kind == "gemm") for s in (before, after)]
    assert 0.4 < products[1] / products[0] < 0.9
    assert after.memory.peak_bytes < 0.8 * before.memory.peak_bytes


def test_pipelines_name_them():
    text = "convert{dtype=bf16},extend{old=50257,new=50304},pack"
    assert str(pipeline(text)) == text
    with pytest.raises(UsageError, match="is not supported"):
        pipeline("convert{dtype=f64}")


def test_a_training_step_is_refused():
    g = gpuir.load(ENCODER, dims={"batch": 1, "seq": 8}, train=True)
    for made in (Convert("f16"), Pack()):
        with pytest.raises(UsageError, match="has a backward pass"):
            made.run(g)


def test_values_of_both_kinds_of_16_bits():
    for name, dtype in (("f16", f16), ("bf16", bf16)):
        made = Convert(name).run(parse(TIED))
        (matmul, *_) = [n for n in made.nodes if isinstance(n.op, t.Matmul)]
        assert matmul.results[0].type.dtype == dtype


def test_edges_keep_their_types_and_nothing_between_them_is_f32():
    g = gpuir.load(ENCODER, dims={"batch": 2, "seq": 8})
    made = gpuir.load(ENCODER, dims={"batch": 2, "seq": 8}, fp16=True)
    verify(made)
    assert made == Convert("f16", edges=True).run(g)
    assert made.inputs == g.inputs
    assert [v.type for v in made.outputs] == [v.type for v in g.outputs]
    assert all(v.type.dtype != f32 for v in made.params)
    ends = {*made.inputs, *made.outputs}
    between = [v for n in made.nodes for v in n.results if v not in ends]
    assert between and not any(v.type.dtype == f32 for v in between)


def test_the_same_input_is_cast_once_and_an_output_may_be_an_input():
    g = parse("""graph @g {
  in %x: f32[4]
  %y: f32[4] = t.map("exp", [%x]) at "m:y"
  %z: f32[4] = t.map("mul", [%x, %y]) at "m:z"
  out %x, %z
}
""")
    made = Convert("f16", edges=True).run(g)
    verify(made)
    assert [n.op.name for n in made.nodes] == ["t.cast", "t.map", "t.map", "t.cast"]
    assert made.outputs[0] == g.inputs[0]
    x = np.linspace(-1, 1, 4, dtype=np.float32)
    z, want = ([*interp.run(h, {"x": x}).values()][1] for h in (made, g))
    assert z.dtype == np.float32 and np.allclose(z, want, atol=2e-3)


def test_fp16_is_not_for_training_or_autocast():
    for how in ({"train": True}, {"autocast": "f16"}):
        with pytest.raises(UsageError, match="fp16 is for inference"):
            gpuir.load(ENCODER, dims={"batch": 2, "seq": 8}, fp16=True, **how)
