"""Functions that build a program, and what is said of those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import gpuir  # noqa: E402
from gpuir.frontends.torch.program import is_built  # noqa: E402
from gpuir.ir.errors import GpuirError, ModelError, UsageError  # noqa: E402

CODE = """
import torch
from torch import nn

def build(batch: int = 1):
    with torch.device("meta"):
        return nn.Linear(8, 4), (torch.empty(batch, 8),)

def named(batch=2):
    pair = {"input1": torch.ones(batch, 3), "input2": torch.ones(batch, 3)}
    return nn.Bilinear(3, 3, 5), (), pair

def one():
    return nn.ReLU(), torch.ones(7)

def module_alone():
    return nn.ReLU()

def fails():
    return nn.Linear(8, 4), undefined

class Branch(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x

def branch():
    return Branch(), (torch.ones(3),)

class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 4))

    def forward(self, x):
        return self.inner(x.reshape(3, 5))

def wrong():
    return Wrong(), (torch.ones(3, 5),)

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "models_of_mine.py").write_text(CODE)
    return tmp_path / "models_of_mine.py"


def test_a_file_or_a_module(file: Path, monkeypatch: pytest.MonkeyPatch):
    assert str(gpuir.load(f"{file}:build").outputs[0].type) == "f32[1, 4]"
    monkeypatch.chdir(file.parent)
    g = gpuir.load("models_of_mine:build", dims={"batch": 6})
    assert (g.name, str(g.outputs[0].type)) == ("models_of_mine.build", "f32[6, 4]")


def test_what_it_may_give(file: Path):
    assert [v.name for v in gpuir.load(f"{file}:named").inputs] == ["input1", "input2"]
    assert str(gpuir.load(f"{file}:one").inputs[0].type) == "f32[7]"


@pytest.mark.parametrize(
    ("name", "dims", "kind", "text"),
    [
        ("bild", {}, UsageError, "did you mean build"),
        ("number", {}, UsageError, "no function 'number'"),
        ("build", {"bach": 3}, UsageError, "did you mean batch"),
        ("module_alone", {}, ModelError, "(module, args)"),
        ("fails", {}, ModelError, "NameError: name 'undefined'"),
        ("branch", {}, ModelError, "torch.export cannot trace the model"),
    ],
)
def test_what_cannot_be(
    name: str, dims: dict[str, int], kind: type[GpuirError], text: str, file: Path
):
    with pytest.raises(kind) as caught:
        gpuir.load(f"{file}:{name}", dims=dims)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("fails", "return nn.Linear(8, 4), undefined"),
        ("branch", "return x + 1 if x.sum() > 0 else x"),
        ("wrong", "return self.inner(x.reshape(3, 5))"),
    ],
)
def test_an_error_in_the_users_code_has_its_line(name: str, line: str, file: Path):
    number = next(i for i, text in enumerate(CODE.split("\n"), 1) if line in text)
    with pytest.raises(ModelError) as caught:
        gpuir.load(f"{file}:{name}")
    assert f"at {file}:{number}: {line}" in caught.value.found


@pytest.mark.parametrize("text", ["import torch\nraise KeyError(3)", "x = 1\ndef (:"])
def test_an_error_in_the_users_module_has_its_line(text: str, tmp_path: Path):
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(UsageError, match="cannot be loaded") as caught:
        gpuir.load(f"{tmp_path}/broken.py:build")
    assert f"at {tmp_path}/broken.py:2: " in caught.value.found


def test_modules_that_are_not_there(tmp_path: Path):
    with pytest.raises(UsageError, match="cannot be loaded"):
        gpuir.load("no.such.module:build")
    with pytest.raises(ModelError, match="no such file"):
        gpuir.load(f"{tmp_path}/none.py:build")


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("my.module:build", True),
        ("folder/file.py:build", True),
        ("hf:config.json", False),
        ("hf:llama", False),
        ("model.onnx", False),
        ("folder/model.pt2", False),
    ],
)
def test_which_text_names_a_function(path: str, found: bool):
    assert is_built(path) == found


@pytest.fixture
def classes():
    """What torch knows of caches is as it was before, afterwards."""
    from torch.utils import _pytree as pytree

    before = set(pytree.SUPPORTED_NODES)
    yield
    for added in set(pytree.SUPPORTED_NODES) - before:
        if added.__name__.endswith("Cache"):
            pytree._deregister_pytree_node(added)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.usefixtures("classes")
def test_a_language_model_gives_its_cache_beside_the_logits(wrapped: bool):
    """As Hugging Face models do when they are called with tokens alone."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor):
            return self.model(x)

    module = Logits().eval() if wrapped else model
    g = gpuir.load(module, args=(torch.zeros(3, 7, dtype=torch.long),))
    assert [v.type.shape for v in g.outputs] == [(3, 7, 50), *[(3, 2, 7, 8)] * 4]
