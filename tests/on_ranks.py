"""Graphs cut over ranks, held against the whole graph."""

from __future__ import annotations

from typing import Any

import numpy as np
from strategies import arrays

import gpuir
from gpuir.interp import run
from gpuir.interp.ranks import gathered, run_ranks, scattered
from gpuir.ir.graph import Graph
from gpuir.ir.verify import verify


def sharded(g: Graph, pipeline: str) -> Graph:
    made = gpuir.pipeline(pipeline).run(g)
    verify(made)
    assert gpuir.parse(gpuir.show(made)) == made
    return made


def is_the_same(
    g: Graph, made: Graph, tolerance: float = 2e-3, values: dict[str, Any] | None = None
) -> None:
    """Every rank's group has the outputs of the whole graph."""
    values = values or arrays(g)
    wanted = run(g, values)
    given = scattered(made, values)
    for found in gathered(made, run_ranks(lambda own: run(made, own), given)):
        assert set(found) == set(wanted)
        for name, array in wanted.items():
            a, b = np.asarray(array, np.complex128), np.asarray(found[name], np.complex128)
            assert a.shape == b.shape
            a, b = np.nan_to_num(a), np.nan_to_num(b)
            scale = 1e-3 + np.abs(a).max(initial=0)
            np.testing.assert_allclose(a / scale, b / scale, atol=tolerance)


def cells(g: Graph) -> int:
    return sum(v.type.size for v in g.params)
