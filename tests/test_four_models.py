"""`examples/four_models.py`: that its models are the published ones, run, and are modelled."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from math import prod
from pathlib import Path

import numpy as np
import pytest

import gpuir
from gpuir.ops import kernel as k

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs gpuir[hf]"),
]

EXAMPLE = Path(__file__).parent.parent / "examples/four_models.py"
DIMS = {
    "resnet50": {"batch": 1},
    "bert": {"batch": 1, "seq": 128},
    "efficientdet": {"batch": 1},
    "fastpitch": {"batch": 1, "seq": 128},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of the four files, and what the example printed."""
    folder = tmp_path_factory.mktemp("four_models")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout


def summary(folder: Path, name: str) -> gpuir.Answer:
    g = gpuir.load(folder / f"{name}.onnx", dims=DIMS[name], profile="tensorrt")
    return gpuir.analyze(g, target="a30:1g.6gb", profile="tensorrt")


def multiply_adds(s: gpuir.Answer) -> int:
    """Those of convolutions and matrix products alone, as papers count; attention's two products
    and all that is pointwise are not in it."""
    ops = [kernel.node.op for kernel in s.running]
    return sum(prod(op.space().dims.values()) for op in ops if isinstance(op, (k.Conv, k.Gemm)))


@pytest.mark.parametrize("name", DIMS)
def test_all_of_it_is_modelled(written: tuple[Path, str], name: str):
    s = summary(written[0], name)
    assert {share.status: share.nodes for share in s.coverage if share.nodes}.keys() == {"modelled"}
    assert s.latency_s > 0
    assert not s.warnings


@pytest.mark.parametrize("name", DIMS)
def test_onnxruntime_runs_it(written: tuple[Path, str], name: str):
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(written[0] / f"{name}.onnx", providers=["CPUExecutionProvider"])
    shapes = {i.name: [DIMS[name].get(d, d) for d in i.shape] for i in session.get_inputs()}
    dtypes = {"tensor(float16)": np.float16, "tensor(int64)": np.int64}
    inputs = {i.name: np.ones(shapes[i.name], dtypes[i.type]) for i in session.get_inputs()}
    for output in session.run(None, inputs):
        assert output.dtype == np.float16
        assert output.shape[0] == 1
        assert np.isfinite(output).all()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet50", "25,557,032"),  # torchvision, ResNet50_Weights
        ("efficientdet", "3,880,067"),  # rwightman/efficientdet-pytorch, README, of the official D0
    ],
)
def test_parameters_are_the_published_ones(written: tuple[Path, str], name: str, parameters: str):
    assert f" {parameters} parameters" in next(
        line for line in written[1].splitlines() if f"{name}.onnx" in line
    )


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("resnet50", 4.1e9),  # torchvision, ResNet50_Weights: 4.09; the stride in the 3x3
        ("efficientdet", 2.5e9),  # Tan, Pang, Le, CVPR 2020, table 2
    ],
)
def test_multiply_adds_are_the_published_ones(
    written: tuple[Path, str], name: str, published: float
):
    """Within 2 %: both have two digits, so that 2.5 is 2.45 to 2.55."""
    assert multiply_adds(summary(written[0], name)) == pytest.approx(published, rel=0.02)


def test_multiply_adds_of_bert_by_hand(written: tuple[Path, str]):
    layer = 4 * 768 * 768 + 2 * 768 * 3072
    assert multiply_adds(summary(written[0], "bert")) == 128 * (12 * layer + 2 * 768)


def test_multiply_adds_of_fastpitch_by_hand(written: tuple[Path, str]):
    """128 letters make 768 frames; convolutions reach over 3."""
    block = 384 * 3 * 64 + 64 * 384 + 2 * 3 * 384 * 1536
    predictor = 3 * 384 * 256 + 3 * 256 * 256 + 256
    letters = 128 * (6 * block + 2 * predictor + 3 * 384)
    frames = 768 * (6 * block + 384 * 80)
    assert multiply_adds(summary(written[0], "fastpitch")) == letters + frames
