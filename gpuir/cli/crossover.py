"""`gpuir analyze --crossover`: from which size on a model is not held up by the host."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from gpuir.cli.lowering import analyze
from gpuir.cli.options import ModelRun, merged
from gpuir.cli.output import warn

if TYPE_CHECKING:
    from gpuir.plan.searches import Crossing
    from gpuir.report.answer import Answer
    from gpuir.report.table import Report

MOST = 1 << 16


def report(run: ModelRun, dim: str, format: str) -> Report:
    """The search, in a format that reports have."""
    from gpuir.backends.crossing import crossing_report
    from gpuir.backends.table import FORMATS
    from gpuir.ir.errors import UsageError

    if format not in FORMATS:
        raise UsageError(f"--crossover has no format {format}", expected=", ".join(FORMATS))
    return crossing_report(search(run, dim))


def search(asked: ModelRun, dim: str) -> list[Crossing]:
    """The search for each target and profile, from what `--dims` has on; a value is loaded once for
    all of them."""
    from gpuir.ir.errors import ModelError
    from gpuir.plan.crossover import crossover
    from gpuir.plan.searches import Crossing

    least = max(merged(asked.loading.dims).get(dim, 1), 1)

    def answers(value: int) -> list[Answer]:
        warnings: list[str] = []
        sized = replace(asked, loading=asked.loading.sized((dim, value)))
        found = analyze(sized, warnings)
        for text in warnings if value == least else ():
            warn(text)
        return found

    @cache
    def runs(value: int) -> list[Answer] | None:
        try:
            found = first if value == least else answers(value)
        except ModelError:
            return None
        return [a.numbers for a in found]

    def run(value: int, i: int) -> Answer | None:
        found = runs(value)
        return None if found is None else found[i]

    first = answers(least)
    most = max(MOST, least)
    return [
        Crossing(a, dim, most, crossover(lambda value, i=i: run(value, i), least, most))
        for i, a in enumerate(first)
    ]
