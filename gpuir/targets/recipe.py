"""Recipes of training as data: what a framework keeps and computes in, and what it runs under."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

from gpuir.ir.door import PATH, takes
from gpuir.ir.errors import nearest
from gpuir.targets.profile import load_profile
from gpuir.targets.spec import (
    Raw,
    SpecKind,
    check_name,
    check_notes,
    paths_to_text,
    record,
    refuse,
)
from gpuir.targets.target import FrozenTable, Quantity, Sourced

DTYPES = ("f32", "f16", "bf16")
_NO_TEXT: FrozenTable[str] = FrozenTable()


@dataclass(frozen=True, repr=False)
class Recipe(Sourced):
    """How a framework trains a model: the fields are options of `gpuir.load` under their names, and
    the `profile` that the step runs under. What is empty or false is left as it is."""

    name: str
    title: str
    profile: str = ""
    dtype: str = ""
    weights: str = ""
    autocast: str = ""
    optimizer: str = ""
    fused: bool = False
    clip: Annotated[float, Quantity("", 0, 1e6, "of the norm of all gradients")] | None = None
    accumulate: bool = False
    base: str = ""
    notes: str = ""
    sources: FrozenTable[str] = _NO_TEXT

    def __hash__(self) -> int:
        return hash(self.name)


@takes(name=PATH)
def load_recipe(name: str | Path) -> Recipe:
    """The recipe of a built-in name or of a `.toml` path. TargetError when nothing has that name or
    the file is wrong."""
    return cast(Recipe, _KIND.load(str(name)))


def recipe_names() -> tuple[str, ...]:
    """Names of the built-in recipes, sorted."""
    return tuple(_KIND.shipped)


def _recipe_of(raw: Raw, where: str) -> Recipe:
    sources = paths_to_text(raw, "sources", where)
    recipe = cast(Recipe, record(Recipe, {**raw, "sources": FrozenTable(sources)}, "", where))
    check_name(recipe.name, "recipe", where)
    check_notes(recipe, {"sources": sources}, where)
    if recipe.profile:
        load_profile(recipe.profile)
    for field in ("dtype", "weights", "autocast"):
        value: str = getattr(recipe, field)
        if value and value not in DTYPES:
            refuse(f"the value of {field} is unknown", where, field, found=value,
                   fix=nearest(value, DTYPES))  # fmt: skip
    return recipe


_KIND = SpecKind("recipe", "megatron-bf16", ("recipes",), _recipe_of)
