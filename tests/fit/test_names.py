"""Kernel names say which tile ran."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpuir.fit.names import tile_named, tiles_ran
from gpuir.fit.score import score
from validation.readers import read_table


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("volta_sgemm_128x64_nn", (128, 64, 8, 0)),
        ("ampere_sgemm_64x32_sliced1x4_tn", (64, 32, 32, 0)),
        ("sgemm_128x128x8_NT_vec", (128, 128, 8, 0)),
        ("void gemmSN_TN_kernel<float, 128>", None),
        ("Cijk_Ailk_Bljk_SB_MT64x32x16_SE_1LDSB0_GSU4_GSUASB_", (64, 32, 16, 4)),
        ("Cijk_Ailk_Bljk_SB_MT64x32x16_SE_1LDSB0", (64, 32, 16, 1)),
    ],
)
def test_names(name: str, tile: tuple[float, ...] | None):
    assert tile_named(name) == tile


def test_tiles_of_a_table(tmp_path: Path):
    """A split over four blocks: the third dimension of the grid over the batch."""
    path = tmp_path / "gemm.csv"
    path.write_text(
        "device,op,b,m,n,k,latency_us,kernel_name,grid_x,grid_y,grid_z,block_x\n"
        "Tesla_T4,linear,1,2048,1024,4096,2600,volta_sgemm_128x64_tn,32,32,4,128\n"
        "Tesla_T4,linear,1,2048,1024,4096,2600,gemv,32,32,4,128\n"
    )
    table = read_table(path)
    found = tiles_ran(table.batches[0])
    assert found is not None
    tiles, told = found
    assert list(told) == [True, False]
    assert [float(np.asarray(tiles.dims[d])[0]) for d in ("m", "n", "k")] == [64, 128, 8]
    assert (float(tiles.split[0]), float(tiles.warps[0])) == (4, 4)
    (tile,) = score(table.batches).tiles
    assert tile.n == 1
    assert {tile.same, tile.same_split} <= {0.0, 100.0}
