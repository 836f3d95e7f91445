"""How images lie in memory: by strides, as a program asks, as an option says."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import gpuir  # noqa: E402
from gpuir.ir.graph import Graph, Level  # noqa: E402
from gpuir.ops import kernel as k  # noqa: E402
from gpuir.ops import tensor as t  # noqa: E402

LAST = (0, 2, 3, 1)


class Net(nn.Module):
    """A bit of all that images go through."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.point = nn.Conv2d(32, 4, 1)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.cat((self.deep(x), x), 1)
        x = nn.functional.max_pool2d(x, 2)
        x = nn.functional.interpolate(x, scale_factor=2.0)
        x = self.point(nn.functional.pad(x, (1, 1, 1, 1)))
        return x * torch.sigmoid(nn.functional.adaptive_avg_pool2d(x, 1))


def net() -> nn.Module:
    return Net().eval()


def images(*, last: bool):
    x = torch.empty(2, 8, 16, 16)
    return x.contiguous(memory_format=torch.channels_last) if last else x


def orders(g: Graph) -> dict[str, tuple[int, ...] | None]:
    return {v.name: v.type.order for v in (*g.inputs, *g.params) if v.type.rank == 4}


def test_strides_say_how_an_image_lies():
    model = net().to(memory_format=torch.channels_last)
    assert {*orders(gpuir.load(model, args=(images(last=True),))).values()} == {LAST}
    assert {*orders(gpuir.load(net(), args=(images(last=False),))).values()} == {None}
    mixed = orders(gpuir.load(net(), args=(images(last=True),)))
    assert mixed.pop("x") == LAST and {*mixed.values()} == {None}


def test_an_option_is_as_good_as_a_conversion():
    asked = gpuir.load(net(), args=(images(last=False),), channels_last=True)
    model = net().to(memory_format=torch.channels_last)
    assert asked == gpuir.load(model, args=(images(last=True),))


@pytest.mark.parametrize("autodiff", ["torch", "gpuir"])
def test_a_training_step_has_the_formats_of_its_module(autodiff: str):
    how = {"train": True, "autodiff": autodiff, "optimizer": "sgd", "channels_last": True}
    g = gpuir.load(net(), args=(images(last=False),), **how)
    assert {*orders(g).values()} == {LAST}
    kernels = gpuir.lower(g, profile="eager")
    convolutions = [n for n in kernels.nodes if isinstance(n.op, k.Conv)]
    last = [n for n in convolutions if all(v.type.is_channels_last for v in n.results)]
    assert len(last) >= 7
    # torch's own derivation takes interpolation apart into an index, which lies as no image does
    assert len(convolutions) - len(last) <= (autodiff == "torch")


def test_one_channel_lies_both_ways():
    conv = nn.Conv2d(1, 4, 3)
    found = orders(gpuir.load(conv, args=(torch.empty(1, 1, 8, 8),)))
    assert {*found.values()} == {None}


@pytest.mark.parametrize("last", [False, True])
def test_results_lie_as_torch_has_them(last: bool):
    """Against the strides that torch itself computes for each operator of a GPU, but a convolution:
    a build without cuDNN has another rule."""
    from torch._subclasses import FakeTensorMode

    model = net().to(memory_format=torch.channels_last) if last else net()
    exported = torch.export.export(model, (given := images(last=last),))
    module = exported.module()
    kernels = gpuir.lower(gpuir.load(exported), profile="eager")
    found = {v.name: v.type for n in kernels.nodes for v in n.results if v.type.rank == 4}
    checked = 0
    with FakeTensorMode():

        class Strides(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node):
                nonlocal checked
                y = super().run_node(n)
                if n.target == torch.ops.aten.conv2d.default and last:
                    _, c, h, w = y.shape
                    y = torch.empty_strided(y.shape, (c * h * w, 1, w * c, c), device="cuda")
                elif n.name in found and isinstance(y, torch.Tensor) and y.shape[-1] > 1:
                    wants = LAST if y.stride()[1] == 1 else None
                    assert found[n.name].order == wants, n.name
                    checked += 1
                return y

        def fake(x: torch.Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")

        for part in module.modules():
            for held in (part._parameters, part._buffers):
                held.update({name: None if v is None else fake(v) for name, v in held.items()})
        Strides(module).run(fake(given))
    assert checked >= 6


class Asks(nn.Module):
    def forward(self, x):
        y = x.contiguous(memory_format=torch.channels_last)
        z = y.to(memory_format=torch.channels_last) + 1
        return z.clone(), z.contiguous(), x.to(torch.float16, memory_format=torch.channels_last)


def test_a_program_asks_for_memory_formats():
    g = gpuir.load(Asks(), args=(images(last=False),))
    assert any(isinstance(n.op, t.Ordered) for n in g.nodes)
    kept, plain, half = (v.type.order for v in gpuir.lower(g).outputs)
    assert (kept, plain, half) == (LAST, None, LAST)


def test_a_program_in_one_format_copies_no_images():
    model = net().to(memory_format=torch.channels_last)
    g = gpuir.lower(gpuir.load(model, args=(images(last=True),)), profile="eager")
    assert g.level == Level.kernel
    moved = [n for n in g.nodes if isinstance(n.op, k.Copy)]
    assert sorted(n.op.body.nodes[-1].op.name for n in moved) == ["t.concat", "t.pad"]


def test_a_compiler_copies_what_is_not_channels_last():
    def copied(last: bool) -> int:
        g = gpuir.load(net().half(), args=(images(last=last).half(),), channels_last=last)
        kernels = gpuir.lower(g, profile="compiled")
        return sum(isinstance(n.op, k.Copy) for n in kernels.nodes)

    assert copied(last=False) > copied(last=True) == 0


def test_the_report_says_how_images_lie():
    for last, words in ((False, "row-major (NCHW)"), (True, "channels-last (NHWC)")):
        g = gpuir.load(net(), args=(images(last=last),), channels_last=last)
        assert any(words in text for text in g.assumed)
    assert not any("NCHW" in x for x in gpuir.load(nn.ReLU(), args=(torch.empty(2),)).assumed)


def test_convolutions_of_channels_last_images_are_quicker_under_eager():
    """Not all of the model: PyTorch resamples such images more slowly (pixels.csv)."""
    times: list[float] = []
    for last in (True, False):
        x = torch.empty(64, 8, 128, 128).half()
        options = {"target": "rtx3090", "profile": "eager", "channels_last": last}
        kernels = gpuir.analyze(net().half(), (x,), **options).kernels
        times.append(sum(k.time_s for k in kernels if k.kind == "conv"))
    assert times[0] < times[1]
