"""Models that were run on MIG slices and are in no library, as programs that gpuir reads.

SSD with a ResNet-34 is MLPerf's: of 300 pixels a side as it is trained, of 1200 as inference has
it (mlcommons/training, single_stage_detector; mlcommons/inference, ssd_r34.py). SSD with a
MobileNet is that of 300 pixels (arXiv 1704.04861, 1512.02325). The U-Net of volumes is MLPerf's of
2021, of windows of 128 cells a side (nnU-Net, arXiv 1809.10486). Weights are those that torch
makes; boxes are not chosen from their scores, nor windows put together.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

CLASSES = 81  # of COCO, with the background
BOXES = (4, 6, 6, 6, 4, 4)  # a place, by map


def ssd_resnet34(side: int, *, with_loss: bool = False) -> Any:
    """The detector of 300 pixels, or of 1200: there the first heads look at every third place.
    With its loss it takes, of each box, a class and where it lies: which boxes are hard is not
    asked."""
    from torch import cat, nn
    from torch.nn import functional as F

    def conv(a: int, b: int, size: int, stride: int = 1, pad: int | None = None) -> Any:
        padding = size // 2 if pad is None else pad
        return nn.Sequential(nn.Conv2d(a, b, size, stride, padding, bias=False), nn.BatchNorm2d(b))

    class Block(nn.Module):
        def __init__(self, a: int, b: int, stride: int) -> None:
            super().__init__()
            self.first, self.second = conv(a, b, 3, stride), conv(b, b, 3)
            self.beside = conv(a, b, 1, stride) if a != b or stride != 1 else nn.Identity()

        def forward(self, x: Any) -> Any:
            return F.relu(self.second(F.relu(self.first(x))) + self.beside(x))

    def blocks(a: int, b: int, count: int, stride: int) -> list[Any]:
        return [Block(a, b, stride), *(Block(b, b, 1) for _ in range(count - 1))]

    def further(a: int, mid: int, b: int, stride: int, pad: int) -> Any:
        relu = nn.ReLU()
        return nn.Sequential(nn.Conv2d(a, mid, 1), relu, nn.Conv2d(mid, b, 3, stride, pad), relu)

    large = side > 300
    widths = (256, 512, 512, 256, 256, 256)
    steps = ((2, 1), (2, 1), (2, 1), (2, 0) if large else (1, 0), (1, 0))
    head_steps = (3, 3, 2, 2, 2, 2) if large else (1,) * 6

    class Ssd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *(conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
                *(*blocks(64, 64, 3, 1), *blocks(64, 128, 4, 2), *blocks(128, 256, 6, 1)),
            )
            self.further = nn.ModuleList(
                further(a, mid, b, *step)
                for (a, b), mid, step in zip(
                    pairwise(widths), (256, 256, 128, 128, 128), steps, strict=True
                )
            )
            self.places, self.classes = (
                nn.ModuleList(
                    nn.Conv2d(w, n * cells, 3, s, 1)
                    for w, n, s in zip(widths, BOXES, head_steps, strict=True)
                )
                for cells in (4, CLASSES)
            )

        def forward(self, images: Any, *wanted: Any) -> Any:
            maps = [self.body(images)]
            for layer in self.further:
                maps.append(layer(maps[-1]))
            places = self._joined(self.places, maps, 4)
            classes = self._joined(self.classes, maps, CLASSES)
            if not wanted:
                return places, classes
            where, which = wanted
            return F.smooth_l1_loss(places, where) + F.cross_entropy(classes, which)

        def _joined(self, heads: Any, maps: Any, cells: int) -> Any:
            found = (h(m) for h, m in zip(heads, maps, strict=True))
            return cat([x.reshape(x.shape[0], cells, -1) for x in found], 2)

    net = Ssd()
    return net.train() if with_loss else net.eval()


def boxes(side: int) -> int:
    """Boxes of an image of the detector with a ResNet-34."""
    maps = (50, 25, 13, 7, 3, 3) if side > 300 else (38, 19, 10, 5, 3, 1)
    return sum(n * n * of for n, of in zip(maps, BOXES, strict=True))


def ssd_mobilenet() -> Any:
    """Of 300 pixels: a MobileNet, four pairs of layers behind it, a head at each of six maps."""
    from torch import nn

    def layer(a: int, b: int, size: int, stride: int = 1, groups: int = 1) -> Any:
        conv = nn.Conv2d(a, b, size, stride, size // 2, groups=groups, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(b), nn.ReLU6())

    def apart(a: int, b: int, stride: int) -> Any:
        return nn.Sequential(layer(a, a, 3, stride, a), layer(a, b, 1))

    widths = (32, 64, 128, 128, 256, 256, *(512,) * 6)
    strides = (1, 2, 1, 2, 1, 2, *(1,) * 5)
    maps = (512, 1024, 512, 256, 256, 128)

    class Ssd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = zip(pairwise(widths), strides, strict=True)
            body = (apart(a, b, stride) for (a, b), stride in pairs)
            last = nn.Sequential(apart(512, 1024, 2), apart(1024, 1024, 1))
            further = (
                nn.Sequential(layer(a, b // 2, 1), layer(b // 2, b, 3, 2))
                for a, b in pairwise(maps[1:])
            )
            body = nn.Sequential(layer(3, 32, 3, 2), *body)
            self.parts = nn.ModuleList([body, last, *further])
            boxes = (3, *(6,) * 5)
            self.heads = nn.ModuleList(
                nn.Conv2d(w, n * (4 + 91), 1) for w, n in zip(maps, boxes, strict=True)
            )

        def forward(self, x: Any) -> Any:
            found: list[Any] = []
            for part, head in zip(self.parts, self.heads, strict=True):
                x = part(x)
                found.append(head(x))
            return tuple(found)

    return Ssd()


def unet_3d() -> Any:
    """Two convolutions a level, halved five times, and back with what each level had beside."""
    from torch import cat, nn

    widths = (32, 64, 128, 256, 320, 320)

    def level(a: int, b: int, stride: int = 1) -> Any:
        layers: list[Any] = []
        for cells, step in ((a, stride), (b, 1)):
            conv = nn.Conv3d(cells, b, 3, step, 1, bias=False)
            layers += [conv, nn.InstanceNorm3d(b, affine=True), nn.ReLU()]
        return nn.Sequential(*layers)

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            down = (level(a, b, 2) for a, b in pairwise(widths))
            self.down = nn.ModuleList([level(1, widths[0]), *down])
            back = [(b, a) for a, b in pairwise(widths)][::-1]
            self.up = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, 2, bias=False) for a, b in back)
            self.after = nn.ModuleList(level(2 * b, b) for _, b in back)
            self.last = nn.Conv3d(widths[0], 3, 1)

        def forward(self, x: Any) -> Any:
            kept: list[Any] = []
            for part in self.down:
                x = part(x)
                kept.append(x)
            for up, after, beside in zip(self.up, self.after, kept[-2::-1], strict=True):
                x = after(cat([up(x), beside], 1))
            return self.last(x)

    return UNet()
