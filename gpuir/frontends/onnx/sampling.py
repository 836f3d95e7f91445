"""Resampling, region pooling, signal transforms and detection post-processing."""

from __future__ import annotations

from gpuir.frontends.onnx.emit import Converter

CONVERTERS: dict[str, Converter] = {}
