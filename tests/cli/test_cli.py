"""The command line as a user meets it: output, messages, exit status, pipes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper

import gpuir
from gpuir.cli.main import COMMANDS, main
from gpuir.cli.options import sizes
from gpuir.files import STALE_S

ROOT = Path(__file__).parent.parent.parent
ENCODER = str(ROOT / "tests/encoder.onnx")
IDEAL = ("--profile", "ideal", "--no-tf32")
DIMS = ("--dims", "batch=2,seq=16")
MLP = """graph @mlp {
  in %x: f16[8, 1024]
  param %w: f16[1024, 4096]
  param %b: f16[4096]
  %h: f16[8, 4096] = t.matmul(%x, %w) at "mlp.onnx:MatMul_3"
  %y: f16[8, 4096] = t.map("add", [%h, %b]) at "mlp.onnx:Add_4"
  %p: f16[8, 4096] = t.softmax(%y, 1) at "mlp.onnx:Softmax_5"
  out %p
}
"""
OPAQUE = """graph @odd {
  in %x: f16[8, 1024]
  %y: f16[8, 1024] = t.opaque("com.acme::Sparkle", [%x], [f16[8, 1024]]) at "odd.onnx:Sparkle_0"
  out %y
}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user is: with a small model in text, and one that holds an unknown operator."""
    (tmp_path / "mlp.gir").write_text(MLP)
    (tmp_path / "odd.gir").write_text(OPAQUE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args: str, status: int = 0, input: str | None = None) -> Result:
    done = CliRunner().invoke(main, args, input=input)
    assert done.exit_code == status, (done.output, done.exception)
    return done


def shell(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    program = f"{sys.executable} -m gpuir"
    return subprocess.run(
        ["bash", "-c", command.replace("gpuir", program, 1)],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        cwd=ROOT,
    )


# ---------------------------------------------------------------------------- analyze


def test_the_main_job():
    text = run("analyze", ENCODER, "--target", "a100", *DIMS).stdout
    assert text.startswith("encoder on NVIDIA A100-SXM4-40GB (a100-sxm-40gb)\n")
    assert "runs/s of batch 2" in text and "coverage   all" in text
    assert "\x1b[" not in text


def test_several_targets(folder: Path):
    text = run("analyze", "mlp.gir", "--target", "a100,h100-sxm,l4+sms=20").stdout
    assert "mlp on 3 targets" in text and "l4+sms=20" in text


def test_json_is_the_same_twice(folder: Path):
    args = ("analyze", "mlp.gir", "--target", "a100,l4", "--format", "json")
    first = run(*args).stdout
    assert first == run(*args).stdout
    reports = json.loads(first)["reports"]
    assert [r["target"]["name"] for r in reports] == ["a100-sxm-40gb", "l4"]


def test_settings_change_the_target(folder: Path):
    args = ("analyze", "mlp.gir", "--target", "a100", "--format", "json")
    (plain,) = json.loads(run(*args).stdout)["reports"]
    (slow,) = json.loads(run(*args, "--set", "dram.bytes_per_s=1e11").stdout)["reports"]
    assert slow["latency_s"] > plain["latency_s"]
    assert slow["target"]["name"] == "a100-sxm-40gb+dram.bytes_per_s=100e9"


PRODUCT = """graph @p {
  in %a: bf16[8192, 8192]
  in %b: bf16[8192, 8192]
  %y: bf16[8192, 8192] = t.matmul(%a, %b) at "m:y"
  out %y
}"""


def test_a_board_is_held_to_a_limit_of_power_or_to_none(folder: Path):
    Path("p.gir").write_text(PRODUCT)

    def report(*args: str) -> dict[str, Any]:
        given = ("analyze", "p.gir", "--target", "b200", "--format", "json", *args)
        (found,) = json.loads(run(*given).stdout)["reports"]
        return found

    plain, held, short = report(), report("--power-limit", "700"), report("--clocks", "burst")
    assert short["latency_s"] < plain["latency_s"] < held["latency_s"]
    assert held["target"]["name"] == "b200-sxm-180gb+tdp_w=700"
    assert report("--clocks", "sustained", "--power-limit", "1000")["latency_s"] == (
        pytest.approx(plain["latency_s"])
    )
    both = ("analyze", "p.gir", "--target", "b200", "--clocks", "burst", "--power-limit", "700")
    assert "no power limit" in run(*both, status=2).stderr


def test_analysis_goes_on_from_any_level(folder: Path):
    given = ("--target", "a100", "--profile", "ideal")
    whole = run("analyze", "mlp.gir", *given).stdout
    kernels = "fuse,legalize{triton=true}"
    for pipeline in ("", "fuse", kernels, f"{kernels},tile{{target=a100}}"):
        passes = f"canonicalize,{pipeline}".strip(",")
        run("opt", "mlp.gir", "--pipeline", passes, "--profile", "ideal", "-o", "g.gir")
        assert run("analyze", "g.gir", "--target", "a100").stdout == whole
    run("analyze", "mlp.gir", *given, "--format", "ir", "-o", "g.gir")
    assert run("analyze", "g.gir").stdout == whole


def test_profiles_are_compared_and_kept(folder: Path):
    text = run("analyze", "mlp.gir", "--target", "a100", "--profile", "ort,ideal").stdout
    assert "mlp on a100-sxm-40gb under 2 profiles" in text
    assert all(re.search(f"^{name} .*us", text, re.MULTILINE) for name in ("ort", "ideal"))
    run("analyze", "mlp.gir", "--target", "a100", "--format", "ir", "-o", "g.gir")
    head = Path("g.gir").read_text().splitlines()[0]
    assert head == "costed @mlp for a100 under ort {"
    error = run("analyze", "g.gir", "--profile", "eager", status=2).stderr
    assert (
        "@mlp has the level costed and was made under another profile" in error
        and "expected: ort" in error
    )
    error = run("analyze", "mlp.gir", "--target", "a100", "--profile", "egaer", status=2).stderr
    assert "no profile is called 'egaer'" in error and "did you mean eager, " in error


def test_a_tiled_graph_keeps_its_target(folder: Path):
    run("analyze", "mlp.gir", "--target", "a100", "--format", "ir", "-o", "g.gir")
    error = run("analyze", "g.gir", "--target", "l4", status=2).stderr
    assert (
        "@mlp has the level costed and was made for another target" in error
        and "expected: a100" in error
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("--schedule", "tiles.sched"),
            "schedule has no effect, because @mlp already has the level costed",
        ),
        (("--predictor", "roofline"), "predictor has no effect"),
        (("--tf32",), "tf32 has no effect"),
        (("--set", "sms=10"), "--set, --power-limit and --clocks need a target"),
        (("--power-limit", "300"), "--set, --power-limit and --clocks need a target"),
        (("--target", "t4", "--set", "sms=10"), "was made for another target"),
    ],
)
def test_what_comes_too_late_is_refused(folder: Path, args: tuple[str, ...], message: str):
    run("analyze", "mlp.gir", "--target", "t4", "--format", "ir", "-o", "costed.gir")
    run("analyze", "costed.gir", "--format", "schedule", "-o", "tiles.sched")
    assert message in run("analyze", "costed.gir", *args, status=2).stderr


def test_predictors(folder: Path):
    args = ("analyze", "mlp.gir", "--target", "a100")
    assert "roofline@1" in run(*args, "--predictor", "roofline").stdout
    assert "did you mean tile?" in run(*args, "--predictor", "tiel", status=2).stderr


def test_verbose_is_on_stderr(folder: Path):
    done = run("analyze", "mlp.gir", "--target", "a100", "-v")
    assert "legalize" in done.stderr and "legalize" not in done.stdout


def test_strict_refuses_what_nobody_knows(folder: Path):
    text = run("analyze", "odd.gir", "--target", "a100").stdout
    assert re.search(r"opaque +1 +100 % +\? +100 % +com.acme::Sparkle", text)
    error = run("analyze", "odd.gir", "--target", "a100", "--strict", status=2).stderr
    assert error.startswith("gpuir: odd.onnx:Sparkle_0: com.acme::Sparkle is not modelled")


# ---------------------------------------------------------------------------- schedules


def test_schedules_round_trip_and_are_checked(folder: Path):
    args = ("analyze", "mlp.gir", "--target", "a100", *IDEAL)
    run(*args, "--format", "schedule", "-o", "s.sched")
    assert run(*args, "--schedule", "s.sched").stdout == run(*args).stdout
    check = ("schedule", "check")
    found = run(*check, "s.sched", "mlp.gir", *IDEAL).stdout
    assert "2 of 2 tiles are legal" in found
    assert "2 are the library's, 0 are costed as generated kernels" in found

    text = (folder / "s.sched").read_text()
    other = re.sub(r"%y: tile\(.*\)", "%y: tile(m=32, n=64, k=64; stages=2, warps=4)", text)
    (folder / "other.sched").write_text(other)
    found = run(*args, "--schedule", "other.sched").stdout
    assert "1 kernel has a tile of the schedule that no library takes" in " ".join(found.split())
    assert re.search(r"gemm .* generated@1 ", found)
    assert "generated" not in run(*args, "--schedule", "s.sched").stdout
    found = run(*check, "other.sched", "mlp.gir", *IDEAL).stdout
    assert "1 are the library's, 1 are costed as generated kernels" in found

    bad = re.sub(r"%y: tile\(.*\)", "%y: tile(m=128, n=256, k=128; stages=5, warps=8)", text)
    (folder / "bad.sched").write_text(bad.replace("%p:", "%pp:"))
    found = run(*check, "bad.sched", "mlp.gir", *IDEAL, status=1).stdout
    assert "%y: not legal" in found and "shared memory" in found and "did you mean p?" in found
    (folder / "bad.sched").write_text(bad)
    error = run(*args, "--schedule", "bad.sched", status=2).stderr
    assert "the tile of kernel %y is not legal" in error and "shared memory" in error


def test_an_edit_changes_what_it_says(folder: Path):
    args = ("analyze", "mlp.gir", "--target", "a100", *IDEAL, "--format")
    (folder / "s.sched").write_text(
        "schedule @mlp for a100 { %y: tile(m=16, n=64, k=32; stages=2, warps=4) }\n"
    )
    text = run(*args, "ir", "--schedule", "s.sched").stdout
    assert "tile(m=16, n=64, k=32; stages=2, warps=4)" in text


# ---------------------------------------------------------------------------- explain


def test_explain(folder: Path):
    wide = ("--width", "120")  # a formula on one line
    text = run("explain", "mlp.gir", "MatMul_3", "--target", "a100", *IDEAL, *wide).stdout
    assert text.startswith("k.gemm %y on NVIDIA A100-SXM4-40GB\n")
    assert "= 2 * 1 * 8 * 4096 * 1024" in text
    lines = text.split("\n\n")[2].splitlines()
    last = next(x for x in lines if x.startswith("time "))
    (report,) = json.loads(
        run("analyze", "mlp.gir", "--target", "a100", *IDEAL, "--format", "json").stdout
    )["reports"]
    time_s = next(x for x in report["kernels"] if x["path"] == ["y"])["cost"]["time_s"]
    assert eval(last.split("=", 1)[1], {"max": max}) == pytest.approx(time_s, rel=1e-5)


def test_explain_names_every_quantity_in_full(folder: Path):
    """Whatever the width: a name that leaves no room has a line of its own."""
    given = ("explain", "mlp.gir", "MatMul_3", "--target", "a100", *IDEAL)
    g = gpuir.analyze(str(folder / "mlp.gir"), "a100", profile="ideal", tf32=False).graph
    listed = [line.name for line in gpuir.explain(g, "MatMul_3")]
    for width in (60, 80, 120):
        lines = run(*given, "--width", str(width)).stdout.splitlines()
        assert all(len(line) <= width for line in lines)
        for name in listed:
            shown = name.replace("a100-sxm-40gb: ", "gpu: ")
            assert any(line.startswith(shown) for line in lines), (width, name)


def test_explain_knows_tf32_from_the_graph(folder: Path):
    (folder / "wide.gir").write_text(MLP.replace("f16", "f32"))
    given = ("--target", "a100", "--tf32")
    run("analyze", "wide.gir", *given, "--format", "ir", "-o", "costed.gir")
    text = run("explain", "costed.gir", "MatMul_3").stdout
    assert text == run("explain", "wide.gir", "MatMul_3", *given).stdout
    assert "tensor.tf32" in text


def test_the_last_batch_counts():
    args = ("analyze", ENCODER, "--target", "t4", "--dims", "batch=1,seq=16")
    assert "of batch 2" in run(*args, "--dims", "batch=2").stdout


def test_all_targets_are_compared(folder: Path):
    text = run("analyze", "mlp.gir", "--target", "all").stdout
    assert "\nl4 " in text and "\nmi300x " in text


STEPS = """graph @steps {
  in %x: f32[5, 8, 16]
  in %h: f32[8, 16]
  param %w: f32[16, 16]
  %y: f32[5, 8, 16] = t.matmul(%x, %w) at "s.onnx:RNN"
  %last: f32[8, 16], %all: f32[5, 8, 16] = t.loop({
    in %trip: i64[]
    in %s: f32[8, 16]
    in %steps: f32[5, 8, 16]
    in %r: f32[16, 16]
    %step: f32[8, 16] = t.gather(%steps, %trip) at "s.onnx:RNN"
    %turn: f32[8, 16] = t.matmul(%s, %r) at "s.onnx:RNN"
    %sum: f32[8, 16] = t.map("add", [%step, %turn]) at "s.onnx:RNN"
    %next: f32[8, 16] = t.map("tanh", [%sum]) at "s.onnx:RNN"
    %gate: f32[8, 1] = t.reduce("max", %next, [1], keepdims=true) at "s.onnx:RNN"
    %done: f32[8, 16] = t.map("mul", [%next, %gate]) at "s.onnx:RNN"
    out %done, %done
  }, 5, [%h], captures=[%y, %w]) at "s.onnx:RNN"
  %RNN: f32[40, 16] = t.reshape(%all, [40, 16]) at "s.onnx:RNN"
  out %last, %RNN
}
"""


def test_explain_lists_the_kernels_of_a_node_with_their_sum(folder: Path):
    (folder / "steps.gir").write_text(STEPS)
    given = ("explain", "steps.gir", "RNN", "--target", "a100", *IDEAL)
    rows = run(*given).stdout.splitlines()
    assert rows[0] == "RNN on NVIDIA A100-SXM4-40GB"  # not of the view that has the same name
    (total,) = [row for row in rows if "in all" in row]
    assert total.split()[2:5] == ["100", "%", "x11"]
    short = run(*given, "--top", "1").stdout
    assert "2 more: see --top" in short and total.split()[:5] == short.splitlines()[-1].split()[:5]
    assert "k.view %RNN" in run("explain", "steps.gir", "%RNN", *given[3:]).stdout
    loop = run("explain", "steps.gir", "last", *given[3:]).stdout
    assert loop.startswith("k.loop %last") and re.search(r"x10 +in all, \d+ % of", loop)


def test_explain_of_one_kernel_has_nothing_to_bound(folder: Path):
    given = ("explain", "mlp.gir", "MatMul_3", "--target", "a100", "--top", "3")
    assert "--top is of a list" in run(*given, status=2).stderr


def test_explain_a_name_that_is_not_there(folder: Path):
    error = run("explain", "mlp.gir", "MatMul_33", "--target", "a100", status=2).stderr
    assert "no kernel has the name 'MatMul_33'" in error and "did you mean MatMul_3?" in error


# ---------------------------------------------------------------------------- opt, passes


def test_opt_prints_what_it_read(folder: Path):
    assert run("opt", "mlp.gir").stdout == MLP
    assert run("opt", "-", input=MLP).stdout == MLP


def test_print_after_is_on_stderr(folder: Path):
    done = run("opt", "mlp.gir", "--pipeline", "canonicalize,fuse", "--print-after", "all")
    assert "# after canonicalize\ngraph @mlp" in done.stderr
    assert done.stdout.startswith("fused @mlp")
    error = run("opt", "mlp.gir", "--pipeline", "fuse", "--print-after", "fues", status=2).stderr
    assert "did you mean fuse?" in error


def test_passes_say_what_they_do():
    text = run("passes").stdout
    assert re.search(r"^legalize.* +fused -> kernel$", text, re.MULTILINE)
    one = run("passes", "fuse").stdout
    assert "max_ops: int = " in one
    assert "did you mean fuse?" in run("passes", "fues", status=2).stderr


# ---------------------------------------------------------------------------- targets


def test_targets():
    assert "a100-sxm-40gb" in run("targets").stdout
    text = run("targets", "l4", "--width", "80").stdout
    assert re.search(r"dram.bytes_per_s +300.0 GB/s +\[\d+\]", text)
    assert "none doubtful" in run("targets", "--check").stdout


def test_a_doubtful_number_fails_the_check(folder: Path):
    text = run("targets", "l4", "--check", "--set", "dram.bytes_per_s=500e9", status=1).stdout
    assert re.search(r"doubtful +dram.bytes_per_s +500.0 GB/s +300.0 GB/s", text)


def test_a_spec_to_start_from(folder: Path):
    run("targets", "l4", "--format", "toml", "-o", "mine.toml")
    assert "NVIDIA L4 (mine)" in run("analyze", "mlp.gir", "--target", "./mine.toml").stdout
    assert json.loads(run("targets", "l4", "--format", "json").stdout)["targets"][0]["name"] == "l4"


# ---------------------------------------------------------------------------- modules


MODULE = """
from gpuir.cost.roofline import roofline
from dataclasses import replace
from pathlib import Path

def twice(op, tile, target):
    cost = roofline(op, tile, target)
    return replace(cost, time_s=2 * cost.time_s, by="twice@1")

def count(summaries, layout):
    return f"{summaries[0].launches}\\n"

PREDICTORS = {"twice": twice}
BACKENDS = {"count": count}
TARGETS = {"mine": Path("mine.toml").absolute()}
"""


def test_predictors_targets_and_backends_of_ones_own(folder: Path):
    (folder / "plugin.py").write_text(MODULE)
    run("targets", "l4", "--format", "toml", "-o", "mine.toml")
    args = ("analyze", "mlp.gir", "--target", "mine", "--load", "plugin.py", *IDEAL)
    assert "twice@1" in run(*args, "--predictor", "twice").stdout
    assert run(*args, "--format", "count").stdout == "2\n"
    passes = "fuse,legalize,tile{target=t4},annotate{predictor=twice}"
    assert "twice@1" in run("opt", "mlp.gir", "--load", "plugin.py", "--pipeline", passes).stdout
    tiled = "fuse,legalize,tile{target=mine}"
    assert "for " in run("opt", "mlp.gir", "--load", "plugin.py", "--pipeline", tiled).stdout
    changed = run("analyze", "mlp.gir", "--target", "mine+sms=3", "--load", "plugin.py").stdout
    assert "(mine+sms=3)" in changed
    lines = run("explain", "mlp.gir", "MatMul_3", *args[2:], "--predictor", "twice").stdout
    assert "as twice@1 says" in lines
    assert "no predictor 'twice'" in run("opt", "mlp.gir", "--pipeline", passes, status=2).stderr


def test_a_module_that_adds_nothing_or_does_not_load(folder: Path):
    (folder / "empty.py").write_text("x = 1\n")
    (folder / "broken.py").write_text("1 / 0\n")
    args = ("analyze", "mlp.gir", "--target", "a100", "--load")
    assert "adds nothing" in run(*args, "empty.py", status=2).stderr
    assert "ZeroDivisionError" in run(*args, "broken.py", status=2).stderr
    assert "no file nope.py" in run(*args, "nope.py", status=2).stderr
    assert "No module named 'nope'" in run(*args, "nope", status=2).stderr


BROKEN = """
from dataclasses import dataclass, replace
from gpuir.ir.graph import Graph, Level
from gpuir.ir.notes import Cost
from gpuir.passes.manager import Pass

def made(name, work, gives=Level.graph):
    fields = {"name": name, "takes": Level.graph, "gives": gives, "run": lambda self, g: work(g)}
    return dataclass(frozen=True)(type(name, (Pass,), {**fields, "__module__": __name__}))

@dataclass(frozen=True)
class Count(Pass):
    name = "count"
    n: int

PASSES = {
    "cuts": made("cuts", lambda g: replace(g, nodes=g.nodes[1:])),
    "raises": made("raises", lambda g: 1 / 0),
    "nothing": made("nothing", lambda g: None),
    "lies": made("lies", lambda g: g, Level.kernel),
    "count": Count,
}
PREDICTORS = {
    "odd": lambda op, tile, target: Cost(float("nan"), "memory", "odd@1", ()),
    "none": lambda op, tile, target: None,
    "one": lambda op: None,
}
BACKENDS = {"none": lambda summaries, layout: None, "raises": lambda summaries, layout: 1 / 0}
"""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("opt", "--pipeline", "cuts"), "this is a bug in the pass 'cuts', in the module broken"),
        (("opt", "--pipeline", "raises"), "the pass 'raises' failed\n  found:    ZeroDivision"),
        (("opt", "--pipeline", "nothing"), "the pass 'nothing' returns no graph"),
        (("opt", "--pipeline", "lies"), "expected: a graph of level kernel"),
        (("opt", "--pipeline", "count{n=x}"), "option 'n' has the wrong type"),
        (("analyze", "--target", "t4", "--predictor", "odd"), "time_s is nan"),
        (("analyze", "--target", "t4", "--predictor", "none"), "returns no cost"),
        (("analyze", "--target", "t4", "--predictor", "one"), "takes 1 positional argument"),
        (("analyze", "--target", "t4", "--format", "none"), "the format 'none' returns no text"),
        (("analyze", "--target", "t4", "--format", "raises"), "the format 'raises' failed"),
    ],
)
def test_what_a_module_breaks_is_its_own(folder: Path, args: tuple[str, ...], message: str):
    (folder / "broken.py").write_text(BROKEN)
    error = run(*args, "mlp.gir", "--load", "broken.py", status=2).stderr
    assert message in error and "please report" not in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("PASSES = {'mine': 3}", "expected: a subclass of gpuir.passes.manager.Pass"),
        ("PREDICTORS = {'tile': print}", "gpuir already has something with this name"),
        ("TARGETS = {'mine': 3}", "the path of a spec file"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
    ],
)
def test_a_table_holds_what_it_should(folder: Path, text: str, message: str):
    (folder / "tables.py").write_text(text)
    assert message in run("passes", "--load", "tables.py", status=2).stderr


@pytest.mark.slow
def test_a_broken_plugin_spoils_only_itself(folder: Path):
    info = folder / "site" / "bad-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[gpuir.passes]\nbad = raising:X\n[gpuir.targets]\nbad = raising:X\n"
        "[gpuir.profiles]\nbad = raising:X\n"
    )
    (folder / "site" / "raising.py").write_text("raise RuntimeError('at import')\n")
    shown = {"passes": "legalize", "profiles": "tensorrt"}
    for command in ("targets", "passes", "profiles", f"analyze {folder}/mlp.gir --target all"):
        done = shell(f"gpuir {command}", PYTHONPATH=str(folder / "site"))
        assert done.returncode == 0
        assert shown.get(command, "mi300x") in done.stdout
        assert "warning: entry point bad = raising:X" in done.stderr
    done = shell("gpuir passes bad", PYTHONPATH=str(folder / "site"))
    assert done.returncode == 2 and "found:    RuntimeError: at import" in done.stderr


# ---------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nope.gir", "--target", "a100"), "nope.gir: cannot read the file"),
        (("nope.onnx", "--target", "a100"), "nope.onnx: no such file"),
        (("mlp.gir",), "no target given"),
        (("mlp.gir", "--target", "a1000"), "did you mean a100"),
        (("mlp.gir", "--target", "a100+sms"), "write a changed number with a value: a100+sms=120"),
        (("mlp.gir", "--target", "a100", "--pipeline", "fuse{max_ops=0}"), "1 to 2147483647"),
        (("mlp.gir", "--target", "a100", "--dims", "n=2"), "dims cannot be given for IR text"),
        (("mlp.gir", "--target", "a100", "--dims", "n"), "'n' is not like NAME=8,NAME=128"),
        (("mlp.gir", "--target", "a100", "--input", "x=1x-3"), "is not like NAME=1x3x224x224"),
        (("mlp.gir", "--target", "a100", "--format", "texd"), "did you mean text"),
        (("mlp.gir", "--target", "a100", "--predictor", "tile@77"), "no predictor 'tile@77'"),
        (("mlp.gir", "--target", "a100", "--set", "smss=1"), "did you mean"),
        (("mlp.gir", "--target", "a100", "--schedule", "no.sched"), "no.sched"),
        (("mlp.gir", "--target", "a100", "-o", "no/such/folder"), "no such folder to write to"),
        (("mlp.gir", "--target", "a100", "--pipeline", "fuse,fuse{"), "<pipeline>:1:"),
        (("mlp.gir", "--target", "a100", "--pipeline", "legalize"), "needs a graph of level fused"),
        (("mlp.gir", "--target", "a100,l4", "--format", "ir"), "one target under one profile"),
    ],
)
def test_wrong_input_ends_with_2_and_a_message(folder: Path, args: tuple[str, ...], message: str):
    done = run("analyze", *args, status=2)
    assert message in done.stderr and done.stdout == ""
    assert "Traceback" not in done.stderr


def test_broken_text_has_a_caret(folder: Path):
    (folder / "bad.gir").write_text(MLP.replace("t.matmul", "t.matmull"))
    error = run("analyze", "bad.gir", "--target", "a100", status=2).stderr
    assert "bad.gir:5:" in error and "^" in error and "did you mean t.matmul" in error


def test_text_that_breaks_a_promise_is_the_users(folder: Path):
    (folder / "bad.gir").write_text(MLP.replace(' at "mlp.onnx:Add_4"', ""))
    assert "no location" in run("opt", "bad.gir", status=2).stderr


def test_unknown_commands_get_the_nearest():
    assert "did you mean analyze" in run("analize", status=2).stderr


def test_our_own_bugs_are_said_to_be_ours(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("oops")

    monkeypatch.setattr(gpuir, "load", broken)
    error = run("opt", "mlp.gir", status=70).stderr
    assert "internal error: RuntimeError: oops" in error and "report" in error
    assert "Traceback" not in error
    with pytest.raises(RuntimeError):
        CliRunner().invoke(main, ["--debug", "opt", "mlp.gir"], catch_exceptions=False)


def test_an_interrupt_is_a_line(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpuir, "load", interrupted)
    assert run("opt", "mlp.gir", status=130).output == "gpuir: interrupted\n"


# ---------------------------------------------------------------------------- files and pipes


def test_a_file_is_written_whole_or_not_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch):
    out = folder / "out.gir"
    out.write_text("before")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert "No space left" in run("opt", "mlp.gir", "-o", "out.gir", status=2).stderr
    assert out.read_text() == "before"
    assert sorted(p.name for p in folder.iterdir()) == ["mlp.gir", "odd.gir", "out.gir"]


def test_only_a_file_is_replaced(folder: Path):
    """Root would lose its /dev/null."""
    os.mkfifo("pipe")
    done = shell(f"gpuir opt {folder}/mlp.gir -o {folder}/pipe & timeout 20 cat {folder}/pipe")
    assert done.stdout.startswith("graph @mlp") and Path("pipe").is_fifo()
    assert "Is a directory" in run("opt", "mlp.gir", "-o", ".", status=2).stderr
    assert "Is a directory" in run("opt", "mlp.gir", "-o", "/", status=2).stderr


def test_a_file_keeps_its_permissions_and_a_link_its_end(folder: Path):
    Path("real.gir").write_text("")
    Path("real.gir").chmod(0o600)
    Path("link.gir").symlink_to("real.gir")
    run("opt", "mlp.gir", "-o", "link.gir")
    assert Path("link.gir").is_symlink() and Path("real.gir").read_text().startswith("graph")
    assert Path("real.gir").stat().st_mode & 0o777 == 0o600
    long = "n" * 250
    run("opt", "mlp.gir", "-o", long)
    assert Path(long).is_file()


def test_no_file_without_names_then_the_part_has_one(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    for name, age_s in ((".gpuir.1.part", 2 * STALE_S), (".gpuir.2.part", 0)):
        Path(name).write_text("left by a process that was killed, or still written")
        os.utime(name, (time.time() - age_s,) * 2)
    run("opt", "mlp.gir", "-o", "out.gir")
    assert Path("out.gir").read_text() == MLP
    names = [".gpuir.2.part", "mlp.gir", "odd.gir", "out.gir"]
    assert sorted(p.name for p in folder.iterdir()) == names


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="no files without names here")
def test_a_kill_while_writing_leaves_nothing(folder: Path):
    code = (
        "import os, signal, gpuir.files as files\n"
        "files._link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.write_whole('mlp.gir', b'x' * 100_000)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert Path("mlp.gir").read_text() == MLP
    assert sorted(p.name for p in folder.iterdir()) == ["mlp.gir", "odd.gir"]


def linked(folder: Path, name: str) -> list[str]:
    """A file's name, and what else leads to it."""
    (folder / "soft").symlink_to(name)
    (folder / "hard").hardlink_to(name)
    return [name, f"./{name}", str(folder / name), "soft", "hard"]


def test_a_result_takes_the_place_of_no_input(folder: Path):
    for out in linked(folder, "mlp.gir"):
        done = run("analyze", "mlp.gir", "--target", "t4", "-o", out, status=2)
        assert "the output file is also an input" in done.stderr
    assert Path("mlp.gir").read_text() == MLP


@pytest.mark.parametrize("name", ["plug", "plug.py", "./plug.py"])
def test_nor_of_a_module_that_is_loaded(folder: Path, name: str):
    text = "PASSES = {}\n"
    (folder / "plug.py").write_text(text)
    sys.modules.pop("plug", None)
    (folder / "hard").hardlink_to("plug.py")
    done = run("opt", "mlp.gir", "--load", name, "-o", "hard", status=2)
    assert "the output file is also an input" in done.stderr
    assert Path("plug.py").read_text() == text


def test_two_results_are_not_written_to_one_file(folder: Path):
    asked = ("sweep", ENCODER, "--target", "a100", "--batch", "1", "--dims", "seq=8")
    done = run(*asked, "--plot", "a.svg", "-o", "./a.svg", status=2)
    assert "two results would be written to one file" in done.stderr
    assert not Path("a.svg").exists()


@pytest.mark.parametrize("number", ["nan", "inf", "1e400", "-nan"])
@pytest.mark.parametrize(
    "asked",
    [
        ("analyze", "mlp.gir", "--target", "a100", "--expert-skew"),
        ("collect", "--dry-run", "--target", "cpu", "--budget-s"),
        ("calibrate", "--target", "cpu", "--budget-s"),
    ],
    ids=lambda words: words[0],
)
def test_numbers_are_finite(folder: Path, asked: tuple[str, ...], number: str):
    """click's ranges take nan."""
    assert "Invalid value" in run(*asked, number, status=2).stderr


def test_nor_of_what_belongs_to_an_input(folder: Path):
    """Schedules, targets, their bases, profiles, configs, external data, by whatever name."""
    Path("base.toml").write_text(run("targets", "t4", "--format", "toml").stdout)
    Path("mine.toml").write_text('base = "./base.toml"\nname = "mine"\n')
    run("analyze", "mlp.gir", "--target", "mine.toml", "--format", "schedule", "-o", "a.sched")
    given = ("analyze", "mlp.gir", "--target", "mine.toml", "--schedule", "a.sched")
    tensor = TensorProto(name="w", data_type=1, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    Path("w.bin").write_bytes(bytes(64))
    x = helper.make_tensor_value_info("x", 1, [2, 4])
    y = helper.make_tensor_value_info("y", 1, [2, 4])
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    graph = helper.make_graph(nodes, "g", [x], [y], [tensor])
    Path("m.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    for args, outs in (
        (given, ("a.sched", "mine.toml", "base.toml", *linked(folder, "base.toml"))),
        (("analyze", "m.onnx", "--target", "t4"), ("w.bin", "m.onnx")),
        (("targets", "mine.toml"), ("base.toml", "mine.toml")),
    ):
        for out in outs:
            before = Path(out).read_bytes()
            done = run(*args, "-o", out, status=2)
            assert "the output file is also an input" in done.stderr
            assert Path(out).read_bytes() == before


def test_reading_a_file_does_not_forbid_writing_it_later(folder: Path):
    """One command's inputs are not the next one's."""
    run("opt", "mlp.gir", "-o", "out.gir")
    run("opt", "out.gir", "-o", "again.gir")
    run("opt", "mlp.gir", "-o", "out.gir")


@pytest.mark.parametrize("name", ["n" * 300, "loop", "loop/x", "d/" * 2500 + "x"])
@pytest.mark.parametrize(
    "args",
    [
        ("analyze", "{}", "--target", "t4"),
        ("analyze", "{}.pt2", "--target", "t4"),
        ("analyze", "{}/m.gir", "--target", "t4"),
        ("analyze", "hf:{}", "--target", "t4"),
        ("analyze", "mlp.gir", "--target", "{}.toml"),
        ("analyze", "mlp.gir", "--target", "t4", "--profile", "{}.toml"),
        ("analyze", "mlp.gir", "--target", "t4", "--schedule", "{}"),
        ("analyze", "mlp.gir", "--target", "t4", "--load", "{}.py"),
        ("analyze", "mlp.gir", "--target", "t4", "-o", "{}"),
        ("advise", "{}", "--target", "t4"),
        ("sweep", "mlp.gir", "--target", "t4", "--batch", "1", "--plot", "{}.png"),
        ("diff", "{}.json", "mlp.gir"),
        ("eval", "kernels", "{}"),
        ("eval", "models", "{}"),
        ("collect", "--target", "cpu", "--dry-run", "-o", "{}"),
        ("collect", "--target", "cpu", "--dry-run", "--plan", "{}"),
        ("calibrate", "--target", "{}.toml", "--table", "{}", "-o", "{}"),
        ("fit", "{}", "-o", "{}"),
        ("targets", "{}.toml"),
        ("profiles", "{}.toml"),
    ],
)
def test_a_path_that_cannot_be_is_the_users(folder: Path, args: tuple[str, ...], name: str):
    Path("loop").symlink_to("loop")
    for suffix in (".png", ".toml", ".json", ".pt2", ".py"):
        Path(f"loop{suffix}").symlink_to(f"loop{suffix}")
    run(*(a.replace("{}", name) for a in args), status=2)


@pytest.mark.slow
@pytest.mark.parametrize("args", [("analyze", "mlp.gir", "--target", "t4"), ("targets", "--check")])
def test_closed_streams_are_no_bug(folder: Path, args: tuple[str, ...]):
    command = f"cd {folder}; gpuir {' '.join(args)}"
    assert "there is no stdout" in (done := shell(f"{command} >&-")).stderr
    assert done.returncode == 2
    assert shell(f"{command} >&- 2>&-").returncode == 2
    assert shell(f"{command} 2>&-").returncode == 0


def test_a_help_text_on_a_full_disk_is_no_bug():
    done = shell("gpuir analyze --help > /dev/full")
    assert "cannot write to stdout" in done.stderr and done.returncode == 2


@pytest.mark.parametrize(
    "args",
    [
        ("sweep", "--batch", f"1..{10**26}"),
        ("sweep", "--batch", f"1..{'9' * 5000}"),
        ("sweep", "--batch", "1", "--dim", f"seq=1..{10**26}"),
        ("analyze", "--dims", f"batch={10**26}"),
        ("analyze", "--input", f"x={2**62}x8"),
        ("largest", "--dim", "batch", "--max", str(10**26)),
    ],
)
def test_an_absurd_size_is_refused_with_the_limit(args: tuple[str, ...]):
    command, *rest = args
    done = run(command, ENCODER, "--target", "t4", *rest, status=2)
    assert re.search(r"1,?099,?511,?627,?776", done.stderr) and len(done.stderr) < 500


def test_a_sweep_of_too_many_runs_is_refused_with_the_limit():
    many = ",".join(map(str, range(1, 400)))
    args = ("--batch", many, "--dim", f"seq={many}")
    done = run("sweep", ENCODER, "--target", "t4", *args, status=2)
    assert "at most 100,000" in done.stderr and "159,201" in done.stderr


def test_ranges_are_doubled_up_to_their_end():
    assert sizes("1,2,4..100") == (1, 2, 4, 8, 16, 32, 64, 100)
    assert sizes("3..24,24,7") == (3, 6, 12, 24, 7)


def test_a_reader_that_leaves_is_no_error():
    done = shell("gpuir targets --format json | true; echo ${PIPESTATUS[0]}")
    assert done.stderr == "" and done.stdout == "141\n"


def test_text_comes_from_stdin_too(folder: Path):
    text = run("opt", "mlp.gir", "--pipeline", "fuse,legalize").stdout
    assert "mlp on Tesla T4" in run("analyze", "-", "--target", "t4", input=text).stdout
    assert run("opt", "-", input="\ufeff" + MLP).stdout == MLP  # from Windows
    assert "<stdin>:1:1" in run("opt", "-", input="graf", status=2).stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("gpuir opt {}/mlp.gir >&-", "there is no stdout"),
        ("gpuir opt - <&-", "there is no stdin"),
        ("gpuir opt {}/mlp.gir >/dev/full", "cannot write to stdout\n  found:    No space"),
        ("gpuir --help >/dev/full", "cannot write to stdout: No space"),
    ],
)
def test_streams_that_are_closed_or_full(folder: Path, command: str, message: str):
    done = shell(command.format(folder))
    assert done.returncode == 2 and message in done.stderr
    assert "Traceback" not in done.stderr and "bug" not in done.stderr


def test_names_in_messages_cannot_move_the_cursor(folder: Path):
    (folder / "evil.gir").write_text(MLP.replace("%b", '%"\\u001b[2J\x9b2J\u202e"', 1))
    error = run("opt", "evil.gir", status=2).stderr
    assert (
        "%b is used before it is defined" in error and "\x9b" not in error and "\u202e" not in error
    )


def test_a_terminal_that_cannot_show_every_letter():
    done = shell("gpuir targets --width 60", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr


def test_help_loads_no_numpy():
    code = "import sys; import gpuir.cli.main as m; m.main(['--help'], standalone_mode=False);"
    code += "print(*(x for x in ('numpy', 'onnx', 'lark', 'rich') if x in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
    assert all(f"\n  {name} " in done.stdout for name in COMMANDS)


def test_python_names_are_there():
    assert all(getattr(gpuir, name) is not None for name in gpuir.__all__)
    assert gpuir.__version__ and set(gpuir.__all__) <= set(dir(gpuir))
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        gpuir.nope
