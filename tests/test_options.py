"""Every option of the public functions changes something: each has a case here, two calls that
differ in it alone, and whose results differ. What is public is read off the package, so that an
option without a case fails."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from decoders import LLAMA
from onnx import TensorProto, helper
from torch import nn
from tune import stand_in

import gpuir
from gpuir.ops import tensor as t
from gpuir.passes.canonicalize import Canonicalize
from gpuir.run.ranks import SharedByPlans
from gpuir.tune import tutorials
from gpuir.tune.choices import choices, choices_of
from gpuir.tune.kernel_tuner import allows, best, parameters
from gpuir.tune.kernels import KINDS, costed, nest, parameters_of
from gpuir.tune.optuna import enqueue, sampler, suggest
from gpuir.tune.published import TEMPLATES
from gpuir.tune.triton import prune, pruner, to_configs

ROOT = Path(__file__).parents[1]
TUNE = "gpuir.tune"
Case = tuple[Callable[[], Any], Callable[[], Any]]
CASES: dict[tuple[str, str], Case] = {}


# ---------------------------------------------------------------------------- what is public


def documented() -> Iterator[tuple[str, Any]]:
    """The functions of `gpuir.tune` that the documentation names."""
    text = "\n".join(p.read_text() for p in (ROOT / "docs").rglob("*.md"))
    shown = set(re.findall(r"`(?:\w+ = )?(\w+)\(", text))
    for path in sorted((ROOT / "gpuir/tune").glob("*.py")):
        module = import_module(f"{TUNE}.{path.stem}" if path.stem != "__init__" else TUNE)
        imports = re.findall(rf"from gpuir\.tune\.{path.stem} import ([\w, ]+)", text)
        imported = {n.strip() for names in imports for n in names.split(",")}
        for name, thing in vars(module).items():
            own = inspect.isfunction(thing) and thing.__module__ == module.__name__
            named = name in imported or name in shown
            if own and named and not name.startswith("_") and not hasattr(gpuir, name):
                yield f"{path.stem}.{name}", thing


@cache
def public() -> dict[str, Any]:
    """Every public function, and the records that users make, by name."""
    return dict(_public())


def _public() -> Iterator[tuple[str, Any]]:
    for name in gpuir.__all__:
        thing = getattr(gpuir, name)
        if inspect.isfunction(thing):
            yield name, thing
    yield "Observed.observe", gpuir.Observed.observe
    yield "Observed.predict", gpuir.Observed.predict
    yield "Pipeline.run", gpuir.Pipeline.run
    yield "kernels.costed", costed
    yield from documented()


def options() -> Iterator[tuple[str, str]]:
    for name, function in public().items():
        for p in inspect.signature(function).parameters.values():
            if p.name == "self":
                continue
            if p.kind != inspect.Parameter.VAR_KEYWORD:
                yield name, p.name
            elif name == "load":
                yield from ((name, option) for option in gpuir.LoadOptions.__annotations__)
            elif name == "kernel":
                for kind, made in KINDS.items():
                    needed, more = parameters_of(made)
                    yield from ((f"kernel {kind}", option) for option in needed + more)
            elif name == "analyze":  # as those of `load`, which it calls
                yield name, "dims"
            else:
                yield name, f"**{p.name}"
    for record in (gpuir.Tile, gpuir.Tiles, gpuir.Parallel, gpuir.Schedule):
        yield from ((record.__name__, f.name) for f in fields(record))


# ---------------------------------------------------------------------------- cases


def case(name: str, option: str, one: Callable[[], Any], other: Callable[[], Any]) -> None:
    CASES[name, option] = one, other


def differ(name: str, usual: dict[str, Any], /, **given: Any) -> None:
    """Cases of a function: for each option the call as usual, and with the option."""
    function = public()[name]
    for option, value in given.items():
        case(name, option, partial(function, **usual), partial(function, **usual | {option: value}))


TEXT = """graph @mlp {
  in %x: f32[8, 64]
  param %w: f32[64, 128]
  %y: f32[8, 128] = t.matmul(%x, %w) at "m:a"
  %z: f32[8, 128] = t.map("relu", [%y]) at "m:b"
  out %z
}
"""
OTHER = TEXT.replace("128", "256").replace("@mlp", "@other")
DEPTHWISE = """graph @depthwise {
  in %x: f32[1, 4, 6, 6]
  param %w: f32[4, 1, 3, 3]
  %y: f32[1, 4, 4, 4] = t.conv(%x, %w, [1, 1], [0, 0], [0, 0], [1, 1], groups=4) at "m:c"
  out %y
}
"""
WRONG = TEXT.replace("t.matmul", "t.nothing")


@cache
def graph(text: str = TEXT) -> gpuir.Graph:
    return gpuir.load_text(text)


@cache
def analyzed(text: str = TEXT, target: str = "a100") -> gpuir.Graph:
    return gpuir.analyze(graph(text), target).graph


def slow(op: Any, tile: Any, target: Any) -> gpuir.Cost:
    return gpuir.Cost(1.0, "latency", "slow@1", (("latency", 1.0),))


class Said(Canonicalize):
    """Canonicalize, which says that it ran."""

    def run(self, g: gpuir.Graph) -> gpuir.Graph:
        return replace(g, assumed=(*g.assumed, "said"))


SCHEDULE = "schedule @mlp for a100 { %y: tile(m=16, n=64, k=32; stages=2, warps=4) }"

differ("load_text", {"text": TEXT}, text=OTHER)
differ("load_text", {"text": WRONG}, source="mine.gir")
differ("parse", {"text": TEXT}, text=OTHER)
differ("parse", {"text": WRONG}, source="mine.gir")
differ("parse_schedule", {"text": SCHEDULE}, text="schedule @mlp for a100 { }")
differ("parse_schedule", {"text": "schedule"}, source="mine.sched")
differ("show", {"thing": graph()}, thing=graph(OTHER))
differ("extract", {"g": analyzed()}, g=analyzed(OTHER))
differ("strip", {"g": analyzed()}, g=analyzed(OTHER))
KERNELS, TILES = gpuir.strip(analyzed()), gpuir.extract(analyzed())
differ(
    "apply",
    {"g": KERNELS, "schedule": TILES},
    g=gpuir.strip(analyzed(TEXT.replace("f32", "f16"))),
    schedule=replace(TILES, target="h100-sxm"),
    choose=lambda path, node, tile: gpuir.Tile((("m", 8),)),
)
differ(
    "lower",
    {"graph": graph()},
    graph=graph(OTHER),
    profile="eager",
    tf32=False,
)


def by_own_stack(**passes: Any) -> gpuir.Graph:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "mine.toml"
        text = (ROOT / "specs/profiles/ideal.toml").read_text()
        path.write_text(re.sub(r'passes = "[^"]*"', 'passes = "said,fuse,legalize"', text))
        return gpuir.lower(graph(), profile=path, passes=passes)


case("lower", "passes", by_own_stack, partial(by_own_stack, said=Said))
case(
    "lower", "target",
    partial(gpuir.lower, graph(DEPTHWISE), profile="eager", target="a100"),
    partial(gpuir.lower, graph(DEPTHWISE), profile="eager", target="mi300x"),
)  # fmt: skip
differ(
    "analyze",
    {"model": graph(), "target": "a100"},
    model=graph(OTHER),
    target="h100-sxm",
    predictor=slow,
    schedule=gpuir.parse_schedule(SCHEDULE),
    profile="eager",
    tf32=False,
)
case(
    "analyze",
    "given",
    lambda: gpuir.analyze(graph(), "a100"),
    lambda: gpuir.analyze(graph(), "t4"),
)
differ("explain", {"graph": analyzed(), "name": "y"}, graph=analyzed(OTHER))
differ("explain", {"graph": analyzed(), "name": "y"}, name="z")
differ("analyze", {"model": analyzed()}, batch=4)
case(
    "analyze",
    "warnings",
    lambda: gpuir.analyze(analyzed()).warnings,
    lambda: gpuir.analyze(analyzed(), warnings=["mind the gap"]).warnings,
)
differ("timeline", {"graph": analyzed(), "profile": gpuir.load_profile("ort")},
       graph=analyzed(OTHER), profile=gpuir.load_profile("eager"))  # fmt: skip
differ(
    "memory",
    {"graph": gpuir.analyze(graph(), "a100", profile="eager").graph},
    graph=gpuir.analyze(graph(OTHER), "a100", profile="eager").graph,
    target=gpuir.load_target("a100"),
    block=1,
    spent={"x"},
)
differ("load_cluster", {"name": "dgx-a100"}, name="dgx-h100")
differ("load_host", {"name": "dgx-1"}, name="reference")
differ("load_profile", {"name": "eager"}, name="ort", target=gpuir.load_target("v100-sxm-16gb"))
differ("load_target", {"name": "a100"}, name="t4", overrides={"sms": 120})
differ("pipeline", {"text": "canonicalize"}, text="recognize")
differ("pipeline", {"text": "said"}, loaded={"said": Said})
differ("pipeline", {"text": "annotate{predictor=slow}"}, predictors={"slow": slow})
differ("pipeline", {"text": "tile{target=mine}"}, targets={"mine": ROOT / "specs/gpus/t4.toml"})
PIPELINE = gpuir.pipeline("canonicalize,fuse")


def watched(**given: Any) -> list[str]:
    seen: list[str] = []
    PIPELINE.run(graph(), watch=lambda p, g: seen.append(p.name), **given)
    return seen


case("Pipeline.run", "g", partial(PIPELINE.run, graph()), partial(PIPELINE.run, graph(OTHER)))
case("Pipeline.run", "watch", list, watched)


class Broken(Canonicalize):
    """A pass that loses what the graph gives."""

    def run(self, g: gpuir.Graph) -> gpuir.Graph:
        return replace(g, nodes=g.nodes[:1])


case(
    "Pipeline.run", "verify_each",
    partial(gpuir.Pipeline((Broken(),)).run, graph()),
    partial(gpuir.Pipeline((Broken(),)).run, graph(), verify_each=False),
)  # fmt: skip


# ---------------------------------------------------------------------------- ranks


@cache
def training() -> gpuir.Graph:
    return gpuir.load(
        ROOT / "tests/encoder.onnx", dims={"batch": 8, "seq": 16}, train=True, optimizer="adamw"
    )


def taken(cluster: str = "dgx-a100", of: gpuir.Graph | None = None, **more: Any) -> Any:
    degrees = {f.name: more.pop(f.name) for f in fields(gpuir.Parallel) if f.name in more}
    plan = gpuir.Parallel(**{"dp": 2} | degrees)
    found = gpuir.simulate_ranks(of or training(), cluster, plan, **more).step
    return found.time_s, found.fullest.held_bytes, found.parallel.ranks


@cache
def longer() -> gpuir.Graph:
    return gpuir.load(
        ROOT / "tests/encoder.onnx", dims={"batch": 8, "seq": 128}, train=True, optimizer="adamw"
    )


def ranks(option: str, one: dict[str, Any], other: dict[str, Any], of: str = "Parallel") -> None:
    case(of, option, partial(taken, **one), partial(taken, **one | other))


case("simulate_ranks", "graph", taken, lambda: taken(of=longer()))
ranks("cluster", {}, {"cluster": "dgx-h100"}, "simulate_ranks")
ranks("parallel", {}, {"dp": 4}, "simulate_ranks")
ranks("profile", {}, {"profile": "eager"}, "simulate_ranks")
ranks("predictor", {}, {"predictor": "roofline"}, "simulate_ranks")
ranks("tf32", {"tf32": False}, {"tf32": True}, "simulate_ranks")
ranks("slow", {}, {"slow": {1: 3.0}}, "simulate_ranks")


def kept(gives: bool) -> int:
    common = SharedByPlans()
    taken(common=common if gives else None)
    return len(common.graphs)


case("simulate_ranks", "common", partial(kept, False), partial(kept, True))
for degree in ("dp", "tp", "pp", "cp"):
    ranks(degree, {"dp": 1}, {degree: 2})
ranks("zero", {}, {"zero": 3})
ranks("sequence", {"tp": 2}, {"sequence": True})
case(
    "Parallel", "overlap",  # of a model that does not wait for the host
    lambda: taken(of=longer(), tp=2, sequence=True),
    lambda: taken(of=longer(), tp=2, sequence=True, overlap=True),
)  # fmt: skip
ranks("microbatches", {"pp": 2}, {"microbatches": 4})
case(
    "Parallel", "schedule",  # of a model whose activations are the most that a rank holds
    lambda: taken(of=longer(), pp=2, microbatches=4),
    lambda: taken(of=longer(), pp=2, microbatches=4, schedule="gpipe"),
)  # fmt: skip
ranks("chunks", {"pp": 2, "microbatches": 4, "schedule": "interleaved", "chunks": 2}, {"chunks": 3})
ranks("exchange", {"dp": 1, "cp": 2}, {"exchange": "ring"})


@cache
def experts() -> gpuir.Graph:
    return gpuir.load_text(
        """graph @moe {
  in %x: f16[64, 64]
  in %r: f16[64, 8]
  param %u: f16[8, 32, 64]
  param %d: f16[8, 64, 32]
  %v: f16[64, 2], %i: i64[64, 2] = t.topk(%r, 2, 1) at "m:a"
  %y: f16[64, 64] = t.experts(%x, %i, %v, %u, %d) at "m:b"
  out %y
}
"""
    )


case("Parallel", "ep", lambda: taken(of=experts(), dp=1), lambda: taken(of=experts(), dp=1, ep=2))


def shared(cluster: str) -> gpuir.Graph:
    return gpuir.analyze(
        gpuir.pipeline("shard{ranks=2,by=data}").run(training()), cluster=cluster
    ).graph


case("analyze", "cluster", partial(shared, "dgx-a100"), partial(shared, "2xa100-pcie-40gb"))

# ---------------------------------------------------------------------------- models


class Module(nn.Module):
    """A matrix, and a convolution of images."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Linear(64, 64), nn.Linear(64, 8), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        h = self.n(torch.relu(self.a(x)))
        h = h if y is None else h + y
        return self.b(h).sum(), self.b(h).mean()


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(8, 16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(x)


X = torch.zeros(8, 64)
FLOAT, LONG = TensorProto.FLOAT, TensorProto.INT64


def info(name: str, shape: list[Any], kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def onnx(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: Any = ()) -> bytes:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    opsets.append(helper.make_opsetid("com.microsoft", 1))
    made = helper.make_graph(nodes, "m", inputs, outputs, list(weights))
    return helper.make_model(made, opset_imports=opsets, ir_version=10).SerializeToString()


node = helper.make_node
SYMBOLIC = onnx([node("Relu", ["x"], ["y"])], [info("x", ["n", 8])], [info("y", ["n", 8])])
STRANGE = onnx(
    [node("Strange", ["x"], ["y"], domain="mine")], [info("x", [4, 8])], [info("y", [4, 8])]
)
FILLED = onnx([node("Expand", ["x", "n"], ["y"])], [info("x", [1]), info("n", [1], LONG)],
              [info("y", ["k"])])  # fmt: skip
BODY = helper.make_graph(
    [node("Identity", ["go"], ["on"]), node("Add", ["s", "s"], ["s2"])], "body",
    [info("i", [], LONG), info("go", [], TensorProto.BOOL), info("s", [4])],
    [info("on", [], TensorProto.BOOL), info("s2", [4])],
)  # fmt: skip
LOOP = onnx(
    [node("Loop", ["n", "", "x"], ["y"], name="again", body=BODY)],
    [info("n", [], LONG), info("x", [4])], [info("y", [4])],
)  # fmt: skip
ROWS = onnx([node("Gather", ["t", "i"], ["y"])], [info("i", [4096], LONG)],
            [info("y", [4096, 8])],
            [helper.make_tensor("t", FLOAT, [100_000, 8], bytes(3_200_000), raw=True)])  # fmt: skip


TWO = onnx(
    [
        node("MatMul", ["x", "w"], ["h"]),
        node("ReduceSum", ["h"], ["y"], keepdims=0),
        node("ReduceMean", ["h"], ["z"], keepdims=0),
    ],
    [info("x", [4, 8])], [info("y", []), info("z", [])],
    [helper.make_tensor("w", FLOAT, [8, 8], bytes(256), raw=True)],
)  # fmt: skip


def moe() -> bytes:
    w = {"a": [8, 32, 64], "b": [8, 64, 32]}
    size = 4 * 8 * 64 * 32
    weights = [helper.make_tensor(n, FLOAT, s, bytes(size), raw=True) for n, s in w.items()]
    at = node("MoE", ["x", "r", "a", "", "b"], ["y"], domain="com.microsoft", k=2,
              activation_type="relu")  # fmt: skip
    return onnx([at], [info("x", [64, 64]), info("r", [64, 8])], [info("y", [64, 64])], weights)


def twice(node: Any, emit: Any) -> Any:
    return emit(t.Map("mul", (node[0],), (2.0,)))


differ("load", {"model": SYMBOLIC, "dims": {"n": 4}}, dims={"n": 8}, model=STRANGE)
case("load", "inputs", partial(gpuir.load, SYMBOLIC, inputs={"x": (4, 8)}),
     partial(gpuir.load, SYMBOLIC, inputs={"x": (8, 8)}))  # fmt: skip
differ("load", {"model": FILLED, "values": {"n": (5,)}}, values={"n": (6,)})
differ("load", {"model": LOOP, "trip_counts": {"again": 5}}, trip_counts={"again": 6})
differ("load", {"model": moe()}, expert_skew=1.2)
differ("load", {"model": ROWS}, indices="zipf:1.05")
differ("load", {"model": STRANGE, "warn": print}, converters={"mine::Strange": twice})
differ("load", {"model": STRANGE, "warn": print}, strict=True)


def said() -> list[str]:
    texts: list[str] = []
    gpuir.load(STRANGE, warn=texts.append)
    return texts


case("load", "warn", list, said)
TORCH = {"model": Module(), "args": (X,)}
differ("load", TORCH, args=(X[:4],), kwargs={"y": X})
differ("load", {"model": Images(), "args": (torch.zeros(1, 8, 9, 9),)}, channels_last=True)
differ("load", TORCH, train=True, autocast="bf16")
differ("load", TORCH | {"train": True}, autodiff="gpuir", optimizer="sgd")
differ("load", TORCH | {"train": True, "autodiff": "gpuir"}, checkpoint="every=1", profile="ort")
differ("load", {"model": TWO, "train": True, "loss": "y"}, loss="z")
ADAM = TORCH | {"train": True, "optimizer": "adamw"}
differ("load", ADAM, fused=True, clip=1.0, accumulate=True)
differ("load", TORCH | {"autocast": "f16"}, fast_norms=True)
differ("load", TORCH, fp16=True)
differ("load", TORCH, int8=True)
differ("load", TORCH, fp8=True)
differ("load", TORCH | {"train": True}, weights="bf16", recipe="megatron-bf16")
differ("load", ADAM | {"autodiff": "gpuir", "profile": "eager"}, tf32=True)
case(
    "analyze",
    "generate",
    lambda: gpuir.analyze(config(), "a100", dims={"batch": 1, "seq": 8}, generate=2),
    lambda: gpuir.analyze(config(), "a100", dims={"batch": 1, "seq": 8}, generate=3),
)
case("analyze", "dims", partial(gpuir.analyze, SYMBOLIC, "a100", dims={"n": 4}),
     partial(gpuir.analyze, SYMBOLIC, "a100", dims={"n": 8}))  # fmt: skip


SMALL = str(Path(__file__).parent / "small_encoder.onnx")


def at_points(model: str = SMALL, target: str = "a100", **given: Any) -> list[float]:
    sizes = {"n": [4]} if model == SYMBOLIC else {"batch": [2, 4]}
    return gpuir.program(model, **given).times(sizes, target).latency_s.tolist()


SHORT, LONG = {"dims": {"seq": 16}}, {"dims": {"seq": 64}}
TWO_RANKS = partial(at_points, target="dgx-a100", **SHORT)
case("program", "model", partial(at_points, SYMBOLIC), partial(at_points, **SHORT))
case("program", "profile", partial(at_points, **SHORT),
     partial(at_points, profile="tensorrt", **SHORT))  # fmt: skip
case("program", "tf32", partial(at_points, tf32=True, **SHORT),
     partial(at_points, tf32=False, **SHORT))  # fmt: skip
case("program", "plan", partial(TWO_RANKS, plan=gpuir.Parallel(dp=2)),
     partial(TWO_RANKS, plan=gpuir.Parallel(tp=2)))  # fmt: skip
case("program", "**options", partial(at_points, **SHORT), partial(at_points, **LONG))


ALL_REDUCE = {"kind": "all_reduce", "nbytes": 1 << 24, "cluster": "dgx-h100"}
differ("collective", ALL_REDUCE, kind="all_gather", nbytes=1 << 20, cluster="dgx-a100", ranks=4)
differ("collective", ALL_REDUCE, dtype="i8", library="vllm", mode="kernel_trace")
GATHERED = {"kind": "all_gather", "nbytes": 1 << 20, "cluster": "dgx-b200"}
differ("collective", GATHERED, version="2.27.5", run="b200_sxm 2.29.2")
differ("collective", ALL_REDUCE | {"cluster": "2xdgx-h100", "ranks": 8}, near=4)


@cache
def config() -> str:
    folder = Path(mkdtemp())
    small = LLAMA | {"num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 128}
    (folder / "config.json").write_text(json.dumps(small))
    return f"hf:{folder}"


@cache
def decoder(**given: Any) -> str:
    return gpuir.show(gpuir.load(config(), dims={"seq": 32}, warn=print, **given))


DECODE = {"phase": "decode", "past": 32}
HUGGING_FACE = {
    "task": ({}, {"task": "feature-extraction"}),
    "dtype": ({}, {"dtype": "f16"}),
    "attention": ({}, {"attention": "eager"}),
    "phase": ({"phase": "prefill"}, {"phase": "decode", "past": 32}),
    "past": (DECODE, {"past": 64}),
    "cache_dtype": (DECODE, {"cache_dtype": "f8e4m3"}),
    "mask": ({}, {"mask": True}),
}
for option, (first, more) in HUGGING_FACE.items():
    case("load", option, partial(decoder, **first), partial(decoder, **first | more))


# ---------------------------------------------------------------------------- kernels

EXTENTS: dict[str, dict[str, Any]] = {
    "gemm": {"m": 512, "n": 512, "k": 1024},
    "conv": {"batch": 8, "channels": 64, "size": 28, "filters": 64, "window": 3},
    "attention": {"batch": 2, "heads": 8, "queries": 512, "keys": 1024, "head": 64},
    "rows": {"rows": 512, "columns": 1024},
    "map": {"cells": 1 << 24},
    "experts": {"tokens": 64, "hidden": 4096, "inter": 2048, "topk": 2, "experts": 32},
    "grouped": {"rows": 512, "n": 512, "k": 512, "groups": 8},
    "gather": {"rows": 1 << 20, "width": 128, "table": 1 << 20},
    "topk": {"rows": 64, "columns": 100_000, "k": 2000},
}
F8 = {"dtype": "f8e4m3", "out": "bf16"}
F32 = {"dtype": "f32"}
# Of each kind what is said besides: another value, and what else is said then in both calls.
SAID: dict[str, dict[str, Any]] = {
    "gemm": {
        "b": 4, "weight": "i4", "out": "f32", "epilogue": ("bias", "gelu"), "scales": ("row", F8),
        "group": (32, {"weight": "i4"}), "math": ("tf32", F32), "layout": ("nt", F32),
    },
    "conv": {
        "stride": 2, "dilation": 2, "padding": 1, "groups": 4, "transposed": True,
        "math": ("tf32", F32), "epilogue": ("bias", "relu"),
        "library": ("aten", {"groups": 64, "dtype": "f32", "window": 5, "target": "t4"}),
    },
    "attention": {
        "value": 32, "kv_heads": 2, "causal": True, "window": 128, "cache": "f8e4m3", "out": "f32",
        "math": ("tf32", F32), "shared": True, "append": True, "library": "trtllm",
        "paged": (True, {"queries": 1, "keys": 8192, "batch": 1, "target": "a100"}),
    },
    "rows": {"of": "sum", "parameters": 2},
    "map": {"inputs": 2, "fn": "gelu", "out": "f32", "of": "transpose"},
    "experts": {
        "weight": "i4", "gated": False, "skew": 1.0, "ranks": 4, "shards": 2, "library": "trtllm",
        "scales": ("block", {"dtype": "f8e4m3"}), "math": ("tf32", F32),
    },
    "grouped": {"weight": "i8", "out": "f32", "scales": ("block", F8), "math": ("tf32", F32)},
    "gather": {"bag": 8},
    "topk": {},
}  # fmt: skip


def seconds(kind: str, **given: Any) -> Any:
    """What a kernel takes by the library, and by the first tiles that are generated."""
    k = gpuir.kernel(kind, **{"target": "h100-sxm"} | EXTENTS[kind] | given)
    return k.time_s, k.interval_s, gpuir.predict(k, gpuir.candidates(k)).time_s[:64].tolist()


OTHERS = {"window": 5, "table": 10}
for kind, more in SAID.items():
    for option, n in EXTENTS[kind].items():
        case(f"kernel {kind}", option, partial(seconds, kind),
             partial(seconds, kind, **{option: OTHERS.get(option, 2 * n)}))  # fmt: skip
    for option, given in more.items():
        other, both = (
            given if isinstance(given, tuple) and isinstance(given[-1], dict) else (given, {})
        )
        case(f"kernel {kind}", option, partial(seconds, kind, **both),
             partial(seconds, kind, **both, **{option: other}))  # fmt: skip

GEMM = EXTENTS["gemm"]
TILE = gpuir.Tile((("m", 64), ("n", 64), ("k", 32)), 3, 4)
differ("kernel", {"name": "gemm", "target": "a100", **GEMM}, dtype="f32", target="t4", tile=TILE)
case("kernel", "name", partial(gpuir.kernel, "rows", **EXTENTS["rows"]),
     partial(gpuir.kernel, "topk", **EXTENTS["rows"], k=1))  # fmt: skip
KERNEL = gpuir.kernel("gemm", target="a100", **GEMM)
LARGER = gpuir.kernel("gemm", target="a100", m=4096, n=4096, k=4096)
differ("kernels.costed", {"k": KERNEL, "target": "a100"}, k=LARGER, target="t4", tile=TILE)


def listed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A call whose arrays are lists, which compare."""

    def plain(x: Any) -> Any:
        match x:
            case np.ndarray():
                return x.tolist()
            case gpuir.Tiles():
                return [plain(getattr(x, f.name)) for f in fields(x)]
            case gpuir.Predictions():
                return [plain(x.time_s), plain(x.high_s), plain(x.low_s), x.reasons]
            case dict():
                return {name: plain(value) for name, value in x.items()}
            case _:
                return x

    return lambda **given: plain(function(**given))


def asked(name: str, usual: dict[str, Any], /, **given: Any) -> None:
    function = listed(public()[name])
    for option, value in given.items():
        case(name, option, partial(function, **usual), partial(function, **usual | {option: value}))


asked("candidates", {"kernel": KERNEL}, kernel=gpuir.kernel("rows", rows=8, columns=8, target="t4"))
asked("candidates", {"kernel": LARGER}, target="t4")
asked("heuristics", {"kernel": KERNEL}, kernel=LARGER, target="t4", count=2)
SOME = gpuir.Tiles({"m": 64.0, "n": 64.0, "k": 32.0})
asked("predict", {"kernel": KERNEL}, kernel=LARGER, tiles=SOME, target="t4")
asked("search", {"kernel": KERNEL}, kernel=LARGER, target="t4", by="beam", tries=4, wide=True)
OBSERVED = gpuir.Observed(gpuir.load_target("a100")).observe(KERNEL, TILE, 1e-3)
asked("search", {"kernel": KERNEL}, predict=OBSERVED.predict)
for option, other in {
    "kernel": LARGER,
    "tile": gpuir.Tile(TILE.dims, 2, 4),
    "seconds": 2e-3,
}.items():
    usual: dict[str, Any] = {"kernel": KERNEL, "tile": TILE, "seconds": 1e-3}
    new = gpuir.Observed(gpuir.load_target("a100"))
    case("Observed.observe", option, partial(new.observe, **usual),
         partial(new.observe, **usual | {option: other}))  # fmt: skip
for option, other in {"kernel": LARGER, "tiles": SOME, "target": "t4"}.items():
    usual = {"kernel": KERNEL, "tiles": gpuir.Tiles({"m": 128.0, "n": 64.0, "k": 32.0})}
    case("Observed.predict", option, partial(listed(OBSERVED.predict), **usual),
         partial(listed(OBSERVED.predict), **usual | {option: other}))  # fmt: skip

BLUR: dict[str, Any] = {
    "name": "blur", "dims": {"y": 4096, "x": 4096, "i": 5, "j": 5},
    "reads": [("y+i", "x+j"), ("i", "j")],
    "writes": [("y", "x")], "reduced": ["i", "j"],
}  # fmt: skip
MINE: dict[str, Any] = {
    "name": "mine", "dims": {"m": 4096, "n": 4096, "k": 512}, "reads": [("m", "k"), ("k", "n")],
    "writes": [("m", "n")], "reduced": ["k"], "dtype": "f16",
}  # fmt: skip


def nested(**given: Any) -> Any:
    k = costed(nest(**given), "h100-sxm")
    return k.time_s, k.tile, k.name


def nests(usual: dict[str, Any], **given: Any) -> None:
    for option, value in given.items():
        case("kernels.nest", option, partial(nested, **usual),
             partial(nested, **usual | {option: value}))  # fmt: skip


nests(
    BLUR,
    name="b",
    dims={"y": 2048, "x": 4096, "i": 5, "j": 5},
    reads=[("y+2i", "x+2j"), ("i", "j")],
)
nests(BLUR, writes=[("y", "x"), ("y", "x")], kept=[1], dtypes={2: "f16"}, ops=20.0, dtype="f64")
nests(MINE, products=True)
nests(BLUR | {"reduced": []}, reduced=["i", "j"])

# Of a tile: what each part changes, and for which kernel.
LANES = gpuir.kernel("gemm", m=2048, n=2048, k=2048, dtype="f32", target="a100")
ON_LANES = gpuir.Tile((("m", 64), ("n", 64), ("k", 16)), 1, 8, threads=(("n", 16), ("m", 16)))
ON_MATRIX = gpuir.Tile((("m", 128), ("n", 128), ("k", 32)), 3, 4)
STENCIL = nest(**BLUR)
ON_STENCIL = gpuir.Tile((("y", 32), ("x", 32)), 1, 8, threads=(("x", 8), ("y", 32)))
PARTS: dict[str, tuple[gpuir.Kernel, gpuir.Tile, Any]] = {
    "dims": (LARGER, ON_MATRIX, (("m", 64), ("n", 64), ("k", 32))),
    "stages": (LARGER, ON_MATRIX, 4),
    "warps": (LARGER, ON_MATRIX, 8),
    "split": (LARGER, ON_MATRIX, 4),
    "group": (LARGER, ON_MATRIX, 8),
    "unroll": (LANES, ON_LANES, 16),
    "threads": (LANES, ON_LANES, (("n", 32), ("m", 8))),
    "vector": (LANES, ON_LANES, (("n", 4),)),
    "strided": (LANES, ON_LANES, (("n", 1),)),
    "direct": (LANES, ON_LANES, ((0, 1),)),
    "fetch": (LANES, ON_LANES, ((0, 8),)),
    "pad": (STENCIL, ON_STENCIL, ((0, 1),)),
}


def under(k: gpuir.Kernel, tile: gpuir.Tile) -> float:
    return costed(k, "a100", tile).time_s


def under_many(k: gpuir.Kernel, tile: gpuir.Tile) -> list[float]:
    return gpuir.predict(k, gpuir.Tiles.of(tile, k.work), "a100").time_s.tolist()


for part, (k, tile, other) in PARTS.items():
    changed = replace(tile, **{part: other})
    case("Tile", part, partial(under, k, tile), partial(under, k, changed))
    case("Tiles", part, partial(under_many, k, tile), partial(under_many, k, changed))
SCHEDULED = gpuir.parse_schedule(SCHEDULE)
case("Schedule", "name", partial(gpuir.show, SCHEDULED),
     partial(gpuir.show, replace(SCHEDULED, name="other")))  # fmt: skip
for option, other in {"target": "t4", "tiles": ()}.items():
    case("Schedule", option, partial(gpuir.analyze, graph(), "a100", schedule=SCHEDULED),
         partial(gpuir.analyze, graph(), "a100" if option != "target" else "t4",
                 schedule=replace(SCHEDULED, **{option: other})))  # fmt: skip

# ---------------------------------------------------------------------------- tuners

CONVOLUTION = TEMPLATES["kernel_tuner.convolution"]
LAUNCH = {"y": 1024, "x": 1024, "i": 5, "j": 5}


def chosen(
    template: Any = CONVOLUTION, launch: Any = LAUNCH, target: str = "a100", **more: Any
) -> Any:
    found = choices_of(template, launch, target, **more)
    return len(found), found.names, found.predictions.time_s[:100].tolist()


HELD = {"tile_size_y": 1, "read_only": 0, "use_padding": 0}
case(
    "choices.choices_of",
    "template",
    partial(chosen, **HELD),
    partial(
        chosen,
        replace(CONVOLUTION, parameters={**CONVOLUTION.parameters, "tile_size_x": (1,)}),
        **HELD,
    ),
)
case("choices.choices_of", "launch", partial(chosen, **HELD),
     partial(chosen, launch=LAUNCH | {"i": 9}, **HELD))  # fmt: skip
case("choices.choices_of", "target", partial(chosen, **HELD), partial(chosen, target="t4", **HELD))
case("choices.choices_of", "allowed", partial(chosen, **HELD),
     partial(chosen, allowed=lambda p: p["use_shmem"] == 1, **HELD))  # fmt: skip
case("choices.choices_of", "**held", partial(chosen, **HELD), partial(chosen, **HELD, use_shmem=1))


def of_kernel(kernel: gpuir.Kernel = KERNEL, target: str = "a100") -> Any:
    found = choices(kernel, target)
    return found.names, found.predictions.time_s[:100].tolist()


case("choices.choices", "kernel", of_kernel, partial(of_kernel, LARGER))
case("choices.choices", "target", of_kernel, partial(of_kernel, target="t4"))
FOUND, FEW = choices(KERNEL, "a100"), choices(gpuir.kernel("rows", rows=8, columns=512), "a100")
case("kernel_tuner.parameters", "found", partial(parameters, FOUND), partial(parameters, FEW))
FIRST = FOUND.values(0)
case("kernel_tuner.allows", "found", lambda: allows(FOUND)(FIRST),
     lambda: allows(FOUND.only([1]))(FIRST))  # fmt: skip
RESULTS = [FOUND.values(i) | {"time": 1.0 + i, "energy": 9.0 - i} for i in range(3)]
differ(
    "kernel_tuner.best",
    {"results": RESULTS, "found": FOUND},
    results=RESULTS[1:],
    objective="energy",
)
case("kernel_tuner.best", "found", partial(best, RESULTS, FOUND),
     partial(best, RESULTS, replace(FOUND, target=gpuir.load_target("t4"))))  # fmt: skip


def trials(found: Any, count: int = 6, **given: Any) -> list[Any]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=sampler(found, **given))
    study.optimize(lambda trial: float(sum(suggest(trial, found).values())), n_trials=count)
    return [x.params for x in study.trials]


case("optuna.sampler", "found", partial(trials, FOUND, seed=1), partial(trials, FEW, seed=1))
case(
    "optuna.sampler", "share", partial(trials, FOUND, share=0.0), partial(trials, FOUND, share=1.0)
)
case("optuna.sampler", "seed", partial(trials, FOUND, share=1.0, seed=1),
     partial(trials, FOUND, share=1.0, seed=2))  # fmt: skip


def waiting(found: Any = FOUND, count: int = 3, **given: Any) -> list[Any]:
    import optuna

    study = optuna.create_study()
    enqueue(study, found, count=count, **given)
    return [x.system_attrs for x in study.trials]


case("optuna.enqueue", "study", list, waiting)
case("optuna.enqueue", "found", waiting, partial(waiting, FEW))
case("optuna.enqueue", "count", waiting, partial(waiting, count=4))


def suggested(found: Any, place: int) -> dict[str, int]:
    import optuna

    return suggest(optuna.trial.FixedTrial(found.values(place)), found)


case("optuna.suggest", "trial", partial(suggested, FOUND, 0), partial(suggested, FOUND, 1))
case("optuna.suggest", "found", partial(suggested, FOUND, 0), partial(suggested, FEW, 0))


def pruning(function: Callable[..., Any], **given: Any) -> Any:
    """What is left of Triton's configurations, real ones or a stand-in's."""
    with pytest.MonkeyPatch.context() as patch:
        triton = stand_in.install(patch)
        config = triton.Config
        configs = [
            config(
                {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8},
                num_warps=warps,
                num_stages=4,
            )
            for m in (128, 64, 256, 32)
            for n in (128, 64, 256, 32)
            for warps in (4, 8)
        ]
        given = {n: configs[:8] if x == "fewer" else x for n, x in given.items()}
        match function:
            case _ if function is prune:
                given = {"configs": configs, "args": launch(), "template": "matmul"} | given
                found = prune(**{"target": "h100-sxm"} | given)
                left = [*found.kept, found.found.time_s.tolist()]
            case _ if function is pruner:
                args = given.pop("args", launch())
                given = {"template": "matmul", "target": "h100-sxm"} | given
                left = pruner(**given)["early_config_prune"](configs, args)
            case _:
                left = to_configs(**{"kernel": LARGER, "top": 4} | given)
        return [getattr(x, "all_kwargs", lambda x=x: x)() for x in left]


def launch(n: int = 4096, dtype: str = "float16") -> dict[str, Any]:
    pointers = {f"{p}_ptr": stand_in.tensor(dtype, n, n) for p in "abc"}
    strides = {"stride_am": n, "stride_ak": 1, "stride_bk": n, "stride_bn": 1}
    return {**pointers, "M": n, "N": n, "K": n, **strides}


MATMUL = tutorials.TEMPLATES["matmul"]
SQUARE = replace(MATMUL, allows=lambda k, p: p["BLOCK_SIZE_M"] == p["BLOCK_SIZE_N"])
FEWER_PARAMETERS = replace(MATMUL, parameters={**MATMUL.parameters, "num_warps": (8,)})
for function, name, given in (
    (prune, "configs", {"configs": "fewer"}),
    (prune, "args", {"args": launch(512)}),
    (prune, "template", {"template": SQUARE}),
    (prune, "target", {"target": "t4"}),
    (prune, "top", {"top": 2}),
    (pruner, "template", {"template": SQUARE}),
    (pruner, "target", {"target": "t4"}),
    (pruner, "top", {"top": 2}),
    (to_configs, "kernel", {"kernel": KERNEL}),
    (to_configs, "top", {"top": 8}),
    (to_configs, "template", {"template": FEWER_PARAMETERS}),
    (to_configs, "target", {"target": "t4"}),
    (to_configs, "**held", {"GROUP_SIZE_M": 1}),
):
    case(f"triton.{function.__name__}", name, partial(pruning, function),
         partial(pruning, function, **given))  # fmt: skip

# Which tests show the options of adapters that need their tuner.
SHOWN: dict[str, dict[str, str]] = {
    "tests/tune/test_kernel_tuner.py": {
        "kernel_tuner.strategy found": "test_a_smaller_space_of_kernel_tuner_s_own",
        "kernel_tuner.strategy share": "test_a_share_of_the_visits_is_of_any",
        "kernel_tuner.strategy seed": "test_it_is_nearer_the_best_than_a_random_search",
        "kernel_tuner.strategy learns": "test_it_visits_in_predicted_order",
    },
    "tests/tune/test_triton.py": {
        "triton.pruner dtype": "test_a_given_dtype_stands_for_pointers_without",
    },
    "tests/tune/test_inductor.py": {
        "inductor.enable target": "test_another_device_stays",
        "inductor.enable top": "test_the_key_of_the_cache_says_that_it_was_on",
        "inductor.enable reductions": "test_blocks_of_a_reduction_are_fixed_when_asked_for",
        "inductor.enabled target": "test_another_device_stays",
        "inductor.enabled top": "test_the_key_of_the_cache_says_that_it_was_on",
        "inductor.enabled reductions": "test_blocks_of_a_reduction_are_fixed_when_asked_for",
    },
    "tests/tune/test_tvm.py": {
        "tvm.cost_model target": "test_scores_are_up_to_1_and_better_for_better_schedules",
        "tvm.cost_model cores": "test_scores_are_up_to_1_and_better_for_better_schedules",
        "tvm.cost_model learns": "test_measurements_change_the_scores",
        **{
            f"tvm.rank {option}": "test_rank_sets_what_builds_and_runs"
            for option in ("mod", "device", "target", "work_dir", "trials", "**options")
        },
        **{
            f"tvm.schedule_of {option}": "test_a_schedule_as_text"
            for option in ("workload", "scheduled", "target")
        },
    },
}


# ---------------------------------------------------------------------------- the tests


def result(call: Callable[[], Any]) -> Any:
    """What a call gives, or says where it refuses."""
    try:
        return call()
    except gpuir.GpuirError as error:
        return str(error)


def marks(name: str, option: str) -> list[Any]:
    return [pytest.mark.slow] if name == "load" and option in HUGGING_FACE else []


OPTIONS = [pytest.param(*x, marks=marks(*x), id=f"{x[0]}-{x[1]}") for x in options()]


@pytest.mark.parametrize("name, option", OPTIONS)
def test_each_option_changes_something(name: str, option: str):
    for file, tests in SHOWN.items():
        if test := tests.get(f"{name} {option}"):
            assert f"\ndef {test}(" in (ROOT / file).read_text()
            return
    assert (name, option) in CASES, f"{name}: {option} has no case in {__file__}"
    one, other = CASES[name, option]
    assert result(one) != result(other)


def test_no_case_is_left_over():
    assert set(CASES) - set(options()) == set()
