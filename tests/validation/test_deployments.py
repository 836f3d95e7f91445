"""Deployments of decoders: which rows are scored, and what a token and a request are made of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpuir.ir.errors import UsageError
from validation.decoders import are_in, evaluate
from validation.decoders import served as build
from validation.deployments import DRAFTING, IMPOSSIBLE, forecast, read, score
from validation.whole import models

DATA = Path(__file__).parents[3] / "shared" / "data" / "kernels" / "e2e_serving.parquet"
COLUMNS = {
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "system": "h200_sxm",
    "framework": "vllm",
    "mode": "agg",
    "gemm_dtype": "",
    "moe_dtype": "",
    "isl": "1024",
    "osl": "512",
    "concurrency": "8",
    "ttft_ms": "60",
    "tpot_ms": "7",
    "tp_size": "1",
    "pp_size": "1",
    "attention_dp_size": "",
    "moe_tp_size": "1",
    "moe_ep_size": "1",
}


def table(folder: Path, *changes: dict[str, str]) -> Path:
    path = folder / "deployments.csv"
    rows = [",".join({**COLUMNS, **c}.values()) for c in changes]
    path.write_text("\n".join([",".join(COLUMNS), *rows]))
    return path


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mode": "disagg"}, "prefill and decode on different GPUs"),
        ({"model": "zhipuai/GLM-5"}, "sparse attention, of which no kernel is modelled"),
        ({"model": "sparkle"}, "no config of sparkle"),
        ({"system": "sparkle"}, "no target is called sparkle"),
        *(
            (change, "a number of its load is missing, too small or too large")
            for change in (
                *({"concurrency": ""}, {"tpot_ms": "0"}, {"osl": "-1"}, {"isl": "nan"}),
                *({"tp_size": ""}, {"ttft_ms": "inf"}, {"concurrency": "sparkle"}),
            )
        ),
        ({"tp_size": "3"}, "heads that its ranks do not divide"),
        ({"system": "t4", "tp_size": "2"}, "several t4, which have no links"),
        ({"moe_dtype": "sparkle"}, "dtype sparkle is none we know of decoders"),
        ({"tp_size": "16"}, "more than a node of GPUs"),
        ({"tp_size": "4", "attention_dp_size": "4"}, "more than a node of GPUs"),
        (
            {"attention_dp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8"},
            "ranks with sequences of their own",
        ),
        ({"attention_dp_size": "4"}, "ranks with sequences of their own"),
        (
            {"model": "openai/gpt-oss-120b", "tp_size": "2", "moe_ep_size": "4"},
            "experts on other numbers of ranks than attention",
        ),
    ],
)
def test_rows_that_are_not_predicted_say_why(tmp_path: Path, change: dict[str, str], why: str):
    found = read(table(tmp_path, change))
    assert not found.runs
    assert found.skipped == {why: 1}


def test_a_measurement_is_scored_once(tmp_path: Path):
    found = read(table(tmp_path, {}, {}, {"tpot_ms": "7.001"}, {"tpot_ms": "8"}))
    assert (found.count, len(found.runs)) == (4, 2)
    assert found.skipped == {"the same measurement again": 2}


def test_dtypes_are_the_checkpoints(tmp_path: Path):
    models = ("nvidia/Llama-3.1-8B-Instruct-FP8", "Qwen/Qwen3-32B", "openai/gpt-oss-120b")
    rows = [{"model": m, "gemm_dtype": "fp8", "moe_dtype": "fp8"} for m in models]
    runs = read(table(tmp_path, *rows)).runs
    assert [r.deployment.products for r in runs] == ["fp8_static", "fp8_block", "fp8"]
    assert [r.deployment.has_narrow_cache for r in runs] == [True, False, False]


def test_ranks_that_were_multiplied_are_those_of_a_node(tmp_path: Path):
    """`tp8_ep8` in the ids of rows with 64 ranks; four ranks of two and two are what they say."""
    ranks = ((64, 8, 8), (16, 4, 4), (4, 2, 2), (8, 2, 4))
    rows = [
        {
            "model": "openai/gpt-oss-120b",
            **dict(zip(("tp_size", "moe_tp_size", "moe_ep_size"), map(str, found), strict=True)),
        }
        for found in ranks
    ]
    found = [r.deployment for r in read(table(tmp_path, *rows)).runs]
    assert [(d.tp, d.expert_tp, d.expert_ep) for d in found] == [
        *((8, 1, 8), (4, 1, 4), (4, 2, 2), (8, 2, 4))
    ]


def test_prompts_that_go_first_come_half_before_the_first_token(tmp_path: Path):
    (f,) = forecast(read(table(tmp_path, {"framework": "sglang"})).runs, build)
    assert f.added_s == pytest.approx(f.prompt_s)
    assert f.tpot_s == pytest.approx(f.decode_s + 7 / 1024 * f.added_s)
    first_s = 9 / 2 * f.added_s  # the mean wait of eight, each for those before it and itself
    assert f.request_s == pytest.approx(first_s + 512 * f.tpot_s)


def test_a_token_waits_for_its_step_and_for_others_prompts(tmp_path: Path):
    (f,) = forecast(read(table(tmp_path, {})).runs, build)
    assert f.batch == 8
    assert f.tpot_s == pytest.approx(f.decode_s + 7 / 512 * f.added_s)
    assert f.request_s == pytest.approx(8 * f.added_s + 512 * f.decode_s)
    assert 0 < f.added_s[0] < f.prompt_s[0] + f.decode_s[0]
    assert 0.004 < f.decode_s[0] < 0.008  # 16 GB of weights at 4.8 TB/s take 3.3 ms


def test_clients_beyond_the_cache_wait_for_a_place(tmp_path: Path):
    change = {"concurrency": "4096", "isl": "8192"}
    (f,) = forecast(read(table(tmp_path, change)).runs, build)
    assert f.batch < 200  # 141 GB, 16 of weights, 1.1 a sequence
    turn_s = f.batch * f.added_s + 512 * f.decode_s
    assert f.request_s == pytest.approx(4096 / f.batch * turn_s)


def test_what_no_gpu_can_do_is_apart(tmp_path: Path):
    runs = read(table(tmp_path, {}, {"tpot_ms": "0.1", "ttft_ms": "1"})).runs
    scores = score(forecast(runs, build), "mine").groups
    assert [(s.group.op, s.group.suspect, s.errors.n) for s in scores] == [
        *(("request", "", 1), ("request", IMPOSSIBLE, 1)),
        *(("tpot", "", 1), ("tpot", IMPOSSIBLE, 1)),
    ]


@pytest.mark.slow
def test_what_may_draft_tokens_is_apart(tmp_path: Path):
    change = {"model": "deepseek-ai/DeepSeek-R1", "tp_size": "8", "moe_tp_size": "8"}
    rows = [
        change | {"gemm_dtype": "fp8", "moe_dtype": "fp8", "framework": f}
        for f in ("sglang", "trtllm")
    ]
    scores = score(forecast(read(table(tmp_path, *rows)).runs, build), "mine").groups
    assert {(dict(s.group.by)["framework"], s.group.suspect) for s in scores} == {
        *(("sglang", ""), ("trtllm", DRAFTING)),
    }


def test_tables_are_told_by_their_columns(tmp_path: Path):
    told, scores = evaluate(table(tmp_path, {}, {"mode": "disagg"}))
    assert (told.count, sum(told.skipped.values())) == (2, 1)
    assert {s.group.op for s in scores.groups} == {"tpot", "request"}
    other = tmp_path / "other.csv"
    other.write_text("device,op\na,b\n")
    assert not are_in(other)
    with pytest.raises(UsageError, match="no table of decoders"):
        evaluate(other)


def test_the_command_scores_deployments_without_configs(tmp_path: Path):
    path = str(table(tmp_path, {}))
    shown = CliRunner().invoke(models, [path, "--width", "120"])
    assert shown.exit_code == 0
    assert "deployments of language models, 1 rows" in " ".join(shown.output.split())
    assert "Llama-3.1-8B-Instruct" in shown.output
    told = json.loads(CliRunner().invoke(models, [path, "--json", "-"]).stdout)
    assert {r["op"] for r in told["rows"]} == {"tpot", "request"}
    assert told["files"][0]["scored"] == 1


def test_weights_of_unseen_gpus_are_asked_for_by_name(tmp_path: Path):
    with pytest.raises(UsageError, match="no weights of these GPUs") as error:
        evaluate(table(tmp_path, {}), str(tmp_path))
    assert error.value.expected == "h200-sxm-141gb.json"


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="the measurements are not here")
def test_public_deployments_are_predicted_better_than_by_the_roofline():
    pytest.importorskip("pyarrow")
    found = read(DATA)
    assert len(found.runs) + sum(found.skipped.values()) == found.count
    mine = tuple(r for r in found.runs if r.deployment.decoder.name.endswith("Llama-3.1-70B"))
    errors = [s.errors for s in score(forecast(mine, build), "mine").groups if s.group.op == "tpot"]
    rows = np.array([e.n for e in errors])
    assert rows.sum() > 200
    assert np.average([e.mape for e in errors], weights=rows) < 15
    assert np.average([e.roofline_mape for e in errors], weights=rows) > 40
