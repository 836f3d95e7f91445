"""`gpuir sweep` as a user meets it."""

from __future__ import annotations

import csv
import json
import re
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import gpuir
from gpuir.cli.main import main

pytestmark = pytest.mark.slow

ENCODER = str(Path(__file__).parents[1] / "encoder.onnx")  # two layers of examples/encoder.onnx
SHORT = ("--dims", "seq=32")


def run(*args: str, status: int = 0) -> Result:
    done = CliRunner().invoke(main, args)
    assert done.exit_code == status, (done.output, done.exception)
    return done


def sweep(*args: str, status: int = 0) -> Result:
    return run("sweep", ENCODER, *args, status=status)


def test_the_cheapest_is_among_prices_of_one_kind():
    """A marketplace's starting price does not win against list prices."""
    args = ("--target", "rtx3090,l40s,h100-sxm", "--batch", "1", *SHORT)
    found = json.loads(sweep(*args, "--format", "json").stdout)
    kinds = {x["target"]: x["kind"] for x in found["prices"]}
    assert kinds == {"rtx3090": "marketplace", "l40s": "on demand", "h100-sxm-80gb": "on demand"}
    assert found["cheapest"]["target"] != "rtx3090"
    assert min(found["points"], key=lambda p: p["usd_per_million"])["target"] == "rtx3090"
    text = sweep(*args).stdout
    assert "not compared" in text and "rtx3090 (marketplace)" in text
    own = sweep(*args, "--price", "rtx3090=0.16").stdout
    assert "not compared" not in own and "cheapest   rtx3090" in own


def test_csv_reads_back_and_says_what_analyze_says():
    args = ("--target", "a100,t4", "--batch", "1,2..8", *SHORT, "--format", "csv")
    text = sweep(*args).stdout
    rows = list(csv.DictReader(StringIO(text)))
    assert [r["batch"] for r in rows] == ["1", "2", "4", "8"] * 2
    assert {r["model"] for r in rows} == {"encoder"}
    for row in rows:
        dims = {"batch": int(row["batch"]), "seq": 32}
        alone = gpuir.analyze(ENCODER, row["target"], dims=dims)
        assert float(row["latency_s"]) == pytest.approx(alone.latency_s, rel=1e-12)
        assert float(row["items_per_s"]) == dims["batch"] / float(row["latency_s"])
        assert int(row["reserved_bytes"]) == alone.memory.reserved_bytes
        price, rate = float(row["usd_per_hour"]), float(row["items_per_s"])
        assert float(row["usd_per_million"]) == pytest.approx(price / 3600 / rate * 1e6)
    assert sum(int(r["best"]) for r in rows) == 2
    assert sweep(*args).stdout == text


def test_json_has_all_points_and_what_is_found_among_them():
    args = ("--target", "t4", "--batch", "1..4", *SHORT, "--profile", "ort,ideal")
    found = json.loads(sweep(*args, "--format", "json").stdout)
    assert found["schema"] == "gpuir.sweep/1"
    assert found["axes"] == [{"dim": "batch", "values": [1, 2, 4]}]
    assert [s["profile"] for s in found["series"]] == ["ort", "ideal"]
    assert len(found["points"]) == 6 and found["fastest"] in found["points"]
    (price,) = found["prices"]
    assert price["target"] == "t4" and price["page"].startswith("https://")


def test_the_table_of_a_few_and_of_many():
    few = sweep("--target", "t4", "--batch", "1..8", *SHORT, "--price", "t4=0.5").stdout
    assert "encoder on t4 under ort" in few and "$0.500 an hour (your own)" in few
    assert len(re.findall(r"^ *[1248]  ", few, re.MULTILINE)) == 4
    assert re.search(r"^fastest +t4, batch ", few, re.MULTILINE)
    many = sweep("--target", "all", "--batch", "1,2", *SHORT).stdout
    for name in gpuir.target_names():
        assert re.search(rf"^{re.escape(name)} ", many, re.MULTILINE)
    assert re.search(r"^mi100 .* - ", many, re.MULTILINE), "no list has a price of it"


def test_sizes_that_do_not_fit_are_said():
    args = ("--target", "t4", "--set", "dram.bytes=8e8", "--batch", "1,256", *SHORT)
    text = sweep(*args).stdout
    assert re.search(r"^ +256 .*does not fit$", text, re.MULTILINE)
    assert re.search(r"^ +1 .*best", text, re.MULTILINE)


def test_pictures_are_the_same_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    for kind, head in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        first, again = tmp_path / f"1.{kind}", tmp_path / f"2.{kind}"
        for file in (first, again):
            sweep("--target", "t4,l4", "--batch", "1..4", *SHORT, "--plot", str(file))
        assert first.read_bytes().startswith(head)
        assert first.read_bytes() == again.read_bytes()
    text = (tmp_path / "1.svg").read_text()
    assert "t4 ort" in text and "US dollars per million items" in text


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "the sweep has no sizes"),
        (("--batch", "8..4"), "is not like 1,2,4..256"),
        (("--batch", "0"), "is not like 1,2,4..256"),
        (("--dim", "8"), "is not like NAME=128..4096"),
        (("--batch", "1", "--dims", "batch=2"), "--dims sets batch"),
        (("--batch", "1", "--dim", "batch=2"), "batch is listed twice in the sweep"),
        (("--batch", "1", "--price", "t4=-1"), "the price of an hour is not valid"),
        (("--batch", "1", "--price", "t5=1"), "no target is called 't5'"),
        (("--batch", "1", "--plot", "a.pdf"), "--plot writes only PNG and SVG files"),
        (("--batch", "1", "--plot", "/nowhere/a.png"), "no such folder"),
        (("--dim", "bach=1"), "did you mean batch?"),
    ],
)
def test_what_is_wrong_is_said(args, says):
    assert says in sweep("--target", "t4", *SHORT, *args, status=2).stderr


def test_no_target():
    assert "no target given" in sweep("--batch", "1", *SHORT, status=2).stderr


@pytest.mark.parametrize("width", ["60", "80"])
def test_profiles_are_told_apart_at_any_width(width: str):
    targets = ["a30", "t4", "l4", "v100-pcie-32gb", "p100-pcie-16gb", "l40s"]
    args = ("--target", ",".join(targets), "--batch", "1,2", *SHORT, "--profile", "ort,ideal")
    rows = [row.split() for row in sweep(*args, "--width", width).stdout.splitlines()]
    listed = {(row[0], row[1]) for row in rows if row and row[0].startswith(tuple(targets))}
    assert {name for _, name in listed} == {"ort", "ideal"} and len(listed) == 12


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 4096,
    "num_key_value_heads": 1,
}


def test_the_tokens_behind_which_decoding_begins_are_a_dimension(tmp_path: Path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    decode = (f"hf:{tmp_path}/config.json", "--target", "a100", "--dims", "batch=1,seq=1")
    decode += ("--phase", "decode")
    args = ("--dim", "past=64,1024", "--format", "json")
    found = json.loads(run("sweep", *decode, *args).stdout)["points"]
    assert [p["dims"] for p in found] == [{"past": 64}, {"past": 1024}]
    for p in found:
        (told,) = json.loads(
            run("analyze", *decode, "--past", str(p["dims"]["past"]), "--format", "json").stdout
        )["reports"]
        assert told["latency_s"] == pytest.approx(p["latency_s"], rel=1e-12)
        assert told["memory"]["peak_bytes"] == p["peak_bytes"]
    done = run("sweep", *decode, "--past", "8", *args, status=2)
    assert "--past sets past, but the sweep changes it" in done.stderr


def test_a_stack_on_a_device_that_it_is_not_made_for_is_named():
    args = ("--dim", "batch=1", "--dims", "seq=128", "--target", "a100,mi300x")
    said = "the profile ort is for NVIDIA; it is used unchanged for this GPU"
    assert f"mi300x: {said}" in " ".join(sweep(*args).stdout.split())
    (row,) = json.loads(sweep(*args, "--format", "json").stdout)["elsewhere"]
    assert row == {"target": "mi300x", "text": said}
