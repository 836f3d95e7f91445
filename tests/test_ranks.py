"""What several ranks compute together, each in its own thread."""

from __future__ import annotations

import numpy as np
import pytest

import gpuir
from gpuir.interp import NoMeaning, run
from gpuir.interp.ranks import run_ranks
from gpuir.ir.errors import TextError
from gpuir.ir.graph import Cut
from gpuir.ops import tensor as t

ROWS = """graph @g {
  in %x: f32[4, 4]
  param %w: f32[4, 6]
  %y: f32[4, 6] = t.matmul(%x, %w) at "m:y"
  %sum: f32[4, 6] = t.collective("all_reduce", %y, "tp", [2], [1]) at "m:y"
  %part: f32[2, 6] = t.shard(%sum, 0, "tp", [2], [1]) at "m:y"
  mesh tp=2, dp=3
  cut tp 1 %x
  cut tp 0 %w, %part
  out %sum, %part
}
"""


def test_a_graph_of_ranks_is_text():
    g = gpuir.parse(ROWS)
    assert gpuir.show(g) == ROWS and g.ranks == 6
    assert g.cuts_of(g.params[0]) == (Cut("tp", 0),)
    assert gpuir.parse(gpuir.show(gpuir.lower(g, profile="eager"))).mesh == g.mesh


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cut tp 1", "cut pp 1", "no axis of the mesh 'pp'"),
        ("cut tp 1", "cut tp 1.5", "not a count: 1.5"),
        ("[2], [1]", "[2], [1, 2]", "a group of ranks needs a size of at least 2"),
        ("%sum, 0,", "%sum, 7,", "the axis is out of range"),
        ('"all_reduce"', '"all_reduced"', "fn"),
    ],
)
def test_what_cannot_be_is_refused(old: str, new: str, message: str):
    with pytest.raises(TextError, match=message.replace("(", "\\(")):
        gpuir.parse(ROWS.replace(old, new, 1))


@pytest.mark.parametrize("profile", ["", "eager", "compiled", "tensorrt"])
def test_a_product_by_rows_of_its_weight(profile: str):
    g = gpuir.parse(ROWS)
    g = gpuir.lower(g, profile=profile) if profile else g
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((4, 8), np.float32), rng.standard_normal((8, 6), np.float32)
    xs, ws = np.split(x, 2, 1), np.split(w, 2, 0)
    given = [{"x": xs[i % 2], "w": ws[i % 2]} for i in range(6)]
    for i, found in enumerate(run_ranks(lambda values: run(g, values), given)):
        np.testing.assert_allclose(found["sum"], x @ w, atol=1e-5)
        np.testing.assert_allclose(found["part"], np.split(x @ w, 2)[i % 2], atol=1e-5)


@pytest.mark.parametrize(
    ("call", "shape", "gives"),
    [
        ('"all_gather", %x, "dp", [3], [2]', "6, 3", lambda x, i: np.concatenate(x, 0)),
        ('"reduce_scatter", %x, "dp", [3], [2], axis=1', "2, 1", lambda x, i: sum(x)[:, i : i + 1]),
        (
            '"all_to_all", %x, "dp", [3], [2], axis=1',
            "6, 1",
            lambda x, i: np.concatenate(x)[:, [i]],
        ),
        ('"broadcast", %x, "dp", [3], [2]', "2, 3", lambda x, i: x[0]),
        ('"shift", %x, "dp", [3], [2]', "2, 3", lambda x, i: x[(i + 2) % 3]),
        ('"all_reduce", %x, "dp", [3], [2], combine="max"', "2, 3", lambda x, i: np.max(x, 0)),
    ],
)
def test_collectives(call: str, shape: str, gives):
    text = f"""graph @g {{
      in %x: f32[2, 3]
      %y: f32[{shape}] = t.collective({call}) at "m:y"
      mesh tp=2, dp=3
      out %y
    }}"""
    g = gpuir.parse(text)
    xs = [np.random.default_rng(i).standard_normal((2, 3), np.float32) for i in range(6)]
    found = run_ranks(lambda values: run(g, values), [{"x": x} for x in xs])
    for rank in range(6):
        group = t.members(rank, (3,), (2,))
        expected = gives([xs[r] for r in group], group.index(rank))
        np.testing.assert_allclose(found[rank]["y"], expected, atol=1e-6)


def test_groups_along_several_axes():
    assert t.members(5, (2,), (1,)) == (4, 5)
    assert t.members(5, (3,), (2,)) == (1, 3, 5)
    assert t.members(5, (2, 3), (1, 4)) == (0, 1, 4, 5, 8, 9)
    assert t.members(7, (2, 3), (1, 4)) == (2, 3, 6, 7, 10, 11)


def test_a_rank_alone_has_nobody_to_meet():
    with pytest.raises(NoMeaning, match="on one rank alone"):
        run(gpuir.parse(ROWS), {"x": np.ones((4, 4), "f"), "w": np.ones((4, 6), "f")})


def test_the_rank_that_fails_first_is_the_one_that_is_named():
    g = gpuir.parse(ROWS)

    def work(values: dict) -> dict:
        if not values["x"].any():
            raise ZeroDivisionError
        return run(g, values)

    given = [{"x": np.full((4, 4), i % 2, "f"), "w": np.ones((4, 6), "f")} for i in range(6)]
    with pytest.raises(ZeroDivisionError):
        run_ranks(work, given)


def test_one_device_does_not_know_the_links():
    s = gpuir.analyze(gpuir.parse(ROWS), "a100")
    assert [k.status for k in s.kernels] == ["modelled", "opaque", "modelled"]
