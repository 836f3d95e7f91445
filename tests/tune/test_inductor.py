"""Inductor's autotuning with gpuir in front of it, for an A100 that is not there."""

from __future__ import annotations

import contextvars
import re
import runpy
import threading
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import gpuir
from gpuir.ir.errors import UsageError
from gpuir.ir.notes import Cost
from gpuir.ir.types import tf32
from gpuir.tune import inductor
from gpuir.tune.inductor import disable, enable, enabled

torch: Any = pytest.importorskip("torch", reason="needs gpuir[torch]")
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore::DeprecationWarning:torch")

ROOT = Path(__file__).parents[2]


class MLP(torch.nn.Module):
    def __init__(self, width: int = 512):
        super().__init__()
        self.a = torch.nn.Linear(width, 4 * width)
        self.b = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return self.b(torch.nn.functional.gelu(self.a(x)))


class Residual(torch.nn.Module):
    """A block of a ResNet, with a step down."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(64)
        self.b = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False)
        self.c = torch.nn.Conv2d(64, 128, 1, stride=2)

    def forward(self, x):
        return self.c(torch.relu(x + self.b(torch.relu(self.norm(self.a(x))))))


class Flexible(torch.nn.Module):
    def forward(self, q, k, v):
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q, k, v)


class Softmax(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, -1).sum(-1)


def half(*shape: int) -> Any:
    return torch.zeros(*shape, dtype=torch.half)


@pytest.fixture(scope="module")
def tool() -> Any:
    """The program that counts what Inductor would compile."""
    from validation.agreement import inductor_choices

    return inductor_choices


# ---------------------------------------------------------------------------- real models


CASES: dict[str, tuple[Any, tuple[Any, ...], str, int]] = {
    # name: model, arguments, operation, how many of them
    "products": (MLP, (half(256, 512),), "addmm", 2),
    "convolutions": (Residual, (half(8, 64, 56, 56),), "convolution", 3),
    "attention": (Flexible, tuple(half(2, 8, 1024, 64) for _ in range(3)), "flex_attention", 1),
}


@pytest.mark.parametrize("name", CASES)
def test_fewer_configurations_are_compiled(tool: Any, name: str):
    build, args, op, count = CASES[name]
    before = tool.compiled(build().half(), args)
    with enabled("a100", top=4) as seen:
        after = tool.compiled(build().half(), args)
    again = tool.compiled(build().half(), args)
    assert again == before
    assert after.total() == 4 * count < before.total()
    assert seen.offered == {op: before.total()}
    assert seen.kept == {op: after.total()}
    assert not seen.untouched
    assert f"{op}: {after.total()} of {before.total()}" in str(seen)


def test_attention_without_tuning_is_among_what_is_compiled(tool: Any):
    from torch._inductor.choices import InductorChoices

    from validation.agreement.inductor import pretended_gpu

    with pretended_gpu():
        usual = InductorChoices().get_flex_attention_fwd_configs(64, torch.half)
    assert len(usual) == 1
    lists: list[list[Any]] = []
    real = inductor._kept

    def spy(*given: Any) -> Any:
        lists.append(real(*given))
        return lists[-1]

    with mock.patch.object(inductor, "_kept", spy), enabled("a100", top=2):
        tool.compiled(Flexible().half(), CASES["attention"][1])
    assert usual[0] in lists[0] and len(lists[0]) == 2


@pytest.mark.slow
def test_an_encoder_of_hugging_face(tool: Any):
    pytest.importorskip("transformers", reason="needs gpuir[hf]")
    from validation.agreement.inductor import MODELS

    module, args, kwargs = MODELS["bert-eager"]()
    before = tool.compiled(module.half(), args, kwargs)
    with enabled("a100", top=6) as seen:
        after = tool.compiled(module.half(), args, kwargs)
    assert after.total() < before.total() / 2
    assert set(seen.kept) == {"addmm", "bmm"}


@pytest.mark.slow
def test_numbers_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Compiled for this CPU, with what gpuir leaves alone there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU()).eval()
    x = torch.randn(8, 64)

    def run() -> Any:
        torch._dynamo.reset()
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.compile(model, mode="max-autotune")(x)

    plain = run()
    with enabled("a100"):
        assert torch.equal(run(), plain)
    assert torch.allclose(plain, model(x), atol=1e-5)


def test_what_is_left_keeps_its_order(tool: Any):
    lists: list[tuple[list[Any], list[Any]]] = []
    real = inductor._kept

    def spy(configs: Any, *rest: Any) -> Any:
        found = real(configs, *rest)
        lists.append((list(configs), found))
        return found

    with mock.patch.object(inductor, "_kept", spy), enabled("a100", top=4):
        tool.compiled(MLP().half(), (half(256, 512),))
    for offered, left in lists:
        assert len(left) == 4
        assert all(any(x is y for y in offered) for x in left)
        assert [x for x in offered if any(x is y for y in left)] == left  # in their order


# ---------------------------------------------------------------------------- where it cannot say


def test_what_nobody_has_seen_stays_as_it_is(tool: Any):
    from gpuir.cost import generated

    def unseen(*args: Any) -> Cost:
        return Cost(1e-6, "memory", "test@1", (), unseen=("dtype",))

    before = tool.compiled(MLP().half(), (half(256, 512),))
    with (
        mock.patch.object(generated, "cost_of", unseen),
        enabled("a100", top=4) as seen,
    ):
        assert tool.compiled(MLP().half(), (half(256, 512),)) == before
    assert sum(seen.untouched.values()) == 2
    assert "unchanged: addmm: UsageError: unseen dtype (2 times)" in str(seen)


def choice(template: str, **kwargs: Any) -> Any:
    params = SimpleNamespace(to_kwargs=lambda: kwargs)
    return SimpleNamespace(template=SimpleNamespace(name=template), params=params)


def seen_by(top: int = 2) -> Any:
    return inductor.SeenConfigurations(gpuir.load_target("a100"), top, False)


BLOCK = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}


def test_templates_that_it_does_not_know_stay():
    inputs = SimpleNamespace(device_type="cuda")
    choices = [choice("mm_persistent_tma", **BLOCK) for _ in range(5)] + [choice("aten_mm")]
    assert inductor.products(choices, inputs, "mm", seen_by()) == choices


def test_another_device_stays():
    inputs = SimpleNamespace(device_type="cpu")
    choices = [choice("mm", **BLOCK) for _ in range(5)]
    assert inductor.products(choices, inputs, "mm", seen_by()) == choices
    assert inductor.convolutions([1, 2, 3], "cpu", seen_by()) == [1, 2, 3]
    assert inductor.attentions([1, 2, 3], [], "cpu", seen_by()) == [1, 2, 3]


def test_where_nothing_can_run_nothing_is_dropped():
    inputs = SimpleNamespace(
        device_type="cuda",
        mnk_hinted=lambda: (512, 512, 512),
        batch_hinted=lambda: 1,
        shapes_hinted=lambda: ((512, 512), (512, 512)),
        strides_hinted=lambda: ((512, 1), (1, 512)),
        dtype=lambda i: "torch.float16",
        out_dtype=lambda: "torch.float16",
        _mat1_idx=-2,
        _mat2_idx=-1,
    )
    huge = [choice("mm", **BLOCK | {"BLOCK_M": 1024, "BLOCK_N": 1024}) for _ in range(4)]
    with pytest.warns(UserWarning, match="none can run on a100"):
        assert inductor.products(huge, inputs, "mm", seen_by()) == huge
    work = inductor._product(inputs).work
    assert work == gpuir.kernel("gemm", m=512, n=512, k=512, layout="nt").work
    inputs.dtype = inputs.out_dtype = lambda *i: "torch.float32"
    for in_tf32, math in ((True, {"math": tf32}), (False, {})):
        expected = gpuir.kernel("gemm", m=512, n=512, k=512, layout="nt", dtype="f32", **math)
        assert inductor._product(inputs, in_tf32).work == expected.work


def test_the_gradient_of_a_convolution_stays():
    """It asks for the same configurations, and is another kernel."""
    from torch._inductor.virtualized import V

    node = SimpleNamespace(target=torch.ops.aten.convolution_backward.default, args=())
    with (
        V.set_graph_handler(SimpleNamespace(current_node=node)),
        pytest.warns(UserWarning, match="no template for convolution_backward"),
    ):
        assert inductor.convolutions([1, 2, 3], "cuda", seen_by()) == [1, 2, 3]


# ---------------------------------------------------------------------------- reductions


def test_blocks_of_a_reduction_are_fixed_when_asked_for(tool: Any):
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    written: list[str] = []
    update = GraphLowering._update_scheduler

    def code(graph: Any) -> None:
        update(graph)
        graph.scheduler.codegen()
        written.append("".join(map(repr, graph.wrapper_code.lines)))

    def run(**given: Any) -> str:
        with enabled("a100", **given) as seen, torch.no_grad():
            program = torch.export.export(Softmax(), (torch.zeros(4096, 8192),), strict=False)
            tool.inductor_kernels(tool.functional(program))
        assert seen.kept["reduction"] == given.get("reductions", 0)
        return written[-1]

    with (
        config.patch(max_autotune=True),
        mock.patch.object(GraphLowering, "_update_scheduler", code),
        mock.patch("torch.utils._triton.triton_hash_with_backend", lambda: ""),
    ):
        assert "triton_heuristics.reduction(" in run()
        blocks = run(reductions=True).partition("triton_heuristics.fixed_config(")[2][:80]
        assert re.search(r"XBLOCK.*R0_BLOCK", blocks)


def features(**changed: Any) -> Any:
    from torch._inductor.runtime.hints import ReductionHint

    plain = {"numel": 4096, "reduction_numel": 8192, "hint": ReductionHint.INNER}
    given = SimpleNamespace(**plain | changed)
    given.is_reduction = lambda: True
    given.get_reduction_hint = lambda: given.hint
    return given


@pytest.mark.parametrize(
    ("groups", "given", "changed"),
    [
        ([{"x": 4096, "r0_": 8192}], {"mix_order_reduction": True}, {}),
        ([{"y": 64, "x": 64, "r0_": 8192}], {}, {}),
        ([{"x": 4096, "r0_": 8192}], {}, {"hint": "OUTER"}),
    ],
)
def test_other_reductions_are_left_to_inductor(groups: Any, given: Any, changed: Any):
    from torch._inductor import config

    with config.patch(max_autotune=True):
        assert inductor.fixed_rows(features(**changed), groups, given, seen_by()) == given
    plain = [{"x": 4096, "r0_": 8192}]
    assert inductor.fixed_rows(features(), plain, {}, seen_by()) == {}  # nothing is tuned


# ---------------------------------------------------------------------------- on and off


def state() -> tuple[Any, Any]:
    import torch._inductor.config as config
    from torch._inductor.virtualized import V

    return V.choices, config.inductor_choices_class


def test_off_restores_what_was_there():
    before = state()
    enable("a100")
    assert state() != before
    enable("h100-sxm", top=3)  # over the other
    assert "h100-sxm" in state()[0].uuid() and "a100" in state()[0].uuid()
    disable()
    assert "h100-sxm" not in state()[0].uuid()
    disable()
    assert state() == before
    disable()  # nothing to do
    assert state() == before


def test_an_error_inside_restores_too():
    before = state()
    with pytest.raises(ValueError, match="mine"), enabled("a100"):
        raise ValueError("mine")
    assert state() == before


def test_choices_of_ones_own_stay_in_force():
    import torch._inductor.config as config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.virtualized import V

    class Mine(InductorChoices):
        def __init__(self):
            self.note = "mine"

        def uuid(self) -> str:
            return "mine@1"

    mine = Mine()
    with V.set_choices_handler(mine), config.patch(inductor_choices_class=Mine):
        with enabled("a100"):
            assert isinstance(V.choices, Mine) and V.choices.note == "mine"
            assert V.choices.uuid().endswith("mine@1")
            made = config.inductor_choices_class()
            assert isinstance(made, Mine) and "gpuir" in made.uuid()
        assert V.choices is mine
        assert config.inductor_choices_class is Mine


def test_another_thread_with_this_ones_context_is_filtered_too():
    """PyTorch's settings are of a context: a thread has its own, unless it is given a copy."""
    from torch._inductor.virtualized import V

    found: list[str] = []
    with enabled("a100"):
        context = contextvars.copy_context()
        worker = threading.Thread(
            target=context.run, args=(lambda: found.append(type(V.choices).__name__),)
        )
        worker.start()
        worker.join()
    assert found == ["GpuirChoices"]


def test_the_key_of_the_cache_says_that_it_was_on():
    import torch._inductor.config as config

    plain = config.save_config_portable()
    with enabled("a100", top=4):
        four = config.save_config_portable()
    with enabled("a100", top=5):
        five = config.save_config_portable()
    assert Counter(map(str, (plain, four, five))).most_common(1)[0][1] == 1


def test_wrong_input_is_told_what_to_do():
    before = state()
    with pytest.raises(UsageError, match="top=8"):
        enable("a100", top=0)
    with pytest.raises(gpuir.GpuirError, match="a100"):
        enable("a1000")
    assert state() == before


# ---------------------------------------------------------------------------- the page


def test_the_example_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(ROOT / "examples/tune_inductor.py"), run_name="__main__")
    page = (ROOT / "docs/guide/tuning-inductor.md").read_text()
    shown = page.partition("```text\n")[2].partition("```")[0]
    assert capsys.readouterr().out == shown
