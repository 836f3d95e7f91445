"""Which products run in TF32: said on each kernel, where a stack makes it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from cost.kernels import gemm

import gpuir
from gpuir.ir.build import Builder
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Level
from gpuir.ir.types import DType, TensorType, f16, f32, tf32
from gpuir.ir.verify import verify
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.passes.math import run_under, runs_in_tf32, with_math
from gpuir.stacks.table import pipeline
from gpuir.text import parse, show


def model(dtype: DType = f32) -> Graph:
    """A product, a product of one column, a convolution, attention, and a product in a loop."""
    b = Builder(Level.graph, "m")
    b.locs = ("m:a",)
    x = b.input("x", TensorType((8, 16), dtype))
    vector, square = (b.param(n, TensorType((16, w), dtype)) for n, w in (("v", 1), ("s", 16)))
    image = b.input("image", TensorType((1, 16, 8, 8), dtype))
    window = b.param("window", TensorType((16, 16, 3, 3), dtype))
    q, key, v = (b.input(name, TensorType((1, 2, 8, 16), dtype)) for name in ("q", "k", "w"))
    trip, state = b.names.fresh("trip"), b.names.fresh("state")
    inner = Builder(Level.graph, "", names=b.names)
    inner.locs = b.locs
    inner.input(trip, TensorType((), gpuir.ir.types.i64))
    now = inner.input(state, x.type)
    w = inner.capture(square)
    body = inner.finish([inner(t.Matmul(now, w), "step")])
    (last,) = b.add(t.Loop(body, 3, (x,), (square,)))
    outputs = (
        b(t.Matmul(x, square), "wide"),
        b(t.Matmul(x, vector), "column"),
        b(t.Conv(image, window, (1, 1), (1, 1), (1, 1), (1, 1)), "conv"),
        b(t.Attention(q, key, v), "attention"),
        last,
    )
    return b.finish(outputs)


def rounded(g: Graph) -> set[str]:
    """The kernels whose products are in TF32."""
    return {
        n.results[0].name for n in g.walk() if isinstance(n.op, k.Contraction) and n.op.math == tf32
    }


EACH = {
    "none": set[str](),
    "conv": {"conv"},
    "products": {"conv", "wide", "step"},
    "all": {"conv", "wide", "step", "attention"},
}


@pytest.mark.parametrize("rule", EACH)
def test_kernels_say_what_their_stack_runs_in_tf32(rule: str):
    g = gpuir.lower(model(), profile=f"eager+tf32={rule}")
    assert rounded(g) == EACH[rule]
    assert not rounded(gpuir.lower(model(f16), profile=f"eager+tf32={rule}"))
    assert parse(show(g)) == g


def test_legalize_alone_goes_by_the_profile_of_the_graph():
    steps = pipeline("canonicalize,fuse,legalize")
    assert rounded(steps.run(replace(model(), profile="eager"))) == EACH["conv"]
    assert rounded(steps.run(replace(model(), profile="ort"))) == EACH["products"]


@pytest.mark.parametrize(("profile", "allowed"), [("eager", "products"), ("ideal", "all")])
def test_an_option_overrides_the_profile(profile: str, allowed: str):
    assert rounded(gpuir.lower(model(), profile=profile, tf32=True)) == EACH[allowed]
    g = gpuir.lower(model(), profile=profile, tf32=False)
    assert not rounded(g) and g.profile == f"{profile}+tf32=none"
    back = run_under(g, tf32=True)
    assert rounded(back) == EACH[allowed], "kernels that are made follow"
    assert gpuir.analyze(back, "a100").tf32 == allowed
    assert rounded(run_under(g)) == rounded(run_under(g, profile)) == set()


def test_a_summary_says_which_products_run_in_tf32():
    for rule in EACH:
        g = gpuir.analyze(model(), "a100", profile=f"eager+tf32={rule}").graph
        assert gpuir.analyze(g).tf32 == rule
        assert gpuir.analyze(g).profile == "eager"
    assert gpuir.analyze(model(f16), "a100").tf32 is None


def test_no_rule_is_called_so():
    with pytest.raises(UsageError, match="no tf32 rule 'some'"):
        gpuir.lower(model(), profile="eager+tf32=some")


def test_only_products_of_f32_run_in_tf32():
    text = show(with_math(gpuir.lower(model(), profile="ideal"), "all"))
    verify(parse(text))
    wrong = re.sub(r"\bf32\[", "f16[", text)
    with pytest.raises(Exception, match="products of f16 cannot run in tf32"):
        verify(parse(wrong))


def test_a_matrix_times_a_vector_stays_off_tf32():
    rules = ("none", "conv", "products", "all")
    for m, n, expected in ((8, 16, [False, False, True, True]), (1, 16, 4 * [False])):
        op = gemm(m, n, 32, f32)
        assert [runs_in_tf32(op, rule) for rule in rules] == expected
