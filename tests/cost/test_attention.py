"""The attention family: what strips see, what packing, masks and windows save, and its limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuir.cost import attention, sized, strips
from gpuir.cost.nest import Tiles, peak_of, takes_three
from gpuir.cost.sheet import Sheet
from gpuir.cost.tile import choose, needs, predict
from gpuir.ir.types import bf16, f8e4m3, f32
from gpuir.ir.types import tf32 as TF32
from gpuir.targets.load import load_target

GPUS = ["a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "l40s", "a30"]


def prompt(batch, heads, length, head=128, **how):
    return sized.attention(*arrays(batch, heads, length, length, head), bf16, causal=True, **how)


def cached(batch, heads, keys, head=128, kv_heads=None, **how):
    kv = np.array([float(kv_heads or heads)])
    return sized.attention(
        *arrays(batch, heads, 1, keys, head), bf16, causal=True, kv_heads=kv, **how
    )


def arrays(*numbers):
    return [np.array([float(n)]) for n in numbers]


def seconds(kernel, gpu):
    return float(predict(kernel, load_target(gpu)).time_s[0])


@given(
    st.integers(1, 400),
    st.integers(0, 400),
    st.sampled_from([16, 64, 128]),
    st.sampled_from([32, 64, 128]),
    st.integers(0, 300),
)
def test_a_strip_sees_what_its_rows_see(queries, before, rows, step, window):
    """Against every cell of the mask. A walk starts and ends within a step: one step of leeway."""
    keys = queries + before
    kernel = sized.attention(
        *arrays(1, 1, queries, keys, 64), bf16, causal=True, window=np.array([float(window)])
    )
    tiles = Tiles({"b": 1.0, "h": 1.0, "s": float(rows), "d": float(step)})
    found = attention.walk(Sheet(), kernel, tiles, load_target("a100"))
    seen = []
    for first in range(0, queries, rows):
        last = min(first + rows, queries) - 1
        least = 0 if not window else max(0, first + before - window + 1)
        seen.append(last + before - least + 1)
    assert float(found.strips[0]) == len(seen)
    assert float(found.steps[0]) == pytest.approx(np.mean(seen) / step, abs=1.5 + rows / step)
    assert float(found.longest[0]) + 2 >= max(seen) / step


@pytest.mark.parametrize("gpu", GPUS)
def test_masks_and_windows_skip_what_they_hide(gpu):
    whole = sized.attention(*arrays(2, 32, 8192, 8192, 128), bf16)
    assert 1.6 < seconds(whole, gpu) / seconds(prompt(2, 32, 8192), gpu) < 2.2
    window = np.array([512.0])
    assert seconds(prompt(2, 32, 8192, window=window), gpu) < seconds(prompt(2, 32, 8192), gpu) / 4


@pytest.mark.parametrize("gpu", GPUS)
def test_heads_that_share_keys_read_the_cache_once(gpu):
    apart, together = cached(32, 32, 8192), cached(32, 32, 8192, kv_heads=4)
    assert seconds(together, gpu) < seconds(apart, gpu) / 4


@pytest.mark.parametrize("gpu", GPUS)
def test_long_prompts_are_near_the_peak_and_long_caches_near_the_bandwidth(gpu):
    target = load_target(gpu)
    long = prompt(4, 32, 16384)
    share = (
        float(long.products[0] * long.density[0]) / seconds(long, gpu) / target.peak("tensor", bf16)
    )
    assert 0.35 < share < 0.95
    many = cached(64, 32, 16384, kv_heads=8)
    # on A100 SGLang's kernels reach 0.53 of it, vLLM's 0.76, TensorRT-LLM's 0.84 (the decode table)
    assert 0.5 < float(many.nbytes[0]) / seconds(many, gpu) / target.dram_bytes_per_s < 1.0


@pytest.mark.parametrize("gpu", GPUS)
def test_narrow_caches_take_less_time(gpu):
    wide, narrow = cached(64, 32, 8192), cached(64, 32, 8192, cache=f8e4m3)
    assert 0.4 < seconds(narrow, gpu) / seconds(wide, gpu) < 0.7


def test_few_long_caches_are_split_over_the_device():
    few, many = (choose(cached(n, 8, 65536, kv_heads=8), load_target("h100")) for n in (1, 64))
    assert float(few.split[0]) > 8 and float(many.split[0]) == 1


def test_writing_the_cache_costs_and_a_library_is_one_of_those_known():
    gpu = "h100-sxm-80gb"
    assert seconds(prompt(8, 32, 1024, append=True), gpu) > seconds(prompt(8, 32, 1024), gpu)
    times = {stack: seconds(prompt(8, 32, 4096, library=stack), gpu) for stack in ("", "trtllm")}
    assert 0.6 < times["trtllm"] / times[""] < 1.6
    with pytest.raises(KeyError):
        seconds(prompt(8, 32, 4096, library="mine"), gpu)


@given(st.integers(1, 400), st.integers(1, 300), st.sampled_from([108, 132, 216]))
def test_flash_attention_takes_the_fewest_splits_that_fill_waves_nearly_as_well_as_any(
    strips, most, sms
):
    """Against its rule in words: efficiency = waves / ceil(waves), 85 % of the best suffices."""
    kernel = cached(strips, 8, most * 176, kv_heads=1)
    target = replace(load_target("h100"), sms=sms)
    filled = {n: strips * n / sms for n in range(1, min(most, sms, 128) + 1)}
    filled = {n: waves / np.ceil(waves) for n, waves in filled.items()}
    wanted = min(n for n, share in filled.items() if share >= 0.85 * max(filled.values()))
    if strips >= 0.8 * sms or most <= 4:
        wanted = 1
    assert float(choose(kernel, target).split[0]) == wanted


@pytest.mark.parametrize(
    ("gpu", "batch", "keys", "kv_heads", "split"),
    [
        ("h100", 4, 100, 8, None),  # 4 x 32 blocks for 132 SMs: too few
        ("h100", 5, 100, 8, 1),  # one block a sequence and head
        ("h100", 4, 256, 8, 2),  # 2 x 128 keys
        ("h100", 1, 65536, 8, 64),  # sqrt(8 x 512)
        ("h100", 64, 65536, 8, 2),  # 8 blocks an SM
        ("a100", 4, 100, 8, 1),
        ("a100", 64, 8192, 32, None),  # heads that share nothing
    ],
)
def test_tensorrt_llm_takes_xqa_where_a_fourth_of_the_sms_gets_a_block(
    gpu, batch, keys, kv_heads, split
):
    kernel = cached(batch, 32, keys, kv_heads=kv_heads, library="trtllm")
    target = load_target(gpu)
    found = strips.ran(kernel, target, np)
    assert (float(found.xqa[0]), float(found.lanes[0])) == ((0, 1) if split is None else (1, 0))
    if split is not None:
        assert float(choose(kernel, target).split[0]) == split


def test_flash_attention_2_splits_and_turns_only_heads_that_share_keys_of_pages():
    a100 = load_target("a100-sxm-80gb")
    own, shared = cached(1, 8, 65536), cached(1, 64, 65536, kv_heads=8)
    assert float(choose(own, a100).split[0]) > 8
    assert float(choose(cached(1, 8, 65536, paged=True), a100).split[0]) == 1
    assert float(choose(shared, a100).split[0]) > 8
    newer = cached(1, 8, 65536, library="fa3")
    assert float(choose(newer, a100).split[0]) > 8
    short = [cached(4, 64, 128, kv_heads=n) for n in (1, 8)]
    assert seconds(short[1], "a100-sxm-80gb") - seconds(short[0], "a100-sxm-80gb") > a100.launch_s


@pytest.mark.parametrize(
    ("heads", "keys", "rows"), [(16, 65536, 16), (128, 1024, 16), (128, 65536, 64)]
)
def test_blackwell_takes_few_heads_of_a_latent_where_walks_are_short(heads, keys, rows):
    kernel = sized.attention(
        *arrays(64 if keys > 1024 else 1, heads, 1, keys, 576),
        bf16,
        value=np.array([512.0]),
        kv_heads=np.array([1.0]),
        shared=True,
    )
    assert float(choose(kernel, load_target("b200")).dims["s"][0]) == rows


def test_heads_that_no_generated_kernel_has_are_slow_on_blackwell():
    def times(head):
        kernel = sized.attention(*arrays(8, 16, 4096, 4096, head), bf16, library="trtllm")
        return seconds(kernel, "b200-sxm-180gb")

    assert times(72) > 3 * times(80) > 3 * times(64)


@pytest.mark.parametrize("gpu", ["a100", "h100", "b200", "b300-sxm-288gb"])
@pytest.mark.parametrize("head", [32, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("queries", [1, 100, 4096])
def test_the_usual_tile_fits(gpu, head, queries):
    target = load_target(gpu)
    kernel = sized.attention(*arrays(2, 8, queries, 4096, head), bf16, kv_heads=np.array([2.0]))
    for need in needs(kernel, choose(kernel, target), target):
        assert np.all(need.wants <= need.has), need


@pytest.mark.parametrize("gpu", ["a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "l4"])
def test_three_products_in_tf32_make_one_in_f32(gpu):
    target = load_target(gpu)
    exact = sized.attention(*arrays(8, 16, 2048, 2048, 64), f32)
    assert takes_three(exact, target)
    rounded = replace(exact, math=TF32)
    tf32 = target.peak("tensor", TF32)
    assert peak_of(exact, target) == tf32 / 3 and peak_of(rounded, target) == tf32
    # and numbers are taken apart for them: 4 * 64 flops a score, 3 * 2 / 32 * 2 * 64 lane ops
    lane_ops = 8 * 16 * 2048**2 * 3 * 2 / 32 * 2 * 64
    least = max(exact.products / (tf32 / 3), lane_ops / (target.peak("vector", f32) / 2))
    assert least < seconds(exact, gpu)
    assert 1.5 < seconds(exact, gpu) / seconds(rounded, gpu) < 5


@pytest.mark.parametrize("gpu", ["v100-sxm2-32gb", "t4", "mi300x"])
def test_devices_without_tf32_run_attention_in_f32_at_its_own_rate(gpu):
    target = load_target(gpu)
    exact = sized.attention(*arrays(8, 16, 2048, 2048, 64), f32)
    assert not takes_three(exact, target)
    assert peak_of(exact, target) == target.peak("tensor", f32)


def test_a_walk_in_f32_is_never_split():
    one = sized.attention(*arrays(1, 4, 1, 8192, 64), f32)
    tiles = choose(one, load_target("h100-sxm"))
    assert [np.max(n) for n in (tiles.split, tiles.dims["s"], tiles.dims["d"])] == [1, 64, 64]


def test_caches_that_an_l2_in_one_piece_holds_are_read_from_there():
    """16 heads of 8192 keys, 67 MB, of the 96 MiB of AD102; four times as many are not held."""
    target = load_target("l40s")
    held, lost = (cached(batch, 16, 8192, kv_heads=16) for batch in (1, 4))
    rate = float(held.nbytes[0]) / seconds(held, "l40s")
    assert target.dram_bytes_per_s < rate < target.l2_bytes_per_s
    assert float(lost.nbytes[0]) / seconds(lost, "l40s") < target.dram_bytes_per_s


def test_power_slows_only_kernels_that_outlast_the_clock_before_sm_90():
    def slower(gpu, length):
        kernel, sheet = prompt(1, 32, length), Sheet()
        target = replace(load_target(gpu), tdp_w=200.0)
        factors = {factor.name: factor.value for factor in attention.FACTORS}
        tiles = choose(kernel, target)
        attention.seconds(sheet, kernel, tiles, target, factors)
        return float(np.ravel(sheet.values.get("slower for lack of power", 1.0))[0])

    short, long = slower("l40s", 256), slower("l40s", 32768)
    assert 1.0 <= short < 1.01 and long > short
    assert slower("h100-sxm-80gb", 32768) == 1.0


def test_triton_repeats_products_of_warps_that_have_no_rows():
    """Heads of 80 take eight warps for 64 rows, heads of 64 four: SGLang, prefill_attention.py."""

    def times(head, stack):
        kernel = sized.attention(*arrays(1, 32, 4096, 4096, head), bf16, library=stack)
        return seconds(kernel, "l40s")

    assert times(80, "triton") / times(64, "triton") > 2 > times(80, "") / times(64, "")


def test_a_window_hides_products_of_triton_and_not_their_steps():
    def share(stack):
        window = np.array([128.0])
        narrow = prompt(4, 32, 8192, head=64, library=stack, window=window)
        return seconds(narrow, "l40s") / seconds(
            prompt(4, 32, 8192, head=64, library=stack), "l40s"
        )

    assert share("triton") > 2 * share("unified")


def test_narrow_caches_of_flashinfer_are_widened_on_the_lanes():
    def share(stack):
        wide, narrow = (
            cached(16, 32, 1024, kv_heads=8, cache=dtype, library=stack) for dtype in (bf16, f8e4m3)
        )
        return seconds(narrow, "l40s") / seconds(wide, "l40s")

    assert share("flashinfer") > share("") + 0.1


def test_more_queries_than_keys_see_no_less_than_nothing():
    """Aligned at the end: of 64 queries on 2 keys the last two see one and both."""
    assert sized.density_of(64.0, 2.0, True) == 3 / 128
    assert sized.density_of(64.0, 64.0, True) == 65 / 128
