"""As much of Triton 3.9's autotuner as runs without a driver, where Triton is not installed.

Tests and the example run with the real one where it is there, and then compare the two.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

HAS_TRITON = find_spec("triton") is not None


class Config:
    """triton.Config: meta-parameters, and what the compiler is told."""

    def __init__(
        self,
        kwargs: dict[str, Any],
        num_warps: int = 4,
        num_stages: int = 3,
        num_ctas: int = 1,
        maxnreg: int | None = None,
        ir_override: str | None = None,
    ):
        self.kwargs = kwargs
        self.num_warps, self.num_stages, self.num_ctas = num_warps, num_stages, num_ctas
        self.maxnreg, self.ir_override = maxnreg, ir_override

    def all_kwargs(self) -> dict[str, Any]:
        names = ("num_warps", "num_ctas", "num_stages", "maxnreg", "ir_override")
        set_ones = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        return {**self.kwargs, **set_ones}


class Autotuner:
    """triton.runtime.Autotuner, up to the first thing that is measured."""

    def __init__(self, configs: list[Any], prune_configs_by: dict[str, Any]):
        self.configs, self.by = configs, prune_configs_by
        self.nargs: dict[str, Any] = {}

    def prune_configs(self, kwargs: dict[str, Any]) -> list[Any]:
        found = self.by["early_config_prune"](self.configs, self.nargs, **kwargs)
        assert found, "early_config_prune should return at least one config"
        assert self.by["top_k"] == 1.0  # or perf_model would cut
        return found


def autotune(configs: list[Any], key: list[str], prune_configs_by: dict[str, Any]) -> Any:
    return lambda fn: Autotuner(configs, prune_configs_by)


def triton() -> Any:
    """The real module, or the stand-in."""
    if HAS_TRITON:
        import triton as real

        return real
    made = ModuleType("triton")
    language = ModuleType("triton.language")
    language.__dict__.update(constexpr=object)
    made.__dict__.update(
        Config=Config, autotune=autotune, jit=lambda fn: fn, language=language, __version__="3.9.0"
    )
    return made


def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`import triton` gives one or the other."""
    module = triton()
    if not HAS_TRITON:
        monkeypatch.setitem(sys.modules, "triton", module)
        monkeypatch.setitem(sys.modules, "triton.language", module.language)
    return module


def tensor(dtype: str, *shape: int) -> Any:
    """What a launch is given for a pointer: all that is read of it is its dtype and shape."""
    return SimpleNamespace(dtype=f"torch.{dtype}", shape=shape)
