"""Every ONNX operator that has a converter: `Op` of ai.onnx, `domain::Op` of another domain."""

from __future__ import annotations

from gpuir.frontends.onnx import (
    attention,
    classic,
    contraction,
    contrib,
    control,
    layout,
    pointwise,
    quant,
    recurrent,
    reduction,
    sampling,
    sequence,
)
from gpuir.frontends.onnx.emit import Converter

CONVERTERS: dict[str, Converter] = {
    **pointwise.CONVERTERS,
    **layout.CONVERTERS,
    **reduction.CONVERTERS,
    **contraction.CONVERTERS,
    **sampling.CONVERTERS,
    **recurrent.CONVERTERS,
    **quant.CONVERTERS,
    **attention.CONVERTERS,
    **contrib.CONVERTERS,
    **control.CONVERTERS,
    **sequence.CONVERTERS,
    **classic.CONVERTERS,
}
