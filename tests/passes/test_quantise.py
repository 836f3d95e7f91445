"""Operands of 8 bits, as quantisers write them, and what TensorRT makes of them."""

from __future__ import annotations

from collections import Counter

import pytest

import gpuir
from gpuir.ir.errors import UsageError
from gpuir.ir.types import f8e4m3, f16, f32, i8
from gpuir.ops import kernel as k
from gpuir.passes.quantise import Quantise

torch = pytest.importorskip("torch")
nn = torch.nn


class Residual(nn.Module):
    """Two convolutions with a skip around the second, a pool and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 32, 3, padding=1)
        self.last = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        x = (self.second(x) + x).relu()
        return self.last(x.mean((2, 3)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.last = nn.Linear(32, 100, bias=False)
        self.last.weight = self.words.weight

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(i))


@pytest.mark.parametrize(("option", "code"), [("int8", i8), ("fp8", f8e4m3)])
def test_an_engine_multiplies_codes_and_writes_them(option, code):
    target = "a100" if option == "int8" else "h100-sxm"
    x = torch.zeros(8, 16, 32, 32)
    options = {"fp16": True, option: True}
    answer = gpuir.analyze(Residual(), target, args=(x,), profile="tensorrt", **options)
    first, second = (n for n in answer.graph.nodes if isinstance(n.op, k.Conv))
    for node in (first, second):
        assert all(v.type.dtype == code for v in node.op.factors)
    assert [v.type.dtype for v in first.results] == [code]
    assert [v.type.rank for v in second.op.args if v.type.dtype != code] == [3], "the bias alone"
    (product,) = (n for n in answer.graph.nodes if isinstance(n.op, k.Gemm))
    assert all(v.type.dtype == code for v in product.op.factors)
    assert answer.graph.outputs[0].type.dtype == f32
    (weight,) = (v for v in answer.graph.params if v.name.endswith("last.weight"))
    assert weight.type.dtype == code


def test_less_moves_and_it_takes_less_time():
    x = torch.zeros(64, 16, 64, 64)
    half, narrow = (
        gpuir.analyze(Residual(), "a100", args=(x,), profile="tensorrt", fp16=True, int8=int8)
        for int8 in (False, True)
    )
    assert narrow.latency_s < 0.8 * half.latency_s
    assert narrow.memory.peak_bytes < half.memory.peak_bytes


def test_a_weight_that_is_looked_up_too_stays():
    g = Quantise().run(gpuir.load(Tied(), args=(torch.zeros(4, dtype=torch.int64),)))
    assert [v.type.dtype for v in g.params] == [f32]
    assert Counter(n.op.name for n in g.nodes) == {"t.gather": 1, "t.transpose": 1, "t.matmul": 1}


def test_eager_runs_what_quantises_as_kernels_of_its_own():
    x = torch.zeros(8, 16, 32, 32)
    few, more = (
        gpuir.analyze(Residual(), "a100", args=(x,), profile="eager", fp16=True, int8=int8)
        for int8 in (False, True)
    )
    assert more.latency_s > few.latency_s
    convs = [n.op for n in more.graph.nodes if isinstance(n.op, k.Conv)]
    assert {op.factors[0].type.dtype for op in convs} == {f16}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"int8": True, "fp8": True}, "exclude each other"),
        ({"int8": True, "train": True}, "for inference"),
        ({"int8": True, "autocast": "f16"}, "for inference"),
    ],
)
def test_what_does_not_go_together(options, says):
    with pytest.raises(UsageError, match=says):
        gpuir.load(Residual(), args=(torch.zeros(1, 16, 8, 8),), **options)


def test_no_other_dtype():
    with pytest.raises(UsageError, match="'i4' is not supported"):
        Quantise("i4")
