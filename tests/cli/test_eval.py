"""`gpuir eval` as a user meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from measured import OTHERS, TABLES

from gpuir.cli import checkout
from gpuir.cli.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (TABLES | OTHERS).items():
        (tmp_path / f"{name}.csv").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["eval", *args])


def test_every_kind_of_table_at_once(folder: Path):
    files = [f"{name}.csv" for name in TABLES | OTHERS]
    result = run("kernels", *files, "--json", "scores.json")
    assert result.exit_code == 0, result.stderr
    scores = json.loads((folder / "scores.json").read_text())
    assert [f["file"] for f in scores["files"]] == files
    for row in scores["rows"]:
        assert row["n"] > 0
        assert min(row[k] for k in ("mape", "median_ape", "p90_ape", "roofline_mape")) >= 0
        assert row["coverage"] is None or 0 <= row["coverage"] <= 100
        assert row["floor"] == ("launch floor" in row["op"])
    for file in files:
        assert file in result.stdout
        assert file in result.stderr  # progress


@pytest.mark.parametrize("width", [80, 120])
def test_tables_fit_the_width(folder: Path, width: int):
    result = run("kernels", "gemm.csv", "eager_gemm.csv", "--width", str(width))
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert any("mean" in line and "bias" in line for line in lines)
    assert "skipped    1 row: flag = spike" in lines


def test_the_same_name_in_two_folders(folder: Path):
    (folder / "other").mkdir()
    (folder / "other/gemm.csv").write_text(TABLES["eager_gemm"])
    result = run("kernels", "gemm.csv", "other/gemm.csv", "--json", "-")
    rows = json.loads(result.stdout)["rows"]
    assert {r["op"] for r in rows if r["file"] == "gemm.csv"} == {"gemm"}
    assert "bmm" in {r["op"] for r in rows if r["file"] == "other/gemm.csv"}
    shown = run("kernels", "gemm.csv", str(folder / "other/gemm.csv")).stdout
    assert "\nother/gemm.csv " in shown.partition("all files")[2]


def test_by_framework(folder: Path):
    result = run("kernels", "gemm.csv", "--by", "framework", "--json", "-")
    rows = json.loads(result.stdout)["rows"]
    assert {r["framework"] for r in rows if r["dtype"] == "bf16"} == {"vllm", "sglang"}


def test_calibrated_rows_are_not_scored(folder: Path):
    text = TABLES["gemm"]
    more = [f"h100_sxm,vllm,1,bf16,x,{64 * i},4096,4096,{5 * i + 20},\n" for i in range(1, 61)]
    (folder / "many.csv").write_text(text.splitlines(keepends=True)[0] + "".join(more))
    result = run("kernels", "many.csv", "--calibrate", "20", "--json", "-")
    assert result.exit_code == 0, result.stderr
    (row,) = json.loads(result.stdout)["rows"]
    assert row["n"] == 40


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("migs", "gemm.csv"), "nothing called 'migs' can be evaluated"),
        (("kernel", "gemm.csv"), "did you mean kernels?"),
        (("kernels",), "Missing argument 'FILES...'"),
        (("kernels", "gone.csv"), "cannot read the table"),
        (("kernels", "odd.csv"), "the columns are not those of a table that"),
        (("kernels", "gemm.csv", "--by", "frame"), "did you mean framework?"),
        (("kernels", "llmcompass.csv", "--by", "framework"), "this table has none"),
        (("kernels", "gemm.csv", "--json", "gone/x.json"), "no such folder"),
        (("kernels", "gemm.csv", "-o", "."), "cannot write the file"),
        (("kernels", "few.csv", "--leave-one-out", "device"), "nothing is left to train on"),
        (("kernels", "gemm.csv", "."), "found:    a folder, a device or a pipe"),
    ],
)
def test_wrong_input_is_said(folder: Path, args: tuple[str, ...], message: str):
    (folder / "odd.csv").write_text("a,b\n1,2\n")
    (folder / "few.csv").write_text("".join(TABLES["gemm"].splitlines(keepends=True)[:2]))
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("models", "labels.csv"), "run it in a checkout of the repository"),
        (("kernels", "gemm.csv"), "the columns are not those of a table that"),
    ],
)
def test_the_package_alone_says_what_a_checkout_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], message: str
):
    monkeypatch.setattr("gpuir.cli.checkout.exists", lambda: False)
    result = run(*args)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_another_module_called_validation_is_not_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation/__init__.py").write_text("raise RuntimeError")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "validation", raising=False)
    assert not checkout.exists.__wrapped__()


MODEL = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99}
LABELS = """\
device,model,mode,seqlen,batch,option,num_layer,e2e_ms,fw_ms,bwall_ms,neusight_e2e_ms
Tesla_V100-PCIE-32GB,gpt2,inf,16,4,none,2,0.5,0.5,,0.75
NVIDIA_A100-PCIE-40GB,gpt2,inf,16,4,fusion,2,0.5,0.5,,
NVIDIA_A100-SXM4-40GB,gpt2,train,16,4,dp4,,9,,,
"""


@pytest.fixture
def labels(folder: Path) -> Path:
    (folder / "labels.csv").write_text(LABELS)
    (folder / "configs.json").write_text(json.dumps({"gpt2": MODEL}))
    return folder


@pytest.mark.slow
def test_whole_models(labels: Path):
    pytest.importorskip("transformers")
    from gpuir.cost.learned import shipped, written

    (labels / "weights").mkdir()
    (labels / "weights/v100-pcie-32gb.json").write_text(written(shipped()))
    where = ("labels.csv", "--configs", "configs.json", "--unseen", "weights")
    result = run("models", *where, "--json", "scores.json")
    assert result.exit_code == 0, result.stderr
    scores = json.loads((labels / "scores.json").read_text())
    v100, a100 = scores["cases"]
    assert v100["published"]["neusight"]["error"] == 50.0
    assert v100["unseen"]["total_s"] == v100["predicted"]["total_s"]  # they are the same weights
    assert a100["unseen"] is None
    assert v100["predicted"]["launches"] > a100["predicted"]["launches"]
    assert scores["skipped"] == {"option dp4: several GPUs": 1}
    assert [g["device"] for g in scores["groups"]] == [
        *("v100-pcie-32gb", "all NVIDIA", "a100-pcie-40gb", "all NVIDIA")
    ]
    assert result.stderr.count("gpt2 inf 4x16") == 3  # exported once, predicted twice
    assert "NeuSight" in result.stdout
    narrow = run("models", *where, "--width", "100").stdout
    assert max(map(len, narrow.splitlines())) <= 100


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("labels.csv",), "need their configs"),
        (("gone.csv", "--configs", "configs.json"), "cannot read the table"),
        (("gemm.csv", "--configs", "configs.json"), "not a table of whole models"),
        (("labels.csv", "--configs", "gone.json"), "cannot read the configs"),
        (("labels.csv", "--configs", "labels.csv"), "not a JSON file"),
        (("labels.csv", "--configs", "configs.json", "--unseen", "no"), "no such folder"),
        (("labels.csv", "--configs", "configs.json", "--json", "no/x"), "no such folder"),
    ],
)
def test_wrong_labels_are_said(labels: Path, args: tuple[str, ...], message: str):
    result = run("models", *args)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("option", ["--configs", "--ops"])
def test_options_of_labels_are_refused_for_decoders(tmp_path: Path, option: str):
    (tmp_path / "layers.csv").write_text("gpu,model,op,tokens,tp,hidden,latency_us\n")
    result = run("models", str(tmp_path / "layers.csv"), option, "some.file")
    assert result.exit_code == 2
    assert f"{option} is for other tables" in result.stderr
