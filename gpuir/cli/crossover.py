"""`gpuir analyze --crossover`: from which size on a model is not held up by the host."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from gpuir.cli.lowering import analyze
from gpuir.cli.modules import Loaded
from gpuir.cli.output import show, warn

if TYPE_CHECKING:
    from gpuir.plan.searches import Crossing
    from gpuir.report.answer import Answer
    from gpuir.simulate.timeline import Timeline

MOST = 1 << 16


def show_crossover(given: dict[str, Any], loaded: Loaded) -> None:
    """The search as `--format` wants it."""
    from gpuir.backends.crossing import crossing_report
    from gpuir.backends.table import FORMATS
    from gpuir.ir.errors import UsageError

    if given["format"] not in FORMATS:
        raise UsageError(
            f"--crossover has no format {given['format']}", expected=", ".join(FORMATS)
        )
    show(crossing_report(search(given, loaded)), given)


def search(given: dict[str, Any], loaded: Loaded) -> list[Crossing]:
    """The search for each target and profile, from what `--dims` has on; a value is loaded once for
    all of them."""
    from gpuir.ir.errors import ModelError
    from gpuir.plan.crossover import crossover
    from gpuir.plan.searches import Crossing

    dim: str = given["crossover"]
    least = max(dict(pair for pairs in given["dims"] for pair in pairs).get(dim, 1), 1)

    def answers(value: int) -> list[Answer]:
        warnings: list[str] = []
        found = analyze({**given, "dims": (*given["dims"], ((dim, value),))}, loaded, warnings)
        for text in warnings if value == least else ():
            warn(text)
        return found

    @cache
    def runs(value: int) -> list[Timeline] | None:
        try:
            found = first if value == least else answers(value)
        except ModelError:
            return None
        return [a.timeline for a in found]

    def run(value: int, i: int) -> Timeline | None:
        found = runs(value)
        return None if found is None else found[i]

    first = answers(least)
    most = max(MOST, least)
    return [
        Crossing(
            model=a.model,
            device=a.device,
            profile=a.software,
            dim=dim,
            most=most,
            search=crossover(lambda value, i=i: run(value, i), least, most),
        )
        for i, a in enumerate(first)
    ]
