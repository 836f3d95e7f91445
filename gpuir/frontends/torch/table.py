"""Every ATen operator that has a converter: by name, or by name and overload."""

from __future__ import annotations

from gpuir.frontends.torch import (
    attention,
    complex,
    contraction,
    embedding,
    experts,
    gradients,
    inplace,
    layout,
    linalg,
    packed,
    pointwise,
    random,
    recurrent,
    reduction,
    sampling,
)
from gpuir.frontends.torch.node import Converter

CONVERTERS: dict[str, Converter] = {
    **pointwise.CONVERTERS,
    **complex.CONVERTERS,
    **layout.CONVERTERS,
    **reduction.CONVERTERS,
    **contraction.CONVERTERS,
    **linalg.CONVERTERS,
    **gradients.CONVERTERS,
    **experts.CONVERTERS,
    **recurrent.CONVERTERS,
    **embedding.CONVERTERS,
    **attention.CONVERTERS,
    **inplace.CONVERTERS,
    **packed.CONVERTERS,
    **random.CONVERTERS,
    **sampling.CONVERTERS,
}
