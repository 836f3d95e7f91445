"""Clusters: shipped ones, those a name describes, one's own, and what is refused."""

from __future__ import annotations

import json

import pytest

import gpuir
from gpuir.ir.errors import TargetError
from gpuir.targets.cluster import cluster_names, load_cluster

GOOD = """
name = "mine"
gpu = "l4"
[node]
joins = 4
technology = "PCIe 4 x16"
topology = "pcie"
bytes_per_s = 31.5e9
latency_s = 1e-6
[sources]
node = "my own"
"""


def test_every_shipped_cluster_loads_and_every_number_has_a_source():
    assert len(cluster_names()) >= 15
    for name in cluster_names():
        cluster = load_cluster(name)
        assert cluster.name == name and cluster.target.name
        for row in cluster.rows():
            if isinstance(row.value, float | int) and not isinstance(row.value, bool):
                assert row.source, (name, row.field)


def test_levels_go_from_inside_out():
    cluster = gpuir.load_cluster("a100-pcie-pairs")
    assert [name for name, _ in cluster.levels] == ["pair", "node", "fabric"]
    assert (cluster.gpus, cluster.node_gpus, cluster.nodes) == (4, 4, 1)
    assert gpuir.load_cluster("gb200-nvl72").node_gpus == 72


def test_a_number_before_a_name_is_of_nodes_or_of_gpus():
    many = load_cluster("16xdgx-h100")
    assert (many.gpus, many.nodes, many.name) == (128, 16, "16xdgx-h100")
    assert many.with_nodes(2).name == "2xdgx-h100"
    assert load_cluster(many.name) == many
    node = load_cluster("8xh100-sxm")
    assert node.gpus == 8 and node.domain and node.domain.topology == "switch" and node.assumed
    assert load_cluster("32xh100-sxm").nodes == 4
    cards = load_cluster("8xl40s")
    assert cards.domain is None and cards.node and cards.node.joins == 8
    bridged = load_cluster("8xa100-pcie")
    assert bridged.pair and bridged.pair.joins == 2 and bridged.node and bridged.node.joins == 4


def test_ones_own_is_a_file_and_may_change_a_shipped_one(tmp_path):
    (tmp_path / "mine.toml").write_text(GOOD)
    assert load_cluster(tmp_path / "mine.toml").gpus == 4
    (tmp_path / "roce.toml").write_text(
        'name = "roce"\nbase = "dgx-h100"\n[fabric]\njoins = 3\nbytes_per_s = 25e9\n'
        '[sources]\n"fabric.joins, fabric.bytes_per_s" = "our network"\n'
    )
    mine = load_cluster(tmp_path / "roce.toml")
    assert mine.gpus == 24 and mine.fabric and mine.fabric.bytes_per_s == 25e9
    assert mine.source("fabric.bytes_per_s") == "our network"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("joins = 4", "joins = 0", "out of range"),
        ("joins = 4", "", "node.joins is missing"),
        ("joins = 4", "joints = 4", "no such field: node.joints"),
        ('node = "my own"', 'fabric = "my own"', "no source"),
        ('gpu = "l4"', 'gpu = "l5"', "no target is called 'l5'"),
        ('"pcie"', '"star"', "no topology is called 'star'"),
        ('"PCIe 4 x16"', '"Carrier Pigeon"', "no technology is called 'Carrier Pigeon'"),
        ('"PCIe 4 x16"', '"Infniband HDR"', "did you mean InfiniBand"),
        ('"pcie"', '"fabric"', "node has the topology fabric"),
        ("31.5e9", "31.5", "out of range"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, old, new, says):
    file = tmp_path / "mine.toml"
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(TargetError) as error:
        load_cluster(file)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dgx-h10", "dgx-h100"),
        ("8xh10-sxm", "8xh100-sxm"),
        ("10xh100-sxm", "8xh100-sxm-80gb or 16xh100-sxm-80gb"),
        ("nothing.toml", "nothing.toml"),
    ],
)
def test_an_unknown_name_gets_the_nearest(name, says):
    with pytest.raises(TargetError) as error:
        load_cluster(name)
    assert says in str(error.value)


def test_nodes_need_something_between_them(tmp_path):
    (tmp_path / "mine.toml").write_text(GOOD)
    with pytest.raises(TargetError, match="the network between its nodes"):
        load_cluster(tmp_path / "mine.toml").with_nodes(2)


BOTH = """
name = "both"
kinds = ["2xdgx-h100", "old.toml"]
[fabric]
joins = 3
technology = "Ethernet"
topology = "fabric"
bytes_per_s = 12.5e9
latency_s = 5e-6
[sources]
fabric = "our network"
"""


def test_nodes_may_be_of_several_kinds():
    """Ranks go from kind to kind; a part of them is what joins those, and no more."""
    both = load_cluster("2xdgx-h100+4xl40s")
    assert (both.gpus, both.nodes, both.name) == (20, 3, "2xdgx-h100+4xl40s")
    assert [target.name for target in both.targets] == ["h100-sxm-80gb", "l40s"]
    assert [(x.cluster.name, x.first, x.end) for x in both.stretches] == [
        ("2xdgx-h100", 0, 16), ("4xl40s", 16, 20)
    ]  # fmt: skip
    assert (
        both.fabric
        and both.fabric.bytes_per_s == 25e9
        and "one network joins all nodes, as fast as" in both.assumed[-1]
    )
    assert "4xl40s" in both.source("fabric.bytes_per_s")
    for row in both.rows():
        if isinstance(row.value, float | int) and not isinstance(row.value, bool):
            assert row.source, row.field
    assert both.part(8, 8) == load_cluster("2xdgx-h100") and both.part(0, 20) is both
    across = both.part(12, 6)
    assert across == load_cluster("2xdgx-h100+4xl40s[12:18]") and across.gpus == 6
    assert [(x.first, x.end, x.skipped) for x in across.stretches] == [(0, 4, 12), (4, 6, 0)]
    assert across.part(2, 3) == both.part(14, 3)
    assert both.part_with("l40s", 4) == load_cluster("4xl40s")
    with pytest.raises(TargetError, match="several kinds of GPU"):
        _ = both.target
    same = load_cluster("dgx-a100+2xdgx-a100")
    assert same.target == load_cluster("dgx-a100").target


def test_a_file_names_the_kinds_and_what_joins_them(tmp_path):
    (tmp_path / "old.toml").write_text(GOOD)
    (tmp_path / "both.toml").write_text(BOTH)
    both = load_cluster(tmp_path / "both.toml")
    assert (both.gpus, both.nodes, both.node_gpus) == (20, 3, 4) and not both.assumed
    assert both.fabric and both.fabric.technology == "Ethernet"
    assert load_cluster(f"{tmp_path}/both.toml[0:16]").name == "2xdgx-h100"
    bare = BOTH.partition("[fabric]")[0].replace("old.toml", "4xl4")
    (tmp_path / "bare.toml").write_text(bare)
    assert load_cluster(tmp_path / "bare.toml").fabric == load_cluster("2xdgx-h100+4xl4").fabric


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"old.toml"', '"dgx-a1"', "no cluster is called 'dgx-a1'"),
        ('"old.toml"', '"both.toml"', "itself has several kinds"),
        ('"old.toml"', '"dgx-a100+dgx-h100"', "itself has several kinds"),
        ('"old.toml"', '"other.toml"', "cannot read"),
        ('["2xdgx-h100", "old.toml"]', "[]", "kinds must be a list of cluster names"),
        ('["2xdgx-h100", "old.toml"]', '"dgx-h100"', "kinds must be a list of text"),
        ("joins = 3", "joins = 4", "write joins = 3"),
        ("kinds", 'gpu = "l4"\nkinds', "gpu is given beside kinds"),
        ("kinds", 'ranks = "0:8"\nkinds', "ranks is given beside kinds"),
        ('fabric = "our network"', "", "no source"),
        ('"fabric"\n', '"switch"\n', "fabric has the topology switch"),
        ('name = "both"', 'name = "both"\nbase = "both.toml"', "cannot be a base"),
        (BOTH[BOTH.index("[fabric]") :], "", "mine does not describe the network"),
    ],
)  # fmt: skip
def test_a_wrong_file_of_kinds_is_refused(tmp_path, old, new, says):
    (tmp_path / "old.toml").write_text(GOOD)
    (tmp_path / "both.toml").write_text(BOTH)
    (tmp_path / "wrong.toml").write_text(BOTH.replace(old, new, 1))
    with pytest.raises(TargetError) as error:
        load_cluster(tmp_path / "wrong.toml")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("dgx-h100+dgx-a1", "no cluster is called 'dgx-a1'"),
        ("dgx-h100+", "no cluster is called ''"),
        ("dgx-h100+dgx-a100[8:8]", "does not have these ranks"),
        ("dgx-h100+dgx-a100[8:17]", "from 0 to 16"),
        ("dgx-h100[0:4]", "its ranks are alike"),
    ],
)
def test_a_wrong_name_of_kinds_is_refused(name, says):
    with pytest.raises(TargetError) as error:
        load_cluster(name)
    assert says in str(error.value)
    with pytest.raises(TargetError, match="several kinds of nodes"):
        load_cluster("dgx-h100+dgx-a100").with_nodes(4)


def test_the_command_lists_shows_and_writes_json(tmp_path):
    from click.testing import CliRunner

    from gpuir.cli.main import main

    listed = CliRunner().invoke(main, ["clusters", "--width", "120"])
    assert "gb200-nvl72" in listed.stdout
    shown = CliRunner().invoke(main, ["clusters", "8xl40s", "--width", "100"])
    assert "assumed" in shown.stdout and "31.51 GB/s" in shown.stdout
    text = CliRunner().invoke(main, ["clusters", "2xdgx-a100", "--format", "json"]).stdout
    assert json.loads(text)["clusters"][0]["gpus"] == 16
    both = CliRunner().invoke(main, ["clusters", "dgx-h100+2xl40s", "--width", "80"]).stdout
    assert "10 GPUs of 2 kinds of nodes" in both and "ranks 8 to 9: 2xl40s" in both
    assert max(map(len, both.splitlines())) <= 80
    text = CliRunner().invoke(main, ["clusters", "dgx-h100+2xl40s", "--format", "json"]).stdout
    kinds = json.loads(text)["clusters"][0]["kinds"]
    assert [(x["first"], x["count"], x["cluster"]["gpu"]) for x in kinds] == [
        (0, 8, "h100-sxm-80gb"), (8, 2, "l40s")
    ]  # fmt: skip
    wrong = CliRunner().invoke(main, ["clusters", "dgx-a1"])
    assert wrong.exit_code == 2 and "dgx-a100" in wrong.output
