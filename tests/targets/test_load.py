"""Spec files in, targets out; everything else refused with the fix."""

import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuir.ir.errors import PluginError, TargetError
from gpuir.ir.types import DTYPES
from gpuir.targets import load
from gpuir.targets import spec as spec_files
from gpuir.targets.load import aliases, dump_target, load_target, target_names, target_of
from gpuir.targets.spec import number_text, slug, spec_folder

MINE = """\
name = "mine"
vendor = "NVIDIA"
arch = "Ampere"
sms = 10
clock_hz = 1e9
launch_s = 4e-6

[flops_per_s]
vector = { f32 = 2.56e12 }
tensor = { f16 = 10e12 }

[dram]
kind = "GDDR6"
bytes = 8_589_934_592
bytes_per_s = 200e9

[l2]
bytes = 2_097_152
bytes_per_s = 640e9

[sm]
fp32_lanes = 128
registers = 65536
smem_bytes = 102400
smem_bytes_per_block = 101376
threads = 1536
blocks = 16
warp = 32

[sources]
"sms, clock_hz, flops_per_s, dram, l2, sm" = "its data sheet"
launch_s = "assumed"
"""


# ---- names


def test_96_gpus_and_4_cpus_are_known():
    assert len(target_names()) == 96 + 4
    assert {"a100-sxm-40gb", "h100-sxm-80gb", "l4", "t4", "mi300x"} <= set(target_names())


@pytest.mark.parametrize("name", target_names())
def test_a_shipped_spec_loads_and_is_in_canonical_form(name):
    """What it says is what `dump_target` writes: one order, one style, no number lost."""
    (path,) = spec_folder().glob(f"[cg]*pus/{name}.toml")
    target = load_target(name)
    assert target.name == name
    assert target.title
    assert dump_target(target) == path.read_text(encoding="utf-8")


def test_no_alias_means_two_gpus():
    listed = [a for name in target_names() for a in load_target(name).aliases]
    listed += [slug(load_target(name).title) for name in target_names()]
    listed = [name for name in listed if name not in target_names()]
    assert len(listed) == len(set(listed)) == len(aliases())


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("a100", "a100-sxm-40gb"),
        ("a100-80gb", "a100-sxm-80gb"),
        ("a100-pcie", "a100-pcie-40gb"),
        ("h100", "h100-sxm-80gb"),
        ("h100-sxm", "h100-sxm-80gb"),
        ("v100", "v100-sxm-16gb"),
        ("A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA_A100-PCIE-40GB", "a100-pcie-40gb"),  # as a driver or a table spells it
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla_V100-PCIE-32GB", "v100-pcie-32gb"),
        ("AMD Instinct MI210", "mi210"),
    ],
)
def test_other_names(name, target):
    assert load_target(name).name == target


def test_the_aliases_in_the_docs_are_the_aliases():
    docs = (Path(__file__).parents[2] / "docs" / "guide" / "targets.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\S+)` \| `(\S+)` \|", docs, re.M)
    assert len(rows) > 5
    assert dict(rows) == {alias: aliases()[alias] for alias, _ in rows}


def test_a_wrong_name_gets_the_nearest():
    with pytest.raises(TargetError) as error:
        load_target("h10")
    assert str(error.value).startswith("no target is called 'h10'\n  fix:      did you mean h100")


def test_a_name_like_no_other():
    with pytest.raises(TargetError) as error:
        load_target("zzz")
    assert "`gpuir targets` lists the names" in str(error.value)


def test_the_specs_are_found_in_an_installed_package_and_in_a_checkout(tmp_path, monkeypatch):
    (tmp_path / "gpuir" / "targets").mkdir(parents=True)
    monkeypatch.setattr(spec_files, "__file__", str(tmp_path / "gpuir" / "targets" / "spec.py"))
    assert spec_folder() == tmp_path / "specs"
    (tmp_path / "gpuir" / "specs").mkdir()
    assert spec_folder() == tmp_path / "gpuir" / "specs"


def test_importing_the_room_reads_no_toml():
    code = "import sys, gpuir.targets.load as _; print({'tomllib', 'msgspec'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "set()\n"


# ---- plug-ins


def where_mine_is():
    return Path("mine.toml")


def a_number():
    return 4


def broken():
    raise KeyError("acme")


def plugin(monkeypatch, value):
    point = EntryPoint("acme-x1", value, "gpuir.targets")
    monkeypatch.setattr(load, "installed", lambda group: {"acme-x1": point})
    monkeypatch.setitem(sys.modules, "acme", sys.modules[__name__])


def test_a_plugin_gives_a_path_or_a_function_for_one(spec, monkeypatch):
    spec()
    monkeypatch.setitem(globals(), "PATH", "mine.toml")
    for value in ("acme:PATH", "acme:where_mine_is"):
        plugin(monkeypatch, value)
        assert "acme-x1" in target_names()
        assert load_target("acme-x1").name == "mine"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "acme:nothing",
            "entry point acme-x1 = acme:nothing: the target 'acme-x1' cannot be loaded",
        ),
        (
            "acme:a_number",
            "entry point acme-x1 = acme:a_number: the target 'acme-x1' is not a spec file",
        ),
        ("acme:broken", ": the target 'acme-x1' failed"),
    ],
)
def test_a_broken_plugin_is_named(monkeypatch, value, message):
    plugin(monkeypatch, value)
    with pytest.raises(PluginError) as error:
        load_target("acme-x1")
    assert message.format("'acme-x1'") in str(error.value)


def test_a_plugin_does_not_replace_a_built_in_target(monkeypatch):
    point = EntryPoint("a100", "nowhere:PATH", "gpuir.targets")
    monkeypatch.setattr(load, "installed", lambda group: {"a100": point})
    assert load_target("a100").name == "a100-sxm-40gb"


# ---- files


def test_a_file_of_ones_own(spec):
    target = load_target(spec())
    assert (target.name, target.sms, target.flops_per_s.tensor["f16"]) == ("mine", 10, 10e12)
    assert target.assumptions == ("launch_s: assumed",)
    assert target.link is None


def test_what_dump_writes_loads_again(spec, tmp_path):
    notes = 'notes = "a \\"quote\\", a \\\\ and a tab\\t"\nname = "mine"'
    target = load_target(spec('name = "mine"', notes))
    (tmp_path / "again.toml").write_text(dump_target(target), encoding="utf-8")
    assert load_target("./again.toml") == target


REFUSED = [
    pytest.param(
        "sms = 10",
        "smz = 10",
        """\
mine.toml:smz: no such field: smz
  fix:      did you mean sm, sms?""",
        id="unknown field",
    ),
    pytest.param(
        "warp = 32",
        "wrap = 32",
        """\
mine.toml:sm.wrap: no such field: sm.wrap
  fix:      did you mean warp?""",
        id="unknown field of a table",
    ),
    pytest.param(
        "warp = 32",
        "",
        """\
mine.toml:sm.warp: sm.warp is missing
  expected: a whole number from 1 to 1024
  fix:      add sm.warp, with its source under [sources]""",
        id="missing field",
    ),
    pytest.param(
        "[l2]\nbytes = 2_097_152\nbytes_per_s = 640e9",
        "",
        """\
mine.toml:l2: l2 is missing
  expected: a table
  fix:      add l2, with its source under [sources]""",
        id="missing table",
    ),
    pytest.param(
        "vector = { f32 = 2.56e12 }",
        "vector = { f16 = 2.56e12 }",
        """\
mine.toml:flops_per_s.vector.f32: flops_per_s.vector.f32 is missing
  expected: flop/s; gpuir uses this number for all rates that are missing
  fix:      add it under [flops_per_s.vector], with its source""",
        id="no f32 rate",
    ),
    pytest.param(
        "sms, clock_hz, flops_per_s, dram",
        "sms, clock_hz, flops_per_s.vector, dram",
        """\
mine.toml:flops_per_s.tensor.f16: flops_per_s.tensor.f16 has no source
  fix:      add "flops_per_s.tensor.f16" = "..." under [sources]: a document, or `assumed: why`""",
        id="no source",
    ),
    pytest.param(
        'launch_s = "assumed"',
        'launch_s = " "',
        """\
mine.toml:sources.launch_s: the source of launch_s must be text
  found:    ' '
  fix:      write the name of a document, or `assumed: why`""",
        id="empty source",
    ),
    pytest.param(
        'launch_s = "assumed"',
        'lunch_s = "assumed"',
        """\
mine.toml:sources.lunch_s: [sources] has an entry for lunch_s, which is not a field
  fix:      did you mean launch_s?""",
        id="source of nothing",
    ),
    pytest.param(
        'launch_s = "assumed"',
        'launch_s = "assumed"\ndram.bytes = "a rumour"',
        """\
mine.toml:sources.dram: the source of dram must be text
  found:    {'bytes': 'a rumour'}
  fix:      quote the path: "dram.bytes" = "...\"""",
        id="unquoted path",
    ),
    pytest.param(
        'launch_s = "assumed"',
        '"launch_s, sms" = "assumed"',
        """\
mine.toml:sources.sms: [sources] has two entries for sms
  found:    'its data sheet'
            'assumed'
  fix:      leave one""",
        id="two sources",
    ),
    pytest.param(
        "clock_hz = 1e9",
        "clock_hz = 1000",
        """\
mine.toml:clock_hz: clock_hz is out of range
  expected: a number from 10e6 to 100e9 Hz
  found:    1000
  fix:      values are in SI units: Hz, bytes, bytes/s, flop/s, s, W""",
        id="MHz",
    ),
    pytest.param(
        "bytes_per_s = 200e9",
        "bytes_per_s = 200",
        """\
mine.toml:dram.bytes_per_s: dram.bytes_per_s is out of range
  expected: a number from 100e6 to 1e15 bytes/s
  found:    200
  fix:      values are in SI units: Hz, bytes, bytes/s, flop/s, s, W""",
        id="GB per second",
    ),
    pytest.param(
        "f32 = 2.56e12",
        "f32 = 2560e6",
        """\
mine.toml:flops_per_s.vector.f32: flops_per_s.vector.f32 does not match the SMs and the clock
  expected: about 2.56e12 flop/s: sms x sm.fp32_lanes x sm.flops_per_lane_clock x clock_hz
  found:    2.56e9
  fix:      values are in SI units: Hz, bytes, bytes/s, flop/s, s, W""",
        id="GFLOPS slip",
    ),
    pytest.param(
        "f16 = 10e12",
        "f16 = 10e9",
        """\
mine.toml:flops_per_s.tensor.f16: flops_per_s.tensor.f16 does not match the f32 rate
  expected: 1/100 to 1000 times flops_per_s.vector.f32, 2.56e12
  found:    10e9
  fix:      values are in SI units: Hz, bytes, bytes/s, flop/s, s, W""",
        id="one rate in GFLOPS",
    ),
    pytest.param(
        "f16 = 10e12",
        "fp16 = 10e12",
        """\
mine.toml:flops_per_s.tensor.fp16: no such dtype: fp16
  fix:      did you mean f16, bf16, u16?""",
        id="unknown dtype",
    ),
    pytest.param(
        "sms = 10",
        "sms = -10",
        """\
mine.toml:sms: sms is out of range
  expected: a whole number from 1 to 65536
  found:    -10
  fix:      look the number up again""",
        id="negative",
    ),
    pytest.param(
        "bytes_per_s = 640e9",
        "bytes_per_s = nan",
        """\
mine.toml:l2.bytes_per_s: l2.bytes_per_s is out of range
  expected: a number from 100e6 to 1e15 bytes/s
  found:    nan
  fix:      look the number up again""",
        id="NaN",
    ),
    pytest.param(
        "sms = 10",
        "sms = 10.5",
        """\
mine.toml:sms: sms is not a whole number
  expected: a whole number from 1 to 65536
  found:    10.5
  fix:      round it""",
        id="half an SM",
    ),
    pytest.param(
        "sms = 10",
        "sms = true",
        """\
mine.toml:sms: sms is not a number
  expected: a whole number from 1 to 65536
  found:    True
  fix:      write a plain number in SI units, without quotes or a unit""",
        id="bool for a number",
    ),
    pytest.param(
        "clock_hz = 1e9",
        'clock_hz = "1 GHz"',
        """\
mine.toml:clock_hz: clock_hz is not a number
  expected: a number from 10e6 to 100e9 Hz
  found:    '1 GHz'
  fix:      write a plain number in SI units, without quotes or a unit""",
        id="a unit",
    ),
    pytest.param(
        "clock_hz = 1e9",
        "clock_hz = 1e9\nbase_clock_hz = 2e9",
        """\
mine.toml:base_clock_hz: base_clock_hz exceeds clock_hz
  expected: at most 1e9
  found:    2e9
  fix:      check both base_clock_hz and clock_hz; values are in SI units: Hz, bytes, bytes/s, \
flop/s, s, W""",
        id="base above boost",
    ),
    pytest.param(
        "smem_bytes_per_block = 101376",
        "smem_bytes_per_block = 102401",
        """\
mine.toml:sm.smem_bytes_per_block: sm.smem_bytes_per_block exceeds sm.smem_bytes
  expected: at most 102400
  found:    102401
  fix:      check both sm.smem_bytes_per_block and sm.smem_bytes; values are in SI units: Hz, \
bytes, bytes/s, flop/s, s, W""",
        id="block above SM",
    ),
    pytest.param(
        'arch = "Ampere"',
        "arch = 8",
        """\
mine.toml:arch: arch is not text
  expected: text
  found:    8
  fix:      write arch = "...\"""",
        id="number for text",
    ),
    pytest.param(
        'name = "mine"',
        'name = "My GPU"',
        """\
mine.toml:name: 'My GPU' cannot be the name of a target
  expected: lower-case letters, digits, `-` and `.`; a version behind an `@`
  fix:      write my-gpu""",
        id="name",
    ),
    pytest.param(
        'name = "mine"',
        'name = "mine"\naliases = "me"',
        """\
mine.toml:aliases: aliases must be a list of text
  found:    'me'
  fix:      write aliases = ["a", "b"]""",
        id="aliases",
    ),
    pytest.param(
        'name = "mine"',
        'name = "mine"\nlink = "NVLink"',
        """\
mine.toml:link: link is a table
  found:    'NVLink'
  fix:      write [link]""",
        id="text for a table",
    ),
    pytest.param(
        "sms = 10",
        "sms = ten",
        """\
mine.toml:4: not valid TOML
  found:    sms = ten
                  ^ Invalid value
  fix:      correct this line""",
        id="not TOML",
    ),
]


@pytest.mark.parametrize(("old", "new", "message"), REFUSED)
def test_refused_with_the_fix(spec, old, new, message):
    with pytest.raises(TargetError) as error:
        load_target(spec(old, new))
    assert str(error.value) == message


def test_a_file_that_is_not_there():
    with pytest.raises(TargetError) as error:
        load_target("no/such.toml")
    assert str(error.value) == (
        "no/such.toml: cannot read the spec file\n"
        "  found:    No such file or directory\n"
        "  fix:      check the path; gpuir looks up a name only if it has neither `.toml` nor `/`"
    )


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TargetError, match="not a text file"):
        load_target(tmp_path / "x.toml")


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "sms = " + "9" * 5000])
def test_a_file_made_to_break_the_parser(tmp_path, text):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(TargetError):
        load_target(tmp_path / "x.toml")


# ---- overrides


def test_one_number_set_is_that_number_alone():
    t, was = load_target("a100", {"dram.bytes_per_s": "2e12"}), load_target("a100")
    assert t.dram_bytes_per_s == 2e12
    assert (t.flops_per_s, t.l2, t.sms) == (was.flops_per_s, was.l2, was.sms)
    assert t.name == "a100-sxm-40gb+dram.bytes_per_s=2e12"
    assert t.source("dram.bytes_per_s") == "set by the user, instead of 1.555e12"
    assert t.assumptions[-1].startswith("dram.bytes_per_s: set by the user")


def test_sms_scale_the_compute_peaks_and_nothing_else():
    t, was = load_target("a100", {"sms": "54"}), load_target("a100")
    assert t.sms == 54
    assert t.flops_per_s.tensor["f16"] == 156e12
    assert t.flops_per_s.vector["f32"] == 9.75e12
    assert (t.dram, t.l2, t.clock_hz) == (was.dram, was.l2, was.clock_hz)
    assert (
        t.source("flops_per_s.tensor.f16") == "scaled by 0.5 because sms = 54 was set by the user"
    )


def test_a_clock_scales_what_runs_on_it():
    t = load_target("a100", {"clock_hz": 0.705e9})
    assert t.flops_per_s.tensor["f16"] == 156e12
    assert t.l2_bytes_per_s == pytest.approx(7.219e12 / 2)
    assert t.tensor_clock_hz == pytest.approx(1.411e9 / 2)
    assert t.base_clock_hz == 0.705e9  # was 1.095e9
    assert t.dram_bytes_per_s == 1.555e12


def test_what_the_user_sets_is_not_scaled():
    t = load_target("a100", {"sms": 216, "flops_per_s.tensor.f16": 312e12})
    assert t.flops_per_s.tensor["f16"] == 312e12
    assert t.flops_per_s.tensor["bf16"] == 624e12


def test_a_rate_that_was_not_listed_can_be_set():
    assert load_target("a100", {"flops_per_s.tensor.f8e4m3": "624e12"}).peak_rule(
        "tensor", DTYPES["f8e5m2"]
    ) == ("tensor.f8e4m3")


def test_the_name_of_a_changed_target_finds_it_again():
    t = load_target("a100", {"sms": "1.2e2", "clock_hz": 1.2345e9, "launch_s": 2.5e-6})
    assert t.name == "a100-sxm-40gb+clock_hz=1.2345e9+launch_s=2.5e-6+sms=120"
    assert load_target(t.name) == t
    assert load_target("a100+sms=9", {"sms": 7}).sms == 7


def test_a_path_may_hold_a_plus(spec, tmp_path):
    folder = tmp_path / "c++x"
    folder.mkdir()
    (folder / "mine.toml").write_text(MINE)
    assert load_target(f"{folder}/mine.toml").name == "mine"
    assert load_target(f"{folder}/mine.toml+sms=12").name == "mine+sms=12"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "smss",
            "3",
            "set:smss: no number is called smss\n  fix:      did you mean sms, sm.registers?",
        ),
        (
            "l2",
            "3",
            "set:l2: l2 is a table, not a number\n  fix:      one of l2.bytes, l2.bytes_per_s",
        ),
        (
            "name",
            "3",
            "set:name: no number is called name\n  fix:      one of sms, clock_hz,",
        ),
        (
            "sms",
            "0",
            "set:sms: sms is out of range\n  expected: a whole number from 1 to 65536\n"
            "  found:    0\n  fix:      look the number up again",
        ),
        (
            "sms",
            "many",
            "set:sms: sms is not a number\n  expected: a whole number from 1 to 65536\n"
            "  found:    'many'\n"
            "  fix:      write a plain number in SI units, without quotes or a unit",
        ),
        (
            "dram.bytes_per_s",
            "1555",
            "set:dram.bytes_per_s: dram.bytes_per_s is out of range\n"
            "  expected: a number from 100e6 to 1e15 bytes/s\n  found:    1555\n"
            "  fix:      values are in SI units: Hz, bytes, bytes/s, flop/s, s, W",
        ),
        (
            "sm.smem_bytes",
            "4096",
            "a100-sxm-40gb+sm.smem_bytes=4096:sm.smem_bytes_per_block: "
            "sm.smem_bytes_per_block exceeds sm.smem_bytes",
        ),
    ],
)
def test_an_override_refused(path, value, message):
    with pytest.raises(TargetError) as error:
        load_target("a100", {path: value})
    assert str(error.value).startswith(message)


def test_an_error_of_the_file_is_not_blamed_on_the_override(spec):
    with pytest.raises(TargetError) as error:
        load_target(spec("warp = 32", ""), {"sms": 12})
    assert error.value.where == "mine.toml:sm.warp"


# ---- properties


@given(st.floats(min_value=1e-300, max_value=1e300, allow_nan=False) | st.integers(0, 10**15))
def test_number_text_reads_back(value):
    assert float(number_text(value)) == value


_words = st.sampled_from(
    (
        *("sms", "clock_hz", "dram", "l2", "sm", "name", "aliases", "flops_per_s", "vector"),
        *("f16", "sources", "discrepancies", "bytes", "x"),
    )
)
_leaf = (
    st.integers()
    | st.floats()
    | st.booleans()
    | st.text(max_size=5)
    | st.just([])
    | st.just("mine")
)
_junk = st.recursive(_leaf, lambda inner: st.dictionaries(_words, inner, max_size=4), max_leaves=8)


@given(st.dictionaries(_words, _junk, max_size=6))
def test_junk_is_refused_as_a_target_error(raw):
    with pytest.raises(TargetError):
        target_of(raw, "junk.toml")


@given(
    st.sampled_from([line for line in MINE.splitlines() if "=" in line]),
    st.sampled_from(["0", "-1", "1e400", "inf", "nan", "true", '""', '"x"', "[]", "{}", "[[1]]"])
    | st.integers().map(str)
    | st.floats(allow_nan=False, allow_infinity=False).map(repr)
    | st.text(max_size=8),
)
def test_a_line_spoiled_gives_a_target_or_a_target_error(tmp_path, line, value):
    text = MINE.replace(line, f"{line.split(' = ')[0]} = {value}")
    (tmp_path / "x.toml").write_text(text, encoding="utf-8", errors="replace", newline="")
    try:
        load_target(tmp_path / "x.toml")
    except TargetError as error:
        assert error.fix


@given(st.binary(max_size=200))
def test_bytes_are_refused_as_a_target_error(tmp_path, data):
    (tmp_path / "x.toml").write_bytes(data)
    with pytest.raises(TargetError):
        load_target(tmp_path / "x.toml")


@given(st.text(max_size=12), st.text(max_size=8) | st.floats())
def test_any_override_gives_a_target_or_a_target_error(path, value):
    for name in (path, "sms", "flops_per_s.tensor.f16"):
        try:
            load_target("a100", {name: value})
        except TargetError as error:
            assert error.fix


def test_a_title_of_two_lines_stays_a_comment(tmp_path: Path):
    target = replace(load_target("a100"), title="one\nsms = 1")
    path = tmp_path / "mine.toml"
    path.write_text(dump_target(target))
    assert load_target(str(path)).title == target.title


@pytest.mark.parametrize("isa", ["sm_", "sm_\u00b2", "sm_x", "sm_" + "9" * 5000, "gfx\n", "x" * 33])
def test_an_instruction_set_is_a_word_with_a_number(isa: str, tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(dump_target(replace(load_target("a100"), isa=isa)))
    with pytest.raises(TargetError, match="no instruction set"):
        load_target(str(path))


@pytest.mark.parametrize("isa", ["", "sm_90a", "gfx1100", "x86-64-v2"])
def test_instruction_sets_that_are_not_shipped(isa: str, tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(dump_target(replace(load_target("a100"), isa=isa)))
    assert load_target(str(path)).isa == isa


def test_a_variant_without_a_name_of_its_own_is_called_after_its_file(tmp_path: Path):
    text = 'base = "l4"\nsms = 64\n[sources]\n"sms" = "a test"\n'
    (tmp_path / "l4-next.toml").write_text(text)
    (tmp_path / "mine.toml").write_text('name = "my-l4"\n' + text)
    (tmp_path / "copy.toml").write_text(dump_target(load_target("l4")))
    names = {}
    for file in ("l4-next.toml", "mine.toml", "copy.toml"):
        found = load_target(tmp_path / file)
        names[file] = found.name
        assert found.device == "l4"  # for what was measured of it
    assert names == {"l4-next.toml": "l4-next", "mine.toml": "my-l4", "copy.toml": "copy"}
    (tmp_path / "slice.toml").write_text('base = "a30:1g.6gb"\n')
    assert load_target(tmp_path / "slice.toml").name == "slice"
    assert load_target(f"{tmp_path / 'l4-next.toml'}+sms=70").name == "l4-next+sms=70"
