"""Collectives of a graph costed on a cluster."""

import pytest

import gpuir
from gpuir.cost.collective import MODES, NCCL, Library, collective_time
from gpuir.ir.errors import GpuirError, TargetError, UsageError
from gpuir.ir.types import f16
from gpuir.ops.kernel import COLLECTIVE_LIBRARIES

TEXT = """
graph @two {
  in %x: f16[64, 1024]
  param %w: f16[1024, 1024]
  %y: f16[64, 1024] = t.matmul(%x, %w) at "y"
  %sum: f16[64, 1024] = t.collective(all_reduce, %y, "tp", [4], [1]) at "sum"
  %all: f16[256, 1024] = t.collective(all_gather, %y, "tp", [4], [1]) at "all"
  mesh tp=4
  out %sum, %all
}
"""


def costed(**how) -> gpuir.Graph:
    text = TEXT.replace("(all_reduce", '("all_reduce"').replace("(all_gather", '("all_gather"')
    return gpuir.analyze(gpuir.parse(text), **how).graph


def test_a_collective_costs_what_the_cluster_takes():
    g = costed(cluster="dgx-a100")
    assert (g.cluster, g.target) == ("dgx-a100", "a100-sxm-80gb")
    found = {n.results[0].name: n.cost for n in g.nodes}
    cluster = gpuir.load_cluster("dgx-a100")
    for name, kind, nbytes in (
        ("sum", "all_reduce", 64 * 1024 * 2),
        ("all", "all_gather", 4 * 64 * 1024 * 2),
    ):
        time = collective_time(kind, nbytes, f16, (4,), (1,), cluster)
        assert found[name].time_s == pytest.approx(time.time_s)
        assert sum(dict(found[name].terms).values()) == pytest.approx(time.time_s)
        assert found[name].interval == time.interval
    assert {s.status: s.nodes for s in gpuir.analyze(g).coverage} == {
        "modelled": 3,
        "approximated": 0,
        "opaque": 0,
    }
    assert gpuir.show(gpuir.parse(gpuir.show(g))) == gpuir.show(g)


def test_rows_that_are_routed_cost_what_travels():
    """An all-gather of which experts read some rows is an all-to-all of these (`routed`)."""
    g = gpuir.parse(
        TEXT.replace("(all_reduce", '("all_reduce"').replace(
            '(all_gather, %y, "tp", [4], [1])', '("all_gather", %y, "tp", [4], [1], routed=65536)'
        )
    )
    found = {n.results[0].name: n.cost for n in gpuir.analyze(g, cluster="dgx-a100").graph.nodes}
    cluster = gpuir.load_cluster("dgx-a100")
    time = collective_time("all_to_all", 65536, f16, (4,), (1,), cluster)
    assert found["all"].time_s == pytest.approx(time.time_s)


@pytest.mark.parametrize("engine", COLLECTIVE_LIBRARIES[1:])
def test_ranks_of_an_engine_add_up_by_its_own_all_reduce(engine: str):
    """A decoding step's few rows take less by it than by NCCL."""
    found = {n.results[0].name: n.cost for n in costed(cluster="dgx-h100", profile=engine).nodes}
    cluster, nbytes = gpuir.load_cluster("dgx-h100"), 64 * 1024 * 2
    own, nccl = (
        collective_time("all_reduce", nbytes, f16, (4,), (1,), cluster, library).time_s
        for library in (Library(engine, "cuda_graph"), NCCL)
    )
    assert found["sum"].time_s == pytest.approx(own) and own < nccl
    other = collective_time("all_gather", 4 * nbytes, f16, (4,), (1,), cluster)
    assert found["all"].time_s == pytest.approx(other.time_s)


def test_libraries_of_kernels_are_those_with_measured_modes():
    assert {name or "nccl" for name in COLLECTIVE_LIBRARIES} == set(MODES)


def test_a_library_that_is_not_known_says_the_nearest():
    g = gpuir.lower(costed(cluster="dgx-h100", profile="vllm"))
    text = gpuir.show(g).replace('library="vllm"', 'library="vlm"')
    with pytest.raises(GpuirError, match="no library for collectives has the name 'vlm'") as e:
        gpuir.parse(text)
    assert "vllm" in str(e.value)


def test_its_lines_lead_to_its_time():
    g = costed(cluster="2xdgx-h100")
    lines = gpuir.explain(g, "sum")
    (cost,) = (n.cost for n in g.nodes if n.results[0].name == "sum")
    assert lines[-1].name == "time" and lines[-1].value == pytest.approx(cost.time_s)
    assert eval(lines[-1].formula, {"exp": __import__("math").exp}) == pytest.approx(cost.time_s)


def test_without_a_cluster_it_is_not_modelled():
    s = gpuir.analyze(costed(target="a100"))
    assert dict(next(x for x in s.coverage if x.status == "opaque").what) == {
        "all_reduce": 1,
        "all_gather": 1,
    }


def test_a_cluster_has_the_graphs_gpus_and_as_many():
    with pytest.raises(UsageError, match="the target of the graph is not a GPU of the"):
        costed(cluster="dgx-a100", target="h100-sxm")
    with pytest.raises(UsageError, match="more ranks"):
        costed(cluster="2xa100-sxm")


def test_of_several_kinds_of_gpu_the_target_says_which():
    """Its ranks are the first that have one; the explanation adds up to the same."""
    with pytest.raises(TargetError, match="several kinds of GPU"):
        costed(cluster="dgx-h100+dgx-a100")
    with pytest.raises(UsageError, match="the target of the graph is not a GPU of the"):
        costed(cluster="dgx-h100+dgx-a100", target="l4")
    mixed = costed(cluster="dgx-h100+dgx-a100", target="a100-sxm-80gb")
    plain = costed(cluster="dgx-a100")
    assert [n.cost for n in mixed.nodes] == [n.cost for n in plain.nodes]
    assert gpuir.parse(gpuir.show(mixed)) == mixed
    lines = gpuir.explain(mixed, "sum")
    assert lines[-1].value == gpuir.explain(plain, "sum")[-1].value
    assert "dgx-a100" in next(x.source for x in lines if x.name == "ranks")
