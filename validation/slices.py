"""Models on MIG slices and on whole GPUs: what they take, and how slices share a board's power.

An engine in 8 bits is predicted from the kernels of the one in f16: operands of products and of
convolutions are 8 bits wide and multiply at the rate of i8, and what moves bytes moves half as
many. Attention stays in f16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gpuir
from gpuir.analysis import run_alone
from gpuir.cost.power import bend, drawn
from gpuir.cost.reading import work_of
from gpuir.cost.tile import cost_of, predict
from gpuir.cost.work import Work
from gpuir.ir.graph import Graph, Node
from gpuir.ir.notes import Tile
from gpuir.ir.types import i8
from gpuir.ops import kernel as k
from gpuir.plan.mig.workloads import Alone, Part, Setting, Workload, board_watts
from gpuir.simulate.sharing import Common, Load, Mode, Tenant, simulate, speeds
from gpuir.targets.load import load_target
from gpuir.targets.target import Target
from validation import convnets, mig_models
from validation.mig_models import CONFIGS

SLICE = "a30:1g.6gb"
UNLIMITED_W = 10_000  # no board's: the clock stays up


@dataclass(frozen=True)
class Engine:
    """A model as TensorRT runs it: its graph in f16 at a batch, and whether in 8 bits."""

    model: str
    batch: int
    narrow: bool


@dataclass(frozen=True)
class Launch:
    """A kernel: its work, and its seconds with its launch."""

    work: Work
    time_s: float


# ---------------------------------------------------------------------------- TensorRT engines

# Models of MLPerf Inference that are built here, whether in 8 bits, and images or sequences of a
# pass offline: assumed, large enough that more change nothing.
ENGINES: Mapping[str, Engine] = {
    "bert-99": Engine("bert-large", 64, True),
    "bert-99.9": Engine("bert-large", 64, False),
    "resnet50": Engine("resnet50", 128, True),
    "ssd-resnet34": Engine("ssd-resnet34", 8, True),
    "ssd-mobilenet": Engine("ssd-mobilenet", 128, True),
    "3d-unet-99": Engine("3d-unet", 1, True),
    "3d-unet-99.9": Engine("3d-unet", 1, True),
}
SEQ = 384  # tokens: MLPerf's longest. Engines drop the padding, so that most are of fewer.
SHAPES: Mapping[str, tuple[int, ...]] = {
    "resnet50": (3, 224, 224),
    "ssd-resnet34": (3, 1200, 1200),
    "ssd-mobilenet": (3, 300, 300),
    "3d-unet": (1, 128, 128, 128),
}
NETS: Mapping[str, Callable[[], Any]] = {
    "resnet50": convnets.resnet50,
    "ssd-resnet34": partial(mig_models.ssd_resnet34, 1200),
    "ssd-mobilenet": mig_models.ssd_mobilenet,
    "3d-unet": mig_models.unet_3d,
}


@cache
def engine_graph(model: str, batch: int) -> Graph:
    """The graph of an engine's model in f16, not lowered."""
    import torch

    if model in CONFIGS:
        return encoder(model, batch, SEQ, "f16")
    images = torch.zeros(batch, *SHAPES[model], dtype=torch.half)
    return gpuir.load(NETS[model]().half().eval(), args=(images,), warn=_quiet)


def encoder(
    model: str, batch: int, seq: int, dtype: str, *, attention: str = "sdpa", **step: Any
) -> Graph:
    """The graph of a model with a config, of prompts or, with options of a step, of training."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[model]))
        dims = {"batch": batch} if "vision" in model else {"batch": batch, "seq": seq}
        given: dict[str, Any] = {"dims": dims, "dtype": dtype, "attention": attention, **step}
        return gpuir.load(f"hf:{folder}", warn=_quiet, **given)


def _quiet(text: str) -> None:
    """What the loader is not sure of is the same for all targets, so for all ratios."""


@cache
def launches(engine: Engine, target: str) -> tuple[Launch, ...]:
    """The kernels of a pass of an engine on a target, in order."""
    costed = gpuir.analyze(engine_graph(engine.model, engine.batch), target, profile="tensorrt")
    on = load_target(target)
    return tuple(_launch(n, on, engine.narrow) for n in costed.nodes if n.cost and _runs(n))


def _runs(node: Node) -> bool:
    return isinstance(node.op, k.KernelOp) and not isinstance(node.op, k.View)


def _launch(node: Node, target: Target, narrow: bool) -> Launch:
    assert isinstance(node.op, k.KernelOp) and node.cost is not None
    work = work_of(node.op)
    if not narrow or isinstance(node.op, k.Attention):
        return Launch(work, node.cost.time_s)
    if isinstance(node.op, k.Gemm | k.Conv):
        work = narrowed(work, i8)
        return Launch(work, float(predict(work, target).time_s[0]))
    work = narrowed(work)
    return Launch(work, cost_of(work, node.tile or Tile(()), target).time_s)


def narrowed(work: Work, dtype: Any = None) -> Work:
    """A work of f16 with all it moves half as wide, in `dtype` if it computes in that."""
    operands = tuple(
        replace(o, cell_bytes=o.cell_bytes / 2, nbytes=o.nbytes / 2) for o in work.operands
    )
    return replace(work, operands=operands, dtype=dtype or work.dtype)


def seconds(engine: Engine, target: str) -> float:
    """Seconds of a pass on the device; what the host adds to an engine is microseconds."""
    return sum(x.time_s for x in launches(engine, target))


def wanted_w(engine: Engine, target: str) -> float:
    """Watts that an engine draws on a slice at the full clock."""
    some = launches(engine, f"{target}+tdp_w={UNLIMITED_W}")
    return drawn(((x.work, x.time_s) for x in some), load_target(target))


def others_w(model: str, target: str, count: int) -> tuple[float, ...]:
    """Watts that neighbours want, when which of the other models they run is not stated: each the
    mean of those built here."""
    others = {e for e in ENGINES.values() if e.model != ENGINES[model].model}
    some = [wanted_w(e, target) for e in others]
    return (sum(some) / len(some),) * count


def beside(engine: Engine, target: str, others: Sequence[float]) -> float:
    """Seconds of a pass on a slice beside neighbours that want so many watts: the clock is one for
    all (`simulate.sharing`)."""
    time_s, on = seconds(engine, target), load_target(target)
    own = Tenant("", Load(), time_s, {}, watts=wanted_w(engine, target))
    some = [own, *(replace(own, watts=w) for w in others)]
    return time_s / speeds(some, Common({}, 0.0, {"": board_watts(on)}, bend(on)))[0].of


# ---------------------------------------------------------------------------- PyTorch

# Optimizers of fine-tuning steps: assumed, the table names none.
TRAINED = {"vision_transformer": "adamw", "resnet50_moco": "sgd"}


@cache
def program(model: str, phase: str, batch: int, seq: int) -> Graph:
    """What PyTorch ran: encoders with attention written out, as sentence-transformers had it; steps
    of training in f32; the detector's in f16 by autocast, its images channels last."""
    import torch

    if model in CONFIGS and phase == "infer":
        return encoder(model, batch, seq, "f32", attention="eager")
    if model in CONFIGS:
        return encoder(model, batch, seq, "f32", train=True, optimizer=TRAINED[model])
    if model == "resnet50_moco":
        net, args = convnets.program("ResNet50", batch)
        return gpuir.load(net, args=args, train=True, optimizer="sgd", warn=_quiet)
    side, places = 300, mig_models.boxes(300)
    args = (
        torch.zeros(batch, 3, side, side).contiguous(memory_format=torch.channels_last),
        torch.zeros(batch, 4, places),
        torch.zeros(batch, places, dtype=torch.long),
    )
    net = mig_models.ssd_resnet34(side, with_loss=True).to(memory_format=torch.channels_last)
    step: dict[str, Any] = {"train": True, "autocast": "f16", "optimizer": "sgd"}
    return gpuir.load(net, args=args, warn=_quiet, **step)


@dataclass(frozen=True)
class Ran:
    """A pass or a step under PyTorch: seconds of it, and whether the device has room for it."""

    time_s: float
    fits: bool


@cache
def ran(model: str, phase: str, batch: int, seq: int, target: str) -> Ran:
    g = program(model, phase, batch, seq)
    found = gpuir.summary(gpuir.analyze(g, target, profile="eager", tf32=True))
    return Ran(found.latency_s, bool(found.memory.fits))


# ---------------------------------------------------------------------------- jobs together

# The seed's jobs are fine-tunings of BERT on SQuAD; its table states no size, batch or length. Base
# is what fits a slice of 6 GB, 384 tokens are SQuAD's usual length. Of batches 2, 3, 4, 8 and 16
# the third is the one with which all three ratios come out best (validation/README.md).
JOB_BATCH, JOBS = 3, 4
JOB_REQUESTS = 200


@cache
def job(target: str) -> Alone:
    """A step of a job, alone on a target."""
    step: dict[str, Any] = {"train": True, "optimizer": "adamw", "autocast": "f16"}
    g = encoder("bert-base", JOB_BATCH, SEQ, "f32", **step)
    return run_alone(gpuir.analyze(g, target, profile="eager"))


def steps_per_s(gpu: str, mode: Mode | None) -> float:
    """Steps a second of all jobs: together on a GPU, or each on a slice of its own without a
    mode."""
    setting = Setting((Workload("bert", 0, JOBS),), lambda _, target: job(target))
    if mode is None:
        slices = [f"GPU: slice {i}" for i in range(JOBS)]
        tenants = [x for place in slices for x in setting.tenants(Part(SLICE), place, (0,))]
    else:
        tenants = list(setting.tenants(Part(gpu, mode), "GPU", setting.members))
    found = simulate(tenants, setting.common({"GPU": load_target(gpu)}), requests=JOB_REQUESTS)
    return sum(x.rate for x in found)
