"""Every pass by name, neutral ones and a stack's; those of third parties are looked up when asked
for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpuir.ir.door import CALLED, PATH, TEXT, named, of_type, takes
from gpuir.passes.annotate import Annotate
from gpuir.passes.manager import Pass, Pipeline, make_pass
from gpuir.passes.tile import TilePass
from gpuir.plugins import LazyTable, find_named
from gpuir.text import parse_passes

if TYPE_CHECKING:
    from gpuir.cost.table import Predictor

PASSES: Mapping[str, type[Pass]] = LazyTable(
    {
        "convert": "gpuir.passes.convert:Convert",
        "extend": "gpuir.passes.convert:Extend",
        "keep": "gpuir.passes.convert:Keep",
        "pack": "gpuir.passes.convert:Pack",
        "quantise": "gpuir.passes.quantise:Quantise",
        "indices": "gpuir.passes.indices:Indices",
        "canonicalize": "gpuir.passes.canonicalize:Canonicalize",
        "recognize": "gpuir.passes.recognize:Recognize",
        "sink": "gpuir.passes.sink:Sink",
        "autocast": "gpuir.passes.autocast:Autocast",
        "autodiff": "gpuir.passes.autodiff:Autodiff",
        "accumulate": "gpuir.passes.accumulate:Accumulate",
        "optimizer": "gpuir.passes.optimizer:Optimizer",
        "shard": "gpuir.passes.shard.shard:ShardPass",
        "microbatch": "gpuir.passes.microbatch:Microbatch",
        "attention_apart": "gpuir.stacks.attention_apart:AttentionApart",
        "math_attention": "gpuir.stacks.pytorch.math_attention:MathAttention",
        "experts_apart": "gpuir.stacks.pytorch.experts_apart:ExpertsApart",
        "masks": "gpuir.stacks.pytorch.masks:Masks",
        "bmm": "gpuir.stacks.pytorch.bmm:Bmm",
        "channels_last": "gpuir.stacks.inductor.channels_last:ChannelsLast",
        "matvec": "gpuir.stacks.inductor.matvec:Matvec",
        "split_norms": "gpuir.stacks.inductor.split_norms:SplitNorms",
        "split_sums": "gpuir.stacks.inductor.split_sums:SplitSums",
        "basic": "gpuir.stacks.onnxruntime.basic:Basic",
        "qdq": "gpuir.stacks.tensorrt.qdq:Qdq",
        "nbits": "gpuir.stacks.onnxruntime.nbits:Nbits",
        "split": "gpuir.stacks.onnxruntime.split:Split",
        "conv_bias": "gpuir.stacks.pytorch.conv_bias:ConvBias",
        "batch_norm": "gpuir.stacks.pytorch.batch_norm:BatchNorm",
        "pool_indices": "gpuir.stacks.pytorch.pool_indices:PoolIndices",
        "conv_kernels": "gpuir.stacks.pytorch.conv_kernels:ConvKernels",
        "share_scales": "gpuir.stacks.serving.share_scales:ShareScales",
        "pack_products": "gpuir.stacks.serving.pack_products:PackProducts",
        "fuse": "gpuir.passes.fuse:Fuse",
        "fuse_loops": "gpuir.stacks.inductor.loops.fuse:FuseLoops",
        "cache_writes": "gpuir.stacks.serving.cache_writes:CacheWrites",
        "widen": "gpuir.passes.widen:Widen",
        "legalize": "gpuir.stacks.legalize:LegalizeForStack",
        "bucket": "gpuir.passes.bucket:Bucket",
        "engine_kernels": "gpuir.stacks.serving.kernels:EngineKernels",
        "tile": "gpuir.passes.tile:TilePass",
        "annotate": "gpuir.passes.annotate:Annotate",
    }
)


def find_pass(name: str, loaded: Mapping[str, type[Pass]] | None = None) -> type[Pass]:
    """The pass of that name: ours, a loaded module's, or an entry point's of `gpuir.passes`."""
    return find_named(name, PASSES, loaded, kind="pass", group="passes", fits=is_pass)


def is_pass(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, Pass)


@takes(
    text=TEXT,
    loaded=named(of_type(type, "a class of passes")),
    predictors=named(CALLED),
    targets=named(PATH),
)
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
    passes: list[Pass] = []
    for name, options in parse_passes(text):
        made = make_pass(find_pass(name, loaded), options)
        if isinstance(made, Annotate) and predictors and made.predictor in predictors:
            made = replace(made, predictor=predictors[str(made.predictor)])
        if isinstance(made, TilePass) and targets and made.target in targets:
            made = replace(made, target=str(targets[made.target]))
        passes.append(made)
    return Pipeline(tuple(passes))
