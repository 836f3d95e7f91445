"""What Triton's compiler takes of a matrix product, and what gpuir says of it."""

from __future__ import annotations

import pytest
from tune import stand_in

from validation.agreement import triton_resources as tool


def test_the_table_has_every_configuration():
    assert [config for config, _ in tool.rows()] == tool.CONFIGS


def test_gpuir_never_holds_for_legal_what_shared_memory_cannot_hold():
    for config, taken in tool.rows():
        need = tool.predicted(config).smem
        if taken.smem_bytes > need.has:
            assert need.wants > need.has, config


def test_it_compares_the_whole_table(capsys: pytest.CaptureFixture[str]):
    tool.compare()
    printed = capsys.readouterr().out
    assert f"wrong on too much shared memory: 0 of {len(tool.CONFIGS)}" in printed


def test_a_block_has_a_buffer_a_stage_or_one_less():
    """By hand: 128 x 128 x 64 in f16 holds 32 KiB a stage. Triton has as many for wgmma, and one
    less for mma, where a stage's operands are copied while those of another are multiplied."""
    smem = {(c.isa, c.stages): r.smem_bytes for c, r in tool.rows() if _is_middle(c)}
    assert smem == {
        **{("sm_80", n): max(n - 1, 1) * 32768 for n in (1, 2, 3, 5)},
        **{("sm_90", n): n * 32768 for n in (1, 2, 3, 5)},
    }


def _is_middle(c: tool.Config) -> bool:
    return (c.dtype, c.block_m, c.block_n, c.block_k, c.warps) == ("f16", 128, 128, 64, 4)


@pytest.mark.slow
@pytest.mark.skipif(not stand_in.HAS_TRITON, reason="needs gpuir[triton]")
@pytest.mark.parametrize("isa", tool.TARGETS)
def test_the_table_is_what_triton_gives(isa: str):
    for config, taken in tool.rows():
        if _is_middle(config) and config.isa == isa:
            assert tool.compiled(config) == taken
