"""Every pass by name; those of third parties are looked up when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpuir.cost.table import Predictor
from gpuir.passes.accumulate import Accumulate
from gpuir.passes.annotate import Annotate
from gpuir.passes.autocast import Autocast
from gpuir.passes.autodiff import Autodiff
from gpuir.passes.batch_norm import BatchNorm
from gpuir.passes.bmm import Bmm
from gpuir.passes.canonicalize import Canonicalize
from gpuir.passes.channels_last import ChannelsLast
from gpuir.passes.convert import Convert, Extend, Pack
from gpuir.passes.fuse import Fuse
from gpuir.passes.legalize import Legalize
from gpuir.passes.loops.fuse import FuseLoops
from gpuir.passes.manager import Pass, Pipeline, make_pass
from gpuir.passes.masks import Masks
from gpuir.passes.math_attention import MathAttention
from gpuir.passes.optimizer import Optimizer
from gpuir.passes.recognize import Recognize
from gpuir.passes.sink import Sink
from gpuir.passes.split import Split
from gpuir.passes.split_norms import SplitNorms
from gpuir.passes.split_sums import SplitSums
from gpuir.passes.tile import TilePass
from gpuir.passes.widen import Widen
from gpuir.plugins import find_named

PASSES: dict[str, type[Pass]] = {
    p.name: p
    for p in (
        *(Convert, Extend, Pack),
        *(Canonicalize, Recognize, Sink, Autocast, Autodiff, Accumulate, Optimizer),
        *(MathAttention, Masks, Bmm, ChannelsLast, SplitNorms, SplitSums, Split, BatchNorm),
        *(Fuse, FuseLoops, Widen),
        *(Legalize, TilePass, Annotate),
    )
}


def find_pass(name: str, loaded: Mapping[str, type[Pass]] | None = None) -> type[Pass]:
    """The pass of that name: ours, a loaded module's, or an entry point's of `gpuir.passes`."""
    return find_named(name, PASSES, loaded, kind="pass", group="passes", fits=is_pass)


def is_pass(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, Pass)


def pipeline(
    text: str,
    loaded: Mapping[str, type[Pass]] | None = None,
    predictors: Mapping[str, Predictor] | None = None,
    targets: Mapping[str, str | Path] | None = None,
) -> Pipeline:
    """The pipeline that text like `canonicalize,fuse{max_ops=8},legalize` states.

    `loaded` passes, `predictors` and `targets` (paths of spec files) are those of the user's own
    modules, by name.
    """
    from gpuir.text import parse_passes

    passes: list[Pass] = []
    for name, options in parse_passes(text):
        made = make_pass(find_pass(name, loaded), options)
        if isinstance(made, Annotate) and predictors and made.predictor in predictors:
            made = replace(made, predictor=predictors[str(made.predictor)])
        if isinstance(made, TilePass) and targets and made.target in targets:
            made = replace(made, target=str(targets[made.target]))
        passes.append(made)
    return Pipeline(tuple(passes))
