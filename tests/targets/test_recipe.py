"""Recipes of training, and the habits of releases: what both change, and that every command has
them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import gpuir
from gpuir.cli.main import main
from gpuir.ir.errors import GpuirError, UsageError
from gpuir.ops import tensor as t
from gpuir.run.spaces import latencies
from gpuir.targets.recipe import load_recipe, recipe_names

MLP = """graph @mlp of pytorch {
  in %x: f32[64, 512, 1024]
  param %w: f32[1024, 4096]
  param %v: f32[4096, 1024]
  %y: f32[64, 512, 4096] = t.matmul(%x, %w) at "m:a"
  %z: f32[64, 512, 4096] = t.map("gelu", [%y]) at "m:b"
  %s: f32[64, 512, 1024] = t.matmul(%z, %v) at "m:c"
  out %s
}
"""
STEP: dict[str, Any] = {"train": True, "autodiff": "gpuir"}


def model(folder: Path) -> str:
    (path := folder / "mlp.gir").write_text(MLP)
    return str(path)


def test_every_recipe_is_read_and_has_a_stack_and_an_optimizer():
    for name in recipe_names():
        recipe = load_recipe(name)
        assert recipe.name == name and recipe.optimizer == "adamw"
        gpuir.load_profile(recipe.profile)
    with pytest.raises(GpuirError, match="no recipe is called 'megatron-bf8'"):
        load_recipe("megatron-bf8")


def test_options_count_in_place_of_the_recipes(tmp_path: Path):
    (own := tmp_path / "own.toml").write_text(
        'base = "eager-f32"\nname = "own"\ntitle = "ours"\noptimizer = "sgd"\nweights = "bf16"\n'
    )
    path = model(tmp_path)
    given = gpuir.load(path, **STEP, recipe=str(own), optimizer="adam", profile="compiled")
    plain = gpuir.load(path, **STEP, optimizer="adam", fused=True, clip=1.0, weights="bf16",
                       profile="compiled")  # fmt: skip
    assert gpuir.show(given) == gpuir.show(plain)
    with pytest.raises(UsageError, match="a recipe is for a training step"):
        gpuir.load(path, recipe="eager-f32")
    assert gpuir.load(path, **STEP, recipe="megatron-fp8").profile == "compiled+products=fp8"
    hosted = gpuir.load(path, **STEP, recipe="megatron-fp8", profile="+host=dgx-1").profile
    assert hosted == "compiled+products=fp8+host=dgx-1"


def test_kept_weights_are_cast_where_they_are_read(tmp_path: Path):
    """Each weight by a kernel of its own, and so is its gradient, as wide as the weight."""
    g = gpuir.load(model(tmp_path), **STEP, recipe="llm-foundry-bf16")
    weights = {v.name: str(v.type.dtype) for v in g.params if g.role_of(v) == "weight"}
    assert weights == {"w": "f32", "v": "f32"} and str(g.inputs[0].type.dtype) == "bf16"
    casts = [n for n in g.nodes if isinstance(n.op, t.Cast) and ".cast" in n.locs[0]]
    assert [n.locs[0] for n in casts] == [
        *("m:a.cast", "m:c.cast", "m:c.cast/backward", "m:a.cast/backward"),
    ]
    assert {str(v.type.dtype) for v in g.outputs if g.role_of(v) == "gradient"} == {"f32"}


def test_habits_are_those_of_every_command(tmp_path: Path):
    """One time by `analyze`, by `sweep`, in a design space and over ranks of one."""
    path, name = model(tmp_path), "llm-foundry+products=fp8"
    g = gpuir.load(path, **STEP)
    habits, plain = (gpuir.analyze(g, "h100-sxm", profile=x).latency_s for x in (name, "eager"))
    assert habits != pytest.approx(plain, rel=0.01)
    ((answer,),) = latencies([g], ["h100-sxm"], name)
    assert answer.latency_s == pytest.approx(habits, rel=1e-12)
    step = gpuir.simulate_ranks(g, "1xh100-sxm", gpuir.Parallel(), profile=name).step
    assert step.time_s == pytest.approx(habits, rel=1e-12)
    args = ["analyze", path, "--target", "h100-sxm", "--train", "--autodiff", "gpuir"]
    args += ["--profile", "llm-foundry", "--products", "fp8", "--format", "json"]
    found = CliRunner().invoke(main, args)
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["reports"][0]["latency_s"] == pytest.approx(habits, rel=1e-12)


def test_narrow_products_are_quicker_and_signed(tmp_path: Path):
    g = gpuir.load(model(tmp_path), **STEP, recipe="megatron-bf16")
    wide, narrow = (
        gpuir.analyze(g, "h100-sxm", profile=x) for x in ("compiled", "compiled+products=mxfp8")
    )
    assert narrow.latency_s < 0.95 * wide.latency_s
    assert {n.cost.by for n in narrow.graph.nodes if n.cost and n.op.contraction} == {"habits@1"}
    with pytest.raises(UsageError, match="no products run in 'fp9'"):
        gpuir.load_profile("eager+products=fp9")
