"""The optimiser's step against torch.optim, and how it is launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuir import interp
from gpuir.ir.build import Builder
from gpuir.ir.errors import UsageError
from gpuir.ir.graph import Graph, Level
from gpuir.ir.phases import phase_of
from gpuir.ir.types import TensorType, f64
from gpuir.ops import tensor as t
from gpuir.passes.optimizer import Optimizer, launches
from gpuir.simulate.memory import memory
from gpuir.stacks.table import pipeline

torch = pytest.importorskip("torch")

SHAPES = ((3, 4), (4,), (4, 2))


def model() -> Graph:
    """mean((tanh(x w + b) v)²)"""
    b = Builder(Level.graph, "mlp")
    b.locs = ("m:mlp",)
    x = b.input("x", TensorType((5, 3), f64))
    w, bias, v = (b.param(n, TensorType(s, f64)) for n, s in zip("wbv", SHAPES, strict=True))
    h = b(t.Map("tanh", (b(t.Map("add", (b(t.Matmul(x, w)), bias))),)))
    y = b(t.Matmul(h, v))
    return b.finish([b(t.Reduce("mean", b(t.Map("mul", (y, y))), (0, 1)), "loss")])


CASES: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    "sgd": ({"kind": "sgd"}, torch.optim.SGD, {}),
    "sgd, decayed": (
        {"kind": "sgd", "momentum": 0.9, "weight_decay": 0.1},
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 0.1},
    ),
    "sgd, nesterov": (
        {"kind": "sgd", "momentum": 0.9, "nesterov": True},
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
    ),
    "adam": ({"kind": "adam"}, torch.optim.Adam, {}),
    "adam, decayed": (
        {"kind": "adam", "weight_decay": 0.1, "beta1": 0.8},
        torch.optim.Adam,
        {"weight_decay": 0.1, "betas": (0.8, 0.999)},
    ),
    "adamw": ({"kind": "adamw", "beta2": 0.9}, torch.optim.AdamW, {"betas": (0.9, 0.9)}),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("name", CASES)
def test_three_steps_are_those_of_torch(name, scale, fused):
    options, kind, settings = CASES[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3))
    given = {n: rng.normal(size=s) for n, s in zip("wbv", SHAPES, strict=True)}
    tensors = {n: torch.tensor(a, requires_grad=True) for n, a in given.items()}
    theirs = kind(tensors.values(), lr=0.1, **settings)
    for step in (1, 2, 3):
        w, b, v = tensors.values()
        loss = ((torch.tanh(torch.tensor(x) @ w + b) @ v) ** 2).mean()
        theirs.zero_grad()
        loss.backward()
        theirs.step()

        ours = Optimizer(fused=fused, lr=0.1, step=step, loss_scale=scale, **options)
        g = ours.run(pipeline(f"autodiff{{loss_scale={scale}}}").run(model()))
        given = {p.name: given.get(p.name, np.zeros(p.type.shape)) for p in g.params}
        for graph in (g, pipeline("canonicalize,fuse,legalize").run(g)):
            made = interp.run(graph, {"x": x, **given})
            for n, value in tensors.items():
                np.testing.assert_allclose(made[f"{n}.new"], value.detach(), rtol=1e-9, atol=1e-12)
        given = {p: made[f"{p}.new"] for p in given}
    assert {g.role_of(v) for v in g.params} <= {"weight", "optimizer"}
    assert all(
        over is not None for v, over in zip(g.outputs, g.over, strict=True) if ".new" in v.name
    )


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("clip", [0.01, 0.5, 1e3])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gradients_are_clipped_as_by_torch(fused: bool, foreach: bool, clip: float, scale: float):
    """The largest is above the norm of these gradients, which then stay as they are."""
    if fused and not foreach:
        return
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 3))
    given = {n: rng.normal(size=s) for n, s in zip("wbv", SHAPES, strict=True)}
    tensors = {n: torch.tensor(a, requires_grad=True) for n, a in given.items()}
    w, b, v = tensors.values()
    (((torch.tanh(torch.tensor(x) @ w + b) @ v) ** 2).mean()).backward()
    norm = torch.nn.utils.clip_grad_norm_(list(tensors.values()), clip)
    assert (float(norm) > clip) == (clip < 1e3)
    torch.optim.SGD(tensors.values(), lr=0.1).step()

    ours = Optimizer("sgd", fused, foreach, lr=0.1, loss_scale=scale, clip=clip)
    g = ours.run(pipeline(f"autodiff{{loss_scale={scale}}}").run(model()))
    for graph in (g, pipeline("canonicalize,fuse,legalize").run(g)):
        made = interp.run(graph, {"x": x, **given})
        for n, value in tensors.items():
            np.testing.assert_allclose(made[f"{n}.new"], value.detach(), rtol=1e-9, atol=1e-12)


def test_clipped_gradients_are_written_over_gradients():
    """As clip_grad_norm_ does: a step holds no second copy of them."""
    b = Builder(Level.graph, "one")
    b.locs = ("m:one",)
    x, w = b.input("x", TensorType((8, 512), f64)), b.param("w", TensorType((512, 512), f64))
    y = b(t.Matmul(x, w))
    g = b.finish([b(t.Reduce("sum", b(t.Map("mul", (y, y))), (0, 1)), "loss")])
    for rest in ("", ",canonicalize,fuse,legalize"):
        plain, clipped = (
            memory(pipeline(f"autodiff,optimizer{{kind=adam,fused=true{more}}}{rest}").run(g))
            for more in ("", ",clip=1.0")
        )
        assert plain.peak_bytes > 5 * 512 * 512 * 8 * 0.79
        assert clipped.peak_bytes - plain.peak_bytes < 4096


def test_launches_are_cut_as_pytorch_cuts_them():
    b = Builder(Level.graph, "many")
    small = [b.param("w", TensorType((10,), f64)) for _ in range(100)]
    assert [len(small[part]) for part in launches(small, 4)] == [36, 36, 28]
    large = [b.param("w", TensorType((65_536 * 200,), f64)) for _ in range(3)]
    assert [len(large[part]) for part in launches(large, 1)] == [1, 1, 1]
    huge = [b.param("w", TensorType((65_536 * 400,), f64)), *small[:3]]
    assert [len(huge[part]) for part in launches(huge, 1)] == [1, 3]


def test_without_foreach_each_tensor_has_its_launches():
    together = pipeline("autodiff,optimizer{kind=sgd,lr=0.5}").run(model())
    apart = pipeline("autodiff,optimizer{kind=sgd,lr=0.5,foreach=false}").run(model())
    count = [sum(phase_of(n) == "optimizer" for n in g.nodes) for g in (together, apart)]
    assert count == [1, sum(v.name.endswith(".new") for v in apart.outputs)]
    rng = np.random.default_rng(0)
    given = {v.name: rng.normal(size=v.type.shape) for v in (*apart.inputs, *apart.params)}
    wanted, found = interp.run(together, given), interp.run(apart, given)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)
    with pytest.raises(UsageError, match="a fused step updates all tensors together,"):
        pipeline("optimizer{fused=true,foreach=false}")


def test_accumulated_gradients_are_what_is_applied():
    g = pipeline("autodiff,accumulate,optimizer{kind=sgd,lr=1.0}").run(model())
    rng = np.random.default_rng(0)
    given = {v.name: rng.normal(size=v.type.shape) for v in (*g.inputs, *g.params)}
    made = interp.run(g, given)
    np.testing.assert_allclose(made["w.new"], given["w"] - made["w.grad.new"])


def test_what_it_cannot_do_it_says():
    with pytest.raises(UsageError, match="no gradients"):
        pipeline("optimizer").run(model())
    with pytest.raises(UsageError, match="no optimizer has the name 'adamax'"):
        pipeline("optimizer{kind=adamax}")
    with pytest.raises(UsageError, match="clip is out of range"):
        pipeline("optimizer{clip=-1.0}")
    with pytest.raises(UsageError, match="option 'step' is out of range"):
        pipeline("optimizer{step=0}")


def test_a_step_that_is_made_already_is_refused():
    made = pipeline("autodiff,optimizer").run(model())
    with pytest.raises(UsageError, match="already has the step of an optimizer"):
        pipeline("optimizer").run(made)
