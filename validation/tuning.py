"""`gpuir eval tuning`: how well predictions rank the configurations of tuned kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import numpy as np

from gpuir.backends.scores import SCHEMA, left_out, number
from gpuir.cli.exam import FILES, ExamOutput, ScoredRow, commands_report
from gpuir.cli.output import note
from gpuir.cli.request import ask, held, option, request
from gpuir.cost import generated
from gpuir.cost.generated import Fitted
from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Number
from gpuir.cost.work import Work
from gpuir.fit.columns import Floats
from gpuir.ir.errors import UsageError
from gpuir.report.table import Column, Notes, Part, Report, Table, fields
from gpuir.tune.calls import call_of, tiles_call
from validation.tuned import SIZES, SWEPT, Problem, Skipped, read

NEAR = 1.05  # of the best time: as good as it, for a tuner
BEST = 0.1  # share of a space that winners are looked for in
ROWS = 64  # problems predicted at once
GOALS = {"within_5pct_in_10": 90.0, "regret_1": 20.0, "winner_in_best_tenth": 80.0}  # percent


@dataclass(frozen=True)
class Swept:
    """How predictions rank one sweep. Regrets are what the best of the first k costs over the best
    of all, in percent; `recall_10` is the share of the ten fastest among the predicted fastest
    tenth; `tau` is Kendall's. `random` is the mean regret of one drawn at random, `elsewhere` that
    of what was best on another GPU, where one was swept."""

    file: str
    kernel: str
    target: str
    n: int
    regret_1: float
    regret_5: float
    regret_10: float
    recall_10: float
    tau: float
    random: float
    elsewhere: float | None
    bias: float  # mean of predicted over measured of those within twice the best, in percent off
    coverage: float  # share of those in the 80 % interval, in percent


@dataclass(frozen=True)
class Won:
    """Where predictions rank the configurations that won, as shares of the space: 0 is the first.
    Configurations predicted alike are half before it. `usual` are the same for the order of how
    often configurations win on other GPUs."""

    file: str
    kernel: str
    target: str
    dtype: str
    n: int  # configurations
    problems: int
    in_best_tenth: float  # of problems, in percent
    mean_rank: float
    median_rank: float
    illegal: int  # winners that predictions take for illegal: their rank is 1
    usual_in_best_tenth: float | None


def predicted(p: Problem, rows: slice, given: Fitted | None = None) -> tuple[Floats, Any]:
    """Seconds of configurations, of some of the problems of a table of winners, and whether each is
    legal."""
    time_s: Any = 0.0
    legal: Any = True
    for work in p.works:
        some = work.each(lambda n: n[rows] if np.ndim(n) else n)
        tiles = p.tiles.each(lambda n: n[rows] if np.ndim(n) and np.shape(n)[1:] == (1,) else n)
        counted = generated.counts(some, tiles, p.target)
        found = generated.estimate(some, tiles, p.target, counted=counted, given=given)
        time_s = time_s + found.time_s
        for need in generated.needs(some, tiles, p.target, counted):
            legal = legal & (np.asarray(need.wants) <= need.has)
    return time_s, np.broadcast_to(legal, np.shape(time_s))


def swept(p: Problem, others: Sequence[Problem], given: Fitted | None = None) -> Swept:
    """How predictions rank one sweep."""
    measured = p.time_s
    assert measured is not None
    time_s, _ = predicted(p, slice(None), given)
    order = np.argsort(time_s, kind="stable")
    best = measured.min()

    def regret(k: int) -> float:
        return 100 * float(measured[order[:k]].min() / best - 1)

    fastest = np.argsort(measured, kind="stable")[:10]
    tenth = order[: max(len(order) // 10, 10)]
    near = measured <= 2 * best
    mean: float = measured.mean()
    off: float = np.log(time_s[near] / measured[near]).mean()
    low, high = generated.interval(p.works[0], p.target, time_s)
    held: Any = (low <= measured) & (measured <= high)
    return Swept(
        p.file,
        p.kernel,
        p.gpu,
        p.count,
        *(regret(1), regret(5), regret(10)),
        recall_10=float(np.isin(fastest, tenth).mean()),
        tau=kendall(time_s, measured),
        random=100 * (float(mean) / float(best) - 1),
        elsewhere=_elsewhere(p, others),
        bias=100 * (float(np.exp(off)) - 1),
        coverage=100 * float(held[near].mean()),
    )


def _elsewhere(p: Problem, others: Sequence[Problem]) -> float | None:
    """The mean regret of what was best on other GPUs."""
    here = {key: i for i, key in enumerate(_keys(p))}
    assert p.time_s is not None
    found: list[float] = []
    for other in others:
        if other.kernel == p.kernel and other.gpu != p.gpu and other.time_s is not None:
            place = here.get(_keys(other)[int(np.argmin(other.time_s))])
            if place is not None:
                found.append(100 * float(p.time_s[place] / p.time_s.min() - 1))
    return float(np.mean(found)) if found else None


def _keys(p: Problem) -> list[tuple[float, ...]]:
    columns: list[Any] = []
    p.tiles.each(columns.append)
    spread = [np.broadcast_to(np.asarray(c, float), (p.count,)) for c in columns]
    return list(map(tuple, np.stack(spread, axis=1).tolist()))


def kendall(x: Floats, y: Floats) -> float:
    """Kendall's tau-b of two orders, by merging: pairs in the same order less those in the other,
    over the geometric mean of the pairs that are not tied. Knight, JASA 61, 1966."""
    order = np.lexsort((y, x))
    x, y = x[order], y[order]
    n = len(x)
    pairs = n * (n - 1) / 2

    def tied(*columns: Floats) -> float:
        _, counts = np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)
        return float((counts * (counts - 1) / 2).sum())

    swaps = 0
    ranks = np.unique(y, return_inverse=True)[1].reshape(-1)
    width = 1
    while width < n:  # bottom up: each half is sorted
        for i in range(0, n, 2 * width):
            left, right = ranks[i : i + width], ranks[i + width : i + 2 * width]
            swaps += int((len(left) - np.searchsorted(left, right, side="right")).sum())
            ranks[i : i + 2 * width] = np.sort(ranks[i : i + 2 * width], kind="stable")
        width *= 2
    tied_x, tied_y, both = tied(x), tied(y), tied(x, y)
    scale = np.sqrt((pairs - tied_x) * (pairs - tied_y))
    return float((pairs - tied_x - tied_y + both - 2 * swaps) / scale) if scale else 0.0


def won(p: Problem, others: Sequence[Problem], given: Fitted | None = None) -> Won:
    """Where predictions rank the winners of one table's kernel on one GPU."""
    ranks: list[Floats] = []
    illegal = 0
    for begin in range(0, len(p.winners), ROWS):
        rows = slice(begin, begin + ROWS)
        time_s, legal = predicted(p, rows, given)
        winners = p.winners[rows]
        time_s = np.where(legal, time_s, np.inf)
        its = np.take_along_axis(time_s, winners[:, None], axis=1)
        faster = (time_s < its * (1 - 1e-9)).sum(axis=1)
        alike = (time_s <= its * (1 + 1e-9)).sum(axis=1) - faster - 1
        out = ~np.isfinite(its[:, 0])
        illegal += int(out.sum())
        ranks.append(np.where(out, 1.0, (faster + alike / 2) / p.count))
    found = np.concatenate(ranks)
    return Won(
        *(p.file, p.kernel, p.gpu, p.sort, p.count, len(found)),
        in_best_tenth=100 * float((found <= BEST).mean()),
        mean_rank=float(found.mean()),
        median_rank=float(np.median(found)),
        illegal=illegal,
        usual_in_best_tenth=_usual(p, others),
    )


def _usual(p: Problem, others: Sequence[Problem]) -> float | None:
    """The share of winners among the tenth of the space that wins most often on other GPUs."""
    wins = np.zeros(p.count)
    for other in others:
        if (other.kernel, other.count) == (p.kernel, p.count) and other.gpu != p.gpu:
            wins += np.bincount(other.winners, minlength=p.count)
    if not wins.any():
        return None
    usual = np.argsort(-wins, kind="stable")[: int(BEST * p.count)]
    return 100 * float(np.isin(p.winners, usual).mean())


def score(
    problems: Sequence[Problem],
    given: Callable[[Problem], Fitted | None] = lambda p: None,
    told: Callable[[str], None] = lambda text: None,
) -> tuple[list[Swept], list[Won]]:
    """The scores of problems; `given` is what each is predicted with, None for what ships."""
    sweeps, winners = list[Swept](), list[Won]()
    measured = [p for p in problems if p.time_s is not None]
    tables = [p for p in problems if p.time_s is None and len(p.winners)]
    for p in (*measured, *tables):
        told(p.name)
        if p.time_s is not None:
            sweeps.append(swept(p, measured, given(p)))
        else:
            winners.append(won(p, tables, given(p)))
    return sweeps, winners


def totals(sweeps: Sequence[Swept], winners: Sequence[Won]) -> dict[str, float | int | None]:
    """Means over sweeps, and over the problems of tables of winners."""

    def mean(values: Sequence[float], weights: Sequence[int] | None = None) -> float | None:
        return float(np.average(values, weights=weights)) if len(values) else None

    triton = [w for w in winners if not w.dtype.endswith(" of ck")]
    counts = [w.problems for w in triton]
    return {
        "sweeps": len(sweeps),
        "regret_1": mean([s.regret_1 for s in sweeps]),
        "regret_5": mean([s.regret_5 for s in sweeps]),
        "regret_10": mean([s.regret_10 for s in sweeps]),
        "within_5pct_in_10": mean([100.0 * (s.regret_10 <= 100 * (NEAR - 1)) for s in sweeps]),
        "recall_10": mean([s.recall_10 for s in sweeps]),
        "tau": mean([s.tau for s in sweeps]),
        "random": mean([s.random for s in sweeps]),
        "triton_problems": sum(counts),
        "winner_in_best_tenth": mean([w.in_best_tenth for w in triton], counts),
        "winner_mean_rank": mean([w.mean_rank for w in triton], counts),
        "ck_problems": sum(w.problems for w in winners) - sum(counts),
    }


# ---- what a user types ------------------------------------------------------------------------


def commanded(p: Problem) -> Iterator[ScoredRow]:
    """The time of each configuration of a sweep, and of each one that won, with its call. A rank
    compares the latter with a whole space."""
    if p.time_s is not None:
        time_s, legal = predicted(p, slice(None))
        for i, seconds in enumerate(np.broadcast_to(time_s, (p.count,)).tolist()):
            tiles = p.tiles.each(lambda n, i=i: np.asarray(n)[i] if np.ndim(n) else n)
            yield ScoredRow(seconds, "s", *_call(p, p.works, tiles, bool(legal[i])))
        return
    for begin in range(0, len(p.winners), ROWS):
        time_s, legal = predicted(p, slice(begin, begin + ROWS))
        for i, winner in enumerate(p.winners[begin : begin + ROWS].tolist()):
            own = partial(_at, row=begin + i, column=winner)
            call = _call(p, [w.each(own) for w in p.works], p.tiles.each(own), legal[i, winner])
            yield ScoredRow(float(time_s[i, winner]), "s", *call)


def _at(n: Number, row: int, column: int) -> Number:
    """A number of one problem and one configuration."""
    if not np.ndim(n):
        return n
    rows, columns = np.shape(n)
    return float(np.asarray(n)[row if rows > 1 else 0, column if columns > 1 else 0])


def _call(p: Problem, works: Sequence[Work], tiles: Tiles, legal: bool) -> tuple[str, str]:
    """The call that gives the time of a configuration; or nothing, and why."""
    if not legal:
        return "", "gpuir.predict says that the configuration is not legal"
    if p.kernel in SWEPT:
        name = SWEPT[p.kernel]
        kernels = [f"gpuir.tune.published.TEMPLATES[{name!r}].kernel({dict(SIZES[name])!r})"]
    else:
        kernels = [call_of(w) for w in works]
    if not all(kernels):
        return "", f"gpuir.kernel has no kernel of {p.sort}"
    end = f"{tiles_call(tiles)}, {p.target.name!r}).time_s[0]"
    return " + ".join(f"gpuir.predict({k}, {end}" for k in kernels), ""


# ---- the command ------------------------------------------------------------------------------


@dataclass(frozen=True)
class TunedKernels:
    files: tuple[str, ...] = ask(FILES)
    unseen: str | None = option(
        "Fit again without each GPU, or each kernel, and score that (needs torch).",
        type=click.Choice(("gpu", "kernel")),
    )
    shown: ExamOutput = held(ExamOutput)


@request(TunedKernels)
def tuning(asked: TunedKernels) -> None:
    """Rank the configurations of tuned kernels, and say what the ranking costs.

    FILES are sweeps (every configuration with its time) and tables of winners.

    \b
    gpuir eval tuning sweeps_gemm.parquet best_triton.parquet
    """
    asked.shown.check()
    problems, skipped = read(asked.files)
    if asked.shown.commands:
        if asked.unseen:
            raise UsageError("--commands prints calls with the fit that ships", fix="no --unseen")
        rows = (row for p in problems for row in commanded(p))
        return asked.shown.show(commands_report("tuning", rows))
    chosen: Callable[[Problem], Fitted | None] = lambda p: None  # noqa: E731
    if asked.unseen:
        from validation.tuned_fit import without

        chosen = without(problems, asked.unseen, note)
    sweeps, winners = score(problems, chosen)
    return asked.shown.show(scores_report(sweeps, winners, skipped, asked.unseen))


def scores_report(
    sweeps: Sequence[Swept],
    winners: Sequence[Won],
    skipped: Sequence[Skipped],
    unseen: str | None = None,
) -> Report:
    """The scores of each sweep and each table of winners, and all of them."""
    found = totals(sweeps, winners)
    reasons = Counter[str]()
    for s in skipped:
        reasons[s.reason] += s.rows

    def parts() -> Iterator[Part]:
        if sweeps:
            yield _sweeps(sweeps)
        if winners:
            yield _winners(winners)
        if lines := [*_met(found)]:
            yield Notes(lines)
        if reasons:
            yield left_out(reasons)

    return Report(
        SCHEMA,
        parts,
        lambda: {
            "kind": "tuning",
            "predictor": generated.BY,
            "unseen": unseen,
            "totals": found,
            "sweeps": _sweeps(sweeps),
            "winners": _winners(winners),
            "skipped": skipped,
        },
    )


def _sweeps(sweeps: Sequence[Swept]) -> Table:
    return Table(
        sweeps,
        (
            *fields("file kernel target"),
            Column("sweep", value=lambda s: f"{s.kernel} {s.target}", least=20, elided=True),
            number("n", field="n", form=","),
            *(number(f"@{k}", field=f"regret_{k}") for k in (1, 5, 10)),
            number("recall", field="recall_10", form=".2f"),
            number("tau", field="tau", form=".2f"),
            number("random", field="random", form=".0f", drop=1),
            number("other GPU", field="elsewhere", drop=2),
            *fields("bias coverage"),
        ),
        caption="Sweeps: regret in percent of the best configuration's time",
    )


def _winners(winners: Sequence[Won]) -> Table:
    def name(w: Won) -> str:
        return f"{w.kernel} {w.target} {w.dtype}"

    return Table(
        winners,
        (
            *fields("file kernel target dtype"),
            Column("kernel", value=name, least=32, elided=True),
            number("space", field="n", form=","),
            number("problems", field="problems", form=","),
            number("best 10 %", field="in_best_tenth", form=".0f"),
            number("mean rank", field="mean_rank", form=".3f"),
            number("usual", field="usual_in_best_tenth", form=".0f"),
            *fields("median_rank illegal"),
        ),
        caption="Winners: share of them in the predicted best tenth of the space, percent",
    )


def _met(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What was to be reached, and what is."""
    if found["sweeps"]:
        yield "regret@1", f"{found['regret_1']:.1f} % in the mean (goal {GOALS['regret_1']:.0f})"
        share, goal = found["within_5pct_in_10"], GOALS["within_5pct_in_10"]
        text = "have a configuration within 5 % of the best among the first ten"
        yield "first ten", f"{share:.0f} % of sweeps {text} (goal {goal:.0f})"
    if found["triton_problems"]:
        share, goal = found["winner_in_best_tenth"], GOALS["winner_in_best_tenth"]
        of = f"{share:.1f} % of Triton's {found['triton_problems']:,} are in the best tenth"
        yield "winners", f"{of} as predicted (goal {goal:.0f})"
