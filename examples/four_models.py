"""Writes four models that services run, in half precision: classify, answer, detect, speak.

usage: python examples/four_models.py FOLDER

resnet50.onnx      images of 224x224 -> 1000 labels. He et al., Deep Residual Learning, CVPR 2016,
                   the stride in the 3x3 convolutions
bert.onnx          questions with their texts -> where the answers are. Devlin et al., BERT,
                   NAACL 2019, the base size
efficientdet.onnx  images of 512x512 -> classes and boxes of all anchors. EfficientDet-D0: Tan,
                   Pang, Le, EfficientDet, CVPR 2020. What chooses among the boxes (non-maximum
                   suppression) is left out
fastpitch.onnx     letters -> mel spectrogram. Lancucki, FastPitch, ICASSP 2021. Every letter
                   lasts `FRAMES` frames: the predicted durations are an output, but not used

Weights are random: latency does not depend on them. `batch` is symbolic, and so is the length `seq`
of what is read as text. Needs `pip install 'gpuir[hf]'`; takes 360 MB of disk.

    gpuir analyze resnet50.onnx --target a30 --dims batch=1 --profile tensorrt
    gpuir analyze bert.onnx --target a30 --dims batch=1,seq=384 --profile tensorrt
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    EfficientNetConfig,
    EfficientNetModel,
    ResNetConfig,
    ResNetForImageClassification,
)

OPSET = 17

Axes = dict[str, dict[int, str]]
BATCH, TEXT = {0: "batch"}, {0: "batch", 1: "seq"}


class Fuse(nn.Module):
    """Maps of one size -> one: their weighted mean, swish, and a separable convolution.

    The weights are positive and sum to about one: "fast normalized fusion", section 3.3.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(inputs))
        self.conv, self.norm = separable(width, width), nn.BatchNorm2d(width, eps=1e-3)

    def forward(self, *maps: Tensor) -> Tensor:
        weights = F.relu(self.weights)
        weights = weights / (weights.sum() + 1e-4)
        mean = sum(m * w for m, w in zip(maps, weights.unbind()))
        return self.norm(self.conv(F.silu(mean)))


class BiFPN(nn.Module):
    """One layer of the bidirectional pyramid: down from P7 to P3, and up again; figure 3.

    What comes up meets `levels` again, or `again` in the first layer, which projects the
    backbone's maps twice.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(Fuse(2, width) for _ in range(4))
        self.up = nn.ModuleList(Fuse(n, width) for n in (3, 3, 3, 2))

    def forward(self, levels: list[Tensor], again: list[Tensor]) -> list[Tensor]:
        down = levels[-1:]
        for fuse, level in zip(self.down, levels[-2::-1]):
            down.append(fuse(level, F.interpolate(down[-1], scale_factor=2.0, mode="nearest")))
        up = down[-1:]
        for fuse, level, middle in zip(self.up, again[1:], down[-2:0:-1] + [None]):
            maps = (level, smaller(up[-1])) if middle is None else (level, middle, smaller(up[-1]))
            up.append(fuse(*maps))
        return up


class Head(nn.Module):
    """`outputs` numbers for each anchor. The levels share convolutions, not normalizations."""

    def __init__(self, width: int, layers: int, levels: int, anchors: int, outputs: int) -> None:
        super().__init__()
        self.anchors, self.outputs = anchors, outputs
        self.convs = nn.ModuleList(separable(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(
            nn.ModuleList(nn.BatchNorm2d(width, eps=1e-3) for _ in range(layers))
            for _ in range(levels)
        )
        self.last = separable(width, anchors * outputs)

    def forward(self, levels: list[Tensor]) -> Tensor:
        found = []
        for x, norms in zip(levels, self.norms):
            for conv, norm in zip(self.convs, norms):
                x = F.silu(norm(conv(x)))
            anchors = self.anchors * int(x.shape[2]) * int(x.shape[3])
            found.append(self.last(x).permute(0, 2, 3, 1).reshape(-1, anchors, self.outputs))
        return torch.cat(found, dim=1)


class EfficientDet(nn.Module):
    """Size D0, section 4.2 and table 1: EfficientNet-B0, a pyramid of 3 layers, heads of 3."""

    def __init__(self, width: int = 64, layers: int = 3, anchors: int = 9, classes: int = 90):
        super().__init__()
        b0 = EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280)
        backbone = EfficientNetModel(b0)
        self.stem, self.blocks = backbone.embeddings, backbone.encoder.blocks
        # the last blocks of strides 8, 16 and 32
        self.taps, channels = (4, 10, 15), (40, 112, 320)
        self.project = nn.ModuleList(projection(c, width) for c in (*channels, channels[-1]))
        self.project_again = nn.ModuleList(projection(c, width) for c in channels[1:])
        self.pyramid = nn.ModuleList(BiFPN(width) for _ in range(layers))
        self.classes = Head(width, layers, 5, anchors, classes)
        self.boxes = Head(width, layers, 5, anchors, 4)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        x, taken = self.stem(pixels), []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i in self.taps:
                taken.append(x)
        levels = [p(m) for p, m in zip(self.project, (*taken, x))]
        levels[3] = smaller(levels[3])
        levels.append(smaller(levels[3]))
        again = [p(m) for p, m in zip(self.project_again, taken[1:])]
        again = [levels[0], *again, *levels[3:]]
        for layer in self.pyramid:
            levels = again = layer(levels, again)
        return self.classes(levels), self.boxes(levels)


def separable(inputs: int, outputs: int) -> nn.Module:
    depthwise = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False)
    return nn.Sequential(depthwise, nn.Conv2d(inputs, outputs, 1))


def projection(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs, eps=1e-3))


def smaller(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, stride=2, padding=1)


# FastPitch's sizes: section 3, and the defaults of the author's implementation
# (NVIDIA/DeepLearningExamples, PyTorch/SpeechSynthesis/FastPitch, fastpitch/arg_parser.py).
SYMBOLS, MEL = 148, 80
WIDTH, HEAD, INNER, FILTERS, BLOCKS = 384, 64, 1536, 256, 6

# Frames a letter: LJ Speech (keithito.com/LJ-Speech-Dataset) has 1,308,678 characters in 86,117 s,
# in frames of 256 samples at 22,050 Hz, which makes 5.7.
FRAMES = 6


class Block(nn.Module):
    """A feed-forward transformer block: attention of one head, then convolutions over time."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEAD), nn.Linear(HEAD, WIDTH, bias=False)
        self.widen = nn.Conv1d(WIDTH, INNER, 3, padding=1)
        self.narrow = nn.Conv1d(INNER, WIDTH, 3, padding=1)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=2)
        scores = (q @ k.transpose(1, 2) * HEAD**-0.5).masked_fill(~kept.transpose(1, 2), -1e4)
        x = self.norms[0](x + self.out(scores.softmax(dim=2) @ v)) * kept
        inner = self.narrow(F.relu(self.widen(x.transpose(1, 2))))
        return self.norms[1](x + inner.transpose(1, 2)) * kept


class Predictor(nn.Module):
    """One number a letter: its duration, or its pitch."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(n, FILTERS, 3, padding=1) for n in (WIDTH, FILTERS))
        self.norms = nn.ModuleList(nn.LayerNorm(FILTERS) for _ in range(2))
        self.last = nn.Linear(FILTERS, 1)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        x = x * kept
        for conv, norm in zip(self.convs, self.norms):
            x = norm(F.relu(conv(x.transpose(1, 2))).transpose(1, 2))
        return self.last(x) * kept


class FastPitch(nn.Module):
    """One speaker; letter 0 is padding. All letters last `FRAMES`."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(SYMBOLS, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.duration, self.pitch = Predictor(), Predictor()
        self.pitch_embedding = nn.Conv1d(1, WIDTH, 3, padding=1)
        self.decoder = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.mel = nn.Linear(WIDTH, MEL)

    def forward(self, letters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept = (letters != 0).unsqueeze(2)
        x = located(self.letters(letters), kept)
        for block in self.encoder:
            x = block(x, kept)
        duration, pitch = self.duration(x, kept), self.pitch(x, kept)
        x = x + self.pitch_embedding(pitch.transpose(1, 2)).transpose(1, 2)
        x, kept = lasting(x), lasting(kept)
        x = located(x, kept)
        for block in self.decoder:
            x = block(x, kept)
        return self.mel(x).transpose(1, 2), duration.squeeze(2), pitch.squeeze(2)


def located(x: Tensor, kept: Tensor) -> Tensor:
    """x plus the sines and cosines of its positions; Vaswani et al., 2017, section 3.5."""
    positions = torch.arange(x.shape[1]).unsqueeze(1)
    angles = positions / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    return x + torch.cat((angles.sin(), angles.cos()), dim=1).to(x.dtype) * kept


def lasting(x: Tensor) -> Tensor:
    """[batch, letters, width]  ->  [batch, letters * FRAMES, width]"""
    return x.unsqueeze(2).expand(-1, -1, FRAMES, -1).flatten(1, 2)


class Outputs(nn.Module):
    """A model of transformers as a function of tensors to a tuple of tensors."""

    def __init__(self, model: nn.Module, inputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        return self.model(**dict(zip(self.inputs, args)), return_dict=False)


def write(file: Path, model: nn.Module, inputs: dict[str, Tensor], symbolic: Axes) -> None:
    """Exports the model, and prints what came of it. `symbolic` has the inputs and the outputs,
    in their order, and of each the dimensions that the file names rather than numbers."""
    model = model.half().eval()
    torch.onnx.export(
        *(model, tuple(inputs.values()), str(file)),
        input_names=list(inputs),
        output_names=[name for name in symbolic if name not in inputs],
        dynamic_axes=symbolic,
        opset_version=OPSET,
        dynamo=False,
    )
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB, {parameters:,} parameters")


def resnet50(file: Path) -> None:
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    inputs = {"pixel_values": torch.zeros(2, 3, 224, 224).half()}
    write(file, Outputs(model, tuple(inputs)), inputs, {"pixel_values": BATCH, "logits": BATCH})


def bert(file: Path) -> None:
    model = BertForQuestionAnswering(BertConfig(attn_implementation="eager"))
    words = torch.ones(2, 384, dtype=torch.int64)
    inputs = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    symbolic = dict.fromkeys((*inputs, "start", "end"), TEXT)
    write(file, Outputs(model, tuple(inputs)), inputs, symbolic)


def efficientdet(file: Path) -> None:
    inputs = {"pixel_values": torch.zeros(2, 3, 512, 512).half()}
    write(file, EfficientDet(), inputs, dict.fromkeys((*inputs, "classes", "boxes"), BATCH))


def fastpitch(file: Path) -> None:
    inputs = {"letters": torch.ones(2, 128, dtype=torch.int64)}
    mel = {0: "batch", 2: "frames"}
    write(file, FastPitch(), inputs, {"letters": TEXT, "mel": mel, "duration": TEXT, "pitch": TEXT})


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    # of shapes that tracing fixes, which are meant to be, and of this exporter's age: it is the one
    # whose files most engines were made for
    warnings.simplefilter("ignore")
    for writes in (resnet50, bert, efficientdet, fastpitch):
        writes(folder / f"{writes.__name__}.onnx")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/four_models.py FOLDER")
    main(Path(sys.argv[1]))
