"""What the page's script draws, as plain data: kernels, explanations, spans, memory, trees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from gpuir.backends.analysis import bounds, moment_name, run_names
from gpuir.report.answer import Answer
from gpuir.report.equal import EqualKernels, alike, layer, tile_text
from gpuir.report.kernels import totals
from gpuir.report.modules import modules
from gpuir.report.names import node_name
from gpuir.report.roofline import ceilings, memories, points
from gpuir.simulate.layout import MEMORY_KINDS

MOMENTS = 600  # of memory that a chart shows; of those in between, the fullest
NS = 1e9
LEAST_SHARE = 5e-4  # of the time: smaller parts of a tree are one


@dataclass
class Words:
    """Texts, each once; records hold their numbers."""

    numbers: dict[str, int] = field(default_factory=dict[str, int])

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def data(summaries: Sequence[Answer]) -> dict[str, Any]:
    """All runs. Texts that repeat are numbers, which count into `words`."""
    words = Words()
    names = run_names(summaries)
    runs = [_run(name, s, words) for name, s in zip(names, summaries, strict=True)]
    return {"runs": runs, "words": list(words.numbers)}


def _run(name: str, s: Answer, words: Words) -> dict[str, Any]:
    groups = alike(s)
    kernels = [(i, x) for i, group in enumerate(groups) for x in group.kernels]
    numbers = {x.path: n for n, (_, x) in enumerate(kernels)}
    return {
        "name": name,
        "model": s.model,
        "latency": s.latency_s,
        "device": s.device_s,
        "gaps": s.timeline.gaps_s,
        "kinds": [[total.kind, total.time_s] for total in s.totals],
        "groups": [_group(x, s, words) for x in groups],
        "kernels": [
            [i, words(x.label), words(x.name), words(".".join(x.module)), x.runs]
            for i, x in kernels
        ],
        "roofs": {
            "flops": [[roof.name, roof.rate] for roof in ceilings(s, groups)],
            "bytes": [[roof.name, roof.rate] for roof in memories(s)],
        },
        "trees": _trees(s, groups),
        "lanes": _lanes(s, numbers, words),
        "memory": _memory(s, words),
    }


def _group(x: EqualKernels, s: Answer, words: Words) -> dict[str, Any]:
    """Equal kernels: what one run of one does, and the lines that lead to its time."""
    one, cost = x.one, x.one.cost
    point = next(iter(points([x])), None)
    lines = [
        [
            words(y.name),
            y.value if isfinite(y.value) else None,
            words(y.unit),
            y.formula,
            words(y.source),
        ]
        for y in s.explain(one)
    ]
    return {
        "name": layer(x),
        "kind": one.kind,
        "shape": one.shape,
        "phase": one.phase,
        "status": one.status,
        "bound": cost.bound,
        "by": cost.by,
        "time": cost.time_s,
        "interval": cost.interval,
        "unseen": cost.unseen,
        "runs": x.runs,
        "flops": one.flops,
        "bytes": one.bytes,
        "dram": one.dram_bytes,
        "peak": one.peak_share,
        "waves": cost.fact("waves"),
        "occupancy": cost.fact("occupancy"),
        "tile": tile_text(one),
        "schedule": one.tile.settings if one.tile else "",
        "nodes": [words(node_name(loc)) for loc in dict.fromkeys(one.locs)],
        "terms": cost.terms,
        "facts": [] if lines else cost.facts,
        "lines": lines,
        "roof": point and [point.intensity, point.rate],
    }


# ---------------------------------------------------------------------------- where time goes


@dataclass(frozen=True)
class IciclePart:
    """A part of the time: `parent` is its place in the list, -1 of the whole."""

    parent: int
    label: str
    time_s: float
    note: str = ""
    group: int = -1  # the kernels it is, if it is some


def _trees(s: Answer, groups: Sequence[EqualKernels]) -> dict[str, list[Any]]:
    whole = IciclePart(-1, s.model, sum(x.time_s for x in groups))
    trees = {"kind": _kinds(whole, groups), "module": _modules(whole, s)}
    if len(phases := s.phases) > 1:
        trees["phase"] = [whole]
        for phase in phases:
            i = len(trees["phase"])
            trees["phase"].append(IciclePart(0, phase.kind, phase.time_s, _note(phase.bounds)))
            of_phase = [x for x in s.running if x.phase == phase.kind]
            trees["phase"] += [
                IciclePart(i, t.kind, t.time_s, _note(t.bounds))
                for t in totals(of_phase)
                if t.time_s
            ]
    return {
        name: [[p.parent, p.label, p.time_s, p.note, p.group] for p in parts]
        for name, parts in trees.items()
    }


def _note(of_bounds: Sequence[tuple[Any, float]]) -> str:
    return bounds(of_bounds, sum(part for _, part in of_bounds))


def _kinds(whole: IciclePart, groups: Sequence[EqualKernels]) -> list[IciclePart]:
    """Kinds of kernels, and in them those that are equal."""
    parts = [whole]
    for kind in dict.fromkeys(x.one.kind for x in groups):
        of_kind = [(i, x) for i, x in enumerate(groups) if x.one.kind == kind]
        place = len(parts)
        parts.append(IciclePart(0, kind, sum(x.time_s for _, x in of_kind)))
        shown = [(i, x) for i, x in of_kind if x.time_s >= LEAST_SHARE * whole.time_s]
        for i, x in shown:
            times = f" x{x.runs:,}" if x.runs != 1 else ""
            parts.append(
                IciclePart(
                    parent=place,
                    label=layer(x),
                    time_s=x.time_s,
                    note=f"{x.one.shape}{times}",
                    group=i,
                )
            )
    return parts


def _modules(whole: IciclePart, s: Answer) -> list[IciclePart]:
    """Modules that differ in numbers alone are one."""
    parts, above = [whole], [0]
    for m in modules(s.running):
        if m.total.time_s < LEAST_SHARE * whole.time_s:
            continue
        del above[m.depth + 1 :]
        note = f"{m.total.launches:,} launches; {bounds(m.total.bounds, m.total.time_s)}"
        parts.append(IciclePart(above[-1], ".".join(m.path), m.total.time_s, note))
        above.append(len(parts) - 1)
    return parts


# ---------------------------------------------------------------------------- from moment to moment


def _lanes(s: Answer, numbers: dict[tuple[str, ...], int], words: Words) -> list[Any]:
    """Spans by lane in order of time: starts and lengths in whole nanoseconds, and for each the
    kernel, or -1 minus the word that says what it is."""
    run = s.timeline
    lanes: dict[str, list[tuple[int, int, int]]] = {}
    for span in run.spans:
        path = None if span.launch is None else run.launches[span.launch].path
        what = numbers.get(path, -1) if path else -1
        if what < 0:
            what = -1 - words(span.name or span.kind)
        start, end = round(span.start_s * NS), round(span.end_s * NS)
        lanes.setdefault(span.lane, []).append((start, end - start, what))
    return [[lane, *map(list, zip(*sorted(spans), strict=True))] for lane, spans in lanes.items()]


def _memory(s: Answer, words: Words) -> dict[str, Any]:
    """Bytes by kind while each node runs; of long runs, the fullest moment of a few at a time."""
    m = s.memory
    step = -(-len(m.moments) // MOMENTS)
    chosen = [max(block, key=lambda i: int(m.total[i])) for block in _blocks(len(m.moments), step)]
    return {
        "at": chosen,
        "names": [words(moment_name(m.moments[i])) for i in chosen],
        "kinds": [
            [kind, [int(row[i]) for i in chosen]]
            for kind, row in zip(MEMORY_KINDS, m.live, strict=True)
            if row.any()
        ],
        "available": m.available_bytes,
    }


def _blocks(count: int, step: int) -> Iterator[range]:
    for start in range(0, count, step or 1):
        yield range(start, min(start + step, count))
