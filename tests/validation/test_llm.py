"""Layers of decoders: their parts, at any number of tokens, against vidur's measurements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from decoders import LLAMA

pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpuir.cost.reading import work_of
from gpuir.cost.work import Work
from gpuir.fit.columns import Floats
from gpuir.ops import kernel as k
from validation import llm
from validation.decoders import build
from validation.steps import ATTENTION, OUTSIDE, placed, steps

DATA = Path(__file__).parents[3] / "shared" / "data" / "kernels" / "mlp_ops.parquet"
HEADER = (
    "gpu,model,op,dtype,tokens,tp,hidden,ffn,q_heads,kv_heads,vocab,gated,"
    "gemm_m,gemm_n,gemm_k,latency_us"
)
PARTS = {
    "input_layernorm": 8,
    "attn_pre_proj": 20,
    "attn_rope": 6,
    "attn_post_proj": 15,
    "add": 3,
    "post_attention_layernorm": 8,
    "mlp_up_proj": 40,
    "mlp_act": 5,
    "mlp_down_proj": 25,
    "emb": 9,
}


def table(folder: Path, gpu: str = "a100", tokens: tuple[int, ...] = (64, 512)) -> Path:
    rows = [
        f"{gpu},mine,{op},fp16,{n},2,256,512,8,2,1024,True,0,0,0,{us * n / 64}"
        for n in tokens
        for op, us in PARTS.items()
    ]
    path = folder / "layers.csv"
    path.write_text("\n".join([HEADER, *rows]))
    return path


def numbers(work: Work) -> list[float]:
    found: list[float] = []
    work.each(lambda n: found.append(float(n)) or n)
    return found


@pytest.mark.parametrize("profile", ["eager", "compiled"])
def test_two_sizes_tell_every_other(profile: str):
    known = steps(build, LLAMA | {"num_hidden_layers": 2}, profile)
    graph = build(LLAMA | {"num_hidden_layers": 2}, 1000, profile)
    there = [
        n for n in graph.nodes if isinstance(n.op, k.KernelOp) and not isinstance(n.op, k.View)
    ]
    assert len(known) == len(there)
    for kernel, node in zip(known, there, strict=True):
        assert isinstance(node.op, k.KernelOp)
        assert kernel.part == placed(node)[0]
        if not isinstance(node.op, k.Attention):
            assert numbers(kernel.at(1000)) == pytest.approx(numbers(work_of(node.op)), rel=1e-9)


def test_every_kernel_of_a_layer_is_in_a_part():
    known = steps(build, LLAMA | {"num_hidden_layers": 2}, "eager")
    parts = {x.part for x in known if x.layer == 0}
    assert parts == {*PARTS, ATTENTION} - {"emb"}
    assert {x.part for x in known if x.layer is None} == {
        *("emb", "lm_head", OUTSIDE),
    }


def test_a_table_is_models_and_their_parts(tmp_path: Path):
    found = llm.read(table(tmp_path))
    (model,) = found.models
    assert found.count == 20
    assert not found.skipped
    assert model.target.name == "a100-sxm-80gb"
    assert model.tokens.tolist() == [64, 512]
    assert model.parts["emb"].tolist() == pytest.approx([9e-6, 72e-6])
    assert model.parts["add"].tolist() == pytest.approx([6e-6, 48e-6])  # a layer has two
    assert llm.read(table(tmp_path, gpu="sparkle")).skipped == {"no target is called sparkle": 20}


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (",1024,True", ",,True", llm.NUMBERLESS),
        (",256,512,8", ",256,inf,8", llm.NUMBERLESS),
        (",fp16,64,2", ",fp16,-64,2", llm.NUMBERLESS),
        ("a100,mine,add", "a100,mine,sparkle", "no part of a layer that we know"),
        (",fp16,", ",sparkle,", "dtype sparkle is none we know of layers"),
        (",2,256,512,8,", ",3,256,512,8,", "heads that do not divide"),
    ],
)
def test_rows_that_are_no_layer_are_counted(tmp_path: Path, before: str, after: str, why: str):
    path = table(tmp_path)
    path.write_text(path.read_text().replace(before, after))
    found = llm.read(path)
    assert set(found.skipped) == {why}
    kept = sum(np.isfinite(x).sum() for m in found.models for x in m.parts.values())
    assert found.count == kept + found.skipped[why]


def test_a_rank_has_its_share_of_heads_and_feed_forward(tmp_path: Path):
    (model,) = llm.read(table(tmp_path)).models
    config = model.config
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 1)
    assert (config["intermediate_size"], config["vocab_size"]) == (256, 512)
    assert (config["hidden_size"], config["head_dim"]) == (256, 32)
    (product,) = model.works("attn_pre_proj")
    assert {n: float(np.max(x)) for n, x in product.dims} == {"b": 1, "m": 512, "n": 192, "k": 256}


def test_parts_of_the_graph_are_the_measured_ones(tmp_path: Path):
    """Where the graph launches what was measured, both are predicted alike."""
    (model,) = llm.read(table(tmp_path)).models
    parts = llm.by_part(steps(build, model.config, "eager"), model.tokens, model.target)
    for part in ("attn_post_proj", "mlp_down_proj", "add"):
        own = llm.predicted(model.works(part), model.target)
        assert parts[part] == pytest.approx(own, rel=1e-6)


def test_a_layer_is_the_sum_of_its_parts(tmp_path: Path):
    read = llm.read(table(tmp_path))
    (model,) = read.models
    scores = llm.score(read.models, build)
    found = {(s.group.op, s.group.by[0][1]): s.errors for s in scores.groups}
    parts = [p for p in PARTS if p != "emb"]
    works = [w for p in parts for w in model.works(p)]
    total = llm.predicted(works, model.target)[0]
    measured_us = float(sum(PARTS[p] for p in parts) + PARTS["add"])
    ratio: Floats = total * np.array((1e6, 1e6 / 8)) / measured_us
    layer = found[llm.LAYER, llm.MEASURED]
    assert layer.n == 2
    assert layer.bias == pytest.approx(100 * float(np.mean(ratio - 1)))
    assert {stack for _, stack in found} == {llm.MEASURED, *llm.PROFILES}


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="the measurements are not here")
def test_layers_of_public_gpus_are_known_within_a_few_percent():
    pytest.importorskip("pyarrow")
    llamas = [m for m in llm.read(DATA).models if m.model.endswith("Llama-2-7b-hf")]
    models = [m for m in llamas if m.gpu in ("a100", "a40")]
    found = {
        (s.group.device, s.group.by[0][1]): s.errors
        for s in llm.score(models, build).groups
        if s.group.op == llm.LAYER
    }
    for gpu in ("a100", "a40"):
        assert found[gpu, llm.MEASURED].mape < 7
        assert found[gpu, "compiled"].mape < 11
        assert found[gpu, llm.MEASURED].roofline_mape > 20


@pytest.mark.skipif(not DATA.exists(), reason="the measurements are not here")
def test_products_are_those_that_the_table_states():
    pytest.importorskip("pyarrow")
    from gpuir.fit.columns import TableFile

    columns = TableFile(DATA).read(["model", "gpu", "tp", "op", "gemm_n", "gemm_k"])
    stated = {n: columns.numbers(n) for n in ("tp", "gemm_n", "gemm_k")}
    for model in llm.read(DATA).models:
        for part in ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj"):
            rows = columns.words("model").where(model.model) & columns.words("op").where(part)
            rows &= stated["tp"] == model.extents["tp"]
            (product,) = model.works(part)
            assert {float(np.max(product.extents["n"]))} == set(stated["gemm_n"][rows].tolist())
            assert {float(np.max(product.extents["k"]))} == set(stated["gemm_k"][rows].tolist())
