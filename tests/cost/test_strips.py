"""How libraries cut an attention: tiles by GPU and shape, against their sources."""

from __future__ import annotations

import numpy as np
import pytest

import gpuir
from gpuir.cost import sized, strips
from gpuir.cost.data import of_isa
from gpuir.cost.tile import choose
from gpuir.ir.types import bf16, f8e4m3
from gpuir.targets.load import load_target, target_names

QUERIES = np.array([2048.0, 1.0, 2048.0])


def attention(queries, keys, head, heads=32, kv_heads=8, dtype=bf16, **how):
    numbers = [np.array([float(n)]) for n in (1, heads, queries, keys, head)]
    how = {"causal": True, "kv_heads": np.array([float(kv_heads)]), **how}
    return sized.attention(*numbers, dtype, **how)


def tile(kernel, gpu):
    tiles = choose(kernel, load_target(gpu))
    return tuple(float(np.ravel(n)[0]) for n in (tiles.dims["s"], tiles.dims["d"], tiles.warps))


@pytest.mark.parametrize(
    ("gpu", "head", "how", "wanted"),
    [
        # flash_fwd_launch_template.h; caches in pages take the kernel that splits walks
        ("a100", 64, {}, (128, 128, 4)),
        ("a100", 128, {}, (128, 64, 4)),
        ("l40s", 64, {}, (128, 128, 4)),
        ("l40s", 128, {}, (64, 64, 4)),
        ("l40s", 128, {"causal": False}, (128, 32, 4)),
        ("l40s", 64, {"paged": True}, (64, 256, 4)),
        ("l40s", 128, {"paged": True}, (64, 128, 4)),
        # fmha_v2: tiled on sm_80, of few keys on sm_89, of 8 bits never
        ("a100", 128, {"library": "trtllm"}, (64, 128, 4)),
        ("l40s", 128, {"library": "trtllm"}, (64, 32, 4)),
        ("l40s", 256, {"library": "trtllm"}, (64, 128, 4)),
        ("l40s", 64, {"library": "trtllm", "dtype": f8e4m3}, (128, 128, 4)),
        # FlashInfer: two blocks an SM, of 102,400 bytes and 163,840
        ("l40s", 128, {"library": "flashinfer"}, (128, 32, 4)),
        ("a100", 128, {"library": "flashinfer"}, (128, 64, 4)),
        # extend_attention.py and prefill_attention.py
        ("l40s", 64, {"library": "triton"}, (64, 128, 4)),
        ("l40s", 192, {"library": "triton"}, (64, 64, 8)),
        ("l40s", 64, {"library": "triton", "causal": False}, (64, 64, 4)),
        ("h100", 128, {"library": "triton"}, (128, 64, 8)),
        ("b200", 128, {"library": "triton"}, (64, 64, 8)),
    ],
)
def test_tiles_of_prompts(gpu, head, how, wanted):
    assert tile(attention(4096, 4096, head, **how), gpu) == wanted


@pytest.mark.parametrize(
    ("gpu", "how", "packed"),
    [
        ("a100", {}, 1),
        ("a100", {"window": np.array([64.0])}, 0),  # flash_api.cpp, seqlenq_ngroups_swapped
        ("a100", {"window": np.array([9999.0])}, 0),  # of more keys than there are, too
        ("h100", {"window": np.array([64.0])}, 1),
        ("l40s", {"library": "flashinfer", "window": np.array([64.0])}, 1),
        ("l40s", {"library": "unified"}, 1),
    ],
)
def test_one_query_packs_the_heads_that_share_keys(gpu, how, packed):
    kernel = attention(1, 4096, 128, **how)
    assert float(np.ravel(strips.ran(kernel, load_target(gpu), np).packed)[0]) == packed


def test_flashinfer_has_kernels_of_its_own_before_sm_90_alone():
    kernel = attention(1, 4096, 128, library="flashinfer")
    libraries = [strips.library(kernel, load_target(gpu)) for gpu in ("l40s", "a100", "h100")]
    assert libraries == ["flashinfer", "flashinfer", ""]
    assert tile(kernel, "h100") == tile(attention(1, 4096, 128), "h100")


def test_flashinfer_splits_until_two_blocks_an_sm_are_at_work():
    def split(keys, kv_heads):
        kernel = attention(1, keys, 128, kv_heads=kv_heads, library="flashinfer")
        return float(choose(kernel, load_target("l40s")).split[0])

    assert split(65536, 8) == 35  # 284 blocks of 8 heads
    assert split(1000, 8) == 8  # 128 keys each
    assert split(65536, 32) == 8


def test_vllm_splits_one_query_in_sixteen_where_heads_are_few():
    def split(batch):
        numbers = [np.array([float(n)]) for n in (batch, 32, 1, 65536, 128)]
        kernel = sized.attention(*numbers, bf16, kv_heads=np.array([8.0]), library="unified")
        return float(choose(kernel, load_target("l40s")).split[0])

    assert (split(1), split(16), split(17)) == (16, 16, 1)


def test_tensorrt_llm_splits_no_narrow_cache_on_sm_89():
    def split(gpu, kv_dtype):
        kernel = attention(1, 65536, 128, cache=kv_dtype, library="trtllm")
        return float(choose(kernel, load_target(gpu)).split[0])

    assert split("l40s", f8e4m3) == 1 < split("l40s", bf16)
    assert split("a100", f8e4m3) > 1


@pytest.mark.parametrize("gpu", ["l40s", "h100", "b200"])
@pytest.mark.parametrize(("batch", "keys"), [(1, 4096), (256, 64), (256, 4096)])
def test_a_tile_without_splits_says_nothing_of_parts(gpu, batch, keys):
    """SGLang's kernel of one query sums its parts in a launch of its own, also where there is one
    part. So a kernel costs the same by its work alone and under its tile."""
    how = {"heads": 32, "kv_heads": 8, "queries": 1, "keys": keys, "head": 128, "causal": True}
    k = gpuir.kernel("attention", batch=batch, dtype="bf16", library="triton", target=gpu, **how)
    assert k.time_s == pytest.approx(float(gpuir.predict(k).time_s[0]), rel=1e-12)


@pytest.mark.parametrize(
    ("gpu", "library", "how"),
    [
        ("a100", "trtllm", {"queries": 1, "keys": 4096, "head": 128, "kv_heads": 8}),
        ("l40s", "trtllm", {"queries": 1, "keys": 4096, "head": 256, "kv_heads": 8}),
        ("l40s", "trtllm", {"queries": 2048, "keys": 2048, "head": 192, "value": 128}),
        ("h100", "trtllm", {"queries": 1, "keys": 300, "head": 80}),
        ("h100", "", {"queries": 2048, "keys": 2048, "head": 512}),
    ],
)
def test_a_library_has_its_own_tile_where_it_was_measured(gpu, library, how):
    """Our count of registers and shared memory is no less than what kernels take, and these run
    there all the same: the tile is the library's, in a report as in an evaluation."""
    given = {"heads": 32, "causal": True, "library": library, **how}
    k = gpuir.kernel("attention", batch=8, dtype="bf16", target=gpu, **given)
    own = choose(k.work, load_target(gpu))
    assert k.tile.get("s", 0) == own.dims["s"]
    assert k.tile.get("d", 0) == own.dims["d"]
    assert (k.tile.warps, k.tile.split) == (own.warps, own.split)
    assert k.time_s == pytest.approx(float(gpuir.predict(k).time_s[0]), rel=1e-12)


def test_a_target_with_less_than_its_architecture_takes_another_tile():
    how = {"heads": 32, "queries": 2048, "keys": 2048, "head": 128, "dtype": "bf16"}
    small = "h100+sm.smem_bytes_per_block=98304"
    ours, other = (gpuir.kernel("attention", batch=8, target=t, **how) for t in ("h100", small))
    assert ours.tile != other.tile
    assert other.time_s == pytest.approx(float(gpuir.predict(other).time_s[0]), rel=1e-12)
    # of many together some have the library's tile, others a searched one
    many = gpuir.kernel("attention", batch=np.array([8.0, 8.0, 8.0]), **how | {"queries": QUERIES})
    each = [
        gpuir.kernel("attention", batch=8, target=small, **how | {"queries": n}) for n in QUERIES
    ]
    alone = [k.time_s for k in each]
    np.testing.assert_allclose(gpuir.predict(many, target=small).time_s, alone, rtol=1e-12)


@pytest.mark.parametrize("name", target_names())
def test_gpus_have_what_their_architecture_does(name):
    target = load_target(name)
    for has, listed in (
        (target.sm.smem_bytes_per_block, "block_smem_bytes"),
        (target.sm.registers, "file_registers"),
    ):
        assert of_isa(listed, target.isa) in (has, np.inf)


@pytest.mark.parametrize("stages", [1.0, 2.0])
def test_an_sm_holds_the_blocks_that_shared_memory_does(stages):
    """64 queries and 64 keys and values of 128 cells in 16 bits: 16 KiB, and 32 KiB a stage."""
    tiles = choose(attention(4096, 4096, 128), load_target("l40s"))
    tiles = type(tiles)({**tiles.dims, "s": 64.0, "d": 64.0}, stages, 4.0, 1.0)
    target = load_target("l40s")
    held = strips.blocks_held(attention(4096, 4096, 128), tiles, target, 64.0, np)
    assert float(np.ravel(held)[0]) == (2 if stages == 1 else 1)
