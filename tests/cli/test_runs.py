"""`gpuir analyze` of a run of several models, in every format."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from decoders import LLAMA

import gpuir
from gpuir.cli.main import main

ENCODER = str(Path(__file__).parents[1] / "small_encoder.onnx")
RUN = "3*a.onnx:batch=8 + a.onnx:batch=1"
SEQ = ("--dims", "seq=16")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ENCODER, "a.onnx")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def run(*args: str, status: int = 0, target: str = "a100") -> Result:
    found = CliRunner().invoke(main, ["analyze", *args, "--target", target])
    assert found.exit_code == status, found.output
    return found


def test_text_says_what_each_part_takes():
    text = run(RUN, *SEQ).stdout
    assert text.startswith("3*a + a on ")
    for word in ("latency", "interval", "memory", "to spare", "times", "a.onnx:batch=8"):
        assert word in text
    assert "a run begins when the one before it has ended" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_are_not_too_wide(width: int):
    text = run(RUN, *SEQ, "--width", str(width)).stdout
    assert all(len(line) <= width for line in text.splitlines())


def test_json_is_the_answer_of_python():
    found = json.loads(run(RUN, *SEQ, "--format", "json").stdout)
    expected = gpuir.analyze(RUN, "a100", dims={"seq": 16})
    assert found["schema"] == "gpuir.runs/1"
    (report,) = found["reports"]
    assert report["latency_s"] == pytest.approx(expected.latency_s, rel=1e-12)
    assert report["interval_s"] == pytest.approx(expected.interval, rel=1e-12)
    assert report["reserved_bytes"] == expected.reserved_bytes
    assert [p["times"] for p in report["parts"]] == [3, 1]
    assert sum(p["latency_s"] for p in report["parts"]) == pytest.approx(report["latency_s"])
    assert sum(p["times"] * p["each_s"] for p in report["parts"]) == pytest.approx(
        report["latency_s"]
    )


def test_a_row_of_csv_is_a_part():
    rows = list(csv.DictReader(io.StringIO(run(RUN, *SEQ, "--format", "csv").stdout)))
    assert [row["part"] for row in rows] == ["a.onnx:batch=8", "a.onnx:batch=1"]
    assert {row["target"] for row in rows} == {"a100-sxm-40gb"}


@pytest.mark.parametrize("form", ["markdown", "html"])
def test_other_formats(form: str):
    assert "a.onnx:batch=8" in run(RUN, *SEQ, "--format", form).stdout


def test_several_targets_and_profiles_are_compared():
    args = (RUN, *SEQ, "--profile", "ort,tensorrt")
    found = json.loads(run(*args, "--format", "json", target="a100,l4").stdout)["reports"]
    assert [r["profile"] for r in found] == ["ort", "tensorrt"] * 2
    one = gpuir.analyze(RUN, "l4", profile="tensorrt", dims={"seq": 16})
    assert found[3]["latency_s"] == pytest.approx(one.latency_s, rel=1e-12)
    text = run(*args, "--width", "160", target="a100,l4").stdout
    assert "x fastest" in text and "l4 tensorrt" in text and "3 x a" in text


def test_a_part_keeps_its_own_profile():
    given = ("a.onnx:profile=ort + a.onnx", "--dims", "seq=16,batch=1", "--profile", "tensorrt")
    (report,) = json.loads(run(*given, "--format", "json").stdout)["reports"]
    assert [p["profile"] for p in report["parts"]] == ["ort", "tensorrt"]


def test_a_generation_is_that_of_python():
    args = ("hf:config.json", "--dims", "batch=2,seq=20", "--generate", "6", "--profile", "vllm")
    found = json.loads(run(*args, "--format", "json", target="a100,l4").stdout)["reports"]
    for report, target in zip(found, ("a100", "l4"), strict=True):
        one = gpuir.analyze(
            "hf:config.json", target, dims={"batch": 2, "seq": 20}, generate=6, profile="vllm"
        )
        assert report["latency_s"] == pytest.approx(one.latency_s, rel=1e-12)
        assert report["interval_s"] == pytest.approx(one.interval, rel=1e-12)
        assert report["tokens"] == 12
        assert report["reserved_bytes"] == one.reserved_bytes
    behind = run("hf:config.json:generate=6:batch=2:seq=20", *args[-2:], "--format", "json")
    (again,) = json.loads(behind.stdout)["reports"]
    assert again["latency_s"] == pytest.approx(found[0]["latency_s"], rel=1e-12)
    assert "12 generated" in run(*args).stdout


REFUSED = {
    ("--format", "trace"): "there is no format trace",
    ("--memory",): "--memory is for one model",
    ("--group-by", "module"): "--group-by is for one model",
    ("--crossover", "batch"): "--crossover is for one model",
    ("--schedule", "x.sched"): "--schedule is for one model",
    ("--cluster", "dgx-a100"): "--cluster is for one model",
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_is_for_one_model(given: tuple[str, ...]):
    assert REFUSED[given] in run(RUN, *SEQ, *given, status=2).stderr


def test_other_commands_say_where_a_run_is_taken():
    for command, *more in (("advise",), ("largest", "--dim", "batch")):
        found = CliRunner().invoke(main, [command, "2*a.onnx", "--target", "a100", *SEQ, *more])
        assert found.exit_code == 2
        assert "gpuir analyze, gpuir sweep and gpuir.analyze take a run of several" in found.stderr


def test_a_run_at_several_sizes():
    args = ("2*a.onnx + a.onnx:batch=1", "--dims", "seq=16,batch=1,4", "--format", "json")
    found = json.loads(run(*args, target="a100,l4").stdout)
    assert found["schema"] == "gpuir.sweep/1"
    assert [(p["target"], p["dims"]["batch"]) for p in found["points"]] == [
        ("a100-sxm-40gb", 1),
        ("l4", 1),
        ("a100-sxm-40gb", 4),
        ("l4", 4),
    ]
    one = gpuir.analyze(args[0], "l4", dims={"seq": 16, "batch": 4})
    last = found["points"][-1]
    assert last["latency_s"] == pytest.approx(one.latency_s, rel=1e-12)
    assert last["interval_s"] == pytest.approx(one.interval, rel=1e-12)
    assert "latency" in run(*args[:3]).stdout


def test_a_sweep_of_a_generation():
    args = ("hf:config.json:generate=4:seq=8", "--target", "a100", "--batch", "1,2", "--price")
    found = CliRunner().invoke(main, ["sweep", *args, "a100=2", "--format", "json"])
    assert found.exit_code == 0, found.output
    points = json.loads(found.stdout)["points"]
    assert [p["items"] for p in points] == [1, 2]
    assert points[1]["usd_per_hour"] == 2
    one = gpuir.analyze("hf:config.json", "a100", dims={"batch": 2, "seq": 8}, generate=4)
    assert points[1]["latency_s"] == pytest.approx(one.latency_s, rel=1e-12)


def test_a_size_that_a_model_of_the_run_does_not_take():
    found = CliRunner().invoke(
        main, ["sweep", "2*a.onnx", "--target", "a100", "--dims", "batch=1", "--dim", "wrong=1,2"]
    )
    assert found.exit_code == 2 and "no such dimension" in found.stderr


def test_a_size_that_is_given_and_swept():
    args = ("2*a.onnx", "--target", "a100", "--dims", "batch=1,seq=8", "--batch", "1,2")
    found = CliRunner().invoke(main, ["sweep", *args])
    assert found.exit_code == 2 and "the sweep changes it" in found.stderr


def test_the_output_is_not_one_of_the_models():
    assert "also an input" in run(RUN, *SEQ, "-o", "a.onnx", status=2).stderr


def test_a_run_that_fits_nowhere():
    found = run(RUN, *SEQ, "--set", "dram.bytes=546000000", status=1)
    assert found.stdout.startswith("does not fit, ")


def test_a_profile_that_no_target_has_is_left_out():
    found = run(RUN, *SEQ, "--profile", "tensorrt", "--format", "json", target="a100,mi210")
    assert [r["target"] for r in json.loads(found.stdout)["reports"]] == ["a100-sxm-40gb"]
    assert "not supported" in found.stderr
