"""Whole models at random small sizes: what the graph computes, against torch itself.

The reference is the library's own class, run by torch, with attention in single products and the
experts one by one: other ways than those that are exported.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

import gpuir  # noqa: E402
from gpuir import interp  # noqa: E402
from gpuir.frontends.model import Model  # noqa: E402
from gpuir.frontends.torch.load import load  # noqa: E402
from gpuir.frontends.torch.program import TorchProgram  # noqa: E402
from gpuir.ir.graph import Graph  # noqa: E402
from gpuir.ops import tensor as t  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the models' own code
Config = dict[str, Any]
VOCABULARY = 97


# ---------------------------------------------------------------------------- small configs


def text(rng: random.Random, grouped: bool = False) -> Config:
    """The keys that most configs share, heads of 8."""
    heads = rng.choice((2, 4))
    config: Config = {
        "hidden_size": 8 * heads,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "intermediate_size": rng.choice((24, 40)),
        "vocab_size": VOCABULARY,
    }
    return config | ({"num_key_value_heads": heads // 2, "head_dim": 8} if grouped else {})


def decoder(kind: str, cls: str, **more: Any) -> Callable[[random.Random], Config]:
    return lambda rng: text(rng, True) | {"model_type": kind, "architectures": [cls]} | more


def seq2seq(kind: str, cls: str, **more: Any) -> Callable[[random.Random], Config]:
    """T5's keys."""

    def make(rng: random.Random) -> Config:
        heads = rng.choice((2, 4))
        sizes = {"d_model": 8 * heads, "d_kv": 8, "num_heads": heads, "d_ff": rng.choice((24, 40))}
        layers = {"num_layers": 2, "num_decoder_layers": 2, "vocab_size": VOCABULARY}
        return sizes | layers | {"model_type": kind, "architectures": [cls]} | more

    return make


def gpt2(rng: random.Random) -> Config:
    heads = rng.choice((2, 4))
    sizes = {"n_embd": 8 * heads, "n_head": heads, "n_layer": 2, "vocab_size": VOCABULARY}
    return sizes | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}


def opt(rng: random.Random) -> Config:
    base = text(rng)
    more = {"ffn_dim": 24, "word_embed_proj_dim": base["hidden_size"], "model_type": "opt"}
    return base | more | {"architectures": ["OPTForCausalLM"]}


def bert(rng: random.Random) -> Config:
    return text(rng) | {"model_type": "bert", "architectures": ["BertForMaskedLM"]}


def vit(rng: random.Random) -> Config:
    image = {"image_size": rng.choice((16, 24)), "patch_size": 8, "num_labels": 7}
    return text(rng) | image | {"model_type": "vit", "architectures": ["ViTForImageClassification"]}


def clip(rng: random.Random) -> Config:
    vision = text(rng) | {"image_size": 16, "patch_size": rng.choice((4, 8))}
    halves = {"text_config": text(rng), "vision_config": vision, "projection_dim": 12}
    return halves | {"model_type": "clip", "architectures": ["CLIPModel"]}


def bart(rng: random.Random) -> Config:
    heads = rng.choice((2, 4))
    names = ("encoder_attention_heads", "decoder_attention_heads")
    sizes = {"d_model": 8 * heads, "encoder_ffn_dim": 24, "decoder_ffn_dim": 40}
    layers = {"encoder_layers": 2, "decoder_layers": 3, "vocab_size": VOCABULARY}
    cls = {"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}
    return dict.fromkeys(names, heads) | sizes | layers | cls


def whisper(rng: random.Random) -> Config:
    names = ("encoder_layers", "decoder_layers", "encoder_attention_heads")
    counts = dict.fromkeys((*names, "decoder_attention_heads"), 2)
    wide = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 40, "vocab_size": VOCABULARY}
    audio = {"max_source_positions": rng.choice((10, 14)), "num_mel_bins": 8}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2}
    cls = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
    return counts | wide | audio | ids | cls


def resnet(rng: random.Random) -> Config:
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [1, rng.choice((1, 2))]}
    return sizes | {"model_type": "resnet", "architectures": ["ResNetForImageClassification"]}


def convnext(rng: random.Random) -> Config:
    sizes = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, rng.choice((1, 2)), 1]}
    return sizes | {"model_type": "convnext", "architectures": ["ConvNextForImageClassification"]}


def mamba(rng: random.Random) -> Config:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": VOCABULARY}
    return sizes | {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}


def dbrx(rng: random.Random) -> Config:
    """Its own keys; more than one expert of a token, whose shares their norm divides."""
    heads = rng.choice((2, 4))
    ffn = {"ffn_hidden_size": rng.choice((24, 40)), "moe_num_experts": 4, "moe_top_k": 2}
    sizes = {"d_model": 8 * heads, "n_heads": heads, "n_layers": 2, "vocab_size": VOCABULARY}
    attention = {"kv_n_heads": heads // 2, "clip_qkv": 2.0, "rope_theta": 500000.0}
    halves = {"attn_config": attention, "ffn_config": ffn}
    return sizes | halves | {"model_type": "dbrx", "architectures": ["DbrxForCausalLM"]}


DEEPSEEK: Config = {
    "num_key_value_heads": 2,
    "num_attention_heads": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WORDS, PICTURE = ("batch", "seq"), ("batch", "height")
SIZES = {"batch": (1, 3), "seq": (5, 12), "target": (4, 7), "height": (32, 48)}
MODELS: Mapping[str, tuple[Callable[[random.Random], Config], tuple[str, ...]]] = {
    "bert": (bert, WORDS),
    "gpt2": (gpt2, WORDS),
    "opt": (opt, WORDS),
    "llama": (decoder("llama", "LlamaForCausalLM"), WORDS),
    "mistral": (decoder("mistral", "MistralForCausalLM", sliding_window=4), WORDS),
    "qwen2": (decoder("qwen2", "Qwen2ForCausalLM"), WORDS),
    "qwen3": (decoder("qwen3", "Qwen3ForCausalLM"), WORDS),
    "gemma3": (decoder("gemma3_text", "Gemma3ForCausalLM", sliding_window=4), WORDS),
    "mixtral": (decoder("mixtral", "MixtralForCausalLM", num_local_experts=4), WORDS),
    "qwen3-moe": (decoder("qwen3_moe", "Qwen3MoeForCausalLM", **QWEN_MOE), WORDS),
    "deepseek-v3": (decoder("deepseek_v3", "DeepseekV3ForCausalLM", **DEEPSEEK), WORDS),
    "gpt-oss": (
        decoder(
            "gpt_oss",
            "GptOssForCausalLM",
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=4,
        ),
        WORDS,
    ),
    "switch": (
        seq2seq(
            "switch_transformers",
            "SwitchTransformersForConditionalGeneration",
            num_experts=4,
            dropout_rate=0.0,
            router_jitter_noise=0.0,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            expert_capacity=3,
        ),
        (*WORDS, "target"),
    ),
    "dbrx": (dbrx, WORDS),
    "t5": (seq2seq("t5", "T5ForConditionalGeneration"), (*WORDS, "target")),
    "bart": (bart, (*WORDS, "target")),
    "vit": (vit, ("batch",)),
    "clip": (clip, WORDS),
    "whisper": (whisper, ("batch", "target")),
    "resnet": (resnet, PICTURE),
    "convnext": (convnext, PICTURE),
    "mamba": (mamba, WORDS),
}


# ---------------------------------------------------------------------------- running both ways


def written(config: Config, folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return f"hf:{folder}"


def liven(module: nn.Module) -> nn.Module:
    """Weights as large as in a trained model: what is wrong in an attention must show."""
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim > 1 and p.std() < 0.06:
                p *= 6
        for name, buffer in module.named_buffers():
            if "running_" in name:
                buffer += 0.3
    return module


def numbers(x: Any) -> Any:
    """Random ones in place of an input's zeros."""
    if isinstance(x, list):
        return [numbers(v) for v in x]
    if x.dtype == torch.int64:
        return torch.randint(3, VOCABULARY, x.shape)
    return torch.randn(x.shape)


def flat(kwargs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Inputs under the names that an exported program gives them."""
    found: dict[str, np.ndarray] = {}
    for name, value in kwargs.items():
        if isinstance(value, list):
            found |= {f"{name}_{i}": v.numpy() for i, v in enumerate(value)}
        else:
            found[name] = value.numpy()
    return found


def run(graph: Graph, model: Model, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    weights = {v.name: model.weights[v.name] for v in graph.params}
    found = interp.run(graph, {v.name: inputs[v.name] for v in graph.inputs} | weights)
    return [found[v.name] for v in graph.outputs]


def check(
    program: TorchProgram, inputs: Mapping[str, np.ndarray], wanted: list[np.ndarray]
) -> Model:
    """The graph and its kernels give what torch gives; nothing is opaque; it has a cost."""
    model = load(program)
    assert not model.warnings
    kernels = gpuir.lower(model.graph, profile="ideal")
    for graph in (model.graph, kernels):
        found = run(graph, model, inputs)
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4 * (np.abs(b).max() + 1e-3))
    assert gpuir.analyze(kernels, "a100").latency_s > 0
    return model


def results(output: Any) -> list[np.ndarray]:
    return [x.detach().numpy() for x in tree_leaves(output) if isinstance(x, torch.Tensor)]


def built(name: str, tmp_path: Path, **choices: Any) -> tuple[TorchProgram, nn.Module]:
    """The program, and transformers' own model with the same weights."""
    from gpuir.frontends.torch import hf

    rng = random.Random(name)
    make, dims = MODELS[name]
    sizes = {dim: rng.choice(SIZES[dim]) for dim in dims} | choices.pop("dims", {})
    path = written(make(rng), tmp_path)
    torch.manual_seed(1)
    program = hf.program(path, dims=sizes, device="cpu", **choices)
    config = hf.read_config(tmp_path)
    torch.manual_seed(1)
    own = type(program.module)._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    liven(program.module)
    return program, liven(own).eval()


@pytest.mark.parametrize("name", MODELS)
def test_values(name: str, tmp_path: Path):
    pytest.importorskip("transformers")
    program, own = built(name, tmp_path)
    inputs = {key: numbers(x) for key, x in program.kwargs.items()}
    more = {"use_cache": False} if hasattr(own.config, "use_cache") else {}
    if name == "switch":
        more["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        wanted = results(own(**inputs, **more))
    model = check(program, flat(inputs), wanted)
    mixtures = [n.op for n in model.graph.nodes if isinstance(n.op, t.Experts)]
    layers = {"mixtral": 2, "qwen3-moe": 2, "gpt-oss": 2, "deepseek-v3": 1, "switch": 2, "dbrx": 2}
    assert len(mixtures) == layers.get(name, 0)


# ---------------------------------------------------------------------------- generation

GENERATING = (
    "llama",
    "mistral",
    "gemma3",
    "gpt2",
    "opt",
    "gpt-oss",
    "deepseek-v3",
    "dbrx",
)


def ring(kept: Any, room: int, past: int) -> Any:
    """What transformers kept of the past, each token where our memory has it."""
    memory = torch.randn(*kept.shape[:2], room, kept.shape[-1])
    n = min(kept.shape[2], room)
    for i in range(n):
        memory[:, :, (past - n + i) % room] = kept[:, :, kept.shape[2] - n + i]
    return memory


PHASES: Mapping[tuple[int, int, str], tuple[str, ...]] = {  # past and new tokens, the cache's dtype
    (0, 9, ""): ("llama", "gpt2", "gpt-oss", "deepseek-v3"),
    (7, 1, ""): GENERATING,
    (2, 1, ""): ("mistral", "gemma3", "gpt-oss"),  # a window of 4 is not full yet
    (5, 3, ""): ("llama", "opt", "deepseek-v3"),
    (7, 1, "f16"): ("llama", "gpt-oss", "deepseek-v3"),
}


@pytest.mark.parametrize(
    ("name", "past", "new", "narrow"),
    [(name, *phase) for phase, names in PHASES.items() for name in names],
)
def test_phases(name: str, past: int, new: int, narrow: str, tmp_path: Path):
    """A step gives what the whole sequence gives at its last tokens, also with keys and values in
    half the bits, about as well as those say."""
    pytest.importorskip("transformers")
    choices: dict[str, Any] = {"phase": "decode" if new == 1 else "prefill"}
    choices["cache_dtype"] = narrow or None
    near: Any = {"rtol": 1e-2, "atol": 1e-2} if narrow else {"rtol": 1e-3, "atol": 1e-3}
    if past:
        choices["past"] = past
    program, own = built(name, tmp_path, dims={"seq": new, "batch": 2}, **choices)
    ids = torch.randint(3, VOCABULARY, (2, past + new))
    with torch.no_grad():
        logits = own(input_ids=ids, use_cache=False).logits
        kept = own(input_ids=ids[:, : past or 1], use_cache=True).past_key_values.layers
        after = own(input_ids=ids, use_cache=True).past_key_values.layers
    inputs: dict[str, Any] = {"input_ids": ids[:, past:]}
    for side in ("keys", "values"):
        rooms = [x.shape[2] for x in program.kwargs[side]]
        pairs = list(zip(kept, rooms, strict=True))
        inputs[side] = [
            ring(getattr(x, side), room, past) if past else torch.zeros(2, *shape(x, side, room))
            for x, room in pairs
        ]
        inputs[side] = [x.to(program.kwargs[side][0].dtype) for x in inputs[side]]
    model = load(program)
    found = run(model.graph, model, flat(inputs))
    wanted = logits[:, -1:] if new > 1 and found[0].shape[1] == 1 else logits[:, past:]
    np.testing.assert_allclose(found[0], wanted.numpy(), **near)
    assert len(found) == 1 + 2 * len(after)
    for i, layer in enumerate(after):
        for j, whole in enumerate((layer.keys, layer.values)):
            memory = found[1 + i + j * len(after)]
            room, total = memory.shape[2], past + new
            n = min(whole.shape[2], room)
            places = [(total - n + k) % room for k in range(n)]
            wanted = whole[:, :, whole.shape[2] - n :].numpy()
            np.testing.assert_allclose(memory[:, :, places], wanted, **near)
    lowered = run(gpuir.lower(model.graph, profile="ideal"), model, flat(inputs))
    for a, b in zip(lowered, found, strict=True):
        np.testing.assert_allclose(a, b, **near)


@pytest.mark.parametrize(
    ("name", "past", "new"),
    [("t5", 6, 1), ("t5", 3, 3), ("bart", 6, 1), ("whisper", 1, 1), ("whisper", 3, 3)],
)
def test_decoding_behind_an_encoder(name: str, past: int, new: int, tmp_path: Path):
    """A step gives what the whole sequence gives at its last tokens; its own cache takes the new
    tokens, and what comes of the encoder is read from the other."""
    pytest.importorskip("transformers")
    dims = {"target": new, "batch": 2} | ({} if name == "whisper" else {"seq": 11})
    program, own = built(name, tmp_path, dims=dims, phase="decode", past=past)
    ids = torch.randint(3, VOCABULARY, (2, past + new))
    if name == "whisper":
        frames = 2 * own.config.max_source_positions
        source = {"input_features": torch.randn(2, own.config.num_mel_bins, frames)}
    else:
        source = {"input_ids": torch.randint(3, VOCABULARY, (2, 11))}
    with torch.no_grad():
        logits = own(**source, decoder_input_ids=ids, use_cache=False).logits[:, past:]
        after = own(**source, decoder_input_ids=ids, use_cache=True).past_key_values
    inputs: dict[str, Any] = {"decoder_input_ids": ids[:, past:]}
    for side in ("keys", "values"):
        kept = [getattr(x, side) for x in after.self_attention_cache.layers]
        inputs[side] = [
            torch.cat([x[:, :, :past], torch.randn(x[:, :, past:].shape)], 2) for x in kept
        ]
        inputs[f"cross_{side}"] = [getattr(x, side) for x in after.cross_attention_cache.layers]
    assert {k: [*map(np.shape, v)] for k, v in inputs.items()} == {
        k: [*map(np.shape, v)] for k, v in program.kwargs.items()
    }
    model = load(program)
    wanted = [logits.numpy()]
    for side in ("keys", "values"):
        wanted += [getattr(x, side).numpy() for x in after.self_attention_cache.layers]
    for graph in (model.graph, gpuir.lower(model.graph, profile="ideal")):
        found = run(graph, model, flat(inputs))
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def shape(layer: Any, side: str, room: int) -> tuple[int, ...]:
    one = getattr(layer, side)
    return (one.shape[1], room, one.shape[3])


# ---------------------------------------------------------------------------- not transformers'


class Dlrm(nn.Module):
    """Naumov et al., Deep Learning Recommendation Model, arXiv 1906.00091: dense features through
    a net, sparse ones through bags of embeddings, products of all pairs, a net on top."""

    def __init__(self, rows: list[int], wide: int, dense: int):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(n, wide, mode="sum") for n in rows)
        self.below = nn.Sequential(nn.Linear(dense, 24), nn.ReLU(), nn.Linear(24, wide), nn.ReLU())
        pairs = len(rows) * (len(rows) + 1) // 2
        self.above = nn.Sequential(nn.Linear(wide + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Any, indices: list[Any], offsets: list[Any]) -> Any:
        x = self.below(dense)
        rows = [bag(i, o) for bag, i, o in zip(self.bags, indices, offsets, strict=True)]
        z = torch.stack([x, *rows], dim=1)
        products = z @ z.transpose(1, 2)
        at = torch.tril_indices(z.shape[1], z.shape[1], offset=-1)
        return torch.sigmoid(self.above(torch.cat([x, products[:, at[0], at[1]]], dim=1)))


def test_dlrm():
    torch.manual_seed(0)
    rows, batch, bag = [31, 17, 50], 5, 3
    module = Dlrm(rows, wide=8, dense=6).eval()
    indices = [torch.randint(0, n, (batch * bag,)) for n in rows]
    offsets = [torch.arange(0, batch * bag, bag) for _ in rows]
    args = {"dense": torch.randn(batch, 6), "indices": indices, "offsets": offsets}
    with torch.no_grad():
        wanted = results(module(**args))
    check(TorchProgram(module, kwargs=args, name="dlrm"), flat(args), wanted)


def test_unet():
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    module = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=12,
        attention_head_dim=4,
        norm_num_groups=4,
    ).eval()
    inputs = {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([3, 501]),
        "encoder_hidden_states": torch.randn(2, 5, 12),
    }
    with torch.no_grad():
        wanted = results(module(**inputs, return_dict=False))
    fixed = {"return_dict": False}
    check(TorchProgram(module, kwargs=inputs | fixed, name="unet"), flat(inputs), wanted)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_timm(name: str):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    small = {"img_size": 32} if name.startswith("vit") else {}
    module = timm.create_model(name, pretrained=False, num_classes=10, **small).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        wanted = results(module(x))
    check(TorchProgram(module, (x,), name=name), {"x": x.numpy(), "input": x.numpy()}, wanted)


# ---------------------------------------------------------------------------- training mixtures


@pytest.mark.parametrize(
    ("name", "autodiff"),
    [("gpt-oss", "torch"), ("switch", "torch")]
    + [(name, "gpuir") for name in ("mixtral", "gpt-oss", "switch", "dbrx")],
)
def test_gradients_of_mixtures(name: str, autodiff: str, tmp_path: Path):
    """Each way to derive them gives those of transformers' own experts, one by one."""
    pytest.importorskip("transformers")
    program, own = built(name, tmp_path, train=True, dims={"batch": 2, "seq": 6})
    inputs = {key: numbers(x) for key, x in program.kwargs.items()}
    more = {"attention_mask": torch.ones_like(inputs["input_ids"])} if name == "switch" else {}
    loss = own(**inputs, **more)[0]
    loss.backward()
    with torch.enable_grad():
        model = load(program, train=True, joint=autodiff == "torch")
    graph = model.graph
    if autodiff == "gpuir":
        graph = gpuir.pipeline("autodiff").run(graph)
    found = dict(zip([v.name for v in graph.outputs], run(graph, model, flat(inputs)), strict=True))
    np.testing.assert_allclose(next(iter(found.values())), loss.detach().numpy(), rtol=1e-4)
    gradients = {n.removesuffix(".grad"): x for n, x in found.items() if n.endswith(".grad")}
    wanted = {n: p.grad.numpy() for n, p in own.named_parameters() if p.grad is not None}
    shared = gradients.keys() & wanted.keys()
    assert len(shared) >= len(wanted) - 2 * 2 * 4  # Switch's experts are stacked
    for key in shared:
        scale = np.abs(wanted[key]).max()
        np.testing.assert_allclose(gradients[key], wanted[key], rtol=1e-3, atol=1e-4 * scale)
    assert any(isinstance(n.op, t.ExpertsGradient) for n in graph.nodes)
