"""Published training runs as `gpuir eval training` reads, lays out and scores them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

from gpuir.cli.main import main
from gpuir.ir.errors import UsageError
from validation import layers, ranks, runs, training
from validation.layers import BACKWARD, FORWARD, Seconds, Share, Stack
from validation.ranks import Forecast
from validation.runs import Facts, Run

MEASURED = Path(__file__).parents[3] / "shared/data/training/llm_training.csv"
DENSE: dict[str, object] = {
    "kind": "dense decoder",
    "layers": 4,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 64,
    "ffn": 1024,
    "gated": False,
    "vocab": 2048,
    "activation": "gelu",
    "norm": "layernorm",
    "position": "learned",
    "tied_embedding": True,
    "bias": True,
}
LINE: dict[str, str] = {
    "id": "t-1",
    "model": "small",
    "task": "pretrain",
    "seq": "512",
    "gpus": "8",
    "gpu": "A100-SXM4-80GB",
    "gpus_per_node": "8",
    "dp": "8",
    "tp": "1",
    "pp": "1",
    "vp": "1",
    "cp": "1",
    "ep": "1",
    "sharding": "FSDP FULL_SHARD",
    "micro_batch": "4",
    "global_batch": "64",
    "dtype": "bf16",
    "framework": ranks.LLM_FOUNDRY,
    "step_time_s": "0.5",
    "version": "1",
    "activation_checkpointing": "none",
}


def table(folder: Path, *lines: dict[str, str]) -> Path:
    rows = [",".join(({**LINE, **x}).get(c, "") for c in runs.COLUMNS) for x in lines]
    (path := folder / "runs.csv").write_text("\n".join((",".join(runs.COLUMNS), *rows)) + "\n")
    models = {"small": DENSE, "mixed": {"kind": "MoE decoder"}}
    (folder / "models.json").write_text(json.dumps(models))
    return path


def run(folder: Path, **changes: str) -> Run:
    path = table(folder, changes)
    (found,), _ = runs.read(path, runs.read_facts(path.with_name("models.json")))
    return found


def test_lines_are_runs_or_say_why_not(tmp_path: Path):
    nothing: dict[str, str] = {}
    path = table(
        tmp_path,
        *(nothing, {"doubt": "y"}, {"model": "mixed"}, {"gpu": "nobody's"}, {"task": "lora"}),
        *({"dtype": "nvfp4"}, {"global_batch": "63"}, {"model": "nobody's"}, {"step_time_s": ""}),
    )
    (found,), skipped = runs.read(path, runs.read_facts(path.with_name("models.json")))
    assert (found.layout, found.family, found.micro, found.node) == ("fsdp", "small", 4, 8)
    assert sum(skipped.values()) == 8 and len(skipped) == 8


def test_labels_of_several_gpus_are_runs(tmp_path: Path):
    (path := tmp_path / "labels.csv").write_text(
        ",".join(runs.LABELS)
        + "\nNVIDIA_A100-SXM4-40GB,gpt2,train,64,4,none,1.0"
        + "\nNVIDIA_A100-SXM4-40GB,gpt2,train,64,4,pp4_1,1.0"
        + "\nNVIDIA_A100-SXM4-40GB,bert,train,64,4,dp4,1.0\n"
    )
    config = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 1000}
    (found,), skipped = runs.read_labels(path, {"gpt2": config})
    assert (found.pp, found.dp, found.micro, found.gpus) == (4, 1, 4, 4)
    assert found.facts.vocab == 1024 and sum(skipped.values()) == 2
    parts = ranks.forecast(found).parts
    assert parts["bubble"] == pytest.approx(3 * parts["layers"])  # of one microbatch


def test_bert_is_an_encoder_and_others_are_left_out(tmp_path: Path):
    head = ("id", "version", "items_per_s", *runs.OTHERS)
    (path := tmp_path / "others.csv").write_text(
        ",".join(head)
        + "\no-1,1,9,bert-large,A100-SXM4-80GB,8,amp fp16,256,32,128,14.3"
        + "\no-2,1,9,bert-large,A100-SXM4-80GB,8,amp fp16,32,128,512,19.8"
        + "\no-3,1,9,resnet50,A100-SXM4-80GB,8,amp fp16,256,1,,0.1\n"
    )
    assert runs.are_others(path)
    (found,), skipped = runs.read_others(path)
    assert (found.dp, found.micro, found.batch) == (8, 256, 8 * 256 * 32)
    assert found.facts.encoder and found.facts.predicted < 1 and sum(skipped.values()) == 2


def test_another_table_is_refused(tmp_path: Path):
    (path := tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="not a table of training runs"):
        runs.read(path, {})
    result = CliRunner().invoke(main, ["eval", "training", str(path)])
    assert result.exit_code == 2 and "models of these runs" in result.stderr
    assert CliRunner().invoke(main, ["eval", "training"]).exit_code == 2


def test_releases_of_one_configuration_are_one_case(tmp_path: Path):
    one = run(tmp_path)
    other = replace(one, id="t-2", version="2", measured_s=0.7)
    (found,) = training.grouped([one, other])
    assert found.measured_s == pytest.approx(0.6)
    assert len(training.grouped([one, replace(other, tp=2)])) == 2


def facts(**changes: object) -> Facts:
    found = Facts.of({**DENSE, **changes})
    assert isinstance(found, Facts)
    return found


def test_a_layer_costs_what_one_more_of_them_adds():
    """The times of four layers and the ends are those of a model of four."""
    stack, share = Stack("compiled", "bf16"), Share(4, 512)
    found = layers.times(facts(), share, stack, "a100-sxm-80gb")
    whole, _, _ = layers._phases(  # pyright: ignore[reportPrivateUsage]
        layers._graph(facts(), 4, share, stack, "a100-sxm-80gb"),  # pyright: ignore[reportPrivateUsage]
        stack,
    )
    residuals = layers.copies(4 * 512 * 256, "a100-sxm-80gb") * 2  # whose gradients are added up
    for phase, more in ((FORWARD, Seconds()), (BACKWARD, residuals)):
        sums = (found.layer[phase] - more) * 4 + found.ends[phase]
        assert whole[phase].time_s == pytest.approx(sums.time_s, rel=1e-6)


def test_tensor_ranks_share_a_layer():
    stack, wide = Stack("compiled", "bf16"), facts(hidden=2048, heads=16, ffn=8192, head_dim=128)
    one = layers.times(wide, Share(4, 2048), stack, "a100-sxm-80gb").layer
    for sequence in (False, True):
        cut = layers.times(wide, Share(4, 2048, 4, 1, sequence), stack, "a100-sxm-80gb").layer
        assert one[FORWARD].time_s / 4.5 < cut[FORWARD].time_s < one[FORWARD].time_s / 2


def test_the_first_flash_attention_is_slower_and_fp8_quicker():
    wide = facts(hidden=4096, heads=32, ffn=16384, head_dim=128)
    share, gpu = Share(1, 8192), "h100-sxm-80gb"
    library = layers.times(wide, share, Stack("compiled", "bf16"), gpu).layer
    first = layers.times(wide, share, Stack("compiled", "bf16", "first"), gpu).layer
    narrow = layers.times(wide, share, Stack("compiled", "fp8"), gpu).layer
    for phase in (FORWARD, BACKWARD):
        assert first[phase].time_s > library[phase].time_s > narrow[phase].time_s


def test_what_is_recomputed_is_a_forward_pass(tmp_path: Path):
    plain, again = (
        ranks.forecast(run(tmp_path, activation_checkpointing=x)) for x in ("none", "full")
    )
    found = layers.times(facts(), Share(4, 512), ranks.stack_of(plain.run)[0], "a100-sxm-80gb")
    more = again.parts["layers"] - plain.parts["layers"]
    assert more == pytest.approx(4 * 2 * found.layer[FORWARD].time_s)


def test_a_pipeline_waits_less_with_more_chunks(tmp_path: Path):
    def bubble(vp: str) -> float:
        known = {"sharding": "DDP", "pp": "4", "dp": "2", "vp": vp, "framework": "NeMo"}
        return ranks.forecast(run(tmp_path, **known)).parts["bubble"]

    assert bubble("2") == pytest.approx(bubble("1") / 2)


def test_scores_are_by_group(tmp_path: Path):
    one = run(tmp_path)
    off = Forecast(one, {"layers": 0.55}, (0.4, 0.6), ()), Forecast(one, {"x": 0.4}, (0.3, 0.4), ())
    found = {e.op: e for e in training.scores(training.Table("t", off, 2, {}))}
    every = found["all"]
    assert (every.n, every.coverage) == (2, 50)
    assert every.mape == pytest.approx(15) and every.bias == pytest.approx(-5)
    assert {"layout: fsdp", "gpus: 2 to 8 GPUs", "gpu: a100-sxm-80gb", "family: small"} <= set(
        found
    )


def test_the_command_writes_json_and_says_what_is_left_out(tmp_path: Path):
    path = table(tmp_path, {}, {"doubt": "y"})
    result = CliRunner().invoke(main, ["eval", "training", str(path), "--json", "-"])
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    (file,), (case,) = made["files"], made["cases"]
    assert file["skipped"] == {"the page contradicts itself (doubt)": 1} and file["scored"] == 1
    assert sum(case["parts_s"].values()) == pytest.approx(case["predicted_s"], rel=1e-4)
    assert {"file", "op", "target", "n", "mape", "median_ape", "bias", "coverage"} <= set(
        made["rows"][0]
    )


def test_seconds_add_up():
    assert Seconds(1, 0.5, 2) * 2 - Seconds(1, 0.5, 2) + Seconds() == Seconds(1, 0.5, 2)


@pytest.mark.skipif(not MEASURED.exists(), reason="published runs are not beside the checkout")
def test_published_runs_are_read_whole():
    found, skipped = runs.read(MEASURED, runs.read_facts(MEASURED.with_name("models.json")))
    assert len(found) + sum(skipped.values()) == 241 and len(found) > 150
    (large,) = (r for r in found if r.gpus == 256 and r.model == "mpt-70b")
    made = ranks.forecast(large)
    assert made.run.measured_s / 1.3 < made.time_s < made.run.measured_s * 1.3
