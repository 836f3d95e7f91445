"""Rows of a table of measurements on MIG slices, and what each says: on which target, what ran,
under which software, beside whom, and what was measured. What a row does not say is not guessed:
`NotScored` tells why."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpuir.fit import tables
from gpuir.fit.columns import TableFile
from gpuir.ir.errors import TargetError, UsageError
from gpuir.simulate.sharing import Mode
from gpuir.targets.load import load_target
from gpuir.targets.mig import mig_of
from validation import zoo
from validation.slices import OFFLINE, SEQ, Job

WORDS = (
    *("id", "series", "gpu", "gpu_sku", "mode", "profile", "instances_active_per_gpu"),
    *("co_runners", "scope", "workload", "model", "phase", "framework", "precision", "metric"),
    *("unit", "relative_to", "quality"),
)
NUMBERS = ("n_gpus", "batch", "seq_len", "value", "ratio")
COLUMNS = (*WORDS, *NUMBERS)


class NotScored(Exception):
    """Why a row is counted and not scored."""


@dataclass(frozen=True)
class Row:
    """A line of the table; of `n_gpus`, `batch` and `seq_len` 0 is not stated, NaN of `value` and
    `ratio`. `odd` says which number is none."""

    id: str
    series: str
    gpu: str
    gpu_sku: str
    mode: str
    profile: str
    instances_active_per_gpu: str
    co_runners: str
    scope: str
    workload: str
    model: str
    phase: str
    framework: str
    precision: str
    metric: str
    unit: str
    relative_to: str
    quality: str
    n_gpus: int
    batch: int
    seq_len: int
    value: float
    ratio: float
    odd: str = ""


def read(path: str | Path) -> tuple[Row, ...]:
    """The rows of a table; UsageError for one of other columns."""
    file = TableFile(Path(path))
    if missing := [name for name in COLUMNS if name not in file.names]:
        raise UsageError(
            "not a table of MIG measurements",
            where=str(path),
            expected=f"the columns {', '.join(COLUMNS)}",
            found=f"no {', '.join(missing)}" if file.names else "an empty file",
            fix="gpuir eval mig mig_measurements.csv",
        )
    columns = file.read(COLUMNS)
    texts = {n: columns.words(n) for n in COLUMNS}
    numbers = {n: columns.numbers(n) for n in NUMBERS}
    rows: list[Row] = []
    for i in range(columns.count):
        said: list[str] = [w.names[w.codes[i]] for w in texts.values()]
        cells: dict[str, Any] = dict(zip(COLUMNS, map(str.strip, said), strict=True))
        odd = ""
        for name in NUMBERS:
            number, text = float(numbers[name][i]), cells[name]
            is_size = name in ("n_gpus", "batch", "seq_len")
            if text and not (math.isfinite(number) and (not is_size or _is_size(number))):
                odd, number = (
                    f"{name} is no {'size' if is_size else 'number'}: {text[:40]}",
                    math.nan,
                )
            cells[name] = (0 if math.isnan(number) else int(number)) if is_size else number
        rows.append(Row(**cells, odd=odd))
    return tuple(rows)


def _is_size(number: float) -> bool:
    return 1 <= number <= 1e6 and number.is_integer()


# ---------------------------------------------------------------------------- where


def gpu_of(row: Row) -> str:
    """The whole GPU's name: the first of those of its SKU, or else of its name, that is known."""
    for name in (*row.gpu_sku.split("|"), row.gpu):
        plain = re.sub(r"^(a2|a10|a30|a40|t4|l4|l40|l40s)-\d+ ?gb$", r"\1", name.strip().lower())
        target = tables.target_of(plain.removeprefix("tesla ")) if plain else None
        if target is not None and target.slice is None:
            return target.name
    raise NotScored(f"no target is called {row.gpu_sku or row.gpu or 'nothing'}")


def target_of(row: Row) -> str:
    """The GPU or the slice of it that a row is about."""
    gpu = gpu_of(row)
    if row.mode == "full":
        return gpu
    if row.mode != "mig":
        raise NotScored(f"mode {row.mode or 'not stated'}: not known here")
    profile = row.profile.lower().removeprefix("mig").strip(" -")
    if not profile:
        raise NotScored("no profile is stated")
    try:
        return load_target(f"{gpu}:{profile}").name
    except TargetError as error:
        raise NotScored(error.what) from error


def has_mig(gpu: str) -> bool:
    try:
        mig_of(load_target(gpu))
    except TargetError:
        return False
    return True


def most(target: str) -> int:
    """How many slices of its kind a GPU holds."""
    on = load_target(target)
    assert on.slice is not None
    profile = mig_of(load_target(on.slice.gpu)).by_name[on.slice.profile]
    return profile.most * (profile.compute_slices // on.slice.compute_slices)


# ---------------------------------------------------------------------------- what ran

NOT_BUILT = "not built here"
# Frameworks that are none of these, whatever else their names have.
OTHER = (
    r"vllm|tensorrt.?llm|trt.?llm|sglang|\btgi\b|text.generation|llama\.cpp|deepspeed|"
    r"tensorflow|keras|jax|flax|mxnet|paddle|caffe"
)
EAGER = "eager@2.11"  # the tables are of PyTorch before 2.12
STACKS = (  # the first of these that a framework's name has
    (r"torch\.?compile|inductor|compiled", "compiled"),
    (r"tensorrt|\btrt\b", "tensorrt"),
    (r"onnx ?runtime|\bort\b", "ort"),
    (r"cuda ?graph", "cudagraph"),
    (r"torch|transformers|hugging ?face|timm", EAGER),
    (r"triton", "tensorrt"),
)
PYTORCH = (EAGER, "compiled", "cudagraph")


def stack_of(row: Row) -> str | None:
    """The profile that stands for a row's framework, if there is one."""
    text = row.framework.lower()
    if re.search(OTHER, text):
        return None
    return next((stack for pattern, stack in STACKS if re.search(pattern, text)), None)


def numbers_of(row: Row) -> dict[str, Any]:
    """The dtype, and TF32, autocast or 8 bits. Without a precision PyTorch computes in f32 with
    TF32, but for NVIDIA's examples, which train in mixed precision."""
    text, stack, said = row.precision.lower(), stack_of(row), row.framework.lower()
    if not text and stack in PYTORCH:
        text = "amp" if "deeplearningexamples" in said else "tf32"
    wide = "bf16" if re.search("bf16|bfloat16", text) else "f16"
    if re.search(r"int4|fp4|w4a|\bi4\b|4.?bit", text):
        raise NotScored(f"precision {row.precision}: not known here")
    if re.search(r"int8|\bi8\b|fp8", text):
        if stack != "tensorrt":
            raise NotScored(f"precision {row.precision}: 8 bits are predicted of TensorRT alone")
        return {"dtype": "f16", "narrow": "f8e4m3" if "fp8" in text else "i8"}
    is_mixed = bool(re.search(r"amp\b|mixed|autocast", text))
    if is_mixed or re.search(r"bf16|bfloat16|fp16|float16|\bf16|half", text):
        if stack in PYTORCH and (is_mixed or is_training(row)):
            return {"dtype": "f32", "tf32": True, "autocast": wide}
        return {"dtype": wide}
    if "tf32" in text:
        off = re.search(r"(no|without) tf32|tf32 (is )?(off|disabled)", text)
        return {"dtype": "f32", "tf32": not off}
    if re.search(r"fp32|float32|\bf32|single", text):
        return {"dtype": "f32"}
    raise NotScored(f"precision {row.precision or 'not stated'}: not known here")


def is_training(row: Row) -> bool:
    if re.match("train|fine", row.phase.lower()):
        return True
    if row.phase.lower().startswith("infer"):
        return False
    raise NotScored(f"phase {row.phase or 'not stated'}: not known here")


def is_offline(row: Row) -> bool:
    """Whether an engine of MLPerf ran, whose batch nobody states."""
    return not row.batch and row.phase.startswith("infer") and stack_of(row) == "tensorrt"


def job_of(row: Row, batch: int = 0) -> Job:
    """What ran, in batches of `batch` where the row states none."""
    name, stack, train = zoo.name_of(row.model), stack_of(row), is_training(row)
    if name is None:
        raise NotScored(f"{row.model} is {NOT_BUILT}")
    if stack is None:
        raise NotScored(f"framework {row.framework or 'not stated'}: no stack of it is predicted")
    if train and (name in zoo.UNTRAINED or stack not in PYTORCH):
        raise NotScored(f"training {row.model} under {row.framework} is {NOT_BUILT}")
    numbers, said = numbers_of(row), row.framework.lower()
    batch, seq = row.batch or batch, 0
    if not batch:
        raise NotScored("no batch is stated")
    if zoo.MODELS[name].reads_text:
        squad = is_offline(row) or "squad" in f"{row.workload} {row.model}".lower()
        seq = row.seq_len or (SEQ if squad else 0)
        if not seq:
            raise NotScored("no seq_len is stated")
    fused = train or stack != EAGER or re.search("torch ?2|sdpa|flash", said)
    attention = "sdpa" if fused else "eager"  # written out, as transformers had it before 2024
    last = bool(re.search("nhwc|channels.last", said))
    return Job(name, batch, seq, train, stack, attention=attention, channels_last=last, **numbers)


def offline_job(row: Row) -> Job:
    """The engine of a row of MLPerf, with the batch of OFFLINE."""
    return job_of(row, OFFLINE.get(zoo.name_of(row.model) or "", 0))


# ---------------------------------------------------------------------------- beside whom

_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
COUNTS = {word: i for i, word in enumerate(_WORDS)}
IDLE, OTHERS, SAME = "idle", "others", "same"
_JOBS = "(?:identical |concurrent |parallel )?" + (
    "(?:jobs|processes|models|clients|tenants|containers|pods)"
)


def active(row: Row) -> int:
    """Instances of a GPU that work, 0 where that is not stated: `4`, `all (4)`."""
    found = re.search(r"\d+", row.instances_active_per_gpu)
    return int(float(found[0])) if found else 0


def company(row: Row) -> str:
    """What the other instances of the GPU do."""
    text = row.co_runners.lower()
    if not text or re.search(r"\bidle\b|^none|\balone\b|nothing", text):
        return IDLE
    if re.search(r"\bsame\b|identical|every instance|\d+ jobs", text):
        return SAME
    return OTHERS


def sharing(row: Row) -> tuple[int, Mode] | None:
    """How many jobs have a GPU, or a slice, together and how: `4 processes share the whole GPU`."""
    text, full = row.co_runners.lower(), row.mode == "full"
    place = "gpu" if full else "instance"
    each = re.search(rf"(\w+) (?:\w+ )?per {place}", text)
    several = _count(each[1]) if each else 0
    together = rf"time.?slic|shar\w+ (the|one|an?) (\w+ )?{place}"
    together += "|at once|concurrent|simultaneous" if full else ""
    mode: Mode | None = None
    if re.search(r"\bmps\b", text):
        mode = "mps"
    elif full and re.search("one after another|serial|sequential|in turn", text):
        mode = "serial"
    elif several > 1 or re.search(together, text):
        mode = "time-slicing"
    if mode is None:
        return None
    stated = re.search(rf"(\w+) {_JOBS}", f"{text} {row.scope.lower()}")
    count = several if several > 1 else _count(stated[1]) if stated else 0
    if count < 1:
        raise NotScored(f"jobs share the {place}, and how many is not stated")
    return count, mode


def _count(word: str) -> int:
    return int(word) if word.isdecimal() and len(word) < 4 else COUNTS.get(word, 0)


def jobs_of_node(row: Row) -> int:
    """How many jobs share the node: `24 jobs, three per GPU`."""
    found = re.match(r"(\d{1,4}) jobs", row.co_runners)
    return int(found[1]) if found else 1


# ---------------------------------------------------------------------------- what was measured

AGAIN = "time to threshold: the same run, and how many steps it needs is not predicted"
SERVER = "server: how many queries a second meet a deadline is not predicted"
TOKENS = "tokens a second: how many are read and how many written is not stated"
SECONDS = {"s": 1.0, "sec": 1.0, "second": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6}
STEPS = ("iteration", "iter", "it", "step", "batch", "batche")
ITEMS = (
    *("image", "img", "sample", "sequence", "seq", "sentence", "sent", "example", "frame"),
    *("inference", "infer", "inf", "item", "record"),
)
QUERIES = ("query", "querie", "request", "req")
SHORT = {"fps": "frame/s", "ips": "image/s", "qps": "query/s"}
_TIME = r"latency|(step|iteration|batch|inference|forward|execution|compute) ?time|time (per|of a) "
_RATE = r"throughput|speed|rate\b|per second|fps|qps|/s\b"
_NO_STEP = r"std|deviation|variance|jitter|overhead|interference|\w+up\b|slowdown|accuracy|hit rate"


def step_s(row: Row, job: Job) -> tuple[float, str]:
    """Seconds of a step of one job, and which of a run's many times it is where it is not the mean
    or the median: `p99`."""
    metric = row.metric.lower()
    if metric.startswith(("time to threshold", "time to train", "time to accuracy")):
        raise NotScored(AGAIN)
    if metric.startswith("server"):
        raise NotScored(SERVER)
    if "token" in f"{metric} {row.unit.lower()}" and not job.train:
        raise NotScored(TOKENS)
    is_time, is_rate = (bool(re.search(p, metric)) for p in (_TIME, _RATE))
    if not (is_time or is_rate) or re.search(_NO_STEP, metric):
        raise NotScored(f"metric {row.metric or 'not stated'}: not predicted")
    if not row.value > 0:
        raise NotScored("no value is stated")
    of, per = _unit(row)
    if is_time and of in SECONDS:
        if per in ITEMS:
            return row.value * SECONDS[of] * job.batch, _which(metric)
        if per in ("", *STEPS, *QUERIES):
            return row.value * SECONDS[of], _which(metric)
    elif is_rate and SECONDS.get(per) == 1:
        rate = row.value / _jobs_of_rate(row)
        if of in STEPS:
            return 1 / rate, ""
        if of in ITEMS or (of in QUERIES and job.batch == 1):
            return job.batch / rate, ""
        if of == "token" and job.seq:
            return job.batch * job.seq / rate, ""
    raise NotScored(f"unit {row.unit or 'not stated'} of {row.metric}: not known here")


def _unit(row: Row) -> tuple[str, str]:
    """`images/s` → image, s. Where there is none, that which the metric names: `latency (ms)`."""
    metric = row.metric.lower()
    named = re.search(r"[(\[]([^)\]]*)[)\]]$", metric)
    unit = row.unit.lower() or (named[1] if named else metric if "per second" in metric else "")
    unit = unit.replace(" per ", "/").replace(" ", "")
    of, _, per = SHORT.get(unit, unit).partition("/")
    return re.sub("(?<=..)s$", "", of), re.sub("(?<=..)s$", "", per)


def _which(metric: str) -> str:
    """`latency p99` → p99."""
    found = re.search(
        r"p(\d\d?(?:\.\d+)?)\b|(\d\d(?:\.\d+)?)(?:th|%|-th)|\b(max|min|tail)(?:imum)?\b", metric
    )
    word = (found[3] or f"p{found[1] or found[2]}") if found else ""
    return "" if word == "p50" else word


def is_aggregate(row: Row) -> bool:
    """Whether a rate is of all jobs together."""
    scope = row.scope.lower()
    if scope and not re.match(
        r"(aggregate|total|sum|all|node|combined|per|one|single|each)\b", scope
    ):
        raise NotScored(f"scope {row.scope}: not known here")
    return not re.match(r"(per|one|single|each)\b|$", scope)


def _jobs_of_rate(row: Row) -> int:
    """How many jobs a rate is of: those of all GPUs and instances, where it is of all together."""
    if not is_aggregate(row):
        return 1
    shared = sharing(row)
    on_each = shared[0] if shared else 1
    if row.mode == "mig":
        on_each *= active(row)
    if not row.n_gpus * on_each:
        raise NotScored("an aggregate of a number of instances or GPUs that is not stated")
    if row.n_gpus > 1 and is_training(row) and not re.search("same|jobs", row.co_runners):
        raise NotScored("one job on several GPUs")
    return row.n_gpus * on_each


# ---------------------------------------------------------------------------- beside what


def is_relative(row: Row) -> bool:
    """Whether a row says how much more or less there is than of another."""
    return row.unit.lower() in ("ratio", "x", "times") or bool(
        re.match("relative|normali|speed-?up|slow-?down", row.metric.lower())
    )


def times(row: Row) -> float:
    """How much more a row does than its reference, NaN where that is not stated."""
    metric, value = row.metric.lower(), row.ratio
    if not re.search("throughput|speed|performance|time|latency|slow-?down", metric):
        raise NotScored(f"metric {row.metric or 'not stated'}: not predicted")
    if math.isnan(value):
        value = row.value / (100 if row.unit in ("%", "percent") else 1)
    if not value > 0:
        raise NotScored("no value is stated")
    slower = re.search("time|latency|slow-?down", metric)
    return 1 / value if slower and not re.search("throughput|speed-?up", metric) else value


WHOLE = r"(full|whole) gpu|(without|no) mig|mig (is )?(off|disabled)|non-?mig"


def reference_of(row: Row, rows: Iterable[Row]) -> Row:
    """The row that another is relative to: of those relative to the same the one that is 1, that of
    this `id`, or one job on the whole GPU, where that is said."""
    some = [r for r in rows if r.series == row.series and r.model == row.model and is_relative(r)]
    ones = [r for r in some if r.relative_to == row.relative_to and r.value == 1]
    if row in ones:
        return row
    found = next((r for r in (*ones, *some) if r in ones or r.id == row.relative_to), None)
    named = row.relative_to.lower()
    if found is None and re.search(WHOLE, named) and not re.search(_JOBS, named):
        found = replace(row, mode="full", profile="", co_runners="", scope="", id="")
    if found is None:
        raise NotScored(f"relative to {row.relative_to or 'nothing stated'}: no such row")
    return found
