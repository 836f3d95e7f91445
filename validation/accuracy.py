"""How far off the tile model is: on GPUs left out of its fit, after calibration, on known ones.

    python validation/accuracy.py FILE... [--write PAGE.md] [--seed S] [--rows N]

FILEs are tables of measured kernels, as `gpuir eval kernels` takes them. Three backtests: each GPU
left out of the fit in turn; the same after a calibration on 32 rows of each family of the GPU left
out; half of the shapes left out, all GPUs fitted. Beside them the roofline on the same rows, and
the error that NeuSight's authors publish for GPUs it was not trained on. Rows on the launch floor
are left out here; `gpuir eval kernels` shows them. Plots of the residuals go beside the
text. Needs gpuir[torch,eval,plot].
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from gpuir.cost.families import family_of
from gpuir.cost.learned import Model
from gpuir.fit.backtest import Backtests, halves, leave_one_out, misses, with_intervals
from gpuir.fit.batch import MeasuredBatch
from gpuir.fit.calibrate import calibration
from gpuir.fit.learn import fitted, usable
from gpuir.fit.score import drawn, forecast, tile_score
from gpuir.targets.target import Target
from validation.readers import read_table

CALIBRATED_ON = 32  # rows of each family and GPU


@dataclass(frozen=True)
class Goal:
    """A kind of kernel, what its mean error on an unseen GPU is to be at most, in percent, and what
    NeuSight's authors publish of theirs (ASPLOS 2025, per-operator errors, out of distribution)."""

    title: str
    at_most: float | None
    published: float | None
    holds: Callable[[MeasuredBatch], bool]


def _family(batch: MeasuredBatch) -> str:
    return family_of(batch.works[-1], batch.target).name


EAGER = ("fp32",)
GOALS = (
    Goal("GEMM, fp32", 8, 14, lambda b: b.op in ("bmm", "linear") and b.dtype in EAGER),
    Goal(
        "elementwise",
        8,
        19,
        lambda b: b.dtype in EAGER and _family(b) == "stream",
    ),
    Goal("softmax", 8, 14, lambda b: b.op == "softmax" and b.dtype in EAGER),
    Goal("layer norm", 10, 57, lambda b: b.op == "layernorm" and b.dtype in EAGER),
    Goal("convolution, fp32", 15, None, lambda b: b.works[-1].kernel == "k.conv"),
    Goal(
        "GEMM, matrix units",
        10,
        None,
        lambda b: b.works[-1].kernel == "k.gemm" and b.dtype not in EAGER,
    ),
    Goal("attention", 12, None, lambda b: b.works[-1].kernel == "k.attention"),
    Goal("mixture of experts", 15, None, lambda b: b.works[-1].kernel == "k.experts"),
    Goal("other", None, None, lambda b: True),
)


@dataclass(frozen=True)
class Rows:
    """Rows of one goal, GPU and operator: seconds measured, predicted and by the roofline."""

    goal: str
    device: str
    op: str
    dtype: str
    real: np.ndarray
    predicted_s: np.ndarray
    roof: np.ndarray
    inside: np.ndarray
    apart: str = ""  # why the rows are not what the model was made for

    @property
    def error(self) -> np.ndarray:
        return 100 * np.abs(self.predicted_s - self.real) / self.real

    @property
    def roof_error(self) -> np.ndarray:
        return 100 * np.abs(self.roof - self.real) / self.real


def predicted(batches: Iterable[MeasuredBatch], models: Mapping[str, Model]) -> list[Rows]:
    """Each batch's rows that tell of the GPU, predicted by the model of its GPU."""
    rows: list[Rows] = []
    for batch in batches:
        batch = batch.take(~batch.on_floor)
        if not len(batch):
            continue
        goal = next(g.title for g in GOALS if g.holds(batch))
        f = forecast(batch, models.get(batch.target.device))
        real = batch.latency_s
        inside = (f.low_s <= real) & (real <= f.high_s)
        rows.append(
            Rows(
                goal,
                batch.target.device,
                batch.op,
                batch.dtype,
                real,
                f.time_s,
                f.roofline_s,
                inside,
                batch.suspect or ("rough" if batch.rough else ""),
            )
        )
    return rows


def over_gpus(rows: Iterable[Rows], what: Callable[[Rows], np.ndarray]) -> float:
    """The mean over GPUs of the mean over a GPU's rows."""
    of: dict[str, list[np.ndarray]] = {}
    for r in rows:
        of.setdefault(r.device, []).append(what(r))
    return float(np.mean([np.concatenate(parts).mean() for parts in of.values()]))


def of(rows: Iterable[Rows], goal: Goal, apart: bool = False) -> list[Rows]:
    """The rows of a goal; those told apart too, or not."""
    return [r for r in rows if r.goal == goal.title and (apart or not r.apart)]


# ---------------------------------------------------------------------------- the text


def headline(backtests: Mapping[str, Sequence[Rows]]) -> str:
    unseen, after, known = backtests.values()
    lines = [
        "| kernel | GPUs | rows | roofline | published | goal | unseen GPU | inside "
        "| after 32 rows | inside | known GPU | inside | unseen, with the rows below |",
        "|" + "---|" * 13,
    ]
    for goal in GOALS:
        left_out, moved, own = (of(t, goal) for t in (unseen, after, known))
        if not left_out:
            continue
        count = sum(len(r.real) for r in left_out)
        cells = [
            goal.title,
            str(len({r.device for r in left_out})),
            f"{count:,}",
            f"{over_gpus(left_out, lambda r: r.roof_error):.1f}",
            "" if goal.published is None else f"{goal.published:g}",
            "" if goal.at_most is None else f"{goal.at_most:g}",
            f"{over_gpus(left_out, lambda r: r.error):.1f}",
            f"{100 * over_gpus(left_out, lambda r: r.inside):.0f}",
            f"{over_gpus(moved, lambda r: r.error):.1f}" if moved else "",
            f"{100 * over_gpus(moved, lambda r: r.inside):.0f}" if moved else "",
            f"{over_gpus(own, lambda r: r.error):.1f}" if own else "",
            f"{100 * over_gpus(own, lambda r: r.inside):.0f}" if own else "",
            f"{over_gpus(of(unseen, goal, apart=True), lambda r: r.error):.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def by_gpu(backtests: Mapping[str, Sequence[Rows]], goal: Goal) -> str:
    unseen, after, known = backtests.values()
    lines = [
        "| GPU | operator | dtype | rows | roofline | unseen | bias | median | p90 | after 32 rows "
        "| known |",
        "|" + "---|" * 11,
    ]

    def mean(rows: Sequence[Rows], like: Rows) -> str:
        some = [r.error for r in of(rows, goal) if _place(r) == _place(like)]
        return f"{np.concatenate(some).mean():.1f}" if some else ""

    places: dict[tuple[str, ...], list[Rows]] = {}
    for r in of(unseen, goal):
        places.setdefault(_place(r), []).append(r)
    for place, rows in sorted(places.items()):
        error = np.concatenate([r.error for r in rows])
        roof = np.concatenate([r.roof_error for r in rows])
        bias = np.concatenate([100 * (r.predicted_s - r.real) / r.real for r in rows])
        cells = [
            *place,
            f"{len(error):,}",
            f"{roof.mean():.1f}",
            f"{error.mean():.1f}",
            f"{bias.mean():+.1f}",
            f"{np.median(error):.1f}",
            f"{np.quantile(error, 0.9):.1f}",
            mean(after, rows[0]),
            mean(known, rows[0]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _place(r: Rows) -> tuple[str, str, str]:
    op = "all" if r.goal == "elementwise" else r.op
    return r.device, op, r.dtype


APART = """\
## Rows that are set apart

Nothing was fitted to the following rows, and most numbers of this page leave them out. Only the
last column of the table above counts them. There are two kinds:

- *Rough* rows: the table does not say all that ran. Examples are fp8 caches whose arithmetic is not
  stated, library versions that launch more than the kernel, and P4's linear layers, which two
  paths of cuBLAS ran.
- Suspect rows: the GPU was at a lower clock while they were measured.
"""


def told_apart(rows: Sequence[Rows]) -> str:
    lines = ["| kernel | GPU | operator | dtype | why | rows | unseen |", "|" + "---|" * 7]
    places: dict[tuple[str, ...], list[Rows]] = {}
    for r in rows:
        if r.apart:
            places.setdefault((r.goal, r.device, r.op, r.dtype, r.apart), []).append(r)
    for place, some in sorted(places.items()):
        error = np.concatenate([r.error for r in some])
        lines.append("| " + " | ".join([*place, f"{len(error):,}", f"{error.mean():.1f}"]) + " |")
    return "\n".join(lines) + "\n"


TILES = """\
How often does gpuir predict the tile that the library chose? The names and grids of the launched
kernels say what ran. The factors were fitted without the GPU. But the rules that choose a tile, one
for each architecture, were fitted to these very names. The rule of one architecture is not right
for another: A100's finds 48 % of the tiles of V100's linear layers, and 28 % of T4's. So on an
architecture without names gpuir takes the fastest of Ampere's kernels, and a little longer
([how much](#an-architecture-without-names)). The last two columns are mean errors, with the
predicted tile and with the library's.
"""

UNREAD = """\
### An architecture without names

What does a library choose where no names were read? In this table the names of one architecture
are taken away, for 3,000 of its linear layers each. Candidates are the kernels of A100 (of V100 for
A100), and the factors are those of an unknown GPU. A cell has the mean error of the time in
percent, then how far the rule is from the formulas' time of the kernel that ran, on average.

| rule | A100 | T4 | V100 | P100 | P4 |
|---|---|---|---|---|---|
| the kernel that ran | 10.6 | 13.8 | 9.6 | 15.6 | 40.5 |
| the fastest | 14.5, -6.7 | 14.8, -4.2 | 10.9, -3.8 | 25.0, -23 | 46.2, -18 |
| the other architecture's rule | 13.7, -1.9 | 15.7, +2.8 | 12.6, +1.5 | 21.6, -9.7 | 43.5, -6.0 |
| that, to 1.25 of the fastest | 13.3, -3.3 | 15.2, +1.3 | 12.0, -0.1 | 24.4, -19 | 44.7, -14 |
| mean of all to 1.1 of the fastest | 13.5, -4.0 | 14.3, -1.1 | 10.8, -0.9 | 24.2, -21 | 45.2, -15 |
| mean of all to 1.25 | 12.1, +2.9 | 15.8, +6.0 | 12.8, +4.7 | 21.6, -15 | 43.1, -9 |
| the fastest, 4 % longer | 13.0, -2.8 | 14.2, -0.3 | 10.8, +0.1 | 23.0, -19 | 44.7, -14 |
| the fastest, 5 % longer | 12.8, -1.8 | 14.2, +0.7 | 11.0, +1.1 | 22.6, -18 | 44.4, -13 |
| the fastest, by tiles (taken) | 13.7, -2.2 | 14.1, -0.7 | 11.0, +0.3 | 23.4, -19 | 45.0, -15 |

On the three that are most like later ones a library's kernel is 4 to 7 % slower than the fastest:
1 to 6 % where there are more tiles of 128 x 128 than SMs, 6 to 16 % where there are less than
half as many. So gpuir takes 2.5 % longer than the fastest, and 10 % more times exp(-tiles / (0.4
SMs)). A constant factor is as good over these rows, but models have large products: torch.mm of
squares on later boards (specs/measurements/torch-mm.csv) is 2 % slower than the fastest on
average, and 5 % on an H100 SXM at 1024. It depends on the product and the number of SMs alone,
so it keeps the order of GPUs. Batches have one kernel on A100, P100 and P4, and a choice of their
own on T4 and V100; for them nothing was changed, and A100's kernel stands for an unknown GPU's.

Whole models in f32, eager, with all that was found of an architecture taken away (names, factors,
network): V100 is off by +3.0 % (known: -2.5), its training steps by +6.6 (-1.6), P100 by -3.7
(-0.9), A100 by -7.5 (+1.5).
"""


def tile_choice(batches: Iterable[MeasuredBatch], models: Mapping[str, Model]) -> str:
    """How often the predicted tile is the library's, and what that is worth."""
    lines = [
        "| GPU | operator | rows | tile right | tile and split right | error, predicted tile "
        "| error, library's tile |",
        "|" + "---|" * 7,
    ]
    for batch in batches:
        t = tile_score(batch, models.get(batch.target.device))
        if t is not None:
            cells = [batch.target.device, batch.op, f"{t.n:,}"]
            cells += [f"{share:.0f} %" for share in (t.same, t.same_split)]
            lines.append("| " + " | ".join([*cells, f"{t.mape:.1f}", f"{t.mape_ran:.1f}"]) + " |")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------- plots


def plot(rows: Sequence[Rows], goal: Goal, path: Path) -> None:
    """Predicted over measured against time, a colour a GPU."""
    import_module("matplotlib").use("agg")
    plt: Any = import_module("matplotlib.pyplot")
    figure, axes = plt.subplots(figsize=(8, 4))
    draw = np.random.default_rng(0)
    for device in sorted({r.device for r in rows}):
        own = [r for r in rows if r.device == device]
        real = np.concatenate([r.real for r in own])
        ratio = np.concatenate([r.predicted_s for r in own]) / real
        some = draw.permutation(len(real))[:600]
        axes.scatter(real[some] * 1e6, ratio[some], s=4, alpha=0.5, label=device)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set_ylim(0.25, 4)
    axes.set_xlabel("measured, us")
    axes.set_ylabel("predicted / measured")
    axes.set_title(f"{goal.title}: each GPU predicted by a model fitted without it")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, markerscale=3, ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ---------------------------------------------------------------------------- the run


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=20_000, help="of a batch, drawn to be scored")
    given = parser.parse_args()
    begun = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begun:6.0f} s  {text}", file=sys.stderr)

    whole = [batch for file in given.files for batch in read_table(file).batches]
    say(f"{sum(map(len, whole)):,} rows")
    models = leave_one_out(whole, seed=given.seed, watch=say)  # as `gpuir fit` leaves them out
    draw = np.random.default_rng(given.seed)
    batches: list[MeasuredBatch] = []
    for batch in whole:
        rows = np.sort(draw.permutation(len(batch))[: given.rows])
        batches.append(batch.take(rows) if len(rows) < len(batch) else batch)
    say(f"{sum(map(len, batches)):,} rows to score")
    unseen = predicted(batches, models)
    seen, rest = drawn(batches, CALIBRATED_ON, given.seed)
    targets: dict[str, Target] = {}
    for name in dict.fromkeys(b.target.name for b in seen):
        mine = [b for b in seen if b.target.name == name]
        start = mine[0].target
        targets[name], _ = calibration(start, mine, model=models[start.device])
        say(f"calibrated {name}")
    moved = [replace(b, target=targets.get(b.target.name, b.target)) for b in rest]
    after = predicted(moved, models)
    first, second = halves(batches, given.seed)
    known = known_errors(first, second, given.seed)
    backtests = {"unseen": unseen, "after": after, "known": known}
    text = document(backtests, tile_choice(batches, models), given.write)
    if given.write is None:
        print(text)
    else:
        given.write.write_text(text)
    say("done")


INTRODUCTION = """\
# Accuracy of kernels

How far off are predictions of single kernels? This page has the errors by family of kernels, then
by GPU, operator and data type. `python -m validation.accuracy` writes it from tables of measured
kernels; [the card of the weights](weights.md) has their sources.

All errors are mean absolute errors in percent of the measurement. Each GPU counts alike: first the
mean over the rows of a GPU is taken, then the mean over GPUs. The columns:

| column | meaning |
|---|---|
| rows | measured kernels, without those at the launch floor, where the host's time dominates |
| roofline | the error of a plain roofline on the same rows |
| published | what NeuSight's authors published for GPUs that it was not trained on |
| goal | what the project wanted to reach on unseen GPUs |
| unseen | the cost model was fitted without that GPU |
| after 32 rows | the same, calibrated with 32 rows of each family; the other rows are scored |
| known | half of the shapes were fitted, the other half is scored, both ways |
| inside | percentage of rows inside their 80 % interval |
| bias | mean signed error; positive where gpuir predicts too slow |
| median, p90 | median and 90th percentile of the absolute error |

No row helped to make the interval that it is compared with. An interval for an unseen GPU comes
from the errors of the other GPUs. One for a known GPU comes from the other half of the shapes.
"""


def known_errors(first: list[MeasuredBatch], second: list[MeasuredBatch], seed: int) -> list[Rows]:
    """One half of the shapes by a model fitted to the other, and the other way round. Intervals
    come from the half that is not predicted."""
    sides = [usable(side, seed) for side in (first, second)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        models = list(pool.map(partial(fitted, seed=seed), sides))
    errors = [misses(side, model) for side, model in zip(reversed(sides), models, strict=True)]
    rows: list[Rows] = []
    for model, own, other in ((models[0], second, errors[1]), (models[1], first, errors[0])):
        complete = with_intervals(model, Backtests(known=other))
        rows += predicted(own, {b.target.device: complete for b in own})
    return rows


def document(backtests: Mapping[str, Sequence[Rows]], choices: str, path: Path | None) -> str:
    parts = [
        INTRODUCTION,
        headline(backtests),
        APART,
        told_apart(backtests["unseen"]),
        "## Tile choice\n",
        TILES,
        choices,
        UNREAD,
    ]
    for goal in GOALS:
        rows = of(backtests["unseen"], goal)
        if not rows:
            continue
        parts.append(f"## {goal.title}\n")
        if path is not None:
            name = goal.title.lower().replace(",", "").replace(" ", "-")
            folder = path.with_suffix("")
            folder.mkdir(parents=True, exist_ok=True)
            plot(rows, goal, folder / f"{name}.png")
            parts.append(f"![{goal.title}]({folder.name}/{name}.png)\n")
        parts.append(by_gpu(backtests, goal))
    return "\n".join(parts)


if __name__ == "__main__":
    main()
