"""Programs that gpuir has no answer to say so: what, where, and what to do."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from gpuir.frontends.emit import Emitter  # noqa: E402
from gpuir.frontends.node import ModelNode  # noqa: E402
from gpuir.frontends.torch.contraction import adaptive_mean  # noqa: E402
from gpuir.frontends.torch.load import load  # noqa: E402
from gpuir.frontends.torch.program import TorchProgram  # noqa: E402
from gpuir.frontends.torch.walk import item  # noqa: E402
from gpuir.ir.errors import GpuirError, ModelError  # noqa: E402
from gpuir.ir.graph import Value  # noqa: E402
from gpuir.ir.types import TensorType, f32  # noqa: E402
from gpuir.ops import tensor as t  # noqa: E402

X = (torch.ones(4, 6),)


@torch.library.custom_op("gpuir_tests::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0).clone()


@turned.register_fake
def turned_type(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Inner(nn.Module):
    def forward(self, x: Any) -> Any:
        return turned(x) + 1


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Inner()

    def forward(self, x: Any) -> Any:
        return self.first(x) * 2


class Picked(nn.Module):
    def forward(self, x: Any) -> Any:
        return x[x.sum(1) > 0].sum(0)


class Places(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.nonzero(x).sum(0)


class Branch(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + 1 if x.sum() > 0 else x - 1


class Scalar(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * x.sum().item()


@pytest.mark.filterwarnings("ignore")
def test_a_custom_operator_is_opaque_with_a_warning_that_says_where():
    model = load(TorchProgram(Custom(), X))
    assert [n.op.name for n in model.graph.nodes] == ["t.opaque", "t.map", "t.map"]
    (warning,) = model.warnings
    assert "turned" in warning and "first" in warning


@torch.library.custom_op("gpuir_tests::packed", mutates_args=())
def packed(x: torch.Tensor, tile: list[int], scale: float = 0.5, how: str = "nt") -> torch.Tensor:
    return x.clone()


@packed.register_fake
def _(x: Any, tile: Any, scale: Any = 0.5, how: Any = "nt") -> Any:
    return torch.empty_like(x)


class Packed(nn.Module):
    def forward(self, x: Any) -> Any:
        return packed(x, [128, 64, 32])


@pytest.mark.filterwarnings("ignore")
def test_a_custom_operator_keeps_its_plain_arguments():
    """Numbers, texts and lists of them, defaults too."""
    (node,) = load(TorchProgram(Packed(), X)).graph.nodes
    assert isinstance(node.op, t.Opaque)
    assert dict(node.op.attrs) == {"tile": (128, 64, 32), "scale": 0.5, "how": "nt"}


@pytest.mark.filterwarnings("ignore")
def test_a_custom_operator_is_refused_when_strict():
    with pytest.raises(ModelError, match=r"turned.*no converter") as error:
        load(TorchProgram(Custom(), X), strict=True)
    assert "first" in str(error.value) and "--strict" in str(error.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", [Picked(), Places()])
def test_a_size_that_depends_on_the_data_is_asked_for(module: nn.Module):
    with pytest.raises(ModelError, match="depends on the data") as error:
        load(TorchProgram(module, X))
    assert error.value.fix.startswith("--dims u0=")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", [Picked(), Places()])
def test_with_the_size_given_it_is_analysed_and_said(module: nn.Module):
    model = load(TorchProgram(module, X), dims={"u0": 3}, strict=True)
    assert any("assumed to be nonzero" in text for text in model.graph.assumed)


@pytest.mark.filterwarnings("ignore")
def test_a_branch_on_the_data_is_the_users_error():
    with pytest.raises(ModelError, match="export") as error:
        load(TorchProgram(Branch(), X), strict=True)
    assert "Traceback" not in str(error.value)


@pytest.mark.filterwarnings("ignore")
def test_a_number_taken_from_a_tensor_stays_one_on_the_device():
    model = load(TorchProgram(Scalar(), X), strict=True)
    assert [n.op.name for n in model.graph.nodes] == ["t.reduce", "t.map"]


@pytest.mark.parametrize("several", [(1, 2), 7])
def test_a_result_that_an_operator_has_not(several: Any):
    with pytest.raises(ModelError, match="no such result"):
        item(several, 2)


def test_a_pool_whose_result_has_other_axes():
    class Odd(ModelNode):
        """A node of a program whose sizes do not belong together."""

        op = "adaptive_avg_pool2d"
        args: ClassVar = {"output_size": [1, 1]}
        type = TensorType((2, 8, 1, 1), f32)

        def __getitem__(self, name: str) -> Value:
            return Value(name, TensorType((8,), f32))

    with pytest.raises(
        ModelError, match="the number of axes of the result is not that of output_size"
    ):
        adaptive_mean(cast(Any, Odd()), Emitter("g"))


class Sparse(nn.Module):
    """A product with a sparse matrix that the model makes."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.made = made

    def forward(self, *args: Any) -> Any:
        return self.made(*args[:-1]) @ args[-1]


class Held(nn.Module):
    def __init__(self, places: Any) -> None:
        super().__init__()
        self.register_buffer("places", places)

    def forward(self, values: Any, x: Any) -> Any:
        return torch.sparse_coo_tensor(self.places, values, (4, 4)) @ x


@pytest.mark.filterwarnings("ignore")
def test_what_torch_export_does_not_take_has_a_fix_that_works():
    coo, x = torch.eye(4).to_sparse(), torch.ones(4, 2)
    csr = coo.to_sparse_csr()
    parts = [p.clone() for p in (csr.crow_indices(), csr.col_indices(), csr.values())]
    places, values = coo.indices(), coo.values()
    cases: list[tuple[Any, Any, str, Any, Any]] = [
        (
            *(Sparse(lambda *p: torch.sparse_csr_tensor(*p, (4, 4))), (*parts, x)),
            "with torch.sparse_coo_tensor",
            *(Held(places), (values.clone(), x)),
        ),
        (
            *(Sparse(lambda *p: torch.sparse_csr_tensor(*p, (4, 4))), (*parts, x)),
            "take it as an input",
            *(Sparse(lambda s: s), (csr, x)),
        ),
        (Held(places), (values, x), "clone", Held(places), (values.clone(), x)),
        (nn.Linear(2, 3), (x.numpy(),), "give torch tensors", nn.Linear(2, 3), (x,)),
        (nn.Linear, (x,), "give a module, not its class", nn.Linear(2, 3), (x,)),
    ]
    for module, args, fix, mended, given in cases:
        with pytest.raises(GpuirError) as caught:
            load(module, args=args)
        assert fix in caught.value.fix
        assert load(mended, args=given).graph.outputs
