"""A model's kernels under one profile after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuir.cli.modules import Loaded
    from gpuir.ir.graph import Graph
    from gpuir.passes.manager import Pipeline, Watch

Read = Callable[["str | None"], "Graph"]


@dataclass
class Kernels:
    """The kernels that each profile makes of the model that `read` gives. It is read once, but for
    a training step, whose backward pass hangs on the profile: read anew for each.

    `passes` run before those of the profile, or in their place.
    """

    read: Read
    tf32: bool | None
    passes: Pipeline | None
    loaded: Loaded
    watch: Watch | None = None
    first: Graph | None = field(default=None, init=False)

    def under(self, profile: str | None) -> Graph:
        import gpuir
        from gpuir.targets.profile import under

        if self.first is None:
            g = self.first = self.read(profile)
        else:
            g = self.first if self.first.profile is None else self.read(profile)
        if self.passes is not None:
            g = self.passes.run(under(g, profile, self.tf32), watch=self.watch)
        own = self.loaded.passes
        return gpuir.lower(g, profile=profile, tf32=self.tf32, watch=self.watch, passes=own)
