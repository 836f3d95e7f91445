"""Models on MIG slices and on whole GPUs: what they take, and how slices share a board's power."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from ctypes import CDLL
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from gpuir.cost.nest import board_watts
from gpuir.cost.power import bend
from gpuir.ir.graph import Graph
from gpuir.plan.mig.workloads import DoesNotFit, ServingSetting, SharedSlice, Workload
from gpuir.report.answer import Answer
from gpuir.run.analysis import run_alone
from gpuir.simulate.sharing import Load, Mode, SharedResources, Tenant, simulate, speeds
from gpuir.targets.load import load_target
from validation import commands, zoo
from validation.commands import Analysis

NARROW = {"i8": "int8", "f8e4m3": "fp8"}  # the option of each dtype of 8 bits
UNLIMITED_W = 10_000  # no board's: the clock stays up


@dataclass(frozen=True)
class Job:
    """What runs: a model of `zoo`, its sizes, whether it is trained, under which software stack and
    in which numbers. `narrow` is the dtype of 8 bits that an engine's products are in."""

    model: str
    batch: int
    seq: int = 0
    train: bool = False
    stack: str = "tensorrt"
    dtype: str = "f16"
    tf32: bool | None = None
    autocast: str = ""
    narrow: str = ""
    attention: str = "sdpa"
    channels_last: bool = False


# ---------------------------------------------------------------------------- programs


def program(job: Job) -> Graph:
    """What runs, not lowered. The optimizer of a step is assumed: AdamW, or SGD for nets of
    convolutions."""
    stack = job.stack if job.train else ""
    return _program(replace(job, stack=stack, tf32=None))


@lru_cache(8)  # as many as tables compare
def _program(job: Job) -> Graph:
    graph = asked(job, "").graph()
    _give_back()
    return graph


def _give_back() -> None:
    """The memory of what was exported: its weights are in cycles, which a command collects rarely,
    and glibc keeps what is freed."""
    gc.collect()
    trim = getattr(CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def asked(job: Job, target: str) -> Analysis:
    """A run of a job on a target, alone."""
    model = zoo.MODELS[job.model]
    options: dict[str, Any] = {"dims": {"batch": job.batch}, "dtype": job.dtype}
    if job.train:
        options |= {"train": True, "optimizer": model.optimizer}
    options |= {"autocast": job.autocast} if job.autocast else {}
    options |= {NARROW[job.narrow]: True} if job.narrow else {}
    name = f"validation.zoo:{zoo.function_of(job.model, job.train)}"
    if model.reads_text:
        config = zoo.config_of(job.model)
        bare = job.train and config["architectures"][0].endswith("Model")
        options["dims"] = {"batch": job.batch, "seq": job.seq}
        options |= {"attention": job.attention} | ({"task": "question-answering"} if bare else {})
        name = commands.config(config, job.model)
    elif job.channels_last:
        options["channels_last"] = True
    return Analysis(name, options, job.stack or None, job.tf32, target)


@lru_cache(1)
def answered(job: Job, target: str) -> Answer:
    """What is kept of others is their numbers: a training step with its graph has 50 MB."""
    return asked(job, target).answer(program(job))


# ---------------------------------------------------------------------------- one job


@cache
def alone(job: Job, target: str) -> Answer:
    """A run of a job that has a target for itself. What the host adds to an engine is left out: it
    is microseconds."""
    found = run_alone(answered(job, target)).numbers
    if job.stack != "tensorrt":
        return found
    return replace(
        found, latency_s=found.device_s, needs=replace(found.alone, busy_s=found.device_s)
    )


def seconds(job: Job, target: str) -> float:
    return alone(job, target).latency_s


def given(job: Job, target: str) -> str:
    """The call that gives `seconds`."""
    part = "device_s" if job.stack == "tensorrt" else "latency_s"
    return f"{asked(job, target).call}.{part}"


@cache
def fits(job: Job, target: str) -> bool:
    """Whether the device has room for a job."""
    return bool(answered(job, target).memory.fits)


@cache
def wanted_w(job: Job, target: str) -> float:
    """Watts that a job draws on a slice at the full clock."""
    return alone(job, f"{target}+tdp_w={UNLIMITED_W}").alone.watts


def beside(job: Job, target: str, others: Sequence[float]) -> float:
    """Seconds of a run on a slice beside neighbours that want so many watts: the clock is one for
    all (`simulate.sharing`)."""
    time_s, on = seconds(job, target), load_target(target)
    if not others:
        return time_s
    own = Tenant("", Load(), time_s, {}, watts=wanted_w(job, target))
    some = [own, *(replace(own, watts=w) for w in others)]
    return time_s / speeds(some, SharedResources({}, 0.0, {"": board_watts(on)}, bend(on)))[0].of


# ---------------------------------------------------------------------------- MLPerf's engines

SEQ = 384  # tokens: MLPerf's longest, and SQuAD's; without their padding most are shorter
# Images or sequences of a pass offline: assumed, large enough that more change nothing.
OFFLINE: Mapping[str, int] = {
    "bert-large": 64,
    "resnet50": 128,
    "ssd-resnet34": 8,
    "ssd-mobilenet": 128,
    "3d-unet": 1,
}
ENGINES = (
    *(Job(name, batch, SEQ, narrow="i8") for name, batch in OFFLINE.items()),
    Job("bert-large", OFFLINE["bert-large"], SEQ),
)


def others_w(model: str, target: str, count: int) -> tuple[float, ...]:
    """Watts that neighbours want, when which of the other models they run is not stated: each the
    mean of those built here."""
    some = [wanted_w(e, target) for e in ENGINES if e.model != model]
    return (sum(some) / len(some),) * count


# ---------------------------------------------------------------------------- jobs together

# The public table's fine-tunings of BERT on SQuAD state no batch. Of 2, 3, 4, 8 and 16 the second
# is the one with which all three ratios come out best (docs/validation/data.md).
JOB_BATCHES: Mapping[str, int] = {"bert-base": 3}
JOB_REQUESTS = 200


@cache
def steps_per_s(job: Job, target: str, count: int, mode: Mode | None) -> float | None:
    """Runs a second of so many jobs: together on a target, or each on a slice of its own without a
    mode. None where they do not fit."""
    setting = ServingSetting((Workload(job.model, 0, count),), lambda _, on: alone(job, on))
    try:
        if mode is None:
            places = [f"GPU: slice {i}" for i in range(count)]
            tenants = [x for at in places for x in setting.tenants(SharedSlice(target), at, (0,))]
        else:
            tenants = list(setting.tenants(SharedSlice(target, mode), "GPU", setting.members))
    except DoesNotFit:
        return None
    common = setting.common({"GPU": load_target(target.partition(":")[0])})
    found = simulate(tenants, common, requests=JOB_REQUESTS)
    return sum(x.rate for x in found)
