"""`gpuir targets`: the GPUs there are, where their numbers come from, and which are doubtful."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import click

from gpuir.cli import options
from gpuir.cli.output import emit, layout
from gpuir.cli.request import ask, option, request

if TYPE_CHECKING:
    from gpuir.backends.terminal import Page
    from gpuir.targets.target import Target, TargetField


@dataclass(frozen=True)
class Targets:
    name: str | None = ask(click.argument("name", required=False))
    check: bool = option("Recompute peaks and bandwidth; exit 1 if one is doubtful.")
    format: str = option(
        "", type=click.Choice(["table", "toml", "json"]), default="table", show_default=False
    )
    settings: options.Pairs[str] = option(
        "sms=120, in SI units.", "--set", type=options.SETTING, multiple=True
    )
    width: int | None = ask(options.width)
    output: str | None = ask(options.output)


@request(Targets)
def command(asked: Targets) -> None:
    """List GPUs, or show one with the source of each number.

    With --check, gpuir recomputes the peaks and the bandwidth of every target.

    \b
    gpuir targets                         what there is
    gpuir targets l4                      its numbers, and who says so
    gpuir targets --check                 recompute peaks and bandwidth of all
    gpuir targets l4 --format toml -o my-gpu.toml
    """
    import gpuir
    from gpuir.backends.terminal import Page
    from gpuir.ir.errors import UsageError

    name = asked.name
    if asked.settings and not name:
        raise UsageError("--set needs a target", fix="gpuir targets NAME ...")
    path, format, check = asked.output, asked.format, asked.check
    shape = layout(asked.width, path)
    page = Page(shape.width, shape.color)
    targets = (
        [gpuir.load_target(options.with_settings(name, asked.settings))]
        if name
        else list(options.everything().values())
    )
    doubtful = 0
    if check:
        from gpuir.cost.families import check_factors  # and with it numpy

        for t in targets:
            check_factors(t)
        doubtful = sum(show_check(t, page, everything=name is not None) for t in targets)
        total = f"{doubtful} doubtful" if doubtful else "none doubtful"
        page.line(f"{len(targets)} target{'s' * (len(targets) > 1)} checked, {total}")
    elif format == "toml":
        emit(toml(targets), path)
        return
    elif format == "json":
        emit(json_text(targets), path)
        return
    elif name is not None:
        show_one(targets[0], page)
    else:
        show_all(targets, page)
    emit(page.text(), path)
    if doubtful:
        raise click.exceptions.Exit(1)


def show_all(targets: list[Target], page: Page) -> None:
    from gpuir.report.table import Column, Notes, Table

    def tera(kind: str, dtype: str) -> Column:
        def rate(t: Target) -> float | None:
            found = getattr(t.flops_per_s, kind).get(dtype)
            return None if found is None else found / 1e12

        return Column(f"{dtype} Tflop/s", "number", value=rate)

    columns = (
        Column("name", value="name"),
        Column("SMs", "number", text=lambda t: str(t.sms)),
        tera("vector", "f32"),
        tera("tensor", "f16"),
        Column("memory", "bytes", text=lambda t: f"{t.dram_bytes / 2**30:.0f} GiB"),
        Column("bandwidth", "bytes/s", value="dram_bytes_per_s"),
        Column("title", value="title"),
    )
    page.part(Table(targets, columns))
    page.line()
    text = "f16 is the dense rate of the matrix units, f32 that of the vector lanes."
    page.part(Notes([("", text)], 0))


def show_one(t: Target, page: Page) -> None:
    show_rows([row for row in t.rows() if not row.field.startswith("local.")], page)
    if t.local:
        page.wrapped("local", f"{len(t.local)} kernels measured, that correct those like them", 6)
    for field, why in t.discrepancies.items():
        page.wrapped("discrepancy", f"{field}: {why}", 6)


SHORT = 60  # a value of more letters is wrapped, not set to the right of a column


def show_rows(rows: list[TargetField], page: Page) -> None:
    """Fields and their values, and behind a number the one of its source, listed below."""
    from gpuir.report.units import quantity

    sources: dict[str, int] = {}
    shown: list[tuple[str, str, str]] = []
    for row in rows:
        number = isinstance(row.value, int | float) and not isinstance(row.value, bool)
        text = quantity(float(row.value), row.unit, 4) if number else _words(row.value)  # type: ignore[arg-type]
        mark = f"[{sources.setdefault(row.source, len(sources) + 1)}]" if row.source else ""
        shown.append((row.field, text, mark))
    short = [row for row in shown if row[2] and len(row[1]) <= SHORT]
    widths = max(len(row[0]) for row in shown), max((len(row[1]) for row in short), default=0)
    for field, text, mark in shown:
        if mark and len(text) > SHORT:
            page.wrapped(field, f"{text}  {mark}", widths[0] + 2)
        elif mark:
            page.line(f"{field:{widths[0]}}  {text:>{widths[1]}}  {mark}")
        else:
            page.wrapped(field, text, widths[0] + 2)
    page.line()
    for source, i in sources.items():
        page.wrapped(f"[{i}]", source, 5)


def _words(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(cast(tuple[str, ...], value))
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def show_check(t: Target, page: Page, everything: bool) -> int:
    """Prints the rows worth reading, and gives how many are doubtful."""
    from gpuir.report.units import quantity
    from gpuir.targets.check import check_target

    rows = check_target(t)
    units = {row.field: row.unit for row in t.rows()}
    for row in rows:
        if not everything and row.status == "ok":
            continue
        unit = units.get(row.field, "")
        listed, again = quantity(row.listed, unit, 4), quantity(row.recomputed, unit, 4)
        style = "" if row.status == "ok" else row.status
        name = row.field if everything else f"{t.name}: {row.field}"
        page.line(f"{row.status:9}  {name}: {listed}, recomputed {again} ({row.diff:+.1%})", style)
        page.wrapped("", f"{row.formula}", 11)
        if row.explanation:
            page.wrapped("", row.explanation, 11)
    return sum(row.status == "doubtful" for row in rows)


def toml(targets: list[Target]) -> str:
    from gpuir.ir.errors import UsageError
    from gpuir.targets.load import dump_target

    if len(targets) > 1:
        raise UsageError(
            "the format 'toml' can hold only one target", fix="give one: gpuir targets a100 ..."
        )
    return dump_target(targets[0])


def json_text(targets: list[Target]) -> str:
    """A list of targets, each a list of its fields with value, unit and source."""
    from gpuir.backends import structured

    listed = [structured.record(t, "name discrepancies", fields=t.rows()) for t in targets]
    return structured.json_text("gpuir.targets/1", targets=listed)
