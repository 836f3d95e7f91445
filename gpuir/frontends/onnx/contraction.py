"""Matrix products, convolutions and pools."""

from __future__ import annotations

from gpuir.frontends.onnx.emit import Converter

CONVERTERS: dict[str, Converter] = {}
