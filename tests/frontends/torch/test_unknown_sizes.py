"""Sizes that only the data know are asked for all at once, and what is asked for can be typed."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gpuir
from gpuir.cli.main import main

torch = pytest.importorskip("torch")

PROGRAMS = """
import torch
from torch import nn
from torch.export import Dim, export


class Experts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.router = nn.Linear(16, count)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(count))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, ways = torch.where(chosen == i)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, ways, None])
        return out


class Bounded(nn.Module):
    def forward(self, x, n):
        count = n.item()
        torch._check(count >= 4)
        torch._check(count <= 32)
        return x.narrow(0, 0, count) @ x.T + x[x > 0].sum()


class Distinct(nn.Module):
    def forward(self, x):
        found = torch.unique(x > 0)
        return found, torch.masked_select(x, x < 0).exp()


class Kept(nn.Module):
    def forward(self, x):
        return x[(x.sum(-1) > 0).nonzero()[:, 0]].exp()


X = torch.ones(64, 16)


def experts(): return Experts(4), (X,)
def many_experts(): return Experts(9), (X,)
def bounded(): return Bounded(), (X, torch.tensor(8))
def distinct(): return Distinct(), (X,)
def of_any_keyword(**sizes): return Kept(), (torch.ones(sizes.get("rows", 8), 16),)
def exported(): return export(Experts(4), (X,))
def of_any_batch(): return export(Kept(), (X,), dynamic_shapes={"x": {0: Dim("batch", max=99)}})
"""
FUNCTIONS = {  # the sizes asked for
    "experts": "u0 u1 u2 u3",
    "many_experts": "u*",
    "bounded": "u0 u1",
    "distinct": "u0 u1",
    "of_any_keyword": "u0",
    "exported": "u0 u1 u2 u3",
    "of_any_batch": "batch u0",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "unknown_sizes.py"
    path.write_text(PROGRAMS)
    return path


def asked(call: Callable[[], Any]) -> str:
    with pytest.raises(gpuir.GpuirError, match=r"depend|missing") as error:
        call()
    return error.value.fix.partition("   (for example)")[0]


def given(fix: str) -> dict[str, int]:
    option, pairs = shlex.split(fix)
    assert option == "--dims"
    return {name: int(n) for name, n in (pair.split("=") for pair in pairs.split(","))}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_all_sizes_are_asked_at_once_and_the_fix_works(programs: Path, function: str):
    source = f"{programs}:{function}"
    fix = asked(lambda: gpuir.load(source))
    assert list(given(fix)) == FUNCTIONS[function].split()
    done = CliRunner().invoke(main, ["analyze", source, "--target", "a100", *shlex.split(fix)])
    assert done.exit_code == 0, done.output


@pytest.mark.filterwarnings("ignore")
def test_a_saved_program_and_a_module_are_asked_for_the_same(programs: Path, tmp_path: Path):
    made: dict[str, Any] = {}
    exec(PROGRAMS, made)
    module, args = made["experts"]()
    torch.export.save(torch.export.export(module, args), tmp_path / "m.pt2")
    sizes = given(asked(lambda: gpuir.load(f"{programs}:experts")))
    assert given(asked(lambda: gpuir.load(module, args=args))) == sizes
    assert given(asked(lambda: gpuir.load(str(tmp_path / "m.pt2")))) == sizes
    flops = [
        sum(n.op.flops() for n in graph.nodes)
        for graph in (
            gpuir.load(module, args=args, dims=sizes),
            gpuir.load(str(tmp_path / "m.pt2"), dims=sizes),
            gpuir.load(module, args=args, dims={"u*": sizes["u0"]}),
        )
    ]
    assert len(set(flops)) == 1
    few = gpuir.load(module, args=args, dims=sizes | {"u2": 0})
    assert sum(n.op.flops() for n in few.nodes) < flops[0]


@pytest.mark.filterwarnings("ignore")
def test_what_is_given_is_kept_and_what_is_unknown_is_named(programs: Path):
    source = f"{programs}:experts"
    fix = asked(lambda: gpuir.load(source, dims={"u1": 5}))
    assert given(fix)["u1"] == 5 and len(given(fix)) == 4
    with pytest.raises(gpuir.GpuirError, match=r"u0, u1, u2, u3, none of which is u7"):
        gpuir.load(source, dims={"u7": 5})
    with pytest.raises(gpuir.GpuirError, match="no symbolic size has the name u7"):
        gpuir.load(source, dims=dict.fromkeys(("u0", "u1", "u2", "u3", "u7"), 5))
    with pytest.raises(gpuir.GpuirError, match="the function has no parameter 'rows'"):
        gpuir.load(source, dims={"rows": 5})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("size", "nearest"), [(33, 32), (3, 4)])
def test_a_size_beyond_what_the_program_checks_is_refused(programs: Path, size: int, nearest: int):
    source = f"{programs}:bounded"
    with pytest.raises(gpuir.GpuirError, match=f"u0={size} is outside the bounds") as error:
        gpuir.load(source, dims={"u0": size, "u1": 9})
    assert given(error.value.fix) == {"u0": nearest, "u1": 9}
    assert gpuir.load(source, dims=given(error.value.fix)).nodes
