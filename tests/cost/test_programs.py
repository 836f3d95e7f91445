"""Small PyTorch programs that were far off: what their kernels do, and how long they were measured
(KernelBench, level 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gpuir
from gpuir.cost.reading import work_of
from gpuir.ir.phases import called_from
from gpuir.ops import kernel as k

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")
nn = torch.nn


class Called(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.call = call

    def forward(self, *args: Any) -> Any:
        return self.call(*args)


def answer(module: Any, target: str, *shapes: tuple[int, ...], profile: str = "eager") -> Any:
    with torch.no_grad():
        args = tuple(torch.empty(shape, device="meta") for shape in shapes)
        return gpuir.analyze(module.to("meta"), target, profile=profile, args=args)


def kernels(found: Any) -> list[Any]:
    return [n.op for n in found.graph.nodes if not isinstance(n.op, k.View)]


@pytest.mark.parametrize(
    ("target", "measured_s"), [("a100-sxm-40gb", 5.37e-3), ("h100-sxm-80gb", 1.62e-3)]
)
def test_convolutions_over_three_axes(target: str, measured_s: float):
    found = answer(nn.Conv3d(3, 64, 3, bias=False), target, (16, 3, 64, 64, 64))
    assert found.device_s == pytest.approx(measured_s, rel=0.35)


@pytest.mark.parametrize(
    ("target", "measured_s"),
    [("a100-sxm-80gb", 0.43e-3), ("h100-sxm-80gb", 0.238e-3), ("l40s", 0.467e-3)],
)
def test_convolutions_of_three_channels(target: str, measured_s: float):
    """cuDNN multiplies them on the lanes of A100 and H100, though TF32 is allowed."""
    found = answer(nn.Conv2d(3, 64, 3, bias=False), target, (16, 3, 256, 256))
    assert found.device_s == pytest.approx(measured_s, rel=0.2)


@pytest.mark.parametrize(("target", "measured_s"), [("h100-sxm-80gb", 10.1e-3), ("l40s", 13.4e-3)])
def test_depthwise_convolutions_find_each_place_by_division(target: str, measured_s: float):
    module = nn.Conv2d(128, 128, 3, groups=128, bias=False)
    found = answer(module, target, (64, 128, 256, 512))
    assert found.device_s == pytest.approx(measured_s, rel=0.25)


def test_a_stride_and_a_dilation_multiply_zeros():
    """A transposed convolution with strides of 5 and gaps in its window has 25 times the products;
    with either alone cuDNN skips them."""

    def products(**how: Any) -> float:
        module = nn.ConvTranspose2d(32, 64, 3, padding=1, bias=False, **how)
        (conv,) = [
            x for x in kernels(answer(module, "a100", (16, 32, 64, 128))) if x.name == "k.conv"
        ]
        return float(work_of(conv).products)

    plain = products()
    assert products(stride=5) == products(dilation=2) == plain
    assert products(stride=5, dilation=2) == 25 * plain


@pytest.mark.parametrize(("loss", "maps"), [("mse_loss", 1), ("smooth_l1_loss", 1), ("l1_loss", 2)])
def test_a_loss_is_a_map_and_a_mean(loss: str, maps: int):
    """ATen's l1_loss calls a difference and its size (native/Loss.cpp)."""
    module = Called(getattr(nn.functional, loss))
    names = [x.name for x in kernels(answer(module, "a100", (512, 512), (512, 512)))]
    assert names == ["k.map"] * maps + ["k.reduce"]
    compiled = kernels(answer(module, "a100", (512, 512), (512, 512), profile="compiled"))
    assert {x.name for x in compiled} == {"k.reduce"}


@pytest.mark.parametrize(
    ("target", "measured_s"),
    [("h100-sxm-80gb", 2.84e-3), ("l40s", 10.1e-3), ("rtx-a6000", 14.9e-3)],
)
def test_transposed_convolutions_sum_by_result(target: str, measured_s: float):
    """A product as deep as channels times window, not one of 64 channels alone."""
    module = nn.ConvTranspose2d(64, 128, (3, 5), bias=False)
    found = answer(module, target, (64, 64, 128, 256))
    assert found.device_s == pytest.approx(measured_s, rel=0.2)
    (conv,) = [x for x in kernels(found) if x.name == "k.conv"]
    assert dict(work_of(conv).dims)["k"] == 64 * 15


def test_operators_that_call_others_launch_what_they_call():
    """A distance is a difference, a sum and a norm, one after another: one op to the host."""
    shape = (32768, 8192)
    found = answer(nn.TripletMarginLoss(), "h100-sxm-80gb", shape, shape, shape)
    names = [n.locs[0].partition("::")[2] for n in found.graph.nodes if n.results[0].type.rank == 2]
    assert names == ["sub", "add", "sub_1", "add_1"]
    assert found.device_s == pytest.approx(4.27e-3, rel=0.1)
    assert called_from("m:loss::sub/backward") == "m:loss/backward"
    one = answer(Called(nn.functional.kl_div), "a100", (512, 512), (512, 512))
    assert [x.name for x in kernels(one)] == ["k.map", "k.map", "k.map", "k.reduce"]
    few = answer(nn.TripletMarginLoss(), "h100-sxm-80gb", (8, 64), (8, 64), (8, 64))
    assert few.latency_s < 0.5 * len(kernels(few)) * 18e-6


def test_pools_over_three_axes():
    module, shape = nn.AvgPool3d(3, stride=2, padding=1), (16, 32, 64, 64, 64)
    for target, measured_s in (("a100-sxm-80gb", 1.04e-3), ("t4", 3.96e-3)):
        assert answer(module, target, shape).device_s == pytest.approx(measured_s, rel=0.3)
    eager, compiled = (answer(module, "a100", shape, profile=p) for p in ("eager", "compiled"))
    assert compiled.device_s == pytest.approx(eager.device_s), "27 cells: no loop of Inductor's"


def test_images_that_a_compiled_program_gives_lie_as_in_eager_mode():
    module = nn.Conv2d(3, 64, 3, bias=False)
    found = answer(module, "a100", (16, 3, 256, 256), profile="compiled")
    assert [x.name for x in kernels(found)] == ["k.copy", "k.copy", "k.conv", "k.copy"]
    assert not found.graph.outputs[0].type.order
