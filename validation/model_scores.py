"""Scores of whole models against measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuir.backends.scores import SCHEMA, left_out, number
from gpuir.backends.structured import record
from gpuir.cost.tile import BY
from gpuir.fit.score import Errors
from gpuir.report.table import Column, Heading, Notes, Part, Report, Table, fields
from validation.cases import Labels, Predicted, Result, Times
from validation.models import PUBLISHED, Group
from validation.operators import Compared

TITLES = {
    "neusight": "NeuSight",
    "habitat": "Habitat",
    "roofline": "roofline",
    "micro": "Li et al.",
}
# Which of the published go first where a line is short.
DROPPED = {"neusight": 0, "micro": 1, "roofline": 2, "habitat": 3}
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


def scores_report(scores: Scores) -> Report:
    """Each case, then the groups' errors beside those of others, then kinds of operators, then what
    was left out. Programs have a row for each group."""
    labels = scores.labels
    return Report(
        SCHEMA,
        lambda: _parts(scores),
        lambda: {
            "kind": "models",
            "predictor": BY,
            "file": labels.file,
            "cases": list(map(_case, scores.cases)),
            "groups": _groups(scores),
            "operators": _operators(scores.operators).records(),
            "skipped": labels.skipped,
        },
    )


def _parts(scores: Scores) -> Iterator[Part]:
    labels, cases = scores.labels, scores.cases
    yield Heading(f"{labels.file}: {len(cases)} cases of whole models")
    if cases:
        yield Notes([("", LEGEND)], 0)
        yield _cases(cases)
        yield _groups(scores)
    if scores.operators:
        yield _operators(scores.operators)
    if labels.skipped:
        yield left_out(labels.skipped)


def _case(r: Result) -> dict[str, Any]:
    c = r.case
    return record(
        c.program,
        "model mode batch",
        seqlen=c.program.seq,
        **record(c, "device option profile suspect"),
        target=c.target.name,
        measured=c.measured,
        predicted=_predicted(r.predicted, c.measured),
        unseen=r.unseen and _predicted(r.unseen, c.measured),
        published={name: record(t, error=t.error(c.measured)) for name, t in c.published.items()},
        **c.ratios,
    )


def _predicted(p: Predicted, measured: Times) -> dict[str, Any]:
    """Seconds; null for a part that there is none of."""
    more = record(p, "waiting launches", interval_s=p.interval)
    return record(p.times, error=p.times.error(measured)) | more


# ---------------------------------------------------------------------------- for people


def _operators(operators: Sequence[Compared]) -> Table:
    return Table(
        operators,
        (
            Column("gpu", field="target"),
            Column("mode", field="mode"),
            Column("part", field="part"),
            Column("operators", field="kind"),
            Column("cases", "count", "cases"),
            Column("measured", "s", "measured_s"),
            Column("predicted", "s", "predicted_s"),
            number("error", field="error", form="+.1f"),
            number("mean", field="mean", drop=1),
            Column("suspect", "", "suspect", text=lambda x: "slow trace" if x.suspect else ""),
        ),
        caption="by kind of operator, of the cases that were traced: time in all layers",
    )


def _cases(cases: Sequence[Result]) -> Table:
    def error(part: str) -> Callable[[Result], float]:
        def of(r: Result) -> float:
            return r.predicted.times.error(r.case.measured, part)

        return of

    def inside(r: Result) -> str:
        low, high = r.predicted.interval or (math.nan, math.nan)
        return "-" if math.isnan(low) else "yes" if low <= r.case.measured.total_s <= high else "no"

    def published(r: Result, name: str) -> float | None:
        return r.case.published[name].error(r.case.measured) if name in r.case.published else None

    def unseen(r: Result) -> float | None:
        return r.unseen.times.error(r.case.measured) if r.unseen else None

    has_unseen = any(r.unseen for r in cases)
    return Table(
        cases,
        (
            Column("gpu", value="case.target.name"),
            Column("model", value="case.program.model"),
            Column("mode", value="case.program.mode"),
            Column("batch", "count", value="case.program.batch"),
            Column("seq", "count", value="case.program.seq"),
            Column("stack", value="case.profile"),
            Column("measured", "s", value="case.measured.total_s"),
            Column("predicted", "s", value="predicted.times.total_s"),
            number("error", error("total_s"), form="+.1f"),
            number("forward", error("forward_s"), form="+.1f", drop=6),
            number("backward", error("backward_s"), form="+.1f", drop=7),
            Column("inside", text=inside, drop=4),
            *[number("unseen", unseen, form="+.1f")] * has_unseen,
            *(
                number(TITLES[n], lambda r, n=n: published(r, n), form="+.1f", drop=DROPPED[n])
                for n in PUBLISHED
            ),
            Column("suspect", value="case.suspect", drop=5),
        ),
    )


def _groups(scores: Scores) -> Table:
    def mean(name: str, of: str = "errors") -> Callable[[Group], float | None]:
        def read(g: Group) -> float | None:
            errors: Mapping[str, Errors] = getattr(g, of)
            return errors[name].mape if name in errors else None

        return read

    def of(name: str, title: str, form: str = ".1f", drop: int = 0) -> Column:
        return number(title, lambda g: getattr(g.errors["gpuir"], name), form=form, drop=drop)

    def device(g: Group) -> str:
        return g.device + (" (suspect)" if g.suspect else "")

    def errors(found: Mapping[str, Errors]) -> dict[str, dict[str, float]]:
        return {name: _errors(e) for name, e in found.items()}

    unseen = (
        number("unseen", mean("unseen")),
        number("its p90", lambda g: (e := g.errors.get("unseen")) and e.p90_ape),
    )
    return Table(
        scores.groups,
        (
            Column("stack", field="option"),
            Column("mode", field="mode"),
            Column("gpu", "", "device", text=device),
            *fields("suspect"),
            number("cases", field="n", form=","),
            of("mape", "mean"),
            of("median_ape", "median", drop=1),
            of("p90_ape", "p90"),
            of("bias", "bias", "+.1f", drop=7),
            number("forward", mean("forward_s", "parts"), drop=5),
            number("backward", mean("backward_s", "parts"), drop=6),
            *(unseen if any("unseen" in g.errors for g in scores.groups) else ()),
            *(number(TITLES[n], mean(n), drop=DROPPED[n] and 1 + DROPPED[n]) for n in PUBLISHED),
            Column(field="errors", value=lambda g: errors(g.errors)),
            Column(field="parts", value=lambda g: errors(g.parts)),
        ),
        {"file": scores.labels.file},
        caption="mean absolute error by stack, mode and GPU, others' on the same cases",
    )


def _errors(e: Errors) -> dict[str, float]:
    return {"n": e.n, "mean": e.mape, "median": e.median_ape, "p90": e.p90_ape, "bias": e.bias}
