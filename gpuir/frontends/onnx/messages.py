"""ONNX's protobuf messages, without the rest of the package `onnx`.

The package imports its checker, shape inference and more: several times what a file's parsing
takes. Whoever needs an operator's schema imports it then.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


@cache
def messages() -> Any:
    """A module with ONNX's messages: `messages().ModelProto`.

    Protobuf keeps one class for each message, so `onnx.ModelProto` is the same class, whether
    `onnx` is imported before or after.
    """
    if "onnx" in sys.modules:
        return import_module("onnx")
    package = find_spec("onnx")
    origin = package.origin if package else None
    file = Path(origin).with_name("onnx_ml_pb2.py") if origin else None
    spec = spec_from_file_location("gpuir.frontends.onnx._onnx_ml_pb2", file) if file else None
    if file is None or not file.exists() or spec is None or spec.loader is None:
        return import_module("onnx")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
