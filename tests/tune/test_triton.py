"""Triton's autotuner with gpuir in front of it; the real one where it is installed."""

from __future__ import annotations

import inspect
import re
import runpy
import sys
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tune import stand_in

import gpuir
from gpuir.ir.errors import UsageError
from gpuir.ir.types import tf32
from gpuir.tune import tutorials
from gpuir.tune.kernels import nest
from gpuir.tune.space import predict
from gpuir.tune.templates import Template
from gpuir.tune.triton import prune, pruner, to_configs

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    return stand_in.install(monkeypatch)


def matmul_configs(triton: Any, stages: tuple[int, ...] = (2, 3, 4)) -> list[Any]:
    return [
        triton.Config(
            {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 8},
            num_warps=warps,
            num_stages=s,
        )
        for m, n, k, warps, s in product(
            (128, 64, 256, 32), (128, 64, 256, 32), (64, 128), (4, 8), stages
        )
    ]


def launch(m: int = 4096, n: int = 4096, k: int = 4096, dtype: str = "float16") -> dict[str, Any]:
    a, b, c = (stand_in.tensor(dtype, *s) for s in ((m, k), (k, n), (m, n)))
    strides = {"stride_am": k, "stride_ak": 1, "stride_bk": n, "stride_bn": 1}
    return {"a_ptr": a, "b_ptr": b, "c_ptr": c, "M": m, "N": n, "K": k, **strides}


def tuned(triton: Any, configs: list[Any], prune_configs_by: dict[str, Any]) -> Any:
    @triton.autotune(configs, key=["M", "N", "K"], prune_configs_by=prune_configs_by)
    @triton.jit
    def matmul(a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
               BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, GROUP_SIZE_M):  # fmt: skip
        pass

    return matmul


def pruned(triton: Any, configs: list[Any], by: dict[str, Any], args: dict[str, Any]) -> list[Any]:
    """What Triton's own autotuner would measure for a launch."""
    kernel = tuned(triton, configs, by)
    kernel.nargs = args
    return kernel.prune_configs({"grid": (1,)})


# ---------------------------------------------------------------------------- pruning


@pytest.mark.parametrize("target", ["a100", "h100-sxm", "b200", "t4"])
def test_triton_measures_few_and_all_of_them_can_run(triton: Any, target: str):
    configs = matmul_configs(triton)
    got = pruned(triton, configs, pruner("matmul", target, top=8), launch())
    assert len(got) == 8
    found = prune(configs, launch(), "matmul", target)
    dropped = {id(c) for c, _ in found.dropped}
    assert dropped and not dropped & {id(c) for c in got}
    assert list(map(id, got)) == list(map(id, found.kept))


def test_the_first_that_can_run_is_always_measured(triton: Any):
    configs = matmul_configs(triton)
    found = prune(configs, launch(), "matmul", "a100")
    first = next(c for c, why in zip(configs, found.found.reasons, strict=True) if not why)
    assert any(c is first for c in found.kept)


def test_what_is_dropped_has_a_reason(triton: Any):
    found = prune(matmul_configs(triton), launch(), "matmul", "a100")
    assert all(re.search(r"shared memory|registers", why) for _, why in found.dropped)


def test_what_is_predicted_to_be_slow_is_among_them(triton: Any):
    """One in four is kept whatever was predicted: here the first given, and one of the middle."""
    found = prune(matmul_configs(triton), launch(), "matmul", "a100", top=8)
    rank = {id(found.judged[i]): r for r, i in enumerate(found.found.order.tolist())}
    assert max(rank[id(c)] for c in found.kept) > 20


def test_a_share_may_be_kept(triton: Any):
    configs = matmul_configs(triton)
    assert len(prune(configs, launch(), "matmul", "a100", top=0.1).kept) == len(configs) // 10


def test_perf_model_is_the_prediction(triton: Any):
    configs = matmul_configs(triton)
    model = pruner("matmul", "a100")["perf_model"]
    found = prune(configs, launch(), "matmul", "a100").found
    for i in (0, 5, len(configs) - 1):
        time_s = model(**launch(), grid=(1,), **configs[i].all_kwargs())
        assert time_s == pytest.approx(found.time_s[i])


def test_without_asynchronous_copies_stages_have_no_effect(triton: Any):
    """Triton pipelines loops from sm_80 on, so that no configuration of a T4 is too deep."""
    found = prune(matmul_configs(triton, (4, 5)), launch(), "matmul", "t4")
    assert found.kept
    assert all("stages" not in why for _, why in found.dropped)


# ---------------------------------------------------------------------------- what it does not know


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "no argument 'a_ptr'"),
        ({**launch(), "M": None}, "no argument 'M'"),
        ({**launch(), "M": "wide"}, "'M' is not a whole number"),
        ({**launch(), "a_ptr": 123456}, "data type of the argument 'a_ptr'"),
    ],
)
def test_an_argument_that_is_not_understood_changes_nothing(
    triton: Any, args: dict[str, Any], says: str
):
    configs = matmul_configs(triton)
    by = pruner("matmul", "a100")
    with pytest.warns(UserWarning, match=re.escape(says)):
        got = pruned(triton, configs, by, args)
    assert list(map(id, got)) == list(map(id, configs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it says so once
        assert len(pruned(triton, configs, by, args)) == len(configs)


def test_a_meta_parameter_that_is_not_known_changes_nothing(triton: Any):
    configs = matmul_configs(triton)
    for config in configs:
        config.kwargs["BLOCK_M"] = config.kwargs.pop("BLOCK_SIZE_M")
    with pytest.warns(UserWarning, match=r"no meta-parameter 'BLOCK_M'"):
        assert len(pruned(triton, configs, pruner("matmul", "a100"), launch())) == len(configs)


def test_where_nothing_can_run_nothing_is_dropped(triton: Any):
    sizes = {"BLOCK_SIZE_M": 256, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 256, "GROUP_SIZE_M": 8}
    configs = [triton.Config(dict(sizes), num_stages=s, num_warps=8) for s in (3, 4)]
    with pytest.warns(UserWarning, match="none of them can run on a100"):
        assert len(pruned(triton, configs, pruner("matmul", "a100"), launch())) == 2


def test_what_is_not_predicted_is_kept(triton: Any):
    odd = [
        triton.Config(dict(c.kwargs), num_warps=8, maxnreg=128) for c in matmul_configs(triton)[:2]
    ]
    found = prune([*matmul_configs(triton), *odd], launch(), "matmul", "h100-sxm")
    assert len(found.kept) == 10
    assert all(any(c is o for c in found.kept) for o in odd)


def test_a_wrong_template_is_told_the_right_ones():
    with pytest.raises(UsageError, match=r"no template 'matmull'(.|\n)*add, softmax, matmul"):
        pruner("matmull", "a100")


@pytest.mark.parametrize("top", [0, -1, 0.0, 1.5])
def test_a_wrong_top_is_told_at_once(top: float):
    with pytest.raises(UsageError, match="a whole number of at least 1, or a share of"):
        pruner("matmul", "a100", top=top)


def test_a_wrong_target_is_told_at_once():
    with pytest.raises(gpuir.GpuirError, match="h100"):
        pruner("matmul", "h100-smx")


# ---------------------------------------------------------------------------- the tutorials


ARGS: dict[str, dict[str, Any]] = {
    "add": {"x_ptr": stand_in.tensor("float32", 1 << 20), "n_elements": 1 << 20},
    "softmax": {"input_ptr": stand_in.tensor("float32", 1823, 781), "n_rows": 1823, "n_cols": 781},
    "matmul": launch(1024, 512, 2048, "bfloat16"),
    "layer norm": {"X": stand_in.tensor("float16", 1151, 8192), "N": 8192, "eps": 1e-5},
    "attention": {
        "Q": stand_in.tensor("float16", 4, 32, 1024, 64),
        "Z": 4,
        "H": 32,
        "N_CTX": 1024,
        "HEAD_DIM": 64,
        "STAGE": 3,
    },
}


@pytest.mark.parametrize("name", tutorials.TEMPLATES)
def test_every_tutorial_is_predicted_over_its_whole_space(name: str):
    template = tutorials.TEMPLATES[name]
    kernel = template.kernel(ARGS[name])
    meta = template.space(kernel)
    found = predict(kernel, template.tiles(meta), "a100")
    assert len(found) == len(next(iter(meta.values())))
    assert np.isfinite(found.time_s).sum() >= 4


def test_what_a_launch_says_is_the_kernel():
    """Extents, dtypes and the order of axes, by hand."""
    k = tutorials.MATMUL.kernel(ARGS["matmul"])
    assert k.work == gpuir.kernel("gemm", m=1024, n=512, k=2048, dtype="bf16").work
    turned = ARGS["matmul"] | {"stride_bk": 1, "stride_bn": 2048}
    k = tutorials.MATMUL.kernel(turned)
    assert k.work == gpuir.kernel("gemm", m=1024, n=512, k=2048, dtype="bf16", layout="nt").work
    k = tutorials.MATMUL.kernel(launch(64, 64, 64, "float32"))
    assert k.work == gpuir.kernel("gemm", m=64, n=64, k=64, dtype="f32", math=tf32).work
    k = tutorials.ATTENTION.kernel(ARGS["attention"])
    assert k.work.density < 1  # causal
    k = tutorials.ATTENTION.kernel(ARGS["attention"] | {"STAGE": 1})
    assert k.work.density == 1
    k = tutorials.LAYER_NORM.kernel(ARGS["layer norm"])
    assert k.work.extents == {"o": 1151, "r": 8192}


def test_a_softmax_takes_blocks_that_hold_a_row():
    kernel = tutorials.SOFTMAX.kernel(ARGS["softmax"])
    assert set(tutorials.SOFTMAX.space(kernel)["BLOCK_SIZE"]) == {1024}


def test_the_attention_of_descriptors_has_the_same_meaning():
    descriptor = type("TensorDescriptor", (), {"base": stand_in.tensor("float16", 4)})()
    args = {n: v for n, v in ARGS["attention"].items() if n != "Q"} | {"desc_q": descriptor}
    assert (
        tutorials.ATTENTION.kernel(args).work == tutorials.ATTENTION.kernel(ARGS["attention"]).work
    )


@pytest.mark.parametrize(
    ("written", "ours"),
    [
        ("torch.float16", "f16"),
        ("torch.bfloat16", "bf16"),
        ("*fp16", "f16"),
        ("fp8e4nv", "f8e4m3"),
        ("torch.float8_e5m2", "f8e5m2"),
        ("torch.int8", "i8"),
        ("float32", "f32"),
        ("u8", "u8"),
        (np.dtype("float64"), "f64"),
    ],
)
def test_dtypes_of_everybody(written: Any, ours: str):
    assert tutorials.dtype_named(written).name == ours


def test_no_dtype_of_anybody():
    with pytest.raises(UsageError, match="no dtype 'float17'"):
        tutorials.dtype_named("float17")


def test_a_given_dtype_stands_for_pointers_without(triton: Any):
    args = launch() | {"a_ptr": 1, "b_ptr": 2, "c_ptr": 3}
    got = pruned(triton, matmul_configs(triton), pruner("matmul", "a100", dtype="bf16"), args)
    assert len(got) == 8


# ---------------------------------------------------------------------------- configs


def test_configs_of_a_kernel(triton: Any):
    k = gpuir.kernel("gemm", m=4096, n=4096, k=4096, target="h100-sxm")
    configs = to_configs(k, 16)
    assert len(configs) == 16
    assert isinstance(configs[0], triton.Config)
    assert set(configs[0].kwargs) == {
        "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M"
    }  # fmt: skip
    again = prune(configs, launch(), "matmul", "h100-sxm", top=16)
    assert len(again.kept) == 16 and not again.dropped


def test_a_parameter_may_be_held():
    k = gpuir.kernel("gemm", m=4096, n=4096, k=4096, target="h100-sxm")
    assert {c.kwargs["GROUP_SIZE_M"] for c in to_configs(k, 8, GROUP_SIZE_M=4)} == {4}
    with pytest.raises(UsageError, match=r"no meta-parameter 'GROUP_M'(.|\n)*GROUP_SIZE_M"):
        to_configs(k, GROUP_M=4)


def test_a_kernel_without_a_mapping_is_told_what_to_do():
    k = gpuir.kernel("conv", batch=1, channels=64, size=(56, 56), filters=64, window=(3, 3))
    with pytest.raises(
        UsageError, match=r"no template for the kernel 'conv'(.|\n)*template=Template"
    ):
        to_configs(k, target="a100")


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    k = gpuir.kernel("gemm", m=64, n=64, k=64, target="a100")
    with pytest.raises(UsageError, match=r"pip install 'gpuir\[triton\]'"):
        to_configs(k)


@pytest.mark.parametrize("of", ["softmax", "norm"])
def test_rows_have_templates(of: str):
    k = gpuir.kernel("rows", rows=4096, columns=1000, of=of, target="a100")
    assert len(to_configs(k, 4)) == 4


def test_a_kernel_of_ones_own(triton: Any):
    blur = Template(
        "blur",
        lambda args: nest(
            "blur",
            {"y": args["height"], "x": args["width"], "i": 3, "j": 3},
            reads=[("y+i", "x+j"), ("i", "j")],
            writes=[("y", "x")],
            reduced=("i", "j"),
        ),
        lambda meta: gpuir.Tiles({"y": meta["Y"], "x": meta["X"]}, warps=meta["num_warps"]),
        {"Y": (8, 4, 16), "X": (64, 32), "num_warps": (4, 8)},
    )
    configs = [triton.Config({"Y": y, "X": x}, num_warps=4) for y in (4, 8, 16) for x in (32, 64)]
    kept = prune(configs, {"height": 512, "width": 512}, blur, "a100", top=3).kept
    assert len(kept) == 3
    with pytest.warns(UserWarning, match="KeyError"):
        early = pruner(blur, "a100")["early_config_prune"]
        assert early(configs, {"tall": 512}) == configs


# ---------------------------------------------------------------------------- the real one


@pytest.mark.skipif(not stand_in.HAS_TRITON, reason="needs gpuir[triton]")
def test_the_stand_in_has_what_triton_has(triton: Any):
    theirs = inspect.signature(triton.Config.__init__).parameters
    ours = inspect.signature(stand_in.Config.__init__).parameters
    assert set(ours) <= set(theirs)
    assert {n: p.default for n, p in ours.items()} == {n: theirs[n].default for n in ours}
    real, stood = (c({"X": 1}, num_warps=2) for c in (triton.Config, stand_in.Config))
    assert real.all_kwargs() == stood.all_kwargs()


def masked(text: str) -> str:
    """The text without its numbers, which change with the cost model."""
    return re.sub(r"[\d.,]+", "#", text)


def test_the_example_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(ROOT / "examples/tune_triton.py"), run_name="__main__")
    printed = capsys.readouterr().out
    page = (ROOT / "docs/guide/tuning-triton.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0]
    assert masked(printed) == masked(shown)
