"""Published throughputs: what a row says, what of it is scored, and that work is not done twice."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from gpuir.cli.main import main
from gpuir.ir.errors import UsageError
from validation.throughput import predict as predicting
from validation.throughput.cases import Case, Program, read
from validation.throughput.predict import Predicted, Result, predict
from validation.throughput.programs import graphs
from validation.throughput.scores import gains, pairs, scored, spearman

DATA = Path(__file__).parents[3] / "shared" / "data" / "models"
ROWS = """\
source,model,family,gpu,target,mode,precision,layout,software,batch,img_size,samples_per_s,step_ms
results/a.csv,resnet18,resnet,RTX 3090,rtx3090,eager,amp,nchw,torch 2.4.0 cu124,256,224,4000,64
results/a.csv,vit,vision_transformer,RTX 3090,rtx3090,eager,amp,nchw,torch 2.4.0,256,224,4000,64
results/b.csv,resnet18,resnet,RTX 3090,rtx3090,eager,amp,nhwc,torch 2.4.0 cu124,512,224,5000,102.4
results/c.csv,resnet18,resnet,RTX 4090,rtx4090,compile,amp,nchw,torch 2.9.1 cu128,256,224,9000,28
results/d.csv,resnet18,resnet,RTX 3090,rtx3090,train,amp,nchw,torch 1.12 cu113,128,224,1000,128
README.md,resnet18,dle,T4,t4,eager,f32,nchw,NGC 21.03,4,224,400,10
results/a.csv,resnet18,resnet,RTX 9999,rtx9999,eager,amp,nchw,torch 2.4.0 cu124,256,224,4000,64
results/a.csv,resnet18,resnet,RTX 3090,rtx3090,dream,amp,nchw,torch 2.4.0 cu124,256,224,4000,64
"""


of_timm = pytest.mark.skipif(find_spec("timm") is None, reason="pip install --no-deps timm")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "images.csv"
    path.write_text(ROWS)
    return path


def test_what_a_row_says(table: Path):
    found = read(table)
    eager, vit, nhwc, compiled, train, small = found.cases
    assert eager.program == Program(
        "image", "resnet18", 256, side=224, autocast="f16", fast_norms=True
    )
    assert eager.measured_s == pytest.approx(0.064) and eager.profile == "eager@2.11"
    assert not vit.program.fast_norms  # torch's own LayerNorm, in f32 under autocast
    assert nhwc.program.nhwc and nhwc.table != eager.table
    assert compiled.profile == "compiled" and compiled.program.merged
    assert train.program.train and not train.program.sdpa and not train.program.fast_norms
    assert small.tf32 is False and small.table.endswith("batch <= 8")
    assert found.skipped == {
        "no target is called rtx9999": 1,
        "nothing runs like mode dream": 1,
    }


def test_unets_and_decoders(tmp_path: Path):
    path = tmp_path / "sd.csv"
    path.write_text(
        "source,gpu,target,batch,mode,software,it_per_s\nx,A100,a100,4,cudagraph,torch 2.0,14\n"
    )
    (case,) = read(path).cases
    assert case.program.batch == 8 and case.measured_s == pytest.approx(1 / 14)
    path.write_text(
        "model,gpu,target,dtype,batch,isl,osl,tokens_per_s,first_token_ms\n"
        "llama-7b,A100,a100,f16,16,128,2048,592,\nllama-7b,A100,a100,f16,1,128,1,,16\n"
    )
    tokens, first = read(path).cases
    assert tokens.measured_s == pytest.approx(16 * 2048 / 592) and tokens.profile == "trtllm"
    assert first.measured_s == pytest.approx(0.016) and first.table != tokens.table


def test_a_row_is_read_in_the_precision_that_it_states(tmp_path: Path):
    """Or it is counted, with the reason."""
    head, line = ROWS.splitlines()[:2]
    said = ["amp", "amp bf16", "f32", "tf32", "f16", "fp16", "bf16", "BF16", "int8", "fp8", ""]
    lines = [line.replace(",amp,", f",{p},") for p in said]
    lines += [line.replace(",256,", f",{n},") for n in ("", "many", "0")]
    path = tmp_path / "images.csv"
    path.write_text("\n".join([head, *lines, ""]))
    found = read(path)
    assert [(c.program.autocast, c.program.dtype, c.tf32) for c in found.cases] == [
        ("f16", "f32", None),
        ("bf16", "f32", None),
        ("", "f32", False),
        ("", "f32", True),
        *[("", "f16", None)] * 2,
        *[("", "bf16", None)] * 2,
    ]
    assert found.skipped == {
        "precision int8 is not modelled": 1,
        "precision fp8 is not modelled": 1,
        "precision not stated is not modelled": 1,
        "a size or the measurement is no number": 3,
    }
    path.write_text(
        "model,gpu,target,dtype,batch,isl,osl,tokens_per_s,first_token_ms\n"
        "llama-7b,A100,a100,bf16,16,128,2048,592,\nllama-7b,A100,a100,int4,16,128,2048,592,\n"
    )
    found = read(path)
    assert [c.program.dtype for c in found.cases] == ["bf16"]
    assert found.skipped == {"precision int4 is not modelled": 1}


def test_a_unet_is_read_in_its_precision_and_never_trained(tmp_path: Path):
    path = tmp_path / "sd.csv"
    head = "source,gpu,target,batch,mode,software,precision,it_per_s\n"
    rows = [("eager", "amp"), ("eager", "tf32"), ("eager", "bf16"), ("eager", ""), ("train", "f16")]
    path.write_text(head + "".join(f"x,A100,a100,4,{m},torch 2.0,{p},14\n" for m, p in rows))
    found = read(path)
    assert [(c.program.autocast, c.program.dtype, c.tf32) for c in found.cases] == [
        ("f16", "f32", None),
        ("", "f32", True),
        ("", "bf16", None),
    ]
    assert found.skipped == {
        "precision not stated is not modelled": 1,
        "training of a UNet is not modelled": 1,
    }


@pytest.mark.parametrize(
    "content", ["{}", '{"model_type": "gpt2"}', "[1]", "PAR1\x00", "a,b\n1,2\n"]
)
def test_a_file_of_something_else_is_no_store(table: Path, content: str):
    kept = table.with_name("kept.jsonl")
    kept.write_text(content)
    with pytest.raises(UsageError, match="the file keeps no predictions"):
        [*predict([], jobs=1, kept=kept, watch=str)]
    assert kept.read_text() == content


@of_timm
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_model_in_half_is_built_in_half(dtype: str):
    ((g, _),) = graphs(Program("image", "resnet18", 2, side=64, dtype=dtype))
    assert {v.type.dtype.name for v in (*g.inputs, *g.params) if v.type.dtype.is_float} == {dtype}


@of_timm
def test_autocast_is_in_the_dtype_that_a_row_states():
    ((g, _),) = graphs(Program("image", "resnet18", 2, side=64, autocast="bf16"))
    dtypes = {v.type.dtype.name for n in g.nodes for v in n.results}
    assert "bf16" in dtypes and "f16" not in dtypes


@pytest.mark.skipif(not DATA.is_dir(), reason="the public tables are not beside the checkout")
@pytest.mark.parametrize(
    "file, rows", [("timm", 570), ("convnets", 107), ("stable_diffusion", 18), ("llm_tensorrt", 12)]
)
def test_public_tables_are_read_whole(file: str, rows: int):
    found = read(DATA / f"{file}.csv")
    assert len(found.cases) == found.count == rows and not found.skipped
    assert {c.half for c in found.cases} <= {"a", "b"}


# ---------------------------------------------------------------------------- scores


def results(measured: list[float], predicted: list[float], case: Case) -> list[Result]:
    return [
        (
            replace(case, program=replace(case.program, model=f"m{i}"), measured_s=m),
            Predicted(p, 0.9 * p, 1.1 * p, p, 2 * m, 1),
        )
        for i, (m, p) in enumerate(zip(measured, predicted, strict=True))
    ]


def test_errors_of_a_table(table: Path):
    some = results([1.0, 1.2, 3.0], [1.05, 1.5, 2.4], read(table).cases[0])
    (score,) = scored([*some, (some[0][0], Predicted(why="no such model"))])
    assert score.errors.n == 3
    assert score.errors.mape == pytest.approx((5 + 25 + 20) / 3)
    assert score.errors.bias == pytest.approx((5 + 25 - 20) / 3)
    assert score.errors.roofline_mape == pytest.approx(100)
    assert score.errors.coverage == pytest.approx(100 / 3)
    assert (score.near, score.ordered, score.spearman) == (1, 1.0, pytest.approx(1.0))


def test_pairs_that_are_near():
    measured = np.array([1.0, 1.2, 1.21, 2.0])
    assert pairs(measured, np.array([1.0, 1.1, 1.2, 2.0])) == (2, 1.0)
    assert pairs(measured, np.array([1.15, 1.1, 1.2, 2.0])) == (2, 0.5)


def test_spearman_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.integers(0, 9, 15), rng.normal(size=15)
        assert spearman(a, b) == pytest.approx(float(stats.spearmanr(a, b).statistic))


def test_gains(table: Path):
    eager = read(table).cases[0]
    old = results([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], eager)
    faster = replace(eager, program=replace(eager.program, nhwc=True, batch=512))
    new = results([1.0, 0.8, 0.5], [1.0, 0.9, 0.6], faster)  # for twice as many samples
    (gain,) = gains([*old, *new])
    assert (gain.change, gain.of) == ("channels last", "RTX 3090 eager torch 2.4.0")
    assert len(gain.models) == 3
    assert gain.measured == pytest.approx(2.5) and gain.predicted == pytest.approx(2 / 0.9)
    assert gain.spearman == pytest.approx(1.0)


# ---------------------------------------------------------------------------- predictions


def test_what_is_kept_is_not_made_again(table: Path, tmp_path: Path):
    cases = read(table).cases
    kept = tmp_path / "kept.jsonl"
    line = {"name": predicting.name_of(cases[0]), **asdict(Predicted(1.0, 0.5, 2.0, 0.9, 0.3, 7))}
    kept.write_text(json.dumps(line) + '\n{"name": "cut of')
    ((case, found),) = predict(cases[:1], jobs=1, kept=kept, watch=print)
    assert case == cases[0] and found.launches == 7
    other = predicting.name_of(replace(cases[0], target="rtx4090"))
    assert other != line["name"]


@of_timm
def test_an_unknown_model_is_left_out_with_a_reason(table: Path, tmp_path: Path):
    path = tmp_path / "one.csv"
    head, row = ROWS.splitlines()[:2]
    path.write_text(f"{head}\n{row.replace('resnet18', 'resnet_of_nobody')}\n")
    ran = CliRunner().invoke(main, ["eval", "models", str(path), "--jobs", "1"])
    assert ran.exit_code == 0, ran.output
    assert "skipped" in ran.output and "resnet_of_nobody" in ran.output


@of_timm
def test_a_real_model_and_going_on(tmp_path: Path):
    path, kept, made = tmp_path / "one.csv", tmp_path / "kept.jsonl", tmp_path / "scores.json"
    path.write_text("\n".join(ROWS.splitlines()[:2]) + "\n")
    asked = ["eval", "models", str(path), "--store", str(kept), "--json", str(made)]
    drawn = tmp_path / "models.png"
    ran = CliRunner().invoke(main, [*asked, "--jobs", "1", "--each", "--picture", str(drawn)])
    assert ran.exit_code == 0, ran.output
    assert "resnet18" in ran.output and drawn.read_bytes().startswith(b"\x89PNG")
    (case,) = json.loads(made.read_text())["cases"]
    assert 0 < case["low_s"] < case["time_s"] < case["high_s"] and case["launches"] > 40
    again = CliRunner().invoke(main, asked)
    assert again.exit_code == 0 and "programs left" not in again.output
    assert json.loads(made.read_text())["cases"] == [case]
