"""What to change so that a model runs faster, or for less money: each change tried, not guessed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpuir.ir.errors import ModelError, UsageError
from gpuir.ir.graph import Graph
from gpuir.plan.changes import (
    CHANGE_KINDS,
    PROPOSALS,
    ChangeKind,
    ModelChange,
    ModelForm,
    Setup,
    Situation,
)
from gpuir.report.answer import Answer, check_runs
from gpuir.targets.load import load_target
from gpuir.targets.prices import Price, prices_alike

LEAST_GAIN = 0.02  # of the time an item takes, or of its price: less is not worth a change
TOGETHER = 3  # changes, of different kinds, tried at once
NEAR = 0.05  # of the most items a second: the least batch that comes so near is advised

Span = tuple[float, float, float]  # seconds, and between what they are expected


@dataclass(frozen=True)
class Money:
    """US dollars for a million items, at a price."""

    usd_per_million: float
    price: Price


@dataclass(frozen=True, eq=False)
class Trial:
    """Changes made together, and what came of them: a run, or why there is none. `before` is the
    run as it is, of a training step by the same derivatives: those gain nothing."""

    changes: tuple[ModelChange, ...]
    setup: Setup
    before: Answer
    after: Answer | None
    refusal: str = ""

    @property
    def gain(self) -> float:
        """The part of the time for each item that is saved; negative where it takes longer."""
        return 1 - self.after.item_s / self.before.item_s if self.after else 0.0

    @property
    def speedup(self) -> float:
        return self.before.item_s / self.after.item_s if self.after else 1.0

    @property
    def fits(self) -> bool:
        """Whether the device has the memory or, where it had not before, less is missing."""
        if self.after is None:
            return False
        then, now = self.before, self.after
        return now.fits is not False or (
            then.fits is False and now.reserved_bytes < then.reserved_bytes
        )

    @cached_property
    def is_certain(self) -> bool:
        """Whether the gain is larger than the prediction's error: kernels that both runs have are
        off alike, and so is the host, by its profile's uncertainty; of all other kernels those
        before take the least and those after the most that 80 % of measurements do."""
        if self.after is None:
            return False
        same = Counter[Span]()
        if self.before.items == self.after.items and self.before.target == self.after.target:
            same = Counter(_spans(self.before)) & Counter(_spans(self.after))
        spread = max(x.software.host.uncertainty for x in (self.before, self.after))
        return all(
            _bound(self.after, same, 2, host) < _bound(self.before, same, 1, host)
            for host in (1 / spread, 1.0, spread)
        )

    def money(self, own: Mapping[str, Price]) -> tuple[Money, Money] | None:
        """What a million items cost before and after, by prices that can be compared; None where
        there are none."""
        if self.after is None:
            return None
        then, now = (load_target(str(x.graph.target)) for x in (self.before, self.after))
        prices = prices_alike(then, now, own)
        if prices is None:
            return None
        return _money(self.before, prices[0]), _money(self.after, prices[1])


def _spans(run: Answer) -> list[Span]:
    """Of each kernel its seconds, and between what they are expected."""
    costs = (n.cost for n in run.graph.nodes if n.cost is not None and n.cost.time_s)
    return [(c.time_s, *(c.interval or (c.time_s, c.time_s))) for c in costs]


def _bound(run: Answer, same: Counter[Span], end: int, host: float) -> float:
    """Seconds for each item, kernels that are not `same` taking their least (1) or most (2), and
    what is not kernels `host` times as long."""
    spans = _spans(run)
    other = Counter(spans) - same
    late = sum(count * (span[end] - span[0]) for span, count in other.items())
    kernels_s = sum(span[0] for span in spans)
    return (kernels_s + late + host * (run.latency_s - kernels_s)) / run.items


def _money(run: Answer, price: Price) -> Money:
    return Money(price.usd_per_hour / 3600 * run.item_s * 1e6, price)


@dataclass(frozen=True, eq=False)
class Advice:
    """What was tried. `advice` are single changes that gain, the most first; `together` several at
    once, of different kinds; `faster` and `cheaper` another GPU, if one is; `rest` what gains too
    little, does not fit, or cannot be."""

    setup: Setup
    before: Answer
    advice: tuple[Trial, ...]
    together: tuple[Trial, ...]
    faster: Trial | None
    cheaper: Trial | None
    rest: tuple[Trial, ...]
    prices: Mapping[str, Price]


@dataclass(frozen=True)
class Bench:
    """How things are tried: `graph` is the model before any stack lowers it, as a setup has it;
    `run` what comes of it. `done` is called after each run."""

    graph: Callable[[Setup], Graph]
    run: Callable[[Setup], Answer]
    done: Callable[[], None] = lambda: None


# ---------------------------------------------------------------------------- trying


def advise(
    bench: Bench,
    setup: Setup,
    source: ModelForm,
    *,
    kinds: Sequence[ChangeKind] = CHANGE_KINDS,
    prices: Mapping[str, Price] | None = None,
) -> Advice:
    """Every proposal tried by itself, then the best of different kinds together.

    Nothing is advised that was not run. Of the changes of one kind, which exclude each other, the
    best one goes into the combinations. What fails, fails as a trial, and the report says why.
    """
    own = prices or {}
    starts = _Starts(bench, setup)
    now = starts.of(setup)
    batches = [name for name in setup.dims if re.search("batch", name, re.IGNORECASE)]
    batch = batches[0] if len(batches) == 1 else None
    case = Situation(setup=setup, graph=bench.graph(setup), now=now, batch=batch, source=source)
    trials = [
        _tried(starts, (change,))
        for kind in kinds
        for propose in PROPOSALS[kind]
        for change in propose(case)
    ]
    here = [x for x in trials if x.changes[0].kind != "gpu"]
    there = [x for x in trials if x.changes[0].kind == "gpu" and x.after and x.fits]
    good = sorted((x for x in _chosen(here) if _is_worth(x)), key=lambda x: -x.gain)
    kinds_of = {x.changes[0].kind for x in good}
    hidden = [x for x in _chosen(here) if x.after and x.changes[0].kind not in kinds_of]
    faster = max(there, key=lambda x: x.gain, default=None)
    priced = [(_saved(money), x) for x in there if (money := x.money(own))]
    cheaper = max(priced, key=lambda pair: pair[0], default=None)
    return Advice(
        setup=setup,
        before=now,
        advice=tuple(good),
        together=tuple(_together(starts, good, hidden)),
        faster=faster if faster and faster.gain >= LEAST_GAIN else None,
        cheaper=cheaper[1] if cheaper and cheaper[0] >= LEAST_GAIN else None,
        rest=tuple(x for x in here if x not in good),
        prices=own,
    )


def _saved(money: tuple[Money, Money]) -> float:
    """The part of the money that is saved."""
    before, after = money
    return 1 - after.usd_per_million / before.usd_per_million


def _is_worth(x: Trial) -> bool:
    return x.gain >= LEAST_GAIN and x.fits


class _Starts:
    """What changes are compared with: the setup as it is. Where a change needs gpuir's derivatives,
    and the setup has torch's, it is the setup with gpuir's."""

    def __init__(self, bench: Bench, setup: Setup):
        self.bench, self.setup = bench, setup
        self.runs: dict[bool, Answer] = {}

    def of(self, changed: Setup) -> Answer:
        here = changed.is_derived_here
        if here not in self.runs:
            setup = self.setup
            if here != setup.is_derived_here:
                setup = setup.with_option("autodiff", "gpuir")
            self.runs[here] = check_runs(self.bench.run(setup))
            self.bench.done()
        return self.runs[here]


def _tried(starts: _Starts, changes: tuple[ModelChange, ...]) -> Trial:
    changed = starts.setup
    for change in changes:
        changed = change.apply(changed)
    before = starts.of(changed)
    try:
        after = check_runs(starts.bench.run(changed))
    except (ModelError, UsageError) as error:
        return Trial(changes=changes, setup=changed, before=before, after=None, refusal=error.what)
    finally:
        starts.bench.done()
    return Trial(changes, changed, before, after)


def _chosen(trials: Sequence[Trial]) -> Iterator[Trial]:
    """All, but of batches one that is larger and one that fills waves, of one padding the best
    step, and no stack that takes more effort than another for the same gain."""
    batches = [x for x in trials if x.changes[0].kind == "batch" and x.fits]
    larger = [x for x in batches if x.changes[0].aim == "more items"]
    waves = [x for x in batches if x.changes[0].aim == "whole waves"]
    most = max((x.speedup for x in larger), default=0.0)
    near = [x for x in larger if x.speedup >= (1 - NEAR) * most]
    yield from near[:1]
    yield from sorted(waves, key=lambda x: -x.gain)[:1]
    paddings: dict[str, Trial] = {}
    stacks: list[Trial] = []
    for x in trials:
        match x.changes[0].kind:
            case "batch":
                pass
            case "padding":
                aim = x.changes[0].aim
                if aim not in paddings or x.gain > paddings[aim].gain:
                    paddings[aim] = x
            case "stack":
                if all(x.gain >= y.gain + LEAST_GAIN for y in stacks):
                    stacks.append(x)
            case _:
                yield x
    yield from (*paddings.values(), *stacks)


def _together(starts: _Starts, good: Sequence[Trial], hidden: Sequence[Trial]) -> Iterator[Trial]:
    """The best two of different kinds, the best three: each that still gains over fewer. Then what
    gains nothing but with those: kernels in fewer bits, where the host was what they waited for."""
    best: dict[ChangeKind, ModelChange] = {}
    for x in good:
        best.setdefault(x.changes[0].kind, x.changes[0])
    last = good[0] if good else None
    for change in list(best.values())[1:TOGETHER]:
        assert last is not None, "there is a best one"
        trial = _tried(starts, (*last.changes, change))
        if trial.fits and trial.gain > last.gain:
            last = trial
            yield trial
    for change in (x.changes[0] for x in sorted(hidden, key=lambda x: -x.gain)):
        if last is None or change.kind in {c.kind for c in last.changes}:
            continue
        trial = _tried(starts, (*last.changes, change))
        if trial.fits and trial.speedup >= last.speedup / (1 - LEAST_GAIN):
            last = trial
            yield trial
