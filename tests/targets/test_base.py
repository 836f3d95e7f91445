"""Spec files that start from another target: what differs, where its source is, what is refused."""

from pathlib import Path

import pytest

from gpuir.ir.errors import TargetError
from gpuir.targets.check import check_target
from gpuir.targets.load import dump_target, load_target

MINE = """\
base = "a100-pcie"
name = "mine"
launch_s = 2.1e-6

[dram]
bytes_per_s = 1.47e12

[factors.stream]
"dram share" = 0.9

[sources]
"launch_s, dram.bytes_per_s" = "measured"
factors = "calibrated"
"""


def test_what_differs_differs_and_all_else_is_the_base(spec):
    mine, base = load_target(spec()), load_target("a100-pcie")
    assert (mine.name, mine.base, mine.device) == ("mine", "a100-pcie-40gb", "a100-pcie-40gb")
    assert (mine.launch_s, mine.dram_bytes_per_s) == (2.1e-6, 1.47e12)
    assert mine.factors == {"stream.dram share": 0.9}
    assert (mine.sms, mine.l2, mine.sm, mine.isa) == (base.sms, base.l2, base.sm, base.isa)
    assert (mine.aliases, mine.notes) == ((), "")


def test_a_source_is_of_the_number_that_counts(spec):
    mine, base = load_target(spec()), load_target("a100-pcie")
    assert mine.source("dram.bytes_per_s") == mine.source("launch_s") == "measured"
    assert mine.source("dram.bytes") == base.source("dram.bytes")
    assert mine.source("dram.bus_bits") == base.source("dram")
    assert mine.source("factors.stream.dram share") == "calibrated"
    assert {r.field: r.value for r in mine.rows()}["factors.stream.dram share"] == 0.9


def test_it_is_a_target_like_any_other(spec, tmp_path):
    mine = load_target(spec())
    Path("full.toml").write_text(dump_target(mine), encoding="utf-8")
    assert load_target("full.toml") == mine
    changed = load_target("./mine.toml+sms=120")
    assert (changed.sms, changed.factors, changed.device) == (120, mine.factors, mine.device)
    doubtful = [r.field for r in check_target(mine) if r.status == "doubtful"]
    assert set(doubtful) == {"dram.bytes_per_s"}


def test_a_base_may_have_a_base(spec):
    spec()
    Path("sub").mkdir()
    text = 'base = "../mine.toml"\nname = "third"\n[factors]\nstream."dram share" = 0.8\n'
    Path("sub/third.toml").write_text(text + '[sources]\nfactors = "again"\n', encoding="utf-8")
    third = load_target("sub/third.toml")
    assert third.factors == {"stream.dram share": 0.8}
    assert (third.launch_s, third.device) == (2.1e-6, "a100-pcie-40gb")
    assert third.source("factors.stream.dram share") == "again"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('base = "a100-pcie"', "base = 3", "the base must be text"),
        ('base = "a100-pcie"', 'base = "a10000"', "no target is called 'a10000'"),
        ('base = "a100-pcie"', 'base = "./mine.toml"', "a target cannot be its own base"),
        ('base = "a100-pcie"', 'base = "./none.toml"', "cannot read the spec file"),
        ('"launch_s, dram.bytes_per_s"', '"launch_s"', "dram.bytes_per_s has no source"),
        ('factors = "calibrated"', "", "factors.stream.dram share has no source"),
        ("launch_s = 2.1e-6", "launch = 2.1e-6", "no such field: launch\n"),
        ("0.9", "90", "factors.stream.dram share is out of range"),
        ("0.9", '"0.9"', "factors.stream.dram share is not a number"),
        ('[factors.stream]\n"dram share"', "[factors]\nstream", "factors.stream is a table"),
        ("[factors.stream]", "[factor.stream]", "no such field: factor\n"),
        ("[factors.stream]", "[sms]", "sms is not a number"),
        ("launch_s = 2.1e-6", "l2 = 2.1e-6", "l2 is a table"),
    ],
)
def test_refused_with_the_fix(spec, old, new, message):
    with pytest.raises(TargetError) as error:
        load_target(spec(old, new))
    assert message in f"{error.value}\n"
    assert error.value.fix


def test_what_is_wrong_in_the_base_is_not_blamed_on_the_file(spec):
    spec("launch_s = 2.1e-6", "launch_s = 2.1", "broken.toml")
    with pytest.raises(TargetError) as error:
        load_target(spec('base = "a100-pcie"', 'base = "./broken.toml"'))
    assert error.value.where == "broken.toml:launch_s"


def test_two_files_cannot_be_each_others_base(spec):
    spec('base = "a100-pcie"', 'base = "./b.toml"', "a.toml")
    spec('base = "a100-pcie"', 'base = "./a.toml"', "b.toml")
    with pytest.raises(TargetError, match="cannot be its own base"):
        load_target("./a.toml")


def test_a_cpu_is_a_target():
    cpu = load_target("cpu")
    assert cpu.is_cpu and not load_target("a100").is_cpu
    assert cpu.flops_per_s.vector["f32"] == 8 * 16 * 2 * 3.5e9


@pytest.mark.parametrize("point", ["x", "i=many", "i=-1", "i=1e400", "i=1  bytes=2", ""])
def test_points_measured_are_numbers(spec, point):
    near = f'[local."map f32"]\n"{point}" = 1.1\n\n[sources]\nlocal = "calibrated"'
    with pytest.raises(TargetError, match="must give the sizes of a kernel"):
        load_target(spec("[sources]", near))


def test_a_base_has_no_numbers_changed(spec):
    with pytest.raises(TargetError, match="the base of a target must be an unchanged"):
        load_target(spec('base = "a100-pcie"', 'base = "a100-pcie+sms=98"'))


def test_bases_on_bases_have_a_bound(tmp_path: Path):
    for i in range(1200):
        (tmp_path / f"t{i}.toml").write_text(f'base = "t{i + 1}.toml"\nname = "t{i}"\n')
    (tmp_path / "t1200.toml").write_text('base = "a100"\nname = "t1200"\n')
    with pytest.raises(TargetError, match="there are too many levels of bases"):
        load_target(str(tmp_path / "t0.toml"))
    assert load_target(str(tmp_path / "t1190.toml")).base == "a100-sxm-40gb"


ENDS = '[backtest.stream]\nlow = 0.8\nhigh = 1.3\n\n[sources]\nbacktest = "calibrated"'


def test_a_backtest_is_a_field_like_any_other(spec, tmp_path: Path):
    mine = load_target(spec("[sources]", ENDS))
    assert mine.backtest == {"stream.low": 0.8, "stream.high": 1.3}
    assert mine.source("backtest.stream.low") == "calibrated"
    assert {r.field: r.value for r in mine.rows()}["backtest.stream.high"] == 1.3
    (tmp_path / "again.toml").write_text(dump_target(mine), encoding="utf-8")
    assert load_target(str(tmp_path / "again.toml")).backtest == mine.backtest


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("high = 1.3\n", "", "backtest.stream has two ends, low and high"),
        ("high", "top", "backtest.stream has two ends, low and high"),
        ("0.8", "1.1", "backtest.stream.low is on the wrong side of 1"),
        ("1.3", "0.9", "backtest.stream.high is on the wrong side of 1"),
        ("1.3", "1e5", "backtest.stream.high is out of range"),
        ("1.3", '"1.3"', "backtest.stream.high is not a number"),
        ("[backtest.stream]", "[backtest]", "backtest.low is a table"),
        ('backtest = "calibrated"', "", "backtest.stream.low has no source"),
    ],
)
def test_a_backtest_is_checked(spec, old: str, new: str, message: str):
    assert ENDS.count(old) == 1
    with pytest.raises(TargetError) as error:
        load_target(spec("[sources]", ENDS.replace(old, new)))
    assert message in str(error.value) and error.value.fix
