"""Attention and the operators of transformer optimisers."""

from __future__ import annotations

from gpuir.frontends.onnx.emit import Converter

CONVERTERS: dict[str, Converter] = {}
