"""Programs that tools/replay.py gives to the command, as `replay_models.py:NAME`, and files that it
writes first: configs of transformers' classes, ONNX models and tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Of transformers: the class, and what its config has in place of the defaults. Each is small, with
# the parts that its kind has.
LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "head_dim": 64,
}
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", LLAMA),
    "tied": ("llama", "LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", {**LLAMA, "sliding_window": 256}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", LLAMA),
    "mixtral": ("mixtral", "MixtralForCausalLM", {**LLAMA, "num_local_experts": 8}),
    "qwen2-moe": (
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**LLAMA, "num_experts": 16, "moe_intermediate_size": 512},
    ),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {"n_embd": 768, "n_layer": 3, "n_head": 12}),
    "bert": ("bert", "BertForMaskedLM", {"num_hidden_layers": 4}),
    "t5": ("t5", "T5ForConditionalGeneration", {"num_layers": 2, "num_decoder_layers": 2}),
    "deberta": ("deberta-v2", "DebertaV2ForMaskedLM", {"num_hidden_layers": 2}),
    "mamba2": (
        "mamba2",
        "Mamba2ForCausalLM",
        {"hidden_size": 512, "num_heads": 16, "num_hidden_layers": 2, "vocab_size": 8000},
    ),
    "vit": ("vit", "ViTForImageClassification", {"num_hidden_layers": 4}),
    "swin": ("swin", "SwinForImageClassification", {"depths": [1, 1, 2, 1]}),
    "convnext": ("convnext", "ConvNextForImageClassification", {"depths": [1, 1, 2, 1]}),
    "resnet": ("resnet", "ResNetForImageClassification", {"depths": [1, 2, 2, 1]}),
    "segformer": ("segformer", "SegformerForSemanticSegmentation", {}),
    "yolos": ("yolos", "YolosForObjectDetection", {"num_hidden_layers": 2}),
    "whisper": (
        "whisper",
        "WhisperForConditionalGeneration",
        {"encoder_layers": 2, "decoder_layers": 2},
    ),
    "wav2vec2": ("wav2vec2", "Wav2Vec2ForCTC", {"num_hidden_layers": 2}),
}
TABLES = (
    "name,rows,width,lookups,count\nusers,2000000,64,1,4\nitems,400000,128,20,6\ndays,366,16,1,2\n"
)


# ONNX models as text; what would be weights are inputs.
ONNX = {
    "quantised": """(float16[N, 4096] x, uint8[4096, 32, 64] q, float16[131072] s, float[N, 512] a,
        int8[512, 512] w, float ws, int8 wz) => (float16[N, 4096] y, float[N, 512] z) {
        h = com.microsoft.MatMulNBits <K = 4096, N = 4096, bits = 4, block_size = 128> (x, q, s)
        y = Relu (h)
        u, us, uz = DynamicQuantizeLinear (a)
        d = DequantizeLinear (w, ws, wz)
        z = MatMul (a, d)
    }""",
    "loop": """(float[N, 256] x, float[256, 256] w, int64 m, bool c) => (float[N, 256] y) {
        y = Loop (m, c, x) <body = step (int64 i, bool on, float[N, 256] a)
            => (bool on2, float[N, 256] b) {
            on2 = Identity (on)
            h = MatMul (a, w)
            b = Tanh (h)
        }>
    }""",
    "odd": """(float[N, 3, 64, 64] x, float[16, 3, 3, 3] w, float[N, 32, 32, 2] at)
        => (float[N, 16, 128, 128] y, float[N, 3, 32, 32] z, float[N, 10] v, int64[N, 10] i) {
        h = Conv <pads = [1, 1, 1, 1]> (x, w)
        k = Constant <value = float[4] {1.0, 1.0, 2.0, 2.0}> ()
        y = Resize <mode = "cubic"> (h, , k)
        z = GridSample <mode = "linear"> (x, at)
        f = Flatten (x)
        n = Constant <value = int64[1] {10}> ()
        v, i = TopK (f, n)
    }""",
}
HEAD = '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]> '
TABLES = """name,rows,width,lookups,count
users,2000000,64,1,4
items,400000,128,20,6
days,366,16,1,2
"""
DAY = """time,live,offline
00:00,0,400
08:00,120,100
20:00,40,300
"""


def write(folder: Path) -> None:
    """The files that the commands name."""
    from onnx import parser, save

    for name, (kind, architecture, others) in CONFIGS.items():
        (folder / name).mkdir(exist_ok=True)
        config = {"model_type": kind, "architectures": [architecture], **others}
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name, text in ONNX.items():
        save(parser.parse_model(f"{HEAD} {name} {text}"), str(folder / f"{name}.onnx"))
    (folder / "tables.csv").write_text(TABLES, encoding="utf-8")
    (folder / "day.csv").write_text(DAY, encoding="utf-8")


# ---------------------------------------------------------------------------- programs


def _called(f: Callable[..., Any], *args: Any) -> tuple[Any, tuple[Any, ...]]:
    from torch import nn

    class Called(nn.Module):
        def forward(self, *given: Any) -> Any:
            return f(*given)

    return Called(), args


def _net(name: str, batch: int, side: int = 224) -> tuple[Any, tuple[Any, ...]]:
    import torch

    from validation.throughput.programs import import_timm

    net: Any = import_timm().create_model(name).eval()
    return net, (torch.zeros(batch, 3, side, side),)


def mobilenet(batch: int = 8) -> Any:
    return _net("mobilenetv3_small_050", batch)


def efficientnet(batch: int = 8) -> Any:
    return _net("efficientnet_b0", batch)


def coatnet(batch: int = 4) -> Any:
    return _net("coatnet_pico_rw_224", batch)


def regnet(batch: int = 8) -> Any:
    return _net("regnetx_004", batch)


def lstm(batch: int = 16) -> Any:
    import torch
    from torch import nn

    return nn.LSTM(256, 256, 2, batch_first=True), (torch.zeros(batch, 12, 256),)


def fourier(batch: int = 4) -> Any:
    """Complex products between transforms there and back, as in a Fourier neural operator."""
    import torch

    def layer(x: Any, w: Any) -> Any:
        y = torch.fft.rfft2(x)
        kept = torch.einsum("bixy,ioxy->boxy", y[..., :16, :16], w)
        return torch.fft.irfft2(torch.nn.functional.pad(kept, (0, 17, 0, 48)), s=x.shape[-2:])

    w = torch.zeros(32, 32, 16, 16, dtype=torch.complex64)
    return _called(layer, torch.zeros(batch, 32, 64, 64), w)


def documents(batch: int = 2) -> Any:
    """Attention under a mask of two documents."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def apart(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i < 512) == (j < 512)

    mask = create_block_mask(apart, None, None, 1024, 1024, device="cpu")

    def attend(q: Any, k: Any, v: Any) -> Any:
        return flex_attention(q, k, v, block_mask=mask)

    return _called(attend, *(torch.zeros(batch, 8, 1024, 64, dtype=torch.bfloat16),) * 3)


def sparse(batch: int = 64) -> Any:
    import torch

    at = torch.stack([torch.arange(4096) % 1024, torch.arange(4096) * 7 % 2048])
    a = torch.sparse_coo_tensor(at, torch.ones(4096), (1024, 2048)).coalesce()
    return _called(torch.sparse.mm, a, torch.zeros(2048, batch))


def routines(batch: int = 64) -> Any:
    """Sorting, selection, running sums, decompositions."""
    import torch

    def several(x: Any, a: Any) -> Any:
        order = x.sort(-1).values
        best, _ = x.topk(8)
        return order.cumsum(-1), best, torch.linalg.cholesky(a), torch.linalg.inv(a), x.var(-1)

    return _called(several, torch.zeros(batch, 4096), torch.eye(64).repeat(batch, 1, 1))


def images(batch: int = 4) -> Any:
    """Resampling, pooling, and convolutions of other kinds."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.deep = nn.Conv3d(4, 8, 3, padding=1)
            self.wide = nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1)
            self.apart = nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=32)

        def forward(self, x: Any, v: Any, at: Any) -> Any:
            y = self.wide(functional.gelu(self.apart(x)))
            z = functional.interpolate(y, scale_factor=2.0, mode="bicubic")
            near = functional.grid_sample(x, at, align_corners=False)
            return (
                functional.adaptive_avg_pool2d(z, 7),
                near,
                functional.max_pool3d(self.deep(v), 2),
            )

    at, video = torch.zeros(batch, 20, 20, 2), torch.zeros(batch, 4, 8, 32, 32)
    return Images(), (torch.zeros(batch, 32, 32, 32), video, at)


def recommender(batch: int = 4096) -> Any:
    import torch
    from torch import nn

    class Recommender(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = nn.ModuleList(nn.EmbeddingBag(100000, 64, mode="sum") for _ in range(4))
            self.dense = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU())
            self.over = nn.Sequential(nn.Linear(320, 256), nn.ReLU(), nn.Linear(256, 1))

        def forward(self, dense: Any, ids: Any) -> Any:
            found = [bag(i) for bag, i in zip(self.bags, ids, strict=True)]
            return self.over(torch.cat([self.dense(dense), *found], -1)).sum()

    ids = torch.zeros(4, batch, 8, dtype=torch.long)
    return Recommender(), (torch.zeros(batch, 13), ids)
