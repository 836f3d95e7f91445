"""A run of several models, or of one at several lengths, as one answer."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from gpuir.ir.notes import Bound
from gpuir.report.answer import Answer, RunPart, unfit
from gpuir.simulate.timeline import HOST_BOUND

ASSUMED = (
    "a run begins when the one before it has ended; between them there is nothing: no sampler, "
    "scheduler or tokenizer",
    "predictions of all parts are off alike: the ends of their intervals add up",
    "the weights of all parts stay on the device, and all else of a part is freed at its end",
)


def together(
    parts: Sequence[RunPart],
    weights: Sequence[Hashable],
    *,
    batch: int | None = None,
    tokens: int | None = None,
) -> Answer:
    """The answer that parts of a run come to, one after another on one device. Times and the ends
    of intervals add up. Memory is that of the part that needs the most, beside the weights of the
    others; parts of which `weights` says the same share theirs. Without a `batch` it is that of all
    parts, if they have the same."""
    each = [x.each for x in parts]
    kept = {key: x.whole.memory.kept_bytes for key, x in zip(weights, parts, strict=True)}
    others = [sum(kept.values()) - kept[key] for key in weights]
    reserved = [a.reserved_bytes + more for a, more in zip(each, others, strict=True)]
    fullest, available = max(reserved), each[0].available_bytes
    batches = {a.batch for a in each}
    latency_s, gaps_s = (_sum(parts, name) for name in ("latency_s", "gaps_s"))
    return Answer(
        model=" + ".join(
            f"{x.times}*{x.each.model}" if x.times > 1 else x.each.model for x in parts
        ),
        target=each[0].target,
        profile=" + ".join(dict.fromkeys(a.profile for a in each)),
        batch=batches.pop() if batch is None and len(batches) == 1 else batch,
        latency_s=latency_s,
        interval=_ends(parts),
        device_s=_sum(parts, "device_s"),
        busy_s=_sum(parts, "busy_s"),
        gaps_s=gaps_s,
        is_host_bound=gaps_s > HOST_BOUND * latency_s,
        bound=_bound(parts),
        peak_bytes=max(a.peak_bytes + more for a, more in zip(each, others, strict=True)),
        reserved_bytes=fullest,
        available_bytes=available,
        why="" if available is None else unfit(fullest, available),
        tokens=tokens,
        parts=tuple(parts),
    )


def mean(steps: Sequence[Answer]) -> Answer:
    """The means of what runs of one model come to that differ in a size; of their memory the
    most."""
    every = [RunPart("", 1, a) for a in steps]
    names = ("latency_s", "device_s", "busy_s", "gaps_s")
    means = {name: _sum(every, name) / len(steps) for name in names}
    ends = _ends(every)
    return replace(
        steps[-1],
        **means,
        interval=ends and (ends[0] / len(steps), ends[1] / len(steps)),
        is_host_bound=means["gaps_s"] > HOST_BOUND * means["latency_s"],
        bound=_bound(every),
        peak_bytes=max(a.peak_bytes for a in steps),
        reserved_bytes=max(a.reserved_bytes for a in steps),
        why=max((a.why for a in steps), key=len),
    )


def _sum(parts: Iterable[RunPart], name: str) -> float:
    return sum(x.times * getattr(x.each, name) for x in parts)


def _ends(parts: Sequence[RunPart]) -> tuple[float, float] | None:
    """The ends of intervals added up; a part without one counts as it is. None where none has
    one."""
    if all(x.each.interval is None for x in parts):
        return None
    ends = [(x.times, x.each.interval or (x.each.latency_s, x.each.latency_s)) for x in parts]
    return sum(n * low for n, (low, _) in ends), sum(n * high for n, (_, high) in ends)


def _bound(parts: Iterable[RunPart]) -> Bound | None:
    """What bounds the kernels of most time, taking each run's as bound by one thing."""
    times: dict[Bound, float] = {}
    for x in parts:
        if x.each.bound is not None:
            times[x.each.bound] = times.get(x.each.bound, 0.0) + x.times * x.each.device_s
    return max(times, key=times.__getitem__, default=None)
