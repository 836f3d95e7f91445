"""`gpuir calibrate`: a target that agrees with one's own device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from os.path import realpath, relpath
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import TYPE_CHECKING

import click

from gpuir.cli import checkout
from gpuir.cli.options import MOST_S, Finite
from gpuir.cli.output import check_ahead, emit, layout, note, warn
from gpuir.cli.request import option, request

if TYPE_CHECKING:
    from gpuir.backends.terminal import Page
    from gpuir.fit.batch import MeasuredBatch
    from gpuir.fit.calibrate import FamilyFit
    from gpuir.fit.campaign import Problem
    from gpuir.fit.machine import Machine
    from gpuir.targets.target import Target

RATE_SHARE = 1e-3  # of the time, that measuring one rate of the device takes
CPU_ROUNDS = 2  # in which the kernels are measured
PRACTICE_S = 1.5  # to run a small model again and again
HOST_S = 5.0  # of one op again and again
OWN = "cpu"  # the name that stands for the CPU at hand, whatever its level


@dataclass(frozen=True)
class Calibrate:
    target: str | None = option(
        "The target to correct: a name, a .toml file, or cpu.  [the GPU of this machine]"
    )
    tables: tuple[str, ...] = option(
        "Measurements to calibrate on, instead of making some.",
        "--table",
        multiple=True,
        type=click.Path(),
    )
    out: str | None = option(
        "Write the new target here.  [stdout]", "-o", "--out", type=click.Path()
    )
    name: str | None = option(
        "Name of the new target.  [the file's name, or the target's with -mine]"
    )
    budget_s: float = option(
        "Measure for at most so many seconds.", type=Finite(10, MOST_S), default=300.0
    )
    host: bool = option("Measure how long the host takes to launch kernels, and write a host.")
    width: int | None = option("Columns of the summary.  [the terminal's]", type=click.IntRange(40))


@request(Calibrate)
def command(asked: Calibrate) -> None:
    """Measure this device and write a target that agrees with it.

    gpuir measures about sixty kernels. The file holds what differs from the given target: a few
    factors of the cost model and, for a CPU, its rates and caches. Use its path wherever a command
    takes the name of a target.

    \b
    gpuir calibrate --target a100 -o my-a100.toml
    gpuir calibrate --target cpu -o my-cpu.toml
    gpuir calibrate --target a100 --table measured.parquet -o my-a100.toml
    gpuir calibrate --host -o my-host.toml
    """
    target, tables, out = asked.target, asked.tables, asked.out
    if asked.host:
        return host_file(target, tables, out, asked.name, asked.budget_s)
    import gpuir
    from gpuir.backends.terminal import Page
    from gpuir.fit.calibrate import calibration
    from gpuir.fit.machine import cpu_level, cpu_notes, gpu_name
    from gpuir.fit.steady import check_gain, left_as_they_were
    from gpuir.targets.load import dump_difference, parse_target
    from gpuir.targets.spec import slug

    target = target or gpu_name()
    base = gpuir.load_target(cpu_level() if target == OWN else target)
    path = Path(out) if out and out != "-" else Path("-")
    name = asked.name or (slug(path.stem) or f"{slug(base.name)}-mine")
    check_ahead(out)
    head = {"base": _base(base, target, path), "name": name}
    head["title"] = base.title or base.name
    numbers: dict[str, float] = {}
    parse_target(dump_difference(head, {}, {}), path)  # a wrong name is told before all work
    start, rated, machine = base, "", None
    if target == OWN or not tables:
        machine, head["title"], numbers = _described(base, RATE_SHARE * asked.budget_s)
        head |= {"notes": cpu_notes(machine)} if base.is_cpu else {}
        rated = f"measured by gpuir calibrate on {machine.provenance}, {_today()}"
        start = parse_target(dump_difference(head, numbers, {", ".join(numbers): rated}), path)
    if tables or machine is None:
        batches, how = _read(tables, start)
    else:
        batches, how = _measured(machine, start, asked.budget_s), rated
        batches += _practised(start) if start.is_cpu else []
    result, fits = calibration(start, batches, no_worse=True)
    check_gain(fits, bool(numbers))
    for text in left_as_they_were(fits):
        warn(text)
    fitted = {f"backtest.{f}": v for f, v in result.backtest.items()}
    fitted |= _instead("factors", start.factors, result.factors)
    fitted |= _instead("local", start.local, result.local)
    rows = sum(f.rows for f in fits)
    sources = {", ".join(numbers): rated} if numbers else {}
    sources["factors, local, backtest"] = f"calibrated on {rows} kernels, {how}; {_errors(fits)}"
    emit(dump_difference(head, {**numbers, **fitted}, sources), out)
    shape = layout(asked.width)
    page = Page(shape.width, shape.color)
    show(fits, page)
    if out and out != "-":
        page.line()
        page.line(f"{out}: target {name}")
        emit(page.text())
    else:
        note(page.text())


def _instead(table: str, old: Mapping[str, float], new: Mapping[str, float]) -> dict[str, float]:
    """The multipliers of a file whose base has others: those that are gone would come with it, so
    they are 1."""
    return {f"{table}.{path}": n for path, n in {**dict.fromkeys(old, 1.0), **new}.items()}


def host_file(
    target: str | None, tables: Sequence[str], out: str | None, name: str | None, budget_s: float
) -> None:
    """Measures the host of this machine in a few seconds and writes it as a spec."""
    from gpuir.fit.host import measured_host
    from gpuir.fit.machine import sees_gpu
    from gpuir.fit.steady import host_doubts
    from gpuir.ir.errors import UsageError
    from gpuir.targets.host import dump_host
    from gpuir.targets.spec import check_name, slug

    if target or tables:
        raise UsageError(
            "--host measures only the host of this machine",
            fix="leave out --target and --table, and run gpuir calibrate again for the target",
        )
    name = name or (slug(Path(out).stem) if out and out != "-" else "")
    if name:
        check_name(name, "host", "--name")
    check_ahead(out)
    host, spread = measured_host(name, min(budget_s, HOST_S))
    if doubt := host_doubts(spread):
        warn(doubt)
    if not sees_gpu():
        warn(
            "torch sees no GPU, so only PyTorch's own time on the CPU was measured. The driver's "
            "calls are assumed to differ from the reference by the same factor"
        )
    emit(dump_host(host), out)
    note(f"host {host.name}: takes {host.slowdown:.3g} times as long as the reference host")


def _base(base: Target, target: str, out: Path) -> str:
    """What the new file's `base` says: a name, or a path from its own folder."""
    from gpuir.ir.errors import UsageError
    from gpuir.targets.load import is_changed
    from gpuir.targets.spec import is_path

    if is_changed(base.name):
        raise UsageError(
            f"{target} is a target with changed numbers, so it has no file to start from",
            fix="write them into a file: gpuir targets NAME --set ... --format toml -o FILE",
        )
    if not is_path(target):
        return base.name
    return Path(relpath(realpath(target), realpath(out.parent))).as_posix()


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _errors(fits: Sequence[FamilyFit]) -> str:
    """The error before and after, in words, for the record."""
    parts = (f"{f.family} {100 * f.before:.1f} to {100 * f.after:.1f} %" for f in fits)
    return f"mean error, each row by a calibration on others: {', '.join(parts)}"


def show(fits: Sequence[FamilyFit], page: Page) -> None:
    """A row a family: how far off it was and is, and what moved."""
    from gpuir.report.table import Column, Table

    def moved(f: FamilyFit) -> str:
        parts = (f"{p.partition('.')[2]} x{v:.3g}" for p, v in f.moved.items())
        return ", ".join(parts) or "none"

    columns = (
        Column("family", value="family"),
        Column("rows", "number", text=lambda f: str(f.rows)),
        Column("before", "%", text=lambda f: f"{100 * f.before:.1f} %"),
        Column("after", "%", text=lambda f: f"{100 * f.after:.1f} %"),
        Column("80 % within", "x", text=lambda f: "x{:.2f} to x{:.2f}".format(*f.ends)),
        Column("local", "number", text=lambda f: str(f.local or "-")),
        Column("factors", value=moved),
    )
    page.part(Table(fits, columns))
    page.line()
    text = (
        "before, after: mean absolute error. For after, each kernel is left out of the calibration "
        "that predicts it. 80 % within: multiples of the predicted time between which 80 % of "
        "these kernels lie; no interval of this target is narrower. local: number of measured "
        "kernels whose remaining error also corrects similar kernels. factors: what the "
        "calibration changed"
    )
    page.wrapped("", text, 0)


# ---------------------------------------------------------------------------- measuring


def _described(base: Target, budget_s: float) -> tuple[Machine, str, dict[str, float]]:
    """The machine, its title, and the numbers of it that are measured and not fitted."""
    from gpuir.fit.machine import Machine, cpu_numbers, cpu_title, gpu_numbers

    machine = Machine.of(base)
    note(f"measuring on {machine.provenance}")
    if base.is_cpu:
        return machine, cpu_title(machine), cpu_numbers(machine, base.isa, budget_s)
    for what in machine.differences(base):
        warn(what)
    return machine, base.title, gpu_numbers(machine, budget_s)


def _measured(machine: Machine, target: Target, budget_s: float) -> list[MeasuredBatch]:
    """What the plan's kernels take, as many as fit into the time. On a CPU, which others use too,
    they are measured a second time, and the faster one counts."""
    from gpuir.fit.campaign import read_plan, shipped_plan
    from gpuir.fit.collect import MeasuredRow, batches_of, measure
    from gpuir.fit.steady import doubts, waited_s

    problems = _spread(read_plan(shipped_plan("calibrate-cpu" if target.is_cpu else "calibrate")))
    rounds = CPU_ROUNDS if target.is_cpu else 1
    rows: dict[Problem, MeasuredRow] = {}
    began, waited = monotonic(), waited_s()
    for last in (r == rounds - 1 for r in range(rounds)):
        ends = monotonic() + budget_s / rounds
        for i, problem in enumerate(problems):
            left_s = ends - monotonic()
            if left_s <= 0:
                left = len(problems) - i
                warn(f"--budget-s is over: {left} of {len(problems)} kernels not measured")
                break
            row = measure(machine, problem, min(1.0, 0.5 * left_s / (len(problems) - i)))
            before = rows.get(problem, row)
            rows[problem] = row = before if before.latency_s < row.latency_s else row
            if last:
                result = f"{row.latency_s * 1e6:10.1f} us"
                told = result if row.is_measured else f"left out: {row.note}"
                note(f"{i + 1:3}/{len(problems)}  {problem}: {told}")
    share = (waited_s() - waited) / max(monotonic() - began, 1e-9) if target.is_cpu else 0.0
    if doubt := doubts([*rows.values()], share):
        warn(doubt)
    return batches_of(rows.values(), target)


def _practised(target: Target) -> list[MeasuredBatch]:
    """What kernels take among others, in small models that are run for it."""
    from gpuir.fit.checks import batch_of
    from gpuir.report.check import params_of
    from gpuir.run.on_torch import practised
    from gpuir.targets.load import dump_target

    found: list[MeasuredBatch] = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{target.name}.toml"
        path.write_text(dump_target(target))
        for check in practised(str(path), target.sms, PRACTICE_S):
            note(f"{check.answer.model}: {len(check.rows)} kernels among others")
            for row in check.rows:
                if (graph := row.graph) is not None and row.measured_s:
                    graph = params_of(graph, check.weights)
                    found.append(batch_of(graph, check.weights, row.measured_s, target))
    return found


def _spread(items: Sequence[Problem]) -> list[Problem]:
    """The items so ordered that any first part has some from everywhere: 0, 8, 4, 12, 2, 10, ..."""
    width = max(len(items) - 1, 1).bit_length()
    order = sorted(range(len(items)), key=lambda i: f"{i:0{width}b}"[::-1])
    return [items[i] for i in order]


def _read(files: Sequence[str], target: Target) -> tuple[list[MeasuredBatch], str]:
    """The rows of tables that were measured on the target, and what to say of their origin."""
    from gpuir.fit.tables import read_table
    from gpuir.ir.errors import UsageError

    batches = [b for file in files for b in read_table(file, checkout.readers()).batches]
    mine = [b for b in batches if b.target.device == target.device]
    if not mine:
        raise UsageError(
            f"no row was measured on {target.name}",
            where=", ".join(files),
            found=_listed(b.device for b in batches),
        )
    how = f"of {', '.join(Path(f).name for f in files)}, {_today()}"
    return [replace(b, target=target) for b in mine], how


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))) or "no kernels at all"
