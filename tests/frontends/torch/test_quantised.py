"""The `quantization_config` of a config: what is stored, what is launched, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import gpuir  # noqa: E402
from gpuir import interp  # noqa: E402
from gpuir.cost.reading import work_of  # noqa: E402
from gpuir.interp import to_numpy_dtype  # noqa: E402
from gpuir.ir.errors import GpuirError, ModelError, UsageError  # noqa: E402
from gpuir.ir.graph import Graph  # noqa: E402
from gpuir.ir.types import TensorType  # noqa: E402
from gpuir.ops import kernel as k  # noqa: E402

pytestmark = pytest.mark.slow

Keys = dict[str, Any]
LLAMA: Keys = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "torch_dtype": "bfloat16",
}
MIXTRAL: Keys = LLAMA | {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
GPT_OSS: Keys = MIXTRAL | {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "layer_types": ["full_attention"],
}
LAYER = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512  # numbers in the linear layers of a block
REST = 2 * (2 * 512 * 256 + 3 * 256)  # bytes of the embedding, the head and the norms


def group(weights: Keys, inputs: Keys | None = None) -> Keys:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
TORCHAO = {"_type": "Int4WeightOnlyConfig", "_version": 1, "_data": {"group_size": 128}}
ROWS = 3 * 256 + 2 * 128 + 2 * 512  # rows of q, o, down; of k, v; of gate, up

# name → config, bytes of the linear layers, launches of a product's name in one layer
CASES: dict[str, tuple[Keys, float]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, LAYER * (0.5 + 2.5 / 128)),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, LAYER * (0.5 + 2 / 128)),
    "gptq 8": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, LAYER + 2 * ROWS),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        LAYER * (1 + 4 / 128**2),
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, LAYER + 4 * ROWS),
    "bnb 4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, LAYER * (0.5 + 4 / 64)),
    "bnb 8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, LAYER + 4 * ROWS),
    "compressed 4": (
        group({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}),
        LAYER * (0.5 + 2 / 128),
    ),
    "compressed fp8": (
        group(FLOAT8, {"num_bits": 8, "type": "float", "dynamic": True}),
        LAYER + 2 * ROWS,
    ),
    "torchao": (
        {"quant_method": "torchao", "quant_type": {"default": TORCHAO}},
        LAYER * (0.5 + 4 / 128),
    ),
    "torchao 4.52": (
        {
            "quant_method": "torchao",
            "quant_type": "int4_weight_only",
            "quant_type_kwargs": {"group_size": 64},
        },
        LAYER * (0.5 + 4 / 64),
    ),
    "torchao 4.52 int8": (
        {"quant_method": "torchao", "quant_type": "int8_weight_only"},
        LAYER + 2 * ROWS,
    ),
    "hqq": ({"quant_method": "hqq", "nbits": 4, "group_size": 64}, LAYER * (0.5 + 4 / 64)),
    "eetq": ({"quant_method": "eetq", "weights": "int8"}, LAYER + 2 * ROWS),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, LAYER + 7 * 8),
}


def load(folder: Path, keys: Keys, quantisation: Any = None, **options: Any) -> Graph:
    more = {} if quantisation is None else {"quantization_config": quantisation}
    (folder / "config.json").write_text(json.dumps(keys | more))
    given: Any = {"dims": {"seq": 8}} | options
    return gpuir.load(str(folder), **given)


def stored(g: Graph) -> int:
    return sum(v.type.nbytes for v in g.params if not v.name.endswith("inv_freq"))


@pytest.mark.parametrize("name", CASES)
def test_weights_take_what_the_checkpoint_does(name: str, tmp_path: Path):
    quantisation, expected = CASES[name]
    g = load(tmp_path, LLAMA, quantisation)
    assert stored(g) == int(expected) + REST
    assert any(f"{quantisation['quant_method']}: 7 of 8 layers" in text for text in g.assumed)


@pytest.mark.parametrize("profile", ["eager", "compiled", "ideal"])
@pytest.mark.parametrize(
    ("name", "seq", "dtypes"),
    [
        ("awq", 8, ("bf16", "u4")),
        ("fp8", 8, ("f8e4m3", "f8e4m3")),
        ("compressed fp8", 8, ("f8e4m3", "f8e4m3")),
        ("bnb 4", 1, ("bf16", "u4")),
        ("bnb 8", 8, ("i8", "i8")),
    ],
)
def test_products_read_what_is_stored(
    name: str, seq: int, dtypes: tuple[str, str], profile: str, tmp_path: Path
):
    g = load(tmp_path, LLAMA, CASES[name][0], dims={"seq": seq})
    nodes = [
        n
        for n in gpuir.analyze(g, "h100-sxm", profile=profile).graph.nodes
        if "model." in n.locs[0]
    ]
    products = [n.op for n in nodes if isinstance(n.op, k.Gemm)]
    read = {tuple(v.type.dtype.name for v in op.factors) for op in products}
    assert read == {dtypes}


@pytest.mark.parametrize(
    "method",
    [
        CASES["compressed fp8"][0] | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    ],
)
def test_keys_and_values_are_kept_as_the_config_says(method: Keys, tmp_path: Path):
    def kept(**more: Any) -> tuple[set[str], list[str]]:
        g = load(tmp_path, LLAMA, method, phase="decode", past=15, **more)
        names = {v.type.dtype.name for v in g.inputs if g.role_of(v) == "cache"}
        return names, [text.split(":")[0] for text in g.assumed if "keys and values" in text]

    said = "keys and values are stored in {}, as {} says"
    assert kept() == ({"f8e4m3"}, [said.format("f8e4m3", "the config's quantization")])
    assert kept(cache_dtype="bf16") == ({"bf16"}, [said.format("bf16", "the option")])
    whole = load(tmp_path, LLAMA, method, dims={"seq": 4})
    assert not any("keys and values" in text for text in whole.assumed)


def test_what_unpacks_weights_in_memory_does_so_for_several_rows(tmp_path: Path):
    for seq, count in ((1, 0), (8, 7)):
        g = load(tmp_path, LLAMA, CASES["bnb 4"][0], dims={"seq": seq})
        costed = gpuir.analyze(g, "a100", profile="eager").graph
        whole = [n for n in costed.nodes if n.op.name == "k.map" and "/unpack" in n.locs[-1]]
        assert len(whole) == count


def random_like(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    dtype = to_numpy_dtype(type.dtype)
    if type.dtype.is_integer:
        low = 0 if type.dtype.kind == "uint" else -(2 ** (type.dtype.bits - 1))
        return rng.integers(low, low + 2**type.dtype.bits, type.shape).astype(dtype)
    return rng.uniform(0.5, 1.5, type.shape).astype(dtype)


@pytest.mark.parametrize("name", ["awq", "gptq", "fp8", "fbgemm", "bnb 8", "compressed fp8"])
def test_a_product_is_that_of_the_unpacked_weight(name: str):
    """One layer's operators against numpy: [rows, in] by what the stored numbers stand for."""
    from torch import nn

    from gpuir.frontends.torch import quantised
    from gpuir.frontends.torch.load import load as load_torch
    from gpuir.frontends.torch.program import TorchProgram

    class Two(nn.Module):
        dtype = torch.float32

        def __init__(self) -> None:
            super().__init__()
            self.first, self.lm_head = nn.Linear(256, 128), nn.Linear(128, 2)
            self.all_tied_weights_keys: dict[str, str] = {}

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

        def forward(self, x: Any) -> Any:
            return self.first(x)

    class Config:
        quantization_config = CASES[name][0]

    with torch.device("meta"):
        model = Two().eval()
        x = torch.empty(5, 256)
    made = quantised.quantisation(Config, model, "here")
    assert made is not None
    quantised.apply(model, made, "here")
    g = load_torch(TorchProgram(model, (x,))).graph
    rng = np.random.default_rng(0)
    values = {v.name: random_like(rng, v.type) for v in (*g.inputs, *g.params)}
    (found,) = interp.run(g, values).values()
    values = {key: array.astype(np.float64) for key, array in values.items()}
    w, scale = values["first.weight"], values["first.scale"]
    r, c = (n // m for n, m in zip(w.shape, scale.shape, strict=True))
    zero = values.get("first.zero", np.full(scale.shape, 8.0 if name == "gptq" else 0.0))
    dense = (w - zero.repeat(r, 0).repeat(c, 1)) * scale.repeat(r, 0).repeat(c, 1)
    wanted = values["x"] @ dense.T + values["first.bias"]
    error = np.abs(found.astype(np.float64) - wanted).max() / np.abs(wanted).max()
    assert error < (1e-5 if name in ("awq", "gptq") else 0.05)


# ---------------------------------------------------------------------------- mixtures


@pytest.mark.parametrize(
    ("keys", "quantisation", "bits"),
    [
        (MIXTRAL, CASES["awq"][0], 4),
        (MIXTRAL, CASES["fp8"][0], 8),
        (MIXTRAL, CASES["compressed 4"][0], 4),
        (GPT_OSS, {"quant_method": "mxfp4"}, 4),
    ],
)
def test_experts_read_packed_weights(keys: Keys, quantisation: Keys, bits: int, tmp_path: Path):
    g = load(tmp_path, keys, quantisation)
    experts = [v for v in g.params if ".experts." in v.name and v.name.endswith("proj.weight")]
    assert {v.type.dtype.bits for v in experts} == {bits}
    assert sorted(v.type.shape for v in experts) == [(4, 256, 512), (4, 1024, 256)]
    costed = gpuir.analyze(g, "h100-sxm", profile="eager").graph
    (op,) = [n.op for n in costed.nodes if isinstance(n.op, k.Experts)]
    assert max(op.stored, key=lambda v: v.type.size).type.dtype.bits == bits


@pytest.mark.parametrize(
    ("quantisation", "kind"),
    [
        (CASES["fp8"][0], "cutlass f8 block"),
        (CASES["compressed fp8"][0], "cutlass f8"),
        (CASES["awq"][0], "cutlass f16 converted"),
    ],
)
def test_experts_take_the_factors_of_their_scales(quantisation: Keys, kind: str, tmp_path: Path):
    """Those of blocks along what is summed are a scheme of their own. That rows have no scales here
    is said."""
    g = load(tmp_path, MIXTRAL, quantisation)
    costed = gpuir.analyze(g, "h100-sxm", profile="eager").graph
    (op,) = [n.op for n in costed.nodes if isinstance(n.op, k.Experts)]
    assert work_of(op).kind == kind
    assert any("rows are cast without scales" in text for text in g.assumed) == ("f8" in kind)


# ---------------------------------------------------------------------------- exceptions


@pytest.mark.parametrize(
    ("quantisation", "count"),
    [
        (CASES["awq"][0] | {"modules_to_not_convert": ["k_proj", "model.layers.0.mlp"]}, 3),
        (CASES["fp8"][0] | {"modules_to_not_convert": ["lm_head", "model.layers.0.self_attn"]}, 3),
        (CASES["bnb 8"][0] | {"llm_int8_skip_modules": ["lm_head", "down_proj"]}, 6),
        (CASES["compressed 4"][0] | {"ignore": ["lm_head", "re:.*self_attn.*"]}, 3),
        (CASES["gptq"][0] | {"lm_head": True}, 8),
        (CASES["gptq"][0] | {"dynamic": {"-:.*mlp.*": {}}}, 4),
    ],
)
def test_layers_that_are_left_out(quantisation: Keys, count: int, tmp_path: Path):
    g = load(tmp_path, LLAMA, quantisation)
    assert sum(v.name.endswith(".scale") for v in g.params) == count
    assert any(f"{count} of 8 layers" in text for text in g.assumed)


WRONG: list[tuple[Any, str]] = [
    ({"quant_method": "aqlm"}, "does not model quant_method 'aqlm'"),
    ({"quant_method": "gptqq"}, "did you mean gptq"),
    ({"quant_method": 5}, "'quant_method' has the wrong type"),
    ({}, "without quant_method"),
    ("awq", "transformers does not accept the config"),
    ({"quant_method": "gptq", "bits": 3}, "does not model bits=3"),
    ({"quant_method": "awq", "group_size": "many"}, "'group_size' has the wrong type"),
    ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size"),
    ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme 'odd'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
    (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int1"}}},
        "quant_type 'Int1'",
    ),
    ({"quant_method": "torchao", "quant_type": "autoquant"}, "quant_type 'autoquant'"),
    (group({"num_bits": 4, "type": "float", "group_size": 16}), "4-bit float weights"),
    (group(FLOAT8, {"num_bits": 8, "type": "int"}), "float8_e4m3fn weights times int8 inputs"),
    ({"quant_method": "mxfp4"}, "quantises no layer"),
    (group(FLOAT8) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
    (group(FLOAT8) | {"format": "marlin-24"}, "sparse weights of the form 'marlin-24'"),
    (group(FLOAT8) | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ({"quant_method": "fp8", "dequantize": True}, "dequantize"),
    (
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_has_fp16_weight": True},
        "llm_int8_has_fp16_weight",
    ),
]


@pytest.mark.parametrize(("quantisation", "text"), WRONG)
def test_what_is_not_modelled_is_refused_by_name(quantisation: Any, text: str, tmp_path: Path):
    with pytest.raises(GpuirError) as refused:
        load(tmp_path, LLAMA, quantisation)
    assert isinstance(refused.value, ModelError)
    assert text in str(refused.value)


def test_a_method_of_transformers_is_no_slip_of_the_pen(tmp_path: Path):
    """`aqlm` is what it says, not `awq`."""
    with pytest.raises(ModelError) as refused:
        load(tmp_path, LLAMA, {"quant_method": "aqlm"})
    assert "did you mean" not in str(refused.value)


def test_quantised_weights_are_not_trained(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot be trained"):
        load(tmp_path, LLAMA, CASES["awq"][0], train=True)
