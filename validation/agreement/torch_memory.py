"""Peak memory as gpuir counts it, against PyTorch's own accounting of the same program.

usage: python -m validation.agreement.torch_memory [MODEL...]

PyTorch runs the model on fake tensors under `torch.distributed._tools.mem_tracker.MemTracker`,
which follows every storage from its allocation to its end. Inference is run twice: by the module's
own code, whose local variables live until their function returns, and by the exported program,
which drops each at its last use, as gpuir does. Training is the module's own forward pass, a loss
of one number, and `backward()`; gpuir counts the graph that AOTAutograd derives, and the one that
its own `autodiff` does. A step of AdamW comes behind that one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from gpuir.frontends.torch.joint import Fakes
from gpuir.frontends.torch.load import load
from gpuir.ir.graph import Graph
from gpuir.simulate.memory import memory
from gpuir.stacks.table import pipeline

Made = tuple[nn.Module, tuple[Any, ...]]


class Perceptron(nn.Sequential):
    def __init__(self) -> None:
        first, second, last = nn.Linear(512, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 10)
        super().__init__(first, nn.ReLU(), second, nn.GELU(), last)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 32, 1), (32, 64, 2), (64, 64, 1))
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, s, padding=1) for a, b, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _ in sizes)
        self.out = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            y = norm(conv(x))
            x = F.relu(x + y if x.shape == y.shape else y)
        return self.out(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Block(nn.Module):
    """A transformer's layer; `fused` attention or its scores in memory."""

    def __init__(self, fused: bool, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.fused, self.heads = fused, heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Tower(nn.Module):
    """A small language model."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(1000, 256), nn.Linear(256, 1000)
        self.blocks = nn.Sequential(*(Block(fused=True) for _ in range(layers)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(self.words(ids)))


def words() -> torch.Tensor:
    return torch.zeros(4, 128, dtype=torch.long)


def hugging_face(name: str, args: Callable[[], tuple[Any, ...]], **sizes: Any) -> Made:
    import transformers

    config = getattr(transformers, f"{name}Config")(**sizes)
    return getattr(transformers, f"{name}{HEADS.get(name, 'Model')}")(config), args()


HEADS = {"GPT2": "LMHeadModel", "Llama": "ForCausalLM"}
SMALL = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}


def images() -> tuple[torch.Tensor]:
    return (torch.zeros(4, 3, 224, 224),)


MODELS: dict[str, Callable[[], Made]] = {
    "perceptron": lambda: (Perceptron(), (torch.zeros(256, 512),)),
    "convolutions": lambda: (Convolutions(), (torch.zeros(8, 3, 64, 64),)),
    "block": lambda: (Block(fused=True), (torch.zeros(8, 128, 256),)),
    "block, scores in memory": lambda: (Block(fused=False), (torch.zeros(8, 128, 256),)),
    "tower of 4 blocks": lambda: (Tower(), (words(),)),
    "BERT": lambda: hugging_face("Bert", lambda: (words(),), intermediate_size=1024, **SMALL),
    "GPT-2": lambda: hugging_face(
        "GPT2", lambda: (words(),), n_layer=2, n_embd=256, n_head=4, use_cache=False
    ),
    "Llama": lambda: hugging_face(
        "Llama", lambda: (words(),), intermediate_size=688, use_cache=False, **SMALL
    ),
    "ResNet-50": lambda: hugging_face("ResNet", images),
    "ViT": lambda: hugging_face("ViT", images, intermediate_size=1024, **SMALL),
    "ConvNeXt": lambda: hugging_face("ConvNext", images),
}


class Loss(nn.Module):
    """The loss of a model's first result: cross entropy of classes, or squared distance."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> torch.Tensor:
        *args, wanted = args
        found = first(self.model(*args))
        if wanted.is_floating_point():
            return F.mse_loss(found, wanted)
        return F.cross_entropy(found.flatten(0, -2), wanted.flatten())


def target(name: str, found: torch.Tensor) -> torch.Tensor:
    """What a model that gives classes, or something else, ought to have given."""
    if name in CLASSES:
        return torch.zeros(found.shape[:-1], dtype=torch.long)
    return torch.zeros(found.shape)


CLASSES = ("perceptron", "convolutions", "tower of 4 blocks", "GPT-2", "Llama")


def first(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


def tracked(module: nn.Module, args: tuple[Any, ...], run: Callable[[], Any]) -> int:
    """The most bytes that PyTorch holds while `run` runs, on whatever device."""
    tracker = MemTracker()
    tracker.track_external(module, *args)
    with tracker:
        run()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return peak["Total"]


def inference(made: Made) -> tuple[int, int, Graph]:
    """Peak of the module's own code, that of the exported program, and its graph."""
    fakes = Fakes(FakeTensorMode(allow_non_fake_inputs=True))
    module = made[0].eval()
    with fakes.mode, torch.no_grad(), fakes.inside(module):
        args = fakes(made[1])
        exported = torch.export.export(module, args, strict=False)
        program = exported.module()
        eager = tracked(module, args, lambda: module(*args))
        return eager, tracked(program, args, lambda: program(*args)), load(exported).graph


def training(name: str, made: Made) -> tuple[int, int, Graph, Graph]:
    """Peak of the module's own forward and backward pass, and with a step of AdamW behind; and the
    graphs of the first: AOTAutograd's and gpuir's own."""
    with torch.no_grad():
        wanted = target(name, first(made[0](*made[1])))
    loss, args = Loss(made[0].train()), (*made[1], wanted)
    fakes = Fakes(FakeTensorMode(allow_non_fake_inputs=True))
    with fakes.mode, fakes.inside(loss):
        fake = fakes(args)
        eager = tracked(loss, fake, lambda: loss(*fake).backward())
        optimizer = torch.optim.AdamW(loss.parameters(), foreach=True)
        optimizer.step()  # its states are there from now on
        optimizer.zero_grad()

        def step() -> None:
            loss(*fake).backward()
            optimizer.step()

        stepped = tracked(loss, (optimizer, *fake), step)
    joint = load(loss, args=args, joint=True).graph
    return eager, stepped, joint, pipeline("autodiff").run(load(loss, args=args).graph)


def with_step(graph: Graph) -> Graph:
    """A graph with gradients, and behind it a step of AdamW."""
    return pipeline("optimizer{kind=adamw}").run(graph)


def row(name: str) -> str:
    """A line of the table: bytes as PyTorch counts them, and by how much gpuir is off."""
    eager, program, graph = inference(MODELS[name]())
    trained, stepped, joint, own = training(name, MODELS[name]())

    def off(graph: Graph, counted: int) -> str:
        return f"{100 * (memory(graph, block=1).peak_bytes / counted - 1):+.2f} %"

    cells = (f"{program:,}", off(graph, program), off(graph, eager))
    cells += (f"{trained:,}", off(joint, trained), off(own, trained))
    cells += (f"{stepped:,}", off(with_step(own), stepped))
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    print(
        "| model | inference, bytes | exported program | module's own code "
        "| training, bytes | joint graph | autodiff | AdamW, bytes | autodiff |"
    )
    print("|---|" + "---:|" * 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sys.argv[1:] or MODELS:
            try:
                print(row(name), flush=True)
            except Exception as error:
                print(f"| {name} | {type(error).__name__}: {str(error)[:200]} |")


if __name__ == "__main__":
    main()
