"""Products whose result is of another dtype than their operands: integers, 8-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_calls import Call, gives, loaded  # noqa: E402

import gpuir  # noqa: E402
from gpuir.frontends.torch.load import load  # noqa: E402
from gpuir.frontends.torch.walk import numbers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own


def agree(fn: Callable[..., Any], *args: Any, profile: str = "eager") -> None:
    """Graph and kernels give what torch gives."""
    graph, want = loaded(fn, *args), numbers(fn(*args)).astype(np.float64)
    for made in (graph, gpuir.lower(graph, profile=profile)):
        found = gives(made, args)
        np.testing.assert_allclose(found.astype(np.float64), want, rtol=1e-2, atol=1e-2)


def wide(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def kernels(graph: gpuir.Graph) -> list[Any]:
    """What `analyze` launches under eager PyTorch."""
    costed = gpuir.analyze(graph, target="h100-sxm", profile="eager").graph
    return [n.op for n in costed.nodes if n.op.name != "k.view"]


def test_integers_sum_in_32_bits():
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((32, 64), (64, 16)))
    agree(torch._int_mm, a, b)
    big = torch.empty(4096, 4096, dtype=torch.int8, device="meta")
    (gemm,) = kernels(loaded(torch._int_mm, big, big))
    assert gemm.name == "k.gemm" and gemm.flops() == 2 * 4096**3
    peak = gpuir.load_target("h100-sxm").peak("tensor", gemm.factors[0].type.dtype)
    summary = gpuir.analyze(loaded(torch._int_mm, big, big), target="h100-sxm")
    assert summary.latency_s > 2 * 4096**3 / peak


SCALES = {"whole": ((), ()), "rows": ((32, 1), (1, 48))}


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_floats_of_8_bits_with_scales(scales: str, has_bias: bool):
    a, b = (wide(*shape).to(torch.float8_e4m3fn) for shape in ((32, 64), (48, 64)))
    factors = [torch.rand(shape) for shape in SCALES[scales]]
    bias = wide(48).bfloat16() if has_bias else None

    def fn(a: Any, b: Any, x: Any, y: Any, *bias: Any) -> Any:
        return torch._scaled_mm(a, b.t(), x, y, *bias, out_dtype=torch.bfloat16)

    args = (a, b, *factors, *([] if bias is None else [bias]))
    agree(fn, *args)
    (gemm,) = kernels(loaded(fn, *args))  # the transpose is a view
    assert gemm.name == "k.gemm" and gemm.anchor.results[0].type.dtype == gpuir.ir.types.f32
    assert 2 * 32 * 48 * 64 <= gemm.flops() <= 2 * 32 * 48 * 68
    assert gemm.result_types[0].dtype == gpuir.ir.types.bf16


def test_scales_of_blocks_are_said_to_be_left_out():
    a = torch.empty(256, 512, dtype=torch.float8_e4m3fn, device="meta")
    b = torch.empty(512, 256, dtype=torch.float8_e4m3fn, device="meta").t().contiguous().t()
    scales = (torch.empty(256, 4, device="meta"), torch.empty(4, 2, device="meta"))
    program = torch.export.export(Call(scaled), (a, b, *scales))
    graph = load(program, strict=True).graph
    assert any("the scales of the blocks" in text for text in graph.assumed)


def scaled(a: Any, b: Any, x: Any, y: Any) -> Any:
    return torch._scaled_mm(a, b, x, y, out_dtype=torch.bfloat16)


def test_a_result_wider_than_the_operands():
    a, b = wide(8, 16).bfloat16(), wide(16, 4).bfloat16()
    graph = loaded(lambda a, b: torch.ops.aten.mm.dtype(a, b, torch.float32), *meta(a, b))
    assert [v.type.dtype for v in graph.outputs] == [gpuir.ir.types.f32]
    graph = loaded(
        lambda c, a, b: torch.ops.aten.addmm.dtype(c, a, b, torch.float32), *meta(wide(8, 4), a, b)
    )
    assert [v.type.dtype for v in graph.outputs] == [gpuir.ir.types.f32]


def meta(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [v.to("meta") for v in tensors]


MOVES: dict[str, Callable[[Any], Any]] = {
    "swapaxes": lambda x: x.swapaxes(1, 2),
    "swapaxes of the last": lambda x: x.swapaxes(-1, 0),
    "swapdims": lambda x: torch.swapdims(x, 1, -1),
    "transpose": lambda x: x.transpose(2, 0),
    "moveaxis": lambda x: torch.moveaxis(x, 0, -1),
    "moveaxis of several": lambda x: torch.moveaxis(x, (0, 1), (-1, 0)),
    "movedim": lambda x: x.movedim(2, 0),
    "mT": lambda x: x.mT,
    "t": lambda x: x[0].t(),
    "t of a vector": lambda x: x[0, 0].t(),
    "T": lambda x: x[1].T,
    "where": lambda x: torch.where(x > 0, x, 2.0),
    "searchsorted": lambda x: torch.searchsorted(x[0, 0].sort().values, x),
    "bucketize": lambda x: torch.bucketize(x, x[0, 0].sort().values),
    "group norm": lambda x: torch.nn.functional.group_norm(x, 2),
    "shifts": lambda x: (x.int() << 3) ^ (x.int() >> 2) ^ (1 << x.int()),
    "ones": lambda x: x + torch.ones_like(x) + x.new_full(x.shape, 3.0),
}


@pytest.mark.parametrize("name", MOVES)
def test_arguments_that_overloads_name_differently(name: str):
    agree(MOVES[name], torch.randn(4, 4, 4))
