"""torchao's tensor subclasses, in a module, an exported program or a saved one: the layers, bytes
and times of a config's `quantization_config`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch._inductor import config as inductor  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

import gpuir  # noqa: E402
from gpuir.frontends.torch.packed import CODES, QuantisedLinear, Scheme, WeightFormat  # noqa: E402
from gpuir.frontends.torch.subclasses import stored  # noqa: E402
from gpuir.ir.errors import UsageError  # noqa: E402
from gpuir.ir.graph import Graph  # noqa: E402
from gpuir.ops import kernel as k  # noqa: E402

OUT, INTO = 384, 256
F8 = torch.float8_e4m3fn
X = torch.zeros(2, 4, INTO, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def ao() -> Iterator[Any]:
    """torchao's `quantize_` sets up Inductor and the precision of products for all that follows."""
    precision, settings = torch.get_float32_matmul_precision(), inductor.save_config()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    inductor.load_config(settings)
    torch.set_float32_matmul_precision(precision)


def model(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(INTO, OUT, bias=bias), nn.ReLU()).to(torch.bfloat16).eval()


def expected(scheme: Scheme) -> nn.Module:
    """The module with the layer that a config makes."""
    made = model()
    made.set_submodule("0", QuantisedLinear(OUT, INTO, True, scheme, torch.bfloat16).eval())
    return made


def told(g: Graph, profile: str = "eager") -> tuple[int, list[tuple[Any, ...]]]:
    """Bytes of weights; of each launch its kernel, what it reads and how long it takes."""
    made = gpuir.analyze(g, "h100-sxm", profile=profile).graph
    kernels = [n for n in made.nodes if n.op.name != "k.view"]
    reads = [tuple(str(v.type) for v in n.op.operands) for n in kernels]
    times = [n.cost.time_s for n in kernels if n.cost]
    rows = list(zip((n.op.name for n in kernels), reads, times, strict=True))
    return sum(v.type.nbytes for v in g.params), rows


def int8(ao: Any) -> tuple[nn.Module, Scheme]:
    made = model()
    ao.quantize_(made, ao.Int8WeightOnlyConfig())
    return made, Scheme(WeightFormat(torch.int8, zero=torch.int8))


def int8_inputs(ao: Any) -> tuple[nn.Module, Scheme]:
    made = model()
    ao.quantize_(made, ao.Int8DynamicActivationInt8WeightConfig())
    return made, Scheme(WeightFormat(torch.int8, zero=torch.int8), torch.int8)


def float8(ao: Any) -> tuple[nn.Module, Scheme]:
    made = model()
    ao.quantize_(made, ao.Float8WeightOnlyConfig())
    return made, Scheme(WeightFormat(F8))


def float8_inputs(ao: Any) -> tuple[nn.Module, Scheme]:
    """As Float8DynamicActivationFloat8WeightConfig makes it, which asks for a GPU."""
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization.quantize_.workflows.float8 import float8_tensor as f

    made: Any = model()
    rows, how = ao.PerRow(), Float8MMConfig(use_fast_accum=True)
    inputs = f.QuantizeTensorToFloat8Kwargs(granularity=rows, mm_config=how)
    weight = made[0].weight.detach()
    made[0].weight = frozen(
        f.Float8Tensor.from_hp(weight, granularity=rows, mm_config=how, act_quant_kwargs=inputs)
    )
    return made, Scheme(WeightFormat(F8), F8)


def int4_tiled(ao: Any) -> tuple[nn.Module, Scheme]:
    """As Int4WeightOnlyConfig makes it for tinygemm's kernel, which asks for a GPU."""
    from torchao.quantization.quantize_.workflows.int4 import int4_tile_packed_to_4d_tensor as i

    made: Any = model()
    numbers = torch.zeros(OUT // 8, INTO // 128, 32, 4, dtype=torch.int32)
    scales = torch.zeros(INTO // 128, OUT, 2, dtype=torch.bfloat16)
    weight = i.Int4TilePackedTo4dTensor(numbers, scales, [1, 128], torch.Size([OUT, INTO]))
    made[0].weight = frozen(weight)
    return made, Scheme(WeightFormat(CODES[4], 1, 128, torch.bfloat16, torch.bfloat16))


def int4(ao: Any) -> tuple[nn.Module, Scheme]:
    """As Int4WeightOnlyConfig makes it by default, which needs mslk."""
    from torchao.quantization.quantize_.workflows.int4.int4_tensor import Int4Tensor

    made: Any = model()
    numbers = torch.zeros(OUT, INTO // 2, dtype=torch.int8)
    scales = torch.zeros(INTO // 128, OUT, dtype=torch.bfloat16)
    shape = torch.Size([OUT, INTO])
    made[0].weight = frozen(Int4Tensor(numbers, scales, scales.clone(), [1, 128], shape))
    return made, Scheme(WeightFormat(CODES[4], 1, 128, torch.bfloat16, torch.bfloat16))


def frozen(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


Made = Callable[[Any], tuple[nn.Module, Scheme]]
CASES: list[Made] = [int8, int8_inputs, float8, float8_inputs, int4_tiled]


@pytest.mark.parametrize("profile", ["eager", "compiled"])
@pytest.mark.parametrize("made", [*CASES, int4])
def test_a_module_has_the_kernels_of_the_config(made: Made, profile: str, ao: Any):
    quantised, scheme = made(ao)
    before = quantised.get_submodule("0")
    g = gpuir.load(quantised, args=(X,), strict=True)
    wanted = gpuir.load(expected(scheme), args=(X.to("meta"),))
    assert told(g, profile) == told(wanted, profile)
    assert any(text.startswith("torchao: linear layers of") for text in g.assumed)
    assert quantised.get_submodule("0") is before


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("made", CASES)
def test_a_program_has_the_kernels_of_the_config(made: Made, saved: bool, ao: Any, tmp_path: Path):
    """A live one holds subclasses, a saved one what they were unwrapped to."""
    quantised, scheme = made(ao)
    source: Any
    if saved:
        from torchao.utils import unwrap_tensor_subclass

        quantised = unwrap_tensor_subclass(quantised)
    program = source = torch.export.export(quantised, (X,))
    if saved:
        source = tmp_path / "m.pt2"
        torch.export.save(program, source)
    g = gpuir.load(source, strict=True)
    assert told(g) == told(gpuir.load(expected(scheme), args=(X.to("meta"),)))
    assert any(text.startswith("torchao: linear layers of") for text in g.assumed)


def test_what_no_layer_is_known_for_is_read_as_it_was_traced_and_said(ao: Any):
    """Fake quantisation, an embedding, a product with another module's weight."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(64, INTO)
            self.fake, self.known, self.other = (nn.Linear(INTO, INTO) for _ in range(3))

        def forward(self, i: torch.Tensor) -> torch.Tensor:
            y = self.known(self.fake(self.table(i)))
            return nn.functional.linear(y, self.other.weight)

    made = Model().to(torch.bfloat16).eval()
    fake = ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4)
    ao.quantize_(made, fake, filter_fn=lambda _, name: name == "fake")
    for kind in (nn.Embedding, nn.Linear):
        config = ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32))
        ao.quantize_(
            made,
            config,
            filter_fn=lambda m, name, kind=kind: isinstance(m, kind) and name != "fake",
        )
    i = torch.zeros(2, 4, dtype=torch.int64)
    for source, args in ((made, (i,)), (torch.export.export(made, (i,)), None)):
        g = gpuir.load(source, args=args, strict=True)
        (text,) = [text for text in g.assumed if "step by step" in text]
        assert {*text.rpartition(": ")[2].split(", ")} == {
            "table.weight",
            "fake.weight",
            "other.weight",
        }
        assert any("int8 in blocks of 32: 1" in text for text in g.assumed)
        table, known = 64 * INTO, INTO * INTO
        assert (
            sum(v.type.nbytes for v in g.params if v.type.dtype.name == "i8") >= table + 3 * known
        )


def test_quantised_weights_are_not_trained(ao: Any):
    made, _ = int8(ao)
    for source, args in ((made, (X,)), (torch.export.export(made, (X,)), None)):
        with pytest.raises(UsageError, match="cannot be trained"):
            gpuir.load(source, args=args, train=True)


# ---------------------------------------------------------------------------- without torchao


class Times(nn.Module):
    """A weight of numbers and scales, as an unwrapped program has it."""

    def forward(self, numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (numbers.to(torch.float32) * scale).to(torch.bfloat16)

    def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(OUT, INTO, dtype=F8), torch.ones(OUT, 1)


def test_an_unwrapped_weight_is_multiplied_as_it_is_stored(tmp_path: Path):
    made: Any = model()
    made[0].weight.requires_grad_(False)
    parametrize.register_parametrization(made[0], "weight", Times(), unsafe=True)
    torch.export.save(torch.export.export(made, (X,)), tmp_path / "m.pt2")
    g = gpuir.load(tmp_path / "m.pt2", strict=True)
    assert told(g) == told(gpuir.load(expected(Scheme(WeightFormat(F8))), args=(X.to("meta"),)))
    (op,) = [n.op for n in gpuir.analyze(g, "h100-sxm").graph.nodes if isinstance(n.op, k.Gemm)]
    assert [v.type.dtype.name for v in op.factors] == ["bf16", "f8e4m3"]


def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


BF16, F32, I8 = torch.bfloat16, torch.float32, torch.int8


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([empty(I8, 64, 256), empty(F32, 64, 1)], WeightFormat(I8)),
        ([empty(I8, 64, 256), empty(F32, 1, 1)], WeightFormat(I8, rows=0)),
        ([empty(I8, 64, 256), empty(F32, 64, 8)], WeightFormat(I8, columns=32)),
        ([empty(F8, 256, 256), empty(F32, 2, 2)], WeightFormat(F8, 128, 128)),
        ([empty(I8, 64, 128), empty(BF16, 8, 64)], WeightFormat(CODES[4], columns=32, scale=BF16)),
        ([empty(I8, 64, 256), empty(F32, 64, 1), empty(I8, 64, 1)], WeightFormat(I8, zero=I8)),
        ([empty(BF16, 64, 256), empty(F32, 64, 1)], None),
        ([empty(I8, 64, 256), empty(F32, 64, 1), empty(BF16, 256)], None),  # of inputs' columns
        ([empty(I8, 64, 32), empty(F32, 64, 1)], None),  # one bit
        ([empty(I8, 64, 256)], None),
    ],
)
def test_how_a_weight_is_stored_follows_from_its_tensors(parts: Any, wanted: WeightFormat | None):
    out = 256 if parts[0].dtype == F8 else 64
    found = stored(parts, out, 256)
    assert (found and found[0]) == wanted
