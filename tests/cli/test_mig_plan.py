"""`gpuir mig plan` and `gpuir mig timetable`, on a real model."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner, Result

from gpuir.cli.main import main

ROOT = Path(__file__).parents[2]
ENCODER = str(ROOT / "tests" / "encoder.onnx")
BATCH = f"{ENCODER}:batch=16:seq=128:count=3:name=batch"
LIVE = f"{ENCODER}:batch=1:seq=64:rate=100:deadline=20ms:name=live"


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["mig", *args])


def plan(*args: str) -> Result:
    found = run(
        "plan", "--gpu", "a30", "--model", BATCH, "--model", LIVE, "--requests", "300", *args
    )
    assert found.exit_code == 0, found.stderr
    return found


@pytest.mark.parametrize("width", [80, 120])
def test_table(width):
    found = plan("--width", str(width), "--ways", "mig,serial")
    assert "3 x batch, live on a30: throughput" in found.stdout
    assert all(len(line) <= width for line in found.stdout.splitlines())
    assert "one at a time" in found.stdout and "live" in found.stdout
    assert "Poisson" in found.stdout


def test_picture_of_the_gpu_divided():
    found = plan("--ways", "mig")
    lines = found.stdout.splitlines()
    (names,) = [line for line in lines if line.startswith("| 1g.6gb")]
    assert names.count("1g.6gb") == 4
    assert any(line.count("batch") == 3 and line.count("live") == 1 for line in lines)


def test_json():
    found = json.loads(plan("--format", "json").stdout)
    assert found["schema"] == "gpuir.mig.plan/1"
    assert [m["name"] for m in found["models"]] == ["batch", "live"]
    best, *others = found["plans"]
    assert len(best["served"]) == 4 and best["missed"] == 0
    live = next(x for x in best["served"] if x["model"] == "live")
    assert 0 < live["p50_s"] <= live["p90_s"] <= live["p99_s"] <= 0.02
    assert live["rate_per_s"] == pytest.approx(100, rel=0.2)
    assert all((x["missed"], -x["throughput"]) >= (0, -best["throughput"]) for x in others)
    assert any(x["reasons"] for x in others)
    assert {x["gpus"][0]["geometry"] for x in found["plans"]} >= {
        None,
        "1g.6gb+1g.6gb+1g.6gb+1g.6gb",
    }


def test_mig_parted_reads_the_plan():
    text = plan("--ways", "mig", "--format", "mig-parted").stdout
    tree = yaml.safe_load(text)
    schema = json.loads((ROOT / "specs" / "mig-parted.schema.json").read_text())
    jsonschema.validate(tree, schema)
    assert tree["mig-configs"] == {
        "4x1g.6gb": [{"devices": [0], "mig-enabled": True, "mig-devices": {"1g.6gb": 4}}]
    }


def test_commands_of_the_plan():
    text = plan("--ways", "mig", "--format", "nvidia-smi").stdout
    assert "mig -i 0 -cgi 14:0,14:1,14:2,14:3 -C" in text
    assert "-mig 0" in plan("--ways", "serial", "--format", "nvidia-smi").stdout


def test_several_gpus_and_their_price():
    found = run(
        *("plan", "--gpu", "2xa30,t4", "--model", f"{ENCODER}:batch=1:seq=64:rate=50:count=2"),
        *("--price", "a30=1.0", "--price", "t4=0.3", "--objective", "cost", "--requests", "200"),
        *("--format", "json", "--ways", "mig,time-slicing"),
    )
    assert found.exit_code == 0, found.stderr
    best = json.loads(found.stdout)["plans"][0]
    assert best["usd_per_hour"] == 0.3 and len(best["gpus"]) == 3


def test_gpu_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "a30"\nname = "my-a30"\nclock_hz = 1.2e9\n[sources]\nclock_hz = "measured"\n'
    )
    args = ("--model", BATCH, "--requests", "100", "--ways", "mig,serial", "--format", "json")
    found = run("plan", "--gpu", f"2x{path}", *args)
    assert found.exit_code == 0, found.stderr
    found = run("plan", "--gpu", str(path), *args)
    assert found.exit_code == 0, found.stderr
    slow = json.loads(found.stdout)["models"][0]["alone"]["time_s"]
    quick = json.loads(run("plan", "--gpu", "a30", *args).stdout)["models"][0]["alone"]["time_s"]
    assert slow > quick


TRAINED = f"{ENCODER}:batch=4:seq=64:train"


def test_training_is_a_model_too():
    found = run("plan", "--gpu", "a30", "--model", TRAINED, "--requests", "100")
    assert found.exit_code == 0, found.stderr


@pytest.mark.parametrize(
    "args, words",
    [
        (["--model", "x.onnx:rate=fast"], ["rate=fast is not a number"]),
        (["--model", "x.onnx:count=0"], ["count=0 is not a whole number from 1 to 64"]),
        (["--model", "x.onnx:train=no"], ["train takes no value"]),
        (["--model", "x.onnx:deadline=50"], ["deadline=50 is not a valid time", "50ms"]),
        (["--model", "x.onnx:colour=red"], ["colour=red is no size", "keys are"]),
        (["--model", ":batch=8"], ["names no model"]),
        (["--model", ENCODER, "--ways", "nvlink"], ["no way to share is called 'nvlink'"]),
        (["--model", ENCODER, "--format", "yaml"], ["'yaml' is not one of 'text'"]),
        (["--model", "nowhere.onnx:batch=1"], ["nowhere.onnx"]),
        (["--model", f"{ENCODER}:batch=1"], ["some input dimensions are not known", "seq"]),
        (["--model", ENCODER, "--gpu", "a30:1g.6gb"], ["must be a whole GPU", "--gpu a30"]),
        (["--model", ENCODER, "--gpu", "a30+sms=20"], ["without changed numbers"]),
        (["--model", ENCODER, "--objective", "cost"], ["no price is known", "--price a30="]),
        (
            ["--model", f"{ENCODER}:batch=200000:seq=512"],
            ["encoder fits none of the given GPUs", "GiB less than it needs"],
        ),
    ],
)  # fmt: skip
def test_what_is_refused(args, words):
    found = run("plan", "--gpu", "a30", *args)
    assert found.exit_code == 2, found.output
    assert all(word in found.output for word in words), found.output
    assert "Traceback" not in found.output


def test_timetable(tmp_path):
    day = tmp_path / "day.csv"
    day.write_text("time,live\n0:00,20\n9:00,300\n18:00,20\n")
    args = ("timetable", "--gpu", "a30", "--model", BATCH, "--model", LIVE, "--day", str(day))
    found = run(*args, "--requests", "200", "--ways", "mig,time-slicing", "--width", "100")
    assert found.exit_code == 0, found.stderr
    assert "09:00  18:00" in found.stdout and "one division" in found.stdout
    assert all(len(line) <= 100 for line in found.stdout.splitlines())
    made = json.loads(run(*args, "--requests", "200", "--ways", "mig", "--format", "json").stdout)
    assert made["schema"] == "gpuir.mig.timetable/1"
    assert [x["rates_per_s"]["live"] for x in made["entries"]] == [20, 300, 20]
    assert made["changes"] == sum(bool(x["moved"]) for x in made["entries"])


def test_day_of_another_model(tmp_path):
    day = tmp_path / "day.csv"
    day.write_text("time,life\n0:00,20\n")
    found = run("timetable", "--gpu", "a30", "--model", LIVE, "--day", str(day))
    assert found.exit_code == 2 and "did you mean live" in found.output
