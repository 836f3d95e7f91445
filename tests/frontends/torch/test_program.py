"""What a function of the user's gives, and how an export fails: in words, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import gpuir  # noqa: E402
from gpuir.ir.errors import ModelError, UsageError  # noqa: E402

SOURCE = """
import sys, torch
from torch import nn

class Given(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f
        self.w = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        print("from the model")
        return self.f(self.w, x)

@torch.library.custom_op("gpuir_tests::unknown", mutates_args=())
def unknown(a: torch.Tensor) -> torch.Tensor:
    return a * 2

def given(f):
    return lambda: (Given(f), (torch.ones(2, 4),))

exits = lambda: sys.exit(3)
talks = given(lambda w, x: x @ w)
branches = given(lambda w, x: x @ w if x.sum() > 0 else x)
scaled = given(lambda w, x: x @ w * x.sum().item())
mixed = given(lambda w, x: x[None].bmm(w.double()[None]))
custom = given(lambda w, x: unknown(x @ w))
on_a_gpu = given(lambda w, x: x @ w.cuda())
elsewhere = given(lambda w, x: x + torch.ones(4, device="meta"))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "user.py"
    path.write_text(SOURCE, "utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("branches", "a branch or a shape that depends on data has to be taken out, or fixed"),
        ("mixed", "the model mixes dtypes: use the one it was written for (--dtype f32)"),
        ("custom", "give the operator a fake implementation: torch.library.register_fake"),
        ("on_a_gpu", 'the model need not be on a GPU: build it under torch.device("meta")'),
        (
            "elsewhere",
            'give module and arguments one device: build both under torch.device("meta")',
        ),
    ],
)
def test_why_it_cannot_be_exported(
    source: Path, name: str, fix: str, capfd: pytest.CaptureFixture[str]
):
    with pytest.raises(ModelError) as caught:
        gpuir.load(f"{source}:{name}")
    assert (caught.value.what, caught.value.fix) == ("torch.export cannot trace the model", fix)
    out, err = capfd.readouterr()
    assert not out
    assert "Traceback" not in err
    assert "def forward" not in err  # the program so far


def test_a_function_that_leaves(source: Path):
    with pytest.raises(ModelError) as caught:
        gpuir.load(f"{source}:exits")
    assert caught.value.found == "SystemExit: 3"


def test_what_a_model_prints_is_no_result(source: Path, capsys: pytest.CaptureFixture[str]):
    gpuir.load(f"{source}:talks")
    out, err = capsys.readouterr()
    assert not out
    assert "from the model" in err


def test_a_number_read_from_a_tensor_is_that_tensor(source: Path):
    graph = gpuir.load(f"{source}:scaled")
    assert [str(n.op) for n in graph.nodes if n.op.name == "t.opaque"] == []
    assert graph.nodes[-1].op.name == "t.map"


def test_a_config_that_is_not_there_is_no_module():
    with pytest.raises((ModelError, UsageError)) as caught:
        gpuir.load("hf:nosuch")
    assert caught.value.what == "cannot read the config"
