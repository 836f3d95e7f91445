"""Models grown from a few layers: the very graphs that exporting all layers gives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402

import gpuir  # noqa: E402
from gpuir.frontends.torch import hf, repeat  # noqa: E402
from gpuir.frontends.torch.load import load  # noqa: E402
from gpuir.frontends.torch.program import TorchProgram  # noqa: E402
from gpuir.frontends.torch.stacks import regular  # noqa: E402
from gpuir.passes import annotate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the models' own code
Keys = dict[str, Any]
SMALL: Keys = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "vocab_size": 97,
}


def named(kind: str, cls: str, **more: Any) -> Keys:
    return SMALL | {"model_type": kind, "architectures": [cls]} | more


GROUPED: Keys = {"num_key_value_heads": 2, "head_dim": 8}
LLAMA = named("llama", "LlamaForCausalLM", **GROUPED)
GPT2: Keys = {"n_embd": 32, "n_head": 4, "n_layer": 9, "vocab_size": 97, "model_type": "gpt2"}
GPT2 |= {"architectures": ["GPT2LMHeadModel"]}
T5: Keys = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 48, "vocab_size": 97}
T5 |= {"num_layers": 6, "num_decoder_layers": 2, "model_type": "t5"}
T5 |= {"architectures": ["T5ForConditionalGeneration"]}
WHISPER: Keys = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 40, "vocab_size": 97}
WHISPER |= {"encoder_layers": 6, "decoder_layers": 2, "encoder_attention_heads": 2}
WHISPER |= {"decoder_attention_heads": 2, "max_source_positions": 10, "num_mel_bins": 8}
WHISPER |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WHISPER |= {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
GEMMA2 = named("gemma2", "Gemma2ForCausalLM", **GROUPED, sliding_window=4, num_hidden_layers=11)
DENSE_FIRST = named(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    **GROUPED,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    mlp_only_layers=[0],
    num_hidden_layers=6,
)
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 16}}
FEW: Keys = {"num_hidden_layers": 6}  # one more than a training step exports of them
WORDS = {"dims": {"batch": 2, "seq": 6}}
DECODE = {"phase": "decode", "past": 9}
MODELS: dict[str, tuple[Keys, Keys]] = {
    "llama, narrow cache": (LLAMA | FEW, DECODE | {"cache_dtype": "f8e4m3"}),
    "llama, train": (LLAMA | FEW, WORDS | {"train": True}),
    "llama, awq": (LLAMA | FEW | AWQ, WORDS),
    "a dense layer, then experts": (DENSE_FIRST, WORDS),
    "gpt2": (GPT2 | {"n_layer": 6}, WORDS),
    "windows, decode": (GEMMA2, DECODE),
    "bert": (named("bert", "BertForMaskedLM", **FEW), WORDS | {"mask": True}),
    "t5": (T5, {"dims": {"seq": 6, "target": 5}}),
    "whisper, a long encoder": (WHISPER, {"dims": {"target": 5}}),
    "mamba": (named("mamba", "MambaForCausalLM", state_size=4, **FEW), WORDS),
}


def program(folder: Path, keys: Keys, **options: Any) -> TorchProgram:
    (folder / "config.json").write_text(json.dumps(keys))
    return hf.program(str(folder), **options)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each export had, of a model's longest list."""
    counts: list[int] = []
    export = TorchProgram.export

    def counted(self: TorchProgram) -> Any:
        lists = [m for m in self.module.modules() if isinstance(m, nn.ModuleList)]
        counts.append(max(map(len, lists)))
        return export(self)

    monkeypatch.setattr(TorchProgram, "export", counted)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_that_of_all_layers(
    name: str, tmp_path: Path, exported: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Grown though it does not pay of so few: those are what takes long to export here."""
    monkeypatch.setattr(repeat, "LEAST", 0)
    keys, options = MODELS[name]
    train = bool(options.get("train"))
    made = program(tmp_path, keys, **options)
    grown = load(made, train=train, joint=train)
    few = max(exported)
    assert len(exported) == 2 and few < max(keys.get(k, 0) for k in COUNTS)
    whole = load(replace(made, repeats=False), train=train, joint=train)
    assert grown.graph.assumed[-1].startswith(f"the layers after the first {few} are assumed")
    assert without_last_note(grown.graph) == whole.graph
    assert (grown.keys, grown.warnings) == (whole.keys, whole.warnings)
    assert {*grown.weights} == {*whole.weights}


def without_last_note(graph: gpuir.Graph) -> gpuir.Graph:
    """But for what `assumed` says of layers that were not exported."""
    return replace(graph, assumed=graph.assumed[:-1])


COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers")


@pytest.mark.slow
@pytest.mark.parametrize("layers", [20, 90])
def test_no_more_layers_are_exported_of_a_deeper_model(
    layers: int, tmp_path: Path, exported: list[int]
):
    graph = load(program(tmp_path, LLAMA | {"num_hidden_layers": layers}, **WORDS)).graph
    assert exported == [2, 4]
    assert {f"model.layers.{layers - 1}.mlp.up_proj.weight"} <= {v.name for v in graph.params}


def test_what_all_layers_assume_is_said_once(tmp_path: Path, exported: list[int]):
    """A note that named its node would keep a model with dropout from being grown."""
    graph = load(program(tmp_path, GPT2, **WORDS, train=True), train=True).graph
    assert exported == [2, 4]
    assert graph.assumed[0] == "dropout inside attention is counted as free"
    assert len(graph.assumed) == 2


@pytest.mark.parametrize(
    "keys",
    [
        GPT2 | {"scale_attn_by_inverse_layer_idx": True},  # another number in each layer
        GPT2 | {"n_layer": 8},  # too few to gain by
    ],
)
def test_what_does_not_repeat_is_exported_whole(keys: Keys, tmp_path: Path, exported: list[int]):
    made = program(tmp_path, keys, **WORDS)
    graph = load(made).graph
    assert exported[-1] == keys["n_layer"]
    assert gpuir.show(graph) == gpuir.show(load(replace(made, repeats=False)).graph)


class Layer(nn.Module):
    def __init__(self, index: int, odd: int):
        super().__init__()
        self.linear, self.index = nn.Linear(4, 4), index
        self.odd = odd

    def forward(self, x: Any) -> Any:
        x = self.linear(x)
        return x.relu() if self.index == self.odd else x.tanh()


class Layers(nn.Module):
    def __init__(self, count: int, odd: int):
        super().__init__()
        self.layers = nn.ModuleList(Layer(i, odd) for i in range(count))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("odd", "exports"), [(-1, [2, 4]), (3, [2, 4, 20])])
def test_the_last_layer_of_the_longer_export_is_the_proof(
    odd: int, exports: list[int], exported: list[int]
):
    """The law is made of layers 1 and 2, and has to give layer 3."""
    made = TorchProgram(Layers(20, odd), (torch.zeros(2, 4),), name="layers", repeats=True)
    graph = load(made).graph
    assert exported == exports
    same = without_last_note(graph) if odd < 0 else graph
    assert same == load(replace(made, repeats=False)).graph


def test_a_layer_of_other_sizes_is_exported(exported: list[int]):
    module = Layers(20, -1)
    module.layers[12].linear = nn.Linear(4, 4, bias=False)
    load(TorchProgram(module, (torch.zeros(2, 4),), name="layers", repeats=True))
    assert exported == [20]


def test_the_module_is_whole_again():
    module = Layers(20, -1)
    layers = module.layers
    load(TorchProgram(module, (torch.zeros(2, 4),), name="layers", repeats=True))
    assert module.layers is layers and len(layers) == 20


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("aaaaaa", (0, 1)),
        ("baaaaa", (1, 1)),
        ("abababab", (0, 2)),
        ("cabababab", (1, 2)),
        ("aabaabaaba", (0, 3)),
        ("aaaaab", (5, 1)),  # a last one that is different: nothing repeats up to the end
    ],
)
def test_what_comes_first_and_the_period(kinds: str, expected: tuple[int, int]):
    assert regular([ord(kind) for kind in kinds]) == expected


@pytest.mark.slow
def test_equal_kernels_of_all_layers_are_costed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    costed: list[object] = []
    costs_of = annotate.costs_of
    monkeypatch.setattr(
        annotate, "costs_of", lambda works, *given: costed.extend(works) or costs_of(works, *given)
    )
    counts: list[int] = []
    for layers in (10, 40):
        costed.clear()
        graph = load(program(tmp_path, LLAMA | {"num_hidden_layers": layers}, **WORDS)).graph
        gpuir.analyze(graph, "h100-sxm").graph
        counts.append(len(costed))
    assert counts[0] == counts[1] > 0
