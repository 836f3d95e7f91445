"""Schedules: the tiles of a graph taken out, taken off and put on again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost.kernels import gemm, graph, softmax
from passes.test_tile import branch, loop, view

from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Level
from gpuir.ir.notes import Schedule, Tile
from gpuir.ir.verify import verify
from gpuir.passes.annotate import Annotate
from gpuir.passes.tile import TilePass
from gpuir.schedule import apply, extract, strip
from gpuir.text import parse_schedule, show

GRAPHS = [graph(gemm(64, 64, 64), softmax(8, 100)), loop(3), branch(), view()]


@pytest.mark.parametrize("g", GRAPHS, ids=lambda g: g.name)
def test_what_comes_off_goes_back_on(g):
    tiled = TilePass(target="a100").run(g)
    assert strip(tiled) == g
    assert apply(strip(tiled), extract(tiled)) == tiled
    assert parse_schedule(show(extract(tiled))) == extract(tiled)


@pytest.mark.parametrize("g", GRAPHS, ids=lambda g: g.name)
def test_costs_come_off_with_the_tiles(g):
    tiled = TilePass(target="a100").run(g)
    costed = Annotate().run(tiled)
    bare = strip(costed)
    verify(bare)
    assert bare.level == Level.kernel
    assert bare == g
    assert extract(costed) == extract(tiled)


def test_kernels_in_a_loop_go_by_their_path():
    paths = [path for path, _ in extract(TilePass(target="a100").run(loop(3)))]
    assert paths == [("y", "h"), ("y", "h2"), ("z",)]


def test_a_kernel_without_a_tile_is_named():
    g = graph(gemm(64, 64, 64), softmax(8, 100))
    part = extract(TilePass(target="a100").run(g))
    with pytest.raises(UsageError, match="no tile for %y1"):
        apply(g, replace(part, tiles=part.tiles[:1]))


def test_an_unknown_kernel_gets_the_nearest():
    g = graph(gemm(64, 64, 64))
    with pytest.raises(UsageError, match="has no kernel %y00") as error:
        apply(g, Schedule("test", "a100", ((("y00",), Tile((("m", 64),))),)))
    assert "did you mean y0" in error.value.expected


def test_views_take_no_tile():
    tile = Tile((("i", 64),))
    with pytest.raises(UsageError, match="no kernel %v with a tile"):
        apply(view(), Schedule("view", "a100", ((("v",), tile), (("y",), tile))))
