"""Scores of whole models against measurements, as a table for a terminal and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpuir.backends.scores import SCHEMA
from gpuir.backends.terminal import Page, Terminal
from gpuir.fit.score import Errors
from validation.cases import Labels, Predicted, Result, Times
from validation.models import PUBLISHED, Group
from validation.operators import Compared

TITLES = {
    "neusight": "NeuSight",
    "habitat": "Habitat",
    "roofline": "roofline",
    "micro": "Li et al.",
}
LEGEND = (
    "Errors in percent of the measurement, positive where too slow is predicted. unseen: by weights"
    " that were trained without the GPU. inside: whether the measurement lies in the 80 % interval."
)


@dataclass(frozen=True)
class Scores:
    """What is known of a table's cases: each, by groups, and by kinds of operators."""

    labels: Labels
    cases: Sequence[Result]
    groups: Sequence[Group]
    operators: Sequence[Compared] = ()


def json_text(scores: Scores) -> str:
    """`{"schema", "kind": "models", "cases": [...], "groups": [...], ...}`; README.md."""
    labels = scores.labels
    text = {
        "schema": SCHEMA,
        "kind": "models",
        "file": labels.file,
        "cases": [_case(r) for r in scores.cases],
        "groups": [_group(g) for g in scores.groups],
        "operators": [_operator(x) for x in scores.operators],
        "skipped": dict(labels.skipped),
    }
    return json.dumps(text, indent=1, allow_nan=False) + "\n"


def _case(r: Result) -> dict[str, Any]:
    c, p = r.case, r.case.program
    return {
        "device": c.device,
        "target": c.target.name,
        "model": p.model,
        "mode": p.mode,
        "seqlen": p.seq,
        "batch": p.batch,
        "option": c.option,
        "profile": c.profile,
        "suspect": c.suspect,
        "measured": _times(c.measured),
        "predicted": _predicted(r.predicted, c.measured),
        "unseen": None if r.unseen is None else _predicted(r.unseen, c.measured),
        "published": {
            name: {**_times(t), "error": _round(t.error(c.measured))}
            for name, t in c.published.items()
        },
        **c.ratios,
    }


def _predicted(p: Predicted, measured: Times) -> dict[str, Any]:
    return {
        **_times(p.times),
        "error": _round(p.times.error(measured)),
        "interval_s": None if p.interval is None else [float(f"{x:.6g}") for x in p.interval],
        "waiting": _round(p.waiting),
        "launches": p.launches,
    }


def _times(t: Times) -> dict[str, float | None]:
    """Seconds; null for a part that there is none of."""
    return {n: None if math.isnan(v) else float(f"{v:.6g}") for n, v in asdict(t).items()}


def _group(g: Group) -> dict[str, Any]:
    numbers = {name: _errors(e) for name, e in g.errors.items()}
    parts = {name: _errors(e) for name, e in g.parts.items()}
    place = {"option": g.option, "mode": g.mode, "device": g.device, "suspect": g.suspect}
    return {**place, "n": g.n, "errors": numbers, "parts": parts}


def _errors(e: Errors) -> dict[str, float]:
    numbers = {"mean": e.mape, "median": e.median_ape, "p90": e.p90_ape, "bias": e.bias}
    return {"n": e.n, **{name: _round(x) for name, x in numbers.items()}}


def _operator(x: Compared) -> dict[str, Any]:
    numbers = {n: float(f"{v:.6g}") for n, v in asdict(x).items() if isinstance(v, float)}
    return {**asdict(x), **numbers, "error": _round(x.error)}


def _round(x: float) -> float:
    return round(x, 4)


# ---------------------------------------------------------------------------- for a terminal


def report(scores: Scores, layout: Terminal) -> str:
    """Each case, then the groups' errors beside those of others, then kinds of operators, then what
    was left out."""
    labels, cases = scores.labels, scores.cases
    page = Page(layout.width, layout.color)
    page.heading(f"{labels.file}: {len(cases)} cases of whole models")
    if cases:
        page.wrapped("", LEGEND, 0)
        page.line()
        _cases(page, cases)
        page.line()
        page.line("mean absolute error by stack, mode and GPU, others' on the same cases")
        _groups(page, scores.groups)
    if scores.operators:
        page.line()
        page.line("by kind of operator, of the cases that were traced: milliseconds in all layers")
        _operators(page, scores.operators)
    if labels.skipped:
        page.line()
    for reason, count in sorted(labels.skipped.items()):
        page.wrapped("skipped", f"{count} line{'s' * (count != 1)}: {reason}")
    return page.text()


def _operators(page: Page, operators: Sequence[Compared]) -> None:
    columns = [("gpu", False), ("mode", False), ("part", False), ("operators", False)]
    columns += [("cases", True), ("measured", True), ("predicted", True), ("error", True)]
    columns += [("mean", True), ("suspect", False)]
    rows = [
        (
            *(x.target, x.mode, x.part, x.kind, str(x.cases)),
            *(_ms(x.measured_s), _ms(x.predicted_s), _percent(x.error), f"{x.mean:.1f}"),
            "slow trace" if x.suspect else "",
        )
        for x in operators
    ]
    page.table(columns, rows, drop=("mean",))


def _cases(page: Page, cases: Sequence[Result]) -> None:
    columns = [("gpu", False), ("model", False), ("mode", False), ("batch", True), ("seq", True)]
    columns += [("stack", False), ("measured", True), ("predicted", True), ("error", True)]
    columns += [("forward", True), ("backward", True), ("inside", False)]
    has_unseen = any(r.unseen for r in cases)
    columns += [("unseen", True)] * has_unseen
    columns += [(TITLES[p], True) for p in PUBLISHED] + [("suspect", False)]
    rows: list[tuple[str, ...]] = []
    for r in cases:
        c, p, times = r.case, r.case.program, r.predicted.times
        low, high = r.predicted.interval or (math.nan, math.nan)
        inside = "yes" if low <= c.measured.total_s <= high else "no" if low == low else "-"
        train = p.mode == "train"
        rows.append(
            (
                *(c.target.name, p.model, p.mode, str(p.batch), str(p.seq), c.profile),
                _ms(c.measured.total_s),
                _ms(times.total_s),
                _percent(times.error(c.measured)),
                _percent(times.error(c.measured, "forward_s")) if train else "-",
                _percent(times.error(c.measured, "backward_s")) if train else "-",
                inside,
                *((_percent(r.unseen.times.error(c.measured)) if r.unseen else "-",) * has_unseen),
                *(
                    _percent(c.published[n].error(c.measured)) if n in c.published else "-"
                    for n in PUBLISHED
                ),
                c.suspect,
            )
        )
    drop = ("Li et al.", "roofline", "Habitat", "inside", "suspect", "forward", "backward")
    page.table(columns, rows, drop=drop)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _percent(error: float) -> str:
    return f"{error:+.1f}"


def _groups(page: Page, groups: Sequence[Group]) -> None:
    columns = [("stack", False), ("mode", False), ("gpu", False), ("cases", True)]
    columns += [("mean", True), ("median", True), ("p90", True), ("bias", True)]
    columns += [("forward", True), ("backward", True)]
    has_unseen = any("unseen" in g.errors for g in groups)
    columns += [("unseen", True), ("its p90", True)] * has_unseen
    columns += [(TITLES[p], True) for p in PUBLISHED]
    rows: list[tuple[str, ...]] = []
    for g in groups:
        own = g.errors["gpuir"]
        unseen = g.errors.get("unseen")
        rows.append(
            (
                g.option,
                g.mode,
                g.device + (" (suspect)" if g.suspect else ""),
                str(g.n),
                *(f"{x:.1f}" for x in (own.mape, own.median_ape, own.p90_ape)),
                f"{own.bias:+.1f}",
                *(_mean(g.parts.get(part)) for part in ("forward_s", "backward_s")),
                *(
                    (_mean(unseen), f"{unseen.p90_ape:.1f}" if unseen else "-")
                    if has_unseen
                    else ()
                ),
                *(_mean(g.errors.get(p)) for p in PUBLISHED),
            )
        )
    drop = ("median", "Li et al.", "roofline", "Habitat", "forward", "backward", "bias")
    page.table(columns, rows, drop=drop)


def _mean(e: Errors | None) -> str:
    return "-" if e is None else f"{e.mape:.1f}"
