"""Every ONNX operator that has a converter: `Op` of ai.onnx, `domain::Op` of another domain."""

from __future__ import annotations

from gpuir.frontends.onnx import (
    attention,
    classic,
    contraction,
    contrib,
    control,
    layout,
    linear,
    pointwise,
    quant,
    quant_ms,
    recurrent,
    recurrent_quant,
    reduction,
    sampling,
    sequence,
)
from gpuir.frontends.onnx.node import Converter

CONVERTERS: dict[str, Converter] = {
    **pointwise.CONVERTERS,
    **layout.CONVERTERS,
    **reduction.CONVERTERS,
    **contraction.CONVERTERS,
    **sampling.CONVERTERS,
    **recurrent.CONVERTERS,
    **quant.CONVERTERS,
    **quant_ms.CONVERTERS,
    **recurrent_quant.CONVERTERS,
    **attention.CONVERTERS,
    **contrib.CONVERTERS,
    **control.CONVERTERS,
    **sequence.CONVERTERS,
    **classic.CONVERTERS,
    **linear.CONVERTERS,
}
