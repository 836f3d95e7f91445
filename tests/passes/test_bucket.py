"""Collectives in buckets."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from strategies import arrays

import gpuir
from gpuir.interp import run
from gpuir.interp.ranks import gathered, run_ranks, scattered
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph
from gpuir.ir.verify import verify
from gpuir.ops import kernel as k

ENCODER = Path(__file__).parents[1] / "encoder.onnx"
SMALL = ENCODER.with_name("small_encoder.onnx")


def whole(model: Path) -> Graph:
    return gpuir.load(model, dims={"batch": 4, "seq": 8}, train=True, optimizer="adamw")


def step(shard: str, model: Path = ENCODER) -> Graph:
    """A training step, as one of its ranks launches it."""
    g = whole(model)
    return gpuir.lower(gpuir.pipeline(shard).run(g))


def launched(g: Graph) -> Counter[tuple[str, int]]:
    """Collectives by kind and how many are in a launch."""
    ops = (n.op for n in g.nodes if isinstance(n.op, k.Collective))
    return Counter((op.collective.fn, len(op.collectives)) for op in ops)


def bucketed(g: Graph, options: str = "") -> Graph:
    made = gpuir.pipeline(f"bucket{options}").run(g)
    verify(made)
    assert gpuir.parse(gpuir.show(made)) == made
    return made


@pytest.mark.parametrize("zero", range(4))
def test_ranks_compute_what_they_did(zero: int):
    g = step(f"shard{{ranks=2,by=data,zero={zero}}}", SMALL)
    made = bucketed(g)
    values = arrays(whole(SMALL))
    given = scattered(g, values)
    one, other = ([*gathered(x, run_ranks(lambda own, x=x: run(x, own), given))] for x in (g, made))
    for a, b in zip(one, other, strict=True):
        assert set(a) == set(b)
        for name, array in a.items():
            np.testing.assert_allclose(array, b[name], rtol=1e-5, atol=1e-6)


def test_gradients_are_summed_in_buckets_of_some_bytes():
    g = step("shard{ranks=2,by=data}")
    before = launched(g)["all_reduce", 1]
    assert before > 20
    some, all_ = launched(bucketed(g)), launched(bucketed(g, "{bytes=1000000000}"))
    for found in (some, all_):
        assert sum(count * n for (_, n), count in found.items()) == before
    assert before > some.total() > all_.total() > 0
    apart = launched(bucketed(g, "{bytes=1}"))
    assert apart == {("all_reduce", 1): before}


def test_weights_are_gathered_one_block_ahead():
    """The gathers of a block are launched before the products of the block before it."""
    made = bucketed(step("shard{ranks=2,by=data,zero=3}"), "{blocks=true}")
    places: dict[str, int] = {}
    for i, n in enumerate(made.nodes):
        for loc in n.locs[:1]:
            block = re.search(r"layer\.(\d+)", loc)
            if block and not loc.endswith(("backward", "optimizer")):
                sort = "gather" if isinstance(n.op, k.Collective) else "work"
                places.setdefault(f"{sort} {block[1]}", i)
    assert places["gather 1"] < places["work 0"] < places["work 1"]


def test_weights_of_several_widths_are_gathered_together():
    """A block's weights of products, in 16 bits, and of norms, in 32."""
    dims = {"batch": 4, "seq": 8}
    g = gpuir.load(ENCODER, dims=dims, train=True, optimizer="adamw", autocast="bf16")
    cut = gpuir.lower(gpuir.pipeline("shard{ranks=2,by=data,zero=3}").run(g))
    gathers = [
        n.op.collectives
        for n in bucketed(cut, "{blocks=true}").nodes
        if isinstance(n.op, k.Collective)
        and n.op.collective.fn == "all_gather"
        and re.search(r"layer\.1/", n.locs[0])
        and not n.locs[0].endswith("backward")
    ]
    assert len(gathers) == 1
    assert {x.x.type.dtype.bits for x in gathers[0]} == {16, 32}


def test_what_is_read_at_once_is_not_joined():
    """Products cut over ranks wait for their sums: order and number stay."""
    g = step("shard{ranks=2}")
    sums = [n.results for n in g.nodes if isinstance(n.op, k.Collective)]
    assert [n.results for n in bucketed(g).nodes if isinstance(n.op, k.Collective)] == sums


def test_a_bucket_holds_something():
    with pytest.raises(UsageError, match="bytes"):
        gpuir.pipeline("bucket{bytes=0}")


SUMS = """kernel @g {
  in %x: f32[8, 8]
  param %u: f32[8, 8]
  %a: f32[8, 8] = k.map([%x], body={
    in %x: f32[8, 8]
    %a: f32[8, 8] = t.map("relu", [%x]) at "m:x/backward"
    out %a
  }) at "m:x/backward"
  %a.sum: f32[8, 8] = k.collective([%a], body={
    in %a: f32[8, 8]
    %a.sum: f32[8, 8] = t.collective("all_reduce", %a, "dp", [2], [1]) at "m:x/backward"
    out %a.sum
  }) at "m:x/backward"
  %b: f32[8, 8] = k.map([%a, %u], body={
    in %a: f32[8, 8]
    in %u: f32[8, 8]
    %b: f32[8, 8] = t.map("add", [%a, %u]) at "m:x/backward"
    out %b
  }) at "m:x/backward"
  %u.grad: f32[8, 8] = k.collective([%a], body={
    in %a: f32[8, 8]
    %u.grad: f32[8, 8] = t.collective("all_reduce", %a, "dp", [2], [1]) at "m:x/backward"
    out %u.grad
  }) at "m:x/backward"
  %w.grad: f32[8, 8] = k.collective([%b], body={
    in %b: f32[8, 8]
    %w.grad: f32[8, 8] = t.collective("all_reduce", %b, "dp", [2], [1]) at "m:x/backward"
    out %w.grad
  }) at "m:x/backward"
  role gradient %u.grad, %w.grad
  mesh dp=2
  out %a.sum, %b, %u.grad, %w.grad
}"""


@pytest.mark.parametrize("early", ["true", "false"])
def test_who_waits_for_a_sum_waits_for_no_gradients(early: str):
    """Gradients that are read behind the graph are together, what else leaves it is apart."""
    made = bucketed(gpuir.parse(SUMS), f"{{early={early}}}")
    names = [[v.name for v in n.results] for n in made.nodes]
    assert names == [["a"], ["a.sum"], ["b"], ["u.grad", "w.grad"]]


@pytest.mark.parametrize(("early", "order"), [("true", "a s u b w"), ("false", "a s b u w")])
def test_sums_stay_where_they_are_unless_they_go_early(early: str, order: str):
    made = bucketed(gpuir.parse(SUMS), f"{{bytes=1,early={early}}}")
    short = {"a": "a", "a.sum": "s", "b": "b", "u.grad": "u", "w.grad": "w"}
    assert " ".join(short[n.results[0].name] for n in made.nodes) == order
