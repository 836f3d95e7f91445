"""torch's operators on samples of its OpInfo database. See tools/operators.py."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="torch's OpInfo database needs it")

import gpuir  # noqa: E402
from gpuir.frontends.torch.load import load  # noqa: E402
from gpuir.frontends.torch.program import TorchProgram  # noqa: E402
from gpuir.frontends.torch.walk import numbers  # noqa: E402
from gpuir.interp import run  # noqa: E402

pytestmark = pytest.mark.slow

# What is known to differ in some samples, and why.
APART = {
    "nn.functional.scaled_dot_product_attention",  # samples with dropout
    "nn.functional.avg_pool1d",  # of integers, rounded towards zero
    "nn.functional.avg_pool2d",
    "nn.functional.avg_pool3d",
    "nn.functional.pad",  # cropped to nothing, then its edge repeated
    "nn.functional.embedding",  # whose weight is renormed first
    "nn.functional.embedding_bag",
    "grid_sampler_2d",  # bf16, which torch rounds at other steps
}

COMPOSITES = (
    *("nn.functional.linear", "nn.functional.scaled_dot_product_attention", "einsum", "matmul"),
    *(f"nn.functional.{name}_norm" for name in ("layer", "rms", "group", "batch", "instance")),
    *(f"nn.functional.conv{d}d" for d in (1, 2, 3)),
    *(f"nn.functional.conv_transpose{d}d" for d in (1, 2, 3)),
    *(f"nn.functional.{kind}_pool{d}d" for kind in ("max", "avg") for d in (1, 2, 3)),
    *(f"nn.functional.adaptive_{kind}_pool{d}d" for kind in ("max", "avg") for d in (1, 2, 3)),
    *("nn.functional.embedding", "nn.functional.embedding_bag", "nn.functional.one_hot"),
    *("nn.functional.pad", "nn.functional.interpolate", "nn.functional.grid_sample"),
    *("nn.functional.pixel_shuffle", "nn.functional.unfold", "nn.functional.fold"),
    *("nn.functional.cross_entropy", "nn.functional.nll_loss", "nn.functional.kl_div"),
    *("nn.functional.dropout", "nn.functional.multi_head_attention_forward", "cdist"),
    *("index_put", "scatter_reduce", "masked_scatter", "cummax", "sort", "topk", "unfold"),
    *("view_as_complex", "polar", "angle", "fft.rfft", "fft.ifft", "linalg.svd", "linalg.solve"),
)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """torch's own test modules forbid its global flags when they are imported: for all tests that
    run after them in the process."""
    with mock.patch.object(torch.backends, "disable_global_flags", lambda: None):
        importlib.import_module("torch.testing._internal.common_methods_invocations")
    return importlib.import_module("operators")


def failures(
    tool: ModuleType,
    names: Any,
    dtypes: tuple[str, ...],
    count: int,
    profiles: tuple[str, ...] = (),
) -> list[str]:
    """What does not agree, of so many samples each; with `profiles` in their kernels, too."""
    found: list[str] = []
    for cases in tool.samples(names, [tool.DTYPES[d] for d in dtypes]):
        for case in tool.chosen(cases, count):
            outcome = tool.check_within(case, profiles=profiles)
            if case.operator not in APART and outcome.stage not in ("valued", "no program"):
                found.append(f"{case.operator} {case.dtype}: {outcome.stage}: {outcome.note}")
    return found


@pytest.mark.filterwarnings("ignore")
def test_core_operators_that_are_called_by_name(tool: ModuleType):
    outcomes = [tool.check_within(case) for case in tool.DIRECT]
    assert not [f"{o.case.operator}: {o.note}" for o in outcomes if o.stage != "valued"]


@pytest.mark.filterwarnings("ignore")
def test_composites(tool: ModuleType):
    assert not failures(tool, COMPOSITES, ("f32", "i64"), 1)


@pytest.mark.filterwarnings("ignore")
def test_every_core_operator_has_a_converter_or_is_decomposed(tool: ModuleType):
    """Those that OpInfo has under their own names."""
    core = tool.core_operators()
    assert len(core) > 150
    assert not failures(tool, sorted(core), ("f32",), 1)


# What has a meaning of its own for complex numbers, by OpInfo's names.
OF_COMPLEX = (
    *("mul", "add", "sub", "div", "pow", "reciprocal", "neg", "square", "float_power", "rsub"),
    *("real", "imag", "conj", "conj_physical", "resolve_conj", "abs", "angle", "sgn"),
    *("view_as_real", "view_as_complex", "complex", "polar", "eq", "ne", "isnan", "isfinite"),
    *("exp", "exp2", "expm1", "log", "log10", "log1p", "sqrt", "rsqrt", "sigmoid", "logaddexp"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh"),
    *("atanh", "sinc", "nn.functional.silu", "nn.functional.tanhshrink", "addcmul", "addcdiv"),
    *("lerp", "where", "masked_fill", "fill", "full_like", "constant_pad_nd"),
    *("sum", "mean", "prod", "var", "std", "var_mean", "std_mean", "cumsum", "cumprod"),
    *("logcumsumexp", "logsumexp", "any", "norm", "linalg.vector_norm", "linalg.matrix_norm"),
    *("matmul", "mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv", "addr", "baddbmm", "addbmm"),
    *("__rmatmul__", "inner", "outer", "tensordot", "einsum", "kron", "linalg.multi_dot"),
    *("linalg.vecdot", "nn.functional.linear", "nn.functional.rms_norm", "H", "mH"),
    *(f"nn.functional.conv{d}d" for d in (1, 2, 3)),
    *(f"nn.functional.conv_transpose{d}d" for d in (1, 2, 3)),
    *(f"fft.{name}" for name in ("fft", "ifft", "fft2", "ifftn", "hfft", "irfft", "irfft2")),
    *("linalg.lu", "lu", "linalg.lu_factor", "linalg.solve", "linalg.inv", "linalg.cholesky"),
    *("linalg.eigh", "linalg.svd", "linalg.qr", "linalg.det", "linalg.pinv", "matrix_exp"),
    *("index_add", "index_put", "scatter_add", "gather", "cat", "stack", "roll", "flip"),
)


@pytest.mark.filterwarnings("ignore")
def test_complex_numbers(tool: ModuleType):
    """The graph, and the kernels that eager and compiled PyTorch make of it."""
    assert not failures(tool, OF_COMPLEX, ("c64",), 1, ("eager", "compiled"))


@pytest.mark.filterwarnings("ignore")
def test_complex_numbers_of_twice_the_width(tool: ModuleType):
    names = ("mul", "abs", "var", "logcumsumexp", "vdot", "matmul", "lu", "nn.functional.conv2d")
    assert not failures(tool, names, ("c128",), 3, ("eager",))


@pytest.mark.filterwarnings("ignore")
def test_a_rotation_by_complex_numbers_moves_nothing_else():
    """Views as complex numbers and back launch no kernel: cast, product and cast are one."""

    class Rotary(torch.nn.Module):
        def forward(self, x: Any, turn: Any) -> Any:
            pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turn).flatten(3).type_as(x)

    x = torch.randn(2, 5, 4, 8).half()
    turn = torch.polar(torch.ones(5, 1, 4), torch.randn(5, 1, 4))
    graph = load(TorchProgram(Rotary(), (x, turn)), strict=True).graph
    kernels = gpuir.lower(graph, profile="ideal")
    assert [n.op.name for n in kernels.nodes if n.op.name != "k.view"] == ["k.map"]
    values = {v.name: numbers(a) for v, a in zip(graph.inputs, (x, turn), strict=True)}
    (found,) = run(kernels, values).values()
    np.testing.assert_array_equal(found, Rotary()(x, turn).numpy())
