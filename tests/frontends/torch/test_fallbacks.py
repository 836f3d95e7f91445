"""What stands in for a kernel that is not installed is named in what is assumed."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

import gpuir

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SAID = "transformers' plain PyTorch is what is timed"
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}


def assumed(folder: Path, kind: str, **sizes: object) -> list[str]:
    config = transformers.AutoConfig.for_model(kind, **SMALL, **sizes)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    source = f"hf:{folder / 'config.json'}"
    g = gpuir.load(source, dims={"seq": 4}, task="causal-lm")
    return [text for text in g.assumed if SAID in text]


def test_a_kernel_that_the_file_holds_none_for(tmp_path: Path):
    (said,) = assumed(tmp_path, "rwkv", attention_hidden_size=32, context_length=8)
    assert said.startswith("rwkv_linear_attention (in place of rwkv_cuda_kernel): ")


def test_functions_that_a_package_would_give(tmp_path: Path):
    (said,) = assumed(tmp_path, "mamba", state_size=4)
    assert "mamba_selective_scan (in place of selective_scan_fn of mamba_ssm)" in said
    assert "causal_conv1d_fn (in place of causal_conv1d_fn of causal_conv1d)" in said


@pytest.mark.slow
def test_a_delta_rule(tmp_path: Path):
    sizes = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "num_experts": 2}
    sizes |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "moe_intermediate_size": 16}
    more = {"layer_types": ["linear_attention"], "shared_expert_intermediate_size": 16}
    (said,) = assumed(tmp_path, "qwen3_next", **sizes, **more, num_experts_per_tok=1)
    assert "torch_chunk_gated_delta_rule (in place of chunk_gated_delta_rule of fla)" in said
    assert "recurrent" not in said  # of a step of generation, which does not run here


def test_a_model_of_plain_kernels_has_nothing_said(tmp_path: Path):
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    assert assumed(tmp_path, "llama", **heads) == []


def made_up(code: str) -> type[torch.nn.Module]:
    """A module of a file that looks like one of transformers' models."""
    name = "transformers.models.made_up.modeling_made_up"
    file = ModuleType(name)
    sys.modules[name] = file
    exec(compile(code, "modeling_made_up.py", "exec"), vars(file))
    return file.Model


FUNCTION = """
import torch
fast_scan = None
other = None
def scan(x):
    return x.cumsum(-1) if fast_scan is None else fast_scan(x)
def unused(x):
    return other(x)
class Model(torch.nn.Module):
    def forward(self, x):
        return scan(x)
"""
METHOD = """
import torch
fused_norm, fast = None, 1
class Model(torch.nn.Module):
    def slow(self, x):
        return x - x.mean(-1, keepdim=True) if fused_norm is None else fused_norm(x)
    def never(self, x):
        return fast
    def forward(self, x):
        return self.slow(x)
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (FUNCTION, "scan (in place of fast_scan)"),
        (METHOD, "Model.slow (in place of fused_norm)"),
        (FUNCTION.replace("fast_scan = None", "fast_scan = torch.relu"), ""),
        (METHOD.replace("None, 1", "torch.relu, 1"), ""),
    ],
)
def test_by_what_the_code_reads(code: str, said: str):
    model = made_up(code)()
    try:
        g = gpuir.load(model, args=(torch.ones(4, 4),))
        assert [x for x in g.assumed if SAID in x] == (
            [f"{said}: {SAID}, kernel by kernel"] if said else []
        )
        scan = getattr(sys.modules[type(model).__module__], "scan", None)
        assert scan is None or not hasattr(scan, "__wrapped__")  # as it was before
    finally:
        del sys.modules[type(model).__module__]


CLASSES = """
import torch
from made_up_flags import is_fastlib_available
if is_fastlib_available():
    from fastlib import Block
else:
    class Block(torch.nn.Module):
        def forward(self, x):
            return x.cumsum(-1)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
    def forward(self, x):
        return self.block(x)
"""


def test_a_class_that_is_defined_for_want_of_a_package(tmp_path: Path, monkeypatch):
    flags = ModuleType("made_up_flags")
    flags.is_fastlib_available = lambda: False
    monkeypatch.setitem(sys.modules, "made_up_flags", flags)
    name = "transformers.models.made_up.modeling_made_up"
    (tmp_path / "modeling_made_up.py").write_text(CLASSES)
    spec = spec_from_file_location(name, tmp_path / "modeling_made_up.py")
    file = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, file)
    spec.loader.exec_module(file)
    g = gpuir.load(file.Model(), args=(torch.ones(4, 4),))
    (said,) = (x for x in g.assumed if SAID in x)
    assert said.startswith("Block (in place of Block of fastlib): ")
