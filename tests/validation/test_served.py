"""A step as servers launch it: products merged and quantised, caches, collectives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoders import LATENT, LLAMA, MIXTURE, QWEN

pytest.importorskip("torch")
pytest.importorskip("transformers")

from gpuir.cost.work import Heads
from gpuir.targets.load import load_target
from validation.decoders import served as build
from validation.deployments import seconds
from validation.served import (
    GAP_S,
    Decoder,
    Deployment,
    Part,
    Product,
    Share,
    Step,
    all_reduce_s,
    collectives_s,
    decoders,
    held,
    launches,
)

ALL_REDUCES = Path(__file__).parents[3] / "shared/data/kernels/collectives.parquet"
B200, H100 = load_target("b200-sxm-180gb"), load_target("h100-sxm-80gb")


def deployment(config: dict[str, Any], products: str = "bf16", **changes: Any) -> Deployment:
    decoder = Decoder("mine", "a test", config)
    return replace(Deployment(decoder, H100, "vllm", products, products, 1), **changes)


def share(d: Deployment) -> Share:
    return Share.of(build, d.decoder, d.tp)


def decode(sequences: float, keys: float) -> Step:
    return Step((Part(*(np.array([float(n)]) for n in (sequences, 1, keys))),))


def prompt(tokens: float) -> Step:
    return Step((Part(*(np.array([float(n)]) for n in (1, tokens, tokens))),))


def test_products_of_one_input_are_one():
    assert share(deployment(LLAMA)).products == (
        Product("self_attn.q_proj", 0, 256 + 64 + 64, 256),
        Product("self_attn.o_proj", 0, 256, 256),
        Product("mlp.gate_proj", 0, 1024, 256),
        Product("mlp.down_proj", 0, 256, 512),
        Product("lm_head", 0, 1024, 256),
    )


def test_a_rank_has_a_part_of_the_products():
    d = deployment(LLAMA, tp=2)
    assert [(p.n, p.depth) for p in share(d).products] == [
        *((192, 256), (256, 128), (512, 256), (256, 256), (512, 256))
    ]
    with pytest.raises(ValueError, match="8 heads on 3 ranks"):
        d.decoder.divided(3)


def test_norms_within_attention_and_experts_are_the_models():
    assert share(deployment(LLAMA)).norms == ()
    assert share(deployment(QWEN)).norms == (256, 64)
    mixed = share(deployment(MIXTURE))
    assert mixed.experts is not None
    assert mixed.experts.experts.up.type.shape[0] == 16
    assert {p.module for p in mixed.products} == {
        *("self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "lm_head"),
    }


def test_a_step_multiplies_every_weight_with_every_token():
    d = deployment(LLAMA)
    s = share(d)
    works = [(times, w) for times, w in launches(s, d, decode(8, 100)) if w.kernel == "k.gemm"]
    weights = 6 * (384 * 256 + 256 * 256 + 1024 * 256 + 256 * 512) + 1024 * 256
    assert sum(float(np.sum(times * w.products)) for times, w in works) == 2 * 8 * weights
    assert s.weight_bytes(d) == 2 * (weights + 1024 * 256)
    assert s.weight_bytes(replace(d, products="fp8_static")) < s.weight_bytes(d)


def test_a_prompt_goes_through_the_head_once():
    d = deployment(LLAMA)
    head = next(
        w
        for _, w in launches(share(d), d, prompt(300))
        if w.kernel == "k.gemm"
        and float(np.max(w.extents["n"])) == 1024
        and np.max(w.extents["m"]) == 1
    )
    assert float(np.max(head.extents["k"])) == 256


def test_experts_are_on_ranks_or_cut():
    whole, cut, spread = (
        deployment(MIXTURE, expert_tp=tp, expert_ep=ep) for tp, ep in ((1, 1), (4, 1), (1, 4))
    )
    s = share(whole)

    def weights(d: Deployment) -> float:
        return float(s.weight_bytes(d))

    assert weights(whole) > weights(cut) == pytest.approx(weights(spread))


def test_latent_attention_is_decoded_in_its_latent_space():
    d = deployment(LATENT, tp=2)
    s = share(d)
    assert d.decoder.layers == (2, 4)
    assert [(p.module, p.n, p.depth) for p in s.products if p.layer == 1] == [
        ("self_attn.q_a_proj", 96 + 128 + 16, 256),
        ("self_attn.q_b_proj", 4 * 48, 96),
        ("self_attn.kv_b_proj", 4 * 80, 128),
        ("self_attn.o_proj", 256, 4 * 48),
        ("mlp.gate", 16, 256),
        ("mlp.shared_experts.gate_proj", 128, 256),
        ("mlp.shared_experts.down_proj", 256, 64),
    ]
    decoded, prompted = (
        [(times, w) for times, w in launches(s, d, step) if w.kernel != "k.map"]
        for step in (decode(8, 100), prompt(100))
    )
    (seen,) = [w for times, w in decoded if w.kernel == "k.attention" and times == 6]
    assert float(np.max(seen.detail_as(Heads).head)) == 128 + 16
    assert float(np.max(seen.detail_as(Heads).kv_heads)) == 1
    assert sum(times for times, w in decoded if float(np.max(w.extents.get("b", 1))) == 4) == 12
    (whole,) = [w for _, w in prompted if w.kernel == "k.attention"]
    assert float(np.max(whole.detail_as(Heads).head)) == 32 + 16
    assert s.cached_bytes(d, np.array([1000.0])).tolist() == [6 * (128 + 16) * 2 * 1000]


def test_windows_bound_what_is_read_and_kept():
    config = LLAMA | {"sliding_window": 128}
    plain, windowed = deployment(LLAMA), deployment(config)
    assert windowed.decoder.attention == ((3, 128), (3, 0))
    s = share(plain)
    tokens = np.array([64.0, 4096.0])
    full, part = s.cached_bytes(plain, tokens), s.cached_bytes(windowed, tokens)
    assert full.tolist() == [6 * 2 * 2 * 32 * 2 * n for n in (64, 4096)]
    assert part[0] == full[0]
    assert part[1] == full[1] * (128 + 4096) / (2 * 4096)
    assert seconds(s, windowed, decode(64, 4096))[0] < seconds(s, plain, decode(64, 4096))[0]


def test_a_prompt_among_decoded_tokens_shares_their_weights():
    d = deployment(MIXTURE)
    s = share(d)
    both = Step((*decode(16, 500).parts, *prompt(64).parts))
    alone = seconds(s, d, decode(16, 500)) + seconds(s, d, prompt(64))
    assert np.all(seconds(s, d, both)[0] < alone[0])
    assert d.mixes
    assert not replace(d, framework="sglang").mixes


def test_narrower_caches_hold_more():
    wide = deployment(LLAMA, products="fp8_static")
    narrow = replace(wide, decoder=Decoder("mine", "a test", LLAMA, cache_fp8=True))
    s, tokens = share(wide), np.array([1e5, 1e12])
    assert held(s, narrow, tokens)[0] == pytest.approx(2 * held(s, wide, tokens)[0], rel=1e-3)
    assert held(s, wide, tokens)[1] == 1


def test_collectives_grow_with_ranks_and_tokens():
    s = share(deployment(LLAMA))
    one, two, eight = (deployment(LLAMA, tp=tp) for tp in (1, 2, 8))
    step, longer = decode(8, 100), prompt(4096)
    assert collectives_s(s, one, step).tolist() == [0]
    assert 0 < collectives_s(s, two, step)[0] < collectives_s(s, eight, step)[0]
    assert collectives_s(s, two, longer)[0] > collectives_s(s, two, step)[0]


def test_old_versions_of_vllm_wait_for_their_host():
    d = deployment(LLAMA)
    gaps = [replace(d, version=v).gap_s for v in ("0.12.0", "0.14.0", "1.0.0rc3", "0.9", "", "v?")]
    assert gaps == [GAP_S, 0, 0, GAP_S, 0, 0]
    assert replace(d, framework="trtllm", version="0.8.1").gap_s == 0


def test_an_all_reduce_is_one_shot_or_two():
    """On eight H100, 450 GB/s a direction: 8 KiB in one shot; 64 MiB in two, twice 7/8 of it."""
    eight = deployment(LLAMA, tp=8)
    small, large = all_reduce_s(eight, np.array([2.0**13, 2.0**26]))
    assert small == pytest.approx(4.6e-6 + 7 * 2**13 / (0.59 * 450e9))
    assert large == pytest.approx(12.6e-6 + 2 * 7 / 8 * 2**26 / (0.64 * 450e9))


@pytest.mark.skipif(not ALL_REDUCES.exists(), reason="the measurements are not in the repository")
def test_all_reduces_are_a_fifth_off_their_measurements():
    """In CUDA graphs of TensorRT-LLM, vLLM and SGLang, in one node, up to 128 MB."""
    pd = pytest.importorskip("pandas")
    rows = pd.read_parquet(ALL_REDUCES)
    names = {f"{name}_sxm": f"{name}-sxm-80gb" for name in ("a100", "h100")}
    names |= {"h200_sxm": "h200-sxm-141gb", "b200_sxm": "b200-sxm-180gb"}
    rows = rows[(rows.op == "all_reduce") & (rows["mode"] == "cuda_graph") & (rows.bytes <= 128e6)]
    rows = rows[rows.system.isin([*names]) & (rows.world_size <= rows.gpus_per_node)]
    errors: list[float] = []
    for (system, ranks), some in rows.groupby(["system", "world_size"], observed=True):
        d = replace(deployment(LLAMA, tp=int(ranks)), target=load_target(names[str(system)]))
        told = 1e6 * all_reduce_s(d, some.bytes.to_numpy(float))
        errors += [*np.abs(told / some.latency_us.to_numpy() - 1)]
    assert len(errors) > 500
    assert np.mean(errors) < 0.21


def test_norms_over_all_heads_add_up_their_squares():
    """An all-reduce a layer more, of two numbers a token; norms of each head need none."""
    config = LLAMA | {
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
    }
    step = decode(8, 100)
    d = deployment(config, tp=2)
    s = share(d)
    assert s.over_heads and not share(deployment(QWEN, tp=2)).over_heads
    more = collectives_s(s, d, step) - collectives_s(replace(s, over_heads=False), d, step)
    assert more == pytest.approx(6 * all_reduce_s(d, np.array([8 * 8.0])))


def test_configs_are_those_that_transformers_takes_by_default():
    """Its classes were written for these models, and their defaults are the models' own numbers."""
    mapping = pytest.importorskip("transformers").models.auto.configuration_auto.CONFIG_MAPPING
    known = decoders()
    for name in ("MiniMaxAI/MiniMax-M2.5", "openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V3"):
        config = dict(known[name].config)
        assert config.pop("architectures")
        default = mapping[config["model_type"]]()
        assert config == {k: getattr(default, k) for k in config}, name


@pytest.mark.slow
def test_all_that_is_a_decoder_has_a_source_and_can_be_built():
    for i, (name, decoder) in enumerate(decoders().items()):
        assert name == decoder.name
        assert "config.json" in decoder.source
        if i % 3:
            continue
        d = Deployment(decoder, B200, "trtllm", "nvfp4", "nvfp4", 2, 2)
        s = share(d)
        assert ("num_experts_per_tok" in decoder.config) == (s.experts is not None)
        time_s, low_s, high_s, roof_s = seconds(s, d, decode(4, 1000))[:, 0]
        assert 0 < roof_s < low_s <= time_s <= high_s
