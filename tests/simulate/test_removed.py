"""A step with an op less, cut at the same places, holds no more on any rank."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gpuir
from gpuir.ir.graph import Graph
from gpuir.passes.partition import homes

TOKENS = 64
REMOVABLE = ("norm", "act", "drop", "residual", "scale")


def decoder(layers: int, width: int, batch: int, without: tuple[int, str] | None) -> Graph:
    """Blocks of a norm, two products with an activation between, dropout, a scale and a residual,
    of which one layer may lack one of them; at the end a head and a loss."""
    x = f"f32[{batch}, {TOKENS}, {width}]"
    wide = f"f32[{batch}, {TOKENS}, {4 * width}]"
    mask = f"bool[{batch}, {TOKENS}, {width}]"
    params: list[str] = []
    lines: list[str] = []
    at = "x"
    for i in range(layers):
        has = {op: without != (i, op) for op in REMOVABLE}
        loc = f"m:layers.{i}"
        params.append(f"param %up{i}: f32[{width}, {4 * width}]")
        params.append(f"param %down{i}: f32[{4 * width}, {width}]")
        now = at

        def put(name: str, type: str, text: str, module: str) -> str:
            lines.append(f'%{name}: {type} = {text} at "{loc}.{module}/{name}"')  # noqa: B023
            return name

        if has["norm"]:
            params.append(f"param %scale{i}: f32[{width}]")
            now = put(f"n{i}", x, f"t.normalize(%{now}, [2], scale=%scale{i})", "norm")
        now = put(f"u{i}", wide, f"t.matmul(%{now}, %up{i})", "up")
        if has["act"]:
            now = put(f"a{i}", wide, f't.map("gelu", [%{now}])', "act")
        now = put(f"d{i}", x, f"t.matmul(%{now}, %down{i})", "down")
        if has["scale"]:
            now = put(f"s{i}", x, f't.map("mul", [%{now}], imm=[0.5])', "scale")
        if has["drop"]:
            attrs = f'["kind", "keep"], ["seed", {i}], ["shape", [{batch}, {TOKENS}, {width}]]'
            text = f't.routine("random", [], [{mask}], attrs=[{attrs}, ["ratio", 0.1]], work=4096)'
            put(f"k{i}", mask, text, "drop")
            put(f"m{i}", x, f't.map("mul", [%{now}], imm=[1.1])', "drop")
            put(f"z{i}", "f32[]", "t.constant(f32[], [0.0])", "drop")
            now = put(f"w{i}", x, f't.map("where", [%k{i}, %m{i}, %z{i}])', "drop")
        if has["residual"]:
            now = put(f"r{i}", x, f't.map("add", [%{now}, %{at}])', "residual")
        at = now
    params.append(f"param %head: f32[{width}, 96]")
    lines.append(f'%y: f32[{batch}, {TOKENS}, 96] = t.matmul(%{at}, %head) at "m:head/y"')
    lines.append(f'%q: f32[{batch}, {TOKENS}, 96] = t.map("mul", [%y, %y]) at "m:loss/q"')
    lines.append('%loss: f32[] = t.reduce("sum", %q, [0, 1, 2]) at "m:loss/loss"')
    body = "\n  ".join([f"in %x: {x}", *params, *lines, "out %loss"])
    return gpuir.parse(f"graph @g of pytorch {{\n  {body}\n}}")


@dataclass(frozen=True)
class Case:
    layers: int
    width: int
    without: tuple[int, str]
    cast: bool
    parallel: gpuir.Parallel


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pp, dp = draw(st.sampled_from([(2, 1), (2, 2), (4, 1)]))
    tp = draw(st.sampled_from([1, 2]))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zero-bubble"]))
    chunks = 2 if schedule == "interleaved" else 1
    layers = pp * chunks * draw(st.sampled_from([1, 2]))
    zero = draw(st.sampled_from([0, 1])) if dp > 1 else 0
    parallel = gpuir.Parallel(
        dp=dp,
        tp=tp,
        pp=pp,
        zero=zero,
        microbatches=draw(st.sampled_from([4, 8])),
        schedule=schedule,  # pyright: ignore[reportArgumentType]
        chunks=chunks,
    )
    return Case(
        layers,
        draw(st.sampled_from([256, 512])),
        (draw(st.integers(0, layers - 1)), draw(st.sampled_from(REMOVABLE))),
        draw(st.booleans()),
        parallel,
    )


def cut_at_layers(self: homes.Homes) -> tuple[int, ...]:
    """The places before the first node of every so many layers."""
    found = [re.search(r"layers\.(\d+)", n.locs[0]) for n in self.forward]
    layer = [int(x[1]) if x else -1 for x in found]
    each = (max(layer) + 1) // self.parts
    return tuple(layer.index(i * each) for i in range(1, self.parts))


def peaks(case: Case, without: tuple[int, str] | None) -> list[int]:
    g = decoder(case.layers, case.width, 2 * case.parallel.dp, without)
    passes = [
        "autocast{dtype=bf16}" if case.cast else "",
        "autodiff",
        "optimizer{kind=adamw,fused=true}",
    ]
    g = gpuir.pipeline(",".join(filter(None, passes))).run(g)
    step = gpuir.simulate_ranks(g, "dgx-h100", case.parallel, profile="eager")
    return [part.held_bytes for part in step.parts]


@settings(max_examples=8, deadline=None)
@given(cases())
@example(Case(4, 256, (1, "norm"), False, gpuir.Parallel(pp=4, microbatches=4)))
def test_an_op_less_holds_no_more(case: Case):
    """Of PyTorch's own kernels, one an op: what a compiler fuses may keep other values alive."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(homes.Homes, "find_cuts", cut_at_layers)
        whole, less = peaks(case, None), peaks(case, case.without)
    assert all(b <= a for a, b in zip(whole, less, strict=True)), (whole, less)
