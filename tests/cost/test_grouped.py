"""Mixtures of experts: who gets which rows, and how long that takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuir.cost import grouped, routing, work
from gpuir.cost.sheet import Sheet
from gpuir.cost.tile import predict
from gpuir.ir.types import bf16, f4e2m1, f8e4m3
from gpuir.targets.load import load_target


def moe(tokens: Any, **changed: Any):
    given: dict[str, Any] = {}
    given |= {"hidden": 4096, "inter": 1536, "topk": 8, "experts": 128, "dtype": bf16}
    return work.experts(tokens, **{**given, **changed})


def test_balanced_rows_are_even():
    """64 tokens x 8 = 512 rows on 128 experts: 4 each, in one tile of 8 rows."""
    share = routing.shares(64, 8, 128, 1, 0.0)
    assert share["rows"] == 512
    assert share["active"] == 128
    assert share["blocks of 8"] == 128
    assert routing.shares(64, 8, 128, 4, 0.0)["rows"] == 128


def test_few_tokens_touch_few_experts():
    """One token has 8 rows on 8 experts; of 8 ranks each has one of them."""
    assert routing.shares(1, 8, 128, 1, 0.0)["active"] == 8
    assert routing.shares(1, 8, 128, 8, 0.0)["active"] == 1


@pytest.mark.parametrize("skew", [1.01, 1.2])
def test_skew_keeps_the_rows_and_loads_the_busiest_rank(skew: float):
    tokens = np.array([4, 256, 4096])
    one, four = (routing.shares(tokens, 8, 128, ranks, skew) for ranks in (1, 4))
    np.testing.assert_allclose(one["rows"], tokens * 8)
    assert np.all(four["rows"] > tokens * 2)
    assert np.all(one["active"] <= 128)
    assert np.all(one["blocks of 64"] >= one["rows"] / 64)


def test_weights_of_active_experts_are_read():
    """8 experts of 3 x 1536 x 4096 cells of 2 bytes, or of half a byte and a sixteenth."""
    assert moe(1).operands[1].nbytes == 8 * 3 * 1536 * 4096 * 2
    assert moe(1, dtype=f4e2m1).operands[1].nbytes == 8 * 3 * 1536 * 4096 * (0.5 + 1 / 16)


def test_strays_are_computed_too():
    """16 of 64 tokens have a row on a rank of 1/32: with strays all their 8 rows are computed."""
    plain, strays = moe(64, ranks=32), moe(64, ranks=32, strays=True)
    assert plain.trait("rows") == 16
    assert strays.trait("rows") == 16 * 8
    assert moe(64, strays=True).trait("rows") == moe(64).trait("rows")


def test_families():
    assert grouped.family_of(moe(1)).name == "experts cutlass f16"
    assert grouped.family_of(moe(1, dtype=f8e4m3, block=True)).name == "experts cutlass f8 block"
    assert grouped.family_of(moe(1, weight=f4e2m1)).name == "experts cutlass f16 converted"
    never_measured = moe(1, stack="deepgemm")
    assert grouped.family_of(never_measured).name == "experts cutlass f16"


def test_stacks_by_the_kernels_names():
    assert grouped.stack_of("sglang_fused_moe_triton") == "sglang"
    assert grouped.stack_of("vllm_fp8moe_flashinfer_cutlass_flashinferexperts") == "flashinfer"
    assert grouped.stack_of("moe_torch_flow_nongated") == "cutlass"


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
