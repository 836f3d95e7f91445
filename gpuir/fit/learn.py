"""Fits the tile model to measurements: factors, what they are on each GPU, and a bounded network.

The formulas are those that predict (`Family.seconds`), run on torch tensors. Deterministic: the
same tables and seed give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from gpuir.cost.families import FAMILIES, family_of
from gpuir.cost.family import Family
from gpuir.cost.learned import Array, Model, Net, Trained, factors, seen
from gpuir.cost.nest import Tiles
from gpuir.cost.sheet import Number, Sheet
from gpuir.cost.tile import choose, predict
from gpuir.cost.work import Work
from gpuir.fit.batch import MeasuredBatch
from gpuir.fit.columns import Floats
from gpuir.fit.names import tiles_ran
from gpuir.ir.errors import UsageError
from gpuir.targets.target import Target

ROWS = 400  # of a batch, drawn by seed: batches weigh alike, and a fit takes minutes
ROUNDS = 2  # times that tiles are chosen anew with the factors found
COARSE = 0.1  # weight of rows that hold other kernels too, or that a profiler rounded
# What a profiler is believed of an architecture that nothing else was timed on: the share of its
# bandwidth, which a long kernel shows however it is timed. Starts and waits it counts in its own
# way (A100's streams by all that profiles say: kernels timed alone come out 12 to 22 % off, and 4 %
# without; its share of the bandwidth is the same by both).
BELIEVED = ("hbm share", "gddr share")
STEPS = 100  # of the optimiser in a round
UNITS = 24  # of the network's hidden layer
DOUBT = 0.05  # logarithms of an error above this weigh by their size, not its square (Huber)
HELD_BACK = 1e-4  # what a deviation of one spread costs: an error of 8 % in 30 independent rows
ANCHORED = 3e-5  # what moving a factor from where it starts costs: what no row tells stays there
NET_DECAY = 0.02  # what a squared weight of the network costs, in squared logarithms
# Of a CPU a target states a level of instructions, and the rates of whichever machine it is: no
# measurements make it known. Its shares stand in `gpuir.cost.cpu`, and calibration moves them.
AS_THEY_ARE = ("cpu",)
OWN_DECAY = 2.0  # the same of what a GPU's output weights differ by, over that

Watch = Callable[[str], None]


@dataclass(frozen=True)
class Sample:
    """Rows of one batch to fit a family to: its work, and the rest of what was measured."""

    device: str
    dtype: str
    target: Target
    work: Work
    other_s: Floats  # launches, and kernels of other families
    device_s: Floats
    weight: Floats  # of each row, among those of its GPU
    exact: bool  # no others' kernels inside, and not a profiler's rounded times
    tiles: Tiles | None = None  # as they ran, where the table says so


def fit(
    batches: Iterable[MeasuredBatch],
    *,
    seed: int = 0,
    families: Sequence[str] | None = None,
    watch: Watch | None = None,
) -> dict[str, Trained]:
    """The model fitted to measurements, family by family: those whose kernels come with others'
    (quantised products) after those that come alone.

    `families` are those to fit, all by default. UsageError without torch.
    """
    return fitted(usable(batches, seed), seed=seed, families=families, watch=watch)


def fitted(
    batches: Sequence[MeasuredBatch],
    *,
    seed: int = 0,
    families: Sequence[str] | None = None,
    watch: Watch | None = None,
) -> dict[str, Trained]:
    """The same, of rows that are all `usable`."""
    torch = load_torch()
    torch.set_num_threads(1)
    model: dict[str, Trained] = {}
    for name in families if families is not None else FAMILIES:
        rows = samples(FAMILIES[name], batches, model)
        if rows:
            family = FAMILIES[name]
            plain = _plain(family, rows)
            model[name] = plain if name in AS_THEY_ARE else _fit(torch, family, rows, plain, seed)
            if watch is not None:
                watch(f"{name}: {sum(len(s.device_s) for s in rows):,} rows")
    return model


def usable(batches: Iterable[MeasuredBatch], seed: int = 0) -> list[MeasuredBatch]:
    """The rows that a fit sees: up to `ROWS` of a batch and split (random shapes, and those of
    models), none that measures the host more than the GPU, is suspect or told by its bytes alone.
    """
    kept: list[MeasuredBatch] = []
    rng = np.random.default_rng(seed)
    for batch in batches:
        if batch.suspect or batch.rough:
            continue
        ran = tiles_ran(batch)
        rows = np.flatnonzero(~batch.on_floor if ran is None else ~batch.on_floor & ran[1])
        rows = rng.permutation(rows)
        split = batch.split.codes[rows]
        drawn = [rows[split == code][:ROWS] for code in np.unique(split)]
        if drawn:
            kept.append(batch.take(np.sort(np.concatenate(drawn))).alone())
    return kept


def samples(family: Family, batches: Iterable[MeasuredBatch], model: Model) -> list[Sample]:
    """The rows of a family: where it is the last of a row's kernels, or the only one."""
    rows: list[Sample] = []
    for batch in batches:
        families = [family_of(w, batch.target).name for w in batch.works]
        if families[-1] != family.name or families.count(family.name) > 1:
            continue
        other_s = np.zeros(len(batch))
        for w in batch.works[:-1]:
            other_s += predict(w.take(batch.which), batch.target, model=model).time_s
        launches = len(batch.works) if batch.clock.launches else 0
        other_s += (launches - (len(batch.works) - 1)) * batch.target.launch_s
        ran = tiles_ran(batch)
        exact = len(batch.works) == 1 and bool(batch.clock.launches)
        rows.append(
            Sample(
                batch.target.device,
                batch.works[-1].dtype.name,
                batch.target,
                batch.works[-1].take(batch.which),
                other_s=other_s,
                device_s=batch.device_s,
                weight=np.full(len(batch), (1.0 if exact else COARSE) / len(batch)),
                exact=exact,
                tiles=ran and ran[0],
            )
        )
    return rows


def together(samples: Iterable[Sample]) -> list[Sample]:
    """The same rows in fewer samples, those of one GPU and likeness in one: formulas take about as
    long for a few hundred rows as for a few thousand."""
    groups: dict[tuple[Hashable, ...], list[Sample]] = {}
    for s in samples:
        groups.setdefault((s.target.name, s.tiles is None, s.exact, s.work.likeness), []).append(s)
    return [_joined(some) for some in groups.values()]


def _joined(some: Sequence[Sample]) -> Sample:
    """Samples of one GPU and likeness as one."""

    def all_of(each: Callable[[Sample], Any]) -> Any:
        return np.concatenate([each(s) for s in some])

    def numbers(what: Sequence[Work] | Sequence[Tiles]) -> Any:
        rows: list[list[Floats]] = []
        for one, s in zip(what, some, strict=True):
            row: list[Floats] = []
            size = len(s.device_s)
            one.each(lambda n, row=row, size=size: row.append(np.broadcast_to(n, (size,))))
            rows.append(row)
        columns = iter([np.concatenate(column) for column in zip(*rows, strict=True)])
        return what[0].each(lambda _: next(columns))

    tiles = [s.tiles for s in some if s.tiles is not None]
    return replace(
        some[0],
        work=numbers([s.work for s in some]),
        other_s=all_of(lambda s: s.other_s),
        device_s=all_of(lambda s: s.device_s),
        weight=all_of(lambda s: s.weight),
        tiles=numbers(tiles) if tiles else None,
    )


# ---------------------------------------------------------------------------- one family


def _plain(family: Family, samples: list[Sample]) -> Trained:
    """The family as it stands, and what there are measurements of."""
    fits = family.name not in AS_THEY_ARE
    isas = {s.target.isa for s in samples}
    return Trained(
        factors={f.name: f.value for f in family.factors} if fits else {},
        devices=tuple(sorted({s.device for s in samples})) if fits else (),
        architectures={isa: {} for isa in sorted(isas)} if fits else {},
        dtypes=tuple(sorted({s.dtype for s in samples})),
        kinds={
            isa: tuple(sorted({s.work.sort for s in samples if s.target.isa == isa}))
            for isa in sorted({s.target.isa for s in samples})
        },
        sizes={
            "flops": _span(s.work.flops for s in samples),
            "bytes": _span(s.work.nbytes for s in samples),
        },
    )


def measured_exactly(samples: Iterable[Sample]) -> set[str]:
    """The architectures whose kernels were timed one by one; all, where none were. Of the others a
    network has no weights, and of factors those `BELIEVED` deviate."""
    samples = list(samples)
    return {s.target.isa for s in samples if s.exact} or {s.target.isa for s in samples}


def _fit(torch: Any, family: Family, samples: list[Sample], trained: Trained, seed: int) -> Trained:
    samples, cuts = together(samples), []
    for _ in range(ROUNDS):
        model = {family.name: trained}
        cuts = [choose(s.work, s.target, model=model) for s in samples]
        ran = [(s.tiles or t).each(torch.as_tensor) for s, t in zip(samples, cuts, strict=True)]
        trained = _factors_fitted(torch, family, samples, ran, trained)
    if family.features:
        trained = _net_fitted(torch, family, samples, cuts, trained, seed=seed)
    return trained


def _span(numbers: Iterable[Number]) -> tuple[float, float]:
    numbers = list(numbers)
    return min(float(np.min(n)) for n in numbers), max(float(np.max(n)) for n in numbers)


def _factors_fitted(
    torch: Any, family: Family, samples: list[Sample], cuts: list[Tiles], trained: Trained
) -> Trained:
    """Factors for all GPUs, and deviations of each architecture from them, which the spread of a
    factor holds back: what most share goes to the former."""
    isas = list(trained.architectures)
    moving = [f for f in family.factors if f.high > f.low]
    loose = [f for f in moving if f.spread > 0]
    at = torch.tensor([_to_line(f, trained.factors[f.name]) for f in moving], requires_grad=True)
    off = torch.zeros(len(isas), len(loose), dtype=torch.float64, requires_grad=True)
    exact = measured_exactly(samples)
    free = [[float(isa in exact or f.name in BELIEVED) for f in loose] for isa in isas]
    is_free = torch.tensor(free, dtype=torch.float64).reshape(off.shape)
    hold = torch.tensor([[1.0 if isa in exact else COARSE] for isa in isas], dtype=torch.float64)
    at.data = at.data.double()
    begun = at.data.clone()
    works = [s.work.each(_tensor(torch)) for s in samples]
    weights = [torch.as_tensor(w) for w in _weights(samples)]

    def resolved(isa: int | None) -> dict[str, Number]:
        values = {f.name: trained.factors[f.name] for f in family.factors}
        for i, f in enumerate(moving):
            values[f.name] = f.low + (f.high - f.low) * torch.sigmoid(at[i])
        for i, f in enumerate(loose if isa is not None else ()):
            moved = values[f.name] * torch.exp(off[isa, i] * is_free[isa, i] * f.spread)
            values[f.name] = torch.clamp(moved, f.low, f.high)
        return values

    def loss() -> Any:
        known = {isa: resolved(i) for i, isa in enumerate(isas)}
        others = resolved(None)
        total = HELD_BACK * (hold * off**2).sum() / len(isas)
        total = total + ANCHORED * ((at - begun) ** 2).sum()
        for s, work, tiles, weight in zip(samples, works, cuts, weights, strict=True):
            sheet = Sheet(arithmetic(torch))
            terms = family.seconds(sheet, work, tiles, s.target, known.get(s.target.isa, others))
            busy = torch.maximum(_as(torch, terms.compute), _as(torch, terms.memory))
            time_s = busy + terms.latency + torch.as_tensor(s.other_s)
            error = torch.log(time_s / torch.as_tensor(s.device_s))
            total = total + (weight * _bent(torch, error)).sum()
        return total

    _minimise(torch, [at, off], loss)
    values = {f.name: trained.factors[f.name] for f in family.factors}
    with torch.no_grad():
        for i, f in enumerate(moving):
            values[f.name] = float(f.low + (f.high - f.low) * torch.sigmoid(at[i]))
        deviations = {
            isa: {f.name: float(off[j, i]) * f.spread for i, f in enumerate(loose) if is_free[j, i]}
            for j, isa in enumerate(isas)
        }
    return replace(trained, factors=values, architectures=deviations)


def _net_fitted(
    torch: Any,
    family: Family,
    samples: list[Sample],
    cuts: list[Tiles],
    trained: Trained,
    *,
    seed: int,
) -> Trained:
    """The network on what the formulas leave: bounded, its weights small, and what is one
    architecture's own held back, so that what all share goes to the weights of all."""
    inputs: list[Any] = []
    left: list[Any] = []
    share: list[Any] = []
    model = {family.name: trained}
    for s, tiles in zip(samples, cuts, strict=True):
        sheet = Sheet()
        terms = family.seconds(sheet, s.work, tiles, s.target, factors(family, s.target, model))
        busy = np.maximum(terms.compute, terms.memory) + terms.latency
        count = len(s.device_s)
        columns = [
            np.broadcast_to(np.asarray(feature, float), (count,))
            for feature in seen(s.work, tiles, family, s.target, model)
        ]
        inputs.append(np.stack(columns, axis=1))
        left.append(np.log(np.maximum(s.device_s - s.other_s, 0.05 * s.device_s) / busy))
        share.append(busy / (busy + s.other_s))
    x, y = np.concatenate(inputs), np.concatenate(left)
    weight = np.concatenate(_weights(samples)) * np.concatenate(share)
    shift, scale = x.mean(axis=0), np.maximum(x.std(axis=0), 1e-6)
    inside = torch.as_tensor((x - shift) / scale)
    wanted, weights = torch.as_tensor(y), torch.as_tensor(weight / weight.sum())
    draw = torch.Generator().manual_seed(seed)
    hidden = 0.3 * torch.randn(UNITS, x.shape[1], generator=draw, dtype=torch.float64)
    bias = torch.zeros(UNITS, dtype=torch.float64)
    out = 0.1 * torch.randn(UNITS, generator=draw, dtype=torch.float64)
    isas = sorted(measured_exactly(samples))
    own = torch.zeros(len(isas), UNITS, dtype=torch.float64)  # off from out, by architecture
    none = torch.zeros(1, UNITS, dtype=torch.float64)  # of architectures without their own
    place = {isa: i for i, isa in enumerate(isas)}
    which = torch.as_tensor(
        np.concatenate(
            [np.full(len(s.device_s), place.get(s.target.isa, len(isas))) for s in samples]
        )
    )
    parameters = [hidden, bias, own, out]
    for parameter in parameters:
        parameter.requires_grad_()

    def loss() -> Any:
        units = torch.tanh(inside @ hidden.T + bias)
        correction = family.bound * torch.tanh(
            (units * (out + torch.cat([own, none])[which])).sum(dim=1)
        )
        held = OWN_DECAY if family.carries else 1.0
        decay = (hidden**2).mean() + (out**2).mean() + held * (own**2).mean()
        return (weights * _bent(torch, wanted - correction)).sum() + NET_DECAY * DOUBT**2 * decay

    _minimise(torch, parameters, loss)
    each = {isa: (out + own[i]).detach().numpy() for i, isa in enumerate(isas)}
    carried = out if family.carries else torch.zeros_like(out)
    arrays: list[Array] = [p.detach().numpy() for p in (hidden, bias, carried)]
    net = Net(shift, scale, *arrays, own=each, least=x.min(axis=0), most=x.max(axis=0))
    return replace(trained, net=net)


def _minimise(torch: Any, parameters: list[Any], loss: Callable[[], Any]) -> None:
    optimiser = torch.optim.LBFGS(
        parameters, lr=1.0, max_iter=STEPS, history_size=20, line_search_fn="strong_wolfe"
    )

    def closure() -> Any:
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return value

    optimiser.step(closure)


def _weights(samples: list[Sample]) -> list[Floats]:
    """Of each row. GPUs weigh alike, and one without exact rows as these do; within one, batches by
    their weight."""
    each: dict[str, float] = {}
    most: dict[str, float] = {}
    for s in samples:
        each[s.device] = each.get(s.device, 0.0) + float(s.weight.sum())
        most[s.device] = max(most.get(s.device, COARSE), 1.0 if s.exact else COARSE)
    total = sum(most.values())
    return [s.weight * most[s.device] / (total * each[s.device]) for s in samples]


def _bent(torch: Any, error: Any) -> Any:
    """Half the square of small errors, in proportion beyond `DOUBT` (Huber, 1964)."""
    size = torch.abs(error)
    return torch.where(size < DOUBT, 0.5 * size**2, DOUBT * (size - 0.5 * DOUBT))


def _to_line(f: Any, value: float) -> float:
    """Where a factor lies on the line that a sigmoid maps to its bounds."""
    share = min(max((value - f.low) / (f.high - f.low), 0.01), 0.99)
    return float(np.log(share / (1 - share)))


# ---------------------------------------------------------------------------- torch's arithmetic


def load_torch() -> Any:
    """UsageError where it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise UsageError("fitting needs torch", fix="pip install 'gpuir[torch]'") from error
    return torch


def _tensor(torch: Any) -> Callable[[Number], Any]:
    return lambda n: torch.as_tensor(np.asarray(n, float)) if np.ndim(n) else n


def _as(torch: Any, n: Number) -> Any:
    return n if isinstance(n, torch.Tensor) else torch.tensor(float(n), dtype=torch.float64)


def arithmetic(torch: Any) -> SimpleNamespace:
    """The functions of a `Sheet` on tensors and floats alike."""

    def of(name: str) -> Callable[..., Any]:
        call = getattr(torch, name)
        return lambda *args: call(*(_as(torch, a) for a in args))

    def where(test: Any, yes: Number, no: Number) -> Any:
        test = test if isinstance(test, torch.Tensor) else torch.tensor(bool(test))
        return torch.where(test, _as(torch, yes), _as(torch, no))

    names = ("maximum", "minimum", "ceil", "floor", "sqrt", "exp", "log", "log1p", "tanh")
    return SimpleNamespace(where=where, **{name: of(name) for name in names})
