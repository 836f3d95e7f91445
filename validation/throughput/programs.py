"""The programs of published throughputs, built as their conditions say."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import gpuir
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph
from validation.throughput.cases import Program

CLASSES = 1000
PROMPT = (77, 768)  # of CLIP's text encoder, which Stable Diffusion 1.x reads: tokens, channels
# EleutherAI's GPT-J-6B and Meta's LLaMA-7B are what transformers' configs are without a number.
DECODERS = {
    "gptj-6b": {"model_type": "gptj", "architectures": ["GPTJForCausalLM"]},
    "llama-7b": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
}


def graphs(p: Program) -> list[tuple[Graph, int]]:
    """What runs, and how often. UsageError where a package is missing, or the model is unknown."""
    if p.kind == "decoder":
        return _decoder(p)
    module, args = _image(p) if p.kind == "image" else _unet(p)
    options: dict[str, Any] = {}
    if p.autocast:
        options |= {"autocast": p.autocast, "fast_norms": p.fast_norms}
    if p.train:
        options |= {"train": True, "accumulate": True, "optimizer": "sgd", "fused": False}
    return [(gpuir.load(module, args=args, warn=_silent, **options), 1)]


def _silent(_: str) -> None:
    pass


# ---------------------------------------------------------------------------- images


def _image(p: Program) -> tuple[Any, tuple[Any, ...]]:
    import torch

    timm = import_timm()
    timm.layers.set_fused_attn(p.sdpa)
    try:
        with torch.device("cpu" if p.merged else "meta"):  # merging computes with weights
            module = timm.create_model(p.model, num_classes=CLASSES, **_side(timm, p))
    except (RuntimeError, ValueError, TypeError) as error:
        raise UsageError(f"timm {timm.__version__} builds no {p.model}: {error}") from None
    module = module.train() if p.train else module.eval()
    if p.merged:
        module = timm.utils.reparameterize_model(module).to("meta")
    module = module.to(_dtype(p))
    images = torch.empty(p.batch, 3, p.side, p.side, device="meta", dtype=_dtype(p))
    if p.nhwc:
        module = module.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    if not p.train:
        return module, (images,)
    labels = torch.empty(p.batch, dtype=torch.long, device="meta")
    return _with_loss(module), (images, labels)


def _dtype(p: Program) -> Any:
    import torch

    return {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[p.dtype]


def _side(timm: Any, p: Program) -> dict[str, Any]:
    """The size of images, for the models whose parameters or attention go by it."""
    usual = timm.get_pretrained_cfg(p.model)
    if usual is None or usual.input_size[-1] == p.side or not usual.fixed_input_size:
        return {}
    return {"img_size": p.side}


def _with_loss(module: Any) -> Any:
    from torch import nn

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = module
            self.loss = nn.CrossEntropyLoss()

        def forward(self, images: Any, labels: Any) -> Any:
            return self.loss(self.net(images), labels)

    return Loss()


def import_timm() -> Any:
    """The package timm. Where torchvision cannot be imported (its builds are for one torch each),
    an empty one stands in: timm reads images with it, and builds no model by it."""
    with _stand_in("torchvision"):
        try:
            timm = import_module("timm")
            import_module("timm.utils")
        except ImportError as error:
            fix = "pip install timm, with --no-deps where torch is pinned"
            raise UsageError(f"these models need timm: {error}", fix=fix) from None
    return timm


@contextmanager
def _stand_in(package: str) -> Generator[None]:
    if package in sys.modules or (find_spec(package) is not None and _imports(package)):
        yield
        return
    finder = _Finder(package)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _forget(package)  # others look for the real one


def _imports(package: str) -> bool:
    try:
        __import__(package)
    except (ImportError, RuntimeError):
        _forget(package)
        return False
    return True


def _forget(package: str) -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == package]:
        del sys.modules[name]


class _Name(type):
    """A class whose every attribute is its own name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self.package:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


# ---------------------------------------------------------------------------- others


def _unet(p: Program) -> tuple[Any, tuple[Any, ...]]:
    import torch

    try:
        unet = import_module("diffusers").UNet2DConditionModel
    except (ImportError, RuntimeError) as error:  # it imports its models when asked for one
        fix = "pip install diffusers, with --no-deps where torch is pinned"
        why = str(error).splitlines()[-1]
        raise UsageError(f"the UNet of Stable Diffusion needs diffusers: {why}", fix=fix) from None
    with torch.device("meta"):
        dtype = _dtype(p)
        module = unet(cross_attention_dim=PROMPT[1]).to(dtype).eval()
        latents = torch.empty(p.batch, 4, p.side, p.side, dtype=dtype)
        prompt = torch.empty(p.batch, *PROMPT, dtype=dtype)
        step = torch.empty((), dtype=torch.long)
    if p.nhwc:
        module = module.to(memory_format=torch.channels_last)
    return module, (latents, step, prompt)


def _decoder(p: Program) -> list[tuple[Graph, int]]:
    """The prompts, and as often as there are tokens to generate, the one in their middle."""
    if p.model not in DECODERS:
        raise UsageError(f"no decoder is called {p.model}", expected=", ".join(DECODERS))
    prompt, output = p.tokens
    dims = {"batch": p.batch}
    options: dict[str, Any] = {"profile": "trtllm", "dtype": p.dtype, "warn": _silent}
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(DECODERS[p.model]))
        name = f"hf:{folder}"
        made = [(gpuir.load(name, phase="prefill", dims=dims | {"seq": prompt}, **options), 1)]
        if output > 1:
            past = prompt + output // 2
            decode = gpuir.load(name, phase="decode", past=past, dims=dims, **options)
            made.append((decode, output - 1))
    return made
