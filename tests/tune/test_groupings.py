"""The search over which ops share a launch."""

from __future__ import annotations

import pytest

import gpuir
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph
from gpuir.tune.groupings import Groupings, groupings, pattern_of

TEXT = """graph @g {
  in %x: f16[512, 1024]
  param %w: f16[1024, 1024]
  %"/layer.0/h": f16[512, 1024] = t.matmul(%x, %w) at "m:/layer.0/MatMul"
  %"/layer.0/y": f16[512, 1024] = t.map("relu", [%"/layer.0/h"]) at "m:/layer.0/Relu"
  %"/layer.0/z": f16[512, 1024] = t.map("exp", [%"/layer.0/y"]) at "m:/layer.0/Exp"
  %"/layer.1/h": f16[512, 1024] = t.matmul(%"/layer.0/z", %w) at "m:/layer.1/MatMul"
  %"/layer.1/y": f16[512, 1024] = t.map("relu", [%"/layer.1/h"]) at "m:/layer.1/Relu"
  %"/layer.1/z": f16[512, 1024] = t.map("exp", [%"/layer.1/y"]) at "m:/layer.1/Exp"
  out %"/layer.1/z"
}
"""
GRAPH = gpuir.parse(TEXT)
START = gpuir.pipeline("fuse,legalize")


def launches(kernels: Graph) -> float:
    return float(len(kernels.nodes))


def run_s(kernels: Graph) -> float:
    return gpuir.analyze(kernels, "a100").latency_s


def texts(found: Groupings) -> list[str]:
    return [str(g.pipeline) for g in found.tried]


def test_the_fastest_comes_first_and_agrees_with_analyze():
    found = groupings(GRAPH, gpuir.pipeline("fuse{rules=none},legalize"), run_s)
    times = [g.latency_s for g in found.tried]
    assert times == sorted(times) and found.refused == 0
    assert str(found.best.pipeline) == "fuse,legalize"
    assert found.best.latency_s == run_s(START.run(GRAPH)) < found.start.latency_s


def test_what_gains_nothing_keeps_the_stacks_own():
    found = groupings(GRAPH, START, launches)
    assert found.best is found.start and found.start.latency_s == 2


def test_an_edge_is_cut_in_all_layers_where_that_pays():
    """A stack whose epilogues are dear: as many launches as products, and a penalty for each op
    that shares one with them."""

    def dear(kernels: Graph) -> float:
        return sum(1.0 + 5.0 * (len(n.locs) > 2) for n in kernels.nodes)

    found = groupings(GRAPH, START, dear)
    assert found.best.latency_s < found.start.latency_s
    assert 'cut="/layer.*/' in str(found.best.pipeline)
    assert any('cut="/layer.*/h /layer.*/y"' in text for text in texts(found))  # one after another
    assert dear(found.best.pipeline.run(GRAPH)) == found.best.latency_s
    again = gpuir.pipeline(str(found.best.pipeline))
    assert again == found.best.pipeline


def test_rules_are_left_out_one_at_a_time():
    found = groupings(GRAPH, gpuir.pipeline('fuse{rules="map>map relu>exp"},legalize'), launches)
    assert 'fuse{rules="map>map"},legalize' in texts(found)
    assert 'fuse{rules="relu>exp"},legalize' in texts(found)


def test_a_compiler_of_loops_has_other_options():
    found = groupings(GRAPH, gpuir.pipeline("fuse_loops,legalize"), launches)
    assert {"fuse_loops{aggressive=true},legalize", "fuse,legalize"} < {*texts(found)}


def test_no_more_than_asked_for():
    found = groupings(GRAPH, START, launches, tries=3)
    assert len(found.tried) == 3
    assert len(groupings(GRAPH, START, launches, tries=1).tried) == 1


def test_what_is_wrong_is_said():
    with pytest.raises(UsageError, match="the pipeline has no pass that fuses ops"):
        groupings(GRAPH, gpuir.pipeline("legalize"), launches)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("/layer.3/Add_output_0", "/layer.*/Add_output_0"),
        ("/blocks/12/mlp/out", "/blocks/*/mlp/out"),
        ("add_12", "add_12"),
        ("odd name[3]*", "odd?name?3??"),
    ],
)
def test_a_pattern_is_a_name_in_every_layer(name, pattern):
    assert pattern_of(name) == pattern
