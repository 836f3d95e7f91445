"""What collectives take: laws of the formulas, numbers by hand, and what measurements add."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuir.cost.collective import (
    FACTORS,
    KINDS,
    MODES,
    Library,
    chosen,
    collective_time,
    curve_of,
    flat_group,
    floor,
    group_of,
    groups_of,
    ways,
)
from gpuir.cost.kriging import Curve, Field, Knots, covariance, parsed, read_weights, written
from gpuir.cost.sheet import Sheet
from gpuir.ir.errors import TargetError
from gpuir.ir.types import DTYPES
from gpuir.targets.cluster import load_cluster

LOOP, TRACE = Library(), Library("nccl", "kernel_trace")
F16, I8 = DTYPES["f16"], DTYPES["i8"]


def seconds(kind, nbytes, ranks, cluster, stride=1, dtype=F16, library=None):
    c = load_cluster(cluster)
    return collective_time(kind, nbytes, dtype, (ranks,), (stride,), c, library or Library())


@pytest.mark.parametrize("kind", KINDS)
def test_terms_add_up_and_the_time_is_inside_its_interval(kind):
    for cluster, ranks in (("dgx-h100", 8), ("8xl40s", 4), ("4xdgx-a100", 32)):
        for nbytes in (1, 1 << 12, 1 << 20, 1 << 33):
            t = seconds(kind, nbytes, ranks, cluster)
            assert sum(x for _, x in t.terms) == pytest.approx(t.time_s)
            low, high = t.interval
            assert 0 < low <= t.time_s <= high


def test_one_rank_communicates_nothing():
    assert seconds("all_reduce", 1 << 20, 1, "dgx-h100").time_s == 0


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        *(("all_reduce", (14, 2)), ("all_gather", (7, 1)), ("reduce_scatter", (7, 1))),
        *(("all_to_all", (1, 1)), ("broadcast", (7, 1))),
    ],
)
def test_steps_around_a_ring(kind, steps):
    """Of eight ranks, and of two nodes: a sum goes around twice, once to be summed."""
    c = load_cluster("2xdgx-a100")
    assert group_of(kind, (8,), (1,), c).steps == steps[0]
    assert group_of(kind, (16,), (1,), c).far_steps == steps[1]


def test_a_ring_by_hand():
    """NCCL's PERFORMANCE.md: an all-reduce moves 2 (n - 1) / n of its bytes over each link. Each
    GPU's own eighth is copied by the same channels."""
    g = group_of("all_reduce", (8,), (1,), load_cluster("dgx-a100"))
    assert (g.steps, g.wire) == (14, 2 * 7 / 8)
    p = {**FACTORS, "ramp": 1e-12}
    simple = {w.name: w for w in ways(Sheet(), g, 1e9, p, LOOP)}["ring Simple"]
    rate = 300e9 * FACTORS["Simple rate"]
    own = FACTORS["own share"] / 8
    assert simple.transfer == pytest.approx((2 * 7 / 8 + own) * 1e9 / rate)
    assert simple.hops == pytest.approx(14 * FACTORS["Simple hop"] * 0.47e-6 * 1.98 / 1.41)


def test_one_peer_by_hand():
    """A send fills no pipeline: a start, a hop, and its bytes over the link."""
    g = group_of("send", (2,), (1,), load_cluster("dgx-a100"))
    pairs = {w.name: w for w in ways(Sheet(), g, 1e9, FACTORS, TRACE)}
    simple = pairs["pairs Simple"]
    assert simple.ramp == 0
    assert simple.transfer == pytest.approx(1e9 / (300e9 * FACTORS["send rate"]))
    many = group_of("all_to_all", (4,), (1,), load_cluster("dgx-a100"))
    assert ways(Sheet(), many, 1e9, FACTORS, LOOP)[-1].ramp > 0


def test_one_peer_needs_one_start():
    """What a send starts for each peer it starts once: Simple is then no later than LL."""
    c = load_cluster("dgx-a100")
    simple, low = (
        {w.name: w for w in ways(Sheet(), g, 1e3, FACTORS, TRACE)}[name]
        for g in (group_of("send", (2,), (1,), c),)
        for name in ("pairs Simple", "pairs LL")
    )
    assert simple.start == low.start
    many = ways(Sheet(), group_of("all_to_all", (4,), (1,), c), 1e3, FACTORS, LOOP)
    late, early = ({w.name: w for w in many}[n].start for n in ("pairs Simple", "pairs LL"))
    assert late > early


def test_the_host_copies_what_it_launches_out_of_place():
    """Of a large tensor, a copy at the memory's rate on top; of a small one, the host's floor."""
    modes = ("cuda_graph", "eager")
    c = load_cluster("dgx-h100")
    g = group_of("all_reduce", (2,), (1,), c)
    p = read_weights().factors
    graph, eager = (chosen(ways(Sheet(), g, 1e9, p, Library("vllm", m)))[0] for m in modes)
    assert eager - graph == pytest.approx(p["eager copy"] * 1e9 / c.target.dram.bytes_per_s)
    assert floor(g, p, Library("vllm", "eager")) > floor(g, p, Library("vllm", "cuda_graph")) == 0


def test_a_profile_waits_for_peers_but_in_sends():
    c, p = load_cluster("dgx-h100"), read_weights().factors
    assert floor(group_of("all_reduce", (2,), (1,), c), p, TRACE) == pytest.approx(20e-6)
    assert floor(group_of("send", (2,), (1,), c), p, TRACE) == 0


def test_the_switch_adds_up_at_its_architecture_s_share():
    """NVIDIA/nccl src/graph/tuning.cc, nvlsEfficiency: 0.85 on Hopper, 0.74 on Blackwell."""
    for name, share in (("dgx-h100", 0.85), ("dgx-b200", 0.74), ("8xb300-sxm-288gb", 0.74)):
        assert group_of("all_reduce", (8,), (1,), load_cluster(name)).reduces == share
    assert group_of("all_reduce", (4,), (1,), load_cluster("dgx-h100")).reduces == 0


def test_gpus_of_a_family_share_what_was_measured():
    def arch(name):
        c = load_cluster(name)
        return curve_of(group_of("all_reduce", (2,), (1,), c), "all_reduce", 16, c, Library()).arch

    assert arch("8xb300-sxm-288gb") == arch("gb200-nvl72") == arch("dgx-b200") == "sm_100/nvlink"
    assert arch("a100-pcie-pairs") == arch("dgx-a100") == "sm_80/nvlink"
    assert arch("8xrtx5090") == "sm_120/host"


def test_a_node_of_cards_without_peers_is_in_a_believable_range():
    """Cards that copy through the host share its memory: eight have less each than two."""
    rates = [
        (1 << 30) / seconds("all_reduce", 1 << 30, n, "8xrtx4090").time_s * 2 * (n - 1) / n
        for n in (2, 4, 8)
    ]
    assert 25e9 > rates[0] > rates[1] > rates[2] > 1e9


def test_pcie_carries_what_nccl_takes_it_for():
    """NVIDIA/nccl src/graph/topo.h: 12 GB/s of the third generation's 16 lanes, twice that of the
    fourth's; the protocol Simple has them whole."""
    pairs = load_cluster("a100-pcie-pairs")
    g = group_of("all_reduce", (4,), (1,), pairs)
    simple = {w.name: w for w in ways(Sheet(), g, 1e9, FACTORS, LOOP)}["ring Simple"]
    assert simple.transfer == pytest.approx(1.5 * 1e9 / 24e9, rel=0.01)


def test_groups_find_the_links_between_their_ranks():
    pairs = load_cluster("2xa100-pcie-pairs")
    assert group_of("all_reduce", (2,), (1,), pairs).rate == 300e9
    assert group_of("all_reduce", (2,), (2,), pairs).rate == 31.508e9
    across = group_of("all_reduce", (2,), (4,), pairs)
    assert (across.nodes, across.near, across.wire) == (2, 1, 0)
    mesh = load_cluster("4xa100-sxm")
    assert group_of("all_reduce", (2,), (1,), mesh).rate == pytest.approx(100e9)
    assert group_of("all_reduce", (4,), (1,), mesh).rate == 300e9
    both = group_of("all_reduce", (2, 4), (8, 1), load_cluster("2xdgx-h100"))
    assert (both.ranks, both.near, both.nodes) == (8, 4, 2)
    assert both == flat_group("all_reduce", 8, 4, load_cluster("2xdgx-h100"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_ranks_are_the_same_group(kind):
    """Those of ep and dp together, near ones named first or last, are all ranks."""
    c = load_cluster("4xdgx-h100")
    every = group_of(kind, (32,), (1,), c)
    assert group_of(kind, (8, 4), (1, 8), c) == group_of(kind, (4, 8), (8, 1), c) == every


def test_ranks_that_the_cluster_has_not_are_refused():
    with pytest.raises(TargetError, match="needs a rank 15"):
        seconds("all_reduce", 1024, 16, "dgx-h100")
    with pytest.raises(TargetError, match="vllm has no all_gather"):
        seconds("all_gather", 1024, 8, "dgx-h100", library=Library("vllm", "cuda_graph"))


def test_the_switch_adds_up_large_floats_of_many_ranks_alone():
    assert seconds("all_reduce", 1 << 28, 8, "dgx-h100").algorithm == "NVLS"
    for t in (
        seconds("all_reduce", 1 << 28, 8, "dgx-h100", dtype=I8),
        seconds("all_reduce", 1 << 28, 4, "dgx-h100"),
        seconds("all_gather", 1 << 28, 8, "dgx-h100"),
        seconds("all_reduce", 1 << 28, 8, "dgx-a100"),
    ):
        assert t.algorithm == "ring"


def test_protocols_follow_size():
    small = seconds("all_reduce", 1024, 8, "dgx-a100")
    large = seconds("all_reduce", 1 << 28, 8, "dgx-a100")
    assert small.protocol in ("LL", "LL128") and large.protocol == "Simple"
    assert small.term("hops") > small.term("transfer")
    assert large.term("transfer") > 0.5 * large.time_s


def test_published_all_reduces_over_four_nodes():
    """stas00/ml-engineering, network: 364.87 GB/s of bus bandwidth on 4 nodes of 8 H200 (4 GiB),
    381.8 on B200 (16 GiB; the rate of a rail is from it), eight adapters of 50 GB/s a node."""
    for cluster, nbytes, measured in (
        ("4xdgx-h200", 4 << 30, 364.87e9),
        ("4xdgx-b200", 16 << 30, 381.8e9),
    ):
        t = seconds("all_reduce", nbytes, 32, cluster)
        assert t.bytes_per_s * 2 * 31 / 32 == pytest.approx(measured, rel=0.1)
        assert t.unseen == ("nodes",)


@given(
    st.sampled_from(KINDS),
    st.floats(1, 2**35),
    st.sampled_from([(2, 1), (8, 1), (4, 8), (32, 1)]),
    st.sampled_from(list(MODES["nccl"])),
)
def test_formulas_grow_with_bytes_and_fall_with_rates(kind, nbytes, group, mode):
    p = read_weights().factors
    g = group_of(kind, group[:1], group[1:], load_cluster("4xdgx-h100"))

    def total(g, nbytes):
        return float(chosen(ways(Sheet(), g, nbytes, p, Library("nccl", mode)))[0])

    assert total(g, nbytes) <= total(g, 2 * nbytes)
    assert total(replace(g, rate=2 * g.rate, rail=2 * g.rail), nbytes) <= total(g, nbytes)
    assert total(g, nbytes) > 0


# ---- what measurements add --------------------------------------------------------------------


def curve(**changes):
    known = {"gpu": "g/1/switch", "arch": "sm_90/nvlink", "library": "nccl", "version": "2"}
    known |= {"mode": "eager_loop", "op": "all_reduce", "run": "a", "ranks": 8, "nodes": 1}
    return Curve(**(known | changes))


def field(curves, points, differences):
    which = np.array([i for i, _ in points])
    knots = Knots(tuple(curves), which, np.array([float(x) for _, x in points]))
    k = covariance(knots, knots) + 1e-6 * np.eye(len(which))
    return Field(dict(FACTORS), knots, np.linalg.solve(k, np.array(differences)))


def test_a_measured_curve_is_followed_and_others_less():
    f = field([curve()], [(0, 10), (0, 20)], [0.4, -0.2])
    assert f.at(curve(), 10) == pytest.approx(0.4, abs=1e-3)
    assert f.at(curve(), 20) == pytest.approx(-0.2, abs=1e-3)
    other_run, other_ranks, other_gpu, other_arch = (
        f.at(curve(run="b"), 10),
        f.at(curve(run="b", ranks=4), 10),
        f.at(curve(run="b", gpu="h/1/switch"), 10),
        f.at(curve(run="b", gpu="h/1/switch", arch="sm_100/nvlink"), 10),
    )
    assert 0.4 > other_run > other_ranks > 0 and other_run > other_gpu > other_arch > 0
    assert f.at(curve(nodes=2), 10) == 0


def test_a_release_is_the_same_code_on_all_gpus():
    """One that is not said is no release in common."""
    f = field([curve()], [(0, 10)], [0.4])
    far = curve(run="b", gpu="h/1/switch", arch="sm_100/nvlink")
    assert f.at(far, 10) > f.at(far._replace(version="1"), 10) == 0
    unsaid = field([curve(version="")], [(0, 10)], [0.4])
    assert unsaid.at(far._replace(version=""), 10) == 0
    over_pcie = far._replace(arch="sm_100/pcie")
    assert f.at(over_pcie, 10) == 0


def test_sites_share_what_networks_do_to_a_mode():
    """Kernels of profiles over one site's network say something of another's, and nothing of
    collectives in a loop."""
    trace = curve(mode="kernel_trace", nodes=2)
    f = field([trace], [(0, 20)], [1.5])
    other = trace._replace(gpu="h/1/bridge", arch="sm_80/nvlink", run="b")
    assert 0.2 < f.at(other, 20) < f.at(trace, 20)
    assert f.at(other._replace(mode="eager_loop"), 20) == 0


def test_covariances_are_positive_definite():
    curves = [
        curve(ranks=r, run=run, op=op, nodes=n, arch=arch)
        for r in (2, 8)
        for run in ("a", "b")
        for op in ("all_reduce", "send")
        for n in (1, 2)
        for arch in ("sm_90/nvlink", "sm_89/host")
    ]
    points = [(i, x) for i in range(len(curves)) for x in (9, 20, 30)]
    which, x = (np.array(c) for c in zip(*points, strict=True))
    k = covariance(Knots(tuple(curves), which, x), Knots(tuple(curves), which, x))
    assert np.allclose(k, k.T) and np.linalg.eigvalsh(k).min() > -1e-9


def test_one_point_is_as_many():
    f = read_weights()
    one = f.knots.curves[0]
    x = np.array([9.0, 17.3, 29.0])
    assert f.many([one], np.zeros(3, int), x) == pytest.approx([f.at(one, v) for v in x])


def test_weights_read_back():
    f = field([curve(), curve(run="b")], [(0, 10), (1, 20)], [0.4, -0.2])
    f = replace(f, ends={"size": ((-0.1, 0.1),) * 4})
    again = parsed(written(f))
    assert again.knots.curves == f.knots.curves and again.ends == f.ends
    assert again.at(curve(), 12) == pytest.approx(f.at(curve(), 12), rel=1e-3)


def test_what_was_not_measured_is_said():
    assert seconds("all_reduce", 1 << 20, 8, "dgx-h100").unseen == ()
    assert seconds("all_reduce", 1 << 20, 6, "dgx-h100").unseen == ("ranks",)
    assert seconds("all_reduce", 1 << 20, 8, "mi300x-node").unseen == ("system",)
    wide, close = (
        seconds("all_reduce", 1 << 20, 8, c).interval for c in ("mi300x-node", "dgx-h100")
    )
    assert wide[1] / wide[0] > close[1] / close[0]


# ---- several kinds of nodes ---------------------------------------------------------------------

GROUPS = (((16,), (1,)), ((8,), (1,)), ((2,), (8,)), ((2, 4), (8, 1)), ((4,), (2,)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sizes", "strides"), GROUPS)
def test_a_group_takes_what_its_slowest_kind_does(kind, sizes, strides):
    """Kinds of the same GPU are one cluster, to the last bit; of two, none is quicker than both."""

    def took(name):
        return collective_time(kind, 1 << 24, F16, sizes, strides, load_cluster(name))

    assert took("dgx-a100+dgx-a100") == took("2xdgx-a100")
    quick, slow = took("2xdgx-h100").time_s, took("2xdgx-a100").time_s
    for name in ("dgx-h100+dgx-a100", "dgx-a100+dgx-h100"):
        mixed = took(name)
        assert quick <= mixed.time_s <= max(slow, quick) * (1 + 1e-9)
        assert sum(s for _, s in mixed.terms) == pytest.approx(mixed.time_s)


def test_a_group_lies_where_its_ranks_are():
    """Four ranks of a node of eight that begin at its GPU 6 are on two nodes."""
    whole = load_cluster("dgx-h100+dgx-a100+dgx-a100")

    def groups(name, *axes):
        return {(int(g.near), int(g.nodes), c.gpu) for g, c in groups_of("all_reduce", *axes, name)}

    pairs = groups(whole.part(6, 4), (4,), (1,))
    assert pairs == {(2, 2, "h100-sxm-80gb"), (2, 2, "a100-sxm-80gb")}
    assert groups(whole.part(6, 4), (2,), (1,)) == {
        (2, 1, "h100-sxm-80gb"), (2, 1, "a100-sxm-80gb")
    }  # fmt: skip
    assert groups(whole.part(8, 8), (8,), (1,)) == {(8, 1, "a100-sxm-80gb")}
    assert groups(whole.part(12, 8), (8,), (1,)) == {(4, 2, "a100-sxm-80gb")}
    assert groups(whole, (3,), (8,)) == {(1, 3, "h100-sxm-80gb"), (1, 3, "a100-sxm-80gb")}
    with pytest.raises(TargetError, match="needs a rank 24"):
        collective_time("all_reduce", 8, F16, (4,), (8,), whole)


def test_a_shift_round_a_ring_is_a_send_of_each_rank():
    """All at once, and as slow as that from node to node where there are several."""
    for cluster, ranks, stride in (("dgx-h100", 8, 1), ("dgx-a100", 4, 1)):
        shift = seconds("shift", 1 << 26, ranks, cluster).time_s
        assert shift == pytest.approx(seconds("send", 1 << 26, 2, cluster, stride).time_s, rel=1e-9)
    across = seconds("shift", 1 << 26, 16, "2xdgx-h100").time_s
    assert across > 2 * seconds("shift", 1 << 26, 8, "2xdgx-h100").time_s
    assert across == pytest.approx(seconds("send", 1 << 26, 2, "2xdgx-h100", 8).time_s, rel=0.05)


def test_the_slower_of_rail_and_fabric_counts(tmp_path):
    """Where a file says that the fabric is slower than the rails; within a kind its own rail."""
    (tmp_path / "both.toml").write_text(
        'name = "both"\nkinds = ["2xdgx-h100", "dgx-h100"]\n[fabric]\njoins = 3\n'
        'technology = "Ethernet"\ntopology = "fabric"\nbytes_per_s = 1e9\nlatency_s = 1e-5\n'
        '[sources]\nfabric = "ours"\n'
    )
    both = load_cluster(tmp_path / "both.toml")
    inside, across = (
        collective_time("send", 1 << 30, F16, (2,), (stride,), both).time_s for stride in (8, 16)
    )
    assert across > 10 * seconds("send", 1 << 30, 2, "3xdgx-h100", 16).time_s
    assert inside == seconds("send", 1 << 30, 2, "2xdgx-h100", 8).time_s  # ranks 0 and 8
