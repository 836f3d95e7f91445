"""`gpuir analyze --crossover`: from which size on a model is not held up by the host."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from gpuir.cli.lowering import analyze
from gpuir.cli.options import ModelRun, merged, named_targets, split_names
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
    """The search for each target and profile, from what `--dims` has on; the model is loaded at a
    few values for all of them."""
    import gpuir
    from gpuir.cli.sizes import SizedModel
    from gpuir.ir.errors import ModelError
    from gpuir.plan.crossover import crossover
    from gpuir.plan.searches import Crossing

    least = max(merged(asked.loading.dims).get(dim, 1), 1)
    most = max(MOST, least)
    warnings: list[str] = []
    runs = analyze(replace(asked, loading=asked.loading.sized((dim, least))), warnings)
    for text in warnings:
        warn(text)
    costing, loaded = asked.costing, asked.loaded
    model = SizedModel(asked.model, asked.loading, costing, loaded, warn=lambda point, text: None)
    targets = {target.name: name for target, name in named_targets(asked)}
    named = map(loaded.profile, split_names(costing.profile))
    profiles = {gpuir.load_profile(name).name: name for name in named}

    def answer(n: int, first: Answer) -> Answer | None:
        if n == least:
            return first.numbers
        profile = profiles.get(first.profile)
        try:
            return model.answer((dim, n), most, profile, targets[first.target])
        except ModelError:
            return None

    found = [crossover(partial(answer, first=first), least, most) for first in runs]
    return [Crossing(a, dim, most, x) for a, x in zip(runs, found, strict=True)]
