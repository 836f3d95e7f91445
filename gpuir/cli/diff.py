"""`gpuir diff`: two reports or two versions of a model compared, and budgets for what changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click

from gpuir.cli import options
from gpuir.cli.lowering import analyze
from gpuir.cli.modules import Loaded
from gpuir.cli.output import emit, note, show, warn
from gpuir.cli.request import ask, held, option, request

if TYPE_CHECKING:
    from gpuir.report.saved import SavedRun

ALWAYS = (  # the options that mean something for reports too
    *("old", "new", "budgets", "target", "profile"),
    *("format", "top", "width", "output", "modules", "verbose"),
)


@dataclass(frozen=True)
class DiffOptions:
    old: str = ask(click.argument("old", type=click.Path()))
    new: str = ask(click.argument("new", type=click.Path()))
    budgets: tuple[str, ...] = option(
        "How much latency, device, host, memory, launches, flops, bytes, dram, unfitted or "
        "opaque may be: latency=+3%, memory=+100MB, launches=+0, latency=12ms.",
        "--budget",
        multiple=True,
        metavar="latency=+3%",
    )
    target: str | None = ask(options.target("A GPU, or several. Of reports, the runs to compare."))
    loading: options.LoadingOptions = held(options.LoadingOptions)
    costing: options.Costing = held(options.Costing)
    format: str = ask(options.formats(["junit"]))
    top: int = option("Kernels listed.", type=click.IntRange(0), default=15)
    width: int | None = ask(options.width)
    output: str | None = ask(options.output)
    loaded: Loaded = ask(options.load_modules)
    verbose: bool = ask(options.verbose)


@request(DiffOptions)
def command(asked: DiffOptions) -> None:
    """Show what changed between two runs, kernel by kernel.

    OLD and NEW are reports (`gpuir analyze --format json`) or models. A model beside a report is
    analyzed for the report's targets and profiles. The exit status is 1 if a budget is exceeded.

    \b
    gpuir diff old.json new.json
    gpuir diff old.onnx new.onnx --target a100,l4 --dims batch=8
    gpuir diff main.json model.onnx --dims batch=8 --budget latency=+3% --budget launches=+0
    gpuir diff old.json new.json --budget memory=+100MB --format junit -o budgets.xml
    """
    from gpuir.backends.diff import diff_report, junit
    from gpuir.report.diff import checks, compare, read_budget

    budgets = [read_budget(text) for text in asked.budgets]
    diffs = compare(*runs(asked))
    checked = checks(diffs, budgets)
    if asked.format == "junit":
        emit(junit(checked), asked.output)
    else:
        show(diff_report(diffs, checked, asked.top), asked.format, asked.width, asked.output)
    over = [c for c in checked if not c.is_kept]
    for c in over:
        note(f"gpuir: over budget: {c.budget.text} on {c.diff.name}")
    if over:
        raise click.exceptions.Exit(1)


def runs(asked: DiffOptions) -> tuple[tuple[SavedRun, ...], tuple[SavedRun, ...]]:
    """What to compare. A model is analyzed for the targets and profiles that are asked for, else
    for those of the report beside it."""
    old, new = asked.old, asked.new
    reports = {path: read(path, asked) for path in (old, new) if is_report(path)}
    if old in reports and new in reports:
        refuse_model_options()
        return reports[old], reports[new]
    beside = next(iter(reports.values()), ())
    old_runs, new_runs = (
        reports[path] if path in reports else analyzed(path, asked, beside) for path in (old, new)
    )
    return old_runs, new_runs


def is_report(path: str) -> bool:
    return path.endswith(".json") and not path.startswith("hf:")


def read(path: str, asked: DiffOptions) -> tuple[SavedRun, ...]:
    """The runs of a report; of `--target` and `--profile` alone where those are given."""
    import gpuir
    from gpuir.files import read_text
    from gpuir.ir.errors import UsageError
    from gpuir.report.saved import read_report

    found = read_report(read_text(path, "the report"), path)
    wanted = {
        "target": [
            gpuir.load_target(asked.costing.on(asked.loaded.target(name))).name
            for name in options.split_targets(asked.target)
        ],
        "profile": [
            gpuir.load_profile(asked.loaded.profile(name)).name
            for name in options.split_names(asked.costing.profile)
            if not name.startswith("+")  # a host alone chooses no run
        ],
    }
    for kind, names in wanted.items():
        has = list(dict.fromkeys(getattr(run, kind) for run in found))
        if missing := [name for name in names if name not in has]:
            raise UsageError(
                f"the report has no {kind} {missing[0]}", where=path, found=", ".join(has)
            )
        found = tuple(run for run in found if not names or getattr(run, kind) in names)
    return found


def refuse_model_options() -> None:
    """UsageError for an option that would change nothing, as both sides are reports."""
    from click.core import ParameterSource

    from gpuir.ir.errors import UsageError

    context = click.get_current_context()
    for param in context.command.params:
        given = context.get_parameter_source(str(param.name)) == ParameterSource.COMMANDLINE
        if given and param.name not in ALWAYS:
            raise UsageError(
                f"{param.opts[0]} is for models, and both sides are reports",
                fix="give it to `gpuir analyze`, which makes the reports",
            )


def analyzed(path: str, asked: DiffOptions, beside: tuple[SavedRun, ...]) -> tuple[SavedRun, ...]:
    """A model as a report has it."""
    from gpuir.backends.analysis import analysis_report
    from gpuir.backends.structured import to_json
    from gpuir.backends.terminal import Terminal
    from gpuir.report.saved import read_report

    costing = asked.costing
    target = asked.target or ",".join(dict.fromkeys(run.target for run in beside))
    profile = costing.profile or ",".join(dict.fromkeys(run.profile for run in beside))
    run = options.ModelRun(
        path, target, asked.loading, replace(costing, profile=profile), asked.loaded
    )
    warnings: list[str] = []
    answers = analyze(run, warnings)
    for text in warnings:
        warn(text)
    found = read_report(to_json(analysis_report(answers, Terminal()), Terminal()), path)
    names = {run.name for run in beside}
    return tuple(run for run in found if not names or run.name in names)
