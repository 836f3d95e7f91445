"""The card of a trained model: what it was fitted on, what was found, how far off it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gpuir.cost.families import FAMILIES
from gpuir.cost.learned import Interval, Model
from gpuir.cost.tile import BY
from gpuir.fit.backtest import CALIBRATED_ON, Backtests, Misses, held, usual_spread
from gpuir.fit.learn import BELIEVED, COARSE, NET_DECAY, ROUNDS, ROWS
from gpuir.fit.tables import MeasuredTable

SOURCES = """\
Measurements: NeuSight artifact (Lee, Phanishayee, Mahajan, ASPLOS 2025; MIT), fp32 kernels timed
with events; ai-dynamo/aiconfigurator tables (Apache-2.0), framework operators in CUDA graphs; Vidur
profiles (Agrawal et al., MLSys 2024; MIT). The tables are not shipped.
"""


def card(
    name: str,
    tables: Sequence[MeasuredTable],
    model: Model,
    backtests: Backtests,
    *,
    seed: int,
    without: str = "",
) -> str:
    """Markdown: data, method, errors of the backtests, and every fitted number."""
    left_out = f" Left out: {without}." if without else ""
    parts = [
        f"# {name}: the weights of {BY}\n",
        "Made by `gpuir fit`; every number below is from that run.\n",
        f"## Data\n\n{SOURCES}{left_out}",
        "".join(_data(tables)),
        "## Method\n",
        f"- Rows: up to {ROWS} from each operator, dtype, stack, split and GPU, drawn with seed\n"
        f"  {seed}. Rows below twice the launch floor, rough and doubtful rows are left out.\n"
        "- Weights: each GPU weighs the same. Rows of several kernels or of a profiler count\n"
        f"  {COARSE} times, and so does a GPU that has no other rows.\n"
        "- Factors belong to an architecture, not to a GPU. On an architecture with rows from a\n"
        f"  profiler only, these can differ from the common value: {', '.join(BELIEVED)}.\n"
        f"- Tiles are chosen {ROUNDS} times, with the factors so far. Where kernel names give the\n"
        "  tile, it is that one.\n"
        "- Loss: Huber on log(predicted / measured). A penalty keeps the factors of an\n"
        "  architecture near the common value, by the spread of each factor.\n"
        f"- Networks pay for their squared weights ({NET_DECAY}). They change nothing for kinds\n"
        "  of kernels that were not measured on an architecture.\n",
        "## Kinds of kernels\n",
        "".join(_kinds(model)),
        "## Errors, mean (median) in %\n",
        "*GPU left out*: nothing of this GPU is in the fit. *Then calibrated*: with\n"
        f"{CALIBRATED_ON} of its rows of each family. *Known*: fitted on half of its\n"
        "shapes, tested on the other half.\n",
        "".join(_errors(model, backtests)),
        "## Intervals\n",
        "".join(_intervals(model, backtests)),
        "## Factors\n",
        "".join(_factors(model)),
    ]
    return "\n".join(parts)


def _data(tables: Sequence[MeasuredTable]) -> Iterator[str]:
    """Each file by its name and its folder's: where they lie is nobody's business."""
    for t in tables:
        name = "/".join(Path(t.file).parts[-2:])
        yield f"- {name}: {sum(map(len, t.batches)):,} of {t.count:,} rows\n"


def _kinds(model: Model) -> Iterator[str]:
    """What was measured, and where."""
    yield "| family | kind | architectures |\n|---|---|---|\n"
    for name, trained in model.items():
        for kind in sorted({kind for some in trained.kinds.values() for kind in some}):
            isas = ", ".join(isa for isa, some in trained.kinds.items() if kind in some)
            yield f"| {name} | {kind} | {isas} |\n"


def _errors(model: Model, backtests: Backtests) -> Iterator[str]:
    yield "| family | GPU | dtypes | rows | GPU left out | then calibrated | known |\n"
    yield "|---|---|---|---|---|---|---|\n"
    for name in model:
        tests = [test.get(name, ()) for test in backtests.places().values()]
        for device in sorted({m.device for test in tests for m in test}):
            sides = [[m for m in test if m.device == device] for test in tests]
            some = sides[0] or sides[2]
            dtypes = ", ".join(sorted({m.dtype for m in some}))
            rows = sum(len(m.error) for m in some)
            cells = " | ".join(_percent(side) for side in sides)
            yield f"| {name} | {device} | {dtypes} | {rows:,} | {cells} |\n"


def _intervals(model: Model, backtests: Backtests) -> Iterator[str]:
    """Widths, and the share of a GPU's rows that intervals from the others hold."""
    usual = [usual_spread(test) for test in (backtests.unseen, backtests.calibrated)]
    yield "The ends of the 80 % interval in % of the prediction: the mean over predicted times\n"
    yield "and dtypes. *Held* is the share in % of a GPU's rows that are in an interval from the\n"
    yield "errors of the other GPUs. In the median family GPUs differ by a factor of\n"
    yield f"exp({usual[0]:.3f}), after calibration exp({usual[1]:.3f}).\n\n"
    yield "| family | unseen | held | calibrated | held | known |\n|---|---|---|---|---|---|\n"
    shares = held(backtests.unseen), held(backtests.calibrated)
    for name, trained in model.items():
        ends = [_ends(trained.intervals.get(place)) for place in backtests.places()]
        inside = [f"{100 * s[name]:.0f}" if name in s else "-" for s in shares]
        cells = (name, ends[0], inside[0], ends[1], inside[1], ends[2])
        yield "| " + " | ".join(cells) + " |\n"


def _ends(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    low, high = (100 * np.mean(np.expm1(side)) for side in (interval.low, interval.high))
    return f"{low:+.0f} to {high:+.0f}"


def _percent(misses: Sequence[Misses]) -> str:
    if not misses:
        return "-"
    error = 100 * np.abs(np.exp(-np.concatenate([m.error for m in misses])) - 1)
    return f"{error.mean():.1f} ({np.median(error):.1f})"


def _factors(model: Model) -> Iterator[str]:
    for name, trained in model.items():
        if not trained.factors:
            continue
        yield f"### {name}\n\n| factor | value | by architecture | what |\n|---|---|---|---|\n"
        for f in FAMILIES[name].factors:
            moves = [d.get(f.name, 0.0) for d in trained.architectures.values()]
            spread = f"{np.exp(min(moves)):.2f} to {np.exp(max(moves)):.2f}" if f.spread else ""
            yield f"| {f.name} | {trained.factors[f.name]:.4g} | {spread} | {f.text} |\n"
        if trained.net is not None:
            inputs = ", ".join(FAMILIES[name].features)
            shape = "x".join(str(n) for n in trained.net.hidden.shape)
            yield f"\nNetwork {shape}, at most exp(±{FAMILIES[name].bound}), of {inputs}.\n"
        yield "\n"
