"""How far predictions are from measurements: errors in percent, by table, operator, GPU, dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuir.cost.families import family_of
from gpuir.cost.learned import Model
from gpuir.cost.roofline import bounds
from gpuir.cost.tile import predict
from gpuir.cost.work import Work
from gpuir.fit.batch import Flags, MeasuredBatch
from gpuir.fit.columns import Floats, Ints
from gpuir.fit.names import tiles_ran
from gpuir.targets.target import Target

FLOOR = "launch floor"
SUSPECT = "suspect"
ALL = "all"


@dataclass(frozen=True)
class Forecast:
    """What the clock of a batch would show of each row: predicted, between what it lies in 80 % of
    the cases, and by the roofline alone. Seconds."""

    time_s: Floats
    low_s: Floats
    high_s: Floats
    roofline_s: Floats


def forecast(batch: MeasuredBatch, model: Model | None = None) -> Forecast:
    """The rows of a batch, predicted: the kernels of a row one after another. Their errors have
    much in common, so the widths of their intervals add up."""
    shapes, row = np.unique(batch.which, return_inverse=True)
    total = np.zeros((4, len(shapes)))
    launch_s = batch.target.launch_s
    for work in batch.works:
        kernel = kernel_s(work.take(shapes), batch.target, model)
        total += kernel if batch.clock.launches else np.maximum(kernel - launch_s, 0.0)
    return Forecast(*(batch.clock.shows(t[row]) for t in total))


def kernel_s(work: Work, target: Target, model: Model | None = None) -> Floats:
    """Seconds of a kernel and its launch, a column a row: predicted, low, high, by the roofline."""
    p = predict(work, target, model=model)
    roof: Floats = np.maximum(*bounds(work, target)) + target.launch_s + 0.0 * p.time_s
    return np.stack([p.time_s, p.low_s, p.high_s, roof])


@dataclass(frozen=True)
class Errors:
    """Absolute errors of `n` predictions, in percent of the measurement: mean, median, 90th
    percentile. `bias` is the mean signed one, positive where too slow is predicted."""

    n: int
    mape: float
    median_ape: float
    p90_ape: float
    bias: float


@dataclass(frozen=True)
class RowErrors(Errors):
    """Errors of some rows of a table, and the roofline's. `coverage` is the share of rows inside
    their 80 % interval, None where there are no intervals. `spread` is how far rows are, on
    average, from the median of those that ran the same kernels in the same shape: what nobody can
    predict who is not told which library, version or session it was; None where each shape was
    measured once. `roofline_mape` is None where no roofline was asked."""

    roofline_mape: float | None
    coverage: float | None
    spread: float | None = None


class ScoredRows(NamedTuple):
    """Rows that are scored together.

    `floor` marks rows that measure the host, `suspect` says why measurements are suspect: both are
    kept apart. `by` are further columns that rows were told apart by, and what they say.
    """

    file: str
    op: str
    device: str
    dtype: str
    target: str
    by: tuple[tuple[str, str], ...] = ()
    floor: bool = False
    suspect: str = ""

    @property
    def title(self) -> str:
        """The operator, and why its rows are apart."""
        if self.floor:
            return f"{self.op} ({FLOOR})"
        return f"{self.op} ({SUSPECT})" if self.suspect else self.op


@dataclass(frozen=True)
class Score:
    """The errors of a group of rows, and of its parts by split where the table has splits."""

    group: ScoredRows
    errors: RowErrors
    splits: Mapping[str, RowErrors]


@dataclass(frozen=True)
class TileScore:
    """How often the tile predicted is the one that ran, in percent of the `n` rows whose kernels'
    names say so, how often with the same split, and mean errors with either tile."""

    group: ScoredRows
    n: int
    same: float
    same_split: float
    mape: float
    mape_ran: float


@dataclass(frozen=True)
class GroupScores:
    """Of each group; of the rows of each GPU and dtype together, and of all GPUs'; of each family
    of kernels, by file and GPU, the operator being its name (in these two, floor and suspect rows
    are left out); of the tiles chosen."""

    groups: tuple[Score, ...] = ()
    totals: tuple[Score, ...] = ()
    families: tuple[Score, ...] = ()
    tiles: tuple[TileScore, ...] = ()

    def __add__(self, other: GroupScores) -> GroupScores:
        return GroupScores(
            self.groups + other.groups,
            self.totals + other.totals,
            self.families + other.families,
            self.tiles + other.tiles,
        )


def score(
    batches: Iterable[MeasuredBatch],
    by: Sequence[str] = (),
    models: Mapping[str, Model] | None = None,
) -> GroupScores:
    """The errors of predictions for batches, by file, operator, GPU and dtype, and by the columns
    `by`. A GPU in `models` has a model of its own: one trained without it."""
    groups: dict[ScoredRows, list[_ScoredRows]] = {}
    totals: dict[ScoredRows, list[_ScoredRows]] = {}
    families: dict[ScoredRows, list[_ScoredRows]] = {}
    tiles: list[TileScore] = []
    for batch in batches:
        model = (models or {}).get(batch.target.device)
        f = forecast(batch, model)
        predicted = (f.time_s, f.low_s, f.high_s, f.roofline_s)
        numbers = np.stack([batch.latency_s, *predicted, middle(batch)])
        whole = _group(batch)
        if chosen := tile_score(batch, model):
            tiles.append(chosen)
        family = whole._replace(op=family_of(batch.works[-1], batch.target).name, dtype=ALL)
        for values, rows in batch.rows_by(*by):
            mine = whole._replace(by=tuple(zip(by, values, strict=True)), suspect=batch.suspect)
            for floor in (False, True):
                some = rows[batch.on_floor[rows] == floor]
                if not len(some):
                    continue
                part = _ScoredRows(numbers[:, some], batch.split.codes[some], batch.split.names)
                groups.setdefault(mine._replace(floor=floor), []).append(part)
                if not (floor or batch.suspect):
                    for total in _totals(mine):
                        totals.setdefault(total, []).append(part)
                    families.setdefault(family, []).append(part)
    return GroupScores(
        tuple(_score(g, parts) for g, parts in sorted(groups.items())),
        tuple(_score(g, parts) for g, parts in sorted(totals.items(), key=_place)),
        tuple(_score(g, parts) for g, parts in sorted(families.items())),
        tuple(tiles),
    )


def pooled(scores: Sequence[Score]) -> RowErrors:
    """The errors of several scores' rows together; what is no mean is left at NaN."""
    n = np.array([s.errors.n for s in scores], np.float64)

    def mean(of: str) -> float:
        return float(np.average([getattr(s.errors, of) for s in scores], weights=n))

    def if_all(of: str) -> float | None:
        return None if any(getattr(s.errors, of) is None for s in scores) else mean(of)

    return RowErrors(
        n=int(n.sum()),
        mape=mean("mape"),
        median_ape=np.nan,
        p90_ape=np.nan,
        bias=mean("bias"),
        roofline_mape=if_all("roofline_mape"),
        coverage=if_all("coverage"),
    )


def tile_score(batch: MeasuredBatch, model: Model | None = None) -> TileScore | None:
    """The tiles predicted for a batch beside those that its kernels' names tell, where they do."""
    named = None if batch.suspect else tiles_ran(batch)
    if named is None:
        return None
    ran, known = named
    rows = np.flatnonzero(known & ~batch.on_floor)
    if not len(rows):
        return None
    ran, work = ran.take(rows), batch.works[-1].take(batch.which[rows])
    own = predict(work, batch.target, model=model)
    other = predict(work, batch.target, tiles=ran, model=model)
    same: Flags = (own.tiles.dims["m"] == ran.dims["m"]) & (own.tiles.dims["n"] == ran.dims["n"])
    real = batch.latency_s[rows]
    mape = [float(np.mean(np.abs(batch.clock.shows(p.time_s) - real) / real)) for p in (own, other)]
    split: Flags = same & (own.tiles.split == ran.split)
    shares = float(np.mean(same)), float(np.mean(split))
    return TileScore(_group(batch), len(rows), *(100 * number for number in (*shares, *mape)))


def _group(batch: MeasuredBatch) -> ScoredRows:
    return ScoredRows(batch.file, batch.op, batch.device, batch.dtype, batch.target.name)


def _place(total: tuple[ScoredRows, list[_ScoredRows]]) -> tuple[str, str, bool, str]:
    """Totals by file and dtype, that of all GPUs last."""
    g = total[0]
    return (g.file, g.dtype, g.device == ALL, g.device)


def _totals(group: ScoredRows) -> Iterator[ScoredRows]:
    for_gpu = group._replace(op=ALL, by=())
    yield for_gpu
    yield for_gpu._replace(device=ALL, target=ALL)


@dataclass(frozen=True)
class _ScoredRows:
    """Rows before they are errors: measured, predicted, low, high, roofline, and the middle of the
    same shape's; the split."""

    numbers: NDArray[np.float64]
    split: Ints
    splits: tuple[str, ...]


def _score(group: ScoredRows, parts: list[_ScoredRows]) -> Score:
    numbers = np.concatenate([p.numbers for p in parts], axis=1)
    splits: dict[str, RowErrors] = {}
    for name in sorted({n for p in parts for n in p.splits if n}):
        some = [p.numbers[:, np.array(p.splits)[p.split] == name] for p in parts]
        of_split = np.concatenate(some, axis=1)
        if of_split.size:
            splits[name] = row_errors(of_split)
    return Score(group, row_errors(numbers), splits)


def errors_of(signed: Floats | Sequence[float]) -> Errors:
    """Of errors in percent of the measurement, positive where too slow is predicted."""
    size: Floats = np.abs(signed)
    return Errors(
        n=len(signed),
        mape=float(np.mean(size)),
        median_ape=float(np.median(size)),
        p90_ape=float(np.quantile(size, 0.9)),
        bias=float(np.mean(signed)),
    )


def row_errors(numbers: NDArray[np.float64]) -> RowErrors:
    """Of rows of measured, predicted, low, high, roofline and middle seconds, a column a row."""
    real: Floats = numbers[0]
    signed: Floats = 100 * (numbers[1] - real) / real
    roofline: Floats = 100 * np.abs(numbers[4] - real) / real
    inside: Floats = 100.0 * ((numbers[2] <= real) & (real <= numbers[3]))
    apart: Floats = 100 * np.abs(numbers[5] - real) / real
    again = np.isfinite(apart)
    return RowErrors(
        **asdict(errors_of(signed)),
        roofline_mape=float(np.mean(roofline)) if np.isfinite(roofline).all() else None,
        coverage=float(np.mean(inside)) if np.any(numbers[2] < numbers[3]) else None,
        spread=float(np.mean(apart[again])) if again.any() else None,
    )


def middle(batch: MeasuredBatch) -> Floats:
    """The median measurement of each row's shape; NaN where it was measured once."""
    order = np.lexsort((batch.latency_s, batch.which))
    shape, sorted_s = batch.which[order], batch.latency_s[order]
    _, start, count = np.unique(shape, return_index=True, return_counts=True)
    median: Floats = (sorted_s[start + (count - 1) // 2] + sorted_s[start + count // 2]) / 2
    medians = np.empty(len(batch))
    medians[order] = np.repeat(np.where(count > 1, median, np.nan), count)
    return medians


def drawn(
    batches: Sequence[MeasuredBatch], count: int, seed: int
) -> tuple[list[MeasuredBatch], list[MeasuredBatch]]:
    """`count` rows of each GPU and family of kernels, drawn by a seed, and all other rows.

    Rows on the launch floor and suspect ones are never drawn.
    """
    places: dict[tuple[str, str], list[Ints]] = {}
    for i, batch in enumerate(batches):
        if batch.suspect:
            continue
        rows = np.flatnonzero(~batch.on_floor)
        family = family_of(batch.works[-1], batch.target).name
        pair: Ints = np.stack([np.full(len(rows), i, np.int64), rows])
        places.setdefault((batch.target.name, family), []).append(pair)
    rng = np.random.default_rng(seed)
    chosen = [np.zeros(len(b), bool) for b in batches]
    for _, pairs in sorted(places.items()):
        every = np.concatenate(pairs, axis=1)
        some = every[:, rng.permutation(every.shape[1])[:count]]
        for i, row in zip(*some.tolist(), strict=True):
            chosen[i][row] = True
    first = [b.take(c) for b, c in zip(batches, chosen, strict=True) if c.any()]
    return first, [b.take(~c) for b, c in zip(batches, chosen, strict=True) if not c.all()]
