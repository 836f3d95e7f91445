"""Hosts: what ships, what they do to a profile's times, a user's own, and what is refused."""

from __future__ import annotations

from math import exp, hypot, log

import pytest

import gpuir
from gpuir.ir.errors import TargetError, UsageError
from gpuir.ir.graph import Graph, Level
from gpuir.targets.host import HostMachine, dump_host, host_names, load_host
from gpuir.targets.load import load_target
from gpuir.targets.profile import load_profile, on_same_host, profile_of, under
from gpuir.targets.target import FrozenTable

OURS = """\
name = "ours"
title = "our server"
slowdown = 2
uncertainty = 1.5
[sources]
"slowdown, uncertainty" = "measured on our server"
"""
PROFILE = """\
base = "eager"
name = "mine"
[host]
between_s = 2e-6
[sources]
"host.between_s" = "measured on our server"
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.toml").write_text(OURS, encoding="utf-8")
    (tmp_path / "mine.toml").write_text(PROFILE, encoding="utf-8")
    return tmp_path


def graph(level: Level = Level.graph, profile: str | None = None, target: str | None = None):
    g = gpuir.parse("graph @g of pytorch {\n  in %x: f32[2]\n  out %x\n}")
    return Graph(**{**vars(g), "level": level, "profile": profile, "target": target})


# ---- what ships --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", host_names())
def test_every_number_has_a_source(name: str):
    host = load_host(name)
    assert host.name == name and host.title
    assert all(row.source for row in host.rows() if isinstance(row.value, float))


def test_the_reference_changes_nothing():
    assert load_profile("eager+host=reference") == load_profile("eager")
    assert load_host("reference").slowdown == load_host("reference").uncertainty == 1


@pytest.mark.parametrize("name", host_names())
def test_a_slowdown_that_is_derived_is_what_the_scores_say(name: str):
    host = load_host(name)
    if host.source("slowdown").startswith("derived"):
        score = load_host("reference").single_thread
        assert score is not None and host.single_thread is not None
        assert host.slowdown == pytest.approx(score / host.single_thread, rel=0.01)


def test_a_target_is_in_a_host_that_there_is():
    usual = {load_target(name).host for name in gpuir.target_names()} - {""}
    assert usual and usual <= {*host_names()}


# ---- on a host ---------------------------------------------------------------------------------


def test_all_of_a_profiles_times_are_as_much_longer(here):
    for name in ("eager", "vllm"):
        plain, there = load_profile(name), load_profile(f"{name}+host=ours.toml")
        both = exp(hypot(log(plain.host.uncertainty), log(1.5)))
        assert there.host.uncertainty == pytest.approx(both)
        assert there.host.launch_s == 2 * plain.host.launch_s
        assert there.host.before == FrozenTable({k: 2 * v for k, v in plain.host.before.items()})
        assert there.machine == "ours.toml" and plain.machine == "reference"
    assert there.decode is not None and plain.decode is not None
    assert there.decode.call_s == 2 * plain.decode.call_s


def test_a_target_has_its_usual_host_unless_one_is_named():
    t4 = load_target("t4")
    assert load_profile("eager", t4).machine == t4.host != "reference"
    assert load_profile("eager+host=reference", t4).machine == "reference"
    assert profile_of(graph(target="t4")).machine == t4.host
    assert profile_of(graph(target="a100-pcie")).machine == "reference"
    assert profile_of(graph(target="t4", profile="eager+host=dgx-1")).machine == "dgx-1"


def test_times_of_a_users_own_are_of_no_machine_we_know(here):
    mine = load_profile("mine.toml", load_target("t4"))
    assert mine.machine == "" and mine.host.between_s == 2e-6
    with pytest.raises(UsageError, match="has times of the host, but the machine they"):
        load_profile("mine.toml+host=dgx-1")
    (here / "mine.toml").write_text('machine = "dgx-1"\n' + PROFILE, encoding="utf-8")
    assert load_profile("mine.toml+host=dgx-1").host.between_s == 2e-6
    ratio = load_host("reference").slowdown / load_host("dgx-1").slowdown
    there = load_profile("mine.toml+host=reference").host.between_s
    assert there == pytest.approx(2e-6 * ratio)


def test_so_are_those_below_a_users_own(here):
    (here / "more.toml").write_text('base = "mine.toml"\nname = "more"\n', encoding="utf-8")
    assert load_profile("more.toml", load_target("t4")).machine == ""


@pytest.mark.parametrize(
    ("given", "gives"),
    [
        ("+host=dgx-1", "eager+host=dgx-1"),
        ("compiled+host=dgx-1", "compiled+host=dgx-1"),
        ("compiled+tf32=none+host=dgx-1", "compiled+tf32=none+host=dgx-1"),
    ],
)
def test_a_graphs_text_names_the_host(given: str, gives: str):
    g = under(graph(), given)
    assert g.profile == gives
    text = gpuir.show(g)
    assert f'under "{gives}"' in text and gpuir.parse(text).profile == gives


def test_tf32_and_host_are_each_chosen():
    assert under(graph(), "+host=dgx-1", tf32=True).profile == "eager+tf32=products+host=dgx-1"
    assert under(graph(), "eager+tf32=products+host=dgx-1", tf32=True).profile == (
        "eager+tf32=products+host=dgx-1"
    )


def test_another_stack_may_run_on_the_same_host():
    assert on_same_host("compiled", "eager+host=dgx-1") == "compiled+host=dgx-1"
    assert on_same_host("compiled", "+host=dgx-1") == "compiled+host=dgx-1"
    assert on_same_host("compiled", None) == on_same_host("compiled", "eager") == "compiled"


def test_what_is_lowered_runs_on_another_host():
    late = graph(Level.kernel, "eager+tf32=none+host=dgx-1")
    assert under(late, "+host=aws-p3").profile == "eager+tf32=none+host=aws-p3"
    assert under(late, "eager+host=aws-p3").profile == "eager+tf32=none+host=aws-p3"
    assert under(late, "eager").profile == late.profile
    with pytest.raises(UsageError, match="under another profile"):
        under(late, "compiled+host=aws-p3")


# ---- a user's own ------------------------------------------------------------------------------


def test_what_was_measured_reads_back(here):
    host = HostMachine("ours", 'a "server"', 0.96, uncertainty=1.1, sources=FrozenTable({
        "slowdown": "measured", "uncertainty": "assumed: so",
    }))  # fmt: skip
    (here / "it.toml").write_text(dump_host(host), encoding="utf-8")
    assert load_host("it.toml") == host and load_host("it.toml").sources == host.sources


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("slowdown = 2", "slowdown = 0", "out of range"),
        ('"slowdown, uncertainty"', '"uncertainty"', "slowdown has no source"),
        ("slowdown = 2", "speed = 2", "no such field: speed"),
        ('"ours"', '"Our Server"', "cannot be the name of a host"),
    ],
)
def test_what_is_wrong_is_refused(here, old: str, new: str, says: str):
    (here / "ours.toml").write_text(OURS.replace(old, new), encoding="utf-8")
    with pytest.raises(TargetError, match=says):
        load_host("ours.toml")


def test_a_wrong_name_gets_the_nearest():
    with pytest.raises(TargetError, match="did you mean dgx-1"):
        load_profile("eager+host=dgx1")
