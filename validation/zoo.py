"""Models by the names that tables give them, each as a program that gpuir reads.

Most are transformers' classes of the published sizes. Where those have none of a net, its layers
are here or in `mig_models`. A name without a size is the size that transformers takes by default:
BERT, ViT and the like are base, GPT-2 is the small one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from validation import convnets, mig_models, programs
from validation.programs import Form, Sizes

CLASSES = 1000

# ---------------------------------------------------------------------------- training on many GPUs


def decoder(batch: int = 1, seq: int = 2048, **sizes: int) -> Any:
    """A language model with its loss, as Megatron Core writes it; `programs.Sizes` has the names of
    its sizes."""
    return programs.program(Sizes(**sizes), batch, seq, Form())


def mpt(batch: int = 1, seq: int = 2048, **sizes: int) -> Any:
    """The same as llm-foundry writes it: two metrics compute the loss again each."""
    form = Form(wide_loss=False, metrics=2, gelu="none")
    return programs.program(Sizes(**sizes), batch, seq, form)


def gpt(batch: int = 1, seq: int = 2048, **sizes: int) -> Any:
    """The same as Megatron-LM writes it in 16 bits: attention in scores, which its fused softmax
    masks too, and dropout."""
    return programs.program(Sizes(**sizes), batch, seq, Form("scores", dropout=0.1))


def gpt_in_f32(batch: int = 1, seq: int = 2048, **sizes: int) -> Any:
    """The same in f32, which that softmax is not for: an operator masks the scores."""
    return programs.program(Sizes(**sizes), batch, seq, Form("scores", True, dropout=0.1))


def bert(batch: int = 1, seq: int = 128, **sizes: int) -> Any:
    """BERT with its loss, as NVIDIA's DeepLearningExamples write it."""
    return programs.program(Sizes(**sizes), batch, seq, Form("scores", dropout=0.1, gelu="none"))


# ---------------------------------------------------------------------------- models by name


@dataclass(frozen=True)
class Model:
    """A config of transformers, or a function that makes a module for inference or training. Of
    images `shape` is the size of one; text has none."""

    config: Mapping[str, Any] | None = None
    build: Callable[[bool], Any] | None = None
    shape: tuple[int, ...] = ()
    optimizer: str = "adamw"

    @property
    def reads_text(self) -> bool:
        return not self.shape


# ---------------------------------------------------------------------------- text


def _text(kind: str, architecture: str, **config: Any) -> Model:
    return Model({"model_type": kind, "architectures": [architecture], **config})


def _bert(hidden: int, layers: int, heads: int, vocab: int = 30522, **others: Any) -> Model:
    config: dict[str, Any] = {"hidden_size": hidden, "num_hidden_layers": layers}
    config |= {"num_attention_heads": heads, "intermediate_size": 4 * hidden}
    config |= {"max_position_embeddings": 514, "vocab_size": vocab, **others}
    kind = config.pop("kind", "bert")
    return _text(kind, config.pop("architecture", "BertForQuestionAnswering"), **config)


def _gpt2(width: int, layers: int, heads: int) -> Model:
    return _text("gpt2", "GPT2LMHeadModel", n_embd=width, n_layer=layers, n_head=heads)


_ROBERTA: dict[str, Any] = {"kind": "roberta", "architecture": "RobertaForQuestionAnswering"}
_XLM: dict[str, Any] = {"kind": "xlm-roberta", "architecture": "XLMRobertaForQuestionAnswering"}
_ELECTRA: dict[str, Any] = {"kind": "electra", "architecture": "ElectraForQuestionAnswering"}
_ALBERT: dict[str, Any] = {"kind": "albert", "architecture": "AlbertForQuestionAnswering"}
_DISTIL: dict[str, Any] = {"dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072}
_MULTILINGUAL = _text("distilbert", "DistilBertModel", vocab_size=119547, **_DISTIL)
_DISTILBERT = _text("distilbert", "DistilBertForQuestionAnswering", vocab_size=30522, **_DISTIL)
# As their published configs have them. Of what sentence-transformers add, pooling and one small
# layer, nothing is here.
TEXT: Mapping[str, Model] = {
    "bert-tiny": _bert(128, 2, 2),
    "bert-mini": _bert(256, 4, 4),
    "bert-small": _bert(512, 4, 8),
    "bert-medium": _bert(512, 8, 8),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "bert-base-multilingual": _bert(768, 12, 12, 119547, architecture="BertModel"),
    "distilbert-base": _DISTILBERT,
    "distilbert-base-multilingual": _MULTILINGUAL,
    "distiluse-base-multilingual-cased-v1": _MULTILINGUAL,
    "distiluse-base-multilingual-cased-v2": _MULTILINGUAL,
    "paraphrase-multilingual-minilm-l12-v2": _bert(384, 12, 12, 250037, architecture="BertModel"),
    "paraphrase-multilingual-mpnet-base-v2": _bert(
        768, 12, 12, 250002, kind="xlm-roberta", architecture="XLMRobertaModel"
    ),
    "all-minilm-l6-v2": _bert(384, 6, 12, architecture="BertModel"),
    "all-minilm-l12-v2": _bert(384, 12, 12, architecture="BertModel"),
    "roberta-base": _bert(768, 12, 12, 50265, **_ROBERTA),
    "roberta-large": _bert(1024, 24, 16, 50265, **_ROBERTA),
    "distilroberta-base": _bert(768, 6, 12, 50265, **_ROBERTA),
    "xlm-roberta-base": _bert(768, 12, 12, 250002, **_XLM),
    "xlm-roberta-large": _bert(1024, 24, 16, 250002, **_XLM),
    "electra-small": _bert(256, 12, 4, **_ELECTRA, embedding_size=128),
    "electra-base": _bert(768, 12, 12, **_ELECTRA, embedding_size=768),
    "electra-large": _bert(1024, 24, 16, **_ELECTRA, embedding_size=1024),
    "albert-base": _bert(768, 12, 12, 30000, **_ALBERT),
    "albert-large": _bert(1024, 24, 16, 30000, **_ALBERT),
    "albert-xlarge": _bert(2048, 24, 16, 30000, **_ALBERT),
    "mobilebert": _text("mobilebert", "MobileBertForQuestionAnswering"),
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "distilgpt2": _gpt2(768, 6, 12),
}


# ---------------------------------------------------------------------------- images


def _classes(kind: str, optimizer: str = "adamw", side: int = 224, **config: Any) -> Model:
    """A class of transformers that tells what is on an image."""
    config = {"num_labels": CLASSES, **config}

    def build(train: bool) -> Any:
        from torch import nn
        from transformers import AutoConfig, AutoModelForImageClassification

        class Logits(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                made: Any = AutoConfig.for_model(kind, **config)
                self.net: Any = AutoModelForImageClassification.from_config(made)

            def forward(self, images: Any) -> Any:
                return self.net(images).logits

        return Logits()

    return Model(build=build, shape=(3, side, side), optimizer=optimizer)


def _resnet(layer: str, *depths: int) -> Model:
    widths = [64, 128, 256, 512] if layer == "basic" else [256, 512, 1024, 2048]
    config: dict[str, Any] = {"layer_type": layer, "depths": list(depths), "hidden_sizes": widths}
    return _classes("resnet", "sgd", **config)


def _vit(width: int, layers: int, heads: int, patch: int) -> Model:
    config: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers}
    config |= {"num_attention_heads": heads, "intermediate_size": 4 * width, "patch_size": patch}
    return _classes("vit", **config)


def _efficientnet(side: int, wide: float, deep: float, last: int) -> Model:
    config: dict[str, Any] = {"width_coefficient": wide, "depth_coefficient": deep}
    config |= {"image_size": side, "hidden_dim": last}
    return _classes("efficientnet", "sgd", side, **config)


def _net(build: Callable[[], Any], *shape: int, optimizer: str = "sgd") -> Model:
    return Model(build=lambda _: build(), shape=shape or (3, 224, 224), optimizer=optimizer)


def _vgg(*counts: int) -> Any:
    """Two or more convolutions of a width, then half the size (arXiv 1409.1556, table 1)."""
    from torch import nn

    def layers() -> Iterator[Any]:
        before = 3
        for count, width in zip(counts, (64, 128, 256, 512, 512), strict=True):
            for a, b in pairwise((before, *(width,) * count)):
                yield from (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())
            yield nn.MaxPool2d(2)
            before = width

    head = (nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU())
    return nn.Sequential(*layers(), nn.Flatten(), *head, nn.Dropout(), nn.Linear(4096, CLASSES))


def _alexnet() -> Any:
    """As torchvision has it (arXiv 1404.5997)."""
    from torch import nn

    def conv(a: int, b: int, size: int, stride: int, pad: int) -> tuple[Any, Any]:
        return nn.Conv2d(a, b, size, stride, pad), nn.ReLU()

    return nn.Sequential(
        *(*conv(3, 64, 11, 4, 2), nn.MaxPool2d(3, 2), *conv(64, 192, 5, 1, 2)),
        *(nn.MaxPool2d(3, 2), *conv(192, 384, 3, 1, 1), *conv(384, 256, 3, 1, 1)),
        *(*conv(256, 256, 3, 1, 1), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Dropout()),
        *(nn.Linear(256 * 36, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096)),
        *(nn.ReLU(), nn.Linear(4096, CLASSES)),
    )


def _densenet(growth: int, first: int, *blocks: int) -> Any:
    """Every layer reads what all before it in its block gave (arXiv 1608.06993, table 1)."""
    from torch import cat, nn

    def layer(a: int, b: int, size: int) -> tuple[Any, ...]:
        return nn.BatchNorm2d(a), nn.ReLU(), nn.Conv2d(a, b, size, padding=size // 2, bias=False)

    class Dense(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.net = nn.Sequential(*layer(width, 4 * growth, 1), *layer(4 * growth, growth, 3))

        def forward(self, x: Any) -> Any:
            return cat([x, self.net(x)], 1)

    def layers() -> Iterator[Any]:
        stem = nn.Conv2d(3, first, 7, 2, 3, bias=False)
        yield from (stem, nn.BatchNorm2d(first), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        width = first
        for i, count in enumerate(blocks):
            yield from (Dense(width + j * growth) for j in range(count))
            width += count * growth
            if i < len(blocks) - 1:
                yield from (*layer(width, width // 2, 1), nn.AvgPool2d(2))
                width //= 2
        yield from (nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        yield nn.Linear(width, CLASSES)

    return nn.Sequential(*layers())


_VIT = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
_EFFICIENT = (  # side, width, depth, width of the last layer (arXiv 1905.11946; keras' B0 to B7)
    *((224, 1.0, 1.0, 1280), (240, 1.0, 1.1, 1280), (260, 1.1, 1.2, 1408), (300, 1.2, 1.4, 1536)),
    *((380, 1.4, 1.8, 1792), (456, 1.6, 2.2, 2048), (528, 1.8, 2.6, 2304), (600, 2.0, 3.1, 2560)),
)
_SWIN = {"tiny": (96, 6), "small": (96, 18), "base": (128, 18), "large": (192, 18)}
_CONVNEXT = {"tiny": (96, 9), "small": (96, 27), "base": (128, 27), "large": (192, 27)}
_VGG = {11: (1, 1, 2, 2, 2), 13: (2,) * 5, 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_DENSE = {
    121: (32, 64, 6, 12, 24, 16),
    161: (48, 96, 6, 12, 36, 24),
    169: (32, 64, 6, 12, 32, 32),
    201: (32, 64, 6, 12, 48, 32),
}
_SIDE, _INFERENCE_SIDE = 300, 1200  # of the detector with a ResNet-34
IMAGES: Mapping[str, Model] = {
    "resnet18": _resnet("basic", 2, 2, 2, 2),
    "resnet34": _resnet("basic", 3, 4, 6, 3),
    "resnet50": _resnet("bottleneck", 3, 4, 6, 3),
    "resnet101": _resnet("bottleneck", 3, 4, 23, 3),
    "resnet152": _resnet("bottleneck", 3, 8, 36, 3),
    **{f"vit-{n}-{p}": _vit(*size, p) for n, size in _VIT.items() for p in (16, 32)},
    "vit-huge-14": _vit(1280, 32, 16, 14),
    **{f"efficientnet-b{i}": _efficientnet(*sizes) for i, sizes in enumerate(_EFFICIENT)},
    **{
        f"swin-{n}": _classes(
            "swin",
            embed_dim=width,
            depths=[2, 2, deep, 2],
            num_heads=[width // 32 << i for i in range(4)],
        )
        for n, (width, deep) in _SWIN.items()
    },
    **{
        f"convnext-{n}": _classes(
            "convnext",
            depths=[3, 3, deep, 3],
            hidden_sizes=[width << i for i in range(4)],
        )
        for n, (width, deep) in _CONVNEXT.items()
    },
    "mobilenet-v1": _classes("mobilenet_v1", "sgd"),
    "mobilenet-v2": _classes("mobilenet_v2", "sgd"),
    "inception-v3": _net(partial(convnets.inception_v3, auxiliary=False), 3, 299, 299),
    **{f"vgg{n}": _net(partial(_vgg, *counts)) for n, counts in _VGG.items()},
    **{f"densenet{n}": _net(partial(_densenet, *sizes)) for n, sizes in _DENSE.items()},
    "alexnet": _net(_alexnet),
    "ssd-resnet34": Model(
        build=lambda train: mig_models.ssd_resnet34(
            _SIDE if train else _INFERENCE_SIDE, with_loss=train
        ),
        shape=(3, _INFERENCE_SIDE, _INFERENCE_SIDE),
        optimizer="sgd",
    ),
    "ssd-mobilenet": _net(mig_models.ssd_mobilenet, 3, 300, 300),
    "3d-unet": _net(mig_models.unet_3d, 1, 128, 128, 128),
}
MODELS: Mapping[str, Model] = {**TEXT, **IMAGES}
UNTRAINED = ("ssd-mobilenet", "3d-unet")  # what their loss is made of is not built

# ---------------------------------------------------------------------------- names

_SIZES = {"tiny": "t", "small": "s", "base": "b", "large": "l", "huge": "h"}
_OTHERS = {
    "bert": "bert-base",
    "bert-99": "bert-large",
    "bert-99.9": "bert-large",
    "3d-unet-99": "3d-unet",
    "3d-unet-99.9": "3d-unet",
    "unet3d": "3d-unet",
    "distilbert": "distilbert-base",
    "roberta": "roberta-base",
    "albert": "albert-base",
    "distilroberta": "distilroberta-base",
    "xlm-roberta": "xlm-roberta-base",
    **{f"albert-{n}-v2": f"albert-{n}" for n in ("base", "large", "xlarge")},
    "gpt2-small": "gpt2",
    "mobilenet-v2-1.0": "mobilenet-v2",
    "vit": "vit-base-16",
    "vision-transformer": "vit-base-16",
    "mobilenet-v1-1.0": "mobilenet-v1",
}
_BEHIND = re.compile(
    r"(uncased|cased|moco|pretrained|imagenet|inference|training|finetuning|model|patch|224|1k|v15)$"
)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _names() -> Iterator[tuple[str, str]]:
    for name in MODELS:
        yield name, name
        family, _, rest = name.partition("-")
        size, _, patch = rest.partition("-")
        if family in ("vit", "swin", "convnext") and size in _SIZES:
            for word in (size, _SIZES[size]):
                yield f"{family}-{word}-{patch}", name
                if patch in ("16", "14"):
                    yield f"{family}-{word}", name
                    yield f"deit-{word}", name
                if patch:
                    yield f"{family}-{word}-patch{patch}", name
                    yield f"deit-{word}-patch{patch}", name
    yield from _OTHERS.items()


KNOWN: Mapping[str, str] = {_plain(spelled): name for spelled, name in _names()}


def name_of(text: str) -> str | None:
    """The name in `MODELS` of what a table calls `google/vit-base-patch16-224` or `resnet50_moco`.
    Case, signs and what stands in brackets say nothing, nor does how it was trained."""
    text = re.sub(r"\(.*", "", text)
    for part in (text, text.rpartition("/")[2]):
        plain, before = _plain(part), ""
        while plain != before:
            if plain in KNOWN:
                return KNOWN[plain]
            plain, before = _BEHIND.sub("", plain), plain
    return None


# ---------------------------------------------------------------------------- programs


def config_of(name: str) -> Mapping[str, Any]:
    """The config of a model that reads text."""
    config = MODELS[name].config
    assert config is not None
    return config


def function_of(name: str, train: bool) -> str:
    """The function of this module that makes a model of images: `resnet50`, and for a step with its
    loss `resnet50_trained`."""
    plain = name.replace("-", "_")
    return ("_" if plain[0].isdecimal() else "") + plain + ("_trained" if train else "")


def images(name: str, train: bool, batch: int = 1) -> Any:
    """A model of images and its arguments; in training with the loss of classes, the detector with
    its own. Nothing reads its weights, and none are drawn: memory is taken where it is written."""
    import torch
    from torch import nn
    from transformers.initialization import no_init_weights

    class Trained(nn.Module):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net, self.loss = net.train(), nn.CrossEntropyLoss()

        def forward(self, images: Any, labels: Any) -> Any:
            return self.loss(self.net(images), labels)

    model = MODELS[name]
    assert model.build is not None
    shape = model.shape
    with no_init_weights():
        net: Any = model.build(train)
    args: tuple[Any, ...] = ()
    if train and name == "ssd-resnet34":
        places, shape = mig_models.boxes(_SIDE), (3, _SIDE, _SIDE)
        args = torch.zeros(batch, 4, places), torch.zeros(batch, places, dtype=torch.long)
    elif train:
        net, args = Trained(net), (torch.zeros(batch, dtype=torch.long),)
    else:
        net = net.eval()
    return net, (torch.zeros(batch, *shape), *args)


def __getattr__(name: str) -> Callable[..., Any]:
    for known in IMAGES:
        for train in (False, True):
            if function_of(known, train) == name:
                return partial(images, known, train)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
