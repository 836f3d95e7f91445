"""Every pass by name; those of third parties are looked up when asked for."""

from __future__ import annotations

from collections.abc import Mapping

from gpuir.ir.errors import UsageError, nearest
from gpuir.passes.annotate import Annotate
from gpuir.passes.canonicalize import Canonicalize
from gpuir.passes.fuse import Fuse
from gpuir.passes.legalize import Legalize
from gpuir.passes.manager import Pass, Pipeline, make_pass
from gpuir.passes.recognize import Recognize
from gpuir.passes.tile import TilePass

PASSES: dict[str, type[Pass]] = {
    p.name: p for p in (Canonicalize, Recognize, Fuse, Legalize, TilePass, Annotate)
}


def find_pass(name: str, loaded: Mapping[str, type[Pass]] | None = None) -> type[Pass]:
    """The pass of that name: ours, then of a module the user loaded, then an entry point's.

    Entry points are of the group `gpuir.passes`, their name the pass's.
    """
    loaded = loaded or {}
    if found := PASSES.get(name) or loaded.get(name):
        return found
    from importlib.metadata import entry_points  # slow to import, seldom needed

    installed = {e.name: e for e in entry_points(group="gpuir.passes")}
    if name in installed:
        return installed[name].load()
    raise UsageError(f"no pass {name!r}", expected=nearest(name, [*PASSES, *loaded, *installed]))


def pipeline(text: str, loaded: Mapping[str, type[Pass]] | None = None) -> Pipeline:
    """The pipeline that text like `canonicalize,fuse{max_ops=8},legalize` states."""
    from gpuir.text import parse_passes

    return Pipeline(
        tuple(make_pass(find_pass(name, loaded), options) for name, options in parse_passes(text))
    )
