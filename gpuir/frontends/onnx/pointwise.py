"""Elementwise operators, casts, activations, comparisons, logic and random numbers."""

from __future__ import annotations

from gpuir.frontends.onnx.emit import Converter

CONVERTERS: dict[str, Converter] = {}
