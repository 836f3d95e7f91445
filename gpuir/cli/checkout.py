"""What a checkout of the repository has beside the package: `validation/`, with the readers of
others' tables and the evaluation of whole models."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuir.fit.tables import Readers

ROOT = Path(__file__).resolve().parents[2]


@cache
def exists() -> bool:
    """Whether a package `validation` lies beside this one: no other of that name is imported."""
    spec = find_spec("validation")
    origin = spec.origin if spec else None
    return origin is not None and Path(origin).resolve().parents[1] == ROOT


def module(name: str) -> Any:
    return import_module(f"validation.{name}")


def readers() -> Readers:
    """The readers of tables: our own, and those of a checkout."""
    from gpuir.fit.tables import READERS

    return module("readers").READERS if exists() else READERS
