"""Published measurements, and the commands beside them, as `gpuir eval field` scores them."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("torch")

import gpuir
from gpuir.cli.main import main
from gpuir.ir.errors import UsageError
from gpuir.ir.types import f16
from validation.field import roofline, told
from validation.field_page import CAUSES, causes, page
from validation.field_rows import (
    COLUMNS,
    MORE,
    FieldExam,
    FieldResult,
    FieldRow,
    Question,
    Told,
    every_gained,
    gained,
    judged,
    read,
    score,
    tree,
    value,
)

ENCODER = Path(__file__).parents[1] / "small_encoder.onnx"
MODEL = "gpuir analyze a.onnx --target a100 --profile ort --dims"
LINE = {
    "id": "one",
    "source": "https://example.org/page",
    "gpu": "a100",
    "software": "onnxruntime",
    "dtype": "fp16",
    "generation": "Ampere",
    "regime": "launch",
    "phase": "inference",
    "measured_s": "0.001",
    "command": f"{MODEL} batch=1,seq=16",
    "model": "small",
    "shape": "b1 s16",
}
TWO = LINE | {
    "id": "two",
    "software": "vLLM",
    "measured_s": "0.02",
    "command": f"{MODEL} batch=8,seq=16 ; {LINE['command']}",
    "expr": "10*a + b",
}


def table(folder: Path, *lines: dict[str, str]) -> str:
    path = folder / "points.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*COLUMNS, *MORE))
        writer.writeheader()
        writer.writerows(lines)
    (folder / "inputs").mkdir(exist_ok=True)
    shutil.copy(ENCODER, folder / "inputs" / "a.onnx")
    return str(path)


def run(folder: Path, *args: str, lines: tuple[dict[str, str], ...] = (LINE, TWO)) -> Result:
    path = table(folder, *lines)
    given = ("eval", "field", path, "--inputs", str(folder / "inputs"), *args)
    return CliRunner().invoke(main, given)


def row(**changes: str | float) -> FieldRow:
    given = {k: v for k, v in LINE.items() if k != "measured_s"}
    return FieldRow(**{"measured_s": 1.0, **given, **changes})  # pyright: ignore[reportArgumentType]


def test_a_row_is_scored_by_what_its_commands_say(tmp_path: Path):
    done = run(tmp_path, "--jobs", "2", "--format", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    one, two = (
        gpuir.analyze(str(ENCODER), "a100", profile="ort", dims={"batch": n, "seq": 16})
        for n in (1, 8)
    )
    first, second = found["cases"]
    assert first["predicted_s"] == pytest.approx(one.latency_s, rel=1e-12)
    assert first["interval_s"] == pytest.approx(one.interval, rel=1e-12)
    assert first["error"] == pytest.approx(100 * (one.latency_s / 0.001 - 1))
    assert second["predicted_s"] == pytest.approx(10 * two.latency_s + one.latency_s, rel=1e-12)
    ends = [10 * a + b for a, b in zip(two.interval or (), one.interval or (), strict=True)]
    assert second["interval_s"] == pytest.approx(ends, rel=1e-12)
    target = gpuir.load_target("a100")
    roofs = [
        max(x.flops / target.peak("tensor", f16), x.bytes / target.dram_bytes_per_s)
        for x in (two, one)
    ]
    expected = 100 * ((10 * roofs[0] + roofs[1]) / 0.02 - 1)
    assert second["roofline_error"] == pytest.approx(expected)
    groups = {x["op"]: x for x in found["rows"]}
    assert groups["one GPU, no serving engine"]["n"] == 1
    assert groups["serving engines"]["n"] == 1
    assert groups["all"]["mape"] == pytest.approx((abs(first["error"]) + abs(second["error"])) / 2)
    assert groups["software: vLLM"]["bias"] == pytest.approx(second["error"])


def test_text_and_page_say_what_is_left_out(tmp_path: Path):
    lines = (
        LINE,
        TWO,
        LINE | {"id": "doubt", "suspect": "the clock was low"},
        LINE | {"id": "gone", "command": "gpuir analyze none.onnx --target a100"},
    )
    out = tmp_path / "field.md"
    done = run(tmp_path, "--page", str(out), lines=lines)
    assert done.exit_code == 0, done.output
    assert "suspect" in done.stdout and "the clock was low" in done.stdout
    assert "gone: none.onnx: no such file" in " ".join(done.stdout.split()).replace("gpuir: ", "")
    text = out.read_text()
    assert "4 measurements of 1 sources" in text
    assert "[two](https://example.org/page)" in text
    assert "## The 5 largest errors" in text and "- **one** (" in text
    left, _, rest = text.partition("## Left out")[2].partition("## Without a prediction")
    assert "**doubt**" in left and "the clock was low" in left
    assert "**gone**" in rest and "no such file" in rest
    heads = [x for x in text.splitlines() if x.startswith("| rows of |")]
    assert heads == ["| rows of | rows | mean | median | bias | inside | roofline: mean | bias |"]
    assert "| all | 2 | " in text  # neither what is doubtful nor what failed


def test_commands_give_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done = run(tmp_path, "--commands", "--format", "json")
    assert done.exit_code == 0, done.output
    monkeypatch.chdir(tmp_path / "inputs")
    numbers = json.loads(done.stdout)["numbers"]
    assert len(numbers) == 2
    for number in numbers:
        again = CliRunner().invoke(main, [*number["command"].split()[1:], "--format", "json"])
        report = json.loads(again.stdout)["reports"][0]
        assert number["field"] == "reports.0.latency_s"
        assert report["latency_s"] == pytest.approx(number["number"], rel=1e-12)


def test_rows_are_chosen(tmp_path: Path):
    done = run(tmp_path, "--only", "vLLM", "--format", "json")
    assert [x["id"] for x in json.loads(done.stdout)["cases"]] == ["two"]
    assert "no row is like this" in run(tmp_path, "--only", "nothing").stderr
    assert "not a regular expression" in run(tmp_path, "--only", "(").stderr


# ---------------------------------------------------------------------------- reading

WRONG = {
    ("measured_s", "soon"): "could not convert",
    ("expr", "a + evil()"): "not an expression of times",
    ("expr", "a +"): "not an expression of times",
    ("expr", "z"): "not an expression of times",
    ("command", "rm -rf x"): "not a command whose time is known",
    ("command", "gpuir targets"): "not a command whose time is known",
}


@pytest.mark.parametrize("given", WRONG)
def test_what_is_no_row(tmp_path: Path, given: tuple[str, str]):
    with pytest.raises(UsageError, match=WRONG[given]):
        read(table(tmp_path, LINE | dict([given])))


def test_another_table_is_refused(tmp_path: Path):
    (path := tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="not a table of the field"):
        read(str(path))


def test_expressions_of_times():
    times = {"a": 2.0, "b": 4.0}
    for text, expected in {"": 2, "50*a + b": 104, "0.5 * b / a - 1": 0}.items():
        assert value(tree(text), times) == expected


# ---------------------------------------------------------------------------- asking


def test_times_that_a_row_may_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table(tmp_path, LINE)
    monkeypatch.chdir(tmp_path / "inputs")
    answer = gpuir.analyze("a.onnx", "a100", profile="ort", dims={"batch": 1, "seq": 16})
    found = told(Question(LINE["command"], "device", "f16"))
    assert found.time_s == pytest.approx(answer.device_s, rel=1e-12)
    assert found.place == "reports.0.device_s"
    low, high = answer.interval or (0.0, 0.0)
    share = answer.device_s / answer.latency_s
    assert found.interval == pytest.approx((low * share, high * share), rel=1e-12)
    run = "gpuir analyze '3*a.onnx' --target a100 --profile ort --dims batch=1,seq=16"
    several = told(Question(run, "", "f16"))
    assert several.time_s == pytest.approx(3 * answer.latency_s, rel=1e-12)
    assert several.interval == pytest.approx((3 * low, 3 * high)) and several.roofline_s is None
    call = "gpuir.kernel('gemm', dtype='f16', m=256, n=256, k=256, target='a100')"
    kernel = gpuir.kernel("gemm", dtype="f16", m=256, n=256, k=256, target="a100")
    assert told(Question(call, "", "f16"))[:2] == (kernel.time_s, kernel.interval_s)
    assert told(Question("gpuir.kernel(exit())", "", "f16")).why


def test_the_mean_run_of_models_that_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table(tmp_path, LINE)
    monkeypatch.chdir(tmp_path / "inputs")
    model = "a.onnx:batch=1:seq=16:count=2"
    command = f"gpuir mig plan --gpu a100 --model {model} --requests 100 --ways"
    found = told(Question(f"{command} time-slicing", "mean:time slicing", "f32"))
    alone = gpuir.analyze("a.onnx", "a100", dims={"batch": 1, "seq": 16}).latency_s
    assert found.time_s > alone and found.interval is None and not found.why
    assert "no plan has all models" in told(Question(f"{command} serial", "mean:MPS", "f32")).why


def test_a_step_on_many_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    table(tmp_path, LINE)
    monkeypatch.chdir(tmp_path / "inputs")
    command = "gpuir simulate a.onnx --cluster dgx-a100 --dp 2 --dims batch=2,seq=16"
    found = told(Question(command, "", "f32"))
    assert found.place == "time_s" and found.time_s > (found.roofline_s or 0) > 0
    assert found.interval and found.interval[0] < found.time_s < found.interval[1]


def test_the_roofline_is_the_slower_of_two():
    target = gpuir.load_target("a100")
    report = {"target": {"name": "a100"}, "flops": 10**15, "bytes": 1}
    assert roofline(report, "f16") == 1e15 / target.peak("tensor", f16)
    assert roofline(report | {"flops": 1, "bytes": 10**12}, "tf32") == pytest.approx(
        1e12 / target.dram_bytes_per_s
    )
    assert roofline(report, "tf32") > roofline(report, "f16")


# ---------------------------------------------------------------------------- scoring


def test_ends_and_rooflines_add_up_as_times_do():
    parts = row(command="gpuir analyze x ; gpuir analyze y", expr="2*a + b")
    x, y = parts.questions
    found = judged(parts, {x: Told(1.0, (0.5, 2.0), 0.1), y: Told(3.0, (1.0, 4.0), None)})
    assert (found.predicted_s, found.interval, found.roofline_s) == (5.0, (2.0, 8.0), None)
    assert found.is_inside is False and found.error == 400
    assert judged(parts, {x: Told(1.0), y: Told(why="broken")}).why == "broken"


def test_what_is_told_apart():
    assert row(software="TensorRT-LLM").apart == "serving engines"
    assert row(regime="many GPUs").apart == "many GPUs"
    assert row(regime="shared").apart == "a shared GPU"
    assert row().apart == ""


def test_scores_of_a_group():
    some = [
        FieldResult(row(), 2.0, (0.5, 3.0), 0.5),
        FieldResult(row(), 0.5, (0.4, 0.6), 0.5),
        FieldResult(row(), 1.0),
    ]
    found = score("x", some)
    assert (found.n, found.mape, found.median_ape) == (3, 50, 50)
    assert found.bias == pytest.approx(50 / 3)
    assert (found.coverage, found.roofline_mape, found.roofline_bias) == (50, 50, -50)
    assert score("y", some[2:]).coverage is None
    exam = FieldExam("f", tuple(some))
    assert [r.error for r in exam.worst(2)] == [100, -50]
    assert [s.n for s in exam.by("software")] == [3]


def test_causes_of_errors_are_told():
    known = causes()
    assert CAUSES.exists() and all(x.endswith(".") for x in known.values())
    name = next(iter(known))
    text = page([FieldExam("f", (FieldResult(row(id=name), 2.0),))])
    assert known[name] in text


def test_a_source_says_more_than_the_command():
    """Of the options of one source alone, and of those of its commands that have the words."""
    page = "https://github.com/NVIDIA/cudnn-frontend"
    assert gained(page, "gpuir analyze kernels.py:full") == ("--profile eager-cudnn",)
    assert gained(page, "gpuir analyze other.py:full") == ()
    assert gained("https://example.org", "gpuir analyze kernels.py:full") == ()
    assert all(x.options.startswith("--") and x.why for x in every_gained())
