"""The page of the documentation that `gpuir eval field --page` writes."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path

from gpuir.cost.tile import BY
from gpuir.report.units import quantity
from validation.field_rows import (
    ENGINES,
    GROUPS,
    FieldExam,
    FieldResult,
    FieldRow,
    FieldScore,
    every_gained,
)

WORST = 5
TITLES = {
    "software": "software",
    "dtype": "data type",
    "generation": "generation of the GPU",
    "regime": "what should limit it",
    "phase": "what ran",
}
CAUSES = Path(__file__).with_name("field_causes.csv")
UNKNOWN = "Not known."
INTRODUCTION = """\
# Accuracy in the field

How far off is gpuir when you type an ordinary command? This page compares it with times that other
people measured and published: benchmark pages of vendors, of libraries and of users. Beside each
time stands the command that an engineer would type for the same case. Wherever the page of the
measurement says nothing, the command has gpuir's defaults.

```sh
gpuir eval field points.csv --inputs inputs --jobs 2 --page docs/validation/field.md
```

writes this page, in a checkout with the table of measurements. `--commands` prints each command and
its time. This one is of {date}, by the predictor `{predictor}`.

## What the measurements are

- {rows} measurements of {sources} sources, on {gpus} GPUs under {stacks} software stacks;
  {scored} are scored. Each row at the end of the page links to its source.
- Others collected them for an evaluation of gpuir. They cover many kinds of software, data types
  and GPUs, and what limits the time: a judgement from the shapes, made before any prediction. No
  row was left out because its error is large. More rows of these pages are kept apart, and nobody
  who works on gpuir has seen them.
- No factor is fitted to these rows by a program. But their errors were looked at while gpuir was
  developed, and rules were changed because of them. Some rest on the rows themselves: that TensorRT
  writes norms as a compiler does and what a flop takes on a T4 (demoBERT), how much of the softmax
  cuDNN hides (three of its rows), and how much wider the interval of a whole run is than that of
  its kernels. For others a row was far off, and other data gave the rule: group norms, modules on
  the host, products of one row, the voltage of 12 nm boards. So this is no blind test, and gpuir
  may be further off on rows that nobody has looked at.
- Throughputs are turned into times: the batch over the throughput. A generation of n tokens is the
  prompt and n - 1 steps at the mean length of the cache; an image is 50, or 28, calls of the
  denoiser and one of the decoder. Samplers, schedulers and tokenizers are in the measurement and
  not in the prediction.
- Of models that share a GPU, the measured time of one alone is taken, times how much slower gpuir
  says sharing makes it.
- A command gains an option where its source, the page or the program behind it, says more than the
  command, by one rule for all rows of a source:
{gained}
- Most are one number without a spread. Few pages state the host, the clocks or all versions of the
  software. A part of each error is theirs.

## How to read the tables

Errors are in percent of the measured time. *Mean* and *median* are of absolute errors; *bias* is
the mean signed error, positive where gpuir predicts too slow. *Inside* is the percentage of rows
whose measurement is inside the 80 % interval of the prediction, of the rows that have one.

*Roofline* is the simplest prediction of the same work: the time of all flops at the peak of the
data type, or of all bytes that the kernels read and write at the memory's bandwidth, whichever is
longer. Flops and bytes are those of gpuir's report. Of a step on many GPUs it is the flops alone.
Models that share a GPU have none.
"""
MAIN = """\
The main figure is that of one GPU without a serving engine. The others are told apart, because
their times also depend on a scheduler ({engines}), on a network, or on
other clients of the GPU.
"""


def causes() -> dict[str, str]:
    """What probably causes the error of a row, by its id."""
    lines = (x for x in CAUSES.read_text().splitlines() if not x.startswith("#"))
    return {line["id"]: line["cause"] for line in csv.DictReader(lines)}


def page(exams: Sequence[FieldExam]) -> str:
    """The page of all tables together."""
    exam = FieldExam("", tuple(r for x in exams for r in x.results))
    return "\n".join(_parts(exam)).rstrip() + "\n"


def _parts(exam: FieldExam) -> Iterator[str]:
    rows = [r.row for r in exam.results]
    yield INTRODUCTION.format(
        rows=len(rows),
        scored=len(exam.sound),
        date=date.today().isoformat(),
        predictor=BY,
        sources=len({r.source for r in rows}),
        gpus=len({r.gpu for r in rows}),
        stacks=len({r.software for r in rows}),
        gained="\n".join(f"  - `{x.options}`, {x.source}: {x.why}" for x in every_gained()),
    )
    yield from ("## Together", "")
    yield MAIN.format(engines=", ".join(e for e in ENGINES if any(r.software == e for r in rows)))
    yield from _scores("rows of", exam.totals)
    yield "All groups below are of all rows together.\n"
    for key in GROUPS:
        yield from (f"## By {TITLES[key]}", "")
        yield from _scores(TITLES[key], exam.by(key))
    yield from (f"## The {WORST} largest errors", "")
    known = causes()
    for r in exam.worst(WORST):
        what = f"{r.row.software} on {r.row.gpu}, {_what(r)}"
        yield f"- **{r.row.id}** ({what}): {r.error:+.0f} %. {known.get(r.row.id, UNKNOWN)}"
    yield ""
    if exam.suspect:
        yield from ("## Left out", "")
        yield "The measurement itself is doubtful. These rows are in no figure above.\n"
        for r in exam.suspect:
            error = "no prediction" if r.why else f"{r.error:+.0f} %"
            yield f"- **{r.row.id}** ({error}): {r.row.suspect}."
        yield ""
    if exam.failed:
        yield from ("## Without a prediction", "")
        yield from (f"- **{r.row.id}**: {_plain(r.why)}" for r in exam.failed)
        yield ""
    yield from ("## Each measurement", "")
    yield from _cases(exam.results)
    yield from ("## Sources", "")
    yield from _sources(rows)


def _scores(title: str, scores: Iterable[FieldScore]) -> Iterator[str]:
    def number(value: float | None, form: str = ".1f") -> str:
        return "-" if value is None else format(value, form)

    heads = (title, "rows", "mean", "median", "bias", "inside", "roofline: mean", "bias")
    yield from _head(heads, words=1)
    for s in scores:
        yield _line(
            (
                s.op,
                f"{s.n}",
                number(s.mape),
                number(s.median_ape),
                number(s.bias, "+.1f"),
                number(s.coverage, ".0f"),
                number(s.roofline_mape),
                number(s.roofline_bias, "+.1f"),
            )
        )
    yield ""


def _cases(results: Iterable[FieldResult]) -> Iterator[str]:
    """A line a row; those told apart, and suspect ones, say so."""
    heads = ("row", "GPU", "software", "what ran", "measured", "predicted", "80 % interval")
    yield from _head((*heads, "error %", "roofline %", ""), words=4)
    for r in results:
        ends = " to ".join(quantity(x, "s") for x in r.interval or ())
        roof = "-" if r.roofline_error is None else f"{r.roofline_error:+.0f}"
        inside = {None: "", True: "inside", False: "outside"}[r.is_inside]
        remarks = (inside, r.row.apart, "doubtful" if r.row.suspect else "")
        yield _line(
            (
                f"[{r.row.id}]({r.row.source})",
                r.row.gpu,
                r.row.software,
                _what(r),
                quantity(r.row.measured_s, "s", 4),
                "-" if r.why else quantity(r.predicted_s, "s", 4),
                ends or "-",
                "-" if r.why else f"{r.error:+.1f}",
                roof,
                ", ".join(x for x in remarks if x),
            )
        )
    yield ""


def _sources(rows: Iterable[FieldRow]) -> Iterator[str]:
    """A line a page or a file of one, with the number of its rows."""
    found = Counter((r.source, r.path, r.date) for r in rows)
    yield from _head(("source", "where", "date", "rows"), words=3)
    for (source, path, of), count in found.items():
        name = source.removeprefix("https://").removeprefix("github.com/").rstrip("/")
        yield _line((f"[{name}]({source})", path or "-", of or "-", f"{count}"))
    yield ""


def _what(r: FieldResult) -> str:
    """`bert-base, fp16, b8 s384, inference`."""
    return ", ".join(filter(None, (r.row.model, r.row.dtype, r.row.shape, r.row.phase)))


def _head(titles: Sequence[str], words: int) -> Iterator[str]:
    yield _line(titles)
    yield _line(["---" if i < words else "--:" for i in range(len(titles))])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_plain(x) for x in cells)} |"


def _plain(text: str) -> str:
    """A text that does not end a cell."""
    return " ".join(text.split()).replace("|", "\\|")
