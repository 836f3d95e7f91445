"""Configs to programs: tasks, sizes, phases, training, and what is said of those that cannot be."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import gpuir  # noqa: E402
from gpuir.cli.main import main  # noqa: E402
from gpuir.frontends.torch import hf  # noqa: E402
from gpuir.ir.errors import GpuirError, ModelError, UsageError  # noqa: E402
from gpuir.ops import tensor as t  # noqa: E402

pytestmark = pytest.mark.slow

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
BERT: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 101,
}


def config(folder: Path, keys: dict[str, Any], **more: Any) -> str:
    (folder / "config.json").write_text(json.dumps(keys | more))
    return str(folder)


@pytest.mark.parametrize("form", ["hf:{}", "{}", "hf:{}/config.json", "{}/config.json"])
def test_every_way_to_name_a_config(form: str, tmp_path: Path):
    g = gpuir.load(form.format(config(tmp_path, LLAMA)), dims={"seq": 4})
    assert g.name == tmp_path.name
    assert [str(v.type) for v in g.inputs] == ["i64[1, 4]"]
    assert [str(v.type) for v in g.outputs] == ["bf16[1, 4, 101]"]


def test_a_folder_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine").mkdir()
    config(tmp_path / "mine", LLAMA)
    monkeypatch.chdir(tmp_path)
    assert gpuir.load("hf:mine", dims={"seq": 4}).name == "mine"


def test_the_command_line(tmp_path: Path):
    words = ["analyze", config(tmp_path, LLAMA), "--target", "a100", "--dtype", "f16"]
    words += ["--phase", "decode", "--past", "64", "--dims", "batch=2"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0
    assert f"{tmp_path.name}-decode on NVIDIA A100" in done.output
    assert "runs/s of batch 2" in done.output
    refused = CliRunner().invoke(main, [*words, "--value", "x=1"])
    assert refused.exit_code == 2


def test_a_config_needs_no_weights(tmp_path: Path):
    """70 billion of them, in the memory of a library."""
    big = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
    path = config(tmp_path, LLAMA, **big, num_hidden_layers=80, num_key_value_heads=8)
    model = hf.program(path, dims={"seq": 4}).module
    assert sum(p.numel() for p in model.parameters()) > 68e9
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("task", "output"),
    [
        ("causal-lm", "f32[2, 7, 101]"),
        ("masked-lm", "f32[2, 7, 101]"),
        ("seq-cls", "f32[2, 2]"),
        ("token-cls", "f32[2, 7, 2]"),
        ("question-answering", "f32[2, 7]"),
        ("feature", "f32[2, 7, 32]"),
        ("pretraining", "f32[2, 7, 101]"),
    ],
)
def test_tasks(task: str, output: str, tmp_path: Path):
    more = {"is_decoder": True} if task == "causal-lm" else {}
    g = gpuir.load(config(tmp_path, BERT, **more), task=task, dims={"batch": 2, "seq": 7})
    assert str(g.outputs[0].type) == output


@pytest.mark.parametrize(("dtype", "written"), [(None, "bf16"), ("f16", "f16"), ("f32", "f32")])
def test_dtypes(dtype: str | None, written: str, tmp_path: Path):
    g = gpuir.load(config(tmp_path, LLAMA), dims={"seq": 4}, dtype=dtype)
    assert {v.type.dtype.name for v in g.params if v.type.rank == 2} == {written}


def test_a_mask_is_an_input_and_is_added(tmp_path: Path):
    size: Any = {"dims": {"batch": 2, "seq": 7}, "task": "seq-cls", "attention": "eager"}
    path = config(tmp_path, BERT)
    plain, masked = gpuir.load(path, **size), gpuir.load(path, mask=True, **size)
    assert [str(v.type) for v in masked.inputs] == ["i64[2, 7]"] * 2
    scores = {g: [n for n in g.nodes if "attention.self/add" in n.locs[0]] for g in (plain, masked)}
    assert not scores[plain]
    assert len(scores[masked]) == BERT["num_hidden_layers"]


def test_both_heads_of_pretraining_have_a_loss_and_its_gradients_add_up(tmp_path: Path):
    size: Any = {"dims": {"batch": 2, "seq": 7}, "task": "pretraining"}
    g = gpuir.load(config(tmp_path, BERT), train=True, accumulate=True, **size)
    assert [v.name for v in g.inputs] == ["input_ids", "labels", "next_sentence_label"]
    taken = {over.name for over in g.over if over is not None}
    assert {
        "cls.seq_relationship.weight.grad",
        "cls.predictions.transform.dense.bias.grad",
    } <= taken
    assert all(g.role_of(v) == "gradient" for v in g.params if v.name in taken)
    assert sum("/accumulate/backward" in n.locs[0] for n in g.nodes) == len(taken)


def test_attention_is_one_causal_kernel_without_a_mask(tmp_path: Path):
    path = config(tmp_path, LLAMA)
    g = gpuir.load(path, dims={"seq": 16})
    kernels = [n.op for n in g.nodes if isinstance(n.op, t.Attention)]
    assert [(op.causal, op.mask) for op in kernels] == [(True, None)] * 2
    assert {op.k.type.shape[1] for op in kernels} == {2}  # grouped heads stay grouped
    eager = gpuir.load(path, dims={"seq": 16}, attention="eager")
    assert not any(isinstance(n.op, t.Attention) for n in eager.nodes)


# ---------------------------------------------------------------------------- phases


def test_decode_writes_into_caches_in_place(tmp_path: Path):
    g = gpuir.load(config(tmp_path, LLAMA), phase="decode", past=127, dims={"batch": 3})
    caches = [v for v in g.inputs if g.role_of(v) == "cache"]
    assert [v.name for v in caches] == ["keys_0", "keys_1", "values_0", "values_1"]
    assert {v.type.shape for v in caches} == {(3, 2, 128, 8)}
    assert g.over == (None, *caches)
    assert [str(v.type) for v in g.outputs[:1]] == ["bf16[3, 1, 101]"]
    costed = gpuir.analyze(g, "a100").graph
    summary = gpuir.analyze(costed)
    assert summary.memory.parts["cache"] == 4 * 3 * 2 * 128 * 8 * 2
    writes = [k for k in summary.kernels if k.node.op.name == "k.scatter"]
    new = 3 * 2 * 8 * 2  # bytes of one layer's new keys
    assert len(writes) == 4
    assert all(k.bytes <= 10 * new for k in writes)  # those, their places, nothing of the past


@pytest.mark.parametrize(("phase", "new"), [("decode", 1), ("prefill", 8)])
def test_a_cache_of_8_bits_is_half_as_many_bytes(phase: str, new: int, tmp_path: Path):
    """As memory and as what attention reads; no launch but that and the writing touches it."""
    options: Any = {"phase": phase, "past": 128 - new, "dims": {"seq": new}}
    path = config(tmp_path, LLAMA)
    wide = gpuir.load(path, **options)
    narrow = gpuir.load(path, cache_dtype="f8e4m3", **options)
    caches = [v for v in narrow.inputs if narrow.role_of(v) == "cache"]
    assert narrow.over == (None, *caches)
    assert {v.type.dtype.name for v in (*caches, *narrow.outputs[1:])} == {"f8e4m3"}
    attention = next(n.op for n in narrow.nodes if isinstance(n.op, t.Attention))
    assert attention.q.type.dtype.name == attention.result_types[0].dtype.name == "bf16"
    assert attention.k.type.dtype.name == attention.v.type.dtype.name == "f8e4m3"
    plain = next(n.op for n in wide.nodes if isinstance(n.op, t.Attention))
    assert (attention.causal, attention.offset) == (plain.causal, plain.offset)

    def bytes_of(graph: gpuir.Graph) -> tuple[int, float]:
        costed = gpuir.analyze(graph, "h100-sxm").graph
        kernel = next(n for n in costed.nodes if n.op.name == "k.attention")
        assert kernel.cost is not None
        kept = {v for v in costed.inputs if costed.role_of(v) == "cache"} | {*costed.outputs[1:]}
        readers = {n.op.name for n in costed.nodes if kept & {*n.op.operands}}
        assert readers == {"k.scatter", "k.attention"}
        return gpuir.analyze(costed).memory.parts["cache"], dict(kernel.cost.facts)["operand_bytes"]

    keys = 2 * 2 * 128 * 8  # of a layer, and values
    cells = 2 * 8 * new * 8  # of the queries and the result
    assert bytes_of(wide) == (2 * 2 * keys, 2 * keys + 2 * cells)
    assert bytes_of(narrow) == (2 * keys, keys + 2 * cells)
    assert not any("kept" in text for text in wide.assumed)
    assert any("stored in f8e4m3, as the option says" in text for text in narrow.assumed)


def test_a_cache_as_wide_as_the_model_is_cast_before_it_is_read(tmp_path: Path):
    g = gpuir.load(config(tmp_path, LLAMA), phase="decode", past=9, cache_dtype="f16")
    assert {v.type.dtype.name for v in g.outputs[1:]} == {"f16"}
    ops = [n.op for n in g.nodes if isinstance(n.op, t.Attention)]
    assert {op.k.type.dtype.name for op in ops} == {"bf16"}


def test_eager_attention_reads_a_narrow_cache_through_casts(tmp_path: Path):
    path = config(tmp_path, LLAMA)
    options: Any = {"phase": "decode", "past": 9, "attention": "eager"}
    g = gpuir.load(path, cache_dtype="f8e4m3", **options)
    assert {v.type.dtype.name for v in g.outputs[1:]} == {"f8e4m3"}
    products = [n.op for n in g.nodes if isinstance(n.op, t.Matmul)]
    assert {v.type.dtype.name for op in products for v in op.operands} == {"bf16"}


def test_prefill_computes_the_logits_of_the_last_token(tmp_path: Path):
    g = gpuir.load(config(tmp_path, LLAMA), phase="prefill", dims={"seq": 32})
    assert str(g.outputs[0].type) == "bf16[1, 1, 101]"
    assert {v.type.shape for v in g.outputs[1:]} == {(1, 2, 32, 8)}


def test_a_window_bounds_the_cache(tmp_path: Path):
    path = config(tmp_path, LLAMA, model_type="mistral", sliding_window=16)
    g = gpuir.load(path, task="causal-lm", phase="decode", past=99)
    assert {v.type.shape for v in g.outputs[1:]} == {(1, 2, 16, 8)}


def test_positions_beyond_the_config_are_assumed(tmp_path: Path):
    g = gpuir.load(config(tmp_path, LLAMA), phase="decode", past=4000)
    assert any("max_position_embeddings=256" in text for text in g.assumed)


GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 1,
    "n_positions": 64,
    "vocab_size": 101,
}
OPT: dict[str, Any] = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 64,
    "vocab_size": 101,
}
ROBERTA = BERT | {"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}


@pytest.mark.parametrize(
    ("keys", "room"),
    [(GPT2, 64), (OPT, 64), (BERT | {"max_position_embeddings": 64}, 64)]
    + [(ROBERTA | {"max_position_embeddings": 66}, 64)],
)
def test_a_table_of_positions_ends(keys: dict[str, Any], room: int, tmp_path: Path):
    path = config(tmp_path, keys)
    hf.program(path, dims={"seq": room})
    with pytest.raises(ModelError, match=f"at most {room}, the number of rows of"):
        hf.program(path, dims={"seq": room + 1})


def test_a_table_of_positions_ends_behind_a_past_too(tmp_path: Path):
    path = config(tmp_path, GPT2)
    hf.program(path, phase="decode", past=63)
    with pytest.raises(ModelError, match="64 \\+ 1"):
        hf.program(path, phase="decode", past=64)


# ---------------------------------------------------------------------------- training


def test_training_gives_the_loss_first(tmp_path: Path):
    g = gpuir.load(config(tmp_path, BERT), dims={"batch": 2, "seq": 7}, train=True)
    assert [v.name for v in g.inputs] == ["input_ids", "labels"]
    assert g.outputs[0].type.shape == ()
    weights = [v for v in g.params if v.type.dtype.kind == "float"]
    assert sum(role == "gradient" for _, role in g.roles) == len(weights)


# ---------------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize("odd", [5, -1, 0, 10**30, 1e400, "x", [], {}, [[]], True, "\x00"])
@pytest.mark.parametrize("key", [*LLAMA, "rope_parameters", "head_dim", "layer_types"])
def test_odd_values_are_the_configs_fault(key: str, odd: Any, tmp_path: Path):
    """Whatever is wrong with a config is said as such: nothing but our own errors comes out."""
    path = config(tmp_path, LLAMA, **{key: odd})
    try:
        hf.program(path, dims={"seq": 4})
    except GpuirError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("key", "count", "most"),
    [
        ("num_hidden_layers", 10**9, 512),
        ("num_hidden_layers", 10**400, 512),
        ("num_experts", 10**9, 1 << 20),
        ("num_layers", 1e300, 512),
    ],
)
def test_more_layers_than_can_be_built(key: str, count: float, most: int, tmp_path: Path):
    path = config(tmp_path, LLAMA, **{key: count})
    with pytest.raises(ModelError, match=f"at most {most}"):
        hf.program(path, dims={"seq": 4})


def test_modules_of_experts_are_counted_not_numbers_in_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Doge has 16,384 experts in its config by default: none without `is_moe`, rows of two tables
    with it. Switch Transformers has five modules for each."""
    few = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 101}
    doge = {"model_type": "doge", "architectures": ["DogeForCausalLM"], **few}
    doge |= {"num_attention_heads": 2, "num_experts": 16384}
    for is_moe in (False, True):
        g = gpuir.load(config(tmp_path, doge, is_moe=is_moe), dims={"seq": 8})
        tables = [v.name for v in g.params if v.type.shape == (16384, 64)]
        assert len(tables) == 2 * is_moe
    monkeypatch.setattr(hf, "MOST_MODULES", 400)
    switch = {
        "model_type": "switch_transformers",
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 0,
        "d_model": 16,
        "d_ff": 16,
        "vocab_size": 101,
    }
    hf.program(config(tmp_path, switch, num_experts=8), dims={"seq": 4, "target": 4})
    with pytest.raises(ModelError, match="at most 400 modules"):
        hf.program(config(tmp_path, switch, num_experts=80), dims={"seq": 4, "target": 4})


def test_weights_that_a_class_wants_in_f32(tmp_path: Path):
    """As from_pretrained loads them: T5's `wo` beside f16 alone, a router's weights beside both."""
    t5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "num_layers": 1}
    t5 |= {"d_model": 16, "d_ff": 32, "d_kv": 4, "num_heads": 4, "vocab_size": 101}
    for dtype, wide in (("f16", "f32"), ("bf16", "bf16")):
        g = gpuir.load(config(tmp_path, t5), dims={"seq": 4, "target": 4}, dtype=dtype)
        kinds = {v.name.rpartition("wo.")[1]: str(v.type.dtype) for v in g.params}
        assert kinds == {"": dtype, "wo.": wide}
    packed = t5 | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    g = gpuir.load(config(tmp_path, packed), dims={"seq": 4, "target": 4}, dtype="f16")
    inner = [v for v in g.params if v.name.endswith(("wo.weight", "wi.weight"))]
    kinds = {v.name: str(v.type.dtype) for v in inner}
    assert kinds == {name: "f32" if ".wo." in name else "i8" for name in kinds} and kinds
    inkling = {"model_type": "inkling2_text", "architectures": ["Inkling2ForCausalLM"]}
    inkling |= {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 101, "head_dim": 16}
    path = config(tmp_path, inkling)
    g = gpuir.load(path, dims={"seq": 8}, dtype="bf16", warn=lambda _: None)
    kinds = {v.name: str(v.type.dtype) for v in g.params}
    routers = [kind for name, kind in kinds.items() if name.endswith("mlp.gate.weight")]
    assert {*routers} == {"f32"} and kinds["lm_head.weight"] == "bf16"


def test_the_language_half_alone(tmp_path: Path):
    """The config is of text and images, the class of text: it gets its half, as in AutoModel."""
    left = ("model_type", "architectures", "torch_dtype")
    text = {key: value for key, value in LLAMA.items() if key not in left}
    both = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]}
    both["text_config"] = text | {"intermediate_size_mlp": 96, "head_dim": 8, "pad_token_id": 0}
    path = config(tmp_path, both, torch_dtype="bfloat16")
    g = gpuir.load(path, dims={"seq": 4}, task="causal-lm", warn=lambda _: None)
    assert [str(v.type) for v in g.outputs] == ["bf16[1, 4, 101]"]
    assert not [v.name for v in g.params if "vision" in v.name]


def test_a_mask_by_name_or_by_place(tmp_path: Path):
    """AFMoE hands its mask to attention by name."""
    afmoe = LLAMA | {"model_type": "afmoe", "architectures": ["AfmoeForCausalLM"]}
    afmoe |= {"num_dense_layers": 2, "sliding_window": 8, "head_dim": 8}
    afmoe |= {"layer_types": ["sliding_attention", "full_attention"]}
    path = config(tmp_path, afmoe)

    def seen(**how: Any) -> list[tuple[bool, int | None, bool]]:
        ops = [node.op for node in gpuir.load(path, **how).nodes]
        return [(x.causal, x.window, x.mask is None) for x in ops if isinstance(x, t.Attention)]

    assert seen(dims={"seq": 16}) == [(True, 7, True), (True, None, True)]
    assert seen(phase="decode", past=16) == [(False, None, True)] * 2


def test_a_class_that_mixes_dtypes_is_told_how_it_runs(tmp_path: Path):
    """MRA's attention gives f32, which PyTorch does not multiply with weights in bf16."""
    mra = BERT | {"model_type": "mra", "architectures": ["MraForMaskedLM"], "hidden_size": 128}
    path = config(tmp_path, mra)
    with pytest.raises(ModelError, match="two dtypes") as caught:
        gpuir.load(path, dims={"seq": 64}, dtype="bf16")
    assert "--dtype f32" in str(caught.value)
    gpuir.load(path, dims={"seq": 64}, dtype="f32")


WRONG: list[tuple[dict[str, Any], dict[str, Any], type[GpuirError], str]] = [
    ({"model_type": "lama"}, {}, ModelError, "did you mean llama"),
    ({"model_type": None}, {}, ModelError, "no model_type"),
    ({"architectures": ["LlamaForPoetry"]}, {}, ModelError, "--task causal-lm"),
    ({"architectures": None}, {}, ModelError, "the config names no class"),
    ({"hidden_size": "wide"}, {}, ModelError, "does not accept the config"),
    ({"num_attention_heads": 0}, {}, ModelError, "does not accept the config"),
    ({"vocab_size": -1}, {}, ModelError, "cannot be built from the config"),
    ({}, {"dims": {}}, UsageError, "--dims seq="),
    ({}, {"dims": {"sek": 4}}, UsageError, "found:    sek=4"),
    ({}, {"dims": {"seq": 4, "target": 4}}, UsageError, "no dimension 'target'"),
    ({}, {"task": "casual-lm"}, UsageError, "did you mean causal-lm"),
    ({}, {"task": "masked-lm"}, UsageError, "has no model for the task masked-lm"),
    ({}, {"dtype": "fp16"}, UsageError, "did you mean"),
    ({}, {"attention": "flash"}, UsageError, "sdpa"),
    ({}, {"phase": "decoding", "past": 3}, UsageError, "did you mean decode"),
    ({}, {"phase": "decode"}, UsageError, "--past 4096"),
    ({}, {"past": 3}, UsageError, "--phase decode"),
    ({}, {"cache_dtype": "bf16"}, UsageError, "--phase decode"),
    ({}, {"phase": "decode", "past": 3, "cache_dtype": "f8"}, UsageError, "f8e4m3"),
    ({}, {"phase": "decode", "past": 3, "cache_dtype": "fp16"}, UsageError, "did you mean f16"),
    ({}, {"phase": "decode", "past": 3, "task": "seq-cls"}, UsageError, "speech-seq2seq"),
    ({}, {"phase": "decode", "past": 3, "train": True}, UsageError, "training step"),
    ({}, {"train": True, "task": "feature"}, UsageError, "does not know a loss"),
    ({}, {"phase": "decode", "past": 3, "mask": True}, UsageError, "no mask as an input"),
    ({}, {"inputs": {"x": (1,)}}, UsageError, "cannot be given for a Hugging Face config"),
]


@pytest.mark.parametrize(("keys", "options", "kind", "text"), WRONG)
def test_what_cannot_be(
    keys: dict[str, Any],
    options: dict[str, Any],
    kind: type[GpuirError],
    text: str,
    tmp_path: Path,
):
    given: Any = {"dims": {"seq": 4}} | options
    if given.get("phase") == "decode":
        given.pop("dims")
    with pytest.raises(kind) as caught:
        gpuir.load(config(tmp_path, LLAMA, **keys), **given)
    assert text in str(caught.value)


def test_all_sizes_are_asked_at_once_and_the_fix_works(tmp_path: Path):
    path = config(tmp_path, T5)
    with pytest.raises(UsageError, match="'seq', 'target' are missing") as caught:
        gpuir.load(path, dims={"batch": 3, "sek": 4})
    sizes = caught.value.fix.removeprefix("--dims ").partition(" ")[0]
    dims = {name: int(n) for name, n in (size.split("=") for size in sizes.split(","))}
    assert dims.keys() == {"batch", "seq", "target"}
    gpuir.load(path, dims=dims)
    for name in dims:
        with pytest.raises(UsageError, match=f"{name}=0 leaves nothing to compute"):
            gpuir.load(path, dims=dims | {name: 0})


def test_sizes_that_depend_on_data_can_be_given(tmp_path: Path):
    """The fix for a model whose code reads numbers of its inputs can be typed."""
    keys = {"model_type": "flaubert", "emb_dim": 32, "n_layers": 1, "n_heads": 2, "vocab_size": 50}
    path = config(tmp_path, {**keys, "architectures": ["FlaubertModel"]})
    with pytest.raises(ModelError, match="depend on the data") as caught:
        gpuir.load(path, dims={"seq": 8})
    found = re.findall(r"(u\d+)=(\d+)", caught.value.fix)
    assert gpuir.load(path, dims={"seq": 8} | {name: int(n) for name, n in found}).outputs
    with pytest.raises(GpuirError, match="u77"):
        gpuir.load(config(tmp_path, LLAMA), dims={"seq": 8, "u77": 3})


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "no such file"), ("{", "not a JSON file"), ("[]", "no model_type")],
)
def test_files_that_are_no_config(content: str | None, text: str, tmp_path: Path):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ModelError, match=text):
        gpuir.load(f"hf:{file}")


def test_a_diffusers_config_says_what_to_do(tmp_path: Path):
    keys = {"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.42.1"}
    with pytest.raises(ModelError, match=r"my\.module:build"):
        gpuir.load(config(tmp_path, keys))


T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 97}
T5 |= {
    "d_model": 32,
    "d_kv": 8,
    "num_heads": 4,
    "d_ff": 48,
    "num_layers": 1,
    "num_decoder_layers": 2,
}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32}
TOWERS = HEADS | {"encoder_layers": 1, "decoder_layers": 2, "vocab_size": 97}
BART = TOWERS | {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}
WHISPER = TOWERS | {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
WHISPER |= {"max_source_positions": 30, "max_target_positions": 48, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("keys", "dims", "read"), [(T5, {"seq": 40}, 40), (BART, {"seq": 40}, 40), (WHISPER, {}, 30)]
)
def test_decoding_behind_an_encoder(
    keys: dict[str, Any], dims: dict[str, int], read: int, tmp_path: Path
):
    """Both caches are inputs; the decoder's own is written in place, the encoder's output read."""
    g = gpuir.load(config(tmp_path, keys), phase="decode", past=31, dims=dims | {"batch": 4})
    shapes = {v.name: v.type.shape for v in g.inputs}
    sides = ("keys", "values")
    own = {f"{side}_{i}": (4, 4, 32, 8) for side in sides for i in range(2)}
    cross = {f"cross_{side}_{i}": (4, 4, read, 8) for side in sides for i in range(2)}
    assert shapes == {"decoder_input_ids": (4, 1)} | own | cross
    assert {v.name for v in g.inputs if g.role_of(v) == "cache"} == {*own, *cross}
    assert {v.name for v in g.over if v is not None} == {*own}
    summary = gpuir.analyze(g, "a100")
    assert summary.memory.parts["cache"] == 4 * 4 * 4 * (32 + read) * 8 * 4
    writes = [k for k in summary.kernels if k.node.op.name == "k.scatter"]
    assert len(writes) == 4
    tower = re.compile(r"(^|[:.])encoder\.")
    assert any(tower.search(v.name) for v in g.params)
    assert not any(tower.search(str(loc)) for n in g.nodes for loc in n.locs)


HALF = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": HALF
    | {"model_type": "llama", "vocab_size": 97, "num_attention_heads": 4, "head_dim": 8},
    "vision_config": HALF
    | {"model_type": "clip_vision_model", "num_attention_heads": 4, "image_size": 28}
    | {"patch_size": 14},
}


@pytest.mark.parametrize(("phase", "past"), [(None, None), ("prefill", None), ("decode", 31)])
def test_a_model_of_text_and_images_reads_text_and_says_so(
    phase: str | None, past: int | None, tmp_path: Path
):
    dims = {} if past else {"seq": 32}
    g = gpuir.load(config(tmp_path, LLAVA), phase=phase, past=past, dims=dims)
    assert any(text.startswith("the inputs pixel_values are not given") for text in g.assumed)
    tower = re.compile(r"(^|[:.])vision_tower\.")
    assert any(tower.search(v.name) for v in g.params)
    assert not any(tower.search(str(loc)) for n in g.nodes for loc in n.locs)
    written = {v.name for v in g.over if v is not None}
    assert written == ({"keys_0", "values_0"} if phase else set())


def test_a_model_of_text_and_images_is_trained_on_text(tmp_path: Path):
    g = gpuir.load(config(tmp_path, LLAVA), dims={"seq": 8}, train=True)
    assert "labels" in {v.name for v in g.inputs} and g.outputs[0].type.shape == ()


def test_what_decoding_behind_an_encoder_needs(tmp_path: Path):
    path = config(tmp_path, WHISPER)
    gpuir.load(path, phase="decode", past=47)
    with pytest.raises(ModelError, match="--past 47"):
        gpuir.load(path, phase="decode", past=48)
    path = config(tmp_path, T5)
    with pytest.raises(UsageError, match="--dims seq=128 "):
        gpuir.load(path, phase="decode", past=20)
    with pytest.raises(UsageError, match="prefill is not supported"):
        gpuir.load(path, phase="prefill", dims={"seq": 40, "target": 4})
    keys = T5 | {"model_type": "switch_transformers"}
    keys |= {"architectures": ["SwitchTransformersForConditionalGeneration"]}
    with pytest.raises(ModelError, match="phases are not supported"):
        gpuir.load(config(tmp_path, keys), phase="decode", past=20, dims={"seq": 40})


def test_phases_of_models_without_keys_and_values(tmp_path: Path):
    keys = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 16}
    path = config(tmp_path, keys | {"num_hidden_layers": 1, "vocab_size": 11, "state_size": 2})
    with pytest.raises(ModelError, match="phases are not supported"):
        gpuir.load(path, phase="decode", past=3)
    with pytest.raises(ModelError, match="at most 4000 tokens"):
        gpuir.load(path, dims={"seq": 5000}, train=True)


def test_a_scan_is_a_loop_over_tokens(tmp_path: Path):
    keys = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 16}
    path = config(tmp_path, keys | {"num_hidden_layers": 2, "vocab_size": 11, "state_size": 2})
    graph = gpuir.load(path, dims={"seq": 5000})
    loops = [n.op for n in graph.nodes if isinstance(n.op, t.Loop)]
    assert [loop.trips for loop in loops] == [5000, 5000]


def test_a_scan_is_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Which torch's own `scan` does anew for each layer, though it is exported."""
    keys = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "hidden_size": 16}
    path = config(tmp_path, keys | {"num_hidden_layers": 2, "vocab_size": 11, "state_size": 2})
    compiled: list[object] = []
    given = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **k: compiled.append(f) or given(f, **k))
    gpuir.load(path, dims={"seq": 5})
    assert not compiled


def test_questions_are_answered_by_two_positions(tmp_path: Path):
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 11}
    keys = {"model_type": "bert", "architectures": ["BertForQuestionAnswering"], **sizes}
    graph = gpuir.load(config(tmp_path, keys), dims={"seq": 8}, train=True)
    assert {v.name for v in graph.inputs} >= {"start_positions", "end_positions"}
    assert any(role == "gradient" for _, role in graph.roles)


@pytest.mark.parametrize(
    ("model", "more", "label"),
    [
        ("BertForSequenceClassification", {}, "i64[2]"),
        ("BertForSequenceClassification", {"num_labels": 1}, "f32[2]"),
        ("BertForSequenceClassification", {"problem_type": "regression"}, "f32[2, 2]"),
        (
            "BertForSequenceClassification",
            {"problem_type": "multi_label_classification"},
            "f32[2, 2]",
        ),
        ("BertForNextSentencePrediction", {}, "i64[2]"),
        ("BertForMultipleChoice", {"dims": {"choices": 3}}, "i64[2]"),
    ],
)
def test_a_head_is_trained_on_labels_of_its_kind(
    model: str, more: dict[str, Any], label: str, tmp_path: Path
):
    dims = {"batch": 2, "seq": 7, **more.get("dims", {})}
    keys = {k: v for k, v in more.items() if k != "dims"}
    path = config(tmp_path, BERT | {"architectures": [model]}, **keys)
    graph = gpuir.load(path, dims=dims, train=True)
    types = {v.name: str(v.type) for v in graph.inputs}
    assert types["labels"] == label
    assert types["input_ids"] == ("i64[2, 3, 7]" if "choices" in dims else "i64[2, 7]")
    assert graph.outputs[0].type.shape == ()
    assert any(role == "gradient" for _, role in graph.roles)


def test_images_are_trained_on_their_texts(tmp_path: Path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    half = {**sizes, "num_attention_heads": 2}
    text = half | {"vocab_size": 11, "max_position_embeddings": 9}
    image = half | {"image_size": 8, "patch_size": 4}
    keys = {"model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 8}
    path = config(tmp_path, keys | {"text_config": text, "vision_config": image})
    graph = gpuir.load(path, task="zero-shot-image-cls", dims={"batch": 2, "seq": 7}, train=True)
    assert graph.outputs[0].type.shape == ()
    assert any(role == "gradient" for _, role in graph.roles)


def test_without_transformers_the_extra_is_named(tmp_path: Path):
    code = f"""
import sys
sys.modules["transformers"] = None
import gpuir
try:
    gpuir.load("hf:{config(tmp_path, LLAMA)}", dims={{"seq": 4}})
except gpuir.GpuirError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'gpuir[hf]'" in done.stdout


def test_other_inputs_refuse_the_options(tmp_path: Path):
    model = Path(__file__).parents[3] / "examples" / "encoder.onnx"
    with pytest.raises(UsageError, match="task cannot be given for an ONNX file"):
        gpuir.load(model, task="causal-lm")


def test_windows_and_pasts_are_attributes_of_attention(tmp_path: Path):
    """No mask is made: query i of a chunk behind 60 tokens sees up to key 60 + i, 15 behind."""

    def kernels(**options: Any) -> set[tuple[bool, int, int | None, Any]]:
        g = gpuir.load(path, task="causal-lm", **options)
        ops = [n.op for n in g.nodes if isinstance(n.op, t.Attention)]
        return {(op.causal, op.offset, op.window, op.mask) for op in ops}

    path = config(tmp_path, LLAMA, model_type="mistral", sliding_window=16)
    assert kernels(dims={"seq": 64}) == {(True, 0, 15, None)}
    assert kernels(dims={"seq": 16}) == {(True, 0, None, None)}
    assert kernels(phase="decode", past=60) == {(False, 0, None, None)}
    path = config(tmp_path, LLAMA)
    assert kernels(phase="prefill", past=60, dims={"seq": 8}) == {(True, 60, None, None)}


def test_what_is_added_to_a_convolution_may_lie_channels_last(tmp_path: Path):
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32}
    keys = {"model_type": "convnext", "architectures": ["ConvNextForImageClassification"], **sizes}
    graph = gpuir.load(config(tmp_path, keys), train=True, autocast="bf16")
    kernels = gpuir.lower(graph)  # which verifies them
    assert any(n.op.name == "k.conv" for n in kernels.nodes)


def test_code_of_a_repository_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not even where a part of the model names it, and somebody says yes when transformers asks."""
    said = tmp_path / "said"
    (tmp_path / "evil.py").write_text(f"open({str(said)!r}, 'w')\nclass Evil: ...\n")
    small = {k: v for k, v in BERT.items() if k != "architectures"}
    named = {"name_or_path": str(tmp_path), "auto_map": {"AutoModelForCausalLM": "evil.Evil"}}
    keys = {
        "model_type": "encoder-decoder",
        "architectures": ["EncoderDecoderModel"],
        "encoder": small,
        "decoder": {"model_type": "vit", "hidden_size": 16, **named},
    }
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ModelError, match="cannot be built"):
        gpuir.load(config(tmp_path, keys), dims={"seq": 4})
    assert not said.exists()


def test_a_config_names_no_kernels_of_the_hub(tmp_path: Path):
    named = dict.fromkeys(("attn_implementation", "experts_implementation"), "somebody/kernel")
    g = gpuir.load(config(tmp_path, LLAMA, **named), dims={"seq": 4})
    assert g == gpuir.load(config(tmp_path, LLAMA), dims={"seq": 4})


def test_a_file_of_weights_is_not_read(tmp_path: Path):
    """timm would unpickle it."""
    keys = {"model_type": "timm_wrapper", "label_names": ["a"], "architecture": "resnet18"}
    keys |= {"model_args": {"checkpoint_path": "weights.pth"}}
    with pytest.raises(ModelError, match="names a file of weights"):
        gpuir.load(config(tmp_path, keys), dims={})


def test_nothing_is_downloaded():
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    with hf.quiet():
        assert constants.is_offline_mode()
    assert before == constants.HF_HUB_OFFLINE


def small(kind: str, cls: str, **keys: Any) -> dict[str, Any]:
    """A config of transformers' own sizes but for these keys."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind](**keys).to_dict()
    return made | {"architectures": [cls], "dtype": "bfloat16"}


MOONSHINE = {
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "vocab_size": 96,
}


def test_a_decoder_reads_its_encoder_by_the_fields_of_its_output(tmp_path: Path):
    """Moonshine asks it for a mask; Whisper and T5 take a tuple too."""
    keys = small("moonshine", "MoonshineForConditionalGeneration", **MOONSHINE)
    g = gpuir.load(config(tmp_path, keys), phase="decode", past=20, dims={"samples": 16000})
    roles = dict(g.roles)
    own = [v for v in g.inputs if v.name.startswith("keys")]
    assert [v.type.shape for v in own] == [(1, 4, 21, 8)] * 2  # layers, heads, tokens, width
    cross = {v.type.shape for v in g.inputs if v.name.startswith("cross")}
    assert len(cross) == 1 and all(roles[v.name] == "cache" for v in own)


GRANITE = {
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "mamba"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "shared_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 16,
    "mamba_d_state": 16,
    "mamba_d_head": 8,
}


def test_a_whole_pass_makes_no_cache(tmp_path: Path):
    """Where a class hands `use_cache` on unread, its config says it."""
    keys = small("granitemoehybrid", "GraniteMoeHybridForCausalLM", **GRANITE)
    g = gpuir.load(config(tmp_path, keys), dims={"seq": 16})
    assert [v.type.shape for v in g.outputs] == [(1, 16, 96)]


@pytest.mark.parametrize(
    ("kind", "cls", "keys", "dims", "shape"),
    [
        (
            "speech_to_text",
            "Speech2TextForConditionalGeneration",
            {"encoder_layers": 1, "decoder_layers": 1},
            {"frames": 64, "target": 4},
            (1, 64, 80),
        ),
        (
            "audio-spectrogram-transformer",
            "ASTForAudioClassification",
            {"num_hidden_layers": 1, "hidden_size": 48, "num_attention_heads": 4},
            {},
            (1, 1024, 128),
        ),
        (
            "wav2vec2-bert",
            "Wav2Vec2BertForCTC",
            {"num_hidden_layers": 1, "vocab_size": 32},
            {"frames": 64},
            (1, 64, 160),
        ),
    ],
)
def test_sound_as_frames(
    tmp_path: Path,
    kind: str,
    cls: str,
    keys: dict[str, Any],
    dims: dict[str, int],
    shape: tuple[int, ...],
):
    g = gpuir.load(config(tmp_path, small(kind, cls, **keys)), dims=dims)
    assert g.inputs[0].type.shape == shape


def test_a_class_that_fails_without_a_mask_gets_one(tmp_path: Path):
    keys = {"num_layers": 1, "num_decoder_layers": 1, "d_model": 32, "d_ff": 32, "d_kv": 8}
    keys |= {"num_heads": 4, "vocab_size": 96}
    made = small("longt5", "LongT5ForConditionalGeneration", **keys)
    gpuir.load(config(tmp_path, made), dims={"seq": 48, "target": 8})


def test_what_does_not_run_on_our_inputs_is_not_the_users_fault(tmp_path: Path):
    """SigLIP2 takes patches, with a mask and the shape of each image."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}
    keys = small("siglip2", "Siglip2ForImageClassification")
    for part in ("vision_config", "text_config"):
        keys[part] = {k: v for k, v in keys[part].items() if k not in sizes} | sizes
        keys[part]["num_hidden_layers"] = 1
    with pytest.raises(ModelError) as caught:
        gpuir.load(config(tmp_path, keys), dims={"height": 64, "width": 64})
    said = str(caught.value)
    assert "gpuir does not support Siglip2ForImageClassification" in said
    assert "my.module:build" in said and "in PyTorch first" not in said
