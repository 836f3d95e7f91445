"""gpuir in a PyTorch session: the backend of torch.compile, and `analyze` of live modules."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import gpuir  # noqa: E402
import gpuir.torch  # noqa: E402
from gpuir.ir.errors import UsageError  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own


class Broken(torch.nn.Module):
    """Two graphs for torch.compile: it cannot trace the printing between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 128), torch.nn.Linear(128, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        torch._dynamo.graph_break()
        return self.second(y)


def test_every_graph_is_reported_and_runs_unchanged():
    torch._dynamo.reset()
    model, x = Broken().eval(), torch.randn(8, 64)
    found: list[gpuir.Answer] = []
    backend = gpuir.torch.backend("h100-sxm", found.append, profile="cudagraph")
    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(compiled(x), model(x))
    assert {s.profile for s in found} == {"cudagraph"}
    flops = [sum(k.flops for k in s.kernels) for s in found]
    assert flops == [2 * 8 * 64 * 128 + 2 * 8 * 128, 2 * 8 * 128 * 4 + 8 * 4]  # bias and relu


def test_what_cannot_be_analysed_is_said_and_runs(capsys: pytest.CaptureFixture[str]):
    torch._dynamo.reset()
    x = torch.tensor([0.0, 1.0, 2.0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(torch.nonzero, backend=gpuir.torch.backend("a100"))
        torch.testing.assert_close(compiled(x), torch.nonzero(x))
    assert "depends on the data" in capsys.readouterr().err


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_graph_for_any_size_is_reported_for_that_of_its_call(
    dynamic: bool | None, capsys: pytest.CaptureFixture[str]
):
    torch._dynamo.reset()
    found: list[gpuir.Answer] = []
    model = torch.nn.Linear(64, 4).eval()
    compiled = torch.compile(
        model, backend=gpuir.torch.backend("a100", found.append), dynamic=dynamic
    )
    for rows in (8, 5, 3):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(compiled(x), model(x))
    flops = [sum(k.flops for k in s.kernels) for s in found]
    seen = (8,) if dynamic else (8, 5)  # the second size makes it a graph for any
    assert flops == [2 * rows * 64 * 4 + rows * 4 for rows in seen]
    assert [any("compiled for any size" in text for text in s.assumed) for s in found] == [
        *([True] if dynamic else [False, True])
    ]
    assert capsys.readouterr().err == ""


def test_a_fault_of_gpuir_does_not_end_the_session(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fails(*_: object, **__: object) -> None:
        raise KeyError("of ours")

    torch._dynamo.reset()
    monkeypatch.setattr(gpuir.torch, "analyze", fails)
    x = torch.randn(2, 4)
    model = torch.nn.Linear(4, 4)
    torch.testing.assert_close(
        torch.compile(model, backend=gpuir.torch.backend("a100"))(x), model(x)
    )
    assert "KeyError: 'of ours': this is a bug in gpuir" in capsys.readouterr().err


def test_named_backend_needs_a_target():
    with pytest.raises(gpuir.GpuirError, match="no target"):
        gpuir.torch.named_backend(torch.fx.symbolic_trace(torch.nn.ReLU()), [])


def test_a_module_and_its_arguments():
    graph = gpuir.analyze(torch.nn.Linear(64, 32), (torch.randn(8, 64),), target="a100").graph
    assert graph.target == "a100"
    assert {v.name for v in graph.params} == {"weight", "bias"}


def test_arguments_need_no_tuple():
    class Adds(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    x = torch.randn(8, 64)
    one = gpuir.analyze(torch.nn.Linear(64, 32), x, target="a100").graph
    assert [v.type.shape for v in one.inputs] == [(8, 64)]
    assert gpuir.load(torch.nn.Linear(64, 32), args=x).inputs == one.inputs
    for given in ((Adds(), "a100", x, x), (Adds(), "a100", (x, x)), (Adds(), "a100", [x, x])):
        assert len(gpuir.analyze(*given).graph.inputs) == 2


@pytest.mark.parametrize("thing", [torch.relu, 3, None, {"a": 1}])
def test_what_is_no_model_is_the_users_error(thing: object):
    with pytest.raises(UsageError, match=r"not a model[\s\S]*exported program"):
        gpuir.load(thing)


def test_a_module_alone_says_what_is_missing():
    with pytest.raises(gpuir.GpuirError, match="args"):
        gpuir.load(torch.nn.Linear(4, 4))


def test_the_gradients_of_a_module_are_those_of_autograd():
    from gpuir.frontends.torch.load import load
    from gpuir.interp import run

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU())
    x = torch.randn(3, 4)
    made = load(model, args=(x,), joint=True, strict=True)
    weights = {v.name: made.weights[v.name] for v in made.graph.params}
    found = run(made.graph, {made.graph.inputs[0].name: x.numpy(), **weights})
    model(x).sum().backward()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(found[f"{name}.grad"], parameter.grad, rtol=1e-4, atol=1e-6)
