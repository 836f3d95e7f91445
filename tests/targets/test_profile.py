"""Profiles: what ships, a user's own, and what is refused."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import gpuir
from gpuir.ir.errors import TargetError
from gpuir.ir.graph import Graph, Level
from gpuir.ops.kernel import KERNELS
from gpuir.stacks import allocators as stacks
from gpuir.targets.profile import (
    ALLOCATORS,
    KINDS,
    Host,
    default_profile,
    load_profile,
    profile_names,
)
from gpuir.targets.target import FrozenTable

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"

MINE = """\
base = "eager"
name = "mine"
title = "our server"

[host]
between_s = 2e-6
before.conv = 20e-6

[sources]
"host.between_s, host.before.conv" = "measured on our server"
"""


# ---- what ships --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", profile_names())
def test_every_number_has_a_source_and_every_pass_a_name(name: str):
    p = load_profile(name)
    assert p.name == name and p.title
    assert all(row.source for row in p.rows() if isinstance(row.value, float))
    assert str(gpuir.pipeline(p.passes))


def test_kinds_are_those_of_the_kernels():
    known = {name.removeprefix("k.") for name in KERNELS} - {"view", "loop", "cond"}
    assert set(KINDS) == known


def test_a_graph_replays_what_compiled_launches():
    compiled, graph = load_profile("compiled"), load_profile("cudagraph")
    assert graph.host.graph and not compiled.host.graph
    assert graph.host.param_s == compiled.host.param_s  # guards come before either
    assert graph.host.call_s > compiled.host.call_s
    assert graph.passes == compiled.passes


@pytest.mark.skipif(not DATA.exists(), reason="the measurements are not here")
def test_eagers_host_is_what_the_measurements_give():
    tool = importlib.import_module("validation.agreement.host_overheads")
    shipped = {row.field: row.value for row in load_profile("eager").rows()}
    for name, value in tool.derived(DATA).items():
        assert shipped[f"host.{name}"] == pytest.approx(value), name


def test_a_host_may_be_scaled():
    host = Host(1, 2, 3, 4, 5, 6, 7, queue=9, graph_s=8, before=FrozenTable({"conv": 10.0}))
    twice = host.scaled(2)
    assert twice == Host(
        2, 4, 6, 8, 10, 12, 14, queue=9, graph_s=8, before=FrozenTable({"conv": 20.0})
    )


# ---- a user's own ------------------------------------------------------------------------------


def test_a_file_may_change_a_few_numbers_of_another(spec):
    mine, eager = load_profile(spec()), load_profile("eager")
    assert mine.name == "mine" and mine.base == "eager" and mine.passes == eager.passes
    assert mine.host.between_s == 2e-6 and mine.host.before_s == eager.host.before_s
    assert mine.host.before["conv"] == 20e-6
    assert mine.host.before["gemm"] == eager.host.before["gemm"]
    assert mine.source("host.between_s") == "measured on our server"
    assert mine.source("host.before_s") == eager.source("host.before_s")


def test_a_base_may_be_a_file_beside_it(spec):
    spec()
    Path("theirs.toml").write_text(
        'base = "./mine.toml"\nname = "theirs"\n[host]\nafter_s = 1e-6\n'
        '[sources]\n"host.after_s" = "measured"\n'
    )
    theirs = load_profile("theirs.toml")
    assert (theirs.host.between_s, theirs.host.after_s) == (2e-6, 1e-6)
    assert theirs.base == "eager"  # the shipped one that it starts from


def test_a_graph_keeps_its_profile_through_text(spec):
    name = spec()
    model = gpuir.load(ROOT / "tests/encoder.onnx", dims={"batch": 1, "seq": 8})
    g = gpuir.analyze(model, "a100", profile=name).graph
    again = gpuir.parse(gpuir.show(g))
    assert gpuir.analyze(again).profile == "mine"
    assert gpuir.analyze(again).latency_s == gpuir.analyze(g).latency_s


WRONG = [
    ("between_s = 2e-6", "between_s = 2", "out of range.*expected: a number from 0 to 10e-3 s"),
    ("between_s = 2e-6", 'between_s = "2us"', "is not a number"),
    ("between_s = 2e-6", "betwen_s = 2e-6", "no such field.*did you mean.*between_s"),
    ("before.conv", "before.cnov", "no kind of kernel is called cnov.*did you mean.*conv"),
    ('base = "eager"', 'base = "eagr"', "no profile is called 'eagr'.*did you mean.*eager"),
    ('base = "eager"', 'base = "./mine.toml"', "its own base"),
    ('base = "eager"', "base = 7", "the base must be text"),
    ('base = "eager"\n', "", "passes is missing"),
    ('name = "mine"', 'name = "My Stack"', "cannot be the name"),
    (
        'name = "mine"',
        'name = "mine"\ntf32 = "some"',
        "the value of tf32 is not valid.*none, conv, products, all",
    ),
    (", host.before.conv", "", "host.before.conv has no source.*assumed: why"),
    ("host.between_s,", "host.betwen_s,", "entry for host.betwen_s.*did you mean.*between_s"),
    ("[host]", "copies = { call_s = 1e-6, share = 2 }\n[host]", "copies.share is out of range"),
    ("[host]", "[host", "not valid TOML"),
]


@pytest.mark.parametrize(("old", "new", "says"), WRONG)
def test_what_is_wrong_in_a_file_is_said(spec, old: str, new: str, says: str):
    with pytest.raises(TargetError) as error:
        load_profile(spec(old, new))
    assert re.search(says, str(error.value), re.DOTALL)
    assert "mine.toml" in str(error.value) or "eagr" in new


def test_a_file_is_asked_for_by_its_name(spec):
    spec()
    with pytest.raises(TargetError, match=r"for the file, write mine\.toml"):
        load_profile("mine")


def test_no_such_file_or_name():
    with pytest.raises(TargetError, match="no profile is called 'egar'"):
        load_profile("egar")
    with pytest.raises(TargetError):
        load_profile("nowhere.toml")


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("tensorrt@8.2", "tensorrt@8.5"),
        ("tensorrt@8.5", "tensorrt@8.5"),
        ("tensorrt@8.5.3", "tensorrt"),
        ("tensorrt@10", "tensorrt"),
        ("eager@2.9.1", "eager@2.11"),
        ("eager@2.13", "eager"),
        ("compiled@1.13", "compiled@2.1"),
        ("ort@1.9+tf32=none+host=dgx-1", "ort@1.12"),
    ],
)
def test_a_release_is_described_by_the_next_profile_from_it_on(asked, found):
    assert load_profile(asked).name == found


@pytest.mark.parametrize("name", ["tensorrt@", "tensorrt@new", "nobody@1", "eager@-1"])
def test_a_release_is_a_number_of_a_stack(name):
    with pytest.raises(TargetError, match="no profile is called"):
        load_profile(name)


def test_the_older_compiled_differs_in_what_is_attention_alone():
    old, new = load_profile("compiled@2.1"), load_profile("compiled")
    assert old.passes == new.passes.replace(" sdpa", " plain_attention") != new.passes
    assert (old.host, old.tf32, old.base) == (new.host, new.tf32, "compiled")


def test_an_allocator_is_one_that_there_is(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "eager"\nname = "mine"\nallocator = "cachign"\n')
    with pytest.raises(TargetError) as error:
        load_profile(path)
    said = str(error.value)
    assert "mine.toml:allocator" in said and "no allocator is called cachign" in said
    assert ", ".join(ALLOCATORS) in said and "did you mean caching?" in said
    assert set(ALLOCATORS) == {*stacks.ALLOCATORS}


def test_a_workspace_is_one_that_there_is(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "eager"\nname = "mine"\nworkspace = "cudnn"\n')
    with pytest.raises(TargetError, match="one of pytorch, none, or remove it"):
        load_profile(path)


def test_an_alternative_is_a_profile_that_there_is(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "eager"\nname = "mine"\nalternatives = ["tensorflow"]\n')
    with pytest.raises(TargetError, match="alternatives: no profile is called tensorflow"):
        load_profile(path)


def test_the_default_follows_from_what_wrote_the_model():
    of = {None: "ort", "onnx": "ort", "pytorch": "eager"}
    for framework, name in of.items():
        assert default_profile(Graph(Level.graph, "g", framework=framework)) == name
        assert load_profile(name)
