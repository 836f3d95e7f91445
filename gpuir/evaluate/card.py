"""The card of a trained model: what it was fitted on, what was found, how far off it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gpuir.cost.families import FAMILIES
from gpuir.cost.learned import Model
from gpuir.cost.tile import BY
from gpuir.evaluate.backtest import Backtest, Misses
from gpuir.evaluate.fit import COARSE, NET_DECAY, ROUNDS, ROWS
from gpuir.evaluate.tables import Table

SOURCES = """\
Measurements: NeuSight artifact (Lee, Phanishayee, Mahajan, ASPLOS 2025; MIT), fp32 kernels timed
with events; ai-dynamo/aiconfigurator tables (Apache-2.0), framework operators in CUDA graphs; Vidur
profiles (Agrawal et al., MLSys 2024; MIT). Facts alone were taken, and they are not shipped.
"""


def card(
    name: str,
    tables: Sequence[Table],
    model: Model,
    unseen: Backtest,
    known: Backtest,
    *,
    seed: int,
    without: str = "",
) -> str:
    """Markdown: data, method, errors of the backtests, and every fitted number."""
    left_out = f" Left out: {without}." if without else ""
    parts = [
        f"# {name}: the weights of {BY}\n",
        "Made by `gpuir train`; every number below is from that run.\n",
        f"## Data\n\n{SOURCES}{left_out}",
        "".join(_data(tables)),
        "## Method\n",
        f"Up to {ROWS} rows drawn by seed {seed} from each operator, dtype, stack, split and GPU;\n"
        "rows below twice the launch floor, rough and doubtful ones left out. GPUs weigh alike;\n"
        f"rows of several kernels, or of a profiler, {COARSE} of others. Tiles are chosen anew\n"
        f"{ROUNDS} times, and are those that ran where kernel names say them. Huber loss on\n"
        "log(predicted / measured). The spread of a factor holds back what it may be on one GPU;\n"
        f"networks pay for their squared weights ({NET_DECAY}).\n",
        "## Errors, mean (median) in %\n",
        "".join(_errors(model, unseen, known)),
        "## Factors\n",
        "".join(_factors(model)),
    ]
    return "\n".join(parts)


def _data(tables: Sequence[Table]) -> Iterator[str]:
    """Each file by its name and its folder's: where they lie is nobody's business."""
    for t in tables:
        name = "/".join(Path(t.file).parts[-2:])
        yield f"- {name}: {sum(map(len, t.batches)):,} of {t.count:,} rows\n"


def _errors(model: Model, unseen: Backtest, known: Backtest) -> Iterator[str]:
    yield "| family | GPU | dtypes | rows | GPU left out | half of its shapes left out |\n"
    yield "|---|---|---|---|---|---|\n"
    for name in model:
        devices = sorted({m.device for m in (*unseen.get(name, ()), *known.get(name, ()))})
        for device in devices:
            sides = [[m for m in t.get(name, ()) if m.device == device] for t in (unseen, known)]
            some = sides[0] or sides[1]
            dtypes = ", ".join(sorted({m.dtype for m in some}))
            rows = sum(len(m.error) for m in some)
            left, half = (_percent(side) for side in sides)
            yield f"| {name} | {device} | {dtypes} | {rows:,} | {left} | {half} |\n"


def _percent(misses: Sequence[Misses]) -> str:
    if not misses:
        return "-"
    error = 100 * np.abs(np.exp(-np.concatenate([m.error for m in misses])) - 1)
    return f"{error.mean():.1f} ({np.median(error):.1f})"


def _factors(model: Model) -> Iterator[str]:
    for name, trained in model.items():
        yield f"### {name}\n\n| factor | value | from GPU to GPU | what |\n|---|---|---|---|\n"
        for f in FAMILIES[name].factors:
            moves = [d.get(f.name, 0.0) for d in trained.devices.values()]
            spread = f"{np.exp(min(moves)):.2f} to {np.exp(max(moves)):.2f}" if f.spread else ""
            yield f"| {f.name} | {trained.factors[f.name]:.4g} | {spread} | {f.what} |\n"
        if trained.net is not None:
            inputs = ", ".join(FAMILIES[name].features)
            shape = "x".join(str(n) for n in trained.net.hidden.shape)
            yield f"\nNetwork {shape}, at most exp(±{FAMILIES[name].bound}), of {inputs}.\n"
        yield "\n"
