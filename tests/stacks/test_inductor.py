"""`compiled` against torch's Inductor, which schedules each program for a GPU that is not there.

See validation/agreement/inductor.py and docs/validation/fusion.md.
"""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from gpuir.cost.reading import work_of
from gpuir.cost.rows import choose
from gpuir.cost.work import Work
from gpuir.ops.kernel import Reduce
from gpuir.stacks.inductor.split_sums import SplitSums
from gpuir.targets.load import load_target
from gpuir.text import parse

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("torch._inductor.scheduler", reason="this PyTorch has no Inductor")

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own
nn = torch.nn
A100_HINTS = {"major": 8, "warp_size_or_default": 32}  # of what Inductor's heuristics ask


@pytest.fixture(scope="module")
def tool() -> Any:
    return importlib.import_module("validation.agreement.inductor")


class Residual(nn.Module):
    """The sum of a residual stream is read by a norm and by the next sum: computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Any) -> Any:
        h = x + self.a(x)
        return h + self.b(self.n(h))


class Heads(nn.Module):
    """Attention in primitives, masked: heads are copied for the batched product, with their
    biases."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Any, mask: Any) -> Any:
        q, k, v = (f(x).view(2, 32, 4, 16).transpose(1, 2) for f in (self.q, self.k, self.v))
        p = torch.softmax(q @ k.transpose(-1, -2) * 0.25 + mask, -1)
        return self.o((p @ v).transpose(1, 2).reshape(2, 32, 64))


class Plain(nn.Module):
    """Attention in primitives, with scaled scores: a pattern that Inductor knows."""

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v


class Rotary(nn.Module):
    """Halves turned and joined again: slices and a join are read in place."""

    def forward(self, x: Any, c: Any, s: Any) -> Any:
        a, b = x[..., :32], x[..., 32:]
        return x * c + torch.cat((-b, a), -1) * s


class Square(nn.Module):
    """Squeeze and excitation: an average over an image is two kernels, the gate a third."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.n = nn.Conv2d(32, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128)
        self.s = nn.Conv2d(128, 128, 1)

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.n(self.c(x)))
        return y * torch.sigmoid(self.s(y.mean((2, 3), keepdim=True)))


class Groups(nn.Module):
    """A group norm between convolutions: statistics, then the cells with the activation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(32, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.n = nn.GroupNorm(8, 64)

    def forward(self, x: Any) -> Any:
        return self.b(torch.nn.functional.silu(self.n(self.a(x))))


class Join(nn.Module):
    """Joined for a product: written side by side by a pointwise loop and two copies."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(192, 64, bias=False)

    def forward(self, x: Any) -> Any:
        y = torch.relu(x)
        return self.b(torch.cat((y, self.a(x), x), -1)) + y.transpose(0, 1).reshape(x.shape)


class Rolled(nn.Module):
    """What two views share is stored before either reads it, where it reads much."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Any, y: Any, z: Any) -> Any:
        h = x + self.a(x) + self.b(y) + z
        h = h.view(64, 64)
        return h + 1, torch.softmax(h, -1)


class Rows(nn.Module):
    """A norm over what a transpose has put last: rows do not lie together."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.a = nn.LayerNorm(512), nn.Linear(49, 64, bias=False)

    def forward(self, x: Any) -> Any:
        return self.a(self.n(torch.relu(x).transpose(1, 2)).transpose(1, 2))


class Masked(nn.Module):
    """Attention with a mask of truth values: a loop makes numbers of it."""

    def forward(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)


class Mean(nn.Module):
    """A mean of everything: two sums, the second of which is divided."""

    def forward(self, x: Any) -> Any:
        return (x * x).mean()


class Middle(nn.Module):
    """A softmax and a maximum over a middle axis: no pointwise loop joins what it reads of them."""

    def forward(self, x: Any) -> Any:
        return x.softmax(1), x - x.amax(1, keepdim=True)


class Long(nn.Module):
    """A softmax of a few long rows: the largest and the sum of each part, of all, then the rows."""

    def forward(self, x: Any) -> Any:
        return x.softmax(1)


def mlp() -> Any:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64))


X = torch.zeros(2, 32, 64)
MASK = torch.ones(2, 1, 32, 32, dtype=torch.bool)
CASES = {
    # 3 products; a bias goes with the GELU that alone reads it, and into the call before a norm
    "mlp": (mlp, (X,), [2, 1, 1]),
    "residual": (Residual, (X,), [2, 1, 1]),
    "heads": (Heads, (X, torch.zeros(2, 1, 32, 32)), [6, 4, 1]),
    "rotary": (Rotary, (X, X, X), [0, 1, 0]),
    "squeeze": (Square, (torch.zeros(2, 32, 28, 28),), [2, 4, 2]),
    "groups": (Groups, (torch.zeros(2, 32, 16, 16),), [2, 5, 1]),
    "join": (Join, (X,), [2, 3, 0]),
    "rolled": (Rolled, (X, X, X), [2, 0, 1]),
    "rows": (Rows, (torch.zeros(2, 512, 49),), [1, 1, 2]),
    "masked": (Masked, (*[torch.zeros(2, 4, 32, 16)] * 3, MASK), [1, 1, 0]),
    "mean": (Mean, (torch.zeros(512, 512),), [0, 0, 2]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_are_those_of_inductor(tool: Any, name: str) -> None:
    build, args, expected = CASES[name]
    found = tool.compare(name, build(), *args)
    kinds = ("extern", "pointwise", "reduction")
    assert [sum(x.kind == kind for x in found.theirs) for kind in kinds] == expected
    ours, theirs = (
        # Inductor divides a sum where it is read, and forgets of its second step whose it is
        sorted(sorted(x.ops - {"mean"}) for x in side)
        for side in (found.ours, found.theirs)
    )
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "shape", "reductions"), [(Middle, (16, 64, 4096), 1), (Long, (16, 16384), 2)]
)
def test_softmaxes_that_no_loop_finishes(
    tool: Any, build: Any, shape: tuple[int, ...], reductions: int
) -> None:
    """Inductor forgets whose a softmax's reductions are, so that their kinds alone are compared."""
    found = tool.compare("softmax", build(), torch.zeros(shape))
    ours, theirs = ([x.kind for x in side] for side in (found.ours, found.theirs))
    assert ours == theirs == ["reduction"] * reductions + ["pointwise"]


@pytest.mark.parametrize("sms", [20, 40, 108, 132])
def test_sums_are_cut_as_inductor_cuts_them(tool: Any, sms: int) -> None:
    from torch._inductor.choices import InductorChoices

    cutting = SplitSums(sms=sms)
    device = SimpleNamespace(**{**vars(tool.A100), "multi_processor_count": sms})
    with mock.patch.object(tool, "A100", device), tool.pretended_gpu():
        factor = InductorChoices.reduction_split_factor
        for terms in (33, 784, 8192, 50_000, 65_536, 1_000_003, 1 << 24):
            for results in (2, 12, 128, 1000, 2047):
                for outer in (True, False):
                    expected = factor(tool.CUDA, terms, results, not outer)
                    if results >= 64 * sms or terms <= 32:  # ir.py, num_splits
                        expected = 1
                    assert cutting.parts(terms, results, outer) == expected
            assert cutting.parts(terms, 1, False) == factor(tool.CUDA, terms, 1, True)


def test_what_a_target_has_decides_how_sums_are_cut() -> None:
    on = {name: SplitSums().on(load_target(name)) for name in ("t4", "b200", "mi250x", "x86-64-v3")}
    assert on["t4"] == SplitSums(sms=40, threads=1024)
    assert (on["b200"].whole, on["mi250x"].warp) == (524288, 64)
    assert on["b200"].parts(500_000, 1, False) == on["x86-64-v3"].parts(1 << 24, 1, False) == 1
    assert on["t4"].parts(500_000, 1, False) > 1


@pytest.mark.parametrize(
    ("dtype", "kinds"),
    {torch.float16: ["extern"], torch.float32: ["extern", "reduction", "extern"]}.items(),
)
def test_attention_that_a_pattern_finds_is_one_call(tool: Any, dtype: Any, kinds: Any) -> None:
    heads = torch.zeros(2, 4, 32, 16, dtype=dtype)
    found = tool.compare("plain", Plain(), heads, heads, heads)
    assert [x.kind for x in found.theirs] == [x.kind for x in found.ours] == kinds


def test_under_autocast_weights_are_cast_by_a_kernel_each_and_biases_stay_in_calls(
    tool: Any,
) -> None:
    found = tool.compared("mlp", "compiled", mlp(), (X,), {}, "f16")
    casts = ["pointwise"] * 2
    assert [x.kind for x in found.theirs] == [
        *("pointwise", *casts, "extern", "pointwise", *casts, "extern", "reduction")
    ]
    assert Counter(found.ours) == Counter(found.theirs)


def test_under_autocast_images_stay_in_16_bits(tool: Any) -> None:
    image = torch.zeros(2, 32, 16, 16)
    found = tool.compared("square", "compiled", Square(), (image,), {}, "f16")
    assert Counter(found.ours) == Counter(found.theirs)


@pytest.mark.parametrize("rows", [64, 1024, 1 << 20])
@pytest.mark.parametrize("length", [16, 128, 256, 512, 1024, 2048, 4096, 16384])
def test_reductions_have_the_tiles_of_inductors_heuristics(
    tool: Any, rows: int, length: int
) -> None:
    allowed = heuristics(tool, rows, length)
    wide = (("o", np.array([rows])), ("r", np.array([length])))
    tiles = choose(replace(reduction(), dims=wide), load_target("a100"), {})
    ours = (int(tiles.dims["o"][0]), int(tiles.dims["r"][0]), int(tiles.warps[0]))
    assert ours in allowed
    assert length < 256 or len(allowed) == 1


def heuristics(tool: Any, rows: int, length: int) -> list[tuple[int, int, int]]:
    """Rows and cells of a block, and warps, of each kernel that Inductor would try."""
    module: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics")
    hint = importlib.import_module("torch._inductor.runtime.hints").ReductionHint.INNER
    sizes, made = {"x": rows, "r0_": length}, {"device": SimpleNamespace(**A100_HINTS)}
    with tool.pretended_gpu():
        if length <= 1024:
            found = module._persistent_reduction_configs(sizes, hint, {}, made)
        else:
            given = {"reduction_hint": hint}
            found = module._reduction_configs(
                size_hints=sizes, inductor_meta=given, triton_meta=made
            )
    return [(x.kwargs["XBLOCK"], x.kwargs.get("R0_BLOCK", length), x.num_warps) for x in found]


def reduction() -> Work:
    (node,) = parse(
        """kernel @g {
          in %x: f16[8, 64]
          %y: f16[8, 64] = k.reduce([%x], {
            in %x: f16[8, 64]
            %y: f16[8, 64] = t.softmax(%x, 1)
            out %y
          }, library="triton") at "m:softmax"
          out %y
        }"""
    ).nodes
    assert isinstance(node.op, Reduce)
    return work_of(node.op)


# launches over Inductor's kernels, F1 of pairs of ops that share one, kernels of the same ops
MODELS = {
    "gpt2-sdpa": (1.0, 0.96, 0.9),
    "llama-eager": (1.0, 0.99, 0.97),
    "dlrm": (1.0, 0.58, 0.73),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_whole_models_agree_at_least_as_far(tool: Any, name: str) -> None:
    if name != "dlrm":
        pytest.importorskip("transformers", reason="transformers is not installed")
    ratio, f1, same = MODELS[name]
    module, args, kwargs = tool.MODELS[name]()
    found = tool.compare(name, module, *args, **kwargs)
    assert ratio <= found.ratio <= 1.02
    assert found.shared()[2] >= f1
    assert found.same() >= same
