"""Searches: what they ask about, and that a part finds nearly what all finds."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import gpuir
from gpuir.cost.generated.legal import is_legal
from gpuir.cost.nest import Tiles
from gpuir.ir.errors import UsageError
from gpuir.tune.search import KEPT, SEARCHES, TileGrid, check_search, search
from gpuir.tune.space import Predictions, predict, size

GEMM = gpuir.kernel("gemm", target="h100-sxm", m=2048, n=4096, k=1024)
ROWS = gpuir.kernel("rows", target="h100-sxm", rows=4096, columns=768)


def bumpy(kernel: gpuir.Kernel, tiles: Tiles | None = None, target: object = "") -> Predictions:
    """A landscape with one best tile inside of it, whatever the shipped formulas say."""
    found = predict(kernel, tiles)
    assert tiles is not None
    wanted = {"m": 64.0, "n": 128.0, "k": 32.0}
    off = sum(np.log2(np.asarray(tiles.dims[d]) / n) ** 2 for d, n in wanted.items())
    off = off + (np.asarray(tiles.stages) - 4) ** 2 / 4 + np.log2(np.asarray(tiles.warps) / 4) ** 2
    time_s = np.broadcast_to(1e-5 * (1 + off), found.time_s.shape)
    return Predictions(time_s, time_s, time_s, found.legal)


@pytest.mark.parametrize("by", SEARCHES)
def test_a_ranking_is_of_legal_tiles_the_fastest_first(by):
    found = search(GEMM, by=by, tries=64)
    times = [x.time_s for x in found.best]
    assert times == sorted(times) and found.tried == 64 and found.by == by
    assert found.legal <= found.count and len({x.tile for x in found.best}) == len(found.best)
    for x in found.best:
        assert is_legal(GEMM.work, Tiles.of(x.tile, GEMM.work), GEMM.target, 1).ok[0]
        again = predict(GEMM, Tiles.of(x.tile, GEMM.work))
        assert again.time_s[0] == pytest.approx(x.time_s, rel=1e-9)


@pytest.mark.parametrize("by", ["beam", "optuna"])
def test_a_part_finds_nearly_what_all_finds(by):
    best = search(GEMM, by="exhaustive", predict=bumpy).best[0]
    tries = 400 if by == "beam" else 150
    found = search(GEMM, by=by, tries=tries, predict=bumpy)
    assert found.tried == tries < found.legal / 10
    assert found.best[0].time_s <= 1.3 * best.time_s
    assert best.tile.dims == (("m", 64), ("n", 128), ("k", 32))


@pytest.mark.parametrize("by", SEARCHES)
def test_the_same_search_gives_the_same(by):
    assert search(GEMM, by=by, tries=40) == search(GEMM, by=by, tries=40)


def test_exhaustive_asks_about_all_and_keeps_some():
    found = search(GEMM)
    assert found.by == "exhaustive" and found.tried == found.legal and len(found.best) == KEPT
    assert found.best[0].time_s == min(predict(GEMM, gpuir.candidates(GEMM)).time_s)


def test_wide_has_more_tiles_and_is_no_slower():
    usual, wide = search(GEMM), search(GEMM, wide=True)
    assert wide.legal > 5 * usual.legal
    assert wide.best[0].time_s <= usual.best[0].time_s
    assert search(ROWS, wide=True).legal >= search(ROWS).legal


def test_tiles_are_written_as_a_library_writes_its_own():
    assert [d for d, _ in search(GEMM).best[0].tile.dims] == ["m", "n", "k"]
    batched = gpuir.kernel("gemm", target="h100-sxm", m=256, n=256, k=64, b=12)
    assert [d for d, _ in search(batched).best[0].tile.dims] == ["b", "m", "n", "k"]


def test_a_grid_finds_its_own_tiles_and_their_neighbours():
    tiles = gpuir.candidates(GEMM)
    grid = TileGrid.of(tiles, size(GEMM.work, tiles))
    assert (grid.find(grid.at) == np.arange(len(grid.at))).all()
    assert (grid.find(grid.at + np.array(grid.sizes)) == -1).all()
    near = grid.around(np.array([100]))
    apart = np.abs(grid.at[near] - grid.at[100]).sum(axis=-1)
    assert len(near) > 3 and set(apart) <= {1, 2}


def test_more_tries_than_tiles():
    for by in SEARCHES:
        found = search(ROWS, by=by, tries=10_000)
        assert found.tried == found.legal and found.best == search(ROWS).best


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UsageError, match="did you mean optuna"):
        search(GEMM, by="optna")
    with pytest.raises(UsageError, match="no target was given"):
        search(gpuir.kernel("gemm", m=1024, n=1024, k=1024))
    monkeypatch.setitem(sys.modules, "optuna", None)  # as if it were not installed
    with pytest.raises(UsageError, match=r"pip install 'gpuir\[tune\]'"):
        check_search("optuna")
