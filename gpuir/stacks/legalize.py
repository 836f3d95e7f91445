"""The pass that makes kernels, with what the stack that a graph is lowered for reads in place."""

from __future__ import annotations

from dataclasses import dataclass

from gpuir.ir.graph import Graph
from gpuir.passes import legalize
from gpuir.passes.views import Views
from gpuir.stacks.onnxruntime.views import OnnxRuntimeViews
from gpuir.stacks.pytorch.views import AnyStrides
from gpuir.targets.profile import has_views


@dataclass(frozen=True)
class LegalizeForStack(legalize.Legalize):
    __doc__ = legalize.Legalize.__doc__

    def views(self, g: Graph) -> Views:
        """Those of PyTorch under a profile with `views`, of onnxruntime without `strides`."""
        if not self.strides:
            return OnnxRuntimeViews(self.absorb)
        return AnyStrides(self.absorb) if has_views(g) else Views(self.absorb)
