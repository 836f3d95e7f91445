"""The configurations of a kernel: those worth trying, what each takes, the best of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, overload

import numpy as np

from gpuir.cost import generated
from gpuir.cost import tile as library
from gpuir.cost.candidates import of_any
from gpuir.cost.generated.legal import is_legal
from gpuir.cost.generated.shortlist import Fastest, fastest_of
from gpuir.cost.legal import Legal, joined
from gpuir.cost.nest import PARTS, PLAIN, Tiles
from gpuir.cost.sheet import Number
from gpuir.cost.work import Work
from gpuir.ir.door import ArgumentKind, of_type, refuse, takes, whole
from gpuir.ir.errors import UsageError, nearest
from gpuir.ir.notes import BY_DIMENSION, Tile
from gpuir.targets.load import load_target
from gpuir.targets.target import Target
from gpuir.tune.kernels import KERNEL, TARGET, Kernel, own_tile


def _are_tiles(x: Any) -> bool:
    """Whether all of them are finite numbers, or arrays of them, under names or places."""
    if not isinstance(x, Tiles):
        return False
    by_name = (x.dims, *(getattr(x, part) for part in PARTS))
    if not all(isinstance(part, Mapping) for part in by_name):
        return False
    numbers = [n for part in by_name for n in part.values()]
    above = [*x.dims.values(), *x.threads.values(), *(getattr(x, name) for name in PLAIN)]
    return all(map(_is_number, (*numbers, *above))) and all(
        np.all(np.asarray(n) > 0) for n in above
    )


def _is_number(n: Any) -> bool:
    if isinstance(n, list | tuple):  # which formulas would multiply
        return False
    found = np.asarray(n)
    plain = found.dtype.kind in "biuf" and found.ndim <= 1
    return plain and bool(np.all(np.isfinite(found) & (found >= 0)))


TILES = ArgumentKind(
    "tiles of finite numbers, or arrays of them, extents and the like above 0",
    _are_tiles,
    "gpuir.Tiles({'m': 128.0, 'n': 128.0, 'k': 64.0}, stages=3.0)",
)
KERNELS = KERNEL | of_type((list, tuple), "a list of kernels")
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Predictions:
    """Seconds of many kernels or tiles: `low_s` to `high_s` holds 80 % of measurements. Those that
    are not legal are infinite, and `reasons` has why, a text for each."""

    time_s: Floats
    low_s: Floats
    high_s: Floats
    legal: Legal

    def __repr__(self) -> str:
        legal = np.isfinite(self.time_s)
        best = f", the fastest {self.time_s.min():.4g} s" if legal.any() else ""
        return f"<Predictions of {len(self):,}: {legal.sum():,} legal{best}>"

    def __len__(self) -> int:
        return len(self.time_s)

    @cached_property
    def reasons(self) -> list[str]:
        return self.legal.reasons

    @property
    def order(self) -> Any:
        """Places of the tiles, the fastest first; those that are not legal come last."""
        return np.argsort(self.time_s, kind="stable")


@takes(kernel=KERNEL, tiles=TILES, target=TARGET)
def predict(kernel: Kernel, tiles: Tiles | None = None, target: str | Target = "") -> Predictions:
    """Seconds of many kernels, many tiles, or pairs of them: numbers are arrays of one length, or
    the same for all.

    With `tiles` they are generated kernels, without the library's own; nests, which no library has,
    without `tiles` those under the fastest of their candidates. `target` may be left out
    where the kernel was made for one. Safe to call from several threads.
    """
    device = device_of(kernel, target)
    if tiles is None and kernel.work.kernel == "nest":
        return _own(kernel, device)
    if tiles is None:
        found = library.predict(kernel.work, device)
        count = len(found.time_s)
        return Predictions(
            found.time_s, found.low_s, found.high_s, Legal(np.ones(count, bool), (), device)
        )
    for d in (*tiles.dims, *(d for part in BY_DIMENSION for d in getattr(tiles, part))):
        if d not in kernel.work.extents:
            raise UsageError(
                f"the tiles have a dimension that {kernel.name} does not have",
                expected=", ".join(kernel.work.extents),
                found=d,
                fix=nearest(str(d), kernel.work.extents),
            )
    count = size(kernel.work, tiles)
    if not count:
        none = np.zeros(0)
        return Predictions(none, none, none, Legal(np.ones(0, bool), (), device))
    part = partial(_part, kernel.work, tiles, device)
    parts = library.in_parts(part, count)
    fits = joined([fit for _, fit in parts])
    time_s = np.where(fits.ok, np.concatenate([t for t, _ in parts]), np.inf)
    low_s, high_s = generated.interval(kernel.work, device, time_s)
    return Predictions(time_s, low_s, high_s, fits)


def _own(kernel: Kernel, target: Target) -> Predictions:
    """Seconds of nests, which no library has, each under the fastest of its candidates."""
    count = size(kernel.work, Tiles({}))
    each = [kernel.work.take(i) for i in range(count)]
    found = [
        predict(one, Tiles.of(own_tile(one, target), one.work), target)
        for one in (replace(kernel, work=work) for work in each)
    ]
    time_s, low_s, high_s = (
        np.concatenate([getattr(x, name) for x in found]) for name in ("time_s", "low_s", "high_s")
    )
    return Predictions(time_s, low_s, high_s, joined([x.legal for x in found]))


def _part(work: Work, tiles: Tiles, target: Target, rows: slice) -> tuple[Floats, Legal]:
    """Seconds of some of many kernels or tiles, and which are legal."""

    def some(n: Number) -> Number:
        return n[rows] if np.ndim(n) else n

    count = rows.stop - rows.start
    work, tiles = work.each(some), tiles.each(some)
    counted = generated.counts(work, tiles, target)
    found = generated.estimate(work, tiles, target, counted=counted)
    time_s = np.broadcast_to(found.time_s, (count,))
    return time_s, is_legal(work, tiles, target, count, counted)


Predict = Callable[[Kernel, "Tiles | None", "str | Target"], Predictions]  # as `predict`


def device_of(kernel: Kernel, target: str | Target) -> Target:
    """The target that is named, or else the kernel's own; UsageError where there is none."""
    if isinstance(target, Target):
        return target
    if target:
        return load_target(target)
    if kernel.target is None:
        raise UsageError(
            f"no target was given for the kernel {kernel.name!r}",
            fix="target='h100-sxm', here or in gpuir.kernel",
        )
    return kernel.target


def size(work: Work, tiles: Tiles) -> int:
    """How many kernels or tiles there are; UsageError where arrays are not of one length."""
    counts: set[int] = set()

    def note(n: Number) -> Number:
        if np.ndim(n):
            counts.add(np.shape(n)[0])
        return n

    work.each(note)
    tiles.each(note)
    if len(counts) > 1:
        raise UsageError(
            "kernels and tiles are arrays with different lengths",
            found=", ".join(map(str, sorted(counts))),
            fix="give them the same length; a plain number is used for all",
        )
    return counts.pop() if counts else 1


@takes(kernel=KERNEL, target=TARGET)
def candidates(kernel: Kernel, target: str | Target = "") -> Tiles:
    """The legal tiles worth trying for one kernel, as arrays."""
    device = device_of(kernel, target)
    found = of_any(kernel.work, device)
    count = size(kernel.work, found)
    spread = found.each(lambda n: np.broadcast_to(np.asarray(n, float), (count,)))
    return spread.take(np.flatnonzero(is_legal(kernel.work, spread, device, count).ok))


@dataclass(frozen=True)
class Ranked:
    """A configuration, what it is predicted to take, and between what 80 % of them lie."""

    tile: Tile
    time_s: float
    interval_s: tuple[float, float]


def ranked(
    kernel: Kernel, tile: Tile, target: str | Target = "", predict: Predict = predict
) -> Ranked:
    """What one tile is predicted to take; infinite where it is not legal."""
    found = predict(kernel, Tiles.of(tile, kernel.work), device_of(kernel, target))
    interval_s = float(found.low_s[0]), float(found.high_s[0])
    return Ranked(tile, float(found.time_s[0]), interval_s)


@overload
def heuristics(kernel: Kernel, target: str | Target = "", count: int = 8) -> list[Ranked]: ...
@overload
def heuristics(
    kernel: Sequence[Kernel], target: str | Target = "", count: int = 8
) -> list[list[Ranked]]: ...
@takes(kernel=KERNELS, target=TARGET, count=whole(1))
def heuristics(
    kernel: Kernel | Sequence[Kernel], target: str | Target = "", count: int = 8
) -> list[Ranked] | list[list[Ranked]]:
    """The `count` configurations that are predicted to be fastest, the fastest first; fewer where
    fewer are legal.

    Of a list of n kernels it gives n such lists, in their order. The numbers are those of one by
    one, to twelve digits; kernels that are alike but for their extents take less time together.
    They may be of any kinds, dtypes and targets, but each is one kernel: its extents are plain
    numbers, no arrays. UsageError says which kernel is at fault.

    Each has its `tile`, and seconds: `time_s`, with one launch, and `interval_s`, between which
    80 % of measurements are expected.
    """
    kernels = [kernel] if isinstance(kernel, Kernel) else kernel
    by_target: dict[Target, list[int]] = {}
    for i, one in enumerate(kernels):
        try:
            by_target.setdefault(_device_of_one(one, target), []).append(i)
        except UsageError as error:
            error.where = "" if one is kernel else f"kernel {i} of {len(kernels)}"
            raise
    found: dict[int, list[Ranked]] = {}
    for device, places in by_target.items():
        works = [kernels[i].work for i in places]
        for i, work, best in zip(places, works, fastest_of(works, device, count), strict=True):
            found[i] = _ranked(work, best, device)
    return found[0] if isinstance(kernel, Kernel) else [found[i] for i in range(len(kernels))]


def _device_of_one(kernel: Kernel, target: str | Target) -> Target:
    """The target of one kernel; UsageError for what is none, or many in one."""
    if not KERNEL.holds(kernel):
        raise refuse("heuristics", "kernel", KERNEL, kernel)
    if np.ndim(kernel.work.points):
        raise UsageError(
            f"{kernel.name} describes many kernels, by arrays",
            expected="one kernel, whose extents are numbers",
            fix="a list of kernels, as in gpuir.heuristics([one, other])",
        )
    return device_of(kernel, target)


def _ranked(work: Work, best: Fastest, target: Target) -> list[Ranked]:
    """Tiles with their seconds, and between what 80 % of measurements lie."""
    low_s, high_s = (n.tolist() for n in generated.interval(work, target, best.time_s))
    rows = zip(best.tiles, best.time_s.tolist(), low_s, high_s, strict=True)
    return [Ranked(tile, time_s, (low, high)) for tile, time_s, low, high in rows]
