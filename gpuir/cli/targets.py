"""`gpuir targets`: the GPUs there are, where their numbers come from, and which are doubtful."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gpuir.cli import options
from gpuir.cli.output import emit, show
from gpuir.cli.request import ask, option, request

if TYPE_CHECKING:
    from gpuir.report.table import Part, Report
    from gpuir.targets.check import CheckRow
    from gpuir.targets.target import Target


@dataclass(frozen=True)
class Targets:
    name: str | None = ask(click.argument("name", required=False))
    check: bool = option("Recompute peaks and bandwidth; exit 1 if one is doubtful.")
    format: str = ask(options.formats(["toml"]))
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
    from gpuir.backends.structured import record
    from gpuir.cli.specs import show_specs, spec_fields
    from gpuir.ir.errors import UsageError

    name = asked.name
    if asked.settings and not name:
        raise UsageError("--set needs a target", fix="gpuir targets NAME ...")
    targets = (
        [gpuir.load_target(options.with_settings(name, asked.settings))]
        if name
        else list(options.everything().values())
    )
    if asked.check:
        checks = checked(targets)
        show(checks_report(checks, len(targets), not name), asked.format, asked.width, asked.output)
        if any(row.status == "doubtful" for _, row in checks):
            raise click.exceptions.Exit(1)
        return None
    if asked.format == "toml":
        return emit(toml(targets), asked.output)
    show_specs(
        "targets",
        lambda: [
            record(t, "name discrepancies", fields=spec_fields(t.name, t.rows())) for t in targets
        ],
        parts_of(targets[0]) if name else parts_of_all(targets),
        (asked.format, asked.width, asked.output),
    )


def parts_of_all(targets: Sequence[Target]) -> Iterator[Part]:
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
    yield Table(targets, columns)
    text = "f16 is the dense rate of the matrix units, f32 that of the vector lanes."
    yield Notes([("", text)], 0)


def parts_of(t: Target) -> Iterator[Part]:
    from gpuir.cli.specs import spec_parts
    from gpuir.report.table import Notes

    yield from spec_parts([row for row in t.rows() if not row.field.startswith("local.")])
    lines = [("discrepancy", f"{field}: {why}") for field, why in t.discrepancies.items()]
    if t.local:
        lines.append(("local", f"{len(t.local)} kernels measured, that correct those like them"))
    if lines:
        yield Notes(lines, 13)


def checked(targets: Sequence[Target]) -> list[tuple[Target, CheckRow]]:
    from gpuir.cost.families import check_factors  # and with it numpy
    from gpuir.targets.check import check_target

    for t in targets:
        check_factors(t)
    return [(t, row) for t in targets for row in check_target(t)]


def checks_report(checks: Sequence[tuple[Target, CheckRow]], count: int, several: bool) -> Report:
    """What is listed beside what follows from other numbers: of `several` targets, what differs."""
    from gpuir.report.table import Column, Notes, Report, Table
    from gpuir.report.units import quantity

    worth = [x for x in checks if not several or x[1].status != "ok"]
    doubtful = sum(row.status == "doubtful" for _, row in checks)

    def number(title: str) -> Column:
        def text(x: tuple[Target, CheckRow]) -> str:
            unit = next((r.unit for r in x[0].rows() if r.field == x[1].field), "")
            return quantity(getattr(x[1], title), unit, 4)

        return Column(title, "number", title, lambda x: getattr(x[1], title), text)

    columns = (
        Column("", "", "status", lambda x: x[1].status),
        Column("target" if several else None, "", "target", lambda x: x[0].name),
        Column("field", "", "field", lambda x: x[1].field),
        number("listed"),
        number("recomputed"),
        Column("off by", "%", "diff", lambda x: x[1].diff, lambda x: f"{x[1].diff:+.1%}"),
        Column(field="formula", value=lambda x: x[1].formula),
        Column(field="explanation", value=lambda x: x[1].explanation),
    )
    table = Table(worth, columns)

    def parts() -> Iterator[Part]:
        if worth:
            yield table
            lines = [
                (f"{t.name} {r.field}" if several else r.field, f"{r.formula}  {r.explanation}")
                for t, r in worth
            ]
            yield Notes(lines, max(len(name) for name, _ in lines) + 2)
        total = f"{doubtful} doubtful" if doubtful else "none doubtful"
        yield Notes([("", f"{count} target{'s' * (count > 1)} checked, {total}")], 0)

    return Report("gpuir.targets.check/1", parts, lambda: {"targets": count, "checks": table})


def toml(targets: list[Target]) -> str:
    from gpuir.ir.errors import UsageError
    from gpuir.targets.load import dump_target

    if len(targets) > 1:
        raise UsageError(
            "the format 'toml' can hold only one target", fix="give one: gpuir targets a100 ..."
        )
    return dump_target(targets[0])
