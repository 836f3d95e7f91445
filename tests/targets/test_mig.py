"""MIG: slices as targets, and the layouts of a GPU."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from gpuir.ir.errors import TargetError
from gpuir.simulate.memory import CONTEXT_BYTES, available_bytes
from gpuir.targets.check import check_target
from gpuir.targets.cluster import load_cluster
from gpuir.targets.load import dump_target, load_target, parse_target
from gpuir.targets.mig import geometries, is_packed, layouts, mig_of, mig_specs, place
from gpuir.targets.order import is_at_least
from gpuir.targets.prices import own_price, price_of

HARDWARE = Path(__file__).parents[3] / "shared" / "data" / "hardware"
facts = pytest.mark.skipif(not HARDWARE.exists(), reason="the tables of facts are not here")
SLICES = [f"{gpu}:{p.name}" for gpu, mig in mig_specs().items() for p in mig.profiles]
# What the table of measured facts calls a GPU, and what we do. GB300 is no target: what it has is
# not published.
GPUS = {
    "A30-24GB": ("a30",),
    "A100-40GB": ("a100-sxm-40gb", "a100-pcie-40gb"),
    "A100-80GB": ("a100-sxm-80gb", "a100-pcie-80gb"),
    "H100-80GB-SXM": ("h100-sxm-80gb",),
    "H100-80GB-PCIe": ("h100-pcie-80gb",),
    "H100-94GB": ("h100-nvl-94gb",),
    "H100-96GB (GH200)": ("gh200-96gb",),
    "H200-141GB": ("h200-sxm-141gb", "h200-nvl-141gb"),
    "GH200-144GB": ("gh200-144gb",),
    "B200-180GB": ("b200-sxm-180gb",),
    "GB200-186GB": ("gb200-186gb",),
    "B300-288GB": ("b300-sxm-288gb",),
    "RTX-PRO-6000-96GB": ("rtx-pro-6000-se", "rtx-pro-6000-ws"),
}


def rows(name: str) -> list[dict[str, str]]:
    with (HARDWARE / name).open(newline="") as f:
        return list(csv.DictReader(f))


@pytest.mark.parametrize("name", SLICES)
def test_slice_is_a_target(name):
    one = load_target(name)
    gpu = load_target(one.slice.gpu)
    assert one.name == name and one.device == gpu.name
    assert is_at_least(gpu, one)
    assert one.sms <= gpu.sms and one.dram.bytes <= gpu.dram.bytes
    assert one.link is None and not one.mig_capable
    assert {row.field for row in one.rows() if row.unit and not row.source} == set()
    assert all(row.status != "doubtful" for row in check_target(one))
    assert load_target(one.name) == one


@facts
@pytest.mark.parametrize("table", GPUS)
def test_profiles_are_the_measured_ones(table):
    for name in GPUS[table]:
        gpu = load_target(name)
        for row in rows("mig_profiles.csv"):
            if row["gpu"] != table:
                continue
            one = load_target(f"{name}:{row['profile']}")
            if row["sms"]:
                assert one.sms == float(row["sms"])
            if row["mem_gib_usable"]:
                assert one.dram.bytes == pytest.approx(float(row["mem_gib_usable"]) * 2**30)
            if row["copy_engines"]:
                assert one.slice.copy_engines == float(row["copy_engines"])
            assert one.dram.bytes_per_s == float(row["bw_frac"]) * gpu.dram.bytes_per_s
            assert one.l2.bytes == pytest.approx(float(row["l2_frac"]) * gpu.l2.bytes, abs=1)
            assert one.flops_per_s.tensor["f16"] == pytest.approx(
                gpu.flops_per_s.tensor["f16"] * one.sms / gpu.sms
            )


@facts
@pytest.mark.parametrize("table", GPUS)
def test_layouts_are_the_enumerated_ones(table):
    mig = mig_of(load_target(GPUS[table][0]))
    known = [r for r in rows("mig_geometries.csv") if r["gpu"] == table]
    for kind in {r["set"] for r in known}:
        profiles = [
            p
            for p in mig.profiles
            if not p.variant and (kind != "plain" or p.compute_slices > 1 or p.memory_slices == 1)
        ]
        ours = {g: g for g in geometries(mig, profiles)}
        assert {
            tuple(sorted(p.name for p in g.profiles)): (g.layouts, g.memory_slices) for g in ours
        } == {
            tuple(sorted(r["geometry"].split("+"))): (int(r["layouts"]), int(r["mem_slices_used"]))
            for r in known
            if r["set"] == kind
        }


@pytest.mark.parametrize(
    "gpu, double, count",
    [("a30", True, 25), ("a100", False, 297), ("a100", True, 722), ("h100", True, 722)],
)
def test_how_many_layouts_there_are(gpu, double, count):
    mig = mig_of(load_target(gpu))
    kinds = [p for p in mig.profiles if not p.variant]
    kinds = [p for p in kinds if double or p.compute_slices > 1 or p.memory_slices == 1]
    assert sum(1 for x in layouts(mig, kinds) if x) == count


@pytest.mark.parametrize("gpu", ["a30", "a100", "h100", "rtx-pro-6000"])
def test_what_is_placed_is_a_layout(gpu):
    mig = mig_of(load_target(gpu))
    known = {x for x in layouts(mig) if x}
    for geometry in geometries(mig):
        placed = place(mig, [p.name for p in geometry.profiles], gpu)
        assert placed in known and is_packed(mig, placed)
        assert Counter(x.profile for x in placed) == Counter(geometry.profiles)


def test_names():
    assert load_target("a100-40gb:mig").name == "a100-sxm-40gb:7g.40gb"
    assert load_target("A100:mig").sms == 98
    assert load_target("h100-80gb:1g.10gb+me").name == "h100-sxm-80gb:1g.10gb+me"
    shared = load_target("a30:1g.6gb+tdp_w=41.25")
    assert shared.tdp_w == 41.25 and shared.name == "a30:1g.6gb+tdp_w=41.25"
    assert load_target("a30:1g.6gb+sms=7").flops_per_s.tensor["f16"] == 165e12 / 8


def test_compute_instances_share_memory_and_l2():
    instance, part = load_target("a100:3g.20gb"), load_target("a100:1c.3g.20gb")
    assert (part.sms, instance.sms) == (14, 42)
    assert part.dram == instance.dram and part.l2 == instance.l2
    assert load_target("a100:3c.3g.20gb").name == "a100-sxm-40gb:3g.20gb"
    assert load_target("h100:1c.3g.40gb").sms == 16
    assert any("1g.10gb" in text for text in load_target("h100:1c.3g.40gb").assumptions)


def test_memory_is_what_the_driver_leaves():
    one = load_target("a30:1g.6gb")
    assert available_bytes(one) == one.dram.bytes - CONTEXT_BYTES


def test_slice_written_and_read_back(tmp_path):
    one = load_target("a100:2g.10gb")
    text = dump_target(one).replace('name = "a100-sxm-40gb:2g.10gb"', 'name = "my-slice"')
    again = parse_target(text, tmp_path / "x.toml")
    assert again.sms == 28 and again.slice == one.slice


def test_slice_of_ones_own_gpu(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "a30"\nname = "my-a30"\nclock_hz = 1.2e9\n'
        '[factors.stream]\n"dram share" = 0.9\n'
        '[sources]\nclock_hz = "measured"\nfactors = "measured"\n'
    )
    one = load_target(f"{path}:1g.6gb")
    assert one.name == "my-a30:1g.6gb" and one.clock_hz == 1.2e9
    assert one.factors["stream.dram share"] == 0.9


def test_file_of_ones_own_may_start_from_a_slice(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "a30:1g.6gb"\nname = "my-slice"\ndram.bytes_per_s = 2.2e11\n'
        '[sources]\n"dram.bytes_per_s" = "measured"\n'
    )
    one = load_target(path)
    assert (one.name, one.sms, one.dram.bytes_per_s) == ("my-slice", 14, 2.2e11)
    assert one.device == "a30" and one.slice.profile == "1g.6gb"
    assert one.source("sms") == load_target("a30:1g.6gb").source("sms")
    with pytest.raises(TargetError, match="is a slice itself"):
        load_target(f"{path}:1g.6gb")


def test_no_cluster_is_of_slices():
    with pytest.raises(TargetError, match="MIG slices cannot reach the memory of other"):
        load_cluster("2xa30:1g.6gb")


def test_price_is_the_share_of_the_gpu():
    own = dict([own_price("a30", 1.0)])
    assert price_of(load_target("a30:1g.6gb"), own).usd_per_hour == 0.25
    own = dict([own_price("a100", 2.0)])
    assert price_of(load_target("a100:3g.20gb"), own).usd_per_hour == 1.0
    assert price_of(load_target("a100:1g.5gb"), own).usd_per_hour == pytest.approx(2 / 7)
    own |= [own_price("a100:1g.5gb", 0.5)]
    assert price_of(load_target("a100:1g.5gb"), own).usd_per_hour == 0.5


@pytest.mark.parametrize(
    "name, words",
    [
        ("a30:1g.6g", ["no MIG profile 1g.6g", "did you mean 1g.6gb"]),
        ("a100:1g.6gb", ["a100-sxm-40gb has no MIG profile", "1g.5gb"]),
        ("t4:1g.6gb", ["t4 has no MIG", "a30"]),
        ("h20:1g.12gb", ["has MIG, but gpuir does not know its profiles"]),
        ("a100:4c.3g.20gb", ["no compute instance of 4 slices", "from 1c to 3c"]),
        ("a1000:1g.5gb", ["no target is called 'a1000'"]),
    ],
)
def test_what_is_no_slice(name, words):
    with pytest.raises(TargetError) as found:
        load_target(name)
    assert all(word in str(found.value) for word in words)


@pytest.mark.parametrize(
    "gpu, names, words",
    [
        ("a30", ["2g.12gb"] * 3, ["too many instances of 2g.12gb", "at most 2"]),
        ("a100", ["4g.20gb", "3g.20gb", "1g.5gb"], ["more compute slices", "4 + 3 + 1 = 8"]),
        ("a100", ["1g.5gb+me", "1g.5gb+me"], ["too many instances of 1g.5gb+me"]),
        ("a30", ["1g.6gb+me", "2g.12gb+me"], ["one instance", "media engines"]),
        (
            "a100",
            ["3g.20gb", "3g.20gb", "1g.5gb"],
            ["two instances cannot share a memory slice", "from 0 or 4"],
        ),
        ("a100", ["3g.40gb"], ["no MIG profile 3g.40gb", "3g.20gb"]),
    ],
)
def test_what_cannot_be_placed(gpu, names, words):
    mig = mig_of(load_target(gpu))
    with pytest.raises(TargetError) as found:
        place(mig, names, gpu)
    assert all(word in str(found.value) for word in words)
