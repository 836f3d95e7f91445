"""Measurements of some tiles correct the predictions of others, and narrow them."""

from __future__ import annotations

import numpy as np
import pytest

import gpuir
from gpuir.cost.nest import Tiles
from gpuir.ir.errors import UsageError
from gpuir.ir.notes import Tile
from gpuir.tune.observe import Observed
from gpuir.tune.search import search

GEMM = gpuir.kernel("gemm", target="h100-sxm", m=4096, n=4096, k=4096)
NEAR = gpuir.kernel("gemm", target="h100-sxm", m=4096, n=2048, k=4096)
ROWS = gpuir.kernel("rows", target="h100-sxm", rows=4096, columns=768)
TILES = gpuir.candidates(GEMM)


def truth(kernel: gpuir.Kernel, tiles: Tiles) -> np.ndarray:
    """What this GPU takes: by a factor that depends on the tile more or less than predicted."""
    m, stages = np.asarray(tiles.dims["m"], float), np.asarray(tiles.stages, float)
    factor = 1.4 * (m / 128) ** 0.35 * (stages / 3) ** -0.3
    return np.asarray(gpuir.predict(kernel, tiles).time_s * factor)


def measured(model: Observed, count: int, kernel: gpuir.Kernel = GEMM) -> Observed:
    """The model after `count` measurements, each of what it then says is the fastest."""
    done: set[Tile] = set()
    for _ in range(count):
        found = search(kernel, predict=model.predict)
        tile = next(x.tile for x in found.best if x.tile not in done)
        done.add(tile)
        model = model.observe(kernel, tile, float(truth(kernel, Tiles.of(tile, kernel.work))[0]))
    return model


def rank_agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's correlation of ranks."""
    ranks = [np.argsort(np.argsort(x, kind="stable"), kind="stable") for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def test_without_measurements_it_is_the_prediction():
    plain, model = gpuir.predict(GEMM, TILES), Observed(GEMM.target).predict(GEMM, TILES)
    assert (model.time_s == plain.time_s).all() and (model.high_s == plain.high_s).all()


def test_measurements_correct_ranks_and_narrow_intervals():
    start, real = Observed(GEMM.target), truth(GEMM, TILES)
    before, after = start.predict(GEMM, TILES), measured(start, 8).predict(GEMM, TILES)
    best = after.order[0]
    assert real[best] < 1.1 * real.min() < real[before.order[0]]
    assert rank_agreement(after.time_s, real) > rank_agreement(before.time_s, real)
    width = [np.log(x.high_s / x.low_s) for x in (before, after)]
    assert np.median(width[1]) < 0.95 * np.median(width[0])
    assert width[1][best] < 0.5 * width[0][best]
    assert after.low_s[best] < real[best] < after.high_s[best]
    error = [np.abs(np.log(x.time_s / real)) for x in (before, after)]
    fast = real < np.quantile(real, 0.01)
    assert error[1].mean() < 1.05 * error[0].mean()  # far from what was measured, no worse
    assert error[1][fast].mean() < error[0][fast].mean()


def test_each_measurement_that_is_as_expected_narrows():
    tile = gpuir.heuristics(GEMM, count=1)[0]
    model = Observed(GEMM.target)
    widths = []
    for _ in range(4):
        found = model.predict(GEMM, Tiles.of(tile.tile, GEMM.work))
        widths.append(float(found.high_s[0] / found.low_s[0]))
        model = model.observe(GEMM, tile.tile, tile.time_s * 1.1)
    assert widths == sorted(widths, reverse=True) and widths[1] < 0.8 * widths[0]


def test_what_is_further_off_than_the_predictor_says_widens_what_is_far_from_it():
    tile = gpuir.heuristics(GEMM, count=1)[0]
    off = Observed(GEMM.target).observe(GEMM, tile.tile, tile.time_s * 20)
    plain, found = (x.predict(ROWS, gpuir.candidates(ROWS)) for x in (Observed(GEMM.target), off))
    assert np.all(found.high_s / found.low_s > plain.high_s / plain.low_s)


def test_kernels_that_are_alike_learn_most():
    model, plain = measured(Observed(GEMM.target), 6), Observed(GEMM.target)

    def moved(kernel: gpuir.Kernel) -> tuple[float, float]:
        tiles = gpuir.candidates(kernel)
        a, b = plain.predict(kernel, tiles), model.predict(kernel, tiles)
        narrower = np.log(b.high_s / b.low_s) / np.log(a.high_s / a.low_s)
        return float(np.median(np.abs(np.log(b.time_s / a.time_s)))), float(np.median(narrower))

    (same, a), (near, b), (other, c) = moved(GEMM), moved(NEAR), moved(ROWS)
    assert same > other > 0 and near > other and a <= b < c


def test_a_model_does_not_change_and_order_does_not_matter():
    start = Observed(GEMM.target)
    one, two = (x.tile for x in gpuir.heuristics(GEMM, count=2))
    ab = start.observe(GEMM, one, 1e-4).observe(GEMM, two, 2e-4)
    ba = start.observe(GEMM, two, 2e-4).observe(GEMM, one, 1e-4)
    assert start.seen == () and len(ab.seen) == 2
    np.testing.assert_allclose(ab.predict(GEMM, TILES).time_s, ba.predict(GEMM, TILES).time_s)


def test_illegal_tiles_stay_infinite():
    model = measured(Observed(GEMM.target), 1)
    found = model.predict(GEMM, Tiles({"m": np.array([128.0, 4096.0]), "n": 128.0, "k": 64.0}))
    assert found.legal.ok.tolist() == [True, False]
    assert np.isfinite(found.time_s[0]) and np.isinf(found.high_s[1])


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_is_more_than_nothing(seconds):
    tile = gpuir.heuristics(GEMM, count=1)[0].tile
    with pytest.raises(UsageError, match="is not a valid time"):
        Observed(GEMM.target).observe(GEMM, tile, seconds)


def test_what_is_wrong_is_said():
    model = measured(Observed(GEMM.target), 1)
    with pytest.raises(UsageError, match=r"m=0: a tile needs at least one element"):
        model.observe(GEMM, Tile((("m", 0), ("n", 64), ("k", 32))), 1e-4)
    with pytest.raises(UsageError, match="no dimension q"):
        model.observe(GEMM, Tile((("q", 16),)), 1e-4)
    with pytest.raises(UsageError, match="the measurements belong to another target"):
        model.predict(GEMM, TILES, "a100")
