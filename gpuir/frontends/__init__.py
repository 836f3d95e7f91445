"""Model files to graphs: a loader for each suffix, imported when first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _onnx(*args: Any, **options: Any) -> Any:
    from gpuir.frontends.onnx.load import load

    return load(*args, **options)


FRONTENDS: dict[str, Callable[..., Any]] = {".onnx": _onnx}
