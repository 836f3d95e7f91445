"""A run of several models, or a generation, as `gpuir analyze` is asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import gpuir
from gpuir.cli import options
from gpuir.cli.lowering import Place, analyze_each, once
from gpuir.cli.options import ModelRun
from gpuir.cli.sizes import SizedModel
from gpuir.ir.errors import UsageError
from gpuir.report.answer import Answer, RunPart
from gpuir.report.parts import together
from gpuir.run.runs import check_predictor, of_lengths
from gpuir.run.terms import RunTerm, expanded
from gpuir.targets.load import load_target


def answers(asked: ModelRun, several: Sequence[RunTerm], warnings: list[str]) -> list[Answer]:
    """The answer for each target and profile; each model is loaded once for all of them."""
    for name in ("schedule", "cluster"):
        if getattr(asked.costing, name):
            raise UsageError(f"--{name} is for one model", fix="analyze the models one by one")
    if not (targets := asked.targets):
        raise UsageError("no target given", fix="--target a100; `gpuir targets` lists them")
    for name in targets:  # what is misspelt is said before the work is done
        gpuir.load_target(name)
    given = asked.loading.options(asked.loaded)
    profiles = _profiles(asked) or [None]
    found: dict[Place, list[RunPart]] = {(t, p): [] for t in targets for p in profiles}
    weights: list[tuple[str, ...]] = []
    tokens = dict.fromkeys(found, 0)
    for term in several:
        for part, lengths in expanded(term, given):
            run, own = _run(asked, part, given), {p: _place(asked, part, p) for p in found}
            if lengths is None:
                made = analyze_each(run, warnings)
                found = {p: parts for p, parts in found.items() if own[p] in made}
                for p, parts in found.items():
                    parts.append(RunPart(str(part), part.times, made[own[p]]))
            else:
                model = _sized(run, warnings)
                for p, parts in found.items():
                    parts.append(_steps(model, part, lengths, own[p]))
            weights.append(part.weights)
        for p, parts in found.items():
            if term.generate is not None:
                tokens[p] += term.times * term.generate * parts[-1].each.items
    if not found:
        raise UsageError(
            "no target and profile take all models of the run",
            found="; ".join(warnings),
            fix="another --target or --profile, or a profile for one: model.onnx:profile=ort",
        )
    return [together(parts, weights, tokens=tokens[p] or None) for p, parts in found.items()]


def _profiles(asked: ModelRun) -> list[str]:
    names = options.split_names(asked.costing.profile)
    return list(dict.fromkeys(map(asked.loaded.profile, names)))


def _place(asked: ModelRun, part: RunTerm, place: Place) -> Place:
    """Where a part runs: under its own profile, if it has one."""
    return place[0], asked.loaded.profile(part.profile) if part.profile else place[1]


def _run(asked: ModelRun, part: RunTerm, given: Any) -> ModelRun:
    """One model of the run, with the options of all and its own."""
    own = part.options(given)
    words = {name: own[name] for name, _ in part.words}
    loading = replace(asked.loading, dims=(tuple(own["dims"].items()),), past=own["past"], **words)
    costing = replace(asked.costing, profile=part.profile or asked.costing.profile)
    return replace(asked, model=part.source, loading=loading, costing=costing)


def _sized(run: ModelRun, warnings: list[str]) -> SizedModel:
    check_predictor(run.costing.predictor)
    say = once(warnings)
    return SizedModel(run.model, run.loading, run.costing, run.loaded, lambda _, text: say(text))


def _steps(model: SizedModel, part: RunTerm, lengths: range, place: Place) -> RunPart:
    """The steps of a generation in one place."""
    target, profile = str(place[0]), place[1]
    points = {"past": np.array(lengths)}
    return of_lengths(part, lengths, model.at(points, profile, load_target(target)), target)
