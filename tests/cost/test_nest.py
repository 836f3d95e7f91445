"""Bytes, blocks, occupancy and waves, by arithmetic a reader can redo."""

from __future__ import annotations

import pytest
from cost.kernels import attention, conv, gather, gemm, mapped, scatter

from gpuir.cost.generated import legal
from gpuir.cost.nest import Tiles, cut, library_block, residents
from gpuir.cost.reading import density_of, work_of
from gpuir.cost.sheet import Sheet
from gpuir.ir.notes import Tile
from gpuir.ir.types import f16, f32, i8
from gpuir.targets.load import load_target

A100 = load_target("a100")
BIG = Tile((("m", 128), ("n", 128), ("k", 32)), stages=3, warps=4)


def why_illegal(op, tile, target):
    return legal.why_illegal(work_of(op), tile, target)


def nest(op, tile):
    work = work_of(op)
    return cut(work, Tiles.of(tile, work))


def test_flops_of_a_small_product():
    op = gemm(2, 4, 3, f32)
    assert work_of(op).products == 2 * 2 * 3 * 4
    assert op.flops() == 48  # the identity of the epilogue is free


def test_bytes_of_one_addition():
    op = mapped("add", f32, (1000,), (1000,))
    assert work_of(op).nbytes == 3 * 1000 * 4


def test_a_broadcast_operand_is_read_once():
    op = mapped("add", f16, (64, 1000), (1000,))
    assert work_of(op).nbytes == (2 * 64 * 1000 + 1000) * 2


def test_blocks_and_waves_of_a_product():
    n = nest(gemm(4096, 4096, 4096), BIG)
    assert n.blocks == 32 * 32
    assert n.steps == 128
    block, s = library_block(n, A100), Sheet()
    assert block.smem_bytes == 3 * (128 * 32 + 32 * 128) * 2
    assert block.registers == 160  # 128 * 128 accumulators over 128 threads, and 32 of its own
    held = residents(s, n, A100, block)
    assert held == min(167_936 // (49_152 + 1024), 65_536 // (160 * 128)) == 3
    assert s.values["waves"] == pytest.approx(1024 / (108 * 3))
    assert s.values["blocks of the busiest SM"] == 10
    assert s.values["tail: used share of SM time"] == pytest.approx(1024 / 1080)
    assert s.values["padding: used share of the tiles"] == 1


def test_padding_counts_the_cells_outside():
    n = nest(gemm(100, 100, 64), Tile((("m", 64), ("n", 64), ("k", 32))))
    assert n.blocks == 4
    assert n.blocks * n.steps * n.step_points == 128 * 128 * 64


def test_splitting_shares_out_the_steps():
    tile = Tile((("m", 64), ("n", 64), ("k", 32)), split=4)
    n = nest(gemm(64, 64, 4096), tile)
    assert n.blocks == 4
    assert n.steps == 32


def test_a_convolution_reads_its_input_not_the_unfolded_one():
    op = conv(1, 64, 56, 64, 3)
    work = work_of(op)
    assert work.extents == {"b": 1, "m": 56 * 56, "n": 64, "k": 9 * 64}
    assert work.operands[0].nbytes == 64 * 56 * 56 * 2


def test_a_strided_pointwise_convolution_reads_what_it_visits():
    assert work_of(conv(1, 64, 56, 64, 1, stride=2)).operands[0].nbytes == 64 * 28 * 28 * 2


def test_a_depthwise_convolution_runs_on_the_lanes():
    assert work_of(conv(1, 64, 56, 64, 3, groups=64)).pipe == "vector"
    assert work_of(conv(1, 64, 56, 64, 3)).pipe == "tensor"


def test_attention_is_two_products():
    work = work_of(attention(2, 8, 128, 256, 64))
    assert work.products == 2 * (2 * 8 * 128 * 256 * 64) * 2
    assert work.operands[0].nbytes == 2 * 8 * 128 * 64 * 2


def test_grouped_heads_read_their_keys_once():
    work = work_of(attention(1, 32, 1, 1024, 128, groups=8))
    assert work.operands[1].nbytes == 8 * 1024 * 128 * 2


def test_a_causal_mask_hides_about_half():
    assert density_of(attention(1, 1, 4, 4, 8, causal=True)) == 10 / 16
    assert density_of(attention(1, 1, 1, 100, 8, causal=True, offset=99)) == 1
    assert density_of(attention(1, 1, 4, 4, 8, causal=True, window=1)) == 7 / 16
    assert density_of(attention(1, 1, 4, 4, 8)) == 1


def test_a_gather_reads_what_it_gives():
    work = work_of(gather(1_000_000, 64, 10))
    assert [o.nbytes for o in work.operands] == [10 * 64 * 4, 10 * 8, 10 * 64 * 4]


def test_a_gather_of_single_cells_reads_sectors():
    assert work_of(gather(1_000_000, 1, 10)).operands[0].nbytes == 10 * 32


def test_a_scatter_is_in_place():
    work = work_of(scatter(4096, 128, 2))
    assert [o.nbytes for o in work.operands] == [0, 2 * 8, 2 * 128 * 2, 2 * 128 * 2]


def test_kernels_that_differ_in_names_alone_are_equal_work():
    a = gemm(64, 64, 64)
    left = a.args[0]
    b = a.substitute({left: type(left)("other", left.type)})
    assert a != b
    assert work_of(a) == work_of(b)
    assert hash(work_of(a)) == hash(work_of(b))


@pytest.mark.parametrize(
    ("tile", "why"),
    [
        (BIG, ""),
        (
            Tile((("m", 256), ("n", 128), ("k", 64)), stages=5, warps=8),
            "shared memory: 196,608 bytes a block, a100-sxm-40gb has 166,912",
        ),
        (
            Tile((("m", 256), ("n", 256), ("k", 32)), warps=4),
            "",  # a compiler spills
        ),
        (Tile((("m", 128), ("n", 128), ("k", 32)), warps=64), "threads: 2,048 a block"),
        (Tile((("m", 100), ("n", 128), ("k", 32))), "m in steps of 16: 4 rows over, at most 0"),
        (Tile((("m", 128), ("n", 128), ("k", 24))), "k in steps of 32 bytes"),
        (Tile((("m", 128), ("n", 128), ("q", 32))), "no dimension q: k.gemm has b, m, n, k"),
        (Tile(BIG.dims, split=1000), "split of the steps along k: 1,000 blocks, at most 128"),
        (Tile(BIG.dims, stages=9), "stages: 9 deep, at most 8"),
    ],
)  # fmt: skip
def test_illegal_tiles_say_why(tile, why):
    found = why_illegal(gemm(4096, 4096, 4096), tile, A100)
    assert found.startswith(why) if why else found == ""


def test_older_gpus_have_no_asynchronous_copies():
    tile = Tile((("m", 64), ("n", 64), ("k", 32)), stages=3)
    assert why_illegal(gemm(512, 512, 512), tile, A100) == ""
    assert why_illegal(gemm(512, 512, 512), tile, load_target("t4")).startswith(
        "stages: 3 deep, at most 2"
    )


def test_what_is_no_sum_is_not_split():
    why = why_illegal(mapped("add", f32, (4096,), (4096,)), Tile((("i", 512),), split=2), A100)
    assert why.startswith("split (this kernel computes no sum")
    why = why_illegal(mapped("add", f32, (4096,), (4096,)), Tile((("i", 512),), stages=2), A100)
    assert why == "stages (this kernel has no operands to stage): 2 deep, at most 1"


def test_bytes_of_k_go_by_the_dtype():
    tile = Tile((("m", 64), ("n", 64), ("k", 16)))
    assert why_illegal(gemm(64, 64, 64, f16), tile, A100) == ""
    assert "32 bytes" in why_illegal(gemm(64, 64, 64, i8), tile, A100)
