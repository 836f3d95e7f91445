"""Published training runs as `gpuir eval training` reads, lays out and scores them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("torch")

import gpuir
from gpuir.cli.main import main
from gpuir.cost.habits import Release
from gpuir.frontends.torch.program import TorchProgram
from gpuir.ir.errors import UsageError
from gpuir.ops import kernel as k
from gpuir.ops import tensor as t
from gpuir.run.analysis import costed
from validation import ranks, runs, training, zoo
from validation.programs import Sizes
from validation.ranks import Forecast, asked_of
from validation.runs import Run, sizes_of

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
MIXED: dict[str, object] = DENSE | {
    "kind": "MoE decoder",
    "gated": True,
    "activation": "silu",
    "norm": "rmsnorm",
    "qk_norm": True,
    "position": "rope",
    "tied_embedding": False,
    "bias": False,
    "dense_layers": 0,
    "moe_ffn": 128,
    "experts": 16,
    "top_k": 4,
}
CLAMPED: dict[str, object] = MIXED | {
    "activation": "clamped swiglu",
    "bias": True,
    "qk_norm": False,
    "sliding_window": 64,
    "sliding_layers": 2,
}
LATENT: dict[str, object] = MIXED | {
    "dense_layers": 1,
    "shared_experts": 1,
    "shared_ffn": 128,
    "mtp_layers": 1,
    "qk_norm": False,
    "attention": "MLA",
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
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
    "framework": runs.LLM_FOUNDRY,
    "step_time_s": "0.5",
    "version": "1",
    "activation_checkpointing": "none",
}


def table(folder: Path, *lines: dict[str, str]) -> Path:
    rows = [",".join(({**LINE, **x}).get(c, "") for c in runs.COLUMNS) for x in lines]
    (path := folder / "runs.csv").write_text("\n".join((",".join(runs.COLUMNS), *rows)) + "\n")
    models = {"small": DENSE, "mixed": MIXED, "hybrid": {"kind": "hybrid Mamba-2 MoE decoder"}}
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
        *(nothing, {"doubt": "y"}, {"model": "hybrid"}, {"gpu": "nobody's"}, {"task": "lora"}),
        {"ep": "2"},
        *({"dtype": "nvfp4"}, {"global_batch": "63"}, {"model": "nobody's"}, {"step_time_s": ""}),
    )
    (found,), skipped = runs.read(path, runs.read_facts(path.with_name("models.json")))
    assert (found.layout, found.family, found.micro, found.node) == ("fsdp", "small", 4, 8)
    assert sum(skipped.values()) == 9 and len(skipped) == 9


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
    assert found.sizes.vocab == 1024 and sum(skipped.values()) == 2
    made = ranks.forecast(found)
    assert 0.6 < made.parts["bubble"] / made.time_s < 0.8  # one microbatch, four ranks in turn


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
    assert found.sizes.encoder and found.sizes.predicted == 20 and sum(skipped.values()) == 2


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
    for changes in ({"tp": 2}, {"ep": 2}):
        assert len(training.grouped([one, replace(other, **changes)])) == 2


def sizes(model: dict[str, object] = DENSE, **changes: object) -> Sizes:
    found = sizes_of({**model, **changes})
    assert isinstance(found, Sizes)
    return found


def program(made: Sizes, layers: int, batch: int, seq: int) -> TorchProgram:
    return zoo.decoder(batch, seq, **asdict(made) | {"layers": layers})


def layer_weights(f: Sizes, at: int) -> int:
    """Cells of the weights of a layer, without biases and norms."""
    attention = f.hidden * f.head * 2 * (f.heads + f.kv_heads)
    if f.q_rank:
        queries = f.q_rank * (f.hidden + f.heads * (f.plain + f.placed))
        keys = f.hidden * (f.kv_rank + f.placed) + f.kv_rank * f.heads * (f.plain + f.value)
        attention = queries + keys + f.heads * f.value * f.hidden
    width, router = f.ffn, 0
    if f.experts and at >= f.dense:
        width, router = f.experts * f.moe_ffn + f.shared, f.experts * f.hidden
    return attention + (3 if f.gated else 2) * f.hidden * width + router


def end_weights(f: Sizes) -> int:
    """Cells of the embedding, and of the head where that has its own."""
    return f.vocab * f.hidden * (1 if f.tied else 2)


def test_a_program_has_the_weights_of_its_sizes():
    gated: dict[str, object] = {"gated": True, "position": "rope", "norm": "rmsnorm", "kv_heads": 2}
    for model in (DENSE, DENSE | gated):
        made = sizes(model, bias=False, tied_embedding=False)
        module = program(made, 3, 2, 64).module
        cells = sum(p.numel() for p in module.parameters() if p.dim() > 1)
        places = 0 if made.rope else 64 * made.hidden
        assert cells == 3 * layer_weights(made, 0) + end_weights(made) + places


@pytest.mark.parametrize("model", [MIXED, CLAMPED, LATENT])
def test_a_mixture_has_the_weights_of_its_sizes(model: dict[str, object]):
    made = sizes(model)
    module = program(made, 3, 2, 64).module
    cells = sum(p.numel() for n, p in module.named_parameters() if p.dim() > 1 and "bias" not in n)
    further = made.further * (layer_weights(made, 3) + 2 * made.hidden**2)
    assert cells == sum(layer_weights(made, i) for i in range(3)) + end_weights(made) + further


@pytest.mark.parametrize("model", [MIXED, CLAMPED, LATENT])
def test_experts_are_one_call_and_windows_are_known(model: dict[str, object]):
    made = sizes(model)
    g = gpuir.load(program(made, 3, 2, 128), train=True, autodiff="gpuir", warn=lambda _: None)
    assert not any(n.op.name == "t.opaque" for n in g.nodes)
    count = 3 - made.dense + made.further
    for kind in (t.Experts, t.ExpertsGradient):
        found = [n.op for n in g.nodes if isinstance(n.op, kind)]
        assert len(found) == count
        assert {(x.limit, x.interleaved) for x in found} == {
            (7.0, True) if model is CLAMPED else (None, False)
        }
    seen = [n.op.window for n in g.nodes if isinstance(n.op, t.Attention)]
    assert seen == ([63, None, 63] if made.window else [None] * (3 + made.further))


def test_ranks_of_ep_share_experts_and_have_tokens_of_their_own(tmp_path: Path):
    """Rows go to experts and back in each pass; weights of experts are summed over dp alone."""
    shape = {"model": "mixed", "ep": "4", "micro_batch": "1", "framework": "NeMo / Megatron Core"}
    one = run(tmp_path, **shape, sharding="DDP")
    assert one.layout == "dp+ep" and replace(one, ep=8).layout == "ep"
    asked, assumed = asked_of(one)
    assert (asked.parallel.dp, asked.parallel.ep, asked.parallel.zero) == (2, 4, 1)
    assert any("experts" in text for text in assumed)
    assert asked_of(replace(one, ep=8))[0].parallel.zero == 0
    step = asked_of(replace(one, sizes=replace(one.sizes, layers=2)))[0].step()
    sent: list[tuple[str, str, int | None, int]] = []
    for n in step.slowest.runs[-1].graph.nodes:
        if isinstance(n.op, k.Collective):
            sent += [(x.fn, x.group, x.routed, x.x.type.rank) for x in n.op.collectives]
        if isinstance(n.op, k.Experts):
            assert (n.op.experts.ranks, n.op.experts.up.type.shape[0]) == (4, 4)
    assert len([x for x in sent if x[2]]) == 2 * 4
    assert {x[2] for x in sent if x[2]} == {512 * 4 * 256 * 2}
    assert {x[1] for x in sent if x[0] == "all_reduce" and x[3] == 3} == {"dp"}
    assert {x[1] for x in sent if x[0] == "all_reduce" and x[3] == 2} == {"ep+dp"}


def test_a_pipeline_of_experts_is_run(tmp_path: Path):
    shape = {"model": "mixed", "dp": "4", "pp": "2", "vp": "2", "ep": "4", "micro_batch": "1"}
    one = run(tmp_path, **shape, sharding="DDP", framework="NeMo / Megatron Core")
    assert one.layout == "pp+ep" and ranks.forecast(one).parts["bubble"] > 0


def test_fsdp_gathers_in_16_bits_and_sums_in_32(tmp_path: Path):
    """Weights are stored in f32 and read in bf16, as FSDP's mixed precision has it."""
    one = run(tmp_path)
    step = asked_of(replace(one, sizes=replace(one.sizes, layers=2)))[0].step()
    sent = [
        (x.fn, str(x.x.type.dtype))
        for r in step.slowest.runs
        for n in r.graph.nodes
        if isinstance(n.op, k.Collective) and "layers.1" in n.locs[0]
        for x in n.op.collectives
        if x.x.type.rank == 2
    ]
    assert set(sent) == {("all_gather", "bf16"), ("reduce_scatter", "f32")}


def test_other_kernels_take_other_times():
    """The first FlashAttention is slower, fp8 quicker, but not of the vocabulary and the router."""
    wide = sizes(MIXED, hidden=4096, heads=32, ffn=16384, head_dim=128, kv_heads=32, moe_ffn=8192)
    made = program(wide, 1, 1, 8192)
    made = replace(made, module=made.module.bfloat16())
    g = gpuir.load(made, train=True, profile="compiled", warn=lambda _: None)

    kept = frozenset({wide.vocab, 16})  # experts

    def seconds(kernels: Release) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for n in costed(g, "h100-sxm", predictor=kernels).nodes:
            kind = type(n.op).__name__
            if isinstance(n.op, k.Gemm) and not kept.isdisjoint(n.op.space().dims.values()):
                kind = "kept"
            found.setdefault(kind, []).append(n.cost.time_s if n.cost else 0.0)
        return found

    plain, first, narrow = (
        seconds(Release()),
        seconds(Release("flash-1")),
        seconds(Release(narrow="fp8", wide=kept)),
    )
    for kind in ("Attention", "AttentionGradient"):
        assert min(first[kind]) > max(plain[kind])
    for kind in ("Gemm", "Experts", "ExpertsGradient"):
        assert sum(narrow[kind]) < 0.8 * sum(plain[kind])
    assert narrow["kept"] == plain["kept"] and first["Map"] == plain["Map"]


def test_layouts_are_what_pages_print(tmp_path: Path):
    known = {"sharding": "DDP", "pp": "2", "dp": "2", "tp": "2", "vp": "2"}
    one = asked_of(run(tmp_path, framework="NeMo / Megatron Core", **known))[0].parallel
    assert (one.schedule, one.chunks, one.zero, one.sequence, one.overlap) == (
        *("interleaved", 2, 1, True, True),
    )
    old = {"framework": "Megatron-LM", "version": "April 2021"}
    two = asked_of(run(tmp_path, **known, **old))[0].parallel
    assert (two.zero, two.sequence, two.overlap, two.microbatches) == (0, False, False, 8)
    assert asked_of(run(tmp_path))[0].parallel.zero == 3


def test_scores_are_by_group(tmp_path: Path):
    one = run(tmp_path)
    asked, _ = asked_of(one)
    off = (
        Forecast(one, {"layers": 0.55}, (0.4, 0.6), asked),
        Forecast(one, {"x": 0.4}, (0.3, 0.4), asked),
    )
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


@pytest.mark.parametrize("model", [DENSE, MIXED, LATENT])
def test_a_model_without_all_its_facts_is_skipped_with_the_reason(
    tmp_path: Path, model: dict[str, object]
):
    needed = [n for n in model if n not in ("kind", "qk_norm", "experts", "attention")]
    extra = ("shared_experts", "shared_ffn", "mtp_layers")
    for name in needed:
        found = sizes_of({k: v for k, v in model.items() if k != name})
        assert (
            isinstance(found, Sizes)
            if name in extra
            else found == (f"the facts of a model have no {name}")
        )
        if isinstance(model[name], int) and not isinstance(model[name], bool):
            for wrong in ("?", None, -1, [4]):
                assert sizes_of(model | {name: wrong}) == f"the facts of a model have no {name}"
    assert sizes_of({"kind": "dense decoder", "facts": "https://example.org"}) == (
        "the facts of a model have no layers, hidden, heads, kv_heads, head_dim, ffn, vocab, "
        "gated, activation, norm, position, tied_embedding, bias"
    )
    path = tmp_path / "models.json"
    path.write_text('{"small": 4}')
    with pytest.raises(UsageError, match="no models of training runs"):
        runs.read_facts(path)


@pytest.mark.skipif(not MEASURED.exists(), reason="published runs are not beside the checkout")
def test_published_runs_are_read_whole():
    found, skipped = runs.read(MEASURED, runs.read_facts(MEASURED.with_name("models.json")))
    assert len(found) + sum(skipped.values()) == 241 and len(found) > 150
    (large,) = (r for r in found if r.gpus == 256 and r.model == "mpt-1b")
    made = ranks.forecast(large)
    assert made.run.measured_s / 1.3 < made.time_s < made.run.measured_s * 1.3
