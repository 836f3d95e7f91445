"""Shape, layout and indexing operators, and generators."""

from __future__ import annotations

from gpuir.frontends.onnx.emit import Converter

CONVERTERS: dict[str, Converter] = {}
