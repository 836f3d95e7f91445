"""What a tuner chooses from: configurations by name, and what each is predicted to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from gpuir.cost.nest import PARTS, Tiles
from gpuir.cost.sheet import Number
from gpuir.ir.door import CALLED, ArgumentKind, named, of_type, takes
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.notes import Schedule
from gpuir.targets.load import load_target
from gpuir.targets.target import Target
from gpuir.tune import space
from gpuir.tune.correct import differences
from gpuir.tune.kernels import KERNEL, TARGET, Kernel
from gpuir.tune.space import Floats, Predictions
from gpuir.tune.templates import Template

Ints = np.ndarray[Any, np.dtype[np.int64]]
Allowed = Callable[[Mapping[str, Ints]], Any]

ANY = ArgumentKind("anything", lambda x: True)
TEMPLATE = of_type(Template, "a template", "gpuir.tune.published.TEMPLATES has some")
MOST = 1 << 22  # products of parameters that are gone through
FAILED = 0.5  # above the worst difference in logarithms, what counts for one that did not run
# What is not legal, or cannot be predicted, counts as so many times the slowest that can.
ILLEGAL = 4.0
LOOKED_AT = 1024  # the best predictions, that measurements are carried to
# How many standard deviations better than expected one is taken to be: how much is gone after what
# is not known. Assumed; of 0, 0.5 and 1 none is best on all measured sweeps.
BOLD = 0.5


@dataclass(frozen=True)
class Choices:
    """Configurations of one kernel on one target.

    `rows` has a configuration a row, with a column for each of `names`. Those that gpuir holds for
    not legal stay in: their prediction is infinite, and a tuner comes to them last.
    """

    kernel: Kernel
    target: Target
    names: tuple[str, ...]
    rows: Ints
    tiles: Tiles
    predictions: Predictions

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def parameters(self) -> dict[str, list[int]]:
        """The values of each parameter, in rising order."""
        return {n: np.unique(self.rows[:, i]).tolist() for i, n in enumerate(self.names)}

    @cached_property
    def _places(self) -> dict[tuple[int, ...], int]:
        return {tuple(row): i for i, row in enumerate(self.rows.tolist())}

    def find(self, values: Mapping[str, Any]) -> int | None:
        """The place of a configuration; None where it is not one of these."""
        missing = [n for n in self.names if n not in values]
        if missing:
            raise UsageError(
                f"a configuration of {self.kernel.name} has no {missing[0]!r}",
                expected=" ".join(self.names),
                found=" ".join(values),
                fix=nearest(missing[0], values),
            )
        return self._places.get(tuple(int(values[n]) for n in self.names))

    def values(self, place: int) -> dict[str, int]:
        """A configuration by name."""
        return dict(zip(self.names, self.rows[place].tolist(), strict=True))

    def schedule(self, values: Mapping[str, Any]) -> Schedule:
        """A configuration as the schedule of a graph of this kernel alone; `gpuir.show` of it is
        the text of a `.sched` file."""
        place = self.find(values)
        if place is None:
            raise UsageError(
                f"{self.kernel.name} has no such configuration",
                found=", ".join(f"{n}={v}" for n, v in values.items()),
                fix="use a configuration that the tuner was given",
            )
        name = self.kernel.name
        return Schedule(name, self.target.name, (((name,), self.tiles.note(place)),))

    @cached_property
    def log_s(self) -> Floats:
        """Logarithms of the predicted seconds, finite for all."""
        known = np.isfinite(self.predictions.time_s)
        if not known.any():
            return np.zeros(len(self))
        logs = np.log(np.where(known, self.predictions.time_s, 1.0))
        return np.where(known, logs, logs[known].max() + np.log(ILLEGAL))

    @cached_property
    def features(self) -> Floats:
        """By what configurations are alike: logarithms of their parameters."""
        return np.log2(np.maximum(self.rows, 0) + 1.0)

    def expected(self, measured: Mapping[int, float], at: Ints) -> tuple[Floats, Floats]:
        """Logarithms of the seconds of those at these places, and their standard deviations, after
        some were measured: seconds by place, infinite where one failed."""
        places = np.fromiter(measured, int, len(measured))
        seconds = np.fromiter(measured.values(), float, len(measured))
        ran = np.isfinite(seconds)
        if not ran.any():
            return self.log_s[at], np.zeros(len(at))
        found = np.log(seconds[ran]) - self.log_s[places[ran]]
        failed = np.full(np.sum(~ran), found.max() + FAILED)
        places, found = np.r_[places[ran], places[~ran]], np.r_[found, failed]
        mean, sd = differences(self.features[at], self.features[places], found)
        return self.log_s[at] + mean, sd

    def next(
        self,
        measured: Mapping[int, float],
        chance: np.random.Generator,
        share: float = 0.1,
        learns: bool = True,
    ) -> int | None:
        """The place to measure next: the one that may be fastest, or, in a `share` of the calls,
        any. None where all were measured.

        Who `learns` goes in turn by the prediction alone and by it with what was measured: the
        latter is quicker where the model is wrong in ways that configurations share, the former
        does not follow it where they do not.
        """
        left = np.setdiff1d(np.arange(len(self)), list(measured))
        if not len(left):
            return None
        if chance.random() < share:
            return int(chance.choice(left))
        first = left[np.argsort(self.log_s[left], kind="stable")[:LOOKED_AT]]
        mean, sd = self.expected(measured if learns and len(measured) % 2 else {}, first)
        return int(first[np.argmin(mean - BOLD * sd)])

    def only(self, places: Sequence[int]) -> Choices:
        """These configurations alone."""
        which = np.asarray(places, int)
        tiles = self.tiles.take(which)
        return _choices(self.kernel, self.target, self.names, self.rows[which], tiles)


CHOICES = of_type(Choices, "choices", "gpuir.tune.choices.choices(kernel, 'a100')")


@takes(template=TEMPLATE, launch=named(ANY), target=TARGET, allowed=CALLED)
def choices_of(
    template: Template,
    launch: Mapping[str, Any],
    target: str | Target,
    allowed: Allowed | None = None,
    **held: int,
) -> Choices:
    """Every configuration of a template for one launch, of those that it allows. `allowed`, given
    the columns by name, may rule out more; `held` are parameters that keep one value."""
    count = prod(len(v) for n, v in template.parameters.items() if n not in held)
    if not template.parameters or count > MOST:
        raise UsageError(
            f"{template.name}: there are {count:,} configurations, too many or none",
            expected=f"parameters with at most {MOST:,} combinations of values",
            fix="give fewer values: replace(template, parameters=...)",
        )
    try:
        kernel = template.kernel(launch)
    except KeyError as error:
        raise UsageError(
            f"the launch of {template.name} has no {error}",
            found=", ".join(map(str, launch)) or "nothing",
            fix=f"launch={{{error}: ...}}",
        ) from error
    columns = template.space(kernel, **held)
    names = tuple(columns)
    rows = np.stack(list(columns.values()), axis=1)
    if allowed is not None:
        rows = rows[np.broadcast_to(np.asarray(allowed(columns), bool), len(rows))]
    if not len(rows):
        raise UsageError(
            f"{template.name}: the function `allowed` rejects all configurations",
            fix="check `allowed`",
        )
    tiles = template.tiles({n: rows[:, i].astype(float) for i, n in enumerate(names)})
    return _choices(kernel, target, names, rows, tiles)


@takes(kernel=KERNEL, target=TARGET)
def choices(kernel: Kernel, target: str | Target) -> Choices:
    """What `gpuir.candidates` lists for a kernel, by the names of a tile's parts."""
    tiles = space.candidates(kernel, target)
    columns = {n: np.atleast_1d(np.asarray(c)).astype(np.int64) for n, c in _parts(tiles).items()}
    if not columns or not len(next(iter(columns.values()))):
        raise UsageError(
            f"no tile of {kernel.name} is legal on that target",
            fix="gpuir.predict(kernel, tiles, target).reasons says why tiles do not fit",
        )
    rows = np.stack(list(columns.values()), axis=1)
    return _choices(kernel, target, tuple(columns), rows, tiles)


def _choices(
    kernel: Kernel, target: str | Target, names: tuple[str, ...], rows: Ints, tiles: Tiles
) -> Choices:
    device = load_target(target) if isinstance(target, str) else target
    predictions = space.predict(kernel, tiles, device)
    return Choices(kernel, device, names, rows, tiles, predictions=predictions)


def _parts(tiles: Tiles) -> dict[str, Number]:
    """The numbers of tiles by the names that a schedule's text has for them, those that vary."""
    plain = ("stages", "warps", "split", "group", "unroll")
    found: dict[str, Number] = dict(tiles.dims) | {n: getattr(tiles, n) for n in plain}
    found |= {f"{p}.{of}": n for p in PARTS for of, n in getattr(tiles, p).items()}
    varied = {name: n for name, n in found.items() if len(np.unique(n)) > 1}
    return varied or dict(tiles.dims)
