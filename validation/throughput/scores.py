"""How far predictions are from published throughputs, table by table, and what they decide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike

from gpuir.fit.columns import Floats
from gpuir.fit.score import Errors, RowErrors, errors_of, row_errors
from validation.throughput.cases import Program
from validation.throughput.predict import Result

# Models so far apart, measured, are a choice that someone has to make; nearer ones differ by less
# than the same model does from one version of PyTorch to the next.
NEAR = (1.05, 1.5)


@dataclass(frozen=True)
class TableScore:
    """The errors of a table's cases, of time by case. `spearman` is the correlation of ranks of
    time by sample, of `near` pairs of cases 5 to 50 % apart the share `ordered` is in the right
    order: both NaN where all cases are of one model. `halves` are the errors by half of the models.
    """

    table: str
    errors: RowErrors
    halves: dict[str, Errors]
    spearman: float
    near: int
    ordered: float


@dataclass(frozen=True)
class Gain:
    """By how much a change makes models faster, on one GPU with one software: `measured` and
    `predicted` are medians of old time by new, `spearman` says whether it is for the right ones."""

    change: str
    of: str
    models: tuple[str, ...]
    measured: float
    predicted: float
    error: float  # mean absolute one of the gain, in percent of it
    spearman: float


def scored(results: Sequence[Result]) -> list[TableScore]:
    """Each table, in the order of its first case; those without a prediction are left out."""
    tables: dict[str, list[Result]] = {}
    for case, p in results:
        if not p.why:
            tables.setdefault(case.table, []).append((case, p))
    return [_scored(name, some) for name, some in tables.items()]


def _scored(name: str, results: Sequence[Result]) -> TableScore:
    measured = np.array([c.measured_s for c, _ in results])
    found = np.array([(p.time_s, p.low_s, p.high_s, p.roofline_s) for _, p in results]).T
    signed = 100 * (found[0] / measured - 1)
    half = np.array([c.half for c, _ in results])
    batches = np.array([c.program.batch for c, _ in results])
    same = len({c.program.model for c, _ in results}) < 2
    near, ordered = pairs(measured / batches, found[0] / batches)
    return TableScore(
        table=name,
        errors=row_errors(np.vstack([measured, found, np.full((1, len(measured)), np.nan)])),
        halves={h: errors_of(signed[half == h]) for h in sorted(set(half))},
        spearman=np.nan if same else spearman(measured / batches, found[0] / batches),
        near=0 if same else near,
        ordered=np.nan if same else ordered,
    )


def pairs(measured: Floats, predicted: Floats) -> tuple[int, float]:
    """How many pairs are near each other, and the share of them that is in the right order."""
    right = [
        (measured[i] < measured[j]) == (predicted[i] < predicted[j])
        for i, j in combinations(range(len(measured)), 2)
        if NEAR[0] <= max(measured[i] / measured[j], measured[j] / measured[i]) <= NEAR[1]
    ]
    return len(right), float(np.mean(right)) if right else np.nan


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """The correlation of ranks; equal numbers share the mean of theirs."""
    if len(np.unique(a)) < 2 or len(np.unique(b)) < 2:
        return np.nan
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(a: ArrayLike) -> Floats:
    _, place, count = np.unique(a, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


# ---------------------------------------------------------------------------- gains


def gains(results: Sequence[Result]) -> list[Gain]:
    """Of torch.compile over eager mode, and of channels last over first; the rest being equal but
    the batch, which differs between tables: times are by sample."""
    known = [(c, p) for c, p in results if not p.why and c.program.kind == "image"]
    modes: dict[Alike, dict[str, Result]] = {}
    layouts: dict[Alike, dict[str, Result]] = {}
    for case, p in known:
        program = replace(case.program, batch=0)
        of = f"{case.gpu} {case.layout} {case.software}"
        modes.setdefault((of, program), {})[case.mode] = (case, p)
        of = f"{case.gpu} {case.mode} {case.software}"
        layouts.setdefault((of, replace(program, nhwc=False)), {})[case.layout] = (case, p)
    return [
        *_gains("compile", modes, "eager", "compile"),
        *_gains("channels last", layouts, "nchw", "nhwc"),
    ]


Alike = tuple[str, Program]  # what is compared, and a program without its batch


def _gains(
    change: str, pairs: Mapping[Alike, Mapping[str, Result]], old: str, new: str
) -> Iterator[Gain]:
    groups: dict[str, list[tuple[Result, Result]]] = {}
    for (of, _), sides in pairs.items():
        if old in sides and new in sides:
            groups.setdefault(of, []).append((sides[old], sides[new]))
    for of, some in groups.items():
        measured = np.array([a.sample_s / b.sample_s for (a, _), (b, _) in some])
        predicted = np.array([_sample_s(a) / _sample_s(b) for a, b in some])
        yield Gain(
            change,
            of,
            tuple(case.program.model for (case, _), _ in some),
            measured=float(np.median(measured)),
            predicted=float(np.median(predicted)),
            error=100 * float(np.mean(np.abs(predicted / measured - 1))),
            spearman=spearman(measured, predicted),
        )


def _sample_s(result: Result) -> float:
    case, p = result
    return p.time_s / case.program.batch
