"""Mixtures of experts: who gets which rows, and how long that takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpuir
from gpuir.cost import grouped, routing
from gpuir.cost.reading import work_of
from gpuir.cost.sheet import Sheet
from gpuir.cost.tile import predict
from gpuir.cost.work import Work
from gpuir.ir.types import bf16, f4e2m1, f8e4m3, i4
from gpuir.ops import kernel as k
from gpuir.stacks.serving.engines import implementation
from gpuir.targets.load import load_target


def moe(tokens: Any, **changed: Any):
    given: dict[str, Any] = {}
    given |= {"hidden": 4096, "inter": 1536, "topk": 8, "experts": 128, "dtype": bf16}
    return routing.mixture(tokens, **{**given, **changed})


def rows(of: Work) -> Any:
    return of.detail_as(routing.Routed).shares.rows


def test_balanced_rows_are_even():
    """64 tokens x 8 = 512 rows on 128 experts: 4 each, in one tile of 8 rows."""
    share = routing.shares(64, 8, 128, 1, 0.0)
    assert share.rows == 512
    assert share.active == 128
    assert share.tiles[0] == 128
    assert routing.shares(64, 8, 128, 4, 0.0).rows == 128


def test_few_tokens_touch_few_experts():
    """One token has 8 rows on 8 experts; of 8 ranks each has one of them."""
    assert routing.shares(1, 8, 128, 1, 0.0).active == 8
    assert routing.shares(1, 8, 128, 8, 0.0).active == 1


@pytest.mark.parametrize("skew", [1.01, 1.2])
def test_skew_keeps_the_rows_and_loads_the_busiest_rank(skew: float):
    tokens = np.array([4, 256, 4096])
    one, four = (routing.shares(tokens, 8, 128, ranks, skew) for ranks in (1, 4))
    np.testing.assert_allclose(one.rows, tokens * 8)
    assert np.all(four.rows > tokens * 2)
    assert np.all(one.active <= 128)
    assert np.all(one.tiles[routing.ROWS.index(64)] >= one.rows / 64)


def test_weights_of_active_experts_are_read():
    """8 experts of 3 x 1536 x 4096 cells of 2 bytes, or of half a byte and a sixteenth."""
    assert moe(1).operands[1].nbytes == 8 * 3 * 1536 * 4096 * 2
    assert moe(1, dtype=f4e2m1).operands[1].nbytes == 8 * 3 * 1536 * 4096 * (0.5 + 1 / 16)


def test_strays_are_computed_too():
    """16 of 64 tokens have a row on a rank of 1/32: with strays all their 8 rows are computed."""
    plain, strays = moe(64, ranks=32), moe(64, ranks=32, strays=True)
    assert rows(plain) == 16
    assert rows(strays) == 16 * 8
    assert rows(moe(64, strays=True)) == rows(moe(64))


def test_tokens_that_were_not_routed_here_are_no_work():
    """Of 64 tokens 16 have a row on a rank of 1/32: those are read, and written."""
    every, routed = moe(64, ranks=32), moe(64, ranks=32, routed=True)
    assert every.operands[0].nbytes == 64 * 4096 * 2
    assert routed.operands[0].nbytes == routed.operands[2].nbytes == 16 * 4096 * 2
    assert routed.products == every.products and rows(routed) == rows(every)
    assert moe(64, routed=True).operands == moe(64).operands


def test_families():
    assert grouped.family_of(moe(1)).name == "experts cutlass f16"
    assert (
        grouped.family_of(moe(1, dtype=f8e4m3, scales="block")).name == "experts cutlass f8 block"
    )
    assert grouped.family_of(moe(1, weight=f4e2m1)).name == "experts cutlass f16 converted"
    never_measured = moe(1, library="deepgemm")
    assert grouped.family_of(never_measured).name == "experts cutlass f16"


def test_stacks_by_the_kernels_names():
    assert implementation("sglang_fused_moe_triton") == "sglang"
    assert implementation("vllm_fp8moe_flashinfer_cutlass_flashinferexperts") == "flashinfer"
    assert implementation("moe_torch_flow_nongated") == "cutlass"


def test_more_tokens_are_never_quicker_by_much_and_a_faster_target_never_slower():
    tokens = 2.0 ** np.arange(15)
    h100, h200 = (load_target(name) for name in ("h100-sxm-80gb", "h200-sxm-141gb"))
    work = moe(tokens)
    slow, fast = (predict(work, t, model={}).time_s for t in (h100, h200))
    assert np.all(np.diff(slow) > -0.02 * slow[:-1])
    assert np.all(fast <= slow)
    assert slow[-1] > work.products[-1] / h100.peak("tensor", bf16)


def test_one_kernel_as_many():
    """A work of floats and one of arrays of one length cost the same."""
    target = load_target("h100-sxm-80gb")
    one = predict(moe(64), target, model={}).time_s
    many = predict(moe(np.full(3, 64)), target, model={}).time_s
    np.testing.assert_allclose(many, np.full(3, float(one[0])))


def test_the_sheet_says_what_there_was_to_move():
    target = load_target("h100-sxm-80gb")
    work = moe(256)
    family = grouped.family_of(work)
    p = {f.name: f.value for f in family.factors}
    s = Sheet()
    terms = family.seconds(s, work, family.choose(work, target, p), target, p)
    assert set(family.features) <= set(s.values)
    assert terms.memory > work.operands[1].nbytes / target.dram_bytes_per_s


# ---------------------------------------------------------------------------- read off a kernel

MIX = """graph @mix {
  in %x: bf16[64, 4096]
  in %which: i64[64, 8]
  in %shares: bf16[64, 8]
  param %up: bf16[128, 3072, 4096]
  param %down: bf16[128, 4096, 1536]
  %y: bf16[64, 4096] = t.experts(%x, %which, %shares, %up, %down) at "m:mlp"
  out %y
}"""
PACKED = """graph @mix {
  in %x: f16[64, 4096]
  in %which: i64[64, 8]
  in %shares: f16[64, 8]
  param %q: u4[128, 3072, 4096]
  param %s: f16[128, 3072, 1]
  param %r: u4[128, 4096, 1536]
  param %t: f16[128, 4096, 1]
  %f: f16[128, 3072, 4096] = t.cast(%q, f16) at "m:mlp"
  %up: f16[128, 3072, 4096] = t.map("mul", [%f, %s]) at "m:mlp"
  %g: f16[128, 4096, 1536] = t.cast(%r, f16) at "m:mlp"
  %down: f16[128, 4096, 1536] = t.map("mul", [%g, %t]) at "m:mlp"
  %y: f16[64, 4096] = t.experts(%x, %which, %shares, %up, %down) at "m:mlp"
  out %y
}"""


def kernel_of(text: str) -> k.Experts:
    (node,) = gpuir.lower(gpuir.load_text(text)).nodes
    assert isinstance(node.op, k.Experts)
    return node.op


def test_a_kernel_is_the_work_of_its_extents():
    found, wanted = work_of(kernel_of(MIX)), moe(64)
    assert found.likeness == wanted.likeness
    assert (found.products, found.detail) == (wanted.products, wanted.detail)
    assert found.nbytes == wanted.nbytes
    routed = work_of(kernel_of(MIX.replace("%down)", "%down, ranks=2, routed=true)")))
    assert routed.detail == moe(64, experts=256, ranks=2, routed=True).detail
    skewed = work_of(kernel_of(MIX.replace("%down)", "%down, skew=1.2)")))
    assert skewed.detail == moe(64, skew=1.2).detail


def test_packed_weights_are_read_with_their_scales():
    """Half a byte a cell, and 2 bytes for each of the 3072 and 4096 rows of an expert."""
    work = work_of(kernel_of(PACKED))
    assert work.kind == "cutlass f16 converted"
    assert work.operands[1].nbytes == 128 * (3 * 1536 * 4096 / 2 + 2 * (3072 + 4096))


def test_experts_go_all_the_way():
    """Tiled, costed, explained, and written down again with the tiles they got."""
    g = gpuir.analyze(gpuir.load_text(MIX), "h100").graph
    (node,) = g.nodes
    cost = node.cost
    assert cost is not None and cost.by == "tile@2" and cost.unseen == ()
    direct = predict(moe(64), load_target("h100")).time_s
    np.testing.assert_allclose(cost.time_s, direct)
    time_s = {line.name: line.value for line in gpuir.explain(g, "y")}["time"]
    assert time_s == pytest.approx(cost.time_s)
    assert gpuir.parse(gpuir.show(g)) == g
    assert gpuir.extract(g).tiles == ((("y",), node.tile),)
    report = gpuir.analyze(g)
    assert [t.kind for t in report.totals] == ["experts"]
    assert report.flops == node.op.flops()


def test_what_was_never_measured_is_said():
    f32_mix = MIX.replace("bf16", "f32")
    (node,) = gpuir.analyze(gpuir.load_text(f32_mix), "v100-sxm-16gb").graph.nodes
    assert node.cost is not None and node.cost.unseen == ("gpu", "dtype")
    four, eight = PACKED.replace("f16", "bf16"), PACKED.replace("f16", "bf16").replace("u4", "u8")
    for text, unseen in ((four, ()), (eight, ("dtype", "size"))):
        (node,) = gpuir.analyze(gpuir.load_text(text), "h100").graph.nodes
        assert node.cost is not None and node.cost.unseen == unseen


@pytest.mark.parametrize("target", ["p100-pcie-16gb", "mi100", "b200", "t4"])
def test_every_target_takes_them(target: str):
    for text in (MIX, MIX.replace("bf16", "f32"), PACKED, MIX.replace("[64", "[0")):
        (node,) = gpuir.analyze(gpuir.load_text(text), target).graph.nodes
        assert node.cost is not None and 0 < node.cost.time_s < 1


def test_uneven_rows_read_fewer_experts_and_fill_fewer_tiles():
    """Few tokens touch fewer experts when some are popular; of many, tiles fill worse."""
    few, many = MIX.replace("[64", "[16"), MIX.replace("[64", "[2048")
    for text, is_slower in ((few, False), (many, True)):
        even, skewed = (
            gpuir.analyze(
                gpuir.load_text(text.replace("%down)", f"%down, skew={x})")), "h100"
            ).graph
            for x in (0.0, 1.2)
        )
        times = [g.nodes[0].cost.time_s for g in (even, skewed)]  # pyright: ignore
        assert (times[1] > times[0]) == is_slower


def test_marlin_keeps_to_mma_sync():
    """Of the listed rate all on A100, 0.629 on H100, half of that on B200, where products do twice
    as many operations a clock. With nothing else to wait for, times go by these shares."""
    found: list[float] = []
    for name, share in (("a100-sxm-80gb", 1.0), ("h100-sxm-80gb", 0.629), ("b200", 0.629 / 2)):
        target = load_target(name)
        work = moe(16384, experts=8, topk=2, weight=i4, library="marlin")
        free = {"joule share": 0.0, "tail": 0.0, "fill": 0.0, "depth": 0.0, "feed share": 3.0}
        p = {f.name: f.value for f in grouped.family_of(work).factors} | free
        family = grouped.family_of(work)
        terms = family.seconds(Sheet(), work, family.choose(work, target, p), target, p)
        ideal = work.products / (target.peak("tensor", bf16) * p["compute share"] * share)
        found.append(float(np.max(terms.compute)) / float(ideal))
    assert found == pytest.approx([1.0] * 3, rel=0.05)


def test_implementations_start_at_their_launches():
    """Nine of CUTLASS, one more for fp8; five of TensorRT-LLM's, which quantises as it writes, but
    not in blocks along k."""

    def start(name: str, factor: str) -> float:
        return {f.name: f.value for f in grouped.FAMILIES[f"experts {name}"].factors}[factor]

    launches = {"cutlass f16": 9, "cutlass f8": 10, "trtllm f16": 5, "trtllm f8": 5}
    launches |= {"trtllm f8 block": 7, "trtllm f4": 6, "cutedsl f4": 4}
    for name, count in launches.items():
        assert start(name, "fixed") == pytest.approx(count * grouped.LAUNCH_S)
    assert start("cutlass f16", "expert") > start("trtllm f16", "expert")


def test_fused_products_move_fewer_rows():
    target = load_target("b200")
    moved: dict[str, float] = {}
    for stack in ("cutlass", "trtllm"):
        s, work = Sheet(), moe(4096, library=stack)
        family = grouped.family_of(work)
        p = {f.name: f.value for f in family.factors}
        family.seconds(s, work, family.choose(work, target, p), target, p)
        moved[stack] = float(s.values["rows moved"])
    rows, tokens = 4096 * 8, 4096
    cells = {n: rows * (2 * 4096 + 2 * n * 1536) + tokens * 4096 for n in (1, 3)}
    assert moved["trtllm"] / moved["cutlass"] == pytest.approx(cells[1] / cells[3])


def test_measured_again_weights_that_fit_are_read_from_the_l2():
    """One token's 8 experts of 9.4 MB are 75 MB: L40S holds 101, H100 37. In a model others come
    between."""

    def missed(name: str, **how: Any) -> float:
        s, target = Sheet(), load_target(name)
        work = moe(np.array([1.0]), inter=384, **how)
        family = grouped.family_of(work)
        p = {f.name: f.value for f in family.factors}
        family.seconds(s, work, family.choose(work, target, p), target, p)
        return float(np.max(s.values["share of the weights that misses the l2"]))

    assert missed("l40s", again=True) == 0
    assert missed("h100-sxm-80gb", again=True) == 1
    assert missed("l40s") == 1


def test_launches_take_clocks():
    fast, slow = load_target("l40s"), load_target("l40s+clock_hz=1.26e9")
    work = moe(1)
    p = {f.name: f.value for f in grouped.family_of(work).factors}
    fixed: list[float] = []
    for target in (fast, slow):
        s = Sheet()
        grouped.seconds(s, work, grouped.choose(work, target, p).take(0), target, p)
        fixed.append(float(s.values["fixed"]) - 128 * p["expert"])
    assert fixed[1] == pytest.approx(2 * fixed[0])


def test_a_rank_has_its_part_of_the_rows():
    """512 rows on 128 experts are four each; of two ranks with 128 experts of 256 each, two."""
    assert kernel_of(MIX).space().dims["m"] == 4
    two = MIX.replace("%down)", "%down, ranks=2, routed=true)")
    assert kernel_of(two).space().dims["m"] == 2
